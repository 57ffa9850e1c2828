"""Images and audio in the worker: a cache of their embeddings, and the op set of steps with media.

1. `MediaEncoder` returns a span's embeddings from its cache or from the encoder. The cache
   is bounded. A span whose placeholders are in two chunks of a prompt is encoded once, unless the
   cache has dropped it in between.
2. `step_media` finds the placeholders in a step.
3. `MediaOps` is the op set of such a step. It adds rotations by three positions (M-RoPE) and
   attention among an image's tokens.
4. `stacked` adds DeepStack's outputs in the decoder's first layers.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.context_ops import own_length
from slipstream.kernels.layouts import AttentionParams, QKVLayout
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.messages.media import MediaSpan
from slipstream.messages.steps import StepPlan
from slipstream.model.media import MediaTower
from slipstream.spec.media.medium import MediaSpec
from slipstream.worker.inputs.media_rows import media_parts, needs_media
from slipstream.worker.inputs.rows import LongArray, RowTable
from slipstream.worker.inputs.uploads import upload

if TYPE_CHECKING:
    from slipstream.kernels.ops import OpSet
    from slipstream.model.decoder import Decoder
    from slipstream.model.layers.layer import Layer
    from slipstream.platform.collectives import RankGroup


class MediaEncoder:
    """Encoder with a least-recently-used cache of at most `max_bytes`."""

    def __init__(self, tower: MediaTower, max_bytes: int) -> None:
        self.tower, self.max_bytes = tower, max_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()

    @property
    def spec(self) -> MediaSpec:
        return self.tower.spec

    def embeddings(self, media: StepMedia) -> list[Tensor]:
        """The embeddings of each part's span, from the cache or computed by the tower."""
        spans = [span for span, _, _ in media.parts]
        found = {span.key: self._kept[span.key] for span in spans if span.key in self._kept}
        if missing := list({span.key: span for span in spans if span.key not in found}.values()):
            sizes = [(span.rows, span.columns, *span.inner) for span in missing]
            made = self.tower([self._numbers(span) for span in missing], sizes)
            # The clone owns its memory. A slice would keep the memory of the whole batch alive.
            found |= {span.key: x.clone() for span, x in zip(missing, made, strict=True)}
        for key in found:
            self._keep(key, found[key])
        return [found[span.key] for span in spans]

    def probe(self) -> int:
        """Encode an input so that its memory can be measured.

        Returns how many times that memory a pass may take.
        """
        return self.tower.probe()

    def _numbers(self, span: MediaSpan) -> Tensor:
        kind, shape = self.spec.numbers(span.height, span.width)
        raw = np.frombuffer(span.data, kind).reshape(shape)
        return upload(raw.copy(), self.tower.device)

    def _keep(self, key: bytes, value: Tensor) -> None:
        if key not in self._kept:
            self._kept[key] = value
            self.num_bytes += value.numel() * value.element_size()
        self._kept.move_to_end(key)
        while self.num_bytes > self.max_bytes:
            _, gone = self._kept.popitem(last=False)
            self.num_bytes -= gone.numel() * gone.element_size()


class Together(NamedTuple):
    """Tokens of a step, of an image or a prompt, that attend to each other and to all earlier tokens."""

    sequence: int
    first: int  # index among the step's tokens
    size: int
    end: int  # position after the last of them


@dataclass(frozen=True, slots=True)
class StepMedia:
    """Placeholders among a step's T tokens."""

    # (span, first, last + 1) of the spans that are in the step
    parts: list[tuple[MediaSpan, int, int]]
    tokens: LongArray  # [N]: indices of the placeholders among the step's tokens, part by part
    groups: list[Together]
    # for three positions per token: (index of a token in the step, positions [3, n] from it on)
    places: tuple[tuple[int, LongArray], ...]


def step_media(plan: StepPlan, table: RowTable) -> StepMedia:
    parts = list[tuple[MediaSpan, int, int]]()
    groups = list[Together]()
    places = list[tuple[int, LongArray]]()
    tokens = [np.empty(0, np.int64)]
    start = 0
    for i, s in enumerate(plan.scheduled):
        row = table.rows[s.request_id]
        if needs_media(row, s):
            if whole := row.media[-1].joined:
                count = min(s.num_tokens, whole - s.num_computed_tokens)
                groups.append(Together(i, start, count, s.num_computed_tokens + count))
            for span, first, end in media_parts(row, s):
                at = start + span.offset + first - s.num_computed_tokens
                parts.append((span, first, end))
                if not span.joined:
                    groups.append(Together(i, at, end - first, span.offset + end))
                index = np.arange(first, end)
                if span.gap:  # excludes the text after each row
                    index = index[index % (span.columns + span.gap) < span.columns]
                tokens.append(at - first + index)
            if row.places is not None:
                places.append(
                    (
                        start,
                        row.places[:, s.num_computed_tokens : s.num_computed_tokens + s.num_tokens],
                    )
                )
        start += s.num_tokens
    return StepMedia(parts, np.concatenate(tokens), groups, tuple(places))


class MediaOps:
    """The op set `ops` for a step with media. `meta` is the step's metadata."""

    def __init__(
        self,
        ops: OpSet,
        media: StepMedia,
        meta: AttentionMetadata,
        spec: MediaSpec,
        axes: tuple[int, ...] | None,
    ) -> None:
        """`axes` are the decoder's `RopeSpec.axes`."""
        self._ops, self._media, self._axes = ops, media, axes
        self._among = spec.bidirectional if media.groups else None
        self._positions: Tensor | None = None  # int64 [3, T]
        if media.places:
            positions = meta.positions.expand(3, -1).clone()
            for start, own in media.places:
                positions[:, start : start + own.shape[1]] = upload(
                    np.ascontiguousarray(own), positions.device
                )
            self._positions = positions
            self._each = torch.arange(positions.shape[1], device=positions.device)
        self._tables: dict[int, Tensor] = {}
        self._turned: dict[int, AttentionMetadata] = {}
        self._among_spans: dict[int, AttentionMetadata] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def rope_and_cache(
        self, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout
    ) -> Tensor:
        if self._positions is None or heads.cos_sin is None or self._axes is None:
            return self._ops.rope_and_cache(qkv, kv, meta, heads)
        # Each token has its own row in a table built for the step.
        table = self._tables.get(id(heads.cos_sin))
        if table is None:
            table = self._tables[id(heads.cos_sin)] = sectioned(
                heads.cos_sin, self._positions, self._axes
            )
        if id(meta) not in self._turned:
            self._turned[id(meta)] = dataclasses.replace(meta, positions=self._each)
        return self._ops.rope_and_cache(
            qkv, kv, self._turned[id(meta)], dataclasses.replace(heads, cos_sin=table)
        )

    def attention(
        self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        out = self._ops.attention(q, kv, meta, params)
        if self._among is None or (self._among == "windowed" and params.window is None):
            return out
        # Compute their tokens again, as non-causal sequences that end with them.
        index = upload(self._joined, q.device)
        own = self._among_spans.get(id(meta))
        if own is None:
            own = self._among_spans[id(meta)] = self._span_meta(meta, index)
        seen = self._ops.attention(q[index], kv, own, dataclasses.replace(params, causal=False))
        return out.index_copy(0, index, seen)

    @property
    def _joined(self) -> LongArray:
        """Indices, among the step's, of the tokens of all groups."""
        return np.concatenate([np.arange(x.first, x.first + x.size) for x in self._media.groups])

    def own_keys(
        self, meta: AttentionMetadata, block_size: int, group: RankGroup, window: int | None = None
    ) -> AttentionMetadata:
        own = self._ops.own_keys(meta, block_size, group, window)
        if self._among is None or (self._among == "windowed" and window is None):
            return own
        return own.once("media", lambda: self._to_ends(own, block_size, group))

    def _to_ends(
        self, own: AttentionMetadata, block_size: int, group: RankGroup
    ) -> AttentionMetadata:
        """Attention on a rank's keys, where a group's tokens attend to all keys up to the group's
        end in the step."""
        ends = [np.full(x.size, x.end, np.int32) for x in self._media.groups]
        each = upload(np.concatenate(ends), own.positions.device)
        assert own.limits is not None
        index = upload(self._joined, each.device)
        seen = own_length(each, block_size, group.rank, group.size)
        return dataclasses.replace(own, limits=own.limits.index_copy(0, index, seen))

    def _span_meta(self, meta: AttentionMetadata, index: Tensor) -> AttentionMetadata:
        sequences_, _, counts, ends = zip(*self._media.groups, strict=True)
        sequences = upload(np.array(sequences_, np.int64), index.device)
        return AttentionMetadata(
            query_start_loc=upload(np.cumsum([0, *counts]).astype(np.int32), index.device),
            seq_lens=upload(np.array(ends, np.int32), index.device),
            block_table=meta.block_table[sequences],
            positions=meta.positions[index],
            slot_mapping=meta.slot_mapping[index],
            num_decodes=0,
            max_query_len=max(counts),
            max_seq_len=max(ends),
        )


@dataclass(frozen=True, slots=True)
class StackedLayer:
    """A decoder layer after which `rows` [N, E] are added to the states of `tokens` [N]
    (`DeepStackSpec`)."""

    layer: Layer
    tokens: Tensor
    rows: Tensor

    def __call__(
        self,
        ops: OpSet,
        pending: Any,
        residual: Tensor | None,
        kv: LayerKV,
        meta: AttentionMetadata,
    ) -> tuple[Any, Tensor]:
        pending, residual = self.layer(ops, pending, residual, kv, meta)
        assert residual is not None
        return pending, residual.index_add(0, self.tokens, self.rows)


def stacked(decoder: Decoder, h: Tensor, tokens: LongArray, rows: Tensor) -> Decoder:
    """A view of the decoder whose first layers add `rows` [N, n · E] (one layer's after another's)
    to the states of the step's `tokens`. `h`: the first layer's input."""
    if (ranks := decoder.sharing(h)) is not None:  # each rank has some of the tokens
        each = -(-len(h) // ranks.size)
        tokens = tokens - ranks.rank * each
        own = np.flatnonzero((tokens >= 0) & (tokens < each))
        tokens, rows = tokens[own], rows[upload(own, rows.device)]
    index, parts = upload(tokens, h.device), rows.split(h.shape[1], dim=1)
    added = [StackedLayer(x, index, y) for x, y in zip(decoder.layers, parts, strict=False)]
    return decoder.with_(layers=cast("list[Layer]", [*added, *decoder.layers[len(parts) :]]))


def sectioned(cos_sin: Tensor, positions: Tensor, axes: Sequence[int]) -> Tensor:
    """Rotations [T, rotary_dim] of tokens with three `positions` [3, T].

    `cos_sin` [P, rotary_dim] is the table of one position. `axes` names each frequency's position.
    """
    columns = torch.arange(len(axes), device=cos_sin.device)
    rows = positions[upload(np.array(axes, np.int64), positions.device)]  # [rotary_dim / 2, T]
    return torch.cat([half[rows.T, columns] for half in cos_sin.chunk(2, dim=1)], dim=1)
