"""GET /v1/models and /v1/models/{id}: one model under one or more names, and its adapters."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from slipstream.server.errors import ApiError
from slipstream.server.state import ServerState


def require_model(state: ServerState, name: str, *, adapters: bool = True) -> None:
    """A 404 for a name that is not served. Without `adapters` their names are refused."""
    if name in state.engine.adapters and not adapters:
        message = f"{name!r} is an adapter, and adapters only write text; take {state.model_names[0]}"
        raise ApiError(400, message, param="model", code="adapter_not_supported")
    if name not in state.model_names and name not in state.engine.adapters:
        names = ", ".join((*state.model_names, *list(state.engine.adapters)[:20]))
        raise ApiError(
            404, f"model {name[:100]!r} is not served here; there is {names}", param="model", code="model_not_found"
        )


def served_model(state: ServerState, name: str | None, *, adapters: bool = True) -> str:
    """The name that the answer bears: the first one served if the request has none. Errors as of `require_model`."""
    if name is None:
        return state.model_names[0]
    require_model(state, name, adapters=adapters)
    return name


class Models:
    def __init__(self, state: ServerState) -> None:
        self.state = state

    async def list(self, request: Request) -> Response:
        if "anthropic-version" in request.headers:
            return _json(self._as_anthropic())
        names = (*self.state.model_names, *self.state.engine.adapters)
        return _json({"object": "list", "data": [self._card(name) for name in names]})

    async def get(self, request: Request) -> Response:
        name = request.path_params["id"]
        require_model(self.state, name)
        if "anthropic-version" in request.headers:
            return _json(self._anthropic_card(name))
        return _json(self._card(name))

    def _as_anthropic(self) -> dict[str, Any]:
        """The shape that Anthropic's client reads; it asks the same route."""
        names = self.state.model_names
        return {
            "data": [self._anthropic_card(name) for name in names],
            "has_more": False,
            "first_id": names[0],
            "last_id": names[-1],
        }

    def _anthropic_card(self, name: str) -> dict[str, Any]:
        created = datetime.fromtimestamp(self.state.created, UTC).isoformat().replace("+00:00", "Z")
        limit = self.state.engine.config.model.max_model_len
        card = {"type": "model", "id": name, "display_name": name, "created_at": created}
        return {**card, "max_input_tokens": limit, "max_tokens": limit}

    def _card(self, name: str) -> dict[str, Any]:
        engine = self.state.engine
        sizes = {"max_model_len": engine.config.model.max_model_len, "vocab_size": engine.description.spec.vocab_size}
        owner = {"owned_by": "slipstream", **sizes}
        lora = engine.adapters.get(name)
        of_adapter = {} if lora is None else {"root": lora.path, "parent": self.state.model_names[0]}
        return {"id": name, "object": "model", "created": self.state.created, **owner, **of_adapter}


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
