"""DeepSeek V2, V2-Lite and V3, Kimi K2, GLM-4.7-Flash, Youtu: latent attention, mixtures of experts with shared experts, and
YaRN that scales the scores too. The router chooses groups of experts first (V2), and uses sigmoid scores with a correction
(V3; so does dots.llm1, which is here too)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily, Names
from slipstream.spec.families.builders import (
    NO_NAMES,
    ROPE_TYPES,
    before,
    decoder,
    gated,
    kinds_of_layers,
    model,
    query_scale,
    rms,
    rope,
)
from slipstream.spec.families.metadata import llama_gguf_config, scaling_gguf_config
from slipstream.spec.families.mtp import DEEPSEEK
from slipstream.spec.families.names import LLAMA, Change, Theirs, gguf_table, table
from slipstream.spec.model import (
    GroupLimit,
    IndexSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    RopeSpec,
    SharedExpertSpec,
    YarnScaling,
)
from slipstream.spec.parameters import Placement, Transpose


def read_v2(c: ConfigReader) -> ModelSpec:
    """Reads DeepSeek V2, or V3 in a GGUF file: llama.cpp has one architecture for both."""
    if c.take("scoring_func", str, "softmax") == "sigmoid":
        return read_v3(c)
    c.require("norm_topk_prob", False)
    c.require("scoring_func", "softmax")
    method = c.take("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise c.unsupported("topk_method", "only 'greedy' or 'group_limited_greedy' is supported")
    groups = expert_groups(c, "best") if method == "group_limited_greedy" else None
    c.ignore("n_group", "topk_group")
    moe = mixture(
        c, normalize=False, groups=groups, weight_scale=c.take("routed_scaling_factor", float, 1.0)
    )
    return read_latent(
        c, "deepseek_v2", moe, interleaved=True, dense=c.take("first_k_dense_replace", int, 0)
    )


def corrected_mixture(c: ConfigReader, *, weight_scale: float) -> MoESpec:
    """V3's mixture of experts: sigmoid scores, with a correction bias that only affects which experts are chosen."""
    # multi-token prediction, which is not run
    c.ignore("num_nextn_predict_layers", "num_mtp_layers")
    return mixture(
        c,
        normalize=c.take("norm_topk_prob", bool, True),
        scores="sigmoid",
        correction=True,
        groups=expert_groups(c, "best_two"),
        weight_scale=c.take("routed_scaling_factor", float, weight_scale),
    )


def read_v3(
    c: ConfigReader, family: str = "deepseek_v3", *, dense: int | None = None, **more: Any
) -> ModelSpec:
    """Reads DeepSeek V3. `dense`: number of leading layers without experts, for configs whose keys
    for it differ from V3's."""
    c.require("scoring_func", "sigmoid")
    c.require("topk_method", "noaux_tc")
    moe = corrected_mixture(c, weight_scale=2.5)
    interleaved = c.take("rope_interleave", bool, True)
    dense = c.take("first_k_dense_replace", int, 3) if dense is None else dense
    return read_latent(c, family, moe, interleaved=interleaved, dense=dense, **more)


def read_sarvam_mla(c: ConfigReader) -> ModelSpec:
    """Sarvam 105B: V3's layers. Its authors' config has other names for the numbers of experts and for YaRN."""
    c.alias(SARVAM_KEYS)
    c.assume_missing(
        **dict(n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, q_lora_rank=None),
        **dict(n_group=1, topk_group=1, first_k_dense_replace=1, moe_intermediate_size=2048),
        **dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    )
    c.require("q_head_dim", c.size("qk_nope_head_dim") + c.size("qk_rope_head_dim"))
    return read_v3(c, "sarvam_mla", renamed={"deepseek_yarn": "yarn"})


SARVAM_KEYS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def read_axk1(c: ConfigReader) -> ModelSpec:
    """A.X K1: V3's layers, with a norm after the experts."""
    c.assume_missing(
        **dict(num_key_value_heads=64, n_routed_experts=192, n_shared_experts=1, n_group=8),
        **dict(topk_group=4, num_experts_per_tok=8, moe_intermediate_size=2048),
        **dict(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64),
        **dict(v_head_dim=128, max_position_embeddings=32768),
    )
    c.size("q_lora_rank")
    return read_v3(c, "axk1", dense=dense_layers(c, 1), norms_experts=True)


def read_glm4_moe_lite(c: ConfigReader) -> ModelSpec:
    """GLM-4.7-Flash: V3's layers. A list in the config says which layers have experts."""
    c.assume_missing(
        **dict(num_key_value_heads=20, n_group=1, topk_group=1, n_routed_experts=64),
        **dict(n_shared_experts=1, num_experts_per_tok=4, moe_intermediate_size=1536),
        **dict(kv_lora_rank=512, q_lora_rank=768, qk_nope_head_dim=192, qk_rope_head_dim=64),
        **dict(v_head_dim=256, rms_norm_eps=1e-5, max_position_embeddings=202752),
    )
    c.require("scoring_func", "sigmoid")
    c.require("topk_method", "noaux_tc")
    num_dense = dense_layers(c, 1)
    moe, interleaved = corrected_mixture(c, weight_scale=1.8), c.take("rope_interleave", bool, True)
    return read_latent(c, "glm4_moe_lite", moe, interleaved=interleaved, dense=num_dense)


def dense_layers(c: ConfigReader, default: int) -> int:
    """Number of leading layers without experts, by the config's list or count of them, which must agree."""
    count, named = c.size("num_hidden_layers"), "first_k_dense_replace" in c
    dense = min(c.take("first_k_dense_replace", int, default), count)
    kinds = c.take("mlp_layer_types", list, ["dense"] * dense + ["sparse"] * (count - dense))
    num_dense = kinds.index("sparse") if "sparse" in kinds else count
    if kinds != ["dense"] * num_dense + ["sparse"] * (count - num_dense):
        raise c.unsupported("mlp_layer_types", f"must be {count} of dense, then sparse")
    if named and dense != num_dense:
        raise c.unsupported("first_k_dense_replace", "mlp_layer_types says otherwise")
    return num_dense


def read_minicpm3(c: ConfigReader) -> ModelSpec:
    """MiniCPM 3: latent attention in dense layers, with multipliers of embeddings, additions to the residual, and logits."""
    c.assume_missing(
        **dict(num_key_value_heads=40, kv_lora_rank=256, q_lora_rank=768, qk_nope_head_dim=64),
        **dict(qk_rope_head_dim=32, rms_norm_eps=1e-5, max_position_embeddings=32768),
        **dict(scale_depth=1.4, dim_model_base=256),
    )
    hidden, count = c.size("hidden_size"), c.size("num_hidden_layers")
    c.assume(v_head_dim=hidden // c.size("num_attention_heads"))
    scale = c.take("scale_emb", float, 12.0)
    if scale <= 0:
        raise c.unsupported("scale_emb", "must be above 0")
    return read_latent(
        c,
        "minicpm3",
        None,
        interleaved=False,
        dense=count,
        residual_scale=c.take("scale_depth", float, count**0.5) / count**0.5,
        embed_scale=scale,
        logit_scale=c.take("dim_model_base", float, float(hidden)) / hidden,
        tied=True,
    )


def read_youtu(c: ConfigReader) -> ModelSpec:
    """Youtu-LLM: V3's attention in dense layers."""
    c.assume_missing(
        **dict(num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128),
        **dict(qk_rope_head_dim=64, v_head_dim=128, max_position_embeddings=131072),
    )
    c.ignore("embedding_initializer_range")
    count, interleaved = c.size("num_hidden_layers"), c.take("rope_interleave", bool, True)
    return read_latent(c, "youtu", None, interleaved=interleaved, dense=count, tied=True)


def read_mistral4(c: ConfigReader, positions: Mapping[str, Any]) -> ModelSpec:
    """Mistral 4: V3's layers with softmax scores, without a correction. `positions`: the default rotary embedding."""
    c.assume_missing(
        **dict(num_key_value_heads=32, n_group=1, topk_group=1, n_routed_experts=128),
        **dict(n_shared_experts=1, num_experts_per_tok=4, moe_intermediate_size=2048),
        **dict(kv_lora_rank=256, q_lora_rank=1024, qk_nope_head_dim=64, qk_rope_head_dim=64),
        **dict(v_head_dim=128, max_position_embeddings=1048576),
    )
    if c.value("rope_scaling"):  # transformers would rotate whole keys
        raise c.unsupported("rope_scaling", "only rope_parameters are read in this family")
    moe = mixture(
        c,
        normalize=c.take("norm_topk_prob", bool, True),
        groups=expert_groups(c, "best_two"),
        weight_scale=c.take("routed_scaling_factor", float, 1.0),
    )
    dense = c.take("first_k_dense_replace", int, 0)
    interleaved = c.take("rope_interleave", bool, True)
    return read_latent(
        c, "mistral4", moe, interleaved=interleaved, dense=dense, positions=positions, scaled=True
    )


def read_dots1(c: ConfigReader) -> ModelSpec:
    """dots.llm1: V3's experts, with Qwen 3's attention."""
    c.assume_missing(num_key_value_heads=32, norm_topk_prob=False, n_group=1, topk_group=1)
    c.assume(moe_intermediate_size=1408)
    c.require("scoring_func", "sigmoid", "noaux_tc")
    dense, moe = gated(c), corrected_mixture(c, weight_scale=1.0)
    num_dense = c.take("first_k_dense_replace", int, 0)
    window = c.maybe("sliding_window", int) if c.says("sliding_window") else 4096
    first = c.take("max_window_layers", int, 62)
    kinds = kinds_of_layers(
        c, lambda i: "sliding_attention" if window and i >= first else "full_attention"
    )
    if window is None and "sliding_attention" in kinds:
        raise c.unsupported("layer_types", "has sliding_attention, but there is no sliding_window")
    return decoder(
        c,
        "dots1",
        mlp=lambda i: dense if i < num_dense else moe,
        over="head",
        kinds=kinds,
        window=window,
    )


def expert_groups(c: ConfigReader, by: Literal["best", "best_two"]) -> GroupLimit | None:
    limit = GroupLimit(num_groups=c.size("n_group"), num_chosen=c.size("topk_group"), by=by)
    return None if limit.num_groups == 1 else limit


def mixture(
    c: ConfigReader,
    *,
    normalize: bool,
    groups: GroupLimit | None,
    weight_scale: float,
    scores: Literal["softmax", "sigmoid"] = "softmax",
    correction: bool = False,
) -> MoESpec:
    c.require("moe_layer_freq", 1)
    c.ignore("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "router_aux_loss_coef")
    expert = dataclasses.replace(gated(c), intermediate_size=c.size("moe_intermediate_size"))
    num_shared = c.maybe("n_shared_experts", int)
    together = dataclasses.replace(
        expert, intermediate_size=expert.intermediate_size * (num_shared or 0)
    )
    return MoESpec(
        num_experts=c.size("n_routed_experts"),
        num_experts_per_token=c.size("num_experts_per_tok"),
        expert=expert,
        normalize=normalize,
        scores=scores,
        correction=correction,
        groups=groups,
        weight_scale=weight_scale,
        shared=SharedExpertSpec(mlp=together) if num_shared else None,
    )


def read_latent(
    c: ConfigReader,
    family: str,
    moe: MoESpec | None,
    *,
    interleaved: bool,
    dense: int,
    positions: Mapping[str, Any] | None = None,
    scaled: bool = False,
    residual_scale: float = 1.0,
    index: Callable[[int, RopeSpec], IndexSpec | Literal["previous"]] | None = None,
    renamed: Mapping[str, str] = NO_NAMES,
    norms_experts: bool = False,
    **more: Any,
) -> ModelSpec:
    """Reads a model with latent attention (MLA). The first `dense` layers have no experts. `positions`:
    default rotary embedding. `scaled`: queries are scaled by position, and the config counts the rotated part
    as a fraction of a whole key. `index`: function that makes the sparse-attention index of a layer with this
    rotary embedding. `renamed`: see `rope`. `norms_experts`: the experts' output is normed."""
    num_heads = c.size("num_attention_heads")
    plain = c.size("qk_nope_head_dim")
    rotary = c.size("qk_rope_head_dim")
    c.require("num_key_value_heads", num_heads)
    c.require("head_dim", plain + rotary if scaled else rotary, c.size("kv_lora_rank") + rotary)
    c.require("qk_head_dim", plain + rotary)
    c.require("mlp_bias", False)
    max_position = c.size("max_position_embeddings", 4096)
    eps = c.take("rms_norm_eps", float, 1e-6)
    norm = rms(c.size("hidden_size"), eps)
    position = rope(
        c,
        plain + rotary if scaled else rotary,
        max_position=max_position,
        style="interleaved" if interleaved else "half",
        partial=rotary / (plain + rotary) if scaled else None,
        default=positions,
        renamed=renamed,
        rope_types=("yarn",) if scaled else ROPE_TYPES,
    )
    if position.rotary_dim != rotary:
        raise c.unsupported("rope_parameters", f"partial_rotary_factor must make {rotary}")
    attention = LatentAttentionSpec(
        num_heads=num_heads,
        nope_dim=plain,
        value_dim=c.size("v_head_dim"),
        kv_rank=c.size("kv_lora_rank"),
        q_rank=c.maybe("q_lora_rank", int),
        scale=scale_of(plain + rotary, position),
        position=position,
        query_scale=query_scale(c, positions) if scaled and positions else None,
        eps=1e-6,  # the latents' norms do not use rms_norm_eps
        bias=c.take("attention_bias", bool, False),
    )
    mlp = gated(c)

    def layer(i: int) -> LayerSpec:
        of = mlp if i < dense or moe is None else moe
        own = None if index is None else index(i, position)
        block = before(norm)
        if norms_experts and of is moe:
            block = dataclasses.replace(block, post_mlp=norm)
        return LayerSpec(
            attention=dataclasses.replace(attention, index=own),
            mlp=of,
            block=block,
            residual_scale=residual_scale,
        )

    return model(c, family, layer, norm, max_position, **more)


def scale_of(head_dim: int, position: RopeSpec) -> float:
    """Scale of attention scores, including YaRN's factor."""
    scale: float = head_dim**-0.5
    scaling = position.scaling
    if isinstance(scaling, YarnScaling) and scaling.factor > 1.0:
        scale *= (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2
    return scale


SHARED: dict[str, Theirs] = {
    **LLAMA,
    "correction": {"weight": "mlp.gate.e_score_correction_bias"},
    "shared.up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared.down": "mlp.shared_experts.down_proj",
}
NAMES: dict[str, Theirs] = {
    **SHARED,
    "attention.q_latent": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.latent": "self_attn.kv_a_proj_with_mqa",
    "attention.k_norm": "self_attn.kv_a_layernorm",
    "attention.expand": "self_attn.kv_b_proj",
}


STACKED: dict[str, Theirs] = {
    "experts.up": {"weight": "mlp.experts.gate_up_proj"},
    "experts.down": {"weight": "mlp.experts.down_proj"},
}
"""Mistral 4's tensor names. Each tensor holds all experts."""


def names(spec: ModelSpec) -> Names:
    a = spec.layers[0].attention
    assert isinstance(a, LatentAttentionSpec)
    q = "self_attn.q_proj" if a.q_rank is None else "self_attn.q_b_proj"
    more = STACKED if spec.family == "mistral4" else {}
    return table({**NAMES, "post_mlp": "post_mlp_layernorm", **more, "attention.q": q})(spec)


def gguf_experts(m: ConfigReader) -> dict[str, Any]:
    return {
        "n_routed_experts": m.size("expert_count"),
        "n_shared_experts": m.maybe("expert_shared_count", int),
        "num_experts_per_tok": m.size("expert_used_count"),
        "moe_intermediate_size": m.size("expert_feed_forward_length"),
        "first_k_dense_replace": m.take("leading_dense_block_count", int, 0),
        "routed_scaling_factor": m.take("expert_weights_scale", float, 1.0),
        "norm_topk_prob": m.take("expert_weights_norm", bool, False),
    }


def gguf_latents(m: ConfigReader) -> dict[str, Any]:
    """Reads the config of a GGUF file with latent attention, in the format used since llama.cpp
    attends over latents. Older files, which store `attn_kv_b`, are not supported."""
    rotary, kv_rank = m.size("rope.dimension_count"), m.size("attention.kv_lora_rank")
    m.require("attention.key_length", kv_rank + rotary)
    m.require("attention.value_length", kv_rank)
    return {
        "hidden_size": m.size("embedding_length"),
        "num_hidden_layers": m.size("block_count"),
        "intermediate_size": m.size("feed_forward_length"),
        "num_attention_heads": m.size("attention.head_count"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": m.size("attention.key_length_mla") - rotary,
        "v_head_dim": m.size("attention.value_length_mla"),
        "kv_lora_rank": kv_rank,
        "q_lora_rank": m.maybe("attention.q_lora_rank", int),
        "max_position_embeddings": m.size("context_length"),
        "rope_theta": m.take("rope.freq_base", float, 10000.0),
        "rms_norm_eps": m.take("attention.layer_norm_rms_epsilon", float),
        "hidden_act": "silu",
    }


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    m.require("attention.head_count_kv", 1)
    m.require("rope.scaling.attn_factor", 1.0)
    latents = gguf_latents(m)
    scaling = scaling_gguf_config(m, latents["qk_rope_head_dim"])
    if scaling and scaling["rope_scaling"]["rope_type"] != "yarn":
        raise m.unsupported("rope.scaling.type", "only yarn is supported")
    if scaling:  # without it llama.cpp's scores differ from the model's
        multiplier = 10 * m.take("rope.scaling.yarn_log_multiplier", float)
        scaling["rope_scaling"] |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    m.ignore("rope.scaling.yarn_log_multiplier")
    groups = m.size("expert_group_count", 1)
    config: dict[str, Any] = {
        **latents,
        **scaling,
        **gguf_experts(m),
        "n_group": groups,
        "topk_group": m.size("expert_group_used_count", 1),
    }
    m.require("expert_gating_func", 1, 2)
    if m.take("expert_gating_func", int, 1) == 2:
        return {**config, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return {**config, "topk_method": "greedy" if groups == 1 else "group_limited_greedy"}


GGUF_NAMES: dict[str, Theirs] = {
    "attention.q_latent": "attn_q_a",
    "attention.q_norm": "attn_q_a_norm",
    "attention.latent": "attn_kv_a_mqa",
    "attention.k_norm": "attn_kv_a_norm",
    "attention.expand": "attn_kv_b",
    "correction": {"weight": "exp_probs_b.bias"},
}


def dots1_gguf_config(m: ConfigReader) -> dict[str, Any]:
    m.require("expert_gating_func", 2)
    m.ignore("expert_shared_feed_forward_length")  # total size of the shared experts
    return {**llama_gguf_config(m, experts=True), **gguf_experts(m), "sliding_window": None}


def gguf_names(spec: ModelSpec) -> Names:
    return gguf_latent_names(spec, GGUF_NAMES)


def gguf_latent_names(
    spec: ModelSpec, names: Mapping[str, Theirs], changes: Mapping[str, Change] | None = None
) -> Names:
    """Names in GGUF files of models with latent attention. `expand` is stored per head as two
    tensors: one for keys, transposed, and one for values."""
    latents = {i: x.attention for i, x in enumerate(spec.layers) if x.attention is not None}
    q_rank = next((a.q_rank for a in latents.values() if isinstance(a, LatentAttentionSpec)), None)
    q = "attn_q" if q_rank is None else "attn_q_b"
    found = gguf_table({**names, "attention.q": q}, changes=changes)(spec)
    for i, a in latents.items():
        assert isinstance(a, LatentAttentionSpec)
        expand = found.pop(f"blk.{i}.attn_kv_b.weight").target
        found[f"blk.{i}.attn_k_b.weight"] = Placement(
            expand, 0, a.nope_dim, Transpose(), a.num_heads
        )
        found[f"blk.{i}.attn_v_b.weight"] = Placement(
            expand, a.nope_dim, a.value_dim, None, a.num_heads
        )
    return found


FAMILIES = (
    Family(
        model_type="deepseek_v2",
        architectures=("DeepseekV2ForCausalLM",),
        read=read_v2,
        names=names,
        gguf=GGUFFamily(architecture="deepseek2", config=gguf_config, names=gguf_names),
    ),
    *(
        Family(model_type=name, architectures=(architecture,), read=read, names=names, mtp=DEEPSEEK)
        for name, architecture, read in (
            ("deepseek_v3", "DeepseekV3ForCausalLM", read_v3),
            (
                "kimi_k2",
                "DeepseekV3ForCausalLM",
                read_v3,
            ),  # the authors' name of the same architecture
            ("glm4_moe_lite", "Glm4MoeLiteForCausalLM", read_glm4_moe_lite),
        )
    ),
    Family(
        model_type="sarvam_mla",
        architectures=("SarvamMLAForCausalLM", "DeepseekV3ForCausalLM"),
        read=read_sarvam_mla,
        names=names,
    ),
    Family(
        model_type="axk1",
        architectures=("AXK1ForCausalLM",),
        read=read_axk1,
        names=names,
        ignored=(r"model\.layers\.\d+\.post_mlp_layernorm\.weight",),  # norms in dense layers
    ),
    Family(model_type="youtu", architectures=("YoutuForCausalLM",), read=read_youtu, names=names),
    Family(
        model_type="minicpm3",
        architectures=("MiniCPM3ForCausalLM",),
        read=read_minicpm3,
        names=names,
    ),
    Family(
        model_type="dots1",
        architectures=("Dots1ForCausalLM",),
        read=read_dots1,
        names=table(SHARED),
        gguf=GGUFFamily(
            architecture="dots1",
            config=dots1_gguf_config,
            names=gguf_table({"correction": {"weight": "exp_probs_b.bias"}}),
        ),
    ),
)
