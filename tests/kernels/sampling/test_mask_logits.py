"""`mask_logits` of every op set against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.cpu.torch_ops import CpuOps
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps

OPS = [ReferenceOps(), CpuOps(), TritonOps()]


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)
@given(st.data())
@settings(max_examples=25)
def test_what_is_not_allowed_is_minus_infinity(ops, data):
    num_rows = data.draw(st.integers(1, 4))
    vocab = data.draw(st.sampled_from([1, 31, 32, 33, 97, 5000]))
    words = data.draw(st.sampled_from([-(-vocab // 32), max(1, vocab // 32), -(-vocab // 32) + 1]))
    rows = data.draw(st.permutations(range(num_rows)))[: data.draw(st.integers(0, num_rows))]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    num_masks = data.draw(st.integers(1, 4))
    bits = rng.integers(-(2**31), 2**31, (num_masks, words), dtype=np.int32)
    which = [data.draw(st.integers(-1, num_masks - 1)) for _ in rows]  # -1: all are allowed
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    logits = torch.from_numpy(rng.normal(size=(num_rows, vocab + 3))).to(dtype)[
        :, :vocab
    ]  # rows are not contiguous
    expected = logits.clone()
    for row, place in zip(rows, which, strict=True):
        for token in range(vocab) if place >= 0 else ():
            if token // 32 >= words or not int(bits[place][token // 32]) >> token % 32 & 1:
                expected[row, token] = -torch.inf
    given = [torch.tensor(x, dtype=torch.int64) for x in (rows, which)]
    again = logits.clone()
    ops.mask_logits(logits, given[0], torch.from_numpy(bits), given[1])
    assert torch.equal(logits, expected)
    if -1 not in which:
        ops.mask_logits(again, given[0], torch.from_numpy(bits[which]))  # each row has its own
        assert torch.equal(again, expected)
