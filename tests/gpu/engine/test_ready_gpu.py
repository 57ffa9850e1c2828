"""Nothing compiles after a start: Triton's hooks count compilations through a load with everything on.

Run: pytest -m gpu tests/gpu/engine/test_ready_gpu.py. Each engine starts in a process of its own with an empty cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.support import tiny_models
from tests.worker.start import ready_load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("case", ready_load.CASES, ids=ready_load.name_of)
def test_nothing_compiles_after_a_start(case, tmp_path):
    family, settings = case
    tiny_models.write_with_tokenizer(tmp_path / "model", family, **ready_load.shape_of(family))
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env["TRITON_CACHE_DIR"] = str(tmp_path / "triton")  # Triton's own, so that the machine is fresh
    command = [sys.executable, "-m", "tests.worker.start.ready_load", str(tmp_path / "model")]
    ran = subprocess.run(
        [*command, json.dumps(settings), "cuda"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["late"] == []
    assert said["num_prepared"]
    assert said["met_by_start"] == [], "the start's own steps met kernels that were not prepared"
    assert "steps may compile some" not in ran.stderr
