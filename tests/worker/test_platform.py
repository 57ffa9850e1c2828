"""Reactions of a GPU's platform to CUDA's answers. On a GPU: tests/gpu."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.errors import OutOfMemoryError
from slipstream.platform.cuda import CudaPlatform


class Runtime:
    """CUDA's runtime, as far as it keeps the last error, and torch, which raises it behind its next launch."""

    def __init__(self):
        self.last_error = 0

    def cudaHostRegister(self, at, num_bytes, flags):  # noqa: N802 (CUDA's name)
        self.last_error = 2
        return 2

    def launch(self, *size, **how):
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


def test_memory_that_cuda_does_not_pin_fails_no_later_launch(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", runtime.launch)
    with pytest.raises(OutOfMemoryError, match=r"CUDA error 2.*ulimit -l"):
        CudaPlatform(torch.device("cuda:0")).pin(np.zeros(4096, np.uint8))
    assert not runtime.last_error
    runtime.launch(1)
