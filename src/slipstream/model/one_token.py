"""All layers of a step of one token as one kernel, where the op set has one (`OpSet.one_token`) and the layers fit it
(`kernels.token_shape`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.token_shape import LayerMatch, match_layers
from slipstream.kernels.weights import GroupedLinear, Linear, ScaledLinear
from slipstream.model.decoder import Decoder
from slipstream.model.trace import trace
from slipstream.spec.reason import Reason


class OneTokenKernel:
    """`layers`: x [1, E], what the first layer reads → the residual after the last, in place."""

    def __init__(
        self, decoder: Decoder, layers: Callable[[Tensor, Sequence[LayerKV], AttentionMetadata], Tensor]
    ) -> None:
        self.decoder, self.layers = decoder, layers

    def forward(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        """token_ids [1] → hidden states [1, E] after the final norm; keys and values are in the cache."""
        x = self.layers(self.decoder.embedded(token_ids, meta), kv, meta)
        return self.decoder.finished(x, None)


def compile_one_token(decoder: Decoder) -> OneTokenKernel | Reason:
    """The decoder's kernel, or what the kernel lacks. Call it again after `count_experts`, which says where to count."""
    if not decoder.layers:
        return Reason("the model has no layers here", notable=False)
    if decoder.tap is not None:
        return Reason("the one-token kernel shows no states between layers, which the draft head reads")
    if len(decoder.spec.cache_groups) > 1:
        return Reason("the one-token kernel has one block table, and the model's layers have several")
    found = match_layers(trace(decoder).body)
    if isinstance(found, Reason):
        return found
    shape, layers = found
    products = [w for layer in layers for w in layer.products.values()]
    if not all(_as_it_is(w, layer.tensors["norm"]) for layer in layers for w in layer.plain):
        return Reason("the one-token kernel reads routers in the model's type")
    if not _alike(products):
        return Reason("the one-token kernel reads products that are all held alike")
    step = decoder.ops.one_token(shape, [_tensors(layer) for layer in layers], products[0], layers[0].cos_sin)
    return step if isinstance(step, Reason) else OneTokenKernel(decoder, step)


def _tensors(layer: LayerMatch) -> Mapping[str, Tensor | None]:
    """A layer's tensors by the kernel's names."""
    found: dict[str, Any] = {"expert_counts": None, **layer.tensors}
    for name, w in layer.products.items():
        found[name] = w.weight
        found[f"{name}_scales"] = w.scales if isinstance(w, ScaledLinear | GroupedLinear) else None
        found[f"{name}_bias"] = w.bias
    return found


def _as_it_is(w: Linear, like: Tensor) -> bool:
    """Whether it is a plain product of the model's type that the kernel can read where it lies."""
    return type(w) is Linear and w.weight.dtype == like.dtype and _lies_well(w)


def _alike(products: Sequence[Linear]) -> bool:
    """Whether all of them have one form and lie in memory as the kernel reads them."""

    def form(w: Linear) -> tuple[object, ...]:
        if isinstance(w, GroupedLinear):
            return type(w), w.weight.dtype, w.scales.dtype, w.group_size, w.codes, w.zeros is None
        return type(w), w.weight.dtype

    first = products[0]
    return type(first) in (Linear, ScaledLinear, GroupedLinear) and all(
        form(w) == form(first) and _lies_well(w) for w in products
    )


def _lies_well(w: Linear) -> bool:
    return w.weight.is_contiguous() and w.weight.data_ptr() % 16 == 0
