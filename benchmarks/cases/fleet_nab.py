"""The detector's series on the Numenta Anomaly Benchmark (Lavin and Ahmad 2015), scored as it describes.

    python benchmarks/fleet.py --study nab --nab FOLDER [--results FOLDER] [--groups realKnownCause]

FOLDER has NAB's `data/` and `labels/combined_windows.json`; `--results` is NAB's own `results/`, whose anomaly scores of other
detectors are scored here in the same way, on the same files. None of these files is part of this repository.

The score (section IV of the paper, profile *standard*): of a labelled window the first detection counts, 1 at its beginning and
less towards its end, by a sigmoid; a window without one costs 1; a detection outside costs 0.11, less if it is close behind a
window. The first 15 % of a series (of at most 5,000 points) are for learning. One threshold serves all files, the one with the
best sum, found here for each detector. 0 is a detector that says nothing, 100 a perfect one.

Ours: a series' value and its change from the one before, each with the robust baseline of `fleet/detection/signals.py` and
river's Page-Hinkley test in both directions. NAB's series are no residuals of a prediction, and some have the hours and days
of a week in them, which our detector leaves to whoever makes the residual.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from river.drift import PageHinkley

from slipstream.fleet.detection.signals import Baseline, Signal

FP_COST = 0.11
QUIET = 50
"""Points after a detection without another."""

DETECTORS = ("numenta", "contextOSE", "knncad", "relativeEntropy", "randomCutForest", "twitterADVec", "windowedGaussian",
             "skyline", "bayesChangePt", "expose", "random", "null")  # fmt: skip

Window = tuple[int, int]


def sigmoid(place: float) -> float:
    """2 / (1 + e^(5·place)) − 1; beyond three window's widths behind one it is −1."""
    return -1.0 if place > 3 else 2 / (1 + math.exp(5 * place)) - 1


class File:
    """One series' share of the score: for each threshold the sum over windows and detections."""

    def __init__(self, scores: Sequence[float], windows: Sequence[Window]) -> None:
        self.windows = windows
        learning = int(0.15 * min(len(scores), 5000))
        self.false: list[tuple[float, float]] = []  # (score, cost) of the points outside
        self.inside: list[list[tuple[float, float]]] = [
            [] for _ in windows
        ]  # (score, gain), in order of time
        for i, score in enumerate(scores):
            if i < learning:
                continue
            own = next((k for k, (a, b) in enumerate(windows) if a <= i <= b), None)
            if own is not None:
                a, b = windows[own]
                place = -(b - i + 1) / (b - a + 1)
                self.inside[own].append((score, sigmoid(place) / sigmoid(-1.0)))
                continue
            last = max((w for w in windows if w[1] < i), key=lambda w: w[1], default=None)
            cost = -1.0 if last is None else sigmoid((i - last[1]) / max(1, last[1] - last[0]))
            self.false.append((score, cost))
        self.false.sort()
        self._scores = [score for score, _ in self.false]
        self._costs = [0.0, *accumulate(cost for _, cost in reversed(self.false))][
            ::-1
        ]  # of a place and all behind it

    def total(self, threshold: float) -> float:
        found = FP_COST * self._costs[bisect_left(self._scores, threshold)]
        for points in self.inside:
            found += next((gain for score, gain in points if score >= threshold), -1.0)
        return found


def best(files: Sequence[File]) -> tuple[float, float]:
    """(the score from 0 to 100, the threshold)."""
    count = sum(len(f.windows) for f in files)
    values = sorted(
        {s for f in files for s, _ in f.false} | {s for f in files for p in f.inside for s, _ in p}
    )
    steps = (
        values
        if len(values) <= 2000
        else [values[round(i * (len(values) - 1) / 1999)] for i in range(2000)]
    )
    top = sorted(values)[-200:]  # thresholds matter at the top
    total, threshold = max((sum(f.total(t) for f in files), t) for t in (*steps, *top, 1e9))
    return 100 * (total + count) / (2 * count), threshold


def ours(values: Sequence[float]) -> list[float]:
    """A score for each point, 0 but where something changes: how far, as a logarithm of deviations."""
    series = [values, [0.0, *(b - a for a, b in pairwise(values))]]
    found = [0.0] * len(values)
    for own in series:
        spread = max(own) - min(
            own
        )  # of what is known beforehand only its unit: the floor is a thousandth of it
        baseline = Baseline(
            Signal(name="", what="", read=lambda o: None, direction="up", floor=spread / 1000)
        )
        tests = {
            sign: PageHinkley(min_instances=2, delta=2.0, threshold=12.0, alpha=1.0, mode="up")
            for sign in (1, -1)
        }
        recent: deque[float] = deque(maxlen=5)
        quiet_until = 0
        for i, value in enumerate(own):
            if baseline.is_ready:
                far = (value - baseline.level) / baseline.noise(1.0)
                recent.append(abs(far))
                for sign, test in tests.items():
                    test.update(sign * baseline.z((value, 1.0)))
                    if test.drift_detected and i >= quiet_until:
                        found[i] = max(found[i], math.log1p(sum(recent) / len(recent)))
                        quiet_until = i + QUIET
            baseline.learn((value, 1.0))
    return found


def files(
    nab: Path, labels: dict[str, Any], groups: Sequence[str]
) -> Iterator[tuple[str, list[float], list[Window]]]:
    for name, windows in labels.items():
        path = nab / "data" / name
        if name.split("/")[0] not in groups or not path.exists():
            continue
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        times = [datetime.fromisoformat(row["timestamp"]) for row in rows]
        places = []
        for begin, end in windows:
            a, b = datetime.fromisoformat(begin), datetime.fromisoformat(end)
            inside = [i for i, t in enumerate(times) if a <= t <= b]
            if inside:
                places.append((inside[0], inside[-1]))
        yield name, [float(row["value"]) for row in rows], places


def theirs(results: Path, detector: str, name: str) -> list[float] | None:
    group, file = name.split("/")
    path = results / detector / group / f"{detector}_{file}"
    if not path.exists():
        return None
    with path.open(encoding="utf-8", newline="") as opened:
        return [float(row["anomaly_score"]) for row in csv.DictReader(opened)]


RECORD = "nab"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nab", type=Path, required=True)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--groups", default="realKnownCause")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    labels = json.loads((args.nab / "labels" / "combined_windows.json").read_text("utf-8"))
    series = list(files(args.nab, labels, args.groups.split(",")))
    table = {}
    score, threshold = best([File(ours(values), windows) for _, values, windows in series])
    table["slipstream"] = {"score": score, "threshold": threshold}
    print(len(series), "files;", "slipstream", table["slipstream"], flush=True)
    for detector in DETECTORS if args.results else ():
        found = [(theirs(args.results, detector, name), windows) for name, _, windows in series]
        if all(scores is not None for scores, _ in found):
            score, threshold = best([File(scores or [], windows) for scores, windows in found])
            table[detector] = {"score": score, "threshold": threshold}
            print(detector, table[detector], flush=True)
    save(groups=args.groups, files=[name for name, _, _ in series], scores=table)
