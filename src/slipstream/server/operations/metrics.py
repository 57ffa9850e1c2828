"""Prometheus metrics, one registry for each app. Names are vLLM's, with the prefix `slipstream:`.

Each front end counts for itself; a scrape adds up their `MetricCounts`.

Everything runs on one event loop, so counts are plain numbers that a scrape turns into families: an
observation on the token path is one bisection. Engine numbers (queue, cache, tokens) are asked from
the engine at each scrape. When it is down they are left out and `slipstream:engine_up` is 0.

Definitions:

- TTFT: from the request's arrival at the server to its first token.
- ITL: the gap between two deltas of one choice.
- TPOT: (last token - first token) / (output tokens - 1) of one choice.
- E2E: from arrival to the end of the answer.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from slipstream.messages.stats import EngineStats

_PREFIX = "slipstream:"
TOKEN_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.2,
    0.5,
    1.0,
    2.5,
    10.0,
)
REQUEST_BUCKETS = (
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    60.0,
    120.0,
    300.0,
    1200.0,
)

_LENGTH_BUCKETS = (
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    50.0,
    100.0,
    200.0,
    500.0,
    1e3,
    2e3,
    5e3,
    1e4,
    2e4,
    5e4,
    1e5,
    2e5,
)

_ENGINE_METRICS = (
    ("num_running", "num_requests_running", False, "Sequences that the engine is working on"),
    ("num_waiting", "num_requests_waiting", False, "Sequences that wait for their first step"),
    ("kv_cache_usage", "kv_cache_usage_ratio", False, "Share of KV cache blocks in use, 0 to 1"),
    ("num_preemptions", "num_preemptions", True,
        "Sequences that lost their blocks to others and were computed again"),
    ("prefix_queries", "prefix_cache_queries", True, "Prompt tokens looked up in the prefix cache"),
    ("prefix_hits", "prefix_cache_hits", True, "Prompt tokens found in the prefix cache"),
    ("is_paused", "engine_paused", False, "1 while generation is paused (POST /pause)"),
    ("num_steps", "engine_steps", True, "Steps that ended"),
    ("last_step_age_s", "engine_last_step_age_seconds", False, "Since the last step ended"),
    ("step_seconds_total", "engine_step_seconds", True, "Time of the steps"),
    ("prompt_tokens_total", "prompt_tokens", True, "Prompt tokens of requests taken in"),
    ("generation_tokens_total", "generation_tokens", True, "Tokens generated"),
    ("spec_num_drafts", "spec_decode_num_drafts", True,
        "Runs of drafted tokens that were verified"),
    ("spec_draft_tokens", "spec_decode_num_draft_tokens", True,
        "Drafted tokens that were verified"),
    ("spec_accepted_tokens", "spec_decode_num_accepted_tokens", True,
        "Drafted tokens that the model confirmed"),
    ("forced_tokens", "structured_output_forced_tokens", True,
        "Tokens that grammars forced, computed without a step each"),
)  # fmt: skip

_ADAPTER_METRICS = (
    # the same columns for AdapterStats
    ("num_on_device", "lora_adapters_on_device", False, "Adapters in slots of the device"),
    ("num_on_host", "lora_adapters_on_host", False, "Adapters in the host's memory"),
    ("reads_total", "lora_adapter_reads", True, "Adapters read from their files"),
    (
        "placements_total",
        "lora_adapter_placements",
        True,
        "Adapters copied to a slot of the device",
    ),
)

_EXPERT_METRICS = (
    # the same columns for ExpertBalance
    (
        "rank_imbalance",
        "expert_rank_imbalance_ratio",
        False,
        "Load of the rank whose experts were chosen most over the mean",
    ),
    ("moved_total", "experts_moved", True, "Experts that changed ranks"),
)

_TIER_METRICS = (
    ("host_bytes", "kv_host_tier_bytes", False, "Bytes of KV blocks in the host's memory"),
    ("disk_bytes", "kv_disk_tier_bytes", False, "Bytes of KV blocks on the disk"),
    ("stored_blocks", "kv_tier_stored_blocks", True, "KV blocks that went to the tiers"),
    ("stored_bytes", "kv_tier_stored_bytes", True, "Bytes of these"),
    ("dropped_blocks", "kv_tier_dropped_blocks", True, "KV blocks that could not be kept"),
    ("loaded_blocks", "kv_tier_loaded_blocks", True, "KV blocks that came back"),
    ("loaded_bytes", "kv_tier_loaded_bytes", True, "Bytes of these"),
    ("failed_blocks", "kv_tier_failed_blocks", True, "KV blocks that were gone or damaged"),
    ("queried_tokens", "kv_tier_queries", True, "Prompt tokens looked up in the tiers"),
    ("host_hit_tokens", "kv_host_tier_hits", True,
        "Prompt tokens found in the host's memory, and loaded"),
    ("disk_hit_tokens", "kv_disk_tier_hits", True, "Prompt tokens found on the disk, and loaded"),
    ("declined_tokens", "kv_tier_declined_tokens", True,
        "Prompt tokens found, and computed since that is faster"),
    ("late_loads", "kv_tier_late_loads", True, "Requests that waited no longer for their blocks"),
    ("prefetched_tokens", "kv_tier_prefetched_tokens", True,
        "Tokens of pausing sessions that were brought back to the device"),
    ("prefetch_hit_tokens", "kv_tier_prefetch_hits", True,
        "Of these, tokens that the session's next request found"),
    ("handed_blocks", "kv_handover_blocks", True,
        "KV blocks of computed prompts, kept for other engines"),
    ("handed_bytes", "kv_handover_bytes", True, "Bytes of these"),
    ("expired_blocks", "kv_handover_expired_blocks", True,
        "Of these, blocks that nobody asked for in time, or that made room for others"),
    ("exchange_bytes", "kv_handover_held_bytes", False, "Bytes of these that are kept now"),
    ("peer_hit_tokens", "kv_handover_hits", True,
        "Prompt tokens that another engine computed, and whose blocks were loaded"),
    ("peer_bytes_per_s", "kv_handover_bytes_per_second", False,
        "Rate of loading from another engine, last measured"),
    ("host_bytes_per_s", "kv_host_tier_bytes_per_second", False,
        "Rate of loading from the host's memory, last measured"),
    ("disk_bytes_per_s", "kv_disk_tier_bytes_per_second", False,
        "Rate of loading from the disk, last measured"),
    ("prefill_tokens_per_s", "kv_tier_prefill_tokens_per_second", False,
        "Rate of computing prompts, last measured"),
)  # fmt: skip


_PARTS = (
    ("adapters", _ADAPTER_METRICS),
    ("expert_balance", _EXPERT_METRICS),
    ("tiers", _TIER_METRICS),
)
"""Parts of EngineStats that have their own metrics."""

TOTALS = frozenset(
    {
        field
        for _, metrics in (("", _ENGINE_METRICS), *_PARTS)
        for field, _, grows, _ in metrics
        if grows
    }
    | {"spec_accepted_by_position", "expert_load"}
)
"""Fields of EngineStats and its parts that only increase (counters)."""

_LIMITS = {
    "concurrency": "max_concurrent",
    "requests": "requests_per_minute",
    "tokens": "tokens_per_minute",
    "insufficient_quota": "tokens_per_day",
}


class Histogram:
    """Counts by bucket. `bounds` are inclusive upper bounds, as in Prometheus."""

    __slots__ = ("bounds", "counts", "help", "name", "total")

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:  # noqa: A002 - Prometheus' word
        self.name, self.help, self.bounds = name, help, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @staticmethod
    def family(by_model: Mapping[str, Histogram]) -> Metric:
        """One histogram of several models."""
        one = next(iter(by_model.values()))
        edges = (*map(str, one.bounds), "+Inf")
        family = HistogramMetricFamily(_PREFIX + one.name, one.help, labels=["model_name"])
        for model, own in by_model.items():
            sums = list(zip(edges, accumulate(own.counts), strict=True))
            family.add_metric([model], sums, own.total)
        return family


class Stalls:
    """Total time for which finished text waited for slow clients, including current waits."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._waiting: dict[object, float] = {}  # start times by time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager whose time counts as waiting."""
        own = object()
        self._waiting[own] = time.monotonic()
        try:
            yield
        finally:
            self._ended_s += time.monotonic() - self._waiting.pop(own)

    @property
    def total_s(self) -> float:
        now = time.monotonic()
        return self._ended_s + sum(now - since for since in self._waiting.values())


class MetricCounts(msgspec.Struct):
    """The counts of one front end, for the sum over all of them."""

    histograms: list[tuple[list[int], float]]  # in the order of `Metrics.histograms`
    finished: dict[str, int]
    responses: list[tuple[tuple[str, str, int], int]]
    limited: dict[str, int] = {}
    feedback: dict[str, int] = {}
    hints: dict[str, int] = {}
    write_stall_s: float = 0.0
    num_front_end_deaths: int = 0


class Metrics(Collector):
    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.ttft = Histogram(
            "time_to_first_token_seconds", "Arrival to first token", REQUEST_BUCKETS
        )
        self.itl = Histogram(
            "inter_token_latency_seconds", "Gap between two deltas of one choice", TOKEN_BUCKETS
        )
        self.tpot = Histogram(
            "time_per_output_token_seconds", "Mean time per token after the first", TOKEN_BUCKETS
        )
        self.e2e = Histogram(
            "e2e_request_latency_seconds", "Arrival to the end of the answer", REQUEST_BUCKETS
        )
        self.prompt_length = Histogram(
            "request_prompt_tokens", "Prompt tokens of a request", _LENGTH_BUCKETS
        )
        self.answer_length = Histogram(
            "request_generation_tokens", "Tokens of a request's answer", _LENGTH_BUCKETS
        )
        self.histograms = (
            self.ttft,
            self.itl,
            self.tpot,
            self.e2e,
            self.prompt_length,
            self.answer_length,
        )
        self.stalls = Stalls()
        self.others_stall_s = 0.0  # of other front ends
        self.num_front_end_deaths = 0  # each was replaced
        # Number of lasting findings, by model and cause; None: no detector.
        self.findings: Mapping[tuple[str, str], int] | None = None
        self.finished: Counter[str] = Counter()  # choices, by finish reason
        self.responses: Counter[tuple[str, str, int]] = Counter()  # by method, route, status
        self.limited: Counter[str] = Counter()  # refusals by limits of keys
        self.feedback: Counter[str] = Counter()  # ratings of answers
        self.hints: Counter[str] = Counter()  # fields accepted without effect
        self.engines: Mapping[str, EngineStats | None] = {}  # by model
        # For a server of several models: the counts of each.
        self.by_model: Mapping[str, Metrics] | None = None
        self.more: list[Callable[[], Iterable[Metric]]] = []  # families of other parts
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    @property
    def write_stall_s(self) -> float:
        return self.stalls.total_s + self.others_stall_s

    def counts(self) -> MetricCounts:
        histograms = [(list(histogram.counts), histogram.total) for histogram in self.histograms]
        return MetricCounts(
            histograms,
            dict(self.finished),
            list(self.responses.items()),
            dict(self.limited),
            dict(self.feedback),
            dict(self.hints),
            self.write_stall_s,
            self.num_front_end_deaths,
        )

    def add(self, counts: MetricCounts) -> None:
        for histogram, (found, total) in zip(self.histograms, counts.histograms, strict=True):
            histogram.counts = [a + b for a, b in zip(histogram.counts, found, strict=True)]
            histogram.total += total
        self.finished.update(counts.finished)
        self.responses.update(dict(counts.responses))
        self.limited.update(counts.limited)
        self.feedback.update(counts.feedback)
        self.hints.update(counts.hints)
        self.others_stall_s += counts.write_stall_s
        self.num_front_end_deaths += counts.num_front_end_deaths

    def render(self, stats: EngineStats | None) -> bytes:
        """The text of a scrape, with the engine's current numbers (None: it is down)."""
        return self.render_all({self.model_name: stats})

    def render_all(self, engines: Mapping[str, EngineStats | None]) -> bytes:
        """The text of a scrape with several models' engines."""
        self.engines = engines
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        models = {self.model_name: self} if self.by_model is None else self.by_model
        for number in range(len(self.histograms) if models else 0):
            yield Histogram.family({name: m.histograms[number] for name, m in models.items()})
        success = CounterMetricFamily(
            _PREFIX + "request_success",
            "Choices completed, by reason",
            labels=["model_name", "finish_reason"],
        )
        for model, own in models.items():
            for reason in {"stop", "length"} | set(own.finished):
                success.add_metric([model, reason], own.finished[reason])
        yield success
        http = CounterMetricFamily(
            _PREFIX + "http_requests",
            "HTTP requests answered (499: the client left)",
            labels=["method", "route", "status"],
        )
        for (method, route, status), count in self.responses.items():
            http.add_metric([method, route, str(status)], count)
        yield http
        limited = CounterMetricFamily(
            _PREFIX + "key_limit_refusals",
            "Requests refused by a limit of their key",
            labels=["limit"],
        )
        for kind in ("concurrency", "requests", "tokens", "insufficient_quota"):
            limited.add_metric([_LIMITS[kind]], self.limited[kind])
        yield limited
        feedback = CounterMetricFamily(
            _PREFIX + "feedback", "Ratings of answers (POST /v1/feedback)", labels=["rating"]
        )
        for rating in ("up", "down"):
            feedback.add_metric([rating], self.feedback[rating])
        yield feedback
        hints = CounterMetricFamily(
            _PREFIX + "request_hints",
            "Fields of requests that were taken without effect (docs/agents.md)",
            labels=["field"],
        )
        for name, count in self.hints.items():
            hints.add_metric([name], count)
        yield hints
        stalled = "Time for which finished text waited for clients that do not read"
        yield CounterMetricFamily(
            _PREFIX + "client_write_stall_seconds", stalled, self.write_stall_s
        )
        yield CounterMetricFamily(
            _PREFIX + "front_end_deaths",
            "Front ends that died; each was replaced",
            self.num_front_end_deaths,
        )
        if self.findings is not None:
            text = "What the detector found and lasts, by its likely cause"
            lasting = GaugeMetricFamily(_PREFIX + "findings", text, labels=["model_name", "cause"])
            for (of_model, cause), count in self.findings.items():
                lasting.add_metric([of_model, cause], count)
            yield lasting
        yield from _engine_families(self.engines)
        for families in self.more:
            yield from families()


def _engine_families(engines: Mapping[str, EngineStats | None]) -> Iterator[Metric]:
    """Metrics of the engines by model. An engine that is down has only `engine_up`."""
    up = GaugeMetricFamily(
        _PREFIX + "engine_up", "1 if the engine process answers", labels=["model_name"]
    )
    for model, stats in engines.items():
        up.add_metric([model], float(stats is not None))
    yield up
    there = {model: stats for model, stats in engines.items() if stats is not None}
    for part, metrics in (("", _ENGINE_METRICS), *_PARTS):
        found = {model: getattr(stats, part) if part else stats for model, stats in there.items()}
        for field, name, grows, text in (
            metrics if any(one is not None for one in found.values()) else ()
        ):
            family = (CounterMetricFamily if grows else GaugeMetricFamily)(
                _PREFIX + name, text, labels=["model_name"]
            )
            for model, one in found.items():
                if one is not None:
                    family.add_metric([model], getattr(one, field))
            yield family
    if sized := {model: stats for model, stats in there.items() if stats.block_size}:
        text = "Size of the KV cache's blocks in tokens, and their number (vLLM's labels)"
        labels = ["model_name", "block_size", "num_gpu_blocks"]
        cache = GaugeMetricFamily(_PREFIX + "cache_config_info", text, labels=labels)
        for model, stats in sized.items():
            cache.add_metric([model, str(stats.block_size), str(stats.num_blocks)], 1.0)
        yield cache
    if versions := {m: stats.weight_version for m, stats in there.items() if stats.weight_version}:
        text, labels = "The version of the weights that run", ["model_name", "weight_version"]
        weights = GaugeMetricFamily(_PREFIX + "weight_version_info", text, labels=labels)
        for model, weight_version in versions.items():
            weights.add_metric([model, weight_version], 1.0)
        yield weights
    if any(stats.adapters is not None for stats in there.values()):
        text = "Time of the scrape, with the adapters on the device and those that requests wait for (vLLM's labels)"
        labels = ["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        names = GaugeMetricFamily(_PREFIX + "lora_requests_info", text, labels=labels)
        for model, stats in there.items():
            if (own := stats.adapters) is not None:
                lists = [",".join(found) for found in (own.names_on_device, stats.waiting_adapters)]
                names.add_metric([model, str(own.max_on_device), *lists], time.time())
        yield names
    if any(stats.spec_accepted_by_position for stats in there.values()):
        text = "Drafted tokens that the model confirmed, by their place in the run"
        name = _PREFIX + "spec_decode_num_accepted_tokens_per_pos"
        places = CounterMetricFamily(name, text, labels=["model_name", "position"])
        for model, stats in there.items():
            for position, count in enumerate(stats.spec_accepted_by_position):
                places.add_metric([model, str(position)], count)
        yield places
    if any(stats.expert_load for stats in there.values()):
        text = "Tokens that an expert of a layer was chosen for"
        load = CounterMetricFamily(
            _PREFIX + "expert_tokens", text, labels=["model_name", "layer", "expert"]
        )
        for model, stats in there.items():
            for layer, counts in stats.expert_load:
                for expert, tokens in enumerate(counts):
                    load.add_metric([model, str(layer), str(expert)], tokens)
        yield load
