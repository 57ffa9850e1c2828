"""Distribution of tokens drawn with drafts: it equals that of plain sampling, for each proposer
and setting, by chi-squared.

At the level of sampler and verification, with known logits over five tokens: a request draws three tokens, and the expected
count of each of the 125 answers follows from the probabilities of one token after another. The long version asks more: over
200 seeds the p-values are uniform (Kolmogorov and Smirnov). `test_speculation.py` has the same through the whole engine.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from slipstream import SamplingParams
from slipstream.core.drafts.proposer import LookUp, RecentAnswers
from slipstream.kernels.metadata import SamplingTensors
from slipstream.kernels.plain.reference import (
    ReferenceOps,
    apply_bias_and_penalties,
    filter_probs,
    scaled_probs,
)
from slipstream.messages.steps import FROM_MODEL, NewRequest, ScheduledRequest, StepPlan, TokenMask
from slipstream.platform import platform_of
from slipstream.worker.draft.verification import verified
from slipstream.worker.inputs.input_batch import gather
from slipstream.worker.inputs.rows import RowTable
from slipstream.worker.sampling.constrained import apply_mask
from slipstream.worker.sampling.draws import Sampler, draw
from slipstream.worker.sampling.sampler import sampling_tensors
from tests.support import naive_samplers

VOCAB, START, LENGTH, NUM_DRAFTS = 5, (0, 3), 3, 2
CPU, OPS = torch.device("cpu"), ReferenceOps()
SAMPLER = Sampler(
    OPS.sample,
    lambda logits, mask: None,
    OPS.best_logprobs,
    OPS.packed_logprobs,
    lambda x: x,
    lambda x: x.numpy(),
    lambda x: x,
)
LOGITS = (
    torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 1.2
)  # of the token behind each
DRAFT_LOGITS = LOGITS + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
BLOCK_LOGITS = LOGITS + torch.randn(
    NUM_DRAFTS, VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)
)  # by place
SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.9},
    "bias": {"logit_bias": {1: 1.5, 2: -1.0}},
    "all": {"temperature": 1.4, "top_k": 4, "top_p": 0.9, "min_p": 0.05, "presence_penalty": 0.5,
        "logit_bias": {4: 1.0}},
    "grammar": {},
    "typical": {"typical_p": 0.6},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.15, "temperature": 0.8},
    "top_n_sigma": {"top_n_sigma": 1.0, "temperature": 1.3},
    "dry": {"dry_multiplier": 1.5, "dry_base": 1.4, "dry_allowed_length": 1,
        "dry_breaker_token_ids": (4,)},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "samplers": {"samplers": ["top_k", "typical_p", "temperature"], "top_k": 4, "typical_p": 0.9,
        "temperature": 0.7, "min_p": 1.0},
    "chain and all": {"temperature": 1.4, "top_k": 4, "top_p": 0.95, "min_p": 0.02,
        "presence_penalty": 0.5, "logit_bias": {4: 1.0}, "typical_p": 0.95, "xtc_probability": 0.3,
        "top_n_sigma": 2.5, "dry_multiplier": 0.5, "no_repeat_ngram_size": 3},
    "processors": {
        "logits_processors": [
            lambda prompt, past, logits: logits - 0.5 * np.bincount(past, minlength=VOCAB)
        ]
    },
    "seeds": {},
    "n": {},
}  # fmt: skip
FROM_MODELS = ("draft", "block")  # token by token; all places at once
PROPOSERS = ("ngram", "suffix", *FROM_MODELS, "right at times", "always the same")
CHAINED = [
    name for name in SETTINGS if SamplingParams(**SETTINGS[name]).by_chain
]  # drawn row by row, which takes longer
FAST = [
    (name, p)
    for name in SETTINGS
    for p in PROPOSERS
    if name not in CHAINED or p in ("draft", "right at times")
]
Answer = tuple[int, ...]


def allowed(tokens: Answer) -> list[int]:
    """A grammar: what may follow depends on the two tokens before."""
    return [t for t in range(VOCAB) if (tokens[-2] + 2 * tokens[-1] + t) % 3]


def bits_of(tokens: list[int]) -> int:
    return sum(1 << t for t in tokens)


def sampling_of(name: str, i: int) -> SamplingParams:
    made = SamplingParams(max_tokens=LENGTH, **SETTINGS[name])
    if name == "seeds":
        return dataclasses.replace(made, seed=i)
    return dataclasses.replace(made, seed=7919 * (i // 4) + i % 4) if name == "n" else made


@functools.cache
def expected_shares(name: str) -> dict[Answer, float]:
    """How often each answer should come."""
    shares: dict[Answer, float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for answer, share in shares.items():
            table, tokens = RowTable(1, 16, 4, OPS, CPU, seed=0), (*START, *answer)
            step = ScheduledRequest("a", 0, len(tokens), 1)
            plan = StepPlan(
                1, (step,), (NewRequest("a", tokens, len(START), sampling_of(name, 0)),)
            )
            table.apply(plan)
            params = sampling_tensors(table, gather(table, plan).sampled)
            assert isinstance(params, SamplingTensors)
            logits = LOGITS[tokens[-1]][None].clone()
            if (p := sampling_of(name, 0)).by_chain:
                biased = [x + p.logit_bias.get(t, 0.0) for t, x in enumerate(logits[0].tolist())]
                for function in p.logits_processors:
                    biased = function(list(START), list(answer), np.array(biased)).tolist()
                chances = naive_samplers.distribution(biased, list(tokens), len(START), p)
                longer |= {(*answer, token): share * chance for token, chance in chances.items()}
                continue
            if name == "grammar":
                mask(logits, [0], [bits_of(allowed(tokens))])
            logits = apply_bias_and_penalties(logits, params)
            weights = (
                logits.softmax(-1)
                if params.all_greedy
                else filter_probs(logits, scaled_probs(logits, params), params)
            )
            for token, p in enumerate((weights[0] / weights[0].sum()).tolist()):
                if p:
                    longer[*answer, token] = share * p
        shares = longer
    return shares


def mask(logits: torch.Tensor, positions: list[int], bits: list[int]) -> None:
    apply_mask(
        logits,
        TokenMask(tuple(positions), np.array(bits, np.int32).tobytes()),
        OPS,
        platform_of(CPU),
    )


def drawn(name: str, proposer: str, total: int, check: Callable = verified) -> list[Answer]:
    """The answers of `total` requests, by steps with drafts as the worker does them."""
    table = RowTable(total, 16, 4, OPS, CPU, seed=0)
    texts = {f"r{i}": list(START) for i in range(total)}
    answers: dict[str, Answer] = {}
    new = tuple(
        NewRequest(r, tuple(t), len(START), sampling_of(name, i))
        for i, (r, t) in enumerate(texts.items())
    )
    guess = guesses(proposer)
    while texts:
        shares = []
        for request_id, text in texts.items():
            room = len(START) + LENGTH - 1 - len(text)
            drafts = guess(text, min(NUM_DRAFTS, room))
            shares.append(
                ScheduledRequest(
                    request_id, len(text) - 1, 1 + len(drafts), 1 + len(drafts), (), drafts
                )
            )
        shares.sort(key=lambda s: s.num_tokens > 1)
        plan, new = StepPlan(1, tuple(shares), new), ()
        table.apply(plan)
        proposed = from_model(proposer, table, plan) if proposer in FROM_MODELS else {}
        batch = gather(table, plan)
        logits = LOGITS[batch.token_ids.long()].clone()
        if name == "grammar":
            found = [proposed.get(s.request_id, s.drafts) for s in shares]
            rows = [
                bits
                for s, d in zip(shares, found, strict=True)
                for bits in masks(tuple(texts[s.request_id]), d)
            ]
            mask(logits, list(range(len(rows))), rows)
        tokens = draw(SAMPLER, table, batch.sampled, logits, None).tokens
        table.write(batch.sampled.rows, batch.sampled.positions, tokens)
        flat = [token for s in shares for token in proposed.get(s.request_id, ())]
        kept, counts = check(batch.sampled.requests, tokens.tolist(), flat)
        for s, begin, end in zip(shares, *edges(counts), strict=True):
            text = texts[s.request_id] = [*texts[s.request_id], *kept[begin:end]]
            if len(text) >= len(START) + LENGTH:
                answers[s.request_id] = tuple(text[len(START) :][:LENGTH])
                del texts[s.request_id]
    return [answers[f"r{i}"] for i in range(total)]


def edges(counts) -> tuple[list[int], list[int]]:
    ends = list(itertools.accumulate(counts))
    return [0, *ends[:-1]], ends


def masks(text: Answer, drafts) -> Iterator[int]:
    """Masks as `GrammarState.mask_drafts` makes them: every token is allowed after a draft that is
    not allowed."""
    right = True
    for k in range(len(drafts) + 1):
        now = (*text, *drafts[:k])
        right = right and (k == 0 or drafts[k - 1] in allowed(now[:-1]))
        yield bits_of(allowed(now)) if right else -1


def guesses(proposer: str) -> Callable[[list[int], int], Answer]:
    if proposer == "ngram":
        return lambda text, k: LookUp(least=2, most_match=3).propose([2, 0, 3, 1, *text], k).tokens
    if proposer == "suffix":  # ended answers of which some begin as ours
        traffic = RecentAnswers()
        for answer in ([*START, 1, 4, 2], [*START, 2, 2, 0], [3, 4, 4, 1]):
            traffic.add(answer)
        return lambda text, k: LookUp(traffic=traffic).propose(text, k).tokens
    if proposer in FROM_MODELS:
        return lambda text, k: (FROM_MODEL,) * k
    if proposer == "always the same":
        return lambda text, k: (2,) * k
    return lambda text, k: tuple((text[-1] + 1 + i) % VOCAB for i in range(k))


def from_model(proposer: str, table: RowTable, plan: StepPlan) -> dict[str, Answer]:
    """The drafts that another model draws with the same random numbers, as `DraftModel.propose` does, or a head that does not
    know the drafts before a place, as `HeadBlock`'s."""
    if proposer == "block":
        some = [s for s in plan.scheduled if s.drafts]
        steps = [
            ScheduledRequest(s.request_id, s.num_computed_tokens, n := len(s.drafts), n)
            for s in some
        ]
        if steps:
            batch = gather(table, StepPlan(0, tuple(sorted(steps, key=lambda s: s.num_tokens > 1))))
            starts = batch.meta.query_start_loc.long()
            first = starts[:-1].repeat_interleave(starts.diff())
            logits = BLOCK_LOGITS[
                torch.arange(len(first)) - first, batch.token_ids.long()[first]
            ].clone()
            tokens = OPS.sample(logits, sampling_tensors(table, batch.sampled))
            table.write(batch.sampled.rows, batch.sampled.positions, tokens)
    for i in range(NUM_DRAFTS if proposer == "draft" else 0):
        steps = [
            ScheduledRequest(s.request_id, s.num_computed_tokens + i, 1, 1)
            for s in plan.scheduled
            if len(s.drafts) > i
        ]
        if steps:
            batch = gather(table, StepPlan(0, tuple(steps)))
            tokens = OPS.sample(
                DRAFT_LOGITS[batch.token_ids.long()].clone(), sampling_tensors(table, batch.sampled)
            )
            table.write(batch.sampled.rows, batch.sampled.positions, tokens)
    rows = table.tokens.tolist()
    return {
        s.request_id: tuple(
            rows[table.rows[s.request_id].index][s.num_computed_tokens + 1 :][: len(s.drafts)]
        )
        for s in plan.scheduled
    }


NUM_ANSWERS = 600


def chi_squared_p(found: Counter[Answer], shares: dict[Answer, float]) -> float:
    """Answers that are rare are counted together. An answer that can't come makes it 0."""
    if set(found) - set(shares):
        return 0.0
    total = sum(found.values())
    common = {a: share * total for a, share in shares.items() if share * total >= 5}
    pairs = [(found[a], e) for a, e in common.items()]
    rest = total - sum(common.values())
    if rest >= 5:
        pairs.append((total - sum(n for n, _ in pairs), rest))
    statistic = sum((n - e) ** 2 / e for n, e in pairs)
    half = torch.tensor([(len(pairs) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*half))


def kolmogorov_p(values: list[float]) -> float:
    """The p-value of the largest distance between `values` and the uniform distribution:
    Kolmogorov's series, with Stephens's correction (1970) for few values."""
    n = len(values)
    far = max(max((i + 1) / n - v, v - i / n) for i, v in enumerate(sorted(values)))
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * far
    return (
        1.0
        if x < 0.3
        else min(
            1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101))
        )
    )


def accepts_the_first(requests, tokens, from_model=()):
    """Broken: a draft counts though another token was sampled before it."""
    kept, proposed, begin, counts = [], iter(from_model), 0, []
    for s in requests:
        drafts = [next(proposed) if draft == FROM_MODEL else draft for draft in s.drafts]
        own, begin = tokens[begin : begin + s.num_sampled], begin + s.num_sampled
        kept += [drafts[0], own[1]] if drafts else own
        counts.append(2 if drafts else 1)
    return kept, counts


def keeps_one_too_many(requests, tokens, from_model=()):
    """Broken: the token that was sampled behind the first wrong draft counts, too."""
    kept, proposed, begin, counts = [], iter(from_model), 0, []
    for s in requests:
        drafts = [next(proposed) if draft == FROM_MODEL else draft for draft in s.drafts]
        own, begin = tokens[begin : begin + s.num_sampled], begin + s.num_sampled
        right = next(
            (i for i, (d, t) in enumerate(zip(drafts, own, strict=False)) if d != t), len(drafts)
        )
        kept += own[: right + 2]
        counts.append(len(own[: right + 2]))
    return kept, counts


@pytest.mark.parametrize(("name", "proposer"), FAST)
def test_the_distribution_is_that_of_plain_sampling(name, proposer):
    assert chi_squared_p(Counter(drawn(name, proposer, NUM_ANSWERS)), expected_shares(name)) > 1e-3


@pytest.mark.parametrize("broken", [accepts_the_first, keeps_one_too_many])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_a_broken_verification_is_seen(broken, proposer):
    assert (
        chi_squared_p(
            Counter(drawn("plain", proposer, NUM_ANSWERS, broken)), expected_shares("plain")
        )
        < 1e-6
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_p_is_uniform_over_200_seeds(name, proposer):
    shares, each = expected_shares(name), 400
    answers = drawn(name, proposer, 200 * each)
    assert chi_squared_p(Counter(answers), shares) > 1e-3
    values = [
        chi_squared_p(Counter(answers[i : i + each]), shares) for i in range(0, len(answers), each)
    ]
    assert kolmogorov_p(values) > 1e-3


def test_kolmogorov_finds_what_is_not_uniform():
    uniform = np.random.default_rng(0).random(200)
    assert kolmogorov_p(uniform.tolist()) > 0.05
    assert kolmogorov_p((uniform**2).tolist()) < 1e-3
    assert kolmogorov_p((0.2 + 0.6 * uniform).tolist()) < 1e-3
