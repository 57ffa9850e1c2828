"""A loaded model, of tensors or arrays, and the schemes that fit it. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import CheckpointError, ConfigError
from slipstream.kernels.weights.forms import Linear
from slipstream.model.decoder import Decoder
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import AttentionSpec, ModelSpec
from slipstream.spec.scheme import SCHEMES, Scheme, WeightForm
from slipstream.spec.stored.quantization_config import StoredQuantization

if TYPE_CHECKING:
    from slipstream.kernels.cpu.host_ops import HostOps
    from slipstream.kernels.ops import OpSet
    from slipstream.model.load.cache_scales import CacheScales
    from slipstream.model.media import MediaTower

LEFT_ALONE = "leave the weights as they are"
"""Remedy in errors about a scheme that does not fit a model."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model.

    `spec`: the description's, or a rank's part of it. `weights_bytes`: bytes on the device:
    parameters as laid out for the ops, and position tables. `forms`: the linear layers' formats,
    the one with the most bytes first. `cache_scales`: the checkpoint's, for an 8-bit cache of the
    format that its description names. `writer`: the thread that writes quantized weights to a file
    for the next load, if they are kept. `tower`: the image or audio encoder, if the model has one.
    `host_bytes`: bytes of experts in host memory next to a GPU (`kernels.experts.host`).
    """

    description: ModelDescription
    spec: ModelSpec
    decoder: Decoder
    weights_bytes: int
    forms: tuple[WeightForm, ...]
    cache_scales: CacheScales | None = None
    writer: Thread | None = None
    tower: MediaTower | None = None
    host_bytes: int = 0


def is_rounded(stored: StoredQuantization | None) -> bool:
    """Whether a checkpoint holds linear layers quantized in a format that can be packed without
    change."""
    return stored is not None and stored.rounds and stored.method != "mxfp4"


def dummy_scheme(stored: StoredQuantization, ops: OpSet | HostOps) -> Scheme | None:
    """The scheme for random weights that replace a checkpoint's quantized ones; None if `ops` would
    expand all of them.

    CheckpointError if the weights do not all have the same format.
    """
    if stored.formats is None or not stored.formats.products & ops.rounded:
        return None
    if stored.scheme is None:
        raise CheckpointError(
            "load_format='dummy' makes weights of one format, and this checkpoint's products have several, or some are left "
            "as they were; load its own weights (load_format='auto')",
            field="load_format",
        )
    return SCHEMES[stored.scheme]


def _schemes(ops: OpSet | HostOps, *names: str) -> str:
    """Text of a remedy: to use one of the schemes `names` that `ops` supports."""
    found = [repr(name) for name in names if SCHEMES[name].name in ops.rounded]
    if not found:
        return LEFT_ALONE
    *most, last = found
    return f"use {', '.join(most)} or {last}" if most else f"use {last}"


def check_scheme(spec: ModelSpec, scheme: Scheme, ops: OpSet | HostOps, *, ranks: int = 1) -> None:
    """Checks that every linear layer's shape fits the scheme: inputs divisible by its group size,
    rows of 8-bit weights by 16, as the library requires.

    With several `ranks`, `spec` is one rank's part. ConfigError names the size at fault.
    """
    try:
        _check_scheme(spec, scheme, ops)
    except ConfigError as error:
        if ranks == 1:
            raise
        raise ConfigError(
            f"each of {ranks} ranks has a part of the model, and for that part {error}",
            field=error.field,
        ) from None


def _check_scheme(spec: ModelSpec, scheme: Scheme, ops: OpSet | HostOps) -> None:
    if scheme.experts_only and not any(
        p.copies > 1 for layer in spec.layers for p in layer.weight_shapes(spec.hidden_size)
    ):
        raise ConfigError(
            f"{scheme.name} is for mixtures of experts, and the model has none; {_schemes(ops, 'int4', 'fp8', 'int8')}",
            field="quantization",
        )
    if scheme.head and spec.is_encoder:
        raise ConfigError(
            f"an encoder has no output head to round; use {scheme.name!r}", field="quantization"
        )
    if scheme.inputs in ("fp8", "int8") or (
        scheme.name in ("nvfp4", "mxfp4") and not scheme.experts_only
    ):
        heads = [("vocab_size", spec.vocab_size)] if scheme.head else []
        kv_rows = [
            ("num_kv_heads · head_dim", a.kv_size)
            if isinstance(a, AttentionSpec)
            else ("kv_lora_rank + qk_rope_head_dim", a.head_dim)
            for a in (layer.attention for layer in spec.all_layers)
            if a is not None
        ]
        gates = [
            ("num_attention_heads", a.gate_size)
            for a in (layer.attention for layer in spec.all_layers)
            if isinstance(a, AttentionSpec) and a.gated == "head"
        ]
        for name, rows in (*heads, *kv_rows, *gates):
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
                name = (
                    "num_heads · head_dim" if product.part == "attention" else "intermediate_size"
                )
                name = "hidden_size" if inner == spec.hidden_size else name
                name = "q_lora_rank" if inner == getattr(layer.attention, "q_rank", None) else name
                other = (
                    _schemes(ops, "int4-g32", "fp8", "int8") if scheme.multiple > 64 else LEFT_ALONE
                )
                raise ConfigError(
                    f"{scheme.name} products need inputs in multiples of {scheme.multiple}, and the model's {name} is "
                    f"{inner}; {other}",
                    field="quantization",
                )


_ATOMS = frozenset((type(None), bool, int, float, str))


def _contents(*values: object) -> Iterator[object]:
    """Yields everything that the values contain, at any depth, except numbers and strings. Each
    object is yielded once."""
    waiting: list[object] = [*values]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if type(value) in _ATOMS:  # true for most values
            continue
        yield value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif hasattr(value, "__dataclass_fields__"):
            waiting.extend(getattr(value, name) for name in value.__dataclass_fields__)


def decoder_bytes(decoder: Decoder) -> int:
    """Bytes of all distinct tensors or arrays of the decoder on its device. Placeholders of packed
    weights don't count."""
    return tensor_bytes(*vars(decoder).values(), arrays=not decoder.ops.has_host_experts)


def tensor_bytes(*values: object, arrays: bool = True) -> int:
    """Bytes of all distinct tensors, and with `arrays` of arrays, in the values. Placeholders of
    packed weights don't count."""
    found: dict[int, int] = {}
    v: Any
    for v in _contents(*values):
        if isinstance(v, np.ndarray):
            if any(v.strides) and arrays:
                found[v.ctypes.data] = v.nbytes
        elif hasattr(v, "data_ptr") and v.device.type != "meta":
            found[id(v) if v.is_mkldnn else v.data_ptr()] = v.numel() * v.element_size()
    return sum(found.values())


def decoder_forms(decoder: Decoder) -> tuple[WeightForm, ...]:
    linears = {id(v): v for v in _contents(*vars(decoder).values()) if isinstance(v, Linear)}
    found: dict[str, list[int]] = {}
    for w in linears.values():
        for name, num_bytes in decoder.ops.forms_of(w):
            found.setdefault(name, []).append(num_bytes)
    forms = (WeightForm(name, len(sizes), sum(sizes)) for name, sizes in found.items())
    return tuple(sorted(forms, key=lambda f: -f.num_bytes))
