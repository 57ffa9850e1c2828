"""`slipstream eval A [B]`: measures the perplexity of a model on a given text; with B, also how far
B's predictions are from A's.

A and B are any two checkpoints or formats with one vocabulary. An engine option applies to both,
unless its twin for B is given (`--quantization-b int8`). Without B but with such an option, A is
compared with itself under that option. The exit code is 1 if --max-kl is given and exceeded."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.base.files import writing
from slipstream.cli.console import (
    Progress,
    phases,
    print_info,
    print_json,
    progress_bar,
    say,
    shown,
    size,
)
from slipstream.cli.options import (
    ENGINE_HELP,
    MODEL_HELP,
    add_engine_options,
    add_output_options,
    engine_args,
)
from slipstream.compress.verdict import check_max_kl
from slipstream.config import EngineArgs
from slipstream.errors import ConfigError
from slipstream.evals.text import TextSettings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from slipstream.compress.report import Report
    from slipstream.evals.tasks import TaskResult

OPTIONS = (
    *(
        "tokenizer",
        "dtype",
        "device",
        "quantization",
        "kv_cache_dtype",
        "block_size",
        "kernels",
        "tile_table",
    ),
    *("deterministic", "dense_copies", "num_threads", "download_dir", "load_format", "seed"),
)
TWINS = ("tokenizer", "dtype", "device", "quantization", "kv_cache_dtype", "kernels")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help=MODEL_HELP)
    parser.add_argument("b", metavar="B", nargs="?", help="what is compared with A")
    add_text_options(parser)
    parser.add_argument(
        "--max-kl", type=float, metavar="X", help="fail if the mean KL(A‖B) is above X nats"
    )
    parser.add_argument(
        "--worst",
        type=int,
        default=3,
        metavar="N",
        help="prompts to show where they part most (default: 3)",
    )
    parser.add_argument(
        "--no-layers", action="store_true", help="leave out the comparison layer by layer"
    )
    parser.add_argument(
        "--report", metavar="DIR", help="leave the whole comparison there, as JSON and as a page"
    )
    parser.add_argument(
        "--speed",
        action="store_true",
        help="with --report: also how fast each of the two generates",
    )
    add_task_options(parser)
    add_output_options(parser)
    engine = parser.add_argument_group("engine (as in LLM(...))")
    add_engine_options(
        engine,
        without=tuple(f.name for f in dataclasses.fields(EngineArgs) if f.name not in OPTIONS),
    )
    for name in TWINS:
        flag = f"--{name.replace('_', '-')}-b"
        engine.add_argument(
            flag,
            default=argparse.SUPPRESS,
            metavar="X",
            help=f"the same for B: {ENGINE_HELP[name]}",
        )


def add_text_options(parser: argparse._ActionsContainer) -> None:
    """Options for the fields of TextSettings, with names that do not collide with other options."""
    default = TextSettings()
    text = parser.add_argument_group("text")
    text.add_argument(
        *("--text",),
        default=default.source,
        metavar="X",
        help=f"a text or .jsonl file, hf:ORG/NAME[:CONFIG[:SPLIT]], or {default.source} (default: {default.source})",
    )
    text.add_argument(
        *("--part",),
        default=default.part,
        metavar="X",
        help=f"evaluation, calibration, or all of it (default: {default.part}, which never calibrates)",
    )
    text.add_argument(
        "--context",
        type=int,
        default=default.context,
        metavar="N",
        help=f"tokens in a window (default: {default.context})",
    )
    text.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="tokens from one window to the next (default: --context)",
    )
    text.add_argument(
        *("--windows",),
        type=int,
        default=default.num_windows,
        metavar="N",
        help=f"how many windows; 0: all there are (default: {default.num_windows})",
    )


def text_settings(args: argparse.Namespace) -> TextSettings:
    return TextSettings(
        source=args.text,
        part=args.part,
        context=args.context,
        stride=args.context if args.stride is None else args.stride,
        num_windows=args.windows or None,
    )


def run(args: argparse.Namespace) -> int:
    from slipstream.evals.tasks import check_tasks

    settings = text_settings(args)
    check_max_kl(args.max_kl)
    check_tasks(task_names(args), limit=args.limit, part=settings.part)
    given = vars(args)
    twins = {name: given[f"{name}_b"] for name in TWINS if f"{name}_b" in given}
    if args.b is not None or twins:
        return _compare(args, settings, twins)
    for name in ("max_kl", "report", "speed"):
        if given[name] is not None and given[name] is not False:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} compares two models; give B, or an option for B such as --quantization-b",
                field="B",
            )
    return _exclusive(args, settings)


def _compare(args: argparse.Namespace, settings: TextSettings, twins: Mapping[str, Any]) -> int:
    from slipstream.compress.report import measure, write_report

    folder = None if args.report is None else Path(args.report).expanduser()
    if folder is not None:
        with writing(args.report, "report"):
            folder.mkdir(parents=True, exist_ok=True)  # now, because measuring takes long
    args_a = engine_args(args, model=args.a)
    with shown(Progress("report")) as progress:
        report = measure(
            args_a,
            dataclasses.replace(args_a, model=args.b or args.a, **twins),
            text=settings,
            speed=args.speed,
            num_worst=args.worst,
            layers=not args.no_layers,
            tasks=task_names(args),
            limit=args.limit,
            max_kl=args.max_kl,
            progress=progress.update,
        )
    if not args.json:
        _print(report)
    if folder is not None:
        with writing(folder, "report"):
            write_report(report, folder)
    if args.json:
        print_json(report.document)
    if report.within_max_kl is False:
        say(
            f"slipstream: the mean KL of {report.divergence.kl.mean:.4g} nats is above --max-kl {args.max_kl:g}"
        )
    return int(report.within_max_kl is False)


def _exclusive(args: argparse.Namespace, settings: TextSettings) -> int:
    from slipstream.evals.perplexity import perplexity
    from slipstream.evals.scorer import Scorer
    from slipstream.evals.text import read_windows

    with phases("loading") as phase:
        phase(args.a)
        a = Scorer.load(engine_args(args, model=args.a), context=settings.context)
        windows = read_windows(
            settings, a.tokenizer, download_dir=getattr(args, "download_dir", None)
        )
    with progress_bar("reading") as bar:
        found = perplexity(a, windows, progress=bar)
    results = []
    if names := task_names(args):
        from slipstream.engine.llm import LLM
        from slipstream.evals.tasks import run_tasks

        again = dataclasses.replace(engine_args(args, model=args.a), dtype=str(a.settings["dtype"]))
        with LLM.from_engine_args(again) as llm:
            results = run_tasks(llm, names, limit=args.limit, part=settings.part)
    if args.json:
        model = {"model": a.name, "run_as": a.settings, "weights_bytes": a.weights_bytes}
        print_json({**model, "text": settings, **dataclasses.asdict(found), "tasks": results})
        return 0
    rows = [
        ("perplexity", f"{found.perplexity:.3f}"),
        *_about(settings, found.num_tokens, found.num_windows),
        ("weights", size(a.weights_bytes)),
        ("run as", _run_as(a.settings)),
        *(
            (t.name, f"{t.metric} {_value(t)} on {t.scored}")
            for result in results
            for t in (result, *result.also)
        ),
    ]
    print_info(args.a, rows)
    return 0


def _about(settings: TextSettings, num_tokens: int, num_windows: int) -> list[tuple[str, str]]:
    part = "all of it" if settings.part == "all" else f"the {settings.part} part"
    cut = f"windows of {settings.context} tokens, stride {settings.stride}"
    return [
        ("text", f"{settings.source}, {part}"),
        ("scored", f"{num_tokens:,} tokens in {num_windows} windows; {cut}"),
    ]


def add_task_options(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument(
        *("--tasks",),
        metavar="X,Y",
        help="questions too: .jsonl files of multiple choice or of rated answers (of these the --part), and tasks of lm-eval "
        "(if it is installed and finds their data)",
    )
    tasks.add_argument("--limit", type=int, metavar="N", help="only the first N questions of each")


def task_names(args: argparse.Namespace) -> list[str]:
    if args.limit is not None and (args.tasks is None or args.limit < 1):
        raise ConfigError("--limit must be above 0, and needs --tasks", field="limit")
    return args.tasks.split(",") if args.tasks else []


def _value(result: TaskResult) -> str:
    return f"{result.value:.4f}" + ("" if result.stderr is None else f" ± {result.stderr:.4f}")


def task_rows(report: Report) -> list[tuple[str, str]]:
    return [
        (x.name, f"{x.metric} {_value(x)} → {_value(y)} on {x.scored}")
        for x, y in report.every_metric
    ]


def _run_as(settings: Mapping[str, Any]) -> str:
    rounded = f", {settings['quantization']}" if settings["quantization"] else ""
    return f"{settings['dtype']}{rounded}, cache in {settings['kv_cache_dtype']}, {settings['kernels']}"


def _print(report: Report) -> None:
    a, b, found = report.original, report.compressed, report.divergence
    change, error = found.perplexity_ratio - 1, found.perplexity_ratio_stderr
    rows = [
        (
            "perplexity",
            f"{found.perplexity_a:.3f} → {found.perplexity_b:.3f} ({change:+.2%} ± {error:.2%})",
        ),
        (
            "KL(A‖B)",
            f"mean {found.kl.mean:.5f} ± {found.kl.stderr:.5f}, p99 {found.kl.p99:.4f}, max {found.kl.max:.3f} nats",
        ),
        ("same likeliest token", f"{found.top1_agreement:.2%}"),
        ("of the five likeliest", f"{found.top5_agreement:.2%} shared"),
        ("weights on disk", f"{size(a.file_bytes)} → {size(b.file_bytes)}"),
        ("in memory", f"{size(a.weights_bytes)} → {size(b.weights_bytes)}"),
        *(
            (f"speed, {batch} at once", f"{rate:,.1f} → {b.tokens_per_s[batch]:,.1f} tokens/s")
            for batch, rate in a.tokens_per_s.items()
        ),
        *task_rows(report),
        *_about(report.text, found.num_tokens, found.num_windows),
        ("A run as", _run_as(a.run_as)),
        ("B run as", _run_as(b.run_as)),
    ]
    print_info(f"A: {a.model}   B: {b.model}", rows)
    if found.layers:
        worst = sorted(found.layers, key=lambda layer: -layer.own)[:3]
        named = ", ".join(f"layer {w.layer} ({w.own:.2%})" for w in worst)
        print(
            f"\nlayers that add the most error of their own: {named}; after the last, {found.layers[-1].state:.2%}"
        )
    else:
        print(f"\nno comparison layer by layer: {found.why_no_layers}")
    for w in found.worst:
        print(f"\nwindow {w.window}: KL {w.kl:.3f} after …{w.text[-160:]!r}")
        print(f"  the text goes on with {w.actual!r}")
        for name, expected, ahead in (
            ("A", w.expected_a, w.continuation_a),
            ("B", w.expected_b, w.continuation_b),
        ):
            likely = ", ".join(f"{c.token!r} {c.probability:.0%}" for c in expected[:3])
            print(f"  {name} expects {likely}; goes on {ahead!r}")
