"""Alerts against a real HTTP server: retried, bounded, not redirected."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from slipstream.errors import ConfigError
from slipstream.fleet.detection import alerts
from slipstream.fleet.detection.detector import Finding
from tests.support.waiting import PATIENCE_S

FINDING = Finding(
    number=1, replica="r", cause="overload", title="t", remedy="m", severity="warning", signals=("queue",), evidence=("e",),
    began=1.0,
)  # fmt: skip


@pytest.fixture
def receiver():
    """Answers with `statuses` in turn, then 200; `got` are the bodies."""
    got, statuses = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            status = statuses.pop(0) if statuses else 200
            self.send_response(status)
            if status == 302:
                self.send_header("location", f"http://127.0.0.1:{server.server_port}/other")
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", got, statuses
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def soon_again(monkeypatch):
    monkeypatch.setattr(alerts, "FIRST_WAIT_S", 0.01)


async def deliver(url, tells, until):
    found = alerts.Alerts([url], "here")
    (hook,) = found.hooks
    for news in tells:
        found.send(news)
    task = asyncio.create_task(found.run())
    async with asyncio.timeout(PATIENCE_S):
        while not until():
            await asyncio.sleep(0.01)
    task.cancel()
    return hook


def ended(finding):
    from dataclasses import replace

    return replace(finding, ended=2.0)


async def test_events_are_delivered_in_order_and_retried(receiver):
    url, got, statuses = receiver
    statuses += [500, 503]
    await deliver(url, [[FINDING], [FINDING], [ended(FINDING)]], lambda: len(got) == 5)
    assert [alert["event"] for alert in got] == ["began", "began", "began", "changed", "ended"]
    assert got[-1]["finding"]["cause"] == "overload"
    assert got[-1]["source"] == "here"


async def test_an_alert_is_given_up_and_the_next_one_goes(receiver, monkeypatch):
    monkeypatch.setattr(alerts, "RETRIES", 1)
    url, got, statuses = receiver
    statuses += [302, 404]
    hook = await deliver(url, [[FINDING], [ended(FINDING)]], lambda: len(got) == 3)
    assert hook.num_lost == 1
    assert len(got) == 3  # and nothing at the address that it was sent to


async def test_oldest_alert_is_dropped_when_too_many_wait(receiver, monkeypatch):
    monkeypatch.setattr(alerts, "MAX_WAITING", 2)
    url, got, _ = receiver
    news = [[FINDING], [FINDING], [ended(FINDING)]]
    hook = await deliver(url, news, lambda: len(got) == 2)
    assert [alert["event"] for alert in got] == ["changed", "ended"]
    assert hook.num_lost == 1


@pytest.mark.parametrize("error", [ValueError("odd"), OSError(5, "odd"), httpx.InvalidURL("odd")])
async def test_no_error_of_one_address_ends_the_others(receiver, monkeypatch, error):
    """An error ends neither other addresses nor the alerts that follow."""
    url, got, _ = receiver
    monkeypatch.setattr(alerts, "RETRIES", 0)
    real = httpx.AsyncClient.post

    async def post(client, address, **more):
        if "bad" in address:
            raise error
        return await real(client, address, **more)

    monkeypatch.setattr(httpx.AsyncClient, "post", post)
    found = alerts.Alerts(["http://127.0.0.1:9/bad", url], "here")
    bad, _ = found.hooks
    task = asyncio.create_task(found.run())
    for number in (1, 2):
        found.send([FINDING if number == 1 else ended(FINDING)])
        async with asyncio.timeout(60):
            while (bad.num_lost, len(got)) != (number, number):
                await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    assert len(got) == 2


async def test_few_alerts_wait_and_the_rest_is_counted_as_lost(monkeypatch):
    monkeypatch.setattr(alerts, "MAX_WAITING", 5)
    hook = alerts.Webhook("http://127.0.0.1:9/", "here")
    for _ in range(12):
        hook.enqueue("began", FINDING)
    assert (len(hook._waiting), hook.num_lost) == (5, 7)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "nothing", "http://", "ftp://a/b", "http://a:99999/"]
)
def test_other_addresses_are_refused(url):
    with pytest.raises(ConfigError) as caught:
        alerts.Webhook(url, "here")
    assert caught.value.field == "alert_url"
