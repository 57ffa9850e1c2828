"""The manual as a site (mkdocs.yml): built from this checkout, strictly, without a network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.browser import Browser

ROOT = Path(__file__).parents[1]
COPIED = ("mkdocs.yml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "benchmarks", "examples")  # fmt: skip
# Resources that a page loads, other than links that a reader follows.
LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*?\bsrc=[\"']?([^\"' >]+)|<link\b[^>]*>")


def build(folder, out):
    """`mkdocs build` of the manual in `folder`. Proxies that lead nowhere stand for a host without a network."""
    pytest.importorskip("material", reason="the extra docs is not there")
    env = {**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    env |= {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(out)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site") / "site"
    built = build(ROOT, out)
    assert built.returncode == 0, built.stderr
    return out


def test_every_page_of_the_manual_is_in_the_site(site):
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) >= 30
    for page in pages:
        assert (site / page.with_suffix("") / "index.html").is_file(), page
    assert "Slipstream" in (site / "index.html").read_text("utf-8")  # README.md


def test_search_finds_headings(site):
    entries = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    assert "server/access/#keys-and-limits" in {entry["location"] for entry in entries}


def test_pages_load_nothing_from_other_hosts(site):
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        for found in LOADED.finditer(page.read_text("utf-8")):
            if found[0].startswith("<link") and 'rel="canonical"' in found[0]:
                continue
            for address in re.findall(r"(?:src|href)=[\"']?([^\"' >]+)", found[0]):
                assert not urlsplit(address).netloc, f"{page}: {found[0]}"


def test_styles_load_nothing_from_other_hosts(site):
    for style in site.rglob("*.css"):
        for address in re.findall(
            r"(?:url\(|@import)\s*[\"']?([^\"')]+)", style.read_text("utf-8")
        ):
            assert not urlsplit(address).netloc, f"{style}: {address}"


def test_each_broken_link_is_a_reason_to_fail_the_build(tmp_path):
    links = ("no-such-page.md", "installing.md#no-such-heading", "../benchmarks/no-such-file.json")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("scratch"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    with (tmp_path / "docs" / "cli.md").open("a", encoding="utf-8") as page:
        page.write("".join(f"\n[broken]({link})\n" for link in links))
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    for said in ("no-such-page.md", "no-such-heading", "no-such-file.json"):
        assert said in built.stderr
    assert len(re.findall("^WARNING", built.stderr, re.MULTILINE)) == len(links)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(site):
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_site_is_accessible(address, tmp_path):
    """The rules are axe-core's."""
    pages = ("", "tutorials/replace-ollama/", "cli/")
    with Browser.start(tmp_path) as driver:
        for scheme, width, height in (("light", 1280, 800), ("dark", 390, 844)):
            driver.prefer(scheme)
            for page in pages:
                driver.visit(f"{address}/{page}", width=width, height=height)
                driver.wait_for("return document.body.innerText.length > 100", page)
                assert driver.serious_violations() == [], page
                assert driver.run("return document.documentElement.scrollWidth <= innerWidth"), page
                assert driver.errors() == [], page
