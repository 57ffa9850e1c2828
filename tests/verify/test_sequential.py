"""Sequential tests keep their error rates, however often one looks."""

import math
import random
from pathlib import Path

import pytest
import torch

from slipstream.verify import sequential
from slipstream.verify.measures import ScoredAnswer
from slipstream.verify.sequential import ErrorRates

RATES = ErrorRates(alpha=0.05, beta=0.05)
TRIALS = 300


def ever(decide, draw, looks=40, seed=0):
    """Shares of trials that end as a fault, and as sound, when one looks after each draw."""
    chance, ends = random.Random(seed), {"fault": 0, "sound": 0, "open": 0}
    for _ in range(TRIALS):
        values, decision = [], "open"
        while decision == "open" and len(values) < looks:
            values.append(draw(chance))
            decision = decide(values)
        ends[decision] += 1
    return ends["fault"] / TRIALS, ends["sound"] / TRIALS


def test_shares_keep_their_rates():
    def decide(values):
        return sequential.share(values, 0.02, 0.15, RATES)

    fault, sound = ever(decide, lambda r: float(r.random() < 0.02), looks=300)
    assert fault <= 0.06
    assert sound > 0.9
    fault, sound = ever(decide, lambda r: float(r.random() < 0.15), looks=300)
    assert sound <= 0.06
    assert fault > 0.9


@pytest.mark.parametrize("peaked", [0.06, 0.3])
def test_a_cut_that_is_ignored_is_found_by_a_peaked_model_too(peaked):
    def ends(chance_outside):
        return ever(
            lambda values: sequential.cut([(v, peaked) for v in values], RATES),
            lambda r: r.random() < chance_outside,
            looks=200,
        )

    fault, sound = ends(peaked)
    assert sound <= 0.07
    assert fault > 0.9
    fault, sound = ends(0.1 * peaked)
    assert fault <= 0.07
    assert sound > 0.9


def test_a_cut_that_changes_nothing_is_left_open():
    assert sequential.cut([(False, 0.001)] * 2000, ErrorRates()) == "open"
    assert sequential.cut([(False, 1.0)], ErrorRates()) == "open"  # no token decides alone


def test_a_cut_is_kept_once_its_ratio_is_below_beta():
    """ln 0.01 is -4.61. Each draw adds ln(0.7 / 0.97), or -0.33."""
    assert sequential.cut([(False, 0.3)] * 14, ErrorRates()) == "open"
    assert sequential.cut([(False, 0.3)] * 15, ErrorRates()) == "sound"


def test_the_stake_is_parted_among_the_other_temperatures():
    """ln 1000 is 6.9, and ln 2000 is 7.6."""
    assert sequential.temperature([7.2], ErrorRates()) == "fault"
    assert sequential.temperature([7.2, -20.0], ErrorRates()) == "open"
    assert sequential.temperature([7.7, -20.0], ErrorRates()) == "fault"


def test_a_mean_at_its_limit_is_seldom_called_a_fault():
    def decide(values):
        return sequential.mean(values, 1.0, RATES)

    assert ever(decide, lambda r: r.expovariate(1))[0] <= 0.06
    assert ever(decide, lambda r: r.lognormvariate(-0.5, 1))[0] <= 0.06


def test_means_far_from_their_limit_are_decided_by_few_values():
    def decide(values):
        return sequential.mean(values, 1.0, RATES)

    assert ever(decide, lambda r: 5 * r.expovariate(1), looks=20)[0] > 0.9
    assert ever(decide, lambda r: 0.05 * r.expovariate(1), looks=40)[1] > 0.9


def test_a_mean_above_its_limit_is_a_fault_once_the_bets_won_a_thousandfold():
    """The boldest bet wins 0.9 of its sixth a time: 1.9**14 / 6 is 1330."""
    assert sequential.mean([2.0] * 13, 1.0, ErrorRates()) == "open"
    assert sequential.mean([2.0] * 14, 1.0, ErrorRates()) == "fault"


def test_a_sound_server_is_told_by_some_forty_answers():
    rates = ErrorRates()
    assert sequential.mean([0.0] * 35, 1.0, rates) == "open"
    assert sequential.mean([0.0] * 36, 1.0, rates) == "sound"
    assert sequential.mean([0.1] * 40, 1.0, rates) == "sound"
    assert sequential.mean([0.3] * 52, 1.0, rates) == "sound"
    assert sequential.mean([0.0] * 7, 1.0, rates, 2) == "sound"  # half of the answers


def test_one_value_beyond_the_cut_costs_more_answers_and_not_the_verdict():
    assert sequential.mean([0.0] * 60 + [50.0], 1.0, ErrorRates()) == "open"
    assert sequential.mean([0.0] * 90 + [50.0], 1.0, ErrorRates()) == "sound"


@pytest.mark.parametrize("value", [0.0, 0.1, 0.4])
def test_the_answers_that_a_verdict_needs_are_foretold(value):
    told = sequential.needed(value, 1.0, 0.01)
    assert sequential.mean([value] * told, 1.0, ErrorRates()) == "sound"
    assert sequential.mean([value] * (told - 3), 1.0, ErrorRates()) == "open"
    assert sequential.needed(1.0, 1.0, 0.01) is None


@pytest.mark.parametrize("one_in", [8, 12, 30])
def test_a_fault_that_is_said_to_be_excluded_is_seldom_there(one_in):
    """Looks after each value, and the rarest fault that is excluded at any look counts."""
    chance, trials, wrong = random.Random(one_in), 200, 0
    for _ in range(trials):
        values = [float(one_in) * (chance.random() < 1 / one_in) for _ in range(150)]
        told = [sequential.excluded(values[:n], 1.0, 0.05) for n in range(30, 151, 5)]
        wrong += max((t for t in told if t), default=0.0) >= one_in
    assert wrong / trials <= 0.05 + 2 * math.sqrt(0.05 / trials)


def test_more_values_exclude_rarer_faults():
    told = [sequential.excluded([0.0] * n, 1.0, 0.01) for n in (20, 36, 80, 800)]
    assert told[0] is None
    assert [round(t) for t in told[1:]] == [8, 17, 165]


@pytest.mark.parametrize(
    ("name", "limit", "rate"),
    [
        ("1 of 4", 0.01, 0.01),
        ("1 of 8", 0.001, 0.01),
        ("1 of 16", 0.1, 0.12),
        ("lognormal", 0.001, 0.01),
        ("heavy", 0.01, 0.01),
    ],
)
def test_a_fault_in_some_answers_is_seldom_called_sound(name, limit, rate):
    """Rates of docs/verify.md, with an allowance of two standard errors."""

    def draw(chance):
        if name in ("lognormal", "heavy"):  # of twice the limit
            spread = 1 if name == "lognormal" else 2
            return limit * chance.lognormvariate(math.log(2) - spread**2 / 2, spread)
        is_hit = chance.random() < 1 / int(name[5:])
        return 50 * limit if is_hit else 0.05 * limit * chance.expovariate(1)

    chance, trials, num_sound = random.Random(0), 150, 0
    for _ in range(trials):
        values, decision = [], "open"
        while decision == "open" and len(values) < 96:
            values += [draw(chance) for _ in range(4)]
            decision = sequential.mean(values, limit, ErrorRates())
        num_sound += decision == "sound"
    assert num_sound / trials <= rate + 2 * math.sqrt(rate / trials)


def test_the_bound_of_a_mean_holds_at_all_looks():
    chance, missed = random.Random(1), 0
    for _ in range(TRIALS):
        values = [chance.gauss(0, 1) for _ in range(60)]
        missed += any(sequential.bound(values[:n], 0.05) < 0 for n in range(sequential.FEWEST, 61))
    assert missed / TRIALS <= 0.08


@pytest.mark.parametrize(("at", "wrong"), [(1.0, "fault"), (1.1, "sound"), (1 / 1.1, "sound")])
def test_temperatures_keep_their_rates(at, wrong):
    chance, ends = torch.Generator().manual_seed(0), []
    for _ in range(40):
        ratios, decision = [0.0, 0.0], "open"
        while decision == "open":
            rows = (2 * torch.randn(96, 64, generator=chance)).log_softmax(-1)
            ids = torch.multinomial((rows / at).softmax(-1), 1, generator=chance)[:, 0].tolist()
            sample = ScoredAnswer(token_ids=ids, tokens=[], logprobs=rows)
            own, *others = sample.likelihoods([1.0, 1.1, 1 / 1.1])
            ratios = [r + other - own for r, other in zip(ratios, others, strict=True)]
            decision = sequential.temperature(ratios, RATES)
        ends.append(decision)
    assert ends.count(wrong) <= 4  # 2 are expected at most


def test_an_answer_less_than_the_bound_needs_leaves_it_open():
    assert sequential.bound([0.0] * (sequential.FEWEST - 1), 0.01) == float("inf")


def test_the_price_of_rare_faults_is_what_the_docs_say():
    page = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.split("\n") if line.startswith("| ")]
    (at,) = (i for i, row in enumerate(rows) if row[0] == "`--rarest N`" and len(row) > 2)
    table = rows[at + 2 : at + 6]
    for row, kl in zip(table, (0.0, 0.1, 0.3, 0.5), strict=True):
        needed = [sequential.needed(kl * 0.01, 0.01, 0.01, float(n)) for n in rows[at][1:]]
        assert [int(n) for n in row[1:]] == needed


@pytest.mark.parametrize(("count", "share"), [(0, 1.0), (1, 0.99), (8, 0.4377), (919, 0.005)])
def test_right_answers_in_a_row_exclude_a_share_of_broken_ones(count, share):
    found = sequential.excluded_share(count, 0.01)
    assert found == pytest.approx(share, rel=1e-3)
    assert (1 - found) ** count <= 0.0101 or not count
