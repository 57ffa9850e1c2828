"""Coverage of `deterministic`: answers whose bits depend on nothing but their request."""

from __future__ import annotations

from slipstream.config.settings import DeviceInfo, EngineArgs
from slipstream.errors import ConfigError
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import LatentAttentionSpec, MoESpec
from slipstream.spec.scheme import SCHEMES


def check_deterministic(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, scheme: str | None
) -> None:
    """Raise ConfigError if `deterministic` does not cover the model or the kernels. `scheme`: the
    weights'."""
    if not args.deterministic:
        return
    own = "triton" if device.is_cuda else "cpu"
    layers = model.spec.all_layers
    scheme = args.quantization or scheme
    table: tuple[tuple[bool, str], ...] = (
        (
            args.kernels not in ("auto", own),
            f"kernels={args.kernels!r}, whose sums follow the number of rows; use {own!r}",
        ),
        (
            device.is_cuda and model.spec.is_recurrent,
            "recurrent layers on a GPU, where chunks of a prompt round otherwise than single tokens",
        ),
        (
            device.is_cuda and args.host_experts is not None,
            "experts on the host (host_experts)",
        ),
        *(
            (device.is_cuda and refused, f"{text} on a GPU")
            for x in layers
            if isinstance(x.mlp, MoESpec)
            for refused, text in _experts(x.mlp, model, scheme)
        ),
        (
            device.is_cuda and any(isinstance(x.attention, LatentAttentionSpec) for x in layers),
            "latent attention on a GPU",
        ),
    )
    for refused, text in table:
        if refused:
            raise ConfigError(
                f"deterministic=True does not cover {text}; or leave it out", field="deterministic"
            )


def _experts(
    spec: MoESpec, model: ModelDescription, scheme: str | None
) -> tuple[tuple[bool, str], ...]:
    """Experts that a GPU multiplies otherwise for few pairs of tokens and experts than for many."""
    formats = frozenset({"nvfp4", "mxfp4"})
    kept = model.native_formats(formats)
    floats = scheme is not None and SCHEMES[scheme].name in formats
    return (
        (model.gguf is not None, "experts in GGUF's types"),
        (floats or any(".experts." in name for name in kept), "experts in 4-bit floats"),
        (
            spec.nearness > 0 or not spec.has_usual_choice,
            f"the choice of experts of {model.spec.family}",
        ),
    )
