"""Names of arguments where each stands alone, as a tag, an attribute or a word: read as written, or refused."""

from __future__ import annotations

import json
import random

import jinja2
import pytest

from slipstream.engine.text.tool_formats import FORMATS
from slipstream.engine.text.tool_formats.base import (
    Arguments,
    Parser,
    RequestError,
    Tool,
    ToolFormat,
    Writer,
)
from slipstream.engine.text.tools import Reading
from tests.server.answers.test_server_round_trips import CALLS, ELEMENTS, GEMMA, QUOTE

NAMED = [name for name, form in FORMATS.items() if form.carries is not ToolFormat.carries]
NESTED = ("gemma4", "functiongemma", "minimax_m3")
WORDS = (
    *("", "a", "ab", "é", "日", " ", "\n", '"', "'", "/", "\\", "{", "}", "(", ")", "[", "]", "<"),
    *(">", "&", ";", ",", ":", "=", "|", "-", ".", "$", "1", "0x", "1e5", "true", "None", "item"),
    *("invoke", "tool_call", "&quot;", "&amp;", "name=", 'type="string"', 'string="true"'),
)


def named(rng, form):
    words = (*WORDS, *form.markers, *getattr(form, "argument", ()), *getattr(form, "key_tag", ()))
    return "".join(rng.choices(words, k=rng.choice((0, 1, 1, 2, 2, 3, 4))))


def template_of(name):
    """A call as the model writes it, by the template of the round trips."""
    quote = {"gemma4": QUOTE, "functiongemma": "<escape>"}.get(name)
    macros = GEMMA.replace("<q>", quote) if quote else ELEMENTS if name == "minimax_m3" else ""
    return jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        macros + CALLS[name]
    )


def read(form, template, tool, arguments):
    """The arguments that the parser finds in the call, or the text of them if they are broken."""
    call = {"function": {"name": tool.name, "arguments": arguments}}
    text = template.render(m={"tool_calls": [call]}).removeprefix("<|start|>assistant")
    parser = Parser(lambda parser: form.script(parser, (tool,)))
    events = [*parser.feed(text), *parser.finish()]
    found = "".join(e.text for e in events if isinstance(e, Arguments))
    try:
        return json.loads(found)
    except ValueError:
        return found


def is_refused(form, tool):
    try:
        form.call(tool, Writer(lambda text: None, form.markers))
    except RequestError as error:
        said = error.message
    else:
        return False
    assert "can't be the name of an argument in the format" in said
    return True


def differ(name, number, seed):
    """Random names that were taken and read as something else, and how many were taken and refused."""
    form, template, rng = FORMATS[name](), template_of(name), random.Random(seed)
    wrong, counts = [], [0, 0]
    for _ in range(number):
        key, depth = named(rng, form), rng.randrange(2) if name in NESTED else 0
        schema = {"type": "object", "properties": {key: {"type": "integer"}}, "required": [key]}
        arguments = {key: 7}
        if depth:
            schema, arguments = {"type": "object", "properties": {"o": schema}}, {"o": arguments}
        tool = Tool("f", schema)
        refused = is_refused(form, tool)
        counts[refused] += 1
        if not refused and read(form, template, tool, arguments) != arguments:
            wrong.append((key, depth))
    return wrong, counts


@pytest.mark.parametrize("name", NAMED)
def test_names_of_arguments_are_read_as_written_or_refused(name):
    wrong, (taken, refused) = differ(name, 200, 0)
    assert wrong == []
    assert taken >= 20
    assert refused >= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_many_names_of_arguments_are_read_as_written_or_refused(name):
    assert differ(name, 5000, 1)[0] == []


@pytest.mark.parametrize("name", NAMED)
def test_usual_names_are_taken(name):
    form, template = FORMATS[name](), template_of(name)
    for key in ("city", "_x", "x1", "file_path", "名前"):
        tool = Tool("f", {"type": "object", "properties": {key: {"type": "integer"}}})
        assert not is_refused(form, tool)
        assert read(form, template, tool, {key: 7}) == {key: 7}


def test_kimi_k3_writes_names_as_its_template_escapes_them():
    tool = Tool("f", {"type": "object", "properties": {'a"&b': {"type": "integer"}}})
    written = FORMATS["kimi_k3"]().call(tool, Writer(lambda text: None))
    assert json.dumps('<|open|>argument key="a&quot;&amp;b" type="number"<|sep|>') in written


@pytest.mark.parametrize(
    ("name", "key"), [("pythonic", "-A"), ("lfm2", "-n"), ("olmo3", "-i"), ("minimax_m3", "a>b")]
)
def test_an_optional_argument_that_cannot_be_carried_is_left_out(name, key):
    form, schema = FORMATS[name](), {"type": "integer"}

    def grammar(**keys):
        tool = Tool("grep", {"type": "object", "properties": keys, "required": ["pattern"]})
        return form.call(tool, Writer(lambda text: None, form.markers))

    assert grammar(pattern=schema, **{key: schema}) == grammar(pattern=schema)
    tool = Tool("grep", {"type": "object", "properties": {key: schema}, "required": [key]})
    assert is_refused(form, tool)
    for offered, carries in ((tool, False), (Tool("f", {"properties": {"a": schema}}), True)):
        assert Reading(form=form, think=None, offered=(offered,)).carries_names == carries
