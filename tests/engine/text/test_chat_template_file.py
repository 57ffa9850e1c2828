"""A chat template from a file, instead of the model's."""

from __future__ import annotations

import argparse

import pytest

from slipstream import LLM, SamplingParams
from slipstream.cli.serving import serve
from slipstream.engine.text.chat_template import read_template, shaped_for
from slipstream.engine.text.tool_formats import tool_format
from slipstream.errors import ConfigError

DEEPSEEK = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>"
    "{{ c['function']['name'] + '<｜tool▁sep｜>' + c['function']['arguments'] }}<｜tool▁call▁end｜>{% endfor %}"
    "<｜tool▁calls▁end｜>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_the_file_stands_in_the_place_of_the_models_own(tiny_model, tmp_path):
    """A template that joins arguments as text, as DeepSeek's own do: turns with calls render with it."""
    file = tmp_path / "own.jinja"
    file.write_text(DEEPSEEK, encoding="utf-8")
    with LLM(str(tiny_model), device="cpu", dtype="float32", chat_template=str(file)) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer.chat_template == tokenizer.tool_template == DEEPSEEK
        assert tool_format(None, tokenizer.tool_template).name == "deepseek_v31"
        call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
        said = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "ok", "tool_call_id": "1"},
        ]
        tools = [{"type": "function", "function": {"name": "f"}}]
        (answer,) = llm.chat(said, SamplingParams(max_tokens=1), tools=tools, progress=False)
        prompt = tokenizer.decode(answer.prompt_token_ids)
        assert prompt == (
            "f<user>hi<assistant><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
            '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜><tool>ok<assistant>'
        )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{% for m in messages %}{{ m.content }}", "is broken"),
        (b"{{ 1 | nothing }}", "is broken"),
        (b"\xff\xfe", "no text in UTF-8"),
        (b"", "does not show the message"),
        (b'{"chat_template": "{{ messages }}"}', "does not show the message"),
        (b"{{ raise_exception('no') }}", "does not show the message"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path, content, says):
    file = tmp_path / "bad.jinja"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as error:
        read_template(str(file))
    assert error.value.field == "chat_template"
    assert str(file) in str(error.value)


def test_a_file_that_is_not_there_is_an_error_before_the_model_is_loaded(tiny_model, tmp_path):
    for name in (tmp_path / "none.jinja", tmp_path):
        with pytest.raises(ConfigError, match="can't be read") as error:
            LLM(str(tiny_model), chat_template=str(name))
        assert error.value.field == "chat_template"


def test_serve_has_the_option():
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    assert parser.parse_args(["m", "--chat-template", "own.jinja"]).chat_template == "own.jinja"


def test_a_template_may_say_type_and_still_shows_texts(tmp_path):
    file = tmp_path / "tools.jinja"
    file.write_text('{"type": "function"}{% for m in messages %}{{ m.content }}{% endfor %}')
    assert read_template(str(file))
    (plain,) = shaped_for(file.read_text(), [{"role": "user", "content": "hi"}], None)
    assert plain["content"] == "hi"
    parts = [{"type": "text", "text": "hi"}]  # this template would write the list as it is
    (joined,) = shaped_for(file.read_text(), [{"role": "user", "content": parts}], None)
    assert joined["content"] == "hi"
