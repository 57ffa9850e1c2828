"""Tiny random checkpoints, written by Hugging Face transformers, and a tiny tokenizer to go with them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

VOCAB = 288

_LLAMA = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rope_theta=10000.0,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
    initializer_range=0.3,
)
_GPT = dict(
    vocab_size=VOCAB,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=256,
    bos_token_id=0,
    eos_token_id=1,
    initializer_range=0.3,
)
_SMALL = dict(vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, initializer_range=0.3)
_LAYERS = {k: v for k, v in _LLAMA.items() if k not in ("num_key_value_heads", "rope_theta")}
_LATENT = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    kv_lora_rank=24,
    q_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=20,
    max_position_embeddings=256,
    bos_token_id=0,
    eos_token_id=1,
    initializer_range=0.2,
)
_EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64)
_SCALED = dict(
    rope_theta=None,
    rope_parameters=dict(
        **dict(rope_type="yarn", rope_theta=10000.0, factor=16.0, beta_fast=32.0, beta_slow=1.0),
        **dict(original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0),
        llama_4_scaling_beta=0.3,
    ),
)

_DELTA = dict(
    head_dim=16,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    num_hidden_layers=3,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=12,
)

_MAMBA2 = {
    **_LLAMA,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_theta": None,
    **dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=12, mamba_expand=2),
}
_MAMBA = {**_SMALL, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 6}
_LFM = {
    **_LLAMA,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "rope_theta": None,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "model_type": "llama"},
    "mistral": {**_LLAMA, "model_type": "mistral", "sliding_window": 7},
    "qwen2": {
        **_LLAMA,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 16},
    "gemma3_text": {
        **_LLAMA,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "num_hidden_layers": 3,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 20,
    },
    "gemma4_text": {  # shared keys and values, inputs of the layers
        **_LLAMA,
        "model_type": "gemma4_text",
        "rope_theta": None,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "initializer_range": 0.2,
    },
    "gptj": {**_GPT, "model_type": "gptj", "rotary_dim": 4},
    "gpt2": {**_GPT, "model_type": "gpt2"},
    "gpt_bigcode": {**_GPT, "model_type": "gpt_bigcode"},
    "ministral": {**_LLAMA, "model_type": "ministral", "head_dim": 8, "sliding_window": 7},
    "mixtral": {
        **_LLAMA,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        **_LLAMA,
        **_EXPERTS,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {
        **_LLAMA,
        **_EXPERTS,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "norm_topk_prob": True,
    },
    "qwen3_next": {
        **_LLAMA,
        **_EXPERTS,
        **_DELTA,
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
    },
    "qwen3_5_text": {**_LLAMA, **_DELTA, "model_type": "qwen3_5_text"},
    "qwen3_5_moe_text": {
        **_LLAMA,
        **_EXPERTS,
        **_DELTA,
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": 48,
    },
    "lfm2": {**_LFM, "model_type": "lfm2", "block_multiple_of": 8},
    "lfm2_moe": {**_LFM, **_EXPERTS, "model_type": "lfm2_moe", "num_dense_layers": 1},
    "lfm3": {
        **_LFM,
        **dict(model_type="lfm3", head_dim=16, sliding_window=6),
        **dict(num_attention_heads=16, num_key_value_heads=4),  # schemes need 16 gates
        "layer_types": ["conv", "sliding_attention", "full_attention"],
    },
    "nemotron_h": {
        **_LLAMA,
        "model_type": "nemotron_h",
        "rope_theta": None,
        "num_hidden_layers": None,
        "head_dim": 8,
        "layers_block_type": [
            *("linear_attention", "moe", "linear_attention", "full_attention", "mlp"),
            *("linear_attention", "moe", "full_attention"),
        ],
        **dict(mamba_num_heads=8, mamba_head_dim=6, ssm_state_size=12, n_groups=2),
        **dict(n_routed_experts=8, moe_intermediate_size=32, num_experts_per_tok=3),
        **dict(moe_shared_expert_intermediate_size=48, routed_scaling_factor=2.5),
        **dict(n_group=4, topk_group=2),
    },
    "bamba": {**_MAMBA2, "model_type": "bamba", "layer_types": None, "attn_layer_indices": [1]},
    "jamba": {
        **_LLAMA,
        "model_type": "jamba",
        "num_hidden_layers": 4,
        "rope_theta": None,
        **dict(attn_layer_period=3, attn_layer_offset=1, num_experts=4, num_experts_per_tok=2),
        **dict(mamba_d_state=8, mamba_dt_rank=6),
    },
    "mamba": {**_MAMBA, "model_type": "mamba"},
    "falcon_mamba": {**_MAMBA, "model_type": "falcon_mamba"},
    "mamba2": {
        **_MAMBA,
        "model_type": "mamba2",
        "time_step_rank": None,
        **dict(num_heads=8, head_dim=8, state_size=12, n_groups=2, chunk_size=16),
    },
    "olmo_hybrid": {
        **_LLAMA,
        **_DELTA,
        "model_type": "olmo_hybrid",
        "head_dim": None,
        "linear_value_head_dim": 8,  # as many channels as keys have, which transformers' writer needs
    },
    "falcon_h1": {
        **_MAMBA2,
        "model_type": "falcon_h1",
        "layer_types": None,
        "num_hidden_layers": 2,
        "mamba_d_ssm": 48,
        "mamba_d_head": 6,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.3,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.4,
        "attention_out_multiplier": 0.6,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.8,
        "mlp_multipliers": [0.9, 0.5],
        "ssm_multipliers": [0.4, 0.5, 1.1, 1.3, 0.6],
    },
    "kimi_linear": {
        **{
            k: v
            for k, v in _LATENT.items()
            if k not in ("n_routed_experts", "first_k_dense_replace")
        },
        "model_type": "kimi_linear",
        "pad_token_id": None,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "q_lora_rank": None,
        **dict(num_experts=8, n_group=4, topk_group=2, linear_num_heads=4, linear_head_dim=12),
    },
    "bailing_hybrid": {
        **{k: v for k, v in _LATENT.items() if k not in ("n_routed_experts", "n_shared_experts")},
        **dict(model_type="bailing_hybrid", pad_token_id=None, q_lora_rank=None, head_dim=12),
        **dict(num_experts=8, n_shared_experts=1, n_group=4, topk_group=2, layer_group_size=3),
    },
    "zamba2": {
        **{k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
        **dict(model_type="zamba2", num_hidden_layers=4, num_mem_blocks=2, adapter_rank=3),
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
        **dict(use_shared_attention_adapter=True, use_mem_rope=True, mamba_d_state=12),
        **dict(n_mamba_heads=8, mamba_ngroups=2, chunk_size=16, initializer_range=0.12),
    },
    "granitemoehybrid": {
        **_MAMBA2,
        "model_type": "granitemoehybrid",
        "shared_intermediate_size": 48,
        "num_local_experts": 6,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "logits_scaling": 4.0,
    },
    "gpt_neox": {**_LAYERS, "model_type": "gpt_neox"},
    "opt": {
        **_LAYERS,
        "model_type": "opt",
        "intermediate_size": None,
        "ffn_dim": 64,
        "init_std": 0.3,
    },
    "bloom": {**_SMALL, "model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {
        **_SMALL,
        "model_type": "mpt",
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 256,
    },
    "falcon": {**_LAYERS, "model_type": "falcon", "intermediate_size": None},
    "starcoder2": {**_LLAMA, "model_type": "starcoder2", "sliding_window": 7, "rope_theta": None},
    "phi": {**_LAYERS, "model_type": "phi"},
    "phi3": {**_LLAMA, "model_type": "phi3"},
    "gemma": {**_LLAMA, "model_type": "gemma", "head_dim": 16},
    "gemma2": {
        **_LLAMA,
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 6,
        "query_pre_attn_scalar": 20,
    },
    "olmo2": {**_LLAMA, "model_type": "olmo2"},
    "olmo3": {
        **_LLAMA,
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "rope_theta": None,
    },
    "granite": {
        **_LLAMA,
        "model_type": "granite",
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "logits_scaling": 4.0,
    },
    "cohere": {**_LLAMA, "model_type": "cohere"},
    "cohere2": {**_LLAMA, "model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 6},
    "deepseek_v2": {**_LATENT, "model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek_v3": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "num_mtp_layers": 0,
        "n_group": 4,
        "topk_group": 2,
    },
    "gpt_oss": {
        **_LLAMA,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 7,
        "swiglu_limit": 1.5,
        "rope_theta": None,
    },
    "glm": {**_LLAMA, "model_type": "glm", "head_dim": 16},
    "glm4": {**_LLAMA, "model_type": "glm4", "head_dim": 16},
    "glm4_moe": {
        **_LLAMA,
        **dict(model_type="glm4_moe", head_dim=16, rope_theta=None, initializer_range=0.2),
        **dict(
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            num_mtp_layers=0,
        ),
        **dict(
            first_k_dense_replace=1, n_group=4, topk_group=2, use_qk_norm=True, attention_bias=True
        ),
    },
    "smollm3": {
        **_LLAMA,
        "model_type": "smollm3",
        "num_hidden_layers": 5,
        "tie_word_embeddings": True,
    },
    "seed_oss": {**_LLAMA, "model_type": "seed_oss", "head_dim": 16},
    "arcee": {**_LLAMA, "model_type": "arcee"},
    "helium": {**_LLAMA, "model_type": "helium", "head_dim": 8},
    "exaone4": {**_LLAMA, "model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 6},
    "cohere_compass_text": {
        **_LAYERS,
        **dict(model_type="cohere_compass_text", num_hidden_layers=4, num_key_value_heads=2),
        **dict(sliding_window=6, logit_scale=0.25),
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
        },
    },
    "ernie4_5": {**_LLAMA, "model_type": "ernie4_5", "head_dim": 16},
    "ernie4_5_moe": {
        **_LLAMA,
        **dict(model_type="ernie4_5_moe", num_hidden_layers=3, moe_intermediate_size=32),
        **dict(moe_k=3, moe_num_experts=8, initializer_range=0.2),
    },
    "minimax_m2": {
        **_LLAMA,
        **dict(model_type="minimax_m2", head_dim=16, rotary_dim=8, rope_theta=None),
        **dict(num_local_experts=8, num_experts_per_tok=3, initializer_range=0.2),
    },
    "minimax_m3_vl_text": {
        **_LLAMA,
        **dict(model_type="minimax_m3_vl_text", num_hidden_layers=3, head_dim=16, rotary_dim=8),
        **dict(num_local_experts=8, num_experts_per_tok=3, initializer_range=0.2),
        **dict(intermediate_size=32, dense_intermediate_size=64, shared_intermediate_size=32),
        **dict(index_n_heads=2, index_head_dim=16, index_block_size=4, index_topk_blocks=3),
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": {
        **_LATENT,
        "model_type": "glm4_moe_lite",
        "n_shared_experts": 1,
        "first_k_dense_replace": None,
    },
    "deepseek_v32": {
        **_LATENT,
        **dict(model_type="deepseek_v32", n_shared_experts=1, n_group=4, topk_group=2),
        **dict(index_n_heads=24, index_head_dim=16, index_topk=9),
    },
    "glm_moe_dsa": {
        **_LATENT,
        **dict(model_type="glm_moe_dsa", n_shared_experts=1, num_hidden_layers=4),
        **dict(index_n_heads=24, index_head_dim=16, index_topk=9),
        **dict(indexer_types=["full", "shared", "full", "shared"]),
    },
    "longcat_flash": {
        **{
            k: v
            for k, v in _LATENT.items()
            if k[:7] not in ("num_hid", "interme", "n_share", "first_k")
        },
        **dict(
            model_type="longcat_flash", num_layers=2, ffn_hidden_size=64, moe_topk=4, head_dim=8
        ),
        **dict(expert_ffn_hidden_size=32, zero_expert_num=4, routed_scaling_factor=1.5),
        **dict(num_experts_per_tok=None, moe_intermediate_size=None, num_key_value_heads=None),
    },
    "axk2": {
        **_LATENT,
        **dict(model_type="axk2", n_shared_experts=1, gated_norm_rank=6),
        **dict(index_n_heads=24, index_head_dim=16, index_topk=9),
    },
    "deepseek_v4": {
        **dict(
            model_type="deepseek_v4", vocab_size=VOCAB, hidden_size=32, moe_intermediate_size=32
        ),
        **dict(num_hidden_layers=4, num_attention_heads=4, head_dim=16, q_lora_rank=16),
        **dict(n_routed_experts=6, num_experts_per_tok=2, o_groups=2, o_lora_rank=12),
        **dict(index_n_heads=24, index_head_dim=16, index_topk=3, sliding_window=7),
        **dict(hc_mult=3, hc_sinkhorn_iters=4, swiglu_limit=1.5, partial_rotary_factor=0.5),
        "layer_types": [
            *("compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"),
            "compressed_sparse_attention",
        ],
        "compress_rates": {**dict(compressed_sparse_attention=4, heavily_compressed_attention=8)},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"],
        **dict(max_position_embeddings=256, bos_token_id=0, eos_token_id=1, initializer_range=0.2),
    },
    "kolibri1": {
        **{k: v for k, v in _LLAMA.items() if k != "intermediate_size"},
        **_EXPERTS,
        **dict(model_type="kolibri1", num_hidden_layers=5, head_dim=16, sliding_window=7),
        **dict(shared_expert_intermediate_size=48, moe_intermediate_size=32, initializer_range=0.2),
    },
    "laguna": {
        **{k: v for k, v in _LLAMA.items() if k != "rope_theta"},
        **_EXPERTS,
        **dict(model_type="laguna", num_hidden_layers=3, head_dim=16, sliding_window=7),
        **dict(shared_expert_intermediate_size=48, moe_routed_scaling_factor=1.5),
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        **dict(num_attention_heads_per_layer=[16, 32, 32], initializer_range=0.2),
    },
    "youtu": {
        **{k: v for k, v in _LATENT.items() if "expert" not in k and "first" not in k},
        **dict(model_type="youtu", moe_intermediate_size=None),
    },
    "dbrx": {
        **dict(model_type="dbrx", vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2),
        **dict(max_seq_len=256, bos_token_id=0, eos_token_id=1, initializer_range=0.3),
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 3},
    },
    "dots1": {
        **_LLAMA,
        **dict(model_type="dots1", head_dim=16, num_hidden_layers=3, initializer_range=0.2),
        **dict(n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3),
        **dict(moe_intermediate_size=32, first_k_dense_replace=1, n_group=4, topk_group=2),
        **dict(sliding_window=7, max_window_layers=2),
    },
    "hunyuan_v1_dense": {**_LLAMA, "model_type": "hunyuan_v1_dense", "head_dim": 16},
    "hunyuan_v1_moe": {
        **_LLAMA,
        **dict(model_type="hunyuan_v1_moe", head_dim=16, num_experts=6, moe_topk=3),
    },
    "nemotron": {**_LLAMA, "model_type": "nemotron"},
    "stablelm": {**_LLAMA, "model_type": "stablelm", "use_qkv_bias": True},
    "codegen": {**_GPT, "model_type": "codegen", "rotary_dim": 4},
    "gpt_neo": {
        **_SMALL,
        **dict(model_type="gpt_neo", hidden_size=32, num_layers=2, num_heads=4, window_size=7),
        **dict(max_position_embeddings=256, attention_types=[[["global", "local"], 1]]),
    },
    "ministral3": {**_LLAMA, **_SCALED, "model_type": "ministral3", "head_dim": 16},
    "mistral4": {
        **_LATENT,
        **_SCALED,
        "model_type": "mistral4",
        "n_shared_experts": 1,
        "num_hidden_layers": 2,
    },
    "olmoe": {**_LLAMA, "model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2},
    "flex_olmo": {**_LLAMA, "model_type": "flex_olmo", "num_experts": 6, "num_experts_per_tok": 2},
    "granitemoe": {
        **_LLAMA,
        **dict(model_type="granitemoe", attention_multiplier=0.2, residual_multiplier=0.4),
        **dict(embedding_multiplier=3.0, logits_scaling=4.0, num_local_experts=6),
    },
    "granitemoeshared": {
        **_LLAMA,
        **dict(model_type="granitemoeshared", attention_multiplier=0.2, residual_multiplier=0.4),
        **dict(num_local_experts=6, shared_intermediate_size=48),
    },
    "apertus": {**_LLAMA, "model_type": "apertus"},
    "phimoe": {
        **_LLAMA,
        **dict(model_type="phimoe", num_local_experts=6, router_jitter_noise=0.1),
        **dict(sliding_window=7, intermediate_size=32),
    },
    "olmo": {**_LLAMA, "model_type": "olmo", "clip_qkv": 0.7},
    "persimmon": {**_LAYERS, "model_type": "persimmon"},
    "xglm": {
        **_SMALL,
        **dict(model_type="xglm", d_model=32, ffn_dim=64, num_layers=2, attention_heads=4),
        **dict(max_position_embeddings=256, init_std=0.3),
    },
    "vaultgemma": {
        **_LLAMA,
        **dict(model_type="vaultgemma", head_dim=16, sliding_window=6, query_pre_attn_scalar=20),
    },
    "solar_open": {
        **{k: v for k, v in _LLAMA.items() if k != "intermediate_size"},
        **dict(model_type="solar_open", head_dim=16, initializer_range=0.2, n_routed_experts=8),
        **dict(num_experts_per_tok=3, moe_intermediate_size=32, n_group=4, topk_group=2),
    },
    "exaone_moe": {
        **_LLAMA,
        **dict(model_type="exaone_moe", num_hidden_layers=4, sliding_window=6, num_experts=8),
        **dict(num_experts_per_tok=3, moe_intermediate_size=32, initializer_range=0.2),
    },
    "cohere2_moe": {
        **_LLAMA,
        **dict(model_type="cohere2_moe", num_hidden_layers=5, sliding_window=6, head_dim=16),
        **dict(num_experts=6, num_shared_experts=2, first_k_dense_replace=1, rope_theta=None),
        **dict(initializer_range=0.2, prefix_dense_intermediate_size=48),
    },
    "internlm3": {**_LLAMA, "model_type": "internlm3", "head_dim": 16},
    "bitnet": {**_LLAMA, "model_type": "bitnet"},
    "diffllama": {
        **_LLAMA,
        "model_type": "diffllama",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "lambda_std_dev": 0.5,
    },
    "nanochat": {**_LLAMA, "model_type": "nanochat"},
    "minicpm3": {
        **{k: v for k, v in _LATENT.items() if not k.endswith("experts") and "expert" not in k},
        **dict(model_type="minicpm3", pad_token_id=None, dim_model_base=16),
        **dict(first_k_dense_replace=None, moe_intermediate_size=None, rope_theta=10000.0),
    },
    "llama4_text": {
        **_LLAMA,
        **dict(model_type="llama4_text", head_dim=16, num_hidden_layers=4, num_local_experts=6),
        **dict(intermediate_size_mlp=48, interleave_moe_layer_step=2, floor_scale=8),
        **dict(attn_scale=0.4, initializer_range=0.2),
    },
    "gemma3n_text": {
        **_LLAMA,
        **dict(model_type="gemma3n_text", rope_theta=None, num_hidden_layers=6, head_dim=16),
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        **dict(sliding_window=6, hidden_size_per_layer_input=8, vocab_size_per_layer_input=200),
        **dict(num_kv_shared_layers=2, laurel_rank=8, initializer_range=0.2),
        **dict(activation_sparsity_pattern=[0.6, 0.6, 0.0, 0.0, 0.0, 0.0]),
    },
    "cwm": {**_LLAMA, "model_type": "cwm", "num_hidden_layers": 3, "sliding_window": 7},
    "iquestcoder": {**_LLAMA, "model_type": "iquestcoder", "head_dim": 16},
    "exaone": {**_LLAMA, "model_type": "exaone"},
    "jais2": {**_LLAMA, "model_type": "jais2"},
    "hyperclovax": {
        **_LLAMA,
        **dict(model_type="hyperclovax", attention_multiplier=0.2, residual_multiplier=0.4),
        **dict(embedding_multiplier=3.0, logits_scaling=0.25),
    },
    "granite_swa": {
        **_LLAMA,
        **dict(model_type="granite_swa", attention_multiplier=0.2, residual_multiplier=0.4),
        **dict(num_hidden_layers=3, sliding_window=7, layer_rope_theta=[1e4, 0, 500.0]),
    },
    "granitemoe_swa": {
        **_LLAMA,
        **dict(model_type="granitemoe_swa", attention_multiplier=0.2, residual_multiplier=0.4),
        **dict(num_local_experts=6, shared_intermediate_size=48, sliding_window=7),
    },
    "sarvam_moe": {
        **_LLAMA,
        **dict(model_type="sarvam_moe", head_dim=16, n_routed_experts=8, num_experts_per_tok=3),
        **dict(moe_intermediate_size=32, n_shared_experts=1, initializer_range=0.2),
    },
    "sarvam_mla": {**_LATENT, "model_type": "sarvam_mla", "q_lora_rank": None},
    "axk1": {**_LATENT, **dict(model_type="axk1", n_group=4, topk_group=2)},
    "afmoe": {
        **_LLAMA,
        **_EXPERTS,
        **dict(model_type="afmoe", num_hidden_layers=3, head_dim=16, sliding_window=7),
        **dict(moe_intermediate_size=32, global_attn_every_n_layers=3, mup_enabled=True),
        **dict(initializer_range=0.2, route_scale=1.5),
    },
    "hy_v3": {**_LLAMA, **_EXPERTS, **dict(model_type="hy_v3", head_dim=16, initializer_range=0.2)},
    "mellum": {
        **_LLAMA,
        **_EXPERTS,
        **dict(model_type="mellum", head_dim=16, rope_theta=None, sliding_window=7),
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "flint": {
        **_LLAMA,
        **_EXPERTS,
        **dict(model_type="flint", num_hidden_layers=4, head_dim=16, sliding_window=7),
        **dict(shared_expert_intermediate_size=48, initializer_range=0.2),
    },
    "mimo_v2_flash": {
        **{k: v for k, v in _LLAMA.items() if k != "rope_theta"},
        **dict(model_type="mimo_v2_flash", num_hidden_layers=3, head_dim=24, v_head_dim=16),
        **dict(sliding_window=7, n_routed_experts=6, num_experts_per_tok=2, initializer_range=0.2),
        **dict(moe_intermediate_size=32, num_key_value_heads=1, attention_value_scale=0.6),
    },
    "openai_gpt": {**_GPT, "model_type": "openai-gpt"},
    "minimax": {
        **_LLAMA,
        **dict(model_type="minimax", num_hidden_layers=3, head_dim=16, num_local_experts=4),
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **{f"{x}_alpha_factor": 3.5 for x in ("full_attn", "linear_attn", "mlp")},
        **dict(block_size=16, initializer_range=0.2),
    },
}
FAMILIES["gemma4_unified_text"] = {
    **{
        k: v
        for k, v in FAMILIES["gemma4_text"].items()
        if "per_layer" not in k and "shared" not in k
    },
    **dict(model_type="gemma4_unified_text", use_double_wide_mlp=None),
}
GEMMA4_MOE = {
    **dict(hidden_size_per_layer_input=0, num_kv_shared_layers=0, attention_k_eq_v=True),
    **dict(num_global_key_value_heads=1, enable_moe_block=True, num_experts=6, top_k_experts=2),
    "moe_intermediate_size": 24,
}
"""Settings that turn `gemma4_text` into a model like the 26B-A4B."""


RECURRENT = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "nemotron_h", "bamba"),
    *("lfm3", "bailing_hybrid", "zamba2"),
    *("granitemoehybrid", "falcon_h1", "jamba", "kimi_linear", "olmo_hybrid"),
    *("mamba", "falcon_mamba", "mamba2", "minimax"),
)
"""Families with recurrent layers, which can't be trained or compressed yet."""


def settings_of(family: str) -> dict[str, Any]:
    """A copy, since transformers changes what it is given."""
    return copy.deepcopy(FAMILIES[family])


def build(path: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """Write a checkpoint of random weights to `path`; the transformers model itself is returned."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config
    from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

    # transformers only makes it as a part of a Mistral 3
    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

    settings = {**settings_of(family), **overrides}
    nulls = ("pad_token_id", "q_lora_rank", *settings.pop("nulls", ()))
    for key in [k for k, v in settings.items() if v is None and k not in nulls]:
        del settings[key]
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # norms and biases that are all ones or zeros would hide mistakes
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if not parameter.any():  # AFMoE's routers
                parameter.normal_(0.0, 0.3)
            if family.startswith(("gemma4", "gemma3n")) and name.endswith("q_norm.weight"):
                parameter.mul_(0.3)  # else its scores, which are not scaled, would be one-hot
        shake_buffers(model)
        drop_unread(model)
    model.save_pretrained(path)
    return model


def drop_unread(model: Any) -> None:
    """Removes weights of LongCat Flash's experts that return their input, which published checkpoints lack."""
    for part in model.modules():
        if getattr(part, "zero_expert_num", 0):
            part.gate_up_proj.data = part.gate_up_proj.data[: part.num_routed_experts].clone()


def shake_buffers(model: Any) -> None:
    """Gives what models learn beside gradients other numbers than those that they begin with."""
    import torch

    for buffer in correction_buffers(model):
        buffer.normal_(0.0, 0.3)
    for buffer in scalar_buffers(model):
        buffer.uniform_(0.5, 1.5)
    for buffer in expert_tables(model):
        buffer.copy_(torch.rand(len(buffer), 6).topk(buffer.shape[1]).indices)


_written: dict[str, tuple[dict[str, bytes], Any]] = {}
"""Checkpoints that this process has made: their files, and the state that torch's random numbers were left in."""
MAX_BYTES = 2**21
"""Maximum size of a checkpoint that is kept."""


def write(path: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> None:
    """Writes the folder that `build` writes, for tests that don't use the transformers model. From
    the second time on the folder is only copied."""
    import torch

    called = repr((family, seed, sorted(overrides.items())))
    if called in _written:
        files, state = _written[called]
        path.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (path / name).write_bytes(content)
        torch.set_rng_state(state)
        return
    is_alone = not path.exists() or not any(path.iterdir())
    build(path, family, seed=seed, **overrides)
    if is_alone and sum(file.stat().st_size for file in path.iterdir()) <= MAX_BYTES:
        _written[called] = (
            {file.name: file.read_bytes() for file in path.iterdir()},
            torch.get_rng_state(),
        )


def build_near(path: Path, family: str = "llama", *, noise: float = 0.1, **overrides: Any) -> None:
    """`build` with noise on its weights, a part of their spread: as a draft model it is right at times."""
    import torch
    from safetensors.torch import load_file, save_file

    write(path, family, **overrides)
    file, g = path / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = {
        n: x + noise * x.std() * torch.randn(x.shape, generator=g)
        for n, x in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def build_classifier(path: Path, family: str, *, num_labels: int = 1, seed: int = 0) -> Any:
    """A decoder with a score of each text in the place of its head."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    settings = {k: v for k, v in settings_of(family).items() if v is not None}
    config = AutoConfig.for_model(
        settings.pop("model_type"), num_labels=num_labels, pad_token_id=None, **settings
    )
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(path)
    return model


def correction_buffers(model: Any) -> list[Any]:
    """Buffers of DeepSeek V3 that are learnt outside of gradients."""
    ends = ("e_score_correction_bias", "expert_bias")
    return [buffer for name, buffer in model.named_buffers() if name.endswith(ends)]


def expert_tables(model: Any) -> list[Any]:
    """DeepSeek V4's experts of each token."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("tid2eid")]


def scalar_buffers(model: Any) -> list[Any]:
    """Gemma 4's factors of the residual."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]


def build_with_tokenizer(path: Path, family: str = "llama", **overrides: Any) -> Any:
    """The same, with a byte-level tokenizer (ids: <s>, </s>, <|im_start|>, <|im_end|>, then bytes and a few merges)."""
    model = build(path, family, **overrides)
    write_tokenizer(path)
    return model


def write_with_tokenizer(path: Path, family: str = "llama", **overrides: Any) -> None:
    """Writes the folder that `build_with_tokenizer` writes."""
    write(path, family, **overrides)
    write_tokenizer(path)


def write_sharp(path: Path, **overrides: Any) -> None:
    """Writes a model with a tokenizer whose distributions are as uneven as a language model's."""
    import safetensors.torch

    write_with_tokenizer(path, **overrides)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    tensors["lm_head.weight"] *= 4
    safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("Ġ", "t"),
        ("Ġt", "he"),
        ("o", "u"),
        ("i", "n"),
        ("e", "r"),
    ]
    tokens = [
        *specials,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *("".join(m) for m in merges),
    ]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    assert len(vocab) <= VOCAB
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))


# --- Encoders and encoder-decoders --------------------------------------------------------------------------------------

_BERT = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=130,
    initializer_range=0.3,
)
_T5 = dict(
    vocab_size=VOCAB,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_decoder_layers=3,
    num_heads=3,  # 3 · 8 is not d_model, as in T5 1.1's small one
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
    decoder_start_token_id=0,
    eos_token_id=1,
    pad_token_id=0,
)
_NO_SPECIAL = dict(
    pad_token_id=None, bos_token_id=None, eos_token_id=None, cls_token_id=None, sep_token_id=None
)
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {**_BERT, "model_type": "bert"},
    "roberta": {**_BERT, "model_type": "roberta", "type_vocab_size": 1, "pad_token_id": 1},
    "distilbert": {
        **_SMALL,
        "model_type": "distilbert",
        "dim": 32,
        "hidden_dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 130,
    },
}


def _rotary(**more: Any) -> dict[str, Any]:
    return {**_BERT, **more, "max_position_embeddings": 200}


ENCODERS |= {
    "modernbert": _rotary(
        model_type="modernbert",
        num_hidden_layers=4,
        local_attention=12,
        norm_bias=True,
        **_NO_SPECIAL,
    ),
    "nomic_bert": _rotary(model_type="nomic_bert"),
    "gte": _rotary(model_type="gte", type_vocab_size=2),
    "jina_embeddings_v3": _rotary(model_type="jina_embeddings_v3", type_vocab_size=1),
    "eurobert": _rotary(model_type="eurobert", num_key_value_heads=2, **_NO_SPECIAL),
    "mpnet": {**_BERT, "model_type": "mpnet", "pad_token_id": 1},
    "electra": {**_BERT, "model_type": "electra", "embedding_size": 32},
    "electra-small": {**_BERT, "model_type": "electra", "embedding_size": 16},
    "deberta-v3": {
        **_BERT,
        "model_type": "deberta-v2",
        "relative_attention": True,
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "deberta-v2": {
        **_BERT,
        "model_type": "deberta-v2",
        "relative_attention": True,
        "max_relative_positions": 40,
        "pos_att_type": ["c2p", "p2c"],
        "type_vocab_size": 2,
    },
    "albert": {**_BERT, "model_type": "albert", "num_hidden_layers": 4, "embedding_size": 16}
    | {"num_hidden_groups": 2, "classifier_dropout_prob": 0.0},
    "rembert": {**_BERT, "model_type": "rembert", "input_embedding_size": 16},
    "roformer": {**_BERT, "model_type": "roformer", "embedding_size": 16},
    "megatron-bert": {**_BERT, "model_type": "megatron-bert"},
    "gemma3-encoder": {**FAMILIES["gemma3_text"], "use_bidirectional_attention": True},
    "t5-encoder": {**_T5, "model_type": "t5"},
    "umt5-encoder": {**_T5, "model_type": "umt5", "feed_forward_proj": "gated-gelu"},
}
SCORING = [f for f in ENCODERS if f != "eurobert" and not f.endswith("-encoder")]
"""Encoders with a head for scores in transformers."""
T5_ENCODERS = {"t5-encoder": "T5EncoderModel", "umt5-encoder": "UMT5EncoderModel"}
T5S: dict[str, dict[str, Any]] = {
    "t5": {**_T5, "feed_forward_proj": "relu"},
    "flan-t5": {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "umt5": {**_T5, "feed_forward_proj": "gated-gelu"},
}


BART = dict(
    vocab_size=VOCAB,
    d_model=32,
    encoder_layers=2,
    decoder_layers=3,
    encoder_ffn_dim=64,
    decoder_ffn_dim=48,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    max_position_embeddings=128,
    init_std=0.3,
    pad_token_id=1,
    decoder_start_token_id=2,
    eos_token_id=1,
    forced_eos_token_id=None,
)
BARTS = {
    "bart": "BartForConditionalGeneration",
    "plbart": "PLBartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "blenderbot": "BlenderbotForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "marian": "MarianMTModel",
    "m2m_100": "M2M100ForConditionalGeneration",
}


def build_bart(
    path: Path, family: str = "bart", *, seed: int = 0, noise: float = 0.1, **more: Any
) -> Any:
    """BART or one of its kin. The bias of its head is not zero."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**BART, **more})
    model: Any = getattr(transformers, BARTS[family])(config).eval()
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.copy_(torch.randn(model.final_logits_bias.shape))
    return _shaken(model, path, noise)


def build_encoder(
    path: Path,
    family: str = "bert",
    *,
    num_labels: int | None = None,
    seed: int = 0,
    noise: float = 0.1,
    **more: Any,
) -> Any:
    """An encoder, or with `num_labels` a classifier."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    settings = {k: v for k, v in {**ENCODERS[family], **more}.items() if k != "rope_theta"}
    if num_labels is not None:
        settings["num_labels"] = num_labels
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(seed)
    kind: Any = AutoModel if num_labels is None else AutoModelForSequenceClassification
    if family in T5_ENCODERS:
        import transformers

        return _shaken(getattr(transformers, T5_ENCODERS[family])(config).eval(), path, noise)
    return _shaken(kind.from_config(config, dtype=torch.float32).eval(), path, noise)


def build_t5(
    path: Path, family: str = "flan-t5", *, seed: int = 0, noise: float = 0.1, **more: Any
) -> Any:
    """Flan-T5 has a head of its own, which transformers makes only for a checkpoint that has one."""
    import torch
    from transformers import (
        T5Config,
        T5ForConditionalGeneration,
        UMT5Config,
        UMT5ForConditionalGeneration,
    )

    torch.manual_seed(seed)
    settings = {**T5S[family], **more}
    if family == "umt5":
        model: Any = UMT5ForConditionalGeneration(UMT5Config(**settings)).eval()
    else:
        model = T5ForConditionalGeneration(T5Config(**settings)).eval()
    if family == "flan-t5":
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, model.config.d_model))
        model.config.tie_word_embeddings = False
    return _shaken(model, path, noise)


def _shaken(model: Any, path: Path, noise: float) -> Any:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            noisy = torch.randn_like(parameter) * noise
            parameter.add_(noisy * parameter.requires_grad)  # tables of sines stay
    model.save_pretrained(path)
    return model


def write_wordpiece(path: Path) -> None:
    """BERT's kind of tokenizer over letters: ids 0 to 4 are [PAD], [UNK], [CLS], [SEP], [MASK]."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *("##" + c for c in letters),
        "the",
        "##ing",
        ".",
        "?",
    ]
    tokenizer = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(words[:5])
    tokenizer.enable_truncation(8)  # both stand in real files, and hold for nothing here
    tokenizer.enable_padding(length=8)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    (path / "tokenizer_config.json").write_text(
        json.dumps({**named, "tokenizer_class": "BertTokenizer"})
    )


def write_sentence_transformers(
    path: Path, *, mode: str = "mean_tokens", normalize: bool = True
) -> None:
    """The files that say how a text becomes one vector."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"path": f"{i}_{k}" if i else "", "type": f"sentence_transformers.models.{k}"}
        for i, k in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    modes = {
        f"pooling_mode_{m}": m == mode
        for m in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    }
    (path / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, **modes})
    )
    (path / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 64, "do_lower_case": False})
    )


WHISPER_WORDS = VOCAB
"""Tokens of text. The end and the other special tokens come after them, then those of times."""
WHISPER_TOKENS = ("endoftext", "startoftranscript", "en", "de", "fr", "translate", "transcribe", "startoflm",
                  "startofprev", "nospeech", "notimestamps")  # fmt: skip
WHISPER_STATES = 50


def whisper_id(name: str) -> int:
    return WHISPER_WORDS + WHISPER_TOKENS.index(name)


def build_whisper(
    path: Path, *, seed: int = 0, noise: float = 0.1, english: bool = False, **more: Any
) -> Any:
    """A Whisper with windows of one second, its tokenizer, and its feature extractor. `english`: without languages."""
    import torch
    from tokenizers import AddedToken, Tokenizer
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    torch.manual_seed(seed)
    size = WHISPER_WORDS + len(WHISPER_TOKENS) + WHISPER_STATES + 1
    end, start = whisper_id("endoftext"), whisper_id("startoftranscript")
    ends = dict(eos_token_id=end, bos_token_id=end, pad_token_id=end, decoder_start_token_id=start)
    config = WhisperConfig(**{**dict(
        vocab_size=size, num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=48, max_source_positions=WHISPER_STATES,
        max_target_positions=64, init_std=0.3, suppress_tokens=None, begin_suppress_tokens=None, **ends,
    ), **more})  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    told = model.generation_config
    for name, value in dict(
        **ends, max_length=64, no_timestamps_token_id=whisper_id("notimestamps"), is_multilingual=not english,
        suppress_tokens=[5, 9], begin_suppress_tokens=[220, end], max_initial_timestamp_index=20,
        prev_sot_token_id=whisper_id("startofprev"), return_timestamps=False,
        alignment_heads=[[0, 1], [2, 3], [2, 0]],
    ).items():  # fmt: skip
        setattr(told, name, value)
    if not english:
        told.lang_to_id = {f"<|{name}|>": whisper_id(name) for name in ("en", "de", "fr")}
        told.task_to_id = {name: whisper_id(name) for name in ("translate", "transcribe")}
    _shaken(model, path, noise)
    write_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    fillers = [f"<|word{i}|>" for i in range(tokenizer.get_vocab_size(), WHISPER_WORDS)]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in fillers])
    tokenizer.add_special_tokens([f"<|{name}|>" for name in WHISPER_TOKENS])
    times = [f"<|{i * 0.02:.2f}|>" for i in range(WHISPER_STATES + 1)]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in times])
    assert tokenizer.get_vocab_size() == size
    tokenizer.save(str(path / "tokenizer.json"))
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(path)
    return model
