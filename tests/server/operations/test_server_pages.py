"""/status and /chat in a real headless Chromium, against real servers: they show what the server tells, fit a phone, say no
error, and need a key where the server does."""

from __future__ import annotations

import asyncio
import json

import pytest

from slipstream.server.operations.status import StatusMemory
from tests.server.conftest import serving
from tests.server.fake_engine import FakeEngine
from tests.support.browser import Browser
from tests.support.waiting import wait_for

FINDING = {
    "number": 1,
    "replica": "fake",
    "cause": "cache_thrash",
    "title": "the KV cache is too small <b>for</b> what is in it",
    "remedy": "fewer sequences at once",
    "severity": "warning",
    "signals": ["preemptions"],
    "evidence": ["preemptions: sequences lose their blocks (3, before 0)"],
    "began": 0.0,
    "ended": None,
}


class FakeWatch:
    findings = [FINDING]  # noqa: RUF012

    async def run(self, state):
        await asyncio.Event().wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser.start(tmp_path_factory.mktemp("browser")) as found:
        yield found


def fits(browser):
    return browser.run("return document.documentElement.scrollWidth <= innerWidth")


SIZES = [(1280, 900), (390, 844)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_status_shows_load_latency_and_findings(browser, width, height, tmp_path):
    with serving() as server:
        server.state.watch = FakeWatch()
        for _ in range(3):
            server.client().completions.create(model="fake", prompt="hello", max_tokens=4)
        browser.visit(server.url + "/status", width=width, height=height)
        browser.wait_for("return !document.getElementById('main').hidden", "the page shows nothing")
        text = browser.run("return document.body.innerText")
        browser.screenshot(tmp_path / "status.png")
        browser.visit("about:blank", width=width, height=height)
    assert all(
        part in text
        for part in ("fake", "1 of 1", "cache thrash on fake", "fewer sequences at once")
    )
    assert "too small <b>for</b> what" in text  # as text
    assert "first token\t3\t" in text
    assert "API key" not in text  # nobody needs one here
    assert browser.errors() == []


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_pages_fit_the_window(browser, width, height):
    with serving() as server:
        for page in ("status", "chat"):
            browser.visit(f"{server.url}/{page}", width=width, height=height)
            browser.wait_for(
                "return document.body.innerText.includes('fake') || document.getElementById('model')?.value",
                page,
            )
            assert fits(browser)
        browser.visit(server.url + "/docs", width=width, height=height)
        assert fits(browser)
        browser.visit("about:blank", width=width, height=height)
    assert browser.errors() == []


def test_status_shows_what_was_before_the_page_was_opened(browser, monkeypatch):
    monkeypatch.setattr(StatusMemory, "EVERY_S", 0.02)
    with serving() as server, server.http() as http:
        wait_for(lambda: len(http.get("/status.json?past=1").json()["past"]) > 2, "nothing is kept")
        assert http.get("/status.json").json()["past"] is None
        browser.visit(server.url + "/status", width=1280, height=900)
        browser.wait_for("return !document.getElementById('main').hidden", "the page shows nothing")
        line = "return document.querySelector('#load polyline').getAttribute('points').split(' ')"
        assert len(browser.run(line)) > 3
        browser.visit("about:blank", width=1280, height=900)
    assert browser.errors() == []


def test_docs_send_what_one_writes(browser):
    with serving() as server:
        browser.visit(server.url + "/docs", width=1280, height=900)
        form = "document.querySelector('form[data-path=\"/v1/chat/completions\"]')"
        browser.run(f"{form}.parentElement.open = true")
        body = browser.wait_for(
            f"const text = {form}.elements.body.value; return text.includes('fake') && text",
            "no example",
        )
        browser.run(f"{form}.requestSubmit()")
        browser.wait_for(
            f"return {form}.querySelector('pre').textContent.startsWith('200')", "no answer"
        )
        assert server.engine.seen[-1][1].max_tokens == json.loads(body)["max_tokens"]
        browser.visit("about:blank", width=1280, height=900)
    assert browser.errors() == []


def test_stop_ends_the_answer_and_frees_the_engine(browser):
    with serving(FakeEngine(delay_s=0.05)) as server:
        browser.visit(server.url + "/chat", width=390, height=844)
        browser.wait_for("return document.getElementById('model').value === 'fake'", "no model")
        browser.run(
            "document.getElementById('text').value = 'hello'; document.getElementById('send').requestSubmit()"
        )
        browser.wait_for(
            "return document.querySelector('.assistant .body')?.textContent.length > 3", "no text"
        )
        browser.run("document.getElementById('stop').click()")
        server.wait_idle()
        browser.wait_for(
            "return document.querySelector('.note')?.textContent.includes('stopped')", "not said"
        )
        browser.visit("about:blank", width=390, height=844)
    assert browser.errors() == []


def test_pages_ask_for_a_key(browser):
    with serving(api_keys=("secret",)) as server:
        with server.http() as http:
            assert http.get("/status").status_code == http.get("/chat").status_code == 200
            assert http.get("/status.json").status_code == http.get("/findings").status_code == 401
        shown_by = {
            "status": "!document.getElementById('main').hidden",
            "chat": "document.getElementById('model').value",
        }
        for page, shown in shown_by.items():
            browser.visit(f"{server.url}/{page}", width=1280, height=900)
            browser.wait_for("return !document.getElementById('ask').hidden", "no key is asked for")
            for key, check in (
                ("wrong", "!document.getElementById('ask').hidden"),
                ("secret", shown),
            ):
                browser.run(
                    f"document.getElementById('key').value = '{key}'; document.getElementById('ask').requestSubmit()"
                )
                browser.wait_for(f"return {check}", f"{page} with the key {key}")
            browser.run("sessionStorage.clear()")
        browser.visit("about:blank", width=1280, height=900)
    assert all(
        "401" in entry["message"] for entry in browser.errors()
    )  # which the browser itself logs


def test_routes_without_a_detector(shared):
    with shared.http() as http:
        status = http.get("/status.json").json()
        assert (status["models"], status["findings"], status["replicas"][0]["state"]) == (
            ["fake"],
            None,
            "ready",
        )
        missing = http.get("/findings")
        assert missing.status_code == 404
        assert "--detect" in missing.json()["error"]["message"]
        for page in ("/status", "/chat", "/docs"):
            text = http.get(page).text  # nothing from elsewhere
            assert "default-src 'none'; script-src 'unsafe-inline'; connect-src 'self';" in text
            assert 'src="http' not in text


def test_findings_are_in_the_metrics():
    with serving() as server, server.http() as http:
        assert "slipstream:findings" not in http.get("/metrics").text
        server.state.watch = FakeWatch()
        assert (
            'slipstream:findings{cause="cache_thrash",model_name="fake"} 1.0'
            in http.get("/metrics").text
        )
        assert http.get("/findings").json()["findings"] == [FINDING]
