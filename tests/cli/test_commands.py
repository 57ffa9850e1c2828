"""Commands that load no model: refusals, the last values that are taken, and what is printed. Rows of commands.txt."""

import shlex
from pathlib import Path

import pytest

from slipstream.cli.main import main

TINY = Path(__file__).parents[2] / "benchmarks" / "configs" / "tiny"
ROWS = (Path(__file__).parent / "commands.txt").read_text().splitlines()


@pytest.mark.parametrize("row", ROWS)
def test_a_command_is_refused_or_prints_as_the_row_says(row, tmp_path, monkeypatch, capsys):
    """`command`, then `-> words` of its refusal or `=> text; text` of what it prints."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command, _, words = row.partition(" -> ")
    command, _, shown = command.partition(" => ")
    places = {"TINY": TINY, "KEYS": tmp_path / "keys", "DIR": tmp_path, "N*200": "n" * 200}
    for name, place in {"N*201": "n" * 201, **places}.items():
        command = command.replace(name, str(place))
    code = main(shlex.split(command))
    out, told = capsys.readouterr()
    assert not [text for text in shown.split("; ") if text not in " ".join(out.split())]
    assert words in told if words else "Error" not in told, told
    assert (code != 0) == bool(words)
