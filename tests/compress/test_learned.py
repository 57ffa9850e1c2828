"""Learned rounding: what is learned is what is written, and better than rounding to nearest."""

from __future__ import annotations

import pytest
import torch

from slipstream.compress.calibrate import ObservingOps, Stream, load_layer
from slipstream.compress.quantize.learned import Offsets, learn
from slipstream.compress.quantize.rounding import nearest
from slipstream.model.description import read_spec
from slipstream.model.scheme import WeightFormat
from tests import tiny_models
from tests.compress.test_quantize import SIZES, WINDOWS

CPU = torch.device("cpu")


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_learned_is_what_is_written(symmetric):
    rng = torch.Generator().manual_seed(0)
    weight, fmt = torch.randn(6, 64, generator=rng), WeightFormat(bits=3, group_size=32, symmetric=symmetric)
    own = Offsets.of(weight, fmt, torch.bfloat16, clip=True)
    torch.testing.assert_close(own.rounded().numbers(), nearest(weight, fmt, torch.bfloat16, clip=True).numbers())
    for _ in range(20):
        (own.numbers() - weight.roll(1, 0)).square().sum().backward()
        own.step(0.03)
    torch.testing.assert_close(own.numbers(), own.rounded().numbers())
    assert float(own.offset.detach().abs().max()) == 0.5
    assert not torch.equal(own.rounded().codes, nearest(weight, fmt, torch.bfloat16, clip=True).codes)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_it_is_better_than_to_nearest(tmp_path, family):
    tiny_models.build(tmp_path, family, **SIZES)
    source = read_spec(tmp_path)
    stream, values = Stream(source, WINDOWS, device=CPU, dtype=torch.float32), load_layer(source, 0, CPU)
    ends = tuple(f".{part}.weight" for part in ("qkv", "out", "up", "down"))
    products = [n.removesuffix(".weight") for n in values if n.endswith(ends)]
    formats = {name: WeightFormat(bits=3, group_size=32) for name in products}
    exact = torch.cat(stream.run(0, values, ObservingOps()))

    def error(made):
        changed = {**values, **{f"{name}.weight": r.numbers() for name, r in made.items()}}
        return float((torch.cat(stream.run(0, changed, ObservingOps())) - exact).square().sum())

    plain = {name: nearest(values[f"{name}.weight"], fmt, torch.float32, clip=True) for name, fmt in formats.items()}
    learned = learn(stream, 0, values, formats, dtype=torch.float32, clip=True, num_steps=40, step_tokens=1024)
    assert error(learned) < 0.8 * error(plain)
