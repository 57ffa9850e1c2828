"""EXAONE 4.5: an EXAONE 4, whose tokens have one position each, and Qwen 2.5 VL's image encoder with several query heads
over a head of keys and values. Video is not supported."""

from __future__ import annotations

from slipstream.spec.families import exaone
from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.families.names import table
from slipstream.spec.families.pictures.qwen_vl import OUTER, VISION, read_processing, read_vision
from slipstream.spec.media.vision import VisionSpec
from slipstream.spec.model import ModelSpec

COPIED = (
    *("hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "vocab_size"),
    *("max_window_layers", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    *("reorder_qk_norm", "rms_norm_eps", "rope_scaling", "rope_theta", "sliding_window"),
)
"""The decoder's keys that early files repeat next to `text_config`, where transformers does not read them."""


def read_text(c: ConfigReader) -> ModelSpec:
    c.require("model_type", "exaone4", "exaone4_5_text")
    c.require("reorder_qk_norm", True)  # the norms' place is EXAONE 4's
    if (key := "num_kv_heads") in c:
        c.require(key, c.size("num_key_value_heads"))
    c.ignore("max_window_layers", "num_nextn_predict_layers", *OUTER)
    return exaone.read(c)


def read_encoder(c: ConfigReader, text: ModelSpec) -> VisionSpec:
    c.ignore(*COPIED)
    return read_vision(c, text, kinds=("exaone4_5_vision",), kv_heads=8, image=67)


FAMILIES = (
    Family(
        model_type="exaone4_5",
        architectures=("Exaone4_5_ForConditionalGeneration",),
        read=read_text,
        names=table({**exaone.NAMES, **VISION}, media_layer="visual.blocks.{i}."),
        nested_config="text_config",
        prefixes=("model.", "language_model.", "model.language_model."),
        # The encoder is skipped with max_images=0. Layers that draft tokens (MTP) are not run.
        ignored=(r"(model\.)?visual\..*", r"mtp\..*"),
        media=read_encoder,
        processing=read_processing,
    ),
)
