"""Prompts and answers on the same replicas, and apart: what streams and long prompts see of each other.

    python benchmarks/fleet.py --study phases
    python benchmarks/fleet.py --study phases --rounds 5 --streams 8 --prompt 900

Two fleets of two replicas each are up at once: both `mixed`, and one for prompts with one for answers. Each round asks one
fleet after the other for the same requests: streams of greedy tokens, and meanwhile long prompts with short answers, at even
distances. Told are medians over rounds of the gaps between a stream's tokens, of the long prompts' times to first token and of
tokens a second, and in how many rounds both fleets said the same. `replicas_cpu_s` is the processor time of a fleet's replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Callable

import numpy as np
import psutil
import uvloop
from cases.fleet.serving import JSON, RunningFleet

from slipstream.bench.report import print_table

POOLS = {
    "together": [{"name": "all", "replicas": 2}],
    "apart": [
        {"name": "prompts", "role": "prefill", "replicas": 1},
        {"name": "answers", "role": "decode", "replicas": 1},
    ],
}


class Fleet(RunningFleet):
    def __init__(self, args, form: str) -> None:
        engine = {"num_threads": 1, "max_model_len": 2048, "max_num_seqs": 16}
        engine["kv_cache_bytes"] = 2**28
        pools, devices = POOLS[form], [d for d in args.devices.split(",") if d]
        if args.engine:
            engine = json.loads(args.engine)
        if devices:  # a replica has one of its own
            places = iter(devices)
            pools = [
                {**p, "resources": {"devices": [next(places) for _ in range(p["replicas"])]}}
                for p in pools
            ]
        version = {"name": "v1", "model": args.model, "engine": engine, "pools": pools}
        file = {"port": 0, "models": {"m": {"versions": [version]}}, "router": {"probe_s": 0}}
        file["router"]["handover"] = args.handover
        super().__init__(file, "m")

    def cpu_s(self) -> float:
        """Processor time of the replicas so far."""
        found = 0.0
        for kept in self.head._kept.values():
            for member in kept:
                own = psutil.Process(member.started.process.pid)
                for process in (own, *own.children(recursive=True)):
                    times = process.cpu_times()
                    found += times.user + times.system
        return found


async def ask(fleet: Fleet, prompt: list[int], num_tokens: int) -> tuple[list[float], str]:
    """Times of a stream's parts from when it was asked for, and its text."""
    body = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    begin, times, data = time.perf_counter(), [], b""
    answer = await fleet.gateway.ask(b"POST", b"/v1/completions", [JSON], json.dumps(body).encode())
    assert answer.status == 200, await answer.read_all()
    while (part := await answer.read()) is not None:
        times.append(time.perf_counter() - begin)
        data += part
    answer.done()
    events = [e[6:] for e in data.split(b"\n\n") if e.startswith(b"data: {")]
    text = "".join(c["text"] for e in events for c in json.loads(e)["choices"])
    return times, text


async def round_of(fleet: Fleet, args, number: int) -> tuple[dict[str, float], list[str]]:
    draw = random.Random(number + 2)
    streams = [[draw.randrange(100, 40_000) for _ in range(40)] for _ in range(args.streams)]
    prompts = [
        [draw.randrange(100, 40_000) for _ in range(args.prompt)] for _ in range(args.prompts)
    ]
    begin, cpu_s = time.perf_counter(), fleet.cpu_s()
    asked = [asyncio.create_task(ask(fleet, p, args.tokens)) for p in streams]
    await asyncio.sleep(args.every)
    late = []
    for prompt in prompts:
        late.append(asyncio.create_task(ask(fleet, prompt, 4)))
        await asyncio.sleep(args.every)
    short, long = await asyncio.gather(*asked), await asyncio.gather(*late)
    seconds = time.perf_counter() - begin
    gaps = np.concatenate([np.diff(times) for times, _ in short])
    found = {
        "gap_p50_ms": 1e3 * float(np.median(gaps)),
        "gap_p99_ms": 1e3 * float(np.quantile(gaps, 0.99)),
        "gap_most_ms": 1e3 * float(gaps.max()),
        "prompt_ttft_p50_ms": 1e3 * float(np.median([times[0] for times, _ in long])),
        "stream_ttft_p50_ms": 1e3 * float(np.median([times[0] for times, _ in short])),
        "output_tokens_per_s": (args.streams * args.tokens + 4 * args.prompts) / seconds,
        "replicas_cpu_s": fleet.cpu_s() - cpu_s,
    }
    return found, [text for _, text in (*short, *long)]


async def measure(args) -> dict[str, object]:
    rounds: dict[str, list[dict[str, float]]] = {form: [] for form in POOLS}
    same = handed = 0
    async with Fleet(args, "together") as together, Fleet(args, "apart") as apart:
        fleets = {"together": together, "apart": apart}
        for fleet in fleets.values():
            await round_of(fleet, args, -1)  # warm
        before = apart.head.gateway.forwarder.num_handed
        for number in range(args.rounds):
            texts = {}
            order = list(fleets) if number % 2 == 0 else list(fleets)[::-1]
            for form in order:
                found, texts[form] = await round_of(fleets[form], args, number)
                rounds[form].append(found)
            same += texts["together"] == texts["apart"]
        handed = apart.head.gateway.forwarder.num_handed - before
        await asyncio.sleep(1.0)
        tiers = [r.load.stats.tiers for r in apart.head.members.all_replicas()]
        hits = sum(t.peer_hit_tokens for t in tiers)
        rate = max(t.peer_bytes_per_s for t in tiers)
    medians = {
        form: {name: float(np.median([r[name] for r in own])) for name in own[0]}
        for form, own in rounds.items()
    }
    return {
        "medians": medians,
        "rounds": rounds,
        "rounds_with_the_same_texts": same,
        "requests": args.rounds * (args.streams + args.prompts),
        "handed": handed,
        "prompt_tokens_handed_over": hits,
        "loading_bytes_per_s": rate,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--engine", default="", help="settings of the engines, as JSON")
    parser.add_argument("--devices", default="", help="CUDA_VISIBLE_DEVICES of the replicas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=800)
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--handover", choices=("cost", "always"), default="cost")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(args))
    medians = found["medians"]
    rows = [[name, *(f"{medians[form][name]:.1f}" for form in POOLS)] for name in medians["apart"]]
    print_table("medians over rounds", ["", *POOLS], rows)
    print({k: v for k, v in found.items() if k not in ("medians", "rounds")})
    settings = {k: v for k, v in vars(args).items() if k != "output"}
    save(settings=settings, load_average=os.getloadavg()[0], **found)
