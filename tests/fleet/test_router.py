"""The router and its table of prefixes, against plain sets, over random histories."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.prefix_cache import extend_keys, root_key
from slipstream.fleet.gateway import prefixes
from slipstream.fleet.gateway.prefixes import PrefixStore
from slipstream.fleet.gateway.router import POLICIES, ReplicaState, Router

ROOT = root_key("model")


def chain(*tokens: int, blocks: int) -> list[bytes]:
    keys: list[bytes] = []
    text = [*tokens, *range(1000)][: 4 * blocks]
    extend_keys(keys, ROOT, text, 4, blocks)
    return keys


def key(number: int) -> bytes:
    return random.Random(number).randbytes(16)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.booleans(), st.lists(st.integers(0, 40), max_size=30)),
        max_size=40,
    ),
    st.data(),
)
def test_the_table_is_sets(history, data):
    """Also while it grows, and when slots go and are given out again."""
    store, model = PrefixStore(), dict[int, set[int]]()
    slots = [store.new_slot() for _ in range(6)]
    model = {slot: set() for slot in slots}
    for who, adds, numbers in history:
        slot = slots[who]
        if adds:
            store.stored(slot, map(key, numbers))
            model[slot] |= set(numbers)
        else:
            store.removed(slot, map(key, numbers))
            model[slot] -= set(numbers)
        if data.draw(st.integers(0, 9)) == 0:
            store.free_slot(slot)
            del model[slot]
            if data.draw(st.booleans()):
                store.sweep()
            slots[who] = store.new_slot()
            model[slots[who]] = set()
        for number in range(0, 41, 5):
            assert set(prefixes.slots_of(store.holders(key(number)))) == {
                s for s in model if number in model[s]
            }
    store.sweep()
    assert store.num_blocks == len(set().union(*model.values()))


def test_the_table_grows_and_stays_small():
    store = PrefixStore()
    slots = [store.new_slot() for _ in range(3)]
    keys = [random.randbytes(16) for _ in range(60_000)]
    store.stored(slots[0], keys)
    store.stored(slots[1], keys[::2])
    assert all(store.holders(k) == (0b11 if i % 2 == 0 else 0b01) for i, k in enumerate(keys))
    assert store.num_bytes < 45 * len(keys)
    size = store.num_bytes
    for _ in range(5):  # what is given up makes room
        store.removed(slots[0], keys)
        store.removed(slots[1], keys)
        assert store.num_blocks == 0
        store.stored(slots[2], keys)
        store.removed(slots[2], keys)
    assert store.num_bytes <= 2 * size


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=30), st.integers(1, 12))
def test_match_finds_what_each_holds(depths, length):
    """Exactly for the longest `MAX_GROUPS` numbers of blocks, and at least one block for the others."""
    store, keys = PrefixStore(), chain(blocks=12)
    for depth in depths:
        store.stored(store.new_slot(), keys[:depth])
    found = {
        slot: blocks
        for blocks, mask in store.match(keys[:length])
        for slot in prefixes.slots_of(mask)
    }
    truth = {slot: min(depth, length) for slot, depth in enumerate(depths) if depth}
    assert found.keys() == truth.keys()
    exact = sorted(set(truth.values()), reverse=True)[: prefixes.MAX_GROUPS]
    assert all(found[slot] == (blocks if blocks in exact else 1) for slot, blocks in truth.items())


def router(number: int = 3, **settings) -> Router:
    made = Router(**settings)
    for i in range(number):
        made.add(ReplicaState(id=f"r{i}", block_size=4, prefill_tokens_per_s=1000.0))
    return made


def test_a_prefix_is_found_again():
    fleet, keys = router(), chain(blocks=50)
    for name in fleet.replicas:
        fleet.reset(name, 0, keys[:40] if name == "r2" else keys[:2])
    decision = fleet.choose([keys], 202, now=0.0)
    assert (decision.replica, decision.num_cached_tokens, decision.num_new_tokens) == (
        "r2",
        160,
        42,
    )
    assert fleet.apply("r2", 1, [], keys[10:40])
    assert not fleet.apply("r2", 3, [], [])  # one is missing
    fleet.reset("r2", 3, [])
    fleet.ended(decision, 0.1)
    assert fleet.choose([keys], 202, now=100.0).num_cached_tokens == 8


def test_what_begins_alike_goes_together_before_anybody_told():
    fleet = router(policy="prefix", balance=0.0)
    first = fleet.choose([chain(blocks=50)], 202, now=0.0)
    for name in fleet.replicas:
        fleet.reset(name, 0, [])
    again = fleet.choose([chain(blocks=50)], 202, now=0.01)
    assert again.replica == first.replica
    assert again.num_cached_tokens == 200
    assert (
        fleet.choose([chain(blocks=50)], 202, now=60.0).num_cached_tokens == 0
    )  # nobody ever told of it


def test_a_long_queue_outweighs_a_prefix():
    fleet, keys = router(), chain(blocks=50)
    fleet.reset("r1", 0, keys)
    assert fleet.choose([keys], 202, now=0.0).replica == "r1"
    fleet.update("r1", queued_tokens=5000, running=10, waiting=10)
    assert fleet.choose([keys], 202, now=0.0).replica != "r1"


def test_who_gets_none():
    for policy in POLICIES:
        fleet = router(policy=policy)
        fleet.update("r0", healthy=False)
        fleet.update("r1", draining=True)
        assert fleet.choose([], 8, now=0.0).replica == "r2"
        assert fleet.choose([], 8, now=0.0, exclude=["r2"]) is None
        fleet.remove("r2")
        fleet.remove("r2")
        assert fleet.choose([], 8, now=0.0) is None
        fleet.update("r0", healthy=True)
        assert fleet.choose([], 8, now=0.0).replica == "r0"
    assert Router().choose([], 8, now=0.0) is None


def test_a_session_comes_back():
    fleet = router(9)
    first = fleet.choose([], 8, now=0.0, session="s").replica
    assert {fleet.choose([], 8, now=0.1 * i, session="s").replica for i in range(3)} == {first}
    fleet.update(first, queued_tokens=5000)
    assert fleet.choose([], 8, now=1.0, session="s").replica != first


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 99)), max_size=60))
def test_counts_end_at_nothing(policy, history):
    """Whatever happens in whatever order: who has requests is counted, and nothing stays behind."""
    fleet, open_now, now = router(policy=policy), [], 0.0
    for what, number in history:
        now += 0.01
        name = f"r{number % 3}"
        if what < 3:
            decision = fleet.choose([chain(number, blocks=5)], 22, now=now, session=str(number % 4))
            if decision is not None:
                open_now.append(decision)
        elif what == 3 and open_now:
            fleet.began(open_now[number % len(open_now)], now)
        elif what == 4 and open_now:
            fleet.ended(open_now.pop(number % len(open_now)), now)
        elif name in fleet.replicas:
            fleet.remove(name)
        else:
            fleet.add(ReplicaState(id=name, block_size=4))
    for decision in [*open_now, *open_now]:
        fleet.ended(decision, now)
    for name in fleet.replicas:
        state = fleet.state(name)
        assert (state.running, state.waiting, state.queued_tokens) == (0, 0, 0)


def test_work_is_spread_by_weight():
    fleet = Router(learn_rates=False)
    for i, rate in enumerate((1000.0, 1000.0, 2000.0)):
        fleet.add(
            ReplicaState(id=f"r{i}", prefill_tokens_per_s=rate, weight=rate / 1000, step_s=0.001)
        )
    served, under_way, rng = dict.fromkeys(fleet.replicas, 0), [], random.Random(0)
    for i in range(3000):
        now = 0.03 * i
        tokens = rng.randrange(20, 180)
        decision = fleet.choose([], tokens, now=now)
        served[decision.replica] += tokens
        under_way.append((now + decision.predicted_ttft_s, decision))
        for end, one in [u for u in under_way if u[0] <= now]:
            fleet.began(one, now)
            fleet.ended(one, now)
            under_way.remove((end, one))
    assert max(served["r0"], served["r1"]) < 1.15 * min(served["r0"], served["r1"])
    assert 1.6 < served["r2"] / served["r0"] < 3.0


@pytest.mark.parametrize(("thrift", "chosen"), [(0.0, "r0"), (3.0, "r1")])
def test_thrift_prefers_the_replica_that_computes_less(thrift, chosen):
    """r1 has the prefix and a queue as long as computing it: only what the computing costs decides."""
    fleet, keys = router(2, policy="prefix", balance=0.0, thrift=thrift), chain(blocks=50)
    fleet.reset("r0", 0, [])
    fleet.reset("r1", 0, keys)
    fleet.update("r1", queued_tokens=250, running=0, waiting=1)
    assert fleet.choose([keys], 202, now=0.0).replica == chosen
