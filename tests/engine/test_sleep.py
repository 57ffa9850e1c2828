"""An LLM that gives its memory back for a while."""

from __future__ import annotations

import gc
import weakref

import pytest

from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.errors import RequestError
from tests.support import tiny_models

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SIZES = dict(device="cpu", dtype="float32", max_model_len=64, kv_cache_bytes=2**20, num_threads=1)


def held(llm):
    """Weak references to the cache's tensors, and to the model."""
    runner = llm.core.executor.runner
    return weakref.ref(runner.kv[0].k), weakref.ref(runner.model.decoder)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_and_taken_again(tmp_path, level, kernels):
    tiny_models.write_with_tokenizer(tmp_path)
    with LLM(str(tmp_path), kernels=kernels, **SIZES) as llm:
        before = llm.generate("hello", GREEDY, progress=False)[0].outputs[0].token_ids
        cache, model = held(llm)
        blocks = llm.ledger.num_blocks
        assert not llm.is_sleeping
        llm.sleep(level)
        gc.collect()
        assert llm.is_sleeping
        assert cache() is None
        assert (model() is None) == (level == 2)
        with pytest.raises(RequestError, match="wake_up"):
            llm.generate("hello", GREEDY, progress=False)
        with pytest.raises(RequestError, match="wake_up"):
            llm.sleep(level)
        llm.wake_up()
        assert llm.ledger.num_blocks == blocks
        again = llm.generate("hello", GREEDY, progress=False)[0]
        assert again.outputs[0].token_ids == before
        assert again.num_cached_tokens == 0
        llm.wake_up()  # it is awake
        llm.sleep(3 - level)  # the other one, after the first
        llm.wake_up(tags=["weights", "kv_cache"])
        assert llm.generate("hello", GREEDY, progress=False)[0].outputs[0].token_ids == before
    with pytest.raises(RequestError, match="make a new one"):
        llm.generate("hello", GREEDY, progress=False)


@pytest.mark.parametrize("level", [1, 2])
def test_a_draft_model_and_grammars_wake_up_too(tmp_path, level):
    tiny_models.write_with_tokenizer(tmp_path)
    drafts = {"method": "draft", "model": str(tmp_path), "num_speculative_tokens": 2}
    grammar = SamplingParams(
        temperature=0, structured_outputs=StructuredOutputsParams(regex="[ab]{3}")
    )
    with LLM(str(tmp_path), speculative_config=drafts, **SIZES) as llm:
        before = [
            llm.generate("hello", s, progress=False)[0].outputs[0].token_ids
            for s in (GREEDY, grammar)
        ]
        cache = weakref.ref(llm.core.executor.runner.draft.kv[0].k)
        llm.sleep(level)
        assert cache() is None
        llm.wake_up()
        again = [
            llm.generate("hello", s, progress=False)[0].outputs[0].token_ids
            for s in (GREEDY, grammar)
        ]
        assert again == before
        assert llm.core.stats().spec_accepted_tokens > 0


def test_an_encoder_sleeps(tiny_encoder):
    with LLM(str(tiny_encoder), device="cpu", dtype="float32", num_threads=1) as llm:
        before = llm.embed("A man is eating.", progress=False)[0].embedding
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert llm.embed("A man is eating.", progress=False)[0].embedding == before


def test_what_cannot_be_had(tmp_path):
    tiny_models.write_with_tokenizer(tmp_path)
    with LLM(str(tmp_path), **SIZES) as llm:
        with pytest.raises(RequestError, match="level"):
            llm.sleep(3)
        stream = llm.stream("hello", GREEDY)
        next(stream)
        with pytest.raises(RequestError, match="in the middle of a stream"):
            llm.sleep()
        stream.close()
        llm.sleep()
        with pytest.raises(RequestError, match="tags"):
            llm.wake_up(tags=["weights"])
