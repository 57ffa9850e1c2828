"""POST /v1/feedback: a reader's rating of an answer, linked to the request by its id. It is a line
of the audit log.

An id has 122 random bits, so only somebody who has seen the answer knows it. The line has the
rater's key; an export counts the rating if that is the request's own key (`rated`).
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slipstream.server.http.decoding import register
from slipstream.server.http.errors import ApiError, bad_request
from slipstream.server.http.limits import counted, read_as
from slipstream.server.http.replies import json_response
from slipstream.server.state import ServerState

_ID = re.compile(r"(?:[a-z]+[-_])?([0-9a-f]{32})")


class FeedbackRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/feedback: `request_id` is an answer's `id` or its header `x-request-id`"""

    request_id: Annotated[str, Meta(max_length=100)]
    rating: Literal["up", "down"]
    score: Annotated[float, Meta(ge=0, le=1)] | None = None
    comment: Annotated[str, Meta(max_length=2000)] | None = None


register(FeedbackRequest)


def routes(state: ServerState) -> list[Route]:
    async def feedback(request: Request) -> Response:
        audit = state.observers.audit
        if audit is None:
            raise ApiError(
                403,
                "start the server with --audit-log FILE to keep feedback",
                code="feedback_disabled",
            )
        body = await read_as(FeedbackRequest, request, state)
        match = _ID.fullmatch(body.request_id)
        if match is None:
            raise bad_request("request_id is not the id of an answer", "request_id")
        owner = request.scope["record"].owner or None
        given = {"rating": body.rating, "score": body.score, "comment": body.comment}
        audit.write("feedback", request=match[1], key=owner, **given)
        state.metrics.feedback[body.rating] += 1
        return json_response({"request_id": match[1], "rating": body.rating})

    return [Route("/v1/feedback", counted(state, feedback), methods=["POST"])]
