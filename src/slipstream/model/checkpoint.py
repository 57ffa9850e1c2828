"""A checkpoint's tensors and their places in a model: reading them as arrays, and filling parameters from any stream of them.

Every parameter is allocated once, in its final type; each checkpoint tensor is read, transformed, copied into its rows and
dropped. What a checkpoint lacks, has too many of, or has in another shape stops the load by name. No torch: `weights.py` fills
tensors by the same lines.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.kernels.weights import Linear
from slipstream.model.bitmasks import made_dense
from slipstream.model.gguf_quants import dequantize_tensor
from slipstream.model.stored_weights import Stored, expanded
from slipstream.spec.description import ModelDescription
from slipstream.spec.families.base import GGUF_FREQUENCIES, GGUF_UNREAD, ROTARY_BUFFERS
from slipstream.spec.families.names import canonical, without_prefix
from slipstream.spec.native_formats import is_expandable
from slipstream.spec.parameters import (
    Deinterleave,
    Flatten,
    MinusOne,
    Placement,
    Shape,
    SwapGateUp,
    Transform,
    Transpose,
    Ungroup,
    Unpermute,
    parameters,
)
from slipstream.spec.safetensors import safetensors_files

if TYPE_CHECKING:
    from slipstream.model.cache_scales import CacheScales

Array: TypeAlias = npt.NDArray[Any]
Read: TypeAlias = Stored

Value = TypeVar("Value", bound=Any)

PASSED_OVER = ("weight_shape", "input_scale", "output_scale", "k_scale", "v_scale")
"""Suffixes of tensors next to a rounded weight that only note something."""


class StoredWeights(Protocol):
    """Weights that are not filled as parameters: they take a checkpoint's tensors as these are, or in their stead."""

    def __contains__(self, target: str) -> bool:
        """Whether the weight of that name (ours) is held."""

    def take(
        self, name: str, read: Callable[[], Any], find: Callable[[str], Placement | None]
    ) -> bool:
        """Whether the tensor `name` (the checkpoint's) belongs to one of them; `find` gives a tensor's place."""

    def missing(self, names: Mapping[str, Placement]) -> list[str]:
        """The checkpoint's names of what has not come."""

    def linears(self) -> dict[str, Linear]:
        """The weights by our names, when all was taken."""


def names_of(description: ModelDescription) -> Mapping[str, Placement]:
    """The family's table for the tensors of the checkpoint."""
    if description.format == "gguf":
        assert description.family.gguf is not None
        return description.family.gguf.names(description.spec)
    return description.family.names(description.spec)


def finder(
    description: ModelDescription, names: Mapping[str, Placement]
) -> Callable[[str], Placement | None]:
    """The place of a tensor by the checkpoint's name for it."""

    def find(name: str) -> Placement | None:
        key = canonical(name, description.family.prefixes, names)
        return None if key is None else names[key]

    return find


def fill_parameters(
    description: ModelDescription,
    names: Mapping[str, Placement],
    stored: Iterable[Read],
    values: Mapping[str, Value],
    assign: Callable[[Value, Value, Transform | None, Shape], None],
    *,
    held: StoredWeights | None = None,
    cache_scales: CacheScales | None = None,
) -> None:
    """Fill `values`, by our names, with the checkpoint's tensors, but those that `held` and `cache_scales` take.
    `assign(into, value, transform, shape)` writes a tensor of that shape to its place. CheckpointError names the tensor at
    fault."""
    prefixes, find = description.family.prefixes, finder(description, names)
    if description.format == "gguf":
        assert description.family.gguf is not None
        ignored = (
            *map(re.escape, GGUF_FREQUENCIES),
            *GGUF_UNREAD,
            *description.family.gguf.ignored,
        )
    else:
        ignored = (*ROTARY_BUFFERS, *description.family.ignored)
        if description.spec.tied_embeddings:  # a head that is written although it is the embeddings
            ignored = (*ignored, rf"(.*\.)?{re.escape(description.head_name)}")
        if description.family.mtp:
            ignored = (*ignored, rf"model\.layers\.{description.spec.num_layers}\..*")
    filled: set[str] = set()
    for name, shape, read in stored:
        if cache_scales is not None and cache_scales.take(name, read, find):
            continue
        if held is not None and held.take(name, read, find):
            continue
        key = canonical(name, prefixes, names)
        if key is None:
            if any(
                re.fullmatch(pattern, without_prefix(name, prefixes)) or re.fullmatch(pattern, name)
                for pattern in ignored
            ):
                continue
            raise CheckpointError(
                f"the checkpoint has a tensor {name!r} that the model has no place for", field=name
            )
        if key in filled:
            raise CheckpointError(f"the checkpoint has the tensor {name!r} twice", field=name)
        placement = names[key]
        if placement.target not in values:
            continue
        into = place(values[placement.target], placement)
        expected = stored_shape(tuple(into.shape), placement.transform)
        if (
            tuple(shape) != expected and (1, *shape) != expected
        ):  # GGUF writes a single row without its first dimension
            raise CheckpointError(
                f"the tensor {name!r} has shape {list(shape)}, and the config asks for {list(expected)}",
                field=name,
            )
        assign(into, read(), placement.transform, expected)
        filled.add(key)
    missing = [n for n, place in names.items() if n not in filled and place.target in values]
    if held is not None:
        missing += held.missing(names)
    if missing:
        some = ", ".join(missing[:10]) + (
            f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        )
        raise CheckpointError(f"the checkpoint lacks {some}", field=missing[0])


def expands(
    find: Callable[[str], Placement | None], values: Container[str]
) -> Callable[[str], bool]:
    """Whether a module's rounded weight, by the checkpoint's name, is one of `values` and so to be expanded."""

    def is_wanted(module: str) -> bool:
        place = find(f"{module}.weight")
        return place is not None and is_expandable(place.target) and place.target in values

    return is_wanted


def read_parameters(
    description: ModelDescription,
    dtype: str,
    held: StoredWeights | None = None,
    cache_scales: CacheScales | None = None,
) -> dict[str, Array]:
    """All parameters of the description's model by our names, but those that `held` and `cache_scales` take: arrays of `dtype`
    ("bfloat16", "float32", "float16"). Weights that are stored without their zeros, or rounded and not held so, are put
    together. CheckpointError names the tensor at fault."""
    shapes = {
        n: s for n, s in parameters(description.spec).items() if held is None or n not in held
    }
    values = {name: np.empty(shape, _kept_type(name, dtype)) for name, shape in shapes.items()}
    stored = (
        gguf_arrays(description, dtype)
        if description.format == "gguf"
        else safetensors_arrays(description.path)
    )
    names, q = names_of(description), description.quantization
    if q is not None and q.sparse:
        stored = made_dense(stored)
    if q is not None and q.formats is not None:
        stored = expanded(stored, q.formats, expands(finder(description, names), values))

    def assign(into: Array, value: Array, how: Transform | None, shape: Shape) -> None:
        assign_array(into, value.reshape(shape), how)

    fill_parameters(
        description, names, stored, values, assign, held=held, cache_scales=cache_scales
    )
    return values


def fill_named(
    values: Mapping[str, Value],
    names: Mapping[str, Placement],
    stored: Iterable[Read],
    assign: Callable[[Value, Value, Transform | None], object],
) -> None:
    """Fill `values` with a draft head's tensors, whose places are `names`. CheckpointError names the tensor at fault."""
    filled: set[str] = set()
    for name, shape, read in stored:
        if name not in names:
            raise CheckpointError(
                f"the checkpoint has a tensor {name!r} that the draft head has no place for",
                field=name,
            )
        into = place(values[names[name].target], names[name])
        if tuple(shape) != tuple(into.shape):
            raise CheckpointError(
                f"the tensor {name!r} has shape {list(shape)}, and the config asks for {list(into.shape)}",
                field=name,
            )
        assign(into, read(), names[name].transform)
        filled.add(name)
    if missing := [name for name in names if name not in filled]:
        raise CheckpointError(f"the checkpoint lacks {', '.join(missing[:10])}", field=missing[0])


def assign_array(into: Array, value: Array, how: Transform | None) -> None:
    into[...] = transformed(value, how)


def dummy_arrays(description: ModelDescription, dtype: str, seed: int) -> dict[str, Array]:
    """Random weights of the true shapes by our names."""
    return random_arrays(parameters(description.spec), dtype, seed)


def random_arrays(shapes: Mapping[str, Shape], dtype: str, seed: int) -> dict[str, Array]:
    """Parameters of these shapes, of `dtype`: std 0.02, norms 1, biases 0. NumPy draws them, so torch's of the same seed are
    others."""
    generator, values = np.random.default_rng(seed), dict[str, Array]()
    for name, shape in shapes.items():
        kind = _kept_type(name, dtype)
        if name.endswith(".bias"):
            values[name] = np.zeros(shape, kind)
        elif len(shape) == 1 or name.endswith("norm.weight"):
            values[name] = np.ones(shape, kind)
        else:
            values[name] = (generator.standard_normal(shape, np.float32) * np.float32(0.02)).astype(
                kind
            )
    return values


def _kept_type(name: str, dtype: str) -> npt.DTypeLike:
    """The type of a parameter. What is added to the scores that experts are chosen by decides among near ones."""
    return np.dtype("float32" if name.endswith(".correction.weight") else dtype)


def safetensors_arrays(path: Path) -> Iterator[Read]:
    """The tensors of a folder, file by file."""
    from safetensors import SafetensorError, safe_open

    for file in safetensors_files(path):
        try:
            with safe_open(file, framework="np") as opened:
                float8: dict[str, Callable[[], Array]] = {}
                for name in opened.keys():  # noqa: SIM118 (no dict)
                    own = opened.get_slice(name)
                    if own.get_dtype() == "F8_E4M3" and not float8:
                        float8 = _float8_tensors(file)
                    yield (
                        name,
                        tuple(own.get_shape()),
                        float8.get(name) or partial(opened.get_tensor, name),
                    )
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} can't be read: {error}", field=file.name) from error


def _float8_tensors(file: Path) -> dict[str, Callable[[], Array]]:
    """How to read a file's tensors of float8_e4m3fn, a type that safetensors does not give NumPy."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))

    def read(begin: int, end: int, shape: Shape) -> Array:
        codes: Array = np.fromfile(file, np.uint8, end - begin, offset=8 + length + begin)
        numbers: Array = codes.view(ml_dtypes.float8_e4m3fn).reshape(shape)
        return numbers

    of_type = {name: x for name, x in header.items() if x.get("dtype") == "F8_E4M3"}
    return {
        name: partial(read, x["data_offsets"][0], x["data_offsets"][1], x["shape"])
        for name, x in of_type.items()
    }


def gguf_arrays(description: ModelDescription, dtype: str) -> Iterator[Read]:
    """A GGUF file's tensors, as numbers of `dtype`."""
    file, names = description.gguf, names_of(description)
    assert file is not None

    def kind(name: str) -> str:
        # Norms keep their precision until one is taken off; everything else goes straight to the final type.
        return "float32" if name in names and isinstance(names[name].transform, MinusOne) else dtype

    for name, tensor in file.tensors.items():
        yield name, tuple(tensor.shape), partial(dequantize_tensor, file, name, kind(name))


def place(target: Value, placement: Placement) -> Value:
    """The part of a parameter that a tensor fills."""
    rows = slice(
        placement.start, None if placement.rows is None else placement.start + placement.rows
    )
    part: Value = (
        target[rows]
        if placement.copies is None
        else target.reshape((placement.copies, -1, *target.shape[1:]))[:, rows]
    )
    return part


def placed_shape(shape: Shape, placement: Placement) -> Shape:
    """The shape of what a tensor fills of a parameter of `shape`."""
    copies = () if placement.copies is None else (placement.copies,)
    rows = (
        shape[0] // (placement.copies or 1) - placement.start
        if placement.rows is None
        else placement.rows
    )
    return (*copies, rows, *shape[1:])


def stored_shape(shape: Shape, transform: Transform | None) -> Shape:
    """How a checkpoint stores what becomes `shape`."""
    if isinstance(transform, Flatten):
        return (shape[0], *transform.kernel)
    turned = isinstance(transform, Transpose) or (
        isinstance(transform, Deinterleave) and transform.transposed
    )
    return (*shape[:-2], shape[-1], shape[-2]) if turned else shape


def transformed(value: Any, how: Transform | None, xp: Any = np) -> Any:
    """`value` as the decoder has it. `xp`: NumPy or torch, whose array it is."""
    match how:
        case None:
            return value
        case Transpose():
            return value.swapaxes(-1, -2)
        case Ungroup(num_kv_heads=k, group=group):
            heads = value.reshape(
                k, group + 2, value.shape[0] // (k * (group + 2)), *value.shape[1:]
            )
            parts = heads[:, :group], heads[:, group:-1], heads[:, -1:]
            return xp.concatenate([part.reshape(-1, *value.shape[1:]) for part in parts])
        case Unpermute(num_heads=n):
            return (
                value.reshape(n, value.shape[0] // n // 2, 2, *value.shape[1:])
                .swapaxes(1, 2)
                .reshape(value.shape)
            )
        case Flatten():
            return value.reshape(value.shape[0], -1)
        case MinusOne():
            return xp.asarray(value, dtype=xp.float32) - 1.0
        case SwapGateUp():
            half = value.shape[0] // 2
            return xp.concatenate((value[half:], value[:half]))
        case Deinterleave(transposed=transposed):
            if transposed:
                return xp.concatenate(
                    (value[..., ::2].swapaxes(-1, -2), value[..., 1::2].swapaxes(-1, -2)), axis=-2
                )
            return xp.concatenate((value[:, ::2], value[:, 1::2]), axis=1)  # [experts, rows …]
