"""Weights and rows rounded at load, by hand and by trying every scale."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.weights import quantize
from slipstream.kernels.weights.quantize import (
    dequantize,
    numbers,
    pack4,
    quantize_rows,
    round_linear,
    unpack4,
)
from slipstream.spec.scheme import E2M1, SCHEMES


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("inputs", "top"), [("int8", 127.0), ("fp8", 448.0)])
def test_largest_magnitude_of_a_row_is_the_largest_code(inputs, top):
    x = normal(5, 64) * torch.tensor([[1e-3], [1.0], [1e4], [7.0], [0.0]])
    found = quantize_rows(x, inputs)
    torch.testing.assert_close(found.scales[:4, 0], x[:4].abs().amax(-1) / top)
    assert found.values[:4].float().abs().amax(-1).tolist() == [top] * 4
    assert not found.values[4].float().any()
    assert (found.scales > 0).all()
    step = found.scales if inputs == "int8" else x.abs() / 8 + found.scales / 256
    assert ((numbers(found) - x).abs() <= step * 0.5001 + 1e-9).all()


def test_blocks_of_a_row_have_scales_of_their_own():
    x = normal(3, 256) * torch.tensor([1.0, 100.0]).repeat_interleave(128)
    found = quantize_rows(x, "fp8-block")
    assert (found.values.shape, found.scales.shape) == (x.shape, (3, 2))
    torch.testing.assert_close(found.scales, x.view(3, 2, 128).abs().amax(-1) / 448)
    assert ((numbers(found) - x).abs() <= x.abs() / 16 + 1e-2).all()


def test_tiles_of_a_weight_have_scales_of_their_own():
    """200 rows are a tile and a part of one; each tile here is of another size."""
    sizes = torch.tensor([[1.0, 10.0, 0.1], [1e3, 0.01, 5.0]])
    spread = sizes.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    weight = normal(200, 384) * spread
    made = round_linear(weight, None, SCHEMES["fp8-block"])
    assert (made.weight.shape, made.scales.shape) == (weight.shape, (2, 3))
    assert ((dequantize(made) - weight).abs() <= weight.abs() / 16 + spread * 1e-2).all()
    torch.testing.assert_close(made.scales[1, 0], weight[128:, :128].abs().max() / 448)


@pytest.mark.parametrize("rows_at_once", [4096, 3])
def test_group_has_the_scale_of_the_least_error(monkeypatch, rows_at_once):
    """Candidate scales put the largest element on 7 to 9 steps, on the side with one code more,
    and are then fitted to the codes."""
    monkeypatch.setattr(quantize, "ROWS_AT_ONCE", rows_at_once)
    weight = normal(8, 128)
    weight[0] = 0.0
    made = round_linear(weight, None, SCHEMES["int4"], torch.float32)
    size = made.group_size
    wrong = (dequantize(made) - weight).double().unflatten(1, (-1, size)).square().sum(-1)
    groups = weight.double().unflatten(1, (-1, size))
    largest = -groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    errors = []
    for step in (7.0, 7.25, 7.5, 7.75, 8.0, 8.25, 8.5, 8.75, 9.0):
        codes = (groups * (step / largest)).round().clamp(-8, 7)
        scale = (codes * groups).sum(-1, keepdim=True) / codes.square().sum(-1, keepdim=True)
        again = (groups / scale).round().clamp(-8, 7)  # with the fitted scale codes may change
        errors.append((again * scale - groups).square().sum(-1))
    least = torch.stack(errors)[:, 1:].amin(0)
    assert not wrong[0].any()
    assert (wrong[1:] <= least * 1.02 + 1e-9).all()
    assert (wrong[1:] <= errors[0][1:] + 1e-9).all()


def test_group_of_zeros_has_a_scale_in_16_bits():
    for dtype in (torch.float16, torch.bfloat16):
        weight = torch.zeros(2, 128, dtype=dtype)
        weight[1] = 1e-7
        made = round_linear(weight, None, SCHEMES["int4"])
        assert made.scales.dtype == dtype
        assert (made.scales != 0).all()
        assert dequantize(made).isfinite().all()
        assert not dequantize(made)[0].any()


def test_microscaled_codes_are_the_nearest_and_of_two_the_larger():
    """The largest magnitude, 6 to 8 times a power of two, is scaled to 4 to 8, and rounded to at most 6."""
    scheme = SCHEMES["mxfp4"]
    row = torch.zeros(128)
    row[:12] = torch.tensor([6.0, -6.0, 5.0, 2.5, -2.5, 1.75, 0.25, -0.2, 0.0, 0.75, -1.25, 3.5])
    weight = torch.stack([row, row * 2.0**5, row * 2.0**-7, -row])
    made = round_linear(weight, None, scheme, torch.float32)
    assert made.scales[0].tolist() == [1.0, 2.0**5, 2.0**-7, 1.0]
    nearest = [6.0, -6.0, 6.0, 3.0, -3.0, 2.0, 0.5, -0.0, 0.0, 1.0, -1.5, 4.0]
    found = dequantize(made)
    assert found[0, :12].tolist() == nearest
    assert torch.equal(found[1], found[0] * 2.0**5)
    assert torch.equal(found[3].abs(), found[0].abs())
    codes = unpack4(made.weight, made.chunk)
    assert codes[0, 8] == 0  # not −0
    assert codes.max() < 2 * len(E2M1)


def test_codes_of_four_bits_come_back_in_their_places():
    codes = torch.randint(
        16, (3, 64), generator=torch.Generator().manual_seed(1), dtype=torch.int32
    )
    for chunk in (16, 32, 64):
        words = pack4(codes, chunk)
        assert (words.dtype, words.shape) == (torch.int16, (3, 16))
        assert torch.equal(unpack4(words, chunk), codes)
