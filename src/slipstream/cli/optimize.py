"""`slipstream optimize MODEL --traffic T --out DIR`: searches, by measuring, the compression,
settings and parallel form that serve this traffic best.

Measured candidates form a Pareto front of throughput, time between tokens and divergence from
MODEL. The chosen one is written to DIR, which `slipstream serve DIR` runs: the fastest one within
--max-quality-loss that meets --slo. If none meets it, the nearest one is written and the exit code
is 1. Results are stored in DIR.search; an interrupted search continues from there."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slipstream.cli.console import Progress, print_json, say, shown
from slipstream.cli.options import MODEL_HELP, add_output_options

if TYPE_CHECKING:
    from slipstream.optimize.candidates import Candidate, TrialResult
    from slipstream.optimize.study import Study, StudyResult

MIN_AGAIN = 0.8
"""Minimum ratio of the folder's throughput to its candidate's; below it a line says that the
machine's speed has changed."""


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
        help="how devices share the model: tpN by products, ppN by layers, tpNppM by both, cpN by cached tokens (default: tp1)",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="measure N of the chosen engine, too: all alike, and some that compute prompts for the others",
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
    """Quote a setting's value for a shell."""
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))


def run(args: argparse.Namespace) -> int:
    from slipstream.optimize.study import StudyOptions, prepare

    names = [field.name for field in dataclasses.fields(StudyOptions)]
    study = prepare(StudyOptions(**{name: getattr(args, name) for name in names}), tell)
    with shown(Progress(f"optimize {args.model}")) as progress:
        try:
            found = study.run(
                say=tell, on_phase=progress.set_phase, on_result=lambda result: tell(_line(result))
            )
        except KeyboardInterrupt:
            tell("interrupted; what was measured is kept, and the same command goes on from there")
            raise
    return _show(args, study, found)


def tell(text: str) -> None:
    say(f"slipstream: {text}")


def _show(args: argparse.Namespace, study: Study, found: StudyResult) -> int:
    """Print the outcome. Returns the exit code: 1 if an objective is missed."""
    from slipstream.optimize.replicas import verdict
    from slipstream.optimize.run import as_row, misses

    search, missed = found.search, misses(found.chosen, study.objectives)
    if not args.json:
        _print(study, found)
        for name, (value, most) in missed.items():
            tell(
                f"{name} ≤ {most:g} can't be met; this is the nearest: {value:.4g} s at the 99th percentile"
            )
        return 1 if missed else 0
    print_json(
        {
            "out": study.out,
            "chosen": as_row(found.chosen),
            "folder": found.again,
            "replicas": list(found.replicas),
            "apart": verdict(found.replicas, study.objectives) if found.replicas else None,
            "missed": {
                name: {"measured": value, "wanted": most} for name, (value, most) in missed.items()
            },
            "front": [as_row(r) for r in search.front()],
            "num_measured": len(search.points()),
            "num_failed": sum(r.error is not None for r in search.results),
            "num_candidates": len(search.space.candidates()),
            "why_ended": search.why_ended,
        }
    )
    return 1 if missed else 0


COLUMNS = ("", "out tok/s", "predicted", "TPOT p99, ms", "TTFT p99, ms", "KL", "perplexity", "")


def _print(study: Study, found: StudyResult) -> None:
    from slipstream.bench.report import print_table
    from slipstream.optimize.replicas import verdict

    search, again, out = found.search, found.again, study.out
    rows = [_cells(r, r is found.chosen) for r in search.front()]
    count = len(search.space.candidates())
    print_table(f"front: {len(rows)} of {len(search.points())} measured, of {count}", COLUMNS, rows)
    print(f"\nended: {search.why_ended}")
    for row in found.replicas:
        print(_arranged(row))
    if found.replicas:
        print(verdict(found.replicas, study.objectives))
    if again is None:
        print("KL and perplexity: –, since random weights have no quality to measure")
        print(f"random weights: {out} holds what was measured, and no weights to serve")
        return
    rate = again["output_throughput"]
    print(f"the folder itself: {rate:,.1f} tok/s, TPOT p99 {_ms(again.get('tpot_s_p99'))}")
    if rate < MIN_AGAIN * (found.chosen.throughput or 0):
        print(
            f"its candidate was faster: the machine was busier, or is. Again: slipstream bench folder {out}"
        )
    more = [f" --{name.replace('_', '-')} {as_word(x)}" for name, x in found.at_start.items()]
    print(f"serve it: slipstream serve {out}{''.join(more)}")


def _cells(result: TrialResult, is_chosen: bool) -> tuple[str, ...]:
    f, guessed = result.figures, "not_measured" in result.figures
    return (
        result.candidate.name,
        f"{result.throughput or 0:,.1f}",
        f"{f['predicted_throughput']:,.1f}",
        _ms(result.tpot_s).removesuffix(" ms"),
        f"{f['ttft_s_p99'] * 1e3:,.1f}",
        "–"
        if guessed
        else f"{f['kl']:.4f}" + (f" ± {1.96 * f['kl_stderr']:.4f}" if f["kl_stderr"] else ""),
        "–" if guessed else f"{f['perplexity_ratio'] - 1:+.2%}",
        "chosen" if is_chosen else "",
    )


def _arranged(row: Mapping[str, Any]) -> str:
    """Describe replicas that were measured together, in one line."""
    both = row["prompts"] + row["answers"]
    apart = f"{both} replicas, {row['prompts']} for prompts, {row['answers']} for answers"
    return (
        f"{apart if row['prompts'] else str(row['answers']) + ' replicas, all alike'}: {row['output_throughput']:,.1f} tok/s, "
        f"TTFT p99 {row['ttft_s_p99'] * 1e3:,.1f} ms, TPOT p99 {_ms(row.get('tpot_s_p99'))}"
    )


def _ms(seconds: float | None) -> str:
    """Format milliseconds; a dash if nothing was measured, such as TPOT for answers of one token."""
    return "–" if seconds is None else f"{seconds * 1e3:,.2f} ms"


def _line(result: TrialResult) -> str:
    c: Candidate = result.candidate
    if result.error is not None:
        return f"{c.name}: {result.error}"
    kl = "KL –" if "not_measured" in result.figures else f"KL {result.kl:.4f}"
    return f"{c.name}: {result.throughput or 0:,.1f} tok/s, TPOT p99 {_ms(result.tpot_s)}, {kl}"
