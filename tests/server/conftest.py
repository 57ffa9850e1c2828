"""Real servers on loopback, each in a thread of its own, and the official client to speak to them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading

import httpx
import openai
import pytest
import uvloop

from slipstream.config import EngineArgs
from slipstream.server.app import create_app
from slipstream.server.run import bind, make_server, url
from slipstream.server.state import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S, wait_for

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments.city }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class RunningServer:
    """`start` is a coroutine function that makes the engine, on the server's own loop; `create` makes the app."""

    def __init__(self, start, create=create_app, **settings):
        self._create = create
        self.settings = ServerSettings(**{"port": 0, **settings})
        self._start, self._up, self.error = start, threading.Event(), None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._up.wait(PATIENCE_S), "the server did not start"
        if self.error is not None:
            raise self.error

    def _run(self):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self):
        try:
            self.engine = await self._start()
            listener = bind(self.settings)
            self.url = url(self.settings, listener)
            self.loop, self.server = (
                asyncio.get_running_loop(),
                make_server(self.engine, self.settings, create=self._create),
            )
        except BaseException as exc:
            self.error = exc
            self._up.set()
            return
        self.loop.call_soon(self._up.set)
        await self.server.serve(sockets=[listener])
        await self.engine.shutdown()

    @property
    def state(self):
        return self.server.state

    def client(self, **kwargs):
        return openai.OpenAI(
            base_url=self.url + "/v1",
            **{"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S, **kwargs},
        )

    def http(self, **kwargs):
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **kwargs)

    def begin_stop(self):
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.stop)

    def join(self):
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server did not stop"

    def call(self, coroutine):
        """The result of a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    wait_for = staticmethod(wait_for)

    def wait_idle(self):
        wait_for(
            lambda: not self.state.in_flight and self.engine.running == 0, "a request was not freed"
        )


def lines_of(caplog, *names):
    """Lines that loggers of these names wrote. Servers that other tests left running may write
    some, too."""
    return [record for record in caplog.records if record.name in names]


@contextlib.contextmanager
def serving(engine=None, *, start=None, **settings):
    """A server around `engine` (a fake one by default), or around what `start` makes on the server's loop."""
    engine = engine or FakeEngine()

    async def given():
        return engine

    server = RunningServer(start or given, **settings)
    try:
        yield server
    finally:
        server.begin_stop()
        server.join()


@pytest.fixture(scope="session")
def shared():
    """A server with a fast fake engine, for tests that only ask."""
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A tiny model with random weights, a tokenizer and a chat template."""
    from tests.support import tiny_models  # here, since it takes torch and transformers

    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_models.write_with_tokenizer(folder, max_position_embeddings=1024)
    return folder


@pytest.fixture(scope="session")
def tiny_server(tiny_path):
    """The real engine in its own process behind the server, under the name that the manual uses."""
    from slipstream.engine.async_llm import AsyncLLM

    args = EngineArgs(
        model=str(tiny_path),
        dtype="float32",
        device="cpu",
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=64,  # so that prompts of some length take several steps
        kv_cache_bytes=64 * 2**20,
        num_threads=1,
    )
    with serving(start=lambda: AsyncLLM.start(args), served_model_names=("smollm2",)) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_encoder_server(tiny_encoder):
    """An encoder behind the server, under the name that the manual uses."""
    from slipstream.engine.async_llm import AsyncLLM

    args = EngineArgs(model=str(tiny_encoder), dtype="float32", device="cpu", num_threads=1)
    with serving(start=lambda: AsyncLLM.start(args), served_model_names=("minilm",)) as server:
        yield server


@pytest.fixture
def serve():
    """serve(engine, **settings): a server of the test's own."""
    with contextlib.ExitStack() as stack:
        yield lambda engine=None, **settings: stack.enter_context(serving(engine, **settings))


@pytest.fixture
def model(tiny_server, monkeypatch):
    """model(template, **settings) changes what the server takes the model for."""

    def change(template=TEMPLATE, **settings):
        monkeypatch.setattr(tiny_server.engine.tokenizer, "_templates", {"default": template})
        monkeypatch.setattr(
            tiny_server.state, "settings", dataclasses.replace(tiny_server.settings, **settings)
        )

    return change


@pytest.fixture
def ask(tiny_server, request):
    """A function that posts a test file's `ROUTES[path]`, with other fields, and returns the answer's body or its error."""
    routes = request.module.ROUTES
    with tiny_server.http() as http:

        def post(path="/v1/completions", *, status=200, **more):
            answer = http.post(path, json=routes.get(path, {}) | more)
            assert answer.status_code == status, answer.text
            return answer.json() if status == 200 else answer.json()["error"]

        post.http = http
        yield post
