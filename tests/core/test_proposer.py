"""Proposers without a model, against a plain search."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.drafts import proposer
from slipstream.core.drafts.proposer import LookUp, PairIndex, RecentAnswers

TOKENS = st.lists(st.integers(0, 2), max_size=40)


def longest_suffix(own, tokens, most, *, same):
    """(place, length) of the longest run in `tokens` that ends `own`, of equals the latest."""
    best = (-1, 0)
    for place in range(1, len(tokens) - same):
        length = 0
        while (
            length < min(most, place + 1, len(own)) and own[-1 - length] == tokens[place - length]
        ):
            length += 1
        if length >= max(2, best[1]):
            best = place, length
    return best


@settings(max_examples=120)
@given(tokens=TOKENS, cuts=st.lists(st.integers(1, 9), max_size=4), most=st.integers(1, 12))
def test_the_longest_run_of_its_own_text_goes_on(tokens, cuts, most):
    """The text may grow between proposals."""
    look_up = LookUp()
    grown = []
    for count in [*cuts, len(tokens)]:
        grown += tokens[len(grown) : len(grown) + count]
        found = look_up.propose(grown, most)
        place, length = (
            longest_suffix(grown, grown, proposer.MAX_MATCH, same=True)
            if len(grown) > 1
            else (-1, 0)
        )
        assert found.match == length
        if length:
            endless = list(grown)
            for i in range(most):
                endless.append(endless[place + 1 + i])
            assert found.tokens == tuple(endless[len(grown) :])
        else:
            assert found.tokens == ()


@settings(max_examples=120)
@given(
    own=st.lists(st.integers(0, 2), min_size=2, max_size=12), other=TOKENS, most=st.integers(2, 6)
)
def test_runs_of_another_text(own, other, most):
    index = PairIndex()
    index.add(other, len(other))
    assert index.longest(own, other, most) == longest_suffix(own, other, most, same=False)


def test_least_and_longest_run():
    text = [1, 2, 3, 4, 9, 2, 3, 4, 8, 3, 4, 7, 1, 2, 3, 4]
    assert LookUp().propose(text, 1) == ((9,), 4)
    assert LookUp(most_match=3).propose(text, 1) == ((8,), 3)  # as long, and later
    assert LookUp(most_match=2).propose(text, 2) == ((7, 1), 2)
    assert LookUp(least=5).propose(text, 1) == ((), 0)


def test_an_encoders_text_and_ended_answers_are_searched():
    assert LookUp(text=(5, 6, 7, 8)).propose([0, 5, 6], 3) == ((7, 8), 2)
    traffic = RecentAnswers()
    traffic.add([1, 2, 3])
    traffic.add([4, 1, 2, 9])
    assert LookUp(traffic=traffic).propose([7, 1, 2], 3) == (
        (9,),
        2,
    )  # up to where that answer ended
    assert LookUp(traffic=traffic).propose([2, 4, 1, 2], 3) == ((9,), 3)
    assert LookUp(traffic=traffic).propose([5, 2, 9], 3) == ((), 2)
    assert LookUp().propose([7, 1, 2], 3) == ((), 0)


def test_traffic_is_bounded(monkeypatch):
    monkeypatch.setattr(proposer, "MAX_TRAFFIC", 40)
    traffic = RecentAnswers()
    for i in range(30):
        traffic.add([2 * i, 2 * i + 1, 3, 4])
    assert sum(len(tokens) for tokens, _ in traffic.generations) <= 60
    assert LookUp(traffic=traffic).propose([58, 59], 2).tokens == (3, 4)
    assert LookUp(traffic=traffic).propose([0, 1], 2).tokens == ()


def test_of_a_long_prompt_the_end_is_searched(monkeypatch):
    monkeypatch.setattr(proposer, "MAX_INDEXED", 8)
    text = [1, 2, 3, *range(10, 20), 4, 5, 6, 4, 5]
    assert LookUp().propose(text, 1) == ((6,), 2)
    assert LookUp().propose([*text, 1, 2], 1) == ((), 0)
