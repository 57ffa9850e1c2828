"""Fixtures of the tests of compression and evaluation."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """torch computes on one thread, also where an engine sets their number. The models here are so small that threads would
    only wait for each other, the longer the busier the machine is."""
    torch.set_num_threads(1)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
