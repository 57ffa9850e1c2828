"""A server's counters at one moment, read inside it or from its /metrics, and the observation
between two moments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from slipstream.errors import ConfigError
from slipstream.fleet.detection.observation import Observation
from slipstream.messages.stats import EngineStats
from slipstream.server.operations.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals since the replica's start; fields marked `now` are current values. If the engine does
    not answer, only the server's fields are set."""

    at: float
    is_up: bool
    num_finished: float = 0.0
    finished_prompt_tokens: float = 0.0
    finished_output_tokens: float = 0.0
    num_responses: float = 0.0
    num_errors: float = 0.0
    write_stall_s: float = 0.0
    num_steps: float = 0.0
    step_s: float = 0.0
    step_age_s: float | None = None  # now
    num_running: float | None = None  # now
    num_waiting: float | None = None  # now
    num_open: float | None = None  # now
    kv_cache_usage: float | None = None  # now
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0
    num_preemptions: float = 0.0
    prompt_tokens: float = 0.0
    generated_tokens: float = 0.0
    canary_ok: bool | None = None
    canary_kl: float | None = None  # measured since the last moment

    def since(self, before: Counters, replica: str) -> Observation | None:
        """The observation between `before` and now. None if a total decreased, because the replica
        was restarted."""
        totals = (
            *(
                "num_finished",
                "finished_prompt_tokens",
                "finished_output_tokens",
                "num_responses",
                "num_errors",
            ),
            *(
                "write_stall_s",
                "num_steps",
                "step_s",
                "prefix_queries",
                "prefix_hits",
                "num_preemptions",
            ),
            *("prompt_tokens", "generated_tokens"),
        )
        more = (
            {name: getattr(self, name) - getattr(before, name) for name in totals}
            if self.is_up and before.is_up
            else {}
        )
        if self.at <= before.at or any(value < -1e-6 for value in more.values()):
            return None
        return Observation(
            replica=replica, at=self.at, interval_s=self.at - before.at, step_age_s=self.step_age_s,
            num_running=self.num_running, num_waiting=self.num_waiting, num_open=self.num_open,
            kv_cache_usage=self.kv_cache_usage, canary_ok=self.canary_ok,
            canary_kl=self.canary_kl, is_up=self.is_up, **more,
        )  # fmt: skip


def of_server(
    stats: EngineStats | None,
    metrics: Metrics,
    *,
    at: float,
    num_open: float | None = None,
    canary_ok: bool | None = None,
) -> Counters:
    engine: dict[str, Any] = {}
    if stats is not None:
        engine = {
            "num_steps": stats.num_steps,
            "step_s": stats.step_seconds_total,
            "step_age_s": stats.last_step_age_s,
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "kv_cache_usage": stats.kv_cache_usage,
            "prefix_queries": stats.prefix_queries,
            "prefix_hits": stats.prefix_hits,
            "num_preemptions": stats.num_preemptions,
            "prompt_tokens": stats.prompt_tokens_total,
            "generated_tokens": stats.generation_tokens_total,
        }
    return Counters(
        at=at,
        is_up=stats is not None,
        num_finished=sum(metrics.answer_length.counts),
        finished_prompt_tokens=metrics.prompt_length.total,
        finished_output_tokens=metrics.answer_length.total,
        num_responses=sum(metrics.responses.values()),
        num_errors=sum(
            count for (_, _, status), count in metrics.responses.items() if status >= 500
        ),
        write_stall_s=metrics.write_stall_s,
        num_open=num_open,
        canary_ok=canary_ok,
        **engine,
    )


_SAMPLES = {
    "slipstream:request_generation_tokens_count": "num_finished",
    "slipstream:request_prompt_tokens_sum": "finished_prompt_tokens",
    "slipstream:request_generation_tokens_sum": "finished_output_tokens",
    "slipstream:client_write_stall_seconds_total": "write_stall_s",
    "slipstream:engine_steps_total": "num_steps",
    "slipstream:engine_step_seconds_total": "step_s",
    "slipstream:engine_last_step_age_seconds": "step_age_s",
    "slipstream:num_requests_running": "num_running",
    "slipstream:num_requests_waiting": "num_waiting",
    "slipstream:kv_cache_usage_ratio": "kv_cache_usage",
    "slipstream:prefix_cache_queries_total": "prefix_queries",
    "slipstream:prefix_cache_hits_total": "prefix_hits",
    "slipstream:num_preemptions_total": "num_preemptions",
    "slipstream:prompt_tokens_total": "prompt_tokens",
    "slipstream:generation_tokens_total": "generated_tokens",
}


def of_metrics(text: str, *, at: float) -> Counters:
    """Read the text of a scrape. ConfigError if it has no metrics of Slipstream."""
    found: dict[str, Any] = {}
    is_up, num_responses, num_errors = None, 0.0, 0.0
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "slipstream:http_requests_total":
                    num_responses += sample.value
                    num_errors += sample.value if sample.labels.get("status", "") >= "500" else 0.0
                elif sample.name == "slipstream:engine_up":
                    is_up = bool(sample.value)
                elif sample.name in _SAMPLES and math.isfinite(sample.value):
                    name = _SAMPLES[sample.name]
                    found[name] = found.get(name, 0.0) + sample.value
    except ValueError as error:
        raise ConfigError(
            f"the answer is not in Prometheus's text format: {error}", field="fleet"
        ) from None
    if is_up is None:
        raise ConfigError(
            "the answer has no metrics of Slipstream (slipstream:engine_up is missing)",
            field="fleet",
        )
    return Counters(at=at, is_up=is_up, num_responses=num_responses, num_errors=num_errors, **found)
