"""Transcriptions over HTTP, with a real engine on a tiny random Whisper and OpenAI's own client."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from slipstream import LLM
from slipstream.config import EngineArgs
from slipstream.engine.async_llm import AsyncLLM
from tests.engine.media.test_transcriptions import sound, wav
from tests.server.conftest import serving
from tests.support import tiny_models
from tests.support.waiting import wait_for

SETTINGS = dict(device="cpu", dtype="float32", num_threads=1, block_size=4)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    tiny_models.build_whisper(folder)
    return folder


@pytest.fixture(scope="module")
def server(path):
    args = EngineArgs(model=str(path), max_num_seqs=4, **SETTINGS)
    served = dict(served_model_names=("w",), max_audio_bytes=200_000, max_audio_seconds=5.0)
    with serving(start=lambda: AsyncLLM.start(args), **served) as running:
        yield running


@pytest.fixture(scope="module")
def llm(path):
    with LLM(str(path), **SETTINGS) as made:
        yield made


def file(seconds, seed=0):
    return "speech.wav", wav(sound(seconds, seed)), "audio/wav"


def expected(llm, seconds, seed=0, **how):
    return llm.transcribe(wav(sound(seconds, seed)), **how)[0]


def test_openais_client_gets_each_format(server, llm):
    create = server.client().audio.transcriptions.create
    own = expected(llm, 0.9, language="en")
    answer = create(file=file(0.9), model="w", language="en")
    assert answer.text == own.text
    assert answer.text
    assert (answer.usage.type, answer.usage.seconds) == ("duration", 1)
    assert create(file=file(0.9), model="w", language="English", response_format="text") == own.text + "\n"  # fmt: skip
    timed = expected(llm, 2.3, 1, timestamps=True, details=True)
    verbose = create(
        file=file(2.3, 1), model="w", response_format="verbose_json", timestamp_granularities=["segment"],
    )  # fmt: skip
    assert (verbose.text, verbose.language) == (timed.text, timed.language)
    assert float(verbose.duration) == 2.3
    assert [s.id for s in verbose.segments] == list(range(len(timed.segments)))
    for theirs, segment in zip(verbose.segments, timed.segments, strict=True):
        for name in ("start", "end", "seek", "text", "temperature", "compression_ratio"):
            assert getattr(theirs, name) == getattr(segment, name)
        assert theirs.tokens == list(segment.tokens)
        assert theirs.avg_logprob == pytest.approx(segment.avg_logprob, rel=1e-4)
        assert theirs.no_speech_prob == pytest.approx(segment.no_speech_prob, abs=1e-6)
    srt = create(file=file(2.3, 1), model="w", response_format="srt")
    vtt = create(file=file(2.3, 1), model="w", response_format="vtt")
    first = expected(llm, 2.3, 1, timestamps=True).segments[0]
    assert srt.startswith(f"1\n00:00:00,{round(first.start * 1000):03d} --> 00:00:0")
    assert vtt.startswith(f"WEBVTT\n\n00:00:00.{round(first.start * 1000):03d} --> 00:00:0")
    assert srt.count(" --> ") == vtt.count(" --> ") == len(timed.segments)


def test_openais_client_gets_times_of_words(server, llm):
    """Requests with words run next to others."""
    create = server.client().audio.transcriptions.create
    how = dict(file=file(2.3, 1), model="w", response_format="verbose_json")
    with ThreadPoolExecutor(3) as pool:
        asked = (["word"], ["segment", "word"], ["segment"])
        found = list(pool.map(lambda own: create(**how, timestamp_granularities=own), asked))
    own = expected(llm, 2.3, 1, words=True, details=True)
    words = [w for s in own.segments for w in s.words if w.text.strip()]
    assert len(words) > 3
    for answer in found[:2]:
        assert [(w.word, w.start, w.end) for w in answer.words] == [
            (w.text.strip(), w.start, w.end) for w in words
        ]
    assert {answer.text for answer in found} == {own.text}
    assert [bool(answer.segments) for answer in found] == [False, True, True]
    assert found[2].words is None


def test_openais_client_translates(server, llm):
    create = server.client().audio.translations.create
    answer = create(file=file(0.9), model="w", prompt="the end")
    assert answer.text == expected(llm, 0.9, task="translate", prompt="the end").text
    verbose = create(file=file(0.9), model="w", response_format="verbose_json")
    assert verbose.language == "english"


@pytest.mark.parametrize("seconds", [0.9, 2.3])
def test_streams_add_up_to_the_whole_text(server, llm, seconds):
    """Tokens of a short sound come one by one, those of a longer one once a window."""
    stream = server.client().audio.transcriptions.create(
        file=file(seconds, 2), model="w", language="de", stream=True
    )
    *deltas, done = list(stream)
    whole = expected(llm, seconds, 2, language="de").text
    assert {d.type for d in deltas} == {"transcript.text.delta"}
    assert done.type == "transcript.text.done"
    assert done.text == whole
    assert "".join(d.delta for d in deltas) == whole
    assert len(deltas) > 1


def test_requests_run_together_and_get_their_own_text(server, llm):
    create = server.client().audio.transcriptions.create
    lengths = [0.3, 1.4, 0.8, 2.2, 1.0, 0.5]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda i: create(file=file(lengths[i], i), model="w").text, range(6)))  # fmt: skip
    assert found == [expected(llm, s, i).text for i, s in enumerate(lengths)]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"file": None}, "file", "missing"),
        ({"file": b"this is no audio file"}, "file", "soundfile|can't be read"),
        ({"file": wav(sound(5.2))}, "file", "at most 5 s"),
        ({"language": "klingon"}, "language", "'en'"),
        ({"response_format": "xml"}, "response_format", "verbose_json"),
        ({"response_format": "srt", "stream": "true"}, "response_format", "json or text"),
        ({"stream": "maybe"}, "stream", "true or false"),
        ({"temperature": "1.5"}, "temperature", "from 0 to 1"),
        ({"temperature": "nan"}, "temperature", "from 0 to 1"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "verbose_json"),
        ({"timestamp_granularities[]": "letter", "response_format": "verbose_json"}, "timestamp_granularities", "segment"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "verbose_json"),
        ({"include[]": "logprobs"}, "include", "avg_logprob"),
        ({"chunking_strategy": "server_vad"}, "chunking_strategy", "auto"),
        ({"seed": "one"}, "seed", "whole number"),
        ({"colour": "red"}, "colour", "language"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(server, fields, param, said):
    given = {"file": wav(sound(0.2)), "model": "w", **fields}
    parts = [(name, (None, value)) for name, value in given.items() if name != "file"]
    if given["file"]:
        parts.append(("file", ("a.wav", given["file"])))
    with server.http() as http:
        answer = http.post("/v1/audio/transcriptions", files=parts)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert re.search(said, error["message"])


def test_limits_and_other_models_are_refused(server):
    client = server.client()
    with pytest.raises(openai.APIStatusError) as caught:
        client.audio.transcriptions.create(file=("a.wav", bytes(300_000)), model="w")
    assert caught.value.status_code == 413
    assert "--max-audio-bytes" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.audio.transcriptions.create(file=file(0.2), model="other")
    with server.http() as http:
        answer = http.post("/v1/audio/transcriptions", json={"model": "w"})
        assert answer.status_code == 400
        assert "multipart/form-data" in answer.text
        asked = {"model": "w", "messages": [{"role": "user", "content": "hi"}]}
        answer = http.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 400, answer.text


def test_a_client_that_leaves_ends_its_request(server):
    data = wav(sound(4.9, 3))
    with server.http() as http:
        with http.stream(
            "POST", "/v1/audio/transcriptions", data={"model": "w", "stream": "true"}, files={"file": ("a.wav", data)},
        ) as answer:  # fmt: skip
            assert answer.status_code == 200
            first = next(answer.iter_lines())
            assert json.loads(first.removeprefix("data: "))["type"] == "transcript.text.delta"
    wait_for(
        lambda: server.engine.num_requests == 0 and not server.state.in_flight, "the request's end"
    )


def test_a_text_model_names_what_to_do(tmp_path):
    tiny_models.build_t5(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    args = EngineArgs(model=str(tmp_path), **SETTINGS)
    with serving(start=lambda: AsyncLLM.start(args), served_model_names=("t",)) as running:
        with pytest.raises(openai.BadRequestError, match="Whisper") as caught:
            running.client().audio.transcriptions.create(file=file(0.2), model="t")
        assert caught.value.param == "model"
