"""Structured output over HTTP, with the official client and a tiny random model in its own process."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from slipstream.engine.grammars import check
from slipstream.errors import EngineOverloadedError
from tests.server.conftest import TEMPLATE
from tests.support.waiting import PATIENCE_S

TOOLS = TEMPLATE + "{# <tool_call> #}"

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "Who?"}], "seed": 1}
COMPACT = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}


class Person(BaseModel):
    name: str = Field(max_length=8)
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=99)
    friends: list[Literal["a", "b"]] = Field(max_length=2)


@pytest.fixture
def client(tiny_server):
    with tiny_server.client() as client:
        yield client


def test_the_client_parses_a_pydantic_model(client):
    for seed in range(3):
        answer = client.chat.completions.parse(**{**CHAT, "seed": seed}, response_format=Person)
        assert isinstance(answer.choices[0].message.parsed, Person)
        assert answer.choices[0].finish_reason == "stop"


def test_a_stream_is_parsed_too(client):
    with client.chat.completions.stream(**CHAT, response_format=Person) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


FORMATS = [
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
        }
    },
    {"extra_body": COMPACT},
    {"extra_body": {"guided_json": SCHEMA}},
    {"extra_body": {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": "[ ]?"}},
]


@pytest.mark.parametrize("fields", FORMATS, ids=str)
def test_a_schema_holds_whole_and_streamed(client, fields):
    answer = client.chat.completions.create(**CHAT, **fields, n=2, logprobs=True)
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert choice.finish_reason == "stop"
        assert "".join(entry.token for entry in choice.logprobs.content).startswith("{")
    chunks = list(client.chat.completions.create(**CHAT, **fields, stream=True))
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks)
        == answer.choices[0].message.content
    )


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, "x[0-9]"),
        ({"response_format": {"type": "text"}}, "(?s).*"),
    ],
    ids=str,
)
def test_completions_keep_to_a_pattern(client, fields, pattern):
    answer = client.completions.create(
        model="smollm2", prompt=["a", "b"], max_tokens=20, extra_body=fields
    )
    assert all(re.fullmatch(pattern, choice.text) for choice in answer.choices)


def test_json_object_answers_begin_with_a_brace(client):
    answer = client.chat.completions.create(
        **CHAT, response_format={"type": "json_object"}, max_tokens=30
    )
    assert answer.choices[0].message.content.startswith("{")


BAD = {"type": "object", "properties": {"a": {"not": {}}}}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "missing",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": BAD},
                }
            },
            "response_format.json_schema.schema",
            r"not.*properties\.a",
        ),
        ({"structured_outputs": {"json": BAD}}, "structured_outputs.json", r"properties\.a"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        (
            {"structured_outputs": {"regex": "(", "backend": "x"}},
            "structured_outputs.backend",
            "unknown",
        ),
        ({"guided_json": BAD}, "guided_json", r"properties\.a"),
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
        ({"guided_grammar": "start: <|nope|>"}, "guided_grammar", "nope"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "both"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format",
            "both",
        ),
        (
            {"guided_regex": "a", "guided_whitespace_pattern": " "},
            "guided_whitespace_pattern",
            "is for json",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_a_400(client, fields, param, says, stream):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**CHAT, max_tokens=4, stream=stream, extra_body=fields)
    assert error.value.param == param
    assert re.search(says, error.value.message)
    assert client.completions.create(model="smollm2", prompt="a", max_tokens=1).choices


def chain(count):
    """A schema that refers to another, which refers to another, …"""
    defs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": {"type": "string"}}}


DEEP = chain(3000)
RULES = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3000)) + '\nr3000: "a"'
MESSAGES = {"model": "smollm2", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}
PROMPT = {"model": "smollm2", "max_tokens": 3, "prompt": "a"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": DEEP}}
TOO_DEEP = [
    ("/v1/completions", {**PROMPT, "response_format": FORMAT}),
    ("/v1/completions", {**PROMPT, "guided_json": DEEP}),
    ("/v1/completions", {**PROMPT, "guided_json": json.dumps(DEEP)}),
    ("/v1/completions", {**PROMPT, "structured_outputs": {"grammar": RULES}}),
    ("/v1/completions", {**PROMPT, "guided_regex": "(" * 3000 + ")" * 3000}),
    ("/v1/chat/completions", {**MESSAGES, "response_format": FORMAT}),
    ("/v1/chat/completions", {**MESSAGES, "tools": [TOOL], "tool_choice": "required"}),
    ("/v1/chat/completions", {**MESSAGES, "tools": [TOOL],
        "response_format": {"type": "json_object"}}),
    ("/v1/responses", {"model": "smollm2", "input": "a", "text": {"format": {"type": "json_schema",
        "name": "x", "schema": DEEP}}}),
    ("/v1/messages", {**MESSAGES, "output_config": {"format": {"type": "json_schema",
        "schema": DEEP}}}),
    ("/v1/messages", {**MESSAGES, "tool_choice": {"type": "any"}, "tools": [{"name": "f",
        "input_schema": DEEP}]}),
    ("/api/generate", {"model": "smollm2", "prompt": "a", "stream": False, "format": DEEP}),
    (
        "/v2/models/smollm2/generate",
        {"text_input": "a", "parameters": {"max_tokens": 3, "guided_json": json.dumps(DEEP)}},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), TOO_DEEP, ids=[path for path, _ in TOO_DEEP])
def test_a_chain_of_references_is_a_400_on_every_route(tiny_server, model, path, body):
    model(TOOLS)
    with tiny_server.http(headers={"anthropic-version": "2023-06-01"}) as client:
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        assert "deep" in answer.text
        assert "context" not in answer.text
        if path == "/v1/chat/completions" and "tools" in body:
            assert answer.json()["error"]["param"] == "tools[0].function.parameters"
        assert client.get("/live").status_code == 200
        assert client.post("/v1/completions", json=PROMPT).status_code == 200


@pytest.mark.parametrize(("path", "body"), TOO_DEEP, ids=[path for path, _ in TOO_DEEP])
@pytest.mark.parametrize("depth", [500, 960, 1000, 100_000])
def test_a_body_that_is_nested_too_deeply_is_a_400_on_every_route(tiny_server, path, body, depth):
    deep = "[" * depth + "]" * depth
    text = json.dumps({**body, "logit_bias": "@"}).replace('"@"', deep)
    nested = text.replace(json.dumps(DEEP), '{"default":' + deep + "}")
    with tiny_server.http(headers={"anthropic-version": "2023-06-01"}) as client:
        for content in (text, nested):
            assert client.post(path, content=content).status_code == 400
        assert client.get("/live").status_code == 200


@pytest.mark.parametrize(
    "fields", [{"guided_json": {"$ref": "#"}}, {"guided_grammar": "start: start"}]
)
def test_a_grammar_without_an_end_is_a_400_that_says_so(client, fields):
    with pytest.raises(openai.BadRequestError, match="the grammar has no end: it refers to itself"):
        client.chat.completions.create(**CHAT, max_tokens=4, extra_body=fields)


WIDE = [{"properties": {f"p{i}_{k}": {"type": "string"} for k in range(500)}} for i in range(3)]


def test_a_client_whose_large_schemas_wait_holds_no_small_schema(tiny_server, monkeypatch):
    """Large grammars are compiled one after the other, and small ones beside them."""
    began, release = Event(), Event()
    problem = check._problem

    def slow(params):
        if len(params.json or "") > check.SMALL_CHARACTERS:
            began.set()
            assert release.wait(PATIENCE_S)
        return problem(params)

    monkeypatch.setattr(check, "_problem", slow)

    def ask(schema):
        with tiny_server.http() as client:
            return client.post("/v1/completions", json={**PROMPT, "guided_json": schema})

    with ThreadPoolExecutor(3) as threads:
        large = [threads.submit(ask, schema) for schema in WIDE]
        assert began.wait(PATIENCE_S)
        assert ask({"type": "integer", "title": "mine"}).status_code == 200
        assert not any(one.done() for one in large)
        release.set()
        assert [one.result().status_code for one in large] == [200] * 3


def test_a_grammar_that_waits_too_long_is_an_overload_and_no_fault_of_the_request(
    tiny_server, monkeypatch
):
    def busy(*_):
        raise EngineOverloadedError("others were served all the time (grammar checks)")

    monkeypatch.setattr(check._checks, "submit", busy)
    with tiny_server.http() as client:
        answer = client.post("/v1/completions", json={**PROMPT, "guided_regex": "busy?"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
    assert int(answer.headers["retry-after"]) > 0
