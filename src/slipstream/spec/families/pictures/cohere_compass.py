"""Cohere Compass (North Micro Vision): a Command R7B whose sliding layers have a rotary embedding by three positions and
whose other layers may have none, and Qwen 3 VL's image encoder. Video is not supported."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, Names
from slipstream.spec.families.builders import (
    Sections,
    attention,
    gated,
    heads,
    layer_norm,
    model,
    num_labels,
    rope_of_kind,
    windows,
)
from slipstream.spec.families.names import LLAMA, Theirs, table
from slipstream.spec.families.pictures import qwen3_vl
from slipstream.spec.families.pictures.qwen_vl import read_processing
from slipstream.spec.families.qwen import THREE_POSITIONS
from slipstream.spec.media.prompts import PromptFormat
from slipstream.spec.media.vision import VisionSpec
from slipstream.spec.model import LayerSpec, ModelSpec, ParallelBlock, RopeSpec

PROMPT = PromptFormat(placeholder="<|IMAGE_PAD|>", token="<|IMAGE_PAD|>")


def read_text(c: ConfigReader) -> ModelSpec:
    """The decoder alone. A text's three positions are equal, so their sections do not matter."""
    if num_labels(c) is None:
        c.ignore("pooling")
    else:
        c.require("pooling", "eos")
    return _read(c, None)


def read_seeing(c: ConfigReader) -> ModelSpec:
    c.ignore("pooling")
    return _read(c, THREE_POSITIONS)


def _read(c: ConfigReader, sections: Sections | None) -> ModelSpec:
    c.require("model_type", "cohere_compass_text")
    c.assume(hidden_size=8192, intermediate_size=22528, num_hidden_layers=40)
    c.assume(num_attention_heads=64, vocab_size=256000)
    hidden, count = c.size("hidden_size"), c.size("num_attention_heads")
    c.require("head_dim", hidden // count)  # transformers overwrites others
    h, longest = heads(c), c.size("max_position_embeddings", 8192)
    norm = layer_norm(hidden, c.take("layer_norm_eps", float, 1e-5), bias=False)
    slides = windows(c, "full_attention", 4096)
    kinds: list[str] = slides["kinds"]
    if "layer_types" in c:
        c.ignore("sliding_window_pattern")  # an older key, of which layer_types are made
    positions = _positions(c, {*kinds}, h.head_dim, longest, sections)
    bias, mlp = c.take("attention_bias", bool, False), gated(c)

    def layer(i: int) -> LayerSpec:
        of = attention(
            h,
            positions[kinds[i]],
            qkv_bias=bias,
            out_bias=bias,
            window=slides["window"] if kinds[i] == "sliding_attention" else None,
        )
        return LayerSpec(attention=of, mlp=mlp, block=ParallelBlock(norm=norm))

    scale = c.take("logit_scale", float, 1.0)
    return model(c, "cohere_compass", layer, norm, longest, logit_scale=scale, tied=True)


def _positions(
    c: ConfigReader, kinds: set[str], head_dim: int, longest: int, sections: Sections | None
) -> dict[str, RopeSpec | None]:
    """The rotary embedding of each kind of layer, None where the config has null."""
    key = "rope_parameters"
    given = dict(c.take(key, dict))
    if missing := sorted(kinds - {*given}):
        raise c.unsupported(key, f"lacks {', '.join(missing)}; null means no rotary embedding")
    # Published files have these next to the objects of the kinds, where transformers drops them.
    own: dict[str, Any] = {
        kind: value for kind, value in given.items() if kind not in ("rope_theta", "rope_type")
    }
    if sections is None:
        without = ("mrope_section", "mrope_interleaved")
        for kind in {*own}:
            if isinstance(own[kind], dict):
                own[kind] = {k: v for k, v in own[kind].items() if k not in without}
    c.put(**{key: own})
    found = {
        kind: None
        if own[kind] is None
        else rope_of_kind(
            c, kind, head_dim, max_position=longest, theta=1e4, scaled=False, sections=sections
        )
        for kind in sorted(kinds)
    }
    if len({x.axes for x in found.values() if x is not None}) > 1:
        raise c.unsupported(key, "mrope_section must be the same in all kinds of layers")
    return found


def read_vision(c: ConfigReader, text: ModelSpec) -> VisionSpec | None:
    return qwen3_vl.read_encoder(c, text, stacked=[8, 16, 24], image=255031, prompt=PROMPT)


DECODER: dict[str, Theirs] = {**LLAMA, "norm": "input_layernorm"}


def names(spec: ModelSpec) -> Names:
    return qwen3_vl.names(spec, DECODER)


FAMILIES = (
    Family(
        model_type="cohere_compass_text",
        architectures=("CohereCompassForCausalLM", "CohereCompassTextForSequenceClassification"),
        read=read_text,
        names=table(DECODER),
    ),
    Family(
        model_type="cohere_compass",
        architectures=("CohereCompassForConditionalGeneration",),
        read=read_seeing,
        names=names,
        nested_config="text_config",
        prefixes=("model.", "language_model.", "model.language_model."),
        ignored=qwen3_vl.VISUAL,
        media=read_vision,
        processing=read_processing,
    ),
)
