"""Lanes of a grammar: further lexers for many requests."""

from types import SimpleNamespace

from slipstream.engine.grammars import state
from slipstream.errors import EngineOverloadedError


def lane():
    return SimpleNamespace(is_error=lambda: False), None


def test_a_lane_that_found_no_thread_is_made_with_a_later_request(monkeypatch):
    tried = []

    def start(work, name):
        tried.append(name)
        if len(tried) == 1:
            raise EngineOverloadedError("no thread")
        work()

    monkeypatch.setattr(state, "start_thread", start)
    lanes = state.Lanes(lane(), lane, seconds=0.1)
    numbers = {lanes.take(most=2)[0] for _ in range(state.PARALLEL_ROWS + 3)}
    assert len(tried) == 2
    assert numbers == {0, 1}
