"""Dequantizes a GGUF file's tensors. NumPy alone.

The order of operations is ggml's, so that float32 results agree bit for bit with its reference.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from slipstream.kernels.weights.gguf_codes import values
from slipstream.spec.stored.gguf import GGUFFile
from slipstream.spec.stored.gguf_types import BY_NAME

Blocks = npt.NDArray[np.uint8]

NUMBERS: dict[str, npt.DTypeLike] = {
    "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
}  # fmt: skip
"""Types whose blocks are plain floats."""

_CHUNK_VALUES = 1 << 20
"""Number of values dequantized at once. It limits float32 temporaries to a few MB, whatever the
tensor's size."""


def dequantize(blocks: Blocks, kind: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The values of `blocks` [N, block_bytes] of the type `kind`, as a flat new array of
    `dtype`."""
    block_size = BY_NAME[kind].block_size
    result = np.empty((len(blocks), block_size), dtype)
    step = _CHUNK_VALUES // block_size
    # values too large for float16 become infinite
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, len(blocks), step):
            own = np.ascontiguousarray(blocks[begin : begin + step])
            result[begin : begin + step] = (
                own.view(NUMBERS[kind]) if kind in NUMBERS else values(own, kind)
            )
    return result.reshape(-1)


def dequantize_tensor(file: GGUFFile, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A tensor of the file as a new array of `dtype` with its shape. Temporaries stay within a few
    MB."""
    blocks = file.raw(name)
    tensor = file.tensors[name]
    return dequantize(blocks, tensor.type, dtype).reshape(tensor.shape)
