"""A model's step as one program of the C++ kernels. Python passes tokens, lengths and tables, and
gets hidden states. No torch.

The program is lowered from the decoder's own trace (`kernels.cpu.lowering`), so it computes what
the plain loop computes. An encoder-decoder has two programs: one reads prompts, the other is the
decoding step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import ml_dtypes  # noqa: F401 (NumPy knows "bfloat16" by it)
import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.lowering import Lowered, lower, refusal
from slipstream.kernels.cpu.native import ThreadPool
from slipstream.kernels.cpu.native_program import Program, RunningStep, layer_pointers, step_inputs
from slipstream.kernels.cpu.program_emitter import ProgramEmitter
from slipstream.kernels.cpu.programs import LinearArgmax, LinearProgram, RowDraws
from slipstream.kernels.metadata import AttentionMetadata, LayerKV, SamplingTensors
from slipstream.kernels.tracing.recording import Op, Value
from slipstream.model.decoder import Decoder
from slipstream.model.trace import lowered_part, trace, trace_encoder
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
        self._head_weight = head[0].arguments["w"] if self._argmax is not None else None
        for i, layer in enumerate(decoder.layers):
            if layer.expert_counts is not None:
                self.count_experts(i, layer.expert_counts)

    @cached_property
    def _draws(self) -> RowDraws:
        assert self._head_weight is not None
        return RowDraws(self.pool, len(self._head_weight.weight), self._head_weight)

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

    def begin(
        self,
        token_ids: Array,
        kv: Sequence[LayerKV],
        meta: AttentionMetadata,
        params: SamplingTensors | None,
    ) -> tuple[npt.NDArray[np.int64], Floats, RunningStep] | None:
        """Begins `forward(...)` of a decoder and its tokens as one step.

        Tokens are drawn with `params`, or are those with the largest logits. Returns (tokens,
        `forward`'s second result, the running step). The first two are valid after the step ends.
        None as in `greedy`.
        """
        if self._argmax is None:
            return None
        hidden = np.empty((len(token_ids), self.hidden_size), np.float32)
        taken = self._more(hidden)
        if params is None:
            found, end = self._argmax.of(hidden), self._argmax.program
        else:
            found, end = self._draws.of(hidden, params), self._draws.program
        running = self._body.begin(kv, meta, token_ids, hidden, end, taken)
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
            self._kv, self._pointers = kv, layer_pointers(kv)
            # no cache itself: the caller may give back the memory of all of them
            self._blocks = max(range(len(kv)), key=lambda i: kv[i].k.shape[3])
            self._is_recurrent = any(layer.state is not None for layer in kv)
        assert not self._is_recurrent or meta.states is not None
        inputs, kept = step_inputs(
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
