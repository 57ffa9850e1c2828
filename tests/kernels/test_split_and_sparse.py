"""Products whose weight is in two parts (LLM.int8()), and the choice between a 2:4 weight's dense and sparse products."""

from __future__ import annotations

import itertools

import pytest
import torch

from slipstream.compress.sparsify import keep
from slipstream.kernels.ops import Linear, SplitLinear
from slipstream.kernels.quantize import round_linear
from slipstream.kernels.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps, halves
from slipstream.model.scheme import SCHEMES


@pytest.mark.parametrize("num_tokens", [1, 7, 70])
@pytest.mark.parametrize("with_bias", [False, True])
def test_outliers_are_not_rounded(num_tokens, with_bias):
    weight, x = torch.randn(48, 64), torch.randn(num_tokens, 64)
    bias = torch.randn(48) if with_bias else None
    x[:, [3, 17]] = torch.tensor([100.0, -80.0])  # far from the rest in every draw
    whole = round_linear(weight, bias, SCHEMES["int8"])
    exact = x @ (whole.weight.float() * whole.scales[:, None]).T + (0.0 if bias is None else bias)
    split = SplitLinear.of(whole.weight.clone(), whole.scales, (3, 17), torch.float32)
    split = SplitLinear(**{f: getattr(split, f) for f in ("weight", "scales", "out_dtype", "columns", "dense")}, bias=bias)
    assert split.inputs is None
    reference = ReferenceOps().linear(x, split)
    plain = ReferenceOps().linear(x, whole)
    assert (reference - exact).norm() < 0.1 * (plain - exact).norm()
    ops = TritonOps()
    torch.testing.assert_close(ops.linear(x, ops.adopt_linear(split)), reference, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_halves_are_seen(dtype):
    score = torch.rand(192, 128) + 0.1
    weight = (score * keep(score, 0.5, "2:4", by_row=True) * -50).to(dtype)
    assert halves.has_halves(weight)
    more = weight.clone()
    more.view(torch.int8 if dtype.itemsize == 1 else dtype)[150, 8:12] = 1
    assert not halves.has_halves(more)
    assert not halves.has_halves(weight[:40])  # no multiple of what the library takes


@pytest.mark.parametrize(
    ("dense", "expected"),
    [((9, 9, 9, 9), 64), ((1, 9, 9, 9), 256), ((1, 9, 1, 9), 4096), ((9, 9, 9, 1), None)],
)
def test_the_sparse_product_is_taken_where_it_was_the_faster(dense, expected):
    """`dense`: times at 64, 256, 1,024 and 4,096 tokens; the sparse one takes 5."""
    times = itertools.chain.from_iterable((5.0, float(t)) for t in reversed(dense))
    chooser = halves.Halves(clock=lambda call: next(times))
    assert chooser._measure(Linear(weight=torch.zeros(64, 64)), lambda x, w: x) == expected
