"""The tiers below a GPU's cache: copies on a stream of their own, and answers that are the same from every tier.

Run: pytest -m gpu tests/gpu.
"""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.platform import gpu_platform
from tests.support import tiny_models
from tests.worker.test_disk_tier import check_device_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("odd", [False, True])
def test_copies_beside_the_steps(tmp_path, odd):
    from slipstream.kernels.triton import (
        TritonOps,
    )  # not before the other tests have said that it is to be interpreted

    check_device_blocks(tmp_path, gpu_platform(0), TritonOps(), odd)


@pytest.mark.parametrize("disk", [False, True])
def test_answers_from_host_and_disk(tmp_path, disk):
    tiny_models.write(
        tmp_path / "model", "llama", hidden_size=256, num_attention_heads=4, num_key_value_heads=2
    )
    tiers = {"kv_host_bytes": 2**26}
    if disk:
        tiers |= {"kv_disk_bytes": 2**28, "kv_disk_path": str(tmp_path / "kv")}
    settings = dict(
        device="cuda",
        max_model_len=256,
        deterministic=True,
        skip_tokenizer_init=True,
        kv_cache_bytes=2**22,
    )
    prompts = [
        {"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]} for n in (45, 100, 130, 200)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def answers(llm):
        return [a.outputs[0].token_ids for a in llm.generate(prompts, sampling, progress=False)]

    with LLM(str(tmp_path / "model"), **settings) as llm:
        expected = answers(llm)
    with LLM(str(tmp_path / "model"), **settings, **tiers) as llm:
        assert answers(llm) == expected
        llm.core.flush()
        llm.core.scheduler.pool.forget_all()
        assert answers(llm) == expected
        assert llm.stats().tiers.host_hit_tokens > 0
    if disk:
        with LLM(str(tmp_path / "model"), **settings, **tiers) as llm:
            assert answers(llm) == expected
            assert llm.stats().tiers.disk_hit_tokens > 0
