"""GET /v1/models and /v1/models/{id}: one model under one or more names."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from slipstream.server.errors import ApiError
from slipstream.server.state import ServerState


def require_model(state: ServerState, name: str) -> None:
    if name not in state.model_names:
        names = ", ".join(state.model_names)
        raise ApiError(
            404, f"model {name[:100]!r} is not served here; there is {names}", param="model", code="model_not_found"
        )


def served_model(state: ServerState, name: str | None) -> str:
    """The name that the answer bears: the first one served if the request has none. A 404 for one that is not served."""
    if name is None:
        return state.model_names[0]
    require_model(state, name)
    return name


class Models:
    def __init__(self, state: ServerState) -> None:
        self.state = state

    async def list(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card(name) for name in self.state.model_names]})

    async def get(self, request: Request) -> Response:
        name = request.path_params["id"]
        require_model(self.state, name)
        return _json(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        engine = self.state.engine
        sizes = {"max_model_len": engine.config.model.max_model_len, "vocab_size": engine.description.spec.vocab_size}
        owner = {"owned_by": "slipstream", **sizes}
        return {"id": name, "object": "model", "created": self.state.created, **owner}


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
