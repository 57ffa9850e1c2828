"""A real fleet on this machine: what the gateway costs, and what clients see while replicas are killed.

    python benchmarks/fleet.py --study serving --part gateway
    python benchmarks/fleet.py --study serving --part kill --minutes 20
    python benchmarks/fleet.py --study serving --part kill --minutes 2 --every 20 --stories 12 --users 4

`gateway`: one replica of SmolLM2, asked by way of the gateway and at its own address, in turn. TTFT one request at a time, of
`--requests` each way; tokens a second with as many streams as `--users`. What the gateway adds to a quantile is the difference
of the two ways' quantiles, with the interval of 95 of 100 bootstrap draws: whether a p99 is known to a millisecond, it says.

`kill`: a replica is killed with SIGKILL every `--every` seconds while users ask for greedy and seeded streams. Each text is
compared with the same request's in the quiet before. Of requests that only other replicas answered, the p99 near a kill (from
1 s before until as many replicas serve as before) stands over two others of the same run and users: of all replicas in quiet,
and of one replica fewer in quiet. The first holds that a replica is missing; the second is what the kill and the restart add.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Self

import common
import numpy as np
import uvloop

from slipstream.bench.report import print_table
from slipstream.fleet.config import check, pools
from slipstream.fleet.gateway.upstream import ConnectionPool, UpstreamError
from slipstream.fleet.head import Head
from slipstream.server.run import bind, url
from slipstream.server.state import ServerSettings

JSON = b"content-type: application/json\r\n"


class RunningFleet:
    """A head and its replicas, from a fleet file. `gateway` has connections to it."""

    def __init__(self, file: dict, name: str) -> None:
        self.settings = ServerSettings(port=0, served_model_names=(name,))
        self.head = Head(check(file), Path(tempfile.mkdtemp()) / "state", self.settings)

    async def __aenter__(self) -> Self:
        self._listener, ready = bind(self.settings), asyncio.Event()
        self._running = asyncio.create_task(self.head.run(self._listener, ready.set))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self._running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            self._running.result()
        self.gateway = ConnectionPool(url(self.settings, self._listener), None)
        return self

    async def __aexit__(self, *_) -> None:
        self.head.stop()
        await self._running
        self._listener.close()


class Fleet(RunningFleet):
    """Replicas of one model, whose number a test changes."""

    def __init__(self, args, replicas: int) -> None:
        engine = {
            "num_threads": 1,
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "kv_cache_bytes": 2**28,
        }
        several = {"min": max(1, replicas - 1), "max": replicas}
        version = {"name": "v1", "model": args.model, "engine": engine, "replicas": several}
        file = {
            "port": 0,
            "models": {args.name: {"versions": [version]}},
            "router": {"queue_s": 120},
        }
        super().__init__(file, args.name)

    @property
    def key(self) -> str:
        (pool,) = pools(self.head.fleet)
        return pool.key

    async def scale(self, replicas: int) -> None:
        """Sets the number of replicas, and waits until so many serve."""
        await self.head.scale(self.key, replicas)
        while sum(r.heard and not r.draining for r in self.replicas) != replicas:
            await asyncio.sleep(0.05)

    @property
    def replicas(self):
        return self.head.members.all_replicas()


@dataclass
class Asked:
    """One request. `times` are of its parts, from when it was sent; the first is the TTFT."""

    begin: float
    end: str = "failed"  # done, broken, error event
    id: str = ""
    text: str = ""
    events: int = 0
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0] if self.times else 0.0

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.times)]


async def ask(pool: ConnectionPool, body: dict, headers: list[bytes]) -> Asked:
    found, raw = Asked(time.monotonic()), b""
    answer = await pool.ask(
        b"POST", b"/v1/completions", [JSON, *headers], json.dumps(body).encode()
    )
    try:
        found.id = dict(answer.headers).get(b"x-request-id", b"").decode()
        while (data := await answer.read()) is not None:
            found.times.append(time.monotonic() - found.begin)
            raw += data
        if answer.status != 200:
            return found
    finally:
        answer.done()
    for line in raw.decode().split("\n"):
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                found.end = "error event"
                return found
            found.text += event["choices"][0]["text"]
            found.events += 1
    found.end = "done" if raw.endswith(b"data: [DONE]\n\n") else "broken"
    return found


def body_of(number: int, tokens: int, model: str) -> dict:
    made = {
        "model": model,
        "prompt": f"Story {number}. Once upon a time",
        "max_tokens": tokens,
        "stream": True,
    }
    return {
        **made,
        "ignore_eos": True,
        **({"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number}),
    }


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def added(ttfts: dict[str, list[float]], share: float) -> tuple[float, float, float]:
    """Time in ms that the gateway adds to this quantile of the TTFT, with the interval of 95 of
    100 bootstrap draws."""
    rng = np.random.default_rng(0)
    ways = [np.array(ttfts[way]) * 1e3 for way in ("gateway", "replica")]
    drawn = [np.quantile(rng.choice(way, (2000, len(way))), share, axis=1) for way in ways]
    least, most = np.quantile(drawn[0] - drawn[1], (0.025, 0.975))
    return (
        float(np.quantile(ways[0], share) - np.quantile(ways[1], share)),
        float(least),
        float(most),
    )


async def gateway(args) -> dict:
    async with Fleet(args, 1) as fleet:
        (replica,) = fleet.replicas
        ways = {
            "replica": (ConnectionPool(replica.url, None), [replica.key_line + b"\r\n"]),
            "gateway": (fleet.gateway, []),
        }
        ttfts: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(args.requests + 10):
            for way in random.sample(list(ways), 2):
                found = await ask(ways[way][0], body_of(number, 2, args.name), ways[way][1])
                if number >= 10:
                    ttfts[way].append(found.ttft)
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(2 * args.rounds):
            way = list(ways)[number % 2]
            begin = time.monotonic()
            found = await asyncio.gather(
                *(
                    ask(ways[way][0], body_of(100 * number + user, 64, args.name), ways[way][1])
                    for user in range(args.users)
                )
            )
            rates[way].append(sum(f.events for f in found) / (time.monotonic() - begin))
    differences = [a - b for a, b in zip(ttfts["gateway"], ttfts["replica"], strict=True)]
    found = {
        "requests": args.requests,
        **{
            f"ttft_{way}_p{round(100 * q)}_ms": quantile(ttfts[way], q) * 1e3
            for way in ways
            for q in (0.5, 0.99)
        },
        **{
            f"ttft_added_p{round(100 * q)}{name}_ms": ms
            for q in (0.5, 0.99)
            for name, ms in zip(("", "_from", "_to"), added(ttfts, q), strict=True)
        },
        "ttft_added_median_of_pairs_ms": quantile(differences, 0.5) * 1e3,
        **{f"tokens_per_s_{way}": common.median(rates[way]) for way in ways},
        "throughput_share": common.median(rates["gateway"]) / common.median(rates["replica"]),
        "users": args.users,
        "machine": "busy: latencies are not to be compared" if args.busy else "quiet",
        "load_average": os.getloadavg()[0],
    }
    rows = [
        (name, f"{value:.2f}" if isinstance(value, float) else str(value))
        for name, value in found.items()
    ]
    print_table("the gateway's cost", ["what", "value"], rows)
    return found


class Users:
    """Ask for stories one after the other, each user for its own."""

    def __init__(self, fleet: Fleet, args) -> None:
        self.fleet, self.args = fleet, args
        self.at: dict[str, list[str]] = {}  # by request: the replicas that it was at
        self._numbers = list(range(args.users))
        forwarder = fleet.head.gateway.forwarder
        opens = forwarder._open

        async def opened(opened, call) -> None:
            self.at.setdefault(call.record.id, []).append(opened.replica.id)
            await opens(opened, call)

        forwarder._open = opened

    async def ask(self, seconds: float) -> list[tuple[int, Asked]]:
        """(number of the story, what came) of all users for so long."""
        until, found = time.monotonic() + seconds, []

        async def user(index: int) -> None:
            while time.monotonic() < until:
                self._numbers[index] += self.args.users
                story = self._numbers[index] % self.args.stories
                begin = time.monotonic()
                try:
                    found.append((story, await ask(self.fleet.gateway, self.body(story), [])))
                except UpstreamError:
                    found.append((story, Asked(begin)))

        await asyncio.gather(*map(user, range(self.args.users)))
        return found

    def body(self, story: int) -> dict:
        return body_of(story, self.args.tokens, self.args.name)


def p99s(asked: list[Asked]) -> dict[str, float]:
    done = [one for one in asked if one.times]
    if not done:
        return {}
    gaps = [gap for one in done for gap in one.gaps]
    return {
        "requests": len(done),
        "ttft_p99_s": quantile([one.ttft for one in done], 0.99),
        "itl_p99_s": quantile(gaps, 0.99),
    }


async def kill(args) -> dict:
    async with Fleet(args, args.replicas) as fleet:
        await fleet.scale(args.replicas)
        users = Users(fleet, args)
        expected = {
            story: (await ask(fleet.gateway, users.body(story), [])).text
            for story in range(args.stories)
        }
        quiet = {"all replicas": p99s([one for _, one in await users.ask(args.quiet)])}
        if args.replicas > 1:
            await fleet.scale(args.replicas - 1)
            quiet["one fewer"] = p99s([one for _, one in await users.ask(args.quiet)])
            await fleet.scale(args.replicas)
        rng, until = random.Random(0), time.monotonic() + 60 * args.minutes
        kills: list[tuple[str, float, float]] = []  # whom, when, and until when one was missing

        async def killer() -> None:
            due = time.monotonic()
            while (due := max(due + args.every, time.monotonic())) < until:
                await asyncio.sleep(due - time.monotonic())
                alive = [
                    m
                    for kept in fleet.head._kept.values()
                    for m in kept
                    if m.replica is not None and m.replica.heard
                ]
                if len(alive) < 2:
                    continue
                victim, begin = rng.choice(alive), time.monotonic()
                name = victim.replica.id
                os.kill(victim.started.process.pid, signal.SIGKILL)
                kept = victim.replica
                while kept is victim.replica or not (
                    victim.replica.heard and victim.serves.is_set()
                ):
                    await asyncio.sleep(0.02)
                kills.append((name, begin, time.monotonic()))

        killing = asyncio.create_task(killer())
        found = await users.ask(60 * args.minutes)
        await killing

        def near(one: Asked) -> list[str]:
            """Replicas that were missing at about that time. A restarted replica keeps its name."""
            return [name for name, begin, back in kills if begin - 1 < one.begin < back]

        others = [
            one
            for _, one in found
            if (missing := near(one)) and not set(missing) & set(users.at.get(one.id, ()))
        ]
        at_kills, else_ = p99s(others), p99s([one for _, one in found if not near(one)])
        ratios = {
            f"{what}_others_over_{name.replace(' ', '_')}": at_kills[what] / known[what]
            for name, known in {**quiet, "between kills": else_}.items()
            for what in ("ttft_p99_s", "itl_p99_s")
            if at_kills and known
        }
        gateway = fleet.head.gateway.forwarder
        result = {
            "minutes": args.minutes,
            "machine": "busy: latencies are not to be compared" if args.busy else "quiet",
            "replicas": args.replicas,
            "users": args.users,
            "kills": len(kills),
            "back_after_s": [round(back - begin, 2) for _, begin, back in kills],
            "ends": {
                end: sum(one.end == end for _, one in found)
                for end in sorted({one.end for _, one in found})
            },
            "texts_that_differ": sum(
                one.end == "done" and one.text != expected[story] for story, one in found
            ),
            "resumed": gateway.num_resumed,
            "failovers": gateway.num_failovers,
            "broken": gateway.num_broken,
            "quiet": quiet,
            "others_near_a_kill": at_kills,
            "others_between_kills": else_,
            **ratios,
            "load_average": os.getloadavg()[0],
        }
    print_table("kills", ["what", "value"], [(name, str(value)) for name, value in result.items()])
    return result


RECORD = "fleet"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=("gateway", "kill", "all"), default="all")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=30.0)
    parser.add_argument(
        "--quiet",
        type=float,
        default=30.0,
        help="seconds without kills, of all replicas and of one fewer",
    )
    parser.add_argument(
        "--busy", action="store_true", help="say in the record that others used this machine"
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--stories", type=int, default=40)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    args.name = Path(args.model).name
    results = {}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if args.part != "kill":
            results["gateway"] = runner.run(gateway(args))
        if args.part != "gateway":
            results["kill"] = runner.run(kill(args))
    save(results=results)
