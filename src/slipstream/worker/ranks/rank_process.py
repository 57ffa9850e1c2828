"""One rank of a model split over processes: a fork of `python -m slipstream.worker.ranks.rank_process --fork
DESCRIPTOR`.

It has a `LocalExecutor` with its part of the model, and performs the calls that messages request, in order. The first
rank of the last pipeline stage sends the results. All ranks of a stage compute the same tokens, because gathered
logits have the same bits on every rank, and the sampler depends only on them and the requests. If ranks compute
different requests, each rank gets its part of a plan, computes its own requests' tokens and sends their results.

The process ends when its standard input closes, so it never outlives its parent.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from multiprocessing.connection import Connection

import msgspec
import torch

from slipstream import __version__
from slipstream.config.forms import ContextParallel, DealtRequests
from slipstream.costs.hardware import bound_spinning
from slipstream.errors import AdapterError, EngineError, SlipstreamError
from slipstream.hub import machine_folder
from slipstream.messages.start import Failed, Phase, Started
from slipstream.messages.steps import StepPlan, TokenMask
from slipstream.messages.texts import TextsPlan
from slipstream.messages.weight_ops import JoinWeightGroup, WeightsOp
from slipstream.platform.collectives import Rendezvous
from slipstream.worker.device import detect
from slipstream.worker.in_flight import InFlightStep
from slipstream.worker.local_executor import LocalExecutor
from slipstream.worker.ranks.fork_server import serve
from slipstream.worker.ranks.joining import JOIN_S, join
from slipstream.worker.ranks.messages import (
    BeginRank,
    CaptureNext,
    ChangeRankWeights,
    ClearTiers,
    Constrain,
    CopyBlocks,
    End,
    Forget,
    GetAdapterStats,
    GetExpertLoad,
    GetProposed,
    Join,
    Launch,
    LaunchTexts,
    LoadRankAdapter,
    Meeting,
    OfTiers,
    RankExchange,
    RankExpertLoad,
    RankFailed,
    RankLink,
    RankRefused,
    RankResult,
    RankTiers,
    Reply,
    ReportExpertLoad,
    ReportTiers,
    SwapExperts,
    ToRank,
    UnloadRankAdapter,
    WarmUp,
)
from slipstream.worker.sampling.constrained import AwaitingMask
from slipstream.worker.tiers.peers import rank_address

_logger = logging.getLogger("slipstream.engine")


class RankProcess:
    def __init__(self, link: RankLink, local_rank: int | None = None) -> None:
        """`local_rank`: index of the device on this host, for a rank that joins from another host."""
        self._link, self._local_rank = link, local_rank
        self._poll = select.poll()
        self._poll.register(link.fileno(), select.POLLIN | select.POLLHUP)
        # steps whose results are not sent yet, if this rank sends results
        self._steps: deque[InFlightStep | AwaitingMask] = deque()
        self._newest: InFlightStep | AwaitingMask | None = None

    def run(self) -> int:
        """Serve until the End message.

        Returns the exit code: 0, or 1 after a failure that was reported.
        """
        try:
            begin = self._link.receive()
            if isinstance(begin, RankRefused):
                raise EngineError(f"the executor refused this rank: {begin.why}")
            assert isinstance(begin, BeginRank)
            self._start(begin)
            while self._serve():
                pass
            return 0
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return 1  # the executor is gone
        except Exception as error:
            of_peer = isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
            failed = Failed.of(error)
            if self._local_rank is not None:
                print(f"error: {error}", file=sys.stderr)
            self._link.send(RankFailed(failed.error, failed.message, failed.field, of_peer))
            if not isinstance(error, SlipstreamError) and not of_peer:
                import traceback

                traceback.print_exc()
            return 1

    def _start(self, begin: BeginRank) -> None:
        self._rank, self._num_ranks = begin.rank, begin.size
        ranks_of_stage = begin.size // begin.args.pipeline_parallel_size
        self._sends_results = begin.rank == begin.size - ranks_of_stage
        self._answers = begin.rank % ranks_of_stage == 0
        self._answered_by_all: tuple[type, ...] = (LoadRankAdapter, ChangeRankWeights)
        if self._rank:
            logging.getLogger("slipstream").setLevel(logging.ERROR)  # rank 0 logs for all
        device = begin.device
        on_host = (0, 1) if begin.mixed else (begin.rank, begin.args.local_ranks or begin.size)
        if self._local_rank is not None:
            on_host = self._local_rank, self._local_rank + 1
            # this is the executor's CPU; the dtype must be the same on all hosts
            if device is not None:
                here = detect("cpu", machine_folder(), num_threads=begin.args.num_threads)
                device = dataclasses.replace(
                    here, best_dtype=device.best_dtype, dtype_reason=device.dtype_reason
                )
        ranks = Rendezvous(
            begin.rank, begin.size, begin.port, host=begin.host, on_host=on_host, mixed=begin.mixed
        )
        if not self._rank:
            self._link.send(Meeting(ranks.port))
        tell = (lambda phase: None) if self._rank else (lambda phase: self._link.send(Phase(phase)))
        self._executor = own = LocalExecutor.build(
            begin.args, progress=tell, ranks=ranks, device=device
        )
        if isinstance(own.config.parallel.stage, DealtRequests):  # each rank sends its own results
            self._sends_results = begin.rank >= begin.size - ranks_of_stage
            self._answered_by_all += (GetExpertLoad, ReportExpertLoad, GetProposed)
        elif isinstance(own.config.parallel, ContextParallel):  # each rank counts different tokens
            self._answered_by_all += (GetExpertLoad,)
        config, most_drafts = own.config, getattr(own.config.speculation, "most_drafts", None)
        self._link.send(
            Started(
                *(config.device.info, own.ledger, own.phases, own.tiles, own.canary, most_drafts)
            )
        )
        gc.freeze()
        gc.disable()  # a step creates no reference cycles, and a collection would pause it for 50 ms

    def _serve(self) -> bool:
        """Handle one message, or send a finished result. False at the End message."""
        while self._steps and self._steps[0].is_ready:
            self._link.send(RankResult.of(self._steps.popleft().result()))
        waits = not any(not step.awaits_mask for step in self._steps)
        # No wait covers both a GPU event and a message, so this polls.
        if not self._poll.poll(None if waits else 0):
            return True
        message: ToRank = self._link.receive()
        if isinstance(message, End):
            return False
        with torch.inference_mode():
            self._handle(message)
        return True

    def _handle(self, message: ToRank) -> None:
        executor = self._executor
        answer: Reply | RankExpertLoad | None = None
        if isinstance(message, Launch | LaunchTexts):
            self._launch(message.plan)
        elif isinstance(message, Constrain):
            if isinstance(self._newest, AwaitingMask):  # otherwise another stage samples
                self._newest.constrain(TokenMask(message.positions, message.bits, message.which))
        elif isinstance(message, Forget):
            self._steps.clear()
            executor.forget()
        elif isinstance(message, WarmUp):
            answer = Reply(step_times=tuple(executor.warm_up()))
        elif isinstance(message, CaptureNext):
            answer = Reply(executor.capture_next())
        elif isinstance(message, GetExpertLoad):
            answer = Reply(expert_load=executor.expert_load())
        elif isinstance(message, ReportExpertLoad):
            answer = RankExpertLoad(*executor.runner.movable_load())
        elif isinstance(message, SwapExperts):
            executor.runner.swap_experts(message.swaps)
        elif isinstance(message, CopyBlocks | ReportTiers | ClearTiers):
            self._of_tiers(message)
        elif isinstance(message, LoadRankAdapter):
            answer = self._load_adapter(message)
        elif isinstance(message, ChangeRankWeights):
            answer = self._change_weights(message.op)
        elif isinstance(message, UnloadRankAdapter):
            executor.unload_adapter(message.adapter_id)
        elif isinstance(message, GetAdapterStats):
            answer = Reply(adapters=executor.adapter_stats())
        elif isinstance(message, GetProposed):
            assert self._newest is not None
            answer = Reply(proposed=tuple(self._newest.proposed()), rank=self._rank)
        if answer is not None and (self._answers or isinstance(message, self._answered_by_all)):
            self._link.send(answer)

    def _of_tiers(self, message: OfTiers) -> None:
        (store,) = self._executor.stores
        if isinstance(message, CopyBlocks):
            for i, copy in enumerate(message.copies):
                if copy.address:
                    address = rank_address(copy.address, self._rank, self._num_ranks)
                    message.copies[i] = copy._replace(address=address)
            store.submit(message.copies)
        elif isinstance(message, ClearTiers):
            store.clear()
        else:
            disk, exchange = store.disk, store.exchange
            of_disk = () if disk is None else (disk.num_bytes, disk.limit_bytes, disk.is_writer)
            report = RankTiers(store.finished(), [*store.sizes], [*store.slots], *of_disk)
            if exchange is not None:
                lost = exchange.num_expired, exchange.num_evicted
                report.exchange = RankExchange(exchange.num_bytes, exchange.limit_bytes, *lost)
            if message.keys and disk is not None:
                report.keys = disk.keys()
            self._link.send(report)

    def _load_adapter(self, message: LoadRankAdapter) -> Reply:
        try:
            return Reply(version=self._executor.load_adapter(message.request, tuple))
        except AdapterError as error:
            return Reply(refused=Failed.of(error))

    def _change_weights(self, op: WeightsOp) -> Reply:
        if isinstance(op, JoinWeightGroup):
            op = msgspec.structs.replace(op, rank_offset=op.rank_offset + self._rank)
        try:
            sums = self._executor.change_weights(op)
        except Exception as error:
            return Reply(refused=Failed.of(error))
        named = None if sums is None else {f"rank{self._rank}.{n}": s for n, s in sums.items()}
        return Reply(checksums=named)

    def _launch(self, plan: StepPlan | TextsPlan) -> None:
        self._newest = step = self._executor.runner.launch(plan)
        if self._sends_results:
            self._steps.append(step)


def end_with_parent() -> None:
    """Exit when the parent closes our standard input, whatever the main thread is doing."""
    while os.read(0, 1):
        pass
    os._exit(0)


def join_executor(words: list[str]) -> int:
    """Join the executor as a rank on another host, and serve until it ends."""
    parser = argparse.ArgumentParser(prog="python -m slipstream.worker.ranks.rank_process")
    parser.add_argument(
        "--join", required=True, metavar="HOST:PORT", help="the executor's rank_address"
    )
    parser.add_argument(
        "--local-rank", type=int, default=0, help="which of this host's GPUs to take (default: 0)"
    )
    parser.add_argument(
        "--world-size", type=int, help="refuse to be one of another number of ranks"
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        default=JOIN_S,
        help=f"seconds to try to reach it (default: {JOIN_S:.0f})",
    )
    args = parser.parse_args(words)
    for name, least in (("local_rank", 0), ("world_size", 2)):
        if (value := getattr(args, name)) is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be {least} or more, got {value}")
    if not args.wait_s > 0:
        parser.error(f"--wait-s must be above 0, got {args.wait_s:g}")
    try:
        link = join(
            args.join, Join(__version__, args.local_rank, args.world_size), wait_s=args.wait_s
        )
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        return RankProcess(link, args.local_rank).run()
    except OSError:
        return 1  # the executor is gone


def fork_ranks(asked: socket.socket) -> None:
    """Import everything that a rank needs, then serve as the process that forks ranks
    (`fork_server.py`)."""
    gc.disable()
    import slipstream.model.load.loader
    import slipstream.worker.torch_loading  # noqa: F401

    gc.collect()
    gc.freeze()  # forks then have nothing to collect
    gc.enable()
    serve(asked, main)


def main(words: list[str]) -> int:
    """Run the command line: `DESCRIPTOR` runs a rank, `--fork DESCRIPTOR` the process that forks ranks, and `--join …`
    a rank for an executor on another host."""
    bound_spinning()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    if words[:1] != ["--fork"] and not (words[:1] and words[0].isdecimal()):
        return join_executor(words)
    # Ctrl-C and a service manager's SIGTERM reach the whole process group. The parent decides when
    # its ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if words[0] == "--fork":
        fork_ranks(socket.socket(fileno=int(words[1])))
        return 0
    threading.Thread(target=end_with_parent, daemon=True).start()
    return RankProcess(RankLink(Connection(int(words[0])), ToRank)).run()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # peers may be gone already, and the libraries' own exit handlers would wait for them
    os._exit(code)
