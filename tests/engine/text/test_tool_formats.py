"""Each format's parser on its own outputs, on broken ones, and under any chunking."""

from __future__ import annotations

import json
import random
import re

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
from slipstream.engine.text.tools import Formats, OfferedTools, Reading, reading
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
ARGUMENTS = (
    [("city", 'São "P" <x>', True), ("days", "2", False)],
    [("a", "1", False), ("b", "-2.5", False), ("ok", "true", False)],
)


def invocations(section, mark="", attribute=""):
    """Calls in tags with names, several in a section."""
    calls = [
        f'<{mark}invoke name="{name}">\n'
        + "".join(
            f'<{mark}parameter name="{key}"{attribute and attribute % str(is_text).lower()}>{value}</{mark}parameter>\n'
            for key, value, is_text in arguments
        )
        + f"</{mark}invoke>\n"
        for name, arguments in zip(("get_weather", "add"), ARGUMENTS, strict=True)
    ]
    return f"Let me see.\n<{mark}{section}>\n{''.join(calls)}</{mark}{section}>"


def dsml(section, mark="｜DSML｜"):
    return invocations(section, mark, ' string="%s"')


def json_list(begin, end):
    calls = (("get_weather", WEATHER), ("add", ADD))
    written = ", ".join(f'{{"name": "{name}", "arguments": {given}}}' for name, given in calls)
    return f"{begin}[{written}]{end}"


SAMPLES = {  # each: two calls, get_weather and add
    "hermes": 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": ' + WEATHER + "}\n</tool_call>\n<tool_call>\n"
    '{"name": "add", "arguments": ' + ADD + "}\n</tool_call>",
    "qwen3_coder": "Let me see.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSão \"P\" <x>\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\n-2.5\n</parameter>\n<parameter=ok>\ntrue\n</parameter>\n</function>\n</tool_call>",
    "glm": 'Let me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>São "P" <x>'
    "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1"
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
    "kimi_k2": "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{WEATHER}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{ADD}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "gemma4": 'Let me see.<|tool_call>call:get_weather{city:<|"|>São "P" <x><|"|>,days:2}<tool_call|>'
    "<|tool_call>call:add{a:1,b:-2.5,ok:true}<tool_call|>",
    "functiongemma": 'Let me see.<start_function_call>call:get_weather{city:<escape>São "P" <x><escape>,days:2}'
    "<end_function_call><start_function_call>call:add{a:1,b:-2.5,ok:true}<end_function_call>",
    "hy_v3": 'Let me see.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>São "P" <x>'
    "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>add<tool_sep>\n<arg_key>a</arg_key>\n"
    "<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>-2.5</arg_value>\n<arg_key>ok</arg_key>\n"
    "<arg_value>true</arg_value>\n</tool_call>\n</tool_calls>",
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v41": dsml("calls", "｜DSML｜ "),
    "step3": 'Let me see.<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
    '<steptml:parameter name="city">São "P" <x></steptml:parameter><steptml:parameter name="days">2</steptml:parameter>'
    '</steptml:invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="add">'
    '<steptml:parameter name="a">1</steptml:parameter><steptml:parameter name="b">-2.5</steptml:parameter>'
    '<steptml:parameter name="ok">true</steptml:parameter></steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>',
    "minimax_m2": invocations("minimax:tool_call"),
    "dots": invocations("dots_function_call"),
    "seed_oss": 'Let me see.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>São "P" <x></parameter>\n'
    "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n"
    "<parameter=b>-2.5</parameter>\n<parameter=ok>true</parameter>\n</function>\n</seed:tool_call>",
    "minicpm5": 'Let me see.<function name="get_weather"><param name="city">São "P" <x></param><param name="days">2</param>'
    '</function><function name="add"><param name="a">1</param><param name="b">-2.5</param><param name="ok">true'
    "</param></function>",
    "apertus": 'Let me see.<|tools_prefix|>[{"get_weather": ' + WEATHER + '}, {"add": ' + ADD + "}]<|tools_suffix|>",
    "cohere": 'Let me see.<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": ' + WEATHER
    + '}, {"tool_call_id": "1", "tool_name": "add", "parameters": ' + ADD + "}]<|END_ACTION|>",
    "internlm": 'Let me see.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": ' + WEATHER + "}\n"
    '<|action_end|>\n<|action_start|><|plugin|>\n{"name": "add", "parameters": ' + ADD + "}\n<|action_end|>",
    "nemotron": "Let me see." + json_list("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan_a13b": "Let me see." + json_list("<tool_calls>", "</tool_calls>"),
    "phi4_mini": "Let me see." + json_list("<|tool_call|>", "<|/tool_call|>"),
    "granite": "Let me see." + json_list("<|tool_call|>", ""),
    "lfm2": 'Let me see.<|tool_call_start|>[get_weather(city="São \\"P\\" <x>", days=2), '
    "add(a=1, b=-2.5, ok=True)]<|tool_call_end|>",
    "olmo3": 'Let me see.<function_calls>get_weather(city="São \\"P\\" <x>", days=2)\n'
    "add(a=1, b=-2.5, ok=True)</function_calls>",
}  # fmt: skip
PLAMO = "<|plamo:%s:plamo|>"
MARK = "]<]minimax[>["


def plamo(name, given):
    head = "".join(PLAMO % part for part in ("begin_tool_request", "begin_tool_name"))
    opened = f"{PLAMO % 'end_tool_name'}{PLAMO % 'begin_tool_arguments'}<|plamo:constrain|>json<|plamo:msg|>"
    return f"{head}{name}{opened}{given}{PLAMO % 'end_tool_arguments'}{PLAMO % 'end_tool_request'}"


def channels(number, name, arguments):
    kinds = {"city": "string", "ok": "boolean"}
    parts = "".join(
        f'<|open|>argument key="{key}" type="{kinds.get(key, "number")}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, value, _ in arguments
    )
    return f'<|open|>call tool="{name}" index="{number}"<|sep|>{parts}<|close|>call<|sep|>'


def elements(name, arguments):
    parts = "".join(f"{MARK}<{key}>{value}{MARK}</{key}>\n" for key, value, _ in arguments)
    return f'{MARK}<invoke name="{name}">\n{parts}{MARK}</invoke>\n'


def atem(name, arguments):
    parts = "".join(f'<atem:parameter name="{k}">{v}</atem:parameter>\n' for k, v, _ in arguments)
    call = f'<atem:invoke name="{name}">\n{parts}</atem:invoke>'
    return f" to={name}<|message|><atem:function_calls>\n{call}\n</atem:function_calls>"


BOTH = tuple(zip(("get_weather", "add"), ARGUMENTS, strict=True))
SAMPLES["gigachat3"] = (
    'Let me see.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": '
)
SAMPLES["gigachat3"] += WEATHER + '}<|function_call|>{"name": "add", "arguments": ' + ADD + "}"
SAMPLES["granite_20b_fc"] = (
    f'Let me see.<function_call> {{"name": "get_weather", "arguments": {WEATHER}}}'
    f'<function_call> {{"name": "add", "arguments": {ADD}}}'
)
SAMPLES["inkling"] = (
    "<|content_text|>Let me see.<|end_message|><|message_model|><|content_invoke_tool_json|>"
    f'{{"name":"get_weather","args":{WEATHER}}}<|end_message|><|message_model|>add<|content_invoke_tool_json|>{{"name":"add","args":{ADD}}}<|end_message|>'
)
SAMPLES["xlam"] = json_list("", "")
SAMPLES["plamo3"] = (
    f"Let me see.{PLAMO % 'begin_tool_requests'}{plamo('get_weather', WEATHER)}{plamo('add', ADD)}{PLAMO % 'end_tool_requests'}"
)
SAMPLES["kimi_k3"] = (
    "<|open|>response<|sep|>Let me see.<|close|>response<|sep|><|open|>tools<|sep|>"
    + "".join(channels(n + 1, *call) for n, call in enumerate(BOTH))
    + "<|close|>tools<|sep|><|close|>message<|sep|>"
)
SAMPLES["minimax_m3"] = (
    f"Let me see.\n{MARK}<tool_call>\n{''.join(elements(*call) for call in BOTH)}{MARK}</tool_call>"
)
SAMPLES["muse"] = SAMPLES["muse_glimmer"] = (
    " to=self<|message|>Hm, <b>.<|eom|><|start|>assistant to=user<|message|>Let me see.<|eom|>"
    + "<|eom|>".join(f"<|start|>assistant{atem(*call)}" for call in BOTH)
    + "<|eot|>"
)
SAMPLES["hy_v4"] = SAMPLES["hy_v3"].replace("<tool_sep>", "")
SAMPLES["k2_horizon"] = re.sub(r"(</?)((tool|arg)_)", r"\1ifm|\2", SAMPLES["hy_v4"])
SAMPLES["longcat"] = SAMPLES["hermes"].replace("tool_call>", "longcat_tool_call>")
SAMPLES["ernie45"] = SAMPLES["hermes"]
SAMPLES["hy_v3_open"] = re.sub(r"(</?(tool|arg)_\w+)>", r"\1:opensource>", SAMPLES["hy_v3"])
WHOLE = ("llama3_json", "pythonic", "xlam")  # calls are the whole answer


def read(parser, pieces, *, cut=False):
    """(content, reasoning, calls) of an answer that comes in pieces."""
    events = [e for piece in pieces for e in parser.feed(piece)] + parser.finish(cut=cut)
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
    return Parser(
        lambda parser: form.script(parser, TOOLS), think, thinking=thinking, wraps=form.wraps
    )


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
    assert reasoning == ("Hm, <b>." if FORMATS[name].reasons else "")
    assert [(call, json.loads(given)) for call, given in calls] == [
        ("get_weather", json.loads(WEATHER)),
        ("add", json.loads(ADD)),
    ]


@pytest.mark.parametrize("name", [n for n in FORMATS if not FORMATS[n].reasons])
@pytest.mark.parametrize("thinking", [False, True])
def test_calls_after_reasoning_are_found(name, thinking):
    text = (
        ("" if thinking else "\n<think>\n")
        + "a <tool_call> {} thought\n</think>\n\n"
        + SAMPLES[name]
    )
    content, reasoning, calls = read(parser_of(name, THINK, thinking=thinking), cut(text, 1))
    assert reasoning == "a <tool_call> {} thought"
    assert (content, len(calls)) == ("" if name in WHOLE else "Let me see.", 2)


@pytest.mark.parametrize("name", [n for n in FORMATS if not FORMATS[n].reasons])
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


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_the_length_cuts_is_never_content(name):
    sample = SAMPLES[name]
    whole = read(parser_of(name), [sample])[2]
    for end in range(1, len(sample)):
        content, _, calls = read(parser_of(name), [sample[:end]], cut=True)
        before = "" if name in WHOLE else "Let me see."
        shown = content.rstrip(" \n<[{]f")  # one character may be anything
        assert before.startswith(shown), (sample[:end], content)
        assert len(calls) <= 2
        for (called, part), (function, arguments) in zip(calls, whole, strict=False):
            assert called == function
            assert arguments.startswith(part), (sample[:end], part)


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_the_model_leaves_open_is_no_content(name):
    """The model ends the answer within a call: at least behind the function's name nothing of it is content."""
    sample = SAMPLES[name]
    for end in range(sample.index("get_weather") + 11, sample.rindex("ok")):
        content = read(parser_of(name), [sample[:end]])[0]
        assert "get_" not in content
        assert "city" not in content


def without_arguments(name):
    """The sample with one call, which has no arguments."""
    empty = {
        "kimi_k2": SAMPLES["kimi_k2"].split("<|tool_call_begin|>functions.add")[0] + "<|tool_calls_section_end|>",
        "deepseek_v3": SAMPLES["deepseek_v3"].split(f"\n{DS[1]}function")[0] + DS[4],
        "deepseek_v31": SAMPLES["deepseek_v31"].split(f"{DS[1]}add")[0] + DS[4],
        "harmony": SAMPLES["harmony"].split("<|call|>")[0],
    }.get(name)  # fmt: skip
    return empty and empty.replace(WEATHER, "{}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, text) for name in FORMATS if (text := without_arguments(name))),
        ("gemma4", "<|tool_call>call:get_weather{}<tool_call|>"),
        ("gemma4", "<|tool_call>:get_weather{}<tool_call|>"),
        ("gemma4", "call:get_weather{}"),
        ("functiongemma", "<start_function_call>call:get_weather{}<end_function_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
         "<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>"),
        ("deepseek_v31", f"{DS[0]}{DS[1]}get_weather{DS[2]}{DS[3]}{DS[4]}"),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<function=get_weather>\n</function>\n</tool_call>"),
        ("qwen3_coder", '<tool_call>\n{"name": "get_weather"}\n</tool_call>'),
        ("seed_oss", "<seed:tool_call><function=get_weather></function></seed:tool_call>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="get_weather">\n</invoke>\n</minimax:tool_call>'),
        ("minimax_m2", "<minimax:tool_call><invoke name=get_weather></invoke></minimax:tool_call>"),
        ("minimax_m2", '<invoke name="get_weather"></invoke></minimax:tool_call>'),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n\n'
         "</｜DSML｜invoke>\n</｜DSML｜function_calls>"),
        ("deepseek_v4", '<｜DSML｜invoke name="get_weather"></｜DSML｜invoke></｜DSML｜tool_calls>'),
        ("step3", '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
         "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>"),
        ("minicpm5", '<function name="get_weather"></function>'),
        ("glm", "<tool_call>get_weather</tool_call>"),
        ("hy_v3", "<tool_calls><tool_call>get_weather<tool_sep></tool_call></tool_calls>"),
        ("hy_v3", "<tool_call>get_weather<tool_sep>\n</tool_call>"),
        ("lfm2", "<|tool_call_start|>[get_weather()]<|tool_call_end|>"),
        ("lfm2", '<|tool_call_start|>[{"name": "get_weather", "arguments": {}}]<|tool_call_end|>'),
        ("olmo3", "<function_calls>\nget_weather()\n</function_calls>"),
        ("pythonic", "[get_weather()]"),
        ("mistral_args", "[TOOL_CALLS]get_weather[ARGS]"),
        ("mistral", "[TOOL_CALLS] [{'name'".replace("'name'", '"name": "get_weather", "arguments": {}}]')),
        ("hermes", '<tool_call>{"name": "get_weather", "parameters": null}</tool_call>'),
        ("hermes", '<tool_call>[{"name": "get_weather", "arguments": {}}]</tool_call>'),
        ("nemotron", '<TOOLCALL>[{"name": "get_weather", "arguments": {}}]</TOOLCALL>'),
        ("hunyuan_a13b", '<answer><tool_calls>\n{"name": "get_weather", "arguments": {}}\n</tool_calls></answer>'),
        ("phi4_mini", 'functools[{"name": "get_weather", "arguments": {}}]'),
        ("granite", '<tool_call>[{"name": "get_weather", "arguments": {}}]'),
        ("apertus", '<|tools_prefix|>[{"get_weather": {}}]<|tools_suffix|>'),
        ("cohere", '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {}}\n]<|END_ACTION|>'),
        ("ernie45", "<response>\n</response>\n<tool_call>\n" + '{"name": "get_weather", "arguments": {}}' + "\n</tool_call>"),
        ("internlm", '<|action_start|> <|plugin|>\n{"name": "get_weather", "parameters": {}}<|action_end|>'),
    ],
)  # fmt: skip
def test_functions_without_arguments_and_openings_that_models_vary(name, text):
    for seed in range(4):
        content, _, calls = read(parser_of(name), cut(text, seed))
        assert (content.removeprefix("Let me see."), calls) == ("", [["get_weather", "{}"]])


@pytest.mark.parametrize("name", [n for n in FORMATS if FORMATS[n]().interrupts(TOOLS)])
def test_a_call_within_reasoning_that_was_not_ended_is_found(name):
    form = FORMATS[name]()
    sample = SAMPLES[name].replace("Let me see.", "")
    parser = Parser(
        lambda parser: form.script(parser, TOOLS),
        THINK,
        thinking=True,
        interrupts=form.interrupts(TOOLS),
        wraps=form.wraps,
    )
    text = "hm" + sample[sample.index(form.trigger) :]
    content, reasoning, calls = read(parser, cut(text, 3))
    assert (content, reasoning, len(calls)) == ("", "hm", 2)


@pytest.mark.parametrize(
    "name", [n for n in FORMATS if len(FORMATS[n].wraps) > 1 and n != "gemma4"]
)
def test_markers_around_an_answer_are_no_content(name):
    begin, end, *_ = FORMATS[name].wraps
    for script in (None, lambda parser: FORMATS[name]().script(parser, TOOLS)):
        parser = Parser(script, THINK, wraps=FORMATS[name].wraps)
        assert read(parser, list(f"<think>hm</think>\n{begin}\nHello.\n{end}")) == (
            "Hello.",
            "hm",
            [],
        )


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('<|"|>a, {b}: "c"<|"|>', 'a, {b}: "c"'),
        ('[<|"|>x<|"|>,<|"|>y<|"|>]', ["x", "y"]),
        ('{k:[1,{<|"|>l<|"|>:null}],m:<|"|>}<|"|>}', {"k": [1, {"l": None}], "m": "}"}),
        ("[]", []),
        ("1.5", 1.5),
        ('"JSON\'s, too"', "JSON's, too"),
        ("two words", "two words"),
    ],
)
def test_values_of_gemma_are_read(written, value):
    text = f"<|tool_call>call:f{{x:{written},y:1}}<tool_call|>"
    for seed in range(4):
        _, _, ((name, given),) = read(parser_of("gemma4"), cut(text, seed))
        assert (name, json.loads(given)) == ("f", {"x": value, "y": 1})


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'a\nb'", "a\nb"),
        (r"'it\'s \u00e9 \d'", r"it's é \d"),
        ('"""a "b" c"""', 'a "b" c'),
        ("(1, -2.5, [true, None])", [1, -2.5, [True, None]]),
        ("{'a': {1: 'b'}}", {"a": {"1": "b"}}),
        ("07", 7),
    ],
)
def test_values_of_python_are_read(written, value):
    for seed in range(4):
        _, _, ((name, given),) = read(parser_of("pythonic"), cut(f"[f(from={written})]", seed))
        assert (name, json.loads(given)) == ("f", {"from": value})


def test_an_argument_says_whether_it_is_a_string():
    """DSML's does. It counts where the schema says nothing."""
    text = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="true">1'
        "</｜DSML｜parameter>\n"
        '<｜DSML｜parameter name="x" string="true">1</｜DSML｜parameter>\n<｜DSML｜parameter name="y" string="false">1'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    )
    (call,) = read(parser_of("deepseek_v32"), [text])[2]
    assert json.loads(call[1]) == {"a": 1, "x": "1", "y": 1}


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
        *(m for form in FORMATS.values() for m in (*form.markers, *form.wraps, form.trigger) if m),
        *("<invoke name=", "<parameter name=", "</invoke>", "</parameter>", "call:add{", '<|"|>'),
        *("functions.add:0", "\\ud800", '"\\ud800"', "add(a=", "'''", "\x00"),
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
        "kimi_k2": "<|tool_calls_section_begin|>{% for %}<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
        "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
        "functiongemma": "{{- '<start_function_call>call:' + function['name'] + '{' -}}",
        "hy_v3": "<tool_calls>\n<tool_call>{{ name }}<tool_sep>\n<arg_key>",
        "hy_v3_open": "{% set t = ':opensource' %}{{ '<tool_sep' ~ t ~ '>' ~ '<arg_key' ~ t ~ '>' }}",
        "deepseek_v32": "{% set dsml_token = '｜DSML｜' %}<{{ dsml_token }}function_calls> {{ message.tool_calls }}",
        "deepseek_v4": "{% set dsml_token = '｜DSML｜' %}<{{ dsml_token }}tool_calls>",
        "deepseek_v41": "{% set dsml_token = '｜DSML｜' %}<{{ dsml_token }} calls>",
        "step3": '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
        "minimax_m2": "{% set begin = '<minimax:tool_call>' %}<invoke name=",
        "dots": "<dots_function_call><invoke name=",
        "seed_oss": "<seed:tool_call>\n<function=x>\n<parameter=y>",
        "minicpm5": '<function name="f"><param name="x">',
        "apertus": "<|tools_prefix|>[",
        "cohere": "<|START_ACTION|>[<|START_RESPONSE|>",
        "internlm": "<|action_start|><|plugin|>",
        "longcat": "<longcat_tool_call>",
        "nemotron": '<TOOLCALL>[{{"name": "tool_name1"',
        "phi4_mini": "<|tool|>{{ tools }}<|/tool|>",
        "granite": "<|tool_call|>{{ calls }}",
        "hunyuan_a13b": "<tool_calls>[",
        "lfm2": "List of tools: {{ tools }} <|tool_call_start|>[",
        "ernie45": "<tool_call>\n{} <response>\n",
        "olmo3": "<function_calls>{{ calls }}</function_calls>",
        "kimi_k3": "{% macro open(x) %}<|open|>{{ x }}<|sep|>{% endmacro %} <|close|>message<|sep|>",
        "hy_v4": "<tool_calls:6124c78e>\n<tool_call:6124c78e>{{ name }}<arg_key:6124c78e>",
        "k2_horizon": "<ifm|tool_calls><ifm|tool_call>{{ name }}<ifm|arg_key>",
        "minimax_m3": "{% set ns = ']<]minimax[>[' %}{{ ns }}<tool_call>",
        "plamo3": "<|plamo:begin_tool_requests:plamo|>",
        "inkling": "<|message_model|><|content_text|>{{ text }}<|end_message|>",
        "gigachat3": "function call<|role_sep|>\n{{ call | tojson }}",
        "granite_20b_fc": "{{ '<function_call> ' + call | tojson }}",
        "xlam": "You are developed by Salesforce xLAM team.",
        "muse": "<|start|>assistant to=self<|message|> <atem:invoke name=",
        "muse_glimmer": "{{ raise_exception('MuseGlimmer needs …') }} <atem:invoke name=",
    }
    assert set(found) == set(FORMATS)
    for name, template in found.items():
        form = tool_format(None, template)
        assert form is not None
        assert form.name == name
    assert tool_format(None, "plain") is tool_format(None, None) is None
    assert tool_format("none", found["glm"]) is None
    assert tool_format("glm", "plain").name == tool_format("glm47", "plain").name == "glm"
    assert tool_format("phi4-mini-json", None).name == "phi4_mini"
    assert reasoning_markers(None, found["hermes"]) == THINK
    assert reasoning_markers("mistral", "plain") == ("[THINK]", "[/THINK]")
    assert reasoning_markers("deepseek-r1", "plain") == reasoning_markers("qwen3", "plain") == THINK
    assert reasoning_markers(None, "<seed:think>x</seed:think>") == REASONING["seed_oss"]
    assert reasoning_markers(None, "'<|channel>thought\\n<channel|>'") == REASONING["gemma4"]
    assert reasoning_markers("none", found["hermes"]) is reasoning_markers(None, "plain") is None
    for choose, field in (
        (tool_format, "tool_call_parser"),
        (reasoning_markers, "reasoning_parser"),
    ):
        with pytest.raises(ConfigError, match="known are") as error:
            choose("frob", None)
        assert error.value.field == field


@pytest.mark.parametrize(
    ("end", "opened", "closed"),
    [
        ("<|turn>model\n<|channel>thought\n", True, False),
        ("<|channel>thought\n<channel|>", False, True),
        ("<|turn>model\n", False, False),
    ],
)
def test_reasoning_that_the_prompt_begins_is_seen_where_a_line_ends_the_marker(end, opened, closed):
    template = "{{ '<|channel>thought\\n<channel|>' }}"
    made = reading(Formats(), OfferedTools(), template, lambda: end, to_name="")
    assert (made.opened, made.closed) == (opened, closed)


@pytest.mark.parametrize("name", FORMATS)
def test_whitespace_without_end_is_not_read_again_with_each_piece(name):
    """A model that writes newlines for ever may not cost the square of their number."""
    reading = Reading(form=FORMATS[name](), think=REASONING["think"], offered=tuple(TOOLS))
    for before in ("", "so", "<think>", "<think>so"):
        parser = reading.parser()
        parser.feed(before)
        for _ in range(50):
            parser.feed("\n")
            assert parser._buffer.count("\n") <= 1


def test_elements_within_each_other_without_end_are_no_error():
    mark, deep = "]<]minimax[>[", 3000
    call = f'{mark}<tool_call>{mark}<invoke name="f">{f"{mark}<a>" * deep}x'
    ends = f"{mark}</invoke>{mark}</tool_call>"
    for text in (call + f"{mark}</a>" * deep + ends, call + ends, call):
        parser = parser_of("minimax_m3")
        events = [*parser.feed(text), *parser.finish()]
        assert [event.name for event in events if isinstance(event, BeginCall)] == ["f"]
