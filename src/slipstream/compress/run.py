"""Carrying out a recipe: a checkpoint in, a quantised one out, layer by layer.

    for each layer: load it; rotate; move scales; round product after product; write; run the text through what was written

One layer's weights are in memory at a time, and every layer is calibrated on what the rounded ones before it give. What the
text is run through is read back from the file that was written, so that an interrupted run goes on exactly where it stood.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.compress.calibrate import FakeInputs, InputStats, ObservingOps, Stream, load_layer
from slipstream.compress.checkpoint import (
    Names,
    WorkFolder,
    cache_config,
    cache_only_config,
    fingerprint,
    quantization_config,
    stored_formats,
)
from slipstream.compress.planning import ORDER, TORCH_DTYPES, Plan, PlannedProduct, calibration, plan
from slipstream.compress.quantize import rotate
from slipstream.compress.quantize.learned import Offsets, learn
from slipstream.compress.quantize.mixed import choose_bits, measure
from slipstream.compress.quantize.qat import train
from slipstream.compress.quantize.rounding import Grid, Rounded, caught_up, fit, gptq, nearest, solved
from slipstream.compress.quantize.scaling import scale_inputs, scaled_products, search_scale
from slipstream.compress.recipe import QAT, Budget, KVCache, Quantize, Recipe, Rotate
from slipstream.compress.sparsify import layer_ratios, outlier_share, sparsegpt, sparsify_weight
from slipstream.compress.steps import Sparsify
from slipstream.errors import ConfigError
from slipstream.model.weights import load_parameters
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import MoESpec
from slipstream.spec.quantization_config import COLUMNS_NAME, StoredFormats
from slipstream.spec.scheme import FORMAT_MAX, WeightFormat

Progress = Callable[[int, int], None]

PRODUCTS_NAME = "slipstream-products.json"
"""Beside the weights: of each product its format, and what rounding it cost there."""

_logger = logging.getLogger(__name__)


def compress(
    source: ModelDescription,
    recipe: Recipe,
    out: Path,
    *,
    windows: Sequence[Sequence[int]],
    device: torch.device,
    dtype: torch.dtype,
    restart: bool = False,
    progress: Progress = lambda done, total: None,
    finish: Callable[[Path], None] = lambda folder: None,
) -> Plan:
    """Write `source` quantised by `recipe` to the folder `out`, which must not be there yet. `windows` are token ids to
    calibrate on (none are needed where `Plan.needs_text` is False), cut to the longest context of the model; where training
    asks for windows of its own (`QAT.num_windows`), it has them all and the first of them calibrate. Products run in `dtype`.
    `finish` sees the folder before it becomes `out`; if it raises, nothing is written, and what was done is kept for another
    try."""
    first = plan(source, recipe)
    windows = [w[: source.spec.max_position] for w in windows]
    if first.needs_text and not windows:
        raise ConfigError("this recipe calibrates: give windows of text", field="windows")
    text = hashlib.sha256(json.dumps([list(w) for w in windows]).encode()).hexdigest() if first.needs_text else ""
    identity = {"recipe": recipe.as_data(), "source": fingerprint(source), "text": text, "dtype": str(dtype)}
    work = WorkFolder(out, identity, restart=restart)
    training: QAT | None = recipe.one(QAT)
    everything = windows
    if training is not None and training.num_windows is not None:
        windows, everything = windows[: calibration(recipe).num_windows], windows[: training.num_windows]
    total = source.spec.num_layers + 1
    if (budget := _budget(recipe)) is not None:
        total += source.spec.num_layers
        bits = _spend(source, recipe, first, budget, work, windows, device, dtype, lambda done, _: progress(done, total))
        first = plan(source, recipe, bits)
    skipped = total - source.spec.num_layers - 1
    if training is not None:
        total += training.num_steps
    job = _Job(source, recipe, first, work, windows if first.needs_text else (), device, dtype)
    job.choose_ratios(windows)
    job.write_ends()
    progress(skipped + 1, total)
    for index in range(source.spec.num_layers):
        job.do_layer(index)
        progress(skipped + index + 2, total)
    if training is not None:
        job.train(training, everything, lambda done, _: progress(skipped + 1 + source.spec.num_layers + done, total))
    job.publish(finish)
    return job.plan


def _budget(recipe: Recipe) -> Budget | None:
    quantize: Quantize | None = recipe.one(Quantize)
    return quantize.bits if quantize is not None and isinstance(quantize.bits, Budget) else None


def _spend(
    source: ModelDescription,
    recipe: Recipe,
    first: Plan,
    budget: Budget,
    work: WorkFolder,
    windows: Sequence[Sequence[int]],
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> dict[str, int]:
    """The bits of each product; found once, and kept in the work folder."""
    products = {p.name: (p.rows, p.inner, p.settings) for p in first.products if p.settings is not None}
    if (note := work.note("bits")) is None:
        wanted = {name: settings for name, (_, _, settings) in products.items() if isinstance(settings.bits, Budget)}
        if "head" in wanted:
            raise ConfigError("a budget does not cover the head; override it with a number of bits", field="head")
        costs = measure(
            source,
            wanted,
            budget,
            [w[: budget.context] for w in windows[: budget.num_windows]],
            device=device,
            dtype=dtype,
            written=TORCH_DTYPES.get(source.dtype, torch.bfloat16),
            progress=progress,
        )
        note = {"bits": choose_bits(products, budget, costs, first.scale_bytes), "costs": costs}
        work.finish("bits", [], note)
    found: dict[str, int] = note["bits"]
    return found


class _Job:
    """One run of `compress`."""

    def __init__(
        self,
        source: ModelDescription,
        recipe: Recipe,
        plan: Plan,
        work: WorkFolder,
        windows: Sequence[Sequence[int]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.original, self.recipe, self.plan, self.work, self.device = source, recipe, plan, work, device
        turn: Rotate | None = recipe.one(Rotate)
        self.turn = None if turn is None else rotate.rotation(source.spec.hidden_size, turn.seed, device)
        self.source = source if turn is None else rotate.untied(source)
        self.names = Names(self.source)
        self.written = TORCH_DTYPES.get(source.dtype, torch.bfloat16)
        self.quantize: Quantize | None = recipe.one(Quantize)
        self.sparsify: Sparsify | None = recipe.one(Sparsify)
        self.ratios: Sequence[float] = ()
        self.cache: KVCache | None = recipe.one(KVCache)
        self.formats = plan.formats
        self.stored = stored_formats(self.names, self.formats) if self.formats else StoredFormats(())
        self.stream = Stream(source, windows, device=device, dtype=dtype) if windows else None
        if self.stream is not None and self.turn is not None:
            self.stream.states = [state @ self.turn.to(state) for state in self.stream.states]
        self.catch_up = max((step.catch_up for step in (self.quantize, self.sparsify) if step is not None), default=0.0)
        self.exact = list(self.stream.states) if self.stream is not None and self.catch_up else []
        self.dtype = dtype
        self.parts = ["ends", *(f"layer-{i:05d}" for i in range(source.spec.num_layers))]

    @torch.no_grad()
    def choose_ratios(self, windows: Sequence[Sequence[int]]) -> None:
        """Each layer's share of zeros, from the dense model where outliers decide."""
        s, spec = self.sparsify, self.source.spec
        if s is None or s.ratios == "uniform":
            self.ratios = [0.0 if s is None else s.ratio] * spec.num_layers
            return
        if (note := self.work.note("ratios")) is None:
            stream, shares = Stream(self.original, windows, device=self.device, dtype=self.dtype), []
            for index in range(spec.num_layers):
                values = load_layer(self.original, index, self.device)
                stats = stream.observe(index, values, [n for n in ORDER if s.takes(f"layers.{index}.{n}")], inputs={})
                shares.append(outlier_share({n: values[f"{n}.weight"] for n in stats if "@" not in n}, stats, s.outlier))
                stream.states = stream.run(index, values, ObservingOps())
            note = {"ratios": layer_ratios(shares, s.ratio, s.spread)}
            self.work.finish("ratios", (), note)
        self.ratios = note["ratios"]

    def write_ends(self) -> None:
        """Embeddings, last norm and output head."""
        if self.work.note("ends") is not None:
            return
        # Large tables stay in the type they are written in, unless something is computed with them.
        dtype = torch.float32 if self.turn is not None or "head.weight" in self.formats else self.written
        values = load_parameters(self.original, dtype=dtype, device=self.device, wanted=lambda n: not n.startswith("layers."))
        if self.turn is not None:
            rotate.rotate_ends(self.original.spec, values, self.turn)
        rounded = {}
        if (fmt := self.formats.get("head.weight")) is not None:
            rounded["head.weight"] = nearest(values["head.weight"], fmt, self.written, clip=True)
        self.work.finish("ends", self.names.tensors(values, rounded, {}, self.written), {})

    def do_layer(self, index: int) -> None:
        """Round a layer, if that is not done yet, and run the text through it."""
        part, prefix = f"layer-{index:05d}", f"layers.{index}."
        if self.work.note(part) is None:
            values = self.load(index)
            rounded, note = self.round_layer(index, values)
            whole = {prefix + name: value for name, value in values.items()}
            scales = {f"{prefix}{name}.weight": scale for name, scale in note["input_scales"].items()}
            tensors = [*self.names.tensors(whole, rounded, scales, self.written), *self.cache_scales(index, values)]
            self.work.finish(part, tensors, note)
        if self.stream is not None:
            read = self.names.read(self.work.part(part), self.stored, device=self.device)
            values = {name.removeprefix(prefix): value for name, value in read.items()}
            self.stream.states = self.stream.run(index, values, ObservingOps(inputs=self.fake_inputs(index)))
            if self.catch_up:
                self.exact = self.stream.run(index, self.load(index), ObservingOps(), self.exact)

    def load(self, index: int) -> dict[str, Tensor]:
        """A layer of the original, turned if the residual is."""
        values = load_layer(self.original, index, self.device)
        if self.turn is not None:
            rotate.rotate_layer(self.source.spec.layers[index], values, self.turn)
        return values

    def fake_inputs(self, index: int) -> dict[str, FakeInputs]:
        """How the inputs of the layer's products are rounded when it runs."""
        found, note = {}, self.work.note(f"layer-{index:05d}")
        for name in ORDER:
            fmt = self.formats.get(f"layers.{index}.{name}.weight")
            if fmt is not None and fmt.inputs is not None:
                columns = note["columns"].get(name, ()) if note is not None else ()
                # By token also where a scale is written: as Slipstream runs it.
                found[name] = FakeInputs(fmt.inputs, columns=tuple(columns))
        return found

    @torch.no_grad()
    def round_layer(self, index: int, values: dict[str, Tensor]) -> tuple[dict[str, Rounded], dict[str, Any]]:
        """(weights by our names, what to note). `values` become what the layer computes with."""
        prefix = f"layers.{index}."
        todo = {
            p.name.removeprefix(prefix): p
            for p in self.plan.products
            if p.name.startswith(prefix) and (p.fmt is not None or p.sparse)
        }
        note: dict[str, Any] = {"exponents": {}, "input_scales": {}, "errors": {}, "zeros": {}, "learned": {}, "columns": {}}
        rounded: dict[str, Rounded] = {}
        if self.quantize is not None and self.quantize.scaling is not None:
            self.move_scales(index, values, {name: p for name, p in todo.items() if p.fmt is not None}, note)
        groups = [[name] for name in ORDER if name in todo]
        if self.quantize is not None and not self.quantize.true_sequential:
            groups = [[name for group in groups for name in group]] if groups else []
        exact = dict(values)
        original = (exact, self.exact) if self.catch_up else None
        begun: dict[str, Offsets] = {}  # of the products whose rounding is learned, together, when all are begun
        done: dict[str, FakeInputs] = {}
        for group in groups:
            stats: Mapping[str, InputStats] = {}
            if self.stream is not None:
                stats = self.stream.observe(index, values, group, inputs=done, original=original)
            for name in group:
                product = todo[name]
                before = values[f"{name}.weight"]
                if product.settings is not None and product.settings.rounding == "learned":
                    begun[name] = self.begin(product, before, stats.get(name))
                    made: Rounded | Tensor = begun[name].rounded()
                else:
                    made = self.make_product(index, name, product, before, stats)
                if isinstance(made, Rounded):
                    rounded[f"{prefix}{name}.weight"] = made
                    values[f"{name}.weight"] = made.numbers()
                else:
                    values[f"{name}.weight"] = made.to(self.written).float()
                if product.sparse:
                    note["zeros"][name] = float((values[f"{name}.weight"] == 0).float().mean())
                if (own := stats.get(name)) is not None:
                    note["errors"][name] = relative_error(before, values[f"{name}.weight"], own)
                if product.fmt is not None and product.fmt.inputs is not None:
                    if self.quantize is not None and self.quantize.outliers is not None and name in stats:
                        note["columns"][name] = outlier_columns(stats[name].absmax, self.quantize.outliers)
                    done[name] = FakeInputs(product.fmt.inputs, columns=tuple(note["columns"].get(name, ())))
                if product.fmt is not None and product.fmt.static_inputs:
                    note["input_scales"][name] = float(stats[name].absmax.max()) / FORMAT_MAX[product.fmt.inputs or "int8"]
        if begun:
            learned, left = self.learn(index, exact, values, begun, done)
            if left == 1.0:
                _logger.warning("layer %d: what was learned is no better than where it began, which stays", index)
            for name, found in learned.items():
                rounded[f"{prefix}{name}.weight"] = found
                values[f"{name}.weight"] = found.numbers()
                note["learned"][name] = left
                note["errors"].pop(name, None)  # it was where learning began
        return rounded, note

    def begin(self, product: PlannedProduct, weight: Tensor, stats: InputStats | None) -> Offsets:
        """Where learning begins: at GPTQ's result, or, as experts do, to nearest."""
        settings, fmt = product.settings, product.fmt
        assert settings is not None
        assert fmt is not None
        if stats is None or settings.begin == "nearest":
            return Offsets.fitted(weight, fmt, self.written, clip=settings.clip)
        made, met = solved(
            weight, fmt, self.written, stats, damping=settings.damping, act_order=settings.act_order, clip=settings.clip
        )
        return Offsets.of(met, made.grid)

    def learn(
        self,
        index: int,
        exact: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        begun: Mapping[str, Offsets],
        inputs: Mapping[str, FakeInputs],
    ) -> tuple[dict[str, Rounded], float]:
        """What was begun, learned; `exact` is the layer before rounding, `values` what it has now."""
        assert self.stream is not None
        assert self.quantize is not None
        q, states = self.quantize, None
        if self.catch_up:
            states = [torch.lerp(now, was, self.catch_up) for now, was in zip(self.stream.states, self.exact, strict=True)]
        return learn(
            self.stream,
            index,
            exact,
            values,
            begun,
            inputs=inputs,
            num_steps=q.num_steps,
            step_tokens=q.step_tokens,
            states=states,
        )

    def move_scales(
        self, index: int, values: dict[str, Tensor], todo: Mapping[str, PlannedProduct], note: dict[str, Any]
    ) -> None:
        assert self.stream is not None
        assert self.quantize is not None
        layer = self.source.spec.layers[index]
        prefix = f"layers.{index}."
        wanted = dict(scaled_products(layer, self.quantize, prefix))
        stats = self.stream.observe(index, values, [n for n in ORDER if n in wanted], inputs={})
        for name, fold in wanted.items():
            product = todo[name]
            assert product.settings is not None
            assert product.fmt is not None
            weight = values[f"{name}.weight"]
            s, exponent = search_scale(weight, stats[name], fold, product.settings, product.fmt, self.written)
            note["exponents"][name] = exponent
            if exponent:
                scale_inputs(values, name, fold, s, layer.norms, self.written)

    def make_product(
        self, index: int, name: str, product: PlannedProduct, weight: Tensor, stats: Mapping[str, InputStats]
    ) -> Rounded | Tensor:
        """A layer's product as it is written; of experts one after another, those that no token reached by their weights."""
        mlp = self.source.spec.layers[index].mlp
        if name.startswith("experts.") and isinstance(mlp, MoESpec):
            made = [
                self.make_weight(index, product, w, stats.get(f"{name}@{i}"))
                for i, w in enumerate(weight.chunk(mlp.num_experts))
            ]
            parts = [p for p in made if isinstance(p, Rounded)]
            if not parts:
                return torch.cat([p for p in made if isinstance(p, Tensor)])
            fmt = parts[0].fmt
            zeros = [p.grid.zeros for p in parts if p.grid.zeros is not None]
            grid = Grid(fmt, torch.cat([p.grid.scales for p in parts]), torch.cat(zeros) if zeros else None)
            return Rounded(grid, torch.cat([p.codes.view(torch.int8) for p in parts]).view(parts[0].codes.dtype))
        return self.make_weight(index, product, weight, stats.get(name))

    def make_weight(self, index: int, product: PlannedProduct, weight: Tensor, stats: InputStats | None) -> Rounded | Tensor:
        settings, fmt, sparse = product.settings, product.fmt, self.sparsify if product.sparse else None
        if stats is not None and (settings is not None or sparse is not None):
            damping = sparse.damping if settings is None and sparse is not None else (settings or Quantize()).damping
            weight = caught_up(weight, stats, self.catch_up, damping=damping)
        if sparse is None:
            return weight if settings is None or fmt is None else _round(weight, settings, fmt, self.written, stats)
        ratio = self.ratios[index]
        if settings is not None and fmt is not None and settings.rounding == "gptq" and stats is not None:
            # One solution for zeros and codes: what either costs goes to the columns after it.
            grid = fit(weight, fmt, self.written, clip=settings.clip, importance=stats.mean_square)
            found = sparsegpt(weight, stats, ratio, sparse.pattern, damping=sparse.damping, grid=grid)
            return Rounded(grid, grid.codes(found))
        weight = sparsify_weight(weight, sparse, stats, ratio)
        if settings is None or fmt is None:
            return weight
        return nearest(weight, fmt, self.written, clip=settings.clip, stats=stats)

    def cache_scales(self, index: int, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """k_scale and v_scale beside the attention's projections, as `model.cache_scales` reads them."""
        if self.cache is None:
            return
        assert self.stream is not None
        module = self.names.of(f"layers.{index}.attention.qkv.weight")[0].removesuffix(".weight").rpartition(".")[0]
        for part, top in zip(("k", "v"), self.stream.cache_range(index, values), strict=True):
            scale = (top if self.cache.per == "head" else top.max()[None]) * self.cache.margin / FORMAT_MAX[self.cache.form]
            scale = scale.clamp(min=1e-6).to(self.written)
            yield f"{module}.{part}_scale", scale[:, None, None] if self.cache.per == "head" else scale

    def train(self, step: QAT, windows: Sequence[Sequence[int]], progress: Progress) -> None:
        """Train what was rounded, and write the layers anew, beside what they were."""
        device, layers = self.device, range(self.source.spec.num_layers)
        files = [self.work.part(part) for part in self.parts[1:]]
        values = [self.names.read(file, self.stored, device=device) for file in files]
        grids: dict[str, Grid] = {}
        for file in files:
            grids.update(self.names.read_grids(file, self.formats, device=device))
        made = train(
            self.source,
            values,
            grids,
            windows,
            step,
            inputs=[self.fake_inputs(i) for i in layers],
            device=device,
            dtype=self.dtype,
            progress=progress,
        )
        for i in layers:
            part, cache = f"trained-{i:05d}", self.cache_tensors(files[i])
            own = {name: rounded for name, rounded in made.items() if name.startswith(f"layers.{i}.")}
            self.work.finish(part, [*self.names.tensors(values[i], own, {}, self.written), *cache], {})
            self.parts[1 + i] = part

    def cache_tensors(self, file: Path) -> list[tuple[str, Tensor]]:
        """The scales of a KV cache that are in a part."""
        from safetensors import safe_open

        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.keys() if name.endswith((".k_scale", ".v_scale"))]  # noqa: SIM118 (no dict)
            return [(name, opened.get_tensor(name)) for name in names]

    def publish(self, finish: Callable[[Path], None]) -> None:
        kv = None if self.cache is None else cache_config(self.cache.form, self.cache.per)
        config: dict[str, Any] = {}
        if self.formats:
            config["quantization_config"] = quantization_config(self.stored, kv)
        elif kv is not None:
            config["quantization_config"] = cache_only_config(kv)
        if self.turn is not None:
            config["tie_word_embeddings"] = False

        def finished(folder: Path) -> None:
            (folder / PRODUCTS_NAME).write_text(json.dumps(self.products(), indent=1) + "\n")
            if columns := self.columns():
                (folder / COLUMNS_NAME).write_text(json.dumps(columns) + "\n")
            finish(folder)

        self.work.publish(self.original, self.parts, config, self.recipe.as_data(), finished)

    def products(self) -> dict[str, dict[str, Any]]:
        """What was noted of each product, by our names; before training, where there was any."""
        found: dict[str, dict[str, Any]] = {}
        keys = {"errors": "error", "exponents": "exponent", "zeros": "zeros", "learned": "learned"}
        for product in self.plan.products:
            if product.fmt is None and not product.sparse:
                continue
            _, index, name = (*product.name.split(".", 2), "", "")[:3]
            note = (self.work.note(f"layer-{int(index):05d}") if index else None) or {}
            own = {new: note[old][name] for old, new in keys.items() if name in note.get(old, {})}
            found[product.name] = {"format": None if product.fmt is None else str(product.fmt), **own}
        return found

    def columns(self) -> dict[str, list[int]]:
        """By the checkpoint's modules, the inputs that keep the model's type."""
        noted: dict[str, list[int]] = {}
        for index in range(self.source.spec.num_layers):
            note = self.work.note(f"layer-{index:05d}") or {}
            noted.update({f"layers.{index}.{name}.weight": columns for name, columns in note["columns"].items() if columns})
        return {name.removesuffix(".weight"): noted[at.target] for name, at in self.names.places.items() if at.target in noted}


def _round(weight: Tensor, settings: Quantize, fmt: WeightFormat, dtype: torch.dtype, stats: InputStats | None) -> Rounded:
    if settings.rounding == "gptq" and stats is not None:
        return gptq(weight, fmt, dtype, stats, damping=settings.damping, act_order=settings.act_order, clip=settings.clip)
    return nearest(weight, fmt, dtype, clip=settings.clip, stats=stats)


def outlier_columns(absmax: Tensor, threshold: float) -> list[int]:
    """The inputs [in] that reach the threshold, and of the others the largest, up to a multiple of 16, which products like."""
    count = int((absmax >= threshold).sum())
    return sorted(absmax.topk(min(len(absmax), -(-count // 16) * 16)).indices.tolist())


def relative_error(before: Tensor, after: Tensor, stats: InputStats) -> float:
    """|(W' − W) x|² / |W x|² over the calibration text."""
    d = after - before
    return float(((d @ stats.hessian) * d).sum() / ((before @ stats.hessian) * before).sum().clamp(min=1e-30))


def place(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Where to compute, and in which type, of "auto" or names. ConfigError if they are not to be had."""
    kind, _, index = device.partition(":")
    has_gpu = torch.cuda.is_available()
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise ConfigError(f"device={device!r} is not one of auto, cpu, cuda, cuda:N", field="device")
    if kind == "cuda" and (not has_gpu or int(index or 0) >= torch.cuda.device_count()):
        raise ConfigError(f"device={device!r}: torch sees no such GPU; use 'cpu'", field="device")
    found = torch.device("cuda" if kind == "auto" and has_gpu else "cpu" if kind == "auto" else device)
    if dtype == "auto":
        return found, torch.float32 if found.type == "cpu" else torch.bfloat16
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of auto, {', '.join(TORCH_DTYPES)}", field="dtype")
    return found, TORCH_DTYPES[dtype]
