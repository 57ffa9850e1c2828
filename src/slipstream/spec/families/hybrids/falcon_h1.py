"""Falcon-H1: in each layer attention and Mamba-2 run in parallel on the same input, and their outputs are added. No torch.

Its many multipliers are folded into the weights when they are loaded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily, Names
from slipstream.spec.families.builders import attention, before, gated, heads, model, rms, rope
from slipstream.spec.families.hybrids.bamba import BAMBA
from slipstream.spec.families.hybrids.mamba import (
    GGUF,
    GGUF_CHANGES,
    bamba_mixer,
    mamba2_gguf_config,
)
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.names import gguf_table, of_conv, table
from slipstream.spec.model import AttentionSpec, DenseSpec, LayerSpec, Mamba2Spec, ModelSpec
from slipstream.spec.parameters import Scale

Factors = dict[str, tuple[tuple[int, float], ...]]


def read(c: ConfigReader) -> ModelSpec:
    c.assume(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, vocab_size=128000)
    c.assume(num_hidden_layers=32, num_key_value_heads=8)
    h, max_position = heads(c), c.size("max_position_embeddings", 8192)
    eps, bias = c.take("rms_norm_eps", float, 1e-5), c.take("attention_bias", bool, False)
    norm = rms(c.size("hidden_size"), eps)
    of = attention(h, rope(c, h.head_dim, max_position=max_position), qkv_bias=bias, out_bias=bias)
    recurrent, mlp = _mixer(c, eps), gated(c, bias=c.take("mlp_bias", bool, False))
    layer = LayerSpec(attention=of, recurrent=recurrent, mlp=mlp, block=before(norm))
    c.require("mamba_use_mlp", True)
    c.ignore("mlp_expansion_factor", "layers_block_type", "layer_types")
    factors = _factors(c, of, recurrent, mlp)
    return model(
        c,
        "falcon_h1",
        layer,
        norm,
        max_position,
        embed_scale=c.take("embedding_multiplier", float, 1.0),
        logit_scale=c.take("lm_head_multiplier", float, 1.0),
        folded=tuple(factors.items()),
    )


def _mixer(c: ConfigReader, eps: float) -> Mamba2Spec:
    """Reads the Mamba-2 part of a layer. `mamba_d_ssm: null` means `mamba_expand` times the hidden
    size."""
    width = c.maybe("mamba_d_ssm", int) if c.says("mamba_d_ssm") else 1024
    mixer = bamba_mixer(c, eps, width=width)
    if c.take("projectors_bias", bool, False) != mixer.bias:
        raise c.unsupported("projectors_bias", "only the value of mamba_proj_bias is supported")
    first = c.take("mamba_norm_before_gate", bool, True)
    normed = c.take("mamba_rms_norm", bool, False)
    norm: Any = ("norm_first" if first else "gate_first") if normed else None
    return dataclasses.replace(mixer, norm=norm)


def _factors(c: ConfigReader, a: AttentionSpec, r: Mamba2Spec, mlp: DenseSpec) -> Factors:
    def number(key: str) -> float:
        return c.take(f"{key}_multiplier", float, 1.0)

    def numbers(key: str, count: int) -> list[float]:
        given = c.take(f"{key}_multipliers", list, [1.0] * count)
        if len(given) != count or not all(isinstance(x, (int, float)) for x in given):
            raise c.unsupported(f"{key}_multipliers", f"must be {count} numbers")
        return [float(x) for x in given]

    hidden = c.size("hidden_size")
    into, key, ssm_in = number("attention_in"), number("key"), number("ssm_in")
    gate, down = numbers("mlp", 2)
    attended, mixed = number("attention_out"), number("ssm_out")
    size = r.num_groups * r.key_dim
    parts = tuple(
        zip((r.v_size, r.v_size, size, size, r.num_heads), numbers("ssm", 5), strict=True)
    )
    found: Factors = {
        "self_attn.q_proj.weight": ((a.q_size, into),),
        "self_attn.k_proj.weight": ((a.kv_size, into * key),),
        "self_attn.v_proj.weight": ((a.kv_size, into),),
        "self_attn.k_proj.bias": ((a.kv_size, key),),
        "mamba.in_proj.weight": tuple((rows, x * ssm_in) for rows, x in parts),
        "mamba.in_proj.bias": parts,
    }
    for kind in ("weight", "bias"):
        found[f"self_attn.o_proj.{kind}"] = ((hidden, attended),)
        found[f"mamba.out_proj.{kind}"] = ((hidden, mixed),)
        found[f"feed_forward.gate_proj.{kind}"] = ((mlp.intermediate_size, gate),)
        found[f"feed_forward.down_proj.{kind}"] = ((hidden, down),)
    if not all(x for factors in found.values() for _, x in factors):
        raise c.unsupported("ssm_multipliers", "no multiplier may be 0")
    return {name: x for name, x in found.items() if any(factor != 1.0 for _, factor in x)}


_table = table(BAMBA, changes={"recurrent.conv": of_conv})


def names(spec: ModelSpec) -> Names:
    factors = dict(spec.folded)
    found = _table(spec)
    for name, place in found.items():
        if (own := factors.get(name.split(".", 3)[-1])) is not None:
            found[name] = dataclasses.replace(place, transform=Scale(own))
    return found


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Reads a GGUF file's config. The converter has folded the multipliers into the weights."""
    return {
        **llama_gguf_config(m),
        **mamba2_gguf_config(m),
        "mamba_d_ssm": m.size("ssm.inner_size"),
        "mamba_rms_norm": m.maybe("blk.0.ssm_norm.weight", list) is not None,
        "mamba_norm_before_gate": False,
    }


FAMILIES = (
    Family(
        model_type="falcon_h1",
        architectures=("FalconH1ForCausalLM",),
        read=read,
        names=names,
        gguf=GGUFFamily(
            architecture="falcon-h1",
            config=gguf_config,
            shapes=(r"blk\.0\.ssm_norm\.weight",),
            # The converter drops the end of this name.
            names=gguf_table({**GGUF, "pre_mlp": {"weight": "ffn_norm"}}, changes=GGUF_CHANGES),
        ),
    ),
)
