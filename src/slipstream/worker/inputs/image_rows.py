"""Images of a request in a step: which of them it computes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.kernels.positions import sectioned_positions
from slipstream.messages.media import ImageSpan
from slipstream.messages.steps import ScheduledRequest

if TYPE_CHECKING:
    from slipstream.worker.inputs.rows import LongArray, Row


def turned_positions(images: Sequence[ImageSpan]) -> tuple[LongArray, int]:
    """Three positions [3, n] of tokens up to the end of the last image, and the shift of the text after them."""
    end = images[-1].end
    places = sectioned_positions(end, [(x.offset, x.rows, x.columns) for x in images])
    return places, int(places.max()) + 1 - end


def image_parts(row: Row, share: ScheduledRequest) -> list[tuple[ImageSpan, int, int]]:
    """Images with placeholders in a step, as (image, first, last + 1) of the image's tokens."""
    begin, end = share.num_computed_tokens, share.num_computed_tokens + share.num_tokens
    return [
        (image, max(begin - image.offset, 0), min(end, image.end) - image.offset)
        for image in row.images
        if image.offset < end and begin < image.end
    ]


def needs_images(row: Row, share: ScheduledRequest) -> bool:
    """True if a step's part of the request has placeholders, tokens with three positions, or tokens that see later ones."""
    if not row.images or share.num_computed_tokens >= max(
        row.images[-1].end, row.images[-1].joined
    ):
        return False
    return row.places is not None or row.images[-1].joined > 0 or bool(image_parts(row, share))
