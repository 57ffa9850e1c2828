"""Names as vLLM's users write them: imports, parameters of vectors, times of a request."""

from __future__ import annotations

import logging

import pytest

import slipstream
from slipstream import LLM, EngineArgs, PoolingParams, SamplingParams, TextPrompt, TokensPrompt
from slipstream.config import resolver
from slipstream.errors import RequestError
from tests.support import tiny_models


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.write_with_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(path):
    args = EngineArgs(model=str(path), device="cpu", dtype="float32", max_model_len=64)
    return LLM.from_engine_args(args)


def test_prompts_and_times_have_vllms_names(llm):
    tokens = llm.generate("hello", progress=False)[0].prompt_token_ids
    prompts = [TextPrompt(prompt="hello"), TokensPrompt(prompt_token_ids=tokens)]
    sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    first, second = llm.generate(prompts, sampling, progress=False)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    metrics = first.metrics
    assert metrics.num_generation_tokens == 3
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.last_token_time
    assert metrics.finished_time == metrics.last_token_ts
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.arrival_time


def test_pooling_params_ask_as_the_arguments_do(llm):
    cut = PoolingParams(task="embed", truncate_prompt_tokens=-1)
    long = "hello " * 200
    own = llm.embed(long, truncate=True, progress=False)[0]
    assert llm.embed(long, pooling_params=cut, progress=False)[0].data == own.data
    assert (
        llm.encode(long, pooling_params=cut, progress=False)[0].data.tolist()
        == own.outputs.embedding
    )
    with pytest.raises(RequestError) as caught:
        llm.embed("a", pooling_params=PoolingParams(dimensions=3), progress=False)
    assert caught.value.field == "dimensions"
    for bad in ({"truncate_prompt_tokens": 5}, {"use_activation": False}):
        with pytest.raises(RequestError) as caught:
            PoolingParams(**bad)
        assert caught.value.field in bad


def test_vllms_other_names_are_ours_or_say_what_is():
    from slipstream import AsyncEngineArgs, EmbeddingRequestOutput, PromptType, ScoringOutput

    assert AsyncEngineArgs is EngineArgs
    assert PromptType is not None
    assert EmbeddingRequestOutput is slipstream.EmbeddingOutput
    assert ScoringOutput is slipstream.ScoreOutput
    with pytest.raises(ImportError, match=r"AsyncLLM\.start"):
        from slipstream import AsyncLLMEngine  # noqa: F401


def test_a_share_of_a_gpus_memory_is_said_to_have_no_effect_on_a_cpu(path, caplog):
    resolver._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "slipstream.config"):
        llm = LLM(str(path), device="cpu", max_model_len=64, gpu_memory_utilization=0.5)
    assert llm.generate("hello", SamplingParams(max_tokens=1), progress=False)
    said = [one.message for one in caplog.records if "gpu_memory_utilization" in one.message]
    assert len(said) == 1
    assert "kv_cache_bytes" in said[0]
