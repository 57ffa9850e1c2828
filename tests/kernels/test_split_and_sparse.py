"""Products whose weight is in two parts (LLM.int8()), and the choice between a 2:4 weight's dense and sparse products."""

from __future__ import annotations

import pytest
import torch

from slipstream.compress.sparsify import keep
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.products import sparse24
from slipstream.kernels.weights.forms import SplitLinear
from slipstream.kernels.weights.quantize import round_linear
from slipstream.spec.devices.autotune_table import NEVER, Measured, TileTable
from slipstream.spec.scheme import SCHEMES


@pytest.mark.parametrize("num_tokens", [1, 7, 70])
@pytest.mark.parametrize("with_bias", [False, True])
def test_outliers_are_not_rounded(num_tokens, with_bias):
    weight, x = torch.randn(48, 64), torch.randn(num_tokens, 64)
    bias = torch.randn(48) if with_bias else None
    x[:, [3, 17]] = torch.tensor([100.0, -80.0])  # far from the rest in every draw
    whole = round_linear(weight, bias, SCHEMES["int8"])
    exact = x @ (whole.weight.float() * whole.scales[:, None]).T + (0.0 if bias is None else bias)
    split = SplitLinear.of(whole.weight.clone(), whole.scales, (3, 17), torch.float32)
    split = SplitLinear(
        **{f: getattr(split, f) for f in ("weight", "scales", "out_dtype", "columns", "dense")},
        bias=bias,
    )
    assert split.inputs is None
    reference = ReferenceOps().linear(x, split)
    plain = ReferenceOps().linear(x, whole)
    assert (reference - exact).norm() < 0.1 * (plain - exact).norm()
    ops = TritonOps()
    torch.testing.assert_close(
        ops.linear(x, ops.pack_weight(split)), reference, rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_halves_are_seen(dtype):
    score = torch.rand(192, 128) + 0.1
    weight = (score * keep(score, 0.5, "2:4", by_row=True) * -50).to(dtype)
    assert sparse24.is_sparse24(weight)
    more = weight.clone()
    more.view(torch.int8 if dtype.itemsize == 1 else dtype)[150, 8:12] = 1
    assert not sparse24.is_sparse24(more)
    assert not sparse24.is_sparse24(weight[:40])  # no multiple of what the library takes


@pytest.mark.parametrize(("kind", "usual"), [("bfloat16", None), ("int8", 256), ("fp8", None)])
def test_the_table_says_from_when_on_the_sparse_product_is_taken(monkeypatch, kind, usual):
    """A file or what comes with Slipstream decides, never a clock: the same in every run."""
    monkeypatch.setattr(sparse24, "available", lambda weight: True)
    monkeypatch.setattr(torch, "_cslt_compress", lambda weight: weight)
    weight = (torch.randn(128, 64) * keep(torch.rand(128, 64), 0.5, "2:4", by_row=True)).bfloat16()

    def from_tokens(*entry):
        entries = {("sparse24", kind, (128, 64)): Measured(entry)} if entry else {}
        ops = TritonOps(TileTable(device="", entries=entries))
        w = ops.quantize_weight(weight, None, None if kind == "bfloat16" else SCHEMES[kind])
        return None if w.sparse is None else w.sparse.from_tokens

    assert from_tokens() == usual
    assert from_tokens(64) == 64
    assert from_tokens(NEVER) is None
    weight[5, :4] = 1.0
    assert from_tokens(64) is None
