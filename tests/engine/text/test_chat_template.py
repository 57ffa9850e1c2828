"""Chat templates from strangers: each ends soon, in bounded memory, with an answer or a RequestError."""

from __future__ import annotations

import resource
import time

import pytest

from slipstream.engine.text import chat_template
from slipstream.engine.text.chat_template import MAX_SECONDS, render
from slipstream.errors import RequestError

MESSAGES = [{"role": "user", "content": "hello" * 20}] * 6
VARIABLES = {"messages": MESSAGES, "add_generation_prompt": True}
A = "{% set a='aaaaaaaaaa'*100000 %}"  # a million characters, which is allowed


def grow(start, step):
    return (
        "{% set ns = namespace(s="
        + start
        + ") %}{% for i in range(60) %}{% set ns.s = "
        + step
        + " %}{% endfor %}"
    )


BAD = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops over nothing": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "concat": grow("'a'", "ns.s ~ ns.s") + "{{ ns.s }}",
    "plus": grow("'a'", "ns.s + ns.s") + "{{ ns.s }}",
    "lists": grow("[1]", "ns.s + ns.s") + "{{ ns.s }}",
    "shared lists": grow("[1]", "[ns.s, ns.s]") + "{{ ns.s }}",
    "shared dicts": grow("{}", "{'a': ns.s, 'b': ns.s}") + "{{ ns.s|tojson }}",
    "shared dict()": grow("{}", "dict(a=ns.s, b=ns.s)") + "{{ ns.s|string }}",
    "shared namespaces": grow("{}", "namespace(a=ns.s, b=ns.s)") + "{{ ns.s }}",
    "namespaces": "".join(f"{{% set n{i} = namespace() %}}" for i in range(60))
    + "".join(f"{{% set n{i + 1}.a = n{i} %}}{{% set n{i + 1}.b = n{i} %}}" for i in range(59))
    + "{{ n59 }}{{ n59 ~ '' }}",
    "shared lists compared": grow("[1]", "[ns.s, ns.s]") + "{{ ns.s == ns.s }}",
    "times": "{{ 'a' * 10**9 }}",
    "times list": "{{ [0] * 10**9 }}",
    "times from the left": "{{ (10**9) * 'a' }}",
    "power": "{{ 10**(10**9) }}",
    "squares": "{% set ns=namespace(s=7) %}{% for i in range(99) %}{% set ns.s = ns.s*ns.s %}{% endfor %}{{ ns.s }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d'|format(999999999, 1) }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "format nested": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "center": "{{ 'a'|center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "replace": A + "{{ a.replace('a', a) }}",
    "replace filter": A + "{{ a|replace('a', a) }}",
    "replace nothing": A + "{{ a|replace('', a) }}",
    "join": A + "{{ a|join(a) }}",
    "join method": A + "{{ a.join(a) }}",
    "join defaults": A + "{{ range(99999)|map(attribute='x', default=a)|join }}",
    "list of defaults": A + "{{ range(99999)|map(attribute='x', default=a)|list|string }}",
    "output": "{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "output kept": "{% set z %}{% for i in range(99999) %}"
    + "x" * 100_000
    + "{% endfor %}{% endset %}{{ z|length }}",
    "variables kept": A
    + "{% set z %}{% for i in range(99999) %}{{ a }}{% endfor %}{% endset %}{{ z|length }}",
    "macro": "{% macro m() %}{% for i in range(99999) %}{{ messages * 100 }}{% endfor %}{% endmacro %}{{ m()|length }}",
    "recursion": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "tree": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
    "round": "{{ 1.5|round(10**9) }}",
    "tojson": "{{ [[[1]]]|tojson(indent=10**9) }}",
    "indent": "{{ 'a\nb'|indent(10**9) }}",
    "constants": "{{ 'a'|replace('a', 'b' * 10**10) }}",
    "lipsum": "{{ lipsum(10**6) }}",
    "translate": "{{ ('a'*10**6).translate({97:'b'*10**6}) }}",
    "expandtabs": "{{ ('\t'*10**6).expandtabs(99999) }}",
    "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "brackets": "{{ " + "[" * 3000 + "1" + "]" * 3000 + " }}",
    "date": "{{ strftime_now('%A' * 10000000) }}",
    "wide date": "{{ strftime_now('%0999999999d') }}",
    "select": "{% for i in range(99999) %}{{ range(99999)|select('odd')|list|length }}{% endfor %}",
    "count": A + "{% for i in range(99999) %}{{ a.count('aab') }}{% endfor %}",
    "in": A + "{% for i in range(99999) %}{{ 'aab' in a }}{% endfor %}",
    "class": "{{ messages.__class__.__mro__ }}",
    "too long": "a" * (2**20 + 1),
    "many words": "{{a}}" * 50_000,
    "many blocks": "{%if a%}x{%endif%}" * 14_000,
    "deep blocks": "{% for a in 'a' %}" * 5000 + "{% endfor %}" * 5000,
    "many parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
}

ONLY_SLOW = {"loops", "loops over nothing", "select", "count", "in"}
"""Templates that use up all the time they are given, and no memory."""


@pytest.mark.parametrize("name", BAD)
def test_a_hostile_template_is_stopped(monkeypatch, name):
    # A template that pays makes little in it; one that does not makes too much at once.
    seconds = MAX_SECONDS / 4
    monkeypatch.setattr(chat_template, "MAX_SECONDS", seconds)
    begin, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        RequestError, match=f"longer than {seconds:g} s" if name in ONLY_SLOW else None
    ) as caught:
        render(BAD[name], VARIABLES)
    assert time.thread_time() - begin < seconds + MAX_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 * 1024  # KiB
    assert caught.value.field == "messages"
    assert len(str(caught.value)) < 700


def test_what_is_wrong_with_a_template_is_found_out_once(monkeypatch):
    parsed, environment = [], chat_template._environment()
    from_string = environment.from_string
    monkeypatch.setattr(
        environment, "from_string", lambda text: parsed.append(text) or from_string(text)
    )
    broken = "{{a}}" * 5_000 + "{% for %}"
    for _ in range(2):
        with pytest.raises(RequestError, match="broken"):
            render(broken, VARIABLES)
    assert parsed == [broken]


def test_long_conversations_have_room():
    """A template that adds messages to one text copies it again and again; thousands of messages must fit all the same."""
    adds = "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s + m.content %}{% endfor %}{{ ns.s }}"
    messages = [{"role": "user", "content": "word " * 50}] * 2000
    assert render(adds, {"messages": messages}) == "word " * 100_000
    big = [{"role": "user", "content": "a" * 4_000_000}] * 2
    plain = "{% for m in messages %}{{ '<' + m.role + '>' + m.content|trim + '\n' }}{% endfor %}"
    assert len(render(plain, {"messages": big})) == 8_000_014


GOOD = [
    ("{{ messages|map(attribute='content')|join(', ') }}", "a, b"),
    (
        "{{ messages|tojson(indent=2) }}",
        '[\n  {\n    "content": "a"\n  },\n  {\n    "content": "b"\n  }\n]',
    ),
    ("{{ '%s-%d'|format('x', 3) }}{{ '{}'.format(5) }}{{ '%s' % 'y' }}", "x-35y"),
    ("{{ 'ab' * 3 }}{{ [1] * 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}", "ababab[1, 1]10243"),
    (
        "{{ 'a,b'.split(',')|length }}{{ ' x '.strip() }}{{ ', '.join(['p', 'q']) }}{{ 'aba'.replace('a', 'c') }}",
        "2xp, qcbc",
    ),
    ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) }}{% set z %}in{% endset %}{{ z }}", "<1>in"),
    (
        "{%- for a, b in {'k': 'v'}.items() %}{{ a }}{{ b }}{% if loop.last %}.{% endif %}{% endfor %}",
        "kv.",
    ),
    ("{% set (a, b) = (1, 2) %}{{ a }}{{ b }}{{ [a, b][::-1] }}{{ none is none }}", "12[2, 1]True"),
    (
        "{{ messages|selectattr('content', 'equalto', 'a')|list|length }}{{ messages[1:]|length }}",
        "11",
    ),
    ("{{ 'x\ny'|indent(2) }}{{ 3.7|round|int }}{{ 'é'|tojson }}", 'x\n  y4"é"'),
]


@pytest.mark.parametrize(("template", "text"), GOOD)
def test_what_templates_use_works(template, text):
    assert render(template, {"messages": [{"content": "a"}, {"content": "b"}]}) == text
