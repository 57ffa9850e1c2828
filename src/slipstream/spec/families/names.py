"""Makes tables from a checkpoint's tensor names to ours, one line per linear layer or norm. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from slipstream.spec.families.base import Names
from slipstream.spec.model import (
    AttentionSpec,
    CompressedAttentionSpec,
    GatedDeltaSpec,
    LayerSpec,
    LightningSpec,
    ModelSpec,
    MoESpec,
    VisionSpec,
)
from slipstream.spec.parameters import (
    Deinterleave,
    Flatten,
    Integers,
    MinusOne,
    OneRow,
    Placement,
    SwapGateUp,
    Transform,
    Transpose,
    Turnable,
    Ungroup,
    Unpermute,
    Vector,
    parameters,
)

Theirs: TypeAlias = str | tuple[str, ...] | Mapping[str, str]
Change: TypeAlias = (
    Literal[
        "transpose",
        "turn",
        "ungroup",
        "unpermute",
        "minus_one",
        "swap",
        "untwine",
        "untwine_transpose",
        "one_row",
        "integers",
        "vector",
    ]
    | Callable[[LayerSpec, int], Transform | None]
)
"""How a checkpoint stores a parameter differently. A function gets the layer and the tensor's index among those stacked into
the parameter."""

LLAMA: dict[str, Theirs] = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "classifier.out": "score",
    "pre_attention": "input_layernorm",
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "pre_mlp": "post_attention_layernorm",
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": "mlp.down_proj",
    "router": "mlp.gate",
    "experts.up": ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    "experts.down": "mlp.experts.{e}.down_proj",
    "shared.up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared.down": "mlp.shared_expert.down_proj",
    "shared_weight": "mlp.shared_expert_gate",
}
"""The names of most families; those of a layer come after `model.layers.{i}.`."""

MEGATRON: dict[str, Theirs] = {
    "pre_attention": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.out": "self_attention.dense",
    "pre_mlp": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
"""A layer's names in models that were trained with Megatron-LM."""

GGUF: dict[str, Theirs] = {
    "embed": "token_embd",
    "positions": "position_embd",
    "embed_norm": "token_embd_norm",
    "final_norm": "output_norm",
    "head": "output",
    "norm": "attn_norm",
    "pre_attention": "attn_norm",
    "attention.qkv": ("attn_q", "attn_k", "attn_v"),
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.sinks": "attn_sinks",
    "attention.out": "attn_output",
    "post_attention": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "pre_mlp": "ffn_norm",
    "mlp.up": ("ffn_gate", "ffn_up"),
    "mlp.down": "ffn_down",
    "post_mlp": "post_ffw_norm",
    "router": "ffn_gate_inp",
    "experts.up": ("ffn_gate_exps", "ffn_up_exps"),
    "experts.down": "ffn_down_exps",
    "shared.up": ("ffn_gate_shexp", "ffn_up_shexp"),
    "shared.down": "ffn_down_shexp",
    "shared_weight": "ffn_gate_inp_shexp",
}
"""llama.cpp's names, the same for all architectures. Fused weights have our row order; none is transposed."""


def table(
    theirs: Mapping[str, Theirs],
    *,
    layer: str = "model.layers.{i}.",
    encoder_layer: str = "",
    media_layer: str = "",
    changes: Mapping[str, Change] | None = None,
    only: str = "",
) -> Callable[[ModelSpec], Names]:
    """Function from a spec to the table of its tensors, or of those whose names here begin with `only`.

    `theirs` maps our parameters' names, without .weight and .bias, to the checkpoint's:

    1. A string is the checkpoint's name. A tuple lists the tensors that are stacked into one parameter here, such as q, k
       and v.
    2. {e} stands for the index of an expert. Without it, one tensor has all experts.
    3. A mapping has the full names of `weight` and `bias`.
    4. Names of a layer's tensors follow `layer`, those of an encoder-decoder's encoder ("encoder." in our names) follow
       `encoder_layer`, those of an image or audio encoder ("media.") follow `media_layer`.

    `changes` names our parameters that the checkpoint stores in another form.
    """

    def names(spec: ModelSpec) -> Names:
        found: Names = {}
        for target, shape in parameters(spec).items():
            if not target.startswith(only):
                continue
            stem, _, kind = target.rpartition(".")
            below, of = "", None
            side, _, rest = stem.rpartition("layers.")
            if rest != stem:
                index, stem = rest.split(".", 1)
                layers, above = (
                    (spec.layers, layer) if not side else (spec.all_layers, encoder_layer)
                )
                if side == "media." and spec.media is not None:
                    layers, above = spec.media.layers, media_layer
                below, of, stem = above.replace("{i}", index), layers[int(index)], side + stem
            change = (changes or {}).get(stem)
            seen = spec.media if target == "media.patch.weight" else None
            patch = seen if isinstance(seen, VisionSpec) and not seen.channels_last else None
            parts, start = theirs[stem], 0
            copies = (
                of.mlp.num_experts
                if of and isinstance(of.mlp, MoESpec) and stem.startswith("experts.")
                else None
            )
            if isinstance(parts, Mapping) or (isinstance(parts, str) and "{e}" not in parts):
                how = _transform(change, kind, of) if patch is None else Flatten(patch.kernel)
                place = Placement(target, transform=how, copies=copies)
                found[below + (f"{parts}.{kind}" if isinstance(parts, str) else parts[kind])] = (
                    place
                )
                continue
            assert of is not None
            each = shape[0] // (copies or 1)
            tensors = (
                ((parts, each),)
                if isinstance(parts, str)
                else tuple(zip(parts, _rows(of, stem, each, len(parts)), strict=False))
            )
            separate = "{e}" in tensors[0][0]  # one tensor per expert
            for e in range(copies or 1 if separate else 1):
                for i, (part, rows) in enumerate(tensors):
                    place = Placement(
                        target,
                        start,
                        rows,
                        _transform(change, kind, of, i),
                        None if separate else copies,
                    )
                    found[f"{below}{part.replace('{e}', str(e))}.{kind}"] = place
                    start += rows
        return found

    return names


def gguf_table(
    more: Mapping[str, Theirs] | None = None,
    *,
    fused: bool = False,
    gated: bool = True,
    changes: Mapping[str, Change] | None = None,
) -> Callable[[ModelSpec], Names]:
    """Function that makes the table of GGUF names. `fused`: q, k and v are one tensor. `mlp.up` is one tensor if `fused` or
    not `gated`."""
    theirs: dict[str, Theirs] = {**GGUF, **({"attention.qkv": "attn_qkv"} if fused else {})}
    if fused or not gated:
        theirs["mlp.up"] = "ffn_up"
    return table({**theirs, **(more or {})}, layer="blk.{i}.", changes=changes)


PLAIN: Mapping[str, Transform] = {
    "minus_one": MinusOne(),
    "swap": SwapGateUp(),
    "one_row": OneRow(),
    "integers": Integers(),
    "vector": Vector(),
}
"""Changes that don't depend on the layer."""


def of_conv(layer: LayerSpec, part: int) -> Transform:
    """Removes the middle dimension, of size 1, from a depthwise convolution's weight, stored as
    [channels, 1, width]."""
    assert layer.recurrent is not None
    return Flatten((1, layer.recurrent.conv_width))


def _rows(layer: LayerSpec, stem: str, whole: int, num_parts: int) -> tuple[int, ...]:
    if stem.startswith("recurrent."):
        r = layer.recurrent
        if isinstance(r, LightningSpec):  # the order of rows: z, then v, k and q
            return r.v_size, r.conv_channels
        assert isinstance(r, GatedDeltaSpec)
        if stem == "recurrent.gates":
            return r.num_heads, r.decay_size
        if num_parts == 2:  # two tensors: q, k and v together, and z
            return r.conv_channels, r.v_size
        return (r.q_size, r.q_size, r.v_size, r.v_size)[:num_parts]
    if stem == "attention.compress":
        assert isinstance(layer.attention, CompressedAttentionSpec)
        return layer.attention.source_sizes
    a = layer.attention
    if stem == "attention.index":
        assert isinstance(a, AttentionSpec)
        assert a.index is not None
        return a.index.rows
    if not stem.endswith("attention.qkv"):
        return whole // 2, whole // 2
    assert isinstance(a, AttentionSpec)
    if a.gated and num_parts == 4:
        return a.gate_size, a.q_size, a.kv_size, a.kv_size
    return a.qkv_rows


def _transform(
    change: Change | None, kind: str, layer: LayerSpec | None, part: int = 0
) -> Transform | None:
    if change is None or (change in ("transpose", "minus_one") and kind == "bias"):
        return None
    if callable(change):
        assert layer is not None
        made = change(layer, part)
        return None if kind == "bias" and isinstance(made, Flatten) else made
    if change in ("transpose", "turn"):
        return Transpose() if change == "transpose" else Turnable()
    if change in PLAIN:
        return PLAIN[change]
    if change in ("untwine", "untwine_transpose"):
        return Deinterleave(change == "untwine_transpose" and kind == "weight")
    assert layer is not None
    a = layer.self_attention
    if change == "ungroup":
        return Ungroup(a.num_kv_heads, a.num_heads // a.num_kv_heads)
    # values are not rotated
    return None if part == 2 else Unpermute((a.num_heads, a.num_kv_heads)[part])


BASES = ("model.", "transformer.", "gpt_neox.", "backbone.")
"""Prefixes of a family's decoder names. A decoder stored without its head has none."""


WRITTEN_AS = (
    ("vision_tower.vision_model.", "vision_tower."),  # Gemma 3's SigLIP in transformers 4
    (
        "feedforward_layer_norm",
        "post_attention_layernorm",
    ),  # OLMo Hybrid's attention in transformers 5
    (".block_sparse_moe.", ".mlp."),  # Kimi Linear's dense layers in transformers 5
    # Kimi Linear's adapters in transformers 5
    *((".forget_gate.", "."), (".mlp.shared_experts.", ".block_sparse_moe.shared_experts.")),
    ("embed_tokens.", "word_embeddings."),  # Sarvam MoE in transformers 5
    # Ling 3 in transformers 5, and its adapters
    *((".self_attn.", ".attention."), (".attention.dense.", ".attention.o_proj.")),
    (".attention.o_proj.", ".attention.dense."),
    (".self_attn.g_proj.", ".self_attn.gate_proj."),  # LFM 3's adapters in transformers 5
    # A.X K2's adapters in transformers 5
    *((".q_gate_proj.", ".q_b_proj."), (".mlp.fc1.", ".W_down."), (".mlp.fc2.", ".W_up.")),
    (".shared_experts.", ".shared_mlp."),  # Hunyuan 3 in transformers 5
    (".shared_experts.", ".shared_expert."),  # Laguna's modules in transformers 5
    # Kimi K2.5 in transformers 5
    *(("model.blocks.", "model.layers."), (".encoder.patch_embed.", ".patch_embed.")),
    *(
        ("embed_tokens.", "embed."),
        ("hc_head.hc_", "hc_head_"),
        ("lm_head.", "head."),
    ),  # DeepSeek V4
    # EXAONE 3 in transformers 5
    *((".o_proj.", ".out_proj."), (".self_attn.", ".attn.attention."), (".gate_proj.", ".c_fc_0.")),
    *((".input_layernorm.", ".ln_1."), (".post_attention_layernorm.", ".ln_2.")),
    *((".up_proj.", ".c_fc_1."), (".down_proj.", ".c_proj."), ("model.layers.", "transformer.h.")),
    *(("layers.", "h."), ("embed_tokens.", "wte."), ("norm.", "ln_f.")),
)
"""(part of a name as transformers writes it, usual name in the family's table)."""


def canonical(
    name: str,
    prefixes: tuple[str, ...],
    names: Mapping[str, Placement],
    renamed: tuple[tuple[str, str], ...] = WRITTEN_AS,
) -> str | None:
    """The name in the family's table. Some writers add a prefix to every name, some omit the usual
    one. Each pair of `renamed` is applied once, in order."""
    for prefix in ("", *prefixes):
        if name.startswith(prefix) and (short := name[len(prefix) :]) in names:
            return short
    for i, (theirs, usual) in enumerate(renamed, 1):
        other = name.replace(theirs, usual)
        if theirs in name and (found := canonical(other, prefixes, names, renamed[i:])):
            return found
    # Multimodal checkpoints nest the language model: model.language_model.layers… and language_model.model.layers…
    bare = without_prefix(name, prefixes)
    return next((m for m in (f"{base}{bare}" for base in BASES) if m in names), None)


def without_prefix(name: str, prefixes: tuple[str, ...]) -> str:
    return next(
        (
            name[len(p) :]
            for p in sorted(prefixes, key=len, reverse=True)
            if p and name.startswith(p)
        ),
        name,
    )
