"""Qwen 2.5 VL (arXiv:2502.13923): a Qwen 2 whose tokens have three positions (M-RoPE), and an image
encoder with RMS norms, gated MLPs, rotary positions by row and column, and windows in most layers.
Qwen 2 VL (arXiv:2409.12191) has layer norms, plain MLPs and no windows. Video is not supported."""

from __future__ import annotations

from functools import partial
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.families.builders import (
    Sections,
    activation,
    attention,
    before,
    gated,
    heads,
    layer_norm,
    model,
    plain,
    rms,
    rope,
)
from slipstream.spec.families.names import LLAMA, Theirs, table
from slipstream.spec.families.pictures.images import axial_rope, processing, square
from slipstream.spec.media.prompts import PromptFormat
from slipstream.spec.media.vision import ImageProcessing, MLPConnector, PixelRange, VisionSpec
from slipstream.spec.model import Activation, DenseSpec, LayerSpec, ModelSpec, OwnActivation

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

PLAIN = PromptFormat(placeholder="<|image_pad|>", token="<|image_pad|>")

TEXT: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}
ENCODER: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
"""Defaults of the config's two parts."""


def read_text(c: ConfigReader, kind: str = "qwen2_5_vl") -> ModelSpec:
    c.assume(**TEXT)
    c.require("model_type", f"{kind}_text", kind)
    h = heads(c)
    max_position = c.size("max_position_embeddings")
    norm = rms(c.size("hidden_size"), c.take("rms_norm_eps", float))
    c.require("use_sliding_window", False)
    c.ignore("sliding_window", "max_window_layers")  # concerns windows, which are off
    if set(c.take("layer_types", list, ["full_attention"])) != {"full_attention"}:
        raise c.unsupported("layer_types", "only full_attention is supported")
    of = attention(
        h,
        rope(
            c,
            h.head_dim,
            theta=1e6,
            max_position=max_position,
            sections=Sections(),
            renamed={"mrope": "default"},
        ),
        qkv_bias=True,
    )
    layer = LayerSpec(attention=of, mlp=gated(c), block=before(norm))
    return model(c, kind, layer, norm, max_position)


def quick_gelu(x: Any) -> Any:
    return x * (1.702 * x).sigmoid()


def read_vision_2(c: ConfigReader, text: ModelSpec) -> VisionSpec:
    v = c.part("vision_config")
    v.assume(depth=32, embed_dim=1280, num_heads=16)
    v.require("model_type", "qwen2_vl", "qwen2_vl_vision")
    hidden = v.size("embed_dim")
    merge = v.size("spatial_merge_size", 2)
    patch_size = square(v, "patch_size", 14)
    h = heads(v, hidden="embed_dim", num_heads="num_heads", num_kv_heads=None)
    norm = layer_norm(hidden, 1e-6)
    act: Activation = OwnActivation(name="quick_gelu", function=quick_gelu)
    if v.take("hidden_act", str, "quick_gelu") != "quick_gelu":
        act = activation(v, "hidden_act")
    layer = LayerSpec(
        attention=attention(h, None, causal=False, qkv_bias=True, out_bias=True),
        mlp=plain(int(hidden * v.take("mlp_ratio", float, 4.0)), act),
        block=before(norm),
    )
    check_width(v, text, "hidden_size")
    v.require("spatial_patch_size", patch_size)
    made = VisionSpec(
        hidden_size=hidden,
        num_channels=v.size("in_channels" if "in_channels" in v else "in_chans", 3),
        patch_size=patch_size,
        patch_bias=False,
        num_frames=square(v, "temporal_patch_size", 2),
        layers=(layer,) * v.size("depth"),
        final_norm=None,
        rope=axial_rope(v, h.head_dim),
        merge=merge,
        connector=MLPConnector(norm=norm, activation="gelu"),
        token_id=c.take("image_token_id", int, 151655),
        prompt=PLAIN,
    )
    return _finished(c, v, made)


def read_vision(
    c: ConfigReader,
    text: ModelSpec,
    *,
    kinds: tuple[str, ...] = ("qwen2_5_vl", "qwen2_5_vl_vision"),
    kv_heads: int | None = None,
    image: int = 151655,
) -> VisionSpec:
    """Reads Qwen 2.5 VL's encoder. `kinds`: its names of the model type. `kv_heads`: default of
    `num_key_value_heads`; None: as many as heads of queries. `image`: default placeholder token."""
    v = c.part("vision_config")
    v.assume(**ENCODER)
    v.require("model_type", *kinds)
    hidden, depth = v.size("hidden_size"), v.size("depth")
    key = None if kv_heads is None else "num_key_value_heads"
    v.assume(**({key: kv_heads} if key else {}))
    h = heads(v, num_heads="num_heads", num_kv_heads=key)
    norm = rms(hidden, 1e-6)
    merge = v.size("spatial_merge_size", 2)
    patch_size = square(v, "patch_size", 14)
    mlp = DenseSpec(
        intermediate_size=v.size("intermediate_size"),
        activation=activation(v, "hidden_act", "silu"),
        bias=True,
    )
    layer = LayerSpec(
        attention=attention(h, None, causal=False, qkv_bias=True, out_bias=True),
        mlp=mlp,
        block=before(norm),
    )
    window, side = v.size("window_size", 112), patch_size * merge
    if window % side:
        raise v.unsupported("window_size", f"must be a multiple of {side} pixels")
    full = v.take("fullatt_block_indexes", list)
    if not all(isinstance(i, int) for i in full):
        raise v.unsupported("fullatt_block_indexes", "must be whole numbers")
    check_width(v, text)
    v.require("spatial_patch_size", patch_size)
    v.ignore("tokens_per_second")  # concerns video
    num_channels = v.size("in_channels" if "in_channels" in v else "in_chans", 3)
    v.require("in_chans", num_channels)  # files may have both keys
    made = VisionSpec(
        hidden_size=hidden,
        num_channels=num_channels,
        patch_size=patch_size,
        patch_bias=False,
        num_frames=square(v, "temporal_patch_size", 2),
        layers=(layer,) * depth,
        final_norm=None,
        rope=axial_rope(v, h.head_dim),
        merge=merge,
        window=window // side,
        full_layers=frozenset(full),
        connector=MLPConnector(norm=norm, activation="gelu"),
        token_id=c.take("image_token_id", int, image),
        prompt=PLAIN,
    )
    return _finished(c, v, made)


def _finished(c: ConfigReader, v: ConfigReader, made: VisionSpec) -> VisionSpec:
    v.finish()
    c.ignore("text_config", "tie_word_embeddings", "use_cache", *OUTER)
    # otherwise the decoder's keys are at the top level and were read already
    if c.value("text_config") is not None:
        c.finish()
    return made


def check_width(v: ConfigReader, text: ModelSpec, key: str = "out_hidden_size") -> None:
    """Raise UnsupportedModelError unless the encoder's output width is the decoder's hidden size."""
    if v.size(key, 3584) != text.hidden_size:
        raise v.unsupported(key, f"must be the decoder's hidden_size, {text.hidden_size}")


def read_processing(c: ConfigReader, vision: VisionSpec) -> ImageProcessing:
    c.require_all(patch_size=vision.patch_size, merge_size=vision.merge)
    c.require("temporal_patch_size", vision.num_frames)
    # Early files have min_pixels and max_pixels, later ones a size, some both; the former take precedence.
    size = c.take("size", dict, {})
    bounds: list[int] = []
    for key, name, default in (
        ("min_pixels", "shortest_edge", 56 * 56),
        ("max_pixels", "longest_edge", 28 * 28 * 1280),
    ):
        value = c.value(key) or size.get(name) or size.get(key) or default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**26:
            raise c.unsupported("size" if name in size else key, "must be 1 to 67108864 pixels")
        bounds.append(value)
    if bounds[0] > bounds[1]:
        raise c.unsupported(
            "size", f"the fewest pixels ({bounds[0]}) are more than the most ({bounds[1]})"
        )
    c.ignore("max_frames", "min_frames", "fps")
    sizes = PixelRange(
        factor=vision.patch_size * vision.merge, min_pixels=bounds[0], max_pixels=bounds[1]
    )
    return processing(c, sizes, resample=3, mean=CLIP_MEAN, std=CLIP_STD)


OUTER = (
    *(
        "vision_config",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    ),
    *("vision_token_id", "model_type"),
)

READ_2 = partial(read_text, kind="qwen2_vl")

VISION: dict[str, Theirs] = {
    "media.patch": "visual.patch_embed.proj",
    "media.pre_attention": "norm1",
    "media.attention.qkv": "attn.qkv",
    "media.attention.out": "attn.proj",
    "media.pre_mlp": "norm2",
    "media.mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "media.mlp.down": "mlp.down_proj",
    "media.connector.norm": "visual.merger.ln_q",
    "media.connector.up": "visual.merger.mlp.0",
    "media.connector.out": "visual.merger.mlp.2",
}

VISION_2 = {**VISION, "media.mlp.up": "mlp.fc1", "media.mlp.down": "mlp.fc2"}

FAMILIES = tuple(
    Family(
        model_type=name,
        architectures=(architecture,),
        read=read,
        names=table({**LLAMA, **theirs}, media_layer="visual.blocks.{i}."),
        nested_config="text_config",
        flat_config=True,
        prefixes=("model.", "language_model.", "model.language_model."),
        ignored=(r"(model\.)?visual\..*",),  # skipped with max_images=0
        media=vision,
        processing=read_processing,
    )
    for name, architecture, read, theirs, vision in (
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", read_text, VISION, read_vision),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration", READ_2, VISION_2, read_vision_2),
    )
)
