"""`slipstream optimize MODEL --traffic T --out DIR`: search the compression, settings and parallel form that serve this traffic
best, by measuring.

Every measured point is on a front of throughput, time between tokens and divergence from MODEL. The chosen one is written
to DIR, which `slipstream serve DIR` runs: the fastest that loses no more quality than --max-quality-loss, and meets
--slo. If none meets it, the nearest is written and the exit code is 1. What was found is kept in DIR.search; an
interrupted search goes on from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.console import Progress, print_json, say, shown
from slipstream.cli.options import MODEL_HELP, add_output_options
from slipstream.config import EngineArgs
from slipstream.errors import ConfigError
from slipstream.files import sole_writer, writing

if TYPE_CHECKING:
    from slipstream.optimize.candidates import Candidate, TrialResult
    from slipstream.optimize.run import Measurer
    from slipstream.optimize.search import Search

COMPRESS_SHARE = 1 / 3
"""Of the budget, for one compression at most. An interrupted one goes on when the command is run again."""

MIN_AGAIN = 0.8
"""Of the candidate's throughput, that its folder has to reach; else a line says that the machine's speed has changed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make")
    parser.add_argument(
        "--traffic",
        default="128/64",
        metavar="T",
        help="IN/OUT tokens of each request, or a trace or file of lengths (default: 128/64)",
    )
    parser.add_argument(
        "--arrivals",
        default="closed:8",
        metavar="A",
        help="closed:USERS, poisson:RATE, gamma:RATE:CV, burst or ramp:… (default: closed:8)",
    )
    parser.add_argument(
        "--num-requests",
        type=int,
        default=32,
        metavar="N",
        help="of the traffic, for each measurement (default: 32)",
    )
    parser.add_argument(
        "--slo",
        default="",
        metavar="X",
        help="ttft_s=…,tpot_s=…,e2e_s=…: most seconds, of 99 %% of the requests",
    )
    parser.add_argument(
        "--max-quality-loss",
        metavar="X",
        help="kl=NATS,perplexity=SHARE,task=NAME:SHARE, such as kl=0.02,perplexity=2%%,task=questions.jsonl:1%%, each at the "
        "upper end of its 95 %% interval (kl=0.05)",
    )
    parser.add_argument(
        "--task-limit", type=int, metavar="N", help="questions of each task (default: all)"
    )
    parser.add_argument(
        "--budget",
        default="20m",
        metavar="T",
        help="time for measuring: 90s, 20m, 1h (default: 20m)",
    )
    parser.add_argument(
        "--device", default="auto", metavar="X", help="auto, cpu, cuda or cuda:N (default: auto)"
    )
    parser.add_argument(
        "--compressions",
        metavar="C,…",
        help="none, schemes at load, recipe:NAME, files of recipes (default: by the device)",
    )
    parser.add_argument(
        "--drafts",
        metavar="D,…",
        help="none, ngram, suffix, mtp, folders of draft models, heads as METHOD:FOLDER, such as eagle3:FOLDER (default: none; "
        "the traffic's tokens are random, and what ngram and suffix find in them says nothing of texts)",
    )
    parser.add_argument(
        "--kv-cache-dtypes",
        metavar="T,…",
        help="types of the KV cache (default: auto,int8 on a CPU, auto,fp8 on a GPU)",
    )
    parser.add_argument(
        "--parallel",
        default="tp1",
        metavar="F,…",
        help="how devices share the model: tpN by its layers' products, ppN by layers, tpNppM by both (default: tp1)",
    )
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights of a folder with a config.json; speed is measured, quality is not, and no weights are kept",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="X",
        help="longest prompt with answer (default: the model's)",
    )
    parser.add_argument(
        "--num-threads", type=int, metavar="X", help="CPU threads (default: all cores)"
    )
    parser.add_argument(
        "--text",
        default="sharegpt",
        metavar="X",
        help="what quality is measured on, as in `slipstream eval`",
    )
    parser.add_argument(
        "--eval-windows",
        type=int,
        default=16,
        metavar="N",
        help="windows of 512 tokens of it (default: 16)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="X", help="of traffic and search (default: 0)"
    )
    parser.add_argument(
        "--download-dir", metavar="DIR", help="where models are kept, instead of the user's cache"
    )
    add_output_options(parser)


def as_word(value: Any) -> str:
    """A setting as a shell takes it."""
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))


def run(args: argparse.Namespace) -> int:
    from slipstream.bench.load import ClosedLoop, parse_arrivals
    from slipstream.config import resolve
    from slipstream.costs.metrics import parse_objectives
    from slipstream.evals.text import TextSettings, check_text
    from slipstream.hub import machine_folder, resolve_model
    from slipstream.optimize import run as measuring
    from slipstream.optimize.prior import simulated_prior
    from slipstream.optimize.search import Search, load_optuna
    from slipstream.optimize.traffic import parse_traffic
    from slipstream.simulate.engines import this_hardware
    from slipstream.spec.description import read_spec
    from slipstream.spec.scheme import SCHEMES
    from slipstream.worker.device import detect

    out = Path(args.out).expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; give another --out, or remove it", field="out")
    if out.is_mount():
        raise ConfigError(
            f"{out} is a mount point, and DIR is renamed when it is whole; give a folder in it",
            field="out",
        )
    budget_s, limits = (
        measuring.parse_seconds(args.budget),
        measuring.parse_quality_loss(args.max_quality_loss or "kl=0.05"),
    )
    if args.load_format == "dummy" and args.max_quality_loss is not None:
        what = "max_quality_loss can't be kept with --load-format dummy: random weights have no quality; leave one of them out"
        raise ConfigError(what, field="max_quality_loss")
    objectives = parse_objectives(args.slo)
    names = ("device", "download_dir", "max_model_len", "num_threads", "load_format")
    base = EngineArgs(
        model=args.model,
        **{name: value for name in names if (value := getattr(args, name)) is not None},
    )
    description = read_spec(resolve_model(args.model, download_dir=args.download_dir))
    if description.spec.kind != "a decoder":
        raise ConfigError(
            f"optimize is for models that answer; {args.model} is {description.spec.kind}",
            field="model",
        )
    for name in ("eval_windows", "task_limit"):
        if (count := getattr(args, name)) is not None and count < 1:
            raise ConfigError(f"{name}={count} must be above 0", field=name)
    if args.seed < 0:
        raise ConfigError(f"seed={args.seed} must not be below 0", field="seed")
    info = detect(args.device, machine_folder())
    types = (
        ("auto",)
        if args.kv_cache_dtypes is None
        else tuple(dict.fromkeys(args.kv_cache_dtypes.split(",")))
    )
    for kind in types:  # what no engine would take is said before one is measured
        resolve(dataclasses.replace(base, kv_cache_dtype=kind), description, info)
    forms = measuring.check_parallel(args.parallel.split(","), base, description, info)
    context = min(512, description.spec.max_position)
    text = TextSettings(
        source=args.text, context=context, stride=context, num_windows=args.eval_windows
    )
    if args.load_format != "dummy":
        check_text(text, download_dir=args.download_dir)
    longest = args.max_model_len or description.spec.max_position
    traffic = parse_traffic(
        args.traffic, args.arrivals, num_requests=args.num_requests, longest=longest, seed=args.seed
    )
    if traffic.num_left_out:
        say(
            f"slipstream: {traffic.num_left_out} requests of the traffic are longer than {longest} tokens and were left out"
        )
    arrivals = parse_arrivals(args.arrivals)
    users = min(
        arrivals.concurrency if isinstance(arrivals, ClosedLoop) else 32, len(traffic.lengths)
    )
    space = measuring.default_space(users=users, on_gpu=info.is_cuda)
    if args.compressions is not None:
        space = dataclasses.replace(
            space, compressions=measuring.check_compressions(args.compressions.split(","))
        )
    if args.drafts is not None:
        drafts = measuring.check_drafts(args.drafts.split(","))
        space = dataclasses.replace(space, axes={**space.axes, "speculative_model": drafts})
    if args.kv_cache_dtypes is not None:
        space = dataclasses.replace(space, axes={**space.axes, "kv_cache_dtype": types})
    space = dataclasses.replace(space, axes={**space.axes, "parallel": forms})
    if limits.tasks:
        from slipstream.evals.tasks import check_tasks

        check_tasks([name for name, _ in limits.tasks])
    if args.load_format == "dummy":
        if args.compressions is not None and (
            no := [c for c in space.compressions if c != "none" and c not in SCHEMES]
        ):
            raise ConfigError(
                f"{no[0]} needs weights, and --load-format dummy has none", field="compressions"
            )
        kept = tuple(c for c in space.compressions if c == "none" or c in SCHEMES)
        space = dataclasses.replace(space, compressions=kept)
    refused = measuring.refusals(space, base, description, info)
    space = dataclasses.replace(space, left_out=frozenset(refused))
    reasons = "; ".join(dict.fromkeys(refused.values()))
    if not space.candidates():
        raise ConfigError(f"no engine starts with any candidate: {reasons}", field="parallel")
    if refused:
        say(f"slipstream: {len(refused)} combinations are left out: {reasons}")
    load_optuna()  # what is missing is said before a folder is made
    state = out.with_name(f"{out.name}.search")
    with writing(state, "out"):
        state.mkdir(parents=True, exist_ok=True)
    named = [Path(name).expanduser() for name in (args.text, *(name for name, _ in limits.tasks))]
    named += [
        path
        for d in space.axes.get("speculative_model", ())
        if d and (path := measuring.draft_path(d)) is not None
    ]
    with sole_writer(out), shown(Progress(f"optimize {args.model}")) as progress:
        measurer = measuring.Measurer(
            base=base,
            traffic=traffic,
            objectives=objectives,
            limits=limits,
            folder=state,
            text={
                "source": text.source,
                "context": context,
                "stride": context,
                "num_windows": text.num_windows,
            },
            task_limit=args.task_limit,
            files=[path for path in named if path.exists()],
            on_phase=progress.set_phase,
        )
        prior = simulated_prior(
            base, description, traffic, this_hardware(args.device, args.num_threads)
        )
        known = measuring.read_results(measurer, space)
        if known:
            say(f"slipstream: {len(known)} candidates were measured before")
        search = Search(
            space, prior, measurer, known=known, seed=args.seed, kl_limit=limits.kl or 0.1
        )

        def on_result(result: TrialResult) -> None:
            measurer.deadline = begin + budget_s  # from the first result on, so that there is one
            measuring.append_result(result, measurer)
            say(f"slipstream: {_line(result)}")

        begin, measurer.compress_s = time.monotonic(), budget_s * COMPRESS_SHARE
        if known:  # there is a result already
            measurer.deadline = begin + budget_s
        try:
            search.run(budget_s=budget_s, on_result=on_result)
            measurer.deadline = math.inf
            chosen = measuring.choose(search.front(), objectives)
            if chosen is None:
                raise ConfigError(_nothing(search), field="max_quality_loss")
            again = _write(chosen, measurer, out, search, progress)
        except KeyboardInterrupt:
            say(
                "slipstream: interrupted; what was measured is kept, and the same command goes on from there"
            )
            raise
    return _show(args, search, chosen, measurer, out, again)


def _nothing(search: Search) -> str:
    reasons = dict.fromkeys(
        f"{r.candidate.compression}: {r.error}" for r in search.results if r.error
    )
    return "no candidate keeps to the limits: " + (
        "; ".join(reasons) or "none was measured in the time"
    )


def _write(
    chosen: TrialResult, measurer: Measurer, out: Path, search: Search, progress: Progress
) -> dict[str, Any] | None:
    """The folder of the chosen candidate, with receipts and all that was measured; the figures of an engine from it. Of random
    weights only what was measured, and None. It is made beside the results and appears whole: of a search that is killed
    here nothing is in the way of the next."""
    from slipstream.optimize.folder import build_folder
    from slipstream.optimize.page import render
    from slipstream.optimize.run import as_row

    args, at_start = measurer.folder_args(chosen.candidate)
    measured = {
        "chosen": as_row(chosen),
        "traffic": dataclasses.asdict(measurer.traffic),
        "objectives": dict(measurer.objectives),
    }
    measured["traffic"]["lengths"] = len(measurer.traffic.lengths)
    measured["limits"] = dataclasses.asdict(measurer.limits) | {
        "text": dict(measurer.text),
        "task_limit": measurer.task_limit,
    }
    measured["at_start"] = at_start
    again, made = None, measurer.folder / "folder"
    for left in (made, *measurer.folder.glob(".folder.*")):
        shutil.rmtree(left, ignore_errors=True)
    if measurer.base.load_format == "dummy":
        made.mkdir()
    else:
        build_folder(args, made, measured=measured, progress=progress.set_phase)
        progress.set_phase("measuring the folder")
        again = measurer.speed(
            dataclasses.asdict(EngineArgs(model=str(made), device=measurer.base.device, **at_start))
        )
    for name in ("slipstream-report.json", "slipstream-report.html", "slipstream-canary.json"):
        if (receipt := measurer.receipt(chosen.candidate) / name).is_file():
            shutil.copyfile(receipt, made / name)
    document: dict[str, Any] = {
        "front": [as_row(r) for r in search.front()],
        "results": [as_row(r) for r in search.results],
        **measured,
    }
    document |= {
        "folder": again,
        "why_ended": search.why_ended,
        "traffic": dataclasses.asdict(measurer.traffic),
    }
    (made / "optimize.json").write_text(
        json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (made / "optimize.html").write_text(render(document, measurer.base.model), encoding="utf-8")
    with writing(out, "out"):
        if out.exists():
            out.rmdir()
        made.rename(out)
    return again


def _show(
    args: argparse.Namespace,
    search: Search,
    chosen: TrialResult,
    measurer: Measurer,
    out: Path,
    again: dict[str, Any] | None,
) -> int:
    from slipstream.bench.report import print_table
    from slipstream.optimize.run import as_row, misses

    missed = misses(chosen, measurer.objectives)
    if args.json:
        print_json(
            {
                "out": out,
                "chosen": as_row(chosen),
                "folder": again,
                "missed": {
                    name: {"measured": value, "wanted": most}
                    for name, (value, most) in missed.items()
                },
                "front": [as_row(r) for r in search.front()],
                "num_measured": len(search.points()),
                "num_failed": sum(r.error is not None for r in search.results),
                "num_candidates": len(search.space.candidates()),
                "why_ended": search.why_ended,
            }
        )
    else:
        columns = (
            "",
            "out tok/s",
            "predicted",
            "TPOT p99, ms",
            "TTFT p99, ms",
            "KL",
            "perplexity",
            "",
        )
        rows = [_cells(r, r is chosen) for r in search.front()]
        print_table(
            f"front: {len(rows)} of {len(search.points())} measured, of {len(search.space.candidates())}",
            columns,
            rows,
        )
        print(f"\nended: {search.why_ended}")
        if again is None:
            print("KL and perplexity: –, since random weights have no quality to measure")
            print(f"random weights: {out} holds what was measured, and no weights to serve")
        else:
            tpot_ms = again["tpot_s_p99"] * 1e3
            print(
                f"the folder itself: {again['output_throughput']:,.1f} tok/s, TPOT p99 {tpot_ms:,.2f} ms"
            )
            if again["output_throughput"] < MIN_AGAIN * (chosen.throughput or 0):
                print(
                    f"its candidate was faster: the machine was busier, or is. Again: slipstream bench folder {out}"
                )
            _, at_start = measurer.folder_args(chosen.candidate)
            more = "".join(
                f" --{name.replace('_', '-')} {as_word(value)}" for name, value in at_start.items()
            )
            print(f"serve it: slipstream serve {out}{more}")
        for name, (value, most) in missed.items():
            say(
                f"slipstream: {name} ≤ {most:g} can't be met; this is the nearest: {value:.4g} s at the 99th percentile"
            )
    return 1 if missed else 0


def _cells(result: TrialResult, is_chosen: bool) -> tuple[str, ...]:
    f, guessed = result.figures, "not_measured" in result.figures
    return (
        result.candidate.name,
        f"{result.throughput or 0:,.1f}",
        f"{f['predicted_throughput']:,.1f}",
        f"{(result.tpot_s or 0) * 1e3:,.2f}",
        f"{f['ttft_s_p99'] * 1e3:,.1f}",
        "–"
        if guessed
        else f"{f['kl']:.4f}" + (f" ± {1.96 * f['kl_stderr']:.4f}" if f["kl_stderr"] else ""),
        "–" if guessed else f"{f['perplexity_ratio'] - 1:+.2%}",
        "chosen" if is_chosen else "",
    )


def _line(result: TrialResult) -> str:
    c: Candidate = result.candidate
    if result.error is not None:
        return f"{c.name}: {result.error}"
    kl = "KL –" if "not_measured" in result.figures else f"KL {result.kl:.4f}"
    return f"{c.name}: {result.throughput or 0:,.1f} tok/s, TPOT p99 {(result.tpot_s or 0) * 1e3:,.2f} ms, {kl}"
