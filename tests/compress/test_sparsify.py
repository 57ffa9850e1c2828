"""Zeros in weights: how many, where, and what they cost on inputs that depend on each other."""

from __future__ import annotations

import pytest
import torch

from slipstream.compress.calibrate import InputStats
from slipstream.compress.quantize.rounding import fit
from slipstream.compress.sparsify import keep, layer_ratios, outlier_share, sparsegpt, sparsify_weight
from slipstream.compress.steps import Sparsify
from slipstream.errors import ConfigError
from slipstream.model.scheme import WeightFormat

CPU = torch.device("cpu")
OUT, INNER = 48, 256


def correlated(seed=0):
    """A weight and inputs of few directions, some of them large."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(600, 40, generator=g) @ torch.randn(40, INNER, generator=g) + 0.3 * torch.randn(600, INNER, generator=g)
    x = x * torch.rand(INNER, generator=g).mul(3).exp()
    stats = InputStats.empty(INNER, CPU)
    stats.add(x, 1.0)
    return torch.randn(OUT, INNER, generator=g), x, stats


@pytest.mark.parametrize(
    "settings", [{"ratio": 0.3}, {"ratio": 0.5}, {"ratio": 0.7}, {"pattern": "2:4"}, {"pattern": "4:8"}], ids=str
)
def test_sparsegpt_errs_less_than_wanda_and_wanda_less_than_magnitude(settings):
    weight, x, stats = correlated()
    errors = []
    for method in ("sparsegpt", "wanda", "magnitude"):
        made = sparsify_weight(weight, Sparsify(method=method, **settings), stats)
        zeros = (made == 0).float().mean().item()
        assert zeros == pytest.approx(settings.get("ratio", 0.5), abs=0.005)
        if "pattern" in settings:
            n, m = map(int, settings["pattern"].split(":"))
            assert bool(((made != 0).unflatten(1, (-1, m)).sum(-1) == n).all())
        errors.append(((made - weight) @ x.T).square().sum().item())
    assert errors[0] < 0.7 * errors[1] < 0.7 * errors[2]


def test_what_stays():
    score = torch.tensor([[1.0, 4, 2, 3], [8, 7, 6, 5]])
    assert keep(score, 0.5, None, by_row=True).tolist() == [[False, True, False, True], [True, True, False, False]]
    assert keep(score, 0.5, None, by_row=False).tolist() == [[False] * 4, [True] * 4]
    assert keep(score, 0.5, "2:4", by_row=False).tolist() == [[False, True, False, True], [True, True, False, False]]
    assert keep(score, 0.1, None, by_row=True).all()


def test_wanda_weighs_inputs():
    weight = torch.tensor([[1.0, 2.0], [-3.0, 4.0]])
    stats = InputStats.empty(2, CPU)
    stats.add(torch.tensor([[10.0, 0.1]]), 1.0)
    assert sparsify_weight(weight, Sparsify(method="wanda"), stats).tolist() == [[1.0, 0.0], [-3.0, 0.0]]
    assert sparsify_weight(weight, Sparsify(method="wanda"), None).tolist() == [[0.0, 0.0], [-3.0, 4.0]]


@pytest.mark.parametrize("pattern", [None, "2:4"])
def test_zeros_and_rounding_together_cost_less_than_one_after_the_other(pattern):
    weight, x, stats = correlated()
    fmt = WeightFormat(kind="int", bits=4, group_size=64)
    grid = fit(weight, fmt, torch.float32, clip=True, importance=stats.mean_square)
    together = sparsegpt(weight, stats, 0.5, pattern, grid=grid)
    sparse = sparsegpt(weight, stats, 0.5, pattern)
    mask = sparse != 0
    apart = torch.stack([grid.column(sparse[:, i], i // 64) for i in range(INNER)], dim=1) * mask
    for made in (together, apart):
        assert (made == 0).float().mean() >= 0.5
        torch.testing.assert_close(made, torch.stack([grid.column(made[:, i], i // 64) for i in range(INNER)], dim=1))
    errors = [((made - weight) @ x.T).square().sum().item() for made in (together, apart)]
    assert errors[0] < 0.8 * errors[1]


def test_inputs_that_never_come_lose_their_weights():
    weight, _, _ = correlated()
    stats = InputStats.empty(INNER, CPU)
    stats.add(torch.randn(50, INNER) * (torch.arange(INNER) % 2), 1.0)
    made = sparsegpt(weight, stats, 0.5, None)
    assert bool((made[:, ::2] == 0).all())


def test_layers_with_outliers_lose_less():
    found = layer_ratios([0.01, 0.05, 0.02], 0.5, 0.08)
    assert sum(found) / 3 == pytest.approx(0.5)
    assert found[1] < found[2] < found[0]
    assert found[0] - found[1] == pytest.approx(0.16)
    assert layer_ratios([0.1, 0.1], 0.5, 0.08) == [0.5, 0.5]
    stats = InputStats.empty(INNER, CPU)
    stats.add(torch.randn(500, INNER), 1.0)
    even = torch.randn(OUT, INNER)
    assert outlier_share({"a": even**3}, {"a": stats}, 5.0) > outlier_share({"a": even}, {"a": stats}, 5.0)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"ratio": 1.0}, "ratio"),
        ({"ratio": 0.6, "pattern": "2:4"}, "ratio"),
        ({"pattern": "2:4", "ratios": "outliers"}, "ratios"),
        ({"spread": 0.3}, "spread"),
        ({"damping": 0.0}, "damping"),
    ],
    ids=str,
)
def test_settings_are_checked(settings, field):
    with pytest.raises(ConfigError) as caught:
        Sparsify(**settings).check()
    assert caught.value.field == field


def test_a_pattern_must_fit():
    with pytest.raises(ConfigError, match="does not divide"):
        keep(torch.rand(2, 6), 0.5, "2:4", by_row=True)
