"""Arguments of vLLM-compatible calls for weight updates, converted to messages for the core (for `LLM` and `AsyncLLM`).

A trainer calls `init_weight_transfer_engine` once, and then, for each update, `start_weight_update`, `update_weights` for
each piece, and `finish_weight_update`. A piece is one of:

1. `tensors`: tensors or arrays of the caller's process, by name;
2. `path`: a safetensors file with some of the tensors, or a complete checkpoint of the same model;
3. `names`, `dtype_names`, `shapes`: tensors that the trainer broadcasts next, in this order;
4. the same with `ipc_handles`: tensors in the memory of the engine's GPU.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.errors import RequestError
from slipstream.messages.weight_ops import (
    BroadcastPiece,
    FilePiece,
    FolderPiece,
    IpcPiece,
    JoinWeightGroup,
    Piece,
    TensorInfo,
    tensor_infos,
)
from slipstream.messages.weights import GivenPiece

GROUP = "weights"
"""Name of a group that was given none; also SGLang's default."""

MAX_WORLD_SIZE = 65536
SHARED_MEMORY = Path("/dev/shm")


def unwrapped(request: Any, name: str) -> dict[str, Any]:
    """The `init_info` or `update_info` in a request: its entry, its attribute, or the request itself."""
    if request is None:
        return {}
    if isinstance(request, Mapping):
        found = request.get(name, request)
    else:
        found = getattr(request, name, request)
    if not isinstance(found, Mapping):
        raise RequestError(f"{name} must be an object with the fields of an update", field=name)
    return dict(found)


def joining(request: Any) -> JoinWeightGroup | None:
    """The group that an `init_info` describes; None if pieces come another way."""
    info = unwrapped(request, "init_info")
    known = {
        *("master_address", "master_port", "rank_offset", "world_size"),
        *("backend", "group_name"),
    }
    _refuse_unknown(info, known, "init_info")
    backend = info.get("backend", "nccl")
    if not info or backend in ("ipc", "tensors", "folder"):
        return None
    if backend not in ("gloo", "nccl"):
        message = f"backend must be gloo, nccl, ipc, tensors or folder, got {str(backend)[:40]!r}"
        raise RequestError(message, field="backend")
    found = {}
    for name, default in (("master_port", None), ("world_size", None), ("rank_offset", 1)):
        value = info.get(name, default)
        if type(value) is not int or value < 0:
            raise RequestError(f"{name} must be a number", field=name)
        found[name] = value
    address = info.get("master_address", "127.0.0.1")
    if not isinstance(address, str):
        raise RequestError("master_address must be a text", field="master_address")
    if not 1 <= found["master_port"] <= 65535:
        raise RequestError("master_port must be from 1 to 65535", field="master_port")
    if not 2 <= found["world_size"] <= MAX_WORLD_SIZE:
        message = (
            f"world_size must be from 2 to {MAX_WORLD_SIZE}: the trainer and the engine's ranks"
        )
        raise RequestError(message, field="world_size")
    if not 0 <= found["rank_offset"] < found["world_size"]:
        raise RequestError("rank_offset must be less than world_size", field="rank_offset")
    return JoinWeightGroup(
        str(info.get("group_name", GROUP)),
        address,
        found["master_port"],
        found["rank_offset"],
        found["world_size"],
        backend,
    )


def declared(request: Any) -> tuple[TensorInfo, ...] | None:
    """The tensors that `start_weight_update` announces; None if it announces none."""
    info = unwrapped(request, "update_info")
    _refuse_unknown(info, {"names", "dtype_names", "dtypes", "shapes"}, "update_info")
    return tensor_infos(info) if info else None


def piece_of(request: Any) -> Piece | GivenPiece:
    """The piece that an `update_info` describes."""
    info = unwrapped(request, "update_info")
    _refuse_unknown(
        info,
        {
            *("tensors", "path", "names", "dtype_names", "dtypes", "shapes"),
            *("group_name", "source", "ipc_handles"),
        },
        "update_info",
    )
    for whole in ("tensors", "path"):
        if info.get(whole) is not None and (more := sorted(info.keys() - {whole})):
            message = f"a piece by {whole} has no {more[0]}; send one or the other"
            raise RequestError(message, field=more[0])
    if (tensors := info.get("tensors")) is not None:
        if not isinstance(tensors, Mapping):
            raise RequestError("tensors must be a mapping from names to tensors", field="tensors")
        return GivenPiece(dict(tensors))
    if (path := info.get("path")) is not None:
        if not isinstance(path, str | os.PathLike):
            raise RequestError("path must be a text", field="path")
        file = Path(path).expanduser().resolve()
        if file.suffix == ".safetensors":
            return FilePiece(str(file))
        return FolderPiece(str(file))
    infos = tensor_infos(info)
    if (handles := info.get("ipc_handles")) is not None:
        if not isinstance(handles, (list, tuple)) or len(handles) != len(infos):
            message = "ipc_handles must have an entry for each name"
            raise RequestError(message, field="ipc_handles")
        if not all(
            isinstance(h, Mapping)
            and all(isinstance(u, str) and isinstance(b, bytes) for u, b in h.items())
            for h in handles
        ):
            message = "an entry of ipc_handles is bytes by a GPU's UUID, as handle_of makes it"
            raise RequestError(message, field="ipc_handles")
        return IpcPiece(infos, tuple(dict(h) for h in handles))
    source = info.get("source", 0)
    if type(source) is not int or source < 0:
        raise RequestError("source must be the trainer's rank in the group", field="source")
    return BroadcastPiece(str(info.get("group_name", GROUP)), infos, source)


def _refuse_unknown(info: Mapping[str, Any], known: set[str], what: str) -> None:
    if unknown := sorted(set(map(str, info)) - known):
        raise RequestError(
            f"{what} has no field {unknown[0][:40]!r}; it may have {', '.join(sorted(known))}",
            field=unknown[0][:40],
        )


@contextmanager
def as_message(piece: Piece | GivenPiece) -> Iterator[Piece]:
    """Context manager that yields the piece in a form that a message can carry. Tensors of this
    process are written to a file in memory, removed when the engine has opened it."""
    if not isinstance(piece, GivenPiece):
        yield piece
        return
    where = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="slipstream-weights-", dir=where) as folder:
        path = Path(folder) / "piece.safetensors"
        write_tensors(piece.tensors, path)
        yield FilePiece(str(path))


def write_tensors(tensors: Mapping[str, Any], path: Path) -> None:
    """Write tensors or arrays to a safetensors file."""
    strange = [n for n, x in tensors.items() if not (hasattr(x, "shape") and hasattr(x, "dtype"))]
    if strange:
        raise RequestError(f"{strange[0]!r} is neither a tensor nor an array", field="tensors")
    if any(hasattr(x, "data_ptr") for x in tensors.values()):
        from safetensors.torch import save_file

        # a copy each: names may share memory (tied embeddings), which safetensors refuses
        made = {n: x.detach().to("cpu", copy=True).contiguous() for n, x in tensors.items()}
        save_file(made, path)
        return
    import numpy as np
    from safetensors.numpy import save_file as save_arrays

    save_arrays({n: np.ascontiguousarray(x) for n, x in tensors.items()}, path)
