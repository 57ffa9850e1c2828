"""Checks with many concurrent requests: disconnects, overload, and mixed protocols."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

import httpx

from slipstream.conformance.areas.framing import ALL, constant
from slipstream.conformance.protocols import PROTOCOLS
from slipstream.conformance.protocols.base import Ask, ParsedAnswer
from slipstream.conformance.registry import (
    FailedError,
    RefusedError,
    UnsupportedError,
    check,
    expect,
)
from slipstream.conformance.session import CheckSession

SHORT = Ask(prompt="Hi", max_tokens=4)
LONG = Ask(prompt="Count from one to a thousand.", max_tokens=1500, extra={"ignore_eos": True})
BURST = 4
"""Number of concurrent requests of the burst, as a multiple of `concurrency`."""

FULL = 8
"""A server counts as full if a short request takes this many times as long as when it is idle."""

ROUNDS = 3
"""Maximum tries of a round of abandoned requests. A pause of the machine can delay one; a server
that continues all abandoned requests delays every one."""


async def seconds(session: CheckSession, limit_s: float) -> float | None:
    """Seconds of a short answer. None if it takes longer than the limit, or is refused."""
    begin = time.monotonic()
    try:
        await asyncio.wait_for(session.whole(SHORT), limit_s)
    except (TimeoutError, RefusedError):
        return None
    return time.monotonic() - begin


async def longest(session: CheckSession) -> Ask:
    """Request for the longest answer that the server accepts."""
    room = (session.context or 2048) // 2
    for ask in (LONG.but(max_tokens=min(1500, room)), LONG.but(max_tokens=room, extra={})):
        try:
            async with session.streaming(ask) as reply:
                await anext(reply.aiter_bytes(), b"")
            return ask
        except RefusedError as error:
            refused = error
    raise refused


@check("load.cancellation", *ALL)
async def disconnects_free_the_server(session: CheckSession) -> str:
    """Clients that go away free their places: a short request waits while long ones run, and no
    longer when their clients have gone, whether they had asked for streams or not."""
    ask = await longest(session)
    idle = [await seconds(session, session.endpoint.timeout_s) for _ in range(3)]
    quick = min((t for t in idle if t is not None), default=None)
    expect(quick is not None, "a short request on an idle server is not answered")
    assert quick is not None
    limit_s = FULL * quick + 0.2
    for streams in (True, False):
        for _ in range(ROUNDS):
            async with running(session, ask, limit_s, streams=streams):
                if not await is_full(session, limit_s):
                    raise UnsupportedError(
                        f"{session.concurrency} long requests don't fill the server: "
                        "try --concurrency"
                    )
            if (took := await freed(session, limit_s)) is not None:
                break
        what = "streams" if streams else "requests"
        expect(
            took is not None, f"a short request waits over {3 * limit_s:.1f} s for abandoned {what}"
        )
    return f"idle {quick * 1e3:.0f} ms, full over {limit_s * 1e3:.0f} ms, after {took or 0:.3f} s"


async def is_full(session: CheckSession, limit_s: float) -> bool:
    """Whether one of a few short requests has to wait; several are tried, because the long requests may not all have
    started."""
    for _ in range(3):
        if await seconds(session, limit_s) is None:
            return True
    return False


async def freed(session: CheckSession, limit_s: float) -> float | None:
    """Seconds of the first short answer within three limits. If the server refuses, the request is repeated."""
    end = time.monotonic() + 3 * limit_s
    while time.monotonic() < end:
        if (took := await seconds(session, limit_s)) is not None:
            return took
        await asyncio.sleep(limit_s / 20)
    return None


@contextlib.asynccontextmanager
async def running(
    session: CheckSession, ask: Ask, limit_s: float, *, streams: bool
) -> AsyncIterator[None]:
    """Context manager that keeps `concurrency` long requests running. On exit it closes their
    clients."""
    begun = asyncio.Event()

    async def one() -> None:
        with contextlib.suppress(RefusedError, httpx.HTTPError):
            if not streams:
                await session.whole(ask)
                return
            async with session.streaming(ask) as reply:
                async for _ in reply.aiter_bytes():
                    begun.set()

    tasks = [asyncio.create_task(one()) for _ in range(session.concurrency)]
    try:
        if streams:
            # no request may start while abandoned ones occupy all slots
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(begun.wait(), 3 * limit_s)
        else:
            # an answer that is not streamed gives no sign that it has started
            await asyncio.sleep(0.3)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@check("load.overload", *ALL)
async def overload_is_queued_or_refused(session: CheckSession) -> str:
    """Many requests at once are each answered, or refused with 429 or 503 and `Retry-After`. The
    server goes on afterwards."""
    count = session.concurrency * BURST
    body = session.body(SHORT)
    replies = await asyncio.gather(*(session.post(body) for _ in range(count)))
    refused = [reply for reply in replies if reply.status_code != 200]
    wrong = sorted({reply.status_code for reply in refused} - {429, 503})
    expect(not wrong, f"HTTP {wrong} among {count} requests at once")
    told = [reply for reply in refused if "retry-after" in reply.headers]
    expect(
        len(told) == len(refused), f"{refused[0].status_code if refused else 0} without Retry-After"
    )
    await session.whole(SHORT)
    return f"{count} at once: {count - len(refused)} answered, {len(refused)} refused"


@check("load.mixed", "chat")
async def mixed_requests_keep_apart(session: CheckSession) -> str:
    """Requests of all protocols at once, streamed and not, get their own answers: each counts its
    prompt as it does alone, and says the text that its schema asks for."""
    others = [session.with_protocol(p) for p in PROTOCOLS.values()]
    probes = await asyncio.gather(*(one.whole(SHORT) for one in others), return_exceptions=True)
    sessions = [
        s for s, probe in zip(others, probes, strict=True) if isinstance(probe, ParsedAnswer)
    ]
    asks = [(s, SHORT.but(prompt="Hi " * (7 * i + 1))) for i, s in enumerate(sessions * 3)]
    alone = [prompt_tokens(await s.whole(ask)) for s, ask in asks]
    calls = [s.streamed(a) if i % 2 else s.whole(a) for i, (s, a) in enumerate(asks)]
    tagged = [Ask(max_tokens=500, schema=constant(f"tag {i} 🦜")) for i in range(8)]
    found, texts = await asyncio.gather(asyncio.gather(*calls), session.together(tagged, 8))
    for before, answer in zip(alone, found, strict=True):
        together = prompt_tokens(answer)
        expect(before == together, f"a prompt of {before} tokens counts {together} among others")
    for i, text in enumerate(texts):
        if isinstance(text, ParsedAnswer) and text.finish != "length":
            try:
                said = json.loads(text.text)["text"]
            except (ValueError, KeyError, TypeError):
                raise FailedError(f"no JSON of its schema: {text.text[:80]!r}") from None
            expect(said == f"tag {i} 🦜", f"request {i} got {said!r}")
    return f"{len(asks) + len(tagged)} requests, {len(sessions)} protocols"


def prompt_tokens(answer: ParsedAnswer) -> int | None:
    return answer.usage.prompt if answer.usage else None
