"""Loss of quality by schemes, 8-bit caches and a GPU's kernels.

    python benchmarks/compression.py --study fidelity [--text FILE] [--windows 16]
    python benchmarks/compression.py --study fidelity --measure reference --reference REF.json    # on any machine
    python benchmarks/compression.py --study fidelity --measure answers --reference REF.json  # on a GPU: fidelity_answers.json

Schemes: perplexity, KL divergence and agreement on real conversations; `slipstream eval` for a list of cases. The yardstick
is the model in float32. The reference kernels run, which carry out a scheme exactly as it is defined.

Answers: 50 prompts, 64 greedy tokens each, on a GPU and by the reference kernels on a CPU in bfloat16 and float32. Printed is
how many answers are the same, and how far they go. Once two texts differ in a token they go on differently. So the share of
the reference's tokens that the model finds likeliest, given the reference's text so far, is printed too. What the two
roundings of the reference differ by is the yardstick for a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import common

from slipstream import LLM, SamplingParams
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


def schemes(args: argparse.Namespace) -> None:
    text = TextSettings(source=args.text, num_windows=args.windows)
    settings = EngineArgs(model=args.model, device="cpu", kernels="reference", dtype="float32")
    yardstick = Scorer.load(settings, context=text.context)
    windows = read_windows(text, yardstick.tokenizer)
    results, rows = {}, []
    for name in args.cases:
        given = CASES[name]
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
    print_table(
        f"{args.model} on {args.text}, the {text.part} part: {num_tokens:,} tokens scored",
        COLUMNS,
        rows,
    )
    common.save(
        args.output,
        "fidelity",
        settings={"model": args.model, "text": text, "num_tokens": num_tokens},
        results=results,
    )


# --- Answers of a GPU --------------------------------------------------------------------------------------------------

SUBJECTS = """the sea
photosynthesis
prime numbers
copper
Hamlet
boiling an egg
the sky's colour
weather and climate
pancakes
earthquakes
Cinderella
leap years
HTTP
Jupiter
Lisbon
inflation
a bicycle's gears
volcanoes
the printing press
honey bees
compound interest
tides
the Roman Empire
vaccines
chess""".splitlines()
ASKED = (
    "Explain {} in a few sentences.",
    "Write three questions about {} that a teacher could ask.",
)
SAMPLING = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def answers(model: str, prompts: list[list[int]], **settings: object) -> list[list[int]]:
    llm = LLM(model, skip_tokenizer_init=True, max_model_len=512, max_num_seqs=50, **settings)
    with llm:
        return [
            o.outputs[0].token_ids
            for o in llm.generate([{"prompt_token_ids": p} for p in prompts], SAMPLING)
        ]


def answers_reference(args: argparse.Namespace) -> None:
    with LLM(args.model, max_model_len=512) as llm:
        chats = [[{"role": "user", "content": ask.format(s)}] for s in SUBJECTS for ask in ASKED]
        prompts = [o.prompt_token_ids for o in llm.chat(chats, SamplingParams(max_tokens=1))]
    made = {
        t: answers(args.model, prompts, kernels="reference", dtype=t)
        for t in ("bfloat16", "float32")
    }
    args.reference.write_text(json.dumps({"prompts": prompts, **made}))
    exact = likeliest(args.model, prompts, made["float32"], kernels="reference", dtype="bfloat16")
    print(
        "bfloat16 against float32:",
        agreement(made["bfloat16"], made["float32"]),
        "given its text:",
        exact,
    )


def likeliest(
    model: str, prompts: list[list[int]], texts: list[list[int]], **settings: object
) -> float:
    """Share of the texts' tokens that the model finds the likeliest, given what stands before them."""
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(
        model, skip_tokenizer_init=True, max_model_len=512, max_num_seqs=50, **settings
    ) as llm:
        asked = [{"prompt_token_ids": p + t} for p, t in zip(prompts, texts, strict=True)]
        ranks = [
            e.chosen.rank for o in llm.generate(asked, sampling) for e in o.prompt_logprobs[-64:]
        ]
    return sum(r == 1 for r in ranks) / len(ranks)


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, float]:
    """Share of answers that are the same, and of tokens before the first that differs."""

    def common(x: list[int], y: list[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))

    same = [common(x, y) for x, y in zip(ours, theirs, strict=True)]
    return {"answers": sum(n == 64 for n in same) / len(same), "tokens": sum(same) / 64 / len(same)}


def answers_compare(args: argparse.Namespace) -> None:
    held = json.loads(args.reference.read_text())
    result = {}
    for name, settings in {
        "bfloat16": {},
        "bfloat16, deterministic": {"deterministic": True},
        "float32": {"dtype": "float32"},
        "fp8": {"quantization": "fp8"},
        "int8": {"quantization": "int8"},
        "int4-g32": {"quantization": "int4-g32"},
        "fp8 cache": {"kv_cache_dtype": "fp8"},
    }.items():
        chosen = {"device": "cuda", "dtype": "bfloat16", **settings}
        ours = answers(args.model, held["prompts"], **chosen)
        result[name] = {f"against {t}": agreement(ours, held[t]) for t in ("bfloat16", "float32")}
        for t in ("bfloat16", "float32"):
            result[name][f"likeliest given {t}"] = likeliest(
                args.model, held["prompts"], held[t], **chosen
            )
        print(name, json.dumps(result[name]), flush=True)
    if args.output == common.RESULTS / "fidelity.json":
        args.output = args.output.with_name("fidelity_answers.json")
    common.save(args.output, "fidelity_answers", model=args.model, results=result)


RECORD = "fidelity"
MEASURES = {"schemes": schemes, "reference": answers_reference, "answers": answers_compare}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measure", choices=tuple(MEASURES), default="schemes")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default=DEFAULT_TEXT, help="schemes")
    parser.add_argument(
        "--windows", type=int, default=16, help="schemes: of the text (default: 16)"
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=list(CASES),
        choices=list(CASES),
        metavar="NAME",
        help="schemes",
    )
    parser.add_argument(
        "--reference", type=Path, help="reference: the file to write; answers: the file to read"
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    if args.measure != "schemes" and args.reference is None:
        raise SystemExit(f"--measure {args.measure} needs --reference FILE")
    MEASURES[args.measure](args)
