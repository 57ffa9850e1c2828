"""Fills a model's parameters from a stream of named tensors, without holding the model twice.

Every parameter is allocated once, on its device, in its final type. Each checkpoint tensor is read, transformed, copied
into its rows and dropped. A tensor that is missing, unknown or of another shape stops the load with an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.kernels.arrays import to_array, to_tensor
from slipstream.model.bitmasks import made_dense
from slipstream.model.cache_scales import CacheScales
from slipstream.model.checkpoint import (
    StoredWeights,
    expands,
    fill_named,
    fill_parameters,
    finder,
    gguf_arrays,
    names_of,
    transformed,
)
from slipstream.model.packing import tensor_numbers
from slipstream.model.stored_weights import Stored, expanded
from slipstream.spec.description import ModelDescription
from slipstream.spec.parameters import (
    Placement,
    Shape,
    Transform,
    parameters,
)
from slipstream.spec.safetensors import safetensors_files


class RankShard(Protocol):
    """One of several ranks' part of a model (`model.sharding.Sharded`)."""

    shapes: dict[str, Shape]
    names: dict[str, Placement]

    def tensors(self, stored: Iterable[Stored]) -> Iterator[Stored]:
        """The rank's parts of a checkpoint's tensors, which go where `names` says."""

    def of_parameter(self, name: str, value: Tensor) -> Tensor:
        """The rank's part of a whole parameter."""


def every_name(name: str) -> bool:
    """`load_parameters` wants all of them."""
    return True


def load_parameters(
    description: ModelDescription,
    *,
    dtype: torch.dtype,
    device: torch.device,
    held: StoredWeights | None = None,
    cache_scales: CacheScales | None = None,
    wanted: Callable[[str], bool] = every_name,
    part: RankShard | None = None,
    on_host: Container[str] = (),
) -> dict[str, Tensor]:
    """The `wanted` parameters of the description's model by our names, without those that `held` and `cache_scales` take; of
    several ranks, one's `part` of them. Those of `on_host` are in the host's memory. CheckpointError names the tensor at
    fault."""
    every = parameters(description.spec) if part is None else part.shapes
    shapes = {n: s for n, s in every.items() if (held is None or n not in held) and wanted(n)}
    make = (
        torch.empty if part is None else torch.zeros
    )  # a part of a vocabulary may have rows of no token
    values = {
        name: make(shape, dtype=_dtype(name, dtype), device="cpu" if name in on_host else device)
        for name, shape in shapes.items()
    }
    names = names_of(description)
    if description.format == "gguf":
        read = gguf_arrays(description, str(dtype).removeprefix("torch."))
        stored: Iterable[Stored] = (
            (name, shape, lambda r=r: to_tensor(r()))  # type: ignore[misc]
            for name, shape, r in read
        )
    else:
        stored = stored_tensors_of(description.path)
    find = finder(description, names)
    if wanted is not every_name:
        stored = _without_others(stored, find, wanted)
    if description.quantization is not None and description.quantization.sparse:
        arrays = ((name, shape, lambda r=r: to_array(r())) for name, shape, r in stored)
        stored = (
            (name, shape, lambda r=r: to_tensor(r()))  # type: ignore[misc]
            for name, shape, r in made_dense(arrays)
        )
    formats = description.quantization.formats if description.quantization is not None else None
    if formats is not None:
        stored = expanded(stored, formats, expands(find, values), tensor_numbers)
    if part is not None:
        stored, names = part.tensors(stored), part.names

    def assign(into: Tensor, value: Tensor, how: Transform | None, shape: Shape) -> None:
        into.copy_(transform(value.view(shape), how))

    fill_parameters(
        description, names, stored, values, assign, held=held, cache_scales=cache_scales
    )
    return values


def _without_others(
    stored: Iterable[Stored], find: Callable[[str], Placement | None], wanted: Callable[[str], bool]
) -> Iterator[Stored]:
    """The tensors of a checkpoint whose places are `wanted`, whatever form they are stored in. Scales of the KV cache, and
    tensors without a place, go with the parameters that are of no layer."""
    for name, shape, read in stored:
        stem = name.rpartition(".")[0]
        names = (
            name,
            f"{stem}.weight",
            stem,
            name.rpartition("_")[0],
        )  # as it is; a part of it; a part in older tools; MXFP4
        place = next((p for p in map(find, names) if p is not None), None)
        if wanted("" if place is None or CacheScales.is_of_cache(name) else place.target):
            yield name, shape, read


def fill(
    shapes: Mapping[str, Shape],
    names: Mapping[str, Placement],
    stored: Iterable[Stored],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Parameters of these `shapes`, of a file's tensors with these `names`. CheckpointError names the tensor at fault."""
    values = {
        name: torch.empty(shape, dtype=_dtype(name, dtype), device=device)
        for name, shape in shapes.items()
    }
    fill_named(values, names, stored, lambda into, value, how: into.copy_(transform(value, how)))
    return values


def dummy_parameters(
    description: ModelDescription,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    part: RankShard | None = None,
    take: Callable[[str, Tensor], bool] = lambda name, value: False,
) -> dict[str, Tensor]:
    """Random weights of the true shapes, made on the device: std 0.02, norms 1, biases 0. A rank's `part` is of the same
    ones. Without those that `take` takes."""
    values = dummy_values(description, dtype=dtype, device=device, seed=seed)
    if part is None:
        return {name: value for name, value in values if not take(name, value)}
    return {name: part.of_parameter(name, value) for name, value in values if name in part.shapes}


def dummy_values(
    description: ModelDescription, *, dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """`dummy_parameters`, one after the other."""
    return random_values(parameters(description.spec), dtype=dtype, device=device, seed=seed)


def random_values(
    shapes: Mapping[str, Shape], *, dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of these shapes, one after the other: std 0.02, norms 1, biases 0."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in shapes.items():
        value = torch.empty(shape, dtype=_dtype(name, dtype), device=device)
        if name.endswith(".bias"):
            value.zero_()
        elif len(shape) == 1 or name.endswith("norm.weight"):
            value.fill_(1.0)
        else:
            value.normal_(0.0, 0.02, generator=generator)
        yield name, value


def layer_prefix(name: str) -> str:
    """The beginning of the names in a parameter's layer; "" if it is of no layer."""
    return ".".join(name.split(".")[:2]) + "." if name.startswith("layers.") else ""


def by_layer(
    values: Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, Iterator[tuple[str, Tensor]]]]:
    """`dummy_values` in runs of one layer's (`layer_prefix`), whose parameters follow one another. A run that is not taken is
    dropped value by value."""
    return groupby(values, key=lambda named: layer_prefix(named[0]))


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type of a parameter. Corrections of the scores that choose experts stay in float32, since they decide between near
    scores."""
    return torch.float32 if name.endswith(".correction.weight") else dtype


def transform(value: Tensor, how: Transform | None) -> Tensor:
    made: Tensor = transformed(value, how, torch)
    return made


def stored_tensors_of(path: Path) -> Iterator[Stored]:
    """The tensors of a folder, file by file, mapped rather than read."""
    from safetensors import SafetensorError, safe_open

    for file in safetensors_files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (no dict)
                    yield (
                        name,
                        tuple(opened.get_slice(name).get_shape()),
                        lambda n=name: opened.get_tensor(n),  # type: ignore[misc]
                    )
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} can't be read: {error}", field=file.name) from error
