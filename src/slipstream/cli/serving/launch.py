"""`slipstream launch CLIENT`: starts a coding agent (claude, codex, opencode), or any program, with
one of your servers.

    slipstream launch claude --serve Qwen/Qwen3-8B    # starts a server, which ends with the agent
    slipstream launch claude --serve "Qwen/Qwen3-8B --max-model-len 65536"
    slipstream launch codex --url http://127.0.0.1:8000 -- exec "fix the tests"
    slipstream launch any -- node app.mjs             # the variables of OpenAI's, Anthropic's and Ollama's SDKs

Only the agent's environment and arguments are set, and they are printed. None of its files is
written."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slipstream.cli.console import print_json
from slipstream.cli.options import add_key_options, add_output_options, given_key
from slipstream.errors import ConfigError

START_S = 1800.0
"""Maximum seconds of a server's start, in which a large model may have to be downloaded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("client", choices=("claude", "codex", "opencode", "any"), help="the agent")
    parser.add_argument(
        "args", nargs="*", help="arguments for the agent, after --; for any: the program, too"
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)"
    )
    parser.add_argument(
        "--serve",
        metavar="WORDS",
        help="start a server at --url's port: a model and, in the same quotes, options of `serve`",
    )
    parser.add_argument("--model", help="a model that the server serves (default: its first)")
    add_key_options(parser)
    parser.add_argument(
        "--print",
        action="store_true",
        dest="only_print",
        help="print what would be set, start nothing",
    )
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    from slipstream.server.operations.clients import (
        AGENTS,
        SMALL_CONTEXT,
        find_endpoint,
        find_program,
    )

    agent = AGENTS[args.client]
    if not agent.program and not (args.args or args.only_print):
        raise ConfigError("give the program after --, such as -- node app.mjs", field="args")
    found = not agent.program or args.only_print
    program = [name for name in (agent.program if found else find_program(agent),) if name]
    with _ends(), served(args.serve, args.url) if args.serve else contextlib.nullcontext():
        key = given_key(args)
        endpoint = find_endpoint(args.url, args.model, key)
        environment, words = agent.setup(endpoint)
        command = [*program, *words, *args.args]
        if args.json:
            print_json({"environment": environment, "command": command})
        else:
            for name, value in environment.items():
                shown = value.replace(key, "…") if key else value
                print(f"{name}={shlex.quote(shown)}", file=sys.stderr)
            print(shlex.join(command), file=sys.stderr)
        length = endpoint.max_model_len
        if length is not None and length < SMALL_CONTEXT and agent.program:
            print(
                f"slipstream: the context is {length} tokens; agents' first prompts have 10,000 to 30,000",
                file=sys.stderr,
            )
        if not endpoint.calls_tools and agent.program:
            print(
                "slipstream: this model's chat template has no tools, so agents get an error; serve another model, "
                "or give `serve` one with --chat-template",
                file=sys.stderr,
            )
        if args.only_print:
            return 0
        return _run(command, {**os.environ, **environment})


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the agent, and return its exit code. Only the agent receives the terminal's Ctrl-C."""
    agent = subprocess.Popen(command, env=environment)
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return agent.wait()
    finally:
        signal.signal(signal.SIGINT, before)
        if agent.poll() is None:
            agent.terminate()
            agent.wait()


@contextlib.contextmanager
def _ends() -> Iterator[None]:
    """Context manager in which termination signals raise SystemExit, so that the agent and the
    server end with this process."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    ends = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {s: signal.signal(s, end) for s in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def served(model: str, url: str) -> Iterator[None]:
    """Context manager that runs a server of the model in its body. `model` may be followed by
    options of `serve`. ConfigError if another server answers at this address, or if the server ends
    before it is ready."""
    import httpx

    if _is_ready(url):
        raise ConfigError(f"a server answers at {url} already; leave --serve out", field="serve")
    address = httpx.URL(url)
    words = [model] if os.path.exists(model) else shlex.split(model)
    if taken := {"--host", "--port"} & {word.partition("=")[0] for word in words}:
        raise ConfigError(f"--url says where the server is; leave {min(taken)} out", field="serve")
    place = ["--host", address.host, "--port", str(address.port or 8000)]
    command = [sys.executable, "-m", "slipstream", "serve", *words, *place]
    server = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # otherwise Ctrl-C in the agent would end the server
    )
    log = _Log(server)
    try:
        until = time.monotonic() + START_S
        while not _is_ready(url):
            if server.poll() is not None or time.monotonic() > until:
                log.reader.join(1)
                raise ConfigError(f"the server of {model} did not start", field="serve")
            time.sleep(0.2)
        log.is_quiet = True
        yield
        if server.poll() is not None:
            log.reader.join(1)
            print(*log.last, sep="", end="", file=sys.stderr)
            print(f"slipstream: the server of {model} ended before the agent", file=sys.stderr)
    finally:
        server.terminate()
        server.wait()


class _Log:
    """Reads the server's log. It is shown until `is_quiet`, because its lines would disturb the
    agent's screen; then the `last` lines are stored."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self.is_quiet = False
        self.last: deque[str] = deque(maxlen=20)
        self.reader = threading.Thread(target=self._read, args=(server,), daemon=True)
        self.reader.start()

    def _read(self, server: subprocess.Popen[str]) -> None:
        for line in server.stderr or ():
            self.last.append(line)
            if not self.is_quiet:
                with contextlib.suppress(OSError):  # without a reader, the server would block
                    sys.stderr.write(line)


def _is_ready(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url.rstrip('/')}/ready", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
