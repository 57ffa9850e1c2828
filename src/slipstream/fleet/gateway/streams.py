"""Reads a replica's stream: removes the marks (`server.operations.fleet`), and reports how the
stream ended."""

from __future__ import annotations

import re

from starlette.types import Scope

from slipstream.server.http.errors import ApiError, error_body

_MARK = re.compile(rb":(?:t ([\d ]*)|e (\d+ \d+))\n")  # at the beginning of a line

ENGINE_DEATHS = frozenset({"engine_dead", "engine_killed"})
"""Error codes of requests that were running in an engine when it died."""

ELSEWHERE = ENGINE_DEATHS | frozenset(
    {
        "engine_down",
        "engine_asleep",
        "engine_unhealthy",
        "engine_error",
        "shutting_down",
        "internal",
    }
)
"""Error codes that concern a replica's own state: another replica may answer the request."""


class MarkedStream:
    """A replica's stream, read part by part. Marks, which report tokens to the gateway, are
    removed."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # tokens whose text was passed on
        # numbers of tokens of prompt and answer, after the end
        self.ended: tuple[int, int] | None = None
        self.rest = b""  # data that may be an incomplete event

    def feed(self, data: bytes) -> bytes:
        """Add a part of the stream; returns the complete events without marks."""
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
        """Drop an incomplete event, because the next replica sends it again."""
        self.rest = b""

    @property
    def error_code(self) -> str | None:
        """Code of the error event that ended the stream; None without one."""
        found = re.search(rb'"code":"(\w+)"', self.rest) if b'"error"' in self.rest else None
        return None if found is None else found[1].decode()


def error_event(scope: Scope, error: ApiError) -> bytes:
    """An event that ends a broken stream, in the format of its route's protocol."""
    path, body = scope["path"], error_body(scope, error)
    if path.startswith("/api/"):
        return body + b"\n"
    name = b"event: error\n" if path.startswith("/v1/messages") else b""
    return name + b"data: " + body + b"\n\n"
