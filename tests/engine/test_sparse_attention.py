"""Models whose tokens attend to the keys that an index chooses, through the whole engine: answers are transformers', with
prompts in chunks, cached prefixes, preemption and drafts."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.kernels.cache.tensors import cache_parts
from slipstream.spec.description import read_spec
from slipstream.spec.model import IndexSpec
from tests.engine.cache.test_window_groups import COMMON, PROMPTS, SETTINGS, answers, greedy
from tests.engine.drafts.test_draft_heads import proposals
from tests.support import tiny_models

FAMILIES = ("deepseek_v32", "glm_moe_dsa", "deepseek_v4", "axk2", "minimax_m3_vl_text")
SAVED = "model.safetensors"


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    theirs = tiny_models.build(path, request.param)
    return path, [greedy(theirs, prompt, 40) for prompt in PROMPTS]


@pytest.mark.parametrize("kernels", ["auto", pytest.param("reference", marks=pytest.mark.slow)])
def test_answers_far_beyond_the_chosen_keys(model, kernels):
    path, expected = model
    with LLM(str(path), kernels=kernels, **SETTINGS) as llm:
        assert answers(llm) == expected
        before = llm.stats().prefix_hits
        assert answers(llm) == expected  # index keys of hits are those of the first run
        assert llm.stats().prefix_hits - before >= len(COMMON) - 4
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_preempted_answers_are_the_same(model):
    path, expected = model
    with LLM(str(path), **SETTINGS) as roomy:
        sizes = roomy.ledger.block_bytes, roomy.ledger.blocks_per_sequence
    with LLM(str(path), **SETTINGS, kv_cache_bytes=sizes[0] * (sizes[1] + 2)) as llm:
        assert answers(llm) == expected
        assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_drafts_change_no_answer(model, kernels):
    path, expected = model
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(str(path), kernels=kernels, speculative_config=drafts, **SETTINGS) as llm:
        assert answers(llm) == expected


def add_drafting_layer(path):
    """Adds a layer that drafts: the first one with experts and an index, with noise, and what is around it."""
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / SAVED)
    n = config["num_hidden_layers"]
    g = torch.Generator().manual_seed(0)
    size = config["hidden_size"]
    new = {
        name.replace("layers.2.", f"layers.{n}."): x + 0.1 * torch.randn(x.shape, generator=g)
        for name, x in tensors.items()
        if ".layers.2." in name
    }
    shapes = {
        "enorm": (size,),
        "hnorm": (size,),
        "shared_head.norm": (size,),
        "eh_proj": (size, 2 * size),
    }
    for name, shape in shapes.items():
        drawn = 0.2 * torch.randn(shape, generator=g) + (len(shape) == 1)
        new[f"model.layers.{n}.{name}.weight"] = drawn
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    save_file(tensors | new, path / SAVED)


@pytest.mark.parametrize("model", FAMILIES[:2], indirect=True)  # V4's are not run
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_drafts_of_the_checkpoints_own_layer_change_no_answer(model, tmp_path, kernels):
    path, expected = model
    shutil.copytree(path, tmp_path / "drafting")
    add_drafting_layer(tmp_path / "drafting")
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    sizes = {**SETTINGS, "kernels": kernels}
    with LLM(str(tmp_path / "drafting"), speculative_config=drafts, **sizes) as llm:
        assert answers(llm) == expected
        assert llm.stats().spec_draft_tokens > 0


def test_blocks_that_were_moved_to_a_disk_bring_their_index_keys(model, tmp_path):
    """A cache that is too small for two prompts, whose blocks come back from the disk."""
    path, expected = model
    with LLM(str(path), **SETTINGS) as roomy:
        sizes = roomy.ledger.block_bytes, roomy.ledger.blocks_per_sequence
    small = dict(
        kv_cache_bytes=sizes[0] * (sizes[1] + 2), kv_disk_bytes=1 << 26, kv_disk_path=str(tmp_path)
    )
    with LLM(str(path), **SETTINGS, **small) as llm:
        for _ in range(2):
            for i in (0, 2):
                assert answers(llm, [PROMPTS[i]]) == [expected[i]]


def test_a_token_that_sees_no_more_than_top_k_keys_attends_to_all(tmp_path):
    """Answers with an index of as many keys as the context has are those of the same weights without one."""
    path, dense = tmp_path / "sparse", tmp_path / "dense"
    tiny_models.write(path, "deepseek_v32", index_topk=128)
    add_drafting_layer(path)
    dense.mkdir()
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    lists = ("index_topk", "index_n_heads", "index_head_dim", "mlp_layer_types", "layer_types")
    config = {key: value for key, value in config.items() if key not in lists}
    (dense / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    tensors = {name: x for name, x in tensors.items() if "indexer" not in name}
    save_file(tensors, dense / "model.safetensors")
    found, drafts = [], {"method": "mtp", "num_speculative_tokens": 2}
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for folder in (path, dense):
        with LLM(str(folder), **SETTINGS) as llm:
            found.append(answers(llm))
        with LLM(str(folder), speculative_config=drafts, **SETTINGS) as llm:
            found.append(proposals(llm, sampling, prompts))
    assert found[:2] == found[2:]
    assert len(found[1]) > 10


def test_index_keys_are_a_part_of_the_cache_bytes(model):
    path, _ = model
    spec = read_spec(path).spec
    with LLM(str(path), **SETTINGS) as llm:
        kv = llm.core.executor.runner.kv
        own = [a.index_dim > 0 for a in spec.attentions]
        assert [x.index is not None for x in kv] == own
        found = sum(x.nbytes for x in cache_parts(kv))
        assert found == llm.ledger.block_bytes * len(kv[0].k)


def test_a_stage_can_not_begin_with_a_layer_that_uses_the_choice_of_another(tmp_path):
    tiny_models.write(tmp_path, "glm_moe_dsa")
    spec = read_spec(tmp_path).spec
    assert dataclasses.replace(spec, stage=(2, 4)).local_layers == range(2, 4)
    with pytest.raises(UnsupportedModelError, match="layer 1 attends to the keys"):
        dataclasses.replace(spec, stage=(1, 4))


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_a_cache_of_fewer_bits_does_not_go_with_an_index_of_blocks(tmp_path, dtype):
    tiny_models.write(tmp_path, "minimax_m3_vl_text")
    with pytest.raises(ConfigError, match="the blocks of keys that an index chooses") as error:
        LLM(str(tmp_path), **SETTINGS, kernels="reference", kv_cache_dtype=dtype)
    assert error.value.field == "kv_cache_dtype"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"index_n_heads": 1}, "index_n_heads"),
        ({"index_local_blocks": 4}, "index_local_blocks"),
        ({"index_head_dim": 4}, "index_head_dim"),
        ({"partial_rotary_factor": 1.0}, "rotary_dim"),
        ({"sparse_attention_config": {"sparse_init_block": 1}}, "sparse_init_block"),
        ({"sparse_attention_config": {"sparse_score_type": "mean"}}, "sparse_score_type"),
    ],
    ids=str,
)
def test_what_an_index_of_blocks_can_not_be_is_refused(tmp_path, changes, field):
    tiny_models.write(tmp_path, "minimax_m3_vl_text")
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    if "partial_rotary_factor" in changes:
        written.get("rope_parameters", {}).pop("partial_rotary_factor", None)
    path.write_text(json.dumps({**written, **changes}))
    with pytest.raises(UnsupportedModelError, match=field):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"indexer_types": ["shared", "full", "full", "full"]}, "indexer_types"),
        ({"indexer_types": ["full"] * 3}, "indexer_types"),
        ({"indexer_types": None, "index_topk_pattern": "FSXS"}, "index_topk_pattern"),
        ({"index_head_dim": 4}, "index_head_dim"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"index_temperature": 2.0}, "index_temperature"),
    ],
    ids=str,
)
def test_what_an_index_could_be_and_is_not_here_is_refused(tmp_path, changes, field):
    tiny_models.write(tmp_path, "glm_moe_dsa")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UnsupportedModelError, match=field):
        read_spec(tmp_path)


def test_a_pattern_and_a_distance_say_which_layers_have_an_index(tmp_path):
    tiny_models.write(tmp_path, "glm_moe_dsa")
    path, found = tmp_path / "config.json", []
    written = {**json.loads(path.read_text()), "indexer_types": None}
    for more in ({"index_topk_pattern": "FSFS"}, {"index_topk_freq": 2}):
        path.write_text(json.dumps({**written, **more}))
        spec = read_spec(tmp_path).spec
        found.append([isinstance(layer.attention.index, IndexSpec) for layer in spec.layers])
    assert found == [[True, False, True, False], [True, True, False, True]]
