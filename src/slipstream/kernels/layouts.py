"""What ops are told of a layer: its heads, how scores are made, its experts; and, for the kernel that runs all layers of one
token, the whole layer's shape. Nothing here imports torch, so that a model can be described without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slipstream.spec.model import MoESpec, NamedActivation, OwnNorm

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.weights import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class NormParams:
    """A norm over rows, in float32. `rms`: x / rms(x) · (weight + offset). `layer`: (x − mean) / std · weight + bias. Or a
    function from outside."""

    kind: Literal["rms", "layer"] | OwnNorm
    weight: Tensor  # [E]
    eps: float
    bias: Tensor | None = None  # [E]
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QKVLayout:
    """What a layer's `rope_and_cache` makes of a row: how many heads, of which size, and how q and k of each are normed and
    turned. Without `q_norm` and `k_norm` they are not normed, without `cos_sin` not rotated."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cos_sin: Tensor | None = None  # float32 [max_position, rotary_dim]: cos in the first half of a row, sin in the second
    interleaved: bool = False
    q_norm: Tensor | None = None  # [D], and k's
    k_norm: Tensor | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0

    @property
    def rotary_dim(self) -> int:
        return 0 if self.cos_sin is None else self.cos_sin.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """How a layer's `attention` weighs the keys that a query sees."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None  # float32 [H]
    sinks: Tensor | None = None  # [H]
    distance_bias: Tensor | None = None  # float32 [H, 2R + 1]
    causal: bool = True

    @property
    def reach(self) -> int:
        """R: farther keys have the bias of those so far away."""
        return 0 if self.distance_bias is None else self.distance_bias.shape[1] // 2

    @property
    def scales_only(self) -> bool:
        """Scores are products times `scale` (of keys that a mask may hide), and nothing else joins them."""
        others = self.softcap, self.alibi_slopes, self.sinks, self.distance_bias
        return all(other is None for other in others)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAParams:
    """A layer's latent attention: H heads, P non-rotary and R rotary numbers of a query head, C of a latent, V of a value.
    `norm` [C] is the RMS norm of latents."""

    keys: Any  # [H, P, C], as the op set's `pack_heads` holds it
    values: Any  # [H, C, V], the same
    norm: NormParams
    cos_sin: Tensor  # float32 [max_position, R]
    interleaved: bool
    scale: float

    @property
    def rotary_dim(self) -> int:
        return self.cos_sin.shape[1]


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's: `up` [X · 2F, E] (or [X · F, E]) and `down` [X · E, F] hold them one below the other, their biases too."""

    up: Linear
    down: Linear
    spec: MoESpec
    correction: Tensor | None = None  # float32 [X], if spec.correction


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAShape:
    """Latent attention in a `TokenShape`."""

    nope_dim: int
    rotary_dim: int
    rank: int
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShape:
    """What all layers of a decoder have in common, for `OpSet.one_token`. An MLP is dense or the mixture `experts`, which has
    the dense ones' activation and no biases but a router's; `intermediate_size` is 0 without dense ones."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int  # those that keys are shared out by: with latents, which have none, as many as heads
    head_dim: int  # of what attention gives
    latent: MLAShape | None
    gated: bool
    activation: NamedActivation
    parallel: bool
    norm: Literal["rms", "layer"]
    norm_eps: float
    norm_offset: float
    mlp_norm: bool  # whether up reads a norm of its own
    mlp_norm_eps: float
    interleaved: bool
    qk_eps: float
    qk_offset: float
    scale: float
    experts: MoESpec | None = None
