"""Cost of a grammar: the time a token of a batch with and without JSON schemas, and the time until
a new schema has its mask.

    python benchmarks/features.py --study grammar --device cpu --num-requests 8
    python benchmarks/features.py --study grammar --model benchmarks/configs/llama-3-8b --load-format dummy --made-vocabulary
    python benchmarks/features.py --study grammar --masks-only --steps 200

Requests with random prompts draw at temperature 1 and end at `--tokens`: with a schema whose answers are never complete, and
without one. Both take turns; medians over the rounds. `--made-vocabulary` makes a tokenizer as large as the model's
vocabulary, for a model that is only a config.

`--masks-only` runs no model: a step takes its masks, and each sequence then any token that is allowed. The time is that
of the masks alone, for which a GPU's step may have to wait; `--model` says how large the made vocabulary is.

The first mask: schemas of `--properties` properties, each asked for once, from the request for its grammar to its mask.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import string
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.bench.report import print_table
from slipstream.config import EngineArgs
from slipstream.engine.grammars.grammar import Grammars
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.hub import resolve_model
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import ScheduledRequest, StepPlan
from slipstream.spec.description import read_spec


def schema(rng: random.Random, num_properties: int) -> dict[str, Any]:
    kinds = (
        {"type": "string", "maxLength": 40},
        {"type": "integer", "minimum": 0},
        {"enum": ["red", "green", "blue"]},
    )
    names = ["".join(rng.choices(string.ascii_lowercase, k=8)) for _ in range(num_properties)]
    properties = {name: rng.choice(kinds) for name in names}
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


def made_tokenizer(folder: Path, size: int) -> None:
    """Bytes, and made-up words with and without a space before them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    rng, alphabet = random.Random(0), string.ascii_letters + string.digits + '{}[]":,._- '
    words = dict.fromkeys(["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    while len(words) < size:
        words["".join(rng.choices(alphabet, k=rng.randint(2, 9))).replace(" ", "Ġ")] = None
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}'
    )


def first_masks(llm: LLM, num_properties: int, count: int) -> list[float]:
    """Seconds of each of `count` new schemas, once the vocabulary is made."""
    grammars, rng, found = llm.core.grammars, random.Random(1), []
    for i in range(count + 1):
        params = StructuredOutputsParams(json=schema(rng, num_properties))
        sampling = SamplingParams(structured_outputs=params)
        begin = time.perf_counter()
        grammars.begin(
            EngineRequest(
                request_id="first", prompt_token_ids=(1,), sampling=sampling, max_tokens=9
            )
        )
        while grammars.is_compiling:
            time.sleep(0.0002)
            grammars.compiled()
        grammars.masks(StepPlan(step_id=1, scheduled=(ScheduledRequest("first", 1, 1, 1),)))
        if i:
            found.append(time.perf_counter() - begin)
        grammars.forget(["first"])
    return sorted(found)


def mask_times(
    grammars: Grammars, params: StructuredOutputsParams, count: int, steps: int
) -> dict[str, list[float]]:
    """Milliseconds of the masks of each step of `count` sequences that draw from them, and of taking in what was drawn."""
    import numpy as np

    rng, names = np.random.default_rng(0), [str(i) for i in range(count)]
    sampling = SamplingParams(structured_outputs=params)
    for name in names:
        grammars.begin(
            EngineRequest(request_id=name, prompt_token_ids=(1,), sampling=sampling, max_tokens=9)
        )
    while grammars.is_compiling:
        time.sleep(0.01)
        grammars.compiled()
    plan = StepPlan(step_id=1, scheduled=tuple(ScheduledRequest(name, 1, 1, 1) for name in names))
    found: dict[str, list[float]] = {
        "masks": [],
        "masks, CPU time of all threads": [],
        "accept": [],
    }
    for _ in range(steps):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        mask, ended = grammars.masks(plan)
        found["masks"].append((time.perf_counter() - begin) * 1e3)
        found["masks, CPU time of all threads"].append((time.process_time() - begin_cpu) * 1e3)
        assert not ended, ended
        bits = np.unpackbits(
            np.frombuffer(mask.bits, np.uint8).reshape(count, -1), axis=1, bitorder="little"
        )
        drawn = [int(rng.choice(np.flatnonzero(row))) for row in bits]
        begin = time.perf_counter()
        for name, token in zip(names, drawn, strict=True):
            grammars.accept(name, [token])
        for name in names:  # what the scheduler asks
            if forced := grammars.forced(name, 0):
                grammars.accept(name, forced)
        found["accept"].append((time.perf_counter() - begin) * 1e3)
    grammars.forget(names)
    return found


def masks_only(args: argparse.Namespace, vocab: int) -> None:
    folder = tempfile.TemporaryDirectory()
    made_tokenizer(Path(folder.name), vocab)
    tokenizer = Tokenizer.from_pretrained(folder.name)
    grammars = Grammars(lambda: tokenizer, vocab, lambda given: given.eos_token_ids)
    params = endless(args.properties)
    mask_times(grammars, params, args.num_requests, 8)  # makes the vocabulary
    found = {
        name: sorted(ms)
        for name, ms in mask_times(grammars, params, args.num_requests, args.steps).items()
    }
    rows = [
        (name, *(f"{ms[int(len(ms) * part)]:.3f}" for part in (0.5, 0.9, 0.99)))
        for name, ms in found.items()
    ]
    print_table(
        f"{args.num_requests} sequences, {vocab:,} tokens",
        ("ms a step", "median", "90 %", "99 %"),
        rows,
    )
    common.save(args.output, "structured_masks", workload=vars(args), ms=found)


def endless(num_properties: int) -> StructuredOutputsParams:
    one = schema(random.Random(0), num_properties)
    return StructuredOutputsParams(json={"type": "array", "items": one, "minItems": 10_000})


RECORD = "structured"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--made-vocabulary", action="store_true")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--properties", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--masks-only", action="store_true")
    parser.add_argument("--steps", type=int, default=200, help="with --masks-only")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    vocab = read_spec(resolve_model(args.model)).spec.vocab_size
    if args.masks_only:
        if args.output == common.RESULTS / "structured.json":
            args.output = args.output.with_name("structured_masks.json")
        masks_only(args, vocab)
        return
    folder = tempfile.TemporaryDirectory()
    if args.made_vocabulary:
        made_tokenizer(Path(folder.name), vocab)
    more = {"tokenizer": folder.name} if args.made_vocabulary else {}
    fields = dict(
        device=args.device,
        dtype=args.dtype,
        load_format=args.load_format,
        max_num_seqs=args.num_requests,
    )
    llm = LLM.from_engine_args(EngineArgs(model=args.model, max_model_len=2048, **fields, **more))
    plain = SamplingParams(max_tokens=args.tokens, ignore_eos=True, seed=0)
    kinds = {
        "without": plain,
        "with": dataclasses.replace(plain, structured_outputs=endless(args.properties)),
    }
    given = common.prompts([args.prompt_len] * args.num_requests, vocab)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    masks, compute = [], llm.core.grammars.masks

    def timed(*plan: Any) -> Any:
        begin = time.perf_counter()
        found = compute(*plan)
        masks.append((time.perf_counter() - begin) * 1e3)
        return found

    llm.core.grammars.masks = timed  # type: ignore[method-assign]
    for round_ in range(args.rounds + 1):  # the first warms up
        for kind, sampling in kinds.items():
            begin = time.perf_counter()
            answers = llm.generate(given, sampling, progress=False)
            took = time.perf_counter() - begin
            assert all(len(a.outputs[0].token_ids) == args.tokens for a in answers)
            if round_:
                seconds[kind].append(took)
            else:
                masks.clear()
    llm.core.grammars.masks = compute  # type: ignore[method-assign]
    masks.sort()
    first = first_masks(llm, args.properties, 200)
    steps = {kind: common.median(each) / args.tokens * 1e3 for kind, each in seconds.items()}
    rows = [(kind, f"{ms:.3f}", f"{ms / steps['without']:.3f} ×") for kind, ms in steps.items()]
    print_table(
        f"{args.num_requests} sequences, {vocab:,} tokens",
        ("schemas", "ms a token", "beside without"),
        rows,
    )
    p50, p99 = first[len(first) // 2] * 1e3, first[int(len(first) * 0.99)] * 1e3
    of_step = {f"p{part}": masks[len(masks) * part // 100] for part in (50, 90, 99)}
    print("masks of a step, ms: " + ", ".join(f"{name} {ms:.2f}" for name, ms in of_step.items()))
    print(f"first mask of a new schema: median {p50:.2f} ms, 99th percentile {p99:.2f} ms")
    results = {
        "ms_per_token": steps,
        "ratio": steps["with"] / steps["without"],
        "first_mask_ms": {"p50": p50, "p99": p99},
    }
    results["masks_ms"] = of_step
    save(workload=vars(args), seconds=seconds, results=results)
