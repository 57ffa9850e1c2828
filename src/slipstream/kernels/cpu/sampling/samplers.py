"""Samplers of one row of logits, over NumPy arrays. No torch.

Each works on float32 logits [V], in place. Dropped tokens become −∞, so samplers can follow each
other in any order. Where several tokens are equal, all samplers but XTC keep all of them. No
sampler drops every token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu.sampling.row_draw import Floats, Longs, least_of_top_p
from slipstream.spec.media.speech_rules import SpeechRules

MIN_LOGIT = np.float32(-1e29)
"""Logits at or below this were forbidden before: they are not sampled while another token is left."""

NEAREST = (256, 4096)
"""How many tokens `typical` sorts: first 256, then 4,096 if their mass does not suffice, then
all."""

MAX_MATCH = 1024
"""Maximum length of a repeated run, in tokens, that DRY distinguishes."""


def drop_forbidden(logits: Floats) -> None:
    """Sets tokens forbidden by a finite logit to −∞, unless everything is forbidden."""
    forbidden = logits <= MIN_LOGIT
    if not forbidden.all():
        logits[forbidden] = -np.inf


def speech(logits: Floats, answer: Longs, rules: SpeechRules) -> None:
    """Applies the rules of a speech model's answer after the tokens `answer` [N], besides those that forbid single tokens.

    1. A forced position has one of its tokens.
    2. Times come in pairs, except before the end, and do not decrease. The first token is a time.
    3. A time is drawn where all times together are likelier than each token of text.
    """
    forced = rules.forced
    if len(answer) < len(forced):
        kept = np.array(forced[len(answer)], np.int64)
        values = logits[kept].copy()
        logits[:] = -np.inf
        logits[kept] = values
        return
    first = rules.first_timestamp
    if first is None:
        return
    answer = answer[len(forced) :]
    logits[rules.no_timestamps] = -np.inf
    is_time = answer >= first
    last, before = is_time[-1:].any(), is_time[-2:-1].any() or len(answer) < 2
    if last and before:
        logits[first:] = -np.inf
    elif last:
        logits[: rules.end] = -np.inf
    if is_time.any():
        latest = int(answer[is_time][-1])
        logits[first : latest + (not (last and not before))] = -np.inf
    if not len(answer):
        logits[:first] = -np.inf
        if rules.max_first is not None:
            logits[first + rules.max_first + 1 :] = -np.inf
    text, times = logits[:first], logits[first:]
    highest = float(times.max())
    if highest > -np.inf:
        together = highest + float(np.log(np.exp(times - highest).sum()))
        if together > float(text.max()):
            text[:] = -np.inf


def penalties(
    logits: Floats,
    tokens: Longs,
    num_prompt: int,
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """Applies penalties as `sampling.apply_bias_and_penalties` does. `tokens` [L] are all so far,
    the first `num_prompt` the prompt."""
    # without counts, `np.unique` imports `numpy.ma` at its first call: 130 ms in a step
    seen = np.unique(tokens, return_counts=True)[0]
    logits[seen] = np.where(
        logits[seen] > 0,
        logits[seen] / np.float32(repetition),
        logits[seen] * np.float32(repetition),
    )
    answered, counts = np.unique(tokens[num_prompt:], return_counts=True)
    logits[answered] -= np.float32(frequency) * counts.astype(np.float32)
    logits[answered] -= np.float32(presence)


def dry(
    logits: Floats,
    tokens: Longs,
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
    last_n: int,
    breakers: npt.NDArray[np.int64],
) -> None:
    """Applies "don't repeat yourself" (p-e-w 2024, as in llama.cpp).

    Where the last n tokens, n ≥ `allowed_length`, occurred before, the token that followed them
    there loses multiplier · base ** (n − allowed_length), for the longest such run. Runs contain no
    token of `breakers`. Only the last `last_n` tokens count; −1 means all.
    """
    if last_n >= 0:
        tokens = tokens[len(tokens) - min(last_n, len(tokens)) :]
    last = len(tokens) - 1
    is_breaker = np.isin(tokens, breakers, kind="table")
    if last < 1 or is_breaker[last]:
        return
    places = np.flatnonzero(tokens[:last] == tokens[last])
    lengths = np.ones(len(places), np.int64)
    open_, n = np.arange(len(places)), 1  # runs that may be longer
    while len(open_) and n < MAX_MATCH and not is_breaker[last - n]:
        at = places[open_] - n
        open_ = open_[(at >= 0) & (tokens[at] == tokens[last - n])]
        n += 1
        lengths[open_] = n
    long = lengths >= allowed_length
    if not long.any():
        return
    longest = np.zeros(len(logits), np.int64)
    np.maximum.at(longest, tokens[places[long] + 1], lengths[long])
    followers = np.flatnonzero(longest)
    with np.errstate(over="ignore"):
        taken = multiplier * np.power(float(base), longest[followers] - allowed_length)
    logits[followers] -= np.minimum(taken, 1e9).astype(np.float32)


def no_repeat_ngram(logits: Floats, tokens: Longs, size: int) -> None:
    """Drops tokens that would end a run of `size` tokens that already occurred (as in
    transformers). It does nothing if no token would be left."""
    if len(tokens) < size:
        return
    tail = tokens[len(tokens) - size + 1 :]
    if size == 1:
        banned = tokens
    else:
        runs = np.lib.stride_tricks.sliding_window_view(tokens, size)
        banned = runs[(runs[:, :-1] == tail).all(axis=1), -1]
    kept = logits[banned]
    logits[banned] = -np.inf
    if logits.max() == -np.inf:
        logits[banned] = kept


def temperature(logits: Floats, value: float) -> None:
    logits /= np.float32(value)


def top_n_sigma(logits: Floats, n: float) -> None:
    """Keeps tokens within n standard deviations of the largest logit (Tang et al. 2024)."""
    there = logits[logits > -np.inf]
    least = (
        there.max(initial=-np.inf) - np.float32(n) * there.std(dtype=np.float64)
        if len(there)
        else -np.inf
    )
    logits[logits < np.float32(least)] = -np.inf


def min_p(logits: Floats, least: float) -> None:
    """Keeps tokens at least this likely, relative to the most likely one."""
    weights = _weights(logits)
    logits[weights < np.float32(least)] = -np.inf


def top_k(logits: Floats, k: int) -> None:
    if k < len(logits):
        logits[logits < np.partition(logits, -k)[-k]] = -np.inf


def top_p(logits: Floats, mass: float) -> None:
    weights = _weights(logits)
    logits[weights < least_of_top_p(weights, mass)] = -np.inf


def typical(logits: Floats, mass: float) -> None:
    """Keeps the tokens whose surprise is nearest to the entropy, until they hold `mass` (Meister et
    al. 2023, as in transformers)."""
    at = np.flatnonzero(logits > -np.inf)
    p = _probabilities(logits[at])
    surprise = -np.log(p, out=np.full(len(p), -np.inf), where=p > 0)
    far = np.abs(surprise - (p * surprise).sum(where=p > 0))
    # the nearest few usually suffice
    for count in (*(n for n in NEAREST if n < len(far)), len(far)):
        order = np.argpartition(far, count - 1)[:count]
        order = order[np.argsort(far[order], kind="stable")]
        before = p[order].cumsum()
        if before[-1] >= mass or count == len(far):
            break
    last = min(int(np.count_nonzero(before < mass)), len(order) - 1)
    logits[at[far > far[order[last]]]] = -np.inf


def xtc(logits: Floats, probability: float, threshold: float, u: float) -> None:
    """Applies "exclude top choices" (p-e-w 2024, as in llama.cpp).

    If the uniform number `u` is below `probability`, only the least likely of the tokens with a
    probability of at least `threshold` stays.
    """
    if u >= probability:
        return
    at = np.flatnonzero(logits > -np.inf)
    p = _probabilities(logits[at])
    choices = np.flatnonzero(p >= threshold)
    if len(choices) > 1:
        least = choices[np.argmin(p[choices])]
        logits[at[choices[choices != least]]] = -np.inf


def mirostat(logits: Floats, mu: float) -> None:
    """Keeps tokens with a surprise of at most `mu` bits, at least the most likely (Basu et al.
    2021, version 2)."""
    p = _probabilities(logits)
    with np.errstate(divide="ignore"):
        kept = -np.log2(p) <= mu
    kept[np.argmax(p)] = True
    logits[~kept] = -np.inf


def mirostat_mu(logits: Floats, token: int, mu: float, tau: float, eta: float) -> float:
    """Next `mu` after a token that was sampled from the tokens kept by `mirostat`."""
    return mu - eta * (-float(np.log2(_probabilities(logits)[token])) - tau)


def _weights(logits: Floats) -> Floats:
    """Returns unnormalized weights, the largest of which is 1."""
    with np.errstate(invalid="ignore"):
        weights: Floats = np.exp(logits - logits.max())
    return weights


def _probabilities(logits: Floats) -> npt.NDArray[np.float64]:
    weights = _weights(logits).astype(np.float64)
    found: npt.NDArray[np.float64] = weights / weights.sum()
    return found
