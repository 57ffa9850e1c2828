"""Eviction of cached blocks by value."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.core.cache.block_pool import BlockPool
from slipstream.core.cache.cache_value import ValueOrder
from slipstream.core.cache.invariants import check_pool
from slipstream.core.cache.sessions import (
    EDGES,
    IN_USE,
    NUM_BUCKETS,
    OwnPace,
    Pauses,
    Sessions,
    rate,
)
from slipstream.params.cache_hints import CacheHints
from slipstream.spec.cache import attention_depth
from slipstream.spec.description import read_spec
from tests.core.configs import BLOCK, FULL, config, window
from tests.core.test_scheduler import Engine, request

CONFIGS = Path(__file__).parents[3] / "benchmarks" / "configs"


def engine(**more) -> Engine:
    sizes = dict(max_num_batched_tokens=64, max_model_len=400, num_blocks=24)
    return Engine(config(**{**sizes, **more}))


def run(e: Engine, name: str, prompt, max_tokens: int = 1, **more) -> int:
    """Runs a request to its end; returns the number of its cached tokens."""
    before = len(e.plans)
    e.scheduler.add(request(name, prompt, max_tokens, **more))
    e.run()
    parts = [s for p in e.plans[before:] for s in p.scheduled if s.request_id == name]
    check_pool(e.scheduler.pool)
    return parts[0].num_computed_tokens


def prompt(number: int, length: int = 8 * BLOCK + 2) -> list[int]:
    return [1000 * number + i for i in range(length)]


def pass_time(e: Engine, seconds: float) -> None:
    e.now += seconds


# --- What is learned ----------------------------------------------------------------------------------------------------


def test_a_rate_is_the_best_of_all_horizons():
    hazards = [0.0] * NUM_BUCKETS
    hazards[4] = 0.9
    rates = [rate(hazards, i) for i in range(NUM_BUCKETS)]
    assert (
        rates[0] < rates[1] < rates[2] < rates[3] < rates[4]
    )  # the nearer the return, the more it is worth
    assert rates[5:] == [0.0] * (NUM_BUCKETS - 5)


def test_before_anything_is_learned_the_rate_falls_with_age():
    pauses = Pauses()
    rates = [pauses.rate_at(age, OwnPace()) for age in (0.6, 1, 3, 10, 100, 1000, 10000)]
    assert rates == sorted(rates, reverse=True)


def test_a_session_with_short_pauses_is_expected_sooner():
    pauses, fast, slow = Pauses(), OwnPace(), OwnPace()
    for _ in range(40):
        for seconds, pace in ((4.0, fast), (64.0, slow)):
            bucket = max(i for i, edge in enumerate(EDGES) if edge <= seconds)
            for i in range(bucket + 1):
                pauses.reach(i)
            pauses.end(bucket, seconds, pace)
    assert pauses.rate_at(2, fast) > 2 * pauses.rate_at(2, slow)
    assert pauses.rate_at(40, fast) < pauses.rate_at(40, slow)


def test_pauses_without_a_pace_of_their_own_teach_nothing_about_a_session():
    rng, pauses, paces = random.Random(0), Pauses(), [OwnPace() for _ in range(4)]
    for i in range(4000):
        pauses.end(5, rng.choice((4.0, 64.0)), paces[i % 4])
    assert pauses.slope < 0.5


def test_it_is_learned_after_which_turn_sessions_end():
    """Each session has three turns of the same pace. Some seconds after the third it is worth less than after the second."""
    now = [0.0]
    sessions = Sessions(lambda: now[0], 32768)

    def turn(begin, number):
        session = sessions.arrived([begin] if number > 1 else [], CacheHints())
        assert session.num_turns == number
        sessions.ended(session, [begin], 0, 1)
        now[0] += 3
        sessions.tick()
        return session

    rates = []
    for i in range(40):
        rates = [sessions.rate_of(turn(b"%d" % i, n)) for n in (1, 2, 3)]
        now[0] += 60
    assert rates[2] < rates[1] / 4
    assert sum(sessions._kinds["later text"].ended) == 40  # those of all turns
    assert sessions._later["later text"][2].hazards()[3:5] == pytest.approx([0, 0], abs=0.05)


def test_a_turn_that_was_looked_at_early_follows_what_its_kind_learns():
    kind = Pauses()
    early, late = Pauses(kind), Pauses(kind)
    early.reach(0)
    before = early.rates()[0]
    other = Pauses(kind)
    for _ in range(1000):
        other.reach(0)
        other.end(0, 0.3, OwnPace())
    late.reach(0)
    assert early.rates()[0] == pytest.approx(late.rates()[0], rel=0.1)
    assert early.rates()[0] > 2 * before


def test_requests_that_go_on_from_one_end_at_once_are_one_turn():
    sessions = Sessions(lambda: 0.0, 32768)
    first = sessions.arrived([], CacheHints())
    sessions.ended(first, [b"end"], 0, 1)
    branches = [sessions.arrived([b"end"], CacheHints()) for _ in range(8)]
    assert {id(s) for s in branches} == {id(first)}
    assert first.num_turns == 2


def test_a_turn_that_was_never_seen_is_expected_as_its_kind():
    kind = Pauses()
    for _ in range(40):
        for i in range(4):
            kind.reach(i)
        kind.end(3, 5.0, OwnPace())
    unknown = Pauses(kind)
    ages = (1.0, 3.0, 5.0, 9.0, 30.0)
    pace = OwnPace(4, 1.0)
    assert [unknown.rate_at(a, pace) for a in ages] == [kind.rate_at(a, pace) for a in ages]


# --- Sessions -----------------------------------------------------------------------------------------------------------


def test_a_session_that_returns_outlives_prompts_that_do_not():
    """Each turn under LRU would find nothing: twelve strange prompts come between two of its turns."""
    e = engine()
    text, found = prompt(0), []
    for turn in range(12):
        found.append(run(e, f"turn{turn}", text))
        for i in range(4):
            pass_time(e, 5)
            run(e, f"other{turn}.{i}", prompt(1 + turn * 4 + i))
        text = [*text, *range(3)]
    assert found[0] == 0
    assert all(found[6:])


def test_with_lru_the_same_session_finds_nothing():
    e = engine(eviction="lru")
    text, found = prompt(0), []
    for turn in range(12):
        found.append(run(e, f"turn{turn}", text))
        for i in range(4):
            run(e, f"other{turn}.{i}", prompt(1 + turn * 4 + i))
        text = [*text, *range(3)]
    assert not any(found)


def test_the_next_turn_is_the_same_session_though_its_last_block_differs():
    """Chat templates leave out thoughts of earlier turns, so a prompt's end is not the beginning of what follows."""
    e = engine()
    run(e, "a", prompt(0), max_tokens=6)
    (first,) = set(e.scheduler.kv.sessions.idle)
    run(e, "b", [*prompt(0)[: 7 * BLOCK], 5, 5, 5, 5, 6, 6, 6, 6])
    assert first.num_turns == 2
    assert {s.kind for s in e.scheduler.kv.sessions.idle} == {"later text", "rest"}


def test_a_queued_session_keeps_its_blocks_until_it_runs():
    e = engine(max_num_seqs=1)
    run(e, "a", prompt(0))
    e.scheduler.add(request("long", prompt(1, 14 * BLOCK), 4))
    e.step()
    e.scheduler.add(request("b", [*prompt(0), 1, 2, 3], 1))
    (session,) = [r.session for r in e.scheduler.requests.by_id.values() if r.request_id == "b"]
    assert e.scheduler.kv.sessions.rate_of(session) == IN_USE
    before = len(e.plans)
    e.run()
    (part,) = [s for p in e.plans[before:] for s in p.scheduled if s.request_id == "b"]
    assert part.num_computed_tokens == 8 * BLOCK


def test_a_common_beginning_outlives_the_ends_of_its_sessions():
    e = engine(num_blocks=30)
    common = prompt(0, 6 * BLOCK)
    found = [run(e, f"q{i}", [*common, *prompt(1 + i, 5 * BLOCK)]) for i in range(12)]
    assert found == [0] + [6 * BLOCK] * 11


def test_blocks_are_evicted_from_the_end_of_the_chain():
    e = engine(num_blocks=20)
    run(e, "a", prompt(0, 10 * BLOCK + 2))
    run(e, "b", prompt(1, 12 * BLOCK + 2))
    assert 0 < run(e, "c", prompt(0, 10 * BLOCK + 2)) < 10 * BLOCK


def test_two_salts_never_share_a_block_or_a_session():
    e = engine(num_blocks=60)
    for salt in ("a", "b", ""):
        assert run(e, f"first{salt}", prompt(0), cache_salt=salt) == 0
    for salt in ("a", "b", ""):
        assert run(e, f"second{salt}", [*prompt(0), 1, 2], cache_salt=salt) == 8 * BLOCK
    sessions = e.scheduler.kv.sessions
    assert sorted(s.num_turns for s in sessions.idle) == [2, 2, 2]


def test_two_salts_never_share_a_state():
    e = engine(num_blocks=200, state_slots=60)
    for salt in ("a", "b"):
        assert run(e, f"first{salt}", prompt(0), cache_salt=salt) == 0
        assert run(e, f"second{salt}", [*prompt(0), 1, 2], cache_salt=salt) == 8 * BLOCK


# --- Hints --------------------------------------------------------------------------------------------------------------


def rate_after(seconds: float, hints: CacheHints) -> float:
    now = [0.0]
    sessions = Sessions(lambda: now[0], 32768)
    session = sessions.arrived([], hints)
    session.kept = () if hints.ttl_s is None else ((math.inf, hints.ttl_s),)
    sessions.ended(session, [b"1", b"2"], 0, 2)
    now[0] = seconds
    sessions.tick()
    return sessions.rate_of(session)


def test_a_time_to_live_raises_the_value_until_it_is_over():
    plain = CacheHints()
    assert rate_after(299, CacheHints(ttl_s=300.0)) == pytest.approx(4 * rate_after(299, plain))
    assert rate_after(301, CacheHints(ttl_s=300.0)) == rate_after(301, plain)


def test_what_is_before_a_breakpoint_is_kept_and_what_follows_is_not():
    """Two sessions of eight blocks; of the first, half is marked. Six blocks are evicted."""
    e = engine(num_blocks=21)
    hints = CacheHints(breakpoints=((0.5, 300.0),))
    run(e, "a", prompt(0), cache_hints=hints)
    (session,) = e.scheduler.kv.sessions.idle
    runs = sorted((r.start, len(r.blocks)) for r in session.runs)
    assert runs == [(0, 5), (5 * BLOCK, 3)]  # 17 of 34 tokens
    run(e, "b", prompt(1))
    pass_time(e, 60)
    pool, text = e.scheduler.pool, prompt(0)
    run(e, "c", prompt(2, 9 * BLOCK + 2))
    del e.plans[:]
    assert run(e, "a/2", [*text[: 7 * BLOCK], 1, 2, 3]) >= 4 * BLOCK
    check_pool(pool)
    pass_time(e, 400)
    session = e.scheduler.kv.sessions
    marked = [s for s in session.idle if s.hints.breakpoints or s.kept]
    assert all(session.rate_of(s, 4 * BLOCK) == session.rate_of(s, 9 * BLOCK) for s in marked)


@pytest.mark.parametrize("depth", [1, 16, 17, 100])
def test_the_value_is_raised_up_to_the_breakpoint_for_its_time(depth):
    now = [0.0]
    sessions = Sessions(lambda: now[0], 32768)
    session = sessions.arrived([], CacheHints())
    session.kept = ((16, 3600.0), (100, 300.0))
    sessions.ended(session, [b"1", b"2"], 0, 2)
    for seconds, ends in ((299, 100), (301, 16), (3601, 0)):
        now[0] = seconds
        sessions.tick()
        plain = sessions.rate_of(session, 101)
        assert sessions.rate_of(session, depth) == pytest.approx(
            plain * (4 if depth <= ends else 1)
        )


def test_a_session_that_its_client_ends_is_evicted_first():
    assert rate_after(1, CacheHints(ends=True)) == 0
    e = engine(num_blocks=30)
    run(e, "a", prompt(0))
    run(e, "b", prompt(1), cache_hints=CacheHints(ends=True))
    run(e, "c", prompt(2, 12 * BLOCK))
    run(e, "d", prompt(3, 6 * BLOCK))
    assert run(e, "again", prompt(0)) == 8 * BLOCK
    assert run(e, "again b", prompt(1)) < 8 * BLOCK


def test_the_kind_of_a_pause_is_by_whether_the_answer_called_a_tool():
    """An answer that may call a tool counts as if it did where no token tells."""
    e = engine(num_blocks=60)
    run(e, "s/0", prompt(0), 3)
    answer = e.tokens["s/0"]
    for calls, tokens, kind in (
        (True, [], "call"),
        (True, [99, answer[1]], "call"),
        (True, [99], "text"),
        (False, answer, "text"),
    ):
        hints = CacheHints(calls=calls, call_tokens=tuple(tokens))
        run(e, f"s/{tokens}", prompt(0), 3, cache_hints=hints, cache_salt=f"{calls}{tokens}")
        assert e.tokens[f"s/{tokens}"] == answer
        assert [*e.scheduler.kv.sessions.idle][-1].kind == kind


def test_the_depth_of_attention_is_counted_from_the_spec():
    spec = read_spec(CONFIGS / "llama-3-8b").spec
    weights = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert attention_depth(spec) == 2 * weights / (4 * 4096)
    experts, chosen, active = 3 * 2048 * 768, 8, 2048 * 128
    moe = read_spec(CONFIGS / "qwen3-30b-a3b").spec
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512
    assert attention_depth(moe) == 2 * (attention + chosen * experts + active) / (4 * 4096)
    layers = [
        replace(x, mlp=replace(x.mlp, identity=128)) for x in moe.layers
    ]  # half of the choices
    half = replace(moe, layers=tuple(layers))
    assert attention_depth(half) == 2 * (attention + chosen * experts / 2 + 2 * active) / 4 / 4096
    assert attention_depth(read_spec(CONFIGS / "starcoder2-3b").spec) == math.inf  # windows alone


def test_hints_never_keep_a_request_from_running():
    e = engine(num_blocks=24)
    hints = CacheHints(ttl_s=86400.0, weight=4.0)
    for i in range(6):
        run(e, f"q{i}", prompt(i, 20 * BLOCK), cache_hints=hints)
    assert e.scheduler.pool.num_free == e.scheduler.pool.num_usable


def test_requests_of_one_name_and_salt_share_a_pace():
    sessions = Sessions(lambda: 0.0, 32768)
    a, b = (sessions.arrived([], CacheHints(session="s"), "salt") for _ in range(2))
    other = sessions.arrived([], CacheHints(session="s"), "other")
    assert a.pace is b.pace is not other.pace


# --- Windows and states -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [(None, 4), (8,), (None, 4, 12)])
def test_windows_are_kept_with_their_chain(groups):
    e = engine(
        num_blocks=60 * len(groups), groups=tuple(FULL if w is None else window(w) for w in groups)
    )
    text = prompt(0, 40)
    run(e, "a", text, max_tokens=8)
    assert run(e, "b", [*text, 7, 7, 7, 7, 7]) == 40
    for i in range(30):
        run(e, f"q{i}", prompt(1 + i, 40), max_tokens=4)


def test_the_last_state_of_a_session_outlives_states_that_nobody_continues():
    e = engine(num_blocks=300, state_slots=16, max_num_seqs=1)
    text, found = prompt(0, 30), []
    for turn in range(10):
        found.append(run(e, f"turn{turn}", text))
        for i in range(3):
            pass_time(e, 5)
            run(e, f"other{turn}.{i}", prompt(1 + turn * 3 + i, 30))
        text = [*text, *range(5)]
    check_pool(e.scheduler.kv.kinds[0].pool)
    assert all(found[5:])


# --- The pool with its order --------------------------------------------------------------------------------------------


def test_a_chain_whose_held_end_is_forgotten_is_evicted_by_its_value():
    sessions = Sessions(lambda: 0.0, 100.0)
    pool = BlockPool(6)
    pool.order = order = ValueOrder(sessions, pool, 1)

    def cached(text: bytes) -> list[int]:
        blocks, run = pool.allocate(len(text)), None
        keys = [text[: i + 1] for i in range(len(text))]
        session = sessions.arrived(keys, CacheHints())
        for i, block in enumerate(blocks):
            pool.register(block, keys[i])
            run = order.extend(run, session, text.decode(), block, i)
        return blocks

    chain, other = cached(b"ab"), cached(b"cde")
    pool.release(chain[:1])
    pool.release(other)
    taken = pool.allocate(1)  # passes over the cheaper chain, whose end is held
    assert taken == other[2:]
    pool.drop(chain[1])
    check_pool(pool)
    pool.release([*taken, chain[1]])


class OrderMachine(RuleBasedStateMachine):
    """Chains of blocks that are cached, found again, held and evicted, against what was registered."""

    @initialize(num_blocks=st.integers(6, 30))
    def start(self, num_blocks):
        self.now = 0.0
        self.sessions = Sessions(lambda: self.now, 100.0)
        self.pool = BlockPool(num_blocks)
        self.pool.order = self.order = ValueOrder(self.sessions, self.pool, 1)
        self.names = itertools.count()
        self.running: dict[str, dict] = {}
        self.borrowed: list[int] = []  # by copies to a tier
        self.may_part = False  # a held tail does not keep others' blocks from being taken

    @rule(
        text=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        new=st.integers(0, 4),
        ends=st.booleans(),
    )
    def begin(self, text, new, ends):
        text = [0, 0, *text]
        keys = [bytes(text[: i + 1]) for i in range(len(text))]
        known = list(itertools.takewhile(lambda b: b is not None, map(self.pool.lookup, keys)))
        assert [*self.pool.chain(keys)] == known
        hit = known[: len(text) - 1]
        fresh = len(text) - len(hit)
        if fresh + sum(not self.pool.ref_counts[b] for b in hit) > self.pool.num_free:
            return
        name = f"r{next(self.names)}"
        session = self.sessions.arrived(keys, CacheHints(ends=ends))
        self.pool.hold(hit)
        last, shared, num_shared = self.order.enter(hit, session, name)
        free = {b for b in range(self.pool.num_blocks) if not self.pool.ref_counts[b]}
        blocks = self.pool.allocate(fresh)
        self.may_part = self.may_part or bool(self.borrowed)
        assert len(set(blocks)) == fresh
        assert set(blocks) <= free, "a held block was evicted"
        for i, block in enumerate(blocks, len(hit)):
            if self.pool.register(block, keys[i]):
                last = self.order.extend(last, session, name, block, i)
        self.running[name] = dict(
            session=session, keys=keys, blocks=hit + blocks, run=last, shared=shared, n=num_shared
        )

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9))
    def end(self, which):
        name = list(self.running)[which % len(self.running)]
        found = self.running.pop(name)
        if found["run"] is not None and found["run"].writer == name:
            found["run"].writer = ""
        for shared in found["shared"]:
            self.sessions.close(shared, "shared")
        self.pool.release(found["blocks"])
        self.sessions.ended(found["session"], found["keys"], found["n"], len(found["keys"]))

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0, 4000.0, 200000.0]))
    def wait(self, seconds):
        self.now += seconds
        self.sessions.tick()

    @rule(which=st.integers(0, 40))
    def borrow(self, which):
        cached = [b for b, key in enumerate(self.pool.hashes) if key is not None]
        if cached:
            self.pool.hold([block := cached[which % len(cached)]])
            self.borrowed.append(block)

    @precondition(lambda self: self.borrowed)
    @rule()
    def give_back(self):
        self.pool.release([self.borrowed.pop()])

    @rule(count=st.integers(1, 6))
    def evict(self, count):
        """Blocks are taken, tail before head: of each chain what remains is a beginning."""
        if self.borrowed or self.running or self.may_part:
            return
        count = min(count, self.pool.num_free)
        self.pool.release(self.pool.allocate(count))
        known = set(self.pool.cached_keys())
        assert all(len(key) == 1 or key[:-1] in known for key in known), (
            "a head was evicted before its tail"
        )

    @rule()
    def forget(self):
        self.pool.forget_all()
        self.may_part = self.may_part or bool(self.running)

    @invariant()
    def consistent(self):
        if hasattr(self, "pool"):
            check_pool(self.pool)

    def teardown(self):
        if hasattr(self, "pool"):
            while self.running:
                self.end(0)
            while self.borrowed:
                self.give_back()
            assert len(set(self.pool.allocate(self.pool.num_free))) == self.pool.num_usable
            assert not self.pool.cached_keys()


TestOrder = OrderMachine.TestCase
TestOrder.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
