"""References run on the CPU: several processes of tests share its cores, or they take minutes instead of seconds."""

import os

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def threads():
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
