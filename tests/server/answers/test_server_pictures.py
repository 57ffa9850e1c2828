"""Pictures over HTTP: OpenAI's, Responses' and Anthropic's parts, through a real engine; fetching from hosts that are named."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.server
import io
import itertools
import re
import threading
import time
from pathlib import Path

import pytest

import slipstream
from slipstream.config import EngineArgs
from slipstream.engine.requests.processor import in_thread_if_long
from slipstream.engine.threads.fair_threads import client
from slipstream.errors import ConfigError
from slipstream.server.answers import media
from slipstream.server.http.auth import ApiKeys, Keyring
from slipstream.server.http.errors import ApiError
from slipstream.server.http.record import RequestLog
from slipstream.server.state import ServerSettings
from tests.server.conftest import serving
from tests.support.vision_models import build_vision, picture

GREEDY = {"temperature": 0, "max_tokens": 6, "model": "eyes", "extra_body": {"ignore_eos": True}}


def png(seed=1, width=50, height=37):
    file = io.BytesIO()
    picture(seed, width, height).save(file, "PNG")
    return file.getvalue()


def uri(data, kind="image/png"):
    return f"data:{kind};base64," + base64.b64encode(data).decode()


class Pictures(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "/picture.png")
            self.end_headers()
            return
        if self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            self.trickle(b"")
            return
        if self.path == "/slow-head":
            self.trickle(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            return
        data = {"/picture.png": png(), "/large": b"x" * 5000}.get(self.path)
        self.send_response(404 if data is None else 200)
        self.end_headers()
        self.wfile.write(data or b"")

    def trickle(self, data):
        """`data` and then x, byte by byte, as long as somebody listens."""
        with contextlib.suppress(OSError):
            for byte in itertools.chain(data, itertools.repeat(ord("x"))):
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(0.05)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def host():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def server(tmp_path_factory, host):
    from slipstream import AsyncLLM

    path = tmp_path_factory.mktemp("eyes")
    build_vision(path, "smolvlm", seed=3)
    args = EngineArgs(
        str(path), dtype="float32", max_num_seqs=4, kv_cache_bytes=2**25, max_images=3
    )
    with serving(
        start=lambda: AsyncLLM.start(args),
        served_model_names=("eyes",),
        allowed_media_hosts=(host,),
    ) as running:
        yield running


def message(url, text="what is it?", **more):
    return [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": url, **more}},
                {"type": "text", "text": text},
            ],
        }
    ]


def test_every_protocol_gives_the_same(server, host):
    with server.client() as client, server.http() as plain:
        chat = client.chat.completions.create(messages=message(uri(png())), **GREEDY)
        words = client.chat.completions.create(messages=message(uri(png()), detail="low"), **GREEDY)
        assert (
            chat.usage.prompt_tokens > words.usage.prompt_tokens > 16
        )  # the picture's tokens are counted
        streamed = client.chat.completions.create(
            messages=message(uri(png())), stream=True, **GREEDY
        )
        text = "".join(c.choices[0].delta.content or "" for c in streamed if c.choices)
        assert text == chat.choices[0].message.content
        fetched = client.chat.completions.create(
            messages=message(f"http://{host}/picture.png"), **GREEDY
        )
        assert fetched.choices[0].message.content == text
        assert fetched.usage.prompt_tokens_details.cached_tokens > 0
        parts = [
            {"type": "input_image", "image_url": uri(png())},
            {"type": "input_text", "text": "what is it?"},
        ]
        body = {
            "model": "eyes",
            "input": [{"role": "user", "content": parts}],
            "temperature": 0,
            "max_output_tokens": 6,
        }
        answer = plain.post("/v1/responses", json={**body, "ignore_eos": True}).json()
        assert answer["output"][0]["content"][0]["text"] == text
        assert answer["usage"]["input_tokens"] == chat.usage.prompt_tokens
        source = {
            "type": "base64",
            "media_type": "image/png",
            "data": base64.b64encode(png()).decode(),
        }
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": "what is it?"}]
        body = {
            "model": "eyes",
            "max_tokens": 6,
            "temperature": 0,
            "messages": [{"role": "user", "content": blocks}],
        }
        headers = {"anthropic-version": "2023-06-01"}
        answer = plain.post("/v1/messages", json=body, headers=headers).json()
        used = answer["usage"]
        kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert sum(used[kind] for kind in kinds) == chat.usage.prompt_tokens
        assert text.startswith(answer["content"][0]["text"][:3])


def test_what_can_not_be_read_is_a_400(server, host):
    cases = (
        (uri(b"no picture"), "formats"),
        (uri(png()[:100]), "read"),
        ("data:text/plain;base64,aGk=", "no data:image"),
        ("data:image/png;base64,§§", "base64"),
        ("http://example.com/a.png", "fetches no pictures from"),
        ("file:///etc/passwd", "neither"),
        (f"http://user@{host}/picture.png", "neither"),
        (f"http://{host}/moved", "redirect"),
        (f"http://{host}/none", "404"),
    )
    with server.http() as plain:
        for url, why in cases:
            body = {"model": "eyes", "messages": message(url), "max_tokens": 2}
            answer = plain.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400, url
            error = answer.json()["error"]
            assert why in error["message"], error
            assert error["param"].startswith("messages[0].content[0].image_url")
        many = [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": uri(png())}}] * 4,
            }
        ]
        answer = plain.post("/v1/chat/completions", json={"model": "eyes", "messages": many})
        assert answer.status_code == 400
        assert "max_images" in answer.json()["error"]["message"]
        for role in ("system", "assistant"):
            wrong = [{**message(uri(png()))[0], "role": role}]
            assert (
                plain.post(
                    "/v1/chat/completions", json={"model": "eyes", "messages": wrong}
                ).status_code
                == 400
            )
        typo = message(uri(png()), detial="low")
        assert (
            plain.post("/v1/chat/completions", json={"model": "eyes", "messages": typo}).status_code
            == 400
        )
        text = plain.post(
            "/v1/chat/completions",
            json={"model": "eyes", "messages": [{"role": "user", "content": "hi"}]},
        )
        assert text.status_code == 200


def test_a_beam_search_does_not_answer_without_its_picture(server):
    with server.http() as plain:
        body = {
            "model": "eyes",
            "messages": message(uri(png())),
            "max_tokens": 2,
            "use_beam_search": True,
            "n": 2,
        }
        answer = plain.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "use_beam_search")


def test_tokens_are_counted_with_their_pictures(server):
    with server.http() as plain:
        said = message(uri(png()))
        used = plain.post(
            "/v1/chat/completions", json={"model": "eyes", "messages": said, "max_tokens": 1}
        ).json()["usage"]
        tokens = plain.post("/tokenize", json={"messages": said}).json()
        assert tokens["count"] == len(tokens["tokens"]) == used["prompt_tokens"] > 90
        wrong = plain.post("/tokenize", json={"messages": message(uri(b"no picture"))})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (
            400,
            "messages[0].content[0].image_url.url",
        )


def test_short_forms_of_a_picture(server):
    with server.http() as plain:
        for said in (
            [{"type": "image_url", "image_url": uri(png())}],
            message(uri(png()), detail=None)[0]["content"],
        ):
            body = {
                "model": "eyes",
                "messages": [{"role": "user", "content": said}],
                "max_tokens": 1,
            }
            answer = plain.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text


def test_vllms_settings_of_a_picture_are_answered_with_ours(server):
    with server.http() as plain:
        body = {
            "model": "eyes",
            "messages": message(uri(png())),
            "mm_processor_kwargs": {"size": 1},
        }
        answer = plain.post("/v1/chat/completions", json=body)
    assert (
        answer.status_code,
        "here it is the detail of an image_url" in answer.json()["error"]["message"],
    ) == (400, True)


def test_pictures_of_ollamas_bodies_are_answered_and_wrong_ones_are_named(server):
    picture = base64.b64encode(png()).decode()
    with server.http() as plain:
        assert "vision" in plain.post("/api/show", json={"model": "eyes"}).json()["capabilities"]
        said = {"model": "eyes", "stream": False, "options": {"temperature": 0, "num_predict": 6}}
        chat = plain.post(
            "/api/chat",
            json={**said, "messages": [{"role": "user", "content": "x", "images": [picture]}]},
        )
        text = plain.post("/api/generate", json={**said, "prompt": "x", "images": [picture]})
        own = plain.post(
            "/v1/chat/completions",
            json={"model": "eyes", "messages": message(uri(png()), "x"), "max_tokens": 1},
        )
        assert chat.json()["message"]["content"] == text.json()["response"]
        assert chat.json()["prompt_eval_count"] == own.json()["usage"]["prompt_tokens"] > 90
        for path, body, why in (
            ("/api/chat", {"messages": [{"role": "user", "images": ["AAAA"]}]}, "formats"),
            (
                "/api/chat",
                {"messages": [{"role": "assistant", "content": "x", "images": [picture]}]},
                "only a user",
            ),
            ("/api/generate", {"prompt": "x", "raw": True, "images": [picture]}, "images"),
        ):
            answer = plain.post(path, json={**said, **body})
            assert (answer.status_code, why in answer.json()["error"]) == (400, True), answer.text


def test_anthropics_pictures_are_named_by_their_own_place(server):
    def image(data):
        return {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": data},
        }

    whole, text = image(base64.b64encode(png()).decode()), {"type": "text", "text": "x"}
    tool = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "y"}
    past = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [tool]}]
    body = {"model": "eyes", "max_tokens": 1, "system": "z"}
    with server.http() as plain:
        for said, where in (
            (
                [{"role": "user", "content": [whole, text, image("AAAA")]}],
                "messages[0].content[2].source: a picture",
            ),
            (
                [*past, {"role": "user", "content": [result, image("AAAA")]}],
                "messages[2].content[1].source: a picture",
            ),
            (
                [{"role": "user", "content": [text, *[whole] * 4]}],
                "messages[0].content[1]: 4 pictures",
            ),
            (
                [*past, {"role": "user", "content": [{**result, "content": [image("AAAA")]}]}],
                "messages[2].content[0].content[0].source: a picture",
            ),
        ):
            answer = plain.post(
                "/v1/messages",
                json={**body, "messages": said},
                headers={"anthropic-version": "2023-06-01"},
            )
            assert answer.status_code == 400
            assert where in answer.json()["error"]["message"], answer.text


def test_a_body_with_a_large_picture_names_the_option(server):
    with server.http() as plain:
        answer = plain.post(
            "/v1/chat/completions",
            json={"model": "eyes", "messages": message("data:" + "x" * 9 * 2**20)},
        )
    assert (answer.status_code, "--max-body-bytes" in answer.json()["error"]["message"]) == (
        413,
        True,
    )


def test_a_model_without_eyes_refuses(shared):
    with shared.http() as plain:
        body = {"model": "fake", "messages": message(uri(png()))}
        answer = plain.post(
            "/v1/chat/completions", json={**body, "model": shared.state.model_names[0]}
        )
        assert answer.status_code == 400
        assert "no pictures" in answer.json()["error"]["message"]


def test_fetches_are_bounded(host, monkeypatch):
    monkeypatch.setattr(media, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ApiError, match="more than"):
        media.fetched(f"http://{host}/large", "p")
    monkeypatch.setattr(media, "FETCH_S", 0.3)
    for path in ("slow", "slow-head"):
        with pytest.raises(
            ApiError, match="can't be fetched"
        ):  # though something comes all the time, without an end
            media.fetched(f"http://{host}/{path}", "p")


def test_a_slow_host_is_given_up_before_its_time_is_over(host, monkeypatch):
    monkeypatch.setattr(media, "FETCH_S", 1000.0)
    monkeypatch.setattr(media, "SILENCE_S", 0.2)
    with pytest.raises(ApiError, match="slower than"):
        media.fetched(f"http://{host}/slow", "p")


class Holding(http.server.BaseHTTPRequestHandler):
    """Answers when the test says so."""

    def do_GET(self):
        self.server.asked.release()
        self.server.end.wait(30)
        self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def holding():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Holding)
    server.daemon_threads = True
    server.asked, server.end = threading.Semaphore(0), threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.end.set()
    server.shutdown()


def test_slow_pictures_hold_up_neither_long_texts_nor_other_clients_pictures(holding, monkeypatch):
    monkeypatch.setattr(media, "SILENCE_S", 30.0)
    monkeypatch.setattr(media, "FETCH_S", 30.0)
    url = f"http://127.0.0.1:{holding.server_port}/picture.png"

    async def slow_pictures():
        waiting = [
            asyncio.create_task(media._fetches.run(lambda: media.fetched(url, "p")))
            for _ in range(40)
        ]
        while not holding.asked.acquire(blocking=False):
            await asyncio.sleep(0.01)
        assert await in_thread_if_long(lambda: "text", 2**20) == "text"
        token = client.set("another")
        assert await media._fetches.run(lambda: b"picture") == b"picture"
        client.reset(token)
        assert not any(task.done() for task in waiting)  # they are slow still
        for task in waiting:
            task.cancel()
        holding.end.set()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(slow_pictures())


def test_no_work_of_requests_shares_a_pool_with_slow_pictures():
    """asyncio's default pool has a few threads for everybody. What is left there begins or ends a process, or is made once."""
    allowed = {"app.py", "run.py", "supervisor.py", "child_link.py", "async_llm.py", "members.py"}
    allowed |= {"on_ray.py", "head.py", "loop.py", "core_start.py"}
    sources = Path(slipstream.__file__).parent
    found = {
        path.name
        for folder in ("server", "frontend", "engine", "fleet")
        for path in (sources / folder).rglob("*.py")
        if re.search(r"to_thread\(|run_in_executor\(None", path.read_text())
    }
    assert found <= allowed


def test_clients_are_told_apart_by_key_or_address(server):
    asked = []

    async def see(scope, receive, send):
        asked.append(client.get())

    keys = Keyring(ServerSettings(api_keys=("one", "two")))
    app = RequestLog(ApiKeys(see, keys), server.state.observers)
    plain = RequestLog(see, server.state.observers)

    def scope(key=""):
        headers = [(b"authorization", f"Bearer {key}".encode())]
        about = {"type": "http", "method": "GET", "path": "/v1/models", "headers": headers}
        return {**about, "client": ("10.0.0.1", 5)}

    async def ask():
        for key in ("one", "two", "one"):
            await app(scope(key), None, None)
        await plain(scope(), None, None)

    asyncio.run(ask())
    assert asked[0] == asked[2] != asked[1]
    assert asked[3] == "10.0.0.1"


def test_the_pixels_of_a_request_are_bounded(server, monkeypatch):
    monkeypatch.setattr(media, "MAX_REQUEST_PIXELS", 2 * 50 * 37)
    body = {"model": "eyes", "max_tokens": 1}
    part = {"type": "image_url", "image_url": {"url": uri(png())}}
    with server.http() as plain:
        for count, status in ((2, 200), (3, 400)):
            messages = [{"role": "user", "content": [part] * count}]
            answer = plain.post("/v1/chat/completions", json={**body, "messages": messages})
            assert answer.status_code == status
        error = answer.json()["error"]
        assert error["param"] == "messages[0].content[2].image_url.url"
        assert "5550 pixels" in error["message"]
        assert "make them smaller" in error["message"]


def test_only_named_hosts_are_asked():
    for url, allowed, ok in (
        ("http://a.example/x", ("a.example",), True),
        ("https://A.example/x", ("a.example",), True),
        ("http://a.example:8080/x", ("a.example",), False),
        ("http://a.example:8080/x", ("a.example:8080",), True),
        ("http://b.a.example/x", ("a.example",), False),
        ("http://a.example.evil/x", ("a.example",), False),
        ("http://a.example@evil/x", ("a.example",), False),
        ("http://a.example/x", (), False),
        ("ftp://a.example/x", ("a.example",), False),
        ("http://[::1]/x", ("a.example",), False),
        ("http://[::1]:80/x", ("[::1]",), True),
        ("http://[::1]:8000/x", ("[::1]:8000",), True),
        ("http://[::1]:8000/x", ("[::1]",), False),
        ("http://a.example:99999/x", ("a.example",), False),
    ):
        if ok:
            media.check_host(url, allowed, "p")
        else:
            with pytest.raises(ApiError):
                media.check_host(url, allowed, "p")
    with pytest.raises(ConfigError, match="allowed_media_hosts"):
        ServerSettings(allowed_media_hosts=("http://a.example",))


@pytest.mark.parametrize("more", [{"fleet_key": "k"}, {"ssl_certfile": "c", "ssl_ca_certs": "ca"}])
def test_grpc_is_no_way_around_who_may_ask(more):
    with pytest.raises(ConfigError, match="grpc_port"):
        ServerSettings(grpc_port=0, **more)


def test_responses_name_a_picture_by_its_item_and_part(server):
    def image(data, **more):
        return {"type": "input_image", "image_url": f"data:image/png;base64,{data}", **more}

    whole, text = image(base64.b64encode(png()).decode()), {"type": "input_text", "text": "x"}
    past = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}]
    call = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "y"},
    ]
    body = {"model": "eyes", "instructions": "z", "max_output_tokens": 1}
    with server.http() as plain:
        kept = plain.post(
            "/v1/responses", json={**body, "input": [{"role": "user", "content": [whole]}]}
        ).json()["id"]
        for items, where in (
            (
                [{"role": "user", "content": [whole, text, image("AAAA")]}],
                "input[0].content[2].image_url",
            ),
            (
                [*past, *call, {"role": "user", "content": [text, image("AAAA")]}],
                "input[4].content[1].image_url",
            ),
            ([*past, {"role": "user", "content": [text, *[whole] * 4]}], "input[2].content[1]"),
            ([{"role": "system", "content": [whole]}], "input[0].content[0].image_url"),
        ):
            for path in ("/v1/responses", "/v1/responses/input_tokens"):
                some = body if path == "/v1/responses" else {"model": "eyes", "instructions": "z"}
                answer = plain.post(path, json={**some, "input": items})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, where), (
                    answer.text
                )
        more = {**body, "previous_response_id": kept}
        answer = plain.post(
            "/v1/responses", json={**more, "input": [{"role": "user", "content": [image("AAAA")]}]}
        )
        assert answer.json()["error"]["param"] == "input[0].content[0].image_url"
        answer = plain.post(
            "/v1/responses", json={**more, "input": [{"role": "user", "content": [whole] * 3}]}
        )
        assert answer.json()["error"]["param"] == "previous_response_id[0]"


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_vl",
        "gemma4",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3_5", "mistral3")),
    ],
)
def test_families_see_through_every_protocol(family, tmp_path):
    from slipstream import AsyncLLM

    build_vision(tmp_path, family, seed=3)
    args = EngineArgs(str(tmp_path), dtype="float32", max_num_seqs=4, kv_cache_bytes=2**25)
    data, words = base64.b64encode(png()).decode(), "what is it?"
    short = {"model": "eyes", "temperature": 0, "ignore_eos": True}
    source = {"type": "base64", "media_type": "image/png", "data": data}
    asked = {
        "/v1/chat/completions": {**short, "max_tokens": 6, "messages": message(uri(png()))},
        "/v1/responses": {
            **short,
            "max_output_tokens": 6,
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": uri(png())},
                        {"type": "input_text", "text": words},
                    ],
                }
            ],
        },
        "/v1/messages": {
            **dict(model="eyes", temperature=0, max_tokens=6),
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": source},
                        {"type": "text", "text": words},
                    ],
                }
            ],
        },
        "/api/chat": {
            **dict(model="eyes", stream=False, options={"temperature": 0, "num_predict": 6}),
            "messages": [{"role": "user", "content": words, "images": [data]}],
        },
    }
    with (
        serving(start=lambda: AsyncLLM.start(args), served_model_names=("eyes",)) as running,
        running.http() as plain,
    ):
        headers = {"anthropic-version": "2023-06-01"}
        said = {path: plain.post(path, json=body, headers=headers) for path, body in asked.items()}
        assert {path: x.status_code for path, x in said.items()} == dict.fromkeys(asked, 200)
        chat, answer, turn, ollama = (x.json() for x in said.values())
        count = chat["usage"]["prompt_tokens"]
        assert count > len(words) + 20  # a token a letter, and those of the picture
        assert answer["usage"]["input_tokens"] == count
        text = answer["output"][0]["content"][0]["text"]
        assert text == chat["choices"][0]["message"]["content"]
        used = turn["usage"]
        parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert sum(used[part] for part in parts) == count
        assert ollama["prompt_eval_count"] == count
        film = [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}]
        body = {"model": "eyes", "messages": [{"role": "user", "content": film}]}
        refused = plain.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert "video_url" in refused.json()["error"]["message"]
