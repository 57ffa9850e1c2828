"""OLMo: layer norms without weights, and clamped q, k and v. OLMo 2 and 3: post-norms without pre-norms, and norms over all
heads of q and of k. OLMo 3 has a window in three layers of four. OLMoE and FlexOlmo are mixtures, the first with norms before
attention and MLP."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    after,
    attention,
    decoder,
    gated,
    heads,
    kinds_of_layers,
    model,
    rms,
    rope,
    rope_of_kind,
)
from slipstream.spec.families.llama import UNPERMUTED
from slipstream.spec.families.metadata import gguf_config as common_gguf_config
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.names import LLAMA, gguf_table, table
from slipstream.spec.model import LayerSpec, ModelSpec, MoESpec, NormSpec, QKNormSpec, RopeSpec


def read_olmo(c: ConfigReader) -> ModelSpec:
    clip = c.maybe("clip_qkv", float)
    norm = NormSpec(kind="layer", size=c.size("hidden_size"), eps=1e-5, learned=False)
    bias = (c.take("attention_bias", bool, False),) * 2
    return decoder(c, "olmo", norm=norm, bias=bias, mlp=gated(c), more={"clip_qkv": clip})


def read_olmo2(c: ConfigReader) -> ModelSpec:
    """Reads OLMo 2 and 3. llama.cpp writes OLMo 3 as an `olmo2` with windows."""
    return read_olmo3(c) if "sliding_window" in c else _read(c, "olmo2", windows=False)


def read_olmo3(c: ConfigReader) -> ModelSpec:
    return _read(c, "olmo3", windows=True)


def read_olmoe(c: ConfigReader) -> ModelSpec:
    c.require("clip_qkv")  # transformers would clamp after the norms
    return decoder(c, "olmoe", max_position=4096, eps=1e-5, mlp=_mixture(c, 64, 8), over="row")


def read_flex_olmo(c: ConfigReader) -> ModelSpec:
    return decoder(
        c,
        "flex_olmo",
        max_position=4096,
        block=after,
        mlp=_mixture(c, 7, 5),
        over="row",
        positions={"theta": 500000.0},
    )


def _mixture(c: ConfigReader, num_experts: int, per_token: int) -> MoESpec:
    """Reads the mixture of experts. `num_experts` and `per_token` are defaults."""
    c.ignore("output_router_logits", "router_aux_loss_coef")
    return MoESpec(
        num_experts=c.size("num_experts", num_experts),
        num_experts_per_token=c.size("num_experts_per_tok", per_token),
        expert=gated(c),
        normalize=c.take("norm_topk_prob", bool, False),
    )


def _read(c: ConfigReader, family: str, *, windows: bool) -> ModelSpec:
    h = heads(c)
    max_position = c.size("max_position_embeddings", 2048)
    eps = c.take("rms_norm_eps", float, 1e-5)
    norm = rms(c.size("hidden_size"), eps)
    bias, mlp = c.take("attention_bias", bool, False), gated(c)
    window = c.size("sliding_window", 4096) if windows else None
    by_rule = (
        (lambda i: "sliding_attention" if (i + 1) % 4 else "full_attention")
        if windows
        else "full_attention"
    )
    kinds = kinds_of_layers(c, by_rule) if windows else []
    positions = _positions(c, h.head_dim, max_position) if windows else {}
    plain = None if windows else rope(c, h.head_dim, max_position=max_position)

    def layer(i: int) -> LayerSpec:
        kind = kinds[i] if windows else None
        of = attention(
            h,
            plain if kind is None else positions[kind],
            qkv_bias=bias,
            out_bias=bias,
            window=window if kind == "sliding_attention" else None,
            qk_norm=QKNormSpec(over="row", eps=eps),
        )
        return LayerSpec(attention=of, mlp=mlp, block=after(norm))

    return model(c, family, layer, norm, max_position)


def _positions(c: ConfigReader, head_dim: int, max_position: int) -> dict[str, RopeSpec]:
    """Rotary embeddings of OLMo's layers by kind. In OLMo 3, scaling only applies to layers without
    a window."""
    made = {
        kind: rope_of_kind(
            c,
            kind,
            head_dim,
            theta=500000.0,
            max_position=max_position,
            scaled=kind == "full_attention",
        )
        for kind in ("full_attention", "sliding_attention")
    }
    window = (c.maybe("rope_parameters", dict) or {}).get("sliding_attention") or {}
    if "rope_theta" not in window and made["sliding_attention"].theta != 500000.0:
        raise c.unsupported(
            "rope_theta",
            "transformers 5 reads it for layers without a window only; write rope_parameters for both kinds",
        )
    return made


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    window = m.maybe("attention.sliding_window", int)
    if window is None:
        return llama_gguf_config(m)
    config = llama_gguf_config(m)
    theta, count = config.pop("rope_theta"), config["num_hidden_layers"]
    seen = m.take(
        "attention.sliding_window_pattern", list, [(i + 1) % 4 != 0 for i in range(count)]
    )
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    plain = {"rope_type": "default", "rope_theta": m.take("rope.freq_base_swa", float, theta)}
    return {
        **config,
        "sliding_window": window,
        "layer_types": ["sliding_attention" if is_seen else "full_attention" for is_seen in seen],
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": theta},
            "sliding_attention": plain,
        },
    }


def olmo_gguf_config(m: ConfigReader) -> dict[str, Any]:
    if abs(m.take("attention.layer_norm_epsilon", float, 1e-5) - 1e-5) > 1e-9:
        raise m.unsupported("attention.layer_norm_epsilon", "the family has 1e-5")
    clip = m.maybe("attention.clamp_kqv", float)
    return {**common_gguf_config(m), "hidden_act": "silu", "clip_qkv": clip}


def olmoe_gguf_config(m: ConfigReader) -> dict[str, Any]:
    return {
        **llama_gguf_config(m, experts=True),
        "num_experts": m.size("expert_count"),
        "num_experts_per_tok": m.size("expert_used_count"),
    }


names = table(
    {
        **LLAMA,
        "post_attention": "post_attention_layernorm",
        "post_mlp": "post_feedforward_layernorm",
    }
)

FAMILIES = (
    Family(
        model_type="olmo",
        architectures=("OlmoForCausalLM",),
        read=read_olmo,
        names=table(LLAMA),
        gguf=GGUFFamily(architecture="olmo", config=olmo_gguf_config, names=UNPERMUTED),
    ),
    Family(
        model_type="olmo2",
        architectures=("Olmo2ForCausalLM",),
        read=read_olmo2,
        names=names,
        gguf=GGUFFamily(architecture="olmo2", config=gguf_config, names=gguf_table()),
    ),
    Family(model_type="olmo3", architectures=("Olmo3ForCausalLM",), read=read_olmo3, names=names),
    Family(
        model_type="olmoe",
        architectures=("OlmoeForCausalLM",),
        read=read_olmoe,
        names=table(LLAMA),
        gguf=GGUFFamily(architecture="olmoe", config=olmoe_gguf_config, names=gguf_table()),
    ),
    Family(
        model_type="flex_olmo",
        architectures=("FlexOlmoForCausalLM",),
        read=read_flex_olmo,
        names=names,
    ),
)
