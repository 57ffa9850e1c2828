"""The Triton kernels against the reference, in Triton's interpreter on the CPU. At real sizes: tests/gpu."""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.kernels.cache.blocks import BlockTensors
from slipstream.kernels.cache.tensors import by_dim, cache_parts
from slipstream.kernels.cpu.ops import CpuOps, NativeOps
from slipstream.kernels.metadata import LayerKV, SamplingTensors, SharedPrefixes
from slipstream.kernels.ops import AttentionParams, MLAParams, QKVLayout
from slipstream.kernels.plain.reference import (
    ReferenceOps,
    apply_bias_and_penalties,
    filter_probs,
    scaled_probs,
    to_cache,
    uniform,
)
from slipstream.kernels.triton import TritonOps, pointwise, sampling, tuning
from slipstream.kernels.triton.attention import mla, mla_prefill
from slipstream.kernels.triton.attention.paged import paged_attention
from slipstream.kernels.triton.pointwise import rows_per_program
from slipstream.kernels.triton.products import dispatch as linear
from slipstream.kernels.triton.products.dispatch import INT4_DENSE_TOKENS, gemm, gemv, skinny_gemm
from slipstream.kernels.triton.products.fp8_block import (
    fp8_tile_linear,
    fp8_tile_scaled_mm,
    has_scaled_mm,
)
from slipstream.kernels.triton.products.int4_groupwise import (
    dequantize_int4,
    int4_gemv,
    int4_linear,
)
from slipstream.kernels.triton.products.split_k import ArrivalCounters
from slipstream.kernels.weights.forms import Pair, Quantized
from slipstream.kernels.weights.quantize import dequantize, numbers, quantize_rows, round_linear
from slipstream.spec.devices.autotune_table import NO_TILES, Measured, TileTable
from slipstream.spec.model import ClampedSilu, ClampedSwiglu
from slipstream.spec.scheme import SCHEMES
from tests.costs.specs import make_spec
from tests.kernels import cases
from tests.kernels.triton.for_hopper import run_for_hopper

OURS, REFERENCE = TritonOps(), ReferenceOps()
QUICK = settings(max_examples=12, suppress_health_check=list(HealthCheck))


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def same_rows(ours, theirs):
    """Quantised rows: the same scales, and codes that differ by a step at most, where division rounded otherwise."""
    close(ours.scales, theirs.scales)
    a, b = numbers(ours), numbers(theirs)
    scales = theirs.scales.repeat_interleave(b.shape[1] // theirs.scales.shape[1], dim=1)
    step = scales if theirs.values.dtype == torch.int8 else b.abs() / 8 + scales / 64
    assert ((a - b).abs() <= step * 1.001).all()
    assert (ours.values.float() != theirs.values.float()).float().mean() < 0.02


def scaled(kv, dtype):
    """A cache in 8 bits: codes of the step's numbers (what nobody owns is at the end of the range)."""
    scales = [torch.rand(kv.k.shape[1]) / 16 + 1 / 16 for _ in range(2)]
    codes = []
    for cache, scale in zip((kv.k, kv.v), scales, strict=True):
        tokens = cache.transpose(1, 2)
        codes.append(
            to_cache(tokens.flatten(0, 1), scale, dtype)
            .view(tokens.shape)
            .transpose(1, 2)
            .contiguous()
        )
    return LayerKV(*codes, *scales)


@QUICK
@given(
    data=st.data(),
    extra=st.sampled_from([1, 3, 40]),
    dtype=st.sampled_from([None, torch.float8_e4m3fn, torch.int8]),
)
def test_attention_equals_the_reference(data, extra, dtype):
    shape = data.draw(cases.edge_shapes(max_sequences=3))
    options = data.draw(cases.attention_options(shape.num_heads))
    step = cases.step(shape)
    kv = step.kv if dtype is None else scaled(step.kv, dtype)
    if data.draw(st.booleans()):
        kv = dataclasses.replace(kv, v=by_dim(kv.v))
    ops = data.draw(st.sampled_from([OURS, TritonOps(deterministic=True)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slipstream.kernels.triton.attention.split_keys.PARTS_PER_SM", extra)
        patch.setattr("slipstream.kernels.triton.attention.split_keys.MIN_KEYS", 16)
        patch.setattr(
            "slipstream.kernels.triton.attention.split_keys.FEW_SEQUENCES",
            data.draw(st.sampled_from([0, 1, 4])),
        )
        ours = ops.attention(step.q, kv, step.meta, AttentionParams(**options))
    theirs = REFERENCE.attention(step.q, kv, step.meta, AttentionParams(**options))
    assert ours.isfinite().all()
    # Against an 8-bit cache the kernel multiplies in float16.
    tolerance = 1e-4 if dtype is None else 1e-2
    torch.testing.assert_close(ours[step.owned], theirs[step.owned], rtol=tolerance, atol=tolerance)


def with_shared_prefixes(data, step):
    """The step with groups of decodes that begin with the first member's blocks: the metadata, and the same without a word of
    it."""
    num, size = step.meta.num_decodes, step.kv.block_size
    table, lens = step.meta.block_table.clone(), step.meta.seq_lens.tolist()
    begins, ends, shared = list(range(num)), list(range(1, num + 1)), [0] * num
    at = 0
    while at < num:
        count = (
            num - at - data.draw(st.integers(0, num - at - 1))
        )  # what is drawn most often shares most
        common = max(0, min(lens[at : at + count]) - 1) // size
        blocks = common - data.draw(st.integers(0, common))
        for i in range(at, at + count):
            begins[i], ends[i], shared[i] = at, at + count, blocks * size
            table[i, :blocks] = table[at, :blocks]
        at += count
    meta = dataclasses.replace(step.meta, block_table=table)
    tensors = [torch.tensor(x, dtype=torch.int32) for x in (begins, ends, shared)]
    return dataclasses.replace(meta, shared=SharedPrefixes(*tensors)), meta


@settings(QUICK, max_examples=30)
@given(
    data=st.data(),
    splits=st.sampled_from([1, 2, 8]),
    dtype=st.sampled_from([None, torch.float8_e4m3fn, torch.int8]),
)
def test_attention_of_shared_prefixes(data, splits, dtype):
    shape = data.draw(cases.edge_shapes(max_sequences=9))
    options = data.draw(cases.attention_options(shape.num_heads))
    step = cases.step(shape)
    meta, plain = with_shared_prefixes(data, step)
    kv = step.kv if dtype is None else scaled(step.kv, dtype)
    if data.draw(st.booleans()):
        kv = dataclasses.replace(kv, v=by_dim(kv.v))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slipstream.kernels.triton.attention.paged.num_splits", lambda *_: splits)
        patch.setattr(
            "slipstream.kernels.triton.attention.paged.DECODE_ACC_SIZE",
            data.draw(st.sampled_from([64, 128, 2048])),
        )
        ours = OURS.attention(step.q, kv, meta, AttentionParams(**options))
    theirs = REFERENCE.attention(step.q, kv, plain, AttentionParams(**options))
    assert ours.isfinite().all()
    tolerance = 1e-4 if dtype is None else 1e-2
    torch.testing.assert_close(ours[step.owned], theirs[step.owned], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("members", [2, 32])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("block_size", "tile"), [(16, (16, 1, 1)), (16, (32, 1, 1)), (4, (32, 1, 1)), (32, (16, 1, 1))]
)
def test_attention_of_groups_that_share_blocks(monkeypatch, block_size, tile, splits, members):
    """Tiles of one block, of several, and of a part of one; prefixes that end within a tile and at its end. `members`: of a
    group, that a thread block computes."""
    lens, groups = (97, 116, 129, 5, 72, 69), ((0, 3, 96), (3, 4, 0), (4, 6, 64))
    if block_size == 16:
        lens, groups = (49, 68, 81, 5, 72, 69), ((0, 3, 48), (3, 4, 0), (4, 6, 64))
    step = cases.step(
        cases.Shape(sequences=tuple((1, n - 1) for n in lens), block_size=block_size, seed=3)
    )
    table, per_seq = step.meta.block_table.clone(), []
    for begin, end, shared in groups:
        table[begin:end, : shared // block_size] = table[begin, : shared // block_size]
        per_seq += [(begin, end, shared)] * (end - begin)
    plain = dataclasses.replace(step.meta, block_table=table)
    columns = [torch.tensor(x, dtype=torch.int32) for x in zip(*per_seq, strict=True)]
    meta = dataclasses.replace(plain, shared=SharedPrefixes(*columns))
    monkeypatch.setattr("slipstream.kernels.triton.attention.paged.num_splits", lambda *_: splits)
    monkeypatch.setattr(
        "slipstream.kernels.triton.attention.paged.DECODE_ACC_SIZE", members * 2 * 16
    )
    params = AttentionParams(scale=0.25)
    close(
        paged_attention(step.q, step.kv, meta, params, decode_tile=tile),
        REFERENCE.attention(step.q, step.kv, plain, params),
    )


@QUICK
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_best_logprobs_and_ranks_equal_sorting(data, dtype):
    num_rows, vocab = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 200))
    num_top = data.draw(st.integers(0, min(20, vocab)))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    logits = (4 * torch.randn(num_rows, vocab + 3)).to(dtype)[:, :vocab]
    tokens = torch.randint(vocab, (num_rows,))
    if data.draw(st.booleans()):
        logits = logits.round()  # many are equal
    if num_rows and vocab > 1:
        logits[0, 1:] = float("-inf")
    found = sampling.best_logprobs(
        logits, tokens, num_top, block=data.draw(st.sampled_from([16, 64, 8192]))
    )
    chosen, rank, _, values = REFERENCE.best_logprobs(logits, tokens, num_top)
    close(found[0], chosen)
    assert torch.equal(found[1], rank)
    close(found[3], values)
    # Of equal ones the lower stands first.
    assert torch.equal(
        found[2], logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    )
    assert sampling.best_logprobs(torch.tensor([[-0.0, 0.0, -0.0]]), torch.tensor([0]), 3)[
        2
    ].tolist() == [[0, 1, 2]]


@QUICK
@given(data=st.data(), splits=st.sampled_from([1, 2, 8]))
def test_latent_attention_equals_the_reference(data, splits):
    """The cache's last numbers are values; what else lies there is never read as one. A step's rows are written first."""
    shape = dataclasses.replace(
        data.draw(cases.edge_shapes(max_sequences=3)), num_kv_heads=1, head_dim=40
    )
    step, rotary = cases.step(shape), 8
    cos_sin = torch.randn(2000, rotary)
    rows = torch.randn(len(step.q), (shape.num_heads + 1) * 40)
    found = []
    for ops in (OURS, REFERENCE, CpuOps(), NativeOps()):
        k = step.kv.k.clone()
        kv = LayerKV(k, k[..., rotary:])
        heads = QKVLayout(
            num_heads=shape.num_heads,
            num_kv_heads=1,
            head_dim=40,
            cos_sin=cos_sin,
            interleaved=True,
        )
        q = ops.rope_and_cache(rows, kv, step.meta, heads)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("slipstream.kernels.triton.attention.mla.num_splits", lambda *_: splits)
            seen = ops.attention(q, kv, step.meta, AttentionParams(scale=0.3))
        assert seen.isfinite().all()
        assert seen.shape == (*q.shape[:2], 32)
        found.append((q, k[1:], seen[step.owned]))
    for ours in (found[0], *found[2:]):
        for mine, theirs in zip(ours, found[1], strict=True):
            close(mine, theirs)
    copied = [found[0][1].clone() for _ in range(2)]
    for ops, k in zip((OURS, REFERENCE), copied, strict=True):
        rows = BlockTensors.of(cache_parts([LayerKV(k, k[..., rotary:])]))
        ops.copy_blocks(rows, rows, torch.tensor([0]), torch.tensor([1]))
        assert torch.equal(k[1], found[0][1][0])
    assert torch.equal(*copied)


@pytest.mark.parametrize(("interleaved", "splits"), [(True, 1), (False, 4)])
@pytest.mark.parametrize(
    "lens",
    [((1, 20), (1, 3)), ((1, 0),), ((1, 40),) * 9, ((6, 5), (9, 0)), ((1, 7), (3, 2))],
    ids=len,
)
def test_latents_before_and_behind(monkeypatch, lens, interleaved, splits):
    """Few tokens and many, decodes alone and not: queries, cache and values are the reference's."""
    monkeypatch.setattr("slipstream.kernels.triton.attention.mla.num_splits", lambda *_: splits)
    heads, plain, rotary, rank, width = 3, 20, 8, 72, 24
    step = cases.step(
        cases.Shape(sequences=lens, num_heads=heads, num_kv_heads=1, head_dim=rotary + rank)
    )
    num_tokens = len(step.q)
    q, row = torch.randn(num_tokens, heads, plain + rotary), torch.randn(num_tokens, rank + rotary)
    keys = torch.randn(heads, plain, rank)
    values = torch.randn(heads, rank, width)
    norm = torch.randn(rank)
    found = []
    for ops in (OURS, REFERENCE):
        k = step.kv.k.clone()
        kv = LayerKV(k, k[..., rotary:])
        cos_sin = torch.ones(2000, rotary).cumsum(0).sin()
        given = dict(keys=keys, values=values, norm=cases.rms_norm(norm), cos_sin=cos_sin)
        params = MLAParams(**given, interleaved=interleaved, scale=0.3)
        queries = ops.mla_queries(q, row, kv, step.meta, params)
        out = ops.mla_paged_attention(queries, kv, step.meta, params)
        assert out.shape == (num_tokens, heads * width)
        found.append((queries, k[1:], out[step.owned]))
    for mine, theirs in zip(*found, strict=True):
        close(mine, theirs)


def test_prompts_of_latents_as_long_as_a_grid_may_be(monkeypatch):
    """Chunks of 16,384 tokens and more of 128 heads: a grid's first number alone may exceed 65,535."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(mla, "_mla_kernel", Kernel())
    step = cases.step(cases.Shape(sequences=((1, 2), (5, 0), (2, 0)), num_kv_heads=1, head_dim=24))
    q, kv = torch.empty(16384, 128, 2, dtype=torch.float16), LayerKV(step.kv.k, step.kv.k[..., 23:])
    mla.mla_paged_attention(
        q, kv, dataclasses.replace(step.meta, max_query_len=16384, num_decodes=0), scale=1.0
    )
    (grid,) = grids
    assert math.prod(grid) == 3 * 16384 * 128 // 32
    assert max(grid[1:]) < 65536


PROMPTS = {
    "ragged": ((5, 0), (70, 0), (33, 0), (2, 0)),
    "even": ((40, 0),) * 3,
    "behind decodes": ((1, 20), (1, 0), (1, 3), (37, 0), (64, 0)),
    "ragged behind decodes": ((1, 20), (1, 2), (70, 0), (3, 0), (2, 0)),
    "one": ((130, 0),),
}


SIZES = (3, 20, 8, 72, 24), (4, 32, 32, 64, 16), (2, 16, 12, 40, 40)
"""Heads, non-rotary and rotary numbers, latent, values: none a power of two; all; rotary pairs that fill no power of two."""


@pytest.mark.parametrize(
    ("lens", "sizes", "interleaved"),
    [
        *(
            pytest.param(PROMPTS["ragged"], sizes, i, id=f"ragged-{sizes}-{i}")
            for sizes in SIZES
            for i in (1, 0)
        ),
        *(
            pytest.param(PROMPTS[name], SIZES[0], i % 2, id=name)
            for i, name in enumerate(PROMPTS)
            if name != "ragged"
        ),
    ],
)
def test_prompts_of_latents(monkeypatch, lens, sizes, interleaved):
    """Results and cache equal the reference's, with expanded keys and values. Prompts are found in
    the same way for all sizes, so each list of prompts has one size, and one list has all sizes."""
    monkeypatch.setattr(mla_prefill, "MIN_TOKENS", 8)
    heads, plain, rotary, rank, width = sizes
    step = cases.step(
        cases.Shape(sequences=lens, num_heads=heads, num_kv_heads=1, head_dim=rotary + rank)
    )
    meta, num_tokens = dataclasses.replace(step.meta, from_start=True), len(step.q)
    q, row = torch.randn(num_tokens, heads, plain + rotary), torch.randn(num_tokens, rank + rotary)
    keys = torch.randn(heads, plain, rank)
    values = torch.randn(heads, rank, width)
    norm = torch.randn(rank)
    cos_sin = torch.ones(200, rotary).cumsum(0).sin()
    given = dict(keys=keys, values=values, norm=cases.rms_norm(norm), cos_sin=cos_sin)
    params = MLAParams(**given, interleaved=bool(interleaved), scale=0.05)
    made = []
    for ops in (OURS, REFERENCE):
        k = step.kv.k.clone()
        out = ops.mla_attention(q.clone(), row, LayerKV(k, k[..., rotary:]), meta, params)
        made.append((k[1:], out))
    for mine, theirs in zip(*made, strict=True):
        close(mine, theirs)


def test_one_token_behind_a_prompt_of_the_same_step(monkeypatch):
    """Two equal prompts of 33 tokens come together. The second computes only its last token, over
    the first one's blocks."""
    monkeypatch.setattr(mla_prefill, "MIN_TOKENS", 8)
    step = cases.step(
        cases.Shape(sequences=((1, 32), (33, 0)), num_heads=2, num_kv_heads=1, head_dim=24)
    )
    table = step.meta.block_table.clone()
    table[0, :2] = table[1, :2]
    meta = dataclasses.replace(step.meta, block_table=table, from_start=True)
    q, row = torch.randn(33, 2, 12), torch.randn(33, 24)
    q, row = torch.cat((q[-1:], q)), torch.cat((row[-1:], row))
    weights = dict(
        keys=torch.randn(2, 4, 16),
        values=torch.randn(2, 16, 8),
        norm=cases.rms_norm(torch.randn(16)),
    )
    params = MLAParams(
        **weights, cos_sin=torch.ones(40, 8).cumsum(0).sin(), interleaved=True, scale=0.3
    )
    kv = LayerKV(step.kv.k, step.kv.k[..., 8:])
    out = OURS.mla_attention(q, row, kv, meta, params)
    close(out[0], out[-1])
    eight_bits = dataclasses.replace(kv, k_scale=torch.ones(1))
    for from_start in (False, True):
        with pytest.raises(ConfigError, match="8-bit"):
            OURS.mla_attention(
                q, row, eight_bits, dataclasses.replace(meta, from_start=from_start), params
            )


@triton.jit
def _find_kernel(
    starts_ptr, out_ptr, first_seq, last_seq, tiles, BLOCK_M: triton.language.constexpr
):
    unit = triton.language.program_id(0)
    seq, tile = mla_prefill._find_tile(unit, starts_ptr, first_seq, last_seq, tiles, BLOCK_M)
    triton.language.store(out_ptr + 2 * unit, seq)
    triton.language.store(out_ptr + 2 * unit + 1, tile)


@pytest.mark.parametrize(
    "lens", [[1] * 3 + [5, 40, 16, 17, 1], [1, *([3] * 250), 50, *([20] * 20), 2], [33]], ids=len
)
def test_units_of_prompts(lens):
    """Each tile of 16 tokens once, in either order, and those of a sequence from its last to its first."""
    first = next(i for i, n in enumerate(lens) if n > 1)
    starts, tiles = torch.tensor([0, *lens]).cumsum(0).int(), -(-max(lens) // 16)
    wanted = [
        (i, tile) for i in range(first, len(lens)) for tile in reversed(range(-(-lens[i] // 16)))
    ]
    of_need = torch.full((len(wanted) + 3, 2), -1, dtype=torch.int32)
    _find_kernel[(len(of_need),)](starts, of_need, first, len(lens), 0, BLOCK_M=16)
    assert [tuple(unit) for unit in of_need[: len(wanted)].tolist()] == wanted
    assert of_need[len(wanted) :, 0].tolist() == [len(lens)] * 3  # there are no more
    if len(lens) > 256:  # passes of 256 sequences are of the search alone
        return
    even = torch.empty(tiles * (len(lens) - first), 2, dtype=torch.int32)
    _find_kernel[(len(even),)](starts, even, first, len(lens), tiles, BLOCK_M=16)
    found = [tuple(unit) for unit in even.tolist()]
    assert sorted(found) == sorted(
        (i, tile) for i in range(first, len(lens)) for tile in range(tiles)
    )
    assert [tile for _, tile in found] == sorted((tile for _, tile in found), reverse=True)


def test_high_tiles_of_prompts_fit_in_smaller_chips():
    """DeepSeek's sizes, by what Triton 3.9 says that each takes (on Hopper 172,032 bytes and 131,072; else as below)."""
    for of_chip, taken in ((232448, 172032), (166912, 90112), (101376, 90112)):
        tile = mla_prefill.default_tile(torch.bfloat16, 320, 1000, of_chip)
        assert {(128, 64, 8, 3): 172032, (128, 64, 8, 2): 90112}[tile] == taken <= of_chip


def test_which_steps_have_keys_of_their_own(monkeypatch):
    """Steps of enough tokens behind the decodes, if nothing of theirs is in the cache."""
    asked = []
    monkeypatch.setattr(mla_prefill, "MIN_TOKENS", 8)
    monkeypatch.setattr(mla_prefill, "mla_attention", lambda *_, **__: asked.append("own"))
    monkeypatch.setattr(
        "slipstream.kernels.triton.mla_paged_attention", lambda *_, **__: asked.append("absorbed")
    )
    given = dict(
        keys=torch.ones(2, 4, 16),
        values=None,
        norm=cases.rms_norm(torch.ones(16)),
        cos_sin=torch.ones(50, 8),
    )
    params = MLAParams(**given, interleaved=True, scale=1.0)
    eight, seven, decodes = ((1, 5), (8, 0)), ((1, 5), (7, 0)), ((1, 5),) * 9
    for lens, from_start in ((eight, True), (seven, True), (eight, False), (decodes, True)):
        step = cases.step(cases.Shape(sequences=lens, num_heads=2, num_kv_heads=1, head_dim=24))
        q, row = torch.randn(len(step.q), 2, 12), torch.randn(len(step.q), 24)
        kv = LayerKV(step.kv.k, step.kv.k[..., 8:])
        OURS.mla_attention(
            q, row, kv, dataclasses.replace(step.meta, from_start=from_start), params
        )
    assert asked == ["own", "absorbed", "absorbed", "absorbed"]


@QUICK
@given(data=st.data())
def test_rope_and_cache(data):
    shape = data.draw(cases.edge_shapes(max_sequences=3))
    step = cases.step(shape)
    h, k, d = shape.num_heads, shape.num_kv_heads, shape.head_dim
    qkv = torch.randn(len(step.q), (h + 2 * k) * d)
    rotary = data.draw(st.sampled_from([0, 4, d]))
    norms = (
        {"q_norm": torch.randn(d), "k_norm": torch.randn(d), "norm_offset": 1.0}
        if data.draw(st.booleans())
        else {}
    )
    angles = torch.outer(torch.arange(2000.0), torch.rand(rotary // 2))
    options = dict(
        num_heads=h,
        num_kv_heads=k,
        head_dim=d,
        interleaved=data.draw(st.booleans()),
        norm_after=data.draw(st.booleans()),
        **norms,
        cos_sin=torch.cat((angles.cos(), angles.sin()), -1) if rotary else None,
    )
    dtype = data.draw(st.sampled_from([None, torch.float8_e4m3fn, torch.int8]))
    caches = [step.clone_kv() if dtype is None else scaled(step.kv, dtype) for _ in range(2)]
    if dtype is not None:
        caches[1] = LayerKV(caches[1].k, caches[1].v, caches[0].k_scale, caches[0].v_scale)
        caches[1].k.copy_(caches[0].k)
        caches[1].v.copy_(caches[0].v)
    if data.draw(st.booleans()):
        caches[0] = dataclasses.replace(caches[0], v=by_dim(caches[0].v))
    with mock.patch.object(
        pointwise, "MANY_TOKENS", data.draw(st.sampled_from([1, 512]))
    ):  # tiles of many tokens or of few
        ours = OURS.rope_and_cache(qkv, caches[0], step.meta, QKVLayout(**options))
    theirs = REFERENCE.rope_and_cache(qkv, caches[1], step.meta, QKVLayout(**options))
    close(ours, theirs)
    for mine, other in ((caches[0].k, caches[1].k), (caches[0].v, caches[1].v)):
        mine, other = (
            mine[1:].float(),
            other[1:].float(),
        )  # padding may write anything to the null block
        if dtype is None:
            close(mine, other)
        else:  # a code may fall on the other side of a tie
            assert (
                (mine - other).abs() <= (1.0 if dtype == torch.int8 else other.abs() / 8 + 0.01)
            ).all()
            assert (mine != other).float().mean() < 0.01


ROPE_PROGRAM = """
from slipstream.kernels.cache.tensors import by_dim
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.ops import QKVLayout
from slipstream.kernels.triton import pointwise

pointwise._rope_kernel = Compiled(pointwise._rope_kernel)
num_tokens, interleaved, eight_bits = int(sys.argv[1]), sys.argv[2] == "interleaved", sys.argv[3] == "fp8"
kind, tokens = torch.float8_e4m3fn if eight_bits else torch.bfloat16, torch.zeros(num_tokens, dtype=torch.int64)
k, v = (torch.zeros(9, 4, 16, 128, dtype=kind) for _ in range(2))
scales = (torch.ones(4), torch.ones(4)) if eight_bits else ()
layout = QKVLayout(num_heads=8, num_kv_heads=4, head_dim=128, interleaved=interleaved, cos_sin=torch.zeros(9, 128))
meta = types.SimpleNamespace(positions=tokens, slot_mapping=tokens)
qkv = torch.zeros(num_tokens, 16 * 128, dtype=torch.bfloat16)
pointwise.rope_and_cache(qkv, LayerKV(k, by_dim(v), *scales) if eight_bits else LayerKV(k, v), meta, layout)
print(json.dumps(pointwise._rope_kernel.binaries[0].asm["ptx"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [3, 300])
@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
@pytest.mark.parametrize("cache", ["fp8", "bfloat16"])
def test_the_rope_kernel_compiles(num_tokens, pairs, cache):
    """The interpreter is more lenient than the compiler. q is read and written 8 or 16 bytes at a time."""
    found = run_for_hopper(ROPE_PROGRAM, str(num_tokens), pairs, cache)
    assert "ld.global.v" in found
    assert "st.global.v" in found


@pytest.mark.parametrize("size", [5, 64, 576])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norms_equal_the_reference(size, with_residual):
    x, weight, bias = torch.randn(7, size), torch.randn(size), torch.randn(size)
    residual = torch.randn(7, size) if with_residual else None
    for run in (
        lambda o, r: o.norm(x, cases.rms_norm(weight, 1.0), residual=r),
        lambda o, r: o.norm(x, cases.rms_norm(weight), residual=r),
        lambda o, r: o.norm(x, cases.layer_norm(weight, bias), residual=r),
        lambda o, r: o.norm(x, cases.layer_norm(weight), residual=r),
    ):
        copies = [None if residual is None else residual.clone() for _ in range(2)]
        for ours, theirs in zip(run(OURS, copies[0]), run(REFERENCE, copies[1]), strict=True):
            close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("inputs", [None, "fp8", "int8", "fp8-block"])
def test_the_norm_of_a_pair_is_that_of_its_sum_bit_for_bit(dtype, inputs):
    """Slices of wider rows are among the cases. (The interpreter does not round bfloat16 as a GPU
    does: it cuts off.)"""
    size = 256
    x, residual = torch.randn(2, 7, size).to(dtype)
    y, weight = torch.randn(7, 2 * size).to(dtype)[:, size:], torch.randn(size).to(dtype)
    for norm in (cases.rms_norm(weight), cases.layer_norm(weight, weight)):
        ours = OURS.norm_pair(OURS.joined(x, y), norm, residual=residual.clone(), inputs=inputs)
        theirs = OURS.norm(x + y, norm, residual=residual.clone(), inputs=inputs)
        rows = [
            (r,) if inputs is None else (r.values.view(torch.int8), r.scales)
            for r in (ours[0], theirs[0])
        ]
        assert all(torch.equal(a, b) for a, b in zip(rows[0], rows[1], strict=True))
        assert torch.equal(ours[1], theirs[1])
    for run in (OURS, REFERENCE):  # without a residual the sum is the second value
        close(
            run.norm_pair(Pair(x.float(), y.float()), cases.rms_norm(weight.float()))[1],
            x.float() + y.float(),
        )


NORM_PROGRAM = """
from slipstream.kernels.ops import NormParams
from slipstream.kernels.triton import pointwise

pointwise._norm_kernel = Compiled(pointwise._norm_kernel)
size = 4096
x, y, residual = torch.zeros(3, 8192, size, dtype=torch.bfloat16)
weight = torch.zeros(size, dtype=torch.bfloat16)
pointwise.norm(x, NormParams(kind="layer", weight=weight, bias=weight, eps=1e-5), residual, sys.argv[1], y)
print(json.dumps(pointwise._norm_kernel.binaries[0].asm["ptx"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("inputs", ["fp8", "int8", "fp8-block"])
def test_the_norm_of_a_pair_compiles(inputs):
    found = run_for_hopper(NORM_PROGRAM, inputs)
    assert (
        found.count("ld.global.v4") >= 5
    )  # x, y, the residual, weight and bias: 16 bytes at a time
    assert (
        found.count("add.bf16x2") == 2 * 8
    )  # both sums of a thread's 16 numbers, each rounded, to the nearest


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_activations_equal_the_reference(kind):
    x = torch.randn(5, 2 * 37) * 3
    close(OURS.activation(x, kind, gated=True), REFERENCE.activation(x, kind, gated=True))
    close(OURS.activation(x, kind), REFERENCE.activation(x, kind))


@pytest.mark.parametrize("inputs", [None, "int8"])
@pytest.mark.parametrize("kind", [ClampedSwiglu(alpha=1.702, limit=2.0), ClampedSilu(limit=0.8)])
def test_clamped_activations_equal_the_reference(inputs, kind):
    x = torch.randn(5, 2 * 37) * 3
    ours, theirs = (o.activation(x, kind, gated=True, inputs=inputs) for o in (OURS, REFERENCE))
    close(ours, theirs) if inputs is None else same_rows(ours, theirs)


@pytest.mark.parametrize(
    ("inputs", "size"), [("fp8", 80), ("int8", 80), ("fp8-block", 256), ("fp8-block", 768)]
)
def test_norms_and_activations_write_8_bit_rows(inputs, size):
    x, weight, bias = torch.randn(3, size) * 2, torch.randn(size), torch.randn(size)
    x[1] = 0
    x[2, : size // 2] *= 1e-3  # a group of its own
    same_rows(OURS.quantize(x, inputs), REFERENCE.quantize(x, inputs))
    for run in (
        lambda o: o.norm(x, cases.rms_norm(weight), residual=x.clone(), inputs=inputs)[0],
        lambda o: o.norm(x, cases.layer_norm(weight, bias), inputs=inputs)[0],
        lambda o: o.activation(x, "silu", gated=True, inputs=inputs),
        lambda o: o.activation(x, "gelu_tanh", inputs=inputs),
    ):
        same_rows(run(OURS), run(REFERENCE))


@pytest.mark.parametrize("num_rows", [7, 8, 12])
def test_several_rows_of_a_program_are_the_same_bit_for_bit(monkeypatch, num_rows):
    x, weight, bias = torch.randn(num_rows, 74), torch.randn(74), torch.randn(74)
    runs = (
        lambda: OURS.norm(x, cases.layer_norm(weight, bias), residual=x.clone()),
        lambda: OURS.norm(x[:, :64], cases.rms_norm(weight[:64])),
        lambda: (OURS.activation(x, "silu", gated=True), OURS.activation(x, "gelu")),
    )
    one = [run() for run in runs]
    asked = []
    monkeypatch.setattr(pointwise, "MANY_ROWS", 8)
    monkeypatch.setattr(
        pointwise,
        "rows_per_program",
        lambda *given: asked.append(rows_per_program(*given)) or asked[-1],
    )
    for ours, theirs in zip([run() for run in runs], one, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert asked == [4 if num_rows > 7 else 1] * 4
    assert (
        rows_per_program(4096, 4096) == rows_per_program(4098, 64) == 1
    )  # wide rows, and such as four don't divide


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize(
    ("num_tokens", "outer", "inner", "tile"),
    [
        (1, 70, 96, (64, 32, 2, 1)),
        (5, 64, 64, (64, 32, 1, 1)),
        (17, 33, 160, (16, 64, 3, 1)),
        (2, 64, 128, (32, 32, 2, 1)),
        (100, 40, 64, (32, 32, 2, 1)),
    ],
)
def test_8_bit_products(name, num_tokens, outer, inner, tile):
    for bias in (None, torch.randn(outer)):
        w = round_linear(torch.randn(outer, inner), bias, SCHEMES[name])
        x = quantize_rows(torch.randn(num_tokens, inner), SCHEMES[name].inputs)
        scratch = ArrivalCounters(torch.device("cpu"))
        theirs = REFERENCE.linear(x, w)
        for _ in range(2):  # the counters of the parts are as they were
            close(skinny_gemm(x, w, scratch, tile=tile), theirs)
            assert not scratch.counters.any()
        close(gemm(x, w, tile=(16, 32, 32, 4, 1)), theirs)
        close(TritonOps(deterministic=True).linear(x, w), theirs)


@pytest.mark.parametrize(
    ("num_tokens", "outer", "inner", "tile"),
    [
        (1, 70, 384, (16, 64, 2, 4, 1)),
        (5, 192, 256, (16, 32, 1, 4, 1)),
        (17, 300, 128, (16, 128, 1, 4, 1)),
        (0, 64, 128, None),
    ],
)
def test_products_by_blocks(num_tokens, outer, inner, tile):
    """Blocks of very different sizes, so that a wrong scale shows; tiles that split, and several of tokens."""
    torch.manual_seed(0)  # sums near zero of numbers of a thousand are a matter of luck
    for bias in (None, torch.randn(outer)):
        sizes = torch.logspace(-2, 1, -(-outer // 128) * (inner // 128)).view(-1, inner // 128)
        dense = torch.randn(outer, inner) * sizes.repeat_interleave(128, 0)[
            :outer
        ].repeat_interleave(128, 1)
        w = round_linear(dense, bias, SCHEMES["fp8-block"])
        x = quantize_rows(
            torch.randn(num_tokens, inner) * torch.logspace(-1, 1, inner), "fp8-block"
        )
        scratch, theirs = ArrivalCounters(torch.device("cpu")), REFERENCE.linear(x, w)
        for _ in range(2):  # the counters of the parts are as they were
            close(fp8_tile_linear(x, w, scratch, tile=tile), theirs)
            assert not scratch.counters.any()
        close(OURS.linear(x, OURS.pack_weight(w)), theirs)
        close(TritonOps(deterministic=True).linear(x, w), theirs)


@pytest.mark.parametrize("num_tokens", [64, 65, 66])
def test_the_librarys_product_by_blocks_gets_what_it_wants(monkeypatch, num_tokens):
    """A multiple of four tokens, and scales that lie block by block; what was added is taken off."""

    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype):
        assert (a.shape[0] % 4, scale_a.stride(), scale_b.shape) == (0, (1, a.shape[0]), (4, 2))
        x = numbers(Quantized(a, scale_a))
        spread = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, : b.shape[1]]
        return (x @ (b.float() * spread)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    x = quantize_rows(torch.randn(num_tokens, 512), "fp8-block")
    for bias in (None, torch.randn(200)):
        w = round_linear(torch.randn(200, 512), bias, SCHEMES["fp8-block"])
        close(fp8_tile_scaled_mm(x, w), REFERENCE.linear(x, w))
    assert not has_scaled_mm(x, w)  # on a CPU


@pytest.mark.parametrize(
    ("size", "inner"),
    [(32, 192), (32, 128), (128, 384), (128, 512), pytest.param(128, 768, marks=pytest.mark.slow)],
)
def test_4_bit_products(size, inner):
    outer = 70
    scheme = SCHEMES["int4" if size == 128 else "int4-g32"]
    for bias in (
        None,
        torch.randn(outer).half(),
    ):  # in bfloat16: tests/gpu, the interpreter's dot knows only float16
        w = round_linear(torch.randn(outer, inner).half(), bias, scheme)
        if bias is not None:
            w = dataclasses.replace(w, zeros=torch.randint(0, 16, w.scales.shape).half())
        close(dequantize_int4(w, torch.float32), dequantize(w))
        x = torch.randn(3, inner).half()
        for splits in (1, 2, 3):
            ours = int4_linear(x, w, ArrivalCounters(torch.device("cpu")), tile=(64, splits, 1))
            torch.testing.assert_close(
                ours, REFERENCE.linear(x, w), rtol=1e-2, atol=1e-2 * inner**0.5
            )
        kept = TritonOps(dense_copies=True).pack_weight(w)
        many = torch.randn(INT4_DENSE_TOKENS + 1, inner).half()
        assert torch.equal(kept.dense, dequantize_int4(w, torch.float16))
        torch.testing.assert_close(
            TritonOps(dense_copies=True).linear(many, kept),
            REFERENCE.linear(many, w),
            rtol=1e-2,
            atol=1e-2 * inner**0.5,
        )
        # One token, of few rows: the interpreter takes each by itself. Several steps along K, groups within one and across.
        w = round_linear(torch.randn(20, inner).half(), None if bias is None else bias[:20], scheme)
        if bias is not None:
            w = dataclasses.replace(w, zeros=torch.randint(0, 16, w.scales.shape).half())
        ours = int4_gemv(x[:1], w, 16 if size == 32 else 32, rows=5 if bias is None else 10)
        torch.testing.assert_close(
            ours, REFERENCE.linear(x[:1], w), rtol=1e-2, atol=1e-2 * inner**0.5
        )


@pytest.mark.parametrize(
    "name", [name for name, scheme in SCHEMES.items() if not scheme.experts_only]
)
def test_rounding_keeps_to_its_error(name):
    """Half a step of the scheme's grid, for each number. The scales of 4-bit integers are searched: together a group's numbers
    err no more than with the step that holds the largest."""
    weight = torch.randn(9, 256) * torch.logspace(-3, 2, 9)[:, None]
    weight[3] = 0
    w = round_linear(weight, None, SCHEMES[name])
    error = (dequantize(w) - weight).abs()
    if name == "fp8-block":
        assert (error <= weight.abs() / 16 + w.scales.repeat_interleave(128, dim=1) / 256).all()
    elif name.startswith("fp8"):
        assert (error <= weight.abs() / 16 + w.scales[:, None] / 256).all()
    elif name.startswith("int8"):
        assert (error <= w.scales[:, None] * 0.5001).all()
    elif name.startswith("int4"):
        groups = weight.view(9, -1, w.group_size)
        steps = groups.abs().amax(2, keepdim=True) / 7 + 1e-12
        nearest = groups - steps * (groups / steps).round()
        assert (
            error.view_as(groups).square().sum(2) <= nearest.square().sum(2) * 1.0001 + 1e-12
        ).all()
    else:  # 4-bit floats: the widest step is from 4 to 6, and beyond 6 up to 8 scales are 6
        largest = weight.view(9, -1, w.group_size).abs().amax(2)
        largest = largest.repeat_interleave(w.group_size, dim=1)
        assert (error <= weight.abs() / 4 + largest / 16 + 1e-12).all()
    assert torch.equal(dequantize(w)[3], torch.zeros(256))


FUNCTIONS = {"fp8_block": "fp8_tile_linear", "int4_groupwise": "int4_linear"}
"""Names of the functions for `linear` that differ from the op's name."""


def spied(patch, op):
    """The tiles that an op's function is called with, and then runs with."""
    name = FUNCTIONS.get(op, op)
    seen, real = [], getattr(linear, name)
    patch.setattr(
        linear, name, lambda *a, tile=None, **k: seen.append(tile) or real(*a, tile=tile, **k)
    )
    return seen


@pytest.mark.parametrize(
    ("op", "scheme", "kind", "tokens", "size", "tile"),
    [
        ("gemv", None, "float32", 1, (), (4, 32, 4)),
        ("skinny_gemm", "fp8", "fp8", 3, (16,), (32, 32, 1, 1)),
        ("skinny_gemm", "int8", "int8", 17, (32,), (32, 64, 2, 1)),
        ("gemm", "int8", "int8", 70, (256,), (32, 32, 32, 4, 1)),
        ("fp8_block", "fp8-block", "fp8-block", 2, (16,), (16, 2, 4, 1)),
        ("int4_groupwise", "int4-g32", "int4-g32", 2, (16,), (32, 1, 1)),
        ("int4_groupwise", "int4", "int4", 2, (16,), (32, 2, 1)),
    ],
)
def test_products_take_the_tables_tiles(monkeypatch, op, scheme, kind, tokens, size, tile):
    outer, inner = 48, 256
    seen = spied(monkeypatch, op)
    key = (op, kind, (outer, inner, *size))
    ops = TritonOps(TileTable(device="", entries={key: Measured(tile)}))
    weight = torch.randn(outer, inner)
    w = ops.quantize_weight(
        weight.half() if op == "int4_groupwise" else weight,
        None,
        SCHEMES[scheme] if scheme else None,
    )
    x = torch.randn(tokens, inner).to(w.scales.dtype if op == "int4_groupwise" else weight.dtype)
    ours, theirs = ops.linear(x, w), REFERENCE.linear(x, w)
    assert seen == [
        tile if op != "fp8_block" else (16, *tile)
    ]  # whose first number follows from the tokens
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * inner**0.5)
    ops.with_tiles(NO_TILES).linear(x, w)
    assert seen[1:] == [None]


def test_attention_takes_the_tables_tiles(monkeypatch):
    step = cases.step(
        cases.Shape(sequences=((1, 20), (1, 3), (9, 5)), num_heads=4, num_kv_heads=2, head_dim=16)
    )
    seen = []

    def spy(*args, decode_tile, prefill_tile, **more):
        seen.append((decode_tile, prefill_tile))
        return paged_attention(*args, decode_tile=decode_tile, prefill_tile=prefill_tile, **more)

    monkeypatch.setattr("slipstream.kernels.triton.paged_attention", spy)
    shape = (4, 2, 16, step.kv.block_size)
    entries = {
        ("decode", "float32", (*shape, 4)): Measured((16, 2, 1)),
        ("prefill", "float32", (*shape, 32)): Measured((16, 16, 4, 1)),
    }
    ours = TritonOps(TileTable(device="", entries=entries)).attention(
        step.q, step.kv, step.meta, AttentionParams(scale=0.25)
    )
    theirs = REFERENCE.attention(step.q, step.kv, step.meta, AttentionParams(scale=0.25))
    assert seen == [((16, 2, 1), (16, 16, 4, 1))]
    close(ours[step.owned], theirs[step.owned])


@pytest.mark.parametrize(
    "scheme", [None, *(pytest.param(s, marks=pytest.mark.slow) for s in ("int8", "int4-g32"))]
)
def test_a_models_trials_run_and_agree(monkeypatch, scheme):
    """Every key that is tuned for a model is one that the engine looks up: with a tile of its own, each op is given it."""
    monkeypatch.setattr(tuning, "L2_BYTES", 0.0)
    monkeypatch.setattr(
        tuning, "PREFILL_TOKENS", 50
    )  # two prompts of 20: 204 of them took most of this test's time
    spec = dataclasses.replace(make_spec(kv_heads=(2,)), vocab_size=40)
    dtype = torch.float16 if scheme == "int4-g32" else torch.float32
    bench = tuning._TrialRunner(NO_TILES, torch.device("cpu"), dtype)
    cache = "int8" if scheme == "int8" else None
    trials = bench.trials(spec, SCHEMES[scheme] if scheme else None, cache, 16, 20, 3)
    assert len({t.key for t in trials}) == len(trials)
    ops = {
        None: {"gemv"},
        "int8": {"gemv", "skinny_gemm", "gemm"},
        "int4-g32": {"gemv", "int4_groupwise"},
    }[scheme]
    assert {t.key[0] for t in trials} == ops | {"decode", "prefill"}
    layers = [
        dataclasses.replace(s, attention=dataclasses.replace(s.attention, causal=False))
        for s in spec.layers
    ]
    whole = dataclasses.replace(
        spec, layers=tuple(layers)
    )  # an encoder's attention has no tiles in the table
    assert {
        t.key[0] for t in bench.trials(whole, SCHEMES[scheme] if scheme else None, None, 16, 20, 3)
    } == ops
    tiles = {
        "gemv": (2, 32, 4), "skinny_gemm": (16, 32, 1, 1), "gemm": (64, 64, 64, 4, 1), "int4_groupwise": (16, 1, 1),
        "decode": (16, 4, 1), "prefill": (16, 16, 4, 1),
    }  # fmt: skip
    asked = []
    find = TileTable.find
    monkeypatch.setattr(
        TileTable, "find", lambda self, *key: asked.append((self, key)) or find(self, *key)
    )
    for op in tiles:
        for trial in [t for t in trials if t.key[0] == op][:2]:
            asked.clear()
            assert tuning.results_agree(trial.prepare(trial.key), tiles[op]), trial.key
            assert any(find(table, *key) == tiles[op] for table, key in asked), trial.key


def test_trials_of_products_by_blocks(monkeypatch):
    monkeypatch.setattr(tuning, "L2_BYTES", 0.0)
    bench = tuning._TrialRunner(NO_TILES, torch.device("cpu"), torch.float32)
    trials = bench._products((48, 256), SCHEMES["fp8-block"])
    assert [t.key for t in trials] == [
        ("fp8_block", "fp8-block", (48, 256, n)) for n in (16, 32, 64)
    ]
    assert tuning.results_agree(trials[0].prepare(trials[0].key), (16, 2, 4, 1))


def test_linear_embed_and_copies():
    x, weight, bias = torch.randn(1, 100), torch.randn(30, 100), torch.randn(30)
    for b in (None, bias):
        for ops in (OURS, TritonOps(deterministic=True)):
            close(
                ops.linear(x, ops.quantize_weight(weight, b)),
                REFERENCE.linear(x, REFERENCE.quantize_weight(weight, b)),
            )
        close(gemv(x, weight, b, tile=(2, 32, 4)), torch.nn.functional.linear(x, weight, b))
    ids = torch.tensor([3, 0, 29], dtype=torch.int32)
    close(OURS.embed(ids, weight, 2.5), REFERENCE.embed(ids, weight, 2.5))


@pytest.mark.parametrize(
    "sizes", [((6, 2, 4, 8), (6, 1, 4, 8)), ((6, 2, 8, 128),), ((6, 2, 4, 8), (6, 1, 3, 1))]
)
def test_copies_of_blocks(sizes):
    """Copies within a cache, to a buffer and back. The last sizes are no multiple of eight bytes."""
    caches = [torch.randn(size).to(torch.bfloat16) for size in sizes]
    caches = [cache for k in caches for cache in (k, by_dim(torch.randn_like(k)))]
    pairs = torch.tensor([[1, 3], [2, 5]])
    for ops in (OURS, REFERENCE):
        copies = [cache.clone() for cache in caches]
        rows = BlockTensors.of(copies)
        buffer = torch.zeros(3, sum(cache[0].nbytes for cache in caches), dtype=torch.uint8)
        staged = rows.in_buffer(buffer)
        ops.copy_blocks(rows, rows, pairs[:, 0], pairs[:, 1])
        ops.copy_blocks(rows, staged, torch.tensor([3, 4]), torch.tensor([2, 0]))
        ops.copy_blocks(staged, rows, torch.tensor([2]), torch.tensor([0]))
        for cache, copy in zip(caches, copies, strict=True):
            assert torch.equal(copy, cache[[1, 1, 2, 1, 4, 2]])
        wanted = torch.cat(
            [
                (cache if cache.is_contiguous() else cache.mT)[1].flatten().view(torch.uint8)
                for cache in caches
            ]
        )
        assert torch.equal(buffer[2], wanted)
        assert not buffer[1].any()


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(case=cases.sampling_cases(max_rows=3))
def test_a_drawn_token_is_where_the_distribution_puts_it(case):
    """The token drawn is a kept one, at the place of the cumulative distribution that u asks for (up to rounding)."""
    logits, params = case
    chosen = OURS.sample(logits.clone(), params)
    scores = apply_bias_and_penalties(logits.clone().float(), params)
    probs = scaled_probs(scores, params)
    kept = filter_probs(scores, probs, params).double()
    u = uniform(params.seeds, params.history_lens).double() * kept.sum(-1)
    running = kept.cumsum(-1)
    for i, token in enumerate(chosen.tolist()):
        if params.temperature[i] == 0 or params.all_greedy:
            assert token == int(scores[i].argmax())
            continue
        assert kept[i, token] > 0
        slack = 1e-5 * float(running[i, -1])
        assert running[i, token] >= u[i] - slack
        assert running[i, token] - kept[i, token] <= u[i] + slack


@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 5), (3, 200), (2, 1000), (70, 150)])
def test_the_likeliest_token(num_rows, vocab):
    """One program a row, and several. The first of equal tokens wins, whichever program has it,
    and a row of NaN gives a token."""
    torch.manual_seed(0)
    for logits in (
        torch.randn(num_rows, vocab),
        torch.randint(0, 3, (num_rows, vocab)).float(),
        torch.zeros(num_rows, vocab),
    ):
        assert torch.equal(
            sampling.argmax(logits.bfloat16(), block=64), logits.bfloat16().argmax(-1)
        )
    none = sampling.argmax(torch.full((num_rows, vocab), float("nan")), block=64)
    assert ((none >= 0) & (none < vocab)).all()


def test_names_of_the_likeliest_token():
    logits = torch.randn(3, 200)
    for ids in (torch.randperm(900)[:200], torch.arange(200) + 7):
        for vocab in (200, 40):  # by several programs, and by one
            given = logits[:, :vocab].contiguous()
            assert torch.equal(sampling.argmax(given, ids[:vocab], block=64), ids[given.argmax(-1)])
            assert torch.equal(REFERENCE.argmax(given, ids[:vocab]), ids[given.argmax(-1)])


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_equal_the_reference(dtype, scale):
    table = torch.randn(50, 2500).to(dtype)
    for ids in (
        torch.tensor([3, 49, 0, 3], dtype=torch.int32),
        torch.tensor([7]),
        torch.tensor([], dtype=torch.int64),
    ):
        for t in (table, table[:, ::2]):
            ours, theirs = (o.embed(ids, t, scale) for o in (OURS, REFERENCE))
            torch.testing.assert_close(
                ours, theirs, rtol=0.0 if scale == 1.0 else 2**-7, atol=0.0
            )  # the interpreter truncates


@pytest.mark.parametrize("num_drafts", [1, 2, 5])
@pytest.mark.parametrize(
    ("size", "first", "num_again"), [(1, 1, None), (3, 0, 2), (5, 1, None), (130, 1, None)]
)
def test_the_places_of_a_chain(num_drafts, size, first, num_again):
    """Sequences with none, some and all drafts right; some want fewer; padding; positions at the context's end."""
    rng = torch.Generator().manual_seed(size)
    capacity, context, room = 140, 40, -(-size // 4) * 4

    def numbers(low, high, *shape):
        return torch.randint(low, high, shape, dtype=torch.int32, generator=rng)

    tokens, kept = numbers(0, 2, capacity + 1, context + 1), numbers(0, 2, capacity + 1, 8)
    inputs = torch.zeros(4, room, dtype=torch.int32)
    inputs[0], inputs[1] = capacity, num_drafts + 1
    count = max(1, size - 1)
    inputs[0, :count] = torch.randperm(capacity, generator=rng)[:count]
    inputs[1, :count] = numbers(num_drafts + 1, context, count)
    inputs[2, :count] = numbers(0, num_drafts + 1, count)
    inputs[3, :count] = (inputs[2, :count] + 1) * numbers(0, 2, count)
    given = dict(
        num_drafts=num_drafts, size=size, num_again=num_again or num_drafts + 1, first=first
    )
    ours, theirs = (o.chain_places(tokens, kept, inputs, **given) for o in (OURS, REFERENCE))
    for field in dataclasses.fields(theirs):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(other, int):
            assert mine == other
        else:
            assert mine.dtype == other.dtype == torch.int32
            assert torch.equal(mine, other), field.name


def test_a_draw_from_nan_is_a_token():
    """Drafts of a head whose states overflow must not be read from beyond the embeddings."""
    rows, vocab = 2, 100
    floats = {
        name: torch.full((rows,), x)
        for name, x in (("temperature", 0.5), ("top_p", 0.9), ("min_p", 0.0))
    }
    ints = {name: torch.full((rows,), 5, dtype=torch.int32) for name in ("top_k", "history_lens")}
    params = SamplingTensors(
        **floats, **ints, seeds=torch.arange(rows), any_top_k=True, any_top_p=True
    )
    chosen = OURS.sample(torch.full((rows, vocab), torch.nan), params)
    assert ((chosen >= 0) & (chosen < vocab)).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_tokens(dtype):
    torch.manual_seed(0)
    tokens = torch.randint(0, 1000, (6, 65), dtype=torch.int32)
    table = torch.randint(0, 99, (6, 4), dtype=torch.int32)
    for count in (0, 1, 5, 300):
        rows, positions = (torch.randint(0, n, (count,), dtype=dtype) for n in (6, 64))
        given = tokens, table, rows, positions, 16
        for ours, theirs in zip(
            OURS.gather_inputs(*given), REFERENCE.gather_inputs(*given), strict=True
        ):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
    one = torch.tensor([3, 99, 99], dtype=dtype)[:1].expand(
        300
    )  # a number for all: nothing behind it is to be read
    for ours, theirs in zip(
        *(o.gather_inputs(tokens, table, one, one, 16) for o in (OURS, REFERENCE)), strict=True
    ):
        assert torch.equal(ours, theirs)
    ours, theirs, new = tokens.clone(), tokens.clone(), torch.tensor([7, 99, 99])[:1].expand(6)
    for o, written in ((OURS, ours), (REFERENCE, theirs)):
        o.write_tokens(written, torch.arange(6, dtype=dtype), one[:6], new)
    assert torch.equal(ours, theirs)
    rows, positions = torch.tensor([5, 0, 2], dtype=dtype), torch.tensor([64, 3, 0], dtype=dtype)
    ours, theirs, new = tokens.clone(), tokens.clone(), torch.tensor([7, 8, 9])
    OURS.write_tokens(ours, rows, positions, new)
    REFERENCE.write_tokens(theirs, rows, positions, new)
    assert torch.equal(ours, theirs)
    assert (ours != tokens).sum() == 3
