"""KServe's v2 protocol over gRPC, with streams of several responses to a request (extra `kserve`).

Every front end listens on the same port, and the kernel gives each connection to one of them. A
call is handled like an HTTP request: counted, logged and limited, and a client that cancels frees
its blocks. Keys come as the metadata `authorization: Bearer KEY`.

A stream of calls answers its requests one after the other. The last response to a request has the
parameter `triton_final_response`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

# gRPC would print a line at each fork; none of our forks uses it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

import grpc
import grpc.aio
from starlette.types import Message

from slipstream.engine.threads.fair_threads import client
from slipstream.errors import ConfigError, RequestError, SlipstreamError
from slipstream.server.answers.generation import encode
from slipstream.server.http.auth import check_role
from slipstream.server.http.certificates import Certificates
from slipstream.server.http.errors import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    as_api_error,
    bad_request,
    unavailable,
)
from slipstream.server.http.keys import Key
from slipstream.server.http.limits import admitted, in_flight
from slipstream.server.http.record import RequestRecord, finish
from slipstream.server.kserve.messages import MESSAGES, SERVICE
from slipstream.server.kserve.routes import (
    OUTPUTS,
    VERSION,
    Description,
    InferAnswer,
    Inference,
    no_parameters,
    prepare,
    require_version,
    tensor_values,
    text_of,
    to_bytes,
)
from slipstream.server.state import ServerSettings, ServerState

_logger = logging.getLogger("slipstream.server")
_FINAL = "triton_final_response"
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
OPEN = frozenset({"ServerLive", "ServerReady"})
"""Probes: they need no key, and are counted and logged only if they fail."""

MAX_DETAILS = 2000
"""Maximum characters of an error message: it is sent in the trailers, for which clients accept 8
KiB."""

KEEPALIVE_MS, IDLE_MS = 60_000, 3_600_000
"""Milliseconds until a silent peer is pinged, and until a connection without calls is closed."""

_CONFIG_TYPES = {"TYPE_BOOL": 1, "TYPE_UINT32": 4, "TYPE_STRING": 13}


class GrpcAnswer(InferAnswer):
    """An answer whose responses are serialised messages: ModelStreamInferResponse in a stream, else
    ModelInferResponse."""

    asked: GrpcInference

    def write(self, outputs: dict[str, list[Any]], *, last: bool) -> bytes:
        return response(self.asked, self.body.model, outputs, last=last)


class GrpcInference(Inference):
    streamed = False
    """Whether the request came in a stream of requests."""


def response(
    asked: GrpcInference, model: str | None, outputs: Mapping[str, list[Any]], *, last: bool
) -> bytes:
    """The serialised message with these outputs."""
    made = MESSAGES["ModelInferResponse"](model_name=model, model_version=VERSION, id=asked.id)
    for name, values in outputs.items():
        made.outputs.add(name=name, datatype=OUTPUTS[name], shape=[len(values)])
        made.raw_output_contents.append(to_bytes(OUTPUTS[name], values))
    if not asked.streamed:
        return bytes(made.SerializeToString())
    made.parameters[_FINAL].bool_param = last
    return bytes(MESSAGES["ModelStreamInferResponse"](infer_response=made).SerializeToString())


class GrpcServer:
    """The gRPC server of a front end. A fleet's gateway overrides `name_of`, `is_ready` and
    `responses`."""

    def __init__(self, state: ServerState, about: Description | None = None) -> None:
        self.state, self.about = state, about or Description(state)
        settings = state.settings
        options = [
            ("grpc.so_reuseport", int(settings.shared_dir is not None)),
            ("grpc.max_receive_message_length", settings.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),  # to notice a peer that lost power
            ("grpc.max_connection_idle_ms", IDLE_MS),
        ]
        self.server = grpc.aio.server(options=options)
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, self._handlers()),)
        )
        address = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{address}:{settings.grpc_port}"
        try:
            _require_free(settings)  # otherwise gRPC prints a line of C++
            if settings.ssl_certfile is None:
                self.port = self.server.add_insecure_port(address)
            else:
                self.port = self.server.add_secure_port(address, _credentials(settings))
        except (RuntimeError, OSError) as error:
            message = f"cannot listen on {address} for gRPC: {error}; choose another --grpc-port"
            raise ConfigError(message, field="grpc_port") from None

    async def start(self) -> None:
        _logger.info("gRPC on port %d", self.port)
        await self.server.start()

    async def stop(self) -> None:
        await self.server.stop(1.0)

    # --- Methods -------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Any]:
        responders: dict[str, Callable[[Any], Any]] = {
            "ServerLive": lambda _: {"live": True},
            "ServerReady": lambda _: {"ready": self.about.is_ready},
            "ModelReady": self._model_ready,
            "ServerMetadata": lambda _: self.about.server(),
            "ModelMetadata": lambda asked: self.about.model(
                self.name_of(asked.name, asked.version)
            ),
            "ModelConfig": self._config,
            "RepositoryIndex": lambda _: {"models": self.about.index()},
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._unary(name, respond),
                request_deserializer=MESSAGES[f"{name}Request"].FromString,
                response_serializer=lambda answer: answer.SerializeToString(),
            )
            for name, respond in responders.items()
        }
        read = MESSAGES["ModelInferRequest"].FromString
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(
            self._infer, request_deserializer=read
        )
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream, request_deserializer=read
        )
        return handlers

    def name_of(self, name: str, version: str) -> str:
        """The model's name. ApiError (404) if it is not served."""
        return require_version(self.state, {"id": name, "version": version or VERSION})

    def is_ready(self, model: str) -> bool:
        """Whether a served model is ready."""
        return self.about.is_ready

    def _model_ready(self, asked: Any) -> dict[str, Any]:
        """Readiness in Triton's sense: an unknown model is not ready."""
        try:
            return {"ready": self.is_ready(self.name_of(asked.name, asked.version))}
        except ApiError:
            return {"ready": False}

    def _config(self, asked: Any) -> dict[str, Any]:
        config = self.about.config(self.name_of(asked.name, asked.version))
        for tensor in (*config["input"], *config["output"]):
            tensor["data_type"] = _CONFIG_TYPES[tensor["data_type"]]
        return {"config": config}

    def _unary(self, name: str, respond: Callable[[Any], Any]) -> Any:
        async def answer(asked: Any, context: Any) -> Any:
            record = RequestRecord()
            try:
                if name not in OPEN:
                    record.key = self._key(context)
                response = MESSAGES[f"{name}Response"](**respond(asked))
                record.status = 200
                return response
            except Exception as exc:
                await _refuse(context, _api_error(exc, record))
            finally:
                if name not in OPEN or record.status >= 400:
                    finish(self.state.observers, record, "gRPC", name)

        return answer

    async def _infer(self, asked: Any, context: Any) -> bytes:
        record = _record(context)
        try:
            async with aclosing(
                self._answers(asked, record, self._key(context), streamed=False)
            ) as responses:
                return await anext(responses)
        except Exception as exc:
            await _refuse(context, _api_error(exc, record))
            raise
        finally:
            finish(self.state.observers, record, "gRPC", "ModelInfer")

    async def _stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[bytes]:
        try:
            self._key(context)
        except ApiError as error:
            record = RequestRecord()
            refused = _api_error(error, record)
            finish(self.state.observers, record, "gRPC", "ModelStreamInfer")
            await _refuse(context, refused)
            return
        async for asked in requests:
            record = _record(context)
            try:
                key = self._key(context)  # checked again, because a stream may outlive a key
                async with aclosing(self._answers(asked, record, key, streamed=True)) as responses:
                    async for response in responses:
                        yield response
            except Exception as exc:
                failed = MESSAGES["ModelStreamInferResponse"](
                    error_message=_text(_api_error(exc, record))
                )
                failed.infer_response.id = asked.id
                failed.infer_response.model_name = asked.model_name
                failed.infer_response.parameters[_FINAL].bool_param = True
                yield failed.SerializeToString()
            finally:
                finish(self.state.observers, record, "gRPC", "ModelStreamInfer")

    def _key(self, context: Any) -> Key | None:
        given = dict(context.invocation_metadata() or ())
        key = self.state.keys.find(
            str(given.get("authorization", "")), str(given.get("x-api-key", ""))
        )
        if key is not None:
            check_role(key, "/v2")
        client.set(context.peer().rpartition(":")[0] if key is None else key.id)
        return key

    async def _answers(
        self, asked: Any, record: RequestRecord, key: Key | None, *, streamed: bool
    ) -> AsyncGenerator[bytes, None]:
        """The responses to one request."""
        record.key = key
        body = self._read(asked, streamed=streamed)
        if self.state.settings.audit_prompts:
            described = {"model": body.model, "inputs": body.tensors, "parameters": body.parameters}
            record.body = encode(described).decode()
        try:
            body.check()
            if self.state.observers.refuses:
                raise unavailable("the audit log cannot be written", "audit_unavailable")
            async with aclosing(self.responses(body, record)) as found:
                async for some in found:
                    yield some
        except RequestError as error:
            error.field = body.param(error.field)
            raise

    async def responses(
        self, body: GrpcInference, record: RequestRecord
    ) -> AsyncGenerator[bytes, None]:
        """The responses to a checked request. The record's status is set before the last one."""
        async with in_flight(self.state, _never, record):
            answer = record.answer = await prepare(self.state, body, record, answer=GrpcAnswer)
            with admitted(self.state, record, body.model):
                async with aclosing(answer.events(None)) as events:
                    async for some in events:
                        if some:
                            yield some
            last = answer.end() if answer.stream else answer.collected()
        record.status = 200
        if last:
            yield last

    def _read(self, asked: Any, *, streamed: bool) -> GrpcInference:
        raw, tensors = list(asked.raw_input_contents), dict[str, Any]()
        if raw and len(raw) != len(asked.inputs):
            raise bad_request(
                "raw_input_contents must have one part for each input", "raw_input_contents"
            )
        for i, tensor in enumerate(asked.inputs):
            data: bytes | list[Any]
            if tensor.name in tensors:
                raise bad_request(f"the input {tensor.name[:100]!r} appears twice", "inputs")
            no_parameters(
                set(tensor.parameters) - {"binary_data_size"}, f"inputs.{tensor.name[:100]}"
            )
            if raw:
                data = raw[i]
            elif tensor.datatype == "BOOL":
                data = list(tensor.contents.bool_contents)
            else:
                data = [text_of(tensor.name[:100], part) for part in tensor.contents.bytes_contents]
            tensors[tensor.name] = tensor_values(tensor.name, tensor.datatype, tensor.shape, data)
        parameters = {
            name: getattr(value, value.WhichOneof("parameter_choice") or "bool_param")
            for name, value in asked.parameters.items()
        }
        for name, value in parameters.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise bad_request(
                    f"{name[:100]} is not a finite number", f"parameters.{name[:100]}"
                )
        for output in asked.outputs:
            no_parameters(set(output.parameters) - {"binary_data"}, f"outputs.{output.name[:100]}")
        wanted = [output.name for output in asked.outputs] or None
        name = self.name_of(asked.model_name, asked.model_version)
        made = GrpcInference(
            model=name, id=asked.id, tensors=tensors, parameters=parameters, wanted=wanted
        )
        made.streamed = streamed
        if tensors.get("stream") and not streamed:
            raise bad_request("use ModelStreamInfer for a stream", "stream")
        return made


async def _never() -> Message:
    """The `receive` of a gRPC call, which never returns: gRPC cancels the call's task when the
    client disconnects."""
    await asyncio.Event().wait()
    raise AssertionError


def _api_error(exc: Exception, record: RequestRecord) -> ApiError:
    error = as_api_error(exc)
    record.status, record.error, record.param = error.status, error.code or error.kind, error.param
    if error.status == 500:
        _logger.error(
            "a gRPC request failed: %s", exc, exc_info=not isinstance(exc, SlipstreamError)
        )
    return error


def _record(context: Any) -> RequestRecord:
    """Makes the record of a request. Until the request ends, its status is that of a disconnected
    client."""
    address = context.peer().rpartition(":")[0]
    return RequestRecord(status=CLIENT_CLOSED_REQUEST, address=address)


async def _refuse(context: Any, error: ApiError) -> None:
    """End the call with an error, by raising."""
    await context.abort(_CODES.get(error.status, grpc.StatusCode.INTERNAL), _text(error))


def _text(error: ApiError) -> str:
    return error.named_message[:MAX_DETAILS]


def _require_free(settings: ServerSettings) -> None:
    """Raise OSError if the port is taken."""
    assert settings.grpc_port is not None
    family, kind, protocol, _, address = socket.getaddrinfo(
        settings.host, settings.grpc_port, type=socket.SOCK_STREAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if settings.shared_dir is not None:  # other front ends listen on it
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        probe.bind(address)


def _credentials(settings: ServerSettings) -> Any:
    """TLS credentials that read renewed files at a handshake."""
    assert settings.ssl_certfile is not None
    certificates = Certificates(settings.ssl_certfile, settings.ssl_keyfile)

    def read() -> Any:
        certificate = Path(certificates.certfile).read_bytes()
        key = (
            certificate if certificates.keyfile is None else Path(certificates.keyfile).read_bytes()
        )
        return grpc.ssl_server_certificate_configuration([(key, certificate)])

    return grpc.dynamic_ssl_server_credentials(
        read(), lambda: read() if certificates.renewed() else None
    )
