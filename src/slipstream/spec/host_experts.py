"""Mixtures of experts whose experts are kept in host memory and computed by the CPU, while a GPU computes the rest.

A token reads only a few experts of a mixture, so slow host memory is enough to keep up with a GPU (KTransformers;
llama.cpp's `--n-cpu-moe`).
"""

from __future__ import annotations

from slipstream.spec.model import ModelSpec, MoESpec


def mixtures(spec: ModelSpec) -> tuple[int, ...]:
    """Indices of the layers that have experts."""
    return tuple(i for i, layer in enumerate(spec.layers) if isinstance(layer.mlp, MoESpec))


def host_weights(spec: ModelSpec, num_layers: int) -> dict[str, int]:
    """Number of experts of each expert weight in the first `num_layers` mixtures, by our parameter
    names."""
    found: dict[str, int] = {}
    for i in mixtures(spec)[:num_layers]:
        own = spec.layers[i].mlp
        assert isinstance(own, MoESpec)
        found |= dict.fromkeys(
            (f"layers.{i}.experts.{part}.weight" for part in ("up", "down")), own.num_experts
        )
    return found
