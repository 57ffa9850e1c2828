"""Activations and norms from outside: those of docs/adding-a-model.md, and whole models with functions that do what the
kernels do."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from slipstream.errors import UnsupportedModelError
from slipstream.kernels.cpu.ops import CpuOps, NativeOps
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from slipstream.model.load import loader
from slipstream.spec.model import OwnActivation, OwnNorm, SequentialBlock
from tests.model.harness import CPU, run
from tests.support import tiny_models

ROOT = Path(__file__).parents[2]
ALL = [ReferenceOps(), CpuOps(), NativeOps(), TritonOps()]
TOKENS = [5, 9, 200, 31, 7, 44, 45, 46]


@triton.jit
def gated_triton(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def plain_triton(x):
    return tl.maximum(x, 0.0)


@pytest.fixture(scope="module")
def guide(tmp_path_factory):
    """The module that the guide shows."""
    text = (ROOT / "docs" / "adding-a-model.md").read_text("utf-8")
    (code,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if "OwnActivation" in block
    )
    path = tmp_path_factory.mktemp("guide") / "own_functions.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("own_functions", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("ops", ALL, ids=lambda o: o.name)
def test_the_guides_activation(guide, ops):
    x = torch.randn(5, 2 * 37)
    expected = F.relu(x[:, :37]).square() * x[:, 37:]
    torch.testing.assert_close(ops.activation(x, guide.REGLU_SQUARED, gated=True), expected)
    if ops.name in ("reference", "triton"):
        q = ops.activation(x, guide.REGLU_SQUARED, gated=True, inputs="int8")
        assert (q.values.float() * q.scales - expected).abs().max() <= q.scales.max() * 0.51


@pytest.mark.parametrize("ops", ALL, ids=lambda o: o.name)
@pytest.mark.parametrize(("family", "gated"), [("llama", True), ("gpt_neox", False)])
def test_a_model_with_functions(monkeypatch, tmp_path, ops, family, gated):
    """Logits equal transformers', which computes the model with the same activation and norm."""
    function = (lambda gate, up: F.silu(gate) * up) if gated else F.relu
    act = OwnActivation(
        name="mine", function=function, triton=gated_triton if gated else plain_triton
    )
    rms = OwnNorm(
        name="mine", function=lambda x, w, b, eps: F.rms_norm(x, x.shape[-1:], w.float(), eps)
    )
    layer = OwnNorm(
        name="mine",
        function=lambda x, w, b, eps: F.layer_norm(x, x.shape[-1:], w.float(), b.float(), eps),
    )

    def with_functions(path):
        description = read(path)
        norm = dataclasses.replace(description.spec.final_norm, kind=rms if gated else layer)
        block = SequentialBlock(pre_attention=norm, pre_mlp=norm)
        layers = [
            dataclasses.replace(x, mlp=dataclasses.replace(x.mlp, activation=act), block=block)
            for x in description.spec.layers
        ]
        spec = dataclasses.replace(description.spec, layers=tuple(layers), final_norm=norm)
        return dataclasses.replace(description, spec=spec)

    more = {} if gated else {"use_parallel_residual": False, "hidden_act": "relu"}
    theirs, read = tiny_models.build(tmp_path, family, **more), loader.read_spec
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    monkeypatch.setattr(loader, "read_spec", with_functions)
    ours = run(
        loader.load_model(tmp_path, ops=ops, device=CPU, dtype=torch.float32), TOKENS, (5, 1, 2)
    )
    assert (ours - expected).abs().max() / expected.abs().max() < 1e-4


def test_a_gpu_wants_a_triton_function():
    with pytest.raises(UnsupportedModelError, match="Triton function"):
        TritonOps().activation(torch.randn(2, 8), OwnActivation(name="mine", function=F.relu))
