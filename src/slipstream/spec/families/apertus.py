"""Apertus: Llama's layers with norms of q and k. MLPs have no gate; their activation has two learned parameters per
layer."""

from __future__ import annotations

from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.families.builders import activation, decoder, plain
from slipstream.spec.families.names import LLAMA, table
from slipstream.spec.model import Activation, ModelSpec, Xielu

ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Rotary embedding for configs that lack one."""


def read(c: ConfigReader) -> ModelSpec:
    is_own = c.take("hidden_act", str, "xielu") == "xielu"
    act: Activation = Xielu() if is_own else activation(c, "hidden_act")
    c.require("qk_norm", True)
    c.require("mlp_bias", False)
    c.require("post_norm", False)
    return decoder(
        c,
        "apertus",
        max_position=65536,
        eps=1e-5,
        mlp=plain(c.size("intermediate_size", 14336), act, bias=False),
        over="head",
        positions={"theta": 12e6, "default": ROPE},
    )


NAMES = {
    **LLAMA,
    "pre_attention": "attention_layernorm",
    "pre_mlp": "feedforward_layernorm",
    "mlp.up": "mlp.up_proj",
    "mlp.positive": {"weight": "mlp.act_fn.alpha_p"},
    "mlp.negative": {"weight": "mlp.act_fn.alpha_n"},
}

FAMILIES = (
    Family(
        model_type="apertus",
        architectures=("ApertusForCausalLM",),
        read=read,
        names=table(NAMES),
        ignored=(r"(model\.)?layers\.\d+\.mlp\.act_fn\.(beta|eps)",),
        constants={"act_fn.alpha_p": {"act_fn.beta": 0.5, "act_fn.eps": -1e-6}},
    ),
)
