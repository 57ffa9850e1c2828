"""Converts torch's CPU tensors to NumPy arrays and back, over the same memory. NumPy's bfloat16 is
from `ml_dtypes`."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.kernels.cpu.packed import stand_in
from slipstream.kernels.weights.forms import Linear

AnyLinear = TypeVar("AnyLinear", bound=Linear)


def to_array(x: Tensor) -> npt.NDArray[Any]:
    """Returns an array over the memory of a CPU tensor. A meta tensor gives an array without
    memory."""
    kind = {torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}.get(
        x.dtype
    )
    if x.device.type == "meta":
        return stand_in(
            tuple(x.shape), str(x.dtype).removeprefix("torch.") if kind is None else kind
        )
    if kind is None:
        return x.detach().numpy()
    bits = torch.int16 if kind is ml_dtypes.bfloat16 else torch.int8
    return x.detach().view(bits).numpy().view(kind)


def to_tensor(x: npt.NDArray[Any]) -> Tensor:
    """Returns a tensor over the memory of an array. A read-only array is copied, since torch has
    none."""
    x = x if x.flags.writeable else x.copy()
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    if x.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(x.view(np.int8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(x)


def as_arrays(w: AnyLinear) -> AnyLinear:
    """Returns a copy of the weight whose tensors are replaced by NumPy arrays over the same
    memory."""
    found: dict[str, Any] = {
        f.name: to_array(v)
        for f in dataclasses.fields(w)
        if isinstance(v := getattr(w, f.name), Tensor)
    }
    if (kind := getattr(w, "out_dtype", None)) is not None:
        found["out_dtype"] = np.dtype(str(kind).removeprefix("torch."))
    return dataclasses.replace(w, **found)


def meta(x: npt.NDArray[Any]) -> Tensor:
    """Returns a tensor of that shape and type on torch's meta device, which holds no memory."""
    return torch.empty(x.shape, dtype=getattr(torch, str(x.dtype)), device="meta")
