"""Replaces the weights of a running decoder in place, module by module.

A module (a layer, or everything outside the layers) is built from the new weights as a load builds
it (source → transforms → builder), copied over the running module, and dropped. Tensors and arrays
keep their addresses, so graphs and kernels remain valid. At most one module is in memory twice.

`check` builds every module without writing: a format that depends on the weights (which are sparse,
a common factor) may differ from the running one, and that must be known before anything changes. No
torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from slipstream.errors import CheckpointError
from slipstream.kernels.weights.forms import Float4Linear
from slipstream.model.decoder import Decoder
from slipstream.model.load.pieces import load_ends, load_layer
from slipstream.model.load.pulled import Pulled, Weights
from slipstream.spec.scheme import Scheme

ATOMS = (type(None), bool, int, float, str)

NOT_WEIGHTS = frozenset(
    {
        *("layers", "ops", "partition", "vocabulary", "pipe", "tap", "stream", "device", "dtype"),
        *("relays", "expert_counts", "group", "cross_group"),
    }
)
"""Attributes of a decoder and of its layers that hold no weights."""

TEMPORARY_WORDS = 2**20
"""Number of words that a checksum widens to 64 bits at once."""


class Refill:
    """New weights for the running `decoder`. `weights` must be able to produce each weight several times."""

    def __init__(
        self, decoder: Decoder, weights: Weights, *, max_model_len: int, scheme: Scheme | None
    ) -> None:
        self._decoder, self._weights = decoder, weights
        self._max_model_len, self._scheme = max_model_len, scheme

    def check(self) -> None:
        """Build every module without writing. CheckpointError names a parameter whose format
        differs from the running one, or that has values that are not finite."""
        for old, new in self._modules(_checked(self._weights)):
            _compare(dict(old), dict(new))

    def write(self) -> None:
        """Write the weights. Call `check` first. After an error the decoder holds a mix of old and new weights."""
        written = set[int]()
        for old, new in self._modules(self._weights):
            running = dict(old)
            for name, value in new:
                if is_data(value) and address(running[name]) not in written:
                    written.add(address(running[name]))
                    if isinstance(value, np.ndarray):
                        running[name][...] = value
                    else:
                        running[name].copy_(value)

    def _modules(
        self, weights: Weights
    ) -> Iterator[tuple[Iterator[tuple[str, Any]], Iterator[tuple[str, Any]]]]:
        """Yields (contents of a running module, contents of the new one) for each module."""
        old, ops, spec = self._decoder, self._decoder.ops, self._decoder.spec
        how = self._max_model_len, self._scheme, old.partition
        new = load_ends(spec, weights, ops, *how)
        yield contents(vars(old)), contents(vars(new))
        del new
        tables = ops.position_tables(self._max_model_len, old.device)
        for i, layer in zip(spec.local_layers, old.layers, strict=True):
            made = load_layer(spec.layers[i], i, weights, ops, tables, self._scheme, old.partition)
            yield contents(layer, f"layers.{i}."), contents(made, f"layers.{i}.")
            del made  # before the next module is made


def refusal(decoder: Decoder) -> str | None:
    """The reason why a decoder's weights can't be written in place. None if they can be."""
    if decoder.ops.has_host_experts:
        return "experts in host memory (host_experts) can't be written in place; leave it out"
    if decoder.stream is not None:
        return "weights that are streamed (weights_bytes) can't be written in place; leave it out"
    for name, value in running_contents(decoder):
        if isinstance(value, np.ndarray) and is_data(value) and not value.flags.writeable:
            return f"{name} is mapped from a file, and can't be written"
        if getattr(value, "is_mkldnn", False):
            return (
                f"{name} is in oneDNN's layout, which can't be written; use the C++ kernels "
                "(kernels='cpu') or kernels='reference'"
            )
    layers = [w for layer in decoder.layers for w in linears(layer)]
    if any(isinstance(w, Float4Linear) and w.row_scales is not None for w in layers):
        return "nvfp4 weights can't be written in place: kernels keep factors of their scales; use quantization='fp8' or 'int4'"
    return None


def running_contents(decoder: Decoder) -> Iterator[tuple[str, Any]]:
    """Yields a decoder's tensors, arrays and settings, by name."""
    yield from contents(vars(decoder))
    for i, layer in zip(decoder.spec.local_layers, decoder.layers, strict=True):
        yield from contents(layer, f"layers.{i}.")


def contents(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the tensors, arrays and settings in a value, by name. Settings are values for which a
    kernel may be compiled. Objects without any of these (op sets, rank groups) are left out."""
    if hasattr(value, "data_ptr") or isinstance(value, (np.ndarray, *ATOMS)):
        yield name.removesuffix("."), value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key not in NOT_WEIGHTS:
                yield from contents(part, f"{name}{key}.")
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from contents(part, f"{name}{i}.")
    elif type(value).__module__.startswith("slipstream.spec."):
        yield name.removesuffix("."), value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in NOT_WEIGHTS:
                yield from contents(getattr(value, field.name), f"{name}{field.name}.")


def linears(value: Any) -> Iterator[Any]:
    """Yields the dataclasses in a value, at any depth."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from linears(part)
    elif dataclasses.is_dataclass(value) and not type(value).__module__.startswith(
        "slipstream.spec."
    ):
        yield value
        for field in dataclasses.fields(value):
            yield from linears(getattr(value, field.name))


def is_data(value: Any) -> bool:
    """Whether a value is a tensor or array with memory, not a placeholder of a packed weight."""
    if isinstance(value, np.ndarray):
        return value.size > 0 and (any(value.strides) or value.ndim == 0)
    return hasattr(value, "data_ptr") and value.device.type != "meta" and value.numel() > 0


def address(value: Any) -> int:
    if getattr(value, "is_mkldnn", False):
        return id(value)
    return int(value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr())


def _checked(weights: Weights) -> Weights:
    """The weights, each checked when it is made: CheckpointError if a value is not finite, because
    a diverged training run yields NaN, and every answer would be nonsense."""

    def checked(values: Pulled[Any]) -> Pulled[Any]:
        return Pulled({name: partial(make, values, name) for name in values})

    def make(values: Pulled[Any], name: str) -> Any:
        value = values[name]
        for _, part in contents(value, name):
            if is_data(part) and (count := not_finite(part)):
                message = f"{name} has {count} numbers that are not finite (NaN or infinite)"
                raise CheckpointError(f"{message}; nothing was written", field=name)
        return value

    return Weights(checked(weights.values), checked(weights.products))


def not_finite(value: Any) -> int:
    """Number of NaN and infinite values. A finite sum shows that there are none, without temporary
    memory; 8-bit floats are not checked."""
    if isinstance(value, np.ndarray):
        if value.dtype.name == "bfloat16":  # ml_dtypes', whose sums are slow
            return int(np.count_nonzero((value.view(np.uint16) & 0x7F80) == 0x7F80))
        if value.dtype.kind != "f":
            return 0
        with np.errstate(all="ignore"):
            if np.isfinite(value.sum()):
                return 0
        return int(value.size - np.count_nonzero(np.isfinite(value)))
    if not value.dtype.is_floating_point or value.dtype.itemsize < 2:
        return 0
    value = value.to_dense() if value.is_mkldnn else value
    if math.isfinite(float(value.sum())):
        return 0
    return int(value.numel() - int(value.isfinite().sum()))


def _compare(old: dict[str, Any], new: dict[str, Any]) -> None:
    for name in [*old, *(new.keys() - old.keys())]:
        mine, other = (_form(x.get(name, "nothing")) for x in (old, new))
        if mine != other:
            message = f"{name} would change its form from {mine} to {other}, and can't be written in place"
            raise CheckpointError(f"{message}; start again with these weights", field=name)


def _form(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind} {list(value.shape)}" + ("" if is_data(value) else " packed")
    return repr(value)


def checksums(decoder: Decoder) -> dict[str, str]:
    """Checksums of all weights of a running decoder, by name. Weights that share memory are listed
    once.

    A checksum is 64 bits as hex, the same on every device. It combines two sums over the 32-bit
    words modulo 2^64: of the words, and of the words times their number, from 1. Integer sums don't depend
    on the order of addition, so one pass over the memory in any order is enough."""
    arrays, tensors, seen = dict[str, Any](), dict[str, Any](), set[int]()
    for name, value in running_contents(decoder):
        if is_data(value) and address(value) not in seen:
            seen.add(address(value))
            (arrays if isinstance(value, np.ndarray) else tensors)[name] = value
    sums = {name: _array_sums(value) for name, value in arrays.items()}
    packed = [name for name, value in tensors.items() if value.is_mkldnn]
    for name in packed:  # one at a time: a dense copy is as large as its weight
        (sums[name],) = decoder.ops.word_sums([tensors[name].to_dense()])
    plain = [name for name in tensors if name not in sums]
    if plain:
        sums |= zip(plain, decoder.ops.word_sums([tensors[n] for n in plain]), strict=True)
    return {name: _told(value, *sums[name]) for name, value in (arrays | tensors).items()}


def _told(value: Any, plain: int, weighted: int) -> str:
    kind = str(value.dtype).removeprefix("torch.")
    told = f"{kind} {tuple(value.shape)} {plain % 2**64} {weighted % 2**64}".encode()
    return hashlib.blake2b(told, digest_size=8).hexdigest()


def _array_sums(value: np.ndarray[Any, Any]) -> tuple[int, int]:
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    if data.size % 4:
        data = np.concatenate([data, np.zeros(-data.size % 4, np.uint8)])
    words, plain, weighted = data.view(np.uint32), 0, 0
    for begin in range(0, words.size, TEMPORARY_WORDS):
        part = words[begin : begin + TEMPORARY_WORDS].astype(np.uint64)
        number = np.arange(begin + 1, begin + 1 + part.size, dtype=np.uint64)
        plain += int(part.sum())
        weighted += int((part * number).sum())
    return plain, weighted
