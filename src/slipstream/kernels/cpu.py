"""The op set of a CPU: C++ kernels (csrc/cpu) for everything but the sampler's draws, which are torch's. Mixtures of experts
and latent attention have files of their own (`cpu_moe.py`, `cpu_mla.py`).

A whole step runs as one program without coming back to Python (`model/program.py`). Called one by one, the ops here do the same
work with the same kernels, in float32 inside: a bfloat16 tensor is widened, and the result rounded.

Weights are packed once, and the packed form replaces the dense one:

1. `int8` has a scale a row. Its inputs are rounded to 8 bits with a scale for every 32 of a token.
2. An int8 weight with enough zeros (`SPARSE_FROM`) is held sparse: a bit for each place and the numbers that are not zero.
   Patterns (2:4, N:M) are no case of their own.
3. GGUF's types are used as they are (`CPU_BLOCK_BYTES`), and so are 4-bit weights by groups of 128 or 32 (`int4`, GPTQ, AWQ).
   Their inputs are rounded as `int8`'s are (docs/quantization.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels import native
from slipstream.kernels.cpu_mla import add_latent_attention, add_latent_queries, pack_head_weight
from slipstream.kernels.cpu_moe import (
    NativeExperts,
    add_choice,
    add_down,
    add_expert_linear,
    add_experts,
    group_form,
    pack_expert_weight,
)
from slipstream.kernels.cpu_torch import CpuOps
from slipstream.kernels.metadata import AttentionMetadata, ExpertLoad, LayerKV, SamplingTensors
from slipstream.kernels.native import Arena, NativeLinear, Packed, Program, ThreadPool, activation_of
from slipstream.kernels.ops import AttentionParams, Experts, MLAParams, NormParams, QKVLayout
from slipstream.kernels.packed_file import read_packed, write_packed
from slipstream.kernels.quantize import round_linear
from slipstream.kernels.weights import Activations, BlockLinear, GroupedLinear, Linear, ScaledLinear
from slipstream.platform.arch import CPU_ISAS
from slipstream.spec.model import Activation, OwnActivation, OwnNorm
from slipstream.spec.scheme import CPU_BLOCK_BYTES, HELD_PRODUCTS, InputFormat, Scheme

SPARSE_FROM, SPARSE_FROM_ELSEWHERE = 0.4, 0.8
"""The share of zeros from which an int8 weight is held sparse: where an instruction expands bytes (`vpexpandb`), and elsewhere.
A sparse weight takes (1 − zeros) + 1/8 of the dense one's bytes. With it a product of one token spends some 8 instructions on
64 numbers, as few as keep ahead of the memory. Without it, some 60, so the bytes must be few, or the cores many, before it pays
(`benchmarks/kernels.py`)."""


class NativeOps(CpuOps):
    """`isa` forces an instruction set (tests); by default the machine's best. `sparse_from`: instead of `SPARSE_FROM`."""

    name = "cpu"
    rounded = HELD_PRODUCTS["cpu"]
    block_types = frozenset(CPU_BLOCK_BYTES)

    def __init__(self, num_threads: int = 1, isa: str | None = None, sparse_from: float | None = None) -> None:
        super().__init__()
        self.pool = ThreadPool(num_threads, isa)
        chosen = SPARSE_FROM if CPU_ISAS[self.pool.isa].expands_bytes else SPARSE_FROM_ELSEWHERE
        self._sparse_from = chosen if sparse_from is None else sparse_from
        self._arena = Arena(self.pool)
        self._argmax: dict[int, tuple[Program, int, int]] = {}  # by vocabulary

    def describe(self) -> str:
        return f"cpu (C++, {self.pool.isa})"

    # --- Weights ----------------------------------------------------------------------------------------------------

    def quantize_weight(self, weight: Tensor, bias: Tensor | None, scheme: Scheme | None = None) -> NativeLinear:
        if scheme is not None and scheme.name == "int4":
            return self.pack_weight(_round_groups(weight, bias, scheme))
        if scheme is not None and scheme.name != "int8":
            raise _no_product(scheme)
        if scheme is not None:
            return _native(weight, bias, (self._eight_bits(weight, None),))
        kind = native.BF16 if weight.dtype == torch.bfloat16 else native.F32
        packed = Packed.empty(kind, weight.shape[0], weight.shape[1], self._arena)
        packed.put_dense(weight)
        return _native(weight, bias, (packed,))

    def pack_weight(self, w: Linear) -> NativeLinear:
        if isinstance(w, NativeLinear):
            return _native(w.weight, w.bias, w.parts)
        if isinstance(w, BlockLinear):
            return _native(w.weight, w.bias, _pack_blocks(w, self._arena))
        if isinstance(w, GroupedLinear):
            stand_in = torch.empty(len(w.weight), w.weight.shape[1] * 4, device="meta", dtype=w.scales.dtype)
            form = group_form(w)
            packed = Packed.empty(form.kind, len(w.weight), stand_in.shape[1], self._arena)
            form.put(packed)
            return _native(stand_in, w.bias, (packed,))
        if isinstance(w, ScaledLinear) and w.weight.dtype == torch.int8:
            stand_in = torch.empty_like(w.weight, device="meta", dtype=w.out_dtype)
            return _native(stand_in, w.bias, (self._eight_bits(w.weight, w.scales),))
        raise ConfigError(
            "the CPU's kernels have no product with such weights; use kernels='reference'", field="kernels"
        )

    def _eight_bits(self, weight: Tensor, scales: Tensor | None) -> Packed:
        """Codes with their scales, or numbers that are rounded here, in the form that is faster."""
        dense = Packed.empty(native.I8, weight.shape[0], weight.shape[1], Arena(self.pool, 0))
        if scales is None:
            dense.put_dense(weight)
        else:
            dense.put_codes(weight, scales)
        return dense.sparse(self._arena) if dense.zeros >= self._sparse_from else dense.moved(self._arena)

    def quantize_experts(
        self, weight: Tensor, scheme: Scheme | None = None, bias: Tensor | None = None, *, num_experts: int
    ) -> NativeExperts:
        if scheme is not None and scheme.inputs is None:  # int4, mxfp4
            return pack_expert_weight(_round_groups(weight, bias, scheme), num_experts, self._arena)
        if scheme is not None and scheme.name != "int8":
            raise _no_product(scheme)
        return pack_expert_weight(Linear(weight=weight, bias=bias), num_experts, self._arena, eight_bits=scheme is not None)

    def pack_experts(self, w: Linear, *, num_experts: int) -> NativeExperts:
        if isinstance(w, NativeExperts):
            return replace(w, bias=None if w.bias is None else w.bias.float().contiguous())
        return pack_expert_weight(w, num_experts, self._arena)

    def pack_heads(self, weight: Tensor) -> NativeExperts:
        return pack_head_weight(weight, self._arena)

    @property
    def layout(self) -> str:
        return f"{native.library_digest()}-{self.pool.isa}-{self._sparse_from}"

    def write_products(self, path: Path, products: Mapping[str, Linear]) -> int:
        made = {n: w for n, w in products.items() if isinstance(w, (NativeLinear, NativeExperts)) and w.is_rounded}
        return write_packed(path, made) if len(made) == len(products) else 0

    def read_products(self, path: Path) -> dict[str, Linear]:
        return read_packed(path, self._arena, self.pool.num_threads)

    def embedding(self, table: Tensor | Linear, tied: Linear | None) -> Tensor | Linear:
        if isinstance(tied, NativeLinear) and all(p.kind not in (native.I8, native.S8) for p in tied.parts):
            return tied  # the head's rows are the table's, exactly
        return self.pack_weight(table) if isinstance(table, Linear) else table

    def embed(self, token_ids: Tensor, table: Tensor | Linear, scale: float = 1.0) -> Tensor:
        if isinstance(table, Tensor):
            return super().embed(token_ids, table, scale)
        assert isinstance(table, NativeLinear)
        assert len(table.parts) == 1
        rows = table.parts[0].rows_of(token_ids).to(table.weight.dtype)
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)

    def forms_of(self, w: Linear) -> list[tuple[str, int]]:
        if not isinstance(w, (NativeLinear, NativeExperts)):
            return super().forms_of(w)
        return [(native.KIND_NAMES[part.kind], part.data.numel()) for part in w.parts]

    # --- Layers -----------------------------------------------------------------------------------------------------

    def linear(self, x: Activations, w: Linear) -> Tensor:
        assert isinstance(x, Tensor)
        return LinearProgram(self.pool, w)(_wide(x)).to(x.dtype) if isinstance(w, NativeLinear) else super().linear(x, w)

    def norm(
        self, x: Tensor, norm: NormParams, *, residual: Tensor | None = None, inputs: InputFormat | None = None
    ) -> tuple[Activations, Tensor]:
        if isinstance(norm.kind, OwnNorm):
            return super().norm(x, norm, residual=residual, inputs=inputs)
        assert inputs is None
        total = None if residual is None else residual.float().clone(memory_format=torch.contiguous_format)
        out = torch.empty(x.shape, dtype=torch.float32)
        p = Program(self.pool)
        into = -1 if total is None else p.bound(total)
        add_norm(p, p.bound(_wide(x)), into, p.bound(out), 0, x.shape[1], norm)
        self._run(p, len(x))
        return out.to(x.dtype), x if total is None else total.to(x.dtype)

    def activation(
        self, x: Tensor, activation: Activation, *, gated: bool = False, inputs: InputFormat | None = None
    ) -> Activations:
        if isinstance(activation, OwnActivation):
            return super().activation(x, activation, gated=gated, inputs=inputs)
        assert inputs is None
        size = x.shape[1] // 2 if gated else x.shape[1]
        out = torch.empty(len(x), size)
        p = Program(self.pool)
        kind = activation_of(activation)
        assert kind is not None
        p.add("activation", p.bound(_wide(x)), p.bound(out), 0, *kind, gated, size, 1)
        self._run(p, len(x))
        return out.to(x.dtype)

    def moe(self, x: Tensor, router_logits: Tensor, experts: Experts, load: ExpertLoad | None = None) -> Tensor:
        up, down, spec = experts.up, experts.down, experts.spec
        assert isinstance(up, NativeExperts)
        assert isinstance(down, NativeExperts)
        step = native.StepInputs(num_tokens=len(x))
        counts = None
        if load is not None:
            step.groups = (native.GroupInputs * 1)(native.GroupInputs(slots=load.slots.data_ptr()))
            counts, step.block_size = load.counts[None], load.block_size
        rows, size, k = _wide(x), x.shape[1], spec.num_experts_per_token
        logits, out = _wide(router_logits), torch.empty(x.shape, dtype=torch.float32)

        def begun(counted: Tensor | None, form: int) -> tuple[Program, int]:
            p = Program(self.pool)
            gathered = p.buffer(form, size, k)
            places = p.bound(rows), p.bound(logits), p.bound(counted)
            add_choice(p, *places, spec, experts.correction, gathered, form, size)
            return p, gathered

        p, gathered = begun(counts, up.form)
        if isinstance(spec.expert.activation, OwnActivation):  # torch's, between two programs that choose alike
            wide = torch.empty(len(x) * k, up.rows)
            add_expert_linear(p, gathered, p.bound(wide), up)
            p.run(step)
            inner = self.activation(wide, spec.expert.activation, gated=spec.expert.gated)
            assert isinstance(inner, Tensor)
            p, _ = begun(None, native.FORM_F32)
            own = p.buffer(down.form, down.inner, k)
            p.add("convert", p.bound(_wide(inner)), own, down.form, down.inner, k)
            results = add_down(p, own, down, spec, lambda _, *sizes: p.buffer(*sizes))
        else:
            results = add_experts(p, gathered, up, down, spec, lambda _, *sizes: p.buffer(*sizes))
        p.add("combine", results, p.bound(out), size, -1, -1, False)
        p.run(step)
        return out.to(x.dtype)

    def rope_and_cache(self, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout) -> Tensor:
        if kv.latent:
            return super().rope_and_cache(qkv, kv, meta, heads)
        rows = qkv.float().clone(memory_format=torch.contiguous_format)
        p = Program(self.pool)
        add_rope_and_cache(p, p.bound(rows), 0, heads)
        self._run_cached(p, kv, meta)
        q_size = heads.num_heads * heads.head_dim
        return rows[:, :q_size].reshape(-1, heads.num_heads, heads.head_dim).to(qkv.dtype)

    def attention(self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams) -> Tensor:
        (_, num_heads, head_dim), value_dim = q.shape, kv.v.shape[3]
        out = torch.empty(len(q), num_heads * value_dim)
        p = Program(self.pool)
        sizes = num_heads, kv.k.shape[1], head_dim, value_dim
        add_attention(p, p.bound(_wide(q.flatten(1))), p.bound(out), 0, sizes, params)
        self._run_cached(p, kv, meta)
        return out.view(-1, num_heads, value_dim).to(q.dtype)

    def mla_queries(self, q: Tensor, row: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams) -> Tensor:
        out = torch.empty(len(q), q.shape[1], params.rotary_dim + params.keys.rows)
        p = Program(self.pool)
        places = p.bound(_wide(q.flatten(1))), p.bound(_wide(row)), p.bound(out.flatten(1)), 0
        add_latent_queries(p, *places, params, lambda _, *sizes: p.buffer(*sizes))
        self._run_cached(p, kv, meta)
        return out.to(q.dtype)

    def mla_paged_attention(self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams) -> Tensor:
        out = torch.empty(len(q), params.values.out_features)
        p = Program(self.pool)
        add_latent_attention(p, p.bound(_wide(q.flatten(1))), p.bound(out), 0, params, lambda _, *sizes: p.buffer(*sizes))
        self._run_cached(p, kv, meta)
        return out.to(q.dtype)

    # --- Sampling ---------------------------------------------------------------------------------------------------

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        if not params.all_greedy or params.changes_logits:
            return super().sample(logits, params)
        wide, tokens = _wide(logits), torch.empty(len(logits), 1, dtype=torch.int64)
        size = wide.shape[1]
        if size not in self._argmax:
            p = Program(self.pool)
            self._argmax[size] = p, p.bound(), p.bound()
            p.add("argmax", *self._argmax[size][1:], size)
        p, x, out = self._argmax[size]
        p.bind(x, wide)
        p.bind(out, tokens)
        self._run(p, len(wide))
        return tokens[:, 0]

    def _run_cached(self, program: Program, kv: LayerKV, meta: AttentionMetadata) -> None:
        """With the cache as layer 0's."""
        inputs, kept = native.step_inputs(meta, native.layer_pointers([kv]), kv)
        program.run(inputs)
        del kept

    def _run(self, program: Program, num_tokens: int) -> None:
        program.run(native.StepInputs(num_tokens=num_tokens))


class LinearProgram:
    """One product as a program of its own: float32 [T, in] → [T, out]."""

    def __init__(self, pool: ThreadPool, w: NativeLinear) -> None:
        self._w, self.program = w, Program(pool)
        self._x, self._y = self.program.bound(), self.program.bound()
        size, x = w.weight.shape[1], self._x
        if w.form != native.FORM_F32:
            x = self.program.buffer(w.form, size)
            self.program.add("convert", self._x, x, w.form, size, 1)
        add_linear(self.program, x, self._y, w)

    def __call__(self, x: Tensor) -> Tensor:
        assert (x.dtype, x.shape[1]) == (torch.float32, self._w.weight.shape[1])
        y = torch.empty(len(x), self._w.out_features)
        self.program.bind(self._x, x)
        self.program.bind(self._y, y)
        self.program.run(native.StepInputs(num_tokens=len(x)))
        return y


class LinearArgmax:
    """Where a product's rows are largest, of equals the first: float32 [T, in] → int64 [T]. The rows themselves, [T, out], are
    never there as a whole."""

    def __init__(self, pool: ThreadPool, w: NativeLinear) -> None:
        (part,) = w.parts
        self.program = p = Program(pool)
        self._size, self._x, self._out = part.inner, p.bound(), p.bound()
        x = self._x
        if w.form != native.FORM_F32:
            x = p.buffer(w.form, part.inner)
            p.add("convert", self._x, x, w.form, part.inner, 1)
        p.add("linear_argmax", x, self._out, part.kind, part.rows, part.inner, part.data, w.bias, weights=part)

    def __call__(self, x: Tensor) -> Tensor:
        found = self.of(x)
        self.program.run(native.StepInputs(num_tokens=len(x)))
        return found

    def of(self, x: Tensor) -> Tensor:
        """What `program`, when it runs next, finds for `x`. Both must live until then."""
        assert (x.dtype, x.shape[1]) == (torch.float32, self._size)
        found = torch.empty(len(x), 1, dtype=torch.int64)
        self.program.bind(self._x, x)
        self.program.bind(self._out, found)
        return found[:, 0]


def add_linear(program: Program, x: int, y: int, w: NativeLinear, *, accumulate: bool = False) -> None:
    """A product, part by part: x in the weight's form, y float32."""
    row = 0
    for part in w.parts:
        bias = None if w.bias is None else w.bias[row : row + part.rows]
        program.add("linear", x, y, row, part.kind, part.rows, part.inner, part.data, bias, accumulate, weights=part)
        row += part.rows


def add_norm(program: Program, x: int, residual: int, out: int, form: int, size: int, norm: NormParams) -> None:
    """float32 rows → rows in `form`. With a residual (else -1) x is added to it and the sum is normed."""
    bias = None if norm.bias is None else norm.bias.float()
    how = norm.weight.float(), bias, norm.eps, norm.offset
    program.add("norm", x, residual, out, form, norm.kind == "layer", size, *how)


def add_rope_and_cache(program: Program, qkv: int, layer: int, h: QKVLayout, *, group: int = 0) -> None:
    """float32 rows: q is turned where it stands, k and v go to the step's slots of `group` in the layer's cache."""
    norms = [None if t is None else t.float() for t in (h.q_norm, h.k_norm)]
    sizes = h.num_heads, h.num_kv_heads, h.head_dim
    turned = h.cos_sin, h.rotary_dim, h.interleaved
    program.add("rope_and_cache", qkv, layer, group, *sizes, *turned, *norms, h.norm_eps, h.norm_offset)


def add_attention(
    program: Program, q: int, out: int, layer: int, sizes: tuple[int, int, int, int], s: AttentionParams, *, group: int = 0
) -> None:
    """float32 rows that begin with q → what they see. `sizes`: heads, kv heads, head dim, values'. `group`: whose tables say
    where the keys and values are."""
    of_heads = [None if t is None else t.float().contiguous() for t in (s.alibi_slopes, s.sinks, s.distance_bias)]
    masks = s.window or 0, s.softcap or 0.0, *of_heads, s.reach, s.causal
    program.add("attention", q, out, layer, group, *sizes, s.scale, *masks)


def _native(weight: Tensor, bias: Tensor | None, parts: tuple[Packed, ...]) -> NativeLinear:
    stand_in = weight if weight.device.type == "meta" else torch.empty_like(weight, device="meta")
    return NativeLinear(weight=stand_in, bias=None if bias is None else bias.float(), parts=parts)


def _pack_blocks(w: BlockLinear, arena: Arena) -> tuple[Packed, ...]:
    """One part if all rows have one type, else a part for each run of rows that a tensor of the checkpoint fills."""
    rows, inner = w.weight.shape
    if len({piece.type for piece in w.pieces}) == 1:
        packed = Packed.empty(native.BLOCK_KINDS[w.pieces[0].type], rows, inner, arena)
        for piece in w.pieces:
            to = None if piece.order is None else piece.order + piece.start
            packed.put_blocks(piece.blocks.ctypes.data, piece.rows, piece.start, to)
        return (packed,)
    parts = []
    for piece in sorted(w.pieces, key=lambda piece: piece.start):
        packed = Packed.empty(native.BLOCK_KINDS[piece.type], piece.rows, inner, arena)
        packed.put_blocks(piece.blocks.ctypes.data, piece.rows, 0, piece.order)
        parts.append(packed)
    return tuple(parts)


def _round_groups(weight: Tensor, bias: Tensor | None, scheme: Scheme) -> Linear:
    """To nearest. Scales of 32 float32 numbers are float16, as GGUF's."""
    halves = scheme.name == "int4" and scheme.group_size == 32 and weight.dtype == torch.float32
    return round_linear(weight, bias, scheme, torch.float16 if halves else weight.dtype)


def _no_product(scheme: Scheme) -> ConfigError:
    return ConfigError(f"the CPU's kernels have no {scheme.name} product; use 'int8' or 'int4'", field="quantization")


def _wide(x: Tensor) -> Tensor:
    """Float32 with rows that lie together."""
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()
