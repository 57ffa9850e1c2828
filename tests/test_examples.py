"""The scripts of examples/, each run as a reader would run it; all but one in forks of a process that has imported torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FRESH = "stream"


def test_there_are_ten_examples():
    assert len(EXAMPLES) >= 10
    assert FRESH in {path.stem for path in EXAMPLES}


@pytest.mark.model
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_prints(path, preloaded):
    python = sys.executable if path.stem == FRESH else preloaded.tools / "python"
    source = os.pathsep.join([str(ROOT / "src"), *(p for p in sys.path if p)])
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(
        [python, path], capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
