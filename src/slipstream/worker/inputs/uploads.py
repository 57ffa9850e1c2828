"""Copies host arrays to the device, several in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slipstream.platform import platform_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def upload(array: npt.NDArray[Any], device: torch.device | None) -> Tensor:
    """Upload a host array. The copy does not wait for the stream."""
    return platform_of(device).upload(array)


def upload_together(parts: Sequence[npt.NDArray[Any]], device: torch.device | None) -> list[Tensor]:
    """Upload host arrays [n] with one copy, as int32.

    Each begins at a multiple of 16 bytes, because Triton recompiles a kernel for other pointers.
    """
    begins = np.cumsum([0, *(-(-len(part) // 4) * 4 for part in parts)]).tolist()
    packed = np.zeros(begins[-1], np.int32)
    for begin, part in zip(begins, parts, strict=False):
        packed[begin : begin + len(part)] = part
    there = upload(packed, device)
    return [there[begin : begin + len(part)] for begin, part in zip(begins, parts, strict=False)]
