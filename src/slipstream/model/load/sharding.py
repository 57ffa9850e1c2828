"""One rank's part of a checkpoint. Tensors are cut when they are read, so later code handles a
smaller model.

`Sharded.tensors` converts the stream of a checkpoint's tensors to the rank's parts, and
`Sharded.names` has their placements. Tensors of which the rank has nothing are never read. Files
are memory-mapped, so only the pages of the rank's part are read if a tensor has the row order of
its parameter.

Quantized weights are cut at the boundaries of elements that share a scale or a word (`_UNITS`). A
part that begins within one is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.errors import CheckpointError, ConfigError
from slipstream.kernels.weights.forms import BlockLinear, BlockRows, Linear
from slipstream.model.load.checkpoint import is_shaped, placed_shape, stored_shape, turned
from slipstream.model.load.pulled import Pulled
from slipstream.model.load.weights import transform
from slipstream.model.stored.parts import Stored
from slipstream.model.stored.rounded import PARTS
from slipstream.spec.families.names import canonical
from slipstream.spec.model import ModelSpec, Shape, parameters
from slipstream.spec.parallel import ParameterShard, Range, Shard, cuts, split_shapes, split_spec
from slipstream.spec.parameters import Deinterleave, Placement
from slipstream.spec.scheme import WeightFormat
from slipstream.spec.stored.gguf_types import BY_NAME
from slipstream.spec.stored.native_formats import native_group_size

Blocks: TypeAlias = "npt.NDArray[np.uint8]"


class Sharded:
    """One rank's part of a model.

    `names` maps the checkpoint's names to placements of the rank's tensors. `absent`: names of
    tensors of which the rank has nothing.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shard: Shard,
        names: Mapping[str, Placement],
        prefixes: tuple[str, ...],
        formats: Mapping[str, WeightFormat],
        method: str | None,
    ) -> None:
        """Computes the rank's shapes and names. `names` and `prefixes` are the family's.

        `formats`, by our names: those of weights that stay as stored. `method`: the tool that
        quantized them.
        """
        self.formats, self._method = formats, method
        self.spec, self.shapes, self.cuts = (
            split_spec(spec, shard),
            split_shapes(spec, shard),
            cuts(spec, shard),
        )
        self._whole, self._names, self._prefixes = parameters(spec), names, prefixes
        self.names: dict[str, Placement] = {}
        self._own: dict[str, tuple[Range, ...]] = {}
        self.absent: set[str] = set()
        for name, place in names.items():
            cut = self.cuts.get(place.target)
            if place.target not in self.shapes:  # on another pipeline stage
                found = None
            else:
                found = (
                    (place, ()) if cut is None else cut.placed(place, self._whole[place.target][0])
                )
            if found is None:
                self.absent.add(name)
            else:
                self.names[name], self._own[name] = found

    def of_parameter(self, name: str, value: Tensor) -> Tensor:
        """Returns the rank's part of a whole parameter."""
        return cut_whole(value, self.cuts[name], self.shapes[name]) if name in self.cuts else value

    def tensors(self, stored: Iterable[Stored]) -> Iterator[Stored]:
        """Yields the rank's parts of a checkpoint's tensors."""
        for name, shape, read in stored:
            stem, _, part = name.rpartition(".")
            key = canonical(name, self._prefixes, self._names)
            if key is None and part in PARTS:
                key = canonical(f"{stem}.weight", self._prefixes, self._names)
            if key is None and name.endswith(("_blocks", "_scales")):
                key = canonical(name.rpartition("_")[0], self._prefixes, self._names)
                part = name.rpartition("_")[2]
            if key in self.absent:
                continue
            cut = None if key is None else self.cuts.get(self._names[key].target)
            if key is None or cut is None:
                yield name, shape, read
                continue
            place, own = self._names[key], self._own[key]
            if part in ("blocks", "scales") and name.endswith(f"_{part}"):
                yield self._mxfp4(name, shape, read, place, cut, own)
                continue
            fmt = self.formats.get(place.target)
            if fmt is not None and (units := _units(part, fmt, self._method)) is not None:
                yield self._of_format(name, shape, read, cut, own, units)
                continue
            yield self._dense(key, name, shape, read, place, cut, own)

    def _dense(
        self,
        key: str,
        name: str,
        shape: Shape,
        read: Callable[[], Tensor],
        place: Placement,
        cut: ParameterShard,
        own: tuple[Range, ...],
    ) -> Stored:
        """Cuts this rank's part out of a tensor that is not quantized. CheckpointError if its shape is not the config's."""
        full = placed_shape(self._whole[place.target], place)
        place = turned(place, shape, full)
        expected = stored_shape(full, place.transform)
        if not is_shaped(shape, expected):
            raise CheckpointError(
                f"the tensor {name!r} has shape {list(shape)}, and the config asks for {list(expected)}",
                field=name,
            )

        def part() -> Tensor:
            value = transform(read().view(expected), place.transform)
            if place.copies is not None:
                value = value[cut.first : cut.first + cut.count]
            dim = 0 if place.copies is None else 1
            return part_of(value, own, cut.columns, dim) if cut.keep else torch.zeros_like(value)

        return name, placed_shape(self.shapes[place.target], self.names[key]), part

    def _of_format(
        self,
        name: str,
        shape: Shape,
        read: Callable[[], Tensor],
        cut: ParameterShard,
        own: tuple[Range, ...],
        units: _Units,
    ) -> Stored:
        if math.prod(shape) == 1:  # a single scale for the whole weight
            return name, shape, read
        rows = tuple((_units_before(a, units.rows, name), -(-b // units.rows)) for a, b in own)
        columns: tuple[Range, ...] | None = None
        if cut.columns is not None and units.columns:
            at = [
                tuple(_units_before(x, units.columns, name) for x in part) for part in cut.columns
            ]
            columns = tuple((first, last) for first, last in at)
        is_zeros = name.endswith("qzeros")

        def part(value: Tensor) -> Tensor:
            if value.dim() == 1 and units.turned:  # g_idx: the group of each input
                return value if columns is None else value[: sum(b - a for a, b in columns)]
            # The padding's zero points equal the others, as the format's checks require.
            fill = int(value.flatten()[0]) if is_zeros and not value.is_meta else 0
            if units.turned:
                return part_of(value.mT, rows, columns, fill=fill).mT.contiguous()
            return part_of(value, rows, columns, fill=fill)

        return name, tuple(part(torch.empty(shape, device="meta")).shape), lambda: part(read())

    def _mxfp4(
        self,
        name: str,
        shape: Shape,
        read: Callable[[], Tensor],
        place: Placement,
        cut: ParameterShard,
        own: tuple[Range, ...],
    ) -> Stored:
        """Cuts MXFP4 blocks [experts, rows, in / 32, 16] or their scales [experts, rows, in / 32]."""
        columns = None
        if cut.columns is not None:
            columns = tuple(
                (_units_before(a, 32, name), _units_before(b, 32, name)) for a, b in cut.columns
            )

        def part(value: Tensor) -> Tensor:
            value = value[cut.first : cut.first + cut.count]
            if isinstance(place.transform, Deinterleave):
                value = torch.cat((value[:, ::2], value[:, 1::2]), dim=1)
            # The scale code 127 means 1.
            return part_of(value, own, columns, 1, fill=127 if value.dim() == 3 else 0)

        return name, tuple(part(torch.empty(shape, device="meta")).shape), lambda: part(read())


def part_of(
    value: Tensor,
    rows: tuple[Range, ...],
    columns: tuple[Range, ...] | None,
    dim: int = 0,
    *,
    fill: int = 0,
) -> Tensor:
    """The ranges `rows` of dimension `dim`, and `columns` of the next dimension. Ranges of padding
    get the value `fill`."""
    if columns is not None:
        value = _taken(value, columns, dim + 1, fill)
    return _taken(value, rows, dim, fill)


def _taken(value: Tensor, ranges: tuple[Range, ...], dim: int, fill: int) -> Tensor:
    if len(ranges) == 1 and ranges[0][0] >= 0:
        return value.narrow(dim, ranges[0][0], ranges[0][1] - ranges[0][0])

    def filled(size: int) -> Tensor:
        shape = [*value.shape[:dim], size, *value.shape[dim + 1 :]]
        return torch.full(shape, fill, dtype=value.dtype, device=value.device)

    return torch.cat(
        [filled(b - a) if a < 0 else value.narrow(dim, a, b - a) for a, b in ranges], dim=dim
    )


def cut_whole(value: Tensor, cut: ParameterShard, shape: Shape) -> Tensor:
    """A rank's part, of `shape`, of a whole parameter. Rows beyond the parameter's own (vocabulary
    padding) are zeros."""
    if not cut.keep:
        return torch.zeros(shape, dtype=value.dtype, device=value.device)
    copies = value.unflatten(0, (cut.copies, -1))[cut.first : cut.first + cut.count]
    rows = ((0, copies.shape[1]),) if cut.rows is None else cut.rows
    own = part_of(copies, rows, cut.columns, 1).flatten(0, 1)
    if own.shape == shape:
        return own.clone(memory_format=torch.contiguous_format)
    padded = torch.zeros(shape, dtype=value.dtype, device=value.device)
    padded[: len(own)] = own
    return padded


# --- Quantized weights ---


class _Units(NamedTuple):
    """Number of a weight's rows and columns that one element of a stored part covers; 0 columns:
    all.

    `turned`: columns are the first dimension.
    """

    rows: int
    columns: int
    turned: bool = False


def _units(part: str, fmt: WeightFormat, method: str | None) -> _Units | None:
    """The units of a stored part of a quantized weight; None if `part` is no such part."""
    group, word = fmt.group_size or 0, 2 if fmt.in_pairs else 32 // fmt.bits
    return {
        "weight": _Units(1, word if fmt.in_pairs else 1),
        "weight_scale": _Units(fmt.block_rows, group),
        "weight_scale_inv": _Units(fmt.block_rows, group),
        "weight_packed": _Units(1, word),
        "weight_zero_point": _Units(word, group),
        "qweight": _Units(8, 1, turned=True) if method == "awq" else _Units(1, 8, turned=True),
        "scales": _Units(1, group, turned=True),
        "qzeros": _Units(8, group, turned=True),
        "g_idx": _Units(1, 1, turned=True),
    }.get(part)


def _units_before(at: int, size: int, name: str) -> int:
    if at % size:
        raise _no_boundary(name, size)
    return at // size


def _no_boundary(name: str, size: int) -> ConfigError:
    return ConfigError(
        f"{name}: a rank's part would begin within {size} numbers that share a scale or a word; use fewer ranks, or weights "
        "that are not quantised yet, with quantization=",
        field="tensor_parallel_size",
    )


def check_formats(local: Sharded) -> None:
    """Checks that the rank's part of every quantized weight fits its format. ConfigError if not."""
    for name, place in local.names.items():
        fmt = local.formats.get(place.target)
        if fmt is None or place.target not in local.cuts or place.target not in local.shapes:
            continue
        if fmt.split or 32 % fmt.bits:
            what = (
                "columns of inputs that keep the model's type"
                if fmt.split
                else f"codes of {fmt.bits} bits"
            )
            raise ConfigError(
                f"{name}: weights with {what} can't be split over ranks; use tensor_parallel_size=1",
                field="tensor_parallel_size",
            )
        if place.start % fmt.block_rows:
            raise _no_boundary(name, fmt.block_rows)
        if native_group_size(fmt, *local.shapes[place.target]) is None:
            raise _no_boundary(name, fmt.group_size or 16)


def split_blocks(linears: Mapping[str, Linear], local: Sharded) -> Pulled[Linear]:
    """One rank's part of weights in GGUF types. Blocks stay memory-mapped as long as rows are cut
    in one piece."""

    def own(name: str) -> Linear:
        w = linears[name]
        if not isinstance(w, BlockLinear) or name not in local.cuts:
            return w
        return _split_linear(name, w, local.cuts[name], local.shapes[name])

    return Pulled({name: partial(own, name) for name in linears if name in local.shapes})


def _split_linear(name: str, w: BlockLinear, cut: ParameterShard, shape: Shape) -> BlockLinear:
    pieces, num_rows = [], w.weight.shape[0]
    for piece in w.pieces:
        copies = None if piece.copies == 1 else piece.copies
        place = Placement("", piece.start, piece.rows // piece.copies, None, copies)
        if (found := cut.placed(place, num_rows)) is None:
            continue
        blocks = piece.blocks.reshape(piece.copies, -1, piece.blocks.shape[1])
        if piece.order is not None:  # row i of `blocks` is row order[i], so restore the order
            blocks = np.take(blocks, np.argsort(piece.order), axis=1)
        placed, own = found
        if piece.copies > 1:
            blocks = blocks[cut.first : cut.first + cut.count]
        if cut.columns is not None:
            quant = BY_NAME[piece.type]
            at = [
                tuple(_units_before(x, quant.block_size, name) * quant.block_bytes for x in part)
                for part in cut.columns
            ]
            blocks = _blocks_of(blocks, at, 2)
        blocks = _blocks_of(blocks, own, 1)
        pieces.append(
            BlockRows(
                type=piece.type, blocks=_flat(blocks), start=placed.start, copies=placed.copies or 1
            )
        )
    return BlockLinear(
        weight=torch.empty(shape, dtype=w.weight.dtype, device="meta"),
        pieces=_with_zeros(pieces, shape[0], w),
        device=w.device,
    )


def _blocks_of(blocks: Blocks, ranges: Sequence[tuple[int, ...]], axis: int) -> Blocks:
    """Ranges of an axis. A negative start means zeros; blocks of zero bytes represent zeros in
    every type."""

    def part(first: int, last: int) -> Blocks:
        if first >= 0:
            return blocks[:, first:last] if axis == 1 else blocks[:, :, first:last]
        size = list(blocks.shape)
        size[axis] = last - first
        return np.zeros(size, np.uint8)

    return np.concatenate([part(*each) for each in ranges], axis=axis)


def _flat(blocks: Blocks) -> Blocks:
    return np.ascontiguousarray(blocks.reshape(-1, blocks.shape[-1]))


def _with_zeros(
    pieces: list[BlockRows], num_rows: int, whole: BlockLinear
) -> tuple[BlockRows, ...]:
    """The pieces extended to `num_rows` rows. Missing rows are added as zeros to the piece before
    them."""
    if not pieces:
        first = whole.pieces[0]
        row = np.zeros((num_rows, first.blocks.shape[1]), np.uint8)
        return (BlockRows(type=first.type, blocks=row, start=0, copies=first.copies),)
    made: list[BlockRows] = []
    pieces.sort(key=lambda piece: piece.start)
    ends = [piece.start for piece in pieces[1:]] + [num_rows // pieces[-1].copies]
    for piece, end in zip(pieces, ends, strict=True):
        own = piece.blocks.reshape(piece.copies, -1, piece.blocks.shape[1])
        missing = end - piece.start - own.shape[1]
        if missing > 0:
            own = np.concatenate(
                (own, np.zeros((piece.copies, missing, own.shape[2]), np.uint8)), axis=1
            )
        made.append(dataclasses.replace(piece, blocks=_flat(own)))
    return tuple(made)
