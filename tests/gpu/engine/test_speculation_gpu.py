"""Speculative decoding on a GPU: the answers of `deterministic` are the same, and steps with drafts run from graphs.

Run: pytest -m gpu tests/gpu.
"""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, SamplingParams
from tests.support import tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PROMPTS = [
    {"prompt_token_ids": [(7 * i * (j + 1)) % 50 + 4 for i in range(9 + 7 * j)]} for j in range(6)
]
SETTINGS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(
        temperature=0, max_tokens=60, ignore_eos=True, logit_bias={5: 100.0}
    ),  # one that repeats, on any device
    SamplingParams(
        temperature=0.5, top_p=0.9, seed=3, max_tokens=60, ignore_eos=True, repetition_penalty=1.1
    ),
]
SIZES = dict(
    max_model_len=192,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    kv_cache_bytes=2**26,
    skip_tokenizer_init=True,
)
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def answers(llm):
    return [
        [o.outputs[0].token_ids for o in llm.generate(PROMPTS, sampling)] for sampling in SETTINGS
    ]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft", "auto"])
def test_answers_are_the_same(tmp_path, method, eager):
    tiny_models.write(tmp_path, "llama", initializer_range=0.1, **SHAPE)
    config = {"method": method, "num_speculative_tokens": 4}
    if method == "auto":
        config = {"method": "suffix"}
    if method == "draft":
        config["model"] = str(tmp_path)
    sizes = {**SIZES, "deterministic": True, "enforce_eager": eager}
    with LLM(str(tmp_path), **sizes) as llm:
        expected = answers(llm)
    with LLM(str(tmp_path), speculative_config=config, **sizes) as llm:
        found, stats = answers(llm), llm.core.stats()
    assert found == expected
    assert stats.num_free_blocks == stats.num_blocks
    if method != "auto":
        assert stats.spec_accepted_tokens > 0


def test_drafts_run_from_graphs(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.worker.graphs.ladder.PATIENCE", 1)
    tiny_models.write(tmp_path, "llama", initializer_range=0.1, **SHAPE)
    with LLM(
        str(tmp_path), speculative_config={"method": "suffix", "num_speculative_tokens": 4}, **SIZES
    ) as llm:
        graphs = llm.core.executor.runner.graphs
        reasons = []
        covers = graphs.covers

        def asked(batch):
            reason = covers(batch)
            if batch.plan is not None:  # no graph's own capture
                reasons.append(reason)
            return reason

        graphs.covers = asked
        answers(llm)
        assert llm.core.stats().spec_draft_tokens > 0
    assert reasons
    assert not any(reasons)
