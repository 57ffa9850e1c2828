"""Structured pruning: removes heads (whole kv groups), MLP channels, layers and hidden dimensions. The result is an
ordinary, smaller dense checkpoint.

The importance of a unit is a sum over its weights:

    magnitude    w²; needs no text
    activation   (w · ‖x‖)² of the weights that read the unit, x its activations on calibration text (Wanda's measure, Sun et
                 al. 2024, for structures)
    taylor       |w · ∂L/∂w| for each batch: the first-order change of the loss (LLM-Pruner, Ma et al. 2023, Eq. 5)
    wactigrad    |w| · ‖x‖ · |∂L/∂w| of the weights that read the unit (after WActiGrad, Chitty-Venkata et al. 2024)

Layers are ranked by block influence, 1 − cos(input, output) (ShortGPT, Men et al. 2024, Eq. 1).

If the hidden width shrinks, norms' weights are scaled so that the norms' outputs in the remaining dimensions stay as large.
For this the removed fraction of Σx² is measured on the text; without text it is assumed to be 0. `training/distill.py`
recovers quality lost by pruning.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.compress.dense import DenseModel
from slipstream.compress.steps import Importance, PruneSettings
from slipstream.compress.structure import (
    HIDDEN,
    Axis,
    PruneSelection,
    Units,
    axes,
    cut_config,
    cut_parameters,
    cut_spec,
    num_units,
    split_experts,
)
from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.kernels.plain.autograd import WatchedOps
from slipstream.model.sequences import SequenceBatch, WholeModel, attention_of
from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.model import ModelSpec

NEEDS_GRADIENTS = ("taylor", "wactigrad")


@dataclass(frozen=True, slots=True)
class UnitStats:
    """Measurements on calibration text. The first three fields are float32, by parameter name as
    `structure.split_experts` returns."""

    # Σ x² over tokens, of the inputs of a linear layer or norm [in]
    energy: dict[str, Tensor] = field(default_factory=dict)
    # Σ |w · g| over batches, in the shape of the weight
    taylor: dict[str, Tensor] = field(default_factory=dict)
    # Σ |g| over batches, in the shape of the weight
    gradient: dict[str, Tensor] = field(default_factory=dict)
    influence: list[float] = field(default_factory=list)  # block influence by layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """The pruned model. `kept` are indices in the original. `influence` is the block influence of the original's layers,
    empty if not measured."""

    model: DenseModel
    kept: PruneSelection
    influence: tuple[float, ...]


def prune(
    model: DenseModel,
    settings: PruneSettings,
    batches: Sequence[SequenceBatch] = (),
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Pruned:
    """Prune the model, which must be in float32 if the importance uses gradients. `batches` of
    calibration text are required unless `settings.needs_text` is False."""
    settings.check()
    if settings.needs_text and not batches:
        raise ConfigError(
            f"importance={settings.importance!r} and ranked layers need calibration text",
            field="text",
        )
    # raises errors before anything is measured
    pruned_spec(model.family, model.config, model.spec, settings)
    spec, measured = model.spec, UnitStats()
    if batches:
        gradients = settings.importance in NEEDS_GRADIENTS
        measured = measure(spec, model.parameters, batches, gradients=gradients, progress=progress)
    kept = choose(spec, model.parameters, settings, measured)
    smaller, values = cut_spec(spec, kept), cut_parameters(spec, model.parameters, kept)
    config = cut_config(model.family, model.config, smaller, kept)
    read = model.family.read(ConfigReader(config))
    smaller = dataclasses.replace(smaller, folded=read.folded)
    if HIDDEN in kept.units:
        _keep_scale(spec, values, kept, measured)
        _fold_embed_scale(smaller, read, values)
        smaller = read
    result = DenseModel(source=model.source, config=config, spec=smaller, parameters=values)
    return Pruned(model=result, kept=kept, influence=tuple(measured.influence))


def pruned_spec(
    family: Family, config: Mapping[str, Any], spec: ModelSpec, settings: PruneSettings
) -> ModelSpec:
    """Spec of the pruned model, computed without weights. UnsupportedModelError or ConfigError if
    such a model could not be written or would be empty."""
    unknown = [i for i in settings.drop_layers if not 0 <= i < spec.num_layers]
    if unknown:
        raise ConfigError(
            f"drop_layers: there is no layer {unknown[0]}, only 0 to {spec.num_layers - 1}",
            field="drop_layers",
        )
    layers = [i for i in range(spec.num_layers) if i not in settings.drop_layers]
    if not layers:
        raise ConfigError(
            "drop_layers names every layer; at least one must stay", field="drop_layers"
        )
    if (settings.layers or settings.size is not None) and any(
        a is not None and a.differential is not None for a in map(attention_of, spec.layers)
    ):
        asked = "layers" if settings.layers else "size"
        raise UnsupportedModelError(
            f"{asked}: the share that a layer's heads subtract follows from its number, so layers can't go by their "
            "influence; name the last ones in drop_layers",
            field=asked,
        )
    units = {key: torch.arange(size) for key, size in _sizes(spec, settings).items()}
    layers = layers[: _num_layers(spec, settings, units)]
    kept = PruneSelection(layers=tuple(layers), units=units)
    smaller = cut_spec(spec, kept)
    cut_config(family, config, smaller, kept)
    return smaller


def _num_layers(spec: ModelSpec, settings: PruneSettings, units: Mapping[Units, Tensor]) -> int:
    """Number of layers to keep. With `size`, the number that comes nearest to it after the other
    parts are pruned."""
    if settings.size is None:
        count = _count(spec.num_layers, settings.layers, 1)
        if settings.layers and count == spec.num_layers:
            raise ConfigError(
                f"layers={settings.layers} removes none of {spec.num_layers}; ask for more",
                field="layers",
            )
        return count if settings.layers else spec.num_layers - len(set(settings.drop_layers))
    one = cut_spec(spec, PruneSelection(layers=(0,), units=units))
    each = one.layers[0].num_parameters(one.hidden_size)
    count = round((settings.size * spec.num_parameters - (one.num_parameters - each)) / each)
    if not 1 <= count < spec.num_layers:
        share = one.num_parameters / spec.num_parameters
        raise ConfigError(
            f"size={settings.size:.3g} can't be met by 1 to {spec.num_layers - 1} of {spec.num_layers} layers: one of them "
            f"and the embeddings are {share:.2f} of the model",
            field="size",
        )
    return count


def choose(
    spec: ModelSpec, parameters: Mapping[str, Tensor], settings: PruneSettings, measured: UnitStats
) -> PruneSelection:
    """Choose the most important units of each kind, and the layers with the largest block
    influence."""
    sizes = _sizes(spec, settings)
    layers = [i for i in range(spec.num_layers) if i not in settings.drop_layers]
    if measured.influence and not settings.drop_layers:
        ranked = sorted(layers, key=lambda i: measured.influence[i], reverse=True)
        count = _num_layers(
            spec, settings, {key: torch.arange(size) for key, size in sizes.items()}
        )
        layers = sorted(ranked[:count])
    found = importances(spec, parameters, settings.importance, measured) if sizes else {}
    units = {key: found[key].topk(size).indices.sort().values for key, size in sizes.items()}
    return PruneSelection(layers=tuple(layers), units=units)


def _sizes(spec: ModelSpec, settings: PruneSettings) -> dict[Units, int]:
    """Number of units to keep, for each kind that loses some. ConfigError if it rounds to none."""
    shares = {
        "heads": settings.heads,
        "channels": settings.channels,
        "shared": settings.channels,
        "hidden": settings.hidden,
    }
    found, asked = {}, {kind for kind, share in shares.items() if share > 0 and kind != "shared"}
    for key, whole in num_units(spec).items():
        count = _count(whole, shares[key.kind], 1 if key.kind == "heads" else settings.multiple)
        if count < whole:
            found[key] = count
    idle = asked - {key.kind for key in found}
    if idle:
        name = min(idle)
        if not any(key.kind == name for key in num_units(spec)):
            raise ConfigError(f"{name}: this model has none; prune other parts", field=name)
        sizes = max(size for key, size in num_units(spec).items() if key.kind == name)
        step = 1 if name == "heads" else settings.multiple
        raise ConfigError(
            f"{name}={shares[name]} removes none of {sizes}, in steps of {step}; ask for more",
            field=name,
        )
    return found


def _count(whole: int, share: float, multiple: int) -> int:
    """Number of units to keep: the nearest multiple of `multiple`, at least one."""
    if share == 0.0:
        return whole
    return min(whole, max(multiple, round(whole * (1.0 - share) / multiple) * multiple))


# --- Measuring --------------------------------------------------------------------------------------------------------


def measure(
    spec: ModelSpec,
    parameters: Mapping[str, Tensor],
    batches: Sequence[SequenceBatch],
    *,
    gradients: bool,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> UnitStats:
    """Measure on the text in one forward pass; with `gradients` also in a backward pass of each batch's mean loss."""
    found = UnitStats()
    parts = split_experts(spec, parameters)
    names = {part.data_ptr(): name for name, part in parts.items()}
    influence = torch.zeros(spec.num_layers)
    before: Tensor | None = None
    watching = True

    def watch(weight: Tensor, x: Tensor) -> None:
        if watching and (name := names.get(weight.data_ptr())) is not None:
            energy = x.detach().float().square().flatten(0, -2).sum(0)
            found.energy[name] = found.energy[name] + energy if name in found.energy else energy

    def each(i: int, state: Tensor) -> None:
        nonlocal before
        now = state.detach().float()
        if before is not None:
            influence[i - 1] += float((1.0 - F.cosine_similarity(before, now, dim=-1)).sum())
        before = now

    longest = max(batch.meta.max_seq_len for batch in batches)
    watched = WholeModel(spec, parameters, max_len=longest, ops=WatchedOps(watch)).requires_grad_(
        gradients
    )
    total = 0
    for number, batch in enumerate(batches):
        watching, before = True, None
        with torch.set_grad_enabled(gradients):
            hidden = watched.hidden(batch, each)
            logits = watched.logits(hidden)
        if gradients:
            watching = False
            watched.zero_grad(set_to_none=True)
            next_token_loss(logits, batch).backward()
            grads = {
                n: torch.zeros_like(p) if p.grad is None else p.grad
                for n, p in watched.named_parameters()
            }
            for name, grad in split_experts(spec, grads).items():
                g = grad.float().abs()
                for into, value in (
                    (found.gradient, g),
                    (found.taylor, g * parts[name].float().abs()),
                ):
                    into[name] = into[name] + value if name in into else value
        total += batch.num_tokens
        progress(number + 1, len(batches))
    found.influence.extend((influence / total).tolist())
    return found


def next_token_loss(logits: Tensor, batch: SequenceBatch) -> Tensor:
    """Mean negative log-likelihood in nats of all tokens but the first of each sequence; logits [T, V]."""
    scored = ~batch.starts()[1:]
    return F.cross_entropy(logits[:-1][scored].float(), batch.token_ids[1:][scored])


def importances(
    spec: ModelSpec, parameters: Mapping[str, Tensor], importance: Importance, measured: UnitStats
) -> dict[Units, Tensor]:
    """Importance of each unit, float32 [units], by kind."""
    found = {key: torch.zeros(count) for key, count in num_units(spec).items()}
    for name, weight in split_experts(spec, parameters).items():
        of = axes(spec, name)
        if importance == "magnitude":
            score = weight.detach().float().square()
        elif importance == "taylor":
            score = measured.taylor[name]
        else:
            # Only weights that read a unit count: if they are all 0, the unit has no effect.
            if weight.dim() == 1 or name not in measured.energy:
                continue
            score = weight.detach().float().square() * measured.energy[name]
            if importance == "wactigrad":
                score = score.sqrt() * measured.gradient[name]
            of = (None, of[1])
        for dim, axis in enumerate(of):
            if axis is not None:
                _add(found, axis, score.sum(1 - dim) if score.dim() == 2 else score)
    return found


def _add(found: dict[Units, Tensor], axis: Axis, score: Tensor) -> None:
    assert axis is not None
    units, unit_of = axis
    counted = unit_of >= 0
    found[units].index_add_(0, unit_of[counted], score.cpu()[counted])


# --- Hidden width -----------------------------------------------------------------------------------------------------


def _keep_scale(
    spec: ModelSpec, values: dict[str, Tensor], kept: PruneSelection, measured: UnitStats
) -> None:
    """Scale the weights of norms over the hidden width, in place: a norm divides by √(Σx²/n), and
    both Σ and n shrink. Norms without weights are unchanged."""
    stays = kept.units[HIDDEN]
    number = {old: new for new, old in enumerate(kept.layers)}
    norms = {
        name: n
        for name, n in (("final_norm", spec.final_norm), ("embed_norm", spec.embed_norm))
        if n is not None
    }
    norms |= {
        f"layers.{i}.{name}": n for i in kept.layers for name, n in spec.layers[i].norms.items()
    }
    for name, norm in norms.items():
        if not norm.learned:
            continue
        energy = measured.energy.get(f"{name}.weight")
        share = (
            1.0 if energy is None else float(energy[stays.to(energy.device)].sum() / energy.sum())
        )
        scale = math.sqrt(share * spec.hidden_size / len(stays))
        target = name
        if name.startswith("layers."):
            _, index, stem = name.split(".")
            target = f"layers.{number[int(index)]}.{stem}"
        weight = values[f"{target}.weight"]
        weight.copy_((weight.float() + norm.weight_offset) * scale - norm.weight_offset)


def _fold_embed_scale(wanted: ModelSpec, read: ModelSpec, values: dict[str, Tensor]) -> None:
    """Compensate for families that multiply embeddings by the root of the width: the embedding
    table is scaled to cancel the change. If the head is tied to the table, the final norm is scaled
    inversely."""
    ratio = wanted.embed_scale / read.embed_scale
    if ratio == 1.0:
        return
    norm = wanted.final_norm
    if wanted.tied_embeddings and norm is None:
        raise UnsupportedModelError(
            "the embeddings' scale follows from the width, and nothing can undo it", field="hidden"
        )
    values["embed.weight"].mul_(ratio)
    if wanted.tied_embeddings and norm is not None:
        weight = values["final_norm.weight"]
        weight.copy_((weight.float() + norm.weight_offset) / ratio - norm.weight_offset)
        if norm.bias:
            values["final_norm.bias"].div_(ratio)
