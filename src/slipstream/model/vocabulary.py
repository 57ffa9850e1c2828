"""The embedding table and the output head. With several ranks, each has the rows of some tokens. No
torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.ops import OpSet
    from slipstream.model.layers.layer import Partition


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary of `size` tokens. Without a tensor-parallel `partition` all of them are on this
    rank."""

    size: int
    partition: Partition | None = None

    @property
    def is_shared(self) -> bool:
        return self.partition is not None and self.partition.shard.tensor

    def embed(self, ops: OpSet, token_ids: Any, table: Any, scale: float) -> Tensor:
        """Token ids [T] → embeddings [T, E]."""
        part = self.partition
        if part is None or not self.is_shared:
            return ops.embed(token_ids, table, scale)
        size = part.shard.vocabulary(self.size)
        own = ops.embed_part(token_ids, table, scale, first=part.shard.rank * size, size=size)
        return ops.all_reduce(own, group=part.group)

    def gathered(self, ops: OpSet, logits: Tensor) -> Tensor:
        """Gathers this rank's logits [N, W] from all ranks → [N, V]."""
        part = self.partition
        return (
            logits
            if part is None or not self.is_shared
            else ops.all_gather(logits, part.group, self.size)
        )

    def best(self, ops: OpSet, logits: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Finds the tokens with the largest logits over all ranks: [N, W] → int64 [N]. `token_ids`
        int64 [V] maps each column to a token."""
        part = self.partition
        if part is None or not self.is_shared:
            return ops.argmax(logits, token_ids)
        best = ops.best_of_ranks(logits, part.group, self.size)
        return best if token_ids is None else token_ids[best]
