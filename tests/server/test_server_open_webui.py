"""Requests of Open WebUI 0.12.4 and the fields that it reads of answers, by its `main.py`,
`routers/openai.py`, `routers/ollama.py`, `routers/tasks.py`, `utils/payload.py` and
`retrieval/utils.py`. Its chat's own fields (features, files, session_id, params, metadata, …) stay
with it."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

MODEL = "smollm2"
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
TOLD = [*ASKED, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Again."}]
PARAMS = {
    "temperature": 0.8,
    "top_p": 0.9,
    "min_p": 0.05,
    "seed": 3,
    "stop": ["zzz"],
    "max_tokens": 6,
}
PARAMS |= {
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "top_k": 40,
    "logit_bias": {"7": -100},
}


@pytest.fixture
def http(tiny_server):
    """Client with the headers that Open WebUI sends, those of forwarded users among them."""
    with tiny_server.http() as http:
        http.headers.update(
            {
                "authorization": "Bearer none",
                "x-openwebui-user-name": "Ann",
                "x-openwebui-chat-id": "1",
            }
        )
        yield http


def events(answer):
    """Events as its middleware reads them: lines that begin with `data: `."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    assert data[-1] == "[DONE]"
    return [json.loads(part) for part in data[:-1]]


def test_an_openai_connection(http):
    listed = http.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    body = {
        "stream": True,
        "model": MODEL,
        "messages": TOLD,
        "stream_options": {"include_usage": True},
        **PARAMS,
    }
    *parts, last = events(http.post("/v1/chat/completions", json=body))
    assert all(part["choices"][0]["delta"] is not None for part in parts)
    assert last["usage"]["completion_tokens"] > 0
    parts_of_text = [{"type": "text", "text": "Say hello."}]  # a message that once had a picture
    plain = {
        "stream": True,
        "model": MODEL,
        "messages": [{"role": "user", "content": parts_of_text}],
        "max_tokens": 4,
    }
    assert events(http.post("/v1/chat/completions", json=plain))


def test_titles_tags_and_follow_ups(http):
    """Tasks in the background: whole answers, of which the text is looked through for JSON."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "### Task: a title"}],
        "stream": False,
        "max_tokens": 6,
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert isinstance(answer.json()["choices"][0]["message"]["content"], str)


def test_a_continued_answer_streams_what_follows_its_words(http):
    """The button, of a connection that is called llama.cpp's."""
    body = {"messages": [*ASKED, {"role": "assistant", "content": "Hello, my"}]}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    prompt = http.post("/tokenize", json=body).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": prompt}).json()["prompt"]
    assert text.endswith("Hello, my")
    said = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    whole = http.post("/v1/completions", json={**said, "prompt": prompt}).json()
    parts = events(http.post("/v1/chat/completions", json={**said, **body, "stream": True}))
    deltas = [part["choices"][0]["delta"].get("content") or "" for part in parts]
    assert "".join(deltas) == whole["choices"][0]["text"] != ""


def test_tools_of_its_own(http, model):
    """Native function calling: its built-in tools, and their answers in the next turn."""
    model(tool_call_parser="hermes")
    time = {
        "name": "get_current_timestamp",
        "description": "Get the time.",
        "parameters": {"type": "object", "properties": {}},
    }
    tools = [{"type": "function", "function": time}]
    body = {"stream": True, "model": MODEL, "messages": ASKED, "tools": tools, "max_tokens": 4}
    assert events(http.post("/v1/chat/completions", json=body))
    call = {
        "index": 0,
        "id": "c1",
        "type": "function",
        "function": {"name": time["name"], "arguments": '{"city": "Rome"}'},
    }
    messages = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "c1", "content": "12:00"}]
    assert events(http.post("/v1/chat/completions", json=body | {"messages": messages}))


def test_an_ollama_connection(http):
    assert http.get("/api/version").json()["version"]
    (listed,) = http.get("/api/tags").json()["models"]
    (loaded,) = http.get("/api/ps").json()["models"]
    assert loaded["model"] == listed["model"] == MODEL
    assert datetime.fromisoformat(loaded["expires_at"]).timestamp() > 2**32
    assert http.post("/api/show", json={"model": MODEL}).json()["capabilities"]
    options = {k: v for k, v in PARAMS.items() if k not in ("max_tokens", "logit_bias")}
    options |= {
        "num_predict": 6,
        "num_ctx": 512,
        "num_keep": 24,
        "num_batch": 512,
        "num_thread": 2,
        "repeat_penalty": 1.1,
    }
    body = {
        "model": MODEL,
        "messages": TOLD,
        "stream": True,
        "options": options,
        "keep_alive": "5m",
    }
    answer = http.post("/api/chat", json=body)
    *parts, last = [json.loads(line) for line in answer.text.split("\n") if line]
    assert all(part["message"]["content"] for part in parts)
    assert last["done"]
    for name in (
        "total_duration",
        "load_duration",
        "prompt_eval_count",
        "prompt_eval_duration",
        "eval_count",
        "eval_duration",
    ):
        assert last[name] >= 0  # its line below the answer
    unload = http.post("/api/generate", json={"model": MODEL, "keep_alive": 0, "prompt": ""})
    assert unload.status_code == 200
    # The Ollama router passes OpenAI's routes on, too.
    assert (
        http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 2}
        ).status_code
        == 200
    )


def test_texts_of_documents(tiny_encoder_server):
    with tiny_encoder_server.http() as http:
        found = http.post("/v1/embeddings", json={"input": ["a", "b"], "model": "minilm"}).json()
        assert len([item["embedding"] for item in found["data"]]) == 2
        found = http.post(
            "/api/embed", json={"input": ["a", "b"], "model": "minilm", "truncate": True}
        ).json()
        assert len(found["embeddings"]) == 2
        body = {
            "model": "minilm",
            "query": "a",
            "documents": ["b", "c"],
            "top_n": 2,
        }  # its external reranker
        assert {r["index"] for r in http.post("/v1/rerank", json=body).json()["results"]} == {0, 1}
