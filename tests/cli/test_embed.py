"""`slipstream embed`: vectors and similarities on standard output."""

from __future__ import annotations

import io
import json

import pytest

from slipstream.cli.main import main

CPU = ["--device", "cpu", "--dtype", "float32", "--num-threads", "1"]


def test_vectors_and_similarity(tiny_encoder, capsys, monkeypatch):
    assert main(["embed", str(tiny_encoder), "the cat", "a dog", *CPU]) == 0
    rows = [[float(x) for x in line.split()] for line in capsys.readouterr().out.splitlines()]
    assert [len(row) for row in rows] == [32, 32]
    assert sum(x * x for x in rows[0]) == pytest.approx(1.0, abs=1e-4)
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n\na dog\n"))
    assert main(["embed", str(tiny_encoder), "-", "--similarity", "--json", *CPU]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["texts"] == ["the cat", "a dog"]
    cosine = sum(a * b for a, b in zip(*rows, strict=True))
    assert [x for row in found["similarity"] for x in row] == pytest.approx(
        [1.0, cosine, cosine, 1.0], abs=1e-4
    )
    assert "embeddings" not in found


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["the " * 80], "prompt"),
        (["a", "--dimensions", "5"], "dimensions"),
        (["a", "--dtype", "int3"], "dtype"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(tiny_encoder, capsys, words, field):
    assert main(["embed", str(tiny_encoder), *words, "--json", "--device", "cpu"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == field


def test_other_verbs_say_what_an_encoder_is(tiny_encoder, capsys):
    assert main(["run", str(tiny_encoder), "hello"]) in (2, 3)
    assert "encoder" in capsys.readouterr().err


def test_info_describes_it(tiny_encoder, capsys):
    assert main(["info", str(tiny_encoder), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "mean of the tokens" in out
    assert "both directions" in out
