"""Image encoders: the part of a model spec that converts images to embeddings of placeholder
tokens. No torch.

    patches = rows of pixels · patch (+ positions)
    states  = layers(patches)                    a transformer that is not causal
    tokens  = connector(groups of merge × merge neighbouring patches)
    added   = connectors of earlier states       what the decoder's first layers add (DeepStack)

Patches are numbered group by group, and row by row within a group. So the patches of one token are
consecutive for every connector. `size` of a picture is in pixels; `grid` is in patches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from slipstream.errors import UnsupportedModelError
from slipstream.spec.functions import Activation, NormSpec, Shape
from slipstream.spec.media.medium import MediaSpec


class PatchGrid(NamedTuple):
    """Number of an image's patches vertically and horizontally."""

    height: int
    width: int

    @property
    def num_patches(self) -> int:
        return self.height * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPositionSpec:
    """A table of `side` × `side` learned positions that is added to the patches' embeddings.

    `read`: how the table is applied to an image's grid:

    1. `cells`: directly; every image has exactly this grid.
    2. `fractions`: the entry at the same fraction of height and width, rounded down (Idefics 3;
       Patch n' Pack, arXiv:2307.06304).
    3. `bilinear`: interpolated from the four nearest cells, corners aligned (Qwen 3 VL).
    4. `bicubic`: interpolated from the sixteen nearest cells, edges aligned (GLM-4V).
    5. `antialiased`: interpolated from all cells that a patch covers, at least the four nearest,
       edges aligned (SigLIP 2).
    """

    side: int
    read: Literal["cells", "fractions", "bilinear", "bicubic", "antialiased"]

    @property
    def fixed(self) -> bool:
        """Whether an image's grid can't be larger than the table."""
        return self.read in ("cells", "fractions")

    def shape(self, hidden: int) -> Shape:
        return (self.side**2, hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPositionSpec:
    """Two tables of `size` learned positions, added to the patches' embeddings: one indexed by a
    patch's column, the other by its row (Gemma 4)."""

    size: int

    def shape(self, hidden: int) -> Shape:
        return (2, self.size, hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxialRopeSpec:
    """Rotary embedding of patches (Qwen 2 VL, arXiv:2409.12191). The first half of a head's frequencies is
    for the patch's row, the second for its column; with `columns_first` the other way round. Both axes have
    the same frequencies; with `alternate` each has every other frequency (Pixtral). With `twined` frequencies
    of the two axes alternate within a head, and the two elements of a rotation are adjacent (MoonViT).
    """

    theta: float
    head_dim: int
    columns_first: bool = False
    alternate: bool = False
    twined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcatConnector:
    """A linear layer on a group's concatenated states (Idefics 3's pixel shuffle,
    arXiv:2408.12637). `bias`: it has a bias (PaliGemma)."""

    bias: bool = False

    def shapes(self, hidden: int, merge: int, text: int) -> dict[str, Shape]:
        found: dict[str, Shape] = {"media.connector.out.weight": (text, merge * merge * hidden)}
        return found | ({"media.connector.out.bias": (text,)} if self.bias else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConnector:
    """A linear layer without a bias on the normed mean of a group's states (Gemma 3)."""

    norm: NormSpec

    def shapes(self, hidden: int, merge: int, text: int) -> dict[str, Shape]:
        return self.norm.shapes("media.connector.norm") | {
            "media.connector.out.weight": (text, hidden)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConnector:
    """An MLP with biases on a group's concatenated normed states. Its inner width is that of its input (Qwen 2 to 3
    VL), of the decoder (InternVL, LLaVA), or `width` (LFM2-VL). `gated`: the MLP is gated (Aya Vision).

    The norm is over each state, or over the whole group if that is its size. LLaVA has none.
    """

    norm: NormSpec | None
    activation: Activation
    width: Literal["group", "text"] | int = "group"
    gated: bool = False

    def shapes(
        self, hidden: int, merge: int, text: int, name: str = "media.connector"
    ) -> dict[str, Shape]:
        group = merge * merge * hidden
        width = {"group": group, "text": text}.get(str(self.width)) or int(self.width)
        return {
            **({} if self.norm is None else self.norm.shapes(f"{name}.norm")),
            f"{name}.up.weight": (width * (1 + self.gated), group),
            f"{name}.up.bias": (width * (1 + self.gated),),
            f"{name}.out.weight": (text, width),
            f"{name}.out.bias": (text,),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledPoolConnector:
    """A linear layer without a bias on rms((√E · mean of a group's states − shift) · gain), a norm
    without weights (Gemma 4). `standardized`: `shift` and `gain` are learned; otherwise absent."""

    eps: float
    standardized: bool

    def shapes(self, hidden: int, merge: int, text: int) -> dict[str, Shape]:
        learned = ("shift", "gain") if self.standardized else ()
        found: dict[str, Shape] = {f"media.connector.{x}.weight": (hidden,) for x in learned}
        return found | {"media.connector.out.weight": (text, hidden)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchMergeConnector:
    """A linear layer that merges a group's normed states into one, channel by channel, then an MLP
    as wide as the decoder (Mistral 3)."""

    norm: NormSpec
    activation: Activation
    bias: bool

    def shapes(self, hidden: int, merge: int, text: int) -> dict[str, Shape]:
        found = {
            **self.norm.shapes("media.connector.norm"),
            "media.connector.merge.weight": (hidden, merge * merge * hidden),
            "media.connector.up.weight": (text, hidden),
            "media.connector.out.weight": (text, text),
        }
        if self.bias:
            found |= dict.fromkeys(("media.connector.up.bias", "media.connector.out.bias"), (text,))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMergeConnector:
    """A strided convolution with a bias that merges a group's states into one row as wide as the decoder; a
    linear layer, a norm and GELU; then a gated MLP of `intermediate_size` units (GLM-4V)."""

    norm: NormSpec
    activation: Activation
    intermediate_size: int

    def shapes(self, hidden: int, merge: int, text: int) -> dict[str, Shape]:
        return {
            "media.connector.merge.weight": (text, merge * merge * hidden),
            "media.connector.merge.bias": (text,),
            "media.connector.in.weight": (text, text),
            **self.norm.shapes("media.connector.norm"),
            "media.connector.up.weight": (2 * self.intermediate_size, text),
            "media.connector.out.weight": (text, self.intermediate_size),
        }


Connector: TypeAlias = (
    ConcatConnector
    | PoolConnector
    | ScaledPoolConnector
    | MLPConnector
    | PatchMergeConnector
    | GatedMergeConnector
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepStackSpec:
    """DeepStack (arXiv:2406.04334): each encoder layer in `layers` has its own connector, applied
    to its output. The i-th connector's output is added to the states of the image's tokens after
    decoder layer i (Qwen 3 VL)."""

    layers: tuple[int, ...]
    connector: MLPConnector

    def shapes(self, hidden: int, merge: int, text: int) -> dict[str, Shape]:
        found: dict[str, Shape] = {}
        for i in range(len(self.layers)):
            found |= self.connector.shapes(hidden, merge, text, f"media.deepstack.{i}")
        return found


CLIPPED = ("q", "k", "v", "out", "gate", "up", "down")
"""Linear layers of an encoder layer that have clamping bounds, in the order of their rows in the bounds' tensor."""

BOUNDS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec(MediaSpec):
    """An image encoder.

    - `patch_size`: pixels on a patch's side.
    - `num_frames`: number of times that an image is repeated as a frame (Qwen's encoder is made for video); None: the
      weights have no frame dimension.
    - `merge`: patches on the side of a group, which becomes one token.
    - `class_token`: a learned row precedes an image's patches in all layers. The first position is added to it. It
      yields no token.
    - `layer_scale`: outputs of a layer's attention and MLP are multiplied by learned factors, channel by channel.
    - `patch_norm`: norm of the patches' embeddings; `first_norm`: norm of these after positions are added.
    - `position`: position embedding added to the patches; `rope`: rotary embedding in the layers.
    - `window`: side, in groups, of the squares within which patches attend to each other; layers in `full_layers`
      attend to the whole image.
    - `channels_last`: a patch's values are ordered by pixel, then by channel.
    - `clipped`: inputs and outputs of the layers' linear layers are clamped to learned bounds (Gemma 4).
    - `pinpoints`: sizes [height, width] to which images are scaled before they are cut into squares of the position
      table's side. Their tokens, except padding, form one grid with a learned row after each of its rows (LLaVA-NeXT).
      `most_tiles`: the grid is scaled down to about the tokens of this many squares (`PinpointTiles.most`).
    """

    medium = "image"
    num_channels: int
    patch_size: int
    patch_bias: bool
    merge: int
    connector: Connector
    class_token: bool = False
    layer_scale: bool = False
    patch_norm: NormSpec | None = None
    first_norm: NormSpec | None = None
    position: GridPositionSpec | AxisPositionSpec | None = None
    rope: AxialRopeSpec | None = None
    deepstack: DeepStackSpec | None = None
    num_frames: int | None = None
    window: int | None = None
    full_layers: frozenset[int] = frozenset()
    channels_last: bool = False
    clipped: bool = False
    pinpoints: tuple[tuple[int, int], ...] = ()
    most_tiles: int | None = None

    @property
    def num_added(self) -> int:
        return 0 if self.deepstack is None else len(self.deepstack.layers)

    @property
    def kernel(self) -> tuple[int, ...]:
        """Shape of a patch's input: [channels, frames if there are any, patch height, patch width],
        or with the channels last."""
        if self.channels_last:
            return (self.patch_size, self.patch_size, self.num_channels)
        frames = () if self.num_frames is None else (self.num_frames,)
        return (self.num_channels, *frames, self.patch_size, self.patch_size)

    @property
    def patch_numbers(self) -> int:
        """Number of input elements of a patch."""
        return math.prod(self.kernel)

    def numbers(self, height: int, width: int) -> tuple[str, tuple[int, ...]]:
        return "uint8", (height, width, self.num_channels)

    def grid(self, height: int, width: int) -> PatchGrid:
        """The patch grid of an image of this size in pixels. Both sides must be multiples of a group's side."""
        return PatchGrid(height // self.patch_size, width // self.patch_size)

    def num_tokens(self, grid: PatchGrid) -> int:
        return grid.num_patches // self.merge**2

    def shapes(self, text_size: int) -> dict[str, Shape]:
        found = MediaSpec.shapes(self, text_size)
        found["media.patch.weight"] = (self.hidden_size, self.patch_numbers)
        if self.patch_bias:
            found["media.patch.bias"] = (self.hidden_size,)
        if self.patch_norm is not None:
            found |= self.patch_norm.shapes("media.patch_norm")
        if self.first_norm is not None:
            found |= self.first_norm.shapes("media.first_norm")
        if self.class_token:
            found["media.class_token.weight"] = (1, self.hidden_size)
        if self.position is not None:
            rows, *size = self.position.shape(self.hidden_size)
            found["media.positions.weight"] = (rows + self.class_token, *size)
        for i in range(len(self.layers)):
            if self.layer_scale:
                found[f"media.layers.{i}.gains.weight"] = (2, self.hidden_size)
            if self.clipped:
                found[f"media.layers.{i}.bounds.weight"] = (len(CLIPPED) * len(BOUNDS),)
        if self.pinpoints:
            found["media.row_end.weight"] = (1, text_size)
        if self.deepstack is not None:
            found |= self.deepstack.shapes(self.hidden_size, self.merge, text_size)
        return found | self.connector.shapes(self.hidden_size, self.merge, text_size)

    def check(self, vocab_size: int) -> None:
        MediaSpec.check(self, vocab_size)
        grid = self.position
        if isinstance(grid, GridPositionSpec) and grid.fixed and grid.side % self.merge:
            message = f"{grid.side} patches on a side can't be merged {self.merge} by {self.merge}"
            raise UnsupportedModelError(message, field="image_size")


# --- Preprocessing -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSizes:
    """Sizes of a picture that is cut into tiles (Idefics 3, SmolVLM).

    The image is scaled so that its longer side has `longest` pixels, then to multiples of `tile`,
    and cut. The whole image, scaled to one tile, follows. `splits` False: only the whole image.
    """

    longest: int
    tile: int
    splits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSize:
    """One size for all pictures, whatever their proportions (SigLIP)."""

    height: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CenterSquare:
    """The middle square of a picture whose shorter side is scaled to `side` pixels (CLIP)."""

    side: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioTiles:
    """Square tiles of `tile` pixels, `least` to `most` of them (InternVL).

    The grid of tiles is the one whose aspect ratio is closest to the image's, and the image is stretched to
    it. With `by` "scale" it is the grid that enlarges the image least, or else shrinks it least (Command A
    Vision; `least` has no effect). If there are several tiles, the whole image, scaled to one tile, follows.
    """

    tile: int
    least: int
    most: int
    by: Literal["ratio", "scale"] = "ratio"


@dataclass(frozen=True, slots=True, kw_only=True)
class PinpointTiles:
    """The whole image stretched to a square of `tile` pixels, then the image centred on the best of `sizes` [height,
    width], padded with black and cut into tiles (LLaVA-NeXT).

    `most`: if the tiles have over 1.1² times the tokens of this many tiles, their grid of tokens is scaled down to
    about that number. If a prompt has several images, each becomes one padded square (LLaVA-OneVision)."""

    tile: int
    sizes: tuple[tuple[int, int], ...]
    most: int | None = None

    def scaled(self, grid: PatchGrid, side: int) -> PatchGrid:
        """Token grid of an image without padding, scaled down if it is too large for `most`. A tile has `side` × `side`
        tokens."""
        ratio = math.sqrt(grid.num_patches / (self.most * side**2)) if self.most else 0.0
        return PatchGrid(*(int(x // ratio) for x in grid)) if ratio > 1.1 else grid


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelRange:
    """Bounds of an image's number of pixels. The image keeps its aspect ratio; its sides become multiples of `factor`
    (Qwen 2 VL). `short`: treatment of a side shorter than `factor`: rounded, possibly to 0 before enlarging (default);
    scaled up in proportion (`scaled`, GLM-4V); or only this side raised to `factor` (`clamped`, LFM2-VL)."""

    factor: int
    min_pixels: int
    max_pixels: int
    short: Literal["rounded", "scaled", "clamped"] = "rounded"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Maximum tokens of an image. The image is scaled to nearly this number in its aspect ratio,
    with sides that are multiples of `factor` (Gemma 4)."""

    factor: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestSide:
    """Maximum pixels of a side. Larger images are scaled down in proportion; then sides are rounded
    up to multiples of `factor` (Pixtral)."""

    factor: int
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeOrTiles:
    """The whole image within bounds or, if it has more than `limit` pixels, `tiles`, followed by the whole image if there
    are several tiles and `thumbnail` (LFM2-VL). Pixels are counted with sides rounded to multiples of the factor, at least
    `side`."""

    whole: PixelRange
    tiles: RatioTiles | None
    limit: float
    side: int
    thumbnail: bool

    def are_tiles(self, height: int, width: int) -> bool:
        factor = self.whole.factor
        sides = (max(self.side, round(x / factor) * factor) for x in (height, width))
        return self.tiles is not None and math.prod(sides) > self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchLimits:
    """Maximum number of an image's patches of side `patch`, in all and along one side. Larger images are scaled down
    in proportion; then each is padded with black on the right and below to multiples of `factor` (MoonViT)."""

    factor: int
    patch: int
    most: int
    side: int


Sizes: TypeAlias = (
    TileSizes
    | RatioTiles
    | PinpointTiles
    | FixedSize
    | CenterSquare
    | PixelRange
    | TokenBudget
    | LongestSide
    | PatchLimits
    | WholeOrTiles
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessing:
    """Preprocessing of an image for the encoder: conversion to RGB, scaling, then (value · `scale`
    − mean) / std."""

    sizes: Sizes
    resample: Literal["bilinear", "bicubic", "lanczos"]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scale: float = 1 / 255

    def most_tokens(self, vision: VisionSpec) -> int:
        """Maximum number of tokens of an image or of one of its tiles."""
        side = vision.patch_size * vision.merge
        match self.sizes:
            case TileSizes(tile=tile) | RatioTiles(tile=tile) | CenterSquare(side=tile):
                return (tile // side) ** 2
            case PinpointTiles(sizes=sizes):  # one more token after each row
                return max(height // side * (width // side + 1) for height, width in sizes)
            case FixedSize(height=height, width=width):
                return height * width // side**2
            case PixelRange(max_pixels=pixels):
                return pixels // side**2
            case TokenBudget(max_tokens=most):
                return most
            case LongestSide(longest=longest):
                return math.ceil(longest / side) ** 2
            case WholeOrTiles(whole=whole, tiles=tiles):
                of_tile = 0 if tiles is None else (tiles.tile // side) ** 2
                return max(whole.max_pixels // side**2, of_tile)
            case PatchLimits(side=most):
                return math.ceil(most / vision.merge) ** 2


def within_budget(height: int, width: int, sizes: TokenBudget) -> tuple[int, int]:
    """(height, width): the largest multiples of the factor within the budget, in about the same
    aspect ratio."""
    factor, most = sizes.factor, sizes.max_tokens
    scale = math.sqrt(most * factor**2 / (height * width))
    rows, columns = (math.floor(scale * side / factor) for side in (height, width))
    if rows == 0:
        rows, columns = 1, min(width // height, most)
    elif columns == 0:
        rows, columns = min(height // width, most), 1
    return rows * factor, columns * factor


def within_side(height: int, width: int, sizes: LongestSide) -> tuple[int, int]:
    """(height, width) as multiples of the factor. A side may exceed the maximum by less than the
    factor."""
    ratio = max(height / sizes.longest, width / sizes.longest)
    if ratio > 1:
        height, width = (max(1, math.floor(side / ratio)) for side in (height, width))
    factor = sizes.factor
    return math.ceil(height / factor) * factor, math.ceil(width / factor) * factor


def within_patches(height: int, width: int, sizes: PatchLimits) -> tuple[int, int]:
    """(height, width) of an image before it is padded."""
    patch, side = sizes.patch, sizes.side * sizes.patch
    count = max(1, height // patch) * max(1, width // patch)
    scale = min(1.0, math.sqrt(sizes.most / count), side / height, side / width)
    return min(max(1, int(height * scale)), side), min(max(1, int(width * scale)), side)


def tiles_by_ratio(height: int, width: int, sizes: RatioTiles) -> tuple[int, int]:
    """(rows, columns) of tiles. Among equally close ratios, a grid with more tiles is chosen if the image has more than half
    of its pixels."""
    found, nearest = (1, 1), math.inf
    counts = range(1, sizes.most + 1)
    if sizes.by == "scale":
        shapes = sorted(
            ((r, c) for c in counts for r in counts if r * c <= sizes.most), key=math.prod
        )
        scales = {x: min(x[1] * sizes.tile / width, x[0] * sizes.tile / height) for x in shapes}
        larger = {x: scale for x, scale in scales.items() if scale >= 1}
        return (
            min(larger, key=larger.__getitem__) if larger else max(scales, key=scales.__getitem__)
        )
    grids = [(r, c) for c in counts for r in counts if sizes.least <= r * c <= sizes.most]
    for rows, columns in sorted(grids, key=math.prod):
        away = abs(width / height - columns / rows)
        large = width * height > 0.5 * sizes.tile**2 * rows * columns
        if away < nearest or (away == nearest and large):
            found, nearest = (rows, columns), away
    return found


def pinpoint(height: int, width: int, sizes: PinpointTiles) -> tuple[int, int]:
    """(height, width) of the size that keeps most of the image's pixels; among equals the first of those with the smallest
    area."""

    def kept(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        pixels = min(int(width * scale) * int(height * scale), height * width)
        return pixels, pixels - size[0] * size[1]

    return max(sizes.sizes, key=kept)


def within_pinpoint(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """(height, width) of the image scaled to fit into `size`."""
    by_height, by_width = size[0] / height, size[1] / width
    if by_width < by_height:
        return min(math.ceil(height * by_width), size[0]), size[1]
    return size[0], min(math.ceil(width * by_height), size[1])


def without_padding(height: int, width: int, grid: PatchGrid) -> PatchGrid:
    """The central part of a grid that an image with this aspect ratio covers."""
    rows, columns = grid
    if width / height > columns / rows:
        return PatchGrid(
            rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns
        )
    return PatchGrid(rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2)


def around_square(height: int, width: int, side: int) -> tuple[int, int]:
    """(height, width) after scaling the shorter side to `side`, in proportion."""
    if width <= height:
        return int(side * height / width), side
    return side, int(side * width / height)


MAX_SIDE = 4096
"""Longest side of a scaled picture that is cut into tiles."""


def scaled_for_tiles(height: int, width: int, longest: int) -> tuple[int, int]:
    """(height, width) with the longer side `longest` and the other one even; at most MAX_SIDE."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > MAX_SIDE:
        width, height = MAX_SIDE, int(MAX_SIDE / ratio)
    elif height > width and height > MAX_SIDE:
        height, width = MAX_SIDE, int(MAX_SIDE * ratio)
    return max(height, 1), max(width, 1)


def whole_tiles(height: int, width: int, tile: int) -> tuple[int, int]:
    """(height, width) as multiples of `tile`: the longer side is rounded up, then the other in
    proportion and up."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return height, width


MAX_RATIO = 200
"""Maximum ratio of an image's sides."""


def within_pixels(height: int, width: int, sizes: PixelRange) -> tuple[int, int]:
    """(height, width) as multiples of the factor, within the bounds of `sizes`, in about the same
    aspect ratio."""
    factor = sizes.factor
    if sizes.short == "scaled" and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    to_height, to_width = round(height / factor) * factor, round(width / factor) * factor
    if sizes.short == "clamped":
        to_height, to_width = max(factor, to_height), max(factor, to_width)
    if to_height * to_width > sizes.max_pixels:
        shrink = math.sqrt((height * width) / sizes.max_pixels)
        to_height = max(factor, math.floor(height / shrink / factor) * factor)
        to_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif to_height * to_width < sizes.min_pixels:
        grow = math.sqrt(sizes.min_pixels / (height * width))
        to_height = math.ceil(height * grow / factor) * factor
        to_width = math.ceil(width * grow / factor) * factor
    return to_height, to_width
