"""A server that is measured over OpenAI's HTTP API: one that runs already (`url`), or one that a
command starts here and that ends with this process.

A command is a list of words in which {model}, {port}, {batch_size}, {max_model_len} and {scheme}
are filled in. vLLM is measured in this way, by its own server. A token's time is recorded when this
process receives it; all requests are sent at once."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvloop

from slipstream.bench.adapters import AS_STORED, EngineSetup, OnPhase
from slipstream.bench.adapters.openai import Endpoint, OpenAIEndpoint
from slipstream.bench.load import Burst, run_load
from slipstream.bench.workload import BenchRequest
from slipstream.costs.metrics import RequestTiming
from slipstream.errors import ConfigError, EngineError

ASK_EVERY_S = 0.2


class ServerEngine:
    """Sends requests to `endpoint`. `process`: its server, if it was started here."""

    def __init__(
        self, endpoint: Endpoint, process: subprocess.Popen[bytes] | None, load_s: float
    ) -> None:
        self.endpoint, self.load_s = endpoint, load_s
        self._process = process

    def run(self, requests: Sequence[BenchRequest], /) -> list[RequestTiming]:
        async def all_at_once() -> list[RequestTiming]:
            async with OpenAIEndpoint(self.endpoint) as engine:
                return await run_load(engine, requests, Burst())

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(all_at_once())

    def describe(self) -> dict[str, Any]:
        return {**self.endpoint.describe(), "start_phases_s": {"load": self.load_s}}

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def make(setup: EngineSetup, on_phase: OnPhase) -> ServerEngine:
    begin = time.monotonic()
    command, url = command_of(setup), setup.setting("url")
    if (command is None) == (url is None):
        raise ConfigError(
            "engine='openai' needs either the url of a server or the command that starts one",
            field="url",
        )
    process = None
    if command is not None:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        process = start(filled(command, setup, port))
    endpoint = Endpoint(
        url=str(url),
        model=setup.setting("served_model_name") or "",
        api_key=setup.setting("api_key"),
        ignore_eos=setup.setting("ignore_eos", True),
    )
    engine = ServerEngine(endpoint, process, 0.0)
    try:
        on_phase("waiting for the server")
        names = asyncio.run(served_models(endpoint, process))
        if not names:
            raise EngineError(f"the server at {url} lists no model")
    except BaseException:
        engine.close()
        raise
    if not endpoint.model:
        endpoint = Endpoint(
            url=endpoint.url,
            model=names[0],
            api_key=endpoint.api_key,
            ignore_eos=endpoint.ignore_eos,
        )
    return ServerEngine(endpoint, process, time.monotonic() - begin)


def command_of(setup: EngineSetup) -> list[str] | None:
    """Words that start the server, before they are filled in; None if it runs already."""
    if setup.engine != "vllm":
        command: list[str] | None = setup.setting("command")
        return command
    words = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "{model}",
        "--port",
        "{port}",
    ]
    words += [
        "--max-num-seqs",
        "{batch_size}",
        "--tensor-parallel-size",
        str(setup.parallel.tensor),
    ]
    words += [
        "--pipeline-parallel-size",
        str(setup.parallel.pipeline),
        "--no-enable-prefix-caching",
    ]
    words += ["--max-model-len", "{max_model_len}"] if setup.max_model_len else []
    words += (
        ["--served-model-name", str(name)] if (name := setup.setting("served_model_name")) else []
    )
    words += ["--quantization", "{scheme}"] if setup.scheme != AS_STORED else []
    return words + [str(word) for word in setup.setting("arguments", ())]


def filled(command: Sequence[str], setup: EngineSetup, port: int) -> list[str]:
    values = {"model": str(setup.path or setup.model), "port": str(port), "scheme": setup.scheme}
    values |= {"batch_size": str(setup.batch_size), "max_model_len": str(setup.max_model_len)}
    words = list(command)
    for name, value in values.items():
        words = [word.replace(f"{{{name}}}", value) for word in words]
    return words


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the server. Its output goes to standard error; it is in our process group, and ends
    with it."""
    try:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
    except OSError as error:
        raise ConfigError(
            f"the server {words[0]!r} can't be started: {error.strerror}", field="command"
        ) from None


async def served_models(endpoint: Endpoint, process: subprocess.Popen[bytes] | None) -> list[str]:
    """Names of the served models, as soon as the server answers. The caller limits the time.
    Without a process, only one request is made."""
    while True:
        try:
            async with OpenAIEndpoint(endpoint) as engine:
                return [model.id for model in await engine.served_models()]
        except EngineError:
            if process is None:
                raise
            if (code := process.poll()) is not None:
                raise EngineError(
                    f"the server ended with exit code {code} before it was ready"
                ) from None
            await asyncio.sleep(ASK_EVERY_S)
