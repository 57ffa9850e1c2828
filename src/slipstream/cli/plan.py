"""`slipstream plan MODEL`: shows the memory that a model needs and the traffic that it can serve,
before anything is bought or started.

The engine's own scheduler runs the traffic on a virtual clock. Step times come from a table
measured on such a device, or from bytes, operations and the device's rates; each figure is labeled
(measured, interpolated, estimated). `--measure` measures this machine's table for the model.
Weights are not needed: a folder with a config.json is enough."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.base.files import writing
from slipstream.cli.agent_options import (
    AGENTS_TITLE,
    add_agent_options,
    agent_load,
    given_agent_options,
)
from slipstream.cli.console import Progress, phases, print_info, print_json, shown
from slipstream.cli.options import (
    ENGINE_HELP,
    MODEL_HELP,
    add_engine_options,
    add_output_options,
    engine_args,
    engine_words,
    option_word,
    parse_bytes,
)
from slipstream.errors import ConfigError
from slipstream.hub import DEFAULT_MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"{MODEL_HELP} (default: {DEFAULT_MODEL}); several, NAME=MODEL or a folder of models: "
        "the memory of each, which fit together, and the time of a swap",
    )
    parser.add_argument(
        "--models-memory",
        metavar="SIZE",
        type=parse_bytes,
        help="of several models together, such as 24GiB (default: most of what is free)",
    )
    group = parser.add_argument_group("traffic and objectives")
    group.add_argument(
        "--workload",
        default="sharegpt",
        metavar="W",
        help="sharegpt, fixed:IN/OUT, uniform:A-B/C-D, lengths:PATH, trace:PATH or agents (default: sharegpt)",
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
        help="users, each of whom waits for the answer before asking again; sessions at once",
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
    add_agent_options(parser.add_argument_group(AGENTS_TITLE))
    parser.add_argument("--html", metavar="FILE", help="write a page that needs no network")
    add_output_options(parser)
    add_engine_options(parser, adapters=True)


def run(args: argparse.Namespace) -> int:
    from slipstream.hub.several import named_models
    from slipstream.simulate.planning import PlanOptions, prepare

    names = named_models(args.models or [DEFAULT_MODEL])
    args.model = args.models[0] if args.models else DEFAULT_MODEL
    if args.gpu is not None and (args.measure or hasattr(args, "device")):
        raise ConfigError(
            "--gpu plans for other devices, --device and --measure for this machine; give one",
            field="gpu",
        )
    if len(names) > 1 or list(names.values()) != [args.model] or args.models_memory is not None:
        return run_several(args, names)
    check_html(args.html)
    args.agents = agent_load(args) if args.workload == "agents" else None
    if args.agents is None and (given := given_agent_options(args)):
        option = "--" + given[0].replace("_", "-")
        raise ConfigError(
            f"{option} belongs to --workload agents, and has no effect here; leave it out",
            field=given[0],
        )
    settings = engine_args(args)
    options = {f.name: getattr(args, f.name) for f in dataclasses.fields(PlanOptions)}
    study = prepare(settings, PlanOptions(**options))
    measured = None
    if args.measure:
        from slipstream.optimize.step_table import measure

        with shown(Progress("measuring")) as progress:
            measured = measure(
                settings, study.description, on_phase=progress.set_phase, on_step=progress.set_done
            )
    with phases(f"planning {settings.model}") as on_phase:
        document = study.run(measured=measured, on_phase=on_phase)
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


_OF_ONE: dict[str, Any] = {
    "workload": "sharegpt",
    "attainment": 0.95,
    "router": "least-loaded",
    "max_gpus": 8,
    **dict.fromkeys(("slo", "rate", "concurrency", "price", "html", "measure"), None),
    **dict.fromkeys(("no_search", "draft_acceptance"), None),
}
"""Options of the plan of one model, with the default values."""


def run_several(args: argparse.Namespace, names: dict[str, str]) -> int:
    """Plan several models; only their memory is planned."""
    from slipstream.simulate.several import plan_models

    values = {name: getattr(args, name) for name in _OF_ONE}
    given = [
        name
        for name, value in values.items()
        if value != _OF_ONE[name] and (value or type(value) in (int, float))  # 0 is a value, too
    ]
    if given := [*given, *given_agent_options(args)]:
        option = "--" + given[0].replace("_", "-")
        raise ConfigError(
            f"{option} belongs to the plan of one model; leave it out", field=given[0]
        )
    with phases(f"planning {len(names)} models"):
        plan = plan_models(names, engine_args(args), args.gpu, args.models_memory)
    if args.json:
        print_json(plan)
        return 0
    gib = 2**30
    for row in plan["models"]:
        parts = [
            ("memory, GiB", f"{row['total_bytes'] / gib:.2f}"),
            *((name, f"{row[f'{name}_bytes'] / gib:.2f}") for name in ("weights", "kv", "rest")),
            ("context", f"{row['max_model_len']:,} tokens"),
            ("swapped in", f"{row['swap_s']:.2f} s (estimated)"),
        ]
        print_info(row["model"], parts)
    print()
    sets = [" + ".join(one) for one in plan["together"]]
    shown_sets = [("together", one) for one in sets[:8]]
    if len(sets) > 8:
        shown_sets.append(("and", f"{len(sets) - 8} more"))
    title = f"{plan['device']}: {plan['memory_bytes'] / gib:.2f} GiB for models"
    print_info(title, [("all at once", "yes" if plan["all_fit"] else "no"), *shown_sets])
    words = ["slipstream", "serve", *args.models, "--models-memory"]
    words += [option_word("memory_bytes", plan["memory_bytes"]), *engine_words(args)]
    print(f"\n{shlex.join(words)}")
    return 0


def check_html(path: str | None) -> None:
    if path is not None:
        folder = Path(path).resolve().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir():
            raise ConfigError(
                f"cannot write {path}: {folder} is not a writable folder", field="html"
            )


def show(document: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the plan for people."""
    w, objectives = document["workload"], document["objectives"]
    wanted = (
        ", ".join(f"{name} ≤ {most:g}" for name, most in objectives.items())
        or "none: what is carried without a queue"
    )
    asked = f"{document['rate']:g} requests/s" if document["rate"] else None
    users = "users" if w["num_sessions"] is None else "sessions at once"
    asked = asked or (
        f"{document['concurrency']} {users}"
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
            f"{_devices(row)} ({row['label']}; steps {row['steps']})",
            [*rows_of(row, document), *reasons(row)],
        )
    for row in document["refused"]:
        print(f"\n{row['title']}: {row['error']}")
    if len(document["devices"]) > 1:
        print()
        weights = [(row["device"], f"{row['balancer_weight']:.2f}") for row in document["devices"]]
        print_info("weights of a balancer over one of each", weights)
    for row in document["devices"]:
        if command := serve_command(args, row["recommended"]):
            print(f"\non {_devices(row)}: {command}")


def _devices(row: dict[str, Any]) -> str:
    """Description of the devices of one replica."""
    return (f"{row['num_gpus']} × " if row["num_gpus"] > 1 else "") + str(row["title"])


def serve_command(args: argparse.Namespace, recommended: Sequence[dict[str, Any]]) -> str | None:
    """Command that serves the model with the given engine options and the recommended settings; None if
    nothing is recommended. The number of replicas is not included, because it belongs to a fleet."""
    found = {r["setting"]: r["value"] for r in recommended if r["setting"] in ENGINE_HELP}
    if all(value is None for value in found.values()):
        return None
    words = engine_words(argparse.Namespace(**{**vars(args), **found}))
    return shlex.join(["slipstream", "serve", args.model, *words])


def rows_of(row: dict[str, Any], document: dict[str, Any]) -> list[tuple[str, str]]:
    ledger, load, capacity = row["ledger"], row["at_load"], row["capacity"]
    always = (
        ("weights", "weights_bytes"),
        ("activations", "activation_bytes"),
        ("graphs", "graph_bytes"),
    )
    rarer = (
        ("states", "state_bytes"),
        ("adapters", "adapter_bytes"),
        ("peer copies", "peer_copy_bytes"),
    )
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
    ]
    if load["num_failed"] < load["num_requests"]:
        found.append(("concurrency", f"{row['max_concurrency']:,} requests of the mean length"))
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
                    f"too many requests do not fit the context of {row['max_context']:,} tokens; "
                    "plan with a --workload of shorter ones",
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
    if row["agents"] is not None:
        found += agent_rows(row["agents"])
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
    what = f"{gib['kv_tokens']:,} more tokens in the cache"
    if not gib["kv_tokens"]:
        what = f"{gib['states']:,} more states"
    found.append(("one more GiB", f"{what}{more}"))
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


def agent_rows(agents: dict[str, Any]) -> list[tuple[str, str]]:
    """Table rows about agents' sessions."""
    found = [
        (
            "prefix hits",
            f"{agents['hit_rate'] or 0:.1%} of prompt tokens; {agents['cacheable_rate']:.1%} could be",
        )
    ]
    if agents["sessions_of_a_replica"] is not None:
        found.insert(0, ("sessions", f"{agents['sessions_of_a_replica']:,} at once on a replica"))
    if agents["interactivity"] is not None:
        p50, p90 = (agents["interactivity"][q] for q in ("p50", "p90"))
        found.append(
            (
                "interactivity",
                f"p50 {p50:,.1f} · p90 {p90:,.1f} tokens/s a user, at {agents['output_throughput_per_gpu']:,.0f} a GPU",
            )
        )
    return [*found, ("turns", f"{agents['turns_per_minute']:,.1f} a minute")]


def nearest(row: dict[str, Any], document: dict[str, Any]) -> str:
    """Description of the nearest objectives that can be met."""
    limits = document["objectives"]
    return "--slo " + ",".join(
        f"{name}={max(most, round_up(row['nearest'][name])):g}" for name, most in limits.items()
    )


def round_up(value: float) -> float:
    """Round up to two significant digits."""
    import math

    if value <= 0:
        return 0.0
    scale = 10 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / scale) * scale:.3g}")


def reasons(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(f"set {r['setting']}", f"{r['value']}: {r['reason']}") for r in row["recommended"]]
