"""Runs all layers of a one-token step as one kernel.

That needs an op set with such a kernel (`OpSet.one_token`), and layers that fit it
(`kernels.tracing.token_shape`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from slipstream.kernels.layouts import LayerTensors, TokenShape
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.tracing.token_shape import OTHER_RANK, LayerMatch, match_layers
from slipstream.kernels.weights.forms import (
    CodedLinear,
    Float4Linear,
    GroupedLinear,
    JoinedLinear,
    Linear,
    ScaledLinear,
)
from slipstream.model.decoder import Decoder
from slipstream.model.trace import HOST_EXPERTS, ROUTED_EXPERTS, SPLIT, STREAMED, trace
from slipstream.spec.reason import Reason


class OneTokenKernel:
    """A decoder whose layers run as one kernel.

    `layers` overwrites the first layer's input x [1, E] with the residual after the last layer.
    """

    def __init__(
        self,
        decoder: Decoder,
        layers: Callable[[Tensor, Sequence[LayerKV], AttentionMetadata], Tensor],
    ) -> None:
        self.decoder, self.layers = decoder, layers

    def forward(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        """token_ids [1] → hidden states [1, E] after the final norm. Writes keys and values to the
        cache."""
        x = self.layers(self.decoder.embedded(token_ids, meta), kv, meta)
        return self.decoder.finished(x, None)


def compile_one_token(decoder: Decoder) -> OneTokenKernel | Reason:
    """Compiles the decoder's kernel, or returns the reason why that is not possible.

    Call `count_experts` first, because the kernel stores its counters' addresses. With a partition
    all ranks must call this.
    """
    if decoder.routed_experts is not None:
        return ROUTED_EXPERTS
    part = decoder.partition
    if part is not None and (
        part.pipe is not None
        or part.sequence
        or part.shard.deals_requests
        or part.context is not None
    ):
        return SPLIT
    found = _matched(decoder)
    everywhere = part is None or part.group.least(not isinstance(found, Reason))[0]
    if isinstance(found, Reason):
        return found
    if not everywhere:
        return OTHER_RANK
    shape, layers = found
    tensors, first = [_tensors(layer) for layer in layers], layers[0]
    step = decoder.ops.one_token(
        shape, tensors, first.products["qkv"], first.cos_sin, first.group, _apart(layers)
    )
    return step if isinstance(step, Reason) else OneTokenKernel(decoder, step)


def _matched(decoder: Decoder) -> tuple[TokenShape, list[LayerMatch]] | Reason:
    if not decoder.layers:
        return Reason("the model has no layers here", notable=False)
    if decoder.ops.has_host_experts:
        return HOST_EXPERTS
    if decoder.stream is not None:
        return STREAMED
    if decoder.tap is not None:
        return Reason(
            "the one-token kernel does not return the states between layers that the draft head reads"
        )
    found = match_layers(trace(decoder).body)
    if isinstance(found, Reason):
        return found
    _, layers = found
    if not all(_as_it_is(w, layer.tensors["norm"]) for layer in layers for w in layer.plain):
        return Reason("the one-token kernel needs routers in the model's type")
    experts, products = _experts(layers), [w for layer in layers for w in layer.products.values()]
    if _apart(layers) is not None:
        products = [w for w in products if not any(w is x for x in experts)]
    if not (_alike(experts) and _alike(products)):
        return Reason("the one-token kernel needs all products in one format")
    return found


def _experts(layers: Sequence[LayerMatch]) -> list[Linear]:
    return [
        x.products[name] for x in layers if x.shape.experts is not None for name in ("up", "down")
    ]


def _apart(layers: Sequence[LayerMatch]) -> Linear | None:
    """One of the experts' weights if their format differs from all other linear layers' (4-bit
    floats next to 16 bits); otherwise None."""
    if isinstance(layers[0].products["qkv"], Float4Linear):
        return None
    return next((w for w in _experts(layers) if isinstance(w, Float4Linear)), None)


def _tensors(layer: LayerMatch) -> LayerTensors:
    """A layer's tensors and scalars, named as in the kernel."""
    found: dict[str, Any] = {
        "expert_counts": None,
        **layer.tensors,
        "window": layer.window,
        "table": layer.cache_group,
    }
    for name, w in layer.products.items():
        coded = isinstance(w, CodedLinear | JoinedLinear)
        found[name] = w if coded else w.weight
        found[f"{name}_scales"] = w.scales if isinstance(w, ScaledLinear | GroupedLinear) else None
        found[f"{name}_bias"] = w.bias
        if isinstance(w, Float4Linear):
            by_row = w.row_scales is not None or isinstance(layer.products["qkv"], Float4Linear)
            found |= {
                f"{name}_scales": w.exponents,
                f"{name}_factor": 1.0 if by_row else w.factor,
                f"{name}_rows": w.row_factors() if by_row else None,
            }
    return found


def _as_it_is(w: Linear, like: Tensor) -> bool:
    """Whether `w` is a dense weight of the model's dtype that the kernel can read in place."""
    return type(w) is Linear and w.weight.dtype == like.dtype and _lies_well(w)


def _alike(products: Sequence[Linear]) -> bool:
    """Whether all linear layers have the same format and a memory layout that the kernel can read."""

    def form(w: Linear) -> tuple[object, ...]:
        if isinstance(w, GroupedLinear):
            return type(w), w.weight.dtype, w.scales.dtype, w.group_size, w.codes, w.zeros is None
        if isinstance(w, CodedLinear | JoinedLinear):
            return ("GGUF",)
        size = w.group_size if isinstance(w, Float4Linear) else None
        return type(w), w.weight.dtype, size

    kinds = Linear, ScaledLinear, GroupedLinear, Float4Linear, CodedLinear, JoinedLinear
    return all(
        type(w) in kinds and form(w) == form(products[0]) and _lies_well(w) for w in products
    )


def _lies_well(w: Linear) -> bool:
    return w.weight.is_contiguous() and w.weight.data_ptr() % 16 == 0
