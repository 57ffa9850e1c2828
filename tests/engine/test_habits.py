"""Programs as vLLM's users write them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

import slipstream
from slipstream import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from slipstream.base.other_engines import NEEDLESS, OF_SERVE, SETTINGS
from slipstream.config import EngineArgs
from slipstream.errors import RequestError
from tests.support import tiny_models


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.write_with_tokenizer(path)
    with LLM(
        str(path), device="cpu", dtype="float32", max_model_len=64, kv_cache_bytes=2**20
    ) as llm:
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
    answer = llm.generate(
        "hello", SamplingParams(temperature=0, max_tokens=2, logprobs=2), progress=False
    )[0].outputs[0]
    for token, position in zip(answer.token_ids, answer.logprobs, strict=True):
        assert position[token].logprob == position.chosen.logprob
        assert position[token].decoded_token == position.chosen.token
        assert token in position
        assert next(iter(position)) == token
        with pytest.raises(KeyError):
            position[10**6]


def tokens_of(llm, prompt="hello", **params):
    asked = SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **params})
    return llm.generate(prompt, asked, progress=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("temperature", [0, 5.0])
def test_only_allowed_tokens(llm, temperature):
    found = tokens_of(llm, temperature=temperature, max_tokens=30, allowed_token_ids=[7, 200, 41])
    assert set(found) <= {7, 200, 41}
    assert len(found) == 30


def test_bad_words_are_not_generated(llm):
    plain = tokens_of(llm)
    first, second = plain[:2]
    assert first not in tokens_of(llm, bad_words_token_ids=[[first]])
    # Of two tokens only the second is not drawn, and only behind the first; the prompt does not count.
    found = tokens_of(
        llm, bad_words_token_ids=[[first, second], [*llm.get_tokenizer().encode("hello"), first]]
    )
    assert found[0] == first
    assert found[1] != second
    assert all(pair != (first, second) for pair in itertools.pairwise(found))
    word = llm.get_tokenizer().decode([first])
    assert llm.get_tokenizer().encode(word, add_special_tokens=False) == [first]
    assert first not in tokens_of(llm, bad_words=[word])
    # What can't be avoided is drawn all the same.
    assert (
        tokens_of(llm, allowed_token_ids=[5], bad_words_token_ids=[[5, 5]], temperature=1.0)
        == [5] * 8
    )


def test_params_that_cannot_be_had(llm):
    for wrong, field in (
        ({"best_of": 129}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "bad_words_token_ids": [[5]]}, "allowed_token_ids"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words_token_ids": [[]]}, "bad_words_token_ids"),
        ({"bad_words_token_ids": [[10**6, 1]]}, "bad_words_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"detokenize": False, "stop": "x"}, "stop"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 2**70}, "top_k"),
        ({"temperature": 10**400}, "temperature"),
        ({"repetition_penalty": 10**400}, "repetition_penalty"),
        ({"logit_bias": {"0": 1, "00": 2}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {5: 10**400}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
    ):
        with pytest.raises(RequestError) as caught:
            tokens_of(llm, **wrong)
        assert caught.value.field == field
    assert tokens_of(llm, n=1, best_of=1, spaces_between_special_tokens=False) == tokens_of(llm)


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("ignore_eos", "false", "must be True or False, got 'false'"),
        ("skip_special_tokens", None, "must be True or False"),
        ("structured_outputs", {"json": {}}, "must be a StructuredOutputsParams, got {'json'"),
        ("stop_token_ids", 5, "must be a list, got 5"),
        ("stop_token_ids", [5, -1], "must be made of token ids"),
        ("dry_allowed_length", 0, "must be a whole number ≥ 1"),
        ("dry_allowed_length", 2.0, "must be a whole number ≥ 1"),
    ],
)
def test_a_value_of_another_type_is_refused(name, wrong, told):
    with pytest.raises(RequestError, match=f"{name} {told}") as caught:
        SamplingParams(**{name: wrong})
    assert caught.value.field == name


def test_flags_of_forms_and_beams_are_no_texts():
    with pytest.raises(RequestError, match="json_object must be True or False"):
        StructuredOutputsParams(json_object="no")
    with pytest.raises(RequestError, match="ignore_eos must be True or False"):
        BeamSearchParams(beam_width=2, max_tokens=2, ignore_eos="no")


def test_a_prompt_of_other_keys_is_answered_with_them(llm):
    with pytest.raises(RequestError, match="got a dict of prompt, image"):
        llm.generate({"prompt": "hello", "image": 1}, progress=False)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "did you mean 'temperature'"), ("max_token", "did you mean 'max_tokens'"),
        ("top_P", "did you mean 'top_p'"),
        ("max_new_tokens", "the nearest is max_tokens"), ("guided_decoding", "the nearest is structured_outputs"),
        ("logprob_token_ids", "the nearest is logprobs, of the likeliest tokens"),
    ],
)  # fmt: skip
def test_a_misspelt_parameter_is_answered_with_the_likely_one(name, meant):
    with pytest.raises(TypeError, match=f"there is no argument '{name}'; {meant}"):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("max_modellen", "; did you mean 'max_model_len'?"), ("swap_space", "; the nearest is kv_host_bytes"),
        ("trust_remote_code", "; leave it out: a checkpoint's own code is never run"), ("zzz", ""),
        ("pp_size", "; the nearest is pipeline_parallel_size"),
        ("dp", "; use `slipstream fleet` for several replicas (docs/fleet.md); "
               "expert_parallel_size alone distributes requests"),
        ("language_model_only", "; max_images=0 leaves the image encoder out"),
    ],
)  # fmt: skip
def test_another_librarys_setting_is_answered_with_what_to_do(name, told):
    with pytest.raises(TypeError) as caught:
        EngineArgs(model="smollm2", **{name: 1})
    assert str(caught.value) == f"there is no setting {name!r}{told}"


def test_settings_that_are_advised_are_there():
    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    assert set(SETTINGS.values()) <= fields | set(OF_SERVE)
    assert not fields & {*SETTINGS, *NEEDLESS}


def test_what_is_no_prompt_is_named(llm):
    with pytest.raises(
        RequestError, match="a prompt is a text or its token ids, got int"
    ) as caught:
        llm.generate(5)
    assert caught.value.field == "prompts"


def test_an_answers_logprob_is_the_sum_of_its_tokens(llm):
    asked, unasked = llm.generate(
        ["hello"] * 2, [SamplingParams(max_tokens=4, logprobs=number) for number in (1, None)]
    )
    (choice,) = asked.outputs
    assert (
        choice.cumulative_logprob
        == sum(position.chosen.logprob for position in choice.logprobs)
        < 0
    )
    assert unasked.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("method", ["generate", "chat", "embed", "encode", "score"])
def test_so_is_a_misspelt_argument_of_a_call(llm, method):
    known = {"chat": "use_tqdm", "generate": "use_tqdm"}.get(method, "progress")
    with pytest.raises(TypeError, match=f"did you mean '{known}'"):
        getattr(llm, method)("hello", **{known[:-1]: False})
    with pytest.raises(TypeError, match=r"zzz'$"):
        getattr(llm, method)("hello", zzz=1)


def test_tokens_without_detokenizing_are_the_same(llm):
    greedy = dict(temperature=0, max_tokens=4, logprobs=1)
    plain, bare = (
        llm.generate("hello", SamplingParams(**greedy, detokenize=d), progress=False)[0]
        for d in (True, False)
    )
    assert (bare.outputs[0].text, bare.outputs[0].token_ids) == ("", plain.outputs[0].token_ids)


def test_a_prompts_last_tokens(llm):
    tokenizer = llm.get_tokenizer()
    whole = tokenizer.encode("one two three four five six")
    prefix = list(tokenizer.prefix)

    def kept(prompt, number, **more):
        params = SamplingParams(max_tokens=4, truncate_prompt_tokens=number, **more)
        return llm.generate(prompt, params, progress=False)[0].prompt_token_ids

    assert kept("one two three four five six", 4) == [*prefix, *whole[len(prefix) - 4 :]]
    assert kept({"prompt_token_ids": whole}, 4) == whole[-4:]
    assert kept({"prompt_token_ids": whole}, 100) == whole
    assert len(kept("one two three " * 500, -1)) == 60  # of a context of 64
    assert (
        len(kept("one two three " * 5000, -1)) == 60
    )  # more characters than are tokenised otherwise


def test_chats_by_vllms_names(llm):
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the lo"}]
    greedy = SamplingParams(temperature=0, max_tokens=4)
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(
        said, add_generation_prompt=False, continue_final_message=True
    )
    assert text.endswith("the lo")
    assert tokenizer.apply_chat_template(said, add_generation_prompt=False).startswith(text)
    found = llm.chat(
        said, greedy, add_generation_prompt=False, continue_final_message=True, use_tqdm=False
    )[0]
    assert found.prompt_token_ids == tokenizer.encode(text, add_special_tokens=False)
    own = llm.chat(
        said,
        greedy,
        chat_template="{{ messages[0].content }}{{ x }}",
        chat_template_kwargs={"x": "!"},
    )[0]
    assert own.prompt == "hello!"
    for wrong, field in (
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ):
        with pytest.raises(RequestError) as caught:
            llm.chat(said, greedy, **wrong)
        assert caught.value.field == field
    with pytest.raises(RequestError, match="gives text"):
        tokenizer.apply_chat_template(said, tokenize=True)
    shouting = "{{ messages[-1].content | upper }}"
    with pytest.raises(RequestError, match="needs a last message"):
        tokenizer.apply_chat_template(
            [], chat_template=shouting, add_generation_prompt=False, continue_final_message=True
        )
    assert tokenizer.eos_token_id in tokenizer.eos_token_ids


def test_prompts_and_arguments_as_vllms_scripts_write_them(llm):
    greedy = SamplingParams(temperature=0, max_tokens=4)
    plain = llm.generate("hello", greedy, progress=False)[0]
    ids = plain.prompt_token_ids
    for prompts in (
        ids,
        [ids],
        [{"prompt_token_ids": ids, "multi_modal_data": None, "mm_processor_kwargs": None}],
        {"prompt": "hello", "multi_modal_data": None, "cache_salt": None},
    ):
        (answer,) = llm.generate(
            prompts, greedy, use_tqdm=False, priority=[1], tokenization_kwargs=None
        )
        assert answer.outputs[0].token_ids == plain.outputs[0].token_ids
    (chat,) = llm.chat(
        [{"role": "user", "content": "hello"}],
        greedy,
        chat_template_content_format="auto",
        mm_processor_kwargs=None,
    )
    assert chat.finished
    with pytest.raises(RequestError, match="2 priorities for 1 prompts"):
        llm.generate("hello", greedy, priority=[1, 2])
    with pytest.raises(TypeError, match="truncate_prompt_tokens cuts prompts"):
        llm.generate("hello", greedy, tokenization_kwargs={"truncation": True})
    with pytest.raises(TypeError, match="the chat template tells which contents"):
        llm.chat([], greedy, chat_template_content_format="openai")
    assert plain.outputs[0].finished()


def test_priorities_decide_which_prompt_is_served_first(tmp_path):
    tiny_models.write_with_tokenizer(tmp_path)
    one_by_one = dict(device="cpu", dtype="float32", max_model_len=64, max_num_seqs=1)
    with LLM(str(tmp_path), kv_cache_bytes=2**20, **one_by_one) as alone:
        answers = alone.generate(
            ["hello", "one", "four"], SamplingParams(max_tokens=2), priority=[1, 2, 0]
        )
    first = [answer.times.first_token for answer in answers]
    assert first[2] < first[0] < first[1]


def test_a_prompts_salt_keeps_its_cached_prefix_apart(llm):
    ids = [7 + i for i in range(40)]
    greedy = SamplingParams(temperature=0, max_tokens=1)

    def cached(**salt):
        return llm.generate({"prompt_token_ids": ids, **salt}, greedy)[0].num_cached_tokens

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") > 0
    assert cached(cache_salt="two") == 0
    for wrong in ("", 5):
        with pytest.raises(RequestError, match="cache_salt"):
            cached(cache_salt=wrong)


@pytest.mark.parametrize(
    "off",
    [
        {"guided_decoding": None}, {"use_beam_search": False}, {"extra_args": {}}, {"flat_logprobs": False},
        {"skip_clone": False}, {"repetition_detection": None}, {"max_new_tokens": None},
    ],
)  # fmt: skip
def test_arguments_of_others_that_ask_for_nothing_are_taken(off):
    assert SamplingParams(**off) == SamplingParams()


@pytest.mark.parametrize("name", ["do_sample", "temprature"])
def test_other_arguments_are_refused_although_they_are_false(name):
    with pytest.raises(TypeError, match=f"there is no argument '{name}'"):
        SamplingParams(**{name: False})


def test_vllms_fields_that_are_missing_say_what_to_read(llm):
    (answer,) = llm.generate("hello", SamplingParams(max_tokens=1), progress=False)
    for owner, name, told in (
        (answer, "multi_modal_placeholders", "prompt_token_ids"),
        (answer.metrics, "time_in_queue", "first_token_latency"),
    ):
        with pytest.raises(AttributeError, match=f"'{name}'; {told}"):
            getattr(owner, name)


def test_public_names_are_listed_before_their_first_use():
    assert {"LLM", "SamplingParams", "LoRARequest"} <= set(dir(slipstream))
