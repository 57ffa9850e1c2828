"""Commands that are refused before anything is loaded, and the last values that are taken: rows of refusals.txt."""

import shlex
from pathlib import Path

import pytest

from slipstream.cli.main import main

TINY = Path(__file__).parents[2] / "benchmarks" / "configs" / "tiny"
ROWS = (Path(__file__).parent / "refusals.txt").read_text().splitlines()


@pytest.mark.parametrize("row", ROWS)
def test_a_command_is_refused_with_these_words_or_taken(row, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command, _, words = row.partition(" -> ")
    places = {"TINY": TINY, "KEYS": tmp_path / "keys", "DIR": tmp_path, "N*200": "n" * 200}
    for name, place in {"N*201": "n" * 201, **places}.items():
        command = command.replace(name, str(place))
    code = main(shlex.split(command))
    told = capsys.readouterr().err
    assert words in told if words else "Error" not in told, told
    assert (code != 0) == bool(words)
