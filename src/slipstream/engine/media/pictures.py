"""Prepares images for the engine: decodes them within limits, scales and cuts them as the model's
image processor does, and hashes them.

    source (bytes, a PIL image, an array) ── opened ──> RGB ── pieces ──> uint8 pixels with their key, and the text that
                                                                            stands for the picture in a prompt

Uses only Pillow and NumPy. Images are prepared in a thread pool, since decoding and scaling release
the GIL. The number of pixels decoded at a time is limited, and clients take turns. Pixels stay
bytes until the worker rescales and normalizes them (`ImageProcessing`).
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from slipstream.engine.media.picture_files import MAX_PIXELS, PictureFile, bad, check_size, measured
from slipstream.engine.media.prepared import KEY_BYTES, MediaPiece, MediaProcessor, PreparedMedia
from slipstream.engine.threads.fair_threads import NUM_CORES, FairThreads
from slipstream.errors import RequestError
from slipstream.spec.media.vision import (
    MAX_RATIO,
    MAX_SIDE,
    CenterSquare,
    FixedSize,
    ImageProcessing,
    LongestSide,
    PatchGrid,
    PatchLimits,
    PinpointTiles,
    PixelRange,
    RatioTiles,
    TileSizes,
    TokenBudget,
    VisionSpec,
    WholeOrTiles,
    around_square,
    pinpoint,
    scaled_for_tiles,
    tiles_by_ratio,
    whole_tiles,
    within_budget,
    within_patches,
    within_pinpoint,
    within_pixels,
    within_side,
    without_padding,
)

if TYPE_CHECKING:
    from PIL.Image import Image


_logger = logging.getLogger("slipstream.engine")
_NO_PILLOW = "pictures are read by Pillow, which is not installed here: the extra vision"

MAX_DECODED_PIXELS = 96 * 2**20
"""Maximum pixels being decoded at a time. One client may use at most the pixels of one request, so
that others have room. A pixel takes about 6 bytes."""

_STRIP_PIXELS = 2**20
LOW_DETAIL_PIXELS, LOW_DETAIL_TOKENS, LOW_DETAIL_SIDE = 512 * 512, 70, 512
Detail: TypeAlias = Literal["auto", "low", "high"]


@dataclass(frozen=True, slots=True)
class DetailedPicture:
    """An image not yet prepared, with OpenAI's `detail`."""

    source: Any
    detail: str


class PictureProcessor(MediaProcessor):
    """Prepares images for one model. Without Pillow a warning is logged, text is served, and images
    are refused."""

    spec: VisionSpec

    def __init__(self, spec: VisionSpec, processing: ImageProcessing, most: int) -> None:
        self._has_pillow = find_spec("PIL") is not None
        if not self._has_pillow:
            _logger.warning("%s; until then only text is served", _NO_PILLOW)
        self.spec, self.processing, self.most = spec, processing, most
        count = min(8, NUM_CORES)
        self._pool = FairThreads(
            "pictures",
            count + 1,
            per_client=count,
            max_weight=MAX_DECODED_PIXELS,
            client_weight=MAX_PIXELS,
            trim_weight=4 * 2**20,
        )

    def measure(self, data: bytes) -> Future[PictureFile]:
        """Check a file in a thread without decoding it, so that its pixels are known beforehand.
        `submit` accepts the result instead of the file's bytes."""
        return self._pool.submit(partial(measured, data))

    def submit(self, source: Any, detail: str = "auto") -> Future[PreparedMedia]:
        try:
            source = _with_file(source)
        except RequestError as error:
            refused: Future[PreparedMedia] = Future()
            refused.set_exception(error)
            return refused
        return self._pool.submit(partial(self.prepare, source, detail), weight=_num_pixels(source))

    def prepare(self, source: Any, detail: str = "auto") -> PreparedMedia:
        """Prepares an image's pieces. RequestError if the image is invalid."""
        source = _with_file(source)
        if isinstance(source, DetailedPicture):
            source, detail = source.source, source.detail
        if not self._has_pillow:
            raise RequestError(_NO_PILLOW, field="image")
        if detail not in get_args(Detail):
            raise RequestError(f"detail must be auto, low or high, got {detail!r}", field="detail")
        image = opened(source)
        p, spec = self.processing, self.spec
        rows = columns = 0
        match p.sizes:
            case TileSizes() as sizes:
                tiles, rows, columns = self._tiles(
                    image, sizes, splits=sizes.splits and detail != "low"
                )
            case RatioTiles() as ratios:
                tiles = self._ratio_tiles(image, ratios, splits=detail != "low")
            case FixedSize() | CenterSquare() | PinpointTiles() if detail == "low":
                message = "this model has no smaller size for pictures; leave detail out"
                raise RequestError(message, field="detail")
            case FixedSize() | CenterSquare():
                tiles = [self._one_size(image, p.sizes)]
            case PinpointTiles() as sizes:
                tiles = [self._cut(image.scaled(sizes.tile, sizes.tile, self._how), sizes.tile)]
                grid, whole = self._in_pinpoint(image, sizes)
            case PixelRange() as sizes:
                longer, shorter = sorted((image.width, image.height), reverse=True)
                if longer > MAX_RATIO * shorter:
                    raise RequestError(
                        f"one side of the picture is over {MAX_RATIO} times the other",
                        field="image",
                    )
                if detail == "low":
                    most = max(sizes.factor**2, min(sizes.max_pixels, LOW_DETAIL_PIXELS))
                    least = min(sizes.min_pixels, most)
                    sizes = PixelRange(factor=sizes.factor, min_pixels=least, max_pixels=most)
                size = within_pixels(image.height, image.width, sizes)
                tiles = [image.scaled(*size, self._how)]
            case TokenBudget() as budget:
                if detail == "low":
                    budget = TokenBudget(
                        factor=budget.factor, max_tokens=min(budget.max_tokens, LOW_DETAIL_TOKENS)
                    )
                size = within_budget(image.height, image.width, budget)
                tiles = [image.scaled(*size, self._how)]
            case LongestSide() as sizes:
                if detail == "low":
                    longest = min(sizes.longest, LOW_DETAIL_SIDE)
                    sizes = LongestSide(factor=sizes.factor, longest=longest)
                size = within_side(image.height, image.width, sizes)
                tiles = [image.scaled(*size, self._how)]
            case WholeOrTiles() as sizes:
                tiles, rows, columns = self._whole_or_tiles(image, sizes, is_low=detail == "low")
            case PatchLimits() as limits:
                if detail == "low":
                    side = max(1, min(limits.side, LOW_DETAIL_SIDE // limits.patch))
                    limits = dataclasses.replace(limits, side=side)
                tiles = [self._padded(image, limits)]
        pieces = tuple(self._piece(tile) for tile in tiles)
        among = None
        if isinstance(p.sizes, PinpointTiles):
            height, width = p.sizes.scaled(grid, pieces[0].rows)
            inner = () if grid == (height, width) else (grid.height, grid.width)
            if height:  # of a picture that is flatter than a patch only padding is left
                pieces = (*pieces, self._piece(whole, PatchGrid(height, width + 1), inner))
            among = self._one_square(image, p.sizes)
        if spec.prompt.gap:
            rows, columns = pieces[0].rows, pieces[0].columns
        counts = [piece.num_tokens for piece in pieces]
        return PreparedMedia(spec.prompt.text(counts, rows, columns), pieces, among)

    def _one_square(self, source: OpenPicture, sizes: PinpointTiles) -> PreparedMedia | None:
        """The image centred on a square of the mean colour, as one tile, with a token after its last row."""
        import PIL.Image

        if sizes.most is None:
            return None
        height, width = source.height, source.width
        # the square of a very narrow image would be too large
        if (side := max(height, width)) > MAX_SIDE:
            height, width = (max(1, x * MAX_SIDE // side) for x in (height, width))
            side = MAX_SIDE
        colour = tuple(int(x * 255) for x in self.processing.mean)
        image = PIL.Image.new("RGB", (side, side), colour)
        place = (side - width) // 2, (side - height) // 2
        image.paste(source.scaled(height, width, self._how), place)
        tile = self._cut(self._scaled(image, sizes.tile, sizes.tile), sizes.tile)
        count = self.spec.num_tokens(self.spec.grid(tile.height, tile.width)) + 1
        piece = self._piece(tile, PatchGrid(1, count))
        return PreparedMedia(self.spec.prompt.text([count]), (piece,))

    def _in_pinpoint(self, source: OpenPicture, sizes: PinpointTiles) -> tuple[PatchGrid, Image]:
        """(token grid without padding, the image padded with black)."""
        import PIL.Image

        size = pinpoint(source.height, source.width, sizes)
        height, width = within_pinpoint(source.height, source.width, size)
        image = PIL.Image.new("RGB", (size[1], size[0]))
        place = (size[1] - width) // 2, (size[0] - height) // 2
        image.paste(source.scaled(height, width, self._how), place)
        image = self._cut(image, sizes.tile)
        grid = self.spec.grid(image.height, image.width)
        return without_padding(source.height, source.width, grid), image

    def _cut(self, image: Image, tile: int) -> Image:
        """The image without the pixels of each tile after its last whole patch."""
        import PIL.Image

        kept = tile - tile % self.spec.patch_size
        if kept == tile:
            return image
        rows, columns = image.height // tile, image.width // tile
        found = PIL.Image.new("RGB", (columns * kept, rows * kept))
        for y in range(rows):
            for x in range(columns):
                box = (x * tile, y * tile, x * tile + kept, y * tile + kept)
                found.paste(image.crop(box), (x * kept, y * kept))
        return found

    def _padded(self, source: OpenPicture, limits: PatchLimits) -> Image:
        """The image padded with black on the right and below."""
        import PIL.Image

        height, width = within_patches(source.height, source.width, limits)
        factor = limits.factor
        size = -(-width // factor) * factor, -(-height // factor) * factor
        image = PIL.Image.new("RGB", size)
        image.paste(source.scaled(height, width, self._how))
        return image

    def _one_size(self, source: OpenPicture, size: FixedSize | CenterSquare) -> Image:
        if isinstance(size, FixedSize):
            return source.scaled(size.height, size.width, self._how)
        height, width = around_square(source.height, source.width, size.side)
        top, left = (height - size.side) // 2, (width - size.side) // 2
        image = source.scaled(height, width, self._how)
        return image.crop((left, top, left + size.side, top + size.side))

    def _whole_or_tiles(
        self, source: OpenPicture, sizes: WholeOrTiles, *, is_low: bool
    ) -> tuple[list[Image], int, int]:
        """(the tiles row by row, possibly followed by the whole image; rows; columns). Rows and columns are 0 if there is
        only one piece."""
        whole = source.scaled(*within_pixels(source.height, source.width, sizes.whole), self._how)
        tiles = sizes.tiles
        if is_low or tiles is None or not sizes.are_tiles(source.height, source.width):
            return [whole], 0, 0
        rows, columns = tiles_by_ratio(source.height, source.width, tiles)
        if rows * columns == 1:
            return [source.scaled(tiles.tile, tiles.tile, self._how)], 0, 0
        *found, _ = self._ratio_tiles(source, tiles, splits=True)
        return [*found, whole] if sizes.thumbnail else found, rows, columns

    def _ratio_tiles(self, source: OpenPicture, sizes: RatioTiles, *, splits: bool) -> list[Image]:
        """The tiles row by row, followed by the whole image if there are several."""
        tile = sizes.tile
        rows, columns = tiles_by_ratio(source.height, source.width, sizes) if splits else (1, 1)
        whole = source.scaled(tile, tile, self._how)
        if rows * columns == 1:
            return [whole]
        image = source.scaled(rows * tile, columns * tile, self._how)
        places = [(x * tile, y * tile) for y in range(rows) for x in range(columns)]
        return [*(image.crop((x, y, x + tile, y + tile)) for x, y in places), whole]

    def _tiles(
        self, source: OpenPicture, sizes: TileSizes, *, splits: bool
    ) -> tuple[list[Image], int, int]:
        """(the tiles row by row, followed by the whole image; rows; columns). Rows and columns are
        0 for a single tile."""
        tile = sizes.tile
        size = scaled_for_tiles(source.height, source.width, sizes.longest)
        image = source.scaled(*size, self._how)
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
        return image.resize((width, height), self._how)

    @property
    def _how(self) -> Any:
        from PIL.Image import Resampling

        return Resampling[self.processing.resample.upper()]

    def _piece(
        self, image: Image, tokens: PatchGrid | None = None, inner: tuple[int, ...] = ()
    ) -> MediaPiece:
        """An image or tile for the encoder, with the key of its pixels. `tokens`: its token grid,
        if it differs from the grid of patch groups. `inner`: see `MediaSpan`."""
        pixels = np.asarray(image, np.uint8)
        height, width = pixels.shape[:2]
        grid, merge = self.spec.grid(height, width), self.spec.merge
        raw = pixels.tobytes()
        size = tokens or (grid.height // merge, grid.width // merge)
        sides = (height, width, *(tokens or ()), *inner)
        head = b"".join(x.to_bytes(4, "little") for x in sides)
        key = blake2b(head + raw, digest_size=KEY_BYTES).digest()
        return MediaPiece(*size, key, height, width, raw, self.spec.prompt.gap, inner)


class OpenPicture:
    """A decoded picture that is not yet upright, flat or scaled.

    A large one is scaled channel by channel, and transparency is removed strip by strip, in place;
    otherwise four copies would be in memory.
    """

    def __init__(self, image: Image, orientation: int, *, is_own: bool) -> None:
        """`is_own`: the image may be modified."""
        self._image = _flat(image, is_own=is_own)
        self._turn = _TURNS.get(orientation)
        width, height = self._image.size
        self.width, self.height = (height, width) if orientation > 4 else (width, height)

    def scaled(self, height: int | None = None, width: int | None = None, how: Any = None) -> Image:
        """The image in RGB, upright, scaled to `height` by `width` if both are given."""
        import PIL.Image

        planes = []
        for band in range(3 if len(self._image.getbands()) > 2 else 1):
            plane = self._image.getchannel(band)
            if self._turn is not None:
                plane = plane.transpose(self._turn)
            if height is not None and width is not None:
                plane = plane.resize((width, height), how)
            planes.append(plane)
        return PIL.Image.merge("RGB", planes if len(planes) == 3 else planes * 3)


_TURNS: dict[int, Any] = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""EXIF's orientations as values of PIL.Image.Transpose."""


def opened(source: Any) -> OpenPicture:
    """Opens an image: a file's bytes, a PIL image, or an array uint8 [height, width, 3]. Transparent parts
    become white. RequestError (field "image") if it is invalid, animated, or too large."""
    import PIL.Image

    source = _with_file(source)
    try:
        if isinstance(source, PictureFile):
            return OpenPicture(_decoded(source), source.orientation, is_own=True)
        if isinstance(source, np.ndarray):
            if (
                source.dtype != np.uint8
                or source.ndim != 3
                or source.shape[2] != 3
                or 0 in source.shape
            ):
                raise bad(
                    f"an array must be uint8 [height, width, 3], got {source.dtype} {list(source.shape)}"
                )
            source = PIL.Image.fromarray(source)
        if not isinstance(source, PIL.Image.Image):
            hint = (
                "; nothing is opened here, read the file"
                if isinstance(source, (str, os.PathLike))
                else ""
            )
            raise bad(
                f"it must be a file's bytes, a PIL image or an array, got {type(source).__name__}{hint}"
            )
        check_size(*source.size)
        source.load()
        return OpenPicture(source, source.getexif().get(0x0112, 1), is_own=False)
    except RequestError:
        raise
    except (OSError, ValueError, SyntaxError, ArithmeticError, MemoryError, EOFError) as error:
        raise bad(f"it can't be read: {error}") from error


def _decoded(file: PictureFile) -> Image:
    import PIL.Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sizes, which were checked before
        try:
            image = PIL.Image.open(io.BytesIO(file.data), formats=(file.format,))
            if image.size != (file.width, file.height):
                raise bad("it can't be read: the file contradicts itself about its size")
            image.load()
        except RequestError:
            raise
        except PIL.UnidentifiedImageError:
            raise bad(f"it can't be read as {file.format}") from None
        except Exception as error:  # any decoder error is caused by these bytes
            raise bad(f"it can't be read: {error}") from error
    return image


def _flat(image: Image, *, is_own: bool) -> Image:
    """The image without transparency: its first three bands are red, green and blue, or its first
    band is grey."""
    import PIL.Image

    if image.mode.startswith("I;16"):  # `convert` would clip these at 255
        return PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise bad(f"its pixels are numbers of 32 bits (mode {image.mode}); send 8 bits a colour")
    if image.mode not in ("L", "LA", "RGB", "RGBA", "RGBX", "CMYK"):
        image, is_own = image.convert("RGBA" if _is_transparent(image) else "RGB"), True
    if not _is_transparent(image) and image.mode != "CMYK":
        return image
    flat = image if is_own else image.copy()
    num_rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, num_rows):
        box = (0, top, image.width, min(image.height, top + num_rows))
        bands = _in_rgb(image.crop(box)).split()
        if len(flat.getbands()) < 3:
            bands = bands[:1]
        padded = (*bands, *(bands[0] for _ in range(len(flat.getbands()) - len(bands))))
        flat.paste(PIL.Image.merge(flat.mode, padded), box)
    return flat


def _is_transparent(image: Image) -> bool:
    return "A" in image.getbands() or image.info.get("transparency") is not None


def _in_rgb(image: Image) -> Image:
    import PIL.Image

    if _is_transparent(image):
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(
            PIL.Image.new("RGBA", image.size, (255, 255, 255, 255)), image
        )
    return image.convert("RGB")


def _with_file(source: Any) -> Any:
    """The source, with a file's bytes replaced by the checked file."""
    match source:
        case DetailedPicture(inner, detail):
            return DetailedPicture(_with_file(inner), detail)
        case bytes() | bytearray() | memoryview():
            return measured(bytes(source))
    return source


def _num_pixels(source: Any) -> int:
    """Number of pixels, as counted for limits, of a source that `_with_file` returned."""
    match source:
        case DetailedPicture(source=inner):
            return _num_pixels(inner)
        case PictureFile(num_pixels=count):
            return count
        case np.ndarray():
            return source.size // 3
    return int(getattr(source, "width", 0)) * int(getattr(source, "height", 0))
