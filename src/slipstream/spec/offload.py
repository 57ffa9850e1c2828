"""Weight offloading: which layers stay in memory and which are read from disk or host memory in every step.

A step of such a model runs layer by layer. While one layer is computed, the next streamed layer is read into
one of two slots in memory, in turn. A step takes at least as long as these reads, whatever its number of
tokens. So large batches pay off (FlexGen, Sheng et al. 2023; DeepSpeed ZeRO-Inference, Aminabadi et al.
2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.errors import ConfigError

NUM_SLOTS = 2
"""Memory slots for streamed layers: one is in use while the other is being filled."""

CHUNK = 8 * 2**20
"""Bytes of a single read from disk."""

PIECE = 64 * 2**20
"""Maximum bytes of one copy from the host to a GPU: 1.2 ms at 55 GB/s. A power of two, because
torch rounds pinned memory up to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """Choice of the layers that stay in memory and of those that are read in every step (`streamed`).

    `resident_bytes`: weights in memory, including `slot_bytes` of slots for streamed layers.
    `read_bytes`: bytes that a step reads.
    """

    num_layers: int
    streamed: tuple[int, ...]
    resident_bytes: int
    slot_bytes: int
    read_bytes: int

    def describe(self) -> str:
        return (
            f"{len(self.streamed)} of {self.num_layers} layers are read in each step, {self.read_bytes / 2**20:,.0f} MiB; "
            f"{self.resident_bytes / 2**20:,.0f} MiB are kept"
        )


def plan_offload(layer_bytes: Sequence[int], other_bytes: int, budget: int) -> OffloadPlan | None:
    """Choose the layers to stream, so that at most `budget` bytes of weights are in memory. None:
    all fit.

    It streams as few layers as possible, evenly spread, so that each is read while others are
    computed. ConfigError if no plan fits the budget.
    """
    count = len(layer_bytes)
    if other_bytes + sum(layer_bytes) <= budget:
        return None
    for number in range(min(NUM_SLOTS, count), count + 1):
        streamed = tuple(i for i in range(count) if (i + 1) * number // count > i * number // count)
        slots = min(NUM_SLOTS, number) * max(layer_bytes[i] for i in streamed)
        kept = (
            other_bytes
            + slots
            + sum(size for i, size in enumerate(layer_bytes) if i not in streamed)
        )
        if kept <= budget:
            read = sum(layer_bytes[i] for i in streamed)
            return OffloadPlan(
                num_layers=count,
                streamed=streamed,
                resident_bytes=kept,
                slot_bytes=slots,
                read_bytes=read,
            )
    raise ConfigError(
        f"weights_bytes={budget} is less than the bytes of embeddings, head and {NUM_SLOTS} layers ({kept}); raise it",
        field="weights_bytes",
    )
