"""Gemma 1 to 3. Norm weights are stored minus 1, and embeddings are scaled by √hidden.

1. Gemma 2 and 3 have pre-norms and post-norms, and layers with a window.
2. Gemma 2 has a window in every other layer, and soft caps on scores and logits.
3. Gemma 3 has it in five layers of six, norms q and k, and has another rotary base in layers with a window.
4. A multimodal Gemma 3 has a SigLIP encoder, whose states are pooled. Tokens of a picture see all of that picture.
"""

from __future__ import annotations

import math
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    HeadCounts,
    attention,
    before,
    gated,
    heads,
    kinds_of_layers,
    model,
    rms,
    rope,
    rope_of_kind,
)
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.names import LLAMA, gguf_table, table
from slipstream.spec.families.pictures.images import (
    AS_LLAVA,
    processing,
    siglip_layers,
    siglip_names,
    square,
)
from slipstream.spec.functions import NormSpec
from slipstream.spec.media.prompts import FramedFormat
from slipstream.spec.media.vision import (
    FixedSize,
    GridPositionSpec,
    ImageProcessing,
    PoolConnector,
    VisionSpec,
)
from slipstream.spec.model import (
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    QKNormSpec,
    RopeSpec,
    SequentialBlock,
)

TANH = "gelu_pytorch_tanh"
GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
"""Defaults of a multimodal Gemma 3's text_config. The 4B's lists two keys."""
VAULTGEMMA = {**GEMMA3, "vocab_size": 256000}


def read_gemma1(c: ConfigReader) -> ModelSpec:
    c.assume(head_dim=256)
    h, hidden, bias = heads(c), c.size("hidden_size"), c.take("attention_bias", bool, False)
    max_position = c.size("max_position_embeddings", 8192)
    norm = rms(hidden, c.take("rms_norm_eps", float, 1e-6), weight_offset=1.0)
    # Early configs name the exact GELU here but mean the tanh approximation, for which `hidden_activation` was added later.
    c.require("hidden_act", "gelu", TANH)
    mlp = gated(c, "hidden_activation", TANH)
    layer = LayerSpec(
        attention=attention(
            h, rope(c, h.head_dim, max_position=max_position), qkv_bias=bias, out_bias=bias
        ),
        mlp=mlp,
        block=before(norm),
    )
    c.require("use_bidirectional_attention", False)
    return model(c, "gemma", layer, norm, max_position, embed_scale=hidden**0.5, tied=True)


def read_gemma2(c: ConfigReader) -> ModelSpec:
    c.assume(head_dim=256)
    h = heads(c)
    max_position = c.size("max_position_embeddings", 8192)
    position = rope(c, h.head_dim, max_position=max_position)
    kinds = kinds_of_layers(c, lambda i: "full_attention" if i % 2 else "sliding_attention")
    positions = {"full_attention": position, "sliding_attention": position}
    return _sandwich(
        c, "gemma2", h, kinds, positions, max_position, qk_norm=False, caps=(50.0, 30.0)
    )


def read_vaultgemma(c: ConfigReader) -> ModelSpec:
    """VaultGemma: Gemma 2 without its post-norms."""
    c.assume(**VAULTGEMMA)
    h, max_position = heads(c), c.size("max_position_embeddings", 8192)
    position = rope(c, h.head_dim, max_position=max_position)
    kinds = kinds_of_layers(c, lambda i: "full_attention" if i % 2 else "sliding_attention")
    positions = {"full_attention": position, "sliding_attention": position}
    how: dict[str, Any] = dict(qk_norm=False, caps=(50.0, 30.0), post_norms=False)
    return _sandwich(c, "vaultgemma", h, kinds, positions, max_position, **how)


def read_gemma3(c: ConfigReader) -> ModelSpec:
    c.assume(**GEMMA3)
    h = heads(c)
    max_position = c.size("max_position_embeddings", 131072)
    pattern = c.size(
        "sliding_window_pattern" if "sliding_window_pattern" in c else "_sliding_window_pattern", 6
    )
    c.ignore("_sliding_window_pattern")
    kinds = kinds_of_layers(
        c, lambda i: "sliding_attention" if (i + 1) % pattern else "full_attention"
    )
    c.require("attn_logit_softcapping")  # no published model uses it, and transformers ignores it
    positions = {
        kind: _rope(c, kind, h.head_dim, max_position)
        for kind in ("full_attention", "sliding_attention")
    }
    return _sandwich(
        c, "gemma3", h, kinds, positions, max_position, qk_norm=True, caps=(None, None)
    )


def _sandwich(
    c: ConfigReader,
    family: str,
    h: HeadCounts,
    kinds: list[str],
    positions: dict[str, RopeSpec],
    max_position: int,
    *,
    qk_norm: bool,
    caps: tuple[float | None, float | None],
    post_norms: bool = True,
) -> ModelSpec:
    """Gemma 2 and 3. `caps`: the defaults of the soft caps of scores and of logits."""
    hidden, eps = c.size("hidden_size"), c.take("rms_norm_eps", float, 1e-6)
    window, bias = c.size("sliding_window", 4096), c.take("attention_bias", bool, False)
    # In an encoder (EmbeddingGemma) a token attends to half the window on either side, as transformers counts it.
    both = family == "gemma3" and c.take("use_bidirectional_attention", bool, False)
    window = window // 2 + 1 if both else window
    scale = c.take("query_pre_attn_scalar", float, 256.0) ** -0.5
    softcap, logit_softcap = (
        c.maybe(key, float) if c.says(key) else cap
        for key, cap in zip(
            ("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True
        )
    )
    norm, mlp = rms(hidden, eps, weight_offset=1.0), gated(c, "hidden_activation", TANH)
    post = norm if post_norms else None
    block = SequentialBlock(pre_attention=norm, post_attention=post, pre_mlp=norm, post_mlp=post)

    def layer(i: int) -> LayerSpec:
        of = attention(
            h,
            positions[kinds[i]],
            scale=scale,
            qkv_bias=bias,
            out_bias=bias,
            window=window if kinds[i] == "sliding_attention" else None,
            softcap=softcap,
            causal=not both,
            qk_norm=QKNormSpec(over="head", eps=eps, weight_offset=1.0) if qk_norm else None,
        )
        return LayerSpec(attention=of, mlp=mlp, block=block)

    if not both:
        c.require("use_bidirectional_attention", False)
    c.ignore("cache_implementation", "sliding_window_size")
    c.require("hidden_act", TANH)  # Gemma 2 configs repeat it under Gemma 1's key
    more = {"embed_scale": hidden**0.5, "logit_softcap": logit_softcap, "tied": True}
    return model(c, family, layer, norm, max_position, **more)


def _rope(c: ConfigReader, kind: str, head_dim: int, max_position: int) -> RopeSpec:
    """The rotary embedding of a kind of layer. Before transformers 5, `rope_theta` and `rope_scaling` are for layers without a
    window; others have `rope_local_base_freq`."""
    is_full = kind == "full_attention"
    theta_key, theta = ("rope_theta", 1e6) if is_full else ("rope_local_base_freq", 1e4)
    return rope_of_kind(
        c,
        kind,
        head_dim,
        max_position=max_position,
        theta=theta,
        theta_key=theta_key,
        scaled=is_full,
    )


def read_gemma3_vision(c: ConfigReader, text: ModelSpec) -> VisionSpec:
    v = c.part("vision_config")
    v.require("model_type", "siglip_vision_model")
    v.assume(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
    patch_size, image_size = square(v, "patch_size", 16), square(v, "image_size", 224)
    layers, eps = siglip_layers(v), v.take("layer_norm_eps", float, 1e-6)
    num_tokens, side = c.size("mm_tokens_per_image", 256), image_size // patch_size
    tokens_side = math.isqrt(num_tokens)
    if tokens_side**2 != num_tokens or side % tokens_side:
        raise c.unsupported(
            "mm_tokens_per_image",
            f"must be the square of a divisor of {side}, the patches on a side",
        )
    windows = [
        a.window
        for a in (x.attention for x in text.layers)
        if isinstance(a, AttentionSpec) and a.window
    ]
    if min(windows, default=num_tokens) < num_tokens:
        raise c.unsupported(
            "mm_tokens_per_image",
            f"a picture must fit in the decoder's window of {min(windows)} tokens",
        )
    # the pooling head for whole images, whose weights are ignored
    v.require("vision_use_head", False, True)
    v.ignore("initializer_factor", "projection_dim")
    made = VisionSpec(
        hidden_size=v.size("hidden_size"),
        num_channels=v.size("num_channels", 3),
        patch_size=patch_size,
        patch_bias=True,
        layers=layers,
        final_norm=NormSpec(kind="layer", size=v.size("hidden_size"), eps=eps, bias=True),
        position=GridPositionSpec(side=side, read="cells"),
        merge=side // tokens_side,
        connector=PoolConnector(
            norm=NormSpec(kind="rms", size=v.size("hidden_size"), eps=eps, weight_offset=1.0)
        ),
        token_id=c.take("image_token_index", int, 262_144),
        prompt=FramedFormat(
            placeholder="<start_of_image>",
            token="<image_soft_token>",
            around="\n\n",
            begin="<start_of_image>",
            end="<end_of_image>",
        ),
        bidirectional="all",
    )
    v.finish()
    c.ignore(
        "text_config", "tie_word_embeddings", "boi_token_index", "eoi_token_index", "use_cache"
    )
    c.finish()
    return made


def read_gemma3_processing(c: ConfigReader, vision: VisionSpec) -> ImageProcessing:
    assert isinstance(vision.position, GridPositionSpec)
    side = vision.position.side * vision.patch_size
    size = c.take("size", dict, {"height": side, "width": side})
    if size != {"height": side, "width": side}:
        raise c.unsupported("size", f"the encoder is made for {side} by {side} pixels")
    c.require("do_pan_and_scan", False)
    c.ignore(
        "pan_and_scan_min_crop_size",
        "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate",
    )
    return processing(c, FixedSize(height=side, width=side), resample=2)


SANDWICH = {
    **LLAMA,
    "post_attention": "post_attention_layernorm",
    "pre_mlp": "pre_feedforward_layernorm",
    "post_mlp": "post_feedforward_layernorm",
}


GEMMA3_NAMES = {
    **SANDWICH,
    **siglip_names("vision_tower.", out=""),
    "media.connector.norm": "multi_modal_projector.mm_soft_emb_norm",
    "media.connector.out": {"weight": "multi_modal_projector.mm_input_projection_weight"},
}


def gguf_config(m: ConfigReader, *, causal: bool = True) -> dict[str, Any]:
    config = llama_gguf_config(m, causal=causal)
    del config["hidden_act"]
    return {**config, "hidden_activation": TANH}


def gemma2_gguf_config(m: ConfigReader) -> dict[str, Any]:
    config = gguf_config(m)
    config["sliding_window"] = m.size("attention.sliding_window", 4096)
    config["attn_logit_softcapping"] = m.take("attn_logit_softcapping", float, 50.0)
    config["final_logit_softcapping"] = m.take("final_logit_softcapping", float, 30.0)
    return {**config, "query_pre_attn_scalar": _query_scalar(m, config, layers_of_27b=46)}


EMBEDDING = "gemma-embedding"
"""llama.cpp's name for EmbeddingGemma."""


def gemma3_gguf_config(m: ConfigReader) -> dict[str, Any]:
    both = m.prefix == f"{EMBEDDING}."
    config = {**gguf_config(m, causal=not both), "use_bidirectional_attention": both}
    if both:  # `gguf_pooling` reads the tensors' own shapes
        m.ignore(*(f"dense_{i}_feat_{x}" for i in (2, 3) for x in ("in", "out")))
    window, count = m.take("attention.sliding_window", int, 0), config["num_hidden_layers"]
    config["sliding_window"] = window or None
    pattern = m.value("attention.sliding_window_pattern")
    if not window:  # in that case no layer has one
        config["layer_types"] = ["full_attention"] * count
    elif isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if x else "full_attention" for x in pattern]
    else:
        config["sliding_window_pattern"] = m.maybe("attention.sliding_window_pattern", int)
    # Layers with a window have their own base and no scaling, so this factor must be 1.
    m.require("rope.scaling.attn_factor", 1.0)
    config["rope_local_base_freq"] = m.maybe("rope.freq_base_swa", float)
    config["final_logit_softcapping"] = m.maybe("final_logit_softcapping", float)
    return {**config, "query_pre_attn_scalar": _query_scalar(m, config, layers_of_27b=62)}


def _query_scalar(m: ConfigReader, config: dict[str, Any], *, layers_of_27b: int) -> float:
    """The scale of queries, which the file lacks: √head_dim, except √(hidden / heads) for the 27B."""
    if config["num_hidden_layers"] == layers_of_27b:
        return float(config["hidden_size"] / config["num_attention_heads"])
    return float(m.size("attention.key_length"))


NORMS = (
    "pre_attention",
    "post_attention",
    "pre_mlp",
    "post_mlp",
    "final_norm",
    "attention.q_norm",
    "attention.k_norm",
)
GGUF_NAMES = gguf_table(changes=dict.fromkeys(NORMS, "minus_one"))

FAMILIES = (
    *(
        Family(
            model_type=model_type,
            architectures=architectures,
            read=read,
            names=table(theirs),
            gguf=GGUFFamily(
                architecture=model_type.removesuffix("_text"),
                config=config,
                names=GGUF_NAMES,
                also=(EMBEDDING,) if model_type == "gemma3_text" else (),
                ignored=(r"dense_[23]\.weight",) if model_type == "gemma3_text" else (),
            ),
        )
        for model_type, architectures, read, theirs, config in (
            (
                "gemma",
                ("GemmaForCausalLM", "GemmaForSequenceClassification"),
                read_gemma1,
                LLAMA,
                gguf_config,
            ),
            (
                "gemma2",
                ("Gemma2ForCausalLM", "Gemma2ForSequenceClassification"),
                read_gemma2,
                SANDWICH,
                gemma2_gguf_config,
            ),
            (
                "gemma3_text",
                ("Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"),
                read_gemma3,
                SANDWICH,
                gemma3_gguf_config,
            ),
        )
    ),
    Family(
        model_type="gemma3",
        architectures=("Gemma3ForConditionalGeneration",),
        read=read_gemma3,
        names=table(
            GEMMA3_NAMES,
            changes={"media.connector.out": "transpose"},
            media_layer="vision_tower.encoder.layers.{i}.",
        ),
        **AS_LLAVA,  # also ignores the pooling head
        media=read_gemma3_vision,
        processing=read_gemma3_processing,
    ),
    Family(
        model_type="vaultgemma",
        architectures=("VaultGemmaForCausalLM",),
        read=read_vaultgemma,
        names=table({**LLAMA, "pre_mlp": "pre_feedforward_layernorm"}),
    ),
)
