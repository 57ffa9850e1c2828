"""Rated answers as data: conversations of an audit log (`--audit-prompts --audit-answers`) with the
ratings of `/v1/feedback`.

A row is a conversation in chat format, whose last message is the rated answer as the model wrote it:

    {"messages": [{"role", "content"}, …], "rating": "up", "ratings": {"up": 2, "down": 0},
     "score": 0.9, "comments": ["…"], "model": "…", "id": "…"}

1. Ratings count that came with the key of the request, and those of raters that the export names (`raters`).
   Of others one would not know whether they saw the answer: who has an id may not be its reader.
2. Each key's last rating of an answer counts, and each rating without a key. `rating` is that of most;
   an answer that as many rate up as down is left out. `score` is the mean of the scores.
3. Only whole conversations of texts, in the turns that training reads. All else is left out, and
   `Skipped` counts it by reason.
4. What `previous_response_id` continues is joined from the log. So is an answer that the request
   began (`continue_final_message`, Anthropic's last assistant message).
5. Keys, addresses and times stay in the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from slipstream.errors import ConfigError

Rating = Literal["up", "down"]

Skipped = Counter[str]
"""Number of rated answers left out, by reason, and of ratings that don't count."""

Requests: TypeAlias = dict[str, Mapping[str, Any]]
"""A log's lines of requests, by id."""

ANYONE = "any"
"""Value in `raters` that means every key."""

_ELSEWHERE = "earlier turns are elsewhere"


class _Request(msgspec.Struct):
    """Fields of a logged request that are read here."""

    id: str
    key: str | None = None
    body: str | None = None
    answers: list[str] | None = None
    finish_reasons: list[str | None] | None = None


class _Feedback(msgspec.Struct):
    """Fields of a logged rating that are read here."""

    request: str
    rating: Rating
    key: str | None = None
    score: float | None = None
    comment: str | None = None


_WRITTEN: dict[str, Any] = {"request": _Request, "feedback": _Feedback}


def rows(
    records: Iterable[Mapping[str, Any]],
    skipped: Skipped,
    *,
    rating: Rating | None = None,
    raters: Collection[str] = (),
) -> Iterator[dict[str, Any]]:
    """The rated answers of a log, oldest first; with `rating`, only those of one rating. `raters`:
    keys whose ratings count for every answer: ids in the log, or at least their first eight letters.
    ConfigError if no rating has one of them, or if a line lacks what the server writes."""
    requests: Requests = {}
    given: dict[str, dict[str | int, Mapping[str, Any]]] = {}  # by answer, then key
    for record in records:
        kind = str(record.get("kind"))
        try:
            msgspec.convert(record, _WRITTEN.get(kind, dict))
        except msgspec.ValidationError as error:
            message = f"line {record.get('seq')} of the log ({kind}) is not as a server writes it: {error}"
            raise ConfigError(message, field="audit_log") from None
        if kind == "request":
            requests[record["id"]] = record
        elif kind == "feedback":
            own = given.setdefault(record["request"], {})
            # without a key: each rating counts as another rater
            own[record.get("key") or len(own)] = record
    keys = {
        key for all_given in given.values() for r in all_given.values() if (key := r.get("key"))
    }
    for rater in raters:
        if rater != ANYONE and not any(_names(rater, key) for key in keys):
            raise ConfigError(f"raters: no rating in the log has the key {rater!r}", field="raters")
    for id_, all_given in given.items():
        own_key = requests[id_].get("key") if id_ in requests else None
        by_key = {
            who: record
            for who, record in all_given.items()
            if id_ not in requests
            or record.get("key") == own_key
            or _is_among(record.get("key"), raters)
        }
        if len(by_key) < len(all_given):
            skipped["ratings with another key than the request's"] += len(all_given) - len(by_key)
        if not by_key:
            continue
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


def _is_among(key: str | None, raters: Collection[str]) -> bool:
    return ANYONE in raters or (key is not None and any(_names(rater, key) for rater in raters))


def _names(rater: str, key: str) -> bool:
    return rater == key or (len(rater) >= 8 and key.startswith(rater))


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
    """A request's messages and its answer as a chat. The request may be of any chat protocol:
    OpenAI's chat or responses, Anthropic's messages, Ollama's chat or generate."""
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
