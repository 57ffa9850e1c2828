"""Requests as vLLM's and llama.cpp's users write them, on OpenAI's routes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from slipstream.server.openai.tokens import message_variables
from tests.server.conftest import serving
from tests.server.fake_engine import ByteTokenizer, FakeEngine

SAID = [{"role": "user", "content": "Say hello."}]
TEXT = {"model": "smollm2", "prompt": "The cat", "temperature": 0, "max_tokens": 4}
CHAT = {"model": "smollm2", "messages": SAID, "temperature": 0, "max_tokens": 4}
TEXT["ignore_eos"] = CHAT["ignore_eos"] = True
ROUTES = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT}


def chunks(answer):
    return [
        json.loads(part[6:]) for part in answer.text.split("\n\n") if part.startswith("data: {")
    ]


class _Thinks(ByteTokenizer):
    chat_template = tool_template = "<think>\n</think>"

    def apply_chat_template(self, messages, *, add_generation_prompt=True, **variables):
        return messages[-1]["content"]


def test_reasoning_has_both_names_and_can_be_left_out():
    engine = FakeEngine()
    engine.tokenizer = _Thinks()
    said = [{"role": "user", "content": "<think>why</think>so"}]
    body = {"messages": said, "max_tokens": len(said[0]["content"])}
    with serving(engine, reasoning_parser="think") as server, server.http() as http:

        def ask(**more):
            answer = http.post("/v1/chat/completions", json=body | more)
            assert answer.status_code == 200, answer.text
            return answer

        message = ask().json()["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"] == "why"
        deltas = [c["choices"][0]["delta"] for c in chunks(ask(stream=True))]
        for name in ("reasoning", "reasoning_content"):
            assert "".join(delta.get(name, "") for delta in deltas) == "why"
        body["include_reasoning"] = False
        message = ask().json()["choices"][0]["message"]
        assert message["content"] == "so"
        assert not {"reasoning", "reasoning_content"} & set(message)
        deltas = [c["choices"][0]["delta"] for c in chunks(ask(stream=True))]
        assert "".join(delta.get("content", "") for delta in deltas) == "so"
        assert not any({"reasoning", "reasoning_content"} & set(delta) for delta in deltas)


@pytest.mark.parametrize("path", ROUTES)
def test_an_answer_has_the_systems_fingerprint_whole_and_streamed(ask, path):
    found = ask(path)["system_fingerprint"]
    assert found.startswith("fp_")
    parts = chunks(ask.http.post(path, json=ROUTES[path] | {"stream": True}))
    assert {part["system_fingerprint"] for part in parts} == {found}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("given", "has_usage"), [(False, False), (None, True), (True, True)])
def test_usage_that_is_declined_is_in_no_chunk(ask, path, given, has_usage):
    options = {"continuous_usage_stats": True}
    options |= {} if given is None else {"include_usage": given}
    body = ROUTES[path] | {"stream": True, "stream_options": options}
    assert any(part.get("usage") for part in chunks(ask.http.post(path, json=body))) is has_usage


def test_tokenize_renders_messages_as_chat_does(ask):
    said = [*SAID, {"role": "assistant", "content": "Hel"}]
    more = {"messages": said, "continue_final_message": True, "add_generation_prompt": False}
    found = ask("/tokenize", **more)
    answer = ask("/v1/chat/completions", **more, return_token_ids=True)
    assert found["tokens"] == answer["prompt_token_ids"]
    assert found["count"] < ask("/tokenize", messages=said)["count"]
    both = {**more, "add_generation_prompt": True}
    assert ask("/tokenize", status=400, **both)["param"] == "continue_final_message"
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    assert ask("/tokenize", status=400, messages=SAID, tools=tools)["param"] == "tools"
    for wrong in ({"continue_final_message": True}, {"tools": tools}):
        assert ask("/tokenize", status=400, prompt="a", **wrong)["param"] in wrong


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_messages_are_embedded_as_the_text_of_the_template(ask, path):
    def vector(**more):
        own = ask(path, **more)["data"][0]
        return own.get("embedding") or own["data"]

    for more in ({}, {"add_generation_prompt": True}):
        tokens = ask(
            "/tokenize", messages=SAID, add_generation_prompt="add_generation_prompt" in more
        )["tokens"]
        assert vector(messages=SAID, **more) == pytest.approx(vector(input=tokens), abs=1e-5)
    assert ask(path, status=400)["param"] == "input"
    assert ask(path, status=400, input="a", messages=SAID)["param"] == "input"
    assert (
        ask(path, status=400, input="a", add_generation_prompt=True)["param"]
        == "add_generation_prompt"
    )


def test_texts_stand_among_token_ids(ask):
    def ids(text, special=False):
        return ask("/tokenize", prompt=text, add_special_tokens=special)["tokens"]

    mixed, whole = ["The", *ids(" cat"), " sat"], [*ids("The", True), *ids(" cat"), *ids(" sat")]
    answer = ask(prompt=mixed, return_token_ids=True)["choices"][0]
    assert answer["prompt_token_ids"] == whole
    assert answer["text"] == ask(prompt=whole)["choices"][0]["text"]
    assert ask(prompt=mixed, echo=True)["choices"][0]["text"].startswith("The cat sat")
    several = ask(prompt=["The cat", whole, mixed])["choices"]
    assert several[1]["text"] == several[2]["text"] == answer["text"]
    one, two = ask("/v1/embeddings", input=[mixed, whole])["data"]
    assert one["embedding"] == pytest.approx(two["embedding"], abs=1e-5)


@pytest.mark.parametrize("path", ROUTES)
def test_llamas_names_of_a_format_are_kept_to(ask, path):
    schema = {"enum": ["abc"]}

    def text(**more):
        choice = ask(path, **more, max_tokens=60, ignore_eos=False)["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    for given in (
        {"json_schema": schema},
        {"response_format": {"type": "json_object", "schema": schema}},
    ):
        assert text(**given) == '"abc"'
    assert text(grammar='root ::= "yes" | "no"') in ("yes", "no")
    assert text(grammar="") == text()
    assert ask(path, status=400, grammar="root ::= nothing")["param"] == "grammar"
    assert ask(path, status=400, json_schema={"type": 5})["param"] == "json_schema"
    wrong = {"type": "json_object", "schema": {"type": 5}}
    assert ask(path, status=400, response_format=wrong)["param"] == "response_format.schema"
    assert ask(path, status=400, grammar="a", json_schema=schema)["param"] == "grammar"


@pytest.mark.parametrize(
    ("begins", "goes_on", "begun"),
    [(True, False, True), (False, False, False), (True, True, False), (False, True, False)],
)
def test_an_answer_is_begun_unless_the_last_message_goes_on(begins, goes_on, begun):
    body = SimpleNamespace(
        continue_final_message=goes_on, add_generation_prompt=False, chat_template_kwargs=None
    )
    found = message_variables(body, begins)
    assert found["add_generation_prompt"] is begun
    assert found.get("continue_final_message", False) is goes_on


UNSET = {
    **dict.fromkeys(("mm_processor_kwargs", "kv_transfer_params", "vllm_xargs", "request_id")),
    "repetition_detection": None,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "priority": 0,
    "min_tokens": 0,
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
}
UNSET_IN_CHATS = {
    **dict.fromkeys(("documents", "chat_template", "media_io_kwargs", "tools")),
    "logprobs": False,
    "top_logprobs": 0,
    "parallel_tool_calls": True,
    "tool_choice": "none",
}


@pytest.fixture(scope="module")
def fake():
    with serving(FakeEngine()) as server, server.http() as http:
        yield http


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", TEXT | UNSET | {"prompt_embeds": None}),
        ("/v1/chat/completions", CHAT | UNSET | UNSET_IN_CHATS),
    ],
)
def test_a_request_of_vllms_that_leaves_its_fields_unset_is_answered(fake, path, body):
    answer = fake.post(path, json=body | {"model": "fake"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("request_id", "mine", "here it is the answer's header x-request-id"),
        ("kv_transfer_params", {"do_remote_decode": True}, "leave it out or null"),
        ("vllm_xargs", {"a": 1}, "leave it out or null or {}"),
        ("repetition_detection", {"min_count": 2}, "here it is no_repeat_ngram_size"),
        ("length_penalty", 2.0, "goes with use_beam_search"),
        ("documents", [{"text": "a"}], "chat_template_kwargs"),
        ("chat_template", "{{ messages }}", "`serve --chat-template FILE`"),
        ("top_logprobs", 1, "needs logprobs"),
    ],
)
def test_vllms_fields_that_would_change_the_answer_are_refused_by_name(fake, name, value, told):
    answer = fake.post("/v1/chat/completions", json=CHAT | {name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert told in answer.json()["error"]["message"]
