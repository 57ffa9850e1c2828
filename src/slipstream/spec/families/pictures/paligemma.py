"""PaliGemma 1 (Beyer et al. 2024, arXiv:2407.07726) and 2 (arXiv:2412.03555): SigLIP and Gemma 1 or 2. No torch.

All tokens of a prompt with a picture attend to each other, and the answer's tokens to all tokens before them (a prefix
language model). transformers' processor puts <bos> after the pictures and a line break after the prompt."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families import gemma
from slipstream.spec.families.base import ConfigReader, Family, Names
from slipstream.spec.families.builders import layer_norm
from slipstream.spec.families.names import LLAMA, table
from slipstream.spec.families.pictures.images import (
    AS_LLAVA,
    processing,
    siglip_layers,
    siglip_names,
    square,
)
from slipstream.spec.media.prompts import PrefixFormat
from slipstream.spec.media.vision import (
    ConcatConnector,
    FixedSize,
    GridPositionSpec,
    ImageProcessing,
    VisionSpec,
)
from slipstream.spec.model import AttentionSpec, ModelSpec

READERS = {"gemma": gemma.read_gemma1, "gemma2": gemma.read_gemma2}
DEFAULTS = {
    "vocab_size": 257152,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
}
"""Defaults of a `text_config` of Gemma 1."""

PROMPT = PrefixFormat(placeholder="<image>", token="<image>", begin="<bos>", end="\n")


def read_text(c: ConfigReader) -> ModelSpec:
    kind = c.take("model_type", str, "gemma")
    if kind not in READERS:
        raise c.unsupported("model_type", f"the decoders are {', '.join(READERS)}")
    if kind == "gemma":
        c.assume(**DEFAULTS)
    c.require("use_bidirectional_attention", True)  # applies to prompts
    c.put(use_bidirectional_attention=False)
    c.ignore("num_image_tokens")
    return READERS[kind](c)


def read_vision(c: ConfigReader, text: ModelSpec) -> VisionSpec:
    v = c.part("vision_config")
    v.require("model_type", "siglip_vision_model")
    v.assume(hidden_size=1152, intermediate_size=4096, num_hidden_layers=27, num_attention_heads=16)
    patch, image_size = square(v, "patch_size", 14), square(v, "image_size", 224)
    layers, eps = siglip_layers(v), v.take("layer_norm_eps", float, 1e-6)
    windows = [a.window for a in text.attentions if isinstance(a, AttentionSpec) and a.window]
    side = image_size // patch
    if side**2 >= min(windows, default=2**31):
        why = f"a prompt must fit in the decoder's window of {min(windows)} tokens"
        raise v.unsupported("image_size", why)
    c.require("projection_dim", text.hidden_size)
    v.require("projection_dim", text.hidden_size)
    # a pooling head for whole images, whose weights are ignored
    v.require("vision_use_head", False, True)
    v.ignore("initializer_factor", "num_image_tokens", "projector_hidden_act", "vocab_size")
    made = VisionSpec(
        hidden_size=v.size("hidden_size"),
        num_channels=v.size("num_channels", 3),
        patch_size=patch,
        patch_bias=True,
        layers=layers,
        final_norm=layer_norm(v.size("hidden_size"), eps),
        position=GridPositionSpec(side=side, read="cells"),
        merge=1,
        connector=ConcatConnector(bias=True),
        token_id=c.take("image_token_index", int, 256000),
        prompt=PROMPT,
        bidirectional="prompt",
    )
    v.finish()
    c.ignore("text_config", "tie_word_embeddings", "ignore_index", "hidden_size", "vocab_size")
    c.finish()
    return made


def read_processing(c: ConfigReader, vision: VisionSpec) -> ImageProcessing:
    assert isinstance(vision.position, GridPositionSpec)
    side = vision.position.side * vision.patch_size
    c.require("size", {"height": side, "width": side})
    return processing(c, FixedSize(height=side, width=side), resample=3)


ENCODER: dict[str, Any] = siglip_names("vision_tower.", out="multi_modal_projector.linear")
_names = {
    family: table({**own, **ENCODER}, media_layer="vision_tower.encoder.layers.{i}.")
    for family, own in (("gemma", LLAMA), ("gemma2", gemma.SANDWICH))
}


def names(spec: ModelSpec) -> Names:
    return _names[spec.family](spec)


FAMILIES = (
    Family(
        model_type="paligemma",
        architectures=("PaliGemmaForConditionalGeneration",),
        read=read_text,
        names=names,
        **AS_LLAVA,
        media=read_vision,
        processing=read_processing,
    ),
)
