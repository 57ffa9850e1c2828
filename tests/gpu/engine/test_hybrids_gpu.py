"""Recurrent layers in an engine on a GPU: graphs, chunks, a prefix cache and drafts give the tokens of the eager loop."""

from __future__ import annotations

import json
import random

import pytest

from slipstream import LLM, SamplingParams

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1024,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}
SETTINGS = dict(
    load_format="dummy",
    dtype="float32",
    skip_tokenizer_init=True,
    max_model_len=2048,
    max_num_seqs=16,
    seed=3,
    kv_cache_bytes=2**30,
)
LENGTHS = (5, 17, 64, 65, 130, 300, 700, 33, 90, 1000)


def answers(folder, **more):
    """Answers of a cold engine and of the same prompts again, and the numbers of cached tokens then."""
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(4096) for _ in range(n)]} for n in LENGTHS]
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(str(folder), **{**SETTINGS, **more}) as llm:
        first, again = llm.generate(prompts, greedy), llm.generate(prompts, greedy)
    texts = [[o.outputs[0].token_ids for o in outputs] for outputs in (first, again)]
    return *texts, [o.num_cached_tokens for o in again]


def test_every_way_of_running_gives_the_same_tokens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plain, _, cached = answers(tmp_path, enforce_eager=True, enable_prefix_caching=False)
    assert not any(cached)
    for more in (
        {},
        {"max_num_batched_tokens": 128},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    ):
        first, again, cached = answers(tmp_path, **more)
        assert first == plain, more
        assert again == plain, more
        assert cached[3:] == [48, 128, 288, 688, 16, 80, 992]
