"""Log-probabilities whose texts are made when they are read."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from slipstream.outputs import Logprob, PositionLogprobs


def made(given):
    calls.append(given)
    return Logprob(given, "a", -1.0, 1, b"a"), (Logprob(2, "b", -2.0, 2, b"b"),)


calls: list[int] = []


def test_fields_are_made_once_and_when_they_are_read():
    calls.clear()
    late, now = PositionLogprobs.late(made, 5), PositionLogprobs(*made(5))
    calls.clear()
    assert not calls
    assert late.chosen.token == "a"
    assert late.top[0].token_id == 2
    assert calls == [5]
    assert (late, hash(late), repr(late)) == (now, hash(now), repr(now))
    assert [*late] == [5, 2]
    assert 2 in PositionLogprobs.late(made, 5)
    assert PositionLogprobs.late(made, 5)[2].logprob == -2.0
    with pytest.raises(AttributeError, match="'other'"):
        _ = late.other


def test_they_are_copied_like_others():
    now = PositionLogprobs(*made(5))
    assert copy.deepcopy(PositionLogprobs.late(made, 5)) == now
    assert dataclasses.asdict(PositionLogprobs.late(made, 5)) == dataclasses.asdict(now)
