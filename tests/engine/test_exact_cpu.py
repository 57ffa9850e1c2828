"""Answers of the C++ kernels with drafts, in chunks, after prefix hits and in batches: those of each request alone in one
chunk, with the same log-probabilities bit for bit."""

from __future__ import annotations

import pytest

from slipstream import LLM, SamplingParams
from slipstream.kernels.cpu.native import instruction_sets, without_tiles
from tests.engine.drafts.test_speculation import Told
from tests.support import tiny_models

SIZES = dict(
    device="cpu",
    max_model_len=96,
    max_num_seqs=8,
    block_size=16,
    kv_cache_bytes=2**21,
    skip_tokenizer_init=True,
    kernels="cpu",
    # Matrix tiles (AMX) sum in another order for many tokens; all else sums so by default.
    deterministic=without_tiles(None) != instruction_sets()[-1],
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
WIDE = dict(hidden_size=64, head_dim=32)
CASES = {
    "llama-f32": ("llama", WIDE, {}),
    "llama-bf16": ("llama", WIDE, {"dtype": "bfloat16"}),
    "llama-int8-cache": ("llama", WIDE, {"kv_cache_dtype": "int8", "quantization": "int8"}),
    "llama-int4": (
        "llama",
        dict(hidden_size=128, intermediate_size=256, head_dim=32),
        {"quantization": "int4"},
    ),
    "heads-of-8": ("llama", {}, {}),
    "windows": ("gemma3_text", dict(head_dim=32), {"dtype": "bfloat16"}),
    "soft-caps": ("gemma2", dict(head_dim=32), {}),
    "sinks": ("gpt_oss", dict(head_dim=32), {}),
    "slopes": ("bloom", dict(hidden_size=64), {}),
    "experts": ("qwen3_moe", {}, {"quantization": "int8"}),
    "latents": ("deepseek_v3", {}, {}),
    "gated-delta": ("qwen3_next", {}, {}),
    "ssd": ("bamba", {}, {}),
    "scan": ("mamba", {}, {}),
    "short-convolutions": ("lfm2", {}, {}),
}
WAYS = {
    "batch": {},
    "drafts": {"speculative_config": NGRAM},
    "chunks of 5": {"max_num_batched_tokens": 5, "max_num_mixed_tokens": 5, "max_num_seqs": 3},
    "chunks of 17, drafts": {
        "max_num_batched_tokens": 17,
        "max_num_mixed_tokens": 17,
        "speculative_config": NGRAM,
        "num_threads": 2,
    },
}
PROMPTS = [
    {"prompt_token_ids": [5 + i, *([20, 30, 40, 20, 30, 50] * 8)[: 7 * i + 3]]} for i in range(6)
]
SAMPLING = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)


def answers(llm, prompts):
    return [
        (o.outputs[0].token_ids, [p.chosen.logprob for p in o.outputs[0].logprobs])
        for o in llm.generate(prompts, SAMPLING, progress=False)
    ]


@pytest.mark.parametrize("case", CASES)
def test_answers_do_not_depend_on_what_is_computed_together(tmp_path, monkeypatch, case):
    """Drafts are right but for every fifth token."""
    family, overrides, settings = CASES[case]
    tiny_models.write(tmp_path, family, **overrides)
    sizes = {**SIZES, "dtype": "float32", **settings}
    with LLM(str(tmp_path), num_threads=1, enable_prefix_caching=False, **sizes) as llm:
        expected = [answers(llm, [p])[0] for p in PROMPTS]
    told = {tuple(p["prompt_token_ids"]): e[0] for p, e in zip(PROMPTS, expected, strict=True)}
    monkeypatch.setattr(Told, "answers", told)
    monkeypatch.setattr("slipstream.core.participants.speculation.LookUp", Told)
    for way, more in WAYS.items():
        with LLM(str(tmp_path), **{**sizes, **more}) as llm:
            assert answers(llm, PROMPTS) == expected, way
            assert answers(llm, PROMPTS) == expected, f"{way}, prefix hits"
            assert "speculative_config" not in more or llm.core.stats().spec_accepted_tokens > 0
