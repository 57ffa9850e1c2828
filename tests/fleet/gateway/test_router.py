"""The router and its table of prefixes, against plain sets, over random histories."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.cache.prefix_cache import announced_state, extend_keys, root_key
from slipstream.fleet.config import Routing
from slipstream.fleet.gateway import prefixes
from slipstream.fleet.gateway.placing import Placing
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
    """The table agrees with sets, also while it grows, and when slots go and are given out again."""
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
    assert fleet.apply("r2", 2, keys[5:10], keys[5:10])  # given up and stored again
    fleet.ended(decision, 0.1)
    again = fleet.choose([keys], 202, now=50.0)
    assert (again.replica, again.num_cached_tokens) == ("r2", 40)
    fleet.ended(again, 50.1)
    fleet.reset("r2", 3, [])
    assert fleet.choose([keys], 202, now=100.0).num_cached_tokens == 8


def test_a_replica_with_states_is_found_where_its_last_checkpoint_is():
    """Keys and values of more blocks are no use without one."""
    fleet, keys = router(), chain(blocks=50)
    states = [announced_state(keys[i - 1]) for i in (10, 30)]
    fleet.reset("r0", 0, keys[:20])
    fleet.reset("r1", 0, [*keys[:40], *states], has_states=True)
    fleet.reset("r2", 0, keys[:45], has_states=True)
    decision = fleet.choose([keys], 202, now=0.0)
    assert (decision.replica, decision.num_cached_tokens) == ("r1", 120)
    fleet.ended(decision, 0.1)
    assert fleet.apply("r1", 1, [], states[1:])
    decision = fleet.choose([keys], 202, now=100.0)
    assert (decision.replica, decision.num_cached_tokens) == ("r0", 80)
    fleet.ended(decision, 100.1)
    assert fleet.apply("r2", 1, [announced_state(keys[44])], [])
    decision = fleet.choose([keys], 202, now=200.0)
    assert (decision.replica, decision.num_cached_tokens) == ("r2", 180)


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


@pytest.mark.parametrize(
    ("queued", "patience_s", "chosen"), [(250, 0.5, "r1"), (800, 0.5, "r0"), (800, None, "r1")]
)
def test_a_prefix_is_worth_a_wait_only_within_the_patience(queued, patience_s, chosen):
    """r1 has the prefix, and computing it takes 0.2 s, five times weighed."""
    settings = dict(balance=0.0, thrift=5.0, patience_s=patience_s)
    fleet, keys = router(2, policy="prefix", **settings), chain(blocks=50)
    fleet.reset("r0", 0, [])
    fleet.reset("r1", 0, keys)
    fleet.update("r1", queued_tokens=queued, running=0, waiting=1)
    assert fleet.choose([keys], 202, now=0.0).replica == chosen


def test_a_replica_that_is_out_is_chosen_only_if_it_is_allowed():
    placing = Placing(Routing())
    for name in ("r0", "r1"):
        placing.router.add(ReplicaState(id=name))
        placing.guard.add(name)
    placing.guard.failed("r0", "gone", 0.0, gone=True)
    chosen = [placing.choose([], 8, now=0.01).replica for _ in range(4)]
    assert chosen == ["r1"] * 4
    assert placing.choose([], 8, now=0.01, exclude={"r1"}) is None
    assert placing.choose([], 8, now=0.01, exclude={"r1"}, also={"r0"}).replica == "r0"


# --- What a replica's numbers are worth ---------------------------------------------------------


def replica(name: str = "r0", **changes) -> ReplicaState:
    usual = dict(block_size=4, prefill_tokens_per_s=1000.0, step_s=0.02, max_num_seqs=4)
    return ReplicaState(id=name, **{**usual, "max_in_flight": 9, "service_s": 2.0, **changes})


def of_replicas(*states: ReplicaState, **settings) -> Router:
    made = Router(**settings)
    for state in states:
        made.add(state)
    return made


def served(fleet: Router, num_tokens: int, now: float = 0.0, **more) -> str:
    """Name of the replica that is chosen; the request ends at once."""
    decision = fleet.choose([], num_tokens, now=now, **more)
    fleet.ended(decision, now)
    return decision.replica


@pytest.mark.parametrize(
    ("busy", "wait_s"),
    [
        ({}, 0.0),
        ({"queued_tokens": 500}, 0.5),
        ({"running": 3}, 0.0),  # the fourth place is free
        ({"running": 4}, 0.5),  # one of four ends in a quarter of a request's time
        ({"running": 3, "waiting": 1}, 0.5),
        ({"running": 4, "waiting": 2}, 1.5),
        ({"running": 8}, 2.5),
        ({"running": 9}, float("inf")),
        ({"waiting": 9}, float("inf")),
    ],
)
def test_predicted_ttft_is_half_a_step_the_wait_and_the_prompt(busy, wait_s):
    fleet = of_replicas(replica(**busy))
    cost = fleet.costs([], 100, now=0.0)["r0"]
    assert cost.wait_s + cost.computing_s == pytest.approx(0.01 + wait_s + 0.1)
    if (decision := fleet.choose([], 100, now=0.0)) is not None:
        assert decision.predicted_ttft_s == pytest.approx(0.01 + wait_s + 0.1)


def test_reports_count_the_routers_own_requests_once():
    fleet = of_replicas(replica())
    first, second = (fleet.choose([], 100, now=0.0) for _ in range(2))
    fleet.began(first, 0.1)

    def counts():
        state = fleet.state("r0")
        return state.running, state.waiting, state.queued_tokens

    assert counts() == (1, 1, 100)
    fleet.update("r0", running=3, waiting=2, queued_tokens=250)
    assert counts() == (3, 2, 250)
    fleet.ended(first, 0.2)
    fleet.ended(second, 0.2)
    assert counts() == (2, 1, 150)
    third = fleet.choose([], 50, now=0.3)
    fleet.update("r0", running=0, waiting=0, queued_tokens=0)  # it has not heard of it yet
    assert counts() == (0, 1, 50)
    fleet.ended(third, 0.4)
    assert counts() == (0, 0, 0)


@pytest.mark.parametrize(
    ("state", "num_tokens", "seconds", "learnt"),
    [
        ({}, 100, 0.21, 950.0),  # a tenth of the way to 100 tokens / 0.2 s
        ({}, 64, 0.138, 950.0),
        ({}, 63, 0.136, 1000.0),  # too few to say anything
        ({}, 100, 9.0, 950.0),  # at most half
        ({}, 100, 0.03, 1100.0),  # at most twice
        ({}, 100, 0.0, 1000.0),
        ({"step_s": 0.2, "prefill_tokens_per_s": 2000.0}, 100, 0.12, 2000 + (100 / 0.03 - 2000) / 10),
        ({"running": 4}, 100, 0.21, 1000.0),  # it waited for a place
    ],
)  # fmt: skip
def test_first_token_teaches_the_speed_of_prefill(state, num_tokens, seconds, learnt):
    for learns in (True, False):
        fleet = of_replicas(replica(**state), learn_rates=learns)
        before = fleet.state("r0").prefill_tokens_per_s
        decision = fleet.choose([], num_tokens, now=5.0)
        fleet.began(decision, 5.0 + seconds)
        expected = learnt if learns else before
        assert fleet.state("r0").prefill_tokens_per_s == pytest.approx(expected)


def test_prompts_queued_before_count_in_the_learnt_speed():
    fleet = of_replicas(replica())
    fleet.choose([], 100, now=0.0)
    fleet.began(fleet.choose([], 100, now=0.0), 0.41)
    assert fleet.state("r0").prefill_tokens_per_s == pytest.approx(950.0)  # 200 tokens / 0.4 s


@pytest.mark.parametrize(("learns", "service_s"), [(True, 2.2), (False, 2.0)])
def test_service_time_is_learnt_from_the_first_token_to_the_end(learns, service_s):
    fleet = of_replicas(replica(), learn_rates=learns)
    fleet.ended(fleet.choose([], 10, now=0.0), 8.0)  # it never began
    assert fleet.state("r0").service_s == 2.0
    decision = fleet.choose([], 10, now=10.0)
    fleet.began(decision, 11.0)
    fleet.ended(decision, 15.0)
    assert fleet.state("r0").service_s == pytest.approx(service_s)


# --- Balance ------------------------------------------------------------------------------------


def test_recent_work_is_divided_by_weight():
    fleet = of_replicas(replica("r0"), replica("r1", weight=2.0), balance=1.0, learn_rates=False)
    assert sorted(served(fleet, 100) for _ in range(6)) == ["r0"] * 2 + ["r1"] * 4


def test_recent_work_is_forgotten_within_half_a_minute():
    fleet = of_replicas(replica("r0"), replica("r1"), balance=1.0, learn_rates=False)
    assert served(fleet, 400) == "r0"
    # after 30 s the 420 ms of r0 count as 155; a request of r1 as 120
    assert [served(fleet, 100, now=30.0) for _ in range(3)] == ["r1", "r1", "r0"]


def test_new_replica_begins_with_the_fleets_mean_work():
    fleet = of_replicas(replica("r0"), replica("r1"), balance=1.0, learn_rates=False)
    for _ in range(10):
        served(fleet, 100)
    fleet.add(replica("r2"))
    assert sorted(served(fleet, 100) for _ in range(3)) == ["r0", "r1", "r2"]


def test_replica_that_reports_everything_again_keeps_its_work():
    fleet = of_replicas(replica("r0"), replica("r1"), balance=1.0, learn_rates=False)
    assert [served(fleet, 200), served(fleet, 100)] == ["r0", "r1"]
    for sequence in range(2):
        fleet.reset("r0", sequence, [])
    assert served(fleet, 100) == "r1"


def test_least_loaded_counts_requests_for_each_weight():
    fleet = of_replicas(
        replica("r0", running=1), replica("r1", weight=4.0, running=1, waiting=1),
        policy="least_loaded",
    )  # fmt: skip
    assert served(fleet, 10) == "r1"
    fleet.update("r1", running=5)
    assert served(fleet, 10) == "r0"


def test_power_of_two_looks_at_two_and_round_robin_takes_turns():
    states = [replica(f"r{i}", running=load) for i, load in enumerate((0, 2, 3))]
    fleet = of_replicas(*states, policy="power_of_two")
    assert {served(fleet, 10) for _ in range(60)} == {"r0", "r1"}  # r1 where r0 was not drawn
    fleet = of_replicas(*states, policy="round_robin")
    turns = [served(fleet, 10) for _ in range(6)]
    assert sorted(turns[:3]) == ["r0", "r1", "r2"]
    assert turns[3:] == turns[:3]


def test_oldest_session_is_forgotten(monkeypatch):
    monkeypatch.setattr("slipstream.fleet.gateway.router._MAX_SESSIONS", 2)
    fleet = of_replicas(*map(replica, ("r0", "r1", "r2")), balance=0.0)
    for session, name in (("a", "r2"), ("b", "r1"), ("a", "r2"), ("c", "r1")):
        assert served(fleet, 8, session=session, exclude={"r0", "r1", "r2"} - {name}) == name
    assert served(fleet, 8, session="a") == "r2"
    assert served(fleet, 8, session="c") == "r1"
    assert served(fleet, 8, session="b") == "r0"  # as a new one


def test_session_whose_replica_gets_none_goes_elsewhere():
    fleet = of_replicas(replica("r0"), replica("r1"), balance=0.0)
    assert served(fleet, 8, session="a", exclude=["r0"]) == "r1"
    fleet.update("r1", draining=True)
    assert served(fleet, 8, session="a") == "r0"
    fleet.update("r1", draining=False)
    assert served(fleet, 8, session="a") == "r0"
    fleet.remove("r0")
    assert served(fleet, 8, session="a") == "r1"


# --- Blocks held and expected -------------------------------------------------------------------


def test_of_a_prompt_that_is_held_whole_two_tokens_are_computed():
    fleet, keys = of_replicas(replica()), chain(blocks=50)
    fleet.reset("r0", 0, keys)
    decision = fleet.choose([keys], 200, now=0.0)
    assert (decision.num_cached_tokens, decision.num_new_tokens) == (198, 2)
    assert fleet.choose([[]], 1, now=0.0).num_new_tokens == 1


def test_replicas_of_two_root_keys_are_looked_up_by_their_own_chains():
    fleet = of_replicas(replica("r0"), replica("r1"))
    mine, theirs = chain(blocks=50), chain(1, blocks=50)
    fleet.reset("r0", 0, mine[:10])
    fleet.reset("r1", 0, theirs[:20])
    decision = fleet.choose([mine, theirs], 202, now=0.0)
    assert (decision.replica, decision.num_cached_tokens) == ("r1", 80)


def test_expected_blocks_are_those_in_common():
    fleet = of_replicas(replica(), balance=0.0)
    fleet.choose([chain(*range(28), 7777, blocks=50)], 202, now=0.0)
    assert fleet.choose([chain(blocks=50)], 202, now=0.0).num_cached_tokens == 28


def test_prefixes_that_branch_are_both_expected():
    """The second branch takes the place of the first by the common first block, not by the block where they part."""
    fleet = of_replicas(replica("r0"), balance=0.0)
    fleet.reset("r0", 0, chain(blocks=10))
    one, other = (chain(*range(40), token, blocks=50) for token in (7777, 8888))
    for keys in (one, other):
        assert fleet.choose([keys], 202, now=0.0).num_cached_tokens == 40
    for keys in (one, other):
        assert fleet.choose([keys], 202, now=0.0).num_cached_tokens == 200


@pytest.mark.parametrize("num_reported", [0, 1, 6, 13])
def test_a_prompt_is_expected_whole_while_its_replica_reports_its_first_blocks(num_reported):
    """The last request that begins alike is another one, at another replica."""
    fleet = of_replicas(replica("r0", block_size=512), replica("r1", block_size=512), thrift=9.0)
    for name in fleet.replicas:
        fleet.reset(name, 0, ())
    first = fleet.choose([chain(blocks=20)], 10_242, now=0.0)
    fleet.choose([chain(*range(4), 7777, blocks=20)], 10_242, now=0.0, exclude=[first.replica])
    assert fleet.apply(first.replica, 1, chain(blocks=num_reported), ())
    again = fleet.choose([chain(blocks=30)], 15_362, now=1.0)
    assert (again.replica, again.num_cached_tokens) == (first.replica, 10_240)


def test_chains_of_two_block_sizes_are_expected_at_their_own_replicas():
    """A replica that is added with another size moves nothing that is expected already."""
    fleet = of_replicas(replica("r0", block_size=512), replica("r1", block_size=512), thrift=9.0)
    for name in fleet.replicas:
        fleet.reset(name, 0, ())
    large = lambda *tokens, blocks=20: chain(*tokens, blocks=blocks)
    small = lambda *tokens, blocks=40: chain(-1, *tokens, blocks=blocks)
    first = fleet.choose([large()], 10_242, now=0.0)
    fleet.choose([large(*range(4), 7777)], 10_242, now=0.0, exclude=[first.replica])
    assert fleet.apply(first.replica, 1, large()[:6], ())
    fleet.add(replica("r2", block_size=256))
    again = fleet.choose([large(blocks=30), small(blocks=60)], 15_362, now=1.0, exclude=["r2"])
    assert (again.replica, again.num_cached_tokens) == (first.replica, 10_240)
    assert (
        fleet.costs([large(blocks=30), small(blocks=60)], 15_362, now=1.0)["r2"].num_new == 15_362
    )
    fleet.choose([large(5), small(5)], 10_242, now=2.0, exclude=["r0", "r1"])
    half = fleet.costs([large(5, blocks=30), small(5, blocks=60)], 15_362, now=2.0)
    assert half["r2"].num_new == 15_362 - 10_240
    parted = fleet.costs([large(5, blocks=30), small(5, 6, blocks=60)], 15_362, now=2.0)
    assert parted["r2"].num_new == 15_362


def test_nothing_is_expected_of_a_replica_that_is_gone():
    fleet = of_replicas(replica("r0"))
    fleet.choose([chain(blocks=50)], 202, now=0.0)
    fleet.remove("r0")
    fleet.add(replica("r0"))
    assert fleet.choose([chain(blocks=50)], 202, now=0.0).num_cached_tokens == 0


# --- The table's bounds -------------------------------------------------------------------------


def test_slots_and_remembered_beginnings_are_bounded(monkeypatch):
    monkeypatch.setattr(prefixes, "_MAX_SHARED", 3)
    store = PrefixStore()
    for _ in range(10 * prefixes._MAX_DEAD):
        slot = store.new_slot()
        store.free_slot(slot)
        assert slot <= 2 * prefixes._MAX_DEAD
    whole, part = store.new_slot(), store.new_slot()
    for number in range(20):
        keys = chain(number, blocks=8)
        store.stored(whole, keys)
        store.stored(part, keys[:5])
        store.match(keys)
    assert len(store._shared) <= 3


@pytest.mark.parametrize("length", [40, 37])
@pytest.mark.parametrize("number", [1, 31, 32, 37])
def test_fill_sets_the_places_of_a_mask(length, number):
    values = prefixes.np.zeros(length)
    chosen = random.Random(number).sample(range(length), number)
    prefixes.fill(values, sum(1 << slot for slot in chosen), 3.0)
    assert prefixes.np.flatnonzero(values == 3.0).tolist() == sorted(chosen)
