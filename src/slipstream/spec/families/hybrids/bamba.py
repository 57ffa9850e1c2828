"""Bamba and Granite 4 H: most layers are Mamba-2, the others have attention. Granite's may have experts. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    attention,
    before,
    gated,
    heads,
    kinds,
    model,
    rms,
    rope,
)
from slipstream.spec.families.hybrids.mamba import (
    GGUF,
    GGUF_CHANGES,
    bamba_mixer,
    mamba2_gguf_config,
    mamba_names,
)
from slipstream.spec.families.metadata import kv_heads, llama_gguf_config
from slipstream.spec.families.names import LLAMA, Theirs, gguf_table, of_conv, table
from slipstream.spec.model import DenseSpec, LayerSpec, ModelSpec, MoESpec, SharedExpertSpec

KINDS = ("full_attention", "linear_attention")


def read_bamba(c: ConfigReader) -> ModelSpec:
    c.assume(
        num_key_value_heads=8, num_attention_heads=32, hidden_size=4096, intermediate_size=14336
    )
    c.assume(num_hidden_layers=32, vocab_size=128000)
    h, max_position = heads(c), c.size("max_position_embeddings", 262144)
    eps = c.take("rms_norm_eps", float, 1e-5)
    norm, bias = rms(c.size("hidden_size"), eps), c.take("attention_bias", bool, False)
    c.require("partial_rotary_factor", 0.5)  # transformers overwrites any other value with this
    position = rope(c, h.head_dim, max_position=max_position, partial=0.5)
    of = attention(h, position, qkv_bias=bias, out_bias=bias)
    recurrent, mlp = bamba_mixer(c, eps), gated(c, bias=c.take("mlp_bias", bool, False))
    attended = c.take("attn_layer_indices", list, [])
    c.ignore("z_loss_coefficient")

    def layer(i: int) -> LayerSpec:
        mixer: dict[str, Any] = {"attention": of} if i in attended else {"recurrent": recurrent}
        return LayerSpec(**mixer, mlp=mlp, block=before(norm))

    return model(c, "bamba", layer, norm, max_position)


def read_granite(c: ConfigReader) -> ModelSpec:
    c.assume(num_attention_heads=32, hidden_size=4096, num_hidden_layers=32, vocab_size=32000)
    h, max_position = heads(c), c.size("max_position_embeddings", 2048)
    eps = c.take("rms_norm_eps", float, 1e-6)
    norm, bias = rms(c.size("hidden_size"), eps), c.take("attention_bias", bool, False)
    rotated = c.take("position_embedding_type", str, "nope")
    if rotated not in ("nope", "rope"):
        raise c.unsupported("position_embedding_type", "only 'rope' or null is supported")
    position = rope(c, h.head_dim, max_position=max_position) if rotated == "rope" else None
    c.ignore("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    scale = c.take("attention_multiplier", float, 1.0)
    of = attention(h, position, scale=scale, qkv_bias=bias, out_bias=bias)
    recurrent, residual_scale = bamba_mixer(c, eps), c.take("residual_multiplier", float, 1.0)
    which = kinds(
        c,
        KINDS,
        "linear_attention",
        "layers_block_type" if "layers_block_type" in c else "layer_types",
    )
    always = DenseSpec(
        intermediate_size=c.size("shared_intermediate_size", 1024), activation="silu"
    )
    num_experts, per_token = c.take("num_local_experts", int, 8), c.size("num_experts_per_tok", 2)
    c.ignore(
        "output_router_logits", "router_aux_loss_coef", "normalization_function", "init_method"
    )
    size = c.size("intermediate_size", 11008)
    mlp: DenseSpec | MoESpec = always
    if num_experts > 0:
        mlp = MoESpec(
            num_experts=num_experts,
            num_experts_per_token=per_token,
            expert=dataclasses.replace(always, intermediate_size=size),
            normalize=True,
            shared=SharedExpertSpec(mlp=always),
        )

    def layer(i: int) -> LayerSpec:
        is_attended = which[i] == "full_attention"
        mixer: dict[str, Any] = {"attention": of} if is_attended else {"recurrent": recurrent}
        return LayerSpec(**mixer, mlp=mlp, block=before(norm), residual_scale=residual_scale)

    return model(
        c,
        "granitemoehybrid",
        layer,
        norm,
        max_position,
        embed_scale=c.take("embedding_multiplier", float, 1.0),
        logit_scale=1.0 / c.take("logits_scaling", float, 1.0),
    )


BAMBA: dict[str, Theirs] = {
    **LLAMA,
    **mamba_names("mamba"),
    "final_norm": "model.final_layernorm",
    "pre_mlp": "pre_ff_layernorm",
    "mlp.up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp.down": "feed_forward.down_proj",
}
GRANITE: dict[str, Theirs] = {
    **LLAMA,
    **mamba_names("mamba"),
    "mlp.up": "shared_mlp.input_linear",
    "mlp.down": "shared_mlp.output_linear",
    "shared.up": "shared_mlp.input_linear",
    "shared.down": "shared_mlp.output_linear",
    "router": "block_sparse_moe.router.layer",
    "experts.up": "block_sparse_moe.input_linear",
    "experts.down": "block_sparse_moe.output_linear",
}
CONV = {"recurrent.conv": of_conv}


def gguf_granite(m: ConfigReader) -> dict[str, Any]:
    """Reads a GGUF file that is a Granite or a Bamba. llama.cpp writes both in one way; only
    Bamba's attention is rotated."""
    if m.take("rope.scaling.finetuned", bool, False):
        raise m.unsupported("rope.scaling.finetuned", "Bamba is not read from GGUF files")
    scales = {
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "embedding_multiplier": "embedding_scale",
        "logits_scaling": "logit_scale",
    }
    num_experts, hidden = m.take("expert_count", int, 0), m.size("embedding_length")
    kinds = ["full_attention" if n else "linear_attention" for n in kv_heads(m)]
    return {
        **llama_gguf_config(m, experts=True, by_layer=True),
        **mamba2_gguf_config(m),
        "mamba_expand": m.size("ssm.inner_size") // hidden,
        "layer_types": kinds,
        "num_local_experts": num_experts,
        "num_experts_per_tok": m.take("expert_used_count", int, 0) or 2,
        "shared_intermediate_size": m.size("expert_shared_feed_forward_length"),
        **{ours: m.take(theirs, float, 1.0) for ours, theirs in scales.items()},
    }


FAMILIES = (
    Family(
        model_type="bamba",
        architectures=("BambaForCausalLM",),
        read=read_bamba,
        names=table(BAMBA, changes=CONV),
    ),
    Family(
        model_type="granitemoehybrid",
        architectures=("GraniteMoeHybridForCausalLM",),
        read=read_granite,
        names=table(GRANITE, changes=CONV),
        gguf=GGUFFamily(
            architecture="granitehybrid",
            config=gguf_granite,
            names=gguf_table(GGUF, changes=GGUF_CHANGES),
        ),
    ),
)
