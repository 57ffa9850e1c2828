"""The requests of a simulation: lengths, shared prefixes and arrival times.

  sharegpt           the first turns of conversations (2,000 lengths are shipped)
  fixed:IN/OUT       all requests equal
  uniform:A-B/C-D    lengths between A and B tokens, answers between C and D
  lengths:PATH       a file {"lengths": [[input, output], …]}
  trace:PATH         recorded arrivals: Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens; Patel
                     et al. 2024) or Mooncake's JSON lines (timestamp, input_length, output_length,
                     hash_ids; Qin et al. 2025; with session_id: turns of sessions)

Two prompts that begin with the same `prefix` numbers begin with the same tokens, `PREFIX_TOKENS`
for each number.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from slipstream.bench.load import Arrivals, ClosedLoop, Poisson, send_times
from slipstream.bench.sessions import (
    AgentLoad,
    AgentSession,
    PlannedTurn,
    PromptPiece,
    of_rows,
    planned_turns,
)
from slipstream.bench.traces import BLOCK_TOKENS, read_rows
from slipstream.bench.workload import read_lengths
from slipstream.errors import ConfigError

PREFIX_TOKENS = BLOCK_TOKENS

MAX_SESSIONS = 4096

SHAREGPT = Path(__file__).parent / "data" / "sharegpt-lengths.json"


class TrafficRequest(NamedTuple):
    """A request. `parts`: the prompt of a session's turn; then `prefix` is used only for routing.

    `after`: (request, seconds) pairs; it arrives this long after these requests end, and not at `arrival`.
    `ends_session`: whether a closed loop's user is free when it ends; False for turns with later turns."""

    # seconds from the start; in a closed loop a request is sent when its user is free
    arrival: float
    input_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    parts: tuple[PromptPiece, ...] = ()
    after: tuple[tuple[int, float], ...] = ()
    ends_session: bool = True


def mean_lengths(requests: Sequence[TrafficRequest]) -> tuple[float, float]:
    """Mean (input tokens, output tokens) of a request."""
    count = len(requests)
    return sum(r.input_tokens for r in requests) / count, sum(
        r.output_tokens for r in requests
    ) / count


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests under a load.

    `users` is the number of users of a closed loop, each of whom sends the next request, or begins
    the next session, when the last one is answered. None: requests arrive at their arrival times.
    `turns` are the turns of sessions that the requests represent.
    """

    name: str
    requests: tuple[TrafficRequest, ...]
    users: int | None = None
    turns: tuple[PlannedTurn, ...] | None = None

    @property
    def rate(self) -> float | None:
        """Mean requests per second. None for a closed loop, and if all requests come at once."""
        span = self.requests[-1].arrival - self.requests[0].arrival
        return None if self.users is not None or span <= 0 else (len(self.requests) - 1) / span

    @property
    def shares_prefixes(self) -> bool:
        return any(r.prefix or r.parts for r in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests without a load. `recorded`: their arrival times come from a trace."""

    name: str
    requests: tuple[TrafficRequest, ...]
    recorded: bool = False

    @property
    def mean_lengths(self) -> tuple[float, float]:
        return mean_lengths(self.requests)

    def take(self, count: int) -> Iterator[TrafficRequest]:
        """Yields `count` requests, repeating them if there are fewer. The arrival times of a trace
        continue."""
        last = self.requests[-1].arrival
        lap = last + (last / max(1, len(self.requests) - 1))
        for i, request in zip(range(count), itertools.cycle(self.requests), strict=False):
            yield request._replace(arrival=request.arrival + lap * (i // len(self.requests)))

    def traffic(self, arrivals: Arrivals | None, count: int, *, seed: int = 0) -> Traffic:
        """Traffic of `count` requests under a load. With None, requests arrive as recorded in the
        trace. ConfigError if there is none."""
        requests = list(self.take(count))
        if isinstance(arrivals, ClosedLoop):
            return Traffic(name=self.name, requests=tuple(requests), users=arrivals.concurrency)
        if arrivals is None:
            if not self.recorded:
                raise ConfigError(
                    f"the workload {self.name} has no arrival times; give --rate or --concurrency",
                    field="rate",
                )
            return Traffic(name=self.name, requests=tuple(requests))
        times = send_times(arrivals, count, seed)
        moved = (r._replace(arrival=t) for r, t in zip(requests, times, strict=True))
        return Traffic(name=self.name, requests=tuple(moved))

    def at_rate(self, rate: float, count: int, *, seed: int = 0) -> Traffic:
        """Traffic of `count` requests at `rate` per second on average.

        The gaps of a trace are scaled evenly. Others get Poisson arrivals of independent users.
        """
        if not self.recorded:
            return self.traffic(Poisson(rate=rate), count, seed=seed)
        own = self.traffic(None, count)
        if own.rate is None:
            raise ConfigError(
                f"all requests of {self.name} arrive at once, so they can't be scaled to --rate",
                field="rate",
            )
        scale = own.rate / rate
        return Traffic(
            name=self.name,
            requests=tuple(r._replace(arrival=r.arrival * scale) for r in own.requests),
        )


def requests_of(turns: Sequence[PlannedTurn]) -> tuple[TrafficRequest, ...]:
    """Convert turns to requests. A session is one prefix for a router, which may keep it on one replica."""
    return tuple(
        TrafficRequest(
            arrival=t.start_s,
            input_tokens=t.input_tokens,
            output_tokens=t.output_tokens,
            prefix=(t.session + 1,),
            parts=t.parts,
            after=t.after,
            ends_session=t.ends_session,
        )
        for t in turns
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionWorkload(Workload):
    """Sessions without a load. Sessions of an agents' `load` are generated without end; those of a
    trace are limited."""

    sessions: tuple[AgentSession, ...]
    load: AgentLoad | None = None  # None: from a trace
    seed: int = 0

    @classmethod
    def of(cls, name: str, sessions: Sequence[AgentSession], **settings: Any) -> Self:
        requests = requests_of(planned_turns(sessions))
        return cls(name=name, requests=requests, sessions=tuple(sessions), **settings)

    @classmethod
    def agents(cls, load: AgentLoad, seed: int) -> Self:
        return cls.of("agents", load.generate(seed), load=load, seed=seed)

    @property
    def turns_each(self) -> float:
        """Mean number of turns of a session, including those of subagents."""
        return len(self.requests) / len(self.sessions)

    @property
    def most_sessions(self) -> int:
        """Maximum number of sessions."""
        return MAX_SESSIONS if self.load is not None else len(self.sessions)

    def traffic(self, arrivals: Arrivals | None, count: int, *, seed: int = 0) -> Traffic:
        """Traffic of about `count` turns under a load of sessions: at least one session for each
        user of a closed loop."""
        users = arrivals.concurrency if isinstance(arrivals, ClosedLoop) else 1
        return self.of_sessions(arrivals, max(round(count / self.turns_each), users), seed=seed)

    def of_sessions(
        self, arrivals: Arrivals | None, num_sessions: int, *, seed: int = 0
    ) -> Traffic:
        """Traffic of this number of sessions under a load; without a load they arrive as recorded,
        or all at once."""
        sessions: Sequence[AgentSession] = self.sessions
        if self.load is not None and num_sessions > len(sessions):
            sessions = replace(self.load, sessions=num_sessions).generate(self.seed)
        turns = planned_turns(sessions[:num_sessions])
        requests, users = requests_of(turns), None
        if isinstance(arrivals, ClosedLoop):
            users = arrivals.concurrency
        elif arrivals is not None:
            times = send_times(arrivals, min(num_sessions, len(sessions)), seed)
            moved = (
                r._replace(arrival=times[t.session]) for r, t in zip(requests, turns, strict=True)
            )
            requests = tuple(moved)
        return Traffic(name=self.name, requests=requests, users=users, turns=tuple(turns))

    def at_rate(self, rate: float, count: int, *, seed: int = 0) -> Traffic:
        """Traffic of about `count` turns at `rate` turns per second on average: sessions arrive at
        random, at this rate divided by their mean number of turns."""
        return self.traffic(Poisson(rate=rate / self.turns_each), count, seed=seed)


def parse_workload(text: str, *, seed: int = 0) -> Workload:
    """Parse `sharegpt`, `fixed:IN/OUT`, `uniform:A-B/C-D`, `lengths:PATH` or `trace:PATH`."""
    kind, _, value = text.partition(":")
    if kind == "sharegpt" and not value:
        return of_lengths("sharegpt", read_lengths(SHAREGPT))
    if kind == "lengths" and value:
        return of_lengths(Path(value).name, read_lengths(Path(value)))
    if kind == "trace" and value:
        return read_trace(Path(value))
    if kind in ("fixed", "uniform"):
        try:
            ends = [[int(n) for n in part.split("-")] for part in value.split("/")]
            if [len(e) for e in ends] == [1 if kind == "fixed" else 2] * 2 and all(
                1 <= e[0] <= e[-1] for e in ends
            ):
                rng = random.Random(seed)
                (a, *_), (b, *_) = ends
                count = 1 if kind == "fixed" else 2000
                each = [
                    (rng.randint(a, ends[0][-1]), rng.randint(b, ends[1][-1])) for _ in range(count)
                ]
                return of_lengths(text, each)
        except ValueError:
            pass  # not numbers: the error is raised below
    raise ConfigError(
        f"workload={text!r} is not sharegpt, fixed:IN/OUT, uniform:A-B/C-D, lengths:PATH or trace:PATH",
        field="workload",
    )


def of_lengths(name: str, lengths: Sequence[tuple[int, int]]) -> Workload:
    return Workload(
        name=name, requests=tuple(TrafficRequest(0.0, n_in, n_out) for n_in, n_out in lengths)
    )


def read_trace(path: Path) -> Workload:
    """Read a trace file. ConfigError names the wrong line."""
    rows = read_rows(path)
    if any(row.session is not None for row in rows):
        return SessionWorkload.of(path.name, of_rows(rows), recorded=True)
    requests = (
        TrafficRequest(r.start_s, r.input_tokens, r.output_tokens, r.hash_ids) for r in rows
    )
    return Workload(name=path.name, requests=tuple(requests), recorded=True)
