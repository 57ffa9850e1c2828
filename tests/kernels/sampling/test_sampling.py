"""The CPU's sampler over arrays, beside the reference (`test_torch_ops.py` compares the whole of it)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.kernels.cpu.sampling import row_draw, sampling
from slipstream.kernels.metadata import SamplingTensors
from slipstream.kernels.plain.reference import apply_bias_and_penalties, draw, uniform


def one(weights, u):
    """The token that `u` draws from the weights."""
    with np.errstate(divide="ignore"):
        return row_draw.draw(
            np.log(np.asarray(weights, np.float32)), np.float32(1.0), 0, 1.0, 0.0, u
        )


def test_a_draw_never_returns_a_dropped_token():
    weights = np.zeros(4096)
    weights[300], weights[3000:3010] = (
        1.0,
        1e-30,
    )  # beyond float64's reach: 300 is where every draw ends
    assert [one(weights, u) for u in (1e-7, 0.5, 1 - 2**-24)] == [300, 300, 300]
    halves = np.zeros(512)
    halves[0] = halves[256] = 1.0  # u · total is reached by the first, exceeded by the second
    assert one(halves, 0.5) == 256
    rng = np.random.default_rng(5)
    weights = rng.random((512, 320), np.float32) * (rng.random((512, 320)) < 0.02)
    weights[:, 17] += 1e-3
    u = rng.random(512, np.float32)
    drawn = [one(row, float(x)) for row, x in zip(weights, u, strict=True)]
    assert all(row[token] > 0 for row, token in zip(weights, drawn, strict=True))
    expected = draw(torch.from_numpy(weights), torch.from_numpy(u)).tolist()
    assert (
        sum(a != b for a, b in zip(drawn, expected, strict=True)) <= 1
    )  # the logarithm's rounding


def test_the_same_numbers_for_a_seed():
    seeds = torch.tensor([0, 1, 2**61 + 5, -7, 2**62 - 1, 3])
    counters = torch.tensor([0, 1, 2, 100_000, 2**31 - 1, 0], dtype=torch.int32)
    assert torch.equal(
        torch.from_numpy(sampling.uniform(seeds.numpy(), counters.numpy())),
        uniform(seeds, counters),
    )


def penalised(**changes) -> list[list[float]]:
    """Logits 2, −2, 1, −1, 0 of two rows; the first has the prompt 0 1 and the answer 2 2 3, the second 4 and nothing."""
    some = torch.zeros(2)
    params = SamplingTensors(
        **{
            **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seeds"), some),
            "history_lens": torch.tensor([5, 1]),
            "prompt_lens": torch.tensor([2, 1]),
            "history": torch.tensor([[0, 1, 2, 2, 3], [4, 0, 0, 0, 0]]),
            "repetition_penalty": torch.ones(2),
            "presence_penalty": some,
            "frequency_penalty": some,
            "all_greedy": True,
            **{name: torch.tensor(value) for name, value in changes.items()},
        }
    )
    ours = np.array([[2.0, -2.0, 1.0, -1.0, 0.0]] * 2, np.float32)
    theirs = torch.from_numpy(ours.copy())
    sampling.apply_bias_and_penalties(ours, params)
    torch.testing.assert_close(torch.from_numpy(ours), apply_bias_and_penalties(theirs, params))
    return ours.tolist()


def test_repetition_counts_the_prompt_and_presence_and_frequency_do_not():
    plain = [2.0, -2.0, 1.0, -1.0, 0.0]
    assert penalised() == [plain, plain]
    assert penalised(repetition_penalty=[2.0, 4.0]) == [[1.0, -4.0, 0.5, -2.0, 0.0], plain]
    assert penalised(presence_penalty=[0.5, 0.5]) == [[2.0, -2.0, 0.5, -1.5, 0.0], plain]
    assert penalised(frequency_penalty=[0.5, 0.5]) == [[2.0, -2.0, 0.0, -1.5, 0.0], plain]


def test_rows_of_any_temperature_above_0_are_drawn():
    logits = np.log(np.array([[0.7, 0.3]] * 400, np.float32))
    logits[:200] *= 0.1  # which a temperature of 0.1 undoes
    ones, zeros = torch.ones(400), torch.zeros(400, dtype=torch.int32)
    heat = torch.tensor([0.1] * 200 + [0.0] * 200)
    params = SamplingTensors(
        temperature=heat, top_k=zeros, top_p=ones, min_p=0 * ones, seeds=torch.arange(400),
        history_lens=zeros, all_greedy=False,
    )  # fmt: skip
    found = sampling.sample(logits, params, lambda x: x.argmax(1))
    assert not found[200:].any()
    assert 30 < found[:200].sum() < 90  # 60 are expected


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_nucleus_of_a_flat_distribution_is_found_beyond_the_first_tokens(top_p):
    weights = np.linspace(1.0, 0.5, 5000, dtype=np.float32)
    running = weights.astype(np.float64).cumsum()
    last = int(np.searchsorted(running, np.float64(np.float32(top_p)) * running[-1]))
    assert (
        row_draw.least_of_top_p(np.random.default_rng(0).permutation(weights), top_p)
        == weights[last]
    )
