"""Operations that update a running model's weights, and their answer. No torch.

An update is Begin, any number of pieces, Check, Write; Drop ends it early. A piece describes where
its tensors are, by the checkpoint's names: in files, in a trainer's GPU memory, or in a broadcast
that every rank receives.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from slipstream.errors import RequestError

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that an update's tensors may have. They are quantized like those of a load."""


JOIN_S = 40.0
"""Maximum seconds that a member waits for the others to join, in all its steps together, and for the
tensors of a piece: less than the time after which a silent engine counts as dead."""


class TensorInfo(msgspec.Struct, frozen=True):
    """A trainer's tensor, with transformers' name for it in a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def tensor_infos(info: dict[str, Any]) -> tuple[TensorInfo, ...]:
    """Tensors declared by an `update_info`, in vLLM's or SGLang's format. RequestError names the
    wrong field."""
    names = info.get("names")
    dtypes = info.get("dtype_names", info.get("dtypes"))
    shapes = info.get("shapes")
    for what, value in (("names", names), ("dtype_names", dtypes), ("shapes", shapes)):
        if not isinstance(value, (list, tuple)):
            raise RequestError(f"{what} must be a list, one entry for each tensor", field=what)
    if not len(names) == len(dtypes) == len(shapes):  # type: ignore[arg-type]
        raise RequestError("names, dtype_names and shapes differ in length", field="names")
    found = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):  # type: ignore[arg-type]
        short = str(dtype).removeprefix("torch.")
        if not isinstance(name, str) or not name:
            raise RequestError("names must be texts", field="names")
        if short not in DTYPES:
            message = f"{name} has dtype {str(dtype)[:40]!r}; send one of {', '.join(DTYPES)}"
            raise RequestError(message, field="dtype_names")
        if not isinstance(shape, (list, tuple)) or not all(type(n) is int and n > 0 for n in shape):
            raise RequestError(f"{name}: a shape is a list of sizes above 0", field="shapes")
        found.append(TensorInfo(name, short, tuple(shape)))
    return tuple(found)


class JoinWeightGroup(msgspec.Struct, tag=True, frozen=True):
    """Join the group of a trainer that broadcasts. Rank r of the engine is rank `rank_offset` + r of the group."""

    name: str
    address: str
    port: int
    rank_offset: int
    world_size: int
    backend: Literal["gloo", "nccl"]


class LeaveWeightGroup(msgspec.Struct, tag=True, frozen=True):
    name: str


class BeginWeights(msgspec.Struct, tag=True, frozen=True):
    """Begin an update. RequestError for a format that can't be written in place. With `tensors`,
    exactly these must be sent."""

    tensors: tuple[TensorInfo, ...] | None = None


class FilePiece(msgspec.Struct, tag=True, frozen=True):
    """Tensors in a safetensors file. It is opened now, and read when the weights are built."""

    path: str


class FolderPiece(msgspec.Struct, tag=True, frozen=True):
    """A whole checkpoint of the same model: a folder, or a GGUF file."""

    path: str


class BroadcastPiece(msgspec.Struct, tag=True, frozen=True):
    """Tensors that rank `source` of the group broadcasts, in this order."""

    group: str
    tensors: tuple[TensorInfo, ...]
    source: int = 0


class IpcPiece(msgspec.Struct, tag=True, frozen=True):
    """Tensors in the memory of a GPU of this machine, which the trainer must not free until the update ends.

    `handles` are `worker.weights.ipc.handle_of` of each tensor, by the GPU's UUID.
    """

    tensors: tuple[TensorInfo, ...]
    handles: tuple[dict[str, bytes], ...]


class CheckWeights(msgspec.Struct, tag=True, frozen=True):
    """Build all weights once, and compare their formats with the running ones. Nothing is written."""


class WriteWeights(msgspec.Struct, tag=True, frozen=True):
    """Overwrite the running weights, and return their checksums. After an error here they are a mix
    of old and new."""


class DropWeights(msgspec.Struct, tag=True, frozen=True):
    """Discard an update that was not written."""


class DropPiece(msgspec.Struct, tag=True, frozen=True):
    """Discard the last piece, because another rank rejected it."""


class SumWeights(msgspec.Struct, tag=True, frozen=True):
    """Request the checksums of the running weights."""


Piece: TypeAlias = FilePiece | FolderPiece | BroadcastPiece | IpcPiece
WeightsOp: TypeAlias = (
    JoinWeightGroup
    | LeaveWeightGroup
    | BeginWeights
    | Piece
    | CheckWeights
    | WriteWeights
    | DropWeights
    | DropPiece
    | SumWeights
)


WHOLE = WriteWeights, SumWeights
"""Operations on all weights, for which experts must be on the ranks where a load places them."""


def undoing(op: WeightsOp) -> tuple[WeightsOp, ...]:
    """Operations that make the ranks equal again if only some of them succeeded in `op`."""
    match op:
        case BeginWeights():
            return (DropWeights(),)
        case JoinWeightGroup():
            return (LeaveWeightGroup(op.name),)
        case BroadcastPiece():
            return DropPiece(), LeaveWeightGroup(op.group)
        case FilePiece() | FolderPiece() | IpcPiece():
            return (DropPiece(),)
    return ()
