"""The C++ draws beside sorting in float64, for each instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.program.programs import Beyond, LinearProgram, RowDraws
from slipstream.kernels.cpu.sampling.row_sampler import RowSampler
from slipstream.kernels.cpu.sampling.sampling import uniform
from slipstream.kernels.cpu.thread_pool import ThreadPool
from slipstream.kernels.plain.reference import ReferenceOps
from tests.kernels.sampling.draws import (
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
    found = RowDraws(POOLS[isa], vocab)(logits, params)[0]
    for x, (_, want), number, token in zip(logits, cases, u.tolist(), found.tolist(), strict=True):
        assert may_draw(x, want, number, token), (want, number, token)
    alone = RowDraws(POOLS[isa], vocab)
    for i in range(0, num_rows, 37):  # the same alone
        one = tensors([cases[i][1]], params.seeds[i : i + 1])
        one.history_lens[0] = params.history_lens[i]
        assert alone(logits[i : i + 1], one)[0][0] == found[i]


@pytest.mark.parametrize("isa", POOLS)
def test_draws_of_ten_thousand_rows_are_those_of_sorting(isa):
    rng = np.random.default_rng(7)
    cases = [random_case(rng, 300) for _ in range(10_000)]
    params = tensors([w for _, w in cases])
    u = uniform(params.seeds.numpy(), params.history_lens.numpy())
    logits = np.stack([x for x, _ in cases])
    found = RowDraws(POOLS[isa], 300)(logits, params)[0]
    wrong = [
        (want, token)
        for x, (_, want), number, token in zip(
            logits, cases, u.tolist(), found.tolist(), strict=True
        )
        if not may_draw(x, want, number, token)
    ]
    assert not wrong


@pytest.mark.parametrize("isa", POOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 33, 127, 513, 1000, 5003])
def test_draws_within_a_product_are_those_after_it(isa, dtype, vocab):
    rng, pool, count = np.random.default_rng(vocab), POOLS[isa], 67
    made = torch.from_numpy(rng.standard_normal((vocab, 64)).astype(np.float32)).to(dtype)
    weight = NativeOps(2, isa).quantize_weight(made, None)
    x = rng.standard_normal((count, 64)).astype(np.float32)
    x[1] = np.nan
    x[2, 5] = np.inf
    params = tensors([random_case(rng, vocab)[1] for _ in range(count)])
    allowed = rng.random((2, 32 * -(-vocab // 32))) < 0.02
    allowed[:, 0] = True
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    rows = np.arange(0, count, 2)
    for masks in (None, (np.array([rows, rows % 2]), bits)):
        beyond = Beyond(masks, range(3, count), min(3, vocab))
        together, packed = RowDraws(pool, vocab, weight)(x, params, beyond)
        logits = LinearProgram(pool, weight)(x)
        after, expected = RowDraws(pool, vocab)(logits, params, beyond)
        assert (together == after).all()
        assert (packed[3:] == expected[3:]).all()  # the first three want none
        assert ((together >= 0) & (together < vocab)).all()


@pytest.mark.parametrize(
    "wants", [Wants(0.8), Wants(1.0, 0, 0.7), Wants(1.5, 6), Wants(1.0, 9, 0.8, 0.05)]
)
def test_draws_are_distributed_as_the_kept_probabilities(wants):
    count, pool = 50_000, next(iter(POOLS.values()))
    x = np.random.default_rng(3).standard_normal(24).astype(np.float32)
    found = RowDraws(pool, 24)(np.broadcast_to(x, (count, 24)), tensors([wants] * count))[0]
    assert are_draws_of(kept_weights(x, wants, float(np.float32(wants.top_p))), found)


def test_nan_and_infinite_logits_draw_a_token():
    x = np.zeros((5, 50), np.float32)
    x[0], x[1, 7], x[2], x[3, 9], x[4, :40] = np.nan, np.nan, -np.inf, np.inf, -np.inf
    found = RowDraws(next(iter(POOLS.values())), 50)(x, tensors([Wants(1.0, 3, 0.9)] * 5))[0]
    assert ((found >= 0) & (found < 50)).all()
    assert (found[3], found[1] != 7, found[4] >= 40) == (9, True, True)


@pytest.mark.parametrize("isa", POOLS)
@pytest.mark.parametrize("num_top", [0, 1, 5, 97])
def test_log_probabilities_are_the_reference_s(isa, num_top):
    torch.manual_seed(num_top)
    logits, tokens = 4 * torch.randn(7, 97), torch.randint(97, (7,))
    found = RowSampler(POOLS[isa]).best_logprobs(logits.numpy(), tokens.numpy(), num_top)
    for ours, theirs in zip(
        found, ReferenceOps().best_logprobs(logits, tokens, num_top), strict=True
    ):
        torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("isa", POOLS)
@pytest.mark.parametrize("vocab", [5, 640, 1000])
def test_log_probabilities_of_rows_with_ties_are_in_the_order_of_ids(isa, vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-3, 4, (20, vocab)).astype(np.float32)
    logits[3, : vocab // 2] = -np.inf
    tokens = rng.integers(0, vocab, 20)
    _, rank, ids, values = RowSampler(POOLS[isa]).best_logprobs(logits, tokens, 5)
    assert ids.tolist() == np.argsort(-logits, axis=1, kind="stable")[:, :5].tolist()
    assert (values[:, :-1] >= values[:, 1:]).all()
    own = logits[np.arange(20), tokens]
    assert rank.tolist() == ((logits > own[:, None]).sum(1) + 1).tolist()


@pytest.mark.parametrize("isa", POOLS)
@pytest.mark.parametrize(("vocab", "num_rows"), [(5, 400), (300, 10_000), (2085, 300)])
def test_masked_draws_are_those_of_logits_without_what_is_banned(isa, vocab, num_rows):
    rng = np.random.default_rng(vocab)
    cases = [random_case(rng, vocab) for _ in range(num_rows)]
    params = tensors([w for _, w in cases])
    logits = np.stack([x for x, _ in cases])
    num_masks, words = num_rows // 4, -(-vocab // 32) - (vocab > 2000)  # one may end early
    allowed = rng.random((num_masks, 32 * words)) < rng.choice([0.02, 0.5, 0.98], (num_masks, 1))
    allowed[:, rng.integers(min(vocab, 32 * words))] = True
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    rows = rng.permutation(num_rows)[: num_rows // 2]
    which = rng.integers(num_masks, size=len(rows))
    # what stays must have some weight, as a model's logits do
    logits[rows] = np.where(np.isfinite(logits[rows]), logits[rows], np.float32(-3.0))
    beyond = Beyond((np.array([rows, which]), bits), range(num_rows), 3)
    found, packed = RowDraws(POOLS[isa], vocab)(logits, params, beyond)
    plain = RowSampler(POOLS[isa]).packed_logprobs(logits, found, 3)
    assert (packed == plain).all()  # of the model's own logits
    banned = logits.copy()
    kept = np.zeros((len(rows), vocab), bool)
    kept[:, : 32 * words] = allowed[which][:, :vocab]
    banned[rows] = np.where(kept, logits[rows], -np.inf)
    u = uniform(params.seeds.numpy(), params.history_lens.numpy())
    slow = RowDraws(POOLS[isa], vocab)(banned, params)[0]
    for i in np.flatnonzero(found != slow).tolist():  # sums over few tokens may round otherwise
        assert may_draw(banned[i], cases[i][1], u[i], int(found[i])), (cases[i][1], u[i], found[i])
    assert (found != slow).mean() < 1e-3
