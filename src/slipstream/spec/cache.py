"""KV cache groups: which layers share a block table, and how many blocks a sequence holds. No torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from slipstream.spec.model import AttentionKind, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share a block table. A block holds `block_size` tokens of each layer of the group.

    1. In a `full` group a sequence keeps all its blocks.
    2. In a `window` group it releases the blocks that no later token attends to.
    3. A `cross` group holds the keys and values of an encoder's states. `num_read`: each request has so many (audio); None: as
       many as its prompt has tokens.
    4. Block ids are unique over all groups, so one pool serves them. The layer at place p of any group uses cache tensor p.
    """

    kind: Literal["full", "window", "cross"]
    layers: tuple[int, ...] = ()
    window: int | None = None
    num_read: int | None = None

    def first_block(self, num_computed_tokens: int, block_size: int) -> int:
        """The first block that a token at position `num_computed_tokens` or later attends to."""
        return (
            0
            if self.window is None
            else max(0, num_computed_tokens + 1 - self.window) // block_size
        )

    def max_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """The most blocks that a sequence holds at once until it has `num_tokens` tokens, if a step computes up to
        `max_step_tokens` of them."""
        whole = -(-(self.num_read or num_tokens) // block_size)
        return (
            whole
            if self.window is None
            else min(whole, -(-(self.window + max_step_tokens) // block_size) + 1)
        )


def blocks_of_sequence(
    groups: Sequence[CacheGroup], num_tokens: int, block_size: int, max_step_tokens: int
) -> int:
    """The same in all groups together. An encoder has read as many tokens."""
    return sum(group.max_blocks(num_tokens, block_size, max_step_tokens) for group in groups)


def longest_sequence(
    groups: Sequence[CacheGroup], num_blocks: int, block_size: int, max_step_tokens: int, limit: int
) -> int:
    """The most tokens of a sequence for which `num_blocks` suffice: whole blocks, up to the one that contains `limit`."""

    def needed(count: int) -> int:
        return blocks_of_sequence(groups, count * block_size, block_size, max_step_tokens)

    return (
        bisect_right(range(-(-limit // block_size) + 1), num_blocks, key=needed) - 1
    ) * block_size


def state_interval(spec: ModelSpec, dtype_bytes: int, kv_bytes: float) -> int:
    """Tokens between the states that are kept of a prompt: as many as have keys and values of a state's bytes, a power of two
    from 256 to 8,192. So a long prompt's states take no more memory than its keys and values."""
    if not spec.is_recurrent:
        return 0
    ratio = spec.state_bytes(dtype_bytes) / max(1, spec.kv_bytes_per_token(kv_bytes))
    return min(8192, max(256, 1 << round(math.log2(max(1.0, ratio)))))


def attention_depth(spec: ModelSpec) -> float:
    """Depth in tokens at which a token's attention to all before it costs as many operations as the rest of the token. Layers
    with a window are part of the rest. Infinite if no layer attends to all tokens."""
    rest = of_each = 0.0
    for layer in spec.layers:
        share = getattr(layer.mlp, "num_experts_per_token", 1) / getattr(
            layer.mlp, "num_experts", 1
        )
        for name, shape in layer.shapes(spec.hidden_size).items():
            if name.endswith("weight") and len(shape) == 2:
                rest += 2 * math.prod(shape) * (share if name.startswith("experts.") else 1)
    for a in spec.attentions:
        window: int | None = getattr(a, "window", None)  # latent attention has none
        pair = 2 * a.num_heads * (a.head_dim + getattr(a, "kv_rank", a.head_dim))
        if window is None or window >= spec.max_position:
            of_each += pair
        else:
            rest += pair * window
    return rest / of_each if of_each else math.inf


def group_layers(
    attentions: Mapping[int, AttentionKind], max_position: int, *, divide: bool
) -> list[CacheGroup]:
    """The groups of layers with these `attentions`, by the layer's index. Without any, one `full` group has no layer: its
    blocks hold nothing, and their keys are those of the recurrent layers' states.

    1. If all layers have the same window, or none has one, there is one group.
    2. Otherwise layers with the same window belong together, and so do those without one. Each such set is divided into
       groups of the size of the smallest set; its last group may be smaller.
    3. If layers cache different numbers of heads or dimensions, or without `divide`, one `full` group has all layers.
    """
    kinds: dict[int | None, list[int]] = {}
    for i, attention in attentions.items():
        window: int | None = getattr(attention, "window", None)  # latent attention has none
        kinds.setdefault(None if window is None or window >= max_position else window, []).append(i)
    shapes = {(type(x), x.num_kv_heads, x.head_dim) for x in attentions.values()}
    if not divide or not kinds or (len(kinds) > 1 and len(shapes) > 1):
        return [CacheGroup(kind="full", layers=tuple(attentions))]
    size = min(map(len, kinds.values()))
    return [
        CacheGroup(
            kind="full" if window is None else "window",
            layers=tuple(own[i : i + size]),
            window=window,
        )
        for window, own in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for i in range(0, len(own), size)
    ]
