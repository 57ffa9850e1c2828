"""MiniMax M2: mixtures of experts by sigmoid scores with a correction, norms of q and of k over all heads, rotary embedding of
a part of each head. MiniMax Text 01 and M1: lightning attention in most layers."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily, Names
from slipstream.spec.families.builders import (
    attention,
    decoder,
    gated,
    heads,
    kinds,
    model,
    rms,
    rope,
)
from slipstream.spec.families.llama import MIXTRAL
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.names import Theirs, gguf_table, table
from slipstream.spec.model import LayerSpec, LightningSpec, ModelSpec, MoESpec, PostNormBlock
from slipstream.spec.parameters import Regroup


def read(c: ConfigReader) -> ModelSpec:
    c.assume_missing(head_dim=128, num_key_value_heads=8)
    rotated = c.maybe("rotary_dim", int)
    if rotated is not None:
        c.assume(partial_rotary_factor=rotated / c.size("head_dim"))
    moe = MoESpec(
        num_experts=c.size("num_local_experts", 256),
        num_experts_per_token=c.size("num_experts_per_tok", 8),
        expert=gated(c),
        normalize=True,
        scores="sigmoid",
        correction=True,
    )
    c.ignore("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    # Further keys of the authors' config. Multi-token prediction is not run.
    c.require_all(scoring_func="sigmoid", qk_norm_type="per_layer", use_qk_norm=True)
    c.require_all(use_routing_bias=True, shared_intermediate_size=0)
    c.require("sliding_window")
    c.require("attn_type_list", [1] * c.size("num_hidden_layers"))
    c.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    c.ignore("shared_moe_mode", "mlp_intermediate_size")  # about shared experts and dense layers
    for key in ("full_attention", "linear_attention", "mlp"):
        c.require(f"layernorm_{key}_beta", 1.0)
    return decoder(
        c,
        "minimax_m2",
        max_position=196608,
        bias=(False, False),
        mlp=moe,
        over="row",
        positions={"theta": 5e6, "partial": 1.0},
    )


FULL, LINEAR = "full_attention", "linear_attention"
FACTORS = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}


def read_lightning(c: ConfigReader) -> ModelSpec:
    """MiniMax Text 01 and M1. Each residual is the norm's output, not its input:

    h = norm(h); h = α h + β attention(h); h = norm'(h); h = α' h + β' mlp(h).

    Here this is a block with norms after attention and MLP: each layer owns the next layer's first norm, and the embeddings
    are normed. A norm cancels a constant factor of its input, so only β / α matters, with epsilon divided by α²."""
    hub = c.value("model_type") != "minimax"  # the authors' keys, not transformers'
    c.assume_missing(num_key_value_heads=8)
    count, h, hidden = c.size("num_hidden_layers"), heads(c), c.size("hidden_size")
    for ours, theirs in FACTORS.items():
        c.alias({f"{ours}_{x}_factor": f"layernorm_{theirs}_{x}" for x in ("alpha", "beta")})
    if hub:
        listed = [FULL if x == 1 else LINEAR for x in c.take("attn_type_list", list)]
        c.assume(layer_types=listed)
        c.assume(partial_rotary_factor=c.size("rotary_dim", h.head_dim) / h.head_dim)
        c.require("postnorm", True)
        c.require("shared_intermediate_size", 0)
        c.ignore("shared_moe_mode", "layernorm_epsilon")
    c.require("sliding_window")
    c.require("hidden_act", "silu", "swish")  # the activation of q, k and v, too
    c.ignore("block_size")  # number of tokens that transformers computes at once
    found = kinds(c, (FULL, LINEAR), lambda i: LINEAR if i % 2 else FULL)
    eps, longest = (
        c.take("rms_norm_eps", float, 1e-5),
        c.size("max_position_embeddings", 4096 * 32),
    )
    position = rope(c, h.head_dim, max_position=longest, theta=1e6, partial=1.0 if hub else None)
    moe = MoESpec(
        num_experts=c.size("num_local_experts", 8),
        num_experts_per_token=c.size("num_experts_per_tok", 2),
        expert=gated(c),
        normalize=True,
    )
    c.ignore("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    factors = {
        x: tuple(c.take(f"{x}_{y}_factor", float, 1.0) for y in ("alpha", "beta")) for x in FACTORS
    }
    (above, fed), base = factors["mlp"], 2.0 ** (-8 / h.num_heads)

    def layer(i: int) -> LayerSpec:
        is_full = found[i] == FULL
        name = "full_attn" if is_full else "linear_attn"
        alpha, beta = factors[name]
        if alpha <= 0 or above <= 0 or beta * above != fed * alpha:
            raise c.unsupported(
                f"{name}_beta_factor",
                f"must be to {name}_alpha_factor as mlp_beta_factor to mlp_alpha_factor",
            )
        share = 1 - i / (count - 1 + 1e-5) + 1e-5
        rates = tuple(base ** (j + 1) * share for j in range(h.num_heads))
        return LayerSpec(
            attention=attention(h, position) if is_full else None,
            recurrent=None
            if is_full
            else LightningSpec(
                num_heads=h.num_heads,
                value_dim=h.head_dim,
                key_dim=h.head_dim,
                eps=1e-6,  # fixed, whatever the config says
                rates=rates,
            ),
            mlp=moe,
            block=PostNormBlock(
                attention_norm=rms(hidden, eps / alpha**2), mlp_norm=rms(hidden, eps / above**2)
            ),
            residual_scale=beta / alpha,
        )

    return model(c, "minimax", layer, None, longest, embed_norm=rms(hidden, eps))


def lightning_names(spec: ModelSpec) -> Names:
    found, last = table(LIGHTNING, changes={"recurrent.in": _by_head})(spec), spec.num_layers
    return {
        f"model.layers.{i + 1}.input_layernorm.weight".replace(
            f"model.layers.{last}.input_layernorm", "model.norm"
        )
        if name == f"model.layers.{i}.NEXT.weight"
        else name: place
        for name, place in found.items()
        for i in [int(name.split(".")[2]) if name.startswith("model.layers.") else -1]
    }


def _by_head(layer: LayerSpec, part: int) -> Regroup | None:
    """Reorders stored rows, which are grouped by head as q, k, v, to all v, then all k, then all
    q."""
    r = layer.recurrent
    assert isinstance(r, LightningSpec)
    return Regroup(r.num_heads, (r.key_dim,) * 3, (2, 1, 0)) if part else None


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    m.require("expert_gating_func", 2)
    config = llama_gguf_config(m, partial=True, experts=True)
    return {
        **config,
        "intermediate_size": m.size("expert_feed_forward_length", config["intermediate_size"]),
        "num_local_experts": m.size("expert_count"),
        "num_experts_per_tok": m.size("expert_used_count"),
    }


NAMES: dict[str, Theirs] = {
    **MIXTRAL,
    "correction": {"weight": "block_sparse_moe.e_score_correction_bias"},
}
LIGHTNING: dict[str, Theirs] = {
    **MIXTRAL,
    "embed_norm": "model.layers.0.input_layernorm",
    "attention_norm": "post_attention_layernorm",
    "mlp_norm": "NEXT",
    "recurrent.in": ("self_attn.output_gate", "self_attn.qkv_proj"),
    "recurrent.norm": "self_attn.norm",
    "recurrent.out": "self_attn.out_proj",
}
BUFFERS = r"(model\.)?layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)"
GGUF_NAMES: dict[str, Theirs] = {"correction": {"weight": "exp_probs_b.bias"}}

FAMILIES = (
    *(
        Family(
            model_type=name,
            architectures=(architecture,),
            read=read_lightning,
            names=lightning_names,
            ignored=(BUFFERS,),
        )
        for name, architecture in (
            ("minimax", "MiniMaxForCausalLM"),
            ("minimax_text_01", "MiniMaxText01ForCausalLM"),
            ("minimax_m1", "MiniMaxM1ForCausalLM"),
        )
    ),
    Family(
        model_type="minimax_m2",
        architectures=("MiniMaxM2ForCausalLM",),
        read=read,
        names=table(NAMES),
        gguf=GGUFFamily(
            architecture="minimax-m2", config=gguf_config, names=gguf_table(GGUF_NAMES)
        ),
    ),
)
