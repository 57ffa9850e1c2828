"""Ministral 3 and Mistral 4: queries scaled by position. Mistral 4 has DeepSeek's latent attention and experts. The
model type `mistral3` is such a decoder, or an older Mistral, with Pixtral's image encoder (`pictures/pixtral.py`)."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families import deepseek, llama
from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily, Names
from slipstream.spec.families.builders import decoder, query_scale
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.pictures import pixtral
from slipstream.spec.families.pictures.images import AS_LLAVA
from slipstream.spec.model import LatentAttentionSpec, ModelSpec

MINISTRAL = {
    **dict(rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384),
    **dict(beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
}
"""Rotary embedding for configs that lack one."""
MISTRAL4 = {
    **MINISTRAL,
    **dict(rope_theta=1e4, factor=128.0, original_max_position_embeddings=8192),
}


def read_ministral3(c: ConfigReader) -> ModelSpec:
    c.assume_missing(head_dim=128, num_key_value_heads=8)
    window = c.maybe("sliding_window", int)
    return decoder(
        c,
        "ministral3",
        max_position=262144,
        eps=1e-5,
        bias=(False, False),
        kinds=["sliding_attention"] * c.size("num_hidden_layers") if window else None,
        window=window,
        positions={"default": MINISTRAL},
        more={"query_scale": query_scale(c, MINISTRAL)},
    )


def read_mistral4(c: ConfigReader) -> ModelSpec:
    return deepseek.read_mistral4(c, MISTRAL4)


READERS = {"mistral": llama.read_mistral, "ministral3": read_ministral3, "mistral4": read_mistral4}


def read_mistral3(c: ConfigReader) -> ModelSpec:
    """Reads Mistral 3. The whole model's config, not the decoder's, says whether the head is tied.
    A stored head takes precedence."""
    kind = c.take("model_type", str, "mistral")
    if kind not in READERS:
        raise c.unsupported("model_type", f"the decoders are {', '.join(READERS)}")
    return dataclasses.replace(READERS[kind](c), tied_embeddings=True)


def names(spec: ModelSpec) -> Names:
    is_latent = isinstance(spec.layers[0].attention, LatentAttentionSpec)
    text = (deepseek.names if is_latent else llama.names)(dataclasses.replace(spec, media=None))
    return text if spec.media is None else text | pixtral.names(spec)


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Reads a GGUF file's config. As in llama.cpp, `mscale` is 1, and the period of the query scale
    is the context length that YaRN extends."""
    beta = m.take("attention.temperature_scale", float, 0.0)
    multiplier = m.take("rope.scaling.yarn_log_multiplier", float, 0.0)
    config = llama_gguf_config(m)
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    if multiplier and scaling["rope_type"] == "yarn":
        scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    if beta:
        scaling["llama_4_scaling_beta"] = beta
    return {**config, "rope_parameters": scaling}


FAMILIES = (
    Family(
        model_type="ministral3",
        architectures=("Ministral3ForCausalLM", "Ministral3ForSequenceClassification"),
        read=read_ministral3,
        names=names,
        gguf=GGUFFamily(architecture="mistral3", config=gguf_config, names=llama.UNPERMUTED),
    ),
    Family(
        model_type="mistral4",
        architectures=("Mistral4ForCausalLM",),
        read=read_mistral4,
        names=names,
    ),
    Family(
        model_type="mistral3",
        architectures=("Mistral3ForConditionalGeneration",),
        read=read_mistral3,
        names=names,
        **AS_LLAVA,
        media=pixtral.read_vision,
        processing=pixtral.read_processing,
    ),
)
