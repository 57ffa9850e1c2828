"""What `slipstream plan` would choose of a grid of settings, against the measured best of the grid.

    python benchmarks/plan.py --study recommendation smollm2              on this CPU: 40 settings, about 3 s each
    python benchmarks/plan.py --study recommendation smollm2 --schemes none --sizes 2,8 --tokens 128,512    4 settings
    python benchmarks/plan.py --study recommendation --config llama-3-8b --kv-cache-dtype fp8 --gpu-grid --traffic 512/128 \
        --arrivals closed:64 --num-requests 192 --measure-steps --kv-cache-bytes 30000000000        on a GPU, about 15 s each
    python benchmarks/plan.py --study recommendation --replay FILE        judge a record again; nothing is measured

Every setting is measured once a round, in an order that is drawn anew for each, so that a machine whose speed drifts is alike
to all; the median of the rounds counts. The prediction is the simulator's, with estimated steps or (`--measure-steps`) with
those of each scheme, measured at the start of every round: the median of what these tables give. Among the settings that meet
`--slo` the one with the most output tokens a second is the best. Printed: the recommended setting's measured throughput over
the measured best (target: at least 0.97), and the same of the settings' mean.

The best of 40 medians is one of the lucky ones, all the more where a machine's speed changes. With `--again` the recommended
setting and the `FINALISTS` best are measured for that many more rounds, in turns, and only these rounds count for the target.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import math
import os
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

from slipstream.bench.adapters.slipstream import AsyncSlipstream
from slipstream.bench.load import parse_arrivals, run_load
from slipstream.bench.report import print_table
from slipstream.bench.workload import warmup
from slipstream.cli.plan import measure_table
from slipstream.config import EngineArgs
from slipstream.costs.metrics import parse_objectives, summarize
from slipstream.costs.step_cost import StepTable
from slipstream.errors import SlipstreamError
from slipstream.hub import resolve_model
from slipstream.optimize.traffic import RecordedTraffic, parse_traffic
from slipstream.simulate.engines import plan_engine, this_hardware
from slipstream.simulate.simulator import simulate
from slipstream.simulate.traffic import of_lengths
from slipstream.spec.description import ModelDescription, read_spec

TARGET = 0.97
FINALISTS = 3
CPU_GRID = {
    "quantization": (None, "int8"),
    "max_num_seqs": (1, 2, 4, 8, 16),
    "max_num_batched_tokens": (64, 128, 512, 2048),
}
GPU_GRID = {
    "quantization": ("fp8", "int8"),
    "max_num_seqs": (8, 16, 32, 64, 128),
    "max_num_batched_tokens": (512, 2048, 8192, 16384),
}

Setting = dict[str, Any]


def settings_of(grid: dict[str, tuple[Any, ...]]) -> list[Setting]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def name_of(setting: Setting) -> str:
    return " ".join(f"{name}={value}" for name, value in setting.items())


async def measure(base: EngineArgs, setting: Setting, traffic: RecordedTraffic) -> dict[str, Any]:
    """Output tokens a second and the 99th percentiles of the traffic; or the error."""
    try:
        async with await AsyncSlipstream.start(dataclasses.replace(base, **setting)) as engine:
            work = traffic.workload(engine.engine.description.spec.vocab_size)
            arrivals = parse_arrivals(traffic.arrivals)
            await run_load(
                engine, warmup(work, min(4, len(work.requests))), arrivals, seed=traffic.seed
            )
            summary = summarize(await run_load(engine, work.requests, arrivals, seed=traffic.seed))
    except SlipstreamError as error:
        return {"error": str(error)}
    return {**figures(summary), "load_average": os.getloadavg()[0]}


def figures(summary: Any) -> dict[str, Any]:
    if summary.num_failed or summary.ttft_s is None or summary.tpot_s is None:
        return {"error": "; ".join(summary.errors) or "too few tokens to time"}
    return {
        "throughput": summary.output_throughput,
        "ttft_s": summary.ttft_s.p99,
        "tpot_s": summary.tpot_s.p99,
        "e2e_s": summary.e2e_s.p99,
    }


def predict(
    base: EngineArgs,
    description: ModelDescription,
    setting: Setting,
    traffic: RecordedTraffic,
    table: StepTable | None,
) -> dict[str, Any]:
    try:
        planned = plan_engine(
            dataclasses.replace(base, **setting),
            description,
            this_hardware(base.device),
            table=table,
        )
    except SlipstreamError as error:
        return {"error": str(error)}
    load = of_lengths(traffic.source, traffic.lengths).traffic(
        parse_arrivals(traffic.arrivals), len(traffic.lengths), seed=traffic.seed
    )
    return figures(simulate(planned.simulated, load).summary)


def best(
    rows: list[dict[str, Any]], side: str, objectives: dict[str, float]
) -> dict[str, Any] | None:
    """The row with the most throughput of those that meet the objectives; the nearest to them where none does."""
    able = [r for r in rows if "error" not in r[side]]
    if not able:
        return None
    meeting = [r for r in able if all(r[side][name] <= most for name, most in objectives.items())]
    if meeting:
        return max(meeting, key=lambda r: r[side]["throughput"])
    return min(able, key=lambda r: max(r[side][name] / most for name, most in objectives.items()))


def judge(rows: list[dict[str, Any]], objectives: dict[str, float]) -> dict[str, Any]:
    chosen = best(rows, "predicted", objectives)
    finalists = [r for r in rows if r.get("again")]
    if finalists and (
        chosen is None or chosen in finalists
    ):  # not where a replay has other objectives
        found = judge_rows(finalists, chosen, objectives, "again")
        return {
            "num_settings": len(rows),
            "finalists": found,
            "of_all_rounds": judge_rows(rows, chosen, objectives),
        }
    return judge_rows(rows, chosen, objectives)


def judge_rows(
    rows: list[dict[str, Any]],
    chosen: dict[str, Any] | None,
    objectives: dict[str, float],
    side: str = "measured",
) -> dict[str, Any]:
    """`chosen` beside the best of these, by what `side` holds of them."""
    ideal = best(rows, side, objectives)
    assert ideal is not None, "nothing was measured"
    able = [r for r in rows if "error" not in r[side]]
    speeds = [r[side]["throughput"] for r in able]
    top = ideal[side]["throughput"]
    rounds = {"measured": "rounds", "again": "rounds_again"}[side]
    spread = [max(r[rounds]) / min(r[rounds]) for r in able if len(r[rounds]) > 1]
    share = None if chosen is None or "error" in chosen[side] else chosen[side]["throughput"] / top
    figures = {} if chosen is None else chosen[side]
    keeps = all(figures.get(name, math.inf) <= most for name, most in objectives.items())
    return {
        "num_settings": len(rows),
        "num_failed": len(rows) - len(able),
        "best": ideal["setting"],
        "recommended": None if chosen is None else chosen["setting"],
        "share_of_best": share,
        "share_of_mean": statistics.mean(speeds) / top,
        "keeps_objectives": keeps,
        "met": share is not None and share >= TARGET and keeps,
        "median_ratio_of_rounds": statistics.median(spread) if spread else None,
    }


RECORD = "recommendation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument(
        "--config", help="a folder of benchmarks/configs, with random weights, instead of a model"
    )
    parser.add_argument("--gpu-grid", action="store_true", help="the grid of a GPU")
    parser.add_argument("--schemes", help="of the grid, instead of its own; `none` is as stored")
    parser.add_argument("--sizes", help="max_num_seqs of the grid, such as 2,8, instead of its own")
    parser.add_argument("--tokens", help="max_num_batched_tokens of the grid, likewise")
    parser.add_argument("--traffic", default="64/32")
    parser.add_argument("--arrivals", default="closed:8")
    parser.add_argument("--num-requests", type=int, default=16)
    parser.add_argument("--slo", default="")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--kv-cache-bytes", default="auto")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--again", type=int, default=0, help="more rounds, of the recommended setting and the best"
    )
    parser.add_argument(
        "--measure-steps",
        action="store_true",
        help="measure steps in each round, for the prediction",
    )
    parser.add_argument("--step-rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=Path, help="a record of this script")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    objectives = parse_objectives(args.slo)
    if args.replay:
        rows = json.loads(args.replay.read_text("utf-8"))["rows"]
    else:
        rows = measured_rows(args, objectives)
    found = judge(rows, objectives)
    rows.sort(key=lambda r: -r["measured"].get("throughput", 0.0))
    shown = [
        (
            name_of(r["setting"]),
            *(f"{r[side].get('throughput', 0.0):,.1f}" for side in ("measured", "predicted")),
        )
        for r in rows
    ]
    print_table("output tokens a second", ("", "measured", "predicted"), shown)
    print(json.dumps(found, indent=1))
    settings = {name: getattr(value, "name", value) for name, value in vars(args).items()}
    save(settings=settings, found=found, rows=rows)


def measured_rows(args: Any, objectives: dict[str, float]) -> list[dict[str, Any]]:
    base = EngineArgs(
        model=str(common.CONFIGS / args.config) if args.config else args.model,
        load_format="dummy" if args.config else "auto",
        kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=args.max_model_len,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        **({} if args.kv_cache_bytes == "auto" else {"kv_cache_bytes": int(args.kv_cache_bytes)}),
    )
    description = read_spec(resolve_model(base.model))
    traffic = parse_traffic(
        args.traffic,
        args.arrivals,
        num_requests=args.num_requests,
        longest=args.max_model_len,
        seed=args.seed,
    )
    grid = dict(GPU_GRID if args.gpu_grid else CPU_GRID)
    if args.schemes:
        grid["quantization"] = tuple(
            None if name == "none" else name for name in args.schemes.split(",")
        )
    for name, given in (("max_num_seqs", args.sizes), ("max_num_batched_tokens", args.tokens)):
        if given:
            grid[name] = tuple(int(value) for value in given.split(","))
    rows: list[dict[str, Any]] = [
        {"setting": setting, "predictions": [], "all": []} for setting in settings_of(grid)
    ]
    rng = random.Random(args.seed)
    tables: dict[str | None, StepTable] = {}
    for number in range(args.rounds):
        for scheme in grid["quantization"] if args.measure_steps else ():
            with_scheme = dataclasses.replace(
                base, quantization=scheme, max_num_seqs=max(grid["max_num_seqs"])
            )
            try:
                tables[scheme], _ = measure_table(
                    with_scheme, description, longest=512, rounds=args.step_rounds
                )
            except SlipstreamError as error:
                print(f"steps of {scheme}: {error}", flush=True)
        for row in rows if args.measure_steps or number == 0 else ():
            table = tables.get(row["setting"]["quantization"])
            row["predictions"].append(predict(base, description, row["setting"], traffic, table))
        for place, row in enumerate(rng.sample(rows, len(rows))):
            found = asyncio.run(measure(base, row["setting"], traffic))
            row["all"].append(found)
            print(
                f"round {number + 1}, {place + 1} of {len(rows)}: {name_of(row['setting'])}: {found}",
                flush=True,
            )
    found_rows: list[dict[str, Any]] = [
        {
            "setting": row["setting"],
            "predicted": median_of(row["predictions"]),
            "measured": median_of(row["all"]),
            **{
                name: [f["throughput"] for f in row[of] if "error" not in f]
                for name, of in ROUNDS.items()
            },
        }
        for row in rows
    ]
    if args.again > 0:
        measure_again(
            found_rows,
            args.again,
            objectives,
            rng,
            lambda setting: asyncio.run(measure(base, setting, traffic)),
        )
    return found_rows


def measure_again(
    rows: list[dict[str, Any]],
    rounds: int,
    objectives: dict[str, float],
    rng: random.Random,
    measured: Callable[[Setting], dict[str, Any]],
) -> None:
    """Adds to the recommended row and the best ones what they are in further rounds."""
    chosen, finalists = best(rows, "predicted", objectives), []
    left = list(rows)
    while (
        left
        and len(finalists) < FINALISTS
        and (row := best(left, "measured", objectives)) is not None
    ):
        finalists.append(row)
        left = [r for r in left if r is not row]
    if chosen is not None and all(r is not chosen for r in finalists):
        finalists.append(chosen)
    found: list[list[dict[str, Any]]] = [[] for _ in finalists]
    for number in range(rounds):
        for i in rng.sample(range(len(finalists)), len(finalists)):
            found[i].append(measured(finalists[i]["setting"]))
            print(
                f"again {number + 1}: {name_of(finalists[i]['setting'])}: {found[i][-1]}",
                flush=True,
            )
    for row, of in zip(finalists, found, strict=True):
        row["again"] = median_of(of)
        row["rounds_again"] = [f["throughput"] for f in of if "error" not in f]


ROUNDS = {"rounds": "all", "predicted_rounds": "predictions"}


def median_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    done = [f for f in found if "error" not in f]
    return (
        {name: statistics.median(f[name] for f in done) for name in done[0]} if done else found[-1]
    )
