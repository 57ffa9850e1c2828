"""Activations and norms, by name or as functions from outside. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from slipstream.errors import UnsupportedModelError

Shape: TypeAlias = tuple[int, ...]

NamedActivation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""`gelu` is exact (erf), `gelu_tanh` the tanh approximation (`gelu_new`, `gelu_pytorch_tanh`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiglu:
    """g · σ(alpha · g) · (u + 1), with g the gate cut to at most `limit` and u the other half cut to ± it (gpt-oss). Only where
    there is a gate."""

    alpha: float
    limit: float

    def __str__(self) -> str:
        return f"clamped swiglu (±{self.limit:g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnActivation:
    """One that the kernels don't know (docs/adding-a-model.md): `function(gate, up)` of two float32 tensors, or `function(x)`
    where nothing is gated. `triton`: a `triton.jit` function of the same, elementwise in float32, which a GPU needs."""

    name: str
    function: Callable[..., Any]
    triton: Any = None

    def __str__(self) -> str:
        return self.name


Activation: TypeAlias = NamedActivation | ClampedSwiglu | OwnActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNorm:
    """A norm that the kernels don't know: `function(x, weight, bias, eps)` of x [T, E] in float32 → the same; weight [E] and
    bias [E] or None as they are stored. It runs in torch on every device."""

    name: str
    function: Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """`rms`: x / rms(x) · (weight + weight_offset). `layer`: (x − mean) / std · weight + bias. Or a function.

    Gemma stores its weights less one: weight_offset is 1 there.
    """

    kind: Literal["rms", "layer"] | OwnNorm
    size: int
    eps: float
    bias: bool = False
    weight_offset: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.eps <= 1:  # NaN is neither
            raise UnsupportedModelError(f"the norm's epsilon must be from 0 to 1, got {self.eps!r}", field="norm_eps")

    def shapes(self, name: str) -> dict[str, Shape]:
        """Of its parameters."""
        return dict.fromkeys((f"{name}.weight", f"{name}.bias") if self.bias else (f"{name}.weight",), (self.size,))
