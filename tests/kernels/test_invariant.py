"""`deterministic` on a GPU, in Triton's interpreter: a row's bits whatever stands beside it, and whoever computes a part of
it. At real sizes and on the chip's own tensor cores: tests/gpu."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slipstream.kernels.cache.tensors import by_dim
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.triton.attention import invariant
from tests.kernels import cases

LENGTH = 45


def queries(meta: AttentionMetadata, *ranges: range) -> AttentionMetadata:
    """The step that computes tokens `ranges` of sequences that all have `meta`'s first sequence's blocks."""
    lens = [len(r) for r in ranges]
    return dataclasses.replace(
        meta,
        query_start_loc=torch.tensor([0, *lens]).cumsum(0).int(),
        seq_lens=torch.tensor([r.stop for r in ranges], dtype=torch.int32),
        block_table=meta.block_table[:1].expand(len(ranges), -1).contiguous(),
        positions=torch.tensor([i for r in ranges for i in r]),
        num_decodes=next((i for i, n in enumerate(lens) if n > 1), len(lens)),
        max_query_len=max(lens),
        max_seq_len=max(r.stop for r in ranges),
    )


@pytest.mark.parametrize(
    "options", [{}, {"window": 21}, {"sinks": torch.randn(4)}, {"softcap": 5.0}], ids=str
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_tokens_attention_is_the_same_in_prompts_chunks_and_decodes_split_or_not(
    monkeypatch, options, turned
):
    # A BLAS may add a row of a tile in another order than the next row; a tensor core does not.
    monkeypatch.setattr(
        "numpy.matmul", lambda a, b, dtype=None: (a[:, :, None] * b[None]).sum(1, dtype=dtype)
    )
    monkeypatch.setattr(invariant, "PART", 16)
    monkeypatch.setattr(invariant, "BLOCK_N", 8)
    made = cases.step(cases.Shape(sequences=((LENGTH, 0),), block_size=8))
    kv = dataclasses.replace(made.kv, v=by_dim(made.kv.v)) if turned else made.kv
    params = AttentionParams(scale=0.3, **options)

    def run(few: int, *ranges: range):
        monkeypatch.setattr(invariant, "FEW_PROGRAMS", few)
        meta = queries(made.meta, *ranges)
        return invariant.attention(made.q[meta.positions].contiguous(), kv, meta, params)

    whole = run(0, range(LENGTH))
    for few in (0, 1000):
        for cut in (1, 7, 16, 31):
            assert torch.equal(run(few, range(cut, LENGTH)), whole[cut:])
        decodes = [range(i, i + 1) for i in (44, 0, 15, 16, 33)]
        places = [i for r in decodes for i in r]
        assert torch.equal(run(few, *decodes), whole[places])
        assert torch.equal(run(few, *decodes, range(3, 20))[len(decodes) :], whole[3:20])
        assert torch.equal(run(few, decodes[0])[0], whole[44])
