"""Takes the manual's pictures of the pages in headless Chromium, into docs/pictures: `python -m tests.support.screenshots`.

It needs Chromium and its driver (apt-get install chromium chromium-driver), Pillow, and the default model."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.support.browser import Browser

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
WIDTH, HEIGHT = 1280, 720
QUESTIONS = ("Name the capital of France.", "Name three rivers there.")
MOST_BYTES = 60_000


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    words = ("serve", "smollm2", "--port=0", "--max-model-len=2048", "--json")
    server = subprocess.Popen(
        [sys.executable, "-m", "slipstream", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = json.loads(server.stdout.readline())["url"].removesuffix("/v1")
        with tempfile.TemporaryDirectory() as folder, Browser.start(Path(folder)) as browser:
            browser.visit(f"{url}/chat", width=WIDTH, height=HEIGHT)
            browser.wait_for("return document.getElementById('model').value", "no model")
            browser.run("setSide(true)")
            for number, question in enumerate(QUESTIONS, 1):
                browser.run("document.getElementById('text').value = arguments[0]", question)
                browser.run("document.getElementById('send').requestSubmit()")
                ended = "document.getElementById('stop').hidden"
                shown = f"document.querySelectorAll('.note').length === {number} && {ended}"
                browser.wait_for(f"return {shown}", "no answer")
            take(browser, "chat")
            browser.visit(f"{url}/status", width=WIDTH, height=HEIGHT)
            browser.wait_for("return document.body.innerText.includes('smollm2')", "no status")
            take(browser, "status")
            browser.visit(f"{url}/docs", width=WIDTH, height=HEIGHT)
            take(browser, "docs")
    finally:
        server.terminate()
        server.wait()


def take(browser: Browser, name: str) -> None:
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser._ask("/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": media})
        file = PICTURES / f"{name}-{scheme}.png"
        browser.screenshot(file)
        Image.open(file).convert("RGB").quantize(64).save(file, optimize=True)
        assert file.stat().st_size <= MOST_BYTES, f"{file} is too large"
        print(file.name, file.stat().st_size)


if __name__ == "__main__":
    main()
