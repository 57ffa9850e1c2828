"""A real headless Chromium through chromedriver, by the W3C's WebDriver protocol: no package is needed.

with Browser.start(tmp_path) as browser:
    browser.open(page, width=390, height=844)
    browser.run("return document.title")
    assert browser.errors() == []
"""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Browser:
    def __init__(self, url):
        self._url = url

    @classmethod
    @contextmanager
    def start(cls, folder, *more):
        """`more` are options of the browser. Skips the test, and says why, where there is none."""
        driver = shutil.which("chromedriver")
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if driver is None or browser is None:
            pytest.skip("needs Chromium and its driver (apt-get install chromium chromium-driver)")
        process = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, text=True, cwd=folder
        )
        try:
            port = next(
                line.split()[-1].rstrip(".")
                for line in process.stdout
                if "started successfully on port" in line
            )
            made = cls(f"http://127.0.0.1:{port}/session")
            options = {
                "binary": browser,
                "args": [
                    "--headless=new",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--disable-dev-shm-usage",
                    *more,
                ],
            }
            options["args"].append(f"--user-data-dir={folder / 'profile'}")
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            wanted["timeouts"] = {"script": round(1e3 * PATIENCE_S)}
            session = made._ask("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            made._url += f"/{session}"
            try:
                yield made
            finally:
                made._ask("", method="DELETE")
        finally:
            process.kill()
            process.wait()

    def _ask(self, path, body=None, method="POST"):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"content-type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None

    def open(self, file, *, width, height):
        """Opens a page from the disk, at a size of its inside; the seconds from asking for it until its load event ended."""
        return self.visit(file.as_uri(), width=width, height=height)

    def visit(self, url, *, width, height):
        """The same of any address."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask(
            "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
        )
        self._ask("/url", {"url": url})
        while True:  # the driver may answer before
            here, ended = self.run(
                "return [location.href, performance.getEntriesByType('navigation')[0].loadEventEnd]"
            )
            if here == url and ended > 0:
                return ended / 1e3
            time.sleep(0.01)

    def wait_for(self, script, what, seconds=PATIENCE_S):
        """Waits until the script returns something true, and returns it."""
        until = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < until, what
            time.sleep(0.05)
        return found

    def run(self, script, *arguments):
        """Returns the value of the script."""
        return self._ask("/execute/sync", {"script": script, "args": list(arguments)})

    def prefer(self, scheme):
        """Pages are shown "light" or "dark" from now on."""
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self._ask("/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": media})

    def serious_violations(self):
        """Lists what axe-core finds on the page that is serious or critical. Skips the test where it is not there."""
        found = importlib.util.find_spec("axe_core_python")
        if found is None:
            pytest.skip("needs axe-core-python")
        self.run((Path(found.origin).parent / "axe.min.js").read_text())
        self.run("window.found = null; axe.run().then(done => { window.found = done; })")
        self.wait_for("return window.found !== null", "axe does not end")
        serious = "v => ['serious', 'critical'].includes(v.impact)"
        told = "v => [v.id, v.nodes[0].html.slice(0, 200), v.nodes[0].failureSummary]"
        return self.run(f"return found.violations.filter({serious}).map({told})")

    def errors(self):
        """Returns console messages above the level "information" since the last call."""
        return [
            entry
            for entry in self._ask("/se/log", {"type": "browser"})
            if entry["level"] not in ("INFO", "DEBUG")
        ]

    def screenshot(self, file):
        """The whole page."""
        params = {"format": "png", "captureBeyondViewport": False}
        shot = self._ask("/goog/cdp/execute", {"cmd": "Page.captureScreenshot", "params": params})
        file.write_bytes(base64.b64decode(shot["data"]))
