"""Turns that the server wrote, sent back as the next request: all formats of calls, all protocols, generated turns.

A model's answer is what its template writes for a turn. The server reads it, a client keeps what it got and sends it back, and
the prompt must be what the template makes of the turn itself.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.text.chat_template import render
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.text.tool_formats import FORMATS, REASONING, tool_format
from slipstream.outputs import CompletionOutput, RequestOutput, RequestTimes
from slipstream.spec.description import read_spec
from tests.conftest import UNTIMED
from tests.server.conftest import serving
from tests.server.fake_engine import FakeEngine
from tests.support import tiny_models

VERSION = {"anthropic-version": "2023-06-01"}
PROTOCOLS = ("chat", "responses", "anthropic", "ollama")
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "near": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
        },
        "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "ok": {"type": "boolean"}}},
    "now": {"type": "object", "properties": {}},
}


# --- Templates: how each model writes a call, after its own ---------------------------------------------------------------

JSON = "{{ a if a is string else a | tojson }}"
PAIRS = "{% for k, v in a | items %}%s{% endfor %}"
VALUE = "{{ v if v is string else v | tojson }}"
EACH = "{% for c in m.tool_calls %}{% set f, a = c.function, c.function.arguments %}%s{% endfor %}"


def each(call, before="", between="", after=""):
    text = between and "{% if not loop.first %}" + between + "{% endif %}"
    return before + EACH.replace("%s", text + call) + after


def tagged(section, function, argument, pad="", lines=True):
    """Calls in tags; `section` holds all if it is a tuple of four."""
    n = "\n" if lines else ""
    pairs = PAIRS.replace(
        "%s", argument[0].replace("KEY", "{{ k }}") + pad + VALUE + pad + argument[1] + n
    )
    call = function[0].replace("NAME", "{{ f.name }}") + n + pairs + function[1]
    begin, end = section
    return each(call + "\n", begin + "\n", "", end)


def keyed(s="", p=""):
    pair = (
        f"<{p}arg_key{s}>{{{{ k }}}}</{p}arg_key{s}>\n<{p}arg_value{s}>{VALUE}</{p}arg_value{s}>\n"
    )
    return PAIRS.replace("%s", pair)


def listed(begin, end, name="name", arguments="arguments"):
    call = f'{{"{name}": "{{{{ f.name }}}}", "{arguments}": {JSON}}}'
    return each(call, begin + "[", ", ", "]" + end)


def dsml(section, mark="｜DSML｜"):
    function = (f'<{mark}invoke name="NAME">', f"</{mark}invoke>")
    kind = "{{ 'true' if v is string else 'false' }}"
    argument = (f'<{mark}parameter name="KEY" string="{kind}">', f"</{mark}parameter>")
    return tagged((f"\n\n<{mark}{section}>", f"</{mark}{section}>"), function, argument)


GEMMA = (
    "{% macro v(x) %}{% if x is string %}<q>{{ x }}<q>{% elif x is boolean %}{{ 'true' if x else 'false' }}"
    "{% elif x is none %}null{% elif x is mapping %}{ {%- for k, y in x | dictsort %}{{ ',' if not loop.first }}{{ k }}:"
    "{{ v(y) }}{% endfor %}}{% elif x is sequence %}[{% for y in x %}{{ ',' if not loop.first }}{{ v(y) }}{% endfor %}]"
    "{% else %}{{ x }}{% endif %}{% endmacro %}"
)
INVOKE = (('<invoke name="NAME">', "</invoke>"), ('<parameter name="KEY">', "</parameter>"))
FUNCTION = (("<function=NAME>", "</function>"), ("<parameter=KEY>", "</parameter>"))
DS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
HERMES = each(f'\n<tool_call>\n{{"name": "{{{{ f.name }}}}", "arguments": {JSON}}}\n</tool_call>')
GLM = each(f"\n<tool_call>{{{{ f.name }}}}\n{keyed()}</tool_call>")
PLAMO, MARK = "<|plamo:%s:plamo|>", "]<]minimax[>["
KIND = (
    "{{ 'string' if v is string else 'boolean' if v is boolean else 'null' if v is none else 'number' if v is number "
    "else 'array' }}"
)
ESCAPED = """k | replace('&', '&amp;') | replace('"', '&quot;')"""
K3_ARGUMENT = f'<|open|>argument key="{{{{ {ESCAPED} }}}}" type="{KIND}"<|sep|>{VALUE}<|close|>argument<|sep|>'
ELEMENTS = (
    "{% macro value(x) %}{% if x is mapping %}{{ elements(x) }}{% elif x is string or x is number or x is none %}"
    "{{ x if x is string else x | tojson }}{% else %}{% for y in x %}M<item>{{ value(y) }}M</item>{% endfor %}{% endif %}"
    "{% endmacro %}{% macro elements(x) %}{% for k, y in x | items %}M<{{ k }}>{{ value(y) }}M</{{ k }}>{% endfor %}"
    "{% endmacro %}"
).replace("M<", MARK + "<")
ATEM = each(
    "<|start|>assistant to={{ f.name }}<|message|><atem:function_calls>\n"
    '<atem:invoke name="{{ f.name }}">\n'
    + PAIRS.replace("%s", f'<atem:parameter name="{{{{ k }}}}">{VALUE}</atem:parameter>\n')
    + "</atem:invoke>\n</atem:function_calls><|eom|>"
)
PYTHON = "{{ f.name }}({% for k, v in a | items %}{{ ', ' if not loop.first }}{{ k }}={{ v | tojson }}{% endfor %})"
CALLS = {
    "hermes": HERMES,
    "longcat": HERMES.replace("tool_call>", "longcat_tool_call>"),
    "ernie45": HERMES,
    "internlm": each(f'<|action_start|><|plugin|>\n{{"name": "{{{{ f.name }}}}", "parameters": {JSON}}}<|action_end|>\n'),
    "qwen3_coder": each("\n<tool_call>\n<function={{ f.name }}>\n"
                        + PAIRS.replace("%s", "<parameter={{ k }}>\n" + VALUE + "\n</parameter>\n")
                        + "</function>\n</tool_call>"),
    "seed_oss": each("\n<seed:tool_call>\n<function={{ f.name }}>\n"
                     + PAIRS.replace("%s", "<parameter={{ k }}>" + VALUE + "</parameter>\n")
                     + "</function>\n</seed:tool_call>"),
    "minimax_m2": tagged(("\n<minimax:tool_call>", "</minimax:tool_call>"), *INVOKE),
    "dots": tagged(("\n<dots_function_call>", "</dots_function_call>"), *INVOKE),
    "minicpm5": each('<function name="{{ f.name }}">' + PAIRS.replace("%s", '<param name="{{ k }}">' + VALUE + "</param>")
                     + "</function>"),
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v41": dsml("calls", "｜DSML｜ "),
    "step3": tagged(
        ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        ('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">', "</steptml:invoke><｜tool_call_end｜>"),
        ('<steptml:parameter name="KEY">', "</steptml:parameter>"), lines=False),
    "glm": GLM,
    "hy_v3": each(f"<tool_call>{{{{ f.name }}}}<tool_sep>\n{keyed()}</tool_call>\n", "<tool_calls>\n", "", "</tool_calls>"),
    "hy_v3_open": each("<tool_call:opensource>{{ f.name }}<tool_sep:opensource>\n" + keyed(":opensource")
                       + "</tool_call:opensource>\n", "<tool_calls:opensource>\n", "", "</tool_calls:opensource>"),
    "nemotron": listed("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan_a13b": listed("<tool_calls>", "</tool_calls>"),
    "phi4_mini": listed("<|tool_call|>", "<|/tool_call|>"),
    "granite": listed("<|tool_call|>", ""),
    "mistral": listed("[TOOL_CALLS] ", ""),
    "apertus": each(f'{{"{{{{ f.name }}}}": {JSON}}}', "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
    "cohere": each(f'{{"tool_call_id": "{{{{ loop.index0 }}}}", "tool_name": "{{{{ f.name }}}}", "parameters": {JSON}}}',
                   "<|START_ACTION|>[", ", ", "]<|END_ACTION|>"),
    "mistral_args": each("[TOOL_CALLS]{{ f.name }}[ARGS]" + JSON),
    "deepseek_v3": each(f"{DS[1]}function{DS[2]}{{{{ f.name + '\n```json\n' + a }}}}\n```{DS[3]}", DS[0], "\n", DS[4]),
    "deepseek_v31": each(f"{DS[1]}{{{{ f.name + '{DS[2]}' + a }}}}{DS[3]}", DS[0], "", DS[4]),
    "kimi_k2": each("<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>" + JSON + "<|tool_call_end|>",
                    "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    "gemma4": each("<|tool_call>call:{{ f.name }}{{ v(a) }}<tool_call|>"),
    "functiongemma": each("<start_function_call>call:{{ f.name }}{{ v(a) }}<end_function_call>"),
    "llama3_json": each(f'{{"name": "{{{{ f.name }}}}", "parameters": {JSON}}}', "", "; "),
    "pythonic": each(PYTHON, "[", ", ", "]"),
    "lfm2": each(PYTHON, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "olmo3": each(PYTHON, "<function_calls>", "\n", "</function_calls>"),
    "gigachat3": each(f'{{"name": "{{{{ f.name }}}}", "arguments": {JSON}}}', "<|message_sep|>\n\nfunction call<|role_sep|>\n"),
    "granite_20b_fc": each(f'<function_call> {{"name": "{{{{ f.name }}}}", "arguments": {JSON}}}'),
    "inkling": each(f'<|message_model|>{{{{ f.name }}}}<|content_invoke_tool_json|>{{"name":"{{{{ f.name }}}}","args":{JSON}}}'
                    "<|end_message|>"),
    "xlam": listed("", ""),
    "plamo3": each(f"{PLAMO % 'begin_tool_request'}{PLAMO % 'begin_tool_name'}{{{{ f.name }}}}{PLAMO % 'end_tool_name'}"
                   f"{PLAMO % 'begin_tool_arguments'}<|plamo:constrain|>json<|plamo:msg|>" + JSON
                   + PLAMO % "end_tool_arguments" + PLAMO % "end_tool_request",
                   PLAMO % "begin_tool_requests", "", PLAMO % "end_tool_requests"),
    "kimi_k3": each('<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
                    + PAIRS.replace("%s", K3_ARGUMENT)
                    + "<|close|>call<|sep|>", "<|open|>tools<|sep|>", "", "<|close|>tools<|sep|>"),
    "minimax_m3": each(MARK + '<invoke name="{{ f.name }}">\n{{ elements(a) }}' + MARK + "</invoke>\n",
                       "\n" + MARK + "<tool_call>\n", "", MARK + "</tool_call>"),
    "muse": ATEM,
    "muse_glimmer": ATEM,
    "hy_v4": each(f"<tool_call>{{{{ f.name }}}}{keyed()}</tool_call>", "<tool_calls>", "", "</tool_calls>"),
    "k2_horizon": each(f"<ifm|tool_call>{{{{ f.name }}}}{keyed('', 'ifm|')}</ifm|tool_call>", "<ifm|tool_calls>", "",
                       "</ifm|tool_calls>"),
    "harmony": each("<|start|>assistant<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>"
                    + JSON + "<|call|>"),
}  # fmt: skip
ALONE = ("llama3_json", "pythonic", "xlam")
"""Formats whose calls have no content beside them."""
JSON_FORMATS = tuple(name for name, text in CALLS.items() if JSON in text)
THINK = {name: name for name in (*REASONING, "mistral_args")} | {
    "mistral_args": "mistral",
    "granite": "think",
}
"""Markers of reasoning by format; others have <think>."""
NINE = "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('ids of nine') }}{% endif %}{% endfor %}"
BOTH = "{% if m.content and m.thinking and m.tool_calls %}"
BOTH += "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
ONE = "{% if m.tool_calls | length > 1 %}"
ONE += "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"


def template_of(name):
    begin, end = REASONING[THINK.get(name, "think") if name != "mistral" else "think"]
    thought = f"{{% if m.reasoning_content %}}{begin}\n{{{{ m.reasoning_content }}}}\n{end}\n\n{{% endif %}}"
    content, checks = "{{ m.content or '' }}", ""
    if name == "harmony":
        thought = (
            "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        )
        content = "{% if m.content %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}{% endif %}"
        checks = BOTH
    elif name.startswith("mistral"):
        checks = NINE
    elif name == "llama3_json":
        checks = ONE + "{# <|python_tag|> #}"
    elif name == "pythonic":
        checks = "{# func_name1(params_name1=params_value1 #}"
    elif name == "ernie45":
        content = "{% if m.content %}<response>\n{{ m.content }}\n</response>\n{% endif %}"
    elif name == "deepseek_v41":
        checks = "{# calls> #}"
    elif name == "hy_v3_open":
        checks = "{# <tool_sep :opensource #}"
    elif name == "phi4_mini":
        checks = "{# <|tool|> #}"
    elif name == "xlam":
        checks = "{# xLAM #}"
    elif name == "kimi_k3":
        content = "{% if m.content %}<|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>{% endif %}"
    elif name == "inkling":
        content = "{% if m.content %}<|message_model|><|content_text|>{{ m.content }}<|end_message|>{% endif %}"
    elif name.startswith("muse"):
        checks = "{# MuseGlimmer #}" if name == "muse_glimmer" else ""
        thought = "{% if m.reasoning_content %}<|start|>assistant to=self<|message|>{{ m.reasoning_content }}<|eom|>{% endif %}"
        content = "{% if m.content %}<|start|>assistant to=user<|message|>{{ m.content }}<|eom|>{% endif %}"
    elif name == "minimax_m3":
        checks = ELEMENTS
    quote = {"gemma4": QUOTE, "functiongemma": "<escape>"}.get(name)
    macro = GEMMA.replace("<q>", quote) if quote else ""
    return (
        f"{macro}{{% for t in tools or [] %}}{{{{ t.function.name }}}} {{% endfor %}}\n"
        f"{{% for m in messages %}}{checks}<|im_start|>{{{{ m.role }}}}\n{{% if m.role == 'assistant' %}}{thought}{content}"
        f"{{% if m.tool_calls %}}{CALLS[name]}{{% endif %}}{{% elif m.role == 'tool' %}}"
        "{{ m.name }} {{ m.tool_call_id }}: {{ m.content }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


# --- A model that says what a test gives it -------------------------------------------------------------------------------


class ScriptedEngine(FakeEngine):
    """Says `script`, cut at random."""

    def __init__(self, tokenizer):
        super().__init__(max_model_len=100_000)
        self.tokenizer, self.script, self.rng = tokenizer, "", random.Random(0)
        self.reason = "stop"

    def _begin(self, prompt, sampling, priority):
        self.seen.append((prompt, sampling, priority))
        self.running += 1
        return prompt["prompt_token_ids"]

    @property
    def prompt(self):
        return self.tokenizer.decode(
            self.seen[-1][0]["prompt_token_ids"], skip_special_tokens=False
        )

    async def answer(self, ids, sampling):
        text = self.script
        while True:
            n = self.rng.choice((1, 2, 5, 40))
            piece, text = text[:n], text[n:]
            reason = None if text else self.reason
            output = CompletionOutput(0, piece, [5], None, reason)
            yield RequestOutput(
                "r", None, list(ids), [output], not text, times=RequestTimes(0.0, 0.0, 0.0)
            )
            if not text:
                return


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted")
    tiny_models.write_with_tokenizer(folder)
    engine = ScriptedEngine(Tokenizer.for_model(read_spec(folder)))
    with serving(engine) as server, server.http() as http:
        yield SimpleNamespace(engine=engine, http=http)


# --- Turns ------------------------------------------------------------------------------------------------------------------


@dataclass
class Turn:
    content: str = ""
    reasoning: str = ""
    calls: list = field(default_factory=list)  # (name, arguments: an object, or text that is none)


WORDS = (
    st.text(st.sampled_from("abc xyz é日😀.,:;!?*-_'\"()/\n0129"), min_size=1, max_size=30)
    .map(str.strip)
    .filter(bool)
)
QUOTE = '<|"|>'
"""Gemma 4's mark around texts. It has no escape, so a text can't hold it."""
TEXTS = st.text(st.sampled_from("ab é日😀\"'\\/{}[]()<>&,:;=|\n\t 01"), max_size=20).filter(
    lambda text: QUOTE not in text
)
ARGUMENTS = {
    "get_weather": st.fixed_dictionaries(
        {"city": TEXTS},
        optional={
            "days": st.integers(-(2**40), 2**40),
            "unit": st.none() | TEXTS.filter(lambda text: text.strip() not in ("null", "None")),
            "near": st.lists(
                st.fixed_dictionaries({"x": st.floats(-1e6, 1e6, width=32) | st.integers(0, 9)}),
                max_size=2,
            ),
        },
    ),
    "add": st.fixed_dictionaries(
        {},
        optional={
            "a": st.integers(-99, 99) | st.sampled_from([0.5, -2.25, 1e21]),
            "ok": st.booleans(),
        },
    ),
    "now": st.just({}),
}
BROKEN = st.sampled_from(['{"city": Rome}', "{'city': 1}", '{"a": 1,}', '{"a" 1}', '{"a": [1, 2}}'])


@st.composite
def turns(draw, name):
    kind = draw(st.sampled_from(["calls", "calls", "calls", "text"]))
    turn = Turn(reasoning=draw(st.just("") | WORDS))
    if kind == "text":
        turn.content = draw(WORDS)
        return turn
    if name not in ALONE:
        turn.content = draw(st.just("") | WORDS)
    for _ in range(
        draw(st.integers(1, 1 if name in ("harmony", "llama3_json", "gigachat3") else 3))
    ):
        called = draw(st.sampled_from([*TOOLS]))
        is_broken = name in JSON_FORMATS and not draw(st.integers(0, 5))
        turn.calls.append((called, draw(BROKEN if is_broken else ARGUMENTS[called])))
    return turn


def sent(arguments):
    """A call's arguments as the template gets them when the turn comes back."""
    return {"invalid_json": arguments} if isinstance(arguments, str) else arguments


class Conversation:
    """The messages in the form that the template of `name` takes, and what a client keeps of them."""

    def __init__(self, name, template):
        self.name, self.template = name, template
        self.messages = [{"role": "user", "content": "hi"}]
        self.count = 0

    def assistant(self, turn, arguments):
        text_only = self.name in ("deepseek_v3", "deepseek_v31")
        made = {"role": "assistant", "content": turn.content}
        if turn.reasoning:
            made |= {"reasoning_content": turn.reasoning, "thinking": turn.reasoning}
        if self.name == "harmony" and turn.calls and turn.content and turn.reasoning:
            made |= {"content": "", "thinking": f"{turn.reasoning}\n\n{turn.content}"}
        if turn.calls:
            made["tool_calls"] = [
                {
                    "id": self.id_of(called, self.count + k),
                    "type": "function",
                    "function": {
                        "name": called,
                        "arguments": json.dumps(arguments(value), ensure_ascii=False)
                        if text_only and not isinstance(arguments(value), str)
                        else arguments(value),
                    },
                }
                for k, (called, value) in enumerate(turn.calls)
            ]
        return made

    def id_of(self, called, number):
        if self.name == "kimi_k2":
            return f"functions.{called}:{number}"
        return f"id{number:07}"

    def text_of(self, turn):
        """The answer in which a model writes the turn."""
        given = {"tools": None, "bos_token": "", "eos_token": ""}
        made = self.assistant(turn, lambda value: value)
        if self.name == "harmony" and turn.calls:  # thoughts, a preamble, and a call
            said = (
                turn.content
                and f"<|start|>assistant<|channel|>commentary<|message|>{turn.content}<|end|>"
            )
            made |= {"content": "", "thinking": turn.reasoning}
        text = render(self.template, {**given, "messages": [made]})
        text = text.partition("<|im_start|>assistant\n")[2].rpartition("<|im_end|>")[0]
        if self.name == "harmony" and turn.calls and turn.content:
            at = text.index("<|start|>assistant<|channel|>commentary to=")
            text = text[:at] + said + text[at:]
        return text

    def append(self, turn):
        self.messages.append(self.assistant(turn, sent))
        for k, (called, _) in enumerate(turn.calls):
            result = {
                "role": "tool",
                "tool_call_id": self.id_of(called, self.count + k),
                "name": called,
            }
            self.messages.append({**result, "content": f"result {self.count + k}"})
        self.count += len(turn.calls)
        if not turn.calls:
            self.messages.append({"role": "user", "content": "go on"})

    def prompt(self):
        tools = [
            {"type": "function", "function": {"name": name, "parameters": p}}
            for name, p in TOOLS.items()
        ]
        messages = self.messages
        return render(
            self.template, {"messages": messages, "tools": tools, "add_generation_prompt": True}
        )


# --- Clients: each keeps what its protocol gave it --------------------------------------------------------------------------


def lines(text, prefix="data: "):
    return [
        json.loads(line[len(prefix) :])
        for line in text.split("\n")
        if line.startswith(prefix + "{")
    ]


class Chat:
    def __init__(self, http, stream):
        self.http, self.stream = http, stream
        self.said = [{"role": "user", "content": "hi"}]
        functions = [{"name": name, "parameters": p} for name, p in TOOLS.items()]
        self.tools = [{"type": "function", "function": f} for f in functions]

    def post(self, path, **body):
        answer = self.http.post(
            path, json={"model": "fake", "stream": self.stream, **body}, headers=VERSION
        )
        assert answer.status_code == 200, answer.text
        return answer

    def ask(self):
        """The turn as this client understands it."""
        answer = self.post("/v1/chat/completions", messages=self.said, tools=self.tools)
        if not self.stream:
            message = answer.json()["choices"][0]["message"]
        else:
            message = {
                "role": "assistant",
                "content": "",
                "tool_calls": [],
                "reasoning_content": "",
            }
            for event in lines(answer.text):
                for choice in event["choices"]:
                    delta = choice["delta"]
                    for name in ("content", "reasoning_content"):
                        message[name] += delta.get(name) or ""
                    for call in delta.get("tool_calls", ()):
                        if "id" in call:
                            message["tool_calls"].append(
                                {
                                    "id": call["id"],
                                    "type": "function",
                                    "function": {"name": call["function"]["name"], "arguments": ""},
                                }
                            )
                        message["tool_calls"][call["index"]]["function"]["arguments"] += call[
                            "function"
                        ].get("arguments", "")
            message = {k: v for k, v in message.items() if v or k in ("role", "content")}
        self.said.append(message)
        calls = [
            (c["id"], c["function"]["name"], c["function"]["arguments"])
            for c in message.get("tool_calls") or ()
        ]
        return message.get("content") or "", message.get("reasoning_content") or "", calls

    def result(self, id_, name, text):
        self.said.append({"role": "tool", "tool_call_id": id_, "content": text})

    def user(self, text):
        self.said.append({"role": "user", "content": text})


class Responses(Chat):
    def __init__(self, http, stream, kept=False):
        super().__init__(http, stream)
        self.tools = [
            {"type": "function", "name": name, "parameters": p} for name, p in TOOLS.items()
        ]
        self.kept, self.more = kept, {}

    def ask(self):
        answer = self.post(
            "/v1/responses", input=self.said, tools=self.tools, store=self.kept, **self.more
        )
        made = lines(answer.text)[-1]["response"] if self.stream else answer.json()
        if self.kept:
            self.said, self.more = [], {"previous_response_id": made["id"]}
        else:
            self.said += made["output"]
        content, thoughts, calls = "", "", []
        for item in made["output"]:
            if item["type"] == "message":
                content += "".join(part["text"] for part in item["content"])
            elif item["type"] == "reasoning":
                thoughts += "".join(part["text"] for part in item.get("content") or item["summary"])
            else:
                calls.append((item["call_id"], item["name"], item["arguments"]))
        return content, thoughts, calls

    def result(self, id_, name, text):
        self.said.append({"type": "function_call_output", "call_id": id_, "output": text})


class Anthropic(Chat):
    def __init__(self, http, stream):
        super().__init__(http, stream)
        self.tools = [{"name": name, "input_schema": p} for name, p in TOOLS.items()]

    def ask(self):
        body = {"messages": self.said, "tools": self.tools, "max_tokens": 5000}
        answer = self.post(
            "/v1/messages", **body, thinking={"type": "enabled", "budget_tokens": 1024}
        )
        blocks = [] if self.stream else answer.json()["content"]
        for event in lines(answer.text) if self.stream else ():
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                for name in ("text", "thinking", "signature"):
                    block |= {name: block.get(name, "") + delta[name]} if name in delta else {}
                block["json"] += delta.get("partial_json", "")
        for block in blocks:
            written = block.pop("json", "")
            if block["type"] == "tool_use" and self.stream:
                block["input"] = parsed(written)
        self.said.append({"role": "assistant", "content": blocks})
        calls = [
            (b["id"], b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"
        ]
        return (
            *tuple("".join(b.get(kind, "") for b in blocks) for kind in ("text", "thinking")),
            calls,
        )

    def result(self, id_, name, text):
        block = {"type": "tool_result", "tool_use_id": id_, "content": text}
        if self.said[-1]["role"] == "user":
            self.said[-1]["content"].append(block)
        else:
            self.said.append({"role": "user", "content": [block]})


def parsed(written):
    """Streamed input as a client reads it. Anthropic's manual tells clients to wrap what is no JSON."""
    try:
        found = json.loads(written or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"invalid_json": written}


class Ollama(Chat):
    def ask(self):
        answer = self.post("/api/chat", messages=self.said, tools=self.tools)
        parts = [json.loads(line)["message"] for line in answer.text.strip().split("\n")]
        message = {"role": "assistant", "content": "".join(p["content"] for p in parts)}
        if thoughts := "".join(p.get("thinking", "") for p in parts):
            message["thinking"] = thoughts
        if calls := [call for p in parts for call in p.get("tool_calls", ())]:
            message["tool_calls"] = calls
        self.said.append(message)
        found = [
            (c["id"], c["function"]["name"], json.dumps(c["function"]["arguments"])) for c in calls
        ]
        return message["content"], thoughts, found

    def result(self, id_, name, text):
        self.said.append({"role": "tool", "tool_name": name, "content": text, "tool_call_id": id_})


CLIENTS = {"chat": Chat, "responses": Responses, "anthropic": Anthropic, "ollama": Ollama}


# --- The property -----------------------------------------------------------------------------------------------------------


def same_ids(prompt, ids, conversation):
    """The prompt with the client's ids, or what became of them, as the conversation has them: by their order."""
    if conversation.name == "kimi_k2":
        return prompt
    found = list(dict.fromkeys(ID.findall(prompt)))
    assert len(found) <= len(ids)
    for number, id_ in enumerate(found):
        prompt = prompt.replace(id_, f"id{number:07}")
    return prompt


ID = re.compile(
    r"(?<=^get_weather )\S+(?=: result)|(?<=^add )\S+(?=: result)|(?<=^now )\S+(?=: result)",
    re.MULTILINE,
)


def round_trip(scripted, name, protocol, data):
    """Two or three turns. The number of turns."""
    template = template_of(name)
    assert tool_format(None, template).name == name
    engine = scripted.engine
    engine.tokenizer._templates = {"default": template}
    engine.rng = random.Random(data.draw(st.integers(0, 99)))
    stream = data.draw(st.booleans())
    more = {"kept": data.draw(st.booleans())} if protocol == "responses" else {}
    client = CLIENTS[protocol](scripted.http, stream, **more)
    conversation, ids = Conversation(name, template), []
    for number in range(data.draw(st.integers(2, 3))):
        turn = data.draw(turns(name))
        engine.script = conversation.text_of(turn)
        content, reasoning, calls = client.ask()
        prompt = same_ids(engine.prompt, ids, conversation)
        assert prompt == conversation.prompt(), f"request {number} renders something else"
        assert (content, reasoning) == (turn.content, turn.reasoning), engine.script
        is_text = protocol in ("chat", "responses")
        for (_, called, text), (expected, value) in zip(calls, turn.calls, strict=True):
            assert called == expected
            assert (text if is_text and isinstance(value, str) else json.loads(text)) == (
                value if is_text and isinstance(value, str) else sent(value)
            ), engine.script
        conversation.append(turn)
        first = conversation.count - len(turn.calls)
        for k, (id_, called, _) in enumerate(calls):
            ids.append(id_)
            client.result(id_, called, f"result {first + k}")
        if not calls:
            client.user("go on")
    return number + 1


def test_every_format_has_a_template():
    assert set(CALLS) == set(FORMATS)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(UNTIMED, max_examples=2)
def test_what_the_server_wrote_comes_back_as_the_template_wants_it(scripted, name, protocol, data):
    round_trip(scripted, name, protocol, data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", FORMATS)
def test_two_hundred_turns_come_back_as_the_template_wants_them(scripted, name, protocol):
    num_turns = 0

    @given(data=st.data())
    @settings(UNTIMED, max_examples=100)
    def run(data):
        nonlocal num_turns
        num_turns += round_trip(scripted, name, protocol, data)

    run()
    assert num_turns >= 200
