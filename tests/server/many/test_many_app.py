"""A server of several models over HTTP: every protocol goes by the request's model name. The engines are fakes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from types import SimpleNamespace

import httpx
import pytest

from slipstream.cli.main import main
from slipstream.errors import DownloadError
from slipstream.server.many import about
from slipstream.server.many.app import create_many_app
from tests.server.conftest import RunningServer
from tests.server.many.many_models import DEAD, engines_of, model
from tests.support.waiting import wait_for


@contextlib.contextmanager
def serving(*models, memory=250, wait_s=30.0, **settings):
    async def start():
        return engines_of(*(models or ("a", "b", "c")), memory=memory, wait_s=wait_s)

    server = RunningServer(start, create_many_app, **settings)
    server.slots = server.engine.slots
    try:
        yield server
    finally:
        server.begin_stop()
        server.join()


@pytest.fixture(scope="module")
def server():
    with serving() as found:
        yield found


@pytest.fixture
def http(server):
    with server.http() as found:
        yield found


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
KSERVE = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}]}
BODIES = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {**CHAT, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {**CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": CHAT,
    "/v1/embeddings": {"input": "hi"},
    "/api/chat": {**CHAT, "options": {"num_predict": 2}, "stream": False},
    "/api/generate": {"prompt": "hi", "options": {"num_predict": 2}, "stream": False},
    "/api/embed": {"input": "hi"},
    "/completion": {"prompt": "hi", "n_predict": 2},
    "/tokenize": {"prompt": "hi"},
    "/api/show": {},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_protocol_goes_by_the_models_name(path, http, server):
    for name in ("b", "c"):
        loads = server.slots[name].engine and len(server.slots[name].engine.seen)
        answer = http.post(path, json=BODIES[path] | {"model": name})
        assert answer.status_code == 200, answer.text
        if loads is not None and "max" in str(BODIES[path]):
            assert len(server.slots[name].engine.seen) == loads + 1
    wrong = http.post(path, json=BODIES[path] | {"model": "zzz"})
    assert wrong.status_code == 404
    assert "use one of a, b, c" in wrong.text
    for body in ('{"model": 5}', "{", ""):
        assert (
            http.post(path, content=body, headers={"content-type": "application/json"}).status_code
            == 400
        )


def test_names_in_paths_queries_and_none(http, server):
    answer = http.post(
        "/v2/models/b/generate", json={"text_input": "hi", "parameters": {"max_tokens": 2}}
    )
    assert (answer.status_code, server.slots["b"].state) == (200, "loaded"), answer.text
    assert http.get("/v2/models/nope").status_code == 404
    assert http.get("/props", params={"model": "c"}).json()["model_alias"] == "c"
    named = http.post("/completion", json={"prompt": "hi", "n_predict": 1}).json()
    assert named["model"] == "a", "the first one, where none is named"
    for name in ("b:latest", "org/b"):
        body = {"model": name, "prompt": "hi", "max_tokens": 1}
        assert http.post("/v1/completions", json=body).status_code == 200


def test_a_load_is_told_in_a_header_and_in_ollamas_answer(http):
    http.post("/api/generate", json={"model": "a", "keep_alive": 0})
    told = http.post("/v1/completions", json={"model": "a", "prompt": "hi", "max_tokens": 1})
    assert int(told.headers["x-slipstream-model-load-ms"]) >= 0
    told = http.post("/v1/completions", json={"model": "a", "prompt": "hi", "max_tokens": 1})
    assert "x-slipstream-model-load-ms" not in told.headers
    http.post("/api/generate", json={"model": "a", "keep_alive": 0})
    said = http.post("/api/generate", json={"model": "a", "stream": False}).json()
    assert said["done_reason"] == "load"
    http.post("/api/generate", json={"model": "a", "keep_alive": 0})
    body = {"model": "a", "prompt": "hi", "options": {"num_predict": 1}, "stream": False}
    assert http.post("/api/generate", json=body).json()["load_duration"] > 0
    assert http.post("/api/generate", json=body).json()["load_duration"] == 0
    http.post("/api/generate", json=body | {"keep_alive": 60})
    assert 'request_hints_total{field="keep_alive"}' not in http.get("/metrics").text


def test_ollama_loads_unloads_and_lists(http, server):
    def loaded():
        return {m["name"]: m for m in http.get("/api/ps").json()["models"]}

    assert [m["name"] for m in http.get("/api/tags").json()["models"]] == ["a", "b", "c"]
    http.post("/api/generate", json={"model": "b", "keep_alive": "1h"})
    assert loaded()["b"]["size"] == 100
    assert (
        loaded()["b"]["expires_at"]
        > http.post("/api/generate", json={"model": "b"}).json()["created_at"]
    )
    assert server.slots["b"].keep_alive_s == 300
    gone = http.post("/api/generate", json={"model": "b", "keep_alive": "0"})
    assert (gone.json()["done_reason"], "b" in loaded()) == ("unload", False)
    gone = http.post("/api/chat", json={"model": "c", "messages": [], "keep_alive": 0})
    assert gone.json()["message"]["content"] == ""
    body = {"model": "c", "prompt": "hi", "keep_alive": 0, "options": {"num_predict": 1}}
    assert http.post("/api/generate", json=body).status_code == 200
    wait_for(lambda: "c" not in loaded(), "it stays no longer than its request")
    wrong = http.post("/api/generate", json={"model": "c", "prompt": "hi", "keep_alive": "soon"})
    assert (wrong.status_code, "keep_alive" in wrong.text) == (400, True)


def test_lists_say_the_state(http):
    assert http.post("/models/load", json={"model": "a"}).json() == {"success": True}
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert cards["a"]["status"] == {"value": "loaded", "failed": False}
    assert (cards["a"]["max_model_len"], cards["a"]["vocab_size"]) == (512, 256)
    assert http.get("/v1/models/a").json() == cards["a"]
    assert http.get("/v1/models/zzz").status_code == 404
    http.post("/models/unload", json={"model": "a"})
    assert http.get("/v1/models/a").json()["status"]["value"] == "unloaded"
    anthropic = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [m["id"] for m in anthropic["data"]] == ["a", "b", "c"]


def test_metrics_and_status_are_by_model(http):
    for name in ("a", "b"):
        http.post("/v1/completions", json={"model": name, "prompt": "hi", "max_tokens": 2})
    text = http.get("/metrics").text
    for line in (
        'slipstream:time_to_first_token_seconds_count{model_name="a"}',
        'slipstream:time_to_first_token_seconds_count{model_name="b"}',
        'slipstream:model_state{model_name="b",state="loaded"} 1.0',
        'slipstream:model_loads_total{model_name="a"}',
        "slipstream:models_memory_limit_bytes 250.0",
        'slipstream:engine_up{model_name="b"} 1.0',
    ):
        assert line in text, line
    status = http.get("/status.json").json()
    assert {r["name"]: r["state"] for r in status["replicas"]}["b"] == "ready"
    assert sum(status["latency"]["ttft_s"]["counts"]) >= 2


def test_a_request_whose_engine_dies_before_it_answers_is_given_to_the_next(server, http):
    http.post("/models/load", json={"model": "a"})
    engine = server.slots["a"].engine
    engine.fail_after = 0
    engine_calls = []

    async def load():
        engine.fail_after, engine.dead = None, False
        engine_calls.append(1)

    begin, server.slots["a"].load = server.slots["a"].load, load
    try:
        stream = {"model": "a", "prompt": "hi", "max_tokens": 2, "stream": True}
        dying = engine.answer

        async def answer(ids, sampling):
            async for delta in _failing(engine, dying, ids, sampling):
                yield delta

        engine.answer = answer
        for body in (stream, stream | {"stream": False}):
            engine.fail_after = 0
            answer_ = http.post("/v1/completions", json=body)
            assert answer_.status_code == 200, answer_.text
            assert "engine" not in answer_.text
        assert len(engine_calls) == 2
    finally:
        server.slots["a"].load, engine.answer = begin, dying


async def _failing(engine, answer, ids, sampling):
    if engine.fail_after == 0:
        engine.dead = True
    async for delta in answer(ids, sampling):
        yield delta


def test_a_load_that_fails_is_that_models_error_alone(server, http):
    http.post("/models/unload", json={"model": "c"})
    server.slots["c"].faults = [DEAD]
    body = {"model": "c", "prompt": "hi", "max_tokens": 1}
    refused = http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_load_failed")
    assert http.post("/v1/completions", json=body | {"model": "b"}).status_code == 200
    assert http.post("/v1/completions", json=body).status_code == 200


def test_a_cold_model_is_waited_for_within_a_bound():
    with serving(wait_s=0.05) as server, server.http() as http:

        async def hold():
            server.slots["a"].gate = asyncio.Event()

        server.call(hold())
        body = {"model": "a", "prompt": "hi", "max_tokens": 1}
        late = http.post("/v1/completions", json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "model_loading")
        assert late.headers["retry-after"]
        server.slots.wait_s = 30.0
        assert http.post("/v1/completions", json=body | {"model": "b"}).status_code == 200
        server.loop.call_soon_threadsafe(server.slots["a"].gate.set)
        wait_for(lambda: server.slots["a"].state == "loaded", "the load goes on")
        assert http.post("/v1/completions", json=body).status_code == 200


def test_models_are_pulled_and_deleted(server, http):
    lines = http.post("/api/pull", json={"model": "new"}).text.splitlines()
    assert [json.loads(line)["status"] for line in (lines[0], lines[-1])] == [
        "pulling manifest",
        "success",
    ]
    assert "new" in [m["name"] for m in http.get("/api/tags").json()["models"]]
    body = {"model": "new", "prompt": "hi", "max_tokens": 1}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert http.post("/api/pull", json={"model": "new", "stream": False}).json() == {
        "status": "success"
    }
    failed = http.post("/api/pull", json={"model": "none", "stream": False})
    assert (failed.status_code, failed.json()["error"]) == (404, "there is no model 'none'")
    assert "there is no model" in http.post("/api/pull", json={"model": "none"}).text
    assert http.request("DELETE", "/api/delete", json={"model": "new"}).status_code == 200
    assert http.request("DELETE", "/api/delete", json={"model": "new"}).status_code == 404
    assert http.post("/v1/completions", json=body).status_code == 404


def test_the_page_of_the_api_has_the_routes_of_several_models(http, shared):
    with shared.http() as other:
        paths, alone = (h.get("/openapi.json").json()["paths"] for h in (http, other))
    assert paths.keys() - alone.keys() == {
        "/api/pull",
        "/api/delete",
        "/models/load",
        "/models/unload",
    }
    assert list(paths["/api/delete"]) == ["delete"]


def test_who_may_change_the_models(tmp_path):
    with serving(host="0.0.0.0") as server, server.http() as http:
        refused = http.post("/api/pull", json={"model": "new"})
        assert (refused.status_code, "admin" in refused.text) == (403, True)
    # Any page may send it, or any page of this machine.
    for more in (
        {"cors_origins": ("*",)},
        {"cors_origins": ("localhost",)},
        {"allowed_hosts": ("*",)},
    ):
        with serving(**more) as server, server.http() as http:
            assert http.post("/api/pull", json={"model": "new"}).status_code == 403
            gone = http.request("DELETE", "/api/delete", json={"model": "a"})
            assert (gone.status_code, "a" in server.slots.slots) == (403, True)


def test_a_key_loads_only_its_models_and_its_wait_ends_with_the_client_and_the_server(
    tmp_path, capsys
):
    file = str(tmp_path / "keys.json")
    assert main(["keys", "add", file, "--model=a", "--json"]) == 0
    own = {"authorization": f"Bearer {json.loads(capsys.readouterr().out)['key']}"}
    with serving(keys_file=file, max_concurrent_requests=1, drain_timeout_s=1e6) as server:
        server.slots["a"].gate = asyncio.Event()
        with server.http(headers=own) as http:
            refused = http.post("/models/load", json={"model": "b"})
            assert refused.json()["error"]["code"] == "model_not_allowed"
            with pytest.raises(httpx.ReadTimeout):
                http.post("/models/load", json={"model": "a"}, timeout=0.3)
            wait_for(lambda: not server.slots["a"].waiters, "the client has left")
            found = []
            asks = threading.Thread(
                target=lambda: found.append(http.post("/models/load", json={"model": "a"}))
            )
            asks.start()
            wait_for(lambda: server.slots["a"].waiters, "it waits")
            many = httpx.post(f"{server.url}/models/load", json={"model": "a"}, headers=own)
            assert many.status_code == 429
            server.begin_stop()
            asks.join(10)
            assert [answer.status_code for answer in found] == [503]


def test_a_load_is_a_request_of_its_key(tmp_path, capsys):
    file = str(tmp_path / "keys.json")
    assert main(["keys", "add", file, "--requests-per-minute=1", "--json"]) == 0
    own = {"authorization": f"Bearer {json.loads(capsys.readouterr().out)['key']}"}
    with serving(keys_file=file) as server, server.http(headers=own) as http:
        found = [http.post("/models/load", json={"model": name}).status_code for name in "ab"]
        assert (found, server.slots["b"].state) == ([200, 429], "unloaded")


def test_a_key_over_its_limits_loads_no_model_by_any_route(tmp_path, capsys):
    file = str(tmp_path / "keys.json")
    assert main(["keys", "add", file, "--requests-per-minute=1", "--json"]) == 0
    own = {"authorization": f"Bearer {json.loads(capsys.readouterr().out)['key']}"}
    body = {"prompt": "hi", "max_tokens": 2}
    with serving(keys_file=file) as server, server.http(headers=own) as http:
        found = [http.post("/v1/completions", json=body | {"model": name}) for name in "ab"]
        assert [answer.status_code for answer in found] == [200, 429]
        assert [server.slots[name].state for name in "ab"] == ["loaded", "unloaded"]


def test_only_an_admin_unloads_by_keep_alive(tmp_path, capsys):
    file = str(tmp_path / "keys.json")
    keys = []
    for role in ("user", "admin"):
        assert main(["keys", "add", file, f"--role={role}", "--json"]) == 0
        keys.append({"authorization": f"Bearer {json.loads(capsys.readouterr().out)['key']}"})
    with serving(model("a"), keys_file=file) as server, server.http() as http:
        load, gone = {"model": "a"}, {"model": "a", "keep_alive": 0}
        assert http.post("/api/generate", json=load, headers=keys[0]).status_code == 200
        refused = http.post("/api/generate", json=gone, headers=keys[0])
        assert (refused.status_code, "admin" in refused.text) == (403, True)
        used = {"prompt": "hi", "stream": False, "options": {"num_predict": 1}}
        assert http.post("/api/generate", json=gone | used, headers=keys[0]).status_code == 200
        slot = server.slots["a"]
        assert (slot.state, slot.keep_alive_s) == ("loaded", slot.model.keep_alive_s)
        counted = http.get("/metrics", headers=keys[1]).text
        assert 'request_hints_total{field="keep_alive"} 1' in counted
        assert http.post("/api/generate", json=gone, headers=keys[1]).status_code == 200
        assert slot.state != "loaded"


def test_a_path_is_not_pulled(http, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in (str(tmp_path), f"{tmp_path}/../{tmp_path.name}"):
        refused = http.post("/api/pull", json={"model": name, "stream": False})
        assert (refused.status_code, "is a path" in refused.text) == (400, True)


def test_files_that_another_model_is_served_from_are_not_removed(monkeypatch):
    removed = []
    cached = {"org/a": ["one", "two"], "org/b": ["two"]}
    monkeypatch.setattr(
        about, "find_models", lambda name, folder: [SimpleNamespace(path=p) for p in cached[name]]
    )
    monkeypatch.setattr(about, "remove_model", lambda found, folder: removed.append(found.path))
    with serving("a", "b") as server, server.http() as http:
        assert http.request("DELETE", "/api/delete", json={"model": "a"}).status_code == 200
        assert removed == ["one"]

        def held(found, folder):
            raise DownloadError("it is being fetched")

        monkeypatch.setattr(about, "remove_model", held)
        refused = http.request("DELETE", "/api/delete", json={"model": "b"})
        assert (refused.status_code, "being fetched" in refused.text) == (409, True)


def test_one_model_may_be_served_on_demand():
    with serving(model("only", keep_alive_s=0.01)) as server, server.http() as http:
        assert http.get("/ready").status_code == http.get("/health").status_code == 200
        body = {"prompt": "hi", "max_tokens": 1}
        assert http.post("/v1/completions", json=body).json()["model"] == "only"
        wait_for(lambda: server.slots["only"].state == "asleep", "its time is over")


def test_a_stop_does_not_wait_for_loads_whose_requests_it_would_refuse():
    with serving(drain_timeout_s=1e6) as server, server.http() as http:
        server.slots["a"].gate, found = asyncio.Event(), []
        body = {"model": "a", "prompt": "hi", "max_tokens": 1}
        asks = threading.Thread(
            target=lambda: found.append(http.post("/v1/completions", json=body))
        )
        asks.start()
        wait_for(lambda: server.slots["a"].waiters, "it waits")
        server.begin_stop()
        asks.join()
        assert (found[0].status_code, "shutting down" in found[0].text) == (503, True)
        server.join()
