"""Agent sessions as data: turns whose prompts grow, pauses between them, and subagents.

The prompt of a turn is the whole conversation before it, plus new text. New text consists of
*parts*: a part's key identifies its text, so that equal keys mean equal tokens. One definition
serves a load over HTTP (`bench/session_run.py`) and the simulator (`simulate/sessions.py`).

1. All sessions begin with the same system prompt. Then follows the session's own task.
2. Each later turn adds the results of tools, after a pause in which the tools ran.
3. Some turns begin with subagents: sessions with the same system prompt and a fresh context. The
   turn waits for them; the last answer of each is its summary.
4. A session ends with its last turn, or before the turn that would exceed `max_context`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from slipstream.bench.traces import BLOCK_TOKENS, TraceRow
from slipstream.errors import ConfigError

Kind: TypeAlias = Literal["system", "user", "tool", "summary", "answer"]

MAX_CONTEXT = 142_000
SYSTEM_TOKENS = 14_000


class PromptPiece(NamedTuple):
    """A piece of a prompt. Two parts with the same key have the same tokens, up to the length of
    the shorter."""

    key: int
    num_tokens: int
    kind: Kind = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a session. It is sent `pause_s` after the previous answer and the end of its
    subagents, whose summaries follow the `new` parts."""

    new: tuple[PromptPiece, ...]
    output_tokens: int
    pause_s: float = 0.0
    subagents: tuple[AgentSession, ...] = ()

    @property
    def num_new_tokens(self) -> int:
        """Number of new prompt tokens, if summaries have the requested length."""
        return sum(p.num_tokens for p in self.new) + sum(
            s.turns[-1].output_tokens for s in self.subagents
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """A conversation. `start_s` is the time in seconds at which it begins in a trace."""

    turns: tuple[Turn, ...]
    start_s: float = 0.0

    @property
    def context_lengths(self) -> list[int]:
        """Length in tokens of prompt and answer together, for each turn."""
        return list(itertools.accumulate(t.num_new_tokens + t.output_tokens for t in self.turns))

    def all_turns(self) -> Iterator[Turn]:
        """The turns of the session and of its subagents."""
        for turn in self.turns:
            for session in turn.subagents:
                yield from session.all_turns()
            yield turn


@dataclass(frozen=True, slots=True)
class Draw:
    """A probability distribution of lengths or times: `fixed:N`, `uniform:A-B`, `exponential:MEAN`
    or `lognormal:MEAN:SIGMA`."""

    kind: Literal["fixed", "uniform", "exponential", "lognormal"]
    a: float
    b: float = 0.0

    @property
    def mean(self) -> float:
        return (self.a + self.b) / 2 if self.kind == "uniform" else self.a

    def __str__(self) -> str:
        ends = {"uniform": f"{self.a:g}-{self.b:g}", "lognormal": f"{self.a:g}:{self.b:g}"}
        return f"{self.kind}:{ends.get(self.kind, f'{self.a:g}')}"

    def real(self, rng: random.Random) -> float:
        match self.kind:
            case "fixed":
                return self.a
            case "uniform":
                return rng.uniform(self.a, self.b)
            case "exponential":
                return rng.expovariate(1 / self.a) if self.a else 0.0
        return rng.lognormvariate(math.log(self.a) - self.b**2 / 2, self.b) if self.a else 0.0

    def count(self, rng: random.Random) -> int:
        """Sample an integer of at least 1. With `uniform` all integers of the range are equally
        likely."""
        if self.kind == "uniform":
            return max(1, rng.randint(math.ceil(self.a), math.floor(self.b)))
        return max(1, round(self.real(rng)))

    def scaled(self, mean: float) -> Draw:
        """Distribution with the same shape and another mean."""
        if self.kind != "uniform":
            return Draw(self.kind, mean, self.b)
        share = (self.b - self.a) / (self.a + self.b)
        return Draw("uniform", math.floor(mean * (1 - share)), math.ceil(mean * (1 + share)))


def parse_draw(text: str, usual: Draw, name: str, *, least: float = 1) -> Draw:
    """Parse a distribution, or a number: the mean of a distribution with the shape of `usual`.
    ConfigError for the field `name`."""
    kind, _, rest = text.partition(":") if ":" in text else ("", "", text)
    try:
        numbers = [float(n) for n in rest.split("-" if kind == "uniform" else ":")]
        if not all(0 <= n < math.inf for n in numbers) or numbers[0] < least:
            raise ValueError
        match kind, numbers:
            case "", [mean]:
                return usual.scaled(mean)
            case "uniform", [a, b] if a <= b and (least < 1 or math.ceil(a) <= math.floor(b)):
                return Draw("uniform", a, b)
            case "lognormal", [mean, sigma]:
                return Draw("lognormal", mean, sigma)
            case "fixed", [mean]:
                return Draw("fixed", mean)
            case "exponential", [mean]:
                return Draw("exponential", mean)
    except ValueError:
        pass  # not numbers, or out of range: reported below
    raise ConfigError(
        f"{name}={text!r} is neither a mean such as {usual.mean:g}, nor fixed:N, uniform:A-B, exponential:MEAN or "
        f"lognormal:MEAN:SIGMA, with numbers of {least:g} or more",
        field=name,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoad:
    """Parameters of generated sessions. `slipstream bench` and `plan` have an option for each."""

    sessions: int = 16
    max_context: int | None = None
    turns: Draw = Draw("uniform", 20, 60)
    system_tokens: int | None = None
    task_tokens: Draw = Draw("lognormal", 2000, 0.8)
    turn_tokens: Draw = Draw("lognormal", 2300, 1.0)
    answer_tokens: Draw = Draw("lognormal", 444, 0.8)
    pause: Draw = Draw("lognormal", 4, 1.2)
    subagent_rate: float = 0.03
    subagents: Draw = Draw("uniform", 1, 3)
    subagent_turns: Draw = Draw("uniform", 3, 12)
    summary_tokens: Draw = Draw("lognormal", 600, 0.5)

    def __post_init__(self) -> None:
        if self.sessions < 1:
            raise ConfigError(f"sessions must be above 0, got {self.sessions}", field="sessions")
        if self.max_context is not None and self.max_context < 3:
            raise ConfigError(
                f"max_context must hold a prompt and an answer, got {self.max_context}",
                field="max_context",
            )
        if not 0 <= self.subagent_rate <= 1:
            raise ConfigError(
                f"subagent_rate is a share from 0 to 1, got {self.subagent_rate}",
                field="subagent_rate",
            )
        if self.system_tokens is not None and self.system_tokens < 0:
            raise ConfigError("system_tokens must not be negative", field="system_tokens")
        room = (self.max_context or MAX_CONTEXT) - 2
        if (self.system_tokens or 0) > room:
            raise ConfigError(
                f"system_tokens={self.system_tokens} leaves no room for a turn in a context of {room + 2}; take fewer, or a "
                "larger max_context",
                field="system_tokens",
            )

    def describe(self) -> dict[str, Any]:
        """Returns the parameters for a report; distributions are text that `parse_draw` reads."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: str(v) if isinstance(v, Draw) else v for name, v in values.items()}

    def fitted(self, max_model_len: int | None) -> AgentLoad:
        """Copy with missing values chosen for a model of this context length. ConfigError if
        `max_context` is longer."""
        if max_model_len is not None and (self.max_context or 0) > max_model_len:
            raise ConfigError(
                f"max_context={self.max_context} is longer than the model's context of {max_model_len}; take "
                f"{max_model_len} or less",
                field="max_context",
            )
        longest = self.max_context or min(MAX_CONTEXT, max_model_len or MAX_CONTEXT)
        system = self.system_tokens
        if system is None:
            system = min(SYSTEM_TOKENS, longest // 10)
        return replace(self, max_context=longest, system_tokens=system)

    def generate(self, seed: int) -> tuple[AgentSession, ...]:
        """Generate the sessions. The same seed gives the same sessions; a different number of
        sessions adds or drops some at the end."""
        load = self.fitted(None)
        return tuple(
            _Generator(load, random.Random(f"{seed}:{number}"), number).session(load.turns)
            for number in range(self.sessions)
        )


LOAD_HELP = {
    "sessions": "sessions in all",
    "max_context": f"most tokens of a prompt and its answer (the model's context, {MAX_CONTEXT} at most)",
    "turns": "turns of a session",
    "system_tokens": f"system prompt and tools, the same for all sessions ({SYSTEM_TOKENS}, a tenth of the context at most)",
    "task_tokens": "a session's first message",
    "turn_tokens": "results of tools that a turn adds",
    "answer_tokens": "an answer",
    "pause": "seconds of tools between an answer and the next turn",
    "subagent_rate": "share of turns that begin with subagents",
    "subagents": "subagents that begin together",
    "subagent_turns": "turns of a subagent",
    "summary_tokens": "a subagent's last answer, which its parent gets",
}
"""Descriptions of the fields of `AgentLoad` for the help."""


def parse_load(given: dict[str, Any]) -> AgentLoad:
    """Load with these fields, whose distributions are given as text."""
    usual = AgentLoad()
    values: dict[str, Any] = {
        name: parse_draw(value, draw, name, least=0 if name == "pause" else 1)
        if isinstance(value, str) and isinstance(draw := getattr(usual, name), Draw)
        else value
        for name, value in given.items()
    }
    return AgentLoad(**values)


SYSTEM_KEY = 0
KEYS_EACH = 1 << 14
"""Number of keys reserved for a session, subagents included."""


class _Generator:
    """Generates one session."""

    def __init__(self, load: AgentLoad, rng: random.Random, number: int) -> None:
        self.load, self.rng = load, rng
        self._keys = itertools.count(1 + number * KEYS_EACH)

    def part(self, num_tokens: int, kind: Kind) -> PromptPiece:
        return PromptPiece(next(self._keys), num_tokens, kind)

    def session(self, turns: Draw, *, last: int | None = None) -> AgentSession:
        """Generate a session. With `last` it is a subagent's, whose last answer has `last`
        tokens."""
        load, rng = self.load, self.rng
        assert load.max_context is not None
        count, room = turns.count(rng), load.max_context
        found: list[Turn] = []
        while len(found) < count:
            n_out = load.answer_tokens.count(rng)
            if last is not None and len(found) == count - 1:
                n_out = last
            if not found:
                turn = self.first(n_out)
            else:
                subagents: tuple[AgentSession, ...] = ()
                if last is None and rng.random() < load.subagent_rate:
                    subagents = tuple(
                        self.session(load.subagent_turns, last=load.summary_tokens.count(rng))
                        for _ in range(load.subagents.count(rng))
                    )
                turn = Turn(
                    new=(self.part(load.turn_tokens.count(rng), "tool"),),
                    output_tokens=n_out,
                    pause_s=load.pause.real(rng),
                    subagents=subagents,
                )
            if turn.num_new_tokens + turn.output_tokens > room:
                break
            room -= turn.num_new_tokens + turn.output_tokens
            found.append(turn)
        return AgentSession(turns=tuple(found))

    def first(self, n_out: int) -> Turn:
        """First turn, cut to fit the context."""
        load = self.load
        assert load.max_context is not None
        assert load.system_tokens is not None
        room = load.max_context - load.system_tokens
        task = min(load.task_tokens.count(self.rng), room - 1)
        system = (
            (PromptPiece(SYSTEM_KEY, load.system_tokens, "system"),) if load.system_tokens else ()
        )
        return Turn(new=(*system, self.part(task, "user")), output_tokens=min(n_out, room - task))


def of_rows(rows: Iterable[TraceRow]) -> tuple[AgentSession, ...]:
    """Sessions of a trace; a request without a session is a session of its own.

    Hashed blocks become parts with the hash as key; other tokens become a part with a key of its own."""
    own = itertools.count(-1, -1)
    found: dict[Any, tuple[float, list[Turn]]] = {}
    for number, row in enumerate(rows):
        parts, left = [], row.input_tokens
        for key in row.hash_ids:
            if left > 0:
                parts.append(PromptPiece(key, min(left, BLOCK_TOKENS)))
                left -= BLOCK_TOKENS
        if left > 0:
            parts.append(PromptPiece(next(own), left))
        turn = Turn(new=tuple(parts), output_tokens=row.output_tokens, pause_s=row.delay_s or 0.0)
        name = number if row.session is None else row.session
        found.setdefault(name, (row.start_s, []))[1].append(turn)
    return tuple(AgentSession(turns=tuple(turns), start_s=start) for start, turns in found.values())


class PlannedTurn(NamedTuple):
    """A turn with its whole prompt, assuming that each answer has the requested length.

    `after`: (turn, seconds) pairs: it is sent this long after these turns end; if empty, at
    `start_s`. `ends_session`: it is the last turn of a session that is not a subagent."""

    session: int
    turn: int
    is_subagent: bool
    parts: tuple[PromptPiece, ...]
    output_tokens: int
    after: tuple[tuple[int, float], ...]
    start_s: float
    ends_session: bool

    @property
    def input_tokens(self) -> int:
        return sum(p.num_tokens for p in self.parts)


ANSWER_KEYS = 1 << 29
"""Smallest key of an answer."""


def planned_turns(sessions: Sequence[AgentSession]) -> list[PlannedTurn]:
    """List the turns of all sessions, one session after another. A subagent's turns come before the
    turn that waits for it."""
    found: list[PlannedTurn] = []

    def lay(
        number: int,
        session: AgentSession,
        before: tuple[tuple[int, float], ...],
        *,
        is_subagent: bool,
    ) -> tuple[int, PromptPiece]:
        """Plan a session's turns. Returns the index of its last turn, and the part of that turn's answer."""
        parts: list[PromptPiece] = []
        last = before
        for i, turn in enumerate(session.turns):
            ends = [lay(number, s, last, is_subagent=True) for s in turn.subagents]
            parts += [*turn.new, *(answer for _, answer in ends)]
            found.append(
                PlannedTurn(
                    session=number,
                    turn=i,
                    is_subagent=is_subagent,
                    parts=tuple(parts),
                    output_tokens=turn.output_tokens,
                    after=(
                        *((index, turn.pause_s) for index, _ in last),
                        *((index, 0.0) for index, _ in ends),
                    ),
                    start_s=session.start_s,
                    ends_session=not is_subagent and i == len(session.turns) - 1,
                )
            )
            last = ((len(found) - 1, 0.0),)
            parts.append(PromptPiece(ANSWER_KEYS + len(found) - 1, turn.output_tokens, "answer"))
        return len(found) - 1, parts[-1]

    for number, session in enumerate(sessions):
        lay(number, session, (), is_subagent=False)
    return found


class SeenPrefixes:
    """Prompts and answers computed so far. An infinite cache would hit these, token by token: an
    upper bound of prefix hits."""

    def __init__(self) -> None:
        self._most: dict[tuple[int, int], int] = {}  # (node, key): maximum tokens of that part
        self._nodes: dict[tuple[int, int, int], int] = {}  # (node, key, tokens): the node after it

    def longest(self, parts: Sequence[PromptPiece]) -> int:
        """Number of leading tokens that were computed before. The last token is left out, because
        its logits must be computed."""
        node, found = 0, 0
        for key, num_tokens, _ in parts:
            found += min(num_tokens, self._most.get((node, key), 0))
            after = self._nodes.get((node, key, num_tokens))
            if after is None:
                break
            node = after
        return min(found, sum(p.num_tokens for p in parts) - 1)

    def add(self, parts: Sequence[PromptPiece]) -> None:
        node = 0
        for key, num_tokens, _ in parts:
            most = self._most.get((node, key), 0)
            self._most[node, key] = max(most, num_tokens)
            node = self._nodes.setdefault((node, key, num_tokens), len(self._nodes) + 1)

    def add_answer(self, parts: Sequence[PromptPiece], answer: PromptPiece) -> None:
        """Add an answer, whose last token has not been computed."""
        if answer.num_tokens > 1:
            self.add((*parts, answer._replace(num_tokens=answer.num_tokens - 1)))
