"""Nemotron-H and Nemotron 3: each layer of the checkpoint is Mamba-2, attention, an MLP, or a mixture of
experts. No torch.

A mixer and the MLP after it form one layer here. A mixer followed by another mixer is a layer without an MLP.
"""

from __future__ import annotations

import math
import re
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily, Names
from slipstream.spec.families.builders import (
    activation,
    attention,
    called,
    heads,
    model,
    plain,
    rms,
)
from slipstream.spec.families.deepseek import expert_groups
from slipstream.spec.families.hybrids.mamba import GGUF, GGUF_CHANGES, mamba_names
from slipstream.spec.families.metadata import kv_heads, numbers_by_layer
from slipstream.spec.families.mtp import Config, MTPFormat
from slipstream.spec.families.names import LLAMA, Theirs, gguf_table, of_conv, table
from slipstream.spec.model import (
    LayerSpec,
    Mamba2Spec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    SequentialBlock,
    SharedExpertSpec,
)

LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
LEGACY = {"mamba": "linear_attention", "attention": "full_attention"}
MIXERS = ("linear_attention", "full_attention")


def kinds_of_blocks(c: ConfigReader) -> tuple[str, list[str]]:
    """(the config's key for the kinds of layers, the kinds)."""
    key = called(c, "layers_block_type", "layer_types", "hybrid_override_pattern")
    kinds = list(LETTERS.values())
    if key == "hybrid_override_pattern":
        found = [LETTERS.get(letter, letter) for letter in c.take(key, str)]
    else:
        given = c.take(key, list, ["linear_attention", "moe", "full_attention", "mlp"])
        found = [LEGACY.get(str(kind), str(kind)) for kind in given]
    c.ignore("hybrid_override_pattern", "layer_types", "num_hidden_layers")
    if unknown := sorted(set(found) - set(kinds)):
        raise c.unsupported(key, f"has {', '.join(unknown)}; the kinds are {', '.join(kinds)}")
    return key, found


def paired(c: ConfigReader, key: str, kinds: list[str]) -> list[tuple[str, str | None]]:
    """(mixer, kind of MLP after it or None) of each of our layers."""
    pairs: list[tuple[str, str | None]] = []
    for i, kind in enumerate(kinds):
        if kind in MIXERS:
            pairs.append((kind, None))
        elif i == 0 or kinds[i - 1] not in MIXERS:
            raise c.unsupported(
                key, f"layer {i} is {kind} without a mixer right before it, which is not supported"
            )
        else:
            pairs[-1] = (pairs[-1][0], kind)
    return pairs


def read(c: ConfigReader) -> ModelSpec:
    c.assume(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    c.assume(vocab_size=131072)
    h, max_position = heads(c), c.size("max_position_embeddings", 4096)
    c.require("attention_head_dim", h.head_dim)
    c.require("attention_bias", False)
    eps = c.take("layer_norm_epsilon", float, 1e-5)
    norm = rms(c.size("hidden_size"), eps)
    mixers: dict[str, dict[str, Any]] = {
        "full_attention": {"attention": attention(h, None)},
        "linear_attention": {"recurrent": _mamba(c, eps)},
    }
    pairs = paired(c, *kinds_of_blocks(c))
    bias = c.take("mlp_bias", bool, False)
    act = activation(c, "mlp_hidden_act", "relu2")
    mlps: dict[str | None, MLPSpec | None] = {None: None}
    mlps["mlp"] = plain(c.size("intermediate_size", 21504), act, bias=bias)
    if any(mlp == "moe" for _, mlp in pairs):
        mlps["moe"] = _mixture(c, act, bias)
    c.ignore(*_OF_EXPERTS)

    def layer(i: int) -> LayerSpec:
        mixer, mlp = pairs[i]
        return LayerSpec(
            **mixers[mixer],
            mlp=mlps[mlp],
            block=SequentialBlock(pre_attention=norm, pre_mlp=norm if mlp else None),
        )

    c.ignore("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    c.ignore(
        "mamba_proj_bias", "residual_in_fp32", "rescale_prenorm_residual", "num_logits_to_keep"
    )
    # no rotation
    c.ignore("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    c.ignore("sliding_window", "norm_eps", "rms_norm_eps", "use_mamba_kernels")
    return model(c, "nemotron_h", layer, norm, max_position, count=len(pairs))


_OF_EXPERTS = (
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "moe_shared_expert_overlap"),
    *("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "output_router_logits"),
)


def _mixture(c: ConfigReader, act: Any, bias: bool) -> MoESpec:
    c.require("n_shared_experts", 1)
    c.assume(n_group=1, topk_group=1)
    shared = c.size("moe_shared_expert_intermediate_size", 7688)
    latent = c.maybe("moe_latent_size", int)
    if latent is not None and bias:
        raise c.unsupported("mlp_bias", "is not supported with moe_latent_size")
    return MoESpec(
        num_experts=c.size("n_routed_experts", 8),
        num_experts_per_token=c.size("num_experts_per_tok", 2),
        expert=plain(c.size("moe_intermediate_size", 7688), act, bias=False),
        normalize=c.take("norm_topk_prob", bool, True),
        scores="sigmoid",
        correction=True,
        groups=expert_groups(c, "best_two"),
        weight_scale=c.take("routed_scaling_factor", float, 1.0),
        shared=SharedExpertSpec(mlp=plain(shared, act, bias=bias)),
        latent=latent,
    )


def _mamba(c: ConfigReader, eps: float) -> Mamba2Spec:
    """Reads a Mamba-2 mixer. Bamba's keys, which earlier configs have, take precedence. The time
    step is at least `time_step_min`."""
    groups = c.size(called(c, "mamba_n_groups", "n_groups"), 8)
    c.require("mamba_hidden_act", "silu")
    c.ignore("n_groups", "conv_kernel", "use_conv_bias", "expand", "mamba_expand", "time_step_min")
    c.ignore("chunk_size", "mamba_chunk_size", "time_step_floor", "mamba_dt_init_floor")
    c.ignore("time_step_max", "mamba_dt_max", "time_step_limit", "mamba_dt_limit")
    c.ignore("mamba_ssm_cache_dtype")  # states are float32
    return Mamba2Spec(
        num_heads=c.size("mamba_num_heads", 128),
        value_dim=c.size("mamba_head_dim", 64),
        key_dim=c.size("ssm_state_size", 128),
        num_groups=groups,
        conv_width=c.size(called(c, "mamba_d_conv", "conv_kernel"), 4),
        eps=eps,
        conv_bias=c.take(called(c, "mamba_conv_bias", "use_conv_bias"), bool, True),
        bias=c.take("use_bias", bool, False),
        norm_groups=groups,
        time_limit=(c.take(called(c, "mamba_dt_min", "time_step_min"), float, 0.001), math.inf),
    )


def mtp_layers(spec: ModelSpec, config: Config) -> tuple[LayerSpec, ...]:
    """The MTP layers listed in `mtp_hybrid_override_pattern` or `mtp_layers_block_type`; each has the
    model's first attention, and an MLP or experts that the model has too, or none."""
    c = ConfigReader(config)
    letters = "mtp_hybrid_override_pattern"
    key = called(c, letters, "mtp_layers_block_type")
    given: Any = c.take(key, str) if key == letters else c.take(key, list)
    kinds = [LETTERS.get(kind, LEGACY.get(kind, str(kind))) for kind in given]
    layers = []
    for mixer, mlp in paired(c, key, kinds):
        of = next((x.attention for x in spec.layers if x.attention is not None), None)
        mlps = {None: None} | {
            "moe" if isinstance(x.mlp, MoESpec) else "mlp": x.mlp for x in spec.layers if x.mlp
        }
        if mixer != "full_attention" or of is None or mlp not in mlps:
            raise c.unsupported(
                key, "only attention, and an MLP or experts that the model has too, is supported"
            )
        norm = spec.final_norm
        block = SequentialBlock(pre_attention=norm, pre_mlp=norm if mlp else None)
        layers.append(LayerSpec(attention=of, mlp=mlps[mlp], block=block))
    return tuple(layers)


MTP = MTPFormat(
    counts=("num_nextn_predict_layers",),
    layers=mtp_layers,
    renamed=("backbone.layers.", "mtp.layers."),
    around={
        "embed_norm": "mtp.layers.0.enorm",
        "hidden_norm": "mtp.layers.0.hnorm",
        "join": "mtp.layers.0.eh_proj",
        "final_norm": "mtp.layers.{last}.final_layernorm",
    },
)


BEHIND = "+"
"""Prefix of the names of an MLP that is a layer of its own in the checkpoint and part of the previous layer here."""

NAMES: dict[str, Theirs] = {
    **LLAMA,
    **mamba_names("mixer"),
    "embed": "backbone.embeddings",
    "final_norm": "backbone.norm_f",
    "pre_attention": "norm",
    "attention.qkv": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    "attention.out": "mixer.o_proj",
    "pre_mlp": "+norm",
    "mlp.up": "+mixer.up_proj",
    "mlp.down": "+mixer.down_proj",
    "router": "+mixer.gate",
    "correction": {"weight": "+mixer.gate.e_score_correction_bias"},
    "experts.up": "+mixer.experts.{e}.up_proj",
    "experts.down": "+mixer.experts.{e}.down_proj",
    "experts_in": "+mixer.fc1_latent_proj",
    "experts_out": "+mixer.fc2_latent_proj",
    "shared.up": "+mixer.shared_experts.up_proj",
    "shared.down": "+mixer.shared_experts.down_proj",
}
_table = table(NAMES, layer="backbone.layers.{i}.", changes={"recurrent.conv": of_conv})


def names(spec: ModelSpec) -> Names:
    return numbered(spec, _table(spec))


def numbered(spec: ModelSpec, found: Names) -> Names:
    """The table with the checkpoint's layer numbers. There an MLP counts as a layer; here it
    belongs to the layer before it."""
    firsts, at = [], 0
    for layer in spec.layers:
        firsts.append(at)
        at += 1 if layer.mlp is None else 2

    def number(m: re.Match[str]) -> str:
        return f"{m[1]}{firsts[int(m[2])] + (m[3] == BEHIND)}."

    return {re.sub(r"^(.*?\.)(\d+)\.(\+?)", number, name): at for name, at in found.items()}


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Reads a GGUF file's config. Layers with kv heads are attention, layers with an MLP size are
    MLPs or mixtures, the others Mamba-2."""
    num_experts, num_heads = m.take("expert_count", int, 0), m.size("ssm.time_step_rank")
    sizes, fed = numbers_by_layer(m, "feed_forward_length"), "moe" if num_experts else "mlp"
    kinds = [
        "full_attention" if kv else fed if size else "linear_attention"
        for kv, size in zip(kv_heads(m), sizes, strict=True)
    ]
    m.require("attention.value_length", m.size("attention.key_length"))
    m.ignore("rope.freq_base", "rope.dimension_count", "rope.scaling.finetuned")  # no rotation
    m.require("nextn_predict_layers", 0)
    config = {
        "hidden_size": m.size("embedding_length"),
        "layers_block_type": kinds,
        "num_attention_heads": m.size("attention.head_count"),
        "num_key_value_heads": max(kv_heads(m)) or m.size("attention.head_count"),
        "head_dim": m.size("attention.key_length"),
        "max_position_embeddings": m.size("context_length"),
        "intermediate_size": max(sizes) or 1,
        "layer_norm_epsilon": m.take("attention.layer_norm_rms_epsilon", float),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": m.size("ssm.inner_size") // num_heads,
        "ssm_state_size": m.size("ssm.state_size"),
        "n_groups": m.size("ssm.group_count", 1),
        "conv_kernel": m.size("ssm.conv_kernel"),
    }
    if not num_experts:
        return config
    return {
        **config,
        "n_routed_experts": num_experts,
        "num_experts_per_tok": m.size("expert_used_count"),
        "moe_intermediate_size": m.size("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": m.size("expert_shared_feed_forward_length"),
        "n_shared_experts": m.size("expert_shared_count", 1),
        "moe_latent_size": m.maybe("moe_latent_size", int),
        "n_group": m.size("expert_group_count", 1),
        "topk_group": m.size("expert_group_used_count", 1),
        "norm_topk_prob": m.take("expert_weights_norm", bool, False),
        "routed_scaling_factor": m.take("expert_weights_scale", float, 1.0),
    }


GGUF_NAMES: dict[str, Theirs] = {
    **GGUF,
    "pre_mlp": "+attn_norm",
    "mlp.up": "+ffn_up",
    "mlp.down": "+ffn_down",
    "router": "+ffn_gate_inp",
    "correction": {"weight": "+exp_probs_b.bias"},
    "experts.up": "+ffn_up_exps",
    "experts.down": "+ffn_down_exps",
    "experts_in": "+ffn_latent_down",
    "experts_out": "+ffn_latent_up",
    "shared.up": "+ffn_up_shexp",
    "shared.down": "+ffn_down_shexp",
}
_gguf_table = gguf_table(GGUF_NAMES, changes=GGUF_CHANGES)


def gguf_names(spec: ModelSpec) -> Names:
    return numbered(spec, _gguf_table(spec))


FAMILIES = (
    Family(
        model_type="nemotron_h",
        architectures=("NemotronHForCausalLM",),
        read=read,
        names=names,
        prefixes=("model.", ""),  # PEFT uses transformers' own names
        ignored=(r"mtp\..*",),
        mtp=MTP,
        gguf=GGUFFamily(
            architecture="nemotron_h",
            also=("nemotron_h_moe",),
            config=gguf_config,
            names=gguf_names,
        ),
    ),
)
