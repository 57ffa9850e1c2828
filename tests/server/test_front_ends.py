"""Several front ends over one engine: `slipstream serve --api-servers 2`, as its clients and its operator see it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import uvloop

from slipstream.cli import serve as cli
from slipstream.config import EngineArgs
from slipstream.frontend.control import Channel, Drain, ToSupervisor
from slipstream.frontend.supervisor import Supervisor
from slipstream.server.load import Load
from slipstream.server.metrics import Metrics
from slipstream.server.state import ServerSettings

KEY = "the-key"
LIMIT = 8
SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "temperature": 0, "extra_body": {"ignore_eos": True}}
LONG = {**SHORT, "max_tokens": 800, "stream": True}
BROKEN = (openai.APIError, httpx.TransportError)


class Served:
    """The command with two front ends, a temporary folder of its own, and its log."""

    def __init__(self, model: Path, *options: str) -> None:
        self.folder = tempfile.TemporaryDirectory()  # a socket's path must be short
        home = Path(self.folder.name)
        (home / "keys").write_text(KEY)
        self.temporary, self._log = home / "tmp", home / "log"
        self.temporary.mkdir()
        command = [sys.executable, "-m", "slipstream", "serve", str(model), "--port=0", "--json", "--api-servers=2"]
        command += ["--served-model-name=tiny", f"--api-key-file={home / 'keys'}", "--log-format=json", "--device=cpu"]
        command += [f"--max-concurrent-requests={LIMIT}", "--max-model-len=1024", "--num-threads=1", "--dtype=float32"]
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [*command, f"--kv-cache-bytes={2**26}", *options],
            env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=self._log.open("wb"),
            text=True,
        )
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        assert first, self._log.read_text()
        self.banner = json.loads(first)
        self.base = self.banner["url"].removesuffix("/v1")
        self.children = psutil.Process(self.process.pid).children()

    def processes(self, module: str) -> dict[int, psutil.Process]:
        found = psutil.Process(self.process.pid).children()
        self.children += found
        return {p.pid: p for p in found if p.is_running() and any(module in word for word in p.cmdline())}

    def front_ends(self) -> dict[int, psutil.Process]:
        return self.processes("slipstream.frontend.process")

    def engine(self) -> int:
        (pid,) = self.processes("slipstream.engine.core_process")
        return pid

    def log(self) -> list[dict]:
        return [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]

    def client(self) -> openai.OpenAI:
        """Each has a connection of its own."""
        return openai.OpenAI(base_url=self.base + "/v1", api_key=KEY, max_retries=0, timeout=60)

    def ask(self, **more) -> str:
        with self.client() as client:
            return client.completions.create(**SHORT | more).choices[0].text

    def get(self, path: str, key: str = KEY) -> httpx.Response:
        return httpx.get(self.base + path, headers={"authorization": f"Bearer {key}"}, timeout=30)

    def metric(self, name: str) -> float:
        found = re.findall(rf"^slipstream:{re.escape(name)} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return float(found[0]) if found else 0.0

    def until(self, condition, what: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what}\n{self._log.read_text()}"
            time.sleep(0.02)

    def is_idle(self) -> bool:
        return self.metric('num_requests_running{model_name="tiny"}') == 0

    def until_all_serve(self) -> None:
        """Both front ends have answered a request that began now."""
        before = len(self.log())

        def both() -> bool:
            with contextlib.suppress(*BROKEN):
                self.ask()
            seen = {line["front_end"] for line in self.log()[before:] if line.get("status") == 200}
            return seen == {1, 2}

        self.until(both, "not both front ends serve")

    def until_nothing_is_left(self) -> None:
        self.until(lambda: not any(p.is_running() for p in self.children), "a process was left")
        self.until(lambda: not os.listdir(self.temporary), "a file was left")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.until_nothing_is_left()
        self.folder.cleanup()


@pytest.fixture(scope="module")
def served(tiny_path):
    with contextlib.closing(Served(tiny_path)) as server:
        yield server


@pytest.fixture
def another(tiny_path):
    with contextlib.ExitStack() as stack:
        yield lambda *options, model=tiny_path: stack.enter_context(contextlib.closing(Served(model, *options)))


class Streams:
    """Long answers under way, each on a connection of its own."""

    def __init__(self, served: Served, number: int, **more) -> None:
        self.clients = [served.client() for _ in range(number)]
        self.streams = [client.completions.create(**LONG | more) for client in self.clients]
        for stream in self.streams:
            next(stream)

    def finish(self) -> list[bool]:
        """Whether each came to its end."""

        def read(stream) -> bool:
            try:
                return list(stream)[-1].choices[0].finish_reason == "length"
            except BROKEN:
                return False

        with ThreadPoolExecutor(len(self.streams)) as pool:
            return list(pool.map(read, self.streams))

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *error) -> None:
        for client in self.clients:
            client.close()


def copy_of(model: Path, folder: Path) -> None:
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)


# --- Serving --------------------------------------------------------------------------------------------------------


def test_streams_of_many_connections(served):
    assert served.banner["api_servers"] == 2
    whole = served.ask(max_tokens=30)

    def stream(_: int) -> str:
        with served.client() as client:
            return "".join(c.choices[0].text for c in client.completions.create(**SHORT | {"max_tokens": 30}, stream=True))

    before = len(served.log())
    with ThreadPoolExecutor(LIMIT) as pool:
        assert set(pool.map(stream, range(3 * LIMIT))) == {whole}
    seen = [line["front_end"] for line in served.log()[before:] if line["message"] == "request"]
    assert len(seen) == 3 * LIMIT
    assert min(seen.count(1), seen.count(2)) >= LIMIT  # connections go to who has fewer


def test_probes_and_keys_at_each(served):
    for _ in range(6):  # a connection each
        assert served.get("/v1/models", key="another").status_code == 401
        assert served.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert {served.get(path, key="none").status_code for path in ("/live", "/ready", "/health")} == {200}


def test_the_limit_is_of_all_together(served):
    with Streams(served, LIMIT):
        for _ in range(4):
            with pytest.raises(openai.RateLimitError) as caught:
                served.ask()
            assert caught.value.code == "overloaded"
    served.until(served.is_idle, "the requests of clients that left were not cancelled")
    with Streams(served, LIMIT):  # every place is free again
        pass
    served.until(served.is_idle, "the requests of clients that left were not cancelled")


def test_metrics_add_up(served):
    answers = 'http_requests_total{method="POST",route="/v1/completions",status="200"}'
    tokens, finished = 'generation_tokens_total{model_name="tiny"}', 'e2e_request_latency_seconds_count{model_name="tiny"}'
    before = {name: served.metric(name) for name in (answers, tokens, finished)}
    for _ in range(6):
        served.ask()
    for _ in range(4):  # whichever front end is asked
        assert {name: served.metric(name) - before[name] for name in before} == {answers: 6, tokens: 18, finished: 6}


# --- What dies ------------------------------------------------------------------------------------------------------


def test_a_front_end_that_is_killed_is_replaced(served):
    answers = 'http_requests_total{method="POST",route="/v1/completions",status="200"}'
    tokens = 'generation_tokens_total{model_name="tiny"}'
    served.until_all_serve()
    counted, generated = served.metric(answers), served.metric(tokens)
    old = served.front_ends()
    with Streams(served, 6) as streams:
        victim = next(iter(old))
        os.kill(victim, signal.SIGKILL)
        ends = streams.finish()
    assert set(ends) == {True, False}
    served.until(served.is_idle, "requests of the front end that died are still computed", seconds=1)
    assert served.metric(tokens) - generated < 800 * (sum(ends) + 0.5 * ends.count(False))
    served.until(lambda: served.metric(answers) == counted + sum(ends), "what the dead one had counted is gone")
    served.until_all_serve()
    new = served.front_ends()
    assert len(new) == 2
    assert new.keys() - old.keys() and victim not in new  # noqa: PT018
    with Streams(served, LIMIT):  # its places are free
        assert served.metric(answers) >= counted + sum(ends)
    served.until(served.is_idle, "the requests of clients that left were not cancelled")


def test_an_engine_that_is_killed_is_started_again(served):
    front_ends, engine = served.front_ends(), served.engine()
    with Streams(served, 4) as streams:
        os.kill(engine, signal.SIGKILL)
        assert streams.finish() == [False] * 4
    with pytest.raises(openai.InternalServerError) as caught:
        [served.ask() for _ in range(100)]
    assert (caught.value.status_code, caught.value.code) == (503, "engine_dead")
    served.until(lambda: served.get("/ready").status_code == 200, "the engine did not come back", 60)
    served.until_all_serve()
    assert served.front_ends().keys() == front_ends.keys()
    assert served.engine() != engine
    down = [line for line in served.log() if "the engine is down" in line["message"]]
    assert [line.get("front_end", 0) for line in sorted(down, key=lambda line: line.get("front_end", 0))] == [0, 1, 2]


# --- The end --------------------------------------------------------------------------------------------------------


def test_sigterm_drains_all_front_ends(another):
    served = another()
    with Streams(served, 4) as streams, ThreadPoolExecutor(1) as pool:
        ends = pool.submit(streams.finish)
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        refused = {served.get("/ready", key="none").status_code for _ in range(4)}
        with pytest.raises(openai.InternalServerError) as caught:
            served.ask()
        assert refused == {503}
        assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
        assert ends.result() == [True] * 4
    assert served.process.wait(20) == 0
    served.until_nothing_is_left()


def test_a_second_signal_does_not_wait_and_a_second_model_shortens(another, tiny_path, tmp_path):
    (tmp_path / "small").symlink_to(tiny_path)
    served = another("--drain-timeout=1000", f"--context-model={tmp_path / 'small'}")
    for _ in range(2):  # at each front end
        with served.client() as client:
            answer = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "Say hello. " * 30}, {"role": "user", "content": "Now."}],
                max_tokens=3,
                extra_body={"compress_prompt": {"keep": 0.5}},
            )
        told = answer.usage.model_dump()["prompt_compression"]
        assert told["tokens_after"] < told["tokens_before"]
    with Streams(served, 4) as streams:
        served.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        served.process.send_signal(signal.SIGINT)
        assert streams.finish() == [False] * 4
    assert served.process.wait(20) == 0
    served.until_nothing_is_left()


def test_a_supervisor_that_is_killed_leaves_nothing_and_tls(another, tmp_path, monkeypatch):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}"
    subprocess.run(command.split(), check=True, capture_output=True)
    served = another(f"--ssl-certfile={cert}", f"--ssl-keyfile={key}")
    assert served.base.startswith("https://")
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    with socket.create_connection(("127.0.0.1", int(served.base.rsplit(":", 1)[1]))) as plain:
        plain.sendall(b"GET /live HTTP/1.1\r\n\r\n")  # no TLS: it is hung up on, and nobody else notices
        assert not plain.recv(100).startswith(b"HTTP")
    with Streams(served, 2):
        served.process.kill()
        served.until_nothing_is_left()


def test_an_engine_that_stays_down_is_told_to_all(another, tiny_path, tmp_path):
    copy_of(tiny_path, tmp_path / "model")
    served = another(model=tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "no such"}')
    os.kill(served.engine(), signal.SIGKILL)
    served.until(lambda: "stays down" in served.get("/health").text, "the engine is tried again")
    for _ in range(4):
        assert served.get("/live").status_code == 200
        assert "stays down" in served.get("/health").json()["error"]["message"]
    victim = next(iter(served.front_ends()))
    os.kill(victim, signal.SIGKILL)  # its place can't be taken: the model is another
    served.until(lambda: sum("will be replaced" in line["message"] for line in served.log()) >= 2, "it is not tried again")
    assert "stays down" in served.get("/health").text
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(20) == 0


def test_what_a_front_end_finds_wrong_at_the_start_is_said(tiny_path, tmp_path):
    copy_of(tiny_path, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    command = [sys.executable, "-m", "slipstream", "serve", str(tmp_path / "model"), "--api-servers=2", "--port=0"]
    paths = os.pathsep.join(path for path in sys.path if path)
    found = subprocess.run(
        [*command, "--device=cpu"], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 3
    assert "tokenizer.json" in found.stderr
    assert "Traceback" not in found.stderr


# --- The parts ------------------------------------------------------------------------------------------------------


def test_requests_are_counted_over_all_front_ends():
    memory = memoryview(bytearray(Load.size(3)))
    first, second, third = (Load(memory, slot) for slot in range(3))
    assert [load.begin_request(3) for load in (first, second, second, third, first)] == [True, True, True, False, False]
    assert third.num_requests == 3
    second.clear()  # it died
    assert third.begin_request(2)
    first.end_request()
    assert first.num_requests == 1
    assert not Load().is_shared


def test_who_has_fewer_connections_takes_the_next():
    memory = memoryview(bytearray(Load.size(2)))
    first, second = Load(memory, 0), Load(memory, 1)
    assert not first.has_most_connections
    first.set_connections(1)
    assert first.has_most_connections
    assert not second.has_most_connections
    assert first.num_requests == 0


def test_what_is_sent_to_a_process_that_has_ended_is_lost():
    """An exception would end the supervisor's watch over the engine, or keep other front ends from hearing of a signal."""

    async def say() -> None:
        ours, theirs = socket.socketpair()
        channel: Channel = await Channel.open(ours, ToSupervisor)
        theirs.close()
        assert await channel.receive() is None
        for _ in range(3):
            channel.send(Drain())
            await asyncio.sleep(0)
        channel.close()
        channel.send(Drain())

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(say())


def test_a_front_end_whose_start_a_signal_overtakes_ends(tiny_path):
    async def live() -> None:
        with socket.socket() as listener:
            supervisor = Supervisor([EngineArgs(model=str(tiny_path))], ServerSettings(), listener, 1)
            supervisor._stop()
            served, error = await asyncio.wait_for(supervisor._live(0), 20)
            await asyncio.to_thread(shutil.rmtree, supervisor._folder)
        assert not served
        assert "was killed by signal 9" in str(error)

    asyncio.run(live())


def test_counts_are_added():
    one, two, both = Metrics("m"), Metrics("m"), Metrics("m")
    for metrics, value in ((one, 0.3), (two, 0.3), (two, 7.0)):
        metrics.itl.observe(value)
        metrics.finished["stop"] += 1
        metrics.responses["GET", "/live", 200] += 1
        both.add(metrics.counts()) if metrics is one else None
    both.add(two.counts())
    text = both.render(None).decode()
    assert 'inter_token_latency_seconds_count{model_name="m"} 3.0' in text
    assert 'inter_token_latency_seconds_sum{model_name="m"} 7.6' in text
    assert 'request_success_total{finish_reason="stop",model_name="m"} 3.0' in text
    assert 'http_requests_total{method="GET",route="/live",status="200"} 3.0' in text


@pytest.mark.parametrize(
    ("device", "gpus", "cores", "number"),
    [("cpu", 1, 64, 1), ("auto", 0, 64, 1), ("auto", 1, 16, 4), ("cuda:1", 0, 64, 8), ("auto", 1, 2, 1)],
)
def test_how_many_are_chosen(monkeypatch, device, gpus, cores, number):
    from slipstream.plan import hardware

    monkeypatch.setattr(hardware, "gpus", lambda: (None,) * gpus)
    monkeypatch.setattr(hardware, "available_cores", lambda: cores)
    assert cli.choose_api_servers(device) == number
