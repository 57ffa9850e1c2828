"""Gemma 4's image encoder: two tables of positions, layers with norms before and after, rotary positions by column and
row, and the scaled mean of each square of patches. The small published models clamp the inputs and outputs of their
linear layers. Images keep their aspect ratio within a token budget. Video and audio are not supported."""

from __future__ import annotations

from slipstream.spec.families.base import ConfigReader, Names
from slipstream.spec.families.builders import activation, attention, heads, rms
from slipstream.spec.families.names import Theirs
from slipstream.spec.families.pictures.images import HALF, axial_rope, processing
from slipstream.spec.media.prompts import FramedFormat
from slipstream.spec.media.vision import (
    BOUNDS,
    CLIPPED,
    AxisPositionSpec,
    ImageProcessing,
    ScaledPoolConnector,
    TokenBudget,
    VisionSpec,
)
from slipstream.spec.model import DenseSpec, LayerSpec, ModelSpec, QKNormSpec, SequentialBlock
from slipstream.spec.parameters import AxisHalves, Placement, Reshape, Transform

ENCODER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
}
"""Defaults of `vision_config`."""
TOKENS = (70, 140, 280, 560, 1120)
"""Token counts per image that the model was trained with. An image is scaled to one of them."""


def read_vision(c: ConfigReader, text: ModelSpec) -> VisionSpec | None:
    token_id, said = c.take("image_token_id", int, 258_880), c.take("text_config", dict, {})
    c.ignore("audio_config", "tie_word_embeddings", "use_cache", "boi_token_id", "eoi_token_id")
    c.ignore("video_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id")
    c.ignore("vision_soft_tokens_per_image")  # the image processor's setting is used instead
    if "vision_config" not in c or text.is_encoder:
        c.ignore("vision_config")
        c.finish()
        return None
    v = c.part("vision_config")
    v.assume(**ENCODER)
    hidden, eps, h = v.size("hidden_size"), v.take("rms_norm_eps", float, 1e-6), heads(v)
    if h.num_kv_heads != h.num_heads:
        raise v.unsupported("num_key_value_heads", f"must be {h.num_heads}, one for each query")
    v.require("attention_bias", False)
    norm = rms(hidden, eps)
    layer = LayerSpec(
        attention=attention(
            h,
            None,
            scale=1.0,
            causal=False,
            qk_norm=QKNormSpec(over="head", eps=eps),
            value_eps=eps,
        ),
        mlp=DenseSpec(
            intermediate_size=v.size("intermediate_size"),
            activation=activation(v, "hidden_activation", "gelu_pytorch_tanh"),
        ),
        block=SequentialBlock(pre_attention=norm, post_attention=norm, pre_mlp=norm, post_mlp=norm),
    )
    rope = axial_rope(v, h.head_dim, 100.0, columns_first=True)
    v.ignore("max_position_embeddings", "default_output_length")
    made = VisionSpec(
        hidden_size=hidden,
        num_channels=3,
        patch_size=v.size("patch_size", 16),
        patch_bias=False,
        layers=(layer,) * v.size("num_hidden_layers"),
        final_norm=None,
        position=AxisPositionSpec(size=v.size("position_embedding_size", 10240)),
        rope=rope,
        merge=v.size("pooling_kernel_size", 3),
        connector=ScaledPoolConnector(eps=eps, standardized=v.take("standardize", bool, False)),
        token_id=token_id,
        prompt=FramedFormat(
            placeholder="<|image|>", token="<|image|>", begin="<|image>", end="<image|>"
        ),
        channels_last=True,
        clipped=v.take("use_clipped_linears", bool, False),
        own_input_id=said.get("pad_token_id") or 0,
        bidirectional="windowed" if said.get("use_bidirectional_attention") == "vision" else None,
    )
    v.finish()
    c.finish()
    return made


def read_processing(c: ConfigReader, vision: VisionSpec) -> ImageProcessing:
    c.require("patch_size", vision.patch_size)
    c.require("pooling_kernel_size", vision.merge)
    most = c.size("max_soft_tokens", 280)
    if most not in TOKENS:
        raise c.unsupported("max_soft_tokens", f"must be one of {', '.join(map(str, TOKENS))}")
    assert isinstance(vision.position, AxisPositionSpec)
    if most * vision.merge > vision.position.size:
        raise c.unsupported(
            "max_soft_tokens", f"a side may have {vision.position.size} patches at most"
        )
    c.ignore("size")
    sizes = TokenBudget(factor=vision.patch_size * vision.merge, max_tokens=most)
    return processing(c, sizes, resample=3, mean=HALF, std=HALF, normalizes=False)


_PRODUCTS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def _linear(*products: str) -> tuple[str, ...]:
    return tuple(f"{_PRODUCTS[x]}.linear" for x in products)


VISION: dict[str, Theirs] = {
    "media.patch": "vision_tower.patch_embedder.input_proj",
    "media.positions": {"weight": "vision_tower.patch_embedder.position_embedding_table"},
    "media.pre_attention": "input_layernorm",
    "media.attention.qkv": _linear("q", "k", "v"),
    "media.attention.q_norm": "self_attn.q_norm",
    "media.attention.k_norm": "self_attn.k_norm",
    "media.attention.out": _linear("out")[0],
    "media.post_attention": "post_attention_layernorm",
    "media.pre_mlp": "pre_feedforward_layernorm",
    "media.mlp.up": _linear("gate", "up"),
    "media.mlp.down": _linear("down")[0],
    "media.post_mlp": "post_feedforward_layernorm",
    "media.bounds": {"weight": "bounds"},
    "media.connector.shift": {"weight": "vision_tower.std_bias"},
    "media.connector.gain": {"weight": "vision_tower.std_scale"},
    "media.connector.out": "embed_vision.embedding_projection",
}
VISION_LAYER = "vision_tower.encoder.layers.{i}."


def by_halves(layer: LayerSpec, part: int) -> Transform | None:
    return None if part == 2 else AxisHalves(layer.self_attention.num_heads)


def by_halves_of_one(layer: LayerSpec, part: int) -> Transform:
    return AxisHalves(1)


CHANGES = {
    "media.attention.qkv": by_halves,
    "media.attention.q_norm": by_halves_of_one,
    "media.attention.k_norm": by_halves_of_one,
}


def with_bounds(found: Names) -> Names:
    """The table plus the names of each linear layer's clamping bounds, which are scalar tensors."""
    for name in [name for name in found if name.endswith(".bounds")]:
        target, above = found.pop(name).target, name.removesuffix("bounds")
        for i, product in enumerate(CLIPPED):
            for k, bound in enumerate(BOUNDS):
                at = Placement(target, i * len(BOUNDS) + k, 1, Reshape(()))
                found[f"{above}{_PRODUCTS[product]}.{bound}"] = at
    return found
