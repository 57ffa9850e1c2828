"""Masks of grammars next to the forward: answers that keep to them, what lanes of lexers give, and tokens/s of greedy ones.

    python benchmarks/features.py --study masks                     Llama-3-8B's shape in FP8, 128/128 at 1, 64 and 768 requests
    python benchmarks/features.py --study masks --tiny --output masks.json      a small shape on a CPU

checks   answers of a schema and an expression: tokens that an own matcher does not allow (none), and how many answers are equal
         in two runs and without shared masks
threads  milliseconds of 64 masks by threads and lexers (copies of a matcher share a lexer, with a lock)
speeds   tokens/s of each kind of requests, alone and half of them greedy; medians and tails of the parts of a step

About 8 minutes on an H200. The record is written after each part.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import common
import numpy as np
from cases.features.grammar import made_tokenizer, schema

from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.costs.hardware import available_cores
from slipstream.engine.grammars.compose import compose, limits
from slipstream.engine.grammars.grammar import Grammars, GrammarState

RECORD = "masks_h200"
MANY = {"type": "array", "minItems": 10_000}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
}
GRAMMARS = {
    "schema": StructuredOutputsParams(json={**MANY, "items": schema(random.Random(0), 8)}),
    "open schema": StructuredOutputsParams(json={**MANY, "items": PERSON}),
    "regex": StructuredOutputsParams(regex="[a-z ]{400,}"),
}
"""Grammars that no answer completes."""


def sampling_of(num_tokens: int, *, greedy: bool = False, grammar: str = "") -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if greedy else 0.8,
        seed=0,
        max_tokens=num_tokens,
        ignore_eos=True,
        structured_outputs=GRAMMARS[grammar] if grammar else None,
    )


class Runs:
    """An engine whose parts of a step are timed."""

    def __init__(self, llm: LLM, prompts: list[Any]) -> None:
        self.llm, self.core, self.prompts = llm, llm.core, prompts
        self.ms: dict[str, list[float]] = {}
        for name in ("masks", "accept_all", "_compute"):
            self._measure(self.core.grammars, name)
        self._measure(self.core.executor, "constrain")
        self._measure(self.core.scheduler, "schedule")

    def _measure(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **how: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*args, **how)
            finally:
                self.ms.setdefault(name, []).append((time.perf_counter() - begin) * 1e3)

        setattr(owner, name, call)

    def run(self, params: Any, count: int) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
        self.ms.clear()
        steps, begin = self.core._num_steps, time.perf_counter()
        answers = self.llm.generate(self.prompts[:count], params, progress=False)
        taken, steps = time.perf_counter() - begin, self.core._num_steps - steps
        tokens = [tuple(a.outputs[0].token_ids) for a in answers]
        parts = {
            name: {
                "n": len(ms),
                "p50": round(float(np.median(ms)), 3),
                "p99": round(float(np.percentile(ms, 99)), 3),
                "max": round(max(ms), 3),
            }
            for name, ms in self.ms.items()
        }
        rate = round(sum(map(len, tokens)) / taken, 1)
        step_ms = round(taken / max(1, steps) * 1e3, 3)
        return {"tokens_per_s": rate, "ms_a_step": step_ms, "parts_ms": parts}, tokens


def matcher_of(grammars: Grammars, params: StructuredOutputsParams) -> Any:
    from llguidance import LLMatcher

    return LLMatcher(grammars._vocabulary, compose(params), log_level=0, limits=limits())


def without_shared_masks() -> ExitStack:
    """Patches by which each request's masks are made by a matcher of its own."""
    init = GrammarState.__init__

    def alone(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.regex = self.spot = None

    stack = ExitStack()
    stack.enter_context(mock.patch.object(GrammarState, "look", return_value=None))
    stack.enter_context(mock.patch.object(Grammars, "_find", return_value=None))
    stack.enter_context(mock.patch.object(GrammarState, "__init__", alone))
    return stack


def check(runs: Runs, count: int, num_tokens: int, grammar: str, greedy: bool) -> dict[str, Any]:
    """The same batch each time, once before it counts: then its kernels, graphs and grammar are there."""
    params = sampling_of(num_tokens, greedy=greedy, grammar=grammar)
    _, new, twice = (runs.run(params, count)[1] for _ in range(3))
    with without_shared_masks():
        runs.run(params, count)
        old_run, old = runs.run(params, count)
        again = runs.run(params, count)[1]
    matcher, wrong = matcher_of(runs.core.grammars, GRAMMARS[grammar]), 0
    for tokens in new[:8]:
        own = matcher.deep_copy()
        for token in tokens:
            wrong += not own.compute_bitmask()[token >> 3] >> (token & 7) & 1
            own.consume_token(token)

    def equal(a: list[Any], b: list[Any]) -> int:
        return sum(x == y for x, y in zip(a, b, strict=True))

    return {
        "of": count,
        "tokens_not_allowed": wrong,
        "equal_in_two_runs": equal(new, twice),
        "equal_without_shared_masks": equal(new, old),
        "equal_in_two_runs_without": equal(again, old),
        "without_shared_masks": old_run,
    }


def threads(grammars: Grammars, vocab_size: int) -> dict[str, float]:
    """Milliseconds of the masks of 64 rows of the expression."""
    from llguidance import LLExecutor

    found, words = {}, -(-vocab_size // 32)
    letter = grammars._tokenizer.encode("a", add_special_tokens=False)[0]
    lanes = [matcher_of(grammars, GRAMMARS["regex"]) for _ in range(12)]
    for num_threads in (1, 4, 12):
        for num_lanes in sorted({1, num_threads}):
            pool, ms = LLExecutor(num_threads), []
            rows = [lanes[i % num_lanes].deep_copy() for i in range(64)]
            memory = np.zeros((64, words), np.int32)
            jobs = [(matcher, i) for i, matcher in enumerate(rows)]
            for _ in range(6):
                begin = time.perf_counter()
                pool.unsafe_compute_mask_ptr(jobs, memory.ctypes.data, 4 * words, 64)
                ms.append((time.perf_counter() - begin) * 1e3)
                for matcher in rows:
                    matcher.consume_token(letter)
            key = f"{num_threads} threads, {num_lanes} lexers"
            found[key] = round(float(np.median(ms[1:])), 3)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiny", action="store_true", help="a small shape on a CPU")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    counts, num_tokens, length = ((1, 4, 16), 24, 16) if args.tiny else ((1, 64, 768), 128, 128)
    config = json.loads((common.CONFIGS / "llama-3-8b" / "config.json").read_text())
    on: dict[str, Any] = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    if args.tiny:
        config |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
        config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048}
        on = {"device": "cpu"}
    config |= {"bos_token_id": 0, "eos_token_id": 0}
    vocab, rng = config["vocab_size"], random.Random(1)
    prompts = [
        {"prompt_token_ids": [rng.randrange(300, vocab) for _ in range(length)]}
        for _ in range(max(counts))
    ]
    found: dict[str, Any] = {"cores": available_cores(), "checks": {}, "speeds": {}}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        made_tokenizer(Path(folder), vocab)
        settings = {"max_model_len": 1024, "max_num_seqs": max(counts), **on}
        llm = LLM(folder, load_format="dummy", enable_prefix_caching=False, **settings)
    with llm:
        runs, found["settings"] = Runs(llm, prompts), settings
        for grammar, greedy in (
            ("regex", False),
            ("schema", False),
            ("open schema", False),
            ("regex", True),
            ("schema", True),
        ):
            name = ("greedy " if greedy else "") + grammar
            found["checks"][name] = check(runs, counts[1], num_tokens, grammar, greedy)
            print(f"{name}: {json.dumps(found['checks'][name])}", flush=True)
            save(**found)
        found["threads"] = threads(llm.core.grammars, vocab)
        greedy = sampling_of(num_tokens, greedy=True)
        kinds: dict[str, Any] = {"greedy": greedy, "temperature": sampling_of(num_tokens)}
        kinds |= {name: sampling_of(num_tokens, grammar=name) for name in GRAMMARS}
        for count in counts:
            rows = dict(kinds)
            for name in ("schema", "regex") if count > 1 else ():
                rows[f"half {name}"] = [kinds[name] if i % 2 else greedy for i in range(count)]
            for name, params in rows.items():
                measured = [runs.run(params, count)[0] for _ in range(3 if count < 768 else 2)]
                best = max(measured, key=lambda row: row["tokens_per_s"])
                base = found["speeds"].get(f"{count} greedy", best)["tokens_per_s"]
                share = round(best["tokens_per_s"] / base, 3)
                rates = [row["tokens_per_s"] for row in measured]
                found["speeds"][f"{count} {name}"] = {**best, "of_greedy": share, "all": rates}
                print(f"{count} {name}: {best['tokens_per_s']} tokens/s, {share} of greedy")
                save(**found)
        found["states"] = {
            f"{key[1].regex or 'json'} {i}"[:16]: {
                "lexers": len(compiled.lanes._made),
                "states": len(getattr(compiled.regex, "_states", ())),
                "masks": len(getattr(compiled.regex, "_masks", ())),
            }
            for i, (key, compiled) in enumerate(llm.core.grammars._compiled.items())
        }
        save(**found)
