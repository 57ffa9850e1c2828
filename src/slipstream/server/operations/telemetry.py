"""OpenTelemetry (extra `otel`, `--otlp-endpoint URL`): a span for each request, and metrics, by the
GenAI semantic conventions.

It is off by default: then nothing is imported, and a request costs one comparison. A request's span
is made after its end from its record, so the token path does no extra work either way. The SDK's
threads send spans and metrics in batches, as OTLP over HTTP with protobuf. A collector that can't
be reached delays no request: spans are dropped, and the SDK logs it.

A span continues the client's `traceparent`, and is left out if that marks the trace as not sampled.
It has no text of a prompt or an answer.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from slipstream import __version__
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.server.http.record import RequestRecord

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/responses": "chat",
    "/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/completion": "text_completion",
    "/completions": "text_completion",
    "/infill": "text_completion",
    "/api/generate": "text_completion",
    "/v2/models/{id}/infer": "text_completion",
    "/v2/models/{id}/generate": "text_completion",
    "/v2/models/{id}/generate_stream": "text_completion",
    "ModelInfer": "text_completion",
    "ModelStreamInfer": "text_completion",
    **dict.fromkeys(
        (
            "/v1/embeddings",
            "/embeddings",
            "/embedding",
            "/v2/embed",
            "/embed_sparse",
            "/pooling",
            "/v1/pooling",
        ),
        "embeddings",
    ),
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    # The conventions have no names for these.
    **dict.fromkeys(
        ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"), "rerank"
    ),
    **dict.fromkeys(("/score", "/v1/score"), "score"),
    **dict.fromkeys(("/classify", "/v1/classify"), "classify"),
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "translation",
}
"""Routes that run the model, with the operation of their spans. Other routes have no spans."""

# Buckets that the conventions recommend.
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TIMEOUT_S = 5.0
_METRICS_EVERY_S = 10.0
CLOSE_S = 2.0

_logger = logging.getLogger("slipstream.server")


class Telemetry:
    def __init__(self, endpoint: str, *, server: tuple[str, int]) -> None:
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.netloc:
            message = f"{endpoint!r} is no URL of an OTLP receiver, such as http://127.0.0.1:4318"
            raise ConfigError(message, field="otlp_endpoint")
        if url.path.rstrip("/").endswith(("/v1/traces", "/v1/metrics")):
            message = f"{endpoint!r}: leave out /v1/…, which is appended for traces and for metrics"
            raise ConfigError(message, field="otlp_endpoint")
        base = endpoint.rstrip("/")
        how: dict[str, Any] = {"timeout": _TIMEOUT_S, "compression": Compression.Gzip}
        resource = Resource({"service.name": "slipstream", "service.version": __version__})
        self._traces = TracerProvider(
            sampler=ParentBased(ALWAYS_ON), resource=resource, shutdown_on_exit=False
        )
        spans = OTLPSpanExporter(f"{base}/v1/traces", **how)
        self._traces.add_span_processor(
            BatchSpanProcessor(spans, schedule_delay_millis=1000, export_timeout_millis=5000)
        )
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(f"{base}/v1/metrics", **how),
            export_interval_millis=_METRICS_EVERY_S * 1e3,
        )
        self._meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._tracer = self._traces.get_tracer("slipstream", __version__)
        meter = self._meters.get_meter("slipstream", __version__)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return meter.create_histogram(
                f"gen_ai.server.{name}", "s", text, explicit_bucket_boundaries_advisory=buckets
            )

        self._duration = histogram(
            "request.duration", "Arrival to the end of the answer", _DURATION
        )
        self._ttft = histogram("time_to_first_token", "Arrival to the first token", _TTFT)
        self._tpot = histogram(
            "time_per_output_token", "Mean time per token after the first, of one choice", _TPOT
        )
        self._propagator = TraceContextTextMapPropagator()
        self._server = {"server.address": server[0], "server.port": server[1]}

    def ended(self, record: RequestRecord, route: str) -> None:
        """Record the span and metrics of a request that has ended."""
        operation = OPERATIONS.get(route)
        if operation is None:
            return
        end, now = time.time_ns(), time.monotonic()
        about: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "slipstream",
            **self._server,
        }
        if record.model is not None:
            about["gen_ai.request.model"] = about["gen_ai.response.model"] = record.model
        failed = {"error.type": record.error or str(record.status)} if record.status >= 400 else {}
        self._measure(record, now, {**about, **failed})
        parent = self._propagator.extract(record.trace_headers)
        name = operation if record.model is None else f"{operation} {record.model}"
        begin = end - int((now - record.start) * 1e9)
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, about, start_time=begin)
        if span.is_recording():
            own: dict[str, Any] = {
                "http.response.status_code": record.status,
                "slipstream.request.id": record.id,
            }
            span.set_attributes({**self._details(record), **failed, **own})
            if record.ttft_s is not None:
                span.add_event("gen_ai.first_token", timestamp=begin + int(record.ttft_s * 1e9))
            if record.status >= 500:
                span.set_status(StatusCode.ERROR, record.error)
        span.end(end)

    def _measure(self, record: RequestRecord, now: float, about: dict[str, Any]) -> None:
        self._duration.record(now - record.start, about)
        if record.ttft_s is not None:
            self._ttft.record(record.ttft_s, about)
        for choice in () if record.answer is None else record.answer.choices:
            if choice.num_tokens > 1:
                self._tpot.record(
                    (choice.last_token - choice.first_token) / (choice.num_tokens - 1), about
                )

    def _details(self, record: RequestRecord) -> dict[str, Any]:
        usage = {
            "input_tokens": record.num_prompt_tokens,
            "output_tokens": record.num_output_tokens,
        }
        found: dict[str, Any] = {
            f"gen_ai.usage.{name}": number for name, number in usage.items() if number
        }
        if record.answer is None:
            return found
        sampling = record.answer.sampling
        asked = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else None,
            "seed": sampling.seed,
            "presence_penalty": sampling.presence_penalty or None,
            "frequency_penalty": sampling.frequency_penalty or None,
            "choice.count": sampling.n if sampling.n > 1 else None,
            "stop_sequences": sampling.stop or None,
        }
        found |= {
            f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None
        }
        found["gen_ai.response.id"] = str(record.answer.identity["id"])
        reasons = [
            choice.finish_reason
            for choice in record.answer.choices
            if choice.finish_reason is not None
        ]
        return {**found, "gen_ai.response.finish_reasons": reasons} if reasons else found

    def close(self) -> None:
        """Send waiting spans and metrics, for CLOSE_S at most. The SDK itself retries a missing
        collector for longer than its own limits."""
        done = threading.Event()

        def send() -> None:
            self._traces.shutdown()
            self._meters.shutdown(_TIMEOUT_S * 1e3)
            done.set()

        threading.Thread(target=send, daemon=True).start()  # the thread ends with the process
        if not done.wait(CLOSE_S):
            _logger.warning(
                "the OTLP collector took nothing for %g s: the last spans and metrics are lost",
                CLOSE_S,
            )
