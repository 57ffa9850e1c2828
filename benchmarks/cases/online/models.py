"""Several models on one device, served by one `slipstream serve`.

    python benchmarks/online.py --study models --part swap --models SMOLLM2.gguf GEMMA.gguf --memory 700MiB
    python benchmarks/online.py --study models --part random --models A B C --memory SIZE_FOR_TWO --kill-every 100
    python benchmarks/online.py --study models --part streams --models A B C --memory SIZE_FOR_TWO --streams 8 --seconds 60
    # H200, two 8B models in FP8 without a checkpoint (a folder with a config.json each):
    python benchmarks/online.py --study models --part swap --models A8B B8B --memory 24GiB \\
        --serve=--load-format=dummy --serve=--quantization=fp8 --serve=--kv-cache-bytes=8GiB

swap     each model answers one token in turn, and memory holds one of them: seconds from the request to its first token
random   requests for models at random, engines killed meanwhile: none may be lost, and memory must stay within the bound
streams  streams of the first model, alone and while the others are asked every `--swap-every` seconds: gaps between tokens
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import psutil
from common import median, with_source

PATIENCE_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--part", choices=("swap", "random", "streams"), required=True)
    add("--models", nargs="+", required=True, metavar="MODEL")
    add("--memory", required=True, help="--models-memory of the server")
    add(
        "--serve",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option of the server",
    )
    add("--swaps", type=int, default=20)
    add("--requests", type=int, default=10_000)
    add("--clients", type=int, default=16)
    add("--kill-every", type=int, default=100, help="requests between two deaths of an engine")
    add("--streams", type=int, default=8)
    add("--seconds", type=float, default=60.0)
    add("--swap-every", type=float, default=5.0)
    add("--turns", type=int, default=1)
    add("--warm-up", type=float, default=0.0, help="seconds of streams before the first turn")
    add("--max-tokens", type=int, default=256)


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[tuple[str, psutil.Process]]:
    """(URL, its process). The models are m0, m1, …"""
    named = [f"m{i}={path}" for i, path in enumerate(args.models)]
    options = [f"--models-memory={args.memory}", "--port=0", "--json", *args.serve]
    command = [sys.executable, "-m", "slipstream", "serve", *named, *options]
    with subprocess.Popen(command, env=with_source(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as made:  # fmt: skip
        assert made.stdout is not None
        banner = json.loads(made.stdout.readline())
        if "url" not in banner:
            raise SystemExit(f"the server did not start: {banner}")
        try:
            yield banner["url"].removesuffix("/v1"), psutil.Process(made.pid)
        finally:
            made.terminate()


def engines(process: psutil.Process) -> list[psutil.Process]:
    """Engines, and on Linux the process that forks them."""
    found = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "core_process" in " ".join(child.cmdline()):
                found.append(child)
    return found


def ask(http: httpx.Client, name: str) -> tuple[float, httpx.Response]:
    body = {"model": name, "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
    begin = time.perf_counter()
    answer = http.post("/v1/completions", json=body)
    return time.perf_counter() - begin, answer


def swap(args: argparse.Namespace, http: httpx.Client, process: psutil.Process) -> dict[str, Any]:
    names = [f"m{i}" for i in range(len(args.models))]
    first = {name: round(ask(http, name)[0], 3) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    loads: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for number in range(args.swaps):
        name = names[number % len(names)]
        before = cpu_seconds(process)
        took, answer = ask(http, name)
        cpu[name].append(cpu_seconds(process) - before)
        assert answer.status_code == 200, answer.text
        header = answer.headers.get("x-slipstream-model-load-ms")
        assert header is not None, "both models fit: lower --memory"
        seconds[name].append(took)
        loads[name].append(int(header) / 1000)
    return {
        "first_load_s": first,
        "swap_s": {n: {"median": median(s), "best": min(s), "worst": max(s)} for n, s in seconds.items()},
        "of_these_load_s": {n: median(s) for n, s in loads.items()},
        "cpu_s": {n: median(s) for n, s in cpu.items()},  # of all processes: what neighbours don't change
    }  # fmt: skip


def cpu_seconds(process: psutil.Process) -> float:
    """Time of the processor that the server and its engines have used."""
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def resident(process: psutil.Process) -> tuple[int, int]:
    """Bytes of the engines' own memory, and what one look at each after the other adds up to.

    Between two looks a model can leave one process and another come into the next, which counts
    both. So each process is looked at twice, and its smaller number counts: of one that changes one
    way, no more than it held between the two rounds."""
    there = engines(process)
    first, second = (
        {engine.pid: _anonymous(engine.pid) for engine in order} for order in (there, there)
    )
    return sum(min(first[pid], second[pid]) for pid in first), sum(first.values())


def _anonymous(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        status = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")
        return int(status.split("Pss_Anon:")[1].split()[0]) * 1024  # forks share
    return 0


def at_random(
    args: argparse.Namespace, http: httpx.Client, process: psutil.Process
) -> dict[str, Any]:
    names = [f"m{i}" for i in range(len(args.models))]
    rng, peak, peak_once, done = random.Random(0), 0, 0, threading.Event()
    num_kills, lost = 0, list[str]()

    def watch() -> None:
        nonlocal peak, peak_once
        while not done.wait(0.1):
            found, once = resident(process)
            peak, peak_once = max(peak, found), max(peak_once, once)

    def one(job: tuple[int, str]) -> float:
        nonlocal num_kills
        number, name = job
        if number % args.kill_every == args.kill_every - 1 and (there := engines(process)):
            with contextlib.suppress(psutil.Error):
                there[number % len(there)].kill()
                num_kills += 1
        took, answer = ask(http, name)
        if answer.status_code != 200:
            lost.append(answer.text[:300])
        return took

    watching = threading.Thread(target=watch)
    watching.start()
    begin = time.perf_counter()
    jobs = [(number, rng.choice(names)) for number in range(args.requests)]
    with ThreadPoolExecutor(args.clients) as pool:
        took = sorted(pool.map(one, jobs))
    seconds = time.perf_counter() - begin
    done.set()
    watching.join()
    counts = http.get("/metrics").text.splitlines()
    loads = sum(
        float(c.split()[-1]) for c in counts if c.startswith("slipstream:model_loads_total")
    )
    return {
        "requests": args.requests,
        "lost": len(lost),
        "first_lost": lost[:3],
        "kills": num_kills,
        "loads": loads,
        "seconds": round(seconds, 1),
        "answer_s": {"p50": took[len(took) // 2], "p99": took[int(0.99 * len(took))]},
        "peak_engines_mib": round(peak / 2**20),
        "peak_of_one_look_mib": round(peak_once / 2**20),
    }


def gaps(address: str, max_tokens: int, until: float) -> list[tuple[float, float]]:
    """Streams of the first model, one after the other: (when, seconds) of the gaps between tokens.
    Read by hand, since a client's library takes as long for a line as a GPU for its token."""
    found = []
    body = {"model": "m0", "prompt": "Once", "max_tokens": max_tokens, "stream": True}
    raw = json.dumps({**body, "ignore_eos": True})
    while time.perf_counter() < until:
        line = HTTPConnection(address, timeout=PATIENCE_S)
        line.request("POST", "/v1/completions", raw, {"content-type": "application/json"})
        answer, last = line.getresponse(), None
        assert answer.status == 200, answer.read()
        while chunk := answer.readline():
            if chunk.startswith(b"data: {"):
                now = time.perf_counter()
                if last is not None:
                    found.append((now, now - last))
                last = now
        line.close()
    return found


def _what(swaps: list[dict[str, Any]], begin: float, end: float) -> str:
    """Activity of the other models between two times, in words."""
    for swap in swaps:
        loaded = swap["at"] + int(swap["load_ms"] or 0) / 1000
        if begin < loaded and end > swap["at"]:
            return "while a model was loaded"
        if begin < swap["at"] + swap["s"] and end > loaded:
            return "while it answered"
    return "at other times"


def spread(found: list[tuple[float, float]]) -> dict[str, float]:
    """Milliseconds of the gaps by share, and their number."""
    sorted_ = sorted(gap for _, gap in found)
    quantiles = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "worst": 1.0}
    at_ = {n: sorted_[min(len(found) - 1, int(q * len(found)))] for n, q in quantiles.items()}
    return {name: round(1000 * value, 2) for name, value in at_.items()} | {"tokens": len(found)}


def streams(
    args: argparse.Namespace, http: httpx.Client, process: psutil.Process
) -> dict[str, Any]:
    """Alone and next to swaps in turns. Each model was loaded once before."""
    names = [f"m{i}" for i in range(len(args.models))]
    first = {name: round(ask(http, name)[0], 3) for name in [*names, names[0]]}
    address = f"{http.base_url.host}:{http.base_url.port}"
    found: dict[str, list[tuple[float, float]]] = {"alone": [], "next to swaps": []}
    swaps: list[dict[str, Any]] = []
    warm = ("warm",) if args.warm_up else ()
    for how in (*warm, *("alone", "next to swaps") * args.turns):
        begin = time.perf_counter()
        until = begin + (args.warm_up if how == "warm" else args.seconds)
        with ThreadPoolExecutor(args.streams) as pool:
            running = [
                pool.submit(gaps, address, args.max_tokens, until) for _ in range(args.streams)
            ]
            while how == "next to swaps" and (at := time.perf_counter()) < until - args.swap_every:
                name = names[1 + len(swaps) % (len(names) - 1)]
                took, answer = ask(http, name)
                assert answer.status_code == 200, answer.text
                load_ms = answer.headers.get("x-slipstream-model-load-ms")
                swaps.append({"at": at, "model": name, "s": round(took, 3), "load_ms": load_ms})
                time.sleep(max(0.0, at + args.swap_every - time.perf_counter()))
            of_turn = [gap for one in running for gap in one.result()]
            found.setdefault(how, []).extend(of_turn)
        print(how, spread(of_turn), file=sys.stderr, flush=True)  # should the run be cut off
    report: dict[str, Any] = {"first_load_s": first}
    report |= {how: spread(of) for how, of in found.items()}
    report["p99 ratio"] = round(report["next to swaps"]["p99"] / report["alone"]["p99"], 3)
    late = Counter(
        _what(swaps, when - gap, when)
        for when, gap in found["next to swaps"]
        if 1000 * gap > report["alone"]["p99"]
    )
    report["later than the p99 alone"] = dict(late)
    report["swaps"] = [{k: v for k, v in swap.items() if k != "at"} for swap in swaps]
    return report


def run(args: argparse.Namespace, save: Any) -> None:
    part = {"swap": swap, "random": at_random, "streams": streams}[args.part]
    limits = httpx.Limits(max_connections=None)
    with (
        server(args) as (url, process),
        httpx.Client(base_url=url, timeout=PATIENCE_S, limits=limits) as http,
    ):
        found = part(args, http, process)
    found |= {"load_average": os.getloadavg()[0]}  # wall times are the neighbours' where it is high
    found |= {"models": [Path(model).name for model in args.models], "memory": args.memory}
    print(json.dumps(found, indent=1))
    save(**{args.part: found})
    assert not found.get("lost"), "requests were lost"
