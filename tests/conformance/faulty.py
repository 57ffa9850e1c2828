"""A server with one fault: a transport that changes what goes to a real server, or what comes back."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import httpx


@dataclass
class Fault:
    """`ask` changes a request's body in place; `reply` changes (status, headers, text) of what comes back."""

    check: str
    protocol: str = "chat"
    ask: Callable | None = None
    reply: Callable | None = None
    keeps: bool = False  # a client that goes away does not end its request
    needs: str = ""  # "reasoning", "encoder", "key" or "places": the server that the check is for

    def __str__(self):
        return f"{self.protocol}-{self.check}"


class Chunks(httpx.AsyncByteStream):
    def __init__(self, chunks):
        self.chunks = chunks

    async def __aiter__(self):
        while chunk := await self.chunks.get():
            yield chunk


class FaultyTransport(httpx.AsyncBaseTransport):
    def __init__(self, fault):
        self.fault, self.inner = (
            fault,
            httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None)),
        )
        self.kept = set()
        self.count = 0

    async def handle_async_request(self, request):
        self.count += 1
        sent = SimpleNamespace(path=request.url.path, method=request.method, number=self.count)
        content = await request.aread()
        try:
            sent.body = json.loads(content)
        except ValueError:
            sent.body = None
        if self.fault.ask and isinstance(sent.body, dict):
            self.fault.ask(sent.body)
            content = json.dumps(sent.body).encode()
        headers = {k: v for k, v in request.headers.items() if k not in ("content-length", "host")}
        forward = httpx.Request(request.method, request.url, headers=headers, content=content)
        forward.extensions = request.extensions
        if self.fault.keeps:
            chunks = asyncio.Queue()
            self.kept.add(asyncio.create_task(self.keep(forward, chunks)))
            status, headers = await chunks.get()
            stream = Chunks(chunks)
            return httpx.Response(status, headers=headers, stream=stream, request=request)
        reply = await self.forward(forward)
        if self.fault.reply:
            self.fault.reply(sent, reply)
        body = reply.text if isinstance(reply.text, bytes) else reply.text.encode()
        return httpx.Response(reply.status, headers=reply.headers, content=body, request=request)

    async def keep(self, request, chunks):
        """Reads an answer to its end, whether or not somebody still takes the chunks."""
        there = await self.inner.handle_async_request(request)
        chunks.put_nowait((there.status_code, there.headers))
        async for chunk in there.aiter_raw():
            chunks.put_nowait(chunk)
        chunks.put_nowait(b"")

    async def forward(self, request):
        there = await self.inner.handle_async_request(request)
        text = (await there.aread()).decode()
        drop = ("content-length", "content-encoding", "transfer-encoding")
        headers = {k: v for k, v in there.headers.items() if k not in drop}
        await there.aclose()
        return SimpleNamespace(status=there.status_code, headers=headers, text=text)

    async def aclose(self):
        for task in self.kept:
            task.cancel()
        await asyncio.gather(*self.kept, return_exceptions=True)
        await self.inner.aclose()


def is_stream(sent):
    return bool(sent.body and sent.body.get("stream"))


def streams(pattern, by, count=0):
    """Replace a pattern in streams alone."""

    def reply(sent, got):
        if is_stream(sent):
            got.text = re.sub(pattern, by, got.text, count=count)

    return reply


def replies(pattern, by, count=0):
    def reply(sent, got):
        got.text = re.sub(pattern, by, got.text, count=count)

    return reply


def without(*path, only_streams=False, every=1):
    """Ignore a field of the body, at each, or at each second request."""
    seen = [0]

    def ask(body):
        if only_streams and not body.get("stream"):
            return
        inner = body
        for name in path[:-1]:
            inner = inner.get(name) or {}
        if path[-1] in inner:
            seen[0] += 1
            if seen[0] % every == 0:
                inner.pop(path[-1])

    return ask


def setting(name, value):
    def ask(body):
        if name in body:
            body[name] = value

    return ask


def status(old, new, text=None, headers=None):
    """Another status in place of one."""

    def reply(sent, got):
        if got.status == old:
            got.status = new
            got.text = got.text if text is None else text
            got.headers |= headers or {}

    return reply


def refusing(pattern, code=400, only_streams=False):
    """Refuse bodies that have this text."""

    def reply(sent, got):
        found = re.search(pattern, json.dumps(sent.body, ensure_ascii=False))
        if found and (is_stream(sent) or not only_streams):
            got.status, got.text = code, '{"error": {"message": "no", "type": "x"}}'

    return reply


def swapped(i, j):
    """Two events of a stream in the other order."""

    def reply(sent, got):
        if is_stream(sent):
            events = got.text.split("\n\n")
            events[i], events[j] = events[j], events[i]
            got.text = "\n\n".join(events)

    return reply


def rising(sent, got):
    """Gives the likeliest tokens of a chat from the last to the first."""
    answer = json.loads(got.text)
    for choice in answer.get("choices", ()):
        for row in (choice.get("logprobs") or {}).get("content", ()):
            row["top_logprobs"].reverse()
    got.text = json.dumps(answer)


def another_first(asked, pattern, by):
    """Changes the first whole answer to a request with the text `asked`, and no other."""
    changed = []

    def reply(sent, got):
        if not is_stream(sent) and not changed and asked in json.dumps(sent.body):
            changed.append(True)
            got.text = re.sub(pattern, by, got.text)

    return reply


def broken_bytes(sent, got):
    if is_stream(sent):
        got.text = got.text.encode().replace(b'"', b'"\xf0\x9f', 1)


def growing(pattern):
    """Counts that grow with each request."""

    def reply(sent, got):
        got.text = re.sub(pattern, lambda m: f"{m[1]}{int(m[2]) + sent.number}", got.text)

    return reply


def some(reply, every=5):
    def change(sent, got):
        if sent.number % every == 0:
            reply(sent, got)

    return change


@dataclass
class Both:
    """Several changes, one after the other."""

    parts: list = field(default_factory=list)

    def __call__(self, *given):
        for part in self.parts:
            part(*given)
