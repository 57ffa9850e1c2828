"""The tutorials from top to bottom, as a reader follows them, with the packaged SmolLM2.

The one that compresses takes a tiny model, since compressing SmolLM2 takes minutes. `-m "slow or not slow"` runs all.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.waiting import PATIENCE_S, wait_for

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
SLOW = ("a-fleet", "replace-vllm")  # half a minute each
TUTORIALS = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem in SLOW))
    for page in sorted(FOLDER.glob("*.md"))
]
SERVES = ("slipstream serve ", "slipstream fleet up ")  # such a block goes on until the page's end


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def reader(tmp_path, preloaded):
    """A folder, and the environment of a terminal in it. Commands are forks of one process (tests/support/preloaded.py), and
    servers, which end by signals, processes of their own."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, words in (("slipstream", "-m slipstream "), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        (tools / name).chmod(0o755)
    source = os.pathsep.join(
        [str(Path(__file__).parents[1] / "src"), *(path for path in sys.path if path)]
    )
    return tmp_path, {
        **os.environ,
        "PATH": f"{preloaded.tools}:{os.environ['PATH']}",
        "FRESH": str(tools),
        "PYTHONPATH": source,
    }


def answers(port):
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    return False


def served(command, folder, environment, port):
    """The process of a shell command that serves on `port`, once it answers."""
    server = subprocess.Popen(["sh", "-ec", command], cwd=folder, env=environment)
    try:
        wait_for(lambda: answers(port) or server.poll() is not None, command)
        assert server.poll() is None, command
    except BaseException:
        server.kill()
        raise
    return server


def carried_out(language, code, folder, environment, number):
    """Output of a block of a page. A Python block is run from the file `number`.py."""
    if language == "python":
        (folder / f"{number}.py").write_text(code)
        code = f"python {number}.py"
    done = subprocess.run(
        ["sh", "-euc", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.model
@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_works_from_top_to_bottom(page, reader, tiny_model):
    folder, environment = reader
    port, said, servers = free_port(), "", []
    blocks = re.findall(r"```(sh|python)\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert blocks
    try:
        for number, (language, code) in enumerate(blocks):
            code = code.replace("8000", str(port)).replace("11434", str(port))
            if page.stem == "shrink-a-model":
                code = code.replace("smollm2", str(tiny_model))
            if code.startswith(SERVES):
                option = "" if "--port" in code or "fleet" in code else f" --port {port}"
                command = f'PATH="$FRESH:$PATH"; exec {code.strip()}{option}'
                servers.append(served(command, folder, environment, port))
                continue
            said += carried_out(language, code, folder, environment, number)
            if "fleet down" in code:
                servers[-1].wait(PATIENCE_S)
    finally:
        for server in servers:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
        assert [server.wait(PATIENCE_S) for server in servers] == [0] * len(servers)
    if "Name the capital of France" in page.read_text("utf-8"):
        assert "Paris" in said
