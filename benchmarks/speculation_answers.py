"""Greedy answers with each proposer beside those without: all must be the same tokens.

    python benchmarks/speculation_answers.py [MODEL] [--num-prompts 300] [--max-tokens 128] [--dtype float32]

300 prompts that people wrote (`data/README.md`), answered once without speculation and once with each proposer, which always
guesses three tokens. The record is written after each. The draft model is the model itself without two of its layers, so that
it errs at times. An answer that differs is listed with the place of its first other token. Exit code 1 if one does.

torch's kernels compute in `--dtype` throughout; the C++ ones would round activations to 8 bits.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import common

from slipstream import LLM, SamplingParams
from slipstream.bench.adapters.transformers import load_gguf
from slipstream.hub import resolve_model

METHODS = ("ngram", "suffix", "draft")


def prompts(count: int) -> list[list[dict[str, str]]]:
    lines = (common.DATA / "prompts.jsonl").read_text("utf-8").splitlines()
    return [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines[:: max(1, len(lines) // count)][:count]]


def make_draft(model: str, folder: str) -> None:
    """A GGUF file's model without every fifteenth layer, as a folder."""
    import torch

    made = load_gguf(resolve_model(model), "float32")
    kept = [layer for i, layer in enumerate(made.model.layers) if i % 15 != 9]
    made.model.layers = torch.nn.ModuleList(kept)
    made.config.num_hidden_layers = len(kept)
    if hasattr(made.config, "layer_types"):
        made.config.layer_types = made.config.layer_types[: len(kept)]
    made.save_pretrained(folder)


def main() -> None:
    parser = common.parser(__doc__, "speculation_answers")
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--num-prompts", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-seqs", type=int, default=75, help="answered at a time")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kernels", default="torch")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    args = parser.parse_args()
    chats = prompts(args.num_prompts)
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": args.dtype, "kernels": args.kernels, "max_num_seqs": args.num_seqs}
    folder = tempfile.TemporaryDirectory()
    if "draft" in args.methods:
        make_draft(args.model, folder.name)
    expected: list[list[int]] = []
    results = {}
    for method in (None, *args.methods):
        config: dict[str, Any] | None = None
        if method is not None:
            config = {"method": method, "num_speculative_tokens": 3}
            config |= {"model": folder.name} if method == "draft" else {}
        with LLM(args.model, speculative_config=config, max_model_len=1024, **settings) as llm:
            begin = time.perf_counter()
            answers = [answer.outputs[0].token_ids for answer in llm.chat(chats, sampling)]
            seconds, stats = time.perf_counter() - begin, llm.core.stats()
        expected = expected or answers
        different = [
            {"prompt": i, "token": next(k for k, (a, b) in enumerate(zip(own, other, strict=True)) if a != b)}
            for i, (own, other) in enumerate(zip(expected, answers, strict=True))
            if own != other
        ]
        results[method or "plain"] = {
            "equal": len(answers) - len(different),
            "different": different,
            "steps": stats.num_steps,
            "drafted": stats.spec_draft_tokens,
            "accepted": stats.spec_accepted_tokens,
            "seconds": seconds,
        }
        print(
            f"{method or 'plain':7} {len(answers) - len(different)} of {len(answers)} answers equal, {stats.num_steps} steps,"
            f" {stats.spec_accepted_tokens} of {stats.spec_draft_tokens} guesses right, {seconds:.0f} s",
            flush=True,
        )
        common.save(args.output, "speculation_answers", workload=vars(args), settings=settings, results=results)
    right = all(not r["different"] for r in results.values())
    sys.exit(0 if right and all(results[m]["accepted"] for m in args.methods) else 1)


if __name__ == "__main__":
    main()
