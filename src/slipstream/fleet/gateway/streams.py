"""Reads a replica's stream: removes the marks (`server.operations.fleet`), and reports how the stream ended."""

from __future__ import annotations

import re

from starlette.types import Scope

from slipstream.server.http.errors import ApiError, error_body

_MARK = re.compile(rb":(?:t ([\d ]*)|e (\d+ \d+))\n")  # where a line begins

ELSEWHERE = frozenset(
    {
        "engine_dead",
        "engine_asleep",
        "engine_unhealthy",
        "engine_error",
        "shutting_down",
        "internal",
    }
)
"""Codes of errors that another replica does not have."""


class MarkedStream:
    """A stream with marks, read part by part."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # what they brought was handed out
        self.ended: tuple[int, int] | None = (
            None  # the tokens of prompt and answer, once it came to its end
        )
        self.rest = b""  # not known yet to be whole

    def feed(self, data: bytes) -> bytes:
        """What may be sent on."""
        data = self.rest + data if self.rest else data
        parts, begin, end = [], 0, len(data)
        at = 0 if data.startswith(b":") else data.find(b"\n:") + 1 or end
        while at < end:
            if (mark := _MARK.match(data, at)) is None:
                at = data.find(b"\n:", at) + 1 or end
                continue
            parts.append(data[begin:at])
            begin = mark.end()
            if mark[2]:
                prompt, answer = mark[2].split()
                self.ended = int(prompt), int(answer)
            elif mark[1]:
                self.tokens += map(int, mark[1].split())
            at = begin if data.startswith(b":", begin) else data.find(b"\n:", begin) + 1 or end
        self.rest = data[begin:]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def broken(self) -> None:
        """The rest will come again, from elsewhere."""
        self.rest = b""

    @property
    def error_code(self) -> str | None:
        """Of the error event that a replica ended the stream with, if it did."""
        found = re.search(rb'"code":"(\w+)"', self.rest) if b'"error"' in self.rest else None
        return None if found is None else found[1].decode()


def error_event(scope: Scope, error: ApiError) -> bytes:
    """What ends a stream that can't go on, in the shape of its route's protocol."""
    path, body = scope["path"], error_body(scope, error)
    if path.startswith("/api/"):
        return body + b"\n"
    name = b"event: error\n" if path.startswith("/v1/messages") else b""
    return name + b"data: " + body + b"\n\n"
