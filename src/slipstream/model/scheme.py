"""Schemes: how the weights of a layer's products are held, and how their inputs are. Data, no torch.

| scheme | weights | inputs | scales |
| --- | --- | --- | --- |
| `fp8` | float8 e4m3 | float8 e4m3 | one a row of the weight, one a token, made as it comes |
| `int8` | int8 | int8 | the same |
| `int4` | 4 bits, −8 … 7 | the model's type | one a row and group of 128 (or 32) inputs |
| `mxfp4` | floats of 4 bits (e2m1) | the model's type | one a row and group of 32, a power of two; of experts alone |

Rounding at load is symmetric: value = code · scale. (A 4-bit checkpoint may bring zero points of its own.) The largest
magnitude of a row falls on the end of the range (of a group of 4-bit numbers on 7.5, between its two ends), and codes are
rounded to nearest. Embeddings, norms and biases keep the model's type, and so does the output head unless the scheme says
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

InputFormat: TypeAlias = Literal["fp8", "int8"]
"""An 8-bit form of activations: float8 e4m3 (up to 448) or int8 (up to 127), and a float32 scale a token."""

FORMAT_MAX: dict[InputFormat, float] = {"fp8": 448.0, "int8": 127.0}


@dataclass(frozen=True, slots=True)
class Scheme:
    """`inputs` None: the model's own type. `group_size` None: one scale a row of the weight. `head`: the output head too.
    `experts_only`: all products but those of experts keep the model's type."""

    name: Literal["fp8", "int8", "int4", "mxfp4"]
    weight_bits: int
    inputs: InputFormat | None
    group_size: int | None = None
    head: bool = False
    experts_only: bool = False

    @property
    def multiple(self) -> int:
        """What the number of a product's inputs must be a multiple of."""
        return 16 if self.group_size is None else max(64, self.group_size)

    def weight_bytes(self, rows: int, inner: int) -> int:
        """Bytes of a weight [rows, inner], scales included."""
        groups = 1 if self.group_size is None else inner // self.group_size
        scale_bytes = 4 if self.group_size is None else 2
        return rows * inner * self.weight_bits // 8 + rows * groups * scale_bytes


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How some of a model's products hold their weights: a type or scheme, or `sparse int8`."""

    name: str
    num_products: int
    num_bytes: int


SCHEMES: dict[str, Scheme] = {
    "fp8": Scheme("fp8", 8, "fp8"),
    "fp8-head": Scheme("fp8", 8, "fp8", head=True),
    "int8": Scheme("int8", 8, "int8"),
    "int4": Scheme("int4", 4, None, group_size=128),
    "int4-g32": Scheme("int4", 4, None, group_size=32),
    "mxfp4": Scheme("mxfp4", 4, None, group_size=32, experts_only=True),
}
"""What `quantization=` takes."""

CPU_BLOCK_BYTES = {
    "Q8_0": 272,
    "Q4_0": 144,
    "Q4_1": 160,
    "Q5_0": 176,
    "Q5_1": 192,
    "Q4_K": 148,
    "Q5_K": 180,
    "Q6_K": 210,
}
"""GGUF's types that a CPU's kernels use as they are, with the bytes that they hold 256 numbers in (csrc/cpu/formats.h): the
file's, but for Q4_K and Q5_K, whose scales of 6 bits get bytes of their own. Others are dequantised to the model's type."""
