"""Findings of a review: fair eviction of kept answers, clients that never read, hints where a
request went wrong."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest

from slipstream.errors import ConfigError
from slipstream.server.http import connection
from slipstream.server.openai.response_store import ResponseStore, StoredResponse
from tests.server.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S


def stored(name, size=10):
    return StoredResponse(name, None, {"text": "x" * size}, [])


@pytest.mark.parametrize(
    "bounds", [{"max_responses": 10, "max_bytes": 2**20}, {"max_responses": 1000, "max_bytes": 300}]
)
async def test_who_keeps_most_loses_first(bounds):
    """A flood of one owner leaves another's few answers alone."""
    store = ResponseStore(None, **bounds)
    for i in range(3):
        await store.put("ann", stored(f"ann-{i}"))
    for i in range(100):
        await store.put("flood", stored(f"flood-{i}"))
    assert [(await store.get("ann", f"ann-{i}")) is not None for i in range(3)] == [True] * 3
    assert await store.get("flood", "flood-99") is not None
    assert await store.get("flood", "flood-0") is None
    for i in range(100):
        await store.put("", stored(f"none-{i}"))
    found = [await store.get("flood", f"flood-{i}") is not None for i in range(100)]
    assert sum(found) >= 3, "the two share what ann leaves"
    store.close()


async def test_a_long_answer_takes_from_each_who_holds_most_in_turn():
    store = ResponseStore(None, max_responses=1000, max_bytes=3000)
    for name, size in (("a0", 500), ("a1", 500), ("a2", 500), ("b0", 650), ("b1", 650)):
        await store.put(name[0], stored(name, size))
    await store.put("c", stored("c0", 1200))  # a has most, and then b
    left = [n for n in ("a0", "a1", "a2", "b0", "b1", "c0") if await store.get(n[0], n) is not None]
    assert left == ["a1", "a2", "b1", "c0"]
    store.close()


def test_a_client_that_never_reads_is_cut(serve, monkeypatch):
    monkeypatch.setattr(connection, "WRITE_IDLE_S", 0.3)
    engine = FakeEngine(max_model_len=2**20)
    server = serve(engine)
    body = json.dumps(
        {"model": "fake", "prompt": "x", "max_tokens": 2**19, "stream": True, "logprobs": 3}
    ).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
        client.sendall(head % len(body) + body)
        server.wait_for(lambda: engine.running == 1, "it does not begin")
        server.wait_for(lambda: engine.running == 0, "it is never cut")
    server.wait_idle()


def test_a_client_that_reads_slowly_is_not(serve, monkeypatch):
    monkeypatch.setattr(connection, "WRITE_IDLE_S", 3.0)  # the client may be held up itself
    server = serve(FakeEngine(max_model_len=2**20))
    body = {"model": "fake", "prompt": "x", "max_tokens": 6000, "stream": True, "logprobs": 3}
    until = time.monotonic() + 3.5
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        text = b""
        for part in answer.iter_raw(8192):
            text += part
            if time.monotonic() < until:
                time.sleep(0.05)
    assert text.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("method", "path", "status", "hint"),
    [
        ("GET", "/v1/completions", 405, "it takes POST"),
        ("PUT", "/v1/files", 405, "it takes GET, POST"),
        ("POST", "/v1/chat/completion", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/v1/response", 404, "did you mean /v1/responses?"),
        ("POST", "/v1/v1/embeddings", 404, "did you mean /v1/embeddings?"),
        ("GET", "/secret-of-a-client", 404, "see /openapi.json"),
    ],
)
def test_hints_of_routes(shared, method, path, status, hint):
    answer = httpx.request(method, shared.url + path, timeout=PATIENCE_S)
    assert answer.status_code == status
    assert hint in answer.json()["error"]["message"]
    assert "secret" not in answer.text
    if status == 405:
        assert "POST" in answer.headers["allow"]


def test_a_fleets_own_routes_are_in_no_hint():
    from types import SimpleNamespace

    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    from slipstream.server.http.errors import _no_route

    app = SimpleNamespace(routes=[Route("/fleet/resume", lambda request: None)])
    request = SimpleNamespace(scope={"path": "/resume"}, app=app)
    assert "fleet" not in _no_route(request, HTTPException(404)).message


@pytest.mark.parametrize(
    ("address", "warns"),
    [
        ("tcp://0.0.0.0:7788", True),
        ("tcp://[::]:7788", True),
        ("tcp://127.0.0.1:7788", False),
        ("unix:here", False),
        (None, False),
    ],
)
def test_an_open_hand_over_is_warned_of(caplog, address, warns):
    from slipstream.frontend.guard import warn_of_start
    from slipstream.server.state import ServerSettings

    warn_of_start(ServerSettings(), None, address)
    assert ("kv_handover_address asks for no key" in caplog.text) == warns


@pytest.mark.parametrize(
    ("field", "hint"), [("max_tokens", "max_output_tokens"), ("messages", "input")]
)
def test_hints_of_responses(shared, field, hint):
    answer = httpx.post(
        shared.url + "/v1/responses",
        json={"model": "fake", "input": "x", field: 5},
        timeout=PATIENCE_S,
    )
    assert answer.json()["error"]["message"].endswith(f"; here it is {hint}")


def test_a_taken_grpc_port_names_the_flag(serve, capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="--grpc-port") as caught:
            serve(grpc_port=taken.getsockname()[1])
    assert caught.value.field == "grpc_port"
    assert "bind" not in capfd.readouterr().err


@pytest.mark.model
def test_the_type_of_a_gguf_file():
    from slipstream.hub import resolve_model
    from slipstream.spec.description import read_spec

    assert read_spec(resolve_model("smollm2")).gguf_type == "Q4_1"
