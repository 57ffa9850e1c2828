"""GET /v1/models and /v1/models/{id}: one model under one or more names, and its adapters."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from slipstream.server.http.errors import ApiError
from slipstream.server.http.replies import json_response, utc_time
from slipstream.server.state import ServerState


def require_model(state: ServerState, name: str, *, adapters: bool = True) -> None:
    """Raise a 404 for a name that is not served. Without `adapters` a 400 for an adapter's name."""
    if name in state.engine.adapters and not adapters:
        message = (
            f"{name!r} is an adapter, and adapters only generate text; use {state.model_names[0]}"
        )
        raise ApiError(400, message, param="model", code="adapter_not_supported")
    if name not in state.model_names and name not in state.engine.adapters:
        names = ", ".join((*state.model_names, *list(state.engine.adapters)[:20]))
        raise ApiError(
            404,
            f"model {name[:100]!r} is not served here; use one of {names}",
            param="model",
            code="model_not_found",
        )


def served_model(state: ServerState, name: str | None, *, adapters: bool = True) -> str:
    """The model's name for the answer: the given one, or the first one served. Raises the same
    errors as `require_model`."""
    if name is None:
        return state.model_names[0]
    require_model(state, name, adapters=adapters)
    return name


def anthropic_card(name: str, created: float, max_model_len: int) -> dict[str, Any]:
    """A model in the format of Anthropic's client, which uses the same routes."""
    card = {"type": "model", "id": name, "display_name": name, "created_at": utc_time(created)}
    return {**card, "max_input_tokens": max_model_len, "max_tokens": max_model_len}


def anthropic_list(cards: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "data": cards,
        "has_more": False,
        "first_id": cards[0]["id"],
        "last_id": cards[-1]["id"],
    }


class Models:
    def __init__(self, state: ServerState) -> None:
        self.state = state

    async def list(self, request: Request) -> Response:
        if "anthropic-version" in request.headers:
            return json_response(
                anthropic_list([self._anthropic_card(name) for name in self.state.model_names])
            )
        names = (*self.state.model_names, *self.state.engine.adapters)
        return json_response({"object": "list", "data": [self._card(name) for name in names]})

    async def get(self, request: Request) -> Response:
        name = request.path_params["id"]
        require_model(self.state, name)
        if "anthropic-version" in request.headers:
            return json_response(self._anthropic_card(name))
        return json_response(self._card(name))

    def _anthropic_card(self, name: str) -> dict[str, Any]:
        return anthropic_card(
            name, self.state.created, self.state.engine.config.model.max_model_len
        )

    def _card(self, name: str) -> dict[str, Any]:
        engine = self.state.engine
        sizes = {
            "max_model_len": engine.config.model.max_model_len,
            "vocab_size": engine.description.spec.vocab_size,
        }
        owner = {"owned_by": "slipstream", **sizes}
        lora = engine.adapters.get(name)
        of_adapter = (
            {} if lora is None else {"root": lora.path, "parent": self.state.model_names[0]}
        )
        return {"id": name, "object": "model", "created": self.state.created, **owner, **of_adapter}
