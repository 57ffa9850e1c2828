"""Rated answers as data: conversations of an audit log (`--audit-prompts --audit-answers`) with the
ratings of `/v1/feedback`.

A row is a conversation in chat format, whose last message is the rated answer as the model wrote it:

    {"messages": [{"role", "content"}, …], "rating": "up", "ratings": {"up": 2, "down": 0},
     "score": 0.9, "comments": ["…"], "model": "…", "id": "…"}

1. Each key's last rating of an answer counts. `rating` is that of most; an answer that as many rate up
   as down is left out. `score` is the mean of the scores.
2. Only texts: a conversation with pictures, sounds or tools' results is left out, and one of several
   answers, since nobody said which was rated. `Skipped` counts them.
3. Keys, addresses and times stay in the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

Rating = Literal["up", "down"]

Skipped = Counter[str]
"""Number of rated answers that are left out, by reason."""


def rows(
    records: Iterable[Mapping[str, Any]], skipped: Skipped, *, rating: Rating | None = None
) -> Iterator[dict[str, Any]]:
    """The rated answers of a log, oldest first; of one rating only, if it is given."""
    requests: dict[str, Mapping[str, Any]] = {}
    given: dict[str, dict[str, Mapping[str, Any]]] = {}  # by answer, then key
    for record in records:
        if record["kind"] == "request":
            requests[record["id"]] = record
        elif record["kind"] == "feedback":
            own = given.setdefault(record["request"], {})
            own[record.get("key") or ""] = record
    for id_, by_key in given.items():
        votes = Counter(f["rating"] for f in by_key.values())
        if votes["up"] == votes["down"]:
            skipped["rated up as often as down"] += 1
            continue
        most = "up" if votes["up"] > votes["down"] else "down"
        if rating is not None and most != rating:
            continue
        found = _conversation(requests.get(id_))
        if isinstance(found, str):
            skipped[found] += 1
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


def _conversation(request: Mapping[str, Any] | None) -> list[dict[str, str]] | str:
    """The messages, or why there are none."""
    if request is None:
        return "its request is not in the log"
    if "body" not in request or "answers" not in request:
        return "no texts: the server ran without --audit-prompts --audit-answers, or the request failed"
    if len(request["answers"]) != 1:
        return "several answers"
    try:
        body = msgspec.json.decode(request["body"])
        messages = [_message(m) for m in _messages(body)]
    except (msgspec.DecodeError, LookupError, TypeError, ValueError):
        return "more than texts"
    return [*messages, {"role": "assistant", "content": request["answers"][0]}]


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a body of chat, completions, Anthropic's messages or OpenAI's responses."""
    system = body.get("system") or body.get("instructions")
    first = [{"role": "system", "content": system}] if system else []
    said = body.get("messages") or body.get("input") or body["prompt"]
    if isinstance(said, str):
        return [*first, {"role": "user", "content": said}]
    return [*first, *said]


def _message(message: dict[str, Any]) -> dict[str, str]:
    role, content = message["role"], message["content"]
    if role not in ("system", "developer", "user", "assistant") or message.get("tool_calls"):
        raise ValueError(role)
    if isinstance(content, list):
        if any(part["type"] not in ("text", "input_text", "output_text") for part in content):
            raise ValueError("a part is no text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise TypeError("no text")
    return {"role": "system" if role == "developer" else role, "content": content}
