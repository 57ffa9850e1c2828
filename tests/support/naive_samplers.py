"""The samplers again, in plain Python from their papers' and llama.cpp's descriptions: probabilities of one token."""

from __future__ import annotations

import math

from slipstream import SamplingParams

ORDER = (
    "penalties",
    "dry",
    "no_repeat_ngram",
    "temperature",
    "top_n_sigma",
    "min_p",
    "top_k",
    "typ_p",
    "top_p",
    "xtc",
)


def softmax(logits: dict[int, float]) -> dict[int, float]:
    top = max(logits.values())
    weights = {t: math.exp(x - top) for t, x in logits.items()}
    total = sum(weights.values())
    return {t: w / total for t, w in weights.items()}


def penalised(logits, tokens, answer, p):
    made = dict(logits)
    for t in set(tokens):
        if t in made:
            made[t] = (
                made[t] / p.repetition_penalty if made[t] > 0 else made[t] * p.repetition_penalty
            )
    for t in set(answer):
        if t in made:
            made[t] -= p.frequency_penalty * answer.count(t) + p.presence_penalty
    return made


def dry(logits, tokens, p):
    if p.dry_penalty_last_n >= 0:
        tokens = tokens[max(0, len(tokens) - p.dry_penalty_last_n) :]
    longest: dict[int, int] = {}
    for i in range(
        1, len(tokens)
    ):  # tokens[i] followed a run there; how long is the one that ends the text?
        n = 0
        while (
            n < i
            and tokens[i - 1 - n] == tokens[-1 - n]
            and tokens[-1 - n] not in p.dry_breaker_token_ids
        ):
            n += 1
        if n:
            longest[tokens[i]] = max(longest.get(tokens[i], 0), n)
    made = dict(logits)
    for t, n in longest.items():
        if n >= p.dry_allowed_length and t in made:
            made[t] -= p.dry_multiplier * p.dry_base ** (n - p.dry_allowed_length)
    return made


def no_repeat_ngram(logits, tokens, size):
    seen = {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)}
    tail = tuple(tokens[len(tokens) - size + 1 :]) if size > 1 else ()
    if len(tail) < size - 1:
        return logits
    return {t: x for t, x in logits.items() if (*tail, t) not in seen} or logits


def typical(logits, mass):
    p = softmax(logits)
    entropy = -sum(x * math.log(x) for x in p.values())
    order = sorted(p, key=lambda t: abs(-math.log(p[t]) - entropy))
    kept, held = [], 0.0
    for t in order:
        kept.append(t)
        held += p[t]
        if held >= mass:
            break
    return {t: logits[t] for t in kept}


def top_p(logits, mass):
    p, kept, held = softmax(logits), [], 0.0
    for t in sorted(p, key=lambda t: -p[t]):
        kept.append(t)
        held += p[t]
        if held >= mass:
            break
    return {t: logits[t] for t in kept}


def top_n_sigma(logits, n):
    mean = sum(logits.values()) / len(logits)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in logits.values()) / len(logits))
    return {t: x for t, x in logits.items() if x >= max(logits.values()) - n * deviation}


def xtc(logits, threshold):
    p = softmax(logits)
    choices = sorted((t for t in p if p[t] >= threshold), key=lambda t: p[t])
    return {t: x for t, x in logits.items() if t not in choices[1:]}


def distribution(logits, tokens, num_prompt: int, p: SamplingParams) -> dict[int, float]:
    """Distribution of the next token, by its `logits` [V] after `tokens`."""
    found = [(1.0, dict(enumerate(logits)))]  # ways that it may go, each with its probability

    def each(change):
        return [(share, change(x)) for share, x in found]

    for name in ORDER if p.samplers is None else p.samplers:
        if name == "penalties":
            found = each(lambda x: penalised(x, tokens, tokens[num_prompt:], p))
        elif name == "dry" and p.dry_multiplier:
            found = each(lambda x: dry(x, tokens, p))
        elif name == "no_repeat_ngram" and p.no_repeat_ngram_size:
            found = each(lambda x: no_repeat_ngram(x, tokens, p.no_repeat_ngram_size))
        elif name == "temperature":
            found = each(lambda x: {t: v / p.temperature for t, v in x.items()})
        elif name == "top_n_sigma" and p.top_n_sigma > 0:
            found = each(lambda x: top_n_sigma(x, p.top_n_sigma))
        elif name == "min_p":
            found = each(
                lambda x: {
                    t: v
                    for t, v in x.items()
                    if softmax(x)[t] >= p.min_p * max(softmax(x).values())
                }
            )
        elif name == "top_k" and p.top_k:
            found = each(lambda x: dict(sorted(x.items(), key=lambda item: -item[1])[: p.top_k]))
        elif name == "typ_p" and p.typical_p < 1:
            found = each(lambda x: typical(x, p.typical_p))
        elif name == "top_p" and p.top_p < 1:
            found = each(lambda x: top_p(x, p.top_p))
        elif name == "xtc" and p.xtc_probability:
            found = [
                way
                for share, x in found
                for way in (
                    (share * p.xtc_probability, xtc(x, p.xtc_threshold)),
                    (share * (1 - p.xtc_probability), x),
                )
            ]
    total: dict[int, float] = {}
    for share, x in found:
        for t, probability in softmax(x).items():
            total[t] = total.get(t, 0.0) + share * probability
    return total


def mirostat(logits, mu: float, p: SamplingParams) -> dict[int, tuple[float, float]]:
    """Probability of each token that may be drawn, and `mu` after it."""
    probabilities = softmax({t: x / p.temperature for t, x in enumerate(logits)})
    best = max(probabilities, key=lambda t: probabilities[t])
    kept = {t: x for t, x in probabilities.items() if -math.log2(x) <= mu or t == best}
    total = sum(kept.values())
    return {
        t: (x / total, mu - p.mirostat_eta * (-math.log2(x / total) - p.mirostat_tau))
        for t, x in kept.items()
    }
