"""What a recipe means for a model: which products are rounded or get zeros, in which form, and what the checkpoint will weigh.

Everything that can be known without weights is checked here, before any is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from slipstream.compress.checkpoint import Names
from slipstream.compress.quantize import rotate
from slipstream.compress.recipe import QAT, Calibrate, KVCache, Quantize, Recipe, Rotate
from slipstream.compress.sparsify import check_inner
from slipstream.compress.steps import Sparsify
from slipstream.errors import ConfigError
from slipstream.model.save import check_writable
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import LayerSpec, ParallelBlock
from slipstream.spec.parameters import parameters
from slipstream.spec.scheme import WeightFormat

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ORDER = ("attention.qkv", "attention.out", "mlp.up", "mlp.down", "experts.up", "experts.down", "shared.up", "shared.down")
"""A layer's products in the order in which they are rounded."""


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


def calibration(recipe: Recipe) -> Calibrate:
    """The recipe's, or the default."""
    found: Calibrate | None = recipe.one(Calibrate)
    return found or Calibrate()


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
