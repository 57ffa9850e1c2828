"""`slipstream compress MODEL --recipe R --out DIR`: writes a smaller checkpoint, with a report of
the quality that it costs.

R is a preset (fp8, fp8-gptq, fp8-static, int8, int8-outliers, int4-awq-gptq, int4-awq, int4-gptq,
int4-learned, w4a16-mixed:3.5bpw, 2:4, 2:4-int8, draft:1/3, draft:eagle3, draft:medusa, lora) or a
YAML file. DIR appears whole or not at all. Finished work of an interrupted run is stored next to
it, and the same command continues from there. The exit code is 1 if the result is broken: its
perplexity or its agreement with MODEL is outside the limits. DIR and the report in it are written
all the same."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.console import Progress, print_info, print_json, say, shown, size
from slipstream.cli.evaluate import add_task_options, check_max_kl, task_names, task_rows
from slipstream.cli.options import MODEL_HELP, add_output_options
from slipstream.compress.verdict import QualityLimits, headline, input_bytes, rounded_before
from slipstream.errors import ConfigError
from slipstream.files import sole_writer

if TYPE_CHECKING:
    from slipstream.compress.planning import CompressionPlan
    from slipstream.compress.recipe import Recipe
    from slipstream.compress.report import Report
    from slipstream.compress.steps import DraftHead, LoRA
    from slipstream.evals.text import TextSettings
    from slipstream.spec.description import ModelDescription


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--recipe", required=True, metavar="R", help="a preset, or a YAML file of steps"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="the folder to make; needed unless --dry-run is given"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be done, and write nothing"
    )
    parser.add_argument(
        "--restart", action="store_true", help="drop what an interrupted run had finished"
    )
    parser.add_argument(
        "--device", default="auto", metavar="X", help="auto, cpu, cuda or cuda:N (default: auto)"
    )
    parser.add_argument(
        *("--dtype",),
        default="auto",
        metavar="X",
        help="type of the products in calibration: float32, bfloat16 or float16 (default: float32 on a CPU, bfloat16 on a GPU)",
    )
    parser.add_argument(
        "--download-dir", metavar="DIR", help="where models are kept, instead of the user's cache"
    )
    report = parser.add_argument_group("report")
    report.add_argument("--no-report", action="store_true", help="measure nothing")
    report.add_argument(
        "--text",
        default="sharegpt",
        metavar="X",
        help="what to measure on, as in `slipstream eval` (its evaluation part)",
    )
    report.add_argument(
        "--max-kl", type=float, metavar="X", help="write nothing if the mean KL is above X nats"
    )
    report.add_argument(
        "--back-off", action="store_true", help="with --max-kl: try again with more bits instead"
    )
    report.add_argument(
        "--eval-windows",
        type=int,
        default=16,
        metavar="N",
        help="windows of 512 tokens to measure (default: 16)",
    )
    report.add_argument(
        "--speed", action="store_true", help="measure tokens/s before and after, too"
    )
    limits = QualityLimits()
    report.add_argument(
        *("--max-perplexity-ratio",),
        type=float,
        default=limits.max_perplexity_ratio,
        metavar="X",
        help=f"broken: more than X times MODEL's perplexity (default: {limits.max_perplexity_ratio:g})",
    )
    report.add_argument(
        *("--min-top1",),
        type=float,
        default=limits.min_top1_agreement,
        metavar="X",
        help=f"broken: MODEL's likeliest token first for a smaller share of tokens (default: {limits.min_top1_agreement:g})",
    )
    report.add_argument(
        "--allow-any-quality",
        action="store_true",
        help="a broken result is no failure: warn, and exit with 0",
    )
    add_task_options(parser)
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    try:
        return _compress(args)
    except KeyboardInterrupt:
        if not args.dry_run:
            say(
                "slipstream: interrupted; what was finished is kept, and the same command goes on from there"
            )
        raise


def _compress(args: argparse.Namespace) -> int:
    from slipstream.compress.planning import plan
    from slipstream.compress.recipe import read_recipe
    from slipstream.compress.steps import DraftHead, LoRA
    from slipstream.hub import resolve_model
    from slipstream.spec.description import read_spec

    if args.out is None and not args.dry_run:
        raise ConfigError(
            "say where to write the result: --out DIR (or --dry-run to write nothing)", field="out"
        )
    recipe = read_recipe(args.recipe)
    if args.max_kl is not None and args.no_report:
        raise ConfigError("--max-kl needs what --no-report leaves out; drop one", field="max_kl")
    check_max_kl(args.max_kl)
    if args.no_report and (args.allow_any_quality or _limits(args) != QualityLimits()):
        raise ConfigError(
            "--allow-any-quality, --max-perplexity-ratio and --min-top1 need what --no-report leaves out; drop one",
            field="no_report",
        )
    _limits(args).check()
    if task_names(args) and args.no_report:
        raise ConfigError(
            "--tasks are part of the report, which --no-report leaves out; drop one", field="tasks"
        )
    if args.back_off and args.max_kl is None:
        raise ConfigError(
            "--back-off needs --max-kl, the limit that it tries to meet", field="back_off"
        )
    original = source = read_spec(resolve_model(args.model, download_dir=args.download_dir))
    if (head := recipe.one(DraftHead)) is not None:
        return _train_head(args, recipe, head, original)
    if (adapter := recipe.one(LoRA)) is not None:
        return _train_adapter(args, recipe, adapter, original)
    if recipe.reshapes:
        from slipstream.compress.pipeline import reshaped_spec

        # The sizes that the layers' part will find are known beforehand.
        source = dataclasses.replace(original, spec=reshaped_spec(original, recipe))
    planned = plan(source, recipe)
    dense = (
        original.spec.num_parameters * planned.scale_bytes
        if recipe.reshapes
        else planned.bytes_before
    )
    before = input_bytes(original) or dense
    start = rounded_before(original)
    if start is not None and not args.json:
        say(
            f"slipstream: {args.model} is {start}; what follows is rounded or thinned a second time"
        )
    shown_input = Input(args.model, before, dense, start)
    if args.dry_run:
        _show(args, recipe, planned, shown_input, None)
        return 0

    if not args.no_report:
        _check_report(args, original)
    out = Path(args.out).expanduser()
    with sole_writer(out), shown(Progress(f"compress {args.model}")) as progress:
        attempt, planned, report = _carry_out(
            args, recipe, original, source, planned, out, progress
        )
    return _show(args, attempt, planned, shown_input, report)


def _carry_out(
    args: argparse.Namespace,
    recipe: Recipe,
    original: ModelDescription,
    source: ModelDescription,
    planned: CompressionPlan,
    out: Path,
    progress: Progress,
) -> tuple[Recipe, CompressionPlan, Report | None]:
    """Write the checkpoint. Returns the recipe that was used (with --back-off it may be another
    one), its plan and the report."""
    from slipstream.compress.checkpoint import Attempts, fingerprint
    from slipstream.compress.pipeline import clean, layer_recipe, publish, reshape
    from slipstream.compress.recipe import more_bits
    from slipstream.compress.report import write_receipt
    from slipstream.compress.run import compress, resolve_device
    from slipstream.engine.text.tokenizer import Tokenizer
    from slipstream.errors import BudgetError
    from slipstream.evals.text import calibration_windows

    device, dtype = resolve_device(args.device, args.dtype)
    reports: list[Report] = []
    tried: list[tuple[str, float]] = []

    def measure_it(folder: Path, attempt: Recipe = recipe) -> None:
        if not args.no_report:
            reports.append(_measure(args, attempt, original, folder, out, tuple(tried), progress))
            write_receipt(reports[-1], folder)
            reports[-1].check()

    if recipe.reshapes:
        source = reshape(
            original,
            recipe,
            out,
            device=device,
            restart=args.restart,
            download_dir=args.download_dir,
            progress=progress.update,
        )
        if layer_recipe(recipe) is None:
            try:
                publish(source, recipe, out, measure_it)
            except BudgetError as error:
                error.add_note(f"nothing was written to {out}")
                raise
            return recipe, planned, reports[-1] if reports else None
    windows: list[tuple[int, ...]] = []
    if planned.needs_text:
        text = recipe.calibration
        progress.update("reading text", 0, 0)
        windows = calibration_windows(
            text.text,
            tokenizer=Tokenizer.for_model(source),
            num_windows=recipe.num_windows,
            context=min(text.context, source.spec.max_position),
            download_dir=args.download_dir,
        )
    attempts = [recipe, *(more_bits(recipe) if args.back_off else ())]
    known, measured = Attempts(out, restart=args.restart), Path(args.text).expanduser()
    conditions = {
        "models": [fingerprint(original), fingerprint(source)],
        "calibration": windows,
        "computed": [str(device), str(dtype)],
        "text": [
            args.text,
            measured.stat().st_mtime_ns if measured.is_file() else None,
            args.eval_windows,
        ],
    }
    for attempt in attempts:
        described = {**conditions, "recipe": attempt.as_data()}
        if args.back_off and (kl := known.cost(described)) is not None and not kl <= args.max_kl:
            tried.append((attempt.name, kl))
            say(f"slipstream: {attempt.name}: the mean KL was found to be {kl:.4g} nats before")
            continue
        try:
            planned = compress(
                source,
                attempt,
                out,
                windows=windows,
                device=device,
                dtype=dtype,
                restart=args.restart,
                progress=partial(progress.update, f"layers ({attempt.name})"),
                finish=partial(measure_it, attempt=attempt),
            )
            break
        except BudgetError as error:
            if not args.back_off:
                error.add_note(
                    f"nothing was written to {out}; with another limit, only the measuring is done again"
                )
                raise
            tried.append((attempt.name, reports[-1].divergence.kl.mean))
            known.add(described, tried[-1][1])
            say(f"slipstream: {attempt.name}: {error}")
    else:
        told = ", ".join(f"{name}: {kl:.4g}" for name, kl in tried)
        raise BudgetError(
            f"no attempt keeps to max_kl={args.max_kl:g} nats ({told}); nothing was written to {out}; raise the limit",
            field="max_kl",
        )
    known.clear()
    if recipe.reshapes:
        clean(out)
    return attempt, planned, reports[-1] if reports else None


def _trained(
    args: argparse.Namespace,
    recipe: Recipe,
    train: Callable[..., dict[str, Any]],
    what: str,
    rows: list[tuple[str, str]],
    planned: dict[str, object],
) -> dict[str, Any] | None:
    """Train `what` and return its receipt. None if there is no more to print: it was a dry run, or
    JSON was written. `rows` describe a dry run to a person, and `planned` to a program."""
    about: dict[str, object] = {"recipe": {"name": recipe.name, "steps": recipe.as_data()}}
    if args.dry_run:
        if args.json:
            print_json({**about, "out": None, **planned})
        else:
            print_info(f"would write {args.out or 'a folder'}: {what} for {args.model}", rows)
        return None
    out = Path(args.out).expanduser()
    with sole_writer(out), shown(Progress(f"compress {args.model}")) as progress:
        receipt = train(
            out,
            restart=args.restart,
            download_dir=args.download_dir,
            progress=progress.update,
        )
    if args.json:
        print_json({**about, "out": args.out, "receipt": receipt})
        return None
    return receipt


def _train_head(
    args: argparse.Namespace, recipe: Recipe, head: DraftHead, source: ModelDescription
) -> int:
    """Train a draft head. It is no smaller checkpoint: it has its own receipt, and no report."""
    from slipstream.compress.draft import train_head
    from slipstream.compress.run import resolve_device

    _refuse_report(args, "a head that drafts")
    device, _ = resolve_device(args.device, "auto")
    minutes = head.limit(on_gpu=device.type != "cpu")
    rows = [
        ("recipe", recipe.name),
        ("head", f"{head.kind}, {head.num_places} tokens in a row"),
        ("text", f"the model's answers to up to {head.num_answers:,} questions of {head.text}"),
        ("time", f"{minutes:g} minutes for answers and training, on {device}"),
    ]
    train = partial(train_head, source, head, device=device)
    receipt = _trained(args, recipe, train, "a head that drafts", rows, {"minutes": minutes})
    if receipt is None:
        return 0
    done, found = receipt["training"], receipt.get("acceptance")
    rows[2:] = [
        (
            "text",
            f"{done['num_answers']:,} answers of the model, {done['num_tokens']:,} tokens, to questions of {head.text}",
        ),
        (
            "training",
            f"{done['num_steps']:,} steps; {done['seconds'] / 60:.1f} minutes with the answers, on {device}",
        ),
    ]
    if found is not None:
        shares = ", ".join(f"{p:.0%}" for p in found["by_position"])
        rows.append(
            (
                "accepted",
                f"{found['accepted_length']:.2f} tokens a verification; by position {shares}",
            )
        )
        for kind, x in found["by_text"].items():
            rows.append(
                ("", f"{kind}: {x['accepted_length']:.2f}, of {x['num_prompts']} questions")
            )
    print_info(f"{args.out}: a head that drafts for {args.model}", rows)
    config = {"method": head.kind, "model": args.out}
    say(f"slipstream: wrote {args.out}; use it with --speculative-config '{json.dumps(config)}'")
    return 0


def _refuse_report(args: argparse.Namespace, what: str) -> None:
    """ConfigError if an option of the report is given."""
    off = ("speed", "no_report", "back_off", "allow_any_quality")
    report: dict[str, object] = {"max_kl": None, **dict.fromkeys(off, False)}
    limits = QualityLimits()
    # the recipe has its own text
    report |= {
        "dtype": "auto",
        "text": "sharegpt",
        "eval_windows": 16,
    }
    report |= {
        "max_perplexity_ratio": limits.max_perplexity_ratio,
        "min_top1": limits.min_top1_agreement,
    }
    if given := [
        name for name, unset in report.items() if getattr(args, name) != unset
    ] or task_names(args):
        raise ConfigError(
            f"{given[0]} is for smaller models; {what} has a receipt of its own", field=given[0]
        )


def _train_adapter(
    args: argparse.Namespace, recipe: Recipe, adapter: LoRA, source: ModelDescription
) -> int:
    """Train an adapter. It has its own receipt, and no report."""
    from slipstream.compress.lora import adapted_modules, train_adapter
    from slipstream.compress.run import resolve_device

    _refuse_report(args, "an adapter")
    device, _ = resolve_device(args.device, "auto")
    modules = adapted_modules(source, adapter)
    targets = sorted({module.name.rpartition(".")[2] for module in modules})
    until = f"{adapter.num_steps:,} steps" + (
        "" if adapter.minutes is None else f", or {adapter.minutes:g} minutes"
    )
    rows = [
        ("recipe", recipe.name),
        ("adapter", f"rank {adapter.rank} for {len(modules)} products: {', '.join(targets)}"),
        ("base", f"frozen, {adapter.quantization or 'as the checkpoint holds it'}"),
        ("text", f"{adapter.text}, {adapter.context} tokens of a document at most"),
        ("training", f"{until}, of {adapter.batch_size} documents, on {device}"),
    ]
    train = partial(train_adapter, source, adapter, device=device)
    receipt = _trained(args, recipe, train, "an adapter", rows, {"num_modules": len(modules)})
    if receipt is None:
        return 0
    done, data, held = receipt["training"], receipt["data"], receipt["held_out"]
    rows[3:] = [
        (
            "text",
            f"{data['num_documents']:,} documents of {adapter.text}, {data['num_learned_tokens']:,} tokens to learn",
        ),
        (
            "training",
            f"{done['num_steps']:,} steps in {done['seconds'] / 60:.1f} minutes on {device}",
        ),
        ("loss", f"{done['loss'][0]:.3f} → {done['loss'][-1]:.3f}"),
        (
            "perplexity",
            f"{held['perplexity_before']:,.3f} → {held['perplexity_after']:,.3f} on what was held out",
        ),
    ]
    print_info(f"{args.out}: an adapter for {args.model}", rows)
    say(f"slipstream: wrote {args.out}; use it with --enable-lora --lora NAME={args.out}")
    return 0


def _limits(args: argparse.Namespace) -> QualityLimits:
    return QualityLimits(
        max_perplexity_ratio=args.max_perplexity_ratio, min_top1_agreement=args.min_top1
    )


def _report_text(args: argparse.Namespace, source: ModelDescription) -> TextSettings:
    from slipstream.evals.text import TextSettings

    context = min(512, source.spec.max_position)
    return TextSettings(
        source=args.text, context=context, stride=context, num_windows=args.eval_windows
    )


def _check_report(args: argparse.Namespace, source: ModelDescription) -> None:
    """ConfigError, before the work, if the report could not be made."""
    from slipstream.evals.tasks import check_tasks
    from slipstream.evals.text import read_documents

    text = _report_text(args, source)
    if (
        next(iter(read_documents(text.source, text.part, download_dir=args.download_dir)), None)
        is None
    ):
        raise ConfigError(
            f"the {text.part} part of {text.source} holds no text to score", field="text"
        )
    check_tasks(task_names(args))


def _measure(
    args: argparse.Namespace,
    recipe: Recipe,
    source: ModelDescription,
    folder: Path,
    out: Path,
    tried: tuple[tuple[str, float], ...],
    progress: Progress,
) -> Report:
    from slipstream.compress.report import measure
    from slipstream.config import EngineArgs

    # Measured as it runs here: on a CPU, for example, float8 weights are expanded and inputs are
    # not rounded.
    original = EngineArgs(model=args.model, device=args.device, download_dir=args.download_dir)
    return measure(
        original,
        dataclasses.replace(
            original, model=str(folder), weights_cache="off"
        ),  # the folder will be renamed
        name=str(out),
        text=_report_text(args, source),
        speed=args.speed,
        tasks=task_names(args),
        limit=args.limit,
        recipe={"name": recipe.name, "steps": recipe.as_data()},
        max_kl=args.max_kl,
        limits=_limits(args),
        tried=tried,
        progress=lambda phase, done, total: progress.update(f"report, {phase}", done, total),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """Input of the compression. `rounded`: how its weights were rounded before; None: they were
    not."""

    name: str
    num_bytes: int
    dense_bytes: int  # in the type of the result's dense weights
    rounded: str | None


def _show(
    args: argparse.Namespace,
    recipe: Recipe,
    plan: CompressionPlan,
    given: Input,
    report: Report | None,
) -> int:
    """Print the summary, or a dry run's plan. Returns the exit code."""
    from slipstream.compress.recipe import Budget, Calibrate
    from slipstream.compress.steps import Distill, PruneSettings

    done, sparse = (
        [w for w in plan.weights if w.fmt is not None],
        sum(w.sparse for w in plan.weights),
    )
    faults = () if report is None else report.faults
    code = int(bool(faults) and not args.allow_any_quality)
    if args.json:
        info: dict[str, Any] = {
            "recipe": {"name": recipe.name, "steps": recipe.as_data()},
            "out": None if args.dry_run else args.out,
            "input": {
                "model": given.name,
                "rounded_before": given.rounded,
                "dense_bytes": given.dense_bytes,
            },
            "bytes_before": given.num_bytes,
            "bytes_after": plan.bytes_after,
            "bits_per_weight": plan.bits_per_weight,
            "num_products": len(done),
            "num_sparse_products": sparse,
            "products": {p.name: p.fmt for p in done},
        }
        print_json({**info, "report": None if report is None else report.document})
        _warn(args, faults)
        return code
    kinds: dict[str, int] = {}
    after, bits = plan.bytes_after, plan.bits_per_weight
    for p in done:
        kind, budget = str(p.fmt), None if p.settings is None else p.settings.bits
        if args.dry_run and isinstance(budget, Budget):  # measuring decides the bits of each weight
            kind = f"{', '.join(map(str, budget.choices))} bits, as they are worth most, {budget.average:g} on average"
            assert p.fmt is not None
            after += int(budget.average * p.rows * p.inner / 8) - p.fmt.num_bytes(
                p.rows, p.inner, plan.scale_bytes
            )
            bits = budget.average
        kinds[kind] = kinds.get(kind, 0) + 1
    cuts = recipe.one(PruneSettings)
    calibrates = plan.needs_text or (cuts is not None and cuts.needs_text)
    text, learns = recipe.one(Calibrate) or Calibrate(), recipe.one(Distill)
    calibrated = f"{recipe.num_windows} windows of {text.context} tokens of {text.text}"
    before = given.num_bytes
    if report is not None:  # sizes of the files themselves
        before, after = report.original.file_bytes, report.compressed.file_bytes
    dense = "" if given.rounded is None else f"; dense it would be {size(given.dense_bytes)}"
    rows = [
        ("input", f"{given.name}, {given.rounded or 'dense'}"),
        ("recipe", recipe.name),
        ("bytes", f"{size(before)} → {size(after)}{dense}"),
        *(("", f"{count} products: {kind}") for kind, count in kinds.items()),
        *(
            [("bits a weight", f"{bits:.3f} of the rounded products, scales included")]
            if done
            else []
        ),
        *([("zeros", f"in {sparse} products, written among the others")] if sparse else []),
        *(
            [
                (
                    "distillation",
                    f"{learns.num_steps} steps of {learns.batch_size} windows of {learns.text}",
                )
            ]
            if learns
            else []
        ),
        ("calibration", calibrated if calibrates else "none is needed"),
    ]
    if report is not None:
        d = report.divergence
        rows += [
            (
                "perplexity",
                f"{d.perplexity_a:,.3f} → {d.perplexity_b:,.3f} ({d.perplexity_ratio - 1:+.2%})",
            ),
            (
                "KL",
                f"mean {d.kl.mean:.5f}, p99 {d.kl.p99:.4f}; the same likeliest token {d.top1_agreement:.2%}",
            ),
        ]
        for batch, rate in report.original.tokens_per_s.items():
            found = report.compressed.tokens_per_s[batch]
            rows.append(
                (
                    "tokens/s",
                    f"{rate:.1f} → {found:.1f} with {batch} at once ({found / rate:.2f} ×)",
                )
            )
        rows += task_rows(report)
    first = headline(before, after) if report is None else report.headline
    print_info(
        f"would write {args.out or 'a folder'}: {first}"
        if args.dry_run
        else f"{args.out}: {first}",
        rows,
    )
    if not args.dry_run:
        say(f"slipstream: wrote {args.out}")
    _warn(args, faults)
    return code


def _warn(args: argparse.Namespace, faults: tuple[str, ...]) -> None:
    if faults:
        advice = "" if args.allow_any_quality else "; --allow-any-quality accepts it"
        say(
            f"slipstream: warning: {args.out} is broken: {'; '.join(faults)}. Use more bits, remove less, let distill follow "
            f"prune, or move the limits{advice}"
        )
