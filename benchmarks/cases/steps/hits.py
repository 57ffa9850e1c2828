"""Host time of requests whose prompts are cached, until their first step can be computed. No
model.

    python benchmarks/steps.py --study hits [--counts 64x8000 8x30000 64x500]

Sessions of different tokens are computed and end; then all come back at once with `--new` tokens more. Parts, in milliseconds
of processor time, medians over `--rounds`, whose kinds take turns:

    message    requests packed by a front end and read by the engine's process
    queue      `Scheduler.add`: hashes of the blocks, the sessions
    schedule   `schedule()` until all are in a step: prefixes, blocks, the plan
    tables     tokens and block tables of the steps, as arrays
    results    `update()`
    first      all before a device can begin with the first of these steps
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import common
import msgspec

from slipstream.bench.report import print_table
from slipstream.config import CacheConfig, SchedulingConfig
from slipstream.core.make import make_scheduler
from slipstream.core.scheduler import Scheduler
from slipstream.engine.process.core_messages import Add
from slipstream.kernels.cpu.host_ops import HostOps
from slipstream.messages.requests import EngineRequest, pack_ids
from slipstream.messages.steps import StepResult
from slipstream.params.sampling import SamplingParams
from slipstream.spec.model import CacheGroup
from slipstream.worker.inputs.rows import RowTable

RECORD = "steps_hits"
BLOCK_SIZE = 16
ANSWER = 4
MOST_TOKENS = 16384  # of a step


class Times:
    """Processor time by part, in milliseconds."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self.parts[part] += (time.thread_time() - begin) * 1e3


class Host:
    """A scheduler and a worker's tables with room for `count` sessions of `length` tokens, `rounds` times longer by `new`."""

    def __init__(self, count: int, length: int, new: int, rounds: int) -> None:
        most = length + (rounds + 2) * (new + ANSWER) + BLOCK_SIZE
        groups = (CacheGroup(kind="full"),)
        scheduling = SchedulingConfig(
            policy="inflight",
            max_num_seqs=count,
            max_num_batched_tokens=MOST_TOKENS,
            max_num_mixed_tokens=MOST_TOKENS,
            enable_chunked_prefill=True,
            batch_window_s=0.0,
            max_queue=None,
        )
        cache = CacheConfig(
            dtype="bfloat16",
            block_size=BLOCK_SIZE,
            gpu_memory_utilization=0.9,
            kv_cache_bytes=None,
            enable_prefix_caching=True,
            groups=groups,
        )
        num_blocks = count * (most // BLOCK_SIZE + 4) + 64
        self.scheduler: Scheduler = make_scheduler(
            scheduling, cache, max_model_len=most, num_blocks=num_blocks
        )
        ops: Any = HostOps
        self.table = RowTable(count, most, BLOCK_SIZE, ops, None, 0, groups=groups)
        rng = random.Random(length)
        self.sessions = [[rng.randrange(30000) for _ in range(length)] for _ in range(count)]
        self.new = new
        self.number = 0
        self._rng = rng
        self.turn()  # computes the prompts

    def turn(self) -> dict[str, float]:
        """One turn of each session. Returns the parts' times up to the first tokens."""
        self.number += 1
        for tokens in self.sessions:
            tokens += [self._rng.randrange(30000) for _ in range(self.new)]
        sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER)
        packed = [pack_ids(tokens) for tokens in self.sessions]
        times, scheduler = Times(), self.scheduler
        with times.of("message"):
            sent = msgspec.msgpack.encode(
                Add(
                    [
                        EngineRequest(
                            request_id=f"{self.number}-{i}",
                            prompt_token_ids=ids,
                            sampling=sampling,
                            max_tokens=ANSWER,
                        )
                        for i, ids in enumerate(packed)
                    ]
                )
            )
            requests = DECODER.decode(sent).requests
        with times.of("queue"):
            for request in requests:
                scheduler.add(request)
        num_steps = num_first = 0
        while scheduler.has_requests:
            first = num_first < len(self.sessions)
            own = times if first else Times()
            num_steps += first
            with own.of("schedule"):
                plan = scheduler.schedule()
            assert plan is not None
            with own.of("tables"):
                self.table.apply(plan)
            sampled = [s for s in plan.scheduled if s.num_sampled]
            num_first += len(sampled)
            result = StepResult(plan.step_id, [5] * len(sampled))
            if first and not times.parts["first"]:
                times.parts["first"] = sum(times.parts.values())
            with own.of("results"):
                scheduler.update(plan, result)
        for tokens in self.sessions:
            tokens += [5] * ANSWER
        hits = scheduler.stats().prefix_hits
        return {**times.parts, "steps": num_steps, "hits": hits}


DECODER = msgspec.msgpack.Decoder(Add)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--counts", nargs="+", default=["64x8000", "8x30000", "64x500"])
    parser.add_argument("--new", type=int, default=16, help="tokens")
    parser.add_argument("--rounds", type=int, default=7)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    hosts = {}
    for kind in args.counts:
        count, length = map(int, kind.split("x"))
        hosts[kind] = Host(count, length, args.new, args.rounds)
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in hosts}
    gc.collect()
    gc.disable()  # as the engine has it while it works
    for _ in range(args.rounds):
        for kind, host in hosts.items():
            rounds[kind].append(host.turn())
    gc.enable()
    found: dict[str, dict[str, float]] = {}
    for kind, turns in rounds.items():
        count, length = map(int, kind.split("x"))
        hits = turns[-1].pop("hits") - turns[-2].pop("hits")
        assert hits >= count * (length // BLOCK_SIZE * BLOCK_SIZE), f"{hits} tokens were cached"
        parts = [name for name in turns[0] if name != "hits"]
        found[kind] = {name: round(common.median([t[name] for t in turns]), 2) for name in parts}
        sums = [sum(t[name] for name in parts if name not in ("steps", "first")) for t in turns]
        found[kind]["all"] = round(common.median(sums), 2)
    columns = ("requests × cached tokens", *next(iter(found.values())))
    print_table(
        f"{args.new} new tokens each, ms of processor time",
        columns,
        [(kind, *map(str, row.values())) for kind, row in found.items()],
    )
    save(new=args.new, milliseconds=found)
