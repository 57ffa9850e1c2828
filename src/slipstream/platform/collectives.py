"""Sums and collections over the ranks that compute one model together, through `torch.distributed`: NCCL between GPUs, gloo
between CPUs. A process belongs to one group.

Between GPUs that can write to each other's memory, sums of up to some megabytes are one kernel (`PeerSums`): NCCL's start costs
more than their bytes. NVLink multicast is never used.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.errors import first_line

TIMEOUT_S = 600.0
"""A start may be so far ahead on one rank: it is the rank whose part of the checkpoint is read first. A rank's death ends the
others long before (`worker.ranks.process_executor`)."""


MAX_SENT = 16
"""Tensors to another stage that may be on their way at once."""

SWAPPED_BYTES = 2**24
"""Bytes of a tensor that two ranks exchange at a time, which is the extra memory that it takes."""


class Rendezvous:
    """The meeting point of a group's ranks: a store at rank 0, which makes it and says its `port` to the others. `host` is its
    host's address."""

    def __init__(
        self,
        rank: int,
        size: int,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        on_host: tuple[int, int] | None = None,
        mixed: bool = False,
    ) -> None:
        """`on_host`: which of how many ranks of this host it is; None: all are here. `mixed`: some ranks have a CPU and some a
        GPU, so all that they exchange goes through the host's memory."""
        self.rank, self.size, self.mixed = rank, size, mixed
        self.local_rank, self.local_size = on_host or (rank, size)
        wait = datetime.timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore  # type: ignore[attr-defined]
        self._store = store(
            host, port, size, is_master=rank == 0, timeout=wait, wait_for_workers=False
        )
        self.port = int(self._store.port)

    def join(self, backend: str, device: torch.device) -> RankGroup:
        """The group, once all ranks are there. `backend`: the platform's `collectives`."""
        wait = datetime.timedelta(seconds=TIMEOUT_S)
        backend = "gloo" if self.mixed else backend
        own = device if backend == "nccl" else None
        dist.init_process_group(
            backend,
            store=self._store,
            rank=self.rank,
            world_size=self.size,
            timeout=wait,
            device_id=own,
        )
        return RankGroup(self.rank, self.size, device, through_host=self.mixed)


class Pipe:
    """Links to the stages of a pipeline before and after this one, and from the last back to the first. What a rank sends, the
    other receives in the same order.

    What goes back has a group of its own. In one group the first stage would send the next step's residual before it receives
    this one's tokens, and the last stage the other way round: each would wait for the other."""

    def __init__(
        self,
        rank: int,
        each: int,
        size: int,
        device: torch.device,
        back: dist.ProcessGroup,
        *,
        through_host: bool = False,
    ) -> None:
        """`rank`: this one, of `size` in stages of `each`. `device` is its own. `back`: torch's group of all ranks, of which no
        other use is made. `through_host`: a neighbour has another kind of device."""
        self._before, self._after = rank - each, rank + each
        self._first, self._last = rank % each, size - each + rank % each
        self._device, self._back, self.through_host = device, back, through_host
        self._link = torch.device("cpu") if through_host else device
        self._sent: deque[tuple[dist.Work, Tensor]] = (
            deque()
        )  # tensors that must stay until they are received
        if (
            rank == self._last
        ):  # the ways are made when they are first used, which waits for the other end
            self.send_back(torch.zeros(1, dtype=torch.int64, device=device))
        elif rank == self._first:
            self.receive_back((1,), torch.int64)

    def send(self, x: Tensor) -> Tensor:
        """Send x, which must not be written any more, and return it. The next stage may be busy: it is not waited for, as
        long as no more than `MAX_SENT` are on their way."""
        return self._send(x, self._after, None)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._receive(shape, dtype, self._before, None)

    def send_back(self, x: Tensor) -> None:
        """Send from the last stage to the first, as `send` does."""
        self._send(x, self._first, self._back)

    def receive_back(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._receive(shape, dtype, self._last, self._back)

    def _send(self, x: Tensor, to: int, group: dist.ProcessGroup | None) -> Tensor:
        while len(self._sent) >= MAX_SENT:
            work, _ = self._sent.popleft()
            work.wait()
        x = x.contiguous().to(self._link)
        sending = dist.isend(x, to, group)
        assert sending is not None
        self._sent.append((sending, x))
        return x

    def _receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, of: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device=self._link)
        dist.recv(x, of, group)
        return x.to(self._device)


class PeerSums(Protocol):
    """Sums through memory of other ranks."""

    def covers(self, x: Tensor) -> bool: ...

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in memory of its own."""


class OverlappedSum(Protocol):
    """A sum over ranks that goes on beside what is queued."""

    def parts(self) -> tuple[Tensor, ...]:
        """Tensors whose sum it is. What is queued from now on runs once they are there. To be called once."""


class OverlappedSums(Protocol):
    """Sums of a step's tokens, piece by piece."""

    def pieces(self, num_tokens: int) -> Sequence[slice]:
        """The pieces of a step's tokens; none where pieces would not pay."""

    def begin(self, x: Tensor, *, place: int, index: int, rows: slice) -> OverlappedSum:
        """Begin the sum of x [R, E], of the tokens `rows`, which are piece number `index`. x may not be written any more.
        `place`: 0 and 1 in turns. Before the first sum in a place, all of the other place have been read."""


class RankGroup:
    """The ranks 0 … size − 1. Every rank makes the same calls in the same order, with values of the same shapes."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        handle: dist.ProcessGroup | None = None,
        *,
        through_host: bool = False,
    ) -> None:
        """`handle`: torch's of some of the ranks; None: of all. `through_host`: only stages and numbers (`least`) are
        exchanged, through the host's memory."""
        self.rank, self.size, self.device, self._handle = rank, size, device, handle
        self._through_host = through_host
        self.sums: PeerSums | None = None
        """Set where ranks write to one another's memory."""
        self.beside: OverlappedSums | None = None
        """Set where sums of long steps go on beside products."""
        self._shared: list[object] = []

    def stages(self, count: int) -> tuple[RankGroup, Pipe | None]:
        """Split all ranks: the group of this rank's stage, of `count` with neighbouring ranks, and the way to other stages."""
        if count == 1:
            return self, None
        each = self.size // count
        handles = [
            dist.new_group(list(range(i * each, (i + 1) * each))) for i in range(count)
        ]  # each rank makes all of them
        own = RankGroup(self.rank % each, each, self.device, handles[self.rank // each])
        back = dist.new_group(list(range(self.size)))
        return own, Pipe(
            self.rank, each, self.size, self.device, back, through_host=self._through_host
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, the same bits on every rank. x may be written."""
        return (
            self.sums(x) if self.sums is not None and self.sums.covers(x) else self.library_sum(x)
        )

    def library_sum(self, x: Tensor) -> Tensor:
        """`all_reduce` by the backend, in place."""
        dist.all_reduce(x, group=self._handle)
        return x

    def share(self, num_bytes: int) -> tuple[Tensor, ...]:
        """Memory of each rank, zeros, that all ranks read and write, by rank: uint8 [num_bytes] on its GPU, mapped until the
        group ends."""
        own, mapped = self.share_tensor((num_bytes,), torch.uint8)
        peers = (
            own if rank == self.rank else mapped.get_buffer(rank, (num_bytes,), torch.uint8)
            for rank in range(self.size)
        )
        self._shared.append((own, mapped))
        return tuple(peers)

    def share_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Any]:
        """Zeros of each rank, on its GPU, that all ranks read and write: this rank's own, and torch's handle of all of them.
        RuntimeError, on every rank, if one of them has no memory for it."""
        from torch.distributed import _symmetric_memory as symmetric

        handle = self._handle or dist.group.WORLD
        assert handle is not None
        own: Tensor | None = None
        mapped, why = None, "another rank has no memory to share"
        try:
            own = symmetric.empty(shape, dtype=dtype, device=self.device).zero_()
        except RuntimeError as error:
            why = first_line(error)
        if not self.least(own is not None)[0] or own is None:
            raise RuntimeError(why)
        try:
            mapped = symmetric.rendezvous(own, handle.group_name)
        except RuntimeError as error:
            why = first_line(error)
        if not self.least(mapped is not None)[0]:
            raise RuntimeError(why)
        return own, mapped

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[n · size, …] → [n, …]: this rank's share of the sum of all ranks' x. x may be written."""
        each = len(x) // self.size
        if x.device.type == "cpu":  # gloo has none
            return self.all_reduce(x)[self.rank * each : (self.rank + 1) * each]
        out = torch.empty(each, *x.shape[1:], dtype=x.dtype, device=x.device)
        dist.reduce_scatter_tensor(out, x.contiguous(), group=self._handle)
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """[…] → [size, …], by rank."""
        out = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        gather = (
            getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        )  # newer torch's name, and older's
        gather(out.flatten(0, 1) if x.dim() else out, x.contiguous(), group=self._handle)
        return out

    def swap(self, x: Tensor, other: int) -> None:
        """Exchange x with the rank `other`'s, in place and in the order of this device's work. Only these two make the call."""
        if not x.is_contiguous():
            own = x.contiguous()
            self.swap(own, other)
            x.copy_(own)
            return
        peer = other if self._handle is None else dist.get_global_rank(self._handle, other)
        for mine in x.flatten().view(torch.uint8).split(SWAPPED_BYTES):
            theirs = torch.empty_like(mine)
            both = [
                dist.P2POp(dist.isend, mine, peer, self._handle),
                dist.P2POp(dist.irecv, theirs, peer, self._handle),
            ]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            mine.copy_(theirs)

    def least(self, *numbers: int) -> list[int]:
        """The smallest that a rank gives, of each number."""
        values = torch.tensor(
            numbers, dtype=torch.int64, device="cpu" if self._through_host else self.device
        )
        dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self._handle)
        found: list[int] = values.tolist()
        return found

    def leave(self) -> None:
        """The last call. It does not wait for other ranks."""
        dist.destroy_process_group()
