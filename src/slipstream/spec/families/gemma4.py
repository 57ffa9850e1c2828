"""Gemma 4's language models, also those of multimodal checkpoints, with pictures (`pictures/gemma4_vision.py`), without sounds.

1. Scores are not scaled; queries, keys and values are normed. Layers with a window have other heads than those without one,
   whose values may be their keys.
2. The last layers may read the keys and values of an earlier layer of their kind (E2B and E4B).
3. Layers may have inputs of their own, from a second table of embeddings (E2B and E4B).
4. A dense MLP may stand next to a mixture (26B-A4B). A learned number multiplies the residual after
each layer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily, Names
from slipstream.spec.families.builders import (
    HeadCounts,
    attention,
    gated,
    kinds_of_layers,
    model,
    rms,
    rope_of_kind,
)
from slipstream.spec.families.gemma import SANDWICH, TANH
from slipstream.spec.families.names import Theirs, gguf_table, table
from slipstream.spec.families.pictures import gemma4_vision
from slipstream.spec.model import (
    DenseSpec,
    LayerInputsSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    OwnInputSpec,
    QKNormSpec,
    SequentialBlock,
    SharedExpertSpec,
    TwinBlock,
)

DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
FULL, WINDOW = "full_attention", "sliding_attention"


def read(c: ConfigReader) -> ModelSpec:
    c.assume(**DEFAULTS)
    hidden, eps = c.size("hidden_size"), c.take("rms_norm_eps", float, 1e-6)
    max_position, count = c.size("max_position_embeddings", 131_072), c.size("num_hidden_layers")
    kinds = kinds_of_layers(c, lambda i: WINDOW if (i + 1) % 6 else FULL)
    kinds[-1] = FULL  # always, whatever the config says
    window, said = c.size("sliding_window", 512), c.maybe("use_bidirectional_attention", str)
    if said not in (None, "all", "vision"):  # "vision" concerns image tokens only
        raise c.unsupported("use_bidirectional_attention", "only 'all' and 'vision' are supported")
    window = window // 2 + 1 if said == "all" else window
    norm, bias = rms(hidden, eps), c.take("attention_bias", bool, False)
    keys_as_values = c.take("attention_k_eq_v", bool, False)
    heads = _heads(c, kinds, keys_as_values)
    theta: dict[str, Any] = dict(max_position=max_position, theta=1e4)
    num_shared = c.take("num_kv_shared_layers", int, 0)
    if not 0 <= num_shared < count:
        raise c.unsupported("num_kv_shared_layers", f"must be from 0 to {count - 1}")
    owning = count - num_shared
    if missing := set(kinds[owning:]) - set(kinds[:owning]):
        raise c.unsupported(
            "num_kv_shared_layers", f"no layer before has keys and values of {missing.pop()}"
        )
    last_of = {kind: i for i, kind in enumerate(kinds[:owning])}
    dense, twice = gated(c, "hidden_activation", TANH), c.take("use_double_wide_mlp", bool, False)
    mixture, inputs = _mixture(c, dense), _inputs(c, hidden, eps)

    def layer(i: int) -> LayerSpec:
        kind, h, shares = kinds[i], heads[i], i >= owning
        position = rope_of_kind(c, kind, h.head_dim, default=ROPES, proportional=True, **theta)
        of = attention(
            h,
            position,
            scale=1.0,
            causal=said != "all",
            qkv_bias=bias,
            out_bias=bias,
            window=window if kind == WINDOW else None,
            qk_norm=QKNormSpec(over="head", eps=eps),
            value_eps=None if shares else eps,
            keys_as_values=keys_as_values and kind == FULL and not shares,
            kv_from=last_of[kind] if shares else None,
        )
        wide = 2 if twice and shares else 1
        always = dataclasses.replace(dense, intermediate_size=wide * dense.intermediate_size)
        mlp: MLPSpec = always
        norms = dict(pre_attention=norm, post_attention=norm, pre_mlp=norm, post_mlp=norm)
        block = SequentialBlock(**norms)
        if mixture is not None:
            mlp = dataclasses.replace(mixture, shared=SharedExpertSpec(mlp=always))
            # the router reads rms(h) · scale / √hidden
            router = rms(hidden, eps, gain=hidden**-0.5)
            more = dict(pre_experts=norm, post_shared=norm, post_experts=norm)
            block = TwinBlock(**norms, pre_router=router, **more)
        own = None
        if inputs is not None:
            assert isinstance(dense.activation, str)
            own = OwnInputSpec(
                size=inputs.size, first=i * inputs.size, activation=dense.activation, norm=norm
            )
        return LayerSpec(attention=of, mlp=mlp, block=block, own_input=own, scaled=True)

    cap = c.maybe("final_logit_softcapping", float)
    return model(
        c,
        "gemma4",
        layer,
        norm,
        max_position,
        embed_scale=hidden**0.5,
        logit_softcap=cap,
        layer_inputs=inputs,
        tied=True,
    )


def read_unified(c: ConfigReader) -> ModelSpec:
    """Reads Gemma 4 12B, whose layers have no inputs of their own."""
    c.require("hidden_size_per_layer_input", 0)
    c.require("enable_moe_block", False)
    c.assume(hidden_size_per_layer_input=0, max_position_embeddings=262_144, sliding_window=1024)
    return read(c)


def _heads(c: ConfigReader, kinds: list[str], keys_as_values: bool) -> list[HeadCounts]:
    """Reads the heads of each layer. transformers 5 writes the differences between layers as
    `per_layer_config`; other writers give numbers for layers without a window."""
    queries, usual = c.size("num_attention_heads"), c.size("num_key_value_heads")
    head_dim, wide = c.size("head_dim"), c.size("global_head_dim", 512)
    few = c.maybe("num_global_key_value_heads", int)
    of_full = few if few is not None and keys_as_values else usual
    by_layer = c.maybe("per_layer_config", dict)
    if by_layer is None:
        own = {WINDOW: (usual, head_dim), FULL: (of_full, wide)}
        return [HeadCounts(queries, *own[kind]) for kind in kinds]
    found = []
    for i in range(len(kinds)):
        said = by_layer.get(str(i), {})
        if not isinstance(said, dict) or said.keys() - {"head_dim", "num_key_value_heads"}:
            raise c.unsupported(
                "per_layer_config", f"layer {i}: only head_dim and num_key_value_heads can differ"
            )
        inner = ConfigReader(said, prefix=f"per_layer_config.{i}.")
        sizes = inner.size("num_key_value_heads", usual), inner.size("head_dim", head_dim)
        found.append(HeadCounts(queries, *sizes))
    return found


def _mixture(c: ConfigReader, dense: DenseSpec) -> MoESpec | None:
    c.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    if not c.take("enable_moe_block", bool, False):
        return None
    size = c.size("moe_intermediate_size")
    return MoESpec(
        num_experts=c.size("num_experts"),
        num_experts_per_token=c.size("top_k_experts"),
        expert=dataclasses.replace(dense, intermediate_size=size),
        normalize=True,
        expert_scales=True,
        shared=SharedExpertSpec(mlp=dense),
    )


def _inputs(c: ConfigReader, hidden: int, eps: float) -> LayerInputsSpec | None:
    """Spec of the per-layer inputs: (norm(project(h) / √hidden) + √size · row) / √2. The norm's epsilon compensates for the
    factor before it."""
    size = c.take("hidden_size_per_layer_input", int, 256)
    vocab = c.size("vocab_size_per_layer_input", 262_144)
    if size == 0:
        return None
    return LayerInputsSpec(
        vocab_size=vocab,
        size=c.size("hidden_size_per_layer_input", 256),
        num_layers=c.size("num_hidden_layers"),
        scale=size**0.5,
        factor=2**-0.5,
        norm=rms(size, eps * hidden),
    )


GEMMA4: dict[str, Theirs] = {
    **SANDWICH,
    "router": "router.proj",
    "pre_router": {"weight": "router.scale"},
    "expert_scales": {"weight": "router.per_expert_scale"},
    "pre_experts": "pre_feedforward_layernorm_2",
    "experts.up": {"weight": "experts.gate_up_proj"},
    "experts.down": {"weight": "experts.down_proj"},
    "post_experts": "post_feedforward_layernorm_2",
    "shared.up": ("mlp.gate_proj", "mlp.up_proj"),
    "shared.down": "mlp.down_proj",
    "post_shared": "post_feedforward_layernorm_1",
    "own_input.gate": "per_layer_input_gate",
    "own_input.project": "per_layer_projection",
    "own_input.norm": "post_per_layer_input_norm",
    "scalar": {"weight": "layer_scalar"},
    "layer_inputs.table": "model.embed_tokens_per_layer",
    "layer_inputs.project": "model.per_layer_model_projection",
    "layer_inputs.norm": "model.per_layer_projection_norm",
}


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    count, kv_heads = m.size("block_count"), m.value("attention.head_count_kv")
    pattern, inner = m.value("attention.sliding_window_pattern"), m.value("feed_forward_length")
    kv_heads, inner = (x if isinstance(x, list) else [x] * count for x in (kv_heads, inner))
    if not isinstance(pattern, list) or not len(pattern) == len(kv_heads) == len(inner) == count:
        raise m.unsupported(
            "attention.sliding_window_pattern", f"the keys of each layer must be lists of {count}"
        )
    wide, small = m.size("attention.key_length"), m.size("attention.key_length_swa")
    m.require("attention.value_length", wide)
    m.require("attention.value_length_swa", small)
    m.require("rope.dimension_count", wide)
    m.require("rope.dimension_count_swa", small)
    # One divisor per frequency: 1, or practically infinite for frequencies that are not rotated.
    divisors = m.take("rope_freqs.weight", list, [1.0] * (wide // 2))
    turned = divisors.count(1.0)
    if len(divisors) != wide // 2 or any(x < 1e20 for x in divisors[turned:]):
        raise m.unsupported("rope_freqs.weight", "only 1 and then 1e30 are supported")
    full = [i for i, has_window in enumerate(pattern) if not has_window]
    num_shared = m.take("attention.shared_kv_layers", int, 0)
    own_values = [i for i in range(count) if m.value(f"blk.{i}.attn_v.weight") is not None]
    config: dict[str, Any] = {
        "hidden_size": m.size("embedding_length"),
        "num_hidden_layers": count,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "num_attention_heads": m.size("attention.head_count"),
        "num_key_value_heads": kv_heads[0],
        "head_dim": small,
        "per_layer_config": {
            str(i): {"head_dim": small if pattern[i] else wide, "num_key_value_heads": kv_heads[i]}
            for i in range(count)
        },
        "attention_k_eq_v": bool(full) and full[0] not in own_values,
        "max_position_embeddings": m.size("context_length"),
        "rms_norm_eps": m.take("attention.layer_norm_rms_epsilon", float),
        "hidden_activation": TANH,
        "sliding_window": m.size("attention.sliding_window"),
        "layer_types": [WINDOW if has_window else FULL for has_window in pattern],
        "num_kv_shared_layers": num_shared,
        "final_logit_softcapping": m.maybe("final_logit_softcapping", float),
        "hidden_size_per_layer_input": m.take("embedding_length_per_layer_input", int, 0),
        "rope_parameters": {
            WINDOW: {
                "rope_type": "default",
                "rope_theta": m.take("rope.freq_base_swa", float, 1e4),
            },
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": 2 * turned / wide,
                "rope_theta": m.take("rope.freq_base", float, 1e6),
            },
        },
    }
    if (rows := m.maybe("per_layer_token_embd.weight", list)) is not None:
        config["vocab_size_per_layer_input"] = rows[0]
    num_experts = m.take("expert_count", int, 0)
    sizes = m.maybe("expert_used_count", int), m.maybe("expert_feed_forward_length", int)
    if num_experts:
        config |= {"enable_moe_block": True, "num_experts": num_experts}
        config |= dict(zip(("top_k_experts", "moe_intermediate_size"), sizes, strict=True))
    return config


GGUF4: dict[str, Theirs] = {
    "shared.up": ("ffn_gate", "ffn_up"),
    "shared.down": "ffn_down",
    "post_shared": "post_ffw_norm_1",
    "pre_router": {"weight": "ffn_gate_inp.scale"},
    "expert_scales": {"weight": "ffn_down_exps.scale"},
    "pre_experts": "pre_ffw_norm_2",
    "experts.up": "ffn_gate_up_exps",
    "post_experts": "post_ffw_norm_2",
    "own_input.gate": "inp_gate",
    "own_input.project": "proj",
    "own_input.norm": "post_norm",
    "scalar": "layer_output_scale",
    "layer_inputs.table": "per_layer_token_embd",
    "layer_inputs.project": "per_layer_model_proj",
    "layer_inputs.norm": "per_layer_proj_norm",
}

# Published checkpoints also store keys and values for layers that read those of others. They are unused.
UNUSED = (r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight",)
PREFIXES = ("language_model.", "model.language_model.", "model.")
TOWERS = r"(model\.)?(vision_embedder|vision_tower|embed_vision|audio_tower|embed_audio)\..*"


def names(spec: ModelSpec) -> Names:
    """Table of names of a model that may have an image encoder."""
    made = table(
        {**GEMMA4, **gemma4_vision.VISION},
        media_layer=gemma4_vision.VISION_LAYER,
        changes=gemma4_vision.CHANGES,
    )
    return gemma4_vision.with_bounds(made(spec))


FAMILIES = (
    Family(
        model_type="gemma4_unified_text",
        architectures=("Gemma4UnifiedForCausalLM",),
        read=read_unified,
        names=table(GEMMA4),
        ignored=UNUSED,
    ),
    Family(  # without images
        model_type="gemma4_unified",
        architectures=("Gemma4UnifiedForConditionalGeneration",),
        read=read_unified,
        names=table(GEMMA4),
        nested_config="text_config",
        prefixes=PREFIXES,
        ignored=(*UNUSED, TOWERS),
    ),
    Family(
        model_type="gemma4_text",
        architectures=("Gemma4ForCausalLM",),
        read=read,
        names=table(GEMMA4),
        ignored=UNUSED,
        gguf=GGUFFamily(
            architecture="gemma4",
            config=gguf_config,
            names=gguf_table(GGUF4),
            ignored=(r"blk\.\d+\.attn_(k|v|k_norm)\.weight",),
            shapes=(r"blk\.\d+\.attn_v\.weight", r"per_layer_token_embd\.weight"),
        ),
    ),
    Family(
        model_type="gemma4",
        architectures=("Gemma4ForConditionalGeneration",),
        read=read,
        names=names,
        nested_config="text_config",
        prefixes=PREFIXES,
        ignored=(*UNUSED, r"layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight", TOWERS),
        media=gemma4_vision.read_vision,
        processing=gemma4_vision.read_processing,
    ),
)
