"""Zeros in weights: how many, where, and what they cost on inputs that depend on each other."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.compress.calibrate import InputStats
from slipstream.compress.planning import plan
from slipstream.compress.quantize.rounding import fit
from slipstream.compress.recipe import parse, read_recipe
from slipstream.compress.run import compress
from slipstream.compress.sparsify import (
    keep,
    layer_ratios,
    outlier_share,
    sparsegpt,
    sparsify_weight,
)
from slipstream.compress.steps import Sparsify
from slipstream.errors import ConfigError
from slipstream.model.load.weights import load_parameters
from slipstream.spec.description import read_spec
from slipstream.spec.scheme import WeightFormat
from tests.model.families.test_families import CASES, TOKENS
from tests.model.harness import load, run
from tests.support import tiny_models

CPU = torch.device("cpu")
OUT, INNER = 48, 256


def correlated(seed=0):
    """A weight and inputs of few directions, some of them large."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(600, 40, generator=g) @ torch.randn(40, INNER, generator=g) + 0.3 * torch.randn(
        600, INNER, generator=g
    )
    x = x * torch.rand(INNER, generator=g).mul(3).exp()
    stats = InputStats.empty(INNER, CPU)
    stats.add(x, 1.0)
    return torch.randn(OUT, INNER, generator=g), x, stats


@pytest.mark.parametrize(("by_row", "zeros"), [(True, 4 * 2), (False, 11)])
def test_number_of_zeros_is_rounded_down(by_row, zeros):
    score = torch.rand(4, 10) + 1
    assert int((~keep(score, 0.29, None, by_row=by_row)).sum()) == zeros


@pytest.mark.parametrize(
    "settings",
    [{"ratio": 0.3}, {"ratio": 0.5}, {"ratio": 0.7}, {"pattern": "2:4"}, {"pattern": "4:8"}],
    ids=str,
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


def test_the_highest_scores_stay_by_row_whole_or_pattern():
    score = torch.tensor([[1.0, 4, 2, 3], [8, 7, 6, 5]])
    assert keep(score, 0.5, None, by_row=True).tolist() == [
        [False, True, False, True],
        [True, True, False, False],
    ]
    assert keep(score, 0.5, None, by_row=False).tolist() == [[False] * 4, [True] * 4]
    assert keep(score, 0.5, "2:4", by_row=False).tolist() == [
        [False, True, False, True],
        [True, True, False, False],
    ]
    assert keep(score, 0.1, None, by_row=True).all()


def test_wanda_weighs_inputs():
    weight = torch.tensor([[1.0, 2.0], [-3.0, 4.0]])
    stats = InputStats.empty(2, CPU)
    stats.add(torch.tensor([[10.0, 0.1]]), 1.0)
    assert sparsify_weight(weight, Sparsify(method="wanda"), stats).tolist() == [
        [1.0, 0.0],
        [-3.0, 0.0],
    ]
    assert sparsify_weight(weight, Sparsify(method="wanda"), None).tolist() == [
        [0.0, 0.0],
        [-3.0, 4.0],
    ]


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
        torch.testing.assert_close(
            made, torch.stack([grid.column(made[:, i], i // 64) for i in range(INNER)], dim=1)
        )
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
    assert outlier_share({"a": even**3}, {"a": stats}, 5.0) > outlier_share(
        {"a": even}, {"a": stats}, 5.0
    )


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"ratio": 1.0}, "ratio"),
        ({"ratio": 0.6, "pattern": "2:4"}, "ratio"),
        ({"pattern": "2:4", "ratios": "outliers"}, "ratios"),
        ({"ratios": "outliers", "spread": 0.3}, "spread"),
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


# --- Recipes ------------------------------------------------------------------------------------------------------------

WINDOWS = torch.randint(
    4, tiny_models.VOCAB, (6, 32), generator=torch.Generator().manual_seed(1)
).tolist()


def carried_out(tmp_path, recipe, family="llama", **overrides):
    tiny_models.write(tmp_path / "model", family, **overrides)
    source = read_spec(tmp_path / "model")
    compress(source, recipe, tmp_path / "out", windows=WINDOWS, device=CPU, dtype=torch.float32)
    return read_spec(tmp_path / "out")


def products(description):
    values = load_parameters(description, dtype=torch.float32, device=CPU)
    return {
        n: v
        for n, v in values.items()
        if n.startswith("layers.") and v.dim() == 2 and "router" not in n
    }


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "qwen2_moe", "falcon-40b", "gemma2"])
def test_a_sparse_checkpoint_loads_in_transformers(name, tmp_path):
    family, overrides = CASES[name]
    out = carried_out(tmp_path, parse([{"sparsify": {"pattern": "2:4"}}]), family, **overrides)
    for stem, weight in products(out).items():
        if "shared_weight" not in stem:
            assert (weight == 0).float().mean() >= 0.5, stem
    assert not out.quantization
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(
        run(load(tmp_path / "out"), TOKENS), expected, rtol=1e-4, atol=1e-4 * expected.abs().max()
    )


def test_layers_get_ratios_of_their_own(tmp_path):
    step = {
        "method": "wanda",
        "ratio": 0.6,
        "ratios": "outliers",
        "spread": 0.1,
        "outlier": 3.0,
        "ignore": ["*.out"],
    }
    out = carried_out(tmp_path, parse([{"sparsify": step}]))
    zeros = [
        [(w == 0).float().mean().item() for n, w in products(out).items() if f"layers.{i}." in n]
        for i in (0, 1)
    ]
    assert zeros[0][1] == zeros[1][1] == 0  # attention.out is ignored
    first, second = (max(z) for z in zeros)
    assert first != second
    assert (first + second) / 2 == pytest.approx(0.6, abs=0.03)


@pytest.mark.parametrize(
    "steps",
    [
        [{"sparsify": {"pattern": "2:4"}}, {"quantize": {"bits": 8, "inputs": "int8"}}],
        [
            {"sparsify": {"ratio": 0.5}},
            {"quantize": {"bits": 4, "group_size": 32, "rounding": "gptq"}},
        ],
        [{"sparsify": {"method": "wanda"}}, {"quantize": {"bits": 4, "group_size": 32}}],
    ],
    ids=str,
)
def test_rounded_zeros_stay(steps, tmp_path):
    tiny_models.write(tmp_path / "model", hidden_size=64)
    source = read_spec(tmp_path / "model")
    compress(
        source, parse(steps), tmp_path / "out", windows=WINDOWS, device=CPU, dtype=torch.float32
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all((p != 0).all() for n, p in theirs.named_parameters() if "proj" in n)
    model = load(tmp_path / "out")
    from slipstream.kernels.weights.quantize import dequantize

    for layer in model.decoder.layers:
        for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.up, layer.mlp.down):
            weight = dequantize(linear) if type(linear).__name__ != "Linear" else linear.weight
            assert (weight == 0).float().mean() >= 0.49


def test_presets_and_what_does_not_go_together(tmp_path):
    tiny_models.write(tmp_path)
    source = read_spec(tmp_path)
    assert plan(source, read_recipe("2:4")).needs_text
    assert all(
        p.sparse and p.fmt is not None
        for p in plan(source, read_recipe("2:4-int8")).weights
        if p.name != "head"
    )
    for steps, match in (
        ([{"sparsify": {"method": "wanda"}}, {"quantize": {"rounding": "gptq"}}], "fill the zeros"),
        ([{"sparsify": {"ignore": ["layers.9.*"]}}], "names no product"),
        ([{"sparsify": {"ignore": ["layers.*"]}}], "leaves no product"),
        ([{"sparsify": {"ratio": 2.0}}], "between 0 and 1"),
    ):
        with pytest.raises(ConfigError, match=match):
            plan(source, parse(steps))
