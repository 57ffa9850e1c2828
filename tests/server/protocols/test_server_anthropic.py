"""/v1/messages with Anthropic's official client: blocks, streams, tools, thinking, counts of tokens, errors."""

from __future__ import annotations

import json
from typing import Literal

import httpx
import jsonschema
import pytest
from pydantic import BaseModel

from slipstream.engine.text.tool_formats import REASONING
from tests.server.answers.test_server_tools import SCHEMAS
from tests.server.conftest import TEMPLATE
from tests.server.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S

TOOLS = [{"name": n, "description": "x", "input_schema": s} for n, s in SCHEMAS.items()]
SAID = [{"role": "user", "content": "Say hello."}]
ASK = {"model": "smollm2", "messages": SAID, "max_tokens": 8, "extra_body": {"temperature": 0}}


def drawn(**more):
    """Fields for which the client has no names any more."""
    return {"extra_body": {"temperature": 1, "seed": 1, **more}}


VERSION = {"anthropic-version": "2023-06-01"}
WHOLE = TEMPLATE.replace("arguments.city", "arguments | tojson")


class Colour(BaseModel):
    colour: Literal["red", "green"]


@pytest.fixture(name="anthropic")
def client_package():
    """Here, since importing it takes longer than all tests of this file, and each process of tests reads this file."""
    import anthropic

    return anthropic


def connect(server, **more):
    import anthropic

    return anthropic.Anthropic(
        **{"base_url": server.url, "api_key": "none", "max_retries": 0, "timeout": 30, **more}
    )


@pytest.fixture
def client(tiny_server):
    with connect(tiny_server) as client:
        yield client


def num_prompt(usage) -> int:
    """Tokens of the prompt: read from the cache, written to it, and the others."""
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def blocks(message):
    return [
        {k: v for k, v in block.to_dict().items() if k not in ("id", "parsed_output")}
        for block in message.content
    ]


def streamed(client, **ask):
    """The whole message of a stream, whose events are checked for their order."""
    with client.messages.stream(**ask) as stream:
        raw = [event for event in stream if event.type in KINDS]
        found = stream.get_final_message()
    kinds = [event.type for event in raw]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    open_block = None
    for event in raw[1:-2]:
        if event.type == "content_block_start":
            assert open_block is None
            open_block = event.index
        else:
            assert event.index == open_block
            open_block = None if event.type == "content_block_stop" else open_block
    assert open_block is None
    return found


KINDS = {f"content_block_{what}" for what in ("start", "delta", "stop")} | {
    "message_start",
    "message_delta",
    "message_stop",
}


def test_the_same_text_as_a_chat(client, tiny_server):
    with tiny_server.client() as openai:
        said = [{"role": "system", "content": "Be brief."}, *SAID]
        chat = openai.chat.completions.create(
            model="smollm2", messages=said, temperature=0, max_tokens=8
        )
    system = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    for given in ("Be brief.", system):
        message = client.messages.create(**ASK, system=given, metadata={"user_id": "u"})
        assert blocks(message) == [{"type": "text", "text": chat.choices[0].message.content}]
        assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
        assert (message.role, message.type) == ("assistant", "message")
        usage = message.usage
        assert num_prompt(usage) == chat.usage.prompt_tokens
        assert usage.output_tokens == 8
        assert message._request_id in message.id
    counted = client.messages.count_tokens(model="smollm2", messages=SAID, system="Be brief.")
    assert counted.input_tokens == chat.usage.prompt_tokens
    found = streamed(client, **ASK, system="Be brief.")
    assert blocks(found) == blocks(message)
    assert (found.stop_reason, found.usage.output_tokens) == ("max_tokens", 8)


def test_a_stop_sequence(client):
    whole = client.messages.create(**ASK | {"max_tokens": 20}).content[0].text
    stop = whole[5:7]
    for message in (
        client.messages.create(**ASK | {"max_tokens": 20}, stop_sequences=["no such", stop]),
        streamed(client, **ASK | {"max_tokens": 20}, stop_sequences=["no such", stop]),
    ):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        assert message.content[0].text == whole[: whole.index(stop)]


def test_the_end_of_a_turn_and_a_schema(client):
    found = client.messages.parse(**ASK | {"max_tokens": 300} | drawn(), output_format=Colour)
    assert isinstance(found.parsed_output, Colour)
    assert found.stop_reason == "end_turn"


@pytest.mark.parametrize("name", ["hermes", "harmony", "qwen3_coder"])
def test_calls_and_their_results(client, model, name):
    model(WHOLE, tool_call_parser=name)
    for seed in range(8):  # until it ends within its tokens
        ask = {
            **ASK,
            "max_tokens": 400,
            "tools": TOOLS,
            "tool_choice": {"type": "any"},
            **drawn(seed=seed),
        }
        message = client.messages.create(**ask)
        if message.stop_reason != "max_tokens":
            break
    calls = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    for call in calls:
        assert call.id.startswith("toolu_")
        jsonschema.validate(call.input, SCHEMAS[call.name])
    assert blocks(streamed(client, **ask)) == blocks(message)
    one = client.messages.create(
        **ask | {"tool_choice": {"type": "tool", "name": "note", "disable_parallel_tool_use": True}}
    )
    assert [block.name for block in one.content if block.type == "tool_use"] == ["note"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls
    ]
    results[0] |= {"content": [{"type": "text", "text": "sunny"}], "is_error": True}
    turn = [
        *SAID,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    assert client.messages.create(**ASK | {"messages": turn}, tools=TOOLS).content
    whole = client.messages.count_tokens(model="smollm2", messages=turn, tools=TOOLS)
    assert (
        whole.input_tokens
        > client.messages.count_tokens(model="smollm2", messages=SAID, tools=TOOLS).input_tokens
    )
    none = client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "none"})
    assert num_prompt(none.usage) < whole.input_tokens


def test_thinking_stands_in_a_block_of_its_own(client, model, monkeypatch):
    monkeypatch.setitem(REASONING, "think", ("<|im_start|>", "~"))
    begun = "{% if enable_thinking is not defined or enable_thinking %}<|im_start|>{% else %}~{% endif %}"
    model(TEMPLATE + begun, reasoning_parser="think")
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}
    output = {"format": {"type": "json_schema", "schema": schema}}
    for seed in range(8):  # until the end of thinking is drawn
        ask = {
            **ASK,
            "max_tokens": 900,
            "output_config": output,
            **drawn(seed=seed, top_k=0, top_p=1),
        }
        message = client.messages.create(**ask, thinking={"type": "adaptive"})
        if message.stop_reason == "end_turn":
            break
    thought, said = message.content
    assert (thought.type, thought.signature, said.type) == ("thinking", "", "text")
    assert thought.thinking
    assert blocks(streamed(client, **ask)) == blocks(message)
    off = client.messages.create(**ask, thinking={"type": "disabled"})
    assert [block.type for block in off.content] == ["text"]
    turn = [
        *SAID,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": "More."},
    ]
    assert client.messages.create(**ASK | {"messages": turn}).content


def test_a_message_of_the_assistant_is_gone_on_with(serve):
    server = serve()
    with connect(server) as client:
        said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
        client.messages.create(model="fake", messages=said, max_tokens=2)
        assert server.engine.tokenizer.variables["continue_final_message"]


def test_models_are_listed_in_anthropics_form(client):
    (found,) = client.models.list().data
    assert (found.id, found.type, found.max_input_tokens) == ("smollm2", "model", 1024)
    assert client.models.retrieve("smollm2").display_name == "smollm2"


# --- Errors -----------------------------------------------------------------------------------------------------------

PICTURE = {"type": "image", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(("more", "named"), [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "extra": 1}]}]},
        "extra"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"extra_body": {"temperature": 1.5}}, "temperature"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2}}, "budget_tokens"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"extra_body": {"nonsense": 1}}, "nonsense"),
    ({"extra_body": {"mcp_servers": [1]}}, "mcp_servers"),
])  # fmt: skip
def test_what_is_refused_names_its_field(anthropic, client, model, more, named):
    model(tool_call_parser="hermes")
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**ASK | more)
    body = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert named in body["error"]["message"]
    assert body["request_id"] == refused.value.request_id


def test_the_kinds_of_errors(anthropic, serve):
    server = serve(FakeEngine(max_queue=0), api_keys=("right",))
    ask = {"model": "fake", "messages": SAID, "max_tokens": 2}
    with (
        connect(server, api_key="wrong") as client,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        client.messages.create(**ask)
    assert refused.value.body["error"]["type"] == "authentication_error"
    with connect(server, api_key="right") as client:
        with pytest.raises(anthropic.RateLimitError) as refused:
            client.messages.create(**ask)
        assert (
            refused.value.body["error"]["type"],
            refused.value.response.headers["retry-after"],
        ) == ("rate_limit_error", "1")
        with pytest.raises(anthropic.NotFoundError) as refused:
            client.messages.create(**ask | {"model": "other"})
        assert refused.value.body["error"]["type"] == "not_found_error"
    with connect(server, api_key=None, auth_token="right") as client:
        assert client.messages.count_tokens(model="fake", messages=SAID).input_tokens > 0
    with httpx.Client(
        base_url=server.url, headers={"x-api-key": "right"}, timeout=PATIENCE_S
    ) as http:
        count = http.post("/v1/messages/count_tokens", json={"model": "fake", "messages": SAID})
        assert count.json()["input_tokens"] > 0  # without a version
        assert http.post("/v1/messages", json=ask).json()["error"]["type"] == "rate_limit_error"
        answer = http.post("/v1/messages", json=ask, headers={"anthropic-version": "2020-01-01"})
        assert (answer.status_code, answer.json()["type"]) == (400, "error")
        assert "anthropic-version" in answer.json()["error"]["message"]
        answer = http.get("/v1/messages", headers=VERSION)
        assert (answer.status_code, answer.json()["type"]) == (405, "error")
        assert (
            http.post("/v1/messages", content=b"{", headers=VERSION).json()["error"]["type"]
            == "invalid_request_error"
        )


def test_a_stream_that_breaks(anthropic, serve):
    engine = FakeEngine()
    engine.fail_after = 3
    with connect(serve(engine)) as client:
        with pytest.raises(anthropic.APIStatusError) as failed:
            list(client.messages.create(model="fake", messages=SAID, max_tokens=9, stream=True))
        assert failed.value.body["error"]["type"] == "overloaded_error"


def test_a_client_that_leaves_frees_its_blocks(serve):
    server = serve(FakeEngine(delay_s=0.01))
    with connect(server) as client:
        stream = client.messages.create(model="fake", messages=SAID, max_tokens=300, stream=True)
        next(iter(stream))
        stream.close()
        server.wait_idle()


def test_broken_arguments_stand_apart(client, model):
    """A model without a grammar may write arguments that are no JSON."""
    from slipstream.server.answers.tools import written_arguments

    assert written_arguments('{"a": 1}') == {"a": 1}
    assert written_arguments("") == {}
    assert written_arguments('{"a"') == {"invalid_json": '{"a"'}
    assert json.loads(json.dumps(written_arguments("[1]"))) == {"invalid_json": "[1]"}
