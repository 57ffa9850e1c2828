"""The worker's permanent rows, and the inputs of one step gathered from them. Whole texts, for encoders, need no rows.

Each request has a row for as long as it runs. A row's tokens and block tables live on the device. A step only says which rows
compute which positions, so that a token sampled in step N feeds step N + 1 without ever visiting the host.

1. Row `capacity` is the null row (token 0, block 0), which padding reads.
2. The host writes a row's tokens once, when it is made. Every later token is written by the sampler on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.ops import OpSet
from slipstream.spec.model import CacheGroup
from slipstream.types import FROM_MODEL, NewRequest, SamplingParams, ScheduledRequest, StepPlan, TextsPlan

LongArray = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.int32]


Want: TypeAlias = Literal["vector", "grammar", "logprobs", "draw", "penalties", "bias", "allowed", "top_k", "top_p", "min_p"]
"""What a request can ask for beside its most likely tokens."""

NEEDS_LOGITS: tuple[Want, ...] = ("grammar", "logprobs", "draw", "penalties", "bias", "allowed")
"""What takes more of the logits than where they are largest."""


@dataclass(slots=True)
class Row:
    """What the host knows of one running request."""

    index: int
    sampling: SamplingParams
    num_prompt_tokens: int
    seed: int
    forbidden_early: tuple[int, ...]  # tokens that may not end it before min_tokens
    num_encoder_tokens: int = 0
    num_drafted: int = 0  # tokens that the drafter has computed; those of wrong drafts are computed again
    allowed: LongArray | None = field(init=False)  # the only tokens that can be drawn, each once

    def __post_init__(self) -> None:
        allowed = self.sampling.allowed_token_ids
        self.allowed = None if allowed is None else np.unique(np.array(allowed, np.int64))

    def wants(self) -> Iterator[Want]:
        s = self.sampling
        asked: dict[Want, object] = {
            "grammar": s.structured_outputs,
            "logprobs": s.logprobs is not None,
            "draw": s.temperature > 0.0,
            "penalties": s.has_penalties,
            "bias": s.logit_bias or self.forbidden_early or s.bad_words_token_ids,
            "allowed": self.allowed is not None,
            "top_k": s.top_k,
            "top_p": s.top_p < 1.0,
            "min_p": s.min_p > 0.0,
        }
        return (want for want, value in asked.items() if value)


class RowTable:
    """Rows for up to `capacity` requests of up to `max_model_len` tokens, each with a block table in every one of `groups`."""

    def __init__(
        self,
        capacity: int,
        max_model_len: int,
        block_size: int,
        ops: OpSet,
        device: torch.device,
        seed: int,
        *,
        groups: Sequence[CacheGroup] = (CacheGroup(kind="full"),),
    ) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.ops = ops
        self.device = device
        self.cross = next((g for g, group in enumerate(groups) if group.kind == "cross"), None)
        self.num_own = len(groups) - (self.cross is not None)  # groups of the requests' own tokens, which come first
        max_blocks = -(-max_model_len // block_size)
        # One column more than the context: the last sampled token has a place though it is never computed.
        self.tokens = torch.zeros(capacity + 1, max_model_len + 1, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(len(groups), capacity + 1, max_blocks, dtype=torch.int32, device=device)
        self.encoder_lens = torch.zeros(capacity + 1, dtype=torch.int32, device=device)
        self.rows: dict[str, Row] = {}
        # Of each row [C + 1]: temperature, top_p, min_p and the penalties; top_k, tokens of its prompt, seed.
        self.sampling_floats = torch.zeros(6, capacity + 1, dtype=torch.float32, device=device)
        self.sampling_ints = torch.zeros(3, capacity + 1, dtype=torch.int64, device=device)
        self.wanting: dict[Want, set[str]] = {want: set() for want in get_args(Want)}
        self._free = list(range(capacity - 1, -1, -1))
        self._seeds = np.random.default_rng(seed)

    def forget(self) -> None:
        """Drop every row."""
        self.rows.clear()
        for wanting in self.wanting.values():
            wanting.clear()
        self._free = list(range(self.capacity - 1, -1, -1))

    def apply(self, plan: StepPlan) -> None:
        """Drop released rows, make new ones, update block tables: two small uploads whatever the number of rows."""
        for request_id in plan.released:
            for wanting in self.wanting.values():
                wanting.discard(request_id)
            row = self.rows.pop(request_id, None)
            if row is not None:
                self._free.append(row.index)
        if plan.new:
            self._add(plan.new)
        self._update(plan.scheduled)
        if drafted := [s for s in plan.scheduled if s.drafts and FROM_MODEL not in s.drafts]:
            self._put_drafts(drafted)

    def _add(self, new: Sequence[NewRequest]) -> None:
        width = self.tokens.shape[1]
        where: list[npt.NDArray[np.int64]] = []
        for request in new:
            sampling = request.sampling
            seed = sampling.seed if sampling.seed is not None else int(self._seeds.integers(2**62))
            early = (*request.eos_token_ids, *sampling.stop_token_ids) if sampling.min_tokens else ()
            row = Row(self._free.pop(), sampling, request.num_prompt_tokens, seed, early, request.num_encoder_tokens)
            self.rows[request.request_id] = row
            for want in (*row.wants(), *(("vector",) if request.pooled else ())):
                self.wanting[want].add(request.request_id)
            start = row.index * width
            where.append(np.arange(start, start + len(request.token_ids), dtype=np.int64))
        tokens = np.concatenate([np.asarray(s.token_ids, dtype=np.int32) for s in new])
        self.tokens.view(-1).index_copy_(0, self._upload(np.concatenate(where)), self._upload(tokens))
        self._put_sampling([self.rows[s.request_id] for s in new])
        if self.cross is not None:
            found = [(self.rows[s.request_id].index, s.num_encoder_tokens) for s in new]
            indices, lens = self._upload(np.array(found, np.int32).T.copy()).unbind(0)
            self.encoder_lens[indices.long()] = lens

    def _put_sampling(self, rows: Sequence[Row]) -> None:
        """How they sample, once and for all."""
        where = self._upload(np.array([row.index for row in rows], np.int64))
        floats = [
            (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            for p in (row.sampling for row in rows)
        ]
        ints = [(row.sampling.top_k, row.num_prompt_tokens, row.seed) for row in rows]
        self.sampling_floats.index_copy_(1, where, upload(np.array(floats, np.float32).T.copy(), self.device))
        self.sampling_ints.index_copy_(1, where, self._upload(np.array(ints, np.int64).T.copy()))

    def is_greedy(self, request_ids: Sequence[str]) -> bool:
        """Nothing is wanted of their logits but where they are largest."""
        return not any(self.wanted(want, request_ids) for want in NEEDS_LOGITS)

    def wanted(self, want: Want, request_ids: Sequence[str]) -> bool:
        """One of the requests asks for it."""
        wanting = self.wanting[want]
        return bool(wanting) and not wanting.isdisjoint(request_ids)

    def _update(self, scheduled: Sequence[ScheduledRequest]) -> None:
        _, num_rows, width = self.block_tables.shape
        where: list[int] = []
        blocks: list[int] = []
        for s in scheduled:
            for update in s.table_updates:
                first = (update.group * num_rows + self.rows[s.request_id].index) * width + update.index
                where.extend(range(first, first + len(update.block_ids)))
                blocks.extend(update.block_ids)
        if where:
            self.block_tables.view(-1).index_copy_(
                0, self._upload(np.asarray(where, dtype=np.int64)), self._upload(np.asarray(blocks, dtype=np.int32))
            )

    def _put_drafts(self, drafted: Sequence[ScheduledRequest]) -> None:
        """Guessed tokens to their places, the last ones of their requests' shares."""
        width, where = self.tokens.shape[1], list[int]()
        for s in drafted:
            end = self.rows[s.request_id].index * width + s.num_computed_tokens + s.num_tokens
            where.extend(range(end - len(s.drafts), end))
        tokens = np.array([token for s in drafted for token in s.drafts], np.int32)
        self.tokens.view(-1).index_copy_(0, self._upload(np.array(where, np.int64)), self._upload(tokens))

    def write(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """The sampled tokens [N] to their places: what the next step reads."""
        if self.device.type == "cpu":
            self.tokens.numpy()[rows.numpy(), positions.numpy()] = tokens.numpy()
        else:
            self.ops.write_tokens(self.tokens, rows, positions, tokens)

    def _upload(self, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> Tensor:
        return upload(array, self.device)


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A host array on the device; on a GPU through pinned memory, so that the copy does not wait for the stream.

    torch's caching host allocator keeps the pinned memory until the copy that reads it is done.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The requests of a step that sample, in plan order, and where their N tokens go: of each as many as its `num_sampled`, in
    the order of their positions."""

    requests: tuple[ScheduledRequest, ...]
    rows: Tensor  # int32 or int64 [N]
    positions: Tensor  # the same

    @property
    def names(self) -> list[str]:
        """Of each request."""
        return [s.request_id for s in self.requests]

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of each of the N tokens."""
        return tuple([s.request_id for s in self.requests for _ in range(s.num_sampled)])

    @property
    def num_tokens(self) -> tuple[int, ...] | None:
        """Of each request; None: one each."""
        counts = tuple([s.num_sampled for s in self.requests])
        return None if len(counts) == len(self.rows) else counts


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredInputs:
    """One step's inputs, on the device."""

    token_ids: Tensor  # int32 [T]
    meta: AttentionMetadata
    sample_index: Tensor | None  # int64 [N]: the tokens whose logits are sampled; None: all of them
    sampled: SampledRows | None  # None: the tokens belong to no plan


def laid_out(rows: LongArray, computed: LongArray, lengths: LongArray) -> tuple[LongArray, LongArray, LongArray]:
    """Of requests in `rows` [S], of which `lengths` tokens follow `computed` ones: each token's row and position [T], and
    where the requests begin [S + 1]."""
    starts = np.concatenate((np.zeros(1, np.int64), lengths.cumsum()))
    request_of = np.arange(len(rows)).repeat(lengths)
    return rows[request_of], np.arange(starts[-1]) + (computed - starts[:-1])[request_of], starts


def gather_pairs(table: RowTable, shares: Sequence[ScheduledRequest]) -> GatheredInputs:
    """The inputs of a draft head for `shares` of requests: each token, at the place of the one before it, whose state stands
    there (`worker/draft_head.py`). What is sampled follows the token, as always."""
    before = tuple([s._replace(num_computed_tokens=s.num_computed_tokens - 1) for s in shares])
    given = gather(table, StepPlan(0, before), ahead=1)
    assert given.sampled is not None
    requests = tuple([s for s in shares if s.num_sampled])
    return dataclasses.replace(given, sampled=dataclasses.replace(given.sampled, requests=requests))


def gather(table: RowTable, plan: StepPlan, *, ahead: int = 0) -> GatheredInputs:
    """The inputs of `plan`, whose rows `table` already holds. The tokens themselves are those so many places `ahead`.

    On a GPU this is one upload, then lookups on the device. On a CPU numpy looks up: its calls cost a tenth of torch's, and at
    one request a step has only some 2 ms.
    """
    scheduled = plan.scheduled
    num_seqs = len(scheduled)
    rows = np.array([table.rows[s.request_id].index for s in scheduled], np.int64)
    computed = np.array([s.num_computed_tokens for s in scheduled], np.int64)
    num_new = [s.num_tokens for s in scheduled]
    max_query_len = max(num_new)
    lengths = np.array(num_new, np.int64)
    seq_lens = computed + lengths
    requests = tuple([s for s in scheduled if s.num_sampled])
    if max_query_len == 1:
        token_rows, positions, num_decodes, from_start = rows, computed, num_seqs, False
        starts = np.arange(num_seqs + 1)
    else:
        token_rows, positions, starts = laid_out(rows, computed, lengths)
        num_decodes = int(np.argmax(lengths != 1))
        from_start = not computed[num_decodes:].any()
    index = None
    if max_query_len == 1 and len(requests) == num_seqs:
        sample_rows, sample_positions = rows, seq_lens + ahead
    else:
        counts = np.array([s.num_sampled for s in scheduled], np.int64)
        sample_rows, last, _ = laid_out(rows, seq_lens - counts, counts)
        sample_positions = last + 1 + ahead  # of the token that follows
        if len(last) < len(positions):
            index = laid_out(rows, starts[1:] - counts, counts)[1]
    arrays = [token_rows, positions, starts, seq_lens, rows, sample_rows, sample_positions]
    if index is not None:
        arrays.append(index)
    longest = max([table.rows[s.request_id].num_encoder_tokens for s in scheduled]) if table.cross is not None else 0
    look = _gather_inputs_on_host if table.device.type == "cpu" else _gather_inputs_after_upload
    token_ids, meta, (sample_rows_d, sample_positions_d, *indices) = look(
        table,
        arrays,
        num_decodes=num_decodes,
        max_query_len=max_query_len,
        max_seq_len=max(seq_lens.tolist()),
        from_start=from_start,
        max_encoder_len=longest,
        ahead=ahead,
    )
    return GatheredInputs(
        token_ids=token_ids,
        meta=meta,
        sample_index=indices[0] if indices else None,
        sampled=SampledRows(requests=requests, rows=sample_rows_d, positions=sample_positions_d),
    )


def _gather_inputs_after_upload(
    table: RowTable,
    arrays: list[LongArray],
    *,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
    from_start: bool,
    max_encoder_len: int,
    ahead: int = 0,
) -> tuple[Tensor, AttentionMetadata, list[Tensor]]:
    token_rows, positions, starts, seq_lens, rows, *more = _upload_together(arrays, table.device)
    token_ids, meta = gather_inputs(
        table,
        token_rows=token_rows,
        positions=positions,
        rows=rows,
        query_start_loc=starts,
        seq_lens=seq_lens,
        num_decodes=num_decodes,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        from_start=from_start,
        max_encoder_len=max_encoder_len,
        ahead=ahead,
    )
    return token_ids, meta, [*more[:2], *(t.long() for t in more[2:])]


def _gather_inputs_on_host(
    table: RowTable,
    arrays: list[LongArray],
    *,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
    from_start: bool,
    max_encoder_len: int,
    ahead: int = 0,
) -> tuple[Tensor, AttentionMetadata, list[Tensor]]:
    """`gather_inputs`, by numpy."""
    token_rows, positions, starts, seq_lens, rows, *more = arrays
    tokens, size, own = table.tokens.numpy(), table.block_size, range(table.num_own)
    columns, offsets = positions // size, positions % size
    first, *others = [table.block_tables[g].numpy() for g in own]
    num_blocks = -(-max_seq_len // size)

    def tables(blocks: IntArray) -> tuple[Tensor, Tensor]:
        slots = blocks[token_rows, columns] * np.int64(size) + offsets
        return torch.from_numpy(blocks[rows, :num_blocks]), torch.from_numpy(slots)

    block_table, slot_mapping = tables(first)
    meta = AttentionMetadata(
        query_start_loc=torch.from_numpy(starts.astype(np.int32)),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        block_table=block_table,
        slot_mapping=slot_mapping,
        positions=torch.from_numpy(positions),
        num_decodes=num_decodes,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        from_start=from_start,
    )
    meta = meta.with_groups(
        *(dataclasses.replace(meta, block_table=t, slot_mapping=s) for t, s in map(tables, others)),
        *_of_cross(table, meta, torch.from_numpy(rows), max_encoder_len),
    )
    return torch.from_numpy(tokens[token_rows, positions + ahead]), meta, [torch.from_numpy(a) for a in more]


def gather_inputs(
    table: RowTable,
    *,
    token_rows: Tensor,
    positions: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
    from_start: bool = False,
    max_encoder_len: int = 0,
    ahead: int = 0,
) -> tuple[Tensor, AttentionMetadata]:
    """Tokens, slots and block tables from the rows: device work only, so a graph can capture it."""
    num_blocks, size = -(-max_seq_len // table.block_size), table.block_size
    first = table.block_tables[0]
    ids, positions, slots = table.ops.gather_inputs(table.tokens[:, ahead:], first, token_rows, positions, size)
    meta = AttentionMetadata(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=first[:, :num_blocks].index_select(0, rows),
        positions=positions,
        slot_mapping=slots,
        num_decodes=num_decodes,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        from_start=from_start,
    )
    others = []
    if table.num_own > 1:  # all at once: the number of launches does not grow with the groups
        more = table.block_tables[1 : table.num_own]
        tables = more[:, :, :num_blocks].index_select(1, rows)
        slots_of = more[:, token_rows.long(), positions // size].long() * size + positions % size
        others = [
            dataclasses.replace(meta, block_table=t, slot_mapping=s) for t, s in zip(tables, slots_of, strict=True)
        ]
    return ids, meta.with_groups(*others, *_of_cross(table, meta, rows, max_encoder_len))


def _of_cross(table: RowTable, meta: AttentionMetadata, rows: Tensor, max_encoder_len: int) -> list[AttentionMetadata]:
    """The group of an encoder's keys and values, if there is one (`max_encoder_len` 0: any)."""
    if table.cross is None:
        return []
    return [
        dataclasses.replace(
            meta,
            seq_lens=table.encoder_lens[rows],
            block_table=table.block_tables[table.cross].index_select(0, rows),
            max_seq_len=max_encoder_len or table.tokens.shape[1] - 1,
        )
    ]


def encoder_batch(table: RowTable, plan: StepPlan) -> tuple[Tensor, AttentionMetadata] | None:
    """The texts that a step's new requests bring for an encoder, whole: tokens [T], and where their keys and values go; None
    if there are none. One upload."""
    new = [s for s in plan.new if s.encoder_token_ids]
    if not new:
        return None
    blocks = {s.request_id: u.block_ids for s in plan.scheduled for u in s.table_updates if u.group == table.cross}
    lengths = np.fromiter((len(s.encoder_token_ids) for s in new), np.int32, len(new))
    tables = np.zeros((len(new), max(len(blocks[s.request_id]) for s in new)), np.int32)
    for line, s in zip(tables, new, strict=True):
        line[: len(blocks[s.request_id])] = blocks[s.request_id]
    tokens = np.concatenate([np.asarray(s.encoder_token_ids, dtype=np.int32) for s in new])
    return _whole_texts(tokens, lengths, tables, None, table.block_size, table.device)


def text_batch(plan: TextsPlan, block_size: int, device: torch.device) -> tuple[Tensor, AttentionMetadata]:
    """An encoder's step: tokens [T], and where their keys and values go: blocks 1, 2, … in the texts' order, which every step
    may use, since steps run one after another. One upload."""
    lengths = np.frombuffer(plan.lengths, np.int32)
    num_blocks = -(-lengths // block_size)
    ends = np.cumsum(num_blocks, dtype=np.int32)
    tables = np.minimum((ends - num_blocks)[:, None] + np.arange(1, num_blocks.max() + 1, dtype=np.int32), ends[:, None])
    num_first = np.frombuffer(plan.num_first, np.int32) if plan.num_first else None
    return _whole_texts(np.frombuffer(plan.token_ids, np.int32), lengths, tables, num_first, block_size, device)


def _whole_texts(
    tokens: IntArray, lengths: IntArray, tables: IntArray, num_first: IntArray | None, block_size: int, device: torch.device
) -> tuple[Tensor, AttentionMetadata]:
    """tokens [T] of texts of `lengths` [S]; text i has the blocks tables[i]. Of pairs, the first `num_first` [S] tokens are of
    type 0 and the others of type 1."""
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    text = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    positions = np.arange(len(tokens), dtype=np.int32) - starts[text]
    slots = tables[text, positions // block_size] * np.int32(block_size) + positions % block_size
    parts = [tokens, starts, lengths, tables.reshape(-1), positions, slots, np.repeat(starts[1:], lengths)]
    if num_first is not None:
        parts.append((positions >= num_first[text]).astype(np.int32))
    token_ids, starts_d, lens, table, at, slot, ends, *types = _upload_together(parts, device)
    longest = int(lengths.max())
    meta = AttentionMetadata(
        query_start_loc=starts_d,
        seq_lens=lens,
        block_table=table.view(tables.shape),
        positions=at.long(),
        slot_mapping=slot.long(),
        num_decodes=0,
        max_query_len=longest,
        max_seq_len=longest,
        token_types=types[0].long() if types else None,
        text_ends=ends,
    )
    return token_ids, meta


def _upload_together(parts: Sequence[IntArray | LongArray], device: torch.device) -> list[Tensor]:
    """Host arrays [n] on the device by one copy, as int32. Each begins at a multiple of 16 bytes: Triton compiles a kernel anew
    for pointers that don't."""
    begins = np.cumsum([0, *(-(-len(part) // 4) * 4 for part in parts)]).tolist()
    packed = np.zeros(begins[-1], np.int32)
    for begin, part in zip(begins, parts, strict=False):
        packed[begin : begin + len(part)] = part
    there = upload(packed, device)
    return [there[begin : begin + len(part)] for begin, part in zip(begins, parts, strict=False)]
