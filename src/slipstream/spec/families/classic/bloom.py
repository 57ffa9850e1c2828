"""BLOOM: ALiBi, a norm of the embeddings, and weights of q, k and v ordered by head."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    attention,
    before,
    called,
    heads,
    layer_norm,
    model,
    plain,
)
from slipstream.spec.families.metadata import layer_norm_gguf_config
from slipstream.spec.families.names import MEGATRON, Theirs, gguf_table, table
from slipstream.spec.model import AlibiSpec, LayerSpec, ModelSpec


def read(c: ConfigReader) -> ModelSpec:
    # Configs have one of several keys for the same value.
    hidden_key = called(c, "hidden_size", "n_embed")
    heads_key = called(c, "n_head", "num_attention_heads")
    h = heads(c, hidden=hidden_key, num_heads=heads_key, num_kv_heads=None)
    hidden = c.size(hidden_key)
    norm = layer_norm(hidden, c.take("layer_norm_epsilon", float, 1e-5))
    layer = LayerSpec(
        attention=attention(h, AlibiSpec(), qkv_bias=True, out_bias=True),
        mlp=plain(4 * hidden, "gelu_tanh"),
        block=before(norm),
    )
    c.require("apply_residual_connection_post_layernorm", False)
    c.ignore(
        "slow_but_exact",
        "masked_softmax_fusion",
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "skip_bias_add",
    )
    c.ignore("skip_bias_add_qkv", "offset_alibi", "unk_token_id")
    c.require("n_inner", 4 * hidden)
    return model(
        c,
        "bloom",
        layer,
        norm,
        c.size("seq_length", 2048),
        hidden=hidden_key,
        num_layers=called(c, "n_layer", "num_hidden_layers"),
        embed_norm=norm,
        tied=True,
    )


NAMES: dict[str, Theirs] = {
    **MEGATRON,
    "embed": "word_embeddings",
    "embed_norm": "word_embeddings_layernorm",
    "final_norm": "ln_f",
    "head": "lm_head",
}


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    config = layer_norm_gguf_config(m, "layer_norm_epsilon")
    hidden = config["hidden_size"]
    m.require("feed_forward_length", 4 * hidden)
    m.require("attention.head_count_kv", config["num_attention_heads"])
    return {
        "hidden_size": hidden,
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "layer_norm_epsilon": config["layer_norm_epsilon"],
        "seq_length": config["max_position_embeddings"],
    }


FAMILIES = (
    Family(
        model_type="bloom",
        architectures=("BloomForCausalLM",),
        read=read,
        names=table(NAMES, layer="h.{i}.", changes={"attention.qkv": "ungroup"}),
        prefixes=("", "transformer."),
        gguf=GGUFFamily(architecture="bloom", config=gguf_config, names=gguf_table(fused=True)),
    ),
)
