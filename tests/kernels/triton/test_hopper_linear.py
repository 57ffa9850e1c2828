"""Hopper's products of few tokens. Gluon is not interpreted, so they are compiled here for sm_90 and the machine code is read;
tests/gpu compares their numbers."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.triton.products import hopper as hopper_linear
from slipstream.kernels.weights.forms import Linear, ScaledLinear
from tests.kernels.triton.for_hopper import run_for_hopper

PROGRAM = """
import slipstream.kernels.triton.products.hopper as h
from slipstream.kernels.triton.products.split_k import ArrivalCounters
from slipstream.kernels.weights.forms import Linear, Quantized, ScaledLinear

h._skinny_gemm_kernel = Compiled(h._skinny_gemm_kernel)
h.pdl_options = lambda _: {"PDL": True, "launch_pdl": True}
kind, (tokens, outer, inner) = sys.argv[1], map(int, sys.argv[2:])
if kind == "fp8":
    x = Quantized(torch.zeros(tokens, inner, dtype=torch.float8_e4m3fn), torch.ones(tokens, 1))
    weight = torch.zeros(outer, inner, dtype=torch.float8_e4m3fn)
    w = ScaledLinear(weight=weight, bias=None, scales=torch.ones(outer), out_dtype=torch.bfloat16)
else:
    x = torch.zeros(tokens, inner, dtype=torch.bfloat16)
    w = Linear(weight=torch.zeros(outer, inner, dtype=torch.bfloat16), bias=None)
h.skinny_gemm(x, w, ArrivalCounters(torch.device("cpu")))
binary = h._skinny_gemm_kernel.binaries[-1]
print(json.dumps([h._skinny_gemm_kernel.grid, binary.metadata.shared, binary.asm["sass"]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "grid", "stages"),
    [
        ("fp8", (64, 12288, 512), [96, 1], 4),
        ("fp8", (16, 4096, 8448), [64, 2], 8),
        ("bfloat16", (17, 512, 512), [8, 1], 8),
    ],
)
def test_weights_are_asked_for_before_the_kernel_in_front_has_ended(kind, sizes, grid, stages):
    """The whole ring's, by TMA; the inputs behind the wait. A multiprocessor has room for one thread block."""
    found, shared, sass = run_for_hopper(PROGRAM, kind, *map(str, sizes))
    assert found == grid
    assert 114_000 < shared <= 227 * 1024
    words = {"UTMALDG": "T", "ACQBULK": "W"}
    order = "".join(
        letter for line in sass.splitlines() for word, letter in words.items() if word in line
    )
    copies = 2 * stages + 2  # and those of the loop
    assert order.count("T") in (
        copies,
        copies * 2,
    )  # 256 bytes of a row, in halves where the compiler takes two
    assert "T" * stages + "W" in order or "T" * (2 * stages) + "W" in order


def test_what_it_covers():
    x, rows = torch.zeros(65, 64, dtype=torch.bfloat16), hopper_linear.MIN_ROWS
    w = Linear(weight=torch.zeros(rows, 64, dtype=torch.bfloat16), bias=None)
    assert [n for n in (0, 1, 64, 65) if hopper_linear.covers(x[:n], w)] == [1, 64]
    assert not hopper_linear.covers(x[:4], Linear(weight=w.weight[1:], bias=None))  # few rows
    assert not hopper_linear.covers(x[:4].float(), Linear(weight=w.weight.float(), bias=None))
    assert not hopper_linear.covers(
        x[:4, :37].contiguous(), Linear(weight=w.weight[:, :37].contiguous(), bias=None)
    )
    assert not hopper_linear.covers(
        x[:4, :32], Linear(weight=w.weight[:, :32], bias=None)
    )  # rows with gaps
    for dtype, most in ((torch.int8, 0), (torch.float8_e4m3fn, hopper_linear.MIDDLE_TOKENS)):
        eight = torch.zeros(6144, 16, dtype=dtype)
        scaled = ScaledLinear(
            weight=eight, bias=None, scales=torch.ones(6144), out_dtype=torch.bfloat16
        )
        assert (
            max((n for n in (1, 32, 33) if hopper_linear.covers(eight[:n], scaled)), default=0)
            == most
        )
