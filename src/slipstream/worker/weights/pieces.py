"""Tensors of a weight update's pieces: name, shape, dtype, and a function that reads the values.

`as_value` converts a tensor or an array to the kind that this process's loader takes. No torch of its own.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import ml_dtypes
import numpy as np

from slipstream.errors import CheckpointError, RequestError
from slipstream.messages.weight_ops import BroadcastPiece
from slipstream.spec.parameters import Shape

if TYPE_CHECKING:
    from slipstream.worker.weights.group import WeightGroup

AsValue = Callable[[Any], Any]
Came: TypeAlias = tuple[str, Shape, str, Callable[[], Any]]
"""A received tensor: its name, its shape, its dtype, and a function that reads its values."""

NUMPY = {
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype("float64"),
    "BOOL": np.dtype("bool"),
    "U8": np.dtype("uint8"),
    "I8": np.dtype("int8"),
    "I16": np.dtype("int16"),
    "I32": np.dtype("int32"),
    "I64": np.dtype("int64"),
}
"""NumPy dtypes by safetensors' names. Files may have tensors of other dtypes, which can't be read."""
MAX_HEADER_BYTES = 100_000_000


def file_tensors(path: Path, as_value: AsValue) -> Iterator[Came]:
    """Yields a safetensors file's tensors. The file stays open, and is read when the weights are built.

    It is not memory-mapped, so a file truncated meanwhile raises an error, not SIGBUS. Removing it, or
    renaming another into its place, is harmless.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is no file", field="path")
    try:
        opened = path.open("rb")
        known = os.fstat(opened.fileno())
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length) if length <= MAX_HEADER_BYTES else b"")
        first = 8 + length
        header.pop("__metadata__", None)
        for name, entry in header.items():
            kind, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
                raise ValueError(f"{name} has no shape or place")
            if not begin <= end <= known.st_size - first:
                raise ValueError(f"{name} lies outside the file, which is cut")
            dtype = NUMPY.get(kind)
            if dtype is not None and math.prod(shape) * dtype.itemsize != end - begin:
                raise ValueError(f"the bytes of {name} are not those of its shape")
            read = partial(_read, opened, path, known, name, dtype, shape, first + begin)
            yield (
                name,
                shape,
                str(kind).lower() if dtype is None else dtype.name,
                _converted(read, as_value),
            )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", field="path") from error


def _read(
    opened: BinaryIO,
    path: Path,
    known: os.stat_result,
    name: str,
    dtype: Any,
    shape: Shape,
    begin: int,
) -> Any:
    if dtype is None:
        raise CheckpointError(f"{name} is of a type that can't be read", field=name)
    made = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
    done = 0
    while done < made.size:
        if not (count := os.preadv(opened.fileno(), [made.data[done:]], begin + done)):
            break
        done += count
    now = os.fstat(opened.fileno())
    if done < made.size or (now.st_size, now.st_mtime_ns) != (known.st_size, known.st_mtime_ns):
        raise CheckpointError(
            f"{path} was changed after it came; abort the update, and rename new files into place",
            field="path",
        )
    return made.view(dtype).reshape(shape)


def kept_tensors(tensors: Mapping[str, Any], as_value: AsValue) -> Iterator[Came]:
    """Yields copies of this process's own tensors or arrays, on the same devices."""
    for name, value in tensors.items():
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            raise RequestError(f"{name!r} is neither a tensor nor an array", field="tensors")
        kept = value.detach().clone() if hasattr(value, "data_ptr") else np.array(value)
        kind = str(value.dtype).removeprefix("torch.")
        yield name, tuple(kept.shape), kind, _converted(lambda kept=kept: kept, as_value)  # type: ignore[misc]


def broadcast_tensors(
    piece: BroadcastPiece, group: WeightGroup, as_value: AsValue
) -> Iterator[Came]:
    """Yields the tensors that a trainer broadcasts, each after it was received."""
    deadline = group.deadline()
    for info in piece.tensors:
        kept = group.receive(info.shape, info.dtype, source=piece.source, deadline=deadline)
        yield info.name, info.shape, info.dtype, _converted(lambda kept=kept: kept, as_value)  # type: ignore[misc]


def _converted(read: Callable[[], Any], as_value: AsValue) -> Callable[[], Any]:
    return lambda: as_value(read())
