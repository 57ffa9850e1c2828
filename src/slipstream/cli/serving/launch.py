"""`slipstream launch CLIENT`: starts a coding agent (claude, codex, opencode), or any program, that
uses one of your servers.

    slipstream launch claude --serve Qwen/Qwen3-8B    # starts a server, which ends with the agent
    slipstream launch codex --url http://127.0.0.1:8000 -- exec "fix the tests"
    slipstream launch any -- node app.mjs             # the variables of OpenAI's, Anthropic's and Ollama's SDKs

Only the environment and the arguments of the agent are set, and they are printed. None of the
agent's files is written."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator

from slipstream.cli.console import print_json
from slipstream.cli.options import add_key_options, add_output_options, given_key
from slipstream.errors import ConfigError

START_S = 1800.0
"""Longest start of a server: a large model may have to be downloaded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("client", choices=("claude", "codex", "opencode", "any"), help="the agent")
    parser.add_argument(
        "args", nargs="*", help="arguments for the agent, after --; for any: the program, too"
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)"
    )
    parser.add_argument(
        "--serve", metavar="MODEL", help="start a server of this model at --url's port"
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
    with served(args.serve, args.url) if args.serve else contextlib.nullcontext():
        key = given_key(args)
        endpoint = find_endpoint(args.url, args.model, key)
        environment, words = agent.setup(endpoint)
        command = [*program, *words, *args.args]
        if args.json:
            print_json({"environment": environment, "command": command})
        else:
            for name, value in environment.items():
                shown = "…" if key and value == key else value
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
        return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode


@contextlib.contextmanager
def served(model: str, url: str) -> Iterator[None]:
    """Run a server of the model for the duration of the context. ConfigError if another server
    answers at this address, or if it ends before it serves."""
    import httpx

    if _is_ready(url):
        raise ConfigError(f"a server answers at {url} already; leave --serve out", field="serve")
    address = httpx.URL(url)
    place = ["--host", address.host, "--port", str(address.port or 8000)]
    command = [sys.executable, "-m", "slipstream", "serve", model, *place]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S
        while not _is_ready(url):
            if server.poll() is not None or time.monotonic() > until:
                raise ConfigError(f"the server of {model} did not start", field="serve")
            time.sleep(0.2)
        yield
    finally:
        server.terminate()
        server.wait()


def _is_ready(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url.rstrip('/')}/ready", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
