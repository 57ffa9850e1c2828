"""Grammars by themselves: what they are made of, what they refuse, and their states."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from concurrent.futures import Future
from threading import Event, get_ident
from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.engine.grammars import check as check_module
from slipstream.engine.grammars import compiling, grammar
from slipstream.engine.grammars import compose as compose_module
from slipstream.engine.grammars.check import check
from slipstream.engine.grammars.compiling import GrammarCompiler
from slipstream.engine.grammars.compose import compose
from slipstream.engine.grammars.grammar import Grammars
from slipstream.engine.grammars.state import GrammarError
from slipstream.engine.listeners import MaskingGrammars
from slipstream.engine.output import raise_on_error
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import CheckpointError, EngineOverloadedError, RequestError
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import ScheduledRequest, StepPlan
from slipstream.outputs import CompletionOutput, RequestOutput
from slipstream.params.answer_forms import StructuredOutputsParams
from slipstream.params.sampling import SamplingParams
from slipstream.spec.description import read_spec
from tests.support.waiting import PATIENCE_S, wait_for

END = 1


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer.for_model(read_spec(tiny_model))


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(lambda: tokenizer, 288, lambda tokenizer: tokenizer.eos_token_ids)


def test_a_vocabulary_that_was_read_is_not_read_by_the_first_grammar(tokenizer, monkeypatch):
    loads = []
    made = Grammars(lambda: loads.append(1) or tokenizer, 288, lambda tokenizer: (END,))
    made.compiler.read_vocabulary()
    for name in ("_Vocabulary", "LengthVocabulary", "TokenTexts"):
        monkeypatch.setattr(compiling, name, None)  # a call of it would be an error
    bounded = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}}
    assert texts(tokenizer, allowed(begin(made, StructuredOutputsParams(json=bounded)))) == {"{"}
    begin(made, StructuredOutputsParams(regex="he+"), "another")
    assert loads == [1]


@pytest.mark.parametrize("is_cuda", [True, False])
def test_a_server_on_a_gpu_reads_the_vocabulary_at_its_start(tokenizer, is_cuda):
    made = Grammars(lambda: tokenizer, 288, lambda tokenizer: (END,))
    device = SimpleNamespace(info=SimpleNamespace(is_cuda=is_cuda))
    executor = SimpleNamespace(config=SimpleNamespace(device=device))
    MaskingGrammars(made, None, executor).warm()
    assert (made.compiler._vocabulary is not None) == is_cuda


def test_a_tokenizer_that_is_missing_or_broken_is_the_first_grammars_error():
    def broken():
        raise CheckpointError("tokenizer.json is cut off")

    for load, says in ((lambda: None, "need a tokenizer"), (broken, "is cut off")):
        made = Grammars(load, 288, lambda tokenizer: (END,))
        made.compiler.read_vocabulary()
        with pytest.raises(GrammarError, match=says):
            begin(made, StructuredOutputsParams(regex="a"))


def request(params, request_id="r", ends=(END,), stop=(), **more):
    sampling = SamplingParams(structured_outputs=params, stop_token_ids=stop, **more)
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=(5,),
        sampling=sampling,
        eos_token_ids=ends,
        max_tokens=9,
    )


def begin(grammars, *args, **kwargs):
    """The state of a request; its grammar is compiled."""
    asked = request(*args, **kwargs)
    if not grammars.begin(asked):
        while grammars.is_compiling:
            time.sleep(0.001)
            for request_id, error in grammars.compiled():
                if error is not None:
                    raise GrammarError(error)
                assert request_id == asked.request_id
    return grammars._states[asked.request_id]


def allowed(state):
    bits = np.zeros(9, np.int32)
    state.mask(bits)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def texts(tokenizer, tokens):
    return {tokenizer.token_bytes(token).decode(errors="replace") for token in tokens}


def test_a_state_goes_on_and_back(grammars, tokenizer):
    state = begin(grammars, StructuredOutputsParams(regex="he(llo|n)+"))
    assert texts(tokenizer, allowed(state)) == {"h", "he", "hell", "hello"}
    before = allowed(state)
    state.accept(ids(tokenizer, "hello"))
    assert END in allowed(state)
    other = state.copy()
    other.accept(ids(tokenizer, "n"))
    state.rollback(1)
    assert allowed(state) == before
    state.accept(ids(tokenizer, "he"))
    assert END not in allowed(state)
    assert END in allowed(other)  # a copy goes its own way
    with pytest.raises(GrammarError):
        state.accept(ids(tokenizer, "x"))


def test_an_end_only_where_the_grammar_accepts(grammars, tokenizer):
    comma = ids(tokenizer, ",")[0]
    stops = begin(grammars, StructuredOutputsParams(regex="a,a+"), "stops", stop=(comma,))
    stops.accept(ids(tokenizer, "a"))
    with pytest.raises(
        GrammarError, match="no token"
    ):  # only the stop token could follow, and it would end too early
        allowed(stops)
    never = begin(grammars, StructuredOutputsParams(regex="a+"), "never", ends=())
    never.accept(ids(tokenizer, "a"))
    assert texts(tokenizer, allowed(never)) == {"a"}  # ignore_eos
    assert not never.is_finished
    one = begin(grammars, StructuredOutputsParams(choice=["no", "nope"]), "one")
    one.accept(ids(tokenizer, "no"))
    assert END in allowed(one)
    assert not one.is_finished
    one.accept(ids(tokenizer, "pe"))
    assert one.is_finished


@pytest.mark.parametrize("count", [1, 3, grammar.PARALLEL_ROWS + 3])
def test_masks_of_a_step(grammars, tokenizer, count):
    grammars.clear()
    for i in range(count):
        begin(grammars, StructuredOutputsParams(regex="ab" if i % 2 else "ca"), str(i))
    # Before, between and behind them are requests without a grammar, and one whose prompt is not complete.
    scheduled = [ScheduledRequest("plain", 3, 1, 1)]
    scheduled += [ScheduledRequest(str(i), 3, 1, 0 if i == 2 else 1) for i in range(count)]
    scheduled += [ScheduledRequest("other", 3, 1, 1)]
    mask, ended = grammars.masks(StepPlan(step_id=1, scheduled=tuple(scheduled)))
    assert not ended
    own = [i for i in range(count) if i != 2]
    assert list(mask.positions) == list(range(1, len(own) + 1))
    bits = np.frombuffer(mask.bits, np.uint8).reshape(len(own), -1)
    for i, row in zip(own, np.unpackbits(bits, axis=1, bitorder="little"), strict=True):
        assert texts(tokenizer, np.flatnonzero(row).tolist()) == {"a" if i % 2 else "c"}
    grammars.clear()


def test_masks_behind_guessed_tokens(grammars, tokenizer):
    """Masks after right guesses equal those of single steps. After a wrong guess, and after the end, every token is allowed."""
    grammars.clear()
    state = begin(grammars, StructuredOutputsParams(regex="abcd?"), "r")
    before = allowed(state)
    a, b, c, x = (ids(tokenizer, letter)[0] for letter in "abcx")
    for drafts, expected in (
        ([a, b], ["a", "b", "c"]),
        ([a, x, b], ["a", "b", None, None]),
        ([a, b, c, END], ["a", "b", "c", "d", None]),
    ):
        plan = StepPlan(
            step_id=1, scheduled=(ScheduledRequest("r", 3, len(drafts) + 1, len(drafts) + 1),)
        )
        mask, ended = grammars.masks(plan, {"r": drafts})
        assert (ended, list(mask.positions)) == ({}, list(range(len(drafts) + 1)))
        rows = np.unpackbits(
            np.frombuffer(mask.bits, np.uint8).reshape(len(expected), -1), axis=1, bitorder="little"
        )
        for row, letter in zip(rows, expected, strict=True):
            assert (
                row.all()
                if letter is None
                else letter in texts(tokenizer, np.flatnonzero(row).tolist()) and row.sum() <= 2
            )
        assert allowed(state) == before
    grammars.clear()


# A part of what JSON-Schema-Test-Suite says, keyword by keyword: (schema, valid, invalid), instances as compact JSON.
OBJECT = {"type": "object", "additionalProperties": False}
SCHEMAS = [
    ({"type": "integer"}, ["0", "-7", "123456789"], ["1.5", '"1"', "true", "01"]),
    ({"type": "number"}, ["0", "-1.5", "1e9"], ["'1'", "null"]),
    ({"type": "string"}, ['""', '"a\\n"', '"é"'], ["a", '"\n"', '"\\x"']),
    ({"type": ["null", "boolean"]}, ["null", "true", "false"], ["0", '""']),
    ({"type": "integer", "minimum": -3, "maximum": 12}, ["-3", "0", "12"], ["-4", "13", "99"]),
    ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, ["1", "2"], ["0", "3"]),
    ({"type": "integer", "multipleOf": 5}, ["0", "5", "25"], ["3", "7"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"éß."'], ['"a"', '"abcd"']),
    ({"type": "string", "pattern": "^[a-f]+[0-9]$"}, ['"abc1"'], ['"abc"', '"1"', '"abc12"']),
    ({"type": "string", "pattern": "b"}, ['"abc"', '"b"'], ['"ac"', '""']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-13-01"', '"today"']),
    ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123"']),
    ({"type": "string", "format": "ipv4"}, ['"127.0.0.1"'], ['"256.0.0.1"', '"1.2.3"']),
    ({"enum": [1, "a", None, [True]]}, ["1", '"a"', "null", "[true]"], ["2", '"b"', "[]"]),
    ({"const": {"a": 1}}, ['{"a":1}'], ['{"a":2}', "{}"]),
    ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1,2]"], ['["a"]', "{}"]),
    ({"type": "array", "items": {"const": 1}, "minItems": 1, "maxItems": 2}, ["[1]", "[1,1]"], ["[]", "[1,1,1]"]),
    ({"prefixItems": [{"const": 1}, {"const": 2}], "items": False, "type": "array"}, ["[1,2]", "[1]"], ["[2]", "[1,2,3]"]),
    ({**OBJECT, "properties": {"a": {"const": 1}, "b": {}}, "required": ["b"]}, ['{"b":2}', '{"a":1,"b":2}'], ['{"a":1}']),
    ({**OBJECT, "properties": {"a": {}}}, ["{}", '{"a":[1,"x"]}'], ['{"b":1}']),
    ({"type": "object", "additionalProperties": {"type": "null"}}, ["{}", '{"x":null,"y":null}'], ['{"x":1}']),
    ({"type": "object", "patternProperties": {"^n": {"const": 1}}, "additionalProperties": False}, ['{"n1":1}'], ['{"m":1}']),
    ({"anyOf": [{"type": "integer"}, {"const": "x"}]}, ["3", '"x"'], ['"y"', "null"]),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, ["3", "5"], ["2", "6"]),
    ({"$defs": {"n": {"const": 7}}, "type": "array", "items": {"$ref": "#/$defs/n"}}, ["[7,7]"], ["[8]"]),
    (
        {"$defs": {"t": {**OBJECT, "properties": {"n": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"},
        ["{}", '{"n":{"n":{}}}'],
        ['{"n":1}'],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"), SCHEMAS, ids=lambda value: json.dumps(value)[:60]
)
def test_keywords_of_schemas(grammars, tokenizer, schema, valid, invalid):
    for text in (*valid, *invalid):
        state = begin(
            grammars, StructuredOutputsParams(json=schema, disable_any_whitespace=True), "s"
        )
        try:
            state.accept(ids(tokenizer, text))
            taken = END in allowed(state)
        except GrammarError:
            taken = False
        assert taken == (text in valid), text
    grammars.clear()


def test_who_cannot_go_on_is_said(grammars, tokenizer):
    grammars.clear()
    dead = begin(
        grammars, StructuredOutputsParams(regex="a,a+"), "dead", stop=tuple(ids(tokenizer, ","))
    )
    dead.accept(ids(tokenizer, "a"))
    done = begin(grammars, StructuredOutputsParams(regex="a"), "done", ends=())
    done.accept(ids(tokenizer, "a"))
    plan = StepPlan(
        step_id=1, scheduled=(ScheduledRequest("dead", 3, 1, 1), ScheduledRequest("done", 3, 1, 1))
    )
    mask, ended = grammars.masks(plan)
    assert set(ended) == {"dead", "done"}
    assert ended["done"] is None
    assert "no token" in ended["dead"]
    assert set(mask.bits) == {255}
    grammars.forget(ended)
    assert not grammars


def test_what_the_request_rules_out(grammars, tokenizer):
    """A grammar and the request's other fields may leave nothing between them: that is said."""
    params = StructuredOutputsParams(regex="(ab|ac){2}")
    a, b, c = (ids(tokenizer, letter)[0] for letter in "abc")
    only = begin(grammars, params, "only", allowed_token_ids=(a, c))
    assert allowed(only) == {a}
    only.accept([a])
    assert allowed(only) == {c}
    without = begin(grammars, params, "without", bad_words_token_ids=((a, c), (b, a)))
    without.accept([a])
    assert b in allowed(without)
    assert c not in allowed(without)
    masks = np.zeros((3, 9), np.int32)
    without.mask(masks[0])
    without.mask_drafts(
        masks, [b, a]
    )  # what is behind a guess that leaves nothing is found when it is drawn
    assert (masks[1] == -1).all()
    without.accept([b])
    for state in (begin(grammars, params, "none", allowed_token_ids=(b, c)), without):
        with pytest.raises(GrammarError, match="allowed_token_ids and bad_words"):
            allowed(state)
    words = {"allowed_token_ids": (b, a), "bad_words_token_ids": ((a, a),)}
    ended = begin(grammars, StructuredOutputsParams(regex="a+"), "ended", **words)
    ended.accept([a])
    assert not allowed(ended) - set(
        ids(tokenizer, "aa")
    )  # no end token is allowed, either: the answer is complete
    grammars.clear()


def test_a_limit_behind_forced_tokens_ends_one_request(grammars, tokenizer):
    """llguidance finds what follows without an error, and runs into a limit when it is taken."""
    names = [f"r{i}" for i in range(2500)]
    rules = [f"{name}: D {name}x\n{name}x: D {name} | D" for name in names]
    first = 'start: /[xy]/ "abcdefghabcdefgh" b'
    lark = "\n".join([first, f"b: {' | '.join(names)}", "D: /[0-9]/", *rules])
    begin(grammars, StructuredOutputsParams(grammar=lark), "large")
    begin(grammars, StructuredOutputsParams(regex="a+"), "small")
    grammars.accept("large", ids(tokenizer, "x"))
    assert grammars.forced("large", 0) == ()
    forced = ids(tokenizer, "abcdefghabcdefgh")
    shares = (
        ScheduledRequest("large", 0, 1 + len(forced), 1, (), tuple(forced)),
        ScheduledRequest("small", 0, 1, 1),
    )
    _, ended = grammars.masks(StepPlan(1, shares), {"large": forced})
    assert set(ended) == {"large"}
    assert "items" in ended["large"]
    grammars.clear()


def test_compilations_that_are_stuck_hold_nobody_for_ever(tokenizer, monkeypatch):
    """Two threads compile. Stuck calls lose their places; with too many of them nothing more is begun until one has ended."""
    monkeypatch.setattr(check_module, "MAX_SECONDS", 0.05)
    grammars, release, began = (
        Grammars(lambda: tokenizer, 288, lambda tokenizer: tokenizer.eos_token_ids),
        Event(),
        [],
    )
    whole = grammars.compiler.compile

    def stuck(*given):
        began.append(given)
        assert release.wait(PATIENCE_S)
        return whole(*given)

    grammars.compiler.compile = stuck
    several = [
        StructuredOutputsParams(regex=f"z{{{i + 1}}}") for i in range(check_module.MAX_STUCK + 2)
    ]
    for i, params in enumerate(several[:3]):
        assert not grammars.begin(request(params, str(i)))
    found = compiled(grammars, 3)
    assert all("longer than" in error for _, error in found)
    wait_for(lambda: len(began) == 3, "the third got no place")
    grammars.compiler.compile = whole
    monkeypatch.setattr(check_module, "MAX_SECONDS", PATIENCE_S)
    assert wait_for_one(grammars, several[-1]) is None  # it is not in their way
    monkeypatch.setattr(check_module, "MAX_SECONDS", 0.05)
    grammars.compiler.compile = stuck
    assert not grammars.begin(request(several[3], "3"))
    assert not grammars.begin(
        request(several[4], "4")
    )  # it waits, or begins; the limit is reached either way
    compiled(grammars, 2)
    with pytest.raises(EngineOverloadedError, match="stuck"):
        grammars.begin(request(StructuredOutputsParams(regex="zzz+"), "5"))
    release.set()
    grammars.compiler.compile = whole
    monkeypatch.setattr(check_module, "MAX_SECONDS", PATIENCE_S)
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:  # they have ended
        with contextlib.suppress(EngineOverloadedError):
            grammars.begin(request(StructuredOutputsParams(regex="zzz+"), "6"))
            break
        time.sleep(0.001)
    assert compiled(grammars, 1) == [("6", None)]
    grammars.clear()


def test_a_compilation_whose_turn_does_not_come_is_an_overload(tokenizer, monkeypatch):
    grammars = Grammars(lambda: tokenizer, 288, lambda tokenizer: tokenizer.eos_token_ids)
    future = Future()
    monkeypatch.setattr(grammars._threads, "submit", lambda *_: future)
    assert not grammars.begin(request(StructuredOutputsParams(regex="x+"), "r"))
    future.set_exception(EngineOverloadedError("others were served"))
    assert compiled(grammars, 1) == [("r", "others were served")]
    assert grammars.overloaded == {"r"}
    choice = CompletionOutput(0, "", [], finish_reason="overloaded", stop_reason="others")
    with pytest.raises(EngineOverloadedError, match="others"):
        raise_on_error(RequestOutput("r", None, [5], [choice], True, None, 0))


def test_a_request_that_is_forgotten_is_not_compiled(tokenizer, monkeypatch):
    grammars = Grammars(lambda: tokenizer, 288, lambda tokenizer: tokenizer.eos_token_ids)
    future = Future()
    monkeypatch.setattr(grammars._threads, "submit", lambda *_: future)
    for request_id in ("a", "b"):
        grammars.begin(request(StructuredOutputsParams(regex="x+"), request_id))
    grammars.forget(["a"])
    assert not future.cancelled()
    grammars.forget(["b"])
    assert future.cancelled()


def compiled(grammars, count):
    found = []
    until = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < until
        time.sleep(0.001)  # the thread that compiles has the interpreter meanwhile
        found += grammars.compiled()
    return found


def wait_for_one(grammars, params):
    assert not grammars.begin(request(params, "one"))
    ((_, error),) = compiled(grammars, 1)
    return error


def test_one_compilation_for_all_who_ask_for_it(tokenizer):
    grammars = Grammars(lambda: tokenizer, 288, lambda tokenizer: tokenizer.eos_token_ids)
    params = StructuredOutputsParams(regex="x+")
    assert [grammars.begin(request(params, str(i))) for i in range(3)] == [False] * 3
    found = []
    while grammars.is_compiling:
        time.sleep(0.001)
        found += grammars.compiled()
    assert sorted(found) == [("0", None), ("1", None), ("2", None)]
    assert grammars.begin(request(params, "3"))  # kept
    for i in range(check_module.CACHED_GRAMMARS):
        begin(grammars, StructuredOutputsParams(regex=f"y{i}"), f"y{i}")
    assert not grammars.begin(request(params, "4"))


def test_the_first_mask_is_made_by_the_compiling_thread(tokenizer, monkeypatch):
    """A regular expression may compile soon, and its first mask take seconds, for which all others would wait."""
    library, made_by = compiling.call_library, []

    def noted(call, *args, **options):
        if getattr(call, "__name__", "") == "compute_bitmask":
            made_by.append(get_ident())
        return library(call, *args, **options)

    monkeypatch.setattr(compiling, "call_library", noted)
    grammars = Grammars(lambda: tokenizer, 288, lambda tokenizer: tokenizer.eos_token_ids)
    state = begin(grammars, StructuredOutputsParams(regex="[ab]{3,6}"))
    assert made_by
    assert get_ident() not in made_by
    assert allowed(state)


@pytest.fixture
def stuck(monkeypatch):
    """A call that takes longer than it may, however late its timer is: it ends with the test."""
    monkeypatch.setattr(check_module, "MAX_SECONDS", 0.0)
    release = Event()
    yield lambda *_: release.wait(PATIENCE_S)
    release.set()


def test_what_compiles_too_long_is_refused(tokenizer, monkeypatch, stuck):
    monkeypatch.setattr(GrammarCompiler, "compile", stuck)
    grammars = Grammars(lambda: tokenizer, 288, lambda tokenizer: tokenizer.eos_token_ids)
    with pytest.raises(GrammarError, match="longer than"):
        begin(grammars, StructuredOutputsParams(regex="x+"))


async def test_a_check_that_takes_too_long_is_refused(monkeypatch, stuck):
    monkeypatch.setattr(check_module, "_problem", stuck)
    with pytest.raises(RequestError, match="longer than"):
        await check_module.check_in_thread(StructuredOutputsParams(regex="x+"))


async def test_requests_with_one_grammar_share_its_check(monkeypatch):
    """Any number of requests wait for one check. One that gives up does not end it for the others."""
    began, release, checked = Event(), Event(), []

    def slow(params):
        if params in (shared, other):  # the test before may have left one
            checked.append(params)
            began.set()
            assert release.wait(PATIENCE_S)

    monkeypatch.setattr(check_module, "_problem", slow)
    shared = StructuredOutputsParams(regex="shared+")
    other = StructuredOutputsParams(regex="left+")
    tasks = [asyncio.create_task(check_module.check_in_thread(shared, "one")) for _ in range(200)]
    await asyncio.to_thread(began.wait, PATIENCE_S)
    left = asyncio.create_task(check_module.check_in_thread(other, "one"))
    await asyncio.sleep(0)
    for task in (tasks[0], left):
        task.cancel()
    await asyncio.gather(tasks[0], left, return_exceptions=True)
    release.set()
    await asyncio.gather(*tasks[1:])
    await check_module.check_in_thread(shared, "another")
    assert checked == [shared]  # nobody waits for the other any more
    assert not {params for _, params in check_module._pending_checks} & {shared, other}


def nested(schema):
    return {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"anyOf": [{"type": "string"}, schema]}}},
    }


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        (
            {"json": nested({"not": {"type": "null"}})},
            "json",
            r"not.*properties\.a\.items\.anyOf\[1\]",
        ),
        (
            {"json": nested({"type": "string", "format": "frob"})},
            "json",
            r"frob.*properties\.a\.items\.anyOf\[1\]",
        ),
        ({"json": nested(7)}, "json", r"object or boolean.*properties\.a\.items\.anyOf\[1\]"),
        (
            {"json": {"properties": {"a": True, "b": {"type": 5}}}},
            "json",
            r"type must be.*properties\.b\)",
        ),
        (
            {"json": nested({"required": "é数" * 50})},
            "json",
            r"library fails.*properties\.a\.items\.anyOf\[1\]",
        ),  # it panics
        (
            {"json": {"$defs": {"x": {"type": "array", "uniqueItems": True}}, "$ref": "#/$defs/x"}},
            "json",
            r"uniqueItems",
        ),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "json", "look-ahead"),
        ({"json": {"$ref": "#/nowhere"}}, "json", "nowhere"),
        ({"json": False}, "json", "object"),
        ({"json": "[1]"}, "json", "object"),
        ({"json": "{"}, "json", "line 1"),
        ({"json": {"enum": ["x" * compose_module.MAX_CHARACTERS]}}, "json", "characters"),
        ({"regex": "a(b"}, "regex", "unclosed"),
        ({"regex": "a(?=b)"}, "regex", "look-ahead"),
        (
            {
                "json": {
                    "properties": {"a": {"$id": "x:a", "$ref": "#/$defs/b"}},
                    "$defs": {"b": {}},
                }
            },
            "json",
            "properties.a",
        ),
        ({"grammar": "start: nothing"}, "grammar", "unknown name"),
        ({"grammar": "root ::= nothing"}, "grammar", "enforced"),
        ({"grammar": "§"}, "grammar", "enforced"),
        ({"json_object": True, "whitespace_pattern": "("}, "json_object", "enforced"),
    ],
)
def test_what_cannot_be_enforced_is_named(given, field, says):
    with pytest.raises(RequestError, match=says) as error:
        check(StructuredOutputsParams(**given))
    assert error.value.field == f"structured_outputs.{field}"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"regex": 3}, "structured_outputs.regex"),
        ({"json": {"a": {1, 2}}}, "structured_outputs.json"),
        (
            {"regex": "a", "disable_any_whitespace": True},
            "structured_outputs.disable_any_whitespace",
        ),
    ],
)
def test_parameters_that_say_nothing_clear(given, field):
    with pytest.raises(RequestError) as error:
        StructuredOutputsParams(**given)
    assert error.value.field == field


def test_a_special_token_that_is_not_there(grammars):
    params = StructuredOutputsParams(grammar="start: <|nope|>")
    check(params)  # the front end does not know the tokens
    with pytest.raises(GrammarError, match="nope"):
        begin(grammars, params)


def test_whitespace_is_allowed_as_the_options_say(grammars, tokenizer):
    schema = {"type": "array", "items": {"const": 1}, "minItems": 1}

    def opening(**more):
        state = begin(grammars, StructuredOutputsParams(json=schema, **more), json.dumps(more))
        state.accept(ids(tokenizer, "["))
        return texts(tokenizer, allowed(state))

    assert opening(disable_any_whitespace=True) == {"1"}
    assert opening() == {"1", " ", "\n", "\t", "\r"}
    assert opening(whitespace_pattern="[ ]?") == {"1", " "}
    assert opening(whitespace_pattern=r"(?:\s|\x20){0,2}") == {"1", " ", "\n", "\t", "\r"}


@pytest.mark.parametrize(
    "pattern", ["x*", "[ x]?", r"[\t-\r]*", "[^a]", ".*", r"\u00a0", " " * 1001]
)
def test_whitespace_that_is_none_of_json_is_refused(pattern):
    with pytest.raises(RequestError, match="between tokens of JSON") as error:
        check(StructuredOutputsParams(json={}, whitespace_pattern=pattern))
    assert error.value.field == "structured_outputs.whitespace_pattern"


def test_grammars_of_every_kind_compose():
    for given in (
        {"json": {}},
        {"json": True},
        {"regex": "a"},
        {"choice": ['"', "\\"]},
        {"json_object": True},
    ):
        params = StructuredOutputsParams(**given)
        check(params)
        assert compose(params)


def test_compiled_grammars_are_shared_within_a_salt(grammars):
    """How long a first token takes must not tell whether another key has sent a grammar."""
    params = StructuredOutputsParams(regex="salt[0-9]{3}")
    asked = {salt: dataclasses.replace(request(params), cache_salt=salt) for salt in ("a", "b")}
    assert not grammars.begin(asked["a"])
    wait_for(lambda: grammars.compiled(), "it is not compiled")
    assert not grammars.begin(asked["b"])
    wait_for(lambda: grammars.compiled(), "it is not compiled")
    assert grammars.begin(asked["a"])
    grammars.clear()


def test_findings_of_a_check_are_kept_within_a_salt(monkeypatch):
    params = StructuredOutputsParams(regex="check[0-9]{3}")
    checked = []
    problem = check_module._problem
    monkeypatch.setattr(
        check_module, "_problem", lambda given: checked.append(given) or problem(given)
    )
    for salt in ("a", "b", "a"):
        check(params, salt)
    assert checked == [params, params]
