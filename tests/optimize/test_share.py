"""The search played again on a record of every candidate: `benchmarks/plan.py --study optimizer --replay`."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="the search needs Optuna (the extra `optimize`)")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan.py"


def record(path, *, num_rounds, with_predictions=True):
    """A record of 54 candidates. Figures are the predicted ones with an effect of the compression
    and noise; int4 does not fit."""
    rng, rows = random.Random(0), []
    axes = {
        "kv_cache_dtype": ("auto", "int8"),
        "max_num_seqs": (2, 4, 8),
        "max_num_batched_tokens": (128, 512, 2048),
    }
    effects = {"none": 0.3, "int8": -0.2, "int4": 0.0}
    for compression, values in itertools.product(effects, itertools.product(*axes.values())):
        settings = dict(zip(axes, values, strict=True))
        step_s = {"none": 0.004, "int8": 0.003, "int4": 0.002}[compression] + 0.0004 * settings[
            "max_num_seqs"
        ]
        kl = {"none": 0.0, "int8": 0.01, "int4": 0.3}[compression] + 0.002 * (
            settings["kv_cache_dtype"] == "int8"
        )
        predicted = {
            "throughput": settings["max_num_seqs"] / step_s,
            "tpot_s": step_s,
            "kl": kl / 2,
        }
        rounds = []
        for _ in range(num_rounds):
            effect = math.exp(effects[compression] + rng.gauss(0, 0.05))
            figures = {
                "throughput": predicted["throughput"] / effect,
                "tpot_s": step_s * effect,
                "error": None,
            }
            rounds.append(
                figures if kl < 0.1 else {"throughput": None, "tpot_s": None, "error": "KL"}
            )
        row = {
            "compression": compression,
            "settings": settings,
            "predicted": predicted,
            "kl": kl,
            "fits": kl < 0.1,
        }
        rows.append({**row, "rounds": rounds})
        if not with_predictions:
            del rows[-1]["predicted"]
    path.write_text(json.dumps({"kl_limit": 0.1, "rows": rows}))
    return path


def replay(path, *more, seeds=2):
    words = [
        sys.executable,
        str(SCRIPT),
        "--study",
        "optimizer",
        "--replay",
        str(path),
        "--seeds",
        str(seeds),
        *more,
    ]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("num_rounds", [1, 3])
def test_a_record_is_played_again_with_the_same_answer(tmp_path, num_rounds):
    path = record(tmp_path / "record.json", num_rounds=num_rounds)
    first = replay(path)
    assert first.returncode == 0, first.stderr
    assert num_rounds == 1 or replay(path).stdout == first.stdout
    cells = [
        line.split() for line in first.stdout.splitlines()[2:-2]
    ]  # neither title nor head, nor the two lines behind
    rows = {" ".join(row[:-6]): [float(x) for x in row[-6:]] for row in cells if row}
    assert {"the table", "prior off", "without none", "without int8", "without int4"} <= rows.keys()
    found, least, at_random, at_most, num_measured, num_points = rows["the table"]
    assert 0.9 < least <= found <= at_most <= 1
    assert at_random < found
    assert num_points < num_measured <= 8  # 15 % of 54, of which one at least does not fit
    assert "predicted to be the fastest: " in first.stdout


def test_a_record_without_predictions_is_refused(tmp_path):
    done = replay(record(tmp_path / "old.json", num_rounds=1, with_predictions=False))
    assert done.returncode == 1
    assert "old.json has no predictions" in done.stderr


def test_todays_estimates_for_a_table_of_another_machine():
    done = replay(
        SCRIPT.parent / "results" / "optimize_share_h200.json", "--predict-for", "h200", seeds=1
    )
    assert done.returncode == 0, done.stderr
    off = {
        line.split(":")[0]: float(line.split()[1].rstrip("%"))
        for line in done.stdout.splitlines()[:2]
    }
    assert off["throughput"] < 5
    assert off["tpot_s"] < 12
    assert ", 1.000 of the measured best" in done.stdout
