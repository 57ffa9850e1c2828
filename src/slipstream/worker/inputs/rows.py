"""The worker's permanent rows.

Each request has a row while it runs. A row's tokens and block tables are on the device. A step only says which rows
compute which positions. So a token sampled in step N is the input of step N + 1 without a copy to the host.

1. Row `capacity` is the null row (block 0), which padding reads and writes. Its tokens are
   arbitrary.
2. The host writes a row's tokens once, when the row is made. The sampler writes every later token
   on the device. All tables are in one array (`packed_tables.py`), so a step's changes to them are
   one upload.
3. Without a torch device (`device=None`) the tables are NumPy arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from slipstream.config import EngineConfig
from slipstream.kernels.metadata import NO_ADAPTER
from slipstream.messages.media import MediaSpan
from slipstream.messages.requests import pack_ids
from slipstream.messages.steps import FROM_MODEL, NewRequest, ScheduledRequest, StepPlan
from slipstream.params.sampling import SamplingParams
from slipstream.platform import platform_of
from slipstream.spec.model import CacheGroup
from slipstream.worker.inputs.media_rows import turned_positions
from slipstream.worker.inputs.packed_tables import PackedTables

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from slipstream.kernels.ops import OpSet

LongArray = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.int32]


Want: TypeAlias = Literal[
    "adapter",
    "media",
    "vector",
    "grammar",
    "logprobs",
    "prompt_logprobs",
    "draw",
    "penalties",
    "bias",
    "allowed",
    "top_k",
    "top_p",
    "min_p",
    "chain",
]
"""Options for which a request needs more than the most likely token."""

NEEDS_LOGITS: tuple[Want, ...] = (
    "grammar",
    "logprobs",
    "draw",
    "penalties",
    "bias",
    "allowed",
    "chain",
)
"""Options that need the logits, not only the index of the largest."""

FEW_BLOCKS = 32
"""Number of blocks up to which a Python loop is as fast as creating two arrays."""


@dataclass(slots=True)
class Row:
    """Host-side state of one running request: its row number and what the host must know of it."""

    index: int
    sampling: SamplingParams
    num_prompt_tokens: int
    seed: int
    forbidden_early: tuple[int, ...]  # end tokens, which are forbidden before `min_tokens`
    num_encoder_tokens: int = 0
    adapter: int = NO_ADAPTER  # slot of its adapter
    mirostat_mu: float = 0.0
    num_drafted: int = 0  # tokens that the drafter has computed, without rejected drafts
    # drafts of the last chain run by a graph (`worker/graphs/chain_graphs.py`)
    num_kept: int = 0
    ahead: range = range(0)  # numbers of computed tokens for which a chain is already launched
    num_blocks: int = 0  # blocks in its first group
    media: tuple[MediaSpan, ...] = ()
    # three positions [3, n] of its tokens up to the end of the last image, if tokens have three
    places: LongArray | None = None
    # the only tokens that may be sampled, without duplicates
    allowed: LongArray | None = field(init=False)

    def __post_init__(self) -> None:
        allowed = self.sampling.allowed_token_ids
        self.allowed = None if allowed is None else np.array(sorted({*allowed}), np.int64)

    def wants(self) -> Iterator[Want]:
        s = self.sampling
        asked: dict[Want, object] = {
            "grammar": s.is_masked,
            "logprobs": s.logprobs is not None,
            "prompt_logprobs": s.prompt_logprobs is not None,
            "draw": s.temperature > 0.0,
            "penalties": s.has_penalties,
            "bias": s.logit_bias or self.forbidden_early or s.bad_words_token_ids or s.speech,
            "allowed": self.allowed is not None,
            "top_k": s.top_k,
            "top_p": s.top_p < 1.0,
            "min_p": s.min_p > 0.0,
            "chain": s.by_chain,
        }
        return (want for want, value in asked.items() if value)


class RowTable:
    """Rows of up to `capacity` requests with up to `max_model_len` tokens.

    Each row has a block table in every group of `groups`.
    """

    def __init__(
        self,
        capacity: int,
        max_model_len: int,
        block_size: int,
        ops: OpSet,
        device: torch.device | None,
        seed: int,
        *,
        groups: Sequence[CacheGroup] = (CacheGroup(kind="full"),),
        scales: Sequence[int] = (),
        sectioned: bool = False,
        slot_columns: Sequence[int] = (),
    ) -> None:
        """Allocate the tables.

        `scales`: factor of each group's block ids in its table (`ModelSpec.block_scales`); empty: none.
        `sectioned`: image tokens have three positions, and later text has fewer positions than tokens.
        """
        self.capacity = capacity
        self._scales = scales or (1,) * len(groups)
        self.block_size = block_size
        self.ops = ops
        self.platform = platform = platform_of(device)
        self.device = platform.device
        self.upload = platform.upload
        self.cross = next((g for g, group in enumerate(groups) if group.kind == "cross"), None)
        # groups of the requests' own tokens; they come first
        self.num_own = len(groups) - (self.cross is not None)
        of_cross = None if self.cross is None else groups[self.cross].num_read
        self.max_encoder_len = of_cross or max_model_len
        max_blocks = -(-max(max_model_len, self.max_encoder_len) // block_size)
        # One column more than the context, because the last sampled token is stored but never computed.
        tables: dict[str, tuple[str, tuple[int, ...]]] = {
            "tokens": ("int32", (capacity + 1, max_model_len + 1)),
            "block_tables": ("int32", (len(groups), capacity + 1, max_blocks)),
            "encoder_lens": ("int32", (capacity + 1,)),
            "position_shifts": ("int64", (capacity + 1,)),
            "sampling_floats": ("float32", (6, capacity + 1)),
            "sampling_ints": ("int64", (3, capacity + 1)),
        }
        columns = {kind: count for kind, count in enumerate(slot_columns, 1) if count}
        tables |= {f"slots {k}": ("int32", (capacity + 1, n)) for k, n in columns.items()}
        self._tables = PackedTables(tables, platform)
        self.tokens, self.block_tables = self._tables["tokens"], self._tables["block_tables"]
        self.encoder_lens = self._tables["encoder_lens"]
        # shift of the positions after a row's images
        self.position_shifts = self._tables["position_shifts"] if sectioned else None
        # slots of each kind: the one to read, then those to write, on the device and on the host
        self.slots = {kind: self._tables[f"slots {kind}"] for kind in columns}
        self.host_slots = {k: np.zeros((capacity + 1, n), np.int32) for k, n in columns.items()}
        self.states = self.slots.get(1)  # of recurrent layers
        # Per row [C + 1]: temperature, top_p, min_p and the penalties; then top_k, number of prompt tokens, seed.
        self.sampling_floats = self._tables["sampling_floats"]
        self.sampling_ints = self._tables["sampling_ints"]
        self.rows: dict[str, Row] = {}
        self.num_dropped = 0  # rows dropped since the start
        self.wanting: dict[Want, set[str]] = {want: set() for want in get_args(Want)}
        self._free = list(range(capacity - 1, -1, -1))
        self._seed = seed

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        ops: OpSet,
        device: torch.device | None,
        *,
        scales: Sequence[int] = (),
        sectioned: bool = False,
        rank: int = 0,
    ) -> RowTable:
        """Make a table with as many rows as `config` allows running sequences.

        `rank` is one of several ranks with different requests, so their seeds differ, too.
        """
        model, cache = config.model, config.cache
        sizes = config.scheduling.max_num_seqs, model.max_model_len, cache.block_size
        return cls(
            *sizes,
            ops,
            device,
            model.seed + rank,
            groups=cache.groups,
            scales=scales,
            sectioned=sectioned,
            slot_columns=config.slot_columns,
        )

    @cached_property
    def nothing(self) -> Tensor:
        """Empty float32 [0] tensor for absent inputs; an empty upload takes as long as any other."""
        return self.upload(np.empty(0, np.float32))

    @cached_property
    def no_chunks(self) -> Tensor:
        """Empty int32 [0, 3] tensor, for states of steps without prompts."""
        return self.upload(np.empty((0, 3), np.int32))

    @cached_property
    def _seeds(self) -> np.random.Generator:
        # created late: numpy.random takes 12 ms of a start
        return np.random.default_rng(self._seed)

    def _next_seed(self, sampling: SamplingParams) -> int:
        return int(self._seeds.integers(2**62)) if sampling.temperature > 0.0 else 0

    def forget(self) -> None:
        """Drop every row."""
        self.rows.clear()
        for wanting in self.wanting.values():
            wanting.clear()
        self._free = list(range(self.capacity - 1, -1, -1))

    def apply(self, plan: StepPlan, adapters: Mapping[int, int] = MappingProxyType({})) -> None:
        """Drop released rows, create new ones, and update block tables, with at most one upload.

        `adapters` maps the adapter ids of new requests to their slots.
        """
        for request_id in plan.released:
            for wanting in self.wanting.values():
                wanting.discard(request_id)
            row = self.rows.pop(request_id, None)
            if row is not None:
                self._free.append(row.index)
                self.num_dropped += 1
        if plan.new:
            self._add(plan.new, adapters)
        if plan.unmasked:
            self.wanting["grammar"].difference_update(plan.unmasked)
        self._update(plan.scheduled)
        if drafted := [s for s in plan.scheduled if s.drafts and FROM_MODEL not in s.drafts]:
            self._put_drafts(drafted)
        self._tables.flush()

    def _add(self, new: Sequence[NewRequest], adapters: Mapping[int, int]) -> None:
        width = self.tokens.shape[1]
        starts = list[int]()
        for request in new:
            sampling = request.sampling
            seed = sampling.seed if sampling.seed is not None else self._next_seed(sampling)
            early = (
                (*request.eos_token_ids, *sampling.stop_token_ids) if sampling.min_tokens else ()
            )
            row = Row(
                self._free.pop(),
                sampling,
                request.num_prompt_tokens,
                seed,
                early,
                request.num_encoder_tokens,
            )
            row.mirostat_mu = (
                2.0 * sampling.mirostat_tau if request.mirostat_mu is None else request.mirostat_mu
            )
            self.rows[request.request_id] = row
            if request.lora is not None:
                row.adapter = adapters[request.lora.id]
                self.wanting["adapter"].add(request.request_id)
            for want in (*row.wants(), *(("vector",) if request.pooled else ())):
                self.wanting[want].add(request.request_id)
            if request.media:
                row.media = request.media
                self.wanting["media"].add(request.request_id)
            starts.append(row.index * width)
        # `pack` takes half of the time that NumPy takes to read a tuple
        packed = [
            s.token_ids if isinstance(s.token_ids, bytes) else pack_ids(s.token_ids) for s in new
        ]
        self._tables.put_runs("tokens", starts, [np.frombuffer(ids, np.int32) for ids in packed])
        self._put_sampling([self.rows[s.request_id] for s in new])
        if self.position_shifts is not None:
            self._put_shifts([self.rows[s.request_id] for s in new])
        if self.cross is not None:
            found = np.array(
                [(self.rows[s.request_id].index, s.num_encoder_tokens) for s in new], np.int64
            )
            self._tables.put("encoder_lens", found[:, 0], found[:, 1].astype(np.int32))

    def _put_sampling(self, rows: Sequence[Row]) -> None:
        """Write the rows' sampling parameters, which do not change while a row exists."""
        where = np.array([row.index for row in rows], np.int64)
        floats = [
            (
                p.temperature,
                p.top_p,
                p.min_p,
                p.repetition_penalty,
                p.presence_penalty,
                p.frequency_penalty,
            )
            for p in (row.sampling for row in rows)
        ]
        ints = [(row.sampling.top_k, row.num_prompt_tokens, row.seed) for row in rows]
        columns = self.capacity + 1
        for name, values in (
            ("sampling_floats", np.array(floats, np.float32).T),
            ("sampling_ints", np.array(ints, np.int64).T),
        ):
            places = where + columns * np.arange(len(values))[:, None]
            self._tables.put(name, places.reshape(-1), values.reshape(-1))

    def _put_shifts(self, rows: Sequence[Row]) -> None:
        """Compute three positions per image token, and the shift of the text after them."""
        shifts = np.zeros(len(rows), np.int64)
        for i, row in enumerate(rows):
            if row.media:
                row.places, shifts[i] = turned_positions(row.media)
        self._tables.put("position_shifts", np.array([row.index for row in rows], np.int64), shifts)

    def is_greedy(self, request_ids: Sequence[str]) -> bool:
        """True if the requests want only the index of the largest logit."""
        return not any(self.wanted(want, request_ids) for want in NEEDS_LOGITS)

    def changes_logits(self, request_ids: Sequence[str]) -> bool:
        """Whether one of the requests changes the model's logits, apart from masks."""
        return any(
            self.wanted(want, request_ids) for want in ("penalties", "bias", "allowed", "chain")
        )

    def wanted(self, want: Want, request_ids: Sequence[str]) -> bool:
        """True if one of the requests wants the option."""
        wanting = self.wanting[want]
        return bool(wanting) and not wanting.isdisjoint(request_ids)

    def adapters_of(self, scheduled: Sequence[ScheduledRequest]) -> IntArray:
        """Adapter slots of requests [S]."""
        return np.array([self.rows[s.request_id].adapter for s in scheduled], np.int32)

    def _update(self, scheduled: Sequence[ScheduledRequest]) -> None:
        _, num_rows, width = self.block_tables.shape
        changed = {kind: list[int]() for kind in self.slots}  # rows whose slots changed
        blocks: dict[int, int] = {}  # by index; the later of two updates of an index counts
        places, whole = list[int](), list[IntArray]()  # starts, ids of long runs, each written once
        for s in scheduled:
            for update in s.table_updates:
                if update.group < 0:
                    index, slots = self.rows[s.request_id].index, update.block_ids
                    self.host_slots[-update.group][index, : len(slots)] = slots
                    changed[-update.group].append(index)
                    continue
                if update.group == 0:
                    row = self.rows[s.request_id]
                    row.num_blocks = max(row.num_blocks, update.index + len(update.block_ids))
                first = (
                    update.group * num_rows + self.rows[s.request_id].index
                ) * width + update.index
                ids, scale = update.block_ids, self._scales[update.group]
                if scale != 1:
                    ids = tuple([block * scale for block in ids])
                if len(ids) > FEW_BLOCKS and (
                    [u.group for u in s.table_updates].count(update.group) == 1
                ):
                    places.append(first)
                    # takes a third of the time
                    whole.append(np.frombuffer(array("i", ids), np.int32))
                    continue
                blocks.update(zip(range(first, first + len(ids)), ids, strict=True))
        if blocks:
            where = np.fromiter(blocks, np.int64)
            self._tables.put("block_tables", where, np.fromiter(blocks.values(), np.int32))
        self._tables.put_runs("block_tables", places, whole)
        for kind, own in changed.items():
            if own:
                rows, host = np.array(own, np.int64), self.host_slots[kind]
                where = rows[:, None] * host.shape[1] + np.arange(host.shape[1])
                self._tables.put(f"slots {kind}", where.reshape(-1), host[rows].reshape(-1))

    def _put_drafts(self, drafted: Sequence[ScheduledRequest]) -> None:
        """Write drafts to their rows.

        They are the last tokens that their requests compute in this step.
        """
        width, where = self.tokens.shape[1], list[int]()
        for s in drafted:
            end = self.rows[s.request_id].index * width + s.num_computed_tokens + s.num_tokens
            where.extend(range(end - len(s.drafts), end))
        tokens = np.array([token for s in drafted for token in s.drafts], np.int32)
        self._tables.put("tokens", np.array(where, np.int64), tokens)

    def write(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Write the sampled tokens [N] to the rows, where the next step reads them."""
        self.write_into(self.tokens, rows, positions, tokens)

    def write_into(self, table: Tensor, rows: Tensor, columns: Tensor, tokens: Tensor) -> None:
        """Write tokens [N] to a table [C + 1, n]."""
        if self.platform.kind == "cpu":
            array = self.platform.values.array
            array(table)[array(rows), array(columns)] = array(tokens)
        else:
            self.ops.write_tokens(table, rows, columns, tokens)

    def columns(self, table: Tensor, which: Tensor) -> Tensor:
        """Selects columns `which` [N] of `table` [n, C + 1] → [n, N]. A column of this array
        belongs to a row of the `RowTable`.
        """
        return self.platform.values.take(table, which, 1)  # type: ignore[no-any-return]

    def of_rows(self, table: Tensor, which: Tensor) -> Tensor:
        """Selects rows `which` [N] of `table` [C + 1, n] → [N, n]."""
        return self.platform.values.take(table, which)  # type: ignore[no-any-return]


def rows_bytes(config: EngineConfig) -> int:
    """Bytes of the tokens and block tables of `RowTable.of(config)`; the rest is small."""
    per_row = config.model.max_model_len + 1 + len(config.cache.groups) * config.max_blocks_per_seq
    per_row += sum(config.slot_columns)
    return 4 * (config.scheduling.max_num_seqs + 1) * per_row
