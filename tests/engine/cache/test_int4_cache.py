"""The int4 cache through the whole engine: answers depend on nothing but the tokens before."""

from __future__ import annotations

import pytest

from slipstream import LLM, BeamSearchParams, SamplingParams
from slipstream.errors import ConfigError
from tests.engine.cache.test_window_groups import COMMON, PROMPTS, SETTINGS, answers
from tests.support import tiny_models

HEADS = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
INT4 = SETTINGS | dict(kernels="reference", kv_cache_dtype="int4")


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    tiny_models.write(path, request.param, initializer_range=0.1, **HEADS)
    return path


def test_hits_chunks_preemption_and_the_disk_change_no_answer(model, tmp_path):
    with LLM(str(model), **INT4 | dict(max_num_batched_tokens=512)) as llm:
        expected = answers(llm)
        block = llm.ledger.block_bytes
        caches = {x.k.data_ptr(): x for x in llm.core.executor.runner.kv}.values()
        assert block == sum(x.k[0].nbytes + x.v[0].nbytes for x in caches)
        assert answers(llm) == expected
        assert llm.stats().prefix_hits > 0
        num_groups = len(llm.config.cache.groups)
    few = dict(kv_cache_bytes=(16 + 24 * num_groups) * block, max_num_batched_tokens=16)
    with LLM(str(model), **INT4 | few) as llm:
        assert answers(llm) == expected
        assert llm.stats().num_preemptions > 0
    for _ in range(2):
        with LLM(str(model), **INT4, kv_disk_bytes=2**24, kv_disk_path=str(tmp_path)) as llm:
            assert answers(llm) == expected
            hits = llm.stats().tiers.disk_hit_tokens
    assert hits > 0


def test_beams_share_blocks(model):
    with LLM(str(model), **INT4) as llm:
        prompt = {"prompt_token_ids": COMMON}
        found = [
            llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=9))
            for _ in range(2)
        ]
        own = [[x.tokens for x in beams[0].sequences] for beams in found]
        assert own[0] == own[1]
        assert len({tuple(x) for x in own[0]}) == 3


@pytest.mark.slow
def test_two_ranks_have_folds_of_their_own(tmp_path):
    tiny_models.write(tmp_path, "llama", initializer_range=0.1, **HEADS)
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(**given):
        with LLM(str(tmp_path), **SETTINGS | given, kernels="reference") as llm:
            outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling)
            return [p.chosen.logprob for o in outputs for p in o.prompt_logprobs[1:]]

    exact, alone, ranks = (
        logprobs(**how)
        for how in (
            {},
            dict(kv_cache_dtype="int4"),
            dict(kv_cache_dtype="int4", tensor_parallel_size=2),
        )
    )
    changes = [
        sum(abs(a - b) for a, b in zip(x, exact, strict=True)) / len(exact) for x in (alone, ranks)
    ]
    assert all(1e-4 < change < 0.3 for change in changes)


@pytest.mark.parametrize(
    ("family", "sizes", "settings", "why"),
    [
        ("llama", HEADS, {"kernels": "auto"}, "needs a GPU"),
        ("llama", {}, {}, r"heads have \[8\] numbers"),
        ("deepseek_v3", {}, {}, "latent attention"),
    ],
)
def test_what_has_no_int4_cache_is_refused_by_name(tmp_path, family, sizes, settings, why):
    tiny_models.write(tmp_path, family, **sizes)
    with pytest.raises(ConfigError, match=why) as error:
        LLM(str(tmp_path), **INT4 | settings)
    assert error.value.field == "kv_cache_dtype"
