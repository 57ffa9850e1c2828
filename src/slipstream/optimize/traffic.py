"""Traffic with which candidates are measured: lengths of requests, and their arrivals."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.base.files import parse_json
from slipstream.bench.load import parse_arrivals
from slipstream.bench.workload import BenchWorkload, Length, from_lengths, read_lengths
from slipstream.errors import ConfigError

TRACE_COLUMNS = (
    ("ContextTokens", "GeneratedTokens"),
    ("input_length", "output_length"),
    ("num_prefill_tokens", "num_decode_tokens"),
)
"""Column names of (input, output) tokens in the traces of Azure, Mooncake and Vidur."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTraffic:
    """Lengths and arrivals of requests. `arrivals` is in the format of `bench.load.parse_arrivals`.
    `num_left_out`: number of requests of the source that exceeded the model's context."""

    source: str
    lengths: tuple[Length, ...]
    arrivals: str
    seed: int = 0
    num_left_out: int = 0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RecordedTraffic:
        """Build the traffic from JSON data."""
        return cls(**{**given, "lengths": tuple((a, b) for a, b in given["lengths"])})

    @property
    def longest(self) -> int:
        return max(a + b for a, b in self.lengths)

    def workload(self, vocab_size: int) -> BenchWorkload:
        return from_lengths("traffic", self.lengths, vocab_size=vocab_size, seed=self.seed)


def parse_traffic(
    text: str, arrivals: str, *, num_requests: int, longest: int, seed: int = 0
) -> RecordedTraffic:
    """Read traffic. `text` is IN/OUT for equal requests, such as 128/64, or a file: a recorded
    trace (.csv, .jsonl) or lengths (.json, like `bench --lengths-file`). The first `num_requests`
    that fit into `longest` tokens are used."""
    parse_arrivals(arrivals)
    if num_requests < 1:
        raise ConfigError("num_requests must be above 0", field="num_requests")
    first, _, second = text.partition("/")
    if first.isdecimal() and second.isdecimal() and int(first) and int(second):
        found = [(int(first), int(second))] * num_requests
    else:
        found = read_trace(Path(text).expanduser())
    fits = [pair for pair in found if sum(pair) <= longest]
    if not fits:
        raise ConfigError(
            f"traffic={text!r}: no request of it fits into the model's {longest} tokens",
            field="traffic",
        )
    taken = tuple(fits[:num_requests])
    if all(num_out < 2 for _, num_out in taken):
        what = f"traffic={text!r}: answers of one token have no time between tokens to search by; give 2 or more"
        raise ConfigError(what, field="traffic")
    return RecordedTraffic(
        source=text,
        lengths=taken,
        arrivals=arrivals,
        seed=seed,
        num_left_out=len(found) - len(fits),
    )


def read_trace(path: Path) -> list[Length]:
    """Read the lengths in a file, in order, without requests that have no input or no output tokens."""
    if not path.is_file():
        raise ConfigError(
            f"traffic={str(path)!r} is neither IN/OUT, such as 128/64, nor a file", field="traffic"
        )
    if path.suffix == ".json":
        return read_lengths(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = (
                [*map(parse_json, filter(str.strip, file))]
                if path.suffix == ".jsonl"
                else list(csv.DictReader(file))
            )
        names = next(pair for pair in TRACE_COLUMNS if rows and set(pair) <= rows[0].keys())
        lengths = [(int(row[names[0]]), int(row[names[1]])) for row in rows]
    except (OSError, ValueError, OverflowError, TypeError, AttributeError, StopIteration):
        known = ", ".join("/".join(pair) for pair in TRACE_COLUMNS)
        raise ConfigError(
            f"{path} is not a trace with columns of input and output tokens ({known})",
            field="traffic",
        ) from None
    return [pair for pair in lengths if min(pair) > 0]
