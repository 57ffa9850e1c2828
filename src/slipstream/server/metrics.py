"""Prometheus metrics, one registry per app. Names are vLLM's, with the prefix `slipstream:`.

Each front end counts for itself; a scrape adds up their `Counts`.

Everything runs on one event loop, so counts are plain numbers that a scrape turns into families: an observation on
the token path is one bisection. Engine numbers (queue, cache, tokens) are the engine's own, asked for at each scrape;
when it is down they are left out and `slipstream:engine_up` is 0.

Definitions. TTFT: from the request's arrival at the server to its first token. ITL: the gap between two deltas of one
choice. TPOT: (last token - first token) / (output tokens - 1) of one choice. E2E: from arrival to the end of the
answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.types import EngineStats

_PREFIX = "slipstream:"
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
_REQUEST_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 1200.0)

_ENGINE_METRICS = (
    # (field of EngineStats, name, whether it only grows, help)
    ("num_running", "num_requests_running", False, "Sequences that the engine is working on"),
    ("num_waiting", "num_requests_waiting", False, "Sequences that wait for their first step"),
    ("kv_cache_usage", "kv_cache_usage_ratio", False, "Share of KV cache blocks in use, 0 to 1"),
    ("num_preemptions", "num_preemptions", True, "Sequences that lost their blocks to others and were computed again"),
    ("prefix_queries", "prefix_cache_queries", True, "Prompt tokens looked up in the prefix cache"),
    ("prefix_hits", "prefix_cache_hits", True, "Prompt tokens found in the prefix cache"),
    ("prompt_tokens_total", "prompt_tokens", True, "Prompt tokens of requests taken in"),
    ("generation_tokens_total", "generation_tokens", True, "Tokens generated"),
    ("spec_num_drafts", "spec_decode_num_drafts", True, "Runs of guessed tokens that were verified"),
    ("spec_draft_tokens", "spec_decode_num_draft_tokens", True, "Guessed tokens that were verified"),
    ("spec_accepted_tokens", "spec_decode_num_accepted_tokens", True, "Guessed tokens that the model confirmed"),
    ("forced_tokens", "structured_output_forced_tokens", True, "Tokens that grammars forced, computed without a step each"),
)


class Histogram:
    """Counts per bucket; `bounds` are upper bounds, inclusive, as Prometheus has them."""

    __slots__ = ("bounds", "counts", "help", "name", "total")

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:  # noqa: A002 - Prometheus' word
        self.name, self.help, self.bounds = name, help, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, model: str) -> Metric:
        edges = (*map(str, self.bounds), "+Inf")
        family = HistogramMetricFamily(_PREFIX + self.name, self.help, labels=["model_name"])
        family.add_metric([model], list(zip(edges, accumulate(self.counts), strict=True)), self.total)
        return family


class Counts(msgspec.Struct):
    """What a front end has counted."""

    histograms: list[tuple[list[int], float]]  # in the order of `Metrics.histograms`
    finished: dict[str, int]
    responses: list[tuple[tuple[str, str, int], int]]


class Metrics(Collector):
    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.ttft = Histogram("time_to_first_token_seconds", "Arrival to first token", _REQUEST_BUCKETS)
        self.itl = Histogram("inter_token_latency_seconds", "Gap between two deltas of one choice", _TOKEN_BUCKETS)
        self.tpot = Histogram("time_per_output_token_seconds", "Mean time per token after the first", _TOKEN_BUCKETS)
        self.e2e = Histogram("e2e_request_latency_seconds", "Arrival to the end of the answer", _REQUEST_BUCKETS)
        self.histograms = (self.ttft, self.itl, self.tpot, self.e2e)
        self.finished: Counter[str] = Counter()  # choices, by finish reason
        self.responses: Counter[tuple[str, str, int]] = Counter()  # by method, route, status
        self.stats: EngineStats | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def counts(self) -> Counts:
        histograms = [(list(histogram.counts), histogram.total) for histogram in self.histograms]
        return Counts(histograms, dict(self.finished), list(self.responses.items()))

    def add(self, counts: Counts) -> None:
        for histogram, (found, total) in zip(self.histograms, counts.histograms, strict=True):
            histogram.counts = [a + b for a, b in zip(histogram.counts, found, strict=True)]
            histogram.total += total
        self.finished.update(counts.finished)
        self.responses.update(dict(counts.responses))

    def render(self, stats: EngineStats | None) -> bytes:
        """The text of a scrape, with the engine's numbers as they are now (None: it is down)."""
        self.stats = stats
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        model = self.model_name
        for histogram in self.histograms:
            yield histogram.family(model)
        success = CounterMetricFamily(
            _PREFIX + "request_success", "Choices completed, by reason", labels=["model_name", "finish_reason"]
        )
        for reason in {"stop", "length"} | set(self.finished):
            success.add_metric([model, reason], self.finished[reason])
        yield success
        http = CounterMetricFamily(
            _PREFIX + "http_requests",
            "HTTP requests answered (499: the client left)",
            labels=["method", "route", "status"],
        )
        for (method, route, status), count in self.responses.items():
            http.add_metric([method, route, str(status)], count)
        yield http
        up = GaugeMetricFamily(_PREFIX + "engine_up", "1 if the engine process answers", labels=["model_name"])
        up.add_metric([model], float(self.stats is not None))
        yield up
        for field, name, grows, text in _ENGINE_METRICS if self.stats is not None else ():
            family = (CounterMetricFamily if grows else GaugeMetricFamily)(_PREFIX + name, text, labels=["model_name"])
            family.add_metric([model], getattr(self.stats, field))
            yield family
        if self.stats is not None and self.stats.spec_accepted_by_position:
            text = "Guessed tokens that the model confirmed, by their place in the run"
            name = _PREFIX + "spec_decode_num_accepted_tokens_per_pos"
            places = CounterMetricFamily(name, text, labels=["model_name", "position"])
            for position, count in enumerate(self.stats.spec_accepted_by_position):
                places.add_metric([model, str(position)], count)
            yield places
        if self.stats is not None and self.stats.expert_load:
            text = "Tokens that an expert of a layer was chosen for"
            load = CounterMetricFamily(_PREFIX + "expert_tokens", text, labels=["model_name", "layer", "expert"])
            for layer, counts in self.stats.expert_load:
                for expert, tokens in enumerate(counts):
                    load.add_metric([model, str(layer), str(expert)], tokens)
            yield load
