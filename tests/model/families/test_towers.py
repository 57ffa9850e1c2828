"""Language models of multimodal checkpoints whose towers for pictures and sounds are not read."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from slipstream.errors import UnsupportedModelError
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.model.load.loader import load_model
from slipstream.spec.description import read_spec
from slipstream.spec.scheme import SCHEMES
from tests.model.harness import CPU, load, run
from tests.model.ranks.parallel_ranks import on_ranks
from tests.support import tiny_models

TOKENS = list(range(5, 40))
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
QWEN = {
    **{k: v for k, v in tiny_models._LLAMA.items() if k != "rope_theta"},
    **dict(head_dim=16, rope_parameters={**ROPE, "mrope_interleaved": True}),
}
TOWER = {
    **dict(depth=2, hidden_size=16, intermediate_size=32, num_heads=2, patch_size=4),
    **dict(out_hidden_size=32, num_position_embeddings=16, deepstack_visual_indexes=[0, 1]),
}
QWEN_IDS = {
    f"{name}_token_id": 280 + i
    for i, name in enumerate(("image", "video", "vision_start", "vision_end"))
}
GEMMA = {k: v for k, v in tiny_models.FAMILIES["gemma4_text"].items() if k != "model_type"}
GEMMA = {k: v for k, v in GEMMA.items() if v is not None}
UNIFIED = tiny_models.FAMILIES["gemma4_unified_text"]
UNIFIED = {k: v for k, v in UNIFIED.items() if v is not None and k != "model_type"}
STEP = dict(
    **dict(vocab_size=tiny_models.VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3),
    **dict(
        num_attention_heads=4, num_sliding_attention_heads=6, num_key_value_heads=2, head_dim=16
    ),
    **dict(layer_types=["full_attention", "sliding_attention", "full_attention"], sliding_window=6),
    **dict(
        mlp_layer_types=["dense", "sparse", "sparse"], n_routed_experts=6, num_experts_per_tok=2
    ),
    **dict(moe_intermediate_size=32, share_expert_dim=48, moe_router_scaling_factor=1.5),
    **dict(swiglu_limits=[0, 0, 0.4], swiglu_limits_shared=[0.5, 0, 0.3], initializer_range=0.2),
    **dict(rope_theta=[1e4, 500.0, 1e4], partial_rotary_factors=[0.5, 1.0, 0.5], pad_token_id=0),
    max_position_embeddings=256,
)
SIGHT_STEP = dict(
    **dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32),
    patch_size=14,
)
LLAMA4 = {k: v for k, v in tiny_models.FAMILIES["llama4_text"].items() if k != "model_type"}
LLAMA4 = {k: v for k, v in LLAMA4.items() if v is not None or k == "pad_token_id"}
SIGHT = dict(
    **dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2),
    **dict(num_key_value_heads=2, head_dim=8, position_embedding_size=1024),
)
M3 = tiny_models.FAMILIES["minimax_m3_vl_text"]
M3 = {k: v for k, v in M3.items() if k != "model_type" and (v is not None or k == "pad_token_id")}
SIGHT_M3 = {**SIGHT_STEP, "image_size": 28}
CASES = {
    "minimax_m3_vl": ("MiniMaxM3VL", M3, {"vision_config": SIGHT_M3, **dict(
        image_token_index=280, video_token_index=281, projector_hidden_size=16)}),
    "qwen3_vl": ("Qwen3VL", QWEN, {"vision_config": TOWER, **QWEN_IDS}),
    "qwen3_vl_moe": ("Qwen3VLMoe", {**QWEN, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24}, {"vision_config": TOWER, **QWEN_IDS}),
    "llama4": (
        "Llama4",
        LLAMA4,
        {
            "vision_config": dict(
                **dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, image_size=28),
                **dict(num_attention_heads=2, patch_size=14, vision_output_dim=16),
                **dict(projector_input_dim=16, projector_output_dim=16, pixel_shuffle_ratio=0.5),
            )
        },
    ),
    "gemma4": ("Gemma4", GEMMA, {"vision_config": SIGHT, "audio_config": None,
        "image_token_id": 280}),
    "step3p7": ("Step3p7", STEP, {"vision_config": {**SIGHT_STEP, "image_size": 28},
        "image_token_id": 280}),
    "gemma4_unified": ("Gemma4Unified", UNIFIED, {"vision_config": dict(mm_embed_dim=32,
        num_soft_tokens=8, output_proj_dims=32), **dict(audio_config=None, image_token_id=280)}),
}  # fmt: skip


def build(path, case, **changed):
    name, text, more = CASES[case]
    config = getattr(transformers, f"{name}Config")(text_config={**text, **changed}, **more)
    torch.manual_seed(0)
    of = {"MiniMaxM3VL": "MiniMaxM3Sparse"}.get(name, name)
    model = getattr(transformers, f"{of}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    tiny_models.shake_buffers(model)
    model.save_pretrained(path)
    return model


def close(path, theirs):
    if isinstance(theirs, transformers.Llama4ForConditionalGeneration):
        theirs = theirs.language_model  # transformers 5.24 fails on text without a picture
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([TOKENS])).logits[0]
    for kernels in ("reference", "cpu"):
        ours = run(load(path, kernels=kernels), TOKENS, [7, 1, 4])
        assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_text_is_that_of_transformers(case, tmp_path):
    theirs = build(tmp_path, case)
    close(tmp_path, theirs)
    assert read_spec(tmp_path).taking_media(0).spec.media is None


def test_minimax_m3_with_its_authors_keys(tmp_path):
    """Keys of the published config, which transformers 5 renames when it saves."""
    theirs = build(tmp_path, "minimax_m3_vl")
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    names = ("sparse_num_index_heads", "sparse_index_dim", "sparse_block_size")
    names += ("sparse_topk_blocks", "sparse_local_block")
    ours = ("n_heads", "head_dim", "block_size", "topk_blocks", "local_blocks")
    listed = [int(x != "full_attention") for x in text.pop("layer_types")]
    text["sparse_attention_config"] = {
        **{a: text.pop(f"index_{b}") for a, b in zip(names, ours, strict=True)},
        **dict(use_sparse_attention=True, sparse_score_type="max", sparse_init_block=0),
        **dict(sparse_attention_freq=listed, sparse_disable_index_value=listed),
    }
    text["moe_layer_freq"] = [int(x == "sparse") for x in text.pop("mlp_layer_types")]
    text |= text.pop("rope_parameters")
    del text["rope_type"]
    text |= {"hidden_act": "swigluoai", "qk_norm_type": "per_head", "n_shared_experts": 1}
    text |= {"model_type": "minimax_m3_text", "num_mtp_modules": 7, "scoring_func": "sigmoid"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    close(tmp_path, theirs)
    text["sparse_attention_config"]["sparse_init_block"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="sparse_init_block"):
        read_spec(tmp_path)


@pytest.mark.parametrize("size", [2, 3])
def test_gates_of_heads_are_divided_over_ranks(tmp_path, size):
    build(tmp_path, "step3p7")
    wanted = run(load(tmp_path), TOKENS)
    for found in on_ranks(tmp_path, lambda model: run(model, TOKENS, [7, 1, 4]), size=size):
        assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def test_gates_of_heads_are_rounded_with_queries(tmp_path):
    build(tmp_path, "step3p7", num_attention_heads=16, num_sliding_attention_heads=32)
    dense, rounded = (
        run(
            load_model(tmp_path, ops=ReferenceOps(), device=CPU, dtype=torch.float32, scheme=of),
            TOKENS,
        )
        for of in (None, SCHEMES["int8"])
    )
    assert 0 < (rounded - dense).norm() <= 0.1 * dense.norm()


def test_gemma_3n_without_its_towers(tmp_path):
    """Google's checkpoints have towers. transformers needs another package to make them."""
    from safetensors.torch import load_file, save_file

    theirs = tiny_models.build(tmp_path, "gemma3n_text")
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in load_file(file).items()
    }
    for tower in ("vision_tower.timm_model.conv_stem.conv", "audio_tower.norm", "embed_audio.norm"):
        tensors[f"model.{tower}.weight"] = torch.zeros(2)
    save_file(tensors, file, metadata={"format": "pt"})
    text = json.loads(config.read_text())
    text.pop("architectures")
    names = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"]}
    config.write_text(json.dumps({**names, "text_config": text, "vision_config": {}}))
    close(tmp_path, theirs)


def test_experts_stored_the_other_way_round_are_turned(tmp_path):
    """Qwen's own checkpoints store them so."""
    from safetensors.torch import load_file, save_file

    theirs = build(tmp_path, "qwen3_vl_moe")
    file = tmp_path / "model.safetensors"
    tensors = {
        name: value.mT.contiguous() if ".mlp.experts." in name else value
        for name, value in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    close(tmp_path, theirs)


@pytest.mark.parametrize("case", CASES)
def test_an_unknown_key_of_the_text_is_refused(case, tmp_path):
    build(tmp_path, case)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["a_new_switch"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == "a_new_switch"
