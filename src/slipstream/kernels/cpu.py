"""The op set of a CPU: C++ kernels (csrc/cpu) for everything but the sampler's draws, which are torch's.

A whole step runs as one program without coming back to Python (`model/compiled.py` makes it of a `Decoder`). Called one by one,
the ops here do the same work with the same kernels, in float32 inside: a bfloat16 tensor is widened, and the result rounded.

Weights are packed once, and the packed form replaces the dense one. `int8`: a scale a row; activations are rounded to 8 bits
with a scale for every 32 of a token. GGUF's Q8_0, Q4_0 and Q4_1 blocks are taken as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels import native
from slipstream.kernels.cpu_torch import CpuOps
from slipstream.kernels.native import ACTIVATIONS, Arena, Engine, Packed, Program
from slipstream.kernels.ops import (
    Activations,
    AttentionMetadata,
    BlockLinear,
    LayerKV,
    Linear,
    SamplingTensors,
    ScaledLinear,
)
from slipstream.model.scheme import CPU_BLOCK_TYPES, InputFormat, Scheme
from slipstream.model.spec import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLinear(Linear):
    """`parts` follow one another in the rows; several where a checkpoint mixes types. `weight` only tells shape and type (on
    the meta device). `bias` is float32."""

    parts: tuple[Packed, ...]

    @property
    def form(self) -> int:
        """What every part reads."""
        return self.parts[0].form


class NativeOps(CpuOps):
    """`isa` forces an instruction set (tests); by default the machine's best."""

    name = "cpu"
    block_types = CPU_BLOCK_TYPES
    rounded = frozenset(("int8",))

    def __init__(self, num_threads: int = 1, isa: str | None = None) -> None:
        super().__init__()
        self.engine = Engine(num_threads, isa)
        self._arena = Arena()
        self._greedy: dict[int, tuple[Program, int, int]] = {}  # by vocabulary

    def describe(self) -> str:
        return f"cpu (C++, {self.engine.isa})"

    # --- Weights ----------------------------------------------------------------------------------------------------

    def prepare_linear(self, weight: Tensor, bias: Tensor | None, scheme: Scheme | None = None) -> NativeLinear:
        if scheme is not None and scheme.name != "int8":
            raise ConfigError(f"the CPU's kernels have no {scheme.name} product; use 'int8'", field="quantization")
        kind = native.I8 if scheme is not None else native.BF16 if weight.dtype == torch.bfloat16 else native.F32
        packed = Packed.empty(kind, weight.shape[0], weight.shape[1], self._arena)
        packed.put_dense(weight)
        return _native(weight, bias, (packed,))

    def adopt_linear(self, w: Linear) -> NativeLinear:
        if isinstance(w, BlockLinear):
            return _native(w.weight, w.bias, _pack_blocks(w, self._arena))
        if isinstance(w, ScaledLinear) and w.weight.dtype == torch.int8:
            packed = Packed.empty(native.I8, w.weight.shape[0], w.weight.shape[1], self._arena)
            packed.put_codes(w.weight, w.scales)
            return _native(torch.empty_like(w.weight, device="meta", dtype=w.out_dtype), w.bias, (packed,))
        raise ConfigError(
            "the CPU's kernels have no product with such weights; use kernels='reference'", field="kernels"
        )

    def prepare_experts(self, weight: Tensor, scheme: Scheme | None = None) -> Linear:
        if scheme is not None:
            raise ConfigError(f"the CPU's kernels have no {scheme.name} product of experts; leave it out", field="quantization")
        return super().prepare_experts(weight)

    def adopt_experts(self, w: Linear) -> Linear:
        raise ConfigError("the CPU's kernels have no product with rounded experts; use kernels='reference'", field="kernels")

    def embedding(self, table: Tensor | Linear, tied: Linear | None) -> Tensor | Linear:
        if isinstance(tied, NativeLinear) and all(p.kind != native.I8 for p in tied.parts):
            return tied  # the head's rows are the table's, exactly
        return self.adopt_linear(table) if isinstance(table, Linear) else table

    def embed(self, token_ids: Tensor, table: Tensor | Linear, scale: float = 1.0) -> Tensor:
        if isinstance(table, Tensor):
            return super().embed(token_ids, table, scale)
        assert isinstance(table, NativeLinear)
        assert len(table.parts) == 1
        rows = table.parts[0].rows_of(token_ids).to(table.weight.dtype)
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)

    # --- Layers -----------------------------------------------------------------------------------------------------

    def linear(self, x: Activations, w: Linear) -> Tensor:
        assert isinstance(x, Tensor)
        return Product(self.engine, w)(_wide(x)).to(x.dtype) if isinstance(w, NativeLinear) else super().linear(x, w)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        residual: Tensor | None = None,
        weight_offset: float = 0.0,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        assert inputs is None
        return self._norm(x, residual, False, weight, None, eps, weight_offset)

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        residual: Tensor | None = None,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        assert inputs is None
        return self._norm(x, residual, True, weight, bias, eps, 0.0)

    def _norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        layer: bool,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        offset: float,
    ) -> tuple[Tensor, Tensor]:
        total = None if residual is None else residual.float().clone(memory_format=torch.contiguous_format)
        out = torch.empty(x.shape, dtype=torch.float32)
        p = Program(self.engine)
        into = -1 if total is None else p.bound(total)
        b = None if bias is None else bias.float()
        p.add("norm", p.bound(_wide(x)), into, p.bound(out), 0, layer, x.shape[1], weight.float(), b, eps, offset)
        self._run(p, len(x))
        return out.to(x.dtype), x if total is None else total.to(x.dtype)

    def gated_activation(
        self, gate_up: Tensor, activation: Activation, *, inputs: InputFormat | None = None
    ) -> Activations:
        assert inputs is None
        return self._activate(gate_up, activation, gate_up.shape[1] // 2, True)

    def activation(self, x: Tensor, activation: Activation, *, inputs: InputFormat | None = None) -> Activations:
        assert inputs is None
        return self._activate(x, activation, x.shape[1], False)

    def _activate(self, x: Tensor, activation: Activation, size: int, gated: bool) -> Tensor:
        out = torch.empty(len(x), size)
        p = Program(self.engine)
        p.add("activation", p.bound(_wide(x)), p.bound(out), 0, ACTIVATIONS[activation], gated, size)
        self._run(p, len(x))
        return out.to(x.dtype)

    def rope_and_cache(
        self,
        qkv: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cos_sin: Tensor | None,
        interleaved: bool = False,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 1e-6,
        norm_offset: float = 0.0,
    ) -> Tensor:
        rows = qkv.float().clone(memory_format=torch.contiguous_format)
        p = Program(self.engine)
        norms = [None if t is None else t.float() for t in (q_norm, k_norm)]
        rotary = 0 if cos_sin is None else cos_sin.shape[1]
        sizes = (num_heads, num_kv_heads, head_dim)
        p.add("rope_and_cache", p.bound(rows), 0, *sizes, cos_sin, rotary, interleaved, *norms, norm_eps, norm_offset)
        inputs, kept = native.step_inputs(meta, native.layer_pointers([kv]), kv)
        p.run(inputs)
        del kept
        return rows[:, : num_heads * head_dim].reshape(-1, num_heads, head_dim).to(qkv.dtype)

    def attention(
        self,
        q: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        _, num_heads, head_dim = q.shape
        out = torch.empty(len(q), num_heads * head_dim)
        p = Program(self.engine)
        slopes = None if alibi_slopes is None else alibi_slopes.float()
        sizes = (num_heads, kv.k.shape[1], head_dim)
        rows = p.bound(_wide(q.flatten(1)))
        p.add("attention", rows, p.bound(out), 0, *sizes, scale, window or 0, softcap or 0.0, slopes)
        inputs, kept = native.step_inputs(meta, native.layer_pointers([kv]), kv)
        p.run(inputs)
        del kept
        return out.view(q.shape).to(q.dtype)

    # --- Sampling ---------------------------------------------------------------------------------------------------

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        if not params.all_greedy or params.bias_rows is not None or params.history is not None:
            return super().sample(logits, params)
        wide, tokens = _wide(logits), torch.empty(len(logits), 1, dtype=torch.int64)
        size = wide.shape[1]
        if size not in self._greedy:
            p = Program(self.engine)
            self._greedy[size] = p, p.bound(), p.bound()
            p.add("argmax", *self._greedy[size][1:], size)
        p, x, out = self._greedy[size]
        p.bind(x, wide)
        p.bind(out, tokens)
        self._run(p, len(wide))
        return tokens[:, 0]

    def _run(self, program: Program, num_tokens: int) -> None:
        program.run(native.StepInputs(num_tokens=num_tokens))


class Product:
    """One product as a program of its own: float32 [T, in] → [T, out]."""

    def __init__(self, engine: Engine, w: NativeLinear) -> None:
        self._w, self._program = w, Program(engine)
        self._x, self._y = self._program.bound(), self._program.bound()
        size, x = w.weight.shape[1], self._x
        if w.form != native.FORM_F32:
            x = self._program.buffer(w.form, size)
            self._program.add("convert", self._x, x, w.form, size)
        add_linear(self._program, x, self._y, w)

    @property
    def program(self) -> Program:
        return self._program

    def __call__(self, x: Tensor) -> Tensor:
        assert (x.dtype, x.shape[1]) == (torch.float32, self._w.weight.shape[1])
        y = torch.empty(len(x), self._w.out_features)
        self._program.bind(self._x, x)
        self._program.bind(self._y, y)
        self._program.run(native.StepInputs(num_tokens=len(x)))
        return y


def add_linear(program: Program, x: int, y: int, w: NativeLinear, *, accumulate: bool = False) -> None:
    """A product, part by part: x in the weight's form, y float32."""
    row = 0
    for part in w.parts:
        bias = None if w.bias is None else w.bias[row : row + part.rows]
        program.add("linear", x, y, row, part.kind, part.rows, part.inner, part.data, bias, accumulate, weights=part)
        row += part.rows


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


def _wide(x: Tensor) -> Tensor:
    """Float32 with rows that lie together."""
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()
