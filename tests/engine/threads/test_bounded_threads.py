"""Calls in threads of their own: whose turn it is, who is refused, and the stack that they have."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from threading import Event

import pytest
from llguidance import LLMatcher

from slipstream.engine.threads import bounded_threads
from slipstream.engine.threads.bounded_threads import BoundedThreads
from slipstream.errors import EngineOverloadedError
from tests.support.waiting import PATIENCE_S, wait_for


def pool(*, most=1, most_stuck=4, seconds=PATIENCE_S):
    return BoundedThreads(lambda: seconds, most=most, most_stuck=most_stuck, name="calls")


@pytest.fixture
def held():
    """held(pool, client, ...) begins a call that goes on until the test ends, or `release` is set."""
    release = Event()

    def begin(threads, client=None):
        began = Event()

        def call():
            began.set()
            release.wait(PATIENCE_S)

        future = threads.submit(call, client)
        return future, began

    begin.release = release
    yield begin
    release.set()


def test_a_client_has_one_call_at_a_time_and_others_get_the_free_threads(held):
    threads = pool(most=3)
    _, first = held(threads, "many")
    assert first.wait(PATIENCE_S)
    second, second_began = held(threads, "many")
    assert threads.submit(lambda: "mine", "few").result(PATIENCE_S) == "mine"
    assert not second_began.is_set()
    held.release.set()
    second.result(PATIENCE_S)


def test_clients_take_turns(held):
    threads, order = pool(), []
    _, began = held(threads, "first")
    assert began.wait(PATIENCE_S)
    waiting = [
        threads.submit(partial(order.append, f"{client}{i}"), client)
        for client in ("many", "few")
        for i in range(3 if client == "many" else 1)
    ]
    held.release.set()
    for future in waiting:
        future.result(PATIENCE_S)
    assert order == ["many0", "few0", "many1", "many2"]


def test_calls_of_nobody_in_particular_do_not_wait_for_each_other(held):
    threads = pool(most=2)
    assert all(began.wait(PATIENCE_S) for _, began in [held(threads), held(threads)])


def test_a_client_with_too_many_waiting_calls_is_refused_alone(held, monkeypatch):
    monkeypatch.setattr(bounded_threads, "MAX_WAITING", 2)
    threads = pool()
    _, began = held(threads, "many")
    assert began.wait(PATIENCE_S)
    waiting = [held(threads, "many")[0] for _ in range(2)]
    with pytest.raises(EngineOverloadedError, match="of this client wait"):
        threads.submit(lambda: None, "many")
    waiting[0].cancel()  # who gave up does not count
    held(threads, "many")
    held(threads, "few")


def test_a_client_whose_calls_are_stuck_is_refused_and_others_are_served(held):
    threads = pool(seconds=0.05)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            held(threads, "slow")[0].result(PATIENCE_S)
    with pytest.raises(EngineOverloadedError, match="of this client are stuck"):
        threads.submit(lambda: None, "slow")
    assert threads.submit(lambda: 1, "other").result(PATIENCE_S) == 1
    held.release.set()
    wait_for(lambda: not threads._stuck, "the calls did not end")
    assert threads.submit(lambda: 2, "slow").result(PATIENCE_S) == 2


def test_a_call_whose_turn_does_not_come_is_refused_and_not_begun(held, monkeypatch):
    monkeypatch.setattr(bounded_threads, "MIN_TURN_S", 0.0)
    seconds, began = [PATIENCE_S], Event()
    threads = BoundedThreads(lambda: seconds[0], most=1, most_stuck=4, name="calls")
    _, running = held(threads)
    assert running.wait(PATIENCE_S)
    late, nobodys = threads.submit(began.set, "one"), threads.submit(lambda: 1)
    seconds[0] = 0.0
    held.release.set()
    with contextlib.suppress(TimeoutError):  # it is begun, however late
        assert nobodys.result(PATIENCE_S) == 1
    with pytest.raises(EngineOverloadedError, match="others were served"):
        late.result(PATIENCE_S)
    assert not began.is_set()


def test_threads_have_a_large_stack_and_others_keep_theirs():
    grammar = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(6000)) + '\nr6000: "a"'
    with bounded_threads._starting:  # threads of earlier tests may begin others now
        before = threading.stack_size()
    validate = LLMatcher.validate_grammar_with_warnings  # recursive in C: 2,800 rules fill 8 MiB
    assert pool().submit(partial(validate, grammar)).result(PATIENCE_S) == (False, [])
    with bounded_threads._starting:
        assert threading.stack_size() == before


def test_where_no_thread_can_be_started_the_call_is_an_overload(monkeypatch):
    threads = pool()

    def fail(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        future = threads.submit(lambda: 1)
    with pytest.raises(EngineOverloadedError, match="can't start"):
        future.result(PATIENCE_S)
    assert threads.submit(lambda: 1).result(PATIENCE_S) == 1
