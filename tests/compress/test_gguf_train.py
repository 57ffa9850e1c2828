"""Training of a GGUF file: it begins at what was written, lowers the divergence, and the file holds what it learned."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch

from slipstream.compress.gguf import train as train_module
from slipstream.compress.gguf.blocks import WRITABLE, round_blocks
from slipstream.compress.gguf.mix import PlannedBlocks
from slipstream.compress.gguf.train import TrainedBlocks
from slipstream.compress.planning import plan
from slipstream.compress.recipe import parse
from slipstream.compress.run import compress
from slipstream.errors import ConfigError
from slipstream.spec.description import read_spec
from tests.model.harness import load, run
from tests.support import tiny_models

CPU = torch.device("cpu")
WINDOWS = [list(range(3 + i, 67 + i)) for i in range(4)]
RECIPE = [{"gguf": {"type": "Q2_K"}}, {"qat": {"num_steps": 30, "step_tokens": 256}}]


def learning(rate, **more):
    return [RECIPE[0], {"qat": {**RECIPE[1]["qat"], "learning_rate": rate, **more}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_models.write_with_tokenizer(
        folder,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        head_dim=16,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    return folder


def values(blocks, kind):
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def made(model, out, recipe, windows=WINDOWS):
    compress(read_spec(model), parse(recipe), out, windows=windows, device=CPU, dtype=torch.float32)
    return out / f"{out.name}.gguf"


@pytest.mark.parametrize("kind", sorted(WRITABLE))
def test_training_begins_at_the_file_and_the_file_holds_its_end(kind):
    weight = torch.randn(6, 512, generator=torch.Generator().manual_seed(0)) * 0.1
    weight[0, :256] = 0
    parts = [round_blocks(w, kind, None, damping=None) for w in weight.split(3)]
    tensors = [PlannedBlocks(name=name, type=kind, shape=(3, 512)) for name in "ab"]
    own = TrainedBlocks.of(
        kind, tensors, [torch.from_numpy(b) for b, _ in parts], list(weight.split(3))
    )
    near = dict(rtol=1e-5, atol=1e-7)  # of float32 sums
    torch.testing.assert_close(own.rounded().detach(), torch.cat([v for _, v in parts]), **near)
    for (blocks, _), again in zip(parts, own.packed().values(), strict=True):
        np.testing.assert_array_equal(values(again, kind), values(blocks, kind))
    own.rounded().square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in own.parameters[:1])
    with torch.no_grad():
        for p in own.parameters:
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    expected = torch.from_numpy(values(np.concatenate(list(own.packed().values())), kind))
    torch.testing.assert_close(own.rounded().detach(), expected, **near)


def test_much_of_what_rounding_lost_comes_back(model, tmp_path):
    exact = run(load(model), WINDOWS[0]).log_softmax(-1)
    kl = {}
    for name, recipe in {"rounded": RECIPE[:1], "trained": learning(3e-3)}.items():
        found = run(load(made(model, tmp_path / name, recipe)), WINDOWS[0]).log_softmax(-1)
        kl[name] = float((exact.exp() * (exact - found)).sum(-1).mean())
    assert kl["trained"] < 0.6 * kl["rounded"]
    receipt = json.loads((tmp_path / "trained" / "slipstream-training.json").read_text())
    assert receipt["num_steps"] == len(receipt["losses"]) == 30
    assert receipt["num_tokens"] == 30 * 256
    assert receipt["settings"]["learning_rate"] == 3e-3
    assert not (tmp_path / "rounded" / "slipstream-training.json").exists()


def test_training_ends_with_its_minutes_and_is_not_repeated(model, tmp_path, monkeypatch):
    real, calls = train_module.share_done, []
    monkeypatch.setattr(
        train_module, "share_done", lambda n, seconds, s: calls.append(n) or real(n, 30.0 * n, s)
    )

    def stop(folder):
        raise KeyboardInterrupt

    how = dict(windows=WINDOWS, device=CPU, dtype=torch.float32)
    recipe = parse(learning(1e-3, minutes=1.0))
    with pytest.raises(KeyboardInterrupt):
        compress(read_spec(model), recipe, tmp_path / "out", finish=stop, **how)
    assert calls == [1, 2]
    compress(read_spec(model), recipe, tmp_path / "out", **how)
    assert calls == [1, 2]
    receipt = json.loads((tmp_path / "out" / "slipstream-training.json").read_text())
    assert receipt["num_steps"] == 2


def test_what_can_not_be_trained_is_refused_by_name(model, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="F16 rounds none"):
        plan(read_spec(model), parse([{"gguf": {"type": "F16"}}, "qat"]))
    with pytest.raises(ConfigError, match="gguf, qat"):
        parse(["qat", {"gguf": {"type": "Q4_0"}}])
    with pytest.raises(ConfigError, match="above 0"):
        parse(learning(1e-3, minutes=0.0))
    nan = torch.tensor(float("nan"))
    monkeypatch.setattr(train_module, "divergence", lambda ours, theirs: (nan, ours))
    with pytest.raises(ConfigError, match="lower learning_rate"):
        made(model, tmp_path / "out", learning(1e-3))
