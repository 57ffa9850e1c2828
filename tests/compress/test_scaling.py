"""Moving scales leaves the model what it was; it lowers the error where inputs are uneven."""

from __future__ import annotations

import pytest
import torch

from slipstream.compress.calibrate import InputStats, ObservingOps, Stream, load_layer
from slipstream.compress.quantize import scaling as search
from slipstream.compress.quantize.rounding import nearest
from slipstream.compress.quantize.scaling import Fold, folds, scale_inputs, search_scale
from slipstream.compress.quantize_step import Quantize
from slipstream.spec.description import read_spec
from slipstream.spec.scheme import WeightFormat
from tests.support import tiny_models

CPU = torch.device("cpu")
WINDOWS = [list(range(3, 35)), list(range(40, 72))]
EXPECTED = {  # what can be scaled there
    "llama": {"attention.qkv", "attention.out", "mlp.up", "mlp.down"},
    "qwen2": {"attention.qkv", "attention.out", "mlp.up", "mlp.down"},
    "gemma2": {"attention.qkv", "attention.out", "mlp.up", "mlp.down"},
    "opt": {"attention.qkv", "attention.out", "mlp.up", "mlp.down"},
    "gpt_neox": {"attention.qkv", "attention.out", "mlp.up"},
    "olmo2": {"attention.out", "mlp.down"},
    "cohere": {"attention.out", "mlp.down"},
    "mixtral": {"attention.qkv", "attention.out"},
    "qwen3_5_text": {"recurrent.in", "recurrent.out", "mlp.up", "mlp.down"},
    "lfm2": {"recurrent.in", "recurrent.out", "mlp.up", "mlp.down"},
    "bamba": {"recurrent.in", "recurrent.out", "mlp.up", "mlp.down"},
    "falcon_h1": {"attention.out", "mlp.up", "mlp.down"},
    "bitnet": {"attention.qkv", "attention.out", "mlp.up", "mlp.down"},
    "jamba": {"recurrent.in", "mlp.up", "mlp.down"},
}


@pytest.mark.parametrize("family", EXPECTED)
def test_folding_changes_nothing(tmp_path, family):
    """Every product's inputs are divided by something between a quarter and four; the layers compute the same."""
    tiny_models.write(tmp_path, family)
    source = read_spec(tmp_path)
    stream = Stream(source, WINDOWS, device=CPU, dtype=torch.float32)
    rng = torch.Generator().manual_seed(0)
    assert set(folds(source.spec.layers[0])) == EXPECTED[family]
    for index, layer in enumerate(source.spec.layers):
        values = load_layer(source, index, CPU)
        before = stream.run(index, values, ObservingOps())
        plain = {name: value.clone() for name, value in values.items()}
        for product, fold in folds(layer).items():
            inner = values[f"{product}.weight"].shape[1]
            s = 4 ** (2 * torch.rand(inner // fold.repeats, generator=rng) - 1)
            scale_inputs(values, product, fold, s, layer.norms, torch.float32)
        assert not any(
            torch.equal(values[f"{p}.weight"], plain[f"{p}.weight"]) for p in folds(layer)
        )
        after = stream.run(index, values, ObservingOps())
        torch.testing.assert_close(torch.cat(after), torch.cat(before), atol=2e-4, rtol=2e-4)
        stream.states = before


def test_norms_are_rounded_to_what_is_written(tmp_path):
    """The weight is multiplied by what the written norm divides by, so that not even 16 bits of norm change the model."""
    tiny_models.write(tmp_path, "llama")
    source = read_spec(tmp_path)
    stream = Stream(source, WINDOWS, device=CPU, dtype=torch.float32)
    values = load_layer(source, 0, CPU)
    values = {n: v.bfloat16().float() for n, v in values.items()}
    before = stream.run(0, values, ObservingOps())
    layer = source.spec.layers[0]
    for product in ("attention.qkv", "mlp.up"):
        s = torch.linspace(0.3, 3, 32)
        scale_inputs(values, product, folds(layer)[product], s, layer.norms, torch.bfloat16)
    for norm in ("pre_attention", "pre_mlp"):
        assert torch.equal(values[f"{norm}.weight"], values[f"{norm}.weight"].bfloat16().float())
    torch.testing.assert_close(
        torch.cat(stream.run(0, values, ObservingOps())), torch.cat(before), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("scaling", "inputs", "bits"), [("awq", None, 3), ("smoothquant", "int8", 8)]
)
def test_uneven_inputs_are_found(tmp_path, scaling, inputs, bits):
    """The searched scale lowers the error of a product's output if a few inputs are thirty times the others."""
    tiny_models.write(tmp_path, "llama", hidden_size=64, head_dim=16)
    source = read_spec(tmp_path)
    values = load_layer(source, 0, CPU)
    values["pre_mlp.weight"][::16] *= 30
    stream = Stream(source, WINDOWS, device=CPU, dtype=torch.float32)
    stats = stream.observe(0, values, ["mlp.up"], inputs={})["mlp.up"]
    assert stats.num_rows == 64
    settings = Quantize(scaling=scaling, bits=bits, inputs=inputs)
    fmt = WeightFormat(bits=bits, group_size=None if inputs else 32, inputs=inputs)
    fold, weight = folds(source.spec.layers[0])["mlp.up"], values["mlp.up.weight"]
    s, exponent = search_scale(weight, stats, fold, settings, fmt, torch.float32)
    assert exponent > 0
    x = stats.sample
    exact = x @ weight.T

    def error(s):
        from slipstream.compress.calibrate import FakeInputs

        fake = FakeInputs(inputs) if inputs else lambda x: x
        made = nearest(weight * s, fmt, torch.float32, clip=False).dequantized()
        return float((fake(x / s) @ made.T - exact).square().mean())

    assert error(s) < 0.7 * error(torch.ones_like(s))


@pytest.mark.parametrize(
    ("scaling", "inputs", "bits"), [("awq", None, 4), ("awq", None, 3), ("smoothquant", "int8", 8)]
)
def test_the_coarse_search_is_within_two_percent_of_all_exponents(scaling, inputs, bits):
    settings = Quantize(scaling=scaling, bits=bits, inputs=inputs)
    fmt = WeightFormat(bits=bits, group_size=None if inputs else 32, inputs=inputs)
    for seed in range(8):
        rng = torch.Generator().manual_seed(seed)
        spread = torch.randn(64, generator=rng).mul(1.5).exp()
        x = torch.randn(256, 64, generator=rng) * spread
        stats = InputStats.empty(64, CPU)
        stats.add(x, 1.0)
        weight = torch.randn(48, 64, generator=rng) / spread.sqrt()
        error = search._output_error(weight, stats, fmt, torch.float32, scaling == "awq")
        found, _ = search_scale(weight, stats, Fold(norm="n"), settings, fmt, torch.float32)
        every = [torch.ones(64)]
        for a in search.EXPONENTS:
            awq = scaling == "awq"
            s = search._awq(stats, Fold(), a) if awq else search._smooth(weight, stats, Fold(), a)
            every.append(s)
        assert error(found) <= 1.02 * min(error(s) for s in every)
