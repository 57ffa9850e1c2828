"""The requests of a simulation: lengths, shared prefixes and arrival times.

  sharegpt           the first turns of conversations (2,000 lengths are shipped)
  fixed:IN/OUT       all alike
  uniform:A-B/C-D    lengths between A and B tokens, answers between C and D
  lengths:PATH       a file {"lengths": [[input, output], …]}
  trace:PATH         recorded arrivals: Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens; Patel
                     et al. 2024) or Mooncake's JSON lines (timestamp, input_length, output_length,
                     hash_ids; Qin et al. 2025)

Two prompts that begin with the same `prefix` numbers begin with the same tokens, `PREFIX_TOKENS`
for each number.
"""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from slipstream.bench.load import Arrivals, ClosedLoop, Poisson, send_times
from slipstream.bench.workload import read_lengths
from slipstream.errors import ConfigError
from slipstream.files import parse_json

PREFIX_TOKENS = 512
"""Tokens of a hashed block in Mooncake's traces."""

SHAREGPT = Path(__file__).parent / "data" / "sharegpt-lengths.json"


class TrafficRequest(NamedTuple):
    arrival: float  # seconds from the start; a closed loop sends a request when its user is free
    input_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()


def mean_lengths(requests: Sequence[TrafficRequest]) -> tuple[float, float]:
    """Returns the mean (input tokens, output tokens) of a request."""
    count = len(requests)
    return sum(r.input_tokens for r in requests) / count, sum(
        r.output_tokens for r in requests
    ) / count


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests under a load.

    `users` is the number of users of a closed loop, each of whom sends the next request when the
    last is answered. None: requests come at their arrival times.
    """

    name: str
    requests: tuple[TrafficRequest, ...]
    users: int | None = None

    @property
    def rate(self) -> float | None:
        """Mean requests per second. None for a closed loop, and if all requests come at once."""
        span = self.requests[-1].arrival - self.requests[0].arrival
        return None if self.users is not None or span <= 0 else (len(self.requests) - 1) / span

    @property
    def shares_prefixes(self) -> bool:
        return any(r.prefix for r in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests without a load. `recorded` means that their arrivals come from a trace."""

    name: str
    requests: tuple[TrafficRequest, ...]
    recorded: bool = False

    @property
    def mean_lengths(self) -> tuple[float, float]:
        return mean_lengths(self.requests)

    def take(self, count: int) -> Iterator[TrafficRequest]:
        """Yields `count` requests, starting again when they are used up. The arrivals of a trace
        continue."""
        last = self.requests[-1].arrival
        lap = last + (last / max(1, len(self.requests) - 1))
        for i, request in zip(range(count), itertools.cycle(self.requests), strict=False):
            yield request._replace(arrival=request.arrival + lap * (i // len(self.requests)))

    def traffic(self, arrivals: Arrivals | None, count: int, *, seed: int = 0) -> Traffic:
        """Returns `count` requests under a load. With None, requests come as the trace recorded
        them. ConfigError if there is no trace."""
        requests = list(self.take(count))
        if isinstance(arrivals, ClosedLoop):
            return Traffic(name=self.name, requests=tuple(requests), users=arrivals.concurrency)
        if arrivals is None:
            if not self.recorded:
                raise ConfigError(
                    f"the workload {self.name} has no arrival times; give --rate or --concurrency",
                    field="rate",
                )
            return Traffic(name=self.name, requests=tuple(requests))
        times = send_times(arrivals, count, seed)
        moved = (r._replace(arrival=t) for r, t in zip(requests, times, strict=True))
        return Traffic(name=self.name, requests=tuple(moved))

    def at_rate(self, rate: float, count: int, *, seed: int = 0) -> Traffic:
        """Returns `count` requests at `rate` per second on average.

        A trace keeps its own gaps, stretched evenly. Others get Poisson arrivals of independent
        users.
        """
        if not self.recorded:
            return self.traffic(Poisson(rate=rate), count, seed=seed)
        own = self.traffic(None, count)
        if own.rate is None:
            raise ConfigError(
                f"all requests of {self.name} arrive at once, so they can't be scaled to --rate",
                field="rate",
            )
        scale = own.rate / rate
        return Traffic(
            name=self.name,
            requests=tuple(r._replace(arrival=r.arrival * scale) for r in own.requests),
        )


def parse_workload(text: str, *, seed: int = 0) -> Workload:
    """Parses `sharegpt`, `fixed:IN/OUT`, `uniform:A-B/C-D`, `lengths:PATH` or `trace:PATH`."""
    kind, _, value = text.partition(":")
    if kind == "sharegpt" and not value:
        return of_lengths("sharegpt", read_lengths(SHAREGPT))
    if kind == "lengths" and value:
        return of_lengths(Path(value).name, read_lengths(Path(value)))
    if kind == "trace" and value:
        return read_trace(Path(value))
    if kind in ("fixed", "uniform"):
        try:
            ends = [[int(n) for n in part.split("-")] for part in value.split("/")]
            if [len(e) for e in ends] == [1 if kind == "fixed" else 2] * 2 and all(
                1 <= e[0] <= e[-1] for e in ends
            ):
                rng = random.Random(seed)
                (a, *_), (b, *_) = ends
                count = 1 if kind == "fixed" else 2000
                each = [
                    (rng.randint(a, ends[0][-1]), rng.randint(b, ends[1][-1])) for _ in range(count)
                ]
                return of_lengths(text, each)
        except ValueError:
            pass  # no numbers: the error is raised below
    raise ConfigError(
        f"workload={text!r} is not sharegpt, fixed:IN/OUT, uniform:A-B/C-D, lengths:PATH or trace:PATH",
        field="workload",
    )


def of_lengths(name: str, lengths: Sequence[tuple[int, int]]) -> Workload:
    return Workload(
        name=name, requests=tuple(TrafficRequest(0.0, n_in, n_out) for n_in, n_out in lengths)
    )


def read_trace(path: Path) -> Workload:
    """Reads a trace file. ConfigError names the line that is wrong."""
    found: list[TrafficRequest] = []
    is_csv = path.suffix == ".csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            if is_csv:
                found.extend(map(_of_azure, csv.DictReader(file)))
            else:
                found.extend(map(_of_mooncake, map(parse_json, filter(str.strip, file))))
    except OSError as error:
        raise ConfigError(
            f"cannot read the trace {path}: {error.strerror}", field="workload"
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{path}, line {len(found) + 1 + is_csv}: {type(error).__name__}: {error}; a trace is Azure's CSV (TIMESTAMP, "
            "ContextTokens, GeneratedTokens) or Mooncake's JSON lines (timestamp, input_length, output_length, hash_ids)",
            field="workload",
        ) from None
    if not found:
        raise ConfigError(f"{path} holds no requests", field="workload")
    found.sort(key=lambda r: r.arrival)
    first = found[0].arrival
    return Workload(
        name=path.name,
        requests=tuple(r._replace(arrival=r.arrival - first) for r in found),
        recorded=True,
    )


def _of_azure(row: dict[str, str]) -> TrafficRequest:
    stamp = row["TIMESTAMP"].strip()
    whole, _, fraction = stamp.partition(".")  # its seven digits are one more than datetime reads
    time = datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")
    return _checked(TrafficRequest(time, int(row["ContextTokens"]), int(row["GeneratedTokens"])))


def _of_mooncake(row: dict[str, object]) -> TrafficRequest:
    ids = row.get("hash_ids") or []
    if not isinstance(ids, list):
        raise ValueError("hash_ids is no list")
    n_in, n_out = int(str(row["input_length"])), int(str(row["output_length"]))
    return _checked(
        TrafficRequest(float(str(row["timestamp"])) / 1000, n_in, n_out, tuple(int(i) for i in ids))
    )


def _checked(request: TrafficRequest) -> TrafficRequest:
    if request.input_tokens < 1 or request.output_tokens < 0:
        raise ValueError("a length below 1")
    return request._replace(output_tokens=max(1, request.output_tokens))
