"""Admission by what the cache holds: sessions that are cached go on, and nobody waits for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core import policy
from slipstream.core.policy import CacheAware, InFlightPolicy
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.requests import ids_of
from slipstream.params.options import Share
from tests.core.configs import BLOCK, config
from tests.core.test_scheduler import Engine, request

PROMPT, TURN, ANSWER = 40 * BLOCK, BLOCK, 2


def engine(num_blocks: int, eviction: str = "value", **more) -> Engine:
    sizes = dict(max_num_batched_tokens=128, max_model_len=4096, max_num_seqs=16)
    e = Engine(config(**{**sizes, **more}, num_blocks=num_blocks, eviction=eviction))
    e.worker.is_empty = True
    return e


class Sessions:
    """Sessions that pause between turns, in virtual time. `joined`: names in the order of admission."""

    def __init__(self, e: Engine, count: int, num_turns: int, pauses, lengths=None, **more) -> None:
        self.e, self.num_turns, self.more, self.joined = e, num_turns, more, []
        self.texts = [
            [1000 * (i + 1)] * (PROMPT if lengths is None else lengths[i]) for i in range(count)
        ]
        self.due = dict.fromkeys(range(count), (0.0, 0))  # session: (time of its next turn, turn)
        self.pauses = pauses
        admitted = e.scheduler.policy.admitted

        def note(found):
            self.joined.append(found.request_id)
            admitted(found)

        e.scheduler.policy.admitted = note

    def run(self, limit: int = 100_000) -> None:
        """Serve all turns."""
        e, open_ = self.e, {}
        while self.due or open_:
            limit -= 1
            assert limit, f"{sorted(open_)} wait for ever"
            for i, (at, turn) in list(self.due.items()):
                if at <= e.now:
                    del self.due[i]
                    name = f"{i}.{turn}"
                    more = {key: value(i) for key, value in self.more.items()}
                    e.scheduler.add(request(name, self.texts[i], ANSWER, arrival=e.now, **more))
                    open_[name] = i, turn
            before = len(e.plans)
            e.step()
            e.now += 0.02 + 0.003 * sum(plan.num_tokens for plan in e.plans[before:])
            for name in [name for name in open_ if name in e.ends]:
                i, turn = open_.pop(name)
                self.texts[i] += [*e.tokens.get(name, []), *[turn] * TURN]
                if turn + 1 < self.num_turns:
                    self.due[i] = e.now + self.pauses(), turn + 1


def hits(e: Engine) -> float:
    stats = e.scheduler.stats()
    return stats.prefix_hits / stats.prefix_queries


def test_sessions_beyond_the_cache_keep_their_contexts():
    """Twelve sessions, a cache for four: in order of arrival each turn evicts another's context."""
    found = {}
    for name in ("aware", "in order"):
        e = engine(4 * 44)
        assert isinstance(e.scheduler.policy, CacheAware)
        if name == "in order":
            e.scheduler.policy = e.scheduler.requests.policy = InFlightPolicy()
        Sessions(e, 12, 8, lambda: 1.0).run()
        found[name] = hits(e), e.now
    assert found["aware"][0] > 0.4 > 0.2 > found["in order"][0]
    assert found["aware"][1] < found["in order"][1] / 1.4


@pytest.mark.parametrize("more", [{"eviction": "lru"}, {"policy": "static"}, {"policy": "dynamic"}])
def test_the_cache_has_no_say_in_other_orders(more):
    assert not isinstance(engine(64, **more).scheduler.policy, CacheAware)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(2, 12),
    share=st.floats(0.15, 1.5),
    priorities=st.integers(1, 2),
    owners=st.integers(1, 3),
    most=st.sampled_from([1, 3, 32]),
)
def test_every_session_ends_and_is_overtaken_only_so_often(
    seed, count, share, priorities, owners, most
):
    rng = random.Random(seed)
    lengths = [rng.randrange(2, 60) * BLOCK for _ in range(count)]
    room = max(max(lengths) // BLOCK + 16, int(share * sum(lengths) / BLOCK))
    e = engine(room + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "MAX_OVERTAKES", most)
        load = Sessions(
            e,
            count,
            4,
            lambda: rng.choice([0.2, 1.0, 5.0]),
            lengths,
            priority=lambda i: i % priorities,
            share=lambda i: Share(f"o{i % owners}", 1.0),
        )
        in_queue, admitted = {}, e.scheduler.policy.admitted

        def bounded(found):
            admitted(found)
            waiting = list(e.scheduler.requests.waiting)
            assert all(r.num_overtaken <= most for r in waiting)
            if priorities == owners == 1 and not found.num_preemptions:
                for other in waiting:  # those before it may each be overtaken as often
                    ahead, since = in_queue.setdefault(
                        other, (sum(r.order < other.order for r in waiting), len(load.joined))
                    )
                    assert len(load.joined) - since <= (most + 1) * (ahead + 1) + e.preemptions

        e.preemptions = 0
        preempt = e.scheduler.requests.preempt

        def counted(found):
            e.preemptions += most + 1  # it is in the queue again
            preempt(found)

        e.scheduler.requests.preempt = counted
        e.scheduler.policy.admitted = bounded
        load.run()
    assert {f"{i}.{turn}" for i in range(count) for turn in range(4)} == set(e.ends)
    assert set(e.ends.values()) == {FinishReason.LENGTH}


def test_costly_requests_join_others_only_within_their_share():
    e = engine(4 * 44)
    pool, kv = e.scheduler.pool, e.scheduler.kv
    admitted, seen = e.scheduler.policy.admitted, []

    def checked(found):
        lacking = len(found.block_keys) - len(found.blocks[0])
        held = pool.num_usable - pool.num_free + lacking
        if kv.num_running > 1 and lacking > 0.5 * len(found.block_keys):
            spare = pool.num_blank(1 << 20) + kv.order.num_below(1 / policy.PATIENCE_S)
            is_due = found.num_overtaken >= policy.MAX_OVERTAKES
            assert held <= policy.RUNNING_SHARE * pool.num_usable or spare >= lacking or is_due
            seen.append(found)
        admitted(found)

    e.scheduler.policy.admitted = checked
    Sessions(e, 12, 8, lambda: 1.0).run()
    assert seen


@pytest.mark.parametrize("blocks", [12 * 60, 2000])
def test_with_a_large_cache_requests_join_in_order(blocks):
    plans = []
    for in_order in (False, True):
        rng = random.Random(3)
        e = engine(blocks)
        if in_order:
            e.scheduler.policy = e.scheduler.requests.policy = InFlightPolicy()
        Sessions(e, 12, 5, lambda rng=rng: rng.choice([0.2, 1.0, 5.0])).run()
        plans.append(e.plans)
    assert plans[0] == plans[1]


def full(e: Engine, count: int = 4) -> None:
    """Fill the cache with sessions that are expected back soon."""
    Sessions(e, count, 6, lambda: 1.0).run()


def first_of(e: Engine):
    return e.scheduler.policy.first(e.scheduler.requests.waiting, e.now)


def busy(e: Engine) -> None:
    """A request that runs and holds more than its share."""
    e.scheduler.add(request("long", [7] * 2 * PROMPT, 400, arrival=e.now))
    for _ in range(4):
        e.now += 0.1
        e.step()


def test_a_cached_session_goes_before_a_new_one_and_a_shorter_one_before_a_longer():
    e = engine(4 * 54 + 2 * 44)
    full(e)
    busy(e)
    text = next(
        list(ids_of(p.token_ids))
        for plan in reversed(e.plans)
        for p in plan.new
        if p.request_id.endswith(".5")
    )
    e.scheduler.add(request("new", [8] * 3 * PROMPT, 2, arrival=e.now))
    e.scheduler.add(request("shorter", [9] * PROMPT, 2, arrival=e.now))
    e.scheduler.add(request("alike", [10] * PROMPT, 2, arrival=e.now))
    assert first_of(e) is None
    e.scheduler.add(request("turn", text, 2, arrival=e.now))
    assert first_of(e).request_id == "turn"
    e.step()
    assert first_of(e) is None
    e.scheduler.abort(["long"])
    e.run()
    order = [s.request_id for plan in e.plans for s in plan.scheduled]
    names = sorted(("new", "shorter", "alike", "turn"), key=order.index)
    assert names == ["turn", "shorter", "alike", "new"]


def test_of_costly_requests_the_earlier_turn_goes_first():
    e = engine(4 * 54 + 2 * 44)
    full(e)
    busy(e)
    for token, name in ((8, "later"), (9, "early")):
        e.scheduler.add(request(name, [token] * PROMPT, 2, arrival=e.now))
    e.scheduler.requests.by_id["later"].session.num_turns = 4
    e.scheduler.abort(["long"])
    e.run()
    order = [s.request_id for plan in e.plans for s in plan.scheduled]
    assert order.index("early") < order.index("later")


def test_chunks_of_prompts_are_short_next_to_decodes_while_the_cache_is_too_small():
    """Twelve sessions, a cache for four and one for all: steps with decodes have two chunks, or all they may."""
    found = {}
    for blocks in (4 * 44, 12 * 60):
        e = engine(blocks, mixed_chunk=16, max_num_batched_tokens=512)
        Sessions(e, 12, 4, lambda: 1.0).run()
        steps = [[s.num_tokens for s in plan.scheduled] for plan in e.plans]
        found[blocks] = {sum(n for n in step if n > 1) for step in steps if 1 in step}
    assert max(found[4 * 44]) == 2 * 16
    assert max(found[12 * 60]) > 256


def test_priority_goes_first_and_other_owners_do_not_wait_for_room():
    e = engine(4 * 54 + 2 * 44)
    full(e)
    busy(e)
    e.scheduler.add(request("new", [8] * PROMPT, 2, arrival=e.now, share=Share("a", 1.0)))
    assert first_of(e) is None
    small = dict(arrival=e.now, share=Share("b", 1.0))
    e.scheduler.add(request("later", [10] * BLOCK, 2, priority=1, **small))
    assert first_of(e) is None  # a lower priority does not overtake
    e.scheduler.add(request("small", [9] * BLOCK, 2, **small))
    assert first_of(e).request_id == "small"
    e.scheduler.add(request("urgent", [11] * BLOCK, 2, priority=-1, **small))
    assert first_of(e).request_id == "urgent"


def test_half_of_the_time_to_a_deadline_is_spent_waiting_at_most():
    e = engine(4 * 54 + 2 * 44)
    full(e)
    busy(e)
    e.scheduler.add(request("new", [8] * PROMPT, 2, arrival=e.now, deadline=e.now + 0.4))
    assert first_of(e) is None
    e.now += 0.15
    assert first_of(e) is None
    e.now += 0.05
    assert first_of(e).request_id == "new"


@pytest.mark.parametrize("num_owners", [1, 2, 1000])
def test_a_step_compares_few_requests_however_many_wait_and_of_how_many_owners(num_owners):
    e = engine(4 * 54)
    full(e)
    busy(e)
    for i in range(1000):
        owner = Share(f"o{i % num_owners}", 1.0)
        e.scheduler.add(request(f"q{i}", [1000 + i] * PROMPT, 1, arrival=e.now, share=owner))
    compared, lacking = [], e.scheduler.policy._lacking
    e.scheduler.policy._lacking = lambda found: compared.append(found) or lacking(found)
    e.step()
    few = policy.MAX_COMPARED + 2  # and the first in order
    assert (256 if num_owners < 3 else 32) <= len(compared) <= few, "it looks at some of each"
