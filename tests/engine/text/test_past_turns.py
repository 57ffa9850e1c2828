"""Conversations with calls, in the shape that each kind of template takes."""

from __future__ import annotations

import pytest

from slipstream.engine.text.past_turns import past_turns
from slipstream.engine.text.tool_formats.base import Tool, Writer
from slipstream.engine.text.tool_formats.values import (
    MAX_ALTERNATIVES,
    alternatives,
    is_text,
    text_rule,
    value_of,
)

MISTRAL = "{% if tool_call.id|length != 9 %}{{ raise_exception('ids') }}{% endif %}"
LLAMA = "{{ raise_exception('This model only supports single tool-calls at once!') }}"
GPT_OSS = "{{ raise_exception('Cannot pass both content and thinking in an assistant message') }}"
DEEPSEEK = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c['function']['name'] + '\\n' + c['function']['arguments'] }}{% endfor %}{% endfor %}"
)


def calls(*ids, **more):
    made = [
        {"id": i, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}} for i in ids
    ]
    return {"role": "assistant", "content": "", "tool_calls": made, **more}


def results(*ids):
    return [{"role": "tool", "content": f"of {i}", "tool_call_id": i} for i in ids]


def test_ids_are_nine_letters_and_digits_and_the_same_in_call_and_result():
    made = past_turns(
        MISTRAL, [calls("call_1234567890", "abcdefghi"), *results("call_1234567890", "abcdefghi")]
    )
    ids = [call["id"] for call in made[0]["tool_calls"]]
    assert [message["tool_call_id"] for message in made[1:]] == ids
    assert ids[1] == "abcdefghi"
    assert len(ids[0]) == 9
    assert ids[0].isalnum()


def test_each_further_call_is_a_message_of_its_own_with_its_results():
    thoughts = {"reasoning_content": "hm", "thinking": "hm"}
    made = past_turns(LLAMA, [calls("a", "b", **thoughts), *results("b", "a")])
    assert [message.get("thinking") for message in made] == ["hm", None, None, None]
    assert "reasoning_content" not in made[2]
    assert [(m["role"], len(m.get("tool_calls", ())), m.get("tool_call_id")) for m in made] == [
        ("assistant", 1, None),
        ("tool", 0, "a"),
        ("assistant", 1, None),
        ("tool", 0, "b"),
    ]


def test_content_beside_thoughts_goes_to_their_end():
    (made,) = past_turns(
        GPT_OSS, [calls("a", thinking="I think", content="Wait.") | {"content": "Wait."}]
    )
    assert (made["content"], made["thinking"]) == ("", "I think\n\nWait.")


def test_arguments_are_text_for_a_template_that_joins_them():
    (made,) = past_turns(DEEPSEEK, [calls("a")])
    assert made["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    (kept,) = past_turns(
        "{{ messages[0].tool_calls[0].function.arguments | tojson }}", [calls("a")]
    )
    assert kept["tool_calls"][0]["function"]["arguments"] == {"a": 1}


KIMI = (
    "<|tool_calls_section_begin|>{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{% endfor %}{% endfor %}"
)
R1 = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{% for m in messages %}<|turn>{{ m.role }}\n{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    "{% for r in m.tool_responses or [] %}{{ r.name }}{{ r.response }}{% endfor %}{{ m.content }}{% endfor %}"
)


def test_ids_count_the_calls_of_the_conversation():
    said = [calls("a", "b"), *results("a", "b"), calls("a"), *results("a")]
    made = past_turns(KIMI, said)
    ids = [call["id"] for message in made for call in message.get("tool_calls", ())]
    assert ids == ["functions.f:0", "functions.f:1", "functions.f:2"]
    assert [m["tool_call_id"] for m in made if m["role"] == "tool"] == ids


def test_a_result_has_the_name_of_its_function():
    named = {"role": "tool", "content": "", "tool_call_id": "a", "name": "own"}
    made = past_turns("", [calls("a"), *results("a", "none"), named])
    assert [message.get("name") for message in made[1:]] == ["f", None, "own"]


def test_content_is_a_message_of_its_own_where_calls_have_none():
    made = past_turns(R1, [calls("a", content="Wait.", thinking="hm") | {"content": "Wait."}])
    assert [(m["content"], "tool_calls" in m, m.get("thinking")) for m in made] == [
        ("Wait.", False, "hm"),
        (None, True, None),
    ]
    assert made[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    (alone,) = past_turns(R1, [calls("a")])
    assert alone["content"] is None


def test_results_stand_in_the_message_of_their_calls_where_the_template_takes_them_there():
    after = {"role": "assistant", "content": "done"}
    made = past_turns(GEMMA, [calls("a", "b"), *results("a", "b"), after])
    responses = [{"name": "f", "response": "of a"}, {"name": "f", "response": "of b"}]
    assert [(m["content"], m["tool_responses"]) for m in made] == [("done", responses)]
    later = GEMMA.replace("<|turn>{{ m.role }}", "{{ m.role }}")  # one that knows messages of tools
    assert len(past_turns(later, [calls("a"), *results("a"), after])) == 3


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "98765", "98765"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"]}, "01234", "01234"),
        ({"$ref": "#/$defs/Name"}, "true", "true"),
        ({"$ref": "#/$defs/Name"}, "1e5", "1e5"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "integer"}, "12", 12),
        ({"oneOf": [{"type": "integer"}, {"type": "array"}]}, "[1]", [1]),
        ({"type": "string"}, "None", "None"),
        ({"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "integer"}]}, "5", "5"),
        ({"$ref": "#/$defs/Loop"}, "5", 5),
    ],
)
def test_argument_has_the_type_that_its_schema_allows(schema, text, value):
    defs = {"Name": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}
    tool = Tool("f", {"type": "object", "properties": {"x": schema}, "$defs": defs})
    found = value_of(text, [tool], "f", "x")
    assert (found, type(found)) == (value, type(value))


def test_every_string_of_a_union_of_literals_can_be_written():
    union = {"anyOf": [{"const": f"word {i}"} for i in range(200)]}
    assert len(alternatives(union)) == 200
    assert is_text(union)
    assert '"word 199"' in text_rule(union, Writer(lambda text: None), "f.x", "</x>")
    assert not is_text({"anyOf": [{"const": str(i)} for i in range(MAX_ALTERNATIVES + 1)]})
