"""Random weights in their final format, made from a config without a checkpoint.

A dense parameter is normal with std 0.02; norms are 1 and biases 0. A quantized weight has random
codes, and scales that give its values a std near 0.02. So a dummy model never exists unquantized.
Each parameter has a seed that depends on its name, so that the order of drawing does not matter.

`xp` is NumPy, or torch with a device. NumPy's draws and torch's differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np

from slipstream.kernels.weights import gguf_codes
from slipstream.kernels.weights.forms import BlockLinear, BlockRows, Linear, new_linear
from slipstream.model.load.pulled import Pulled, Weights
from slipstream.spec.parameters import Shape, keeps_float32
from slipstream.spec.scheme import Scheme
from slipstream.spec.stored.gguf_types import BY_NAME
from slipstream.spec.stored.native_formats import rounds

if TYPE_CHECKING:
    import torch

STD = 0.02
SCALES = {
    **dict.fromkeys(("fp8", "fp8-block"), STD / 0.6),  # codes without the exponent's high bit
    "int8": STD / 73.9,  # the odd numbers from −127 to 127
    "int4": STD / 4.64,  # −8 … 7
    "nvfp4": STD / 2.9,  # all e2m1 codes
    "mxfp4": 2.0**-7,  # a power of two is required
}
"""Scales with which the values of random codes have about this std: STD divided by the root mean square of the codes."""

ROWS_AT_ONCE = 1024
"""Rows of an array drawn at once, which bounds NumPy's float32 temporaries."""

E4M3_MASK = 0xBF
"""Mask for random e4m3 codes: it clears the exponent's high bit, so that none is NaN."""


class Draws(Protocol):
    """Interface that draws the random tensors or arrays of one parameter."""

    dtype: Any  # the model's type

    def normal(self, shape: Shape, dtype: str | None = None) -> Any:
        """Normally distributed values with std 0.02, in the model's dtype unless another is named."""

    def full(self, shape: Shape, value: float, dtype: str | None = None) -> Any:
        """A constant tensor, in the model's dtype unless another is named."""

    def codes(self, shape: Shape, dtype: str) -> Any:
        """Random bits as int8 (odd values, which excludes −128), int16 or float8_e4m3fn."""


class ArrayDraws:
    """Draws NumPy arrays."""

    def __init__(self, dtype: str, seed: int) -> None:
        self.dtype = np.dtype(dtype)
        self._generator = np.random.default_rng(seed)

    def normal(self, shape: Shape, dtype: str | None = None) -> Any:
        made = np.empty(shape, dtype or self.dtype)
        for at in range(0, shape[0], ROWS_AT_ONCE):
            rows = made[at : at + ROWS_AT_ONCE]
            rows[...] = self._generator.standard_normal(rows.shape, np.float32) * np.float32(STD)
        return made

    def full(self, shape: Shape, value: float, dtype: str | None = None) -> Any:
        return np.full(shape, value, dtype or self.dtype)

    def codes(self, shape: Shape, dtype: str) -> Any:
        size = np.dtype(np.int16 if dtype == "int16" else np.int8).itemsize
        octets = self._generator.integers(0, 256, (*shape[:-1], shape[-1] * size), dtype=np.uint8)
        if dtype == "int16":
            return octets.view(np.int16)
        if dtype == "int8":
            octets |= 1
            return octets.view(np.int8)
        octets &= E4M3_MASK
        return octets.view(ml_dtypes.float8_e4m3fn)


class TensorDraws:
    """Draws torch tensors on a device."""

    def __init__(self, dtype: torch.dtype, seed: int, device: torch.device) -> None:
        import torch

        self.dtype, self._device, self._torch = dtype, device, torch
        # nothing is drawn for a described GPU (meta device)
        on_meta = device.type == "meta"
        self._generator = None if on_meta else torch.Generator(device).manual_seed(seed)

    def normal(self, shape: Shape, dtype: str | None = None) -> Any:
        kind = self.dtype if dtype is None else getattr(self._torch, dtype)
        drawn = self._torch.empty(shape, dtype=kind, device=self._device)
        return drawn.normal_(0.0, STD, generator=self._generator)

    def full(self, shape: Shape, value: float, dtype: str | None = None) -> Any:
        kind = self.dtype if dtype is None else getattr(self._torch, dtype)
        return self._torch.full(shape, value, dtype=kind, device=self._device)

    def codes(self, shape: Shape, dtype: str) -> Any:
        size = 2 if dtype == "int16" else 1
        octets = self._torch.empty(
            (*shape[:-1], shape[-1] * size), dtype=self._torch.uint8, device=self._device
        ).random_(0, 256, generator=self._generator)
        if dtype == "int8":
            octets |= 1
        elif dtype == "float8_e4m3fn":
            octets &= E4M3_MASK
        return octets.view(getattr(self._torch, dtype))


def random_weights(
    shapes: Mapping[str, Shape], draws: Callable[[str], Draws], scheme: Scheme | None
) -> Weights:
    """Random weights of these shapes; those that `scheme` quantizes are quantized linear layers.
    `draws(name)` returns the generator of a parameter."""
    dense, products = dict[str, Callable[[], Any]](), dict[str, Callable[[], Any]]()
    for name, shape in shapes.items():
        if (
            scheme is not None
            and rounds(scheme, name)
            and name.startswith(("layers.", "encoder.layers.", "head."))
        ):
            products[name] = partial(_product, name, shape, draws, scheme)
        else:
            dense[name] = partial(_dense, name, shape, draws)
    return Weights(Pulled(dense), Pulled(products))


def random_blocks(w: BlockLinear, seed: int) -> BlockLinear:
    """A weight with random blocks instead of a GGUF file's, whose values have a std near 0.02.

    Only some rows are drawn; they are repeated.
    """
    if w.device is not None and w.device.type == "meta":
        return w
    generator = np.random.default_rng(seed)

    def drawn(piece: BlockRows) -> BlockRows:
        rows, row_bytes = piece.blocks.shape
        some = _random_rows(piece.type, min(rows, 64), row_bytes, generator)
        return replace(
            piece, blocks=some[np.arange(rows) % len(some)], release=lambda _begin, _end: None
        )

    return replace(w, pieces=tuple(drawn(piece) for piece in w.pieces))


def _random_rows(kind: str, rows: int, row_bytes: int, generator: np.random.Generator) -> Any:
    quant = BY_NAME[kind]
    raw = generator.integers(
        0, 256, (rows * row_bytes // quant.block_bytes, quant.block_bytes), dtype=np.uint8
    )

    def values(*scales: float) -> Any:
        """Writes these scales to the random blocks, and returns the blocks' values."""
        if kind == "MXFP4":
            raw[:, 0] = 120
        elif kind == "NVFP4":
            raw[:, :4] = 4
        elif kind == "IQ1_M":  # half a byte each
            bits = int(np.float16(scales[0]).view(np.uint16))
            for i, at in enumerate((49, 51, 53, 55)):
                raw[:, at] = raw[:, at] & 15 | (bits >> 4 * i & 15) << 4
        else:
            for at, scale in zip(quant.halves, scales, strict=False):
                raw[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
        return gguf_codes.values(raw, kind)

    alone, minima = values(1, 0), values(0, 1)
    share = -alone.mean() / minima.mean() if len(quant.halves) == 2 else 0.0
    scale = STD / (alone + share * minima).std()
    values(scale, share * scale)
    return raw.reshape(rows, row_bytes)


def seed_of(name: str, seed: int) -> int:
    """Seed of the parameter `name`."""
    return zlib.crc32(f"{seed} {name}".encode())


def _dense(name: str, shape: Shape, draws: Callable[[str], Draws]) -> Any:
    made = draws(name)
    kind = "float32" if keeps_float32(name) else None
    if name.endswith(".bias"):
        return made.full(shape, 0.0, kind)
    if len(shape) == 1 or name.endswith("norm.weight"):
        return made.full(shape, 1.0, kind)
    return made.normal(shape, kind)


def _product(name: str, shape: Shape, draws: Callable[[str], Draws], scheme: Scheme) -> Linear:
    made = draws(name)

    def make(part: str, shape: Shape, kind: str | None) -> Any:
        if part == "weight":
            assert kind is not None
            return made.codes(shape, kind)
        # for nvfp4 the value goes into `row_scales`
        by_rows = part == "scales" and scheme.name == "nvfp4"
        return made.full(shape, 1.0 if by_rows else SCALES[scheme.name], kind)

    return new_linear(scheme.name, shape, made.dtype, make, size=scheme.group_size)
