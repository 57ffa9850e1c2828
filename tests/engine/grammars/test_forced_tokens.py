"""Tokens that a grammar forces are computed with the one before them. Answers are those without; so are they with guesses."""

from __future__ import annotations

import dataclasses
import json

import jsonschema
import numpy as np
import pytest

from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.core.participants.forced_tokens import ForcedTokens
from slipstream.worker.model_runner import InFlightStep, ModelRunner
from tests.engine.grammars.test_structured import make
from tests.support import tiny_models

SCHEMA = {
    "type": "object",
    "properties": {
        "first_name_of_the_person": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a long description of one kind", "another"]},
        "constant": {"const": {"hello there": [1, 2, 3], "version of the format": 12}},
    },
    "required": ["first_name_of_the_person", "kind", "constant"],
    "additionalProperties": False,
}
PARAMS = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
PROMPTS = ["hello", "the other in the hour", "a"]
BASE = SamplingParams(max_tokens=None, seed=0, structured_outputs=PARAMS)
SETTINGS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 2.0},
    "several": {"n": 3},
    "penalised": {"repetition_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": {70: 5.0}},
    **{f"cut at {n}": {"max_tokens": n} for n in (1, 2, 3, 5, 8, 13, 30)},
    "stopped in a forced text": {"stop": "of the per"},
    "stopped by a token": {"stop_token_ids": (40, 41, 42, 43, 44)},
    "with its end": {"min_tokens": 20},
    "text": {
        "structured_outputs": StructuredOutputsParams(regex="(yes|no), and that is the end of it")
    },
    "nothing to choose": {
        "structured_outputs": StructuredOutputsParams(choice=["there is nothing to choose"])
    },
    "log-probabilities": {"logprobs": 1},
    "few tokens allowed": {"allowed_token_ids": list(range(288))},
}


def answers(llm, params, prompts=PROMPTS):
    found = llm.generate(prompts, params, progress=False)
    return [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for r in found for c in r.outputs]


def force_nothing(patch):
    patch.setattr(ForcedTokens, "certain", lambda self, request: ())


def without(llm, params, monkeypatch):
    with monkeypatch.context() as patch:
        force_nothing(patch)
        before = llm.stats().num_steps
        return answers(llm, params), llm.stats().num_steps - before


@pytest.fixture(scope="module")
def llm(tiny_model):
    return make(tiny_model)


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_the_same(llm, monkeypatch, name):
    params = dataclasses.replace(BASE, **SETTINGS[name])
    expected, num_steps = without(llm, params, monkeypatch)
    before = llm.stats()
    assert answers(llm, params) == expected
    jumped = llm.stats().forced_tokens - before.forced_tokens
    steps = llm.stats().num_steps - before.num_steps
    if name in ("greedy", "drawn", "several", "penalised"):
        for text, *_ in expected:
            jsonschema.validate(json.loads(text), SCHEMA)
        assert steps < 0.6 * num_steps
    assert (jumped > 0) == (
        name not in ("log-probabilities", "few tokens allowed", "cut at 1", "cut at 2")
    )
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


@pytest.mark.parametrize(
    "more",
    [
        {"max_num_batched_tokens": 8, "max_num_seqs": 4},
        {"kv_cache_bytes": 9 * 8192, "max_model_len": 144, "enable_prefix_caching": False},
        {"kernels": "torch"},
        {"num_threads": 2},
    ],
    ids=str,
)
def test_however_it_is_computed(tiny_model, llm, monkeypatch, more):
    other, params = make(tiny_model, **more), dataclasses.replace(BASE, n=2)
    expected, _ = without(llm, params, monkeypatch)
    assert answers(other, params) == expected
    assert other.stats().forced_tokens > 0
    assert (other.stats().num_preemptions > 0) == ("kv_cache_bytes" in more)


def test_two_steps_in_flight(tiny_model, llm, monkeypatch):
    """Steps overlap as on a GPU: the forced tokens are known before the token before them has been drawn, so the next step need
    not wait."""
    params = dataclasses.replace(BASE, n=2)
    expected, num_steps = without(llm, params, monkeypatch)
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    mixed, _ = without(llm, [params, plain, params], monkeypatch)
    monkeypatch.setattr(ModelRunner, "max_in_flight", lambda self, plan: 2)
    monkeypatch.setattr(InFlightStep, "is_done", False)
    other = make(tiny_model)
    before = other.stats().num_steps
    assert answers(other, params) == expected
    assert other.stats().num_steps - before < 0.7 * num_steps
    assert answers(other, [params, plain, params]) == mixed


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft"])
@pytest.mark.parametrize(
    "name", ["greedy", "drawn", "several", "penalised", "log-probabilities", "cut at 13"]
)
def test_guesses_keep_to_the_grammar(tiny_model, llm, monkeypatch, method, name):
    """Guesses are verified where nothing is forced, each with its own mask."""
    lists = {
        "type": "array",
        "items": {"enum": ["hello there", "hello you", 12]},
        "minItems": 8,
        "maxItems": 9,
    }
    params = dataclasses.replace(
        BASE,
        structured_outputs=StructuredOutputsParams(json=lists, disable_any_whitespace=True),
        **SETTINGS[name],
    )
    expected, _ = without(llm, params, monkeypatch)
    config = {"method": method, "num_speculative_tokens": 3}
    if method == "draft":
        config["model"] = str(tiny_model)
    other = make(tiny_model, speculative_config=config)
    force_nothing(monkeypatch)
    assert answers(other, params) == expected
    stats = other.stats()
    assert (stats.spec_draft_tokens if method == "draft" else stats.spec_accepted_tokens) > 0
    monkeypatch.undo()
    assert answers(other, params) == expected
    assert (other.stats().forced_tokens > 0) == (name != "log-probabilities")


def test_a_draft_model_in_flight(tiny_model, tmp_path, llm, monkeypatch):
    """Another model's guesses, of which most are wrong, while two steps are in flight."""
    tiny_models.write(
        tmp_path, "llama", seed=1, num_hidden_layers=1, vocab_size=288, max_position_embeddings=512
    )
    expected, _ = without(llm, BASE, monkeypatch)
    monkeypatch.setattr(ModelRunner, "max_in_flight", lambda self, plan: 2)
    monkeypatch.setattr(InFlightStep, "is_done", False)
    other = make(
        tiny_model,
        speculative_config={"method": "draft", "model": str(tmp_path), "num_speculative_tokens": 2},
    )
    assert answers(other, BASE) == expected
    assert other.stats().spec_draft_tokens > 0


def test_forced_is_what_the_masks_leave(tiny_model, monkeypatch):
    """`forced` step by step: where it names tokens, each mask leaves just that one."""
    llm = make(tiny_model)
    grammars = llm.core.grammars
    masks, seen = grammars.masks, 0

    def noted(plan, drafts, *late):
        nonlocal seen
        assert not drafts
        state = grammars._states[plan.scheduled[0].request_id]
        forced = state.forced()
        mask, ended = masks(plan, drafts, *late)
        if forced and not ended:
            bits = np.frombuffer(mask.bits, np.uint8)
            assert np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist() == [forced[0]]
            seen += 1
        return mask, ended

    grammars.masks = noted
    force_nothing(monkeypatch)
    for seed in range(3):
        answers(llm, dataclasses.replace(BASE, seed=seed), PROMPTS[:1])
    assert seen > 100


def test_nothing_is_forced_without_a_grammar(tiny_model):
    with LLM(
        str(tiny_model), dtype="float32", device="cpu", kv_cache_bytes=2**20, max_model_len=128
    ) as llm:
        llm.generate("a", SamplingParams(max_tokens=8), progress=False)
        assert llm.stats().forced_tokens == 0
