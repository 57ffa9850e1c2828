"""LFM2, dense and as mixtures of experts, and LFM3: most layers have a gated short convolution
instead of attention. LFM3 has windows, a gate per head, and norms before and after. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily, Names
from slipstream.spec.families.builders import (
    around,
    attention,
    before,
    heads,
    kinds,
    model,
    rms,
    rope,
    rope_of_kind,
)
from slipstream.spec.families.metadata import kv_heads, llama_gguf_config
from slipstream.spec.families.names import LLAMA, Theirs, gguf_table, of_conv, table
from slipstream.spec.model import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    QKNormSpec,
    ShortConvSpec,
)


def read_lfm2(c: ConfigReader) -> ModelSpec:
    """Reads a dense LFM2. With `block_auto_adjust_ff_dim` the MLP's size is computed from the
    config's."""
    c.assume(hidden_size=2560, num_hidden_layers=32)
    key = "block_ff_dim" if "block_ff_dim" in c else "intermediate_size"
    size, multiple = c.size(key, 12288), c.size("block_multiple_of", 256)
    c.ignore("intermediate_size")
    factor = c.take("block_ffn_dim_multiplier", float, 1.0)
    if c.take("block_auto_adjust_ff_dim", bool, True):
        size = -(-int(factor * int(2 * size / 3)) // multiple) * multiple
    mlp = DenseSpec(intermediate_size=size, activation="silu")
    full = c.take("full_attn_idxs", list, list(range(c.size("num_hidden_layers"))))
    c.require("block_use_swiglu", True)
    c.require("use_pos_enc", True)
    for same in ("block_dim", "conv_dim", "conv_dim_out"):
        c.require(same, c.size("hidden_size"))
    for key in ("block_norm_eps", "num_heads"):  # copies of norm_eps and num_attention_heads
        c.ignore(key)
    c.ignore("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init")
    c.ignore("conv_use_xavier_init")
    return _read(c, "lfm2", [mlp] * c.size("num_hidden_layers"), full)


def read_lfm2_moe(c: ConfigReader) -> ModelSpec:
    c.assume(hidden_size=2048, num_hidden_layers=32)
    mlp = DenseSpec(intermediate_size=c.size("intermediate_size", 7168), activation="silu")
    size = c.size("moe_intermediate_size", 1792)
    c.ignore("output_router_logits")
    moe = MoESpec(
        num_experts=c.size("num_experts", 32),
        num_experts_per_token=c.size("num_experts_per_tok", 4),
        expert=dataclasses.replace(mlp, intermediate_size=size),
        normalize=c.take("norm_topk_prob", bool, True),
        scores="sigmoid",
        correction=c.take("use_expert_bias", bool, True),
        weight_scale=c.take("routed_scaling_factor", float, 1.0),
    )
    count, dense = c.size("num_hidden_layers"), c.take("num_dense_layers", int, 2)
    return _read(c, "lfm2_moe", [mlp if i < dense else moe for i in range(count)], [])


def _read(c: ConfigReader, family: str, mlps: list[Any], full: list[int]) -> ModelSpec:
    """Reads an LFM2. `full`: the layers with attention, for configs without `layer_types`."""
    c.assume(num_attention_heads=32, num_key_value_heads=8, vocab_size=65536)
    h = heads(c)
    eps = c.take("norm_eps", float, 1e-5)
    max_position = c.size("max_position_embeddings", 128_000)
    norm = rms(c.size("hidden_size"), eps)
    position = rope(c, h.head_dim, max_position=max_position, theta=1e6)
    qk_norm = QKNormSpec(over="head", eps=eps)
    mixers: dict[str, dict[str, Any]] = {
        "full_attention": {"attention": attention(h, position, qk_norm=qk_norm)},
        "conv": {"recurrent": _conv(c, 3)},
    }
    of = kinds(c, mixers, lambda i: "full_attention" if i in full else "conv")

    def layer(i: int) -> LayerSpec:
        mlp: MLPSpec = mlps[i]
        return LayerSpec(**mixers[of[i]], mlp=mlp, block=before(norm))

    tied = c.take("tie_embedding", bool, c.take("tie_word_embeddings", bool, True))
    c.assume(tie_word_embeddings=tied)
    return model(c, family, layer, norm, max_position)


def _conv(c: ConfigReader, width: int) -> ShortConvSpec:
    return ShortConvSpec(
        width=c.size("hidden_size"),
        conv_width=c.size("conv_L_cache", width),
        bias=c.take("conv_bias", bool, False),
    )


FULL, WINDOW = "full_attention", "sliding_attention"
LFM3_ROPES = {
    WINDOW: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}


def read_lfm3(c: ConfigReader) -> ModelSpec:
    c.alias({"norm_eps": "rms_norm_eps"})
    c.assume(hidden_size=2048, num_hidden_layers=24, num_attention_heads=16, vocab_size=128_000)
    c.assume(num_key_value_heads=4, head_dim=128)
    h, eps = heads(c), c.take("norm_eps", float, 1e-5)
    norm, longest = rms(c.size("hidden_size"), eps), c.size("max_position_embeddings", 128_000)
    mlp = DenseSpec(intermediate_size=c.size("intermediate_size", 7680), activation="silu")
    of = kinds(
        c,
        (FULL, WINDOW, "conv"),
        lambda i: FULL if i % 4 == 2 else WINDOW if i and i % 4 == 0 else "conv",
    )
    window = c.maybe("sliding_window", int) if c.says("sliding_window") else 256
    if not window and WINDOW in of:
        raise c.unsupported("layer_types", "has sliding_attention, but there is no sliding_window")
    more: dict[str, Any] = dict.fromkeys(
        ("qkv_bias", "out_bias"), c.take("attention_bias", bool, False)
    )
    more["gated"] = "head" if c.take("use_attention_gate", bool, True) else False
    of_ropes: dict[str, Any] = dict(theta=1e6, default=LFM3_ROPES, proportional=True)

    def attended(kind: str) -> dict[str, Any]:
        position = rope_of_kind(c, kind, h.head_dim, max_position=longest, **of_ropes)
        more["window"] = window if kind == WINDOW else None
        return {
            "attention": attention(h, position, qk_norm=QKNormSpec(over="head", eps=eps), **more)
        }

    mixers = {kind: attended(kind) for kind in sorted({*of} - {"conv"})}
    mixers["conv"] = {"recurrent": _conv(c, 7)}
    block = (around if c.take("use_sandwich_norm", bool, True) else before)(norm)
    c.ignore("rope_theta", "rope_parameters", "rope_scaling")  # about kinds that no layer has
    return model(
        c,
        "lfm3",
        lambda i: LayerSpec(**mixers[of[i]], mlp=mlp, block=block),
        norm,
        longest,
        tied=True,
    )


NAMES: dict[str, Theirs] = {
    **LLAMA,
    "final_norm": "model.embedding_norm",
    "pre_attention": "operator_norm",
    "attention.q_norm": "self_attn.q_layernorm",
    "attention.k_norm": "self_attn.k_layernorm",
    "attention.out": "self_attn.out_proj",
    "recurrent.in": "conv.in_proj",
    "recurrent.conv": "conv.conv",
    "recurrent.out": "conv.out_proj",
    "pre_mlp": "ffn_norm",
    "mlp.up": ("feed_forward.w1", "feed_forward.w3"),
    "mlp.down": "feed_forward.w2",
    "router": "feed_forward.gate",
    "correction": {"weight": "feed_forward.expert_bias"},
    "experts.up": ("feed_forward.experts.{e}.w1", "feed_forward.experts.{e}.w3"),
    "experts.down": "feed_forward.experts.{e}.w2",
}


def names_lfm3(spec: ModelSpec) -> Names:
    gated = any(a.gate_size for a in spec.attentions if isinstance(a, AttentionSpec))
    parts = (*("gate",) * gated, "q", "k", "v")
    own: dict[str, Theirs] = {
        **{f"attention.{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
        "attention.qkv": tuple(f"self_attn.{x}_proj" for x in parts),
        "attention.out": "self_attn.o_proj",
        "post_attention": "post_operator_norm",
        "post_mlp": "post_ffn_norm",
    }
    return table({**NAMES, **own}, changes={"recurrent.conv": of_conv})(spec)


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Reads a GGUF file's config. The file gives the MLP's final size, and the number of kv heads
    of each layer: 0 for convolutions."""
    config = llama_gguf_config(m, experts=True, by_layer=True)
    del config["hidden_act"]
    own = {
        "norm_eps": config.pop("rms_norm_eps"),
        "layer_types": ["full_attention" if n else "conv" for n in kv_heads(m)],
        "conv_L_cache": m.size("shortconv.l_cache"),
    }
    if not m.take("expert_count", int, 0):
        m.require("expert_used_count", 0)
        return {**config, **own, "block_auto_adjust_ff_dim": False}
    m.require("expert_gating_func", 2)
    m.require("expert_weights_norm", True)
    return {
        **config,
        **own,
        "num_experts": m.size("expert_count"),
        "num_experts_per_tok": m.size("expert_used_count"),
        "moe_intermediate_size": m.size("expert_feed_forward_length"),
        "num_dense_layers": m.take("leading_dense_block_count", int, 0),
        "routed_scaling_factor": m.take("expert_weights_scale", float, 1.0),
    }


GGUF: dict[str, Theirs] = {
    "final_norm": "token_embd_norm",
    "recurrent.in": "shortconv.in_proj",
    "recurrent.conv": "shortconv.conv",
    "recurrent.out": "shortconv.out_proj",
    "correction": {"weight": "exp_probs_b.bias"},
}

FAMILIES = (
    Family(model_type="lfm3", architectures=("Lfm3ForCausalLM",), read=read_lfm3, names=names_lfm3),
    *(
        Family(
            model_type=name,
            architectures=(architecture,),
            read=read,
            names=table(NAMES, changes={"recurrent.conv": of_conv}),
            gguf=GGUFFamily(
                architecture=name.replace("_", ""),
                config=gguf_config,
                names=gguf_table(GGUF, changes={"recurrent.conv": of_conv}),
            ),
        )
        for name, architecture, read in (
            ("lfm2", "Lfm2ForCausalLM", read_lfm2),
            ("lfm2_moe", "Lfm2MoeForCausalLM", read_lfm2_moe),
        )
    ),
)
