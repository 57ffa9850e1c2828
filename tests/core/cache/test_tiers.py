"""The tiers below the device's cache, against a store that knows what every block, slot and file holds.

A copy may be done at any time after its order, in any order, or fail. What is copied from the device must not change
meanwhile; what is copied to the device is full of rubbish until it has arrived, and nobody else may write it. The worker of
`test_scheduler.py` finds every wrong number that a request reads.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.config.forms import MAX_DRAFTS
from slipstream.core.cache.invariants import check_pool
from slipstream.core.tiers.rates import RATE_AGE_S, TierRates
from slipstream.core.tiers.tiers import PROBE_BLOCKS
from slipstream.errors import ContextLengthError
from slipstream.messages.finish_reason import FinishReason
from slipstream.params.cache_hints import CacheHints
from tests.core.configs import BLOCK, FULL, config, window
from tests.core.test_scheduler import Engine, check_holders, request

RUBBISH = -7


class Disk:
    num_bytes, limit_bytes, is_writer = 0, 100, True


class Given:
    num_bytes, limit_bytes, num_expired, num_evicted = 0, 100, 0, 0


class Store:
    """Copies that are done when `advance` is called. `given` is what engines hand over to each other."""

    def __init__(
        self,
        num_slots: int,
        on_disk: dict[bytes, tuple] | None,
        state_bytes: int = 0,
        given: dict[bytes, tuple] | None = None,
    ) -> None:
        self.given = {} if given is None else given
        self.exchange = None if given is None else Given()
        self.sizes = [10, state_bytes]
        self.slots = [num_slots, -(-num_slots // 2) if state_bytes else 0]
        self.disk = None if on_disk is None else Disk()
        self.files = {} if on_disk is None else on_disk
        self.host: dict[tuple[int, int], tuple] = {}
        self.cells: dict[tuple[int, int], int] = {}  # the worker's
        self.states: dict[tuple[int, int], int] = {}  # the worker's
        self.waiting: list[tuple] = []
        self.done: list[tuple[int, bool]] = []
        self.lost: set[bytes] = set()

    def on_disk(self, key):
        return key in self.files and key not in self.lost

    def block(self, copy):
        """Contents of the device's block at the end of a copy."""
        if copy.kind:
            return (self.states.get((copy.kind, copy.block), -1),)
        return tuple(self.cells.get((copy.block, i), -1) for i in range(BLOCK))

    def fill(self, copy, values):
        if copy.kind:
            (self.states[copy.kind, copy.block],) = values
        else:
            self.cells.update({(copy.block, i): value for i, value in enumerate(values)})

    def rubbish(self, copy):
        return (RUBBISH,) * (1 if copy.kind else BLOCK)

    def submit(self, copies):
        for copy in copies:
            taken = None
            if copy.source == "device":
                taken = self.block(copy)
            if copy.target == "device":
                assert not any(
                    (other.block, other.kind) == (copy.block, copy.kind) and "device" in other[1:3]
                    for other, _ in self.waiting
                )
                self.fill(copy, self.rubbish(copy))
            if copy.source == "host":
                taken = self.host[copy.kind, copy.slot]
            if copy.target == "host":
                self.host[copy.kind, copy.slot] = self.rubbish(copy)
            assert copy.source != copy.target
            self.waiting.append((copy, taken))

    def advance(self, index=0, fails=False):
        copy, taken = self.waiting.pop(index % len(self.waiting))
        ok = not fails
        if copy.source == "device":
            assert self.block(copy) == taken, "written while it was copied"
            assert RUBBISH not in taken
        if copy.source == "host":
            at = copy.kind, copy.slot
            assert self.host[at] == taken, "a slot was used again while it was copied"
            assert RUBBISH not in taken
        if copy.source == "disk":
            ok = ok and self.on_disk(copy.key)
            taken = self.files.get(copy.key)
            if not ok:
                self.lost.add(copy.key)
        if copy.source == "peer":
            assert copy.address == "peer"
            taken = self.given.get(copy.key)
            ok = ok and taken is not None
        if copy.target == "peer" and ok:
            self.given[copy.key] = taken
        if copy.target == "device":
            assert self.block(copy) == self.rubbish(copy), "written before it arrived"
            if ok:
                self.fill(copy, taken)
        elif copy.target == "host" and ok:
            self.host[copy.kind, copy.slot] = taken
        elif copy.target == "disk" and ok:
            self.files[copy.key] = taken
            self.lost.discard(copy.key)
        self.done.append((copy.number, ok))

    def finished(self):
        found, self.done = self.done, []
        return found

    def clear(self):
        self.files.clear()


def engine(store, depth=1, **settings):
    made = Engine({**config(**settings), "stores": (store,)}, depth)
    made.worker.is_empty = not store.sizes[0]
    store.cells, store.states = made.worker.slots, made.worker.states
    return made


def settle(made):
    """Run until all copies are done."""
    for _ in range(1000):
        if not any(tiers.is_busy for tiers in made.scheduler.tiers):
            return
        for tiers in made.scheduler.tiers:
            while tiers._store.waiting:
                tiers._store.advance()
        made.scheduler.tend()
    raise AssertionError("copies do not end")


def run(made):
    for _ in range(3000):
        if not made.scheduler.has_requests and not made.in_flight:
            return settle(made)
        for tiers in made.scheduler.tiers:
            if tiers._store.waiting:
                tiers._store.advance()
        if not made.step():
            wakeup = made.scheduler.next_wakeup()
            assert wakeup is not None
            made.now = max(made.now + 0.001, wakeup)
    raise AssertionError("requests starve")


class TierMachine(RuleBasedStateMachine):
    """Arrivals, steps, cancels, copies that end or fail, restarts of the engine over one disk: in any order."""

    @initialize(
        num_blocks=st.integers(6, 20),
        max_num_seqs=st.integers(1, 4),
        depth=st.integers(1, 2),
        tiers=st.sampled_from(
            [(0, True), (0, False), (0, True), (1, False), (3, False), (3, True), (9, True)]
        ),
        windows=st.sampled_from([(None,), (None,), (5,), (None, 3), (None, 4, 4)]),
        policy=st.sampled_from(["inflight", "inflight", "dynamic"]),
        states=st.sampled_from([0, 0, 2, 5]),
        empty=st.booleans(),
    )
    def start(self, num_blocks, max_num_seqs, depth, tiers, windows, policy, states, empty):
        """`empty`: a model without attention, whose blocks hold nothing."""
        self.state_bytes = 7 * bool(states)
        self.empty = empty and bool(states) and windows == (None,)
        self.num_slots, has_disk = tiers
        self.given: dict[bytes, tuple] = {}
        self.files = {} if has_disk else None
        self.depth = depth
        self.settings = dict(
            num_blocks=num_blocks * len(windows),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=9,
            groups=tuple(FULL if w is None else window(w) for w in windows),
            policy=policy,
            state_slots=states * (2 + MAX_DRAFTS) * max_num_seqs + states,
        )
        self.names = itertools.count()
        self.make()

    def make(self):
        self.store = Store(self.num_slots, self.files, self.state_bytes, self.given)
        if self.empty:
            self.store.sizes[0] = self.store.slots[0] = 0
        self.engine = engine(self.store, self.depth, **self.settings)
        self.added: dict[str, int] = {}

    @rule(
        start=st.integers(0, 2),
        length=st.sampled_from([BLOCK, 2 * BLOCK + 1, 3 * BLOCK, 15, 17, 22]),
        max_tokens=st.integers(1, 6),
        priority=st.integers(0, 1),
        n=st.sampled_from([1, 1, 2]),
        deadline=st.sampled_from([None, None, 3.0]),
        handover=st.sampled_from(["", "", "from", "to", "both"]),
    )
    def add(self, start, length, max_tokens, priority, n, deadline, handover):
        name = f"q{next(self.names)}"
        for i in range(n):
            spec = request(
                f"{name}/{i}",
                range(start, start + length),
                max_tokens,
                priority=priority,
                arrival=self.engine.now,
                fork_of=f"{name}/0" if i else None,
                deadline=None if deadline is None else self.engine.now + deadline,
                handover_from="peer" if handover in ("from", "both") else "",
                hands_over=handover in ("to", "both"),
            )
            try:
                self.engine.scheduler.add(spec)
            except ContextLengthError:
                return
            self.added[spec.request_id] = max_tokens

    @rule(seconds=st.sampled_from([0.02, 0.02, 0.5]))
    def step(self, seconds):
        self.engine.now += seconds
        self.engine.step()

    @rule(index=st.integers(0, 9), fails=st.sampled_from([False, False, False, True]))
    def copy(self, index, fails):
        if self.store.waiting:
            self.store.advance(index, fails)

    @rule()
    def finish(self):
        run(self.engine)

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.added)))
        self.engine.take(self.engine.scheduler.abort([name]))

    @rule()
    def forget(self):
        self.engine.scheduler.reset_prefix_cache()

    @rule()
    def evict(self):
        """Other requests took all the device's blocks since."""
        self.engine.scheduler.kv.forget_all()

    @rule(data=st.data())
    def lose_a_file(self, data):
        if self.files:
            del self.files[data.draw(st.sampled_from(sorted(self.files)))]
        if self.given:
            del self.given[data.draw(st.sampled_from(sorted(self.given)))]

    @rule()
    def fail(self):
        if self.engine.in_flight:
            self.engine.in_flight.clear()
            self.engine.take(self.engine.scheduler.fail_all(FinishReason.ERROR, "broken"))

    @rule()
    def restart(self):
        """kill −9: only the disk is left, and what was handed over to others."""
        self.make()

    @invariant()
    def pools_are_sound(self):
        if hasattr(self, "engine"):
            scheduler = self.engine.scheduler
            check_pool(scheduler.pool)
            check_holders(scheduler)
            tiers = scheduler.kv.tiers
            hosts = [pool for pool in tiers._hosts if pool is not None]
            for host in hosts:
                check_pool(host)
            assert sum(sum(host.ref_counts) - 1 for host in hosts) <= len(tiers._after)
            for kind in scheduler.kv.kinds:
                check_pool(kind.pool)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        run(self.engine)
        scheduler = self.engine.scheduler
        assert set(self.engine.ends) == set(self.added)
        assert scheduler.pool.num_free == scheduler.pool.num_usable, "a block leaked"
        pools = [*scheduler.kv.tiers._hosts, *scheduler.slot_pools]
        assert all(p is None or p.num_free == p.num_usable for p in pools), "a slot leaked"
        assert not scheduler.kv.tiers._loading
        assert not scheduler.kv.tiers._arrived
        assert not scheduler.kv.tiers._loads
        assert not scheduler.kv.tiers._handing


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(
    max_examples=100, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)


# --- One at a time --------------------------------------------------------------------------------------------------------


PROMPT = range(4 * BLOCK + 2)


def stored(num_slots=0, **settings):
    """An engine whose device has forgotten a prompt that the tiers have."""
    store = Store(num_slots, {})
    made = engine(store, **settings)
    made.scheduler.add(request("p/1", PROMPT))
    run(made)
    made.scheduler.pool.forget_all()
    return made, store


@pytest.mark.parametrize("num_slots", [0, 9])
def test_what_the_device_forgot_is_loaded(num_slots):
    made, store = stored(num_slots)
    assert len(store.files) == 5  # the answer's whole block as well
    made.scheduler.add(request("p/2", PROMPT))
    made.step()
    assert store.waiting
    assert made.scheduler.num_running == 0
    run(made)
    assert made.tokens["p/2"] == made.tokens["p/1"]
    stats = made.scheduler.stats()
    assert stats.prefix_hits == 4 * BLOCK
    assert (stats.tiers.host_hit_tokens, stats.tiers.disk_hit_tokens) == (
        (4 * BLOCK, 0) if num_slots else (0, 4 * BLOCK)
    )


@pytest.mark.parametrize("groups", [(FULL,), (FULL, window(5))])
@pytest.mark.parametrize("states", [0, 8])
def test_another_engine_takes_over_what_a_prompt_left(groups, states):
    given: dict[bytes, tuple] = {}
    settings = dict(groups=groups, state_slots=states * (2 + MAX_DRAFTS))
    first, second = (engine(Store(0, None, 7 * bool(states), given), **settings) for _ in range(2))
    first.scheduler.add(request("p/1", PROMPT, 1, hands_over=True))
    run(first)
    assert len(given) == 4 + (len(groups) - 1) + bool(states)
    second.scheduler.add(request("p/1", PROMPT, handover_from="peer"))
    second.step()
    assert second.scheduler.num_running == 0
    run(second)
    stats = second.scheduler.stats()
    assert stats.prefix_hits == stats.tiers.peer_hit_tokens == 4 * BLOCK
    assert second.tokens["p/1"][0] == first.tokens["p/1"][0]
    assert not second.scheduler.kv.tiers._keeps  # what came is in no tier


def test_a_prompt_that_was_cancelled_hands_nothing_over():
    given: dict[bytes, tuple] = {}
    made = engine(Store(0, None, given=given))
    made.scheduler.add(request("p/1", PROMPT, 9, hands_over=True))
    made.step()
    made.take(made.scheduler.abort(["p/1"]))
    run(made)
    assert not given


@pytest.mark.parametrize("num_slots", [0, 30])
def test_a_request_that_probed_a_tier_and_loads_the_rest_gives_all_back(num_slots):
    prompt, store = range((PROBE_BLOCKS + 6) * BLOCK + 2), Store(num_slots, {})
    made = engine(store, num_blocks=60, max_num_batched_tokens=64)
    made.scheduler.add(request("p/1", prompt))
    run(made)
    made.scheduler.pool.forget_all()
    made.scheduler.kv.tiers.rates.prefill.learn(
        1, 10.0, made.now
    )  # loading is not measured yet: a few blocks are tried
    made.scheduler.add(request("p/2", prompt))
    run(made)
    assert made.tokens["p/2"] == made.tokens["p/1"]
    assert made.scheduler.stats().tiers.loaded_blocks == PROBE_BLOCKS + 6
    check_holders(made.scheduler)
    assert made.scheduler.pool.num_free == made.scheduler.pool.num_usable


def test_others_go_on_while_a_request_waits_for_its_blocks():
    made, store = stored()
    made.scheduler.add(request("p/2", PROMPT))
    made.scheduler.add(request("other", [50, 51, 52]))
    made.step()
    assert [s.request_id for s in made.plans[-1].scheduled] == ["other"]
    while store.waiting:
        store.advance()
    made.step()
    assert "p/2" in [s.request_id for s in made.plans[-1].scheduled]
    run(made)


def test_two_requests_with_one_prompt_load_it_once():
    made, store = stored()
    made.scheduler.add(request("p/2", PROMPT))
    made.scheduler.add(request("p/3", PROMPT))
    made.step()
    assert len(store.waiting) == 4
    run(made)
    assert made.tokens["p/2"] == made.tokens["p/3"] == made.tokens["p/1"]
    assert made.scheduler.stats().tiers.loaded_blocks == 4


def test_a_block_that_is_gone_is_computed():
    made, store = stored()
    made.scheduler.add(request("p/2", PROMPT))
    made.step()
    store.advance(1, fails=True)
    run(made)
    assert made.tokens["p/2"] == made.tokens["p/1"]
    assert made.scheduler.stats().tiers.failed_blocks == 1


def test_a_request_is_cancelled_while_its_blocks_come():
    made, store = stored()
    made.scheduler.add(request("p/2", PROMPT))
    made.step()
    store.advance()
    made.take(made.scheduler.abort(["p/2"]))
    assert made.scheduler.pool.num_free < made.scheduler.pool.num_usable  # they are being written
    settle(made)
    assert made.scheduler.pool.num_free == made.scheduler.pool.num_usable
    assert made.scheduler.stats().tiers.loaded_blocks == 4


def test_what_is_on_its_way_when_all_is_forgotten_is_not_found():
    made, store = stored(num_slots=9)
    made.scheduler.add(request("p/2", PROMPT))
    made.step()
    assert [copy.source for copy, _ in store.waiting] == ["host"] * 4
    made.scheduler.reset_prefix_cache()
    while store.waiting:
        store.advance()
    made.scheduler.tend()
    assert made.scheduler.stats().tiers.loaded_blocks == 4
    assert not made.scheduler.pool.cached_keys()
    run(made)
    assert made.tokens["p/2"] == made.tokens["p/1"]
    assert made.scheduler.pool.num_free == made.scheduler.pool.num_usable


def test_a_load_finds_no_room_in_the_blocks_that_it_goes_on_from():
    """The blocks of the prefix are free until the load holds them."""
    store = Store(0, {})
    made = engine(store)
    made.scheduler.add(request("p/1", PROMPT))
    run(made)
    pool = made.scheduler.pool
    for key in pool.cached_keys()[2:]:
        pool.forget(pool.lookup(key))
    others = pool.allocate(pool.num_free - 3)
    made.scheduler.add(request("p/2", PROMPT))
    made.step()
    assert not store.waiting
    pool.release(others)
    run(made)
    assert made.tokens["p/2"] == made.tokens["p/1"]


def test_a_request_that_was_preempted_looks_into_the_tiers_again():
    store = Store(0, {})
    made = engine(store)
    made.scheduler.add(request("p/1", PROMPT, 12))
    made.step()
    made.step()
    settle(made)
    requests = made.scheduler.requests
    requests.preempt(requests.by_id["p/1"])
    made.scheduler.pool.forget_all()
    made.step()
    assert [copy.source for copy, _ in store.waiting] == ["disk"] * 4
    run(made)


def test_a_load_that_takes_too_long_is_not_waited_for():
    made, _ = stored()
    made.scheduler.add(request("p/2", PROMPT))
    made.step()
    made.now += 100
    for _ in range(20):
        made.step()
    assert made.ends["p/2"] is FinishReason.LENGTH
    assert made.tokens["p/2"] == made.tokens["p/1"]
    assert made.scheduler.stats().tiers.late_loads == 1
    settle(made)
    assert made.scheduler.pool.num_free == made.scheduler.pool.num_usable


def test_a_late_load_of_a_request_that_is_gone_is_not_waited_for():
    made, _ = stored()
    for name in ("p/2", "p/3"):
        made.scheduler.add(request(name, PROMPT))
    made.step()
    made.take(made.scheduler.abort(["p/2"]))
    made.now += 100
    for _ in range(20):
        made.step()
    assert made.tokens["p/3"] == made.tokens["p/1"]
    assert made.scheduler.stats().tiers.late_loads == 1
    settle(made)
    assert made.scheduler.pool.num_free == made.scheduler.pool.num_usable


def test_what_a_failed_step_was_to_write_is_not_stored():
    store = Store(0, {})
    made = engine(store)
    made.scheduler.add(request("p/1", PROMPT))
    made.scheduler.schedule()
    made.scheduler.tend()
    assert not store.waiting
    made.scheduler.fail_all(FinishReason.ERROR, "broken")
    made.scheduler.tend()
    assert not store.waiting
    assert not store.files


def test_so_many_blocks_are_stored_at_once():
    store = Store(0, {})
    made = engine(store)
    made.scheduler.add(request("p/1", PROMPT))
    made.step()
    found = len(made.scheduler.kv.tiers._offers)
    assert found > 2
    made.scheduler.tend(1)
    assert (len(store.waiting), len(made.scheduler.kv.tiers._offers)) == (1, found - 1)
    made.scheduler.tend()
    assert len(store.waiting) > 1
    run(made)


def test_the_last_holder_of_a_full_host_gives_way_to_the_disk():
    made, store = stored(num_slots=2)
    assert len(store.files) == 5
    made.scheduler.add(request("p/2", PROMPT))
    run(made)
    assert made.tokens["p/2"] == made.tokens["p/1"]


def test_loading_is_chosen_by_what_it_took():
    rates = TierRates()
    assert rates.pays(0, 4, 64, 0.0) is True  # nothing is known yet
    rates.launched(1, 0.0, 100, 100)
    rates.ended(1, 1.0)  # 10 ms a token
    assert rates.pays(0, 4, 64, 1.0) is None  # a few are loaded
    rates.disk.learn(4, 0.4, 1.0)
    assert rates.pays(0, 4, 64, 2.0) is True  # 0.4 s against 0.64 s
    assert rates.pays(0, 4, 30, 2.0) is False
    assert rates.pays(4, 0, 30, 2.0) is None
    rates.launched(2, 2.0, 10, 100)  # decodes
    rates.ended(2, 9.0)
    assert rates.prefill.seconds == 0.01
    assert rates.pays(0, 4, 30, 2.0 + RATE_AGE_S) is None
    assert rates.disk.seconds is None


def test_a_slow_disk_is_left_alone_and_tried_again():
    made, store = stored(num_blocks=40, max_model_len=128)
    tiers, long = made.scheduler.kv.tiers, range(100, 100 + 20 * BLOCK)
    made.scheduler.add(request("l/1", long, 1))
    run(made)
    tiers.rates.prefill.learn(1000, 1.0, made.now)
    tiers.rates.disk.learn(10, 100.0, made.now)
    made.scheduler.pool.forget_all()
    made.scheduler.add(request("l/2", long, 1))
    made.step()
    assert not store.waiting
    run(made)
    assert tiers.stats().declined_tokens == 19 * BLOCK
    made.scheduler.pool.forget_all()
    made.now += RATE_AGE_S + 1
    made.scheduler.add(request("l/3", long, 1))
    made.step()
    assert len(store.waiting) == PROBE_BLOCKS
    run(made)
    assert tiers.stats().loaded_blocks == 19  # the measured rate says yes
    assert made.tokens["l/3"] == made.tokens["l/2"] == made.tokens["l/1"]


@pytest.mark.parametrize(
    ("busy", "seconds"),
    [(False, 5.0), ("before", 5.0), ("all the time", None), ("after a look", 2.0)],
)
def test_a_load_is_not_charged_for_a_step_that_nobody_looked_during(busy, seconds):
    made, store = stored(num_blocks=40, max_model_len=128)
    tiers = made.scheduler.kv.tiers
    before = made.now
    if busy == "before":  # a step ended, and nothing was looked for since
        tiers.rates.ended(998, before)
        made.now = before = before + 1.0
    made.scheduler.add(request("p/2", PROMPT, 1))
    made.step()
    assert len(store.waiting) == 4
    if busy == "after a look":
        made.now += 2.0
        made.scheduler.tend()
    while store.waiting:
        store.advance()
    if busy in ("all the time", "after a look"):  # another request's step
        tiers.rates.launched(999, made.now, 0, 1)
        tiers.rates.ended(999, before + 5.0)
    made.now = before + 5.0
    made.scheduler.tend()
    expected = None if seconds is None else seconds / (4 * store.sizes[0])
    assert tiers.rates.disk.seconds == expected
    tiers.rates.prefill.learn(1, 1e-6, made.now)
    assert tiers.rates.pays(0, 1000 * store.sizes[0], 1, made.now) is (
        None if seconds is None else False
    )


def test_blocks_that_come_within_a_step_are_followed_by_all_others():
    made, store = stored(num_blocks=60, max_model_len=128)
    tiers, long = made.scheduler.kv.tiers, range(100, 100 + 20 * BLOCK)
    made.scheduler.add(request("l/1", long, 1))
    run(made)
    tiers.rates.prefill.learn(1000, 1.0, made.now)
    made.scheduler.pool.forget_all()
    made.scheduler.add(request("l/2", long, 1))
    made.step()
    for count in (PROBE_BLOCKS, 19 - PROBE_BLOCKS):
        assert len(store.waiting) == count
        while store.waiting:
            store.advance()
        made.now += 1.0
        tiers.rates.ended(999, made.now)  # another request's step
        made.step()
    run(made)
    assert made.tokens["l/2"] == made.tokens["l/1"]
    assert tiers.rates.disk.seconds is None


# --- Sessions that pause ----------------------------------------------------------------------------------------------------


def paused(num_slots=40, num_turns=6, **settings):
    """An engine, and a session that has paused for ten seconds each time. Its blocks are in a tier, and not on the device."""
    made = engine(Store(num_slots, {}), **{"num_blocks": 24, "max_model_len": 200, **settings})
    text = [*PROMPT]
    for turn in range(num_turns):
        made.scheduler.add(request(f"turn{turn}", text))
        run(made)
        text = [*text, *range(3)]
        if turn < num_turns - 1:
            made.now += 10.0
    made.scheduler.pool.forget_all()
    return made, text


def wait(made, seconds):
    made.now += seconds
    made.scheduler.tend()
    settle(made)


@pytest.mark.parametrize("num_slots", [0, 40])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, window(6)), (window(6),)])
def test_a_session_whose_return_is_near_finds_its_blocks_on_the_device(num_slots, groups):
    made, text = paused(num_slots, groups=groups, num_blocks=40)
    wait(made, 1.0)
    assert made.scheduler.stats().tiers.prefetched_tokens == 0
    wait(made, 5.0)
    before = made.scheduler.stats()
    assert before.tiers.prefetched_tokens > 4 * BLOCK
    assert made.scheduler.pool.num_free == made.scheduler.pool.num_usable
    made.scheduler.add(request("next", text))
    made.step()
    assert made.scheduler.num_running == 1, "it waits for no tier"
    run(made)
    after = made.scheduler.stats()
    hits = after.prefix_hits - before.prefix_hits
    assert hits == after.tiers.prefetch_hit_tokens == before.tiers.prefetched_tokens
    check_holders(made.scheduler)


def test_without_a_learned_pace_nothing_is_brought_back():
    made, _ = paused(num_turns=2)
    for _ in range(40):
        wait(made, 1.0)
    assert made.scheduler.stats().tiers.prefetched_tokens == 0


def test_blocks_that_are_worth_more_are_not_evicted_for_a_session():
    """The device is full of a session that its client wants to be kept."""
    made, _ = paused()
    hints = CacheHints(ttl_s=3600.0, weight=8.0)
    made.scheduler.add(request("kept", range(500, 500 + 22 * BLOCK), 1, cache_hints=hints))
    run(made)
    kept = made.scheduler.pool.cached_keys()
    for _ in range(40):
        wait(made, 1.0)
    assert made.scheduler.stats().tiers.prefetched_tokens == 0
    assert made.scheduler.pool.cached_keys() == kept
    assert all(
        not session.keys for session in made.scheduler.kv.sessions.idle if session.bucket > 5
    )


def test_blocks_that_are_worth_less_make_room():
    made, text = paused()
    made.scheduler.add(
        request("ended", range(500, 500 + 22 * BLOCK), 1, cache_hints=CacheHints(ends=True))
    )
    run(made)
    wait(made, 6.0)
    assert made.scheduler.stats().tiers.prefetched_tokens > 4 * BLOCK
    check_pool(made.scheduler.pool)
    made.scheduler.add(request("next", text))
    made.step()
    assert made.scheduler.num_running == 1
    run(made)


def test_a_request_that_comes_while_its_blocks_are_brought_back_waits_for_them():
    made, text = paused()
    made.now += 6.0
    made.scheduler.tend()
    assert made.scheduler.kv.tiers.is_copying
    made.scheduler.add(request("next", text))
    made.step()
    assert made.scheduler.num_running == 0
    run(made)
    tiers = made.scheduler.stats().tiers
    assert tiers.prefetch_hit_tokens == tiers.prefetched_tokens
    assert tiers.host_hit_tokens == 0
    check_holders(made.scheduler)


def test_brought_back_blocks_are_forgotten_with_all_others():
    made, text = paused()
    made.now += 6.0
    made.scheduler.tend()
    made.scheduler.reset_prefix_cache()
    settle(made)
    assert not made.scheduler.pool.cached_keys()
    check_pool(made.scheduler.pool)
    made.scheduler.add(request("next", text))
    run(made)
