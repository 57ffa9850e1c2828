"""An op set that records ops instead of computing them: symbolic values in, a flat list of ops out.
No torch.

1. Fast forward paths (the C++ program, the one-token kernel) are compiled from a recording of the
   eager loop, so they compute the same.
2. A recording refers to the weights as the objects that the loop passed.
3. A model without weights can be recorded too: `NamedWeight` and `NamedLinear` stand in for tensors
   by name and shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.kernels.layouts import (
    AttentionParams,
    BlockIndexParams,
    CompressedParams,
    DisentangledParams,
    Experts,
    HyperParams,
    IndexParams,
    MLAParams,
    NormParams,
    QKVLayout,
)
from slipstream.kernels.positions import distance_buckets
from slipstream.kernels.states import ConvParams, GatedDeltaParams, Mamba2Params, MambaParams
from slipstream.spec.model import (
    Activation,
    AlibiSpec,
    AttentionSpec,
    BucketSpec,
    DisentangledSpec,
    LatentAttentionSpec,
    QueryScale,
    RopeSpec,
    SinusoidSpec,
)
from slipstream.spec.reason import Reason
from slipstream.spec.scheme import InputFormat, Scheme


class Refused(Exception):  # noqa: N818 (no error: the reader of a record catches it and returns the reason)
    """Raised when a recording has something that its reader lacks."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.reason = text if isinstance(text, Reason) else Reason(text)


@dataclass(frozen=True, slots=True)
class Value:
    """Symbolic tensor [T, *shape]. `inputs` is the format that its rows are quantized to."""

    index: int
    shape: tuple[int, ...]
    inputs: InputFormat | None = None
    recorder: RecordingOps | None = field(default=None, compare=False, repr=False)

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    def flatten(self, start: int) -> Value:
        assert start == 1
        return self._shaped((self.width,))

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> Value:
        assert dim == 1
        known = math.prod(n for n in sizes if n != -1)
        return self._shaped(tuple(self.width // known if n == -1 else n for n in sizes))

    def _shaped(self, shape: tuple[int, ...]) -> Value:
        """Returns a symbolic view: a value with another shape that refers to the same result."""
        return Value(self.index, shape, self.inputs, self.recorder)

    def __add__(self, other: Value) -> Value:
        return self._recorder.record("add", (self, other), self.shape)

    def __mul__(self, other: Value | float) -> Value:
        if isinstance(other, Value):
            return self._recorder.record("mul", (self, other), self.shape)
        return self._recorder.record("scale", (self,), self.shape, factor=other)

    @property
    def _recorder(self) -> RecordingOps:
        assert self.recorder is not None
        return self.recorder


@dataclass(frozen=True, slots=True)
class Op:
    """One op of a recording.

    `name` is that of the `OpSet` method, or add, mul or scale. `arguments` are its other arguments
    by name. `layer` is the index of its layer; None before and after the layers.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    arguments: Mapping[str, Any]
    layer: int | None

    @property
    def x(self) -> Value:
        return self.inputs[0]

    @property
    def out(self) -> Value:
        return self.outputs[0]


@dataclass(frozen=True, slots=True)
class TracedKV:
    """Placeholder of a layer's cache."""

    layer: int
    num_kv_heads: int

    @property
    def state(self) -> TracedKV:
        """Placeholder of the layer's states."""
        return self


@dataclass(frozen=True, slots=True)
class TracedMeta:
    """Placeholder of a step's metadata for the layers of a group."""

    group: int = 0
    layer_inputs: Value | None = None
    token_ids: object = None
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def of_group(self, group: int) -> TracedMeta:
        return TracedMeta(group, derived=self.derived)


TOKENS = "tokens"
"""Placeholder of the step's token ids."""


@dataclass(frozen=True, slots=True)
class NamedWeight:
    """Placeholder of a tensor in a model that is not loaded."""

    name: str
    shape: tuple[int, ...]

    def __mul__(self, factor: float) -> NamedWeight:
        return self

    def __getitem__(self, rows: slice) -> NamedWeight:
        return NamedWeight(self.name, (rows.stop - rows.start, *self.shape[1:]))


@dataclass(frozen=True, slots=True)
class NamedLinear:
    """Placeholder of a `Linear` in such a model."""

    weight: NamedWeight
    bias: NamedWeight | None = None
    inputs: InputFormat | None = None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]


class NamedTables:
    """Placeholder of `PositionTables`."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.distances: NamedWeight | None = None
        self.distances_norm: Any = None
        self._rope: dict[RopeSpec, NamedWeight] = {}

    def of(
        self, spec: AttentionSpec, own: NamedWeight | None = None
    ) -> tuple[NamedWeight | None, ...]:
        match spec.position:
            case None:
                return None, None, None
            case DisentangledSpec():
                return None, None, None
            case AlibiSpec():
                return None, NamedWeight("slopes", (spec.num_heads,)), None
            case BucketSpec(max_distance=reach):
                return None, None, NamedWeight("distance_bias", (spec.num_heads, 2 * reach + 1))
            case RopeSpec():
                return self.rope(spec.position), None, None

    def query_scale(self, spec: QueryScale | None) -> NamedWeight | None:
        if spec is None or self.max_model_len + spec.offset <= spec.period:
            return None
        return NamedWeight("query_scale", (self.max_model_len,))

    def disentangled(
        self, ops: object, spec: AttentionSpec, position: DisentangledSpec, qkv: object, own: object
    ) -> DisentangledParams:
        shape = (spec.num_heads, spec.head_dim, 2 * position.span)
        keys, queries = (
            NamedWeight(name, shape) if is_there else None
            for name, is_there in (("keys", position.has_keys), ("queries", position.has_queries))
        )
        buckets: Any = NamedWeight("buckets", (len(distance_buckets(position)),))
        tables: Any = {"buckets": buckets, "keys": keys, "queries": queries}
        return DisentangledParams(scale=spec.scale, **tables)

    def ones(self, size: int) -> NamedWeight:
        return NamedWeight("ones", (size,))

    def sinusoids(self, spec: SinusoidSpec, width: int) -> NamedWeight:
        return NamedWeight("sinusoids", (spec.num_positions, width))

    def rope(self, position: RopeSpec) -> NamedWeight:
        return self._rope.setdefault(
            position, NamedWeight("cos_sin", (self.max_model_len, position.rotary_dim))
        )


class RecordingOps:
    """Recorder with the `OpSet` methods that layers use, and the same parameters. `layer` is the
    `layer` of the ops recorded next."""

    name = "recording"

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.layer: int | None = None
        self._count = 0

    def value(self, shape: tuple[int, ...], inputs: InputFormat | None = None) -> Value:
        self._count += 1
        return Value(self._count, shape, inputs, self)

    def record(
        self,
        op: str,
        inputs: tuple[Value, ...],
        shape: tuple[int, ...],
        *more: tuple[int, ...],
        form: InputFormat | None = None,
        **arguments: Any,
    ) -> Value:
        """Records an op with an output of `shape` in the format `form`, and `more` outputs. Returns
        the first."""
        outputs = (self.value(shape, form), *(self.value(s) for s in more))
        self.ops.append(Op(op, inputs, outputs, arguments, self.layer))
        return outputs[0]

    # --- Weights ---

    def quantize_weight(
        self, weight: NamedWeight, bias: NamedWeight | None, scheme: Scheme | None = None
    ) -> NamedLinear:
        return NamedLinear(weight, bias)

    def quantize_experts(
        self,
        weight: NamedWeight,
        scheme: Scheme | None = None,
        bias: NamedWeight | None = None,
        *,
        num_experts: int,
    ) -> NamedLinear:
        return NamedLinear(weight, bias)

    def pack_weight(self, w: NamedLinear) -> NamedLinear:
        return w

    def pack_latent(
        self, expand: NamedWeight, spec: LatentAttentionSpec
    ) -> tuple[NamedWeight, NamedWeight]:
        heads, rank = spec.num_heads, spec.kv_rank
        return NamedWeight("keys", (heads, spec.nope_dim, rank)), NamedWeight(
            "values", (heads, rank, spec.value_dim)
        )

    def embedding(self, table: NamedWeight, tied: NamedLinear | None) -> NamedWeight:
        return table

    def place_of(self, table: NamedWeight) -> tuple[None, None]:
        return None, None

    def position_tables(self, max_model_len: int, device: None) -> NamedTables:
        return NamedTables(max_model_len)

    # --- Ops ---

    def __getattr__(self, op: str) -> Callable[..., Value]:
        """Records an op without a method here. Its output has the shape of its first input; other
        arguments are keywords."""
        if op.startswith("_"):
            raise AttributeError(op)

        def record(x: Value, *more: Value, **arguments: Any) -> Value:
            return self.record(op, (x, *more), x.shape, **arguments)

        return record

    def embed(self, token_ids: object, table: Any, scale: float = 1.0) -> Value:
        return self.record("embed", (), (_inner(table),), table=table, scale=scale)

    def embed_part(
        self, token_ids: object, table: Any, scale: float = 1.0, *, first: int, size: int
    ) -> Value:
        return self.record(
            "embed_part", (), (_inner(table),), table=table, scale=scale, first=first, size=size
        )

    def all_gather(self, x: Value, group: Any, width: int) -> Value:
        return self.record("all_gather", (x,), (width,), group=group)

    def norm_qk_part(
        self, qkv: Value, spec: AttentionSpec, q_norm: Any, k_norm: Any, group: Any
    ) -> Value:
        norms: dict[str, Any] = dict(q_norm=q_norm, k_norm=k_norm)
        return self.record("norm_qk_part", (qkv,), qkv.shape, spec=spec, group=group, **norms)

    def embed_positions(self, meta: TracedMeta, table: Any, offset: int) -> Value:
        return self.record("embed_positions", (), (_inner(table),), table=table, offset=offset)

    def embed_token_types(self, meta: TracedMeta, table: Any) -> Value:
        return self.record("embed_token_types", (), (_inner(table),), table=table)

    def place(self, x: Value, into: Value | None, *, column: int, width: int) -> Value:
        return self.record("place", (x,) if into is None else (x, into), (width,), column=column)

    def linear(self, x: Value, w: Any) -> Value:
        return self.record("linear", (x,), (w.out_features,), w=w)

    def added(self, x: Value, y: Value, factor: Any = 1.0) -> Value:
        return self.record("added", (x, y), x.shape, factor=factor)

    def side_by_side(self, *x: Value) -> Value:
        return self.record("side_by_side", x, (sum(y.width for y in x),))

    def layer_inputs(
        self,
        token_ids: object,
        projected: Value,
        table: Any,
        norm: NormParams,
        *,
        scale: float,
        factor: float,
        limit: int | None = None,
    ) -> Value:
        how: dict[str, Any] = dict(table=table, norm=norm, scale=scale, factor=factor, limit=limit)
        return self.record("layer_inputs", (projected,), projected.shape, **how)

    def gated_by(self, x: Value, inputs: Value, activation: Activation, *, column: int) -> Value:
        return self.record("gated_by", (x, inputs), x.shape, activation=activation, column=column)

    def linear_added(self, x: Value, w: Any, added: Value) -> Value:
        return self.linear(x, w) + added

    def norm(
        self,
        x: Value,
        norm: NormParams,
        *,
        residual: Value | None = None,
        inputs: InputFormat | None = None,
    ) -> tuple[Value, Value]:
        if residual is None:
            return self.record("norm", (x,), x.shape, form=inputs, norm=norm), x
        normed = self.record("norm", (x, residual), x.shape, x.shape, form=inputs, norm=norm)
        return normed, self.ops[-1].outputs[1]

    def columns(self, x: Value, start: int, stop: int) -> Value:
        return self.record("columns", (x,), (stop - start,), start=start, stop=stop)

    def resized_heads(self, x: Value, *, start: int, count: int, old: int, new: int) -> Value:
        width = start + count * new
        return self.record(
            "resized_heads", (x,), (width,), start=start, count=count, old=old, new=new
        )

    def paired_heads(self, x: Value, *, spec: AttentionSpec) -> Value:
        return self.record("paired_heads", (x,), (2 * sum(spec.qkv_rows),), spec=spec)

    def head_differences(self, x: Value, *, spec: AttentionSpec, lambdas: Any) -> Value:
        return self.record("head_differences", (x,), (spec.out_size,), spec=spec, lambdas=lambdas)

    def gated_delta(
        self,
        x: Value,
        gates: Value,
        state: TracedKV,
        meta: TracedMeta,
        params: GatedDeltaParams,
        decay: Value | None = None,
        z: Value | None = None,
    ) -> Value:
        inputs = (x, gates) if decay is None or z is None else (x, gates, decay, z)
        shape = (params.spec.v_size,)
        return self.record("gated_delta", inputs, shape, state=state, params=params)

    def mamba2(self, x: Value, state: TracedKV, meta: TracedMeta, params: Mamba2Params) -> Value:
        return self.record("mamba2", (x,), (params.spec.v_size,), state=state, params=params)

    def short_conv(self, x: Value, state: TracedKV, meta: TracedMeta, params: ConvParams) -> Value:
        return self.record("short_conv", (x,), (x.width // 3,), state=state, params=params)

    def causal_conv(self, x: Value, state: TracedKV, meta: TracedMeta, params: ConvParams) -> Value:
        return self.record("causal_conv", (x,), (x.width // 2,), state=state, params=params)

    def selective_scan(
        self,
        x: Value,
        dt: Value,
        b: Value,
        c: Value,
        xz: Value,
        state: TracedKV,
        meta: TracedMeta,
        params: MambaParams,
    ) -> Value:
        inputs = (x, dt, b, c, xz)
        return self.record("selective_scan", inputs, x.shape, state=state, params=params)

    def joined(self, x: Value, y: Value) -> Value:
        return x + y

    def pieces(self, x: Value, group: Any) -> tuple[slice, ...]:
        """Returns no parts of the tokens: a recorded step is too short to split."""
        return ()

    def all_reduce_norm(
        self,
        x: Value,
        norm: NormParams,
        *,
        group: Any,
        residual: Value | None = None,
        inputs: InputFormat | None = None,
    ) -> tuple[Value, Value]:
        given = (x,) if residual is None else (x, residual)
        normed = self.record(
            "all_reduce_norm", given, x.shape, x.shape, form=inputs, norm=norm, group=group
        )
        return normed, self.ops[-1].outputs[1]

    def norm_qk(self, qkv: Value, spec: AttentionSpec, q_norm: Any, k_norm: Any) -> Value:
        return self.record("norm_qk", (qkv,), qkv.shape, spec=spec, q_norm=q_norm, k_norm=k_norm)

    def rope_and_cache(self, qkv: Value, kv: TracedKV, meta: TracedMeta, heads: QKVLayout) -> Value:
        return self.record(
            "rope_and_cache",
            (qkv,),
            (heads.num_heads, heads.head_dim),
            kv=kv,
            meta=meta,
            heads=heads,
        )

    def cache_kv(self, rows: Value, kv: TracedKV, meta: TracedMeta, heads: QKVLayout) -> None:
        self.record("cache_kv", (rows,), (0,), kv=kv, meta=meta, heads=heads)

    def attention(self, q: Value, kv: TracedKV, meta: TracedMeta, params: AttentionParams) -> Value:
        return self.record("attention", (q,), q.shape, kv=kv, meta=meta, params=params)

    def bidirectional_attention(
        self, qkv: Value, kv: TracedKV, meta: TracedMeta, heads: QKVLayout, params: AttentionParams
    ) -> Value:
        shape = heads.num_heads, heads.head_dim
        return self.record(
            "bidirectional_attention", (qkv,), shape, kv=kv, meta=meta, heads=heads, params=params
        )

    def disentangled_attention(self, qkv: Value, meta: TracedMeta, params: Any) -> Value:
        width = qkv.shape[0] // 3
        return self.record("disentangled_attention", (qkv,), (width,), meta=meta, params=params)

    def compressed_attention(
        self,
        q: Value,
        key: Value,
        rows: Value | None,
        index: tuple[Value, Value] | None,
        kv: TracedKV,
        meta: TracedMeta,
        params: CompressedParams,
    ) -> Value:
        inputs = [x for x in (q, key, rows, *(index or ())) if x is not None]
        return self.record("compressed_attention", tuple(inputs), q.shape, kv=kv, params=params)

    def block_sparse_attention(
        self,
        q: Value,
        rows: Value,
        kv: TracedKV,
        meta: TracedMeta,
        params: AttentionParams,
        index: BlockIndexParams,
    ) -> Value:
        inputs = (q, rows)
        return self.record(
            "block_sparse_attention", inputs, q.shape, kv=kv, params=params, index=index
        )

    def grouped_linear(self, x: Value, *, weight: NamedWeight) -> Value:
        return self.record("grouped_linear", (x,), weight.shape[:1], weight=weight)

    def hashed_logits(self, logits: Value, meta: TracedMeta, table: NamedWeight) -> Value:
        return self.record("hashed_logits", (logits,), logits.shape, table=table)

    def stream_coefficients(self, h: Value, params: HyperParams) -> Value:
        rows = params.base.shape[:1]
        return self.record("stream_coefficients", (h,), tuple(rows), params=params)

    def collapsed_streams(self, h: Value, coefficients: Value, *, count: int) -> Value:
        width = h.shape[0] // count
        return self.record("collapsed_streams", (h, coefficients), (width,), count=count)

    def choose_keys(
        self,
        q: Value,
        k: Value,
        weights: Value,
        kv: TracedKV,
        meta: TracedMeta,
        params: IndexParams,
    ) -> Value:
        return self.record("choose_keys", (q, k, weights), (params.top_k,), kv=kv, params=params)

    def mla_attention(
        self,
        q: Value,
        row: Value,
        kv: TracedKV,
        meta: TracedMeta,
        params: MLAParams,
        chosen: Value | None = None,
    ) -> Value:
        # in the op set's layout: a tensor [H, C, V], or a weight with the stacked rows of all heads
        values = params.values
        width = (
            values.out_features
            if hasattr(values, "out_features")
            else values.shape[0] * values.shape[2]
        )
        inputs = (q, row) if chosen is None else (q, row, chosen)
        return self.record("mla_attention", inputs, (width,), kv=kv, meta=meta, params=params)

    def activation(
        self,
        x: Value,
        activation: Activation,
        *,
        gated: bool = False,
        inputs: InputFormat | None = None,
    ) -> Value:
        shape = (x.width // 2,) if gated else x.shape
        return self.record(
            "activation", (x,), shape, form=inputs, activation=activation, gated=gated
        )

    def expert_load(self, counts: Any, kv: TracedKV, meta: TracedMeta) -> Any:
        """Returns the given counts unchanged, because nothing is computed while recording."""
        return counts

    def moe(self, x: Value, router_logits: Value, experts: Experts, load: Any = None) -> Value:
        return self.record("moe", (x, router_logits), x.shape, experts=experts, load=load)

    def moe_and_shared(
        self,
        x: Value,
        router_logits: Value,
        experts: Experts,
        shared: tuple[Any, Any],
        load: Any = None,
    ) -> Value:
        return self.record(
            "moe_and_shared", (x, router_logits), x.shape, experts=experts, shared=shared, load=load
        )


def _inner(table: Any) -> int:
    """Returns the number of columns of a table, which is a tensor or a product's weight. A packed
    weight has an attribute for it, because its tensors have other shapes."""
    first = getattr(table, "parts", (table,))[0]
    weight = getattr(first, "weight", first)
    for one in (first, weight):
        if isinstance(inner := getattr(one, "inner", None), int):  # a tensor's is a method
            return inner
    shape: Sequence[int] = weight.shape
    return shape[1]
