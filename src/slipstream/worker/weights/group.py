"""A group of a trainer's process and an engine's ranks, in which the trainer broadcasts weights.

    group = WeightGroup("127.0.0.1", 29600, 0, 2)      # the trainer, rank 0 of 2
    group.broadcast(tensor)                            # in the order that `update_weights` names

The group is apart from torch's default one, so a trainer may have its own ranks. Every member
blocks until all have joined. Tensors travel as bytes, so that gloo takes every type.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.errors import EngineError, RequestError

JOIN_S = 50.0
"""Seconds that a member waits for the others, and for a tensor: less than an engine may be silent."""


class WeightGroup:
    """One member of the group. Rank 0 has the store at `address`:`port`, by which the others find it.

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
        wait = datetime.timedelta(seconds=timeout_s)
        distributed: Any = dist
        try:
            self._store = distributed.TCPStore(
                address, port, world_size, is_master=rank == 0, timeout=wait, wait_for_workers=False
            )
            own = distributed.PrefixStore(f"slipstream/{name}", self._store)
            if backend == "gloo":
                self._group = distributed.ProcessGroupGloo(own, rank, world_size, wait)
            else:
                options = distributed.ProcessGroupNCCL.Options()
                options._timeout = wait
                self._group = distributed.ProcessGroupNCCL(own, rank, world_size, options)
        except (RuntimeError, ValueError) as error:
            raise EngineError(
                f"the group {name!r} at {address}:{port} was not joined by all {world_size} in {timeout_s:.0f} s: {error}"
            ) from error

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Send a tensor from the member `source`, or receive it in place."""
        sent = tensor.detach()
        if self.backend == "gloo":
            sent = sent.cpu()
        sent = sent.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        try:
            self._group.broadcast([sent.view(-1).view(torch.uint8)], options).wait()
        except RuntimeError as error:
            raise EngineError(f"a broadcast of weights failed: {error}") from error
        if self.rank != source and sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)

    def receive(self, shape: Sequence[int], dtype: str, source: int = 0) -> Tensor:
        """Receive a tensor of this shape and type."""
        made = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=self.device)
        self.broadcast(made, source)
        return made

    def close(self) -> None:
        """Leave the group."""
        del self._group, self._store
