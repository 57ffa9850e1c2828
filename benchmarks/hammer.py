"""Common code of the studies soak and fuzz: servers of tiny models side by side, processes of
clients for each, and one record.

The record is written as the run goes: nothing of it is lost when a run is stopped.

A script gives `users(number, quota, args, address, tally)`, a coroutine that runs in each process of clients. What it counts in
`tally` comes here each second. Every server has a model (its seed is the server's number), a folder for temporary files,
clients and kills of its own. processes.py says what memory must be to pass.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import common
import httptools
import httpx
import uvloop
from processes import Watch

from slipstream.bench.report import print_table
from slipstream.costs.hardware import available_cores

ROOT = Path(__file__).parents[1]
TEMPLATE = """{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{{ (m.tool_calls or []) | tojson }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Tally:
    """Counts of a process of clients."""

    def __init__(self, stop: Any) -> None:
        self._stop, self.signalled = stop, False
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()  # asked again later, and not counted as requests
        self.found: list[dict[str, Any]] = []  # examples of what is wrong

    @property
    def is_over(self) -> bool:
        return self.signalled or bool(self._stop.is_set())


def add_arguments(parser: Any) -> None:
    cores = available_cores()
    parser.add_argument(
        "--requests",
        type=int,
        default=1_000_000,
        help="of all servers together (default: 1,000,000)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=3600,
        help="end after so many, whatever is left (default: 3600)",
    )
    parser.add_argument(
        "--servers", type=int, default=1, help="side by side, a model each (default: 1)"
    )
    parser.add_argument(
        "--api-servers",
        type=int,
        help="front ends of each server (default: a core in four, at least 2; of several servers 1)",
    )
    parser.add_argument(
        "--clients",
        type=int,
        help="processes that send to each (default: a core in 3; of several servers 1)",
    )
    parser.add_argument(
        "--concurrency", type=int, default=48, help="users in each of them (default: 48)"
    )
    parser.add_argument(
        "--kill-every",
        type=float,
        default=0,
        metavar="S",
        help="kill -9 of each engine (default: never)",
    )
    parser.add_argument(
        "--spared",
        type=int,
        help="servers whose engine is not killed, so that its memory shows (default: 1 of several)",
    )
    parser.add_argument(
        "--most-growth",
        type=float,
        default=0.02,
        help="of a process's memory after the warm-up (0.02)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(cores=cores)


def _fill_in(args: Any) -> None:
    alone = args.servers == 1
    args.api_servers = args.api_servers or (max(2, args.cores // 4) if alone else 1)
    args.clients = args.clients or (max(1, args.cores // 3) if alone else 1)
    args.spared = (0 if alone else 1) if args.spared is None else args.spared


@dataclass
class Server:
    """One server, its clients, and what is known of both."""

    number: int
    process: subprocess.Popen[str]
    log: Any
    scratch: Path
    spared: bool
    url: str = ""
    watch: Any = None
    clients: list[Any] = field(default_factory=list)
    counts: list[Counter[str]] = field(default_factory=list)
    refused: list[Counter[str]] = field(default_factory=list)
    cpu_of_clients: list[float] = field(default_factory=list)
    kills: int = 0
    next_kill_s: float = 0.0
    held: dict[str, float] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 80)

    @property
    def outcomes(self) -> Counter[str]:
        return sum(self.counts, Counter())

    def look(self, seconds: float) -> None:
        self.held = self.watch.look(seconds, sum(self.outcomes.values()))

    def kill(self, seconds: float) -> None:
        self.look(seconds)  # the engine's last words
        for process in self.watch.engines():
            os.kill(process, signal.SIGKILL)
            self.kills += 1

    def report(self, seconds: float, most_growth: float) -> dict[str, Any]:
        return {
            "server": self.number,
            "engine_is_killed": not self.spared,
            "sent": sum(self.outcomes.values()),
            "kills": self.kills,
            "outcomes": dict(sorted(self.outcomes.items())),
            "refused_and_sent_again": dict(sum(self.refused, Counter())),
            "cpu_seconds": {
                kind: round(value, 1) for kind, value in self.watch.cpu_seconds().items()
            },
            **self.left,
            "processes": self.watch.summaries(seconds, most_growth),
        }


@contextmanager
def tiny_server(number: int, args: Any) -> Iterator[Server]:
    """A server of a tiny random model. It is not waited for; at the end it must end by SIGTERM."""
    sys.path.insert(0, str(ROOT))
    from tests.support import tiny_models

    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryFile("w+") as log:
        folder, scratch = Path(made) / "model", Path(made) / "tmp"
        scratch.mkdir()
        tiny_models.build_with_tokenizer(folder, seed=number, max_position_embeddings=1024)
        config = folder / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
        command = [
            sys.executable,
            "-m",
            "slipstream",
            "serve",
            str(folder),
            "--port=0",
            "--json",
            "--served-model-name=tiny",
        ]
        command += [
            "--device=cpu",
            "--dtype=float32",
            "--max-num-seqs=64",
            "--kv-cache-bytes=8MiB",
            "--num-threads=1",
        ]
        command += [
            f"--api-servers={args.api_servers}",
            "--body-timeout=2",
            "--tool-call-parser=hermes",
        ]
        # The log goes to a file: a pipe that nobody reads would stop the server. A group of its own: Ctrl-C is for us.
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=common.with_source() | {"TMPDIR": str(scratch)},
            start_new_session=True,
        )
        server = Server(number, process, log, scratch, spared=number < args.spared)
        try:
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def run(
    doc: str | None,
    name: str,
    args: Any,
    users: Callable[[int, int, Any, tuple[str, int], Tally], Awaitable[None]],
    is_wrong: Callable[[str], bool],
    warm: tuple[str, dict[str, Any]],
) -> None:
    """Start the servers, let the clients loose until all is sent, the time is up or somebody stops us, and say what was found.
    `is_wrong` tells the counts that must be 0. `warm` is asked of each 300 times before memory is looked at."""
    _fill_in(args)
    stopped: list[int] = []
    begin = time.monotonic()
    with ExitStack() as stack:
        servers = [stack.enter_context(tiny_server(number, args)) for number in range(args.servers)]
        for server in servers:
            line = server.process.stdout.readline() if server.process.stdout else ""
            if not line:
                server.log.seek(0)
                raise SystemExit(f"{name}: a server did not start: {server.log.read()[-2000:]}")
            server.url = json.loads(line)["url"].removesuffix("/v1")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: stopped.append(number))
        with ThreadPoolExecutor(args.servers) as pool:
            list(pool.map(lambda server: _warm(server, *warm), servers))
        print(
            f"{len(servers)} servers are ready after {time.monotonic() - begin:.0f} s", flush=True
        )
        result = _watch(name, args, users, is_wrong, servers, stopped)
        time.sleep(1)
        for server in servers:
            _look_at_the_end(server)
        # All end at once; their exit codes and what they left behind are read before their folders go.
        for server in servers:
            server.process.send_signal(signal.SIGTERM)
        for server in servers:
            server.left["exit_code"] = server.process.wait(60)
            server.left["files_left_behind"] = sorted(
                path.name for path in server.scratch.iterdir()
            )
        result["servers"] = [
            server.report(result["seconds"], args.most_growth) for server in servers
        ]
        traces = [text for server in servers for text in _traces(server)][:5]
    _judge(result, args)
    result["stopped_by_signal"] = bool(stopped)
    _show(name, result)
    for example in [*result["examples"][:40], *traces]:
        print(example if isinstance(example, str) else json.dumps(example, indent=1))
    settings = {key: value for key, value in vars(args).items() if key != "cores"} | {
        "output": str(args.output)
    }
    common.save(args.output, name, settings=settings, results=result)
    sys.exit(0 if result["passed"] else 1)


def _warm(server: Server, path: str, body: dict[str, Any]) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for _ in range(300):
            http.post(path, json=body).raise_for_status()


def _look_at_the_end(server: Server) -> None:
    """One second after the last client has gone, or once an engine that was killed before has started again."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        until = time.monotonic() + 60
        while (health := http.get("/health").status_code) != 200 and time.monotonic() < until:
            time.sleep(0.2)
        metrics = http.get("/metrics").text
    server.left["left_after_1_s"] = gauges(metrics) | {"health": health}
    server.left["http_requests_total"] = answers_of(metrics)
    server.left["open_files"] = {"start": server.watch.files_at_start, "end": server.watch.files()}


def _traces(server: Server) -> list[str]:
    server.log.seek(0)
    return [text[:4000] for text in server.log.read().split("Traceback")[1:6]]


def _judge(result: dict[str, Any], args: Any) -> None:
    """`failed` names what a server did not hold to; a run without any has passed."""
    failed = [f"{result['wrong']} wrong outcomes"] if result["wrong"] else []
    if not result["sent"]:
        failed.append("no request was answered")
    for server in result["servers"]:
        where = f"server {server['server']}: "
        left = server["left_after_1_s"]
        if left.get("health") != 200 or any(
            value for key, value in left.items() if key != "health"
        ):
            failed.append(f"{where}after 1 s {left}")
        if server["exit_code"] != 0:
            failed.append(f"{where}exit code {server['exit_code']}")
        if server["files_left_behind"]:
            failed.append(f"{where}left behind {server['files_left_behind']}")
        files = server["open_files"]
        failed += [
            f"{where}{name} has {number} open files, {files['start'][name]} at the start"
            for name, number in files["end"].items()
            if not name.startswith("engine") and number > files["start"].get(name, 0) + 8
        ]
        failed += [
            f"{where}{process['process']} rises by {process['risen_mib']} MiB, {process['allowed_mib']} are allowed"
            for process in server["processes"]
            if process["flat"] is False
        ]
    judged = [
        process
        for server in result["servers"]
        for process in server["processes"]
        if process["flat"] is not None
    ]
    if not judged:
        failed.append("the run was too short to judge memory")
    result["memory"] = {
        "processes_judged": len(judged),
        "not_flat": sum(not process["flat"] for process in judged),
        "most_slope_bytes_per_request": max(
            (process["slope_bytes_per_request"] for process in judged), default=None
        ),
        "resolution_bytes_per_request": max(
            (process["resolution_bytes_per_request"] for process in judged), default=None
        ),
        "start_mib": round(sum(process["start_mib"] for process in judged), 1),
        "end_mib": round(sum(process["end_mib"] for process in judged), 1),
    }
    result["failed"] = failed
    result["passed"] = not failed


def _show(name: str, result: dict[str, Any]) -> None:
    rows = [(key, f"{value:,}") for key, value in sorted(result["outcomes"].items())]
    hidden = ("servers", "outcomes", "examples")
    rows += [(key, json.dumps(value)[:300]) for key, value in result.items() if key not in hidden]
    print_table(f"{name}: " + ("passed" if result["passed"] else "FAILED"), ("", ""), rows)
    print_table(
        "Memory, MiB. The line is drawn after the first third of the run; a leak would be seen from so many bytes/request on",
        (
            "server",
            "process",
            "start",
            "after warm-up",
            "end",
            "line, bytes/request",
            "seen from",
            "risen",
            "allowed",
            "flat",
        ),
        [
            (
                *(
                    str(server["server"]),
                    process["process"],
                    str(process["start_mib"]),
                    str(process["after_warmup_mib"]),
                ),
                *(str(process["end_mib"]), str(process["slope_bytes_per_request"])),
                *(
                    str(process["resolution_bytes_per_request"]),
                    str(process["risen_mib"]),
                    str(process["allowed_mib"]),
                ),
                "yes" if process["flat"] else "NO",
            )
            for server in result["servers"]
            for process in server["processes"]
            if process["flat"] is not None
        ],
    )


def _watch(
    name: str,
    args: Any,
    users: Any,
    is_wrong: Callable[[str], bool],
    servers: list[Server],
    stopped: list[int],
) -> dict[str, Any]:
    fork = multiprocessing.get_context("fork")  # the clients need nothing but what is imported here
    told, stop = fork.Queue(), fork.Event()
    quota = -(-args.requests // (args.servers * args.clients))
    for server in servers:
        server.watch = Watch(server.process.pid)
        server.clients = [
            fork.Process(
                target=_clients,
                args=((server.number, client), quota, args, users, server.address, told, stop),
                daemon=True,
            )
            for client in range(args.clients)
        ]
        server.counts = [Counter() for _ in server.clients]
        server.refused = [Counter() for _ in server.clients]
        server.cpu_of_clients = [0.0] * args.clients
        # Not all at once: their starts take processor time from all.
        server.next_kill_s = args.kill_every * (1 + server.number / args.servers)
    for server in servers:
        for client in server.clients:
            client.start()
    begin = time.monotonic()
    result: dict[str, Any] = {"examples": []}
    looked = written = 0.0

    def alive() -> bool:
        return any(client.is_alive() for server in servers for client in server.clients)

    while alive() or not told.empty():
        with suppress(queue.Empty):
            while True:
                (server_number, number), counts, refused, examples, cpu = told.get(timeout=0.1)
                server = servers[server_number]
                server.counts[number], server.refused[number], server.cpu_of_clients[number] = (
                    counts,
                    refused,
                    cpu,
                )
                result["examples"] = (result["examples"] + examples)[:100]
        now = time.monotonic() - begin
        if stopped or now > args.seconds:
            stop.set()
        elif args.kill_every:
            for server in servers:
                if not server.spared and now > server.next_kill_s:
                    server.kill(now)
                    server.next_kill_s = now + args.kill_every
        if now > looked + 1:
            looked = now
            for server in servers:
                server.look(now)
        if now > written + 5 or not alive():
            written = now
            result |= _figures(servers, now, is_wrong)
            held = sum(sum(server.held.values()) for server in servers)
            print(
                f"{result['sent']:,} sent, {result['requests_per_s']:,}/s, {result['wrong']} wrong, {result['kills']} kills, "
                f"{held:,.0f} MiB",
                flush=True,
            )
            args.output.parent.mkdir(parents=True, exist_ok=True)
            part = args.output.with_suffix(".part")
            reports = [server.report(now, args.most_growth) for server in servers]
            part.write_text(json.dumps(result | {"servers": reports, "finished": False}))
            part.replace(args.output.with_suffix(".progress.json"))
    for server in servers:
        for client in server.clients:
            client.join()
            if client.exitcode:
                raise SystemExit(f"{name}: a process of clients ended with {client.exitcode}")
    args.output.with_suffix(".progress.json").unlink(missing_ok=True)
    return result


def _figures(
    servers: list[Server], seconds: float, is_wrong: Callable[[str], bool]
) -> dict[str, Any]:
    """Figures of all servers together."""
    total: Counter[str] = sum((server.outcomes for server in servers), Counter())
    cpu: Counter[str] = sum((server.watch.cpu_seconds() for server in servers), Counter())
    sent = sum(total.values())
    return {
        "sent": sent,
        "seconds": round(seconds, 1),
        "requests_per_s": round(sent / seconds, 1),
        "kills": sum(server.kills for server in servers),
        "wrong": sum(n for key, n in total.items() if is_wrong(key)),
        "outcomes": dict(sorted(total.items())),
        "refused_and_sent_again": dict(
            sum((count for server in servers for count in server.refused), Counter())
        ),
        "cpu_seconds": {kind: round(value, 1) for kind, value in cpu.items()}
        | {"clients": round(sum(sum(server.cpu_of_clients) for server in servers), 1)},
    }


def _clients(
    number: tuple[int, int],
    quota: int,
    args: Any,
    users: Any,
    address: tuple[str, int],
    told: Any,
    stop: Any,
) -> None:
    tally = Tally(stop)
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # of our whole process group
        signal.signal(signal_number, lambda number, frame: setattr(tally, "signalled", True))

    def tell() -> None:
        told.put((number, tally.counts, tally.refused, tally.found, time.process_time()))
        tally.found = []

    async def main() -> None:
        async def telling() -> None:
            while True:
                await asyncio.sleep(1)
                tell()

        teller = asyncio.create_task(telling())
        await users(number[0] * args.clients + number[1], quota, args, address, tally)
        teller.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    tell()
    told.close()
    told.join_thread()


def gauges(text: str) -> dict[str, float]:
    return {
        line.split("{")[0].removeprefix("slipstream:"): float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(("slipstream:num_requests_", "slipstream:kv_cache_usage"))
    }


def answers_of(text: str) -> dict[str, int]:
    """How many requests the server says that it answered, by route and status."""
    found = {}
    for line in text.splitlines():
        if line.startswith("slipstream:http_requests_total{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            found[f"{labels['method']} {labels['route'].lstrip('/')} {labels['status']}"] = int(
                float(line.rsplit(" ", 1)[1])
            )
    return dict(sorted(found.items()))


# --- Connections ----------------------------------------------------------------------------------------------------


class Answers:
    """Answers read from a connection: whole ones as (status, body), without interim ones."""

    def __init__(self) -> None:
        self.whole: list[tuple[int, bytes]] = []
        self.parser, self.body, self.any, self.keeps = (
            httptools.HttpResponseParser(self),
            bytearray(),
            b"",
            False,
        )

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
