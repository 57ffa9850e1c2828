"""GLM-4.1V, 4.5V and 4.6V (arXiv:2507.01006): a GLM-4, dense or a mixture, whose tokens have three positions,
and an image encoder with bicubically interpolated learned positions, rotary positions by row and column, and
a gated MLP that merges patches. GLM-OCR is a small variant. Video is not supported."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from slipstream.spec.families import glm
from slipstream.spec.families.base import ConfigReader, Family, Names
from slipstream.spec.families.builders import activation, attention, before, heads, layer_norm, rms
from slipstream.spec.families.deepseek import SHARED
from slipstream.spec.families.names import Theirs, table
from slipstream.spec.families.pictures.images import axial_rope, square
from slipstream.spec.families.pictures.qwen3_vl import VISION_LAYER, VISUAL
from slipstream.spec.families.pictures.qwen_vl import OUTER, check_width, read_processing
from slipstream.spec.media.prompts import PromptFormat
from slipstream.spec.media.vision import (
    GatedMergeConnector,
    GridPositionSpec,
    ImageProcessing,
    PixelRange,
    VisionSpec,
)
from slipstream.spec.model import DenseSpec, LayerSpec, ModelSpec, MoESpec, QKNormSpec
from slipstream.spec.parameters import Flatten, Placement

ENCODER: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1536,
    "intermediate_size": 13696,
    "num_heads": 12,
    "out_hidden_size": 4096,
}
"""Defaults of `vision_config`."""

OCR: dict[str, Any] = {
    **ENCODER,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 1536,
    "attention_bias": True,
}
"""Defaults of GLM-OCR's `vision_config`."""

READERS = {
    "glm4v_text": glm.read_glm4v,
    "glm4v_moe_text": glm.read_glm4v_moe,
    "glm_ocr_text": glm.read_glm_ocr,
}
ENDS = ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id")


def read_text(c: ConfigReader, *, kinds: tuple[str, ...]) -> ModelSpec:
    """Reads the language model. `kinds`: decoder types that this model type can have; the first is
    the default without a `model_type`."""
    kind = c.take("model_type", str, kinds[0])
    kind = f"{kind}_text" if f"{kind}_text" in READERS else kind
    if kind not in kinds:
        raise c.unsupported("model_type", f"the decoders are {', '.join(kinds)}")
    return READERS[kind](c)


def read_vision(
    c: ConfigReader, text: ModelSpec, *, image: int, is_ocr: bool = False
) -> VisionSpec | None:
    """Reads the image encoder. `image`: default placeholder token. `is_ocr`: GLM-OCR's encoder has
    norms of q and k, more biases, and no learned positions."""
    token_id = c.take("image_token_id", int, image)
    c.ignore("text_config", "tie_word_embeddings", "use_cache", *OUTER, *ENDS)
    nested = c.value("text_config") is not None  # otherwise the decoder's keys are at the top level
    if "vision_config" not in c:
        if nested:
            c.finish()
        return None
    v = c.part("vision_config")
    v.assume(**(OCR if is_ocr else ENCODER))
    kinds = ("glm_ocr",) if is_ocr else ("glm4v", "glm4v_moe")
    v.require("model_type", *kinds, *(f"{kind}_vision" for kind in kinds))
    hidden, merge = v.size("hidden_size"), v.size("spatial_merge_size", 2)
    h = heads(v, num_heads="num_heads", num_kv_heads=None)
    eps = v.take("rms_norm_eps", float, 1e-5)
    norm, inner = rms(hidden, eps), v.size("intermediate_size")
    act = activation(v, "hidden_act", "silu")
    bias = v.take("attention_bias", bool, False)
    layer = LayerSpec(
        attention=attention(
            h,
            None,
            causal=False,
            qkv_bias=bias,
            out_bias=bias and is_ocr,
            qk_norm=QKNormSpec(over="head", eps=eps) if is_ocr else None,
        ),
        mlp=DenseSpec(
            intermediate_size=inner if is_ocr else v.size("out_hidden_size"),
            activation=act,
            bias=bias and is_ocr,
        ),
        block=before(norm),
    )
    check_width(v, text)
    patch, channels = square(v, "patch_size", 14), v.size("in_channels", 3)
    side = square(v, "image_size", 336) // patch
    made = VisionSpec(
        hidden_size=hidden,
        num_channels=channels,
        patch_size=patch,
        patch_bias=True,
        num_frames=square(v, "temporal_patch_size", 2),
        layers=(layer,) * v.size("depth"),
        patch_norm=None if is_ocr else norm,
        final_norm=norm,
        position=None if is_ocr else GridPositionSpec(side=side, read="bicubic"),
        rope=axial_rope(v, h.head_dim),
        merge=merge,
        connector=GatedMergeConnector(
            norm=layer_norm(text.hidden_size, 1e-5),
            activation=act,
            intermediate_size=text.hidden_size * channels if is_ocr else inner,
        ),
        token_id=token_id,
        prompt=PromptFormat(placeholder="<|image|>", token="<|image|>"),
    )
    v.finish()
    if nested:
        c.finish()
    return made


def read_glm_processing(c: ConfigReader, vision: VisionSpec) -> ImageProcessing:
    """Reads the preprocessing. transformers counts an image's pixels once for each frame to which
    the image is repeated."""
    c.assume(size={"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000})
    made = read_processing(c, vision)
    assert isinstance(made.sizes, PixelRange)
    assert vision.num_frames is not None
    counts = [divmod(n, vision.num_frames) for n in (made.sizes.min_pixels, made.sizes.max_pixels)]
    if any(rest for _, rest in counts):
        raise c.unsupported("size", f"must be multiples of {vision.num_frames}, the frames")
    (least, _), (most, _) = counts
    sizes = dataclasses.replace(made.sizes, min_pixels=least, max_pixels=most, short="scaled")
    return dataclasses.replace(made, sizes=sizes)


VISION: dict[str, Theirs] = {
    "media.patch": "visual.patch_embed.proj",
    "media.patch_norm": "visual.post_conv_layernorm",
    "media.positions": "visual.embeddings.position_embedding",
    "media.pre_attention": "norm1",
    "media.attention.qkv": "attn.qkv",
    "media.attention.q_norm": "attn.q_norm",
    "media.attention.k_norm": "attn.k_norm",
    "media.attention.out": "attn.proj",
    "media.pre_mlp": "norm2",
    "media.mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "media.mlp.down": "mlp.down_proj",
    "media.final_norm": "visual.post_layernorm",
    "media.connector.merge": "visual.downsample",
    "media.connector.in": "visual.merger.proj",
    "media.connector.norm": "visual.merger.post_projection_norm",
    "media.connector.up": "visual.merger.up_proj",
    "media.connector.out": "visual.merger.down_proj",
}
_dense, _moe = (
    table({**text, **VISION}, media_layer=VISION_LAYER) for text in (glm.SANDWICH, SHARED)
)


def names(spec: ModelSpec) -> Names:
    """The table of names. The patch-merging projection is stored as a convolution; gate and up of the MLP after it are two
    tensors."""
    has_experts = any(isinstance(layer.mlp, MoESpec) for layer in spec.layers)
    found = (_moe if has_experts else _dense)(spec)
    if isinstance(vision := spec.media, VisionSpec):
        assert isinstance(vision.connector, GatedMergeConnector)
        kernel, size = (
            (vision.hidden_size, vision.merge, vision.merge),
            vision.connector.intermediate_size,
        )
        found["visual.downsample.weight"] = Placement(
            "media.connector.merge.weight", transform=Flatten(kernel)
        )
        for i, part in enumerate(("gate", "up")):
            place = Placement("media.connector.up.weight", i * size, size)
            found[f"visual.merger.{part}_proj.weight"] = place
    return found


FAMILIES = tuple(
    Family(
        model_type=name,
        architectures=(architecture,),
        read=partial(read_text, kinds=kinds),
        names=names,
        nested_config="text_config",
        flat_config=name == "glm4v",
        prefixes=("model.", "language_model.", "model.language_model."),
        ignored=VISUAL if name != "glm_ocr" else (*VISUAL, r"(model\.)?layers\.16\..*"),
        media=partial(read_vision, image=image, is_ocr=name == "glm_ocr"),
        processing=read_glm_processing,
    )
    for name, architecture, kinds, image in (
        ("glm4v", "Glm4vForConditionalGeneration", ("glm4v_text",), 151343),
        ("glm4v_moe", "Glm4vMoeForConditionalGeneration", ("glm4v_moe_text",), 151363),
        ("glm_ocr", "GlmOcrForConditionalGeneration", ("glm_ocr_text",), 59280),
        ("glm46v", "Glm46VForConditionalGeneration", ("glm4v_text", "glm4v_moe_text"), 151343),
    )
)
