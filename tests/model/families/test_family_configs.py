"""Configs that families read: as they stand on hubs, in earlier spellings, refused ones, and other
layouts of the same model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from slipstream import LLM, SamplingParams
from slipstream.config import DeviceInfo, EngineArgs, resolve
from slipstream.costs.memory import block_bytes, weights_bytes
from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError
from slipstream.kernels.select import select_ops
from slipstream.model.load.loader import load_model
from slipstream.spec.description import read_spec
from slipstream.spec.model import (
    AlibiSpec,
    LongRopeScaling,
    MoESpec,
    ParallelBlock,
    PostNormBlock,
    RopeSpec,
    SequentialBlock,
)
from tests.model import checkpoints
from tests.model.harness import CPU, load, run
from tests.support import tiny_models

CONFIGS = Path(__file__).parents[3] / "benchmarks" / "configs"
TOKENS = list(range(5, 58))
PUBLISHED = {  # the numbers of parameters that the models are known by; tied heads once
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "opt-13b": 12_853_473_280,
    "opt-350m": 331_196_416,
    "bloom-7b1": 7_069_016_064,
    "mpt-7b": 6_649_286_656,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "starcoder-15b": 15_517_456_384,
    "starcoder2-3b": 3_030_371_328,
    "phi-2": 2_779_683_840,
    "phi-3-mini-4k": 3_821_079_552,
    "gemma-2-9b": 9_241_705_984,
    "olmo-2-7b": 7_298_617_344,
    "granite-3.1-8b": 8_170_848_256,
    "command-r": 34_980_831_232,
    "glm-4-9b-chat": 9_399_951_360,
    "ministral-8b": 8_019_808_256,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "flan-t5-small": 76_961_152,
    "t5-large": 737_668_096,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_of_real_models_are_read(name):
    assert read_spec(CONFIGS / name).spec.num_parameters == PUBLISHED[name]


def spec_of(folder, model_type, architecture, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"model_type": model_type, "architectures": [architecture], **config})
    )
    return read_spec(folder).spec


NEOX = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}


def test_keys_of_before_say_the_same(tmp_path):
    old = spec_of(
        tmp_path, "gpt_neox", "GPTNeoXForCausalLM", **NEOX, rotary_pct=0.5, rotary_emb_base=5e4
    )
    turned = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}
    assert (
        spec_of(tmp_path, "gpt_neox", "GPTNeoXForCausalLM", **NEOX, rope_parameters=turned) == old
    )
    assert old.layers[0].attention.position == RopeSpec(theta=5e4, rotary_dim=8)

    common = {"vocab_size": 99, "hidden_size": 64, "new_decoder_architecture": True}
    new = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_kv_heads": 2}
    falcon = spec_of(tmp_path, "falcon", "FalconForCausalLM", **common, **new)
    assert (
        spec_of(tmp_path, "RefinedWeb", "RWForCausalLM", **common, n_layer=2, n_head=8, n_head_kv=2)
        == falcon
    )
    assert falcon.layers[0].attention.num_kv_heads == 2


def test_what_holds_where_a_config_is_silent(tmp_path):
    common = {**NEOX, "num_hidden_layers": 2}
    for given, expected in (
        ({}, (50.0, 30.0)),
        ({"attn_logit_softcapping": None, "final_logit_softcapping": None}, (None, None)),
        ({"attn_logit_softcapping": 7}, (7.0, 30.0)),
    ):
        spec = spec_of(tmp_path, "gemma2", "Gemma2ForCausalLM", **common, **given)
        assert (spec.layers[0].attention.softcap, spec.logit_softcap) == expected
        assert [layer.attention.window for layer in spec.layers] == [4096, None]
    for model_type, architecture, rotary_dim in (
        ("gpt_neox", "GPTNeoXForCausalLM", 4),
        ("phi", "PhiForCausalLM", 8),
        ("glm", "GlmForCausalLM", 64),  # its heads have 128 dimensions, whatever the width
        ("cohere", "CohereForCausalLM", 16),
    ):
        position = (
            spec_of(tmp_path, model_type, architecture, **common).layers[0].attention.position
        )
        assert position.rotary_dim == rotary_dim
        assert position.style == ("interleaved" if model_type in ("glm", "cohere") else "half")
    kinds = spec_of(
        tmp_path, "cohere2", "Cohere2ForCausalLM", **{**NEOX, "num_hidden_layers": 5}
    ).layers
    assert [layer.attention.position is None for layer in kinds] == [
        False,
        False,
        False,
        True,
        False,
    ]
    assert [layer.attention.window for layer in kinds] == [4096, 4096, 4096, None, 4096]


SHAPES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
}
SHAPES |= {"ffn_hidden_size", "q_lora_rank", "n_shared_experts", "max_position_embeddings"}
"""A wrong guess at these is an error at load, since tensors do not fit; or bounds a text's length."""


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path, family):
    """Key by key: left out, the description is as with the default of transformers' class, or the key is asked for."""
    settings = {k: v for k, v in tiny_models.settings_of(family).items() if v is not None}
    given = AutoConfig.for_model(settings.pop("model_type"), **settings)
    architecture = CAUSAL.get(given.model_type, "Mistral4ForCausalLM")
    config = json.loads(json.dumps(given.to_dict() | {"architectures": [architecture]}))
    for key in ("chunk_size_feed_forward", "is_encoder_decoder"):
        config.pop(key)

    def read(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            return read_spec(tmp_path).spec
        except UnsupportedModelError:
            return None

    assert read(config) is not None
    num_compared = 0
    for key in config.keys() - SHAPES - {"model_type", "architectures"}:
        default = getattr(type(given), key, None)
        left_out = {k: v for k, v in config.items() if k != key}
        if (
            default is not None
            and isinstance(default, (bool, int, float, str))
            and (spec := read(left_out)) is not None
        ):
            expected = read({**left_out, key: default})
            assert expected is None or spec == expected, key
            num_compared += 1
    assert num_compared > 5
    rope = given.to_dict().get("rope_parameters") or {}
    theta = getattr(given, "default_theta", None)
    if "rope_theta" in rope and theta is not None and "rope_theta" not in config:
        left_out = {k: v for k, v in config.items() if k != "rope_parameters"}
        assert read(left_out) == read({**left_out, "rope_theta": theta})


def test_a_config_that_says_only_what_differs(tmp_path):
    """Gemma 3's multimodal ones leave out what their class has. 4,300,079,472 parameters are published with the picture's
    part, 419,816,304 of them."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
    }
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
    }
    config |= {
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
    }
    config |= {"initializer_range": 0.02, "mm_tokens_per_image": 256}
    seen = {"hidden_size": 1152, "image_size": 896, "patch_size": 14, "intermediate_size": 4304}
    config["vision_config"] = {**seen, "num_attention_heads": 16, "num_hidden_layers": 27}
    (tmp_path / "config.json").write_text(json.dumps(config))
    description = read_spec(tmp_path)
    spec = description.spec
    assert spec.num_parameters == 4_300_079_472
    assert (
        spec.vocab_size,
        spec.layers[0].attention.num_heads,
        spec.layers[0].attention.head_dim,
    ) == (262208, 8, 256)
    assert [layer.attention.window for layer in spec.layers] == [
        None if i % 6 == 5 else 1024 for i in range(34)
    ]


HUB = {
    "llama": {"do_sample": False, "max_length": 20, "pruned_heads": {},
        "is_encoder_decoder": False, "top_k": 50},
    "starcoder2": {"scale_attn_weights": True, "attention_softmax_in_fp32": True,
        "scale_attention_softmax_in_fp32": True},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
    "cohere2": {"use_parallel_embedding": True, "use_embedding_sharing": True, "layer_switch": 4},
    "smollm3": {"max_window_layers": 28, "use_sliding_window": False, "pretraining_tp": 2},
}  # fmt: skip


@pytest.mark.parametrize("family", HUB)
def test_keys_of_hubs_that_change_nothing(tmp_path, family):
    tiny_models.write(tmp_path, family)
    plain, path = read_spec(tmp_path).spec, tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **HUB[family]}))
    assert read_spec(tmp_path).spec == plain


@pytest.mark.parametrize(
    ("model_type", "architecture", "family", "more"),
    [
        ("kimi_k2", "DeepseekV3ForCausalLM", "deepseek_v3", {"num_nextn_predict_layers": 0}),
        (
            "bailing_moe",
            "BailingMoeV2ForCausalLM",
            "sarvam_moe",
            {"n_group": 4, "topk_group": 2, "partial_rotary_factor": 0.5},
        ),
        (
            "mimo",
            "MiMoForCausalLM",
            "qwen2",
            {"attention_bias": True, "num_nextn_predict_layers": 1, "use_mrope": False},
        ),
    ],
)
def test_a_family_under_its_authors_name(tmp_path, model_type, architecture, family, more):
    theirs = tiny_models.build(tmp_path, family, **(more if model_type == "bailing_moe" else {}))
    file, path = tmp_path / "model.safetensors", tmp_path / "config.json"
    if model_type == "mimo":
        tensors = load_file(file)
        save_file(
            {**tensors, "model.mtp_layers.0.input_proj.weight": torch.ones(2, 2)},
            file,
            metadata={"format": "pt"},
        )
    config = json.loads(path.read_text()) | {"model_type": model_type, **more}
    path.write_text(json.dumps({**config, "architectures": [architecture]}))
    assert close(run(load(tmp_path), TOKENS, (9, 1, 30)), logits_of(theirs))


@pytest.mark.parametrize("kind", ["ministral3", "mistral", "mistral4"])
@pytest.mark.parametrize("tied", [False, True])
def test_mistral_3_without_its_image_encoder(tmp_path, kind, tied):
    """Names, nested config and tie as transformers writes them."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = {k: v for k, v in tiny_models.settings_of(kind).items() if v is not None}
    seen = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    seen |= {"model_type": "pixtral", "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    theirs = Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text, vision_config=seen, tie_word_embeddings=tied)
    ).eval()
    theirs.save_pretrained(tmp_path)
    assert close(run(load(tmp_path), TOKENS, (7, 1, 30)), logits_of(theirs))
    assert read_spec(tmp_path).spec.tied_embeddings == tied


def test_blocks_are_told_apart(tmp_path):
    falcon = {**NEOX, "intermediate_size": None, "alibi": True, "bias": True}
    rw = spec_of(
        tmp_path, "falcon", "FalconForCausalLM", **falcon, parallel_attn=False, multi_query=False
    ).layers[0]
    assert isinstance(rw.block, SequentialBlock)
    assert rw.attention.position == AlibiSpec(factor=0.25)
    assert rw.attention.num_kv_heads == 4
    one = spec_of(tmp_path, "falcon", "FalconForCausalLM", **{**falcon, "alibi": False}).layers[0]
    assert isinstance(one.block, ParallelBlock)
    assert one.block.mlp_norm is None
    assert one.attention.num_kv_heads == 1
    opt = read_spec(CONFIGS / "opt-350m").spec
    assert isinstance(opt.layers[0].block, PostNormBlock)
    assert (opt.embed_size, opt.final_norm) == (512, None)
    command = read_spec(CONFIGS / "command-r").spec
    assert (
        command.max_position == 131072
    )  # what the authors serve, not what transformers' table ends at
    gemma = [layer.attention.window for layer in read_spec(CONFIGS / "gemma-2-9b").spec.layers]
    assert gemma == [4096, None] * 21


REFUSED = [
    (
        "gpt_neox",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope_parameters",
    ),
    ("gpt_neox", {"hidden_act": "mish"}, "hidden_act"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
    (
        "bloom",
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm",
    ),
    ("bloom", {"n_head": 5}, "hidden_size"),
    ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln"),
    ("mpt", {"attn_config": {"prefix_lm": True}}, "attn_config.prefix_lm"),
    ("mpt", {"attn_config": {"twist": 1}}, "attn_config.twist"),
    ("mpt", {"attn_config": 3}, "attn_config"),
    ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale"),
    ("mpt", {"no_bias": False}, "no_bias"),
    ("falcon", {"parallel_attn": False, "new_decoder_architecture": True}, "parallel_attn"),
    ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
    ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt_bigcode", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("starcoder2", {"norm_type": "rms_norm"}, "norm_type"),
    ("phi3", {"full_attn_mod": 2}, "full_attn_mod"),
    ("llama", {"repetition_penalty": 1.2}, "repetition_penalty"),
    ("llama", {"is_decoder": True}, "is_decoder"),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 4}},
        "rope_parameters",
    ),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "rope_parameters",
    ),
    ("gemma", {"hidden_act": "silu"}, "hidden_act"),
    ("gemma2", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
    ("olmo3", {"layer_types": ["full_attention"]}, "layer_types"),
    ("granite", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
    ("cohere2", {"use_parallel_block": False}, "use_parallel_block"),
    ("glm", {"hidden_act": 7}, "hidden_act"),
    ("ministral", {"sliding_window": None}, "layer_types"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    ("qwen2_moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
    ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers"),
    ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func"),
]


@pytest.mark.parametrize(("family", "changes", "field"), REFUSED, ids=str)
def test_what_is_not_supported_is_refused_by_name(tmp_path, family, changes, field):
    tiny_models.write(tmp_path, family)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == field


# --- The same model, laid out otherwise -----------------------------------------------------------------------------------


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


def close(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item() <= 1e-4


def test_chatglm_is_glm_under_its_authors_names(tmp_path):
    theirs = tiny_models.build(tmp_path, "glm", head_dim=8)
    file = tmp_path / "model.safetensors"
    given, named = load_file(file), {}
    for name, ours in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("encoder.final_layernorm.weight", "model.norm.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        named[f"transformer.{name}"] = given[ours]
    for i in range(2):
        a, b = f"transformer.encoder.layers.{i}.", f"model.layers.{i}."
        for kind in ("weight", "bias"):
            parts = [given[f"{b}self_attn.{x}_proj.{kind}"] for x in "qkv"]
            named[f"{a}self_attention.query_key_value.{kind}"] = torch.cat(parts)
        for x, y in (
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
            ("self_attention.dense", "self_attn.o_proj"),
            ("mlp.dense_h_to_4h", "mlp.gate_up_proj"),
            ("mlp.dense_4h_to_h", "mlp.down_proj"),
        ):
            named[f"{a}{x}.weight"] = given[f"{b}{y}.weight"]
    named["transformer.rotary_pos_emb.inv_freq"] = torch.ones(2)
    save_file(named, file, metadata={"format": "pt"})
    config = json.loads((CONFIGS / "glm-4-9b-chat" / "config.json").read_text())
    sizes = {
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "kv_channels": 8,
        "num_layers": 2,
        "num_hidden_layers": 2,
    }
    sizes |= {
        "num_attention_heads": 4,
        "padded_vocab_size": 288,
        "vocab_size": 288,
        "seq_length": 256,
        "rope_ratio": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    assert close(run(load(tmp_path), TOKENS, (7, 1, 30)), logits_of(theirs))
    (tmp_path / "config.json").write_text(
        json.dumps({**config, **sizes, "multi_query_attention": False})
    )
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == "multi_query_attention"


def test_names_without_the_usual_prefix(tmp_path):
    for family, prefix in (
        ("bloom", "transformer."),
        ("opt", "model."),
        ("falcon", "transformer."),
        ("mpt", "transformer."),
    ):
        theirs = tiny_models.build(tmp_path, family)
        file = tmp_path / "model.safetensors"
        save_file(
            {n.removeprefix(prefix): t for n, t in load_file(file).items()},
            file,
            metadata={"format": "pt"},
        )
        assert close(run(load(tmp_path), TOKENS), logits_of(theirs))


@pytest.mark.parametrize("family", ["falcon", "phi", "gemma", "deepseek_v3"])
def test_frequencies_that_old_files_hold_are_not_read(tmp_path, family):
    theirs = tiny_models.build(tmp_path, family)
    file, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**load_file(file), name: torch.ones(3)}, file, metadata={"format": "pt"})
    assert close(run(load(tmp_path), TOKENS), logits_of(theirs))


def test_longrope_follows_the_longest_context_that_is_served(tmp_path):
    longrope = {"rope_type": "longrope", "rope_theta": 1e4}
    longrope |= {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 5.0, 30.0]}
    overrides = {
        "rope_theta": None,
        "rope_parameters": longrope,
        "original_max_position_embeddings": 100,
    }
    theirs = logits_of(
        tiny_models.build(tmp_path, "phi3", **overrides)
    )  # 53 tokens: the short factors

    def ours(longest):
        return load_model(
            tmp_path,
            ops=select_ops(CPU, "reference"),
            device=CPU,
            dtype=torch.float32,
            max_model_len=longest,
        )

    scaling = read_spec(tmp_path).spec.layers[0].attention.position.scaling
    assert isinstance(scaling, LongRopeScaling)
    assert scaling.attention_factor == pytest.approx(1.0971, abs=1e-3)  # √(1 + ln 2.56 / ln 100)
    assert close(run(ours(100), TOKENS), theirs)
    assert not close(run(ours(101), TOKENS), theirs)


def test_rounded_weights_in_another_order_of_rows_are_refused(tmp_path):
    tiny_models.write(tmp_path, "gpt_neox", hidden_size=64, intermediate_size=64)
    path = tmp_path / "config.json"
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": gptq}))
    for name in ("dense", "query_key_value"):  # in order; head by head
        file, stem = tmp_path / "model.safetensors", f"gpt_neox.layers.0.attention.{name}"
        tensors = load_file(file)
        save_file(
            {
                f"{stem}.qweight": torch.zeros(
                    8, tensors[f"{stem}.weight"].shape[0], dtype=torch.int32
                )
            },
            file,
        )
        with pytest.raises(CheckpointError, match="lacks" if name == "dense" else "order of rows"):
            load(tmp_path)
        save_file(tensors, file)


# --- DeepSeek -----------------------------------------------------------------------------------------------------------------


def deepseek(folder, name="deepseek-v3", **changes):
    config = json.loads((CONFIGS / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return read_spec(folder).spec


def test_the_latent_cache_is_small(tmp_path):
    """576 numbers a token and layer, whatever the number of heads (section 2.1.4 of DeepSeek-V2)."""
    spec = deepseek(tmp_path)
    assert spec.kv_bytes_per_token(2) == 61 * (512 + 64) * 2
    assert block_bytes(spec, 16, 2) == 16 * 61 * 576 * 2
    a = spec.layers[0].attention
    assert abs(a.scale / 192**-0.5 - (0.1 * math.log(40) + 1) ** 2) < 1e-9
    assert (
        sum(weights_bytes(spec, 2).values()) == 2 * spec.num_parameters + 2 * 58 * 256
    )  # corrections in float32


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"topk_method": "greedy"}, "topk_method"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"n_group": 7}, "n_group"),
        ({"topk_group": 9}, "n_group"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        (
            {
                "quantization_config": {
                    "quant_method": "fp8",
                    "fmt": "e4m3",
                    "weight_block_size": [64, 64],
                }
            },
            "quantization_config.weight_block_size",
        ),
    ],
    ids=str,
)
def test_what_deepseek_could_be_and_is_not_here_is_refused(tmp_path, changes, field):
    with pytest.raises(UnsupportedModelError) as caught:
        deepseek(tmp_path, **changes)
    assert caught.value.field == field


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_latents_are_not_cached_in_8_bits(kind):
    description = read_spec(CONFIGS / "deepseek-v2-lite")
    gpu = DeviceInfo(
        device="cuda:0",
        name="a GPU",
        memory_bytes=2**37,
        free_bytes=2**37,
        best_dtype="bfloat16",
        compute_capability=(9, 0),
    )
    with pytest.raises(ConfigError, match="latent") as caught:
        resolve(EngineArgs(model="x", kv_cache_dtype=kind), description, gpu)
    assert caught.value.field == "kv_cache_dtype"


# --- Through the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
        ("bloom", {}),
        ("falcon", {}),
        ("gpt_bigcode", {}),
        ("olmo2", {}),
        ("cohere2", {}),
        ("cohere_compass_text", {}),
        ("mixtral", {"sliding_window": 7}),
        ("qwen2_moe", {}),
        ("gpt_oss", {}),
        ("deepseek_v2", {}),
        ("deepseek_v3", {}),
    ],
    ids=str,
)
def test_greedy_answers_of_the_engine_are_transformers(tmp_path, family, overrides):
    """Several prompts at once, in chunks, with a common beginning: cache, scheduler and sampler as they are for all."""
    theirs = tiny_models.build(tmp_path, family, **overrides)
    prompts = [TOKENS[:20], [*TOKENS[:17], 9, 9, 4], TOKENS[30:33]]
    settings = dict(dtype="float32", device="cpu", skip_tokenizer_init=True, max_model_len=64)
    with LLM(
        str(tmp_path), max_num_batched_tokens=16, block_size=4, max_num_seqs=4, **settings
    ) as llm:
        given = [{"prompt_token_ids": p} for p in prompts]
        answers = llm.generate(given, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        spec, counted = llm.core.description.spec, llm.stats().expert_load
        computed = llm.stats().prompt_tokens_total - llm.stats().prefix_hits + 3 * 11
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            ids = theirs.generate(
                torch.tensor([prompt]),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert answer.outputs[0].token_ids == ids[0, len(prompt) :].tolist()
    mixtures = {i: x.mlp for i, x in enumerate(spec.layers) if isinstance(x.mlp, MoESpec)}
    assert {i: len(counts) for i, counts in counted} == {
        i: m.num_experts for i, m in mixtures.items()
    }
    for i, counts in counted:
        assert sum(counts) == computed * mixtures[i].num_experts_per_token


def test_ling_clamps_the_experts_of_its_last_layers(tmp_path):
    """transformers has no such clamps, so this is by the config alone."""
    config, path = checkpoints.CONFIGS["ling-3-0-flash"], tmp_path / "config.json"
    path.write_text(json.dumps(config))
    mlps = [layer.mlp for layer in read_spec(tmp_path).spec.layers]
    of_experts, of_shared = (
        [getattr(m.activation, "limit", 0) for m in found]
        for found in ([m.expert for m in mlps[2:]], [m.shared.mlp for m in mlps[2:]])
    )
    assert of_experts == [0] * 32 + [4] * 8
    assert of_shared == [0] * 32 + [5] * 4 + [7] * 4


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("expert_swiglu_limit_list", {"expert_swiglu_limit_list": [0, 4]}),
        ("share_expert_swiglu_limit_list", {"share_expert_swiglu_limit_list": [-1] * 42}),
        ("layer_group_size", {"layer_group_size": 5}),
        ("kda_lower_bound", {"kda_lower_bound": 1.0}),
        ("linear_attention", {"linear_attention": "lightning"}),
        ("architectures", {"architectures": ["BailingMoeV2_5ForCausalLM"]}),
    ],
)
def test_what_ling_is_not_is_refused(tmp_path, field, more):
    (tmp_path / "config.json").write_text(
        json.dumps({**checkpoints.CONFIGS["ling-3-0-flash"], **more})
    )
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == field
