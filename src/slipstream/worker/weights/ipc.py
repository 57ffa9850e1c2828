"""Tensors of a trainer in GPU memory, which an engine on the same GPU reads in place (CUDA IPC).

A handle is stored by the GPU's UUID, as msgpack of plain numbers and bytes, never a pickle. The
trainer keeps the tensors, unchanged, until the update is finished.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor

from slipstream.errors import RequestError
from slipstream.messages.weight_ops import IpcPiece, TensorInfo
from slipstream.platform import Platform, platform_of
from slipstream.worker.weights.pieces import Came


class Handle(msgspec.Struct, frozen=True):
    """A tensor of another process: the parts of CUDA's handle of its storage, and its position in
    the storage."""

    storage: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits_for_event: bool
    first: int  # index of the tensor's first element in the storage


def handle_of(tensor: Tensor) -> dict[str, bytes]:
    """The handle of a contiguous tensor on a GPU, by the GPU's UUID: an entry of `ipc_handles`."""
    if tensor.device.type != "cuda":
        raise RequestError("CUDA IPC is for tensors on a GPU", field="ipc_handles")
    if not tensor.is_contiguous():
        raise RequestError("CUDA IPC is for contiguous tensors", field="ipc_handles")
    shared: Any = tensor.detach().untyped_storage()
    _, storage, size, offset, counter, counter_offset, event, waits = shared._share_cuda_()
    handle = Handle(
        *(storage, size, offset, counter, counter_offset, event, waits),
        int(tensor.storage_offset()),
    )
    return {platform_of(tensor.device).device_uuid: msgspec.msgpack.encode(handle)}


def own_handle(info: TensorInfo, handles: dict[str, bytes], uuid: str) -> Handle:
    """The handle for the GPU `uuid`. RequestError if there is none, or it can't be read."""
    if uuid not in handles:
        raise RequestError(
            f"{info.name} has handles for {', '.join(handles) or 'no GPU'}, and the engine runs on {uuid}",
            field="ipc_handles",
        )
    try:
        return msgspec.msgpack.decode(handles[uuid], type=Handle)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        message = f"{info.name}: the handle can't be read ({error}); make it with handle_of"
        raise RequestError(message, field="ipc_handles") from None


def opened(piece: IpcPiece, platform: Platform) -> Iterator[Came]:
    """Yields the tensors of a piece, opened on the platform's GPU in the trainer's memory, without a copy."""
    if not (uuid := platform.device_uuid):
        raise RequestError(
            "CUDA IPC needs the engine's weights on a GPU; send them by a folder or as tensors",
            field="ipc_handles",
        )
    found = [own_handle(i, h, uuid) for i, h in zip(piece.tensors, piece.handles, strict=True)]
    for info, handle in zip(piece.tensors, found, strict=True):
        value = _opened(info, handle, platform.device)
        yield info.name, info.shape, info.dtype, lambda value=value: value  # type: ignore[misc]


def _opened(info: TensorInfo, h: Handle, device: torch.device) -> Tensor:
    index = device.index or 0
    make: Any = torch.UntypedStorage
    storage = make._new_shared_cuda(
        *(index, h.storage, h.storage_bytes, h.storage_offset),
        *(h.counter, h.counter_offset, h.event, h.waits_for_event),
    )
    strides = torch.empty(info.shape, device="meta").stride()
    empty = torch.empty(0, dtype=getattr(torch, info.dtype), device=device)
    return empty.set_(storage, h.first, info.shape, strides)
