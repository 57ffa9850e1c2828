"""How many drafts are verified: by acceptance and measured costs."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.forms import HeadDrafts, NgramDrafts, SuffixDrafts
from slipstream.core.cache.kv_cache_manager import KVCacheManager
from slipstream.core.drafts.chains import Chains
from slipstream.core.drafts.proposer import Proposal, Proposer
from slipstream.core.participants.speculation import LEVELS, Acceptance, Drafting, Speculation
from slipstream.core.request import Request
from slipstream.core.step_times import (
    COUNTS,
    NUM_TIMES,
    STALE,
    SURE_STALE,
    StepCosts,
    _near,
    seconds_from,
)
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import StepTime
from slipstream.params.sampling import SamplingParams
from tests.core.configs import config


class Always(Proposer):
    def __init__(self, match=9, count=16):
        self.match, self.count = match, count

    def propose(self, tokens, most):
        return Proposal((1,) * min(most, self.count), self.match)


class Everyone(tuple):
    def __contains__(self, participant):
        return True


EVERYONE = Everyone()
PROPOSERS: dict[Request, Proposer] = {}


class Told(Speculation):
    """Speculation whose requests have the proposers that they were made with."""

    def _proposer(self, request):
        return PROPOSERS.get(request) or super()._proposer(request)


def decoding(proposer=None, name="a", max_tokens=100):
    spec = EngineRequest(
        request_id=name,
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(),
        max_tokens=max_tokens,
    )
    request = Request(spec, (0, 0.0, 0), b"", 1)
    request.kv = KVCacheManager(config()["cache"], 9, "")
    request.num_computed_tokens = 2
    request.participants = EVERYONE
    if proposer is not None:
        PROPOSERS[request] = proposer
    return request


def timed(costs, *known):
    for num_seqs, num_tokens, seconds in known:
        for _ in range(NUM_TIMES):
            costs.add(num_seqs, num_tokens, seconds)


def auto(*known):
    speculation = Told(NgramDrafts())
    timed(speculation.costs, *known)
    return speculation


def test_nothing_before_plain_steps_were_timed():
    request = decoding(Always())
    assert not auto().choose([request])
    assert request.drafts == ()


@pytest.mark.parametrize(
    ("seconds_of_17", "expected"),
    [(1.05, range(8, 17)), (17.0, range(1)), (5.0, range(1, 10))],
    ids=["free", "as many steps", "a quarter each"],
)
def test_as_many_as_pay(seconds_of_17, expected):
    """A step of 17 tokens that costs like one, like 17, or like five."""
    speculation, request = auto((1, 1, 1.0), (1, 16, seconds_of_17)), decoding(Always())
    speculation._acceptance.add(9, 16, 8)
    assert not speculation.choose([request])
    assert len(request.drafts) in expected


def test_those_that_survive_go_first():
    """The request with the longer match, and the one that was right more often."""
    speculation = auto((2, 2, 1.0), (2, 5, 1.6), (2, 8, 2.2))
    first, second = decoding(Always(2), "a"), decoding(Always(20), "b")
    speculation.choose([first, second])
    assert len(first.drafts) < len(second.drafts)
    first, second = decoding(Always(9), "a"), decoding(Always(9), "b")
    for request, right in ((first, 4), (second, 0)):
        for _ in range(20):
            own = speculation.drafting.setdefault(request, Drafting(PROPOSERS[request]))
            own.acceptance.add(9, 4, right)
    speculation.choose([first, second])
    assert len(first.drafts) > len(second.drafts) == 0


def test_drafts_wait_for_the_tokens_that_they_follow():
    speculation = auto((1, 1, 1.0), (1, 16, 1.1))
    request = decoding(Always())
    request.num_computed_tokens, request.num_pending = 3, 1
    assert speculation.choose([request])
    assert request.drafts == ()
    nothing = decoding(Always(count=0))
    nothing.num_computed_tokens, nothing.num_pending = 3, 1
    assert not speculation.choose([nothing])  # it runs ahead


def test_no_drafts_beyond_the_end():
    request = decoding(Always(), max_tokens=4)
    assert not auto((1, 1, 1.0), (1, 16, 1.1)).choose([request])
    assert len(request.drafts) == 3


def test_a_bad_proposer_is_left_alone():
    """Drafts that are never right are tried a few times, and a step with them costs three plain ones."""
    speculation, request, tried = auto((1, 1, 1.0)), decoding(Always()), 0
    for _ in range(200):
        assert not speculation.choose([request])
        if request.drafts:
            tried += 1
            speculation.verified(request, len(request.drafts), 0)
        num = 1 + len(request.drafts)
        speculation.costs.add(1, num, 1.0 if num == 1 else 3.0)
    assert tried < 15


def test_plain_steps_are_timed_behind_plain_ones_only():
    """Plain steps are launched ahead, but not the first one after a step with drafts."""
    speculation = auto()
    steps = [
        (4, False),
        (1, True),
        (1, True),
        (1, True),
        (5, True),
        (1, True),
        (1, True),
        (1, True),
    ]
    now = 0.0
    for num_tokens, only_decodes in steps:
        now += 1.0
        speculation.add_time(now, 1, num_tokens, only_decodes=only_decodes, idle=False)
    times = speculation.costs._times
    assert len(times[1, 1]) == 4
    assert list(times[1, 5]) == [1.0]
    speculation.add_time(now + 1, 1, 1, only_decodes=True, idle=True)
    speculation.add_time(
        now + 9, 1, 5, only_decodes=True, idle=False
    )  # nobody knows since when it ran
    assert len(times[1, 5]) == 1


def test_a_cold_step_is_not_timed():
    """A cold step captures a graph or catches up. If its time counted, its size would not be tried again."""
    speculation = auto()
    for now, num_tokens, is_cold in ((1, 5, False), (9, 5, True), (10, 5, False)):
        speculation.add_time(now, 1, num_tokens, only_decodes=True, idle=False, is_cold=is_cold)
    assert list(speculation.costs._times[1, 5]) == [1.0]


def test_a_models_drafts_have_a_rate_by_position():
    """Two of five are always right: two are worth their time, a third is not, though it is tried as often as the second."""
    speculation = Speculation(HeadDrafts(method="eagle3", model="head"))
    timed(speculation.costs, (1, 1, 1.0), (1, 6, 1.5))
    request = decoding()
    for _ in range(40):
        speculation.choose([request])
        speculation.verified(request, 5, 2)
    assert not speculation.choose([request])
    assert len(request.drafts) == 2


@pytest.mark.parametrize(("num_seqs", "each"), [(100, 5), (200, 2), (600, 0)])
def test_chains_of_a_model_are_alike_and_no_more_than_a_step_verifies(num_seqs, each):
    speculation = Speculation(HeadDrafts(method="eagle3", model="head"))
    timed(speculation.costs, (num_seqs, num_seqs, 1.0), (num_seqs, 4000, 1.1))
    requests = [decoding(name=str(i)) for i in range(num_seqs)]
    for _ in range(4):  # chains grow
        assert not speculation.choose(requests)
    assert [len(request.drafts) for request in requests] == [each] * num_seqs


def test_what_was_prepared_is_taken_once_and_for_as_many_requests():
    """The next step's drafts are chosen while a step is in flight, unless chains become longer or shorter. A request that
    has come since has as many as the others."""
    chains, line, names = Chains(), [(9, 1.0), (27, 1.1)], list("abcdefghi")
    assert chains.best(names, [2] * 9, line) == [2] * 9
    assert chains.prepared(names) is None
    chains.prepare(names, 2, line)
    assert chains.prepared([*names[1:], "j"]) == [2] * 9
    assert chains.prepared(names) is None
    chains.prepare(names, 2, line)
    assert chains.prepared([*names, "j", "k"]) is None  # 11 are too many for what 9 cost
    chains.prepare(names, 2, [(9, 1.0), (18, 9.0)])  # shorter than they are
    assert chains.prepared(names) is None


def test_a_step_takes_what_was_prepared(monkeypatch):
    speculation = Speculation(HeadDrafts(method="eagle3", model="head"))
    timed(speculation.costs, (9, 9, 1.0), (9, 27, 1.1))
    requests = [decoding(name=str(i)) for i in range(9)]
    for _ in range(4):  # chains grow
        assert not speculation.choose(requests)
    length = len(requests[0].drafts)
    assert length > 1
    for request in requests:
        request.drafts = ()
    speculation.prepare(requests)
    monkeypatch.setattr(Chains, "best", None)
    ends = decoding(name="9")
    ends.end = ends.num_tokens + 2  # has room for one draft
    assert not speculation.choose([*requests[:8], ends])
    assert [len(request.drafts) for request in (*requests[:8], ends)] == [*[length] * 8, 1]


@pytest.mark.parametrize(("seconds_of_drafts", "is_kept"), [(1.1, True), (4.0, False)])
def test_plain_steps_are_measured_seldom_while_drafts_are_far_ahead(seconds_of_drafts, is_kept):
    """Steps with two drafts make three tokens in the time of 1.1 plain ones, or two in that of 4."""
    speculation, request = Speculation(HeadDrafts(method="eagle3", model="head")), decoding()
    timed(speculation.costs, (1, 1, 1.0), (1, 3, seconds_of_drafts), (1, 5, 9.0))
    for _ in range(40):
        speculation.choose([request])
        speculation.verified(request, 2, 2 if is_kept else 1)
    assert not speculation.choose([request])
    assert len(request.drafts) == (2 if is_kept else 0)
    for _ in range(STALE + 1):
        speculation.costs.add(1, 3, seconds_of_drafts)
    speculation.choose([request])
    assert bool(request.drafts) == is_kept
    assert speculation.costs.plain(1) is None
    assert speculation.costs.plain(1, SURE_STALE) == 1.0
    for _ in range(SURE_STALE):
        speculation.costs.add(1, 3, seconds_of_drafts)
    speculation.choose([request])
    assert not request.drafts


def test_old_times_are_forgotten():
    costs = StepCosts()
    timed(costs, (1, 1, 1.0), (1, 4, 2.0))
    assert costs.line(1, 1.0) == [(1, 1.0), (4, 2.0)]
    timed(costs, *[(2, 2, 1.0)] * (STALE // NUM_TIMES + 2))
    assert costs.plain(1) is None
    costs._lines.clear()
    assert costs.line(1, 1.0) == [(1, 1.0)]
    timed(costs, (1, 1, 3.0), (1, 4, 5.0))
    assert costs.plain(1) == 3.0
    assert costs.line(1, 3.0) == [(1, 3.0), (4, 5.0)]


def test_sizes_of_more_sequences_that_scale_to_one_size_are_one_point():
    costs = StepCosts()
    timed(costs, (4, 4, 1.0), (4, 5, 2.0), (4, 6, 3.0))
    line = costs.line(3, 1.0)
    assert line == [(3, 1.0), (4, 3.0)]
    assert seconds_from(line, np.array([5]))[0] > 3.0


def test_steps_that_were_measured_beforehand():
    costs = StepCosts()
    costs.expect(
        [StepTime(*t) for t in ((1, 1, 1.0), (1, 2, 1.5), (1, 4, 2.0), (5, 5, 3.0), (5, 10, 3.5))],
        int,
    )
    assert costs.plain(1) == 1.0
    assert costs.line(1, 1.0) == [(1, 1.0), (2, 1.5), (4, 2.0)]
    assert costs.plain(3) == 2.0
    assert costs.line(3, 2.0) == [(3, 2.0), (6, 2.5)]  # as far as both sides are known
    assert costs.line(9, 3.0) == [(9, 3.0), (18, 3.5)]
    timed(
        costs, (1, 2, 3.0)
    )  # twice of what was expected: so are all steps with drafts, and no plain one
    assert costs.plain(1) == 1.0
    assert costs.line(1, 1.0) == [(1, 1.0), (2, 3.0), (4, 4.0)]
    costs.add(3, 6, 50.0)  # one time alone says little of its size
    assert costs.line(3, 2.0)[1][1] < 6
    costs.expect([], int)
    assert costs.plain(3) is None


def test_between_measured_steps_times_follow_the_rows_of_graphs():
    costs = StepCosts()
    times = [
        StepTime(*t)
        for t in (
            (4, 4, 1.0),
            (4, 8, 2.0),
            (12, 12, 5.0),
            (12, 24, 6.0),
            (16, 16, 7.0),
            (16, 32, 7.0),
        )
    ]
    costs.expect(times, lambda rows: -(-rows // 8) * 8)
    assert costs.line(6, costs.plain(6)) == [
        (6, 1.0),
        (12, 4.0),
    ]  # 8 rows as for 4 sequences, and half way from 8 to 24
    assert costs.line(13, costs.plain(13)) == [
        (13, 5.0),
        (26, 7.0),
    ]  # 16 rows as for 12 sequences, 32 as for 16
    assert costs.line(12, 5.0)[1] == (24, 6.0)


def test_measured_beforehand_for_one_sequence():
    costs = StepCosts()
    costs.expect([StepTime(1, 1, 1.0), StepTime(1, 3, 1.5)], int)
    assert costs.line(2, costs.plain(2)) == [(2, 1.0), (6, 1.5)]


def test_between_and_beyond_what_is_known():
    assert seconds_from([(1, 1.0), (5, 2.0), (9, 4.0)], np.array([3, 9])).tolist() == [1.5, 4.0]
    assert (
        seconds_from([(1, 1.0), (5, 3.0), (9, 4.0)], np.array([13])) == 5.0
    )  # not as steeply as the first drafts
    assert 3.0 < seconds_from([(1, 1.0), (5, 3.0)], np.array([7])) < 3.2
    assert 1.0 < seconds_from([(1, 1.0)], np.array([2])) < 1.1  # to be tried


@given(st.integers(1, 5000))
def test_near_counts_are_at_most_a_quarter_below(count):
    near = _near(count)
    assert 3 * count / 4 < near <= count
    assert _near(near) == near
    assert near in COUNTS or near > COUNTS[-1]


def test_acceptance_by_length_of_match():
    acceptance = Acceptance(memory=10)
    acceptance.add(2, 4, 2)  # at matches of 2 and 3 right, at 4 wrong, at 5 not tried
    assert [acceptance.rate(i, 0.5, 1.0) for i in range(4)] == [0.75, 0.75, 0.25, 0.5]
    assert LEVELS[:3] == (3, 4, 5)
    for _ in range(100):
        acceptance.add(2, 1, 1)
    assert acceptance._tried[0] <= 10


def test_a_salts_answers_stay_with_it(monkeypatch):
    monkeypatch.setattr("slipstream.core.participants.speculation.MAX_SALTS", 2)
    speculation = Speculation(SuffixDrafts(num_speculative_tokens=2))

    def ask(salt, *answer):
        made = decoding(None)
        made.spec = SimpleNamespace(encoder_token_ids=(), audio=None, cache_salt=salt, pooled=False)
        made.token_ids.extend(answer)
        speculation.drafting[made] = Drafting(speculation._proposer(made))
        return made

    def proposed(salt):
        made = ask(salt, 7, 8)
        return speculation.drafting[made].proposer.propose([1, 7, 8], 2).tokens

    speculation.ended(ask("x", 7, 8, 9))
    assert proposed("x") == (9,)
    speculation.reset()
    assert proposed("x") == ()
    speculation.ended(ask("x", 7, 8, 9))
    assert proposed("y") == ()
    ask("z")
    assert proposed("x") == ()  # of three salts the oldest is gone


@pytest.mark.parametrize(
    "slope", [0.03, 0.15, 0.6], ids="a further token costs {} of a step".format
)
@pytest.mark.parametrize(("kind", "least"), [("chance", 0.98), ("quoting", 1.8), ("both", 1.3)])
def test_never_slower_than_plain(kind, least, slope):
    """Answers in simulated time quote their prompts, have pairs of tokens that recur by chance, or both in turn.
    What steps take varies by a fifth, and other work slows all of them at times."""
    rng = random.Random(0)
    speculation, now, spent, plain = Speculation(NgramDrafts()), 0.0, 0.0, 0.0
    for n in range(30):
        quotes = kind == "quoting" or (kind == "both" and n % 2)
        prompt = [rng.randrange(1000 if quotes else 12) for _ in range(100)]
        answer = (
            [t if rng.random() < 0.97 else 1 for t in prompt]
            if quotes
            else [rng.randrange(12) for _ in range(100)]
        )
        spec = EngineRequest(
            request_id=str(n),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(),
            max_tokens=100,
        )
        request = Request(spec, (0, 0.0, 0), b"", 1)
        request.kv = KVCacheManager(config()["cache"], 9, "")
        request.participants = EVERYONE
        request.token_ids.append(answer[0])
        while (done := len(request.token_ids) - 100) < 100:
            request.num_computed_tokens = len(request.token_ids) - 1
            assert not speculation.choose([request])
            drafts = request.drafts
            right = next((i for i, t in enumerate(drafts) if t != answer[done + i]), len(drafts))
            seconds = 1 + slope * len(drafts) + 0.03 * bool(drafts)
            spent, plain = spent + seconds, plain + right + 1
            now += seconds * rng.uniform(0.8, 1.2) * (2.5 if n % 5 == 3 else 1.0)
            if drafts:
                speculation.verified(request, len(drafts), right)
            request.token_ids.extend(answer[done : done + right + 1])
            speculation.add_time(
                now, 1, 1 + len(drafts), only_decodes=True, idle=len(request.token_ids) == 200
            )
    if slope == 0.6:  # nothing can win much
        least = min(least, 0.98)
    assert plain / spent > least


def test_the_rates_of_ended_requests_are_forgotten():
    chains = Chains()
    for i in range(500):
        chains.verified(str(i), 2, 1)
        chains.ended(str(i))
    assert len(chains._own.tried) == 64
    assert not chains._own.tried.any()
    assert chains._all.tried[0, 0] == 500
