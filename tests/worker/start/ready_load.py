"""A load with every option of requests, which notes the kernels that it meets after the start.

    python -m tests.worker.start.ready_load MODEL SETTINGS DEVICE

prints one line of JSON. On a GPU ("cuda"): the kernels that the start's steps met without their having been prepared, those
that the load met first, and seconds of the start's phases. On a described GPU ("meta:90"), where nothing runs: the number of
kernels that were found before, and those that the start or the load launched beyond them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream import LLM, SamplingParams
from slipstream.config import EngineArgs
from slipstream.params.answer_forms import StructuredOutputsParams
from tests.gpu.engine.test_engine_gpu import SHAPES

LIMITS = {"max_num_batched_tokens": 2048, "kv_cache_bytes": 2**28}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"speculative_model": "ngram", "num_speculative_tokens": 3}),
    ("llama", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    ("llama", {"quantization": "int8", "kv_cache_dtype": "int8"}),
    ("llama", {"quantization": "int4-g32"}),
    ("llama", {"enforce_eager": True}),
    ("qwen3_moe", {}),
    ("gpt_oss", {}),
    ("deepseek_v3", {}),
    ("gemma3_text", {}),
    ("qwen3_next", {}),
    ("nemotron_h", {}),
    ("mamba", {}),
    ("gpt2", {}),
)
"""Families with their settings."""

NUMBERS = (1, 2, 3, 4, 5, 8, 11, 16, 17, 31, 33, 48, 63, 64, 65, 80, 100, 129, 200, 300)
"""Requests at once."""
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 33, 64, 100, 128, 200)


def shape_of(family: str) -> dict[str, Any]:
    """Sizes of a family's tiny model, of a Llama with a longer context."""
    return {
        **SHAPES.get(family, {}),
        **({"max_position_embeddings": 4096} if family == "llama" else {}),
    }


def name_of(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join((case[0], *(f"{k}={v}" for k, v in case[1].items())))


def ways(*, grammars: bool) -> Iterator[SamplingParams]:
    for cut in ({}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.5}):
        yield SamplingParams(temperature=0.8, max_tokens=9, **cut)
        yield SamplingParams(temperature=0.6, max_tokens=5, presence_penalty=0.3, **cut)
    yield SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    yield SamplingParams(temperature=0, max_tokens=6, repetition_penalty=1.2, frequency_penalty=0.1)
    yield SamplingParams(temperature=0.7, max_tokens=5, logit_bias={5: 1.0}, min_tokens=3)
    yield SamplingParams(temperature=0.7, max_tokens=5, allowed_token_ids=[3, 4, 5])
    yield SamplingParams(temperature=0.7, max_tokens=5, top_k=4, min_p=0.1, seed=3)
    for n in (0, 1, 4, 5, 13, 20):
        yield SamplingParams(temperature=0, max_tokens=5, logprobs=n)
        yield SamplingParams(temperature=0.5, top_p=0.9, max_tokens=3, prompt_logprobs=n)
    if grammars:
        yield SamplingParams(
            temperature=0.8,
            max_tokens=6,
            structured_outputs=StructuredOutputsParams(regex="[a-z ]{4,}"),
        )


def run_load(llm: LLM, *, grammars: bool = False) -> None:
    """Few and many requests; short, long and repeated prompts; every way to sample, alone and mixed. Grammars need a
    tokenizer, and tokens that are really drawn."""
    draws = random.Random(0)
    every, longest = list(ways(grammars=grammars)), llm.config.model.max_model_len - 16

    def prompt(length: int) -> dict[str, list[int]]:
        length = min(length, longest)
        if draws.random() < 0.3:  # repeats itself, and others
            return {"prompt_token_ids": [5 + i % 4 for i in range(length)]}
        return {"prompt_token_ids": [draws.randrange(2, 250) for _ in range(length)]}

    for number in NUMBERS:
        for mixed in (False, True):
            one = draws.choice(every)
            prompts = [prompt(draws.choice(LENGTHS)) for _ in range(number)]
            llm.generate(prompts, [draws.choice(every) if mixed else one for _ in prompts])
    for way in every:
        llm.generate([prompt(20)], way)
        llm.generate([prompt(20) for _ in range(3)], way)
    for length in (longest, longest // 2, longest // 3):
        llm.generate([prompt(length)], every[0])
        llm.generate([prompt(n) for n in (length, length, 3, 7)], every[10])
    while llm.core.executor.capture_next():
        pass
    llm.generate([prompt(n) for n in LENGTHS], every[10])


def main(model: str, settings: str, device: str) -> None:
    print(json.dumps((on_gpu if device == "cuda" else on_described_gpu)(model, settings, device)))


def on_described_gpu(model: str, settings: str, device: str) -> dict[str, Any]:
    from slipstream.kernels.triton.variants import recording
    from slipstream.worker.start.kernel_variants import find_kernels

    given = {**LIMITS, **json.loads(settings)}
    capability = divmod(int(device.removeprefix("meta:")), 10)
    found = find_kernels(EngineArgs(model=model, **given), capability)
    with recording(capability) as launched:
        llm = LLM(model, device=device, load_format="dummy", skip_tokenizer_init=True, **given)
        llm.core.warm(0.0)
        run_load(llm)
    late = sorted(f"{v.name} {v.key}" for v in launched - found.variants)
    return {"num_found": len(found.variants), "num_launched": len(launched), "late": late}


def on_gpu(model: str, settings: str, device: str) -> dict[str, Any]:
    from slipstream.kernels.triton.variants import noting_new_kernels

    given: dict[str, Any] = {**LIMITS, **json.loads(settings)}
    has_tokenizer = (Path(model) / "tokenizer.json").exists()
    args = EngineArgs(model=model, device=device, skip_tokenizer_init=not has_tokenizer, **given)
    marks: dict[str, int] = {}
    with noting_new_kernels() as met:
        llm = LLM.from_engine_args(args, progress=lambda phase: marks.update({phase: len(met)}))
        llm.core.warm(0.0)
        ready = len(met)
        run_load(llm, grammars=has_tokenizer)
    said = {"late": met[ready:], "met_by_start": met[marks["cache"] : ready], "phases": llm.phases}
    return {**said, "num_prepared": marks["cache"]}


if __name__ == "__main__":
    main(*sys.argv[1:])
