"""KServe's v2 protocol over HTTP, with Triton's extensions.

The extensions are binary tensors, generate, config and repository index. The model has the tensors
of Triton's vLLM backend, so that clients written for it need no change:

    in      text_input BYTES [1]; optional: stream BOOL [1],
            sampling_parameters BYTES [1] (a JSON object), exclude_input_in_output BOOL [1],
            return_finish_reason and the like BOOL [1] (these outputs are always there)
    out     text_output BYTES [n], finish_reason BYTES [n],
            num_input_tokens and num_output_tokens UINT32 [1]

A request is translated into a completion and answered like one. A completion's fields come in
`sampling_parameters` or in `parameters`. `grpc_server` has the same over gRPC.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import msgspec
from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from slipstream import __version__
from slipstream.errors import SlipstreamError
from slipstream.outputs import CompletionOutput
from slipstream.server.answers.generation import Answer, encode
from slipstream.server.answers.route import Body, GenerationRoute
from slipstream.server.http.decoding import decode, decode_raw, register
from slipstream.server.http.errors import SHAPES, ApiError, bad_request
from slipstream.server.http.record import RequestRecord
from slipstream.server.http.replies import json_response
from slipstream.server.openai import completions
from slipstream.server.openai.models import require_model
from slipstream.server.openai.protocol import CompletionRequest
from slipstream.server.operations.health import require_ready
from slipstream.server.state import ServerState

VERSION = "1"
EXTENSIONS = ("binary_tensor_data", "generate", "model_configuration", "model_repository")
RETURNED = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
NOT_RETURNED = ("return_logprobs", "return_cumulative_logprob")
INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    **dict.fromkeys(RETURNED + NOT_RETURNED, "BOOL"),
}
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
RESERVED = frozenset(
    {"binary_data_output", "triton_enable_empty_final_response", "sampling_parameters"}
)
_NOT_HERE = (
    "prompt",
    "model",
    "echo",
    "logprobs",
    "prompt_logprobs",
    "stream_options",
    "return_token_ids",
)
SIZE_HEADER = b"inference-header-content-length"


# --- Requests ------------------------------------------------------------------------


class Tensor(Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}
    data: Raw = msgspec.field(default_factory=Raw)


class WantedOutput(Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    parameters: dict[str, Any] = {}


class InferRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v2/models/{id}/infer: an answer in KServe's format"""

    inputs: list[Tensor]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[WantedOutput] | None = None


class GenerateRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v2/models/{id}/generate and /v2/models/{id}/generate_stream"""

    OTHER_NAMES: ClassVar[dict[str, str]] = {
        name: f"parameters.{name}"
        for name in CompletionRequest.__struct_fields__
        if name not in _NOT_HERE
    }

    text_input: str
    stream: bool | None = None
    sampling_parameters: str | None = None
    exclude_input_in_output: bool | None = None
    return_finish_reason: bool | None = None
    return_num_input_tokens: bool | None = None
    return_num_output_tokens: bool | None = None
    return_logprobs: bool | None = None
    return_cumulative_logprob: bool | None = None
    id: str = ""
    parameters: dict[str, Any] = {}


register(InferRequest, GenerateRequest, parts=(Tensor, WantedOutput))


@dataclass(kw_only=True)
class Inference:
    """A request of this protocol, over HTTP or gRPC. `binary`: names of the outputs that are sent
    as bytes; None: all."""

    model: str | None
    id: str
    tensors: Mapping[str, Any]
    parameters: Mapping[str, Any]
    wanted: Sequence[str] | None = None
    binary: frozenset[str] | None = frozenset()
    stream: bool = False
    completion: CompletionRequest = field(init=False)

    def check(self) -> None:
        """Translate the request into a completion. A 400 names the wrong tensor or parameter."""
        text = self.tensors.get("text_input")
        if text is None:
            raise bad_request("the input text_input is missing", "text_input")
        if unknown := next((name for name in self.wanted or () if name not in OUTPUTS), None):
            raise bad_request(
                f"there is no output {unknown[:100]!r}; there are {', '.join(OUTPUTS)}", "outputs"
            )
        fields = {name: value for name, value in self.parameters.items() if name not in RESERVED}
        spelled = self.tensors.get("sampling_parameters") or self.parameters.get(
            "sampling_parameters"
        )
        if spelled is not None:
            try:
                given = msgspec.json.decode(spelled)
            except (msgspec.DecodeError, TypeError, RecursionError):
                given = None
            if not isinstance(given, dict):
                raise bad_request(
                    "sampling_parameters must be a JSON object, as text", "sampling_parameters"
                )
            fields |= given
        self.stream = self.stream or self.tensors.get("stream") is True
        if fields.pop("stream", self.stream) not in (self.stream, None):
            raise bad_request("stream is an input, or a route of its own", "stream")
        if taken := next((name for name in _NOT_HERE if not _is_off(fields.pop(name, None))), None):
            raise bad_request(f"{taken} is not a parameter here", taken)
        if refused := next((name for name in NOT_RETURNED if self.tensors.get(name)), None):
            raise bad_request(f"there are no log probabilities here; leave {refused} out", refused)
        if self.stream and fields.get("n", 1) != 1:
            raise bad_request("a stream has one answer; leave n out", "n")
        exclude = self.tensors.get("exclude_input_in_output")
        if exclude is False and self.stream:
            raise bad_request(
                "a stream never includes its input; leave it out", "exclude_input_in_output"
            )
        self.completion = decode(
            CompletionRequest, encode({**fields, "prompt": text, "model": self.model})
        )
        self.completion.stream = self.stream
        self.completion.echo = not (self.stream or exclude)
        self.completion.check()

    def param(self, field: str | None) -> str | None:
        return "text_input" if field in ("prompt", "prompt_token_ids") else field


def _is_off(value: Any) -> bool:
    return value is None or value is False


def tensor_values(name: str, datatype: str, shape: Sequence[int], data: bytes | list[Any]) -> Any:
    """The single value of an input. `data` is in Triton's binary format, or a list of values."""
    if name not in INPUTS:
        raise bad_request(
            f"there is no input {name[:100]!r}; there are {', '.join(INPUTS)}", "inputs"
        )
    if datatype != INPUTS[name]:
        raise bad_request(f"{name} is of type {INPUTS[name]}", f"inputs.{name}.datatype")
    if not shape or any(size != 1 for size in shape):
        raise bad_request(f"{name} has one element: the shape [1]", f"inputs.{name}.shape")
    if isinstance(data, bytes):
        data = [_from_bytes(name, datatype, data)]
    while len(data) == 1 and isinstance(data[0], list):
        data = data[0]
    kind: type = bool if datatype == "BOOL" else str
    if len(data) != 1 or not isinstance(data[0], kind):
        raise bad_request(f"{name} has one element, of type {datatype}", f"inputs.{name}.data")
    return data[0]


def _from_bytes(name: str, datatype: str, data: bytes) -> Any:
    if datatype == "BOOL" and len(data) == 1:
        return data != b"\0"
    if (
        datatype == "BYTES"
        and len(data) >= 4
        and struct.unpack_from("<I", data)[0] == len(data) - 4
    ):
        return text_of(name, data[4:])
    raise bad_request(
        f"{name}: these bytes are not one element of type {datatype}", f"inputs.{name}.data"
    )


def text_of(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise bad_request(f"{name} is not UTF-8", f"inputs.{name}.data") from None


def to_bytes(datatype: str, values: Sequence[Any]) -> bytes:
    """Values in the format of Triton's binary extension and of gRPC's raw contents."""
    if datatype == "UINT32":
        return struct.pack(f"<{len(values)}I", *values)
    encoded = [value.encode() for value in values]
    return b"".join(struct.pack("<I", len(value)) + value for value in encoded)


def _read_infer(raw: bytes, scope: Scope, model: str) -> Inference:
    size = dict(scope["headers"]).get(SIZE_HEADER)
    if size is not None and not (size.isdigit() and len(size) <= 12 and int(size) <= len(raw)):
        raise bad_request(
            "Inference-Header-Content-Length is not the length of a part of the body", "header"
        )
    head = len(raw) if size is None else int(size)
    body, at, tensors = decode(InferRequest, raw[:head]), head, dict[str, Any]()
    for tensor in body.inputs:
        if tensor.name in tensors:
            raise bad_request(f"the input {tensor.name[:100]!r} appears twice", "inputs")
        count = tensor.parameters.pop("binary_data_size", None)
        data: bytes | list[Any]
        if count is None:
            data = decode_raw(bytes(tensor.data) or b"null", f"inputs.{tensor.name[:100]}.data")
            data = data if isinstance(data, list) else [data]
        else:
            if bytes(tensor.data):
                raise bad_request(
                    "an input has data or binary_data_size, not both",
                    f"inputs.{tensor.name[:100]}.data",
                )
            if type(count) is not int or count < 0 or at + count > len(raw):
                raise bad_request(
                    "binary_data_size goes beyond the body",
                    f"inputs.{tensor.name[:100]}.parameters",
                )
            data, at = raw[at : at + count], at + count
        no_parameters(tensor.parameters, f"inputs.{tensor.name[:100]}")
        tensors[tensor.name] = tensor_values(tensor.name, tensor.datatype, tensor.shape, data)
    if at != len(raw):
        raise bad_request(f"{len(raw) - at} bytes of the body belong to no input", "inputs")
    by_default = body.parameters.get("binary_data_output") is True
    wanted = [output.name for output in body.outputs or ()] or None
    for output in body.outputs or ():
        no_parameters(set(output.parameters) - {"binary_data"}, f"outputs.{output.name[:100]}")
    binary = {
        o.name for o in body.outputs or () if o.parameters.get("binary_data", by_default) is True
    }
    return Inference(
        model=model,
        id=body.id,
        tensors=tensors,
        parameters=body.parameters,
        wanted=wanted,
        binary=None if wanted is None and by_default else frozenset(binary),
    )


def no_parameters(given: Collection[str], path: str) -> None:
    """Raise a 400 for parameters of a tensor, such as shared memory, none of which are supported."""
    if given:
        raise bad_request(
            f"the parameter {min(given)[:100]!r} of a tensor is not supported here",
            f"{path}.parameters",
        )


def _read_generate(raw: bytes, scope: Scope, model: str, *, stream: bool) -> Inference:
    body = decode(GenerateRequest, raw)
    tensors = {name: getattr(body, name) for name in INPUTS if getattr(body, name) is not None}
    # Triton also accepts inputs in `parameters`.
    for name in INPUTS.keys() & body.parameters.keys() - {"sampling_parameters"}:
        value, kind = body.parameters.pop(name), str if INPUTS[name] == "BYTES" else bool
        if name in tensors:
            raise bad_request(f"{name} appears twice", f"parameters.{name}")
        if not isinstance(value, kind):
            raise bad_request(f"{name} is of type {INPUTS[name]}", f"parameters.{name}")
        tensors[name] = value
    if stream and tensors.pop("stream", True) is False:
        raise bad_request("generate_stream streams; send stream=false to generate", "stream")
    if not stream and tensors.pop("stream", False):
        raise bad_request("generate does not stream; send stream=true to generate_stream", "stream")
    return Inference(
        model=model, id=body.id, tensors=tensors, parameters=body.parameters, stream=stream
    )


# --- Answers -------------------------------------------------------------------------


class InferAnswer(completions.CompletionAnswer):
    """A completion whose outputs are tensors. `write` makes a response of them."""

    is_plain = False

    def __init__(self, asked: Inference, *args: Any) -> None:
        super().__init__(*args)
        self.asked = asked

    def chunk(self, delta: CompletionOutput) -> bytes:
        """The response for a delta. The last one has the finish reason."""
        if not delta.text and delta.finish_reason is None:
            return b""
        last = delta.finish_reason is not None
        return self.write(
            self._outputs([delta.text], [delta.finish_reason or ""], [self.choices[0].num_tokens]),
            last=last,
        )

    def end(self) -> bytes:
        return self._take_events()

    def collected(self) -> bytes:
        texts = [self._echo(i) + "".join(choice.text) for i, choice in enumerate(self.choices)]
        reasons = [choice.finish_reason or "" for choice in self.choices]
        return self.write(self._outputs(texts, reasons, [self.record.num_output_tokens]), last=True)

    def _outputs(
        self, texts: list[str], reasons: list[str], tokens: list[int]
    ) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"text_output": texts, "finish_reason": reasons}
        found |= {"num_input_tokens": [self.record.num_prompt_tokens], "num_output_tokens": tokens}
        return (
            found
            if self.asked.wanted is None
            else {name: found[name] for name in self.asked.wanted}
        )

    def about(self) -> dict[str, Any]:
        """Fields of a response before its outputs."""
        about = {"model_name": self.body.model, "model_version": VERSION}
        return {**about, "id": self.asked.id} if self.asked.id else about

    def write(self, outputs: dict[str, list[Any]], *, last: bool) -> bytes:
        """A response: the tensors as JSON, then the bytes of binary ones."""
        told, behind = list[dict[str, Any]](), list[bytes]()
        for name, values in outputs.items():
            tensor: dict[str, Any] = {
                "name": name,
                "datatype": OUTPUTS[name],
                "shape": [len(values)],
            }
            if self.asked.binary is None or name in self.asked.binary:
                behind.append(to_bytes(OUTPUTS[name], values))
                tensor["parameters"] = {"binary_data_size": len(behind[-1])}
            else:
                tensor["data"] = values
            told.append(tensor)
        head = encode({**self.about(), "outputs": told})
        if behind:
            self.whole_headers = [
                (b"content-type", b"application/octet-stream"),
                (SIZE_HEADER, str(len(head)).encode()),
            ]
        return head + b"".join(behind)


class GenerateAnswer(InferAnswer):
    def write(self, outputs: dict[str, list[Any]], *, last: bool) -> bytes:
        plain = {
            name: values[0] if len(values) == 1 else values for name, values in outputs.items()
        }
        told = encode({**self.about(), **plain})
        return b"data: " + told + b"\n\n" if self.stream else told

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + encode({"error": error.message}) + b"\n\n"


async def prepare(
    state: ServerState, asked: Inference, record: RequestRecord, *, answer: Callable[..., Answer]
) -> Answer:
    asked.completion.model = asked.model
    return await completions.prepare(state, asked.completion, record, answer=partial(answer, asked))


def _error_body(error: ApiError, _: str) -> bytes:
    return encode({"error": error.named_message})


for begin in ("/v2/models", "/v2/health", "/v2/repository"):
    SHAPES[begin] = _error_body


# --- Routes --------------------------------------------------------------------------


class _Infer(GenerationRoute):
    def __init__(
        self,
        state: ServerState,
        make: Callable[[bytes, Scope, str], Inference],
        answer: Callable[..., Answer],
    ) -> None:
        super().__init__(state, Inference, partial(prepare, answer=answer))
        self.make = make

    def read(self, raw: bytes, scope: Scope) -> Body:
        asked = self.make(raw, scope, require_version(self.state, scope["path_params"]))
        if asked.tensors.get("stream") and not asked.stream:
            raise bad_request("use generate_stream for a stream over HTTP", "stream")
        return asked


def require_version(state: ServerState, params: Mapping[str, str]) -> str:
    """Check the model and its version in a path, and return the model's name. ApiError (404) for
    one that is not served."""
    require_model(state, params["id"])
    if params.get("version", VERSION) != VERSION:
        raise ApiError(404, f"this model has only version {VERSION}", code="model_not_found")
    return params["id"]


class Description:
    """Metadata of the server and its models, for HTTP and gRPC."""

    def __init__(self, state: ServerState) -> None:
        self.state = state

    @staticmethod
    def server() -> dict[str, Any]:
        return {"name": "slipstream", "version": __version__, "extensions": list(EXTENSIONS)}

    @staticmethod
    def model(name: str) -> dict[str, Any]:
        def tensor_list(tensors: Mapping[str, str]) -> list[dict[str, Any]]:
            return [
                {"name": n, "datatype": kind, "shape": [_SHAPE.get(n, 1)]}
                for n, kind in tensors.items()
            ]

        about = {"name": name, "versions": [VERSION], "platform": "slipstream"}
        return {**about, "inputs": tensor_list(INPUTS), "outputs": tensor_list(OUTPUTS)}

    @staticmethod
    def config(name: str) -> dict[str, Any]:
        def tensor_list(tensors: Mapping[str, str]) -> list[dict[str, Any]]:
            return [
                {"name": n, "data_type": _CONFIG_TYPES[kind], "dims": [_SHAPE.get(n, 1)]}
                | ({"optional": True} if tensors is INPUTS and n != "text_input" else {})
                for n, kind in tensors.items()
            ]

        about = {
            "name": name,
            "platform": "slipstream",
            "backend": "slipstream",
            "max_batch_size": 0,
        }
        policy = {"model_transaction_policy": {"decoupled": True}}
        return {**about, "input": tensor_list(INPUTS), "output": tensor_list(OUTPUTS), **policy}

    def index(self) -> list[dict[str, str]]:
        return [
            {"name": name, "version": VERSION, "state": "READY"} for name in self.state.model_names
        ]

    def require_ready(self) -> None:
        require_ready(self.state)

    @property
    def is_ready(self) -> bool:
        try:
            self.require_ready()
        except (ApiError, SlipstreamError):
            return False
        return True


_SHAPE = {"text_output": -1, "finish_reason": -1}
_CONFIG_TYPES = {"BYTES": "TYPE_STRING", "BOOL": "TYPE_BOOL", "UINT32": "TYPE_UINT32"}


class _Http:
    paths: ClassVar[tuple[str, ...]] = (
        "/v2/models/{id:path}/versions/{version}",
        "/v2/models/{id:path}",
    )

    def __init__(self, state: ServerState) -> None:
        self.state, self.about = state, Description(state)

    async def server(self, request: Request) -> Response:
        return json_response(self.about.server())

    async def live(self, request: Request) -> Response:
        return Response()

    async def ready(self, request: Request) -> Response:
        self.about.require_ready()
        return Response()

    async def model_ready(self, request: Request) -> Response:
        require_version(self.state, request.path_params)
        self.about.require_ready()
        return Response()

    async def model(self, request: Request) -> Response:
        return json_response(self.about.model(require_version(self.state, request.path_params)))

    async def config(self, request: Request) -> Response:
        return json_response(self.about.config(require_version(self.state, request.path_params)))

    async def index(self, request: Request) -> Response:
        return json_response(self.about.index())


def routes(state: ServerState) -> list[Route]:
    http = _Http(state)
    found = [
        Route("/v2", http.server),
        Route("/v2/health/live", http.live),
        Route("/v2/health/ready", http.ready),
        Route("/v2/repository/index", http.index, methods=["POST"]),
    ]
    streamed, whole = partial(_read_generate, stream=True), partial(_read_generate, stream=False)
    for path in http.paths:
        found += [
            Route(f"{path}/ready", http.model_ready),
            Route(f"{path}/config", http.config),
            Route(f"{path}/infer", _Infer(state, _read_infer, InferAnswer), methods=["POST"]),
            Route(f"{path}/generate", _Infer(state, whole, GenerateAnswer), methods=["POST"]),
            Route(
                f"{path}/generate_stream", _Infer(state, streamed, GenerateAnswer), methods=["POST"]
            ),
        ]
    return found + [Route(path, http.model) for path in http.paths]
