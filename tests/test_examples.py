"""The scripts of examples/, each run as a reader would run it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def test_there_are_ten_examples():
    assert len(EXAMPLES) >= 10


@pytest.mark.model
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_prints(path):
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
