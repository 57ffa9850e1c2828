"""A fleet's gateway passes on every route of a replica, to the model that the body names."""

from __future__ import annotations

import httpx
import pytest

from slipstream.fleet.config import check
from slipstream.fleet.gateway.forward import SHADOWED
from slipstream.fleet.gateway.gateway import WITH_MODEL
from slipstream.server.app import create_app
from slipstream.server.operations.telemetry import OPERATIONS
from slipstream.server.state import ServerSettings
from tests.fleet.running import version
from tests.fleet.stubs import stubbed
from tests.server.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S

OWN = """
    / /api/ps /api/tags /chat /docs /findings /fleet/status /health /live /metrics /models /openapi.json /ping
    /ready /sleep /status /status.json /version /wake_up /is_sleeping /v1/models /v1/batches /v1/feedback /v1/files
    /v1/load_lora_adapter /v1/unload_lora_adapter /v2/health/live /v2/health/ready /v2/repository/index
"""
"""Routes that the gateway answers itself, refuses or stores."""

TEXT = {"input": "a", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "texts": ["a"]}


@pytest.fixture
def two(tiny, tmp_path):
    """A fleet of two models, its HTTP client, and the stubs of both."""
    models = {name: {"versions": [version(tiny, replicas=1)]} for name in ("first", "second")}
    with stubbed(
        check({"port": 0, "models": models, "router": {"probe_s": 0}}), tmp_path / "s"
    ) as (fleet, stubs):
        fleet.wait_serving(2)
        for stub in stubs:
            stub.status = 418
        with httpx.Client(base_url=fleet.url, timeout=PATIENCE_S) as http:
            yield fleet, http, {m.id.split("/")[0]: m.started for m in fleet.members()}


def test_every_route_of_a_replica_is_passed_on_to_the_named_model(two):
    _, http, stubs = two
    app, asked = create_app(FakeEngine(), ServerSettings()), set()
    for route in app.routes:
        if route.path in OWN.split() or route.path.startswith(("/v1/files/", "/v1/batches/")):
            continue
        path = route.path.replace("{version}", "1").replace("{id:path}", "second")
        path = path.replace("{id}", "second").replace("{model:path}", "second")
        method = "POST" if "POST" in route.methods else sorted(route.methods)[0]
        if path.startswith("/v1/audio/"):
            sent = {
                "data": {"model": "second"},
                "files": {"file": ("a.wav", b"\r\n\r\nRIFF\r\n--")},
            }
        else:
            sent = {"json": {"model": "second", **TEXT}} if method == "POST" else {}
        before = {name: len(stub.seen) for name, stub in stubs.items()}
        answer = http.request(method, path, **sent)
        assert answer.status_code == 418, (path, answer.text)
        (to,) = [name for name, stub in stubs.items() if len(stub.seen) > before[name]]
        names = method == "POST" or path.startswith(("/v1/models/", "/v2/models/"))
        assert (to == "second") == names, path
        assert stubs[to].seen[-1].path == path
        asked.add(path)
    assert {"/classify", "/pooling", "/embed_sparse", "/infill", "/props", "/v2/embed"} < asked


def test_bodies_that_name_no_model_for_want_of_json_are_refused_at_the_root_too(two):
    _, http, stubs = two
    before = {name: len(stub.seen) for name, stub in stubs.items()}
    for path in ("/responses", "/responses/input_tokens", "/chat/completions/input_tokens"):
        for route in (path, f"/v1{path}"):
            answer = http.post(route, content=b"{", headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert {name: len(stub.seen) for name, stub in stubs.items()} == before


def test_the_replica_that_stores_an_answer_is_remembered_by_both_names_of_the_route(two):
    fleet, http, _ = two
    for path in ("/responses", "/v1/responses"):
        answer = http.post(path, json={"model": "second", "input": "a"})
        stored = fleet.head.gateway.forwarder.stored["resp_" + answer.headers["x-request-id"]]
        assert stored.split("/")[0] == "second"


def test_models_have_their_other_name_too(two):
    _, http, _ = two
    assert http.get("/models").json() == http.get("/v1/models").json()
    assert [m["id"] for m in http.get("/models").json()["data"]] == ["first", "second"]


def test_an_unknown_model_of_a_form_is_told(two):
    _, http, _ = two
    files = {"file": ("a.wav", b"RIFF")}
    answer = http.post("/v1/audio/transcriptions", data={"model": "third"}, files=files)
    assert answer.status_code == 404
    assert "third" in answer.json()["error"]["message"]


def test_bodies_of_all_routes_that_run_a_model_are_read_for_its_name():
    by_path = {path for path in OPERATIONS if "{" in path or not path.startswith("/")}
    forms = {path for path in OPERATIONS if "/audio/" in path}
    assert set(OPERATIONS) - by_path - forms <= WITH_MODEL
    assert not SHADOWED - (WITH_MODEL & set(OPERATIONS))
