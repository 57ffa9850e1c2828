"""How much of the front `slipstream optimize` finds with few measurements: every candidate is measured, then the search is
played again on that table.

    python benchmarks/plan.py --study optimizer smollm2 [--rounds 3]    on this CPU: every candidate of `slipstream optimize`
    python benchmarks/plan.py --study optimizer --config llama-3-8b --traffic 512/128 --arrivals closed:64 --num-requests 96
    python benchmarks/plan.py --study optimizer --replay FILE    play a record again: nothing is measured
    python benchmarks/plan.py --study optimizer --replay FILE --predict-for h200    with today's estimates as the prior

Every candidate is measured once a round, in an order that is drawn anew for each, so that a machine whose speed drifts is alike
to all. What was measured is kept in --state, and an interrupted run goes on. The record has each round and the search's prior,
and its replay has the same answer everywhere.

A game: the search asks for candidates and is told the figures of one round, drawn for each; a table of one round gets a noise
of 5 %. It ends after 15 % of the table. Its share is the hypervolume of what it asked for over that of the whole table, both by
the medians of the rounds. Beside it: as many candidates at random, and about the most that so many can have. Cross-checks play
the same without each of the compressions, and with a prior that is wrong by a factor for each compression (30 %).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import shutil
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import common

from slipstream.bench.load import ClosedLoop, parse_arrivals
from slipstream.bench.report import print_table
from slipstream.config import EngineArgs
from slipstream.costs.devices import find_device
from slipstream.errors import SlipstreamError
from slipstream.hub import machine_folder, resolve_model
from slipstream.optimize import run as search_run
from slipstream.optimize.candidates import Candidate, Prediction, Space, TrialResult
from slipstream.optimize.pareto import hypervolume
from slipstream.optimize.prior import simulated_prior
from slipstream.optimize.search import Search
from slipstream.optimize.traffic import parse_traffic
from slipstream.simulate.engines import this_hardware
from slipstream.spec.description import read_spec
from slipstream.spec.scheme import SCHEMES
from slipstream.worker.device import detect

TARGET = 0.97
NOISE = 0.05
PRIOR_OFF = 0.3
FIGURES = (
    "ttft_s_p99",
    "tpot_s_mean",
    "e2e_s_p99",
    "kl_stderr",
    "perplexity_ratio",
    "start_s",
    "load_average",
)
"""Figures of each round in a record."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """`rounds` are the results of each candidate, `predicted` the search's prior."""

    space: Space
    kl_limit: float
    rounds: Mapping[Candidate, list[TrialResult]]
    predicted: Mapping[Candidate, Prediction]

    def median(self, candidate: Candidate) -> TrialResult:
        done = [r for r in self.rounds[candidate] if r.point is not None]
        if not done:
            return self.rounds[candidate][-1]
        figures = {
            name: statistics.median(getattr(r, name) for r in done)
            for name in ("throughput", "tpot_s")
        }
        return dataclasses.replace(done[0], **figures)

    def without(self, compression: str) -> Table:
        left = tuple(c for c in self.space.compressions if c != compression)
        return dataclasses.replace(self, space=dataclasses.replace(self.space, compressions=left))

    def prior_off(self, seed: int) -> Table:
        rng = random.Random(seed)
        factors = {c: math.exp(rng.gauss(0, PRIOR_OFF)) for c in self.space.compressions}
        off = {
            c: dataclasses.replace(
                p,
                throughput=p.throughput * factors[c.compression],
                tpot_s=p.tpot_s / factors[c.compression],
            )
            for c, p in self.predicted.items()
        }
        return dataclasses.replace(self, predicted=off)


def play(table: Table, *, share: float, seed: int) -> dict[str, Any]:
    """One game."""
    every, rng = table.space.candidates(), random.Random(seed)
    truth = {c: table.median(c) for c in every}
    points = {c: r.point for c, r in truth.items() if r.point is not None}
    worst = [max(p[i] for p in points.values()) for i in (0, 1)]
    reference = (worst[0] + 0.1, worst[1] + 0.1, table.kl_limit * 1.1)

    def volume(asked: list[Candidate]) -> float:
        return hypervolume([points[c] for c in asked if c in points], reference)

    told = {c: _told(table.rounds[c], rng) for c in every}
    num_asked, most = 0, int(share * len(every))

    def measure(candidate: Candidate) -> TrialResult:
        nonlocal num_asked
        num_asked += 1
        return told[candidate]

    search = Search(
        table.space, table.predicted.__getitem__, measure, seed=seed, kl_limit=table.kl_limit
    )
    search.run(budget_s=most, clock=lambda: num_asked)  # a second each
    best: list[Candidate] = []
    for _ in range(most):
        best.append(max(points, key=lambda c: volume([*best, c])))
    whole = volume(list(points))
    return {
        "num_measured": num_asked,
        "num_points": len(search.points()),
        "found": volume([r.candidate for r in search.results]) / whole,
        "at_random": volume(rng.sample(every, most)) / whole,
        "at_most": volume(best) / whole,
    }


def _told(rounds: list[TrialResult], rng: random.Random) -> TrialResult:
    drawn, noise = rng.choice(rounds), [math.exp(rng.gauss(0, NOISE)) for _ in range(2)]
    if len(rounds) > 1 or drawn.point is None:
        return drawn
    assert drawn.throughput is not None
    assert drawn.tpot_s is not None
    return dataclasses.replace(
        drawn, throughput=drawn.throughput * noise[0], tpot_s=drawn.tpot_s * noise[1]
    )


def judge(table: Table, *, share: float, seeds: int) -> list[dict[str, Any]]:
    """The table itself, and the cross-checks: each with its games."""
    cases: dict[str, Callable[[int], Table]] = {
        "the table": lambda seed: table,
        "prior off": table.prior_off,
    }
    for compression in table.space.compressions:
        left = table.without(compression)
        if (
            sum(any(r.point is not None for r in table.rounds[c]) for c in left.space.candidates())
            > 1
        ):
            cases[f"without {compression}"] = lambda seed, left=left: left
    found = []
    for name, of in cases.items():
        games = [play(of(seed), share=share, seed=seed) for seed in range(seeds)]
        means = {key: statistics.mean(g[key] for g in games) for key in games[0]}
        found.append(
            {"case": name, **means, "least_found": min(g["found"] for g in games), "games": games}
        )
    return found


def measured(args: argparse.Namespace) -> Table:
    """Every candidate's figures, or its error, in each round."""
    args.state.mkdir(parents=True, exist_ok=True)
    model, dummy = args.model, bool(args.config)
    if dummy:  # results are of files with their times: a copy has the same in the next checkout
        model = str(args.state / args.config)
        if not Path(model).is_dir():
            shutil.copytree(common.CONFIGS / args.config, model)
    description = read_spec(resolve_model(model))
    traffic = parse_traffic(
        args.traffic, args.arrivals, num_requests=args.num_requests, longest=args.max_model_len
    )
    info, arrivals = detect(args.device, machine_folder()), parse_arrivals(args.arrivals)
    users = arrivals.concurrency if isinstance(arrivals, ClosedLoop) else len(traffic.lengths)
    space = search_run.default_space(users=users, on_gpu=info.is_cuda)
    if args.compressions:
        space = dataclasses.replace(
            space, compressions=search_run.check_compressions(args.compressions.split(","))
        )
    if dummy:  # a recipe needs weights
        space = dataclasses.replace(
            space, compressions=tuple(c for c in space.compressions if c == "none" or c in SCHEMES)
        )
    base = EngineArgs(
        model=model,
        device=args.device,
        max_model_len=args.max_model_len,
        load_format="dummy" if dummy else "auto",
    )
    limits = search_run.parse_quality_loss(args.max_quality_loss)
    prior = simulated_prior(base, description, traffic, this_hardware(args.device))
    text = {"source": args.text, "context": 512, "stride": 512, "num_windows": args.eval_windows}
    measurer = search_run.Measurer(
        base=base, traffic=traffic, objectives={}, limits=limits, folder=args.state, text=text
    )
    kept, every = args.state / "rounds.jsonl", space.candidates()
    rounds: dict[Candidate, list[TrialResult]] = {c: [] for c in every}
    for line in kept.read_text("utf-8").splitlines() if kept.is_file() else ():
        row = json.loads(line)
        if (
            row.pop("conditions") == measurer.conditions
            and (result := search_run.result_of(row, space)).candidate in rounds
        ):
            rounds[result.candidate].append(result)
    for number in range(args.rounds):
        for place, candidate in enumerate(random.Random(number).sample(every, len(every))):
            before = rounds[candidate]
            if len(before) > number or (
                before and not before[-1].fits
            ):  # what does not fit is not measured again
                continue
            try:
                result = measurer(candidate)
            except SlipstreamError as error:
                result = TrialResult(candidate=candidate, error=str(error))
            result = dataclasses.replace(
                result, figures={**result.figures, "load_average": os.getloadavg()[0]}
            )
            before.append(result)
            with kept.open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps({"conditions": measurer.conditions, **search_run.as_row(result)})
                    + "\n"
                )
            place_text = f"round {number + 1}, {place + 1} of {len(every)}"
            print(
                f"{place_text}: {candidate.name}: {result.throughput or result.error}", flush=True
            )
    return Table(
        space=space,
        kl_limit=limits.kl or 0.1,
        rounds=rounds,
        predicted={c: prior(c) for c in every},
    )


def rows_of(table: Table) -> list[dict[str, Any]]:
    """Rows of a record, for `read_record`."""
    rows = []
    for candidate, rounds in table.rounds.items():
        figures = [
            {
                "throughput": r.throughput,
                "tpot_s": r.tpot_s,
                "error": r.error,
                **{n: r.figures.get(n) for n in FIGURES},
            }
            for r in rounds
        ]
        rows.append({
            "compression": candidate.compression,
            "settings": dict(candidate.settings),
            "predicted": dataclasses.asdict(table.predicted[candidate]),
            "kl": rounds[-1].kl,
            "fits": rounds[-1].fits,
            "rounds": figures,
        })  # fmt: skip
    return rows


def read_record(path: Path) -> Table:
    data = json.loads(path.read_text("utf-8"))
    rows = data["rows"]
    if "kl_limit" not in data or any("predicted" not in row for row in rows):
        raise SystemExit(
            f"{path.name} has no predictions: it was not written by this version; measure again"
        )
    axes = {
        n: tuple(dict.fromkeys(row["settings"][n] for row in rows)) for n in rows[0]["settings"]
    }
    space = Space(compressions=tuple(dict.fromkeys(row["compression"] for row in rows)), axes=axes)
    rounds, predicted = {}, {}
    for row in rows:
        candidate = Candidate(row["compression"], tuple(row["settings"].items()))
        predicted[candidate] = Prediction(**row["predicted"])
        shared = {"candidate": candidate, "kl": row["kl"], "fits": row["fits"]}
        rounds[candidate] = [
            TrialResult(
                throughput=r["throughput"],
                tpot_s=r["tpot_s"],
                error=r["error"],
                figures=r,
                **shared,
            )
            for r in row["rounds"]
        ]
    return Table(space=space, kl_limit=data["kl_limit"], rounds=rounds, predicted=predicted)


def predicted_for(path: Path, table: Table, device: str) -> Table:
    """The table of a record of a `--config`, with today's estimates for a device that `slipstream plan` knows."""
    data = json.loads(path.read_text("utf-8"))
    given, config = data["settings"], common.CONFIGS / data["settings"]["config"]
    longest = given["max_model_len"]
    traffic = parse_traffic(
        given["traffic"], given["arrivals"], num_requests=given["num_requests"], longest=longest
    )
    base = EngineArgs(model=str(config), max_model_len=longest, load_format="dummy")
    prior = simulated_prior(base, read_spec(config), traffic, find_device(device))
    found = dataclasses.replace(table, predicted={c: prior(c) for c in table.rounds})
    for name in ("throughput", "tpot_s"):
        off = [
            getattr(found.predicted[c], name) / getattr(table.median(c), name) - 1
            for c in table.rounds
        ]
        print(
            f"{name}: {statistics.mean(map(abs, off)):.1%} from what was measured, {statistics.mean(off):+.1%} on average"
        )
    return found


RECORD = "optimize_share"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument(
        "--config",
        help="a folder of benchmarks/configs, with random weights, whose quality is guessed",
    )
    parser.add_argument("--traffic", default="128/64")
    parser.add_argument("--arrivals", default="closed:8")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--max-quality-loss", default="kl=0.05")
    parser.add_argument(
        "--compressions", help="instead of those that `slipstream optimize` tries on this device"
    )
    parser.add_argument("--eval-windows", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--text", default="sharegpt")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each candidate")
    parser.add_argument("--share", type=float, default=0.15)
    parser.add_argument("--seeds", type=int, default=20, help="games of each case")
    parser.add_argument("--state", type=Path, default=Path("optimize_share.state"))
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="play this record; --output, if given, has the shares",
    )
    parser.add_argument(
        "--predict-for", metavar="DEVICE", help="with --replay: today's estimates for this device"
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    table = read_record(args.replay) if args.replay else measured(args)
    if args.predict_for:
        if not args.replay:
            raise SystemExit("--predict-for goes with --replay FILE")
        table = predicted_for(args.replay, table, args.predict_for)
    found = judge(table, share=args.share, seeds=args.seeds)
    columns = ("found", "least_found", "at_random", "at_most", "num_measured", "num_points")
    cells = [
        (row["case"], *(f"{row[n]:.3f}" if row[n] <= 1 else f"{row[n]:.1f}" for n in columns))
        for row in found
    ]
    print_table(
        f"share of the hypervolume of {len(table.rounds)} candidates (target {TARGET})",
        ("", *columns),
        cells,
    )
    points = {
        c: r.throughput for c in table.rounds if (r := table.median(c)).throughput is not None
    }
    chosen = max(points, key=lambda c: table.predicted[c].throughput)
    print(
        f"predicted to be the fastest: {chosen.name}, {points[chosen] / max(points.values()):.3f} of the measured best"
    )
    loads = [
        load
        for rounds in table.rounds.values()
        for r in rounds
        if (load := r.figures.get("load_average")) is not None
    ]
    print(
        f"load average {min(loads):.1f} to {max(loads):.1f}"
        if loads
        else "no load averages in the table"
    )
    if args.replay:
        if (
            args.output != common.RESULTS / f"{RECORD}.json"
        ):  # that is the record of what was measured
            save(replayed=args.replay.name, predicted_for=args.predict_for, found=found)
    else:
        settings = {name: getattr(value, "name", value) for name, value in vars(args).items()}
        save(settings=settings, kl_limit=table.kl_limit, found=found, rows=rows_of(table))
