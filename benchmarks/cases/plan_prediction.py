"""`slipstream plan`'s simulator against measurements, on loads that are drawn at random.

    python benchmarks/plan.py --study prediction             # ten loads of SmolLM2 on this CPU
    python benchmarks/plan.py --study prediction --config llama-3-8b --quantization fp8 --num-loads 6    # on a GPU
    python benchmarks/plan.py --study prediction --config llama-3-8b --quantization fp8 --num-loads 6 --table FILE
    python benchmarks/plan.py --study prediction --record    # the recorded loads of results/online.json, on an H200

A load has lengths, and a rate or a number of users, drawn by `--seed`. Each is measured through `AsyncLLM`, between two
measurements of the table of steps in the same minutes, since a shared machine's speed changes; the prediction is that of the
two tables together. With `--table` (the file of `--study steps`) all predictions are made by that table before the load is
measured: held-out loads. Errors are of the mean TPOT and TTFT, and of output tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

from slipstream.bench.adapters.slipstream import AsyncSlipstream
from slipstream.bench.host_costs import measure_host
from slipstream.bench.load import Arrivals, ClosedLoop, Poisson, run_load
from slipstream.bench.metrics import Summary, summarize
from slipstream.bench.report import print_table
from slipstream.bench.workload import Workload, from_lengths
from slipstream.config import EngineArgs
from slipstream.plan.devices import find_device
from slipstream.plan.engines import PlannedEngine, plan_engine
from slipstream.plan.simulate import simulate
from slipstream.plan.step_cost import HostCost, MeasuredStep, fit_steps, read_table
from slipstream.plan.traffic import of_lengths, parse_workload
from slipstream.spec.description import read_spec
from slipstream.worker.executor import LocalExecutor
from slipstream.worker.step_costs import grid, measure_steps

TARGETS = {"tpot": 0.08, "ttft": 0.15, "throughput": 0.08}
MEASURED_CACHE, GPU_CACHE = 512 * 2**20, 35 * 2**30


def draw(rng: random.Random, capacity: float, scale: int) -> dict[str, Any]:
    """Lengths around a random mean; users or a rate up to four fifths of `capacity` tokens a second."""
    mean_in, mean_out = rng.choice((16, 32, 64, 128, 256)) * scale, rng.choice((16, 32, 64)) * scale
    count = rng.choice((12, 16, 24)) * scale
    lengths = [tuple(rng.randint(mean // 2, 3 * mean // 2) for mean in (mean_in, mean_out)) for _ in range(count)]
    if rng.random() < 0.5:
        return {"lengths": lengths, "users": rng.choice((1, 2, 4, 8, 16, 24)) * scale}
    return {"lengths": lengths, "rate": round(rng.uniform(0.2, 0.8) * capacity / (mean_in / 4 + mean_out), 3)}


def arrivals_of(load: dict[str, Any]) -> Arrivals:
    return ClosedLoop(concurrency=load["users"]) if "users" in load else Poisson(rate=load["rate"])


def predicted(engine: PlannedEngine, load: dict[str, Any], seed: int) -> Summary:
    traffic = of_lengths("drawn", load["lengths"]).traffic(arrivals_of(load), len(load["lengths"]), seed=seed)
    return simulate(engine.simulated, traffic).summary


def figures(summary: Summary) -> dict[str, float]:
    assert summary.ttft_s is not None
    tpot = summary.tpot_s.mean if summary.tpot_s is not None else 0.0
    return {"tpot": tpot, "ttft": summary.ttft_s.mean, "throughput": summary.output_throughput}


def errors(found: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    return {name: abs(found[name] / measured[name] - 1) for name in measured if measured[name]}


async def validate(args: Any, settings: EngineArgs) -> list[dict[str, Any]]:
    executor = LocalExecutor.build(settings, by_torch=True)
    config, description = executor.config, executor.description
    info, vocab = config.device.info, description.spec.vocab_size
    seqs, tokens = min(32, config.scheduling.max_num_seqs), config.scheduling.max_num_batched_tokens
    if info.is_cuda:
        seqs = config.scheduling.max_num_seqs
        while executor.capture_next():
            pass
    steps = grid(seqs, tokens, config.model.max_model_len, executor.ledger.num_kv_tokens, 600 if not info.is_cuda else 4096)
    hardware = find_device("h200" if info.is_cuda else "cpu-2-avx512")
    rng, rows = random.Random(args.seed), []

    def table() -> list[MeasuredStep]:
        return measure_steps(executor, steps, rounds=args.rounds, least_s=0.005)

    async with await AsyncSlipstream.start(settings) as engine:
        before = table()
        host = HostCost()
        capacity = 800.0 if not info.is_cuda else 15000.0
        for number in range(args.num_loads):
            load = draw(rng, capacity, 1 if not info.is_cuda else 8)
            bench = from_lengths("drawn", load["lengths"], vocab_size=vocab, seed=number)
            if number % 3 == 0:  # in the same minutes, too
                fitted = fit_steps(before, identity={}, made_by={})
                ahead = None if info.is_cuda else 8
                host = await measure_host(engine, fitted, vocab_size=vocab, run_ahead=ahead, users=(1, 12, 24))
            records = await run_load(engine, bench.requests, arrivals_of(load), seed=number)
            after = table()
            fitted = fit_steps([*before, *after], identity={}, made_by={}, host=host)
            planned = plan_engine(settings, description, hardware, info=info, table=fitted)
            planned = dataclasses.replace(planned.with_blocks(executor.ledger.num_blocks), config=config)
            measured, found = figures(summarize(records)), figures(predicted(planned, load, number))
            shown = {k: v for k, v in load.items() if k != "lengths"}
            row = {
                "load": {**shown, "num_requests": len(records), "mean_lengths": mean_lengths(bench)},
                "measured": measured,
                "predicted": found,
                "errors": errors(found, measured),
                "table_before_after": mean_ratio(before, after),
                "fit_error": fitted.error,
                "host": dataclasses.asdict(host),
                "load_average": os.getloadavg()[0],
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
            before = after
    return rows


async def held_out(args: Any, settings: EngineArgs) -> list[dict[str, Any]]:
    """By a table that was measured beforehand; nothing of the load is known to the prediction but lengths and arrivals."""
    table = read_table(json.loads(args.table.read_text("utf-8")), args.table.name)
    rng, rows = random.Random(args.seed), []
    async with await AsyncSlipstream.start(settings) as engine:
        config, ledger, description = engine.engine.config, engine.engine.ledger, engine.engine.description
        info, vocab = config.device.info, description.spec.vocab_size
        hardware = find_device("h200" if info.is_cuda else "cpu-2-avx512")
        planned = plan_engine(settings, description, hardware, info=info, table=table)
        planned = dataclasses.replace(planned.with_blocks(ledger.num_blocks), config=config)
        warm = from_lengths("warm", [(64, 16)] * 8, vocab_size=vocab, seed=args.seed)
        await run_load(engine, warm.requests, ClosedLoop(concurrency=8))
        for number in range(args.num_loads):
            load = draw(rng, 15000.0 if info.is_cuda else 800.0, 8 if info.is_cuda else 1)
            found = figures(predicted(planned, load, number))
            bench = from_lengths("drawn", load["lengths"], vocab_size=vocab, seed=number)
            measured = figures(summarize(await run_load(engine, bench.requests, arrivals_of(load), seed=number)))
            shown = {k: v for k, v in load.items() if k != "lengths"}
            row = {
                "load": {**shown, "num_requests": len(bench.requests), "mean_lengths": mean_lengths(bench)},
                "measured": measured,
                "predicted": found,
                "errors": errors(found, measured),
                "load_average": os.getloadavg()[0],
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def mean_lengths(bench: Workload) -> list[float]:
    return [bench.input_tokens / len(bench.requests), bench.output_tokens / len(bench.requests)]


def mean_ratio(before: list[MeasuredStep], after: list[MeasuredStep]) -> float:
    """How much slower the machine was after the load than before it."""
    return sum(b.seconds / a.seconds for a, b in zip(before, after, strict=True)) / len(before)


def recorded() -> list[dict[str, Any]]:
    """The last server of the record: five loads, TTFT and TPOT at the median."""
    server = json.loads((common.RESULTS / "online.json").read_text())["servers"]
    path = common.CONFIGS / "llama-3-8b"
    args = EngineArgs(model=str(path), quantization="fp8", kv_cache_dtype="fp8", enable_prefix_caching=False, max_num_seqs=1024)
    engine = plan_engine(args, read_spec(Path(path)), find_device("h200")).simulated
    sharegpt, fixed = parse_workload("sharegpt"), parse_workload("fixed:512/128")
    loads = {
        "p40": sharegpt.at_rate(40, 800),
        "p90": sharegpt.at_rate(90, 1200),
        "1024": sharegpt.traffic(ClosedLoop(concurrency=1024), 2000),
        "256": fixed.traffic(ClosedLoop(concurrency=256), 768),
        "64": sharegpt.traffic(ClosedLoop(concurrency=64), 256),
    }
    rows = []
    for name, traffic in loads.items():
        runs = [s["loads"][name][-1] for s in server if name in s["loads"]]
        last = runs[-1]  # of the latest server that ran it
        measured = {"tpot": last["tpot_ms"][0] / 1e3, "ttft": last["ttft_ms"][0] / 1e3, "throughput": last["tok_s"]}
        summary = simulate(engine, traffic).summary
        assert summary.ttft_s is not None
        assert summary.tpot_s is not None
        found = {"tpot": summary.tpot_s.p50, "ttft": summary.ttft_s.p50, "throughput": summary.output_throughput}
        rows.append({"load": name, "measured": measured, "predicted": found, "errors": errors(found, measured)})
    return rows


RECORD = "prediction"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", action="store_true", help="against the recorded loads of an H200; nothing is measured")
    parser.add_argument("--table", type=Path, help="what steps take: a file of `--study steps`; none is measured here")
    parser.add_argument("--config")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--num-loads", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=20)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    if args.record:
        rows = recorded()
    else:
        settings = EngineArgs(
            model=str(common.CONFIGS / args.config) if args.config else "smollm2",
            load_format="dummy" if args.config else "auto",
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            kv_cache_bytes=None if args.table else GPU_CACHE if args.config else MEASURED_CACHE,  # two engines side by side
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
        )
        rows = asyncio.run((held_out if args.table else validate)(args, settings))
    means = {name: sum(r["errors"][name] for r in rows if name in r["errors"]) / len(rows) for name in TARGETS}
    shown = [
        (
            str(r["load"] if isinstance(r["load"], str) else dict(r["load"].items())),
            *(f"{r['measured'][n]:.4g} · {r['predicted'][n]:.4g} · {r['errors'].get(n, 0):.0%}" for n in TARGETS),
        )
        for r in rows
    ]
    print_table("measured · predicted · error", ("load", *TARGETS), shown)
    print({name: f"{value:.1%} (target {TARGETS[name]:.0%})" for name, value in means.items()})
    shown_settings = {**vars(args), "output": args.output.name, "table": args.table and args.table.name}
    save(settings=shown_settings, mean_errors=means, rows=rows)
