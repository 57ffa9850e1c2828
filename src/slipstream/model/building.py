"""Builds a layer (`model.layers`) from its spec and its parameters, in the layout of an op set. No
torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.kernels.layouts import (
    AttentionParams,
    BlockIndexParams,
    CompressedParams,
    Experts,
    HyperParams,
    IndexParams,
    MLAParams,
    NormParams,
    QKVLayout,
)
from slipstream.model.layers.attention import (
    Attention,
    BlockSparseAttention,
    CompressedAttention,
    CrossAttention,
    Index,
    LatentAttention,
)
from slipstream.model.layers.feed_forward import MLP, InputGate, MoE
from slipstream.model.layers.layer import Layer, Partition
from slipstream.model.layers.streams import HyperStreams, OwnInput, Recall, Shortcut, Streams
from slipstream.model.recurrent import build_recurrent, constant
from slipstream.spec.layers import LAMBDAS
from slipstream.spec.model import (
    Activation,
    AttentionSpec,
    BlockIndexSpec,
    CompressedAttentionSpec,
    DenseSpec,
    DisentangledSpec,
    HyperSpec,
    IndexSpec,
    InputGateSpec,
    LatentAttentionSpec,
    LayerSpec,
    MoESpec,
    NormSpec,
    OwnInputSpec,
    RecallSpec,
    RopeSpec,
    ShortcutSpec,
    StreamsSpec,
    Xielu,
)
from slipstream.spec.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.ops import OpSet
    from slipstream.kernels.positions import PositionTables
    from slipstream.kernels.weights.forms import Linear


def build_layer(
    spec: LayerSpec,
    parameters: MutableMapping[str, Tensor],
    ops: OpSet,
    tables: PositionTables,
    *,
    name: str = "",
    scheme: Scheme | None = None,
    products: MutableMapping[str, Linear] | None = None,
    partition: Partition | None = None,
) -> Layer:
    """Builds a layer of a `Decoder` from the `parameters` whose names begin with `name`, and
    removes them from the mapping.

    With a `partition`, `spec` and the parameters are one rank's.
    """
    products = {} if products is None else products
    of_experts, scheme = scheme, None if scheme is not None and scheme.experts_only else scheme
    ranks = None if partition is None or partition.shard.size == 1 else partition.group
    deals_requests = partition is not None and partition.shard.deals_requests
    summed_ranks = None if deals_requests else ranks
    context = None if partition is None else partition.context

    def linear(stem: str, by: Scheme | None = scheme) -> Linear:
        return build_linear(f"{name}{stem}", parameters, ops, by, products)

    def dense(s: DenseSpec, stem: str) -> MLP:
        s = dataclasses.replace(s, activation=_learned(s.activation, f"{name}{stem}", parameters))
        group = summed_ranks if s.sparsity else None
        norm = None
        if s.down_norm is not None:
            norm = build_norm(s.down_norm, f"{name}{stem}.down_norm", parameters, tables)
        return MLP(s, linear(f"{stem}.up"), linear(f"{stem}.down"), group, norm)

    def mixture(s: MoESpec) -> MoE:
        up, down = (
            _experts(
                f"{name}experts.{part}", parameters, ops, of_experts, products, s.num_local_experts
            )
            for part in ("up", "down")
        )
        return MoE(
            s,
            linear("router", None),
            Experts(
                up,
                down,
                s,
                parameters.pop(f"{name}correction.weight", None),
                parameters.pop(f"{name}expert_scales.weight", None),
            ),
            dense(s.shared.mlp, "shared") if s.shared is not None else None,
            linear("shared_weight", None) if s.shared is not None and s.shared.weighed else None,
            None if s.latent is None else (linear("experts_in", None), linear("experts_out", None)),
            parameters.pop(f"{name}expert_table.weight", None),
        )

    def spread_heads(num_heads: int, width: int, like: Any) -> Linear:
        """Matrix of zeros and ones that copies a head's gate to each of its `width` outputs."""
        ones = np.repeat(np.eye(num_heads, dtype=np.float32), width, 0)
        parameters[f"{name}attention.spread.weight"] = constant(like, ones, own_type=True)
        return linear("attention.spread", None)

    def attention(s: AttentionSpec) -> Attention:
        qkv, out = linear("attention.qkv"), linear("attention.out")
        norms: list[Any] = [parameters.pop(f"{name}attention.{x}_norm.weight", None) for x in "qk"]
        biases = [parameters.pop(f"{name}attention.{x}_norm.bias", None) for x in "qk"]
        cos_sin, slopes, bias = tables.of(
            s, parameters.pop(f"{name}attention.distances.weight", None)
        )
        of_heads = s.qk_norm is not None and s.qk_norm.over == "head"
        if s.qk_norm is not None and not s.qk_norm.learned:
            norms = [tables.ones(s.head_dim)] * 2
        if s.kv_from is not None:  # the layer has no keys of its own
            norms[1] = norms[0]
        heads = _heads(s, cos_sin, *(norms if of_heads else ()))
        params = AttentionParams(
            scale=s.scale,
            window=s.window,
            softcap=s.softcap,
            alibi_slopes=slopes,
            sinks=parameters.pop(f"{name}attention.sinks.weight", None),
            distance_bias=bias,
            causal=s.causal,
        )
        q_norm, k_norm = (None, None) if of_heads else norms
        if s.qk_norm is not None and s.qk_norm.over == "layer":
            q_norm, k_norm = (
                NormParams(kind="layer", weight=w, bias=b, eps=s.qk_norm.eps)
                for w, b in zip(norms, biases, strict=True)
            )
        scale, where, spread = tables.query_scale(s.query_scale), None, None
        if isinstance(s.position, DisentangledSpec):
            own = {x: linear(f"attention.{x}", None) for x in s.position.products}
            where = tables.disentangled(ops, s, s.position, qkv, own)
        if s.gated == "head":
            like = norms[0] if norms[0] is not None else next(iter(parameters.values()))
            spread = spread_heads(s.num_heads, s.head_dim, like)
        norm = s.out_norm and build_norm(
            s.out_norm, f"{name}attention.out_norm", parameters, tables
        )
        lambdas: tuple[Any, ...] = ()
        if s.differential is not None:
            lambdas = tuple(parameters.pop(f"{name}attention.{x}.weight") for x in LAMBDAS)
        more: Any = dict(
            lambdas=lambdas, disentangled=where, context=context, spread=spread, out_norm=norm
        )
        if s.index is not None:
            more |= dict(index=linear("attention.index", None), chosen=block_index(s.index))
        kind = Attention if s.index is None else BlockSparseAttention
        return kind(s, qkv, out, heads, params, q_norm, k_norm, scale, summed_ranks, **more)

    def cross(s: AttentionSpec) -> CrossAttention:
        q, kv, out = (linear(f"cross.{part}") for part in ("q", "kv", "out"))
        return CrossAttention(
            s, q, kv, out, _heads(s), AttentionParams(scale=s.scale, causal=False)
        )

    def latent(s: LatentAttentionSpec) -> LatentAttention:
        keys, values = ops.pack_latent(parameters.pop(f"{name}attention.expand.weight"), s)
        q_norm, k_norm = (
            None if weight is None else NormParams(kind="rms", weight=weight, eps=s.eps)
            for weight in (parameters.pop(f"{name}attention.{x}_norm.weight", None) for x in "qk")
        )
        assert k_norm is not None
        if s.latent_gain != 1.0:
            k_norm = dataclasses.replace(k_norm, weight=k_norm.weight * s.latent_gain)
        params = MLAParams(
            keys=keys,
            values=values,
            norm=k_norm,
            cos_sin=tables.rope(s.position),
            interleaved=s.position.style == "interleaved",
            scale=s.scale,
        )
        q_latent = linear("attention.q_latent") if s.q_rank is not None else None
        q, latent, out = (linear(f"attention.{part}") for part in ("q", "latent", "out"))
        scale = tables.query_scale(s.query_scale)
        found = index(s.index) if isinstance(s.index, IndexSpec) else None
        gates: Any = ()
        if s.gated is True:
            gates = (
                linear("attention.gate", None),
                spread_heads(s.num_heads, s.value_dim, k_norm.weight),
            )
        return LatentAttention(
            *(s, q_latent, q, latent, out, q_norm, params, scale, found, summed_ranks, context),
            *gates,
        )

    def compressed(s: CompressedAttentionSpec) -> CompressedAttention:
        def take(part: str) -> Any:
            return parameters.pop(f"{name}attention.{part}.weight", None)

        params = CompressedParams(
            spec=s,
            norm=take("k_norm"),
            sinks=take("sinks"),
            cos_sin=tables.rope(s.position),
            **{x: take(x) for x in ("entry_norm", "index_norm", "gate_bias", "index_gate_bias")},
        )
        q_latent, q, latent, out = (
            linear(f"attention.{part}") for part in ("q_latent", "q", "latent", "out")
        )
        index: Any = tuple(
            linear(f"attention.index_{x}", None) for x in ("q", "weights")[: 2 * s.overlaps]
        )
        return CompressedAttention(
            s,
            q_latent,
            q,
            latent,
            take("out_parts"),
            out,
            NormParams(kind="rms", weight=take("q_norm"), eps=s.eps),
            params,
            linear("attention.compress", None) if s.rate else None,
            index or None,
        )

    def index_heads(s: IndexSpec | BlockIndexSpec, **norms: Any) -> QKVLayout:
        return QKVLayout(
            num_heads=s.num_heads,
            num_kv_heads=1,
            head_dim=s.head_dim,
            cos_sin=tables.rope(s.position),
            interleaved=s.position.style == "interleaved",
            **norms,
        )

    def block_index(s: BlockIndexSpec) -> BlockIndexParams:
        heads = index_heads(
            s,
            norm_eps=s.eps,
            norm_offset=s.weight_offset,
            q_norm=parameters.pop(f"{name}attention.index_q_norm.weight"),
            k_norm=parameters.pop(f"{name}attention.index_k_norm.weight"),
        )
        return BlockIndexParams(spec=s, heads=heads)

    def index(s: IndexSpec) -> Index:
        q, k, weights = (linear(f"attention.index_{x}", None) for x in ("q", "k", "weights"))
        norm = NormSpec(kind="layer", size=s.head_dim, eps=s.eps)
        return Index(
            q,
            k,
            weights,
            build_norm(norm, f"{name}attention.index_norm", parameters),
            IndexParams(heads=index_heads(s), top_k=s.top_k),
        )

    def own_input(s: OwnInputSpec) -> OwnInput:
        gate, project = linear("own_input.gate", None), linear("own_input.project", None)
        return OwnInput(s, gate, project, build_norm(s.norm, f"{name}own_input.norm", parameters))

    def input_gates(s: InputGateSpec) -> dict[str, InputGate]:
        return {
            part: InputGate(*(linear(f"input_gate.{part}_{x}", None) for x in ("down", "up")))
            for part in s.parts
        }

    def hyper(s: HyperSpec) -> HyperStreams:
        def of(part: str) -> HyperParams:
            own: Any = {
                x: parameters.pop(f"{name}hyper.{part}_{x}.weight")
                for x in ("product", "base", "scale")
            }
            own |= dict(count=s.count, iterations=s.iterations, eps=s.eps, norm_eps=s.norm_eps)
            return HyperParams(**own)

        return HyperStreams(s, of("attention"), of("mlp"), of("last") if s.closes else None)

    def streams(s: StreamsSpec) -> Streams:
        parts = ("router", "predict", "correct", "narrow", "wide")
        made: Any = {x: linear(f"streams.{x}", None) for x in parts}

        def apart(part: str) -> tuple[Linear, ...]:
            """Splits the weight of several streams' linear layers, which is stored as one."""
            whole: Any = parameters.pop(f"{name}streams.{part}.weight")
            each = whole.shape[0] // (s.count - 1)
            for i in range(s.count - 1):
                parameters[f"{name}streams.{part}.{i}.weight"] = whole[i * each : (i + 1) * each]
            return tuple(linear(f"streams.{part}.{i}", None) for i in range(s.count - 1))

        made["opening"] = apart("open") if s.opens else ()
        made["closing"] = apart("close") if s.closes else ()
        for x, norm in (("norm", s.norm), ("low_rank_norm", s.low_rank_norm)):
            made[x] = build_norm(norm, f"{name}streams.{x}", parameters)
        return Streams(s, scale=parameters.pop(f"{name}streams.scale.weight"), **made)

    norms = {
        key: build_norm(n, f"{name}{key}", parameters, tables) for key, n in spec.norms.items()
    }
    mlp: MLP | MoE | None = None
    if spec.mlp is not None:
        mlp = dense(spec.mlp, "mlp") if isinstance(spec.mlp, DenseSpec) else mixture(spec.mlp)
    attended: Attention | LatentAttention | CompressedAttention | None = None
    match spec.attention:
        case CompressedAttentionSpec() as own:
            attended = compressed(own)
        case LatentAttentionSpec() as own:
            attended = latent(own)
        case AttentionSpec() as own:
            attended = attention(own)
    residuals: Streams | HyperStreams | Recall | Shortcut | None = None
    if spec.streams is not None:
        s = spec.streams
        match s:
            case HyperSpec():
                residuals = hyper(s)
            case RecallSpec():
                join = linear("streams.join", None) if s.joins else None
                residuals = Recall(s, build_norm(s.norm, f"{name}streams.norm", parameters), join)
            case StreamsSpec():
                residuals = streams(s)
            case ShortcutSpec():
                residuals = Shortcut(s)
    recurrent = None
    if spec.recurrent is not None:
        recurrent = build_recurrent(spec.recurrent, parameters, name, linear, summed_ranks, context)
    crossed = cross(spec.cross) if spec.cross is not None else None
    return Layer(
        spec,
        attended,
        mlp,
        norms,
        crossed,
        recurrent,
        own_input=None if spec.own_input is None else own_input(spec.own_input),
        input_gates={} if spec.input_gate is None else input_gates(spec.input_gate),
        scalar=parameters.pop(f"{name}scalar.weight", None),
        streams=residuals,
        attention_ranks=summed_ranks,
        mlp_ranks=summed_ranks,
        expert_ranks=ranks if deals_requests else None,
        shares_tokens=partition is not None
        and partition.sequence
        and (context is None or summed_ranks is not None),
        context=context,
    )


def build_norm(
    spec: NormSpec,
    name: str,
    parameters: MutableMapping[str, Tensor],
    tables: PositionTables | None = None,
) -> NormParams:
    """Builds a norm. A norm without learned weights gets ones, shared through `tables`."""
    if not spec.learned:
        assert tables is not None
        return NormParams(kind=spec.kind, weight=tables.ones(spec.size), eps=spec.eps)
    weight, bias = parameters.pop(f"{name}.weight"), parameters.pop(f"{name}.bias", None)
    weight = weight if spec.gain == 1.0 else weight * spec.gain
    return NormParams(
        kind=spec.kind, weight=weight, eps=spec.eps, bias=bias, offset=spec.weight_offset
    )


def build_linear(
    name: str,
    parameters: MutableMapping[str, Tensor],
    ops: OpSet,
    scheme: Scheme | None,
    products: MutableMapping[str, Linear],
) -> Linear:
    return _product(
        name,
        parameters,
        products,
        ops.pack_weight,
        lambda w, bias: ops.quantize_weight(w, bias, scheme),
    )


def _learned(
    activation: Activation, name: str, parameters: MutableMapping[str, Tensor]
) -> Activation:
    """The activation with a layer's learned parameters, which are stored as inputs of a softplus."""
    if not isinstance(activation, Xielu):
        return activation
    stored: list[Any] = [parameters.pop(f"{name}.{x}.weight") for x in ("positive", "negative")]
    if not hasattr(stored[0], "item"):  # placeholders of a model without weights
        return activation
    positive, negative = (math.log1p(math.exp(min(float(x.item()), 80.0))) for x in stored)
    return Xielu(positive=positive, negative=negative + 0.5)


def _heads(
    s: AttentionSpec,
    cos_sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
) -> QKVLayout:
    """Layout of a layer's heads, with its rotary table and the weights of its q and k norms, if
    any."""
    return QKVLayout(
        num_heads=s.num_heads,
        num_kv_heads=s.num_kv_heads if s.kv_from is None else 0,
        head_dim=s.head_dim,
        cos_sin=cos_sin,
        interleaved=isinstance(s.position, RopeSpec) and s.position.style == "interleaved",
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=s.qk_norm.eps if s.qk_norm is not None else 0.0,
        norm_offset=s.qk_norm.weight_offset if s.qk_norm is not None else 0.0,
        norm_after=s.qk_norm is not None and s.qk_norm.after,
        value_eps=s.value_eps,
        has_values=not s.keys_as_values,
    )


def _experts(
    name: str,
    parameters: MutableMapping[str, Tensor],
    ops: OpSet,
    scheme: Scheme | None,
    products: MutableMapping[str, Linear],
    num_experts: int,
) -> Linear:
    return _product(
        name,
        parameters,
        products,
        lambda w: ops.pack_experts(w, num_experts=num_experts),
        lambda w, bias: ops.quantize_experts(w, scheme, bias, num_experts=num_experts),
    )


def _product(
    name: str,
    parameters: MutableMapping[str, Tensor],
    products: MutableMapping[str, Linear],
    pack: Callable[[Linear], Linear],
    quantize: Callable[[Tensor, Tensor | None], Linear],
) -> Linear:
    """Builds a linear layer from a prepared weight in `products`, or else from the dense one, and
    adds it to `products`."""
    key, bias = f"{name}.weight", parameters.pop(f"{name}.bias", None)
    # an embedding table that is also the head is in both mappings
    dense, held = (parameters.pop(key, None), products.get(key))
    if held is not None:
        products[key] = pack(dataclasses.replace(held, bias=bias))
    else:
        assert dense is not None, key
        products[key] = quantize(dense, bias)
    return products[key]
