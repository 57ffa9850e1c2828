"""Verdicts from the observations of a verification."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.verify import measures, sequential
from slipstream.verify.measures import Estimate, ScoredAnswer
from slipstream.verify.seen import SAMPLING, SEEN_EXCESS, TOP_K, TOP_P, WARM, Evidence, means
from slipstream.verify.sequential import Decision

OFF = 1.1
"""Factor of a temperature error that is always found. Half of it may be judged either way."""

HOTTEST = 3.0
"""Maximum temperature at which a server may have sampled. Beyond it the distribution is flat, like that of random
weights."""

MISSED, LOST = 0.05, 0.6
"""Fraction of the needles found by the model itself which a server may miss: up to the first it is no fault, from the second
on it is one."""

FINDS = 8
"""Number of needles after which a model that has found none is not asked any more."""

EXCESS = 0.1
"""Allowed excess, in nats per token, of the answers' surprise over the model's own, if there are no log-probabilities."""

NAMED_BY = 12
"""Minimum number of answers over which the size of a fault is averaged, because the size determines the reported cause."""

ROUNDED, OTHER = 0.02, 0.8
"""Mean KL in nats that determines the cause: up to the first it is like 8-bit quantization, up to the second like 4-bit."""

Outcome = Literal["pass", "fault", "not offered", "undecided"]
OUTCOMES: dict[Decision, Outcome] = {"sound": "pass", "fault": "fault", "open": "undecided"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of one check. `why` is the cause of a fault, else the observation."""

    check: str
    outcome: Outcome
    why: str
    estimate: Estimate | None = None


@dataclass(slots=True)
class Judge:
    """Judges a server by its answers. `token_id` returns the model's token id for a served token."""

    seen: Evidence
    token_id: Callable[..., Any]
    _ratios: dict[str, list[list[float]]] = field(default_factory=dict)

    def judged(self) -> list[Verdict]:
        prompt, weights = self._prompts(), self._distribution("plain", "distribution")
        is_hotter = self._is_only_temperature(weights)
        if prompt.outcome == "fault" or (weights.outcome == "fault" and not is_hotter):
            # A wrong prompt or wrong weights make the other checks meaningless, except for a context that is cut off.
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
        more = [self._long(), self._needle()] if self.seen.plan.long_lines else []
        return [prompt, weights, *more, self._temperature(), *self._cuts()]

    def _prompts(self) -> Verdict:
        if not self.seen.counts:
            return Verdict(check="prompt", outcome="not offered", why="no usage is given")
        other = {given - own for given, own in self.seen.counts if given != own}
        if not other:
            return Verdict(
                check="prompt", outcome="pass", why="as many tokens as the template gives"
            )
        differences = ", ".join(f"{d:+d}" for d in sorted(other))
        if other <= {-1, 1} and all(given != own for given, own in self.seen.counts):
            why = f"{differences} token in every prompt: a BOS more or less"
        else:
            why = f"prompts differ by {differences} tokens: another chat template"
        return Verdict(check="prompt", outcome="fault", why=why)

    def _distribution(self, kind: str, check: str) -> Verdict:
        if kind in self.seen.refused:
            return Verdict(check=check, outcome="not offered", why=self.seen.refused[kind])
        is_long = kind == "long"
        values = means(self.seen.kls(kind) if is_long else self.seen.short())
        if not values:
            return self._without_logprobs(kind, check)
        kl, limit, rates = measures.mean(values), self.seen.plan.max_kl, self.seen.plan.rates
        rarest = self.seen.long_rarest if is_long else self.seen.plan.rarest
        decision = sequential.mean(values, limit, rates, rarest)
        why = f"KL {kl.value:.2g} ± {kl.stderr:.1g} nats"
        if decision == "fault" and kl.count < min(NAMED_BY, self.seen.plan.answers):
            decision = "open"
        empty = sum(self.seen.empty[k] for k in (["long"] if is_long else SAMPLING))
        if decision == "fault":
            told = f"{empty} of {kl.count} answers are empty" if empty else cause(kl.value)
            why += f": {told}"
        elif decision == "open":
            needed = sequential.needed(kl.value, limit, rates.beta, rarest)
            near = f"too near to the limit of {limit:g}"
            why += f": {near if needed is None else f'{kl.count} of some {needed} answers'}"
        return Verdict(check=check, outcome=OUTCOMES[decision], why=why, estimate=kl)

    def _without_logprobs(self, kind: str, check: str) -> Verdict:
        """Judge by the sampled tokens alone: the excess of their −ln p over the model's entropy.
        Detects other weights, but not quantization."""
        values = [float((-s.chosen - entropy(s)).mean()) for s in self.seen.drawn.get(kind, [])]
        excess = measures.mean(values)
        if not excess.count:
            return Verdict(check=check, outcome="undecided", why="no answer could be read")
        seen = (
            f"no log-probabilities; its tokens are {abs(excess.value):.2f} ± {excess.stderr:.2f} nats "
            f"{'less' if excess.value > 0 else 'more'} likely than draws of the model"
        )
        # Values have both signs, so both bounds are asymptotic.
        rates = self.seen.plan.rates
        if -sequential.bound([-v for v in values], rates.alpha) > EXCESS:
            why = f"{seen}: {cause(OTHER + 1)}"
            return Verdict(check=check, outcome="fault", why=why, estimate=excess)
        decided = sequential.bound(values, rates.beta) < SEEN_EXCESS
        return Verdict(
            check=check,
            outcome="pass" if decided else "undecided",
            why=f"{seen}; rounding can't be seen",
            estimate=excess,
        )

    def _long(self) -> Verdict:
        cut = [given - own for given, own in self.seen.long_counts if given < own - 1]
        if cut and all(given == own for given, own in self.seen.counts):
            why = f"{-min(cut):,} tokens of a long conversation are missing: the context is cut"
            return Verdict(check="long context", outcome="fault", why=why)
        found = self._distribution("long", "long context")
        if (kl := found.estimate) is not None and found.outcome == "fault":
            why = f"KL {kl.value:.2g} nats, short ones are right: keys and values in fewer bits, or a cut context"
            return Verdict(check="long context", outcome="fault", why=why, estimate=kl)
        return found

    def _needle(self) -> Verdict:
        if "long" in self.seen.refused:  # needles are in the long conversations
            return Verdict(check="needle", outcome="not offered", why=self.seen.refused["long"])
        told = "; ".join(
            f"{length:,} tokens: {sum(served for served, _ in found)} of {len(found)}"
            f" (the model itself {sum(own for _, own in found)})"
            for length, found in sorted(self.seen.needles.items())
        )
        missed = [
            not served for found in self.seen.needles.values() for served, own in found if own
        ]
        if not missed and sum(len(found) for found in self.seen.needles.values()) >= FINDS:
            why = f"{told}: the model itself finds none, so nothing is told"
            return Verdict(check="needle", outcome="not offered", why=why)
        decision = sequential.share(missed, MISSED, LOST, self.seen.plan.rates)
        is_lost = decision == "fault"
        why = f"{told}: the far context is lost" if is_lost else told or "not asked yet"
        return Verdict(check="needle", outcome=OUTCOMES[decision], why=why)

    def _is_only_temperature(self, weights: Verdict) -> bool:
        """Whether the model at another temperature explains a fault found in the distribution."""
        kl, drawn = weights.estimate, self.seen.drawn.get("plain", [])
        if weights.outcome != "fault" or kl is None or not any(s.kl for s in drawn):
            return False
        fitted = measures.temperature(drawn, 1.0).value
        at = [measures.divergences(s, self.token_id, fitted) for s in drawn]
        return fitted < HOTTEST and measures.mean(means(at)).value < 0.2 * kl.value

    def _temperature(self) -> Verdict:
        """Judge whether answers were sampled at the requested temperatures, or at others by a
        common factor."""
        check = "temperature"
        if "warm" in self.seen.refused:
            return Verdict(check=check, outcome="not offered", why=self.seen.refused["warm"])
        for kind, asked in (("plain", 1.0), ("warm", WARM)):
            ratios = self._ratios.setdefault(kind, [])  # one row per answer
            for s in self.seen.drawn.get(kind, [])[len(ratios) :]:
                own, *others = s.likelihoods([asked, OFF * asked, asked / OFF])
                ratios.append([other - own for other in others])
        sums = [
            sum(column)
            for column in zip(*self._ratios["plain"], *self._ratios["warm"], strict=True)
        ]
        drawn = self.seen.drawn.get("warm", [])
        # Two temperatures are requested, so that a server that ignores the field is detected.
        decision = sequential.temperature(sums or [0.0], self.seen.plan.rates) if drawn else "open"
        if decision == "open" and len(drawn) < self.seen.plan.answers:
            return Verdict(check=check, outcome="undecided", why=f"{len(drawn)} answers")
        found = measures.temperature(drawn, WARM)
        why = f"drawn at {found.value:.3f} ± {found.stderr:.3f} where {WARM:g} was asked for"
        if decision == "fault":
            ignored = abs(found.value - 1) < 4 * found.stderr
            why += f": {'the field is ignored' if ignored else 'another temperature'}"
        return Verdict(check=check, outcome=OUTCOMES[decision], why=why, estimate=found)

    def _cuts(self) -> list[Verdict]:
        return [
            self._cut("top_k", lambda s: measures.outside_top_k(s, TOP_K)),
            self._cut("top_p", lambda s: measures.outside_top_p(s, TOP_P)),
            self._cut("greedy", measures.unlikely),
        ]

    def _cut(self, kind: str, drawn: Callable[[ScoredAnswer], list[measures.Draw]]) -> Verdict:
        """Judge whether tokens stay within a cut (top-k, top-p), if the model itself would leave it often enough to tell."""
        check = "temperature 0" if kind == "greedy" else kind
        if kind in self.seen.refused:
            return Verdict(check=check, outcome="not offered", why=self.seen.refused[kind])
        draws = [draw for s in self.seen.drawn.get(kind, []) for draw in drawn(s)]
        if not draws:
            return Verdict(check=check, outcome="undecided", why="no answer could be read")
        decision = sequential.cut(draws, self.seen.plan.rates)
        share = measures.mean([float(is_outside) for is_outside, _ in draws])
        own = sum(chance for _, chance in draws) / len(draws)
        why = (
            f"{100 * share.value:.1f} % of {share.count} tokens outside, "
            f"{100 * own:.1f} % were expected without the field"
        )
        if decision == "fault":
            why += ": answers are drawn" if kind == "greedy" else ": the field is ignored"
        return Verdict(check=check, outcome=OUTCOMES[decision], why=why, estimate=share)


def entropy(sample: ScoredAnswer) -> Any:
    """Entropy [n] of the model's distribution at each position, in nats."""
    return -(sample.logprobs.exp() * sample.logprobs.clamp(min=-1e4)).sum(-1)


def cause(kl: float) -> str:
    """Most likely cause of a mean KL of the distribution."""
    if kl < ROUNDED:
        return "rounding as of 8 bits in weights, activations or cache"
    if kl < OTHER:
        return "rounding as of 4 bits, or slightly other weights: a version, an adapter"
    return "other weights: another version, a missing layer or adapter"
