"""Weights that several layers share, expanded to one per layer (`ModelSpec.shared`). No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from slipstream.errors import CheckpointError
from slipstream.model.stored.parts import Stored
from slipstream.spec.model import SharedTensor


def of_layers(stored: Iterable[Stored], made: Mapping[str, SharedTensor]) -> Iterator[Stored]:
    """Yields the tensors `stored`, with those in `made` instead of the tensors that they are
    computed from. CheckpointError names a missing one."""
    parts = {part: part for of in made.values() for part in of if part is not None}
    parts |= {name: name for name in made}
    parts |= {name.removeprefix("model."): name for name in parts}
    found = dict[str, Stored]()
    for tensor in stored:
        if tensor[0] in parts:
            found[parts[tensor[0]]] = tensor
        else:
            yield tensor
    for name, (base, down, up) in made.items():
        for part in (base, down, up):
            if part is not None and part not in found:
                raise CheckpointError(f"the checkpoint lacks {part}", field=part)
        _, shape, read = found[base]
        if down is None or up is None:
            yield name, shape, read
            continue
        inner, outer = found[down], found[up]
        if inner[1][1:] != shape[1:] or outer[1][:1] != shape[:1] or outer[1][1] != inner[1][0]:
            raise CheckpointError(
                f"{up} and {down} have shapes {list(outer[1])} and {list(inner[1])}, which are no adapter of {list(shape)}",
                field=up,
            )
        yield name, shape, partial(_sum, read, inner[2], outer[2])


def _sum(base: Callable[[], Any], down: Callable[[], Any], up: Callable[[], Any]) -> Any:
    """Returns base + up · down in float32."""
    return _float32(base()) + _float32(up()) @ _float32(down())


def _float32(x: Any) -> Any:
    return x.astype(np.float32) if isinstance(x, np.ndarray) else x.float()
