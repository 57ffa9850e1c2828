"""What soak.py and fuzz_server.py share: a tiny model's server, processes of clients, and a record that is written as it goes.

Nothing of it is lost when a run is stopped.

A script gives `users(number, quota, args, address, tally)`, a coroutine that runs in each process of clients. What it counts in
`tally` comes here each second.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import common
import httptools
import httpx
import uvloop

from slipstream.bench.report import print_table
from slipstream.plan.hardware import available_cores

ROOT = Path(__file__).parents[1]
SAMPLES = 400
"""Of memory, in the record. With more of them every second one is left out, and they are taken half as often."""

TEMPLATE = """{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{{ (m.tool_calls or []) | tojson }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Tally:
    """What a process of clients has counted."""

    def __init__(self, stop: Any) -> None:
        self._stop, self.signalled = stop, False
        self.counts: Counter[str] = Counter()
        self.found: list[dict[str, Any]] = []  # examples of what is wrong

    @property
    def is_over(self) -> bool:
        return self.signalled or bool(self._stop.is_set())


def add_arguments(parser: Any) -> None:
    cores = available_cores()
    parser.add_argument("--requests", type=int, default=1_000_000, help="(default: 1,000,000)")
    parser.add_argument("--seconds", type=float, default=3600, help="end after so many, whatever is left (default: 3600)")
    parser.add_argument("--api-servers", type=int, default=max(2, cores // 4), help="front ends (default: a core in four)")
    parser.add_argument("--clients", type=int, default=max(1, cores // 3), help="processes that send (default: one in three)")
    parser.add_argument("--concurrency", type=int, default=48, help="users in each of them (default: 48)")
    parser.add_argument("--kill-every", type=float, default=0, metavar="S", help="kill -9 of the engine (default: never)")
    parser.add_argument("--most-growth", type=float, default=0.1, help="of a process's memory, in the second half (0.1)")
    parser.add_argument("--seed", type=int, default=0)


@contextmanager
def tiny_server(args: Any, log: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server of a tiny random model, and its URL."""
    sys.path.insert(0, str(ROOT))
    from tests import tiny_models

    with tempfile.TemporaryDirectory() as folder:
        tiny_models.build_with_tokenizer(Path(folder), max_position_embeddings=1024)
        config = Path(folder) / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
        command = [sys.executable, "-m", "slipstream", "serve", folder, "--port=0", "--json", "--served-model-name=tiny"]
        command += ["--device=cpu", "--dtype=float32", "--max-num-seqs=64", "--kv-cache-bytes=8MiB", "--num-threads=1"]
        command += [f"--api-servers={args.api_servers}", "--body-timeout=2", "--tool-call-parser=hermes"]
        # The log goes to a file: a pipe that nobody reads would stop the server. A group of its own: Ctrl-C is for us.
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=common.with_source(), start_new_session=True
        )
        try:
            yield server, json.loads(server.stdout.readline())["url"].removesuffix("/v1")
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def run(
    doc: str | None,
    name: str,
    args: Any,
    users: Callable[[int, int, Any, tuple[str, int], Tally], Awaitable[None]],
    is_wrong: Callable[[str], bool],
    warm: tuple[str, dict[str, Any]],
) -> None:
    """Start the server, let the clients loose until all is sent, the time is up or somebody stops us, and say what was found.
    `is_wrong` tells the counts that must be 0. `warm` is asked for 300 times before memory is looked at."""
    stopped: list[int] = []
    with tempfile.TemporaryFile("w+") as log:
        with tiny_server(args, log) as (server, url):
            address = (str(urlsplit(url).hostname), int(urlsplit(url).port or 80))
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda number, frame: stopped.append(number))
            with httpx.Client(base_url=url, timeout=60) as http:
                for _ in range(300):
                    http.post(warm[0], json=warm[1]).raise_for_status()
            result = _watch(name, args, users, is_wrong, server.pid, address, stopped)
            time.sleep(1)
            with httpx.Client(base_url=url, timeout=60) as http:
                result["left_after_1_s"] = gauges(http.get("/metrics").text) | {"health": http.get("/health").status_code}
        result["exit_code"] = server.returncode
        log.seek(0)
        traces = [text[:4000] for text in log.read().split("Traceback")[1:6]]
    idle = {**result["left_after_1_s"], "health": 0} == dict.fromkeys(result["left_after_1_s"], 0)
    grown = {k: v for k, v in growth(result["memory"]).items() if v > args.most_growth}
    result["passed"] = idle and not result["wrong"] and not grown and result["exit_code"] == 0
    result["stopped_by_signal"] = bool(stopped)
    rows = [(key, f"{value:,}") for key, value in sorted(result["outcomes"].items())]
    rows += [(key, json.dumps(value)[:200]) for key, value in result.items() if key not in ("memory", "outcomes", "examples")]
    print_table(f"{name}: " + ("passed" if result["passed"] else "FAILED"), ("", ""), rows)
    for example in [*result["examples"][:40], *traces]:
        print(example if isinstance(example, str) else json.dumps(example, indent=1))
    common.save(args.output, name, settings=vars(args) | {"output": str(args.output)}, results=result)
    sys.exit(0 if result["passed"] else 1)


def _watch(
    name: str, args: Any, users: Any, is_wrong: Callable[[str], bool], pid: int, address: tuple[str, int], stopped: list[int]
) -> dict[str, Any]:
    fork = multiprocessing.get_context("fork")  # the clients need nothing but what is imported here
    told, stop = fork.Queue(), fork.Event()
    quota = -(-args.requests // args.clients)
    clients = [
        fork.Process(target=_clients, args=(number, quota, args, users, address, told, stop), daemon=True)
        for number in range(args.clients)
    ]
    for client in clients:
        client.start()
    begin = last_kill = time.monotonic()
    counts: list[Counter[str]] = [Counter() for _ in clients]
    cpu_of_clients = [0.0] * len(clients)
    result: dict[str, Any] = {"examples": []}
    samples, every, kills, written, cpu = [{"seconds": 0.0, **memory(pid)}], 1.0, 0, begin, Cpu(pid)
    while any(client.is_alive() for client in clients) or not told.empty():
        with suppress(queue.Empty):
            number, found, examples, cpu_of_clients[number] = told.get(timeout=0.2)
            counts[number] = Counter(found)
            result["examples"] = (result["examples"] + examples)[:100]
        now = time.monotonic()
        if stopped or now - begin > args.seconds:
            stop.set()
        elif args.kill_every and now - last_kill > args.kill_every:
            samples.append({"seconds": round(now - begin, 1), **memory(pid)})  # the engine's last words
            for process in (p for p in descendants(pid) if name_of(p) == "engine"):
                cpu.used()
                os.kill(process, signal.SIGKILL)
                kills += 1
            last_kill = now
        if now - begin > samples[-1]["seconds"] + every:
            samples.append({"seconds": round(now - begin, 1), **memory(pid)})
            if len(samples) > SAMPLES:
                samples, every = samples[::2], 2 * every
        if now - written > 5 or not any(client.is_alive() for client in clients):
            written, total = now, sum(counts, Counter())
            sent, seconds = sum(total.values()), now - begin
            result |= {
                "sent": sent,
                "seconds": round(seconds, 1),
                "requests_per_s": round(sent / seconds, 1),
                "kills": kills,
                "wrong": sum(n for key, n in total.items() if is_wrong(key)),
                "outcomes": dict(sorted(total.items())),
                "cpu_seconds": cpu.used() | {"clients": round(sum(cpu_of_clients), 1)},
                "memory_growth": growth(samples),
                "memory": samples,
            }
            print(f"{sent:,} sent, {sent / seconds:,.0f}/s, {result['wrong']} wrong, {kills} kills, {samples[-1]}", flush=True)
            args.output.parent.mkdir(parents=True, exist_ok=True)
            part = args.output.with_suffix(".part")
            part.write_text(json.dumps(result | {"finished": False}, indent=1))
            part.replace(args.output.with_suffix(".progress.json"))
    for client in clients:
        client.join()
    if failed := [client.exitcode for client in clients if client.exitcode]:
        raise SystemExit(f"{name}: clients ended with {failed}")
    args.output.with_suffix(".progress.json").unlink(missing_ok=True)
    return result


def _clients(number: int, quota: int, args: Any, users: Any, address: tuple[str, int], told: Any, stop: Any) -> None:
    tally = Tally(stop)
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # of our whole process group
        signal.signal(signal_number, lambda number, frame: setattr(tally, "signalled", True))

    def tell() -> None:
        told.put((number, dict(tally.counts), tally.found, time.process_time()))
        tally.found = []

    async def main() -> None:
        async def telling() -> None:
            while True:
                await asyncio.sleep(1)
                tell()

        teller = asyncio.create_task(telling())
        await users(number, quota, args, address, tally)
        teller.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    tell()
    told.close()
    told.join_thread()


# --- The server's processes -----------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += descendants(int(child))
    return found


def name_of(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return "engine" if b"core_process" in words else "front end" if b"frontend.process" in words else "supervisor"
    return "gone"


def _named(pid: int) -> Iterator[tuple[str, int]]:
    seen: Counter[str] = Counter()
    for process in descendants(pid):
        name = name_of(process)
        yield f"{name} {seen[name]}", process
        seen[name] += 1


def memory(pid: int) -> dict[str, float]:
    """Resident MiB of each process."""
    found: dict[str, float] = {}
    for name, process in _named(pid):
        with suppress(OSError):
            pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
            found[name] = round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
    return found


class Cpu:
    """Processor seconds of the server's processes since this was made, by kind; those of one that died as of the last look."""

    def __init__(self, pid: int) -> None:
        self._pid, self._seconds = pid, dict[int, tuple[str, float]]()
        self.used()
        self._before = {process: seconds for process, (_, seconds) in self._seconds.items()}

    def used(self) -> dict[str, float]:
        for name, process in _named(self._pid):
            self._seconds[process] = name.rpartition(" ")[0], cpu_of(process)
        found: Counter[str] = Counter()
        before = getattr(self, "_before", {})
        for process, (kind, seconds) in self._seconds.items():
            found[kind] += seconds - before.get(process, 0.0)
        return {kind: round(seconds, 1) for kind, seconds in found.items()}


def cpu_of(process: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def growth(samples: list[dict[str, float]]) -> dict[str, float]:
    """Of each process that nobody kills: how much more it held at most in the last quarter than in the second third."""
    end = samples[-1]["seconds"]
    middle = [s for s in samples if end / 3 <= s["seconds"] <= 2 * end / 3]
    last = [s for s in samples if s["seconds"] >= 3 * end / 4]
    names = [name for name in samples[-1] if name.startswith(("front end", "supervisor"))]
    pairs = {name: ([s[name] for s in middle if name in s], [s[name] for s in last if name in s]) for name in names}
    return {name: round(max(b) / max(a) - 1, 4) for name, (a, b) in pairs.items() if a and b}


def gauges(text: str) -> dict[str, float]:
    return {
        line.split("{")[0].removeprefix("slipstream:"): float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(("slipstream:num_requests_", "slipstream:kv_cache_usage"))
    }


# --- Connections ----------------------------------------------------------------------------------------------------


class Answers:
    """What came back over a connection: whole answers as (status, body), interim ones left out."""

    def __init__(self) -> None:
        self.whole: list[tuple[int, bytes]] = []
        self.parser, self.body, self.any, self.keeps = httptools.HttpResponseParser(self), bytearray(), b"", False

    def on_message_begin(self) -> None:
        self.body = bytearray()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() >= 200:
            self.whole.append((self.parser.get_status_code(), bytes(self.body)))
            self.keeps = self.parser.should_keep_alive()

    def feed(self, data: bytes) -> None:
        self.any = self.any or data
        self.parser.feed_data(data)


def connection() -> socket.socket:
    made = socket.socket()
    made.setblocking(False)
    return made
