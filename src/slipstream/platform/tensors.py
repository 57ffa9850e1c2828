"""`Values` that are torch tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Tensors:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def dtype(self, name: str) -> torch.dtype:
        return torch.float8_e4m3fn if name == "fp8" else getattr(torch, name)

    def full(self, shape: tuple[int, ...], value: float) -> Tensor:
        return torch.full(shape, value, dtype=torch.float32, device=self.device)

    def arange(self, count: int) -> Tensor:
        return torch.arange(count, device=self.device)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def take(self, x: Tensor, index: Tensor, dim: int = 0) -> Tensor:
        return x.index_select(dim, index)

    def ranges(self, starts: Tensor, lengths: Tensor, total: int) -> Tensor:
        shifts = starts - (lengths.cumsum(0) - lengths)
        return self.arange(total) + shifts.repeat_interleave(lengths, output_size=total)

    def put(self, x: Tensor, rows: Tensor, values: Tensor) -> None:
        x.index_copy_(0, rows, values.to(x.dtype))

    def array(self, x: Tensor) -> npt.NDArray[np.generic]:
        return x.numpy()

    def on_host(self, x: Tensor) -> Tensor:
        return x.cpu()

    def floats(self, x: Tensor) -> npt.NDArray[np.float32]:
        return np.asarray(x.float().cpu().numpy())

    def magnitudes(self, cache: Tensor) -> Tensor:
        return cache.float().abs().amax(dim=(0, 2, 3))

    def inference(self) -> AbstractContextManager[None]:
        return torch.inference_mode()
