"""Figures of simulated agent sessions, the same as `slipstream bench` reports for measured ones."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.bench.session_metrics import AgentSummary, TurnRecord, summarize_turns
from slipstream.bench.sessions import ANSWER_KEYS, PlannedTurn, PromptPiece, SeenPrefixes
from slipstream.costs.metrics import RequestTiming
from slipstream.simulate.traffic import Traffic


def summarize_sessions(
    traffic: Traffic,
    records: Sequence[RequestTiming],
    *,
    objectives: dict[str, float] | None = None,
) -> AgentSummary:
    """Summarizes simulated sessions as `slipstream bench` does measured ones."""
    assert traffic.turns is not None
    could = _cacheable(traffic.turns, records)
    turns = [
        TurnRecord(
            session=t.session,
            turn=t.turn,
            is_subagent=t.is_subagent,
            is_last=t.ends_session,
            timing=record,
            cacheable_tokens=could[i],
            counts_cached=True,
            asked_tokens=t.output_tokens,
        )
        for i, (t, record) in enumerate(zip(traffic.turns, records, strict=True))
    ]
    return summarize_turns(turns, objectives=objectives)


def _cacheable(turns: Sequence[PlannedTurn], records: Sequence[RequestTiming]) -> list[int]:
    """Number of prompt tokens of each turn that an infinite cache would contain."""
    seen, found = SeenPrefixes(), [0] * len(turns)
    events = [(r.sent, 1, i) for i, r in enumerate(records)]
    events += [(r.last_token, 0, i) for i, r in enumerate(records) if r.last_token is not None]
    for _, begins, i in sorted(events):
        turn = turns[i]
        if begins:
            found[i] = seen.longest(turn.parts)
            seen.add(turn.parts)
        else:
            seen.add_answer(turn.parts, PromptPiece(ANSWER_KEYS + i, turn.output_tokens, "answer"))
    return found
