"""Answers to a client: the official `openai` client, a real server, and a fake engine that repeats
the prompt."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import httpx
import openai
import pytest

from slipstream.engine.context import Shortener
from slipstream.engine.output import OutputProcessor
from slipstream.engine.requests.processor import InputProcessor
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.logprobs import PromptLogprobs, TokenLogprobs
from slipstream.messages.outputs import TokenOutput
from slipstream.messages.stats import EngineStats
from slipstream.server.operations.metrics import Metrics
from tests.data.make_tokens import golden_tokens, write_gguf
from tests.server.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S

GOLDEN = golden_tokens()
MESSAGES = [{"role": "user", "content": "hello"}]
TEMPLATED = "user:hello\nassistant:"


@pytest.fixture
def client(shared):
    with shared.client() as client:
        yield client


def last_request(shared):
    return shared.engine.seen[-1]


def test_a_completion_has_openais_form(client, shared):
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=5)
    assert answer.object == "text_completion"
    assert answer.model == "fake"
    assert answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == (
        "abcab",
        0,
        "length",
        None,
    )
    assert (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
        answer.usage.total_tokens,
    ) == (4, 5, 9)
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.usage.completion_tokens_details is None
    assert answer._request_id in answer.id


def test_guessed_tokens_are_counted(client, shared, monkeypatch):
    def delta(*given):
        return dataclasses.replace(
            FakeEngine._delta(shared.engine, *given), num_drafted=3, num_accepted=1
        )

    monkeypatch.setattr(shared.engine, "_delta", delta)
    details = client.completions.create(
        model="fake", prompt="abc", max_tokens=5, n=2
    ).usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (10, 20)
    details = client.responses.create(
        model="fake", input="abc", max_output_tokens=5
    ).usage.output_tokens_details
    assert (
        details.reasoning_tokens,
        details.accepted_prediction_tokens,
        details.rejected_prediction_tokens,
    ) == (0, 5, 10)
    stats = EngineStats(
        spec_num_drafts=4,
        spec_draft_tokens=9,
        spec_accepted_tokens=3,
        spec_accepted_by_position=(2, 1),
    )
    text = Metrics("m").render(stats).decode()
    for name, count in (("num_drafts", 4), ("num_draft_tokens", 9), ("num_accepted_tokens", 3)):
        assert f'slipstream:spec_decode_{name}_total{{model_name="m"}} {count}.0' in text
    assert (
        'slipstream:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 1.0'
        in text
    )


@pytest.mark.parametrize("prompt_steps", [0, 2])  # a long prompt is computed in several steps
def test_completion_streamed_is_the_same(serve, prompt_steps):
    server = serve(FakeEngine())
    server.engine.prompt_steps = prompt_steps

    def ask(**more):
        return client.completions.create(
            model="fake", prompt=["abc", "xy"], n=2, max_tokens=4, logprobs=1, echo=True, **more
        )

    with server.client() as client:
        whole = ask()
        chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(c.usage is None for c in chunks[:-1])
    assert {c.id for c in chunks} == {chunks[0].id}
    for index, choice in enumerate(whole.choices):
        parts = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert "".join(p.text for p in parts) == choice.text
        assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + ["length"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [item for p in parts for item in getattr(p.logprobs, name)]
            assert streamed == getattr(choice.logprobs, name)
    assert [c.text for c in whole.choices] == ["abcabca", "abcabca", "xyxyxy", "xyxyxy"]


def test_echo_with_logprobs(client):
    choice = client.completions.create(
        model="fake", prompt=[97, 98], max_tokens=2, logprobs=1, echo=True
    ).choices[0]
    assert choice.text == "abab"
    assert choice.logprobs.tokens == ["a", "b", "a", "b"]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.top_logprobs[1] == {"A": -0.5, "b": -0.5}
    choice = client.completions.create(
        model="fake", prompt="ab", max_tokens=1, logprobs=0, echo=True
    ).choices[0]
    assert choice.logprobs.tokens == ["<s>", "a", "b", "a"]
    assert choice.logprobs.text_offset == [0, 0, 1, 2]  # a special token takes no room in the text
    show = {"skip_special_tokens": False}
    choice = client.completions.create(
        model="fake", prompt=[0, 97], max_tokens=1, logprobs=0, echo=True, extra_body=show
    )
    assert choice.choices[0].text == "<s>aa"
    assert choice.choices[0].logprobs.text_offset == [0, 3, 4]


def test_logprobs_of_parts_of_a_character(client):
    # The fake's tokens are bytes: é is two of them, and each must have a name of its own and point at the é.
    choice = client.completions.create(
        model="fake", prompt=list("é".encode()), max_tokens=4, logprobs=0
    ).choices[0]
    assert choice.logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9"] * 2
    assert choice.logprobs.text_offset == [0, 0, 1, 1]


class SentencePieceEngine(FakeEngine):
    """Says " Paris" to everything, through a SentencePiece vocabulary and the real engine's processors."""

    def __init__(self, path):
        super().__init__()
        self.tokenizer = Tokenizer.from_pretrained(path)
        self.said = self.tokenizer.encode("Paris", add_special_tokens=False)
        self.into = InputProcessor(
            self.tokenizer,
            vocab_size=self.tokenizer.vocab_size,
            max_model_len=512,
            eos_token_ids=(),
        )
        self.out = OutputProcessor(self.tokenizer)

    def _begin(self, prompt, sampling, priority):
        return self.into.prepare(prompt, sampling)

    async def answer(self, request, sampling):
        self.out.add(request)
        found = tuple(TokenLogprobs(token, -1.0, 1) for token in request.prompt_token_ids[1:])
        before = PromptLogprobs(request.engine_requests[0].request_id, 0, found)
        for token in self.said:
            reason = FinishReason.LENGTH if token == self.said[-1] else None
            logprobs = (TokenLogprobs(token, -1.0, 1),)
            key = request.engine_requests[0].request_id
            news = TokenOutput(key, (token,), reason, logprobs=logprobs, prompt_logprobs=before)
            for delta in self.out.process([news])[0]:
                yield delta
            before = None


@pytest.mark.parametrize("prompt", ["text", "ids"])
def test_a_sentencepiece_answer_continues_its_prompt(serve, tmp_path, prompt):
    """The space between prompt and answer is there, and each token begins where text_offset says."""
    engine = SentencePieceEngine(write_gguf(tmp_path / "x.gguf", GOLDEN["sentencepiece"]))
    text = "The capital of France is"
    given = text if prompt == "text" else engine.tokenizer.encode(text)
    with serve(engine).client() as client:
        plain = client.completions.create(model="fake", prompt=given, logprobs=0).choices[0]
        echoed = client.completions.create(
            model="fake", prompt=given, logprobs=0, echo=True
        ).choices[0]
        alone = client.completions.create(
            model="fake", prompt=[engine.tokenizer.bos_token_id], logprobs=0
        ).choices[0]
    assert (plain.text, echoed.text, alone.text) == (" Paris", text + " Paris", "Paris")
    assert "".join(plain.logprobs.tokens) == " Paris"
    for choice in (plain, echoed, alone):
        starts = [*choice.logprobs.text_offset, len(choice.text)]
        for token, start, end in zip(choice.logprobs.tokens, starts, starts[1:], strict=False):
            if token != "<s>":
                assert choice.text[start:end] == (
                    token if start else token.removeprefix(" " * (choice is not plain))
                )


def test_a_long_prompt_is_echoed_as_it_came(serve):
    server = serve(FakeEngine(max_model_len=50_000))
    with server.client() as client:
        answer = client.completions.create(
            model="fake", prompt="é" * 17_000, max_tokens=2, echo=True
        )
    assert answer.choices[0].text.startswith("é" * 17_000)
    assert answer.usage.prompt_tokens == 34_001


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([97, 98], ["ab"]),
        ([[97], [98]], ["aa", "bb"]),
    ],
)
def test_every_form_of_prompt_is_answered(client, prompt, texts):
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=2)
    assert [c.text for c in answer.choices] == texts
    assert [c.index for c in answer.choices] == list(range(len(texts)))


def test_a_chat_has_openais_form(client, shared):
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_completion_tokens=6, temperature=0
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        TEMPLATED[:6],
        "length",
    )
    assert answer.usage.prompt_tokens == len(
        TEMPLATED
    )  # no special token added: the template writes them
    assert last_request(shared)[0] == {"prompt_token_ids": list(TEMPLATED.encode())}


def test_chat_streamed_is_the_same(client):
    def ask(**more):
        return client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            max_tokens=5,
            n=2,
            logprobs=True,
            top_logprobs=2,
            **more,
        )

    whole = ask()
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    for index, choice in enumerate(whole.choices):
        parts = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert parts[0].delta.role == "assistant"
        assert all(p.delta.role is None for p in parts[1:])
        assert (
            "".join(p.delta.content or "" for p in parts) == choice.message.content == TEMPLATED[:5]
        )
        assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + ["length"]
        streamed = [entry for p in parts if p.logprobs for entry in p.logprobs.content]
        assert streamed == choice.logprobs.content
    entry = whole.choices[0].logprobs.content[0]
    assert (entry.token, entry.logprob, entry.bytes) == ("u", -0.5, [117])
    assert [top.token for top in entry.top_logprobs] == ["A", "B"]


def test_stream_as_it_is_on_the_wire(shared):
    body = {"model": "fake", "messages": MESSAGES, "max_tokens": 2, "stream": True}
    with shared.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert '"delta":{"role":"assistant","content":""}' in events[0]
    assert '"delta":{},"logprobs":null,"finish_reason":"length"' in events[-2]


def test_chat_defaults_to_the_rest_of_the_context_and_completions_to_16(client, shared):
    answer = client.chat.completions.create(model="fake", messages=MESSAGES)
    assert answer.usage.total_tokens == 512
    answer = client.completions.create(model="fake", prompt="abc")
    assert answer.usage.completion_tokens == 16


def test_every_sampling_field_reaches_the_engine(client, shared):
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    more = {"stop": ["x", "y"], "logit_bias": {"65": -3.0}, "max_tokens": 3}
    client.completions.create(
        model="fake",
        prompt="abc",
        logprobs=2,
        echo=True,
        **given,
        **more,
        extra_body={**extra, "priority": -4},
    )
    _, sampling, priority = last_request(shared)
    expected = {
        **given,
        **extra,
        "stop": ("x", "y"),
        "logit_bias": {65: -3.0},
        "max_tokens": 3,
        "stop_token_ids": (9,),
    }
    assert {name: getattr(sampling, name) for name in expected} == expected
    assert (sampling.logprobs, sampling.prompt_logprobs, priority) == (2, 2, -4)
    client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        logprobs=True,
        top_logprobs=3,
        **given,
        **more,
        extra_body=extra,
    )
    _, sampling, priority = last_request(shared)
    assert {name: getattr(sampling, name) for name in expected} == expected
    assert (sampling.logprobs, sampling.prompt_logprobs, priority) == (3, None, 0)


def test_what_has_no_effect_is_accepted(client):
    extra = {"user": "u", "metadata": {"a": "b"}, "store": False}
    client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=1,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        extra_body=extra,
    )
    client.completions.create(
        model="fake", prompt="a", suffix=None, n=2, best_of=2, max_tokens=1, extra_body=extra
    )


def test_messages_in_all_their_forms(client, shared):
    first = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=2)
    messages = [
        {"role": "developer", "content": "d"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}],
        },
        first.choices[0].message,  # as clients send it back
        {"role": "user", "content": "more"},
    ]
    client.chat.completions.create(model="fake", messages=messages, max_tokens=1)
    text = bytes(last_request(shared)[0]["prompt_token_ids"]).decode()
    assert text == "system:d\nuser:one two\nassistant:us\nuser:more\nassistant:"


def test_models_list_every_served_name(serve):
    server = serve(served_model_names=("main", "org/alias"))
    with server.client() as client:
        assert [m.id for m in client.models.list()] == ["main", "org/alias"]
        assert client.models.retrieve("org/alias").id == "org/alias"
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("fake")
        assert caught.value.code == "model_not_found"
        assert (
            client.completions.create(model="org/alias", prompt="a", max_tokens=1).model
            == "org/alias"
        )


def test_tokenize_and_detokenize(shared):
    with shared.http() as http:
        answer = http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True}).json()
        assert answer == {
            "count": 3,
            "max_model_len": 512,
            "tokens": [0, 97, 98],
            "token_strs": ["<s>", "a", "b"],
        }
        answer = http.post(
            "/tokenize", json={"model": "fake", "prompt": "ab", "add_special_tokens": False}
        ).json()
        assert answer["tokens"] == [97, 98]
        answer = http.post("/tokenize", json={"messages": MESSAGES}).json()
        assert bytes(answer["tokens"]).decode() == TEMPLATED
        answer = http.post(
            "/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}
        ).json()
        assert bytes(answer["tokens"]).decode() == "user:hello\n"
        long = http.post(
            "/tokenize", json={"prompt": "a" * 40_000}
        ).json()  # past the length that goes to a thread
        assert long["count"] == 40_001
        assert http.post("/detokenize", json={"tokens": [0, 97, 98]}).json() == {
            "prompt": "<s>ab",
            "content": "<s>ab",
        }
        assert http.post(
            "/detokenize", json={"tokens": [0, 97], "skip_special_tokens": True}
        ).json() == {"prompt": "a", "content": "a"}


def test_rendered_prompts_are_those_that_the_same_body_is_answered_for(shared):
    chat = {"model": "fake", "messages": MESSAGES}
    several = {"model": "fake", "prompt": ["ab", [1, 2], ["a", 7]]}
    with shared.http() as http:
        found = http.post("/v1/chat/completions/render", json=chat).json()
        assert bytes(found["token_ids"]).decode() == TEMPLATED
        usage = http.post("/v1/chat/completions", json=chat | {"max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens"] == len(found["token_ids"])
        found = http.post("/v1/completions/render", json=several).json()
        assert [one["token_ids"] for one in found] == [[0, 97, 98], [1, 2], [0, 97, 7]]
        plain = {"model": "fake", "prompt": "ab", "add_special_tokens": False}
        found = http.post("/v1/completions/render", json=plain).json()
        assert found == [{"token_ids": [97, 98]}]
        for path, body in (("chat/completions", chat), ("completions", several)):
            asked = f"/v1/{path}/render"
            assert http.post(asked, json=body | {"model": "other"}).status_code == 404
            refused = http.post(asked, json=body | {"truncate_prompt_tokens": 2})
            assert refused.json()["error"]["param"] == "truncate_prompt_tokens"
            refused = http.post(asked, json=body | {"penalty_alpha": 1})  # as without /render
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "penalty_alpha")


def test_without_a_tokenizer_token_ids_still_work(serve):
    engine = FakeEngine()
    server = serve(engine)
    tokenizer, engine.tokenizer = engine.tokenizer, None
    engine._delta = lambda index, token, sampling, last: FakeEngine._delta(
        type("E", (), {"tokenizer": tokenizer})(), index, token, sampling, last
    )
    with server.client() as client:
        assert (
            client.completions.create(model="fake", prompt=[97], max_tokens=2).choices[0].text
            == "aa"
        )
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="fake", messages=MESSAGES)
        assert caught.value.param == "messages"


async def test_many_streams_at_once(serve):
    import asyncio

    server = serve(FakeEngine(delay_s=0.001))
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:

        async def one(i):
            stream = await client.completions.create(
                model="fake", prompt=f"{i:03d}", max_tokens=9, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        answers = await asyncio.gather(*(one(i) for i in range(40)))
    assert answers == [f"{i:03d}" * 3 for i in range(40)]
    server.wait_idle()


def test_a_server_with_a_certificate_answers_over_https(serve, tmp_path):
    import subprocess

    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
    ]
    command += [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        key,
        "-out",
        cert,
    ]
    subprocess.run(command, check=True, capture_output=True)
    server = serve(ssl_certfile=str(cert), ssl_keyfile=str(key))
    assert server.url.startswith("https://")
    import ssl

    with httpx.Client(
        base_url=server.url, verify=ssl.create_default_context(cafile=str(cert)), timeout=PATIENCE_S
    ) as http:
        assert http.get("/live").status_code == 200


def test_the_models_own_defaults_hold_where_a_request_says_nothing(serve):
    engine = FakeEngine()
    engine.description = SimpleNamespace(
        **{**vars(engine.description), "sampling": {"temperature": 0.3, "top_k": 7}}
    )
    client = serve(engine).client()
    client.completions.create(model="fake", prompt="ab", temperature=0.9)
    client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "a"}])
    said, silent = (sampling for _, sampling, _ in engine.seen)
    assert (said.temperature, said.top_k) == (0.9, 7)
    assert (silent.temperature, silent.top_k, silent.top_p) == (0.3, 7, 1.0)


def test_a_conversation_is_shortened(serve):
    """A small model shortens it. System messages, the question and protected parts stay as they
    are."""
    server = serve(FakeEngine())
    small = FakeEngine()
    server.state.shortener = Shortener(small)
    context = "one two three four five 42 six seven eight nine\n\n"
    messages = [
        {"role": "system", "content": "be very very brief"},
        {"role": "user", "content": context + "What is it?"},
    ]
    asked = {"keep": 0.5, "protect": ["42"], "unit": "word"}
    with server.client() as client:
        answer = client.chat.completions.create(
            model="fake", messages=messages, max_tokens=3, extra_body={"compress_prompt": asked}
        )
    sent = bytes(server.engine.seen[-1][0]["prompt_token_ids"]).decode()
    assert sent.startswith("system:be very very brief\nuser:")
    assert sent.endswith("What is it?\nassistant:")
    assert "42 " in sent
    assert len(sent) < len(context) + len("system:be very very brief\nuser:What is it?\nassistant:")
    assert small.seen
    told = answer.usage.model_dump()["prompt_compression"]
    assert told["tokens_after"] < told["tokens_before"]
    assert told["kept_share"] == pytest.approx(
        told["tokens_after"] / told["tokens_before"], abs=1e-4
    )


def test_shortening_needs_a_small_model(client):
    with pytest.raises(openai.BadRequestError, match="--context-model") as caught:
        client.chat.completions.create(
            model="fake", messages=MESSAGES, extra_body={"compress_prompt": {}}
        )
    assert caught.value.param == "compress_prompt"
    with pytest.raises(openai.BadRequestError, match="keep"):
        client.chat.completions.create(
            model="fake", messages=MESSAGES, extra_body={"compress_prompt": {"keep": 0}}
        )
