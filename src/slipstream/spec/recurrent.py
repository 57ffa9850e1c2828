"""Recurrent layers as data: gated delta rule, Mamba-2, Mamba-1 and short convolutions. No torch.

A recurrent layer keeps a state of constant size for each sequence instead of keys and values:

1. the last `conv_width` − 1 inputs of a causal convolution over each channel;
2. a float32 array of shape `state_shape`, if it has a recurrence.

Shapes: E hidden size, H value heads, K key size of a head, V value size of a head, C channels of the convolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from slipstream.spec.functions import Shape


def _products(**rows: tuple[int, int]) -> dict[str, Shape]:
    return {f"recurrent.{name}.weight": shape for name, shape in rows.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """The gated delta rule (Yang et al. 2024, arXiv:2412.06464; Kimi's per-channel decay, arXiv:2510.26692).

    For each head and token, with L2-normed q and k: S = exp(g) · S; S += β · k (v − Sᵀ k)ᵀ; o = Sᵀ q / √K.

    1. `num_key_heads` heads of q and k each serve H / num_key_heads consecutive value heads.
    2. g = −exp(A) · softplus(a + dt): one number a head, or with `decay="channel"` one for each of its K key channels.
       With a `bound` below 0, g = bound · sigmoid(exp(A) · (a + dt)) (Ling 3).
    3. β = sigmoid(b), twice that with `negative_eigenvalues`.
    4. The output is RMS-normed per head and multiplied by `gate`(z).
    5. Parameters: `in` projects to q, k, v and, without `latent`, z; `gates` projects to b and a. With
       `latent`, z and a are low-rank projections of rank `latent`, and `gates` projects to b only.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    eps: float
    decay: Literal["head", "channel"] = "head"
    gate: Literal["silu", "sigmoid"] = "silu"
    negative_eigenvalues: bool = False
    latent: int | None = None
    bound: float | None = None

    @property
    def q_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def v_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.q_size + self.v_size

    @property
    def decay_size(self) -> int:
        """Number of elements of g per token."""
        return self.num_heads * (self.key_dim if self.decay == "channel" else 1)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.key_dim, self.value_dim

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        e, rank = hidden_size, self.latent
        found: dict[str, Shape]
        if rank is None:
            found = _products(
                **{"in": (self.conv_channels + self.v_size, e)},
                gates=(self.num_heads + self.decay_size, e),
            )
        else:
            found = _products(
                **{"in": (self.conv_channels, e)},
                gates=(self.num_heads, e),
                decay_latent=(rank, e),
                decay_up=(self.decay_size, rank),
                gate_latent=(rank, e),
                gate_up=(self.v_size, rank),
            )
        found["recurrent.conv.weight"] = (self.conv_channels, self.conv_width)
        found["recurrent.decay.weight"] = (self.num_heads,)
        found["recurrent.time.weight"] = (self.decay_size,)
        found["recurrent.norm.weight"] = (self.value_dim,)
        return found | _products(out=(e, self.v_size))


class NormPart(NamedTuple):
    """A rank's part of a group norm. `of`: the group of each of its equally large parts. Over all
    ranks there are `num_groups` groups of `size` elements."""

    of: tuple[int, ...]
    num_groups: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): S = exp(−exp(A) · dt) · S + dt · B xᵀ; y = Sᵀ C + D x.

    1. `in` projects to the gate z [H · V], then the convolution's channels x [H · V], B and C [num_groups · K each], then dt
       [H].
    2. B and C of a group serve H / num_groups consecutive heads.
    3. dt = softplus(dt + bias), clamped to `time_limit`.
    4. `norm`: y · silu(z) is RMS-normed in `norm_groups` equal groups (`gate_first`), or y is normed and then multiplied
       by silu(z). None: y · silu(z).
    5. `norm_part`: set on a rank of several (`spec.parallel`) if norm groups span ranks.
    """

    num_heads: int
    value_dim: int
    key_dim: int
    num_groups: int
    conv_width: int
    eps: float
    conv_bias: bool = True
    bias: bool = False
    norm: Literal["gate_first", "norm_first"] | None = "gate_first"
    norm_groups: int = 1
    time_limit: tuple[float, float] = (0.0, math.inf)
    norm_part: NormPart | None = None

    gate: ClassVar[Literal["silu", "sigmoid"]] = "silu"

    @property
    def v_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return self.v_size + 2 * self.num_groups * self.key_dim

    @property
    def time_at(self) -> int:
        """Column of the output of `in` at which dt begins."""
        return self.v_size + self.conv_channels

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.key_dim, self.value_dim

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        rows = self.v_size + self.conv_channels + self.num_heads
        found = _products(**{"in": (rows, hidden_size)})
        if self.bias:
            found["recurrent.in.bias"] = (rows,)
        found["recurrent.conv.weight"] = (self.conv_channels, self.conv_width)
        if self.conv_bias:
            found["recurrent.conv.bias"] = (self.conv_channels,)
        for name in ("decay", "time", "skip"):
            found[f"recurrent.{name}.weight"] = (self.num_heads,)
        if self.norm is not None:
            found["recurrent.norm.weight"] = (self.v_size,)
        found |= _products(out=(hidden_size, self.v_size))
        return found | ({"recurrent.out.bias": (hidden_size,)} if self.bias else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningSpec(Mamba2Spec):
    """Lightning attention (Qin et al. 2024, arXiv:2401.04658; MiniMax): S = exp(−rate) · S + k vᵀ; o = Sᵀ q.

    It is computed as Mamba-2 with C, B and x as q, k and v, dt = 1 and D = 0:

    1. `in` projects to the gate z, then v, k and q [H · K each], which pass SiLU. There is no convolution.
    2. Each head has a fixed decay rate from `rates`, which are not parameters.
    3. The output is RMS-normed over all heads, then multiplied by sigmoid(z).
    """

    rates: tuple[float, ...]
    num_groups: int = 0  # one per head
    conv_width: int = 1
    norm: Literal["gate_first", "norm_first"] | None = "norm_first"
    time_limit: tuple[float, float] = (1.0, 1.0)

    gate: ClassVar[Literal["silu", "sigmoid"]] = "sigmoid"
    time_at: ClassVar[int] = 0  # any column does, because the clamp sets every dt to 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_groups", self.num_heads)

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        found = _products(**{"in": (4 * self.v_size, hidden_size)}, norm=(self.v_size,))  # type: ignore[arg-type]
        return found | _products(out=(hidden_size, self.v_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """Mamba-1 (Gu and Dao 2023, arXiv:2312.00752): S = exp(−exp(A) · dt) · S + dt · x Bᵀ; y = S C + D x, by channel.

    1. `in` projects to x and the gate z [`width` each]. After the convolution `select` projects x to [dt latent
       (`rank`), B, C], and `dt` projects the latent to dt [`width`]. dt = softplus(dt + time).
    2. With `normed`, dt's latent, B and C are RMS-normed before: each with its own weights (Jamba), or if "plain" without
       weights (FalconMamba).
    3. The output is y · silu(z).
    """

    width: int
    key_dim: int
    rank: int
    conv_width: int
    eps: float
    conv_bias: bool = True
    bias: bool = False
    normed: bool | Literal["plain"] = False

    @property
    def conv_channels(self) -> int:
        return self.width

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.width, self.key_dim

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        found = _products(**{"in": (2 * self.width, hidden_size)})
        if self.bias:
            found["recurrent.in.bias"] = (2 * self.width,)
        found["recurrent.conv.weight"] = (self.width, self.conv_width)
        if self.conv_bias:
            found["recurrent.conv.bias"] = (self.width,)
        found |= _products(select=(self.rank + 2 * self.key_dim, self.width))
        if self.normed is True:
            sizes = {"time_norm": self.rank, "b_norm": self.key_dim, "c_norm": self.key_dim}
            found |= {f"recurrent.{name}.weight": (size,) for name, size in sizes.items()}
        found |= _products(dt=(self.width, self.rank), decay=(self.width, self.key_dim))
        found |= {f"recurrent.{name}.weight": (self.width,) for name in ("time", "skip")}
        found |= _products(out=(hidden_size, self.width))
        return found | ({"recurrent.out.bias": (hidden_size,)} if self.bias else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """LFM2's gated short convolution: `in` projects to b, c and x of `width` each; the output is c · conv(b · x)."""

    width: int
    conv_width: int
    bias: bool = False

    state_shape: ClassVar[None] = None

    @property
    def conv_channels(self) -> int:
        return self.width

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        found = _products(**{"in": (3 * self.width, hidden_size)})
        found["recurrent.conv.weight"] = (self.width, self.conv_width)
        found |= _products(out=(hidden_size, self.width))
        if self.bias:
            found |= {
                "recurrent.in.bias": (3 * self.width,),
                "recurrent.conv.bias": (self.width,),
                "recurrent.out.bias": (hidden_size,),
            }
        return found


RecurrentSpec: TypeAlias = GatedDeltaSpec | Mamba2Spec | MambaSpec | ShortConvSpec


def state_bytes(spec: RecurrentSpec, element_bytes: int) -> int:
    """Bytes of a sequence's state in one layer. `element_bytes`: size of the convolution's inputs."""
    conv = spec.conv_channels * (spec.conv_width - 1) * element_bytes
    return conv + (0 if spec.state_shape is None else 4 * math.prod(spec.state_shape))
