"""Rotary tables, ALiBi slopes and biases by distance, made once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.spec.model import (
    AlibiSpec,
    AttentionSpec,
    BucketSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)


def rope_table(spec: RopeSpec, num_positions: int) -> Tensor:
    """float32 [num_positions, rotary_dim]: cos of each angle in the first half of a row, sin in the second."""
    frequencies, factor = _frequencies(spec, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies.float())
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * factor


def _frequencies(spec: RopeSpec, num_positions: int) -> tuple[Tensor, float]:
    """float32 [rotary_dim / 2] angles per position, and what cos and sin are multiplied by."""
    dim = spec.rotary_dim
    base = 1.0 / spec.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    match spec.scaling:
        case None:
            return base, 1.0
        case LinearScaling(factor=factor):
            return base / factor, 1.0
        case Llama3Scaling() as s:
            wavelength = 2 * math.pi / base
            low, high = s.original_max_position / s.low_freq_factor, s.original_max_position / s.high_freq_factor
            smooth = (s.original_max_position / wavelength - s.low_freq_factor) / (
                s.high_freq_factor - s.low_freq_factor
            )
            between = (1 - smooth) * base / s.factor + smooth * base
            scaled = torch.where(wavelength > low, base / s.factor, base)
            return torch.where((wavelength <= low) & (wavelength >= high), between, scaled), 1.0
        case YarnScaling() as s:

            def dimension(rotations: float) -> float:
                return dim * math.log(s.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

            low, high = dimension(s.beta_fast), dimension(s.beta_slow)
            if s.truncate:
                low, high = math.floor(low), math.ceil(high)
            first, last = max(low, 0), min(high, dim - 1)
            ramp = ((torch.arange(dim // 2).float() - first) / max(last - first, 0.001)).clamp(0, 1)
            factor = s.attention_factor if s.attention_factor is not None else 0.1 * math.log(s.factor) + 1.0
            return base / s.factor * ramp + base * (1 - ramp), factor
        case LongRopeScaling() as s:
            factors = s.long_factors if num_positions > s.original_max_position else s.short_factors
            return base / torch.tensor(factors, dtype=torch.float32), s.attention_factor


def alibi_slopes(spec: AlibiSpec, num_heads: int) -> Tensor:
    """float32 [num_heads]: factor · 2^(−max_bias · i / n), n the next power of two, odd ones first (Press et al. 2021)."""
    n = 2 ** math.ceil(math.log2(num_heads))
    slopes = spec.factor * 2.0 ** (-spec.max_bias * torch.arange(1, n + 1, dtype=torch.float32) / n)
    return slopes if n == num_heads else torch.cat((slopes[1::2], slopes[::2]))[:num_heads]


def distance_bias(spec: BucketSpec, weight: Tensor) -> Tensor:
    """weight [num_buckets, H] → float32 [H, 2R + 1], R = max_distance: the bias at each key position − query position, which
    beyond R is that of R. A causal stack has one bucket for all keys ahead, which are not seen."""
    distance = torch.arange(-spec.max_distance, spec.max_distance + 1, device=weight.device)
    buckets = spec.num_buckets // 2 if spec.both_directions else spec.num_buckets
    ahead = (distance > 0) * buckets if spec.both_directions else torch.zeros_like(distance)
    away = distance.abs() if spec.both_directions else (-distance).clamp(min=0)
    exact = buckets // 2
    growth = torch.log(away.clamp(min=1).float() / exact) / math.log(spec.max_distance / exact) * (buckets - exact)
    far = (exact + growth.long()).clamp(max=buckets - 1)
    return weight.float()[ahead + torch.where(away < exact, away, far)].T.contiguous()


class PositionTables:
    """Rotary tables, ALiBi slopes and biases by distance, one of each for all layers that have the same. `distances` are the
    stack's own weights [buckets, H], set before its layers are built."""

    def __init__(self, max_model_len: int, device: torch.device) -> None:
        self.max_model_len, self.device = max_model_len, device
        self.distances: Tensor | None = None
        self._rope: dict[RopeSpec, Tensor] = {}
        self._biases: dict[BucketSpec, Tensor] = {}

    def of(self, spec: AttentionSpec, own: Tensor | None = None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(cos_sin, slopes, distance_bias) of a layer; `own`: the layer's weights of distances."""
        position = spec.position
        match position:
            case None:
                return None, None, None
            case AlibiSpec():
                return None, alibi_slopes(position, spec.num_heads).to(self.device), None
            case BucketSpec(own=True):
                assert own is not None
                return None, None, distance_bias(position, own)
            case BucketSpec():
                if position not in self._biases:
                    assert self.distances is not None
                    self._biases[position] = distance_bias(position, self.distances)
                return None, None, self._biases[position]
            case RopeSpec():
                return self.rope(position), None, None

    def rope(self, position: RopeSpec) -> Tensor:
        if position not in self._rope:
            self._rope[position] = rope_table(position, self.max_model_len).to(self.device)
        return self._rope[position]
