"""Several front ends over one engine: `slipstream serve --api-servers 2`, as its clients and its operator see it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import uvloop

from slipstream.cli.serving import serve as cli
from slipstream.config import EngineArgs
from slipstream.frontend.control import Channel, Drain, ToSupervisor
from slipstream.frontend.supervisor import Supervisor
from slipstream.server.http.load import Acceptor, ServerLoad
from slipstream.server.operations.metrics import Metrics
from slipstream.server.state import ServerSettings
from tests.support.waiting import PATIENCE_S, wait_for

KEY = "the-key"
LIMIT = 8
SHORT = {
    "model": "tiny",
    "prompt": "hello",
    "max_tokens": 3,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
LONG = {**SHORT, "max_tokens": 800, "stream": True}
ANSWERS = 'http_requests_total{method="POST",route="/v1/completions",status="200"}'
KEPT_OPEN = httpx.Limits(keepalive_expiry=None)
BROKEN = (openai.APIError, httpx.TransportError)


class Served:
    """The command with two front ends, a temporary folder of its own, and its log."""

    def __init__(self, model: Path, *options: str) -> None:
        self.folder = tempfile.TemporaryDirectory()  # a socket's path must be short
        home = Path(self.folder.name)
        (home / "keys").write_text(KEY)
        self.grpc_port = 0
        self.temporary, self._log = home / "tmp", home / "log"
        self.temporary.mkdir()
        command = [
            sys.executable,
            "-m",
            "slipstream",
            "serve",
            str(model),
            "--port=0",
            "--json",
            "--api-servers=2",
        ]
        command += [
            "--served-model-name=tiny",
            f"--api-key-file={home / 'keys'}",
            "--log-format=json",
            "--device=cpu",
        ]
        command += [
            f"--max-concurrent-requests={LIMIT}",
            "--max-model-len=1024",
            "--num-threads=1",
            "--dtype=float32",
        ]
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [*command, f"--kv-cache-bytes={2**26}", *options],
            env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=self._log.open("wb"),
            text=True,
        )
        assert self.process.stdout is not None
        self.children = psutil.Process(self.process.pid).children()
        first = self.process.stdout.readline()
        self.banner = json.loads(first or "{}")
        if "url" not in self.banner:  # an error's document, or nothing
            log = self._log.read_text()
            self.close()
            pytest.fail(f"the server did not start: {first}\n{log}")
        self.base = self.banner["url"].removesuffix("/v1")
        self.children += psutil.Process(self.process.pid).children()

    def processes(self, module: str) -> dict[int, psutil.Process]:
        found = psutil.Process(self.process.pid).children()
        self.children += found
        return {p.pid: p for p in found if any(module in word for word in words_of(p))}

    def front_ends(self) -> dict[int, psutil.Process]:
        return self.processes("slipstream.frontend.process")

    def engine(self) -> int:
        (pid,) = self.processes("slipstream.engine.process.core_process")
        return pid

    @contextlib.contextmanager
    def stopped_engine(self) -> Iterator[None]:
        """Stops an engine for a while. It makes no step meanwhile, nor does that of another model."""
        engines = self.processes("slipstream.engine.process.core_process").values()
        for engine in engines:
            engine.suspend()
        try:
            yield
        finally:
            for engine in engines:
                engine.resume()

    def log(self) -> list[dict]:
        """Whole lines of the log; another may be on its way."""
        text = self._log.read_text()
        return [
            json.loads(line)
            for line in text[: text.rfind("\n") + 1].splitlines()
            if line.startswith("{")
        ]

    def client(self) -> openai.OpenAI:
        """Each has a connection of its own."""
        return self.openai(httpx.Client(timeout=PATIENCE_S, limits=KEPT_OPEN))

    def openai(self, http: httpx.Client) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=self.base + "/v1",
            api_key=KEY,
            max_retries=0,
            timeout=PATIENCE_S,
            http_client=http,
        )

    @contextlib.contextmanager
    def at_each(self) -> Iterator[dict[int, httpx.Client]]:
        """A client of each front end, by its process: while it connects, the others are stopped."""
        processes, clients = self.front_ends(), {}
        with contextlib.ExitStack() as stack:
            for pid in processes:
                others = [other for other in processes.values() if other.pid != pid]
                head = {"authorization": f"Bearer {KEY}"}
                client = httpx.Client(
                    base_url=self.base, headers=head, timeout=PATIENCE_S, limits=KEPT_OPEN
                )
                clients[pid] = stack.enter_context(client)
                for other in others:
                    other.suspend()
                try:
                    assert client.get("/live").status_code == 200
                finally:
                    for other in others:
                        other.resume()
            yield clients

    def ask(self, **more) -> str:
        with self.client() as client:
            return client.completions.create(**SHORT | more).choices[0].text

    def get(self, path: str, key: str = KEY) -> httpx.Response:
        return httpx.get(
            self.base + path, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE_S
        )

    def metric(self, name: str) -> float:
        found = re.findall(
            rf"^slipstream:{re.escape(name)} (\S+)$", self.get("/metrics").text, re.MULTILINE
        )
        return float(found[0]) if found else 0.0

    def until(self, condition, what: str) -> None:
        wait_for(condition, lambda: f"{what}\n{self._log.read_text()}")

    def until_draining(self) -> None:
        with self.at_each() as clients:
            for client in clients.values():
                self.until(
                    lambda client=client: client.get("/ready").status_code == 503,
                    "a front end was not told",
                )

    def num_answers(self) -> int:
        """Whole answers by the log; a line comes behind its answer."""
        return sum(
            line.get("route") == "/v1/completions" and line.get("status") == 200
            for line in self.log()
        )

    def is_quiet(self) -> bool:
        """Tells whether every answer has its line in the log and its count."""
        return self.metric(ANSWERS) == self.num_answers()

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
    with socket.socket() as ours:  # which keeps a port for gRPC, and never listens there
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        ours.bind(("127.0.0.1", 0))
        port = ours.getsockname()[1]
        with contextlib.closing(Served(tiny_path, f"--grpc-port={port}")) as server:
            server.grpc_port = port
            yield server


@pytest.fixture
def another(tiny_path):
    with contextlib.ExitStack() as stack:
        yield lambda *options, model=tiny_path: stack.enter_context(
            contextlib.closing(Served(model, *options))
        )


class Streams:
    """Long answers under way, each on a connection of its own."""

    def __init__(
        self, served: Served, number: int, clients: Sequence[openai.OpenAI] = (), **more
    ) -> None:
        self.clients = [*clients] or [served.client() for _ in range(number)]
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


def words_of(process: psutil.Process) -> list[str]:
    """Command line of a process; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


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
            return "".join(
                c.choices[0].text
                for c in client.completions.create(**SHORT | {"max_tokens": 30}, stream=True)
            )

    def both_have_their_part() -> bool:
        """Connections go to who has fewer, unless the system keeps that one waiting for its turn."""
        served.until(served.is_quiet, "a line is missing in the log")
        before = len(served.log())
        with ThreadPoolExecutor(LIMIT) as pool:
            assert set(pool.map(stream, range(3 * LIMIT))) == {whole}

        def seen() -> list[int]:
            return [
                line["front_end"]
                for line in served.log()[before:]
                if line.get("route") == "/v1/completions"
            ]

        served.until(lambda: len(seen()) >= 3 * LIMIT, "a request is not in the log")
        assert len(seen()) == 3 * LIMIT
        return min(seen().count(1), seen().count(2)) >= LIMIT

    served.until(both_have_their_part, "one of them takes nearly all connections")


def test_probes_and_keys_at_each(served):
    for _ in range(6):  # a connection each
        assert served.get("/v1/models", key="another").status_code == 401
        assert served.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert {
            served.get(path, key="none").status_code for path in ("/live", "/ready", "/health")
        } == {200}


def test_the_limit_is_of_all_together(served):
    with Streams(served, LIMIT, n=8):  # long enough for what is asked meanwhile
        for _ in range(4):
            with pytest.raises(openai.RateLimitError) as caught:
                served.ask()
            assert caught.value.code == "overloaded"
    served.until(served.is_idle, "the requests of clients that left were not cancelled")
    with Streams(served, LIMIT):  # every place is free again
        pass
    served.until(served.is_idle, "the requests of clients that left were not cancelled")


def test_a_conversation_goes_on_at_any_front_end(served):
    with served.at_each() as connections:
        clients = [served.openai(connection) for connection in connections.values()]
        previous, ask = None, {"model": "tiny", "max_output_tokens": 2, "temperature": 0}
        for client in clients * 4:
            answer = client.responses.create(input="hello", previous_response_id=previous, **ask)
            previous = answer.id
        assert len(list(clients[1].responses.input_items.list(previous))) == 15

        def answered() -> set[int]:
            return {
                line["front_end"]
                for line in served.log()
                if line.get("route", "").startswith("/v1/responses")
            }

        served.until(lambda: answered() == {1, 2}, "one of them answered all")


def test_metrics_add_up(served):
    tokens = 'generation_tokens_total{model_name="tiny"}'
    finished = 'e2e_request_latency_seconds_count{model_name="tiny"}'
    served.until(served.is_quiet, "an answer is not counted")
    before = {name: served.metric(name) for name in (ANSWERS, tokens, finished)}
    for _ in range(6):
        served.ask()

    def added() -> dict[str, float]:
        return {name: served.metric(name) - before[name] for name in before}

    for _ in range(4):  # whichever front end is asked; it counts behind the answer
        served.until(lambda: added() == {ANSWERS: 6, tokens: 18, finished: 6}, "they do not add up")


# --- What dies ------------------------------------------------------------------------------------------------------


def test_a_front_end_that_is_killed_is_replaced(served):
    tokens = 'generation_tokens_total{model_name="tiny"}'
    served.until_all_serve()
    served.until(served.is_quiet, "an answer is not counted")
    counted, generated = served.metric(ANSWERS), served.metric(tokens)
    old = served.front_ends()
    victim = next(iter(old))
    with contextlib.ExitStack() as stack:
        connections = [at for _ in range(3) for at in stack.enter_context(served.at_each()).items()]
        staying = [served.openai(connection) for pid, connection in connections if pid != victim]
        dying = [served.openai(connection) for pid, connection in connections if pid == victim]
        with Streams(served, 3, staying) as whole, Streams(served, 3, dying, n=16) as cut:
            os.kill(victim, signal.SIGKILL)
            assert cut.finish() == [False] * 3
            assert whole.finish() == [True] * 3
    served.until(served.is_idle, "requests of the front end that died are still computed")
    assert served.metric(tokens) - generated < 800 * (3 + 0.5 * 3 * 16)
    served.until(
        lambda: served.metric(ANSWERS) == counted + 3, "what the dead one had counted is gone"
    )
    served.until_all_serve()
    new = served.front_ends()
    assert len(new) == 2
    assert new.keys() - old.keys() and victim not in new  # noqa: PT018
    with Streams(served, LIMIT):  # its places are free
        assert served.metric(ANSWERS) >= counted + 3
    served.until(served.is_idle, "the requests of clients that left were not cancelled")


def test_an_engine_that_is_killed_is_started_again(served):
    served.until_all_serve()
    front_ends, engine = served.front_ends(), served.engine()
    with Streams(served, 4) as streams:
        os.kill(engine, signal.SIGKILL)
        assert streams.finish() == [False] * 4
    with pytest.raises(openai.InternalServerError) as caught:
        [served.ask() for _ in range(100)]
    assert caught.value.status_code == 503
    assert caught.value.code in ("engine_dead", "engine_down")
    served.until(lambda: served.get("/ready").status_code == 200, "the engine did not come back")
    served.until_all_serve()
    assert served.front_ends().keys() == front_ends.keys()
    assert served.engine() != engine
    down = [line for line in served.log() if "the engine is down" in line["message"]]
    assert [
        line.get("front_end", 0) for line in sorted(down, key=lambda line: line.get("front_end", 0))
    ] == [0, 1, 2]


def test_grpc_at_all_front_ends(served):
    """Both listen on one port, as does one that took another's place; each call has a connection of its own."""
    import numpy as np
    import tritonclient.grpc as triton

    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"hello"], dtype=np.object_))
    found = set()
    for i in range(24):
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.primary_user_agent", str(i))]
        with triton.InferenceServerClient(
            f"127.0.0.1:{served.grpc_port}", channel_args=options
        ) as client:
            parameters = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
            answer = client.infer(
                "tiny", [text], parameters=parameters, headers={"authorization": f"Bearer {KEY}"}
            )
            found.add(answer.as_numpy("text_output")[0].decode())
    assert found == {"hello" + served.ask()}

    def answered() -> set[int]:
        return {line["front_end"] for line in served.log() if line.get("route") == "ModelInfer"}

    served.until(lambda: answered() == {1, 2}, "one of them answered all")


# --- The end --------------------------------------------------------------------------------------------------------


def test_sigterm_drains_all_front_ends(another):
    served = another("--drain-timeout=1000")
    with Streams(served, 4, n=4) as streams, ThreadPoolExecutor(1) as pool:
        with served.stopped_engine():  # the answers wait for what is asked meanwhile
            ends = pool.submit(streams.finish)
            served.process.send_signal(signal.SIGTERM)
            served.until_draining()
            refused = {served.get("/ready", key="none").status_code for _ in range(4)}
            with pytest.raises(openai.InternalServerError) as caught:
                served.ask()
            assert not ends.done()
        assert refused == {503}
        assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
        assert ends.result() == [True] * 4
    assert served.process.wait(PATIENCE_S) == 0
    served.until_nothing_is_left()


def test_a_second_signal_does_not_wait_and_a_second_model_shortens(another, tiny_path, tmp_path):
    (tmp_path / "small").symlink_to(tiny_path)
    served = another("--drain-timeout=1000", f"--context-model={tmp_path / 'small'}")
    for _ in range(2):  # at each front end
        with served.client() as client:
            answer = client.chat.completions.create(
                model="tiny",
                messages=[
                    {"role": "user", "content": "Say hello. " * 30},
                    {"role": "user", "content": "Now."},
                ],
                max_tokens=3,
                extra_body={"compress_prompt": {"keep": 0.5}},
            )
        told = answer.usage.model_dump()["prompt_compression"]
        assert told["tokens_after"] < told["tokens_before"]
    with Streams(served, 4, n=4) as streams:
        with served.stopped_engine():
            served.process.send_signal(signal.SIGINT)
            served.until_draining()  # two signals at once would be one
        served.process.send_signal(signal.SIGINT)
        assert streams.finish() == [False] * 4
    assert served.process.wait(PATIENCE_S) == 0
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
        plain.sendall(
            b"GET /live HTTP/1.1\r\n\r\n"
        )  # no TLS: it is hung up on, and nobody else notices
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
    with served.at_each() as clients:
        for client in clients.values():  # each hears of it at its own time
            served.until(
                lambda client=client: "stays down" in client.get("/health").text,
                "a front end was not told",
            )
            assert client.get("/live").status_code == 200
            assert "stays down" in client.get("/health").json()["error"]["message"]
    victim = next(iter(served.front_ends()))
    os.kill(victim, signal.SIGKILL)  # its place can't be taken: the model is another
    served.until(
        lambda: sum("will be replaced" in line["message"] for line in served.log()) >= 2,
        "it is not tried again",
    )
    assert "stays down" in served.get("/health").text
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(PATIENCE_S) == 0


def test_what_a_front_end_finds_wrong_at_the_start_is_said(tiny_path, tmp_path):
    copy_of(tiny_path, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "serve",
        str(tmp_path / "model"),
        "--api-servers=2",
        "--port=0",
    ]
    paths = os.pathsep.join(path for path in sys.path if path)
    found = subprocess.run(
        [*command, "--device=cpu"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert found.returncode == 3
    assert "tokenizer.json" in found.stderr
    assert "Traceback" not in found.stderr


# --- The parts ------------------------------------------------------------------------------------------------------


def test_requests_are_counted_over_all_front_ends():
    memory = memoryview(bytearray(ServerLoad.size(3)))
    first, second, third = (ServerLoad(memory, slot) for slot in range(3))
    assert [load.begin_request(3) for load in (first, second, second, third, first)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert third.num_requests == 3
    second.clear()  # it died
    assert third.begin_request(2)
    first.end_request()
    assert first.num_requests == 1
    assert not ServerLoad().is_shared


def test_who_has_fewer_connections_takes_the_next():
    memory = memoryview(bytearray(ServerLoad.size(2)))
    first, second = ServerLoad(memory, 0), ServerLoad(memory, 1)
    assert not first.has_most_connections
    first.set_connections(1)
    assert first.has_most_connections
    assert not second.has_most_connections
    assert first.num_requests == 0


async def test_connections_go_to_who_has_fewer():
    """Two acceptors on one loop look at the same moment, however busy the machine is."""
    memory, taken = memoryview(bytearray(ServerLoad.size(2))), ([], [])

    class Protocol(asyncio.Protocol):
        def __init__(self, of) -> None:
            self.of = of

        def connection_made(self, transport) -> None:
            self.of.append(transport)

    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        listener.setblocking(False)
        for slot, of in enumerate(taken):
            own = stack.enter_context(listener.dup())
            acceptor = Acceptor(
                own,
                ServerLoad(memory, slot),
                lambda of=of: Protocol(of),
                lambda of=of: len(of),
                None,
            )
            stack.callback(acceptor.close)
        for number in range(1, 21):
            stack.enter_context(socket.create_connection(listener.getsockname()))
            while sum(map(len, taken)) < number:
                await asyncio.sleep(0.001)
            assert abs(len(taken[0]) - len(taken[1])) <= 1
        for transport in taken[0] + taken[1]:
            transport.close()


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
            supervisor = Supervisor(
                [EngineArgs(model=str(tiny_path))], ServerSettings(), listener, 1
            )
            supervisor._stop()
            served, error = await asyncio.wait_for(supervisor._live(0), PATIENCE_S)
            await asyncio.to_thread(supervisor._folder.remove)
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
    [
        ("cpu", 1, 64, 1),
        ("auto", 0, 64, 1),
        ("auto", 1, 16, 4),
        ("cuda:1", 0, 64, 8),
        ("auto", 1, 2, 1),
    ],
)
def test_how_many_are_chosen(monkeypatch, device, gpus, cores, number):
    from slipstream.costs import hardware

    monkeypatch.setattr(hardware, "gpus", lambda: (None,) * gpus)
    monkeypatch.setattr(hardware, "available_cores", lambda: cores)
    assert cli.choose_api_servers(device) == number
