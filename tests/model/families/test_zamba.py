"""Zamba 2's shared transformers: what stands in a checkpoint, and what is refused by name. The rest: `test_families.py`."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import AdapterError, CheckpointError, UnsupportedModelError
from slipstream.model.adapters import AdapterLayout
from slipstream.model.load.weights import load_parameters
from slipstream.spec.description import read_spec
from tests.model.families.test_families import TOKENS
from tests.model.harness import load, run
from tests.support import adapters, tiny_models

SHARED = "model.layers.1.shared_transformer."
"""The transformer of layers 1 and 3. Layer 2's is another."""


def read(path):
    return load_parameters(read_spec(path), dtype=torch.float32, device=torch.device("cpu"))


def edit(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_each_layer_has_its_own_sum_of_a_shared_weight_and_its_adapter(tmp_path):
    tiny_models.write(tmp_path, "zamba2")
    stored, found = load_file(tmp_path / "model.safetensors"), read(tmp_path)
    base = stored[f"{SHARED}feed_forward.gate_up_proj.weight"]
    for n, layer in ((0, 1), (2, 3)):
        adapter = f"{SHARED}feed_forward.gate_up_proj_adapter_list.{n}"
        own = stored[f"{adapter}.1.weight"] @ stored[f"{adapter}.0.weight"]
        torch.testing.assert_close(found[f"layers.{layer}.mlp.up.weight"], base + own)
    torch.testing.assert_close(
        found["layers.1.mlp.down.weight"], found["layers.3.mlp.down.weight"], rtol=0, atol=0
    )


def test_steps_of_time_have_the_configs_minimum_also_token_by_token(tmp_path):
    """transformers clamps them in a prompt alone."""
    theirs = tiny_models.build(tmp_path, "zamba2", time_step_min=0.7)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    for chunks in ((), (1,)):
        found = run(load(tmp_path), TOKENS, chunks)
        assert ((found - expected).abs().max() / expected.abs().max()).item() <= 1e-4


def test_copies_that_a_writer_left_for_other_layers_are_not_read(tmp_path):
    tiny_models.write(tmp_path, "zamba2")
    before = read(tmp_path)

    def copy(tensors):
        for name in [name for name in tensors if name.startswith(SHARED)]:
            tensors[name.replace("layers.1.", "layers.3.")] = tensors[name] + 1

    edit(tmp_path, copy)
    for name, value in read(tmp_path).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    "part", ["self_attn.q_proj", "self_attn.linear_k_adapter_list.2.1", "pre_ff_layernorm"]
)
def test_a_missing_part_is_named(part, tmp_path):
    tiny_models.write(tmp_path, "zamba2")
    name = f"{SHARED}{part}.weight"
    edit(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match="lacks") as refused:
        read(tmp_path)
    assert refused.value.field == name


def test_an_adapter_of_another_rank_in_its_two_halves_is_named(tmp_path):
    tiny_models.write(tmp_path, "zamba2")
    name = f"{SHARED}feed_forward.gate_up_proj_adapter_list.0.1.weight"
    edit(tmp_path, lambda tensors: tensors.update({name: tensors[name][:, :2].contiguous()}))
    with pytest.raises(CheckpointError, match="no adapter") as refused:
        read(tmp_path)
    assert refused.value.field == name


def test_adapters_of_a_shared_module_are_refused(tmp_path):
    hf = tiny_models.build(tmp_path / "base", "zamba2")
    adapters.write(hf, tmp_path / "lora", modules=["o_proj"])
    model = load(tmp_path / "base")
    layout = AdapterLayout(model.description, model.decoder, 8)
    with pytest.raises(AdapterError, match="layers share this module"):
        layout.read(tmp_path / "lora", torch.float32)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"use_long_context": True}, "use_long_context"),
        ({"add_bias_linear": True}, "add_bias_linear"),
        ({"hybrid_layer_ids": [1]}, "hybrid_layer_ids"),
        ({"layers_block_type": ["linear_attention"] * 4}, "layers_block_type"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "quantization_config",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(changes, field, tmp_path):
    tiny_models.write(tmp_path, "zamba2")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(UnsupportedModelError) as refused:
        read_spec(tmp_path)
    assert refused.value.field == field
