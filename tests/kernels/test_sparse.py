"""Sparse attention: the kernels of a CPU, on every instruction set that this machine runs, and those of Triton in its
interpreter, against the reference. Whole models: tests/model/families/test_families.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.kernels.layouts import IndexParams, QKVLayout
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.ops import MLAParams
from slipstream.kernels.plain.reference import ReferenceOps, gather_sequence
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.attention import sparse
from tests.kernels.cases import Shape, Step, edge_shapes, rms_norm, step
from tests.kernels.cpu.test_cpu_mla import DTYPES, ISAS, OPS, assert_near, latents

REFERENCE, TRITON = ReferenceOps(), TritonOps()
ROTARY = 8


def with_index(case: Step, dim: int, dtype: torch.dtype) -> LayerKV:
    torch.manual_seed(3)
    k = case.kv.k.to(dtype)
    index = torch.randn(*k.shape[:3], dim).to(dtype)
    return LayerKV(k.clone(), k[..., ROTARY:], index=index)


def chosen_by(ops, case: Step, heads: int, dim: int, top_k: int, dtype: torch.dtype):
    """Choice and keys of the index, for the same queries with every op set."""
    kv = with_index(case, dim, dtype)
    torch.manual_seed(len(case.q))
    q, k, weights = (torch.randn(len(case.q), n).to(dtype) for n in (heads * dim, dim, heads))
    angles = torch.rand(1024, ROTARY // 2) * 6
    layout = QKVLayout(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=dim,
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1),
    )
    params = IndexParams(heads=layout, top_k=top_k)
    chosen = ops.choose_keys(q, k, weights, kv, case.meta, params)
    turned = REFERENCE.rope_and_cache(
        torch.cat((q, k), dim=1), with_index(case, dim, dtype).of_index, case.meta, layout
    )
    return chosen, kv, turned, weights


def check_choice(ops, case: Step, heads: int, dim: int, top_k: int, dtype: torch.dtype) -> None:
    meta = case.meta
    found, kv, _, _ = chosen_by(ops, case, heads, dim, top_k, dtype)
    wanted, exact, q, weights = chosen_by(REFERENCE, case, heads, dim, top_k, dtype)
    assert kv.index is not None
    assert exact.index is not None
    close = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(kv.index[1:], exact.index[1:], rtol=close, atol=close)
    starts, lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    for i, length in enumerate(lens):
        if meta.max_seq_len <= top_k or length == 0:
            continue
        keys = gather_sequence(exact.of_index, meta.block_table[i], length)[0][0].float()
        for t in range(starts[i], starts[i + 1]):
            if meta.positions[t] < top_k:
                continue
            scores = weights[t].float() @ (q[t].float() @ keys.T).relu()
            ours, theirs = ({*x[t].tolist()} for x in (found, wanted))
            assert len(ours) == top_k
            assert max(ours) <= int(meta.positions[t])
            if ours != theirs:  # near ties, which rounding parts
                differ = scores[list(ours ^ theirs)]
                assert differ.max() - differ.min() <= 20 * close * scores.abs().max()


SIZES = dict(
    heads=st.sampled_from([1, 3, 16, 17]),
    dim=st.sampled_from([8, 12, 32, 50]),
    top_k=st.sampled_from([1, 2, 7, 30]),
)
OF_TRITON = st.sampled_from(
    [torch.float32, torch.float16]
)  # the interpreter has no products of bfloat16


@settings(max_examples=60)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), **SIZES)
def test_a_cpu_chooses_the_keys_with_the_highest_scores(data, heads, dim, top_k, dtype):
    ops = OPS[data.draw(st.sampled_from(ISAS))]
    shape = dataclasses.replace(data.draw(edge_shapes()), num_kv_heads=1, head_dim=40)
    check_choice(ops, step(shape), heads, dim, top_k, dtype)


@settings(max_examples=25)
@given(data=st.data(), rows=st.sampled_from([64, 2**20]), dtype=OF_TRITON, **SIZES)
def test_triton_chooses_the_keys_with_the_highest_scores(data, rows, heads, dim, top_k, dtype):
    """Scores are computed for all tokens at once, and in slices."""
    shape = data.draw(edge_shapes(max_sequences=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "MAX_SCORES", rows)
        case = step(dataclasses.replace(shape, num_kv_heads=1, head_dim=40))
        check_choice(TRITON, case, heads, dim, top_k, dtype)


def test_of_equal_scores_the_earlier_keys_are_chosen():
    case = step(Shape(sequences=((1, 40), (3, 20)), num_heads=2, num_kv_heads=1, head_dim=40))
    for ops in (REFERENCE, *OPS.values()):
        kv = with_index(case, 16, torch.float32)
        zeros = torch.zeros(len(case.q), 16)
        heads = QKVLayout(num_heads=1, num_kv_heads=1, head_dim=16)
        params = IndexParams(heads=heads, top_k=3)
        rows = zeros, zeros, torch.ones(len(case.q), 1)
        assert ops.choose_keys(*rows, kv, case.meta, params).tolist() == [[0, 1, 2]] * 4


def drawn(case: Step, top_k: int) -> Tensor:
    """Random keys of those that each token sees."""
    found = torch.full((len(case.q), top_k), -1, dtype=torch.int32)
    for t in torch.arange(len(case.q))[case.owned].tolist():
        own = torch.randperm(int(case.meta.positions[t]) + 1)[:top_k].sort().values
        found[t, : len(own)] = own.int()
    return found


@settings(max_examples=60)
@given(
    data=st.data(),
    rank=st.sampled_from([8, 24, 40, 72]),
    heads=st.sampled_from([1, 3, 16, 19]),
    top_k=st.sampled_from([1, 5, 70]),
    dtype=st.sampled_from(DTYPES),
)
def test_a_token_attends_to_the_chosen_keys_alone(data, rank, heads, top_k, dtype):
    """Sizes that fill no vector, and those that do."""
    rotary = data.draw(st.sampled_from([8, 16, 24]))
    shape = dataclasses.replace(
        data.draw(edge_shapes(max_sequences=4)),
        num_heads=heads,
        num_kv_heads=1,
        head_dim=rotary + rank,
    )
    case, ops = step(shape), OPS[data.draw(st.sampled_from(ISAS))]
    kv, q = latents(case.kv.k.to(dtype), rotary), case.q.to(dtype)
    chosen, values = drawn(case, top_k), torch.randn(heads, rank, 20).to(dtype) / rank**0.5
    params = MLAParams(
        keys=None,
        values=values.float(),
        norm=rms_norm(torch.ones(rank)),
        cos_sin=torch.zeros(4, rotary),
        interleaved=False,
        scale=0.3,
    )
    exact = latents(kv.k.float(), rotary)
    wanted = REFERENCE.mla_sparse_attention(q.float(), chosen, exact, case.meta, params)
    packed = dataclasses.replace(params, values=ops.pack_heads(values))
    got = ops.mla_sparse_attention(q, chosen, kv, case.meta, packed)
    assert_near(got[case.owned], wanted[case.owned], dtype)
    if len(case.q) <= 12:  # the interpreter is slow
        half = torch.float16 if dtype == torch.bfloat16 else dtype
        small = latents(kv.k.to(half), rotary)
        seen = TRITON.sparse_attention(q.to(half), chosen, small, case.meta, 0.3)
        theirs = REFERENCE.sparse_attention(q.float(), chosen, exact, case.meta, 0.3)
        assert_near(seen[case.owned], theirs[case.owned], dtype)
