"""The fleet's router by itself: prefix hits against one cache of all memory, balance, and what a decision costs.

    python benchmarks/fleet.py --study routing --mooncake TRACE.jsonl [--part prefixes|decisions]

`prefixes`: replicas that compute prompts one after the other and keep blocks in an LRU cache, asked by the fleet's own
`Router`, which is told what they hold 50 ms after it changed. The conversation trace of Mooncake (blocks of 512 tokens), and
conversations of several turns with ShareGPT's lengths. "Ideal" is one cache as large as all together, asked in the same order.
"Balance" is the most tokens that a replica computed (prompts' new tokens and answers'), over the mean.

`decisions`: 1,000 replicas; processor time of a decision, and bytes of the table.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import common

from slipstream.bench.report import print_table
from slipstream.fleet.gateway.router import POLICIES, ReplicaState, Router

TOLD_S = 0.05


class Cache:
    def __init__(self, blocks: int) -> None:
        self.room, self.held = blocks, OrderedDict()

    def hit(self, chain: list[bytes]) -> int:
        for i, key in enumerate(chain):
            if key not in self.held:
                return i
        return len(chain)

    def take(self, chain: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """What came and what went. The first blocks of a chain go last."""
        came = [key for key in chain if key not in self.held]
        for key in reversed(chain):
            self.held[key] = None
            self.held.move_to_end(key)
        went = [self.held.popitem(last=False)[0] for _ in range(max(0, len(self.held) - self.room))]
        gone = set(went)
        return [key for key in came if key not in gone], [key for key in went if key not in came]


Request = tuple[float, list[bytes], int, int, str]  # when, keys, tokens, answer's tokens, session


def mooncake(path: Path, speed: float) -> Iterator[Request]:
    for number, line in enumerate(path.read_text().splitlines()):
        row = json.loads(line)
        keys = [blake2b(i.to_bytes(8, "little"), digest_size=16).digest() for i in row["hash_ids"]]
        whole = row["input_length"] // 512
        yield (
            row["timestamp"] / 1000 / speed,
            keys[:whole],
            row["input_length"],
            row["output_length"],
            str(number),
        )


def turns(num_sessions: int, seconds: float, seed: int = 0) -> list[Request]:
    """Conversations with one of eight system prompts, up to eight turns, a minute apart in the mean."""
    rng, lengths = random.Random(seed), json.loads(common.SHAREGPT.read_text())["lengths"]
    systems = [[rng.randbytes(16) for _ in range(40)] for _ in range(8)]
    found: list[Request] = []
    for session in range(num_sessions):
        chain, tokens, at = list(rng.choice(systems)), 640, rng.uniform(0, seconds)
        for _ in range(rng.randint(1, 8)):
            asked, answered = rng.choice(lengths)
            tokens += asked
            while len(chain) < tokens // 16:
                chain.append(rng.randbytes(16))
            found.append((at, list(chain), tokens, answered, str(session)))
            tokens += answered
            at += rng.expovariate(1 / 60) + 2
    return sorted(found, key=lambda request: request[0])


def simulate(
    requests: list[Request],
    policy: str,
    *,
    replicas: int,
    blocks: int,
    size: int,
    rate: float,
    step_s: float,
) -> dict:
    router = Router(policy)
    caches = {f"r{i}": Cache(blocks) for i in range(replicas)}
    for name in caches:
        router.add(
            ReplicaState(
                id=name, block_size=size, prefill_tokens_per_s=rate, step_s=step_s, max_num_seqs=256
            )
        )
        router.reset(name, 0, [])
    queues, busy, work = (
        {name: deque() for name in caches},
        dict.fromkeys(caches, False),
        dict.fromkeys(caches, 0.0),
    )
    told = dict.fromkeys(caches, 0)
    events: list[tuple[float, int, object]] = []
    number, hits, asked, ttfts, cpu, chosen = 0, 0, 0, [], 0.0, 0

    def at(when: float, what: object) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (when, number, what))

    def serve(name: str, now: float) -> None:
        """Compute the first in line."""
        nonlocal hits, asked
        busy[name] = bool(queues[name])
        if not busy[name]:
            return
        chain, tokens, answered, decision, came = queues[name].popleft()
        held = min(caches[name].hit(chain) * size, max(0, tokens - 2))
        hits, asked = hits + held, asked + tokens
        changes = caches[name].take(chain)
        end = now + (tokens - held) / rate
        work[name] += tokens - held + answered
        ttfts.append(end + step_s - came)
        at(end, lambda now: serve(name, now))
        at(end + step_s, lambda now: router.began(decision, now))
        at(end + step_s * answered, lambda now: router.ended(decision, now))

        def tell(now: float) -> None:
            told[name] += 1
            router.apply(name, told[name], *changes)

        at(now + TOLD_S, tell)

    for request in requests:
        at(request[0], request)
    while events:
        now, _, what = heapq.heappop(events)
        if isinstance(what, tuple):
            _, chain, tokens, answered, session = what
            begin = time.thread_time()
            decision = router.choose([chain], tokens, session=session, now=now)
            cpu += time.thread_time() - begin
            chosen += 1
            name = decision.replica

            queues[name].append((chain, tokens, answered, decision, now))
            if not busy[name]:
                serve(name, now)
        else:
            what(now)
    ttfts.sort()
    mean = sum(work.values()) / len(work)
    return {
        "policy": policy,
        "hit_share": hits / asked,
        "balance": max(work.values()) / mean,
        "ttft_p50_s": ttfts[len(ttfts) // 2],
        "ttft_p99_s": ttfts[int(len(ttfts) * 0.99)],
        "decision_us": cpu / chosen * 1e6,
    }


def ideal(requests: list[Request], blocks: int, size: int) -> float:
    cache, hits, asked = Cache(blocks), 0, 0
    for _, chain, tokens, _, _ in requests:
        hits += min(cache.hit(chain) * size, max(0, tokens - 2))
        asked += tokens
        cache.take(chain)
    return hits / asked


def prefixes(args) -> list[dict]:
    studies = []
    loads = {"multi-turn": (turns(args.sessions, 3600.0), 16, 12_000, 8_000.0)}
    if args.mooncake:
        loads["mooncake"] = (list(mooncake(args.mooncake, args.speed)), 512, 2_000, 20_000.0)
    for name, (requests, size, blocks, rate) in loads.items():
        best = ideal(requests, args.replicas * blocks, size)
        shape = {
            "replicas": args.replicas,
            "blocks": blocks,
            "size": size,
            "rate": rate,
            "step_s": 0.02,
        }
        runs = [simulate(requests, policy, **shape) for policy in POLICIES]
        studies.append(
            {
                "load": name,
                "requests": len(requests),
                **shape,
                "ideal_hit_share": best,
                "runs": runs,
            }
        )
        header = ["policy", "hits of ideal", "balance", "TTFT p50 s", "p99 s", "µs a decision"]
        rows = [
            (
                r["policy"],
                f"{r['hit_share'] / best:.1%}",
                f"{r['balance']:.2f}",
                *(f"{r[k]:.3f}" for k in ("ttft_p50_s", "ttft_p99_s")),
                f"{r['decision_us']:.0f}",
            )
            for r in runs
        ]
        print_table(
            f"{name}: {len(requests)} requests, an ideal cache has {best:.1%}", header, rows
        )
    return studies


def decisions(args) -> dict:
    """Each replica holds chains that begin with one of 64 shared prefixes; the table grows to `--blocks` blocks a replica."""
    rng = random.Random(0)
    router, length = Router(learn_rates=False), 430
    shared = [[rng.randbytes(16) for _ in range(64)] for _ in range(64)]
    known: list[list[bytes]] = []
    begin, stored = time.thread_time(), 0
    for i in range(args.fleet_size):
        router.add(ReplicaState(id=f"r{i}", prefill_tokens_per_s=40_000.0))
        keys: list[bytes] = []
        for prefix in rng.sample(shared, 8):
            keys += prefix
        while len(keys) < args.blocks:
            own = [rng.randbytes(16) for _ in range(length - 64)]
            if rng.random() < 0.05:
                known.append(keys[:64] + own)
            keys += own
        router.reset(f"r{i}", 0, keys)
        stored += len(keys)
    filled = (time.thread_time() - begin) / stored
    times, open_now, now = [], [], 0.0
    for _ in range(args.decisions):
        chain = rng.choice(known)
        depth = rng.randrange(64, length)
        chain = chain[:depth] + [rng.randbytes(16) for _ in range(length - depth)]
        now += 1e-5
        begin = time.thread_time()
        decision = router.choose([chain], 16 * length, now=now)
        times.append(time.thread_time() - begin)
        open_now.append(decision)
        if len(open_now) > 3000:
            done = open_now.pop(0)
            router.began(done, now)
            router.ended(done, now)
    times.sort()
    found = {
        "replicas": args.fleet_size,
        "blocks": router.store.num_blocks,
        "table_bytes": router.store.num_bytes,
        "bytes_a_block": router.store.num_bytes / router.store.num_blocks,
        "store_us_a_block": filled * 1e6,
        "decision_us_p50": times[len(times) // 2] * 1e6,
        "decision_us_mean": sum(times) / len(times) * 1e6,
        "decision_us_p99": times[int(0.99 * len(times))] * 1e6,
        "load_average": os.getloadavg()[0],
    }
    print_table(
        "decisions", ["what", "value"], [(name, f"{value:,.1f}") for name, value in found.items()]
    )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=("prefixes", "decisions", "all"), default="all")
    parser.add_argument(
        "--mooncake",
        type=Path,
        help="mooncake_conversation.jsonl (kvcache-ai/Mooncake, Apache-2.0)",
    )
    parser.add_argument("--speed", type=float, default=1.0, help="of the trace (default: 1)")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--fleet-size", type=int, default=1000)
    parser.add_argument(
        "--blocks", type=int, default=30_000, help="that a replica holds (default: 30,000)"
    )
    parser.add_argument("--decisions", type=int, default=20_000)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    results = {}
    if args.part != "decisions":
        results["prefixes"] = prefixes(args)
    if args.part != "prefixes":
        results["decisions"] = decisions(args)
    save(results=results)
