"""Triton's draws beside sorting in float64, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.kernels.cpu.sampling.sampling import uniform
from slipstream.kernels.metadata import SamplingTensors
from slipstream.kernels.plain.reference import apply_bias_and_penalties
from slipstream.kernels.triton import drawing, penalties
from tests.kernels import cases
from tests.kernels.sampling.draws import (
    Wants,
    are_draws_of,
    kept_weights,
    may_draw,
    random_case,
    tensors,
)


def check(rng, num_rows, vocab, block):
    logits, wants = zip(*(random_case(rng, vocab) for _ in range(num_rows)), strict=True)
    seeds = torch.from_numpy(rng.integers(-(2**62), 2**62, num_rows))
    params = tensors(list(wants), seeds)
    u = uniform(seeds.numpy(), params.history_lens.numpy())
    found = drawing.draw(torch.from_numpy(np.stack(logits)), params, block=block)
    for x, want, number, token in zip(logits, wants, u.tolist(), found.tolist(), strict=True):
        assert may_draw(x, want, number, token), (want, number, token)


@pytest.mark.parametrize("listed", [drawing.MAX_LISTED, 16])
@pytest.mark.parametrize(
    ("vocab", "block", "num_rows"), [(5, 4096, 40), (97, 16, 30), (1200, 256, 20), (9000, 1024, 6)]
)
def test_draws_are_those_of_sorting(monkeypatch, listed, vocab, block, num_rows):
    """Rows whose decisive class overflows its list, and which are searched whole, are among them."""
    monkeypatch.setattr(drawing, "MAX_LISTED", listed)
    check(np.random.default_rng(vocab + listed), num_rows, vocab, block)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_draws_of_a_thousand_rows_are_those_of_sorting(part):
    check(np.random.default_rng(part), 1000, 300, 128)


@pytest.mark.parametrize("num_rows", [3, drawing.SPLIT_ROWS + 1])
def test_draws_do_not_depend_on_the_batch(monkeypatch, num_rows):
    """Neither on the other rows nor on how many thread blocks share a row. Parameters may be anywhere in a table."""
    monkeypatch.setattr(drawing, "MAX_PROGRAMS", 2 * num_rows)
    rng = np.random.default_rng(1)
    x, want = torch.from_numpy(rng.standard_normal((1, 500)).astype(np.float32)), Wants(0.9, 0, 0.8)
    others = torch.from_numpy(rng.standard_normal((num_rows, 500)).astype(np.float32))
    own = [Wants(0.0), want, Wants(1.3, 7, 0.5, 0.1)]
    rows = torch.tensor([0, 1, 2] * num_rows, dtype=torch.int32)[:num_rows]
    seeds = torch.tensor([5, 77, 6])
    logits = others.clone()
    logits[1] = x[0]
    many = drawing.draw(logits, tensors(own, seeds, rows), block=64)
    one = tensors([want], seeds[1:2])
    one = SamplingTensors(
        **{
            **{f: getattr(one, f) for f in ("temperature", "top_k", "top_p", "min_p", "seeds")},
            "history_lens": torch.tensor([1], dtype=torch.int32),
        }
    )
    assert many[1] == drawing.draw(x, one, block=256)[0]


KEPT = [Wants(0.8), Wants(1.0, 0, 0.7), Wants(1.5, 6), Wants(1.0, 9, 0.8, 0.05)]


@pytest.mark.parametrize("count", [250, pytest.param(6000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("wants", KEPT)
def test_draws_are_distributed_as_the_kept_probabilities(wants, count):
    """Chi-square of draws of one row of logits."""
    x = np.random.default_rng(3).standard_normal(24).astype(np.float32)
    found = drawing.draw(
        torch.from_numpy(x).expand(count, 24).contiguous(), tensors([wants] * count)
    )
    assert are_draws_of(kept_weights(x, wants, float(np.float32(wants.top_p))), found.numpy())


def test_nan_and_infinite_logits_draw_a_token():
    x = torch.zeros(5, 50)
    x[0] = torch.nan
    x[1, 7] = torch.nan
    x[2] = -torch.inf
    x[3, 9] = torch.inf
    x[4, :40] = -torch.inf
    with np.errstate(invalid="ignore"):
        found = drawing.draw(x, tensors([Wants(1.0, 3, 0.9)] * 5), block=16)
    assert ((found >= 0) & (found < 50)).all()
    assert (found[3], found[1] != 7, found[4] >= 40) == (9, True, True)


@pytest.mark.parametrize("indexed", [False, True])
def test_biases_and_penalties_are_those_of_the_reference(indexed):
    rng = torch.Generator().manual_seed(0)
    rows, vocab = 6, 70
    lens = [1, 40, 7, 33, 64, 5]
    history = [torch.randint(0, 12, (n,), generator=rng).tolist() for n in lens]
    given = dict(
        history=history,
        prompt_lens=[1, 3, 7, 2, 20, 4],
        repetition_penalty=[1.0, 1.3, 0.7, 1.0, 2.0, 1.0],
        presence_penalty=[0.5, 0.0, 0.3, 0.0, -1.0, 0.0],
        frequency_penalty=[0.0, 0.25, 0.1, 0.0, -0.5, 0.0],
        bias=[(0, 3, 5.0), (0, 69, -torch.inf), (4, 3, -2.0), (5, 1, 0.0)],
    )
    params = cases.sampling(rows, **given)
    logits = torch.randn(rows, vocab, generator=rng)
    theirs = apply_bias_and_penalties(logits.clone(), params)
    if indexed:
        order = torch.tensor([3, 0, 5, 1, 4, 2], dtype=torch.int32)
        back = torch.empty_like(order)
        back[order.long()] = torch.arange(6, dtype=torch.int32)
        moved = {
            n: getattr(params, n)[order.long()]
            for n in (
                "prompt_lens",
                "history",
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
            )
        }
        params = SamplingTensors(
            **{f: getattr(params, f) for f in params.__slots__ if f not in {*moved, "rows"}},
            **moved,
            rows=back,
        )
    ours = logits.clone()
    penalties.change_logits(ours, params, block=16)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_bounds_leave_few_tokens_to_be_searched(monkeypatch):
    """Rows have 4,000 logits, flat or peaked."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.standard_normal((4, 4000)).astype(np.float32)) * 1.3
    logits[2:] *= 4
    wants = [Wants(0.8, 0, 0.95), Wants(0.8, 300), Wants(0.8, 0, 0.5), Wants(0.8, 40, 1.0, 0.02)]
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1])
    drawing.draw(logits, tensors(wants))
    [state] = [own for own in made if own.shape == (4, drawing.STATE)]
    listed = state[:, drawing.NUM_LISTED.value].tolist()
    assert min(listed[:3]) > 0
    assert max(listed) <= 60
    assert listed[3] == 0  # min_p keeps fewer than top_k would
