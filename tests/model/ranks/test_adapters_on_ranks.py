"""Adapters of a model that is split over ranks give what they give on one device, in float32: every family, by tensor and by
expert parallelism, and over stages."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import AdapterError
from slipstream.model.adapters import AdapterLayout
from slipstream.model.layers import layer
from slipstream.spec.adapters import WEIGHTS_NAME
from slipstream.spec.parallel import Shard
from tests.model.harness import load, run
from tests.model.ranks.parallel_ranks import on_ranks, on_stages
from tests.model.ranks.test_parallel import UNEVEN, close
from tests.model.test_adapters import TOKENS, adapted, difference, layout_of
from tests.support import adapters, tiny_models

RANK = 8


def with_adapter(folder):
    """Logits of a rank with the adapter of `folder` on every token."""

    def work(model):
        shard = model.decoder.partition.shard
        return run(
            adapted(
                model, AdapterLayout(model.description, model.decoder, RANK, shard), folder / "lora"
            ),
            TOKENS,
        )

    return work


def build(folder, family, **sizes):
    """A base and an adapter of all modules; the logits of one device."""
    hf = tiny_models.build(folder / "base", family, **sizes)
    some = adapters.targets(hf)[0].rpartition(".")[2]
    adapters.write(hf, folder / "lora", rank_pattern={some: 7}, alpha_pattern={some: 3})
    without, model = run(load(folder / "base"), TOKENS), load(folder / "base")
    found = run(adapted(model, layout_of(model, RANK), folder / "lora"), TOKENS)
    assert difference(found, without) > 1e-2
    return found


@pytest.mark.parametrize(
    "family",
    [
        f
        for f in tiny_models.FAMILIES
        if f not in ("sarvam_moe", "deepseek_v4", "bitnet", "diffllama")
    ],
)
def test_every_family_in_two(tmp_path, family):
    wanted = build(tmp_path, family)
    for found in on_ranks(tmp_path / "base", with_adapter(tmp_path)):
        close(found, wanted)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("tensor", [True, False])
def test_beside_experts_that_are_dealt_out(tmp_path, family, tensor):
    wanted = build(tmp_path, family)
    for found in on_ranks(tmp_path / "base", with_adapter(tmp_path), tensor=tensor, experts=True):
        close(found, wanted)


def test_beside_tokens_that_are_shared_out_and_sums_in_pieces(tmp_path, monkeypatch):
    """Adapters look at a step's tokens by their places, so sums wait for all of them."""
    monkeypatch.setattr(layer, "SEQUENCE_TOKENS", 4)
    wanted = build(tmp_path, "llama")
    for how in ({"sequence": True}, {"piece": 3}):
        for found in on_ranks(tmp_path / "base", with_adapter(tmp_path), **how):
            close(found, wanted)


@pytest.mark.parametrize("family", UNEVEN)
def test_what_does_not_divide(tmp_path, family):
    sizes, size, _ = UNEVEN[family]
    if "-" in family:
        pytest.skip("its config is tests/model/ranks/test_parallel's own")
    wanted = build(tmp_path, family, **sizes)
    for found in on_ranks(tmp_path / "base", with_adapter(tmp_path), size=size):
        close(found, wanted)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_adapters_over_stages_give_the_whole_models_logits(tmp_path, family):
    wanted = build(tmp_path, family)
    rest = load(tmp_path / "base").spec.num_layers - 1
    close(on_stages(tmp_path / "base", with_adapter(tmp_path), (1, rest)), wanted)


def test_a_rank_refuses_what_another_has(tmp_path):
    """A tensor of another rank's, or of another stage's, is checked all the same."""
    build(tmp_path, "llama")
    path = tmp_path / "lora" / WEIGHTS_NAME
    tensors = load_file(path)
    last = next(name for name in tensors if "layers.1.mlp.down_proj.lora_B" in name)
    save_file({**tensors, last: torch.zeros(3, 3)}, path)
    model = load(tmp_path / "base")
    model.decoder.take_layers(model.decoder.layers[:1])
    model.decoder.spec = dataclasses.replace(model.spec, stage=(0, 1))
    layout = AdapterLayout(
        model.description, model.decoder, RANK, Shard(0, 1, tensor=False, layers=(0, 1))
    )
    assert {name.split(".")[1] for name in layout.places} == {"0"}
    with pytest.raises(AdapterError, match=r"layers\.1\.mlp\.down_proj.*shape \[3, 3\]"):
        layout.read(tmp_path / "lora", torch.float32)


def test_all_ranks_know_the_same_parts(tmp_path):
    """A rank whose heads are all zeros knows them, too: graphs are captured anew when a part is
    new, and ranks that don't capture at the same time wait for each other for ever."""
    hf = tiny_models.build(
        tmp_path / "base", "llama", hidden_size=72, num_attention_heads=9, num_key_value_heads=3
    )
    adapters.write(
        hf, tmp_path / "lora", modules=["layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj"]
    )

    def parts(model):
        layout = AdapterLayout(
            model.description, model.decoder, RANK, model.decoder.partition.shard
        )
        return "layers.1.attention.qkv.weight" in layout.places, layout.read(
            tmp_path / "lora", torch.float32
        ).parts

    wanted = frozenset({("attention.qkv", 0), ("attention.qkv", 2)})
    assert on_ranks(tmp_path / "base", parts, size=4) == [(True, wanted)] * 3 + [(False, wanted)]


def test_an_adapter_without_anything_for_a_stage(tmp_path):
    hf = tiny_models.build(tmp_path / "base", "llama")
    adapters.write(hf, tmp_path / "lora", modules=["layers.1.mlp.down_proj"])
    model = load(tmp_path / "base")
    wanted = run(adapted(model, layout_of(model, RANK), tmp_path / "lora"), TOKENS)
    close(
        on_stages(tmp_path / "base", with_adapter(tmp_path), (1, model.spec.num_layers - 1)), wanted
    )
