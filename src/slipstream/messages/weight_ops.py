"""Operations that change a running model's weights, and their answer. No torch.

An update is Begin, any number of pieces, Check, Write; Drop ends it early. A piece says where its
tensors are, by the checkpoint's names: in files, in a trainer's GPU memory, or in a broadcast that
every rank receives.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from slipstream.errors import RequestError

DTYPES = ("float32", "bfloat16", "float16")
"""Types that an update's tensors may have. They are quantized on the way, as in a load."""


JOIN_S = 40.0
"""Seconds that a member waits for the others to join, all steps of it together, and for the tensors
of a piece: less than an engine may be silent."""


class TensorInfo(msgspec.Struct, frozen=True):
    """A tensor that a trainer has, by the name that transformers writes to a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def tensor_infos(info: dict[str, Any]) -> tuple[TensorInfo, ...]:
    """The tensors that an `update_info` declares, by vLLM's names or SGLang's. RequestError names
    the field at fault."""
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
    """Join the group of a trainer that broadcasts. Rank r of the engine is `rank_offset` + r."""

    name: str
    address: str
    port: int
    rank_offset: int
    world_size: int
    backend: Literal["gloo", "nccl"]


class LeaveWeightGroup(msgspec.Struct, tag=True, frozen=True):
    name: str


class BeginWeights(msgspec.Struct, tag=True, frozen=True):
    """Begin an update. A form that can't be written in place is refused here. With `tensors`, no
    others may come, and all of them must."""

    tensors: tuple[TensorInfo, ...] | None = None


class FilePiece(msgspec.Struct, tag=True, frozen=True):
    """Tensors in a safetensors file. It is opened now, and read when the weights are made."""

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
    """Tensors in the memory of a GPU of this machine, which the trainer keeps until the update ends.

    `handles` are `worker.weights.ipc.handle_of` of each tensor, by the GPU's UUID.
    """

    tensors: tuple[TensorInfo, ...]
    handles: tuple[dict[str, bytes], ...]


class CheckWeights(msgspec.Struct, tag=True, frozen=True):
    """Make all weights once, and compare their forms with those that run. Nothing is written."""


class WriteWeights(msgspec.Struct, tag=True, frozen=True):
    """Write the weights over those that run, and return their checksums. After an error here they
    are a mix."""


class DropWeights(msgspec.Struct, tag=True, frozen=True):
    """Forget an update that was not written."""


class DropPiece(msgspec.Struct, tag=True, frozen=True):
    """Forget the last piece: another rank could not take it."""


class SumWeights(msgspec.Struct, tag=True, frozen=True):
    """Ask for the checksums of the weights that run."""


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
"""Operations on all weights, for which experts that changed ranks are where a load puts them."""


def undoing(op: WeightsOp) -> tuple[WeightsOp, ...]:
    """Operations that make the ranks equal again if only some of them could carry out `op`."""
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
