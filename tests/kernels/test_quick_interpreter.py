"""The quicker interpreter checks and leaves what Triton's does."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.runtime.errors import InterpreterError


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _sum_of_squares_kernel(X, Out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(Out + at, _square(tl.load(X + at)) + tl.load(X + at))


def sum_of_squares(numbers):
    x = torch.tensor(numbers, dtype=torch.int32)
    out = torch.empty_like(x)
    _sum_of_squares_kernel[(1,)](x, out, N=len(numbers))
    return out.tolist()


@pytest.mark.parametrize("wrong", [46_341, -46_341, 2**31 - 1])
def test_overflow_is_seen(wrong):
    assert sum_of_squares([3, -46_340, 46_339, 0]) == [12, 46_340 * 46_339, 46_339 * 46_340, 0]
    with pytest.raises(InterpreterError, match="int32 overflow"):
        sum_of_squares([3, wrong, 0, 0])
    assert sum_of_squares([2]) == [6]  # the launch that failed has ended


def test_the_language_is_left_as_it_was():
    """Also by a function of the language that calls others: tests that compile kernels run in the same process."""
    places = tl, core, tl.tensor, tl.math, tl.dtype
    before = [dict(vars(place)) for place in places]
    sum_of_squares([1, 2])
    with pytest.raises(InterpreterError):
        sum_of_squares([2**31 - 1])
    assert [dict(vars(place)) for place in places] == before


def test_types_have_their_names_and_sizes():
    block = tl.block_type(tl.float32, [tl.constexpr(4), 8])
    assert (block.name, block.numel, list(block.shape)) == ("<['4', '8'], fp32>", 32, [4, 8])
    assert block == tl.block_type(tl.float32, (4, 8))
    assert block != tl.block_type(tl.float16, (4, 8)) != block
    assert tl.float32 != tl.int32
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float32, [3])
