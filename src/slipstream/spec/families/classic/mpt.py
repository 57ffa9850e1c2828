"""MPT: ALiBi, layer norms without biases; some models clamp q, k and v."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import attention, before, heads, layer_norm, model, plain
from slipstream.spec.families.metadata import layer_norm_gguf_config
from slipstream.spec.families.names import gguf_table, table
from slipstream.spec.model import AlibiSpec, LayerSpec, ModelSpec


def read(c: ConfigReader) -> ModelSpec:
    h = heads(c, hidden="d_model", num_heads="n_heads", num_kv_heads=None)
    hidden = c.size("d_model")
    norm = layer_norm(hidden, c.take("layer_norm_epsilon", float, 1e-5), bias=False)
    own = c.part("attn_config")
    own.require("alibi", True)
    own.require("attn_type", "multihead_attention")
    for key in ("prefix_lm", "qk_ln", "qk_gn", "rope", "attn_uses_sequence_id"):
        own.require(key, False)
    own.require("sliding_window_size", -1)
    clip = own.maybe("clip_qkv", float)
    scale = own.maybe("softmax_scale", float)
    alibi = AlibiSpec(max_bias=own.take("alibi_bias_max", float, 8.0))
    # The attention kernel's name, and keys that every transformers config has.
    own.ignore(
        "attn_impl",
        "is_encoder_decoder",
        "chunk_size_feed_forward",
        "kv_n_heads",
        "rope_impl",
        "rope_theta",
    )
    own.finish()
    layer = LayerSpec(
        attention=attention(h, alibi, scale=scale, clip_qkv=clip),
        mlp=plain(c.size("expansion_ratio", 4) * hidden, "gelu", bias=False),
        block=before(norm),
    )
    c.require("no_bias", True)
    c.require("norm_type", "low_precision_layernorm", "layernorm")
    c.require("embedding_fraction", 1.0)
    c.require("logit_scale")
    # the first has no effect with ALiBi
    c.ignore("learned_pos_emb", "init_config", "tokenizer_name", "verbose")
    max_position = c.size("max_seq_len", 2048)
    return model(
        c, "mpt", layer, norm, max_position, hidden="d_model", num_layers="n_layers", tied=True
    )


NAMES = {
    "embed": "wte",
    "final_norm": "norm_f",
    "head": "lm_head",
    "pre_attention": "norm_1",
    "attention.qkv": "attn.Wqkv",
    "attention.out": "attn.out_proj",
    "pre_mlp": "norm_2",
    "mlp.up": "ffn.up_proj",
    "mlp.down": "ffn.down_proj",
}


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    config = layer_norm_gguf_config(m, "layer_norm_epsilon")
    m.require("attention.head_count_kv", config["num_attention_heads"])
    if m.take("attention.max_alibi_bias", float, 8.0) == 0.0:
        raise m.unsupported("attention.max_alibi_bias", "only with ALiBi")
    return {
        "d_model": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "expansion_ratio": config["intermediate_size"] // config["hidden_size"],
        "layer_norm_epsilon": config["layer_norm_epsilon"],
        "max_seq_len": config["max_position_embeddings"],
        "attn_config": {
            "alibi_bias_max": m.take("attention.max_alibi_bias", float, 8.0),
            "clip_qkv": m.maybe("attention.clamp_kqv", float),
        },
    }


FAMILIES = (
    Family(
        model_type="mpt",
        architectures=("MptForCausalLM", "MPTForCausalLM"),
        read=read,
        names=table(NAMES, layer="blocks.{i}."),
        prefixes=("", "transformer."),
        gguf=GGUFFamily(architecture="mpt", config=gguf_config, names=gguf_table(fused=True)),
    ),
)
