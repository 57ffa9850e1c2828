"""OpenAI's /v1/responses: one answer, streamed or not, stored so that later requests can continue
it.

A body is translated into a chat (`responses_body`) and answered like one. The differences:

1. The output is a list of items: reasoning, a message, calls. A stream sends each item from
   beginning to end before the next.
2. An answer is stored with the items of its request, unless the body says store=false or the server
   stores none. That happens before the client gets the last event.
3. `previous_response_id` prepends the conversation up to that answer to the input, without its
   instructions.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slipstream.engine.text.tools import Reading
from slipstream.messages.finish_reason import FinishReason
from slipstream.outputs import PositionLogprobs
from slipstream.server.answers.blocks import BlockAnswer, ContentBlock, sse
from slipstream.server.answers.generation import Answer, Write, encode
from slipstream.server.answers.route import GenerationRoute, renamed
from slipstream.server.http.decoding import decode, decode_raw
from slipstream.server.http.errors import ApiError, bad_request
from slipstream.server.http.limits import counted, in_flight, read_as
from slipstream.server.http.record import RequestRecord
from slipstream.server.http.replies import json_response, page_answer, page_options
from slipstream.server.openai import chat
from slipstream.server.openai.messages import Message
from slipstream.server.openai.models import served_model
from slipstream.server.openai.protocol import ChatRequest
from slipstream.server.openai.response_store import CONVERSATIONS, ResponseStore, StoredResponse
from slipstream.server.openai.responses_body import (
    MAX_ITEMS,
    Item,
    ItemReference,
    ResponseInput,
    ResponsesRequest,
    as_messages,
    custom_input,
    read_items,
)
from slipstream.server.state import ServerState

MAX_LISTED = 100


class ResponseAnswer(BlockAnswer):
    id_prefix = "resp_"

    def __init__(
        self,
        asked: ResponsesRequest,
        items: list[dict[str, Any]],
        owner: str,
        reading: Reading | None,
        *args: Any,
    ) -> None:
        super().__init__(reading, *args)
        self.asked, self.items, self.owner = asked, items, owner
        self.keeps = self.state.responses is not None and asked.store is not False
        self._sequence = 0
        self._tools = asked.functions[0]

    # --- The stream ----------------------------------------------------------------------

    def _event(self, kind: str, data: dict[str, Any]) -> bytes:
        self._sequence += 1
        return sse(kind, {"sequence_number": self._sequence - 1, **data})

    def opening(self) -> bytes:
        begun = {"response": self.response("in_progress")}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def begin(self, block: ContentBlock) -> bytes:
        place = {"output_index": block.index}
        item = self._item(block, "in_progress")
        if block.kind == "call":
            return self._event("response.output_item.added", {**place, "item": item})
        part = item["content"][0]
        item = {**item, "content": []}
        added = self._event("response.output_item.added", {**place, "item": item})
        return added + self._event("response.content_part.added", {**_place(block), "part": part})

    def more(self, block: ContentBlock, text: str, logprobs: Sequence[PositionLogprobs]) -> bytes:
        if block.kind == "call" and self._is_custom(block):
            return b""  # its text is a JSON string, parsed when it is complete
        data = {**_place(block), "delta": text}
        if block.kind == "text":
            data["logprobs"] = [_logprob(position) for position in logprobs]
        return self._event(f"response.{_WHAT[block.kind]}.delta", data)

    def close(self, block: ContentBlock) -> bytes:
        item = self._item(block, "incomplete" if self.ended and self._cut else "completed")
        if block.kind == "call" and self._is_custom(block):
            kind, place = "response.custom_tool_call_input", _place(block)
            events = self._event(f"{kind}.delta", {**place, "delta": item["input"]})
            events += self._event(f"{kind}.done", {**place, "input": item["input"]})
            return events + self._event(
                "response.output_item.done", {"output_index": block.index, "item": item}
            )
        data = {**_place(block), "arguments" if block.kind == "call" else "text": block.text}
        if block.kind == "text":
            data["logprobs"] = item["content"][0]["logprobs"]
        if block.kind == "call":
            data["name"] = item["name"]
        events = self._event(f"response.{_WHAT[block.kind]}.done", data)
        if block.kind != "call":
            events += self._event(
                "response.content_part.done", {**_place(block), "part": item["content"][0]}
            )
        return events + self._event(
            "response.output_item.done", {"output_index": block.index, "item": item}
        )

    def end(self) -> bytes:
        events = self._take_events()
        return events + self._event(
            f"response.{self._status}", {"response": self.response(self._status)}
        )

    def failure(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = {**self.response("failed"), "error": {"code": code, "message": error.message}}
        return self._event("response.failed", {"response": failed})

    # --- The answer as a whole -----------------------------------------------------------

    async def events(self, write: Write | None) -> AsyncGenerator[bytes, None]:
        async with aclosing(super().events(write)) as events:
            async for some in events:
                yield some
        if self.keeps:
            assert self.state.responses is not None
            id_, before = str(self.identity["id"]), self.asked.previous_response_id
            stored = StoredResponse(id_, before, self.response(self._status), self.items)
            self.keeps = await self.state.responses.put(self.owner, stored)

    def collected(self) -> bytes:
        return encode(self.response(self._status))

    @property
    def _cut(self) -> bool:
        return self.finish_reason == FinishReason.LENGTH

    @property
    def _status(self) -> str:
        return "incomplete" if self._cut else "completed"

    def response(self, status: str) -> dict[str, Any]:
        """OpenAI's response object for the answer so far."""
        asked, form = self.asked, self.asked.text.format if self.asked.text is not None else None
        ended, last = status in ("completed", "incomplete"), len(self.blocks) - 1
        states = {last: status} if ended else {}
        return {
            "id": self.identity["id"],
            "object": "response",
            "created_at": self.identity["created"],
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata or {},
            "model": self.body.model,
            "output": [self._item(b, states.get(b.index, "completed")) for b in self.blocks]
            if status != "in_progress"
            else [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {
                "effort": asked.reasoning.effort if asked.reasoning is not None else None,
                "summary": None,
            },
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": self.keeps,
            "temperature": self.sampling.temperature,
            "text": {"format": {"type": "text"} if form is None else _without_none(form)},
            "tool_choice": "auto"
            if asked.tool_choice is None
            else msgspec.to_builtins(asked.tool_choice),
            "tools": decode_raw(encode(asked.tools or []), "tools"),
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": self.sampling.top_p,
            "truncation": "disabled",
            "usage": self.response_usage() if ended else None,
            "user": asked.user,
        }

    def response_usage(self) -> dict[str, Any]:
        usage = self.usage()
        # With speculation's counts; OpenAI's API has no field for them here.
        details = usage.get("completion_tokens_details", {})
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0, **details},
            "total_tokens": usage["total_tokens"],
        }

    def _item(self, block: ContentBlock, status: str) -> dict[str, Any]:
        text, content = block.text, list[dict[str, Any]]()
        item: dict[str, Any] = {"id": _id(block), "status": status}
        match block.kind:
            case "reasoning":
                content = [{"type": "reasoning_text", "text": text}]
                return {
                    **item,
                    "type": "reasoning",
                    "summary": [],
                    "content": content,
                    "encrypted_content": None,
                }
            case "text":
                logprobs = [_logprob(position) for position in block.logprobs]
                content = [
                    {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
                ]
                return {**item, "type": "message", "role": "assistant", "content": content}
            case "call":
                tool = self._tools.get(block.name)
                called = {"call_id": f"call_{block.id}", "name": tool.name if tool else block.name}
                if tool is not None and tool.namespace is not None:
                    called["namespace"] = tool.namespace
                if self._is_custom(block):
                    given = custom_input(text) if text else ""
                    return {**item, "type": "custom_tool_call", **called, "input": given}
                return {**item, "type": "function_call", **called, "arguments": text}

    def _is_custom(self, block: ContentBlock) -> bool:
        tool = self._tools.get(block.name)
        return tool is not None and tool.is_custom


_WHAT = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
_IDS = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}


def _id(block: ContentBlock) -> str:
    return _IDS[block.kind] + block.id


def _place(block: ContentBlock) -> dict[str, Any]:
    place = {"item_id": _id(block), "output_index": block.index}
    return place if block.kind == "call" else {**place, "content_index": 0}


def _logprob(position: PositionLogprobs) -> dict[str, Any]:
    def entry(token: Any) -> dict[str, Any]:
        return {"token": token.token, "logprob": token.logprob, "bytes": list(token.token_bytes)}

    return {**entry(position.chosen), "top_logprobs": [entry(token) for token in position.top]}


def _without_none(value: Any) -> dict[str, Any]:
    return {k: v for k, v in msgspec.to_builtins(value).items() if v is not None}


def _with_ids(items: list[dict[str, Any]], request: str) -> list[dict[str, Any]]:
    """A request's items in the form that OpenAI returns them: each has an id, and a message has
    parts."""
    found = []
    for i, item in enumerate(items):
        kind = item["type"]
        own = {k: v for k, v in item.items() if v is not None}
        own.setdefault("id", f"{_GIVEN.get(kind, 'item_')}{request}_{i}")
        own.setdefault("status", "completed")
        if kind == "message" and isinstance(own["content"], str):
            part = "output_text" if own["role"] == "assistant" else "input_text"
            own["content"] = [
                {
                    "type": part,
                    "text": own["content"],
                    **({"annotations": []} if part == "output_text" else {}),
                }
            ]
        found.append(own)
    return found


_GIVEN = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
}


# --- From a body to a chat -----------------------------------------------------------


async def _history(state: ServerState, owner: str, previous: str | None) -> list[StoredResponse]:
    if previous is None:
        return []
    if state.responses is None:
        message = "this server keeps no answers (--max-stored-responses 0); send the conversation"
        raise bad_request(message, "previous_response_id")
    found = await state.responses.conversation(
        owner, previous, max_bytes=state.settings.max_body_bytes
    )
    if isinstance(found, str):
        message = f"response {previous[:100]!r} does not exist"
        if found != previous:
            message = f"response {found[:100]!r}, which this one continues, is no longer kept; send the conversation"
        raise ApiError(
            404, message, param="previous_response_id", code="previous_response_not_found"
        )
    return found


def _past(history: Sequence[StoredResponse]) -> list[tuple[Message, str]]:
    path = "previous_response_id"
    past = [item for stored in history for item in (*stored.items, *stored.answer["output"])]
    if len(past) > MAX_ITEMS:
        raise bad_request(
            f"the conversation has more than {MAX_ITEMS} items; send the important ones as input",
            path,
        )
    return as_messages(read_items(past, path), path)


async def _resolved(
    state: ServerState, owner: str, given: str | list[dict[str, Raw]]
) -> str | list[dict[str, Any]]:
    """The input with each `item_reference` replaced by that item of a stored answer. A 400 names a
    missing one."""
    if isinstance(given, str):
        return given
    references = dict[int, str]()
    for i, item in enumerate(given):
        kind = bytes(item.get("type", b""))
        # Clients may leave the type out: an item with an id and nothing else is a reference.
        if kind == b'"item_reference"' or (not kind and set(item) == {"id"}):
            made = decode(
                ItemReference,
                msgspec.json.encode({**item, "type": "item_reference"}),
                f"input[{i}].",
            )
            references[i] = made.id or ""
    if not references:
        return list(given)
    found: dict[str, dict[str, Any]] = {}
    if state.responses is not None:
        found = await state.responses.items(owner, list(dict.fromkeys(references.values())))
    for i, id_ in references.items():
        if id_ not in found:
            raise bad_request(
                f"item {id_[:100]!r} is not kept here; send the item itself, or store=false before",
                f"input[{i}].id",
            )
    return [found[references[i]] if i in references else item for i, item in enumerate(given)]


@dataclass(frozen=True, slots=True)
class _Chat:
    """A body as a chat. `items`: its addition to the conversation; `places`: the path in the body
    of each message."""

    body: ChatRequest
    items: list[Item]
    places: list[str]


async def _as_chat(state: ServerState, body: ResponseInput, owner: str) -> _Chat:
    history = await _history(state, owner, body.previous_response_id)
    messages = (
        [(Message(role="system", content=body.instructions), "instructions")]
        if body.instructions
        else []
    )
    messages += await CONVERSATIONS.run(partial(_past, history))
    items = read_items(await _resolved(state, owner, body.input), "input")
    messages += as_messages(items, "input")
    made = body.chat([message for message, _ in messages])
    with renamed(body.param):
        made.check()
    return _Chat(made, items, [place for _, place in messages])


async def prepare(state: ServerState, body: ResponsesRequest, record: RequestRecord) -> Answer:
    if body.store and state.responses is None:
        raise bad_request(
            "this server keeps no answers (--max-stored-responses 0); leave store out", "store"
        )
    made = await _as_chat(state, body, record.owner)
    given = _with_ids(decode_raw(encode(made.items), "input"), record.id)
    with renamed(partial(body.param, places=made.places)):
        return await chat.prepare(
            state, made.body, record, answer=partial(ResponseAnswer, body, given, record.owner)
        )


# --- Routes --------------------------------------------------------------------------


class ResponsesRoutes:
    def __init__(self, state: ServerState) -> None:
        self.state = state

    async def count(self, request: Request) -> Response:
        state = self.state
        body = await read_as(ResponseInput, request, state)
        body.check()
        body.model = served_model(state, body.model)
        async with in_flight(state, request.receive, request.scope["record"]):
            made = await _as_chat(state, body, request.scope["record"].owner)
            with renamed(partial(body.param, places=made.places)):
                prompt = await chat.prompt_of(state, made.body)
        return json_response(
            {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}
        )

    async def get(self, request: Request) -> Response:
        for name in request.query_params:
            if name not in ("include", "include[]", "include_obfuscation", "stream"):
                raise bad_request(
                    f"{name!r} is not supported when an answer is read", "starting_after"
                )
        if request.query_params.get("stream", "false") != "false":
            raise bad_request(
                "a kept answer is complete and can't be streamed; leave stream out", "stream"
            )
        return json_response((await self._stored(request)).answer)

    async def delete(self, request: Request) -> Response:
        id_ = request.path_params["id"]
        if not await self._store.delete(request.scope["record"].owner, id_):
            raise _unknown(id_)
        return json_response({"id": id_, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        await self._stored(request)
        raise bad_request(
            "only an answer in the background can be cancelled, and this server has none; close the connection"
        )

    async def items(self, request: Request) -> Response:
        """List the input of an answer: the conversation before it, and its request's items."""
        id_ = request.path_params["id"]
        after, limit, newest_first = page_options(
            request, "include", "include[]", most=MAX_LISTED, usual=20
        )
        async with in_flight(self.state, request.receive, request.scope["record"]):
            found = await self._store.conversation(
                request.scope["record"].owner, id_, max_bytes=self.state.settings.max_body_bytes
            )
        if isinstance(found, str):
            raise _unknown(found)
        items = [
            item for stored in found[:-1] for item in (*stored.items, *stored.answer["output"])
        ] + found[-1].items
        if newest_first:
            items.reverse()
        if after is not None:
            places = [i for i, item in enumerate(items) if item["id"] == after]
            if not places:
                raise bad_request(f"there is no item {after[:100]!r}", "after")
            items = items[places[0] + 1 :]
        return page_answer(items, limit)

    @property
    def _store(self) -> ResponseStore:
        if self.state.responses is None:
            raise ApiError(
                404,
                "this server keeps no answers (--max-stored-responses 0)",
                code="response_not_found",
            )
        return self.state.responses

    async def _stored(self, request: Request) -> StoredResponse:
        id_ = request.path_params["id"]
        async with in_flight(self.state, request.receive, request.scope["record"]):
            found = await self._store.get(request.scope["record"].owner, id_)
        if found is None:
            raise _unknown(id_)
        return found


def _unknown(id_: str) -> ApiError:
    return ApiError(404, f"response {id_[:100]!r} does not exist", code="response_not_found")


def routes(state: ServerState) -> list[Route]:
    kept = ResponsesRoutes(state)
    one = "/v1/responses/{id}"
    return [
        *(
            Route(path, GenerationRoute(state, ResponsesRequest, prepare), methods=["POST"])
            for path in ("/v1/responses", "/responses")  # llama.cpp's server has it at the root
        ),
        *(
            Route(path, counted(state, kept.count), methods=["POST"])
            for path in ("/v1/responses/input_tokens", "/responses/input_tokens")
        ),
        Route(one, kept.get, methods=["GET"]),
        Route(one, kept.delete, methods=["DELETE"]),
        Route(f"{one}/cancel", kept.cancel, methods=["POST"]),
        Route(f"{one}/input_items", kept.items, methods=["GET"]),
    ]
