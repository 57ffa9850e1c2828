"""Codes and scales: packing, clipping, and GPTQ against optimal brain quantisation written out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from slipstream.compress.calibrate import InputStats
from slipstream.compress.quantize.rounding import (
    QuantGrid,
    Rounded,
    compensate,
    fit,
    gptq,
    gptq_trace,
    inverse_factor,
    nearest,
    round_weight,
)
from slipstream.compress.recipe import parse
from slipstream.model.stored.packing import numbers, pack_words
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
def test_words_are_those_of_compressed_tensors(bits, num_codes):
    codes = torch.randint(
        -(1 << bits - 1),
        1 << bits - 1,
        (5, num_codes),
        generator=torch.Generator().manual_seed(bits),
    )
    words = pack_words(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (5, -(-num_codes * bits // 32))
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
    """A group's scale is computed when the group is reached, from columns that earlier groups have updated."""
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
    weight[:, 3] = 0.0
    rest, made = torch.arange(64) != 3, gptq(weight, WeightFormat(bits=4), F32, stats)
    without = dataclasses.replace(stats, hessian=stats.hessian[rest][:, rest])
    alone = gptq(weight[:, rest], WeightFormat(bits=4), F32, without).dequantized()
    torch.testing.assert_close(made.dequantized()[:, rest], alone)


@pytest.mark.parametrize(
    "fmt",
    [
        WeightFormat(inputs="int8"),
        WeightFormat(inputs="int8", whole=True),
        WeightFormat(kind="float", inputs="fp8", whole=True),
    ],
)
def test_eight_bits_round_within_a_step(fmt):
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


# --- The grid, by trying everything -------------------------------------------------------------------


def grid_of(fmt, low, high, share):
    """(scale, zero, codes' range) that `share` of the range of one group puts on the ends."""
    lowest, highest = -(1 << fmt.bits - 1) + (fmt.inputs is not None), (1 << fmt.bits - 1) - 1
    if fmt.symmetric:
        top = 127 if fmt.inputs else (2**fmt.bits - 1) / 2
        return max(-low, high) * share / top, 0, lowest, highest
    scale = (high - low) * share / (2**fmt.bits - 1)
    return scale, round(lowest - low * share / scale), lowest, highest


def least_error(fmt, group, importance, shares):
    found = []
    for share in shares:
        scale, zero, lowest, highest = grid_of(
            fmt, min(0.0, group.min()), max(0.0, group.max()), share
        )
        codes = np.clip(np.round(group / scale + zero), lowest, highest)
        found.append((((codes - zero) * scale - group) ** 2 * importance).sum())
    return min(found)


FORMATS = [
    WeightFormat(bits=2, group_size=16),
    WeightFormat(bits=4, group_size=16),
    WeightFormat(bits=3, group_size=16, symmetric=False),
    WeightFormat(bits=4, group_size=16, symmetric=False),
    WeightFormat(inputs="int8"),
]


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_clipping_finds_the_least_error_of_each_group(fmt, weighed):
    """The best of the shares from 0.46 to 1.06 of the largest magnitude is taken; without clipping the share is 1."""
    weight = weights(12, 64) ** 3
    stats = inputs(50, 64)
    stats.hessian *= torch.logspace(-2, 2, 64)[:, None]
    importance = stats.mean_square if weighed else torch.ones(64)
    size = fmt.group_size or 64
    for clip, shares in ((True, [1.06 - 0.02 * i for i in range(31)]), (False, [1.0])):
        made = nearest(weight, fmt, F32, clip=clip, stats=stats if weighed else None)
        wrong = (made.dequantized() - weight) ** 2 * importance
        for row in range(12):
            for at in range(0, 64, size):
                group = weight[row, at : at + size].double().numpy()
                expected = least_error(
                    fmt, group, importance[at : at + size].double().numpy(), shares
                )
                found = float(wrong[row, at : at + size].sum())
                assert found == pytest.approx(expected, rel=1e-3, abs=1e-9)


def diagonal(inner, seed=0):
    """Statistics of inputs that are independent: no column compensates for another."""
    rng = torch.Generator().manual_seed(seed)
    stats = InputStats.empty(inner, CPU)
    stats.hessian.diagonal().copy_(torch.rand(inner, generator=rng) ** 4 + 1e-3)
    stats.num_rows = 1
    return stats


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_gptq_of_independent_inputs_is_rounding_to_nearest(fmt, act_order):
    """The results are equal in every group: scales, zero points and codes."""
    weight, stats = weights(5, 64) ** 3, diagonal(64)
    found = gptq(weight, fmt, F32, stats, act_order=act_order)
    expected = nearest(weight, fmt, F32, clip=True, stats=stats)
    torch.testing.assert_close(found.grid.scales, expected.grid.scales)
    assert (found.grid.zeros is None) == (expected.grid.zeros is None) == fmt.symmetric
    torch.testing.assert_close(found.dequantized(), expected.dequantized())


def test_later_group_has_the_scales_and_zeros_of_what_is_left_of_it():
    """Input j + 32 goes with input j alone: no column of the second group changes once its turn has come."""
    stats, weight = InputStats.empty(64, CPU), weights(6, 64) - 0.3
    pair = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
    stats.hessian, stats.num_rows = torch.kron(pair, torch.eye(32)), 1
    fmt = WeightFormat(bits=3, group_size=32, symmetric=False)
    how = dict(damping=1e-6, act_order=False, clip=False)
    made, compensated = gptq_trace(weight, fmt, F32, stats, **how)
    first, before = (fit(w, fmt, F32, clip=False) for w in (compensated, weight))
    torch.testing.assert_close(made.grid.scales, first.scales)
    assert torch.equal(made.grid.zeros, first.zeros)
    assert torch.equal(made.grid.zeros[:, 0], before.zeros[:, 0])
    assert not torch.equal(made.grid.zeros[:, 1], before.zeros[:, 1])


def test_zero_point_is_of_the_same_share_as_the_scale():
    """Scales in 16 bits are off by up to 1/256, by which the zero point of 8 bits differs between shares."""
    fmt, weight = WeightFormat(bits=8, group_size=16, symmetric=False), weights(400, 16) ** 3
    grid = fit(weight, fmt, torch.bfloat16, clip=True)
    made = numbers(grid.codes(weight), grid.scales, grid.zeros)
    least = torch.full((400,), float("inf"))
    low, high = weight.amin(1).clamp(max=0), weight.amax(1).clamp(min=0)
    for i in range(31):
        share = 1.06 - 0.02 * i
        scale = ((high - low) * share / 255).bfloat16().float()
        zero = (-128 - low * share / scale).round()
        codes = (weight / scale[:, None] + zero[:, None]).round().clamp(-128, 127)
        back = (codes - zero[:, None]) * scale[:, None]
        least = torch.minimum(least, (back - weight).square().sum(1))
    assert ((made - weight).square().sum(1) <= least * 1.001 + 1e-12).all()


def test_compensated_weights_are_what_gptq_rounded():
    """Rounding them on the grid gives the codes, and they are not the weights that were given."""
    weight, stats = weights(6, 64), inputs(400, 64)
    fmt = WeightFormat(bits=4, group_size=32)
    made, compensated = gptq_trace(weight, fmt, F32, stats, damping=0.01, act_order=True, clip=True)
    same = made.grid.codes(compensated) == made.codes
    assert float(same.float().mean()) > 0.99
    assert not torch.allclose(compensated, made.dequantized(), atol=1e-2)
    assert not torch.allclose(compensated, weight, atol=1e-2)


def test_factor_is_of_the_damped_inverse_with_the_mean_for_inputs_that_never_come():
    h = inputs(400, 16).hessian.clone()
    dead = torch.zeros(16, dtype=torch.bool)
    dead[[3, 7]] = True
    h[dead] = 0.0
    h[:, dead] = 0.0
    upper = inverse_factor(h, 0.1, dead)
    mean = float(h.diagonal()[~dead].mean())
    expected = h.clone()
    expected.diagonal().add_(0.1 * mean)
    expected.diagonal()[dead] = mean
    assert torch.equal(upper, upper.triu())
    torch.testing.assert_close(
        upper.T.double() @ upper.double(), torch.linalg.inv(expected.double()), rtol=1e-3, atol=1e-8
    )


def test_damping_grows_until_the_factor_exists():
    ones = torch.ones(64, 64)
    assert inverse_factor(ones, 1e-9, torch.zeros(64, dtype=torch.bool)).isfinite().all()
    with pytest.raises(FloatingPointError, match="not a positive definite matrix"):
        inverse_factor(-ones, 1e-3, torch.zeros(64, dtype=torch.bool))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_compensation_moves_by_its_share_towards_the_original_outputs(share):
    rng = torch.Generator().manual_seed(3)
    original = torch.randn(200, 16, generator=rng)
    now = original + 0.1 * torch.randn(200, 16, generator=rng)
    weight, stats = weights(4, 16), InputStats.empty(16, CPU)
    stats.hessian, stats.shift = now.T @ now, (original - now).T @ now
    best = torch.linalg.lstsq(now, original @ weight.T).solution.T
    moved = compensate(weight, stats, share, damping=1e-9)
    torch.testing.assert_close(moved, weight + share * (best - weight), rtol=1e-3, atol=1e-4)
    stats.shift = None
    assert compensate(weight, stats, 1.0) is weight


def test_recipe_chooses_between_gptq_and_nearest():
    weight, stats = weights(6, 64), inputs(400, 64)
    fmt = WeightFormat(bits=3, group_size=32)

    def rounded(given, **settings):
        (step,) = parse([{"quantize": {"bits": 3, "group_size": 32, **settings}}]).steps
        return round_weight(weight, step, fmt, F32, given).dequantized()

    plain = nearest(weight, fmt, F32, clip=True, stats=stats).dequantized()
    assert torch.equal(rounded(stats, rounding="nearest"), plain)
    assert torch.equal(rounded(stats, rounding="gptq"), gptq(weight, fmt, F32, stats).dequantized())
    assert torch.equal(
        rounded(None, rounding="gptq"), nearest(weight, fmt, F32, clip=True).dequantized()
    )


# --- Codes and numbers ----------------------------------------------------------------------------


def test_rows_of_several_weights_join():
    fmt = WeightFormat(bits=4, group_size=16, symmetric=False)
    parts = [nearest(weights(rows, 32, seed=rows), fmt, F32, clip=False) for rows in (2, 3)]
    joined = Rounded.cat(parts)
    assert torch.equal(joined.dequantized(), torch.cat([part.dequantized() for part in parts]))


def test_words_of_many_rows_are_made_some_at_a_time(monkeypatch):
    codes = torch.randint(-4, 4, (10, 40), generator=torch.Generator().manual_seed(0))
    whole = pack_words(codes, 3)
    monkeypatch.setattr("slipstream.model.stored.packing.ROWS_AT_ONCE", 3)
    assert torch.equal(pack_words(codes, 3), whole)


def test_numbers_of_codes():
    codes = torch.tensor([[-8, 7, 0, 1], [2, 3, 4, 5]], dtype=torch.int8)
    scales = torch.tensor([[0.5, 2.0], [1.0, 4.0]])
    zeros = torch.tensor([[1, -1], [0, 2]], dtype=torch.int8)
    assert numbers(codes, scales, zeros).tolist() == [[-4.5, 3.0, 2.0, 4.0], [2.0, 3.0, 8.0, 12.0]]
    assert numbers(codes, scales, None).tolist() == [[-4.0, 3.5, 0.0, 2.0], [2.0, 3.0, 16.0, 20.0]]
    one = torch.tensor([[0.5]])
    assert numbers(codes, one, None).tolist() == [[-4.0, 3.5, 0.0, 0.5], [1.0, 1.5, 2.0, 2.5]]
    assert numbers(codes[:1], one, zeros[:1, :1]).tolist() == [[-4.5, 3.0, -0.5, 0.0]]
