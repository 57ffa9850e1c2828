"""KServe's v2 protocol over gRPC at a fleet's gateway: each call becomes a request of the same
protocol over HTTP.

Routing, limits, failover and the audit log are therefore those of every other request, and replicas
see no gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.types import Message, Scope

from slipstream.fleet.gateway.gateway import Gateway
from slipstream.server.answers.generation import encode
from slipstream.server.http.errors import ApiError, unavailable
from slipstream.server.http.limits import own_receive
from slipstream.server.http.record import RequestRecord
from slipstream.server.kserve.grpc_server import GrpcInference, GrpcServer, response
from slipstream.server.kserve.routes import OUTPUTS, VERSION

_MAX_WAITING = 4
"""Maximum unread parts of an answer at a slow client. Then the gateway stops reading the
replica."""

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class FleetGrpc(GrpcServer):
    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway.state, gateway.about)
        self.gateway = gateway

    def name_of(self, name: str, version: str) -> str:
        model, adapter = self.gateway.find(name)
        if version not in ("", VERSION):
            raise ApiError(
                404, f"there is only version {VERSION} of this model", code="model_not_found"
            )
        return adapter or model

    def is_ready(self, model: str) -> bool:
        """Whether a replica answers for this model. Other models do not matter."""
        name, _ = self.gateway.find(model)
        return not self.state.draining and any(
            v.can_answer or v.is_asleep for v in self.gateway.members.models[name]
        )

    async def responses(
        self, body: GrpcInference, record: RequestRecord
    ) -> AsyncGenerator[bytes, None]:
        messages: asyncio.Queue[Message | None] = asyncio.Queue(_MAX_WAITING)
        failure: Exception | None = None

        async def forward() -> None:
            nonlocal failure
            scope, raw = _request(body, record)
            try:
                await self.gateway.forward(scope, own_receive(raw), messages.put)
            except Exception as error:
                failure = error
            await messages.put(None)

        forwarding = asyncio.create_task(forward())
        status, rest = 0, b""
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    continue
                rest += message["body"]
                while body.stream and status == 200 and b"\n\n" in rest:
                    event, _, rest = rest.partition(b"\n\n")
                    yield self._response(body, _decode(event.removeprefix(b"data: ")), record)
            if failure is not None:
                raise failure
        finally:
            forwarding.cancel()
            await asyncio.wait([forwarding])
        if status != 200:
            raise ApiError(status, str(_decode(rest).get("error", "the replica failed")))
        if not body.stream:
            yield self._response(body, _decode(rest), record)

    @staticmethod
    def _response(body: GrpcInference, told: dict[str, Any], record: RequestRecord) -> bytes:
        """Encode a reply as a gRPC message. ApiError if the body is an error that ended a stream."""
        if "error" in told:
            raise unavailable(str(told["error"]), record.error or "replica_failed")
        outputs = {
            name: told[name] if isinstance(told[name], list) else [told[name]]
            for name in body.wanted or OUTPUTS
        }
        last = not body.stream or bool(told["finish_reason"])
        if last:
            record.status = 200
        return response(body, told["model_name"], outputs, last=last)


def _request(body: GrpcInference, record: RequestRecord) -> tuple[Scope, bytes]:
    given = {**body.tensors, "parameters": body.parameters, "id": body.id}
    raw = encode(given)
    path = f"/v2/models/{body.model}/{'generate_stream' if body.stream else 'generate'}"
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": quote(path).encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(raw))],
        "record": record,
        "shows_life": False,  # each event becomes a message, and a refusal a status code
    }
    return scope, raw
