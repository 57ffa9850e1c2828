"""Sequential tests: a check ends as soon as its answers decide it, with stated error rates.

A check looks at its answers after each turn. Tests that hold at every look keep their rates, however
often one looks (Ville's inequality: a fair bet ever multiplies its stake by 1 / α with a chance of
at most α).

1. Shares and temperatures: Wald's sequential probability ratio test (Wald 1945, Annals of
   Mathematical Statistics 16:2). Under "sound" the likelihood ratio is a fair bet, whatever the
   tokens before; so tokens of one answer need not be independent.
2. A mean of values that are not negative, such as a KL: a bet that it is above its limit
   (Waudby-Smith and Ramdas 2024, JRSS-B 86:1). It needs no assumption about their distribution.
3. That it is below its limit: a bet against that, of values cut at `rarest` limits. It holds for any values
   whose mean is still above the limit once they are cut. So it excludes each fault that comes once in
   `rarest` values or more often, and is of `rarest` limits or more where it comes.
4. A mean of values of both signs: an asymptotic confidence sequence (Waudby-Smith et al. 2024,
   Annals of Statistics 52:6; Robbins' normal mixture). Its rate holds as the number of answers grows.
5. Whether draws keep to a cut: Wald's test again, of the chance that the model gives each draw to be
   outside. Draws that are alike with a cut and without decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Decision = Literal["fault", "sound", "open"]

MIXTURE_COUNT = 12
"""Number of values at which the confidence sequence is tightest."""

FEWEST = 12
"""Minimum number of values for an asymptotic bound."""

RAREST = 8.0
"""Values of which one is a fault that "sound" excludes. No test excludes it by fewer values than
ln β / ln(1 − 1 / RAREST), 35 at a rate of 0.01; this one needs 36."""

LOWERED = ((1.0, 0.9), (0.75, 0.1))
"""Fractions of the wealth that are bet on a mean below its limit, each with its part of the stake.
The first needs the fewest values; the second survives one value beyond the cut."""

FINER = 1.05
"""Factor between two values of `rarest` that are tried."""

KEPT, SUREST = 0.1, 0.9
"""(fraction of the probability outside a cut that remains by rounding in a server with that cut,
maximum probability used, so that no sample decides alone)."""

STAKES = (0.02, 0.05, 0.1, 0.25, 0.5, 0.9)
"""Fractions of the wealth that are bet, each with a part of the stake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRates:
    """Error rates of one check: `alpha`, the probability of calling a sound server faulty; `beta`,
    of calling a fault of the stated size sound."""

    alpha: float = 0.001
    beta: float = 0.01

    def decide(self, log_ratio: float) -> Decision:
        """Decision by a log-likelihood ratio of "faulty" to "sound"."""
        if log_ratio >= math.log(1 / self.alpha):
            return "fault"
        return "sound" if log_ratio <= math.log(self.beta) else "open"


def share(values: Sequence[float], usual: float, faulty: float, rates: ErrorRates) -> Decision:
    """Decide whether ones have a frequency of `usual` or less, or of `faulty` or more. Values are 0 or 1."""
    hits = sum(values)
    misses = len(values) - hits
    up, down = math.log(faulty / usual), math.log((1 - faulty) / (1 - usual))
    return rates.decide(hits * up + misses * down)


def cut(draws: Sequence[tuple[bool, float]], rates: ErrorRates) -> Decision:
    """Decide whether samples stay within a cut, or were drawn without one. Each has (whether it is
    outside of the cut, the probability of that without a cut)."""
    ratio = 0.0
    for is_outside, chance in draws:
        chance = min(chance, SUREST)
        ratio += -math.log(KEPT) if is_outside else math.log((1 - chance) / (1 - KEPT * chance))
    return rates.decide(ratio)


def temperature(ratios: Sequence[float], rates: ErrorRates) -> Decision:
    """Decide whether answers were sampled at the requested temperature, or at another one.

    `ratios` are the log-likelihoods of all answers at each of the other temperatures, minus that at
    the requested one. Each of the others has an equal part of the stake.
    """
    if max(ratios) >= math.log(len(ratios) / rates.alpha):
        return "fault"
    return "sound" if max(ratios) <= math.log(rates.beta) else "open"


def mean(
    values: Sequence[float], limit: float, rates: ErrorRates, rarest: float = RAREST
) -> Decision:
    """Decide whether the mean of non-negative values is above its limit, or below after values are cut at `rarest`
    limits."""
    if _wealth(values, limit) >= 1 / rates.alpha:
        return "fault"
    return "sound" if _is_excluded(values, limit, rates.beta, rarest) else "open"


def excluded(
    values: Sequence[float], limit: float, rate: float, rarest: float = RAREST
) -> float | None:
    """The largest r for which a fault of r limits in one of r values, or in more, is excluded with an error
    of at most `rate`; None if that isn't so at `rarest`.

    A fault that r excludes is among those of each larger one. So rarities are tried in rising order up to the first
    that fails, and the error is that of one of them.
    """
    found, tried = None, rarest
    while values and _is_excluded(values, limit, rate, tried):
        found, tried = tried, FINER * tried
    return found


def needed(value: float, limit: float, rate: float, rarest: float = RAREST) -> int | None:
    """Number of equal values that exclude a mean above the limit; None if no number does."""
    gain = math.log1p((1 - value / limit) / (rarest - 1)) if value < limit else 0.0
    return math.ceil(math.log(1 / (LOWERED[0][1] * rate)) / gain) if gain else None


def excluded_share(num_right: int, rate: float) -> float:
    """Smallest fraction of broken answers for which `num_right` correct ones in a row have a
    probability of at most `rate`."""
    return float(1 - rate ** (1 / num_right)) if num_right else 1.0


def _is_excluded(values: Sequence[float], limit: float, rate: float, rarest: float) -> bool:
    """Whether a bet that the mean of the values, cut at `rarest` limits, is below the limit has won enough."""
    cut = [(1 - min(v / limit, rarest)) / (rarest - 1) for v in values]
    won = 0.0
    for share, part in LOWERED:
        left = [1 + share * gain for gain in cut]
        if min(left, default=1.0) > 1e-12:  # otherwise one value lost it all
            won += part * math.exp(min(sum(map(math.log, left)), 700.0))
    return won >= 1 / rate


def _wealth(values: Sequence[float], limit: float) -> float:
    """Mean wealth of bets that the mean is above the limit; if it is not, no bet can be expected to win."""
    logs = [sum(math.log1p(s * (max(0.0, v) / limit - 1)) for v in values) for s in STAKES]
    return sum(math.exp(min(x, 700.0)) for x in logs) / len(STAKES)


def bound(values: Sequence[float], rate: float) -> float:
    """Upper bound of a mean, which is wrong at any time with a probability of at most `rate`."""
    n = len(values)
    if n < FEWEST:
        return math.inf
    middle = sum(values) / n
    deviation = math.sqrt(sum((v - middle) ** 2 for v in values) / (n - 1))
    # The mixture's scale that makes the bound tightest at MIXTURE_COUNT values.
    rho2 = (-2 * math.log(rate) + math.log(1 - 2 * math.log(rate))) / MIXTURE_COUNT
    spread = n * rho2 + 1
    width = math.sqrt(2 * spread / (n * n * rho2) * math.log(1 + math.sqrt(spread) / (2 * rate)))
    return middle + deviation * width
