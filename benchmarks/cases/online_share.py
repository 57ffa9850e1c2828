"""What is left over HTTP of the speed that an engine has in process, on the same cores, and what each process takes of a token.

    python benchmarks/online.py --study share [--users 16,64] [--rounds 3]

A server and an engine of this process take turns, and change who is first: a closed loop of users, random prompts, greedy
answers of full length, no prefix cache. The server's client is that of `slipstream bench serve`, and runs on the same cores.
Processor time is the kernel's count for each process, so that a neighbour changes it little; tokens a second mean something
on a quiet machine alone. Microseconds of a token are all that a process took from the first request of a round to the last
answer, over the round's tokens.

With `--step-ms` the engines compute nothing: a step sleeps so long (`paced.py`). Then it can be measured on a busy machine what
serving takes, while the share says nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import paced
from cases.online_loads import served

from slipstream.bench.adapters.openai import Endpoint
from slipstream.bench.adapters.slipstream import AsyncSlipstream
from slipstream.bench.clients import Clients
from slipstream.bench.load import ClosedLoop, run_load
from slipstream.bench.report import print_table
from slipstream.bench.workload import fixed, warmup
from slipstream.config import EngineArgs
from slipstream.costs.metrics import RequestTiming, summarize
from slipstream.hub import resolve_model
from slipstream.spec.description import read_spec

WAYS = ("in process", "HTTP")


def cpu_s(pid: int) -> float:
    """Seconds of the processor that a process's threads have had."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def tree(pid: int) -> list[int]:
    """A process and all that it started."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    children = [
        int(child) for thread in threads for child in (thread / "children").read_text().split()
    ]
    return [pid, *(each for child in children for each in tree(child))]


def is_engine(pid: int) -> bool:
    return paced.CORE in Path(f"/proc/{pid}/cmdline").read_text()


class Load:
    """One load, in process or over HTTP; `processes` are those whose time counts, by what they are."""

    def __init__(
        self, args: Any, url: str, engine: AsyncSlipstream, clients: Clients, vocab_size: int
    ) -> None:
        self.args, self.engine, self.clients, self.vocab_size = args, engine, clients, vocab_size
        self.endpoint = Endpoint(url=url, model="m")
        me = os.getpid()
        own, (client,) = (
            engine.engine._core.link.process.pid,
            [process.pid for process in clients._processes],
        )  # type: ignore[union-attr]
        serving = [pid for pid in tree(me) if pid not in (me, own, client)]
        engines = [pid for pid in serving if is_engine(pid)]
        others = [pid for pid in serving if pid not in engines]
        self.processes = {
            "in process": {"engine": [own], "caller": [me]},
            "HTTP": {"engine": engines, "server": others, "client": [client]},
        }

    async def run(self, way: str, users: int, seed: int) -> dict[str, Any]:
        args = self.args
        workload = fixed(
            users * args.each,
            args.input_len,
            args.output_len,
            vocab_size=self.vocab_size,
            seed=seed,
        )
        await self._send(way, warmup(workload, users), users)
        processes = self.processes[way]
        before = {name: sum(map(cpu_s, pids)) for name, pids in processes.items()}
        summary = summarize(await self._send(way, workload.requests, users))
        after = {name: sum(map(cpu_s, pids)) for name, pids in processes.items()}
        if summary.num_failed:
            raise SystemExit(f"{way}: {summary.num_failed} requests failed: {summary.errors}")
        took = {
            name: (after[name] - before[name]) / summary.output_tokens * 1e6 for name in processes
        }
        return {
            "tokens_per_s": summary.output_throughput,
            "us_a_token": took,
            "ttft_p50_s": summary.ttft_s.p50,
        }  # type: ignore[union-attr]

    async def _send(self, way: str, requests: Any, users: int) -> list[RequestTiming]:
        if way == "HTTP":
            return (await self.clients.run(self.endpoint, requests, ClosedLoop(concurrency=users)))[
                0
            ]
        return await run_load(self.engine, requests, ClosedLoop(concurrency=users))


async def measure(args: Any, url: str, vocab_size: int) -> list[dict[str, Any]]:
    most = max(args.users)
    given: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_num_seqs": most,
    }
    found = []
    async with (
        await AsyncSlipstream.start(
            EngineArgs(model=args.model, max_model_len=args.context, **given)
        ) as engine,
        await Clients.start(1) as clients,
    ):
        load = Load(args, url, engine, clients, vocab_size)
        for number in range(args.rounds):
            for users in args.users:
                both = {
                    way: await load.run(way, users, seed=number)
                    for way in WAYS[:: 1 - 2 * (number % 2)]
                }
                share = both["HTTP"]["tokens_per_s"] / both["in process"]["tokens_per_s"]
                found.append({"users": users, "share": share, **both})
                print(json.dumps(found[-1]), flush=True)
    return found


RECORD = "http_share"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--users", type=lambda text: [int(n) for n in text.split(",")], default=[16, 64]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--each", type=int, default=4, help="requests of a user in a round")
    parser.add_argument("--step-ms", type=float)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    args.context = args.input_len + args.output_len
    words = [
        args.model,
        "--served-model-name",
        "m",
        "--no-enable-prefix-caching",
        "--max-model-len",
        str(args.context),
    ]
    words += ["--max-num-seqs", str(max(args.users))]
    vocab_size = read_spec(resolve_model(args.model)).spec.vocab_size
    program = ["-m", "slipstream"]
    if args.step_ms is not None:
        program = [paced.__file__, str(args.step_ms)]
        paced.pace(args.step_ms / 1e3)
    with (
        tempfile.TemporaryDirectory() as folder,
        served(words, Path(folder) / "log", program) as (url, _),
    ):
        rounds = asyncio.run(measure(args, url, vocab_size))
    results, rows = {}, []
    for users in args.users:
        own = [found for found in rounds if found["users"] == users]
        results[str(users)] = {"share": common.median([found["share"] for found in own])}
        for way in WAYS:
            speed = common.median([found[way]["tokens_per_s"] for found in own])
            took = {
                name: common.median([f[way]["us_a_token"][name] for f in own])
                for name in own[0][way]["us_a_token"]
            }
            results[str(users)][way] = {"tokens_per_s": speed, "us_a_token": took}
            rows.append(
                (
                    f"{users} users, {way}",
                    f"{speed:,.0f}",
                    ", ".join(f"{name} {us:.1f}" for name, us in took.items()),
                )
            )
        rows.append(
            (f"{users} users, HTTP over in process", f"{results[str(users)]['share']:.3f}", "")
        )
    print_table("medians of the rounds", ("", "tok/s", "us of the processor a token"), rows)
    settings = {key: value for key, value in vars(args).items() if key != "output"}
    save(settings=settings, load=os.getloadavg()[0], results=results, rounds=rounds)
