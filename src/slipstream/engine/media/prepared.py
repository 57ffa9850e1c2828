"""Prepared images and sounds of a prompt: pieces with hash keys, the prompt text that represents
them, and their positions. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.engine.threads.fair_threads import FairThreads
from slipstream.errors import RequestError
from slipstream.messages.media import MediaSpan
from slipstream.spec.media.medium import MediaSpec

if TYPE_CHECKING:
    from slipstream.engine.text.tokenizer import Tokenizer
    from slipstream.spec.model import ModelSpec

KEY_BYTES = 16
PLURAL = {"image": "pictures", "audio": "sounds"}


@dataclass(frozen=True, slots=True)
class MediaPiece:
    """A sound, an image, or a tile of one, as the encoder's input: a `MediaSpan` without its position."""

    rows: int
    columns: int
    key: bytes
    height: int
    width: int
    data: bytes = field(repr=False)
    gap: int = 0
    inner: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    def at(self, offset: int) -> MediaSpan:
        return MediaSpan(
            offset=offset,
            rows=self.rows,
            columns=self.columns,
            key=self.key,
            height=self.height,
            width=self.width,
            data=self.data,
            gap=self.gap,
            inner=self.inner,
        )


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """The pieces of an image or sound in order, and the prompt text that represents them. `among`:
    the version for prompts with several media, if it differs."""

    text: str
    pieces: tuple[MediaPiece, ...]
    among: PreparedMedia | None = None


class MediaProcessor:
    """Prepares images or sounds for one model. `most`: maximum number in a prompt."""

    spec: MediaSpec
    most: int
    _pool: FairThreads

    def close(self) -> None:
        self._pool.close()

    def submit(self, source: Any, detail: str = "auto") -> Future[PreparedMedia]:
        """Prepares one image or sound in the thread pool. `detail` applies to images."""
        raise NotImplementedError

    def prepare_all(self, sources: Sequence[Any]) -> list[PreparedMedia]:
        """Prepares all sources in the pool; those already prepared are returned unchanged.
        RequestError for the first invalid one."""
        begun = [x if isinstance(x, PreparedMedia) else self.submit(x) for x in sources]
        try:
            return [x if isinstance(x, PreparedMedia) else x.result() for x in begun]
        finally:
            for x in begun:
                if isinstance(x, Future):
                    x.cancel()


def _of_prompt(media: Sequence[PreparedMedia]) -> Sequence[PreparedMedia]:
    """The media of one prompt; if it has several, in their `among` version."""
    return media if len(media) < 2 else [x if x.among is None else x.among for x in media]


def with_media(text: str, media: Sequence[PreparedMedia], spec: MediaSpec) -> str:
    """The prompt with each placeholder replaced by the text of its image or sound. RequestError if
    the numbers differ."""
    parts = text.split(spec.prompt.placeholder)
    if len(parts) - 1 != len(media):
        raise RequestError(
            f"the prompt has {len(parts) - 1} places ({spec.prompt.placeholder}), and there are {len(media)} to put there",
            field=spec.medium,
        )
    if media:
        parts[-1] = spec.prompt.ended(parts[-1])
    own = zip(_of_prompt(media), parts[1:], strict=True)
    return parts[0] + "".join(x.text + part for x, part in own)


def joined(
    tokens: Sequence[int], spans: Sequence[MediaSpan], cache_salt: str, spec: ModelSpec
) -> tuple[tuple[MediaSpan, ...], str]:
    """The pictures of a prompt whose tokens all attend to each other, and the salt of its cached blocks: no other prompt has
    their keys and values. RequestError if it is longer than the decoder's window."""
    window = min(getattr(a, "window", None) or len(tokens) for a in spec.attentions)
    if len(tokens) > window:
        why = (
            f"the prompt's {len(tokens)} tokens see each other, and the model's window has {window}"
        )
        raise RequestError(f"{why}; send fewer pictures or words", field="prompt")
    said = (np.array(tokens, np.uint32).tobytes(), *(x.key for x in spans))
    given = b"".join((*said, cache_salt.encode()))
    salt = blake2b(given, digest_size=16, person=b"whole prompt").hexdigest()
    whole = tuple(dataclasses.replace(x, joined=len(tokens)) for x in spans)
    return whole, salt


def expanded(
    tokens: Sequence[int],
    media: Sequence[PreparedMedia],
    spec: MediaSpec,
    tokenizer: Tokenizer | None,
) -> tuple[int, ...]:
    """A prompt's tokens with placeholders for all of its media. `tokens` may already have them all, or one
    for each medium (for models with another chat placeholder, see `PromptFormat.placeholder`)."""
    count, media = tokens.count(spec.token_id), _of_prompt(media)
    if count == sum(piece.num_tokens for x in media for piece in x.pieces):
        return tuple(tokens)
    if tokenizer is None:
        raise RequestError(
            "without a tokenizer a prompt must have all placeholders of its pictures or sounds",
            field="prompt_token_ids",
        )
    mark = tokenizer.encode(spec.prompt.placeholder, add_special_tokens=False)
    if len(mark) != 1 or tokens.count(mark[0]) != len(media):
        raise RequestError(
            f"the prompt must have {spec.prompt.placeholder} once for each of {len(media)}, or all of their "
            "placeholders",
            field="prompt_token_ids",
        )
    found, left = list[int](), iter(media)
    for token in tokens:
        found += (
            tokenizer.encode(next(left).text, add_special_tokens=False)
            if token == mark[0]
            else [token]
        )
    return tuple(found)


def _salted(key: bytes, cache_salt: str) -> bytes:
    return blake2b(key + cache_salt.encode(), digest_size=len(key), person=b"cache_salt").digest()


def _is_whole(own: Sequence[int], piece: MediaPiece, num_tokens: int) -> bool:
    """Whether a piece's placeholders are contiguous, with text after each row if the model has it,
    in a prompt of `num_tokens`."""
    width, first = piece.columns + piece.gap, own[0]
    if first + piece.rows * width > num_tokens:
        return False
    if not piece.gap:
        return own[-1] - first == piece.num_tokens - 1
    at = (divmod(i, piece.columns) for i in range(piece.num_tokens))
    return all(x == first + row * width + column for x, (row, column) in zip(own, at, strict=True))


def placed(
    tokens: Sequence[int], media: Sequence[PreparedMedia], spec: MediaSpec, cache_salt: str = ""
) -> tuple[MediaSpan, ...]:
    """Spans of the pieces in a prompt that has all placeholders. RequestError if placeholders and
    pieces don't match. With a salt, the worker shares cached embeddings only among requests with
    the same salt."""
    places = [i for i, token in enumerate(tokens) if token == spec.token_id]
    spans, start = list[MediaSpan](), 0
    for piece in (piece for x in _of_prompt(media) for piece in x.pieces):
        own = places[start : start + piece.num_tokens]
        if len(own) < piece.num_tokens or not _is_whole(own, piece, len(tokens)):
            raise RequestError(
                f"the prompt's placeholders are not those of its {PLURAL[spec.medium]}",
                field=spec.medium,
            )
        span = piece.at(own[0])
        if cache_salt:
            span = dataclasses.replace(span, key=_salted(span.key, cache_salt))
        spans.append(span)
        start += piece.num_tokens
    if start != len(places):
        raise RequestError(
            f"the prompt has {len(places) - start} placeholders too many", field=spec.medium
        )
    return tuple(spans)
