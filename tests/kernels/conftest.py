"""Kernels run in Triton's interpreter, made to round as the chip does. pytest reads this before it reads their tests."""

from __future__ import annotations

import os
import sys

if "triton" in sys.modules:
    raise ImportError(
        "a test of another folder imports Triton at its top, or what does (slipstream.kernels.triton, "
        "models of transformers): import it where it is used"
    )

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported; only in tests of kernels

import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels import quick_interpreter

_convert = interpreter._convert_float


def _convert_as_the_chip(data, given, wanted, rounding):
    """The interpreter loses the carry into the exponent where it rounds to float8 (1.95 becomes 1), and cuts off below the
    normal numbers; the chip rounds to nearest, as torch does."""
    if given == tl.float32 and wanted == tl.float8e4nv:
        rounded = torch.from_numpy(data.copy()).to(torch.float8_e4m3fn).view(torch.uint8)
        return rounded.numpy().reshape(data.shape)
    return _convert(data, given, wanted, rounding)


interpreter._convert_float = _convert_as_the_chip
quick_interpreter.install()
