"""`slipstream compress MODEL [--recipe R] [--out DIR]`: writes a smaller checkpoint, with a report
of the loss of quality.

R is a preset (fp8, fp8-gptq, fp8-static, int8, int8-outliers, int4-awq-gptq, int4-awq, int4-gptq,
int4-learned, nvfp4, nvfp4-gptq, mxfp4, mxfp4-gptq, w4a16-mixed:3.5bpw, 2:4, 2:4-int8, draft:1/3,
draft:eagle3, draft:medusa, lora, gguf:Q4_K_M and other types) or a YAML file. DIR appears complete
or not at all. Finished work of an interrupted run is stored next to it, and the same command
continues from there. The exit code is 1 if the result is broken: its perplexity or its agreement
with MODEL is outside the limits. DIR and the report in it are written in that case too."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.base.files import sole_writer
from slipstream.cli.console import Progress, print_info, print_json, say, shown, size
from slipstream.cli.evaluate import add_task_options, task_names, task_rows
from slipstream.cli.options import MODEL_HELP, add_output_options
from slipstream.compress.verdict import QualityLimits, headline
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.compress.job import Compression, Outcome
    from slipstream.compress.recipe import Recipe
    from slipstream.compress.report import Report
    from slipstream.compress.steps import DraftHead, LoRA
    from slipstream.spec.description import ModelDescription


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--recipe",
        default="int8",
        metavar="R",
        help="a preset, or a YAML file of steps (default: int8)",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="the folder to make (default: the names of model and recipe)"
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
        help="type of the products in calibration: float32, bfloat16 or float16 (default: bfloat16 where faster, else float32)",
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
            tell("interrupted; what was finished is kept, and the same command goes on from there")
        raise


def default_out(model: str, recipe: str) -> str:
    """Default output folder in the current directory, named after model and recipe: smollm2-135m-bf16-int8."""
    path = Path(model).expanduser()
    name = path.resolve().name if path.exists() else path.name
    file = Path(recipe).expanduser()
    own = file.stem if file.is_file() else recipe
    made = re.sub(r"[^\w.-]+", "-", f"{name.removesuffix('.gguf')}-{own}")
    if not name or not made[0].isalnum():
        raise ConfigError(f"{model!r} gives no name to a folder; name it by --out DIR", field="out")
    return made


def tell(line: str) -> None:
    say(f"slipstream: {line}")


def _compress(args: argparse.Namespace) -> int:
    from slipstream.compress.job import Compression, CompressOptions
    from slipstream.compress.recipe import read_recipe
    from slipstream.compress.steps import DraftHead, LoRA
    from slipstream.hub import resolve_model
    from slipstream.spec.description import read_spec

    args.out = args.out or default_out(args.model, args.recipe)
    given = {field.name for field in dataclasses.fields(CompressOptions)} - {"tasks"}
    options = CompressOptions(
        **{name: getattr(args, name) for name in given}, tasks=tuple(task_names(args))
    )
    options.check()
    recipe = read_recipe(args.recipe)
    original = read_spec(resolve_model(args.model, download_dir=args.download_dir))
    if (head := recipe.one(DraftHead)) is not None:
        options.refuse_report("a head that drafts")
        return _train_head(args, recipe, head, original)
    if (adapter := recipe.one(LoRA)) is not None:
        options.refuse_report("an adapter")
        return _train_adapter(args, recipe, adapter, original)
    job = Compression.of(options, recipe, original)
    if job.input.rounded is not None and not args.json:
        tell(
            f"{args.model} is {job.input.rounded}; what follows is rounded or thinned a second time. "
            "A 16-bit model gains more, such as smollm2:135m-bf16"
        )
    if args.dry_run:
        return _show(args, job, job.planned)
    job.check_report()
    out = Path(args.out).expanduser()
    with sole_writer(out), shown(Progress(f"compress {args.model}")) as progress:
        made = job.run(out, progress=progress.update, say=tell)
    return _show(args, job, made)


def _trained(
    args: argparse.Namespace,
    recipe: Recipe,
    train: Callable[..., dict[str, Any]],
    what: str,
    rows: list[tuple[str, str]],
    planned: dict[str, object],
) -> dict[str, Any] | None:
    """Train `what` and return its receipt. None if nothing remains to be printed: after a dry run,
    or if JSON was written. `rows` describe a dry run for people, and `planned` for programs."""
    about: dict[str, object] = {"recipe": {"name": recipe.name, "steps": recipe.as_data()}}
    if args.dry_run:
        if args.json:
            print_json({**about, "out": None, **planned})
        else:
            print_info(f"would write {args.out}: {what} for {args.model}", rows)
        return None
    out = Path(args.out).expanduser()
    with sole_writer(out), shown(Progress(f"compress {args.model}")) as progress:
        receipt = train(
            out, restart=args.restart, download_dir=args.download_dir, progress=progress.update
        )
    if args.json:
        print_json({**about, "out": args.out, "receipt": receipt})
        return None
    return receipt


def _train_head(
    args: argparse.Namespace, recipe: Recipe, head: DraftHead, source: ModelDescription
) -> int:
    """Train a draft head. It is not a smaller checkpoint, so it has its own receipt instead of a
    report."""
    from slipstream.compress.run import resolve_device
    from slipstream.compress.training.draft import train_head

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
    tell(f"wrote {args.out}; use it with --speculative-config '{json.dumps(config)}'")
    return 0


def _train_adapter(
    args: argparse.Namespace, recipe: Recipe, adapter: LoRA, source: ModelDescription
) -> int:
    """Train an adapter. It has its own receipt instead of a report."""
    from slipstream.compress.run import resolve_device
    from slipstream.compress.training.lora import adapted_modules, train_adapter

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
    tell(f"wrote {args.out}; use it with --enable-lora --lora NAME={args.out}")
    return 0


def _show(args: argparse.Namespace, job: Compression, made: Outcome) -> int:
    """Print the summary, or a dry run's plan. Returns the exit code."""
    faults = () if made.report is None else made.report.faults
    if args.json:
        print_json(_document(args, job, made))
    else:
        before, (_, after, _) = job.input.num_bytes, made.estimate(is_planned=args.dry_run)
        first = headline(before, after) if made.report is None else made.report.headline
        would = f"would write {args.out}" if args.dry_run else args.out
        print_info(f"{would}: {first}", _rows(args, job, made))
        if not args.dry_run:
            tell(f"wrote {args.out}")
    if faults:
        advice = "" if args.allow_any_quality else "; --allow-any-quality accepts it"
        tell(
            f"warning: {args.out} is broken: {'; '.join(faults)}. Use more bits, remove less, let distill follow "
            f"prune, or move the limits{advice}"
        )
    return int(bool(faults) and not args.allow_any_quality)


def _document(args: argparse.Namespace, job: Compression, made: Outcome) -> dict[str, Any]:
    given, plan = job.input, made.plan
    rounded = [w for w in plan.weights if w.fmt is not None]
    return {
        "recipe": {"name": made.recipe.name, "steps": made.recipe.as_data()},
        "out": None if args.dry_run else args.out,
        "input": {
            "model": given.name,
            "rounded_before": given.rounded,
            "dense_bytes": given.dense_bytes,
        },
        "bytes_before": given.num_bytes,
        "bytes_after": plan.bytes_after,
        "bits_per_weight": plan.bits_per_weight,
        "num_products": len(rounded) or sum(b.type != "F32" for b in plan.blocks),
        "num_sparse_products": sum(w.sparse for w in plan.weights),
        "products": {
            **{w.name: w.fmt for w in rounded},
            **{b.name: b.type for b in plan.blocks if b.type != "F32"},
        },
        "report": None if made.report is None else made.report.document,
    }


def _rows(args: argparse.Namespace, job: Compression, made: Outcome) -> list[tuple[str, str]]:
    from slipstream.compress.recipe import QAT, Calibrate
    from slipstream.compress.steps import Distill, PruneSettings

    given, recipe, report = job.input, made.recipe, made.report
    kinds, after, bits = made.estimate(is_planned=args.dry_run)
    before = given.num_bytes
    if report is not None:  # sizes of the files themselves
        before, after = report.original.file_bytes, report.compressed.file_bytes
    dense = "" if given.rounded is None else f"; dense it would be {size(given.dense_bytes)}"
    rows = [
        ("input", f"{given.name}, {given.rounded or 'dense'}"),
        ("recipe", recipe.name),
        ("bytes", f"{size(before)} → {size(after)}{dense}"),
        *(("", f"{count} products: {kind}") for kind, count in kinds.items()),
    ]
    if kinds:
        rows.append(("bits a weight", f"{bits:.3f} of the rounded products, scales included"))
    if sparse := sum(w.sparse for w in made.plan.weights):
        rows.append(("zeros", f"in {sparse} products, written among the others"))
    if (learns := recipe.one(Distill)) is not None:
        steps = f"{learns.num_steps} steps of {learns.batch_size} windows of {learns.text}"
        rows.append(("distillation", steps))
    if (qat := recipe.one(QAT)) is not None:
        until = "" if qat.minutes is None else f", or {qat.minutes:g} minutes"
        rows.append(("training", f"{qat.num_steps:,} steps of {qat.step_tokens:,} tokens{until}"))
    cuts, calibrated = recipe.one(PruneSettings), "none is needed"
    if made.plan.needs_text or (cuts is not None and cuts.needs_text):
        text = recipe.one(Calibrate) or Calibrate()
        calibrated = f"{recipe.num_windows} windows of {text.context} tokens of {text.text}"
    rows.append(("calibration", calibrated))
    return rows if report is None else [*rows, *_report_rows(report)]


def _report_rows(report: Report) -> list[tuple[str, str]]:
    d = report.divergence
    perplexity = f"{d.perplexity_a:,.3f} → {d.perplexity_b:,.3f} ({d.perplexity_ratio - 1:+.2%})"
    kl = (
        f"mean {d.kl.mean:.5f}, p99 {d.kl.p99:.4f}; the same likeliest token {d.top1_agreement:.2%}"
    )
    rows = [("perplexity", perplexity), ("KL", kl)]
    for batch, rate in report.original.tokens_per_s.items():
        found = report.compressed.tokens_per_s[batch]
        text = f"{rate:.1f} → {found:.1f} with {batch} at once ({found / rate:.2f} ×)"
        rows.append(("tokens/s", text))
    return [*rows, *task_rows(report)]
