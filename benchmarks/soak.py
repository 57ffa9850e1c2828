"""10,000 mixed requests over HTTP against `slipstream serve` with a tiny model: no error, no leaked block, flat memory.

    python benchmarks/soak.py

Completions and chats, streamed and whole, n up to 3, log-probabilities, stops, seeds, penalties, shared prefixes, token-id
prompts; one in five is left in the middle, one in twenty is a bad request that must be a 400. At the end nothing may run,
wait or hold a block, the server must be healthy, and the memory of server and engine must not have grown after the first
third by more than a few per cent.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import common
import httpx

from slipstream.bench.adapters.openai import Splitter
from slipstream.bench.report import print_table

ROOT = Path(__file__).parents[1]
SYSTEM = "You are a helpful assistant. " * 8


def make_request(rng: random.Random) -> tuple[str, dict, str]:
    """(path, body, what to do: whole, stream, leave or bad)."""
    body: dict = {"model": "tiny", "max_tokens": rng.randint(1, 48), "temperature": rng.choice([0, 0.7, 1.5])}
    words = " ".join(rng.choice(["hello", "the", "tower", "inn", "é", "数"]) for _ in range(rng.randint(1, 60)))
    if rng.random() < 0.5:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": words}]
        if rng.random() < 0.6:
            body["messages"].insert(0, {"role": "system", "content": SYSTEM})
    else:
        path = "/v1/completions"
        body["prompt"] = [rng.randrange(4, 260) for _ in range(rng.randint(1, 100))] if rng.random() < 0.3 else words
    for name, share, make in (
        ("n", 0.15, lambda: rng.randint(2, 3)),
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
        bad = [{"temperature": -1}, {"no_such_field": 1}, {"max_tokens": 10**6}, {"n": 0}, {"stop": 5}]
        body.update(rng.choice(bad))
        return path, body, "bad"
    if fate < 0.25:
        return path, body | {"stream": True, "max_tokens": 400, "ignore_eos": True}, "leave"
    if fate < 0.65:
        return path, body | {"stream": True, "stream_options": {"include_usage": True}}, "stream"
    return path, body, "whole"


async def send(http: httpx.AsyncClient, rng: random.Random, outcome: Counter) -> None:
    path, body, kind = make_request(rng)
    try:
        if kind in ("whole", "bad"):
            answer = await http.post(path, json=body)
            good = answer.status_code == (400 if kind == "bad" else 200)
            if good and kind == "whole":
                found = answer.json()
                good = len(found["choices"]) == body.get("n", 1) and found["usage"]["completion_tokens"] >= 0
            outcome[kind if good else f"ERROR {kind}: {answer.status_code} {answer.text[:200]}"] += 1
            return
        async with http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                outcome[f"ERROR {kind}: {answer.status_code} {(await answer.aread())[:200]!r}"] += 1
                return
            left_after = rng.randint(0, 20) if kind == "leave" else None
            seen, last, splitter = 0, b"", Splitter()
            async for last in (event async for chunk in answer.aiter_bytes() for event in splitter.feed(chunk)):
                seen += 1
                if b'"error"' in last[:40]:
                    outcome[f"ERROR {kind}: {last[:200]!r}"] += 1
                    return
                if left_after is not None and seen > left_after:
                    break
            whole = kind == "leave" or last == b"[DONE]"
            outcome[kind if whole else f"ERROR {kind}: ended with {last[:200]!r}"] += 1
    except Exception as error:
        outcome[f"ERROR {kind}: {type(error).__name__}: {error}"] += 1


def memory(pid: int) -> dict[str, int]:
    """Resident bytes of the server and of its engine process (the child that Python runs)."""
    found = {"server": _resident(pid)}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"core_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                found["engine"] = _resident(int(child))
    return found


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def gauges(text: str) -> dict[str, float]:
    return {
        line.split("{")[0].removeprefix("slipstream:"): float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(("slipstream:num_requests_", "slipstream:kv_cache_usage"))
    }


async def soak(args, url: str, pid: int) -> dict:
    rng, outcome, done = random.Random(args.seed), Counter(), 0
    samples: list[dict] = []
    begin = time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:

        async def user(seed: int) -> None:
            nonlocal done
            mine = random.Random(seed)
            while done < args.num_requests:
                done += 1
                if done % max(1, args.num_requests // 20) == 0:
                    samples.append({"requests": done, "seconds": time.monotonic() - begin, **memory(pid)})
                    print(f"{done:>6} requests, {samples[-1]['seconds']:6.1f} s, errors "
                          f"{sum(n for k, n in outcome.items() if k.startswith('ERROR'))}, "
                          f"server {samples[-1]['server'] / 2**20:.1f} MiB, engine "
                          f"{samples[-1].get('engine', 0) / 2**20:.1f} MiB", flush=True)  # fmt: skip
                await send(http, mine, outcome)

        await asyncio.gather(*(user(rng.randrange(2**32)) for _ in range(args.concurrency)))
        for _ in range(100):
            left = gauges((await http.get("/metrics")).text)
            if not any(left.values()):
                break
            await asyncio.sleep(0.1)
        healthy = (await http.get("/health")).status_code == 200
    third = samples[len(samples) // 3 :]
    growth = {name: third[-1][name] / third[0][name] - 1 for name in ("server", "engine")}
    errors = {k: n for k, n in outcome.items() if k.startswith("ERROR")}
    return {
        "seconds": time.monotonic() - begin,
        "num_requests": sum(outcome.values()),
        "outcomes": {k: n for k, n in outcome.items() if k not in errors},
        "errors": errors,
        "left": left,
        "healthy": healthy,
        "memory": samples,
        "memory_growth_after_the_first_third": growth,
        "passed": not errors and not any(left.values()) and healthy and max(growth.values()) <= args.most_growth,
    }


def main() -> None:
    parser = common.parser(__doc__, "soak")
    parser.add_argument("--num-requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-growth", type=float, default=0.05)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests import tiny_models

    with tempfile.TemporaryDirectory() as folder:
        tiny_models.build_with_tokenizer(Path(folder), max_position_embeddings=1024)
        command = [sys.executable, "-m", "slipstream", "serve", folder, "--port=0", "--json", "--served-model-name=tiny"]
        command += ["--device=cpu", "--dtype=float32", "--max-num-seqs=32", "--kv-cache-bytes=4MiB", "--num-threads=1"]
        # The server's log goes to a file: a pipe that nobody reads would stop it.
        with open(Path(folder) / "log", "w") as log:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            try:
                ready = json.loads(server.stdout.readline())
                result = asyncio.run(soak(args, ready["url"].removesuffix("/v1"), server.pid))
            finally:
                server.send_signal(signal.SIGTERM)
                code = server.wait(60)
        result["exit_code"] = code
        result["passed"] = result["passed"] and code == 0
    rows = [(k, f"{n:,}") for k, n in sorted({**result["outcomes"], **result["errors"]}.items())]
    rows += [(f"left: {name}", f"{value:g}") for name, value in result["left"].items()]
    rows += [(f"memory growth, {k}", f"{v:+.2%}") for k, v in result["memory_growth_after_the_first_third"].items()]
    rows += [("requests/s", f"{result['num_requests'] / result['seconds']:.0f}"), ("exit code", str(code))]
    print_table("soak: " + ("passed" if result["passed"] else "FAILED"), ("", ""), rows)
    common.save(args.output, "soak", settings=vars(args) | {"output": str(args.output)}, results=result)
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
