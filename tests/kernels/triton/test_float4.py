"""NVFP4 and MXFP4 of dense layers and experts: rounding, the GPU's order of codes and its kernels, in Triton's interpreter."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from slipstream.errors import CheckpointError
from slipstream.kernels.ops import Experts
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.products import float4
from slipstream.kernels.triton.products.float4 import LinearTile
from slipstream.kernels.weights.forms import Float4Linear, GroupedLinear, chunk_of
from slipstream.kernels.weights.quantize import dequantize, e2m1_values, round_linear, round_nvfp4
from slipstream.spec.model import DenseSpec, MoESpec
from slipstream.spec.scheme import SCHEMES

CPU = torch.device("cpu")


def random_weight(rows, inner, kind="nvfp4", *, bias=False, divides=False, dtype=torch.float32):
    """All codes, with all of e4m3's scales, and factors of rows that a checkpoint's fused tensors have."""
    groups, size = inner // SCHEMES[kind].group_size, SCHEMES[kind].group_size
    if kind == "nvfp4":
        scales = torch.randint(0, 0x7F, (groups, rows)).to(torch.uint8).view(torch.float8_e4m3fn)
    else:
        scales = torch.randint(-12, 4, (groups, rows)).float().exp2()
    return GroupedLinear(
        weight=torch.randint(-(2**15), 2**15, (rows, inner // 4)).to(torch.int16),
        scales=scales.to(dtype),
        bias=torch.randn(rows, dtype=dtype) if bias else None,
        group_size=size,
        chunk=chunk_of(inner, size),
        codes="e2m1",
        row_scales=torch.rand(rows) / 64 + 1e-3 if kind == "nvfp4" else None,
        divides=divides,
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16]
)  # the interpreter cuts bfloat16 off
@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize(("kind", "inner"), [("nvfp4", 64), ("nvfp4", 320), ("mxfp4-all", 192)])
def test_expanded_weights_are_the_same_numbers_bit_for_bit(kind, inner, divides, dtype):
    torch.manual_seed(inner)
    w = random_weight(48, inner, kind, divides=divides)
    packed = float4.pack_float4(w)
    assert (packed.out_features, packed.inner, packed.group_size) == (48, inner, w.group_size)
    assert torch.equal(float4.expanded(packed, dtype), dequantize(w, dtype))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4-all"])
def test_a_described_gpus_weight_is_packed_without_numbers(kind):
    w = random_weight(64, 256, kind)
    names = ("weight", "scales", "row_scales")
    given = {n: getattr(w, n) for n in names if getattr(w, n) is not None}
    packed = float4.pack_float4(replace(w, **{n: x.to("meta") for n, x in given.items()}))
    assert packed.weight.shape == float4.pack_float4(w).weight.shape


def test_every_scale_of_e4m3_is_packed():
    scales = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    bytes_ = float4._five_exponent_bits(scales)
    held = (bytes_ << 4 | 0x7000).to(torch.int16).view(torch.bfloat16).float()
    assert torch.equal(held[1:] * 2.0**-118, scales[1:])
    assert bytes_.max() < 256
    with pytest.raises(CheckpointError, match="nvfp4"):
        float4._five_exponent_bits(torch.tensor([-1.0]))


def test_the_instructions_that_expand_nvfp4():
    """Run here, on all 65,536 words, with a scale for each code of a word; Triton's interpreter has none of them."""
    words = torch.arange(2**16)
    scales = torch.tensor([2.0**-9, 448.0, 1.125, 0.875])
    e = sum(int(b) << 8 * i for i, b in enumerate(float4._five_exponent_bits(scales)))
    registers = {"$4": words | words << 16, "$5": torch.tensor(e)}

    def value(name):
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    def halves(x):
        return [
            (x >> shift & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16)
            for shift in (0, 16)
        ]

    def run(name, a, b, c=None):
        match name:
            case "and":
                return a & b
            case "or":
                return a | b
            case "shl":
                return a << b & 0xFFFFFFFF
            case "shr":
                return a >> b
            case "prmt":
                octets = [(a if i < 4 else b) >> 8 * (i % 4) & 255 for i in range(8)]
                return sum(octets[int(c) >> 4 * i & 7] << 8 * i for i in range(4))
            case "mad":
                return a * b + c & 0xFFFFFFFF
            case "mul":
                low, high = (
                    (x.float() * y.float()).bfloat16().view(torch.int16).long() & 0xFFFF
                    for x, y in zip(halves(a), halves(b), strict=True)
                )
                return low | high << 16

    found = re.findall(
        r"^(\w+)\.[\w.]+ ([$\w]+), ([$\w]+), ([$\w]+)(?:, ([$\w]+))?;$",
        float4.NVFP4_INSTRUCTIONS,
        re.MULTILINE,
    )
    for name, target, *sources in found:
        registers[target] = run(name, *(value(s) for s in sources if s))
    for i, places in enumerate(float4.PLACES):
        code = sum(
            (words >> place & 1) << bit for place, bit in zip(places, (3, 2, 1, 0), strict=True)
        )
        for half in halves(registers[f"${i}"]):
            assert torch.equal(half.float() * 256, e2m1_values(code) * scales[i])
    assert len(found) == 25


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4-all"])
@pytest.mark.parametrize(
    ("num_tokens", "tile"),
    [
        (1, None),
        (7, LinearTile(64, 16, 2, 4, 3)),
        (40, LinearTile(32, 64, 1, 4, 3)),
        (100, LinearTile(64, 32, 1, 4, 3)),  # several tiles of tokens
    ],
)
@pytest.mark.parametrize("inner", [192, 256])
def test_products_equal_the_reference(kind, num_tokens, tile, inner):
    torch.manual_seed(num_tokens)
    w = random_weight(80, inner, kind, bias=num_tokens != 7, divides=num_tokens == 7)
    ops, x = TritonOps(), torch.randn(num_tokens, inner)
    packed = ops.pack_weight(w)
    assert isinstance(packed, Float4Linear)
    ours = float4.float4_linear(x, packed, ops._scratch[CPU], tile=tile)
    expected = ReferenceOps().linear(x, w)
    assert (ours - expected).norm() <= 2e-6 * expected.norm()
    assert (ops.linear(x, packed) - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("how", ["many tokens", "deterministic", "dense copy"])
def test_other_products_use_the_expanded_weight(monkeypatch, how):
    torch.manual_seed(1)
    monkeypatch.setattr(float4, "DENSE_TOKENS" if how == "dense copy" else "MAX_TOKENS", 8)
    w, x = random_weight(64, 128), torch.randn(20, 128)
    ops = TritonOps(deterministic=how == "deterministic", dense_copies=how == "dense copy")
    assert (ops.pack_weight(w).dense is not None) == ops.dense_copies
    expected = ReferenceOps().linear(x, w)
    assert (ops.linear(x, ops.pack_weight(w)) - expected).norm() <= 1e-5 * expected.norm()


def test_products_in_float16():
    torch.manual_seed(2)
    w, x = random_weight(64, 128, dtype=torch.float16), torch.randn(9, 128).half()
    ops, expected = TritonOps(), ReferenceOps().linear(x, w).float()
    ours = ops.linear(x, ops.pack_weight(w)).float()
    assert (ours - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 40])
def test_experts_equal_the_reference(num_tokens):
    torch.manual_seed(num_tokens)
    expert = DenseSpec(intermediate_size=64, activation="silu", bias=True)
    spec = MoESpec(num_experts=9, num_experts_per_token=2, expert=expert, normalize=True)
    up, down = random_weight(9 * 128, 192, bias=True), random_weight(9 * 192, 64, bias=True)
    x, logits = torch.randn(num_tokens, 192), torch.randn(num_tokens, 9) - torch.arange(9) / 4
    expected, ops = ReferenceOps().moe(x, logits, Experts(up, down, spec)), TritonOps()
    packed = [ops.pack_experts(w, num_experts=9) for w in (up, down)]
    ours = ops.moe(x, logits, Experts(*packed, spec))
    assert (ours - expected).norm() <= 2e-5 * expected.norm()


# --- Rounding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divides", [False, True])
def test_rounding_to_nvfp4_takes_the_better_of_four_and_six(divides):
    torch.manual_seed(0)
    weight = torch.randn(9, 256) * torch.logspace(-3, 2, 9)[:, None]
    weight[3] = 0
    codes, scales, factors = round_nvfp4(weight, divides=divides)
    assert scales.dtype == torch.float8_e4m3fn
    assert (scales.float() > 0).all()
    whole = factors[:, None]
    each = scales.float() / whole if divides else scales.float() * whole
    values = e2m1_values(codes) * each.repeat_interleave(16, dim=1)
    every = e2m1_values(torch.arange(16)) * each.repeat_interleave(16, dim=1)[..., None]
    nearest = (weight[..., None] - every).abs().amin(-1)
    torch.testing.assert_close((weight - values).abs(), nearest)
    largest = codes.unflatten(1, (-1, 16))[torch.arange(9) != 3].bitwise_and(7).amax(-1)
    assert {int(x) for x in largest.unique()} <= {6, 7}
    assert (largest == 6).float().mean() > 0.1


def test_rounding_a_weight_is_the_same_numbers_as_its_parts():
    torch.manual_seed(0)
    weight = torch.randn(32, 128)
    w = round_linear(weight, None, SCHEMES["nvfp4"])
    codes, scales, factors = round_nvfp4(weight)
    values = e2m1_values(codes) * (scales.float() * factors[:, None]).repeat_interleave(16, dim=1)
    assert torch.equal(dequantize(w), values)
    assert (values - weight).norm() < 0.1 * weight.norm()
    assert torch.equal(dequantize(w.part(slice(8, 16))), values[8:16])
