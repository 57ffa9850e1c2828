"""Habits of other clients: vLLM's and OpenAI's newer fields, browsers, probes."""

from __future__ import annotations

import json

import msgspec
import pytest

from slipstream import __version__
from slipstream.server.http import decoding
from slipstream.server.http.decoding import decode
from slipstream.server.http.errors import ApiError
from slipstream.server.http.field_hints import OTHERS, allowed_values, likely_name
from slipstream.server.openai.protocol import ChatRequest, CompletionRequest
from tests.server.conftest import lines_of

COMPLETION = {"model": "fake", "prompt": "hi", "max_tokens": 4}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def events(answer):
    parts = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
def test_each_chunk_can_have_the_usage_so_far(shared, path, body):
    options = {"include_usage": True, "continuous_usage_stats": True}
    with shared.http() as http:
        chunks = events(http.post(path, json={**body, "stream": True, "stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert {1, 2, 3} <= set(counts)
    assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)


@pytest.mark.parametrize(
    "field", [{"safety_identifier": "x"}, {"prompt_cache_key": "x"}, {"service_tier": "flex"}]
)
def test_fields_that_change_nothing(shared, field):
    with shared.http() as http:
        for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
            assert http.post(path, json=body | field).status_code == 200


def test_what_goes_to_the_template(serve):
    server = serve()
    tokenizer = server.engine.tokenizer
    with server.http() as http:
        more = {
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "low",
            "add_generation_prompt": False,
        }
        assert http.post("/v1/chat/completions", json=CHAT | more).status_code == 200
        assert tokenizer.variables == {"enable_thinking": False, "reasoning_effort": "low"}
        assert tokenizer.decode(server.engine.seen[-1][0]["prompt_token_ids"]) == "user:hi\n"
        answer = http.post(
            "/v1/chat/completions", json=CHAT | {"chat_template_kwargs": {"messages": []}}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (
            400,
            "chat_template_kwargs",
        )
        tokenizer.chat_template = "{{ messages }}"
        assert http.post("/v1/chat/completions", json=CHAT | {"verbosity": "low"}).is_success
        assert "verbosity" not in tokenizer.variables
        tokenizer.chat_template = "{{ messages }}{{ enable_thinking }}"
        assert http.post(
            "/v1/chat/completions", json=CHAT | {"reasoning_effort": "none"}
        ).is_success
        assert tokenizer.variables["enable_thinking"] is False


@pytest.mark.parametrize(
    ("more", "variables"),
    [
        ({"thinking": {"type": "disabled", "clear_thinking": False}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "auto"}}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"reasoning": {"enabled": True}}, {"enable_thinking": True}),
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
        ),
    ],
)
def test_other_hosts_fields_for_thinking_reach_the_template(serve, more, variables):
    server = serve()
    tokenizer = server.engine.tokenizer
    tokenizer.chat_template = "{{ messages }}{{ enable_thinking }}"
    with server.http() as http:
        assert http.post("/v1/chat/completions", json=CHAT | more).is_success
        assert tokenizer.variables == variables
        tokenizer.chat_template = "{{ messages }}{% if not thinking is defined %}{% endif %}"
        if "chat_template_kwargs" not in more and "effort" not in str(more):
            assert http.post("/v1/chat/completions", json=CHAT | more).is_success
            assert list(tokenizer.variables.items()) == [
                ("thinking", v) for v in variables.values()
            ]


@pytest.mark.parametrize(
    "more",
    [
        {"reasoning": {"max_tokens": 7, "exclude": True}},
        {"thinking": {"type": "enabled", "budget_tokens": 7}},
        {"thinking_budget": 7},
        {"thinking_budget": 7, "thinking": {"budget_tokens": 9}},
    ],
)
def test_other_hosts_budgets_of_thinking_are_taken(more):
    body = decode(ChatRequest, json.dumps(CHAT | more).encode())
    for _ in range(2):
        body.check()
        assert body.thinking_budget == 7
        assert body.include_reasoning is (False if "reasoning" in more else None)


def test_labels_of_other_hosts_are_taken_and_what_they_ask_for_is_refused(shared):
    taken = {"usage": {"include": True}, "provider": {"order": ["x"]}, "session_id": "s"}
    taken |= {"tool_stream": True, "cache_prompt": True, "id_slot": -1, "ttl": 300}
    taken |= {"separate_reasoning": True, "reasoning_format": "auto", "user_id": "u"}
    with shared.http() as http:
        assert http.post("/v1/chat/completions", json=CHAT | taken).status_code == 200
        for name, value in (("separate_reasoning", False), ("reasoning_format", "none")):
            answer = http.post("/v1/chat/completions", json=CHAT | {name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_a_token_is_biased_once(shared):
    with shared.http() as http:
        answer = http.post("/v1/completions", json=COMPLETION | {"logit_bias": {"00": 1, "0": 2}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")
        assert (
            http.post("/v1/completions", json=COMPLETION | {"logit_bias": {"00": 1}}).status_code
            == 200
        )


def test_refused_fields_are_in_the_log(serve, caplog):
    server = serve()
    caplog.set_level("INFO", "slipstream.access")
    with server.http() as http:
        for wrong in (
            {"evil\nfield=1": 1},
            {"suffix": "x"},
            {"stop": 5},
            {"stream_options": {"include_usage": 5}},
        ):
            assert http.post("/v1/completions", json=COMPLETION | wrong).status_code == 400
    server.wait_for(lambda: len(lines_of(caplog, "slipstream.access")) == 4, "no log line")
    named = [record.fields["param"] for record in lines_of(caplog, "slipstream.access")]
    assert named == [
        "unknown",
        "suffix",
        "stop",
        "stream_options.include_usage",
    ]  # a name of the client's own stays out


def test_a_misspelt_field_is_answered_with_the_likely_one(shared):
    with shared.http() as http:
        hints = {
            "temprature": "; did you mean temperature?",
            "max_token": "; did you mean max_tokens?",
            "zzz": ")",
        }
        hints |= {
            "n_predict": "; here it is max_tokens",
            "do_sample": "; here it is temperature",
            "system": ")",
        }  # no messages
        for wrong, hint in hints.items():
            error = http.post("/v1/completions", json=COMPLETION | {wrong: 1}).json()["error"]
            assert error["message"].endswith(hint)
            assert error["param"] == wrong
        assert (
            "did you mean" not in http.post("/v1/chat/completions", json={"model": "tiny"}).text
        )  # it lacks messages


@pytest.mark.parametrize(("wrong", "told"), [
    ({"stream_options": {"include_usge": True}},
        "(in stream_options.include_usge); did you mean include_usage?"),
    ({"messages": [{"role": "user", "contnt": "x"}]},
        "(in messages[0].contnt); did you mean content?"),
    ({"tools": [{"type": "function", "function": {"nme": "f"}}]},
        "(in tools[0].function.nme); did you mean name?"),
    ({"system": "Be brief."}, "(in system); here it is messages"),
    ({"response_format": {"type": "json"}},
        "(in response_format.type); it is one of json_object, json_schema, text"),
    ({"tools": [{"type": "web_search"}]}, "(in tools[0].type); it is function"),
])  # fmt: skip
def test_so_is_what_is_wrong_deeper_in_the_body(wrong, told):
    body = {"messages": [{"role": "user", "content": "x"}]} | wrong
    with pytest.raises(ApiError) as caught:
        decode(ChatRequest, json.dumps(body).encode())
    assert str(caught.value).endswith(told)


def test_other_names_are_of_fields_that_are_there():
    known = {
        f.encode_name
        for kind in (CompletionRequest, ChatRequest)
        for f in msgspec.structs.fields(kind)
    }
    assert set(OTHERS.values()) <= known
    assert not known & set(OTHERS)


def test_every_body_can_be_asked_for_a_likely_name():
    for kind in decoding._DECODERS:
        assert (
            likely_name(kind, "", "zzzzzz")
            == likely_name(kind, "no.such[0].place", "x")
            == allowed_values(kind, "")
            == ""
        )


def test_version_and_ping(serve):
    server = serve(api_keys=("secret",))
    with server.http() as http:
        assert http.get("/ping").status_code == 200
        assert http.post("/ping").status_code == 200
        assert http.get("/version").status_code == 401
        assert http.get("/version", headers={"authorization": "Bearer secret"}).json() == {
            "version": __version__
        }


def test_browsers_from_another_origin(serve):
    asks = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization"
    server = serve(api_keys=("secret",), cors_origins=("https://chat.example",))
    with server.http() as http:
        answer = http.options("/v1/completions", headers=asks)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert (
            http.options(
                "/v1/completions", headers={**asks, "origin": "https://other.example"}
            ).status_code
            == 400
        )
        answer = http.post(
            "/v1/completions", json=COMPLETION, headers={"origin": "https://chat.example"}
        )
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"


def test_none_without_the_option(shared):
    with shared.http() as http:
        answer = http.get("/live", headers={"origin": "https://chat.example"})
        assert "access-control-allow-origin" not in answer.headers


def test_the_model_may_be_left_out(serve):
    """The answer bears the name of the served model, as with vLLM. Ollama's bodies need the name,
    as with Ollama."""
    server = serve(served_model_names=("one", "two"))
    with server.http() as http:
        for path, body in (
            ("/v1/completions", COMPLETION),
            ("/v1/chat/completions", CHAT),
            ("/v1/embeddings", {"input": "a"}),
        ):
            body = {k: v for k, v in body.items() if k != "model"}
            for given in (body, body | {"model": None}):
                answer = http.post(path, json=given)
                assert (answer.status_code, answer.json()["model"]) == (200, "one"), answer.text
            assert http.post(path, json=body | {"model": "two"}).json()["model"] == "two"
            assert http.post(path, json=body | {"model": "three"}).status_code == 404
        stream = http.post(
            "/v1/chat/completions", json={"messages": CHAT["messages"], "stream": True}
        )
        assert '"model":"one"' in stream.text
        for path in ("/api/chat", "/api/generate", "/api/embed", "/api/show"):
            refused = http.post(path, json={})
            assert (refused.status_code, "`model`" in refused.json()["error"]) == (400, True)


def test_the_root_leads_browsers_to_the_page(serve):
    """A browser is led to the page; others read where to go. Ollama's clients look with HEAD whether anything is there."""
    with serve().http() as http:
        page = http.get("/", headers={"accept": "text/html,*/*"}, follow_redirects=True)
        assert (page.status_code, page.url.path) == (200, "/docs")
        assert ('name="viewport"' in page.text, 'rel="icon"' in page.text) == (True, True)
        assert "/docs" in http.get("/").text
        assert http.head("/").status_code == 200
    with serve(api_keys=("secret",)).http() as http:  # it needs no key, and tells strangers nothing
        assert (http.get("/").status_code, "smollm2" in http.get("/").text) == (200, False)
        assert http.get("/v1/models").status_code == 401
