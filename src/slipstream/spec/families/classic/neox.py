"""GPT-NeoX and Pythia: parallel attention and MLP with a norm each, rotary embedding of a quarter of each head, and weights of
q, k and v ordered by head."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    activation,
    attention,
    before,
    heads,
    layer_norm,
    model,
    plain,
    rope,
)
from slipstream.spec.families.metadata import layer_norm_gguf_config
from slipstream.spec.families.names import MEGATRON, Theirs, gguf_table, table
from slipstream.spec.model import BlockSpec, LayerSpec, ModelSpec, ParallelBlock


def read(c: ConfigReader) -> ModelSpec:
    h = heads(c, num_kv_heads=None)
    norm = layer_norm(c.size("hidden_size"), c.take("layer_norm_eps", float, 1e-5))
    max_position = c.size("max_position_embeddings", 2048)
    c.ignore("num_steps")  # a training setting
    own = ("rotary_emb_base", "rotary_pct")
    position = rope(c, h.head_dim, partial=0.25, max_position=max_position, keys=own)
    # transformers 4 wrote the same numbers under the usual names; 5 reads only its own names.
    c.require("rope_theta", position.theta)
    c.require("partial_rotary_factor", position.rotary_dim / h.head_dim, c.value("rotary_pct"))
    bias = c.take("attention_bias", bool, True)
    beside = c.take("use_parallel_residual", bool, True)
    block: BlockSpec = ParallelBlock(norm=norm, mlp_norm=norm) if beside else before(norm)
    layer = LayerSpec(
        attention=attention(h, position, qkv_bias=bias, out_bias=bias),
        mlp=plain(
            c.size("intermediate_size", 4 * c.size("hidden_size")),
            activation(c, "hidden_act", "gelu"),
        ),
        block=block,
    )
    c.require("is_decoder", False, True)
    return model(c, "gpt_neox", layer, norm, max_position)


NAMES: dict[str, Theirs] = {
    **MEGATRON,
    "embed": "gpt_neox.embed_in",
    "final_norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
    "norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.out": "attention.dense",
}


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    config = layer_norm_gguf_config(m, "layer_norm_eps", partial=True)
    theta, partial = config.pop("rope_theta"), config.pop("partial_rotary_factor")
    return {
        **config,
        "rotary_emb_base": theta,
        "rotary_pct": partial,
        "use_parallel_residual": m.take("use_parallel_residual", bool, True),
        "hidden_act": "gelu",
    }


FAMILIES = (
    Family(
        model_type="gpt_neox",
        architectures=("GPTNeoXForCausalLM",),
        read=read,
        names=table(NAMES, layer="gpt_neox.layers.{i}.", changes={"attention.qkv": "ungroup"}),
        ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)",),
        gguf=GGUFFamily(architecture="gptneox", config=gguf_config, names=gguf_table(fused=True)),
    ),
)
