"""`slipstream info` on models whose tokens have vectors or labels."""

from __future__ import annotations

import json

import pytest

from slipstream.cli.main import main
from tests import tiny_models
from tests.engine.test_token_vectors import write_heads, write_pylate, write_stanford


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


def test_labels_of_tokens_are_described(tmp_path, capsys):
    tiny_models.build_encoder(tmp_path)
    file = tmp_path / "config.json"
    own = {"architectures": ["BertForTokenClassification"], "id2label": {"0": "O", "1": "NAME"}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    assert main(["info", str(tmp_path), "--device", "cpu"]) == 0
    assert "2 scores of each token" in capsys.readouterr().out
