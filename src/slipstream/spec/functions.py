"""Activations and norms: named ones, and functions of a caller. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from slipstream.errors import UnsupportedModelError

Shape: TypeAlias = tuple[int, ...]

NamedActivation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""`gelu` is exact (erf), `gelu_tanh` the tanh approximation (`gelu_new`, `gelu_pytorch_tanh`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiglu:
    """g · σ(alpha · g) · (u + 1), gpt-oss's activation, for gated MLPs only. The gate g is clamped
    to at most `limit`, the up projection u to ± `limit`."""

    alpha: float
    limit: float

    def __str__(self) -> str:
        return f"clamped swiglu (±{self.limit:g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSilu:
    """min(silu(g), limit) · u, with u clamped to ± `limit` (Step 3.5), for gated MLPs only. `of_gate`: g is
    clamped before silu instead of after it (DeepSeek V4). The C++ kernels lack both forms."""

    limit: float
    of_gate: bool = False

    @property
    def highest(self) -> float:
        """Upper bound of the clamped silu's output."""
        return self.limit / (1 + math.exp(-self.limit)) if self.of_gate else self.limit

    def __str__(self) -> str:
        return f"clamped silu (±{self.limit:g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Xielu:
    """x / 2 + positive · x² above 0, x / 2 + negative · (eˣ − 1 − x) below (xIELU, arXiv:2411.13010), for MLPs without a gate.

    The checkpoint has each layer's own `positive` and `negative`, which were learned. The defaults
    are the values before training."""

    positive: float = 0.8
    negative: float = 0.8

    def __str__(self) -> str:
        return "xIELU"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnActivation:
    """A custom activation, one that the kernels lack (docs/adding-a-model.md).

    `function(gate, up)`, or `function(x)` without a gate, takes float32 tensors. `triton` is the
    same function as an elementwise `triton.jit` function in float32; required on a GPU.
    """

    name: str
    function: Callable[..., Any]
    triton: Any = None

    def __str__(self) -> str:
        return self.name


Activation: TypeAlias = NamedActivation | ClampedSwiglu | ClampedSilu | Xielu | OwnActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNorm:
    """A custom norm, one that the kernels lack.

    `function(x, weight, bias, eps)` maps x [T, E] in float32 to the same shape. Weight [E] and bias
    ([E] or None) are passed as they are stored. It runs in torch on every device.
    """

    name: str
    function: Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A norm. `rms`: x / rms(x) · (weight + weight_offset). `layer`: (x − mean) / std · (weight +
    weight_offset) + bias. Or a custom function (`OwnNorm`). Gemma and Nemotron store weights minus
    one, so their weight_offset is 1. `gain` multiplies the stored weights. Without `learned` the
    weights are 1 and there is no bias (OLMo)."""

    kind: Literal["rms", "layer"] | OwnNorm
    size: int
    eps: float
    bias: bool = False
    weight_offset: float = 0.0
    gain: float = 1.0
    learned: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.eps <= 1:  # also refuses NaN
            raise UnsupportedModelError(
                f"the norm's epsilon must be from 0 to 1, got {self.eps!r}", field="norm_eps"
            )

    def shapes(self, name: str) -> dict[str, Shape]:
        """The shapes of the norm's parameters."""
        if not self.learned:
            return {}
        return dict.fromkeys(
            (f"{name}.weight", f"{name}.bias") if self.bias else (f"{name}.weight",), (self.size,)
        )
