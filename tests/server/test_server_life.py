"""Clients that leave, engines that die, servers that stop or are full; keys, metrics and the log."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from slipstream.errors import ConfigError
from slipstream.messages.stats import CanaryResult
from slipstream.server.http.auth import OPEN_ROUTES
from slipstream.server.http.record import ROUTES, LogFormatter
from slipstream.server.operations.status import StatusMemory
from slipstream.server.run import bind, make_server
from slipstream.server.state import ServerSettings
from tests.server.conftest import lines_of
from tests.server.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S

COMPLETION = {"model": "fake", "prompt": "hi", "max_tokens": 400}
SLOW = 0.1  # s a token: 400 tokens are 40 s, longer than any of these tests lasts


# --- Clients that leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"prompt": ["a", "b", "c"]}])
def test_leaving_a_stream_frees_the_request(serve, more):
    server = serve(FakeEngine(delay_s=SLOW))
    with server.client() as client:
        stream = client.completions.create(**COMPLETION | more, stream=True)
        next(stream)
        assert server.engine.running == len(
            more.get("prompt", [1]) if isinstance(more.get("prompt"), list) else [1]
        )
        stream.close()
    server.wait_idle()
    assert server.engine.generation_tokens < 400
    server.wait_for(
        lambda: server.state.metrics.responses["POST", "/v1/completions", 499], "no 499 was counted"
    )


@pytest.mark.parametrize("more", [{}, {"prompt": ["a", "b"]}])
def test_leaving_while_waiting_for_the_whole_answer_frees_the_request(serve, more):
    server = serve(FakeEngine(delay_s=SLOW))
    body = json.dumps(COMPLETION | more).encode()
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        server.wait_for(lambda: server.engine.running, "it did not begin")
    server.wait_idle()
    assert server.engine.started >= 1
    assert server.engine.generation_tokens < 400
    server.wait_for(
        lambda: server.state.metrics.responses["POST", "/v1/completions", 499], "no 499 was counted"
    )


@pytest.mark.parametrize("prompts", [["hi"], ["a", "b", "c"]])
def test_leaving_without_reading_frees_the_request(serve, prompts):
    """The client stops reading until the socket's buffers are full, then goes: the task hangs in `send` meanwhile."""
    server = serve(FakeEngine(max_model_len=10**9))
    with server.client() as client:
        body = COMPLETION | {"prompt": prompts, "max_tokens": 10**8, "n": 20}
        stream = client.completions.create(**body, stream=True)
        next(stream)

        (connection,) = server.server.server_state.connections

        def nothing_is_written():
            """Waits until nothing is written during a thousand tokens. The system may find room
            for more at first."""
            paused = connection.flow.write_paused
            written = connection.transport.get_write_buffer_size()
            made = server.engine.generation_tokens
            server.wait_for(
                lambda: server.engine.generation_tokens > made + 1000,
                "the engine waits for a client",
            )
            return (
                paused
                and connection.flow.write_paused
                and connection.transport.get_write_buffer_size() == written
            )

        server.wait_for(nothing_is_written, "the client's socket took everything")
        assert server.engine.running == len(prompts)
        stream.close()
    server.wait_idle()


def test_requests_that_end_are_not_taken_for_disconnects(serve):
    server = serve()
    with server.http() as http:
        for stream in (False, True) * 20:
            http.post(
                "/v1/completions", json=COMPLETION | {"max_tokens": 3, "stream": stream}
            ).raise_for_status()
    assert set(server.state.metrics.responses) == {("POST", "/v1/completions", 200)}


# --- Engines that die -----------------------------------------------------------------------------------------------


def test_requests_fail_when_the_engine_dies(serve):
    server = serve(FakeEngine())
    engine = server.engine
    engine.fail_after = 2
    with server.client() as client, server.http() as http:
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**COMPLETION)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_dead")
        chunks = []
        stream = client.completions.create(**COMPLETION, stream=True)
        with pytest.raises(openai.APIError, match="killed by signal 9"):
            chunks.extend(chunk.choices[0].text for chunk in stream)
        assert chunks == ["h", "i"]
        text = http.post("/v1/completions", json=COMPLETION | {"stream": True}).text
        assert (
            json.loads(text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"]
            == "engine_dead"
        )
        assert "[DONE]" not in text

        engine.dead = True
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**COMPLETION)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_down")
        assert caught.value.response.headers["retry-after"]
        for path, status in (("/live", 200), ("/ready", 503), ("/health", 503)):
            answer = http.get(path)
            assert answer.status_code == status
            assert status == 200 or "process is down" in answer.json()["error"]["message"]
        metrics = http.get("/metrics").text
        assert 'slipstream:engine_up{model_name="fake"} 0.0' in metrics
        assert "num_requests_running{" not in metrics

        engine.dead, engine.fail_after, engine.stuck = False, None, "no step for 61 s"
        assert "61 s" in http.get("/health").json()["error"]["message"]
        engine.stuck = ""
        assert [http.get(path).status_code for path in ("/live", "/ready", "/health")] == [200] * 3
        assert http.get("/health").json() == {"status": "healthy"}
        engine.canary = CanaryResult(
            ok=False, kl_mean=2.5, kl_max=math.nan, top1_agreement=0.1, limit=0.05, num_tokens=48
        )
        assert http.get("/health").json()["canary"] == {
            "ok": False,
            "kl_mean": 2.5,
            "kl_max": None,
            "top1_agreement": 0.1,
            "limit": 0.05,
            "num_tokens": 48,
        }
        client.completions.create(**COMPLETION)
    server.wait_idle()


def test_one_bad_prompt_of_several_frees_the_others(serve):
    server = serve(FakeEngine(delay_s=SLOW))
    with server.client() as client, pytest.raises(openai.BadRequestError):
        client.completions.create(**COMPLETION | {"prompt": [[97], [999], [98]]})
    server.wait_idle()
    assert server.engine.generation_tokens < 10


# --- Servers that are full ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"max_concurrent_requests": 2}, {"max_queue": 2}])
def test_requests_beyond_the_queue_are_refused(serve, settings):
    queue = settings.pop("max_queue", None)
    server = serve(FakeEngine(delay_s=SLOW, max_queue=queue), **settings)
    with server.client() as client:
        streams = [client.completions.create(**COMPLETION, stream=True) for _ in range(2)]
        for stream in streams:
            next(stream)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**COMPLETION, stream=True)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.type == "rate_limit_error"
        with server.http() as http:
            assert http.get("/health").status_code == 200
        for stream in streams:
            stream.close()
        server.wait_idle()
        client.completions.create(**COMPLETION | {"max_tokens": 1})


# --- Servers that stop ----------------------------------------------------------------------------------------------


def test_drain_lets_requests_end_and_refuses_new_ones(serve):
    server = serve(FakeEngine(delay_s=SLOW))
    with server.client() as client, server.http() as http, ThreadPoolExecutor() as pool:
        stream = client.completions.create(**COMPLETION | {"max_tokens": 100}, stream=True)
        whole = pool.submit(client.completions.create, **COMPLETION | {"max_tokens": 100})
        next(stream)
        server.wait_for(lambda: server.engine.started == 2, "the second request did not start")
        server.begin_stop()
        server.wait_for(lambda: server.state.draining, "it does not drain")
        for path, status in (("/ready", 503), ("/live", 200), ("/health", 200)):
            assert http.get(path).status_code == status
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**COMPLETION)
        assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
        server.engine.delay_s = 0.0
        assert "".join(c.choices[0].text for c in stream) == ("hi" * 50)[1:]
        assert whole.result().choices[0].text == "hi" * 50
    server.join()
    assert server.engine.was_shut_down


def test_drain_has_an_end(serve):
    server = serve(FakeEngine(delay_s=SLOW), drain_timeout_s=0.1)
    with server.client() as client, ThreadPoolExecutor() as pool:
        stream = client.completions.create(**COMPLETION, stream=True)
        whole = pool.submit(client.completions.create, **COMPLETION)
        next(stream)
        server.wait_for(lambda: server.engine.started == 2, "the second request did not start")
        server.begin_stop()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        with pytest.raises(openai.InternalServerError) as caught:
            whole.result()
        assert caught.value.code == "shutting_down"
    server.join()
    assert server.engine.running == 0


def test_a_second_signal_ends_the_wait(serve, caplog):
    caplog.set_level("INFO")
    server = serve(FakeEngine(delay_s=SLOW), drain_timeout_s=1000)
    with server.client() as client:
        stream = client.completions.create(**COMPLETION, stream=True)
        next(stream)
        server.begin_stop()
        server.begin_stop()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
    server.join()
    assert (
        "draining: 1 request in flight, for 1000 s at most; a second signal ends at once"
        in caplog.messages
    )


async def test_work_behind_a_server_ends_at_whatever_moment_it_is_to(monkeypatch):
    """The end of a server waits for such work, even if the engine's figures come in the same turn
    of the loop."""
    state = make_server(FakeEngine(), ServerSettings()).state
    monkeypatch.setattr(StatusMemory, "EVERY_S", 0.0)
    for turns in range(20):
        task = asyncio.create_task(state.background[0]())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled(), f"after {turns} turns"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_process_with_0(number):
    program = """
import asyncio
from tests.server.fake_engine import FakeEngine
from slipstream.server.run import bind, serve, url
from slipstream.server.state import ServerSettings
settings = ServerSettings(port=0)
listener = bind(settings)
async def main():
    announce = lambda: print(url(settings, listener), flush=True)
    await serve(FakeEngine(delay_s=0.01), settings, listener, on_ready=announce)
asyncio.run(main())
"""
    paths = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    base = process.stdout.readline().strip()
    with openai.OpenAI(base_url=base + "/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(**COMPLETION | {"max_tokens": 50}, stream=True)
        next(stream)
        process.send_signal(number)
        assert len(list(stream)) == 49
    assert process.wait(PATIENCE_S) == 0


# --- Keys -----------------------------------------------------------------------------------------------------------


def test_keys_guard_every_route_but_the_probes(serve):
    server = serve(api_keys=("first-key", "second-key"))
    with server.http() as http:
        for path in sorted(ROUTES | {"/v1/models/fake", "/nothing", "/"}):
            for method in ("GET", "POST"):
                for headers in (
                    {},
                    {"authorization": "Bearer wrong"},
                    {"authorization": "first-key"},
                    {"authorization": "Basic first-key"},
                    {"authorization": "Bearer first-key second-key"},
                    {"authorization": b"Bearer \xff\xfe"},
                ):
                    answer = http.request(method, path, headers=headers)
                    if path in OPEN_ROUTES:
                        assert "serves" not in answer.text[:40]  # `/` names no models
                        assert answer.status_code == (
                            200 if method == "GET" or path == "/ping" else 405
                        )
                    else:
                        assert answer.status_code == 401
                        error = answer.json()["error"]  # in the shape of the route's protocol
                        assert "API key" in (error if isinstance(error, str) else error["message"])
                        assert (
                            isinstance(error, str)
                            or error.get("code", "invalid_api_key") == "invalid_api_key"
                        )
    for key in ("first-key", "second-key"):
        with server.client(api_key=key) as client:
            client.models.list()
            client.completions.create(**COMPLETION)
        with server.http(headers={"x-api-key": key}) as http:
            assert http.get("/metrics").status_code == 200
        with server.http(headers={"authorization": f"bearer {key}"}) as http:
            assert http.get("/metrics").status_code == 200
            assert http.get("/nothing").status_code == 404
    with server.client(api_key="first-ke") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


# --- What can be seen -----------------------------------------------------------------------------------------------


def value_of(metrics: str, sample: str) -> float:
    (line,) = [line for line in metrics.splitlines() if line.startswith(sample + " ")]
    return float(line.rpartition(" ")[2])


def test_metrics_count_by_finish_reason_and_name_no_path(serve):
    server = serve(FakeEngine(delay_s=0.001), served_model_names=("m",))
    with server.http() as http:
        body = {"model": "m", "prompt": "hi", "n": 2, "max_tokens": 5}
        for stream in (False, True):
            http.post("/v1/completions", json=body | {"stream": stream}).raise_for_status()
        http.post("/v1/completions", json=body | {"zap": 1})
        http.get("/etc/passwd")
        http.get("/v1/models/m")
        text = http.get("/metrics").text
    for name, count in (
        ("time_to_first_token_seconds", 2),
        ("e2e_request_latency_seconds", 2),
        ("inter_token_latency_seconds", 2 * 2 * 4),
        ("time_per_output_token_seconds", 2 * 2),
    ):
        assert value_of(text, f'slipstream:{name}_count{{model_name="m"}}') == count
        assert value_of(text, f'slipstream:{name}_bucket{{le="+Inf",model_name="m"}}') == count
        buckets = [float(v) for v in re.findall(rf"slipstream:{name}_bucket\S+ (\S+)", text)]
        assert buckets == sorted(buckets)
        assert value_of(text, f'slipstream:{name}_sum{{model_name="m"}}') > 0
    for name, value in (
        ("num_requests_running", 0),
        ("num_requests_waiting", 0),
        ("kv_cache_usage_ratio", 0.25),
        ("prompt_tokens_total", 6),
        ("generation_tokens_total", 20),
        ("num_preemptions_total", 3),
        ("prefix_cache_queries_total", 10),
        ("prefix_cache_hits_total", 4),
        ("expert_rank_imbalance_ratio", 1.25),
        ("experts_moved_total", 4),
        ("engine_up", 1),
    ):
        assert value_of(text, f'slipstream:{name}{{model_name="m"}}') == value
    for expert, tokens in enumerate((5, 0, 7)):
        assert (
            value_of(
                text,
                f'slipstream:expert_tokens_total{{expert="{expert}",layer="1",model_name="m"}}',
            )
            == tokens
        )
    assert (
        value_of(text, 'slipstream:request_success_total{finish_reason="length",model_name="m"}')
        == 4
    )
    assert (
        value_of(text, 'slipstream:request_success_total{finish_reason="stop",model_name="m"}') == 0
    )
    for method, route, status, count in (
        ("POST", "/v1/completions", 200, 2),
        ("POST", "/v1/completions", 400, 1),
        ("GET", "other", 404, 1),
        ("GET", "/v1/models/{id}", 200, 1),
    ):
        labels = f'method="{method}",route="{route}",status="{status}"'
        assert value_of(text, f"slipstream:http_requests_total{{{labels}}}") == count
    assert "passwd" not in text


def test_two_apps_share_no_metrics(serve):
    first, second = serve(), serve()
    with first.client() as client:
        client.completions.create(**COMPLETION)
    with second.http() as http:
        assert (
            value_of(
                http.get("/metrics").text,
                'slipstream:e2e_request_latency_seconds_count{model_name="fake"}',
            )
            == 0
        )


@pytest.mark.parametrize("stream", [False, True])
def test_one_log_line_a_request(serve, caplog, stream):
    server = serve(api_keys=("secret-key",))
    caplog.set_level(logging.INFO, "slipstream.access")
    with server.http(headers={"authorization": "Bearer secret-key"}) as http:
        answer = http.post(
            "/v1/completions",
            json=COMPLETION | {"prompt": "private", "max_tokens": 3, "stream": stream},
        )
        http.post("/v1/completions", json={"model": "fake", "private": 1})
        http.get("/live")
        http.get("/private")
    server.wait_for(
        lambda: len(lines_of(caplog, "slipstream.access")) == 3, "the lines did not come"
    )
    records = lines_of(caplog, "slipstream.access")
    lines = [json.loads(LogFormatter(json=True).format(record)) for record in records]
    done, bad, unknown = lines
    assert done.pop("ttft_s") <= done.pop("e2e_s")
    assert done.pop("time").endswith("Z")
    assert done == {
        "level": "info",
        "message": "request",
        "id": answer.headers["x-request-id"],
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "prompt_tokens": 8,
        "output_tokens": 3,
    }
    assert (bad["status"], bad["error"]) == (400, "invalid_field")
    assert (unknown["status"], unknown["route"]) == (404, "other")
    text = " ".join(LogFormatter(json=False).format(record) for record in records)
    assert "prompt_tokens=8 output_tokens=3" in text
    assert "private" not in text + str(lines)
    assert "secret" not in text + str(lines)


# --- Settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"port": -1}, "port"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"drain_timeout_s": -1}, "drain_timeout_s"),
        ({"log_format": "xml"}, "log_format"),
        ({"api_keys": ("a b",)}, "api_keys"),
        ({"api_keys": ("",)}, "api_keys"),
        ({"served_model_names": ("",)}, "served_model_names"),
        ({"ssl_keyfile": "k"}, "ssl_certfile"),
        ({"batch_beside": 2}, "batch_beside"),  # without files_dir
        ({"max_file_bytes": 2}, "max_file_bytes"),
        ({"cors_origins": ("https://a.example", "https://chat.example/")}, "cors_origins"),
        ({"cors_origins": ("chat.example",)}, "cors_origins"),
        ({"cors_origins": ("https://Chat.example",)}, "cors_origins"),
        ({"cors_origins": ("https://chat.example:443",)}, "cors_origins"),
    ],
)
def test_wrong_settings_name_their_field(settings, field):
    with pytest.raises(ConfigError) as caught:
        ServerSettings(**settings)
    assert caught.value.field == field


def test_origins_as_browsers_send_them():
    some = (
        "*",
        "null",
        "http://localhost:3000",
        "https://chat.example",
        "http://[::1]:8081",
        "app://obsidian.md",
    )
    assert ServerSettings(cors_origins=some).cors_origins == some


def test_a_busy_port_and_a_bad_certificate_fail_early(tmp_path):
    taken = bind(ServerSettings(port=0))
    taken.listen()
    with pytest.raises(ConfigError, match="cannot listen"):
        bind(ServerSettings(port=taken.getsockname()[1]))
    taken.close()
    (tmp_path / "cert").write_text("nonsense")
    for name in ("cert", "missing"):
        with pytest.raises(ConfigError, match="certificate"):
            bind(ServerSettings(port=0, ssl_certfile=str(tmp_path / name)))
