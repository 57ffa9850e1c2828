"""Mamba, FalconMamba and Mamba-2, and the keys and names of Mamba that hybrids share. No torch."""

from __future__ import annotations

import math
from typing import Any, Literal

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import model, rms
from slipstream.spec.families.names import Change, Theirs, gguf_table, of_conv, table
from slipstream.spec.model import LayerSpec, Mamba2Spec, MambaSpec, ModelSpec, SequentialBlock
from slipstream.spec.parameters import NegatedExp, Reshape, Transform


def time_limit(c: ConfigReader) -> tuple[float, float]:
    """Minimum and maximum time step. JSON may write infinity as `Infinity` or as an object."""
    key = "time_step_limit"
    given = c.take(key, list, [0.0, math.inf])
    numbers = [x["__float__"] if isinstance(x, dict) and "__float__" in x else x for x in given]
    try:
        low, high = map(float, numbers)
    except (TypeError, ValueError):
        raise c.unsupported(key, "must be two numbers") from None
    return low, high


def bamba_mixer(c: ConfigReader, eps: float, *, width: int | None = None) -> Mamba2Spec:
    """Spec of a Mamba-2 layer with Bamba's keys. `width`: number of channels, if not `mamba_expand` times the hidden
    size."""
    num_heads, groups = c.size("mamba_n_heads", 128), c.size("mamba_n_groups", 1)
    width = width or c.size("mamba_expand", 2) * c.size("hidden_size")
    c.ignore("mamba_expand", "mamba_chunk_size", "use_mamba_kernels", "num_logits_to_keep")
    if width % num_heads:
        raise c.unsupported("mamba_n_heads", f"must divide the {width} channels of Mamba-2")
    c.require("mamba_d_head", "auto", width // num_heads)
    c.require("hidden_act", "silu")
    return Mamba2Spec(
        num_heads=num_heads,
        value_dim=width // num_heads,
        key_dim=c.size("mamba_d_state", 256),
        num_groups=groups,
        conv_width=c.size("mamba_d_conv", 4),
        eps=eps,
        conv_bias=c.take("mamba_conv_bias", bool, True),
        bias=c.take("mamba_proj_bias", bool, False),
        norm_groups=groups,
        time_limit=time_limit(c),
    )


def mamba_names(mixer: str) -> dict[str, Theirs]:
    """Tensor names of a Mamba-2 layer; each follows the prefix `mixer`."""
    return {
        "recurrent.in": f"{mixer}.in_proj",
        "recurrent.conv": f"{mixer}.conv1d",
        "recurrent.decay": {"weight": f"{mixer}.A_log"},
        "recurrent.time": {"weight": f"{mixer}.dt_bias"},
        "recurrent.skip": {"weight": f"{mixer}.D"},
        "recurrent.norm": f"{mixer}.norm",
        "recurrent.out": f"{mixer}.out_proj",
    }


def mamba_1_names(mixer: str) -> dict[str, Theirs]:
    """Tensor names of a Mamba layer; each follows the prefix `mixer`."""
    return {
        **mamba_names(mixer),
        "recurrent.select": f"{mixer}.x_proj",
        "recurrent.dt": f"{mixer}.dt_proj",
        "recurrent.time": {"weight": f"{mixer}.dt_proj.bias"},
        "recurrent.time_norm": f"{mixer}.dt_layernorm",
        "recurrent.b_norm": f"{mixer}.b_layernorm",
        "recurrent.c_norm": f"{mixer}.c_layernorm",
    }


def rank(c: ConfigReader, key: str) -> int:
    """Rank of the projection of dt: a number, or "auto" for 1/16 of the hidden size."""
    return -(-c.size("hidden_size") // 16) if c.value(key) in (None, "auto") else c.size(key)


MAX_POSITION = 2**20
"""Maximum context assumed for models without position embeddings, which have no limit of their own."""


def read_mamba(c: ConfigReader) -> ModelSpec:
    """Reads a Mamba. llama.cpp writes FalconMamba as a `mamba` whose dt, B and C are normed."""
    if "mixer_rms_eps" in c:
        return read_falcon_mamba(c)
    return _read(c, "mamba", _mamba_1(c, 1e-6, normed=False), tied=True)


def read_falcon_mamba(c: ConfigReader) -> ModelSpec:
    c.ignore("use_falcon_mambapy")
    eps = c.take("mixer_rms_eps", float, 1e-6)
    return _read(c, "falcon_mamba", _mamba_1(c, eps, normed="plain"), tied=True)


def _mamba_1(c: ConfigReader, eps: float, *, normed: bool | Literal["plain"]) -> MambaSpec:
    c.assume(hidden_size=768, num_hidden_layers=32, vocab_size=50280)
    width = c.size("expand", 2) * c.size("hidden_size")
    c.require("intermediate_size", width)
    return MambaSpec(
        width=width,
        key_dim=c.size("state_size", 16),
        rank=rank(c, "time_step_rank"),
        conv_width=c.size("conv_kernel", 4),
        eps=eps,
        conv_bias=c.take("use_conv_bias", bool, True),
        bias=c.take("use_bias", bool, False),
        normed=normed,
    )


def read_mamba2(c: ConfigReader) -> ModelSpec:
    c.assume(hidden_size=4096, num_hidden_layers=64, vocab_size=32768)
    num_heads = c.size("num_heads", 128)
    value = c.size("head_dim", 64)
    groups = c.size("n_groups", 8)
    if num_heads * value != c.size("expand", 2) * c.size("hidden_size"):
        raise c.unsupported("num_heads", "times head_dim must be expand times hidden_size")
    mixer = Mamba2Spec(
        num_heads=num_heads,
        value_dim=value,
        key_dim=c.size("state_size", 128),
        num_groups=groups,
        conv_width=c.size("conv_kernel", 4),
        eps=c.take("layer_norm_epsilon", float, 1e-5),
        conv_bias=c.take("use_conv_bias", bool, True),
        bias=c.take("use_bias", bool, False),
        norm_groups=groups,
        time_limit=time_limit(c),
    )
    c.ignore("chunk_size", "time_step_rank", "norm_before_gate", "rms_norm", "num_logits_to_keep")
    return _read(c, "mamba2", mixer, tied=False)


def _read(c: ConfigReader, family: str, mixer: Mamba2Spec | MambaSpec, *, tied: bool) -> ModelSpec:
    c.require("hidden_act", "silu")
    # training settings
    c.ignore("time_step_min", "time_step_max", "time_step_floor", "time_step_scale")
    c.ignore("time_step_init_scheme", "rescale_prenorm_residual", "residual_in_fp32")
    c.ignore("use_mambapy", "use_associative_scan", "use_mamba_kernels")
    norm = rms(c.size("hidden_size"), c.take("layer_norm_epsilon", float, 1e-5))
    layer = LayerSpec(recurrent=mixer, mlp=None, block=SequentialBlock(pre_attention=norm))
    return model(c, family, layer, norm, MAX_POSITION, tied=tied)


def gguf_mamba(m: ConfigReader) -> dict[str, Any]:
    config = {**_gguf(m), "time_step_rank": m.size("ssm.time_step_rank")}
    if m.take("ssm.dt_b_c_rms", bool, False):
        config["mixer_rms_eps"] = 1e-6  # FalconMamba's value, which the file lacks
    return config


def gguf_mamba2(m: ConfigReader) -> dict[str, Any]:
    num_heads = m.size("ssm.time_step_rank")
    return {
        **_gguf(m),
        "num_heads": num_heads,
        "head_dim": m.size("ssm.inner_size") // num_heads,
        "n_groups": m.size("ssm.group_count", 1),
    }


def mamba2_gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Reads a Mamba-2 GGUF file's config, by the keys of Bamba's."""
    num_heads = m.size("ssm.time_step_rank")
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": m.size("ssm.inner_size") // num_heads,
        "mamba_n_groups": m.size("ssm.group_count", 1),
        "mamba_d_state": m.size("ssm.state_size"),
        "mamba_d_conv": m.size("ssm.conv_kernel"),
    }


def _gguf(m: ConfigReader) -> dict[str, Any]:
    # the model has none of these
    m.ignore("context_length", "feed_forward_length", "attention.head_count")
    m.ignore("attention.head_count_kv")
    hidden = m.size("embedding_length")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": m.size("block_count"),
        "state_size": m.size("ssm.state_size"),
        "conv_kernel": m.size("ssm.conv_kernel"),
        "expand": m.size("ssm.inner_size") // hidden,
        "layer_norm_epsilon": m.take("attention.layer_norm_rms_epsilon", float),
    }


def _normed(layer: LayerSpec, part: int) -> Transform:
    """Group norms are stored as [groups, group size]."""
    r = layer.recurrent
    assert isinstance(r, Mamba2Spec)
    return Reshape((r.norm_groups, r.v_size // r.norm_groups))


def _decay(layer: LayerSpec, part: int) -> Transform:
    return NegatedExp()


GGUF: dict[str, Theirs] = {
    "recurrent.in": "ssm_in",
    "recurrent.conv": "ssm_conv1d",
    "recurrent.select": "ssm_x",
    "recurrent.dt": "ssm_dt",
    "recurrent.decay": {"weight": "ssm_a"},
    "recurrent.time": {"weight": "ssm_dt.bias"},
    "recurrent.skip": {"weight": "ssm_d"},
    "recurrent.time_norm": "ssm_dt_norm",
    "recurrent.b_norm": "ssm_b_norm",
    "recurrent.c_norm": "ssm_c_norm",
    "recurrent.norm": "ssm_norm",
    "recurrent.out": "ssm_out",
}
GGUF_CHANGES: dict[str, Change] = {
    "recurrent.conv": of_conv,
    "recurrent.decay": _decay,
    "recurrent.norm": _normed,
}
_gguf_names = gguf_table(GGUF, changes=GGUF_CHANGES)
GGUFS = {
    "mamba": GGUFFamily(architecture="mamba", config=gguf_mamba, names=_gguf_names),
    "mamba2": GGUFFamily(architecture="mamba2", config=gguf_mamba2, names=_gguf_names),
}

BACKBONE: dict[str, Theirs] = {
    "embed": "backbone.embeddings",
    "final_norm": "backbone.norm_f",
    "head": "lm_head",
    "pre_attention": "norm",
}

FAMILIES = tuple(
    Family(
        model_type=name,
        architectures=(architecture,),
        read=read,
        names=table(
            {**BACKBONE, **names("mixer")},
            layer="backbone.layers.{i}.",
            changes={"recurrent.conv": of_conv},
        ),
        gguf=GGUFS.get(name),
    )
    for name, architecture, read, names in (
        ("mamba", "MambaForCausalLM", read_mamba, mamba_1_names),
        ("falcon_mamba", "FalconMambaForCausalLM", read_falcon_mamba, mamba_1_names),
        ("mamba2", "Mamba2ForCausalLM", read_mamba2, mamba_names),
    )
)
