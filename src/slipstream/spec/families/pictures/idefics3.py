"""Idefics 3 (arXiv:2408.12637) and SmolVLM (arXiv:2504.05299): a SigLIP encoder of tiles, pixel shuffle, and a Llama.

The checkpoints of SmolVLM 1 call themselves idefics3, those of SmolVLM 2 smolvlm; the two compute the same.
"""

from __future__ import annotations

from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.families.llama import read as read_llama
from slipstream.spec.families.names import LLAMA, table
from slipstream.spec.families.pictures.images import processing, siglip_layers, siglip_names, square
from slipstream.spec.functions import NormSpec
from slipstream.spec.media.prompts import TileGrid
from slipstream.spec.media.vision import (
    ConcatConnector,
    GridPositionSpec,
    ImageProcessing,
    TileSizes,
    VisionSpec,
)
from slipstream.spec.model import ModelSpec

ENCODER = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
}
"""Defaults of `vision_config`."""

FORMAT = TileGrid(placeholder="<image>", token="<image>", begin="<fake_token_around_image>")


def read_text(c: ConfigReader) -> ModelSpec:
    c.require("model_type", "llama", "vllama3")
    c.require("qk_layer_norms", False)
    c.require("use_resampler", False)
    # from training code; `scale_factor` gives the connector's factor
    c.ignore("perceiver_config", "pixel_shuffle_factor")
    return read_llama(c)


def read_vision(c: ConfigReader, text: ModelSpec) -> VisionSpec:
    v = c.part("vision_config")
    v.assume(**ENCODER)
    patch_size, image_size = square(v, "patch_size", 32), square(v, "image_size", 224)
    layers = siglip_layers(v)
    v.ignore("max_image_size", "size", "use_base_siglip", "initializer_factor", "projection_dim")
    made = VisionSpec(
        hidden_size=v.size("hidden_size"),
        num_channels=v.size("num_channels", 3),
        patch_size=patch_size,
        patch_bias=True,
        layers=layers,
        final_norm=NormSpec(
            kind="layer",
            size=v.size("hidden_size"),
            eps=v.take("layer_norm_eps", float, 1e-6),
            bias=True,
        ),
        position=GridPositionSpec(side=image_size // patch_size, read="fractions"),
        merge=c.size("scale_factor", 2),
        connector=ConcatConnector(),
        token_id=c.take("image_token_id", int, 128257),
        prompt=FORMAT,
    )
    v.require("tie_word_embeddings", False)
    v.finish()
    c.ignore(
        "text_config",
        "tie_word_embeddings",
        "use_cache",
        "use_reentrant_checkpointing",
        "vocab_size",
        "_pad_token_id",
    )
    c.finish()
    return made


def read_processing(c: ConfigReader, vision: VisionSpec) -> ImageProcessing:
    longest = c.take("size", dict, {"longest_edge": 4 * 364}).get("longest_edge")
    tile = c.take("max_image_size", dict, {"longest_edge": 364}).get("longest_edge")
    for key, value in (("size", longest), ("max_image_size", tile)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**14:
            raise c.unsupported(key, "must have a longest_edge of 1 to 16384")
    assert isinstance(tile, int)
    assert isinstance(longest, int)
    if tile % (vision.patch_size * vision.merge):
        raise c.unsupported(
            "max_image_size", f"must be a multiple of {vision.patch_size * vision.merge} pixels"
        )
    c.require("return_row_col_info", False, True)
    splits = c.take("do_image_splitting", bool, True)
    return processing(c, TileSizes(longest=longest, tile=tile, splits=splits), resample=1)


TEXT = {
    name: f"model.text_model.{theirs.removeprefix('model.')}"
    if isinstance(theirs, str) and "model." in theirs
    else theirs
    for name, theirs in LLAMA.items()
}
NAMES = {
    **TEXT,
    **siglip_names("model.vision_model.", out="model.connector.modality_projection.proj"),
}

FAMILIES = tuple(
    Family(
        model_type=kind,
        architectures=(architecture,),
        read=read_text,
        names=table(
            NAMES,
            layer="model.text_model.layers.{i}.",
            media_layer="model.vision_model.encoder.layers.{i}.",
        ),
        nested_config="text_config",
        ignored=(r"model\.vision_model\..*", r"model\.connector\..*"),  # skipped with max_images=0
        media=read_vision,
        processing=read_processing,
    )
    for kind, architecture in (
        ("idefics3", "Idefics3ForConditionalGeneration"),
        ("smolvlm", "SmolVLMForConditionalGeneration"),
    )
)
