"""The size of a verification, and the observations so far."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.verify import measures, sequential
from slipstream.verify.measures import Proportion, ScoredAnswer
from slipstream.verify.sequential import ErrorRates

TOP_K, TOP_P = 2, 0.5
WARM = 1.5
"""Temperature whose samples are informative about it: a token as much as two at temperature 1, or six at 0.5."""

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "warm": {"temperature": WARM},
    "top_k": {"temperature": 1.0, "top_k": TOP_K},
    "top_p": {"temperature": 1.0, "top_p": TOP_P},
    "greedy": {"temperature": 0.0},
}
"""Sampling settings of the short questions, by kind. Needles use those of "greedy"."""

LONG_RAREST = 3.0
"""Number of long conversations in one of which a fault must occur so that "sound" excludes it. A long one
costs about twenty times a short one; faults that are rare at any length are found with short ones."""

SEEN_EXCESS = 0.5
"""Excess, in nats per token, of a fault that is rarely missed without log-probabilities."""

NUM_FORMED = 8
"""Number of answers to a schema, and of calls of a tool, requested at a time, and by default in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPlan:
    """Size of a verification.

    - `answers`: maximum answers for each check.
    - `long_lines`: lines of some 20 tokens in the longest conversation; 0: no long ones.
    - `rarest`: faults in at least 1 of this many answers are searched.
    - `forms`: maximum answers to a schema, and maximum calls of a tool.
    - `rates`: the error rates of each check.
    - `seed`: a different seed asks different questions."""

    answers: int = 96
    turn: int = 4
    max_tokens: int = 24
    long_lines: int = 40
    max_kl: float = 0.01
    rarest: float = sequential.RAREST
    forms: int = NUM_FORMED
    concurrency: int = 8
    seed: int = 0
    rates: ErrorRates = field(default_factory=ErrorRates)


@dataclass(slots=True)
class Evidence:
    """A server's answers so far. `drawn` and `empty` are by kind of question; `counts` are pairs
    (prompt tokens reported by the server, prompt tokens with the model's own template)."""

    plan: VerifyPlan
    drawn: dict[str, list[ScoredAnswer]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # reason, by kind of question
    # answers that are empty though the model would not end at once
    empty: Counter[str] = field(default_factory=Counter)
    counts: list[tuple[int, int]] = field(default_factory=list)
    long_counts: list[tuple[int, int]] = field(default_factory=list)
    needles: dict[int, list[tuple[bool, bool]]] = field(default_factory=dict)
    """Pairs (the server finds the code word, the model itself finds it), by prompt tokens."""
    formed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(correct ones, all complete ones) of the answers with a required form, by check."""
    num_prompt_tokens: int = 0
    num_answers: int = 0

    @property
    def long_rarest(self) -> float:
        return min(self.plan.rarest, LONG_RAREST)

    def kls(self, kind: str) -> list[list[float]]:
        """KLs at each position of each answer of a kind that has log-probabilities. None if the server reports them
        after temperature and cuts. An empty answer counts with the largest weight of a single value."""
        drawn = [s for s in self.drawn.get(kind, []) if s.kl]
        if kind != "plain" and sum(sum(s.kl_cut) - sum(s.kl) for s in drawn) < 0:
            return []
        empty = [[self.plan.rarest * self.plan.max_kl]] * self.empty[kind]
        return [*(list(s.kl) for s in drawn), *(empty if drawn else [])]

    def short(self) -> list[list[float]]:
        return [kls for kind in SAMPLING for kls in self.kls(kind)]

    @property
    def num_tokens(self) -> int:
        """Number of answer tokens compared."""
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

    def _scores(self) -> dict[str, Proportion]:
        """Fractions of agreement with the model's most likely tokens, and of solved tasks, for
        those that were asked."""
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
    """Mean of each answer's values."""
    return [sum(each) / len(each) for each in values if each]
