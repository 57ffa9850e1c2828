"""`DraftMemory` with torch tensors on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels.blocks import BlockRows
from slipstream.kernels.metadata import LayerKV, cache_tensors
from slipstream.kernels.ops import OpSet
from slipstream.platform import platform_of
from slipstream.spec.model import LayerSpec


class DeviceMemory:
    def __init__(self, ops: OpSet, device: torch.device, dtype: torch.dtype) -> None:
        self.ops, self.dtype, self.itemsize = ops, dtype, dtype.itemsize
        self.platform = platform_of(device)

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        return self.platform.zeros(shape, self.dtype)

    def lowest(self, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, -torch.inf, device=self.platform.device)

    def layer(self, layer: LayerSpec, num_blocks: int, block_size: int) -> LayerKV:
        by_dim = self.ops.values_by_dim(self.dtype)
        return LayerKV(
            *cache_tensors(
                layer.attention, num_blocks, block_size, self.zeros, values_by_dim=by_dim
            )
        )

    def block_rows(self, arrays: Sequence[Tensor]) -> BlockRows | None:
        return BlockRows.of(arrays) if arrays else None

    def copy_blocks(self, rows: BlockRows | None, source: Tensor, target: Tensor) -> None:
        if rows is not None:
            self.ops.copy_blocks(rows, rows, source, target)
