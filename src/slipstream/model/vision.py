"""Runs an image encoder (`spec/media/vision.py`): images → token embeddings. Uses torch and the
decoder's op set.

Linear layers and norms run through the op set. The steps between them (cutting patches, positions,
window order) only move data, and are plain torch.

Shapes: N patches of all pictures, E the encoder's hidden size, C channels, P a patch's side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.kernels.layouts import NormParams
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.ops import OpSet
from slipstream.kernels.packed_parts import PackedParts
from slipstream.kernels.weights.forms import Linear
from slipstream.model.building import build_norm
from slipstream.model.layers.residual import normed
from slipstream.model.media import Layout, MediaTower
from slipstream.spec.media.vision import (
    AxialRopeSpec,
    AxisPositionSpec,
    ConcatConnector,
    Connector,
    GatedMergeConnector,
    GridPositionSpec,
    ImageProcessing,
    MLPConnector,
    PatchGrid,
    PatchMergeConnector,
    PoolConnector,
    ScaledPoolConnector,
    VisionSpec,
)

LongArray = npt.NDArray[np.int64]

PROBE_GROUPS = 17
"""Side, in patch groups, of the image whose memory is measured.

It is not a multiple of a window's side, so that windows of different lengths, which need another
attention kernel, also run at start-up.
"""


@dataclass(frozen=True, slots=True)
class Projector:
    """The linear layers and the norm of a connector; None for absent ones. `standard`: (shift,
    gain)."""

    spec: Connector
    norm: NormParams | None
    up: Linear | None
    out: Linear
    standard: tuple[Tensor, Tensor] | None = None
    merge: Linear | None = None

    def __call__(self, ops: OpSet, h: Tensor, merge: int) -> Tensor:
        """States [N, E] → tokens [N / merge², text size]."""
        rows: Any = h
        if isinstance(self.spec, PoolConnector):
            rows = rows.unflatten(0, (-1, merge**2)).mean(1)
        if isinstance(self.spec, ScaledPoolConnector):
            rows = rows.unflatten(0, (-1, merge**2)).mean(1, dtype=torch.float32).to(h.dtype)
            rows = rows.float() * h.shape[1] ** 0.5
            if self.standard is not None:
                shift, gain = self.standard
                rows = (rows - shift.float()) * gain.float()
            rows = rows.to(h.dtype)
        if self.norm is not None:
            rows = normed(ops, self.norm, rows.reshape(-1, self.norm.weight.shape[-1]))
        if self.merge is not None:
            rows = ops.linear(by_channel(rows, merge), self.merge)
        elif not isinstance(self.spec, PoolConnector | ScaledPoolConnector):
            rows = rows.reshape(-1, merge**2 * h.shape[1])
        if self.up is not None and isinstance(self.spec, MLPConnector | PatchMergeConnector):
            gated = isinstance(self.spec, MLPConnector) and self.spec.gated
            rows = ops.activation(ops.linear(rows, self.up), self.spec.activation, gated=gated)
        return ops.linear(rows, self.out)


@dataclass(frozen=True, slots=True)
class GatedMerger:
    """The linear layers and the norm of a `GatedMergeConnector`."""

    spec: GatedMergeConnector
    merge: Linear
    inner: Linear
    norm: NormParams
    up: Linear
    out: Linear

    def __call__(self, ops: OpSet, h: Tensor, merge: int) -> Tensor:
        """States [N, E] → tokens [N / merge², text size]."""
        rows = ops.linear(ops.linear(by_channel(h, merge), self.merge), self.inner)
        rows = ops.linear(ops.activation(normed(ops, self.norm, rows), "gelu"), self.up)
        return ops.linear(ops.activation(rows, self.spec.activation, gated=True), self.out)


def by_channel(h: Tensor, merge: int) -> Tensor:
    """States [N, E] → [N / merge², E · merge²]: each channel of a group's states, one after the other."""
    found: Tensor = h.unflatten(0, (-1, merge**2)).transpose(1, 2).flatten(1)
    return found


class ImageTower(MediaTower):
    """The image encoder that `spec` describes."""

    spec: VisionSpec

    def __init__(
        self,
        spec: VisionSpec,
        processing: ImageProcessing,
        parameters: MutableMapping[str, Tensor],
        ops: OpSet,
    ) -> None:
        super().__init__(spec, parameters, ops)
        own, linear = self._own, self._linear
        self.patch = linear("patch")
        self.patch_norm, self.first_norm = (
            None if norm is None else build_norm(norm, f"media.{name}", own)
            for name, norm in (("patch_norm", spec.patch_norm), ("first_norm", spec.first_norm))
        )
        self.class_token = own.pop("media.class_token.weight", None)
        self.positions = own.pop("media.positions.weight", None)
        self.row_end = own.pop("media.row_end.weight", None)
        if isinstance(spec.position, AxisPositionSpec) and self.positions is not None:
            self.positions = self.positions.flatten(0, 1)

        def projector(s: Connector, name: str) -> Projector | GatedMerger:
            norm, standard = None, None
            if isinstance(s, GatedMergeConnector):
                own_norm = build_norm(s.norm, f"media.{name}.norm", own)
                first, inner, wide, last = (
                    linear(f"{name}.{x}") for x in ("merge", "in", "up", "out")
                )
                return GatedMerger(s, first, inner, own_norm, wide, last)
            if isinstance(s, ScaledPoolConnector):
                norm = NormParams(
                    kind="rms",
                    weight=torch.ones(spec.hidden_size, dtype=self.dtype, device=self.device),
                    eps=s.eps,
                )
                if s.standardized:
                    parts = (own.pop(f"media.{name}.{x}.weight") for x in ("shift", "gain"))
                    standard = (next(parts), next(parts))
            elif not isinstance(s, ConcatConnector) and s.norm is not None:
                norm = build_norm(s.norm, f"media.{name}.norm", own)
            merges = isinstance(s, PatchMergeConnector)
            up = linear(f"{name}.up") if merges or isinstance(s, MLPConnector) else None
            merge = linear(f"{name}.merge") if merges else None
            return Projector(s, norm, up, linear(f"{name}.out"), standard, merge)

        self.connector = projector(spec.connector, "connector")
        self.deepstack: dict[int, Projector | GatedMerger] = {}
        if (s := spec.deepstack) is not None:
            self.deepstack = {
                x: projector(s.connector, f"deepstack.{i}") for i, x in enumerate(s.layers)
            }
        assert not own, f"unused: {list(own)}"
        self._scale = processing.scale
        self._mean, self._std = (
            torch.tensor(x, dtype=torch.float32, device=self.device)
            for x in (processing.mean, processing.std)
        )
        self._layout = lru_cache(maxsize=8)(self._make_layout)

    @torch.inference_mode()
    def __call__(
        self, pictures: Sequence[Tensor], sizes: Sequence[tuple[int, ...]] = ()
    ) -> list[Tensor]:
        """Pixels, uint8 [height, width, C], in whole groups of patches → token embeddings of each
        image, concatenated with those for DeepStack: [num_tokens, (1 + layers) · text size].
        `sizes`: rows and columns of tokens, then `MediaSpan.inner`; required for models with
        pinpoints."""
        if self.row_end is None:
            return self._in_passes(pictures)
        grid = self.spec.position
        assert isinstance(grid, GridPositionSpec)
        cut = [tiles_of(picture, grid.side * self.spec.patch_size) for picture in pictures]
        encoded = iter(self._in_passes([tile for tiles in cut for tile in tiles.flatten(0, 1)]))
        found = list[Tensor]()
        for i, tiles in enumerate(cut):
            own = [next(encoded) for _ in range(tiles.shape[0] * tiles.shape[1])]
            if sizes and sizes[i][:2] != (grid.side, grid.side):
                own = [joined(torch.stack(own), tiles.shape[0], sizes[i], self.row_end)]
            found.append(own[0])
        return found

    def probe(self) -> int:
        s = self.spec
        grid = s.position if isinstance(s.position, GridPositionSpec) else None
        side = s.patch_size * (grid.side if grid and grid.fixed else PROBE_GROUPS * s.merge)
        self([torch.zeros(side, side, s.num_channels, dtype=torch.uint8, device=self.device)])
        return -(-self.most_patches // s.grid(side, side).num_patches)

    def _size(self, given: Tensor) -> int:
        return self.spec.grid(*given.shape[:2]).num_patches

    def _encode(self, pictures: Sequence[Tensor]) -> list[Tensor]:
        spec, ops = self.spec, self.ops
        grids = tuple(spec.grid(*picture.shape[:2]) for picture in pictures)
        layout = self._layout(grids)
        if len(set(grids)) == 1:
            rows = self._patches(torch.stack(list(pictures)))
        else:
            rows = torch.cat([self._patches(picture[None]) for picture in pictures])
        h = ops.linear(rows, self.patch)
        if self.patch_norm is not None:
            h = normed(ops, self.patch_norm, h)
        if layout.positions is not None and self.positions is not None:
            h = h + self._positions(layout.positions, layout.weights)
        if layout.inner is not None:
            h = self._with_class_tokens(h, layout.inner, len(grids))
        if self.first_norm is not None:
            h = normed(ops, self.first_norm, h)
        if layout.order is not None:
            h = h.unflatten(0, (-1, spec.merge**2))[layout.order].flatten(0, 1)
        stacked = list[Tensor]()
        for i, layer in enumerate(self.layers):
            h = layer(ops, h, layout.whole if i in spec.full_layers else layout.windows, layout)
            if i in self.deepstack:
                stacked.append(self.deepstack[i](ops, h, spec.merge))
        if layout.inner is not None:
            h = h[layout.inner]
        if self.final_norm is not None:
            h = normed(ops, self.final_norm, h)
        tokens = self.connector(ops, h, spec.merge)
        if stacked:
            tokens = torch.cat((tokens, *stacked), dim=1)
        if layout.order is not None:
            ordered = tokens
            tokens = torch.empty_like(ordered)
            tokens[layout.order] = ordered
        return list(tokens.split([spec.num_tokens(grid) for grid in grids]))

    def _with_class_tokens(self, h: Tensor, inner: Tensor, num_pictures: int) -> Tensor:
        """[N, E] → [N + pictures, E], with a class token before each picture's patches."""
        assert self.class_token is not None
        assert self.positions is not None
        token = self.class_token + self.positions[:1]
        found = token.to(h.dtype).repeat(len(h) + num_pictures, 1)
        found[inner] = h
        return found

    def _patches(self, pixels: Tensor) -> Tensor:
        """Pixels [B, height, width, C] → patches in group order, [N, C · frames · P · P] in the
        encoder's dtype."""
        s = self.spec
        values = (pixels.float() * self._scale - self._mean) / self._std
        grid = s.grid(*pixels.shape[1:3])
        cut = values.view(
            len(pixels),
            grid.height // s.merge,
            s.merge,
            s.patch_size,
            grid.width // s.merge,
            s.merge,
            s.patch_size,
            -1,
        )
        order = (3, 6, 7) if s.channels_last else (7, 3, 6)
        rows = cut.permute(0, 1, 4, 2, 5, *order).flatten(0, 4)  # [N, C, P, P], or [N, P, P, C]
        if s.num_frames is not None:
            rows = rows[:, :, None].expand(-1, -1, s.num_frames, -1, -1)
        return rows.flatten(1).to(self.dtype)

    def _positions(self, index: Tensor, weights: Tensor | None) -> Tensor:
        """Weighted sums [N, E] of rows of the position table."""
        assert self.positions is not None
        table, found = self.positions, None
        for i in range(index.shape[1]):
            part = table[index[:, i]]
            if weights is not None:
                part = part.float() * weights[:, i : i + 1]
            found = part if found is None else found + part
        assert found is not None
        return found.to(self.dtype)

    def _make_layout(self, grids: tuple[PatchGrid, ...]) -> Layout:
        spec = self.spec
        sizes = np.array([grid.num_patches for grid in grids], np.int64)
        extra = int(spec.class_token)
        whole = PackedParts.of((sizes + extra).tolist(), self.device)
        inner = None
        if extra:
            inner = self._placed(
                np.arange(sizes.sum()) + np.repeat(np.arange(len(sizes)) + 1, sizes)
            )
        rows, columns = (
            np.concatenate([patch_places(grid, spec.merge)[axis] for grid in grids])
            for axis in range(2)
        )
        positions = weights = cos_sin = order = None
        windows = whole
        if isinstance(grid_spec := spec.position, AxisPositionSpec):
            both_axes = np.stack((columns, grid_spec.size + rows), axis=1)
            positions = self._placed(both_axes)
        elif grid_spec is not None:
            side = grid_spec.side
            if grid_spec.read == "fractions":
                found = [grid_positions(grid, side, spec.merge)[:, None] for grid in grids]
                positions = self._placed(np.concatenate(found))
            elif not grid_spec.fixed:
                between = BETWEEN[grid_spec.read]
                both = levelled([between(grid, side, spec.merge) for grid in grids])
                positions, weights = (
                    self._placed(np.concatenate(x)) for x in zip(*both, strict=True)
                )
            else:
                positions = self._placed((rows * side + columns)[:, None] + extra)
        if spec.rope is not None:
            cos_sin = axial_rotations(spec.rope, rows, columns)
        if spec.window is not None:
            starts = np.cumsum([0, *(sizes // spec.merge**2)])
            groups, lengths = list[LongArray](), list[int]()
            for start, grid in zip(starts, grids, strict=False):
                for window in group_windows(
                    PatchGrid(grid.height // spec.merge, grid.width // spec.merge), spec.window
                ):
                    groups.append(start + window)
                    lengths.append(len(window) * spec.merge**2)
            flat = np.concatenate(groups)
            order, windows = self._placed(flat), PackedParts.of(lengths, self.device)
            if cos_sin is not None:
                cos_sin = cos_sin.reshape(len(flat), spec.merge**2, -1)[flat].reshape(
                    len(cos_sin), -1
                )
        turned = None if cos_sin is None else torch.from_numpy(cos_sin).to(self.device)
        meta = self._meta(len(rows))
        interleaved = spec.rope is not None and spec.rope.twined
        return Layout(whole, windows, positions, weights, turned, meta, order, inner, interleaved)

    def _meta(self, count: int) -> AttentionMetadata:
        """Metadata for `rope_and_cache`, which reads only positions and slots."""
        index = torch.arange(count, device=self.device)
        none = index[:0].int()
        return AttentionMetadata(
            query_start_loc=none,
            seq_lens=none,
            block_table=none[None],
            positions=index,
            slot_mapping=index,
            num_decodes=0,
            max_query_len=0,
            max_seq_len=0,
        )

    def _placed(self, index: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(index)).to(self.device)


def tiles_of(picture: Tensor, side: int) -> Tensor:
    """Cuts an image into tiles: [height, width, C] → [rows, columns, side, side, C]."""
    cut: Tensor = picture.unflatten(1, (-1, side)).unflatten(0, (-1, side))
    return cut.transpose(1, 2)


def joined(tiles: Tensor, num_rows: int, size: tuple[int, ...], row_end: Tensor) -> Tensor:
    """Token embeddings of an image's tiles [n, side², E], in `num_rows` rows → those in the centre of their grid, with
    `row_end` [1, E] after each row. `size`: rows and columns, `row_end` included, then possibly the size of the centre
    from which the tokens are scaled down. A single row with one tile keeps all tokens."""
    if size == (1, tiles.shape[1] + 1):
        return torch.cat((tiles[0], row_end.to(tiles)))
    side = math.isqrt(tiles.shape[1])
    grid = tiles.view(num_rows, -1, side, side, tiles.shape[-1]).transpose(1, 2).flatten(2, 3)
    grid = grid.flatten(0, 1)  # [rows, columns, E]
    rows, columns = size[2:] or (size[0], size[1] - 1)
    top, left = (grid.shape[0] - rows) // 2, (grid.shape[1] - columns) // 2
    grid = grid[top : top + rows, left : left + columns]
    if size[2:]:
        rows, columns = size[0], size[1] - 1
        planes = grid.permute(2, 0, 1)[None]
        grid = torch.nn.functional.interpolate(planes, (rows, columns), mode="bilinear")[0]
        grid = grid.permute(1, 2, 0)
    return torch.cat((grid, row_end.to(grid).expand(rows, 1, -1)), dim=1).flatten(0, 1)


def patch_places(grid: PatchGrid, merge: int) -> tuple[LongArray, LongArray]:
    """The row and the column of each patch, in group order."""
    rows, columns = np.indices(grid, np.int64)

    def grouped(x: LongArray) -> LongArray:
        cut = x.reshape(grid.height // merge, merge, grid.width // merge, merge)
        flat: LongArray = cut.swapaxes(1, 2).reshape(-1)
        return flat

    return grouped(rows), grouped(columns)


def grid_positions(grid: PatchGrid, side: int, merge: int) -> LongArray:
    """Row, for each patch of a grid, of a table of side × side positions at the same fractions of
    its sides.

    Fractions are compared in float32 with torch's bucket boundaries, as in training. With 19, 25 or
    29 patches per side, even a grid of the table's own size does not read each row exactly once.
    """
    rows, columns = patch_places(grid, merge)
    ends = torch.arange(1 / side, 1.0, 1 / side).numpy()

    def buckets(count: int) -> LongArray:
        at = np.arange(count, dtype=np.float32) * (np.float32(1.0) / np.float32(count))
        found: LongArray = np.searchsorted(
            ends, np.minimum(at, np.float32(1 - 1e-6)), side="right"
        ).astype(np.int64)
        return found

    return buckets(grid.height)[rows] * side + buckets(grid.width)[columns]


def between_cells(
    grid: PatchGrid, side: int, merge: int
) -> tuple[LongArray, npt.NDArray[np.float32]]:
    """(the four cells of a side × side position table around each patch, their bilinear weights),
    both [N, 4]. The corners of grid and table coincide."""

    def near(at: LongArray, count: int) -> tuple[LongArray, npt.NDArray[np.float32]]:
        where = at.astype(np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
        low = np.floor(where)
        part = (where - low)[:, None]
        cells = np.minimum(low.astype(np.int64)[:, None] + np.arange(2), side - 1)
        return cells, np.concatenate((1 - part, part), axis=1)

    return crossed(near, grid, side, merge)


def among_cells(
    grid: PatchGrid, side: int, merge: int
) -> tuple[LongArray, npt.NDArray[np.float32]]:
    """(the sixteen cells of a side × side position table around each patch, their weights), both [N, 16]:
    Keys' cubic kernel with a = −0.75. The edges of grid and table coincide; cells beyond them are clamped."""

    def near(at: LongArray, count: int) -> tuple[LongArray, npt.NDArray[np.float32]]:
        where = (at.astype(np.float32) + np.float32(0.5)) * np.float32(side) / np.float32(count)
        where = where - np.float32(0.5)
        low = np.floor(where)
        steps = np.arange(-1, 3)
        away = np.abs((where - low)[:, None] - steps.astype(np.float32))
        close = (np.float32(1.25) * away - np.float32(2.25)) * away * away + np.float32(1)
        far = np.float32(-0.75) * (((away - 5) * away + 8) * away - 4)
        cells = np.clip(low.astype(np.int64)[:, None] + steps, 0, side - 1)
        return cells, np.where(away <= 1, close, far).astype(np.float32)

    return crossed(near, grid, side, merge)


def covered_cells(
    grid: PatchGrid, side: int, merge: int
) -> tuple[LongArray, npt.NDArray[np.float32]]:
    """(cells of a side × side position table that each patch covers, their weights): a triangular kernel as
    wide as two cells, or as two patches if these are wider. The edges of grid and table coincide."""

    def near(at: LongArray, count: int) -> tuple[LongArray, npt.NDArray[np.float32]]:
        scale = np.float32(side) / np.float32(count)
        middle = (at.astype(np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
        away = np.abs(np.arange(side, dtype=np.float32) - middle[:, None])
        weights = np.maximum(1 - away / max(scale, np.float32(1)), 0)
        weights /= weights.sum(1, keepdims=True)
        most = int((weights > 0).sum(1).max())
        first = np.minimum((weights > 0).argmax(1), side - most)
        cells = first[:, None] + np.arange(most)
        return cells, np.take_along_axis(weights, cells, 1).astype(np.float32)

    return crossed(near, grid, side, merge)


def levelled(
    found: Sequence[tuple[LongArray, npt.NDArray[np.float32]]],
) -> list[tuple[LongArray, npt.NDArray[np.float32]]]:
    """Cells and weights of several images, padded to the same number of columns with weight 0."""
    most = max(cells.shape[1] for cells, _ in found)

    def wide(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.pad(x, ((0, 0), (0, most - x.shape[1])))

    return [(wide(cells), wide(weights)) for cells, weights in found]


def crossed(
    near: Callable[[LongArray, int], tuple[LongArray, npt.NDArray[np.float32]]],
    grid: PatchGrid,
    side: int,
    merge: int,
) -> tuple[LongArray, npt.NDArray[np.float32]]:
    """(cells that are near in both directions, products of their weights)."""
    rows, columns = patch_places(grid, merge)
    (above, by_row), (left, by_column) = near(rows, grid.height), near(columns, grid.width)
    cells, weights = (
        above[:, :, None] * side + left[:, None],
        by_row[:, :, None] * by_column[:, None],
    )
    return cells.reshape(len(rows), -1), weights.reshape(len(rows), -1)


BETWEEN = {"bilinear": between_cells, "bicubic": among_cells, "antialiased": covered_cells}
"""Interpolation function of a position table by `GridPositionSpec.read`."""


def axial_rotations(
    spec: AxialRopeSpec, rows: LongArray, columns: LongArray
) -> npt.NDArray[np.float32]:
    """Rotary table of patches, float32 [N, head_dim]: cosines of each patch's angles (by row, then
    by column), then their sines."""
    half = spec.head_dim // 2
    powers = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    frequencies = np.float32(1.0) / np.power(np.float64(spec.theta), powers).astype(np.float32)
    axes = (columns, rows) if spec.columns_first else (rows, columns)
    if spec.alternate:
        powers = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
        each = np.float32(1.0) / np.power(np.float64(spec.theta), powers).astype(np.float32)
        of_axes = each[::2], each[1::2]
    else:
        of_axes = frequencies, frequencies
    each_axis = [np.outer(x.astype(np.float32), f) for x, f in zip(axes, of_axes, strict=True)]
    angles = (
        np.stack(each_axis, axis=2).reshape(len(rows), -1)
        if spec.twined
        else np.concatenate(each_axis, axis=1)
    )
    return np.concatenate((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)


def group_windows(groups: PatchGrid, side: int) -> list[LongArray]:
    """The groups of each window of an image, row by row. Windows at the right and lower edges may
    be smaller."""
    index = np.arange(groups.num_patches, dtype=np.int64).reshape(groups)
    return [
        index[top : top + side, left : left + side].reshape(-1)
        for top in range(0, groups.height, side)
        for left in range(0, groups.width, side)
    ]
