"""`slipstream compress-prompt`."""

from __future__ import annotations

import json

from slipstream.cli.main import main

TEXT = "hello hello hello the hello in the end hello hello"


def test_a_prompt_is_shortened(tiny_model, capsys):
    words = [
        "compress-prompt",
        str(tiny_model),
        TEXT,
        "--keep",
        "0.5",
        "--question",
        " what?",
        "--device",
        "cpu",
    ]
    assert main([*words, "--protect", "end", "--compare", str(tiny_model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"].endswith(" what?")
    assert "end" in found["text"]
    assert found["num_tokens_after"] < found["num_tokens_before"]
    assert found["kept_share"] == found["num_tokens_after"] / found["num_tokens_before"]
    assert 0 <= found["answers"]["overlap"] <= 1
    assert main(words) == 0
    told = capsys.readouterr()
    assert told.out.strip().endswith("what?")
    assert "kept" in told.err


def test_what_cannot_be_is_refused(tiny_model, capsys):
    assert main(["compress-prompt", str(tiny_model), TEXT, "--keep", "2"]) == 2
    assert "keep=2.0" in capsys.readouterr().err
