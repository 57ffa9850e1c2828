"""`slipstream transcribe`: texts and subtitles on standard output and in files."""

from __future__ import annotations

import json

import pytest

from slipstream import LLM
from slipstream.cli.main import main
from tests.engine.media.test_transcriptions import sound, wav
from tests.support import tiny_models

CPU = ["--device", "cpu", "--dtype", "float32", "--num-threads", "1"]


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sounds")
    tiny_models.build_whisper(folder / "whisper")
    for i in (1, 2):
        (folder / f"talk{i}.wav").write_bytes(wav(sound(0.5 * i, seed=i)))
    return folder


def test_formats_have_the_texts_that_python_gives(sounds, tmp_path, capsys):
    model, files = str(sounds / "whisper"), [str(sounds / f"talk{i}.wav") for i in (1, 2)]
    with LLM(model, device="cpu", dtype="float32", num_threads=1) as llm:
        plain = llm.transcribe(files)
        timed = llm.transcribe(files, timestamps=True, details=True)
    capsys.readouterr()
    assert main(["transcribe", model, *files, *CPU]) == 0
    assert capsys.readouterr().out == "".join(x.text.strip() + "\n" for x in plain)
    assert (
        main(["transcribe", model, *files, "--format", "vtt", "--output-dir", str(tmp_path), *CPU])
        == 0
    )
    assert not capsys.readouterr().out
    for i, output in enumerate(timed, 1):
        cues = (tmp_path / f"talk{i}.vtt").read_text()
        assert cues.startswith("WEBVTT\n\n")
        assert cues.count(" --> ") == len(output.segments)
    assert main(["transcribe", model, *files, "--json", *CPU]) == 0
    found = json.loads(capsys.readouterr().out)["transcriptions"]
    assert [x["text"] for x in found] == [x.text for x in timed]
    assert [len(x["segments"]) for x in found] == [len(x.segments) for x in timed]
    assert main(["transcribe", model, files[0], "--format", "verbose_json", *CPU]) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "transcribe"


def test_what_is_wrong_is_named(sounds, tmp_path, capsys):
    model, same = str(sounds / "whisper"), tmp_path / "talk1.wav"
    same.write_bytes(b"no sound")
    talk = str(sounds / "talk1.wav")
    for words, field in (
        (["nothing.wav"], "files"),
        ([talk, str(same), "--output-dir", str(tmp_path)], "output_dir"),
        ([talk, "--language", "klingon"], "language"),
        ([str(same)], "file"),
    ):
        assert main(["transcribe", model, *words, "--json", "--device", "cpu"]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["field"] == field
