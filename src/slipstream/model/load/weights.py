"""Reads a checkpoint's tensors, or draws random ones, as a model's torch parameters.

A parameter is made when it is taken: allocated once, on its device, in its final dtype. Each
checkpoint tensor that fills it is read, transformed, copied into its rows and dropped. A tensor
that is missing, unknown or of the wrong shape raises an error that names it, before any is read.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.kernels.arrays import to_array, to_tensor
from slipstream.model.load.cache_scales import CacheScales
from slipstream.model.load.checkpoint import (
    Fill,
    StoredWeights,
    expands,
    finder,
    gguf_arrays,
    is_whole,
    names_of,
    parameter_fills,
    place,
    products_of,
    reading,
    transformed,
)
from slipstream.model.load.pulled import Pulled, Weights
from slipstream.model.load.random_weights import TensorDraws, random_weights, seed_of
from slipstream.model.stored.bitmasks import made_dense
from slipstream.model.stored.packing import tensor_numbers
from slipstream.model.stored.parts import Stored, expanded
from slipstream.model.stored.shared import of_layers
from slipstream.model.stored.ternary import with_codes
from slipstream.spec.description import ModelDescription
from slipstream.spec.parameters import Placement, Shape, Transform, keeps_float32
from slipstream.spec.scheme import Scheme
from slipstream.spec.stored.safetensors import safetensors_files


class RankShard(Protocol):
    """Interface of one rank's part of a model (`model.load.sharding.Sharded`)."""

    shapes: dict[str, Shape]
    names: dict[str, Placement]

    def tensors(self, stored: Iterable[Stored]) -> Iterator[Stored]:
        """Yields the rank's parts of a checkpoint's tensors. `names` has their placements."""

    def of_parameter(self, name: str, value: Tensor) -> Tensor:
        """Returns the rank's part of a whole parameter."""


def every_name(name: str) -> bool:
    """Filter that accepts every parameter."""
    return True


def tensor_weights(
    description: ModelDescription,
    *,
    dtype: torch.dtype,
    device: torch.device,
    held: StoredWeights | None = None,
    cache_scales: CacheScales | None = None,
    wanted: Callable[[str], bool] = every_name,
    part: RankShard | None = None,
    on_host: Container[str] = (),
    given: Sequence[Stored] | None = None,
) -> Weights:
    """The `wanted` weights of a checkpoint as tensors on `device`, those in `on_host` in host
    memory. With a `part`, one rank's. `given`: tensors to use instead of the files.

    `held` takes those that stay quantized, `cache_scales` the scales of the KV cache.
    CheckpointError names the tensor at fault.
    """
    every = description.shapes if part is None else part.shapes
    shapes = {n: s for n, s in every.items() if (held is None or n not in held) and wanted(n)}
    names = names_of(description, given)
    if given is not None:
        stored: Iterable[Stored] = given
    elif description.format == "gguf":
        read = gguf_arrays(description, str(dtype).removeprefix("torch."))
        stored = (
            (name, shape, lambda r=r: to_tensor(r()))  # type: ignore[misc]
            for name, shape, r in read
        )
    else:
        stored = stored_tensors_of(description.path)
    stored = of_layers(stored, dict(description.spec.shared))
    find = finder(description, names)
    if wanted is not every_name:
        stored = _without_others(stored, find, wanted)
    q = description.quantization
    if q is not None and (q.sparse or q.ternary is not None):
        arrays = ((name, shape, lambda r=r: to_array(r())) for name, shape, r in stored)
        made = made_dense(arrays) if q.sparse else with_codes(arrays, q, products_of(find))
        stored = (
            (name, shape, lambda r=r: to_tensor(r()))  # type: ignore[misc]
            for name, shape, r in made
        )
    formats = q.formats if q is not None else None
    if formats is not None:
        stored = expanded(stored, formats, expands(find, shapes), tensor_numbers)
    if part is not None:
        stored, names = part.tensors(stored), part.names
    fills = parameter_fills(
        description, names, stored, shapes, held=held, cache_scales=cache_scales
    )
    products = {} if held is None else held.linears()
    host = torch.device("cpu")
    values = filled_tensors(
        shapes,
        fills,
        lambda name: host if name in on_host else device,
        dtype,
        padded=part is not None,
    )
    return Weights(values, Pulled.of(products))


def load_parameters(
    description: ModelDescription,
    *,
    dtype: torch.dtype,
    device: torch.device,
    wanted: Callable[[str], bool] = every_name,
) -> dict[str, Tensor]:
    """Reads all `wanted` parameters of a checkpoint, dense, for tools that change weights."""
    found = tensor_weights(description, dtype=dtype, device=device, wanted=wanted)
    return dict(found.values)


def _without_others(
    stored: Iterable[Stored], find: Callable[[str], Placement | None], wanted: Callable[[str], bool]
) -> Iterator[Stored]:
    """Yields the checkpoint tensors of `wanted` parameters, in whatever format they are stored.

    Scales of the KV cache, and tensors without a placement, count as parameters outside the layers.
    """
    for name, shape, read in stored:
        stem = name.rpartition(".")[0]
        # names as they are, of a part, of a part in older tools, and of MXFP4
        names = (name, f"{stem}.weight", stem, name.rpartition("_")[0])
        place = next((p for p in map(find, names) if p is not None), None)
        if wanted("" if place is None or CacheScales.is_of_cache(name) else place.target):
            yield name, shape, read


def filled_tensors(
    shapes: Mapping[str, Shape],
    fills: Mapping[str, Sequence[Fill]],
    place_of: Callable[[str], torch.device],
    dtype: torch.dtype,
    *,
    padded: bool = False,
) -> Pulled[Tensor]:
    """Parameters that are read when they are taken. With `padded`, rows that no tensor fills
    (vocabulary padding on a rank) are zero."""
    new = torch.zeros if padded else torch.empty

    def made(name: str) -> Tensor:
        own = fills[name]
        make = new if is_whole(shapes[name], own) else torch.zeros
        value = make(shapes[name], dtype=_dtype(name, dtype), device=place_of(name))
        for fill in own:
            part = transform(fill.read().view(fill.shape), fill.placement.transform)
            place(value, fill.placement).copy_(part)
        return value

    return Pulled({name: partial(made, name) for name in shapes})


def random_tensors(
    description: ModelDescription,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    scheme: Scheme | None = None,
    part: RankShard | None = None,
    on_host: Container[str] = (),
) -> Weights:
    """Random weights of a config's shapes (`random_weights`), on `device` or in host memory. Those
    that `scheme` quantizes are quantized linear layers.

    A rank's `part` is cut from dense weights, so that all ranks have parts of the same model.
    """

    def draws(name: str) -> TensorDraws:
        where = torch.device("cpu") if name in on_host else device
        return TensorDraws(dtype, seed_of(name, seed), where)

    if part is None:
        return random_weights(description.shapes, draws, scheme)
    whole = random_weights(description.shapes, draws, None).values

    def own(name: str) -> Tensor:
        assert part is not None
        return part.of_parameter(name, whole[name])

    return Weights(Pulled({name: partial(own, name) for name in part.shapes}), Pulled({}))


def dummy_parameters(
    description: ModelDescription, *, dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, Tensor]:
    """Makes random dense parameters, for tools that change weights."""
    return dict(random_tensors(description, dtype=dtype, device=device, seed=seed).values)


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype of a parameter: `dtype`, or float32 if `keeps_float32`."""
    return torch.float32 if keeps_float32(name) else dtype


def transform(value: Tensor, how: Transform | None) -> Tensor:
    made: Tensor = transformed(value, how, torch)
    return made


def stored_tensors_of(path: Path) -> Iterator[Stored]:
    """Yields the tensors of a folder, file by file, memory-mapped. A file stays mapped as long as
    one of its tensors may be read."""
    from safetensors import safe_open

    def read(opened: Any, name: str, file: Path) -> Tensor:
        with reading(file):
            found: Tensor = opened.get_tensor(name)
            return found

    for file in safetensors_files(path):
        with reading(file):
            opened: Any = safe_open(file, framework="pt")
            shapes = {n: tuple(opened.get_slice(n).get_shape()) for n in opened.keys()}  # noqa: SIM118 (no dict)
        for name, shape in shapes.items():
            yield name, shape, partial(read, opened, name, file)
