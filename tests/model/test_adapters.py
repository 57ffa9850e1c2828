"""Adapters against transformers with PEFT in float32, on tiny random models of every family."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import AdapterError
from slipstream.kernels.weights.adapters import AdapterOps, tokens_of
from slipstream.model.adapters import AdapterLayout
from slipstream.spec.adapters import CONFIG_NAME, WEIGHTS_NAME
from tests.model.harness import load, run
from tests.support import adapters, tiny_models

CPU = torch.device("cpu")
TOKENS = [5, 9, 200, 31, 7, 250, 11, 90, 3, 4, 77]


def layout_of(model, rank=8):
    return AdapterLayout(model.description, model.decoder, rank)


def adapted(model, layout, folder):
    """The model with the adapter of `folder` on every token of TOKENS."""
    slots = torch.full((2, layout.slot_size), float("nan"))
    read = layout.read(folder, torch.float32)
    read.copy_to(slots[1])
    found = {id(p.linear): layout.weights(slots, p, read.parts) for p in layout.places.values()}
    weights = {key: w for key, w in found.items() if w.live}
    ops = AdapterOps(model.decoder.ops, weights, tokens_of([1] * len(TOKENS), CPU))
    return dataclasses.replace(model, decoder=model.decoder.with_ops(ops))


def difference(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


# transformers divides a product of Sarvam MoE's, and has modules of DeepSeek V4 under other names than its files: such
# adapters are refused.
@pytest.mark.parametrize(
    "family", [f for f in tiny_models.FAMILIES if f not in ("sarvam_moe", "deepseek_v4")]
)
def test_adapters_of_every_family_equal_pefts(family, tmp_path):
    """All modules that can have an adapter, of two ranks, with two scales. A recurrence collects the errors of its tokens."""
    near = 1e-4 if family in tiny_models.RECURRENT else 1e-5
    hf = tiny_models.build(tmp_path / "base", family)
    with torch.inference_mode():
        without = hf(torch.tensor([TOKENS])).logits[0]
    some = adapters.targets(hf)[0].rpartition(".")[2]
    peft = adapters.write(hf, tmp_path / "lora", rank_pattern={some: 7}, alpha_pattern={some: 3})
    with torch.inference_mode():
        expected = peft(torch.tensor([TOKENS])).logits[0]
    assert difference(without, expected) > 1e-2
    model = load(tmp_path / "base")
    assert (
        difference(run(adapted(model, layout_of(model), tmp_path / "lora"), TOKENS), expected)
        < near
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    hf = tiny_models.build(folder / "base")
    peft = adapters.write(hf, folder / "lora")
    return folder, peft


@pytest.fixture
def broken(llama, tmp_path):
    """A copy of the adapter, to be spoilt."""
    return shutil.copytree(llama[0] / "lora", tmp_path / "lora")


@pytest.fixture(scope="module")
def layout(llama):
    return layout_of(load(llama[0] / "base"))


def edit_config(folder, **values):
    path = folder / CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_NAME)


def refused(layout, folder, *parts):
    with pytest.raises(AdapterError) as caught:
        layout.read(folder, torch.float32)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_the_host_keeps_no_gaps(llama, layout, tmp_path):
    """Two modules take their own numbers, and what follows each other in a slot is one copy."""
    hf = tiny_models.build(tmp_path / "base")
    adapters.write(hf, tmp_path / "lora", modules=["q_proj", "v_proj"])
    read, whole = (
        layout.read(folder, torch.float32) for folder in (tmp_path / "lora", llama[0] / "lora")
    )
    assert len(read.numbers) == sum(s.stop - s.start for s in read.spans) < len(whole.numbers) / 2
    assert all(a.stop < b.start for a, b in zip(read.spans, read.spans[1:], strict=False))
    slot = torch.full((layout.slot_size,), float("nan"))
    read.copy_to(slot)
    assert slot.isfinite().all()
    assert slot.count_nonzero() == read.numbers.count_nonzero()


def test_rslora_scales_by_the_root_of_the_rank(llama, tmp_path):
    hf = tiny_models.build(tmp_path / "base")
    peft = adapters.write(hf, tmp_path / "lora", use_rslora=True, modules=["q_proj", "up_proj"])
    model = load(tmp_path / "base")
    with torch.inference_mode():
        expected = peft(torch.tensor([TOKENS])).logits[0]
    assert (
        difference(run(adapted(model, layout_of(model), tmp_path / "lora"), TOKENS), expected)
        < 1e-5
    )


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"peft_type": None}, "peft_type"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"something_new": 3}, "something_new"),
        ({"r": 9}, "rank 9"),
        ({"r": -1}, "r = -1"),
        ({"rank_pattern": {"q_proj": 64}}, "rank 64"),
        ({"rank_pattern": {"(a+)+b": 4}}, "rank_pattern"),
        ({"rank_pattern": {".*" * 60 + "X": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q?" * 30 + "q" * 30: 4}}, "alpha_pattern"),
        ({"alpha_pattern": {"(": 4}}, "alpha_pattern"),
        ({"r": 3}, "rank 3"),
        ({"lora_alpha": "much"}, "lora_alpha"),
    ],
)
def test_configs_that_are_refused(layout, broken, values, named):
    edit_config(broken, **values)
    refused(layout, broken, named)


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def test_tensors_that_are_refused(layout, broken, llama):
    def spoil(change, *parts):
        shutil.copyfile(llama[0] / "lora" / WEIGHTS_NAME, broken / WEIGHTS_NAME)
        edit_tensors(broken, change)
        refused(layout, broken, *parts)

    def rename(old, new):
        def change(tensors):
            tensors[new] = tensors.pop(old)

        return change

    spoil(
        lambda t: t.update({KEY.format("A"): torch.zeros(4, 31)}),
        KEY.format("A"),
        "[4, 31]",
        "another base model",
    )
    spoil(lambda t: t.update({KEY.format("B"): torch.zeros(32, 5)}), KEY.format("B"))
    spoil(lambda t: t[KEY.format("B")].fill_(float("nan")), "not finite")
    spoil(lambda t: t[KEY.format("A")][0, 0].fill_(float("inf")), "not finite")
    spoil(lambda t: t.pop(KEY.format("A")), "lacks its lora_A")
    spoil(
        rename(KEY.format("A"), KEY.format("A").replace("layers.0", "layers.7")),
        "layers.7",
        "another base model",
    )
    spoil(rename(KEY.format("A"), "base_model.model.lm_head.lora_A.weight"), "output head")
    spoil(
        rename(KEY.format("A"), "base_model.model.model.embed_tokens.lora_A.weight"), "embeddings"
    )
    spoil(
        rename(KEY.format("A"), KEY.format("A").replace("lora_A.weight", "lora_magnitude_vector")),
        "lora_magnitude_vector",
    )
    spoil(lambda t: t.clear(), "no tensors")


def test_files_that_are_refused(layout, broken):
    (broken / WEIGHTS_NAME).write_bytes(b"\x08")
    refused(layout, broken, WEIGHTS_NAME)
    (broken / WEIGHTS_NAME).unlink()
    (broken / "adapter_model.bin").write_bytes(b"")
    refused(layout, broken, "pickle")
    (broken / CONFIG_NAME).write_text("[")
    refused(layout, broken, CONFIG_NAME)
    (broken / CONFIG_NAME).write_text("[]")
    refused(layout, broken, CONFIG_NAME)
    (broken / CONFIG_NAME).unlink()
    refused(layout, broken, "not an adapter saved by PEFT")


def test_a_product_in_one_piece_is_refused_by_name(tmp_path):
    """Latent attention multiplies kv_b_proj into queries and results."""
    hf = tiny_models.build(tmp_path / "base", "deepseek_v3")
    adapters.write(hf, tmp_path / "lora", modules=["kv_b_proj"])
    refused(layout_of(load(tmp_path / "base")), tmp_path / "lora", "kv_b_proj", "one piece")
