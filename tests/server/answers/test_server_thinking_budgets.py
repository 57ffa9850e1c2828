"""Budgets of reasoning over HTTP, judged from outside: a tiny random model with drafts, on all protocols."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from slipstream.config import EngineArgs
from slipstream.server.answers.tools import EFFORT_BUDGETS
from tests.server.conftest import serving
from tests.support.thinking_models import END, LEFT, THINK, write

BUDGET = 64
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "hello"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
ASK = {"messages": [{"role": "user", "content": "Who is the other in the hour?"}]}
NEVER = {str(END): -100}
LIKELY = {str(END): 3}
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A model whose prompts open the reasoning, with drafts, prompts in chunks, and too few blocks for all at once."""
    from slipstream.engine.async_llm import AsyncLLM

    folder = tmp_path_factory.mktemp("thinks")
    write(folder, max_position_embeddings=2048)
    args = EngineArgs(
        model=str(folder),
        dtype="float32",
        device="cpu",
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        block_size=8,
        kv_cache_bytes=600 * 2**10,
        num_threads=1,
        speculative_config={"method": "suffix", "num_speculative_tokens": 5},
    )
    with serving(start=lambda: AsyncLLM.start(args), served_model_names=("m",)) as running:
        yield running


@pytest.fixture
def post(server):
    with server.http(headers=VERSION) as http:

        def ask(path="/v1/chat/completions", *, status=200, **body):
            answer = http.post(path, json={"model": "m", **body})
            assert answer.status_code == status, answer.text
            return answer.json() if status == 200 else answer.json()["error"]

        yield ask


def events(answer):
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def chat(http, *, stream, **body):
    """(token ids, content, reasoning tokens by usage) of a chat."""
    body = {"model": "m", **ASK, "return_token_ids": True, "stream": stream, **body}
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        found = answer.json()
        choice, usage = found["choices"][0], found["usage"]
        ids, content = choice["token_ids"], choice["message"]["content"]
    else:
        *parts, last = events(answer)
        usage, ids, content = last["usage"], [], ""
        for part in parts:
            ids += part["choices"][0].get("token_ids") or []
            content += part["choices"][0]["delta"].get("content") or ""
    return ids, content, usage["completion_tokens_details"]["reasoning_tokens"]


def num_thoughts(ids):
    return ids.index(END) if END in ids else len(ids)


def ask_one(http, number):
    """Check one request. Returns whether the model would have gone on thinking."""
    fields = {
        "stream": bool(number % 2),
        "seed": number,
        "temperature": (0.0, 0.7, 1.3)[number % 3],
        "logit_bias": (NEVER, NEVER, LIKELY, {})[number % 4],
        **FORM,
    }
    ids, content, counted = chat(http, **fields, thinking_token_budget=BUDGET)
    assert ids.count(END) == 1
    assert num_thoughts(ids) == counted <= BUDGET
    jsonschema.validate(json.loads(content), SCHEMA)
    if fields["logit_bias"] is NEVER:
        assert counted == BUDGET
        return True
    free, _, _ = chat(http, **fields, thinking_token_budget=1000)
    assert counted == min(num_thoughts(free), BUDGET)
    return num_thoughts(free) > BUDGET


def ask_all(server, count):
    with server.http() as http, ThreadPoolExecutor(12) as threads:
        would_go_on = list(threads.map(lambda number: ask_one(http, number), range(count)))
    assert len(would_go_on) == count
    assert 0 < sum(would_go_on) < count, "some end by themselves, and some don't"


def test_budget_is_exact_and_answers_keep_to_the_schema_with_drafts(server):
    ask_all(server, 24)
    stats = server.call(server.engine.stats())
    assert stats.spec_accepted_tokens > 0


@pytest.mark.slow
def test_five_hundred_budgets_are_exact_and_five_hundred_answers_are_valid(server):
    ask_all(server, 500)


def test_choices_have_the_budget_each(server):
    with server.client() as client:
        answer = client.chat.completions.create(
            model="m",
            **ASK,
            n=3,
            seed=1,
            logit_bias=NEVER,
            extra_body={"thinking_token_budget": 5},
            max_tokens=30,
        )
    assert answer.usage.completion_tokens_details.reasoning_tokens == 15


def test_completions_have_a_budget_too(post):
    found = post(
        "/v1/completions",
        prompt=["hello <think>", "the other <think>"],
        thinking_token_budget=7,
        max_tokens=20,
        logit_bias=NEVER,
        return_token_ids=True,
        ignore_eos=True,
    )
    assert [num_thoughts(choice["token_ids"]) for choice in found["choices"]] == [7, 7]


def test_anthropics_budget_tokens_hold(server):
    with server.http(headers=VERSION) as http:
        # A model that likes what it has said goes on and on.
        asked = {**ASK, "max_tokens": 1100, "temperature": 0, "repetition_penalty": 0.3}
        ids, _, _ = chat(http, stream=False, **asked)
        assert num_thoughts(ids) == 1100
        for stream in (False, True):
            thinking = {"type": "enabled", "budget_tokens": 1024}
            body = {"model": "m", "stream": stream, "thinking": thinking, **asked}
            answer = http.post("/v1/messages", json=body)
            assert answer.status_code == 200, answer.text
            usage = events(answer)[-2]["usage"] if stream else answer.json()["usage"]
            assert usage["output_tokens_details"]["thinking_tokens"] == 1024
            assert usage["output_tokens"] > 1024


EFFORTS = [
    ("/v1/chat/completions", {"thinking_budget": 9, "max_tokens": 40, **ASK}),
    ("/v1/chat/completions", {"reasoning": {"max_tokens": 9}, "max_tokens": 40, **ASK}),
    ("/v1/chat/completions", {"reasoning_effort": "low", "max_tokens": 40, **ASK}),
    ("/v1/responses", {"reasoning": {"effort": "low"}, "max_output_tokens": 40, "input": "Who?"}),
    ("/v1/messages", {"output_config": {"effort": "low"}, "max_tokens": 40, **ASK}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), EFFORTS, ids=[f"{path}-{next(iter(body))}" for path, body in EFFORTS]
)
def test_effort_is_a_budget_where_the_template_knows_none(server, monkeypatch, path, body, stream):
    monkeypatch.setitem(EFFORT_BUDGETS, "low", 9)
    body = {"model": "m", "temperature": 0, "stream": stream, **body}
    if stream and "chat" in path:
        body["stream_options"] = {"include_usage": True}
    with server.http(headers=VERSION) as http:
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
    found = answer.json() if not stream else events(answer)[-2 if "messages" in path else -1]
    usage = found["usage"] if "usage" in found else found["response"]["usage"]
    key = {"/v1/responses": ("output_tokens_details", "reasoning_tokens")}.get(
        path, ("output_tokens_details", "thinking_tokens")
    )
    key = ("completion_tokens_details", "reasoning_tokens") if "chat" in path else key
    assert usage[key[0]][key[1]] == 9


def test_ollamas_levels_are_budgets(server, monkeypatch):
    monkeypatch.setitem(EFFORT_BUDGETS, "low", 9)
    body = {"model": "m", **ASK, "options": {"temperature": 0, "num_predict": 40}}
    with server.http() as http:
        low, off, on = (
            http.post("/api/chat", json=body | {"think": think, "stream": False}).json()
            for think in ("low", False, True)
        )
        lines = http.post("/api/chat", json=body | {"think": "low"}).text.splitlines()
    assert "thinking" not in off["message"]
    assert len(low["message"]["thinking"]) < len(on["message"]["thinking"])
    assert (low["eval_count"], on["eval_count"]) == (40, 40)
    assert "content" in low["message"]
    told = "".join(json.loads(line)["message"].get("thinking", "") for line in lines)
    assert told == low["message"]["thinking"]


def test_thinking_that_is_off_is_a_budget_of_nothing(server):
    body = {
        "model": "m",
        **ASK,
        "max_tokens": 20,
        "temperature": 0,
        "thinking": {"type": "disabled"},
    }
    with server.http(headers=VERSION) as http:
        found = http.post("/v1/messages", json=body).json()
        none = chat(http, stream=False, reasoning_effort="none", max_tokens=20, temperature=0)
    assert [block["type"] for block in found["content"]] == ["text"]
    assert none[0][0] == END
    assert none[2] == 0


def test_budget_larger_than_max_tokens_ends_with_the_length(server):
    with server.http() as http:
        ids, content, counted = chat(
            http,
            stream=False,
            max_tokens=10,
            thinking_token_budget=50,
            logit_bias=NEVER,
            ignore_eos=True,
        )
    assert (len(ids), counted, content or "") == (10, 10, "")


def test_model_that_opens_its_reasoning_counts_from_there(server, monkeypatch):
    monkeypatch.setattr(server.engine.tokenizer, "_templates", {"default": LEFT})
    with server.http() as http:
        for stream in (False, True):
            ids, content, counted = chat(
                http, stream=stream, temperature=0, logit_bias={str(THINK): 100, **NEVER},
                thinking_token_budget=8, **FORM,
            )  # fmt: skip
            assert (ids[0], ids.index(END), counted) == (THINK, 9, 8)
            jsonschema.validate(json.loads(content), SCHEMA)


def test_budget_is_refused_by_name_where_it_cannot_hold(server, post, monkeypatch):
    for more, field in (
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": "9"}, "thinking_token_budget"),
        (
            {"thinking_token_budget": 3, "use_beam_search": True, "n": 2, "max_tokens": 9},
            "thinking_token_budget",
        ),
        ({"thinking_token_budget": 3, "allowed_token_ids": [70]}, "allowed_token_ids"),
    ):
        assert post(status=400, **ASK, **more)["param"] == field
    assert "thinking_token_budget" in post(status=400, **ASK, reasoning_budget=3)["message"]
    monkeypatch.setattr(server.engine.tokenizer, "_templates", {"default": LEFT.partition("{#")[0]})
    error = post(status=400, **ASK, thinking_token_budget=3)
    assert error["param"] == "thinking_token_budget"
    assert post("/v1/completions", status=400, prompt="a", thinking_token_budget=3)["param"] == (
        "thinking_token_budget"
    )


def test_advice_to_a_model_that_does_not_think_is_a_hint(server, post, monkeypatch):
    monkeypatch.setattr(server.engine.tokenizer, "_templates", {"default": LEFT.partition("{#")[0]})
    for path, more in (
        (
            "/v1/messages",
            {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1030},
        ),
        ("/v1/messages", {"thinking": {"type": "disabled"}, "max_tokens": 5}),
        ("/v1/chat/completions", {"reasoning_effort": "low", "max_tokens": 5}),
        ("/v1/chat/completions", {"thinking": {"budget_tokens": 9}, "max_tokens": 5}),
    ):
        post(path, **ASK, **more)
    assert "leave think out" in post("/api/chat", status=400, **ASK, think="low")
