"""Mamba-2's keys and names, which several families of hybrids share. No torch."""

from __future__ import annotations

import math

from slipstream.spec.families.base import ConfigReader
from slipstream.spec.families.names import Theirs
from slipstream.spec.model import Mamba2Spec


def time_limit(c: ConfigReader, key: str = "time_step_limit") -> tuple[float, float]:
    """Two numbers, of which JSON may write an infinite one as `Infinity` or as an object."""
    given = c.take(key, list, [0.0, math.inf])
    numbers = [x["__float__"] if isinstance(x, dict) and "__float__" in x else x for x in given]
    try:
        low, high = map(float, numbers)
    except (TypeError, ValueError):
        raise c.unsupported(key, "must be two numbers") from None
    return low, high


def bamba_mixer(c: ConfigReader, eps: float, *, width: int | None = None) -> Mamba2Spec:
    """Bamba's Mamba-2 layer. `width`: its channels, if not `mamba_expand` times the hidden size."""
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
    """The names of a Mamba-2 layer's tensors, which follow `mixer`."""
    return {
        "recurrent.in": f"{mixer}.in_proj",
        "recurrent.conv": f"{mixer}.conv1d",
        "recurrent.decay": {"weight": f"{mixer}.A_log"},
        "recurrent.time": {"weight": f"{mixer}.dt_bias"},
        "recurrent.skip": {"weight": f"{mixer}.D"},
        "recurrent.norm": f"{mixer}.norm",
        "recurrent.out": f"{mixer}.out_proj",
    }
