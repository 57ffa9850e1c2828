"""NVIDIA's tritonclient, unmodified, against a fleet's gateway over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import json
import queue
from types import SimpleNamespace

import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

from slipstream.errors import ConfigError
from slipstream.server.operations.audit import records
from tests.fleet.running import fleet_of, running, version
from tests.fleet.stubs import Stub, stubbed
from tests.server.protocols.test_server_kserve import collect, inputs_of, texts
from tests.support.waiting import PATIENCE_S, wait_for

PROMPT = "Once upon a time"
SAMPLING = json.dumps({"temperature": 0, "max_tokens": 8, "ignore_eos": True})


@pytest.fixture(scope="module")
def audit_log(tmp_path_factory):
    return tmp_path_factory.mktemp("audit") / "audit.log"


@pytest.fixture(scope="module")
def fleet(tiny, tmp_path_factory, audit_log):
    file = fleet_of(version(tiny), grpc_port=0, audit_log=str(audit_log))
    with running(file, tmp_path_factory.mktemp("fleet") / "state") as made:
        yield made


@pytest.fixture
def rpc(fleet):
    with over_grpc.InferenceServerClient(f"127.0.0.1:{fleet.head._server.grpc.port}") as client:
        yield client
    fleet.wait_idle()


@pytest.fixture
def both(fleet, rpc):
    http = over_http.InferenceServerClient(fleet.url.removeprefix("http://"))
    yield [(http, over_http), (rpc, over_grpc)]
    http.close()


def test_what_the_gateway_says_of_itself(both):
    for client, _ in both:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("tiny")
        assert client.is_model_ready("tiny", "1")
    (http, _), (rpc, _) = both
    assert http.get_server_metadata()["name"] == rpc.get_server_metadata().name == "slipstream"
    told = rpc.get_model_metadata("tiny", as_json=True)
    assert [t["name"] for t in http.get_model_metadata("tiny")["inputs"]] == [
        t["name"] for t in told["inputs"]
    ]
    config = rpc.get_model_config("tiny", as_json=True)["config"]
    assert [t["data_type"] for t in config["input"]] == [
        t["data_type"] for t in http.get_model_config("tiny")["input"]
    ]
    assert (
        http.get_model_repository_index()[0]["name"]
        == rpc.get_model_repository_index().models[0].name
        == "tiny"
    )


def test_a_model_is_ready_though_another_is_not(fleet, rpc, monkeypatch):
    nobody = SimpleNamespace(can_answer=False, is_asleep=False, replicas={})
    monkeypatch.setitem(fleet.head.members.models, "gone", (nobody,))
    assert not rpc.is_server_ready()
    assert rpc.is_model_ready("tiny")
    assert not rpc.is_model_ready("gone")


def test_infer_through_the_gateway_answers_each_choice(fleet, both):
    with fleet.client() as client:
        more = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
        said = client.completions.create(model="tiny", prompt=PROMPT, **more)
    for client, kind in both:
        wanted = [
            kind.InferRequestedOutput("text_output"),
            kind.InferRequestedOutput("num_output_tokens"),
        ]
        inputs = inputs_of(kind, PROMPT, sampling=SAMPLING, exclude=True)
        result = client.infer("tiny", inputs, request_id="mine", outputs=wanted)
        assert texts(result) == [said.choices[0].text]
        assert list(result.as_numpy("num_output_tokens")) == [8]
        assert result.as_numpy("finish_reason") is None
        response = result.get_response()
        assert (response["id"] if kind is over_http else response.id) == "mine"
        several = inputs_of(
            kind,
            PROMPT,
            sampling=json.dumps({"max_tokens": 2, "n": 2, "ignore_eos": True}),
            exclude=True,
        )
        assert len(texts(client.infer("tiny", several))) == 2


def asked(number=8, **more):
    sampling = json.dumps({"temperature": 0, "max_tokens": number, "ignore_eos": True})
    return {"model_name": "tiny", "inputs": inputs_of(over_grpc, PROMPT, sampling=sampling, **more)}


def test_decoupled_streams_through_the_gateway_add_up(rpc):
    requests = [
        {**asked(stream=True), "request_id": "a"},
        {**asked(number=-1), "request_id": "b"},
        {**asked(exclude=True), "request_id": "c"},
    ]
    answers = collect(rpc, requests)
    told = [result for result, error in answers if error is None]
    ids = [result.get_response().id for result in told]
    parts = {
        id_: [texts(r)[0] for r, own in zip(told, ids, strict=True) if own == id_] for id_ in "ac"
    }
    assert len(parts["a"]) > 1
    assert ["".join(parts["a"])] == parts["c"]
    (error,) = [error for _, error in answers if error is not None]
    assert "max_tokens" in error.message()


def test_a_stream_goes_on_when_its_replica_dies(fleet, rpc):
    fleet.wait_serving(2)
    (whole,) = texts(rpc.infer(**asked(900, exclude=True)))
    found = queue.Queue()
    rpc.start_stream(callback=lambda result, error: found.put((result, error)))
    rpc.async_stream_infer(**asked(900, stream=True))
    first, error = found.get(timeout=PATIENCE_S)
    assert error is None
    victim = max(fleet.head.members.all_replicas(), key=lambda r: r.num_in_flight)
    assert victim.num_in_flight, "it has ended before its replica could"
    fleet.kill(next(m for m in fleet.members() if m.id == victim.id))
    parts = [first]
    while not parts[-1].get_response().parameters["triton_final_response"].bool_param:
        result, error = found.get(timeout=PATIENCE_S)
        assert error is None, error
        parts.append(result)
    rpc.stop_stream()
    assert "".join(texts(part)[0] for part in parts) == whole
    assert fleet.head.gateway.forwarder.num_resumed >= 1
    fleet.wait_serving(2)


def test_a_client_that_leaves_frees_its_replica(fleet, rpc):
    found = queue.Queue()
    rpc.start_stream(callback=lambda result, error: found.put((result, error)))
    rpc.async_stream_infer(**asked(900, stream=True))
    found.get(timeout=PATIENCE_S)
    rpc.stop_stream(cancel_requests=True)
    fleet.wait_idle()


@pytest.mark.parametrize(
    ("change", "named", "code"),
    [
        ({"model_name": "other"}, "not served", "NOT_FOUND"),
        ({"model_version": "7"}, "version 1", "NOT_FOUND"),
        ({"parameters": {"temperature": -1.0}}, "temperature", "INVALID_ARGUMENT"),
        ({"parameters": {"nonsense": 1}}, "nonsense", "INVALID_ARGUMENT"),
        ({"inputs": inputs_of(over_grpc, "x " * 3000)}, "text_input", "INVALID_ARGUMENT"),
    ],
)
def test_what_is_refused_says_why(rpc, change, named, code):
    with pytest.raises(InferenceServerException) as refused:
        rpc.infer(**{"model_name": "tiny", "inputs": inputs_of(over_grpc, PROMPT), **change})
    assert named in refused.value.message()
    assert code in refused.value.status()


def test_calls_are_in_the_audit_log(fleet, rpc, audit_log):
    rpc.infer(**asked())
    last = wait_for(
        lambda: [r for r in records(audit_log) if r["kind"] == "request"][-1:], "no line"
    )[0]
    assert (last["method"], last["route"], last["status"], last["model"]) == (
        "gRPC",
        "ModelInfer",
        200,
        "tiny",
    )
    assert (last["output_tokens"], last["prompt_tokens"] > 0) == (8, True)


def test_a_sign_of_life_is_no_part_of_a_stream(tiny, tmp_path, monkeypatch):
    """The sign reaches no gRPC client, and an error after it keeps its reason."""
    event = {"model_name": "tiny", "text_output": "hi", "finish_reason": "stop"}

    async def answer(self, request, writer):
        writer.write(b"HTTP/1.1 102 Processing\r\ncontent-type: text/event-stream\r\n\r\n")
        await asyncio.sleep(0.1)
        if self.status != 200:
            self._whole(writer, self.status, {"error": "too long"})
            return
        head = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + head)
        self._chunk(writer, b"data: %b\n\n:t 1\n:e 3 1\n" % json.dumps(event).encode())
        writer.write(b"0\r\n\r\n")

    monkeypatch.setattr(Stub, "_answer", answer)
    fleet = fleet_of(version(tiny, replicas=1), grpc_port=0, router={"probe_s": 0})
    with stubbed(fleet, tmp_path / "state") as (made, (stub,)):
        made.wait_serving(1)
        port, wanted = made.head._server.grpc.port, over_grpc.InferRequestedOutput("text_output")
        with over_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            ((result, error),) = collect(client, [{**asked(stream=True), "outputs": [wanted]}])
            assert error is None
            assert texts(result) == ["hi"]
            stub.status = 400
            ((_, error),) = collect(client, [asked(stream=True)])
            assert "too long" in error.message()


def test_no_replica_is_unavailable(tiny, tmp_path):
    fleet = fleet_of(version(tiny, replicas=1), grpc_port=0, router={"queue_s": 0.2, "probe_s": 0})
    with stubbed(fleet, tmp_path / "state") as (made, stubs):
        made.call(stubs[0].stop(0))
        with over_grpc.InferenceServerClient(f"127.0.0.1:{made.head._server.grpc.port}") as client:
            wait_for(lambda: not client.is_server_ready() or len(stubs) > 1, "it is still ready")
            stubs[-1].status = 500
            with pytest.raises(InferenceServerException) as refused:
                client.infer(**asked())
            assert "UNAVAILABLE" in refused.value.status()


def test_a_port_that_is_taken(tiny, tmp_path, fleet):
    port = fleet.head._server.grpc.port
    file = fleet_of(version(tiny), grpc_port=port)
    with pytest.raises(ConfigError, match="gRPC") as refused, running(file, tmp_path / "state"):
        pass
    assert refused.value.field == "grpc_port"
