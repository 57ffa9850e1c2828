"""Nemotron 3 and 4, Minitron: layer norms whose weights are stored minus 1, squared ReLU without a
gate, rotary embedding of half of each head."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import activation, decoder, layer_norm, plain
from slipstream.spec.families.metadata import layer_norm_gguf_config
from slipstream.spec.families.names import LLAMA, gguf_table, table
from slipstream.spec.model import ModelSpec


def read(c: ConfigReader) -> ModelSpec:
    act, bias = activation(c, "hidden_act", "relu2"), c.take("mlp_bias", bool, False)
    return decoder(
        c,
        "nemotron",
        max_position=4096,
        norm=dataclasses.replace(
            layer_norm(c.size("hidden_size"), c.take("norm_eps", float, 1e-5)), weight_offset=1.0
        ),
        mlp=plain(c.size("intermediate_size"), act, bias=bias),
        positions={"partial": 0.5},
    )


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Reads a GGUF file's config. llama.cpp's converter has added the 1 of `1 + weight` to the
    norms' weights."""
    return {**layer_norm_gguf_config(m, "norm_eps", partial=True), "hidden_act": "relu2"}


NORMS = ("pre_attention", "pre_mlp", "final_norm")

FAMILIES = (
    Family(
        model_type="nemotron",
        architectures=("NemotronForCausalLM", "NemotronForSequenceClassification"),
        read=read,
        names=table({**LLAMA, "mlp.up": "mlp.up_proj"}),
        gguf=GGUFFamily(
            architecture="nemotron",
            config=gguf_config,
            names=gguf_table(gated=False, changes=dict.fromkeys(NORMS, "minus_one")),
        ),
    ),
)
