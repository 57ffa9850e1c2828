"""A checkpoint's tensors and their places in a model, and weights read from them as arrays.

A parameter is read when it is taken (`pulled.py`): allocated once, in its final dtype; each tensor
that fills it is read, transformed, copied into its rows and dropped. Missing, unknown or duplicate
tensors and wrong shapes raise an error that names them before anything is read. No torch:
`load/weights.py` makes torch tensors with the same placements.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.kernels.weights.forms import Linear
from slipstream.model.load.pulled import Pulled, Weights
from slipstream.model.load.random_weights import ArrayDraws, random_weights, seed_of
from slipstream.model.stored.bitmasks import made_dense
from slipstream.model.stored.gguf_quants import dequantize_tensor
from slipstream.model.stored.parts import Stored, expanded
from slipstream.model.stored.shared import of_layers
from slipstream.model.stored.ternary import with_codes
from slipstream.spec.description import ModelDescription
from slipstream.spec.families.base import GGUF_FREQUENCIES, GGUF_UNREAD, ROTARY_BUFFERS
from slipstream.spec.families.mtp import MTPFormat
from slipstream.spec.families.names import canonical, without_prefix
from slipstream.spec.parameters import (
    AxisHalves,
    Deinterleave,
    Flatten,
    Integers,
    MinusOne,
    NegatedExp,
    OneRow,
    Placement,
    Regroup,
    Reshape,
    Scale,
    Shape,
    Stacked,
    SwapGateUp,
    Transform,
    TransformChain,
    Transpose,
    Turnable,
    Ungroup,
    Unpermute,
    Untile,
    Vector,
    keeps_float32,
)
from slipstream.spec.scheme import Scheme
from slipstream.spec.stored.native_formats import is_expandable, is_product
from slipstream.spec.stored.safetensors import safetensors_files, tensor_names

if TYPE_CHECKING:
    from slipstream.model.load.cache_scales import CacheScales

Array: TypeAlias = npt.NDArray[Any]
Value = TypeVar("Value", bound=Any)

PASSED_OVER = (
    *("weight_shape", "input_scale", "input_global_scale", "output_scale"),
    *("k_scale", "v_scale"),
)
"""Name suffixes of tensors next to a quantized weight that loading does not need."""


class StoredWeights(Protocol):
    """Quantized weights that stay quantized. They are collected from a checkpoint's tensors, or replace them."""

    def __contains__(self, target: str) -> bool:
        """Whether the weight `target`, by our name, is among them."""

    def take(
        self, name: str, read: Callable[[], Any], find: Callable[[str], Placement | None]
    ) -> bool:
        """Records the tensor `name` of the checkpoint if it belongs to one of these weights, and
        returns whether it does. `find` maps a tensor's name to its `Placement`."""

    def missing(self, names: Mapping[str, Placement]) -> list[str]:
        """Lists the names of the checkpoint's tensors that are missing. `names` maps every tensor
        of the model to its `Placement`."""

    def linears(self) -> Mapping[str, Linear]:
        """The weights by our names. Each is built from its tensors when it is read."""


def names_of(
    description: ModelDescription, given: Iterable[Stored] | None = None
) -> Mapping[str, Placement]:
    """`Placement` of each of the family's tensors, for this checkpoint's format, or for tensors
    `given` instead of its files."""
    if given is not None:
        stored = frozenset(name for name, _, _ in given)
        return with_stacks(description.family.names(description.spec), stored)
    if description.format == "gguf":
        assert description.family.gguf is not None
        return description.family.gguf.names(description.spec)
    return with_stacks(description.family.names(description.spec), tensor_names(description.path))


STACKED = {"experts.0.gate_proj.weight": "gate_up_proj", "experts.0.down_proj.weight": "down_proj"}
"""Name of the first expert's tensor, and name of the tensor that stacks all experts instead (Qwen 3.5)."""


def with_stacks(names: Mapping[str, Placement], stored: frozenset[str]) -> Mapping[str, Placement]:
    """The table `names` for a checkpoint that stacks all experts of a layer in one tensor, gate
    above up, where transformers writes one tensor per expert."""
    if not any(name.endswith(".experts.gate_up_proj") for name in stored):
        return names
    stacks = dict[str, Placement]()
    for name, place in names.items():
        for first, stack in STACKED.items():
            if name.endswith(first):
                stacks[name.removesuffix(first) + f"experts.{stack}"] = place
    targets = {place.target for place in stacks.values()}
    found = {name: place for name, place in names.items() if place.target not in targets}
    counts = Counter(place.target for place in names.values())
    for name, place in stacks.items():
        copies = counts[place.target] // (2 if name.endswith("gate_up_proj") else 1)
        found[name] = Placement(place.target, copies=copies)
    return found


def finder(
    description: ModelDescription, names: Mapping[str, Placement]
) -> Callable[[str], Placement | None]:
    """A function from a checkpoint's tensor name to its `Placement`."""

    def find(name: str) -> Placement | None:
        key = canonical(name, description.family.prefixes, names)
        return None if key is None else names[key]

    return find


@dataclass(frozen=True, slots=True)
class Fill:
    """A checkpoint tensor that fills a part of a parameter."""

    placement: Placement
    shape: Shape  # shape of the transform's input
    read: Callable[[], Any]


def parameter_fills(
    description: ModelDescription,
    names: Mapping[str, Placement],
    stored: Iterable[Stored],
    shapes: Mapping[str, Shape],
    *,
    held: StoredWeights | None = None,
    cache_scales: CacheScales | None = None,
) -> dict[str, list[Fill]]:
    """Finds the checkpoint's tensors that fill the parameters of `shapes`, by our names. Reads none
    of them.

    Tensors that `held` and `cache_scales` take are left out. CheckpointError names a tensor that is
    unknown, missing, duplicate, or of the wrong shape.
    """
    prefixes, find = description.family.prefixes, finder(description, names)
    ignored = _ignored(description)
    found: dict[str, list[Fill]] = {name: [] for name in shapes}
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
        if placement.target not in shapes:
            continue
        into = placed_shape(shapes[placement.target], placement)
        placement = turned(placement, shape, into)
        expected = stored_shape(into, placement.transform)
        if not is_shaped(shape, expected):
            raise CheckpointError(
                f"the tensor {name!r} has shape {list(shape)}, and the config asks for {list(expected)}",
                field=name,
            )
        found[placement.target].append(Fill(placement, expected, read))
        filled.add(key)
    missing = [n for n, place in names.items() if n not in filled and place.target in shapes]
    if held is not None:
        missing += held.missing(names)
    if missing:
        some = ", ".join(missing[:10]) + (
            f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        )
        raise CheckpointError(f"the checkpoint lacks {some}", field=missing[0])
    return found


def _ignored(description: ModelDescription) -> tuple[str, ...]:
    """Name patterns of tensors that a checkpoint may have although the model does not use them."""
    if description.format == "gguf":
        assert description.family.gguf is not None
        own = (
            *description.family.gguf.ignored,
            *_drafting(description, description.family.gguf.mtp),
        )
        return (*map(re.escape, GGUF_FREQUENCIES), *GGUF_UNREAD, *own)
    drafting = _drafting(description, description.family.mtp)
    family = description.family
    unread = () if family.unread is None else family.unread(description.spec)
    ignored: tuple[str, ...] = (*ROTARY_BUFFERS, *family.ignored, *unread, *drafting)
    if any(step.folder == description.path for step in description.pooling.token_dense):
        ignored = (*ignored, r"linear\.weight")  # read separately (`model.load.dense`)
    if description.spec.tied_embeddings:  # some checkpoints store the head although it is tied
        ignored = (*ignored, rf"(.*\.)?{re.escape(description.head_name)}")
    return ignored


MAX_MODULES = 8
"""Maximum number of MTP layers assumed after the last layer."""


def _drafting(description: ModelDescription, mtp: MTPFormat | None) -> tuple[str, ...]:
    """Name patterns of the MTP layers, which are read separately (`spec.drafts.mtp`)."""
    if mtp is None:
        return ()
    first = description.spec.num_layers
    below = {mtp.renamed[1].format(n=n) for n in range(first, first + MAX_MODULES)}
    return tuple(f"{re.escape(name)}.*" for name in sorted(below))


def expands(
    find: Callable[[str], Placement | None], values: Container[str]
) -> Callable[[str], bool]:
    """A function that tells whether a module, by the checkpoint's name, has a quantized weight
    among `values` and so must be expanded."""

    def is_wanted(module: str) -> bool:
        place = find(f"{module}.weight")
        return place is not None and is_expandable(place.target) and place.target in values

    return is_wanted


def products_of(find: Callable[[str], Placement | None]) -> Callable[[str], bool]:
    """A function that tells whether a module, by the checkpoint's name, is a linear layer that may be quantized."""

    def is_product_of_ours(module: str) -> bool:
        place = find(f"{module}.weight")
        return place is not None and is_product(place.target)

    return is_product_of_ours


def array_weights(
    description: ModelDescription,
    dtype: str,
    held: StoredWeights | None = None,
    cache_scales: CacheScales | None = None,
    given: Sequence[Stored] | None = None,
) -> Weights:
    """Returns a checkpoint's weights as arrays of `dtype` ("bfloat16", "float32", "float16").

    `held` takes those that stay quantized. Other weights that are stored quantized or sparse are
    expanded. `given`: arrays to use instead of the files. CheckpointError names the tensor at
    fault.
    """
    shapes = {n: s for n, s in description.shapes.items() if held is None or n not in held}
    stored: Iterable[Stored]
    if given is not None:
        stored = given
    elif description.format == "gguf":
        stored = gguf_arrays(description, dtype)
    else:
        stored = safetensors_arrays(description.path)
    stored = of_layers(stored, dict(description.spec.shared))
    names, q = names_of(description, given), description.quantization
    if q is not None and q.sparse:
        stored = made_dense(stored)
    if q is not None and q.ternary is not None:
        stored = with_codes(stored, q, products_of(finder(description, names)))
    if q is not None and q.formats is not None:
        stored = expanded(stored, q.formats, expands(finder(description, names), shapes))
    fills = parameter_fills(
        description, names, stored, shapes, held=held, cache_scales=cache_scales
    )
    products = {} if held is None else held.linears()
    return Weights(filled_arrays(shapes, fills, dtype), Pulled.of(products))


def head_fills(
    shapes: Mapping[str, Shape], names: Mapping[str, Placement], stored: Iterable[Stored]
) -> dict[str, list[Fill]]:
    """Finds the tensors that fill a draft head's parameters; `names` has their placements.
    CheckpointError names the tensor at fault."""
    found: dict[str, list[Fill]] = {name: [] for name in shapes}
    filled: set[str] = set()
    for name, shape, read in stored:
        if name not in names:
            raise CheckpointError(
                f"the checkpoint has a tensor {name!r} that the draft head has no place for",
                field=name,
            )
        expected = placed_shape(shapes[names[name].target], names[name])
        if tuple(shape) != expected:
            raise CheckpointError(
                f"the tensor {name!r} has shape {list(shape)}, and the config asks for {list(expected)}",
                field=name,
            )
        found[names[name].target].append(Fill(names[name], expected, read))
        filled.add(name)
    if missing := [name for name in names if name not in filled]:
        raise CheckpointError(f"the checkpoint lacks {', '.join(missing[:10])}", field=missing[0])
    return found


def filled_arrays(
    shapes: Mapping[str, Shape], fills: Mapping[str, Sequence[Fill]], dtype: str
) -> Pulled[Array]:
    """Parameters as arrays of `dtype`; each is read from its tensors when it is taken."""

    def made(name: str) -> Array:
        kind = _kept_type(name, dtype)
        parts = (
            (transformed(f.read().reshape(f.shape), f.placement.transform), f.placement)
            for f in fills[name]
        )
        whole = is_whole(shapes[name], fills[name])
        # its array becomes the parameter, unless it must be converted
        if len(fills[name]) == 1 and whole:
            value, _ = next(parts)
            return np.ascontiguousarray(value.reshape(shapes[name]), kind)
        value = np.empty(shapes[name], kind) if whole else np.zeros(shapes[name], kind)
        for part, placement in parts:
            place(value, placement)[...] = part
        return value

    return Pulled({name: partial(made, name) for name in shapes})


def is_whole(shape: Shape, fills: Sequence[Fill]) -> bool:
    """Whether tensors fill all rows of a parameter. Otherwise the remaining rows are zeros (the bias of keys in Whisper)."""
    rows = [fill.placement.rows for fill in fills]
    return None in rows or any(f.placement.copies for f in fills) or sum(map(int, rows)) == shape[0]  # type: ignore[arg-type]


def random_arrays(
    shapes: Mapping[str, Shape], dtype: str, seed: int, scheme: Scheme | None = None
) -> Weights:
    """Returns random weights of these shapes (`random_weights`)."""
    return random_weights(shapes, lambda n: ArrayDraws(dtype, seed_of(n, seed)), scheme)


def _kept_type(name: str, dtype: str) -> npt.DTypeLike:
    """Dtype of a parameter: `dtype`, or float32 if `keeps_float32`."""
    return np.dtype("float32" if keeps_float32(name) else dtype)


def safetensors_arrays(path: Path) -> Iterator[Stored]:
    """Yields the tensors of a folder, file by file, or of one file. A file stays open as long as
    one of its tensors may be read."""
    from safetensors import safe_open

    def read(opened: Any, name: str, file: Path) -> Array:
        with reading(file):
            found: Array = opened.get_tensor(name)
            return found

    for file in [path] if path.is_file() else safetensors_files(path):
        with reading(file):
            opened: Any = safe_open(file, framework="np")
            names = list(opened.keys())
            slices = {name: opened.get_slice(name) for name in names}
        float8: dict[str, Callable[[], Array]] = {}
        for name, own in slices.items():
            if own.get_dtype() == "F8_E4M3" and not float8:
                float8 = _float8_tensors(file)
            yield (
                name,
                tuple(own.get_shape()),
                float8.get(name) or partial(read, opened, name, file),
            )


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Context manager that converts errors of reading a safetensors file to CheckpointError."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} can't be read: {error}", field=file.name) from error


def _float8_tensors(file: Path) -> dict[str, Callable[[], Array]]:
    """Functions that read a file's float8_e4m3fn tensors, by name; safetensors can't return these as NumPy arrays."""
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


def gguf_arrays(description: ModelDescription, dtype: str) -> Iterator[Stored]:
    """Yields a GGUF file's tensors, dequantized to `dtype` when they are read."""
    file, names = description.gguf, names_of(description)
    assert file is not None

    def kind(name: str) -> str:
        # Norms and decays stay float32 until their transform is undone; other tensors get the final dtype at once.
        place = names.get(name)
        exact = place is not None and (
            isinstance(place.transform, MinusOne) or keeps_float32(place.target)
        )
        return "float32" if exact else dtype

    for name, tensor in file.tensors.items():
        yield name, tuple(tensor.shape), partial(dequantize_tensor, file, name, kind(name))


def place(target: Value, placement: Placement) -> Value:
    """A view of the part of a parameter that a tensor fills."""
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
    """Shape of the part that a tensor fills in a parameter of `shape`."""
    copies = () if placement.copies is None else (placement.copies,)
    rows = (
        shape[0] // (placement.copies or 1) - placement.start
        if placement.rows is None
        else placement.rows
    )
    return (*copies, rows, *shape[1:])


def is_shaped(shape: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether the shapes are equal apart from dimensions of size 1, which writers add and drop."""
    return [n for n in shape if n != 1] == [n for n in expected if n != 1]


def turned(placement: Placement, shape: Shape, into: Shape) -> Placement:
    """The placement with the transform resolved for a tensor of `shape`, which may be stored transposed or not."""
    if not isinstance(placement.transform, Turnable):
        return placement
    return replace(placement, transform=None if tuple(shape) == into else Transpose())


def stored_shape(shape: Shape, transform: Transform | None) -> Shape:
    """Shape in which a checkpoint stores a tensor that becomes `shape` after its transform."""
    if isinstance(transform, TransformChain):
        for step in reversed(transform.steps):
            shape = stored_shape(shape, step)
        return shape
    if isinstance(transform, Flatten):
        return (shape[0], *transform.kernel)
    if isinstance(transform, OneRow):
        return (1, *shape)
    if isinstance(transform, Vector):
        return shape[1:]
    if isinstance(transform, Reshape):
        return transform.shape
    if isinstance(transform, Stacked):
        copies, rows, inner = shape
        return (copies * inner, rows) if transform.transposed else (copies * rows, inner)
    turned = isinstance(transform, Transpose) or (
        isinstance(transform, Deinterleave) and transform.transposed
    )
    return (*shape[:-2], shape[-1], shape[-2]) if turned else shape


def transformed(value: Any, how: Transform | None, xp: Any = np) -> Any:
    """`value` in the decoder's layout, with the transform `how` undone. `xp` is its array's module, NumPy or torch."""
    match how:
        case None | Turnable() | Integers():
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
        case Flatten(kernel=kernel):
            return value.reshape(-1, math.prod(kernel))
        case OneRow():
            return value[0]
        case Vector():
            return value[None]
        case MinusOne():
            return xp.asarray(value, dtype=xp.float32) - 1.0
        case NegatedExp():
            return xp.log(-xp.asarray(value, dtype=xp.float32))
        case Reshape(width=width):
            return value.reshape(*(-1, width)[: 1 if width is None else 2])
        case Stacked(copies=copies, transposed=turn):
            each = value.reshape(copies, -1, value.shape[-1])
            return each.swapaxes(-1, -2) if turn else each
        case Scale(factors=factors):
            rows = [xp.full((count,), x, dtype=xp.float32) for count, x in factors]
            numbers = xp.concatenate(rows).reshape(-1, *(1,) * (value.ndim - 1))
            return xp.asarray(value, dtype=xp.float32) * numbers
        case AxisHalves(num_heads=n):
            parts = value.reshape(n, 2, 2, value.shape[0] // n // 4, *value.shape[1:])
            return parts.swapaxes(1, 2).reshape(value.shape)
        case Regroup(num_groups=n, sizes=sizes, order=order):
            groups, ends = value.reshape(n, sum(sizes), *value.shape[1:]), [0]
            for size in sizes:
                ends.append(ends[-1] + size)
            chosen = [groups[:, ends[i] : ends[i + 1]] for i in order]
            return xp.concatenate([part.reshape(-1, *value.shape[1:]) for part in chosen])
        case Untile(num_groups=n, size=size, start=start, columns=columns):
            if columns:
                turned = transformed(value.swapaxes(0, 1), replace(how, columns=False), xp)
                return turned.swapaxes(0, 1)
            heads = value[start:].reshape(-1, n, size, *value.shape[1:]).swapaxes(0, 1)
            return xp.concatenate((value[:start], heads.reshape(-1, *value.shape[1:])))
        case TransformChain(steps=steps):
            for step in steps:
                value = transformed(value, step, xp)
            return value
        case SwapGateUp():
            half = value.shape[0] // 2
            return xp.concatenate((value[half:], value[:half]))
        case Deinterleave(transposed=transposed):
            if transposed:
                return xp.concatenate(
                    (value[..., ::2].swapaxes(-1, -2), value[..., 1::2].swapaxes(-1, -2)), axis=-2
                )
            return xp.concatenate((value[:, ::2], value[:, 1::2]), axis=1)  # [experts, rows …]
