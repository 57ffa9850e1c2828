r"""Speculative decoding beside plain decoding: engines of one process take turns at the same prompts.

    python benchmarks/speculation.py --study speed [MODEL] [--config JSON ...] [--kinds quoting other] [--num-seqs 1]
    python benchmarks/speculation.py --study speed smollm2 --head FOLDER --kinds sharegpt --num-prompts 4 [--rounds 5]
    python benchmarks/speculation.py --study speed CONFIG --forced 3.3 --config \
        '{"method": "eagle3", "model": HEAD, "num_speculative_tokens": 5}'
    python benchmarks/speculation.py --study speed CONFIG --forced 3.2 --num-seqs 1 16 --op-by-op --config \
        '{"method": "draft", "model": SMALLER, "num_speculative_tokens": 4}'
    python benchmarks/speculation.py --study speed benchmarks/configs/qwen3.6-27b --quantization fp8 --num-seqs 1 16 \
        --curve 1.93 2.73 3.39 3.97 4.41

Prompts are of three kinds: those whose answers quote them (editing, extracting), those whose answers don't, and questions of
ShareGPT that no head was trained on. With --head an EAGLE-3 head drafts 1, 2, … 5 tokens, and as many as pay. Each round runs
every engine once on every kind, in an order that turns round by round, so that a machine whose speed changes treats them
alike. The ratio is the median over rounds of plain seconds a token over speculating ones, of the same round; beside it stands
the ratio of the process's CPU time, which other work on the machine disturbs less. Answers are greedy and end where the model
ends them: behind a quotation it would go on with text that quotes nothing. Answers of earlier rounds are not to help later
ones, so each round has prompts of its own.

With --forced X, the head or draft model and (unless --load-format is auto) the model have random weights, and all guesses are
wrong; so that the time of a step can be had nevertheless, a verification is *said* to yield X tokens on average, whatever was
drawn. What is measured are milliseconds a token of one shape at that acceptance, and nothing about acceptance itself. The
record is labelled so. With --op-by-op each config runs without graphs of its chains, too. With --curve the model's own layer
drafts 1, 2, … tokens (method `mtp`, rounded by --quantization like the model), and a verification of n drafts is said to yield
the n-th number. 1.93 2.73 3.39 3.97 4.41 are those that InferenceX measured of Qwen 3.5's layer.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import common

from slipstream import LLM, SamplingParams
from slipstream.compress.training.teacher import read_questions
from slipstream.messages.steps import ScheduledRequest
from slipstream.worker.graphs.chain_graphs import ChainGraphs

CODE = """def read_{0}(path):
    result = {{}}
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, value = line.split("=", 1)
            result[key.strip()] = value.strip()
    return result
"""
LETTER = """Dear Mrs {0},

thank you for your letter of 3 May. We have looked at the invoice number 48-{1} again, and you are right: the second item was
charged twice. We will return the amount of 312 euros to your account within ten days. Please write to us if it has not
arrived by then.

Yours sincerely,
the accounts department"""
LIST = """{{"owner": "{0}", "items": [
  {{"id": {1}, "title": "A walk along the river", "price": 12.5, "tags": ["outdoor", "summer"]}},
  {{"id": 7{1}, "title": "The history of paper", "price": 31.0, "tags": ["reading", "history"]}},
  {{"id": 9{1}, "title": "Bread at home", "price": 18.9, "tags": ["kitchen", "winter"]}}
]}}"""
NAMES = (
    "settings",
    "colours",
    "prices",
    "routes",
    "limits",
    "labels",
    "fields",
    "ports",
    "names",
    "users",
    "rates",
    "keys",
)
PROMPTS = {
    "quoting": (
        "Repeat this code exactly, but call the variable `result` `found`:\n\n```python\n"
        + CODE
        + "```",
        "Copy this letter word by word and correct nothing but the number of days, which is twelve:\n\n"
        + LETTER,
        "Return this list as it is, but sort nothing and leave out nothing:\n\n" + LIST,
    ),
    "other": tuple(
        f"{text} Take care that {{0}} come up, and the number {{1}}."
        for text in (
            "Write a short story about a fisherman who finds a strange machine on the beach.",
            "Explain to a child of ten years why ships of iron float.",
            "Which three books would you take to an island, and why?",
            "Describe how bread is made, from the field to the table.",
            "What should one know before the first winter in Norway?",
            "Write a dialogue of two taxi drivers who wait in the rain.",
            "Give advice to somebody who wants to learn the violin at sixty.",
            "Compare the life of a whale with that of an elephant.",
            "How did people tell the time before there were clocks?",
            "Invent a board game for four players and explain its rules.",
            "Why do some cities grow while others shrink?",
        )
    ),
}


@cache
def questions() -> list[str]:
    return read_questions("sharegpt", "evaluation", 1000, 1024)


def prompts(kind: str, round_: int, count: int) -> list[list[dict[str, str]]]:
    numbers = range(round_ * count, (round_ + 1) * count)
    if kind == "sharegpt":
        return [[{"role": "user", "content": questions()[n]}] for n in numbers]
    forms = PROMPTS[kind]
    texts = [forms[n % len(forms)].format(NAMES[n % len(NAMES)], 100 + n) for n in numbers]
    return [[{"role": "user", "content": text}] for text in texts]


def answered(llm: LLM, kind: str, round_: int, args: argparse.Namespace) -> dict[str, Any]:
    before, begin, cpu = llm.core.stats(), time.perf_counter(), time.process_time()
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    tokens = sum(
        len(answer.outputs[0].token_ids)
        for answer in llm.chat(prompts(kind, round_, args.num_prompts), sampling)
    )
    seconds, after = time.perf_counter() - begin, llm.core.stats()
    return {
        "tokens": tokens,
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "steps": after.num_steps - before.num_steps,
        "drafted": after.spec_draft_tokens - before.spec_draft_tokens,
        "accepted": after.spec_accepted_tokens - before.spec_accepted_tokens,
    }


class Forced:
    """Says how many tokens each run of drafts yields: of each request so many on average, in a fixed pattern. Drafts beyond
    the pattern are wrong, and those of a run that has fewer are right."""

    def __init__(self, length: float) -> None:
        self.length = length - 1
        self.left: dict[str, float] = {}  # by request
        self.said: dict[tuple[str, int], int] = {}  # of a request with so many computed tokens

    def tokens_of(self, s: ScheduledRequest) -> int:
        place = s.request_id, s.num_computed_tokens
        if place not in self.said:
            left = self.left.get(s.request_id, len(self.left) * 0.37 % 1) + self.length
            self.left[s.request_id] = left - int(left)
            self.said[place] = 1 + min(int(left), len(s.drafts))
        return self.said[place]

    def verified(
        self,
        requests: Sequence[ScheduledRequest],
        tokens: Sequence[int],
        from_model: Sequence[int] = (),
    ) -> tuple[list[int], tuple[int, ...]]:
        """Stands in for the engine's own verification."""
        counts = tuple(self.tokens_of(s) if s.drafts else s.num_sampled for s in requests)
        begins = itertools.accumulate((s.num_sampled for s in requests), initial=0)
        kept = [
            t
            for begin, count in zip(begins, counts, strict=False)
            for t in tokens[begin : begin + count]
        ]
        return kept, counts


@contextlib.contextmanager
def forced_acceptance(length: float) -> Iterator[None]:
    """Verifications of engines that are made and used meanwhile are said to yield `length` tokens on average."""
    forced, replay = Forced(length), ChainGraphs._replay

    def replayed(
        self: ChainGraphs, drafted: Sequence[ScheduledRequest], sampled: Sequence[int], depth: int
    ) -> None:
        """The chain behind a step is told behind which token it begins, and compares nothing."""
        counts = [forced.tokens_of(s) if n else 0 for s, n in zip(drafted, sampled, strict=True)]
        ends = [
            s._replace(num_computed_tokens=s.num_computed_tokens + n)
            for s, n in zip(drafted, counts, strict=True)
        ]
        replay(self, ends, [0] * len(ends), depth)

    with (
        unittest.mock.patch("slipstream.worker.in_flight.verified", forced.verified),
        unittest.mock.patch.object(ChainGraphs, "_replay", replayed),
    ):
        yield


def forced(args: argparse.Namespace) -> None:
    """Milliseconds a token behind a prompt of 64 tokens, plain and with each config, with each number of sequences."""
    settings: dict[str, Any] = {
        "max_num_seqs": max(8, *args.num_seqs),
        "max_model_len": 2048,
        "dtype": args.dtype,
    }
    settings |= {
        "load_format": args.load_format,
        "skip_tokenizer_init": True,
        "quantization": args.quantization,
    }
    settings["num_threads"] = args.num_threads
    wanted = [(config, args.forced) for config in args.config or []]
    for number, yielded in ((n, x) for n, x in enumerate(args.curve or [], 1) if x):
        by = {"quantization": args.quantization} if args.quantization else {}
        wanted.append(({"method": "mtp", "num_speculative_tokens": number, **by}, yielded))
    engines: list[tuple[str, Any, float, bool]] = [("plain", None, 1.0, False)]
    for config, length in wanted:
        engines.append((json.dumps(config), config, length, False))
        if args.op_by_op:
            engines.append((f"{engines[-1][0]}, op by op", config, length, True))
    found: dict[int, dict[str, dict[str, Any]]] = {n: {} for n in args.num_seqs}
    for name, config, length, op_by_op in engines:
        with contextlib.ExitStack() as stack:
            stack.enter_context(forced_acceptance(length))
            if op_by_op:
                stack.enter_context(
                    unittest.mock.patch.object(ChainGraphs, "of", return_value=None)
                )
            llm = stack.enter_context(LLM(args.model, speculative_config=config, **settings))
            for num_seqs, runs in found.items():
                runs[name] = own = timed(llm, num_seqs, args)
                plain = runs["plain"]
                ratio, of_cpu = (
                    plain[key] / own[key] for key in ("ms_per_token", "cpu_ms_per_token")
                )
                shown = f"{own['ms_per_token']:7.3f} ms a token, {ratio:.2f} x plain, CPU {of_cpu:.2f} x"
                yields = f"{own['tokens_a_verification']:.2f} tokens a verification (forced)"
                print(f"{num_seqs:4} {name:80} {shown}; {yields}", flush=True)
        del llm  # its memory is the next one's
        gc.collect()
    lengths = ", ".join(str(length) for _, length in wanted)
    what = f"acceptance is forced to {lengths} tokens a verification: random weights, nothing is said about real acceptance"
    common.save(args.output, "speculation_forced", label=what, settings=settings, runs=found)


def timed(llm: LLM, num_seqs: int, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a token of `num_seqs` sequences, without those of the first token."""
    prompts = [{"prompt_token_ids": list(range(7 * n + 5, 7 * n + 69))} for n in range(num_seqs)]
    times: dict[int, list[float]] = {1: [], args.max_tokens: []}
    cpu_times: dict[int, list[float]] = {1: [], args.max_tokens: []}
    before = llm.core.stats()
    for round_ in range(-2, args.rounds):  # the first compile what is left, and capture graphs
        for count, own in times.items():
            begin, cpu = time.perf_counter(), time.process_time()
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
            own += [time.perf_counter() - begin] * (round_ >= 0)
            cpu_times[count] += [time.process_time() - cpu] * (round_ >= 0)
    after = llm.core.stats()
    runs, right = (
        getattr(after, f"spec_{x}") - getattr(before, f"spec_{x}")
        for x in ("num_drafts", "accepted_tokens")
    )
    ms, cpu_ms = (
        1e3
        * (statistics.median(of[args.max_tokens]) - statistics.median(of[1]))
        / (args.max_tokens - 1)
        for of in (times, cpu_times)
    )
    yields = 1 + right / runs if runs else 1.0
    return {
        "ms_per_token": ms,
        "cpu_ms_per_token": cpu_ms,
        "tokens_a_verification": yields,
        "seconds": times,
    }


RECORD = "speculation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument(
        "--config", type=json.loads, action="append", help="a speculative_config; may be repeated"
    )
    parser.add_argument("--head", help="of EAGLE-3: fixed numbers of drafts, and as many as pay")
    parser.add_argument("--kinds", nargs="+", default=list(PROMPTS), choices=(*PROMPTS, "sharegpt"))
    parser.add_argument(
        "--num-seqs",
        type=int,
        nargs="+",
        default=[1],
        help="with --forced or --curve several, one after the other",
    )
    parser.add_argument(
        "--num-prompts", type=int, help="of each kind in a round; as many as sequences unless given"
    )
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--quantization")
    parser.add_argument(
        "--load-format", default="dummy", help="with --forced: auto takes the model's own weights"
    )
    parser.add_argument(
        "--forced",
        type=float,
        metavar="X",
        help="random weights; a verification is said to yield X tokens",
    )
    parser.add_argument(
        "--curve",
        type=float,
        nargs="+",
        metavar="X",
        help="like --forced, of the model's own layer: a verification of 1, 2, … drafts is said to yield "
        "X, … tokens; 0 leaves a number out",
    )
    parser.add_argument(
        "--op-by-op",
        action="store_true",
        help="with --forced: each config without graphs of its chains, too",
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    if args.forced is not None or args.curve:
        if (args.forced is None) != (not args.config):
            raise SystemExit(
                "--forced needs a --config, and with --curve each --config needs --forced"
            )
        forced(args)
        return
    if len(args.num_seqs) > 1:
        raise SystemExit("--num-seqs: several only with --forced or --curve")
    args.num_prompts = args.num_prompts or args.num_seqs[0]
    if args.head is not None:
        head = {"method": "eagle3", "model": args.head}
        args.config = [{**head, "num_speculative_tokens": n} for n in (1, 2, 3, 4, 5, "auto")]
    configs = [None, *(args.config or [{"method": "ngram"}, {"method": "suffix"}])]
    settings: dict[str, Any] = {
        "max_num_seqs": args.num_seqs[0],
        "max_model_len": 1024,
        "dtype": args.dtype,
    }
    settings |= {"num_threads": args.num_threads, "quantization": args.quantization}
    llms = [LLM(args.model, speculative_config=config, **settings) for config in configs]
    names = ["plain", *(json.dumps(config) for config in configs[1:])]
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {
        kind: {name: [] for name in names} for kind in args.kinds
    }
    load = os.getloadavg()[0]
    for round_ in range(-1, args.rounds):  # the first warms caches, and the tables of costs
        turns = list(zip(names, llms, strict=True))
        turns = turns[round_ % len(turns) :] + turns[: round_ % len(turns)]
        for kind in args.kinds:
            for name, llm in turns:
                found = answered(llm, kind, round_ + 1, args)
                if round_ >= 0:
                    runs[kind][name].append(found)
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for kind, of_kind in runs.items():
        ratios[kind] = {}
        for name in names[1:]:
            pairs = list(zip(of_kind["plain"], of_kind[name], strict=True))
            ratio = statistics.median(
                p["seconds"] / p["tokens"] * s["tokens"] / s["seconds"] for p, s in pairs
            )
            totals = [
                sum(r["cpu_seconds"] for r in of_kind[n]) / sum(r["tokens"] for r in of_kind[n])
                for n in ("plain", name)
            ]
            ratios[kind][name] = {"seconds": ratio, "cpu_seconds": totals[0] / totals[1]}
            drafted, accepted, steps = (
                sum(r[key] for r in of_kind[name]) for key in ("drafted", "accepted", "steps")
            )
            tokens = sum(r["tokens"] for r in of_kind[name])
            share = f"{accepted} of {drafted} guesses right, {tokens / steps:.2f} tokens a step"
            print(
                f"{kind:8} {name:60} {ratio:5.2f} x plain, CPU {totals[0] / totals[1]:.2f} x   ({share})"
            )
    loads = [load, os.getloadavg()[0]]
    save(settings=settings, load_average=loads, ratios=ratios, runs=runs)
