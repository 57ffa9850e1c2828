"""A model's step as one program of C++ kernels. Python passes tokens, lengths and block tables, and
gets hidden states: NumPy arrays, or torch tensors that share memory with arrays. No torch.

`compile_step.py` makes it. An encoder-decoder has two programs: one encodes prompts, the other is the decoding step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes  # noqa: F401 (NumPy knows "bfloat16" by it)
import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.packed import NativeLinear
from slipstream.kernels.cpu.program.lowering import Lowered
from slipstream.kernels.cpu.program.native_program import (
    Program,
    RunningStep,
    layer_pointers,
    step_inputs,
)
from slipstream.kernels.cpu.program.programs import (
    NOTHING_BEYOND,
    Beyond,
    LinearArgmax,
    LinearProgram,
    RowDraws,
)
from slipstream.kernels.cpu.thread_pool import ThreadPool
from slipstream.kernels.metadata import AttentionMetadata, LayerKV, SamplingTensors
from slipstream.model.decoder import Decoder
from slipstream.platform import Platform

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.cpu.arrays import Array

Floats = npt.NDArray[np.float32]


class StepProgram:
    """A decoder's or an encoder's step as C++ operators. Hidden states and logits are float32."""

    def __init__(
        self,
        decoder: Decoder,
        pool: ThreadPool,
        platform: Platform,
        body: CompiledOps,
        reading: CompiledOps | None,
        head: Sequence[Callable[[Floats], Floats]],
        weight: NativeLinear | None,
        taken_width: int = 0,
    ) -> None:
        """Takes the compiled step.

        `reading`: the program that encodes an encoder-decoder's prompts. `head`: the functions from hidden states to
        logits; `weight`: the output head's weight if there is nothing else. `taken_width`: width of a tap's result.
        """
        self.decoder = decoder
        self.hidden_size = decoder.spec.hidden_size
        self._taken_width = taken_width
        self._embeds = not decoder.spec.is_encoder  # otherwise the decoder embeds
        self.platform, self.pool = platform, pool
        self._body, self._reading = body, reading
        self._head = head
        self._argmax: LinearArgmax | None = None
        if weight is not None and len(weight.parts) == 1:
            self._argmax = LinearArgmax(pool, weight)
            self._draws = RowDraws(pool, len(weight.weight), weight)
        for i, layer in enumerate(decoder.layers):
            if layer.expert_counts is not None:
                self.count_experts(i, layer.expert_counts)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of the step and of the output head. Encoders have no head."""
        return (
            self._body.program,
            *(step.program for step in self._head if isinstance(step, LinearProgram)),
        )

    def forward(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        """token_ids [T] → hidden states [T, E] after the final norm. Writes keys and values to the cache."""
        return self.tapped(token_ids, kv, meta)[0]

    def tapped(
        self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Runs `Decoder.tapped` in float32."""
        given = None
        if not self._embeds:
            given = self.platform.values.floats(self.decoder.embedded(token_ids, meta))
        hidden = np.empty((len(token_ids), self.hidden_size), np.float32)
        taken = self._more(hidden)
        self._body.run(kv, meta, token_ids, given, hidden, taken)
        upload = self.platform.upload
        return upload(hidden), upload(taken[0] if taken else hidden)

    def _more(self, hidden: Floats) -> list[Floats]:
        return [
            np.empty((len(hidden), self._taken_width), np.float32) for _ in self._body.lowered.more
        ]

    def encode(self, given: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """Runs `Decoder.encode`."""
        assert self._reading is not None
        embedded = self.decoder.encoder_input(given, meta)
        self._reading.run(kv, meta, None, self.platform.values.floats(embedded), None)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, E] → float32 [N, V]."""
        found = self.platform.values.array(hidden)
        for step in self._head:
            found = step(found)
        return self.platform.upload(found)

    def greedy(self, hidden: Tensor) -> Tensor | None:
        """float32 [N, E] → int64 [N], the tokens with the largest logits, the first of equal ones, without
        writing the logits.

        None if logits must be written out, because they are scaled or capped or the head has several parts.
        """
        if self._argmax is None:
            return None
        return self.platform.upload(self._argmax(self.platform.values.array(hidden)))

    @property
    def writes_no_logits(self) -> bool:
        """Whether tokens can be sampled without writing logits: logits are neither scaled nor
        capped, and the head has one part."""
        return self._argmax is not None

    def begin(
        self,
        token_ids: Tensor,
        kv: Sequence[LayerKV],
        meta: AttentionMetadata,
        params: SamplingTensors | None,
        beyond: Beyond | None,
    ) -> tuple[Tensor, Tensor | None, Tensor, RunningStep] | None:
        """Starts `forward(...)` of a decoder and the choice of its tokens as one step.

        Tokens are sampled with `params`; without it, the ones with the largest logits are taken.
        Returns (tokens, packed log-probabilities if requested, `tapped`'s second result, the
        running step); all but the last are valid when the step ends. None as in `greedy`.
        """
        if self._argmax is None:
            return None
        hidden = np.empty((len(token_ids), self.hidden_size), np.float32)
        taken = self._more(hidden)
        packed = None
        if params is None and beyond is None:
            found, end = self._argmax.of(hidden), self._argmax.program
        else:
            found, packed = self._draws.of(hidden, params, beyond or NOTHING_BEYOND)
            end = self._draws.program
        running = self._body.begin(kv, meta, token_ids, hidden, end, taken)
        upload = self.platform.upload
        own = upload(packed) if packed is not None and len(packed) else None
        return upload(found), own, upload(taken[0] if taken else hidden), running

    def drawn(
        self, hidden: Tensor, params: SamplingTensors, beyond: Beyond
    ) -> tuple[Tensor, Tensor]:
        """float32 [N, E] → (tokens, packed log-probabilities) as in `begin`. Requires `writes_no_logits`."""
        tokens, packed = self._draws(self.platform.values.array(hidden), params, beyond)
        return self.platform.upload(tokens), self.platform.upload(packed)

    def count_experts(self, layer: int, counts: Array) -> None:
        """Makes every step from now on add its tokens by expert to `counts`, int64 [X]."""
        self._body.program.bind(self._body.lowered.counts[layer], counts[None])

    @property
    def token_bytes(self) -> int:
        """Bytes that a step needs per token: the programs' buffers and inputs, and the hidden states."""
        reading = (
            0 if self._reading is None else self._reading.program.token_bytes + 4 * self.hidden_size
        )
        return self._body.program.token_bytes + 4 * (self.hidden_size + self._taken_width) + reading


@dataclass(slots=True, eq=False)
class CompiledOps:
    """A program with its buffers, and how to call it."""

    program: Program
    lowered: Lowered
    num_groups: int
    _kv: Sequence[LayerKV] | None = None
    _pointers: object = None
    # index of the cache with the largest heads, which belongs to a layer with attention
    _blocks: int = 0
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
        """Runs the program. `given` [T, E] is read and not changed; `out` [T, E] and `more` are written."""
        if given is not None and self.lowered.given is not None:
            # a copy, since layers add to it in place
            given = np.array(given, np.float32, order="C")
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
        """Sets the arrays that the next runs read and write. Layers modify `given` in place."""
        for buffer, tensor in ((self.lowered.given, given), (self.lowered.out, out)):
            if buffer is not None and tensor is not None:
                self.program.bind(buffer, tensor)
        for buffer, tensor in zip(self.lowered.more, more, strict=True):
            self.program.bind(buffer, tensor)

    def inputs(
        self, kv: Sequence[LayerKV], meta: AttentionMetadata, token_ids: Array | None
    ) -> tuple[native.StepInputs, object]:
        """(the step's inputs for the library, an object that must stay alive while it runs)."""
        if self._kv is not kv:
            self._kv, self._pointers = kv, layer_pointers(kv)
            # an index, not the cache itself, so that the caller can free all caches
            self._blocks = max(range(len(kv)), key=lambda i: kv[i].k.shape[3])
            self._is_recurrent = any(layer.state is not None for layer in kv)
        assert not self._is_recurrent or meta.states is not None
        inputs, kept = step_inputs(
            meta, self._pointers, kv[self._blocks], token_ids, self.num_groups
        )
        return inputs, (kept, self._pointers)
