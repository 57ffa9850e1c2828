"""Sounds over HTTP: OpenAI's `input_audio` parts, through a real engine."""

from __future__ import annotations

import base64
import io

import pytest

from slipstream.config import EngineArgs
from tests.server.conftest import serving
from tests.support.sound_models import build_hearing, part, sound
from tests.support.vision_models import picture

GREEDY = {"temperature": 0, "max_tokens": 6, "model": "ears"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ears")
    build_hearing(folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def server(path):
    from slipstream import AsyncLLM

    args = EngineArgs(
        str(path), dtype="float32", max_num_seqs=4, kv_cache_bytes=2**25, max_images=2
    )
    with serving(
        start=lambda: AsyncLLM.start(args),
        served_model_names=("ears",),
        max_audio_bytes=200_000,
    ) as running:
        yield running


def said(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]


def test_a_chat_hears_as_the_engine_does(server, path):
    from slipstream import LLM, SamplingParams

    with LLM(str(path), dtype="float32", kv_cache_bytes=2**24) as llm:
        wanted = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (offline,) = llm.chat(said(part(sound(1))), wanted)
    with server.client() as client:
        more = {**GREEDY, "extra_body": {"ignore_eos": True}}
        chat = client.chat.completions.create(messages=said(part(sound(1))), **more)
        assert chat.choices[0].message.content == offline.outputs[0].text
        assert chat.usage.prompt_tokens == len(offline.prompt_token_ids)
        stream = client.chat.completions.create(messages=said(part(sound(1))), stream=True, **more)
        text = "".join(x.choices[0].delta.content or "" for x in stream if x.choices)
        assert text == offline.outputs[0].text
        again = client.chat.completions.create(messages=said(part(sound(1))), **more)
        assert again.usage.prompt_tokens_details.cached_tokens > 0
        other = client.chat.completions.create(messages=said(part(sound(2))), **more)
        assert other.usage.prompt_tokens == chat.usage.prompt_tokens
        assert other.usage.prompt_tokens_details.cached_tokens < 20  # none of the sound's


def broken(**given):
    return {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav", **given}}


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (part(sound(1, 2.5)), "data"),  # beyond the window
        (part(sound(1, 0.02)), "data"),  # no token
        (part(sound(1, 4.0)), "data"),  # --max-audio-bytes
        (broken(data="%"), "data"),
        (broken(data=""), "data"),
        (broken(format="mp3"), "format"),
        (broken(format="aiff"), "format"),
        (broken(x=1), "x"),
    ],
)
def test_what_is_wrong_with_a_sound_is_named(server, content, key):
    with server.http() as plain:
        answer = plain.post("/v1/chat/completions", json={**GREEDY, "messages": said(content)})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == f"messages[0].content[0].input_audio.{key}"


def test_pictures_and_too_many_sounds_are_refused(server):
    file = io.BytesIO()
    picture(1).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    with server.http() as plain:
        for parts, why in (((image,), "takes sounds"), ((part(sound(1)),) * 3, "3 sounds")):
            answer = plain.post("/v1/chat/completions", json={**GREEDY, "messages": said(*parts)})
            assert answer.status_code == 400
            assert why in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"].startswith("messages[0].content[0]")
        system = {"role": "system", "content": [part(sound(1))]}
        answer = plain.post("/v1/chat/completions", json={**GREEDY, "messages": [system]})
        assert answer.status_code == 400


def test_tokens_of_a_chat_are_counted_with_its_sounds(server):
    with server.http() as plain:
        answer = plain.post("/tokenize", json={"model": "ears", "messages": said(part(sound(1)))})
        words = plain.post("/tokenize", json={"model": "ears", "messages": said()})
    assert answer.json()["count"] > words.json()["count"] + 10
