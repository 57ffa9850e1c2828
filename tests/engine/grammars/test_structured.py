"""Answers of a tiny random model keep to their grammar, whatever else is asked for."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.errors import RequestError
from slipstream.messages.finish_reason import FinishReason
from slipstream.params.options import RequestOptions
from slipstream.worker.model_runner import InFlightStep, ModelRunner
from tests.support.waiting import PATIENCE_S

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {
            "type": "array",
            "items": {"enum": ["a", "b", "hello"]},
            "minItems": 1,
            "maxItems": 3,
        },
        "nested": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "nested"],
    "additionalProperties": False,
}
PARAMS = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
PROMPTS = ["hello", "the other in the hour", "a"]


def make(path, **more):
    fields = dict(
        dtype="float32",
        device="cpu",
        num_threads=1,
        kv_cache_bytes=16 * 2**20,
        max_num_seqs=8,
        max_model_len=512,
    )
    return LLM(str(path), **{**fields, **more})


@pytest.fixture(scope="module")
def llm(tiny_model):
    return make(tiny_model)


def sampling(structured=PARAMS, **more):
    return SamplingParams(
        **{"max_tokens": None, "seed": 0, "structured_outputs": structured, **more}
    )


def answers(llm, params, prompts=PROMPTS):
    return [c for r in llm.generate(prompts, params, progress=False) for c in r.outputs]


def check_all(found, schema=SCHEMA):
    for choice in found:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), schema)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"n": 3},
        {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
        {
            "top_k": 3,
            "top_p": 0.5,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "presence_penalty": 2,
            "frequency_penalty": 2,
        },
        {"logit_bias": {1: 100.0, 3: 100.0, 64: 50.0}},
        {"ignore_eos": True},
        {"temperature": 5.0},
    ],
    ids=str,
)
def test_every_way_to_sample(llm, more):
    found = answers(llm, sampling(**more))
    check_all(found)
    for choice in found:
        if "logprobs" in more:
            assert len(choice.logprobs) == len(choice.token_ids)
            assert all(entry.chosen.logprob <= 0 for entry in choice.logprobs)


@pytest.mark.parametrize(
    "more",
    [
        {"max_num_batched_tokens": 8, "max_num_seqs": 4},
        {"kv_cache_bytes": 7 * 8192, "max_model_len": 128},
        {"enable_prefix_caching": False},
        {"kernels": "torch"},
        {"num_threads": 2},
    ],
    ids=str,
)
def test_the_same_however_it_is_computed(tiny_model, llm, more):
    """Chunked prefill, preemption, no prefixes, other kernels."""
    other = make(tiny_model, **more)
    params, prompts = sampling(), [*PROMPTS, *(f"{p} again" for p in PROMPTS)]
    found = answers(other, params, prompts)
    check_all(found)
    if "kernels" not in more:
        assert [c.text for c in found] == [c.text for c in answers(llm, params, prompts)]
    if "kv_cache_bytes" in more:
        assert other.stats().num_preemptions > 0


def test_two_steps_in_flight(tiny_model, llm, monkeypatch):
    """Steps overlap as on a GPU: the next step's forward is launched before this step's tokens are known."""
    expected = [c.text for c in answers(llm, sampling(n=2))]
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    mixed = [sampling(n=2), plain, sampling(n=2)]
    expected_mixed = [c.text for c in answers(llm, mixed)]
    monkeypatch.setattr(ModelRunner, "max_in_flight", lambda self, plan: 2)
    monkeypatch.setattr(InFlightStep, "is_done", False)
    other, most = make(tiny_model), 0
    step = other.core._step

    def stepped():
        nonlocal most
        outputs = step()
        most = max(most, len(other.core._in_flight))
        return outputs

    monkeypatch.setattr(other.core, "_step", stepped)
    assert [c.text for c in answers(other, sampling(n=2))] == expected
    assert [c.text for c in answers(other, mixed)] == expected_mixed
    assert most == 1  # after a call: the step whose mask was just given


def test_a_prefix_is_reused(tiny_model):
    llm = make(tiny_model)
    prompt = "in the hour " * 8
    first = answers(llm, sampling(), [prompt])[0]
    second = llm.generate([prompt], sampling(), progress=False)[0]
    assert second.num_cached_tokens > 0
    assert second.outputs[0].text == first.text


def test_grammars_change_no_other_request_of_the_batch(llm):
    """A batch with and without grammars: neither changes the other."""
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    alone = answers(llm, plain)
    kinds = [sampling(), plain, sampling(StructuredOutputsParams(choice=["yes", "no"]))]
    mixed = answers(llm, kinds, [PROMPTS[0], PROMPTS[1], PROMPTS[2]])
    assert mixed[1].token_ids == alone[1].token_ids
    check_all(mixed[:1])
    assert mixed[2].text in ("yes", "no")


@pytest.mark.parametrize(
    ("params", "pattern"),
    [
        (StructuredOutputsParams(regex=r"[0-9]{3}-(a|bc)"), r"[0-9]{3}-(a|bc)"),
        (StructuredOutputsParams(choice=["Paris", "Rome", 'a "b" \\']), r'Paris|Rome|a "b" \\'),
        (StructuredOutputsParams(grammar='root ::= "<" [a-c] [a-c] ">"'), r"<[a-c]{2}>"),
        (
            StructuredOutputsParams(grammar='start: "x" NUMBER\nNUMBER: /[1-9][0-9]{2}/'),
            r"x[1-9][0-9]{2}",
        ),
    ],
    ids=str,
)
def test_every_kind_of_grammar_is_kept(llm, params, pattern):
    for choice in answers(llm, sampling(params, n=4)):
        assert re.fullmatch(pattern, choice.text)
        assert choice.finish_reason == "stop"


def test_an_object_without_a_schema_begins_with_a_brace_and_whole_is_json(llm):
    params = sampling(StructuredOutputsParams(json_object=True), max_tokens=60, n=4)
    for choice in answers(llm, params):
        assert choice.text.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.text), dict)


def test_max_tokens_cut(llm):
    found = answers(llm, sampling(max_tokens=5))
    assert all((c.finish_reason, len(c.token_ids)) == ("length", 5) for c in found)


def test_stop_strings_and_min_tokens_still_count(llm):
    found = answers(llm, sampling(stop='"age"'))
    assert all(c.stop_reason == '"age"' and '"age"' not in c.text for c in found)
    long = sampling(StructuredOutputsParams(regex="a*"), min_tokens=7, max_tokens=50, n=4)
    assert all(len(c.token_ids) >= 7 for c in answers(llm, long))


def test_nothing_is_left(llm):
    answers(llm, sampling(n=2))
    stream = llm.stream("hello", sampling())
    next(stream)
    stream.close()
    core = llm.core
    assert not core.grammars
    assert not core.grammars.is_compiling
    assert core.scheduler.stats().num_free_blocks == core.scheduler.stats().num_blocks


def test_a_stream_is_the_answer(llm):
    whole = answers(llm, sampling(), PROMPTS[:1])[0]
    parts = [d.outputs[0] for d in llm.stream(PROMPTS[0], sampling())]
    assert "".join(p.text for p in parts) == whole.text
    assert parts[-1].finish_reason == "stop"


def test_what_turns_out_to_be_impossible(llm):
    """Impossibility shows only in the engine, which knows the tokens. The request fails, and no
    other."""
    bad = sampling(StructuredOutputsParams(grammar="start: <|nope|>"))
    with pytest.raises(RequestError, match="nope") as error:
        answers(llm, bad)
    assert error.value.field == "structured_outputs"
    dead = sampling(
        StructuredOutputsParams(regex="a,a"), stop_token_ids=llm.get_tokenizer().encode(",")
    )
    with pytest.raises(RequestError, match="no token"):
        answers(llm, dead)
    check_all(answers(llm, sampling()))


def test_a_deadline_ends_a_request_whose_grammar_compiles(llm):
    request = llm._input.prepare(
        "hello",
        sampling(StructuredOutputsParams(regex="(abc){1,9}")),
        RequestOptions(deadline_s=1e-9),
    )
    llm.core.add(request.engine_requests)
    outputs = []
    while llm.core.has_work:
        outputs += llm.core.step()
    assert [o.finish_reason for o in outputs] == [FinishReason.DEADLINE]
    while llm.core.grammars.is_compiling:
        llm.core.step()
    assert not llm.core.grammars


def compiling(llm, regex, release, **more):
    """A request whose grammar compiles until `release` is set."""
    compile_now = llm.core.grammars.compiler.compile
    llm.core.grammars.compiler.compile = lambda *given: (
        release.wait(PATIENCE_S) and compile_now(*given)
    )
    try:
        request = llm._input.prepare(
            "hello", sampling(StructuredOutputsParams(regex=regex), **more)
        )
        llm.core.add(request.engine_requests)
    finally:
        del llm.core.grammars.compiler.compile
    return [r.request_id for r in request.engine_requests]


def test_choices_wait_for_their_grammar_though_the_first_is_aborted(llm):
    """The others wait for its prompt; they may not begin without the grammar."""
    release = threading.Event()
    first, *others = compiling(llm, "(abc){2}", release, n=3)
    llm.core.abort([first])
    tokens, before = {i: [] for i in others}, 20
    while llm.core.has_work:
        if before == 0:
            release.set()
        before -= 1
        for output in llm.core.step():
            tokens[output.request_id] += output.token_ids
            assert output.error is None
    end = llm.get_tokenizer().eos_token_ids
    assert {
        llm.get_tokenizer().decode([t for t in own if t not in end]) for own in tokens.values()
    } == {"abcabc"}


def test_a_request_that_is_refused_leaves_no_grammar(llm):
    """A refused request that takes a name in use does not touch the grammar of the other."""
    list(answers(llm, sampling(StructuredOutputsParams(regex="x+y"), max_tokens=4)))  # compiled
    request = llm._input.prepare(
        "hello", sampling(StructuredOutputsParams(regex="(ab){4}"), temperature=0)
    )
    llm.core.add(request.engine_requests)
    same = llm._input.prepare("hello", sampling(StructuredOutputsParams(regex="x+y")))
    other = dataclasses.replace(
        same.engine_requests[0], request_id=request.engine_requests[0].request_id
    )
    long = dataclasses.replace(same.engine_requests[0], max_tokens=10_000)
    tokens, done = [], 0
    while llm.core.has_work:
        for output in llm.core.step():
            assert output.error is None
            tokens += output.token_ids
            done += 1
        if done == 1:
            for refused in (other, long):
                with pytest.raises(RequestError):
                    llm.core.add([refused])
    end = llm.get_tokenizer().eos_token_ids
    assert llm.get_tokenizer().decode([t for t in tokens if t not in end]) == "abababab"
    assert not llm.core.grammars
    assert not llm.core.grammars.is_compiling


def test_a_compilation_that_breaks_ends_its_request_alone(llm, monkeypatch):
    def broken(*given):
        raise OSError("no tokenizer.json")

    request = llm._input.prepare("a", sampling(None, max_tokens=5, ignore_eos=True))
    llm.core.add(request.engine_requests)
    monkeypatch.setattr(llm.core.grammars.compiler, "compile", broken)
    bad = llm._input.prepare("hello", sampling(StructuredOutputsParams(regex="(zz)+q")))
    llm.core.add(bad.engine_requests)
    ends = {}
    while llm.core.has_work:
        ends |= {
            o.request_id: (o.finish_reason, o.error)
            for o in llm.core.step()
            if o.finish_reason is not None
        }
    assert ends[bad.engine_requests[0].request_id] == (FinishReason.INVALID, "no tokenizer.json")
    assert ends[request.engine_requests[0].request_id] == (FinishReason.LENGTH, None)


def test_without_a_tokenizer(tiny_model):
    llm = make(tiny_model, skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="tokenizer"):
        llm.generate({"prompt_token_ids": [3, 4]}, sampling(), progress=False)


scalars = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 5)),
    st.builds(
        lambda a, n: {"type": "integer", "minimum": a, "maximum": a + n},
        st.integers(-500, 500),
        st.integers(0, 900),
    ),
    st.builds(
        lambda v: {"enum": v},
        st.lists(st.sampled_from(["a", "hello", 1, None, True, "é\n"]), min_size=1, max_size=3),
    ),
    st.builds(lambda v: {"const": v}, st.sampled_from(["x", 0, [], {"a": 1}])),
    st.just({"type": "string", "pattern": "^[a-z]{1,4}$"}),
    st.just({"type": "string", "format": "date"}),
)


def larger(inner):
    names = st.lists(st.sampled_from(["a", "b", "the", "hello"]), unique=True, max_size=3)
    objects = st.builds(
        lambda properties, required: {
            "type": "object",
            "properties": properties,
            "required": [name for name in required if name in properties],
            "additionalProperties": False,
        },
        st.dictionaries(st.sampled_from(["a", "b", "the", "hello"]), inner, max_size=3),
        names,
    )
    arrays = st.builds(
        lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 3)
    )
    unions = st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3))
    return st.one_of(objects, arrays, unions)


@given(schema=st.recursive(scalars, larger, max_leaves=5), seed=st.integers(0, 999))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_keep_to_random_schemas(llm, schema, seed):
    params = sampling(StructuredOutputsParams(json=schema, disable_any_whitespace=True), seed=seed)
    check_all(answers(llm, dataclasses.replace(params, temperature=seed % 3), PROMPTS[:2]), schema)
