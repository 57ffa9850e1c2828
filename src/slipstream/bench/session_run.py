"""Sends agent sessions to a server: each turn's prompt contains the server's own answers.

A session sends one turn at a time. It waits during pauses, in which its subagents run. Prompts are
sent in one of two forms:

1. Token ids (`TokenDialogue`): lengths are exact. The server must return the ids of its answers.
2. Chat messages (`ChatDialogue`): any server with OpenAI's chat. Results of tools are text in a
   user's message. Numbers of words are converted to tokens by a ratio that is measured first.

An answer or summary that is too short is compensated by more new text in the next prompt, so that
contexts grow as planned with any server. A failed turn ends its session.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from slipstream.bench.load import ClosedLoop, MeasuredAnswer, OpenArrivals, StreamingEngine, measure
from slipstream.bench.load import send_times as times_of
from slipstream.bench.session_metrics import TurnRecord
from slipstream.bench.sessions import ANSWER_KEYS, AgentSession, PromptPiece, SeenPrefixes, Turn
from slipstream.bench.workload import BenchRequest
from slipstream.errors import EngineError

WORDS = """
the of and to in is that for it as was with be by on not he this are or his from at which but have an
had they you were their one all we can her has there been if more when will would who so no out up
into do any your what than then them some could time these two may first new now file line code test
error value return list name type class string number data read write open path table index query
page left right set get run build check call next last part point case
""".split()  # noqa: SIM905
"""Common words, each of which is one or two tokens in most vocabularies."""

USUAL_RATIO = 1.3
"""Tokens per word if the server does not report counts."""

PROBE_WORDS = (10, 110)


class Dialogue(Protocol):
    """A conversation with a server."""

    def say(self, parts: Sequence[PromptPiece], summaries: Sequence[MeasuredAnswer]) -> None:
        """Add a turn's new text. Parts of kind `summary` are replaced by `summaries`, in their order."""

    def request(self, output_tokens: int) -> BenchRequest:
        """Request with the whole conversation so far."""

    def hear(self, answer: MeasuredAnswer) -> int:
        """Add the answer. Returns its number of tokens."""


class TokenText:
    """Random token ids for parts. Those of parts that several prompts share are cached."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size, self.seed = vocab_size, seed
        self._kept: dict[PromptPiece, list[int]] = {}

    def tokens(self, part: PromptPiece) -> list[int]:
        if part in self._kept:
            return self._kept[part]
        rng = random.Random(f"{self.seed}:{part.key}")
        found = rng.choices(range(self.vocab_size), k=part.num_tokens)
        if part.kind == "system":
            self._kept[part] = found
        return found


class TokenDialogue:
    """A conversation in token ids."""

    def __init__(self, text: TokenText) -> None:
        self._text, self.tokens = text, list[int]()

    def say(self, parts: Sequence[PromptPiece], summaries: Sequence[MeasuredAnswer]) -> None:
        answers = iter(summaries)
        for part in parts:
            ids = next(answers).token_ids if part.kind == "summary" else self._text.tokens(part)
            self.tokens += ids

    def request(self, output_tokens: int) -> BenchRequest:
        return BenchRequest(prompt_token_ids=tuple(self.tokens), output_tokens=output_tokens)

    def hear(self, answer: MeasuredAnswer) -> int:
        if answer.num_tokens and not answer.token_ids:
            raise EngineError("the server gives no token ids of its answers; use --api chat")
        self.tokens += answer.token_ids
        return len(answer.token_ids)


class WordText:
    """Random words for parts, at `ratio` tokens per word."""

    def __init__(self, ratio: float, seed: int) -> None:
        self.ratio, self.seed = ratio, seed

    def words(self, part: PromptPiece) -> str:
        rng = random.Random(f"{self.seed}:{part.key}")
        return " ".join(rng.choices(WORDS, k=max(1, round(part.num_tokens / self.ratio))))


class ChatDialogue:
    """A conversation in chat messages."""

    def __init__(self, text: WordText) -> None:
        self._text, self.messages = text, list[dict[str, str]]()

    def say(self, parts: Sequence[PromptPiece], summaries: Sequence[MeasuredAnswer]) -> None:
        answers, said = iter(summaries), []
        for part in parts:
            if part.kind == "system":
                self.messages.append({"role": "system", "content": self._text.words(part)})
            elif part.kind == "summary":
                text = "".join(next(answers).text)
                said.append(f'<tool_result name="subagent">\n{text}\n</tool_result>')
            elif part.kind == "tool":
                text = self._text.words(part)
                said.append(f'<tool_result name="read_file">\n{text}\n</tool_result>')
            else:
                said.append(self._text.words(part))
        self.messages.append({"role": "user", "content": "\n".join(said)})

    def request(self, output_tokens: int) -> BenchRequest:
        return BenchRequest(
            prompt_token_ids=(), messages=tuple(self.messages), output_tokens=output_tokens
        )

    def hear(self, answer: MeasuredAnswer) -> int:
        text, reasoning = "".join(answer.text), "".join(answer.reasoning)
        # chat templates raise an error for an empty message
        said = {"role": "assistant", "content": text or "(nothing)"}
        self.messages.append({**said, "reasoning_content": reasoning} if reasoning else said)
        return answer.usage[1] if answer.usage else answer.num_tokens


def dialogue_of(text: TokenText | WordText) -> Dialogue:
    """New conversation in token ids or words, like `text`."""
    return TokenDialogue(text) if isinstance(text, TokenText) else ChatDialogue(text)


async def tokens_per_word(engine: StreamingEngine, seed: int) -> float:
    """Measured prompt tokens per word of `WORDS` on a server with a chat API, by two short
    requests. `USUAL_RATIO` if it reports no counts."""
    counts = []
    for words in PROBE_WORDS:
        dialogue, answer = ChatDialogue(WordText(1.0, seed)), MeasuredAnswer()
        dialogue.say([PromptPiece(-1, words)], ())
        await engine.ask(dialogue.request(1), answer)
        counts.append(None if answer.usage is None else answer.usage[0])
    if counts[0] is None or counts[1] is None or counts[1] <= counts[0]:
        return USUAL_RATIO
    return (counts[1] - counts[0]) / (PROBE_WORDS[1] - PROBE_WORDS[0])


@dataclass(slots=True)
class SessionRun:
    """One run of sessions. `dialogue` creates a new conversation; `on_turn` is called with the
    number of completed turns, including those of subagents."""

    engine: StreamingEngine
    dialogue: Callable[[], Dialogue]
    on_turn: Callable[[int], None] = lambda done: None
    records: list[TurnRecord] = field(default_factory=list)
    _seen: SeenPrefixes = field(default_factory=SeenPrefixes)
    _keys: Any = field(default_factory=lambda: itertools.count(ANSWER_KEYS))

    async def run(
        self,
        sessions: Sequence[AgentSession],
        arrivals: OpenArrivals | ClosedLoop | None,
        seed: int,
    ) -> list[TurnRecord]:
        """Send all sessions. They start by `arrivals`, or with None at their own times. In a closed
        loop one starts when another ends."""
        numbered = enumerate(sessions)
        if isinstance(arrivals, ClosedLoop):

            async def user() -> None:
                for number, session in numbered:
                    await self._session(number, session)

            users = min(arrivals.concurrency, len(sessions))
            await asyncio.gather(*(user() for _ in range(users)))
            return self.records
        times = [s.start_s for s in sessions]
        if arrivals is not None:
            times = times_of(arrivals, len(sessions), seed)
        begin = time.monotonic()

        async def at(number: int, session: AgentSession, offset: float) -> None:
            await asyncio.sleep(max(0.0, begin + offset - time.monotonic()))
            await self._session(number, session)

        starts = zip(numbered, times, strict=True)
        await asyncio.gather(*(at(number, session, t) for (number, session), t in starts))
        return self.records

    async def _session(
        self, number: int, session: AgentSession, *, is_subagent: bool = False
    ) -> MeasuredAnswer | None:
        """Send a session's turns. Returns its last answer, or None if a turn failed."""
        dialogue, parts, answer = self.dialogue(), list[PromptPiece](), MeasuredAnswer()
        for i, (turn, length) in enumerate(
            zip(session.turns, session.context_lengths, strict=True)
        ):
            summaries = await self._wait(number, turn)
            new = [*turn.new]
            new += [PromptPiece(next(self._keys), _length(s), "summary") for s in summaries]
            wanted = length - turn.output_tokens - sum(p.num_tokens for p in (*parts, *new))
            if wanted > 0:  # previous answers ended early
                new.append(PromptPiece(next(self._keys), wanted))
            dialogue.say(new, summaries)
            parts += new
            answer = MeasuredAnswer(keeps=True)
            could = self._seen.longest(parts)
            self._seen.add(parts)
            planned = sum(p.num_tokens for p in parts)
            request = dialogue.request(turn.output_tokens)
            timing = await measure(self.engine, request, answer)
            if answer.usage is None:
                timing = replace(timing, input_tokens=planned)
            elif request.messages is not None:  # in a chat, token counts are estimates
                could = min(round(could * timing.input_tokens / planned), timing.input_tokens - 1)
            num_heard = 0
            if timing.error is None:
                try:
                    num_heard = dialogue.hear(answer)
                except EngineError as error:
                    timing = replace(timing, error=str(error))
            self.records.append(
                TurnRecord(
                    session=number,
                    turn=i,
                    is_subagent=is_subagent,
                    is_last=i == len(session.turns) - 1,
                    timing=timing,
                    cacheable_tokens=could if timing.error is None else 0,
                    counts_cached=answer.counts_cached,
                    asked_tokens=turn.output_tokens,
                )
            )
            self.on_turn(len(self.records))
            if timing.error is not None:
                return None
            said = PromptPiece(next(self._keys), num_heard, "answer")
            self._seen.add_answer(parts, said)
            parts.append(said)
        return answer

    async def _wait(self, number: int, turn: Turn) -> list[MeasuredAnswer]:
        """Wait for the tools and subagents that a turn depends on. Returns the subagents' summaries."""
        runs = (self._session(number, s, is_subagent=True) for s in turn.subagents)
        _, *found = await asyncio.gather(asyncio.sleep(turn.pause_s), *runs)
        return [summary for summary in found if summary is not None]


def _length(answer: MeasuredAnswer) -> int:
    return len(answer.token_ids) or (answer.usage[1] if answer.usage else answer.num_tokens)
