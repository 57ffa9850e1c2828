"""The server over the real engine, in its own process, with a tiny random model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.engine.process.child_link import ChildLink
from tests.server.http.test_server_errors import bodies, check_any
from tests.support.waiting import PATIENCE_S

PROMPT = {
    "model": "smollm2",
    "prompt": "The capital of France is",
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
MESSAGES = [{"role": "user", "content": "Say hello."}]
CHAT = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}


@pytest.fixture
def client(tiny_server):
    with tiny_server.client() as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_left(tiny_server):
    """Checks after each test that every request has ended and every block is free."""
    yield
    tiny_server.wait_for(lambda: is_idle(tiny_server), "the engine still works or holds blocks")


def is_idle(server):
    stats = server.call(server.engine.stats())
    return (stats.num_running, stats.num_waiting) == (
        0,
        0,
    ) and stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize(
    "prompt", [PROMPT["prompt"], "in the hour " * 30], ids=["short", "of several steps"]
)
def test_streamed_is_the_same(client, prompt):
    def ask(**more):
        fields = PROMPT | {
            "prompt": prompt,
            "max_tokens": 24,
            "logprobs": 2,
            "echo": True,
            "n": 2,
            "seed": 3,
        }
        return client.completions.create(**fields, **more)

    whole, chunks = ask(), list(ask(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 48
    for index, choice in enumerate(whole.choices):
        parts = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert "".join(p.text for p in parts) == choice.text
        assert choice.text.startswith(prompt)
        for name in ("tokens", "token_logprobs", "text_offset"):
            streamed = [item for p in parts for item in getattr(p.logprobs, name)]
            assert streamed == getattr(choice.logprobs, name)
        assert len(choice.logprobs.token_logprobs) == whole.usage.prompt_tokens + 24
        assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
        # Greedy: the chosen token is the most likely one.
        for chosen, top in list(
            zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True)
        )[-24:]:
            assert chosen == max(top.values())


def test_chat_streamed_is_the_same(client):
    whole = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    chunks = list(
        client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, stream=True)
    )
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks)
        == whole.choices[0].message.content
    )
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert entries == whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens


def test_chat_prompt_is_the_template(tiny_server, client):
    with tiny_server.http() as http:
        tokens = http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    whole = client.chat.completions.create(**CHAT)
    assert whole.usage.prompt_tokens == len(tokens)
    same = client.completions.create(model="smollm2", prompt=tokens, temperature=0, max_tokens=12)
    assert same.choices[0].text == whole.choices[0].message.content


def test_a_stop_string_cuts_the_text(client):
    text = client.completions.create(**PROMPT, max_tokens=24).choices[0].text
    stop = text[8:11]
    choice = client.completions.create(**PROMPT, max_tokens=24, stop=stop).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_logit_bias_and_seed(tiny_server, client):
    with tiny_server.http() as http:
        (token, *_) = http.post(
            "/tokenize", json={"prompt": "a", "add_special_tokens": False}
        ).json()["tokens"]
        once = http.post("/detokenize", json={"tokens": [token]}).json()["prompt"]
    biased = client.completions.create(**PROMPT, max_tokens=3, logit_bias={str(token): 100})
    assert biased.choices[0].text == once * 3
    hot = PROMPT | {"temperature": 5.0, "max_tokens": 12}
    texts = {client.completions.create(**hot, seed=seed).choices[0].text for seed in (1, 1, 2)}
    assert len(texts) == 2


def test_max_tokens_beyond_the_context(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="smollm2", messages=MESSAGES, max_completion_tokens=5000
        )
    assert (caught.value.code, caught.value.param) == (
        "context_length_exceeded",
        "max_completion_tokens",
    )


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"prompt": ["a", "b", "c"]}])
def test_leaving_frees_the_blocks(client, more):
    stream = client.completions.create(**PROMPT | more, max_tokens=900, stream=True)
    next(stream)
    stream.close()  # `nothing_left` checks the rest


def test_prefix_cache_is_reported(tiny_server, client):
    for _ in range(2):
        answer = client.completions.create(**PROMPT | {"prompt": "x " * 300}, max_tokens=1)
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    with tiny_server.http() as http:
        metrics = http.get("/metrics").text
    hits = [
        line
        for line in metrics.splitlines()
        if line.startswith("slipstream:prefix_cache_hits_total{")
    ]
    assert float(hits[0].split()[-1]) > 0


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_field_is_answered_or_refused_by_a_real_engine(tiny_server, data):
    with tiny_server.http() as http:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
        for path, kind, base in (
            (
                "/v1/completions",
                "CompletionRequest",
                {"model": "smollm2", "prompt": "a", "max_tokens": 3},
            ),
            ("/v1/chat/completions", "ChatRequest", CHAT | {"max_tokens": 3}),
        ):
            body = data.draw(bodies(base, set(schemas[kind]["properties"]) - {"max_tokens"}))
            check_any(http.post(path, json=body))


def test_values_at_the_edge_of_what_a_field_takes(tiny_server, client):
    for change in (
        {"temperature": 1e-300},
        {"temperature": 100},
        {"top_p": 1e-300},
        {"extra_body": {"repetition_penalty": 1e300}},
        {"extra_body": {"repetition_penalty": 1e-300}},
        {"extra_body": {"top_k": 2**31 - 1}},
        {"extra_body": {"min_p": 1.0}},
        {"extra_body": {"priority": -(2**31)}},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
    ):
        answer = client.completions.create(
            **{**PROMPT, "temperature": 1, "max_tokens": 3, **change}
        )
        assert answer.usage.completion_tokens >= 1, change


def test_engine_death_and_return(tiny_server, client, monkeypatch):
    seen, start = threading.Event(), ChildLink.start

    async def after_it_was_seen(args, **how):
        await asyncio.to_thread(seen.wait, PATIENCE_S)
        return await start(args, **how)

    monkeypatch.setattr(ChildLink, "start", after_it_was_seen)
    stream = client.completions.create(
        **PROMPT, max_tokens=900, n=64, stream=True
    )  # seconds long: it is killed in its midst
    next(stream)
    os.kill(tiny_server.engine._core.link.process.pid, signal.SIGKILL)
    with pytest.raises(openai.APIError):
        list(stream)
    with tiny_server.http() as http:
        tiny_server.wait_for(
            lambda: http.get("/health").status_code == 503, "the death was not noticed"
        )
        seen.set()
        tiny_server.wait_for(
            lambda: http.get("/health").status_code == 200, "the engine did not come back"
        )
    assert client.completions.create(**PROMPT, max_tokens=3).usage.completion_tokens == 3


def test_the_command_serves_and_ends_an_answer_at_sigterm(tiny_path, tmp_path):
    """`slipstream serve`, from its start to SIGTERM in the middle of an answer."""
    (tmp_path / "keys").write_text("# mine\n the-key \n")
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "serve",
        str(tiny_path),
        "--port=0",
        "--json",
        "--served-model-name=tiny",
    ]
    command += [
        f"--api-key-file={tmp_path / 'keys'}",
        "--log-format=json",
        "--device=cpu",
        "--max-model-len=1024",
    ]
    command += ["--num-threads=1", "--dtype=float32", f"--kv-cache-bytes={2**26}"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    ready = json.loads(process.stdout.readline())
    assert ready["models"] == ["tiny"]
    assert ready["ledger"]["weights_bytes"] > 0
    with openai.OpenAI(base_url=ready["url"], api_key="the-key", max_retries=0) as client:
        body = PROMPT | {"model": "tiny", "max_tokens": 300}
        stream = client.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        )
        next(stream)
        process.send_signal(signal.SIGTERM)
        assert list(stream)[-1].usage.completion_tokens == 300
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    lines = [
        json.loads(line)
        for line in errors.splitlines()
        if not line.startswith("slipstream: starting")
    ]
    assert [line["status"] for line in lines if line["message"] == "request"] == [200]
    assert "the-key" not in errors
