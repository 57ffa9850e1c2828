"""A file of packed products, which one load quantized and packed and the next start reads back.

It is a safetensors file of bytes, whose metadata has each part's kind and shape. It appears under
its name only when it is complete. It is read into an `Arena`, not mapped: products read an arena's
huge pages faster than a file's small ones, and a mapping would count twice as the process's memory.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import CheckpointError
from slipstream.kernels.cpu.arrays import type_name
from slipstream.kernels.cpu.native import S8, Arena, Bytes, load
from slipstream.kernels.cpu.packed import NativeLinear, Packed, PackedExperts, stand_in
from slipstream.kernels.cpu.program.moe import NativeExperts
from slipstream.kernels.weights.forms import Linear

CHUNK = 16 * 2**20
"""Bytes that a thread reads at a time."""


def write_packed(path: Path, products: Mapping[str, NativeLinear | NativeExperts]) -> int:
    """Writes a file and returns its size in bytes. Without products it returns 0 and writes
    none."""
    if not products:
        return 0
    header: dict[str, Any] = {
        "__metadata__": {
            "products": json.dumps({name: _described(w) for name, w in products.items()})
        }
    }
    parts: list[tuple[str, Bytes]] = []
    for name, w in products.items():
        own: Sequence[Packed | PackedExperts] = w.parts
        parts += [(f"{name}:{i}", part.data) for i, part in enumerate(own)]
    end = 0
    for name, data in parts:
        header[name] = {"dtype": "U8", "shape": [data.size], "data_offsets": [end, end + data.size]}
        end += data.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    path.parent.mkdir(parents=True, exist_ok=True)
    # unique to this thread
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:  # a link that somebody made there is not followed
            file.write(struct.pack("<Q", len(text)) + text)
            for _, data in parts:
                file.write(data.data)
            file.flush()
            # otherwise a crashed machine might leave a file of the right length without the data
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return 8 + len(text) + end


def read_packed(path: Path, arena: Arena, num_threads: int) -> dict[str, Linear]:
    """Reads the products of `write_packed` into `arena`, without biases.

    CheckpointError if the file is cut off or its header is wrong; OSError if it can't be opened or
    read.
    """
    from concurrent.futures import ThreadPoolExecutor

    try:
        with path.open("rb", buffering=0) as file:
            size = path.stat().st_size
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, size)))
            described = json.loads(header["__metadata__"]["products"])
            spans = {
                name: entry["data_offsets"]
                for name, entry in header.items()
                if name != "__metadata__"
            }
            if size != 8 + length + max(end for _, end in spans.values()):
                raise ValueError("it is cut off")
            data = {name: arena.take(end - start) for name, (start, end) in spans.items()}
            linears = {name: _linear(name, d, data, arena) for name, d in described.items()}
            chunks = [
                (8 + length + spans[name][0] + at, own[at : at + CHUNK])
                for name, own in data.items()
                for at in range(0, own.size, CHUNK)
            ]
            with ThreadPoolExecutor(num_threads) as pool:
                list(pool.map(lambda chunk: _read(file.fileno(), *chunk), chunks))
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{path} can't be read: {error}", field=path.name) from error
    return linears


def _read(fd: int, offset: int, into: Bytes) -> None:
    rest = into.data
    while rest:
        count = os.preadv(fd, [rest], offset)
        if count == 0:
            raise ValueError("it ends early")
        rest, offset = rest[count:], offset + count


def _described(w: NativeLinear | NativeExperts) -> dict[str, Any]:
    return {
        "dtype": type_name(w.weight),
        "rows": w.weight.shape[0],
        "num_experts": w.parts[0].num_experts if isinstance(w, NativeExperts) else None,
        "parts": [[part.kind, part.rows, part.inner] for part in w.parts],
    }


def _linear(
    name: str, described: Mapping[str, Any], data: Mapping[str, Bytes], arena: Arena
) -> Linear:
    num_experts: int | None = described["num_experts"]
    parts = [
        (kind, rows, inner, data[f"{name}:{i}"])
        for i, (kind, rows, inner) in enumerate(described["parts"])
    ]
    for kind, rows, inner, own in parts:
        least = load().ss_packed_bytes(kind, rows, inner) if kind != S8 else 8
        if own.size < least * (num_experts or 1):
            raise ValueError(
                f"{name} has {own.size} bytes, and {least * (num_experts or 1)} are needed"
            )
    weight: Any = stand_in((described["rows"], parts[0][2]), np.dtype(described["dtype"]))
    if num_experts is None:
        plain = tuple(Packed(*part, arena.pool) for part in parts)
        return NativeLinear(weight=weight, bias=None, parts=plain)
    experts = tuple(
        PackedExperts(kind, rows, inner, num_experts, own, arena.pool)
        for kind, rows, inner, own in parts
    )
    return NativeExperts(weight=weight, bias=None, parts=experts)
