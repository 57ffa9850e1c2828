"""`slipstream info` on models whose tokens have vectors or labels."""

from __future__ import annotations

import json
import re

import pytest

from slipstream.cli.main import main
from tests.engine.requests.test_token_vectors import write_heads, write_pylate, write_stanford
from tests.support import tiny_models


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (write_pylate, "12 numbers for each token, length 1, compared by MaxSim\n"),
        (write_stanford, "MaxSim (trained with query expansion, which is left out)"),
        (write_heads, "32 numbers, mean of the tokens, length 1, weights of tokens"),
    ],
)
def test_vectors_of_tokens_are_described(tmp_path, capsys, make, line):
    tiny_models.build_encoder(tmp_path)
    make(tmp_path)
    assert main(["info", str(tmp_path), "--device", "cpu"]) == 0
    assert line in capsys.readouterr().out


def test_shared_out_keys_and_values_say_what_a_rank_holds(tiny_model, capsys):
    words = ["info", str(tiny_model), "--device", "cpu", "--context-parallel-size"]
    shown = []
    for ranks in ("1", "2"):
        assert main([*words, ranks]) == 0
        shown.append(re.search(r"([\d,]+) B a token( over .*?\))?,", capsys.readouterr().out))
    alone, two = shown
    assert alone[2] is None
    each = int(alone[1].replace(",", "")) // 2
    assert (two[1], two[2]) == (alone[1], f" over 2 ranks ({each:,} B on each)")


def test_labels_of_tokens_are_described(tmp_path, capsys):
    tiny_models.build_encoder(tmp_path)
    file = tmp_path / "config.json"
    own = {"architectures": ["BertForTokenClassification"], "id2label": {"0": "O", "1": "NAME"}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    assert main(["info", str(tmp_path), "--device", "cpu"]) == 0
    assert "2 scores of each token" in capsys.readouterr().out
