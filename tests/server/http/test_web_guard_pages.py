"""Real pages in a browser against a server without keys: another origin changes nothing, a rebound name reads nothing."""

from __future__ import annotations

import contextlib
import http.server
import threading

import pytest

from tests.server.conftest import serving
from tests.support.browser import Browser

SIZE = {"width": 800, "height": 600}

ATTACK = """
const [base, model] = arguments; window.ends = 0; window.read = [];
const send = (path, body, type) => fetch(base + path, {method: "POST", body, mode: "no-cors",
  headers: type ? {"content-type": type} : {}}).then(() => ends++, () => ends++);
const ask = JSON.stringify({model, prompt: "a", max_tokens: 1});
send("/v1/completions", ask, "text/plain"); send("/v1/completions", new Blob([ask]));
send("/v1/completions", ask, "application/x-www-form-urlencoded");
send("/sleep?level=2"); send("/sleep?level=2", "x", "text/plain");
send("/v1/load_lora_adapter", '{"lora_name": "evil", "lora_path": "a"}', "text/plain");
const form = new FormData(); form.append("purpose", "batch"); form.append("file", new Blob(["{}"]), "x");
send("/v1/files", form);
fetch(base + "/v1/completions", {method: "POST", body: ask, headers: {"content-type": "application/json"}})
  .then(r => r.text()).then(t => read.push(t)).catch(() => 0).finally(() => ends++);
for (const path of ["/v1/files", "/status.json", "/metrics"])
  fetch(base + path).then(r => r.text()).then(t => read.push(t)).catch(() => 0).finally(() => ends++);
"""
NUM_ASKED = 11

SAME_ORIGIN = """
const model = arguments[0]; window.found = [];
const note = answer => answer.then(r => found.push(r.status));
for (const path of ["/v1/models", "/v1/files", "/status.json", "/metrics"]) note(fetch(path));
note(fetch("/v1/completions", {method: "POST", headers: {"content-type": "application/json"},
  body: JSON.stringify({model, prompt: "a", max_tokens: 1})}));
note(fetch("/sleep?level=2", {method: "POST"})); note(fetch("/wake_up", {method: "POST"}));
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    rebinding = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    with Browser.start(tmp_path_factory.mktemp("browser"), rebinding) as found:
        yield found


@pytest.fixture
def keyless(tmp_path):
    on = {"enable_sleep_mode": True, "lora_folder": str(tmp_path)}
    with serving(**on, files_dir=str(tmp_path / "files")) as server:
        yield server


@contextlib.contextmanager
def page_elsewhere():
    """The address of an empty page on another port."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>elsewhere</title>")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "evil.example"])
def test_a_page_of_another_origin_gets_nothing_done(browser, keyless, name):
    with page_elsewhere() as port:
        browser.visit(f"http://{name}:{port}/", **SIZE)
        browser.run(ATTACK, keyless.url, keyless.state.model_names[0])
        browser.wait_for(f"return ends == {NUM_ASKED}", "not all requests ended")
        assert browser.run("return read") == []
    assert keyless.engine.seen == []
    assert not keyless.engine.is_sleeping
    with keyless.http() as http_client:
        assert http_client.get("/v1/files").json()["data"] == []


def test_a_rebound_name_reads_nothing(browser, keyless):
    browser.visit(f"http://evil.example:{keyless.url.rpartition(':')[2]}/live", **SIZE)
    assert "host_not_allowed" in browser.run("return document.body.innerText")
    browser.run(SAME_ORIGIN, keyless.state.model_names[0])
    statuses = browser.wait_for("return found.length == 7 && found", "not all requests ended")
    assert statuses == [421] * 7
    assert keyless.engine.seen == []


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_the_server_s_own_pages_ask(browser, keyless, name):
    browser.visit(f"http://{name}:{keyless.url.rpartition(':')[2]}/chat", **SIZE)
    browser.run(SAME_ORIGIN, keyless.state.model_names[0])
    statuses = browser.wait_for("return found.length == 7 && found", "not all requests ended")
    assert statuses == [200] * 7
