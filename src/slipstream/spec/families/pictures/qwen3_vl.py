"""Qwen 3 VL (arXiv:2511.21631): a Qwen 3 whose tokens have three positions, and an image encoder
with bilinearly interpolated learned positions, rotary positions by row and column, and DeepStack.
Qwen 3.5 has the encoder without DeepStack. Video is not supported."""

from __future__ import annotations

import math
from collections.abc import Mapping

from slipstream.spec.families.base import ConfigReader, Family, Names
from slipstream.spec.families.builders import (
    activation,
    attention,
    before,
    heads,
    layer_norm,
    plain,
)
from slipstream.spec.families.names import Theirs, table
from slipstream.spec.families.pictures.images import axial_rope, square
from slipstream.spec.families.pictures.qwen_vl import OUTER, PLAIN, check_width, read_processing
from slipstream.spec.families.qwen import QWEN3_VL, read_qwen3_vl, read_qwen3_vl_moe
from slipstream.spec.media.prompts import PromptFormat
from slipstream.spec.media.vision import DeepStackSpec, GridPositionSpec, MLPConnector, VisionSpec
from slipstream.spec.model import LayerSpec, ModelSpec

ENCODER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
}
"""Defaults of `vision_config`."""


def read_vision(c: ConfigReader, text: ModelSpec) -> VisionSpec | None:
    return read_encoder(c, text, stacked=[8, 16, 24], image=151655)


def read_vision_3_5(c: ConfigReader, text: ModelSpec) -> VisionSpec | None:
    return read_encoder(c, text, stacked=None, image=248056)


def read_encoder(
    c: ConfigReader,
    text: ModelSpec,
    *,
    stacked: list[int] | None,
    image: int,
    prompt: PromptFormat = PLAIN,
) -> VisionSpec | None:
    """Reads a Qwen 3 VL image encoder. `stacked`: default list of DeepStack layers; None: no
    DeepStack. `image`: default placeholder token."""
    token_id = c.take("image_token_id", int, image)
    c.ignore("text_config", "tie_word_embeddings", "use_cache", "language_model_only", *OUTER)
    if "vision_config" not in c:
        c.finish()
        return None
    v = c.part("vision_config")
    v.assume(**ENCODER)
    hidden, depth, merge = v.size("hidden_size"), v.size("depth"), v.size("spatial_merge_size", 2)
    h, norm = heads(v, num_heads="num_heads", num_kv_heads=None), layer_norm(hidden, 1e-6)
    layer = LayerSpec(
        attention=attention(h, None, causal=False, qkv_bias=True, out_bias=True),
        mlp=plain(v.size("intermediate_size"), activation(v, "hidden_act", "gelu_pytorch_tanh")),
        block=before(norm),
    )
    count = v.size("num_position_embeddings")
    if math.isqrt(count) ** 2 != count:
        raise v.unsupported("num_position_embeddings", "must be the square of a whole number")
    layers = v.take("deepstack_visual_indexes", list, stacked or [])
    if not all(type(i) is int and 0 <= i < depth for i in layers) or layers != sorted({*layers}):
        raise v.unsupported(
            "deepstack_visual_indexes", f"must be ascending layers below {depth}, the depth"
        )
    if stacked is None and layers:
        raise v.unsupported("deepstack_visual_indexes", "Qwen 3.5 has no DeepStack; leave it empty")
    if len(layers) > text.num_layers:
        raise v.unsupported(
            "deepstack_visual_indexes", f"the decoder has only {text.num_layers} layers"
        )
    whole = MLPConnector(norm=layer_norm(merge * merge * hidden, 1e-6), activation="gelu")
    check_width(v, text)
    made = VisionSpec(
        hidden_size=hidden,
        num_channels=v.size("in_channels", 3),
        patch_size=square(v, "patch_size", 16),
        patch_bias=True,
        num_frames=square(v, "temporal_patch_size", 2),
        layers=(layer,) * depth,
        final_norm=None,
        position=GridPositionSpec(side=math.isqrt(count), read="bilinear"),
        rope=axial_rope(v, h.head_dim),
        merge=merge,
        connector=MLPConnector(norm=norm, activation="gelu"),
        deepstack=DeepStackSpec(layers=tuple(layers), connector=whole) if layers else None,
        token_id=token_id,
        prompt=prompt,
    )
    v.finish()
    c.finish()
    return made


VISION: dict[str, Theirs] = {
    "media.patch": "visual.patch_embed.proj",
    "media.positions": "visual.pos_embed",
    "media.pre_attention": "norm1",
    "media.attention.qkv": "attn.qkv",
    "media.attention.out": "attn.proj",
    "media.pre_mlp": "norm2",
    "media.mlp.up": "mlp.linear_fc1",
    "media.mlp.down": "mlp.linear_fc2",
    "media.connector.norm": "visual.merger.norm",
    "media.connector.up": "visual.merger.linear_fc1",
    "media.connector.out": "visual.merger.linear_fc2",
}
VISION_LAYER = "visual.blocks.{i}."
VISUAL = (r"(model\.)?visual\..*",)
"""Tensors of the encoder, which are not loaded with max_images=0."""


def names(spec: ModelSpec, decoder: Mapping[str, Theirs] = QWEN3_VL) -> Names:
    """The tensors of a model with this encoder. `decoder`: the decoder's names."""
    stacked = {
        f"media.deepstack.{i}.{ours}": f"visual.deepstack_merger_list.{i}.{theirs}"
        for i in range(0 if spec.media is None else spec.media.num_added)
        for ours, theirs in (("norm", "norm"), ("up", "linear_fc1"), ("out", "linear_fc2"))
    }
    made = table(
        {**decoder, **VISION, **stacked},
        media_layer=VISION_LAYER,
        changes=dict.fromkeys(("experts.up", "experts.down"), "turn"),
    )
    return made(spec)


FAMILIES = tuple(
    Family(
        model_type=name,
        architectures=(architecture,),
        read=read,
        names=names,
        nested_config="text_config",
        prefixes=("model.", "language_model.", "model.language_model."),
        ignored=VISUAL,
        media=read_vision,
        processing=read_processing,
    )
    for name, architecture, read in (
        ("qwen3_vl", "Qwen3VLForConditionalGeneration", read_qwen3_vl),
        ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", read_qwen3_vl_moe),
    )
)
