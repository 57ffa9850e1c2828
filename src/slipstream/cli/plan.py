"""`slipstream plan MODEL`: what a model needs and carries, before buying or starting anything.

The engine's own scheduler runs the traffic on a virtual clock. What steps take comes from a table measured on such a device,
or from bytes, operations and the device's rates; each figure says which (measured, interpolated, estimated). `--measure` makes
this machine's table for the model. Weights are not needed: a folder with a config.json is enough.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.console import phases, print_info, print_json, progress_bar
from slipstream.cli.options import MODEL_HELP, add_engine_options, add_output_options, engine_args
from slipstream.errors import ConfigError, OutOfMemoryError
from slipstream.files import writing
from slipstream.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from slipstream.config import EngineArgs
    from slipstream.costs.step_cost import StepTable
    from slipstream.simulate.recommend import OfferedLoad
    from slipstream.spec.description import ModelDescription

MEASURED_CACHE_BYTES = 2**30
IDLE_S = 1.0
BUSY_S = 3.0
"""For so long the power of a device at rest is measured, where it tells it."""

LONGEST_MEASURED = 4096
"""Tokens of the longest context whose steps are measured; attention beyond it goes on as it grew."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})"
    )
    group = parser.add_argument_group("traffic and objectives")
    group.add_argument(
        "--workload",
        default="sharegpt",
        metavar="W",
        help="sharegpt, fixed:IN/OUT, uniform:A-B/C-D, lengths:PATH or trace:PATH (default: sharegpt)",
    )
    group.add_argument(
        "--rate",
        type=float,
        metavar="X",
        help="requests a second; a trace's own arrivals are stretched to it",
    )
    group.add_argument(
        "--concurrency",
        type=int,
        metavar="X",
        help="users, each of whom waits for the answer before asking again",
    )
    group.add_argument(
        "--slo",
        default="",
        metavar="NAME=S,…",
        help="ttft_s, tpot_s, e2e_s: the most seconds of each",
    )
    group.add_argument(
        "--attainment",
        type=float,
        default=0.95,
        metavar="X",
        help="share of requests to meet them (0.95)",
    )
    group.add_argument(
        "--router",
        choices=("round-robin", "least-loaded", "rendezvous", "longest-hit"),
        default="least-loaded",
        help="how requests find their replica; the last two keep those with one prefix together (default: least-loaded)",
    )
    group.add_argument(
        "--draft-acceptance",
        metavar="P,…",
        help="with drafts: how often each is right, by position; P,…@SHARE: in that share of steps there are some",
    )
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--gpu",
        metavar="NAME,…",
        help="plan for these: h200, h100, a100, l40s, …; without it for this machine",
    )
    group.add_argument(
        "--max-gpus", type=int, default=8, metavar="X", help="most devices in all (default: 8)"
    )
    group.add_argument(
        "--price",
        metavar="X,…",
        help="of an hour of one device, for cost per token; one for each of --gpu",
    )
    group.add_argument(
        "--no-search", action="store_true", help="leave the limits of steps as they are"
    )
    group.add_argument(
        "--measure",
        action="store_true",
        help="first measure this machine's steps of the model, and keep them",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page that needs no network")
    add_output_options(parser)
    add_engine_options(parser, adapters=True)


def run(args: argparse.Namespace) -> int:
    from slipstream.costs.devices import find_device
    from slipstream.costs.metrics import parse_objectives
    from slipstream.hub import resolve_model
    from slipstream.simulate.capacity import LatencyObjectives
    from slipstream.simulate.drafts import parse_acceptance
    from slipstream.simulate.engines import this_hardware
    from slipstream.simulate.recommend import (
        OfferedLoad,
        as_data,
        balancer_weights,
        check_load,
        plan_device,
    )
    from slipstream.simulate.traffic import parse_workload
    from slipstream.spec.description import read_spec

    settings = engine_args(args)
    if args.rate is not None and args.concurrency is not None:
        raise ConfigError(
            "--rate and --concurrency are two ways to say the load; give one", field="concurrency"
        )
    for name in ("tensor_parallel_size", "expert_parallel_size"):
        if getattr(settings, name) > 1:
            raise ConfigError(
                f"{name}: plan chooses it; leave it out, and bound the devices with --max-gpus",
                field=name,
            )
    if args.max_gpus < 1:
        raise ConfigError("max_gpus must be above 0", field="max_gpus")
    acceptance = None if args.draft_acceptance is None else parse_acceptance(args.draft_acceptance)
    if (
        acceptance is not None
        and settings.speculative_config is None
        and settings.speculative_model is None
    ):
        raise ConfigError(
            "draft_acceptance has an effect only with --speculative-config",
            field="draft_acceptance",
        )
    if args.gpu is not None and (args.measure or hasattr(args, "device")):
        raise ConfigError(
            "--gpu plans for other devices, --device and --measure for this machine; give one",
            field="gpu",
        )
    check_html(args.html)
    workload = parse_workload(args.workload, seed=settings.seed)
    as_recorded = args.rate is None and args.concurrency is None and workload.recorded
    load = OfferedLoad(
        workload=workload,
        objectives=LatencyObjectives(limits=parse_objectives(args.slo), attainment=args.attainment),
        rate=workload.traffic(None, len(workload.requests)).rate if as_recorded else args.rate,
        users=args.concurrency,
        seed=settings.seed,
        router=args.router,
    )
    check_load(load)
    others = [find_device(name) for name in args.gpu.split(",")] if args.gpu else []
    prices = parse_prices(args.price, len(others) or 1)
    description = read_spec(resolve_model(settings.model, download_dir=settings.download_dir))
    measured = measure(settings, description) if args.measure else None
    devices = others or [
        this_hardware(settings.device, settings.num_threads)
    ]  # by the ceilings that were just measured
    plans, refused, rows = [], [], []
    with phases(f"planning {settings.model}") as on_phase:
        for hardware, price in zip(devices, prices, strict=True):
            runs = iter(range(1, 10_000))
            on_run: Callable[[], None] = lambda h=hardware, r=runs: on_phase(
                f"{h.name}, simulation {next(r)}"
            )  # type: ignore[misc]
            try:
                plan = plan_device(
                    settings,
                    description,
                    hardware,
                    load,
                    max_gpus=args.max_gpus,
                    search=not args.no_search,
                    acceptance=acceptance,
                    on_run=on_run,
                )
            except OutOfMemoryError as error:
                if len(devices) == 1:
                    raise
                refused.append(
                    {"device": hardware.name, "title": hardware.title, "error": str(error)}
                )
                continue
            plans.append(plan)
            rows.append(as_data(plan, load, price))
    if not plans:
        raise OutOfMemoryError("; ".join(str(r["error"]) for r in refused), field="max_gpus")
    for row, weight in zip(rows, balancer_weights(plans), strict=True):
        row["balancer_weight"] = weight
    document = describe(settings, description, load, rows, refused, args, measured)
    if not args.json:
        show(document, args)
    if args.html is not None:
        from slipstream.simulate.page import render

        with writing(args.html, "html"):
            Path(args.html).write_text(render(document), encoding="utf-8")
        if not args.json:
            print(f"\nwritten: {args.html}")
    if args.json:
        print_json(document)
    return 0


def check_html(path: str | None) -> None:
    if path is not None:
        folder = Path(path).resolve().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir():
            raise ConfigError(
                f"cannot write {path}: {folder} is no folder that can be written to", field="html"
            )


def parse_prices(text: str | None, count: int) -> list[float | None]:
    if text is None:
        return [None] * count
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) == 1:
        found *= count
    if len(found) != count or any(not 0 <= price < float("inf") for price in found):
        what = f"price={text!r} is not a number of at least 0, or one for each of the {count} devices of --gpu"
        raise ConfigError(what, field="price")
    return [*found]


def describe(
    settings: EngineArgs,
    description: ModelDescription,
    load: OfferedLoad,
    rows: list[dict[str, Any]],
    refused: list[dict[str, Any]],
    args: argparse.Namespace,
    measured: dict[str, Any] | None,
) -> dict[str, Any]:
    from slipstream.costs.environment import versions

    n_in, n_out = load.workload.mean_lengths
    return {
        "kind": "plan",
        "model": settings.model,
        "family": description.spec.family,
        "num_parameters": description.spec.num_parameters,
        "quantization": settings.quantization,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "workload": {
            "name": load.workload.name,
            "mean_input_tokens": n_in,
            "mean_output_tokens": n_out,
        },
        "rate": load.rate,
        "concurrency": load.users,
        "objectives": load.objectives.limits,
        "attainment": load.objectives.attainment,
        "max_gpus": args.max_gpus,
        "devices": rows,
        "refused": refused,
        "measured": measured,
        "versions": versions(),
    }


def measure(settings: EngineArgs, description: ModelDescription) -> dict[str, Any]:
    """Measure this machine's steps of the model and its ceilings, and keep them."""
    from slipstream.costs.tables import keep_table, write_ceilings
    from slipstream.worker.start.ceilings import disk_rate

    table, ceilings = measure_table(settings, description)
    if (disk := disk_rate(description.path)) is not None:
        ceilings["disk"] = disk
    of = table.identity
    write_ceilings(of["device"], of["num_threads"] or 0, ceilings)
    return {
        "path": keep_table(table).name,
        "num_steps": len(table.points),
        "fit_error": table.error,
        "host": dataclasses.asdict(table.host),
        "ceilings": ceilings,
    }


def measure_table(
    settings: EngineArgs,
    description: ModelDescription,
    *,
    longest: int = LONGEST_MEASURED,
    rounds: int | None = None,
) -> tuple[StepTable, dict[str, float]]:
    """Steps of contexts up to `longest` tokens, with what host and front end add, and the device's ceilings."""
    import gc

    from slipstream.bench.adapters.slipstream import AsyncSlipstream
    from slipstream.bench.host_costs import ANSWER, PROMPT, USERS, measure_host
    from slipstream.bench.power import EnergyMeter
    from slipstream.costs.environment import environment
    from slipstream.costs.estimate import bytes_by_part, this_device
    from slipstream.costs.step_cost import HostCost, fit_steps
    from slipstream.costs.tables import identity
    from slipstream.simulate.engines import run_ahead
    from slipstream.worker.local_executor import LocalExecutor
    from slipstream.worker.start.ceilings import device_ceilings
    from slipstream.worker.start.step_costs import ROUNDS, grid, measure_steps

    start = dataclasses.replace(settings, skip_tokenizer_init=True, enable_prefix_caching=False)
    if settings.kv_cache_bytes is None:
        device = this_device(settings.device)
        share = device.memory_bytes // 4 if device.is_cuda else MEASURED_CACHE_BYTES
        start = dataclasses.replace(start, kv_cache_bytes=share)
    with phases("measuring") as on_phase:
        executor = LocalExecutor.build(start, progress=on_phase)
        on_phase("graphs")
        while executor.capture_next():
            pass
    config, spec, scheduling = executor.config, description.spec, executor.config.scheduling
    info, context = config.device.info, config.model.max_model_len
    if context < PROMPT + ANSWER:
        raise ConfigError(
            f"--measure needs a max_model_len of at least {PROMPT + ANSWER}", field="max_model_len"
        )
    limits = scheduling.max_num_seqs, scheduling.max_num_batched_tokens, context
    steps = grid(*limits, executor.ledger.num_kv_tokens, longest)
    meter, power = EnergyMeter(devices=[info.device]), {}

    def power_of(state: str, work: Callable[[], object]) -> None:
        before, begin = meter.read(), time.monotonic()
        work()
        energy = meter.energy(before, meter.read(), time.monotonic() - begin, 0)
        if energy is not None:
            power.update({f"{state}watts": energy.watts, f"cpu_{state}watts": energy.cpu_watts})

    if meter.sources:
        power_of("idle_", lambda: time.sleep(IDLE_S))
    with progress_bar("measuring steps") as progress:
        points = measure_steps(executor, steps, rounds=rounds or ROUNDS, progress=progress)
    if meter.sources:  # under load: the largest batch without a pause
        full = max(steps, key=lambda step: (len(step.decodes), not step.prompts, sum(step.decodes)))
        power_of("", partial(measure_steps, executor, [full], rounds=1, least_s=BUSY_S))
    ceilings = device_ceilings(executor.runner)
    ceilings |= {name: value for name, value in power.items() if value is not None}
    of = identity(config, spec, sum(bytes_by_part(config, description).values()))
    made_by = {name: value for name, value in environment().items() if name != "command"}
    table = fit_steps(points, identity=of, made_by=made_by)
    platform = executor.runner.platform
    del executor  # the next engine needs its memory
    gc.collect()
    platform.release_unused()

    async def host() -> HostCost:
        async with await AsyncSlipstream.start(start) as engine:
            ahead = run_ahead(is_gpu=info.is_cuda, num_threads=config.device.num_threads)
            users = [n for n in USERS if n <= scheduling.max_num_seqs]
            return await measure_host(
                engine, table, vocab_size=spec.vocab_size, run_ahead=ahead, users=users
            )

    with phases("measuring the host"):
        return table.with_host(asyncio.run(host())), ceilings


def show(document: dict[str, Any], args: argparse.Namespace) -> None:
    """Prints the plan for a person."""
    w, objectives = document["workload"], document["objectives"]
    wanted = (
        ", ".join(f"{name} ≤ {most:g}" for name, most in objectives.items())
        or "none: what is carried without a queue"
    )
    asked = f"{document['rate']:g} requests/s" if document["rate"] else None
    asked = asked or (
        f"{document['concurrency']} users"
        if document["concurrency"]
        else "none: what one replica carries"
    )
    head = [
        (
            "workload",
            f"{w['name']}, {w['mean_input_tokens']:.0f} tokens in and {w['mean_output_tokens']:.0f} out on average",
        ),
        ("load", asked),
        (
            "objectives",
            f"{wanted}, of {document['attainment']:.0%} of requests" if objectives else wanted,
        ),
    ]
    if document["measured"] is not None:
        m = document["measured"]
        head.append(
            (
                "measured",
                f"{m['num_steps']} steps, fitted to {m['fit_error']:.1%}; kept for later plans",
            )
        )
    print_info(document["model"], head)
    for row in document["devices"]:
        print()
        print_info(
            f"{row['title']} ({row['label']}; steps {row['steps']})",
            [*shown(row, document), *reasons(row)],
        )
    for row in document["refused"]:
        print(f"\n{row['title']}: {row['error']}")
    if len(document["devices"]) > 1:
        print()
        weights = [(row["device"], f"{row['balancer_weight']:.2f}") for row in document["devices"]]
        print_info("weights of a balancer over one of each", weights)


def shown(row: dict[str, Any], document: dict[str, Any]) -> list[tuple[str, str]]:
    ledger, load, capacity = row["ledger"], row["at_load"], row["capacity"]
    always = (
        ("weights", "weights_bytes"),
        ("activations", "activation_bytes"),
        ("graphs", "graph_bytes"),
    )
    rarer = (("adapters", "adapter_bytes"), ("peer copies", "peer_copy_bytes"))
    some = [*always, *((name, key) for name, key in rarer if ledger[key])]
    parts = " · ".join(f"{name} {ledger[key] / 2**30:.2f}" for name, key in some)
    found = [
        (
            "memory, GiB",
            f"{parts} · KV cache {ledger['kv_bytes'] / 2**30:.2f} of {ledger['allowed_bytes'] / 2**30:.2f}",
        ),
        (
            "context",
            f"{row['max_context']:,} tokens at most; the cache holds {ledger['num_kv_tokens']:,}",
        ),
        ("concurrency", f"{row['max_concurrency']:,} requests of the mean length"),
    ]
    if capacity["requests_per_s"] is None:
        missed = ", ".join(
            f"{name} is {value:.3g} s at best"
            for name, value in row["nearest"].items()
            if value > document["objectives"][name]
        )
        if missed or not load["num_failed"]:
            found.append(("not met", f"even a request alone misses the objectives: {missed}"))
            found.append(("nearest", nearest(row, document)))
        else:
            found.append(
                (
                    "not met",
                    "too many requests do not fit the context; plan with a --workload of shorter ones",
                )
            )
    else:
        rate = f"{capacity['requests_per_s']:.3g} requests/s, {capacity['output_tokens_per_s']:,.0f} output tokens/s"
        found.append(("one replica", rate))
        if document["rate"] or document["concurrency"]:
            met = row["replicas"] is not None
            replicas = f"{row['replicas']} × {row['num_gpus']} device" if met else ""
            found.append(
                (
                    "replicas",
                    replicas if met else f"more than --max-gpus {document['max_gpus']} allows",
                )
            )
            if not met:
                found.append(("nearest", nearest(row, document)))
        for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s")):
            if load[key] is not None:
                p50, p90, p99 = (load[key][q] for q in ("p50", "p90", "p99"))
                found.append(
                    (
                        f"{name}, ms",
                        f"p50 {p50 * 1e3:,.1f} · p90 {p90 * 1e3:,.1f} · p99 {p99 * 1e3:,.1f}",
                    )
                )
        found.append(("throughput", f"{row['throughput']:,.0f} output tokens/s"))
    if load["num_failed"]:
        found.append(
            (
                "left out",
                f"{load['num_failed']} of {load['num_requests']} requests: {next(iter(load['errors']))}",
            )
        )
    if row["tokens_per_verification"] is not None:
        found.append(
            ("drafts", f"{row['tokens_per_verification']:.2f} tokens of a verified sequence")
        )
    found.append(("binds", row["binds"]))
    gib, device = row["one_more_gib"], row["one_more_device"]["requests_per_s"]
    more = "" if gib["requests_per_s"] is None else f", {gib['requests_per_s']:+.3g} requests/s"
    found.append(("one more GiB", f"{gib['kv_tokens']:,} more tokens in the cache{more}"))
    if device is not None:
        found.append(("one more device", f"{device:+.3g} requests/s as a replica"))
    if row["cost_per_million_output_tokens"] is not None:
        found.append(
            ("cost", f"{row['cost_per_million_output_tokens']:.3g} for a million output tokens")
        )
    if row["joules_per_output_token"] is not None:
        found.append(
            ("energy", f"{row['joules_per_output_token']:.3g} J an output token (estimated)")
        )
    return found + [("note", note) for note in row["notes"]]


def nearest(row: dict[str, Any], document: dict[str, Any]) -> str:
    """Objectives that can be met."""
    limits = document["objectives"]
    return "--slo " + ",".join(
        f"{name}={max(most, round_up(row['nearest'][name])):g}" for name, most in limits.items()
    )


def round_up(value: float) -> float:
    """Rounds up to two digits."""
    import math

    if value <= 0:
        return 0.0
    scale = 10 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / scale) * scale:.3g}")


def reasons(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(f"set {r['setting']}", f"{r['value']}: {r['reason']}") for r in row["recommended"]]
