"""A fleet without keys: its gateway refuses of web pages what a server refuses. What the gateway asks of replicas goes on."""

from __future__ import annotations

import httpx
import pytest

from slipstream.errors import ConfigError
from slipstream.fleet.config import check
from tests.fleet.running import fleet_of, version
from tests.fleet.stubs import stubbed
from tests.support.waiting import PATIENCE_S

FOREIGN = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
ASK = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}


@pytest.fixture
def fleet(tiny, tmp_path):
    fields = {"allowed_hosts": ("chat.example",), "cors_origins": ("https://chat.example",)}
    made = fleet_of(version(tiny, replicas=1), router={"probe_s": 0})
    with stubbed(made, tmp_path / "state", files_dir=str(tmp_path / "files"), **fields) as found:
        found[0].wait_serving(1)
        yield found[0]


def test_the_gateway_refuses_pages_as_a_server_does(fleet):
    with httpx.Client(base_url=fleet.url, timeout=PATIENCE_S) as http:
        for path in ("/status.json", "/fleet/status", "/metrics", "/v1/models", "/v1/files"):
            answer = http.get(path, headers={"host": "evil.example"})
            assert answer.status_code == 421, path
            assert "allowed_hosts" in answer.json()["error"]["message"]
        for path in ("/v1/completions", "/v1/files", "/v1/batches", "/sleep", "/v1/feedback"):
            answer = http.post(
                path, content=b"{}", headers={**FOREIGN, "content-type": "text/plain"}
            )
            assert answer.status_code == 403, path
            assert "cors_origins" in answer.json()["error"]["message"]
        answer = http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
        assert answer.status_code == 415
        assert http.post("/v1/completions", json=ASK).status_code == 200


def test_hosts_and_origins_of_the_file_are_allowed(fleet):
    with httpx.Client(base_url=fleet.url, timeout=PATIENCE_S) as http:
        headers = {"host": "chat.example", "origin": "https://chat.example"}
        answer = http.post("/v1/completions", json=ASK, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        asks = {**headers, "access-control-request-method": "POST"}
        assert http.options("/v1/completions", headers=asks).status_code == 200


@pytest.mark.parametrize("field", ["allowed_hosts", "cors_origins"])
def test_hosts_and_origins_are_not_a_replica_s(field):
    server = {field: ["*"]}
    models = {"chat": {"versions": [{"name": "v1", "model": "m", "server": server}]}}
    with pytest.raises(ConfigError, match=f"the fleet's own {field}"):
        check({"models": models})


def test_gateway_answers_400_to_a_body_nested_too_deeply(fleet):
    with httpx.Client(base_url=fleet.url, timeout=PATIENCE_S) as http:
        for path in ("/v1/completions", "/v1/messages", "/v1/responses"):
            for depth in (300, 3000, 100_000):
                deep = b'{"model": "tiny", "x": ' + b"[" * depth + b"]" * depth + b"}"
                answer = http.post(path, content=deep, headers={"content-type": "application/json"})
                assert answer.status_code == 400, (path, depth)
        assert http.post("/v1/completions", json=ASK).status_code == 200
