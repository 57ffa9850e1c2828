"""The samplers of `kernels/cpu/sampling/samplers.py` against plain Python (`naive_samplers`) and transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import SamplingParams
from slipstream.errors import RequestError
from slipstream.kernels.cpu.sampling import samplers
from slipstream.worker.sampling.sampler_chain import apply_samplers
from tests.support import naive_samplers

VOCAB = 13
logits_of = st.lists(
    st.floats(-6, 6).map(lambda x: round(x, 3)), min_size=VOCAB, max_size=VOCAB, unique=True
)
tokens_of = st.lists(
    st.integers(0, 3), min_size=1, max_size=24
)  # of few kinds, so that runs repeat
PARAMS = [
    {"typical_p": 0.5},
    {"typical_p": 0.9, "temperature": 0.6},
    {"top_n_sigma": 0.7},
    {"dry_multiplier": 0.8},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_base": 2.0,
        "dry_breaker_token_ids": (2,), "dry_penalty_last_n": 9},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 3},
    {"samplers": ["temperature", "penalties", "xtc", "top_k"], "presence_penalty": 1.0, "top_k": 5,
        "temperature": 0.7},
    {"samplers": ["min_p", "typ_p", "top_p"], "min_p": 0.1, "typical_p": 0.8, "top_p": 0.7,
        "temperature": 3.0},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.3,
        "samplers": ["penalties"]},
]  # fmt: skip


@pytest.mark.parametrize("values", PARAMS, ids=str)
@settings(max_examples=40)
@given(logits=logits_of, tokens=tokens_of, num_prompt=st.integers(0, 5))
def test_as_plain_python(values, logits, tokens, num_prompt):
    params, num_prompt = SamplingParams(**values), min(num_prompt, len(tokens))
    ours = np.array(logits, np.float32)
    expected = naive_samplers.distribution(ours.tolist(), tokens, num_prompt, params)
    apply_samplers(ours, np.array(tokens, np.int64), num_prompt, params, 1.0)
    found = torch.from_numpy(ours).double().softmax(-1)
    close = torch.tensor([expected.get(t, 0.0) for t in range(VOCAB)], dtype=torch.float64)
    # At a threshold, float32 may keep what float64 leaves out: then the sets differ by one token of the edge.
    if (found > 0).sum() == (close > 0).sum():
        torch.testing.assert_close(found, close, rtol=1e-4, atol=1e-6)
    else:
        assert abs(int((found > 0).sum()) - int((close > 0).sum())) == 1


@given(logits=logits_of, threshold=st.sampled_from([0.02, 0.1, 0.3, 0.6]))
def test_xtc_leaves_the_least_likely_of_the_choices(logits, threshold):
    row = np.array(logits, np.float32)
    samplers.xtc(row, 0.4, threshold, 0.4)
    assert (row == np.array(logits, np.float32)).all()  # not below the probability: nothing happens
    samplers.xtc(row, 0.4, threshold, 0.39)
    assert set(np.flatnonzero(row > -np.inf).tolist()) == set(
        naive_samplers.xtc(dict(enumerate(logits)), threshold)
    )


@settings(max_examples=40)
@given(logits=logits_of, mass=st.sampled_from([0.2, 0.5, 0.9, 0.99]))
def test_typical_as_transformers(logits, mass):
    from transformers import TypicalLogitsWarper

    row = np.array(logits, np.float32)
    expected = TypicalLogitsWarper(mass=mass)(None, torch.tensor([logits]))[0] > -torch.inf
    samplers.typical(row, mass)
    assert (row > -np.inf).tolist() == expected.tolist()


@given(tokens=tokens_of, size=st.integers(1, 4))
def test_no_repeat_ngram_as_transformers(tokens, size):
    from transformers import NoRepeatNGramLogitsProcessor

    row = np.zeros(VOCAB, np.float32)
    expected = (
        NoRepeatNGramLogitsProcessor(size)(torch.tensor([tokens]), torch.zeros(1, VOCAB))[0]
        > -torch.inf
    )
    samplers.no_repeat_ngram(row, np.array(tokens, np.int64), size)
    assert (row > -np.inf).tolist() == expected.tolist()


def test_nothing_leaves_nothing():
    row = np.array([1.0, 2.0], np.float32)
    samplers.no_repeat_ngram(row, np.array([0, 1, 0]), 1)
    assert row.tolist() == [1.0, 2.0]
    forbidden = np.full(3, -1e30, np.float32)
    samplers.drop_forbidden(forbidden)
    assert (forbidden > -np.inf).all()
    samplers.mirostat(row, mu=-5.0)
    assert row.tolist() == [-np.inf, 2.0]
    for change in (samplers.top_n_sigma, samplers.typical, samplers.top_p):
        row = np.array([0.5, -np.inf, 0.4], np.float32)
        change(row, 1e-9)
        assert (row > -np.inf).sum() == 1


def test_dry_by_hand():
    """7 8 9 7 8: a run of two has come back, and 9 followed it."""
    row = np.zeros(16, np.float32)
    how = dict(multiplier=1.0, base=2.0, last_n=-1, breakers=np.array([], np.int64))
    samplers.dry(row, np.array([7, 8, 9, 7, 8]), allowed_length=2, **how)
    assert row[9] == -1.0
    assert np.count_nonzero(row) == 1
    samplers.dry(row, np.array([7, 8, 9, 7, 8]), allowed_length=1, **how)
    assert row[9] == -3.0
    samplers.dry(row, np.array([7, 8, 9, 7, 8]), allowed_length=3, **how)
    assert row[9] == -3.0


@pytest.mark.parametrize("tokens", [[0] * 2500, [0, 1] * 1250], ids=["one", "two"])
def test_dry_of_long_repeated_text_is_finite(tokens):
    row = np.zeros(4, np.float32)
    samplers.dry(
        row,
        np.array(tokens),
        multiplier=5.0,
        base=100.0,
        allowed_length=1,
        last_n=-1,
        breakers=np.array([], np.int64),
    )
    assert np.isfinite(row).all()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"typical_p": 0.0}, "typical_p"),
        ({"top_n_sigma": float("nan")}, "top_n_sigma"),
        ({"xtc_probability": 1.5}, "xtc_probability"),
        ({"xtc_probability": 0.5, "temperature": 0}, "xtc_probability"),
        ({"dry_multiplier": -1}, "dry_multiplier"),
        ({"dry_allowed_length": 0}, "dry_allowed_length"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": "x"}, "dry_sequence_breakers"),
        ({"no_repeat_ngram_size": 1.5}, "no_repeat_ngram_size"),
        ({"mirostat_mode": 1}, "mirostat_mode"),
        ({"mirostat_mode": 2, "top_p": 0.5}, "mirostat_mode"),
        ({"mirostat_mode": 2, "temperature": 0}, "mirostat_mode"),
        ({"mirostat_tau": 0}, "mirostat_tau"),
        ({"samplers": ["top_k", "topk"]}, "samplers"),
        ({"samplers": ["top_k", "top_k"]}, "samplers"),
        ({"samplers": "top_k"}, "samplers"),
        ({"logits_processors": [3]}, "logits_processors"),
        ({"logits_processors": ["no_colon"]}, "logits_processors"),
        ({"best_of": 129}, "best_of"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
    ],
    ids=str,
)
def test_params_that_are_refused(values, named):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert caught.value.field == named
