"""Parameters of a step for the ops: where its tokens are in the paged cache, and how its rows are sampled.

A step is *ragged*: the tokens of all sequences are concatenated. Sequence i has tokens
query_start_loc[i] : query_start_loc[i + 1]. Shapes: T tokens in the step, S sequences, K kv heads,
D head dim, B blocks, X experts, V vocabulary.

On a CPU the tensors may be NumPy arrays. Torch is imported only by functions that make tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.states import LayerState, StateMetadata

Made = TypeVar("Made")

NO_ADAPTER = -1
"""Slot number of a token without an adapter."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's paged cache. Block 0 is the null block: padding writes to it, nothing reads it.

    In an 8-bit cache (float8 e4m3 or int8) a key or value is a stored code times its head's scale.
    An int4 cache (`fold`) holds bytes in the place of D numbers, whose format is `cache/int4.py`'s.
    The op set chooses the memory layout of `v` (`OpSet.values_by_dim`). A recurrent layer has a `state`; if it has no
    attention, it has the null block alone (B = 1).
    """

    k: Tensor  # [B, K, block_size, D]
    v: Tensor  # [B, K, block_size, D]; with latent attention a view of each key's last elements
    k_scale: Tensor | None = None  # float32 [K], with an 8-bit cache
    v_scale: Tensor | None = None  # float32 [K]
    state: LayerState | None = None
    index: Tensor | None = None  # [B, 1, block_size, I]: the keys of sparse attention's index
    fold: Tensor | None = None  # float32 [2, K, D], with an int4 cache (`int4.fold_of`)
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
        """The layer's index keys, presented as a cache of latents without values."""
        assert self.index is not None
        return LayerKV(self.index, self.index[..., 1:])


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The decodes of a step that begin with the same blocks: int32 [num_decodes] each. A group's
    members are adjacent."""

    begins: Tensor  # first member of each sequence's group; the sequence itself if it has none
    ends: Tensor  # one past the group's last member
    num_tokens: Tensor  # tokens that the group shares: whole blocks, fewer than any member has


@dataclass(frozen=True, slots=True)
class JoinedSteps:
    """Position of this step among several whose inputs are all known before the first runs."""

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
    8. `layer_inputs`: what layers read next to the residual (`OwnInputSpec`), for all layers. The
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
    # int64 [T], for texts of two parts; None: all tokens have type 0
    token_types: Tensor | None = None
    # int32 [T]: end of each token's text; None: unknown, or no whole texts
    text_ends: Tensor | None = None
    shared: SharedPrefixes | None = None
    of_steps: JoinedSteps | None = None
    most_tokens: int | None = None
    layer_inputs: Tensor | None = None  # [T, L · P]
    # [T], for layers that choose experts by them (the decoder sets it)
    token_ids: Tensor | None = None
    states: StateMetadata | None = None  # for recurrent layers
    # int32 [T], where ranks share keys out (`context_ops.py`): a token sees those before `limits`,
    # and none before `begins`
    limits: Tensor | None = None
    begins: Tensor | None = None
    groups: tuple[AttentionMetadata, ...] = ()
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of_group(self, group: int) -> AttentionMetadata:
        """Returns the metadata for the layers of a group."""
        return self.groups[group] if self.groups else self

    def of_tokens(self, rows: slice) -> AttentionMetadata:
        """Returns metadata of some tokens for ops that treat each token separately."""
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

    With `rows` (`OpSet.takes_rows`) row i has the parameters, the seed and the history rows[i] of tables of any
    length. Only `history_lens`, and tensors of row numbers, have one entry for each of the S rows.

    `history` holds for each row the tokens so far, prompt first: row r has history_lens[r] of them, of which the first
    prompt_lens[r] are prompt. The draw of a row depends only on (seeds[r], history_lens[r]) and its logits.
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
    # int64 [M]: rows in which only the allowed tokens can be drawn
    limited_rows: Tensor | None = None
    allowed_rows: Tensor | None = None  # int64 [K]: of limited row allowed_rows[i] ...
    allowed_tokens: Tensor | None = None  # int64 [K]: ... this token
    all_greedy: bool = False
    any_top_k: bool = False
    any_top_p: bool = False
    any_min_p: bool = False

    @property
    def changes_logits(self) -> bool:
        given = self.bias_rows, self.history, self.limited_rows
        return any(x is not None for x in given)
