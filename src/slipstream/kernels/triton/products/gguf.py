"""Linear layers with weights in GGUF's types: y = x · (book[code] · scale − minimum)ᵀ.

A weight keeps the bits that its file has, laid out so that a load serves all lanes of a warp
(`CodedLinear`). Codes become numbers in registers, from which the tensor cores read them:

| tokens | product |
| --- | --- |
| up to 32 | codes times inputs, one sum for each group, which is then scaled: no weight is rounded |
| up to EXPAND_TOKENS, or DENSE_TOKENS if there is a dense copy | values rounded to the model's type, times inputs |
| more | cuBLAS's, of the dense copy or of the values expanded now |

A product's floor is the reading of `CodeForm.bytes_of_256` bytes for 256 weights. A row of weights
in several types (Q4_K_M has some layers' values in Q6_K) is one product for each type.
"""

from __future__ import annotations

import functools
import struct

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton import knobs

from slipstream.kernels.thresholds import Thresholds
from slipstream.kernels.triton.experts.moe_permute import ExpertTiles, pairs_of_tile
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.kernels.triton.products.split_k import ArrivalCounters, reduce_splits
from slipstream.kernels.weights import gguf_codes
from slipstream.kernels.weights.forms import CodedLinear, JoinedLinear, Linear
from slipstream.spec.devices.autotune_table import NUM_COUNTERS
from slipstream.spec.model import MoESpec
from slipstream.spec.stored.gguf_types import FORMS, CodeForm

SCALED_TOKENS = 32
"""Maximum number of tokens for which sums are scaled, not weights. Scaling a sum costs an operation
for each token."""
EXPAND_TOKENS = 512
"""Maximum number of tokens for which codes are expanded in registers. A dense weight is written and
read once more, which is faster only for many tokens."""
DENSE_TOKENS = 64
"""Maximum number of tokens for which a weight is faster than its dense copy, if it has one."""
ONE_TILE_PAIRS = 32
"""Pairs in a tile of experts with `deterministic`. Tiles of other sizes scale codes or sums."""
THRESHOLDS = Thresholds(tokens=(8, 16, SCALED_TOKENS, DENSE_TOKENS, 128, EXPAND_TOKENS))

BLOCK_TYPES = frozenset(FORMS)


@triton.jit
def _code(low, more, i: tl.constexpr, BITS: tl.constexpr):
    """Extracts code i of each word, int32. `more` has the codes' high bits, or the second words of
    codes of 8 bits."""
    if BITS == 8:
        word = low if i < 4 else more
        code = (word << (24 - 8 * (i % 4))) >> 24
    elif BITS < 4:
        code = (low.to(tl.int32) >> (2 * i)) & 3
        if BITS == 3:
            code |= ((more.to(tl.int32) >> i) & 1) << 2
    else:
        code = (low >> (4 * i)) & 15
        if BITS == 5:
            code |= ((more.to(tl.int32) >> i) & 1) << 4
        if BITS == 6:
            code |= ((more.to(tl.int32) >> (2 * i)) & 3) << 4
    return code


_IQ4_0, _IQ4_1, _IQ4_2, _IQ4_3 = (
    tl.constexpr(word) for word in struct.unpack("<4i", struct.pack("<16b", *gguf_codes.IQ4))
)


@triton.jit
def _iq4_number(code):
    """Looks up a code in IQ4's table of values, whose bytes are in four words
    (`gguf_codes.IQ4`)."""
    low = tl.where((code & 4) == 0, _IQ4_0, _IQ4_1)
    high = tl.where((code & 4) == 0, _IQ4_2, _IQ4_3)
    word = tl.where((code & 8) == 0, low, high)
    return ((word << (24 - 8 * (code & 3))) >> 24).to(tl.float32)


@triton.jit
def _number(code, BITS: tl.constexpr, ZERO: tl.constexpr, BOOK: tl.constexpr, kind: tl.constexpr):
    """Converts a code to its value, exact in `kind`."""
    if BOOK == "linear":
        if BITS == 8:
            return code.to(tl.int8).to(kind)
        return (code - ZERO).to(tl.float32).to(kind)
    if BOOK == "iq4":
        return _iq4_number(code).to(kind)
    if BOOK == "iq1":  # −1, 0, 1, plus or minus an eighth
        return ((code & 3) * 8 - 7 - ((code >> 2) << 1)).to(tl.float32).to(kind) * 0.125
    if BOOK == "iq2":
        rank = code & 3
        size = (rank * 17 + 8 + (rank >> 1)).to(tl.float32) * 0.125
        return tl.where(code < 4, size, -size).to(kind)
    rank = code & 7
    if BOOK == "e2m1":  # 0, 1, 2, 3, 4, 6, 8, 12 halves
        size = (
            tl.where(rank < 4, rank, (2 + (rank & 1)) << ((rank >> 1) - 1 & 3)).to(tl.float32) * 0.5
        )
    elif BOOK == "iq3_xxs":
        size = (rank * 2 + 1).to(tl.float32) + tl.where(rank == 7, 0.5, 0.0)
    else:
        size = (rank * 2 + 1).to(tl.float32)
    return tl.where(code < 8, size, -size).to(kind)


@triton.jit
def _factors(f_at, d_at, unit, NP, GROUP: tl.constexpr, SCALES: tl.constexpr, MINS: tl.constexpr):
    """Loads nine words of a unit: four with its scales (or two, repeated), four with its minima
    likewise, and `d`."""
    WIDE: tl.constexpr = SCALES == "halves"
    WORDS: tl.constexpr = 4 if WIDE else 2
    OWN_MINS: tl.constexpr = MINS and SCALES != "nibbles"
    at = f_at + unit * NP * (WORDS * 2 if OWN_MINS else WORDS)
    s0, s1 = tl.load(at), tl.load(at + NP)
    s2, s3 = s0, s1
    if WIDE:
        s2, s3 = tl.load(at + 2 * NP), tl.load(at + 3 * NP)
    m0, m1, m2, m3, d = s0, s1, s2, s3, s0
    if OWN_MINS:
        at += WORDS * NP
        m0, m1 = tl.load(at), tl.load(at + NP)
        m2, m3 = m0, m1
        if WIDE:
            m2, m3 = tl.load(at + 2 * NP), tl.load(at + 3 * NP)
    if (SCALES == "bytes") | (SCALES == "nibbles"):
        d = tl.load(d_at + unit * GROUP // 32 * NP)
    return s0, s1, s2, s3, m0, m1, m2, m3, d


@triton.jit
def _half(word, i: tl.constexpr):
    """Returns the float16 in half i of a word, as float32."""
    return (word >> (16 * i)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _word(w0, w1, w2, w3, i: tl.constexpr, WIDE: tl.constexpr):
    """Selects the word with the scale or minimum of group i."""
    if WIDE:
        return w0 if i < 2 else w1 if i < 4 else w2 if i < 6 else w3
    return w0 if i < 4 else w1


@triton.jit
def _scale(words, i: tl.constexpr, SCALES: tl.constexpr):
    """Returns the scale of group i of a unit, float32."""
    word = _word(words[0], words[1], words[2], words[3], i, SCALES == "halves")
    if SCALES == "halves":
        return _half(word, i % 2)
    if SCALES == "exponents":
        return (((word >> (8 * (i % 4))) & 255) << 23).to(tl.float32, bitcast=True)
    if SCALES == "nibbles":
        return ((word >> (8 * (i % 4))) & 15).to(tl.float32) * _half(words[8], 0)
    return ((word << (24 - 8 * (i % 4))) >> 24).to(tl.float32) * _half(words[8], 0)


@triton.jit
def _minimum(words, i: tl.constexpr, SCALES: tl.constexpr):
    """Returns the minimum of group i of a unit, float32."""
    word = _word(words[4], words[5], words[6], words[7], i, SCALES == "halves")
    if SCALES == "halves":
        return _half(word, i % 2)
    if SCALES == "nibbles":
        return ((word >> (8 * (i % 4) + 4)) & 15).to(tl.float32) * _half(words[8], 1)
    return ((word >> (8 * (i % 4))) & 255).to(tl.float32) * _half(words[8], 1)


def _linear_codes(bits: int) -> str:
    """Returns the PTX that unpacks linear codes of `bits` bits. Its inputs are four words and, for
    3, 5 and 6 bits, the words of the high bits. It has two outputs for each of eight groups: a pair
    of bfloat16, which are 128 plus a code."""
    wide = bits >= 4  # low bits in int32 words, of which two make a pair for each half
    operand = 16 + (4 if wide else 2)  # of the bits above
    lines = []
    for pair in range(2):
        if wide:
            a, b = 16 + 2 * pair, 17 + 2 * pair
            lines += [f"prmt.b32 p0, ${a}, ${b}, 0x5410;", f"prmt.b32 p1, ${a}, ${b}, 0x7632;"]
        else:
            lines.append(f"mov.b32 p0, ${16 + pair};")
        if bits == 6:
            lines.append(f"mov.b32 h, ${operand + pair};")
        elif bits in (3, 5):  # a byte each
            selector = ("0x4140", "0x4342")[pair]
            lines.append(f"prmt.b32 h, ${operand}, 0, {selector};")
        for i in range(8):
            out = f"${2 * i + pair}"
            source = f"p{i // 4 if wide else 0}"
            shift = i % 4 * 4 if wide else 2 * i
            mask = 15 if wide else 3
            if shift:
                lines.append(f"shr.b32 t, {source}, {shift};")
                source = "t"
            lines.append(f"lop3.b32 {out}, {source}, {mask * 0x10001:#x}, 0x43004300, 0xEA;")
            if bits in (3, 5, 6):
                at, width = (4, 2) if bits == 6 else (bits - 1, 1)
                by = at - width * i
                way = "shl" if by > 0 else "shr"
                source = "h"
                if by:
                    lines.append(f"{way}.b32 t, h, {abs(by)};")
                    source = "t"
                more = (((1 << width) - 1) << at) * 0x10001
                lines.append(f"lop3.b32 {out}, {source}, {more:#x}, {out}, 0xEA;")
    return "{\n.reg .b32 p0, p1, h, t;\n" + "\n".join(lines) + "\n}\n"


def _book_codes(form: CodeForm) -> str:
    """Returns the PTX that looks up codes of four bits in a book of bfloat16 values. Inputs and
    outputs are those of `_linear_codes`. The high and the low byte of a value are looked up
    separately, for four groups of a word at once."""
    numbers = torch.from_numpy(gguf_codes.book(form)).bfloat16().view(torch.int16).numpy()
    octets = numbers.view(np.uint8).reshape(16, 2)
    lines = []
    tables = [octets[:, part].copy().view(np.uint32) for part in range(2)]
    for pair in range(2):
        for half in range(2):
            for word in range(2):
                source = f"${16 + 2 * pair + word}"
                lines.append(f"shr.b32 c, {source}, 16;" if half else f"mov.b32 c, {source};")
                lines += [
                    "and.b32 s, c, 0x7777;",
                    "shr.b32 t, c, 1;",
                    "lop3.b32 t, t, 0x4444, 0x3210, 0xEA;",
                ]
                for part, table in enumerate(tables):
                    t0, t1, t2, t3 = (f"{int(x):#x}" for x in table)
                    lines += [f"prmt.b32 x, {t0}, {t1}, s;", f"prmt.b32 y, {t2}, {t3}, s;"]
                    lines.append(f"prmt.b32 b{part}, x, y, t;")
                lines += [
                    f"prmt.b32 l{word}, b0, b1, 0x5140;",
                    f"prmt.b32 u{word}, b0, b1, 0x7362;",
                ]
            for i, (own, selector) in enumerate(
                (("l", "0x5410"), ("l", "0x7632"), ("u", "0x5410"), ("u", "0x7632"))
            ):
                out = 2 * (4 * half + i) + pair
                lines.append(f"prmt.b32 ${out}, {own}0, {own}1, {selector};")
    return "{\n.reg .b32 c, s, t, x, y, b0, b1, l0, l1, u0, u1;\n" + "\n".join(lines) + "\n}\n"


@functools.cache
def _instructions(kind: str) -> tuple[str, str]:
    """Returns (PTX that unpacks a type's codes, its registers); ("", "") if Triton's own code is
    used."""
    form = FORMS[kind]
    if form.book == "linear" and form.bits < 8:
        text = _linear_codes(form.bits)
    elif form.bits == 4:
        text = _book_codes(form)
    else:
        return "", ""
    inputs = (4 if form.bits >= 4 else 2) + {6: 2, 5: 1, 3: 1}.get(form.bits, 0)
    return text, "=&r," * 16 + ",".join("r" * inputs)


_BF16 = tl.constexpr((tl.bfloat16,) * 8)


@triton.jit
def _sum_units(
    acc, ahead, x_at, live, w_at, h_at, f_at, d_at, begin, end, K, NP,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BOOK: tl.constexpr, SCALES: tl.constexpr, MINS: tl.constexpr,
    EVEN: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr, REGISTERS: tl.constexpr,
    PRECISION: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Adds units `begin` … `end` of the product W · xᵀ to acc [BLOCK_N, BLOCK_M]. Addresses are
    those of a row's start: x_at [GROUP, BLOCK_M], w_at and h_at [BLOCK_N, GROUP], f_at and d_at
    [BLOCK_N]. `ahead`: the factors of the first unit. SCALED: sums are scaled, not weights. EVEN:
    rows are whole units."""
    UNIT: tl.constexpr = 8 * GROUP
    IN_REGISTERS: tl.constexpr = ASM != ""
    # what codes have too much: the bits of a bfloat16 that they are set into
    EXCESS: tl.constexpr = 128.0 if IN_REGISTERS and BOOK == "linear" and MINS and SCALED else 0.0
    ks = tl.arange(0, GROUP)
    ones = tl.full((acc.shape[0], GROUP), 1.0, tl.float32).to(kind)
    for unit in range(begin, end):
        words = ahead  # loaded while the unit before was multiplied
        ahead = _factors(f_at, d_at, tl.minimum(unit + 1, end - 1), NP, GROUP, SCALES, MINS)
        if BITS == 8:
            low = tl.load(w_at + unit * (2 * UNIT))
            more = tl.load(w_at + unit * (2 * UNIT) + UNIT)
        else:
            low = tl.load(w_at + unit * UNIT)
            more = low
            if (BITS == 3) | (BITS == 5) | (BITS == 6):
                more = tl.load(h_at + unit * UNIT)
        if IN_REGISTERS:
            if (BITS == 3) | (BITS == 5) | (BITS == 6):
                made = tl.inline_asm_elementwise(ASM, REGISTERS, [low, more], _BF16, True, 4)
            else:
                made = tl.inline_asm_elementwise(ASM, REGISTERS, [low], _BF16, True, 4)
        for i in tl.static_range(8):
            k = unit * UNIT + i * GROUP
            if EVEN:
                x = tl.load(x_at + k, mask=live, other=0.0)
            else:
                x = tl.load(x_at + k, mask=live & (k + ks < K)[:, None], other=0.0)
            scale = _scale(words, i, SCALES)[:, None]
            if IN_REGISTERS:
                w = made[i]
                if BOOK == "linear" and EXCESS == 0.0:
                    w -= 128.0 + ZERO
            else:
                w = _number(_code(low, more, i, BITS), BITS, ZERO, BOOK, kind)
            if SCALED:
                acc += tl.dot(w, x, input_precision=PRECISION) * scale
                if MINS:  # a product with ones, so that the sums lie as the others do
                    less = _minimum(words, i, SCALES)[:, None] + EXCESS * scale
                    acc -= tl.dot(ones, x, input_precision=PRECISION) * less
            else:
                value = w.to(tl.float32) * scale
                if MINS:
                    value -= _minimum(words, i, SCALES)[:, None]
                acc = tl.dot(value.to(kind), x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _weight_rows(n, w_ptr, h_ptr, units, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Returns the addresses of the first words of rows n: (low bits, high bits), [BLOCK_N, GROUP]
    each."""
    slab = (n // 8).to(tl.int64)[:, None] * (units * (8 * GROUP))
    within = (n % 8)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return w_ptr + slab * (2 if BITS == 8 else 1) + within, h_ptr + slab + within


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(
    x_ptr, w_ptr, h_ptr, f_ptr, d_ptr, bias_ptr, y_ptr, partial_ptr, counter_ptr, M, N, K, units, y_stride, NP,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BOOK: tl.constexpr, SCALES: tl.constexpr, MINS: tl.constexpr,
    EVEN: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr, REGISTERS: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """yᵀ = W · xᵀ. Weight rows fill the tall side of a tile. Thread blocks of neighbouring rows of x
    read the same weights one after the other."""
    kind: tl.constexpr = x_ptr.dtype.element_ty
    tile, pid_k = tl.program_id(0), tl.program_id(1)
    tiles_m = tl.cdiv(M, BLOCK_M)
    pid_n, pid_m = tile // tiles_m, tile % tiles_m
    rows = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(rows, NP - 1)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    live = (m < M)[None, :]
    w_at, h_at = _weight_rows(n, w_ptr, h_ptr, units, BITS, GROUP)
    x_at = x_ptr + m[None, :].to(tl.int64) * K + tl.arange(0, GROUP)[:, None]
    each = tl.cdiv(units, SPLITS)
    begin = tl.minimum(pid_k * each, units - 1)
    end = tl.minimum(pid_k * each + each, units)
    ahead = _factors(f_ptr + n, d_ptr + n, begin, NP, GROUP, SCALES, MINS)
    if PDL:
        pdl_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc = _sum_units(
        acc, ahead, x_at, live, w_at, h_at, f_ptr + n, d_ptr + n, begin, end, K, NP,
        BITS, GROUP, ZERO, BOOK, SCALES, MINS, EVEN, SCALED, ASM, REGISTERS, PRECISION, kind,
    )  # fmt: skip
    is_last = True
    if SPLITS > 1:
        at = (
            tl.arange(0, BLOCK_N)[:, None] * BLOCK_M
            + tl.arange(0, BLOCK_M)[None, :]
            + tile * (BLOCK_N * BLOCK_M)
        )
        acc, is_last = reduce_splits(
            acc, partial_ptr, counter_ptr, at, tile, pid_k, tl.num_programs(0) * BLOCK_N * BLOCK_M, SPLITS, BLOCK_N, BLOCK_M
        )  # fmt: skip
    if is_last:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
        out = y_ptr + m[None, :].to(tl.int64) * y_stride + rows[:, None]
        tl.store(out, acc.to(kind), mask=live & (rows < N)[:, None])


def _constants(w: CodedLinear, x: Tensor) -> dict[str, object]:
    form = FORMS[w.type]
    chip = x.dtype == torch.bfloat16 and not knobs.runtime.interpret
    text, registers = _instructions(w.type) if chip else ("", "")
    return dict(
        BITS=form.bits, GROUP=form.group, ZERO=form.zero, BOOK=form.book, SCALES=form.scales, MINS=form.mins,
        EVEN=w.inner % (8 * form.group) == 0, ASM=text, REGISTERS=registers,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
    )  # fmt: skip


def linear(
    x: Tensor,
    w: CodedLinear | JoinedLinear,
    scratch: ArrivalCounters,
    *,
    tile: tuple[int, int, int, int, int] | None = None,
) -> Tensor:
    """x [T, K] → [T, out]. `tile`: (BLOCK_M, BLOCK_N, SPLITS, warps, stages)."""
    x = x.contiguous()
    if tile is None and len(x) > (EXPAND_TOKENS if w.dense is None else DENSE_TOKENS):
        return F.linear(x, expand(w) if w.dense is None else w.dense, _bias(w))
    parts = w.parts if isinstance(w, JoinedLinear) else (w,)
    y = torch.empty(len(x), w.out_features, dtype=x.dtype, device=x.device)
    first = 0
    for part in parts:
        _multiply(x, part, y, first, scratch, tile or default_tile(part, len(x)))
        first += part.rows
    return y


def default_tile(w: CodedLinear, num_tokens: int) -> tuple[int, int, int, int, int]:
    """(BLOCK_M, BLOCK_N, SPLITS, warps, stages): two or more thread blocks on each of some 132
    multiprocessors, if there are units enough."""
    block_m = max(8, min(128, triton.next_power_of_2(num_tokens)))
    wanted = 528
    if block_m <= SCALED_TOKENS:  # 16 rows a warp: sums stay where they are made
        block_n, warps, stages = 32, 2, 3
    else:
        block_n, warps, stages = (64, 4, 2) if block_m <= 64 else (128, 8, 2)
        wanted = 264 if block_m <= 64 else 132
    tiles = triton.cdiv(w.rows, block_n) * triton.cdiv(num_tokens, block_m)
    units = w.factors.shape[0]
    splits = 1
    while splits < 8 and tiles * splits < wanted and units >= 4 * splits:
        splits *= 2
    return block_m, block_n, splits, warps, stages


def _multiply(
    x: Tensor, w: CodedLinear, y: Tensor, first: int, scratch: ArrivalCounters, tile: tuple[int, int, int, int, int]
) -> None:  # fmt: skip
    """Write x · wᵀ to the columns of y from `first` on."""
    (num_tokens, inner), units = x.shape, w.factors.shape[0]
    block_m, block_n, splits, warps, stages = tile
    if x.dtype.itemsize == 4:
        stages = 1
    tiles = triton.cdiv(w.rows, block_n) * triton.cdiv(num_tokens, block_m)
    splits = min(splits, units) if tiles <= NUM_COUNTERS else 1
    splits = triton.cdiv(units, triton.cdiv(units, splits))  # none is empty
    partial = x
    if splits > 1:
        partial = torch.empty(
            tiles * splits * block_n * block_m, dtype=torch.float32, device=x.device
        )
    _linear_kernel[(tiles, splits)](
        x, w.weight, w.weight if w.high is None else w.high, w.factors, w.factors if w.d is None else w.d,
        x if w.bias is None else w.bias, y[:, first:], partial, scratch.counters, num_tokens, w.rows, inner, units, y.shape[1],
        w.factors.shape[2], **_constants(w, x), SCALED=num_tokens <= SCALED_TOKENS, HAS_BIAS=w.bias is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, SPLITS=splits, num_warps=warps, num_stages=stages, **pdl_options(y),
    )  # fmt: skip


def expanded(w: CodedLinear | JoinedLinear) -> Linear:
    """Returns the same weight as a dense product's."""
    return Linear(weight=expand(w) if w.dense is None else w.dense, bias=_bias(w))


def _bias(w: CodedLinear | JoinedLinear) -> Tensor | None:
    parts = w.parts if isinstance(w, JoinedLinear) else (w,)
    own = [part.bias for part in parts if part.bias is not None]
    return torch.cat(own) if own else None


@triton.jit(do_not_specialize=["scale"])
def _rows_kernel(
    ids_ptr, w_ptr, h_ptr, f_ptr, d_ptr, out_ptr, scale, N, K, units, NP,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BOOK: tl.constexpr, SCALES: tl.constexpr, MINS: tl.constexpr,
    GATHER: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Expands one unit of BLOCK_N rows: of all rows in order, or with GATHER of the rows `ids`."""
    kind: tl.constexpr = out_ptr.dtype.element_ty
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = at < N
    n = at
    if GATHER:
        n = tl.load(ids_ptr + at, mask=live, other=0).to(tl.int32)
    n = tl.minimum(n, NP - 1)
    unit, ks = tl.program_id(1), tl.arange(0, GROUP)
    UNIT: tl.constexpr = 8 * GROUP
    w_at, h_at = _weight_rows(n, w_ptr, h_ptr, units, BITS, GROUP)
    words = _factors(f_ptr + n, d_ptr + n, unit, NP, GROUP, SCALES, MINS)
    if BITS == 8:
        low, more = tl.load(w_at + unit * (2 * UNIT)), tl.load(w_at + unit * (2 * UNIT) + UNIT)
    else:
        low = tl.load(w_at + unit * UNIT)
        more = low
        if (BITS == 3) | (BITS == 5) | (BITS == 6):
            more = tl.load(h_at + unit * UNIT)
    out = out_ptr + at[:, None].to(tl.int64) * K + ks[None, :]
    for i in tl.static_range(8):
        number = _number(_code(low, more, i, BITS), BITS, ZERO, BOOK, tl.float32)
        value = number * _scale(words, i, SCALES)[:, None]
        if MINS:
            value -= _minimum(words, i, SCALES)[:, None]
        value = value.to(kind)
        if HAS_SCALE:
            value = (value.to(tl.float32) * scale).to(kind)
        k = unit * UNIT + i * GROUP
        tl.store(out + k, value, mask=live[:, None] & (k + ks < K)[None, :])


def _rows(w: CodedLinear, out: Tensor, ids: Tensor | None, scale: float = 1.0) -> None:
    form, units = FORMS[w.type], w.factors.shape[0]
    block_n = 16 if ids is None else 1
    _rows_kernel[(triton.cdiv(len(out), block_n), units)](
        w.weight if ids is None else ids, w.weight, w.weight if w.high is None else w.high, w.factors,
        w.factors if w.d is None else w.d, out, scale, len(out), w.inner, units, w.factors.shape[2],
        BITS=form.bits, GROUP=form.group, ZERO=form.zero, BOOK=form.book, SCALES=form.scales, MINS=form.mins,
        GATHER=ids is not None, HAS_SCALE=scale != 1.0, BLOCK_N=block_n, num_warps=4 if ids is None else 1,
    )  # fmt: skip


def expand(w: CodedLinear | JoinedLinear) -> Tensor:
    """The dense weight [out, in] in the model's type: the file's values, rounded once."""
    parts = w.parts if isinstance(w, JoinedLinear) else (w,)
    out = torch.empty(w.out_features, parts[0].inner, dtype=parts[0].dtype, device=w.weight.device)
    first = 0
    for part in parts:
        _rows(part, out[first : first + part.rows], None)
        first += part.rows
    return out


def embed(token_ids: Tensor, table: CodedLinear, scale: float = 1.0) -> Tensor:
    """`OpSet.embed`."""
    out = torch.empty(len(token_ids), table.inner, dtype=table.dtype, device=token_ids.device)
    if len(out):
        factor = torch.tensor(scale, dtype=table.dtype).item()
        _rows(table, out, token_ids.contiguous(), factor)
    return out


@triton.jit
def _experts_kernel(
    x_ptr, w_ptr, h_ptr, f_ptr, d_ptr, bias_ptr, y_ptr, order_ptr, starts_ptr, ends_ptr, N, K, X, units, NP,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BOOK: tl.constexpr, SCALES: tl.constexpr, MINS: tl.constexpr,
    EVEN: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr, REGISTERS: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, UNSORTED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """yᵀ = W · xᵀ for one tile of an expert's pairs, as `gathered._expert_gemm_kernel`."""
    kind: tl.constexpr = x_ptr.dtype.element_ty
    if PDL:
        pdl_wait()
    expert, position, live, pair = pairs_of_tile(
        tl.program_id(1), order_ptr, starts_ptr, ends_ptr, X, BLOCK_M, BLOCK_X, UNSORTED
    )
    if expert < X:
        source = (pair // TOP_K if GATHER else position).to(tl.int64)
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        n = expert * N + tl.minimum(rows, N - 1)
        w_at, h_at = _weight_rows(n, w_ptr, h_ptr, units, BITS, GROUP)
        x_at = x_ptr + source[None, :] * K + tl.arange(0, GROUP)[:, None]
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        ahead = _factors(f_ptr + n, d_ptr + n, 0, NP, GROUP, SCALES, MINS)
        acc = _sum_units(
            acc, ahead, x_at, live[None, :], w_at, h_at, f_ptr + n, d_ptr + n, 0, units, K, NP,
            BITS, GROUP, ZERO, BOOK, SCALES, MINS, EVEN, SCALED, ASM, REGISTERS, PRECISION, kind,
        )  # fmt: skip
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n).to(tl.float32)[:, None]
        out = y_ptr + position.to(tl.int64)[None, :] * N + rows[:, None]
        tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=live[None, :] & (rows < N)[:, None])


def expert_gemm(
    x: Tensor, w: CodedLinear, tiles: ExpertTiles, spec: MoESpec, num_rows: int, *, gather: bool
) -> Tensor:
    """`gathered.expert_gemm` for experts' weights in a GGUF type."""
    y = torch.empty(tiles.order.numel(), num_rows, dtype=x.dtype, device=x.device)
    block_n, warps, stages = (64, 4, 3) if tiles.tile_m <= 64 else (128, 8, 2)
    _experts_kernel[(triton.cdiv(num_rows, block_n), tiles.max_tiles)](
        x, w.weight, w.weight if w.high is None else w.high, w.factors, w.factors if w.d is None else w.d,
        x if w.bias is None else w.bias, y, tiles.order, tiles.starts, tiles.tile_ends, num_rows, w.inner,
        spec.num_local_experts, w.factors.shape[0], w.factors.shape[2], **_constants(w, x),
        SCALED=tiles.tile_m <= SCALED_TOKENS, HAS_BIAS=w.bias is not None, TOP_K=spec.num_experts_per_token, GATHER=gather,
        UNSORTED=tiles.inverse is None, BLOCK_M=tiles.tile_m, BLOCK_N=block_n,
        BLOCK_X=triton.next_power_of_2(spec.num_local_experts), num_warps=warps,
        num_stages=stages if x.dtype.itemsize == 2 else 1, **pdl_options(x),
    )  # fmt: skip
    return y
