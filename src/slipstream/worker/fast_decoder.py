"""The decoder with the fast ways that cover it: a C++ program, a kernel for steps of one token, else the plain loop."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.native import Running
from slipstream.model.decoder import Decoder
from slipstream.model.one_token import OneTokenKernel, compile_one_token
from slipstream.model.program import CpuProgram, compile_program
from slipstream.spec.reason import Reason


class FastDecoder(Decoder):
    """Shares a decoder's layers and weights. `program` and `one_token` are there, or say why not."""

    def __init__(self, decoder: Decoder) -> None:
        vars(self).update(vars(decoder))
        self.plain = decoder
        self._compile()

    def _compile(self) -> None:
        self.program: CpuProgram | Reason = compile_program(self.plain)
        self.one_token: OneTokenKernel | Reason = compile_one_token(self.plain)

    @property
    def compiled(self) -> CpuProgram | None:
        return self.program if isinstance(self.program, CpuProgram) else None

    def forward(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        if isinstance(self.program, CpuProgram):
            return self.program.forward(token_ids, kv, meta)
        if isinstance(self.one_token, OneTokenKernel) and len(token_ids) == 1:
            return self.one_token.forward(token_ids, kv, meta)
        return super().forward(token_ids, kv, meta)

    def encode(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        way = self.program if isinstance(self.program, CpuProgram) else self.plain
        way.encode(token_ids, kv, meta)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.program.logits(hidden) if isinstance(self.program, CpuProgram) else super().logits(hidden)

    def greedy(self, hidden: Tensor) -> Tensor | None:
        return self.program.greedy(hidden) if isinstance(self.program, CpuProgram) else None

    def begin_greedy(
        self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata
    ) -> tuple[Tensor, Running] | None:
        return self.program.begin_greedy(token_ids, kv, meta) if isinstance(self.program, CpuProgram) else None

    def count_experts(self) -> dict[int, Tensor]:
        counts = super().count_experts()
        if counts:  # the fast ways are told where to count
            self._compile()
        return counts

    @property
    def token_bytes(self) -> int | None:
        return self.program.token_bytes if isinstance(self.program, CpuProgram) else None
