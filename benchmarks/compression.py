"""What each way of compressing costs in quality: every row a recipe carried out, and compared with the original on text that
calibrated nothing.

    python benchmarks/compression.py [--model smollm2] [--rows int4-gptq,int4-awq] [--windows 32] [--also NAME=PATH ...]

`--also` adds checkpoints that others made, such as a GGUF file in Q4_K_M or a folder of llm-compressor's, compared in the same
way. The yardstick is the original, run in float32. 8-bit products run on the reference kernels, which carry out their
definition
exactly; the rest on whatever the device has. Rows are kept as they come, so that a run that was broken off goes on with the
rows
that are missing (`--again` measures them anew).

Bits are those of the products that were rounded, scales included; bytes those of the weights on disk.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import torch

from slipstream.bench.report import print_table
from slipstream.compress.recipe import parse, preset
from slipstream.compress.report import model_bytes
from slipstream.compress.run import compress
from slipstream.config import EngineArgs
from slipstream.engine.tokenizer import Tokenizer
from slipstream.evals.divergence import compare
from slipstream.evals.scorer import Scorer
from slipstream.evals.text import TextSettings, calibration_windows, read_windows
from slipstream.hub import resolve_model
from slipstream.model.description import read_spec

CONTEXT = 512
FOUR = {"bits": 4, "group_size": 64}  # 128 does not divide this model's width
THREE = {"bits": 3, "group_size": 64}
ROWS: dict[str, list[Any]] = {
    "fp8": preset("fp8") or [],
    "fp8 static": preset("fp8-static") or [],
    "int8 plain": [{"quantize": {"bits": 8, "inputs": "int8"}}],
    "int8 smoothquant": preset("int8") or [],
    "int4 nearest, no clipping": [{"quantize": {**FOUR, "clip": False}}],
    "int4 nearest": [{"quantize": FOUR}],
    "int4 awq": [{"quantize": {**FOUR, "scaling": "awq"}}],
    "int4 gptq": [{"quantize": {**FOUR, "rounding": "gptq"}}],
    "int4 awq gptq": [{"quantize": {**FOUR, "scaling": "awq", "rounding": "gptq"}}],
    "int4 learned": [{"quantize": {**FOUR, "rounding": "learned"}}],
    "int4 gptq zeros": [{"quantize": {**FOUR, "rounding": "gptq", "symmetric": False}}],
    "mixed 4.25 gptq": [{"quantize": {"bits": {"average": 4.25}, "group_size": 64, "rounding": "gptq"}}],
    "int3 nearest": [{"quantize": THREE}],
    "int3 gptq": [{"quantize": {**THREE, "rounding": "gptq"}}],
    "int3 gptq qat": [{"quantize": {**THREE, "rounding": "gptq"}}, {"qat": {"num_steps": 300}}],
    "fp8 cache": [{"kv_cache": {"form": "fp8"}}],
}
SLOW = ("int4 learned", "mixed 4.25 gptq", "int3 gptq qat")
"""Those that take long on a CPU: only by name, or with --all."""


def measure(original: Scorer, args: EngineArgs, text: TextSettings) -> dict[str, float]:
    windows = read_windows(text, original.tokenizer)
    found = compare(original, Scorer.load(args, context=CONTEXT), windows, num_worst=0, layers=False)
    return {
        "perplexity": found.perplexity_b,
        "perplexity_ratio": found.perplexity_ratio,
        "kl_mean": found.kl.mean,
        "kl_stderr": found.kl.stderr,
        "kl_p99": found.kl.p99,
        "top1_agreement": found.top1_agreement,
        "top5_agreement": found.top5_agreement,
    }


def main() -> None:
    parser = common.parser(__doc__, "compression")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", help="names, with commas")
    parser.add_argument("--all", action="store_true", help="also the rows that take long on a CPU")
    parser.add_argument("--again", action="store_true", help="measure what is in the output already, too")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--windows", type=int, default=32, help="to measure on")
    parser.add_argument("--calibration-windows", type=int, default=64)
    args = parser.parse_args()
    names = args.rows.split(",") if args.rows else [name for name in ROWS if args.all or name not in SLOW]
    source = read_spec(resolve_model(args.model))
    tokenizer = Tokenizer.from_pretrained(source.path)
    text = TextSettings(context=CONTEXT, stride=CONTEXT, num_windows=args.windows)
    calibration = calibration_windows(tokenizer=tokenizer, num_windows=args.calibration_windows, context=CONTEXT)
    plain = EngineArgs(model=args.model, device=args.device, dtype="float32")
    device = torch.device("cuda" if args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available()) else "cpu")
    settings = {
        "model": args.model,
        "text": dataclasses.asdict(text),
        "calibration_windows": args.calibration_windows,
        "calibration_context": CONTEXT,
        "device": str(device),
    }
    kept = json.loads(args.output.read_text()) if args.output.is_file() and not args.again else {}
    results: dict[str, Any] = kept.get("results", {}) if kept.get("settings") == settings else {}
    with tempfile.TemporaryDirectory() as folder:
        original = Scorer.load(plain, context=CONTEXT)
        for name in names:
            if name in results:
                continue
            out, begin = Path(folder) / name.replace(" ", "-"), time.perf_counter()
            recipe = parse(ROWS[name])
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            done = compress(source, recipe, out, windows=calibration, device=device, dtype=dtype)
            seconds = time.perf_counter() - begin
            exact = name.startswith(("fp8", "int8")) and device.type == "cpu"
            run_as = dataclasses.replace(plain, model=str(out), kernels="reference" if exact else "auto")
            results[name] = {
                **measure(original, run_as, text),
                "bits_per_weight": done.bits_per_weight,
                "file_bytes": model_bytes(out),
                "compress_s": seconds,
                "recipe": recipe.as_data(),
            }
            common.save(args.output, "compression", settings=settings, results=results)
            print(name, {k: v for k, v in results[name].items() if k != "recipe"}, flush=True)
        for name, _, path in (pair.partition("=") for pair in args.also):
            found = measure(original, dataclasses.replace(plain, model=path), text)
            results[name] = {**found, "file_bytes": model_bytes(Path(path))}
            common.save(args.output, "compression", settings=settings, results=results)
    print_table(
        f"{args.model}, {args.windows} windows of {CONTEXT} tokens",
        ("", "bits", "MB", "perplexity", "KL mean", "KL p99", "top-1"),
        [
            (
                name,
                f"{r.get('bits_per_weight', float('nan')):.2f}",
                f"{r['file_bytes'] / 1e6:.1f}",
                f"{r['perplexity_ratio'] - 1:+.2%}",
                f"{r['kl_mean']:.4f}",
                f"{r['kl_p99']:.3f}",
                f"{r['top1_agreement']:.2%}",
            )
            for name, r in results.items()
        ],
    )


if __name__ == "__main__":
    main()
