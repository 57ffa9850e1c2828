"""Addresses, types and strides of arrays (`Array`): NumPy's, or CPU tensors. No torch."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    Array: TypeAlias = npt.NDArray[Any] | Tensor
else:
    Array = Any


def address(x: Array) -> int:
    """Returns the address of an array's first element."""
    # not `x.ctypes.data`, which creates an object and takes twice as long
    return int(x.__array_interface__["data"][0] if isinstance(x, np.ndarray) else x.data_ptr())


def type_name(x: Array) -> str:
    """Returns the name of an array's type, such as "bfloat16"."""
    return _type_name(x.dtype)


@cache
def _type_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def float32(x: Array) -> Array:
    """Returns the same values in float32, contiguous."""
    return (
        np.ascontiguousarray(x, np.float32) if isinstance(x, np.ndarray) else x.float().contiguous()
    )


def contiguous(x: Array) -> Array:
    """Returns the same values, contiguous."""
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()


def row_bytes(x: Array) -> int:
    """Bytes from one row of an array [n, m] to the next."""
    return int(x.strides[0] if isinstance(x, np.ndarray) else x.stride(0) * x.element_size())


def lies_together(x: Array, *, rows_only: bool = False) -> bool:
    """Tells whether an array, or with `rows_only` each of its rows, is contiguous."""
    if isinstance(x, np.ndarray):
        rows = x.strides[-1] == x.itemsize or x.shape[-1] == 1 or not x.size
        return rows if rows_only else x.flags.c_contiguous
    return x.stride(-1) == 1 if rows_only else x.is_contiguous()


def address_or_null(x: Array | None) -> int | None:
    return None if x is None else address(x)


def array(x: Any) -> npt.NDArray[Any]:
    """Returns an array, or a tensor of any device, as NumPy's."""
    return x if isinstance(x, np.ndarray) else np.asarray(x.cpu().numpy())
