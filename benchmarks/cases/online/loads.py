"""Loads over HTTP against one server: throughput, first tokens, time a token, worst gaps.

    python benchmarks/online.py --study loads --quantization fp8 --kv-cache-dtype fp8 [--loads poisson-40,1024,…]

The server has a model's true shape, random weights and a made vocabulary; greedy answers of full length, streamed to
`slipstream bench serve` on the same machine. The first load runs right after `/ready`. `engine.py` gives the same lengths
in process (`--loads sharegptx2000`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
from cases.features.grammar import made_tokenizer

from slipstream.bench.report import print_table
from slipstream.spec.description import read_spec

SHAREGPT = ("--workload", "lengths", "--lengths-file", str(common.SHAREGPT))
FIXED = ("--workload", "fixed", "--input-len", "512", "--output-len", "128")
LOADS = {
    "poisson-40": (*SHAREGPT, "--num-requests", "800", "--request-rate", "40"),
    "poisson-90": (*SHAREGPT, "--num-requests", "1200", "--request-rate", "90"),
    "1024": (*SHAREGPT, "--num-requests", "2000", "--concurrency", "1024"),
    "256": (*FIXED, "--num-requests", "768", "--concurrency", "256"),
    "64": (*SHAREGPT, "--num-requests", "256", "--concurrency", "64"),
    "long-prompts": ("--workload", "lengths", "--num-requests", "400", "--request-rate", "20"),
}
LONG_PROMPTS = [[100, 250]] * 19 + [[7900, 50]]
"""Lengths of `long-prompts`, a twentieth: among answers that are written, prompts that take several steps."""


@contextlib.contextmanager
def served(
    words: list[str],
    log: Path,
    program: Sequence[str] = ("-m", "slipstream"),
    *,
    ready: str = "/ready",
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, float]]:
    """A server's address, and seconds until `ready` answered. `program` is what takes the words `serve …`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begin, url = time.monotonic(), f"http://127.0.0.1:{port}"
    command = [sys.executable, *program, "serve", *words, "--port", str(port)]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=env or common.with_source()
        )
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url + ready, timeout=2).close()
                break
            if process.poll() is not None or time.monotonic() - begin > 300:
                raise SystemExit(log.read_text())
            time.sleep(0.2)
        yield url, time.monotonic() - begin
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


RECORD = "online"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--api-servers", default="auto")
    parser.add_argument("--max-num-seqs", default="1024")
    parser.add_argument("--clients", default="6")
    parser.add_argument("--target-itl-ms")
    parser.add_argument("--loads", default="poisson-40,1024,256,64,poisson-40,poisson-90")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    folder, config = tempfile.TemporaryDirectory(), common.CONFIGS / args.config
    vocab = read_spec(config).spec.vocab_size
    made_tokenizer(Path(folder.name), vocab)
    words = [
        str(config),
        "--tokenizer",
        folder.name,
        "--load-format",
        "dummy",
        "--no-enable-prefix-caching",
    ]
    words += [
        "--kv-cache-dtype",
        args.kv_cache_dtype,
        "--max-num-seqs",
        args.max_num_seqs,
        "--api-servers",
        args.api_servers,
    ]
    words += ["--quantization", args.quantization] if args.quantization else []
    words += ["--target-itl-ms", args.target_itl_ms] if args.target_itl_ms else []
    lengths = Path(folder.name) / "lengths.json"
    lengths.write_text(json.dumps({"lengths": 20 * LONG_PROMPTS}))
    loads = {**LOADS, "long-prompts": (*LOADS["long-prompts"], "--lengths-file", str(lengths))}
    rows: list[dict[str, Any]] = []
    with served(words, Path(folder.name) / "log") as (url, ready_s):
        print(f"ready after {ready_s:.1f} s", flush=True)
        for name in args.loads.split(","):
            given = [
                "bench",
                "serve",
                "--url",
                url,
                "--vocab-size",
                str(vocab),
                "--clients",
                args.clients,
                *loads[name],
            ]
            result = common.slipstream(*given)
            row = {
                "load": name,
                **{key: result[key] for key in ("workload", "arrivals", "results", "clients")},
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
            settings = {key: value for key, value in vars(args).items() if key != "output"}
            save(settings=settings, ready_s=ready_s, rows=rows)
    columns = (
        "load",
        "tok/s",
        *(f"{name} p50 · p99, ms" for name in ("TTFT", "TPOT", "ITL", "worst gap")),
    )
    print_table("online", columns, map(shown, rows))


def shown(row: dict[str, Any]) -> tuple[str, ...]:
    results = row["results"]
    times = (results[key] for key in ("ttft_s", "tpot_s", "itl_s", "worst_gap_s"))
    both = (f"{time['p50'] * 1e3:.1f} · {time['p99'] * 1e3:.1f}" for time in times)
    return (row["load"], f"{results['output_throughput']:,.0f}", *both)
