"""Parameters of a step for the ops: where its tokens are in the paged cache, and how its rows are sampled.

A step is *ragged*: the tokens of all sequences are concatenated. Sequence i has tokens query_start_loc[i] :
query_start_loc[i + 1]. Shapes: T tokens in the step, S sequences, K kv heads, D head dim, B blocks, X experts, V vocabulary.

On a CPU the tensors may be NumPy's arrays. Torch is imported only by what makes tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.spec.model import AttentionKind, LatentAttentionSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Made = TypeVar("Made")

NO_ADAPTER = -1
"""In the place of an adapter's slot: there is none."""


@dataclass(frozen=True, slots=True)
class PackedParts:
    """T tokens in parts, one behind another. A token attends to its own part, whole (`OpSet.packed_attention`)."""

    by_length: tuple[
        tuple[int, Tensor | None], ...
    ]  # for each length the tokens of all its parts, int64; None: all tokens
    positions: Tensor  # int64 [T]: a token's place in its part
    ends: Tensor  # int32 [T]: where its part ends

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedParts:
        """Parts of these lengths, none of them 0."""
        import torch

        each = torch.tensor(lengths)
        ends = each.cumsum(0)
        starts, kinds = ends - each, each.unique().tolist()
        index: list[Tensor | None] = [None]
        if len(kinds) > 1:
            index = [
                (starts[each == n][:, None] + torch.arange(n)).flatten().to(device) for n in kinds
            ]
        positions = torch.arange(int(each.sum())) - starts.repeat_interleave(each)
        of_tokens = ends.repeat_interleave(each).int()
        return cls(
            tuple(zip(kinds, index, strict=True)), positions.to(device), of_tokens.to(device)
        )


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's paged cache. Block 0 is the null block: padding writes to it, nothing reads it.

    In an 8-bit cache (float8 e4m3 or int8) a key or value is a stored number times its head's scale. The op set chooses the
    memory layout of `v` (`OpSet.values_by_dim`).
    """

    k: Tensor  # [B, K, block_size, D]
    v: Tensor  # [B, K, block_size, D], or of latent attention the last numbers of each key: a view of `k`
    k_scale: Tensor | None = None  # float32 [K], with an 8-bit cache
    v_scale: Tensor | None = None  # float32 [K]

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def latent(self) -> bool:
        """Values are a part of the keys, and are not written separately."""
        return self.v.shape[3] < self.k.shape[3]


def cache_tensors(
    attention: AttentionKind,
    num_blocks: int,
    block_size: int,
    new: Callable[[tuple[int, ...]], Tensor],
    *,
    values_by_dim: bool = False,
) -> tuple[Tensor, Tensor]:
    """`LayerKV`'s k and v for a layer. `new` allocates tensors."""
    shape = (num_blocks, attention.num_kv_heads, block_size, attention.head_dim)
    k = new(shape)
    if isinstance(attention, LatentAttentionSpec):
        return k, k[..., attention.rotary_dim :]
    return k, new((*shape[:2], shape[3], shape[2])).transpose(2, 3) if values_by_dim else new(shape)


def shared_caches(
    layers: Iterable[int],
    places: Sequence[int],
    new: Callable[[int], tuple[Tensor, Tensor]],
    scales: Sequence[tuple[Tensor, Tensor]] | None = None,
) -> list[LayerKV]:
    """The caches of `layers`, with an 8-bit cache's `scales`. `places` (`ModelSpec.cache_places`) are those of all layers:
    layers at one place, of different groups, share what `new` makes for the first of them."""
    held = {i: places[i] for i in layers}
    made = {place: new(i) for i, place in reversed(held.items())}
    caches = [made[place] for place in held.values()]
    if scales is None:
        return [LayerKV(*cache) for cache in caches]
    return [LayerKV(*cache, *scale) for cache, scale in zip(caches, scales, strict=True)]


def by_dim(v: Tensor) -> Tensor:
    """The same values [B, K, block_size, D], with the memory layout [B, K, D, block_size]."""
    return v.transpose(2, 3).contiguous().transpose(2, 3)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Which decodes of a step begin with the same blocks: int32 [num_decodes] each. A group's members stand side by side."""

    begins: Tensor  # the first member of each sequence's group, which is itself where it has none
    ends: Tensor  # the one behind the group's last member
    num_tokens: Tensor  # that the group shares: whole blocks, fewer tokens than any member has


@dataclass(frozen=True, slots=True)
class Steps:
    """One of several steps that are known at once."""

    all: AttentionMetadata  # the sequences of all, those of the steps at equal distances
    index: int  # of the step
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where this step's tokens are. Tensors are on the model's device, ints on the host.

    1. The first `num_decodes` sequences have one token each, so their queries are tokens 0 … num_decodes − 1.
    2. `from_start`: the other sequences have nothing in the cache before this step. False: unknown.
    3. `groups`: the metadata for each cache group (`CacheGroup`), this one first. Empty: all layers use these tables. In a
       `cross` group positions and slots are unused.
    4. `shared`: what decodes share, for layers that look at all tokens. An op may leave it out of account.
    5. `derived`: what ops made of the others (`once`). So these don't change, except in a graph, which makes it anew.
    6. `of_steps`: what ops make of this step's lengths is made for all of these steps at once. So who changes the lengths
       leaves it out.
    7. `most_tokens`: where each of several ranks has requests of its own, the most tokens that one of them has in this step.
       None: all have as many as this one.
    8. In a captured graph ints are upper bounds, and padded sequences have seq_len 0 and write to slot 0 of the null block.
    """

    query_start_loc: Tensor  # int32 [S + 1]
    seq_lens: Tensor  # int32 [S]: tokens in the cache after this step's are written
    block_table: Tensor  # int32 [S, max_blocks]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]: block · block_size + offset
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    from_start: bool = False
    token_types: Tensor | None = (
        None  # int64 [T], for texts of two parts; None: all tokens have type 0
    )
    text_ends: Tensor | None = (
        None  # int32 [T]: where each token's text ends; None: unknown, or no whole texts
    )
    shared: SharedPrefixes | None = None
    of_steps: Steps | None = None
    most_tokens: int | None = None
    groups: tuple[AttentionMetadata, ...] = ()
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of_group(self, group: int) -> AttentionMetadata:
        """The metadata for the layers of a group."""
        return self.groups[group] if self.groups else self

    def of_tokens(self, rows: slice) -> AttentionMetadata:
        """For ops that look at some of the tokens one by one, and not at sequences."""
        return dataclasses.replace(
            self, positions=self.positions[rows], slot_mapping=self.slot_mapping[rows]
        )

    def once(self, key: object, make: Callable[[], Made]) -> Made:
        """What `make` makes of this, for all layers of the step."""
        if key not in self.derived:
            self.derived[key] = make()
        made: Made = self.derived[key]
        return made

    def with_groups(self, *others: AttentionMetadata) -> AttentionMetadata:
        """The metadata of a model with more groups, of which this is the first."""
        return dataclasses.replace(self, groups=(self, *others)) if others else self

    def sharing(self, shared: SharedPrefixes) -> AttentionMetadata:
        """The same in every group."""
        groups = tuple([dataclasses.replace(group, shared=shared) for group in self.groups])
        return dataclasses.replace(self, shared=shared, groups=groups)

    @classmethod
    def single_sequence(
        cls,
        start: int,
        num_tokens: int,
        *,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> AttentionMetadata:
        """One sequence, in blocks 1, 2, … which the groups take in turn. Its tokens are start … start + num_tokens − 1, and
        those before are in the cache."""
        return cls.uniform(
            1,
            num_tokens,
            start + num_tokens,
            block_size=block_size,
            device=device,
            num_groups=num_groups,
        )

    @classmethod
    def uniform(
        cls,
        num_seqs: int,
        num_new: int,
        length: int,
        *,
        block_size: int,
        device: torch.device | None = None,
        num_groups: int = 1,
    ) -> AttentionMetadata:
        """`num_seqs` sequences of `length` tokens, the last `num_new` of them new; each has its own blocks in every group, from
        block 1 on."""
        import torch

        num_blocks = -(-length // block_size)
        own = (
            torch.arange(num_seqs * num_blocks, dtype=torch.int32, device=device).view(
                num_seqs, num_blocks
            )
            * num_groups
            + 1
        )
        positions = torch.arange(length - num_new, length, device=device).repeat(num_seqs)
        rows = torch.arange(num_seqs, device=device).repeat_interleave(num_new)
        slots = own[rows, positions // block_size].long() * block_size + positions % block_size
        first = cls(
            query_start_loc=torch.arange(
                0, num_seqs * num_new + 1, num_new, dtype=torch.int32, device=device
            ),
            seq_lens=torch.full((num_seqs,), length, dtype=torch.int32, device=device),
            block_table=own,
            positions=positions,
            slot_mapping=slots,
            num_decodes=num_seqs if num_new == 1 else 0,
            max_query_len=num_new,
            max_seq_len=length,
            from_start=num_new == length,
        )
        others = (
            dataclasses.replace(first, block_table=own + g, slot_mapping=slots + g * block_size)
            for g in range(1, num_groups)
        )
        return first.with_groups(*others)


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Where `moe` counts, for one layer, the tokens that each expert was chosen for. A token that is written to the null block
    is padding and doesn't count."""

    counts: Tensor  # int64 [X]
    slots: Tensor  # int64 [T]: the step's `slot_mapping`
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """How to sample S rows of logits. Flags let an op skip what no row asks for.

    `history` holds for each row the tokens so far, prompt first: row r has history_lens[r] of them, of which the first
    prompt_lens[r] are prompt. The draw of a row depends only on (seeds[r], history_lens[r]) and its logits.
    """

    temperature: Tensor  # float32 [S], 0 is greedy
    top_k: Tensor  # int32 [S], 0 is off
    top_p: Tensor  # float32 [S]
    min_p: Tensor  # float32 [S]
    seeds: Tensor  # int64 [S]
    history_lens: Tensor  # int32 [S]
    prompt_lens: Tensor | None = None  # int32 [S], with penalties
    history: Tensor | None = None  # int32 [S, L], with penalties
    repetition_penalty: Tensor | None = None  # float32 [S]
    presence_penalty: Tensor | None = None  # float32 [S]
    frequency_penalty: Tensor | None = None  # float32 [S]
    bias_rows: Tensor | None = None  # int64 [N]: logits[bias_rows, bias_tokens] += bias_values
    bias_tokens: Tensor | None = None  # int64 [N]
    bias_values: Tensor | None = None  # float32 [N]
    limited_rows: Tensor | None = (
        None  # int64 [M]: rows in which only the allowed tokens can be drawn
    )
    allowed_rows: Tensor | None = None  # int64 [K]: of limited row allowed_rows[i] ...
    allowed_tokens: Tensor | None = None  # int64 [K]: ... this token
    all_greedy: bool = False
    any_top_k: bool = False
    any_top_p: bool = False
    any_min_p: bool = False

    @property
    def changes_logits(self) -> bool:
        return (
            self.bias_rows is not None or self.history is not None or self.limited_rows is not None
        )
