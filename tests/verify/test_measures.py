"""Statistics of answers, on distributions that the tests make."""

import math

import pytest
import torch

from slipstream.verify import measures
from slipstream.verify.measures import ScoredAnswer
from slipstream.verify.served import ServedToken

VOCABULARY, LENGTH = 64, 400


def drawn(at=1.0, *, seed=0, keep=VOCABULARY, served=None, from_served=False):
    """An answer of the model, drawn at a temperature from its `keep` likeliest tokens. `served`
    are the server's own log-probabilities, `from_served` draws from them."""
    chance = torch.Generator().manual_seed(seed)
    logprobs = (2 * torch.randn(LENGTH, VOCABULARY, generator=chance)).log_softmax(-1)
    least = logprobs.topk(keep, -1).values[:, -1:]
    cut = torch.where(logprobs >= least, logprobs, -torch.inf)
    ids = torch.multinomial((cut / at).softmax(-1), 1, generator=chance)[:, 0]
    given = logprobs if served is None else served(logprobs)
    if from_served:
        ids = torch.multinomial(given.exp(), 1, generator=chance)[:, 0]
    likeliest = given.topk(5, -1)
    tokens = [
        ServedToken(
            data=bytes([i]),
            logprob=float(given[n, i]),
            likeliest=tuple((bytes([int(t)]), float(v)) for v, t in zip(*row, strict=True)),
        )
        for n, (i, row) in enumerate(zip(ids.tolist(), zip(*likeliest, strict=True), strict=True))
    ]
    return ScoredAnswer(token_ids=ids.tolist(), tokens=tokens, logprobs=logprobs)


def token_id(data):
    return data[0]


@pytest.mark.parametrize("at", [0.5, 1.0, 1.1, 2.0])
def test_the_temperature_of_answers_is_found_within_its_error(at):
    samples = [drawn(at, seed=n) for n in range(4)]
    found = measures.temperature(samples, 1.0)
    assert abs(found.value - at) < 4 * found.stderr
    for start in (0.3, 4.0):  # the likeliest one does not depend on where the search begins
        assert measures.temperature(samples, start).value == pytest.approx(found.value, rel=1e-3)
    assert found.stderr < 0.05 * at
    assert found.count == 4 * LENGTH


def test_tokens_that_end_answers_leave_the_temperature_as_it_is():
    """Positions where an end was drawn are not in the answers, which favours the others."""
    never = torch.zeros(VOCABULARY, dtype=torch.bool)
    never[:8] = True
    samples = []
    for sample in (drawn(1.0, seed=n) for n in range(4)):
        kept = [i for i, token in enumerate(sample.token_ids) if token >= 8]
        ids = [sample.token_ids[i] for i in kept]
        samples.append(
            ScoredAnswer(token_ids=ids, tokens=[], logprobs=sample.logprobs[kept], never=never)
        )
    found = measures.temperature(samples, 1.0)
    assert abs(found.value - 1) < 4 * found.stderr
    own, cooler = samples[0].likelihoods([1.0, 0.8])
    assert own > cooler
    others = samples[0].logprobs[:, 8:].log_softmax(-1)
    ids = torch.tensor(samples[0].token_ids) - 8
    assert own == pytest.approx(float(others[range(len(ids)), ids].sum()), rel=1e-5)


def test_greedy_answers_have_the_smallest_temperature_that_is_looked_for():
    assert measures.temperature([drawn(at=1e-3)], 1.0).value == pytest.approx(0.02)


def test_a_server_with_the_models_own_distribution_diverges_by_nothing():
    assert max(measures.divergences(drawn(), token_id)) < 1e-6


def true_divergence(sample, served):
    q = served(sample.logprobs)
    return float((q.exp() * (q - sample.logprobs)).sum(-1).mean())


def flatter(logprobs):
    return (logprobs / 1.5).log_softmax(-1)


def other(logprobs):
    """Nearly flat, and nothing of the model: five tokens have little of the mass."""
    chance = torch.Generator().manual_seed(9)
    return (0.1 * torch.randn(logprobs.shape, generator=chance)).log_softmax(-1)


def test_the_divergence_is_at_most_the_true_one_and_most_of_it():
    sample = drawn(served=flatter)
    found = sum(measures.divergences(sample, token_id)) / LENGTH
    assert 0.5 * true_divergence(sample, flatter) < found
    assert found <= true_divergence(sample, flatter) + 1e-6


def test_a_server_that_names_little_is_judged_by_what_it_draws():
    samples = [drawn(seed=n, served=other, from_served=True) for n in range(8)]
    found = measures.mean([x for s in samples for x in measures.divergences(s, token_id)])
    true = sum(true_divergence(s, other) for s in samples) / len(samples)
    assert abs(found.value - true) < 4 * found.stderr
    assert found.stderr < 0.1 * true


def test_equal_distributions_diverge_by_nothing_however_answers_were_drawn():
    assert max(measures.divergences(drawn(at=3.0), token_id)) < 1e-6


def test_another_temperature_explains_its_own_divergence():
    sample = drawn(served=lambda logprobs: (logprobs / 1.1).log_softmax(-1))
    assert sum(measures.divergences(sample, token_id)) > 1
    assert sum(measures.divergences(sample, token_id, 1.1)) < 1e-3


@pytest.mark.parametrize(
    ("draws", "keep"),
    [
        (lambda s: measures.outside_top_k(s, 2), 2),
        (lambda s: measures.outside_top_p(s, 0.5), 1),
        (measures.unlikely, 1),
    ],
)
def test_draws_fall_outside_of_a_cut_as_often_as_the_model_says_unless_it_was_made(draws, keep):
    assert not any(is_outside for is_outside, _ in draws(drawn(keep=keep)))
    made = draws(drawn())
    num, expected = sum(hit for hit, _ in made), sum(chance for _, chance in made)
    assert num > 0.1 * LENGTH
    assert abs(num - expected) < 4 * expected**0.5


@pytest.mark.parametrize(("token", "is_outside"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_token_that_begins_beyond_top_p_is_outside(token, is_outside):
    """The second begins at 0.5, and the third at 0.8."""
    row = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    sample = ScoredAnswer(token_ids=[token], tokens=[], logprobs=row)
    ((found, chance),) = measures.outside_top_p(sample, 0.6)
    assert found is is_outside
    assert chance == pytest.approx(0.2)


def test_one_value_has_no_error():
    assert measures.mean([1.0]).stderr == math.inf
    assert measures.mean([1.0, 3.0]) == measures.Estimate(value=2.0, stderr=1.0, count=2)


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),  # Clopper and Pearson's interval in other programs
    [(8, 8, 0.6306, 1.0), (0, 10, 0.0, 0.3085), (45, 50, 0.7819, 0.9667), (0, 1, 0.0, 0.975)],
)
def test_a_share_has_the_exact_interval(hits, count, low, high):
    found = measures.share(hits, count)
    assert (found.low, found.high) == pytest.approx((low, high), abs=2e-4)
    assert found.value == hits / count


def test_tokens_tell_no_more_than_their_answers():
    for parts in ([(9, 10)] * 50, [(10, 10)] * 45 + [(0, 10)] * 5):
        found, own = measures.clustered(parts), measures.share(45, 50)
        assert (found.hits, found.count) == (450, 500)
        assert (found.low, found.high) == pytest.approx((own.low, own.high))
    assert measures.clustered([(24, 24)] * 4).low == pytest.approx(0.3976, abs=2e-4)
    uneven = measures.clustered([(100, 100), (1, 1), (1, 1)])  # hardly more than one answer
    assert uneven.low == pytest.approx(0.025, abs=0.01)
    assert measures.clustered([]).count == 0


@pytest.mark.parametrize(
    ("answers", "faulty", "within"),  # how many, the share with a fault, their agreement
    [(8, 0.05, 0.3), (20, 0.05, 0.3), (8, 0.1, 0.5), (50, 0.02, 0.0), (12, 0.0, 1.0), (40, 1, 0.5)],
)
def test_the_interval_of_a_share_holds_it_in_95_of_100_runs(answers, faulty, within):
    chance, held, runs = torch.Generator().manual_seed(0), 0, 200
    truth = 1 - faulty * (1 - within)
    for _ in range(runs):
        bad = torch.rand(answers, generator=chance) < faulty
        agree = torch.rand(answers, 24, generator=chance) < within
        hits = (agree | ~bad[:, None]).sum(1).tolist()
        found = measures.clustered([(hit, 24) for hit in hits])
        held += found.low <= truth <= found.high
    assert held >= 0.94 * runs


def test_agreement_counts_the_likeliest_tokens_that_the_server_names():
    made = drawn(seed=3)
    assert measures.agreement(made, token_id, is_greedy=False) == (LENGTH, LENGTH)
    other = drawn(seed=3, served=lambda logprobs: logprobs.roll(1, -1))
    hits, count = measures.agreement(other, token_id, is_greedy=False)
    assert (hits, count) == (0, LENGTH)
    silent = ScoredAnswer(
        token_ids=[int(made.logprobs[0].argmax()), int(made.logprobs[1].argmin())],
        tokens=[ServedToken(data=b"", logprob=0.0)] * 2,
        logprobs=made.logprobs[:2],
    )
    assert measures.agreement(silent, token_id, is_greedy=True) == (1, 2)
    assert measures.agreement(silent, token_id, is_greedy=False) == (0, 0)


def test_nothing_measured_is_said_as_nothing():
    for nothing in (measures.mean([]), measures.temperature([], 1.0)):
        assert (math.isnan(nothing.value), nothing.stderr, nothing.count) == (True, math.inf, 0)
    unknown = measures.share(0, 0)
    assert math.isnan(unknown.value)
    assert (unknown.low, unknown.high, unknown.hits, unknown.count) == (0.0, 1.0, 0, 0)


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (-1, 0.6), (-1, 0.5), (3, 0.9)])
def test_the_models_distribution_after_cuts_is_that_of_the_kept_tokens(top_k, top_p):
    row = [0.5, 0.25, 0.25, 0.0]  # equal ones are kept together
    kept = {(2, 1.0): 3, (-1, 0.6): 3, (-1, 0.5): 1, (3, 0.9): 3}[top_k, top_p]
    logprobs = torch.tensor([row]).clamp(min=1e-9).log()
    found = measures._sampled(logprobs, 1.0, top_k, top_p).exp()[0]
    wanted = [p / sum(row[:kept]) * (i < kept) for i, p in enumerate(row)]
    assert found.tolist() == pytest.approx(wanted, abs=1e-6)
    greedy = measures._sampled(logprobs, 0, -1, 1.0).exp()[0]
    assert greedy.tolist() == pytest.approx([1, 0, 0, 0], abs=1e-6)
