"""Rated answers as data: conversations of an audit log (`--audit-prompts --audit-answers`) with the
ratings of `/v1/feedback`.

A row is a conversation in chat format, whose last message is the rated answer as the model wrote it:

    {"messages": [{"role", "content"}, …], "rating": "up", "ratings": {"up": 2, "down": 0},
     "score": 0.9, "comments": ["…"], "model": "…", "id": "…"}

1. Each key's last rating of an answer counts, and each rating without a key. `rating` is that of most;
   an answer that as many rate up as down is left out. `score` is the mean of the scores.
2. Only whole conversations of texts, in the turns that training reads. All else is left out, and
   `Skipped` counts it by reason.
3. What `previous_response_id` continues is joined from the log. So is an answer that the request
   began (`continue_final_message`, Anthropic's last assistant message).
4. Keys, addresses and times stay in the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

Rating = Literal["up", "down"]

Skipped = Counter[str]
"""Number of rated answers that are left out, by reason."""

Requests: TypeAlias = dict[str, Mapping[str, Any]]
"""A log's lines of requests, by id."""

_ELSEWHERE = "earlier turns are elsewhere"


def rows(
    records: Iterable[Mapping[str, Any]], skipped: Skipped, *, rating: Rating | None = None
) -> Iterator[dict[str, Any]]:
    """The rated answers of a log, oldest first; of one rating only, if it is given."""
    requests: Requests = {}
    given: dict[str, dict[str | int, Mapping[str, Any]]] = {}  # by answer, then key
    for record in records:
        if record["kind"] == "request":
            requests[record["id"]] = record
        elif record["kind"] == "feedback":
            own = given.setdefault(record["request"], {})
            own[record.get("key") or len(own)] = record  # without a key: one voter a rating
    for id_, by_key in given.items():
        votes = Counter(f["rating"] for f in by_key.values())
        if votes["up"] == votes["down"]:
            skipped["rated up as often as down"] += 1
            continue
        most = "up" if votes["up"] > votes["down"] else "down"
        if rating is not None and most != rating:
            continue
        try:
            found = _conversation(id_, requests)
        except _LeftOutError as reason:
            skipped[str(reason)] += 1
            continue
        scores = [f["score"] for f in by_key.values() if "score" in f]
        comments = [f["comment"] for f in by_key.values() if "comment" in f]
        yield {
            "messages": found,
            "rating": most,
            "ratings": {"up": votes["up"], "down": votes["down"]},
            **({"score": sum(scores) / len(scores)} if scores else {}),
            **({"comments": comments} if comments else {}),
            "model": requests[id_].get("model"),
            "id": id_,
        }


class _LeftOutError(Exception):
    """The reason why an answer is left out."""


def _conversation(id_: str, requests: Requests) -> list[dict[str, str]]:
    """The messages up to the answer `id_`, which is the last. Raises _LeftOutError."""
    if id_ not in requests:
        raise _LeftOutError("its request is not in the log")
    request = requests[id_]
    if not _has_texts(request):
        raise _LeftOutError(
            "no texts: the server ran without --audit-prompts --audit-answers, or the request failed"
        )
    if len(request["answers"]) != 1:
        raise _LeftOutError("several answers")
    (ended,) = request.get("finish_reasons", ["stop"])
    if ended != "stop":
        by = "max_tokens or the context's end" if ended == "length" else ended
        raise _LeftOutError(f"cut off by {by}")
    try:
        messages = _exchange(request)
        body = msgspec.json.decode(request["body"])
        system = body.get("system") or body.get("instructions")
        while before := body.get("previous_response_id"):
            request = requests.get(before[-32:], {})
            if not _has_texts(request):
                raise _LeftOutError(_ELSEWHERE)
            messages = [*_exchange(request), *messages]
            body = msgspec.json.decode(request["body"])
        if system:
            messages = [_message({"role": "system", "content": system}), *messages]
    except (msgspec.DecodeError, LookupError, TypeError, ValueError):
        raise _LeftOutError("more than texts") from None
    if not all(m["content"].strip() for m in messages):
        raise _LeftOutError("an empty text")
    turns = [m["role"] for m in messages if m is not messages[0] or m["role"] != "system"]
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise _LeftOutError("turns that don't alternate between user and assistant")
    return messages


def _has_texts(request: Mapping[str, Any]) -> bool:
    return "body" in request and bool(request.get("answers"))


def _exchange(request: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages that a request has itself, and its answer: of chat, Anthropic's messages, OpenAI's
    responses or Ollama's two."""
    body, route = msgspec.json.decode(request["body"]), request.get("route")
    said = body.get("messages") or body.get("input")
    if said is None:
        if route != "/api/generate" or body.get("raw"):
            raise _LeftOutError("a raw prompt, which is no conversation")
        said = [{"role": "user", "content": body["prompt"], "images": body.get("images")}]
    if body.get("tools"):
        raise _LeftOutError("tools")
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    if any(m.get("type") == "item_reference" or set(m) == {"id"} for m in said):
        raise _LeftOutError(_ELSEWHERE)
    messages, begun = [_message(m) for m in said], ""
    continues = body.get("continue_final_message") or route == "/v1/messages"
    if continues and messages[-1]["role"] == "assistant":
        begun = messages.pop()["content"]
    return [*messages, {"role": "assistant", "content": begun + request["answers"][0]}]


def _message(message: dict[str, Any]) -> dict[str, str]:
    role, content = message["role"], message["content"]
    if role not in ("system", "developer", "user", "assistant"):
        raise ValueError(role)
    if any(message.get(name) for name in ("tool_calls", "images", "audio")):
        raise ValueError("more than a text")
    if isinstance(content, list):
        if any(part["type"] not in ("text", "input_text", "output_text") for part in content):
            raise ValueError("a part is no text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise TypeError("no text")
    return {"role": "system" if role == "developer" else role, "content": content}
