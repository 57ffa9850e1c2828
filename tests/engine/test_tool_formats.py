"""Each format's parser on its own outputs, on broken ones, and under any chunking."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.text.tool_formats import FORMATS, REASONING, reasoning_markers, tool_format
from slipstream.engine.text.tool_formats.base import (
    Arguments,
    BeginCall,
    Content,
    Parser,
    Reasoning,
    Tool,
)
from slipstream.errors import ConfigError

TOOLS = [
    Tool(
        "get_weather",
        {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    ),
    Tool(
        "add",
        {
            "properties": {
                "a": {"type": "number"},
                "b": {"type": "number"},
                "ok": {"type": "boolean"},
            }
        },
    ),
]
THINK = REASONING["think"]
DS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
WEATHER, ADD = '{"city": "São \\"P\\" <x>", "days": 2}', '{"a": 1, "b": -2.5, "ok": true}'
SAMPLES = {  # each: two calls, get_weather and add
    "hermes": 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": ' + WEATHER + "}\n</tool_call>\n<tool_call>\n"
    '{"name": "add", "arguments": ' + ADD + "}\n</tool_call>",
    "qwen3_coder": "Let me see.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSão \"P\" <x>\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\n-2.5\n</parameter>\n<parameter=ok>\ntrue\n</parameter>\n</function>\n</tool_call>",
    "glm": 'Let me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>São "P" <x></arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1"
    "</arg_value>\n<arg_key>b</arg_key>\n<arg_value>-2.5</arg_value>\n<arg_key>ok</arg_key><arg_value>true</arg_value></tool_call>",
    "llama3_json": '{"name": "get_weather", "parameters": ' + WEATHER + '}; {"name": "add", "parameters": ' + ADD + "}",
    "pythonic": '[get_weather(city="São \\"P\\" <x>", days=2), add(a=1, b=-2.5, ok=True)]',
    "mistral": 'Let me see. [TOOL_CALLS] [{"name": "get_weather", "arguments": ' + WEATHER + '}, {"name": "add", "arguments": '
    + ADD + "}]",
    "mistral_args": "Let me see.[TOOL_CALLS]get_weather[ARGS]" + WEATHER + "[TOOL_CALLS]add[ARGS]" + ADD,
    "deepseek_v3": f"Let me see.{DS[0]}{DS[1]}function{DS[2]}get_weather\n```json\n{WEATHER}\n```{DS[3]}\n"
    f"{DS[1]}function{DS[2]}add\n```json\n{ADD}\n```{DS[3]}{DS[4]}",
    "deepseek_v31": f"Let me see.{DS[0]}{DS[1]}get_weather{DS[2]}{WEATHER}{DS[3]}{DS[1]}add{DS[2]}{ADD}{DS[3]}{DS[4]}",
    "harmony": "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see."
    f"<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WEATHER}<|call|>"
    f"<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{ADD}",
}  # fmt: skip
WHOLE = ("llama3_json", "pythonic")  # calls are the whole answer


def read(parser, pieces):
    """(content, reasoning, calls) of an answer that comes in pieces."""
    events = [e for piece in pieces for e in parser.feed(piece)] + parser.finish()
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, BeginCall):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        elif isinstance(event, Arguments):
            assert event.index == len(calls) - 1
            assert event.text
            calls[-1][1] += event.text
    content = "".join(e.text for e in events if isinstance(e, Content))
    return content, "".join(e.text for e in events if isinstance(e, Reasoning)), calls


def parser_of(name, think=None, *, thinking=False):
    form = FORMATS[name]()
    return Parser(lambda parser: form.script(parser, TOOLS), think, thinking=thinking)


def cut(text, seed):
    rng, pieces = random.Random(seed), []
    while text:
        n = rng.choice([1, 1, 2, 3, 7, 30])
        pieces.append(text[:n])
        text = text[n:]
    return pieces


def test_every_format_has_a_sample():
    assert set(SAMPLES) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(8))
def test_calls_are_found(name, seed):
    content, reasoning, calls = read(parser_of(name), cut(SAMPLES[name], seed))
    assert content == ("" if name in WHOLE else "Let me see.")
    assert reasoning == ("Hm, <b>." if name == "harmony" else "")
    assert [(call, json.loads(given)) for call, given in calls] == [
        ("get_weather", json.loads(WEATHER)),
        ("add", json.loads(ADD)),
    ]


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "harmony"])
@pytest.mark.parametrize("thinking", [False, True])
def test_behind_reasoning(name, thinking):
    text = (
        ("" if thinking else "\n<think>\n")
        + "a <tool_call> {} thought\n</think>\n\n"
        + SAMPLES[name]
    )
    content, reasoning, calls = read(parser_of(name, THINK, thinking=thinking), cut(text, 1))
    assert reasoning == "a <tool_call> {} thought"
    assert (content, len(calls)) == ("" if name in WHOLE else "Let me see.", 2)


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "harmony"])
@pytest.mark.parametrize(
    "text",
    [
        "Hello.\n",
        "",
        " ",
        "{}",
        '{"a": 1}',
        "[1, 2]",
        "[x]",
        "a < b",
        "<tool",
        "<tool_call>",
        "<tool_call>\n{3}",
        "[TOOL",
    ],
)
def test_what_is_no_call_is_content(name, text):
    content, reasoning, calls = read(parser_of(name), cut(text, 0))
    assert (reasoning, calls) == ("", [])
    assert content == text


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', ["add", '{"a": 1}']),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', ["add", "{}"]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ["add", '{"a": 1}']),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>', ["add", '{"a": "</tool_call>']),  # cut off
        ("qwen3_coder", "<tool_call><function=add></function></tool_call>", ["add", "{}"]),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n[1]\n</parameter>\n<para", ["add", '{"a": [1]']),
        ("glm", "<tool_call>add</tool_call>", ["add", "{}"]),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {}}', ["add", "{}"]),
        ("pythonic", "<|python_start|>[add(x=[True, None, {'a': (1, false)}])]<|python_end|>",
         ["add", '{"x": [true, null, {"a": [1, false]}]}']),
        ("mistral", '[TOOL_CALLS]add{"a": 1}', ["add", '{"a": 1}']),
        ("mistral_args", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}', ["add", '{"a": 1}']),
    ],
)  # fmt: skip
def test_other_ways_to_write_a_call(name, text, call):
    for seed in range(4):
        assert read(parser_of(name), cut(text, seed)) == ("", "", [call])


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=add>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        "<arg_key>",
    ),
    *(
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<|python_start|>",
    ),
    *(
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "<|constrain|>",
        "analysis",
        "to=functions.add",
        "<think>",
    ),
    *(
        "</think>",
        *DS,
        "```json\n",
        '{"name": "add", "arguments": ',
        '"name"',
        '"arguments"',
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
    ),
    *(
        '"',
        "'",
        "\\",
        ",",
        ":",
        ";",
        "=",
        ">",
        "add",
        "a",
        "1",
        "True",
        " ",
        "\n",
        "é",
        "f(x=1)",
        "<",
        "None",
        "*",
        "lambda:0",
    ),
]


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=60)
def test_chunks_change_nothing(name, data):
    """Random and mutated outputs: no exception, and the same however they are cut."""
    pieces = data.draw(st.lists(st.sampled_from(PIECES), max_size=14))
    text = "".join(pieces)
    if data.draw(st.booleans()):
        sample = SAMPLES[name]
        at, gone = data.draw(st.integers(0, len(sample))), data.draw(st.integers(0, 20))
        text = sample[:at] + text + sample[at + gone :]
    thinking, think = data.draw(st.booleans()), data.draw(st.sampled_from([None, THINK]))
    whole = read(parser_of(name, think, thinking=thinking), [text])
    assert read(parser_of(name, think, thinking=thinking), list(text)) == whole
    seed = data.draw(st.integers(0, 9))
    assert read(parser_of(name, think, thinking=thinking), cut(text, seed)) == whole


def test_formats_are_found_in_templates():
    found = {
        "hermes": "<tool_call>\n{{ tool_call | tojson }}\n</tool_call> and {'<think>'}</think>",
        "qwen3_coder": "<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>",
        "glm": "<tool_call>{{ name }}<arg_key>{{ k }}</arg_key>",
        "llama3_json": '<|start_header_id|> {"name": function name, "parameters": dictionary}',
        "pythonic": "<|start_header_id|> [func_name1(params_name1=params_value1, ...)]",
        "mistral": "[TOOL_CALLS] [{{ x }}",
        "mistral_args": "[TOOL_CALLS]{{ name }}[ARGS]{{ x }}",
        "deepseek_v3": DS[0] + "```json",
        "deepseek_v31": DS[0] + DS[1],
        "harmony": "<|start|>assistant<|channel|>final<|message|>",
    }
    assert set(found) == set(FORMATS)
    for name, template in found.items():
        form = tool_format(None, template)
        assert form is not None
        assert form.name == name
    assert tool_format(None, "plain") is tool_format(None, None) is None
    assert tool_format("none", found["glm"]) is None
    assert tool_format("glm", "plain").name == "glm"
    assert reasoning_markers(None, found["hermes"]) == THINK
    assert reasoning_markers("mistral", "plain") == ("[THINK]", "[/THINK]")
    assert reasoning_markers("none", found["hermes"]) is reasoning_markers(None, "plain") is None
    for choose, field in (
        (tool_format, "tool_call_parser"),
        (reasoning_markers, "reasoning_parser"),
    ):
        with pytest.raises(ConfigError, match="known are") as error:
            choose("frob", None)
        assert error.value.field == field
