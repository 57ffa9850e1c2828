"""Alerts for Prometheus and a dashboard for Grafana, from the metrics of `metrics.py` (`slipstream
monitoring DIR`).

An objective is the share of requests, or of gaps between tokens, that must be within a time. Its
alerts compare the rate at which the error budget is spent (the burn rate) over a long and a short
window, as chapter 5 of Google's "Site Reliability Workbook" advises: the long window shows that it
matters, the short one that it lasts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.errors import ConfigError
from slipstream.server.operations.metrics import REQUEST_BUCKETS, TOKEN_BUCKETS

# (burn rate, long window, short window, duration before the alert, severity)
BURNS = (
    (14.4, "1h", "5m", "2m", "page"),
    (6.0, "6h", "30m", "15m", "page"),
    (3.0, "1d", "2h", "1h", "ticket"),
    (1.0, "3d", "6h", "3h", "ticket"),
)
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
PROBES = "/health|/live|/ready|/ping|/metrics|/status.json|/v2/health/.*"


@dataclass(frozen=True, kw_only=True)
class ServiceObjectives:
    """Objectives of a service. `share`: fraction of requests that must meet them. The times must be
    bucket bounds of the histograms, which can't count other times."""

    ttft_s: float = 1.0
    itl_s: float = 0.1
    share: float = 0.99

    def __post_init__(self) -> None:
        for name, value, bounds in (
            ("ttft_s", self.ttft_s, REQUEST_BUCKETS),
            ("itl_s", self.itl_s, TOKEN_BUCKETS),
        ):
            if value not in bounds:
                told = ", ".join(f"{bound * 1e3:.9g}" for bound in bounds)
                flag = f"--{name.removesuffix('_s')}-ms"
                raise ConfigError(
                    f"{flag} must be a bound of the histogram: {told}; got {value * 1e3:.9g}",
                    field=name,
                )
        if not 0.5 <= self.share < 1:
            raise ConfigError(
                f"--objective must be from 50 to below 100, got {self.share * 100:g}", field="share"
            )


def _late(name: str, bound: float, window: str) -> str:
    """PromQL for the fraction of observations longer than `bound` seconds."""
    metric = f"slipstream:{name}"
    within = f'sum by (job, model_name) (rate({metric}_bucket{{le="{bound}"}}[{window}]))'
    return f"1 - {within} / sum by (job, model_name) (rate({metric}_count[{window}]))"


def _failed(window: str) -> str:
    asked = f'slipstream:http_requests_total{{route!~"{PROBES}"'
    failed = f'sum by (job) (rate({asked}, status=~"5.."}}[{window}]))'
    return f"({failed} or 0 * sum by (job) (rate({asked}}}[{window}]))) / sum by (job) (rate({asked}}}[{window}]))"


def rules(objectives: ServiceObjectives) -> dict[str, Any]:
    """Makes a file of Prometheus rules."""
    kinds = {
        "ttft": f"{objectives.ttft_s * 1e3:g} ms to the first token",
        "itl": f"{objectives.itl_s * 1e3:g} ms between tokens",
        "errors": "no error of the server",
    }
    recorded, alerts = list[dict[str, Any]](), list[dict[str, Any]]()
    for kind, text in kinds.items():
        for window in WINDOWS:
            match kind:
                case "ttft":
                    expr = _late("time_to_first_token_seconds", objectives.ttft_s, window)
                case "itl":
                    expr = _late("inter_token_latency_seconds", objectives.itl_s, window)
                case _:
                    expr = _failed(window)
            recorded.append({"record": f"slo:{kind}:error_ratio_{window}", "expr": expr})
        budget = round(1 - objectives.share, 6)
        for factor, long, short, lasting, severity in BURNS:
            burns = [
                f"slo:{kind}:error_ratio_{window} > {round(factor * budget, 6):g}"
                for window in (long, short)
            ]
            about = f"{objectives.share:.4%} are to have {text}. The error budget is spent {factor:g} times too fast"
            alert = {
                "alert": f"Slipstream{kind.title()}Burn",
                "expr": " and ".join(burns),
                "for": lasting,
                "labels": {"severity": severity, "window": long},
                "annotations": {
                    "summary": f"{about}: {{{{ $value | humanizePercentage }}}} are not so, over {long}."
                },
            }
            alerts.append(alert)
    states = (
        (
            "EngineDown",
            "slipstream:engine_up == 0",
            "1m",
            "page",
            "The engine of {{ $labels.instance }} is down.",
        ),
        (
            "Drift",
            "slipstream:self_check_ok == 0",
            "1m",
            "page",
            "{{ $labels.instance }} answers otherwise than its fingerprint says: its self-check fails.",
        ),
        (
            "Preempting",
            "slipstream:kv_cache_usage_ratio > 0.95 and rate(slipstream:num_preemptions_total[10m]) > 0.1",
            "10m",
            "ticket",
            "The KV cache of {{ $labels.instance }} is full: sequences are computed again. Lower --max-num-seqs.",
        ),
        (
            "Queueing",
            "min_over_time(slipstream:num_requests_waiting[10m]) > 0",
            "5m",
            "ticket",
            "Requests have waited at {{ $labels.instance }} for ten minutes without a pause.",
        ),
    )
    for name, expr, lasting, severity, summary in states:
        told = {"labels": {"severity": severity}, "annotations": {"summary": summary}}
        alerts.append({"alert": f"Slipstream{name}", "expr": expr, "for": lasting, **told})
    groups = [("slipstream-objectives", recorded), ("slipstream-alerts", alerts)]
    return {"groups": [{"name": name, "rules": found} for name, found in groups]}


_RATE = "[$__rate_interval]"
_MODEL = '{model_name=~"$model"}'


def _quantiles(metric: str) -> list[tuple[str, str]]:
    rate = f"sum by (le) (rate(slipstream:{metric}_bucket{_MODEL}{_RATE}))"
    return [(f"histogram_quantile({q}, {rate})", f"p{round(q * 100)}") for q in (0.5, 0.9, 0.99)]


def _rate(metric: str, by: str = "", where: str = _MODEL) -> str:
    return f"sum{f' by ({by})' if by else ''} (rate(slipstream:{metric}{where}{_RATE}))"


PANELS: tuple[tuple[str, str, list[tuple[str, str]]], ...] = (
    # (title, unit, (query, legend) …), two in a row
    (
        "Requests by status",
        "reqps",
        [(_rate("http_requests_total", "status", f'{{route!~"{PROBES}"}}'), "{{status}}")],
    ),
    (
        "Tokens",
        "short",
        [
            (_rate("prompt_tokens_total"), "prompt tokens/s"),
            (_rate("generation_tokens_total"), "output tokens/s"),
        ],
    ),
    ("Time to first token", "s", _quantiles("time_to_first_token_seconds")),
    ("Inter-token latency", "s", _quantiles("inter_token_latency_seconds")),
    ("Time per output token", "s", _quantiles("time_per_output_token_seconds")),
    ("End to end", "s", _quantiles("e2e_request_latency_seconds")),
    (
        "Requests at the engine",
        "short",
        [
            (f"sum(slipstream:num_requests_running{_MODEL})", "running"),
            (f"sum(slipstream:num_requests_waiting{_MODEL})", "waiting"),
        ],
    ),
    (
        "KV cache in use",
        "percentunit",
        [(f"max by (instance) (slipstream:kv_cache_usage_ratio{_MODEL})", "{{instance}}")],
    ),
    (
        "Prefix cache: tokens found",
        "percentunit",
        [(f"{_rate('prefix_cache_hits_total')} / {_rate('prefix_cache_queries_total')}", "share")],
    ),
    ("Preemptions", "short", [(_rate("num_preemptions_total"), "per second")]),
    (
        "Spent error budget, last hour (ratio of bad)",
        "percentunit",
        [(f"max(slo:{kind}:error_ratio_1h)", kind) for kind in ("ttft", "itl", "errors")],
    ),
    (
        "Choices by finish reason",
        "short",
        [(_rate("request_success_total", "finish_reason"), "{{finish_reason}}")],
    ),
    (
        "Refused by limits of keys",
        "reqps",
        [(_rate("key_limit_refusals_total", "limit", ""), "{{limit}}")],
    ),
    ("Ratings", "short", [("sum by (rating) (slipstream:feedback_total)", "{{rating}}")]),
    ("Engine up", "short", [(f"min by (instance) (slipstream:engine_up{_MODEL})", "{{instance}}")]),
    (
        "Clients that do not read",
        "s",
        [(_rate("client_write_stall_seconds_total", where=""), "seconds of waiting per second")],
    ),
)


def board() -> dict[str, Any]:
    """A Grafana dashboard. Its user chooses the Prometheus source and the models."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = []
    for number, (title, unit, queries) in enumerate(PANELS):
        targets = [
            {"refId": chr(65 + i), "datasource": source, "expr": expr, "legendFormat": legend}
            for i, (expr, legend) in enumerate(queries)
        ]
        place = {"h": 8, "w": 12, "x": number % 2 * 12, "y": number // 2 * 8}
        shown = {"defaults": {"unit": unit, "min": 0}, "overrides": []}
        kind = {"type": "timeseries", "title": title, "datasource": source, "fieldConfig": shown}
        panels.append({"id": number + 1, **kind, "gridPos": place, "targets": targets})
    names = "label_values(slipstream:engine_up, model_name)"
    every = {
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
    variables = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": source,
            "query": names,
            **every,
        },
    ]
    return {
        "uid": "slipstream",
        "title": "Slipstream",
        "tags": ["slipstream"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


RULES, BOARD = "slipstream-rules.yml", "slipstream-dashboard.json"
COMPOSE, PROMETHEUS = "compose.monitoring.yaml", "prometheus.yml"
SOURCES, BOARDS = "grafana-datasources.yml", "grafana-dashboards.yml"
IMAGES = {"prometheus": "prom/prometheus:v3.5.0", "grafana": "grafana/grafana:12.2.0"}
_PROVISIONING, _BOARDS = "/etc/grafana/provisioning", "/var/lib/grafana/dashboards"


def compose(target: str) -> dict[str, dict[str, Any]]:
    """Files, by name, that run Prometheus and Grafana next to the server at `target`, with the
    rules and the board in the same folder. Docker Compose joins the first with others."""
    mounts = {
        "prometheus": {name: f"/etc/prometheus/{name}" for name in (PROMETHEUS, RULES)},
        "grafana": {
            SOURCES: f"{_PROVISIONING}/datasources/slipstream.yml",
            BOARDS: f"{_PROVISIONING}/dashboards/slipstream.yml",
            BOARD: f"{_BOARDS}/{BOARD}",
        },
    }
    own: dict[str, dict[str, Any]] = {
        "prometheus": {
            "ports": ["127.0.0.1:9090:9090"],
            "extra_hosts": ["host.docker.internal:host-gateway"],
        },
        "grafana": {
            "ports": ["127.0.0.1:3000:3000"],
            "depends_on": ["prometheus"],
            "environment": {  # for viewing, without a password that would be visible here
                "GF_AUTH_ANONYMOUS_ENABLED": "true",
                "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
                "GF_AUTH_DISABLE_LOGIN_FORM": "true",
                "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": f"{_BOARDS}/{BOARD}",
            },
        },
    }
    paths = {"prometheus": "/prometheus", "grafana": "/var/lib/grafana"}
    services = {
        name: {
            "image": IMAGES[name],
            **own[name],
            "volumes": [
                *(f"./{file}:{place}:ro" for file, place in mounts[name].items()),
                f"{name}:{paths[name]}",
            ],
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "restart": "unless-stopped",
        }
        for name in IMAGES
    }
    scrape = {"job_name": "slipstream", "static_configs": [{"targets": [target]}]}
    source = {"name": "Prometheus", "type": "prometheus", "url": "http://prometheus:9090"}
    provider = {"name": "slipstream", "type": "file", "options": {"path": _BOARDS}}
    return {
        COMPOSE: {"services": services, "volumes": {name: {} for name in services}},
        PROMETHEUS: {
            "global": {"scrape_interval": "5s", "evaluation_interval": "15s"},
            "rule_files": [RULES],
            "scrape_configs": [scrape],
        },
        SOURCES: {
            "apiVersion": 1,
            "datasources": [{**source, "access": "proxy", "isDefault": True}],
        },
        BOARDS: {"apiVersion": 1, "providers": [provider]},
    }
