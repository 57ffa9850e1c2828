"""StableLM: layer norms, rotary embedding of a quarter of each head. Some norm q and k, each head by its own weight, and then
have attention and MLP in parallel."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily, Names
from slipstream.spec.families.builders import before, decoder, gated, layer_norm
from slipstream.spec.families.metadata import layer_norm_gguf_config
from slipstream.spec.families.names import LLAMA, Theirs, gguf_table, table
from slipstream.spec.model import AttentionSpec, ModelSpec, ParallelBlock
from slipstream.spec.parameters import Placement, Vector


def read(c: ConfigReader) -> ModelSpec:
    c.assume_missing(num_key_value_heads=32)
    beside = c.take("use_parallel_residual", bool, False)
    return decoder(
        c,
        "stablelm",
        max_position=4096,
        norm=layer_norm(c.size("hidden_size"), c.take("layer_norm_eps", float, 1e-5)),
        block=(lambda norm: ParallelBlock(norm=norm)) if beside else before,
        bias=(c.take("use_qkv_bias", bool, False), False),
        mlp=gated(c),
        over="each" if c.take("qk_layernorm", bool, False) else None,
        positions={"partial": 0.25},
    )


NAMES: dict[str, Theirs] = {**LLAMA, "norm": "input_layernorm"}


def names(spec: ModelSpec) -> Names:
    """Table of tensor names. In StableLM the norm of each q or k head is a tensor of its own."""
    found: Names = {}
    for name, at in table(NAMES)(spec).items():
        if not name.endswith(("q_norm.weight", "k_norm.weight")):
            found[name] = at
            continue
        a, (stem, _, _) = spec.layers[0].attention, name.rpartition("_norm.weight")
        assert isinstance(a, AttentionSpec)
        for head in range(a.num_heads if stem.endswith("q") else a.num_kv_heads):
            found[f"{stem}_layernorm.norms.{head}.weight"] = Placement(at.target, head, 1, Vector())
    return found


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    return {
        **layer_norm_gguf_config(m, "layer_norm_eps", partial=True),
        "use_parallel_residual": m.take("use_parallel_residual", bool, False),
        "use_qkv_bias": "blk.0.attn_q.bias" in m,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in m,
        "hidden_act": "silu",
    }


FAMILIES = (
    Family(
        model_type="stablelm",
        architectures=("StableLmForCausalLM", "StableLmForSequenceClassification"),
        read=read,
        names=names,
        gguf=GGUFFamily(architecture="stablelm", config=gguf_config, names=gguf_table()),
    ),
)
