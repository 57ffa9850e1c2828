"""GGUF's storage types: one row of `TYPES` has all that the engine needs to know about a type. No torch.

The reader, the memory ledger, the kernels and random weights use these rows. Two places have further code by
type: `kernels.weights.gguf_codes` unpacks a type's blocks, and csrc/cpu/pack.cpp packs those that CPU kernels
multiply. GPU kernels depend on the `CodeForm`, not on the type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Book: TypeAlias = Literal["linear", "e2m1", "iq4", "iq3_xxs", "iq3_s", "iq2", "iq1"]


@dataclass(frozen=True, slots=True)
class CodeForm:
    """How a type encodes values: value = book[code] · scale − minimum.

    - `group`: the number of consecutive values that share a scale.
    - `zero`: the code of the value 0 in a `linear` codebook.
    - `scales`: the format of a group's scale. `bytes`: a signed byte times the float16 `d` of the
      block. `nibbles`: the low half of a byte times `d`, with the minimum in the high half.
      `halves`: a float16. `exponents`: a power of two.
    - `mins`: groups have minima, in the format of the scales. They are multiples of `dmin`.
    """

    bits: Literal[2, 3, 4, 5, 6, 8]
    group: Literal[16, 32]
    zero: int = 0
    book: Book = "linear"
    scales: Literal["bytes", "nibbles", "halves", "exponents"] = "bytes"
    mins: bool = False

    @property
    def shares_d(self) -> bool:
        """Whether a block of 256 values has one float16 factor `d` for all its scales."""
        return self.scales in ("bytes", "nibbles")

    def bytes_of_256(self, *, on_cpu: bool = False) -> int:
        """Bytes of 256 values in the kernels' layout (csrc/cpu/formats.h,
        `kernels.triton.products.gguf`).

        The same as in the file, except that 4- and 6-bit scales are widened to bytes, and lattice
        points are expanded to 3 or 4 bits per value. On a GPU every block has space for `dmin`.
        """
        each = 2 if self.scales == "halves" else 1
        factors = each * (256 // self.group) * (2 if self.mins and self.scales != "nibbles" else 1)
        halves = 2 if on_cpu and not self.mins else 4
        return 32 * self.bits + factors + halves * self.shares_d


@dataclass(frozen=True, slots=True)
class QuantType:
    """A storage type: `block_bytes` bytes store `block_size` consecutive values of a row.

    - `form`: how blocks encode values; None: plain floats.
    - `cpu_kind`: the type's kind in csrc/cpu/formats.h, if CPU kernels multiply it; otherwise it is
      dequantized on a CPU.
    - `halves`: byte offsets, in a block, of its float16 scale and of that of its minima.
    """

    name: str
    block_size: int
    block_bytes: int
    form: CodeForm | None = None
    cpu_kind: int | None = None
    halves: tuple[int, ...] = (0,)


TYPES: dict[int, QuantType] = {
    0: QuantType("F32", 1, 4),
    1: QuantType("F16", 1, 2),
    2: QuantType("Q4_0", 32, 18, CodeForm(4, 32, zero=8, scales="halves"), 4),
    3: QuantType("Q4_1", 32, 20, CodeForm(4, 32, scales="halves", mins=True), 5, (0, 2)),
    6: QuantType("Q5_0", 32, 22, CodeForm(5, 32, zero=16, scales="halves"), 7),
    7: QuantType("Q5_1", 32, 24, CodeForm(5, 32, scales="halves", mins=True), 8, (0, 2)),
    8: QuantType("Q8_0", 32, 34, CodeForm(8, 32, zero=128, scales="halves"), 3),
    10: QuantType("Q2_K", 256, 84, CodeForm(2, 16, scales="nibbles", mins=True), 16, (80, 82)),
    11: QuantType("Q3_K", 256, 110, CodeForm(3, 16, zero=4), 17, (108,)),
    12: QuantType("Q4_K", 256, 144, CodeForm(4, 32, mins=True), 9, (0, 2)),
    13: QuantType("Q5_K", 256, 176, CodeForm(5, 32, mins=True), 10, (0, 2)),
    14: QuantType("Q6_K", 256, 210, CodeForm(6, 16, zero=32), 11, (208,)),
    16: QuantType("IQ2_XXS", 256, 66, CodeForm(3, 32, book="iq2")),
    17: QuantType("IQ2_XS", 256, 74, CodeForm(3, 16, book="iq2")),
    18: QuantType("IQ3_XXS", 256, 98, CodeForm(4, 32, book="iq3_xxs")),
    19: QuantType("IQ1_S", 256, 50, CodeForm(3, 32, book="iq1")),
    20: QuantType("IQ4_NL", 32, 18, CodeForm(4, 32, book="iq4", scales="halves")),
    21: QuantType("IQ3_S", 256, 110, CodeForm(4, 32, book="iq3_s")),
    22: QuantType("IQ2_S", 256, 82, CodeForm(3, 16, book="iq2")),
    23: QuantType("IQ4_XS", 256, 136, CodeForm(4, 32, book="iq4")),
    29: QuantType("IQ1_M", 256, 56, CodeForm(3, 16, book="iq1"), halves=()),
    30: QuantType("BF16", 1, 2),
    34: QuantType("TQ1_0", 256, 54, CodeForm(2, 32, zero=1), halves=(52,)),
    35: QuantType("TQ2_0", 256, 66, CodeForm(2, 32, zero=1), halves=(64,)),
    39: QuantType("MXFP4", 32, 17, CodeForm(4, 32, book="e2m1", scales="exponents"), 15, ()),
    40: QuantType("NVFP4", 64, 36, CodeForm(4, 16, book="e2m1", scales="halves"), halves=()),
}
"""The supported types, by their number in a file."""

BY_NAME = {quant.name: quant for quant in TYPES.values()}
FORMS = {quant.name: quant.form for quant in TYPES.values() if quant.form is not None}
"""Code forms of the quantized types, by name."""

CPU_BLOCK_BYTES = {
    quant.name: quant.form.bytes_of_256(on_cpu=True)
    for quant in TYPES.values()
    if quant.form is not None and quant.cpu_kind is not None
}
GPU_BLOCK_BYTES = {name: form.bytes_of_256() for name, form in FORMS.items()}
"""Bytes of 256 values of each type as the kernels of a CPU, or of a GPU, hold them."""
