"""Chat templates beside transformers: the same text, or both refuse."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from slipstream.engine.text.chat_template import render
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import RequestError
from tests.support import tiny_models

CALL = {"name": "f", "arguments": {"a": 1, "é": "ü<"}}
MESSAGES = [
    {"role": "system", "content": "be * good"},
    {"role": "user", "content": "Hi 12345 <b>&\n x "},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": CALL}]},
    {"role": "tool", "content": "7", "name": "f", "tool_call_id": "c1"},
    {"role": "assistant", "content": "<think>\nso\n</think>\n\nseven"},
    {"role": "user", "content": "and?"},
]
PLAIN = [MESSAGES[1], MESSAGES[4], MESSAGES[5]]
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
VARIABLES = {
    "tools": [TOOL],
    "documents": None,
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "big": 12345678901,
    "neg": -3,
    "f": 1.5,
    "empty": [],
    "none": None,
}
REFUSED = "(refused)"


def both(template, messages=MESSAGES, **variables):
    """The texts that transformers and our renderer make."""
    given = {**VARIABLES, **variables}
    try:
        theirs = render_jinja_template([messages], chat_template=template, **given)[0][0]
    except Exception:
        theirs = REFUSED
    try:
        ours = render(template, {**given, "messages": messages})
    except RequestError:
        ours = REFUSED
    return theirs, ours


FEATURES = [
    # a name or a field that is not there
    "{{ messages[0]['metadata'] }}x{{ nothing }}{{ messages[0].metadata ~ 'a' ~ nothing }}",
    "{{ nothing.x }}",
    "{{ messages[99].role }}",
    "{{ messages[99] }}{{ messages[99] is defined }}{{ messages.x }}{{ none.x }}{{ 'abc'[5] }}",
    "{% for m in nothing %}a{% else %}b{% endfor %}",
    "{{ nothing|length }}{{ nothing|list }}{{ nothing|string }}{{ nothing|upper }}{{ nothing|trim }}",
    "{{ nothing|default('q') }}{{ nothing|default(99999999) }}{{ nothing|int }}{{ nothing|items|list }}",
    "{{ nothing + 'a' }}",
    "{{ 'a' + nothing }}",
    "{{ nothing * 3 }}",
    "{{ nothing % 3 }}",
    "{{ -nothing }}",
    "{{ nothing() }}",
    "{{ nothing|tojson }}",
    "{{ [nothing]|tojson }}",
    "{{ [nothing] }}{{ {'a': nothing} }}{{ (nothing,) }}{{ [1, none, nothing]|join(',') }}",
    "{{ '%s' % nothing }}{{ '%s'|format(nothing) }}{{ '{}'.format(nothing) }}",
    "{{ nothing in [1] }}{{ 'x' in nothing }}{{ nothing is none }}{{ nothing == none }}{{ not nothing }}",
    "{{ nothing and 'x' }}{{ nothing or 'x' }}{{ 1 if false }}{{ (1 if false) ~ 'a' }}",
    "{% set ns = namespace(a=nothing) %}{{ ns.a }}{{ ns.c }}{% set ns.d = nothing %}{{ ns.d }}{{ ns }}",
    "{% set x %}a{{ nothing }}b{% endset %}{{ x }}{% filter upper %}c{{ nothing }}{% endfilter %}",
    "{% with a = 1, b = nothing %}{{ a }}{{ b }}{% endwith %}{% set a, b = 1, nothing %}{{ a }}{{ b }}",
    "{{ messages|map(attribute='metadata')|list }}{{ messages|join('|', attribute='metadata') }}",
    "{{ []|first }}{{ []|last }}{{ []|max }}{{ loop }}{{ caller }}{{ self }}",
    # macros, loops and other objects
    "{% macro f(x, y) %}[{{ x }}{{ y }}{{ varargs }}{{ kwargs }}]{% endmacro %}{{ f(1) }}{{ f(1, 2, 3, z=4) }}{{ f() }}",
    "{% macro f() %}{{ caller('q') }}{% endmacro %}{% call(u) f() %}<{{ u }}{{ nothing }}>{% endcall %}",
    "{% for m in messages %}{{ loop.index }}{{ loop.first }}{{ loop.previtem }}{{ loop.nextitem.role }}{% endfor %}",
    "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{{ loop.revindex0 }}{{ loop }}{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
    "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for g in messages|groupby('role') %}{{ g.grouper }}{{ g.list|length }}{% endfor %}",
    "{{ cycler('a', 'b').next() }}{% set j = joiner('|') %}{{ j() }}a{{ j() }}b{{ dict(a=1, b=nothing) }}",
    "{% generation %}a{{ nothing }}{% endgeneration %}{% block x %}a{{ nothing }}{% endblock %}",
    "{% include 'x' %}",
    "{{ raise_exception('no') }}",
    "{{ namespace(_x=1) }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    # texts
    "{{ '* %s' % 'x' }}{{ '20251 %d%%' % 5 }}{{ '%(a(b))s' % {'a(b)': 1} }}{{ '%5.2f|%-5s|' % (1.5, 'a') }}",
    "{{ '* {} 20251'.format(5) }}{{ '{:>10}{!r}{a[b]}'.format(1, 2, a={'b': 3}) }}{{ '{{}}'.format() }}",
    "{{ '%s %s' % ('a',) }}",
    "{{ ', '.join([1, 2]) }}",
    "{{ ', '.join([nothing]) }}",
    "{{ ', '.join(messages|map(attribute='role')) }}{{ 'a'.join('xyz') }}{{ ''.join({'a': 1}) }}",
    "{{ ('<b>'|e) + '<i>' }}{{ ('<b>'|e) * 2 }}{{ ('&%s'|safe) % '<' }}{{ ('&{}'|safe).format('<') }}",
    "{{ ('&'|safe).join(['<', '>']) }}{{ ['<', ('>'|safe)]|join('&') }}{{ '<'|forceescape }}",
    "{{ 'abc'|center(9) }}|{{ 'a b c'|wordcount }}{{ 'abcdef ghijkl mno'|truncate(9) }}{{ 'a b'|urlencode }}",
    "{{ 'x'.find('y', 999999) }}{{ 'x'|int(default=5000000) }}{{ big|default(99999999) }}{{ big * 2 }}",
    "{{ 'a\nb\n\nc'|indent }}{{ 'a\nb'|indent(2, true) }}{{ 'xxaxx'|trim('x') }}{{ 'aaa'|replace('a', 'b', 2) }}",
    # lists and numbers
    "{{ range(10)|sum }}{{ [[1], [2]]|sum(start=[]) }}{{ [1, 2, 3]|batch(2, 0)|list }}{{ [1, 2, 3]|slice(2)|list }}",
    "{{ {'b': 1, 'a': 2}|dictsort }}{{ {'b': 1}|items|list }}{{ {'b': 1}.items() }}{{ messages[0].keys() }}",
    "{{ 7 // 2 }}{{ 7 / 2 }}{{ -7 % 3 }}{{ 2 ** -1 }}{{ (1,) * 2 }}{{ true * 3 }}{{ 'a' * true }}{{ 0.1 + 0.2 }}",
    "{{ tools|tojson(indent=4) }}{{ {'b': 1, 'a': []}|tojson(sort_keys=true, separators=(',', ':')) }}{{ '<'|e|tojson }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].pop('role') }}",
    "{{ ''.__class__ }}",
    "{{ documents is defined }}{{ documents }}",
]


@pytest.mark.parametrize("template", FEATURES)
def test_feature_gives_the_text_of_transformers(template):
    theirs, ours = both(template)
    assert ours == theirs


TURN = "{% if add_generation_prompt %}"
FORMATS = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}" + TURN + "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama2": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set sys = messages[0].content %}"
    "{% else %}{% set rest = messages %}{% set sys = false %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and sys != false %}{% set c = '<<SYS>>\n' + sys + '\n<</SYS>>\n\n' + m.content %}"
    "{% else %}{% set c = m.content %}{% endif %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + c.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + c.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "llama3": "{{- bos_token }}{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}"
    "{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- for m in messages %}"
    "{%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in m %}{%- if not m.tool_calls|length == 1 %}{{- raise_exception('one') }}{%- endif %}"
    '{%- set t = m.tool_calls[0].function %}{{- \'{"name": "\' + t.name + \'", "parameters": \' }}{{- t.arguments | tojson }}'
    "{{- '}' }}{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}"
    "{%- endif %}{%- endfor %}",
    "mistral": "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
    "{%- set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}{%- set ns = namespace(index=0) %}"
    "{{- bos_token }}{%- for m in loop_messages %}{%- if m.role == 'user' %}{%- if tools is not none and (m == users[-1]) %}"
    "{{- '[AVAILABLE_TOOLS]' + (tools|tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- if loop.last and system is defined %}{{- '[INST]' + system + '\n\n' + m.content + '[/INST]' }}{%- else %}"
    "{{- '[INST]' + m.content + '[/INST]' }}{%- endif %}{%- elif m.tool_calls is defined and m.tool_calls is not none %}"
    "{{- '[TOOL_CALLS][' }}{%- for c in m.tool_calls %}{%- set out = c.function|tojson %}{{- out[:-1] }}"
    "{%- if c.id is not defined %}{{- raise_exception('id') }}{%- endif %}{{- ', \"id\": \"' + c.id + '\"}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}{%- endfor %}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content|trim + eos_token }}{%- else %}"
    "{%- set content = m.content.content if m.content.content is defined else m.content %}"
    "{{- '[TOOL_RESULTS]' + content|string }}"
    "{%- endif %}{%- set ns.index = ns.index + 1 %}{%- endfor %}{{ ns.index }}",
    "gemma": "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}"
    "{% if m.content is string %}{{ m.content | trim }}{% elif m.content is iterable %}"
    "{% for p in m.content %}{{ p.text | trim }}"
    "{% endfor %}{% else %}{{ raise_exception('Invalid') }}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}",
    "qwen3": "{%- set ns = namespace(multi=true, last=messages|length - 1) %}{%- for m in messages[::-1] %}"
    "{%- set i = (messages|length - 1) - loop.index0 %}{%- if ns.multi and m.role == 'user' and m.content is string and not"
    "(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}{%- set ns.multi = false %}"
    "{%- set ns.last = i %}{%- endif %}{%- endfor %}{%- for m in messages %}{%- set reasoning = '' %}"
    "{%- if m.reasoning_content is string %}{%- set reasoning = m.reasoning_content %}{%- elif '</think>' in m.content %}"
    "{%- set reasoning = m.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- m.role ~ ns.last ~ reasoning }}{%- for t in m.tool_calls %}{{- t.name }}"
    "{{- t.function.arguments | tojson }}{%- endfor %}"
    "{%- endfor %}"
    + TURN
    + "{%- if enable_thinking is defined and enable_thinking is false %}no{%- endif %}{%- endif %}",
    "deepseek": "{% set ns = namespace(is_first=false, is_tool=false, system_prompt='') %}{%- for m in messages %}"
    "{%- if m['role'] == 'system' %}{% set ns.system_prompt = m['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}"
    "{{ ns.system_prompt }}{%- for m in messages %}{%- if m['role'] == 'assistant' and m['content'] is none %}N{%- endif %}"
    "{%- if m['role'] == 'assistant' and m['content'] is not none %}"
    "{% set content = m['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<A>' + content + '<E>' }}{%- endif %}{%- endfor -%}",
    "glm4": "[gMASK]<sop>{% for item in messages %}{% if item['tools'] is defined and item['tools'] is not none %}T{% endif %}"
    "{% if item['content'] %}<|{{ item['role'] }}|>{{ item['metadata'] }}\n{{ item['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "phi": "{% for m in messages %}{% if m['role'] == 'system' and m['content'] %}"
    "{{'<|system|>\n' + m['content'] + '<|end|>\n'}}"
    "{% elif m['role'] == 'user' %}{{'<|user|>\n' + m['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "granite": "{%- if tools %}{{- 'tools' + tools | tojson(indent=4) }}{%- endif %}{%- if documents %}"
    "{%- for d in documents %}"
    "{{- 'Document ' + loop.index | string + '\n' + d['text'] }}{%- if not loop.last %}{{- '\n\n' }}{%- endif %}{%- endfor %}"
    "{%- endif %}{%- for m in messages %}{{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] }}{%- endfor %}"
    "{%- if controls is defined %}{{- controls | tojson }}{%- endif %}",
    "command-r": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% else %}"
    "{% set loop_messages = messages %}{% endif %}{% macro kind(t) %}{{ {'string': 'str', 'integer': 'int'}[t] }}{% endmacro %}"
    "{%- macro args(p) %}{%- for name, field in p.properties.items() %}{{ name }}: {{ kind(field.type) }}"
    "{% if not loop.last %}, {% endif %}{%- endfor %}{%- endmacro %}{% for t in tools %}"
    "{% if loop.index0 != 0 %}{{ '\n\n' }}{% endif %}"
    "def {{ t.function.name }}({{ args(t.function.parameters) }}){% endfor %}{% for m in loop_messages %}"
    "{{ '<|' + m.role|upper + '_TOKEN|>' + m.content.strip() }}{% endfor %}",
    "gpt-oss": "{%- macro render(spec, required) -%}{%- if spec.type == 'array' -%}"
    "{{- render(spec['items'], required) + '[]' -}}"
    "{%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping and "
    "spec.type[0] is defined -%}{{- spec.type | join(' | ') }}{%- elif spec.enum -%}"
    "{{- '\"' + spec.enum|join('\" | \"') + '\"' -}}"
    "{%- else -%}{{- spec.type or 'any' -}}{%- endif -%}{%- endmacro -%}{%- for t in tools %}{%- set t = t.function %}"
    "{{- 'type ' + t.name + ' = (_: {\n' }}{%- for n, s in t.parameters.properties.items() %}{{- n }}"
    "{%- if n not in (t.parameters.required or []) %}{{- '?' }}{%- endif %}{{- ': ' + render(s, t.parameters.required or []) }}"
    "{%- if s.default is defined %}D{%- endif %}{%- endfor %}{%- endfor %}"
    "{%- set last = namespace(name=none) %}{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{%- if 'tool_calls' in m %}"
    "{%- set c = m.tool_calls[0].function %}{%- set last.name = c.name %}"
    "{{- '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary ' }}"
    "{{- (c.content_type if c.content_type is defined else 'json') + '<|message|>' }}{{- c.arguments|tojson + '<|call|>' }}"
    "{%- elif loop.last and not add_generation_prompt %}{{- m.content + '<|return|>' }}"
    "{%- else %}{{- m.content + '<|end|>' }}{%- endif %}"
    "{%- elif m.role == 'tool' %}{%- if last.name is none %}{{- raise_exception('no call') }}{%- endif %}"
    "{{- '<|start|>functions.' + last.name + '<|message|>' + m.content|tojson }}{%- endif %}{%- endfor -%}",
    "smollm3": "{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}"
    "{%- set mode = '/think' if enable_thinking else '/no_think' -%}{%- set ns = namespace(system=messages[0].content) -%}"
    "{%- if '/no_think' in ns.system -%}{%- set custom = ns.system.replace('/no_think', '').rstrip() -%}{%- endif -%}"
    "{{- custom ~ mode }}{%- if xml_tools or tools -%}"
    "{%- for t in (xml_tools or tools)[:10] %}{{- t | string }}{%- endfor -%}{%- endif -%}"
    "{%- for m in messages -%}{%- set content = m.content if m.content is string else '' -%}{%- generation -%}"
    "{{- content }}{%- endgeneration -%}{%- endfor -%}",
    "hermes": "{%- macro to_type(s) %}{%- set m = {'integer': 'int'} %}{%- if s.type == 'array' %}list{%- elif s.type in m %}"
    "{{- m[s.type] }}{%- else %}{{- s.type }}{%- endif %}{%- endmacro %}{%- for t in tools %}"
    "{%- set f = t.function|default(t) %}"
    "{{- f.name ~ '(' }}{%- for n, s in (f.parameters.properties|items) %}{{- n ~ ': ' ~ to_type(s) }}{%- endfor %}{{- ')' }}"
    "{{- f.return|default(none) }}{%- endfor %}",
    "llama4": "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- if messages[0]['content'] is string %}"
    "{%- set sys = messages[0]['content']|trim %}{%- else %}{%- set sys = messages[0]['content'][0]['text']|trim %}{%- endif %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set sys = '' %}{%- endif %}{{- sys }}{%- for m in messages %}"
    "{%- if m['content'] is string %}{{- m['content'] }}{%- else %}{%- for c in m['content'] %}{%- if c['type'] == 'image' %}"
    "{{- '<|image|>' }}{%- elif c['type'] == 'text' %}{{- c['text'] | trim }}{%- endif %}{%- endfor %}{%- endif %}"
    "{%- if m.tool_calls|length > 0 %}{{- m.tool_calls|map(attribute='function')|map(attribute='name')|join(',') }}{%- endif %}"
    "{%- endfor %}",
}


@pytest.mark.parametrize("messages", [MESSAGES, PLAIN, PLAIN[:1]], ids=["tools", "plain", "one"])
@pytest.mark.parametrize("name", FORMATS)
def test_format_of_a_family_gives_the_text_of_transformers(name, messages):
    for tools in ([TOOL], None):
        theirs, ours = both(FORMATS[name], messages, tools=tools)
        assert ours == theirs


VALUES = (
    "nothing", "none", "true", "3", "1.5", "'a<b'", "''", "[1, 'x']", "[]", "{'k': 'v'}", "messages", "messages[0]",
    "messages[0].content", "messages[2].tool_calls", "m", "loop", "ns.x", "messages[1].metadata", "('<'|e)", "range(3)",
)  # fmt: skip
FILTERS = (
    "trim", "upper", "length", "list", "string", "first", "last", "join(', ')", "tojson", "default('d')", "items|list", "sort",
    "map('string')|list", "int", "e", "replace('a', 'b')", "reverse|list", "unique|list", "sum", "title", "select|list", "abs",
)  # fmt: skip
TESTS = (
    "defined",
    "none",
    "string",
    "mapping",
    "iterable",
    "sequence",
    "number",
    "true",
    "callable",
)
values = st.sampled_from(VALUES)
expressions = st.recursive(
    values,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(FILTERS)).map(lambda p: f"({p[0]})|{p[1]}"),
        st.tuples(
            inner, st.sampled_from(("+", "~", "*", "%", "-", "and", "or", "in", "==", "<")), inner
        ).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        st.tuples(inner, st.sampled_from(TESTS)).map(lambda p: f"({p[0]} is {p[1]})"),
        st.tuples(inner, inner, inner).map(lambda p: f"({p[0]} if {p[1]} else {p[2]})"),
        st.tuples(
            inner, st.sampled_from((".x", "['k']", "[0]", "[1:]", ".strip()", ".get('k')"))
        ).map(lambda p: f"({p[0]}){p[1]}"),
        inner.map(lambda x: f"[{x}, 1]"),
        inner.map(lambda x: f"{{'q': {x}}}"),
    ),
    max_leaves=4,
)
statements = st.recursive(
    expressions.map(lambda x: f"{{{{ {x} }}}}"),
    lambda inner: st.one_of(
        st.tuples(expressions, inner).map(lambda p: f"{{% if {p[0]} %}}{p[1]}{{% endif %}}"),
        st.tuples(expressions, inner).map(lambda p: f"{{% for m in {p[0]} %}}{p[1]}{{% else %}}-{{% endfor %}}"),
        st.tuples(expressions, inner).map(lambda p: f"{{% set ns.x = {p[0]} %}}{p[1]}"),
        st.tuples(expressions, inner).map(lambda p: f"{{% set m = {p[0]} %}}{p[1]}"),
        inner.map(lambda x: f"{{% macro g(m) %}}{x}{{% endmacro %}}{{{{ g(1) }}}}{{{{ g() }}}}"),
        inner.map(lambda x: f"{{% set y %}}{x}{{% endset %}}{{{{ y }}}}"),
        st.tuples(inner, inner).map("".join),
    ),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(body=statements)
def test_any_template_gives_the_text_of_transformers(body):
    theirs, ours = both("{% set ns = namespace(x=1) %}" + body)
    if " object at 0x" not in theirs:  # which names an address
        assert ours == theirs


# --- Which template, and what it is given -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    tiny_models.write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    return tmp_path


def wrote(folder, *, config=None, default=None, **named):
    """The folder with its templates: `config` is the entry in tokenizer_config.json."""
    file = folder / "tokenizer_config.json"
    settings_ = json.loads(file.read_text()) | {"chat_template": config}
    file.write_text(json.dumps({k: v for k, v in settings_.items() if v is not None}))
    if default is not None:
        (folder / "chat_template.jinja").write_text(default)
    for name, text in named.items():
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    return AutoTokenizer.from_pretrained(folder), Tokenizer.from_pretrained(folder)


LISTED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


@pytest.mark.parametrize(
    "templates",
    [
        {"config": "C"},
        {"config": LISTED},
        {"config": "C", "default": "F"},
        {"config": LISTED, "default": "F"},
        {"default": "F", "tool_use": "T", "rag": "R"},
        {"config": LISTED, "rag": "R"},
        {"tool_use": "T"},
        {"config": LISTED[1:]},
        {},
    ],
)
@pytest.mark.parametrize(
    "asked",
    [{}, {"tools": [TOOL]}, {"tools": []}, {"chat_template": "rag"}, {"chat_template": "{{ 1 }}"}],
)
def test_template_is_chosen_as_transformers_does(folder, templates, asked):
    theirs, ours = wrote(folder, **templates)
    found = []
    for tokenizer in (theirs, ours):
        try:
            found.append(tokenizer.apply_chat_template(PLAIN, tokenize=False, **asked))
        except (ValueError, RequestError):
            found.append(REFUSED)
    assert found[1] == found[0]


def test_messages_reach_the_template_as_from_transformers(folder):
    shown = (
        "{% for m in messages %}{{ m.content }}|{{ m.thinking }}|{{ m.reasoning_content }}|"
        "{{ m.keys()|sort }}\n{% endfor %}"
    )
    theirs, ours = wrote(folder, default=shown + "{{ documents }}{{ tools }}")
    messages = [
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]},
        {"role": "assistant", "content": "b", "reasoning": "r"},
        {"role": "assistant", "content": "b", "reasoning_content": "c", "thinking": "t"},
    ]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(messages) == expected


@pytest.mark.parametrize("shown", ["m.content", "m.content|trim", "m.content ~ '.'"])
def test_last_message_is_continued_as_by_transformers(folder, shown):
    theirs, ours = wrote(
        folder, default=f"{{% for m in messages %}}<{{{{ {shown} }}}}>{{% endfor %}}"
    )
    given = {"continue_final_message": True, "add_generation_prompt": False, "tokenize": False}
    messages = [*PLAIN, {"role": "assistant", "content": " so far  "}]
    expected = theirs.apply_chat_template(messages, **given)
    assert ours.apply_chat_template(messages, **given) == expected
