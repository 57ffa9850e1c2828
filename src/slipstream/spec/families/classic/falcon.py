"""Falcon. The 7B has one kv head, and one norm for parallel attention and MLP. The 40B has grouped kv heads, and two norms.
The RW models have ALiBi. (Falcon 3 is a `llama`.)"""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily, Names
from slipstream.spec.families.builders import (
    activation,
    attention,
    before,
    called,
    heads,
    layer_norm,
    model,
    plain,
    rope,
)
from slipstream.spec.families.metadata import layer_norm_gguf_config
from slipstream.spec.families.names import MEGATRON, Change, Theirs, gguf_table, table
from slipstream.spec.model import (
    AlibiSpec,
    BlockSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    ParallelBlock,
)


def read(c: ConfigReader) -> ModelSpec:
    hidden, heads_key = c.size("hidden_size"), called(c, "num_attention_heads", "n_head")
    h = heads(c, num_heads=heads_key, num_kv_heads=called(c, "num_kv_heads", "n_head_kv"))
    grouped = c.take("new_decoder_architecture", bool, False)
    one = c.take("multi_query", bool, True)
    if not grouped:  # `num_kv_heads` has no effect then
        h = h._replace(num_kv_heads=1 if one else h.num_heads)
    max_position = c.size("max_position_embeddings", 2048)
    alibi = c.take("alibi", bool, False)
    rotary = rope(c, h.head_dim, max_position=max_position)
    bias = c.take("bias", bool, False)
    inner = c.size("ffn_hidden_size", 4 * hidden)
    c.require("ff_factor", inner // hidden)
    norm = layer_norm(hidden, c.take("layer_norm_epsilon", float, 1e-5))
    layer = LayerSpec(
        attention=attention(
            h, AlibiSpec(factor=h.head_dim**-0.5) if alibi else rotary, qkv_bias=bias, out_bias=bias
        ),
        mlp=plain(inner, activation(c, "activation", "gelu"), bias=bias),
        block=_block(c, grouped, norm),
    )
    layers_key = called(c, "num_hidden_layers", "n_layer")
    return model(c, "falcon", layer, norm, max_position, num_layers=layers_key, tied=True)


def _block(c: ConfigReader, grouped: bool, norm: NormSpec) -> BlockSpec:
    c.require("apply_residual_connection_post_layernorm", False)
    beside, norms = c.take("parallel_attn", bool, True), c.maybe("num_ln_in_parallel_attn", int)
    if grouped and not beside:
        raise c.unsupported(
            "parallel_attn", "new_decoder_architecture only with attention and MLP side by side"
        )
    if norms not in (None, 1, 2) or (norms == 2 and not grouped):
        raise c.unsupported(
            "num_ln_in_parallel_attn", "only 1, or 2 with new_decoder_architecture, is supported"
        )
    if not beside:
        return before(norm)
    return ParallelBlock(norm=norm, mlp_norm=norm if grouped and norms != 1 else None)


def names(spec: ModelSpec) -> Names:
    """Falcon's names. A layer's only norm has another name than the first of two."""
    two = "mlp_norm" in spec.layers[0].norms
    return table(
        {**NAMES, "norm": "ln_attn" if two else "input_layernorm"}, layer="h.{i}.", changes=BY_GROUP
    )(spec)


NAMES: dict[str, Theirs] = {
    **MEGATRON,
    "embed": "word_embeddings",
    "final_norm": "ln_f",
    "head": "lm_head",
    "mlp_norm": "ln_mlp",
}
BY_GROUP: dict[str, Change] = {"attention.qkv": "ungroup"}


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    config = layer_norm_gguf_config(m, "layer_norm_epsilon")
    m.require("tensor_data_layout", "jploski")  # llama.cpp's name for rows in the order q, k, v
    config["ffn_hidden_size"] = config.pop("intermediate_size")
    config["num_kv_heads"] = config.pop("num_key_value_heads")
    return {**config, "new_decoder_architecture": config["num_kv_heads"] > 1}


def gguf_names(spec: ModelSpec) -> Names:
    two = (
        {"norm": "attn_norm_2", "mlp_norm": "attn_norm"}
        if "mlp_norm" in spec.layers[0].norms
        else {}
    )
    return gguf_table(two, fused=True)(spec)


FAMILIES = tuple(
    Family(
        model_type=model_type,
        architectures=("FalconForCausalLM", "RWForCausalLM"),
        read=read,
        names=names,
        prefixes=("", "transformer."),
        gguf=GGUFFamily(architecture="falcon", config=gguf_config, names=gguf_names)
        if model_type == "falcon"
        else None,
    )
    for model_type in ("falcon", "RefinedWeb", "RefinedWebModel")
)
