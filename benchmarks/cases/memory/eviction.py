"""Cached tokens that eviction by value keeps over eviction of the least recently used, through the
real scheduler in virtual time.

    python benchmarks/memory.py --study eviction [--trace mooncake_conversation.jsonl]

`agents`: sessions that call tools. Each turn's prompt is all text before, the answer before and a tool's result. Pauses are
log-normal; a session's own are alike. The cache holds a third of all sessions at their longest. A step takes what an H200
takes for Llama-3-8B in FP8, roughly: a base, a time per prompt token that grows with its depth, and a time per token of
context that decodes read.
`trace`: a trace with `hash_ids` (Mooncake's), at several sizes of the cache: each request computes its prompt at its time.
`prefixes`: unique questions after one of 200 prefixes, of which few are popular, next to a tenth of prompts that never come
again. `pool`: nanoseconds of the pool's operations per block, value and LRU in turns.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.config import CacheConfig, SchedulingConfig
from slipstream.core.cache.block_pool import BlockPool
from slipstream.core.cache.invariants import check_pool
from slipstream.core.make import make_scheduler
from slipstream.core.scheduler import Scheduler
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import StepResult
from slipstream.params.cache_hints import NO_HINTS, CacheHints
from slipstream.params.sampling import SamplingParams
from slipstream.spec.model import CacheGroup

ORDERS = ("lru", "value")
DEPTH = 32768.0
BASE_S, PROMPT_TOKEN_S, CONTEXT_TOKEN_S = 0.0035, 22e-6, 3e-8


def scheduler_of(
    order: str, num_blocks: int, block_size: int, most_tokens: int, clock: Any, depth: float = DEPTH
) -> Scheduler:
    scheduling = SchedulingConfig(
        policy="inflight",
        max_num_seqs=64,
        max_num_batched_tokens=most_tokens,
        max_num_mixed_tokens=most_tokens,
        enable_chunked_prefill=True,
        batch_window_s=0.0,
        max_queue=None,
    )
    cache = CacheConfig(
        dtype="bfloat16",
        block_size=block_size,
        gpu_memory_utilization=0.9,
        kv_cache_bytes=None,
        enable_prefix_caching=True,
        groups=(CacheGroup(kind="full"),),
        eviction=order,
        attention_tokens=depth,
    )
    return make_scheduler(
        scheduling, cache, max_model_len=2**20, num_blocks=num_blocks, clock=clock
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# --- Agents -------------------------------------------------------------------------------------------------------------


class Agent:
    """A session and those after it, whose texts and pauses depend on nothing else."""

    def __init__(self, number: int, seed: int, args: argparse.Namespace, system: list[int]) -> None:
        self.rng = random.Random(1000 * seed + number)
        self.system = system
        self.longest = args.longest
        self.pace = math.log(args.pause) + self.rng.gauss(0, 0.7)
        self.begin()

    def begin(self) -> None:
        self.text = [*self.system, *self._words(1500)]
        self.num_seen = 0

    def take(self, answer: list[int]) -> None:
        """The next prompt."""
        self.text += answer
        self.num_seen = len(self.text)
        self.text += self._words(min(8000, int(self.rng.lognormvariate(6.6, 1.0))))
        if len(self.text) > self.longest:
            self.begin()

    def pause(self) -> float:
        return self.rng.lognormvariate(self.pace, 0.8)

    def _words(self, count: int) -> list[int]:
        return self.rng.choices(range(1000), k=count)


def agents(order: str, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Turns of all sessions in some virtual minutes, after as many to begin with."""
    rng, clock = random.Random(seed), Clock()
    num_blocks = int(args.sessions * args.longest / args.share / 16)
    scheduler = scheduler_of(order, num_blocks, 16, 8192, clock)
    system = rng.choices(range(1000), k=6000)
    each = [Agent(i, seed, args, system) for i in range(args.sessions)]
    for agent in each:  # they are not all young at first
        for _ in range(agent.rng.randrange(30)):
            agent.take(agent._words(150))
        agent.num_seen = 0
    due = [(agent.rng.uniform(0, 60), i) for i, agent in enumerate(each)]
    heapq.heapify(due)
    names = itertools.count()
    answers, begun = dict[str, tuple[int, list[int]]](), dict[str, float]()
    turns = recomputed = computed = 0
    waits, half = list[float](), args.minutes * 60 / 2
    while clock.now < 2 * half:
        while due and due[0][0] <= clock.now:
            _, i = heapq.heappop(due)
            name = f"r{next(names)}"
            answers[name], begun[name] = (i, []), clock.now
            scheduler.add(
                EngineRequest(
                    request_id=name,
                    prompt_token_ids=tuple(each[i].text),
                    sampling=SamplingParams(temperature=0, ignore_eos=True),
                    max_tokens=each[i].rng.randint(60, 250),
                    arrival=clock.now,
                    cache_hints=CacheHints(calls=True),
                )
            )
        plan = scheduler.schedule()
        if plan is None:
            clock.now = due[0][0]
            continue
        seconds, counts = BASE_S, clock.now >= half
        for part in plan.scheduled:
            i, answer = answers[part.request_id]
            depth, count = part.num_computed_tokens, part.num_tokens
            if count > 1:
                seconds += count * PROMPT_TOKEN_S * (1 + (depth + count / 2) / DEPTH)
                computed += counts * count
                recomputed += counts * max(0, min(depth + count, each[i].num_seen) - depth)
            else:
                seconds += depth * CONTEXT_TOKEN_S
        clock.now += seconds
        tokens = []
        for part in plan.scheduled:
            if part.num_sampled:
                answer = answers[part.request_id][1]
                if counts and not answer:
                    waits.append(clock.now - begun[part.request_id])
                answer.append(rng.randrange(1000))
                tokens.append(answer[-1])
        for out in scheduler.update(plan, StepResult(plan.step_id, tokens)):
            if out.finish_reason is not None:
                i, answer = answers.pop(out.request_id)
                turns += counts
                each[i].take(answer)
                heapq.heappush(due, (clock.now + each[i].pause(), i))
    check_pool(scheduler.pool)
    return {
        "turns_a_minute": turns / half * 60,
        "recomputed_tokens_a_turn": recomputed / turns,
        "computed_tokens_a_turn": computed / turns,
        "median_first_token_s": statistics.median(waits),
        "mean_first_token_s": statistics.mean(waits),
    }


# --- Prompts that come at their times -----------------------------------------------------------------------------------


def replay(
    order: str, requests: list[tuple[float, list[int]]], num_blocks: int
) -> dict[str, float]:
    """`requests` have their blocks' ids; 512 tokens of a trace are a block of two tokens here."""
    clock = Clock()
    scheduler = scheduler_of(order, num_blocks, 2, 2**20, clock, DEPTH / 256)
    blocks = hits = 0
    cost = saved = 0.0
    begin = time.perf_counter()
    for n, (at, ids) in enumerate(requests):
        clock.now = max(clock.now, at)
        prompt = (*(t for i in ids for t in (i % 2**31, 1)), 0)
        spec = EngineRequest(
            request_id=f"r{n}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(),
            max_tokens=1,
            arrival=at,
        )
        scheduler.add(spec)
        while (plan := scheduler.schedule()) is not None:
            first = plan.scheduled[0]
            scheduler.update(
                plan, StepResult(plan.step_id, [3] * sum(s.num_sampled for s in plan.scheduled))
            )
            if first.num_sampled:
                break
        hit, total = plan.scheduled[0].num_computed_tokens // 2, len(ids)
        blocks, hits = blocks + total, hits + hit
        cost, saved = cost + work(total), saved + work(hit)
    seconds = time.perf_counter() - begin
    check_pool(scheduler.pool)
    return {
        "hit_rate": hits / blocks,
        "saved_work": saved / cost,
        "us_a_request": seconds / len(requests) * 1e6,
    }


def work(num_blocks: int) -> float:
    """Cost of computing so many blocks of 512 tokens, in tokens without attention."""
    return num_blocks * 512 * (1 + num_blocks * 256 / DEPTH)


def of_trace(path: Path) -> list[tuple[float, list[int]]]:
    rows = map(json.loads, path.open())
    return [(row["timestamp"] / 1000, row["hash_ids"]) for row in rows]


def popular_prefixes(seed: int) -> list[tuple[float, list[int]]]:
    rng, fresh = random.Random(seed), itertools.count(10**6)
    weights = [1 / (i + 1) for i in range(200)]
    found, now = [], 0.0
    for _ in range(6000):
        now += rng.expovariate(2.0)
        if rng.random() < 0.1:
            found.append((now, [next(fresh) for _ in range(rng.randint(10, 60))]))
            continue
        (which,) = rng.choices(range(200), weights)
        found.append(
            (
                now,
                [
                    *range(which * 100, which * 100 + 5 + which % 40),
                    *(next(fresh) for _ in range(rng.randint(1, 6))),
                ],
            )
        )
    return found


def chats(seed: int) -> list[tuple[float, list[int]]]:
    """People's conversations of a few turns, whose pauses are long, and of which a third of all turns are the last."""
    rng, fresh = random.Random(seed), itertools.count(10**6)
    due: list[tuple[float, int, list[int]]] = []
    found, now = list[tuple[float, list[int]]](), 0.0
    while len(found) < 6000:
        now += rng.expovariate(1.0)
        heapq.heappush(
            due, (now, next(fresh), [0, 1, *(next(fresh) for _ in range(rng.randint(1, 8)))])
        )
        while due and due[0][0] <= now:
            at, _, ids = heapq.heappop(due)
            found.append((at, ids))
            if rng.random() < 0.67:
                ids = [*ids, *(next(fresh) for _ in range(rng.randint(1, 4)))]
                heapq.heappush(due, (at + rng.lognormvariate(4.1, 1.2), next(fresh), ids))
    return sorted(found)


# --- The pool -----------------------------------------------------------------------------------------------------------


def pool_ns(order: str, num_blocks: int = 65536, size: int = 1024) -> dict[str, float]:
    """Nanoseconds per block of what a request without a known session does to a full cache."""
    clock = Clock()
    kv = scheduler_of(order, num_blocks, 16, 8192, clock).kv
    pool = kv.pool
    names = itertools.count()
    took = {"allocate": [], "release": [], "hold": [], "plain": []}
    for name in range(3 * num_blocks // size):
        clock.now += 0.01
        keys = [next(names).to_bytes(16) for _ in range(size)]
        begin = time.perf_counter_ns()
        blocks = pool.allocate(size)
        took["allocate"].append(time.perf_counter_ns() - begin)
        run = None
        session = None if kv.sessions is None else kv.sessions.arrived(keys, NO_HINTS)
        for i, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            pool.register(block, key)
            if session is not None:
                run = kv.order.extend(run, session, str(name), block, i)
        if session is not None:
            run.writer = ""
        for what, call in (
            ("release", pool.release),
            ("hold", pool.hold),
            ("release", pool.release),
        ):
            begin = time.perf_counter_ns()
            call(blocks)
            took[what].append(time.perf_counter_ns() - begin)
        if session is not None:
            kv.sessions.ended(session, keys, 0, size)
    bare = BlockPool(num_blocks)
    bare.order = pool.order if order == "value" else None
    for _ in range(50):  # blocks that are never cached
        begin = time.perf_counter_ns()
        bare.release(bare.allocate(size))
        took["plain"].append(time.perf_counter_ns() - begin)
    return {what: statistics.median(each[len(each) // 2 :]) / size for what, each in took.items()}


RECORD = "eviction"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--longest", type=int, default=65536, help="tokens at which a session ends")
    parser.add_argument(
        "--share", type=float, default=3.0, help="all sessions at their longest, over the cache"
    )
    parser.add_argument(
        "--pause", type=float, default=30.0, help="median pause of the median session, in seconds"
    )
    parser.add_argument(
        "--minutes", type=float, default=12.0, help="virtual ones, of which the second half counts"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--trace", type=Path, help="JSON lines with timestamp (ms) and hash_ids")
    parser.add_argument("--parts", default="agents,prefixes,chats,trace,pool")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    parts, results = args.parts.split(","), dict[str, Any]()
    if args.output.exists():  # parts that are not measured now stay as they were
        results = json.loads(args.output.read_text())["results"]
    if "agents" in parts:
        for seed in range(args.seeds):
            found = {order: agents(order, args, seed) for order in ORDERS}
            results[f"agents, seed {seed}"] = found
            for order, each in found.items():
                print(
                    f"agents, seed {seed}, {order}: "
                    + ", ".join(f"{k} {v:,.2f}" for k, v in each.items()),
                    flush=True,
                )
    loads: list[tuple[str, list[tuple[float, list[int]]], tuple[int, ...]]] = []
    if "prefixes" in parts:
        loads.append(("prefixes", popular_prefixes(0), (300, 1000, 3000)))
    if "chats" in parts:
        loads.append(("chats", chats(0), (300, 1000, 3000)))
    if "trace" in parts and args.trace is not None:
        loads.append(("trace", of_trace(args.trace), (500, 2000, 8000, 32000)))
    for name, requests, sizes in loads:
        for size in sizes:
            found = {order: replay(order, requests, size) for order in ORDERS}
            results[f"{name}, {size} blocks"] = found
            for order, each in found.items():
                print(
                    f"{name}, {size} blocks, {order}: "
                    + ", ".join(f"{k} {v:.4f}" for k, v in each.items()),
                    flush=True,
                )
    if "pool" in parts:
        rounds = [{order: pool_ns(order) for order in ORDERS} for _ in range(3)]
        results["pool, ns a block"] = {
            order: {what: min(each[order][what] for each in rounds) for what in rounds[0][order]}
            for order in ORDERS
        }
        print(results["pool, ns a block"])
    save(results=results)
