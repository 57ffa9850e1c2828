"""The definitions, on hand-made records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.costs.metrics import (
    RequestRecord,
    distribution,
    parse_objectives,
    percentile,
    summarize,
    weighted_distribution,
)
from slipstream.errors import ConfigError

# Sent at 0: first token at 1, then 2, 4. Sent at 1: a single token at 3. The third failed.
RECORDS = [
    RequestRecord(
        input_tokens=10,
        output_tokens=3,
        sent=0.0,
        first_token=1.0,
        last_token=4.0,
        gaps_s=(1.0, 2.0),
    ),
    RequestRecord(
        input_tokens=20, output_tokens=1, sent=1.0, first_token=3.0, last_token=3.0, gaps_s=()
    ),
    RequestRecord(input_tokens=99, output_tokens=0, sent=1.5, error="refused", refused=True),
]


def test_values_that_occur_often_have_the_distribution_of_all_of_them():
    pairs = [(3.0, 4), (1.0, 1), (2.5, 0), (2.0, 7), (9.0, 2)]
    assert weighted_distribution(pairs) == distribution(v for v, n in pairs for _ in range(n))
    assert weighted_distribution([(1.0, 0)]) is None


def test_one_request():
    first, second, third = RECORDS
    assert (first.ttft_s, first.tpot_s, first.e2e_s) == (1.0, 1.5, 4.0)
    assert (second.ttft_s, second.tpot_s, second.e2e_s) == (2.0, None, 2.0)
    assert (third.ttft_s, third.tpot_s, third.e2e_s, third.ok) == (None, None, None, False)


def test_summary():
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
def test_goodput(text, good):
    assert summarize(RECORDS, parse_objectives(text)).goodput == good / 4.0


def test_steady_throughput_leaves_out_the_beginning_and_the_end():
    steady = RequestRecord(
        input_tokens=1,
        output_tokens=21,
        sent=0.0,
        first_token=10.0,
        last_token=30.0,
        gaps_s=(1.0,) * 20,
    )
    late = RequestRecord(
        input_tokens=1, output_tokens=1, sent=0.0, first_token=90.0, last_token=90.0, gaps_s=()
    )
    assert summarize([steady, late]).steady_throughput == 1.0
    # An event of two tokens each: the same answer in half as many deliveries.
    halved = replace(steady, output_tokens=42)
    assert summarize([halved, late]).steady_throughput == 2.0
    offline = replace(steady, gaps_s=None)
    assert summarize([offline]).steady_throughput is None


def test_nothing_measured():
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
def test_bad_objectives(text):
    with pytest.raises(ConfigError, match="slo"):
        parse_objectives(text)
