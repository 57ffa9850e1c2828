"""Workloads: what they are made of, and that a seed fixes them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bench import workload as make
from slipstream.errors import ConfigError


def lengths(workload):
    return [(len(r.prompt_token_ids), r.output_tokens) for r in workload.requests]


def test_a_fixed_workload_has_equal_lengths_and_other_tokens():
    workload = make.fixed(5, 7, 3, vocab_size=100)
    assert lengths(workload) == [(7, 3)] * 5
    assert (workload.input_tokens, workload.output_tokens) == (35, 15)
    assert len({r.prompt_token_ids for r in workload.requests}) == 5
    assert workload.describe()["num_requests"] == 5


@given(
    low=st.integers(1, 5), more=st.integers(0, 5), vocab=st.integers(2, 50), seed=st.integers(0, 9)
)
def test_uniform_stays_within(low, more, vocab, seed):
    workload = make.uniform(20, (low, low + more), (1, 3), vocab_size=vocab, seed=seed)
    for request in workload.requests:
        assert low <= len(request.prompt_token_ids) <= low + more
        assert 1 <= request.output_tokens <= 3
        assert all(0 <= t < vocab for t in request.prompt_token_ids)


def test_uniform_reaches_both_ends():
    found = {n for n, _ in lengths(make.uniform(200, (1, 3), (1, 1), vocab_size=9))}
    assert found == {1, 2, 3}


def test_a_seed_fixes_everything():
    def build(seed):
        return make.uniform(10, (3, 9), (3, 9), vocab_size=50, seed=seed)

    assert build(1) == build(1)
    assert build(1).requests != build(2).requests


def test_a_shared_prefix_begins_every_prompt():
    workload = make.shared_prefix(4, 10, 3, 2, vocab_size=1000)
    prompts = [r.prompt_token_ids for r in workload.requests]
    assert len({p[:10] for p in prompts}) == 1
    assert len({p[10:] for p in prompts}) == 4
    assert {len(p) for p in prompts} == {13}


def test_warmup_shares_no_prefix_and_is_short():
    workload = make.shared_prefix(4, 10, 3, 20, vocab_size=1000)
    first = make.warmup(workload, 2)
    assert [r.output_tokens for r in first] == [8, 8]
    assert {r.prompt_token_ids[0] for r in first}.isdisjoint(
        {r.prompt_token_ids[0] for r in workload.requests}
    )
    assert len(make.warmup(workload, 100)) == 4


def test_recorded_takes_the_first(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({"source": "x", "lengths": [[3, 4], [5, 6], [7, 8]]}))
    assert lengths(make.recorded(path, 2, vocab_size=10)) == [(3, 4), (5, 6)]
    with pytest.raises(ConfigError, match="holds 3 lengths"):
        make.recorded(path, 4, vocab_size=10)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"lengths": [[1]]}', '{"lengths": [[0, 1]]}', '{"lengths": 3}', '[["x"]]']
)
def test_a_broken_file_of_lengths_is_refused(tmp_path, text):
    path = tmp_path / "lengths.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        make.read_lengths(path)


def test_sharegpt_filters_and_shuffles():
    turns = [("a" * n, "b" * (n % 7 + 1)) for n in range(1, 40)] + [
        ("a" * 10, "b" * 5000),
        ("a" * 1000, "b" * 1500),
        ("c" * 2000, "d"),
    ]
    workload = make.sharegpt(turns, list, 30, seed=1)
    assert len(workload.requests) == 30
    assert all(4 <= n_in <= 1024 and n_in + n_out <= 2048 for n_in, n_out in lengths(workload))
    assert all(tuple(r.prompt) == r.prompt_token_ids for r in workload.requests)
    assert lengths(workload) != sorted(lengths(workload))
    assert workload == make.sharegpt(turns, list, 30, seed=1)
    with pytest.raises(ConfigError, match="36 fitting"):
        make.sharegpt(turns, list, 50)
