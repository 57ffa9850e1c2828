"""StarCoder 2: layer norms, biases, MLPs without a gate, a window in all layers. (StarCoder is in gpt.py.)"""

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
from slipstream.spec.families.names import LLAMA, gguf_table, table
from slipstream.spec.model import LayerSpec, ModelSpec

TANH = "gelu_pytorch_tanh"


def read(c: ConfigReader) -> ModelSpec:
    h, bias = heads(c), c.take("use_bias", bool, True)
    max_position = c.size("max_position_embeddings", 4096)
    norm = layer_norm(c.size("hidden_size"), c.take("norm_epsilon", float, 1e-5))
    window = c.maybe("sliding_window", int)
    layer = LayerSpec(
        attention=attention(
            h,
            rope(c, h.head_dim, max_position=max_position),
            qkv_bias=bias,
            out_bias=bias,
            window=window,
        ),
        mlp=plain(c.size("intermediate_size"), activation(c, "hidden_act", TANH), bias=bias),
        block=before(norm),
    )
    c.require("norm_type", "layer_norm")
    c.require("mlp_type", "default")
    c.require("scale_attn_weights", True)
    c.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")  # always the case here
    c.ignore("activation_function", "layer_norm_epsilon")  # keys of StarCoder, which others replace
    return model(c, "starcoder2", layer, norm, max_position, tied=True)


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    return {**layer_norm_gguf_config(m, "norm_epsilon"), "hidden_act": TANH}


FAMILIES = (
    Family(
        model_type="starcoder2",
        architectures=("Starcoder2ForCausalLM",),
        read=read,
        names=table({**LLAMA, "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}),
        gguf=GGUFFamily(
            architecture="starcoder2", config=gguf_config, names=gguf_table(gated=False)
        ),
    ),
)
