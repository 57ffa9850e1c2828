"""Prepares pictures for the engine: decodes them within bounds, scales and cuts them as the model's image processor does, and
hashes them.

    source (bytes, a PIL image, an array) ── opened ──> RGB ── pieces ──> uint8 pixels with their key, and the text that
                                                                            stands for the picture in a prompt

Pillow and NumPy alone. Pictures are prepared in a pool of threads: decoding and scaling release Python's lock. Pixels stay
bytes until the worker has them; it rescales and normalises them, as `ImageProcessing` says.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
import logging
import os
import re
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args
from urllib.parse import unquote_to_bytes

import numpy as np
import numpy.typing as npt

from slipstream.errors import RequestError
from slipstream.spec.vision import (
    MAX_RATIO,
    FixedSize,
    ImageProcessing,
    PixelRange,
    TileSizes,
    VisionSpec,
    scaled_for_tiles,
    whole_tiles,
    within_pixels,
)
from slipstream.types import ImageSpan

if TYPE_CHECKING:
    from PIL.Image import Image

    from slipstream.engine.tokenizer import Tokenizer

_logger = logging.getLogger("slipstream.engine")
_NO_PILLOW = (
    "pictures are read by Pillow, which is not installed here: pip install 'slipstream[vision]'"
)

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_FILE_BYTES = 32 * 2**20
MAX_PIXELS = 64 * 2**20
"""Of a picture before it is scaled: 192 MiB as RGB. Phones take 50 million."""

KEY_BYTES = 16
LOW_DETAIL_PIXELS = 512 * 512
Pixels: TypeAlias = npt.NDArray[np.uint8]
Detail: TypeAlias = Literal["auto", "low", "high"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A picture, or a tile of one, as the encoder reads it: `ImageSpan` without its place."""

    rows: int
    columns: int
    key: bytes
    height: int
    width: int
    pixels: bytes = field(repr=False)

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    def at(self, offset: int) -> ImageSpan:
        return ImageSpan(
            offset=offset,
            rows=self.rows,
            columns=self.columns,
            key=self.key,
            height=self.height,
            width=self.width,
            pixels=self.pixels,
        )


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """A picture's pieces in their order, and the text that stands for them in a prompt."""

    text: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class DetailedPicture:
    """A picture that is not prepared yet, with OpenAI's `detail`."""

    source: Any
    detail: str


class PictureProcessor:
    """For the pictures of a model. Without Pillow text is served, a warning says so, and pictures are refused."""

    def __init__(
        self,
        vision: VisionSpec,
        processing: ImageProcessing,
        most: int,
        *,
        num_threads: int | None = None,
    ) -> None:
        self._has_pillow = find_spec("PIL") is not None
        if not self._has_pillow:
            _logger.warning("%s; until then only text is served", _NO_PILLOW)
        self.vision, self.processing, self.most = vision, processing, most
        count = num_threads or min(8, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="pictures")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def submit(self, source: Any, detail: str = "auto") -> Future[PreparedPicture]:
        return self._pool.submit(self.prepare, source, detail)

    def prepare_all(self, sources: Sequence[Any]) -> list[PreparedPicture]:
        """In the pool, but for those that are prepared already. RequestError (field "image") for the first that can't be."""
        begun = [x if isinstance(x, PreparedPicture) else self.submit(x) for x in sources]
        try:
            return [x if isinstance(x, PreparedPicture) else x.result() for x in begun]
        finally:
            for x in begun:
                if isinstance(x, Future):
                    x.cancel()

    def prepare(self, source: Any, detail: str = "auto") -> PreparedPicture:
        """A picture's pieces. RequestError says what is wrong with it."""
        if isinstance(source, DetailedPicture):
            source, detail = source.source, source.detail
        if not self._has_pillow:
            raise RequestError(_NO_PILLOW, field="image")
        if detail not in get_args(Detail):
            raise RequestError(f"detail must be auto, low or high, got {detail!r}", field="detail")
        image = opened(source)
        p, vision = self.processing, self.vision
        rows = columns = 0
        match p.sizes:
            case TileSizes() as sizes:
                tiles, rows, columns = self._tiles(
                    image, sizes, splits=sizes.splits and detail != "low"
                )
            case FixedSize(height=height, width=width):
                if detail == "low":
                    message = "this model reads every picture in one size; leave detail out"
                    raise RequestError(message, field="detail")
                tiles = [self._scaled(image, height, width)]
            case PixelRange() as sizes:
                if max(image.size) > MAX_RATIO * min(image.size):
                    raise RequestError(
                        f"one side of the picture is over {MAX_RATIO} times the other",
                        field="image",
                    )
                if detail == "low":
                    most = max(sizes.factor**2, min(sizes.max_pixels, LOW_DETAIL_PIXELS))
                    least = min(sizes.min_pixels, most)
                    sizes = PixelRange(factor=sizes.factor, min_pixels=least, max_pixels=most)
                tiles = [self._scaled(image, *within_pixels(image.height, image.width, sizes))]
        pieces = tuple(self._piece(tile) for tile in tiles)
        return PreparedPicture(vision.prompt.text(pieces[0].num_tokens, rows, columns), pieces)

    def _tiles(
        self, image: Image, sizes: TileSizes, *, splits: bool
    ) -> tuple[list[Image], int, int]:
        """The tiles row by row with the whole picture behind them, and the numbers of rows and columns: 0 if it is one tile."""
        tile = sizes.tile
        image = self._scaled(image, *scaled_for_tiles(image.height, image.width, sizes.longest))
        if not splits:
            return [self._scaled(image, tile, tile)], 0, 0
        height, width = whole_tiles(image.height, image.width, tile)
        image = self._scaled(image, height, width)
        if height <= tile and width <= tile:
            return [image], 0, 0
        boxes = [
            (x, y, x + tile, y + tile)
            for y in range(0, height, tile)
            for x in range(0, width, tile)
        ]
        return (
            [*map(image.crop, boxes), self._scaled(image, tile, tile)],
            height // tile,
            width // tile,
        )

    def _scaled(self, image: Image, height: int, width: int) -> Image:
        from PIL.Image import Resampling

        return image.resize((width, height), Resampling[self.processing.resample.upper()])

    def _piece(self, image: Image) -> Piece:
        pixels = np.asarray(image, np.uint8)
        height, width = pixels.shape[:2]
        grid, merge = self.vision.grid(height, width), self.vision.merge
        raw = pixels.tobytes()
        head = height.to_bytes(4, "little") + width.to_bytes(4, "little")
        key = blake2b(head + raw, digest_size=KEY_BYTES).digest()
        return Piece(grid.height // merge, grid.width // merge, key, height, width, raw)


def opened(source: Any) -> Image:
    """A picture in RGB, upright: of a file's bytes, a PIL image, or an array uint8 [height, width, 3]. Transparent parts are
    white. RequestError (field "image") if it can't be read, moves, or is too large."""
    import PIL.Image
    from PIL import ImageOps

    if isinstance(source, np.ndarray):
        if (
            source.dtype != np.uint8
            or source.ndim != 3
            or source.shape[2] != 3
            or 0 in source.shape
        ):
            raise _bad(
                f"an array must be uint8 [height, width, 3], got {source.dtype} {list(source.shape)}"
            )
        source = PIL.Image.fromarray(source)
    if isinstance(source, PIL.Image.Image):
        image: Image = source
    elif isinstance(source, (bytes, bytearray, memoryview)):
        if len(source) > MAX_FILE_BYTES:
            raise _bad(f"the file has {len(source)} bytes, more than {MAX_FILE_BYTES}")
        image = _decoded(bytes(source))
    else:
        hint = (
            "; nothing is opened here, read the file"
            if isinstance(source, (str, os.PathLike))
            else ""
        )
        raise _bad(
            f"it must be a file's bytes, a PIL image or an array, got {type(source).__name__}{hint}"
        )
    _check_size(image)
    try:
        turned = ImageOps.exif_transpose(image)
        return _in_rgb(turned)
    except RequestError:
        raise
    except (OSError, ValueError, SyntaxError, ArithmeticError, MemoryError, EOFError) as error:
        raise _bad(f"it can't be read: {error}") from error


def _decoded(data: bytes) -> Image:
    import PIL.Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes, which are checked here
        try:
            image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
            _check_size(image)
            if getattr(image, "n_frames", 1) > 1:
                raise _bad("it moves: send one of its frames")
            image.load()
        except RequestError:
            raise
        except PIL.UnidentifiedImageError:
            raise _bad(f"it is no file of the formats {', '.join(FORMATS)}") from None
        except PIL.Image.DecompressionBombError:
            raise _bad(f"it has more than {MAX_PIXELS} pixels") from None
        except Exception as error:  # whatever a decoder raises, it raises over these bytes
            raise _bad(f"it can't be read: {error}") from error
    return image


def _check_size(image: Image) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise _bad("it has no pixels")
    if width * height > MAX_PIXELS:
        raise _bad(
            f"it has {width} by {height} pixels, more than {MAX_PIXELS} in all; make it smaller"
        )


def _in_rgb(image: Image) -> Image:
    import PIL.Image

    if image.mode.startswith("I;16"):  # which `convert` would cut at 255
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise _bad(f"its pixels are numbers of 32 bits (mode {image.mode}); send 8 bits a colour")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(
            PIL.Image.new("RGBA", image.size, (255, 255, 255, 255)), image
        )
    return image.convert("RGB")


def _bad(why: str) -> RequestError:
    return RequestError(f"a picture: {why}", field="image")


# --- Conversations ------------------------------------------------------------------------------------------------------

_DATA = re.compile(
    r"(?s)data:(image/[a-z0-9.+-]{1,40})?((?:;[a-z0-9=._-]{1,60})*?)(;base64)?,(.*)", re.IGNORECASE
)
_SHOWN = 80


def from_data_uri(url: str) -> bytes:
    """The bytes of a data: URI (RFC 2397) of an image. RequestError (field "image") if it is none."""
    match = _DATA.fullmatch(url)
    if match is None or match[1] is None:
        raise _bad(f"{url[:_SHOWN]!r} is no data:image/… URI")
    if len(match[4]) > MAX_FILE_BYTES * 3:
        raise _bad(f"it has more than {MAX_FILE_BYTES} bytes")
    if not match[3]:
        return unquote_to_bytes(match[4])
    try:
        return base64.b64decode(re.sub(r"\s", "", match[4]), validate=True)
    except (binascii.Error, ValueError):
        raise _bad("the data URI's base64 is broken") from None


def without_pictures(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages for a chat template, with {"type": "image"} in the place of their pictures, and these. RequestError (field
    "messages") for a part of another type."""
    plain, pictures = list[dict[str, Any]](), list[Any]()
    for i, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            plain.append(message)
            continue
        parts = []
        for k, part in enumerate(content):
            where = f"messages[{i}].content[{k}]"
            match part:
                case {"type": "text", "text": str()}:
                    parts.append(part)
                    continue
                case {"type": "image_url", "image_url": str() | {"url": str()} as given}:
                    pictures.append(_named(given, where))
                case {"type": "image_pil", "image_pil": given} | {"type": "image", "image": given}:
                    pictures.append(given)
                case _:
                    kind = part.get("type") if isinstance(part, dict) else part
                    known = "text, image_url and image_pil"
                    raise RequestError(
                        f"{where}: a part of type {kind!r}; the types are {known}", field="messages"
                    )
            if message.get("role") != "user":
                raise RequestError(f"{where}: only a user's message has pictures", field="messages")
            parts.append({"type": "image"})
        plain.append({**message, "content": parts})
    return plain, pictures


def _named(given: str | dict[str, Any], where: str) -> Any:
    """The picture of OpenAI's `image_url`, or of vLLM's short form: the URL alone."""
    url, more = (
        (given, {})
        if isinstance(given, str)
        else (given["url"], {k: v for k, v in given.items() if k != "url"})
    )
    detail = more.pop("detail", None)
    if more:
        raise RequestError(
            f"{where}.image_url: unknown key {min(map(str, more))!r}; it has url and detail",
            field="messages",
        )
    if url[:5].lower() != "data:":
        raise RequestError(
            f"{where}: nothing is fetched here; give a data: URI or the picture", field="messages"
        )
    data = from_data_uri(url)
    return data if detail is None else DetailedPicture(data, detail)


# --- Prompts ------------------------------------------------------------------------------------------------------------


def with_pictures(text: str, pictures: Sequence[PreparedPicture], vision: VisionSpec) -> str:
    """The prompt with each placeholder replaced by what stands for its picture. RequestError if they don't go together."""
    parts = text.split(vision.prompt.placeholder)
    if len(parts) - 1 != len(pictures):
        raise RequestError(
            f"the prompt has {len(parts) - 1} places for pictures ({vision.prompt.placeholder}), and there are {len(pictures)}",
            field="image",
        )
    return parts[0] + "".join(
        picture.text + part for picture, part in zip(pictures, parts[1:], strict=True)
    )


def expanded(
    tokens: Sequence[int],
    pictures: Sequence[PreparedPicture],
    vision: VisionSpec,
    tokenizer: Tokenizer | None,
) -> tuple[int, ...]:
    """A prompt's tokens with all placeholders of its pictures: as they are, or with one for each picture (of a model that
    writes a picture otherwise than by its placeholder: what `PromptFormat.placeholder` is)."""
    count = tokens.count(vision.token_id)
    if count == sum(piece.num_tokens for picture in pictures for piece in picture.pieces):
        return tuple(tokens)
    if tokenizer is None:
        raise RequestError(
            "without a tokenizer a prompt must have all placeholders of its pictures",
            field="prompt_token_ids",
        )
    mark = tokenizer.encode(vision.prompt.placeholder, add_special_tokens=False)
    if len(mark) != 1 or tokens.count(mark[0]) != len(pictures):
        raise RequestError(
            f"the prompt must have {vision.prompt.placeholder} once for each of {len(pictures)} pictures, or all of their "
            "placeholders",
            field="prompt_token_ids",
        )
    found, left = list[int](), iter(pictures)
    for token in tokens:
        found += (
            tokenizer.encode(next(left).text, add_special_tokens=False)
            if token == mark[0]
            else [token]
        )
    return tuple(found)


def _salted(key: bytes, cache_salt: str) -> bytes:
    return blake2b(key + cache_salt.encode(), digest_size=len(key), person=b"cache_salt").digest()


def placed(
    tokens: Sequence[int],
    pictures: Sequence[PreparedPicture],
    vision: VisionSpec,
    cache_salt: str = "",
) -> tuple[ImageSpan, ...]:
    """Where the pieces of the pictures stand in a prompt that has all placeholders. RequestError if they don't go together.
    With a salt, embeddings that the worker keeps are shared only with requests that have it, too."""
    places = [i for i, token in enumerate(tokens) if token == vision.token_id]
    spans, start = list[ImageSpan](), 0
    for piece in (piece for picture in pictures for piece in picture.pieces):
        own = places[start : start + piece.num_tokens]
        if len(own) < piece.num_tokens or own[-1] - own[0] != piece.num_tokens - 1:
            raise RequestError(
                "the prompt's placeholders are not those of its pictures", field="image"
            )
        span = piece.at(own[0])
        if cache_salt:
            span = dataclasses.replace(span, key=_salted(span.key, cache_salt))
        spans.append(span)
        start += piece.num_tokens
    if start != len(places):
        raise RequestError(
            f"the prompt has {len(places) - start} placeholders of no picture", field="image"
        )
    return tuple(spans)
