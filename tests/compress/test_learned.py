"""Learned rounding: what is learned is what is written, and better than rounding to nearest."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file

from slipstream.compress import run as run_module
from slipstream.compress.calibrate import FakeInputs, ObservingOps, Stream, load_layer
from slipstream.compress.quantize.learned import Offsets, learn
from slipstream.compress.quantize.rounding import gptq, gptq_trace, nearest
from slipstream.compress.recipe import parse
from slipstream.spec.description import read_spec
from slipstream.spec.scheme import WeightFormat
from tests.compress.test_quantize import SIZES, WINDOWS
from tests.compress.test_rounding import inputs, weights
from tests.support import tiny_models

CPU = torch.device("cpu")


FP8 = WeightFormat(kind="float", inputs="fp8")
FORMATS = {
    "symmetric": WeightFormat(bits=3, group_size=32),
    "zeros": WeightFormat(bits=3, group_size=32, symmetric=False),
    "fp8": FP8,
}


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
def test_what_is_learned_is_what_is_written(fmt):
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 64, generator=rng)
    weight[:, :8] *= 1e-5  # of floats, between the smallest codes
    own, plain = (f(weight, fmt, torch.bfloat16, clip=True) for f in (Offsets.fitted, nearest))
    torch.testing.assert_close(own.rounded().dequantized(), plain.dequantized())
    for _ in range(20):
        (own.dequantized() - weight.roll(1, 0)).square().sum().backward()
        own.step(0.03)
    torch.testing.assert_close(own.dequantized(), own.rounded().dequantized())
    assert float(own.offset.detach().abs().max()) == 0.5
    assert not torch.equal(own.rounded().dequantized(), plain.dequantized())


def test_an_offset_of_half_is_half_a_step_of_floats():
    """Codes 16, 17 … 31 of a row whose scale is 1 lie 2 apart from 16 on, 1 below; subnormals 2⁻⁹."""
    weight = torch.tensor([[448.0, 17.0, 9.4, 2**-9 * 1.4]])
    own = Offsets.fitted(weight, FP8, torch.float32, clip=False)
    with torch.no_grad():
        own.offset += 0.49
    assert own.rounded().dequantized().tolist() == [[448.0, 18.0, 10.0, 2**-9 * 2]]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("act_order", [True, False])
def test_learning_begins_at_gptqs_result(fmt, act_order):
    weight, stats = weights(6, 128), inputs(300, 128)
    made, compensated = gptq_trace(
        weight, fmt, torch.bfloat16, stats, damping=0.01, act_order=act_order, clip=True
    )
    whole = gptq(weight, fmt, torch.bfloat16, stats, act_order=act_order)
    begun = Offsets.of(compensated, made.grid).rounded()
    assert torch.equal(made.dequantized(), whole.dequantized())
    assert (
        float((begun.dequantized() != made.dequantized()).float().mean()) < 0.005
    )  # a last bit of what it met, at a tie
    assert not torch.equal(
        nearest(weight, fmt, torch.bfloat16, clip=True, stats=stats).codes, made.codes
    )


@pytest.mark.parametrize(
    ("family", "fmt"),
    [("llama", FORMATS["symmetric"]), ("qwen3_moe", FORMATS["symmetric"]), ("llama", FP8)],
)
def test_it_is_better_than_to_nearest(tmp_path, family, fmt):
    """The error is that of the layer's output, with inputs rounded to 8 bits where the scheme
    rounds them."""
    tiny_models.write(tmp_path, family, **SIZES)
    source = read_spec(tmp_path)
    stream, values = (
        Stream(source, WINDOWS, device=CPU, dtype=torch.float32),
        load_layer(source, 0, CPU),
    )
    ends = tuple(f".{part}.weight" for part in ("qkv", "out", "up", "down"))
    products = [n.removesuffix(".weight") for n in values if n.endswith(ends)]
    exact = torch.cat(stream.run(0, values, ObservingOps()))
    fake = {name: FakeInputs("fp8") for name in products} if fmt.inputs else {}

    def error(made):
        changed = {**values, **{f"{name}.weight": r.dequantized() for name, r in made.items()}}
        found = torch.cat(stream.run(0, changed, ObservingOps(inputs=fake)))
        return float((found - exact).square().sum())

    plain = {
        name: nearest(values[f"{name}.weight"], fmt, torch.float32, clip=True) for name in products
    }
    begun = {
        name: Offsets.fitted(values[f"{name}.weight"], fmt, torch.float32, clip=True)
        for name in products
    }
    first = error({name: own.rounded() for name, own in begun.items()})
    learned, left = learn(
        stream, 0, values, values, begun, inputs=fake, num_steps=40, step_tokens=1024
    )
    assert error(learned) == pytest.approx(left * first, rel=1e-3)
    assert error(learned) < (0.9 if fake else 0.8) * error(plain)


@pytest.mark.parametrize(
    "given", [{"bits": 3, "group_size": 32}, {"bits": 8, "kind": "float", "inputs": "fp8"}]
)
def test_it_is_better_than_gptq(tmp_path, given, caplog):
    """Every layer, beginning at GPTQ's result, whose scales stay; what is left is written beside the weights."""
    tiny_models.write(tmp_path / "model", "llama", **SIZES)
    step = {**given, "rounding": "learned", "begin": "gptq", "num_steps": 30, "step_tokens": 1024}
    where = {"device": CPU, "dtype": torch.float32, "windows": WINDOWS}
    source = read_spec(tmp_path / "model")
    run_module.compress(source, parse([{"quantize": step}]), tmp_path / "out", **where)
    products = json.loads((tmp_path / "out" / run_module.PRODUCTS_NAME).read_text())
    assert len(products) == 4 * source.spec.num_layers
    assert all(p["learned"] < 0.95 and "error" not in p for p in products.values())
    assert not caplog.records
    run_module.compress(
        source, parse([{"quantize": {**given, "rounding": "gptq"}}]), tmp_path / "gptq", **where
    )
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    assert torch.equal(
        *(load_file(tmp_path / out / "model.safetensors")[name] for out in ("out", "gptq"))
    )


@pytest.mark.parametrize(
    ("given", "is_estimate"),
    [
        ({"bits": 8, "inputs": "int8", "scaling": "smoothquant"}, True),
        ({"bits": 4, "group_size": 32, "rounding": "gptq"}, False),
    ],
)
def test_an_error_that_a_sample_estimates_says_so(tmp_path, given, is_estimate):
    tiny_models.write(tmp_path / "model", "llama", **SIZES)
    where = {"device": CPU, "dtype": torch.float32, "windows": WINDOWS}
    source = read_spec(tmp_path / "model")
    run_module.compress(source, parse([{"quantize": given}]), tmp_path / "out", **where)
    products = json.loads((tmp_path / "out" / run_module.PRODUCTS_NAME).read_text())
    assert all(("error_from" in p) == is_estimate and "error" in p for p in products.values())


def test_what_is_no_better_is_not_taken_and_said(tmp_path, caplog, monkeypatch):
    tiny_models.write(tmp_path / "model", "llama", **SIZES)
    monkeypatch.setattr(Offsets, "step", lambda self, rate: None)
    step = {"bits": 4, "group_size": 32, "rounding": "learned", "num_steps": 1}
    where = {"device": CPU, "dtype": torch.float32, "windows": WINDOWS}
    source = read_spec(tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        run_module.compress(source, parse([{"quantize": step}]), tmp_path / "out", **where)
    assert [r.getMessage()[:8] for r in caplog.records] == [
        f"layer {i}:" for i in range(source.spec.num_layers)
    ]
    products = json.loads((tmp_path / "out" / run_module.PRODUCTS_NAME).read_text())
    assert all(p["learned"] == 1.0 for p in products.values())


def test_step_goes_by_its_rate_against_the_gradient_and_within_bounds():
    weight = weights(2, 32)
    own = Offsets.fitted(weight, FORMATS["symmetric"], torch.float32, clip=False)
    for rate, offset, factor in ((0.1, -0.1, 1.1), (9.0, -0.5, 1.25)):
        own.offset.grad, own.factor.grad = torch.ones_like(own.offset), -torch.ones_like(own.factor)
        own.step(rate)
        torch.testing.assert_close(own.offset.detach(), torch.full_like(weight, offset))
        torch.testing.assert_close(own.factor.detach(), torch.full_like(own.factor, factor))
        own.step(0.1)  # without new gradients nothing moves
        assert float(own.factor.detach().max()) == pytest.approx(factor)
    begun = Offsets.of(
        weight, own.grid
    )  # from GPTQ's result steps are half as large, and scales stay
    begun.offset.grad = torch.ones_like(weight)
    begun.step(0.1)
    torch.testing.assert_close(begun.offset.detach(), torch.full_like(weight, -0.05))
    assert not begun.factor.requires_grad
