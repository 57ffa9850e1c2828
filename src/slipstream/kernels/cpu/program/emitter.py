"""The operators of a C++ program, as the lowering of a recording asks for them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 (NumPy knows "bfloat16" by it)
import numpy as np

from slipstream.kernels.cpu import arrays, native
from slipstream.kernels.cpu.native import FORM_F32, activation_of
from slipstream.kernels.cpu.packed import NativeLinear
from slipstream.kernels.cpu.program.lowering import ScratchBuffers
from slipstream.kernels.cpu.program.mla import (
    add_choose_keys,
    add_latent_attention,
    add_latent_queries,
)
from slipstream.kernels.cpu.program.moe import NativeExperts, add_choice, add_experts
from slipstream.kernels.cpu.program.native_program import Program
from slipstream.kernels.cpu.program.operators import (
    add_attention,
    add_norm,
    add_norm_parts,
    add_rope_and_cache,
)
from slipstream.kernels.cpu.program.programs import add_linear
from slipstream.kernels.cpu.program.recurrent import (
    add_causal_conv,
    add_gate,
    add_gated_delta,
    add_mamba2,
    add_selective_scan,
    add_short_conv,
)
from slipstream.kernels.layouts import (
    AttentionParams,
    Experts,
    IndexParams,
    MLAParams,
    NormParams,
    QKVLayout,
)
from slipstream.kernels.states import ConvParams, GatedDeltaParams, Mamba2Params, MambaParams
from slipstream.kernels.tracing.recording import Refused
from slipstream.spec.model import Activation

if TYPE_CHECKING:
    pass


class ProgramEmitter:
    """Writes operators into a `Program`. Buffers are numbers, -1 for none; forms are `native.FORM_*`."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def buffer(self, form: int, size: int, rows_a_token: int = 1) -> int:
        return self.program.buffer(form, size, rows_a_token)

    def bound(self) -> int:
        """Makes a buffer whose memory the caller supplies before each run."""
        return self.program.bound()

    def form(self, w: Any) -> int:
        """Format of the input rows of a linear layer with this weight. `Refused` if the program
        does not support the weight."""
        return _native(w).form

    def gates(self, w: Any) -> bool:
        """Whether the weight's layout lets the linear layer apply the gated activation to its own
        result."""
        return len(_native(w).parts) == 1 and w.out_features % 64 == 0

    def embed(
        self, out: int, by_position: bool, offset: int, table: Any, scale: float, accumulate: bool
    ) -> None:
        self.program.add(
            "embed", out, by_position, offset, *_table(table), _scale(table, scale), accumulate
        )

    def sum(self, x: int, y: int, size: int, factor: Any) -> None:
        if not isinstance(factor, float):
            factor = float(arrays.float32(factor)[0])
        self.program.add("sum", x, y, size, factor)

    def layer_inputs(
        self, x: int, table: Any, norm: NormParams, scale: float, factor: float
    ) -> None:
        weight = arrays.float32(norm.weight)
        how = len(weight), weight, norm.eps, norm.offset, factor
        self.program.add("layer_inputs", x, *_table(table), _scale(table, scale), *how)

    def gated_by(
        self, x: int, inputs: int, out: int, column: int, form: int, activation: Any, size: int
    ) -> None:
        self.program.add("gated_by", x, inputs, out, column, form, *_kind(activation), size)

    def norm(self, x: int, residual: int, out: int, form: int, size: int, norm: NormParams) -> None:
        add_norm(self.program, x, residual, out, form, size, norm)

    def norm_parts(
        self, x: int, column: int, parts: int, size: int, norm: NormParams, step: int
    ) -> None:
        add_norm_parts(self.program, x, column, parts, size, norm, step)

    def scale(
        self, x: int, size: int, *, factor: float = 1.0, table: Any = None, limit: float = 0.0
    ) -> None:
        self.program.add("scale", x, size, factor, table, limit)

    def convert(self, x: int, out: int, form: int, size: int) -> None:
        self.program.add("convert", x, out, form, size, 1)

    def place(self, x: int, start: int, out: int, column: int, size: int) -> None:
        """Adds an operator that copies columns start … start + size − 1 of x to columns of `out`
        from `column` on."""
        self.program.add("place", x, start, out, column, size)

    def gate(self, x: int, z: int, column: int, out: int, form: int, size: int) -> None:
        """Adds the operator x · sigmoid(z). z begins at `column` of its buffer."""
        add_gate(self.program, x, z, column, out, form, size)

    def linear(self, x: int, out: int, w: Any, accumulate: bool) -> None:
        add_linear(self.program, x, out, w, accumulate=accumulate)

    def gated_linear(self, x: int, out: int, form: int, w: Any, activation: Activation) -> None:
        (part,) = w.parts
        weight = (part.kind, part.rows, part.inner, part.data)
        weights = *weight, w.bias, part.dense, part.dense_from
        self.program.add("gated_linear", x, out, form, *_kind(activation), *weights, weights=part)

    def activation(
        self, x: int, out: int, form: int, activation: Activation, gated: bool, size: int
    ) -> None:
        self.program.add("activation", x, out, form, *_kind(activation), gated, size, 1)

    def rope_and_cache(
        self, rows: int, layer: int, group: int, heads: QKVLayout, *, has_queries: bool
    ) -> None:
        heads = heads if has_queries else dataclasses.replace(heads, num_heads=0)
        add_rope_and_cache(self.program, rows, layer, heads, group=group)

    def attention(
        self,
        q: int,
        out: int,
        layer: int,
        group: int,
        sizes: tuple[int, int, int, int],
        params: AttentionParams,
    ) -> None:
        add_attention(self.program, q, out, layer, sizes, params, group=group)

    def choose_keys(
        self,
        q: int,
        k: int,
        weights: int,
        out: int,
        layer: int,
        params: IndexParams,
        scratch: ScratchBuffers,
    ) -> None:
        add_choose_keys(self.program, q, k, weights, out, layer, params, scratch)

    def mla_attention(
        self,
        q: int,
        row: int,
        out: int,
        layer: int,
        size: int,
        params: MLAParams,
        scratch: ScratchBuffers,
        chosen: tuple[int, int] | None = None,
    ) -> None:
        """Adds latent attention. `size` is the number of elements of a token's queries, all heads
        together. `chosen`: the buffer of chosen keys, and their number."""
        queries = scratch("queries", FORM_F32, size)
        add_latent_queries(self.program, q, row, queries, layer, params, scratch)
        add_latent_attention(self.program, queries, out, layer, params, scratch, chosen)

    def gated_delta(
        self,
        x: int,
        gates: int,
        decay: int | None,
        z: int | None,
        out: int,
        form: int,
        layer: int,
        params: GatedDeltaParams,
        scratch: ScratchBuffers,
    ) -> None:
        rows = x, gates, decay, z, out, form
        add_gated_delta(self.program, *rows, layer, params, scratch)

    def mamba2(
        self, x: int, out: int, form: int, layer: int, params: Mamba2Params, scratch: ScratchBuffers
    ) -> None:
        add_mamba2(self.program, x, out, form, layer, params, scratch)

    def short_conv(self, x: int, out: int, form: int, layer: int, params: ConvParams) -> None:
        add_short_conv(self.program, x, out, form, layer, params)

    def causal_conv(self, x: int, out: int, form: int, layer: int, params: ConvParams) -> None:
        add_causal_conv(self.program, x, out, form, layer, params)

    def selective_scan(
        self,
        x: int,
        dt: int,
        b: int,
        c: int,
        xz: int,
        out: int,
        form: int,
        layer: int,
        params: MambaParams,
        scratch: ScratchBuffers,
    ) -> None:
        rows = x, dt, b, c, xz, out, form
        add_selective_scan(self.program, *rows, layer, params, scratch)

    def experts(
        self, x: int, logits: int, counts: int, experts: Experts, scratch: ScratchBuffers
    ) -> int:
        """Adds the operators of a mixture: routing, gathering of rows, products.

        Returns the buffer of the results, with a row for each of a token's experts.
        """
        p, up, down, spec = self.program, experts.up, experts.down, experts.spec
        assert isinstance(up, NativeExperts)
        assert isinstance(down, NativeExperts)
        rows = scratch("expert rows", up.form, up.inner, spec.num_experts_per_token)
        numbers = experts.correction, experts.scales
        add_choice(p, x, logits, counts, spec, *numbers, rows, up.form, up.inner)
        return add_experts(p, rows, up, down, spec, scratch)

    def combine(
        self, results: int, out: int, size: int, shared: int, weight: int, accumulate: bool, x: int
    ) -> None:
        self.program.add("combine", results, out, size, shared, weight, accumulate, x)


def _table(table: Any) -> tuple[int, int, int, Any]:
    """Returns the kind, the rows, their size and the data of a table of embeddings."""
    if isinstance(table, NativeLinear):
        (part,) = table.parts
        return part.kind, part.rows, part.inner, part.data
    kept = arrays.type_name(table) in ("float32", "bfloat16")
    data: Any = arrays.contiguous(table if kept else arrays.float32(table))
    kind = native.ROWS_BF16 if arrays.type_name(data) == "bfloat16" else native.ROWS_F32
    return kind, *data.shape, data


def _scale(table: Any, scale: float) -> float:
    """Scale rounded to the table's dtype, as in `OpSet.embed`."""
    if scale == 1.0:
        return scale
    return float(np.array(scale, np.dtype(arrays.type_name(getattr(table, "weight", table)))))


def _native(w: object) -> NativeLinear:
    if not isinstance(w, NativeLinear):
        raise Refused(f"the C++ program has no product with a {type(w).__name__}")
    return w


def _kind(activation: Activation) -> tuple[int, float, float]:
    kind = activation_of(activation)
    assert kind is not None, "the lowering refuses others"
    return kind
