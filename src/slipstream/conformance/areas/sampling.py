"""Checks of sampling parameters."""

from __future__ import annotations

import math
from typing import Any

from slipstream.conformance.areas.framing import ALL
from slipstream.conformance.protocols.base import Ask
from slipstream.conformance.registry import FailedError, UnsupportedError, check, expect, offered
from slipstream.conformance.session import SHAPE_ERRORS, CheckSession

SEEDED = ("chat", "completions", "ollama")
LOGPROBS = {"chat": {"logprobs": True, "top_logprobs": 3}, "completions": {"logprobs": 3}}


@check("sampling.greedy", *ALL)
async def greedy_answers_repeat(session: CheckSession) -> None:
    """Temperature 0 gives the same answer three times."""
    said = [(await session.whole(Ask())).text for _ in range(3)]
    expect(len(set(said)) == 1, f"three answers: {said!r}")


@check("sampling.seed", *SEEDED)
async def seeds_repeat(session: CheckSession) -> None:
    """A seed gives the same answer again at temperature 1, and five seeds not all the same."""
    said = []
    for seed in range(5):
        ask = Ask(temperature=1.0, seed=seed + 1)
        with offered("seed"):
            first = await session.whole(ask)
        second = await session.whole(ask)
        expect(first.text == second.text, f"seed {seed + 1}: {first.text!r}, then {second.text!r}")
        said.append(first.text)
    expect(len(set(said)) > 1, "five seeds give the same answer at temperature 1")


@check("sampling.max_tokens", *ALL)
async def max_tokens_cuts(session: CheckSession) -> None:
    """An answer has at most so many tokens. A cut one says so, and has exactly as many."""
    for limit in (1, 7):
        answer = await session.whole(Ask(max_tokens=limit, extra={}))
        if answer.usage is None:
            raise UnsupportedError("no usage")
        count = answer.usage.completion
        expect(count <= limit, f"{count} tokens of at most {limit}")
        if answer.finish == "length":
            expect(count == limit, f"cut at {limit} tokens, but usage says {count}")
        else:
            expect(answer.finish == "stop" and count < limit + 1, f"finish is {answer.finish}")


@check("sampling.stop", "chat", "completions", "messages", "ollama")
async def stop_strings_end_the_answer(session: CheckSession) -> str:
    """The answer ends before the stop string, whole and streamed, also where the string's parts are
    in several tokens."""
    free = (await session.whole(Ask(max_tokens=40))).text
    found = [free[i : i + 5] for i in range(len(free) // 3, len(free) - 5)]
    stops = [text for text in found if text.strip() == text and "�" not in text][:3]
    if not stops:
        raise UnsupportedError("the greedy answer is too short to take a stop string from it")
    for stop in stops:
        ask, wanted = Ask(max_tokens=40, stop=(stop,)), free[: free.index(stop)]
        with offered("stop strings"):
            whole = await session.whole(ask)
        for name, answer in (("whole", whole), ("streamed", await session.streamed(ask))):
            expect(stop not in answer.text, f"{name}: the answer has the stop string {stop!r}")
            same = answer.text.rstrip() == wanted.rstrip()
            expect(same, f"{name}, stop {stop!r}: {answer.text!r}, not {wanted!r}")
            expect(answer.finish == "stop", f"{name}: finish is {answer.finish}")
            if session.protocol.name == "messages":
                expect(answer.stopped_by == stop, f"{name}: stop_sequence is {answer.stopped_by!r}")
    return f"{len(stops)} strings"


@check("sampling.logprobs", *LOGPROBS)
async def logprobs_are_probabilities(session: CheckSession) -> None:
    """Log-probabilities are at most 0, the likeliest tokens' sum to at most 1 and fall, a greedy
    token is the likeliest, and the tokens are the text."""
    ask = Ask(max_tokens=12, extra=LOGPROBS[session.protocol.name])
    with offered("logprobs"):
        reply = await session.post(session.body(ask))
        answer = session.read(reply)
    choice = reply.json()["choices"][0]
    if not choice.get("logprobs"):
        raise UnsupportedError("the answer has no logprobs")
    try:
        rows = rows_of(choice["logprobs"])
    except SHAPE_ERRORS as error:
        raise FailedError(f"the shape of logprobs: {error!r}") from None
    for token, own, top in rows:
        expect(own <= 1e-6, f"{token!r} has the log-probability {own}")
        total = sum(map(math.exp, top))
        expect(total <= 1.001, f"the likeliest tokens at {token!r} sum to {total}")
        expect(not top or max(top) - own < 1e-3, f"{token!r} is greedy, but another is likelier")
        expect(top == sorted(top, reverse=True), f"the likeliest tokens at {token!r} don't fall")
    if answer.usage is not None:
        count = answer.usage.completion
        expect(count - len(rows) in (0, 1), f"{count} tokens, logprobs of {len(rows)}")
    joined = "".join(token for token, _, _ in rows)
    if "�" not in joined + answer.text and "bytes:" not in joined:
        expect(
            joined.startswith(answer.text), f"tokens give {joined!r}, the text is {answer.text!r}"
        )


def rows_of(given: Any) -> list[tuple[str, float, list[float]]]:
    """(token, its log-probability, those of the most likely tokens) at each position."""
    if "content" in given:
        return [
            (row["token"], row["logprob"], [one["logprob"] for one in row["top_logprobs"]])
            for row in given["content"]
        ]
    tops = given["top_logprobs"]
    rows = zip(given["tokens"], given["token_logprobs"], tops, strict=True)
    # an object has no order, and contains the token itself if it is not among the most likely ones
    return [(token, own, sorted(top.values(), reverse=True)) for token, own, top in rows]


@check("sampling.n", "chat", "completions")
async def n_gives_as_many_choices(session: CheckSession) -> None:
    """`n` gives as many choices, numbered from 0, and `usage` counts all their tokens."""
    ask = Ask(max_tokens=5, temperature=1.0, seed=1, extra={"n": 3})
    with offered("n"):
        reply = await session.post(session.body(ask))
        answer = session.read(reply)
    numbers = sorted(choice["index"] for choice in reply.json()["choices"])
    expect(numbers == [0, 1, 2], f"choices {numbers}, not 0, 1, 2")
    cut = [choice["finish_reason"] == "length" for choice in reply.json()["choices"]]
    if answer.usage is not None and all(cut):
        expect(answer.usage.completion == 15, f"{answer.usage.completion} tokens of 3 times 5")
