"""Aya Vision (arXiv:2505.08751) and Command A Vision: a SigLIP encoder of square tiles, a gated MLP on groups of
patches, and a Command R7B's decoder. They differ in the choice of tiles and in the text around them in the prompt."""

from __future__ import annotations

from slipstream.spec.families import cohere
from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.families.builders import layer_norm
from slipstream.spec.families.names import LLAMA, table
from slipstream.spec.families.pictures.images import (
    AS_LLAVA,
    processing,
    siglip_layers,
    siglip_names,
    square,
)
from slipstream.spec.families.pictures.qwen_vl import CLIP_MEAN, CLIP_STD
from slipstream.spec.media.prompts import LinedTiles, NumberedTiles, PromptFormat
from slipstream.spec.media.vision import (
    GridPositionSpec,
    ImageProcessing,
    MLPConnector,
    RatioTiles,
    VisionSpec,
)
from slipstream.spec.model import ModelSpec

FRAME = {"token": "<|IMG_PATCH|>", "begin": "<|START_OF_IMG|>", "end": "<|END_OF_IMG|>"}
AYA = NumberedTiles(placeholder="<image>", **FRAME)
COMMAND = LinedTiles(placeholder="<|IMG_PATCH|>", line_end="<|IMG_LINE_BREAK|>", **FRAME)
TOKEN = 255036


def read_text(c: ConfigReader) -> ModelSpec:
    """The decoder. Logits are multiplied by `logit_scale` as in Cohere 2, which transformers'
    classes of these types omit."""
    c.require("model_type", "cohere2")
    return cohere.read_cohere2(c)


def read_aya(c: ConfigReader, text: ModelSpec) -> VisionSpec:
    v = c.part("vision_config")
    v.assume(hidden_size=1152, intermediate_size=4304, num_hidden_layers=26, num_attention_heads=14)
    c.require("vision_feature_layer", -1)
    c.require("vision_feature_select_strategy", "full")
    eps, name = c.take("adapter_layer_norm_eps", float, 1e-6), "image_token_index"
    c.alias({name: "image_token_id"})
    size = c.size("alignment_intermediate_size", text.hidden_size)
    return _read(c, v, AYA, c.take(name, int, TOKEN), size=size, norm_eps=eps, image=384)


def read_command(c: ConfigReader, text: ModelSpec) -> VisionSpec:
    v = c.part("vision_config")
    v.assume(hidden_size=1152, intermediate_size=3072, num_hidden_layers=27, num_attention_heads=12)
    token, size = c.take("image_token_id", int, TOKEN), c.size("alignment_intermediate_size", 36864)
    return _read(c, v, COMMAND, token, size=size, norm_eps=None, image=512)


def _read(
    c: ConfigReader,
    v: ConfigReader,
    prompt: PromptFormat,
    token: int,
    *,
    size: int,
    norm_eps: float | None,
    image: int,
) -> VisionSpec:
    """Reads the image encoder. `size`: the connector's width, gate and up together. `image`:
    default of `image_size`."""
    v.require("model_type", "siglip_vision_model")
    hidden, merge = v.size("hidden_size"), c.size("downsample_factor", 2)
    patch, side = square(v, "patch_size", 14 if norm_eps else 16), square(v, "image_size", image)
    if side % (patch * merge):
        raise v.unsupported("image_size", f"must be a multiple of {patch * merge} pixels")
    if size % 2:
        raise c.unsupported("alignment_intermediate_size", "must be even: half of it are gates")
    layers, eps = siglip_layers(v), v.take("layer_norm_eps", float, 1e-6)
    v.ignore("vision_use_head", "projection_dim")
    made = VisionSpec(
        hidden_size=hidden,
        num_channels=v.size("num_channels", 3),
        patch_size=patch,
        patch_bias=True,
        layers=layers,
        final_norm=layer_norm(hidden, eps)
        if norm_eps is None
        else None,  # Aya's final norm is not used
        position=GridPositionSpec(side=side // patch, read="cells"),
        merge=merge,
        connector=MLPConnector(
            norm=None if norm_eps is None else layer_norm(merge**2 * hidden, norm_eps),
            activation="silu",
            width=size // 2,
            gated=True,
        ),
        token_id=token,
        prompt=prompt,
    )
    v.finish()
    c.ignore("text_config", "tie_word_embeddings")
    c.finish()
    return made


def read_aya_processing(c: ConfigReader, vision: VisionSpec) -> ImageProcessing:
    c.ignore("crop_to_patches")  # the model's image processor always cuts tiles
    return _processing(c, vision, "ratio")


def read_command_processing(c: ConfigReader, vision: VisionSpec) -> ImageProcessing:
    assert isinstance(vision.position, GridPositionSpec)
    c.require("crop_to_patches", True)
    c.require("patch_size", vision.position.side // vision.merge)  # size of a tile's side in tokens
    return _processing(c, vision, "scale")


def _processing(c: ConfigReader, vision: VisionSpec, by: str) -> ImageProcessing:
    assert isinstance(vision.position, GridPositionSpec)
    side = vision.position.side * vision.patch_size
    c.require("size", {"height": side, "width": side})
    least, most = c.size("min_patches", 1), c.size("max_patches", 12)
    if least > most:
        raise c.unsupported("min_patches", f"must be at most max_patches ({most})")
    sizes = RatioTiles(tile=side, least=least, most=most, by="scale" if by == "scale" else "ratio")
    return processing(c, sizes, resample=3, mean=CLIP_MEAN, std=CLIP_STD)


NAMES = {
    **LLAMA,
    "norm": "input_layernorm",
    **siglip_names("vision_tower.", out="multi_modal_projector.linear_2"),
    "media.connector.norm": "multi_modal_projector.layernorm",
    "media.connector.up": "multi_modal_projector.linear_1",
}

FAMILIES = tuple(
    Family(
        model_type=name,
        architectures=(architecture,),
        read=read_text,
        names=table(
            NAMES,
            media_layer="vision_tower.encoder.layers.{i}.",
            changes={"media.connector.up": "swap"},
        ),
        **AS_LLAVA,
        media=vision,
        processing=images,
    )
    for name, architecture, vision, images in (
        ("aya_vision", "AyaVisionForConditionalGeneration", read_aya, read_aya_processing),
        (
            "cohere2_vision",
            "Cohere2VisionForConditionalGeneration",
            read_command,
            read_command_processing,
        ),
    )
)
