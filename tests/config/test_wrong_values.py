"""Wrong values of settings and messages are answered with those that there are, and the likely one."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.base.arguments import likely_value
from slipstream.config.settings import EngineArgs, one_of
from slipstream.engine.text.tools import ROLES, for_template
from slipstream.errors import ConfigError, RequestError
from slipstream.server.http.errors import ApiError
from slipstream.server.openai.messages import Message, message_dict
from slipstream.server.openai.protocol import ChatRequest

DTYPES = ("auto", "float32", "bfloat16", "float16")


@pytest.mark.parametrize(
    ("given", "likely"),
    [
        ("fp16", "float16"),
        ("half", "float16"),
        ("BF16", "bfloat16"),
        ("float", "float32"),
        ("flaot16", "float16"),
    ],
)
def test_other_engines_names_of_types(given, likely):
    with pytest.raises(ConfigError, match=f"did you mean '{likely}'") as caught:
        one_of("dtype", given, DTYPES)
    assert caught.value.field == "dtype"
    assert likely_value("qqqq", DTYPES) == ""


@pytest.mark.parametrize("role", ["usr", "", None, 5, "us", "User"])
def test_a_role_that_there_is_not(role):
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(RequestError, match=r"messages\[1\]: role .* use one of system") as caught:
        for_template([{"role": "user", "content": "a"}, {"role": role, "content": "b"}], template)
    assert caught.value.field == "messages"


def test_roles_of_the_api_and_of_the_template():
    said = [{"role": role, "content": "a"} for role in (*ROLES, "ipython")]
    assert for_template(said, "{% if m.role == 'ipython' %}") == said
    with pytest.raises(RequestError, match="must be a dict"):
        for_template(["hello"], None)


def test_a_role_over_http():
    with pytest.raises(ApiError, match="did you mean 'user'"):
        message_dict(Message(role="usr", content="a"), "messages[0]")


@pytest.mark.parametrize("given", [50, -1])
def test_top_logprobs_is_named_as_such(given):
    body = ChatRequest(
        model="m", messages=[Message(role="user", content="a")], logprobs=True, top_logprobs=given
    )
    with pytest.raises(ApiError, match=f"top_logprobs must be from 0 to 20, got {given}") as caught:
        body.check()
    assert caught.value.param == "top_logprobs"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_threads", "4"),
        ("device", 0),
        ("model", 5),
        ("kv_cache_bytes", "2GiB"),
        ("enforce_eager", "yes"),
    ],
)
def test_settings_of_another_type_are_named_where_they_are_given(
    name, value
):  # some are read before the others are looked at
    with pytest.raises(ConfigError, match=f"{name} must be .*, got {value!r}") as caught:
        EngineArgs(**{"model": "m", name: value})
    assert caught.value.field == name


def test_a_setting_may_be_a_path():
    args = EngineArgs(model=Path("a") / "b", tokenizer=Path("c"))
    assert (args.model, args.tokenizer) == (str(Path("a") / "b"), "c")
