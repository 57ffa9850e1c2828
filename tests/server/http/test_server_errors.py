"""Bad input, in every way: always OpenAI's error shape, always a status below 500, and the field is named."""

from __future__ import annotations

import gzip
import json
import logging
import socket

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.server.http.record import LogFormatter
from tests.server.conftest import lines_of
from tests.server.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
COMPLETION = {"model": "fake", "prompt": "hi", "max_tokens": 2}


@pytest.fixture(scope="module")
def http(shared):
    with shared.http() as http:
        yield http


def error_of(answer: httpx.Response) -> dict:
    error = answer.json()["error"]
    assert set(answer.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert answer.headers["content-type"] == "application/json"
    return error


@pytest.mark.parametrize(
    ("coded", "told"),
    [
        (gzip.compress, "compressed"),
        (lambda text: b"\xef\xbb\xbf" + text, "byte order mark"),
        (lambda text: text.decode().encode("utf-16"), "UTF-16"),
    ],
)
def test_a_body_in_another_coding_is_told_so(http, coded, told):
    answer = http.post("/v1/completions", content=coded(json.dumps(COMPLETION).encode()))
    assert answer.status_code == 400
    assert told in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"zap": 1}, "zap"),
        ({"model": 5}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], 1]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": [2**40]}, "prompt[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 100, "prompt": ["a"] * 21}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": 2**40}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21, "echo": True}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
        ({"mirostat_mode": 1}, "mirostat_mode"),
        ({"samplers": ["top_q"]}, "samplers"),
        ({"typical_p": 0}, "typical_p"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"zap": 1}}, "stream_options.zap"),
        ({"priority": 2**40}, "priority"),
        ({"tools": []}, "tools"),
    ],
)
def test_wrong_fields_of_a_completion_are_named(http, change, param):
    answer = http.post("/v1/completions", json=COMPLETION | change)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    assert error_of(answer)["type"] == "invalid_request_error"


def message(**fields):
    return {"messages": [{"role": "user", "content": "hi"} | fields]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"zap": 1}, "zap"),
        ({"prompt": "a"}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        (message(role="critic"), "messages[0].role"),
        (message(zap=1), "messages[0].zap"),
        (message(content=None), "messages[0].content"),
        (message(content=3), "messages[0].content"),
        (
            message(content=[{"type": "image_url", "image_url": {"url": "data:"}}]),
            "messages[0].content[0]",
        ),
        (message(content=[{"type": "text"}]), "messages[0].content[0].text"),
        (message(content=[{"type": "text", "text": 1}]), "messages[0].content[0].text"),
        (message(content=[{"type": "text", "text": "a", "zap": 1}]), "messages[0].content[0].zap"),
        (message(tool_calls=[{"id": "1"}]), "messages[0].tool_calls[0].function"),
        (message(content="template error"), "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"a": [1] * 99}}},
            "response_format.json_schema.a",
        ),
        ({"modalities": ["audio"]}, "modalities"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
    ],
)
def test_wrong_fields_of_a_chat_are_named(http, change, param):
    answer = http.post("/v1/chat/completions", json=CHAT | change)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


def test_too_long_for_the_context(shared):
    with shared.client() as client:
        for call, param in (
            (lambda: client.completions.create(model="fake", prompt="a" * 600), "prompt"),
            (
                lambda: client.completions.create(model="fake", prompt="a", max_tokens=600),
                "max_tokens",
            ),
            (
                lambda: client.chat.completions.create(
                    model="fake", messages=message(content="a" * 600)["messages"]
                ),
                "messages",
            ),
            (
                lambda: client.chat.completions.create(
                    model="fake", messages=message(content="a" * 99_999)["messages"]
                ),
                "messages",
            ),
            (
                lambda: client.completions.create(
                    model="fake", prompt=["a", "a" * 600], stream=True
                ),
                "prompt",
            ),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                call()
            assert caught.value.code == "context_length_exceeded"
            assert caught.value.param == param


def test_too_long_for_the_context_is_told_in_the_words_of_the_body(shared):
    with shared.http(headers={"anthropic-version": "2023-06-01"}) as http:
        for path, length in (
            ("/v1/responses", 600),
            ("/v1/responses", 99_999),
            ("/v1/responses/input_tokens", 99_999),
        ):
            error = error_of(http.post(path, json={"input": "a" * length}))
            assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
        body = {
            "model": "fake",
            "max_tokens": 1,
            "messages": message(content="a" * 600)["messages"],
        }
        assert (
            http.post("/v1/messages", json=body).json()["error"]["message"].startswith("messages: ")
        )


def test_an_unknown_model_is_not_found(shared):
    with shared.client() as client:
        for call in (
            lambda: client.completions.create(model="gpt-9", prompt="a"),
            lambda: client.chat.completions.create(model="gpt-9", messages=CHAT["messages"]),
            lambda: client.models.retrieve("gpt-9"),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                call()
            assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_other_routes_and_methods(http):
    for method, path, status, code in (
        ("GET", "/v1/nothing", 404, "unknown_route"),
        ("POST", "/v1/completions/", 404, "unknown_route"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/tokenize", 405, "method_not_allowed"),
    ):
        answer = http.request(method, path)
        assert (answer.status_code, error_of(answer)["code"]) == (status, code)
    assert "POST" in http.get("/v1/completions").headers["allow"]


def test_wrong_fields_of_tokenize_are_named(http):
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a" * 600 * 128}, "prompt"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        assert error_of(answer)["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"model":"fake","prompt":"\xff"}',
        b'{"model":"fake","prompt":"\\ud800"}',
        b'{"model":"fake","prompt":"a","temperature":NaN}',
        b'{"model":"fake","prompt":"a","temperature":1e999}',
        b'{"model":"fake","prompt":"a"',
        b'{"model":"fake","suffix":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"model":"fake","prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"model":"fake","prompt":"a","seed":' + b"9" * 10_000 + b"}",
    ],
)
def test_bytes_that_are_no_body(http, body):
    answer = http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    error_of(answer)


def test_body_size_and_time(serve):
    with serve(max_body_bytes=1000).http() as http:
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
        answer = http.post("/v1/completions", json=COMPLETION | {"prompt": "a" * 1000})
        assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")

        def parts():
            for _ in range(100):
                yield b" " * 100

        answer = http.post("/v1/completions", content=parts())  # no content-length
        assert answer.status_code == 413
    port = serve(body_timeout_s=0.2).server.servers[0].sockets[0].getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{"
        )
        assert sock.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "request_bytes",
    [b"nonsense\r\n\r\n", b"GET /live HTTP/1.1\r\nx: " + b"a" * 70_000 + b"\r\n\r\n"],
)
def test_broken_http_is_answered_with_400(shared, request_bytes):
    with socket.create_connection(
        ("127.0.0.1", int(shared.url.rpartition(":")[2])), timeout=PATIENCE_S
    ) as sock:
        sock.sendall(request_bytes)
        answer = b""
        while part := sock.recv(1000):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_a_fault_of_ours_tells_the_log_and_nobody_else(serve, caplog):
    engine = FakeEngine()
    server = serve(engine)
    engine.submit = lambda *a, **k: 1 / 0
    caplog.set_level(logging.INFO, "slipstream")
    with server.http() as http:
        answer = http.post("/v1/completions", json=COMPLETION)
    assert answer.status_code == 500
    assert "division" not in answer.text
    assert (error_of(answer)["type"], error_of(answer)["code"]) == ("server_error", "internal")
    both = "slipstream.server", "slipstream.access"
    server.wait_for(lambda: len(lines_of(caplog, *both)) == 2, "the log lines did not come")
    fault, line = lines_of(caplog, *both)
    assert "ZeroDivisionError" in LogFormatter(json=False).format(fault)
    assert fault.fields["id"] == line.fields["id"] == answer.headers["x-request-id"]
    assert (line.fields["status"], line.fields["error"]) == (500, "internal")
    assert server.state.metrics.responses["POST", "/v1/completions", 500] == 1


# --- Anything at all ------------------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)
# Values near what a field takes get further in than any at random.
near = (
    st.integers(-3, 130)
    | st.floats(-3, 3)
    | st.sampled_from(
        [
            "fake",
            "a",
            "",
            "\x00",
            "auto",
            "none",
            [],
            {},
            [0],
            [255],
            [256],
            ["a"],
            [[97]],
            {"1": 1},
            {"type": "text"},
        ]
    )
    | st.sampled_from(
        [
            {"include_usage": True},
            [{"role": "user", "content": "a"}],
            [{"role": "x", "content": []}],
        ]
    )
)


def bodies(base, names):
    changes = st.dictionaries(
        st.sampled_from(sorted(names)) | st.text(max_size=6), near | values, max_size=4
    )
    return changes.map(lambda change: {**base, **change})


def field_names(path, document):
    return set(document["components"]["schemas"][path]["properties"])


@pytest.fixture(scope="module")
def document(http):
    return http.get("/openapi.json").json()


QUICK = settings(max_examples=150, suppress_health_check=list(HealthCheck))


def check_any(answer):
    assert answer.status_code in (200, 400, 404, 413), answer.text
    if answer.status_code != 200:
        error_of(answer)


@QUICK
@given(data=st.data())
def test_any_value_of_any_field_is_answered_or_refused(http, document, data):
    for path, kind, base in (
        ("/v1/completions", "CompletionRequest", COMPLETION),
        ("/v1/chat/completions", "ChatRequest", CHAT),
    ):
        check_any(http.post(path, json=data.draw(bodies(base, field_names(kind, document)))))


@QUICK
@given(data=st.data())
def test_any_message_is_answered_or_refused(http, document, data):
    names = field_names("Message", document)
    part = st.dictionaries(
        st.sampled_from(["type", "text", "zap"]), st.just("text") | values, max_size=3
    )
    message = st.dictionaries(
        st.sampled_from(sorted(names)), near | values | st.lists(part, max_size=2), max_size=3
    )
    messages = st.lists(message.map(lambda m: {"role": "user", "content": "a"} | m), max_size=3)
    check_any(http.post("/v1/chat/completions", json=CHAT | {"messages": data.draw(messages)}))
    check_any(http.post("/tokenize", json={"messages": data.draw(messages)}))
    check_any(
        http.post(
            "/detokenize",
            json={"tokens": data.draw(values | st.lists(st.integers(-1, 300), max_size=5))},
        )
    )


@QUICK
@given(
    body=st.binary(max_size=40) | values.map(lambda v: json.dumps(v).encode()),
    cut=st.integers(0, 60),
)
def test_any_bytes_are_answered_or_refused(http, body, cut):
    check_any(http.post("/v1/completions", content=body))
    check_any(http.post("/v1/chat/completions", content=json.dumps(CHAT).encode()[:cut] + body))


def test_answers_to_requests_made_by_the_description_have_its_forms(shared):
    """Schemathesis finds no server error, and no status, type of content or error that is not described."""
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, status_code_conformance]
    checks += [content_type_conformance, response_schema_conformance]

    schema = schemathesis.openapi.from_url(shared.url + "/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) == 88
    for operation in operations:
        if "{id}" in operation.path or operation.method == "post":

            @settings(max_examples=8, suppress_health_check=list(HealthCheck), database=None)
            @given(case=operation.as_strategy())
            def check(case):
                case.call_and_validate(checks=checks)

            check()
