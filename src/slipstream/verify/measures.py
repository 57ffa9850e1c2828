"""Statistics of answers: the difference between the distribution from which they were sampled and the model's.

p is the model's distribution at a position of an answer, q the server's. Log-probabilities are natural.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slipstream.verify.served import ServedToken

MARGIN = 0.5
"""Nats by which a token must be less likely than the last one within a cut to count as outside.
Rounding reorders neighbors."""

EXTREME = (0.05, 50.0)
"""Minimum and maximum 1 / temperature in the fit. Greedy answers have no finite one."""


LITTLE = 0.2
"""Minimum total probability of the listed tokens for them to be informative. Five tokens of a
trained model have more at most positions; of random weights, a thousandth."""

LIKELIER = 3.0
"""Maximum nats by which the model's log-probability of a sampled token counts as above the server's. Larger
differences are rare (a probability of exp(−3)), and their ratios would outweigh all others."""


@dataclass(frozen=True, kw_only=True)
class ScoredAnswer:
    """An answer with the model's log-probabilities [n, V] at the positions of its first n tokens. `kl` is the
    KL at each position; empty without the server's log-probabilities. `kl_cut`: KL from the model's
    distribution after temperature and cuts, because some servers report log-probabilities of that. `never`
    [V]: mask of tokens that answers never contain, such as end tokens."""

    token_ids: Sequence[int]
    tokens: Sequence[ServedToken]
    logprobs: Tensor
    kl: Sequence[float] = ()
    kl_cut: Sequence[float] = ()
    never: Tensor | None = None
    agreed: tuple[int, int] = (0, 0)
    """`agreement` with the model."""

    @cached_property
    def chosen(self) -> Tensor:
        """Log-probabilities [n] of the answer's tokens."""
        return self.logprobs[torch.arange(len(self.token_ids)), torch.tensor(self.token_ids)]

    @property
    def is_likeliest(self) -> bool:
        """Whether each token is the model's most likely one."""
        return self.logprobs.argmax(-1).tolist() == list(self.token_ids)

    @property
    def drawable(self) -> Tensor:
        """Log-probabilities [n, V], normalized without the tokens of `never`, because a token in an
        answer was sampled from the others."""
        if self.never is None:
            return self.logprobs
        return self.logprobs.masked_fill(self.never, -torch.inf)

    def likelihoods(self, temperatures: Sequence[float]) -> list[float]:
        """Log-likelihood of the answer at each temperature."""
        logprobs = self.drawable
        return [
            float((self.chosen / t - torch.logsumexp(logprobs / t, -1)).sum()) for t in temperatures
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean or a fitted value, its standard error, and the number of values."""

    value: float
    stderr: float
    count: int


def mean(values: Sequence[float]) -> Estimate:
    """Mean of the values; its error is infinite for fewer than two."""
    n = len(values)
    if not n:
        return Estimate(value=math.nan, stderr=math.inf, count=0)
    middle = sum(values) / n
    spread = sum((v - middle) ** 2 for v in values)
    error = math.sqrt(spread / (n * (n - 1))) if n > 1 else math.inf
    return Estimate(value=middle, stderr=error, count=n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proportion:
    """A measured fraction: `hits` of `count`, with its 95 % interval."""

    value: float
    low: float
    high: float
    hits: int
    count: int


OUTSIDE = 0.025
"""Probability beyond each end of a fraction's interval."""

ODDS = torch.linspace(-60, 60, 2**16, dtype=torch.float64)
"""Log-odds at which the distribution of a fraction is summed numerically."""


def share(hits: int, count: int, effective: float | None = None) -> Proportion:
    """Fraction with the exact interval of Clopper and Pearson (1934). `effective`: number of
    independent observations if fewer than `count`."""
    if not count:
        return Proportion(value=math.nan, low=0.0, high=1.0, hits=0, count=0)
    value, n = hits / count, effective or count
    x = value * n
    low = _beta_quantile(OUTSIDE, x, n - x + 1) if x >= 1 else 0.0
    high = 1 - _beta_quantile(OUTSIDE, n - x, x + 1) if n - x >= 1 else 1.0
    return Proportion(value=value, low=low, high=high, hits=hits, count=count)


def _beta_quantile(chance: float, a: float, b: float) -> float:
    """Quantile of a beta distribution with a, b ≥ 1 at the probability `chance`, summed over log-odds."""
    logs = -a * torch.nn.functional.softplus(-ODDS) - b * torch.nn.functional.softplus(ODDS)
    below = logs.softmax(0).cumsum(0)
    return float(ODDS[int(torch.searchsorted(below, chance))].sigmoid())


def clustered(parts: Sequence[tuple[int, int]]) -> Proportion:
    """Fraction of tokens, from (hits, count) of each answer. The tokens of one answer depend on each other,
    so only answers are independent; their effective number is (Σ count)² / Σ count² (Kish 1965)."""
    parts = [(hits, count) for hits, count in parts if count]
    hits, count = sum(h for h, _ in parts), sum(n for _, n in parts)
    return share(hits, count, count**2 / max(1, sum(n * n for _, n in parts)))


def agreement(
    sample: ScoredAnswer, token_id: Callable[[bytes], int | None], *, is_greedy: bool
) -> tuple[int, int]:
    """(number of positions at which the server's most likely token is the model's, number of positions compared). Compared
    are positions whose most likely token the server reports; for a greedy answer without log-probabilities, all positions,
    each with its own token."""
    found = []
    for place, token in enumerate(sample.tokens):
        named = max(token.likeliest, key=lambda pair: pair[1], default=None)
        own = sample.token_ids[place] if named is None and is_greedy else None
        likeliest = own if named is None else token_id(named[0])
        if likeliest is not None:
            row = sample.logprobs[place]
            found.append(bool(row[likeliest] >= row.max()))
    return sum(found), len(found)


def divergences(
    sample: ScoredAnswer,
    token_id: Callable[[bytes], int | None],
    temperature: float = 1.0,
    *,
    top_k: int = -1,
    top_p: float = 1.0,
) -> list[float]:
    """KL(q‖p) at each position: exact for the most likely tokens that the server reports, and a
    lower bound for all others together (log-sum inequality). With a temperature p is the model's at
    that temperature and with those cuts. Positions without log-probabilities are left out.

    If the reported tokens have little of q, the lower bound is too weak, and the sampled token
    estimates the others' part: Σ (q ln(q / p) − q + p) is the mean of p / q − 1 − ln(p / q) of
    tokens drawn from q. It is 0 for equal distributions, however the token was drawn.
    """
    places, named = [], []
    for place, token in enumerate(sample.tokens):
        pairs = {token_id(data): logprob for data, logprob in token.likeliest}
        pairs.pop(None, None)
        if pairs:
            places.append(place)
            named.append(pairs)
    if not places:
        return []
    p = _sampled(sample.logprobs, temperature, top_k, top_p)[places].double()
    # Reported tokens [m, k], padded with tokens of probability 0.
    ids = pad_sequence([torch.tensor([*pairs]) for pairs in named], True, -1)
    logprobs = [torch.tensor([*pairs.values()], dtype=torch.float64) for pairs in named]
    q = pad_sequence(logprobs, True, -1e4)
    q_mass, p_there = q.exp(), p.gather(-1, ids.clamp(min=0))
    kl = (q_mass * (q - p_there)).sum(-1)
    rest_q, rest_p = 1 - q_mass.sum(-1), 1 - (p_there.exp() * (ids >= 0)).sum(-1)
    others = rest_q * (rest_q.clamp(min=1e-6) / rest_p.clamp(min=1e-9)).log()
    drawn = torch.tensor(sample.token_ids)[places, None]
    given = torch.tensor([sample.tokens[place].logprob for place in places])
    likelier = (p.gather(-1, drawn)[:, 0] - given).clamp(max=LIKELIER)
    by_draw = (likelier.expm1() - likelier) * ~(ids == drawn).any(-1)
    others = torch.where(rest_q > 1 - LITTLE, rest_q - rest_p + by_draw, others * (rest_q > 1e-6))
    return (kl + others).clamp(min=0).tolist()


def _sampled(logprobs: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Log-probabilities [n, V] after temperature and cuts. Tokens outside a cut have exp(−10⁴)."""
    if temperature == 0:
        temperature, top_k = 1.0, 1
    found = (logprobs / temperature).log_softmax(-1)
    if top_k > 0:
        least = found.topk(top_k, -1).values[:, -1:]
        found = found.masked_fill(found < least, -1e4).log_softmax(-1)
    if top_p < 1:
        falling = found.sort(-1, descending=True).values
        reached = (falling.exp().cumsum(-1) >= top_p).int().argmax(-1, keepdim=True)
        found = found.masked_fill(found < falling.gather(-1, reached), -1e4).log_softmax(-1)
    return found


def temperature(samples: Iterable[ScoredAnswer], start: float) -> Estimate:
    """Maximum-likelihood estimate of the temperature at which the answers were sampled.

    With b = 1 / T the log-likelihood Σ (b l_token − ln Σ exp(b l)) is concave. Its second derivative,
    the variance of l, gives the error.
    """
    drawn = [s for s in samples if len(s.token_ids)]
    count = sum(len(s.token_ids) for s in drawn)
    if not count:
        return Estimate(value=math.nan, stderr=math.inf, count=0)
    b, variance = 1 / start, 0.0
    for _ in range(50):
        slope = variance = 0.0
        for s in drawn:
            logprobs = s.drawable
            p = (b * logprobs).softmax(-1)
            l = logprobs.clamp(min=-1e4)  # a probability of 0 times −∞
            middle = (p * l).sum(-1)
            slope += float((s.chosen - middle).sum())
            variance += float((p * (l - middle[:, None]) ** 2).sum())
        step = slope / max(variance, 1e-9)
        step = max(-b / 2, min(b, step))
        b = min(max(b + step, EXTREME[0]), EXTREME[1])
        if abs(step) < 1e-4 * b or b in EXTREME:
            break
    error = 1 / math.sqrt(max(variance, 1e-9))
    return Estimate(value=1 / b, stderr=error / b**2, count=count)


Draw = tuple[bool, float]
"""(whether a token is outside of a cut, the model's probability of a token outside of it without the cut)."""


def outside_top_k(sample: ScoredAnswer, k: int) -> list[Draw]:
    """Whether each token is outside of the model's k most likely tokens, with the probability of that."""
    last = sample.logprobs.topk(k, -1).values[:, -1:]
    return _draws(sample, sample.logprobs < last - MARGIN)


def outside_top_p(sample: ScoredAnswer, top_p: float) -> list[Draw]:
    """Whether each token is outside of the smallest set with the probability `top_p`, with the probability of that."""
    falling = sample.logprobs.sort(-1, descending=True).values
    likelier = torch.searchsorted(-falling, -(sample.logprobs + MARGIN))  # how many
    reached = (falling.exp().cumsum(-1) > top_p).int().argmax(-1, keepdim=True)
    return _draws(sample, likelier > reached)


def unlikely(sample: ScoredAnswer) -> list[Draw]:
    """Whether each token is clearly less likely than the most likely one, with the probability of that."""
    return _draws(sample, sample.logprobs < sample.logprobs.amax(-1, keepdim=True) - MARGIN)


def _draws(sample: ScoredAnswer, outside: Tensor) -> list[Draw]:
    p = sample.drawable.exp()
    chances = (p * outside).sum(-1) / p.sum(-1).clamp(min=1e-9)
    hits = outside[torch.arange(len(sample.token_ids)), torch.tensor(sample.token_ids)]
    return list(zip(hits.tolist(), chances.tolist(), strict=True))
