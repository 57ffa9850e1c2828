"""Mixtures whose experts stay in the host's memory and are computed there, next to a GPU.

A token reads few of a mixture's experts. So a host with slow memory keeps up with a GPU that does
everything else (KTransformers; llama.cpp's `--n-cpu-moe`).
"""

from __future__ import annotations

from slipstream.spec.model import ModelSpec, MoESpec


def mixtures(spec: ModelSpec) -> tuple[int, ...]:
    """The layers that have experts."""
    return tuple(i for i, layer in enumerate(spec.layers) if isinstance(layer.mlp, MoESpec))


def host_weights(spec: ModelSpec, num_layers: int) -> dict[str, int]:
    """The experts' weights of the first `num_layers` mixtures, by our names, with the number of
    experts of each."""
    found: dict[str, int] = {}
    for i in mixtures(spec)[:num_layers]:
        own = spec.layers[i].mlp
        assert isinstance(own, MoESpec)
        found |= dict.fromkeys(
            (f"layers.{i}.experts.{part}.weight" for part in ("up", "down")), own.num_experts
        )
    return found
