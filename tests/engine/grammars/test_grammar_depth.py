"""Grammars that are too deep for llguidance's stack are refused, whatever makes them deep."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from slipstream.engine.grammars import compose
from slipstream.engine.grammars import depth as grammar_depth
from slipstream.engine.grammars.check import check
from slipstream.engine.grammars.grammar import Grammars
from slipstream.engine.grammars.state import GrammarError
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import RequestError
from slipstream.messages.requests import EngineRequest
from slipstream.params.answer_forms import StructuredOutputsParams
from slipstream.params.sampling import SamplingParams
from slipstream.spec.description import read_spec
from tests.support.waiting import PATIENCE_S


def chain(count, link, end=None, where="$defs"):
    """`link(reference)` is a schema that refers to the next."""
    defs = {f"d{i}": link({"$ref": f"#/{where}/d{i + 1}"}) for i in range(count)}
    return {"$ref": f"#/{where}/d0", where: {**defs, f"d{count}": end or {"type": "string"}}}


def nested(count, begin, end):
    return begin * count + '{"type":"string"}' + end * count


LINKS = {
    "references": lambda r: r,
    "properties": lambda r: {"type": "object", "properties": {"a": r}},
    "anyOf": lambda r: {"anyOf": [r, {"type": "null"}]},
    "allOf": lambda r: {"allOf": [r, {"minLength": 1}]},
    "keywords beside": lambda r: {**r, "minLength": 1},
    "items": lambda r: {"type": "array", "items": r},
    "prefixItems": lambda r: {"type": "array", "prefixItems": [r]},
    "additionalProperties": lambda r: {"additionalProperties": r},
    "patternProperties": lambda r: {"patternProperties": {"^a": r}},
    "nested": lambda r: {"items": {"items": {"items": r}}},
}
ANCHORS = {
    "$ref": "#d0",
    "$defs": {
        **{f"d{i}": {"$anchor": f"d{i}", "$ref": f"#d{i + 1}"} for i in range(1500)},
        "d1500": {"$anchor": "d1500"},
    },
}
IDS = {
    "$ref": "/d0",
    "$defs": {
        **{f"d{i}": {"$id": f"/d{i}", "items": {"$ref": f"/d{i + 1}"}} for i in range(1500)},
        "d1500": {"$id": "/d1500"},
    },
}
SCHEMAS = {
    **{name: chain(1500, link) for name, link in LINKS.items()},
    "definitions": chain(1500, LINKS["references"], where="definitions"),
    "another place": chain(1500, LINKS["references"], where="x"),
    "a cycle": chain(1500, LINKS["properties"], {"$ref": "#/$defs/d0"}),
    "anchors": ANCHORS,
    "ids": IDS,
    "nested arrays": nested(2000, '{"items":', "}"),
    "nested anyOf": nested(2000, '{"anyOf":[', "]}"),
    "nested objects": nested(2000, '{"type":"object","properties":{"a":', "}}"),
    "nested 100,000 deep": '{"const":' + "[" * 100_000 + "]" * 100_000 + "}",
    "a nested constant": {"const": json.loads("[" * 200 + "]" * 200)},
    "a nested pattern": {"type": "string", "pattern": "(" * 2000 + "a" + ")" * 2000},
    "a nested name": {"patternProperties": {"(" * 2000 + "a" + ")" * 2000: {}}},
}


def rules(count, form, end, start="start: r0\n"):
    made = (form.format(i, i + 1) for i in range(count))
    return start + "\n".join(made) + "\n" + end.format(count)


GRAMMARS = {
    "rules": rules(3000, "r{}: r{}", 'r{}: "a"'),
    "rules in groups": rules(3000, 'r{}: "b" ("x" | r{})*', 'r{}: "a"'),
    "rules with attributes": rules(3000, "r{}[capture]: r{}", 'r{}: "a"'),
    "terminals": rules(3000, "R{}: R{}", 'R{}: "a"', "start: R0\n"),
    "what is ignored": rules(3000, "R{}: R{}", 'R{}: "a"', 'start: "x"\n%ignore R0\n'),
    "a cycle": rules(3000, 'r{}: "x" r{}', 'r{}: "a" | r0'),
    "llama.cpp's rules": rules(3000, 'r{} ::= "x" r{}', 'r{} ::= "a"', "root ::= r0\n"),
    "a schema": "start: %json " + json.dumps(chain(1500, LINKS["references"])),
    "an inner grammar": "start: %lark {\n" + rules(3000, "r{}: r{}", 'r{}: "a"') + "\n}",
    "groups": "start: " + "(" * 300 + '"a"' + ")" * 300,
    "llama.cpp's groups": "root ::= " + "(" * 300 + '"a"' + ")" * 300,
    "a regular expression": "start: /" + "(" * 3000 + "a" + ")" * 3000 + "/",
}
TOO_DEEP = [
    *(({"json": schema}, name) for name, schema in SCHEMAS.items()),
    *(({"grammar": text}, name) for name, text in GRAMMARS.items()),
    ({"regex": "(" * 3000 + "a" + ")" * 3000}, "groups"),
    ({"regex": "(?:a|" * 3000 + "a" + ")" * 3000}, "alternatives"),
    ({"regex": "a" + "*" * 3000}, "repetitions"),
    ({"json": {}, "whitespace_pattern": "(" * 3000 + " " + ")" * 3000}, "whitespace"),
    ({"json": {}, "around": rules(3000, "r{}: r{}", 'r{}: "a" @answer')}, "around"),
]


@pytest.mark.parametrize(
    "given", [given for given, _ in TOO_DEEP], ids=[f"{next(iter(g))}: {n}" for g, n in TOO_DEEP]
)
def test_what_is_too_deep_is_refused_with_the_field_and_a_remedy(given):
    with pytest.raises(RequestError, match=r"deep.*(shorten|move|take out|make)") as error:
        check(StructuredOutputsParams(**given))
    assert error.value.field == f"structured_outputs.{list(given)[-1]}"
    assert len(error.value.message) < 300


def doubled(count, end, start="start: A{0}\n", form="A{}: A{} A{}"):
    links = "\n".join(form.format(i, i - 1, i - 1) for i in range(1, count + 1))
    return start.format(count) + end + "\n" + links


OPTIONAL = [
    {"regex": "a?" * 5000},
    {"regex": "a*" * 5000},
    {"regex": "(ab|)" * 5000},
    {"regex": "(?:|ab)" * 5000},
    {"regex": "a{0,1}" * 5000},
    {"json": {"type": "string", "pattern": "[ab]?" * 5000}},
    {"grammar": "start: T\nT: " + "A " * 5000 + '\nA: "a"?'},
    {"grammar": "start: T\nT: " + "/a?/ " * 5000},
    {"grammar": "start: T\nT: " + '["a"] ' * 5000},
    {"grammar": "start: T\nT: " + '("a" | ) ' * 5000},
    {"grammar": doubled(40, 'A0: "a"?')},
    {"grammar": doubled(40, 'a0 ::= "a"?', "root ::= a{0}\n", "a{} ::= a{} a{}")},
]


@pytest.mark.parametrize("given", OPTIONAL, ids=lambda given: str(given)[:60])
def test_a_terminal_of_many_optional_parts_is_refused(given):
    """llguidance takes memory by the square of their number, gigabytes of 20,000."""
    with pytest.raises(RequestError, match="more than 4000 parts of one terminal are optional"):
        check(StructuredOutputsParams(**given))


TREE = {
    "$defs": {"t": {"type": "object", "properties": {"c": {"$ref": "#/$defs/t"}}}},
    "$ref": "#/$defs/t",
}


@pytest.mark.parametrize(
    "given",
    [
        {"json": TREE},
        {"json": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#"}}]}},
        {"json": chain(60, LINKS["properties"], {"anyOf": [{"$ref": "#"}, {"type": "null"}]})},
        {"json": chain(390, LINKS["references"])},
        {"json": chain(190, LINKS["patternProperties"])},
        {"json": nested(55, '{"type":"object","properties":{"a":', "}}")},
        {"json": {"enum": [f"v{i}" for i in range(3000)]}},
        {"json": {"anyOf": [{"const": f"v{i}"} for i in range(3000)]}},
        {"json": {"properties": {"$ref": {"type": "string"}, "properties": {"type": "null"}}}},
        {"grammar": rules(390, 'r{}: "x" r{}', 'r{}: "a"')},
        {"grammar": 'start: "a" | "(" start ")"'},
        {"grammar": 'start: "(((" /[(]+\\(/ # ((((\n'},
        {"grammar": 'root ::= "(" root ")" | [^"(] # ('},
        {"grammar": 'start: %lark {\nstart: x\nx: "a"\n} x\nx: "b"'},
        {"regex": "(" * 200 + "a" + ")" * 200},
        {"regex": r"[?]\?(?:a)(?i)b" * 5000},
        {"regex": "|".join(f"a{i}b" for i in range(5000))},
        {"regex": "(a?b?){0,20000}"},
        {"grammar": "start: T\nT: " + " | ".join(f'"v{i}"' for i in range(5000))},
        {"grammar": doubled(12, 'A0: "a"')},
        {"regex": r"[(]{300}\({300}" + "(a)" * 1000},
    ],
    ids=lambda given: str(given)[:60],
)
def test_what_is_not_too_deep_is_taken(given):
    check(StructuredOutputsParams(**given))


def test_what_is_taken_can_be_compiled_and_used_on_small_stacks(tiny_model):
    """A chain as deep as may be is followed, copied and freed by this thread."""
    tokenizer = Tokenizer.for_model(read_spec(tiny_model))
    grammars = Grammars(lambda: tokenizer, 288, lambda tokenizer: tokenizer.eos_token_ids)
    params = StructuredOutputsParams(json=chain(199, LINKS["properties"]))
    sampling = SamplingParams(structured_outputs=params)
    asked = EngineRequest(
        request_id="r", prompt_token_ids=(5,), sampling=sampling, eos_token_ids=(1,), max_tokens=9
    )
    assert not grammars.begin(asked)
    until = time.monotonic() + PATIENCE_S
    while not (found := grammars.compiled()):
        assert time.monotonic() < until
        time.sleep(0.001)
    assert found == [("r", None)]
    state = grammars._states["r"].copy()
    state.accept(tokenizer.encode('{"a": {', add_special_tokens=False))
    del state
    grammars.clear()
    grammars._compiled.clear()


SELF = [
    {"json": {"$ref": "#"}},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    {"grammar": "start: start"},
    {"grammar": "root ::= root"},
]  # fmt: skip


@pytest.mark.parametrize("given", SELF, ids=str)
def test_a_grammar_without_an_end_is_named(tiny_model, given):
    tokenizer = Tokenizer.for_model(read_spec(tiny_model))
    grammars = Grammars(lambda: tokenizer, 288, lambda tokenizer: tokenizer.eos_token_ids)
    with pytest.raises(GrammarError, match="the grammar has no end: it refers to itself"):
        grammars.compiler.compile(StructuredOutputsParams(**given))


def test_measuring_does_not_recurse(monkeypatch):
    """A chain of any depth takes no Python frames."""
    monkeypatch.setattr(grammar_depth, "MAX_DEPTH", 10**9)
    grammar_depth.check_grammar(rules(20_000, "r{}: r{}", 'r{}: "a"'))
    grammar_depth.check_schema(chain(20_000, LINKS["references"]))
    assert compose.MAX_CHARACTERS < 2**20


BEGUN = {
    "texts": 'start: "\\' * 20_000,
    "regular expressions": "start: " + "/\\" * 130_000,
    "empty lines": "x" + "\n" * 250_000 + "x",
    "llama.cpp's texts": "root ::= " + '"\\' * 130_000,
    "llama.cpp's classes": "root ::= " + "[" * 250_000,
}


@pytest.mark.parametrize("text", BEGUN.values(), ids=BEGUN)
def test_what_is_begun_often_and_never_ends_is_read_once(text):
    """The check takes time in proportion to the length. In proportion to its square it would take half an
    hour, in which no other thread runs."""
    check_in_child = (
        f"from slipstream.engine.grammars.depth import check_grammar; check_grammar({text!r})"
    )
    subprocess.run([sys.executable, "-"], input=check_in_child.encode(), check=True, timeout=60)


@pytest.mark.parametrize("text", BEGUN.values(), ids=BEGUN)
def test_what_is_begun_and_never_ends_is_refused(text):
    with pytest.raises(RequestError) as error:
        check(StructuredOutputsParams(grammar=text))
    assert error.value.field == "structured_outputs.grammar"
