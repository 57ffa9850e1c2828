"""Rotary tables, ALiBi slopes and distance biases, made once by NumPy, so that all devices have the
same values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slipstream.kernels.layouts import DisentangledParams
from slipstream.spec.model import (
    AlibiSpec,
    AttentionSpec,
    BucketSpec,
    DisentangledSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    QueryScale,
    RopeSpec,
    SinusoidSpec,
    YarnScaling,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from slipstream.kernels.layouts import NormParams
    from slipstream.kernels.ops import OpSet
    from slipstream.kernels.weights.forms import Linear

Floats = npt.NDArray[np.float32]


def rope_table(spec: RopeSpec, num_positions: int) -> Tensor:
    """Returns `rope_angles` as a tensor on a device."""
    import torch

    return torch.from_numpy(rope_angles(spec, num_positions))


def rope_angles(spec: RopeSpec, num_positions: int) -> Floats:
    """Returns float32 [num_positions, rotary_dim]: cos of each angle in the first half of a row,
    sin in the second."""
    frequencies, factor = _frequencies(spec, num_positions)
    half = len(frequencies)
    table = np.empty((num_positions, 2 * half), np.float32)
    angles = np.outer(np.arange(num_positions, dtype=np.float32), frequencies)
    angles = -angles if spec.backwards else angles
    np.cos(angles, out=table[:, :half])
    np.sin(angles, out=table[:, half:])
    return table if factor == 1.0 else table * np.float32(factor)


def _frequencies(spec: RopeSpec, num_positions: int) -> tuple[Floats, float]:
    """Returns (angles per position, float32 [rotary_dim / 2]; factor of cos and sin)."""
    dim, one = spec.rotary_dim, np.float32(1.0)
    powers = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    # NumPy's float32 powers are off by 2 ulp
    base: Floats = one / np.power(np.float64(spec.theta), powers).astype(np.float32)
    match spec.scaling:
        case None:
            return base, 1.0
        case LinearScaling(factor=factor):
            return base / np.float32(factor), 1.0
        case ProportionalScaling(num_turned=turned, factor=factor):
            count = np.arange(dim // 2)
            return np.where(count < turned, base / np.float32(factor), np.float32(0.0)), 1.0
        case Llama3Scaling() as s:
            wavelength, less = np.float32(2 * math.pi) / base, np.float32(s.factor)
            low = s.original_max_position / s.low_freq_factor
            high = s.original_max_position / s.high_freq_factor
            scaled = np.where(wavelength > low, base / less, base)
            if s.low_freq_factor == s.high_freq_factor:  # no transition (Llama 4)
                return scaled, 1.0
            smooth = (
                np.float32(s.original_max_position) / wavelength - np.float32(s.low_freq_factor)
            ) / np.float32(s.high_freq_factor - s.low_freq_factor)
            between = (one - smooth) * base / less + smooth * base
            return np.where((wavelength <= low) & (wavelength >= high), between, scaled), 1.0
        case YarnScaling() as s:

            def dimension(rotations: float) -> float:
                return (
                    dim
                    * math.log(s.original_max_position / (rotations * 2 * math.pi))
                    / (2 * math.log(spec.theta))
                )

            low, high = dimension(s.beta_fast), dimension(s.beta_slow)
            if s.truncate:
                low, high = math.floor(low), math.ceil(high)
            first, last = max(low, 0), min(high, dim - 1)
            count = np.arange(dim // 2, dtype=np.float32)
            ramp = ((count - np.float32(first)) / np.float32(last - first or 0.001)).clip(0, 1)
            attended = (
                s.attention_factor
                if s.attention_factor is not None
                else 0.1 * math.log(s.factor) + 1.0
            )
            mixed: Floats = base / np.float32(s.factor) * ramp + base * (one - ramp)
            return mixed, attended
        case LongRopeScaling() as s:
            factors = s.long_factors if s.is_long(num_positions) else s.short_factors
            divisors: Floats = np.array(factors, dtype=np.float32)
            return np.divide(base, divisors), s.attention_factor


def query_scales(spec: QueryScale, num_positions: int) -> Floats:
    """Returns float32 [num_positions]: the factor of the queries at each position."""
    at = np.floor(
        np.arange(spec.offset, num_positions + spec.offset, dtype=np.float32)
        / np.float32(spec.period)
    )
    scales: Floats = 1 + np.float32(spec.beta) * np.log(1 + at)
    return scales


def sinusoids(spec: SinusoidSpec, width: int) -> Floats:
    """Returns float32 [num_positions, width]: the rows that are added to embeddings."""
    half = width // 2
    last = half - 1 if spec.far else half
    steps = np.arange(half, dtype=np.float32) * np.float32(-math.log(10000) / last)
    angles = np.outer(np.arange(spec.num_positions, dtype=np.float32), np.exp(steps))
    return np.concatenate(
        (np.sin(angles), np.cos(angles), np.zeros_like(angles[:, : width % 2])), 1
    )


def sectioned_positions(
    num_tokens: int, images: Sequence[tuple[int, int, int]]
) -> npt.NDArray[np.int64]:
    """Returns the three positions of each token of a text, int64 [3, num_tokens].

    A text token's are all one more than the previous token's. A picture's token has the position of
    the picture's first token, that plus the token's row, and that plus its column. Text continues
    after the largest. `images` has (offset, rows, columns) of each picture.
    """
    found = np.empty((3, num_tokens), np.int64)
    at = position = 0
    for offset, rows, columns in (*images, (num_tokens, 0, 0)):
        found[:, at:offset] = np.arange(position, position + offset - at)
        position += offset - at
        at = offset + rows * columns
        found[0, offset:at] = position
        found[1:, offset:at] = position + np.indices((rows, columns)).reshape(2, -1)
        position += max(rows, columns)
    return found


def alibi_slopes(spec: AlibiSpec, num_heads: int) -> Floats:
    """Returns float32 [num_heads]: factor · 2^(−max_bias · i / n), n the next power of two, odd
    ones first (Press et al. 2021)."""
    if spec.part is not None:
        first, total = spec.part
        own = alibi_slopes(replace(spec, part=None), total)[first : first + num_heads]
        return np.pad(own, (0, num_heads - len(own)))  # padding heads
    n = 2 ** math.ceil(math.log2(num_heads))
    steps = np.float32(-spec.max_bias) * np.arange(1, n + 1, dtype=np.float32) / np.float32(n)
    slopes: Floats = np.float32(spec.factor) * np.exp2(steps)
    return slopes if n == num_heads else np.concatenate((slopes[1::2], slopes[::2]))[:num_heads]


def distance_bias(spec: BucketSpec, weight: Floats) -> Floats:
    """weight [num_buckets, H] → float32 [H, 2R + 1], R = max_distance: the bias at each key
    position − query position.

    Beyond R the bias is that of R. In a causal stack all later keys, which are masked anyway, share
    one bucket.
    """
    distance = np.arange(-spec.max_distance, spec.max_distance + 1)
    buckets = spec.num_buckets // 2 if spec.both_directions else spec.num_buckets
    ahead = (distance > 0) * buckets if spec.both_directions else np.zeros_like(distance)
    away = np.abs(distance) if spec.both_directions else np.maximum(-distance, 0)
    exact = buckets // 2
    octaves = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(exact))
    growth = octaves / np.float32(math.log(spec.max_distance / exact)) * np.float32(buckets - exact)
    far = np.minimum(exact + growth.astype(np.int64), buckets - 1)
    return np.ascontiguousarray(weight[ahead + np.where(away < exact, away, far)].T)


def distance_buckets(spec: DisentangledSpec) -> npt.NDArray[np.int32]:
    """Returns the bucket of each distance (query position − key position) from −R to R, int32 [2R + 1]. Larger
    distances have the bucket of ±R."""
    if spec.num_buckets is None:
        found = np.arange(-spec.max_distance, spec.max_distance + 1)
    else:
        reach, middle = max(spec.max_distance, spec.num_buckets), spec.num_buckets // 2
        distance = np.arange(-reach, reach + 1)
        away = np.maximum(np.abs(distance), middle).astype(np.float32) / np.float32(middle)
        octaves = np.log(away) / np.log(np.float32((spec.max_distance - 1) / middle))
        far = np.ceil(octaves * np.float32(middle - 1)) + middle
        found = np.where(np.abs(distance) <= middle, distance, np.sign(distance) * far)
    rows: npt.NDArray[np.int32] = np.clip(found + spec.span, 0, 2 * spec.span - 1).astype(np.int32)
    return rows


class PositionTables:
    """Rotary tables, ALiBi slopes and distance biases, shared by all layers with the same ones.

    They are tensors on `device`, or without one NumPy arrays. `distances` is the table of biases
    [buckets, H] that all layers of a stack share. It is set before they are built.
    """

    def __init__(self, max_model_len: int, device: torch.device | None) -> None:
        self.max_model_len, self.device = max_model_len, device
        self.distances: Tensor | None = None
        self.distances_norm: NormParams | None = None
        self._rope: dict[RopeSpec, Tensor] = {}
        self._biases: dict[BucketSpec, Tensor] = {}
        self._scales: dict[QueryScale, Tensor] = {}
        self._ones: dict[int, Tensor] = {}
        self._buckets: dict[DisentangledSpec, Tensor] = {}

    def of(
        self, spec: AttentionSpec, own: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns (cos_sin, slopes, distance_bias) of a layer. `own` is the layer's own weight of
        distances."""
        position = spec.position
        match position:
            case None | DisentangledSpec():
                return None, None, None
            case AlibiSpec():
                return None, self._placed(alibi_slopes(position, spec.num_heads)), None
            case BucketSpec(own=True):
                return None, None, self._bias(position, own)
            case BucketSpec():
                if position not in self._biases:
                    self._biases[position] = self._bias(position, self.distances)
                return None, None, self._biases[position]
            case RopeSpec():
                return self.rope(position), None, None

    def rope(self, position: RopeSpec) -> Tensor:
        angles = replace(position, style="half")  # both styles have the same angles
        if angles not in self._rope:
            self._rope[angles] = self._placed(rope_angles(angles, self.max_model_len))
        return self._rope[angles]

    def query_scale(self, spec: QueryScale | None) -> Tensor | None:
        """Returns the factors of the queries by position. None if all are 1 in so short a context."""
        if spec is None or self.max_model_len + spec.offset <= spec.period:
            return None
        if spec not in self._scales:
            self._scales[spec] = self._placed(query_scales(spec, self.max_model_len))
        return self._scales[spec]

    def disentangled(
        self,
        ops: OpSet,
        spec: AttentionSpec,
        position: DisentangledSpec,
        qkv: Linear,
        own: Mapping[str, Linear],
    ) -> DisentangledParams:
        """Returns the keys and queries of a layer's buckets, which are the same in every step. `own` has the layer's products
        for them, by name."""
        if position not in self._buckets:
            self._buckets[position] = self._placed(distance_buckets(position))
        table: Any = self.distances
        if self.distances_norm is not None:
            table = ops.norm(table, self.distances_norm)[0]
        shared: Any = () if position.own else ops.linear(table, qkv).chunk(3, dim=1)

        def made(name: str, column: int) -> Tensor:
            rows: Any = ops.linear(table, own[name]) if position.own else shared[column]
            heads: Tensor = rows.unflatten(1, (spec.num_heads, -1)).permute(1, 2, 0).contiguous()
            return heads

        return DisentangledParams(
            scale=spec.scale,
            buckets=self._buckets[position],
            keys=made("position_key", 1) if position.has_keys else None,
            queries=made("position_query", 0) if position.has_queries else None,
        )

    def ones(self, size: int) -> Tensor:
        """Returns the weights of a norm that has learned none."""
        if size not in self._ones:
            self._ones[size] = self._placed(np.ones(size, np.float32))
        return self._ones[size]

    def sinusoids(self, spec: SinusoidSpec, width: int) -> Tensor:
        return self._placed(sinusoids(spec, width))

    def _bias(self, position: BucketSpec, weight: Any) -> Tensor:
        assert weight is not None
        floats = (
            weight.astype(np.float32)
            if isinstance(weight, np.ndarray)
            else weight.float().cpu().numpy()
        )
        return self._placed(distance_bias(position, floats))

    def _placed(self, table: Any) -> Tensor:
        if self.device is None:
            return table  # type: ignore[no-any-return]
        import torch

        return torch.from_numpy(table).to(self.device)
