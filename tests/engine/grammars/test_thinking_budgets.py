"""Budgets of reasoning hold to the token, however the answer is computed, and change nothing else."""

from __future__ import annotations

import dataclasses
import json
import weakref

import jsonschema
import pytest

from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.engine.text.tool_formats import REASONING
from slipstream.errors import RequestError
from slipstream.params.answer_forms import ReasoningMarkers
from slipstream.worker.model_runner import ModelRunner
from tests.support import draft_heads, tiny_models
from tests.support.thinking_models import (
    BRACKETS,
    END,
    HARMONY,
    HARMONY_TOKENS,
    LEFT,
    OPENED,
    THINK,
    TOOLS,
    write,
)

ASK = [{"role": "user", "content": text} for text in ("hello", "the other in the hour", "a")]
CHATS = [[message] for message in ASK]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "ok": {"type": "boolean"},
        "a_long_name_of_a_constant": {"const": "hello there"},
    },
    "required": ["name", "ok", "a_long_name_of_a_constant"],
    "additionalProperties": False,
}
FORM = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
NEVER = {END: -100.0}
"""The model goes on thinking."""


def make(path, **more):
    fields = dict(
        dtype="float32",
        device="cpu",
        num_threads=1,
        kv_cache_bytes=16 * 2**20,
        max_num_seqs=8,
        max_model_len=512,
        block_size=4,
    )
    return LLM(str(path), **{**fields, **more})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinks")
    write(folder, max_position_embeddings=512)
    return folder


@pytest.fixture(scope="module")
def llm(path):
    return make(path)


def params(budget=10, **more):
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 40, "thinking_token_budget": budget, **more}
    )


def answers(llm, sampling, **more):
    return [c for r in llm.chat(CHATS, sampling, progress=False, **more) for c in r.outputs]


def num_thoughts(choice):
    """Tokens before the end of reasoning that the prompt began."""
    ids = list(choice.token_ids)
    return ids.index(END) if END in ids else len(ids)


@pytest.mark.parametrize("budget", [0, 1, 2, 7, 10])
def test_reasoning_has_exactly_the_budget_where_the_model_would_go_on(llm, budget):
    free = answers(llm, params(None, logit_bias=NEVER, ignore_eos=True))
    for limited, plain in zip(
        answers(llm, params(budget, logit_bias=NEVER, ignore_eos=True)), free, strict=True
    ):
        assert num_thoughts(limited) == budget
        assert list(limited.token_ids[:budget]) == list(plain.token_ids[:budget])
        assert len(limited.token_ids) == 40, "the answer goes on after the marker"


def test_answer_after_the_marker_is_what_the_model_says_after_that_prompt(llm):
    sampling = params(5, logit_bias=NEVER, ignore_eos=True)
    for result in llm.chat(CHATS, sampling, progress=False):
        (choice,) = result.outputs
        begun = [*result.prompt_token_ids, *choice.token_ids[:6]]
        plain = SamplingParams(temperature=0, max_tokens=34, logit_bias=NEVER, ignore_eos=True)
        (again,) = llm.generate([{"prompt_token_ids": begun}], plain, progress=False)
        assert list(again.outputs[0].token_ids) == list(choice.token_ids[6:])


DRAFTS = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 6},
    "auto": {"method": "suffix"},
    "draft": {"method": "draft", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3},
    "medusa": {"method": "medusa", "num_speculative_tokens": 3},
}
WAYS = {
    "greedy": {},
    "drawn": {"temperature": 1.5, "seed": 3},
    "several": {"temperature": 1.0, "seed": 4, "n": 3},
    "schema": {"structured_outputs": FORM, "max_tokens": None},
    "drawn schema": {
        "structured_outputs": FORM,
        "max_tokens": None,
        "temperature": 1.0,
        "seed": 1,
        "n": 2,
    },
    "penalised": {"repetition_penalty": 1.4, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "log-probabilities": {"logprobs": 2, "prompt_logprobs": 1},
    "chain": {"temperature": 1.0, "seed": 2, "typical_p": 0.9, "dry_multiplier": 0.8},
    "mirostat": {"temperature": 1.0, "seed": 2, "mirostat_mode": 2},
    "least": {"min_tokens": 30},
    "bad words": {"bad_words_token_ids": ((END,), (70,))},
    "few tokens": {"allowed_token_ids": (*range(60, 200), END)},
    "cut": {"max_tokens": 4},
}


PLAIN = weakref.WeakKeyDictionary()
"""Answers without drafts by the engine, and of one by the way and the budget."""


@pytest.fixture(scope="module", params=DRAFTS)
def pair(request, path, llm, tmp_path_factory):
    """(an engine that drafts, the same without drafts)"""
    config, folder = DRAFTS[request.param], tmp_path_factory.mktemp("draft")
    if config is None:
        return llm, llm
    if request.param == "draft":
        tiny_models.build_near(folder, noise=0.05, max_position_embeddings=512)
        return make(path, speculative_config=config | {"model": str(folder)}), llm
    if request.param in ("eagle3", "medusa"):
        write(folder / "model", max_position_embeddings=512, num_hidden_layers=6)
        draft_heads.BY_KIND[request.param][1](folder / "head")
        config = config | {"model": str(folder / "head"), "quantization": "none"}
        plain = make(folder / "model")
        return make(folder / "model", speculative_config=config), plain
    return make(path, speculative_config=config), llm


@pytest.mark.parametrize("way", WAYS)
def test_budget_holds_with_drafts_and_every_way_to_sample(pair, way):
    drafting, llm = pair
    more = {"logit_bias": NEVER, **WAYS[way]}
    for budget in (0, 3, 9):
        found = answers(drafting, params(budget, **more))
        for choice in found:
            if way == "cut":
                assert num_thoughts(choice) == min(budget, 4)
                continue
            assert num_thoughts(choice) == budget or (
                choice.finish_reason == "stop" and END not in choice.token_ids
            ), "only an end token ends it earlier"
            if "schema" in way:
                assert num_thoughts(choice) == budget
                jsonschema.validate(json.loads(choice.message.content), SCHEMA)
            if "logprobs" in more:
                assert len(choice.logprobs) == len(choice.token_ids)
        if drafting is not llm and way != "mirostat":
            known = PLAIN.setdefault(llm, {})
            if (way, budget) not in known:
                expected = answers(llm, params(budget, **more))
                known[way, budget] = [c.token_ids for c in expected]
            assert [c.token_ids for c in found] == known[way, budget]


def test_right_drafts_do_not_pass_the_budget(pair):
    """The model repeats itself, so that drafts are right."""
    drafting, plain = pair
    before = drafting.stats().spec_accepted_tokens
    for budget in range(20, 28):
        sampling = params(budget, logit_bias=NEVER, ignore_eos=True, repetition_penalty=0.3)
        found = answers(drafting, sampling)
        assert [num_thoughts(choice) for choice in found] == [budget] * len(CHATS)
        assert [c.token_ids for c in found] == [c.token_ids for c in answers(plain, sampling)]
    if drafting is not plain and drafting.config.speculation.method in ("ngram", "suffix"):
        assert drafting.stats().spec_accepted_tokens > before


def test_model_that_ends_its_reasoning_is_left_alone(llm):
    sampling = params(20, logit_bias={END: 6.0}, temperature=1.0, seed=1, n=4, ignore_eos=True)
    free = answers(llm, dataclasses.replace(sampling, thinking_token_budget=None))
    early = 0
    for limited, plain in zip(answers(llm, sampling), free, strict=True):
        assert num_thoughts(limited) <= 20
        if num_thoughts(plain) <= 20:
            early += 1
            assert limited.token_ids == plain.token_ids
    assert early, "some end by themselves"


def test_model_that_opens_its_reasoning_has_the_budget_from_there(llm):
    for budget in (0, 6):
        sampling = params(budget, logit_bias={THINK: 100.0, **NEVER}, ignore_eos=True)
        for choice in answers(llm, sampling, chat_template=LEFT):
            assert choice.token_ids[0] == THINK
            assert choice.token_ids.index(END) == 1 + budget
    sampling = params(0, logit_bias={THINK: -100.0}, ignore_eos=True)
    plain = dataclasses.replace(sampling, thinking_token_budget=None)
    for choice, free in zip(
        answers(llm, sampling, chat_template=LEFT),
        answers(llm, plain, chat_template=LEFT),
        strict=True,
    ):
        assert choice.token_ids == free.token_ids, "there is no reasoning to end"


def test_marker_of_several_tokens_is_forced_token_by_token(llm):
    marker = llm.get_tokenizer().encode("[/THINK]", add_special_tokens=False)
    assert len(marker) > 3
    for budget in (0, 4):
        for choice in answers(llm, params(budget, ignore_eos=True), chat_template=BRACKETS):
            assert list(choice.token_ids[budget : budget + len(marker)]) == marker
    form = params(4, structured_outputs=FORM, max_tokens=None)
    for choice in answers(llm, form, chat_template=BRACKETS):
        assert list(choice.token_ids[4 : 4 + len(marker)]) == marker
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


@pytest.mark.parametrize("name", REASONING)
def test_each_formats_marker_is_forced_after_a_budget_of_64(llm, name):
    begin, end = REASONING[name]
    template = OPENED.replace("<think>", begin).replace("</think>", end)
    marker = llm.get_tokenizer().encode(end, add_special_tokens=False)
    never = {marker[0]: -100.0}
    for form in ({}, {"structured_outputs": FORM, "max_tokens": None}):
        more = {"max_tokens": 90, "ignore_eos": True, "temperature": 1.0, "seed": 5, **form}
        for choice in answers(llm, params(64, logit_bias=never, **more), chat_template=template):
            ids = list(choice.token_ids)
            assert ids[64 : 64 + len(marker)] == marker
            assert marker[0] not in ids[:64]
            if form:
                jsonschema.validate(json.loads(choice.message.content), SCHEMA)


@pytest.mark.parametrize("budget", [0, 4])
def test_harmony_changes_the_channel_when_the_budget_is_over(llm, budget):
    tokenizer = llm.get_tokenizer()
    head = tokenizer.encode("<|channel|>analysis<|message|>", add_special_tokens=False)
    switch = tokenizer.encode("<|end|><|start|>assistant<|channel|>f", add_special_tokens=False)
    ends = [tokenizer.encode(text, add_special_tokens=False)[0] for text in HARMONY_TOKENS[2:]]
    sampling = params(
        budget,
        logit_bias={**dict.fromkeys(ends, -100.0), head[0]: 100.0},
        ignore_eos=True,
        skip_special_tokens=False,
    )
    prompt = tokenizer.apply_chat_template(ASK[:1], chat_template=HARMONY)
    markers = ReasoningMarkers(channels=("final",))
    (result,) = llm.generate(
        [prompt], dataclasses.replace(sampling, reasoning=markers), progress=False
    )
    # The header of another channel is all that may follow the first token.
    assert result.outputs[0].token_ids[0] == head[0]
    if not budget:
        assert result.outputs[0].token_ids[1] == switch[-1]
    form = dataclasses.replace(
        sampling, structured_outputs=FORM, max_tokens=None, logit_bias={head[2]: 5.0}
    )
    for choice in answers(llm, form, chat_template=HARMONY):
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert len(tokenizer.encode(choice.message.reasoning_content or "")) <= budget


SETTINGS = [
    {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    {"kv_cache_bytes": 7 * 8192, "max_model_len": 128},
    {"enable_prefix_caching": False},
    {"kernels": "torch"},
    {"num_threads": 2},
]


@pytest.mark.parametrize("more", SETTINGS, ids=str)
def test_answers_are_the_same_however_they_are_computed(path, llm, more):
    other = make(path, **more)
    for sampling in (
        params(9, logit_bias=NEVER, ignore_eos=True),
        params(9, logit_bias=NEVER, structured_outputs=FORM, max_tokens=80),
    ):
        chats = [*CHATS, *CHATS, *CHATS]
        found, expected = (
            [r.outputs[0].token_ids for r in one.chat(chats, sampling, progress=False)]
            for one in (other, llm)
        )
        assert found == expected
    assert other.stats().num_preemptions > 0 or "kv_cache_bytes" not in more


def test_request_is_a_plain_one_after_its_reasoning(llm, monkeypatch):
    """Steps after the reasoning need no masks, and the request has a decode lease."""
    masked, leased = [], []
    launch = ModelRunner._launch

    def noted(self, plan):
        step = launch(self, plan)
        masked.append(step.awaits_mask)
        leased.append(any(r.lease for r in llm.core.scheduler.requests.running))
        return step

    monkeypatch.setattr(ModelRunner, "_launch", noted)
    answers(llm, params(5, logit_bias=NEVER, ignore_eos=True, max_tokens=100))
    assert 6 <= sum(masked) <= 12
    assert not any(masked[20:])
    assert any(leased[20:])
    assert not llm.core.grammars


def test_stop_string_in_the_reasoning_ends_the_answer(llm):
    (free, *_) = answers(llm, params(None, logit_bias=NEVER, ignore_eos=True))
    stop = free.text[2:4]
    (choice, *_) = answers(llm, params(30, logit_bias=NEVER, ignore_eos=True, stop=stop))
    assert choice.stop_reason == stop
    assert END not in choice.token_ids


def test_raw_prompt_has_a_budget_by_the_template_and_a_grammar_after_it(llm):
    sampling = params(5, logit_bias=NEVER, structured_outputs=FORM, max_tokens=None)
    for prompt in ("hello <think>", "hello <think>so far"):
        (result,) = llm.generate([prompt], sampling, progress=False)
        (choice,) = result.outputs
        assert num_thoughts(choice) == 5
        answer = llm.get_tokenizer().decode(list(choice.token_ids[6:]))
        jsonschema.validate(json.loads(answer), SCHEMA)


def test_continued_message_is_still_in_its_reasoning(llm):
    said = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "<think>the hour"},
    ]
    (result,) = llm.chat(
        said,
        params(5, logit_bias=NEVER, ignore_eos=True),
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template=LEFT,
        progress=False,
    )
    assert num_thoughts(result.outputs[0]) == 5
    assert result.outputs[0].message.reasoning_content


def test_tools_are_called_after_the_budget(llm):
    tool = {
        "type": "function",
        "function": {
            "name": "look",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"ok": {"type": "boolean"}},
                "required": ["ok"],
                "additionalProperties": False,
            },
        },
    }
    for choice in answers(
        llm,
        params(5, logit_bias=NEVER, max_tokens=None),
        tools=[tool],
        tool_choice="required",
        chat_template=TOOLS,
    ):
        assert num_thoughts(choice) == 5
        (call, *_) = choice.message.tool_calls
        assert call.name == "look"
        assert set(json.loads(call.arguments)) == {"ok"}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": True}, "thinking_token_budget"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
        ({"allowed_token_ids": (70, 71)}, "allowed_token_ids"),
    ],
    ids=str,
)
def test_wrong_budget_is_refused_by_name(llm, more, field):
    with pytest.raises(RequestError) as error:
        llm.chat(CHATS, params(**more), progress=False)
    assert error.value.field == field


def test_budget_of_a_model_without_reasoning_is_refused(llm, tiny_model):
    plain = make(tiny_model)
    for call in (
        lambda: plain.generate(["a"], params(3)),
        lambda: plain.chat(CHATS, params(3)),
        lambda: make(tiny_model, skip_tokenizer_init=True).generate(
            [{"prompt_token_ids": [5]}], params(3)
        ),
    ):
        with pytest.raises(RequestError) as error:
            call()
        assert error.value.field == "thinking_token_budget"


def test_no_budget_is_minus_one(llm):
    assert params(-1) == params(None)
    assert OPENED in llm.get_tokenizer().chat_template
