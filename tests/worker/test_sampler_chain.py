"""Requests that are drawn row by row: order of their parts, random numbers, and state."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from slipstream import SamplingParams
from slipstream.kernels.cpu.sampling import samplers
from slipstream.kernels.cpu.sampling.row_draw import draw
from slipstream.kernels.cpu.sampling.sampling import apply_bias
from slipstream.kernels.cpu.sampling.token_masks import mask_logits
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.messages.steps import (
    NewRequest,
    RequestFailure,
    SamplerState,
    ScheduledRequest,
    StepPlan,
)
from slipstream.worker.inputs.input_batch import gather
from slipstream.worker.inputs.rows import RowTable
from slipstream.worker.sampling.asked import prompt_positions
from slipstream.worker.sampling.sampler_chain import apply_samplers, draw_chained, places

PROMPT = (1, 2, 3)


def drawn(*all_params: SamplingParams, logits, mask=None, prompts=None):
    """The draws of requests: (tokens of those drawn here, extras). `prompts`: one each, else PROMPT."""
    prompts = prompts or [PROMPT] * len(all_params)
    table = RowTable(8, 30, 4, ReferenceOps(), torch.device("cpu"), seed=0)
    pairs = enumerate(zip(all_params, prompts, strict=True))
    new = tuple(NewRequest(f"r{i}", prompt, len(prompt), p) for i, (p, prompt) in pairs)
    shares = tuple(ScheduledRequest(r.request_id, 0, r.num_prompt_tokens, 1) for r in new)
    plan = StepPlan(1, shares, new)
    table.apply(plan)
    sampled = gather(table, plan).sampled
    which = places(table, sampled)
    rows = np.tile(np.asarray(logits, np.float32), (len(which), 1))
    if mask is not None:
        rows[:, mask] = -np.inf
    found = draw_chained(table, sampled, which, rows)
    return found.tokens.tolist(), found.extras


def counts(logits, num_seeds=300, mask=None, **params):
    """How often each token is drawn, over seeds."""
    found = Counter()
    for first in range(0, num_seeds, 6):
        given = [SamplingParams(seed=first + i, **params) for i in range(6)]
        found.update(drawn(*given, logits=logits, mask=mask)[0])
    return found


def test_only_requests_with_such_samplers_are_drawn_here():
    plain, chained = SamplingParams(seed=1), SamplingParams(seed=1, typical_p=0.9)
    tokens, extras = drawn(plain, chained, plain, chained, logits=[0.0, 1.0, 9.0, 1.0])
    assert (tokens, extras) == ([2, 2], [])


def test_whether_choices_are_excluded_does_not_depend_on_what_is_drawn():
    """Half of the time the likelier of two tokens is excluded; else it comes with its 60 %."""
    found = counts(np.log([0.6, 0.4, 1e-9]), xtc_probability=0.5, xtc_threshold=0.1)
    assert found[2] == 0
    assert 0.62 < found[1] / found.total() < 0.78  # 70 %; with one number for both 90 %


def test_forbidden_tokens_are_gone_before_the_samplers():
    """−1e30 among the logits would make their standard deviation huge, and keep every token."""
    words = {"bad_words_token_ids": ((3,),), "top_n_sigma": 1.0}
    assert set(counts([2.0, 1.9, 0.0, 5.0], num_seeds=60, **words)) == {0, 1}


def test_function_cannot_allow_what_a_grammar_forbade():
    given = {"logits_processors": [lambda prompt, answer, logits: np.full_like(logits, 50.0)]}
    assert set(counts([0.0, 0.0, 0.0], num_seeds=60, mask=[1], **given)) == {0, 2}


def test_function_that_fails_fails_its_request_alone():
    def broken(prompt, answer, logits):
        raise ValueError("no")

    params = [
        SamplingParams(temperature=0, logits_processors=[f])
        for f in (broken, lambda prompt, answer, x: x)
    ]
    tokens, extras = drawn(*params, logits=[0.0, 3.0])
    assert tokens[1] == 1
    assert [(type(extra), extra.request_id) for extra in extras] == [(RequestFailure, "r0")]


def test_function_is_given_the_prompt_and_the_answer_so_far():
    seen = []

    def function(prompt, answer, logits):
        seen.append((prompt, answer))
        return logits

    params = [SamplingParams(logits_processors=[function])] * 2
    drawn(*params, logits=[0.0, 1.0], prompts=[PROMPT, (4, 5, 6, 7, 8)])
    assert seen == [(list(PROMPT), []), ([4, 5, 6, 7, 8], [])]  # nothing of the longer one's length


def test_mirostat_moves_its_state_by_the_surprise():
    params = SamplingParams(mirostat_mode=2, mirostat_tau=3.0, mirostat_eta=0.5, seed=1)
    (token,), (extra,) = drawn(params, logits=np.log([0.25, 0.25, 0.25, 0.25]))
    assert isinstance(extra, SamplerState)
    assert 0 <= token < 4
    assert extra.mirostat_mu == pytest.approx(
        6.0 - 0.5 * (2.0 - 3.0)
    )  # from 2 · tau, a surprise of 2 bits


@pytest.mark.parametrize(
    ("changing", "dropped"),
    [
        ({"no_repeat_ngram_size": 1}, {1, 2, 3}),
        ({"dry_multiplier": 1.0}, set()),
        ({"top_k": 1}, set()),
    ],
)
def test_greedy_rows_are_changed_by_what_changes_logits_alone(changing, dropped):
    logits = np.arange(6, dtype=np.float32)
    apply_samplers(
        logits, np.array(PROMPT), 3, SamplingParams(temperature=0, **changing), u_xtc=1.0
    )
    assert set(np.flatnonzero(logits == -np.inf).tolist()) == dropped


# --- Parts -----------------------------------------------------------------------------------------


def test_dry_counts_runs_to_their_whole_length_within_its_last_tokens():
    how = dict(multiplier=1.0, base=2.0, allowed_length=2, breakers=np.array([], np.int64))
    tokens = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8])
    row = np.zeros(16, np.float32)
    samplers.dry(row, tokens, last_n=-1, **how)
    assert row[9] == -(2.0**6)  # a run of eight
    row = np.zeros(16, np.float32)
    samplers.dry(row, tokens, last_n=12, **how)
    assert row[9] == -(2.0)  # 6 7 8 9 … 6 7 8 is left: three
    row = np.zeros(16, np.float32)
    samplers.dry(row, tokens, last_n=0, **how)
    assert not row.any()


def test_xtc_leaves_the_least_likely_wherever_it_stands():
    row = np.log(np.array([0.2, 0.5, 0.3], np.float32))
    samplers.xtc(row, 0.4, 0.1, 0.1)
    assert np.flatnonzero(row > -np.inf).tolist() == [0]


def test_top_k_of_one_token_less_drops_one():
    row = np.array([3.0, 1.0, 2.0], np.float32)
    samplers.top_k(row, 2)
    assert np.flatnonzero(row > -np.inf).tolist() == [0, 2]
    samplers.top_k(row, 3)
    assert np.flatnonzero(row > -np.inf).tolist() == [0, 2]


def test_no_repeat_ngram_counts_a_text_of_its_own_length():
    row = np.zeros(4, np.float32)
    samplers.no_repeat_ngram(row, np.array([2, 2]), 2)
    assert np.flatnonzero(row == -np.inf).tolist() == [2]


def test_forbidden_by_a_finite_logit_is_below_the_least_that_is_not():
    row = np.array([-1e30, -1e28, 0.0], np.float32)
    samplers.drop_forbidden(row)
    assert np.flatnonzero(row == -np.inf).tolist() == [0]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.0, {0, 1, 2, 3}),
        (3, 1.0, 0.0, {1, 2, 3}),
        (1, 1.0, 0.0, {2}),
        (9, 1.0, 0.0, {0, 1, 2, 3}),
        (0, 0.8, 0.0, {2, 3}),  # together they have it
        (0, 0.81, 0.0, {1, 2, 3}),
        (0, 1.0, 0.6, {2, 3}),  # 0.3 / 0.5 is kept
        (0, 1.0, 0.61, {2}),
        (0, 1.0, 1.0, {2}),  # the likeliest is kept always
        (2, 0.6, 0.0, {2}),  # of what top_k kept
    ],
)
def test_draw_keeps_what_its_cuts_say(top_k, top_p, min_p, kept):
    logits = np.log(np.array([0.05, 0.15, 0.5, 0.3], np.float32))
    # thresholds within float32 of a probability would be a matter of rounding
    top_p, min_p = (x - 1e-4 if x in (0.8, 0.6) else x for x in (top_p, min_p))
    found = {
        draw(logits.copy(), np.float32(1.0), top_k, top_p, min_p, u)
        for u in np.linspace(0.001, 0.999, 200)
    }
    assert found == kept


def test_biases_of_a_token_add_up_and_allowed_ones_stay():
    logits = np.zeros((2, 4), np.float32)
    limits = np.array([1]), np.array([1, 1]), np.array([0, 3])
    apply_bias(
        logits, limits, (np.array([0, 0, 1]), np.array([2, 2, 3]), np.array([1.0, 2.0, 5.0]))
    )
    assert logits.tolist() == [[0, 0, 3, 0], [0, -np.inf, -np.inf, 5]]


def test_mask_forbids_where_the_bit_is_0():
    logits = np.zeros((3, 40), np.float32)
    bits = np.zeros((1, 2), np.int32)
    bits[0] = (1 << 5) | (1 << 31) - (1 << 32), 1 << 3
    mask_logits(logits, np.array([1]), bits)
    assert np.flatnonzero(logits[1] == 0).tolist() == [5, 31, 35]
    assert not logits[[0, 2]].any()


@pytest.mark.parametrize(
    ("computed", "count", "expected"), [(0, 2, 2), (0, 3, 2), (1, 2, 1), (2, 1, 0), (3, 5, 0)]
)
def test_positions_that_precede_a_token_of_the_prompt(computed, count, expected):
    row = RowTable(1, 30, 4, ReferenceOps(), torch.device("cpu"), seed=0)
    share = ScheduledRequest("a", computed, count, 0)
    row.apply(StepPlan(1, (share,), (NewRequest("a", PROMPT, 3, SamplingParams()),)))
    assert prompt_positions(row.rows["a"], share) == expected
