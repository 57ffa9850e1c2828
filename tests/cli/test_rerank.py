"""`slipstream rerank`, and words with options between them."""

from __future__ import annotations

import io
import json

import pytest

from slipstream import LLM
from slipstream.cli.answers import answer
from slipstream.cli.main import main

CPU = ["--device", "cpu", "--dtype", "float32", "--num-threads", "1"]
DOCS = ["the sky is blue", "a cat eats", "a " * 55]


def test_rerank_prints_the_scores_of_the_library(tiny_encoder, capsys, monkeypatch):
    assert main(["rerank", str(tiny_encoder), "who eats?", *CPU, *DOCS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    with LLM(str(tiny_encoder), device="cpu", dtype="float32", num_threads=1) as llm:
        expected = llm.rerank("who eats?", DOCS)
    assert [(r["index"], r["document"]) for r in found["results"]] == [
        (r.index, r.document) for r in expected
    ]
    assert [r["relevance_score"] for r in found["results"]] == pytest.approx(
        [r.relevance_score for r in expected], abs=1e-4
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(DOCS)))
    assert main(["rerank", str(tiny_encoder), "who eats?", "-", "--top-n", "2", *CPU]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert [int(index) for _, index, _ in lines] == [r.index for r in expected[:2]]
    assert all(len(text) <= 100 for *_, text in lines)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["q"], "command line"),
        (["q", "d", "--top-n", "0"], "top_n"),
        (["q", "the " * 80], "prompt"),
        (["q", "-"], "documents"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(tiny_encoder, capsys, monkeypatch, words, field):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    if field in ("top_n", "documents"):  # before the model is loaded
        monkeypatch.setattr(answer, "open_llm", None)
    assert main(["rerank", str(tiny_encoder), *words, "--json", "--device", "cpu"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == field


def test_options_between_words(tiny_model, capsys):
    own = [*CPU, "--max-tokens", "3", "--temperature", "0", "--raw", "--json"]
    texts = []
    for words in (
        [str(tiny_model), "hello", *own],
        [str(tiny_model), *own, "hello"],
        [*own, str(tiny_model), "hello"],
    ):
        assert main(["run", *words]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert len(set(texts)) == 1
    assert main(["run", str(tiny_model), "--raww", "hello"]) == 2
    assert "--raw" in capsys.readouterr().err


def test_a_prompt_for_chat_is_one_for_run(tiny_model, capsys):
    assert main(["chat", str(tiny_model), "--temperature", "0", "say it"]) == 2
    assert f"slipstream run {tiny_model} 'say it'" in capsys.readouterr().err
