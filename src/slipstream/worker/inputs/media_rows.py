"""Media of a request in a step: which of their tokens it computes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.kernels.positions import sectioned_positions
from slipstream.messages.media import MediaSpan
from slipstream.messages.steps import ScheduledRequest

if TYPE_CHECKING:
    from slipstream.worker.inputs.rows import LongArray, Row


def turned_positions(media: Sequence[MediaSpan]) -> tuple[LongArray, int]:
    """(three positions [3, n] of the tokens up to the end of the last span, shift of the positions of later text)."""
    end = media[-1].end
    places = sectioned_positions(end, [(x.offset, x.rows, x.columns) for x in media])
    return places, int(places.max()) + 1 - end


def media_parts(row: Row, share: ScheduledRequest) -> list[tuple[MediaSpan, int, int]]:
    """Spans with placeholders in a step, as (span, first, last + 1) of the span's tokens."""
    begin, end = share.num_computed_tokens, share.num_computed_tokens + share.num_tokens
    return [
        (span, max(begin - span.offset, 0), min(end, span.end) - span.offset)
        for span in row.media
        if span.offset < end and begin < span.end
    ]


def needs_media(row: Row, share: ScheduledRequest) -> bool:
    """Whether the request has placeholders, three positions or attention to later tokens in this step."""
    if not row.media:
        return False
    last = row.media[-1]
    if share.num_computed_tokens >= max(last.end, last.joined):
        return False
    return row.places is not None or last.joined > 0 or bool(media_parts(row, share))
