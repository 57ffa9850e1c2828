"""OpenTelemetry, as a collector gets it: a small OTLP receiver over HTTP in this process."""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import openai
import pytest

from slipstream.errors import ConfigError
from slipstream.server.answers.route import GenerationRoute
from slipstream.server.app import create_app, model_routes
from slipstream.server.http.record import route_of
from slipstream.server.openai.audio import SpeechRoute
from slipstream.server.openai.embeddings import PooledRoute
from slipstream.server.run import configure_logging, make_server
from slipstream.server.state import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
metrics_service = pytest.importorskip(
    "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2"
)
OPERATIONS = pytest.importorskip("slipstream.server.operations.telemetry").OPERATIONS

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASK = {"model": "fake", "prompt": "a secret", "max_tokens": 4, "temperature": 0.5, "seed": 7}


class Collector:
    def __init__(self):
        self.spans, self.metrics, self.resources = [], {}, []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                data = self.rfile.read(int(self.headers["content-length"]))
                collector.take(self.path, gzip.decompress(data))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, path, data):
        if path == "/v1/traces":
            for group in trace_service.ExportTraceServiceRequest.FromString(data).resource_spans:
                self.resources.append(attributes(group.resource))
                self.spans += [span for scope in group.scope_spans for span in scope.spans]
        else:
            assert path == "/v1/metrics"
            for group in metrics_service.ExportMetricsServiceRequest.FromString(
                data
            ).resource_metrics:
                for scope in group.scope_metrics:
                    self.metrics |= {metric.name: metric for metric in scope.metrics}


def attributes(told):
    def value(one):
        kind = one.WhichOneof("value")
        return (
            [value(v) for v in one.array_value.values]
            if kind == "array_value"
            else getattr(one, kind)
        )

    return {a.key: value(a.value) for a in told.attributes}


@pytest.fixture
def collector():
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_spans_and_metrics(serve, collector):
    server = serve(FakeEngine(delay_s=0.005), otlp_endpoint=collector.url)
    client = server.client()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
    answer = client.completions.create(**ASK, extra_headers=headers)
    messages = [{"role": "user", "content": "a secret"}]
    list(client.chat.completions.create(model="fake", messages=messages, max_tokens=3, stream=True))
    client.embeddings.create(model="fake", input="a secret")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="fake", prompt="x", temperature=-1)
    client.completions.create(
        **ASK, extra_headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}
    )  # not sampled
    client.models.list()
    httpx.get(server.url + "/health", timeout=PATIENCE_S)
    server.begin_stop()
    server.join()

    assert collector.resources[0]["service.name"] == "slipstream"
    names = [span.name for span in collector.spans]
    assert names == ["text_completion fake", "chat fake", "embeddings fake", "text_completion fake"]
    first, chat, embedding, bad = collector.spans
    assert (first.trace_id.hex(), first.parent_span_id.hex(), first.trace_state) == (
        TRACE,
        PARENT,
        "a=b",
    )
    assert chat.trace_id.hex() != TRACE
    assert not chat.parent_span_id
    about = attributes(first)
    assert about["gen_ai.operation.name"] == "text_completion"
    assert about["gen_ai.provider.name"] == "slipstream"
    assert about["gen_ai.request.model"] == about["gen_ai.response.model"] == "fake"
    asked = {
        name: about[f"gen_ai.request.{name}"] for name in ("max_tokens", "temperature", "seed")
    }
    assert asked == {"max_tokens": 4, "temperature": 0.5, "seed": 7}
    assert (about["gen_ai.usage.input_tokens"], about["gen_ai.usage.output_tokens"]) == (9, 4)
    assert about["gen_ai.response.id"] == answer.id
    assert about["gen_ai.response.finish_reasons"] == ["length"]
    assert first.kind == 2, "a server's"
    (event,) = first.events
    assert first.start_time_unix_nano < event.time_unix_nano < first.end_time_unix_nano
    assert attributes(embedding)["gen_ai.usage.input_tokens"] == 9
    assert attributes(bad)["http.response.status_code"] == 400
    assert attributes(bad)["error.type"] == "invalid_request_error"
    assert "secret" not in str(collector.spans)

    counts = {
        name: sum(p.count for p in metric.histogram.data_points)
        for name, metric in collector.metrics.items()
    }
    assert counts == {
        "gen_ai.server.request.duration": 5,
        "gen_ai.server.time_to_first_token": 3,
        "gen_ai.server.time_per_output_token": 3,
    }
    assert all(metric.unit == "s" for metric in collector.metrics.values())
    (point,) = (
        p
        for p in collector.metrics["gen_ai.server.time_to_first_token"].histogram.data_points
        if p.count == 1
    )
    assert point.explicit_bounds[0] == 0.001


def test_a_collector_that_is_not_there_holds_nobody_up(serve, monkeypatch):
    monkeypatch.setattr("slipstream.server.operations.telemetry._TIMEOUT_S", 0.3)
    client = serve(otlp_endpoint="http://127.0.0.1:9").client()
    for _ in range(3):
        client.completions.create(**ASK)


def test_a_collector_that_is_gone_does_not_hold_up_the_end(monkeypatch, caplog):
    from slipstream.server.operations import telemetry

    monkeypatch.setattr(logging.getLogger("slipstream"), "propagate", True)
    made, goes_on = telemetry.Telemetry("http://127.0.0.1:9", server=("a", 1)), threading.Event()
    end = made._traces.shutdown
    monkeypatch.setattr(made._traces, "shutdown", lambda: goes_on.wait(PATIENCE_S))
    monkeypatch.setattr(made._meters, "shutdown", lambda timeout: None)
    monkeypatch.setattr(telemetry, "CLOSE_S", 0.01)
    made.close()
    assert not goes_on.is_set()
    assert "the last spans and metrics are lost" in caplog.text
    goes_on.set()
    end()


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "ftp://x", "http://"])
def test_wrong_endpoints_of_telemetry_are_refused(url):
    with pytest.raises(ConfigError, match="OTLP"):
        make_server(FakeEngine(), ServerSettings(otlp_endpoint=url))


@pytest.mark.parametrize("path", ["/v1/traces", "/v1/metrics/", "/otel/v1/traces"])
def test_an_endpoint_of_one_signal_is_refused(path):  # all would be sent to /v1/traces/v1/traces
    with pytest.raises(ConfigError, match="leave out /v1"):
        make_server(FakeEngine(), ServerSettings(otlp_endpoint=f"http://127.0.0.1:4318{path}"))


def test_what_the_sdk_says_is_in_the_servers_format(capsys):
    configure_logging(ServerSettings(log_format="json"))
    for name in ("opentelemetry.exporter", "asyncio"):
        logging.getLogger(name).warning("it is not there")
        assert json.loads(capsys.readouterr().err)["message"] == "it is not there"


def test_off_costs_no_import():
    code = "import slipstream.server.run, slipstream.server.app, sys; sys.exit('opentelemetry' in str(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_each_route_has_a_label_and_one_that_runs_the_model_an_operation():
    app = create_app(FakeEngine(), ServerSettings(fleet_key="key"))
    runs = GenerationRoute | PooledRoute | SpeechRoute
    label = {path: route_of(path) for path in {route.path for route in app.routes} - {"/"}}
    assert [path for path, found in label.items() if found == "other"] == []
    model = [r.path for r in model_routes(app.state.server) if isinstance(r.endpoint, runs)]
    assert len(model) > 20
    assert [path for path in model if label[path] not in OPERATIONS] == []
