"""Conditions for a simulated load to count as carried: the requests that count, their quantiles, a
queue that stays bounded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slipstream.costs.metrics import RequestTiming
from slipstream.simulate.capacity import (
    ANSWERS,
    KEEPS_UP,
    NUM_REQUESTS,
    LatencyObjectives,
    carried,
    keeps_up,
    quantile,
    settled,
    turns_per_s,
)
from slipstream.simulate.recommend import why_replicas
from slipstream.simulate.traffic import of_lengths
from tests.simulate.test_simulator import Linear, engine


def test_replicas_that_carry_more_together_than_apart_are_said_to():
    one = "one carries 0.163 requests/s within the objectives"
    assert why_replicas(8, 0.163, None) == why_replicas(8, 0.163, 1.3) == one
    together = why_replicas(8, 0.163, 3.0)
    assert together.startswith(f"simulated together they carry the 3 requests/s; alone {one}")
    assert "a share of 0.375" in together
    assert why_replicas(8, None, 3.0) == ""


def request(sent, ttft_s=1.0):
    first = sent + ttft_s
    return RequestTiming(
        input_tokens=1, output_tokens=2, sent=sent, first_token=first, last_token=first + 1
    )


def run_of(records, **summary):
    return SimpleNamespace(records=tuple(records), summary=SimpleNamespace(**summary))


def test_first_quarter_and_last_tenth_do_not_count_in_order_of_sending():
    records = [request(float(i)) for i in range(20)]
    found = settled(run_of(reversed(records)))
    assert [r.sent for r in found] == [float(i) for i in range(5, 18)]


def test_objectives_need_their_share_of_the_requests_that_count():
    slow = {0, 1, 2, 7, 19}  # of those that count, one of 13
    run = run_of(request(float(i), 9.0 if i in slow else 1.0) for i in range(20))
    assert LatencyObjectives(limits={"ttft_s": 2.0}, attainment=12 / 13).met_by(run)
    assert not LatencyObjectives(limits={"ttft_s": 2.0}, attainment=0.95).met_by(run)
    assert not LatencyObjectives(limits={"ttft_s": 2.0}, attainment=0.5).met_by(run_of([]))


@pytest.mark.parametrize(
    ("share", "expected"), [(0.25, 1.0), (0.26, 2.0), (0.5, 2.0), (0.99, 4.0), (1, 4.0)]
)
def test_quantile_is_the_least_value_that_the_share_meets(share, expected):
    records = tuple(request(0.0, ttft) for ttft in (3.0, 1.0, 4.0, 2.0))
    assert quantile(records, "ttft_s", share) == expected
    assert quantile((), "ttft_s", share) == 0.0


def test_queue_is_bounded_if_answers_end_with_the_arrivals_but_for_one_answers_time():
    def carried(wall_s):
        e2e = SimpleNamespace(p90=20.0)
        return keeps_up(run_of([], num_requests=100, wall_s=wall_s, e2e_s=e2e), rate=1.0)

    assert carried(100 / KEEPS_UP + 19)
    assert not carried(100 / KEEPS_UP + 21)


def test_turns_a_second_are_the_sum_of_each_sessions_while_it_runs():
    records = [request(0.0), request(8.0), request(0.0), request(2.0)]  # each takes 2 s
    traffic = SimpleNamespace(turns=[SimpleNamespace(session=i) for i in (0, 0, 1, 1)])
    assert turns_per_s(traffic, run_of(records)) == 2 / 10 + 2 / 4


PATIENT = LatencyObjectives(limits={"e2e_s": 1e9}, attainment=1.0)


def test_a_rate_is_refused_for_its_queue_though_every_answer_meets_the_objectives():
    workload = of_lengths("x", [(8, 40)])  # a step takes 10 ms: one sequence, 2 requests/s at most
    made = engine(max_num_seqs=1)
    assert carried(made, workload, PATIENT, 1.5) is not None
    assert carried(made, workload, PATIENT, 20.0) is None


def test_a_load_of_long_answers_is_simulated_for_several_of_them():
    class Steady(Linear):
        def seconds(self, shape):
            return 0.1

    limits = {"max_num_seqs": 200, "max_num_batched_tokens": 512, "max_num_mixed_tokens": 512}
    made = engine(Steady(), num_blocks=4000, **limits)  # an answer takes 4 s
    run = carried(made, of_lengths("x", [(2, 40)]), PATIENT, 30.0)
    assert run is not None
    count, mean = run.summary.num_requests, run.summary.e2e_s.mean
    assert count >= 30.0 * ANSWERS * mean > NUM_REQUESTS
