"""The search of `slipstream optimize` in worlds that are made up, each wrong about its candidates in a way of its own.

    python benchmarks/plan.py --study worlds [--worlds plain,knee] [--seeds 12]

A world has 120 candidates: 5 compressions, 2 caches, 3 and 4 sizes. Its figures are the prior's times what the prior gets
wrong. The search is told figures with noise and ends after 15 % of the candidates. Its share is the hypervolume of those that
it asked for, over that of all, by the true figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
from collections.abc import Callable
from typing import Any

from slipstream.bench.report import print_table
from slipstream.optimize.candidates import Candidate, Prediction, Space, TrialResult
from slipstream.optimize.pareto import hypervolume
from slipstream.optimize.search import Search

SPACE = Space(
    compressions=("none", "int8", "int4-g32", "recipe:int8", "recipe:int4-gptq"),
    axes={
        "kv_cache_dtype": ("auto", "int8"),
        "max_num_batched_tokens": (128, 512, 2048),
        "max_num_seqs": (2, 4, 8, 16),
        "speculative_model": (None,),
    },
)
BITS = {"none": 16.0, "int8": 8.0, "recipe:int8": 8.0, "int4-g32": 4.5, "recipe:int4-gptq": 4.5}
KL = {"none": 0.0, "int8": 0.01, "recipe:int8": 0.006, "int4-g32": 0.2, "recipe:int4-gptq": 0.06}
KL_LIMIT, SHARE = 0.1, 0.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """Standard deviations of logarithms: of what the prior gets wrong for all, by compression, by each setting, by candidate;
    of noise, and of the machine's speed from one measurement to the next. `knee`: more sequences than some number are slower.
    `flat`: the prior says the same of all. `failing`: the share that runs out of memory."""

    of_all: float = 0.4
    of_compression: float = 0.25
    of_setting: float = 0.12
    of_candidate: float = 0.05
    noise: float = 0.05
    drift: float = 0.0
    knee: bool = False
    flat: bool = False
    failing: float = 0.0


WORLDS = {
    "plain": World(),
    "exact prior": World(
        of_all=0.02, of_compression=0.02, of_setting=0.02, of_candidate=0.02, noise=0.02
    ),
    "settings": World(of_compression=0.1, of_setting=0.4),
    "combinations": World(of_candidate=0.25),
    "knee": World(knee=True),
    "flat prior": World(flat=True),
    "failures": World(failing=0.2),
    "noise 20 %": World(noise=0.2),
    "noise 40 %": World(noise=0.4),
    "drift": World(drift=0.15),
}


def prior(candidate: Candidate) -> Prediction:
    settings = dict(candidate.settings)
    size, rounded = settings["max_num_seqs"], settings["kv_cache_dtype"] != "auto"
    step_s = 0.004 * BITS[candidate.compression] / 16 + 0.0005 * size * (0.95 if rounded else 1)
    prompt_s = 0.0004 * math.sqrt(settings["max_num_batched_tokens"] / 128)
    kl = 1.5 * KL[candidate.compression] + 0.005 * rounded
    return Prediction(
        throughput=size / (step_s + 0.0008 * size), tpot_s=step_s + prompt_s * size, kl=kl
    )


def truth(world: World, rng: random.Random) -> dict[Candidate, TrialResult]:
    """The figures of every candidate. Throughput and time between tokens are wrong by much the same of all and of the
    compression, and each for itself by the others."""

    def two(deviation: float) -> tuple[float, float]:
        return rng.gauss(0, deviation), rng.gauss(0, deviation)

    by_compression = {name: two(world.of_compression) for name in SPACE.compressions}
    by_setting = {
        (name, value): two(world.of_setting)
        for name, values in SPACE.axes.items()
        for value in values
    }
    kl_off = {name: math.exp(rng.gauss(0, 0.3)) for name in SPACE.compressions}
    of_all, most = rng.gauss(0, world.of_all), rng.choice((3, 5, 9))
    found = {}
    for c in SPACE.candidates():
        settings, expected, own = dict(c.settings), prior(c), two(world.of_candidate)
        shared = by_compression[c.compression]
        slower = -of_all - shared[0] - sum(by_setting[pair][0] for pair in c.settings) + own[0]
        longer = (
            -0.9 * of_all
            + 0.5 * (shared[1] - shared[0])
            + sum(by_setting[pair][1] for pair in c.settings)
            + own[1]
        )
        if world.knee and settings["max_num_seqs"] > most:
            beyond = 0.8 * math.log2(settings["max_num_seqs"] / most)
            slower, longer = slower + beyond, longer + beyond
        kl = KL[c.compression] * kl_off[c.compression] + 0.003 * (
            settings["kv_cache_dtype"] != "auto"
        )
        if rng.random() < world.failing:
            found[c] = TrialResult(candidate=c, error="out of memory")
        elif kl > KL_LIMIT:
            found[c] = TrialResult(candidate=c, kl=kl, fits=False, error="KL")
        else:
            throughput, tpot_s = (
                expected.throughput * math.exp(-slower),
                expected.tpot_s * math.exp(longer),
            )
            found[c] = TrialResult(candidate=c, kl=kl, throughput=throughput, tpot_s=tpot_s)
    return found


def play(world: World, seed: int) -> dict[str, float]:
    """One game: the search's share, and that of as many at random."""
    rng, every = random.Random(seed), SPACE.candidates()
    figures = truth(world, rng)
    points = {c: r.point for c, r in figures.items() if r.point is not None}
    worst = [max(p[i] for p in points.values()) for i in (0, 1)]
    reference = (worst[0] + 0.1, worst[1] + 0.1, KL_LIMIT * 1.1)
    asked: list[Candidate] = []
    speed = 0.0

    def volume(candidates: list[Candidate]) -> float:
        return hypervolume([points[c] for c in candidates if c in points], reference)

    def measure(candidate: Candidate) -> TrialResult:
        nonlocal speed
        asked.append(candidate)
        speed += rng.gauss(0, world.drift)
        r, noise = figures[candidate], [rng.gauss(0, world.noise) for _ in range(2)]
        if r.throughput is None or r.tpot_s is None:
            return r
        throughput, tpot_s = (
            r.throughput * math.exp(noise[0] - speed),
            r.tpot_s * math.exp(noise[1] + speed),
        )
        return dataclasses.replace(r, throughput=throughput, tpot_s=tpot_s)

    def told_prior(candidate: Candidate) -> Prediction:
        expected = prior(candidate)
        return Prediction(throughput=100.0, tpot_s=0.02, kl=expected.kl) if world.flat else expected

    most = int(SHARE * len(every))
    Search(SPACE, told_prior, measure, seed=seed, kl_limit=KL_LIMIT).run(
        budget_s=most, clock=lambda: len(asked)
    )
    whole = volume(list(points))
    return {"found": volume(asked) / whole, "at_random": volume(rng.sample(every, most)) / whole}


RECORD = "optimize_worlds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worlds", default=",".join(WORLDS), help="some of them")
    parser.add_argument("--seeds", type=int, default=12, help="games in each")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    rows: list[dict[str, Any]] = []
    for name in args.worlds.split(","):
        games = [play(WORLDS[name], seed) for seed in range(args.seeds)]
        found = [game["found"] for game in games]
        mean = {key: statistics.mean(game[key] for game in games) for key in games[0]}
        rows.append({"world": name, **mean, "least_found": min(found), "found_by_seed": found})
        print(name, *(f"{share:.3f}" for share in found), flush=True)
    columns = ("found", "least_found", "at_random")
    cells = [(row["world"], *(f"{row[name]:.3f}" for name in columns)) for row in rows]
    print_table("share of the hypervolume", ("world", *columns), cells)
    save(settings={**vars(args), "output": args.output.name}, rows=rows)
