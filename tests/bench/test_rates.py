"""The search of a rate, against a server that holds up to a known one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bench.rates import PRECISION, RateSearch, holds, parse_rate_objectives
from slipstream.costs.metrics import RequestTiming, summarize
from slipstream.errors import ConfigError

FAST = RequestTiming(
    input_tokens=1, output_tokens=3, sent=0.0, first_token=0.5, last_token=1.5, gaps_s=(0.25, 0.75)
)
FAILED = RequestTiming(input_tokens=1, output_tokens=0, sent=0.0, error="full", refused=True)


@given(limit=st.floats(0.5, 500), first=st.floats(0.5, 500))
def test_it_closes_in_on_the_limit(limit, first):
    search, tried = RateSearch(first, 40), []
    while search.rate is not None:
        tried.append(search.rate)
        search.record(search.rate <= limit)
    assert search.best <= limit <= search.best * PRECISION
    assert search.best in tried
    assert len(tried) <= 20


def test_it_takes_no_more_runs_than_it_may():
    search, rates = RateSearch(8.0, 4), []
    while search.rate is not None:
        rates.append(search.rate)
        search.record(search.rate <= 20)
    assert rates == [8.0, 16.0, 32.0, 24.0]
    assert search.best == 16.0
    search = RateSearch(8.0, 2)
    search.record(False)
    assert search.rate == 4.0
    search.record(False)
    assert (search.rate, search.best) == (None, None)


@pytest.mark.parametrize(
    ("text", "records", "held"),
    [
        ("ttft_p99=0.5,tpot_p50=0.5", [FAST], True),
        ("ttft_p99=0.4", [FAST], False),
        ("worst_gap_p90=0.7", [FAST], False),
        ("itl_p50=0.5,e2e_p99=1.5", [FAST], True),
        ("ttft_p99=9", [FAST, FAILED], False),  # whatever the others' figures
    ],
)
def test_rate_objectives_hold_or_fail_as_by_hand(text, records, held):
    assert holds(summarize(records), parse_rate_objectives(text)) is held


@pytest.mark.parametrize(
    "text", ["", "ttft_p99", "ttft_p98=1", "ttft=1", "ttft_p99=0", "ttft_p99=x", "ttft_p99=1,"]
)
def test_wrong_rate_objectives_name_their_field(text):
    with pytest.raises(ConfigError, match="find_rate"):
        parse_rate_objectives(text)
