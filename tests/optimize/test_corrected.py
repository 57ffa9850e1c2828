"""Beliefs about candidates: the prior, and its correction by measurements."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from slipstream.optimize import corrected
from slipstream.optimize.candidates import NOTHING, Prediction, Space, TrialResult
from slipstream.optimize.corrected import Corrected

SPACE = Space(
    compressions=("none", "int8", "int4"),
    axes={"max_num_seqs": (1, 2, 4, 8), "kv_cache_dtype": ("auto", "int8")},
)
EVERY = SPACE.candidates()


def prior(candidate):
    return Prediction(throughput=100.0, tpot_s=0.01)


def measured(candidates, factor):
    """`factor` by the place in the order of measuring: how many times as slow as predicted."""
    return [
        TrialResult(
            candidate=c, throughput=100.0 / factor(i, c), tpot_s=0.01 * factor(i, c), kl=0.0
        )
        for i, c in enumerate(candidates)
    ]


def logs(found, candidates):
    """Logarithms of the ratio of believed to predicted time, for each candidate."""
    mean, deviation = found.at(candidates)
    return mean[:, 1] - math.log(0.01), deviation[:, 1]


def test_nothing_was_measured():
    mean, deviation = Corrected(prior, []).at(EVERY)
    assert mean == pytest.approx(np.array([[-math.log(100.0), math.log(0.01)]] * len(EVERY)))
    assert (deviation > 0.5).all()


def test_candidates_that_share_a_choice_learn_and_a_nearer_number_more():
    some = [c for c in EVERY if c.compression == "none" and dict(c.settings)["max_num_seqs"] == 8]
    found = Corrected(prior, measured(some, lambda i, c: 2.0))

    def of(compression, seqs):
        same = [
            c
            for c in EVERY
            if c.compression == compression and dict(c.settings)["max_num_seqs"] == seqs
        ]
        mean, deviation = logs(found, same[:1])
        return mean[0], deviation[0]

    assert of("none", 8)[0] > of("none", 4)[0] > of("none", 1)[0] > 0
    assert of("none", 4)[0] > of("int8", 4)[0] > 0
    assert of("none", 8)[1] < of("none", 4)[1] < of("int8", 4)[1]


def test_a_machine_that_slows_down_is_not_the_candidates_fault():
    """The first half is measured on a quiet machine, the second at a quarter of its speed."""
    order = random.Random(1).sample(EVERY, 16)
    found = Corrected(prior, measured(order, lambda i, c: 4.0 if i >= 8 else 1.0))
    believed, _ = logs(found, order)
    apart = np.mean(believed[8:]) - np.mean(believed[:8])
    assert apart < 0.25 * math.log(4.0)


def test_how_sure_a_figure_is_follows_from_the_noise():
    """Nobody tells how noisy measuring is."""

    def deviation(noise, seed):
        rng = random.Random(seed)
        order = rng.sample(EVERY, 14)
        found = Corrected(prior, measured(order, lambda i, c: math.exp(rng.gauss(0, noise))))
        return np.mean(logs(found, order)[1])

    assert np.mean([deviation(0.02, seed) / deviation(0.4, seed) for seed in range(6)]) < 0.4


def test_settings_that_matter_more_than_usual_are_learnt():
    """Each doubling of the sequences is 1.6 times as slow as predicted, for every compression alike."""
    effect = {1: 0.0, 2: 0.5, 4: 1.0, 8: 1.5}
    of = lambda i, c: math.exp(effect[dict(c.settings)["max_num_seqs"]])
    order = [c for c in EVERY if c.compression == "none"]
    unseen = [c for c in EVERY if c.compression == "int4"]
    believed, _ = logs(Corrected(prior, measured(order, of)), unseen)
    wanted = np.array([effect[dict(c.settings)["max_num_seqs"]] for c in unseen])
    assert np.ptp(believed) > 0.6 * np.ptp(wanted)
    assert np.corrcoef(believed, wanted)[0, 1] > 0.95


def test_candidates_that_can_not_be_planned_say_nothing_of_others():
    broken = EVERY[0]
    of = lambda c: NOTHING if c == broken else prior(c)
    found = Corrected(of, measured([broken, *EVERY[1:4]], lambda i, c: 1.0))
    believed, _ = logs(found, EVERY[5:])
    assert np.abs(believed).max() < 0.05


def test_values_of_several_kinds_are_told_apart():
    assert corrected._table([None, "ngram"], ["ngram"]).tolist() == [[0.0], [1.0]]
    assert corrected._table([128], [128, 256, 2048])[0].tolist() == pytest.approx(
        [1.0, math.exp(-0.5), math.exp(-8)]
    )
