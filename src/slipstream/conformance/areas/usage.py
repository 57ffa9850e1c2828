"""Checks of token counts."""

from __future__ import annotations

from slipstream.conformance.areas.framing import ALL
from slipstream.conformance.protocols.base import Ask, ParsedAnswer, Usage
from slipstream.conformance.registry import UnsupportedError, check, expect, offered
from slipstream.conformance.session import CheckSession

LONG = "The keeper of the lighthouse wrote down every ship that passed. " * 12
COUNTS = {"messages": "/v1/messages/count_tokens", "responses": "/v1/responses/input_tokens"}


def usage_of(answer: ParsedAnswer) -> Usage:
    expect(answer.usage is not None, "the answer has no usage")
    assert answer.usage is not None
    return answer.usage


@check("usage.adds_up", *ALL)
async def counts_add_up(session: CheckSession) -> None:
    """Prompt and completion are above 0 and add up to the total; cached tokens are some of the
    prompt, and reasoning tokens some of the completion."""
    for ask in (Ask(), Ask(prompt=LONG, max_tokens=3)):
        used = usage_of(await session.whole(ask))
        expect(used.prompt > 0, "no tokens of the prompt are counted")
        expect(used.completion > 0, "no tokens of the answer are counted")
        if used.total is not None:
            total = used.prompt + used.completion
            expect(used.total == total, f"total is {used.total}, the parts are {total}")
        expect((used.cached or 0) <= used.prompt, f"{used.cached} cached of {used.prompt} tokens")
        of = used.reasoning or 0
        expect(of <= used.completion, f"{of} reasoning tokens of {used.completion}")


@check("usage.prompt", *ALL)
async def the_same_prompt_counts_the_same(session: CheckSession) -> None:
    """A prompt counts the same when it is asked again, cached or not, and a longer one counts
    more."""
    first, again = [usage_of(await session.whole(Ask(prompt=LONG))) for _ in range(2)]
    expect(first.prompt == again.prompt, f"{first.prompt} tokens, then {again.prompt}")
    longer = usage_of(await session.whole(Ask(prompt=LONG + "And then more.")))
    expect(longer.prompt > first.prompt, "a longer prompt counts no more")


@check("usage.cached", "chat", "completions", "responses", "messages")
async def cached_tokens_are_counted(session: CheckSession) -> str:
    """The second request with a long prompt says how much of it was cached."""
    await session.whole(Ask(prompt=LONG))
    used = usage_of(await session.whole(Ask(prompt=LONG)))
    if not used.cached:
        raise UnsupportedError("no cached tokens are reported")
    expect(used.cached <= used.prompt, f"{used.cached} cached of {used.prompt} tokens")
    expect(
        used.cached >= used.prompt // 4, f"only {used.cached} of {used.prompt} tokens are cached"
    )
    return f"{used.cached} of {used.prompt}"


@check("usage.count_tokens", *COUNTS)
async def counting_is_what_is_counted(session: CheckSession) -> str:
    """The counting route gives the number of prompt tokens that an answer's usage then has."""
    ask = Ask(prompt=LONG)
    counted_fields = ("model", "messages", "input")
    body = {name: value for name, value in session.body(ask).items() if name in counted_fields}
    with offered("counting"):
        reply = await session.post(body, COUNTS[session.protocol.name])
        if reply.status_code != 200:
            raise session.refused(reply.status_code, reply.content)
    counted = reply.json().get("input_tokens")
    wanted = usage_of(await session.whole(ask)).prompt
    expect(counted == wanted, f"{counted} counted, {wanted} in the answer's usage")
    return f"{counted} tokens"
