"""Codes and scales: packing, clipping, and GPTQ against optimal brain quantisation written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.compress.calibrate import InputStats
from slipstream.compress.quantize.rounding import QuantGrid, fit, gptq, nearest
from slipstream.model.stored.packing import pack_words, unpack_words
from slipstream.spec.scheme import WeightFormat

F32, CPU = torch.float32, torch.device("cpu")


def inputs(num_rows, inner, seed=0):
    """Correlated: of fewer directions than there are inputs, and a little noise."""
    rng = torch.Generator().manual_seed(seed)
    mixed = torch.randn(num_rows, inner // 2, generator=rng) @ torch.randn(
        inner // 2, inner, generator=rng
    )
    stats = InputStats.empty(inner, torch.device("cpu"))
    stats.add(mixed + 0.1 * torch.randn(num_rows, inner, generator=rng), 0.5)
    return stats


def weights(rows, inner, seed=1):
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed))


def output_error(made, weight, stats):
    d = made.dequantized() - weight
    return float(((d @ stats.hessian) * d).sum()) / stats.num_rows


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("num_codes", [1, 31, 32, 33, 96, 100])
def test_words_come_back(bits, num_codes):
    codes = torch.randint(
        -(1 << bits - 1),
        1 << bits - 1,
        (5, num_codes),
        generator=torch.Generator().manual_seed(bits),
    )
    words = pack_words(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (5, -(-num_codes * bits // 32))
    assert torch.equal(unpack_words(words, bits, num_codes), codes.to(torch.int8))
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    assert torch.equal(words, pack_to_int32(codes.to(torch.int8), bits))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_clipping_lowers_the_error(bits, symmetric):
    weight = weights(16, 128) ** 3  # with long tails
    fmt = WeightFormat(bits=bits, group_size=32, symmetric=symmetric)
    plain, clipped = (nearest(weight, fmt, F32, clip=clip).dequantized() for clip in (False, True))
    step = (
        plain.unflatten(1, (-1, 32)).sub(weight.unflatten(1, (-1, 32))).abs().amax()
        if bits == 8
        else None
    )
    assert (clipped - weight).square().sum() < (plain - weight).square().sum() * (
        1.0 if bits == 8 else 0.99
    )
    assert step is None or step < weight.abs().max() / 100


def test_a_float_scale_puts_what_weighs_most_on_a_code():
    """The error of a float depends on where in its binade it lies: with one large input, that decides a row's scale."""
    weight, fmt = weights(32, 64), WeightFormat(kind="float", inputs="fp8")
    stats = InputStats.empty(64, CPU)
    stats.add(torch.ones(8, 64).index_fill(1, torch.tensor([5]), 100.0), 1.0)
    plain, searched = (
        nearest(weight, fmt, torch.bfloat16, clip=clip, stats=stats).dequantized()
        for clip in (False, True)
    )
    assert (searched - weight)[:, 5].square().sum() < 0.05 * (plain - weight)[:, 5].square().sum()
    assert (searched - weight).square().sum() < 1.5 * (plain - weight).square().sum()


def test_scales_are_the_ones_that_are_written():
    """Codes are chosen for scales in 16 bits, so that they are the nearest there."""
    weight = weights(4, 64)
    grid = fit(weight, WeightFormat(bits=8, group_size=64), torch.bfloat16, clip=False)
    assert grid.scales.dtype == torch.bfloat16
    inside = weight.abs() < 127 * grid.scales.float()
    error = (nearest(weight, grid.fmt, torch.bfloat16, clip=False).dequantized() - weight).abs()
    assert (error <= grid.scales.float() / 2 + 1e-6)[inside].all()


def obq(weight, hessian, grid, order, damping):
    """One column after another in `order`; the remaining inputs' inverse second moments are found anew each time (Frantar and
    Alistarh 2022, equation 3): nothing of the Cholesky form is used."""
    h = hessian.astype(np.float64).copy()
    h[np.diag_indices(len(h))] += damping * np.mean(np.diag(h))
    w, left = weight.astype(np.float64).copy(), list(order)
    size = w.shape[1] // grid.scales.shape[1]
    for j in order:
        inverse = np.linalg.inv(h[np.ix_(left, left)])
        at = left.index(j)
        column = torch.from_numpy(w[:, j].astype(np.float32))
        rounded = grid.column(column, j // size).numpy().astype(np.float64)
        error = (w[:, j] - rounded) / inverse[at, at]
        w[:, left] -= np.outer(error, inverse[at])
        w[:, j] = rounded
        left.remove(j)
    return w


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [None, 32])
def test_gptq_is_optimal_brain_quantisation(act_order, symmetric, group_size, monkeypatch):
    monkeypatch.setattr(
        "slipstream.compress.quantize.rounding.COLUMNS_AT_ONCE", 24
    )  # blocks that no group ends with
    stats, weight = inputs(400, 64), weights(6, 64)
    fmt = WeightFormat(bits=4, group_size=group_size, symmetric=symmetric)
    made = gptq(weight, fmt, F32, stats, damping=0.05, act_order=act_order, clip=False)
    hessian = stats.hessian.numpy() / stats.num_rows
    order = np.argsort(-np.diag(hessian), kind="stable").tolist() if act_order else list(range(64))
    expected = obq(weight.numpy(), hessian, made.grid, order, 0.05)
    np.testing.assert_allclose(made.dequantized().numpy(), expected, atol=2e-3)


def test_gptq_finds_a_groups_grid_when_its_turn_comes():
    """Without an order of its own a group's scale is that of its columns as updated, not as they were."""
    stats, weight = inputs(400, 64), weights(6, 64)
    fmt = WeightFormat(bits=4, group_size=32)
    before = fit(weight, fmt, F32, clip=False)
    made = gptq(weight, fmt, F32, stats, act_order=False, clip=False)
    assert torch.equal(made.grid.scales[:, 0], before.scales[:, 0])
    assert not torch.equal(made.grid.scales[:, 1], before.scales[:, 1])


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_is_better_than_nearest_on_correlated_inputs(bits, act_order):
    stats, weight = inputs(1000, 128), weights(32, 128)
    fmt = WeightFormat(bits=bits, group_size=32)
    found = gptq(weight, fmt, F32, stats, act_order=act_order)
    assert output_error(found, weight, stats) < 0.5 * output_error(
        nearest(weight, fmt, F32, clip=True), weight, stats
    )


def test_gptq_with_inputs_that_never_come():
    stats, weight = inputs(20, 64), weights(4, 64)  # fewer rows than inputs, too
    stats.hessian[3] = stats.hessian[:, 3] = 0
    made = gptq(weight, WeightFormat(bits=4, group_size=32), F32, stats)
    assert made.dequantized().isfinite().all()
    assert (made.dequantized()[:, 3] == 0).all()


@pytest.mark.parametrize(
    "fmt",
    [
        WeightFormat(inputs="int8"),
        WeightFormat(inputs="int8", whole=True),
        WeightFormat(kind="float", inputs="fp8", whole=True),
    ],
)
def test_eight_bits(fmt):
    weight = weights(8, 64)
    made = nearest(weight, fmt, F32, clip=True)
    assert made.grid.scales.shape == ((1, 1) if fmt.whole else (8, 1))
    assert (made.dequantized() - weight).abs().max() < weight.abs().max() / (
        16 if fmt.kind == "float" else 200
    )
    assert isinstance(made.grid, QuantGrid)
    if fmt.kind == "int":
        assert int(made.codes.min()) >= -127


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_asymmetric_range_includes_zero(sign):
    """Weights of one sign: a range without 0 would give a zero point outside the codes, and a wrong 0."""
    fmt = WeightFormat(bits=4, group_size=8, symmetric=False)
    weight = sign * (1.0 + torch.arange(8.0) / 8).view(1, 8)
    rounded = nearest(weight, fmt, torch.float32, clip=False)
    step = float(weight.abs().max()) / 15
    assert torch.allclose(rounded.grid.scales, torch.full_like(rounded.grid.scales, step))
    assert (rounded.dequantized() - weight).abs().max() <= step / 2 * 1.001


def test_weights_for_8_bit_inputs_never_have_the_code_minus_128():
    """The kernels' products of 8 bits by 8 bits sum pairs in 16 bits, which two codes of −128 would overflow."""
    fmt = WeightFormat(inputs="int8")
    weight = torch.tensor([[-128.4, 127.0, 1.0, 0.0]])
    grid = QuantGrid(fmt, torch.ones(1, 1), None)
    assert grid.codes(weight).min() == -127
    assert QuantGrid(WeightFormat(), torch.ones(1, 1), None).codes(weight).min() == -128
