"""Which decoders run a step of one token as one kernel, and what that kernel is told of them (`OpSet.one_token`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import MLAShape, TokenShape
from slipstream.kernels.weights import GroupedLinear, Linear, ScaledLinear
from slipstream.spec.model import (
    AttentionKind,
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    MoESpec,
    NormSpec,
    ParallelBlock,
    QKNormSpec,
    RopeSpec,
    SequentialBlock,
)
from slipstream.spec.reason import Reason

if TYPE_CHECKING:
    from slipstream.model.decoder import Attention, Decoder, LatentAttention, MoE

OneTokenKernel = Any


def compile_one_token(decoder: Decoder) -> OneTokenKernel | Reason:
    return Reason("inside the decoder", notable=False)


OneToken = Callable[[Tensor, Sequence[LayerKV], AttentionMetadata], Tensor]


def one_token_step(decoder: Decoder) -> OneToken | None:
    """x [1, E], what the first layer reads → the residual after the last. None: the layers differ, or have what the kernel
    does not (windows, biases by distance, norms after a branch), or the op set has no such kernel."""
    from slipstream.model.decoder import MoE

    spec = decoder.spec
    if spec.encoder is not None or spec.is_encoder or not decoder.layers or (shape := shape_of(spec.layers)) is None:
        return None
    layers: list[Mapping[str, Tensor | None]] = []
    products: list[Linear] = []
    for layer in decoder.layers:
        attention, mlp, norms = layer.attention, layer.mlp, layer.norms
        first = norms["norm" if shape.parallel else "pre_attention"]
        second = norms.get("mlp_norm" if shape.parallel else "pre_mlp")
        of_attention, small = _attention(attention)
        own: dict[str, Linear] = {**of_attention, "up": mlp.up, "down": mlp.down}
        tensors: dict[str, Tensor | None] = {
            "norm": first.weight,
            "norm_bias": first.bias,
            "mlp_norm": None if second is None else second.weight,
            "mlp_norm_bias": None if second is None else second.bias,
            **small,
            "expert_counts": layer.expert_counts,
        }
        if isinstance(mlp, MoE):
            if not router_as_it_is(mlp, first.weight):
                return None
            tensors |= {"router": mlp.router.weight, "router_bias": mlp.router.bias, "correction": mlp.experts.correction}
            if mlp.shared is not None:
                own |= {"shared_up": mlp.shared.up, "shared_down": mlp.shared.down}
            if mlp.shared_weight is not None:
                tensors["shared_weight"] = mlp.shared_weight.weight
        for name, w in own.items():
            tensors[name] = w.weight
            tensors[f"{name}_scales"] = w.scales if isinstance(w, ScaledLinear | GroupedLinear) else None
            tensors[f"{name}_bias"] = w.bias
        layers.append(tensors)
        products += own.values()
    if not alike(products):
        return None
    for found in ([x for x in layers if ("router" in x) == mixture] for mixture in (False, True)):
        if any(x.keys() != found[0].keys() or _there(x) != _there(found[0]) for x in found):
            return None
    return decoder.ops.one_token(shape, layers, products[0], decoder.layers[0].attention.cos_sin)


def _attention(attention: Attention | LatentAttention) -> tuple[dict[str, Linear], dict[str, Tensor | None]]:
    """Its products, and what else it reads."""
    from slipstream.model.decoder import Attention

    if isinstance(attention, Attention):
        heads = attention.heads
        return {"qkv": attention.qkv, "out": attention.out}, {"q_norm": heads.q_norm, "k_norm": heads.k_norm}
    products = {"qkv": attention.q, "latent": attention.latent, "out": attention.out}
    return products, {"k_norm": attention.k_norm, "keys": attention.keys, "values": attention.values}


def router_as_it_is(mlp: MoE, like: Tensor) -> bool:
    """Whether the router, and the shared expert's weight, are plain products of the model's type."""
    return all(
        type(w) is Linear and w.weight.dtype == like.dtype and w.weight.is_contiguous() and w.weight.data_ptr() % 16 == 0
        for w in (mlp.router, mlp.shared_weight)
        if w is not None
    )


def _there(tensors: Mapping[str, Tensor | None]) -> tuple[bool, ...]:
    return tuple(t is not None for t in tensors.values())


def alike(products: Sequence[Linear]) -> bool:
    """Whether all of them have one form and lie in memory as a kernel reads them best."""

    def form(w: Linear) -> tuple[object, ...]:
        if isinstance(w, GroupedLinear):
            return type(w), w.weight.dtype, w.scales.dtype, w.group_size, w.codes, w.zeros is None
        return type(w), w.weight.dtype

    return type(products[0]) in (Linear, ScaledLinear, GroupedLinear) and all(
        form(w) == form(products[0]) and w.weight.is_contiguous() and w.weight.data_ptr() % 16 == 0 for w in products
    )


def _plain(a: AttentionKind) -> bool:
    """Whether the kernel knows such attention."""
    if isinstance(a, LatentAttentionSpec):
        return a.q_rank is None and not a.bias
    rotated = a.position is None or isinstance(a.position, RopeSpec)
    bare = a.window is None and a.softcap is None and a.clip_qkv is None and not a.sinks and a.causal
    return rotated and bare and (a.qk_norm is None or a.qk_norm.over == "head")


def shape_of(layers: Sequence[LayerSpec]) -> TokenShape | None:
    layer = layers[0]
    if any(dataclasses.replace(other, mlp=layer.mlp) != layer for other in layers):
        return None
    if (mlps := mlps_of(layers)) is None:
        return None
    a, block, (dense, experts) = layer.attention, layer.block, mlps
    m = dense if experts is None else experts.expert
    assert m is not None
    if not _plain(a) or not isinstance(m.activation, str):
        return None
    if layer.residual_scale != 1.0 or layer.cross is not None:
        return None
    second: NormSpec | None
    if isinstance(block, SequentialBlock):
        if set(layer.norms) != {"pre_attention", "pre_mlp"}:
            return None
        first, second = layer.norms["pre_attention"], layer.norms["pre_mlp"]
    elif isinstance(block, ParallelBlock):
        first, second = layer.norms["norm"], layer.norms.get("mlp_norm")
    else:
        return None
    for own in (first, second or first):
        if own.kind not in ("rms", "layer") or dataclasses.replace(own, eps=first.eps) != first:
            return None
    latent = None
    qk = QKNormSpec(over="head", eps=0.0)
    if isinstance(a, LatentAttentionSpec):
        latent = MLAShape(nope_dim=a.nope_dim, rotary_dim=a.rotary_dim, rank=a.kv_rank, eps=a.eps)
    else:
        qk = a.qk_norm or qk
    return TokenShape(
        hidden_size=first.size,
        intermediate_size=0 if dense is None else dense.intermediate_size,
        num_heads=a.num_heads,
        num_kv_heads=a.num_heads if isinstance(a, LatentAttentionSpec) else a.num_kv_heads,
        head_dim=a.value_dim if isinstance(a, LatentAttentionSpec) else a.head_dim,
        latent=latent,
        gated=m.gated,
        activation=m.activation,
        parallel=isinstance(block, ParallelBlock),
        norm="rms" if first.kind == "rms" else "layer",
        norm_eps=first.eps,
        norm_offset=first.weight_offset,
        mlp_norm=second is not None,
        mlp_norm_eps=(second or first).eps,
        interleaved=isinstance(a.position, RopeSpec) and a.position.style == "interleaved",
        qk_eps=qk.eps,
        qk_offset=qk.weight_offset,
        scale=a.scale,
        experts=experts,
    )


def mlps_of(layers: Sequence[LayerSpec]) -> tuple[DenseSpec | None, MoESpec | None] | None:
    """The dense MLP and the mixture that there are; None if there are two of a kind, or a mixture and a dense one that are not
    alike: all have one activation then, and no biases."""
    dense = dict.fromkeys(layer.mlp for layer in layers if isinstance(layer.mlp, DenseSpec))
    mixtures = dict.fromkeys(layer.mlp for layer in layers if isinstance(layer.mlp, MoESpec))
    if len(dense) > 1 or len(mixtures) > 1:
        return None
    plain, experts = next(iter(dense), None), next(iter(mixtures), None)
    if experts is not None:
        one = experts.expert
        for m in (one, *dense, *([] if experts.shared is None else [experts.shared.mlp])):
            if m.bias or (m.activation, m.gated) != (one.activation, one.gated):
                return None
    return plain, experts
