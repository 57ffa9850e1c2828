"""Tools and reasoning over HTTP, with the official client and a tiny random model, to which every format is given in turn."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest

from slipstream.engine.text.tool_formats import FORMATS, REASONING
from tests.server.conftest import TEMPLATE

TILDE = 97
THINKING = TEMPLATE + "{# <think></think> #}"
CITY = {"type": "string", "enum": ["Paris", "Rome"]}
WEATHER = {
    "type": "object",
    "properties": {
        "city": CITY,
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "ok": {"type": "boolean"},
    },
    "required": ["city", "ok"],
    "additionalProperties": False,
}
NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 5}},
    "required": ["text"],
}
NOTE["additionalProperties"] = False
SCHEMAS = {"get_weather": WEATHER, "note": NOTE}
TOOLS = [
    {"type": "function", "function": {"name": n, "description": "x", "parameters": s}}
    for n, s in SCHEMAS.items()
]
CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400}


@pytest.fixture
def client(tiny_server):
    with tiny_server.client() as client:
        yield client


def check_calls(message):
    assert message.content is None
    assert message.tool_calls
    for call in message.tool_calls:
        assert (call.type, call.id[:5]) == ("function", "call_")
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def streamed(chunks):
    """(content, reasoning, calls, finish reason) of a stream."""
    content, reasoning, calls, reason = "", "", [], None
    for chunk in chunks:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert call.id
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        reason = choice.finish_reason or reason
    return content, reasoning, calls, reason


def as_streamed(choice):
    message = choice.message
    calls = [[c.function.name, c.function.arguments] for c in message.tool_calls or []]
    return (
        message.content or "",
        getattr(message, "reasoning_content", None) or "",
        calls,
        choice.finish_reason,
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_is_valid_in_every_format(client, model, name):
    """A random model ends no thoughts of its own accord, and spells long markers by the letter."""
    model(tool_call_parser=name)
    for seed in range(3):
        ask = {
            **CHAT,
            "max_tokens": 900,
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "seed": seed,
            "temperature": 2,
            "extra_body": {"thinking_budget": 20},
        }
        answer = client.chat.completions.create(**ask).choices[0]
        assert answer.finish_reason == "tool_calls"
        check_calls(answer.message)
        assert len(answer.message.tool_calls) == 1
        assert streamed(client.chat.completions.create(**ask, stream=True)) == as_streamed(answer)


@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen3_coder", "harmony"])
def test_a_named_call(client, model, name):
    model(tool_call_parser=name)
    choice = {"type": "function", "function": {"name": "note"}}
    answer = client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice=choice, n=3, seed=1)
    for one in answer.choices:
        check_calls(one.message)
        assert [c.function.name for c in one.message.tool_calls] == ["note"]


def test_several_calls_come_in_one_answer(client, model):
    model(tool_call_parser="hermes")
    found = set()
    for seed in range(6):
        answer = client.chat.completions.create(
            **CHAT, tools=TOOLS, tool_choice="required", seed=seed, temperature=3
        )
        if answer.choices[0].finish_reason == "tool_calls":
            check_calls(answer.choices[0].message)
            found.add(min(2, len(answer.choices[0].message.tool_calls)))
    assert 2 in found


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("strict", [False, True])
def test_an_answer_without_a_call_is_the_same_streamed_and_whole(client, model, name, strict):
    """A random model calls nothing of its own accord. Log-probabilities come with every token."""
    model(tool_call_parser=name)
    tools = [{**t, "function": {**t["function"], "strict": strict}} for t in TOOLS]
    ask = {**CHAT, "tools": tools, "max_tokens": 30, "seed": 2, "logprobs": True}
    answer = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert not answer.choices[0].message.tool_calls
    assert streamed(chunks) == as_streamed(answer.choices[0])
    entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert len(entries) == len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens


def test_a_schema_or_a_call(client, model):
    """`response_format` beside tools: the answer is either."""
    model(tool_call_parser="hermes")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": NOTE}}
    kinds = set()
    for seed in range(12):
        answer = client.chat.completions.create(
            **CHAT,
            tools=TOOLS,
            response_format=form,
            seed=seed,
            temperature=2,
            parallel_tool_calls=False,
        ).choices[0]
        kinds.add(answer.finish_reason)
        if answer.finish_reason == "tool_calls":
            check_calls(answer.message)
        else:
            jsonschema.validate(json.loads(answer.message.content), NOTE)
    assert kinds == {"tool_calls", "stop"}


@pytest.mark.parametrize("opened", [True, False])
def test_reasoning_comes_before_a_schema(client, model, monkeypatch, opened):
    """The markers are a special token and a letter, since a random model writes neither of the usual ones."""
    monkeypatch.setitem(REASONING, "think", ("<|im_start|>", "~"))
    end = "{% if add_generation_prompt %}<|im_start|>{% endif %}" if opened else ""
    model(TEMPLATE + end, reasoning_parser="think")
    form, reasoned = {"type": "json_schema", "json_schema": {"name": "x", "schema": NOTE}}, 0
    for seed in range(6):
        ask = {
            **CHAT,
            "response_format": form,
            "seed": seed,
            "logit_bias": {"2": 8, str(TILDE): 8},
            "temperature": 2,
        }
        answer = client.chat.completions.create(**ask).choices[0]
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.message.content), NOTE)
        reasoned += bool(getattr(answer.message, "reasoning_content", None))
        assert streamed(client.chat.completions.create(**ask, stream=True)) == as_streamed(answer)
    assert reasoned


def test_the_markers_letter_is_one_token(tiny_server):
    assert tiny_server.engine.tokenizer.encode("~", add_special_tokens=False) == [TILDE]


def test_a_prompt_that_ended_the_reasoning(client, model):
    model(THINKING + "{% if add_generation_prompt %}<think>\n\n</think>\n\n{% endif %}")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": NOTE}}
    answer = client.chat.completions.create(**CHAT, response_format=form, seed=1).choices[0]
    jsonschema.validate(json.loads(answer.message.content), NOTE)
    assert not hasattr(answer.message, "reasoning_content")


def test_a_conversation_with_calls_reaches_the_template(tiny_server, model):
    model(tool_call_parser="hermes")
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    with tiny_server.http() as http:
        tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        body = {**CHAT, "messages": messages, "tools": TOOLS, "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    text = tiny_server.engine.tokenizer.decode(tokens, skip_special_tokens=False)
    assert "<call>get_weather Paris</call>" in text
    assert "<|im_start|>tool\nsunny" in text


def test_none_tells_of_no_tools(client, model):
    model(tool_call_parser="hermes")
    plain = client.chat.completions.create(**{**CHAT, "max_tokens": 8}, temperature=0)
    none = client.chat.completions.create(
        **{**CHAT, "max_tokens": 8}, temperature=0, tools=TOOLS, tool_choice="none"
    )
    auto = client.chat.completions.create(**{**CHAT, "max_tokens": 8}, temperature=0, tools=TOOLS)
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens < auto.usage.prompt_tokens
    assert none.choices[0].message.content == plain.choices[0].message.content


OF_G = {"function": {"name": "g"}}


def function(**fields):
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        (
            {"tools": function(parameters={"properties": {"a": {"not": {}}}})},
            "tools[0].function.parameters",
            "not",
        ),
        (
            {"tools": function(), "tool_choice": {**OF_G, "type": "function"}},
            "tool_choice.function.name",
            "no tool",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": function() * 2}, "tools", "same name"),
        ({"tools": function(name="a b")}, "tools[0].function.name", "match"),
        ({"tools": [{"type": "web"}]}, "tools[0].type", "web"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]},
            "messages[0].tool_call_id",
            "role",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(client, model, fields, param, says):
    model(tool_call_parser="hermes")
    ask = {**CHAT, "tool_choice": "required", **fields} if "tools" in fields else {**CHAT, **fields}
    body = {k: v for k, v in ask.items() if k not in CHAT}
    with pytest.raises(openai.BadRequestError, match=says) as error:
        client.chat.completions.create(
            **{**CHAT, **{k: ask[k] for k in ("messages",)}}, extra_body=body
        )
    assert error.value.param == param


def test_xml_formats_say_what_they_cannot_enforce(client, model):
    model(tool_call_parser="qwen3_coder")
    for parameters, says in (
        ({"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}, "format"),
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, "anyOf"),
    ):
        with pytest.raises(openai.BadRequestError, match=says) as error:
            client.chat.completions.create(
                **CHAT, tools=function(parameters=parameters), tool_choice="required"
            )
        assert error.value.param == "tools"


def test_a_model_without_tools(client, model):
    model("{{ messages }}", tool_call_parser="hermes")
    with pytest.raises(openai.BadRequestError, match="knows no tools"):
        client.chat.completions.create(**CHAT, tools=TOOLS)
    model("{{ tools }}{{ messages }}")
    with pytest.raises(openai.BadRequestError, match="tool-call-parser"):
        client.chat.completions.create(**CHAT, tools=TOOLS)
