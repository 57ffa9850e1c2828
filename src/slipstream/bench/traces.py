"""Reads recorded traffic: a row for each request, with its time, lengths, and hashes of its prompt's blocks.

Three formats are supported:

1. Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens; Patel et al. 2024).
2. Mooncake's JSON lines (timestamp in ms, input_length, output_length, hash_ids; Qin et al. 2025).
   Prompts that begin with the same hashes begin with the same tokens, `BLOCK_TOKENS` for each.
3. The same lines with a `session_id` (AIPerf's form). A session's later rows have the tokens that they add,
   and a `delay` in ms after the previous answer, or a timestamp.
"""

from __future__ import annotations

import csv
import math
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from slipstream.base.files import parse_json
from slipstream.errors import ConfigError

BLOCK_TOKENS = 512
"""Number of tokens in a hashed block in Mooncake's traces."""


class TraceRow(NamedTuple):
    """A recorded request. `start_s` counts from the trace's first request; a later turn of a
    session has a `delay_s` instead."""

    start_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    session: str | None = None
    delay_s: float | None = None


def read_rows(path: Path, field: str = "workload") -> list[TraceRow]:
    """The rows of a trace, in order of time; those of a session stay in their order.

    ConfigError for `field` names the wrong line."""
    found: list[TraceRow] = []
    is_csv = path.suffix == ".csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            if is_csv:
                found.extend(map(_of_azure, csv.DictReader(file)))
            else:
                found.extend(map(_of_mooncake, map(parse_json, filter(str.strip, file))))
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}", field=field) from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{path}, line {len(found) + 1 + is_csv}: {type(error).__name__}: {error}; a trace is Azure's CSV (TIMESTAMP, "
            "ContextTokens, GeneratedTokens) or Mooncake's JSON lines (timestamp, input_length, output_length, hash_ids)",
            field=field,
        ) from None
    if not found:
        raise ConfigError(f"{path} holds no requests", field=field)
    first = min((row.start_s for row in found if row.delay_s is None), default=0.0)
    begins: dict[str, float] = {}  # start time of each session
    before: dict[str, float] = {}  # time of the session's previous row
    ordered = []
    for row in found:
        start, delay, session = row.start_s - first, row.delay_s, row.session
        if session is not None:
            if delay is None and session in before:
                delay = max(0.0, start - before[session])
            before[session] = start
            start = begins.setdefault(session, max(0.0, start))
        ordered.append(row._replace(start_s=start, delay_s=delay))
    return sorted(ordered, key=lambda row: row.start_s)  # a stable sort keeps a session's order


def _of_azure(row: dict[str, str]) -> TraceRow:
    stamp = row["TIMESTAMP"].strip()
    whole, _, fraction = stamp.partition(".")  # its seven digits are one more than datetime accepts
    time = datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")
    return _checked(TraceRow(time, int(row["ContextTokens"]), int(row["GeneratedTokens"])))


def _of_mooncake(row: dict[str, object]) -> TraceRow:
    ids = row.get("hash_ids") or []
    if not isinstance(ids, list):
        raise ValueError("hash_ids is no list")
    n_in, n_out = int(str(row["input_length"])), int(str(row["output_length"]))
    session, delay_s = row.get("session_id"), None
    if session is None or "timestamp" in row:
        start_s = float(str(row["timestamp"])) / 1000
    else:
        start_s, delay_s = 0.0, float(str(row["delay"])) / 1000
        if not 0 <= delay_s < math.inf:
            raise ValueError(f"delay {row['delay']!r} is not a time")
    name = None if session is None else str(session)
    return _checked(TraceRow(start_s, n_in, n_out, tuple(int(i) for i in ids), name, delay_s))


def _checked(row: TraceRow) -> TraceRow:
    if row.input_tokens < 1 or row.output_tokens < 0:
        raise ValueError("a length below 1")
    if not math.isfinite(row.start_s):
        raise ValueError("a time that is no number")
    return row._replace(output_tokens=max(1, row.output_tokens))
