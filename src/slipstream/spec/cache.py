"""Which layers of a model share a block table of the KV cache, and how many blocks a sequence holds. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from slipstream.spec.model import AttentionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share a block table. A block of the group holds `block_size` tokens of each of these `layers`.

    A sequence keeps all its blocks in a `full` group. In a `window` group it releases those that no later token looks at. A
    `cross` group holds what an encoder read. Block ids are unique over the groups, so that one pool serves them all: the layer
    at place p of a group uses cache tensor p, whichever the group.
    """

    kind: Literal["full", "window", "cross"]
    layers: tuple[int, ...] = ()
    window: int | None = None

    def first_block(self, num_computed_tokens: int, block_size: int) -> int:
        """The first block that a token at position `num_computed_tokens`, or a later one, looks at."""
        return 0 if self.window is None else max(0, num_computed_tokens + 1 - self.window) // block_size

    def max_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` tokens holds at once, computed in steps of up to
        `max_step_tokens`."""
        whole = -(-num_tokens // block_size)
        return whole if self.window is None else min(whole, -(-(self.window + max_step_tokens) // block_size) + 1)


def blocks_of_sequence(groups: Sequence[CacheGroup], num_tokens: int, block_size: int, max_step_tokens: int) -> int:
    """The most blocks that a sequence of `num_tokens` tokens (and as many of an encoder's) holds at once, in all groups."""
    return sum(group.max_blocks(num_tokens, block_size, max_step_tokens) for group in groups)


def longest_sequence(
    groups: Sequence[CacheGroup], num_blocks: int, block_size: int, max_step_tokens: int, limit: int
) -> int:
    """How many tokens, in whole blocks and up to `limit` and the rest of its block, a sequence can have in `num_blocks`."""

    def needed(count: int) -> int:
        return blocks_of_sequence(groups, count * block_size, block_size, max_step_tokens)

    return (bisect_right(range(-(-limit // block_size) + 1), num_blocks, key=needed) - 1) * block_size


def group_layers(attentions: Sequence[AttentionKind], max_position: int, *, divide: bool) -> list[CacheGroup]:
    """The groups of layers with these `attentions`.

    One group where all layers look equally far back. Otherwise the layers of each window, and those without one, are cut into
    groups as large as the rarest kind (the last of a kind may be smaller), if all cache the same number of heads and
    dimensions. If they do not, or if not `divide`, one group keeps everything.
    """
    kinds: dict[int | None, list[int]] = {}
    for i, attention in enumerate(attentions):
        window: int | None = getattr(attention, "window", None)  # latent attention has none
        kinds.setdefault(None if window is None or window >= max_position else window, []).append(i)
    shapes = {(type(x), x.num_kv_heads, x.head_dim) for x in attentions}
    if not divide or (len(kinds) > 1 and len(shapes) > 1):
        return [CacheGroup(kind="full", layers=tuple(range(len(attentions))))]
    size = min(map(len, kinds.values()))
    return [
        CacheGroup(kind="full" if window is None else "window", layers=tuple(own[i : i + size]), window=window)
        for window, own in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for i in range(0, len(own), size)
    ]
