"""Bodies that are nested deeply: a 400 that names the field, whichever route and field it is, and the server lives."""

from __future__ import annotations

import json

import pytest

from slipstream.server.http.json_depth import MAX_DEPTH, is_too_deep

MESSAGES = [{"role": "user", "content": "hi"}]
HERE = "the deep part"
ENDS = (("[", "]"), ('{"a":', "}"), ('[{"properties":', "}]"))
BODIES = [
    ("/v1/completions", {"prompt": HERE}, "prompt"),
    ("/v1/completions", {"prompt": "x", "metadata": HERE}, "metadata"),
    ("/v1/completions", {"prompt": "x", "no such field": HERE}, "no such field"),
    ("/v1/completions", {"prompt": "x", "guided_json": HERE}, "guided_json"),
    ("/v1/chat/completions", {"messages": HERE}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": HERE}]}, "messages"),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [HERE]}, "tools"),
    ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": HERE}, "chat_template"),
    ("/v1/responses", {"input": HERE}, "input"),
    ("/v1/responses", {"input": "x", "text": HERE}, "text"),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "tools": HERE}, "tools"),
    ("/api/chat", {"messages": MESSAGES, "format": HERE}, "format"),
    ("/api/generate", {"prompt": "x", "options": HERE}, "options"),
    ("/v1/embeddings", {"input": HERE}, "input"),
    ("/rerank", {"query": "x", "documents": HERE}, "documents"),
    ("/tokenize", {"messages": HERE}, "messages"),
    ("/v2/models/fake/infer", {"inputs": HERE}, "inputs"),
    ("/v2/models/fake/generate", {"text_input": "x", "parameters": HERE}, "parameters"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), BODIES)
@pytest.mark.parametrize("depth", [150, 250, 900, 100_000])
def test_a_deep_body_is_a_400_that_names_the_field(shared, path, body, param, depth):
    with shared.http() as http:
        for begin, end in ENDS:
            deep = begin * depth + "1" + end * depth
            raw = json.dumps({"model": "fake", **body}).replace(json.dumps(HERE), deep)
            answer = http.post(path, content=raw, headers={"anthropic-version": "2023-06-01"})
            assert answer.status_code < 500, answer.text
            if depth > MAX_DEPTH:
                assert answer.status_code == 400
                assert f"deeper than {MAX_DEPTH} levels" in answer.text
            if MAX_DEPTH < depth < 900:
                assert param in answer.text
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("raw", ["[" * 10**6, '{"a":' * 10**6, '"' + "\\" * 10**6, "[1," * 10**6])
def test_a_deep_body_that_is_cut_off_is_a_400(shared, raw):
    with shared.http() as http:
        assert http.post("/v1/completions", content=raw).status_code == 400


@pytest.mark.parametrize("depth", [150, 5000, 100_000])
def test_deep_arguments_of_a_call_are_taken_as_text_or_refused(shared, depth):
    call = {"name": "f", "arguments": '{"a":' * depth + "1" + "}" * depth}
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    with shared.http() as http:
        body = {"model": "fake", "messages": messages, "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=body).status_code < 500
        items = [
            {"type": "function_call", "call_id": "c", **call},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ]
        body = {"model": "fake", "input": items, "max_output_tokens": 1}
        assert http.post("/v1/responses", json=body).status_code < 500


def test_brackets_within_texts_do_not_count():
    deep = b"[" * 500
    assert is_too_deep(deep)
    for text in (
        b'["' + deep + b'"]',
        b'["\\"' + deep + b'"]',
        b'["\\\\\\"' + deep + b'"]',
        b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
        b"[[], {}]" * 1000,
    ):
        assert not is_too_deep(text)
    assert is_too_deep(b'["\\\\", ' + deep)  # the text ends before them
