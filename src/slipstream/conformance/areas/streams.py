"""Checks of streams against answers that are not streamed: greedy, so that both must be equal."""

from __future__ import annotations

from slipstream.conformance.areas.framing import ALL, TALKING
from slipstream.conformance.areas.tools import TOOLS, required
from slipstream.conformance.protocols.base import Ask
from slipstream.conformance.registry import UnsupportedError, check, expect, offered
from slipstream.conformance.session import CheckSession

PROMPTS = (
    *("Write a short story about a lighthouse.", "Count from one to twenty."),
    "Name five cities in Japan (日本), one per line.",
)


async def compare(session: CheckSession, ask: Ask) -> None:
    """Compare the stream with the answer that is not streamed. If they differ, the latter is requested again,
    because some servers don't repeat a greedy answer while their prefix cache fills."""
    whole, streamed = await session.whole(ask), await session.streamed(ask)
    if streamed.said == whole.said:
        return
    again = await session.whole(ask)
    if streamed.said == again.said:
        return
    if again.said != whole.said:
        raise UnsupportedError("greedy answers are not repeated here (see sampling.greedy)")
    expect(False, f"streamed {streamed.said!r}, whole {whole.said!r}")


@check("streams.text", *ALL)
async def text_is_that_of_the_whole(session: CheckSession) -> None:
    """Text and finish reason of the stream are those of the whole answer."""
    for prompt in PROMPTS:
        await compare(session, Ask(prompt=prompt))


@check("streams.tools", *TALKING)
async def calls_are_those_of_the_whole(session: CheckSession) -> None:
    """Calls of tools in the stream, put together, are those of the whole answer."""
    await required(session)
    for prompt in ("What is the weather in Paris?", "Note that the lamp is green."):
        await compare(session, Ask(prompt=prompt, tools=TOOLS, choice="required", max_tokens=600))


@check("streams.usage", *ALL)
async def usage_is_that_of_the_whole(session: CheckSession) -> None:
    """The stream's counts of tokens are those of the whole answer."""
    whole, streamed = (await session.whole(Ask())).usage, (await session.streamed(Ask())).usage
    if whole is None:
        raise UnsupportedError("no usage")
    expect(streamed is not None, "the stream has no usage")
    assert streamed is not None
    pairs = [(u.prompt, u.completion) for u in (streamed, whole)]
    expect(pairs[0] == pairs[1], f"(prompt, completion) streamed {pairs[0]}, whole {pairs[1]}")


@check("streams.reasoning", *TALKING)
async def reasoning_is_that_of_the_whole(session: CheckSession) -> None:
    """Reasoning in the stream, put together, is that of the whole answer."""
    ask = Ask(prompt="What is 17 times 3?", think=True, max_tokens=200)
    with offered("reasoning"):
        answer = await session.whole(ask)
    if not answer.reasoning:
        raise UnsupportedError("the model gave no reasoning")
    await compare(session, ask)
