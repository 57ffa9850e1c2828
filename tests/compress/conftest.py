"""What the tests of compression share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """The models here are so small that threads only wait for each other. An engine sets their number, so it is set before
    each test."""
    torch.set_num_threads(1)
