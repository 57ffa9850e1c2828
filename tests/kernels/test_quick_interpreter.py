"""The quicker interpreter checks and leaves what Triton's does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

ROOT = Path(__file__).parents[2]


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


@triton.jit
def _many_operations_kernel(
    X, Whole, Rough, Out, N: tl.constexpr, M: tl.constexpr, at: tl.constexpr
):
    """Blocks of other sizes, of other types, numbers and constants: each with each."""
    row, column = tl.arange(0, N)[None, :], tl.arange(0, M)[:, None]
    x = tl.load(X + column * N + row)
    whole = tl.load(Whole + row)
    rough = tl.load(Rough + column)
    program = tl.program_id(0)
    y = 1.0 / ((x + 0.0) * -0.0)
    y = tl.where(y > 0, 3.0, -2.0) + x * whole + rough * row + (program + 1)
    y = tl.where((row < at) & (column >= 1), y, x.to(tl.bfloat16) + rough)
    y = y + (whole // 3) % 5 + (whole >> 1) - (row ^ column) + 2 * tl.maximum(x, rough)
    y = y + (x > 0.5) + tl.sum(tl.where(row == column, x, 1.5), 1)[:, None] + (at > 2)
    narrow, half, short = whole.to(tl.int8), x.to(tl.float16), rough.to(tl.float16)
    y = (
        y
        + narrow * 2
        + narrow * (program + 100)
        + half / short
        + (half + short)
        + ((row > 2) - (row > 5))
    )
    y = y + (x + row).shape[0] * 100 + x.numel
    tl.store(Out + program * N * M + column * N + row, y.to(tl.float16).to(tl.float32) + y)


def many_operations(at):
    torch.manual_seed(0)
    x, whole, rough = (
        torch.randn(4, 8),
        torch.arange(-3, 5),
        torch.randn(4).to(torch.float8_e4m3fn).to(torch.bfloat16),
    )
    out = torch.empty(2, 4, 8)
    _many_operations_kernel[(2,)](x, whole, rough, out, N=8, M=4, at=at)
    return out


SLOW = """
import sys
from tests.kernels import test_quick_interpreter as own
assert type(own.interpreter.interpreter_semantic) is own.interpreter.TritonSemantic, "something is replaced"
sys.stdout.buffer.write(b"".join(own.many_operations(at).numpy().tobytes() for at in (2, 5, 2)))
"""


def test_results_are_those_of_tritons_own_interpreter():
    """Bit for bit. Triton's runs in another process, in which nothing is replaced."""
    ran = subprocess.run(
        [sys.executable, "-c", SLOW],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=PIPE,
    )
    assert ran.returncode == 0
    assert b"".join(many_operations(at).numpy().tobytes() for at in (2, 5, 2)) == ran.stdout


@triton.jit
def _wrong_kernel(X, kind: tl.constexpr):
    if kind == "sizes":
        tl.store(X + tl.arange(0, 4), tl.arange(0, 4) + tl.arange(0, 8))
    elif kind == "pointers":
        tl.store(X, X + X)
    else:
        tl.store(X, tl.load(X).to(tl.uint8) + 1 + (-1))


WRONG = {"sizes": "incompatible dim", "pointers": "pointers together", "sign": "negative"}


@pytest.mark.parametrize(("kind", "said"), WRONG.items())
def test_what_does_not_go_together_is_refused_each_time(kind, said):
    for _ in range(2):
        with pytest.raises(InterpreterError, match=said):
            _wrong_kernel[(1,)](torch.zeros(8, dtype=torch.int32), kind=kind)


def test_short_numbers_convert_as_one_by_one():
    """The table is the conversion of all codes."""
    codes = torch.arange(256, dtype=torch.uint8).numpy()
    convert = interpreter._convert_float.args[0]
    for given, wanted in (
        (tl.float8e4nv, tl.float16),
        (tl.float8e4nv, tl.float32),
        (tl.bfloat16, tl.float32),
    ):
        some = codes[::-1].reshape(2, 128).astype(f"uint{given.primitive_bitwidth}") * 3
        for _ in range(2):
            ours = interpreter._convert_float(some, given, wanted, None)
            assert (ours == convert(some, given, wanted, None)).all()
            assert (ours.shape, ours.dtype) == (
                some.shape,
                convert(some, given, wanted, None).dtype,
            )
