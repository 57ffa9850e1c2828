"""Parameters of ops (norms, heads, attention, experts), and the shape of a layer for the one-token
kernel.

Nothing here imports torch, so that a model can be described without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from slipstream.spec.model import (
    AttentionSpec,
    BlockIndexSpec,
    ClampedSwiglu,
    CompressedAttentionSpec,
    GatedDeltaSpec,
    MoESpec,
    NamedActivation,
    OwnNorm,
)

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.weights.forms import Linear

LayerTensors: TypeAlias = "Mapping[str, Tensor | float | None]"
"""A layer's tensors for `OpSet.one_token`, by name, and its own numbers: `window`, `table`,
`up_factor`, `down_factor`. A weight in GGUF's types is a `CodedLinear` or `JoinedLinear`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormParams:
    """A norm over rows, in float32.

    `rms` is x / rms(x) · (weight + offset). `layer` is (x − mean) / std ·
    (weight + offset) + bias. An `OwnNorm` is the caller's function.
    """

    kind: Literal["rms", "layer"] | OwnNorm
    weight: Tensor  # [E]
    eps: float
    bias: Tensor | None = None  # [E]
    offset: float = 0.0


def norm_parts(
    spec: AttentionSpec, num_heads: int, weight: Any
) -> tuple[int, int, NormParams, int]:
    """Returns how `OpSet.norm_qk` norms a row of q or of k, which has `num_heads` heads side by
    side: (number of pieces that are normed separately, elements of a piece, their norm, elements
    from one piece's weights to the next one's)."""
    norm, dim = spec.qk_norm, spec.head_dim
    assert norm is not None
    if norm.over == "row":
        how = NormParams(kind="rms", weight=weight, eps=norm.eps, offset=norm.weight_offset)
        return 1, num_heads * dim, how, 0
    if norm.over == "layer":
        return num_heads, dim, weight, 0
    return num_heads, dim, NormParams(kind="layer", weight=weight, eps=norm.eps), dim


@dataclass(frozen=True, slots=True, kw_only=True)
class QKVLayout:
    """The heads in a row of q, k and v, and how `rope_and_cache` norms and rotates them.

    Without `q_norm` and `k_norm` heads are not normed; without `cos_sin` they are not rotated. With
    `value_eps` values pass an RMS norm without weights. Without `has_values` a row ends with k, whose
    unnormed heads are the values. With no kv heads a row is q alone, and nothing is cached.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # float32 [max_position, rotary_dim]: cos in a row's first half, sin in the second
    cos_sin: Tensor | None = None
    interleaved: bool = False
    q_norm: Tensor | None = None  # [D], as k's
    k_norm: Tensor | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_after: bool = False  # norms come after the rotation
    value_eps: float | None = None
    has_values: bool = True

    @property
    def rotary_dim(self) -> int:
        return 0 if self.cos_sin is None else self.cos_sin.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """Parameters of a layer's `attention`: how it computes scores, and which keys it masks."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None  # float32 [H]
    sinks: Tensor | None = None  # [H]
    distance_bias: Tensor | None = None  # float32 [H, 2R + 1]
    causal: bool = True

    @property
    def reach(self) -> int:
        """Maximum distance R with a bias of its own. Keys farther away have the bias of distance
        R."""
        return 0 if self.distance_bias is None else self.distance_bias.shape[1] // 2

    @property
    def scales_only(self) -> bool:
        """True if scores are q · k times `scale`, possibly masked, and nothing else."""
        others = self.softcap, self.alibi_slopes, self.sinks, self.distance_bias
        return all(other is None for other in others)


@dataclass(frozen=True, slots=True, kw_only=True)
class DisentangledParams:
    """Parameters of a layer's disentangled attention (`DisentangledSpec`) with N buckets.

    A query and a key at distance d = query position − key position have the bucket `buckets`[R + d], d clamped to ±R.
    """

    scale: float
    buckets: Tensor  # int32 [2R + 1]
    keys: Tensor | None  # of the buckets, for the queries: [H, D, N]
    queries: Tensor | None  # of the buckets, for the keys: [H, D, N]


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAParams:
    """A layer's latent attention with H heads.

    A query head has P non-rotary and R rotary elements, a latent has C, a value V. `norm` [C] is
    the RMS norm of latents.
    """

    keys: Any  # [H, P, C], in the layout of the op set's `pack_latent`
    values: Any  # [H, C, V], the same
    norm: NormParams
    cos_sin: Tensor  # float32 [max_position, R]
    interleaved: bool
    scale: float

    @property
    def rotary_dim(self) -> int:
        return self.cos_sin.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedParams:
    """Parameters of a layer's attention to compressed keys (`CompressedAttentionSpec`)."""

    spec: CompressedAttentionSpec
    norm: Tensor  # [D]
    sinks: Tensor  # [H]
    cos_sin: Tensor  # float32 [max_position, R]
    entry_norm: Tensor | None = None  # [D]
    index_norm: Tensor | None = None  # [I]
    gate_bias: Tensor | None = None  # float32 [rate, D], twice as wide if windows overlap
    index_gate_bias: Tensor | None = None  # float32 [rate, 2 · I]


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperParams:
    """Learned parameters, float32, from which the coefficients of N residual streams are computed
    (`HyperSpec`)."""

    product: Tensor  # [N + N + N · N, N · E], or [N, N · E] after the last layer
    base: Tensor
    scale: Tensor  # [3] or [1]
    count: int
    iterations: int
    eps: float
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexParams:
    """Parameters of a layer's index, which chooses keys for sparse attention (`IndexSpec`): the layout of its queries
    and its single key, and the number of keys to choose."""

    heads: QKVLayout
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexParams:
    """Parameters of the index of a layer's block-sparse attention (`BlockIndexSpec`), with the layout of its queries and
    its single key."""

    spec: BlockIndexSpec
    heads: QKVLayout


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's experts, stacked: `up` [X · 2F, E] (without a gate [X · F, E]) and `down`
    [X · E, F], with their biases."""

    up: Linear
    down: Linear
    spec: MoESpec
    correction: Tensor | None = None  # float32 [X], if spec.correction
    scales: Tensor | None = None  # float32 [X], if spec.expert_scales


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAShape:
    """Sizes of latent attention, as a part of a `TokenShape`."""

    nope_dim: int
    rotary_dim: int
    rank: int
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShape:
    """The sizes that all layers of a decoder share, for `OpSet.one_token`.

    An MLP is dense, or the mixture `experts` with the same activation. `intermediate_size` is 0 if
    no MLP is dense. Layers with the delta rule `delta` have no attention.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int  # equal to num_heads with latents, which have no kv heads
    head_dim: int  # of attention's output
    latent: MLAShape | None
    gated: bool
    activation: NamedActivation | ClampedSwiglu
    parallel: bool
    norm: Literal["rms", "layer"]
    norm_eps: float
    norm_offset: float
    mlp_norm: bool  # the MLP has a norm of its own
    mlp_norm_eps: float
    interleaved: bool
    qk_eps: float
    qk_offset: float
    scale: float
    experts: MoESpec | None = None
    output_gate: bool = False  # the first rows of `qkv` make a gate of attention's output
    delta: GatedDeltaSpec | None = None
