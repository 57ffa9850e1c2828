"""Layers on the host's CPU beside a GPU: the answers of the GPU alone.

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
    {"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]}
    for n in (1, 5, 16, 45, 100, 17, 33, 64)
]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gptj"])
def test_answers_are_those_of_the_gpu_alone(tmp_path, family):
    shapes = {
        "llama": dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2),
        "gemma3_text": dict(head_dim=64),
    }
    tiny_models.write(tmp_path, family, initializer_range=0.1, **shapes.get(family, {}))
    sizes = dict(
        dtype="float32",
        max_model_len=192,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_bytes=2**26,
    )
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = []
    for more in ({}, {"cpu_layers": 1}):
        with LLM(str(tmp_path), skip_tokenizer_init=True, device="cuda", **sizes, **more) as llm:
            for _ in range(2):  # the second time with all prompts in the cache
                found.append(
                    [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy, progress=False)]
                )
    for other in found[1:]:
        same = sum(
            a == b for x, y in zip(found[0], other, strict=True) for a, b in zip(x, y, strict=True)
        )
        assert same >= 0.95 * 24 * len(PROMPTS)  # a near tie may fall the other way
