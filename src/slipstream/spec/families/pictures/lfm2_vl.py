"""LFM2-VL: a SigLIP 2 encoder for images in their own aspect ratio (arXiv:2502.14786), an MLP on groups of patches,
and an LFM2, dense or a mixture. A large image is cut into tiles, followed by the whole image scaled down."""

from __future__ import annotations

import math

from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.families.builders import activation, layer_norm
from slipstream.spec.families.hybrids import lfm
from slipstream.spec.families.names import of_conv, table
from slipstream.spec.families.pictures.images import (
    AS_LLAVA,
    processing,
    siglip_layers,
    siglip_names,
)
from slipstream.spec.media.prompts import NamedTiles
from slipstream.spec.media.vision import (
    GridPositionSpec,
    ImageProcessing,
    MLPConnector,
    PixelRange,
    RatioTiles,
    VisionSpec,
    WholeOrTiles,
)
from slipstream.spec.model import ModelSpec

READERS = {"lfm2": lfm.read_lfm2, "lfm2_moe": lfm.read_lfm2_moe}
FORMAT = NamedTiles(
    placeholder="<image>", token="<image>", begin="<|image_start|>", end="<|image_end|>"
)


def read_text(c: ConfigReader) -> ModelSpec:
    kind = c.take("model_type", str, "lfm2")
    if kind not in READERS:
        raise c.unsupported("model_type", f"the decoders are {', '.join(READERS)}")
    return READERS[kind](c)


def read_vision(c: ConfigReader, text: ModelSpec) -> VisionSpec:
    v = c.part("vision_config")
    v.require("model_type", "siglip2_vision_model")
    v.assume(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
    hidden, eps = v.size("hidden_size"), v.take("layer_norm_eps", float, 1e-6)
    count, merge = v.size("num_patches", 256), c.size("downsample_factor", 2)
    if math.isqrt(count) ** 2 != count:
        raise v.unsupported("num_patches", "must be the square of a whole number")
    layers = siglip_layers(v)
    v.ignore("vision_use_head", "projection_dim")
    c.require("projector_bias", True)
    c.require("vision_feature_layer", -1)
    c.require("use_image_special_tokens", True)
    norms = c.take("projector_use_layernorm", bool, True)
    c.alias({"image_token_id": "image_token_index"})
    made = VisionSpec(
        hidden_size=hidden,
        num_channels=v.size("num_channels", 3),
        patch_size=v.size("patch_size", 16),
        patch_bias=True,
        channels_last=True,
        layers=layers,
        final_norm=layer_norm(hidden, eps),
        position=GridPositionSpec(side=math.isqrt(count), read="antialiased"),
        merge=merge,
        connector=MLPConnector(
            norm=layer_norm(merge**2 * hidden, 1e-5) if norms else None,
            activation=activation(c, "projector_hidden_act", "gelu"),
            width=c.size("projector_hidden_size", 2560),
        ),
        token_id=c.take("image_token_id", int, 396),
        prompt=FORMAT,
    )
    v.finish()
    c.ignore("text_config", "tie_word_embeddings", "tie_embedding", *OF_PROCESSING)
    c.finish()
    return made


OF_PROCESSING = (
    *("do_image_splitting", "encoder_patch_size", "max_image_tokens", "max_num_patches"),
    *("max_pixels_tolerance", "max_tiles", "min_image_tokens", "min_tiles", "tile_size"),
    "use_thumbnail",
)
"""Keys of early model configs that the image processor's config repeats. The processor's values are used."""


def read_processing(c: ConfigReader, vision: VisionSpec) -> ImageProcessing:
    patch, merge = vision.patch_size, vision.merge
    c.require("encoder_patch_size", patch)
    c.require("downsample_factor", merge)
    least, most = c.size("min_image_tokens", 64), c.size("max_image_tokens", 256)
    few, many = c.size("min_tiles", 2), c.size("max_tiles", 10)
    for key, low, high in (("min_image_tokens", least, most), ("min_tiles", few, many)):
        if low > high:
            raise c.unsupported(key, f"must be at most {high}, {key.replace('min', 'max')}")
    tile, side = c.size("tile_size", 512), patch * merge
    if tile % side:
        raise c.unsupported("tile_size", f"must be a multiple of {side} pixels")
    splits = c.take("do_image_splitting", bool, True) and many > 1
    sizes = WholeOrTiles(
        whole=PixelRange(
            factor=side, min_pixels=least * side**2, max_pixels=most * side**2, short="clamped"
        ),
        tiles=RatioTiles(tile=tile, least=few, most=many) if splits else None,
        limit=most * side**2 * c.take("max_pixels_tolerance", float, 2.0),
        side=patch,
        thumbnail=c.take("use_thumbnail", bool, True),
    )
    c.ignore("size", "return_row_col_info", "max_num_patches")
    return processing(c, sizes, resample=2)


NAMES = {
    **lfm.NAMES,
    **siglip_names("vision_tower.", out="multi_modal_projector.linear_2"),
    "media.connector.norm": "multi_modal_projector.layer_norm",
    "media.connector.up": "multi_modal_projector.linear_1",
}

FAMILIES = (
    Family(
        model_type="lfm2_vl",
        architectures=("Lfm2VlForConditionalGeneration",),
        read=read_text,
        names=table(
            NAMES,
            media_layer="vision_tower.encoder.layers.{i}.",
            changes={"recurrent.conv": of_conv},
        ),
        **AS_LLAVA,
        media=read_vision,
        processing=read_processing,
    ),
)
