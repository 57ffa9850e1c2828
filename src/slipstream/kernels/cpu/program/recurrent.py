"""Ops of recurrent layers as operators of the C++ kernels' programs (csrc/cpu/recurrent.h). No torch.

An op of the op set is up to three operators: convolution, recurrence, and gate with norm. Buffers are float32 unless a
format is named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.arrays import float32
from slipstream.kernels.cpu.native import FORM_F32
from slipstream.kernels.cpu.program.native_program import Program
from slipstream.kernels.states import ConvParams, GatedDeltaParams, Mamba2Params, MambaParams

if TYPE_CHECKING:
    from slipstream.kernels.cpu.arrays import Array

MAX_WIDTH = 16
"""Maximum width of a convolution."""

Floats = npt.NDArray[np.float32]
NewBuffer: TypeAlias = Callable[[str, int, int], int]
"""Makes a temporary buffer: (name, form, size) → its number."""


def add_short_conv(p: Program, x: int, out: int, form: int, layer: int, params: ConvParams) -> None:
    """Adds `OpSet.short_conv`."""
    size = params.weight.shape[0]
    _add_conv(p, x, 2 * size, out, form, layer, params, factor=0, gate=size)


def add_causal_conv(
    p: Program, x: int, out: int, form: int, layer: int, params: ConvParams
) -> None:
    """Adds `OpSet.causal_conv`."""
    _add_conv(p, x, 0, out, form, layer, params)


def add_gated_delta(
    p: Program,
    x: int,
    gates: int,
    decay: int | None,
    z: int | None,
    out: int,
    form: int,
    layer: int,
    params: GatedDeltaParams,
    new: NewBuffer,
) -> None:
    """Adds `OpSet.gated_delta`. The convolution overwrites its columns of `x`."""
    s, seen = params.spec, new("seen", FORM_F32, params.spec.v_size)
    _add_conv(p, x, 0, x, FORM_F32, layer, params.conv)
    decays = (gates, s.num_heads) if decay is None else (decay, 0)
    sizes = s.num_key_heads, s.num_heads, s.key_dim, s.value_dim, s.decay == "channel"
    factors = 2.0 if s.negative_eigenvalues else 1.0, s.bound or 0.0
    own = _rate(params.decay), float32(params.time)
    p.add("delta", x, gates, *decays, seen, layer, *sizes, *factors, *own)
    weight = np.tile(_array(params.norm), s.num_heads)
    gate = (x, s.conv_channels) if z is None else (z, 0)
    how = s.v_size, s.value_dim, weight, s.eps, s.gate == "silu", False
    p.add("gated_norm", seen, *gate, out, form, *how)


def add_mamba2(
    p: Program, x: int, out: int, form: int, layer: int, params: Mamba2Params, new: NewBuffer
) -> None:
    """Adds `OpSet.mamba2`. The convolution overwrites its columns of `x`."""
    s = params.spec
    assert params.gated or form == FORM_F32
    seen = new("seen", FORM_F32, s.v_size) if params.gated else out
    _add_conv(p, x, s.v_size, x, FORM_F32, layer, params.conv)
    sizes = s.num_groups, s.num_heads, s.key_dim, s.value_dim, *s.time_limit
    own = _rate(params.decay), float32(params.time), float32(params.skip)
    p.add("ssd", x, s.v_size, x, s.time_at, seen, layer, *sizes, *own)
    if not params.gated:
        return
    weight = None if params.norm is None else float32(params.norm)
    group = s.v_size // s.norm_groups
    p.add(
        *("gated_norm", seen, x, 0, out, form, s.v_size, group, weight),
        *(s.eps, s.gate == "silu", s.norm == "gate_first"),
    )


def add_selective_scan(
    p: Program,
    x: int,
    dt: int,
    b: int,
    c: int,
    xz: int,
    out: int,
    form: int,
    layer: int,
    params: MambaParams,
    new: NewBuffer,
) -> None:
    """Adds `OpSet.selective_scan`."""
    s, seen = params.spec, new("seen", FORM_F32, params.spec.width)
    rates = np.zeros((-(-s.width // 16), 16, s.key_dim), np.float32)  # a lane for each channel
    rates.reshape(-1, s.key_dim)[: s.width] = _rate(params.decay) * np.float32(np.log2(np.e))
    own = np.ascontiguousarray(rates.transpose(0, 2, 1)), float32(params.time), float32(params.skip)
    p.add("scan", x, dt, b, c, seen, layer, s.width, s.key_dim, *own)
    p.add("gated_norm", seen, xz, s.width, out, form, s.width, s.width, None, s.eps, True, True)


def add_gate(p: Program, x: int, z: int, column: int, out: int, form: int, size: int) -> None:
    """Adds the operator x · sigmoid(z), where z begins at a column of its buffer."""
    p.add("gated_norm", x, z, column, out, form, size, size, None, 0.0, False, True)


def _add_conv(
    p: Program,
    x: int,
    column: int,
    out: int,
    form: int,
    layer: int,
    params: ConvParams,
    *,
    factor: int = -1,
    gate: int = -1,
) -> None:
    weight = np.ascontiguousarray(_array(params.weight).T)  # [width, channels]
    if len(weight) > MAX_WIDTH:
        raise ConfigError(
            f"the C++ kernels have no convolution of width {len(weight)}; use kernels='torch'",
            field="kernels",
        )
    bias = None if params.bias is None else float32(params.bias)
    places = x, column, factor, gate, out, form, layer
    p.add("conv", *places, weight.shape[1], weight.shape[0], weight, bias, params.silu)


def _rate(decay: Array) -> Floats:
    return -np.exp(_array(decay))


def _array(x: Array) -> Floats:
    wide = float32(x)
    return wide if isinstance(wide, np.ndarray) else wide.detach().numpy()
