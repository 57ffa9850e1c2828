"""GGUF's quantized types as codes, scales and minima: value = book[code] · scale − minimum.

1. `spec.stored.gguf_types` says for each type how many bits its codes have, what they stand for,
   and how many consecutive values share a scale.
2. `split` takes stored blocks apart. It runs on NumPy arrays and on torch tensors alike, so a GPU
   can do it.
3. The float32 results of `Codes.values` equal those of the `gguf` package bit for bit: every
   product before the last is exact.

The lattices of IQ1, IQ2 and IQ3 are tables of the `gguf` package, which must be installed for
them. A lattice's point is stored here as the code of each of its numbers. That takes more bits than
the file has and needs no look-up by the kernels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError, install_command
from slipstream.spec.scheme import E2M1
from slipstream.spec.stored.gguf_types import FORMS, Book, CodeForm

Ints: TypeAlias = Any
"""An int32 tensor or array, or an int16 array of a type whose codes stand for themselves."""

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the codes of IQ4_NL and IQ4_XS."""

_MAGNITUDES: dict[Book, tuple[float, ...]] = {
    "e2m1": E2M1,
    "iq3_xxs": (1, 3, 5, 7, 9, 11, 13, 15.5),
    "iq3_s": (1, 3, 5, 7, 9, 11, 13, 15),
    "iq2": (1, 3.125, 5.375, 0),
}
"""Values without their sign, which is the code's highest bit."""


def book(form: CodeForm) -> npt.NDArray[np.float32]:
    """The value of each code, float32 [2^bits]."""
    if form.book == "linear":
        return np.arange(1 << form.bits, dtype=np.float32) - np.float32(form.zero)
    if form.book == "iq4":
        return np.array(IQ4, np.float32)
    if form.book == "iq1":  # −1, 0, 1, and an eighth more or less
        units = np.array((-1, 0, 1, 0), np.float32)
        return np.concatenate((units + np.float32(0.125), units - np.float32(0.125)))
    found = np.array(_MAGNITUDES[form.book], np.float32)
    return np.concatenate((found, np.where(found == 0, 0, -found)))


@dataclass(frozen=True, slots=True)
class Codes:
    """N blocks of a type, taken apart. All are arrays (`Ints`), or all tensors.

    `scales` and `mins` are those of `CodeForm.scales`: signed integers, the bits of a float16, or
    exponents plus 127. With `nibbles` both are in `scales`. `d` and `dmin` are the bits of a
    float16.
    """

    codes: Ints  # [N, block_size]
    scales: Ints  # [N, groups]
    mins: Ints | None = None  # [N, groups]
    d: Ints | None = None  # [N]
    dmin: Ints | None = None  # [N]

    def values(self, form: CodeForm) -> npt.NDArray[np.float32]:
        """The blocks' values, float32 [N, block_size]. Only of arrays."""
        s, mins = self.scales, self.mins
        scale, minimum = s.astype(np.float32), None
        if form.scales == "halves":
            scale = _float(s)
            minimum = None if mins is None else _float(mins)
        elif form.shares_d:
            if form.scales == "nibbles":
                scale, mins = (s & 15).astype(np.float32), s >> 4
            scale = scale * _float(self.d)[:, None]
            if mins is not None:
                minimum = mins.astype(np.float32) * _float(self.dmin)[:, None]
        if form.book == "linear":
            made = self.codes.astype(np.float32)
            made -= np.float32(form.zero)
        elif form.scales == "exponents":  # so that the largest scale is finite
            scale, made = np.ldexp(np.float32(1), s - 128), (book(form) * 2)[self.codes]
        else:
            made = book(form)[self.codes]
        made = made.reshape(*s.shape, form.group)
        made *= scale[..., None]
        if minimum is not None:
            made -= minimum[..., None]
        return made.reshape(self.codes.shape)  # type: ignore[no-any-return]


def split(b: Ints, kind: str) -> Codes:
    """Take the blocks b [N, block_bytes] of a type apart. CheckpointError if its lattice is not
    installed."""
    made: Codes = _SPLITS[kind](b)
    return made


def values(blocks: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.float32]:
    """Returns the values float32 [N, block_size] of whole blocks, uint8 [N, block_bytes]."""
    form = FORMS[kind]
    # Half the width is three times as fast. Lattices and tables of 256 need more bits.
    width = np.int16 if form.book == "linear" else np.int32
    return split(blocks.astype(width), kind).values(form)


def _float(bits: Ints) -> npt.NDArray[np.float32]:
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)  # type: ignore[no-any-return]


def _like(values: Any, b: Ints) -> Ints:
    """int32 `values` as an array of b's library, NumPy or torch, on its device."""
    if isinstance(b, np.ndarray):
        return np.asarray(values, np.int32)
    import torch

    return torch.as_tensor(np.asarray(values, np.int32), device=b.device)


def _cat(*parts: Ints) -> Ints:
    """Concatenation along the last axis."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis=-1)
    import torch

    return torch.cat(parts, dim=-1)


def _short(b: Ints, at: int) -> Ints:
    """The little-endian 16 bits at byte `at`: [N]."""
    return b[:, at] | b[:, at + 1] << 8


def _negative(b: Ints, at: int) -> Ints:
    """The bits of minus the float16 at byte `at`: [N]."""
    return b[:, at] | (b[:, at + 1] ^ 128) << 8


def _shorts(b: Ints) -> Ints:
    """Bytes [N, 2 · n] → [N, n] of 16 bits."""
    return b[:, 0::2] | b[:, 1::2] << 8


def _nibbles(b: Ints) -> Ints:
    """Bytes […, B] → […, 2 · B]: all low halves, then all high halves."""
    return _cat(b & 15, b >> 4)


def _fields(b: Ints, width: int) -> Ints:
    """Bytes […, B] → […, 8 / width · B]: field j of every byte, lowest first."""
    mask = (1 << width) - 1
    return _cat(*(b >> i & mask for i in range(0, 8, width)))


def _each(b: Ints, width: int) -> Ints:
    """Unpacks bit fields of `width` bits: bytes [N, B] → [N, B · 8 / width]. The fields of a byte
    are consecutive in the result."""
    shifts = _like(range(0, 8, width), b)
    return ((b[:, :, None] >> shifts) & ((1 << width) - 1)).reshape(len(b), -1)


def _q4_0(b: Ints) -> Codes:
    return Codes(_nibbles(b[:, 2:]), _short(b, 0)[:, None])


def _q4_1(b: Ints) -> Codes:
    return Codes(_nibbles(b[:, 4:]), _short(b, 0)[:, None], _negative(b, 2)[:, None])


def _q5_0(b: Ints) -> Codes:
    return Codes(_nibbles(b[:, 6:]) | _each(b[:, 2:6], 1) << 4, _short(b, 0)[:, None])


def _q5_1(b: Ints) -> Codes:
    codes = _nibbles(b[:, 8:]) | _each(b[:, 4:8], 1) << 4
    return Codes(codes, _short(b, 0)[:, None], _negative(b, 2)[:, None])


def _q8_0(b: Ints) -> Codes:
    return Codes(b[:, 2:] ^ 128, _short(b, 0)[:, None])


def _six_bits(b: Ints) -> tuple[Ints, Ints]:
    """The scales and minima of Q4_K and Q5_K: 16 numbers of six bits in the bytes 4 … 15."""
    low_scale, low_min, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = _cat(low_scale & 63, high & 15 | low_scale >> 6 << 4)
    return scale, _cat(low_min & 63, high >> 4 | low_min >> 6 << 4)


def _halves_of(b: Ints, size: int) -> Ints:
    """Bytes [N, n · size] → [N, n, size]."""
    return b.reshape(len(b), -1, size)


def _q2_k(b: Ints) -> Codes:
    codes = _fields(_halves_of(b[:, 16:80], 32), 2).reshape(len(b), -1)
    return Codes(codes, b[:, :16], d=_short(b, 80), dmin=_short(b, 82))


def _q3_k(b: Ints) -> Codes:
    low = _fields(_halves_of(b[:, 32:96], 32), 2).reshape(len(b), -1)
    six = _nibbles(b[:, 96:104]) | _fields(b[:, 104:108], 2) << 4
    return Codes(low | _fields(b[:, :32], 1) << 2, six - 32, d=_short(b, 108))


def _q4_k(b: Ints) -> Codes:
    codes = _nibbles(_halves_of(b[:, 16:144], 32)).reshape(len(b), -1)
    return Codes(codes, *_six_bits(b), d=_short(b, 0), dmin=_short(b, 2))


def _q5_k(b: Ints) -> Codes:
    codes = (
        _nibbles(_halves_of(b[:, 48:176], 32)).reshape(len(b), -1) | _fields(b[:, 16:48], 1) << 4
    )
    return Codes(codes, *_six_bits(b), d=_short(b, 0), dmin=_short(b, 2))


def _q6_k(b: Ints) -> Codes:
    low = _nibbles(_halves_of(b[:, :128], 64))
    codes = low | _fields(_halves_of(b[:, 128:192], 32), 2) << 4
    return Codes(codes.reshape(len(b), -1), (b[:, 192:208] ^ 128) - 128, d=_short(b, 208))


def _iq4_nl(b: Ints) -> Codes:
    return Codes(_nibbles(b[:, 2:]), _short(b, 0)[:, None])


def _iq4_xs(b: Ints) -> Codes:
    scales = _each(b[:, 4:8], 4) | _each(b[:, 2:4], 2) << 4
    codes = _nibbles(_halves_of(b[:, 8:136], 16)).reshape(len(b), -1)
    return Codes(codes, scales - 32, d=_short(b, 0))


def _tq1_0(b: Ints) -> Codes:
    # A byte has five digits to the base of 3, as a fraction of 256.
    def digits(part: Ints, count: int) -> Ints:
        return _cat(*(((part * 3**i) & 255) * 3 >> 8 for i in range(count)))

    codes = _cat(digits(b[:, :32], 5), digits(b[:, 32:48], 5), digits(b[:, 48:52], 4))
    return Codes(codes, codes[:, ::32] * 0 + 1, d=_short(b, 52))


def _tq2_0(b: Ints) -> Codes:
    codes = _fields(_halves_of(b[:, :64], 32), 2).reshape(len(b), -1)
    return Codes(codes, codes[:, ::32] * 0 + 1, d=_short(b, 64))


def _mxfp4(b: Ints) -> Codes:
    return Codes(_nibbles(b[:, 1:]), b[:, :1])


def _nvfp4(b: Ints) -> Codes:
    scales = _like(_e4m3_halves(), b)[b[:, :4].reshape(-1)].reshape(-1, 4)
    return Codes(_nibbles(_halves_of(b[:, 4:], 8)).reshape(len(b), -1), scales)


@functools.cache
def _e4m3_halves() -> npt.NDArray[np.int32]:
    """Converts an unsigned e4m3 byte to the bits of its value as a float16. The sign bit counts for
    nothing, and the byte 0x7F is 0."""
    codes = np.arange(256, dtype=np.uint16)
    halves = ((codes & 0x7F) << 7).view(np.float16).astype(np.float32) * 256  # biases 15 and 7
    halves[0x7F] = 0
    return halves.astype(np.float16).view(np.uint16).astype(np.int32)


# --- Lattices ---------------------------------------------------------------------------------------------------------


@functools.cache
def _lattice(kind: str) -> npt.NDArray[np.int32]:
    """The points of a type's lattice, as the places of their numbers in the order of size: int32
    [points, 4 or 8]."""
    try:
        from gguf import quants
    except ImportError as error:
        raise CheckpointError(
            f"the type {kind} needs the tables of the gguf package: {install_command('gguf')}, or take a file with "
            "other types, such as Q3_K_M or IQ4_XS",
            field="gguf",
        ) from error
    own = getattr(quants, kind)
    own.init_grid()
    points = own.grid.reshape(own.grid_shape)
    places: npt.NDArray[np.int32] = np.searchsorted(np.unique(points), points).astype(np.int32)
    return places


def _points(index: Ints, kind: str) -> Ints:
    """Indices [N, n] → codes without signs [N, n · 4 or 8]."""
    return _like(_lattice(kind), index)[index.reshape(-1)].reshape(len(index), -1)


@functools.cache
def _seven_signs() -> npt.NDArray[np.int32]:
    """Eight signs for each value of seven bits: the eighth makes their number even."""
    seven = np.arange(128, dtype=np.int32)
    odd = seven.copy()
    for shift in (4, 2, 1):
        odd ^= odd >> shift
    return seven | (odd & 1) << 7


def _signs(seven: Ints) -> Ints:
    """Seven bits each [N, n] → signs [N, n · 8]."""
    return _each(_like(_seven_signs(), seven)[seven.reshape(-1)].reshape(seven.shape), 1)


def _words(b: Ints) -> tuple[Ints, Ints]:
    """The little-endian words of bytes [N, 4 · n] as (signs [N, n · 32], top four bits [N, n])."""
    at = b.reshape(len(b), -1, 4)
    low = at[..., 0] | at[..., 1] << 8 | at[..., 2] << 16
    seven = [low & 127, low >> 7 & 127, low >> 14 & 127, (low >> 21 | at[..., 3] << 3) & 127]
    signs = _signs(_cat(*(x[..., None] for x in seven)).reshape(len(b), -1))
    return signs, at[..., 3] >> 4


def _iq3_xxs(b: Ints) -> Codes:
    signs, scales = _words(b[:, 66:98])
    return Codes(_points(b[:, 2:66], "IQ3_XXS") | signs << 3, 2 * scales + 1, d=_short(b, 0))


def _iq3_s(b: Ints) -> Codes:
    index = b[:, 2:66] | _each(b[:, 66:74], 1) << 8
    codes = _points(index, "IQ3_S") | _each(b[:, 74:106], 1) << 3
    return Codes(codes, 2 * _each(b[:, 106:110], 4) + 1, d=_short(b, 0))


def _iq2_xxs(b: Ints) -> Codes:
    pairs = b[:, 2:66].reshape(len(b), -1, 8)
    signs, scales = _words(pairs[..., 4:].reshape(len(b), -1))
    points = _points(pairs[..., :4].reshape(len(b), -1), "IQ2_XXS")
    return Codes(points | signs << 2, 2 * scales + 1, d=_short(b, 0))


def _iq2_xs(b: Ints) -> Codes:
    words = _shorts(b[:, 2:66])
    codes = _points(words & 511, "IQ2_XS") | _signs(words >> 9) << 2
    return Codes(codes, 2 * _each(b[:, 66:74], 4) + 1, d=_short(b, 0))


def _iq2_s(b: Ints) -> Codes:
    index = b[:, 2:34] | _each(b[:, 66:74], 2) << 8
    codes = _points(index, "IQ2_S") | _each(b[:, 34:66], 1) << 2
    return Codes(codes, 2 * _each(b[:, 74:82], 4) + 1, d=_short(b, 0))


def _iq1_s(b: Ints) -> Codes:
    words = _shorts(b[:, 34:50])
    high = _cat(*((words >> i & 7)[..., None] for i in (0, 3, 6, 9))).reshape(len(b), -1)
    below = _like(np.arange(256) // 32, b)
    codes = _points(b[:, 2:34] | high << 8, "IQ1_S") | (words >> 15)[:, below] << 2
    return Codes(codes, 2 * (words >> 12 & 7) + 1, d=_short(b, 0))


def _iq1_m(b: Ints) -> Codes:
    words, high = _shorts(b[:, 48:56]), _each(b[:, 32:48], 4)
    top = words >> 12
    d = top[:, 0] | top[:, 1] << 4 | top[:, 2] << 8 | top[:, 3] << 12
    scales = _cat(*((words >> i & 7)[..., None] for i in (0, 3, 6, 9))).reshape(len(b), -1)
    below = _like(np.arange(256) // 8, b)
    codes = _points(b[:, :32] | (high & 7) << 8, "IQ1_M") | (high >> 3)[:, below] << 2
    return Codes(codes, 2 * scales + 1, d=d)


_SPLITS: dict[str, Any] = {name: globals()[f"_{name.lower()}"] for name in FORMS}
