"""Loss of quality by each recipe: it is carried out, and the result compared with the original on
held-out text.

    python benchmarks/compression.py --study recipes [--rows "int4 gptq;int4 awq"] [--all] [--also NAME=PATH ...]
    python benchmarks/compression.py --study recipes --device cuda --calibrate 128x1024 --evaluate 48x1024 --rows structured

The reference kernels measure everything, since they carry out definitions exactly; the yardstick is the original in float32.
`--also` adds checkpoints that others made, such as a GGUF file in Q4_K_M or a folder of llm-compressor's. Rows are kept as
they come: a run that was broken off goes on with those that are missing (`--again` measures them anew). `--merge FILE ...`
puts the rows of several runs on the same text into one file. With `--seconds`, what trains takes as many steps as fit into
that time.

Bits are those of the rounded products, scales included; bytes those of the weights on disk. `--speed` adds tokens/s of the
original and of each row, in the type and with the kernels that a server would take.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor

from slipstream.bench.report import print_table
from slipstream.compress.pipeline import clean, layer_recipe, publish, reshape
from slipstream.compress.recipe import parse, preset
from slipstream.compress.report import model_bytes, tokens_per_s
from slipstream.compress.run import compress
from slipstream.config import EngineArgs
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.evals.divergence import compare
from slipstream.evals.scorer import Scorer
from slipstream.evals.text import TextSettings, calibration_text, read_windows
from slipstream.hub import resolve_model
from slipstream.spec.description import read_spec

FOUR = {"bits": 4, "group_size": 64}  # 128 does not divide this model's width
THREE = {"bits": 3, "group_size": 64}
GPTQ = {"rounding": "gptq"}
LEARNED = {"rounding": "learned", "num_steps": 200, "step_tokens": 4096}
QAT = {"num_windows": 1500, "num_steps": 1000, "step_tokens": 16384, "learning_rate": 3e-4}
MIXED = {"average": 4.25, "choices": [3, 4, 5, 6], "num_windows": 8, "context": 512}
DISTILL = {
    "batch_size": 16,
    "micro_batch": 16,
    "num_windows": 4000,
    "context": 1024,
    "eval_every": 250,
    "save_every": 100_000,
}
SMALLER = {"prune": {"size": 0.75, "channels": 0.1}}
ROWS: dict[str, list[Any]] = {
    "fp8": preset("fp8") or [],
    "fp8 static": preset("fp8-static") or [],
    "int8 plain": [{"quantize": {"bits": 8, "inputs": "int8"}}],
    "int8 smoothquant": preset("int8") or [],
    "int8 outliers": preset("int8-outliers") or [],
    "fp8 gptq": [{"quantize": {"bits": 8, "kind": "float", "inputs": "fp8", **GPTQ}}],
    "fp8 gptq learned": [
        {"quantize": {"bits": 8, "kind": "float", "inputs": "fp8", **LEARNED, "begin": "gptq"}}
    ],
    "fp8 gptq qat": [
        {"quantize": {"bits": 8, "kind": "float", "inputs": "fp8", **GPTQ}},
        {"qat": {**QAT, "learning_rate": 1e-4}},
    ],
    "int4 nearest, no clipping": [{"quantize": {**FOUR, "clip": False}}],
    "int4 nearest": [{"quantize": FOUR}],
    "int4 gptq, catching up": [{"quantize": {**FOUR, **GPTQ, "catch_up": 1.0}}],
    "int4 awq": [{"quantize": {**FOUR, "scaling": "awq"}}],
    "int4 gptq": [{"quantize": {**FOUR, **GPTQ}}],
    "int4 awq gptq": [{"quantize": {**FOUR, **GPTQ, "scaling": "awq"}}],
    "int4 gptq zeros": [{"quantize": {**FOUR, **GPTQ, "symmetric": False}}],
    "int4 awq gptq zeros": [{"quantize": {**FOUR, **GPTQ, "scaling": "awq", "symmetric": False}}],
    "int4 learned": [{"quantize": {**FOUR, **LEARNED}}],
    "int4 learned, catching up": [{"quantize": {**FOUR, **LEARNED, "catch_up": 1.0}}],
    "int4 gptq learned": [{"quantize": {**FOUR, **LEARNED, "begin": "gptq"}}],
    "int4 awq gptq learned zeros": [
        {"quantize": {**FOUR, **LEARNED, "begin": "gptq", "scaling": "awq", "symmetric": False}}
    ],
    "int4 rotated gptq": ["rotate", {"quantize": {**FOUR, **GPTQ}}],
    "int4 learned, long": [
        {"quantize": {**FOUR, **LEARNED, "num_steps": 600, "step_tokens": 8192}}
    ],
    "int4 gptq qat": [{"quantize": {**FOUR, **GPTQ}}, {"qat": QAT}],
    "int4 awq gptq zeros qat": [
        {"quantize": {**FOUR, **GPTQ, "scaling": "awq", "symmetric": False}},
        {"qat": QAT},
    ],
    "int4 awq gptq learned zeros qat": [
        {"quantize": {**FOUR, **LEARNED, "begin": "gptq", "scaling": "awq", "symmetric": False}},
        {"qat": {**QAT, "learning_rate": 1e-4}},
    ],
    "int4 gptq zeros qat": [{"quantize": {**FOUR, **GPTQ, "symmetric": False}}, {"qat": QAT}],
    "mixed 4.25 gptq": [{"quantize": {"bits": MIXED, "group_size": 64, **GPTQ}}],
    "mixed 5.53 gptq": [
        {
            "quantize": {
                "bits": {**MIXED, "average": 5.53, "choices": [4, 5, 6, 8]},
                "group_size": 64,
                **GPTQ,
            }
        }
    ],
    "int3 nearest": [{"quantize": THREE}],
    "int3 gptq": [{"quantize": {**THREE, **GPTQ}}],
    "int3 gptq qat": [{"quantize": {**THREE, **GPTQ}}, {"qat": QAT}],
    "fp8 cache": [{"kv_cache": {"form": "fp8"}}],
    **{
        f"{pattern or '50 %'} {method}": [{"sparsify": {"method": method, "pattern": pattern}}]
        for pattern in (None, "2:4")
        for method in ("magnitude", "wanda", "sparsegpt")
    },
    **{
        f"{pattern or '50 %'} sparsegpt, catching up": [
            {"sparsify": {"pattern": pattern, "catch_up": 1.0}}
        ]
        for pattern in (None, "2:4")
    },
    **{
        f"{share:.0%} of {part}, {importance}": [{"prune": {part: share, "importance": importance}}]
        for part, share in (("channels", 0.1), ("channels", 0.25), ("hidden", 0.1))
        for importance in ("magnitude", "activation", "taylor", "wactigrad")
    },
    **{f"{share:.0%} of layers": [{"prune": {"layers": share}}] for share in (0.1, 0.2)},
    "structured, pruned only": [SMALLER],
    "structured": [
        SMALLER,
        {"distill": {**DISTILL, "num_steps": 1000, "learning_rate": 8e-4, "nll_weight": 0.5}},
    ],
    "draft 1/3": [
        {"prune": {"size": 1 / 3}},
        {"distill": {**DISTILL, "num_steps": 1000, "learning_rate": 1e-3}},
    ],
}
SLOW = (
    *(
        "int4 learned",
        "int4 learned, catching up",
        "int4 gptq learned",
        "int4 awq gptq learned zeros",
        "int4 awq gptq learned zeros qat",
        "fp8 gptq learned",
        "int4 learned, long",
        "int4 gptq qat",
        "int4 gptq zeros qat",
        "int4 awq gptq zeros qat",
        "mixed 4.25 gptq",
        "mixed 5.53 gptq",
        "int3 gptq qat",
        "fp8 gptq qat",
    ),
    *("structured", "draft 1/3"),
)
"""Recipes that take long on a CPU: they run only by name, or with --all."""


def size(text: str) -> tuple[int, int]:
    windows, context = text.split("x")
    return int(windows), int(context)


def measure(original: Scorer, args: EngineArgs, text: TextSettings) -> dict[str, float]:
    windows = read_windows(text, original.tokenizer)
    found = compare(
        original, Scorer.load(args, context=text.context), windows, num_worst=0, layers=False
    )
    return {
        "perplexity": found.perplexity_b,
        "perplexity_ratio": found.perplexity_ratio,
        "perplexity_ratio_stderr": found.perplexity_ratio_stderr,
        "kl_mean": found.kl.mean,
        "kl_stderr": found.kl.stderr,
        "kl_p99": found.kl.p99,
        "top1_agreement": found.top1_agreement,
        "top5_agreement": found.top5_agreement,
        "num_tokens": found.num_tokens,
    }


class Remembering(Scorer):
    """A model that computes each window once: the original meets every row on the same text."""

    def hidden(self, token_ids: Sequence[int], start: int = 0) -> Tensor:
        known: dict[tuple[int, ...], Tensor] = self.__dict__.setdefault("known", {})
        key = (start, *token_ids)
        if key not in known:
            known[key] = super().hidden(token_ids, start)
        return known[key]


def changed(steps: list[Any], given: list[str]) -> list[Any]:
    """The recipe with settings of `--set STEP.NAME=VALUE` where it has the step."""
    made = [
        {step: {}} if isinstance(step, str) else {kind: dict(own) for kind, own in step.items()}
        for step in steps
    ]
    for text in given:
        where, _, value = text.partition("=")
        kind, _, name = where.partition(".")
        for step in made:
            if kind in step:
                step[kind][name] = json.loads(value)
    return made


def setting(steps: list[Any], name: str) -> Any:
    """The recipe's value of a setting, wherever it stands, or None."""
    return next((own[name] for step in steps for own in step.values() if name in own), None)


def seconds_a_step(
    source: Any,
    steps: list[Any],
    folder: Path,
    calibration: list[Any],
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """Time per step of the recipe's training, by a short trial of which all but training is quick."""
    short = {
        "num_steps": 14,
        **(
            {"num_windows": None}
            if trains(steps) == "qat"
            else {"num_windows": 64, "eval_every": 1000}
        ),
    }
    trial = changed(
        steps, [f"{trains(steps)}.{name}={json.dumps(value)}" for name, value in short.items()]
    )
    recipe = parse(
        changed(
            trial, ['quantize.rounding="nearest"', "quantize.scaling=null", "quantize.clip=false"]
        )
    )
    times: list[float] = []
    if recipe.reshapes:
        reshape(
            source,
            recipe,
            folder,
            device=device,
            progress=lambda *told: times.append(time.perf_counter()),
        )
        clean(folder)
    else:
        windows = calibration[: max(1, setting(steps, "step_tokens") // len(calibration[0]))]
        told = lambda done, total: times.append(time.perf_counter())
        compress(source, recipe, folder, windows=windows, device=device, dtype=dtype, progress=told)
        shutil.rmtree(folder)
    each = sorted(b - a for a, b in zip(times[-10:], times[-9:], strict=False))[4]
    print(f"a step takes {each:.3f} s", flush=True)
    return each


def trains(steps: list[Any]) -> str | None:
    """The kind of the recipe's step that does."""
    return next((kind for step in steps for kind in step if kind in ("qat", "distill")), None)


def carry_out(
    source: Any,
    steps: list[Any],
    out: Path,
    calibration: list[Any],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """The checkpoint at `out`, and what is to be said of it."""
    recipe, begin = parse(steps), time.perf_counter()
    info: dict[str, Any] = {
        "recipe": recipe.as_data(),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
    }
    if recipe.reshapes:
        assert layer_recipe(recipe) is None
        made = reshape(source, recipe, out, device=device, progress=_every_fiftieth)
        info["num_parameters"] = made.spec.num_parameters
        info["num_layers"] = made.spec.num_layers
        if (record := made.path / "distill.json").is_file():
            history = json.loads(record.read_text())["history"]
            info["history"] = [
                r for r in history if r["held_out_kl"] is not None or r["step"] % 50 == 0
            ]
        publish(made, recipe, out, lambda folder: None)
    else:
        done = compress(source, recipe, out, windows=calibration, device=device, dtype=dtype)
        info["bits_per_weight"] = done.bits_per_weight
        info["bits"] = (
            {p.name: p.fmt.bits for p in done.weights if p.fmt is not None}
            if "average" in str(steps)
            else {}
        )
    return {**info, "compress_s": time.perf_counter() - begin, "file_bytes": model_bytes(out)}


def _every_fiftieth(phase: str, done: int, total: int) -> None:
    if done % 50 == 0 or "held-out" in phase:
        print(f"{phase}, {done} of {total}", flush=True)


def file_name(row: str) -> str:
    return (
        row.replace(" ", "-")
        .replace(",", "")
        .replace("/", "of")
        .replace(":", "of")
        .replace("%", "percent")
    )


def show(model: str, settings: dict[str, Any], results: dict[str, Any]) -> None:
    text = settings["text"]
    print_table(
        f"{model}, {text['num_windows']} windows of {text['context']} tokens",
        ("", "bits", "MB", "perplexity", "KL mean", "KL p99", "top-1", "s"),
        [
            (
                name,
                f"{r.get('bits_per_weight', float('nan')):.2f}",
                f"{r['file_bytes'] / 1e6:.1f}",
                f"{r['perplexity_ratio'] - 1:+.2%}",
                f"{r['kl_mean']:.4f}",
                f"{r['kl_p99']:.3f}",
                f"{r['top1_agreement']:.2%}",
                f"{r.get('compress_s', float('nan')):.0f}",
            )
            for name, r in results.items()
        ],
    )


def merge(args: argparse.Namespace) -> None:
    parts = [json.loads(path.read_text()) for path in args.merge]
    if any(part["settings"]["text"] != parts[0]["settings"]["text"] for part in parts):
        raise SystemExit("these were measured on different text")
    text = {key: parts[0]["settings"][key] for key in ("model", "text")}
    results: dict[str, Any] = {}
    for part in parts:
        own = {key: value for key, value in part["settings"].items() if key not in text}
        results |= {name: {**own, **row} for name, row in part["results"].items()}
    order = {name: i for i, name in enumerate(ROWS)}
    results = dict(sorted(results.items(), key=lambda pair: order.get(pair[0], len(order))))
    made = {
        key: value
        for key, value in parts[0].items()
        if key not in ("results", "settings", "command")
    }
    args.output.write_text(
        json.dumps({**made, "settings": text, "results": results}, indent=1, ensure_ascii=False)
        + "\n"
    )
    show(args.model, text, results)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="of products in calibration",
    )
    parser.add_argument("--rows", help="names, with semicolons")
    parser.add_argument("--all", action="store_true", help="also the rows that take long on a CPU")
    parser.add_argument(
        "--again", action="store_true", help="measure what is in the output already, too"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="STEP.NAME=VALUE", help="in the rows' recipes"
    )
    parser.add_argument("--called", help="what the row is called, with --set and one row")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument(
        "--seconds", type=float, nargs="+", metavar="S", help="of training: of all rows, or of each"
    )
    parser.add_argument(
        "--each",
        type=Path,
        metavar="DIR",
        help="a file for each row there as well, as soon as it is done",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="where the checkpoints stay (default: they do not)"
    )
    parser.add_argument(
        "--calibrate",
        type=size,
        default=(64, 512),
        metavar="NxT",
        help="windows by tokens (default: 64x512)",
    )
    parser.add_argument(
        "--evaluate", type=size, default=(32, 512), metavar="NxT", help="(default: 32x512)"
    )


def run(args: argparse.Namespace, write: Callable[..., None]) -> None:
    if args.merge:
        return merge(args)
    names = (
        args.rows.split(";")
        if args.rows
        else [name for name in ROWS if args.all or name not in SLOW]
    )
    source = read_spec(resolve_model(args.model))
    tokenizer = Tokenizer.from_pretrained(source.path)
    num_windows, context = args.evaluate
    text = TextSettings(context=context, stride=context, num_windows=num_windows)
    calibrate = {"calibrate": {"num_windows": args.calibrate[0], "context": args.calibrate[1]}}
    recipes = {name: [calibrate, *changed(ROWS[name], args.set)] for name in names}
    most = max(
        (setting(ROWS[name], "num_windows") for name in names if trains(recipes[name]) == "qat"),
        default=0,
    )
    calibration = calibration_text(
        tokenizer=tokenizer, num_windows=max(args.calibrate[0], most), context=args.calibrate[1]
    )
    device = torch.device(
        "cuda"
        if args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
        else "cpu"
    )
    plain = EngineArgs(model=args.model, device=device.type, dtype="float32", kernels="reference")
    settings = {
        "model": args.model,
        "text": dataclasses.asdict(text),
        "calibration_windows": args.calibrate[0],
        "calibration_context": args.calibrate[1],
    }
    kept = json.loads(args.output.read_text()) if args.output.is_file() and not args.again else {}
    results: dict[str, Any] = kept.get("results", {}) if kept.get("settings") == settings else {}

    def save(name: str, row: dict[str, Any]) -> None:
        results[name] = row
        write(settings=settings, results=results)
        if args.each:
            common.save(
                args.each / f"{file_name(name)}.json",
                "compression_recipes",
                settings=settings,
                results={name: row},
            )
        print(
            name,
            {k: v for k, v in row.items() if k not in ("recipe", "history", "bits")},
            flush=True,
        )

    speed: dict[str, float] = {}
    known: dict[str, float] = {}  # seconds a step of training
    with tempfile.TemporaryDirectory() as temporary:
        folder, original = args.keep or Path(temporary), Remembering.load(plain, context=context)
        for i, name in enumerate(names):
            shown = args.called or name
            if shown in results:
                continue
            out, dtype = folder / file_name(shown), getattr(torch, args.dtype)
            steps = recipes[name]
            windows = calibration if trains(steps) == "qat" else calibration[: args.calibrate[0]]
            try:
                if args.seconds and (kind := trains(steps)):
                    if kind not in known:
                        known[kind] = seconds_a_step(
                            source, steps, folder / "trial", windows, device, dtype
                        )
                    num_steps = max(1, int(args.seconds[i % len(args.seconds)] / known[kind]))
                    steps = changed(steps, [f"{kind}.num_steps={num_steps}"])
                info = carry_out(source, steps, out, windows, device, dtype)
            except Exception:  # a row that fails must not take those after it along
                traceback.print_exc()
                print(f"failed: {shown}", flush=True)
                continue
            row = {**measure(original, dataclasses.replace(plain, model=str(out)), text), **info}
            save(shown, row)
            if args.speed:
                as_served = dataclasses.replace(
                    plain, dtype="bfloat16" if device.type == "cuda" else "float32", kernels="auto"
                )
                speed = speed or tokens_per_s(as_served)
                own = tokens_per_s(dataclasses.replace(as_served, model=str(out)))
                save(shown, {**row, "tokens_per_s": own, "tokens_per_s_original": speed})
        for name, _, path in (pair.partition("=") for pair in args.also):
            found = measure(original, dataclasses.replace(plain, model=path), text)
            save(name, {**found, "file_bytes": model_bytes(Path(path))})
    show(args.model, settings, results)
