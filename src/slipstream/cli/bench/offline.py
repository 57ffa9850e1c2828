"""`slipstream bench latency|throughput`: measures an engine in this process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slipstream.cli.bench.measurements import (
    PEERS,
    add_workload,
    bench_args,
    deliver,
    finish,
    make_workload,
    parse_sizes,
    positive,
    refuse_engine_options,
    settle,
    verdict,
    vocab_size,
)
from slipstream.cli.console import phases, say
from slipstream.cli.options import MODEL_HELP
from slipstream.config import EngineArgs

if TYPE_CHECKING:
    from slipstream.costs.metrics import RequestTiming


def add_latency(latency: argparse.ArgumentParser) -> None:
    latency.add_argument("model", help=MODEL_HELP)
    latency.add_argument(
        "--batch-sizes", default="1,2,4,8", metavar="N,…", help="(default: 1,2,4,8)"
    )
    latency.add_argument(
        "--input-len", type=int, default=128, metavar="X", help="prompt tokens (default: 128)"
    )
    latency.add_argument(
        "--output-len", type=int, default=128, metavar="X", help="answer tokens (default: 128)"
    )
    latency.add_argument(
        "--repeat",
        type=int,
        default=3,
        metavar="X",
        help="runs, of which the median counts (default: 3)",
    )
    finish(latency, run_latency)


def add_throughput(throughput: argparse.ArgumentParser) -> None:
    throughput.add_argument("model", help=MODEL_HELP)
    throughput.add_argument("--engine", choices=("slipstream", *PEERS), default="slipstream")
    throughput.add_argument(
        "--batch-size",
        type=int,
        default=argparse.SUPPRESS,
        metavar="X",
        help="of the other engines (default: 8)",
    )
    throughput.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="X",
        help="runs, of which the median counts (default: 1)",
    )
    add_workload(throughput)
    finish(throughput, run_throughput)


def run_latency(args: argparse.Namespace) -> int:
    from slipstream.bench.adapters.slipstream import OfflineSlipstream
    from slipstream.bench.report import document, print_definitions, print_table
    from slipstream.bench.workload import fixed, warmup

    sizes = parse_sizes(args.batch_sizes)
    refuse_engine_options(args, text=False)
    positive(args, "input_len", "output_len", "repeat")
    settings = bench_args(args, needs_text=False, sharing=False)
    vocab = vocab_size(settings)
    with phases(f"starting {args.model}") as on_phase:
        engine = OfflineSlipstream(settings, progress=on_phase)
    rows = []
    try:
        for size in sizes:
            workload = fixed(
                size, args.input_len, args.output_len, vocab_size=vocab, seed=settings.seed
            )
            engine.run(warmup(workload, size))
            rows.append(
                {
                    "batch_size": size,
                    **latency_of([engine.run(workload.requests) for _ in range(args.repeat)]),
                }
            )
        description = engine.describe()
    finally:
        engine.close()
    result = document(
        "latency",
        input_len=args.input_len,
        output_len=args.output_len,
        engine=description,
        results=rows,
    )
    if not args.json:
        columns = ("batch", "TTFT, ms", "decode, ms/token", "output tok/s", "E2E, ms")
        cells = [
            (
                str(r["batch_size"]),
                _ms(r["ttft_s"]),
                _ms(r["tpot_s"]),
                f"{r['output_throughput']:,.1f}",
                _ms(r["e2e_s"]),
            )
            for r in rows
        ]
        print_table(
            f"{args.model}, {args.input_len} in, {args.output_len} out, {args.repeat} runs, medians",
            columns,
            cells,
        )
        print(
            "decode counts from a request's first token. Where the batch's prompts take several steps, it holds the later of"
        )
        print("these; --max-num-batched-tokens of all prompts together makes them one")
        print_definitions()
    deliver(args, result)
    return 0


def run_throughput(args: argparse.Namespace) -> int:
    from slipstream.bench.power import EnergyMeter
    from slipstream.bench.report import document, print_definitions, print_energy, print_summary
    from slipstream.bench.workload import warmup
    from slipstream.costs.metrics import summarize

    positive(args, "repeat")
    meter = EnergyMeter.required([getattr(args, "device", "auto")]) if args.energy else None
    settle(args)
    settings = bench_args(
        args, needs_text=args.workload == "sharegpt", sharing=args.workload == "shared-prefix"
    )
    workload = make_workload(args, settings)
    with phases(f"starting {args.engine}") as on_phase:
        engine = offline_engine(args, settings, on_phase)
    try:
        if args.warmup:
            engine.run(warmup(workload, args.warmup))
        runs, energies = [], []
        for i in range(args.repeat):
            before, begin = (meter.read() if meter else None), time.monotonic()
            runs.append(summarize(engine.run(workload.requests)))
            if meter is not None and before is not None:
                seconds = time.monotonic() - begin
                energies.append(meter.energy(before, meter.read(), seconds, runs[-1].output_tokens))
            say(f"run {i + 1} of {args.repeat}: {runs[-1].output_throughput:,.1f} output tok/s")
        description = engine.describe()
    finally:
        engine.close()
    median = sorted(range(len(runs)), key=lambda i: runs[i].output_throughput)[(len(runs) - 1) // 2]
    summary, energy = runs[median], energies[median] if energies else None
    each = [run.output_throughput for run in runs]
    result = document(
        "throughput",
        engine=description,
        workload=workload.describe(),
        results=summary,
        output_throughput_of_each_run=each,
        **({"energy": energy} if meter is not None else {}),
    )
    if not args.json:
        print_summary(
            f"{args.model} on {description['name']}, {workload.name} × {len(workload.requests)}",
            summary,
        )
        print_energy(energy)
        print_definitions()
    deliver(args, result)
    return verdict(summary)


def offline_engine(
    args: argparse.Namespace, settings: EngineArgs, on_phase: Callable[[str], None]
) -> Any:
    from slipstream.bench.adapters import ENGINES, EngineSetup, make_engine

    if args.engine == "slipstream":
        from slipstream.bench.adapters.slipstream import OfflineSlipstream

        return OfflineSlipstream(settings, progress=on_phase)
    from slipstream.hub import resolve_model

    setup = EngineSetup(
        engine=args.engine,
        model=settings.model,
        path=resolve_model(settings.model, download_dir=settings.download_dir),
        batch_size=args.batch_size,
        max_model_len=settings.max_model_len,
        settings={name: getattr(settings, name) for name in ENGINES[args.engine].settings or ()},
    )
    return make_engine(setup, on_phase)


def latency_of(runs: list[list[RequestTiming]]) -> dict[str, float | None]:
    """Median over runs of each run's median over its requests."""
    from slipstream.costs.metrics import distribution, summarize

    summaries = [summarize(run) for run in runs]
    found: dict[str, float | None] = {}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        median = distribution(d.p50 for s in summaries if (d := getattr(s, name)) is not None)
        found[name] = None if median is None else median.p50
    throughput = distribution(s.output_throughput for s in summaries)
    found["output_throughput"] = throughput.p50 if throughput is not None else None
    return found


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:,.2f}"
