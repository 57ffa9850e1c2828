"""LLaVA-OneVision (Li et al. 2024, arXiv:2408.03326): SigLIP without its final norm, an MLP, and any decoder. No torch.

A prompt's only image is read whole and in squares as in LLaVA 1.6: up to 36 squares, whose tokens are scaled down to those
of nine. If a prompt has several images, each is read as one square."""

from __future__ import annotations

import re

from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.families.builders import activation
from slipstream.spec.families.names import LLAMA, table
from slipstream.spec.families.pictures.images import processing, siglip_layers, siglip_names, square
from slipstream.spec.families.pictures.internvl import KIND, LLAVA, pinpoints_of, read_decoder
from slipstream.spec.families.pictures.qwen_vl import CLIP_MEAN, CLIP_STD
from slipstream.spec.media.vision import (
    GridPositionSpec,
    ImageProcessing,
    MLPConnector,
    PinpointTiles,
    VisionSpec,
)
from slipstream.spec.model import ModelSpec

PINPOINTS = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]


def read_text(c: ConfigReader) -> ModelSpec:
    return read_decoder(c, "qwen2")


def read_vision(c: ConfigReader, text: ModelSpec) -> VisionSpec:
    v = c.part("vision_config")
    v.require("model_type", "siglip_vision_model")
    v.assume(hidden_size=1152, intermediate_size=4304, num_hidden_layers=26, num_attention_heads=16)
    patch, image_size = square(v, "patch_size", 14), square(v, "image_size", 384)
    layers, hidden = siglip_layers(v), v.size("hidden_size")
    c.require("vision_feature_layer", -1)
    c.require("vision_feature_select_strategy", "full")
    c.require("multimodal_projector_bias", True)
    # a pooling head for whole images, whose weights are ignored
    v.require("vision_use_head", False, True)
    v.ignore("initializer_factor", "vocab_size", "projection_dim")
    found = c.take("image_grid_pinpoints", list, PINPOINTS)
    said = c.take("vision_aspect_ratio", str, "anyres_max_9")
    if not (limit := re.fullmatch(r"anyres_max_([1-9]\d{0,3})", said)):
        raise c.unsupported("vision_aspect_ratio", "only anyres_max_N is supported")
    made = VisionSpec(
        hidden_size=hidden,
        num_channels=v.size("num_channels", 3),
        patch_size=patch,
        patch_bias=True,
        layers=layers,
        final_norm=None,
        position=GridPositionSpec(side=image_size // patch, read="cells"),
        merge=1,
        connector=MLPConnector(
            norm=None, activation=activation(c, "projector_hidden_act", "gelu"), width="text"
        ),
        token_id=c.take("image_token_index", int, 151646),
        prompt=LLAVA,
        pinpoints=pinpoints_of(c, found, image_size, least=1),
        most_tiles=int(limit[1]),
    )
    v.finish()
    c.ignore("text_config", "tie_word_embeddings", "ignore_index", "video_token_index")
    c.ignore("use_image_newline_parameter")  # transformers' class always adds it
    c.finish()
    return made


def read_processing(c: ConfigReader, vision: VisionSpec) -> ImageProcessing:
    assert isinstance(vision.position, GridPositionSpec)
    size = c.take("size", dict, {"height": 384, "width": 384})
    side = size.get("height", size.get("shortest_edge"))
    if (
        not isinstance(side, int)
        or size not in ({"height": side, "width": side}, {"shortest_edge": side})
        or side // vision.patch_size != vision.position.side
        or any(x % side for both in vision.pinpoints for x in both)
    ):
        raise c.unsupported("size", "must be the encoder's image_size in both directions")
    c.require("image_grid_pinpoints", [list(x) for x in vision.pinpoints])
    c.ignore("aspect_ratio_setting")
    sizes = PinpointTiles(tile=side, sizes=vision.pinpoints, most=vision.most_tiles)
    return processing(c, sizes, resample=3, mean=CLIP_MEAN, std=CLIP_STD)


FAMILIES = (
    Family(
        model_type="llava_onevision",
        architectures=("LlavaOnevisionForConditionalGeneration",),
        read=read_text,
        names=table(
            {
                **LLAMA,
                **siglip_names("vision_tower.", out="multi_modal_projector.linear_2"),
                "media.row_end": {"weight": "image_newline"},
                "media.connector.up": "multi_modal_projector.linear_1",
            },
            media_layer="vision_tower.encoder.layers.{i}.",
            changes={"media.row_end": "vector"},
        ),
        **KIND,
        media=read_vision,
        processing=read_processing,
    ),
)
