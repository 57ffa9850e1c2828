"""How the keys of decodes are split into parts; and that the kernels that take the parts compile for a GPU."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.triton.split_keys import MAX_PARTS, DecodeParts, num_splits
from tests.kernels.for_hopper import run_for_hopper

PROGRAM = """
from slipstream.kernels.metadata import AttentionMetadata, LayerKV, by_dim
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.triton import attention, split_keys

kernels = [(attention, "_decode_kernel"), (split_keys, "_find_parts_kernel"), (split_keys, "_combine_kernel")]
for module, name in kernels:
    setattr(module, name, Compiled(getattr(module, name)))
attention.platform_of = lambda _: types.SimpleNamespace(multiprocessors=132)
kind, num_seqs, group = getattr(torch, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
meta = AttentionMetadata.uniform(num_seqs, 1, 400, block_size=16)
k, v = (torch.zeros(51, 4, 16, 128, dtype=kind) for _ in range(2))
kv = LayerKV(k, v) if kind.itemsize == 2 else LayerKV(k, by_dim(v), torch.ones(4), torch.ones(4))
q = torch.zeros(num_seqs, 4 * group, 128, dtype=torch.bfloat16)
attention.paged_attention(q, kv, meta, AttentionParams(scale=0.1, window=100 if group == 7 else None))
print(json.dumps({name: [x.asm["ptx"].count("atom.") for x in getattr(module, name).binaries] for module, name in kernels}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_seqs", "group"), [("bfloat16", 64, 7), ("float8_e4m3fn", 300, 4), ("bfloat16", 2, 4)])
def test_kernels_of_decodes_compile(kind, num_seqs, group):
    """The interpreter is more lenient than the compiler. Of many decodes the last thread block of a sequence counts the others
    and merges; of few a kernel does."""
    found = run_for_hopper(PROGRAM, kind, str(num_seqs), str(group))
    (decode,), (find,), combine = found.values()
    assert (decode, find, combine) == ((0, 0, [0]) if num_seqs == 2 else (1, 0, []))


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    lens=st.lists(st.integers(0, 300) | st.integers(0, 40_000), min_size=1, max_size=12),
    extra=st.integers(1, 70),
    splits=st.sampled_from([0, 0, 1, 4]),
    window=st.none() | st.integers(1, 3000),
)
def test_parts_of_decodes(lens, extra, splits, window):
    """They cover the keys that a decode sees, once; of several sequences none is much longer than a fair share."""
    step = AttentionMetadata.uniform(len(lens), 1, 1, block_size=16)
    meta = dataclasses.replace(step, seq_lens=torch.tensor(lens, dtype=torch.int32))
    found = DecodeParts.find(meta, window, 3, 16, extra, splits)
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
        assert len(own) == MAX_PARTS or all(end - begin < 2 * fair + 16 for _, begin, end, *_ in own)
        if len(own) == 1:
            assert own[0][3] == -1
            continue
        assert [x[3:5] for x in own] == [[num_slots + i, num_slots] for i in range(len(own))]
        num_slots += len(own)
    assert num_slots <= len(found.arrived)
    assert found.arrived.shape[1] == 3
    assert not found.arrived.any()


def test_parts_are_found_once_a_step():
    meta = AttentionMetadata.uniform(9, 1, 300, block_size=16)
    find = functools.partial(DecodeParts.of, window=None, programs_each=2, block_n=16, num_processors=8)
    assert find(meta) is find(meta)
    assert find(meta) is not find(dataclasses.replace(meta))
    assert len(find(meta).parts) == 9 + 64
    assert find(AttentionMetadata.uniform(2, 1, 300, block_size=16)).splits == 8


def test_splits_fill_the_chip_and_no_more():
    assert num_splits(8, 8192, 64, 132) == 64
    assert num_splits(8, 100, 64, 132) == 1
    assert num_splits(8192, 8192, 64, 132) == 1
