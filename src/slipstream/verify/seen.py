"""The size of a verification, and the observations so far."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.verify import measures, sequential
from slipstream.verify.measures import Sample, Share
from slipstream.verify.sequential import Rates

TOP_K, TOP_P = 2, 0.5
WARM = 1.5
"""A temperature whose draws tell much about it: a token as much as two at 1, and six at 0.5."""

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "warm": {"temperature": WARM},
    "top_k": {"temperature": 1.0, "top_k": TOP_K},
    "top_p": {"temperature": 1.0, "top_p": TOP_P},
    "greedy": {"temperature": 0.0},
}
"""Settings of the short questions, by kind. Those of a needle are greedy's."""

LONG_RAREST = 3.0
"""Long conversations of which one has a fault that "sound" excludes. They cost some twenty times a short
one; a fault that is rare whatever the length is seen in those."""

SEEN_EXCESS = 0.5
"""Excess in nats a token of a fault that is seldom missed without log-probabilities."""

NUM_FORMED = 8
"""Answers to a schema, and calls of a tool, that are asked for at a time, and by default in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPlan:
    """How much is asked.

    - `answers`: the most for each check.
    - `long_lines`: lines of some 20 tokens in the longest conversation; 0: no long ones.
    - `rarest`: faults in 1 of so many answers, or in more of them, are looked for.
    - `forms`: the most answers to a schema, and the most calls of a tool.
    - `rates`: the error rates of each check.
    - `seed`: another one asks other questions."""

    answers: int = 96
    turn: int = 4
    max_tokens: int = 24
    long_lines: int = 40
    max_kl: float = 0.01
    rarest: float = sequential.RAREST
    forms: int = NUM_FORMED
    concurrency: int = 8
    seed: int = 0
    rates: Rates = field(default_factory=Rates)


@dataclass(slots=True)
class Seen:
    """A server's answers so far. `drawn` and `empty` are by kind of question; `counts` are pairs (tokens that the
    server counts in a prompt, tokens that the model's own template gives)."""

    plan: VerifyPlan
    drawn: dict[str, list[Sample]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # why, by kind
    empty: Counter[str] = field(default_factory=Counter)  # answers that the model would begin
    counts: list[tuple[int, int]] = field(default_factory=list)
    long_counts: list[tuple[int, int]] = field(default_factory=list)
    needles: dict[int, list[tuple[bool, bool]]] = field(default_factory=dict)
    """Pairs (the server finds it, the model itself does) of code words, by prompt tokens."""
    formed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(right ones, all that ended) of the answers whose form is given, by check."""
    num_prompt_tokens: int = 0
    num_answers: int = 0

    @property
    def long_rarest(self) -> float:
        return min(self.plan.rarest, LONG_RAREST)

    def kls(self, kind: str) -> list[list[float]]:
        """KLs at each position of each answer of a kind that has log-probabilities. None where the
        server gives those after temperature and cuts. Empty answers count as far as one value can."""
        drawn = [s for s in self.drawn.get(kind, []) if s.kl]
        if kind != "plain" and sum(sum(s.kl_cut) - sum(s.kl) for s in drawn) < 0:
            return []
        empty = [[self.plan.rarest * self.plan.max_kl]] * self.empty[kind]
        return [*(list(s.kl) for s in drawn), *(empty if drawn else [])]

    def short(self) -> list[list[float]]:
        return [kls for kind in SAMPLING for kls in self.kls(kind)]

    @property
    def num_tokens(self) -> int:
        """Answer tokens that were compared."""
        return sum(len(s.token_ids) for samples in self.drawn.values() for s in samples)

    def report(self) -> dict[str, Any]:
        """Tokens, answers and error rates of the verification, what it excludes, its scores, and its needles by
        length, for a report."""
        limit, beta, rarest = self.plan.max_kl, self.plan.rates.beta, self.plan.rarest
        short, long = self.short(), self.kls("long")
        tokens = [kl for answer in short for kl in answer]
        return {
            "num_tokens": self.num_tokens,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_answers": self.num_answers,
            "rates": dataclasses.asdict(self.plan.rates),
            "max_kl": limit,
            "excluded": {
                "one_in_answers": sequential.excluded(means(short), limit, beta, rarest),
                "answers": len(short),
                "without_logprobs": None
                if short
                else SEEN_EXCESS,  # in every answer, in nats a token
                "one_in_tokens": sequential.excluded(tokens, limit, beta, rarest),
                "tokens": len(tokens),
                "one_in_long_answers": sequential.excluded(
                    means(long), limit, beta, self.long_rarest
                ),
                "long_answers": len(long),
                "broken_share": {
                    name: sequential.excluded_share(ended, beta)
                    for name, (right, ended) in self.formed.items()
                    if right == ended
                },
            },
            "scores": {name: dataclasses.asdict(found) for name, found in self._scores().items()},
            "needles": [
                {
                    "num_prompt_tokens": length,
                    "asked": len(found),
                    "found": sum(served for served, _ in found),
                    "found_by_model": sum(own for _, own in found),
                    "share": dataclasses.asdict(
                        measures.share(sum(served for served, _ in found), len(found))
                    ),
                }
                for length, found in sorted(self.needles.items())
            ],
        }

    def _scores(self) -> dict[str, Share]:
        """Returns the shares of agreement with the model's likeliest tokens, and of tasks, among
        those asked for."""
        drawn, needles = self.drawn, self.needles.values()
        agreed = [s.agreed for samples in drawn.values() for s in samples]
        greedy = [s.is_likeliest for s in drawn.get("greedy", [])]
        words = [pair for found in needles for pair in found]
        found = {
            "likeliest tokens agree": measures.clustered(agreed),
            "greedy answers agree": measures.share(sum(greedy), len(greedy)),
            "needles found": measures.share(sum(served for served, _ in words), len(words)),
            "needles found by the model": measures.share(sum(own for _, own in words), len(words)),
            **{f"{name} kept": measures.share(*kept) for name, kept in self.formed.items()},
        }
        return {name: share for name, share in found.items() if share.count}


def means(values: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each answer."""
    return [sum(each) / len(each) for each in values if each]
