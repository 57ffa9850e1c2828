"""A decoder's step as one program of the C++ kernels: Python gives tokens, lengths and tables, and gets hidden states.

The program is `Decoder.forward` written out once, operator by operator, over buffers of float32 (`x`, the residual, what
attention saw) and of the form that the next product reads (`native.FORM_*`). Where a branch's result only joins the residual,
the product adds it there itself; where gate and up are one product, their activation is its epilogue. """

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.kernels import native
from slipstream.kernels.cpu import NativeLinear, NativeOps, Product, add_linear
from slipstream.kernels.native import ACTIVATIONS, FORM_F32, Program
from slipstream.kernels.ops import AttentionMetadata, LayerKV
from slipstream.model.spec import (
    DenseSpec,
    LatentAttentionSpec,
    ModelSpec,
    OwnNorm,
    PostNormBlock,
    RopeSpec,
    SequentialBlock,
)

if TYPE_CHECKING:
    from slipstream.model.decoder import MLP, Attention, Decoder, Norm


def compile_step(decoder: Decoder) -> CompiledStep | None:
    """The decoder's program, if its op set has such programs and they cover its spec. Without, the decoder's own loop runs,
    with the same kernels one by one."""
    if not isinstance(decoder.ops, NativeOps) or not covers(decoder.spec):
        return None
    return CompiledStep(decoder, decoder.ops)


def covers(spec: ModelSpec) -> bool:
    """Not yet: encoder-decoders, latent attention, mixtures of experts, activations and norms of one's own, norms over whole
    rows of q and k, scaled branches, clipped q, k and v, and of decoders norms after the addition and embeddings with a norm
    or a width of their own."""
    if spec.encoder is not None:
        return False
    if spec.is_encoder:
        return spec.final_norm is None and all(
            isinstance(layer.block, PostNormBlock)
            and isinstance(layer.mlp, DenseSpec)
            and layer.mlp.activation in ACTIVATIONS
            and layer.residual_scale == 1.0
            and not any(isinstance(norm.kind, OwnNorm) for norm in layer.norms.values())
            for layer in spec.layers
        )
    if spec.embed_size is not None or spec.embed_norm is not None or spec.final_norm is None:
        return False
    if isinstance(spec.final_norm.kind, OwnNorm):
        return False
    for layer in spec.layers:
        a, norms = layer.attention, layer.norms
        if isinstance(a, LatentAttentionSpec) or any(isinstance(norm.kind, OwnNorm) for norm in norms.values()):
            return False
        if not isinstance(layer.mlp, DenseSpec) or layer.residual_scale != 1.0 or a.clip_qkv is not None:
            return False
        if layer.mlp.activation not in ACTIVATIONS:
            return False
        if a.qk_norm is not None and a.qk_norm.over != "head":
            return False
        if isinstance(layer.block, PostNormBlock) or not norms.keys() & {"pre_attention", "norm"}:
            return False
        if isinstance(layer.block, SequentialBlock) and "pre_mlp" not in norms:
            return False
    return True


class CompiledStep:
    head: Product  # float32 [N, E] → logits float32 [N, V]; an encoder has none

    def __init__(self, decoder: Decoder, ops: NativeOps) -> None:
        from slipstream.model.decoder import LatentAttention, MoE

        self.program = p = Program(ops.engine)
        self.hidden_size = hidden = decoder.spec.hidden_size
        self.x = p.buffer(FORM_F32, hidden)  # the residual
        self.pending = p.buffer(FORM_F32, hidden)  # a branch's result, while it waits for a norm of its own
        self.out = p.bound()
        self._forms: dict[tuple[str, int, int], int] = {}
        self._kv: Sequence[LayerKV] | None = None
        self._layers: object = None
        self.spec = decoder.spec
        if decoder.spec.is_encoder:
            self._encode(decoder)
            return
        self._embed(decoder)
        waiting = False  # whether `pending` is still to be added to the residual
        for index, layer in enumerate(decoder.layers):
            norms, attention, mlp = layer.norms, layer.attention, layer.mlp
            assert not isinstance(mlp, MoE)
            assert not isinstance(attention, LatentAttention)
            if isinstance(layer.spec.block, SequentialBlock):
                post = norms.get("post_attention"), norms.get("post_mlp")
                x = self._norm(norms["pre_attention"], attention.qkv, waiting)
                self._attend(attention, x, index, *self._into(post[0]))
                waiting = self._normed(post[0])
                x = self._norm(norms["pre_mlp"], mlp.up, waiting)
                self._feed(mlp, x, *self._into(post[1]))
                waiting = self._normed(post[1])
            else:
                x = self._norm(norms["norm"], attention.qkv, waiting)
                other = self._norm(norms["mlp_norm"], mlp.up, False, "mlp") if "mlp_norm" in norms else x
                self._attend(attention, x, index, self.x, True)
                self._feed(mlp, other, self.x, True)
                waiting = False
        assert decoder.final_norm is not None
        self._add_norm(decoder.final_norm, self.out, FORM_F32, waiting)
        assert isinstance(decoder.head, NativeLinear)
        self.head = Product(ops.engine, decoder.head)

    def __call__(
        self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata, embedded: Tensor | None = None
    ) -> Tensor:
        """As `Decoder.forward`; the result is float32. An encoder's step begins with what is `embedded` [T, E]."""
        if self._kv is not kv:
            self._kv, self._layers = kv, native.layer_pointers(kv)
        hidden = torch.empty(len(token_ids), self.hidden_size)
        if embedded is not None:
            embedded = embedded.to(torch.float32, copy=True, memory_format=torch.contiguous_format)  # added to in place
            self.program.bind(self.x, embedded)
        self.program.bind(self.out, hidden)
        inputs, kept = native.step_inputs(meta, self._layers, kv[0], token_ids)
        self.program.run(inputs)
        del kept, embedded
        return hidden

    @property
    def token_bytes(self) -> int:
        """What a step takes for each of its tokens: the program's buffers and the hidden states."""
        return self.program.token_bytes + 4 * self.hidden_size

    def _encode(self, decoder: Decoder) -> None:
        """Layers with a norm after each half: what is added to is the normed sum itself. The first reads embeddings that the
        caller has made, since few tokens' worth of them is nothing beside whole texts."""
        from slipstream.model.decoder import LatentAttention, MoE

        self.x = self.program.bound()
        for index, layer in enumerate(decoder.layers):
            attention, mlp = layer.attention, layer.mlp
            assert not isinstance(mlp, MoE)
            assert not isinstance(attention, LatentAttention)
            assert isinstance(attention.qkv, NativeLinear)
            assert isinstance(mlp.up, NativeLinear)
            self._attend(attention, self._convert(self.x, "x", attention.qkv, self.hidden_size), index, self.x, True)
            self._norm_of(layer.norms["attention_norm"], self.x, -1, self.x, FORM_F32)
            self._feed(mlp, self._convert(self.x, "x", mlp.up, self.hidden_size), self.x, True)
            out = self.out if index + 1 == len(decoder.layers) else self.x
            self._norm_of(layer.norms["mlp_norm"], self.x, -1, out, FORM_F32)

    # --- Pieces -----------------------------------------------------------------------------------------------------

    def _embed(self, decoder: Decoder) -> None:
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

    def _norm(self, norm: Norm, reader: object, waiting: bool, name: str = "x") -> int:
        """The normed residual, in the form that the product `reader` wants."""
        assert isinstance(reader, NativeLinear)
        out = self._buffer(name, reader.form, norm.spec.size)
        self._add_norm(norm, out, reader.form, waiting)
        return out

    def _add_norm(self, norm: Norm, out: int, form: int, waiting: bool) -> None:
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

    def _attend(self, attention: Attention, x: int, layer: int, y: int, accumulate: bool) -> None:
        s, p = attention.spec, self.program
        assert isinstance(attention.qkv, NativeLinear)
        assert isinstance(attention.out, NativeLinear)
        qkv = self._buffer("qkv", FORM_F32, s.q_size + 2 * s.kv_size)
        seen = self._buffer("seen", FORM_F32, s.q_size)
        sizes = (s.num_heads, s.num_kv_heads, s.head_dim)
        norms = [None if t is None else t.float() for t in (attention.q_norm, attention.k_norm)]
        eps, offset = (s.qk_norm.eps, s.qk_norm.weight_offset) if s.qk_norm else (0.0, 0.0)
        rotary = 0 if attention.cos_sin is None else attention.cos_sin.shape[1]
        interleaved = isinstance(s.position, RopeSpec) and s.position.style == "interleaved"
        add_linear(p, x, qkv, attention.qkv)
        p.add("rope_and_cache", qkv, layer, *sizes, attention.cos_sin, rotary, interleaved, *norms, eps, offset)
        of_heads = attention.slopes, None if attention.sinks is None else attention.sinks.float()
        bias = None if attention.bias is None else attention.bias.float()
        reach = 0 if bias is None else bias.shape[1] // 2
        masks = s.window or 0, s.softcap or 0.0, *of_heads, bias, reach, s.causal
        p.add("attention", qkv, seen, layer, *sizes, s.scale, *masks)
        add_linear(p, self._convert(seen, "seen", attention.out, s.q_size), y, attention.out, accumulate=accumulate)

    def _feed(self, mlp: MLP, x: int, y: int, accumulate: bool) -> None:
        s, p = mlp.spec, self.program
        assert isinstance(mlp.up, NativeLinear)
        assert isinstance(mlp.down, NativeLinear)
        form, kind = mlp.down.form, ACTIVATIONS[s.activation]  # type: ignore[index]
        inner = self._buffer("inner", form, s.intermediate_size)
        if s.gated and len(mlp.up.parts) == 1 and s.intermediate_size % 32 == 0:
            part = mlp.up.parts[0]
            weight = (part.kind, part.rows, part.inner, part.data)
            p.add("gated_linear", x, inner, form, kind, *weight, mlp.up.bias, weights=part)
        else:
            up = self._buffer("up", FORM_F32, mlp.up.out_features)
            add_linear(p, x, up, mlp.up)
            p.add("activation", up, inner, form, kind, s.gated, s.intermediate_size)
        add_linear(p, inner, y, mlp.down, accumulate=accumulate)

    def _convert(self, x: int, name: str, reader: NativeLinear, size: int) -> int:
        if reader.form == FORM_F32:
            return x
        out = self._buffer(name, reader.form, size)
        self.program.add("convert", x, out, reader.form, size)
        return out

    def _buffer(self, name: str, form: int, size: int) -> int:
        """Layers share their buffers."""
        key = (name, form, size)
        if key not in self._forms:
            self._forms[key] = self.program.buffer(form, size)
        return self._forms[key]
