"""The C++ kernels against the reference, on every instruction set that this machine runs.

Tolerances. Float32: sums of at most a few thousand products in another order, and an exp of 2 ulp: 2e-5. Bfloat16 products
round inputs to 8 bits (2⁻⁹ relative each), errors that average out over a sum: 2⁻⁷ of the largest result. 8-bit inputs are
compared with the same rounding done by hand, so that only float32's order of summing differs."""

from __future__ import annotations

import dataclasses
import itertools
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.cpu import host_ops, native
from slipstream.kernels.cpu.host_ops import (
    SPARSE_FROM,
    SPARSE_FROM_ELSEWHERE,
    TOKENS,
    HostOps,
    four_bits,
)
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.packed import NativeLinear, Packed, stand_in
from slipstream.kernels.cpu.program.native_program import Program
from slipstream.kernels.cpu.program.programs import LinearArgmax, LinearProgram, add_linear
from slipstream.kernels.cpu.thread_pool import ThreadPool
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.ops import AttentionParams, QKVLayout
from slipstream.kernels.plain.reference import ReferenceOps, to_cache
from slipstream.kernels.select import select_ops
from slipstream.kernels.weights.forms import (
    BlockLinear,
    BlockRows,
    GroupedLinear,
    ScaledLinear,
    chunk_of,
)
from slipstream.kernels.weights.quantize import dequantize as dequantize_linear
from slipstream.kernels.weights.quantize import pack4, round_linear
from slipstream.model.stored.gguf_quants import dequantize
from slipstream.spec.scheme import SCHEMES
from slipstream.spec.stored.gguf_types import CPU_BLOCK_BYTES
from tests.kernels.cases import (
    Shape,
    attention_options,
    draw_layout,
    edge_shapes,
    layer_norm,
    rms_norm,
    rows_of,
    sampling,
    step,
)

torch.set_num_threads(1)
reference = ReferenceOps()
ISAS = native.instruction_sets(emulated=True)
OPS = {isa: NativeOps(2, isa) for isa in ISAS}
DTYPES = [torch.float32, torch.bfloat16]
OF_TILES = ("portable-amx", "amx")
"""Instruction sets with their own products, and their own attention of many tokens in bfloat16.
All else is another's (`with_tiles` of api.cpp). Tests of random shapes draw from them, too."""
SHAPES = [(1, 3), (7, 5), (16, 32), (33, 64), (48, 96), (160, 100), (100, 352)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 12, 13, 40]


@pytest.fixture(params=ISAS)
def ops(request) -> NativeOps:
    return OPS[request.param]


@pytest.fixture(params=[isa for isa in ISAS if isa not in OF_TILES])
def attending(request) -> NativeOps:
    """Op sets that have an attention of their own, in every type."""
    return OPS[request.param]


def test_groups_that_the_kernels_lack_are_refused(ops):
    odd = replace(SCHEMES["int4"], group_size=64)
    for rounds in (
        lambda: ops.quantize_weight(torch.zeros(16, 128), None, odd),
        lambda: four_bits(odd),
    ):
        with pytest.raises(
            ConfigError, match="no int4 product with groups of 64; use 'int8' or 'int4'"
        ):
            rounds()


def assert_near(got: Tensor, expected: Tensor, largest: float | None = None) -> None:
    assert got.dtype == expected.dtype
    size = float(expected.abs().max()) if largest is None else largest
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5 * max(size, 1.0))
    else:
        torch.testing.assert_close(got.float(), expected.float(), rtol=2**-8, atol=2**-7 * size)


def test_it_is_what_a_cpu_gets() -> None:
    chosen = select_ops(torch.device("cpu"), num_threads=2)
    assert isinstance(chosen, NativeOps)
    assert (chosen.pool.isa, chosen.pool.num_threads) == (ISAS[-1], 2)
    with pytest.raises(ConfigError, match="portable"):
        NativeOps(1, "sse9")


# --- Products ---------------------------------------------------------------------------------------------------------


def eight_bits(x: Tensor) -> Tensor:
    """Inputs as products of whole numbers see them: 8 bits, with a scale for every 32."""
    n = x.shape[1]
    groups = torch.nn.functional.pad(x.float(), (0, -n % 32)).unflatten(1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scale).nan_to_num().round() * scale).flatten(1)[:, :n]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_dense_products_equal_the_reference(ops, dtype, out, inner):
    torch.manual_seed(out)
    weight, bias = torch.randn(out, inner).to(dtype), torch.randn(out).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, 2 * inner).to(dtype)[:, :inner]  # not contiguous
        for b in (bias, None):
            w = ops.quantize_weight(weight, b)
            assert (w.out_features, w.weight.device.type) == (out, "meta")
            assert_near(ops.linear(x, w), reference.linear(x, reference.quantize_weight(weight, b)))
    assert ops.linear(x[:0], w).shape == (0, out)


@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_products_of_8_bits(ops, out, inner):
    torch.manual_seed(out)
    weight, bias = torch.randn(out, inner), torch.randn(out)
    weight[0], weight[-1, 0] = 0.0, 40.0
    w = ops.quantize_weight(weight, bias, SCHEMES["int8"])
    (part,) = w.parts
    rounded = rows_of(part, torch.arange(out))
    scale = weight.abs().amax(1, keepdim=True) / 127
    assert ((rounded - weight).abs() <= scale * 0.5001).all()
    for rows in ROWS:
        x = torch.randn(rows, inner)
        x[0] = 0.0
        assert_near(ops.linear(x, w), eight_bits(x) @ rounded.T + bias)


def test_codes_of_a_checkpoint_are_taken_as_they_are(ops):
    torch.manual_seed(0)
    codes, scales = torch.randint(-127, 128, (48, 64), dtype=torch.int8), torch.rand(48)
    w = ops.pack_weight(ScaledLinear(weight=codes, scales=scales, out_dtype=torch.bfloat16))
    assert torch.equal(rows_of(w.parts[0], torch.arange(48)), codes.float() * scales[:, None])
    assert w.weight.dtype == torch.bfloat16


def pruned(out: int, inner: int, zeros: float | str) -> Tensor:
    """int8 codes with so many zeros, or two of each four."""
    codes = torch.randint(-127, 128, (out, inner), dtype=torch.int8)
    if zeros == "2:4":
        keep = torch.rand(out, -(-inner // 4), 4).argsort(-1) < 2
        return codes * keep.flatten(1)[:, :inner]
    return codes * (torch.rand(out, inner) >= zeros)


@pytest.mark.parametrize(("out", "inner"), [*SHAPES, (96, 576)])
def test_sparse_products_are_the_dense_ones(ops, out, inner):
    """Bit for bit: the same numbers are summed in the same order."""
    torch.manual_seed(out)
    sparse, dense = (NativeOps(2, ops.pool.isa, sparse_from=z) for z in (0.0, 2.0))
    for zeros in (0.0, 0.3, "2:4", 0.9, 1.0):
        codes, scales, bias = pruned(out, inner, zeros), torch.rand(out), torch.randn(out)
        codes[-1, -1] = -128
        stored = ScaledLinear(weight=codes, scales=scales, bias=bias, out_dtype=torch.float32)
        ours, theirs = sparse.pack_weight(stored), dense.pack_weight(stored)
        assert [w.parts[0].kind for w in (ours, theirs)] == [native.S8, native.I8]
        assert theirs.parts[0].zeros == int((codes == 0).sum()) / codes.numel()
        assert torch.equal(
            rows_of(ours.parts[0], torch.arange(out)), codes.float() * scales[:, None]
        )
        for rows in ROWS:
            x = torch.randn(rows, inner)
            assert torch.equal(sparse.linear(x, ours), dense.linear(x, theirs))


def test_a_sparse_weight_may_be_there_dense_as_well(ops, tmp_path, monkeypatch):
    """Steps of many tokens read the dense form: the same numbers."""
    monkeypatch.setattr(host_ops, "faster_from", lambda *_: 8)
    torch.manual_seed(0)
    both = NativeOps(2, ops.pool.isa, sparse_from=0.5, dense_copies=True)
    only = NativeOps(2, ops.pool.isa, sparse_from=0.5)
    weight = pruned(96, 320, 0.7).float()
    ours, theirs = (
        o.quantize_weight(weight, torch.randn(96), SCHEMES["int8"]) for o in (both, only)
    )
    (part,) = ours.parts
    assert part.dense is not None
    assert part.dense_from == 8
    assert [name for name, _ in both.forms_of(ours)] == ["sparse int8", "int8 beside sparse int8"]
    assert part.unfolded(native.Arena(both.pool)).data.tobytes() == part.dense.tobytes()
    both.write_products(tmp_path / "kept", {"w": ours})
    (again,) = both.read_products(tmp_path / "kept")["w"].parts
    assert again.dense.tobytes() == part.dense.tobytes()
    for first in (1, 13, 1000):  # always dense, in part, never
        chosen = replace(theirs, parts=(replace(part, dense_from=first),))
        for rows in ROWS:
            x = torch.randn(rows, 320)
            assert torch.equal(both.linear(x, chosen), only.linear(x, theirs))


@pytest.mark.parametrize(("cost", "first"), [(2.0, 12), (0.5, None), (20.0, 2), (1.2, 64)])
def test_from_when_on_the_dense_form_is_faster_is_measured(monkeypatch, cost, first):
    """Here a product takes `cost` times its tokens with the sparse form, and ten more than its tokens with the dense one."""
    ops, arena = HostOps(1), native.Arena()
    dense = Packed.empty(native.I8, 32, 64, arena)
    dense.put_codes(np.eye(32, 64, dtype=np.int8), np.ones(32, np.float32))
    sparse, pool = dense.sparse(arena), SimpleNamespace(last_s=0.0)

    class Timed:
        def __init__(self, _, w, more) -> None:
            self.sparse = w.parts[0].kind == native.S8
            assert all((each.parts[0].kind == native.S8) == self.sparse for each in more)

        def __call__(self, x) -> None:
            pool.last_s = cost * len(x) if self.sparse else 10.0 + len(x)

    with monkeypatch.context() as patched:
        patched.setattr(host_ops, "LinearProgram", Timed)
        assert host_ops.faster_from(pool, sparse, dense) == first
    assert host_ops.faster_from(ops.pool, sparse, dense) in (*TOKENS, None)  # a real one
    monkeypatch.setattr(host_ops, "faster_from", lambda *_: first)
    ops = HostOps(1, sparse_from=0.5, dense_copies=True)
    (part,) = ops.quantize_weight(np.eye(32, 64, dtype=np.float32), None, SCHEMES["int8"]).parts
    assert (part.dense is None) == (first is None)  # a copy that no step would read is not kept


@pytest.mark.parametrize("half", [32, 96])
def test_gate_and_up_may_be_sparse(ops, half):
    torch.manual_seed(half)
    codes, bias = pruned(2 * half, 96, 0.7), torch.randn(2 * half)
    stored = ScaledLinear(
        weight=codes, scales=torch.rand(2 * half) / 50, bias=bias, out_dtype=torch.float32
    )
    (part,) = NativeOps(2, ops.pool.isa, sparse_from=0.5).pack_weight(stored).parts
    for rows in (1, 5, 13, 60):
        x, y = torch.randn(rows, 96), torch.empty(rows, half)
        p = Program(ops.pool)
        q = p.buffer(native.FORM_Q, 96)
        p.add("convert", p.bound(x), q, native.FORM_Q, 96, 1)
        shape, silu = (part.kind, part.rows, part.inner), native.activation_of("silu")
        p.add(
            "gated_linear", q, p.bound(y), native.FORM_F32, *silu, *shape, part.data, bias, None, 0
        )
        p.run(native.StepInputs(num_tokens=rows))
        gate, up = (eight_bits(x) @ (codes.float() * stored.scales[:, None]).T + bias).chunk(
            2, dim=1
        )
        assert_near(y, torch.nn.functional.silu(gate) * up)


def test_the_faster_form_is_chosen_by_the_zeros(ops):
    threshold = (
        SPARSE_FROM
        if ops.pool.isa in ("avx512-vbmi2", "avx512-bf16", "amx")
        else SPARSE_FROM_ELSEWHERE
    )
    for share, kind in ((threshold - 0.05, native.I8), (threshold + 0.05, native.S8)):
        weight = torch.ones(64, 320)
        weight[:, : int(320 * share)] = 0.0
        (part,) = ops.quantize_weight(weight, None, SCHEMES["int8"]).parts
        assert part.kind == kind
        assert ops.forms_of(ops.quantize_weight(weight, None, SCHEMES["int8"])) == [
            (native.KIND_NAMES[kind], part.data.size)
        ]
    # Masks, numbers, scales, where panels begin, and what may be read beyond the end
    assert part.data.size <= 64 * 320 * (1 - share + 1 / 8) + 64 * 4 + 6 * 64 + 64


def blocks(values: np.ndarray, kind: str) -> np.ndarray:
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])


HALVES = {
    "Q6_K": (208,),
    "Q5_0": (0,),
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "MXFP4": (),
}
"""Offsets of the float16 numbers in a block. Types that are not listed have them at 0 and 2."""


def any_blocks(
    rng: np.random.Generator, kind: str, out: int, inner: int, *, size: float = 0.1
) -> np.ndarray:
    """Every bit at random but the float16 scales, which are finite, of either sign, up to some `size`, and sometimes 0 or
    subnormal."""
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (out, inner // block_size, num_bytes), dtype=np.uint8)
    for at in HALVES.get(kind, (0, 2)):
        sizes = rng.choice([0.0, 1e-6, size / 10, size], raw.shape[:2], p=[0.1, 0.1, 0.4, 0.4])
        scales = rng.standard_normal(raw.shape[:2]) * sizes
        raw[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    if kind == "MXFP4":  # exponents: the least that counts, and those of weights
        raw[..., 0] = rng.choice([2, 100, 122, 123, 124], raw.shape[:2])
    return raw.reshape(out, -1)


@pytest.mark.parametrize("kind", native.BLOCK_KINDS)
@pytest.mark.parametrize(("out", "num_blocks"), [(1, 1), (17, 2), (64, 3), (96, 18)])
def test_blocks_of_gguf_are_taken_as_they_are(ops, kind, out, num_blocks):
    rng = np.random.default_rng(out)
    inner = 256 * min(num_blocks, 3) if kind.endswith("K") else 32 * num_blocks
    raw = any_blocks(rng, kind, out, inner)
    exact = dequantize(
        raw.reshape(-1, raw.size // (out * inner // gguf_block(kind))), kind, np.float32
    ).reshape(out, inner)
    exact = torch.from_numpy(exact)
    assert torch.equal(
        exact, torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    )
    order = torch.from_numpy(rng.permutation(out)).int()
    pieces = (BlockRows(type=kind, blocks=raw, start=0, order=order.numpy()),)
    w = ops.pack_weight(BlockLinear(weight=torch.empty(out, inner, device="meta"), pieces=pieces))
    (part,) = w.parts
    assert ops.forms_of(w) == [(kind, part.data.size)]
    assert part.data.size == -(-out // 16) * 16 * inner * CPU_BLOCK_BYTES[kind] // 256
    assert torch.equal(rows_of(part, order), exact)
    assert torch.equal(ops.embed(order, w), exact)
    placed = torch.empty_like(exact)
    placed[order.long()] = exact
    for rows in ROWS:
        x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(rows))
        assert_near(ops.linear(x, w), eight_bits(x) @ placed.T)


SCALES_OF_PARTS = {
    "Q2_K": (0, 16),
    "Q3_K": (96, 108),
    "Q4_K": (4, 16),
    "Q5_K": (4, 16),
    "Q6_K": (192, 208),
}
"""Ranges of a block that hold the scales of its parts."""


@pytest.mark.parametrize("kind", native.BLOCK_KINDS)
def test_sums_of_the_largest_numbers(ops, kind):
    """All codes and all inputs at an end of their range: partial sums in 16-bit words must hold them."""
    inner, held = 512, HALVES.get(kind, (0, 2))
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.zeros((32, inner // block_size, num_bytes), np.uint8)
    raw[::2] = 0xFF
    raw[..., slice(*SCALES_OF_PARTS.get(kind, (0, 0)))] = 0x3F
    for at in held:
        raw[..., at : at + 2] = np.float16([0.01]).view(np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = 122
        raw[::2, :, 1:], raw[1::2, :, 1:] = 0x77, 0xFF
    elif kind == "Q8_0":
        raw[::2, :, 2:], raw[1::2, :, 2:] = 0x7F, 0x80
    raw = raw.reshape(32, -1)
    exact = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    pieces = (BlockRows(type=kind, blocks=raw, start=0),)
    w = ops.pack_weight(BlockLinear(weight=torch.empty(32, inner, device="meta"), pieces=pieces))
    for rows in ROWS:
        x = torch.ones(rows, inner)
        x[1::2] = -1
        assert_near(ops.linear(x, w), x @ exact.T)


@pytest.mark.parametrize(
    "form", ["int8", "sparse int8", "int4", "int4 with zero points", "int4 by 32, zero points"]
)
def test_sums_of_the_largest_codes(ops, form):
    codes = torch.zeros(32, 512, dtype=torch.int32)
    if form.endswith("int8"):
        codes[0], codes[1], codes[2] = 127, -127, -128
        ones = torch.ones(32)
        stored = ScaledLinear(weight=codes.to(torch.int8), scales=ones, out_dtype=torch.float32)
        w = NativeOps(
            2, ops.pool.isa, sparse_from=0.0 if form.startswith("sparse") else 2.0
        ).pack_weight(stored)
        exact = codes.float()
    else:
        codes[::2] = 15
        size = 32 if "by 32" in form else 128
        scales, chunk = torch.full((512 // size, 32), 0.5).bfloat16(), chunk_of(512, size)
        zeros = torch.full(scales.shape, 7).bfloat16() if "zero points" in form else None
        stored4 = GroupedLinear(
            weight=pack4(codes, chunk), scales=scales, zeros=zeros, group_size=size, chunk=chunk
        )
        w, exact = ops.pack_weight(stored4), dequantize_linear(stored4)
    for rows in ROWS:
        x = torch.ones(rows, 512)
        x[1::2] = -1
        assert_near(ops.linear(x, w).float(), x @ exact.T.float())


def gguf_block(kind: str) -> int:
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_rows_packed_in_lots_equal_those_packed_at_once(ops, kind, monkeypatch):
    rng = np.random.default_rng(1)
    raw, released = any_blocks(rng, kind, 50, 256), []

    def packed(order):
        piece = BlockRows(
            type=kind, blocks=raw, start=0, order=order, release=lambda *rows: released.append(rows)
        )
        weight = torch.empty(50, 256, device="meta")
        (part,) = ops.pack_weight(BlockLinear(weight=weight, pieces=(piece,))).parts
        return part.data

    for order in (None, rng.permutation(50).astype(np.int32)):
        monkeypatch.undo()
        whole = packed(order)
        assert released.pop() == (0, 50)
        monkeypatch.setattr("slipstream.kernels.weights.forms.LOT_BYTES", 21 * raw.shape[1])
        assert np.array_equal(packed(order), whole)
        assert released == [(0, 21), (21, 42), (42, 50)]
        released.clear()


def test_rows_of_several_types_are_parts(ops):
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((n, 64)).astype(np.float32) for n in (32, 16, 48)]
    kinds = ("Q4_1", "Q8_0", "Q4_1")
    raw = [blocks(v, k) for v, k in zip(values, kinds, strict=True)]
    exact = np.concatenate(
        [
            gguf.quants.dequantize(r, gguf.GGMLQuantizationType[k])
            for r, k in zip(raw, kinds, strict=True)
        ]
    )
    pieces = tuple(
        BlockRows(type=k, blocks=r, start=s)
        for k, r, s in zip(kinds, raw, (0, 32, 48), strict=True)
    )
    bias = torch.randn(96)
    w = ops.pack_weight(
        BlockLinear(weight=torch.empty(96, 64, device="meta"), pieces=pieces, bias=bias)
    )
    assert len(w.parts) == 3
    x = torch.randn(5, 64)
    assert_near(ops.linear(x, w), eight_bits(x) @ torch.from_numpy(exact).T + bias)


@pytest.mark.parametrize(("out", "inner"), [(16, 128), (33, 256), (96, 640)])
@pytest.mark.parametrize(
    "form", ["int4", "int4 with zero points", "Q4_0", "int4 by 32", "int4 by 32, zero points"]
)
def test_products_of_4_bits_by_groups(ops, form, out, inner):
    """Scales of groups of 32 that float16 holds are held so; others (too small here), and any zero points, in float32. A code
    times a scale of bfloat16 is exact in float32, and so is the difference from its zero point."""
    torch.manual_seed(out)
    size = 128 if form in ("int4", "int4 with zero points") else 32
    codes = torch.randint(0, 16, (out, inner), dtype=torch.int32)
    scales = torch.randn(inner // size, out).bfloat16()
    scales[0, 0], scales[0, 1] = 1e-9 if "by 32" in form else 0.0, 2.0**-18
    zeros = torch.randint(0, 16, scales.shape).bfloat16() if "zero points" in form else None
    chunk, bias = chunk_of(inner, size), torch.randn(out)
    w = GroupedLinear(
        weight=pack4(codes, chunk),
        scales=scales,
        zeros=zeros,
        group_size=size,
        chunk=chunk,
        bias=bias,
    )
    ours, exact = ops.pack_weight(w), dequantize_linear(w)
    assert (ours.weight.dtype, ours.weight.shape) == (torch.bfloat16, exact.shape)
    assert ops.forms_of(ours) == [(form.partition(",")[0], ours.parts[0].data.size)]
    assert torch.equal(rows_of(ours.parts[0], torch.arange(out)), exact)
    for rows in ROWS:
        x = torch.randn(rows, inner)
        assert_near(ops.linear(x, ours), eight_bits(x) @ exact.T + bias)


def to_nearest(weight: Tensor, size: int) -> Tensor:
    """The numbers of 4 bits by the largest magnitude of each group."""
    groups = weight.float().unflatten(1, (-1, size))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7.5
    return ((groups / scales).round().clamp(-8, 7) * scales).flatten(1)


def squared_error(found: Tensor, weight: Tensor) -> float:
    return float((found - weight.float()).square().mean() / weight.float().square().mean())


@pytest.mark.parametrize(("scheme", "share"), [("int4", 0.74), ("int4-g32", 0.57)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_to_4_bits_at_load_searches_for_scales_and_minima(ops, scheme, share, dtype):
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[:3, :128], weight[3, :128] = 0.0, 0.25  # groups without any difference
    ours = ops.quantize_weight(weight, None, SCHEMES[scheme])
    assert ops.forms_of(ours)[0][0] == ("int4 with zero points" if scheme == "int4" else "Q4_1")
    rounded = rows_of(ours.parts[0], torch.arange(40))
    assert (rounded[:3, :128] == 0).all()
    assert (rounded[3, :128] == 0.25).all()
    size = SCHEMES[scheme].group_size
    assert squared_error(rounded[4:], weight[4:]) < share * squared_error(
        to_nearest(weight[4:], size), weight[4:]
    )
    again = ops.quantize_weight(rounded, None, SCHEMES[scheme])  # numbers on a grid are kept
    assert squared_error(rows_of(again.parts[0], torch.arange(40)), rounded) < 1e-3
    x = torch.randn(7, 256)
    assert_near(ops.linear(x, ours), eight_bits(x) @ rounded.T)


@pytest.mark.parametrize("value", [1e30, -1e30, 1e-30, 65504.0])
def test_weights_beyond_float16_are_rounded_to_what_it_has(ops, value):
    weight = torch.zeros(16, 64)
    weight[:, 5] = value
    rounded = rows_of(
        ops.quantize_weight(weight, None, SCHEMES["int4-g32"]).parts[0], torch.arange(16)
    )
    assert rounded.isfinite().all()
    assert (rounded[:, 32:] == 0).all()


@pytest.mark.parametrize(("scheme", "share"), [("int4", 0.82), ("int4-g32", 0.76)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpus_rounding_to_4_bits_searches_for_scales(scheme, share, dtype):
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[:3, :128] = 0.0
    found = dequantize_linear(round_linear(weight, None, SCHEMES[scheme]))
    assert (found[:3, :128] == 0).all()
    assert squared_error(found, weight) < share * squared_error(
        to_nearest(weight, SCHEMES[scheme].group_size), weight
    )


@pytest.mark.parametrize("scheme", ["fp8", "fp8-head"])
def test_a_scheme_without_a_product_is_refused_by_name(scheme):
    with pytest.raises(ConfigError, match="fp8"):
        OPS[ISAS[0]].quantize_weight(torch.randn(32, 128), None, SCHEMES[scheme])


# --- The other operators ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 48, 100])
def test_norms_and_activations(ops, dtype, size):
    torch.manual_seed(1)
    x, residual, g, b = (
        torch.randn(shape).to(dtype) for shape in ((5, size), (5, size), (size,), (size,))
    )
    for r in (None, residual):
        for offset in (0.0, 1.0):
            both = [o.norm(x, rms_norm(g, offset), residual=r) for o in (ops, reference)]
            assert_near(both[0][0], both[1][0])
            assert torch.equal(both[0][1], both[1][1])
        for bias in (b, None):
            both = [o.norm(x + 3, layer_norm(g, bias), residual=r) for o in (ops, reference)]
            assert_near(both[0][0], both[1][0])
    x = torch.cat(
        (x, torch.tensor([[-100.0], [-20.0], [0.0], [30.0], [100.0]]).to(dtype).expand(5, size)),
        dim=1,
    )
    for name in native.ACTIVATIONS:
        assert_near(ops.activation(x, name), reference.activation(x, name))
        assert_near(ops.activation(x, name, gated=True), reference.activation(x, name, gated=True))


def cached(case: Any, cache: str) -> LayerKV:
    """The case's cache in another type."""
    kv = case.clone_kv()
    if cache != "int8":
        return kv
    heads = kv.k.shape[1]
    k_scale, v_scale = torch.rand(heads) * 0.02 + 0.01, torch.rand(heads) * 0.02 + 0.01
    k, v = (
        to_cache(t.transpose(1, 2).flatten(0, 1), s, torch.int8)
        .unflatten(0, (-1, t.shape[2]))
        .transpose(1, 2)
        .contiguous()
        for t, s in ((kv.k, k_scale), (kv.v, v_scale))
    )
    return LayerKV(k, v, k_scale, v_scale)


def copy(kv: LayerKV) -> LayerKV:
    return dataclasses.replace(kv, k=kv.k.clone(), v=kv.v.clone())


@settings(max_examples=60)
@given(data=st.data())
def test_rope_and_cache(data):
    ops = OPS[data.draw(st.sampled_from(ISAS))]
    shape = data.draw(edge_shapes(block_sizes=(4, 16)))
    shape = dataclasses.replace(shape, head_dim=data.draw(st.sampled_from([8, 16, 20, 32])))
    dtype = data.draw(st.sampled_from(DTYPES))
    case, dim = step(shape, dtype), shape.head_dim
    options = draw_layout(data, shape, dtype)
    qkv = torch.randn(len(case.q), (shape.num_heads + 2 * shape.num_kv_heads) * dim).to(dtype)
    before = cached(case, data.draw(st.sampled_from(["same", "int8"])))
    ours, theirs = copy(before), copy(before)
    q = ops.rope_and_cache(qkv, ours, case.meta, QKVLayout(**options))
    assert_near(q, reference.rope_and_cache(qkv, theirs, case.meta, QKVLayout(**options)))
    # Slot 0 is left out: which of the padded rows wrote there last is open.
    ours.k[0, :, 0] = theirs.k[0, :, 0] = ours.v[0, :, 0] = theirs.v[0, :, 0] = 0
    if ours.k.dtype == torch.int8:  # a hair's difference may fall on the other side of a half
        assert all(
            (a.int() - b.int()).abs().max() <= 1
            for a, b in ((ours.k, theirs.k), (ours.v, theirs.v))
        )
    else:
        assert_near(ours.k, theirs.k, largest=8.0)
        assert torch.equal(ours.v, theirs.v)


@settings(max_examples=150)
@given(data=st.data())
def test_attention_equals_the_reference(data):
    ops = OPS[data.draw(st.sampled_from(ISAS))]
    shape = data.draw(edge_shapes())
    shape = dataclasses.replace(
        shape, head_dim=data.draw(st.sampled_from([8, 16, 20, 32, 64, 80, 128, 160]))
    )
    case = step(shape, data.draw(st.sampled_from(DTYPES)))
    kv = cached(case, data.draw(st.sampled_from(["same", "int8"])))
    options = data.draw(attention_options(shape.num_heads))
    options["scale"] /= 4  # scores that do not all fall on one key
    got = ops.attention(case.q, kv, case.meta, AttentionParams(**options))
    assert got.shape == case.q.shape
    assert got.isfinite().all()
    expected = reference.attention(case.q, kv, case.meta, AttentionParams(**options))
    got, expected = got[case.owned], expected[case.owned]
    if kv.k.dtype == torch.float32:
        assert_near(got, expected, largest=4.0)
    elif kv.k.dtype == torch.int8 and ops.pool.isa not in OF_TILES and got.dtype == torch.float32:
        # Queries are rounded to 2⁻¹⁶ of their largest, which moves scores of 160 products at these scales by up to 2⁻¹⁰.
        torch.testing.assert_close(got, expected, rtol=2**-10, atol=2**-10)
    else:  # queries and weights may have been rounded to bfloat16
        torch.testing.assert_close(got.float(), expected.float(), rtol=2**-6, atol=2**-6 * 4)


def test_long_sequences_in_tiles_and_splits(attending):
    """Several tiles of queries and keys, one decode cut among threads, one group of heads as large as models have. Each option
    with each number of heads; either type with each option, and with each number of heads."""
    sequences = ((1, 700), (1, 63), (1, 64), (1, 0), (150, 30), (70, 0), (65, 127))
    options = (
        {},
        {"window": 20},
        {"window": 300},
        {"softcap": 3.0},
        {"softcap": 3.0, "window": 64},
    )
    for i, (heads, kv_heads) in enumerate(((9, 3), (8, 1), (2, 2))):
        shape = Shape(sequences=sequences, num_heads=heads, num_kv_heads=kv_heads, head_dim=64)
        for dtype, atol in ((torch.float32, 2e-5), (torch.bfloat16, 2**-5)):
            case = step(shape, dtype)
            for more in options[(i + (dtype == torch.bfloat16)) % 2 :: 2]:
                got = attending.attention(
                    case.q, case.kv, case.meta, AttentionParams(scale=0.1, **more)
                )
                expected = reference.attention(
                    case.q, case.kv, case.meta, AttentionParams(scale=0.1, **more)
                )
                torch.testing.assert_close(got.float(), expected.float(), rtol=2**-6, atol=atol)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (5, 1, 128), (2, 1, 544)])
def test_decodes_over_long_8_bit_caches(ops, heads, kv_heads, dim):
    """A decode that is cut among threads too, and one where all numbers of a head are the largest."""
    sequences = ((1, 700), (1, 63), (1, 64), (1, 0), (1, 129))
    shape = Shape(sequences=sequences, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
    case = step(shape)
    kv = cached(case, "int8")
    largest = copy(kv)
    largest.k[:, :, ::2], largest.k[:, :, 1::2] = 127, -127
    for q, of in ((case.q, kv), (torch.full_like(case.q, 0.02), largest)):
        got = ops.attention(q, of, case.meta, AttentionParams(scale=0.1))
        expected = reference.attention(q, of, case.meta, AttentionParams(scale=0.1))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_greedy_takes_the_lowest_of_equals(ops):
    logits = torch.zeros(5, 1030)
    for row, ties in enumerate(((0, 1023), (255, 256), (700, 1029), (1023,))):
        logits[row, list(ties)] = 1
    logits[4] = -torch.arange(1030.0)
    assert ops.sample(logits, sampling(5, temperature=0.0)).tolist() == [0, 255, 700, 1023, 0]
    assert ops.sample(logits.bfloat16(), sampling(5, temperature=0.0)).tolist() == [
        0,
        255,
        700,
        1023,
        0,
    ]


@pytest.mark.parametrize(("out", "inner"), [(1, 3), (33, 64), (1030, 40), (4500, 32)])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "sparse"])
def test_the_largest_of_a_product_without_the_product(ops, form, out, inner):
    """Exactly where the product itself is largest, whatever the number of tokens."""
    torch.manual_seed(out)
    weight = pruned(out, inner, 0.9) if form == "sparse" else torch.randn(out, inner)
    bias = torch.randn(out)
    scheme = SCHEMES["int8"] if form in ("int8", "sparse") else None
    w = ops.quantize_weight(weight.bfloat16() if form == "bfloat16" else weight, bias, scheme)
    found, whole = LinearArgmax(ops.pool, w), LinearProgram(ops.pool, w)
    for num_tokens in (1, 5, 48, 49, 130):
        x = np.random.default_rng(num_tokens).standard_normal((num_tokens, inner), np.float32)
        assert np.array_equal(found(x), whole(x).argmax(axis=-1))


def test_results_do_not_depend_on_how_many_threads_work():
    """Bit by bit. The number changes between steps."""
    pool = ThreadPool(4)
    assert pool.num_used == 4
    packed = Packed.empty(native.BF16, 512, 256, native.Arena(pool))
    random = np.random.default_rng(0)
    packed.put_dense(random.standard_normal((512, 256), np.float32))
    w = NativeLinear(weight=stand_in((512, 256), "bfloat16"), parts=(packed,))
    product, best = LinearProgram(pool, w), LinearArgmax(pool, w)
    x = random.standard_normal((9, 256), np.float32)
    expected, tokens = product(x), best(x)
    for i in range(200):
        pool.use(1 + i * 7 % 4)
        assert np.array_equal(product(x), expected)
        assert np.array_equal(best(x), tokens)
        assert 0 < pool.last_s < 60
    assert pool.num_used == 1 + 199 * 7 % 4


def test_the_largest_of_equals_is_the_first(ops):
    """Equals in one range of rows, and in two that different threads look at."""
    weight = torch.zeros(3000, 32)
    weight[[40, 41, 2900], 0] = 1.0
    weight[[700, 2500], 1] = 1.0
    found = LinearArgmax(ops.pool, ops.quantize_weight(weight, None))
    x = torch.zeros(3, 32)
    x[0, 0] = x[1, 1] = 1.0
    assert found(x.numpy()).tolist() == [40, 700, 0]


def test_threads_change_nothing(ops):
    """The result doesn't depend on which thread computes what. Threads beyond the number of cores
    only wait."""
    torch.manual_seed(2)
    weight, x = torch.randn(512, 256), torch.randn(37, 256)
    case = step(Shape(sequences=((1, 900), (1, 10), (40, 20))))
    expected = None
    for threads in (1, 2, 5):
        own = NativeOps(threads, ops.pool.isa)
        for _ in range(10):
            w = own.quantize_weight(weight, None)
            found = own.linear(x, w)
            expected = found if expected is None else expected
            assert torch.equal(found, expected)
        assert_near(
            own.attention(case.q, case.kv, case.meta, AttentionParams(scale=0.3)),
            reference.attention(case.q, case.kv, case.meta, AttentionParams(scale=0.3)),
        )


def test_a_bound_tensor_has_rows_that_lie_together():
    assert isinstance(OPS[ISAS[0]].quantize_weight(torch.randn(4, 4), None), NativeLinear)
    with pytest.raises(AssertionError):
        Program(OPS[ISAS[0]].pool).bound(torch.randn(4, 4).T)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_step_that_was_begun(threads):
    """The step is done after anyone has waited for it: its owner, another call of the engine, or
    whoever drops it."""
    ops, x = NativeOps(threads), torch.randn(30, 256)
    w = ops.quantize_weight(torch.randn(640, 256), None)
    y = torch.empty(30, 640)
    found = torch.empty(30, 1, dtype=torch.int64)
    expected = ops.linear(x, w)
    first, then = Program(ops.pool), Program(ops.pool)
    inputs, rows = first.bound(x), first.bound(y)
    add_linear(first, inputs, rows, w)
    then.add("argmax", then.bound(y), then.bound(found), 640)

    def end():
        running[0].synchronize()
        running[0].synchronize()  # there is nothing left to wait for

    ends = (
        end,
        lambda: running.clear(),
        lambda: ops.linear(x, w),
        lambda: first.bind(inputs, x),
        lambda: then.profile(None),
        lambda: first.begin(native.StepInputs(num_tokens=30), then, None).synchronize(),
    )
    for number in range(36):
        y.zero_()
        found.zero_()
        running = [first.begin(native.StepInputs(num_tokens=30), then, (x, y, found))]
        if number % 3 == 0:
            sum(range(2000))  # the caller does something else
        ends[number % len(ends)]()
        assert torch.equal(y, expected)
        assert torch.equal(found[:, 0], expected.argmax(-1))


@pytest.mark.parametrize(
    "order", [*itertools.permutations(("pool", "program", "running"))], ids="-".join
)
def test_a_collector_of_cycles_lets_go_in_any_order(order):
    """The collector waits for a step that is under way, and the step's outputs live until then."""
    import gc

    num_tokens = (
        8 if "asan" in os.environ.get("LD_PRELOAD", "") else 128
    )  # instrumented code takes long enough for these
    x, y = torch.randn(num_tokens, 1024), torch.empty(num_tokens, 2048)
    weight = torch.randn(2048, 1024)
    ops = NativeOps(2)
    program = Program(ops.pool)
    add_linear(program, program.bound(x), program.bound(y), w := ops.quantize_weight(weight, None))
    parts = {"pool": ops.pool, "program": program}
    y.zero_()
    parts["running"] = program.begin(native.StepInputs(num_tokens=num_tokens), None, (x, y, w, ops))
    cycle = [parts[name] for name in order]
    cycle.append(cycle)
    del ops, program, parts, w
    del cycle
    gc.collect()
    assert_near(y, x @ weight.T)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_panel_is_multiplied_once(threads):
    """Whatever their number: threads have stretches of their own, and the rest is dealt out."""
    ops, x = NativeOps(threads), torch.randn(1, 64)
    for rows in (16, 48, 80, 32 * 7, 32 * 18, 32 * 30 + 16, 32 * 61):
        weight = torch.randn(rows, 64)
        w = ops.quantize_weight(weight, None)
        assert_near(ops.linear(x, w), x @ weight.T)
        assert LinearArgmax(ops.pool, w)(x.numpy()).tolist() == ops.linear(x, w).argmax(-1).tolist()
