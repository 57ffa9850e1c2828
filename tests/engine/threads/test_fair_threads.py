"""Pools of threads in which no client holds up another."""

from __future__ import annotations

import threading

import pytest

from slipstream.engine.threads import fair_threads
from slipstream.engine.threads.fair_threads import FairThreads, client
from slipstream.errors import EngineOverloadedError

WAIT_S = 30.0


@pytest.fixture
def release():
    """Ends the calls that wait for it."""
    event = threading.Event()
    yield event
    event.set()


def submit(pool, name, call, **more):
    token = client.set(name)
    try:
        return pool.submit(call, **more)
    finally:
        client.reset(token)


def test_calls_of_one_client_leave_a_thread_for_another(release):
    pool = FairThreads("test", 3, per_client=2)
    slow = [submit(pool, "slow", lambda: release.wait(WAIT_S)) for _ in range(20)]
    assert submit(pool, "other", lambda: 5).result(WAIT_S) == 5
    assert sum(future.running() for future in slow) == 2
    release.set()
    assert all(future.result(WAIT_S) for future in slow)


def test_clients_take_turns(release):
    pool = FairThreads("test", 1, per_client=1)
    order = []
    first = submit(pool, "a", lambda: release.wait(WAIT_S))
    names = ["a"] * 3 + ["b"] * 2 + ["c"]
    waiting = [submit(pool, name, lambda name=name: order.append(name)) for name in names]
    release.set()
    for future in (first, *waiting):
        future.result(WAIT_S)
    assert order == ["b", "c", "a", "b", "a", "a"]


def test_running_weights_stay_within_the_bounds(release):
    pool = FairThreads("test", 8, per_client=7, max_weight=10, client_weight=6)
    hold = lambda: release.wait(WAIT_S)
    a = [submit(pool, "a", hold, weight=4) for _ in range(3)]
    b = [submit(pool, "b", hold, weight=6) for _ in range(2)]
    assert [future.running() for future in a] == [True, False, False]  # 8 is more than a client may
    assert [future.running() for future in b] == [True, False]
    light = submit(pool, "c", hold, weight=1)
    assert not light.running()  # there is no room
    assert submit(pool, "c", lambda: 1).cancel()  # it is behind its client's first
    assert submit(pool, "d", lambda: 1).result(WAIT_S) == 1  # without a weight none is needed
    release.set()
    for future in (*a, *b, light):
        assert future.result(WAIT_S)


def test_a_call_that_is_heavier_than_the_bound_runs_by_itself(release):
    pool = FairThreads("test", 4, per_client=4, max_weight=10, client_weight=10)
    heavy = submit(pool, "a", lambda: release.wait(WAIT_S), weight=11)
    light = submit(pool, "b", lambda: True, weight=1)
    assert heavy.running() and not light.running()  # noqa: PT018
    release.set()
    assert light.result(WAIT_S)


def test_a_heavy_call_is_not_overtaken_for_ever(release):
    pool = FairThreads("test", 4, per_client=4, max_weight=10, client_weight=10)
    order = []
    first = submit(pool, "a", lambda: release.wait(WAIT_S), weight=6)
    heavy = submit(pool, "b", lambda: order.append("heavy"), weight=10)
    light = submit(pool, "c", lambda: order.append("light"), weight=2)
    release.set()
    for future in (first, heavy, light):
        future.result(WAIT_S)
    assert order == ["heavy", "light"]


def test_a_waiting_call_can_be_cancelled_and_errors_are_passed_on(release):
    pool = FairThreads("test", 1, per_client=1)
    first = submit(pool, "a", lambda: release.wait(WAIT_S))
    cancelled, failing = submit(pool, "a", lambda: 1), submit(pool, "a", lambda: 1 / 0)
    assert cancelled.cancel()
    release.set()
    assert first.result(WAIT_S)
    with pytest.raises(ZeroDivisionError):
        failing.result(WAIT_S)
    assert submit(pool, "b", client.get).result(WAIT_S) == "b"  # the call knows for whom it is


def test_a_client_with_too_many_waiting_calls_is_refused_alone(release, monkeypatch):
    monkeypatch.setattr(fair_threads, "MAX_WAITING", 3)
    pool = FairThreads("test", 2, per_client=1)
    for _ in range(4):
        submit(pool, "a", lambda: release.wait(WAIT_S))
    with pytest.raises(EngineOverloadedError, match="try again"):
        submit(pool, "a", lambda: 1)
    assert submit(pool, "b", lambda: 1).result(WAIT_S) == 1


def test_closing_cancels_what_waits(release):
    pool = FairThreads("test", 1, per_client=1)
    first, second = (submit(pool, "a", lambda: release.wait(WAIT_S)) for _ in range(2))
    pool.close()
    assert second.cancelled()
    release.set()
    assert first.result(WAIT_S)
    with pytest.raises(RuntimeError):
        pool.submit(lambda: 1)
