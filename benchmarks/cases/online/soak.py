"""A million mixed requests over HTTP against `slipstream serve` with a tiny model, while its engine is killed again and again.

    python benchmarks/online.py --study soak --requests 1000000 --kill-every 300
    python benchmarks/online.py --study soak --requests 1000000 --seconds 520 --servers 12 --kill-every 60     # on 16 cores

Completions and chats, streamed and whole, n up to 3, log-probabilities, stops, seeds, penalties, shared prefixes, token-id
prompts; one in five is left in the middle, one in twenty is a bad request that must be a 400. Every request must end with a
whole answer, a documented error or our own leaving; all else is LOST. A client that is refused while an engine starts again
waits a second and asks again; refusals don't count as requests, but one that is refused for two minutes is LOST.

At the end nothing may run, wait or hold a block. Each server must be healthy, end with 0 and leave no file behind. No process
may hold more open files than at the start, and memory must be flat, as processes.py says.

With `--servers` several servers run side by side, with a model, clients and kills each. The engine of one of them (`--spared`)
is not killed, so that its memory can be judged over the whole run.

The load comes from several processes over connections that are kept. `--seconds` bounds the run. SOAK.progress.json beside the
record is written every five seconds; Ctrl-C or SIGTERM ends the run early and writes the record.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

import hammer
import httptools

SYSTEM = "You are a helpful assistant. " * 8
WORDS = ["hello", "the", "tower", "inn", "é", "数"]
CHAT = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
PATIENCE_S = 120
"""An answer that has not come by then is lost."""

EXCHANGES = 50
"""Requests over one connection."""

NO_LINGER = struct.pack("ii", 1, 0)


def make_request(rng: random.Random) -> tuple[str, dict, str]:
    """(path, body, what to do: whole, stream, leave or bad)."""
    body: dict = {
        "model": "tiny",
        "max_tokens": rng.randint(1, 8),
        "temperature": rng.choice([0, 0.7, 1.5]),
    }
    words = " ".join(rng.choices(WORDS, k=rng.randint(1, 30)))
    if rng.random() < 0.5:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": words}]
        if rng.random() < 0.6:
            body["messages"].insert(0, {"role": "system", "content": SYSTEM})
    else:
        path = "/v1/completions"
        body["prompt"] = (
            rng.choices(range(4, 260), k=rng.randint(1, 60)) if rng.random() < 0.3 else words
        )
    for name, share, make in (
        ("n", 0.1, lambda: rng.randint(2, 3)),
        ("seed", 0.3, lambda: rng.randrange(1000)),
        ("stop", 0.2, lambda: rng.choice(["a", "the", ["x", "yz"]])),
        ("top_p", 0.2, lambda: rng.choice([0.5, 0.9])),
        ("top_k", 0.2, lambda: rng.choice([1, 40])),
        ("presence_penalty", 0.1, lambda: 0.5),
        ("repetition_penalty", 0.1, lambda: 1.2),
        ("ignore_eos", 0.3, lambda: True),
    ):
        if rng.random() < share:
            body[name] = make()
    if rng.random() < 0.15:
        body.update({"logprobs": 2} if "prompt" in body else {"logprobs": True, "top_logprobs": 2})
    fate = rng.random()
    if fate < 0.05:
        bad = [
            {"temperature": -1},
            {"no_such_field": 1},
            {"max_tokens": 10**6},
            {"n": 0},
            {"stop": 5},
        ]
        body.update(rng.choice(bad))
        return path, body, "bad"
    if fate < 0.25:
        return path, body | {"stream": True, "max_tokens": 100, "ignore_eos": True}, "leave"
    if fate < 0.65:
        return path, body | {"stream": True, "stream_options": {"include_usage": True}}, "stream"
    return path, body, "whole"


def judge(status: int, body: bytes, kind: str, choices: int) -> str:
    """Outcome of a request."""
    if (status == 503 and b'"engine_dead"' in body) or status == 429:
        return f"refused with {status}"
    if kind == "bad":
        return "bad request, 400" if status == 400 else f"LOST {status} {body[:200]!r}"
    if status != 200:
        return f"LOST {status} {body[:200]!r}"
    if not body.startswith(b"data: "):
        return (
            "answered whole"
            if len(json.loads(body)["choices"]) == choices
            else f"LOST {body[:200]!r}"
        )
    last = body.rstrip(b"\n").rpartition(b"\n\n")[2]
    if last == b"data: [DONE]" and b'"error"' not in body:
        return "answered by a stream"
    return (
        "ended by an error event" if b'"engine_dead"' in body else f"LOST, ends with {last[:200]!r}"
    )


async def user(
    rng: random.Random, quota: list[int], address: tuple[str, int], tally: hammer.Tally
) -> None:
    loop = asyncio.get_running_loop()
    sock: socket.socket | None = None
    left = refused = 0
    while quota[0] > 0 and not tally.is_over:
        quota[0] -= 1
        path, body, kind = make_request(rng)
        data = json.dumps(body).encode()
        data = (
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            % (path.encode(), len(data))
            + data
        )
        if sock is None:
            sock, left = hammer.connection(), EXCHANGES
        fresh, answers = left == EXCHANGES, hammer.Answers()
        left -= 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                if fresh:
                    await loop.sock_connect(sock, address)
                await loop.sock_sendall(sock, data)
                enough = rng.choice([0, 1, 300, 1000]) if kind == "leave" else None
                count = 0
                while not answers.whole and (enough is None or count < enough):
                    got = await loop.sock_recv(sock, 65536)
                    if not got:
                        break
                    count += len(got)
                    answers.feed(got)
            if answers.whole:
                what = judge(*answers.whole[0], kind, body.get("n", 1))
            else:
                what = (
                    "left"
                    if kind == "leave" and count >= enough
                    else f"LOST, closed after {count} bytes ({kind})"
                )
        except TimeoutError:
            what = f"LOST, nothing in {PATIENCE_S} s ({kind})"
        except OSError as error:
            what = f"LOST, {type(error).__name__} ({kind})"
        except httptools.HttpParserError as error:
            what = f"LOST, unreadable: {error} ({kind})"
        if what.startswith("refused"):
            tally.refused[what] += 1
            refused += 1
            if refused >= PATIENCE_S:  # a second each
                tally.counts[f"LOST, refused {refused} times one after another"] += 1
                refused = 0
            else:
                quota[0] += 1
        else:
            tally.counts[what] += 1
            refused = 0
        if not answers.keeps or not left:
            if rng.random() < 0.5:
                with suppress(OSError):
                    sock.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER
                    )  # half of those that leave reset it
            sock.close()
            sock = None
        if what.startswith("refused"):
            await asyncio.sleep(1)  # as it is told
    if sock is not None:
        sock.close()


async def users(
    number: int, quota: int, args, address: tuple[str, int], tally: hammer.Tally
) -> None:
    rngs = [random.Random(f"{args.seed} {number} {i}") for i in range(args.concurrency)]
    shared = [quota]
    await asyncio.gather(*(user(rng, shared, address, tally) for rng in rngs))


RECORD = "soak"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    hammer.add_arguments(parser)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    hammer.run(
        __doc__,
        "soak",
        args,
        users,
        lambda what: what.startswith("LOST"),
        ("/v1/chat/completions", CHAT),
    )
