"""Position embeddings of model specs. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from slipstream.errors import UnsupportedModelError
from slipstream.spec.functions import NormSpec


def require_positive(where: str, **values: float) -> None:
    """Raise UnsupportedModelError for a value that is not a finite number above 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise UnsupportedModelError(
                f"{where}: {name} must be a finite number above 0, got {value!r}", field=name
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor` (Chen et al. 2023)."""

    factor: float

    def __post_init__(self) -> None:
        require_positive("rope_scaling", factor=self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies are divided by `factor`, high ones are kept, with a smooth transition."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        require_positive(
            "rope_scaling",
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
            original_max_position_embeddings=self.original_max_position,
        )
        if self.low_freq_factor > self.high_freq_factor:
            raise UnsupportedModelError(
                f"rope_scaling: low_freq_factor must be at most high_freq_factor, got {self.low_freq_factor} and "
                f"{self.high_freq_factor}",
                field="low_freq_factor",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolation by parts, and an attention factor.

    `truncate`: the bounds of the transition are rounded to whole dimensions (not in gpt-oss).
    `mscale_all_dim`: DeepSeek multiplies scores by m² with m = 0.1 · mscale_all_dim · ln(factor) + 1.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        require_positive(
            "rope_scaling",
            factor=self.factor,
            original_max_position_embeddings=self.original_max_position,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            attention_factor=1.0 if self.attention_factor is None else self.attention_factor,
            mscale_all_dim=1.0 + abs(self.mscale_all_dim),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): each frequency is divided by its own factor.

    cos and sin are multiplied by `attention_factor`. An engine uses the short factors if its
    maximum context is within `original_max_position`, otherwise the long ones. It can't change
    between them, because cached keys are already rotated.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    attention_factor: float

    def is_long(self, num_positions: int) -> bool:
        """Whether an engine with this maximum context uses the long factors."""
        return num_positions > self.original_max_position

    def __post_init__(self) -> None:
        require_positive(
            "rope_scaling",
            original_max_position_embeddings=self.original_max_position,
            attention_factor=self.attention_factor,
        )
        for name, factors in (
            ("short_factor", self.short_factors),
            ("long_factor", self.long_factors),
        ):
            for factor in factors:
                require_positive("rope_scaling", **{name: factor})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalScaling:
    """Scaling in which only the first `num_turned` frequencies are used, divided by `factor`; the others are 0 (Gemma 4)."""

    num_turned: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        require_positive("rope_scaling", factor=self.factor)


RopeScaling: TypeAlias = (
    LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling | None
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding (Su et al. 2021) of the first `rotary_dim` dimensions of each head.

    `style` `half`: dimension i is rotated with i + rotary_dim/2 (GPT-NeoX, Llama). `interleaved`: 2i with 2i
    + 1 (GPT-J). `sections`: a token has three positions (time, row and column in an image; equal for text),
    and sections[j] frequencies use position j (M-RoPE; Qwen 2 VL, arXiv:2409.12191). `alternate`: of every
    three frequencies the second uses the row and the third the column, up to their numbers in `sections`; the
    others use time (Qwen 3 VL, arXiv:2511.21631). `backwards`: rotates by −angle (nanochat).
    """

    theta: float
    rotary_dim: int
    style: Literal["half", "interleaved"] = "half"
    scaling: RopeScaling = None
    sections: tuple[int, ...] | None = None
    alternate: bool = False
    backwards: bool = False

    def __post_init__(self) -> None:
        require_positive("rope", rope_theta=self.theta)
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise UnsupportedModelError(
                f"rope: the rotated part of a head must be an even number of dimensions, got {self.rotary_dim}",
                field="partial_rotary_factor",
            )
        if self.sections is not None and (
            sum(self.sections) != self.rotary_dim // 2 or min(self.sections) < 1
        ):
            raise UnsupportedModelError(
                f"rope: mrope_section {list(self.sections)} must be numbers above 0 that sum up to {self.rotary_dim // 2}",
                field="mrope_section",
            )

    @property
    def axes(self) -> tuple[int, ...] | None:
        """Index (0 … 2) of the position that each frequency uses; None if tokens have one position."""
        if self.sections is None:
            return None
        if not self.alternate:
            return tuple(axis for axis, size in enumerate(self.sections) for _ in range(size))
        return tuple(i % 3 * (i < 3 * self.sections[i % 3]) for i in range(self.rotary_dim // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + beta · ln(1 + ⌊p / period⌋), so that scores stay sharp in long texts
    (Ministral 3; "temperature tuning" of Llama 4). Below `period` nothing changes. `offset` is added to p (Llama 4: 1)."""

    beta: float
    period: float
    offset: int = 0

    def __post_init__(self) -> None:
        require_positive("rope_parameters", original_max_position_embeddings=self.period)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlibiSpec:
    """ALiBi (Press et al. 2021): scores decrease linearly with distance.

    `max_bias` sets the slopes, as in MPT. `factor` multiplies them: Falcon adds the bias before it
    scales the scores. `part`: (first, all) if this rank's heads begin at `first` of the model's
    `all`.
    """

    max_bias: float = 8.0
    factor: float = 1.0
    part: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """Relative position biases (T5, Raffel et al. 2020, §2.1).

    A learned number for each head and bucket of distances is added to the scores. Half of the buckets are for one
    distance each; the others widen up to `max_distance`. `both_directions`: buckets distinguish earlier from later
    keys (encoders). `own`: each layer has its own table (UMT5); otherwise all layers of a stack share one.
    """

    num_buckets: int
    max_distance: int
    both_directions: bool
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DisentangledSpec:
    """Disentangled attention (DeBERTa, He et al. 2021, arXiv:2006.03654): attention scores are sums of content and
    relative-position terms.

    All layers share a table of 2 · `span` rows, one for each bucket of query position − key position. Each layer projects it
    to keys for the queries (`has_keys`), and to queries for the keys (`has_queries`). These terms are added to q · k before
    scaling. `own`: the layer has separate projections for it; otherwise those of q and k are used. `num_buckets`: half of
    them are for one distance each, the others widen up to `max_distance`; None: one bucket per distance. `norm`: norm of the
    table.
    """

    num_buckets: int | None
    max_distance: int
    has_keys: bool
    has_queries: bool
    own: bool
    norm: NormSpec | None = None

    @property
    def span(self) -> int:
        return self.max_distance if self.num_buckets is None else self.num_buckets

    @property
    def products(self) -> tuple[str, ...]:
        """Names of a layer's own projections of the table."""
        kinds = (("position_key", self.has_keys), ("position_query", self.has_queries))
        return tuple(name for name, is_there in kinds if is_there and self.own)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPositionSpec:
    """A table of `num_positions` rows added to the embeddings. Position p uses row p + `offset`
    (OPT: 2)."""

    num_positions: int
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SinusoidSpec:
    """Fixed sinusoidal positions added to the embeddings (Vaswani et al. 2017, §3.5): the first
    half are sines, the second cosines, with frequencies from 1 to 1/10000. Position p uses p +
    `offset` (XGLM: 2). Without `far` the last frequency is one step before 1/10000 (Marian)."""

    num_positions: int
    offset: int = 0
    far: bool = True
