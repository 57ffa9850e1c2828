"""Models in GGUF files as llama.cpp writes them: names, order of rows, norms; and architectures that are not known."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from slipstream.errors import UnsupportedModelError
from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.torch_ops import CpuOps, PackedLinear
from slipstream.kernels.experts.host import HostExpertOps
from slipstream.kernels.positions import rope_table
from slipstream.model.load.loader import load_model
from slipstream.platform import platform_of
from slipstream.spec.description import read_spec
from slipstream.spec.families import find_gguf_family
from slipstream.spec.model import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)
from slipstream.spec.parameters import parameters
from slipstream.spec.stored.gguf import GGUFFile
from tests.data.make_tokens import golden_tokens
from tests.kernels.cpu.test_cpu_ops import any_blocks
from tests.model.formats.test_gguf import resident_kib
from tests.model.harness import CPU, Paged, is_program, load, run
from tests.support import tiny_models


def write(path, tensors, architecture="llama", **metadata):
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        key = key.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_string(key, value)
    for name, (value, kind) in tensors.items():
        if isinstance(value, np.ndarray) and value.dtype == np.uint8:  # blocks as they are
            writer.add_tensor(name, value, raw_dtype=gguf.GGMLQuantizationType[kind])
            continue
        value = np.ascontiguousarray(value, dtype=np.float32)
        if kind == "F32":
            writer.add_tensor(name, value)
        else:
            qtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(value, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GEMMA3 = {
    "num_hidden_layers": 7,
    "layer_types": None,
    "query_pre_attn_scalar": 16,
    "rope_theta": None,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
}
RMS = {"attention.layer_norm_rms_epsilon": 1e-6}
LAYER = {"attention.layer_norm_epsilon": 1e-5}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
YARN_KEYS = {
    "rope.freq_base": 1e4,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 32,
}
DEEPSEEK = {
    **RMS,
    "leading_dense_block_count": 1,
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 24,
    "attention.key_length": 32,
    "attention.value_length": 24,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 20,
    "rope.dimension_count": 8,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_shared_count": 2,
    "expert_feed_forward_length": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
OLMO3 = {"sliding_attention": PLAIN, "full_attention": YARN}
GLM4_MOE = {
    **RMS,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 32,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 5.0, 30.0],
    "original_max_position_embeddings": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama3_factors():
    """Factors that the converter computes from LLAMA3 for heads of 8."""
    plain = 1e4 ** -(torch.arange(0, 8, 2).double() / 8)
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32
    )
    cos, sin = (
        rope_table(RopeSpec(theta=1e4, rotary_dim=8, scaling=scaling), 2)[1].double().chunk(2)
    )
    return (plain / torch.atan2(sin, cos)).tolist()


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LINEAR_KEYS = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
FACTORS = {
    "exaone4-without-windows": {"rope_freqs.weight": llama3_factors()},
    "phi3-long": {
        f"rope_factors_{kind}.weight": LONGROPE[f"{kind}_factor"] for kind in ("short", "long")
    },
    "llama-3.1": {"rope_freqs.weight": llama3_factors()},
}
FACTORS |= {
    key: {"rope_freqs.weight": [1.0] * 4 + [1e30] * 12} for key in ("gemma4-e2b", "gemma4-26b-a4b")
}
GEMMA4_NAMES = {
    "layer_scalar": "layer_output_scale",
    "gate_up_proj": "ffn_gate_up_exps",
    "down_proj": "ffn_down_exps",
}
GEMMA4 = {
    **RMS,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.sliding_window": 6,
    "attention.sliding_window_pattern": [True, False] * 3,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
}
CASES = {
    "llama": ("llama", "llama", {}, {**RMS, "vocab_size": 288, "rope.dimension_count": 8}),
    "llama-tied": ("llama", "llama", {"tie_word_embeddings": True}, RMS),
    "qwen2": ("qwen2", "qwen2", {"use_sliding_window": False}, RMS),
    "qwen3": ("qwen3", "qwen3", {}, {**RMS, "attention.key_length": 16,
        "attention.value_length": 16}),
    "qwen2vl": (*("qwen2vl", "qwen2", {"use_sliding_window": False}), {**RMS,
        "rope.dimension_sections": [1, 1, 2, 0]}),
    "qwen3vl": (*("qwen3vl", "qwen3", {}), {**RMS, "attention.key_length": 16,
        "attention.value_length": 16, "rope.dimension_sections": [3, 3, 2, 0],
        "n_deepstack_layers": 3}),
    "qwen3vlmoe": (*("qwen3vlmoe", "qwen3_moe", {"head_dim": 8}), {**RMS,
        "rope.dimension_sections": [2, 1, 1, 0], "n_deepstack_layers": 3, "expert_count": 6,
        "expert_used_count": 2, "expert_feed_forward_length": 64}),
    "qwen2moe": ("qwen2moe", "qwen2_moe", {}, {**RMS, "expert_count": 6, "expert_used_count": 2,
        "expert_feed_forward_length": 64, "expert_shared_feed_forward_length": 48}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {"head_dim": 8}, {**RMS, "expert_count": 6,
        "expert_used_count": 2, "expert_feed_forward_length": 64}),
    "gemma": ("gemma", "gemma", {}, {**RMS, "attention.key_length": 16,
        "attention.value_length": 16}),
    "gemma2": (
        "gemma2",
        "gemma2",
        {
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
        },
        {
            **RMS,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.sliding_window": 6,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": ("gemma3", "gemma3_text", GEMMA3, {**RMS, "attention.key_length": 16,
        "attention.value_length": 16, "attention.sliding_window": 6, "rope.freq_base": 1e6,
        "rope.freq_base_swa": 5e3}),
    **{
        f"{name}-{kind}": (
            name,
            family,
            {"rope_theta": None, "rope_parameters": rope, **changes},
            {**RMS, **more, **keys},
        )
        for kind, rope, keys in (
            ("linear", LINEAR, LINEAR_KEYS),
            ("linear-without-a-type", LINEAR, {"rope.scaling.factor": 4.0}),
            ("linear-of-old", LINEAR, {"rope.scale_linear": 4.0}),
            ("yarn", YARN, YARN_KEYS),
            (
                "yarn-betas",
                {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
                {
                    **YARN_KEYS,
                    "rope.scaling.yarn_beta_fast": 16.0,
                    "rope.scaling.yarn_beta_slow": 2.0,
                    "rope.scaling.yarn_attn_factor": 0.878,
                    "rope.scaling.yarn_ext_factor": 1.0,
                    "rope.scaling.finetuned": True,
                },
            ),
        )
        for name, family, changes, more in (
            ("llama", "llama", {}, {"rope.dimension_count": 8}),
            ("qwen2", "qwen2", {"use_sliding_window": False}, {}),
            ("qwen3", "qwen3", {}, {"attention.key_length": 16, "attention.value_length": 16}),
        )
    },
    **{
        f"gemma4-{kind}": ("gemma4", "gemma4_text", changes, {**GEMMA4, **keys})
        for kind, changes, keys in (
            (
                "e2b",
                {},
                {
                    "attention.shared_kv_layers": 2,
                    "embedding_length_per_layer_input": 8,
                    "feed_forward_length": [64] * 4 + [128] * 2,
                },
            ),
            (
                "26b-a4b",
                tiny_models.GEMMA4_MOE,
                {
                    "attention.head_count_kv": [2, 1] * 3,
                    "attention.shared_kv_layers": 0,
                    "embedding_length_per_layer_input": 0,
                    "expert_count": 6,
                    "expert_used_count": 2,
                    "expert_feed_forward_length": 24,
                },
            ),
        )
    },
    "gemma3-linear": (
        "gemma3",
        "gemma3_text",
        {
            **GEMMA3,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
        {
            **RMS,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.sliding_window": 6,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "gemma3-without-windows": (
        "gemma3",
        "gemma3_text",
        {
            "num_hidden_layers": 2,
            "query_pre_attn_scalar": 16,
            "layer_types": ["full_attention"] * 2,
            "rope_theta": None,
            "rope_parameters": {
                "sliding_attention": PLAIN,
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
        {**RMS, "attention.key_length": 16, "attention.value_length": 16, "rope.freq_base": 1e6},
    ),
    "gpt2": ("gpt2", "gpt2", {}, LAYER),
    "starcoder": ("starcoder", "gpt_bigcode", {"activation_function": "gelu"}, {**LAYER,
        "attention.head_count_kv": 1}),
    "starcoder2": ("starcoder2", "starcoder2", {"sliding_window": None}, {**LAYER,
        "rope.freq_base": 10000.0}),
    "gptneox": ("gptneox", "gpt_neox", {}, {**LAYER, "rope.dimension_count": 2,
        "use_parallel_residual": True}),
    "gptneox-in-turn": ("gptneox", "gpt_neox", {"use_parallel_residual": False}, {**LAYER,
        "rope.dimension_count": 2, "use_parallel_residual": False}),
    "bloom": ("bloom", "bloom", {}, {**LAYER, "attention.head_count_kv": 4}),
    "mpt": ("mpt", "mpt", {"attn_config": {"clip_qkv": 0.7}}, {**LAYER,
        "attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 0.7}),
    "falcon-7b": ("falcon", "falcon", {}, {**LAYER, "attention.head_count_kv": 1,
        "tensor_data_layout": "jploski"}),
    "falcon-40b": ("falcon", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2},
        {**LAYER, "attention.head_count_kv": 2, "tensor_data_layout": "jploski"}),
    "phi2": ("phi2", "phi", {}, {**LAYER, "attention.head_count_kv": 4, "rope.dimension_count": 4,
        "rope.freq_base": 1e4}),
    "phi3": ("phi3", "phi3", {"sliding_window": 7, "rms_norm_eps": 1e-6}, {**RMS,
        "rope.dimension_count": 8, "attention.sliding_window": 7,
        "rope.scaling.original_context_length": 256}),
    "llama-3.1": ("llama", "llama", {"rope_theta": None, "rope_parameters": LLAMA3}, {**RMS,
        "rope.dimension_count": 8}),
    "mixtral": ("llama", "mixtral", {"sliding_window": None, "rms_norm_eps": 1e-6}, {**RMS,
        "rope.dimension_count": 8, "expert_count": 4, "expert_used_count": 2}),
    "phi3-long": (
        "phi3",
        "phi3",
        {
            "rope_theta": None,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 4,
            "rms_norm_eps": 1e-6,
        },
        {
            **RMS,
            "rope.dimension_count": 8,
            "rope.scaling.original_context_length": 4,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(64) / math.log(4)),
        },
    ),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        {"swiglu_limit": 7.0, "rope_parameters": {**YARN, "truncate": False}},
        {
            **RMS,
            **YARN_KEYS,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.sliding_window": 7,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 64,
        },
    ),
    "deepseek2-v2": ("deepseek2", "deepseek_v2", {"rope_parameters": {**YARN, "mscale": 0.7,
        "mscale_all_dim": 0.7}}, {**DEEPSEEK, **YARN_KEYS,
        "rope.scaling.yarn_log_multiplier": 0.07, "expert_gating_func": 1}),
    "deepseek2-v3": ("deepseek2", "deepseek_v3", {}, {**DEEPSEEK, "attention.q_lora_rank": 16,
        "expert_gating_func": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True,
        "expert_group_count": 4, "expert_group_used_count": 2}),
    "glm-dsa": (
        "glm-dsa",
        "glm_moe_dsa",
        {"indexer_types": ["full"] * 3, "num_hidden_layers": 3, "rms_norm_eps": 1e-6},
        {
            **DEEPSEEK,
            "attention.q_lora_rank": 16,
            "expert_gating_func": 2,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "expert_shared_count": 1,
            "attention.indexer.head_count": 24,
            "attention.indexer.key_length": 16,
            "attention.indexer.top_k": 9,
        },
    ),
    "olmo2": ("olmo2", "olmo2", {"rms_norm_eps": 1e-6}, RMS),
    "olmo3": ("olmo2", "olmo3", {"rms_norm_eps": 1e-6, "rope_parameters": OLMO3}, {**RMS,
        **YARN_KEYS, "attention.sliding_window": 6, "attention.sliding_window_pattern": [True,
        True, True, False]}),
    "smollm3": ("smollm3", "smollm3", {"rope_theta": 5e4}, {**RMS, "rope.dimension_count": 8,
        "rope.freq_base": 5e4, "vocab_size": 288}),
    "glm4moe": ("glm4moe", "glm4_moe", {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-6},
        GLM4_MOE),
    "bailingmoe2": ("bailingmoe2", "sarvam_moe", {"partial_rotary_factor": 0.5, "n_group": 4,
        "topk_group": 2}, {**GLM4_MOE, "expert_weights_scale": 2.5, "expert_group_count": 4,
        "expert_group_used_count": 2, "vocab_size": 288, "rope.scaling.type": "none",
        "expert_shared_feed_forward_length": 32}),
    "glm4moe-air": ("glm4moe", "glm4_moe", {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-6,
        "use_qk_norm": False, "attention_bias": False}, {**GLM4_MOE, "block_count": 3,
        "nextn_predict_layers": 1}),
    "granite": ("granite", "granite", {}, {**RMS, "attention.scale": 0.2, "residual_scale": 0.4,
        "embedding_scale": 3.0, "logit_scale": 4.0, "vocab_size": 288}),
    "command-r": ("command-r", "cohere", {"rope_theta": 5e5}, {**LAYER, "rope.freq_base": 5e5,
        "logit_scale": 0.0625, "rope.scaling.type": "none"}),
    "cohere2": ("cohere2", "cohere2", {}, {**LAYER, "logit_scale": 0.0625,
        "attention.sliding_window": 6, "rope.dimension_count": 8, "rope.scaling.type": "none"}),
    "chatglm": ("chatglm", "glm", {"rms_norm_eps": 1e-6}, {**RMS, "attention.key_length": 16,
        "attention.value_length": 16, "rope.dimension_count": 8}),
    "mistral3": (
        "mistral3",
        "ministral3",
        {"rms_norm_eps": 1e-6},
        {
            **RMS,
            "rope.dimension_count": 16,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.3,
        },
    ),
    "mistral3-small": ("mistral3", "mistral", {"sliding_window": None, "nulls": ["sliding_window"],
        "rms_norm_eps": 1e-6}, {**RMS, "rope.dimension_count": 8}),
    "hunyuan-dense": (
        "hunyuan-dense",
        "hunyuan_v1_dense",
        {
            "rms_norm_eps": 1e-6,
            "rope_theta": None,
            "rope_parameters": dict(type="dynamic", alpha=50.0, factor=1.0, rope_theta=1e4),
        },
        {
            **RMS,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.freq_base": 1e4 * 50.0 ** (16 / 14),
            "rope.scaling.type": "none",
            "rope.scaling.factor": 1.0,
            "rope.scaling.original_context_length": 256,
        },
    ),
    "hunyuan-moe": (
        "hunyuan-moe",
        "hunyuan_v1_moe",
        {"rms_norm_eps": 1e-6},
        {
            **RMS,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 64,
            "expert_shared_feed_forward_length": 64,
            "expert_shared_count": 1,
            "rope.scaling.type": "none",
        },
    ),
    "nemotron": ("nemotron", "nemotron", {}, {**LAYER, "rope.dimension_count": 4,
        "rope.scaling.type": "none", "vocab_size": 288}),
    "stablelm": ("stablelm", "stablelm", {}, {**LAYER, "rope.dimension_count": 2,
        "use_parallel_residual": False}),
    "stablelm-12b": ("stablelm", "stablelm", {"qk_layernorm": True, "use_parallel_residual": True,
        "use_qkv_bias": False}, {**LAYER, "rope.dimension_count": 2,
        "use_parallel_residual": True}),
    "seed_oss": ("seed_oss", "seed_oss", {}, {**RMS, "attention.key_length": 16,
        "attention.value_length": 16}),
    "seed_oss-biased-out": ("seed_oss", "seed_oss", {"attention_bias": False, "head_dim": 8},
        {**RMS, "attention.key_length": 8, "attention.value_length": 8}),
    "arcee": ("arcee", "arcee", {"rms_norm_eps": 1e-6}, {**RMS, "rope.dimension_count": 8}),
    "bitnet": ("bitnet", "bitnet", {"rms_norm_eps": 1e-6, "tie_word_embeddings": True}, {**RMS, "rope.scaling.type": "linear",
        "rope.scaling.factor": 1.0, "hidden_activation": "relu2"}),
    "bitnet-silu": ("bitnet", "bitnet", {"rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "hidden_act": "silu"}, {**RMS, "hidden_act": "silu"}),
    "exaone4": ("exaone4", "exaone4", {"rms_norm_eps": 1e-6}, {**RMS,
        "attention.sliding_window": 6, "attention.sliding_window_pattern": [True, True, True,
        False]}),
    "exaone4-without-windows": ("exaone4", "exaone4", {"rms_norm_eps": 1e-6,
        "sliding_window": None, "nulls": ["sliding_window"], "layer_types": ["full_attention"] * 4,
        "rope_theta": None, "rope_parameters": LLAMA3}, RMS),
    "ernie4_5": ("ernie4_5", "ernie4_5", {"rms_norm_eps": 1e-6}, {**RMS,
        "attention.key_length": 16, "attention.value_length": 16}),
    "ernie4_5-moe": (
        "ernie4_5-moe",
        "ernie4_5_moe",
        {"rms_norm_eps": 1e-6},
        {
            **RMS,
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 32,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "minimax-m2": (
        "minimax-m2",
        "minimax_m2",
        {},
        {
            **RMS,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.freq_base": 5e6,
            "rope.dimension_count": 8,
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_feed_forward_length": 64,
            "expert_gating_func": 2,
        },
    ),
    "dots1": (
        "dots1",
        "dots1",
        {"n_group": 1, "topk_group": 1, "max_window_layers": 3, "norm_topk_prob": True},
        {k: v for k, v in GLM4_MOE.items() if k != "rope.dimension_count"},
    ),
    "olmo": ("olmo", "olmo", {}, {**LAYER, "rope.dimension_count": 8, "attention.clamp_kqv": 0.7}),
    "gemma3n": (
        "gemma3n",
        "gemma3n_text",
        {},
        {
            **RMS,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": [True, False] * 3,
            "attention.shared_kv_layers": 2,
            "altup.active_idx": 0,
            "altup.num_inputs": 4,
            "embedding_length_per_layer_input": 8,
            "activation_sparsity_scale": [0.2533471] * 2 + [-math.inf] * 4,
            "feed_forward_length": [64] * 6,
            "rope.freq_base": 1e6,
        },
    ),
    "olmoe": ("olmoe", "olmoe", {"rms_norm_eps": 1e-6}, {**RMS, "expert_count": 6,
        "expert_used_count": 2}),
    "granitemoe": (
        "granitemoe",
        "granitemoeshared",
        {"embedding_multiplier": 3.0, "logits_scaling": 4.0},
        {
            **RMS,
            "attention.scale": 0.2,
            "residual_scale": 0.4,
            "embedding_scale": 3.0,
            "logit_scale": 4.0,
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_shared_feed_forward_length": 48,
        },
    ),
    "glm4": ("glm4", "glm4", {"rms_norm_eps": 1e-6}, {**RMS, "attention.key_length": 16,
        "attention.value_length": 16, "rope.dimension_count": 8}),
}  # fmt: skip


GPT_OSS = {"gate_up_proj": "ffn_{}_exps.weight", "gate_up_proj_bias": "ffn_{}_exps.bias"}


def apart(architecture, name, value, a):
    """Tensors that llama.cpp's converter makes of one, by its own names."""
    layer = next((part for part in name.split(".") if part.isdigit()), None)
    last = name.rsplit(".", 1)[-1]
    if architecture in ("deepseek2", "glm-dsa") and "kv_b_proj" in name:
        keys, values = np.split(value.reshape(a.num_heads, -1, a.kv_rank), [a.nope_dim], axis=1)
        return {
            f"blk.{layer}.attn_k_b.weight": keys.swapaxes(1, 2),
            f"blk.{layer}.attn_v_b.weight": values,
        }
    if architecture == "granitemoe" and "input_linear" in name:
        kind = "exps" if "block_sparse_moe" in name else "shexp"
        halves = zip(("gate", "up"), np.split(value, 2, axis=-2), strict=True)
        return {f"blk.{layer}.ffn_{half}_{kind}.weight": part for half, part in halves}
    if architecture == "gpt-oss" and last in GPT_OSS:
        parts = {kind: value[..., start::2] for kind, start in (("gate", 0), ("up", 1))}
        turn = last == "gate_up_proj"
        return {
            f"blk.{layer}." + GPT_OSS[last].format(k): np.ascontiguousarray(v.swapaxes(1, 2))
            if turn
            else v
            for k, v in parts.items()
        }
    if architecture == "gpt-oss" and last.startswith("down_proj"):
        kind = "bias" if last.endswith("bias") else "weight"
        return {
            f"blk.{layer}.ffn_down_exps.{kind}": value.swapaxes(1, 2) if kind == "weight" else value
        }
    if architecture == "gemma3n" and last == "correct_output_scale":
        return {f"blk.{layer}.altup_correct_scale.weight": value}
    if architecture == "gemma4" and name.endswith(("router.scale", "per_expert_scale")):
        of = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
        return {f"blk.{layer}.{of}.scale": value}
    if architecture == "gemma4" and last in GEMMA4_NAMES and ".mlp." not in name:
        return {f"blk.{layer}.{GEMMA4_NAMES[last]}.weight": value}
    if architecture == "bailingmoe2" and last == "expert_bias":
        return {f"blk.{layer}.exp_probs_b.bias": value}
    if architecture == "gpt-oss" and last == "sinks":
        return {f"blk.{layer}.attn_sinks.weight": value}
    return None


def as_llama_cpp(architecture, name, value, a):
    """A tensor as llama.cpp's converter changes it."""
    fused = name.endswith(("query_key_value.weight", "query_key_value.bias"))
    if architecture in (
        "llama",
        "granite",
        "smollm3",
        "arcee",
        "granitemoe",
        "mistral3",
        "olmo",
    ) and re.search(r"\.[qk]_proj\.", name):  # its order of rotary rows
        heads = a.num_heads if ".q_proj." in name else a.num_kv_heads
        return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
    if architecture in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
        return value + 1
    if architecture == "nemotron" and name.endswith("norm.weight"):
        return value + 1
    if architecture == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight", name):
        return value.T
    if (
        architecture in ("gptneox", "bloom", "falcon") and fused
    ):  # all of q, then all of k, then all of v
        group = a.num_heads // a.num_kv_heads
        parts = value.reshape(a.num_kv_heads, group + 2, a.head_dim, -1)
        flat = [
            p.reshape(-1, parts.shape[-1])
            for p in (parts[:, :group], parts[:, group], parts[:, group + 1])
        ]
        return np.concatenate(flat).reshape(value.shape)
    return value


@pytest.mark.parametrize("case", CASES)
def test_a_model_as_llama_cpp_writes_it(case, tmp_path):
    """The names of tensors are those of the gguf package's own table."""
    architecture, family, overrides, more = CASES[case]
    theirs = tiny_models.build(tmp_path / "hf", family, **overrides)
    spec = read_spec(tmp_path / "hf").spec
    a = spec.layers[0].attention
    number = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    table, tensors, stacks = gguf.get_tensor_name_map(number, spec.num_layers), {}, {}
    for name, value in load_file(tmp_path / "hf" / "model.safetensors").items():
        if alone := re.fullmatch(
            r"(.*\.experts|.*_layernorm\.norms|.*altup\w*_projections)\.(\d+)\.(.*)", name
        ):  # one tensor for all experts
            stacks.setdefault(f"{alone[1]}.{alone[3]}", {})[int(alone[2])] = value.numpy()
            continue
        if (made := apart(architecture, name, value.numpy(), a)) is not None:
            tensors |= {written: (part, "F32") for written, part in made.items()}
            continue
        value = value.squeeze()
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace("attn_sub_norm", "inner_attn_ln")  # BitNet's older names
        name = name.replace("ffn_sub_norm", "ffn_layernorm")
        found = [
            table.get_name(n, (".weight", ".bias"))
            for n in (name, name.removeprefix("transformer."))
        ]
        written = next(n for n in found if n is not None)
        tensors[written] = (as_llama_cpp(architecture, name, value.numpy(), a), "F32")
    for name, parts in stacks.items():
        name = name.replace(".norms.", ".")  # StableLM's of heads
        tensors[table.get_name(name, (".weight",))] = (
            np.stack([parts[e] for e in range(len(parts))]),
            "F32",
        )
    for name, factors in FACTORS.get(case, {}).items():
        tensors[name] = (np.array(factors), "F32")
    metadata = {
        "block_count": spec.num_layers,
        "context_length": spec.max_position,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": getattr(spec.layers[0].mlp, "intermediate_size", 64),
        "attention.head_count": a.num_heads,
    }
    if a.num_kv_heads not in (1, a.num_heads) and "attention.head_count_kv" not in more:
        metadata["attention.head_count_kv"] = a.num_kv_heads
    write(
        tmp_path / "model.gguf",
        tensors,
        architecture,
        **{f"{architecture}.{k}": v for k, v in {**metadata, **more}.items()},
    )
    tokens = [5, 9, 200, 31, 7, 44, 45, 46, 47, 48, 49, 50]
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    ours = run(load(tmp_path / "model.gguf"), tokens)
    assert (ours - expected).abs().max() / expected.abs().max() < 1e-4


def converted(folder, number, num_layers, changed=lambda name, value: {name: value}):
    """A folder's tensors by the gguf package's own table of names; `changed` does what the converter does to them."""
    table, tensors = gguf.get_tensor_name_map(number, num_layers), {}
    for name, value in load_file(folder / "model.safetensors").items():
        for new, part in changed(name, value.numpy()).items():
            written = table.get_name(new, (".weight", ".bias"))
            assert written is not None, new
            tensors[written] = (part, "F32")
    return tensors


SSM = {
    "attention.layer_norm_rms_epsilon": 1e-5,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 12,
}
SSM2 = {**SSM, "ssm.time_step_rank": 8, "ssm.group_count": 2}
HEADS = {"attention.head_count": 4, "attention.head_count_kv": [0, 2, 0]}
LFM = {
    **HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e6,
    "shortconv.l_cache": 3,
}
NO_HEADS = {"attention.head_count": 0, "feed_forward_length": 0, "context_length": 2**20}
GRANITE_H = {
    **HEADS,
    **SSM2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "expert_shared_feed_forward_length": 48,
    "attention.scale": 0.2,
    "residual_scale": 0.4,
    "embedding_scale": 3.0,
    "logit_scale": 4.0,
    "rope.scaling.finetuned": False,
}
NEMOTRON_H = {
    **SSM2,
    "ssm.inner_size": 48,
    "attention.head_count": 4,
    "attention.key_length": 8,
    "attention.value_length": 8,
}
QWEN3_NEXT = {
    **RMS,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.dimension_count": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 48,
    "full_attention_interval": 2,
}
QWEN3_NEXT_MOE = {
    **QWEN3_NEXT,
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 48,
}
HYBRIDS = {
    "lfm2": ("lfm2", {}, "LFM2", {**LFM, "feed_forward_length": 48}),
    "lfm2moe": (*("lfm2_moe", {}, "LFM2MOE"), {**LFM, "expert_count": 6, "expert_used_count": 2,
        "expert_feed_forward_length": 64, "leading_dense_block_count": 1, "expert_gating_func": 2}),
    "mamba": (*("mamba", {}, "MAMBA"), {**SSM, **NO_HEADS, "ssm.state_size": 8,
        "ssm.time_step_rank": 6}),
    "falcon-mamba": (*("falcon_mamba", {}, "MAMBA"), {**SSM, **NO_HEADS, "ssm.state_size": 8,
        "ssm.time_step_rank": 6, "ssm.dt_b_c_rms": True}),
    "mamba2": ("mamba2", {}, "MAMBA2", {**SSM2, **NO_HEADS}),
    "jamba": (*("jamba", {}, "JAMBA"), {**SSM, "attention.head_count": 4,
        "attention.head_count_kv": [0, 2, 0, 0], "attention.layer_norm_rms_epsilon": 1e-6,
        "ssm.state_size": 8, "ssm.time_step_rank": 6, "expert_count": 4, "expert_used_count": 2}),
    "falcon-h1": (
        "falcon_h1",
        {
            **dict(mamba_rms_norm=True, mamba_norm_before_gate=False, rope_theta=1e6),
            **dict(mamba_d_ssm=64, mamba_d_head=8),
        },
        "FALCON_H1",
        {
            **SSM2,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.key_length": 8,
            "attention.value_length": 8,
            "rope.freq_base": 1e6,
        },
    ),
    "granite-4-h": (*("granitemoehybrid", {}, "GRANITE_HYBRID"), {**GRANITE_H, "expert_count": 6,
        "expert_used_count": 2}),
    "granite-4-h-dense": ("granitemoehybrid", {"num_local_experts": 0}, "GRANITE_HYBRID",
        GRANITE_H),
    "kimi-linear": (
        *("kimi_linear", {"n_group": 1, "topk_group": 1}, "KIMI_LINEAR"),
        {
            **{k: v for k, v in DEEPSEEK.items() if k != "attention.head_count_kv"},
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.head_count": 4,
            "attention.head_count_kv": [0, 1, 0],
            "ssm.conv_kernel": 4,
            "kda.head_dim": 12,
            "expert_shared_count": 2,
            "expert_gating_func": 2,
            "expert_weights_scale": 2.446,
        },
    ),
    "qwen3-next": (*("qwen3_next", {"norm_topk_prob": True, "mlp_only_layers": []}, "QWEN3NEXT"),
        QWEN3_NEXT_MOE),
    "qwen3.5": (*("qwen3_5_text", {}, "QWEN35"), {**QWEN3_NEXT, "rope.dimension_sections": [1, 1,
        0, 0]}),
    "qwen3.5-moe": (*("qwen3_5_moe_text", {}, "QWEN35MOE"), QWEN3_NEXT_MOE),
    "qwen3.5-equal-heads": (*("qwen3_5_text", {"linear_num_key_heads": 4}, "QWEN35"),
        {**QWEN3_NEXT, "ssm.group_count": 4}),
    "nemotron-h": ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp",
        "linear_attention", "full_attention", "mlp"]}, "NEMOTRON_H", {**NEMOTRON_H,
        "attention.head_count_kv": [0, 0, 0, 2, 0], "feed_forward_length": [0, 64, 0, 0, 64]}),
    "nemotron-3": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            **dict(n_group=1, topk_group=1, moe_latent_size=12),
        },
        "NEMOTRON_H_MOE",
        {
            **NEMOTRON_H,
            "moe_latent_size": 12,
            "attention.head_count_kv": [0, 0, 2, 0],
            "feed_forward_length": [0, 32, 0, 32],
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 48,
            "expert_shared_count": 1,
            "expert_group_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        },
    ),
}  # fmt: skip


def folded(config, name, value):
    """Falcon-H1's multipliers, which the converter multiplies weights by."""
    into, ssm = config["attention_in_multiplier"], config["ssm_multipliers"]
    size = config["mamba_n_groups"] * config["mamba_d_state"]
    parts = [config["mamba_d_ssm"]] * 2 + [size] * 2 + [config["mamba_n_heads"]]
    factors = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "q_proj": into,
        "k_proj": into * config["key_multiplier"],
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"] * np.repeat(ssm, parts)[:, None],
        "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1],
    }
    return value * factors.get(name.split(".")[-2], 1.0)


def of_delta(config, name, value):
    """A tensor of Qwen3-Next or Qwen3.5 in the converter's form, with its names for the parts."""
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return {name: value + 1}
    if "linear_attn" not in name:
        return {name: value}
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, size = config["linear_key_head_dim"], config["linear_value_head_dim"]
    each = heads // keys

    def tiled(x, size):
        return x.reshape(keys, each, size, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

    if "in_proj_qkvz" in name:
        parts = value.reshape(keys, -1, value.shape[-1])
        ends = np.cumsum([key, key, each * size])
        *qkv, z = (x.reshape(-1, value.shape[-1]) for x in np.split(parts, ends, axis=1))
        named = (("in_proj_qkv", np.concatenate(qkv)), ("in_proj_z", z))
        return {name.replace("in_proj_qkvz", part): x for part, x in named}
    if config["model_type"] == "qwen3_next" or name.endswith("linear_attn.norm.weight"):
        return {name: value}
    if "in_proj_qkv" in name or "conv1d" in name:
        at = 2 * keys * key
        return {name: np.concatenate((value[:at], tiled(value[at:], size)))}
    if "out_proj" in name:
        return {name: tiled(value.T, size).T}
    return {name: tiled(value, size if "in_proj_z" in name else 1)}


def of_kimi(config, name, value):
    layer = name.split(".")[2] if "layers" in name else None
    if name.endswith("A_log"):
        value = -np.exp(value)
    if "conv1d" in name:
        value = value.reshape(1, len(value), 1, -1)
    if "kv_b_proj" in name:
        heads = value.reshape(config["num_attention_heads"], -1, value.shape[-1])
        keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
        stem = name.removesuffix("kv_b_proj.weight")
        return {f"{stem}k_b_proj.weight": keys.swapaxes(1, 2), f"{stem}v_b_proj.weight": values}
    if layer == "0" and "block_sparse_moe" in name:  # dense, which the authors call so
        name = name.replace("block_sparse_moe", "mlp")
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    return {name.replace(".dt_bias", ".dt_proj.bias"): value}


def of_qwen(config, name, value):
    if name.endswith("A_log"):
        value = -np.exp(value)
    if "conv1d" in name:
        value = value.squeeze(1)
    found = of_delta(config, name, value)
    return {n.replace(".dt_bias", ".dt_proj.bias"): x for n, x in found.items()}


@pytest.mark.parametrize("case", HYBRIDS)
def test_a_hybrid_as_llama_cpp_writes_it(case, tmp_path):
    family, overrides, architecture, more = HYBRIDS[case]
    theirs = tiny_models.build(tmp_path / "hf", family, **overrides)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    stacks = {}

    def changed(name, value):
        if alone := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            stacks.setdefault(f"{alone[1]}.{alone[3]}", {})[int(alone[2])] = value
            return {}
        if family.startswith("qwen3"):
            return of_qwen(config, name, value)
        if family == "falcon_h1":
            value = folded(config, name, value)
        if family == "kimi_linear":
            return of_kimi(config, name, value)
        if name.endswith("A_log"):
            value = -np.exp(value)
        if name.endswith(("A_log", ".D")) and value.ndim == 1:
            value = value[:, None]
        if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            value = value.reshape(2, -1)
        if "conv" in name and value.ndim == 3:
            value = value.squeeze(1)
        if "input_linear" in name:
            own = GRANITE_PARTS["block_sparse_moe" in name, overrides == {}]
            return dict(zip(own(name.split(".")[2]), np.split(value, 2, axis=-2), strict=True))
        if "shared_mlp.output_linear" in name and overrides:
            return {f"model.layers.{name.split('.')[2]}.mlp.down_proj.weight": value}
        name = re.sub(
            r"\.dt_bias$", ".dt.bias" if architecture == "NEMOTRON_H_MOE" else ".dt_proj.bias", name
        )
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        return {name.replace(".expert_bias", ".expert_bias.bias"): value}

    number = gguf.MODEL_ARCH[architecture]
    num_layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    tensors = converted(tmp_path / "hf", number, num_layers, changed)
    table = gguf.get_tensor_name_map(number, num_layers)
    for name, parts in stacks.items():
        known = [name, name.replace("backbone", "model").replace("mixer", "mlp")]
        known.append(re.sub(r"model\.(layers.*)feed_forward", r"\1feed_forward", name))
        known.append(name.replace("feed_forward", "mlp"))
        written = next(w for n in known if (w := table.get_name(n, (".weight",))))
        tensors[written] = (np.stack([parts[e] for e in range(len(parts))]), "F32")
    architecture = gguf.MODEL_ARCH_NAMES[number]
    metadata = {
        "block_count": num_layers,
        "context_length": 256,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "vocab_size": 288,
        **more,
    }
    write(
        tmp_path / "model.gguf",
        tensors,
        architecture,
        **{f"{architecture}.{k}": v for k, v in metadata.items()},
    )
    tokens = [5, 9, 200, 31, 7, 44, 45, 46, 47, 48, 49, 50]
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    ours = run(load(tmp_path / "model.gguf"), tokens)
    assert (ours - expected).abs().max() / expected.abs().max() < 1e-4
    if family in ("qwen3_next", "qwen3_5_text"):  # whose rows are in another order, in blocks too
        own = re.compile(r".*\.(attn_qkv|attn_gate|attn_[qkv])\.weight")
        rounded = {n: (v, "Q8_0" if own.match(n) else k) for n, (v, k) in tensors.items()}
        keys = {f"{architecture}.{k}": v for k, v in metadata.items()}
        write(tmp_path / "model.gguf", rounded, architecture, **keys)
        expected, ours = (
            run(load(tmp_path / "model.gguf", kernels=k), tokens) for k in ("reference", "cpu")
        )
        assert (ours - expected).norm() / expected.norm() < 0.1  # of rounded activations


def test_a_weight_whose_columns_are_reordered_counts_in_the_models_type(tmp_path):
    """Blocks of a row's numbers can't be taken apart: Qwen 3.5's last product of a recurrent layer is expanded."""
    theirs = tiny_models.build(tmp_path / "hf", "qwen3_5_text", linear_value_head_dim=16)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    tensors = converted(
        tmp_path / "hf", gguf.MODEL_ARCH.QWEN35, 3, lambda name, x: of_qwen(config, name, x)
    )
    metadata = {**QWEN3_NEXT, "ssm.inner_size": 64, "block_count": 3, "context_length": 256}
    metadata |= {"embedding_length": 32, "feed_forward_length": 64}
    sizes = []
    for part in ("no_such_part", "ssm_out", "attn_qkv"):
        rounded = {n: (x, "Q8_0" if part in n else kind) for n, (x, kind) in tensors.items()}
        own = {f"qwen35.{k}": v for k, v in metadata.items()}
        write(tmp_path / "model.gguf", rounded, "qwen35", **own)
        sizes.append(read_spec(tmp_path / "model.gguf").gguf_bytes(4))
        tokens = [5, 9, 200, 31, 7]
        with torch.no_grad():
            expected = theirs(torch.tensor([tokens])).logits[0]
        ours = run(load(tmp_path / "model.gguf", kernels="cpu"), tokens)
        assert (ours - expected).norm() / expected.norm() < 0.1
    assert sizes[0] == sizes[1] > sizes[2]


GRANITE_PARTS = {  # whether of experts, and whether the model has any
    (True, True): lambda i: [f"layers.{i}.feed_forward.experts.{w}.weight" for w in ("w1", "w3")],
    (False, True): lambda i: [
        f"model.layers.{i}.mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up")
    ],
    (False, False): lambda i: [f"model.layers.{i}.mlp.{x}_proj.weight" for x in ("gate", "up")],
}


ENCODERS = {
    "bert": ("bert", gguf.MODEL_ARCH.BERT, {"pooling_type": 2}),
    "xlm-roberta": ("roberta", gguf.MODEL_ARCH.BERT, {"pooling_type": 1}),
    "nomic-bert": ("nomic_bert", gguf.MODEL_ARCH.NOMIC_BERT, {"pooling_type": 1,
        "rope.freq_base": 1000.0}),
    "modern-bert": (*("modernbert", gguf.MODEL_ARCH.MODERN_BERT), {"pooling_type": 2,
        "rope.freq_base": 160000.0, "attention.sliding_window": 12,
        "attention.sliding_window_pattern": 3}),
    "modern-bert, layer by layer": (
        *("modernbert", gguf.MODEL_ARCH.MODERN_BERT),
        {
            "pooling_type": 1,
            "rope.freq_base": 160000.0,
            "rope.freq_base_swa": 10000.0,
            "rope.scaling.type": "none",
            "attention.sliding_window": 12,
            "attention.sliding_window_pattern": [False, True, True, False],
        },
    ),
    "eurobert": (*("eurobert", gguf.MODEL_ARCH.EUROBERT), {"pooling_type": 1,
        "rope.freq_base": 10000.0, "attention.head_count_kv": 2, "rope.scaling.type": "none"}),
}  # fmt: skip


NOMICS_OWN = {  # transformers' names of Nomic's tensors, and the authors', which the gguf package knows
    "self_attn.o_proj": "attn.out_proj",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.up_proj": "mlp.fc11",
    "mlp.down_proj": "mlp.fc2",
}


@pytest.mark.parametrize("case", ENCODERS)
def test_an_encoder_as_llama_cpp_writes_it(case, tmp_path):
    family, number, more = ENCODERS[case]
    tiny_models.build_encoder(
        tmp_path / "hf", family, **({"norm_bias": False} if family == "modernbert" else {})
    )
    spec = read_spec(tmp_path / "hf").spec
    offset = 0 if spec.learned_positions is None else spec.learned_positions.offset

    def changed(name, value):
        name = name.removeprefix("roberta.").removeprefix("bert.")
        if "pooler" in name:
            return {}
        if name == "embeddings.position_embeddings.weight":
            return {name: value[offset:]}
        if family == "nomic_bert" and (
            q := re.fullmatch(r"(encoder\.)?layers\.(\d+)\.self_attn\.q_proj\.weight", name)
        ):
            held = load_file(tmp_path / "hf" / "model.safetensors")
            key = next(k for k in held if k.endswith(name))
            whole = np.concatenate(
                [held[key.replace("q_proj", f"{x}_proj")].numpy() for x in "qkv"]
            )
            return {f"encoder.layers.{q[2]}.attn.Wqkv.weight": whole}
        if family == "nomic_bert" and re.search(r"self_attn\.[kv]_proj", name):
            return {}
        for theirs, own in NOMICS_OWN.items() if family == "nomic_bert" else ():
            name = name.replace(theirs, own)
        return {name: value}

    a = spec.layers[0].attention
    metadata = {
        "block_count": spec.num_layers,
        "context_length": spec.max_position,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.layers[0].mlp.intermediate_size,
        "attention.head_count": a.num_heads,
        **(
            {"attention.layer_norm_epsilon": spec.embed_norm.eps}
            if spec.embed_norm
            else {"attention.layer_norm_rms_epsilon": spec.final_norm.eps}
        ),
        "attention.causal": False,
        **more,
    }
    name = gguf.MODEL_ARCH_NAMES[number]
    tensors = converted(tmp_path / "hf", number, spec.num_layers, changed)
    if spec.num_token_types == 1:
        rows, kind = tensors["token_types.weight"]
        tensors["token_types.weight"] = (rows[0], kind)  # as llama-quantize leaves it
    write(tmp_path / "model.gguf", tensors, name, **{f"{name}.{k}": v for k, v in metadata.items()})
    texts = [{"prompt_token_ids": [5, 9, 200, 31, 7]}, {"prompt_token_ids": [44]}]
    (tmp_path / "hf" / "1_Pooling").mkdir()
    tiny_models.write_sentence_transformers(
        tmp_path / "hf", mode={1: "mean_tokens", 2: "cls_token"}[more["pooling_type"]]
    )
    found = []
    for path in (tmp_path / "hf", tmp_path / "model.gguf"):
        with LLM(str(path), skip_tokenizer_init=True, dtype="float32", device="cpu") as llm:
            found.append(torch.tensor([o.embedding for o in llm.embed(texts)]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_embedding_gemma_as_llama_cpp_writes_it(tmp_path):
    """The Dense steps are tensors of the file, and its window counts both sides."""
    number = gguf.MODEL_ARCH.GEMMA_EMBEDDING
    tiny_models.build_encoder(tmp_path / "hf", "gemma3-encoder", **GEMMA3, sliding_window=20)
    spec = read_spec(tmp_path / "hf").spec

    def changed(name, value):
        return {name: value + 1 if name.endswith("norm.weight") else value}

    tensors, a = converted(tmp_path / "hf", number, 7, changed), spec.layers[0].attention
    folder = tmp_path / "hf"
    tiny_models.write_sentence_transformers(folder)
    modules = json.loads((folder / "modules.json").read_text())
    torch.manual_seed(0)
    for i, (inputs, outputs) in ((2, (spec.hidden_size, 48)), (3, (48, 20))):
        weight, step = torch.randn(outputs, inputs), folder / f"{i}_Dense"
        step.mkdir()
        save_file({"linear.weight": weight}, step / "model.safetensors")
        own = dict(in_features=inputs, out_features=outputs, bias=False)
        own["activation_function"] = "torch.nn.modules.linear.Identity"
        (step / "config.json").write_text(json.dumps(own))
        modules.insert(i, {"path": step.name, "type": "sentence_transformers.models.Dense"})
        tensors[f"dense_{i}.weight"] = (weight.numpy(), "F32")
    (folder / "modules.json").write_text(json.dumps(modules))
    metadata = {
        **RMS,
        "block_count": 7,
        "context_length": spec.max_position,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.layers[0].mlp.intermediate_size,
        "attention.head_count": a.num_heads,
        "attention.head_count_kv": a.num_kv_heads,
        "attention.key_length": a.head_dim,
        "attention.value_length": a.head_dim,
        "attention.sliding_window": json.loads((folder / "config.json").read_text())[
            "sliding_window"
        ],
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 5e3,
        "pooling_type": 1,
        "dense_2_feat_in": spec.hidden_size,
        "dense_2_feat_out": 48,
        "dense_3_feat_in": 48,
        "dense_3_feat_out": 20,
    }
    name = gguf.MODEL_ARCH_NAMES[number]
    write(tmp_path / "model.gguf", tensors, name, **{f"{name}.{k}": v for k, v in metadata.items()})
    texts = [{"prompt_token_ids": [5 + 7 * i % 190 for i in range(n)]} for n in (30, 1, 9)]
    found = []
    for path in (folder, tmp_path / "model.gguf"):
        with LLM(str(path), skip_tokenizer_init=True, dtype="float32", device="cpu") as llm:
            found.append(torch.tensor([o.embedding for o in llm.embed(texts)]))
    assert found[1].shape == (3, 20)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["t5", "flan-t5"])
def test_t5_as_llama_cpp_writes_it(family, tmp_path):
    tiny_models.build_t5(tmp_path / "hf", family)
    spec = read_spec(tmp_path / "hf").spec
    a, mlp = spec.layers[0].attention, spec.layers[0].mlp
    skip = ("coder.embed_tokens", "EncDecAttention.relative_attention_bias")

    def changed(name, value):
        return {} if any(part in name for part in skip) else {name: value}

    metadata = {
        "block_count": len(spec.encoder.layers),
        "decoder_block_count": len(spec.layers),
        "context_length": spec.max_position,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": mlp.intermediate_size,
        "attention.head_count": a.num_heads,
        "attention.key_length": a.head_dim,
        "attention.value_length": a.head_dim,
        "attention.layer_norm_epsilon": spec.final_norm.eps,
        "attention.layer_norm_rms_epsilon": spec.final_norm.eps,
        "attention.relative_buckets_count": a.position.num_buckets,
        "decoder_start_token_id": spec.encoder.start_token_id,
    }
    tensors = converted(
        tmp_path / "hf",
        gguf.MODEL_ARCH.T5,
        max(len(spec.layers), len(spec.encoder.layers)),
        changed,
    )
    write(tmp_path / "model.gguf", tensors, "t5", **{f"t5.{k}": v for k, v in metadata.items()})
    texts = [{"prompt_token_ids": [5, 9, 200, 31, 7]}, {"prompt_token_ids": [44]}]
    greedy, answers = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), []
    for path in (tmp_path / "hf", tmp_path / "model.gguf"):
        with LLM(str(path), skip_tokenizer_init=True, dtype="float32", device="cpu") as llm:
            answers.append([o.outputs[0].token_ids for o in llm.generate(texts, greedy)])
    assert answers[0] == answers[1]


LEAST = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def described(path, architecture="llama", **changes):
    metadata = {f"{architecture}.{k}": v for k, v in {**LEAST, **changes}.items() if v is not None}
    write(path, {"token_embd.weight": (np.zeros((4, 32)), "F32")}, architecture, **metadata)
    return read_spec(path).spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scale_linear", -2.0),
        ("rope.scaling.type", "dynamic"),
        ("rope.scaling.factor", -4.0),
        ("rope.scaling.alpha", 2.0),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.dimension_count", 4),
        ("rope.freq_base_swa", 1e4),
        ("attention.sliding_window", 16),
        ("attention.value_length", 16),
        ("attention.head_count_kv", [2, 4]),
        ("attention.causal", False),
        ("attention.scale", 0.5),
        ("expert_used_count", 8),
        ("tensor_data_layout", "other"),
        ("anything.new", 1),
        *((key, None) for key in LEAST),
    ],
)
def test_metadata_that_could_matter_is_refused_by_name(tmp_path, key, value):
    with pytest.raises(UnsupportedModelError, match=key) as caught:
        described(tmp_path / "x.gguf", **{key: value})
    assert caught.value.field == f"llama.{key}"


LONG = LongRopeScaling(
    short_factors=(4.0,) * 4,
    long_factors=(4.0,) * 4,
    original_max_position=64,
    attention_factor=1.5,
)


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"factor": 4.0}, LinearScaling(factor=4.0)),
        ({"factor": 0.0}, None),
        ({"type": "none", "factor": 4.0}, None),
        ({"type": "longrope", "factor": 4.0}, LinearScaling(factor=4.0)),
        ({"factor": 4.0, "attn_factor": 1.5}, LONG),
        (
            {"type": "none", "factor": 4.0, "attn_factor": 1.5},
            dataclasses.replace(LONG, short_factors=(1.0,) * 4, long_factors=(1.0,) * 4),
        ),
        (
            {"type": "yarn", "factor": 4.0, "attn_factor": 1.5, "yarn_beta_slow": 2.0},
            YarnScaling(
                factor=4.0,
                original_max_position=64,
                beta_slow=2.0,
                attention_factor=1.5 * (0.1 * math.log(4.0) + 1.0),
            ),
        ),
    ],
)
def test_scaling_of_positions_is_llama_cpps(tmp_path, keys, scaling):
    """llama.cpp's logits were compared once, for these and for all families (context 64, heads of
    8)."""
    spec = described(
        tmp_path / "x.gguf", context_length=64, **{f"rope.scaling.{k}": v for k, v in keys.items()}
    )
    assert spec.layers[0].attention.position.scaling == scaling


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        (YARN_KEYS, "rope.scaling.yarn_log_multiplier"),
        (LINEAR_KEYS, "rope.scaling.type"),
        ({"rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor"),
    ],
)
def test_scaling_of_latent_attention_without_sure_scores_is_refused(tmp_path, keys, field):
    with pytest.raises(UnsupportedModelError, match=field):
        described(tmp_path / "x.gguf", "deepseek2", **{**DEEPSEEK, **keys})


def test_granite_without_positions_is_refused(tmp_path):
    """The key has no effect elsewhere."""
    with pytest.raises(UnsupportedModelError, match=r"rope\.scaling\.finetuned"):
        described(
            tmp_path / "x.gguf",
            "granite",
            **{**CASES["granite"][3], "rope.scaling.finetuned": False},
        )


def test_metadata_without_effect_is_accepted(tmp_path):
    plain = described(tmp_path / "plain.gguf")
    harmless = {
        "vocab_size": 5,
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 32,
        "rope.scale_linear": 1.0,
        "expert_count": 0,
        "attention.causal": True,
        "tensor_data_layout": "Meta AI original pth",
    }
    assert described(tmp_path / "x.gguf", **harmless) == plain


def test_a_decoder_of_embeddings_says_how_it_pools(tmp_path):
    """Qwen3-Embedding's files have such a field."""
    described(tmp_path / "last.gguf", pooling_type=3)
    described(tmp_path / "mean.gguf", pooling_type=1)
    assert [read_spec(tmp_path / f"{kind}.gguf").pooling.kind for kind in ("last", "mean")] == [
        "last",
        "mean",
    ]
    with pytest.raises(UnsupportedModelError, match="pooling_type = 4"):
        described(tmp_path / "rank.gguf", pooling_type=4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "lacks bitnet.hidden_activation"),
        ({"hidden_activation": "relu2", "hidden_act": "silu"}, "only 'relu2' is supported"),
    ],
    ids=("none", "two"),
)
def test_a_bitnet_without_one_activation_is_refused(tmp_path, keys, message):
    shape = {"block_count": 1, "context_length": 64, "embedding_length": 32, "vocab_size": 64}
    shape |= {"feed_forward_length": 64, "attention.head_count": 2, **RMS, **keys}
    path = tmp_path / "x.gguf"
    tensors = {"token_embd.weight": (np.zeros((64, 32)), "F32")}
    write(path, tensors, "bitnet", **{f"bitnet.{k}": v for k, v in shape.items()})
    with pytest.raises(UnsupportedModelError, match=message):
        read_spec(path)


def test_an_unknown_architecture_is_named(tmp_path):
    path = tmp_path / "x.gguf"
    write(path, {"token_embd.weight": (np.zeros((4, 32)), "F32")}, "mamba")
    with pytest.raises(UnsupportedModelError, match="mamba"):
        read_spec(path)


def write_llama(
    folder,
    kinds,
    hidden_size=64,
    intermediate_size=96,
    values=lambda rng, kind, *shape: rng.standard_normal(shape) * 0.1,
    **sizes,
):
    """A Llama's model.gguf in `folder`, whose products are of the first of two `kinds`, values and embeddings of the second.
    Returns its tensors."""
    more = dict(hidden_size=hidden_size, intermediate_size=intermediate_size, **sizes)
    tiny_models.write(folder / "hf", "llama", tie_word_embeddings=True, **more)
    spec, rng, tensors = read_spec(folder / "hf").spec, np.random.default_rng(0), {}
    shapes = parameters(spec)
    for name, place in find_gguf_family("llama").gguf.names(spec).items():
        rows, *inner = shapes[place.target]
        shape = (rows if place.rows is None else place.rows, *inner)
        kind = "F32" if not inner else kinds[1] if "attn_v" in name or "token" in name else kinds[0]
        tensors[name] = (values(rng, kind, *shape) if inner else np.ones(shape), kind)
    metadata = {
        **LEAST,
        "block_count": 2,
        "embedding_length": hidden_size,
        "feed_forward_length": intermediate_size,
        "attention.head_count_kv": 2,
    }
    write(folder / "model.gguf", tensors, **{f"llama.{k}": v for k, v in metadata.items()})
    return tensors


@pytest.mark.parametrize(
    "kinds", [("Q4_1", "Q4_1"), ("Q4_0", "Q8_0"), ("Q5_1", "Q5_0"), ("Q8_0", "F16")], ids="+".join
)
def test_blocks_are_used_as_they_are(tmp_path, kinds):
    """Products in a file's own precision against the same numbers blown up to float32: only the inputs' 8 bits differ. Of a
    product that another type fills in part, nothing is taken."""
    write_llama(tmp_path, kinds)
    ours, exact = load(tmp_path / "model.gguf", kernels="cpu"), load(tmp_path / "model.gguf")
    assert resident_kib(tmp_path / "model.gguf") == 0  # the packed weights are there instead
    attention = ours.decoder.layers[1].attention
    assert [p.kind for p in attention.qkv.parts] == {
        "Q4_1": [native.Q4M],  # one type: one part
        "Q8_0": [native.Q4, native.Q4, native.Q8],
        "Q5_0": [native.Q5M, native.Q5M, native.Q5],
        "F16": [native.F32],  # dequantised as a whole
    }[kinds[1]]
    assert [p.kind for p in attention.out.parts] == [native.BLOCK_KINDS[kinds[0]]]
    assert ours.weights_bytes < exact.weights_bytes
    tokens = [5, 9, 200, 31, 7, 44, 45, 46, 47, 48, 49, 50]
    a, b = run(ours, tokens), run(exact, tokens)
    assert 0 < (a - b).abs().max() / b.abs().max() < 0.05
    alone = run(ours, tokens[:5], (2, 3))
    assert torch.equal(alone, run(ours, tokens[:5], (2, 3)))


@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q6_K"), ("Q5_K", "Q6_K"), ("Q2_K", "Q4_K"), ("Q3_K", "Q5_K")], ids="+".join
)
def test_superblocks_are_used_as_they_are(tmp_path, kinds):
    """Files mix superblocks as llama.cpp's Q4_K_M, Q5_K_M, Q2_K and Q3_K_M do. Their bytes equal
    those that `info` shows beforehand."""
    tensors = write_llama(
        *(tmp_path, kinds, 256, 512, lambda *given: any_blocks(*given, size=1e-4)),
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ours, exact = load(tmp_path / "model.gguf", kernels="cpu"), load(tmp_path / "model.gguf")
    first, last = (native.BLOCK_KINDS[kind] for kind in kinds)
    assert [p.kind for p in ours.decoder.layers[1].attention.qkv.parts] == [first, first, last]
    assert {form.name for form in ours.forms} == set(kinds)
    norms = sum(v.size for v, kind in tensors.values() if kind == "F32") * 4
    table = ours.decoder.layers[0].attention.heads.cos_sin
    planned = ours.description.gguf_bytes(4)
    assert (
        ours.weights_bytes - table.numel() * 4
        == planned
        == sum(f.num_bytes for f in ours.forms) + norms
    )
    tokens = [5, 9, 200, 31, 7, 44, 45, 46, 47, 48, 49, 50]
    a, b = run(ours, tokens), run(exact, tokens)
    assert 0 < (a - b).abs().max() / b.abs().max() < 0.05


@pytest.mark.parametrize(
    "kinds", [("Q2_K", "Q3_K"), ("Q4_K", "Q6_K"), ("MXFP4", "Q8_0")], ids="+".join
)
def test_experts_are_used_as_they_are(tmp_path, kinds):
    """Each token passes all experts, since inputs of 8 bits may choose another one of two that are near."""
    sizes = dict(
        hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2
    )
    tiny_models.write(
        tmp_path / "hf", "mixtral", num_local_experts=3, num_experts_per_tok=3, **sizes
    )
    spec, rng, tensors = read_spec(tmp_path / "hf").spec, np.random.default_rng(0), {}
    shapes = parameters(spec)
    for name, place in find_gguf_family("llama").gguf.names(spec).items():
        if place.target not in shapes:
            continue
        rows, *inner = shapes[place.target]
        rows = place.rows or rows // (place.copies or 1)
        shape = (rows, *inner) if place.copies is None else (place.copies, rows, *inner)
        kind = (
            "F32"
            if not inner or "gate_inp" in name
            else kinds[1]
            if "down" in name or "token" in name
            else kinds[0]
        )
        values = (
            any_blocks(rng, kind, math.prod(shape[:-1]), shape[-1], size=1e-4)
            if kind != "F32"
            else None
        )
        if kind == "MXFP4":
            values.reshape(-1, 17)[:, 0] = rng.integers(118, 121, values.size // 17)
        made = rng.standard_normal(shape) if inner else np.ones(shape)
        tensors[name] = (made if values is None else values.reshape(*shape[:-1], -1), kind)
    metadata = {
        **LEAST,
        "block_count": 2,
        "embedding_length": 256,
        "feed_forward_length": 256,
        "attention.head_count_kv": 2,
    }
    metadata |= {"expert_count": 3, "expert_used_count": 3}
    write(tmp_path / "model.gguf", tensors, **{f"llama.{k}": v for k, v in metadata.items()})
    ours, exact = load(tmp_path / "model.gguf", kernels="cpu"), load(tmp_path / "model.gguf")
    assert is_program(ours.decoder)
    mlp = ours.decoder.layers[1].mlp
    assert [p.kind for p in mlp.up.parts + mlp.down.parts] == [
        native.BLOCK_KINDS[kind] for kind in kinds
    ]
    tokens = [5, 9, 200, 31, 7, 44, 45, 46, 47, 48, 49, 50]
    a, b = run(ours, tokens), run(exact, tokens)
    assert 0 < (a - b).abs().max() / b.abs().max() < 0.05
    ops = HostExpertOps(CpuOps(), NativeOps(2), platform_of(CPU))  # the others are torch's
    hosted = load_model(
        tmp_path / "model.gguf", ops=ops, device=CPU, dtype=torch.float32, host_experts=2
    )
    own = hosted.decoder.layers[1].mlp
    assert [p.kind for p in own.up.parts + own.down.parts] == [
        native.BLOCK_KINDS[kind] for kind in kinds
    ]
    assert isinstance(hosted.decoder.layers[1].attention.qkv, PackedLinear)
    assert (run(hosted, tokens) - b).abs().max() / b.abs().max() < 0.05


def test_a_token_does_not_depend_on_what_else_is_in_the_batch(tmp_path):
    tiny_models.write(tmp_path, "llama", initializer_range=0.1)
    model = load(tmp_path, kernels="cpu", dtype=torch.bfloat16)
    prompts = [
        [(7 * i + j) % 280 for j in range(n)] for i, n in enumerate((1, 9, 150, 20, 3, 2, 1, 70))
    ]
    batch = Paged(model, len(prompts), 200)
    together = batch.step(list(enumerate(prompts)))
    after = batch.step([(i, [11]) for i in range(len(prompts))])
    for i, prompt in enumerate(prompts):
        single = Paged(model, 1, 200)
        assert torch.equal(single.step([(0, prompt)])[0], together[i])
        assert torch.equal(single.step([(0, [11])])[0], after[i])


def test_an_engine_reads_the_header_once(tmp_path, monkeypatch):
    """One reading serves the model's description, its weights and its tokenizer."""
    opened, reading = [], GGUFFile.__init__

    def read(self, path):
        opened.append(path)
        reading(self, path)

    tokens = golden_tokens()["byte_level"]
    sizes = dict(hidden_size=32, intermediate_size=64, vocab_size=len(tokens["tokens"]))
    tiny_models.write(tmp_path / "hf", "llama", **sizes)
    spec = read_spec(tmp_path / "hf").spec
    shapes = parameters(spec)
    tensors = {
        name: (np.ones((*(s if place.rows is None else (place.rows, *s[1:])),)), "F32")
        for name, place in find_gguf_family("llama").gguf.names(spec).items()
        if (s := shapes.get(place.target)) is not None
    }
    metadata = {
        f"llama.{k}": v
        for k, v in {**LEAST, "block_count": 2, "attention.head_count_kv": 2}.items()
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in tokens.items()}
    write(tmp_path / "model.gguf", tensors, **metadata)
    monkeypatch.setattr(GGUFFile, "__init__", read)
    with LLM(str(tmp_path / "model.gguf"), device="cpu", max_model_len=64) as llm:
        assert llm.get_tokenizer().encode("a b")
    assert opened == [tmp_path / "model.gguf"]
