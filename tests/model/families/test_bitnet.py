"""BitNet's checkpoints: packed weights and masters, against transformers' own products of −1, 0 and 1."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights

from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.kernels.select import select_ops
from slipstream.model.load.loader import load_model
from slipstream.spec.description import read_spec
from slipstream.spec.scheme import SCHEMES
from tests.model.harness import CPU, greedy, load, run
from tests.support import tiny_models

TOKENS = [7, 31, 250, 12, 99, 4, 180, 66, 5, 201, 77, 140]
KINDS = {
    "masters": ("autobitlinear", "online"),
    "packed": ("autobitlinear", "offline"),
    "packed-inverse": ("bitlinear", "offline"),
}


def write(folder, kind):
    """Write a tiny checkpoint of a kind. Returns transformers' model with its products of that kind."""
    model = tiny_models.build(folder, "bitnet", hidden_size=64, intermediate_size=96)
    tensors, (linear_class, mode) = load_file(folder / "model.safetensors"), KINDS[kind]
    for name, old in [*model.named_modules()]:
        if not name.endswith("_proj"):
            continue
        weight = old.weight.data
        size = dict(in_features=old.in_features, out_features=old.out_features, bias=False)
        scale = weight.abs().mean()
        codes = (weight / scale).round().clamp(-1, 1)
        if kind == "packed-inverse":
            new = BitLinear(**size, dtype=torch.float32)
            new.weight, new.weight_scale = pack_weights(codes.clone()), 1 / scale.reshape(1)
        else:
            new = AutoBitLinear(**size, online_quant=kind == "masters", dtype=torch.float32)
            new.weight = torch.nn.Parameter(weight if kind == "masters" else codes)
            if kind == "packed":
                new.weight_scale = scale.reshape(1)
        model.set_submodule(name, new)
        if kind != "masters":
            tensors[f"{name}.weight"] = pack_weights(codes.clone())
            tensors[f"{name}.weight_scale"] = new.weight_scale.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitnet",
        "linear_class": linear_class,
        "quantization_mode": mode,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = write(folder, request.param)
    torch.compiler.set_stance("force_eager")  # its products are compiled otherwise
    try:
        with torch.no_grad():
            logits = model(torch.tensor([TOKENS])).logits[0]
            answer = model.generate(
                torch.tensor([TOKENS]),
                max_new_tokens=8,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
    finally:
        torch.compiler.set_stance("default")
    return folder, logits, answer[0, len(TOKENS) :].tolist()


@pytest.mark.parametrize("chunks", [(), (3, 1, 8), (1,)], ids=str)
def test_logits_equal_transformers(case, chunks):
    folder, logits, _ = case
    ours = run(load(folder), TOKENS, chunks, 4)
    assert (ours - logits).abs().max() <= 1e-4 * logits.abs().max()


def test_greedy_tokens_equal_transformers(case):
    folder, _, answer = case
    assert greedy(load(folder), TOKENS, 8) == answer


def test_a_cpu_multiplies_by_the_same_numbers(case, tmp_path):
    """Compares with those numbers rounded at load: a CPU's inputs have finer scales than
    transformers'."""
    folder, _, _ = case
    tiny_models.build(tmp_path, "bitnet", hidden_size=64, intermediate_size=96)
    dense = load_file(tmp_path / "model.safetensors")
    for name in (n for n in dense if n.endswith("_proj.weight")):
        scale = dense[name].abs().mean()
        dense[name] = (dense[name] / scale).round().clamp(-1, 1) * scale
    save_file(dense, tmp_path / "model.safetensors", metadata={"format": "pt"})
    rounded = load_model(
        tmp_path,
        ops=select_ops(CPU, "cpu"),
        device=CPU,
        dtype=torch.float32,
        scheme=SCHEMES["int8"],
    )
    theirs = run(rounded, TOKENS, (), 4)
    for chunks in ((), (3, 1, 8), (1,)):
        ours = run(load(folder, kernels="cpu"), TOKENS, chunks, 4)
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_rms_norm", True),
        ("linear_class", "other"),
        ("quantization_mode", "other"),
        ("modules_to_not_convert", ["o_proj"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, field, value):
    write(tmp_path, "packed")
    edit(tmp_path, **{field: value})
    with pytest.raises(UnsupportedModelError) as refused:
        read_spec(tmp_path)
    assert refused.value.field == f"quantization_config.{field}"


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_codes_that_stand_for_no_number_are_refused_by_name(tmp_path, kernels):
    write(tmp_path, "packed")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = 0xFF
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path, kernels=kernels)
    assert refused.value.field == name
