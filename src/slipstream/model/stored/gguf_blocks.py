"""A GGUF file's weights in their stored types, for op sets that can compute with such blocks.

1. A linear layer is taken if the op set supports the types of all tensors that fill it. Types may
   differ, because files store some tensors with more bits.
2. Nothing is read here. The blocks stay memory-mapped until the op set lays them out.
3. `load/weights.py` dequantizes everything else (norms, other types, transposed weights).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.kernels.weights.forms import BlockLinear, BlockRows, Linear
from slipstream.model.load.checkpoint import placed_shape, transformed
from slipstream.spec.parameters import Placement, Shape, Transform, orders_rows
from slipstream.spec.scheme import Scheme
from slipstream.spec.stored.gguf import GGUFFile
from slipstream.spec.stored.native_formats import is_product, rounds


class BlockWeights:
    """Collects the tensors whose blocks are used as stored; those that `scheme` quantizes are left
    out.

    `names` is the family's table for the file's tensors. `empty` makes a placeholder with a
    weight's shape and dtype. `device`: where the op set lays blocks out, if not in host memory.
    """

    def __init__(
        self,
        file: GGUFFile,
        names: Mapping[str, Placement],
        shapes: Mapping[str, Shape],
        types: frozenset[str],
        empty: Callable[[Shape], Any],
        scheme: Scheme | None = None,
        device: Any = None,
    ) -> None:
        tables = ("embed.weight", "layer_inputs.table.weight")
        held = {target for target in shapes if is_product(target) or target in tables}
        if scheme is not None:
            held = {target for target in held if not rounds(scheme, target)}
            if scheme.head and "head.weight" not in shapes:
                held.discard("embed.weight")  # the output head is built from it
        found: dict[str, list[BlockRows]] = {}
        self._names: dict[str, str] = {}
        for name, place in names.items():
            tensor = file.tensors.get(name)
            if tensor is None or tensor.type not in types or place.target not in held:
                continue
            if not orders_rows(place.transform):
                continue
            expected = placed_shape(shapes[place.target], place)
            copies, rows = place.copies or 1, expected[-2]
            if tuple(tensor.shape) != expected:
                raise CheckpointError(
                    f"the tensor {name!r} has shape {list(tensor.shape)}, and the model's is {list(expected)}",
                    field=name,
                )
            order = None if place.transform is None else _destinations(rows, place.transform)
            blocks = file.raw(name).reshape(copies * rows, -1)
            piece = BlockRows(
                type=tensor.type,
                blocks=blocks,
                start=place.start,
                order=order,
                copies=copies,
                release=partial(_let_go_rows, file, name, blocks.shape[1]),
            )
            found.setdefault(place.target, []).append(piece)
            self._names[name] = place.target
        # All rows or none: a weight that is partly of another type is dequantized completely.
        whole = {
            target
            for target, pieces in found.items()
            if sum(p.rows for p in pieces) == shapes[target][0]
        }
        self._names = {name: target for name, target in self._names.items() if target in whole}
        self._linears: dict[str, Linear] = {
            target: BlockLinear(weight=empty(shapes[target]), pieces=tuple(pieces), device=device)
            for target, pieces in found.items()
            if target in whole
        }

    def __contains__(self, target: str) -> bool:
        return target in self._linears

    def take(
        self, name: str, read: Callable[[], Any], find: Callable[[str], Placement | None]
    ) -> bool:
        """Whether the tensor `name` is used as stored."""
        return name in self._names

    def missing(self, names: Mapping[str, Placement]) -> list[str]:
        return []  # no weight is held partially

    def linears(self) -> dict[str, Linear]:
        return self._linears


def _let_go_rows(file: GGUFFile, name: str, row_bytes: int, begin: int, end: int) -> None:
    file.let_go(name, begin * row_bytes, end * row_bytes)


def _destinations(rows: int, transform: Transform) -> npt.NDArray[np.int32]:
    """Destination row of each stored row, int32 [rows]."""
    sources = transformed(np.arange(rows, dtype=np.int32), transform)
    return np.argsort(sources).astype(np.int32)
