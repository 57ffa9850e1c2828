"""What zeros, pruning and distillation cost on a real model, as slipstream-report.json of the recipes would say.

    python benchmarks/pruning.py sparsity [--model smollm2] [--calibrate 64x512] [--evaluate 16x512]
    python benchmarks/pruning.py structured --device cuda --steps 5000          # a GPU, up to 20 minutes
    python benchmarks/pruning.py draft --device cuda --steps 4000

`sparsity`: half of the weights of the layers' products are zeros, anywhere and 2 of 4, by magnitude, Wanda and SparseGPT; the
perplexity of held-out ShareGPT text. `structured`: a quarter of the parameters go (whole layers), and distillation wins back
what it can; the report has perplexity, KL and tokens/s before and after. `draft` is the preset draft:1/3.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import common
import torch

from slipstream.bench.report import print_table
from slipstream.cli.main import main as slipstream
from slipstream.compress.recipe import parse
from slipstream.compress.run import compress
from slipstream.config import EngineArgs
from slipstream.engine.tokenizer import Tokenizer
from slipstream.evals.perplexity import perplexity
from slipstream.evals.scorer import Scorer
from slipstream.evals.text import TextSettings, calibration_windows, read_windows
from slipstream.hub import resolve_model
from slipstream.model.description import read_spec

METHODS = ("magnitude", "wanda", "sparsegpt")


def size(text: str) -> tuple[int, int]:
    windows, context = text.split("x")
    return int(windows), int(context)


def sparsity(args) -> None:
    path = resolve_model(args.model)
    source, tokenizer = read_spec(path), Tokenizer.from_pretrained(path)
    windows, context = args.calibrate
    calibration = calibration_windows(tokenizer=tokenizer, num_windows=windows, context=context)
    count, length = args.evaluate
    held_out = read_windows(TextSettings(context=length, stride=length, num_windows=count), tokenizer)

    def measure(model: str) -> float:
        given = EngineArgs(model=model, device=args.device, dtype="float32")
        return perplexity(Scorer.load(given, context=length), held_out).perplexity

    results = {"original": measure(args.model)}
    print(f"original: {results['original']:.3f}", flush=True)
    device = torch.device(args.device)
    for pattern in (None, "2:4"):
        for method in METHODS:
            name = f"{method}, {pattern or '50 % anywhere'}"
            with tempfile.TemporaryDirectory() as folder:
                out, begin = Path(folder) / "out", time.perf_counter()
                recipe = parse([{"sparsify": {"method": method, "pattern": pattern}}])
                compress(source, recipe, out, windows=calibration, device=device, dtype=torch.float32)
                seconds = time.perf_counter() - begin
                results[name] = measure(str(out))
            print(f"{name}: {results[name]:.3f} ({seconds:.0f} s)", flush=True)
    rows = [(name, f"{value:.3f}", f"{value / results['original'] - 1:+.1%}") for name, value in results.items()]
    print_table("perplexity with zeros", ("weights", "perplexity", "change"), rows)
    ordered = {
        pattern: results[f"sparsegpt, {pattern}"] < results[f"wanda, {pattern}"] < results[f"magnitude, {pattern}"]
        for pattern in ("50 % anywhere", "2:4")
    }
    text = {"source": "sharegpt", "calibration": args.calibrate, "evaluation": args.evaluate}
    common.save(args.output, "sparsity", model=args.model, text=text, perplexity=results, ordered=ordered)


def reshaped(args, name: str, steps: list | None) -> None:
    """The recipe as a user would run it, with tokens/s."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = name
        if steps is not None:
            recipe = str(Path(folder) / "recipe.yaml")
            Path(recipe).write_text(json.dumps(steps))
        out, begin = Path(folder) / "out", time.perf_counter()
        words = ["compress", args.model, "--recipe", recipe, "--out", str(out), "--speed", "--device", args.device]
        code = slipstream(words)
        if code:
            sys.exit(code)
        report = json.loads((out / "slipstream-report.json").read_text())
        training = json.loads((out / "distill.json").read_text())
        print(f"{time.perf_counter() - begin:.0f} s in all")
        (args.output.parent / f"{args.output.stem}.svg").write_text((out / "distill.svg").read_text())
        history = training["history"]
        kept = [r for r in history if r["held_out_kl"] is not None or r["step"] % 50 == 0]
        common.save(args.output, name, model=args.model, report=report, settings=training["settings"], history=kept)


def main() -> None:
    parser = common.parser(__doc__, "sparsity")
    parser.add_argument("what", choices=("sparsity", "structured", "draft"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calibrate", type=size, default=(64, 512), metavar="NxT", help="windows by tokens (default: 64x512)")
    parser.add_argument("--evaluate", type=size, default=(16, 512), metavar="NxT", help="(default: 16x512)")
    parser.add_argument("--steps", type=int, default=5000)
    args = parser.parse_args()
    if args.what == "sparsity":
        return sparsity(args)
    if args.output == common.RESULTS / "sparsity.json":
        args.output = common.RESULTS / f"pruning_{args.what}.json"
    shared = {"num_steps": args.steps, "batch_size": 32, "micro_batch": 16, "num_windows": 16384, "eval_every": 250}
    if args.what == "structured":
        prune = {"size": 0.75, "importance": "taylor"}
        return reshaped(args, "structured", [{"prune": prune}, {"distill": {**shared, "learning_rate": 6e-4}}])
    draft = {**shared, "learning_rate": 1e-3, "state_weight": 0.1}
    return reshaped(args, "draft", [{"prune": {"size": 1 / 3}}, {"distill": draft}])


if __name__ == "__main__":
    main()
