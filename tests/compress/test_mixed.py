"""Bits by budget: the knapsack against trying everything, and a budget that is kept to."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from slipstream.compress.quantize.mixed import Option, solve_knapsack
from slipstream.compress.recipe import parse
from slipstream.compress.run import compress
from slipstream.errors import ConfigError
from slipstream.spec.description import read_spec
from tests.compress.test_quantize import SIZES, WINDOWS
from tests.support import tiny_models

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(30))
def test_the_knapsack_is_solved_exactly(seed):
    rng = random.Random(seed)
    options = [
        [
            Option(b, rng.randint(1, 30), rng.random() * (3 if rng.random() < 0.2 else 1))
            for b in (2, 3, 4)
        ]
        for _ in range(7)
    ]
    lightest = sum(min(c.num_bytes for c in each) for each in options)
    budget = lightest + rng.randint(0, 60)
    best = min(
        sum(c.kl for c in each)
        for each in itertools.product(*options)
        if sum(c.num_bytes for c in each) <= budget
    )
    found = solve_knapsack(options, budget)
    assert sum(c.num_bytes for c in found) <= budget
    assert sum(c.kl for c in found) == pytest.approx(best)
    with pytest.raises(ConfigError):
        solve_knapsack(options, lightest - 1)


def test_a_budget_is_spent_where_it_counts(tmp_path):
    """A layer whose products do nothing gets the fewest bits; the budget is kept to; the bits are found once."""
    theirs = tiny_models.build(tmp_path / "model", "llama", num_hidden_layers=3, **SIZES)
    with torch.no_grad():
        theirs.model.layers[1].self_attn.o_proj.weight.mul_(1e-4)
        theirs.model.layers[1].mlp.down_proj.weight.mul_(1e-4)
    theirs.save_pretrained(tmp_path / "model")
    recipe = parse(
        [{"quantize": {"bits": {"average": 5.0, "choices": [3, 4, 6]}, "group_size": 32}}]
    )
    source = read_spec(tmp_path / "model")
    settings = dict(windows=WINDOWS, device=CPU, dtype=torch.float32)
    done = compress(source, recipe, tmp_path / "out", **settings)
    bits = {p.name: p.fmt.bits for p in done.weights if p.fmt is not None}
    assert {bits[n] for n in bits if n.startswith("layers.1.")} == {3}
    assert {bits[n] for n in bits if not n.startswith("layers.1.")} & {4, 6}
    assert 4.5 < done.bits_per_weight <= 5.0
    formats = read_spec(tmp_path / "out").quantization.formats
    assert formats.of("model.layers.1.self_attn.o_proj").bits == 3
    assert all(
        formats.of(f"model.layers.0.self_attn.{x}_proj").bits == bits["layers.0.attention.qkv"]
        for x in "qkv"
    )
