"""From a path to a model that runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch

from slipstream.errors import CheckpointError, ConfigError, OutOfMemoryError
from slipstream.kernels.ops import OpSet
from slipstream.kernels.weights import Linear
from slipstream.model.cache_scales import CacheScales
from slipstream.model.compressed import RoundedWeights, scheme_formats
from slipstream.model.decoder import Decoder
from slipstream.model.gguf_blocks import BlockWeights
from slipstream.model.mxfp4 import Mxfp4Weights
from slipstream.model.packed_cache import KeptFile, KeptWeights
from slipstream.model.weights import HeldWeights, dummy_parameters, load_parameters
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.model import AttentionSpec, ModelSpec
from slipstream.spec.native_formats import rounds
from slipstream.spec.parameters import parameters
from slipstream.spec.quantization_config import StoredQuantization
from slipstream.spec.scheme import SCHEMES, Scheme, WeightForm

LEFT_ALONE = "leave the weights as they are"
"""What helps where a scheme does not fit a model."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`weights_bytes` counts what the device holds: parameters as laid out for the ops, and position tables. `cache_scales`
    are the checkpoint's, for an 8-bit cache of the form that its description names. `forms` are the
    products', the largest first. `writer` is who writes the rounded products to a file for the next load, if they are kept."""

    description: ModelDescription
    decoder: Decoder
    weights_bytes: int
    forms: tuple[WeightForm, ...]
    cache_scales: CacheScales | None = None
    writer: Thread | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.description.spec


def load_model(
    source: Path | ModelDescription,
    *,
    ops: OpSet,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int | None = None,
    load_format: str = "auto",
    seed: int = 0,
    scheme: Scheme | None = None,
    weights_folder: Path | None = None,
) -> LoadedModel:
    """Load a checkpoint, given by its path or by what was read of it (or make random weights, `load_format="dummy"`) straight
    onto `device` in `dtype`; the layers' products are then rounded by `scheme`, one after the other, unless the checkpoint
    holds them rounded. A GGUF file's blocks are used as they are where `ops` can; else, and where a scheme rounds them anew,
    they are dequantised first; weights that compressed-tensors rounded are expanded where `ops` has no product with them. In
    `weights_folder`, if given, products that a load rounds or repacks are kept for the next one, where `ops` gains by it."""
    description = read_spec(source) if isinstance(source, Path) else source
    stored = description.quantization
    if stored is not None and stored.formats is not None:
        # Each weight is held as it is, or expanded; random ones are rounded as a checkpoint's would be.
        scheme = _dummy_scheme(stored, ops) if load_format == "dummy" else None
    elif stored is not None and stored.scheme is not None:
        scheme = SCHEMES[stored.scheme]
    if load_format not in ("auto", "dummy", description.format):
        raise CheckpointError(
            f"load_format={load_format!r}, but {description.path} is a {description.format} checkpoint", field="load_format"
        )
    if scheme is not None:
        check_scheme(description.spec, scheme, ops)
    held: HeldWeights | None = None
    cache_scales = file = kept = None
    with torch.inference_mode():
        try:
            if load_format == "dummy":
                values = dummy_parameters(description, dtype=dtype, device=device, seed=seed)
            else:
                repacks = _is_rounded(stored) or (scheme is not None and (stored is None or not stored.rounds))
                if weights_folder is not None and ops.layout is not None and repacks:
                    file = KeptFile(weights_folder, description, scheme, dtype, ops)
                    kept = file.read()
                held = _held_weights(description, ops, dtype, device, scheme, kept)
                if stored is not None and stored.kv_cache is not None:
                    cache_scales = CacheScales(description.spec, description.family.names(description.spec), device=device)
                values = load_parameters(description, dtype=dtype, device=device, held=held, cache_scales=cache_scales)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"the weights do not fit on {device}: {error}", field="model") from error
        context = max_model_len if max_model_len is not None else description.spec.max_position
        products = held.linears() if held is not None else {}
        repacked = set(products)
        if _is_rounded(stored) and load_format != "dummy":
            scheme = None  # what is not held rounded is expanded, and stays so
        decoder = Decoder(description.spec, values, ops, max_model_len=context, scheme=scheme, products=products)
    if description.gguf is not None:
        description.gguf.let_go()
    num_bytes = _bytes(decoder)
    writer = None
    if file is not None and kept is None:
        ours = {n: w for n, w in products.items() if (n in repacked if scheme is None else rounds(scheme, n))}
        writer = file.write(ours, num_bytes)
    return LoadedModel(description, decoder, num_bytes, _forms(decoder), cache_scales, writer)


def _is_rounded(stored: StoredQuantization | None) -> bool:
    """Whether a checkpoint holds products rounded in a way that may be packed as it is."""
    return stored is not None and stored.rounds and stored.method != "mxfp4"


def _held_weights(
    description: ModelDescription,
    ops: OpSet,
    dtype: torch.dtype,
    device: torch.device,
    scheme: Scheme | None,
    kept: dict[str, Linear] | None,
) -> HeldWeights | None:
    """What takes a checkpoint's rounded weights as they are, or in whose stead those of an earlier start are `kept`."""
    stored, shapes = description.quantization, parameters(description.spec)
    gguf = description.family.gguf
    if gguf is not None and description.gguf is not None:
        names = gguf.names(description.spec)
        blocks = BlockWeights(description.gguf, names, shapes, ops.block_types, dtype, scheme)
        return blocks if kept is None else KeptWeights(kept, blocks, rounded=False)
    if kept is not None:
        return KeptWeights(kept, None, rounded=_is_rounded(stored))
    if stored is not None and stored.method == "mxfp4":
        return Mxfp4Weights(shapes, SCHEMES["mxfp4"], dtype=dtype, device=device)
    if stored is None or not _is_rounded(stored):
        return None
    if stored.formats is not None:
        formats = description.held_formats(ops.rounded)
    else:
        formats = scheme_formats(shapes, stored.scheme or "")
    return RoundedWeights(shapes, formats, stored.method, dtype=dtype, device=device, columns=description.split_columns())


def _dummy_scheme(stored: StoredQuantization, ops: OpSet) -> Scheme | None:
    """What random weights are rounded by, in place of a checkpoint's that `ops` holds rounded; None if it expands all of them.
    CheckpointError if they are not all held alike."""
    if stored.formats is None or not stored.formats.products & ops.rounded:
        return None
    if stored.scheme is None:
        raise CheckpointError(
            "load_format='dummy' makes weights of one format, and this checkpoint's products have several, or some are left "
            "as they were; load its own weights (load_format='auto')",
            field="load_format",
        )
    return SCHEMES[stored.scheme]


def _schemes(ops: OpSet, *names: str) -> str:
    """Those of `names` that `ops` has products for, as a remedy."""
    found = [repr(name) for name in names if SCHEMES[name].name in ops.rounded]
    if not found:
        return LEFT_ALONE
    *most, last = found
    return f"use {', '.join(most)} or {last}" if most else f"use {last}"


def check_scheme(spec: ModelSpec, scheme: Scheme, ops: OpSet) -> None:
    """ConfigError if a product can't be cut as the scheme needs it: inputs by groups, 8-bit rows by the library's 16."""
    if scheme.experts_only and not any(p.copies > 1 for layer in spec.layers for p in layer.weight_shapes(spec.hidden_size)):
        raise ConfigError(
            f"{scheme.name} is for mixtures of experts, and the model has none; {_schemes(ops, 'int4', 'fp8', 'int8')}",
            field="quantization",
        )
    if scheme.head and spec.is_encoder:
        raise ConfigError(f"an encoder has no output head to round; use {scheme.name!r}", field="quantization")
    if scheme.inputs in ("fp8", "int8"):
        heads = [("vocab_size", spec.vocab_size)] if scheme.head else []
        kv_rows = [
            ("num_kv_heads · head_dim", a.kv_size)
            if isinstance(a, AttentionSpec)
            else ("kv_lora_rank + qk_rope_head_dim", a.head_dim)
            for a in (layer.attention for layer in spec.all_layers)
        ]
        for name, rows in (*heads, *kv_rows):
            if rows % 16:
                raise ConfigError(
                    f"{scheme.name} products need rows in multiples of 16, and the model's {name} is {rows}; {LEFT_ALONE}"
                    + (", or the head with 'fp8'" if name == "vocab_size" else ""),
                    field="quantization",
                )
    for layer in spec.all_layers:
        for product in layer.weight_shapes(spec.hidden_size):
            if scheme.experts_only and product.copies == 1:
                continue
            if product.copies > 1 and product.rows % scheme.block_rows:
                raise ConfigError(
                    f"{scheme.name} products of experts need rows in multiples of {scheme.block_rows}, and the model's have "
                    f"{product.rows}; {_schemes(ops, 'fp8', 'int8')}",
                    field="quantization",
                )
            if (inner := product.inner) % scheme.multiple:
                name = "num_heads · head_dim" if product.part == "attention" else "intermediate_size"
                name = "hidden_size" if inner == spec.hidden_size else name
                name = "q_lora_rank" if inner == getattr(layer.attention, "q_rank", None) else name
                other = _schemes(ops, "int4-g32", "fp8", "int8") if scheme.multiple > 64 else LEFT_ALONE
                raise ConfigError(
                    f"{scheme.name} products need inputs in multiples of {scheme.multiple}, and the model's {name} is "
                    f"{inner}; {other}",
                    field="quantization",
                )


def _contents(decoder: Decoder) -> Iterator[object]:
    """Everything that the decoder's parts hold, inside out or not, with repetitions."""
    waiting: list[object] = [*vars(decoder).values()]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif hasattr(value, "__dataclass_fields__"):
            waiting.extend(getattr(value, name) for name in value.__dataclass_fields__)


def _bytes(decoder: Decoder) -> int:
    """Bytes of all distinct tensors that the decoder holds, but a packed weight's stand-in."""
    tensors = (v for v in _contents(decoder) if isinstance(v, torch.Tensor) and v.device.type != "meta")
    return sum({id(t) if t.is_mkldnn else t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def _forms(decoder: Decoder) -> tuple[WeightForm, ...]:
    linears = {id(v): v for v in _contents(decoder) if isinstance(v, Linear)}
    found: dict[str, list[int]] = {}
    for w in linears.values():
        for name, num_bytes in decoder.ops.forms_of(w):
            found.setdefault(name, []).append(num_bytes)
    forms = (WeightForm(name, len(sizes), sum(sizes)) for name, sizes in found.items())
    return tuple(sorted(forms, key=lambda f: -f.num_bytes))
