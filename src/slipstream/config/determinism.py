"""Checks for `deterministic`: answers whose bits depend only on their request."""

from __future__ import annotations

from slipstream.config.settings import DeviceInfo, EngineArgs
from slipstream.errors import ConfigError
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import (
    AttentionSpec,
    CompressedAttentionSpec,
    LatentAttentionSpec,
    MoESpec,
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
    table: tuple[tuple[bool, str], ...] = (
        (
            args.kernels not in ("auto", own),
            f"kernels={args.kernels!r}, whose sums follow the number of rows; use {own!r}",
        ),
        (device.is_cuda and args.host_experts is not None, "experts on the host (host_experts)"),
        *(
            (
                device.is_cuda
                and (x.mlp.nearness > 0 or x.mlp.identity > 0 or not x.mlp.has_usual_choice),
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


def _chooses_keys(attention: object) -> bool:
    return isinstance(attention, CompressedAttentionSpec) or (
        isinstance(attention, AttentionSpec | LatentAttentionSpec) and attention.index is not None
    )
