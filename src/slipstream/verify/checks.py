"""The checks of a served model, and the verdict.

Each turn asks a few questions of every check that is still open; a check ends as soon as its answers
decide it (`sequential`). The prompt and the distribution come first, alone for `NAMED_BY` answers, since
a fault of theirs makes the other checks meaningless. From then on each answer tells about the
distribution too, whatever check asked for it, and the long conversations are those of the needles.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.verify import measures, probes, sequential
from slipstream.verify.asking import (
    SAMPLING,
    TOP_K,
    TOP_P,
    WARM,
    Asking,
    Plan,
    means,
)
from slipstream.verify.measures import Estimate, Sample, Share
from slipstream.verify.reference import Reference
from slipstream.verify.sequential import Decision
from slipstream.verify.served import Answer, NotOfferedError, Served

OFF = 1.1
"""Factor of a temperature that is surely found. Half as much may be called either."""

HOTTEST = 3.0
"""A temperature that a server may have drawn at. Beyond it the model is flat, as random weights are."""

MISSED, LOST = 0.05, 0.6
"""Share of the needles that the model itself finds which is no fault, and which surely is one."""

FINDS = 8
"""Needles after which a model that found none is asked for no more."""

EXCESS = 0.1
"""Nats a token that answers may be less likely than the model's own, without log-probabilities."""

SEEN = 5 * EXCESS
"""Excess of a fault that is seldom missed."""

NAMED_BY = 12
"""Minimum number of answers over which the size of a fault is averaged: the size tells the cause."""

ROUNDED, OTHER = 0.02, 0.8
"""Mean KL in nats: up to the first as 8 bits leave it, up to the second as 4 bits do."""

Outcome = Literal["pass", "fault", "not offered", "undecided"]
OUTCOMES: dict[Decision, Outcome] = {"sound": "pass", "fault": "fault", "open": "undecided"}

KINDS = {
    "prompt": "plain",
    "distribution": "plain",
    "temperature": "warm",
    "temperature 0": "greedy",
    "long context": "needle",
}
"""The questions that decide a check, where they have another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check. `why` is its cause for a fault, else what was seen."""

    check: str
    outcome: Outcome
    why: str
    estimate: Estimate | None = None


@dataclass(slots=True)
class Verification:
    """Asks a server and compares its answers with the model's own."""

    served: Served
    reference: Reference
    plan: Plan = field(default_factory=Plan)
    progress: Callable[[str], None] = lambda text: None
    asking: Asking = field(init=False)
    _ratios: dict[str, list[list[float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.asking = Asking(self.served, self.reference, self.plan)

    def run(self) -> list[Finding]:
        """Ask until all is decided. Raises what `Served.ask` does, but for features that the server
        refuses."""
        findings: list[Finding] = []
        kinds = ["plain"]  # then what is still open
        turns: Counter[str] = Counter()
        while kinds:
            turns.update(kinds)
            self.progress(f"turn {max(turns.values())}: {', '.join(kinds)}")
            for kind in kinds:
                self.asking.ask(kind)
            findings = self._judged()
            kinds = [KINDS.get(f.check, f.check) for f in findings if f.outcome == "undecided"]
            if findings[0].outcome == "fault" and len(self.asking.short()) >= NAMED_BY:
                break  # the prompt's: what else it makes wrong is no finding of its own
            most = -(-self.plan.answers // self.plan.turn)
            kinds = [kind for kind in dict.fromkeys(kinds) if turns[kind] < most]
            others = [kind for kind in kinds if kind != "plain"]
            if len(self.asking.drawn.get("plain", ())) >= NAMED_BY and SAMPLING.keys() & others:
                kinds = others  # their answers tell about the distribution as well
        self.progress("schemas and tools")
        return [*findings, self._schemas(), self._tools()]

    @property
    def num_tokens(self) -> int:
        """Answer tokens that were compared."""
        return sum(len(s.token_ids) for samples in self.asking.drawn.values() for s in samples)

    def counts(self) -> dict[str, Any]:
        """Tokens, answers and error rates of the verification, what it excludes, its scores, and its needles by
        length, for a report."""
        limit, beta, rarest = self.plan.max_kl, self.plan.rates.beta, self.plan.rarest
        short, long = self.asking.short(), self.asking.kls("long")
        tokens = [kl for answer in short for kl in answer]
        return {
            "num_tokens": self.num_tokens,
            "num_prompt_tokens": self.asking.num_prompt_tokens,
            "num_answers": self.asking.num_answers,
            "rates": dataclasses.asdict(self.plan.rates),
            "max_kl": limit,
            "excluded": {
                "one_in_answers": sequential.excluded(means(short), limit, beta, rarest),
                "answers": len(short),
                "without_logprobs": None if short else SEEN,  # in every answer, in nats a token
                "one_in_tokens": sequential.excluded(tokens, limit, beta, rarest),
                "tokens": len(tokens),
                "one_in_long_answers": sequential.excluded(
                    means(long), limit, beta, self.asking.long_rarest
                ),
                "long_answers": len(long),
                "broken_share": {
                    name: sequential.excluded_share(ended, beta)
                    for name, (right, ended) in self.asking.formed.items()
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
                for length, found in sorted(self.asking.needles.items())
            ],
        }

    def _scores(self) -> dict[str, Share]:
        """Agreement with the model's likeliest tokens and the tasks' shares, of what was asked."""
        drawn, needles = self.asking.drawn, self.asking.needles.values()
        agreed = [s.agreed for samples in drawn.values() for s in samples]
        greedy = [s.is_likeliest for s in drawn.get("greedy", [])]
        words = [pair for found in needles for pair in found]
        found = {
            "likeliest tokens agree": measures.clustered(agreed),
            "greedy answers agree": measures.share(sum(greedy), len(greedy)),
            "needles found": measures.share(sum(served for served, _ in words), len(words)),
            "needles found by the model": measures.share(sum(own for _, own in words), len(words)),
            **{f"{name} kept": measures.share(*kept) for name, kept in self.asking.formed.items()},
        }
        return {name: share for name, share in found.items() if share.count}

    # --- Judging ------------------------------------------------------------------------------

    def _judged(self) -> list[Finding]:
        prompt, weights = self._prompts(), self._distribution("plain", "distribution")
        is_hotter = self._is_only_temperature(weights)
        if prompt.outcome == "fault" or (weights.outcome == "fault" and not is_hotter):
            # A wrong prompt or wrong weights make the others meaningless, but for a cut context.
            return [prompt, weights]
        if is_hotter:
            temperature = self._temperature()
            if temperature.outcome == "fault":
                return [prompt, temperature]
            assert weights.estimate is not None
            why = f"KL {weights.estimate.value:.2g} nats: as of another temperature"
            return [prompt, dataclasses.replace(weights, why=why), temperature]
        read = weights.estimate.count if weights.estimate else 0
        if weights.outcome != "pass" and read < NAMED_BY:
            return [prompt, weights]
        more = [self._long(), self._needle()] if self.plan.long_lines else []
        return [
            prompt,
            weights,
            *more,
            self._temperature(),
            *self._cuts(),
        ]

    def _prompts(self) -> Finding:
        if not self.asking.counts:
            return Finding(check="prompt", outcome="not offered", why="no usage is given")
        other = {given - own for given, own in self.asking.counts if given != own}
        if not other:
            return Finding(
                check="prompt", outcome="pass", why="as many tokens as the template gives"
            )
        differences = ", ".join(f"{d:+d}" for d in sorted(other))
        if other <= {-1, 1} and all(given != own for given, own in self.asking.counts):
            why = f"{differences} token in every prompt: a BOS more or less"
        else:
            why = f"prompts differ by {differences} tokens: another chat template"
        return Finding(check="prompt", outcome="fault", why=why)

    def _distribution(self, kind: str, check: str) -> Finding:
        if kind in self.asking.refused:
            return Finding(check=check, outcome="not offered", why=self.asking.refused[kind])
        is_long = kind == "long"
        values = means(self.asking.kls(kind) if is_long else self.asking.short())
        if not values:
            return self._without_logprobs(kind, check)
        kl, limit, rates = measures.mean(values), self.plan.max_kl, self.plan.rates
        rarest = self.asking.long_rarest if is_long else self.plan.rarest
        decision = sequential.mean(values, limit, rates, rarest)
        why = f"KL {kl.value:.2g} ± {kl.stderr:.1g} nats"
        if decision == "fault" and kl.count < min(NAMED_BY, self.plan.answers):
            decision = "open"
        empty = sum(self.asking.empty[k] for k in (["long"] if is_long else SAMPLING))
        if decision == "fault":
            told = f"{empty} of {kl.count} answers are empty" if empty else cause(kl.value)
            why += f": {told}"
        elif decision == "open":
            needed = sequential.needed(kl.value, limit, rates.beta, rarest)
            near = f"too near to the limit of {limit:g}"
            why += f": {near if needed is None else f'{kl.count} of some {needed} answers'}"
        return Finding(check=check, outcome=OUTCOMES[decision], why=why, estimate=kl)

    def _without_logprobs(self, kind: str, check: str) -> Finding:
        """Judges by the drawn tokens alone: how much less likely they are than the model's own
        would be, −ln p against the entropy. Sees other weights, not rounding."""
        values = [float((-s.chosen - entropy(s)).mean()) for s in self.asking.drawn.get(kind, [])]
        excess = measures.mean(values)
        if not excess.count:
            return Finding(check=check, outcome="undecided", why="no answer could be read")
        seen = (
            f"no log-probabilities; its tokens are {abs(excess.value):.2f} ± {excess.stderr:.2f} nats "
            f"{'less' if excess.value > 0 else 'more'} likely than draws of the model"
        )
        # Values have both signs, so both bounds are asymptotic.
        rates = self.plan.rates
        if -sequential.bound([-v for v in values], rates.alpha) > EXCESS:
            why = f"{seen}: {cause(OTHER + 1)}"
            return Finding(check=check, outcome="fault", why=why, estimate=excess)
        decided = sequential.bound(values, rates.beta) < SEEN
        return Finding(
            check=check,
            outcome="pass" if decided else "undecided",
            why=f"{seen}; rounding can't be seen",
            estimate=excess,
        )

    def _long(self) -> Finding:
        cut = [given - own for given, own in self.asking.long_counts if given < own - 1]
        if cut and all(given == own for given, own in self.asking.counts):
            why = f"{-min(cut):,} tokens of a long conversation are missing: the context is cut"
            return Finding(check="long context", outcome="fault", why=why)
        found = self._distribution("long", "long context")
        if (kl := found.estimate) is not None and found.outcome == "fault":
            why = f"KL {kl.value:.2g} nats, short ones are right: keys and values in fewer bits, or a cut context"
            return Finding(check="long context", outcome="fault", why=why, estimate=kl)
        return found

    def _needle(self) -> Finding:
        if "long" in self.asking.refused:  # the needles are those of the long conversations
            return Finding(check="needle", outcome="not offered", why=self.asking.refused["long"])
        told = "; ".join(
            f"{length:,} tokens: {sum(served for served, _ in found)} of {len(found)}"
            f" (the model itself {sum(own for _, own in found)})"
            for length, found in sorted(self.asking.needles.items())
        )
        missed = [
            not served for found in self.asking.needles.values() for served, own in found if own
        ]
        if not missed and sum(len(found) for found in self.asking.needles.values()) >= FINDS:
            why = f"{told}: the model itself finds none, so nothing is told"
            return Finding(check="needle", outcome="not offered", why=why)
        decision = sequential.share(missed, MISSED, LOST, self.plan.rates)
        is_lost = decision == "fault"
        why = f"{told}: the far context is lost" if is_lost else told or "not asked yet"
        return Finding(check="needle", outcome=OUTCOMES[decision], why=why)

    def _is_only_temperature(self, weights: Finding) -> bool:
        """True if the model at another temperature explains what a fault of the distribution saw."""
        kl, drawn = weights.estimate, self.asking.drawn.get("plain", [])
        if weights.outcome != "fault" or kl is None or not any(s.kl for s in drawn):
            return False
        fitted = measures.temperature(drawn, 1.0).value
        at = [measures.divergences(s, self.reference.token_id, fitted) for s in drawn]
        return fitted < HOTTEST and measures.mean(means(at)).value < 0.2 * kl.value

    def _temperature(self) -> Finding:
        """Whether answers were drawn at the temperatures that were asked for, or at others by one factor."""
        check = "temperature"
        if "warm" in self.asking.refused:
            return Finding(check=check, outcome="not offered", why=self.asking.refused["warm"])
        for kind, asked in (("plain", 1.0), ("warm", WARM)):
            ratios = self._ratios.setdefault(kind, [])  # a row an answer
            for s in self.asking.drawn.get(kind, [])[len(ratios) :]:
                own, *others = s.likelihoods([asked, OFF * asked, asked / OFF])
                ratios.append([other - own for other in others])
        sums = [
            sum(column)
            for column in zip(*self._ratios["plain"], *self._ratios["warm"], strict=True)
        ]
        drawn = self.asking.drawn.get("warm", [])
        # Both temperatures are asked for, so that a server that ignores the field is seen.
        decision = sequential.temperature(sums or [0.0], self.plan.rates) if drawn else "open"
        if decision == "open" and len(drawn) < self.plan.answers:
            return Finding(check=check, outcome="undecided", why=f"{len(drawn)} answers")
        found = measures.temperature(drawn, WARM)
        why = f"drawn at {found.value:.3f} ± {found.stderr:.3f} where {WARM:g} was asked for"
        if decision == "fault":
            ignored = abs(found.value - 1) < 4 * found.stderr
            why += f": {'the field is ignored' if ignored else 'another temperature'}"
        return Finding(check=check, outcome=OUTCOMES[decision], why=why, estimate=found)

    def _cuts(self) -> list[Finding]:
        return [
            self._cut("top_k", lambda s: measures.outside_top_k(s, TOP_K)),
            self._cut("top_p", lambda s: measures.outside_top_p(s, TOP_P)),
            self._cut("greedy", measures.unlikely),
        ]

    def _cut(self, kind: str, drawn: Callable[[Sample], list[measures.Draw]]) -> Finding:
        """Whether tokens keep to a cut, where the model itself leaves it often enough to tell."""
        check = "temperature 0" if kind == "greedy" else kind
        if kind in self.asking.refused:
            return Finding(check=check, outcome="not offered", why=self.asking.refused[kind])
        draws = [draw for s in self.asking.drawn.get(kind, []) for draw in drawn(s)]
        if not draws:
            return Finding(check=check, outcome="undecided", why="no answer could be read")
        decision = sequential.cut(draws, self.plan.rates)
        share = measures.mean([float(is_outside) for is_outside, _ in draws])
        own = sum(chance for _, chance in draws) / len(draws)
        why = (
            f"{100 * share.value:.1f} % of {share.count} tokens outside, "
            f"{100 * own:.1f} % were expected without the field"
        )
        if decision == "fault":
            why += ": answers are drawn" if kind == "greedy" else ": the field is ignored"
        return Finding(check=check, outcome=OUTCOMES[decision], why=why, estimate=share)

    def _schemas(self) -> Finding:
        """The share of answers that keep to a schema."""
        wanted = {"type": "json_schema", "json_schema": {"name": "work", "schema": probes.SCHEMA}}
        return self._rate(
            "schema",
            lambda answer: probes.keeps_to_schema(json.loads(answer.text)),
            "Name a work of art, as JSON.",
            response_format=wanted,
        )

    def _tools(self) -> Finding:
        """The share of required tool calls whose arguments keep to the tool's schema. A server can't be
        blamed for tools that the model itself doesn't know."""
        if not self.reference.has_tools:
            why = "the model's own chat template knows no tools"
            return Finding(check="tools", outcome="not offered", why=why)

        def keeps(answer: Answer) -> bool:
            called = answer.tool_calls[0]["function"]
            own = called["name"] == probes.TOOL_NAME
            return own and probes.keeps_to_tool(json.loads(called["arguments"]))

        question = "What is the weather in Oslo?"
        return self._rate("tools", keeps, question, tools=[probes.TOOL], tool_choice="required")

    def _rate(self, name: str, keeps: Callable[[Answer], bool], text: str, **more: Any) -> Finding:
        try:
            wrong = self.asking.ask_formed(name, keeps, text, **more)
        except NotOfferedError as error:
            return Finding(check=name, outcome="not offered", why=str(error))
        right, ended = self.asking.formed[name]
        if wrong:
            why = f"{len(wrong)} of {ended} broken: {wrong[0][:80]!r}"
            return Finding(check=name, outcome="fault", why=why)
        if not ended:
            why = f"none of {self.plan.forms} answers ended within 200 tokens"
            return Finding(check=name, outcome="undecided", why=why)
        share = sequential.excluded_share(right, self.plan.rates.beta)
        why = f"{right} of {ended} valid: {100 * share:.2g} % or more broken ones are excluded"
        return Finding(check=name, outcome="pass", why=why)


def entropy(sample: Sample) -> Any:
    """The entropy [n] of the model's distribution, in nats."""
    return -(sample.logprobs.exp() * sample.logprobs.clamp(min=-1e4)).sum(-1)


def cause(kl: float) -> str:
    """Returns the likeliest cause of a mean KL of the distribution."""
    if kl < ROUNDED:
        return "rounding as of 8 bits in weights, activations or cache"
    if kl < OTHER:
        return "rounding as of 4 bits, or slightly other weights: a version, an adapter"
    return "other weights: another version, a missing layer or adapter"
