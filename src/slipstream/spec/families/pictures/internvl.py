"""InternVL 3 and 3.5 (arXiv:2504.10479), LLaVA 1.5 (arXiv:2310.03744) and 1.6: encoders with a class token. No torch.

InternVL's encoder has scaled residuals and reads an image in tiles; an MLP maps each group of patches to a token.
LLaVA's encoder is CLIP without its last layer, applied to one square image, with an MLP on each patch. LLaVA 1.6
(LLaVA-NeXT) also reads larger images in squares. The decoder can be of any family.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from slipstream.spec.families import llama, qwen
from slipstream.spec.families.base import ConfigReader, Family, Names
from slipstream.spec.families.builders import (
    activation,
    attention,
    before,
    heads,
    layer_norm,
    plain,
    rms,
)
from slipstream.spec.families.names import LLAMA, table
from slipstream.spec.families.pictures.images import AS_LLAVA, processing, siglip_names, square
from slipstream.spec.families.pictures.qwen_vl import CLIP_MEAN, CLIP_STD, quick_gelu
from slipstream.spec.functions import NormSpec
from slipstream.spec.media.prompts import FramedFormat, PromptFormat
from slipstream.spec.media.vision import (
    CenterSquare,
    GridPositionSpec,
    ImageProcessing,
    MLPConnector,
    PinpointTiles,
    RatioTiles,
    VisionSpec,
)
from slipstream.spec.model import Activation, LayerSpec, ModelSpec, OwnActivation, QKNormSpec
from slipstream.spec.parameters import Transform, Vector

READERS = {
    "llama": llama.read,
    "mistral": llama.read_mistral,
    "qwen2": qwen.read_qwen2,
    "qwen3": qwen.read_qwen3,
    "qwen3_moe": qwen.read_qwen3_moe,
}
"""Readers of the supported decoders, all of which have Llama's tensor names."""

INTERNVL = FramedFormat(
    placeholder="<IMG_CONTEXT>", token="<IMG_CONTEXT>", begin="<img>", end="</img>"
)
LLAVA = PromptFormat(placeholder="<image>", token="<image>")


def read_decoder(c: ConfigReader, default: str) -> ModelSpec:
    """Reads the decoder. The whole model's config, not the decoder's, says whether the head is
    tied; a stored head takes precedence."""
    kind = c.take("model_type", str, default)
    if kind not in READERS:
        raise c.unsupported("model_type", f"the decoders are {', '.join(READERS)}")
    return dataclasses.replace(READERS[kind](c), tied_embeddings=True)


def read_internvl(c: ConfigReader) -> ModelSpec:
    return read_decoder(c, "qwen2")


def read_llava(c: ConfigReader) -> ModelSpec:
    """Reads LLaVA's decoder. Its config omits keys whose values are those of Llama 7B or Mistral
    7B."""
    if (kind := c.value("model_type") or "llama") in ("llama", "mistral"):
        c.assume(hidden_size=4096, vocab_size=32000, num_hidden_layers=32, num_attention_heads=32)
        c.assume(intermediate_size=11008 if kind == "llama" else 14336)
    return read_decoder(c, "llama")


def read_vision_internvl(c: ConfigReader, text: ModelSpec) -> VisionSpec:
    v = c.part("vision_config")
    v.require("model_type", "internvl_vision")
    v.assume(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
    hidden, eps = v.size("hidden_size"), v.take("layer_norm_eps", float, 1e-6)
    kind = v.take("norm_type", str, "layer_norm")
    if kind not in ("layer_norm", "rms_norm"):
        raise v.unsupported("norm_type", "the norms are layer_norm, rms_norm")
    norm = layer_norm(hidden, eps) if kind == "layer_norm" else rms(hidden, eps)
    bias, normed = v.take("attention_bias", bool, False), v.take("use_qk_norm", bool, False)
    layer = LayerSpec(
        attention=attention(
            heads(v, num_kv_heads=None),
            None,
            causal=False,
            qkv_bias=bias,
            out_bias=True,
            qk_norm=QKNormSpec(over="row", eps=1e-6) if normed else None,
        ),
        mlp=plain(v.size("intermediate_size"), activation(v, "hidden_act", "gelu")),
        block=before(norm),
    )
    v.require("use_absolute_position_embeddings", True)
    v.ignore("use_mask_token", "layer_scale_init_value", "projection_dropout", "initializer_factor")
    patch, side = square(v, "patch_size", 14), square(v, "image_size", 448)
    merge = round(1 / c.take("downsample_ratio", float, 0.5))
    c.require("downsample_ratio", 1 / merge)
    c.require("image_seq_length", (side // patch // merge) ** 2)
    c.require("vision_feature_layer", -1)
    c.require("vision_feature_select_strategy", "default")
    made = VisionSpec(
        hidden_size=hidden,
        num_channels=v.size("num_channels", 3),
        patch_size=patch,
        patch_bias=True,
        class_token=True,
        layer_scale=True,
        layers=(layer,) * v.size("num_hidden_layers"),
        final_norm=None if v.take("use_mean_pooling", bool, True) else layer_norm(hidden, eps),
        position=GridPositionSpec(side=side // patch, read="cells"),
        merge=merge,
        connector=MLPConnector(
            norm=layer_norm(merge**2 * hidden, 1e-5),
            activation=activation(c, "projector_hidden_act", "gelu"),
            width="text",
        ),
        token_id=c.take("image_token_id", int, 151667),
        prompt=INTERNVL,
    )
    v.finish()
    c.ignore("text_config", "tie_word_embeddings")
    c.finish()
    return made


def read_processing_internvl(c: ConfigReader, vision: VisionSpec) -> ImageProcessing:
    """Reads the processor's config. transformers' processor of this model cuts tiles whatever `crop_to_patches`
    says."""
    assert isinstance(vision.position, GridPositionSpec)
    side = vision.position.side * vision.patch_size
    c.require("size", {"height": side, "width": side})
    c.ignore("crop_to_patches")
    least, most = c.size("min_patches", 1), c.size("max_patches", 12)
    if least > most:
        raise c.unsupported("min_patches", f"must be at most max_patches ({most})")
    sizes = RatioTiles(tile=side, least=least, most=most)
    return processing(c, sizes, resample=3, mean=CLIP_MEAN, std=CLIP_STD)


PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def read_vision_next(c: ConfigReader, text: ModelSpec) -> VisionSpec:
    """Reads LLaVA 1.6. `image_seq_length` is the number of tokens of one square; the rest follows
    from a picture's size."""
    c.require("use_image_newline_parameter", True)
    found = c.take("image_grid_pinpoints", list, PINPOINTS)
    made = read_vision_llava(c, text)
    assert isinstance(made.position, GridPositionSpec)
    side = made.position.side * made.patch_size
    return dataclasses.replace(made, pinpoints=pinpoints_of(c, found, side, least=2))


def pinpoints_of(
    c: ConfigReader, found: list[Any], side: int, *, least: int
) -> tuple[tuple[int, int], ...]:
    """Checked (height, width) pairs, both multiples of `side` pixels, with `least` squares of that side or more."""
    sizes = [(x[0], x[1]) for x in found if isinstance(x, list) and len(x) == 2]
    are_tiles = all(type(x) is int and x > 0 and x % side == 0 for size in sizes for x in size)
    are_many = are_tiles and all(h * w >= least * side**2 for h, w in sizes)
    if not sizes or len(sizes) < len(found) or not are_many:
        why = f"must be [height, width] each, of {least} squares of {side} pixels or more"
        raise c.unsupported("image_grid_pinpoints", why)
    return tuple(sizes)


def read_vision_llava(c: ConfigReader, text: ModelSpec) -> VisionSpec:
    v = c.part("vision_config")
    v.require("model_type", "clip_vision_model")
    v.assume(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
    hidden, norm = v.size("hidden_size"), _clip_norm(v)
    act: Activation = OwnActivation(name="quick_gelu", function=quick_gelu)
    if v.take("hidden_act", str, "quick_gelu") != "quick_gelu":
        act = activation(v, "hidden_act")
    of = attention(heads(v, num_kv_heads=None), None, causal=False, qkv_bias=True, out_bias=True)
    layer = LayerSpec(attention=of, mlp=plain(v.size("intermediate_size"), act), block=before(norm))
    # Feature 0 is the input of the first layer, −1 the output of the last.
    count, which = v.size("num_hidden_layers"), c.take("vision_feature_layer", int, -2)
    num_layers = which if which >= 0 else count + 1 + which
    if not 1 <= num_layers <= count:
        raise c.unsupported("vision_feature_layer", f"the encoder has {count} layers")
    c.require("vision_feature_select_strategy", "default")
    c.require("multimodal_projector_bias", True)
    patch, side = square(v, "patch_size", 14), square(v, "image_size", 336)
    c.require("image_seq_length", (side // patch) ** 2)
    v.ignore("projection_dim", "vocab_size", "initializer_factor")
    key = "image_token_index" if "image_token_index" in c else "image_token_id"
    made = VisionSpec(
        hidden_size=hidden,
        num_channels=v.size("num_channels", 3),
        patch_size=patch,
        patch_bias=False,
        class_token=True,
        layers=(layer,) * num_layers,
        first_norm=norm,
        final_norm=None,
        position=GridPositionSpec(side=side // patch, read="cells"),
        merge=1,
        connector=MLPConnector(
            norm=None, activation=activation(c, "projector_hidden_act", "gelu"), width="text"
        ),
        token_id=c.take(key, int, 32000),
        prompt=LLAVA,
    )
    v.finish()
    c.ignore("text_config", "tie_word_embeddings", "ignore_index", "vocab_size", "pad_token_id")
    c.finish()
    return made


def _clip_norm(v: ConfigReader) -> NormSpec:
    return layer_norm(v.size("hidden_size"), v.take("layer_norm_eps", float, 1e-5))


def read_processing_llava(c: ConfigReader, vision: VisionSpec) -> ImageProcessing:
    assert isinstance(vision.position, GridPositionSpec)
    side = vision.position.side * vision.patch_size
    c.require("size", {"shortest_edge": side})
    c.require("crop_size", {"height": side, "width": side}, side)
    return processing(
        c, CenterSquare(side=side), resample=3, mean=CLIP_MEAN, std=CLIP_STD, crops=True
    )


def read_processing_next(c: ConfigReader, vision: VisionSpec) -> ImageProcessing:
    assert isinstance(vision.position, GridPositionSpec)
    side = vision.position.side * vision.patch_size
    c.require("size", {"shortest_edge": side}, {"height": side, "width": side})
    c.require("crop_size", {"height": side, "width": side}, side)
    c.require("image_grid_pinpoints", [list(x) for x in vision.pinpoints])
    c.require("aspect_ratio_setting", "anyres")
    sizes = PinpointTiles(tile=side, sizes=vision.pinpoints)
    return processing(c, sizes, resample=3, mean=CLIP_MEAN, std=CLIP_STD, crops=True)


def _row(layer: LayerSpec, part: int) -> Transform:
    return Vector()


VISION_INTERNVL: dict[str, Any] = {
    "media.patch": "vision_tower.embeddings.patch_embeddings.projection",
    "media.class_token": {"weight": "vision_tower.embeddings.cls_token"},
    "media.positions": {"weight": "vision_tower.embeddings.position_embeddings"},
    "media.pre_attention": "layernorm_before",
    "media.attention.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "media.attention.q_norm": "attention.q_norm",
    "media.attention.k_norm": "attention.k_norm",
    "media.attention.out": "attention.projection_layer",
    "media.pre_mlp": "layernorm_after",
    "media.mlp.up": "mlp.fc1",
    "media.mlp.down": "mlp.fc2",
    "media.gains": ("lambda_1", "lambda_2"),
    "media.final_norm": "vision_tower.layernorm",
    "media.connector.norm": "multi_modal_projector.layer_norm",
    "media.connector.up": "multi_modal_projector.linear_1",
    "media.connector.out": "multi_modal_projector.linear_2",
}
_internvl = table(
    {**LLAMA, **VISION_INTERNVL},
    media_layer="vision_tower.encoder.layer.{i}.",
    changes={"media.class_token": "one_row", "media.positions": "one_row", "media.gains": _row},
)


def names_internvl(spec: ModelSpec) -> Names:
    """Table of tensor names. The gains of residuals are stored without the suffix `.weight`."""
    found = _internvl(spec)
    return {re.sub(r"(\.lambda_\d)\.weight$", r"\1", name): at for name, at in found.items()}


CLIP = siglip_names("vision_tower.", out="multi_modal_projector.linear_2")
_llava = table(
    {
        **LLAMA,
        **CLIP,
        "media.class_token": {"weight": "vision_tower.embeddings.class_embedding"},
        "media.first_norm": "vision_tower.pre_layrnorm",
        "media.row_end": {"weight": "image_newline"},
        "media.connector.up": "multi_modal_projector.linear_1",
    },
    media_layer="vision_tower.encoder.layers.{i}.",
    changes={"media.class_token": "vector", "media.row_end": "vector"},
)
KIND = {**AS_LLAVA, "ignored": (*AS_LLAVA["ignored"], r"(model\.)?image_newline")}

FAMILIES = (
    Family(
        model_type="internvl",
        architectures=("InternVLForConditionalGeneration",),
        read=read_internvl,
        names=names_internvl,
        **KIND,
        media=read_vision_internvl,
        processing=read_processing_internvl,
    ),
    *(
        Family(
            model_type=kind,
            architectures=(architecture,),
            read=read_llava,
            names=_llava,
            **KIND,
            media=vision,
            processing=images,
        )
        for kind, architecture, vision, images in (
            ("llava", "LlavaForConditionalGeneration", read_vision_llava, read_processing_llava),
            (
                "llava_next",
                "LlavaNextForConditionalGeneration",
                read_vision_next,
                read_processing_next,
            ),
        )
    ),
)
