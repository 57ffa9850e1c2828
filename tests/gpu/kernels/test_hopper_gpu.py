"""Hopper's prefill kernel against float32 and against the kernel for every chip. Run: pytest -m gpu tests/gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.kernels.cache.tensors import by_dim
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.weights.quantize import DTYPES
from tests.gpu.kernels.test_kernels_gpu import error, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs an NVIDIA GPU (sm_90)",
    ),
]
PLAIN = AttentionParams(scale=128**-0.5)


def paged_attention(*args, **options):
    """Imports the kernel late: tests/kernels imports Triton's kernels for its interpreter."""
    from slipstream.kernels.triton.attention import paged as attention

    return attention.paged_attention(*args, **options)


def covered(q, kv):
    from slipstream.kernels.triton.attention import hopper

    return hopper.covers(q, kv)


def in_8_bits(kv, kind):
    numbers = [t.float() * 30 if kind == "int8" else t for t in (kv.k, kv.v)]
    k, v = (
        t.round().clamp(-127, 127).to(DTYPES[kind]) if kind == "int8" else t.to(DTYPES[kind])
        for t in numbers
    )
    return LayerKV(
        k, by_dim(v), *(torch.rand(k.shape[1], device="cuda") / 32 + 1 / 32 for _ in range(2))
    )


@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "int8"])
@pytest.mark.parametrize(
    ("query_lens", "contexts", "shape"),
    [
        ([128] * 60, [0] * 60, {}),
        ([33] * 9, list(range(0, 270, 30)), {}),
        ([1, 1, 500, 2047, 17], [10, 900, 0, 1000, 4000], {}),
        ([700, 65], [5, 4000], {"heads": 8, "kv_heads": 1, "size": 32}),
        ([700, 65], [5, 4000], {"heads": 28, "kv_heads": 4, "size": 64}),
        ([700, 130], [5, 400], {"heads": 9, "kv_heads": 3, "dim": 64}),
        ([700, 130], [5, 400], {"heads": 4, "kv_heads": 4, "dim": 256}),
    ],
    ids=["short", "ends", "mixed", "mqa", "groups of 7", "smollm2", "256"],
)
def test_against_the_reference(query_lens, contexts, shape, kind):
    q, kv, meta = step(query_lens, contexts, **shape)
    if kind != "bfloat16":
        kv = in_8_bits(kv, kind)
    assert covered(q, kv)
    for options in ({}, {"window": 200, "softcap": 20.0})[: 2 if len(meta.seq_lens) == 5 else 1]:
        params = AttentionParams(scale=q.shape[2] ** -0.5, **options)
        ours = paged_attention(q, kv, meta, params)
        theirs = ReferenceOps().attention(q, kv, meta, params)
        assert error(ours, theirs) < 5e-3


SPLIT = [
    ([33], [8000], {}),
    ([1, 1, 100, 7, 1], [300, 20, 5000, 0, 3000], {}),  # the last has a tile of its own
    ([17] * 3, [100, 900, 2500], {"heads": 28, "kv_heads": 4, "size": 64}),
    ([64], [6000], {"heads": 9, "kv_heads": 3, "dim": 64}),
    ([40, 3], [3000, 700], {"heads": 8, "kv_heads": 4, "dim": 256}),
    ([70], [40000], {"heads": 4, "kv_heads": 1}),
]


@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "int8"])
@pytest.mark.parametrize(
    ("query_lens", "contexts", "shape"), SPLIT, ids=["8k", "mixed", "7", "smollm2", "256", "40k"]
)
@pytest.mark.parametrize("option", ["plain", "window", "softcap", "sinks"])
def test_split_keys_against_the_reference(monkeypatch, query_lens, contexts, shape, kind, option):
    """Chunks too short to fill the chip. Their keys are split, and short ones of the same step stay whole."""
    from slipstream.kernels.triton.attention import hopper, paged

    monkeypatch.setattr(paged, "HOPPER_FP8_KEYS", 2**31)  # 8-bit products have a test of their own
    combined = []
    combine = hopper.combine
    monkeypatch.setattr(
        hopper, "combine", lambda *a, **options: combined.append(a[4]) or combine(*a, **options)
    )
    q, kv, meta = step(query_lens, contexts, **shape)
    if query_lens[-1] == 1:
        meta = replace(meta, num_decodes=2)
    if kind != "bfloat16":
        kv = in_8_bits(kv, kind)
    given = (
        {"window": 1500} if option == "window" else {"softcap": 20.0} if option == "softcap" else {}
    )
    if option == "sinks":
        given = {"sinks": torch.randn(q.shape[1], device="cuda", dtype=q.dtype) * 3}
    params = AttentionParams(scale=q.shape[2] ** -0.5, **given)
    ours = paged_attention(q, kv, meta, params)
    assert combined[0].max() > 1
    if len(query_lens) == 5:
        assert not combined[0][100:107].any()
    theirs = ReferenceOps().attention(q, kv, meta, params)
    assert error(ours, theirs) < 5e-3
    for begin, num in zip(meta.query_start_loc.tolist(), query_lens, strict=False):
        assert error(ours[begin : begin + num], theirs[begin : begin + num]) < 1e-2
    assert torch.equal(paged_attention(q, kv, meta, params), ours)


@pytest.mark.parametrize(
    ("query_lens", "contexts", "shape"),
    [
        ([128] * 20, [0] * 20, {}),
        ([1, 1, 500, 2047, 17], [10, 900, 0, 1000, 4000], {}),
        ([700, 65], [5, 4000], {"heads": 28, "kv_heads": 4, "size": 32}),
        ([700, 130], [5, 400], {"heads": 9, "kv_heads": 3, "dim": 64, "size": 64}),
        ([33], [8000], {}),
        ([70], [40000], {"heads": 4, "kv_heads": 1}),
    ],
    ids=["short", "mixed", "groups of 7", "smollm2", "split", "40k"],
)
@pytest.mark.parametrize("option", ["plain", "window", "softcap", "sinks"])
def test_8_bit_products(monkeypatch, query_lens, contexts, shape, option):
    """Queries and weights have 3 bits after the point, so outputs differ by 2 %, as values of an e4m3 cache do."""
    from slipstream.kernels.triton.attention import paged

    monkeypatch.setattr(paged, "HOPPER_FP8_KEYS", 0)
    q, kv, meta = step(query_lens, contexts, **shape)
    kv = in_8_bits(kv, "fp8")
    given = {"plain": {}, "window": {"window": 200}, "softcap": {"softcap": 20.0}}.get(option)
    if given is None:
        given = {"sinks": torch.randn(q.shape[1], device="cuda", dtype=q.dtype) * 3}
    params = AttentionParams(scale=q.shape[2] ** -0.5, **given)
    ours = paged_attention(q, kv, meta, params)
    assert 5e-3 < error(ours, ReferenceOps().attention(q, kv, meta, params)) < 3e-2
    assert all(torch.equal(paged_attention(q, kv, meta, params), ours) for _ in range(5))


def test_a_long_prompt_many_times():
    """16,384 tokens, too many for the reference: against the kernel for every chip. Who computes what changes nothing."""
    q, kv, meta = step([16384, 100], [0, 50])
    ours = [paged_attention(q, kv, meta, PLAIN) for _ in range(20)]
    theirs = paged_attention(q, kv, meta, PLAIN, prefill_tile=(128, 32, 4, 3))
    assert error(ours[0], theirs) < 5e-3
    assert not torch.equal(ours[0], theirs)  # two kernels: sums in another order
    assert all(torch.equal(other, ours[0]) for other in ours)


@pytest.mark.parametrize("lengths", [[300, 20], [50, 20]], ids=["whole", "split"])
def test_in_a_graph(lengths):
    q, kv, meta = step(lengths, [0, 3000])
    expected = paged_attention(q, kv, meta, PLAIN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(q, kv, meta, PLAIN)
    out.zero_()
    graph.replay()
    graph.replay()
    assert torch.equal(out, expected)
