"""A decoder's C++ program (`step_program.py`) for torch tensors, which share their memory with the
arrays."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels.arrays import to_array
from slipstream.kernels.cpu.native import Program, RunningStep
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.model.decoder import Decoder
from slipstream.model.step_program import StepProgram, compile_step
from slipstream.model.trace import SPLIT, STREAMED
from slipstream.spec.model import ModelSpec
from slipstream.spec.reason import Reason


def compile_program(decoder: Decoder) -> CpuProgram | Reason:
    """Compiles the decoder's program, or returns the reason why there is none.

    Without one, the decoder's loop runs the same kernels one by one.
    """
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
    return step if isinstance(step, Reason) else CpuProgram(decoder, step)


class CpuProgram:
    """A `StepProgram` that takes and returns tensors."""

    def __init__(self, decoder: Decoder, step: StepProgram) -> None:
        self.decoder, self.step = decoder, step

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
        given = (
            to_array(self.decoder.embedded(token_ids, meta).float())
            if self.decoder.spec.is_encoder
            else None
        )
        hidden, taken = self.step.forward(token_ids, kv, meta, given)
        return torch.from_numpy(hidden), torch.from_numpy(taken)

    def encode(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """Runs `Decoder.encode`."""
        self.step.encode(to_array(self.decoder.embedded(token_ids, meta).float()), kv, meta)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, E] → float32 [N, V]."""
        return torch.from_numpy(self.step.logits(hidden.numpy()))

    def greedy(self, hidden: Tensor) -> Tensor | None:
        """Runs `StepProgram.greedy`."""
        found = self.step.greedy(hidden.numpy())
        return None if found is None else torch.from_numpy(found)

    def begin_greedy(
        self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata
    ) -> tuple[Tensor, Tensor, RunningStep] | None:
        """Runs `StepProgram.begin_greedy`."""
        begun = self.step.begin_greedy(token_ids, kv, meta)
        return (
            None
            if begun is None
            else (torch.from_numpy(begun[0]), torch.from_numpy(begun[1]), begun[2])
        )

    def count_experts(self, layer: int, counts: Tensor) -> None:
        """Adds the tokens by expert of every step from now on to `counts`, int64 [X]."""
        self.step.count_experts(layer, counts)
