"""A model's step as one program of the C++ kernels. Python passes tokens, lengths and tables, and
gets hidden states. No torch.

The program is lowered from the decoder's own trace (`kernels.cpu.lowering`), so it computes what
the plain loop computes. An encoder-decoder has two programs: one reads prompts, the other is the
decoding step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 (NumPy knows "bfloat16" by it)
import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.lowering import Emitter, Lowered, ScratchBuffers, lower, refusal
from slipstream.kernels.cpu.mla import (
    add_choose_keys,
    add_latent_attention,
    add_latent_queries,
)
from slipstream.kernels.cpu.moe import NativeExperts, add_choice, add_experts
from slipstream.kernels.cpu.native import (
    FORM_F32,
    NativeLinear,
    Program,
    RunningStep,
    ThreadPool,
    activation_of,
)
from slipstream.kernels.cpu.programs import (
    LinearArgmax,
    LinearProgram,
    add_attention,
    add_linear,
    add_norm,
    add_norm_parts,
    add_rope_and_cache,
)
from slipstream.kernels.cpu.recurrent import (
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
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.recording import Op, Refused, Value
from slipstream.kernels.states import (
    ConvParams,
    GatedDeltaParams,
    Mamba2Params,
    MambaParams,
)
from slipstream.model.decoder import Decoder
from slipstream.model.trace import lowered_part, trace, trace_encoder
from slipstream.spec.model import Activation
from slipstream.spec.reason import Reason

if TYPE_CHECKING:
    from slipstream.kernels.cpu.native import Array

Floats = npt.NDArray[np.float32]


def compile_step(decoder: Decoder, pool: ThreadPool) -> StepProgram | Reason:
    """Compiles the program of a decoder with packed weights, or returns what the kernels lack."""
    step = trace(decoder)
    if (reason := refusal(step.head)) is not None:
        return reason
    more = () if step.taken is None else (step.taken,)
    body = compiled(pool, len(decoder.spec.cache_groups), *lowered_part(decoder.spec, step), more)
    if isinstance(body, Reason) or decoder.encoder is None:
        width = 0 if step.taken is None else step.taken.width
        return (
            body
            if isinstance(body, Reason)
            else StepProgram(decoder, pool, body, None, step.head, width)
        )
    encoder = trace_encoder(decoder)
    reading = compiled(pool, 1, encoder.body, encoder.embedded, None)
    return (
        reading
        if isinstance(reading, Reason)
        else StepProgram(decoder, pool, body, reading, step.head)
    )


class StepProgram:
    """A decoder's or an encoder's step as C++ operators. Hidden states and logits are float32."""

    def __init__(
        self,
        decoder: Decoder,
        pool: ThreadPool,
        body: CompiledOps,
        reading: CompiledOps | None,
        head: Sequence[Op],
        taken_width: int = 0,
    ) -> None:
        """Takes the compiled step.

        `reading` encodes an encoder-decoder's prompts. `head` has the ops from hidden states to
        logits. `taken_width` is the width of a tap's result.
        """
        self.spec, self.hidden_size, self._taken_width = (
            decoder.spec,
            decoder.spec.hidden_size,
            taken_width,
        )
        self.pool = pool
        self._body, self._reading = body, reading
        self._head = [_head_step(pool, op) for op in head]
        self._argmax: LinearArgmax | None = None
        # A factor or a soft cap could round neighbouring logits to the same value. A batch that
        # needs logits would then take the first of them, and this program the larger.
        if len(head) == 1 and len(head[0].arguments["w"].parts) == 1:
            self._argmax = LinearArgmax(pool, head[0].arguments["w"])
        for i, layer in enumerate(decoder.layers):
            if layer.expert_counts is not None:
                self.count_experts(i, layer.expert_counts)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of the step and of the output head. An encoder has no head."""
        return (
            self._body.program,
            *(step.program for step in self._head if isinstance(step, LinearProgram)),
        )

    def forward(
        self,
        token_ids: Array,
        kv: Sequence[LayerKV],
        meta: AttentionMetadata,
        given: Array | None = None,
    ) -> tuple[Floats, Floats]:
        """token_ids [T] → (hidden states [T, E] after the final norm, a tap's result or the same).
        Writes keys and values to the cache.

        `given` [T, E] has an encoder's embeddings, which are computed before.
        """
        hidden = np.empty((len(token_ids), self.hidden_size), np.float32)
        taken = self._more(hidden)
        self._body.run(kv, meta, token_ids, given, hidden, taken)
        return hidden, taken[0] if taken else hidden

    def _more(self, hidden: Floats) -> list[Floats]:
        return [
            np.empty((len(hidden), self._taken_width), np.float32) for _ in self._body.lowered.more
        ]

    def encode(self, given: Array, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """Runs `Decoder.encode` on embeddings [T, E]."""
        assert self._reading is not None
        self._reading.run(kv, meta, None, given, None)

    def logits(self, hidden: Floats) -> Floats:
        """float32 [N, E] → float32 [N, V]."""
        for step in self._head:
            hidden = step(hidden)
        return hidden

    def greedy(self, hidden: Floats) -> npt.NDArray[np.int64] | None:
        """float32 [N, E] → int64 [N], the tokens with the largest logits, the first of equal ones,
        without writing the logits.

        None if logits must be written: they are scaled or capped, or the head has several parts.
        """
        return None if self._argmax is None else self._argmax(hidden)

    def begin_greedy(
        self, token_ids: Array, kv: Sequence[LayerKV], meta: AttentionMetadata
    ) -> tuple[npt.NDArray[np.int64], Floats, RunningStep] | None:
        """Begins `greedy(forward(...))` of a decoder as one step.

        Returns (tokens, `forward`'s second result, the running step). The first two are valid after
        the step ends. None as in `greedy`.
        """
        if self._argmax is None:
            return None
        hidden = np.empty((len(token_ids), self.hidden_size), np.float32)
        taken, found = self._more(hidden), self._argmax.of(hidden)
        running = self._body.begin(kv, meta, token_ids, hidden, self._argmax.program, taken)
        return found, taken[0] if taken else hidden, running

    def count_experts(self, layer: int, counts: Array) -> None:
        """Adds the tokens by expert of every step from now on to `counts`, int64 [X]."""
        self._body.program.bind(self._body.lowered.counts[layer], counts[None])

    @property
    def token_bytes(self) -> int:
        """Bytes that a step needs per token: the programs' buffers, their inputs, and the hidden
        states."""
        reading = (
            0 if self._reading is None else self._reading.program.token_bytes + 4 * self.hidden_size
        )
        return self._body.program.token_bytes + 4 * (self.hidden_size + self._taken_width) + reading


@dataclass(slots=True, eq=False)
class CompiledOps:
    """A program and how to call it."""

    program: Program
    lowered: Lowered
    num_groups: int
    _kv: Sequence[LayerKV] | None = None
    _pointers: object = None
    _blocks: int = (
        0  # index of the cache with the largest heads, which is of a layer with attention
    )
    _is_recurrent: bool = False

    def run(
        self,
        kv: Sequence[LayerKV],
        meta: AttentionMetadata,
        token_ids: Array | None,
        given: Array | None,
        out: Array | None,
        more: Sequence[Array] = (),
    ) -> None:
        """Runs the program. `given` [T, E] is read and not changed; `out` [T, E] and `more` are
        written."""
        if given is not None and self.lowered.given is not None:
            given = np.array(given, np.float32, order="C")  # a copy, as layers add to it in place
        self.bind(given, out, more)
        inputs, kept = self.inputs(kv, meta, token_ids)
        self.program.run(inputs)
        del kept, given

    def begin(
        self,
        kv: Sequence[LayerKV],
        meta: AttentionMetadata,
        token_ids: Array,
        out: Array,
        then: Program,
        more: Sequence[Array] = (),
    ) -> RunningStep:
        self.bind(None, out, more)
        inputs, kept = self.inputs(kv, meta, token_ids)
        return self.program.begin(inputs, then, (kept, out, kv, more))

    def bind(self, given: Array | None, out: Array | None, more: Sequence[Array]) -> None:
        """Sets the arrays that the next runs read and write. Layers add to `given` in place."""
        for buffer, tensor in ((self.lowered.given, given), (self.lowered.out, out)):
            if buffer is not None and tensor is not None:
                self.program.bind(buffer, tensor)
        for buffer, tensor in zip(self.lowered.more, more, strict=True):
            self.program.bind(buffer, tensor)

    def inputs(
        self, kv: Sequence[LayerKV], meta: AttentionMetadata, token_ids: Array | None
    ) -> tuple[native.StepInputs, object]:
        """Returns the step's inputs for the library, and an object that must live while it runs."""
        if self._kv is not kv:
            self._kv, self._pointers = kv, native.layer_pointers(kv)
            # no cache itself: the caller may give back the memory of all of them
            self._blocks = max(range(len(kv)), key=lambda i: kv[i].k.shape[3])
            self._is_recurrent = any(layer.state is not None for layer in kv)
        assert not self._is_recurrent or meta.states is not None
        inputs, kept = native.step_inputs(
            meta, self._pointers, kv[self._blocks], token_ids, self.num_groups
        )
        return inputs, (kept, self._pointers)


def compiled(
    pool: ThreadPool,
    num_groups: int,
    part: Sequence[Op],
    given: Value | None,
    result: Value | None,
    more: Sequence[Value] = (),
) -> CompiledOps | Reason:
    """Compiles `part` of a recording, or returns what the program lacks. `more` are further
    results."""
    program = Program(pool)
    lowered = lower(part, given, result, ProgramEmitter(program), more)
    return lowered if isinstance(lowered, Reason) else CompiledOps(program, lowered, num_groups)


def _head_step(pool: ThreadPool, op: Op) -> Callable[[Floats], Floats]:
    """Makes a function for one op between hidden states and logits."""
    if op.name == "linear":
        return LinearProgram(pool, op.arguments["w"])
    if op.name == "scale":
        factor = np.float32(op.arguments["factor"])
        return lambda x: x * factor
    assert op.name == "softcap"
    cap = np.float32(op.arguments["cap"])
    return lambda x: np.tanh(x / cap) * cap


class ProgramEmitter(Emitter):
    """An emitter that writes operators into a `Program`."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def buffer(self, form: int, size: int, rows_a_token: int = 1) -> int:
        return self.program.buffer(form, size, rows_a_token)

    def bound(self) -> int:
        return self.program.bound()

    def form(self, w: Any) -> int:
        return _native(w).form

    def gates(self, w: Any) -> bool:
        return len(_native(w).parts) == 1 and w.out_features % 64 == 0

    def embed(
        self, out: int, by_position: bool, offset: int, table: Any, scale: float, accumulate: bool
    ) -> None:
        self.program.add(
            "embed", out, by_position, offset, *_table(table), _scale(table, scale), accumulate
        )

    def sum(self, x: int, y: int, size: int, factor: Any) -> None:
        if not isinstance(factor, float):
            factor = float(native.float32(factor)[0])
        self.program.add("sum", x, y, size, factor)

    def layer_inputs(
        self, x: int, table: Any, norm: NormParams, scale: float, factor: float
    ) -> None:
        weight = native.float32(norm.weight)
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
        self.program.add("place", x, start, out, column, size)

    def gate(self, x: int, z: int, column: int, out: int, form: int, size: int) -> None:
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
        self,
        x: int,
        out: int,
        form: int,
        layer: int,
        params: Mamba2Params,
        scratch: ScratchBuffers,
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
        p, up, down, spec = self.program, experts.up, experts.down, experts.spec
        assert isinstance(up, NativeExperts)
        assert isinstance(down, NativeExperts)
        rows = scratch("expert rows", up.form, up.inner, spec.num_experts_per_token)
        numbers = experts.correction, experts.scales
        add_choice(p, x, logits, counts, spec, *numbers, rows, up.form, up.inner)
        return add_experts(p, rows, up, down, spec, scratch)

    def combine(
        self, results: int, out: int, size: int, shared: int, weight: int, accumulate: bool
    ) -> None:
        self.program.add("combine", results, out, size, shared, weight, accumulate)


def _table(table: Any) -> tuple[int, int, int, Any]:
    """Returns the kind, the rows, their size and the data of a table of embeddings."""
    if isinstance(table, NativeLinear):
        (part,) = table.parts
        return part.kind, part.rows, part.inner, part.data
    kept = native.type_name(table) in ("float32", "bfloat16")
    data: Any = native.contiguous(table if kept else native.float32(table))
    kind = native.ROWS_BF16 if native.type_name(data) == "bfloat16" else native.ROWS_F32
    return kind, *data.shape, data


def _scale(table: Any, scale: float) -> float:
    """Returns the scale rounded to the table's type, as `OpSet.embed` does."""
    if scale == 1.0:
        return scale
    return float(np.array(scale, np.dtype(native.type_name(getattr(table, "weight", table)))))


def _native(w: object) -> NativeLinear:
    if not isinstance(w, NativeLinear):
        raise Refused(f"the C++ program has no product with a {type(w).__name__}")
    return w


def _kind(activation: Activation) -> tuple[int, float, float]:
    kind = activation_of(activation)
    assert kind is not None, "the lowering refuses others"
    return kind
