"""`slipstream plan`'s simulator against measurements, on loads that are drawn at random.

    python benchmarks/plan.py --study prediction             # ten loads of SmolLM2 on this CPU
    python benchmarks/plan.py --study prediction --held-out --config llama-3-8b --quantization fp8 --kv-cache-dtype fp8 \
        --num-loads 6 --max-load-s 7 --least-s 0.25 --rounds 1    # on a GPU
    python benchmarks/plan.py --study prediction --record    # recorded loads over HTTP, on an H200

A load has lengths, and a rate or a number of users, drawn by `--seed` or given by `--loads`, and is measured through
`AsyncLLM`. A shared machine's speed changes within minutes, so steps and loads take turns over `--rounds`: a run is predicted
by the steps, and the host's part of them, measured right before and after it. Medians over rounds are compared. A prediction
knows of a load only its lengths and arrivals.

With `--held-out` the table is measured first. Then every load is predicted, by the table and by estimated steps, and the
predictions are printed before the first load runs. `--table` (the file of `--study steps`) takes the place of measuring.
A GPU's steps are to be measured for longer each (`--least-s`), so that it draws the power that it draws under a load.

Errors are of the mean TPOT and TTFT, and of output tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common

from slipstream.bench.adapters.slipstream import AsyncSlipstream
from slipstream.bench.host_costs import USERS, measure_host
from slipstream.bench.load import Arrivals, ClosedLoop, Poisson, run_load
from slipstream.bench.report import print_table
from slipstream.bench.workload import from_lengths
from slipstream.config import EngineArgs
from slipstream.costs.devices import find_device
from slipstream.costs.metrics import Summary, summarize
from slipstream.costs.step_cost import HostCost, MeasuredStep, StepTable, fit_steps, read_table
from slipstream.simulate.engines import PlannedEngine, plan_engine, run_ahead, this_hardware
from slipstream.simulate.simulator import simulate
from slipstream.simulate.traffic import of_lengths, parse_workload
from slipstream.spec.description import read_spec
from slipstream.worker.local_executor import LocalExecutor
from slipstream.worker.start.step_costs import grid, measure_steps

TARGETS = {"tpot": 0.08, "ttft": 0.15, "throughput": 0.08}
MEASURED_CACHE, GPU_CACHE = 512 * 2**20, 24 * 2**30
LONGEST_ON_GPU = 4200  # tokens of a context, which those of the loads do not pass


def draw(rng: random.Random, capacity: float, scale: int) -> dict[str, Any]:
    """Lengths around a random mean; users or a rate up to four fifths of `capacity` tokens a second."""
    mean_in, mean_out = rng.choice((16, 32, 64, 128, 256)) * scale, rng.choice((16, 32, 64)) * scale
    count = rng.choice((12, 16, 24)) * scale
    lengths = [
        tuple(rng.randint(mean // 2, 3 * mean // 2) for mean in (mean_in, mean_out))
        for _ in range(count)
    ]
    if rng.random() < 0.5:
        return {"lengths": lengths, "users": rng.choice((1, 2, 4, 8, 16, 24)) * scale}
    return {
        "lengths": lengths,
        "rate": round(rng.uniform(0.2, 0.8) * capacity / (mean_in / 4 + mean_out), 3),
    }


def loads_of(args: Any, capacity: float, scale: int) -> list[dict[str, Any]]:
    if args.loads is not None:
        given: list[dict[str, Any]] = json.loads(args.loads.read_text("utf-8"))
        return given
    rng = random.Random(args.seed)
    return [bounded(draw(rng, capacity, scale), args.max_load_s) for _ in range(args.num_loads)]


def arrivals_of(load: dict[str, Any]) -> Arrivals:
    return ClosedLoop(concurrency=load["users"]) if "users" in load else Poisson(rate=load["rate"])


def predicted(engine: PlannedEngine, load: dict[str, Any], seed: int) -> Summary:
    traffic = of_lengths("drawn", load["lengths"]).traffic(
        arrivals_of(load), len(load["lengths"]), seed=seed
    )
    return simulate(engine.simulated, traffic).summary


def figures(summary: Summary) -> dict[str, float]:
    assert summary.ttft_s is not None
    tpot = summary.tpot_s.mean if summary.tpot_s is not None else 0.0
    return {"tpot": tpot, "ttft": summary.ttft_s.mean, "throughput": summary.output_throughput}


def errors(found: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    return {name: abs(found[name] / measured[name] - 1) for name in measured if measured[name]}


async def validate(args: Any, settings: EngineArgs) -> tuple[list[dict[str, Any]], StepTable]:
    """Rounds of every load. Each run is predicted by the steps, and by what the host adds to them, measured right before and
    after it. A load is what it is at the median of its runs, and its prediction the median of theirs: where requests queue,
    one that ends a little later waits for a whole burst of prompts. The table returned is the last run's."""
    executor = LocalExecutor.build(settings)
    config, description = executor.config, executor.description
    info, vocab = config.device.info, description.spec.vocab_size
    while executor.capture_next():
        pass
    seqs = (
        config.scheduling.max_num_seqs if info.is_cuda else min(32, config.scheduling.max_num_seqs)
    )
    limits = seqs, config.scheduling.max_num_batched_tokens, config.model.max_model_len
    scale, capacity = (8, 15000.0) if info.is_cuda else (1, 800.0)
    loads = loads_of(args, capacity, scale)
    longest = (
        LONGEST_ON_GPU
        if info.is_cuda
        else max(600, *(sum(lengths) for load in loads for lengths in load["lengths"]))
    )
    steps = grid(*limits, executor.ledger.num_kv_tokens, longest)
    planned = plan_engine(settings, description, this_hardware(settings.device), info=info)
    planned = dataclasses.replace(planned.with_blocks(executor.ledger.num_blocks), config=config)
    ahead = run_ahead(is_gpu=info.is_cuda, num_threads=config.device.num_threads)
    tables: list[StepTable] = []
    found: list[list[dict[str, float]]] = [[] for _ in loads]
    measured: list[list[dict[str, float]]] = [[] for _ in loads]

    async def beside() -> tuple[list[MeasuredStep], HostCost]:
        now = measure_steps(executor, steps, rounds=1, least_s=args.least_s)
        fitted = fit_steps(now, identity={}, made_by={})
        return now, await measure_host(
            engine, fitted, vocab_size=vocab, run_ahead=ahead, users=(1, 4, 8, 12, 24)
        )

    async with await AsyncSlipstream.start(settings) as engine:
        for _ in range(args.rounds):
            before = await beside()
            for number, load in enumerate(loads):
                bench = from_lengths("drawn", load["lengths"], vocab_size=vocab, seed=number)
                records = await run_load(engine, bench.requests, arrivals_of(load), seed=number)
                measured[number].append(figures(summarize(records)))
                after = await beside()
                points, hosts = zip(before, after, strict=True)
                tables.append(
                    fit_steps(
                        middle_of(list(points)), identity={}, made_by={}, host=mean_host(hosts)
                    )
                )
                found[number].append(
                    figures(predicted(dataclasses.replace(planned, table=tables[-1]), load, number))
                )
                before = after
                print(number, measured[number][-1], found[number][-1], flush=True)
    rows = []
    for number, load in enumerate(loads):
        middle, by_table = medians(measured[number]), medians(found[number])
        fit_error = statistics.median(table.error for table in tables[number :: len(loads)])
        row = {
            "load": shown(load),
            "measured": middle,
            "runs": measured[number],
            "predicted": by_table,
        }
        row |= {"predicted_runs": found[number], "errors": errors(by_table, middle)}
        rows.append(row | {"fit_error": fit_error, "load_average": os.getloadavg()[0]})
    return rows, tables[-1]


def mean_host(hosts: Sequence[HostCost]) -> HostCost:
    costs = ("step_s", "sequence_s", "ahead_s", "request_s")
    return HostCost(
        **{name: statistics.fmean(getattr(h, name) for h in hosts) for name in costs},
        label="measured",
    )


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def middle_of(tables: list[list[MeasuredStep]]) -> list[MeasuredStep]:
    """Median time of each step."""
    return [
        MeasuredStep(of[0].shape, statistics.median(p.seconds for p in of))
        for of in zip(*tables, strict=True)
    ]


def shown(load: dict[str, Any]) -> dict[str, Any]:
    of_all = {name: value for name, value in load.items() if name != "lengths"}
    return of_all | {"num_requests": len(load["lengths"]), "mean_lengths": means(load["lengths"])}


async def held_out(
    args: Any, settings: EngineArgs, phase: Callable[[str], None]
) -> tuple[list[dict[str, Any]], StepTable]:
    """Every prediction is made before the first load runs; nothing of a load is known to it but lengths and arrivals."""
    hardware, begin = this_hardware(settings.device), time.monotonic()
    table = (
        read_table(json.loads(args.table.read_text("utf-8")), args.table.name)
        if args.table
        else None
    )
    points = measured_steps(args, settings) if table is None else ()
    phase("steps")
    scale, capacity = (8, 15000.0) if hardware.is_gpu else (1, 800.0)
    rows: list[dict[str, Any]] = []
    loads = loads_of(args, capacity, scale)
    async with await AsyncSlipstream.start(settings) as engine:
        phase("start")
        config = engine.engine.config
        ledger = engine.engine.ledger
        description = engine.engine.description
        info, vocab = config.device.info, description.spec.vocab_size
        warm = from_lengths("warm", [(64, 16)] * 8, vocab_size=vocab, seed=args.seed)
        await run_load(engine, warm.requests, ClosedLoop(concurrency=8))
        if table is None:
            fitted = fit_steps(points, identity={}, made_by={})
            ahead = run_ahead(is_gpu=info.is_cuda, num_threads=config.device.num_threads)
            users = [n for n in USERS if n <= config.scheduling.max_num_seqs]
            table = fitted.with_host(
                await measure_host(engine, fitted, vocab_size=vocab, run_ahead=ahead, users=users)
            )
        by_table = plan_engine(settings, description, hardware, info=info, table=table)
        by_table = dataclasses.replace(by_table.with_blocks(ledger.num_blocks), config=config)
        engines = {"predicted": by_table, "estimated": dataclasses.replace(by_table, table=None)}
        for number, load in enumerate(loads):
            rows.append(
                {
                    "load": shown(load),
                    **{by: figures(predicted(of, load, number)) for by, of in engines.items()},
                }
            )
            print(json.dumps(rows[-1]), flush=True)
        phase("host and predictions")
        for number, (load, row) in enumerate(zip(loads, rows, strict=True)):
            if time.monotonic() - begin > args.budget_s:
                print(
                    f"the budget of {args.budget_s:g} s is over: {args.num_loads - number} loads were not measured"
                )
                break
            bench = from_lengths("drawn", load["lengths"], vocab_size=vocab, seed=number)
            measured = figures(
                summarize(await run_load(engine, bench.requests, arrivals_of(load), seed=number))
            )
            row["measured"] = measured
            row |= {
                "errors": errors(row["predicted"], measured),
                "errors_estimated": errors(row["estimated"], measured),
            }
            row |= {"fit_error": table.error, "load_average": os.getloadavg()[0]}
            print(json.dumps(row), flush=True)
        phase("loads")
    return [row for row in rows if "measured" in row], table


def measured_steps(args: Any, settings: EngineArgs) -> list[MeasuredStep]:
    """Measured times of steps, by an engine that is gone afterwards."""
    executor = LocalExecutor.build(settings)
    while executor.capture_next():
        pass
    scheduling = executor.config.scheduling
    longest = LONGEST_ON_GPU if executor.config.device.info.is_cuda else 600
    limits = (
        scheduling.max_num_seqs,
        scheduling.max_num_batched_tokens,
        executor.config.model.max_model_len,
    )
    steps = grid(*limits, executor.ledger.num_kv_tokens, longest)
    points = measure_steps(executor, steps, rounds=args.rounds, least_s=args.least_s)
    platform = executor.runner.platform
    del executor
    gc.collect()
    platform.release_unused()
    return points


def bounded(load: dict[str, Any], most_s: float) -> dict[str, Any]:
    """Fewer requests, where a load would last much longer: three answers of each user, or what arrives in `most_s`."""
    if most_s == float("inf"):
        return load
    most = 3 * load["users"] if "users" in load else int(load["rate"] * most_s) + 1
    return {**load, "lengths": load["lengths"][:most]}


def means(lengths: list[tuple[int, int]]) -> list[float]:
    return [sum(column) / len(lengths) for column in zip(*lengths, strict=True)]


def recorded() -> list[dict[str, Any]]:
    """The recorded loads over HTTP: TTFT and TPOT at the median."""
    path = common.CONFIGS / "llama-3-8b"
    args = EngineArgs(
        model=str(path),
        quantization="fp8",
        kv_cache_dtype="fp8",
        enable_prefix_caching=False,
        max_num_seqs=1024,
    )
    engine = plan_engine(args, read_spec(Path(path)), find_device("h200")).simulated
    sharegpt, fixed = parse_workload("sharegpt"), parse_workload("fixed:512/128")
    loads = {
        "poisson-40": sharegpt.at_rate(40, 800),
        "poisson-90": sharegpt.at_rate(90, 1200),
        "1024": sharegpt.traffic(ClosedLoop(concurrency=1024), 2000),
        "256": fixed.traffic(ClosedLoop(concurrency=256), 768),
        "64": sharegpt.traffic(ClosedLoop(concurrency=64), 256),
    }
    rows = []
    for row in json.loads((common.RESULTS / RECORDED).read_text())["rows"]:
        if row["load"] not in loads:
            continue
        of_load = row["results"]
        measured = {name: of_load[f"{name}_s"]["p50"] for name in ("tpot", "ttft")}
        measured["throughput"] = of_load["output_throughput"]
        summary = simulate(engine, loads[row["load"]]).summary
        assert summary.ttft_s is not None
        assert summary.tpot_s is not None
        found = {
            "tpot": summary.tpot_s.p50,
            "ttft": summary.ttft_s.p50,
            "throughput": summary.output_throughput,
        }
        rows.append(
            {
                "load": row["load"],
                "measured": measured,
                "predicted": found,
                "errors": errors(found, measured),
            }
        )
    return rows


RECORD = "prediction"
RECORDED = "online_split_keys_all.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record",
        action="store_true",
        help="against the recorded loads of an H200; nothing is measured",
    )
    parser.add_argument(
        "--held-out", action="store_true", help="predict all loads before the first runs"
    )
    parser.add_argument(
        "--table",
        type=Path,
        help="with --held-out: a file of `--study steps` instead of measuring steps",
    )
    parser.add_argument("--config")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--num-loads", type=int, default=10)
    parser.add_argument(
        "--loads",
        type=Path,
        help="a JSON list of loads in place of drawn ones: lengths, and a rate or users",
    )
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument(
        "--max-load-s", type=float, default=float("inf"), help="about as long as a load lasts"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=float("inf"),
        help="with --held-out: after this no load begins",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        help="measurements of each step and, without --held-out, of each load",
    )
    parser.add_argument("--least-s", type=float, default=0.03, help="seconds of each of a step's")
    parser.add_argument("--seed", type=int, default=20)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    took, last = {}, [time.monotonic()]
    table: StepTable | None = None

    def phase(name: str) -> None:
        now = time.monotonic()
        took[name], last[0] = now - last[0], now
        print(f"{name}: {took[name]:.1f} s", flush=True)

    if args.record:
        rows = recorded()
    else:
        settings = EngineArgs(
            model=str(common.CONFIGS / args.config) if args.config else "smollm2",
            load_format="dummy" if args.config else "auto",
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            kv_cache_bytes=GPU_CACHE
            if args.config
            else MEASURED_CACHE,  # two engines, one after or beside the other
            max_num_seqs=args.max_num_seqs,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
        )
        rows, table = asyncio.run(
            held_out(args, settings, phase) if args.held_out else validate(args, settings)
        )
    if not rows:
        raise SystemExit("no load was measured")
    found = {
        "errors": "by the table" if args.held_out else "predicted",
        "errors_estimated": "by estimated steps",
    }
    of_all = {}
    for kind, title in found.items():
        if kind not in rows[0]:
            continue
        by = "estimated" if kind == "errors_estimated" else "predicted"
        lines = [
            (
                str(r["load"]),
                *(
                    f"{r['measured'][n]:.4g} · {r[by][n]:.4g} · {r[by][n] / r['measured'][n] - 1:+.0%}"
                    for n in TARGETS
                ),
            )
            for r in rows
        ]
        print_table(f"measured · {title} · error", ("load", *TARGETS), lines)
        of_all[kind] = {
            name: sum(r[kind][name] for r in rows if name in r[kind]) / len(rows)
            for name in TARGETS
        }
        print(
            {
                name: f"{value:.1%} (target {TARGETS[name]:.0%})"
                for name, value in of_all[kind].items()
            }
        )
    shown_settings = {
        **vars(args),
        "output": args.output.name,
        "table": args.table and args.table.name,
    }
    shown_settings = {
        name: value for name, value in shown_settings.items() if value != float("inf")
    }
    save(
        settings=shown_settings,
        mean_errors=of_all["errors"],
        estimated=of_all.get("errors_estimated"),
        took=took,
        rows=rows,
        table=table and table.as_data(),
    )
