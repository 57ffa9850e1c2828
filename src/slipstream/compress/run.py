"""Carrying out a recipe: a checkpoint in, a quantised one out, layer by layer.

    for each layer: load it; rotate; move scales; round product after product; write; run the text through what was written

One layer's weights are in memory at a time, and every layer is calibrated on what the rounded ones before it give. What the
text is run through is read back from the file that was written, so that an interrupted run goes on exactly where it stood.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from slipstream.compress.quantize import rotate
from slipstream.compress.quantize.learned import Offsets, learn
from slipstream.compress.quantize.mixed import choose_bits, measure
from slipstream.compress.quantize.qat import train
from slipstream.compress.quantize.rounding import Grid, Rounded, caught_up, fit, gptq, nearest, solved
from slipstream.compress.quantize.scaling import scale_inputs, scaled_products, search_scale
from slipstream.compress.recipe import QAT, Budget, Calibrate, KVCache, Quantize, Recipe, Rotate
from slipstream.compress.sparsify import check_inner, layer_ratios, outlier_share, sparsegpt, sparsify_weight
from slipstream.compress.steps import Sparsify
from slipstream.errors import ConfigError
from slipstream.model.description import ModelDescription
from slipstream.model.parameters import parameters
from slipstream.model.quantization_config import COLUMNS_NAME, StoredFormats
from slipstream.model.save import check_writable
from slipstream.model.scheme import FORMAT_MAX, WeightFormat
from slipstream.model.spec import LayerSpec, MoESpec, ParallelBlock
from slipstream.model.weights import load_parameters

Progress = Callable[[int, int], None]
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ORDER = ("attention.qkv", "attention.out", "mlp.up", "mlp.down", "experts.up", "experts.down", "shared.up", "shared.down")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProduct:
    """`settings` None: it is not rounded. Before a budget of bits is spent `fmt` has the number of bits that is next to it.
    `sparse`: it gets zeros."""

    name: str
    rows: int
    inner: int
    settings: Quantize | None
    fmt: WeightFormat | None
    sparse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a recipe means for a model. Bytes are those of the tensors in the checkpoint."""

    products: tuple[PlannedProduct, ...]
    bytes_before: int
    bytes_after: int
    scale_bytes: int
    needs_text: bool

    @property
    def formats(self) -> dict[str, WeightFormat]:
        """By the names of weights."""
        return {f"{p.name}.weight": p.fmt for p in self.products if p.fmt is not None}

    @property
    def bits_per_weight(self) -> float:
        """Of the products that are rounded, scales and zero points included."""
        done = [p for p in self.products if p.fmt is not None]
        num_bytes = sum(p.fmt.num_bytes(p.rows, p.inner, self.scale_bytes) for p in done if p.fmt is not None)
        return 8 * num_bytes / max(1, sum(p.rows * p.inner for p in done))


def plan(source: ModelDescription, recipe: Recipe, bits: Mapping[str, int] | None = None) -> Plan:
    """ConfigError or UnsupportedModelError if the recipe can't be carried out on the model. `bits` are a budget's, by
    product."""
    check_writable(source)
    quantize: Quantize | None = recipe.one(Quantize)
    sparsify: Sparsify | None = recipe.one(Sparsify)
    before_shapes = parameters(source.spec)
    if recipe.one(Rotate) is not None:
        rotate.check(source.spec)
        source = rotate.untied(source)
    shapes, spec = parameters(source.spec), source.spec
    element = TORCH_DTYPES[source.dtype].itemsize if source.dtype in TORCH_DTYPES else 2
    products = []
    for name, (rows, inner) in _product_shapes(source).items():
        settings = None if quantize is None else quantize.of(name)
        fmt = None
        if settings is not None:
            if isinstance(settings.bits, int):
                fmt = settings.format(inner)
            else:
                fmt = settings.format(inner, bits[name] if bits is not None else settings.bits.nearest)
        sparse = sparsify is not None and sparsify.takes(name)
        products.append(PlannedProduct(name=name, rows=rows, inner=inner, settings=settings, fmt=fmt, sparse=sparse))
    if sparsify is not None:
        _check_patterns(sparsify.ignore, [p.name for p in products])
        if not any(p.sparse for p in products):
            raise ConfigError("the recipe leaves no product to be sparsified; ignore fewer", field="ignore")
        if recipe.one(QAT) is not None:
            raise ConfigError("qat would fill the zeros again; leave one of them out", field="qat")
        if recipe.one(Rotate) is not None and sparsify.ratios == "outliers":
            raise ConfigError("a rotation takes the outliers away; take ratios='uniform'", field="ratios")
        for product in products:
            if product.sparse and sparsify.pattern is not None:
                check_inner(product.inner, sparsify.pattern)
            if product.sparse and product.settings is not None:
                _check_together(sparsify, product.settings)
    if quantize is not None:
        patterns = (*quantize.ignore, *quantize.overrides)
        _check_patterns(patterns, [p.name for p in products])
        if not any(p.fmt for p in products):
            raise ConfigError("the recipe leaves no product to be rounded; ignore fewer", field="ignore")
        if quantize.head and spec.tied_embeddings:
            raise ConfigError("head: true, but the output head is the embedding table, which stays as it is", field="head")
        Names(source).check(f"{p.name}.weight" for p in products if p.fmt is not None)
        _check_parallel(spec.layers, {p.name: p.fmt for p in products})
    before = sum(math.prod(shape) for shape in before_shapes.values()) * element
    after = sum(math.prod(shape) for shape in shapes.values()) * element + sum(
        p.fmt.num_bytes(p.rows, p.inner, element) - p.rows * p.inner * element for p in products if p.fmt is not None
    )
    trained = recipe.one(QAT) is not None or recipe.one(KVCache) is not None
    needs = any(step is not None and step.needs_text for step in (quantize, sparsify)) or trained
    return Plan(products=tuple(products), bytes_before=before, bytes_after=after, scale_bytes=element, needs_text=needs)


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
        note: dict[str, Any] = {"exponents": {}, "input_scales": {}, "errors": {}, "zeros": {}, "columns": {}}
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
        for name, found in self.learn(index, exact, values, begun, done).items():
            rounded[f"{prefix}{name}.weight"] = found
            values[f"{name}.weight"] = found.numbers()
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
    ) -> dict[str, Rounded]:
        """What was begun, learned; `exact` is the layer before rounding, `values` what it has now."""
        if not begun:
            return {}
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
            if columns := self.columns():
                (folder / COLUMNS_NAME).write_text(json.dumps(columns) + "\n")
            finish(folder)

        self.work.publish(self.original, self.parts, config, self.recipe.as_data(), finished)

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


def _product_shapes(source: ModelDescription) -> dict[str, tuple[int, int]]:
    found = {}
    for name, shape in parameters(source.spec).items():
        stem = name.removesuffix(".weight")
        if name == "head.weight" or stem.split(".", 2)[-1] in ORDER:
            found[stem] = (shape[0], shape[1])
    return found


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    from fnmatch import fnmatchcase

    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{pattern!r} names no product of this model; they are called like {names[0]!r} (with * for any text)",
                field="ignore or overrides",
            )


def _check_parallel(layers: Sequence[LayerSpec], formats: Mapping[str, WeightFormat | None]) -> None:
    """Two products that read one norm's result need it in one form."""
    for i, layer in enumerate(layers):
        if isinstance(layer.block, ParallelBlock) and "mlp_norm" not in layer.norms:
            forms = {
                f.inputs if (f := formats.get(f"layers.{i}.{n}")) is not None else None for n in ("attention.qkv", "mlp.up")
            }
            if len(forms) > 1:
                raise ConfigError(
                    f"layer {i}: attention.qkv and mlp.up read the same inputs; give both one form", field="inputs"
                )


def _check_together(sparsify: Sparsify, quantize: Quantize) -> None:
    """Rounding must leave zeros where they are."""
    together = sparsify.method == "sparsegpt" and quantize.rounding == "gptq"
    if quantize.rounding != "nearest" and not together:
        raise ConfigError(
            f"rounding={quantize.rounding!r} would fill the zeros again; take nearest, or gptq with method: sparsegpt",
            field="rounding",
        )
    if not isinstance(quantize.bits, int):
        raise ConfigError("a budget of bits knows nothing of zeros; say how many bits, or leave sparsify out", field="bits")


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


def calibration(recipe: Recipe) -> Calibrate:
    """The recipe's, or the default."""
    found: Calibrate | None = recipe.one(Calibrate)
    return found or Calibrate()
