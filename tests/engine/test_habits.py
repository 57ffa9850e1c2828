"""What vLLM's users write."""

from __future__ import annotations

import pytest

from slipstream import LLM, SamplingParams
from slipstream.errors import RequestError
from tests import tiny_models


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.build_with_tokenizer(path)
    with LLM(str(path), device="cpu", max_model_len=64, kv_cache_bytes=2**20) as llm:
        yield llm


def test_prompts_by_vllms_names(llm):
    greedy = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
    plain = llm.generate("hello", greedy, progress=False)[0]
    ids = plain.prompt_token_ids
    for asked in (
        llm.generate({"prompt": "hello"}, greedy, use_tqdm=False),
        llm.generate(prompt_token_ids=ids, sampling_params=greedy, use_tqdm=False),
        llm.generate(prompt_token_ids=[ids], sampling_params=greedy, use_tqdm=True),
    ):
        assert [one.outputs[0].token_ids for one in asked] == [plain.outputs[0].token_ids]
    for wrong in ({}, {"prompts": "a", "prompt_token_ids": [1]}):
        with pytest.raises(RequestError, match="either prompts or prompt_token_ids"):
            llm.generate(**wrong, sampling_params=greedy)


def test_log_probabilities_by_token(llm):
    answer = llm.generate("hello", SamplingParams(temperature=0, max_tokens=2, logprobs=2), progress=False)[0].outputs[0]
    for token, position in zip(answer.token_ids, answer.logprobs, strict=True):
        assert position[token].logprob == position.chosen.logprob
        assert token in position
        assert next(iter(position)) == token
        with pytest.raises(KeyError):
            position[10**6]
