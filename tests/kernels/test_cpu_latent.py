"""Latent attention in the C++ kernels against the reference, on every instruction set that this machine runs.

Tolerances: those of test_cpu_ops.py. In bfloat16 the reference computes in float32 from the same rounded inputs: the kernels
round what enters a product (2⁻⁹ relative each, averaging out over a sum), and the cache's rows, which are compared to a unit in
the last place."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.kernels import native
from slipstream.kernels.cpu import NativeOps
from slipstream.kernels.ops import LayerKV
from slipstream.kernels.reference import ReferenceOps
from tests.kernels.cases import Shape, Step, attention_options, edge_shapes, step

torch.set_num_threads(1)
reference = ReferenceOps()
ISAS = native.instruction_sets()
OPS = {isa: NativeOps(2, isa) for isa in ISAS}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=ISAS)
def ops(request) -> NativeOps:
    return OPS[request.param]


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.isfinite().all()
    tolerance = 2e-5 if dtype == torch.float32 else 2**-6
    size = max(1.0, float(expected.abs().max())) if len(expected) else 1.0
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance * size)


def latents(k: Tensor, rotary: int) -> LayerKV:
    return LayerKV(k, k[..., rotary:])


def check(ops: NativeOps, case: Step, *, plain: int, rotary: int, width: int, dtype: torch.dtype, interleaved: bool) -> None:
    """A step's rows are written, asked for and attended to, each compared by itself: what follows starts from the same."""
    num_tokens, heads, dim = case.q.shape
    rank = dim - rotary
    torch.manual_seed(num_tokens)
    q, row = torch.randn(num_tokens, heads, plain + rotary).to(dtype), torch.randn(num_tokens, dim).to(dtype)
    keys, values = (torch.randn(heads, *n).to(dtype) / n[0] ** 0.5 for n in ((plain, rank), (rank, width)))
    angles = torch.rand(1024, rotary // 2) * 6
    options: dict[str, Any] = {
        "norm": torch.randn(rank).to(dtype),
        "eps": 1e-5,
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=-1),
        "interleaved": interleaved,
    }
    ours, theirs = latents(case.kv.k.to(dtype), rotary), latents(case.kv.k.to(dtype).float(), rotary)
    asked = ops.latent_queries(q, row, ours, case.meta, keys=ops.prepare_heads(keys), **options)
    expected = reference.latent_queries(q.float(), row.float(), theirs, case.meta, keys=keys.float(), **options)
    assert (asked.dtype, asked.shape) == (dtype, (num_tokens, heads, dim))
    assert_near(asked, expected, dtype)
    ours.k[0] = theirs.k[0] = 0  # which of the padded rows wrote there last is open
    close = 2e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(ours.k.float(), theirs.k, rtol=close, atol=close)
    same = latents(ours.k.float(), rotary)
    got = ops.latent_attention(asked, ours, case.meta, ops.prepare_heads(values), scale=0.3)
    wanted = reference.latent_attention(asked.float(), same, case.meta, values.float(), scale=0.3)
    assert (got.dtype, got.shape) == (dtype, (num_tokens, heads * width))
    assert got.isfinite().all()
    assert_near(got[case.owned], wanted[case.owned], dtype)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_random_steps(data):
    """Sizes that fill no vector among them."""
    shape, rotary = data.draw(edge_shapes()), data.draw(st.sampled_from([2, 8, 14, 16]))
    heads, rank = data.draw(st.sampled_from([1, 2, 3, 4, 5, 6, 9, 16])), data.draw(st.sampled_from([3, 16, 24, 37, 80]))
    shape = dataclasses.replace(shape, num_heads=heads, num_kv_heads=1, head_dim=rotary + rank)
    check(
        OPS[data.draw(st.sampled_from(ISAS))],
        step(shape),
        plain=data.draw(st.sampled_from([1, 3, 16, 20, 33])),
        rotary=rotary,
        width=data.draw(st.sampled_from([1, 5, 16, 40])),
        dtype=data.draw(st.sampled_from(DTYPES)),
        interleaved=data.draw(st.booleans()),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sizes_of_deepseek(ops, dtype):
    """Decodes in one range of keys and in several, prompts in several tiles of queries, with and without what came before."""
    sequences = ((1, 300), (1, 127), (1, 128), (1, 0), (40, 30), (30, 0))
    shape = Shape(sequences=sequences, num_heads=16, num_kv_heads=1, head_dim=576, padded=2)
    check(ops, step(shape), plain=128, rotary=64, width=128, dtype=dtype, interleaved=True)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_attention_with_all_its_options(data):
    shape, rotary = data.draw(edge_shapes()), 8
    shape = dataclasses.replace(shape, num_kv_heads=1, head_dim=40)
    case, dtype = step(shape), data.draw(st.sampled_from(DTYPES))
    options = data.draw(attention_options(shape.num_heads))
    kv, q = latents(case.kv.k.to(dtype), rotary), case.q.to(dtype)
    got = OPS[data.draw(st.sampled_from(ISAS))].attention(q, kv, case.meta, **{**options, "scale": 0.1})
    wanted = reference.attention(q.float(), latents(kv.k.float(), rotary), case.meta, **{**options, "scale": 0.1})
    assert got.isfinite().all()
    assert_near(got[case.owned], wanted[case.owned], dtype)


def test_neither_threads_nor_neighbours_change_a_result(ops):
    """Bit for bit: a decode alone and among others, on one thread and on three."""
    shape = Shape(sequences=((1, 300), (1, 5), (20, 7)), num_heads=5, num_kv_heads=1, head_dim=48)
    case = step(shape, torch.bfloat16)
    kv, heads = latents(case.kv.k, 16), torch.randn(5, 32, 24).bfloat16()
    alone = dataclasses.replace(
        case.meta,
        query_start_loc=case.meta.query_start_loc[:2],
        seq_lens=case.meta.seq_lens[:1],
        block_table=case.meta.block_table[:1],
        positions=case.meta.positions[:1],
        slot_mapping=case.meta.slot_mapping[:1],
        num_decodes=1,
    )
    expected = None
    for num_threads in (1, 3):
        own = NativeOps(num_threads, ops.engine.isa)
        values = own.prepare_heads(heads)
        found = own.latent_attention(case.q, kv, case.meta, values, scale=0.1)
        expected = found if expected is None else expected
        assert torch.equal(found, expected)
        assert torch.equal(own.latent_attention(case.q[:1], kv, alone, values, scale=0.1), expected[:1])
