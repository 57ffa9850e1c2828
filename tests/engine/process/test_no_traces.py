"""Whoever is killed while an engine starts leaves nothing in the temporary folder, and no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.support import tiny_models
from tests.support.waiting import PATIENCE_S, wait_for


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.write_with_tokenizer(path)
    return path


@pytest.fixture
def temporary():
    """A folder with a short name: a socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("number", "after_s", "front_ends"),
    [
        (signal.SIGTERM, 0.3, 1),
        (signal.SIGTERM, 0.3, 2),
        (signal.SIGKILL, 0.0, 1),
        (signal.SIGKILL, 60, 1),
        (signal.SIGKILL, 0.3, 2),
    ],
)
def test_killed_while_it_starts(model, temporary, number, after_s, front_ends):
    """`after_s` after the folder is there; 60: when the server is ready."""
    options = [
        "--port",
        "0",
        "--device",
        "cpu",
        "--max-model-len",
        "64",
        "--api-servers",
        str(front_ends),
    ]
    command = [sys.executable, "-m", "slipstream", "serve", str(model), *options]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        if after_s == 60:
            assert "serves" in process.stdout.readline()
        else:
            wait_for(
                lambda: [*temporary.glob("slipstream-*")] or process.poll() is not None,
                "no folder was made",
            )
            time.sleep(after_s)
        process.send_signal(number)
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.stdout.close()
    wait_for(lambda: not [*temporary.glob("slipstream-*")], "a folder was left")
