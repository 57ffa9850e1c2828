"""Requests of web pages that a server without keys refuses: foreign hosts, other origins, bodies
of forms. Other requests still work."""

from __future__ import annotations

import http.client
import json
import socket

import pytest

from slipstream.errors import ConfigError
from slipstream.server.state import ServerSettings

JSON = "application/json"
MESSAGES = {"messages": [{"role": "user", "content": "a"}]}
ASKS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {**MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {**MESSAGES, "max_tokens": 1},
    "/api/generate": {"prompt": "a", "stream": False, "options": {"num_predict": 1}},
    "/api/chat": {**MESSAGES, "stream": False, "options": {"num_predict": 1}},
    "/v2/models/fake/generate": {"text_input": "a", "parameters": {"max_tokens": 1}},
    "/tokenize": {"prompt": "a"},
}
CHANGES = (
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/sleep?level=2"),
    ("POST", "/wake_up"),
    ("POST", "/v1/files"),
    ("POST", "/v1/batches"),
    ("POST", "/v1/feedback"),
    ("POST", "/v1/embeddings"),
    ("DELETE", "/v1/files/file-1"),
    ("DELETE", "/v1/responses/resp_" + "0" * 32),
    ("PUT", "/v1/completions"),
    ("POST", "/unknown"),
)
EVERYTHING = [*(("POST", path) for path in ASKS), *CHANGES]
READS = ("/v1/files", "/status.json", "/metrics", "/v1/models", "/", "/chat", "/docs", "/live")


@pytest.fixture(scope="module")
def keyless(tmp_path_factory):
    """A server without keys on which everything is switched on."""
    from tests.server.conftest import serving

    folder = tmp_path_factory.mktemp("keyless")
    on = {"enable_sleep_mode": True, "lora_folder": str(folder), "files_dir": str(folder / "files")}
    with serving(**on, audit_log=str(folder / "audit")) as server:
        yield server


def port_of(server):
    return int(server.url.rpartition(":")[2])


def ask(server, method, path, body=None, **headers):
    """(status, the error or what else was answered). Header names have _ for -."""
    asked = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=60)
    raw = json.dumps(body).encode() if isinstance(body, dict) else body
    named = {k.replace("_", "-"): v for k, v in headers.items()}
    asked.request(method, path, raw, {"anthropic-version": "2023-06-01", **named})
    answer = asked.getresponse()
    data = answer.read()
    try:
        found = json.loads(data)
    except ValueError:
        return answer.status, data
    return answer.status, found.get("error", found) if isinstance(found, dict) else found


def message_of(error):
    return error if isinstance(error, str) else error["message"]


def body_of(server, path):
    body = ASKS.get(path)
    if body is None or path.startswith("/v2/"):
        return body
    return {**body, "model": server.state.model_names[0]}


# --- Hosts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", READS)
def test_a_foreign_host_reads_nothing(keyless, path):
    status, error = ask(keyless, "GET", path, host=f"rebound.evil.example:{port_of(keyless)}")
    assert status == 421
    assert error["code"] == "host_not_allowed"
    assert "--allowed-hosts" in error["message"]


@pytest.mark.parametrize(("method", "path"), EVERYTHING)
def test_a_foreign_host_does_nothing(keyless, method, path):
    host = f"rebound.evil.example:{port_of(keyless)}"
    more = {"origin": f"http://{host}", "sec_fetch_site": "same-origin", "content_type": JSON}
    status, error = ask(keyless, method, path, body_of(keyless, path), host=host, **more)
    assert status == 421
    assert "--allowed-hosts" in message_of(error)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1",
        "localhost.",
        "chat.localhost:8000",
        "127.0.0.1",
        "127.8.9.10:80",
        "192.168.1.7:8000",
        "8.8.8.8",
        "[::1]:8000",
        "[fe80::1]",
        socket.gethostname(),
        f"{socket.gethostname().upper()}:8000",
    ],
)
def test_names_of_this_machine_and_addresses_are_hosts(keyless, host):
    assert ask(keyless, "GET", "/v1/models", host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "a",
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evillocalhost",
        "127.0.0.1@evil.example",
        "evil.example#localhost",
        "[::1].evil.example",
        "[evil.example]",
        "localhost:80:evil",
        "localhost, evil.example",
        "",
    ],
)
def test_other_hosts_are_refused(keyless, host):
    assert ask(keyless, "GET", "/v1/models", host=host)[0] == 421


def test_every_host_of_several_has_to_be_allowed(keyless):
    head = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\nconnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port_of(keyless)), timeout=60) as sock:
        sock.sendall(head)
        assert sock.makefile("rb").readline().split()[1] == b"421"


def test_a_client_that_sends_no_host_is_answered(keyless):
    with socket.create_connection(("127.0.0.1", port_of(keyless)), timeout=60) as sock:
        sock.sendall(b"GET /live HTTP/1.0\r\n\r\n")
        assert sock.makefile("rb").readline().split()[1] == b"200"


def test_allowed_hosts_are_names_or_domains(serve):
    server = serve(allowed_hosts=("Slipstream", "*.chat.example"))
    found = {
        host: ask(server, "GET", "/live", host=host)[0]
        for host in (
            "slipstream:8000",
            "a.chat.example",
            "a.b.chat.example:1",
            "localhost",
            "chat.example",
            "evilchat.example",
            "slipstream.evil.example",
        )
    }
    assert list(found.values()) == [200, 200, 200, 200, 421, 421, 421]


def test_allowed_hosts_may_be_any(serve):
    assert ask(serve(allowed_hosts=("*",)), "GET", "/live", host="evil.example")[0] == 200


def test_the_bound_name_is_a_host(monkeypatch):
    from slipstream.server.http.web_guard import WebGuard

    guard = WebGuard(None, ServerSettings(host="box.lan"), has_keys=False)
    assert guard.is_allowed("box.lan:8000")
    assert not guard.is_allowed("other.lan")


def test_with_keys_only_given_hosts_are_checked(serve):
    assert ask(serve(api_keys=("secret",)), "GET", "/live", host="evil.example")[0] == 200
    given = serve(api_keys=("secret",), allowed_hosts=("chat.example",))
    assert ask(given, "GET", "/live", host="evil.example")[0] == 421
    assert ask(given, "GET", "/live", host="chat.example")[0] == 200


@pytest.mark.parametrize(
    "name", ["chat.example:8000", "http://chat.example", "*example", "a b", ""]
)
def test_allowed_hosts_that_are_no_names_are_refused_at_the_start(name):
    with pytest.raises(ConfigError, match="allowed_hosts must be made of NAME"):
        ServerSettings(allowed_hosts=(name,))


# --- Other origins ----------------------------------------------------------------------------------------------------

FOREIGN = {
    "a foreign page": {"origin": "https://evil.example", "sec_fetch_site": "cross-site"},
    "without Sec-Fetch": {"origin": "https://evil.example"},
    "without Origin": {"sec_fetch_site": "same-site"},
    "another port of this machine": {"origin": "http://127.0.0.1:1", "sec_fetch_site": "same-site"},
    "a sandboxed frame": {"origin": "null", "sec_fetch_site": "cross-site"},
    "an application": {"origin": "app://notes"},
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize(("method", "path"), EVERYTHING)
def test_other_origins_change_nothing(keyless, method, path, kind):
    for content_type in ("text/plain;charset=UTF-8", JSON):
        body = body_of(keyless, path)
        status, error = ask(keyless, method, path, body, content_type=content_type, **FOREIGN[kind])
        assert status == 403
        assert "--cors-origin" in message_of(error)
    assert not keyless.engine.is_sleeping
    assert keyless.engine.running == 0


def test_errors_are_in_the_shape_of_the_protocol(keyless):
    foreign = FOREIGN["a foreign page"]
    error = ask(keyless, "POST", "/v1/completions", b"{}", **foreign)[1]
    assert error["type"] == "permission_error"
    assert error["code"] == "cross_origin_request"
    error = ask(keyless, "POST", "/v1/messages", b"{}", **foreign)[1]
    assert error["type"] == "permission_error"
    assert "code" not in error
    assert isinstance(ask(keyless, "POST", "/api/chat", b"{}", **foreign)[1], str)


@pytest.mark.parametrize("path", ASKS)
def test_the_own_origin_asks_by_any_name_of_the_machine(keyless, path):
    for name in ("127.0.0.1", "localhost", "[::1]"):
        host = f"{name}:{port_of(keyless)}"
        own = {"host": host, "origin": f"http://{host}", "sec_fetch_site": "same-origin"}
        body = body_of(keyless, path)
        assert ask(keyless, "POST", path, body, content_type=JSON, **own)[0] == 200


def test_another_name_of_the_machine_is_another_origin(keyless):
    port = port_of(keyless)
    for origin in (f"http://localhost:{port}", f"https://127.0.0.1:{port}", "http://127.0.0.1"):
        assert ask(keyless, "POST", "/ping", host=f"127.0.0.1:{port}", origin=origin)[0] == 403


def test_usual_ports_are_left_out_of_an_origin(keyless):
    for host, origin in (("localhost:80", "http://localhost"), ("localhost", "http://localhost")):
        assert ask(keyless, "POST", "/ping", host=host, origin=origin)[0] == 200


@pytest.mark.parametrize(
    "origin",
    [
        "https://chat.example",
        "chrome-extension://abcdefghijklmnop",
        "moz-extension://0f5ba3c2-1d9e-4f1b-8a54-0c1f3a0a6c3a",
        "app://obsidian.md",
        "app://.",
        "tauri://localhost",
        "capacitor://localhost",
        "vscode-webview://0a1b2c3d",
        "null",
    ],
)
def test_origins_that_are_allowed_ask(serve, origin):
    server = serve(cors_origins=(origin,))
    more = {"origin": origin, "sec_fetch_site": "cross-site", "content_type": JSON}
    body = body_of(server, "/v1/completions")
    assert ask(server, "POST", "/v1/completions", body, **more)[0] == 200
    more["origin"] = "https://evil.example"
    assert ask(server, "POST", "/v1/completions", body, **more)[0] == 403
    del more["origin"]
    assert ask(server, "POST", "/v1/completions", body, **more)[0] == 403


def test_localhost_lets_in_pages_of_this_machine_and_of_no_name_like_it(serve):
    server = serve(cors_origins=("localhost",))
    body = body_of(server, "/v1/completions")
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    for origin, is_let_in in (
        ("http://localhost:5173", True),
        ("http://127.0.0.1:5173", True),
        ("http://localhost.evil.com", False),
        ("http://127.0.0.1.evil", False),
    ):
        more = {"origin": origin, "sec_fetch_site": "cross-site", "content_type": JSON}
        status, _ = ask(server, "POST", "/v1/completions", body, **more)
        assert status == (200 if is_let_in else 403), origin
        with server.http() as http:
            answer = http.options("/v1/completions", headers={"origin": origin, **asks})
        assert answer.is_success == is_let_in, origin
        allowed = answer.headers.get("access-control-allow-origin")
        assert allowed == (origin if is_let_in else None)


def test_all_origins_may_be_allowed(serve):
    server = serve(cors_origins=("*",))
    for headers in FOREIGN.values():
        assert ask(server, "POST", "/ping", **headers)[0] == 200
    more = {"content_type": "text/plain", **FOREIGN["a foreign page"]}
    assert ask(server, "POST", "/v1/completions", b"{}", **more)[0] == 415


def test_an_allowed_page_can_read_why_it_was_refused(serve):
    server = serve(cors_origins=("https://chat.example",))
    with server.http() as http:
        answer = http.post(
            "/v1/completions",
            content=b"{}",
            headers={"origin": "https://chat.example", "content-type": "text/plain"},
        )
    assert answer.status_code == 415
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"


def test_with_keys_the_key_decides(serve):
    server = serve(api_keys=("secret",))
    more = {**FOREIGN["a foreign page"], "content_type": "text/plain", "host": "evil.example"}
    body = body_of(server, "/v1/completions")
    assert ask(server, "POST", "/v1/completions", body, **more)[0] == 401
    more["authorization"] = "Bearer secret"
    assert ask(server, "POST", "/v1/completions", body, **more)[0] == 200


def test_reading_from_another_origin_is_left_to_cors(keyless):
    with keyless.http() as http:
        answer = http.get("/v1/models", headers={"origin": "https://evil.example"})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


# --- Content types ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "Text/Plain;charset=UTF-8",
        "text/plain; application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=B",
    ],
)
def test_bodies_of_forms_and_text_are_refused(keyless, path, kind):
    status, error = ask(keyless, "POST", path, body_of(keyless, path), content_type=kind)
    assert status == 415
    assert "-H 'content-type: application/json'" in message_of(error)


@pytest.mark.parametrize("path", ASKS)
def test_a_body_that_curl_calls_a_form_is_json(keyless, path):
    more = {"content_type": "application/x-www-form-urlencoded", "user_agent": "curl/8.5.0"}
    assert ask(keyless, "POST", path, body_of(keyless, path), **more)[0] == 200
    foreign = {**more, "sec_fetch_mode": "no-cors"}
    assert ask(keyless, "POST", path, body_of(keyless, path), **foreign)[0] == 415


@pytest.mark.parametrize("path", ASKS)
def test_a_body_without_a_content_type_is_refused_of_browsers_only(keyless, path):
    body = body_of(keyless, path)
    assert ask(keyless, "POST", path, body)[0] == 200
    assert ask(keyless, "POST", path, body, sec_fetch_mode="no-cors")[0] == 415
    own = f"127.0.0.1:{port_of(keyless)}"
    assert ask(keyless, "POST", path, body, host=own, origin=f"http://{own}")[0] == 415


def test_a_form_without_a_body_is_answered(keyless):
    """`curl -X POST -d ''` sends such a form."""
    form = "application/x-www-form-urlencoded"
    assert ask(keyless, "POST", "/sleep", b"", content_type=form)[0] == 200
    assert ask(keyless, "POST", "/wake_up", b"", content_type=form)[0] == 200


def test_uploads_are_forms(keyless):
    with keyless.http() as http:
        answer = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x", b"{}")})
        assert answer.status_code == 200
        assert http.delete(f"/v1/files/{answer.json()['id']}").status_code == 200
