"""Requests of one JSON schema share masks, which are those of each request's own matcher."""

from __future__ import annotations

import json
import random

import pytest

from slipstream import SamplingParams, StructuredOutputsParams
from slipstream.engine.grammars.compose import compose
from slipstream.engine.grammars.grammar import Grammars
from slipstream.engine.grammars.schema_language import language_of
from slipstream.engine.grammars.schema_states import SchemaStates
from slipstream.engine.grammars.state import GrammarState
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.spec.description import read_spec
from tests.engine.grammars.test_regex_states import allowed, begin, begin_alone, masks_of, own_mask
from tests.engine.grammars.test_structured import make

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "grey"]}, "maxItems": 3},
        "email": {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS = {
    "person": PERSON,
    "many": {"type": "array", "minItems": 10_000, "items": PERSON},
    "open": {"type": "object", "properties": {"ab": {"type": "string"}, "abc": {"type": "null"}}},
    "any": {},
    "numbers": {"type": "array", "items": {"type": ["number", "integer", "boolean"]}, "minItems": 2},
    "long": {"type": "string", "minLength": 200, "maxLength": 900},
    "nested": {
        "type": "object",
        "properties": {
            "rows": {"type": "array", "minItems": 300, "maxItems": 5000, "items": {
                "type": "array", "maxItems": 400, "items": {"type": "integer", "maximum": 12}}}},
        "required": ["rows", "more"],
    },
    "tree": {
        "$defs": {"Node": {"type": "object", "properties": {
            "value": {"type": "integer"}, "next": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
            "required": ["value"], "additionalProperties": False}},
        "$ref": "#/$defs/Node",
    },
    "date": {"type": "array", "items": {"type": "string", "format": "date"}},
    "pattern": {"type": "array", "items": {"type": "string", "pattern": r"^(?:[a-f]{2}\.)+x?$"}},
    "prefixes": {"type": "object", "properties": {"a": {}, "ab": {}, "abc": {}}},
    "listed": {"enum": ["é!", "e", -15, 0, 20, None, True]},
    "long constant": {"type": "array", "items": {"const": "x" * 3000}, "minItems": 1},
    "long pattern": {"type": "string", "pattern": "^" + "ab?" * 1500 + "$"},
    "repeated types": {"type": ["string", "null", "string"]},
    "constants": {"type": "array", "items": {"const": "abcabc"}, "minItems": 400},
}  # fmt: skip
UNKNOWN = (
    {"type": "number", "minimum": 0.5},
    {"type": "integer", "multipleOf": 3},
    {"type": "string", "pattern": "[^a]+"},
    {"type": "string", "pattern": "^é$"},
    {"allOf": [{"type": "string"}, {"maxLength": 3}]},
    {"type": "object", "patternProperties": {"^a": {}}},
    {"type": "object", "properties": {'a"b': {}}},
    {"type": "array", "prefixItems": [{}]},
    {"type": "string", "x-own": 1},
)
NO_SPACE = {"disable_any_whitespace": True}


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer.for_model(read_spec(tiny_model))


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(lambda: tokenizer, 288, lambda tokenizer: tokenizer.eos_token_ids)


def walk(grammars, schema, *, seed=0, num_rows=6, num_steps=40, **more):
    """Draw answers at random. Each mask and each run of forced tokens must be that of a matcher of its own."""
    grammars.clear()
    names = [str(i) for i in range(num_rows)]
    begin(grammars, names, StructuredOutputsParams(json=json.dumps(schema), **more))
    states = grammars._states["0"].regex
    assert isinstance(states, SchemaStates)
    rng, left = random.Random(seed), names
    plain = {name: begin_alone(grammars, name) for name in names}
    for _ in range(num_steps):
        for name in left:
            assert grammars.forced(name, 0) == plain[name].forced(), name
        _, bits, ended = masks_of(grammars, left)
        given = []
        for name, row in zip(left, bits, strict=True):
            assert name not in ended
            assert (row == own_mask(plain[name], bits.shape[1])).all(), name
            tokens = allowed(row)
            ending = [t for t in tokens if t == 1]
            if ending and (tokens == ending or rng.random() < 0.3):
                continue
            token = rng.choice([t for t in tokens if t != 1])
            plain[name].accept([token])
            given.append((name, [token]))
        counts = grammars.accept_all(given)
        finished = {name for (name, _), count in zip(given, counts, strict=True) if count}
        assert finished == {name for name, _ in given if plain[name].is_finished}
        left = [name for name, _ in given if name not in finished]
        if not left:
            break
    followed = sum(grammars._states[name].spot is not None for name in names)
    grammars.clear()
    return states, followed


@pytest.mark.parametrize(
    "more", [{}, NO_SPACE, {"whitespace_pattern": " ?"}], ids=["", "compact", "own"]
)
@pytest.mark.parametrize("name", SCHEMAS)
def test_shared_masks_and_forced_tokens_are_those_of_each_matcher(grammars, name, more):
    for seed in range(3):
        _, followed = walk(grammars, SCHEMAS[name], seed=seed, **more)
        assert followed == 6


def made_schema(rng, depth=0):
    """A schema of known keywords, at random."""
    names = rng.sample(["a", "ab", "abc", "b", "x y", "id", "type"], 4)
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "any"]
    kind = rng.choice(kinds + ["object", "array", "anyOf"] * 2 * (depth < 3))
    length = lambda: rng.choice([0, 1, 2, 30, 140, 700])
    match kind:
        case "string":
            least, most = sorted([length(), length()])
            return {"type": "string"} | rng.choice(
                [{}, {"maxLength": most}, {"minLength": least, "maxLength": most}]
            )
        case "integer":
            low, high = sorted(
                rng.choice([0, 1, -1, 5, 9, 10, 37, 99, 100, 1234, -250, -9, 10**9]) for _ in "ab"
            )
            return {"type": "integer"} | rng.choice(
                [{}, {"minimum": low}, {"maximum": high}, {"minimum": low, "maximum": high}]
            )
        case "enum":
            return {"enum": rng.sample(["a", "ab", "é", 1, 12, -3, None, False, "x y"], 3)}
        case "any":
            return {}
        case "object":
            own = {name: made_schema(rng, depth + 1) for name in names[: rng.randint(0, 3)]}
            more = rng.choice([False, False, True, {"type": "integer"}])
            required = [name for name in own if rng.random() < 0.5]
            return {
                "type": "object",
                "properties": own,
                "required": required,
                "additionalProperties": more,
            }
        case "array":
            least, most = sorted([length(), length()])
            bounds = rng.choice(
                [{}, {"minItems": least}, {"maxItems": most}, {"minItems": least, "maxItems": most}]
            )
            return {"type": "array", "items": made_schema(rng, depth + 1), **bounds}
        case "anyOf":
            return {"anyOf": [made_schema(rng, depth + 1) for _ in range(2)]}
    return {"type": kind}


@pytest.mark.parametrize("seed", range(12))
def test_shared_masks_of_random_schemas_are_those_of_each_matcher(grammars, seed):
    rng = random.Random(seed)
    walk(grammars, made_schema(rng), seed=seed, num_rows=4, **rng.choice([{}, NO_SPACE]))


@pytest.mark.parametrize("schema", UNKNOWN, ids=json.dumps)
def test_schemas_with_other_keywords_have_no_states(schema):
    assert language_of(compose(StructuredOutputsParams(json=json.dumps(schema))), 16) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": 5},
        {"type": 5},
        {"type": "string", "pattern": 3},
        {"type": "string", "pattern": "^a{" + "9" * 5000 + "}$"},
        {"type": "object", "properties": ["a"]},
        {"type": "object", "required": [{}]},
        {"type": "array", "minItems": "3"},
        {"$ref": "#/$defs/a", "$defs": 5},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_values_of_wrong_types_are_left_to_the_library_to_refuse(schema):
    schema = {**schema, "x-guidance": {"whitespace_flexible": False}}
    assert language_of(json.dumps({"grammars": [{"json_schema": schema}]}), 16) is None


def test_a_text_nested_ever_deeper_goes_on_by_its_own_matcher(grammars, tokenizer):
    grammars.clear()
    begin(grammars, ["a"], StructuredOutputsParams(json="{}"))
    [token] = tokenizer.encode("[", add_special_tokens=False)
    for i in range(1500):
        if i % 100 == 0:
            masks_of(grammars, ["a"])
        grammars.accept("a", [token])
    assert grammars._states["a"].spot is None
    _, bits, _ = masks_of(grammars, ["a"])
    assert token in allowed(bits[0])
    grammars.clear()


def test_a_type_given_many_times_is_written_once():
    inner = {"enum": ["x" * 2000]}
    for name in "abc":
        inner = {"type": ["object"] * 200, "properties": {name: inner}}
    language = language_of(compose(StructuredOutputsParams(json=json.dumps(inner))), 16)
    assert language is not None
    assert language.start() is not None


def test_rows_far_apart_in_a_long_list_share_their_masks(grammars, tokenizer):
    """Counts of items and characters that no token can bring to their bounds make no difference."""
    grammars.clear()
    schema = {"type": "array", "minItems": 5000, "items": {"type": "string", "maxLength": 4000}}
    begin(grammars, ["a", "b"], StructuredOutputsParams(json=json.dumps(schema)))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    masks_of(grammars, ["a", "b"])
    for name, text in (("a", '["w","x'), ("b", '["x","some","more","y')):
        for token in encode(text):
            grammars.accept(name, [token])
    mask, _, _ = masks_of(grammars, ["a", "b"])
    assert mask.which[0] == mask.which[1]
    a, b = (grammars._states[name].spot for name in "ab")
    assert a.state is b.state
    assert a.counts != b.counts
    grammars.clear()


def test_a_state_asks_one_matcher_for_all(grammars, tokenizer, monkeypatch):
    grammars.clear()
    names = [str(i) for i in range(20)]
    schema = PERSON | {"title": "not asked before"}
    begin(grammars, names, StructuredOutputsParams(json=json.dumps(schema)))
    asked = []
    compute = Grammars._compute
    monkeypatch.setattr(
        Grammars, "_compute", lambda self, m, bits: (asked.append(len(m)), compute(self, m, bits))
    )
    for token in [None, *tokenizer.encode('{"name": "Al', add_special_tokens=False)]:
        if token is not None:
            grammars.accept_all([(name, [token]) for name in names])
        masks_of(grammars, names)
    assert set(asked) == {1}
    assert sum(bool(state.untaken) for state in grammars._states.values()) >= 19
    grammars.clear()


def test_states_go_back_with_the_tokens(grammars, tokenizer):
    grammars.clear()
    begin(grammars, ["a"], StructuredOutputsParams(json=json.dumps(PERSON)))
    state, plain = grammars._states["a"], begin_alone(grammars, "a")
    tokens = tokenizer.encode('{"name": "Al", "a', add_special_tokens=False)
    for token in tokens:
        masks_of(grammars, ["a"])
        state.accept([token])
        plain.accept([token])
    for _ in tokens:
        _, bits, _ = masks_of(grammars, ["a"])
        assert (bits[0] == own_mask(plain, bits.shape[1])).all()
        state.rollback(1)
        plain.rollback(1)
    grammars.clear()


SETTINGS = {
    "drawn": {},
    "greedy": {"temperature": 0},
    "several": {"n": 3},
    "penalised": {"repetition_penalty": 1.5, "logit_bias": {70: 5.0}},
    "log-probabilities": {"logprobs": 2},
    "bad words": {"bad_words": ["q", "zz"]},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "more", [{}, {"speculative_model": "ngram", "num_speculative_tokens": 3}], ids=["", "drafts"]
)
def test_answers_are_those_without_shared_masks(tiny_model, monkeypatch, name, more):
    grammars = [StructuredOutputsParams(json=json.dumps(s)) for s in SCHEMAS.values()]
    grammars += [StructuredOutputsParams(json=json.dumps(PERSON), **NO_SPACE)] * 2
    params = [
        SamplingParams(**{"max_tokens": 24, "seed": i, "structured_outputs": own, **SETTINGS[name]})
        for i, own in enumerate(grammars)
    ]
    prompts = [f"hello the {i % 3}" for i in range(len(grammars))]

    def answers():
        found = llm.generate(prompts, params, progress=False)
        return [
            (c.text, c.token_ids, c.finish_reason, c.logprobs) for r in found for c in r.outputs
        ]

    with make(tiny_model, **more) as llm:
        shared = [answers(), answers()]  # the second time the states are known
    init = GrammarState.__init__

    def alone(self, *given, **named):
        init(self, *given, **named)
        self.regex = self.spot = None

    monkeypatch.setattr(GrammarState, "__init__", alone)
    with make(tiny_model, **more) as llm:
        assert shared == [answers()] * 2
