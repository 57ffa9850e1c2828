"""Structured output over HTTP, with the official client and a tiny random model in its own process."""

from __future__ import annotations

import json
import re
from typing import Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

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
def test_a_schema(client, fields):
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
def test_completions_too(client, fields, pattern):
    answer = client.completions.create(
        model="smollm2", prompt=["a", "b"], max_tokens=20, extra_body=fields
    )
    assert all(re.fullmatch(pattern, choice.text) for choice in answer.choices)


def test_any_object(client):
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
