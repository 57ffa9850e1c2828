"""The host's processor, with torch tensors as values."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.base.priority import after_low_priority
from slipstream.platform.host import HostPlatform
from slipstream.platform.tensors import Tensors


class CpuPlatform(HostPlatform):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.values = Tensors(device)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:  # numpy's strides of nothing are no tensor's
            return torch.zeros(shape, dtype=dtype)
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array)

    def upload_into(self, tensor: Tensor, array: npt.NDArray[np.generic]) -> None:
        tensor.copy_(torch.from_numpy(array))

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def activate(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # of this thread
        after_low_priority(torch.set_num_threads, num_threads)
