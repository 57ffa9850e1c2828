"""The decoder: one piece of code that runs every `ModelSpec`.

    h = embed(tokens)
    for layer in layers: h = h + attention(norm(h)); h = h + mlp(norm(h))
    logits = head(norm(h))

It knows no architecture by name and no device. The residual travels beside the activations, so that each addition is
fused with the norm that follows it: `pending` is what was computed but not yet added to the residual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.metadata import AttentionMetadata, ExpertLoad, LayerKV
from slipstream.kernels.native import Running
from slipstream.kernels.ops import AttentionParams, Experts, OpSet, QKVLayout
from slipstream.kernels.weights import Activations, Linear
from slipstream.model.compiled import CompiledStep, compile_step
from slipstream.model.encoder import Classifier, CrossAttention, Encoder
from slipstream.model.one_token import one_token_step
from slipstream.model.positions import alibi_slopes, distance_bias, rope_table
from slipstream.spec.model import (
    AlibiSpec,
    AttentionSpec,
    BucketSpec,
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    OwnNorm,
    ParallelBlock,
    PostNormBlock,
    QKNormSpec,
    RopeSpec,
)
from slipstream.spec.scheme import InputFormat, Scheme


@dataclass(frozen=True, slots=True)
class Norm:
    spec: NormSpec
    weight: Tensor
    bias: Tensor | None

    def __call__(self, ops: OpSet, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        h, total = self.quantizing(ops, x, residual, None)
        assert isinstance(h, Tensor)
        return h, total

    def quantizing(
        self, ops: OpSet, x: Tensor, residual: Tensor | None, inputs: InputFormat | None
    ) -> tuple[Activations, Tensor]:
        """The same, in the form that the product after it wants."""
        s = self.spec
        if isinstance(s.kind, OwnNorm):
            total = _sum(x, residual)
            h = s.kind.function(total.float(), self.weight, self.bias, s.eps).to(x.dtype)
            return h if inputs is None else ops.quantize(h, inputs), total
        if s.kind == "rms":
            return ops.rms_norm(x, self.weight, s.eps, residual=residual, weight_offset=s.weight_offset, inputs=inputs)
        return ops.layer_norm(x, self.weight, self.bias, s.eps, residual=residual, inputs=inputs)


@dataclass(frozen=True, slots=True)
class Attention:
    """`q_norm` and `k_norm` are norms of whole rows, or of each head by weights of its own; `heads` has those with one weight
    for all heads."""

    spec: AttentionSpec
    qkv: Linear
    out: Linear
    heads: QKVLayout
    params: AttentionParams
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    def __call__(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → [T, E]"""
        s = self.spec
        qkv = ops.linear(x, self.qkv)
        if s.clip_qkv is not None:
            qkv.clamp_(-s.clip_qkv, s.clip_qkv)
        if s.qk_norm is not None and self.q_norm is not None and self.k_norm is not None:
            qkv = self._norm_rows(ops, qkv, s.qk_norm, self.q_norm, self.k_norm)
        if not s.causal:
            return ops.linear(ops.bidirectional_attention(qkv, kv, meta, self.heads, self.params).flatten(1), self.out)
        q = ops.rope_and_cache(qkv, kv, meta, self.heads)
        return ops.linear(ops.attention(q, kv, meta, self.params).flatten(1), self.out)

    def _norm_rows(self, ops: OpSet, qkv: Tensor, norm: QKNormSpec, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        q, k, v = qkv.split((self.spec.q_size, self.spec.kv_size, self.spec.kv_size), dim=1)
        if norm.over == "each":
            qk = torch.cat((q, k), dim=1).float().unflatten(1, (-1, self.spec.head_dim))
            weights = torch.cat((q_norm, k_norm)).float()
            heads = F.layer_norm(qk, qk.shape[-1:], eps=norm.eps) * weights
            return torch.cat((heads.flatten(1).to(v.dtype), v), dim=1)
        normed = (
            ops.rms_norm(x, weight, norm.eps, weight_offset=norm.weight_offset)[0]
            for x, weight in ((q, q_norm), (k, k_norm))
        )
        return torch.cat((*normed, v), dim=1)  # type: ignore[arg-type]

    @property
    def inputs(self) -> InputFormat | None:
        """The form of rows that it reads."""
        return self.qkv.inputs

    @property
    def cos_sin(self) -> Tensor | None:
        return self.heads.cos_sin


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention over the latents themselves: what makes keys and values of a latent is multiplied into queries and results
    instead (DeepSeek-V2, section 2.1.3), so that all heads read one cached row a token. An op set may make keys and values of a
    prompt's tokens, which share them."""

    spec: LatentAttentionSpec
    q_latent: Linear | None
    q: Linear
    latent: Linear
    out: Linear
    q_norm: Tensor | None
    k_norm: Tensor
    keys: Any  # [H, nope_dim, kv_rank], as this op set's `pack_heads` holds it
    values: Any  # [H, kv_rank, value_dim], the same
    cos_sin: Tensor

    def __call__(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → [T, E]"""
        s, rows = self.spec, x
        if self.q_latent is not None:
            assert self.q_norm is not None
            rows = ops.rms_norm(ops.linear(x, self.q_latent), self.q_norm, s.eps, inputs=self.q.inputs)[0]
        q = ops.linear(rows, self.q).unflatten(1, (s.num_heads, -1))
        seen = ops.mla_attention(
            q,
            ops.linear(x, self.latent),
            kv,
            meta,
            keys=self.keys,
            values=self.values,
            norm=self.k_norm,
            eps=s.eps,
            cos_sin=self.cos_sin,
            interleaved=s.position.style == "interleaved",
            scale=s.scale,
        )
        return ops.linear(seen, self.out)

    @property
    def inputs(self) -> InputFormat | None:
        return self.latent.inputs


@dataclass(frozen=True, slots=True)
class MLP:
    spec: DenseSpec
    up: Linear
    down: Linear

    def __call__(self, ops: OpSet, x: Activations) -> Tensor:
        """[T, E] → [T, E]"""
        act = ops.gated_activation if self.spec.gated else ops.activation
        return ops.linear(act(ops.linear(x, self.up), self.spec.activation, inputs=self.down.inputs), self.down)

    @property
    def inputs(self) -> InputFormat | None:
        """The form of rows that it reads."""
        return self.up.inputs


@dataclass(frozen=True, slots=True)
class MoE:
    spec: MoESpec
    router: Linear
    experts: Experts
    shared: MLP | None
    shared_weight: Linear | None

    def __call__(self, ops: OpSet, x: Activations, load: ExpertLoad | None = None) -> Tensor:
        """[T, E] → [T, E]"""
        assert isinstance(x, Tensor)
        logits = ops.linear(x, self.router)
        if self.shared is None:
            return ops.moe(x, logits, self.experts, load)
        expert, always = self.spec.expert, self.shared.spec
        if self.shared_weight is None and (expert.activation, expert.gated) == (always.activation, always.gated):
            return ops.moe_and_shared(x, logits, self.experts, (self.shared.up, self.shared.down), load)
        routed, added = ops.moe(x, logits, self.experts, load), self.shared(ops, x)
        return routed + (added if self.shared_weight is None else added * ops.linear(x, self.shared_weight).sigmoid())

    @property
    def up(self) -> Linear:
        return self.experts.up

    @property
    def down(self) -> Linear:
        return self.experts.down

    @property
    def inputs(self) -> InputFormat | None:
        return None  # the router reads them as they are


@dataclass(frozen=True, slots=True)
class Layer:
    spec: LayerSpec
    attention: Attention | LatentAttention
    mlp: MLP | MoE
    norms: Mapping[str, Norm]
    cross: CrossAttention | None = None
    expert_counts: Tensor | None = None  # int64 [X]: tokens by expert, if they are counted
    group: int = 0  # `ModelSpec.group_of_layer`
    cross_group: int = 0

    def __call__(
        self, ops: OpSet, pending: Tensor, residual: Tensor | None, kv: LayerKV, meta: AttentionMetadata
    ) -> tuple[Tensor, Tensor | None]:
        """(what to add next, the residual). `meta` is the whole step's: here its group is chosen."""
        step, meta = meta, meta.of_group(self.group)
        n, scale = self.norms, self.spec.residual_scale
        if isinstance(self.spec.block, PostNormBlock):
            x = _sum(pending, residual)
            x = n["attention_norm"](ops, _scaled(self.attention(ops, x, kv, meta), scale), x)[0]
            return n["mlp_norm"](ops, _scaled(self._feed(ops, x, kv, meta), scale), x)[0], None
        if isinstance(self.spec.block, ParallelBlock):
            # Both branches read one norm, or each its own; all of a layer's products have one scheme, but a router has none.
            inputs = self.attention.inputs if "mlp_norm" in n else self.mlp.inputs
            normed, residual = self._before("norm", ops, pending, residual, inputs)
            for_mlp = n["mlp_norm"].quantizing(ops, residual, None, self.mlp.inputs)[0] if "mlp_norm" in n else normed
            return _scaled(self.attention(ops, normed, kv, meta) + self._feed(ops, for_mlp, kv, meta), scale), residual
        normed, residual = self._before("pre_attention", ops, pending, residual, self.attention.inputs)
        h = self._after("post_attention", ops, self.attention(ops, normed, kv, meta))
        if self.cross is not None:
            normed, residual = self._before("pre_cross", ops, h, residual, self.cross.q.inputs)
            h = self.cross(ops, normed, kv, step.of_group(self.cross_group))
        normed, residual = self._before("pre_mlp", ops, _scaled(h, scale), residual, self.mlp.inputs)
        return _scaled(self._after("post_mlp", ops, self._feed(ops, normed, kv, meta)), scale), residual

    def _feed(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        if self.expert_counts is None or not isinstance(self.mlp, MoE):
            return self.mlp(ops, x)
        return self.mlp(ops, x, ExpertLoad(self.expert_counts, meta.slot_mapping, kv.block_size))

    def _before(
        self, name: str, ops: OpSet, pending: Tensor, residual: Tensor | None, inputs: InputFormat | None
    ) -> tuple[Activations, Tensor]:
        """(the input of attention or MLP, the residual): through the norm if there is one."""
        if name in self.norms:
            return self.norms[name].quantizing(ops, pending, residual, inputs)
        total = _sum(pending, residual)
        return total, total

    def _after(self, name: str, ops: OpSet, h: Tensor) -> Tensor:
        return self.norms[name](ops, h)[0] if name in self.norms else h


def _sum(pending: Tensor, residual: Tensor | None) -> Tensor:
    return pending if residual is None else pending + residual


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


class Decoder:
    """`parameters` are by the names of `spec.parameters`; they are laid out as `ops` wants them, the layers' products
    rounded by `scheme`, and then not needed. `products` are weights that are held rounded already, by the same names, without
    their biases; afterwards all of the decoder's are in it, as they were laid out. `layers`, if given, stand for those that
    `parameters` would make (training and calibration run layers one at a time, and give none)."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: dict[str, Tensor],
        ops: OpSet,
        *,
        max_model_len: int,
        scheme: Scheme | None = None,
        products: dict[str, Linear] | None = None,
        layers: Sequence[Layer] | None = None,
    ) -> None:
        products = {} if products is None else products
        of_experts, scheme = scheme, None if scheme is not None and scheme.experts_only else scheme
        self.spec = spec
        self.ops = ops
        held = products.get("embed.weight")
        table: Tensor | Linear = parameters.pop("embed.weight") if held is None else held
        self.positions = parameters.pop("positions.weight", None)
        self.token_types = parameters.pop("token_types.weight", None)
        self.embed_in, self.embed_out = (
            None if spec.embed_size is None else _linear(name, parameters, ops, None, products)
            for name in ("embed_in", "embed_out")
        )
        self.embed_norm = None if spec.embed_norm is None else _norm(spec.embed_norm, "embed_norm", parameters)
        self.final_norm = None if spec.final_norm is None else _norm(spec.final_norm, "final_norm", parameters)
        if spec.tied_embeddings and isinstance(table, Linear):
            products["head.weight"] = table
        elif spec.tied_embeddings:
            parameters["head.weight"] = table  # type: ignore[assignment]
        self.head = None
        if spec.generates:
            self.head = _linear("head", parameters, ops, scheme if scheme is not None and scheme.head else None, products)
        self.embed: Any = ops.embedding(table, self.head if spec.tied_embeddings else None)  # what this op set's `embed` reads
        # Of a table in blocks `weight` is on the meta device; such tables are a CPU's.
        self.device = device = torch.device("cpu") if isinstance(table, Linear) else table.device
        self.dtype = table.weight.dtype if isinstance(table, Linear) else table.dtype
        tables = PositionTables(max_model_len, device)
        self.encoder = self.classifier = None

        def stack(own: Sequence[LayerSpec], name: str) -> list[Layer]:
            tables.distances = parameters.pop(f"{name}distances.weight", None)
            named = ((s, f"{name}layers.{i}.") for i, s in enumerate(own))
            return [build_layer(s, parameters, ops, tables, name=n, scheme=of_experts, products=products) for s, n in named]

        if (e := spec.encoder) is not None:
            self.encoder = Encoder(stack(e.layers, "encoder."), _norm(e.final_norm, "encoder.final_norm", parameters))
        if (c := spec.classifier) is not None:
            out = _linear("classifier.out", parameters, ops, None, products)
            dense = None if c.activation is None else _linear("classifier.dense", parameters, ops, None, products)
            norm = None if c.norm is None else _norm(c.norm, "classifier.norm", parameters)
            self.classifier = Classifier(c, dense, norm, out)
        groups = zip(layers if layers is not None else stack(spec.layers, ""), spec.group_of_layer, strict=False)
        self.layers = [dataclasses.replace(x, group=g, cross_group=spec.cross_group) for x, g in groups]
        assert not parameters, f"unused: {list(parameters)}"
        self.compiled = compile_step(self)
        self.one_token = one_token_step(self)

    def forward(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        """token_ids [T] → hidden states [T, E] after the final norm; keys and values are in the cache."""
        if self.compiled is not None:
            return self.compiled(token_ids, kv, meta, self.embedded(token_ids, meta) if self.spec.is_encoder else None)
        h = self.embedded(token_ids, meta)
        if self.one_token is not None and len(token_ids) == 1:
            return self.finished(self.one_token(h, kv, meta), None)
        residual: Tensor | None = None
        for layer, cache in zip(self.layers, kv, strict=True):
            h, residual = layer(self.ops, h, residual, cache, meta)
        return self.finished(h, residual)

    def encode(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """An encoder-decoder's prompts, whole, token_ids [T]: what the decoder's layers read of them goes into `meta`'s slots
        of their caches."""
        assert self.encoder is not None
        if self.compiled is not None and self.compiled.encoder is not None:
            self.compiled.encoder(self.embedded(token_ids, meta), kv, meta)
            return
        states = self.encoder(self.ops, self.embedded(token_ids, meta), kv[0], meta)
        for layer, cache in zip(self.layers, kv, strict=True):
            assert layer.cross is not None
            layer.cross.remember(self.ops, states, cache, meta)

    def count_experts(self) -> dict[int, Tensor]:
        """From now on each step counts its tokens by expert: int64 [X] on the device for each layer that has experts."""
        for i, layer in enumerate(self.layers):
            if isinstance(layer.mlp, MoE):
                counts = torch.zeros(layer.mlp.spec.num_experts, dtype=torch.int64, device=self.device)
                self.layers[i] = dataclasses.replace(layer, expert_counts=counts)
                if self.compiled is not None:
                    self.compiled.count_experts(i, counts)
        found = {i: x.expert_counts for i, x in enumerate(self.layers) if x.expert_counts is not None}
        if found:  # which that kernel is to know
            self.one_token = one_token_step(self)
        return found

    @property
    def token_bytes(self) -> int | None:
        """Bytes that a step takes for each of its tokens, where that is known: if the step is compiled."""
        return None if self.compiled is None else self.compiled.token_bytes

    def embedded(self, token_ids: Tensor, meta: AttentionMetadata) -> Tensor:
        """token_ids [T] → what the first layer reads, [T, E]"""
        h = self.ops.embed(token_ids, self.embed, self.spec.embed_scale)
        if self.embed_in is not None:
            h = self.ops.linear(h, self.embed_in)
        if self.positions is not None and self.spec.learned_positions is not None:
            h = h + self.ops.embed(meta.positions + self.spec.learned_positions.offset, self.positions)
        if self.token_types is not None:
            h = h + (self.token_types[0] if meta.token_types is None else self.ops.embed(meta.token_types, self.token_types))
        return h if self.embed_norm is None else self.embed_norm(self.ops, h)[0]

    def finished(self, h: Tensor, residual: Tensor | None) -> Tensor:
        """What the last layer gives → what `logits` reads."""
        return _sum(h, residual) if self.final_norm is None else self.final_norm(self.ops, h, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, E] → [N, V], in the model's type, or in float32 if the step is compiled."""
        assert self.head is not None
        if self.compiled is not None:
            logits = _scaled(self.compiled.head(hidden), self.spec.logit_scale)
        else:
            if self.embed_out is not None:
                hidden = self.ops.linear(hidden, self.embed_out)
            logits = _scaled(self.ops.linear(hidden, self.head), self.spec.logit_scale)
        cap = self.spec.logit_softcap
        return logits if cap is None else (logits.float() / cap).tanh().mul(cap).to(logits.dtype)

    def greedy(self, hidden: Tensor) -> Tensor | None:
        """[N, E] → tokens int64 [N] whose logits are largest, of equals the first, without the logits; None if the kernels
        can't, or if logits are scaled or capped: rounding then makes equals of neighbours, of which the first would be taken
        in a batch that needs the logits and the larger one here."""
        step = self._compiled_greedy
        return None if step is None or step.greedy is None else step.greedy(hidden)

    def begin_greedy(
        self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata
    ) -> tuple[Tensor, Running] | None:
        """`greedy(forward(...))` of a decoder, in one, and the step that is then under way; None if the kernels can't."""
        step = self._compiled_greedy
        return None if step is None else step.begin_greedy(token_ids, kv, meta)

    @property
    def _compiled_greedy(self) -> CompiledStep | None:
        step = self.compiled
        plain = self.spec.logit_scale == 1.0 and self.spec.logit_softcap is None
        return step if plain and step is not None and step.greedy is not None else None


class PositionTables:
    """Rotary tables, ALiBi slopes and biases by distance, one of each for all layers that have the same. `distances` are the
    stack's own weights [buckets, H], set before its layers are built."""

    def __init__(self, max_model_len: int, device: torch.device) -> None:
        self.max_model_len, self.device = max_model_len, device
        self.distances: Tensor | None = None
        self._rope: dict[RopeSpec, Tensor] = {}
        self._biases: dict[BucketSpec, Tensor] = {}

    def of(self, spec: AttentionSpec, own: Tensor | None = None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(cos_sin, slopes, distance_bias) of a layer; `own`: the layer's weights of distances."""
        position = spec.position
        match position:
            case None:
                return None, None, None
            case AlibiSpec():
                return None, alibi_slopes(position, spec.num_heads).to(self.device), None
            case BucketSpec(own=True):
                assert own is not None
                return None, None, distance_bias(position, own)
            case BucketSpec():
                if position not in self._biases:
                    assert self.distances is not None
                    self._biases[position] = distance_bias(position, self.distances)
                return None, None, self._biases[position]
            case RopeSpec():
                return self.rope(position), None, None

    def rope(self, position: RopeSpec) -> Tensor:
        if position not in self._rope:
            self._rope[position] = rope_table(position, self.max_model_len).to(self.device)
        return self._rope[position]


def build_layer(
    spec: LayerSpec,
    parameters: dict[str, Tensor],
    ops: OpSet,
    tables: PositionTables,
    *,
    name: str = "",
    scheme: Scheme | None = None,
    products: dict[str, Linear] | None = None,
) -> Layer:
    """The layer of those `parameters` whose names begin with `name` (they are taken out), as `Decoder` would hold it."""
    products = {} if products is None else products
    of_experts, scheme = scheme, None if scheme is not None and scheme.experts_only else scheme

    def linear(stem: str, by: Scheme | None = scheme) -> Linear:
        return _linear(f"{name}{stem}", parameters, ops, by, products)

    def dense(s: DenseSpec, stem: str) -> MLP:
        return MLP(s, linear(f"{stem}.up"), linear(f"{stem}.down"))

    def mixture(s: MoESpec) -> MoE:
        up, down = (
            _experts(f"{name}experts.{part}", parameters, ops, of_experts, products, s.num_experts) for part in ("up", "down")
        )
        return MoE(
            s,
            linear("router", None),
            Experts(up, down, s, parameters.pop(f"{name}correction.weight", None)),
            dense(s.shared.mlp, "shared") if s.shared is not None else None,
            linear("shared_weight", None) if s.shared is not None and s.shared.weighed else None,
        )

    def attention(s: AttentionSpec) -> Attention:
        qkv, out = linear("attention.qkv"), linear("attention.out")
        norms = [parameters.pop(f"{name}attention.{x}_norm.weight", None) for x in "qk"]
        cos_sin, slopes, bias = tables.of(s, parameters.pop(f"{name}attention.distances.weight", None))
        of_heads = s.qk_norm is not None and s.qk_norm.over == "head"
        heads = heads_of(s, cos_sin, *(norms if of_heads else ()))
        params = AttentionParams(
            scale=s.scale,
            window=s.window,
            softcap=s.softcap,
            alibi_slopes=slopes,
            sinks=parameters.pop(f"{name}attention.sinks.weight", None),
            distance_bias=bias,
            causal=s.causal,
        )
        return Attention(s, qkv, out, heads, params, *(() if of_heads else norms))

    def cross(s: AttentionSpec) -> CrossAttention:
        q, kv, out = (linear(f"cross.{part}") for part in ("q", "kv", "out"))
        return CrossAttention(s, q, kv, out, heads_of(s), AttentionParams(scale=s.scale, causal=False))

    def latent(s: LatentAttentionSpec) -> LatentAttention:
        expand = parameters.pop(f"{name}attention.expand.weight").unflatten(0, (s.num_heads, -1))
        keys, values = expand.split((s.nope_dim, s.value_dim), dim=1)
        return LatentAttention(
            s,
            linear("attention.q_latent") if s.q_rank is not None else None,
            linear("attention.q"),
            linear("attention.latent"),
            linear("attention.out"),
            parameters.pop(f"{name}attention.q_norm.weight", None),
            parameters.pop(f"{name}attention.k_norm.weight"),
            ops.pack_heads(keys),
            ops.pack_heads(values.transpose(1, 2)),
            tables.rope(s.position),
        )

    norms = {key: _norm(n, f"{name}{key}", parameters) for key, n in spec.norms.items()}
    mlp = dense(spec.mlp, "mlp") if isinstance(spec.mlp, DenseSpec) else mixture(spec.mlp)
    own = spec.attention
    attended = latent(own) if isinstance(own, LatentAttentionSpec) else attention(own)
    return Layer(spec, attended, mlp, norms, cross(spec.cross) if spec.cross is not None else None)


def heads_of(
    s: AttentionSpec, cos_sin: Tensor | None = None, q_norm: Tensor | None = None, k_norm: Tensor | None = None
) -> QKVLayout:
    """The heads of a layer, rotated by its table and normed by its weights, if there are any."""
    return QKVLayout(
        num_heads=s.num_heads,
        num_kv_heads=s.num_kv_heads,
        head_dim=s.head_dim,
        cos_sin=cos_sin,
        interleaved=isinstance(s.position, RopeSpec) and s.position.style == "interleaved",
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=s.qk_norm.eps if s.qk_norm is not None else 0.0,
        norm_offset=s.qk_norm.weight_offset if s.qk_norm is not None else 0.0,
    )


def _norm(spec: NormSpec, name: str, parameters: dict[str, Tensor]) -> Norm:
    return Norm(spec, parameters.pop(f"{name}.weight"), parameters.pop(f"{name}.bias", None))


def _linear(
    name: str, parameters: dict[str, Tensor], ops: OpSet, scheme: Scheme | None, products: dict[str, Linear]
) -> Linear:
    return _product(name, parameters, products, ops.pack_weight, lambda w, bias: ops.quantize_weight(w, bias, scheme))


def _experts(
    name: str, parameters: dict[str, Tensor], ops: OpSet, scheme: Scheme | None, products: dict[str, Linear], num_experts: int
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
    parameters: dict[str, Tensor],
    products: dict[str, Linear],
    adopt: Callable[[Linear], Linear],
    prepare: Callable[[Tensor, Tensor | None], Linear],
) -> Linear:
    """Of the weight that is held already, or of the dense one; either way it is in `products` then."""
    key, bias = f"{name}.weight", parameters.pop(f"{name}.bias", None)
    dense, held = parameters.pop(key, None), products.get(key)  # of a table that the head shares both are there
    if held is not None:
        products[key] = adopt(dataclasses.replace(held, bias=bias))
    else:
        assert dense is not None, key
        products[key] = prepare(dense, bias)
    return products[key]
