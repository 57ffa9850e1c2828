"""Ranks as threads of one process: what they give each other goes through plain memory, not through a network. Sums and
collections are those of `platform.Group`; tests/worker/ranks/test_ranks.py tests that processes give the same."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.kernels.select import select_ops
from slipstream.model.layers.layer import Partition
from slipstream.model.load.loader import LoadedModel, load_model
from slipstream.spec.parallel import ONE_UNIT, Shard, SplitUnits
from tests.model.harness import CPU
from tests.support.waiting import PATIENCE_S

T = TypeVar("T")


class ThreadPipe:
    """`platform.Pipe`: `queues[i]` is what the stages of a pipeline with one rank each send from stage i."""

    through_host = False

    def __init__(self, stage: int, queues: list[queue.Queue[Tensor]]) -> None:
        self._stage, self._queues = stage, queues

    def send(self, x: Tensor) -> Tensor:
        self._queues[self._stage].put(x.clone())
        return x

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = self._queues[self._stage - 1].get(timeout=PATIENCE_S)
        assert (tuple(x.shape), x.dtype) == (shape, dtype)
        return x

    def send_back(self, x: Tensor) -> None:
        assert self._stage == len(self._queues) - 1
        self.send(x)

    def receive_back(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert self._stage == 0
        return self.receive(shape, dtype)  # of the stage before the first, which is the last


class Meeting:
    def __init__(self, size: int) -> None:
        self.barrier, self.given = (
            threading.Barrier(size, timeout=PATIENCE_S),
            [torch.empty(0)] * size,
        )
        self.sent = {(a, b): queue.Queue[Tensor]() for a in range(size) for b in range(size)}


class ThreadGroup:
    peer_collectives, device = None, CPU

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank, self.size, self.meeting = rank, size, meeting
        self.overlapped: SumsOfThreads | None = None

    def all_gather(self, x: Tensor) -> Tensor:
        self.meeting.given[self.rank] = x.clone()
        self.meeting.barrier.wait()
        out = torch.stack(self.meeting.given)
        self.meeting.barrier.wait()
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        each = len(x) // self.size
        return self.all_gather(x)[:, self.rank * each : (self.rank + 1) * each]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        each = -(-len(x) // self.size)
        total = self.all_reduce(x)[self.rank * each : (self.rank + 1) * each]
        return torch.cat((total, total.new_zeros(each - len(total), *total.shape[1:])))

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(self.all_gather(x).sum(0))

    def least(self, *numbers: int) -> list[int]:
        return self.all_gather(torch.tensor(numbers)).amin(0).tolist()

    def swap(self, x: Tensor, other: int) -> None:
        """The two alone: others don't take part."""
        self.meeting.sent[self.rank, other].put(x.clone())
        x.copy_(self.meeting.sent[other, self.rank].get(timeout=PATIENCE_S))

    def share(self, num_bytes: int) -> tuple[Tensor, ...]:
        self.meeting.given[self.rank] = torch.zeros(num_bytes, dtype=torch.uint8)
        self.meeting.barrier.wait()
        shared = tuple(self.meeting.given)
        self.meeting.barrier.wait()
        return shared


class SumsOfThreads:
    """`platform.OverlappedSums`: what is begun arrives at once. `log`: the places and pieces, in order."""

    def __init__(self, group: ThreadGroup, piece: int) -> None:
        self.group, self.piece, self.log = group, piece, list[tuple[int, int, slice]]()

    def pieces(self, num_tokens: int) -> list[slice]:
        return [slice(i, min(i + self.piece, num_tokens)) for i in range(0, num_tokens, self.piece)]

    def begin(self, x: Tensor, *, place: int, index: int, rows: slice) -> ArrivedPart:
        assert len(x) == rows.stop - rows.start
        self.log.append((place, index, rows))
        return ArrivedPart(tuple(self.group.all_gather(x)))


class ArrivedPart:
    def __init__(self, given: tuple[Tensor, ...]) -> None:
        self.given: tuple[Tensor, ...] | None = given

    def parts(self) -> tuple[Tensor, ...]:
        found, self.given = self.given, None
        assert found is not None, "asked twice"
        return found


def as_threads(size: int, run: Callable[[ThreadGroup], T]) -> list[T]:
    """Runs the ranks as threads and returns each one's result. If one fails, the others stop
    waiting, and its error is raised."""
    meeting = Meeting(size)

    def of_rank(rank: int) -> T:
        try:
            return run(ThreadGroup(rank, size, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(of_rank, rank) for rank in range(size)]
        failed = [f.exception() for f in futures]
        real = [
            e for e in failed if e is not None and not isinstance(e, threading.BrokenBarrierError)
        ]
        if real:
            raise real[0]
        return [f.result() for f in futures]


def on_ranks(
    path: Path,
    work: Callable[[LoadedModel], T],
    *,
    size: int = 2,
    tensor: bool = True,
    experts: bool = False,
    kernels: str = "reference",
    units: SplitUnits = ONE_UNIT,
    sequence: bool = False,
    context: bool = False,
    piece: int = 0,
    **how: object,
) -> list[T]:
    """Returns the result of `work` on each rank's part of the model. With `piece`, sums run next
    to products, so many tokens at a time."""

    def run(group: ThreadGroup) -> T:
        group.overlapped = SumsOfThreads(group, piece) if piece else None
        shard = Shard(group.rank, size, tensor=tensor, experts=experts, units=units)
        if context and not tensor:
            shard = Shard(0, 1, tensor=False)
        of_tokens = {
            "context": group if context else None,
            "sequence": sequence or (context and not tensor),
        }
        partition = Partition(shard, group, **of_tokens)  # type: ignore[arg-type]
        ops = select_ops(CPU, kernels)
        model = load_model(
            path, ops=ops, device=CPU, dtype=torch.float32, partition=partition, **how
        )  # type: ignore[arg-type]
        return work(model)

    return as_threads(size, run)


def on_stages(
    path: Path,
    work: Callable[[LoadedModel], T],
    layers: Sequence[int],
    *,
    kernels: str = "reference",
    **how: object,
) -> T:
    """Returns the result of `work` on the last stage of a pipeline with the given number of layers
    in each stage."""
    ends, queues = [0, *accumulate(layers)], [queue.Queue[Tensor]() for _ in layers]

    def run(stage: int) -> T:
        shard = Shard(0, 1, tensor=False, layers=(ends[stage], ends[stage + 1]))
        partition = Partition(shard, ThreadGroup(0, 1, Meeting(1)), ThreadPipe(stage, queues))  # type: ignore[arg-type]
        ops = select_ops(CPU, kernels)
        model = load_model(
            path, ops=ops, device=CPU, dtype=torch.float32, partition=partition, **how
        )  # type: ignore[arg-type]
        return work(model)

    with ThreadPoolExecutor(len(layers)) as pool:
        futures = [pool.submit(run, stage) for stage in range(len(layers))]
        failed = [
            e
            for f in futures
            if (e := f.exception()) is not None and not isinstance(e, queue.Empty)
        ]
        if failed:
            raise failed[0]
        return futures[-1].result()
