"""A model's step as one program of the C++ kernels: Python gives tokens, lengths and tables, and gets hidden states.

The program is `Decoder.forward` written out once, operator by operator, over buffers of float32 (`x`, the residual, what
attention saw) and of the form that the next product reads (`native.FORM_*`). Where a branch's result only joins the residual,
the product adds it there itself; where gate and up are one product, their activation is its epilogue. An encoder-decoder has
two programs: what reads prompts, and the step that writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.kernels import native
from slipstream.kernels.cpu import LinearArgmax, NativeOps, Product, add_attention, add_linear, add_rope_and_cache
from slipstream.kernels.cpu_mla import add_latent_attention, add_latent_queries
from slipstream.kernels.cpu_moe import NativeExperts, add_choice, add_experts
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.native import FORM_F32, NativeLinear, Program, Running, activation_of
from slipstream.spec.model import (
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    OwnActivation,
    OwnNorm,
    ParallelBlock,
    PostNormBlock,
    SequentialBlock,
)

if TYPE_CHECKING:
    from slipstream.model.decoder import MLP, Attention, Decoder, LatentAttention, Layer, MoE, Norm
    from slipstream.model.encoder import CrossAttention


def compile_step(decoder: Decoder) -> CompiledStep | None:
    """The decoder's program, if its op set has such programs and they cover its spec. Without, the decoder's own loop runs,
    with the same kernels one by one."""
    if not isinstance(decoder.ops, NativeOps) or not covers(decoder.spec):
        return None
    return CompiledStep(decoder, decoder.ops)


def covers(spec: ModelSpec) -> bool:
    """Not yet: experts beside the attention, activations and norms of one's own, norms over whole rows of q
    and k, scaled branches, clipped q, k and v, branches without a norm before them, and of decoders embeddings with a norm or
    a width of their own."""
    if spec.embed_size is not None or (spec.embed_norm is not None and not spec.is_encoder):
        return False
    if any(norm is not None and isinstance(norm.kind, OwnNorm) for norm in spec.norms):
        return False
    if spec.final_norm is None and not isinstance(spec.layers[-1].block, PostNormBlock):
        return False
    stacks = (spec.layers, () if spec.encoder is None else spec.encoder.layers)
    return all(_covers_layer(layer, first=i == 0) for stack in stacks for i, layer in enumerate(stack))


def _covers_layer(layer: LayerSpec, *, first: bool) -> bool:
    a, mlp, norms = layer.attention, layer.mlp, layer.norms
    if any(isinstance(norm.kind, OwnNorm) for norm in norms.values()):
        return False
    if has_own_activation(mlp) or layer.residual_scale != 1.0:
        return False
    if not isinstance(mlp, DenseSpec) and not isinstance(layer.block, SequentialBlock):
        return False
    if isinstance(a, LatentAttentionSpec):
        return isinstance(layer.block, SequentialBlock) and {"pre_attention", "pre_mlp"} <= norms.keys()
    if a.clip_qkv is not None or (a.qk_norm is not None and a.qk_norm.over != "head"):
        return False
    if isinstance(layer.block, SequentialBlock):
        return "pre_mlp" in norms and (first or "pre_attention" in norms) and (layer.cross is None or "pre_cross" in norms)
    return True


def has_own_activation(mlp: MLPSpec) -> bool:
    dense = [mlp] if isinstance(mlp, DenseSpec) else [mlp.expert, *([mlp.shared.mlp] if mlp.shared is not None else [])]
    return any(isinstance(d.activation, OwnActivation) for d in dense)


class CompiledStep:
    """`encoder` is there where the model is an encoder-decoder."""

    head: Product  # float32 [N, E] → logits float32 [N, V]; an encoder has none
    greedy: LinearArgmax | None = None  # float32 [N, E] → tokens int64 [N]; None: there is no head, or one of several parts

    def __init__(self, decoder: Decoder, ops: NativeOps) -> None:
        spec = decoder.spec
        self.spec, self.hidden_size = spec, spec.hidden_size
        self._layers = written = _Layers(ops, spec.hidden_size, len(spec.cache_groups), embedded=spec.is_encoder)
        self.program = written.program
        self.encoder = None if decoder.encoder is None else CompiledEncoder(decoder, ops)
        self.out = self.program.bound()
        if not spec.is_encoder:
            written.embed(decoder)
        waiting = False
        for index, layer in enumerate(decoder.layers):
            last = index + 1 == len(decoder.layers) and decoder.final_norm is None
            waiting = written.layer(layer, index, waiting, self.out if last else written.x)
        if decoder.final_norm is not None:
            written.add_norm(decoder.final_norm, self.out, FORM_F32, waiting)
        if decoder.head is not None:
            assert isinstance(decoder.head, NativeLinear)
            self.head = Product(ops.engine, decoder.head)
            if len(decoder.head.parts) == 1:
                self.greedy = LinearArgmax(ops.engine, decoder.head)

    def __call__(
        self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata, embedded: Tensor | None = None
    ) -> Tensor:
        """As `Decoder.forward`; the result is float32. An encoder's step begins with what is `embedded` [T, E]."""
        hidden = torch.empty(len(token_ids), self.hidden_size)
        self.program.bind(self.out, hidden)
        self._layers.run(kv, meta, token_ids, embedded)
        return hidden

    def begin_greedy(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> tuple[Tensor, Running]:
        """The whole of a decoder's step: `greedy` of each of its tokens' hidden states, once it is done."""
        assert self.greedy is not None
        hidden = torch.empty(len(token_ids), self.hidden_size)
        self.program.bind(self.out, hidden)
        found = self.greedy.of(hidden)
        inputs, kept = self._layers.inputs(kv, meta, token_ids)
        return found, self.program.begin(inputs, self.greedy.program, (kept, hidden, found, kv))

    def count_experts(self, layer: int, counts: Tensor) -> None:
        """From now on each step adds its tokens by expert to `counts`, int64 [X]."""
        self.program.bind(self._layers.counts[layer], counts[None])

    @property
    def token_bytes(self) -> int:
        """What a step takes for each of its tokens: the program's buffers and the hidden states."""
        reading = 0 if self.encoder is None else self.encoder.token_bytes
        return self.program.token_bytes + 4 * self.hidden_size + reading


class CompiledEncoder:
    """`Decoder.encode` of an encoder-decoder: the encoder's layers, which use the first layer's cache in turn, and what each of
    the decoder's layers reads of the states."""

    def __init__(self, decoder: Decoder, ops: NativeOps) -> None:
        assert decoder.encoder is not None
        self._layers = written = _Layers(ops, decoder.spec.hidden_size, 1, embedded=True)
        waiting = False
        for layer in decoder.encoder.layers:
            waiting = written.layer(layer, 0, waiting, written.x)
        states: int | None = None
        for index, layer in enumerate(decoder.layers):
            assert layer.cross is not None
            if states is None:
                states = written.norm(decoder.encoder.final_norm, _form(layer.cross.kv), waiting, "states")
            written.remember(layer.cross, states, index)

    def __call__(self, embedded: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """Embedded whole texts [T, E]; keys and values go to `meta`'s slots of every layer's cache."""
        self._layers.run(kv, meta, None, embedded)

    @property
    def token_bytes(self) -> int:
        return self._layers.program.token_bytes + 4 * self._layers.hidden_size


class _Layers:
    """Writes layers into a program, and runs it. `x` is the residual, or, after norms that follow additions, the normed sum;
    `embedded`: the caller's, made before, since few tokens' worth of embeddings is nothing beside whole texts."""

    def __init__(self, ops: NativeOps, hidden_size: int, num_groups: int, *, embedded: bool) -> None:
        self.program = p = Program(ops.engine)
        self.num_groups = num_groups
        self.hidden_size = hidden_size
        self.x = p.bound() if embedded else p.buffer(FORM_F32, hidden_size)
        self.pending = p.buffer(FORM_F32, hidden_size)  # a branch's result, while it waits for a norm of its own
        self._forms: dict[tuple[str, int, int, int], int] = {}
        self.counts: dict[int, int] = {}  # by layer: the buffer where tokens are counted by expert
        self._kv: Sequence[LayerKV] | None = None
        self._pointers: object = None

    def run(
        self, kv: Sequence[LayerKV], meta: AttentionMetadata, token_ids: Tensor | None, embedded: Tensor | None
    ) -> None:
        if embedded is not None:
            embedded = embedded.to(torch.float32, copy=True, memory_format=torch.contiguous_format)  # added to in place
            self.program.bind(self.x, embedded)
        inputs, kept = self.inputs(kv, meta, token_ids)
        self.program.run(inputs)
        del kept, embedded

    def inputs(
        self, kv: Sequence[LayerKV], meta: AttentionMetadata, token_ids: Tensor | None
    ) -> tuple[native.StepInputs, object]:
        """The step as the library reads it, and what must live while it runs."""
        if self._kv is not kv:
            self._kv, self._pointers = kv, native.layer_pointers(kv)
        inputs, kept = native.step_inputs(meta, self._pointers, kv[0], token_ids, self.num_groups)
        return inputs, (kept, self._pointers)

    def layer(self, layer: Layer, index: int, waiting: bool, out: int) -> bool:
        """With the cache of layer `index`. `waiting`: whether `pending` is still to be added to the residual, before and (the
        result) after. What a norm at the layer's end gives goes to `out`."""
        from slipstream.model.decoder import LatentAttention, MoE

        at = index, layer.group
        norms, attention, mlp, block = layer.norms, layer.attention, layer.mlp, layer.spec.block
        match block:
            case PostNormBlock():
                assert not isinstance(attention, LatentAttention)
                assert not isinstance(mlp, MoE)
                self._attend(attention, self._convert(self.x, "x", attention.qkv, self.hidden_size), at, self.x, True)
                self._norm_of(norms["attention_norm"], self.x, -1, self.x, FORM_F32)
                self._feed(mlp, self._convert(self.x, "x", mlp.up, self.hidden_size), self.x, True)
                self._norm_of(norms["mlp_norm"], self.x, -1, out, FORM_F32)
                return False
            case ParallelBlock():
                assert not isinstance(attention, LatentAttention)
                assert not isinstance(mlp, MoE)
                x = self.norm(norms["norm"], _form(attention.qkv), waiting)
                other = self.norm(norms["mlp_norm"], _form(mlp.up), False, "mlp") if "mlp_norm" in norms else x
                self._attend(attention, x, at, self.x, True)
                self._feed(mlp, other, self.x, True)
                return False
            case SequentialBlock():
                post = norms.get("post_attention"), norms.get("post_mlp")
                if isinstance(attention, LatentAttention):
                    form = _form(attention.q_latent or attention.q, attention.latent)
                    x = self.norm(norms["pre_attention"], form, waiting)
                    self._mla_attention(attention, x, form, index, *self._into(post[0]))
                else:
                    if "pre_attention" in norms:
                        x = self.norm(norms["pre_attention"], _form(attention.qkv), waiting)
                    else:
                        x = self._convert(self.x, "x", attention.qkv, self.hidden_size)
                    self._attend(attention, x, at, *self._into(post[0]))
                waiting = self._normed(post[0])
                if layer.cross is not None:
                    x = self.norm(norms["pre_cross"], _form(layer.cross.q), waiting)
                    self._cross(layer.cross, x, index, layer.cross_group)
                    waiting = False
                if isinstance(mlp, MoE):
                    x = self._buffer("wide", FORM_F32, self.hidden_size)
                    self.add_norm(norms["pre_mlp"], x, FORM_F32, waiting)
                    self._mix(index, mlp, x, *self._into(post[1]))
                else:
                    self._feed(mlp, self.norm(norms["pre_mlp"], _form(mlp.up), waiting), *self._into(post[1]))
                return self._normed(post[1])

    # --- Pieces -----------------------------------------------------------------------------------------------------

    def embed(self, decoder: Decoder) -> None:
        spec = decoder.spec
        table = decoder.embed
        scale = 1.0
        if spec.embed_scale != 1.0:
            dtype = table.weight.dtype if isinstance(table, NativeLinear) else table.dtype
            scale = float(torch.tensor(spec.embed_scale, dtype=dtype))
        self._table(table, 0, 0, scale, False)
        if decoder.positions is not None and spec.learned_positions is not None:
            self._table(decoder.positions, 1, spec.learned_positions.offset, 1.0, True)

    def _table(self, table: object, by_position: int, offset: int, scale: float, accumulate: bool) -> None:
        if isinstance(table, NativeLinear):
            (part,) = table.parts
            kind, rows, inner, data = part.kind, part.rows, part.inner, part.data
        else:
            assert isinstance(table, Tensor)
            plain = table if table.dtype in (torch.float32, torch.bfloat16) else table.float()
            kind = native.ROWS_BF16 if plain.dtype == torch.bfloat16 else native.ROWS_F32
            (rows, inner), data = plain.shape, plain.contiguous()
        self.program.add("embed", self.x, by_position, offset, kind, rows, inner, data, scale, accumulate)

    def norm(self, norm: Norm, form: int, waiting: bool, name: str = "x") -> int:
        """The normed residual."""
        out = self._buffer(name, form, norm.spec.size)
        self.add_norm(norm, out, form, waiting)
        return out

    def add_norm(self, norm: Norm, out: int, form: int, waiting: bool) -> None:
        x, residual = (self.pending, self.x) if waiting else (self.x, -1)
        self._norm_of(norm, x, residual, out, form)

    def _norm_of(self, norm: Norm, x: int, residual: int, out: int, form: int) -> None:
        s = norm.spec
        bias = None if norm.bias is None else norm.bias.float()
        weight = norm.weight.float()
        self.program.add(
            "norm", x, residual, out, form, s.kind == "layer", s.size, weight, bias, s.eps, s.weight_offset
        )

    def _into(self, post: Norm | None) -> tuple[int, bool]:
        """Where a branch's result goes: added to the residual, or, with a norm of its own, to `pending`."""
        return (self.x, True) if post is None else (self.pending, False)

    def _normed(self, post: Norm | None) -> bool:
        """Whether the branch's result, normed here, now waits."""
        if post is not None:
            self._norm_of(post, self.pending, -1, self.pending, FORM_F32)
        return post is not None

    def _attend(self, attention: Attention, x: int, at: tuple[int, int], y: int, accumulate: bool) -> None:
        """`at`: the layer, whose cache is used, and its group, whose tables are."""
        s, p = attention.spec, self.program
        layer, group = at
        assert isinstance(attention.qkv, NativeLinear)
        assert isinstance(attention.out, NativeLinear)
        qkv = self._buffer("qkv", FORM_F32, s.q_size + 2 * s.kv_size)
        seen = self._buffer("seen", FORM_F32, s.q_size)
        add_linear(p, x, qkv, attention.qkv)
        add_rope_and_cache(p, qkv, layer, attention.heads, group=group)
        sizes = s.num_heads, s.num_kv_heads, s.head_dim, s.head_dim
        add_attention(p, qkv, seen, layer, sizes, attention.params, group=group)
        add_linear(p, self._convert(seen, "seen", attention.out, s.q_size), y, attention.out, accumulate=accumulate)

    def _mla_attention(
        self, attention: LatentAttention, x: int, form: int, layer: int, y: int, accumulate: bool
    ) -> None:
        """x, in `form`, may be float32 where its products read different forms."""
        s, p = attention.spec, self.program
        q, out, rows = attention.q, attention.out, x
        assert isinstance(q, NativeLinear)
        assert isinstance(out, NativeLinear)
        if attention.q_latent is not None:
            assert s.q_rank is not None
            assert attention.q_norm is not None
            rank, weight = self._product(attention.q_latent, x, "q latent", form), attention.q_norm.float()
            rows, form_of_rows = self._buffer("normed q latent", q.form, s.q_rank), q.form
            p.add("norm", rank, -1, rows, q.form, False, s.q_rank, weight, None, s.eps, 0.0)
        else:
            form_of_rows = form
        asked = self._product(q, rows, "q", form_of_rows)
        row = self._product(attention.latent, x, "latent", form)
        queries = self._buffer("queries", FORM_F32, s.num_heads * s.head_dim)
        seen = self._buffer("seen", FORM_F32, s.out_inner)
        turned = attention.cos_sin, s.position.style == "interleaved"
        add_latent_queries(p, asked, row, queries, layer, attention.keys, attention.k_norm, s.eps, *turned, self._buffer)
        add_latent_attention(p, queries, seen, layer, attention.values, s.rotary_dim, s.scale, self._buffer)
        add_linear(p, self._convert(seen, "seen", out, s.out_inner), y, out, accumulate=accumulate)

    def _cross(self, cross: CrossAttention, x: int, layer: int, group: int) -> None:
        """Queries over what `remember` left in the layer's cache, added to the residual."""
        s, p = cross.spec, self.program
        assert isinstance(cross.q, NativeLinear)
        assert isinstance(cross.out, NativeLinear)
        q, seen = (self._buffer(name, FORM_F32, s.q_size) for name in ("q", "seen"))
        add_linear(p, x, q, cross.q)
        sizes = s.num_heads, s.num_kv_heads, s.head_dim, s.head_dim
        add_attention(p, q, seen, layer, sizes, cross.params, group=group)
        add_linear(p, self._convert(seen, "seen", cross.out, s.q_size), self.x, cross.out, accumulate=True)

    def remember(self, cross: CrossAttention, states: int, layer: int) -> None:
        """Keys and values of an encoder's states go to the step's slots of the layer's cache."""
        s, p = cross.spec, self.program
        assert isinstance(cross.kv, NativeLinear)
        kv = self._buffer("kv", FORM_F32, 2 * s.kv_size)
        add_linear(p, states, kv, cross.kv)
        add_rope_and_cache(p, kv, layer, dataclasses.replace(cross.heads, num_heads=0))

    def _feed(self, mlp: MLP, x: int, y: int, accumulate: bool) -> None:
        s, p = mlp.spec, self.program
        assert isinstance(mlp.up, NativeLinear)
        assert isinstance(mlp.down, NativeLinear)
        form, activation = mlp.down.form, activation_of(s.activation)
        assert activation is not None
        inner = self._buffer("inner", form, s.intermediate_size)
        if s.gated and len(mlp.up.parts) == 1 and s.intermediate_size % 32 == 0:
            part = mlp.up.parts[0]
            weight = (part.kind, part.rows, part.inner, part.data)
            p.add("gated_linear", x, inner, form, *activation, *weight, mlp.up.bias, weights=part)
        else:
            up = self._buffer("up", FORM_F32, mlp.up.out_features)
            add_linear(p, x, up, mlp.up)
            p.add("activation", up, inner, form, *activation, s.gated, s.intermediate_size, 1)
        add_linear(p, inner, y, mlp.down, accumulate=accumulate)

    def _mix(self, layer: int, mlp: MoE, x: int, y: int, accumulate: bool) -> None:
        """A mixture of experts, and the MLP beside them that every token passes; x is float32."""
        p, size, up, down = self.program, self.hidden_size, mlp.up, mlp.down
        assert isinstance(up, NativeExperts)
        assert isinstance(down, NativeExperts)
        logits = self._product(mlp.router, x, "router")
        rows = self._buffer("expert rows", up.form, size, mlp.spec.num_experts_per_token)
        self.counts[layer] = p.bound()
        add_choice(p, x, logits, self.counts[layer], mlp.spec, mlp.experts.correction, rows, up.form, size)
        results, shared, weight = add_experts(p, rows, up, down, mlp.spec, self._buffer), -1, -1
        if mlp.shared_weight is not None:
            weight = self._product(mlp.shared_weight, x, "shared weight")
        if mlp.shared is not None:
            assert isinstance(mlp.shared.up, NativeLinear)
            shared = self._buffer("shared", FORM_F32, size)
            self._feed(mlp.shared, self._convert(x, "x", mlp.shared.up, size), shared, False)
        p.add("combine", results, y, size, shared, weight, accumulate)

    def _product(self, w: object, x: int, name: str, form: int = FORM_F32) -> int:
        assert isinstance(w, NativeLinear)
        out = self._buffer(name, FORM_F32, w.out_features)
        add_linear(self.program, self._convert(x, "x", w, w.weight.shape[1], form), out, w)
        return out

    def _convert(self, x: int, name: str, reader: object, size: int, form: int = FORM_F32) -> int:
        """x in the form that the product `reader` wants: it is that already, or float32."""
        assert isinstance(reader, NativeLinear)
        if reader.form == form:
            return x
        assert form == FORM_F32
        out = self._buffer(name, reader.form, size)
        self.program.add("convert", x, out, reader.form, size, 1)
        return out

    def _buffer(self, name: str, form: int, size: int, rows_a_token: int = 1) -> int:
        """Layers share their buffers."""
        key = (name, form, size, rows_a_token)
        if key not in self._forms:
            self._forms[key] = self.program.buffer(form, size, rows_a_token)
        return self._forms[key]


def _form(*readers: object) -> int:
    """In which these products read one row: float32, which is converted for each, where they want different forms."""
    forms = set()
    for reader in readers:
        assert isinstance(reader, NativeLinear)
        forms.add(reader.form)
    return forms.pop() if len(forms) == 1 else FORM_F32
