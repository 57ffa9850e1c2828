"""Fronts and hypervolumes against brute force."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.optimize.pareto import expected_gain, front, hypervolume

SIZES = st.integers(1, 3).flatmap(
    lambda d: st.lists(st.tuples(*[st.integers(0, 6)] * d), min_size=0, max_size=12).map(
        lambda points: (d, points)
    )
)


def dominates(a, b):
    """`a` is nowhere worse than `b`, and somewhere better."""
    return all(x <= y for x, y in zip(a, b, strict=True)) and any(
        x < y for x, y in zip(a, b, strict=True)
    )


@given(SIZES)
def test_front_is_what_nobody_dominates(given_points):
    _, points = given_points
    found = front(points)
    assert {points[i] for i in found} == {
        p for p in points if not any(dominates(q, p) for q in points)
    }
    assert len({points[i] for i in found}) == len(found)
    assert all(points.index(points[i]) == i for i in found)


@given(SIZES)
def test_hypervolume_is_the_number_of_dominated_cells(given_points):
    """The volume for whole coordinates is the number of unit cells whose lower corner a point
    dominates or is."""
    d, points = given_points
    reference = (6,) * d
    cells = sum(
        any(all(x <= c for x, c in zip(p, cell, strict=True)) for p in points)
        for cell in product(range(6), repeat=d)
    )
    assert hypervolume(points, reference) == cells


def test_hypervolume_of_random_points_agrees_with_sampling():
    rng = random.Random(0)
    points = [tuple(rng.random() for _ in range(3)) for _ in range(30)]
    samples = [tuple(rng.random() for _ in range(3)) for _ in range(40_000)]
    hit = sum(
        any(all(x <= c for x, c in zip(p, s, strict=True)) for p in points) for s in samples
    ) / len(samples)
    assert hypervolume(points, (1, 1, 1)) == pytest.approx(hit, abs=0.01)


def test_points_beyond_the_reference_add_nothing():
    assert hypervolume([(2.0, 0.0), (0.0, 2.0)], (1.0, 1.0)) == 0
    assert hypervolume([], (1.0,)) == 0
    assert hypervolume([(0.0,), (0.5,)], (1.0,)) == 1.0


def test_points_of_different_lengths_are_refused():
    with pytest.raises(ValueError):
        front([(1, 2), (1, 2, 3)])


def test_expected_gains_agree_with_sampling():
    rng = np.random.default_rng(0)
    reference = (1.0, 1.0, 1.0)
    points = [tuple(p) for p in rng.random((6, 3))] + [
        (0.2, 0.2, 1.5)
    ]  # the last is beyond the reference
    mean = rng.random((4, 2))
    deviation = np.array([[0.3, 0.1], [0.05, 0.2], [1e-12, 1e-12], [0.2, 0.2]])
    third = rng.random(4)
    third[3] = 1.2
    found = expected_gain(points, reference, mean, deviation, third)
    before = hypervolume(points, reference)
    for i in range(4):
        drawn = mean[i] + deviation[i] * rng.standard_normal((4000, 2))
        gains = [hypervolume([*points, (*xy, third[i])], reference) - before for xy in drawn]
        assert found[i] == pytest.approx(np.mean(gains), abs=4 * np.std(gains) / 4000**0.5 + 1e-9)
    assert found[3] == 0
    assert expected_gain([], reference, mean[2:3], deviation[2:3], third[2:3])[0] == pytest.approx(
        hypervolume([(*mean[2], third[2])], reference)
    )
