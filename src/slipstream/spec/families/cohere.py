"""Cohere's Command R, R+ and R7B: parallel attention and MLP after one layer norm without a bias, interleaved rotary embedding,
and scaled logits. R+ norms q and k. In the second generation (`cohere2`, R7B) three layers of four have a window, and the
fourth has no position embedding."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    attention,
    gated,
    heads,
    kinds,
    kinds_of_layers,
    layer_norm,
    model,
    rms,
    rope,
)
from slipstream.spec.families.deepseek import SHARED
from slipstream.spec.families.metadata import layer_norm_gguf_config
from slipstream.spec.families.names import LLAMA, gguf_table, table
from slipstream.spec.model import (
    DenseSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    ParallelBlock,
    QKNormSpec,
    SharedExpertSpec,
)
from slipstream.spec.parameters import Scale

PATTERN = 4


def read_cohere(c: ConfigReader) -> ModelSpec:
    return _read(
        c, "cohere", theta=500000.0, windows=False, qk_norm=c.take("use_qk_norm", bool, False)
    )


def read_cohere2(c: ConfigReader) -> ModelSpec:
    c.require("rotary_pct", 1.0)
    c.require("use_embedding_sharing", True)
    c.require("use_gated_activation", True)
    c.require("use_parallel_block", True)
    c.require("use_qk_norm", False)
    c.require("position_embedding_type", "rope_gptj")
    c.ignore("cache_implementation", "order_of_interleaved_layers")
    c.ignore("use_parallel_embedding")  # about how the table is sharded
    return _read(c, "cohere2", theta=10000.0, windows=True)


def read_cohere2_moe(c: ConfigReader) -> ModelSpec:
    """Reads a Cohere 2 mixture: experts instead of MLPs, except in the first layers, which may have another pattern of
    windows."""
    c.assume(head_dim=128)
    h, hidden = heads(c), c.size("hidden_size")
    eps = c.take("layer_norm_eps", float, 1e-5)
    small = c.maybe("rms_norm_eps", float)
    norm = layer_norm(hidden, eps, bias=False) if small is None else rms(hidden, small)
    max_position, window = c.size("max_position_embeddings", 8192), c.size("sliding_window", 4096)
    position = rope(c, h.head_dim, max_position=max_position, style="interleaved")
    first = c.take("first_k_dense_replace", int, 0)
    pattern = c.size("sliding_window_pattern", PATTERN)
    of_first = c.size("prefix_dense_sliding_window_pattern", 1)

    def slides(i: int) -> bool:
        return bool((i + 1) % of_first if i < first else (i - first + 1) % pattern)

    windows = kinds_of_layers(c, lambda i: "sliding_attention" if slides(i) else "full_attention")
    made = kinds(
        c, ("dense", "sparse"), lambda i: "dense" if i < first else "sparse", "mlp_layer_types"
    )
    expert, bias = gated(c), c.take("attention_bias", bool, False)
    size = c.take("prefix_dense_intermediate_size", int, expert.intermediate_size)
    dense = dataclasses.replace(expert, intermediate_size=size)
    moe = _mixture(c, expert)

    def layer(i: int) -> LayerSpec:
        has_window, is_dense = windows[i] == "sliding_attention", made[i] == "dense"
        of = attention(
            h,
            position if has_window or (is_dense and of_first == 1) else None,
            qkv_bias=bias,
            out_bias=bias,
            window=window if has_window else None,
        )
        return LayerSpec(
            attention=of, mlp=dense if is_dense else moe, block=ParallelBlock(norm=norm)
        )

    scale = c.take("logit_scale", float, 0.0625)
    return model(c, "cohere2_moe", layer, norm, max_position, logit_scale=scale, tied=True)


def _mixture(c: ConfigReader, expert: DenseSpec) -> MoESpec:
    """The mixture. Where outputs are averaged with the shared experts, routed weights are halved here and the shared
    experts' at load."""
    c.ignore("output_router_logits")
    num_shared = c.take("num_shared_experts", int, 0)
    how = c.take("shared_expert_combination_strategy", str, "average")
    by = c.take("expert_selection_fn", str, "softmax")
    c.require("shared_expert_combination_strategy", "average", "sum")
    c.require("expert_selection_fn", "softmax", "sigmoid")
    normalize = c.take("norm_topk_prob", bool, True)  # only applies to sigmoid scores
    halved, shared = num_shared > 0 and how == "average", None
    if num_shared:
        size = expert.intermediate_size * num_shared
        shared = SharedExpertSpec(mlp=dataclasses.replace(expert, intermediate_size=size))
    return MoESpec(
        num_experts=c.size("num_experts", 8),
        num_experts_per_token=c.size("num_experts_per_tok", 2),
        expert=expert,
        normalize=by == "softmax" or normalize,
        scores="softmax" if by == "softmax" else "sigmoid",
        weight_scale=0.5 if halved else 1.0,
        shared=shared,
    )


def _halved(layer: LayerSpec, part: int) -> Scale | None:
    moe, norm = layer.mlp, layer.norms["norm"]
    is_mean = isinstance(moe, MoESpec) and moe.weight_scale != 1.0
    return Scale(((norm.size, 0.5),)) if is_mean else None


def _read(
    c: ConfigReader, family: str, *, theta: float, windows: bool, qk_norm: bool = False
) -> ModelSpec:
    h = heads(c)
    max_position = c.size("model_max_length", c.size("max_position_embeddings", 8192))
    eps = c.take("layer_norm_eps", float, 1e-5)
    norm = layer_norm(c.size("hidden_size"), eps, bias=False)
    trained = c.size("max_position_embeddings", 8192)
    position = rope(c, h.head_dim, theta=theta, max_position=trained, style="interleaved")
    bias, mlp = c.take("attention_bias", bool, False), gated(c)
    window, found = None, [""] * c.size("num_hidden_layers")
    if windows:
        window, pattern = c.size("sliding_window", 4096), c.size("sliding_window_pattern", PATTERN)
        c.require("layer_switch", pattern)  # another key for the same value
        found = kinds_of_layers(
            c, lambda i: "sliding_attention" if (i + 1) % pattern else "full_attention"
        )

    def layer(i: int) -> LayerSpec:
        of = attention(
            h,
            None if found[i] == "full_attention" else position,
            qkv_bias=bias,
            out_bias=bias,
            window=window if found[i] == "sliding_attention" else None,
            qk_norm=QKNormSpec(over="each", eps=eps) if qk_norm else None,
        )
        return LayerSpec(attention=of, mlp=mlp, block=ParallelBlock(norm=norm))

    scale = c.take("logit_scale", float, 0.0625)
    return model(c, family, layer, norm, max_position, logit_scale=scale, tied=True)


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    config = layer_norm_gguf_config(m, "layer_norm_eps")
    return {**config, "hidden_act": "silu", "logit_scale": m.take("logit_scale", float)}


def gguf_config2(m: ConfigReader) -> dict[str, Any]:
    m.require("attention.sliding_window_pattern", PATTERN)
    return {**gguf_config(m), "sliding_window": m.size("attention.sliding_window")}


FAMILIES = tuple(
    Family(
        model_type=model_type,
        architectures=(architecture,),
        read=read,
        names=table({**LLAMA, "norm": "input_layernorm"}),
        gguf=GGUFFamily(architecture=gguf, config=config, names=gguf_table()),
    )
    for model_type, architecture, read, gguf, config in (
        ("cohere", "CohereForCausalLM", read_cohere, "command-r", gguf_config),
        ("cohere2", "Cohere2ForCausalLM", read_cohere2, "cohere2", gguf_config2),
    )
)
FAMILIES += (
    Family(
        model_type="cohere2_moe",
        architectures=("Cohere2MoeForCausalLM",),
        read=read_cohere2_moe,
        names=table({**SHARED, "norm": "input_layernorm"}, changes={"shared.down": _halved}),
    ),
)
