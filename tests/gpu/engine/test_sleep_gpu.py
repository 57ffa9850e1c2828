"""An engine that sleeps gives the GPU's memory back, and answers as before when it is awake.

Run: pytest -m gpu tests/gpu.
"""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.errors import SlipstreamError
from tests.support import tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CACHE_BYTES = (
    2**31
)  # far more than what a CUDA context or other tests beside this one take and give back
PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9]}


def free_bytes():
    return torch.cuda.mem_get_info()[0]


def test_level_two_gives_memory_back_and_answers_stay(tmp_path):
    tiny_models.write(
        tmp_path,
        "llama",
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(
        str(tmp_path), skip_tokenizer_init=True, max_model_len=128, kv_cache_bytes=CACHE_BYTES
    ) as llm:
        before = llm.generate([PROMPT], greedy)[0].outputs[0].token_ids
        for _ in range(2):
            awake = free_bytes()
            llm.sleep(2)
            assert llm.is_sleeping
            assert free_bytes() - awake > 0.9 * CACHE_BYTES
            llm.wake_up()
            assert llm.generate([PROMPT], greedy)[0].outputs[0].token_ids == before


def test_level_one_is_refused(tmp_path):
    tiny_models.write(
        tmp_path, "llama", hidden_size=256, num_attention_heads=4, num_key_value_heads=2
    )
    with LLM(
        str(tmp_path), skip_tokenizer_init=True, max_model_len=128, kv_cache_bytes=2**26
    ) as llm:
        with pytest.raises(SlipstreamError, match="level"):
            llm.sleep(1)
        assert not llm.is_sleeping
        llm.generate([PROMPT], SamplingParams(max_tokens=2))
