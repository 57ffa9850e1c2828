"""What idle connections and slow readers cost the others: the same load alone, and beside them, in turns.

    python benchmarks/online.py --study connections --config llama-3-8b --quantization fp8 --kv-cache-dtype fp8 [--idle 5000]

The others are `slipstream bench serve` with so many streams at a time. Beside them stand connections that have asked once and
stay open, and answers of `--slow-tokens` tokens whose readers take one byte a second, from a small buffer. Alone, the load has
the slow ones' streams as well, so that the engine's batch is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import socket
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
from cases.features_grammar import made_tokenizer
from cases.online_loads import served

from slipstream.bench.report import print_table
from slipstream.spec.description import read_spec

PERCENTILES = (
    ("ttft_s", "p50"),
    *((name, "p99") for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s")),
)


def idle(address: tuple[str, int], count: int) -> list[socket.socket]:
    """Connections that were answered once."""
    made = []
    for _ in range(count):
        made.append(socket.create_connection(address))
        made[-1].sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        made[-1].recv(4096)
    return made


def streams(address: tuple[str, int], count: int, num_tokens: int) -> list[socket.socket]:
    """Streamed answers whose readers have little room."""
    asked = {
        "prompt": [5, 6, 7],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "model": "m",
    }
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    made = []
    for _ in range(count):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(address)
        one.sendall(head.encode() + body)
        made.append(one)
    return made


@contextlib.contextmanager
def crowd(
    address: tuple[str, int], num_idle: int, num_slow: int, num_tokens: int
) -> Iterator[dict[str, int]]:
    """Idle connections and slow readers, while the block runs. What it yields says afterwards how many were still open."""
    waiting, slow, over = (
        idle(address, num_idle),
        streams(address, num_slow, num_tokens),
        threading.Event(),
    )
    found = {"idle": 0, "slow": 0}

    def read() -> None:
        while not over.wait(1.0):
            for one in slow:
                with contextlib.suppress(OSError):
                    one.setblocking(False)
                    one.recv(1)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield found
    finally:
        over.set()
        reader.join()
        for kind, sockets in (("idle", waiting), ("slow", slow)):
            for one in sockets:
                found[kind] += is_open(one)
                one.close()


def is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return bool(one.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


RECORD = "connections"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--idle", type=int, default=5000)
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--slow-tokens", type=int, default=1500)
    parser.add_argument("--streams", type=int, default=1800)
    parser.add_argument("--num-requests", type=int, default=5400)
    parser.add_argument("--input-len", default="32")
    parser.add_argument("--output-len", default="64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", default="6")
    parser.add_argument("--api-servers", default="auto")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    folder, config = tempfile.TemporaryDirectory(), common.CONFIGS / args.config
    vocab = read_spec(config).spec.vocab_size
    made_tokenizer(Path(folder.name), vocab)
    words = [
        str(config),
        "--tokenizer",
        folder.name,
        "--load-format",
        "dummy",
        "--served-model-name",
        "m",
    ]
    words += [
        "--max-num-seqs",
        str(args.streams + args.slow),
        "--max-model-len",
        "2048",
        "--api-servers",
        args.api_servers,
    ]
    words += ["--kv-cache-dtype", args.kv_cache_dtype]
    words += ["--quantization", args.quantization] if args.quantization else []
    load = ["--workload", "fixed", "--input-len", args.input_len, "--output-len", args.output_len]
    load += [
        "--num-requests",
        str(args.num_requests),
        "--clients",
        args.clients,
        "--vocab-size",
        str(vocab),
    ]
    rounds: list[dict[str, Any]] = []
    with served(words, Path(folder.name) / "log") as (url, _):
        parts = urllib.parse.urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        address = parts.hostname, parts.port

        def others(num_streams: int) -> dict[str, Any]:
            words = ("bench", "serve", "--url", url, *load, "--concurrency", str(num_streams))
            found = common.slipstream(*words, may_fail=True)[
                "results"
            ]  # an answer of end tokens alone has no text
            return {f"{name} {point}": found[name][point] for name, point in PERCENTILES} | {
                "failed": found["num_failed"]
            }

        others(args.streams)  # warms up
        for _ in range(args.rounds):
            alone = others(args.streams + args.slow)
            with crowd(address, args.idle, args.slow, args.slow_tokens) as still_open:
                beside = others(args.streams)
            rounds.append({"alone": alone, "beside": beside, "still_open": still_open})
            print(json.dumps(rounds[-1]), flush=True)
            time.sleep(2)
    names = [f"{name} {point}" for name, point in PERCENTILES]
    ratios = {
        name: common.median([r["beside"][name] / r["alone"][name] for r in rounds])
        for name in names
    }
    shown = [
        (
            name,
            *(
                f"{common.median([r[way][name] for r in rounds]) * 1e3:.1f}"
                for way in ("alone", "beside")
            ),
            f"{ratio:.3f}",
        )
        for name, ratio in ratios.items()
    ]
    print_table(f"{args.streams} streams", ("", "alone, ms", "beside, ms", "ratio"), shown)
    save(workload=vars(args), rounds=rounds, ratios=ratios)
