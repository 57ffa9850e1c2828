"""Moves magnitude between a linear layer's inputs and its weight: inputs are divided by s, columns of the weight are
multiplied by s, and the division is folded into the norm or linear layer before it. The model's outputs stay the same, but
its quantization error falls.

AWQ (Lin et al. 2024): s = rms(x)^a, so that weights of large inputs are rounded more finely. SmoothQuant (Xiao et al. 2023):
s = max|x|^a / max|w|^(1 − a), which moves outliers from inputs to weights. For each linear layer the exponent a with the
least output error is searched; s = 1 is among the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.compress.calibrate import FakeInputs, InputStats
from slipstream.compress.quantize.rounding import Rounded, fit
from slipstream.compress.quantize_step import Quantize
from slipstream.model.sequences import attention_of
from slipstream.spec.model import (
    DenseSpec,
    GatedDeltaSpec,
    LayerSpec,
    Mamba2Spec,
    NormSpec,
    ParallelBlock,
    PostNormBlock,
    RecurrentSpec,
    ShortConvSpec,
)
from slipstream.spec.scheme import FORMAT_MAX, WeightFormat

EXPONENTS = tuple(i / 20 for i in range(1, 21))
COARSE = 4  # every fourth exponent first, then its neighbors at half the distance around the best, and again
LEAST = 1e-5


@dataclass(frozen=True, slots=True)
class Fold:
    """Target of folding the division of a linear layer's inputs: the norm `norm`, or `rows` of the weight
    `linear`. One row may compute several inputs: `repeats` query heads of length `head_dim` read the values
    of one kv head. The linear layers `readers`, which are not quantized, read the same inputs."""

    norm: str | None = None
    linear: str | None = None
    rows: slice | None = None
    repeats: int = 1
    head_dim: int = 0
    readers: tuple[str, ...] = ()

    def shared(self, x: Tensor) -> Tensor:
        """Maximum over the inputs that share a row: values by input [in] → by row [in / repeats]."""
        return x if self.repeats == 1 else x.view(-1, self.repeats, self.head_dim).amax(1).flatten()

    def spread(self, s: Tensor) -> Tensor:
        """Repeat values for the inputs that share a row: by row [in / repeats] → by input [in]."""
        return (
            s
            if self.repeats == 1
            else s.view(-1, 1, self.head_dim).expand(-1, self.repeats, -1).flatten()
        )


def folds(spec: LayerSpec) -> dict[str, Fold]:
    """Linear layers of a layer whose inputs can be scaled, those first whose fold changes another one's
    weight. Norms that several branches, the residual or a mixture of experts read can't be folded into."""
    a, m, r, norms = attention_of(spec), spec.mlp, spec.recurrent, spec.norms
    found: dict[str, Fold] = {}
    if isinstance(m, DenseSpec) and (m.gated or m.activation == "relu"):
        size = m.intermediate_size
        found["mlp.down"] = Fold(
            linear="mlp.up", rows=slice(size, 2 * size) if m.gated else slice(0, size)
        )
    if isinstance(m, DenseSpec) and m.down_norm is not None:
        found["mlp.down"] = Fold(norm="mlp.down_norm")
    if r is not None and (own := _of_recurrent(r)) is not None:
        found["recurrent.out"] = own
    if a is not None and a.clip_qkv is None and a.differential is None:
        begin = a.gate_size + a.q_size + a.kv_size
        repeats = a.num_heads // a.num_kv_heads
        found["attention.out"] = Fold(
            linear="attention.qkv",
            rows=slice(begin, begin + a.kv_size),
            repeats=repeats,
            head_dim=a.head_dim,
        )
    if a is not None and a.out_norm is not None:
        found["attention.out"] = Fold(norm="attention.out_norm")
    if isinstance(spec.block, PostNormBlock):
        return found
    parallel = isinstance(spec.block, ParallelBlock)
    before_mlp, before_attention = (
        ("mlp_norm", "norm") if parallel else ("pre_mlp", "pre_attention")
    )
    gated = {f"pre_{part}" for part in (spec.input_gate.parts if spec.input_gate else ())}
    norms = {name: norm for name, norm in norms.items() if norm.learned and name not in gated}
    if before_mlp in norms and isinstance(m, DenseSpec):
        found["mlp.up"] = Fold(norm=before_mlp)
    if before_attention in norms and (not parallel or "mlp_norm" in norms):
        if r is None:
            found["attention.qkv"] = Fold(norm=before_attention)
        elif a is None:
            found["recurrent.in"] = Fold(norm=before_attention, readers=dense_readers(r))
    return found


def dense_readers(r: RecurrentSpec) -> tuple[str, ...]:
    """Linear layers of a recurrent layer, other than `in`, that read its inputs and are not
    quantized."""
    if not isinstance(r, GatedDeltaSpec):
        return ()
    parts = ("gates",) if r.latent is None else ("gates", "decay_latent", "gate_latent")
    return tuple(f"recurrent.{part}" for part in parts)


def _of_recurrent(r: RecurrentSpec) -> Fold | None:
    """Fold for the inputs of `recurrent.out`: the norm before it, whose weights the heads of a
    delta rule share, or the factor c of a short convolution. None for a scan."""
    match r:
        case GatedDeltaSpec():
            return Fold(norm="recurrent.norm", repeats=r.num_heads, head_dim=r.value_dim)
        case Mamba2Spec():
            return None if r.norm is None else Fold(norm="recurrent.norm")
        case ShortConvSpec():
            return Fold(linear="recurrent.in", rows=slice(r.width, 2 * r.width))
    return None


def scale_inputs(
    parameters: dict[str, Tensor],
    product: str,
    fold: Fold,
    s: Tensor,
    norms: Mapping[str, NormSpec],
    dtype: torch.dtype,
) -> Tensor:
    """Divide the inputs of `product` by s [in / repeats], by changing the layer's `parameters` in
    place. A norm's new weight is rounded to its stored `dtype`, and s adjusted to match. Returns
    the s [in] by which the weight is multiplied."""
    if fold.norm is not None:
        weight = parameters[f"{fold.norm}.weight"]
        offset = norms[fold.norm].weight_offset if fold.norm in norms else 0.0
        gain = weight + offset
        written = (gain / s - offset).to(dtype).float()
        live = (gain != 0) & (written + offset != 0)
        written = torch.where(live, written, weight)
        s = torch.where(live, gain / (written + offset), 1.0)
        parameters[f"{fold.norm}.weight"] = written
        if (bias := parameters.get(f"{fold.norm}.bias")) is not None:
            parameters[f"{fold.norm}.bias"] = bias / s
    else:
        rows = parameters[f"{fold.linear}.weight"]
        rows[fold.rows or slice(0)] /= s[:, None]
        if (bias := parameters.get(f"{fold.linear}.bias")) is not None:
            bias[fold.rows or slice(0)] /= s
    spread = fold.spread(s)
    for name in (product, *fold.readers):
        parameters[f"{name}.weight"] *= spread
    return spread


def search_scale(
    weight: Tensor,
    stats: InputStats,
    fold: Fold,
    settings: Quantize,
    fmt: WeightFormat,
    dtype: torch.dtype,
) -> tuple[Tensor, float]:
    """Search the best scales; returns (s [in / repeats], its exponent)."""
    awq = settings.scaling == "awq"
    error = _output_error(weight, stats, fmt, dtype, awq)
    best, least, exponent = torch.ones_like(fold.shared(stats.absmax)), float("inf"), 0.0
    if settings.alpha == "search" or awq:
        least = error(fold.spread(best))

    def attempt(a: float) -> None:
        nonlocal best, least, exponent
        s = _awq(stats, fold, a) if awq else _smooth(weight, stats, fold, a)
        found = error(fold.spread(s))
        if found < least:
            best, least, exponent = s, found, a

    if isinstance(settings.alpha, float) and not awq:
        attempt(settings.alpha)
        return best, exponent
    for a in EXPONENTS[COARSE - 1 :: COARSE]:
        attempt(a)
    for distance in (COARSE // 2, COARSE // 4):
        at = round(exponent * len(EXPONENTS))
        for i in (at - distance, at + distance):
            if 0 < i <= len(EXPONENTS):
                attempt(EXPONENTS[i - 1])
    return best, exponent


def _awq(stats: InputStats, fold: Fold, a: float) -> Tensor:
    s = fold.shared(stats.mean_square).sqrt().clamp(min=LEAST) ** a
    return s / (s.max() * s.min()).sqrt()


def _smooth(weight: Tensor, stats: InputStats, fold: Fold, a: float) -> Tensor:
    x, w = (fold.shared(t).clamp(min=LEAST) for t in (stats.absmax, weight.abs().amax(0)))
    return (x**a / w ** (1 - a)).clamp(min=LEAST)


def _output_error(
    weight: Tensor, stats: InputStats, fmt: WeightFormat, dtype: torch.dtype, awq: bool
) -> Callable[[Tensor], float]:
    """Build a function from s to the squared error of the linear layer's output. For AWQ the weight is quantized and the
    error is that over the calibration text, tr(d H dᵀ). For SmoothQuant the inputs are quantized too, and the error is that
    on the sample."""
    exact = stats.sample @ weight.T

    def error(s: Tensor) -> float:
        scaled = weight * s
        grid = fit(scaled, fmt, dtype, clip=False)
        rounded = Rounded(grid, grid.codes(scaled)).dequantized()
        if awq:
            return stats.energy(rounded / s - weight)
        assert fmt.inputs is not None
        x = stats.sample / s
        scale = float(x.abs().max()) / FORMAT_MAX[fmt.inputs] if fmt.static_inputs else None
        return float((FakeInputs(fmt.inputs, scale)(x) @ rounded.T - exact).square().sum())

    return error


def scaled_products(spec: LayerSpec, settings: Quantize, prefix: str) -> Iterator[tuple[str, Fold]]:
    """Linear layers that are quantized and can be scaled, in the order in which to scale them."""
    for product, fold in folds(spec).items():
        if settings.of(prefix + product) is not None:
            yield product, fold
