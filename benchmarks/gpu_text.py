"""Greedy text of a real model on the GPU against the same model on a CPU: how many answers are the same, and how far they go.

    python benchmarks/gpu_text.py reference REF.json [--model smollm2]           (on any machine)
    python benchmarks/gpu_text.py compare REF.json OUT.json [--model FILE]       (on the GPU)

50 prompts, 64 tokens each. The reference is the op set of that name on a CPU, in bfloat16 and in float32: what two roundings of
one model differ by is the yardstick for what a GPU may.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from slipstream import LLM, SamplingParams

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
ASKED = ("Explain {} in a few sentences.", "Write three questions about {} that a teacher could ask.")
SAMPLING = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def answers(model: str, prompts: list[list[int]], **settings: object) -> list[list[int]]:
    llm = LLM(model, skip_tokenizer_init=True, max_model_len=512, max_num_seqs=50, **settings)
    with llm:
        return [o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": p} for p in prompts], SAMPLING)]


def reference(args: argparse.Namespace) -> None:
    with LLM(args.model, max_model_len=512) as llm:
        chats = [[{"role": "user", "content": ask.format(s)}] for s in SUBJECTS for ask in ASKED]
        prompts = [o.prompt_token_ids for o in llm.chat(chats, SamplingParams(max_tokens=1))]
    made = {t: answers(args.model, prompts, kernels="reference", dtype=t) for t in ("bfloat16", "float32")}
    args.file.write_text(json.dumps({"prompts": prompts, **made}))
    print("bfloat16 against float32:", agreement(made["bfloat16"], made["float32"]))


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, float]:
    """Share of answers that are the same, and of tokens before the first that differs."""

    def common(x: list[int], y: list[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))

    same = [common(x, y) for x, y in zip(ours, theirs, strict=True)]
    return {"answers": sum(n == 64 for n in same) / len(same), "tokens": sum(same) / 64 / len(same)}


def compare(args: argparse.Namespace) -> None:
    held = json.loads(args.file.read_text())
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
        ours = answers(args.model, held["prompts"], device="cuda", **{"dtype": "bfloat16", **settings})
        result[name] = {f"against {t}": agreement(ours, held[t]) for t in ("bfloat16", "float32")}
        print(name, json.dumps(result[name]), flush=True)
    args.out.write_text(json.dumps(result, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("reference")
    make.set_defaults(run=reference)
    check = commands.add_parser("compare")
    check.set_defaults(run=compare)
    for p in (make, check):
        p.add_argument("file", type=Path)
        p.add_argument("--model", default="smollm2")
    check.add_argument("out", type=Path)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
