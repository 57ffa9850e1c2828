"""Builders of image encoders and their preprocessing, shared by families. No torch."""

from __future__ import annotations

from typing import Any, Literal

from slipstream.spec.families.base import ConfigReader
from slipstream.spec.families.builders import (
    activation,
    attention,
    before,
    heads,
    layer_norm,
    plain,
)
from slipstream.spec.families.names import Theirs
from slipstream.spec.media.vision import AxialRopeSpec, ImageProcessing, Sizes
from slipstream.spec.model import LayerSpec
from slipstream.spec.positions import require_positive

RESAMPLE: dict[int, Literal["bilinear", "bicubic", "lanczos"]] = {
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
}
"""Resampling filters by Pillow's numbers, which configs use."""

HALF = (0.5, 0.5, 0.5)
AS_LLAVA: dict[str, Any] = dict(
    nested_config="text_config",
    prefixes=("language_model.", "model.language_model.", "model."),
    ignored=(
        r"(model\.)?((vision|audio)_tower|multi_modal_projector)\..*",
    ),  # skipped with max_images=0
)
"""Fields of a `Family` whose tensors are named like LLaVA's."""


def siglip_layers(c: ConfigReader) -> tuple[LayerSpec, ...]:
    """SigLIP's layers (arXiv:2303.15343): pre-norms, biases everywhere, no position embeddings inside the layers."""
    h = heads(c, num_kv_heads=None)
    norm = layer_norm(c.size("hidden_size"), c.take("layer_norm_eps", float, 1e-6))
    mlp = plain(c.size("intermediate_size"), activation(c, "hidden_act", "gelu_pytorch_tanh"))
    of = attention(h, None, causal=False, qkv_bias=True, out_bias=True)
    return (LayerSpec(attention=of, mlp=mlp, block=before(norm)),) * c.size("num_hidden_layers")


def square(c: ConfigReader, key: str, default: int) -> int:
    """Reads a side length: a number, or two equal numbers."""
    value = c.value(key)
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1] or not isinstance(value[0], int) or value[0] < 1:
            raise c.unsupported(key, "only squares are supported")
        return value[0]
    return c.size(key, default)


def axial_rope(c: ConfigReader, head_dim: int, theta: float = 1e4, **how: bool) -> AxialRopeSpec:
    """The rotary embedding of patches, by transformers 5's `rope_parameters`. `how`: fields of `AxialRopeSpec`."""
    theta = c.take("rope_theta", float, theta)
    if "rope_parameters" in c:
        own = c.part("rope_parameters")
        own.require("rope_type", "axial", "default")  # transformers treats "default" as "axial"
        theta = own.take("rope_theta", float, theta)
        own.finish()
    if head_dim % 4:
        raise c.unsupported("head_dim", f"{head_dim} can't be rotated by rows and columns")
    require_positive("vision_config.rope_parameters", rope_theta=theta)
    return AxialRopeSpec(theta=theta, head_dim=head_dim, **how)


def processing(
    c: ConfigReader,
    sizes: Sizes,
    *,
    resample: int,
    mean: tuple[float, float, float] = HALF,
    std: tuple[float, float, float] = HALF,
    normalizes: bool = True,
    crops: bool = False,
) -> ImageProcessing:
    """The image processing with the `sizes` read before; other arguments are defaults of config keys. Call it last.

    `normalizes` False: the model's own code normalizes with `mean` and `std`, whatever the file says.
    """

    def three(key: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        found = c.take(key, list, list(default))
        if len(found) != 3 or not all(
            isinstance(x, (int, float)) and not isinstance(x, bool) for x in found
        ):
            raise c.unsupported(key, "must be three numbers")
        return (float(found[0]), float(found[1]), float(found[2]))

    for step in ("do_convert_rgb", "do_resize", "do_rescale"):
        c.require(step, True)
    c.require("do_normalize", normalizes)
    if not normalizes:
        c.ignore("image_mean", "image_std")
    c.require("do_center_crop", crops)
    number = c.take("resample", int, resample)
    if number not in RESAMPLE:
        raise c.unsupported(
            "resample", f"must be one of {', '.join(f'{k} ({v})' for k, v in RESAMPLE.items())}"
        )
    c.ignore(
        *(
            "processor_class",
            "image_processor_type",
            "feature_extractor_type",
            "crop_size",
            "data_format",
            "device",
        ),
        *(
            "input_data_format",
            "return_tensors",
            "disable_grouping",
            "default_to_square",
            "pad_size",
            "image_seq_len",
        ),
        *(
            "image_seq_length",
            "_valid_processor_keys",
            "video_sampling",
            "is_fast",
            "backend",
            "do_pad",
        ),
    )
    made = ImageProcessing(
        sizes=sizes,
        resample=RESAMPLE[number],
        mean=three("image_mean", mean) if normalizes else mean,
        std=three("image_std", std) if normalizes else std,
        scale=c.take("rescale_factor", float, 1 / 255),
    )
    if 0.0 in made.std:
        raise c.unsupported("image_std", "must not be 0")
    c.finish()
    return made


def siglip_names(tower: str, *, out: str) -> dict[str, Theirs]:
    """Tensor names of a SigLIP encoder under the prefix `tower`; those of layers are relative to the layer. `out`: name of
    the connector's projection."""
    layer: dict[str, Theirs] = {
        "pre_attention": "layer_norm1",
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": "self_attn.out_proj",
        "pre_mlp": "layer_norm2",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    }
    return {
        "media.patch": f"{tower}embeddings.patch_embedding",
        "media.positions": f"{tower}embeddings.position_embedding",
        **{f"media.{name}": theirs for name, theirs in layer.items()},
        "media.final_norm": f"{tower}post_layernorm",
        "media.connector.out": out,
    }
