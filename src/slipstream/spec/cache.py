"""KV cache groups: which layers share a block table, and how many blocks a sequence occupies. No torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from slipstream.spec.model import AttentionKind, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share a block table. A block holds `block_size` tokens of each layer of the group.

    1. In a `full` group a sequence keeps all its blocks.
    2. In a `window` group it releases the blocks that no later token attends to.
    3. A `cross` group holds the keys and values of an encoder's states. `num_read`: number of these states
       per request (audio); None: one per prompt token.
    4. Block ids are unique over all groups, so one pool serves them. The p-th layer of each group uses cache
       tensor p. Layers whose keys differ in size share tensors through a `MixedLayout`.
    """

    kind: Literal["full", "window", "cross"]
    layers: tuple[int, ...] = ()
    window: int | None = None
    num_read: int | None = None

    def first_block(self, num_computed_tokens: int, block_size: int) -> int:
        """Index of the first block that a token at position `num_computed_tokens` or later attends to."""
        return (
            0
            if self.window is None
            else max(0, num_computed_tokens + 1 - self.window) // block_size
        )

    def max_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """Maximum number of blocks that a sequence holds at any time until it has `num_tokens`
        tokens, if a step computes up to `max_step_tokens` of them."""
        whole = -(-(self.num_read or num_tokens) // block_size)
        return (
            whole
            if self.window is None
            else min(whole, -(-(self.window + max_step_tokens) // block_size) + 1)
        )


@dataclass(frozen=True, slots=True)
class SlotKind:
    """A kind of cache besides blocks: slots of one size, of which the first is the null slot.

    A running sequence has two, plus one for each draft token that a step verifies. The other slots are checkpoints: saved
    states from which a later prompt with the same prefix continues. The kind's number in steps, keys and tiers is its index
    in `SLOT_KINDS` plus 1. A class in `core/cache` manages its slots, and `worker/device_cache.py` allocates its tensors.
    """

    # the field of `EngineArgs` that sets the number of slots; None: as many as fit in memory
    setting: str | None
    contents: str
    layers: str
    is_used: Callable[[ModelSpec], bool]
    # bytes of a slot in the local layers, given the bytes of an element
    slot_bytes: Callable[[ModelSpec, int], int]


SLOT_KINDS = (
    SlotKind(
        "state_slots",
        "states of recurrent layers",
        "recurrent layers",
        lambda spec: spec.is_recurrent,
        lambda spec, element_bytes: spec.state_bytes(element_bytes),
    ),
)


def slot_sizes(spec: ModelSpec, element_bytes: int) -> list[int]:
    """Bytes of a slot of each kind."""
    return [kind.slot_bytes(spec, element_bytes) for kind in SLOT_KINDS]


def blocks_of_sequence(
    groups: Sequence[CacheGroup], num_tokens: int, block_size: int, max_step_tokens: int
) -> int:
    """Blocks that a sequence holds in all groups together. An encoder is assumed to have read the
    same number of tokens."""
    return sum(group.max_blocks(num_tokens, block_size, max_step_tokens) for group in groups)


def longest_sequence(
    groups: Sequence[CacheGroup], num_blocks: int, block_size: int, max_step_tokens: int, limit: int
) -> int:
    """Maximum tokens of a sequence that `num_blocks` can hold. Counted in whole blocks, up to the block that contains
    `limit`."""

    def needed(count: int) -> int:
        return blocks_of_sequence(groups, count * block_size, block_size, max_step_tokens)

    return (
        bisect_right(range(-(-limit // block_size) + 1), num_blocks, key=needed) - 1
    ) * block_size


def state_interval(spec: ModelSpec, dtype_bytes: int, kv_bytes: float) -> int:
    """Tokens between two saved states of a prompt: the number whose keys and values take as many bytes as one state, rounded
    to a power of two from 256 to 8,192. So a long prompt's states take about as much memory as its keys and values."""
    if not spec.is_recurrent:
        return 0
    ratio = spec.state_bytes(dtype_bytes) / max(1, spec.kv_bytes_per_token(kv_bytes))
    return min(8192, max(256, 1 << round(math.log2(max(1.0, ratio)))))


def attention_depth(spec: ModelSpec) -> float:
    """Depth in tokens at which attending to all earlier tokens costs as many operations as the rest of a token's
    forward pass. Sliding-window layers count as the rest. Infinite if no layer attends to all tokens."""
    rest = of_each = 0.0
    for layer in spec.layers:
        chosen = getattr(layer.mlp, "num_experts_per_token", 1)
        share = chosen / getattr(layer.mlp, "num_choices", 1)
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
    3. If layers with different windows cache different numbers of heads or dimensions, layers with the same window and sizes
       belong together, in groups that fill about the same number of tensors (`_mixed_groups`).
    4. Without `divide` one `full` group has all layers.
    """
    kinds: dict[int | None, list[int]] = {}
    for i, attention in attentions.items():
        window: int | None = getattr(attention, "window", None)  # latent attention has none
        kinds.setdefault(None if window is None or window >= max_position else window, []).append(i)
    shapes = {(type(x), x.num_kv_heads, x.head_dim) for x in attentions.values()}
    if divide and len(kinds) > 1 and len(shapes) > 1:
        return _mixed_groups(attentions, max_position)
    if not divide or not kinds:
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


@dataclass(frozen=True, slots=True)
class MixedLayout:
    """How layers whose keys differ in size share cache tensors. A tensor has `width` elements for each token of a block.

    1. `width` is a multiple of all sizes. A tensor's block has `width` / size parts for a layer's keys, or values.
    2. The parts of a group's layers follow each other, keys and then values of each layer.
    3. For a layer's kernels the tensor has `scale` = `width` / size times as many blocks, and begins with the layer's part.
       They find block b at index b · `scale`, so the group's block tables hold ids multiplied by `scale`.
    """

    width: int
    places: Mapping[int, tuple[tuple[int, int], tuple[int, int]]]
    """Mapping from layer to the (tensor, part) of its keys and the (tensor, part) of its values."""

    scales: tuple[int, ...]
    """The factor by which block ids are multiplied, by group."""

    @property
    def tensors(self) -> list[int]:
        """Indices of the tensors that at least one layer uses."""
        return sorted({tensor for parts in self.places.values() for tensor, _ in parts})


def mixed_layout(
    groups: Sequence[CacheGroup], attentions: Mapping[int, AttentionKind]
) -> MixedLayout | None:
    """The layout of layers with these `attentions` in their `groups`. None if all layers have the same sizes, or one group."""
    sizes = {i: a.num_kv_heads * a.head_dim for i, a in attentions.items() if a.kv_from is None}
    own = [g for g in groups if g.kind != "cross"]
    if (
        len(own) < 2
        or len({(attentions[i].num_kv_heads, attentions[i].head_dim) for i in sizes}) < 2
    ):
        return None
    width = math.lcm(*sizes.values())
    places, scales = {}, []
    for group in groups:
        scale = width // sizes[group.layers[0]] if group in own else 1
        scales.append(scale)
        for p, layer in enumerate(group.layers if group in own else ()):
            places[layer] = divmod(2 * p, scale), divmod(2 * p + 1, scale)
    return MixedLayout(width, places, tuple(scales))


MAX_GROUPS = 16
"""Maximum number of groups that `_mixed_groups` makes. Each adds block tables and slot mappings to every step."""


def _mixed_groups(attentions: Mapping[int, AttentionKind], max_position: int) -> list[CacheGroup]:
    """Groups of layers that have the same window and the same key size, for a `MixedLayout`.

    The number of tensors is the one that wastes the least memory, summed over a short and a long
    sequence. If one `full` group of all layers is better, as with few windows, it is returned.
    """
    kinds: dict[tuple[int | None, int, int], list[int]] = {}
    for i, a in attentions.items():
        window: int | None = getattr(a, "window", None)
        window = None if window is None or window >= max_position else window
        kinds.setdefault((window, a.num_kv_heads, a.head_dim), []).append(i)
    sizes = {kind: kind[1] * kind[2] for kind in kinds}
    width = math.lcm(*sizes.values())
    least = {kind: 2 * len(own) * sizes[kind] / width for kind, own in kinds.items()}
    kept = [kind for kind in kinds if kind[0] is None]
    whole = sum(least.values())

    def layers_each(kind: tuple[int | None, int, int], count: int) -> int:
        return count * (width // sizes[kind]) // 2

    def waste(count: int) -> float:
        if not all(layers_each(kind, count) for kind in kinds):
            return math.inf
        num = {kind: -(-len(own) // layers_each(kind, count)) for kind, own in kinds.items()}
        if (total := sum(num.values())) > MAX_GROUPS:
            return math.inf
        growing = sum(num[k] for k in kept) * count / sum(least[k] for k in kept) if kept else 0.0
        return total * count / whole + growing + total / 100

    single = 1 + (whole / sum(least[k] for k in kept) if kept else math.inf)
    best = min(range(1, 2 * len(attentions) + 1), key=waste)
    if waste(best) >= single or any(not hasattr(a, "window") for a in attentions.values()):
        return [CacheGroup(kind="full", layers=tuple(attentions))]
    return [
        CacheGroup(
            kind="full" if kind[0] is None else "window",
            layers=tuple(own[i : i + layers_each(kind, best)]),
            window=kind[0],
        )
        for kind, own in sorted(kinds.items(), key=lambda item: item[0][0] or 0)
        for i in range(0, len(own), layers_each(kind, best))
    ]
