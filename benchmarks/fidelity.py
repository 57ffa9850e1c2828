"""What each scheme and each 8-bit cache costs in quality: perplexity, KL divergence and agreement on real conversations.

    python benchmarks/fidelity.py [--model smollm2] [--text FILE] [--windows 16]

`slipstream eval` for a list of cases. The yardstick is the model in float32. The reference kernels are used, which carry out a
scheme exactly as it is defined, on any machine.
"""

from __future__ import annotations

import dataclasses

import common

from slipstream.bench.report import print_table
from slipstream.config import EngineArgs
from slipstream.errors import ConfigError
from slipstream.evals.divergence import compare
from slipstream.evals.scorer import Scorer
from slipstream.evals.text import DEFAULT_TEXT, TextSettings, read_windows

CASES = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"quantization": "fp8"},
    "fp8-head": {"quantization": "fp8-head"},
    "int8": {"quantization": "int8"},
    "int4-g32": {"quantization": "int4-g32"},
    "int4": {"quantization": "int4"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "fp8, fp8 cache": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
COLUMNS = ("", "perplexity", "KL mean", "KL p99", "top-1 agreement", "of the top 5")


def main() -> None:
    parser = common.parser(__doc__, "fidelity")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default=DEFAULT_TEXT)
    parser.add_argument("--windows", type=int, default=16)
    args = parser.parse_args()
    text = TextSettings(source=args.text, num_windows=args.windows)
    settings = EngineArgs(model=args.model, device="cpu", kernels="reference", dtype="float32")
    yardstick = Scorer.load(settings, context=text.context)
    windows = read_windows(text, yardstick.tokenizer)
    results, rows = {}, []
    for name, given in CASES.items():
        try:
            case = Scorer.load(dataclasses.replace(settings, **given), context=text.context)
        except ConfigError as error:  # a scheme that the model's sizes do not admit
            print(f"{name}: {error}")
            continue
        found = compare(yardstick, case, windows, num_worst=0, layers=False)
        results[name] = {
            "perplexity": found.perplexity_b,
            "perplexity_ratio_stderr": found.perplexity_ratio_stderr,
            "kl_mean": found.kl.mean,
            "kl_p99": found.kl.p99,
            "top1_agreement": found.top1_agreement,
            "top5_agreement": found.top5_agreement,
        }
        numbers = f"{found.perplexity_b:.3f}", f"{found.kl.mean:.5f}", f"{found.kl.p99:.4f}"
        rows.append((name, *numbers, f"{found.top1_agreement:.2%}", f"{found.top5_agreement:.2%}"))
    num_tokens = sum(w.num_scored for w in windows)
    print_table(f"{args.model} on {args.text}, the {text.part} part: {num_tokens:,} tokens scored", COLUMNS, rows)
    common.save(
        args.output,
        "fidelity",
        settings={"model": args.model, "text": text, "num_tokens": num_tokens},
        results=results,
    )


if __name__ == "__main__":
    main()
