"""Plans a recipe for a model: which linear layers are quantized or sparsified, in which format, and how large the checkpoint
will be.

Everything that can be checked without weights is checked here, before any are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from slipstream.compress.checkpoint import Names
from slipstream.compress.gguf.mix import GGUF, PlannedBlocks, plan_blocks
from slipstream.compress.quantize import rotate
from slipstream.compress.quantize_step import Quantize
from slipstream.compress.recipe import QAT, KVCache, Recipe, Rotate
from slipstream.compress.sparsify import check_inner
from slipstream.compress.steps import Sparsify
from slipstream.errors import ConfigError
from slipstream.model.save import check_writable
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import LayerSpec, ParallelBlock
from slipstream.spec.parameters import parameters
from slipstream.spec.scheme import WeightFormat

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ORDER = (
    "attention.qkv",
    "attention.out",
    "recurrent.in",
    "recurrent.out",
    "mlp.up",
    "mlp.down",
    "experts.up",
    "experts.down",
    "shared.up",
    "shared.down",
)
"""Order in which a layer's linear layers are compressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWeight:
    """Planned treatment of a linear layer's weight [rows, inner]. It is quantized to `fmt` by
    `settings`; None: not quantized. Until a budget of bits is allocated, `fmt` has the choice
    nearest to its average. `sparse`: it is sparsified."""

    name: str
    rows: int
    inner: int
    settings: Quantize | None
    fmt: WeightFormat | None
    sparse: bool = False

    @property
    def rounding(self) -> tuple[Quantize, WeightFormat]:
        """(settings, format) of a weight that is quantized."""
        assert self.settings is not None
        assert self.fmt is not None
        return self.settings, self.fmt


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionPlan:
    """A recipe applied to a model. Bytes are those of the checkpoint's tensors."""

    weights: tuple[PlannedWeight, ...]
    bytes_before: int
    bytes_after: int
    scale_bytes: int
    needs_text: bool
    blocks: tuple[PlannedBlocks, ...] = ()  # tensors of a GGUF file; then `weights` is empty

    def with_blocks(self, blocks: tuple[PlannedBlocks, ...]) -> CompressionPlan:
        """Plan of a GGUF file with these tensors."""
        return replace(self, blocks=blocks, bytes_after=sum(b.num_bytes for b in blocks))

    @property
    def formats(self) -> dict[str, WeightFormat]:
        """Formats of quantized weights, by parameter name."""
        return {f"{w.name}.weight": w.fmt for w in self.weights if w.fmt is not None}

    @property
    def bits_per_weight(self) -> float:
        """Mean bits over quantized weights, scales and zero points included; for a GGUF file over all matrices."""
        if matrices := [b for b in self.blocks if b.type != "F32"]:
            return 8 * sum(b.num_bytes for b in matrices) / sum(b.num_values for b in matrices)
        done = [(w, w.fmt) for w in self.weights if w.fmt is not None]
        num_bytes = sum(fmt.num_bytes(w.rows, w.inner, self.scale_bytes) for w, fmt in done)
        return 8 * num_bytes / max(1, sum(w.rows * w.inner for w, _ in done))


def plan(
    source: ModelDescription, recipe: Recipe, bits: Mapping[str, int] | None = None
) -> CompressionPlan:
    """Apply the recipe to a model. `bits`: number of bits by linear layer, as allocated within a
    budget. ConfigError or UnsupportedModelError if the recipe can't be applied."""
    source = source.taking_media(0)
    check_writable(source, inside=True)
    quantize, sparsify = recipe.one(Quantize), recipe.one(Sparsify)
    before_shapes = parameters(source.spec)
    element = TORCH_DTYPES[source.dtype].itemsize if source.dtype in TORCH_DTYPES else 2
    before = sum(math.prod(shape) for shape in before_shapes.values()) * element
    if (blocks := recipe.one(GGUF)) is not None:
        made, trains = plan_blocks(source, blocks), recipe.one(QAT) is not None
        if trains and all(tensor.type in ("F32", "F16") for tensor in made):
            raise ConfigError("qat trains rounded weights, and F16 rounds none", field="qat")
        return CompressionPlan(
            weights=(),
            bytes_before=before,
            bytes_after=0,
            scale_bytes=element,
            needs_text=trains or blocks.needs_text(made),
        ).with_blocks(made)
    if recipe.one(Rotate) is not None:
        if source.family.nested_config is not None:
            raise ConfigError(
                "rotate: the image encoder writes into the residual, too; leave rotate out",
                field="rotate",
            )
        rotate.check(source.spec)
        source = rotate.untied(source)
    shapes, spec = parameters(source.spec), source.spec
    weights = []
    for name, (rows, inner) in _product_shapes(source).items():
        settings = None if quantize is None else quantize.of(name)
        fmt = None
        if settings is not None:
            if isinstance(settings.bits, int):
                fmt = settings.format(inner)
            else:
                fmt = settings.format(
                    inner, bits[name] if bits is not None else settings.bits.nearest
                )
        sparse = sparsify is not None and sparsify.takes(name)
        weights.append(
            PlannedWeight(
                name=name, rows=rows, inner=inner, settings=settings, fmt=fmt, sparse=sparse
            )
        )
    names = [w.name for w in weights]
    if sparsify is not None:
        _check_patterns(sparsify.ignore, names)
        if not any(w.sparse for w in weights):
            raise ConfigError(
                "the recipe leaves no product to be sparsified; ignore fewer", field="ignore"
            )
        if recipe.one(QAT) is not None:
            raise ConfigError("qat would fill the zeros again; leave one of them out", field="qat")
        if recipe.one(Rotate) is not None and sparsify.ratios == "outliers":
            raise ConfigError(
                "a rotation removes the outliers; use ratios='uniform'", field="ratios"
            )
        for weight in weights:
            if weight.sparse and sparsify.pattern is not None:
                check_inner(weight.inner, sparsify.pattern)
            if weight.sparse and weight.settings is not None:
                _check_together(sparsify, weight.settings)
    if quantize is not None:
        _check_patterns((*quantize.ignore, *quantize.overrides), names)
        if not any(w.fmt for w in weights):
            raise ConfigError(
                "the recipe leaves no product to be rounded; ignore fewer", field="ignore"
            )
        if quantize.head and spec.tied_embeddings:
            raise ConfigError(
                "head: true, but the output head is the embedding table, which stays as it is",
                field="head",
            )
        Names(source).check({f"{w.name}.weight": w.fmt for w in weights if w.fmt is not None})
        _check_parallel(spec.layers, {w.name: w.fmt for w in weights})
    after = sum(math.prod(shape) for shape in shapes.values()) * element + sum(
        w.fmt.num_bytes(w.rows, w.inner, element) - w.rows * w.inner * element
        for w in weights
        if w.fmt is not None
    )
    trained = recipe.one(QAT) is not None or recipe.one(KVCache) is not None
    needs = any(step is not None and step.needs_text for step in (quantize, sparsify)) or trained
    return CompressionPlan(
        weights=tuple(weights),
        bytes_before=before,
        bytes_after=after,
        scale_bytes=element,
        needs_text=needs,
    )


def _product_shapes(source: ModelDescription) -> dict[str, tuple[int, int]]:
    found = {}
    for name, shape in parameters(source.spec).items():
        stem = name.removesuffix(".weight")
        if name == "head.weight" or stem.split(".", 2)[-1] in ORDER:
            found[stem] = (shape[0], shape[1])
    return found


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{pattern!r} names no product of this model; they are called like {names[0]!r} (with * for any text)",
                field="ignore or overrides",
            )


def _check_parallel(
    layers: Sequence[LayerSpec], formats: Mapping[str, WeightFormat | None]
) -> None:
    """Check that linear layers with the same input quantize it in the same way."""
    for i, layer in enumerate(layers):
        if isinstance(layer.block, ParallelBlock) and "mlp_norm" not in layer.norms:
            forms = {
                f.inputs if (f := formats.get(f"layers.{i}.{n}")) is not None else None
                for n in ("attention.qkv", "mlp.up")
            }
            if len(forms) > 1:
                raise ConfigError(
                    f"layer {i}: attention.qkv and mlp.up read the same inputs; give both the same format",
                    field="inputs",
                )


def _check_together(sparsify: Sparsify, quantize: Quantize) -> None:
    """Raise ConfigError for a quantization that would fill the zeros of a sparse weight."""
    together = sparsify.method == "sparsegpt" and quantize.rounding == "gptq"
    if quantize.rounding != "nearest" and not together:
        raise ConfigError(
            f"rounding={quantize.rounding!r} would fill the zeros again; take nearest, or gptq with method: sparsegpt",
            field="rounding",
        )
    if not isinstance(quantize.bits, int):
        raise ConfigError(
            "a budget of bits does not go with sparsify: give a number of bits or drop sparsify",
            field="bits",
        )
