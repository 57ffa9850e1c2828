"""Promises of a schema, judged by a JSON parser and by jsonschema, not by the grammar itself."""

from __future__ import annotations

import datetime
import json
import math
import random
import tracemalloc
import warnings
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from jsonschema.validators import validator_for

from slipstream.engine.grammars.check import check
from slipstream.engine.grammars.compose import compose
from slipstream.engine.grammars.schema_promises import promise, translate
from slipstream.engine.text.tool_formats import FORMATS
from slipstream.engine.text.tool_formats.base import Tool, Writer
from slipstream.engine.text.tool_formats.values import text_rule
from slipstream.errors import RequestError
from slipstream.params.answer_forms import StructuredOutputsParams

SUITE = json.loads((Path(__file__).parents[2] / "data/json_schema_suite.json").read_text("utf-8"))
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
END = 256
INTEGER, STRING = {"type": "integer"}, {"type": "string"}


class Bytes:
    """A vocabulary of bytes, so that an answer can be spelled in every way."""

    eos_token_id, bos_token_id, special_token_ids = END, None, (END,)
    tokens = [bytes([i]) for i in range(256)] + [b"</s>"]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


VOCABULARY = llguidance.LLTokenizer(
    llguidance.TokenizerWrapper(Bytes()), n_vocab=END + 1, eos_token=[END]
)
LIMITS = llguidance.LLParserLimits(
    max_grammar_size=250_000, initial_lexer_fuel=1_000_000, verbose_errors=False
)


def matcher(grammar: str) -> Any:
    made = llguidance.LLMatcher(VOCABULARY, grammar, log_level=0, limits=LIMITS)
    assert not made.is_error(), made.get_error()
    return made


def of_schema(schema: Any) -> Any:
    return matcher(compose(StructuredOutputsParams(json=schema)))


def accepts(made: Any, text: str) -> bool:
    made.reset()
    given = text.encode()
    return made.try_consume_tokens(list(given)) == len(given) and made.is_accepting()


def judge(schema: Any) -> Any:
    made = validator_for(schema, default=jsonschema.Draft202012Validator)
    return made(schema, format_checker=made.FORMAT_CHECKER)


# --- Instances in all spellings -------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    units = text.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def strings(text: str) -> Iterator[str]:
    plain = json.dumps(text, ensure_ascii=False)
    yield plain
    if text:
        yield f'"{escaped(text)}"'
        yield f'"{escaped(text).upper().replace(chr(92) + "U", chr(92) + "u")}"'
        yield f'"{escaped(text[0])}{json.dumps(text[1:], ensure_ascii=False)[1:]}'
        yield f'{json.dumps(text[:-1], ensure_ascii=False)[:-1]}{escaped(text[-1])}"'
        yield plain.replace("/", "\\/")


def numbers(value: float) -> Iterator[str]:
    yield json.dumps(value)
    text = repr(value)
    if "e" not in text:
        yield from (text + "e0", text + "E-0", text + "e+0")
        yield from ((text + "0", text + "000000") if "." in text else (text + ".0", text + "0e-1"))
    if value == 0:
        yield from ("-0", "-0.0", "0e5")
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        yield str(int(value))


def spelled(value: Any) -> Iterator[str]:
    """JSON texts, most of which a parser reads as `value`."""
    if value is None or isinstance(value, bool):
        yield json.dumps(value)
    elif isinstance(value, str):
        yield from strings(value)
    elif isinstance(value, int | float):
        yield from numbers(value)
    elif isinstance(value, list):
        items = [list(islice(spelled(x), 6)) for x in value]
        plain = [options[0] for options in items]
        yield f"[{','.join(plain)}]"
        yield f"[ {' , '.join(plain)} ]"
        for i, options in enumerate(items):
            for other in options[1:]:
                yield f"[{','.join([*plain[:i], other, *plain[i + 1 :]])}]"
    else:
        yield from objects(value)


def objects(value: dict[str, Any]) -> Iterator[str]:
    members = [(list(strings(k)), list(islice(spelled(v), 6))) for k, v in value.items()]
    plain = [(keys[0], values[0]) for keys, values in members]

    def text(pairs: list[tuple[str, str]]) -> str:
        return "{" + ",".join(f"{k}:{v}" for k, v in pairs) + "}"

    yield text(plain)
    yield text(plain[::-1])
    yield "{ " + " , ".join(f"{k} : {v}" for k, v in plain) + " }"
    for i, (keys, values) in enumerate(members):
        before, after = plain[:i], plain[i + 1 :]
        for key in keys:
            for v in values:
                yield text([*before, (key, v), *after])
                yield text([*before, *after, (key, v)])
            for other in (
                "1",
                '"x"',
                "null",
                "{}",
                "[]",
                "1.5",
            ):  # of two equal names the last counts
                yield text([(keys[0], other), *before, *after, (key, values[0])])
                yield text([*before, (keys[0], other), *after, (key, values[0])])


def is_same(text: str, value: Any) -> bool:
    try:
        return bool(json.loads(text) == value)
    except ValueError:
        return False


@pytest.mark.parametrize(("draft", "least"), [("draft2020-12", 202), ("draft7", 185)])
def test_no_invalid_instance_of_the_suite_is_accepted_in_any_spelling(draft, least):
    """An instance on which the suite and jsonschema differ (about annotations) counts as invalid."""
    wrong, taken = [], 0
    for name, groups in SUITE.items():
        if (
            not name.startswith(draft) or name == "draft7/optional/content"
        ):  # annotations, says jsonschema
            continue
        for group in groups:
            if len(group) == 2:  # a group of draft 7 that is one of 2020-12, too
                group = SUITE[group[0]][group[1]]
            description, given, tests = group
            schema = {} if given is True else given
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            try:
                made = of_schema(schema)
            except (RequestError, AssertionError):
                continue
            taken += 1
            wrong += [
                (name, description, text)
                for valid, instance in tests
                if not valid
                for text in dict.fromkeys(spelled(instance))
                if is_same(text, instance) and accepts(made, text)
            ]
    assert not wrong
    assert taken >= least, "schemas that were taken must stay so"


# --- Answers of a model that looks for trouble ----------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "exclusiveMinimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", 1, None, True]}, "maxItems": 3},
    },
    "required": ["name"],
}
WALKED: list[Any] = [
    {"type": "object", "properties": {"a": INTEGER}},
    {"type": "object", "properties": {"a": INTEGER}, "required": ["a", "b"],
        "additionalProperties": STRING},
    {"type": "object", "patternProperties": {"^a": INTEGER, "^b": STRING},
        "additionalProperties": {"type": "null"}},
    {"type": "object", "patternProperties": {"a$": INTEGER}, "properties": {"ba": {"maximum": 3}},
        "required": ["ba"]},
    {"type": "object", "properties": {"a\nb": INTEGER, "\x01": INTEGER, 'q"': STRING,
        "é": INTEGER}},
    {"allOf": [{"properties": {"a": INTEGER}, "required": ["a"]},
        {"properties": {"a": {"maximum": 9.5}}}], "type": "object"},
    {"$defs": {"T": {"type": "object", "properties": {"k": {"$ref": "#/$defs/T"}, "v": INTEGER}}},
        "$ref": "#/$defs/T"},
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": c}, "v": v}, "required": ["k"]}
            for c, v in (("a", INTEGER), ("b", STRING))
        ]
    },
    PERSON,
    {"type": "object", "minProperties": 1, "additionalProperties": INTEGER},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 0},
    {"exclusiveMinimum": 0.1, "maximum": 0.3, "type": ["number", "null"]},
    {"type": "number", "multipleOf": 0.5, "exclusiveMinimum": 0, "maximum": 3},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"enum": [1, 1.5, -0.0, "\x00", [1, {"a": 2}], {"b": None}, False]},
    {"type": "string", "pattern": r"^\S+$"},
    {"type": "string", "pattern": r"^[^\s\w]{1,3}$"},
    {"type": "string", "pattern": "^.{2,4}$"},
    {"type": "string", "pattern": "^[[a]b]$"},
    {"type": "string", "pattern": "^[a&&b]+$"},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "date", "pattern": "^2"},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [INTEGER],
        "allOf": [{"minItems": 1}], "additionalItems": {"type": "null"}},
    {"type": "array", "prefixItems": [INTEGER], "items": STRING, "additionalItems": False},
    {"$schema": "http://json-schema.org/draft-04/schema#", "type": "object",
        "properties": {"a": {"type": "number", "minimum": 0, "exclusiveMinimum": True}},
        "required": ["a"]},
    {},
]  # fmt: skip


def walk(made: Any, rng: random.Random, most: int = 300) -> str | None:
    """A complete answer of allowed bytes, drawn with a taste for escapes, digits, quotes or what is not ASCII."""
    made.reset()
    answer, taste = bytearray(), rng.choice(("", "\\u006", "0123456789.-eE", '"}],', "é"))
    while len(answer) < most:
        bits = np.unpackbits(np.frombuffer(made.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(i) for i in np.flatnonzero(bits[:END])]
        if made.is_accepting() and (not allowed or rng.random() < 0.3):
            return answer.decode()
        late = len(answer) > most // 2
        weights = [
            (0.05 if chr(i) in " \t\n\r" else 1.0)
            * (8 if chr(i) in taste or (i >= 0x80 and taste == "é") else 1)
            * (50 if late and chr(i) in '"}],' else 0.02 if late and chr(i) in "[{" else 1)
            for i in allowed
        ]
        token = rng.choices(allowed, weights)[0]
        if not made.consume_token(token):
            return None
        answer.append(token)
    return None


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("schema", WALKED, ids=lambda schema: json.dumps(schema)[:70])
def test_what_any_model_draws_is_valid_for_jsonschema(schema):
    made, judged, rng, complete = of_schema(schema), judge(schema), random.Random(7), 0
    for _ in range(40):
        text = walk(made, rng)
        if text is not None:
            complete += 1
            assert judged.is_valid(json.loads(text)), text
    assert complete > 3


# --- One by one -----------------------------------------------------------------------------------------------------

OPEN = {"type": "object", "properties": {"a": INTEGER}}


@pytest.mark.parametrize(
    ("schema", "invalid", "valid"),
    [
        (
            OPEN,
            ['{"\\u0061":"x"}', '{"a":1,"\\u0061":"x"}', '{"a":1,"a":"x"}'],
            ['{"a":1,"b":"x"}'],
        ),
        (
            {"$defs": {"b": OPEN}, "$ref": "#/$defs/b"},
            ['{"\\u0061":"x"}'],
            ['{"é":"x"}', '{"q\\n\\"":1}'],
        ),
        ({"components": {"b": OPEN}, "$ref": "#/components/b"}, ['{"\\u0061":"x"}'], ['{"a":1}']),
        (
            {"properties": {"a\nb": INTEGER}},
            ['{"a\\u000ab":"x"}', '{"a\\u000Ab":"x"}'],
            ['{"a\\nb":1}'],
        ),
        (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
            ["0", "0.0", "-0", "0." + "0" * 400 + "1"],
            ["0.1", "0.5"],
        ),
        (
            {"type": "number", "exclusiveMaximum": 0.5},
            ["0.5", "0.49999999999999999999"],
            ["0.4999", "0.4", "0.49", "0.1234567890123", "-7"],
        ),
        (
            {"exclusiveMinimum": -1, "exclusiveMaximum": 1, "minimum": -2},
            ["1", "-1", "-1.0", "0.99999999999999999999"],
            ["0.9", "-0.9", "0", '"x"'],
        ),
        ({"exclusiveMaximum": 1, "maximum": 0.5}, ["0.6", "0.9"], ["0.5"]),
        (
            {"exclusiveMaximum": 1, "multipleOf": 0.01, "minimum": 0},
            ["1", "1.00", "0.999"],
            ["0.9", "0.99", "0"],
        ),
        (
            {"exclusiveMinimum": 9, "type": "number"},
            ["9", "9.000000000000000000001"],
            ["9.001", "10", "1000"],
        ),
        ({"type": "integer", "maximum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53), "-5"]),
        (
            {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
            ["-1", str(2**64)],
            ["0", str(2**62)],
        ),
        ({"type": "number", "minimum": -0.9999999999999999}, ["-1", "-1.0"], ["-0.98", "3"]),
        (
            {"format": "date"},
            ['"2021-02-29"', '"1900-02-29"', '"0000-01-01"', '"2021-04-31"'],
            ['"2024-02-29"', '"2000-02-29"', "1"],
        ),
        (
            {"format": "time", "type": "string"},
            ['"22:59:60Z"', '"23:59:60+01:00"'],
            ['"23:59:60Z"', '"22:59:59.5+01:30"'],
        ),
        (
            {"format": "date-time", "type": "string"},
            ['"2021-02-29T00:00:00Z"', '"2021-03-31T23:59:60Z"'],
            ['"1998-12-31T23:59:60Z"'],
        ),
        (
            {"format": "hostname", "type": "string"},
            [f'"{"a" * 63}{("." + "a" * 63) * 3}"', '"xn--X"'],
            ['"a--b.c-d"', '"abc"', '"ab"'],
        ),
        ({"format": "date", "pattern": "^20", "maxLength": 10}, ['"1999-01-01"'], ['"2021-01-01"']),
        ({"pattern": r"^\S$"}, ['"\ufeff"', '"\\u001c"', '"\x85"'], ['"a"', '"é"']),
        ({"pattern": "^a.b$"}, ['"a\\rb"', '"a\u2028b"', '"a\\nb"'], ['"a b"']),
        (  # `$` of Python comes before a last line end, too
            {"type": "object", "patternProperties": {"^.b$": INTEGER, r"^\d+$": INTEGER}},
            ['{"ab\\n":"x"}', '{"1\\n":1}', '{"ab":"x"}'],
            ['{"ab":1,"abb\\n":""}'],
        ),
        (
            {"items": [INTEGER], "allOf": [{}], "additionalItems": False, "type": "array"},
            ["[1,2]"],
            ["[1]"],
        ),
        (
            {
                "type": "object",
                "patternProperties": {"^a": INTEGER},
                "additionalProperties": STRING,
            },
            ['{"\\u0061b":"x"}'],
            ['{"ab":1,"b":"x"}'],
        ),
        (  # as zod writes a record
            {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": INTEGER,
            },
            ['{"a":"x"}', "1"],
            ['{"a":1,"b":2}', "{}"],
        ),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_an_answer_is_taken_as_a_parser_reads_it(schema, invalid, valid):
    made = of_schema(schema)
    assert [text for text in invalid if accepts(made, text)] == []
    assert [text for text in valid if not accepts(made, text)] == []


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (
            {"properties": {"a": {"minProperties": 2}}},
            r"minProperties 2.*required.*properties\.a\)",
        ),
        ({"properties": {"a": {"const": 2**53 + 1}}}, r"9007199254740993.*properties\.a\)"),
        ({"enum": [0.30000000000000004]}, r"0\.30000000000000004"),
        ({"minimum": 2**63, "type": "integer"}, "64 bits"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 196608}]}, "multipleOf"),
        ({"multipleOf": 0.123456789}, "multipleOf 0.123456789"),
        (
            {"properties": {"a": INTEGER, "b": {"const": "\x00"}}},
            "control characters.*additionalProperties",
        ),
        ({"x-guidance": {"lenient": True}}, "x-guidance.*whitespace_pattern"),
        ({"prefixItems": [INTEGER], "items": [STRING], "additionalItems": False}, "prefixItems"),
        (
            {"$schema": "http://json-schema.org/draft-03/schema#", "extends": INTEGER},
            "extends|specification|draft",
        ),
        (
            {
                "properties": {
                    "a": {"$schema": "http://json-schema.org/draft-04/schema#", "propertyNames": {}}
                }
            },
            r"propertyNames.*properties\.a\)",
        ),
        (
            {
                "components": {"$id": "x:y", "A": {"$ref": "#/B"}, "B": INTEGER},
                "B": STRING,
                "$ref": "#/components/A",
            },
            r"own \$id",
        ),
        *(
            ({key: 10**400}, "100000.*larger than doubles")
            for key in ("minimum", "multipleOf", "const")
        ),
        ({"exclusiveMaximum": 5, "multipleOf": 10**400}, "larger than doubles"),
        ({"required": [{}], "minProperties": 3}, "minProperties 3"),
        ({"$id": "x:" + "a/" * 1000, "items": {"$ref": "y"}}, r"\$id has 2002 characters"),
        ({"type": "string", "pattern": "^a++$"}, "quantifier"),
        ({"type": "string", "pattern": "(?x) a"}, "flag"),
        ({"items": {"type": "string", "pattern": "[]a]"}}, r"empty class.*items\)"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_what_cannot_be_promised_is_refused_by_name(schema, says):
    with pytest.raises(RequestError, match=says) as error:
        check(StructuredOutputsParams(json=schema))
    assert error.value.field == "structured_outputs.json"


def test_parts_that_nothing_reaches_are_not_refused():
    check(StructuredOutputsParams(json={"$defs": {"a": {"minProperties": 5}}, "type": "integer"}))


def test_control_characters_stay_where_names_are_not_free():
    assert accepts(of_schema({"const": "\x00"}), '"\\u0000"')
    closed = {"type": "object", "properties": {"a": STRING}, "additionalProperties": False}
    assert accepts(of_schema(closed), '{"a":"\\u001b"}')


def test_bounds_hold_for_the_doubles_that_a_parser_reads():
    rng = random.Random(3)

    def bound() -> float:
        exact = rng.choice((0, 1, -1, 10, 0.5, 0.1, -0.05, 99, rng.randint(-999, 999) / 100))
        return rng.choice((exact, math.nextafter(exact, rng.choice((9e9, -9e9)))))

    for _ in range(250):
        keys = rng.sample(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), 2)
        schema = {"type": rng.choice(("number", "integer")), **{key: bound() for key in keys}}
        try:
            made = of_schema(schema)
        except (RequestError, AssertionError):
            continue  # nothing fits
        for near in (*(schema[key] for key in keys), 0):
            whole, rest = f"{abs(near):.25f}".split(".")
            for text in (
                whole,
                *(
                    f"{whole}.{rest[:n]}{more}"
                    for n in (1, 2, 9, 17, 25)
                    for more in ("", "1", "99999")
                ),
            ):
                for sign in ("", "-"):
                    if accepts(made, sign + text):
                        assert judge(schema).is_valid(json.loads(sign + text)), (
                            schema,
                            sign + text,
                        )


def test_dates_are_those_of_the_calendar():
    made = of_schema({"type": "string", "format": "date"})
    for year in (1, 4, 100, 400, 1900, 1999, 2000, 2023, 2024, 2100, 9999):
        for month in range(14):
            for day in (0, 1, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    exists = bool(datetime.date.fromisoformat(text))
                except ValueError:
                    exists = False
                assert accepts(made, f'"{text}"') == exists, text


def test_decimal_multiples_are_exact():
    made = of_schema({"type": "number", "multipleOf": 0.01})
    for text in ("0.29", "-4.02", "7", "0.005", "0.291", "1.0"):
        assert accepts(made, text) == (Fraction(text) % Fraction("0.01") == 0)


@pytest.mark.parametrize(
    ("pattern", "plain", "exact"),
    [
        ("^[a-z]+$", "^[a-z]+$", None),
        (r"\d+\.\d", r"[0-9]+\.[0-9]", None),
        ("[+--]", r"[+-\-]", None),
        ("[[a]b]", r"[\[a]b]", None),
        ("[a&&b~~c]", r"[a\&\&b\~\~c]", None),
        (r"[\s\S]", r"[\x00-\x{10FFFF}]", None),
        (r"\W", r"[^_\p{L}\p{N}]", "[^0-9A-Za-z_]"),
        (r"\(?x\.\u{41}", r"\(?x\.\u{41}", None),
    ],
)
def test_patterns_are_read_as_ecma_262_reads_them(pattern, plain, exact):
    assert translate(pattern) == plain
    assert translate(pattern, exact=True) == (exact or plain)


@pytest.mark.parametrize(
    ("pattern", "both", "exact"),
    [
        (r"[.-\w]", r"[.\-[0-9A-Za-z_]]", r"[.\-[0-9A-Za-z_]]"),
        (r"[^\d]", r"[^[\p{Nd}]]", "[^[0-9]]"),
    ],
)
def test_sets_inside_classes_leave_out_what_either_language_counts(pattern, both, exact):
    assert translate(pattern) == both
    assert translate(pattern, exact=True) == exact


def test_translated_formats_stay_as_they_are():
    """`promise` meets them again where a format stands next to a pattern."""
    from slipstream.engine.grammars import schema_promises

    for pattern, _ in schema_promises.FORMATS.values():
        assert translate(pattern) == pattern


def test_a_deep_schema_is_no_recursion():
    schema: dict[str, Any] = {"type": "string", "pattern": r"\S"}
    for _ in range(50_000):
        schema = {"type": "array", "items": schema}
    assert promise(schema) == {}
    while "items" in schema:  # Python itself would free it by recursion
        schema = schema["items"]
    assert schema["pattern"] != r"\S"


GEMMA = {"gemma4", "functiongemma"}
"""Formats whose arguments have a notation of their own, in which keys have no escapes."""


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - GEMMA))
def test_arguments_of_tools_keep_to_the_same_promise(name):
    """Formats that write arguments as one JSON object, and those that write each as JSON: MiniMax M3's only what its elements
    can't say, as `minProperties`."""
    inner = {**OPEN, "required": ["a"], "minProperties": 1}
    parameters = {"type": "object", "properties": {"o": inner}, "required": ["o"]}
    writer = Writer(lambda text: None)
    call = FORMATS[name]().call(Tool("f", parameters), writer)
    assert "json_allowed_escapes" in writer.lark(call)
    made = matcher(f"start: {writer.schema(inner)}")
    assert accepts(made, '{"a": 1}')
    assert not accepts(made, '{"a": 1, "\\u0061": "x"}')


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        (r"^\S+$", ["ab"], ["a\ufeff", ""]),
        ("^a|b$", ["a", "b"], ["xa", "c"]),
        (r"^5\$", ["5$", "5$ net"], ["5"]),
        (r"a/\d", ["xa/1y"], ["a/x", "a/\u0663"]),
    ],
)
def test_patterns_of_arguments_that_are_plain_text(pattern, valid, invalid):
    writer = Writer(lambda text: None)
    rule = text_rule({"type": "string", "pattern": pattern}, writer, "f.a", "<end>")
    made = matcher(writer.lark(rule))
    assert [accepts(made, f"{text}<end>") for text in valid] == [True] * len(valid)
    assert not any(accepts(made, f"{text}<end>") for text in invalid)


def test_common_schemas_of_programs_are_taken():
    for schema in (
        PERSON,
        {
            "type": "object",
            "properties": {
                "when": {"type": "string", "format": "date-time"},
                "id": {"type": "integer", "format": "int64", "minimum": -(2**63)},
            },
        },
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.01},
                {"type": "null"},
            ],
            "default": None,
            "title": "Price",
        },
        {
            "$defs": {"Item": OPEN},
            "type": "array",
            "items": {"$ref": "#/$defs/Item"},
            "maxItems": 4,
        },
        {"type": "object", "additionalProperties": {"type": "array", "items": STRING}},
        {
            "type": "object",
            "properties": {
                "mail": {"type": "string", "format": "email"},
                "sku": {"type": "string", "pattern": r"^[A-Z]{3}-\d{4}$"},
            },
        },
    ):
        with warnings.catch_warnings():
            check(StructuredOutputsParams(json=schema))


def test_paths_in_a_part_with_a_long_name_take_no_memory():
    inner = {f"{i}": {} for i in range(2000)}
    schema = {"properties": {"a" * 100_000: {"properties": inner}}}
    tracemalloc.start()
    try:
        promise(schema)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


def test_a_pattern_of_many_classes_is_checked_within_the_time():
    """A copy of the rest for each class made it the square of their number."""
    check(StructuredOutputsParams(json={"type": "string", "pattern": "[a]" * 80_000}))


@pytest.mark.parametrize("name", ["glm", "qwen3_coder", "pythonic"])
def test_definitions_that_are_written_for_each_argument_are_bounded(name):
    """Unbounded definitions would be written on the event loop before they are refused."""
    definitions = {"d": {"enum": [f"{i:06}" for i in range(12_000)]}}
    properties = {f"p{i}": {"$ref": "#/$defs/d"} for i in range(8)}
    schema = {"type": "object", "properties": properties, "$defs": definitions}
    with pytest.raises(RequestError, match="fewer tools") as error:
        FORMATS[name]().calls([Tool("f", schema)], Writer(lambda text: None), parallel=False)
    assert error.value.field == "tools"
