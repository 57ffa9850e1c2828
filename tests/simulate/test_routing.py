"""The replica that a request goes to: prefixes stay together, and none is overfull."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from slipstream.simulate.routing import BALANCE, LongestHit, make_router, rendezvous
from slipstream.simulate.simulator import simulate
from slipstream.simulate.traffic import PREFIX_TOKENS, Traffic, TrafficRequest
from tests.simulate.test_simulator import Linear, engine


def conversations(count=240, kinds=12, seed=0):
    """Requests that begin with one of `kinds` prefixes of two blocks, in time."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        kind = rng.randrange(kinds)
        found.append(
            TrafficRequest(0.4 * i, 2 * PREFIX_TOKENS + 20, 4, (2 * kind + 1, 2 * kind + 2))
        )
    return Traffic(name="t", requests=tuple(found))


@pytest.mark.parametrize("name", ["rendezvous", "longest-hit"])
def test_routers_that_know_prefixes_find_more_of_them_and_answer_sooner(name):
    size = engine().cache.block_size
    # The cache of one replica holds four of the twelve prefixes.
    made = dataclasses.replace(
        engine(max_model_len=1100, num_blocks=2 + 4 * 1100 // size, max_num_batched_tokens=2048),
        cost=Linear(),
    )
    plain = simulate(made, conversations(), num_replicas=3, router="round-robin")
    aware = simulate(made, conversations(), num_replicas=3, router=name)
    assert aware.prefix_hit_rate > plain.prefix_hit_rate + 0.15
    assert aware.summary.ttft_s.mean < plain.summary.ttft_s.mean
    assert aware.summary.output_tokens == plain.summary.output_tokens


def test_a_prefix_keeps_its_replica_and_few_move_when_one_is_added():
    of = {prefix: [rendezvous((prefix,), [0] * n) for n in (4, 5)] for prefix in range(400)}
    assert set(Counter(before for before, _ in of.values())) == {0, 1, 2, 3}
    moved = [after for before, after in of.values() if before != after]
    assert set(moved) == {4}
    assert len(moved) == pytest.approx(80, abs=30)


@pytest.mark.parametrize("name", ["rendezvous", "longest-hit"])
def test_one_prefix_for_all_is_spread_when_its_replica_is_overfull(name):
    route, num_open = make_router(name, 4, 100), [0] * 4
    for _ in range(100):
        num_open[route((7, 8), num_open)] += 1
    assert min(num_open) > 0
    assert max(num_open) <= BALANCE * 100 / 4 + 2


def test_the_longest_hit_wins_and_what_was_sent_long_ago_is_forgotten():
    route = LongestHit(3, 4)
    first = route((1, 2), [0, 0, 0])
    block = hash((0, 1))
    assert route._hit(first, [block, hash((block, 2))]) == 2
    assert route((5,), [int(i == first) for i in range(3)]) != first
    assert route((1, 2, 3), [0, 0, 0]) == first
    for other in range(10, 14):
        route((other,), [int(i != first) * 9 for i in range(3)])
    assert route._hit(first, [block]) == 0


def test_without_prefixes_they_are_least_loaded():
    for name in ("rendezvous", "longest-hit", "least-loaded"):
        assert make_router(name, 3, 10)((), [2, 0, 1]) == 1
    turn = make_router("round-robin", 3, 10)
    assert [turn((), [0, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]
