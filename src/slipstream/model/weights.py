"""Filling a model's parameters from a stream of named tensors, without ever holding the model twice.

Every parameter is allocated once, on its device, in its final type; each checkpoint tensor is read, transformed, copied
into its rows and dropped. What a checkpoint lacks, has too many of, or has in another shape stops the load by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.kernels.weights import Linear
from slipstream.model.bitmasks import Stored, made_dense
from slipstream.model.cache_scales import CacheScales
from slipstream.model.compressed import expanded
from slipstream.model.gguf_quants import dequantize_tensor
from slipstream.spec.description import ModelDescription
from slipstream.spec.families.base import GGUF_FREQUENCIES, GGUF_UNREAD, ROTARY_BUFFERS
from slipstream.spec.native_formats import is_expandable
from slipstream.spec.parameters import (
    MinusOne,
    Placement,
    Shape,
    Swap,
    Transform,
    Transpose,
    Ungroup,
    Unpermute,
    Untwine,
    parameters,
)


class HeldWeights(Protocol):
    """Weights that are not filled as parameters: they take a checkpoint's tensors as these are, or in their stead."""

    def __contains__(self, target: str) -> bool:
        """Whether the weight of that name (ours) is held."""

    def take(self, name: str, read: Callable[[], Tensor], find: Callable[[str], Placement | None]) -> bool:
        """Whether the tensor `name` (the checkpoint's) belongs to one of them; `find` gives a tensor's place."""

    def missing(self, names: Mapping[str, Placement]) -> list[str]:
        """The checkpoint's names of what has not come."""

    def linears(self) -> dict[str, Linear]:
        """The weights by our names, when all was taken."""


def load_parameters(
    description: ModelDescription,
    *,
    dtype: torch.dtype,
    device: torch.device,
    held: HeldWeights | None = None,
    cache_scales: CacheScales | None = None,
    wanted: Callable[[str], bool] = lambda name: True,
) -> dict[str, Tensor]:
    """All parameters of the description's model that are `wanted`, by our names, but those that `held` and `cache_scales`
    take. CheckpointError names the tensor at fault."""
    shapes = {n: s for n, s in parameters(description.spec).items() if (held is None or n not in held) and wanted(n)}
    values = {name: torch.empty(shape, dtype=_dtype(name, dtype), device=device) for name, shape in shapes.items()}
    if description.format == "gguf":
        stored, names = _gguf_tensors(description, dtype)
        assert description.family.gguf is not None
        ignored = (*map(re.escape, GGUF_FREQUENCIES), *GGUF_UNREAD, *description.family.gguf.ignored)
    else:
        stored, names = stored_tensors_of(description.path), description.family.names(description.spec)
        if description.quantization is not None and description.quantization.sparse:
            stored = made_dense(stored)
        ignored = (*ROTARY_BUFFERS, *description.family.ignored)
        if description.family.mtp:
            ignored = (*ignored, rf"model\.layers\.{description.spec.num_layers}\..*")
    filled: set[str] = set()
    prefixes = description.family.prefixes
    formats = description.quantization.formats if description.quantization is not None else None

    def find(name: str) -> Placement | None:
        key = _canonical(name, prefixes, names)
        return None if key is None else names[key]

    def is_expanded(module: str) -> bool:
        place = find(f"{module}.weight")
        return place is not None and is_expandable(place.target) and place.target in values

    for name, shape, read in stored if formats is None else expanded(stored, formats, is_expanded):
        if cache_scales is not None and cache_scales.take(name, read, find):
            continue
        if held is not None and held.take(name, read, find):
            continue
        key = _canonical(name, prefixes, names)
        if key is None:
            if description.spec.tied_embeddings and name.split(".")[-2:] == ["lm_head", "weight"]:
                continue  # written although tied
            if any(re.fullmatch(pattern, _strip(name, prefixes)) or re.fullmatch(pattern, name) for pattern in ignored):
                continue
            raise CheckpointError(f"the checkpoint has a tensor {name!r} that the model has no place for", field=name)
        if key in filled:
            raise CheckpointError(f"the checkpoint has the tensor {name!r} twice", field=name)
        placement = names[key]
        if placement.target not in values:
            continue
        into = place(values[placement.target], placement)
        expected = stored_shape(tuple(into.shape), placement.transform)
        if tuple(shape) != expected and (1, *shape) != expected:  # GGUF writes a single row without its first dimension
            raise CheckpointError(
                f"the tensor {name!r} has shape {list(shape)}, and the config asks for {list(expected)}", field=name
            )
        into.copy_(transform(read().view(expected), placement.transform))
        filled.add(key)
    missing = [n for n, place in names.items() if n not in filled and place.target in values]
    if held is not None:
        missing += held.missing(names)
    if missing:
        some = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        raise CheckpointError(f"the checkpoint lacks {some}", field=missing[0])
    return values


def fill(
    shapes: Mapping[str, Shape],
    names: Mapping[str, Placement],
    stored: Iterable[Stored],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Parameters of these `shapes`, of a file's tensors with these `names`. CheckpointError names the tensor at fault."""
    values = {name: torch.empty(shape, dtype=_dtype(name, dtype), device=device) for name, shape in shapes.items()}
    filled: set[str] = set()
    for name, shape, read in stored:
        if name not in names:
            raise CheckpointError(f"the checkpoint has a tensor {name!r} that the draft head has no place for", field=name)
        into = place(values[names[name].target], names[name])
        if tuple(shape) != tuple(into.shape):
            raise CheckpointError(
                f"the tensor {name!r} has shape {list(shape)}, and the config asks for {list(into.shape)}", field=name
            )
        into.copy_(transform(read(), names[name].transform))
        filled.add(name)
    if missing := [name for name in names if name not in filled]:
        raise CheckpointError(f"the checkpoint lacks {', '.join(missing[:10])}", field=missing[0])
    return values


def dummy_parameters(
    description: ModelDescription, *, dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, Tensor]:
    """Random weights of the true shapes, made on the device: std 0.02, norms 1, biases 0."""
    generator = torch.Generator(device).manual_seed(seed)
    values = {}
    for name, shape in parameters(description.spec).items():
        value = torch.empty(shape, dtype=_dtype(name, dtype), device=device)
        if name.endswith(".bias"):
            value.zero_()
        elif len(shape) == 1 or name.endswith("norm.weight"):
            value.fill_(1.0)
        else:
            value.normal_(0.0, 0.02, generator=generator)
        values[name] = value
    return values


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What is added to the scores that experts are chosen by decides among near ones."""
    return torch.float32 if name.endswith(".correction.weight") else dtype


def place(target: Tensor, placement: Placement) -> Tensor:
    """The part of a parameter that a tensor fills."""
    whole = target if placement.copies is None else target.unflatten(0, (placement.copies, -1))
    dim = whole.dim() - target.dim()
    rows = whole.shape[dim] - placement.start if placement.rows is None else placement.rows
    return whole.narrow(dim, placement.start, rows)


def stored_shape(shape: Shape, transform: Transform | None) -> Shape:
    """How a checkpoint stores what becomes `shape`."""
    turned = isinstance(transform, Transpose) or (isinstance(transform, Untwine) and transform.transposed)
    return (*shape[:-2], shape[-1], shape[-2]) if turned else shape


def transform(value: Tensor, transform: Transform | None) -> Tensor:
    match transform:
        case None:
            return value
        case Transpose():
            return value.mT
        case Ungroup(num_kv_heads=k, group=group):
            heads = value.view(k, group + 2, value.shape[0] // (k * (group + 2)), *value.shape[1:])
            return torch.cat([part.flatten(0, 2) for part in (heads[:, :group], heads[:, group:-1], heads[:, -1:])])
        case Unpermute(num_heads=n):
            return value.view(n, value.shape[0] // n // 2, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
        case MinusOne():
            return value.float() - 1.0
        case Swap():
            return torch.cat(value.chunk(2)[::-1])
        case Untwine(transposed=transposed):
            if transposed:
                return torch.cat((value[..., ::2].mT, value[..., 1::2].mT), dim=-2)
            return torch.cat((value[:, ::2], value[:, 1::2]), dim=1)  # [experts, rows …]


def _canonical(name: str, prefixes: tuple[str, ...], names: Mapping[str, Placement]) -> str | None:
    """`name` as the family's table has it: some writers put a prefix before every name, some leave out the usual one."""
    for prefix in ("", *prefixes):
        if name.startswith(prefix) and (short := name[len(prefix) :]) in names:
            return short
    # Multimodal checkpoints nest the language model: model.language_model.layers… and language_model.model.layers…
    return next((m for m in (f"model.{_strip(name, prefixes)}",) if m in names), None)


def _strip(name: str, prefixes: tuple[str, ...]) -> str:
    return next((name[len(p) :] for p in sorted(prefixes, key=len, reverse=True) if p and name.startswith(p)), name)


def stored_tensors_of(path: Path) -> Iterator[Stored]:
    """The tensors of a folder, file by file, mapped rather than read."""
    from safetensors import SafetensorError, safe_open

    for file in safetensors_files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (no dict)
                    yield name, tuple(opened.get_slice(name).get_shape()), lambda n=name: opened.get_tensor(n)  # type: ignore[misc]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} can't be read: {error}", field=file.name) from error


def safetensors_files(path: Path) -> list[Path]:
    """The files of a folder that hold its tensors. CheckpointError if there are none, or one of its index is missing."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            outside = sorted(name for name in named if Path(name).name != name or not name.endswith(".safetensors"))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError, OSError) as error:
            raise CheckpointError(f"{index} can't be read: {error}", field=index.name) from error
        if outside:
            raise CheckpointError(f"{index} names {outside[0]!r}, which is no .safetensors file beside it", field=index.name)
        files = sorted(path / name for name in named)
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise CheckpointError(f"{path} lacks {', '.join(missing)}, which its index names", field=missing[0])
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickled = [f.name for f in (*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth"))]
        why = f"; {pickled[0]} is a pickle, which is never loaded: convert it to safetensors" if pickled else ""
        raise CheckpointError(f"{path} holds no .safetensors file{why} (load_format='dummy' needs none)", field="model")
    return files


def _gguf_tensors(description: ModelDescription, dtype: torch.dtype) -> tuple[Iterator[Stored], dict[str, Placement]]:
    """A GGUF file's tensors, and the family's table for them."""
    gguf, file = description.family.gguf, description.gguf
    assert gguf is not None
    assert file is not None
    names = gguf.names(description.spec)

    def kind(name: str) -> torch.dtype:
        # Norms keep their precision until one is taken off; everything else goes straight to the final type.
        return torch.float32 if name in names and isinstance(names[name].transform, MinusOne) else dtype

    stored = (
        (name, tuple(tensor.shape), lambda n=name: dequantize_tensor(file, n, kind(n)))
        for name, tensor in file.tensors.items()
    )
    return stored, names
