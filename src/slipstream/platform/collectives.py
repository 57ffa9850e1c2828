"""Collectives (all-reduce, reduce-scatter, all-gather, all-to-all) of the ranks of one model, through `torch.distributed`.

GPUs use NCCL, CPUs gloo. A process belongs to one group. If GPUs can write to each other's memory,
sums of up to some megabytes are one kernel (`PeerCollectives`): NCCL's start costs more than their bytes.
NVLink multicast is never used.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.errors import first_line

TIMEOUT_S = 600.0
"""Maximum time in seconds by which one rank may be ahead of another, such as while the first one reads its
part of the checkpoint. A rank's death ends the others long before (`worker.ranks.process_executor`)."""


MAX_SENT = 16
"""Maximum number of tensors being sent to another stage."""

SWAPPED_BYTES = 2**24
"""Bytes of a tensor that two ranks exchange at a time; the exchange needs this much extra
memory."""

_SIOCGIFADDR = 0x8915  # ioctl: an interface's address


def _interface_to(host: str) -> str | None:
    """Name of the network interface by which `host` is reached; None on this host, or without IPv4.

    By itself gloo takes the address of the host's name, which is often that of loopback.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))  # sends nothing
            own = probe.getsockname()[0]
            if own.startswith("127."):
                return None
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # it has no address
                    asked = struct.pack("256s", name.encode())
                    found = fcntl.ioctl(probe, _SIOCGIFADDR, asked)[20:24]
                    if socket.inet_ntoa(found) == own:
                        return name
    except OSError:
        pass
    return None


class Rendezvous:
    """The meeting point of a group's ranks: a store at rank 0, whose `port` the others must know.
    `host` is the address of rank 0's host."""

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
        """Connect to the store. `on_host`: (index, number) of the ranks on this host; None: all are
        here.

        `mixed`: some ranks have a CPU and some a GPU, so all exchanges go through host memory.
        """
        self.rank, self.size, self.mixed = rank, size, mixed
        self.local_rank, self.local_size = on_host or (rank, size)
        self._host = host
        wait = datetime.timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore  # type: ignore[attr-defined]
        self._store = store(
            host, port, size, is_master=rank == 0, timeout=wait, wait_for_workers=False
        )
        self.port = int(self._store.port)

    def join(self, backend: str, device: torch.device) -> RankGroup:
        """Wait for all ranks; returns their group. `backend`: the platform's `collectives`.

        gloo reads its network interface from this process's environment, for this group and the
        later ones. `GLOO_SOCKET_IFNAME` is set here if the user has not set it.
        """
        if (interface := _interface_to(self._host)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
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
    """Links to the previous and next stages of a pipeline, and from the last back to the first.

    Messages arrive in the order in which they were sent. The way back has its own group. In a
    shared one the first stage would send the next step's residual before it receives this one's
    tokens, and the last stage would do the reverse: each would wait for the other.
    """

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
        """Link rank `rank` of `size`, in stages of `each` ranks; `device` is its own.

        `back`: torch's group of all ranks, used for nothing else. `through_host`: a neighbour has
        another kind of device.
        """
        self._before, self._after = rank - each, rank + each
        self._first, self._last = rank % each, size - each + rank % each
        self._device, self._back, self.through_host = device, back, through_host
        self._link = torch.device("cpu") if through_host else device
        # Tensors that must stay until they are received.
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        # Links are made at their first use, which waits for the other end.
        if rank == self._last:
            self.send_back(torch.zeros(1, dtype=torch.int64, device=device))
        elif rank == self._first:
            self.receive_back((1,), torch.int64)

    def send(self, x: Tensor) -> Tensor:
        """Send x to the next stage and return it. x must not be modified afterwards. The call does
        not wait for a busy stage, unless `MAX_SENT` tensors are being sent."""
        return self._send(x, self._after, None)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._receive(shape, dtype, self._before, None)

    def send_back(self, x: Tensor) -> None:
        """Send from the last stage to the first; see `send`."""
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


class PeerCollectives(Protocol):
    """Sums, scatters, gathers and exchanges of a `RankGroup` through other ranks' memory."""

    def covers(
        self, x: Tensor, op: Literal["sum", "scatter", "gather", "exchange"] = "sum"
    ) -> bool: ...

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in new memory."""

    def scatter(self, x: Tensor) -> Tensor: ...

    def gather(self, x: Tensor) -> Tensor: ...

    def exchange(self, x: Tensor) -> Tensor: ...


class OverlappedSum(Protocol):
    """A sum over ranks that runs concurrently with queued work."""

    def parts(self) -> tuple[Tensor, ...]:
        """Tensors that add up to the sum. Later work waits for them. Call it once."""


class OverlappedSums(Protocol):
    """Sums of a step's tokens, piece by piece."""

    def pieces(self, num_tokens: int) -> Sequence[slice]:
        """Splits a step's tokens into pieces; empty if pieces would not be faster."""

    def begin(self, x: Tensor, *, place: int, index: int, rows: slice) -> OverlappedSum:
        """Start the sum of x [R, E], for the tokens `rows`, which are piece number `index`. x must
        not be modified afterwards.

        `place`, the buffer, alternates between 0 and 1. Before the first sum in a buffer, all sums
        in the other one must have been read.
        """


class RankGroup:
    """The ranks 0 … size − 1. All ranks make the same calls in the same order, with values of the
    same shapes."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        handle: dist.ProcessGroup | None = None,
        *,
        through_host: bool = False,
    ) -> None:
        """Make a group. `handle`: torch's group of some of the ranks; None: all ranks.
        `through_host`: only stages and numbers (`least`) are exchanged, through host memory."""
        self.rank, self.size, self.device, self._handle = rank, size, device, handle
        self._through_host = through_host
        self.peer_collectives: PeerCollectives | None = None
        """Set if ranks write to each other's memory."""
        self.overlapped: OverlappedSums | None = None
        """Set if sums of long steps overlap with products."""
        self._shared: list[object] = []
        self.in_order = False
        """Whether sums add the ranks in their order, independent of an element's position in x (`deterministic`)."""

    def stages(self, count: int) -> tuple[RankGroup, Pipe | None]:
        """Split all ranks into `count` stages of consecutive ranks. Returns (group of this rank's
        stage, links to other stages)."""
        if count == 1:
            return self, None
        own, each = self.part(count), self.size // count
        back = dist.new_group(list(range(self.size)))
        return own, Pipe(
            self.rank, each, self.size, self.device, back, through_host=self._through_host
        )

    def part(self, count: int) -> RankGroup:
        """Split all ranks into `count` groups of consecutive ranks; returns this rank's."""
        if count == 1:
            return self
        each = self.size // count
        # Each rank makes all groups.
        handles = [dist.new_group(list(range(i * each, (i + 1) * each))) for i in range(count)]
        own = RankGroup(self.rank % each, each, self.device, handles[self.rank // each])
        own.in_order = self.in_order
        return own

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of all ranks' x, bitwise equal on every rank. x may be overwritten."""
        peer = self.peer_collectives
        return peer(x) if peer is not None and peer.covers(x) else self.library_sum(x)

    def library_sum(self, x: Tensor) -> Tensor:
        """`all_reduce` by the backend, in place."""
        if self.in_order and (self.size > 2 or x.is_cuda):  # of gloo's two every order is the same
            wide = torch.float32 if x.is_floating_point() else x.dtype
            parts = (part.to(wide) for part in self.library_gather(x))
            return x.copy_(functools.reduce(torch.add, parts))  # rounded once, as by peers
        dist.all_reduce(x, group=self._handle)
        return x

    def share(self, num_bytes: int) -> tuple[Tensor, ...]:
        """Memory that all ranks read and write, by rank: zeros, uint8 [num_bytes] on each GPU,
        mapped until the group ends."""
        own, mapped = self.share_tensor((num_bytes,), torch.uint8)
        shared = (
            own if rank == self.rank else mapped.get_buffer(rank, (num_bytes,), torch.uint8)
            for rank in range(self.size)
        )
        self._shared.append((own, mapped))
        return tuple(shared)

    def share_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Any]:
        """Zeros on each rank's GPU that all ranks read and write. Returns (this rank's, torch's
        handle of all of them). RuntimeError on every rank if one of them has no memory for it."""
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
        """[T, …] → [⌈T / size⌉, …]: this rank's rows of the sum of all ranks' x, with zeros after
        the last rows. x may be overwritten."""
        peer = self.peer_collectives
        if peer is not None and peer.covers(x, "scatter"):
            return peer.scatter(x)
        if missing := -len(x) % self.size:
            x = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
        return self.library_scatter(x)

    def library_scatter(self, x: Tensor) -> Tensor:
        """`reduce_scatter` of whole shares by the backend."""
        each = len(x) // self.size
        if self.in_order or x.device.type == "cpu":  # gloo has no reduce-scatter
            return self.all_reduce(x)[self.rank * each : (self.rank + 1) * each]
        out = torch.empty(each, *x.shape[1:], dtype=x.dtype, device=x.device)
        dist.reduce_scatter_tensor(out, x.contiguous(), group=self._handle)
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """[…] → [size, …], by rank."""
        peer = self.peer_collectives
        return (
            peer.gather(x)
            if peer is not None and peer.covers(x, "gather")
            else self.library_gather(x)
        )

    def library_gather(self, x: Tensor) -> Tensor:
        """`all_gather` by the backend."""
        out = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        # The first is newer torch's name, the second older torch's.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(out.flatten(0, 1) if x.dim() else out, x.contiguous(), group=self._handle)
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        """[n · size, …] → [size, n, …]: from each rank, the part of its x for this rank."""
        peer = self.peer_collectives
        return (
            peer.exchange(x)
            if peer is not None and peer.covers(x, "exchange")
            else self.library_exchange(x)
        )

    def library_exchange(self, x: Tensor) -> Tensor:
        """`all_to_all` by the backend."""
        each = len(x) // self.size
        if x.device.type == "cpu":  # not all of gloo's versions have it
            return self.library_gather(x)[:, self.rank * each : (self.rank + 1) * each]
        out = torch.empty(self.size, each, *x.shape[1:], dtype=x.dtype, device=x.device)
        dist.all_to_all_single(out.flatten(0, 1), x.contiguous(), group=self._handle)
        return out

    def swap(self, x: Tensor, other: int) -> None:
        """Exchange x with rank `other`'s, in place and after this device's earlier work. Only these
        two make the call."""
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
        """Minimum over the ranks, for each of `numbers`."""
        values = torch.tensor(
            numbers, dtype=torch.int64, device="cpu" if self._through_host else self.device
        )
        dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self._handle)
        found: list[int] = values.tolist()
        return found

    def leave(self) -> None:
        """Leave the group, as the last call. It does not wait for other ranks."""
        dist.destroy_process_group()
