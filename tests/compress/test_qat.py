"""Training of what was rounded: it begins at what was written, lowers the divergence, and writes what it learned."""

from __future__ import annotations

import pytest
import torch

from slipstream.compress import run as run_module
from slipstream.compress.quantize import qat as qat_module
from slipstream.compress.quantize.qat import Trained, rate, share_done
from slipstream.compress.quantize.rounding import nearest
from slipstream.compress.recipe import QAT, parse
from slipstream.compress.run import compress
from slipstream.errors import ConfigError
from slipstream.model.load.weights import load_parameters
from slipstream.spec.description import read_spec
from slipstream.spec.scheme import WeightFormat
from tests.compress.test_quantize import SIZES, WINDOWS
from tests.model.harness import load, run
from tests.support import tiny_models

CPU = torch.device("cpu")


@pytest.mark.parametrize("symmetric", [True, False])
def test_training_begins_at_what_was_written(symmetric):
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    made = nearest(
        weight, WeightFormat(bits=3, group_size=32, symmetric=symmetric), torch.bfloat16, clip=True
    )
    own = Trained.of(made.dequantized(), made.grid)
    torch.testing.assert_close(own.dequantized(), made.dequantized())
    assert torch.equal(own.rounded().codes, made.codes)
    own.dequantized().square().sum().backward()
    assert own.weight.grad.abs().sum() > 0
    assert (
        own.step.grad.abs().sum() == 0
    )  # on the grid, nothing cut off: a step too long is as wrong as one too short
    with torch.no_grad():
        own.weight += 0.3
        own.step += 0.2
    torch.testing.assert_close(own.dequantized(), own.rounded().dequantized())
    own.dequantized().square().sum().backward()
    assert own.step.grad.abs().sum() > 0


def test_the_rate_rises_and_falls():
    rates = [rate(i / 40, QAT(num_steps=40, warmup=0.1)) for i in range(40)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0 < rates[-1] < 0.01
    assert rate(3.9 / 40, QAT(num_steps=40, warmup=0.1)) == 1.0  # between steps, by minutes


def test_training_ends_at_the_steps_or_the_minutes_whichever_come_first():
    settings = QAT(num_steps=4, minutes=2.0)
    assert share_done(4, 1.0, settings) == 1.0
    assert share_done(1, 120.0, settings) == 1.0
    assert share_done(1, 60.0, settings) == 0.5
    assert share_done(3, 1e9, QAT(num_steps=4)) == 0.75


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_much_of_what_rounding_lost_comes_back(tmp_path, family):
    """The loss is measured on the training text, with a tiny random model in 3 bits."""
    tiny_models.write(tmp_path / "model", family, **(SIZES if family == "llama" else {}))
    source = read_spec(tmp_path / "model")
    exact = run(load(tmp_path / "model"), WINDOWS[0]).log_softmax(-1)
    kl = {}
    for name, more in (
        ("plain", []),
        ("trained", [{"qat": {"num_steps": 40, "step_tokens": 48, "learning_rate": 3e-3}}]),
    ):
        recipe = parse([{"quantize": {"bits": 3, "group_size": 32, "rounding": "gptq"}}, *more])
        compress(
            source, recipe, tmp_path / name, windows=WINDOWS[:2], device=CPU, dtype=torch.float32
        )
        found = run(load(tmp_path / name), WINDOWS[0]).log_softmax(-1)
        kl[name] = float((exact.exp() * (exact - found)).sum(-1).mean())
    assert kl["trained"] < 0.65 * kl["plain"]


@pytest.mark.parametrize(
    ("quantize", "steps"),
    [
        ({"bits": 8, "kind": "float", "inputs": "fp8"}, {"num_steps": 20, "learning_rate": 2e-4}),
        ({"bits": 8, "inputs": "int8"}, {"num_steps": 40, "learning_rate": 1e-4}),
    ],
)
def test_rounded_inputs_are_trained_with(tmp_path, quantize, steps):
    """Training computes what the engine computes, in both formats: the divergence falls and the
    format stays."""
    tiny_models.write(tmp_path / "model", "llama", **SIZES)
    source = read_spec(tmp_path / "model")
    exact = run(load(tmp_path / "model"), WINDOWS[0]).log_softmax(-1)
    kl = {}
    for name, more in (("plain", []), ("trained", [{"qat": {"step_tokens": 48, **steps}}])):
        recipe = parse([{"quantize": quantize}, *more])
        compress(
            source, recipe, tmp_path / name, windows=WINDOWS[:2], device=CPU, dtype=torch.float32
        )
        found = run(load(tmp_path / name), WINDOWS[0]).log_softmax(-1)
        kl[name] = float((exact.exp() * (exact - found)).sum(-1).mean())
    assert kl["trained"] < 0.8 * kl["plain"]


def _trained(source, grids, values, settings):
    layers = [
        {n: v for n, v in values.items() if n.startswith(f"layers.{i}.")}
        for i in range(source.spec.num_layers)
    ]
    inputs = [{} for _ in layers]
    return qat_module.train(
        source, layers, grids, WINDOWS[:2], settings, inputs=inputs, device=CPU, dtype=torch.float32
    )


@pytest.fixture
def begun(tmp_path):
    """(description, grids, values) of a tiny model whose MLPs have 3 bits."""
    tiny_models.write(tmp_path / "model", "llama", **SIZES)
    source = read_spec(tmp_path / "model")
    values = load_parameters(source, dtype=torch.float32, device=CPU)
    made = {
        n: nearest(v, WeightFormat(bits=3, group_size=32), torch.float32, clip=True)
        for n, v in values.items()
        if ".mlp." in n
    }
    return (
        source,
        {n: r.grid for n, r in made.items()},
        {**values, **{n: r.dequantized() for n, r in made.items()}},
    )


def test_logits_a_few_rows_at_a_time_give_the_same(begun, monkeypatch):
    source, grids, values = begun
    settings = QAT(num_steps=3, step_tokens=48, learning_rate=3e-3)
    whole = _trained(source, grids, values, settings)
    monkeypatch.setattr(qat_module, "LOGITS_BYTES", 4 * source.spec.vocab_size * 5)
    parts = _trained(source, grids, values, settings)
    for n in whole:  # but for single scales whose gradient is next to nothing, which Adam makes as long as the others
        a, b = whole[n].dequantized(), parts[n].dequantized()
        assert float((a - b).abs().mean() / a.abs().mean()) < 2e-4


@pytest.mark.parametrize(("room", "times"), [(2**30, 1), (1, 3)])
def test_a_window_goes_through_the_original_once_if_there_is_room(begun, monkeypatch, room, times):
    source, grids, values = begun
    built = []
    original = qat_module.build_layer
    monkeypatch.setattr(
        qat_module,
        "build_layer",
        lambda *args: built.append(torch.is_grad_enabled()) or original(*args),
    )
    monkeypatch.setattr(qat_module, "HELD_BYTES", room)
    made = _trained(source, grids, values, QAT(num_steps=3, step_tokens=96, learning_rate=3e-3))
    assert built.count(False) == times * source.spec.num_layers
    monkeypatch.undo()
    again = _trained(source, grids, values, QAT(num_steps=3, step_tokens=96, learning_rate=3e-3))
    assert all(torch.equal(made[n].codes, again[n].codes) for n in made)


def test_a_loss_that_is_no_number_names_the_rate(begun):
    source, grids, values = begun
    values = {
        **values,
        "layers.0.attention.out.weight": values["layers.0.attention.out.weight"] * float("nan"),
    }
    with pytest.raises(ConfigError, match="lower learning_rate"):
        _trained(source, grids, values, QAT(num_steps=2, step_tokens=48))


def test_training_has_windows_of_its_own(tmp_path, monkeypatch):
    """Rounding calibrates on the first, training learns from all of them."""
    tiny_models.write(tmp_path / "model", "llama", **SIZES)
    met = {}
    original, learning = run_module.Stream, run_module.train

    def stream(source, windows, **more):
        met["calibration"] = len(windows)
        return original(source, windows, **more)

    def training(source, values, grids, windows, *args, **more):
        met["training"] = len(windows)
        return learning(source, values, grids, windows, *args, **more)

    monkeypatch.setattr(run_module, "Stream", stream)
    monkeypatch.setattr(run_module, "train", training)
    steps = [
        {"calibrate": {"num_windows": 1}},
        "quantize",
        {"qat": {"num_windows": 2, "num_steps": 1}},
    ]
    recipe = parse(steps)
    assert recipe.num_windows == 2
    compress(
        read_spec(tmp_path / "model"),
        recipe,
        tmp_path / "out",
        windows=WINDOWS,
        device=CPU,
        dtype=torch.float32,
    )
    assert met == {"calibration": 1, "training": 2}


def test_what_it_can_not_train_is_refused():
    whole = {
        "bits": 8,
        "kind": "float",
        "inputs": "fp8",
        "group_size": "tensor",
        "static_inputs": True,
    }
    few = [{"calibrate": {"num_windows": 8}}, "quantize", {"qat": {"num_windows": 4}}]
    for steps in (["qat", "kv_cache"], [{"quantize": whole}, "qat"], few):
        with pytest.raises(ConfigError) as caught:
            parse(steps)
        assert caught.value.field == "qat"
