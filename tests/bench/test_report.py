"""The table for people."""

from __future__ import annotations

from slipstream.bench.report import compare_rows, print_table, summary_rows
from slipstream.costs.metrics import RequestTiming, summarize


def test_a_table_in_a_file_or_pipe_is_as_wide_as_it_needs(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    columns = [f"a long name of column {i}" for i in range(8)]
    print_table("a title", columns, [[f"{i:,}.{'0' * 20}" for i in range(8)]] * 2)
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title == "a title"
    assert "…" not in header
    assert all(column in header for column in columns)
    assert [row.split() for row in rows] == [[f"{i:,}.{'0' * 20}" for i in range(8)]] * 2


def test_times_are_milliseconds_and_a_ratio_is_ours_over_theirs():
    ours, theirs = (
        summarize([RequestTiming(input_tokens=1, output_tokens=2, sent=0.0, first_token=s, last_token=2 * s)])
        for s in (0.5, 0.25)
    )  # fmt: skip
    assert {row[0]: row[1] for row in summary_rows(ours)}["TTFT, ms"] == "500.00"
    compared = {name: rest for name, *rest in compare_rows(ours, theirs)}
    assert compared["TTFT p50, ms"] == ["500.00", "250.00", "2.000"]
    assert compared["output throughput, tok/s"] == ["2.00", "4.00", "0.500"]
