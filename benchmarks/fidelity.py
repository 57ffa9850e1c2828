"""What each scheme and each 8-bit cache costs in quality: perplexity, KL divergence and top-1 agreement on real text.

    python benchmarks/fidelity.py [--model smollm2] [--text FILE] [--windows 6]

The text is cut into windows of 512 tokens that do not overlap; tokens 1 to 511 of each are scored. The yardstick is the
model in float32. The reference kernels are used, which carry out a scheme exactly as it is defined, on any machine.
"""

from __future__ import annotations

import math
from pathlib import Path

import common
import torch

from slipstream.bench.report import print_table
from slipstream.config import EngineArgs
from slipstream.engine.engine_core import EngineCore
from slipstream.engine.tokenizer import Tokenizer
from slipstream.hub import resolve_model
from slipstream.kernels.ops import AttentionMetadata
from slipstream.worker.model_runner import ModelRunner

WINDOW = 512
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


def log_probabilities(runner: ModelRunner, tokens: torch.Tensor) -> torch.Tensor:
    """[WINDOW, V] of one window, through a cache of the runner's type."""
    size = runner.config.cache.block_size
    num_blocks = -(-WINDOW // size)
    positions = torch.arange(WINDOW)
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, WINDOW], dtype=torch.int32),
        seq_lens=torch.tensor([WINDOW], dtype=torch.int32),
        block_table=torch.arange(1, num_blocks + 1, dtype=torch.int32)[None],
        positions=positions,
        slot_mapping=positions + size,
        num_decodes=0,
        max_query_len=WINDOW,
        max_seq_len=WINDOW,
    )
    decoder = runner.model.decoder
    return decoder.logits(decoder.forward(tokens, runner.kv, meta)).float().log_softmax(-1)


@torch.inference_mode()
def main() -> None:
    parser = common.parser(__doc__, "fidelity")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "LICENSE")
    parser.add_argument("--windows", type=int, default=4)
    args = parser.parse_args()
    ids = Tokenizer.from_pretrained(resolve_model(args.model)).encode(args.text.read_text("utf-8"))
    windows = [torch.tensor(ids[i : i + WINDOW]) for i in range(0, len(ids) - WINDOW + 1, WINDOW)][: args.windows]
    yardstick: list[torch.Tensor] = []
    results, rows = {}, []
    for name, settings in CASES.items():
        given = {"dtype": "float32", **settings}
        try:
            core = EngineCore.build(
                EngineArgs(
                    model=args.model, device="cpu", kernels="reference", max_model_len=WINDOW, max_num_seqs=1, **given
                )
            )
        except Exception as error:  # a scheme that the model's sizes do not admit
            print(f"{name}: {error}")
            continue
        found = [log_probabilities(core.runner, w) for w in windows]
        yardstick = yardstick or found
        nll = torch.cat([-f[:-1].gather(1, w[1:, None])[:, 0] for f, w in zip(found, windows, strict=True)])
        pairs = [(y[:-1], f[:-1]) for y, f in zip(yardstick, found, strict=True)]
        kl = torch.cat([(y.exp() * (y - f)).sum(-1) for y, f in pairs])
        same = torch.cat([y.argmax(-1) == f.argmax(-1) for y, f in pairs])
        results[name] = {
            "perplexity": math.exp(nll.mean()),
            "kl_mean": kl.mean().item(),
            "kl_p99": kl.quantile(0.99).item(),
            "top1_agreement": same.float().mean().item(),
        }
        r = results[name]
        rows.append(
            (name, f"{r['perplexity']:.3f}", f"{r['kl_mean']:.5f}", f"{r['kl_p99']:.4f}", f"{r['top1_agreement']:.2%}")
        )
    print_table(
        f"{args.model} on {args.text.name}, {len(windows) * (WINDOW - 1)} tokens scored",
        ("", "perplexity", "KL mean", "KL p99", "top-1 agreement"),
        rows,
    )
    common.save(
        args.output,
        "fidelity",
        settings={"model": args.model, "text": args.text.name, "windows": len(windows)},
        results=results,
    )


if __name__ == "__main__":
    main()
