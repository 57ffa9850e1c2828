"""Replicas that get no requests for a while, chosen by answers and failures alone."""

from __future__ import annotations

import pytest

from slipstream.fleet.gateway.guard import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_FAILURES,
    MIN_SEEN,
    SLOW_EXCESS_S,
    ReplicaGuard,
    RetryBudget,
)


def guard(count=4):
    made = ReplicaGuard()
    for i in range(count):
        made.add(f"r{i}")
    return made


def answer(made, replica, ttft_s, count=MIN_SEEN, *, predicted_s=0.1, now=0.0):
    """`count` requests, each sent when the one before had its first token; the last has it at `now`."""
    for i in range(count):
        made.answered(replica, ttft_s, predicted_s, now - (count - 1 - i) * ttft_s)


def test_failures_in_a_row_begin_a_pause_and_an_answer_between_them_ends_the_row():
    made = guard()
    for _ in range(MAX_FAILURES - 1):
        made.failed("r0", "why", 0.0)
    made.answered("r0", 0.1, 0.1, 0.0)
    for _ in range(MAX_FAILURES - 1):
        made.failed("r0", "why", 0.0)
    assert made.out(0.0) == set()
    made.failed("r0", "why", 0.0)
    assert made.out(0.0) == {"r0"}
    assert made.next_change(0.0) == FIRST_PAUSE_S


def test_each_pause_is_twice_as_long_as_the_one_before_up_to_the_longest():
    made, now, lengths = guard(), 0.0, []
    for _ in range(8):
        made.failed("r0", "gone", now, gone=True)
        end = made.next_change(now)
        lengths.append(end - now)
        now = end
    assert lengths == [min(FIRST_PAUSE_S * 2**i, LONGEST_PAUSE_S) for i in range(8)]
    made.answered("r0", 0.1, 0.1, now)
    made.failed("r0", "gone", now, gone=True)
    assert made.next_change(now) == now + FIRST_PAUSE_S


def test_failures_of_requests_that_were_sent_before_a_pause_do_not_lengthen_it():
    made = guard()
    for i in range(32):
        made.failed("r0", "gone", i / 100, gone=True)
    assert made.next_change(0.5) == FIRST_PAUSE_S


def test_one_request_tries_a_replica_after_its_pause_and_a_failure_pauses_it_at_once():
    made = guard()
    made.failed("r0", "gone", 0.0, gone=True)
    now = FIRST_PAUSE_S
    assert made.out(now) == set()
    made.sent("r0", now)
    assert made.out(now) == {"r0"}  # until that request is answered
    made.failed("r0", "again", now)
    assert made.next_change(now) == now + 2 * FIRST_PAUSE_S
    now += 2 * FIRST_PAUSE_S
    made.sent("r0", now)
    made.let_go("r0")
    assert made.out(now) == set()


@pytest.mark.parametrize(
    ("ttft_s", "predicted_s", "is_out"),
    [
        (1.0, 0.1, True),
        (0.3, 0.1, False),  # not so many times the others' time
        (1.0, 1.0, False),  # it has as much to do as it takes
        (1.0, 1.0 - SLOW_EXCESS_S / 2, False),
        (1.0, 1.0 - 2 * SLOW_EXCESS_S, True),
    ],
)
def test_slow_is_later_than_predicted_and_many_times_the_others(ttft_s, predicted_s, is_out):
    made = guard()
    for other in ("r1", "r2", "r3"):
        answer(made, other, 0.1)
    answer(made, "r0", ttft_s, MIN_SEEN - 1, predicted_s=predicted_s)
    assert made.out(0.0) == set(), "few answers say nothing"
    answer(made, "r0", ttft_s, 1, predicted_s=predicted_s, now=ttft_s)
    assert made.out(ttft_s) == ({"r0"} if is_out else set())


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_a_slow_replica_is_out_and_not_one_whose_requests_waited_behind_one_prompt(share):
    """Requests come ten times a second; `share` of them take 2 s instead of the 0.1 s predicted."""
    made = guard()
    for other in ("r1", "r2", "r3"):
        answer(made, other, 0.1, now=-1.0)
    for i in range(20):  # sent while one long prompt was computed
        made.answered("r0", 2.0 - i / 10, 0.1, i / 100)
    answer(made, "r0", 0.1, 40, now=5.0)
    assert made.slow() == set()
    for i in range(60):
        is_late = i * share % 1 + share >= 1
        made.answered("r0", 2.0 if is_late else 0.1, 0.1, 8.0 + i / 10)
    assert made.slow() == {"r0"}


def test_half_of_the_replicas_stay_however_slow_they_are():
    made = guard()
    answer(made, "r3", 0.1)
    for replica in ("r0", "r1", "r2"):
        answer(made, replica, 5.0)
    assert made.out(0.0) == {"r0", "r1"}
    assert made.next_change(0.0) == FIRST_PAUSE_S
    made.failed("r0", "gone", 0.0, gone=True)  # slow ones are asked where there is no other
    assert made.slow() == {"r1"}


def test_half_of_the_replicas_stay_however_they_answer_probes():
    made, answers = guard(5), {"r0": "b", "r1": "c", "r2": "a", "r3": "a", "r4": "a"}
    made.failed("r4", "gone", 0.0, gone=True)
    assert made.probed(answers, 0.0) == []
    assert made.probed(answers, 0.0) == ["r0"]
    assert made.probed(answers, FIRST_PAUSE_S) == ["r1"], "the one that failed is back"


def test_a_replica_that_was_slow_is_paused_longer_until_it_has_been_fast_for_a_while():
    made = guard()
    for other in ("r1", "r2", "r3"):
        answer(made, other, 0.1)
    answer(made, "r0", 5.0)
    now = made.next_change(0.0)
    answer(made, "r0", 0.1, 1, now=now)
    assert made.replicas["r0"].pauses == 1
    answer(made, "r0", 0.1, MIN_SEEN - 1, now=now)
    assert made.replicas["r0"].pauses == 0


def test_the_minority_of_a_probe_is_out_after_two_and_until_it_agrees():
    made, agree, differ = guard(), {f"r{i}": "a" for i in range(4)}, {"r0": "b"}
    assert made.probed(agree | differ, 0.0) == []
    assert made.probed(agree | differ, 0.0) == ["r0"]
    made.failed("r0", "other", 0.0, gone=True)  # no pause with an end takes the place of this one
    assert made.out(1e9) == {"r0"}
    assert made.probed(agree | differ, 1.0) == []
    assert made.probed(agree, 2.0) == []
    assert made.out(2.0) == set()


@pytest.mark.parametrize("answers", [{"r0": 1, "r1": 2}, {"r0": 1, "r1": 1, "r2": 2, "r3": 2}])
def test_a_probe_without_a_majority_says_nothing(answers):
    made = guard()
    assert [made.probed(answers, 0.0) for _ in range(3)] == [[], [], []]
    assert not any(watched.wrong for watched in made.replicas.values())


def test_retries_have_a_reserve_and_then_a_share_of_the_requests():
    budget = RetryBudget(0.25, reserve=2.0)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        assert not budget.take()
        budget.request()
    assert budget.take()
    for _ in range(100):
        budget.request()
    assert [budget.take() for _ in range(3)] == [True, True, False]
    assert not RetryBudget(0.0).take()
