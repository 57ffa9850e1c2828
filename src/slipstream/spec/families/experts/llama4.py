"""Llama 4's language models, also those of multimodal checkpoints, without their tower for pictures.

1. Layers with positions rotate q and k first and norm them then, without weights. Every fourth layer has no positions; its
   queries are scaled by position.
2. Mixtures have a shared expert, and an expert's weight multiplies its input.
3. Layers with positions attend within chunks of 8192 tokens. No kernel implements chunks, so the context is
   limited to the first chunk, where chunked and full attention agree.
"""

from __future__ import annotations

import dataclasses

from slipstream.spec.families.base import ConfigReader, Family
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
from slipstream.spec.families.names import LLAMA, Theirs, table
from slipstream.spec.model import (
    LayerSpec,
    ModelSpec,
    MoESpec,
    QKNormSpec,
    QueryScale,
    SharedExpertSpec,
)

CHUNKED, FULL = "chunked_attention", "full_attention"


def read(c: ConfigReader) -> ModelSpec:
    c.require("model_type", "llama4_text")
    c.assume_missing(head_dim=128, num_key_value_heads=8)
    h, count = heads(c), c.size("num_hidden_layers", 48)
    max_position = c.size("max_position_embeddings", 131072)
    norm = rms(c.size("hidden_size", 5120), c.take("rms_norm_eps", float, 1e-5))
    position = rope(c, h.head_dim, theta=5e5, max_position=max_position, style="interleaved")
    chunk = c.maybe("attention_chunk_size", int) if c.says("attention_chunk_size") else 8192
    every = c.size("no_rope_layer_interval", 4)
    rotated = c.value("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    if not isinstance(rotated, list) or len(rotated) != count or not {*rotated} <= {0, 1}:
        raise c.unsupported("no_rope_layers", f"must be {count} of 0 or 1")
    found = kinds(
        c, (CHUNKED, FULL), lambda i: CHUNKED if rotated[i] and chunk is not None else FULL
    )
    if CHUNKED in found:
        if chunk is None or chunk < 1:
            raise c.unsupported("attention_chunk_size", f"{CHUNKED} needs a number above 0")
        max_position = min(max_position, chunk)
    normed = c.take("use_qk_norm", bool, True)
    qk_norm = QKNormSpec(over="head", eps=norm.eps, after=True, learned=False) if normed else None
    period, beta = c.size("floor_scale", 8192), c.take("attn_scale", float, 0.1)
    c.require("attn_temperature_tuning", False, True, 4)  # the first configs have 4 instead of True
    tuned = c.value("attn_temperature_tuning") is not False
    scale = QueryScale(beta=beta, period=period, offset=1) if tuned else None
    step = c.size("interleave_moe_layer_step", 1)
    mixed = c.take("moe_layers", list, list(range(step - 1, count, step)))
    expert, bias = gated(c), c.take("attention_bias", bool, False)
    dense = dataclasses.replace(expert, intermediate_size=c.size("intermediate_size_mlp", 16384))
    moe = MoESpec(
        num_experts=c.size("num_local_experts", 16),
        num_experts_per_token=c.size("num_experts_per_tok", 1),
        expert=expert,
        normalize=False,
        scores="sigmoid",
        scales_input=True,
        shared=SharedExpertSpec(mlp=expert),
    )
    c.ignore("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    c.ignore("for_llm_compressor", "cache_implementation")

    def layer(i: int) -> LayerSpec:
        of = attention(
            h,
            position if rotated[i] else None,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=qk_norm if rotated[i] else None,
            query_scale=None if rotated[i] else scale,
        )
        return LayerSpec(attention=of, mlp=moe if i in mixed else dense, block=before(norm))

    return model(c, "llama4", layer, norm, max_position)


NAMES: dict[str, Theirs] = {
    **LLAMA,
    "mlp.up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp.down": "feed_forward.down_proj",
    "router": "feed_forward.router",
    "experts.up": {"weight": "feed_forward.experts.gate_up_proj"},
    "experts.down": {"weight": "feed_forward.experts.down_proj"},
    "shared.up": ("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    "shared.down": "feed_forward.shared_expert.down_proj",
}
names = table(NAMES, changes=dict.fromkeys(("experts.up", "experts.down"), "transpose"))

FAMILIES = (
    Family(
        model_type="llama4_text",
        architectures=("Llama4ForCausalLM",),
        read=read,
        names=names,
        prefixes=("language_model.", ""),
    ),
    Family(
        model_type="llama4",
        architectures=("Llama4ForConditionalGeneration",),
        read=read,
        names=names,
        nested_config="text_config",
        prefixes=("language_model.",),
        ignored=(r"(vision_model|multi_modal_projector)\..*",),  # no image encoder
    ),
)
