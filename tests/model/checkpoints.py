# ruff: noqa: E501
"""Configs of real checkpoints of the families that are read here, from their published shapes: a base with the keys that the family's
authors write, and a row for each checkpoint. `CONFIGS` are the configs by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILES = Path(__file__).parents[2] / "benchmarks" / "configs"
NO_MODELS = {"llama-3-8b-eagle3", "tiny"}  # draft heads, and a shape of our own
BY_FILE = {path.parent.name: json.loads(path.read_text()) for path in FILES.glob("*/config.json")}
CONFIGS: dict[str, dict[str, Any]] = {
    name: config for name, config in BY_FILE.items() if name not in NO_MODELS
}


def add(base: dict[str, Any], keys: str, **rows: tuple[Any, ...]) -> None:
    """`keys` are those whose values a row holds; a dict at its end has more. Underscores of a row's name stand for hyphens."""
    names = keys.split()
    for name, row in rows.items():
        values, more = (row[:-1], row[-1]) if row and isinstance(row[-1], dict) else (row, {})
        name = name.replace("_", "-")
        assert name not in CONFIGS, name
        CONFIGS[name] = {**base, **dict(zip(names, values, strict=True)), **more}


SIZES = "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size max_position_embeddings"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "pretraining_tp": 1,
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02,
    "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True,
}  # fmt: skip
LLAMA3 = {
    **LLAMA,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "torch_dtype": "bfloat16",
}
SCALED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA31 = {**LLAMA3, "rope_scaling": SCALED}
SMALL32 = {
    "tie_word_embeddings": True,
    "mlp_bias": False,
    "rope_scaling": {**SCALED, "factor": 32.0},
}
LINEAR4 = {"rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000}
add(LLAMA, SIZES,
    llama_7b=(32, 4096, 11008, 32, 32, 32000, 2048, {"rms_norm_eps": 1e-6, "max_sequence_length": 2048}),
    llama_13b=(40, 5120, 13824, 40, 40, 32000, 2048, {"rms_norm_eps": 1e-6, "pad_token_id": -1}),
    llama_30b=(60, 6656, 17920, 52, 52, 32000, 2048, {"rms_norm_eps": 1e-6}),
    llama_65b=(80, 8192, 22016, 64, 64, 32000, 2048),
    llama_2_7b=(32, 4096, 11008, 32, 32, 32000, 4096),
    llama_2_13b=(40, 5120, 13824, 40, 40, 32000, 4096),
    llama_2_70b=(80, 8192, 28672, 64, 8, 32000, 4096),
    codellama_7b=(32, 4096, 11008, 32, 32, 32016, 16384, {"rope_theta": 1e6}),
    codellama_7b_python=(32, 4096, 11008, 32, 32, 32000, 16384, {"rope_theta": 1e6}),
    codellama_13b=(40, 5120, 13824, 40, 40, 32016, 16384, {"rope_theta": 1e6}),
    codellama_34b=(48, 8192, 22016, 64, 8, 32000, 16384, {"rope_theta": 1e6}),
    codellama_70b=(80, 8192, 28672, 64, 8, 32016, 16384, {"rope_theta": 1e6}),
    tinyllama_1_1b=(22, 2048, 5632, 32, 4, 32000, 2048),
    vicuna_7b=(32, 4096, 11008, 32, 32, 32000, 4096, {"max_sequence_length": 4096}),
    vicuna_13b_16k=(40, 5120, 13824, 40, 40, 32000, 4096, {"max_sequence_length": 16384, "rope_scaling": {"factor": 4.0,
        "type": "linear"}}),
    longchat_7b_32k=(32, 4096, 11008, 32, 32, 32000, 4096, {"rope_scaling": {"factor": 8.0, "type": "linear"}}),
    open_llama_3b=(26, 3200, 8640, 32, 32, 32000, 2048, {"rms_norm_eps": 1e-6}),
    open_llama_7b=(32, 4096, 11008, 32, 32, 32000, 2048, {"rms_norm_eps": 1e-6}),
    open_llama_13b=(40, 5120, 13824, 40, 40, 32000, 2048, {"rms_norm_eps": 1e-6}),
    amber_7b=(32, 4096, 11008, 32, 32, 32000, 2048, {"rms_norm_eps": 1e-6}),
    orca_2_7b=(32, 4096, 11008, 32, 32, 32003, 4096),
    nous_hermes_llama2_13b=(40, 5120, 13824, 40, 40, 32032, 4096),
    solar_10_7b=(48, 4096, 14336, 32, 8, 32000, 4096),
    yarn_llama_2_7b_64k=(32, 4096, 11008, 32, 32, 32000, 4096, {"rope_scaling": {"factor": 16.0,
        "original_max_position_embeddings": 4096, "type": "yarn", "finetuned": True}, "max_position_embeddings": 65536}),
    yi_6b=(32, 4096, 11008, 32, 4, 64000, 4096, {"rope_theta": 5e6}),
    yi_6b_200k=(32, 4096, 11008, 32, 4, 64000, 200000, {"rope_theta": 1e7}),
    yi_9b=(48, 4096, 11008, 32, 4, 64000, 4096, {"rope_theta": 1e4}),
    yi_1_5_9b=(48, 4096, 11008, 32, 4, 64000, 4096, {"rope_theta": 5e6}),
    yi_34b=(60, 7168, 20480, 56, 8, 64000, 4096, {"rope_theta": 5e6}),
    yi_34b_200k=(60, 7168, 20480, 56, 8, 64000, 200000, {"rope_theta": 1e7}),
    deepseek_llm_7b=(30, 4096, 11008, 32, 32, 102400, 4096, {"rms_norm_eps": 1e-6}),
    deepseek_llm_67b=(95, 8192, 22016, 64, 8, 102400, 4096, {"rms_norm_eps": 1e-6}),
    deepseek_coder_1_3b=(24, 2048, 5504, 16, 16, 32256, 16384, LINEAR4),
    deepseek_coder_6_7b=(32, 4096, 11008, 32, 32, 32256, 16384, LINEAR4),
    deepseek_coder_33b=(62, 7168, 19200, 56, 8, 32256, 16384, LINEAR4),
    granite_3b_code=(32, 2560, 10240, 32, 32, 49152, 2048, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings":
        True}),
    granite_8b_code=(36, 4096, 14336, 32, 8, 49152, 4096, {"attention_bias": True, "mlp_bias": True, "rope_theta": 1e7}),
    h2o_danube3_500m=(16, 1536, 4096, 16, 8, 32000, 8192, {"head_dim": 96, "rope_theta": 1e5}),
    h2o_danube3_4b=(24, 3840, 10240, 32, 8, 32000, 8192, {"head_dim": 120, "rope_theta": 1e5}),
    falcon3_1b=(18, 2048, 8192, 8, 4, 131072, 8192, {"head_dim": 256, "rope_theta": 1000042, "mlp_bias": False,
        "rms_norm_eps": 1e-6}),
    falcon3_3b=(22, 3072, 9216, 12, 4, 131072, 32768, {"head_dim": 256, "rope_theta": 1000042, "mlp_bias": False,
        "rms_norm_eps": 1e-6}),
    falcon3_7b=(28, 3072, 23040, 12, 4, 131072, 32768, {"head_dim": 256, "rope_theta": 1000042, "mlp_bias": False,
        "rms_norm_eps": 1e-6}),
    falcon3_10b=(40, 3072, 23040, 12, 4, 131072, 32768, {"head_dim": 256, "rope_theta": 1000042, "mlp_bias": False,
        "rms_norm_eps": 1e-6}),
    smollm_135m=(30, 576, 1536, 9, 3, 49152, 2048, {"tie_word_embeddings": True}),
    smollm_360m=(32, 960, 2560, 15, 5, 49152, 2048, {"tie_word_embeddings": True}),
    smollm_1_7b=(24, 2048, 8192, 32, 32, 49152, 2048, {"tie_word_embeddings": True}),
    smollm2_135m=(30, 576, 1536, 9, 3, 49152, 8192, {"rope_theta": 1e5, "tie_word_embeddings": True, "is_llama_config":
        True, "rope_interleaved": False, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}),
    smollm2_360m=(32, 960, 2560, 15, 5, 49152, 8192, {"rope_theta": 1e5, "tie_word_embeddings": True, "is_llama_config":
        True, "rope_interleaved": False}),
    smollm2_1_7b=(24, 2048, 8192, 32, 32, 49152, 8192, {"rope_theta": 130000, "tie_word_embeddings": True}),
)  # fmt: skip
add(LLAMA3, SIZES, hermes_2_pro_llama_3_8b=(32, 4096, 14336, 32, 8, 128288, 8192))
add(LLAMA31, SIZES,
    llama_3_1_8b=(32, 4096, 14336, 32, 8, 128256, 131072, {"mlp_bias": False}),
    llama_3_1_70b=(80, 8192, 28672, 64, 8, 128256, 131072, {"mlp_bias": False}),
    llama_3_1_405b=(126, 16384, 53248, 128, 8, 128256, 131072, {"mlp_bias": False}),
    llama_3_3_70b=(80, 8192, 28672, 64, 8, 128256, 131072, {"head_dim": 128, "mlp_bias": False}),
    llama_3_2_3b=(28, 3072, 8192, 24, 8, 128256, 131072, {**SMALL32, "head_dim": 128}),
    deepseek_r1_distill_llama_8b=(32, 4096, 14336, 32, 8, 128256, 131072),
    deepseek_r1_distill_llama_70b=(80, 8192, 28672, 64, 8, 128256, 131072),
    nemotron_nano_8b_v1=(32, 4096, 14336, 32, 8, 128256, 131072, {"head_dim": 128}),
)  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
OLD_MISTRAL = {"sliding_window": 4096, "rope_theta": 10000.0}
add(MISTRAL, SIZES,
    mistral_7b_v0_1=(32, 4096, 14336, 32, 8, 32000, 32768, OLD_MISTRAL),
    mistral_7b_v0_2=(32, 4096, 14336, 32, 8, 32000, 32768),
    mistral_7b_v0_3=(32, 4096, 14336, 32, 8, 32768, 32768),
    zephyr_7b=(32, 4096, 14336, 32, 8, 32000, 32768, {**OLD_MISTRAL, "pad_token_id": 2}),
    openhermes_2_5=(32, 4096, 14336, 32, 8, 32002, 32768, {**OLD_MISTRAL, "eos_token_id": 32000}),
    starling_lm_7b=(32, 4096, 14336, 32, 8, 32002, 8192, {**OLD_MISTRAL, "eos_token_id": 32000}),
    mistral_nemo=(40, 5120, 14336, 32, 8, 131072, 1024000, {"head_dim": 128}),
    minitron_8b=(40, 4096, 11520, 32, 8, 131072, 8192, {"head_dim": 128}),
    mistral_small_24b=(40, 5120, 32768, 32, 8, 131072, 32768, {"head_dim": 128, "rope_theta": 1e8}),
    devstral_small=(40, 5120, 32768, 32, 8, 131072, 131072, {"head_dim": 128, "rope_theta": 1e9}),
    codestral_22b=(56, 6144, 16384, 48, 8, 32768, 32768),
    mistral_large_2407=(88, 12288, 28672, 96, 8, 32768, 131072, {"head_dim": 128}),
    h2o_danube_1_8b=(24, 2560, 6912, 32, 8, 32000, 16384, {"sliding_window": 4096, "rope_theta": 10000}),
    h2o_danube2_1_8b=(24, 2560, 6912, 32, 8, 32000, 8192, {"rope_theta": 10000}),
    yarn_mistral_7b_128k=(32, 4096, 14336, 32, 8, 32000, 32768, {**OLD_MISTRAL, "sliding_window": 131072,
        "max_position_embeddings": 131072, "rope_scaling": {"factor": 16.0, "finetuned": True,
        "original_max_position_embeddings": 8192, "type": "yarn"}}),
)  # fmt: skip
add(
    BY_FILE["mixtral-8x7b"],
    SIZES,
    mixtral_8x22b=(56, 6144, 16384, 48, 8, 32768, 65536),
    nous_hermes_2_mixtral=(32, 4096, 14336, 32, 8, 32002, 32768),
)
QWEN2 = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "initializer_range": 0.02, "rope_theta": 1000000.0, "use_sliding_window": False,
    "sliding_window": 32768, "max_window_layers": 28, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
add(QWEN2, SIZES,
    qwen1_5_0_5b=(24, 1024, 2816, 16, 16, 151936, 32768, {**TIED, "max_window_layers": 21}),
    qwen1_5_1_8b=(24, 2048, 5504, 16, 16, 151936, 32768),
    qwen1_5_4b=(40, 2560, 6912, 20, 20, 151936, 32768, {"rope_theta": 5e6}),
    qwen1_5_7b=(32, 4096, 11008, 32, 32, 151936, 32768),
    qwen1_5_14b=(40, 5120, 13696, 40, 40, 152064, 32768),
    qwen1_5_32b=(64, 5120, 27392, 40, 8, 152064, 32768),
    qwen1_5_72b=(80, 8192, 24576, 64, 64, 152064, 32768),
    qwen1_5_110b=(80, 8192, 49152, 64, 8, 152064, 32768),
    codeqwen1_5_7b=(32, 4096, 13440, 32, 4, 92416, 65536),
    qwen2_0_5b=(24, 896, 4864, 14, 2, 151936, 131072, {**TIED, "sliding_window": 131072}),
    qwen2_1_5b=(28, 1536, 8960, 12, 2, 151936, 131072, TIED),
    qwen2_7b=(28, 3584, 18944, 28, 4, 152064, 131072, {"sliding_window": 131072}),
    qwen2_72b=(80, 8192, 29568, 64, 8, 152064, 131072, {"max_window_layers": 80}),
    qwen2_5_0_5b=(24, 896, 4864, 14, 2, 151936, 32768, {**TIED, "use_mrope": False}),
    qwen2_5_1_5b=(28, 1536, 8960, 12, 2, 151936, 131072, {**TIED, "use_mrope": False}),
    qwen2_5_3b=(36, 2048, 11008, 16, 2, 151936, 32768, {**TIED, "max_window_layers": 36}),
    qwen2_5_7b=(28, 3584, 18944, 28, 4, 152064, 131072, {"use_mrope": False}),
    qwen2_5_14b=(48, 5120, 13824, 40, 8, 152064, 131072, {"max_window_layers": 48}),
    qwen2_5_32b=(64, 5120, 27648, 40, 8, 152064, 131072, {"max_window_layers": 64}),
    qwen2_5_72b=(80, 8192, 29568, 64, 8, 152064, 32768, {"max_window_layers": 70}),
    qwen2_5_math_7b=(28, 3584, 18944, 28, 4, 152064, 4096, {"rope_theta": 10000}),
    qwen2_5_coder_7b_yarn=(28, 3584, 18944, 28, 4, 152064, 32768, {"rope_scaling": {"factor": 4.0,
        "original_max_position_embeddings": 32768, "type": "yarn"}}),
    qwq_32b=(64, 5120, 27648, 40, 8, 152064, 40960, {"max_window_layers": 64}),
    deepseek_r1_distill_qwen_1_5b=(28, 1536, 8960, 12, 2, 151936, 131072, {"rope_theta": 10000, "use_mrope": False}),
    deepseek_r1_distill_qwen_7b=(28, 3584, 18944, 28, 4, 152064, 131072, {"rope_theta": 10000}),
    deepseek_r1_distill_qwen_14b=(48, 5120, 13824, 40, 8, 152064, 131072),
    deepseek_r1_distill_qwen_32b=(64, 5120, 27648, 40, 8, 152064, 131072),
)  # fmt: skip
QWEN3 = {
    **QWEN2,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "attention_bias": False,
    "rope_scaling": None,
    "sliding_window": None,
}
add(QWEN3, SIZES,
    qwen3_0_6b=(28, 1024, 3072, 16, 8, 151936, 40960, TIED),
    qwen3_1_7b=(28, 2048, 6144, 16, 8, 151936, 40960, TIED),
    qwen3_4b=(36, 2560, 9728, 32, 8, 151936, 40960, {**TIED, "max_window_layers": 36}),
    qwen3_4b_2507=(36, 2560, 9728, 32, 8, 151936, 262144, {**TIED, "rope_theta": 5000000}),
    qwen3_8b=(36, 4096, 12288, 32, 8, 151936, 40960, {"max_window_layers": 36}),
    qwen3_14b=(40, 5120, 17408, 40, 8, 151936, 40960, {"max_window_layers": 40}),
    qwen3_32b=(64, 5120, 25600, 64, 8, 151936, 40960, {"max_window_layers": 64}),
    qwen3_embedding_0_6b=(28, 1024, 3072, 16, 8, 151669, 32768, TIED),
    deepseek_r1_0528_qwen3_8b=(36, 4096, 12288, 32, 8, 151936, 131072, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 32768, "attn_factor": 0.8782488562869419}}),
)  # fmt: skip
MOE = f"{SIZES} moe_intermediate_size num_experts num_experts_per_tok"
add(BY_FILE["qwen3-30b-a3b"], MOE,
    qwen3_235b_a22b=(94, 4096, 12288, 64, 4, 151936, 40960, 1536, 128, 8),
    qwen3_30b_a3b_2507=(48, 2048, 6144, 32, 4, 151936, 262144, 768, 128, 8, {"rope_theta": 1e7}),
    qwen3_coder_30b_a3b=(48, 2048, 5472, 32, 4, 151936, 262144, 768, 128, 8, {"rope_theta": 1e7, "qkv_bias": False,
        "use_qk_norm": True, "shared_expert_intermediate_size": 0}),
    qwen3_coder_480b=(62, 6144, 8192, 96, 8, 151936, 262144, 2560, 160, 8, {"rope_theta": 1e7, "qkv_bias": False,
        "use_qk_norm": True, "shared_expert_intermediate_size": 0}),
)  # fmt: skip
add(BY_FILE["qwen1.5-moe-a2.7b"], MOE,
    qwen2_57b_a14b=(28, 3584, 18944, 28, 4, 151936, 32768, 2560, 64, 8, {"shared_expert_intermediate_size": 20480,
        "max_window_layers": 28}),
)  # fmt: skip
GEMMA = {
    "model_type": "gemma", "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 1,
    "head_dim": 256, "hidden_act": "gelu", "initializer_range": 0.02, "pad_token_id": 0, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0,
    "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
add(GEMMA, SIZES,
    gemma_2b=(18, 2048, 16384, 8, 1, 256000, 8192),
    gemma_7b=(28, 3072, 24576, 16, 16, 256000, 8192),
    codegemma_7b=(28, 3072, 24576, 16, 16, 256000, 8192, {"hidden_activation": "gelu_pytorch_tanh"}),
    gemma_1_1_2b=(18, 2048, 16384, 8, 1, 256000, 8192, {"hidden_act": "gelu_pytorch_tanh", "hidden_activation":
        "gelu_pytorch_tanh"}),
)  # fmt: skip
add(BY_FILE["gemma-2-9b"], SIZES,
    gemma_2_2b=(26, 2304, 9216, 8, 4, 256000, 8192),
    gemma_2_27b=(46, 4608, 36864, 32, 16, 256000, 8192, {"head_dim": 128, "query_pre_attn_scalar": 144}),
    gemma_2_2b_jpn=(26, 2304, 9216, 8, 4, 256000, 8192, {"dtype": "bfloat16"}),
)  # fmt: skip
GEMMA3 = {
    **GEMMA, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0, "sliding_window": 512, "cache_implementation": "hybrid",
}  # fmt: skip
del GEMMA3["hidden_act"]
KINDS = ["sliding_attention"] * 5 + ["full_attention"]
add(GEMMA3, SIZES,
    gemma_3_1b=(26, 1152, 6912, 4, 1, 262144, 32768, {"sliding_window_pattern": 6}),
    gemma_3_270m=(18, 640, 2048, 4, 1, 262144, 32768, {"_sliding_window_pattern": 6, "layer_types": KINDS * 3,
        "use_bidirectional_attention": False}),
    medgemma_27b_text=(62, 5376, 21504, 32, 16, 262144, 131072, {"head_dim": 128, "query_pre_attn_scalar": 168,
        "sliding_window": 1024, "sliding_window_pattern": 6, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}),
)  # fmt: skip
add(
    BY_FILE["phi-2"],
    SIZES,
    phi_1=(24, 2048, 8192, 32, None, 51200, 2048, {"partial_rotary_factor": 0.5}),
    phi_1_5=(24, 2048, 8192, 32, None, 51200, 2048, {"partial_rotary_factor": 0.5}),
)
LONG = {
    "type": "longrope",
    "short_factor": [1.0 + i / 48 for i in range(48)],
    "long_factor": [1.0 + i for i in range(48)],
}
PHI4MINI = {
    "partial_rotary_factor": 0.75,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "sliding_window": 262144,
}
add(BY_FILE["phi-3-mini-4k"], SIZES,
    phi_3_mini_128k=(32, 3072, 8192, 32, 32, 32064, 131072, {"rope_scaling": LONG, "sliding_window": 262144}),
    phi_3_5_mini=(32, 3072, 8192, 32, 32, 32064, 131072, {"rope_scaling": LONG, "sliding_window": 262144}),
    phi_3_medium_4k=(40, 5120, 17920, 40, 10, 32064, 4096),
    phi_4=(40, 5120, 17920, 40, 10, 100352, 16384, {"rope_theta": 250000, "sliding_window": None,
        "original_max_position_embeddings": 16384}),
    phi_4_reasoning=(40, 5120, 17920, 40, 10, 100352, 32768, {"rope_theta": 500000, "sliding_window": None,
        "original_max_position_embeddings": 32768}),
    phi_4_mini=(32, 3072, 8192, 24, 8, 200064, 131072, {**PHI4MINI, "rope_scaling": {**LONG, "short_factor": [1.0] * 48}}),
)  # fmt: skip
FALCON = "num_hidden_layers hidden_size num_attention_heads vocab_size"
add(BY_FILE["falcon-7b"], FALCON,
    falcon_rw_1b=(24, 2048, 32, 50304, {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}),
    falcon_7b_instruct=(32, 4544, 71, 65024, {"apply_residual_connection_post_layernorm": False}),
)  # fmt: skip
add(BY_FILE["falcon-40b"], FALCON,
    falcon_180b=(80, 14848, 232, 65024),
    falcon_40b_instruct=(60, 8192, 128, 65024),
    falcon_11b=(60, 4096, 32, 65024, {"num_kv_heads": 8, "ff_factor": 4, "ffn_hidden_size": 16384,
        "max_position_embeddings": 8192, "num_ln_in_parallel_attn": 1, "rope_theta": 500042.0, "activation": "gelu",
        "multi_query": True, "rope_scaling": None}),
)  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new", "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "n_ctx": 1024, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
add(GPT2, "n_layer n_embd n_head",
    gpt2=(12, 768, 12),
    gpt2_medium=(24, 1024, 16, {"n_special": 0, "predict_special_tokens": True}),
    gpt2_large=(36, 1280, 20),
    gpt2_xl=(48, 1600, 25, {"output_past": True}),
    distilgpt2=(6, 768, 12, {"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}),
    biogpt2_small=(12, 768, 12, {"n_inner": None, "reorder_and_upcast_attn": False, "scale_attn_by_inverse_layer_idx":
        False, "scale_attn_weights": True}),
)  # fmt: skip
add(
    BY_FILE["gpt-j-6b"],
    "n_layer n_embd n_head vocab_size",
    gpt4all_j=(28, 4096, 16, 50400),
    gpt_jt_6b=(28, 4096, 16, 50400, {"gradient_checkpointing": False}),
)
NEOX = {**BY_FILE["gpt-neox-20b"], "hidden_act": "gelu", "use_parallel_residual": True}
add(NEOX, "num_hidden_layers hidden_size intermediate_size num_attention_heads vocab_size",
    pythia_14m=(6, 128, 512, 4, 50304),
    pythia_70m=(6, 512, 2048, 8, 50304),
    pythia_160m=(12, 768, 3072, 12, 50304),
    pythia_410m=(24, 1024, 4096, 16, 50304),
    pythia_1b=(16, 2048, 8192, 8, 50304),
    pythia_1_4b=(24, 2048, 8192, 16, 50304),
    pythia_2_8b=(32, 2560, 10240, 32, 50304),
    pythia_6_9b=(32, 4096, 16384, 32, 50432),
    pythia_12b=(36, 5120, 20480, 40, 50688),
    dolly_v2_3b=(32, 2560, 10240, 32, 50280),
    dolly_v2_12b=(36, 5120, 20480, 40, 50280, {"custom_pipelines": {"text-generation": {"impl": "x.Y", "pt":
        "AutoModelForCausalLM", "tf": "TFAutoModelForCausalLM"}}}),
    redpajama_3b=(32, 2560, 10240, 32, 50432, {"rotary_pct": 1.0, "use_parallel_residual": False}),
    stablelm_base_alpha_3b=(16, 4096, 16384, 32, 50688, {"max_position_embeddings": 4096}),
    polyglot_ko_5_8b=(28, 4096, 16384, 16, 30080, {"rotary_pct": 0.25, "num_steps": "global_step320000"}),
    japanese_neox_3_6b=(36, 2816, 11264, 22, 32000, {"rotary_pct": 1.0, "use_parallel_residual": False}),
)  # fmt: skip
add(BY_FILE["opt-13b"], "num_hidden_layers hidden_size word_embed_proj_dim ffn_dim num_attention_heads",
    opt_125m=(12, 768, 768, 3072, 12),
    opt_1_3b=(24, 2048, 2048, 8192, 32),
    opt_2_7b=(32, 2560, 2560, 10240, 32),
    opt_6_7b=(32, 4096, 4096, 16384, 32),
    opt_30b=(48, 7168, 7168, 28672, 56),
    opt_66b=(64, 9216, 9216, 36864, 72),
    galactica_1_3b=(24, 2048, 2048, 8192, 32, {"activation_function": "gelu", "vocab_size": 50000}),
)  # fmt: skip
add(BY_FILE["bloom-7b1"], "n_layer n_embed num_attention_heads",
    bloom_560m=(24, 1024, 16),
    bloom_1b1=(24, 1536, 16),
    bloom_1b7=(24, 2048, 16),
    bloom_3b=(30, 2560, 32),
    bloom_176b=(70, 14336, 112),
    bloomz_560m=(24, 1024, 16),
)  # fmt: skip
add(BY_FILE["mpt-7b"], "n_layers d_model n_heads",
    mpt_7b_instruct=(32, 4096, 32),
    mpt_30b=(48, 7168, 64, {"max_seq_len": 8192}),
    mpt_7b_storywriter=(32, 4096, 32, {"max_seq_len": 65536, "attn_config": {**BY_FILE["mpt-7b"]["attn_config"],
        "alibi_bias_max": 16, "clip_qkv": 6}}),
)  # fmt: skip
add(BY_FILE["starcoder-15b"], "n_layer n_embd n_head n_inner n_positions vocab_size",
    starcoderbase_1b=(24, 2048, 16, 8192, 8192, 49152),
    starcoderbase_3b=(36, 2816, 22, 11264, 8192, 49152),
    starcoderbase_7b=(42, 4096, 32, 16384, 8192, 49152),
    gpt_bigcode_santacoder=(24, 2048, 16, 8192, 2048, 49280),
    tiny_starcoder_py=(20, 768, 12, 3072, 8192, 49152),
)  # fmt: skip
add(
    BY_FILE["starcoder2-3b"],
    SIZES,
    starcoder2_7b=(32, 4608, 18432, 36, 4, 49152, 16384, {"rope_theta": 1e6}),
    starcoder2_15b=(40, 6144, 24576, 48, 4, 49152, 16384, {"rope_theta": 1e5}),
)
add(BY_FILE["olmo-2-7b"], SIZES,
    olmo_2_1b=(16, 2048, 8192, 16, 16, 100352, 4096),
    olmo_2_13b=(40, 5120, 13824, 40, 40, 100352, 4096),
    olmo_2_32b=(64, 5120, 27648, 40, 8, 100352, 4096),
)  # fmt: skip
OLMO3 = {
    **BY_FILE["olmo-2-7b"],
    "model_type": "olmo3",
    "architectures": ["Olmo3ForCausalLM"],
    "sliding_window": 4096,
    "dtype": "bfloat16",
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
}
OLMO3 |= {
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    }
}
add(
    OLMO3,
    SIZES,
    olmo_3_7b=(32, 4096, 11008, 32, 32, 100278, 65536),
    olmo_3_32b=(64, 5120, 27648, 40, 8, 100278, 65536, {"layer_types": OLMO3["layer_types"] * 2}),
)
add(BY_FILE["granite-3.1-8b"], SIZES,
    granite_3_0_2b=(40, 2048, 8192, 32, 8, 49155, 4096, {"attention_multiplier": 0.015625, "logits_scaling": 8.0,
        "rope_theta": 10000.0}),
    granite_3_0_8b=(40, 4096, 12800, 32, 8, 49155, 4096, {"rope_theta": 10000.0}),
    granite_3_1_2b=(40, 2048, 8192, 32, 8, 49155, 131072, {"attention_multiplier": 0.015625, "logits_scaling": 8.0,
        "rope_theta": 5e6}),
    granite_3_3_8b=(40, 4096, 12800, 32, 8, 49159, 131072),
)  # fmt: skip
add(BY_FILE["command-r"], SIZES,
    command_r_plus=(64, 12288, 33792, 96, 8, 256000, 8192, {"use_qk_norm": True, "logit_scale": 0.8333333333333334,
        "rope_theta": 75000000.0}),
    command_r_08_2024=(40, 8192, 24576, 64, 8, 256000, 131072, {"rope_theta": 4000000.0}),
    aya_23_8b=(32, 4096, 14336, 32, 8, 256000, 8192, {"rope_theta": 10000}),
    aya_23_35b=(40, 8192, 22528, 64, 64, 256000, 8192),
    aya_expanse_8b=(32, 4096, 14336, 32, 8, 256000, 8192, {"logit_scale": 0.125, "rope_theta": 10000}),
)  # fmt: skip
COHERE2 = {
    **BY_FILE["command-r"],
    "model_type": "cohere2",
    "architectures": ["Cohere2ForCausalLM"],
    "cache_implementation": "hybrid",
    "head_dim": 128,
    "layer_switch": 4,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": False,
    "rope_scaling": None,
    "rope_theta": 50000,
    "logit_scale": 0.25,
}
add(
    COHERE2,
    SIZES,
    command_r7b=(32, 4096, 14336, 32, 8, 256000, 132096),
    command_a=(64, 12288, 36864, 96, 8, 256000, 131072),
)
add(BY_FILE["deepseek-v2-lite"], "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads moe_intermediate_size n_routed_experts",
    deepseek_v2=(60, 5120, 12288, 128, 128, 1536, 160, {"q_lora_rank": 1536, "n_group": 8, "topk_group": 3, "topk_method":
        "group_limited_greedy", "routed_scaling_factor": 16.0, "ep_size": 1}),
    deepseek_coder_v2_lite=(27, 2048, 10944, 16, 16, 1408, 64, {"ep_size": 1}),
)  # fmt: skip
add(
    BY_FILE["deepseek-v3"],
    "",
    deepseek_r1=({"ep_size": 1},),
    deepseek_v3_1=({"ep_size": 1, "dtype": "bfloat16"},),
)
add(BY_FILE["gpt-oss-20b"], "num_hidden_layers num_local_experts", gpt_oss_120b=(36, 128))
GLM4 = {
    "model_type": "glm4", "architectures": ["Glm4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02,
    "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
add(GLM4, SIZES,
    glm_4_9b_0414=(40, 4096, 13696, 32, 2, 151552, 32768),
    glm_4_32b_0414=(61, 6144, 23040, 48, 2, 151552, 32768),
    glm_z1_9b=(40, 4096, 13696, 32, 2, 151552, 32768),
)  # fmt: skip
GLM = {**GLM4, "model_type": "glm", "architectures": ["GlmForCausalLM"]}
add(GLM, SIZES,
    glm_4_9b_chat_hf=(40, 4096, 13696, 32, 2, 151552, 131072, {"attention_bias": True, "rms_norm_eps": 1.5625e-7}),
    glm_edge_1_5b=(28, 2048, 6144, 16, 4, 59264, 8192),
)  # fmt: skip
GLM4MOE = {
    **GLM4,
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "use_qk_norm": False,
}
add(GLM4MOE, SIZES,
    glm_4_5_air=(46, 4096, 10944, 96, 8, 151552, 131072),
    glm_4_5=(92, 5120, 12288, 96, 8, 151552, 131072, {"n_routed_experts": 160, "first_k_dense_replace": 3,
        "moe_intermediate_size": 1536, "routed_scaling_factor": 2.5, "use_qk_norm": True}),
)  # fmt: skip
NOPE = [int((i + 1) % 4 != 0) for i in range(36)]
add(LLAMA, SIZES,
    smollm3_3b=(36, 2048, 11008, 16, 4, 128256, 65536, {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"],
        "layer_types": ["full_attention"] * 36, "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4,
        "no_rope_layers": NOPE, "rms_norm_eps": 1e-6, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window":
        False, "tie_word_embeddings": True}),
)  # fmt: skip
BERT = {**BY_FILE["minilm"], "classifier_dropout": None}
ENCODER = "num_hidden_layers hidden_size intermediate_size num_attention_heads vocab_size"
add(BERT, ENCODER,
    bert_base_uncased=(12, 768, 3072, 12, 30522, {"architectures": ["BertForMaskedLM"]}),
    bert_large_uncased=(24, 1024, 4096, 16, 30522, {"architectures": ["BertForMaskedLM"]}),
    bert_base_multilingual=(12, 768, 3072, 12, 119547, {"architectures": ["BertForMaskedLM"], "directionality": "bidi",
        "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3, "pooler_size_per_head": 128,
        "pooler_type": "first_token_transform"}),
    bge_small_en=(12, 384, 1536, 12, 30522, {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}),
    bge_base_en=(12, 768, 3072, 12, 30522),
    bge_large_en=(24, 1024, 4096, 16, 30522),
    e5_base_v2=(12, 768, 3072, 12, 30522),
    gte_small=(12, 384, 1536, 12, 30522),
    minilm_l12=(12, 384, 1536, 12, 30522),
    bge_small_zh=(4, 512, 2048, 8, 21128),
)  # fmt: skip
ROBERTA = {
    **BERT,
    "model_type": "roberta",
    "architectures": ["RobertaModel"],
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "layer_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
add(ROBERTA, ENCODER,
    roberta_base=(12, 768, 3072, 12, 50265, {"architectures": ["RobertaForMaskedLM"]}),
    roberta_large=(24, 1024, 4096, 16, 50265, {"architectures": ["RobertaForMaskedLM"]}),
    all_distilroberta=(6, 768, 3072, 12, 50265),
)  # fmt: skip
XLMR = {
    **ROBERTA,
    "model_type": "xlm-roberta",
    "architectures": ["XLMRobertaModel"],
    "output_past": True,
}
add(XLMR, ENCODER,
    xlm_roberta_base=(12, 768, 3072, 12, 250002),
    multilingual_e5_large=(24, 1024, 4096, 16, 250002),
    bge_m3=(24, 1024, 4096, 16, 250002, {"max_position_embeddings": 8194}),
)  # fmt: skip
MODERN = {
    "model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
    "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0, "eos_token_id": 50282, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": False,
    "hidden_activation": "gelu", "initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "layer_norm_eps": 1e-5, "local_attention": 128, "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "norm_bias": False,
    "norm_eps": 1e-5, "pad_token_id": 50283, "position_embedding_type": "absolute", "sep_token_id": 50282, "tie_word_embeddings": True, "torch_dtype": "float32", "vocab_size": 50368,
}  # fmt: skip
add(
    MODERN,
    "num_hidden_layers hidden_size intermediate_size num_attention_heads",
    modernbert_base=(22, 768, 1152, 12),
    modernbert_large=(28, 1024, 2624, 16),
)
add(BY_FILE["t5-large"], "num_layers num_decoder_layers d_model d_ff num_heads",
    t5_small=(6, 6, 512, 2048, 8),
    t5_base=(12, 12, 768, 3072, 12),
    t5_3b=(24, 24, 1024, 16384, 32, {"d_kv": 128}),
    t5_11b=(24, 24, 1024, 65536, 128, {"d_kv": 128}),
)  # fmt: skip
add(BY_FILE["flan-t5-small"], "num_layers num_decoder_layers d_model d_ff num_heads",
    flan_t5_base=(12, 12, 768, 2048, 12),
    flan_t5_large=(24, 24, 1024, 2816, 16),
    flan_t5_xl=(24, 24, 2048, 5120, 32),
    flan_t5_xxl=(24, 24, 4096, 10240, 64),
)  # fmt: skip
add(
    {
        "model_type": "lfm3", "architectures": ["Lfm3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 124894,
        "conv_L_cache": 7, "conv_bias": False, "dtype": "bfloat16", "eos_token_id": 124900, "head_dim": 128, "initializer_range": 0.02,
        "layer_types": ["conv", "conv", "full_attention", "conv", *["sliding_attention", "conv", "full_attention", "conv"] * 5],
        "max_position_embeddings": 128000, "norm_eps": 1e-05, "pad_token_id": 124893,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 256, "tie_word_embeddings": True, "use_attention_gate": True, "use_cache": True, "use_sandwich_norm": True,
    },
    "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size",
    lfm3_1_7b=(24, 2048, 7680, 16, 4, 128000),
)  # fmt: skip
LING = {
    "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"], "attention_dropout": 0.0, "dtype": "bfloat16", "embedding_dropout": 0.0,
    "eos_token_id": 156895, "expert_swiglu_limit_list": None, "gated_attention_proj_granularity_type": "head_wise", "group_norm_size": 1, "head_dim": 128,
    "hidden_act": "silu", "initializer_range": 0.02, "kda_lower_bound": -5.0, "kda_safe_gate": True, "kv_lora_rank": 512, "linear_silu": True,
    "max_window_layers": 20, "moe_router_enable_expert_bias": True, "mtp_loss_scaling_factor": 0, "mtp_use_kda": False, "n_group": 8, "no_kda_lora": True,
    "norm_topk_prob": True, "num_experts_per_tok": 8, "num_kv_heads_for_linear_attn": 0, "num_shared_experts": 1, "output_dropout": 0.0,
    "output_router_logits": False, "pad_token_id": 156892, "partial_rotary_factor": 0.5, "qk_head_dim": 192, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "rope_interleave": True, "rope_theta": 6000000, "rotary_dim": 64, "routed_scaling_factor": 2.5, "router_dtype": "fp32",
    "scale_router_input": False, "score_function": "sigmoid", "scoring_func": "sigmoid", "seq_aux": True, "share_expert_swiglu_limit_list": None,
    "short_conv_kernel_size": 4, "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "up_proj_norm": False, "use_bias": False,
    "use_cache": False, "use_kda_lora": False, "use_mla_nope": False, "use_nGPT": False, "use_qk_norm": True, "use_qkv_bias": False, "v_head_dim": 128,
    "value_norm": False,
}  # fmt: skip
add(LING, SIZES + " num_experts moe_intermediate_size moe_shared_expert_intermediate_size q_lora_rank layer_group_size first_k_dense_replace",
    edge0_8b_a1b=(24, 1536, 4608, 16, 16, 157184, 131072, 128, 512, 512, 256, 4, 1, {"num_nextn_predict_layers": 0,
        "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 6000000, "rope_type": "default"}}),
    ling_3_0_flash=(42, 2560, 6144, 32, 32, 157184, 262144, 512, 768, 768, None, 6, 2, {"num_nextn_predict_layers": 1, "rope_scaling": None,
        "expert_swiglu_limit_list": [0] * 34 + [4] * 9, "share_expert_swiglu_limit_list": [0] * 34 + [5] * 4 + [7] * 5}),
)  # fmt: skip
LING2 = {
    "model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"], "attention_dropout": 0.0, "eos_token_id": 156892, "pad_token_id": 156892,
    "hidden_act": "silu", "initializer_range": 0.02, "num_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "rope_scaling": None,
    "rope_theta": 600000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.52.3", "use_bias": False,
    "use_rmsnorm": True, "rms_norm_eps": 1e-06, "head_dim": 128, "use_cache": True, "use_qkv_bias": False, "embedding_dropout": 0.0,
    "output_dropout": 0.0, "partial_rotary_factor": 0.5, "router_dtype": "fp32", "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "use_qk_norm": True, "score_function": "sigmoid", "num_nextn_predict_layers": 0,
    "mtp_loss_scaling_factor": 0, "num_experts": 256,
}  # fmt: skip
add(LING2, SIZES + " moe_intermediate_size moe_shared_expert_intermediate_size first_k_dense_replace",
    ling_mini_2_0=(20, 2048, 5120, 16, 4, 157184, 32768, 512, 512, 1),
    ling_flash_2_0=(32, 4096, 9216, 32, 4, 157184, 32768, 1024, 1024, 1),
)  # fmt: skip
add(
    {
        "model_type": "zamba2", "architectures": ["Zamba2ForCausalLM"], "add_bias_linear": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "chunk_size": 256, "eos_token_id": 2, "hidden_act": "gelu", "initializer_range": 0.02, "mamba_d_conv": 4, "mamba_expand": 2,
        "num_logits_to_keep": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 10000, "time_step_floor": 0.0001, "time_step_max": 0.1,
        "time_step_min": 0.001, "torch_dtype": "bfloat16", "use_cache": True, "use_conv_bias": True, "use_long_context": False,
        "use_mamba_kernels": True, "use_mem_eff_path": False, "adapter_rank": 128,
    },
    SIZES + " mamba_d_state mamba_ngroups n_mamba_heads num_mem_blocks use_mem_rope use_shared_attention_adapter layers_block_type hybrid_layer_ids",
    zamba2_1_2b=(38, 2048, 8192, 32, 32, 32000, 4096, 128, 1, 64, 1, True, True,
        ["hybrid" if i % 6 == 5 else "mamba" for i in range(38)], [5, 11, 17, 23, 29, 35]),
    zamba2_7b=(81, 3584, 14336, 32, 32, 32000, 4096, 64, 2, 112, 2, True, False,
        ["hybrid" if i in (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77) else "mamba" for i in range(81)],
        [6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77]),
)  # fmt: skip
