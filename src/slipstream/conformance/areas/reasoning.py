"""Checks that reasoning is separate from the answer's text."""

from __future__ import annotations

from slipstream.conformance.areas.framing import TALKING
from slipstream.conformance.protocols.base import Ask
from slipstream.conformance.registry import UnsupportedError, check, expect, offered
from slipstream.conformance.session import CheckSession

MARKS = ("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>", "<|channel>")
ASK = Ask(prompt="What is 17 times 3?", think=True, max_tokens=200)


@check("reasoning.separated", *TALKING)
async def reasoning_is_apart_from_text(session: CheckSession) -> str:
    """Reasoning is in its own field, and the model's markers of it are in no field, whole or
    streamed."""
    with offered("reasoning"):
        whole = await session.whole(ASK)
    answers = (whole, await session.streamed(ASK))
    for answer in answers:
        found = [mark for mark in MARKS if mark in answer.text + answer.reasoning]
        expect(not found, f"marks of reasoning in the answer: {found}")
    if not all(answer.reasoning for answer in answers):
        expect(not any(a.reasoning for a in answers), "reasoning comes only whole or only streamed")
        raise UnsupportedError("the model gave no reasoning")
    return f"{len(whole.reasoning)} characters"


@check("reasoning.usage", *TALKING)
async def reasoning_is_counted(session: CheckSession) -> None:
    """Reasoning tokens, where they are reported, are some of the answer's and not all, if it has
    text too."""
    with offered("reasoning"):
        answer = await session.whole(ASK)
    if not answer.reasoning or answer.usage is None or answer.usage.reasoning is None:
        raise UnsupportedError("no reasoning tokens are reported")
    most = answer.usage.completion - bool(answer.text)
    found = answer.usage.reasoning
    expect(0 < found <= most, f"{found} reasoning tokens of {answer.usage.completion}")
