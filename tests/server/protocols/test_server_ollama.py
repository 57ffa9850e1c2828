"""Ollama's routes, and the page of the API, over real engines."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import msgspec
import pytest

from slipstream.engine.text.tool_formats import REASONING, tool_format
from slipstream.engine.text.tool_formats.base import Tool
from slipstream.engine.text.tools import Reading
from slipstream.server.ollama.answers import OllamaChatAnswer
from slipstream.server.ollama.bodies import OllamaMessage, _chat_messages
from slipstream.server.ollama.routes import OLLAMA_VERSION
from tests.server.conftest import TEMPLATE

SAID = [{"role": "user", "content": "Say hello."}]
GREEDY = {"temperature": 0, "num_predict": 6}


@pytest.fixture
def http(tiny_server):
    with tiny_server.http() as http:
        yield http


def lines(answer):
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_the_same_as_a_chat(http, path):
    ours = {"model": "smollm2", "messages": SAID, "temperature": 0, "max_tokens": 6}
    expected = http.post("/v1/chat/completions", json=ours).json()
    asked = {"messages": SAID} if path == "/api/chat" else {"prompt": SAID[0]["content"]}
    body = {"model": "smollm2:latest", **asked, "options": GREEDY}
    whole = http.post(path, json=body | {"stream": False}).json()

    def text(part):
        return part["message"]["content"] if path == "/api/chat" else part["response"]

    assert text(whole) == expected["choices"][0]["message"]["content"]
    assert (whole["done"], whole["done_reason"]) == (True, expected["choices"][0]["finish_reason"])
    assert (whole["prompt_eval_count"], whole["eval_count"]) == (
        expected["usage"]["prompt_tokens"],
        expected["usage"]["completion_tokens"],
    )
    assert 0 < whole["prompt_eval_duration"] <= whole["total_duration"]
    *parts, last = lines(http.post(path, json=body))
    assert "".join(map(text, parts)) == text(whole)
    assert not any(part["done"] for part in parts)
    assert (last["done"], last["eval_count"], text(last)) == (True, whole["eval_count"], "")


def test_raw_prompts_and_system_messages(http):
    ours = {"model": "smollm2", "prompt": "Once upon", "temperature": 0, "max_tokens": 6}
    expected = http.post("/v1/completions", json=ours).json()["choices"][0]["text"]
    body = {
        "model": "smollm2",
        "prompt": "Once upon",
        "raw": True,
        "stream": False,
        "options": GREEDY,
    }
    assert http.post("/api/generate", json=body).json()["response"] == expected
    with_system = {
        "model": "smollm2",
        "prompt": "Say hello.",
        "system": "Be brief.",
        "stream": False,
        "options": GREEDY,
    }
    said = [{"role": "system", "content": "Be brief."}, *SAID]
    count = http.post(
        "/api/chat", json={"model": "smollm2", "messages": said, "stream": False, "options": GREEDY}
    ).json()
    assert (
        http.post("/api/generate", json=with_system).json()["prompt_eval_count"]
        == count["prompt_eval_count"]
    )


def test_reasoning_stands_apart(http, model, monkeypatch):
    """`format` begins behind it; `think` is for models that do. The marker is a letter: a random model writes no other."""
    monkeypatch.setitem(REASONING, "think", ("<|im_start|>", "~"))
    begun = "{% if enable_thinking is not defined or enable_thinking %}<|im_start|>{% else %}~{% endif %}"
    model(TEMPLATE + begun, reasoning_parser="think")
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}
    body = {"model": "smollm2", "messages": SAID, "format": schema}
    body["options"] = {"num_predict": 900, "temperature": 2, "top_k": 0, "top_p": 1, "seed": 1}
    thought = http.post("/api/chat", json=body | {"stream": False}).json()["message"]
    assert set(json.loads(thought["content"])) <= {"a", "b"}
    assert thought["thinking"]
    parts = [part["message"] for part in lines(http.post("/api/chat", json=body | {"think": True}))]
    assert "".join(part["content"] for part in parts) == thought["content"]
    assert "".join(part.get("thinking", "") for part in parts) == thought["thinking"]
    at_once = http.post("/api/chat", json=body | {"stream": False, "think": False}).json()[
        "message"
    ]
    assert set(json.loads(at_once["content"])) <= {"a", "b"}
    assert "thinking" not in at_once
    said = http.post(
        "/api/generate",
        json={k: v for k, v in body.items() if k != "messages"} | {"prompt": SAID[0]["content"]},
    )
    assert "".join(part.get("thinking", "") for part in lines(said)) == thought["thinking"]
    levelled = http.post("/api/chat", json=body | {"think": "high", "stream": False}).json()
    assert set(json.loads(levelled["message"]["content"])) <= {"a", "b"}
    assert levelled["message"]["thinking"]
    raw = http.post(
        "/api/generate", json={"model": "smollm2", "prompt": "x", "raw": True, "think": True}
    )
    assert (raw.status_code, "think" in raw.json()["error"]) == (400, True)
    assert "thinking" in http.post("/api/show", json={"model": "smollm2"}).json()["capabilities"]
    told = [*SAID, {"role": "assistant", "content": "Hi.", "thinking": "Well."}, *SAID]
    assert http.post("/api/chat", json=body | {"messages": told}).status_code == 200


def test_options_reach_the_engine_by_their_names(http, tiny_server):
    given = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 3, "stop": ["x"], "num_predict": 7, "num_ctx": 512,
        "repeat_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2, "num_thread": 4, "mirostat": 0,
    }  # fmt: skip
    seen, engine = [], tiny_server.engine

    def submit(prompt, sampling, sink, options):
        seen.append(sampling)
        return type(engine).submit(engine, prompt, sampling, sink, options)

    engine.submit = submit
    try:
        assert (
            http.post(
                "/api/chat", json={"model": "smollm2", "messages": SAID, "options": given}
            ).status_code
            == 200
        )
    finally:
        del engine.submit
    (sampling,) = seen
    for name in (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
    ):
        assert getattr(sampling, name) == given[name]
    assert (sampling.stop, sampling.max_tokens, sampling.repetition_penalty) == (("x",), 7, 1.2)


@pytest.mark.parametrize(
    ("path", "wrong", "words"),
    [
        ("/api/chat", {"options": {"repeat_last_n": 8, "repeat_penalty": 1.1}}, "repeat_last_n"),
        ("/api/chat", {"options": {"mirostat": 1}}, "mirostat"),
        ("/api/chat", {"options": {"heat": 1}}, "heat"),
        ("/api/chat", {"tools": [{"type": "function"}]}, "tools"),
        ("/api/chat", {"think": True}, "think"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "x", "images": ["aa"]}]},
            "pictures",
        ),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ("/api/chat", {"options": {"temperature": -1}}, "temperature"),
        ("/api/chat", {"top_logprobs": 2}, "top_logprobs"),
        ("/api/generate", {"prompt": "x", "context": [1]}, "context"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "system"),
        ("/api/embed", {"input": "x", "evil": 1}, "evil"),
        ("/api/show", {"evil": 1}, "evil"),
    ],
)
def test_what_cannot_be_had(http, path, wrong, words):
    body = {"model": "smollm2"} | ({"messages": SAID} if path == "/api/chat" else {}) | wrong
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_what_is_served(http):
    (model,) = http.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "smollm2"
    assert model["size"] > 0
    assert model["details"]["family"] == "llama"
    shown = http.post("/api/show", json={"model": "smollm2:latest"}).json()
    assert shown["model_info"]["llama.context_length"] == 1024
    assert shown["capabilities"] == ["completion"]
    assert http.get("/api/version").json() == {"version": OLLAMA_VERSION}
    for path in ("/api/chat", "/api/generate", "/api/show"):
        assert http.post(path, json={"model": "smollm2"}).status_code == 200
        answer = http.post(path, json={"model": "other"})
        assert (answer.status_code, type(answer.json()["error"])) == (404, str)
    for path in ("/api/chat", "/api/generate"):
        loaded = http.post(path, json={"model": "smollm2"}).json()
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")


def test_show_takes_what_the_clients_of_ollama_send(http):
    old = {"name": "smollm2", "system": "", "template": "", "verbose": False, "options": None}
    for body in (old, old | {"model": "smollm2"}):
        assert http.post("/api/show", json=body).json()["capabilities"] == ["completion"]
    assert http.post("/api/show", json={}).status_code == 400


@pytest.mark.parametrize(
    "asked", [{"messages": SAID}, {"prompt": "Say"}, {"prompt": "Say", "raw": True}]
)
def test_log_probabilities_are_those_of_openais_routes_whole_and_streamed(http, asked):
    path, raw = ("/api/chat" if "messages" in asked else "/api/generate"), "raw" in asked
    body = {"model": "smollm2", **asked, "options": GREEDY, "logprobs": True, "top_logprobs": 2}
    whole = http.post(path, json=body | {"stream": False}).json()["logprobs"]
    *parts, last = lines(http.post(path, json=body | {"truncate": True, "shift": True}))
    assert [one for part in parts for one in part.get("logprobs", ())] == whole
    assert "logprobs" not in last
    ours = {"model": "smollm2", "temperature": 0, "max_tokens": 6}
    if raw:
        answer = http.post("/v1/completions", json=ours | {"prompt": "Say", "logprobs": 2}).json()
        told = answer["choices"][0]["logprobs"]
        assert [one["logprob"] for one in whole] == told["token_logprobs"]
        return
    said = asked.get("messages", [{"role": "user", "content": "Say"}])
    ours |= {"messages": said, "logprobs": True, "top_logprobs": 2}
    answer = http.post("/v1/chat/completions", json=ours).json()
    assert whole == answer["choices"][0]["logprobs"]["content"]
    plain = http.post(path, json=body | {"stream": False, "logprobs": False, "top_logprobs": 0})
    assert "logprobs" not in plain.json()


def test_a_stream_that_breaks(serve):
    server = serve()
    server.engine.fail_after = 2
    with server.http() as http:
        *_, last = lines(http.post("/api/chat", json={"model": "fake", "messages": SAID}))
        assert isinstance(last["error"], str)


def test_embeddings_have_ollamas_form(tiny_encoder_server):
    texts = ["A man is eating.", "Someone has a meal."]
    with tiny_encoder_server.http() as http:
        expected = http.post("/v1/embeddings", json={"model": "minilm", "input": texts}).json()
        found = http.post("/api/embed", json={"model": "minilm", "input": texts}).json()
        assert found["embeddings"] == [pytest.approx(one["embedding"]) for one in expected["data"]]
        assert found["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
        assert (
            http.post("/api/embed", json={"model": "minilm", "input": "word " * 2000}).status_code
            == 200
        )
        long = {"model": "minilm", "input": "word " * 2000, "truncate": False}
        assert http.post("/api/embed", json=long).status_code == 400
        assert http.post("/api/show", json={"model": "minilm"}).json()["capabilities"] == [
            "embedding"
        ]


def test_the_page_of_the_api(http):
    """Every route and body is on it, every link leads somewhere, and nothing is fetched from elsewhere."""

    class Links(HTMLParser):
        def __init__(self):
            super().__init__()
            self.links, self.ids, self.others = [], set(), []

        def handle_starttag(self, tag, attributes):
            given = dict(attributes)
            self.links += [given["href"]] if "href" in given else []
            self.ids |= {given["id"]} if "id" in given else set()
            empty = (
                tag == "link" and given.get("href") == "data:,"
            )  # an icon, which browsers would ask for
            own = empty or (tag == "script" and not given)  # written in the page
            self.others += (
                [tag] if "src" in given or (tag in ("script", "link", "iframe") and not own) else []
            )

    answer = http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    document = http.get("/openapi.json").json()
    for path in document["paths"]:
        assert path in answer.text
    found = Links()
    found.feed(answer.text)
    assert not found.others
    assert "http" not in "".join(found.links)
    assert {link[1:] for link in found.links if link.startswith("#")} <= found.ids
    assert set(document["components"]["schemas"]) <= found.ids


DEFAULTS = {
    "num_ctx": 10**6,
    "repeat_last_n": 64,
    "penalize_newline": False,
    "tfs_z": 1,
    "mirostat": 0,
}


def test_options_that_clients_always_send_change_nothing(http):
    ask = {"model": "smollm2", "messages": SAID, "stream": False}
    plain = http.post(
        "/api/chat", json=ask | {"options": {"temperature": 0, "num_predict": 5}}
    ).json()
    more = {"temperature": 0, "num_predict": 5, **DEFAULTS}
    assert (
        http.post("/api/chat", json=ask | {"options": more}).json()["message"] == plain["message"]
    )
    long = http.post("/api/chat", json=ask | {"options": {"num_predict": 10**6, "temperature": 0}})
    assert long.status_code == 200  # it ends with the context


def test_calls_come_whole_and_their_results_go_back(http, model):
    model(TEMPLATE.replace("arguments.city", "arguments | tojson"), tool_call_parser="hermes")
    assert "tools" in http.post("/api/show", json={"model": "smollm2"}).json()["capabilities"]
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": schema, "strict": True},
    }
    ask = {"model": "smollm2", "messages": SAID, "tools": [tool]}
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    for more in (call, call | {"id": "x"}):
        result = {"role": "tool", "content": "mild", "tool_name": "weather"}
        result |= {"tool_call_id": "x"} if "id" in more else {}
        said = [
            *SAID,
            {"role": "assistant", "content": "", "tool_calls": [more, call]},
            result,
            result,
        ]
        answer = http.post(
            "/api/chat", json=ask | {"messages": said, "options": {"num_predict": 4}}
        )
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("cuts", [1, 3, 1000])
def test_calls_of_an_answer_are_told_once_each_however_the_text_is_cut(cuts):
    form = tool_format("hermes", None)
    answer = object.__new__(OllamaChatAnswer)
    answer.parser, answer._call = (
        Reading(form=form, think=None, offered=(Tool("f", {}),)).parser(),
        None,
    )
    one = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>'
    text = f"So: {one}\n{one}"
    pieces = [text[i : i + cuts] for i in range(0, len(text), cuts)]
    parts = [
        part for i, piece in enumerate(pieces) for part in answer._read(piece, i == len(pieces) - 1)
    ]
    calls = [call["function"] for part in parts for call in part.get("tool_calls", ())]
    assert calls == [{"name": "f", "arguments": {"a": [1, "}"]}}] * 2
    assert "".join(part["content"] for part in parts) == "So:"


def test_one_embedding_of_the_old_route_and_none_of_an_empty_text(tiny_encoder_server):
    with tiny_encoder_server.http() as http:
        new = http.post("/api/embed", json={"model": "minilm", "input": "one"}).json()["embeddings"]
        old = http.post("/api/embeddings", json={"model": "minilm", "prompt": "one"}).json()
        assert old["embedding"] == pytest.approx(new[0])
        assert http.post("/api/embeddings", json={"model": "minilm"}).json() == {"embedding": []}
        assert (
            http.post("/api/embed", json={"model": "minilm", "input": ""}).json()["embeddings"]
            == []
        )


def test_results_without_ids_answer_the_calls_in_order_and_thoughts_go_back():
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b")]
    given = [
        {"role": "assistant", "thinking": "hm", "tool_calls": calls},
        *({"role": "tool", "content": content} for content in ("one", "two")),
    ]
    said, *results = _chat_messages(msgspec.convert(given, list[OllamaMessage]))
    assert said["reasoning_content"] == "hm"
    ids = [call["id"] for call in said["tool_calls"]]
    assert [result["tool_call_id"] for result in results] == ids
    assert len(set(ids)) == 2
