"""The definitions, on hand-made records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.costs.metrics import (
    RequestTiming,
    distribution,
    parse_objectives,
    percentile,
    summarize,
    weighted_distribution,
)
from slipstream.errors import ConfigError

# Sent at 0: first token at 1, then 2, 4. Sent at 1: a single token at 3. The third failed.
RECORDS = [
    RequestTiming(
        input_tokens=10,
        output_tokens=3,
        sent=0.0,
        first_token=1.0,
        last_token=4.0,
        gaps_s=(1.0, 2.0),
    ),
    RequestTiming(
        input_tokens=20, output_tokens=1, sent=1.0, first_token=3.0, last_token=3.0, gaps_s=()
    ),
    RequestTiming(input_tokens=99, output_tokens=0, sent=1.5, error="refused", refused=True),
]


def test_values_that_occur_often_have_the_distribution_of_all_of_them():
    pairs = [(3.0, 4), (1.0, 1), (2.5, 0), (2.0, 7), (9.0, 2)]
    assert weighted_distribution(pairs) == distribution(v for v, n in pairs for _ in range(n))
    assert weighted_distribution([(1.0, 0)]) is None


def test_times_of_a_request_are_those_by_hand():
    first, second, third = RECORDS
    assert (first.ttft_s, first.tpot_s, first.e2e_s) == (1.0, 1.5, 4.0)
    assert (second.ttft_s, second.tpot_s, second.e2e_s) == (2.0, None, 2.0)
    assert (third.ttft_s, third.tpot_s, third.e2e_s, third.ok) == (None, None, None, False)


def test_a_summary_counts_requests_and_tokens():
    s = summarize(RECORDS)
    assert (s.num_requests, s.num_failed, s.num_refused, s.errors) == (3, 1, 1, {"refused": 1})
    assert (s.input_tokens, s.output_tokens) == (30, 4)  # the failed one's do not count
    assert s.wall_s == 4.0
    assert s.output_throughput == 4 / 4.0
    assert s.total_throughput == 34 / 4.0
    assert s.requests_per_s == 2 / 4.0
    assert s.ttft_s.mean == 1.5
    assert s.tpot_s.p99 == 1.5
    assert (s.itl_s.mean, s.itl_s.p50) == (1.5, 1.5)
    assert s.e2e_s.p50 == 3.0
    assert (s.worst_gap_s.p50, s.worst_gap_s.p99) == (2.0, 2.0)  # an answer of one token has no gap
    assert s.goodput is None


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("ttft_s=1", 1),
        ("ttft_s=2,e2e_s=4", 2),
        ("tpot_s=1.4", 1),
        ("tpot_s=1.5", 2),
        ("e2e_s=1", 0),
    ],
)
def test_goodput_counts_requests_that_meet_all_objectives(text, good):
    assert summarize(RECORDS, parse_objectives(text)).goodput == good / 4.0


def test_steady_throughput_leaves_out_the_beginning_and_the_end():
    steady = RequestTiming(
        input_tokens=1,
        output_tokens=21,
        sent=0.0,
        first_token=10.0,
        last_token=30.0,
        gaps_s=(1.0,) * 20,
    )
    late = RequestTiming(
        input_tokens=1, output_tokens=1, sent=0.0, first_token=90.0, last_token=90.0, gaps_s=()
    )
    assert summarize([steady, late]).steady_throughput == 1.0
    # An event of two tokens each: the same answer in half as many deliveries.
    halved = replace(steady, output_tokens=42)
    assert summarize([halved, late]).steady_throughput == 2.0
    offline = replace(steady, gaps_s=None)
    assert summarize([offline]).steady_throughput is None


def test_a_summary_of_nothing_has_no_rates():
    for records in ([], RECORDS[2:]):
        s = summarize(records, {"ttft_s": 1.0})
        assert (s.output_throughput, s.wall_s, s.ttft_s, s.goodput) == (0.0, 0.0, None, 0.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentile_is_numpys(values, q):
    assert percentile(sorted(values), q) == pytest.approx(
        np.percentile(values, q), rel=1e-9, abs=1e-6
    )


def test_distribution_leaves_out_what_is_not_known():
    assert distribution([None, None]) is None
    assert distribution([None, 2.0, 1.0]).mean == 1.5


@pytest.mark.parametrize(
    "text", ["ttft", "ttft_s=x", "itl=1", "ttft_s=0", "ttft_s=-1", "tpot_s=nan"]
)
def test_wrong_objectives_name_the_option(text):
    with pytest.raises(ConfigError, match="slo"):
        parse_objectives(text)


def answer(*times: float, sent: float = 0.0, **more) -> RequestTiming:
    """A request of ten prompt tokens, each of whose tokens was timed."""
    return replace(RequestTiming.of(10, sent, times), **more)


def test_record_of_timed_tokens():
    record = answer(2.0, 3.0, 7.0, sent=0.5)
    assert (record.input_tokens, record.output_tokens, record.gaps_s) == (10, 3, (1.0, 4.0))
    assert (record.ttft_s, record.e2e_s, record.tpot_s, record.worst_gap_s) == (1.5, 6.5, 2.5, 4.0)
    assert answer(2.0).gaps_s == ()


def test_request_that_failed_after_its_first_tokens_counts_as_failed_alone():
    good, broken = answer(1.0, 2.0), answer(1.0, 9.0, error="reset", cached_tokens=4)
    assert not broken.ok
    assert not broken.meets({})
    silent = RequestTiming(input_tokens=5, output_tokens=0, sent=0.5)
    s = summarize([good, broken, silent], {"ttft_s": 1.0})
    assert (s.num_failed, s.errors) == (2, {"reset": 1, "no token came": 1})
    assert (s.input_tokens, s.output_tokens, s.cached_tokens, s.wall_s) == (10, 2, 0, 2.0)
    assert (s.goodput, s.objectives) == (0.5, {"ttft_s": 1.0})


def test_wall_time_begins_with_the_first_send_of_any_request():
    late, refused = answer(4.0, sent=3.5, cached_tokens=6), replace(RECORDS[2], sent=3.0)
    assert summarize([late, refused]).wall_s == 1.0
    assert summarize([late, refused]).cached_tokens == 6
    brief = summarize([late])
    assert (brief.wall_s, brief.requests_per_s) == (0.5, 2.0)


def test_commonest_five_errors_are_kept():
    records = [replace(RECORDS[2], error=f"e{n}") for n in range(7) for _ in range(n + 1)]
    assert summarize(records).errors == {"e6": 7, "e5": 6, "e4": 5, "e3": 4, "e2": 3}


def test_steady_throughput_is_of_all_answers_in_the_order_of_time():
    first = answer(*(50.0 + i for i in range(10)))  # a token a second, from 50 s on
    second = answer(0.0, *(50.5 + i for i in range(9)))  # its first token came long before
    # of 20 tokens the second came at 50.0 s and the 18th at 58.0 s
    assert summarize([first, second]).steady_throughput == pytest.approx(16 / 8.0)
    assert summarize([second, first]).steady_throughput == pytest.approx(16 / 8.0)


def test_objectives_may_end_with_a_comma():
    assert parse_objectives("ttft_s=1,tpot_s=0.05,") == {"ttft_s": 1.0, "tpot_s": 0.05}
    assert parse_objectives("") == {}
