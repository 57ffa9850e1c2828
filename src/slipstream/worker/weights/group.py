"""A group of a trainer's process and an engine's ranks, in which the trainer broadcasts weights.

    group = WeightGroup("127.0.0.1", 29600, 0, 2)      # the trainer, rank 0 of 2
    group.broadcast(tensor)                            # in the order that `update_weights` names

The group is separate from torch's default one, so a trainer may have its own ranks. Every member
blocks until all have joined. Tensors travel as bytes, so that gloo can send every dtype.

Two integers precede each tensor: its size in bytes, and its dtype's index in `DTYPES`. A receiver
raises an error if they differ from those expected; otherwise gloo would end its process. A trainer
that broadcasts by other means must send them too.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.errors import EngineError, RequestError
from slipstream.messages.weight_ops import DTYPES, JOIN_S

LEAST_S = 0.01
"""Minimum timeout of a step in seconds. torch accepts none below a millisecond."""


class WeightGroup:
    """One member of the group. Rank 0 serves the TCPStore at `address`:`port`, through which the others join.

    `backend`: "gloo" goes through host memory, "nccl" from GPU to GPU. `device` is where tensors are
    received.
    """

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        *,
        name: str = "weights",
        backend: str = "gloo",
        device: Any = None,
        timeout_s: float = JOIN_S,
    ) -> None:
        if backend not in ("gloo", "nccl"):
            raise RequestError(f"backend must be gloo or nccl, got {backend!r}", field="backend")
        if not 0 <= rank < world_size:
            message = f"rank {rank} is not one of {world_size}; see rank_offset and world_size"
            raise RequestError(message, field="rank_offset")
        self.rank, self.world_size, self.backend = rank, world_size, backend
        self.device = torch.device("cpu" if backend == "gloo" or device is None else device)
        self._timeout_s = timeout_s
        deadline, wait = self.deadline(), datetime.timedelta(seconds=timeout_s)
        distributed: Any = dist
        try:
            if rank != 0:
                _await_store(address, port, deadline)
            self._store = distributed.TCPStore(
                address, port, world_size, is_master=rank == 0, timeout=wait, wait_for_workers=False
            )
            wait = _left(deadline)
            self._store.set_timeout(wait)
            own = distributed.PrefixStore(f"slipstream/{name}", self._store)
            if backend == "gloo":
                self._group = distributed.ProcessGroupGloo(own, rank, world_size, wait)
            else:
                options = distributed.ProcessGroupNCCL.Options()
                options._timeout = wait
                self._group = distributed.ProcessGroupNCCL(own, rank, world_size, options)
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            raise EngineError(
                f"the group {name!r} at {address}:{port} was not joined by all {world_size} in {timeout_s:.0f} s: {error}"
            ) from error

    def deadline(self) -> float:
        """Time (`time.monotonic`) by which an operation started now must have ended."""
        return time.monotonic() + self._timeout_s

    def broadcast(self, tensor: Tensor, source: int = 0, *, deadline: float | None = None) -> None:
        """Send a tensor from the member `source`, or receive it in place.

        RequestError if the tensor sent has another size or dtype. The group can't receive anything
        after that.
        """
        deadline = self.deadline() if deadline is None else deadline
        sent = tensor.detach()
        if self.backend == "gloo":
            sent = sent.cpu()
        data = sent.contiguous().view(-1).view(torch.uint8)
        sent = data.view(sent.dtype).view(sent.shape)
        kind = str(sent.dtype).removeprefix("torch.")
        own = [data.numel(), DTYPES.index(kind) if kind in DTYPES else -1]
        told = torch.tensor(own, dtype=torch.int64, device=sent.device)
        self._send(told.view(torch.uint8), source, deadline)
        if (came := told.tolist()) != own:
            code = came[1]
            sends = DTYPES[code] if 0 <= code < len(DTYPES) else "another type"
            raise RequestError(
                f"the trainer sends {came[0]} bytes of {sends} where {own[0]} of {kind} are expected; "
                "join again, and send what the piece names",
                field="shapes",
            )
        self._send(data, source, deadline)
        if self.rank != source and sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)

    def _send(self, data: Tensor, source: int, deadline: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        options.timeout = _left(deadline)
        try:
            self._group.broadcast([data], options).wait()
        except RuntimeError as error:
            raise EngineError(f"a broadcast of weights failed: {error}") from error

    def receive(
        self, shape: Sequence[int], dtype: str, source: int = 0, *, deadline: float | None = None
    ) -> Tensor:
        """Receive a tensor of this shape and dtype."""
        made = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=self.device)
        self.broadcast(made, source, deadline=deadline)
        return made

    def close(self) -> None:
        """Leave the group."""
        del self._group, self._store


def _left(deadline: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(LEAST_S, deadline - time.monotonic()))


def _await_store(address: str, port: int, deadline: float) -> None:
    """Wait until rank 0 listens. TCPStore itself retries for longer than its timeout."""
    while True:
        try:
            socket.create_connection((address, port), _left(deadline).total_seconds()).close()
            return
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)
