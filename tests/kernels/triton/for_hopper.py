"""Triton's kernels compiled for Hopper on a machine without a GPU: Triton brings ptxas along. In a process of its own, since
the tests here have Triton interpret kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

PREPARED = """
import json, sys, types
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Device:  # what Triton asks of a device before it launches anything
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)

class Compiled:
    def __init__(self, kernel):
        self.kernel, self.binaries = kernel, []
    def __getitem__(self, grid):
        def launch(*args, launch_pdl=False, **options):
            self.binaries.append(self.kernel.warmup(*args, grid=grid, **options))
            self.grid = grid
        return launch

driver.set_active(Device())
"""


def run_for_hopper(program: str, *args: str) -> Any:
    """Run a program that wraps kernels in `Compiled`, with these arguments, and parse the JSON that it prints."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PREPARED + program, *args]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
