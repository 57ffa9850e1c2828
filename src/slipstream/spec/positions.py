"""How a model tells positions: the part of `spec` that is about them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, smooth between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): by-part interpolation and an attention factor. The bounds of the part between
    are whole dimensions, unless not to be `truncate`d (gpt-oss). `mscale_all_dim`: with m = 0.1 · it · ln(factor) + 1, DeepSeek
    multiplies the scores by m²."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): each frequency divided by a factor of its own, cos and sin multiplied by
    `attention_factor`. The short factors hold while the longest context that is served stays within `original_max_position`,
    the long ones beyond: one set for a whole run, since cached keys have been turned already."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    attention_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding (Su et al. 2021) of the first `rotary_dim` of each head.

    `half`: dimension i turns with i + rotary_dim/2 (GPT-NeoX, Llama). `interleaved`: 2i with 2i+1 (GPT-J).
    """

    theta: float
    rotary_dim: int
    style: Literal["half", "interleaved"] = "half"
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlibiSpec:
    """Scores fall linearly with distance (Press et al. 2021). `max_bias` sets the slopes as in MPT; they are multiplied by
    `factor` (Falcon adds the bias before it scales the scores)."""

    max_bias: float = 8.0
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """A learned number for each head and bucket of distances is added to the scores (T5, Raffel et al. 2020, §2.1). Half of the
    buckets are one distance each, the others grow with it up to `max_distance`; an encoder's are for both directions. All
    layers of a stack have one table, or each its `own` (UMT5)."""

    num_buckets: int
    max_distance: int
    both_directions: bool
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPositionSpec:
    """A table of `num_positions` rows is added to the embeddings; position p reads row p + `offset` (OPT: 2)."""

    num_positions: int
    offset: int = 0
