"""The safetensors files of a folder: which of them are the model's own, and their headers. No
torch; weights are not read.

A folder may have other files with tensors: Mistral's own format (`consolidated*`), an adapter, a
copy in another dtype (`model.fp16.safetensors`). Reading them all would load the model twice.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
OTHERS = ("consolidated", "adapter_", "optimizer")
"""Prefixes of names of files that are never the model's weights."""

_SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")
_VARIANT = re.compile(r"model\.\w+\.safetensors")
_CHUNK = 1 << 24


def own_names(names: Iterable[str]) -> list[str]:
    """Out of a folder's *.safetensors `names`, the files with the model's weights if there is no
    index.

    The choice is transformers': `model.safetensors` before shards, and these before other files.
    CheckpointError if several files are copies of the model in different dtypes.
    """
    found = sorted(n for n in names if n.endswith(".safetensors") and not n.startswith(OTHERS))
    if SINGLE_NAME in found:
        return [SINGLE_NAME]
    if shards := [name for name in found if _SHARD.fullmatch(name)]:
        return shards
    variants = [name for name in found if _VARIANT.fullmatch(name)]
    if variants and len(found) > 1:
        raise CheckpointError(
            f"the folder holds {', '.join(found[:4])}, and no model.safetensors: keep only the one to read",
            field=variants[0],
        )
    return found


def weight_files(path: Path) -> list[Path]:
    """The files with the model's tensors in a folder; empty if there are none.

    May include missing files that an index names. CheckpointError if the index can't be read, or
    the choice of files is ambiguous.
    """
    if (where := weight_map(path)) is not None:
        return sorted({path / name for name in where.values()})
    return [path / name for name in own_names(file.name for file in path.glob("*.safetensors"))]


def weight_map(path: Path) -> dict[str, str] | None:
    """File name of each tensor, from the folder's index.

    None if there is no index, or if `model.safetensors` exists, which precedes it. A broken index
    raises CheckpointError in any case.
    """
    index = path / INDEX_NAME
    if not index.is_file():
        return None
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        outside = sorted(
            name
            for name in set(where.values())
            if Path(name).name != name or not name.endswith(".safetensors")
        )
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{index} can't be read: {error}", field=index.name) from error
    if outside:
        raise CheckpointError(
            f"{index} names {outside[0]!r}, which is not a .safetensors file next to it",
            field=index.name,
        )
    return None if (path / SINGLE_NAME).is_file() else dict(where)


def safetensors_files(path: Path) -> list[Path]:
    """The files with the model's tensors in a folder. CheckpointError if there are none, or if the
    index names a missing one."""
    files = weight_files(path)
    if missing := [f.name for f in files if not f.is_file()]:
        raise CheckpointError(
            f"{path} lacks {', '.join(missing)}, which its index names", field=missing[0]
        )
    if not files:
        others = sorted(f.name for f in path.glob("*.safetensors"))
        pickled = [f.name for f in (*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth"))]
        why = ""
        if others:
            why = f"; {others[0]} is not a model in transformers' format: convert it"
        elif pickled:
            why = f"; {pickled[0]} is a pickle, which is never loaded: convert it to safetensors"
        raise CheckpointError(
            f"{path} holds no .safetensors file of a model{why} (load_format='dummy' needs none)",
            field="model",
        )
    return files


def weight_bytes(path: Path) -> int:
    """The size of a folder's weights on disk; 0 if there are none."""
    return sum(file.stat().st_size for file in weight_files(path) if file.is_file())


def tensor_names(path: Path) -> frozenset[str]:
    """Names of all tensors in a folder, from its index if there is one, unchecked; empty without files."""
    if (where := weight_map(path)) is not None:
        return frozenset(where)
    return frozenset(name for file in weight_files(path) for name in _header(file)[0])


def file_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's tensors, by name."""
    try:
        return {name: tuple(entry["shape"]) for name, entry in _header(file)[0].items()}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{file} can't be read: {error}", field=file.name) from error


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """(the header's entries by tensor name, offset of the first tensor's bytes)."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(size, file.stat().st_size)))
            return {
                name: entry for name, entry in header.items() if name != "__metadata__"
            }, size + 8
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} can't be read: {error}", field=file.name) from error


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a tensor's bytes: [begin, begin + size) of `file`, which was last modified at
    `mtime_ns`."""

    file: Path
    mtime_ns: int
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


def find_tensor(path: Path, name: str) -> StoredTensor | None:
    """The tensor `name` of a folder; None if its file is missing or lacks it."""
    where = weight_map(path)
    files = weight_files(path) if where is None else [path / where[name]] if name in where else []
    for file in files:
        if file.is_file() and (entry := (found := _header(file))[0].get(name)) is not None:
            try:
                first, end = entry["data_offsets"]
                shape = tuple(entry["shape"])
                time = file.stat().st_mtime_ns
                return StoredTensor(
                    file, time, entry["dtype"], shape, found[1] + first, end - first
                )
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{file} can't be read: {error}", field=file.name) from error
    return None


@lru_cache(maxsize=64)
def same_numbers(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two stored tensors are equal, byte by byte. Stops at the first difference, so only
    equal tensors are read in full."""
    if (a.dtype, a.shape, a.size) != (b.dtype, b.shape, b.size):
        return False
    with a.file.open("rb") as one, b.file.open("rb") as other:
        for at in range(0, a.size, _CHUNK):
            count = min(_CHUNK, a.size - at)
            if os.pread(one.fileno(), count, a.begin + at) != os.pread(
                other.fileno(), count, b.begin + at
            ):
                return False
    return True
