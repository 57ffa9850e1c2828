"""Figures of agent sessions, measured or simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.costs.metrics import Distribution, RequestTiming, Summary, distribution, summarize

AGENT_DEFINITIONS = {
    "time a turn": "last token − send, of one request; pauses are not in it",
    "time a session": "its first send to its last token, pauses and subagents included",
    "interactivity": "1 / TPOT: output tokens a second that one user sees",
    "prefix hits": "cached tokens / prompt tokens, as the server counts them",
    "could be cached": "prompt tokens that an earlier prompt or answer began with, if nothing were ever dropped",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """Record of a turn. `cacheable_tokens`: prompt tokens that an infinite cache would contain.
    `asked_tokens`: requested length of the answer. `counts_cached`: whether the server reports
    cached tokens."""

    session: int
    turn: int
    is_subagent: bool
    is_last: bool
    timing: RequestTiming
    cacheable_tokens: int
    counts_cached: bool
    asked_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSummary:
    """Figures of a run of sessions. Failed turns count in `turns.num_failed` and nowhere else.

    `hit_rate` is None if the server does not report cached tokens. `interactivity` is 1/TPOT at the
    mean and the percentiles of TPOT, so that its p99 is the slowest."""

    num_sessions: int
    num_complete: int  # sessions whose last turn was answered
    num_subagent_turns: int
    num_short: int  # answers shorter than requested
    short_tokens: int  # tokens missing in them, in all
    num_gpus: int
    turns: Summary
    turns_per_minute: float
    prompt_tokens: Distribution | None
    session_s: Distribution | None
    hit_rate: float | None
    cacheable_rate: float
    interactivity: Distribution | None
    output_throughput_per_gpu: float
    total_throughput_per_gpu: float

    @property
    def hits_of_cacheable(self) -> float | None:
        """Fraction of the cacheable tokens that came from the cache."""
        if self.hit_rate is None or not self.cacheable_rate:
            return None
        return self.hit_rate / self.cacheable_rate

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "hits_of_cacheable": self.hits_of_cacheable}


def summarize_turns(
    records: Sequence[TurnRecord], *, num_gpus: int = 1, objectives: dict[str, float] | None = None
) -> AgentSummary:
    turns = summarize([r.timing for r in records], objectives)
    done = [r for r in records if r.timing.ok]
    n_in = sum(r.timing.input_tokens for r in done)
    sessions: dict[int, list[TurnRecord]] = {}
    for r in records:
        sessions.setdefault(r.session, []).append(r)
    complete = [
        s
        for s in sessions.values()
        if any(r.is_last and r.timing.ok for r in s if not r.is_subagent)
    ]
    short = [r.asked_tokens - r.timing.output_tokens for r in done]
    counts = any(r.counts_cached for r in done) or turns.cached_tokens > 0
    tpot = turns.tpot_s
    return AgentSummary(
        num_sessions=len(sessions),
        num_complete=len(complete),
        num_subagent_turns=sum(r.is_subagent for r in records),
        num_short=sum(n > 0 for n in short),
        short_tokens=sum(n for n in short if n > 0),
        num_gpus=num_gpus,
        turns=turns,
        turns_per_minute=60 * turns.requests_per_s,
        prompt_tokens=distribution(float(r.timing.input_tokens) for r in done),
        session_s=distribution(
            max(r.timing.last_token or 0.0 for r in s) - min(r.timing.sent for r in s)
            for s in complete
        ),
        hit_rate=turns.cached_tokens / n_in if counts and n_in else None,
        cacheable_rate=sum(r.cacheable_tokens for r in done) / n_in if n_in else 0.0,
        interactivity=None
        if tpot is None or not tpot.p50
        else Distribution(mean=1 / tpot.mean, p50=1 / tpot.p50, p90=1 / tpot.p90, p99=1 / tpot.p99),
        output_throughput_per_gpu=turns.output_throughput / num_gpus,
        total_throughput_per_gpu=turns.total_throughput / num_gpus,
    )
