"""The steps of a recipe that work on one layer, in their order:

1. `MoveScales` moves magnitude between inputs and weights (AWQ, SmoothQuant)
2. `RoundWeights` quantizes and sparsifies the weights
3. `LearnRounding` trains the rounding of the weights for which it is set
4. `FindCacheScales` finds the scales of an 8-bit KV cache

Contract of a step: it is built from its settings, it is called with a `LayerWork` and changes only
that, and it has no state between layers. Data for a later layer or run is in the layer's `note`,
which is stored next to its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from slipstream.compress.calibrate import FakeInputs, InputStats, Stream
from slipstream.compress.planning import ORDER, PlannedWeight
from slipstream.compress.quantize.learned import Offsets, learn
from slipstream.compress.quantize.rounding import (
    Rounded,
    compensate,
    fit,
    gptq_trace,
    nearest,
    round_weight,
)
from slipstream.compress.quantize.scaling import scale_inputs, scaled_products, search_scale
from slipstream.compress.quantize_step import Quantize
from slipstream.compress.recipe import KVCache, Recipe
from slipstream.compress.sparsify import sparsegpt, sparsify_weight
from slipstream.compress.steps import Sparsify
from slipstream.spec.model import LayerSpec, MoESpec
from slipstream.spec.scheme import FORMAT_MAX

NOTES = ("exponents", "input_scales", "errors", "error_from", "zeros", "learned", "columns")

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LayerWork:
    """One layer during the steps. `values` are by parameter name ("mlp.up.weight"), linear layers
    by module name ("mlp.up")."""

    index: int
    spec: LayerSpec
    values: dict[str, Tensor]  # float32: the layer's parameters after the previous steps
    planned: Mapping[str, PlannedWeight]  # the linear layers to quantize or sparsify
    text: Stream | None  # the calibration text with this layer's inputs
    sparsity: float  # fraction of zeros, unless a pattern determines it
    exact: dict[str, Tensor] = field(default_factory=dict)  # `values` before rounding
    rounded: dict[str, Rounded] = field(default_factory=dict)
    offsets: dict[str, Offsets] = field(default_factory=dict)  # initial values of learned rounding
    # how the inputs of linear layers are quantized
    inputs: dict[str, FakeInputs] = field(default_factory=dict)
    # "k" and "v", as written to the checkpoint
    cache_scales: dict[str, Tensor] = field(default_factory=dict)
    note: dict[str, dict[str, Any]] = field(default_factory=lambda: {key: {} for key in NOTES})

    def set_weight(self, name: str, made: Rounded) -> None:
        """Replace a linear layer's weight by a quantized one."""
        self.rounded[name] = made
        self.values[f"{name}.weight"] = made.dequantized()


LayerStep: TypeAlias = Callable[[LayerWork], None]


def layer_steps(recipe: Recipe, written: torch.dtype) -> list[LayerStep]:
    """Steps of `recipe`; `written` is the dtype of scales and dense weights in the checkpoint."""
    quantize, sparsify, cache = recipe.one(Quantize), recipe.one(Sparsify), recipe.one(KVCache)
    steps: list[LayerStep] = []
    if quantize is not None and quantize.scaling is not None:
        steps.append(MoveScales(quantize, written))
    if quantize is not None or sparsify is not None:
        steps.append(RoundWeights(quantize, sparsify, written))
    if quantize is not None:
        steps.append(LearnRounding(quantize))
    if cache is not None:
        steps.append(FindCacheScales(cache, written))
    return steps


@dataclass(frozen=True, slots=True)
class MoveScales:
    """Divides the inputs of linear layers by scales and multiplies their weights by them, which lowers the quantization
    error."""

    settings: Quantize
    written: torch.dtype

    @torch.no_grad()
    def __call__(self, layer: LayerWork) -> None:
        assert layer.text is not None
        wanted = dict(scaled_products(layer.spec, self.settings, f"layers.{layer.index}."))
        hessian = self.settings.scaling == "awq"
        stats = layer.text.observe(layer.index, layer.values, wanted, inputs={}, hessian=hessian)
        for name, fold in wanted.items():
            settings, fmt = layer.planned[name].rounding
            weight = layer.values[f"{name}.weight"]
            s, exponent = search_scale(weight, stats[name], fold, settings, fmt, self.written)
            layer.note["exponents"][name] = exponent
            if exponent:
                scale_inputs(layer.values, name, fold, s, layer.spec.norms, self.written)


@dataclass(frozen=True, slots=True)
class RoundWeights:
    """Quantizes and sparsifies one linear layer after another. With GPTQ each is calibrated after
    the ones before it were quantized; with `true_sequential: false` all are calibrated at once."""

    quantize: Quantize | None
    sparsify: Sparsify | None
    written: torch.dtype

    @torch.no_grad()
    def __call__(self, layer: LayerWork) -> None:
        layer.exact = dict(layer.values)
        names = [name for name in ORDER if name in layer.planned]
        at_once = self.quantize is not None and not self.quantize.true_sequential
        hessian = any(self._compensates(layer.planned[name], layer) for name in names)
        at_once |= not hessian
        for group in [names] if at_once and names else [[name] for name in names]:
            stats: Mapping[str, InputStats] = {}
            if layer.text is not None:
                stats = layer.text.observe(
                    layer.index,
                    layer.values,
                    group,
                    inputs=layer.inputs,
                    original=layer.exact,
                    hessian=hessian,
                )
            for name in group:
                self._compress(layer, name, stats)

    def _compensates(self, planned: PlannedWeight, layer: LayerWork) -> bool:
        """Whether the result depends on how earlier linear layers of this layer were compressed.
        Rounding to nearest does not, so one pass over the text is enough for the layer."""
        settings = planned.settings
        rounds = settings is not None and settings.rounding != "nearest"
        return rounds or planned.sparse or (layer.text is not None and layer.text.catch_up > 0)

    def _compress(self, layer: LayerWork, name: str, stats: Mapping[str, InputStats]) -> None:
        planned, own, note = layer.planned[name], stats.get(name), layer.note
        before = layer.values[f"{name}.weight"]
        if planned.settings is not None and planned.settings.rounding == "learned":
            layer.offsets[name] = self._begin_learning(planned, before, own)
            made: Rounded | Tensor = layer.offsets[name].rounded()
        else:
            made = self._new_weight(layer, name, before, stats)
        if isinstance(made, Rounded):
            layer.set_weight(name, made)
        else:
            layer.values[f"{name}.weight"] = made.to(self.written).float()
        after = layer.values[f"{name}.weight"]
        if planned.sparse:
            note["zeros"][name] = float((after == 0).float().mean())
        if own is not None:
            note["errors"][name] = relative_error(before, after, own)
            if own.squares is not None:
                note["error_from"][name] = f"a sample of {len(own.sample)} inputs"
        if planned.fmt is not None and planned.fmt.inputs is not None:
            if self.quantize is not None and self.quantize.outliers is not None and own is not None:
                note["columns"][name] = outlier_columns(own.absmax, self.quantize.outliers)
            layer.inputs[name] = FakeInputs(
                planned.fmt.inputs, columns=tuple(note["columns"].get(name, ()))
            )
            if planned.fmt.static_inputs:
                note["input_scales"][name] = (
                    float(stats[name].absmax.max()) / FORMAT_MAX[planned.fmt.inputs]
                )

    def _begin_learning(
        self, planned: PlannedWeight, weight: Tensor, stats: InputStats | None
    ) -> Offsets:
        """Offsets at which learning begins: the result of GPTQ, or of rounding to nearest, which
        experts always use because they have no statistics."""
        settings, fmt = planned.rounding
        if stats is None or settings.begin == "nearest":
            return Offsets.fitted(weight, fmt, self.written, clip=settings.clip)
        more = {"act_order": settings.act_order, "clip": settings.clip}
        made, compensated = gptq_trace(
            weight, fmt, self.written, stats, damping=settings.damping, **more
        )
        return Offsets.of(compensated, made.grid)

    def _new_weight(
        self, layer: LayerWork, name: str, weight: Tensor, stats: Mapping[str, InputStats]
    ) -> Rounded | Tensor:
        """Compress a weight. Experts are compressed one by one; those that received no tokens have
        no statistics."""
        planned, mlp = layer.planned[name], layer.spec.mlp
        if not (name.startswith("experts.") and isinstance(mlp, MoESpec)):
            return self._matrix(planned, weight, stats.get(name), layer)
        experts = [
            self._matrix(planned, w, stats.get(f"{name}@{i}"), layer)
            for i, w in enumerate(weight.chunk(mlp.num_experts))
        ]
        rounded = [expert for expert in experts if isinstance(expert, Rounded)]
        return (
            Rounded.cat(rounded)
            if rounded
            else torch.cat([expert for expert in experts if isinstance(expert, Tensor)])
        )

    def _matrix(
        self, planned: PlannedWeight, weight: Tensor, stats: InputStats | None, layer: LayerWork
    ) -> Rounded | Tensor:
        settings = planned.settings
        fmt = planned.fmt
        sparse = self.sparsify if planned.sparse else None
        if stats is not None and (chosen := settings or sparse) is not None:
            share = layer.text.catch_up if layer.text is not None else 0.0
            weight = compensate(weight, stats, share, damping=chosen.damping)
        if sparse is None:
            return (
                weight
                if settings is None or fmt is None
                else round_weight(weight, settings, fmt, self.written, stats)
            )
        if (
            settings is not None
            and fmt is not None
            and settings.rounding == "gptq"
            and stats is not None
        ):
            # Zeros and codes are chosen together: later columns compensate for the errors of both.
            grid = fit(weight, fmt, self.written, clip=settings.clip, importance=stats.mean_square)
            found = sparsegpt(
                weight, stats, layer.sparsity, sparse.pattern, damping=sparse.damping, grid=grid
            )
            return Rounded(grid, grid.codes(found))
        weight = sparsify_weight(weight, sparse, stats, layer.sparsity)
        if settings is None or fmt is None:
            return weight
        return nearest(weight, fmt, self.written, clip=settings.clip, stats=stats)


@dataclass(frozen=True, slots=True)
class LearnRounding:
    """Trains the offsets that `RoundWeights` created, all of a layer together. Does nothing if
    there are none."""

    settings: Quantize

    def __call__(self, layer: LayerWork) -> None:
        if not layer.offsets:
            return
        assert layer.text is not None
        learned, error_left = learn(
            layer.text,
            layer.index,
            layer.exact,
            layer.values,
            layer.offsets,
            inputs=layer.inputs,
            num_steps=self.settings.num_steps,
            step_tokens=self.settings.step_tokens,
            states=layer.text.target_states(),
        )
        if error_left == 1.0:
            _logger.warning(
                "layer %d: learned rounding is no better than its start, which is kept", layer.index
            )
        for name, made in learned.items():
            layer.set_weight(name, made)
            layer.note["learned"][name] = error_left
            for key in ("errors", "error_from"):  # the error before training
                layer.note[key].pop(name, None)


@dataclass(frozen=True, slots=True)
class FindCacheScales:
    """Calibrates the scales of an 8-bit KV cache, one for the layer or one for each kv head."""

    settings: KVCache
    written: torch.dtype

    def __call__(self, layer: LayerWork) -> None:
        assert layer.text is not None
        if layer.spec.attention is None:
            return
        per_head = self.settings.per == "head"
        for part, top in zip(
            ("k", "v"), layer.text.cache_range(layer.index, layer.values), strict=True
        ):
            largest = top if per_head else top.max()[None]
            scale = (
                (largest * self.settings.margin / FORMAT_MAX[self.settings.form])
                .clamp(min=1e-6)
                .to(self.written)
            )
            layer.cache_scales[part] = scale[:, None, None] if per_head else scale


def outlier_columns(absmax: Tensor, threshold: float) -> list[int]:
    """Indices of the inputs whose maximum magnitude `absmax` [in] reaches the threshold, plus the
    next largest up to a multiple of 16, which kernels require."""
    count = int((absmax >= threshold).sum())
    return sorted(absmax.topk(min(len(absmax), -(-count // 16) * 16)).indices.tolist())


def relative_error(before: Tensor, after: Tensor, stats: InputStats) -> float:
    """Relative error |(W' − W) x|² / |W x|² over the calibration text, or over its sample if the Hessian was not
    observed."""
    return stats.energy(after - before) / max(stats.energy(before), 1e-30)
