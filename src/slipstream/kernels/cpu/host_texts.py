"""The parts of an encoder outside its layers' program, on NumPy arrays: embeddings, pooling, a
classifier. No torch.

`HostTextOps` has the `OpSet` methods that `Decoder.embedded`, `encoder.pool` and
`encoder.Classifier` call. Values are float32 between them, so in bfloat16 they are rounded less
often than torch's.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401 (NumPy knows "bfloat16" by it)
import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu.native import FORM_F32, StepInputs, activation_of
from slipstream.kernels.cpu.packed import NativeLinear
from slipstream.kernels.cpu.program.native_program import Program
from slipstream.kernels.cpu.program.operators import add_norm
from slipstream.kernels.cpu.program.programs import LinearProgram
from slipstream.kernels.cpu.thread_pool import ThreadPool
from slipstream.kernels.layouts import NormParams
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.spec.model import Activation

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


class HostTextOps:
    name = "cpu"

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool

    def embed(self, token_ids: Array, table: Array | NativeLinear, scale: float = 1.0) -> Floats:
        """[T] → float32 [T, E]."""
        kept: Any = table.weight if isinstance(table, NativeLinear) else table
        rows: Floats = (
            table.parts[0].rows_of(token_ids)
            if isinstance(table, NativeLinear)
            else kept[token_ids].astype(np.float32)
        )
        return rows if scale == 1.0 else rows * np.array(scale, kept.dtype).astype(np.float32)

    def embed_positions(self, meta: AttentionMetadata, table: Array, offset: int) -> Floats:
        positions: Any = meta.positions
        return self.embed(positions + offset, table)

    def embed_token_types(self, meta: AttentionMetadata, table: Array) -> Floats:
        types: Any = meta.token_types
        return table[0].astype(np.float32) if types is None else self.embed(types, table)

    def linear(self, x: Floats, w: NativeLinear) -> Floats:
        return LinearProgram(self._pool, w)(np.ascontiguousarray(x))

    def norm(
        self, x: Floats, norm: NormParams, *, residual: None = None, inputs: None = None
    ) -> tuple[Floats, Floats]:
        program = Program(self._pool)
        given, out = program.bound(x), np.empty_like(x)
        add_norm(program, given, -1, program.bound(out), FORM_F32, x.shape[1], norm)
        program.run(StepInputs(num_tokens=len(x)))
        return out, x

    def activation(self, x: Floats, activation: Activation) -> Floats:
        kind = activation_of(activation)
        assert kind is not None, "a classifier's is one of the kernels'"
        program, out = Program(self._pool), np.empty_like(x)
        program.add(
            "activation",
            program.bound(x),
            program.bound(out),
            FORM_F32,
            *kind,
            False,
            x.shape[1],
            1,
        )
        program.run(StepInputs(num_tokens=len(x)))
        return out

    def softcap(self, x: Floats, cap: float) -> Floats:
        found: Floats = np.tanh(x / np.float32(cap)) * np.float32(cap)
        return found

    def mean_of_texts(self, hidden: Floats, starts: Array) -> Floats:
        """Returns the means of texts, each with at least one token."""
        found: Any = np.add.reduceat(hidden, starts[:-1], axis=0) / np.diff(starts)[:, None].astype(
            np.float32
        )
        return found  # type: ignore[no-any-return]

    def states_at(self, hidden: Floats, index: Array) -> Floats:
        return hidden[index]
