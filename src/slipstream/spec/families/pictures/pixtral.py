"""Pixtral's image encoder (arXiv:2410.07073) as Mistral 3 has it: RMS norms, gated MLPs, rotary positions whose frequencies
alternate between rows and columns, and a linear layer that merges patches. A text token ends each row of image tokens."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader
from slipstream.spec.families.builders import activation, attention, before, gated, heads, rms
from slipstream.spec.families.names import Theirs, table
from slipstream.spec.families.pictures.images import axial_rope, processing, square
from slipstream.spec.families.pictures.qwen_vl import CLIP_MEAN, CLIP_STD
from slipstream.spec.media.prompts import TokenRows
from slipstream.spec.media.vision import (
    ImageProcessing,
    LongestSide,
    PatchMergeConnector,
    VisionSpec,
)
from slipstream.spec.model import LayerSpec, ModelSpec

ENCODER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
"""Defaults of `vision_config`."""


def read_vision(c: ConfigReader, text: ModelSpec) -> VisionSpec | None:
    c.ignore("text_config", "tie_word_embeddings", "use_cache")
    name = "image_token_index" if "image_token_index" in c else "image_token_id"
    token_id, bias = c.take(name, int, 10), c.take("multimodal_projector_bias", bool, False)
    merge, act = c.size("spatial_merge_size", 2), activation(c, "projector_hidden_act", "gelu")
    c.require("vision_feature_layer", -1)
    if "vision_config" not in c:
        c.finish()
        return None
    v = c.part("vision_config")
    v.require("model_type", "pixtral")
    v.assume(**ENCODER)
    hidden = v.size("hidden_size")
    h = heads(v, num_kv_heads=None)
    norm = rms(v.size("hidden_size"), 1e-5)
    if h.num_heads * h.head_dim != hidden:
        raise v.unsupported("head_dim", f"must be {hidden // h.num_heads}, hidden_size by heads")
    layer = LayerSpec(
        attention=attention(h, None, causal=False), mlp=gated(v, default="gelu"), block=before(norm)
    )
    v.ignore("image_size", "vocab_size")
    made = VisionSpec(
        hidden_size=hidden,
        num_channels=v.size("num_channels", 3),
        patch_size=square(v, "patch_size", 16),
        patch_bias=False,
        layers=(layer,) * v.size("num_hidden_layers"),
        final_norm=None,
        first_norm=norm,
        rope=axial_rope(v, h.head_dim, alternate=True),
        merge=merge,
        connector=PatchMergeConnector(norm=rms(hidden, _eps(text)), activation=act, bias=bias),
        token_id=token_id,
        prompt=TokenRows(
            placeholder="[IMG]", token="[IMG]", row_end="[IMG_BREAK]", end="[IMG_END]"
        ),
    )
    v.finish()
    c.finish()
    return made


def _eps(text: ModelSpec) -> float:
    assert text.final_norm is not None
    return text.final_norm.eps


def read_processing(c: ConfigReader, vision: VisionSpec) -> ImageProcessing:
    side = vision.patch_size
    for size in (side, side * vision.merge):  # transformers' processor always uses these sizes
        if c.value("patch_size") in (size, {"height": size, "width": size}):
            break
    else:
        c.require("patch_size", side)
    given: dict[str, Any] = c.take("size", dict, {"longest_edge": 1024})
    longest = given.get("longest_edge") or given.get("height")
    if (
        type(longest) is not int
        or not 1 <= longest <= 2**14
        or given.get("width", longest) != longest
    ):
        raise c.unsupported("size", "must have a longest_edge of 1 to 16384")
    sizes = LongestSide(factor=side * vision.merge, longest=longest)
    return processing(c, sizes, resample=3, mean=CLIP_MEAN, std=CLIP_STD)


VISION: dict[str, Theirs] = {
    "media.patch": "vision_tower.patch_conv",
    "media.first_norm": "vision_tower.ln_pre",
    "media.pre_attention": "attention_norm",
    "media.attention.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "media.attention.out": "attention.o_proj",
    "media.pre_mlp": "ffn_norm",
    "media.mlp.up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "media.mlp.down": "feed_forward.down_proj",
    "media.connector.norm": "multi_modal_projector.norm",
    "media.connector.merge": "multi_modal_projector.patch_merger.merging_layer",
    "media.connector.up": "multi_modal_projector.linear_1",
    "media.connector.out": "multi_modal_projector.linear_2",
}

names = table(VISION, media_layer="vision_tower.transformer.layers.{i}.", only="media.")
