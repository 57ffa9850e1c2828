"""The C++ draws beside sorting in float64, for each instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.program.programs import RowDraws
from slipstream.kernels.cpu.sampling.sampling import uniform
from slipstream.kernels.cpu.thread_pool import ThreadPool
from tests.kernels.draws import (
    Wants,
    are_draws_of,
    kept_weights,
    may_draw,
    random_case,
    tensors,
)

POOLS = {isa: ThreadPool(2, isa) for isa in native.instruction_sets(emulated=False)}


@pytest.mark.parametrize("isa", POOLS)
@pytest.mark.parametrize(
    ("vocab", "num_rows"), [(1, 20), (5, 200), (97, 400), (3000, 300), (50_001, 8)]
)
def test_draws_are_those_of_sorting(isa, vocab, num_rows):
    rng = np.random.default_rng(vocab)
    cases = [random_case(rng, vocab) for _ in range(num_rows)]
    params = tensors(
        [w for _, w in cases], torch.from_numpy(rng.integers(-(2**62), 2**62, num_rows))
    )
    u = uniform(params.seeds.numpy(), params.history_lens.numpy())
    logits = np.stack([x for x, _ in cases])
    found = RowDraws(POOLS[isa], vocab)(logits, params)
    for x, (_, want), number, token in zip(logits, cases, u.tolist(), found.tolist(), strict=True):
        assert may_draw(x, want, number, token), (want, number, token)
    alone = RowDraws(POOLS[isa], vocab)
    for i in range(0, num_rows, 37):  # the same alone
        one = tensors([cases[i][1]], params.seeds[i : i + 1])
        one.history_lens[0] = params.history_lens[i]
        assert alone(logits[i : i + 1], one)[0] == found[i]


@pytest.mark.parametrize("isa", POOLS)
def test_draws_of_ten_thousand_rows_are_those_of_sorting(isa):
    rng = np.random.default_rng(7)
    cases = [random_case(rng, 300) for _ in range(10_000)]
    params = tensors([w for _, w in cases])
    u = uniform(params.seeds.numpy(), params.history_lens.numpy())
    logits = np.stack([x for x, _ in cases])
    found = RowDraws(POOLS[isa], 300)(logits, params)
    wrong = [
        (want, token)
        for x, (_, want), number, token in zip(
            logits, cases, u.tolist(), found.tolist(), strict=True
        )
        if not may_draw(x, want, number, token)
    ]
    assert not wrong


@pytest.mark.parametrize(
    "wants", [Wants(0.8), Wants(1.0, 0, 0.7), Wants(1.5, 6), Wants(1.0, 9, 0.8, 0.05)]
)
def test_draws_are_distributed_as_the_kept_probabilities(wants):
    count, pool = 50_000, next(iter(POOLS.values()))
    x = np.random.default_rng(3).standard_normal(24).astype(np.float32)
    found = RowDraws(pool, 24)(np.broadcast_to(x, (count, 24)), tensors([wants] * count))
    assert are_draws_of(kept_weights(x, wants, float(np.float32(wants.top_p))), found)


def test_nan_and_infinite_logits_draw_a_token():
    x = np.zeros((5, 50), np.float32)
    x[0], x[1, 7], x[2], x[3, 9], x[4, :40] = np.nan, np.nan, -np.inf, np.inf, -np.inf
    found = RowDraws(next(iter(POOLS.values())), 50)(x, tensors([Wants(1.0, 3, 0.9)] * 5))
    assert ((found >= 0) & (found < 50)).all()
    assert (found[3], found[1] != 7, found[4] >= 40) == (9, True, True)
