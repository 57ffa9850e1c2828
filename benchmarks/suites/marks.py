"""Plugin of pytest for both suites: sets tests aside by the suite's data, and writes each test's outcome as a line of JSON."""

from __future__ import annotations

import fnmatch
import json
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any, NoReturn

import pytest

GIVEN: dict[str, Any] = {}
"""Values from `other_suites.py`: the suite's `data`, paths of `models`, the folder `copy`, the
file `log`."""


def aside(clause: int, why: str) -> NoReturn:
    pytest.skip(f"ASIDE {clause}: {why}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--given")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    GIVEN.update(json.loads(Path(early_config.known_args_namespace.given).read_text("utf-8")))


def short(nodeid: str) -> tuple[str, str]:
    """(file below the suite's tests, test)"""
    file, _, test = nodeid.partition("::")
    return file.removeprefix("tests/").removeprefix("entrypoints/"), test


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for rule in GIVEN["data"]["aside"]:
            names = rule["tests"]
            if any(fnmatch.fnmatchcase("::".join(short(item.nodeid)), name) for name in names):  # fmt: skip
                item.add_marker(pytest.mark.skip(f"ASIDE {rule['clause']}: {rule['why']}"))
                break


def written(nodeid: str, outcome: str, why: str = "") -> None:
    file, test = short(nodeid)
    line = {"file": file, "test": test[:120], "outcome": outcome, **({"why": why} if why else {})}
    with open(GIVEN["log"], "a", encoding="utf-8") as log:
        log.write(json.dumps(line, ensure_ascii=False) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        return written(report.nodeid, "passed")
    if report.skipped:
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        return written(report.nodeid, "aside", reason.removeprefix("Skipped: "))
    if report.failed and report.when != "teardown":
        crash = getattr(report.longrepr, "reprcrash", None)
        text = f"line {crash.lineno}: {crash.message}" if crash else str(report.longrepr)
        written(report.nodeid, "failed", " ".join(text.split())[:240])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        written(report.nodeid, "failed", "not collected: " + str(report.longrepr)[-240:])


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def wait_for(process: subprocess.Popen[bytes], url: str, log: Path, seconds: float = 600) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError("the server ended: " + log.read_text("utf-8")[-600:])
        try:
            with urllib.request.urlopen(url, timeout=3):
                return
        except OSError:
            time.sleep(0.1)
    process.kill()
    raise RuntimeError(f"no server within {seconds:.0f} s")
