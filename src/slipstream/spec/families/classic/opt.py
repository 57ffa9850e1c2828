"""OPT: learned positions from row 2 on, and ReLU. The 350M has post-norms, and embeddings narrower than its layers."""

from __future__ import annotations

from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.families.builders import (
    activation,
    attention,
    before,
    heads,
    layer_norm,
    model,
    plain,
)
from slipstream.spec.families.names import Theirs, table
from slipstream.spec.model import (
    BlockSpec,
    LayerSpec,
    LearnedPositionSpec,
    ModelSpec,
    PostNormBlock,
    SinusoidSpec,
)


def read(c: ConfigReader) -> ModelSpec:
    h, hidden = heads(c, num_kv_heads=None), c.size("hidden_size")
    bias = c.take("enable_bias", bool, True)
    norm = layer_norm(hidden, 1e-5)
    first = c.take("do_layer_norm_before", bool, True)
    block: BlockSpec = before(norm) if first else PostNormBlock(attention_norm=norm, mlp_norm=norm)
    layer = LayerSpec(
        attention=attention(h, None, qkv_bias=bias, out_bias=bias),
        mlp=plain(c.size("ffn_dim"), activation(c, "activation_function", "relu"), bias=bias),
        block=block,
    )
    max_position = c.size("max_position_embeddings", 2048)
    width = c.size("word_embed_proj_dim", hidden)
    c.require("layer_norm_elementwise_affine", True)
    c.require("_remove_final_layer_norm", False)
    c.require("prefix", "</s>")  # the tokenizer adds it
    return model(
        c,
        "opt",
        layer,
        norm if first else None,
        max_position,
        learned_positions=LearnedPositionSpec(num_positions=max_position + 2, offset=2),
        embed_size=None if width == hidden else width,
        tied=True,
    )


def read_xglm(c: ConfigReader) -> ModelSpec:
    """XGLM: OPT's layers, with sines and cosines for positions."""
    h = heads(c, hidden="d_model", num_heads="attention_heads", num_kv_heads=None)
    norm = layer_norm(c.size("d_model"), 1e-5)
    max_position = c.size("max_position_embeddings", 2048)
    layer = LayerSpec(
        attention=attention(h, None, qkv_bias=True, out_bias=True),
        mlp=plain(c.size("ffn_dim", 4096), activation(c, "activation_function", "gelu")),
        block=before(norm),
    )
    c.ignore("decoder_start_token_id")
    return model(
        c,
        "xglm",
        layer,
        norm,
        max_position,
        hidden="d_model",
        num_layers="num_layers",
        learned_positions=SinusoidSpec(num_positions=max_position + 2, offset=2),
        embed_scale=norm.size**0.5 if c.take("scale_embedding", bool, True) else 1.0,
        tied=True,
    )


NAMES: dict[str, Theirs] = {
    "embed": "decoder.embed_tokens",
    "embed_in": "decoder.project_in",
    "positions": "decoder.embed_positions",
    "final_norm": "decoder.final_layer_norm",
    "embed_out": "decoder.project_out",
    "head": "lm_head",
    "pre_attention": "self_attn_layer_norm",
    "attention_norm": "self_attn_layer_norm",
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": "self_attn.out_proj",
    "pre_mlp": "final_layer_norm",
    "mlp_norm": "final_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
}

FAMILIES = (
    Family(
        model_type="opt",
        architectures=("OPTForCausalLM",),
        read=read,
        names=table(NAMES, layer="decoder.layers.{i}."),
        prefixes=("", "model."),
    ),
    Family(
        model_type="xglm",
        architectures=("XGLMForCausalLM",),
        read=read_xglm,
        names=table(
            {**NAMES, "embed": "model.embed_tokens", "final_norm": "model.layer_norm"},
            layer="model.layers.{i}.",
        ),
    ),
)
