"""Checks for `deterministic`: answers whose bits depend only on their request."""

from __future__ import annotations

from slipstream.config.settings import DeviceInfo, EngineArgs
from slipstream.errors import ConfigError
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import (
    CompressedAttentionSpec,
    GatedDeltaSpec,
    LatentAttentionSpec,
    MoESpec,
    RecurrentSpec,
    ShortConvSpec,
)


def check_deterministic(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, scheme: str | None
) -> None:
    """Raise ConfigError if the model or the kernels do not support `deterministic`. `scheme`: that
    of the weights."""
    if not args.deterministic:
        return
    own = "triton" if device.is_cuda else "cpu"
    layers = model.spec.all_layers
    has_experts = any(isinstance(x.mlp, MoESpec) for x in layers)
    table: tuple[tuple[bool, str], ...] = (
        (
            args.kernels not in ("auto", own),
            f"kernels={args.kernels!r}, whose sums follow the number of rows; use {own!r}",
        ),
        (
            device.is_cuda and args.host_experts is not None,
            "experts on the host (host_experts)",
        ),
        (
            device.is_cuda and any(x.recurrent and not _is_covered(x.recurrent) for x in layers),
            f"recurrent layers of {model.spec.family} on a GPU; a CPU covers them",
        ),
        (
            device.is_cuda and has_experts and model.gguf is not None,
            "experts in GGUF's types on a GPU; a CPU covers them",
        ),
        *(
            (
                device.is_cuda and (x.mlp.nearness > 0 or not x.mlp.has_usual_choice),
                f"the choice of experts of {model.spec.family} on a GPU",
            )
            for x in layers
            if isinstance(x.mlp, MoESpec)
        ),
        (
            device.is_cuda and any(_chooses_keys(x.attention) for x in layers),
            "attention to chosen or compressed keys on a GPU, whose kernels follow the step's longest sequence",
        ),
    )
    for refused, text in table:
        if refused:
            raise ConfigError(
                f"deterministic=True does not cover {text}; or leave it out", field="deterministic"
            )


def _is_covered(recurrent: RecurrentSpec) -> bool:
    return isinstance(recurrent, GatedDeltaSpec | ShortConvSpec)


def _chooses_keys(attention: object) -> bool:
    return isinstance(attention, CompressedAttentionSpec) or (
        isinstance(attention, LatentAttentionSpec) and attention.index is not None
    )
