"""Quantization schemes: the number formats of linear layers' weights and inputs. No torch.

| scheme | weights | inputs | scales |
| --- | --- | --- | --- |
| `fp8` | float8 e4m3 | float8 e4m3 | one per row of the weight, one per token (computed at run time) |
| `fp8-block` | float8 e4m3 | float8 e4m3 | one a tile of 128 × 128 weights, one for each 128 numbers of a token |
| `int8` | int8 | int8 | one a row, one a token |
| `int4` | 4 bits, −8 … 7 | the model's type | one a row and group of 128 (or 32) inputs |
| `nvfp4` | 4-bit floats (e2m1) | the model's type | one a row and group of 16, in float8 e4m3, and one a row |
| `mxfp4` | 4-bit floats (e2m1) | the model's type | one a row and group of 32, a power of two; only for experts |
| `mxfp4-all` | the same for all products | | |

1. Quantisation at load is symmetric: value = code · scale. A 4-bit checkpoint may have zero points.
2. Codes are rounded to nearest. The largest magnitude of a row becomes the largest code. That of a
   group of 4-bit numbers becomes 7.5, between the magnitudes of the two ends −8 and 7.
3. Embeddings, norms and biases keep the model's type. So does the output head, unless the scheme
   has `head`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

RowFormat: TypeAlias = Literal["fp8", "int8"]
"""8-bit elements with a float32 scale per row: float8 e4m3 (up to 448) or int8 (up to 127). A row
of activations is a token, a row of a cache is a head."""

InputFormat: TypeAlias = RowFormat | Literal["fp8-block"]
"""8-bit format of activations. `fp8-block` is float8 e4m3 with a float32 scale per `FP8_TILE`
elements of a token."""

FORMAT_MAX: dict[InputFormat, float] = {"fp8": 448.0, "int8": 127.0, "fp8-block": 448.0}

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 … 7 of a 4-bit float (e2m1). Codes 8 … 15 are their negatives."""

FP8_TILE = 128
"""Rows, and columns, of a weight tile with one scale in `fp8-block` (DeepSeek-V3, arXiv:2412.19437,
section 3.3.2)."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A scheme to which weights are quantized at load.

    - `inputs`: the 8-bit format of the inputs; None: the model's dtype.
    - `group_size`, `block_rows`: one scale covers `group_size` input columns (None: all) of
      `block_rows` rows.
    - `head`: the output head is quantised, too.
    - `experts_only`: only experts' linear layers are quantized.
    """

    name: Literal["fp8", "fp8-block", "int8", "int4", "nvfp4", "mxfp4"]
    weight_bits: int
    inputs: InputFormat | None
    group_size: int | None = None
    block_rows: int = 1
    head: bool = False
    experts_only: bool = False

    @property
    def multiple(self) -> int:
        """A linear layer's number of inputs must be a multiple of this."""
        return 16 if self.group_size is None else max(64, self.group_size)

    def weight_bytes(self, rows: int, inner: int, *, on_cpu: bool = False) -> int:
        """Bytes of a weight [rows, inner] with its scales.

        1. A CPU's `int4` has a scale and a minimum for each group, in float16, or in float32 for
           groups of 128 inputs.
        2. A scale of `mxfp4` and `nvfp4` has a byte, and an `nvfp4` row a float32. A GPU pads a row's
           inputs to a multiple of 128.
        """
        if self.name in ("mxfp4", "nvfp4"):
            inner = inner if on_cpu else -(-inner // 128) * 128
            return rows * (inner * 17 // 32 if self.name == "mxfp4" else inner * 9 // 16 + 4)
        groups = 1 if self.group_size is None else inner // self.group_size
        scale_bytes = 4 if self.inputs is not None else 2
        if on_cpu and self.inputs is None:
            scale_bytes = 8 if self.group_size == 128 else 4
        return (
            rows * inner * self.weight_bits // 8
            + -(-rows // self.block_rows) * groups * scale_bytes
        )


@dataclass(frozen=True, slots=True)
class WeightForm:
    """Statistics of the linear layers whose weights share a format: a dtype, a scheme, or `sparse
    int8`."""

    name: str
    num_products: int
    num_bytes: int


SCHEMES: dict[str, Scheme] = {
    "fp8": Scheme("fp8", 8, "fp8"),
    "fp8-head": Scheme("fp8", 8, "fp8", head=True),
    "fp8-block": Scheme("fp8-block", 8, "fp8-block", group_size=FP8_TILE, block_rows=FP8_TILE),
    "int8": Scheme("int8", 8, "int8"),
    "int8-head": Scheme("int8", 8, "int8", head=True),
    "int4": Scheme("int4", 4, None, group_size=128),
    "int4-g32": Scheme("int4", 4, None, group_size=32),
    "nvfp4": Scheme("nvfp4", 4, None, group_size=16),
    "mxfp4": Scheme("mxfp4", 4, None, group_size=32, experts_only=True),
    "mxfp4-all": Scheme("mxfp4", 4, None, group_size=32),
}
"""Schemes by their name in `quantization=`."""

NATIVE_PRODUCTS: dict[str, frozenset[str]] = {
    "cpu": frozenset(("int8", "int4", "mxfp4")),
    "torch": frozenset(),
    **dict.fromkeys(
        ("reference", "triton"),
        frozenset(("fp8", "fp8-block", "int8", "int8-split", "int4", "nvfp4", "mxfp4")),
    ),
}
"""Matrix products that compute directly with a checkpoint's quantized weights, by op set. Experts
have no int8-split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A checkpoint's format of a linear layer's weight. A value is (code − zero) · scale; if
    `symmetric`, zero is 0.

    - `group_size`, `block_rows`: one scale covers `group_size` input columns (None: all) of
      `block_rows` rows.
    - `whole`: one scale for the whole weight.
    - `scale`: suffix of the name of the scales' tensor.
    - `inputs`: the 8-bit format of the layer's inputs, with one scale per token, or one static
      scale (`static_inputs`).
    - `split`: some columns of int8 inputs keep the model's dtype
      (`quantization_config.COLUMNS_NAME`).
    - `scale_type`: e8m0 is a byte with the exponent of a power of two. With e4m3 there is also one
      factor for the whole weight.
    - `by_modelopt`: tensors have ModelOpt's names, and its factor multiplies the scales; that of
      compressed-tensors divides them.
    """

    kind: Literal["int", "float"] = "int"
    bits: int = 8
    group_size: int | None = None
    block_rows: int = 1
    symmetric: bool = True
    whole: bool = False
    scale: Literal["weight_scale", "weight_scale_inv"] = "weight_scale"
    inputs: InputFormat | None = None
    static_inputs: bool = False
    split: bool = False
    scale_type: Literal["float", "e4m3", "e8m0"] = "float"
    by_modelopt: bool = False

    def __str__(self) -> str:
        """The format in words, for messages."""
        scales = (
            "whole"
            if self.whole
            else "by row"
            if self.group_size is None
            else f"by {self.group_size}"
        )
        scales += "" if self.scale_type == "float" else f" in {self.scale_type}"
        kind = f"{self.kind}{self.bits} {scales}" + ("" if self.symmetric else ", zero points")
        if self.inputs is None:
            return kind
        how = "one scale found beforehand" if self.static_inputs else "a scale a token"
        return f"{kind}; inputs in {self.inputs}, {how}" + (
            ", but their outliers" if self.split else ""
        )

    @property
    def lowest(self) -> int:
        """The smallest integer code. The largest is lowest + 2^bits − 1."""
        return -(1 << self.bits - 1)

    @property
    def product(self) -> InputFormat | Literal["int8-split", "int4", "nvfp4", "mxfp4"] | None:
        """The matrix product that computes with the stored weight; None: it is expanded to the
        model's dtype."""
        if self.inputs is not None:
            return "int8-split" if self.split else self.inputs
        if self.in_pairs:
            return "nvfp4" if self.scale_type == "e4m3" else "mxfp4"
        return "int4" if self.kind == "int" and self.bits <= 4 else None

    @property
    def in_pairs(self) -> bool:
        """Whether a byte holds two codes, the first in its low half."""
        return self.kind == "float" and self.bits == 4

    @property
    def factor(self) -> str | None:
        """Last part of the name of the tensor with the whole weight's factor; None if there is none."""
        if self.scale_type != "e4m3":
            return None
        return "weight_scale_2" if self.by_modelopt else "weight_global_scale"

    @property
    def packed(self) -> bool:
        """Whether several codes share a 32-bit word. Otherwise each has a byte."""
        return self.kind == "int" and self.inputs is None

    def groups(self, inner: int) -> int:
        """Number of scales of a row with `inner` inputs. The last group may be partial."""
        if self.group_size is None:
            return 1
        return inner // self.group_size if self.block_rows == 1 else -(-inner // self.group_size)

    def num_scales(self, rows: int, inner: int) -> int:
        return -(-rows // self.block_rows) * self.groups(inner)

    def num_bytes(self, rows: int, inner: int, scale_bytes: int = 2) -> int:
        """Bytes of a weight [rows, inner] in a checkpoint: codes, scales and zero points."""
        codes = rows * -(-inner * self.bits // 32) * 4 if self.packed else rows * inner
        if self.scale_type != "float":
            codes = codes * self.bits // 8
            return codes + self.num_scales(rows, inner) + (4 if self.factor else 0)
        groups = self.groups(inner)
        zeros = 0 if self.symmetric else -(-rows * self.bits // 32) * 4 * groups
        return codes + (1 if self.whole else self.num_scales(rows, inner)) * scale_bytes + zeros


FORMATS: dict[str, WeightFormat] = {
    "fp8": WeightFormat(kind="float", inputs="fp8"),
    "fp8-head": WeightFormat(kind="float", inputs="fp8"),
    "fp8-block": WeightFormat(
        kind="float", group_size=FP8_TILE, block_rows=FP8_TILE, inputs="fp8-block"
    ),
    "int8": WeightFormat(inputs="int8"),
    "int8-head": WeightFormat(inputs="int8"),
    "int4": WeightFormat(bits=4, group_size=128),
    "int4-g32": WeightFormat(bits=4, group_size=32),
    "nvfp4": WeightFormat(kind="float", bits=4, group_size=16, scale_type="e4m3"),
    "mxfp4-all": WeightFormat(kind="float", bits=4, group_size=32, scale_type="e8m0"),
}
"""The checkpoint format of each scheme's weights."""
