"""Records of requests, and their summary. All figures are computed here."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.errors import ConfigError

DEFINITIONS = {
    "TTFT": "first non-empty token − send",
    "TPOT": "(E2E − TTFT) / (output tokens − 1)",
    "ITL": "each gap between two deliveries of one answer",
    "worst gap": "the longest of an answer's gaps between two deliveries",
    "E2E": "last token − send",
    "output throughput": "output tokens / wall time",
    "steady throughput": "output tokens / time, from a tenth of all output tokens to nine tenths",
    "total throughput": "(input + output tokens) / wall time",
    "goodput": "requests/s that meet every objective",
    "wall time": "first send to last token",
}
OBJECTIVES = ("ttft_s", "tpot_s", "e2e_s")
DISTRIBUTIONS = {
    "TTFT": "ttft_s",
    "TPOT": "tpot_s",
    "ITL": "itl_s",
    "worst gap": "worst_gap_s",
    "E2E": "e2e_s",
}
"""Fields of `Summary` by the names shown to people."""

PERCENTILES = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """Record of one request. Times are seconds on one clock; `gaps_s` is None if only the first and last token are timed."""

    input_tokens: int
    output_tokens: int
    sent: float
    first_token: float | None = None
    last_token: float | None = None
    gaps_s: tuple[float, ...] | None = None
    cached_tokens: int = 0
    error: str | None = None
    refused: bool = False  # the server refused it because it is overloaded

    @classmethod
    def of(cls, input_tokens: int, sent: float, times: Sequence[float]) -> RequestTiming:
        """Record of a request each of whose tokens was timed."""
        gaps = tuple(b - a for a, b in itertools.pairwise(times))
        return cls(
            input_tokens=input_tokens,
            output_tokens=len(times),
            sent=sent,
            first_token=times[0],
            last_token=times[-1],
            gaps_s=gaps,
        )

    @property
    def ok(self) -> bool:
        return self.error is None and self.first_token is not None and self.last_token is not None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.sent

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_token is None else self.last_token - self.sent

    @property
    def tpot_s(self) -> float | None:
        if self.e2e_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def worst_gap_s(self) -> float | None:
        return max(self.gaps_s, default=None) if self.gaps_s is not None else None

    def meets(self, objectives: dict[str, float]) -> bool:
        """Whether every objective is met. One that can't be computed (TPOT of a single token)
        counts as met."""
        return self.ok and all(
            (value := getattr(self, name)) is None or value <= most
            for name, most in objectives.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary of all requests of a run. Failed ones count only in `num_failed`; `errors` counts the most common messages."""

    num_requests: int
    num_failed: int
    num_refused: int  # number among the failed
    errors: dict[str, int]
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    wall_s: float
    requests_per_s: float
    output_throughput: float
    # None if only the first and last tokens are timed, or if there are too few tokens
    steady_throughput: float | None
    total_throughput: float
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    worst_gap_s: Distribution | None
    e2e_s: Distribution | None
    objectives: dict[str, float]
    goodput: float | None  # None without objectives

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(
    records: Sequence[RequestTiming], objectives: dict[str, float] | None = None
) -> Summary:
    done = [r for r in records if r.ok]
    errors = Counter(r.error or "no token came" for r in records if not r.ok)
    wall_s = (
        max((r.last_token or 0.0 for r in done), default=0.0)
        - min((r.sent for r in records), default=0.0)
        if done
        else 0.0
    )

    def rate(count: int) -> float:
        return count / wall_s if wall_s > 0 else 0.0

    n_in, n_out = sum(r.input_tokens for r in done), sum(r.output_tokens for r in done)
    gaps = [gap for r in done if r.gaps_s is not None for gap in r.gaps_s]
    return Summary(
        num_requests=len(records),
        num_failed=len(records) - len(done),
        num_refused=sum(r.refused for r in records),
        errors=dict(errors.most_common(5)),
        input_tokens=n_in,
        output_tokens=n_out,
        cached_tokens=sum(r.cached_tokens for r in done),
        wall_s=wall_s,
        requests_per_s=rate(len(done)),
        output_throughput=rate(n_out),
        steady_throughput=steady_throughput(done),
        total_throughput=rate(n_in + n_out),
        ttft_s=distribution(r.ttft_s for r in done),
        tpot_s=distribution(r.tpot_s for r in done),
        itl_s=distribution(gaps),
        worst_gap_s=distribution(r.worst_gap_s for r in done),
        e2e_s=distribution(r.e2e_s for r in done),
        objectives=dict(objectives or {}),
        goodput=rate(sum(r.meets(objectives) for r in done)) if objectives else None,
    )


def steady_throughput(done: Sequence[RequestTiming]) -> float | None:
    """Steady tokens per second of successful requests. An answer's tokens count evenly over its deliveries."""
    deliveries: list[tuple[float, float]] = []
    for r in done:
        if r.gaps_s is None or r.first_token is None:
            return None
        tokens = r.output_tokens / (len(r.gaps_s) + 1)
        deliveries += [
            (time, tokens) for time in itertools.accumulate(r.gaps_s, initial=r.first_token)
        ]
    return steady_rate(sorted(deliveries))


def steady_rate(deliveries: Sequence[tuple[float, float]]) -> float | None:
    """Tokens per second between a tenth and nine tenths of the tokens; `deliveries` are (time, tokens), in order."""
    so_far = list(itertools.accumulate(tokens for _, tokens in deliveries))
    if not so_far:
        return None
    begin, end = (bisect_left(so_far, so_far[-1] * share) for share in (0.1, 0.9))
    seconds = deliveries[end][0] - deliveries[begin][0]
    return (so_far[end] - so_far[begin]) / seconds if seconds > 0 else None


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Mean and percentiles of the values; None if there is none."""
    known = sorted(v for v in values if v is not None)
    if not known:
        return None
    mean = sum(known) / len(known)
    return Distribution(
        mean=mean, p50=percentile(known, 50), p90=percentile(known, 90), p99=percentile(known, 99)
    )


def weighted_distribution(values: Iterable[tuple[float, int]]) -> Distribution | None:
    """`distribution` of values with multiplicities; `values` are (value, count)."""
    ordered = sorted((value, count) for value, count in values if count > 0)
    ends = list(itertools.accumulate(count for _, count in ordered))
    if not ends:
        return None

    def at(q: float) -> float:
        place = (ends[-1] - 1) * q / 100
        low = int(place)
        first, second = (
            ordered[bisect_right(ends, i)][0] for i in (low, min(low + 1, ends[-1] - 1))
        )
        return first + (second - first) * (place - low)

    return Distribution(
        mean=sum(v * n for v, n in ordered) / ends[-1], p50=at(50), p90=at(90), p99=at(99)
    )


def percentile(ordered: Sequence[float], q: float) -> float:
    """Percentile with linear interpolation between the nearest values of a sorted, non-empty sequence (numpy's default)."""
    at = (len(ordered) - 1) * q / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def parse_objectives(text: str) -> dict[str, float]:
    """Parse `ttft_s=0.5,tpot_s=0.05` to a dict."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"slo: {part!r} is not NAME=SECONDS", field="slo") from None
        if name not in OBJECTIVES or not found[name] > 0:
            raise ConfigError(
                f"slo: {part!r} is not one of {', '.join(OBJECTIVES)} with a value above 0",
                field="slo",
            )
    return found
