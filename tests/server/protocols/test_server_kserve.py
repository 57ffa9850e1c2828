"""KServe's v2 protocol with NVIDIA's tritonclient, over HTTP and gRPC, with and without streams."""

from __future__ import annotations

import contextlib
import json
import queue
import struct
import time
from functools import partial

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

from slipstream.cli.main import main
from slipstream.errors import ConfigError
from slipstream.server.http import keys as keys_module
from slipstream.server.kserve.messages import MESSAGES
from slipstream.server.operations.audit import records
from tests.server.conftest import serving
from tests.server.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S

PROMPT = "Once upon a time"
GREEDY = {"temperature": 0, "max_tokens": 8}
PARAMETERS = json.dumps(GREEDY)


@pytest.fixture
def server(serve):
    return serve(grpc_port=0)


@pytest.fixture
def both(server):
    """A client of each kind."""
    clients = [over_http.InferenceServerClient(server.url.removeprefix("http://")), connect(server)]
    yield list(zip(clients, (over_http, over_grpc), strict=True))
    for client in clients:
        client.close()


def connect(server):
    return over_grpc.InferenceServerClient(f"127.0.0.1:{server.server.grpc.port}")


def inputs_of(kind, text=PROMPT, **more):
    given = {"text_input": np.array([text.encode()], dtype=np.object_)}
    if "stream" in more:
        given["stream"] = np.array([more["stream"]], dtype=bool)
    if "exclude" in more:
        given["exclude_input_in_output"] = np.array([more["exclude"]], dtype=bool)
    if "sampling" in more:
        given["sampling_parameters"] = np.array([more["sampling"].encode()], dtype=np.object_)
    found = []
    for name, value in given.items():
        tensor = kind.InferInput(name, value.shape, "BOOL" if value.dtype == bool else "BYTES")
        tensor.set_data_from_numpy(value)
        found.append(tensor)
    return found


def texts(result):
    """Texts as bytes in binary tensors, and unchanged in JSON."""
    return [
        text if isinstance(text, str) else text.decode() for text in result.as_numpy("text_output")
    ]


def test_what_the_server_says_of_itself(both, server):
    for client, _ in both:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("fake")
        assert client.is_model_ready("fake", "1")
        assert not client.is_model_ready("none")  # over gRPC, too, it is an answer and no error
        assert not client.is_model_ready("fake", "2")
    http, rpc = both[0][0], both[1][0]
    assert http.get_server_metadata()["name"] == rpc.get_server_metadata().name == "slipstream"
    told = rpc.get_model_metadata("fake", as_json=True)
    assert [tensor["name"] for tensor in http.get_model_metadata("fake")["inputs"]] == [
        t["name"] for t in told["inputs"]
    ]
    assert http.get_model_config("fake")["model_transaction_policy"]["decoupled"]
    config = rpc.get_model_config("fake", as_json=True)["config"]
    assert config["model_transaction_policy"]["decoupled"]
    assert [t["data_type"] for t in config["input"]] == [
        t["data_type"] for t in http.get_model_config("fake")["input"]
    ]
    assert (
        http.get_model_repository_index()[0]["state"]
        == rpc.get_model_repository_index().models[0].state
        == "READY"
    )
    server.engine.dead = True
    assert [client.is_server_ready() for client, _ in both] == [False, False]
    assert [client.is_model_ready("fake") for client, _ in both] == [False, False]


@pytest.mark.parametrize("binary", [True, False])
def test_infer_returns_texts_and_counts_as_tensors(both, binary):
    for client, kind in both:
        wanted = [kind.InferRequestedOutput("text_output")]
        if kind is over_http:
            wanted = [kind.InferRequestedOutput("text_output", binary_data=binary)]
        inputs = inputs_of(kind, sampling=json.dumps({"max_tokens": 4, "n": 2}), exclude=True)
        result = client.infer("fake", inputs, request_id="mine", outputs=wanted)
        assert texts(result) == [PROMPT[:4]] * 2
        response = result.get_response()
        assert (response["id"] if kind is over_http else response.id) == "mine"
        assert result.as_numpy("finish_reason") is None
        whole = client.infer("fake", inputs_of(kind), parameters={"max_tokens": 3})
        assert texts(whole) == [
            PROMPT + PROMPT[:3]
        ]  # the input stands before it, as Triton's vLLM backend has it
        assert list(whole.as_numpy("finish_reason")) == [b"length"]
        assert (
            list(whole.as_numpy("num_input_tokens")),
            list(whole.as_numpy("num_output_tokens")),
        ) == ([17], [3])


def collect(client, requests, *, timeout=PATIENCE_S):
    """The responses of a stream, until each request had its last."""
    found, answers, left = queue.Queue(), [], len(requests)
    client.start_stream(callback=lambda result, error: found.put((result, error)))
    for given in requests:
        client.async_stream_infer(**given)
    while left:
        result, error = found.get(timeout=timeout)
        answers.append((result, error))
        left -= (
            error is not None
            or result.get_response().parameters["triton_final_response"].bool_param
        )
    client.stop_stream()
    return answers


def test_decoupled_streams_give_each_requests_text(server):
    with connect(server) as client:
        ask = {
            "model_name": "fake",
            "parameters": {"max_tokens": 5},
            "enable_empty_final_response": True,
        }
        requests = [
            {**ask, "inputs": inputs_of(over_grpc, stream=True), "request_id": "a"},
            {**ask, "inputs": inputs_of(over_grpc, "x" * 600), "request_id": "b"},
            {**ask, "inputs": inputs_of(over_grpc, exclude=True), "request_id": "c"},
        ]
        answers = collect(client, requests)
    told = [result for result, error in answers if error is None]
    ids = [result.get_response().id for result in told]
    assert (
        "".join(texts(result)[0] for result, id_ in zip(told, ids, strict=True) if id_ == "a")
        == PROMPT[:5]
    )
    assert ids.count("a") > 1
    assert [texts(result) for result, id_ in zip(told, ids, strict=True) if id_ == "c"] == [
        [PROMPT[:5]]
    ]
    (error,) = [error for _, error in answers if error is not None]
    assert "too long for the context" in error.message()
    last = [r for r in told if r.get_response().parameters["triton_final_response"].bool_param]
    assert [list(result.as_numpy("finish_reason")) for result in last] == [[b"length"]] * 2


def test_the_same_text_as_a_completion(tiny_path, tiny_server):
    with tiny_server.client() as client:
        text = client.completions.create(model="smollm2", prompt=PROMPT, **GREEDY).choices[0].text
    with tiny_server.http() as http:
        ask = {"text_input": PROMPT, "parameters": GREEDY}
        answer = http.post("/v2/models/smollm2/generate", json=ask).json()
        assert (answer["text_output"], answer["model_name"], answer["finish_reason"]) == (
            PROMPT + text,
            "smollm2",
            "length",
        )
        lines = [
            line
            for line in http.post(
                "/v2/models/smollm2/versions/1/generate_stream", json=ask
            ).text.split("\n")
            if line
        ]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert "".join(event["text_output"] for event in events) == text
        assert [event["finish_reason"] for event in events][-1] == "length"
    client = over_http.InferenceServerClient(tiny_server.url.removeprefix("http://"))
    assert texts(
        client.infer("smollm2", inputs_of(over_http, exclude=True, sampling=PARAMETERS))
    ) == [text]
    client.close()


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_name": "other"}, "not served"),
        ({"model_version": "7"}, "version 1"),
        ({"parameters": {"temperature": -1.0}}, "temperature"),
        ({"parameters": {"nonsense": 1}}, "nonsense"),
        ({"parameters": {"echo": True}}, "echo"),
        ({"sampling": "[1]"}, "sampling_parameters"),
        ({"text": "x" * 600}, "text_input"),
        ({"stream": True}, "stream"),
        ({"wanted": "other"}, "no output 'other'"),
    ],
)
def test_what_is_refused_says_why(both, change, named):
    for client, kind in both:
        more = {k: change[k] for k in ("model_version", "parameters") if k in change}
        given = {k: change[k] for k in ("text", "sampling", "stream") if k in change}
        if "wanted" in change:
            more["outputs"] = [kind.InferRequestedOutput(change["wanted"])]
        with pytest.raises(InferenceServerException) as refused:
            client.infer(change.get("model_name", "fake"), inputs_of(kind, **given), **more)
        assert named in refused.value.message()
        if kind is over_grpc:
            code = "NOT_FOUND" if named in ("not served", "version 1") else "INVALID_ARGUMENT"
            assert code in refused.value.status()


def one(name="text_input", datatype="BYTES", shape=(1,), **more):
    return {"inputs": [{"name": name, "datatype": datatype, "shape": list(shape), **more}]}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", {"inputs": []}, one(data=[]), one(data=[1]), one(data=["a", "b"]), one(data=None),
        one("other", data=["a"]), one(datatype="FP32", data=["a"]), one(shape=(2,), data=["a"]),
        one(shape=(), data=["a"]), one(shape=(-1,), data=["a"]),
        *(one(parameters={"binary_data_size": size}) for size in (5, -1, "x", True)),
        one(data=["a"]) | {"extra": 1}, one(data=[["a", ["b"]]]),
        one(data=["a"]) | {"parameters": {"logprobs": 0}}, {"inputs": one(data=["a"])["inputs"] * 2},
        one(data=["a"], parameters={"shared_memory_region": "r"}),
        *(one(data=["a"]) | {"outputs": [{"name": "text_output", "parameters": {p: 1}}]} for p in ("classification", "x")),
        json.dumps(one(data=[1])).replace("[1]}", "[1e999]}").encode(),
        json.dumps(one(data=["?"])).encode().replace(b"?", b"\xff"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_answered_with_400(shared, body):
    with shared.http() as http:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = http.post("/v2/models/fake/infer", content=content)
        assert (answer.status_code, list(answer.json())) == (400, ["error"])


def test_bad_bytes_behind_the_header(shared):
    head = json.dumps(one(parameters={"binary_data_size": 5})).encode()
    sizes = {"Inference-Header-Content-Length": str(len(head))}
    with shared.http() as http:
        post = partial(http.post, "/v2/models/fake/infer")
        assert post(content=head + struct.pack("<I", 1) + b"a", headers=sizes).status_code == 200
        short, long = struct.pack("<I", 1), struct.pack("<I", 2)
        for behind in (b"", b"12345", long + b"a", short + b"\xff", short + b"ab"):
            assert post(content=head + behind, headers=sizes).status_code == 400
        both = json.dumps(one(data=["a"], parameters={"binary_data_size": 5})).encode()
        sizes_of_both = {"Inference-Header-Content-Length": str(len(both))}
        assert (
            post(content=both + struct.pack("<I", 1) + b"a", headers=sizes_of_both).status_code
            == 400
        )
        for size in ("x", "-1", "99999", str(len(head)) * 9, "0" * 9000 + "1"):
            answer = post(content=head, headers={"Inference-Header-Content-Length": size})
            assert answer.status_code == 400
        assert list(http.get("/v2/models/other").json()) == ["error"]
        assert http.get("/v2/models/other").status_code == 404


@pytest.mark.parametrize(
    ("whole", "own", "is_binary"),
    [({}, {}, False), (True, {}, True), (True, False, False), (False, True, True)],
)
def test_an_output_is_binary_by_its_own_parameter_or_else_by_the_requests(
    shared, whole, own, is_binary
):
    output = {"name": "text_output", "parameters": own if own == {} else {"binary_data": own}}
    parameters = whole if whole == {} else {"binary_data_output": whole}
    body = one(data=["a"]) | {"outputs": [output], "parameters": parameters}
    with shared.http() as http:
        answer = http.post("/v2/models/fake/infer", json=body)
    assert ("inference-header-content-length" in answer.headers) is is_binary


def test_a_wrong_key_opens_nothing_over_grpc(serve):
    server = serve(grpc_port=0, api_keys=("right",))
    with connect(server) as client:
        assert client.is_server_live()
        for headers in ({}, {"authorization": "Bearer wrong"}):
            with pytest.raises(InferenceServerException):
                client.get_server_metadata(headers=headers)
            with pytest.raises(InferenceServerException) as refused:
                client.infer("fake", inputs_of(over_grpc), headers=headers)
            assert "UNAUTHENTICATED" in refused.value.status()
            client.start_stream(callback=lambda result, error: None, headers=headers)
            with contextlib.suppress(InferenceServerException):  # the stream may be refused already
                client.async_stream_infer("fake", inputs_of(over_grpc, stream=True))
            client.stop_stream()
        assert texts(
            client.infer("fake", inputs_of(over_grpc), headers={"authorization": "Bearer right"})
        )
    counts = server.state.metrics.responses
    methods = ("ServerMetadata", "ModelInfer", "ModelStreamInfer")
    server.wait_for(
        lambda: [counts["gRPC", name, 401] for name in methods] == [2, 2, 2],
        "refused calls are not counted",
    )
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        assert http.get("/v2/health/ready").status_code == 200
        assert http.get("/v2/models/fake").json()["error"].startswith("missing or wrong API key")


def test_grpc_has_the_salt_of_its_key_and_parameters(serve, tmp_path, capsys):
    file = tmp_path / "keys.json"
    assert main(["keys", "add", str(file), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    server = serve(grpc_port=0, keys_file=str(file))
    with connect(server) as client:
        for given in ({}, {"cache_salt": "mine"}):
            client.infer(
                "fake",
                inputs_of(over_grpc),
                parameters={"max_tokens": 2, **given},
                headers={"authorization": f"Bearer {made['key']}"},
            )
    owner = keys_module.Key(id=made["id"])
    assert server.engine.salts == [
        keys_module.prefix_salt(owner, given) for given in (None, "mine")
    ]


def test_a_stream_ends_with_its_key(serve, tmp_path, capsys):
    file = tmp_path / "keys.json"
    assert main(["keys", "add", str(file), "--json"]) == 0
    key = json.loads(capsys.readouterr().out)["key"]
    with connect(serve(grpc_port=0, keys_file=str(file))) as client:
        found = queue.Queue()
        client.start_stream(
            lambda result, error: found.put((result, error)),
            headers={"authorization": f"Bearer {key}"},
        )
        ask = {
            "model_name": "fake",
            "inputs": inputs_of(over_grpc),
            "parameters": {"max_tokens": 2},
        }
        client.async_stream_infer(**ask)
        assert found.get(timeout=PATIENCE_S)[1] is None
        assert main(["keys", "revoke", str(file), key.split("-")[1]]) == 0
        time.sleep(keys_module.LOOK_S + 0.2)
        client.async_stream_infer(**ask)
        assert "API key" in found.get(timeout=PATIENCE_S)[1].message()
        client.stop_stream()


def test_the_audit_log_has_the_body(serve, tmp_path):
    path = tmp_path / "audit"
    server = serve(grpc_port=0, audit_log=str(path), audit_prompts=True)
    with connect(server) as client:
        client.infer("fake", inputs_of(over_grpc), parameters={"max_tokens": 2})
    server.wait_for(
        lambda: b"ModelInfer" in path.read_bytes(), "there is no line of it"
    )  # it comes behind the answer
    (body,) = [
        json.loads(record["body"])
        for record in records(path)
        if record.get("route") == "ModelInfer"
    ]
    assert (body["inputs"]["text_input"], body["parameters"]) == (PROMPT, {"max_tokens": 2})


def test_an_errors_text_is_bounded(serve):
    with connect(serve(grpc_port=0)) as client:
        with pytest.raises(InferenceServerException) as refused:
            client.infer("fake", inputs_of(over_grpc), parameters={"x" * 20_000: 1})
        assert "INVALID_ARGUMENT" in refused.value.status()
        assert len(refused.value.message()) <= 2000


def test_cancelling_frees_the_blocks_and_limits_hold(serve):
    server = serve(
        FakeEngine(delay_s=0.1), grpc_port=0, max_concurrent_requests=1
    )  # 40 s, longer than what is asked meanwhile
    with connect(server) as client:
        client.start_stream(callback=lambda result, error: None)
        ask = {"model_name": "fake", "parameters": {"max_tokens": 400}}
        client.async_stream_infer(**ask, inputs=inputs_of(over_grpc, stream=True))
        server.wait_for(lambda: server.engine.running == 1, "it did not begin")
        with connect(server) as other, pytest.raises(InferenceServerException) as refused:
            other.infer("fake", inputs_of(over_grpc))
        assert "RESOURCE_EXHAUSTED" in refused.value.status()
        client.stop_stream(cancel_requests=True)
    server.wait_idle()
    with connect(server) as client:
        call = client.async_infer(
            "fake", inputs_of(over_grpc), lambda result, error: None, parameters={"max_tokens": 400}
        )
        server.wait_for(lambda: server.engine.running == 1, "it did not begin")
        call.cancel()
        server.wait_idle()
        server.wait_for(lambda: server.state.load.num_requests == 0, "it is still counted")
    counts = server.state.metrics.responses
    methods = ("ModelInfer", "ModelStreamInfer")
    server.wait_for(
        lambda: [counts["gRPC", method, 499] for method in methods] == [1, 1],
        "they are not counted as left",
    )


def test_an_engine_that_dies_is_said_in_the_stream(serve):
    engine = FakeEngine()
    engine.fail_after = 3
    with connect(serve(engine, grpc_port=0)) as client:
        request = {
            "model_name": "fake",
            "inputs": inputs_of(over_grpc, stream=True),
            "request_id": "a",
        }
        answers = collect(client, [request, request])
        assert [error is None for _, error in answers].count(False) == 2


def test_stopping_is_orderly(serve):
    server = serve(FakeEngine(delay_s=0.005), grpc_port=0)
    client = connect(server)
    found = queue.Queue()
    client.start_stream(callback=lambda result, error: found.put((result, error)))
    client.async_stream_infer(
        "fake", inputs_of(over_grpc, stream=True), parameters={"max_tokens": 100}
    )
    server.wait_for(lambda: server.engine.running == 1, "it did not begin")
    server.begin_stop()
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        result, error = found.get(timeout=PATIENCE_S)
        assert error is None
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    server.join()
    client.close()


def test_a_port_that_is_taken():
    with serving(grpc_port=0) as first, pytest.raises(Exception, match="for gRPC") as refused:
        with serving(grpc_port=first.server.grpc.port):
            pass
    assert isinstance(refused.value, ConfigError)


def test_the_messages_are_the_protocol_s():
    """Numbers, types and labels of our table are those of the official definitions."""
    for name, made in MESSAGES.items():
        official = service_pb2.RepositoryIndexResponse.ModelIndex if name == "ModelIndex" else None
        official = (
            official or getattr(service_pb2, name, None) or getattr(model_config_pb2, name, None)
        )
        if name == "TensorMetadata":
            official = service_pb2.ModelMetadataResponse.TensorMetadata
        if name.startswith("Infer") and official is None:
            parent = (
                service_pb2.ModelInferResponse
                if name == "InferOutputTensor"
                else service_pb2.ModelInferRequest
            )
            official = getattr(parent, name)
        for field in made.DESCRIPTOR.fields:
            theirs = official.DESCRIPTOR.fields_by_name[field.name]
            enum = theirs.type == theirs.TYPE_ENUM  # a number, on the wire
            assert (field.number, field.is_repeated) == (theirs.number, theirs.is_repeated), (
                name,
                field.name,
            )
            assert enum or field.type == theirs.type, (name, field.name)


def test_grpc_without_its_package(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "slipstream.server.kserve.grpc_server", None)
    with pytest.raises(ConfigError, match=r"\[kserve\]"), serving(grpc_port=0):
        pass
    assert grpc.__version__


def test_generate_names_where_a_completions_field_stands(shared):
    with shared.http() as http:
        answer = http.post("/v2/models/fake/generate", json={"text_input": "a", "max_tokens": 2})
    assert answer.status_code == 400
    assert "here it is parameters.max_tokens" in answer.json()["error"]


def test_generate_takes_inputs_among_the_parameters(shared):
    """Triton does so, and its vLLM backend's own test sends the first of these."""
    with shared.http() as http:

        def post(parameters, route="generate"):
            body = {"text_input": PROMPT, "parameters": {"max_tokens": 4, **parameters}}
            return http.post(f"/v2/models/fake/{route}", json=body)

        asked = {
            "stream": False,
            "temperature": 0,
            "exclude_input_in_output": True,
            "return_num_output_tokens": True,
        }
        assert post(asked).json()["text_output"] == PROMPT[:4]
        for given in ({}, {"exclude_input_in_output": False}):
            assert post(given).json()["text_output"] == PROMPT + PROMPT[:4]
        for wrong in (
            {"stream": True},
            {"exclude_input_in_output": "yes"},
            {"return_logprobs": True},
            {"text_input": "twice"},
        ):
            assert post(wrong).status_code == 400
        assert (
            post({"stream": True, "exclude_input_in_output": True}, "generate_stream").status_code
            == 200
        )


def test_parameters_over_grpc_that_nothing_follows(server):
    with connect(server) as client:
        inputs = inputs_of(over_grpc)
        for parameters in ({"temperature": float("nan")}, {"logprobs": 0}):
            with pytest.raises(InferenceServerException, match="INVALID"):
                client.infer("fake", inputs, parameters=parameters)
        inputs[0].set_shared_memory("region", 5)
        with pytest.raises(InferenceServerException, match="INVALID"):
            client.infer("fake", inputs)
