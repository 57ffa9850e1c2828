"""The search over a world whose figures are known: how near the front it comes, what it leaves out, when it ends."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from slipstream.errors import ConfigError, EngineError
from slipstream.optimize.candidates import Candidate, Prediction, Space, TrialResult
from slipstream.optimize.pareto import hypervolume
from slipstream.optimize.search import MIN_MEASURED, Search

pytest.importorskip("optuna", reason="the search needs Optuna (the extra `optimize`)")

SPACE = Space(
    compressions=("none", "int8", "int4", "gptq"),
    axes={
        "kv_cache_dtype": ("auto", "int8"),
        "max_num_seqs": (1, 2, 4, 8),
        "max_num_batched_tokens": (128, 512, 2048),
        "speculative_model": (None, "ngram"),
    },
)
KL = {"none": 0.0, "int8": 0.003, "gptq": 0.03, "int4": 0.06}


def prior(candidate):
    size = dict(candidate.settings)["max_num_seqs"]
    bits = {"none": 16, "int8": 8}.get(candidate.compression, 4.5)
    step_s = 0.004 * bits / 16 + 0.0008 * size
    return Prediction(throughput=size / step_s, tpot_s=step_s, kl=KL[candidate.compression] * 1.5)


class World:
    """Figures that the prior gets wrong: by an effect of each choice, and by one of each candidate."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.effects = {
            (name, value): rng.gauss(0, 0.15)
            for name, values in SPACE.axes.items()
            for value in values
        }
        self.effects |= {name: rng.gauss(0, 0.25) for name in SPACE.compressions}
        self.seed, self.asked = seed, []

    def __call__(self, candidate):
        self.asked.append(candidate)
        own = random.Random(f"{self.seed} {candidate.name}")
        effect = (
            self.effects[candidate.compression]
            + sum(self.effects[c] for c in candidate.settings)
            + own.gauss(0, 0.08)
        )
        expected = prior(candidate)
        return TrialResult(
            candidate=candidate,
            throughput=expected.throughput * math.exp(-effect),
            tpot_s=expected.tpot_s * math.exp(effect + own.gauss(0, 0.05)),
            kl=KL[candidate.compression]
            + 0.001 * (("kv_cache_dtype", "int8") in candidate.settings),
        )


def volume(results, every):
    points = [r.point for r in every]
    reference = (max(p[0] for p in points) + 0.1, max(p[1] for p in points) + 0.1, 0.11)
    return hypervolume([r.point for r in results if r.point], reference) / hypervolume(
        points, reference
    )


def test_fifteen_percent_of_the_measurements_find_nearly_the_whole_front():
    shares, at_random = [], []
    for seed in range(4):
        every = [World(seed)(c) for c in SPACE.candidates()]
        most = int(0.15 * len(every))
        world = World(seed)
        search = Search(SPACE, prior, world, seed=seed)
        results = search.run(budget_s=most, clock=lambda asked=world.asked: len(asked))
        assert MIN_MEASURED <= len(results) <= most
        shares.append(volume(results, every))
        at_random.append(volume(random.Random(seed).sample(every, most), every))
    assert sum(shares) / len(shares) > 0.97
    assert sum(shares) / len(shares) > sum(at_random) / len(at_random) + 0.05


def test_no_candidate_is_measured_twice_and_the_search_ends_by_itself():
    world = World(11)
    search = Search(SPACE, prior, world, seed=1)
    search.run(budget_s=1e9)
    assert len(set(world.asked)) == len(world.asked)
    assert "expected to move the front" in search.why_ended
    assert MIN_MEASURED <= len(world.asked) < len(SPACE.candidates())
    front = search.front()
    assert [r.throughput for r in front] == sorted((r.throughput for r in front), reverse=True)


def test_a_small_space_is_measured_whole():
    space = Space(
        compressions=("none", "int8"),
        axes={name: values[:1] for name, values in SPACE.axes.items()},
    )
    search = Search(space, prior, World(0))
    assert {r.candidate for r in search.run(budget_s=1e9)} == set(space.candidates())
    assert "every candidate was measured" in search.why_ended


def test_what_loses_too_much_is_not_measured_again_and_what_fails_is_a_result():
    world = World(3)

    def measure(candidate):
        if candidate.compression == "int4":
            world.asked.append(candidate)
            return TrialResult(candidate=candidate, kl=0.5, fits=False, error="KL 0.5")
        if dict(candidate.settings)["max_num_batched_tokens"] == 2048:
            raise EngineError("out of memory")
        return world(candidate)

    search = Search(SPACE, prior, measure, seed=0)
    results = search.run(budget_s=1e9)
    keys = [c.quality_key for c in world.asked if c.compression == "int4"]
    assert len(keys) == len(set(keys))
    failed = [r for r in results if r.error == "out of memory"]
    assert failed
    assert all(r.point is None for r in failed)
    assert all(r.candidate.compression != "int4" for r in search.front())


def test_an_interrupted_search_goes_on():
    whole = Search(SPACE, prior, World(5), seed=0)
    whole.run(budget_s=1e9)
    half = whole.results[: len(whole.results) // 2]
    world = World(5)
    again = Search(SPACE, prior, world, known=half, seed=0)
    again.run(budget_s=1e9)
    assert not {r.candidate for r in half} & set(world.asked)
    assert again.results[: len(half)] == half


def test_the_time_is_kept():
    now = [0.0]

    def measure(candidate):
        now[0] += 10
        return World(0)(candidate)

    search = Search(SPACE, prior, measure)
    results = search.run(budget_s=45, clock=lambda: now[0])
    assert len(results) == 4  # a fifth would end at 50 s
    assert (
        search.why_ended
        == "the budget of 45 s is over but for 5 s, too few for a candidate that might move the front"
    )


def test_what_is_left_of_the_time_goes_to_candidates_whose_quality_is_known():
    now, asked, seen = [0.0], [], set()

    def measure(candidate):
        now[0] += 3 if candidate.quality_key in seen else 40
        seen.add(candidate.quality_key)
        asked.append(candidate)
        return World(0)(candidate)

    search = Search(SPACE, prior, measure)
    search.run(budget_s=150, clock=lambda: now[0])
    assert 140 < now[0] <= 150
    assert len(seen) == 3
    assert len(asked) > 8
    assert "150 s is over" in search.why_ended


def test_predictions_learn_from_measurements():
    search = Search(SPACE, prior, World(7), seed=0)
    search.run(budget_s=1e9)
    unseen = search.waiting()
    truth = [World(7)(c).throughput for c in unseen]

    def error(predict):
        return sum(
            abs(math.log(predict(c).throughput / t)) for c, t in zip(unseen, truth, strict=True)
        ) / len(unseen)

    assert error(search.predict) < 0.6 * error(prior)


def test_without_optuna_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"\[optimize\]"):
        Search(SPACE, prior, World(0))


def test_figures_that_were_guessed_learn_from_the_same_compression_and_from_other_caches():
    def result(compression, cache, kl, fits=True):
        candidate = next(
            c
            for c in SPACE.candidates()
            if c.quality_key == (compression, ("kv_cache_dtype", cache))
        )
        return TrialResult(candidate=candidate, throughput=1.0, tpot_s=1.0, kl=kl, fits=fits)

    def kl_of(known, compression, cache):
        search = Search(SPACE, prior, World(0), known=known)
        return search.predict(result(compression, cache, 0.0).candidate).kl

    known = [
        result("none", "auto", 0.0),
        result("none", "int8", 0.004),
        result("gptq", "auto", 0.02),
    ]
    assert kl_of(known, "int4", "auto") == pytest.approx(0.09)  # the prior's
    assert kl_of(known, "gptq", "auto") == 0.02
    assert kl_of(known, "gptq", "int8") == pytest.approx(
        0.024
    )  # with what the cache cost the other
    search = Search(SPACE, prior, World(0), known=[result("gptq", "auto", 0.3, fits=False)])
    assert not any(
        c.compression == "gptq" for c in search.waiting()
    )  # a rounded cache makes nothing better


def test_the_better_form_is_found_though_the_prior_says_that_all_are_alike():
    space = dataclasses.replace(SPACE, axes={**SPACE.axes, "parallel": ("tp1", "tp2", "tp1pp2")})
    gain = {"tp1": 1.0, "tp2": 1.8, "tp1pp2": 0.6}

    def measured(candidate):
        found, by = prior(candidate), gain[dict(candidate.settings)["parallel"]]
        return TrialResult(
            candidate=candidate,
            throughput=found.throughput * by,
            tpot_s=found.tpot_s / by,
            kl=KL[candidate.compression],
        )

    search = Search(space, prior, measured, seed=0)
    results = search.run(budget_s=1e9)
    every = [measured(c) for c in space.candidates()]
    assert len(results) < 0.15 * len(every)
    assert {dict(r.candidate.settings)["parallel"] for r in search.front()} == {"tp2"}
    assert volume(results, every) > 0.97
    ways = [dict(r.candidate.settings)["parallel"] for r in results]
    assert ways.count("tp2") > ways.count("tp1pp2")
    unseen = [c for c in search.waiting() if ("parallel", "tp2") in c.settings]
    assert all(
        search.predict(c).throughput > 1.4 * prior(c).throughput for c in unseen
    )  # one measurement tells of all


def test_what_no_engine_starts_with_is_left_out():
    some = frozenset(c for c in SPACE.candidates() if ("speculative_model", "ngram") in c.settings)
    space = dataclasses.replace(SPACE, left_out=some)
    assert len(space.candidates()) == len(SPACE.candidates()) // 2
    assert not some & set(Search(space, prior, World(0)).waiting())


def test_a_candidate_is_named_by_its_settings():
    candidate = Candidate("int8", (("kv_cache_dtype", "int8"), ("speculative_model", None)))
    assert candidate.name == "int8 kv_cache_dtype=int8"
    assert candidate.quality_key == ("int8", ("kv_cache_dtype", "int8"))
