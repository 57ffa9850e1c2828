"""Experts that change ranks: exchanges never make the largest load larger, respect groups, and
come to an end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.spec.description import read_spec
from slipstream.worker.experts import balance as expert_balance
from slipstream.worker.experts.balance import (
    MIN_CHOICES,
    MOVED_BYTES,
    UNEVEN,
    ExpertBalancer,
    best_exchange,
    loads_of_ranks,
    rank_of_places,
)
from tests.support import tiny_models


@st.composite
def layers(draw):
    """(load by place, ranks by place, number of groups)"""
    groups, size = draw(st.sampled_from([(1, 7), (1, 16), (2, 8), (3, 4), (4, 2), (8, 4)]))
    n = groups * size
    load = draw(st.lists(st.integers(0, 1000), min_size=n, max_size=n))
    return np.array(load, float), rank_of_places(n, draw(st.integers(2, min(5, n)))), groups


@given(layers())
def test_an_exchange_never_raises_the_largest_load(layer):
    """An exchange moves experts between ranks and keeps groups together. The largest load never rises, and
    exchanges come to an end."""
    load, rank_of, groups = layer
    size, held = len(load) // groups, sorted(load)
    for _ in range(20 * len(load)):
        before = loads_of_ranks(load, rank_of)
        found = best_exchange(load, rank_of, groups)
        if not found.swaps:
            break
        assert found.gain > 0
        assert any(rank_of[a] != rank_of[b] for a, b in found.swaps)
        own, others = (sorted(side) for side in zip(*found.swaps, strict=True))
        whole = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
        assert (own in whole and others in whole) or own[0] // size == others[0] // size
        assert len(found.swaps) in (1, size)
        for a, b in found.swaps:
            load[[a, b]] = load[[b, a]]
        after = loads_of_ranks(load, rank_of)
        assert after.max() <= before.max()
        assert sorted(after, reverse=True) < sorted(before, reverse=True)
        assert sorted(load) == held
    else:
        pytest.fail("exchanges do not end")


@given(st.lists(st.integers(0, 1000), min_size=16, max_size=16))
def test_what_is_found_is_the_best_single_exchange(load):
    load, rank_of = np.array(load, float), rank_of_places(16, 2)
    least = loads_of_ranks(load, rank_of).max()
    for a in range(8):
        for b in range(8, 16):
            moved = load.copy()
            moved[[a, b]] = moved[[b, a]]
            least = min(least, loads_of_ranks(moved, rank_of).max())
    assert loads_of_ranks(load, rank_of).max() - best_exchange(load, rank_of).gain == least


def balancer(tmp_path, family="qwen3_moe", num_ranks=2):
    tiny_models.write(tmp_path, family)
    return ExpertBalancer(read_spec(tmp_path).spec, num_ranks)


SKEWED = (9 * MIN_CHOICES, 9 * MIN_CHOICES, 9 * MIN_CHOICES, 1, 2, 3)


def test_the_load_is_looked_at_every_so_often(tmp_path):
    own = balancer(tmp_path)
    assert sum(own.step() for _ in range(10 * expert_balance.LOOK_EVERY)) == 10


def test_a_skewed_layer_is_balanced_and_then_left_alone(tmp_path):
    own = balancer(tmp_path)
    assert (own.stats.moved_total, own.stats.rank_imbalance) == (0, 1.0)
    load = ((0, SKEWED), (1, (5, 5, 5, 5, 5, 5)))
    swaps = own.follow(load, expert_bytes=1)
    assert [layer for layer, _, _ in swaps] == [0]
    assert own.stats.moved_total == 2
    assert own.stats.rank_imbalance == pytest.approx(
        4 / 3, rel=1e-3
    )  # of three such experts one rank has two
    assert (
        own.follow(load, expert_bytes=1) == []
    )  # no tokens since: half the load, as uneven as before


def test_the_load_is_that_of_experts_wherever_they_are(tmp_path):
    """A rank that had the busy experts, and gave one away, is not asked for it again."""
    own, counts = balancer(tmp_path), np.array(SKEWED)
    own.follow(((0, tuple(counts)),), expert_bytes=1)
    for _ in range(5):
        counts = counts + SKEWED
        assert own.follow(((0, tuple(counts)),), expert_bytes=1) == []
    away = 9 * MIN_CHOICES * np.array([0, 0, 0, 1, 1, 1])  # now others are chosen
    for _ in range(20):
        counts = counts + away
        own.follow(((0, tuple(counts)),), expert_bytes=1)
    assert own.stats.rank_imbalance == pytest.approx(4 / 3, rel=1e-3)


def test_little_is_moved_at_a_time(tmp_path):
    load = tuple((layer, SKEWED) for layer in (0, 1))
    assert len(balancer(tmp_path).follow(load, MOVED_BYTES // 2)) == 2
    assert len(balancer(tmp_path).follow(load, MOVED_BYTES // 2 + 1)) == 1
    assert len(balancer(tmp_path).follow(load, 10 * MOVED_BYTES)) == 1


@pytest.mark.parametrize(
    "load",
    [
        tuple(x // 20 for x in SKEWED),  # few tokens
        (1000 * MIN_CHOICES,) * 6,
        (int(UNEVEN * 1e6) - 1, 10**6, 10**6, 10**6, 10**6, 10**6),  # near enough
    ],
)
def test_what_does_not_pay(tmp_path, load):
    assert balancer(tmp_path).follow(((0, load),), expert_bytes=1) == []


def test_counts_that_began_anew(tmp_path):
    own = balancer(tmp_path)
    own.follow(((0, (10**6,) * 6),), expert_bytes=1)
    own.follow(((0, (0,) * 6),), expert_bytes=1)
    assert own.stats.rank_imbalance == 1.0
    own.follow(((0, SKEWED),), expert_bytes=1)
    assert own.stats.moved_total == 0 or own.stats.rank_imbalance > 1.0


def test_groups_move_whole_where_a_rank_has_them_whole(tmp_path):
    """DeepSeek V3's four groups of two on two ranks."""
    own = balancer(tmp_path, "deepseek_v3")
    layer = next(i for i, x in enumerate(own.spec.layers) if hasattr(x.mlp, "num_experts"))
    busy = 9 * MIN_CHOICES
    swaps = own.follow(((layer, (busy, busy, busy, busy, 1, 1, 1, 1)),), expert_bytes=1)
    assert len(swaps) == 2
    assert {a // 2 for _, a, _ in swaps} < {0, 1, 2, 3}
    assert own.stats.moved_total == 4
    assert own.stats.rank_imbalance == pytest.approx(1.0, abs=1e-3)
