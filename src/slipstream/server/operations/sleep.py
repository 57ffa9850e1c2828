"""POST /sleep and /wake_up, GET /is_sleeping, as in vLLM: free the model's memory while no request
needs it.

A client of these routes can stop the service, so they are off without --enable-sleep-mode.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slipstream.server.http.errors import ApiError, bad_request
from slipstream.server.http.replies import json_response
from slipstream.server.state import ServerState


class Sleeping:
    def __init__(self, state: ServerState) -> None:
        self.state = state

    def routes(self) -> list[Route]:
        return [
            Route("/sleep", self.sleep, methods=["POST"]),
            Route("/wake_up", self.wake_up, methods=["POST"]),
            Route("/is_sleeping", self.is_sleeping),
        ]

    async def sleep(self, request: Request) -> Response:
        """Handle ?level=1 or 2. Requests in flight end first, which is vLLM's mode "wait"."""
        given = self._query(request, "level", "mode")
        level = given.get("level", "1")
        if level not in ("1", "2"):
            raise bad_request(
                f"level must be 1 (the KV cache) or 2 (the weights, too), got {level[:20]!r}",
                "level",
            )
        if given.get("mode", "wait") != "wait":
            raise bad_request(
                "mode: requests in flight end first, which is 'wait'; leave it out", "mode"
            )
        await self.state.interrupt_checks()
        await self.state.engine.sleep(int(level))
        return self._answer()

    async def wake_up(self, request: Request) -> Response:
        """Handle ?tags=weights&tags=kv_cache; both or none, because all memory is taken again at
        once."""
        self._query(request, "tags")
        tags = request.query_params.getlist("tags")
        if tags and set(tags) != {"weights", "kv_cache"}:
            raise bad_request(
                f"the whole model wakes at once; leave tags out, got {', '.join(tags)[:40]}", "tags"
            )
        await self.state.engine.wake_up()
        return self._answer()

    async def is_sleeping(self, request: Request) -> Response:
        self._query(request)
        return self._answer()

    def _query(self, request: Request, *known: str) -> dict[str, str]:
        if not self.state.settings.enable_sleep_mode:
            raise ApiError(
                403,
                "start the server with --enable-sleep-mode to use this route",
                code="sleep_disabled",
            )
        given = dict(request.query_params)
        if unknown := sorted(set(given) - set(known)):
            takes = f"takes {' and '.join(known)}" if known else "takes none"
            raise bad_request(
                f"{unknown[0][:40]!r} is not a parameter of this route, which {takes}",
                unknown[0][:40],
            )
        return given

    def _answer(self) -> Response:
        return json_response({"is_sleeping": self.state.engine.is_sleeping})
