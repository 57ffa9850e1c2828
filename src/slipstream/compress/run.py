"""Applies the layer steps of a recipe: reads a checkpoint and writes a compressed one, with one
layer's weights in memory at a time.

    bits within a budget → sparsity by layer → embeddings and head → each layer → QAT → the result

1. Each stage stores its results in the work folder. An interrupted run continues after the last
   stored stage or layer.
2. A layer is calibrated on the outputs of the compressed layers before it. Those outputs are
   computed from the written files, so that a continued run gives the same result."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.base.files import digest
from slipstream.compress.calibrate import FakeInputs, ObservingOps, Stream, load_layer
from slipstream.compress.checkpoint import (
    Names,
    WorkFolder,
    cache_config,
    fingerprint,
    quantization_config,
    stored_formats,
    untouched,
)
from slipstream.compress.gguf.mix import GGUF
from slipstream.compress.layer_steps import LayerWork, layer_steps
from slipstream.compress.planning import ORDER, TORCH_DTYPES, CompressionPlan, plan
from slipstream.compress.quantize import rotate
from slipstream.compress.quantize.mixed import choose_bits, measure
from slipstream.compress.quantize.qat import train
from slipstream.compress.quantize.rounding import QuantGrid, nearest
from slipstream.compress.quantize_step import Budget, Quantize
from slipstream.compress.recipe import QAT, KVCache, Recipe, Rotate
from slipstream.compress.sparsify import layer_ratios, outlier_share
from slipstream.compress.steps import Sparsify
from slipstream.compress.training.common import in_bfloat16
from slipstream.errors import ConfigError
from slipstream.model.load.weights import load_parameters
from slipstream.platform import num_gpus
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.parameters import parameters
from slipstream.spec.stored.quantization_config import COLUMNS_NAME, StoredFormats

Progress = Callable[[int, int], None]
Windows = Sequence[Sequence[int]]

PRODUCTS_NAME = "slipstream-products.json"
"""File next to the weights with the format of each linear layer, and its quantization error."""


def compress(
    source: ModelDescription,
    recipe: Recipe,
    out: Path,
    *,
    windows: Windows,
    device: torch.device,
    dtype: torch.dtype,
    restart: bool = False,
    progress: Progress = lambda done, total: None,
    finish: Callable[[Path], None] = lambda folder: None,
) -> CompressionPlan:
    """Write `source`, compressed by `recipe`, to the folder `out`, which must not exist.

    `windows` are token ids, cut to the model's context; `CompressionPlan.needs_text` says whether any are needed. If
    `QAT.num_windows` is set, training uses that many, and calibration the first of them. The model computes in `dtype`.
    `finish` is called with the folder before it becomes `out`; if it raises, `out` is not created and the finished work is
    kept."""
    source = source.taking_media(0)  # an image encoder is copied unchanged
    planned = plan(source, recipe)
    windows = [w[: source.spec.max_position] for w in windows]
    if planned.needs_text and not windows:
        raise ConfigError("this recipe calibrates: give windows of text", field="windows")
    text_hash = digest([list(w) for w in windows]) if planned.needs_text else ""
    identity = {
        "recipe": recipe.as_data(),
        "source": fingerprint(source),
        "text": text_hash,
        "dtype": str(dtype),
    }
    work = WorkFolder(out, identity, restart=restart)
    qat, training = recipe.one(QAT), windows
    if qat is not None and qat.num_windows is not None:
        windows, training = windows[: recipe.calibration_windows], windows[: qat.num_windows]
    if (blocks := recipe.one(GGUF)) is not None:
        from slipstream.compress.gguf.write import GGUFRun, write_gguf

        run_of_blocks = GGUFRun(source, blocks, planned.blocks, work, device, dtype, qat, training)
        written = write_gguf(
            run_of_blocks, recipe.as_data(), windows, progress=progress, finish=finish
        )
        return planned.with_blocks(written)
    run = CompressionRun(source, recipe, planned, work, device, dtype)

    num_layers = source.spec.num_layers
    done = 0 if recipe.budget is None else num_layers
    total = done + 1 + num_layers + (0 if qat is None else qat.num_steps)
    if recipe.budget is not None:
        bits = allocate_bits(run, recipe.budget, windows, lambda n, _: progress(n, total))
        run = replace(run, plan=plan(source, recipe, bits))
    sparsity = layer_sparsity(run, windows)
    text = run.stream(windows) if planned.needs_text else None
    parts = [write_ends(run)]
    progress(done := done + 1, total)
    for index in range(num_layers):
        parts.append(part := f"layer-{index:05d}")
        if work.note(part) is None:
            layer = compress_layer(run, index, text, sparsity[index])
            work.finish(part, run.tensors(layer), layer.note)
        if text is not None:
            text.advance(
                index, run.read(part), run.input_rounding(index), partial(run.load_layer, index)
            )
        progress(done := done + 1, total)
    if qat is not None:
        parts[1:] = train_layers(
            run, parts[1:], qat, training, lambda n, _: progress(done + n, total)
        )
    publish(run, parts, finish)
    return run.plan


@dataclass(frozen=True)
class CompressionRun:
    """Data shared by the stages. It does not change during a run."""

    original: ModelDescription
    recipe: Recipe
    plan: CompressionPlan
    work: WorkFolder
    device: torch.device
    dtype: torch.dtype

    @cached_property
    def rotation(self) -> Tensor | None:
        step = self.recipe.one(Rotate)
        return (
            None
            if step is None
            else rotate.rotation(self.original.spec.hidden_size, step.seed, self.device)
        )

    @cached_property
    def source(self) -> ModelDescription:
        """Description of the original model; with its own output head if the recipe rotates."""
        return self.original if self.rotation is None else rotate.untied(self.original)

    @cached_property
    def names(self) -> Names:
        return Names(self.source)

    @cached_property
    def stored(self) -> StoredFormats:
        return (
            stored_formats(self.names, self.plan.formats, [n for n, _ in self.untouched()])
            if self.plan.formats
            else StoredFormats(())
        )

    def untouched(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Yields tensors that are copied unchanged to the result. Draft layers are left out if the recipe rotates, because
        they can't read a rotated model's hidden states."""
        return iter(()) if self.rotation is not None else untouched(self.original)

    @property
    def written(self) -> torch.dtype:
        """Dtype of scales and dense weights in the checkpoint."""
        return TORCH_DTYPES.get(self.original.dtype, torch.bfloat16)

    def stream(self, windows: Windows) -> Stream:
        """The calibration text as inputs of the first layer."""
        steps = (self.recipe.one(Quantize), self.recipe.one(Sparsify))
        catch_up = max((step.catch_up for step in steps if step is not None), default=0.0)
        stream = Stream(self.original, windows, device=self.device, dtype=self.dtype)
        if self.rotation is not None:
            stream.states = [state @ self.rotation.to(state) for state in stream.states]
        stream.keep_original(catch_up)
        return stream

    def load_layer(self, index: int) -> dict[str, Tensor]:
        """The original layer in float32, rotated if the recipe rotates."""
        values = load_layer(self.original, index, self.device)
        if self.rotation is not None:
            rotate.rotate_layer(self.source.spec.layers[index], values, self.rotation)
        return values

    def read(self, part: str) -> dict[str, Tensor]:
        """Read the parameters of a written layer, by their names in the layer."""
        found = self.names.read(self.work.part(part), self.stored, device=self.device)
        return {name.split(".", 2)[2]: value for name, value in found.items()}

    def tensors(self, layer: LayerWork) -> list[tuple[str, Tensor]]:
        """Checkpoint tensors of a layer."""
        prefix = f"layers.{layer.index}."
        values = {prefix + name: value for name, value in layer.values.items()}
        rounded = {f"{prefix}{name}.weight": made for name, made in layer.rounded.items()}
        scales = {
            f"{prefix}{name}.weight": scale for name, scale in layer.note["input_scales"].items()
        }
        found = list(self.names.tensors(values, rounded, scales, self.written))
        for part, scale in layer.cache_scales.items():
            attention = (
                self.names.of(f"{prefix}attention.qkv.weight")[0]
                .removesuffix(".weight")
                .rpartition(".")[0]
            )
            found.append((f"{attention}.{part}_scale", scale))
        return found

    def input_rounding(self, index: int) -> dict[str, FakeInputs]:
        """Quantization of the inputs of a finished layer's linear layers. Slipstream quantizes
        token by token, even if the checkpoint has a static scale."""
        note = self.work.note(f"layer-{index:05d}") or {}
        found = {}
        for name in ORDER:
            fmt = self.plan.formats.get(f"layers.{index}.{name}.weight")
            if fmt is not None and fmt.inputs is not None:
                found[name] = FakeInputs(
                    fmt.inputs, columns=tuple(note.get("columns", {}).get(name, ()))
                )
        return found


# --- The stages -------------------------------------------------------------------------------------------------------


def allocate_bits(
    run: CompressionRun, budget: Budget, windows: Windows, progress: Progress
) -> dict[str, int]:
    """Choose the bits of each linear layer within the budget."""
    if (note := run.work.note("bits")) is None:
        products = {
            w.name: (w.rows, w.inner, w.settings)
            for w in run.plan.weights
            if w.settings is not None
        }
        wanted = {
            name: settings
            for name, (_, _, settings) in products.items()
            if isinstance(settings.bits, Budget)
        }
        if "head" in wanted:
            raise ConfigError(
                "a budget does not cover the head; override it with a number of bits", field="head"
            )
        costs = measure(
            run.original,
            wanted,
            budget,
            [w[: budget.context] for w in windows[: budget.num_windows]],
            device=run.device,
            dtype=run.dtype,
            written=run.written,
            progress=progress,
        )
        note = {"bits": choose_bits(products, budget, costs, run.plan.scale_bytes), "costs": costs}
        run.work.finish("bits", [], note)
    found: dict[str, int] = note["bits"]
    return found


@torch.no_grad()
def layer_sparsity(run: CompressionRun, windows: Windows) -> list[float]:
    """Fraction of zeros of each layer. With ratios="outliers" it is measured on the dense model."""
    settings, layers = run.recipe.one(Sparsify), range(run.original.spec.num_layers)
    if settings is None or settings.ratios == "uniform":
        return [0.0 if settings is None else settings.ratio for _ in layers]
    if (note := run.work.note("ratios")) is None:
        stream, shares = Stream(run.original, windows, device=run.device, dtype=run.dtype), []
        for index in layers:
            values = load_layer(run.original, index, run.device)
            wanted = [n for n in ORDER if settings.takes(f"layers.{index}.{n}")]
            stats = stream.observe(index, values, wanted, inputs={})
            weights = {n: values[f"{n}.weight"] for n in stats if "@" not in n}
            shares.append(outlier_share(weights, stats, settings.outlier))
            stream.states = stream.run(index, values, ObservingOps())
        note = {"ratios": layer_ratios(shares, settings.ratio, settings.spread)}
        run.work.finish("ratios", (), note)
    found: list[float] = note["ratios"]
    return found


def write_ends(run: CompressionRun) -> str:
    """Write embeddings, last norm and output head. Returns the name of their part."""
    if run.work.note("ends") is None:
        fmt = run.plan.formats.get("head.weight")
        # Large tables stay in their stored dtype, unless something is computed with them.
        dtype = run.written if run.rotation is None and fmt is None else torch.float32
        values = load_parameters(
            run.original,
            dtype=dtype,
            device=run.device,
            wanted=lambda n: not n.startswith("layers."),
        )
        if run.rotation is not None:
            rotate.rotate_ends(run.original.spec, values, run.rotation)
        rounded = (
            {}
            if fmt is None
            else {"head.weight": nearest(values["head.weight"], fmt, run.written, clip=True)}
        )
        run.work.finish("ends", run.names.tensors(values, rounded, {}, run.written), {})
    return "ends"


def compress_layer(
    run: CompressionRun, index: int, text: Stream | None, sparsity: float
) -> LayerWork:
    """Compress one layer by the recipe's steps."""
    prefix = f"layers.{index}."
    planned = {
        w.name.removeprefix(prefix): w
        for w in run.plan.weights
        if w.name.startswith(prefix) and (w.fmt is not None or w.sparse)
    }
    layer = LayerWork(
        index, run.source.spec.layers[index], run.load_layer(index), planned, text, sparsity
    )
    for step in layer_steps(run.recipe, run.written):
        step(layer)
    return layer


def train_layers(
    run: CompressionRun, parts: Sequence[str], qat: QAT, windows: Windows, progress: Progress
) -> list[str]:
    """Train the quantized weights of all layers together. Returns the names of the new parts, which
    are written next to the old ones."""
    files = [run.work.part(part) for part in parts]
    values = [run.names.read(file, run.stored, device=run.device) for file in files]
    grids: dict[str, QuantGrid] = {}
    for file in files:
        grids.update(run.names.read_grids(file, run.plan.formats, device=run.device))
    made = train(
        run.source,
        values,
        grids,
        windows,
        qat,
        inputs=[run.input_rounding(i) for i in range(len(files))],
        device=run.device,
        dtype=run.dtype,
        progress=progress,
    )
    trained = []
    for i in range(len(files)):
        own = {name: rounded for name, rounded in made.items() if name.startswith(f"layers.{i}.")}
        cache = [
            (n, t) for n, t in run.work.tensors([parts[i]]) if n.endswith((".k_scale", ".v_scale"))
        ]
        trained.append(part := f"trained-{i:05d}")
        run.work.finish(part, [*run.names.tensors(values[i], own, {}, run.written), *cache], {})
    return trained


def publish(run: CompressionRun, parts: Sequence[str], finish: Callable[[Path], None]) -> None:
    """Write the result from the parts."""
    cache = run.recipe.one(KVCache)
    kv = None if cache is None else cache_config(cache.form, cache.per)
    config: dict[str, Any] = {} if run.rotation is None else {"tie_word_embeddings": False}
    if run.plan.formats or kv is not None:
        config["quantization_config"] = quantization_config(run.stored, kv)
    notes = [run.work.note(f"layer-{i:05d}") or {} for i in range(run.source.spec.num_layers)]

    def finished(folder: Path) -> None:
        (folder / PRODUCTS_NAME).write_text(json.dumps(_products(run.plan, notes), indent=1) + "\n")
        if columns := _columns(run.names, notes):
            (folder / COLUMNS_NAME).write_text(json.dumps(columns) + "\n")
        finish(folder)

    run.work.publish(
        run.original,
        parts,
        config,
        run.recipe.as_data(),
        finished,
        ((name, read()) for name, read in run.untouched()),
    )


def _products(
    planned: CompressionPlan, notes: Sequence[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Format of each linear layer and the notes about it (before QAT, if there was any)."""
    keys = {"errors": "error", "error_from": "error_from", "exponents": "exponent"}
    keys |= {"zeros": "zeros", "learned": "learned"}
    found: dict[str, dict[str, Any]] = {}
    for weight in planned.weights:
        if weight.fmt is None and not weight.sparse:
            continue
        _, index, name = (*weight.name.split(".", 2), "", "")[:3]
        note = notes[int(index)] if index else {}
        own = {new: note[old][name] for old, new in keys.items() if name in note.get(old, {})}
        found[weight.name] = {"format": None if weight.fmt is None else str(weight.fmt), **own}
    return found


def zeros_of(checkpoint: Path) -> float | None:
    """Fraction of zeros in a checkpoint's sparsified linear layers; None if it has none."""
    file = checkpoint / PRODUCTS_NAME
    products = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found = {name: product["zeros"] for name, product in products.items() if "zeros" in product}
    if not found:
        return None
    shapes = parameters(read_spec(checkpoint).spec)
    sizes = {name: math.prod(shapes[f"{name}.weight"]) for name in found}
    return float(sum(sizes[name] * share for name, share in found.items()) / sum(sizes.values()))


def _columns(names: Names, notes: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """Indices of outlier columns, by the checkpoint's module names."""
    columns = {
        f"layers.{i}.{name}.weight": found
        for i, note in enumerate(notes)
        for name, found in note["columns"].items()
    }
    return {
        name.removesuffix(".weight"): columns[at.target]
        for name, at in names.places.items()
        if columns.get(at.target)
    }


def resolve_device(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Device and dtype for "auto" or given names. ConfigError if they are not available."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise ConfigError(
            f"device={device!r} is not one of auto, cpu, cuda, cuda:N", field="device"
        )
    if kind == "cuda" and int(index or 0) >= num_gpus():
        raise ConfigError(f"device={device!r}: torch sees no such GPU; use 'cpu'", field="device")
    found = torch.device(
        "cuda" if kind == "auto" and num_gpus() else "cpu" if kind == "auto" else device
    )
    if dtype == "auto":
        return found, torch.bfloat16 if in_bfloat16(found) else torch.float32
    if dtype not in TORCH_DTYPES:
        raise ConfigError(
            f"dtype={dtype!r} is not one of auto, {', '.join(TORCH_DTYPES)}", field="dtype"
        )
    return found, TORCH_DTYPES[dtype]
