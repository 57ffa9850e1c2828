"""The table for people."""

from __future__ import annotations

from slipstream.bench.report import print_table


def test_a_table_in_a_file_or_pipe_is_as_wide_as_it_needs(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    columns = [f"a long name of column {i}" for i in range(8)]
    print_table("a title", columns, [[f"{i:,}.{'0' * 20}" for i in range(8)]] * 2)
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title == "a title"
    assert "…" not in header
    assert all(column in header for column in columns)
    assert [row.split() for row in rows] == [[f"{i:,}.{'0' * 20}" for i in range(8)]] * 2
