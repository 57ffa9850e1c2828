"""Parameters of a step for the ops: where its tokens are in the paged cache, and how its rows are
sampled.

A step is *ragged*: the tokens of all sequences are concatenated. Sequence i has tokens
query_start_loc[i] : query_start_loc[i + 1]. Shapes: T tokens in the step, S sequences, K kv heads,
D head dim, B blocks, X experts, V vocabulary.

On a CPU the tensors may be NumPy arrays. Torch is imported only by functions that make tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.kernels.states import state_metadata
from slipstream.spec.layers import int4_row_bytes
from slipstream.spec.model import AttentionKind, LatentAttentionSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from slipstream.kernels.states import LayerState, StateMetadata

Made = TypeVar("Made")

NO_ADAPTER = -1
"""Slot number of a token without an adapter."""


@dataclass(frozen=True, slots=True)
class PackedParts:
    """T tokens in parts, one after another. A token attends to all tokens of its own part
    (`OpSet.packed_attention`)."""

    by_length: tuple[
        tuple[int, Tensor | None], ...
    ]  # by length: the tokens of all its parts, int64; None: all tokens
    positions: Tensor  # int64 [T]: position in the token's part
    ends: Tensor  # int32 [T]: end of the token's part

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedParts:
        """Makes parts of these lengths, none of them 0."""
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

    In an 8-bit cache (float8 e4m3 or int8) a key or value is a stored code times its head's scale.
    An int4 cache (`fold`) holds bytes in the place of D numbers, whose format is `int4_cache.py`'s.
    The op set chooses the memory layout of `v` (`OpSet.values_by_dim`). A recurrent layer has a `state`; if it has no
    attention, it has the null block alone (B = 1).
    """

    k: Tensor  # [B, K, block_size, D]
    v: Tensor  # [B, K, block_size, D]; with latent attention a view of each key's last elements
    k_scale: Tensor | None = None  # float32 [K], with an 8-bit cache
    v_scale: Tensor | None = None  # float32 [K]
    state: LayerState | None = None
    index: Tensor | None = None  # [B, 1, block_size, I]: the keys of sparse attention's index
    fold: Tensor | None = None  # float32 [2, K, D], with an int4 cache (`int4_cache.fold_of`)
    whole: tuple[Tensor, ...] = ()
    """The tensors [blocks, …] that k and v are views of, with other numbers of blocks (`MixedLayout`)."""

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def latent(self) -> bool:
        """True if values are a part of the keys and are not written separately."""
        return self.v.shape[3] < self.k.shape[3] and self.fold is None

    @property
    def of_index(self) -> LayerKV:
        """The index's keys as a cache of latents, whose values are never read."""
        assert self.index is not None
        return LayerKV(self.index, self.index[..., 1:])


def cache_tensors(
    attention: AttentionKind | None,
    num_blocks: int,
    block_size: int,
    new: Callable[[tuple[int, ...]], Tensor],
    *,
    values_by_dim: bool = False,
    int4: bool = False,
) -> tuple[Tensor, Tensor]:
    """Makes `LayerKV`'s k and v for a layer; one number each without attention. `new` allocates tensors, of bytes if `int4`."""
    if attention is None:
        return new((1, 1, 1, 1)), new((1, 1, 1, 1))
    if int4:
        rows = int4_row_bytes(attention.head_dim)
        k, v = (new((num_blocks, attention.num_kv_heads, block_size, n)) for n in rows)
        return k, v
    shape = (num_blocks, attention.num_kv_heads, block_size, attention.head_dim)
    k = new(shape)
    if isinstance(attention, LatentAttentionSpec):
        return k, k[..., attention.rotary_dim :]
    return k, new((*shape[:2], shape[3], shape[2])).transpose(2, 3) if values_by_dim else new(shape)


def index_tensor(
    attention: AttentionKind | None,
    num_blocks: int,
    block_size: int,
    new: Callable[[tuple[int, ...]], Tensor],
) -> Tensor | None:
    """Makes `LayerKV`'s index for a layer; None if it has no index of its own."""
    if not isinstance(attention, LatentAttentionSpec) or not attention.index_dim:
        return None
    return new((num_blocks, 1, block_size, attention.index_dim))


def shared_caches(
    layers: Iterable[int],
    places: Sequence[int],
    new: Callable[[int], tuple[Tensor, Tensor]],
    scales: Sequence[tuple[Tensor, ...]] | None = None,
    state: Callable[[int], LayerState | None] = lambda layer: None,
    index: Callable[[int], Tensor | None] = lambda layer: None,
) -> list[LayerKV]:
    """Makes the caches of `layers`, with an 8-bit cache's `scales` or an int4 cache's folds, and the
    states and index keys that `state` and `index` make for a layer.

    `places` (`ModelSpec.cache_places`) are those of all layers. Layers of different groups at one
    place share what `new` makes for the first of them.
    """
    held = {i: places[i] for i in layers}
    made = {place: new(i) for i, place in reversed(held.items())}
    caches = [(*made[place], state(i)) for i, place in held.items()]
    if scales is None:
        keys = (index(i) for i in held)
        return [LayerKV(k, v, state=s, index=x) for (k, v, s), x in zip(caches, keys, strict=True)]
    return [
        LayerKV(k, v, *scale, state=s) if len(scale) == 2 else LayerKV(k, v, state=s, fold=scale[0])
        for (k, v, s), scale in zip(caches, scales, strict=True)
    ]


def cache_parts(layers: Iterable[LayerKV]) -> list[Tensor]:
    """Returns the layers' tensors, each of which holds a part of every block. Layers of different groups may share some."""
    parts = (
        layer.whole or (layer.k, None if layer.latent else layer.v, layer.index) for layer in layers
    )
    return [x for own in parts for x in own if x is not None and len(x) > 1]


def state_parts(layers: Iterable[LayerKV]) -> list[Tensor]:
    """Returns the layers' states [slots, …], each of which holds a part of every slot."""
    states = [layer.state for layer in layers if layer.state is not None]
    return [
        x for own in states for x in (own.conv, own.recurrent) if x is not None and 0 not in x.shape
    ]


def by_dim(v: Tensor) -> Tensor:
    """Returns the same values [B, K, block_size, D] with the memory layout
    [B, K, D, block_size]."""
    return v.transpose(2, 3).contiguous().transpose(2, 3)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The decodes of a step that begin with the same blocks: int32 [num_decodes] each. A group's
    members are adjacent."""

    begins: Tensor  # first member of each sequence's group; the sequence itself if it has none
    ends: Tensor  # one past the group's last member
    num_tokens: Tensor  # tokens that the group shares: whole blocks, fewer than any member has


@dataclass(frozen=True, slots=True)
class JoinedSteps:
    """One of several steps that are known at once."""

    all: AttentionMetadata  # the sequences of all steps, each step's at equal distances
    index: int  # of this step
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """The places of this step's tokens. Tensors are on the model's device, ints on the host.

    1. The first `num_decodes` sequences have one token each, so their queries are tokens 0 …
       num_decodes − 1.
    2. `from_start`: the other sequences have nothing in the cache before this step. False means
       unknown.
    3. `groups`: the metadata for each cache group (`CacheGroup`), this one first. If empty, all
       layers use these tables. In a `cross` group positions and slots are unused.
    4. `shared`: prefixes that decodes share, for layers that attend to all tokens. An op may ignore
       it.
    5. `derived`: values that ops computed from the other fields (`once`). So those must not change,
       except in a graph, which computes the values anew.
    6. `of_steps`: values that ops derive from this step's lengths are computed for all of these
       steps at once. Code that changes the lengths drops it.
    7. `most_tokens`: where each of several ranks has its own requests, the maximum tokens of a rank
       in this step. None: all have as many as this one.
    8. `layer_inputs`: what layers read beside the residual (`OwnInputSpec`), for all layers. The
       decoder sets it.
    9. In a captured graph ints are upper bounds, and padded sequences have seq_len 0 and write to
       slot 0 of the null block.
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
        None  # int32 [T]: end of each token's text; None: unknown, or no whole texts
    )
    shared: SharedPrefixes | None = None
    of_steps: JoinedSteps | None = None
    most_tokens: int | None = None
    layer_inputs: Tensor | None = None  # [T, L · P]
    token_ids: Tensor | None = (
        None  # [T], for layers that choose experts by them (the decoder sets it)
    )
    states: StateMetadata | None = None  # for recurrent layers
    groups: tuple[AttentionMetadata, ...] = ()
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of_group(self, group: int) -> AttentionMetadata:
        """Returns the metadata for the layers of a group."""
        return self.groups[group] if self.groups else self

    def of_tokens(self, rows: slice) -> AttentionMetadata:
        """Returns metadata for ops that process some of the tokens one by one, and don't use
        sequences."""
        return dataclasses.replace(
            self, positions=self.positions[rows], slot_mapping=self.slot_mapping[rows]
        )

    def once(self, key: object, make: Callable[[], Made]) -> Made:
        """Returns the result of `make`, computed once for all layers of the step."""
        if key not in self.derived:
            self.derived[key] = make()
        made: Made = self.derived[key]
        return made

    def with_groups(self, *others: AttentionMetadata) -> AttentionMetadata:
        """Returns the metadata of a model with more groups, of which this is the first."""
        return dataclasses.replace(self, groups=(self, *others)) if others else self

    def sharing(self, shared: SharedPrefixes) -> AttentionMetadata:
        """Returns the metadata with `shared` in every group."""
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
        scales: Sequence[int] = (1,),
    ) -> AttentionMetadata:
        """Makes the metadata of one sequence, in blocks 1, 2, … which the groups take in turn. There are as many `scales`
        (`ModelSpec.block_scales`).

        Its tokens are start … start + num_tokens − 1. Those before are in the cache.
        """
        return cls.uniform(
            1,
            num_tokens,
            start + num_tokens,
            block_size=block_size,
            device=device,
            scales=scales,
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
        scales: Sequence[int] = (1,),
        num_slots: int = 2,
    ) -> AttentionMetadata:
        """Makes `num_seqs` sequences of `length` tokens, the last `num_new` of them new.

        Each has its own blocks in every group, from block 1 on. Sequence i has slot i + 1 for its states, if it is one of
        `num_slots`; otherwise it begins with zeros, and keeps nothing.
        """
        import torch

        num_blocks = -(-length // block_size)
        own = (
            torch.arange(num_seqs * num_blocks, dtype=torch.int32, device=device).view(
                num_seqs, num_blocks
            )
            * len(scales)
            + 1
        )
        positions = torch.arange(length - num_new, length, device=device).repeat(num_seqs)
        rows = torch.arange(num_seqs, device=device).repeat_interleave(num_new)

        def of_group(group: int) -> dict[str, Any]:
            table = (own + group) * scales[group]
            slots = (
                table[rows, positions // block_size].long() * block_size + positions % block_size
            )
            return {"block_table": table, "slot_mapping": slots}

        first = cls(
            query_start_loc=torch.arange(
                0, num_seqs * num_new + 1, num_new, dtype=torch.int32, device=device
            ),
            seq_lens=torch.full((num_seqs,), length, dtype=torch.int32, device=device),
            positions=positions,
            **of_group(0),
            num_decodes=num_seqs if num_new == 1 else 0,
            max_query_len=num_new,
            max_seq_len=length,
            from_start=num_new == length,
            states=state_metadata(
                range(0, num_seqs * num_new + 1, num_new),
                lambda array: torch.from_numpy(array).to(device),
                slots=[i + 1 if i + 1 < num_slots else 0 for i in range(num_seqs)],
                goes_on=num_new < length,
            ),
        )
        others = (dataclasses.replace(first, **of_group(g)) for g in range(1, len(scales)))
        return first.with_groups(*others)


@dataclass(frozen=True, slots=True)
class ExpertCounters:
    """Counters of one layer's tokens by expert, which `moe` updates.

    A token that is written to the null block is padding and doesn't count.
    """

    counts: Tensor  # int64 [X]
    slots: Tensor  # int64 [T]: the step's `slot_mapping`
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """Sampling parameters of S rows of logits. Flags let an op skip what no row asks for.

    With `rows` (`OpSet.takes_rows`) row i has the parameters, the seed and the history rows[i] of
    tables of any length. Only `history_lens` and what names rows itself are of the S rows.

    `history` holds for each row the tokens so far, prompt first: row r has history_lens[r] of them,
    of which the first prompt_lens[r] are prompt. The draw of a row depends only on (seeds[r],
    history_lens[r]) and its logits.
    """

    temperature: Tensor  # float32 [S], 0 is greedy
    top_k: Tensor  # int32 [S], 0 is off
    top_p: Tensor  # float32 [S]
    min_p: Tensor  # float32 [S]
    seeds: Tensor  # int64 [S]
    history_lens: Tensor  # int32 [S]
    rows: Tensor | None = None  # int32 or int64 [S]
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
