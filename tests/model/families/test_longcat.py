"""LongCat Flash: experts that return their input, and a mixture whose output skips a layer."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import UnsupportedModelError
from slipstream.spec.description import read_spec
from slipstream.spec.model import MoESpec
from slipstream.spec.parallel import Shard, split_spec
from tests.model.harness import load, run
from tests.support import tiny_models

TOKENS = list(range(5, 30))


def test_weights_of_identity_experts_are_not_read(tmp_path):
    """transformers saves them, published checkpoints lack them."""
    tiny_models.write(tmp_path, "longcat_flash")
    wanted = run(load(tmp_path), TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    some = tensors["model.layers.0.mlp.experts.7.gate_proj.weight"]
    for layer in range(2):
        for expert in range(8, 12):
            for part in ("gate", "up"):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                tensors[name] = torch.zeros_like(some)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(run(load(tmp_path), TOKENS), wanted)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("zero_expert_type", "drop"),
        ("zero_expert_num", -1),
        ("router_bias", True),
        ("mla_scale_q_lora", False),
        ("attention_method", "MHA"),
        ("num_hidden_layers", 3),
    ],
)
def test_a_config_that_computes_something_else_is_refused_by_name(tmp_path, field, value):
    tiny_models.write(tmp_path, "longcat_flash")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == field


@pytest.mark.parametrize("tensor", [False, True])
def test_one_rank_adds_the_part_of_identity_experts(tmp_path, tensor):
    tiny_models.write(tmp_path, "longcat_flash")
    spec = read_spec(tmp_path).spec
    split = [split_spec(spec, Shard(rank, 2, tensor=tensor, experts=not tensor)) for rank in (0, 1)]
    mixtures = [own.layers[0].mlp for own in split]
    assert [isinstance(m, MoESpec) and m.adds_identity for m in mixtures] == [True, False]
