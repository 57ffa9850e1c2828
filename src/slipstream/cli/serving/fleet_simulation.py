"""`slipstream fleet simulate FILE`: predicts how a fleet behaves under a load, before it is started.

The fleet's own router and autoscaler run on a virtual clock, over replicas whose step times come from the
planner. A model's config.json is enough."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from slipstream.cli.console import phases, print_info, print_json
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.fleet.simulation.report import FleetStudy, Marks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="fleet.yaml")
    parser.add_argument(
        "--rate",
        required=True,
        metavar="X,…",
        help="requests a second; several hold for equal parts of the time, one after the other",
    )
    parser.add_argument(
        "--requests", type=int, default=100_000, metavar="N", help="in all (default: 100000)"
    )
    parser.add_argument(
        "--workload",
        default="sharegpt",
        metavar="W",
        help="sharegpt, fixed:IN/OUT, uniform:A-B/C-D, lengths:PATH or trace:PATH (default: sharegpt)",
    )
    parser.add_argument(
        "--copies",
        type=int,
        metavar="N",
        help="of a trace, at the same time: more of them are slower each (default: each row once)",
    )
    parser.add_argument("--model", metavar="NAME", help="which of the file's models")
    parser.add_argument(
        "--replicas", type=int, metavar="N", help="at the begin (default: the file's least)"
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="the replicas' device, as of `slipstream plan` (default: the autoscaler's, or this machine)",
    )
    parser.add_argument(
        "--gateways", type=int, default=1, metavar="N", help="that share the requests (default: 1)"
    )
    parser.add_argument(
        "--cold-start", type=float, metavar="S", help="seconds to start a replica (default: 60)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the arrivals (0)")


def run(args: argparse.Namespace) -> int:
    from slipstream.fleet.config import read
    from slipstream.fleet.simulation.study import FleetLoad, simulate_fleet

    try:
        rates = tuple(float(part) for part in args.rate.split(","))
    except ValueError:
        raise ConfigError(f"rate={args.rate!r} is not a list of numbers", field="rate") from None
    load = FleetLoad(
        rates=rates,
        num_requests=args.requests,
        workload=args.workload,
        copies=args.copies,
        model=args.model,
        gpu=args.gpu,
        replicas=args.replicas,
        gateways=args.gateways,
        cold_start_s=args.cold_start,
        seed=args.seed,
    )
    fleet = read(args.file)
    with phases("simulating the fleet") as on_phase:
        found = simulate_fleet(fleet, load, on_phase=on_phase)
    print_json(as_json(found)) if args.json else show(found)
    return 0


def as_json(study: FleetStudy) -> dict[str, Any]:
    """The result as a flat JSON object. Figures without a value are left out."""
    of_study = dataclasses.asdict(study)
    figures = of_study.pop("figures")
    absent = {name for name in ("goodput", "scaler") if figures[name] is None}
    return {**of_study, **{name: x for name, x in figures.items() if name not in absent}}


def show(study: FleetStudy) -> None:
    """Print the figures for people."""
    found = study.figures

    def marks(values: Marks | None, unit: float = 1.0, after: str = "") -> str:
        if values is None:
            return "none"
        named = dataclasses.asdict(values).items()
        return " · ".join(f"{mark} {value * unit:,.4g}{after}" for mark, value in named)

    rows = [
        (
            "requests",
            f"{found.finished:,} answered, {found.refused:,} too long for a replica; {found.simulated_s:,.1f} s "
            f"of {', '.join(f'{rate:g}' for rate in study.rates)} a second",
        ),
        (
            "prefix hits",
            f"{found.hit_share:.1%} of prompt tokens; one endless cache of all: {found.hit_share_bound:.1%}",
        ),
        ("TTFT", marks(found.ttft_s, 1e3, " ms")),
        ("TPOT", marks(found.tpot_s, 1e3, " ms")),
        ("waiting at a replica", marks(found.waiting_requests, 1.0, " requests")),
        ("queued at a replica", marks(found.queued_tokens, 1.0, " tokens")),
        ("most work over mean", f"{found.most_work_over_mean:.3f}"),
        (
            "taken out as slow",
            f"{found.taken_out:,} times; all replicas are alike, and none is slow",
        ),
        ("most at the gateway", f"{found.most_at_gateway:,} requests"),
        ("replica hours", f"{found.replica_hours:,.1f}, {found.most_replicas:,} at most"),
    ]
    if found.goodput is not None:
        rows.append(("within the objectives", f"{found.goodput:.1%}"))
    if (scaler := found.scaler) is not None:
        rows.append(
            (
                "autoscaler",
                f"{scaler.ups} times up, {scaler.downs} down; {scaler.most_reversals} reversals at most in 5 minutes",
            )
        )
    title = f"{study.pool}: {study.replicas:,} replicas on {study.device}, {study.workload}"
    print_info(title, rows)
    print()
    what = {
        "decision": "a decision",
        "changes": "a report of cache changes",
        "answer": "a first token, or an end",
        "load": "a report of load",
        "scaler": "the autoscaler",
    }
    costs = [
        (
            what[name],
            f"p50 {of.p50_us:,.0f} µs · p99 {of.p99_us:,.0f} µs · {of.calls:,} times"
            + (f", {of.item_us:.1f} µs a block" if name == "changes" else ""),
        )
        for name, of in found.gateway.items()
    ]
    share = found.gateway_busy
    print_info("processor time of this machine", [*costs, ("of a gateway's core", f"{share:.0%}")])
    print(f"\nsimulated in {found.processor_s:.0f} s of a core")
