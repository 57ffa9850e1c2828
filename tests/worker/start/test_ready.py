"""The kernels that are found before a start include all that a load launches, on a GPU that is described and not there.

In processes of their own, since the tests here have Triton interpret kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support import tiny_models
from tests.worker.start import ready_load

LIMITS = {"max_num_seqs": 80, "max_num_batched_tokens": 512}


QUICK = (0, 5, 9)  # of the cases; each takes 15 s of a core, and tests/gpu has them all
CASES = [
    pytest.param(case, id=ready_load.name_of(case), marks=[pytest.mark.slow] * (i not in QUICK))
    for i, case in enumerate(ready_load.CASES)
]


@pytest.mark.parametrize("case", CASES)
def test_a_load_launches_no_kernel_that_was_not_found_before(case, tmp_path):
    family, settings = case
    tiny_models.write(tmp_path / "model", family, **ready_load.shape_of(family))
    said = run(tmp_path / "model", {**LIMITS, **settings}, "meta:90")
    assert said["num_launched"] > 20
    assert said["late"] == []


@pytest.mark.parametrize("device", [pytest.param("meta:80", marks=pytest.mark.slow), "meta:100"])
def test_gpus_of_other_generations_have_their_kernels_found_as_well(device, tmp_path):
    tiny_models.write(tmp_path / "model", "llama", **ready_load.shape_of("llama"))
    assert run(tmp_path / "model", LIMITS, device)["late"] == []


def run(model, settings, device):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "tests.worker.start.ready_load",
        str(model),
        json.dumps(settings),
        device,
    ]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])
