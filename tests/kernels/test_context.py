"""Attention over keys that ranks share out by tokens, and the merge of its parts, against attention over all keys."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.kernels.context_ops import packed, unpacked
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from tests.kernels import cases

OURS, REFERENCE = TritonOps(), ReferenceOps()
QUICK = settings(max_examples=6, suppress_health_check=list(HealthCheck))


def part(kv, rank, size):
    """A rank's part of each block."""
    each = kv.block_size // size
    own = slice(rank * each, (rank + 1) * each)
    return LayerKV(kv.k[:, :, own].contiguous(), kv.v[:, :, own].contiguous())


def parts(ops, step, kv, size, params):
    found = []
    for rank in range(size):
        own = part(kv, rank, size)
        meta = ops.own_keys(step.meta, own.block_size, types.SimpleNamespace(rank=rank, size=size))
        found.append((ops.attention_part(step.q, own, meta, params), meta))
    return found


@pytest.mark.parametrize("size", [2, 3])
@QUICK
@given(data=st.data())
def test_merged_parts_are_attention_over_all_keys(size, data):
    shape = data.draw(cases.edge_shapes(max_sequences=3, block_sizes=(4 * size, 16 * size)))
    step = cases.step(shape)
    params = AttentionParams(scale=0.3, softcap=data.draw(st.sampled_from([None, 2.0])))
    wanted = REFERENCE.attention(step.q, step.kv, step.meta, params)[step.owned]
    plain = parts(REFERENCE, step, step.kv, size, params)
    with pytest.MonkeyPatch.context() as patch:
        few = data.draw(st.sampled_from([0, 4]))  # parts of equal numbers, or of equal lengths
        patch.setattr("slipstream.kernels.triton.attention.split_keys.FEW_SEQUENCES", few)
        patch.setattr("slipstream.kernels.triton.attention.split_keys.MIN_KEYS", 16)
        triton = parts(OURS, step, step.kv, size, params)
    for (own, _), (theirs, _) in zip(triton, plain, strict=True):
        for mine, other in zip(unpacked(own), unpacked(theirs), strict=True):
            has_keys = unpacked(theirs)[1][step.owned].isfinite()
            assert torch.equal(unpacked(own)[1][step.owned].isfinite(), has_keys)
            torch.testing.assert_close(
                mine[step.owned][has_keys], other[step.owned][has_keys], rtol=1e-4, atol=1e-4
            )
    for ops, found in ((REFERENCE, plain), (OURS, triton)):
        merged = ops.merge_parts(torch.stack([x for x, _ in found]))
        assert merged.isfinite().all()
        torch.testing.assert_close(merged[step.owned], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [2, 3])
@QUICK
@given(data=st.data())
def test_a_token_sees_its_window_and_the_sinks_once(size, data):
    """A window of fewer tokens than a rank's part of a block has, and larger ones."""
    shape = data.draw(cases.edge_shapes(max_sequences=3, block_sizes=(4 * size, 16 * size)))
    step, window = cases.step(shape), data.draw(st.sampled_from([1, 3, 9, 50]))
    sinks = torch.randn(step.q.shape[1])
    params = AttentionParams(scale=0.3, window=window, sinks=sinks)
    wanted = REFERENCE.attention(step.q, step.kv, step.meta, params)[step.owned]
    found = []
    for rank in range(size):
        own, group = part(step.kv, rank, size), types.SimpleNamespace(rank=rank, size=size)
        meta = REFERENCE.own_keys(step.meta, own.block_size, group, window)
        found.append(REFERENCE.attention_part(step.q, own, meta, AttentionParams(scale=0.3)))
    for ops in (REFERENCE, OURS):
        merged = ops._merged(torch.stack(found), sinks)
        torch.testing.assert_close(merged[step.owned], wanted, rtol=1e-4, atol=1e-4)


@QUICK
@given(shape=cases.edge_shapes(max_sequences=3, block_sizes=(8, 16)), size=st.sampled_from([2, 4]))
def test_each_token_is_written_by_the_rank_that_reads_it(shape, size):
    step, written = cases.step(shape), 0
    for rank in range(size):
        own = part(step.kv, rank, size)
        meta = REFERENCE.own_keys(
            step.meta, own.block_size, types.SimpleNamespace(rank=rank, size=size)
        )
        mine = (meta.slot_mapping >= own.block_size) & step.owned
        written += mine.int()
        flat, whole = (kv.k.transpose(1, 2).flatten(0, 1) for kv in (own, step.kv))
        assert torch.equal(flat[meta.slot_mapping[mine]], whole[step.meta.slot_mapping[mine]])
    assert torch.equal(written, step.owned.int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_sums_weigh_by_their_logarithms(dtype):
    out, sums = torch.randn(3, 5, 4, 16).to(dtype), 3 * torch.randn(3, 5, 4)
    sums[1, 2], sums[:, 4, 3] = -torch.inf, -torch.inf  # one rank without keys; none with keys
    wanted = (out.float() * sums.softmax(0).nan_to_num(0.0)[..., None]).sum(0).to(dtype)
    given_parts = torch.stack([packed(x, s) for x, s in zip(out, sums, strict=True)])
    for ops in (OURS, REFERENCE):
        torch.testing.assert_close(ops.merge_parts(given_parts), wanted)


@pytest.mark.parametrize("size", [2, 3])
def test_merged_parts_of_latents_are_attention_over_all_keys(size):
    """Parts of decodes, padding and chunks, in 16-bit rows and in float32."""
    shape = cases.Shape(
        sequences=((1, 70), (1, 3), (37, 0), (5, 50)),
        **dict(num_heads=3, num_kv_heads=1, head_dim=56, block_size=16 * size, padded=1),
    )
    step = cases.step(shape)
    kv = LayerKV(step.kv.k, step.kv.k[..., 16:])
    params, found = AttentionParams(scale=0.2), []
    for rank in range(size):
        keys = part(kv, rank, size).k
        own = LayerKV(keys, keys[..., 16:])
        meta = OURS.own_keys(step.meta, 16, types.SimpleNamespace(rank=rank, size=size))
        found.append(OURS.attention_part(step.q, own, meta, params))
    wanted = REFERENCE.attention(step.q, kv, dataclasses.replace(step.meta), params)
    merged = OURS.merge_parts(torch.stack(found))
    torch.testing.assert_close(merged[step.owned], wanted[step.owned], rtol=1e-4, atol=1e-4)
