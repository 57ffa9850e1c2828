"""Kimi K2.5 and 2.6 (arXiv:2602.02276): DeepSeek V3's decoder as Kimi K2 has it, and MoonViT, an image encoder with
bicubically interpolated learned positions and rotary positions whose row and column frequencies alternate. Video is not
supported.

transformers and the authors name some keys differently; both are read. Tensors have the authors' names, as transformers
writes them, too."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families import deepseek
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
from slipstream.spec.families.pictures.images import axial_rope, processing
from slipstream.spec.media.prompts import PromptFormat
from slipstream.spec.media.vision import (
    GridPositionSpec,
    ImageProcessing,
    MLPConnector,
    PatchLimits,
    VisionSpec,
)
from slipstream.spec.model import LayerSpec, ModelSpec
from slipstream.spec.parameters import Reshape

ENCODER: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
}
"""Defaults of `vision_config`."""

ALIASES = {
    **{key: f"vt_{key}" for key in list(ENCODER)[:4]},
    **{key: f"init_{key}" for key in ("pos_emb_height", "pos_emb_width", "pos_emb_time")},
}
"""The authors' names of the keys of `ENCODER`."""


def read_text(c: ConfigReader) -> ModelSpec:
    c.require("model_type", "deepseek_v3", "kimi_k2")
    return dataclasses.replace(deepseek.read_v3(c), tied_embeddings=False)


def read_vision(c: ConfigReader, text: ModelSpec) -> VisionSpec:
    v = c.part("vision_config")
    v.alias(ALIASES)
    v.assume(**ENCODER)
    v.require("model_type", "kimi_k25_vision", "kimi_k25")
    for key, value in (
        ("pos_emb_type", "divided_fixed"),
        ("video_attn_type", "spatial_temporal"),
        ("merge_type", "sd2_tpool"),
        ("mm_projector_type", "patchmerger"),
        ("projector_hidden_act", "gelu"),
        ("text_hidden_size", text.hidden_size),
        ("mm_hidden_size", v.size("hidden_size")),
    ):
        v.require(key, value)
    v.ignore("pos_emb_time")  # concerns video
    merges = v.take("merge_kernel_size", list, [2, 2])
    if len(merges) != 2 or merges[0] != merges[1] or type(merges[0]) is not int or merges[0] < 1:
        raise v.unsupported("merge_kernel_size", "only squares are supported")
    hidden, side = v.size("hidden_size"), v.size("pos_emb_height")
    v.require("pos_emb_width", side)
    h, norm = heads(v, num_kv_heads=None), layer_norm(hidden, 1e-5)
    layer = LayerSpec(
        attention=attention(h, None, causal=False, qkv_bias=True, out_bias=True),
        mlp=plain(v.size("intermediate_size"), activation(v, "hidden_act", "gelu_pytorch_tanh")),
        block=before(norm),
    )
    c.require("projection_hidden_size", hidden)
    c.alias({"image_token_id": "media_placeholder_token_id"})
    eps = c.take("projection_layer_norm_eps", float, v.take("projector_ln_eps", float, 1e-5))
    made = VisionSpec(
        hidden_size=hidden,
        num_channels=3,
        patch_size=v.size("patch_size", 14),
        patch_bias=True,
        layers=(layer,) * v.size("num_hidden_layers"),
        final_norm=norm,
        position=GridPositionSpec(side=side, read="bicubic"),
        rope=axial_rope(v, h.head_dim, columns_first=True, twined=True),
        merge=merges[0],
        connector=MLPConnector(norm=layer_norm(hidden, eps), activation="gelu"),
        token_id=c.take("image_token_id", int, 163605),
        prompt=PromptFormat(placeholder="<|media_pad|>", token="<|media_pad|>"),
    )
    v.finish()
    c.ignore("text_config", "tie_word_embeddings", "ignore_index", "use_unified_vision_chunk")
    c.ignore("video_token_id", "vision_start_token_id", "vision_end_token_id", "video_placeholder")
    c.finish()
    return made


def read_processing(c: ConfigReader, vision: VisionSpec) -> ImageProcessing:
    """Reads the preprocessing by transformers' keys, or the authors' in `media_proc_cfg`."""
    if "media_proc_cfg" in c:
        own = c.part("media_proc_cfg")
        own.ignore(
            "in_patch_limit_each_frame", "in_patch_limit_video", "sample_fps", "timestamp_mode"
        )
        own.ignore("max_num_frames_each_video", "temporal_merge_kernel_size", "config_type")
        own.require("fixed_output_tokens")
        most, side = own.size("in_patch_limit", 16384), own.size("patch_limit_on_one_side", 512)
        merge = "merge_kernel_size"
        c.finish()
    else:
        own, merge = c, "merge_size"
        size: dict[str, Any] = c.take("size", dict, {"max_height": 512, "max_width": 512})
        side = size.get("max_height", 0)
        if type(side) is not int or not 1 <= side <= 2**14 or size.get("max_width") != side:
            raise c.unsupported("size", "max_height and max_width must be one number, 1 to 16384")
        most = c.size("max_patches", 16384)
    own.require("patch_size", vision.patch_size)
    own.require(merge, vision.merge)
    patch = vision.patch_size
    sizes = PatchLimits(factor=patch * vision.merge, patch=patch, most=most, side=side)
    return processing(own, sizes, resample=3)


TOWER = "vision_tower.encoder."
VISION: dict[str, Theirs] = {
    "media.patch": "vision_tower.patch_embed.proj",
    "media.positions": "vision_tower.patch_embed.pos_emb",
    "media.pre_attention": "norm0",
    "media.attention.qkv": {"weight": "wqkv.weight", "bias": "wqkv.bias"},
    "media.attention.out": "wo",
    "media.pre_mlp": "norm1",
    "media.mlp.up": "mlp.fc0",
    "media.mlp.down": "mlp.fc1",
    "media.final_norm": f"{TOWER}final_layernorm",
    "media.connector.norm": "mm_projector.pre_norm",
    "media.connector.up": "mm_projector.proj.0",
    "media.connector.out": "mm_projector.proj.2",
}
_vision = table(VISION, media_layer=TOWER + "blocks.{i}.", only="media.")


def names(spec: ModelSpec) -> Names:
    """Table of tensor names. The position table is stored as [rows, columns, width]."""
    found = deepseek.names(dataclasses.replace(spec, media=None))
    if isinstance(vision := spec.media, VisionSpec):
        found |= _vision(spec)
        assert isinstance(vision.position, GridPositionSpec)
        side, name = vision.position.side, VISION["media.positions"]
        place = found[f"{name}.weight"]
        how = Reshape((side, side, vision.hidden_size), vision.hidden_size)
        found[f"{name}.weight"] = dataclasses.replace(place, transform=how)
    return found


FAMILIES = (
    Family(
        model_type="kimi_k25",
        architectures=("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
        read=read_text,
        names=names,
        nested_config="text_config",
        prefixes=("language_model.", "model."),
        ignored=(r"(model\.)?(vision_tower|mm_projector)\..*",),  # skipped with max_images=0
        media=read_vision,
        processing=read_processing,
    ),
)
