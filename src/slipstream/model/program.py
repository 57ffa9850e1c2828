"""A decoder's C++ program (`step_program.py`) for the values of a CPU's platform: NumPy arrays, or torch tensors, which share
their memory with arrays. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.kernels.cpu.native_program import Program, RunningStep
from slipstream.kernels.metadata import AttentionMetadata, LayerKV, SamplingTensors
from slipstream.model.decoder import Decoder
from slipstream.model.step_program import StepProgram, compile_step
from slipstream.model.trace import SPLIT, STREAMED
from slipstream.platform import Platform, platform_of
from slipstream.spec.model import ModelSpec
from slipstream.spec.reason import Reason

if TYPE_CHECKING:
    from torch import Tensor


def compile_program(decoder: Decoder) -> CpuProgram | Reason:
    """Compiles the program of a decoder with torch's values, or returns the reason why there is none.

    Without one, the decoder's loop runs the same kernels one by one.
    """
    from slipstream.kernels.cpu.ops import NativeOps

    if decoder.partition is not None:
        return SPLIT
    if decoder.stream is not None:
        return STREAMED
    ops = decoder.ops
    if not isinstance(ops, NativeOps):
        return Reason(
            f"the C++ program needs kernels='cpu', but kernels={ops.name!r} run here", notable=False
        )
    step = compile_step(decoder, ops.pool)
    if isinstance(step, Reason):
        return step
    return CpuProgram(decoder, step, platform_of(decoder.device))


class CpuProgram:
    """A `StepProgram` that takes and returns a platform's values.

    `decoder` computes what the program leaves out: an encoder's embeddings.
    """

    def __init__(self, decoder: Decoder, step: StepProgram, platform: Platform) -> None:
        self.decoder, self.step, self.platform = decoder, step, platform

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    @property
    def programs(self) -> tuple[Program, ...]:
        return self.step.programs

    @property
    def token_bytes(self) -> int:
        return self.step.token_bytes

    def forward(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        """token_ids [T] → hidden states float32 [T, E] after the final norm. Writes keys and values
        to the cache."""
        return self.tapped(token_ids, kv, meta)[0]

    def tapped(
        self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Runs `Decoder.tapped` in float32."""
        given = None
        if self.decoder.spec.is_encoder:
            given = self.platform.values.floats(self.decoder.embedded(token_ids, meta))
        hidden, taken = self.step.forward(token_ids, kv, meta, given)
        upload = self.platform.upload
        return upload(hidden), upload(taken)

    def encode(self, given: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """Runs `Decoder.encode`."""
        embedded = self.decoder.encoder_input(given, meta)
        self.step.encode(self.platform.values.floats(embedded), kv, meta)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, E] → float32 [N, V]."""
        return self.platform.upload(self.step.logits(self.platform.values.array(hidden)))

    def greedy(self, hidden: Tensor) -> Tensor | None:
        """Runs `StepProgram.greedy`."""
        found = self.step.greedy(self.platform.values.array(hidden))
        return None if found is None else self.platform.upload(found)

    def begin(
        self,
        token_ids: Tensor,
        kv: Sequence[LayerKV],
        meta: AttentionMetadata,
        params: SamplingTensors | None,
    ) -> tuple[Tensor, Tensor, RunningStep] | None:
        """Runs `StepProgram.begin`."""
        begun = self.step.begin(token_ids, kv, meta, params)
        if begun is None:
            return None
        tokens, states, running = begun
        return self.platform.upload(tokens), self.platform.upload(states), running

    def count_experts(self, layer: int, counts: Tensor) -> None:
        """Adds the tokens by expert of every step from now on to `counts`, int64 [X]."""
        self.step.count_experts(layer, counts)
