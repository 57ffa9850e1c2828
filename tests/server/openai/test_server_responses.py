"""/v1/responses with the official client: items, the order of events, conversations that are kept, and what is refused."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from typing import Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from slipstream.engine.text.tool_formats import REASONING
from slipstream.errors import ConfigError
from slipstream.server.openai.response_store import ResponseStore, StoredResponse
from slipstream.server.state import ServerSettings
from tests.server.answers.test_server_tools import SCHEMAS
from tests.server.conftest import TEMPLATE, serving
from tests.server.fake_engine import FakeEngine

TOOLS = [
    {"type": "function", "name": n, "description": "x", "parameters": s, "strict": False}
    for n, s in SCHEMAS.items()
]
ASK = {"model": "smollm2", "input": "Say hello.", "temperature": 0, "max_output_tokens": 8}


class Colour(BaseModel):
    colour: Literal["red", "green"]
    tags: list[Literal["a", "b"]] = Field(max_length=2)


@pytest.fixture
def client(tiny_server):
    with tiny_server.client() as client:
        yield client


def test_the_same_text_as_a_chat(client):
    chat = client.chat.completions.create(
        model="smollm2", messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}],
        temperature=0, max_tokens=8,
    )  # fmt: skip
    answer = client.responses.create(**ASK, instructions="Be brief.", metadata={"a": "b"})
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 8)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.object, answer.model, answer.metadata, answer.instructions) == (
        *("response", "smollm2"), {"a": "b"}, "Be brief.",
    )  # fmt: skip
    counted = client.responses.input_tokens.count(
        model="smollm2", input="Say hello.", instructions="Be brief."
    )
    assert counted.input_tokens == chat.usage.prompt_tokens
    items = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Say "},
                {"type": "input_text", "text": "hello."},
            ],
        }
    ]
    assert (
        client.responses.create(**ASK | {"input": items}, instructions="Be brief.").output_text
        == answer.output_text
    )


def check_stream(events, final):
    """OpenAI's order; what the pieces make is what the last event says."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    place, item = 2, None
    for index, item in enumerate(final.output):
        inside, what = {
            "message": (True, "output_text"),
            "reasoning": (True, "reasoning_text"),
            "function_call": (False, "function_call_arguments"),
        }[item.type]
        added = events[place]
        assert (added.type, added.output_index, added.item.type) == (
            "response.output_item.added",
            index,
            item.type,
        )
        assert added.item.id == item.id
        place += 1
        if inside:
            assert kinds[place] == "response.content_part.added"
            place += 1
        text = ""
        while kinds[place] == f"response.{what}.delta":
            assert (events[place].item_id, events[place].output_index) == (item.id, index)
            text += events[place].delta
            place += 1
        assert kinds[place] == f"response.{what}.done"
        whole = item.content[0].text if inside else item.arguments
        assert text == whole == (events[place].text if inside else events[place].arguments)
        place += 1
        if inside:
            assert kinds[place] == "response.content_part.done"
            place += 1
        assert kinds[place] == "response.output_item.done"
        assert events[place].item.to_dict() == item.to_dict()
        place += 1
    assert place == len(events) - 1


def outline(answer):
    """The part of an answer that is the same in every run."""

    def bare(item):
        return {k: v for k, v in item.items() if k not in ("id", "call_id")}

    return (
        [bare(item.to_dict()) for item in answer.output],
        answer.status,
        answer.usage.output_tokens,
    )


def test_a_streams_last_event_is_the_whole_answer(client):
    whole = client.responses.create(**ASK)
    events = list(client.responses.create(**ASK, stream=True))
    check_stream(events, events[-1].response)
    assert outline(events[-1].response) == outline(whole)
    with client.responses.stream(
        model="smollm2",
        input="Hi",
        text_format=Colour,
        max_output_tokens=500,
        extra_body={"seed": 1},
    ) as stream:
        list(stream)
        assert isinstance(stream.get_final_response().output_parsed, Colour)


def test_parse_and_a_schema(client):
    ask = {"model": "smollm2", "input": "Hi", "max_output_tokens": 500, "extra_body": {"seed": 1}}
    found = client.responses.parse(**ask, text_format=Colour)
    assert isinstance(found.output_parsed, Colour)
    assert found.status == "completed"
    assert found.text.format.name == "Colour"
    answer = client.responses.create(**ask, text={"format": {"type": "json_object"}})
    assert answer.output_text.lstrip().startswith("{")
    form = {
        "type": "json_schema",
        "name": "x",
        "schema": {"type": "object", "properties": {"a": {"not": {}}}},
    }
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ask, text={"format": form})
    assert refused.value.param == "text.format.schema"


@pytest.mark.parametrize("name", ["hermes", "harmony", "qwen3_coder"])
def test_calls_and_their_results(client, model, name):
    model(TEMPLATE.replace("arguments.city", "arguments | tojson"), tool_call_parser=name)
    ask = {
        "model": "smollm2",
        "input": "Hi",
        "tools": TOOLS,
        "tool_choice": "required",
        "max_output_tokens": 400,
    }
    ask |= {"temperature": 2, "extra_body": {"seed": 1}}
    answer = client.responses.create(**ask)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls
    for call in calls:
        assert (call.id[:3], call.call_id[:5], call.status) == ("fc_", "call_", "completed")
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    events = list(client.responses.create(**ask, stream=True))
    check_stream(events, events[-1].response)
    assert outline(events[-1].response) == outline(answer)
    named = client.responses.create(**ask | {"tool_choice": {"type": "function", "name": "note"}})
    assert [item.name for item in named.output if item.type == "function_call"] == ["note"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        for call in calls
    ]
    last = {"model": "smollm2", "tools": TOOLS, "max_output_tokens": 3}
    sent = client.responses.create(
        **last, input=[{"role": "user", "content": "Hi"}, *answer.output, *results]
    )
    kept = client.responses.create(**last, input=results, previous_response_id=answer.id)
    assert sent.usage.input_tokens == kept.usage.input_tokens > answer.usage.input_tokens


def test_reasoning_is_an_item(client, model, monkeypatch):
    monkeypatch.setitem(REASONING, "think", ("<|im_start|>", "~"))
    model(
        TEMPLATE + "{% if add_generation_prompt %}<|im_start|>{% endif %}", reasoning_parser="think"
    )
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}
    ask = {
        "model": "smollm2",
        "input": "Hi",
        "max_output_tokens": 900,
        "temperature": 2,
        "top_p": 1,
    }
    ask |= {
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
        "extra_body": {"seed": 1, "top_k": 0},
    }
    answer = client.responses.create(**ask, include=["reasoning.encrypted_content"])
    thought, said = answer.output
    assert (thought.type, said.type, answer.status) == ("reasoning", "message", "completed")
    assert thought.content[0].text
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    events = list(client.responses.create(**ask, stream=True))
    check_stream(events, events[-1].response)
    assert outline(events[-1].response) == outline(answer)
    again = client.responses.input_tokens.count(
        model="smollm2", input=[*answer.output, {"role": "user", "content": "More"}]
    )
    assert again.input_tokens > 0


def test_log_probabilities_come_for_every_token(client):
    ask = {**ASK, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = client.responses.create(**ASK, include=ask["include"], top_logprobs=2)
    found = answer.output[0].content[0].logprobs
    assert len(found) == 8
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in found)
    events = list(client.responses.create(**ask, stream=True))
    told = [
        entry
        for event in events
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert [entry.token for entry in told] == [entry.token for entry in found]


# --- What is kept -------------------------------------------------------------------------------------------------------


def prompt_of(server):
    return server.engine.tokenizer.decode(server.engine.seen[-1][0]["prompt_token_ids"])


def test_a_conversation_is_kept(serve):
    server = serve()
    with server.client() as client:
        first = client.responses.create(
            model="fake", input="one", max_output_tokens=4, instructions="secret"
        )
        (done,) = [e for e in client.responses.create(
            model="fake", input="two", max_output_tokens=4, previous_response_id=first.id, stream=True
        ) if e.type == "response.incomplete"]  # fmt: skip
        third = client.responses.create(
            model="fake", input="three", max_output_tokens=4, previous_response_id=done.response.id
        )
        assert (
            prompt_of(server)
            == "user:one\nassistant:syst\nuser:two\nassistant:user\nuser:three\nassistant:"
        )
        assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
        listed = list(client.responses.input_items.list(third.id, limit=2, order="asc"))
        assert [item.content[0].text for item in listed] == ["one", "syst", "two", "user", "three"]
        page = client.responses.input_items.list(third.id, limit=2)
        assert ([item.content[0].text for item in page.data], page.has_more) == (
            ["three", "user"],
            True,
        )
        client.responses.delete(first.id)
        for call in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                call(first.id)
        with pytest.raises(openai.NotFoundError, match="no longer kept") as gone:
            client.responses.create(model="fake", input="x", previous_response_id=third.id)
        assert (gone.value.param, gone.value.code) == (
            "previous_response_id",
            "previous_response_not_found",
        )
        assert not client.responses.create(model="fake", input="x", store=False).to_dict()["store"]
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.cancel(third.id)


def test_nothing_is_kept(serve):
    server = serve(max_stored_responses=0)
    with server.client() as client:
        answer = client.responses.create(model="fake", input="one")
        assert answer.to_dict()["store"] is False
        for more, field in (
            ({"store": True}, "store"),
            ({"previous_response_id": answer.id}, "previous_response_id"),
        ):
            with pytest.raises(openai.BadRequestError, match="--max-stored-responses") as refused:
                client.responses.create(model="fake", input="one", **more)
            assert refused.value.param == field
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)


def test_a_restart_and_another_key(tmp_path):
    settings = {"state_dir": str(tmp_path / "state"), "api_keys": ("one", "two")}
    with serving(**settings) as server, server.client(api_key="one") as client:
        answer = client.responses.create(model="fake", input="one")
    with serving(**settings) as server:
        with server.client(api_key="one") as client:
            assert client.responses.retrieve(answer.id).output_text == answer.output_text
        modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "state").iterdir()}
        assert len(modes) == 3
        assert set(modes.values()) == {0o600}
        with server.client(api_key="two") as client:
            for call in (
                client.responses.retrieve,
                client.responses.delete,
                client.responses.input_items.list,
            ):
                with pytest.raises(openai.NotFoundError):
                    call(answer.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.create(model="fake", input="x", previous_response_id=answer.id)


async def test_the_store_is_bounded_and_keeps_conversations_in_use(tmp_path):
    store = ResponseStore(tmp_path / "s", max_responses=3, max_bytes=10_000)
    other = ResponseStore(tmp_path / "s", max_responses=3, max_bytes=10_000)  # of another front end

    async def put(id_, previous=None, text=""):
        await store.put("me", StoredResponse(id_, previous, {"output": [{"text": text}]}, []))

    await put("a")
    await put("b", "a")
    await put("c")
    assert [found.id for found in await other.conversation("me", "b", max_bytes=999)] == ["a", "b"]
    await put("d")
    assert await store.get("me", "c") is None
    assert await store.conversation("me", "b", max_bytes=999) != "a"
    await put("e", text="x" * 9_950)
    assert [id_ for id_ in "abde" if await other.get("me", id_) is not None] == ["e"]
    assert not await store.delete("you", "e")
    assert await store.conversation("me", "nobody", max_bytes=999) == "nobody"
    for one in (store, other):
        one.close()


@pytest.mark.parametrize("waits", [True, False])
def test_a_store_that_another_front_end_makes_is_waited_for(tmp_path, monkeypatch, waits):
    other, pauses = sqlite3.connect(tmp_path / "s", isolation_level=None), []
    other.execute("begin immediate")  # it is about to change the file
    monkeypatch.setattr("slipstream.server.openai.response_store._BUSY_S", 10.0 if waits else 0.0)

    def pause(seconds):
        pauses.append(seconds)
        other.execute("commit")

    monkeypatch.setattr("slipstream.server.openai.response_store.time.sleep", pause)
    with (
        contextlib.nullcontext()
        if waits
        else pytest.raises(ConfigError, match="database is locked")
    ):
        ResponseStore(tmp_path / "s", max_responses=3, max_bytes=1000).close()
    assert len(pauses) == waits
    other.close()


def test_a_full_disk_is_said(serve, monkeypatch):
    server = serve()

    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("slipstream.server.openai.response_store._use", full)
    with server.client() as client:
        with pytest.raises(
            openai.InternalServerError, match="disk is full; send store=false"
        ) as failed:
            client.responses.create(model="fake", input="one")
        assert (failed.value.status_code, failed.value.code) == (503, "storage_failed")
        events = list(
            client.responses.create(model="fake", input="one", stream=True, max_output_tokens=2)
        )
        assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
        assert client.responses.create(model="fake", input="one", store=False).output_text


# --- Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "input[0].content[0].file_id",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "x", "extra": 1}]}, "input[0].extra"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": TOOLS}, "tool_choice.name"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
    ],
)
def test_what_is_refused_names_its_field(client, model, more, param):
    model(tool_call_parser="hermes")
    with pytest.raises(openai.APIStatusError) as refused:
        client.responses.create(**ASK | more)
    assert refused.value.status_code in (400, 404)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=000000001000", "limit=x", "order=up", "after=nobody", "what=1"]
)
def test_wrong_queries_of_a_stored_answer_are_refused(shared, query):
    with shared.client() as client, shared.http() as http:
        answer = client.responses.create(model="fake", input="one")
        assert http.get(f"/v1/responses/{answer.id}/input_items?{query}").status_code == 400
        assert http.get(f"/v1/responses/{answer.id}?stream=true").status_code == 400
        assert http.get(f"/v1/responses/{answer.id}?starting_after=3").status_code == 400


def test_a_client_that_leaves_is_forgotten(serve):
    server = serve(FakeEngine(delay_s=0.01))
    with server.client() as client:
        stream = client.responses.create(model="fake", input="one", stream=True)
        first = next(iter(stream))
        stream.close()
        server.wait_idle()
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.response.id)


def test_an_engine_that_dies_ends_the_stream_with_an_event(serve):
    engine = FakeEngine()
    engine.fail_after = 3
    with serve(engine).client() as client:
        events = list(client.responses.create(model="fake", input="one", stream=True))
        assert events[-1].type == "response.failed"
        assert "killed" in events[-1].response.error.message
        assert [event.sequence_number for event in events] == list(range(len(events)))
        with pytest.raises(openai.InternalServerError):
            client.responses.create(model="fake", input="one")


def test_a_negative_number_of_stored_answers_is_refused():
    with pytest.raises(Exception, match="max_stored_responses"):
        ServerSettings(max_stored_responses=-1)


@pytest.mark.parametrize(
    "item",
    [
        rb'{"type":1e999}',
        b'{"type":"\xff"}',
        rb'{"role":"assistant","content":[{"type":"output_text","text":"a","annotations":[1e999]}]}',
        rb'{"type":"reasoning","summary":[{"type":"summary_text","a":1e999}],"content":[{"type":"reasoning_text","text":"a"}]}',
    ],
)
def test_values_that_no_one_can_read_are_refused_before_anything_is_made(serve, item):
    server = serve()
    with server.http() as http:
        answer = http.post(
            "/v1/responses", content=b'{"input":[' + item + b',{"role":"user","content":"x"}]}'
        )
        assert (answer.status_code, server.engine.seen) == (400, [])


def test_a_conversation_goes_on_after_a_call_that_was_cut(serve):
    server = serve()
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "un'}
    kept = StoredResponse(
        "resp_cut",
        None,
        {"output": [call]},
        [{"type": "message", "role": "user", "content": "one"}],
    )
    server.call(server.state.responses.put("", kept))
    with server.client() as client:
        results = [{"type": "function_call_output", "call_id": "c", "output": "no JSON"}]
        client.responses.create(model="fake", input=results, previous_response_id="resp_cut")
        client.responses.create(model="fake", input=[call, *results])


def test_a_conversation_is_bounded_as_a_body_is(serve, monkeypatch):
    server = serve(max_body_bytes=3000)
    with server.client() as client:
        answer = client.responses.create(model="fake", input="x" * 100, max_output_tokens=1)
        with pytest.raises(openai.BadRequestError, match="3000 bytes") as refused:  # noqa: PT012 - at which of them does not matter
            for _ in range(9):
                ask = {"input": "x", "max_output_tokens": 1, "previous_response_id": answer.id}
                answer = client.responses.create(model="fake", **ask)
        assert refused.value.param == "previous_response_id"
        monkeypatch.setattr("slipstream.server.openai.responses.MAX_ITEMS", 1)
        answer = client.responses.create(model="fake", input="x", max_output_tokens=1)
        with pytest.raises(openai.BadRequestError, match="1 items"):
            client.responses.create(model="fake", input="x", previous_response_id=answer.id)


def test_counting_and_reading_are_bounded_too(serve, monkeypatch):
    server = serve(max_concurrent_requests=1)
    with (
        server.client() as client,
        server.http(headers={"anthropic-version": "2023-06-01"}) as http,
    ):
        answer = client.responses.create(model="fake", input="one")
        monkeypatch.setattr(server.state.load, "begin_request", lambda limit: False)
        count = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
        one = f"/v1/responses/{answer.id}"
        found = [http.post("/v1/responses/input_tokens", json={"input": "x"})]
        found += [
            http.post("/v1/messages/count_tokens", json=count),
            http.get(one),
            http.get(f"{one}/input_items"),
        ]
        assert [answer.status_code for answer in found] == [429] * 4


async def test_what_is_deleted_leaves_no_trace_and_what_is_too_long_evicts_nothing(tmp_path):
    store = ResponseStore(tmp_path / "s", max_responses=3, max_bytes=1000)
    assert await store.put("me", StoredResponse("a", None, {"output": [{"text": "secret"}]}, []))
    assert not await store.put(
        "me", StoredResponse("b", None, {"output": [{"text": "x" * 1000}]}, [])
    )
    assert await store.get("me", "a") is not None
    assert await store.delete("me", "a")
    assert all(b"secret" not in file.read_bytes() for file in tmp_path.iterdir())
    store.close()


def test_an_answer_that_is_too_long_to_be_kept_says_so(serve):
    with serve(max_stored_bytes=1).client() as client:
        assert client.responses.create(model="fake", input="one").to_dict()["store"] is False
