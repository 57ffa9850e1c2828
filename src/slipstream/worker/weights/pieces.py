"""Tensors of an update's pieces, as a checkpoint's: name, shape, and a function that reads one.

`as_value` makes a tensor or an array what the loader of this process takes. No torch of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import CheckpointError, RequestError
from slipstream.messages.weight_ops import DTYPES, BroadcastPiece
from slipstream.model.load.checkpoint import safetensors_arrays
from slipstream.model.stored.parts import Stored

if TYPE_CHECKING:
    from slipstream.worker.weights.group import WeightGroup

AsValue = Callable[[Any], Any]


def file_tensors(path: Path, as_value: AsValue) -> Iterator[Stored]:
    """Yields a safetensors file's tensors. The file is mapped, and read when the weights are made;
    removing it meanwhile is harmless."""
    if not path.is_file():
        raise CheckpointError(f"{path} is no file", field="path")
    for name, shape, read in safetensors_arrays(path):
        yield name, tuple(shape), _converted(read, as_value)


def kept_tensors(tensors: Mapping[str, Any], as_value: AsValue) -> Iterator[Stored]:
    """Yields copies of a process's own tensors or arrays, on the devices where they are."""
    for name, value in tensors.items():
        kind = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
        if kind not in DTYPES:
            raise RequestError(f"{name} is of {kind}; send one of {', '.join(DTYPES)}", field=name)
        kept = value.detach().clone() if hasattr(value, "data_ptr") else np.array(value)
        yield name, tuple(kept.shape), _converted(lambda kept=kept: kept, as_value)  # type: ignore[misc]


def broadcast_tensors(
    piece: BroadcastPiece, group: WeightGroup, as_value: AsValue
) -> Iterator[Stored]:
    """Yields the tensors that a trainer broadcasts. Each has come when it is yielded."""
    for info in piece.tensors:
        kept = group.receive(info.shape, info.dtype, source=piece.source)
        yield info.name, info.shape, _converted(lambda kept=kept: kept, as_value)  # type: ignore[misc]


def _converted(read: Callable[[], Any], as_value: AsValue) -> Callable[[], Any]:
    return lambda: as_value(read())
