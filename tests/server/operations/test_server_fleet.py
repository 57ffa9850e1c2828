"""A replica's part towards its fleet's gateway: marks in streams, answers that go on from their
tokens, the contents of its cache."""

from __future__ import annotations

import json

import httpx
import msgspec
import pytest

from slipstream.config import EngineArgs
from slipstream.core.cache.prefix_cache import extend_keys, salted
from slipstream.engine.process.operation_messages import CacheEvents
from slipstream.server.http.keys import Key, prefix_salt
from slipstream.server.operations.fleet import HEADER, FromReplica, ReplicaLoad
from tests.server.conftest import serving

KEY = "k"
ABOUT = {HEADER: f"{KEY} abc 7 owner", "anthropic-version": "2023-06-01"}
TEXT = {"prompt": "The capital of France is", "stream": True, "max_tokens": 12, "ignore_eos": True}
CHAT = {
    "messages": [{"role": "user", "content": "Hello."}],
    "stream": True,
    "max_tokens": 12,
    "ignore_eos": True,
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["one", "two", "three"]}},
    "required": ["a"],
}
ASKS = {
    "greedy": ("/v1/completions", {**TEXT, "temperature": 0, "stream_options": {"include_usage": True}}),
    "seeded": ("/v1/chat/completions", {**CHAT, "temperature": 1.0, "seed": 5}),
    "penalties": ("/v1/completions", {**TEXT, "temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 1.0}),
    "echo": ("/v1/completions", {**TEXT, "temperature": 0, "echo": True}),
    "ids": ("/v1/chat/completions", {**CHAT, "temperature": 0, "return_token_ids": True}),
    "grammar": (
        "/v1/chat/completions",
        {**CHAT, "temperature": 0, "max_tokens": 60, "structured_outputs": {"json": SCHEMA}},
    ),
    "responses": (
        "/v1/responses",
        {"input": "Hello.", "stream": True, "max_output_tokens": 12, "temperature": 0, "store": False},
    ),
    "messages": (
        "/v1/messages",
        {"messages": CHAT["messages"], "stream": True, "max_tokens": 12, "temperature": 0, "model": "tiny"},
    ),
    "ollama": ("/api/chat", {"model": "tiny", "messages": CHAT["messages"], "options": {"temperature": 0, "num_predict": 12}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def replica(tiny_path):
    from slipstream.engine.async_llm import AsyncLLM

    args = EngineArgs(
        model=str(tiny_path), dtype="float32", device="cpu", max_model_len=512, kv_cache_bytes=2**19, num_threads=1
    )  # fmt: skip
    with serving(
        start=lambda: AsyncLLM.start(args), fleet_key=KEY, served_model_names=("tiny",)
    ) as server:
        yield server


def ask(replica, path, body, headers=ABOUT):
    with replica.http(headers=headers) as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def units(raw: bytes) -> list[tuple[bytes, list[int] | None]]:
    """The parts of a stream, each with the tokens of its mark; None behind the last."""
    found, lines = [], []
    for line in raw.split(b"\n"):
        if line.startswith(b":t"):
            found.append((b"".join(lines), [int(token) for token in line[2:].split()]))
            lines = []
        elif line.startswith(b":e "):
            assert len(line.split()) == 3
            found.append((b"".join(lines), None))
            lines = []
        else:
            lines.append(line + b"\n")
    assert lines == [b"\n"]
    return found


def test_an_errors_code_is_told_to_a_gateway_in_a_header(replica):
    """Ollama's shape has no place for it."""
    body = {"model": "other", "messages": CHAT["messages"]}
    with replica.http(headers=ABOUT) as http:
        answer = http.post("/api/chat", json=body)
    assert answer.json().keys() == {"error"}
    assert answer.headers["x-slipstream-error-code"] == "model_not_found"


@pytest.mark.parametrize("case", ASKS)
def test_an_answer_goes_on_from_any_of_its_tokens(replica, case):
    """The text of the first tokens and the rest from elsewhere equal the text of one answer."""
    path, body = ASKS[case]
    whole = units(ask(replica, path, body).content)
    assert whole[-1][1] is None
    tokens: list[int] = []
    for told, (_, new) in enumerate(whole[:-1], 1):
        tokens += new
        if not tokens or told % 3:
            continue
        rest = units(
            ask(
                replica, "/fleet/resume", {"path": path, "body": body, "answer_token_ids": tokens}
            ).content
        )
        text = b"".join(part for part, _ in whole[:told]) + b"".join(part for part, _ in rest)
        assert same(text) == same(b"".join(part for part, _ in whole))
        one, other = ([t for _, new in some[:-1] for t in new] for some in (whole[told:], rest))
        assert all(
            a == b for a, b in zip(one, other, strict=False)
        )  # the last ones stand in no mark
    assert len(tokens) > 5


def same(raw: bytes) -> object:
    """All texts put together, and all else that is said, but for what says how tokens were put into events."""
    said, text, ids = [], "", []
    for line in raw.decode().split("\n"):
        line = line.removeprefix("data: ")
        if not line.startswith("{"):
            continue
        event = json.loads(line)
        for part in (*event.get("choices", [{}])[:1], event, event.get("message", {})):
            if not isinstance(part, dict):
                continue
            delta = part.get("delta", part)
            if isinstance(delta, dict):
                text += delta.pop("text", None) or delta.pop("content", None) or ""
                ids += delta.pop("token_ids", ())
            elif isinstance(delta, str):
                text += part.pop("delta")
            ids += part.pop("token_ids", ())
        rest = json.dumps(event, sort_keys=True)
        for name in (
            "cached_tokens",
            "cache_read_input_tokens",
            "cache_creation_input_tokens",
            "ephemeral_5m_input_tokens",
            "input_tokens",
            "_duration",
            "created_at",
            "completed_at",
        ):
            if name in rest:
                rest = name
        if "sequence_number" in rest:
            rest = event["type"]
        if rest not in said:
            said.append(rest)
    return text, ids, said


def test_only_the_gateway_may_ask(replica):
    with replica.http() as http:
        for path in ("/fleet/events", "/v1/models", "/metrics"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers={HEADER: "other a 1"}).status_code == 401
        assert http.get("/health").status_code == 200


def test_what_cannot_go_on_is_refused(replica):
    path, body = ASKS["greedy"]
    for field, change in {
        "n": {"n": 2},
        "logprobs": {"logprobs": 1},
        "stream": {"stream": False, "stream_options": None},
        "two prompts": {"prompt": ["a", "b"]},
    }.items():
        wanted = {"path": path, "body": body | change, "answer_token_ids": [5]}
        with replica.http(headers=ABOUT) as http:
            answer = http.post("/fleet/resume", json=wanted)
            assert (answer.status_code, answer.json()["error"]["param"]) == (
                400,
                "answer_token_ids",
            ), field
    for tokens in ([], [5] * 12, [10**6]):
        with replica.http(headers=ABOUT) as http:
            wanted = {"path": path, "body": body, "answer_token_ids": tokens}
            assert http.post("/fleet/resume", json=wanted).status_code == 400


def test_without_a_gateway_nothing_is_marked(tiny_server):
    with tiny_server.http() as http:
        assert (
            b":t"
            not in http.post(
                "/v1/completions", json={**TEXT, "model": "smollm2"}, headers=ABOUT
            ).content
        )
        assert http.get("/fleet/events").status_code == 404


class Events:
    def __init__(self, response: httpx.Response) -> None:
        self._raw, self._buffer = response.iter_raw(), b""
        self._decode = msgspec.msgpack.Decoder(FromReplica).decode

    def next(self):
        while True:
            if len(self._buffer) >= 4 and len(self._buffer) >= 4 + (
                size := int.from_bytes(self._buffer[:4], "little")
            ):
                message = self._decode(self._buffer[4 : 4 + size])
                self._buffer = self._buffer[4 + size :]
                return message
            self._buffer += next(self._raw)

    def follow(self, held, until):
        """Take news into `held` until the condition holds."""
        while not until():
            news = self.next()
            if isinstance(news, CacheEvents):
                if news.whole:
                    held.clear()
                else:
                    assert news.number == self.number + 1
                self.number, self.root, self.size = news.number, news.root_key, news.block_size
                held.difference_update(
                    news.removed[i : i + 16] for i in range(0, len(news.removed), 16)
                )
                held.update(news.stored[i : i + 16] for i in range(0, len(news.stored), 16))


def test_news_say_whether_the_replica_is_ready(replica, monkeypatch):
    with replica.http(headers=ABOUT) as http, http.stream("GET", "/fleet/events") as response:
        events = Events(response)

        def tells(is_ready):
            news = events.next()
            return isinstance(news, ReplicaLoad) and news.is_ready == is_ready

        replica.wait_for(lambda: tells(True), "it is not ready")
        monkeypatch.setattr(replica.engine._core, "link", None)  # as after a death
        replica.wait_for(lambda: tells(False), "it says that it is ready")


def test_news_are_what_the_cache_holds(replica):
    """Blocks that requests fill, and those that later ones push out, are told."""
    held: set[bytes] = set()
    with replica.http(headers=ABOUT) as http, http.stream("GET", "/fleet/events") as response:
        events = Events(response)
        events.follow(held, lambda: hasattr(events, "root"))
        prompt = list(range(20, 120))
        ask(replica, "/v1/completions", {"prompt": prompt, "max_tokens": 2})
        keys: list[bytes] = []
        root = salted(events.root, prefix_salt(Key(id="owner"), None))
        extend_keys(keys, root, prompt, events.size, len(prompt) // events.size)
        events.follow(held, lambda: held.issuperset(keys))
        number = replica.call(replica.engine.stats()).num_blocks
        for start in range(20, 20 + -(-number // (200 // events.size)) + 1):
            ask(replica, "/v1/completions", {"prompt": [start, *range(20, 220)], "max_tokens": 2})
        events.follow(held, lambda: keys[-1] not in held)
        stats = replica.call(replica.engine.stats())
        assert len(held) <= stats.num_blocks
    replica.wait_for(lambda: not replica.engine._cache_watchers, "somebody still listens")
