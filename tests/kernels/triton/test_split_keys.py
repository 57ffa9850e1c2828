"""How the keys of decodes are split into parts and the parts merged; and that these kernels compile for a GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.kernels.metadata import JoinedSteps
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.attention import split_keys as module
from slipstream.kernels.triton.attention.split_keys import (
    MAX_PARTS,
    DecodeParts,
    combine,
    num_splits,
)
from slipstream.kernels.uniform_steps import uniform
from slipstream.platform import platform_of
from tests.kernels import cases
from tests.kernels.triton.for_hopper import run_for_hopper

PROGRAM = """
from slipstream.kernels.cache.tensors import by_dim
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.uniform_steps import uniform
from slipstream.platform import platform_of
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.triton.attention import paged as attention
from slipstream.kernels.triton.attention import split_keys

kernels = [(attention, "_decode_kernel"), (split_keys, "_find_parts_kernel"), (split_keys, "_combine_kernel")]
for module, name in kernels:
    setattr(module, name, Compiled(getattr(module, name)))
attention.platform_of = lambda _: types.SimpleNamespace(multiprocessors=132)
kind, num_seqs, group = getattr(torch, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
meta = uniform(num_seqs, 1, 400, block_size=16, platform=platform_of(torch.device("cpu")))
k, v = (torch.zeros(51, 4, 16, 128, dtype=kind) for _ in range(2))
kv = LayerKV(k, v) if kind.itemsize == 2 else LayerKV(k, by_dim(v), torch.ones(4), torch.ones(4))
q = torch.zeros(num_seqs, 4 * group, 128, dtype=torch.bfloat16)
attention.paged_attention(q, kv, meta, AttentionParams(scale=0.1, window=100 if group == 7 else None))
print(json.dumps({name: [x.asm["ptx"] for x in getattr(module, name).binaries] for module, name in kernels}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_seqs", "group"),
    [("bfloat16", 64, 7), ("float8_e4m3fn", 300, 4), ("bfloat16", 2, 4)],
)
def test_kernels_of_decodes_compile(kind, num_seqs, group):
    """The interpreter is more lenient than the compiler. Of many decodes the last thread block of a sequence counts the others
    and merges; of few a kernel does."""
    found = run_for_hopper(PROGRAM, kind, str(num_seqs), str(group))
    (decode,), (_,), merging = found.values()
    lines = decode.splitlines()
    atomic = [i for i, line in enumerate(lines) if "atom." in line]
    if num_seqs == 2:
        assert (len(atomic), len(merging)) == (0, 1)
        return
    (at,), before, behind = atomic, "\n".join(lines[: atomic[0]]), "\n".join(lines[atomic[0] :])
    assert ".gpu.acq_rel" in lines[at]
    assert "bar.sync" in before[before.rindex("st.global") :]  # all have written their part
    assert "ld.global.cg" in behind
    assert not merging


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    lens=st.lists(st.integers(0, 300) | st.integers(0, 40_000), min_size=1, max_size=12),
    extra=st.integers(1, 70),
    splits=st.sampled_from([0, 0, 1, 4]),
    window=st.none() | st.integers(1, 3000),
)
def test_parts_of_decodes(lens, extra, splits, window):
    """Parts cover each key of a decode once. With several sequences none is much longer than a
    fair share."""
    step = uniform(len(lens), 1, 1, block_size=16, platform=platform_of(torch.device("cpu")))
    meta = dataclasses.replace(step, seq_lens=torch.tensor(lens, dtype=torch.int32))
    (found,) = DecodeParts.find(
        meta.seq_lens,
        num_seqs=len(lens),
        window=window,
        programs_each=3,
        block_n=16,
        num_extra=extra,
        splits=splits,
    )
    records = found.parts.tolist()
    parts = [x for x in records if x[0] >= 0]
    assert records[: len(parts)] == parts
    assert [x[0] for x in parts[: len(lens)]] == list(range(len(lens)))
    low = [max(0, n - window) // 16 * 16 if window else 0 for n in lens]
    extra = min(extra, len(lens) * (MAX_PARTS - 1))
    fair = max(128, -(-sum(n - x for n, x in zip(lens, low, strict=True)) // extra))
    num_slots = 0
    for seq, length in enumerate(lens):
        own = [x for x in parts if x[0] == seq]
        assert [x[1] for x in own] == [low[seq], *[x[2] for x in own[:-1]]]
        assert own[-1][2] == length
        assert all(begin % 16 == 0 or begin == length for _, begin, *_ in own)
        assert [x[5] for x in own] == [len(own)] * len(own)
        if splits:
            assert [x[3] for x in own] == (list(range(splits)) if splits > 1 else [-1])
            continue
        assert length == 0 or all(begin < end for _, begin, end, *_ in own)
        assert len(own) == MAX_PARTS or all(
            end - begin < 2 * fair + 16 for _, begin, end, *_ in own
        )
        if len(own) == 1:
            assert own[0][3] == -1
            continue
        assert [x[3:5] for x in own] == [[num_slots + i, num_slots] for i in range(len(own))]
        num_slots += len(own)
    assert num_slots <= len(found.arrived)
    assert found.arrived.shape[1] == 3
    assert not found.arrived.any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [
        (4, 2, {}),
        (9, 3, {"window": 70}),
        (4, 1, {"sinks": True}),
        (7, 1, {"softcap": 20.0}),
        (1, 1, {}),
    ],
    ids=["plain", "window", "sinks", "softcap", "one head"],
)
def test_the_last_thread_block_merges(monkeypatch, heads, kv_heads, options):
    """The counter is 0 again after the merge of each layer."""
    monkeypatch.setattr(module, "PARTS_PER_SM", 200)
    monkeypatch.setattr(module, "MIN_KEYS", 16)
    sequences = tuple((1, n - 1) for n in (500, 17, 300, 1, 64, 49))
    shape = cases.Shape(
        sequences=sequences,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=32,
        block_size=16,
        padded=2,
    )
    step = cases.step(shape)
    if "sinks" in options:
        options = {"sinks": torch.randn(heads) * 3}
    params = AttentionParams(scale=0.2, **options)
    theirs = ReferenceOps().attention(step.q, step.kv, step.meta, params)
    first, second = (TritonOps().attention(step.q, step.kv, step.meta, params) for _ in range(2))
    ((found,),) = step.meta.derived.values()
    assert found.parts[found.parts[:, 0] >= 0, 5].max() == (4 if "window" in options else 16)
    torch.testing.assert_close(first[step.owned], theirs[step.owned], rtol=1e-5, atol=1e-5)
    assert torch.equal(first, second)
    assert not first[~step.owned].any()


@pytest.mark.parametrize("num_seqs", [129, 1100])
def test_parts_of_many_decodes(num_seqs):
    lens = torch.arange(num_seqs, dtype=torch.int32) * 5
    lens[7] = 200_000
    sizes = dict(programs_each=3, block_n=16, num_extra=264, splits=0)
    parts = DecodeParts.find(lens, num_seqs=num_seqs, window=None, **sizes)[0].parts
    parts = parts[parts[:, 0] >= 0].long()
    keys = torch.zeros(num_seqs, dtype=torch.int64).index_add_(
        0, parts[:, 0], parts[:, 2] - parts[:, 1]
    )
    assert torch.equal(keys, lens.long())
    assert len(parts) > num_seqs


@pytest.mark.parametrize(
    ("num_tokens", "shape"),
    [(5, (4, 7, 64, 16)), (3, (1, 71, 32, 5)), (4, (8, 4, 128, 2)), (3, (2, 1, 16, 16))],
)
def test_merging_counted_parts(num_tokens, shape):
    """Heads of a token have a number of parts; none: what is there stays. Nothing beyond a number is read."""
    num_kv_heads, group, dim, splits = shape
    torch.manual_seed(0)
    partial = torch.randn(num_tokens, num_kv_heads * group, splits, dim)
    lse = torch.randn(num_tokens, num_kv_heads * group, splits) * 3
    counts = torch.randint(0, splits + 1, (num_tokens, num_kv_heads), dtype=torch.int32)
    counts[0], counts[1, 0] = 0, splits
    unread = torch.arange(splits) >= counts.repeat_interleave(group, dim=1)[:, :, None]
    weights = torch.softmax(lse.masked_fill(unread, -1e30) * math.log(2), dim=2)
    expected = (weights[..., None] * partial).sum(2)
    expected[counts.repeat_interleave(group, dim=1) == 0] = 7.0
    partial[unread], lse[unread] = math.nan, math.nan
    lse[1, 0, 1], partial[1, 0, 1] = -math.inf, math.nan  # a part without keys
    weights = torch.softmax(lse[1, 0, :splits] * math.log(2), dim=0)
    expected[1, 0] = (weights[:, None] * partial[1, 0]).nan_to_num().sum(0)
    out = torch.full((num_tokens, num_kv_heads * group, dim), 7.0)
    combine(partial, lse, out, splits, counts)
    torch.testing.assert_close(out, expected)


def test_parts_are_found_once_a_step():
    meta = uniform(9, 1, 300, block_size=16, platform=platform_of(torch.device("cpu")))
    find = functools.partial(
        DecodeParts.of, window=None, programs_each=2, block_n=16, num_processors=8
    )
    assert find(meta) is find(meta)
    assert find(meta) is not find(dataclasses.replace(meta))
    assert len(find(meta).parts) == 9 + 64
    assert (
        find(uniform(2, 1, 300, block_size=16, platform=platform_of(torch.device("cpu")))).splits
        == 8
    )


@pytest.mark.parametrize(("size", "room"), [(2, 4), (7, 8)])
def test_parts_of_several_steps_are_found_at_once(size, room):
    """Parts equal those that each step would find, and each step counts its own. Few sequences
    have equal numbers of parts."""
    lens = torch.randint(
        1, 3000, (3 * room,), dtype=torch.int32
    )  # of each step `size` sequences, then padding
    every = dataclasses.replace(
        uniform(3 * room, 1, 3000, block_size=16, platform=platform_of(torch.device("cpu"))),
        seq_lens=lens,
    )
    find = functools.partial(
        DecodeParts.of, window=None, programs_each=3, block_n=16, num_processors=8
    )
    for i in range(3):
        own = dataclasses.replace(
            every, seq_lens=lens[room * i : room * i + size], num_decodes=size
        )
        ours, theirs = find(dataclasses.replace(own, of_steps=JoinedSteps(every, i, 3))), find(own)
        exist = theirs.parts[:, 0] >= 0
        assert torch.equal(ours.parts[:, 0] >= 0, exist)
        assert torch.equal(ours.parts[exist, :6], theirs.parts[exist, :6])
        assert ours.splits == theirs.splits == (4 if size == 2 else 0)
        assert ours.arrived.shape == theirs.arrived.shape
        assert not ours.arrived.any()
    (found,) = every.derived.values()
    begins = [parts.arrived.data_ptr() for parts in found]
    assert all(
        b - a >= found[0].arrived.nbytes and (b - a) % 16 == 0
        for a, b in itertools.pairwise(begins)
    )


def test_splits_fill_the_chip_and_no_more():
    assert num_splits(8, 8192, 64, 132) == 64
    assert num_splits(8, 100, 64, 132) == 1
    assert num_splits(8192, 8192, 64, 132) == 1
