"""Self-speculation by leaving layers out: how many of its guesses are right. These are counts, not times.

    python benchmarks/speculation.py --study layers [MODEL] [--left-out 3 6 10] [--output FILE]

1. Layers are ranked by how often the model without one of them has the same likeliest token, behind each token of its answers.
2. The least wanted ones are left out together, and that model drafts `--drafts` tokens, with the whole model's keys and
   values of all tokens before (Zhang et al. 2024, "Draft & Verify"). The whole model says how many of them are right.

The record has the share of a step's weights that a draft reads; what follows from it is said in docs/speculation.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from slipstream import LLM, SamplingParams
from slipstream.config import EngineArgs
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.model.layers import run_layers
from slipstream.worker.local_executor import load_runner

QUESTIONS = (
    "Why do ships of iron float?",
    "Write a Python function that counts the words of a text.",
    "List five things to pack for a hike.",
    "Tell me how bread is made.",
)


class Model:
    """A model whose layers can be left out, over one sequence."""

    def __init__(self, name: str, longest: int) -> None:
        args = EngineArgs(model=name, max_model_len=longest, max_num_seqs=1, num_threads=1)
        _, runner, _ = load_runner(args, by_torch=True)
        self.decoder: Any = runner.forwards.decoder  # type: ignore[union-attr]
        self.size = runner.config.cache.block_size
        self.kv = runner.make_cache(-(-longest // self.size) + 1)
        self.count = len(self.decoder.layers)

    @torch.inference_mode()
    def best(
        self, tokens: list[int], start: int, left_out: frozenset[int] = frozenset()
    ) -> list[int]:
        """The likeliest token behind each of `tokens`, which stand at `start`, …"""
        d = self.decoder
        meta = AttentionMetadata.single_sequence(
            start, len(tokens), block_size=self.size, device=d.device
        )
        ids, kept = (
            torch.tensor(tokens, dtype=torch.int32),
            [i for i in range(self.count) if i not in left_out],
        )
        layers, caches = [d.layers[i] for i in kept], [self.kv[i] for i in kept]
        hidden = d.finished(*run_layers(d.ops, layers, d.embedded(ids, meta), caches, meta))
        found: list[int] = d.logits(hidden).argmax(-1).tolist()
        return found

    def share(self, left_out: frozenset[int]) -> float:
        """Of the weights that a step of one token reads, those that a draft reads: layers and output head."""
        spec = self.decoder.spec
        layers = [layer.num_parameters(spec.hidden_size) for layer in spec.layers]
        head = spec.vocab_size * spec.hidden_size
        kept = sum(n for i, n in enumerate(layers) if i not in left_out)
        return (kept + head) / (sum(layers) + head)


def ranked(model: Model, texts: list[tuple[list[int], int]]) -> list[int]:
    """The layers, first those without which the likeliest tokens change least."""
    same = [0] * model.count
    for tokens, begin in texts:
        whole = model.best(tokens, 0)[begin:]
        for i in range(model.count):
            without = model.best(tokens, 0, frozenset((i,)))[begin:]
            same[i] += sum(a == b for a, b in zip(whole, without, strict=True))
    return sorted(range(model.count), key=lambda i: -same[i])


def accepted(
    model: Model, texts: list[tuple[list[int], int]], left_out: frozenset[int], num_drafts: int
) -> list[float]:
    """How often the first, second, … draft and those before it are right."""
    right, runs = [0] * num_drafts, 0
    for tokens, begin in texts:
        model.best(tokens[:begin], 0)
        at = begin  # the position of the last token that is known
        while at + num_drafts + 1 < len(tokens):
            drafts: list[int] = []
            for i in range(num_drafts):
                drafts += model.best([(drafts or [tokens[at]])[-1]], at + i, left_out)
            own = model.best([tokens[at], *drafts], at)
            count = next(
                (i for i, (a, b) in enumerate(zip(drafts, own, strict=False)) if a != b), num_drafts
            )
            right = [n + (i < count) for i, n in enumerate(right)]
            tokens[at + 1 : at + 2 + count] = own[: count + 1]  # what the whole model writes
            runs, at = runs + 1, at + count + 1
    return [n / runs for n in right]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--left-out", type=int, nargs="+", default=[3, 6, 10])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    with LLM(args.model, max_model_len=512, max_num_seqs=4, num_threads=1) as llm:
        prompts: list[Any] = [[{"role": "user", "content": q}] for q in QUESTIONS]
        outputs = llm.chat(
            prompts, SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
        )
    texts = [
        ([*o.prompt_token_ids, *o.outputs[0].token_ids], len(o.prompt_token_ids) - 1)
        for o in outputs
    ]
    model, results = Model(args.model, 512), []
    order = ranked(model, texts)
    for count in args.left_out:
        left_out = frozenset(order[:count])
        right = accepted(
            model, [(list(tokens), begin) for tokens, begin in texts], left_out, args.drafts
        )
        found = {"left_out": sorted(left_out), "share_of_a_step": round(model.share(left_out), 4)}
        found |= {
            "right_by_position": [round(x, 4) for x in right],
            "accepted_length": round(1 + sum(right), 4),
        }
        print(found, flush=True)
        results.append(found)
    save(
        model=args.model,
        num_drafts=args.drafts,
        num_tokens=args.tokens,
        order=order,
        results=results,
    )
