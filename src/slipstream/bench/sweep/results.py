"""Rows of a sweep: one per measurement, with all its settings, or with the error that it ended
with.

A row is appended to `rows.jsonl` as soon as it is measured, so that an interrupted sweep loses one
row at most. `results.parquet` is written from all rows at the end, with their common data
(versions, machine, definitions, hardware limits) as metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slipstream.base.files import write_whole
from slipstream.bench.adapters import AS_STORED
from slipstream.bench.power import Energy
from slipstream.costs.metrics import DISTRIBUTIONS, PERCENTILES, Summary
from slipstream.errors import ConfigError, install_command

Kind: TypeAlias = Literal["text", "int", "float"]
Row: TypeAlias = dict[str, Any]

ROWS_NAME, PARQUET_NAME, PAGE_NAME = "rows.jsonl", "results.parquet", "dashboard.html"
META_KEY = "slipstream"

COLUMNS: Mapping[str, Kind] = {
    **dict.fromkeys(("key", "time", "engine", "label", "model", "scheme", "parallel"), "text"),
    **dict.fromkeys(("input_len", "output_len", "batch_size", "repeat"), "int"),
    **dict.fromkeys(("error", "engine_version", "dtype"), "text"),
    **dict.fromkeys(
        ("num_requests", "num_failed", "input_tokens", "output_tokens", "cached_tokens"), "int"
    ),
    **dict.fromkeys(
        (
            "wall_s",
            "requests_per_s",
            "output_throughput",
            "steady_throughput",
            "total_throughput",
            "goodput",
        ),
        "float",
    ),
    **{f"{field}_{q}": "float" for field in DISTRIBUTIONS.values() for q in ("mean", *PERCENTILES)},
    **dict.fromkeys(("energy_j", "power_w", "j_per_output_token", "cpu_power_w"), "float"),
    "power_source": "text",
    **dict.fromkeys(("start_s", "peak_memory_bytes"), "float"),
    **dict.fromkeys(
        (
            "step_bytes",
            "step_flops",
            "flops_per_byte",
            "achieved_bytes_per_s",
            "achieved_flops_per_s",
        ),
        "float",
    ),
}
"""Every column, in the order of the file. Times are in seconds, powers in watts. `step_…` is the
decode step's work, estimated from the model's description; `achieved_…` is that divided by the
measured median TPOT."""


def figures(summary: Summary) -> Row:
    """Columns of a summary, without those that could not be computed."""
    found: Row = {
        name: value for name in COLUMNS if (value := getattr(summary, name, None)) is not None
    }
    for field in DISTRIBUTIONS.values():
        if (distribution := getattr(summary, field)) is not None:
            found |= {f"{field}_{q}": getattr(distribution, q) for q in ("mean", *PERCENTILES)}
    return found


def energy_figures(energy: Energy | None) -> Row:
    """Known columns of a run's energy."""
    if energy is None:
        return {}
    found = {
        "energy_j": energy.joules,
        "power_w": energy.watts,
        "power_source": ", ".join(energy.sources),
        "j_per_output_token": energy.joules_per_output_token,
        "cpu_power_w": energy.cpu_watts,
    }
    return {name: value for name, value in found.items() if value is not None}


def append(row: Row, folder: Path) -> None:
    """Append one line; it is on disk when this returns."""
    if unknown := row.keys() - COLUMNS.keys():
        raise ValueError(f"{min(unknown)} is no column")
    with (folder / ROWS_NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_rows(folder: Path) -> list[Row]:
    """Read the rows measured so far. Of a row measured twice the later one counts; an incomplete
    line is skipped."""
    file = folder / ROWS_NAME
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):  # a row that was being written when the machine stopped
        text = text[: text.rfind("\n") + 1]
        file.write_text(text, encoding="utf-8")
    found: dict[str, Row] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            found.pop(row["key"], None)
            found[row["key"]] = row
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"line {number} of {file} is not a row; give another --out", field="out"
            ) from None
    return list(found.values())


def pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"results are Parquet, which needs pyarrow: {install_command('sweep')}", field="out"
        ) from None
    return pyarrow


def write_parquet(rows: Iterable[Row], path: Path, meta: Mapping[str, Any]) -> None:
    """Write rows. A column missing in a row is null."""
    arrow = pyarrow()
    types = {"text": arrow.string(), "int": arrow.int64(), "float": arrow.float64()}
    schema = arrow.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
    table = arrow.Table.from_pylist(list(rows), schema=schema)
    table = table.replace_schema_metadata({META_KEY: json.dumps(meta, ensure_ascii=False)})
    file = arrow.BufferOutputStream()
    arrow.parquet.write_table(table, file, compression="zstd")
    write_whole(path, file.getvalue().to_pybytes())


def read_parquet(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """(rows without their nulls, their common data). ConfigError if the file is not a result of a
    sweep."""
    arrow = pyarrow()
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", field="file")
    try:
        table = arrow.parquet.read_table(path)
    except (OSError, arrow.ArrowInvalid) as error:
        raise ConfigError(f"{path} can't be read as Parquet: {error}", field="file") from None
    meta = (table.schema.metadata or {}).get(META_KEY.encode())
    if meta is None or not {"key", "label", "batch_size"} <= set(table.column_names):
        raise ConfigError(f"{path} is not a result of `slipstream sweep`", field="file")
    rows = [
        {name: value for name, value in row.items() if value is not None}
        for row in table.to_pylist()
    ]
    for row in rows:
        if row.get("scheme") == "auto":  # the former name
            row["scheme"] = AS_STORED
    return rows, json.loads(meta)


def columns_of(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Rows as one list per column, without empty columns."""
    return {
        name: [row.get(name) for row in rows]
        for name in COLUMNS
        if any(row.get(name) is not None for row in rows)
    }
