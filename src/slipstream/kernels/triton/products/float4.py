"""Linear layers with weights of 4-bit floats (`Float4Linear`: NVFP4 and MXFP4), and what they share
with experts (`experts/mxfp4.py`): the order in which codes are stored, and their expansion.

A shift and a mask make a bfloat16 of a code: its sign, exponent and mantissa bits land on those of
the bfloat16, whose exponent is then 126 too small. One multiplication by the group's scale corrects
that, without rounding: a product of an e2m1 and an e4m3 has six bits. Codes are thus expanded in
registers, from which the tensor cores read them. What belongs to a row is multiplied with its
sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.kernels.thresholds import Thresholds
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.kernels.triton.products.split_k import ArrivalCounters, reduce_splits
from slipstream.kernels.weights.forms import Float4Linear, GroupedLinear
from slipstream.kernels.weights.quantize import unpack4
from slipstream.platform import platform_of

CHUNK = 128
"""Inputs of a row whose codes are stored together: 64 bytes. The last chunk may be half empty."""
SLAB = 8
"""Number of rows whose chunks are stored together."""
CODES_AT_ONCE = 2**24
"""Codes that are laid out together. They temporarily take some tens of bytes each."""
MAX_TOKENS = 192
"""Maximum number of tokens for which linear layers expand the codes themselves. For more the weight is
expanded first, once. Llama-3-8B's four linear layers take 424 µs at 256 tokens on an H200, expanded 372."""
DENSE_TOKENS = 64
"""Maximum number of tokens for which linear layers expand the codes themselves if a dense copy exists."""
THRESHOLDS = Thresholds(tokens=(DENSE_TOKENS, MAX_TOKENS))


# --- The order of codes ----------------------------------------------------------------------------------------------


def pack_float4(w: GroupedLinear) -> Float4Linear:
    """Copy codes and scales into the order in which the kernels read them."""
    (rows, quarter), groups, size = w.weight.shape, len(w.scales), w.group_size
    inner, chunks, device = quarter * 4, triton.cdiv(quarter * 4, CHUNK), w.weight.device
    parts = CHUNK // 4 // size
    assert rows % SLAB == 0, "`check_scheme` and `native_group_size` see to it"
    is_nvfp4 = size == 16
    # so ranks with different experts have the same factor, and can exchange experts
    factor = 256.0 if is_nvfp4 or w.scales.is_meta else max(1.0, float(w.scales.max()))
    words = torch.empty(rows // SLAB, chunks, SLAB, CHUNK // 4, dtype=torch.int16, device=device)
    exponents = torch.empty(rows // SLAB, chunks, SLAB * parts, dtype=torch.int32, device=device)
    step = max(1, CODES_AT_ONCE // inner // SLAB) * SLAB
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        slabs = slice(part.start // SLAB, part.stop // SLAB)
        codes = unpack4(w.weight[part], w.chunk)
        scales = w.scales[:, part].float().T
        codes = torch.nn.functional.pad(codes, (0, chunks * CHUNK - inner))
        scales = torch.nn.functional.pad(scales, (0, 4 * parts * chunks - groups))
        if is_nvfp4:  # a scale of 0 has no byte
            codes *= (scales != 0).int().repeat_interleave(size, dim=1)
            made = _five_exponent_bits(scales)
        else:
            made = ((scales / factor).log2().round().int() + 253).clamp(min=0)
        by_code = codes.unflatten(1, (chunks * parts, 4, size)).unbind(2)
        bits = [_placed(c, at) for c, at in zip(by_code, PLACES, strict=True)]
        word = (bits[0] | bits[1] | bits[2] | bits[3]).view(len(codes), chunks, CHUNK // 4)
        words[slabs] = word.to(torch.int16).unflatten(0, (-1, SLAB)).transpose(1, 2)
        e = made.unflatten(1, (chunks, parts, 4))
        e = e[..., 0] | e[..., 1] << 8 | e[..., 2] << 16 | e[..., 3] << 24
        exponents[slabs] = e.unflatten(0, (-1, SLAB)).transpose(1, 2).flatten(2)
    return Float4Linear(
        weight=words,
        exponents=exponents,
        factor=factor,
        bias=w.bias,
        inner=inner,
        row_scales=w.row_scales,
        divides=w.divides,
    )


def _five_exponent_bits(scales: Tensor) -> Tensor:
    """Converts e4m3 numbers (0, or at least 2^-9) to bytes of five exponent bits and three mantissa
    bits.

    The exponent's bias is 21: with 0x7000 above it, 16 times the byte is the number · 2^118 as a
    bfloat16."""
    bits = (scales * 2.0**118).bfloat16().view(torch.int16).int()
    if not bits.is_meta and not ((bits & 0xF00F == 0x7000) | (scales == 0)).all():
        raise CheckpointError(
            "scales of nvfp4 must be numbers of e4m3 from 0 on", field="weight_scale"
        )
    return torch.where(scales == 0, 0, bits >> 4 & 255)


PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))
"""Bits of a word for a code's sign, its two exponent bits and its mantissa bit, for each of the four codes."""


def _placed(codes: Tensor, places: tuple[int, int, int, int]) -> Tensor:
    made = torch.zeros_like(codes)
    for source, target in zip((3, 2, 1, 0), places, strict=True):
        made |= (codes >> source & 1) << target
    return made


# --- Expansion -------------------------------------------------------------------------------------------------------

_CODES = """
and.b32 $0, $4, 0x81C081C0;
shl.b32 a, $4, 3;
and.b32 $1, a, 0x81C081C0;
shl.b32 a, $4, 6;
and.b32 $2, a, 0x81C081C0;
shl.b32 a, $4, 1;
and.b32 a, a, 0x80008000;
shr.u32 b, $4, 3;
and.b32 b, b, 0x01800180;
shr.u32 c, $4, 7;
and.b32 c, c, 0x00400040;
or.b32 a, a, b;
or.b32 $3, a, c;
"""
INSTRUCTIONS = f"""
{{
.reg .b32 a, b, c;
{_CODES.strip()}
mul.rn.bf16x2 $0, $0, $5;
mul.rn.bf16x2 $1, $1, $6;
mul.rn.bf16x2 $2, $2, $7;
mul.rn.bf16x2 $3, $3, $8;
}}
"""
"""PTX: two words → four pairs of bfloat16, each times its group's scale."""
NVFP4_INSTRUCTIONS = f"""
{{
.reg .b32 a, b, c, s, t, u, v;
{_CODES.strip()}
prmt.b32 s, $5, 0, 0x4040;
prmt.b32 t, $5, 0, 0x4141;
prmt.b32 u, $5, 0, 0x4242;
prmt.b32 v, $5, 0, 0x4343;
mad.lo.u32 s, s, 16, 0x70007000;
mad.lo.u32 t, t, 16, 0x70007000;
mad.lo.u32 u, u, 16, 0x70007000;
mad.lo.u32 v, v, 16, 0x70007000;
mul.rn.bf16x2 $0, $0, s;
mul.rn.bf16x2 $1, $1, t;
mul.rn.bf16x2 $2, $2, u;
mul.rn.bf16x2 $3, $3, v;
}}
"""
"""PTX: two words and the bytes of their four scales (the same word twice) → four pairs of bfloat16."""


@triton.jit
def scale_bits(exponents, i: tl.constexpr, NVFP4: tl.constexpr):
    """Returns the scale of group i as an integer with the bits of a bfloat16."""
    byte = (exponents >> (8 * i)) & 0xFF
    if NVFP4:
        return byte << 4 | 0x7000
    return byte << 7


@triton.jit
def _number(bits, scale):
    """Returns code · scale in float32. Both are given as an integer with the bits of a bfloat16."""
    return (bits << 16).to(tl.float32, bitcast=True) * (scale << 16).to(tl.float32, bitcast=True)


@triton.jit
def _pairs_of(scale):
    return scale.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def expand(
    words, exponents, dtype: tl.constexpr, IN_PLACE: tl.constexpr, NVFP4: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Expands words of four codes [N, group] into four tensors of numbers [N, group]. The numbers
    still lack the factor `Float4Linear.factor`. IN_PLACE: by the instructions ASM."""
    if IN_PLACE and NVFP4:
        a, b, c, d = tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r,r", [words, exponents[:, None]],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        return a, b, c, d
    s0 = scale_bits(exponents, 0, NVFP4)[:, None]
    s1 = scale_bits(exponents, 1, NVFP4)[:, None]
    s2 = scale_bits(exponents, 2, NVFP4)[:, None]
    s3 = scale_bits(exponents, 3, NVFP4)[:, None]
    if IN_PLACE:
        a, b, c, d = tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r,r,r,r", [words, _pairs_of(s0), _pairs_of(s1), _pairs_of(s2), _pairs_of(s3)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        w = words.to(tl.int32)
        a = _number(w & 0x81C0, s0).to(dtype)
        b = _number((w << 3) & 0x81C0, s1).to(dtype)
        c = _number((w << 6) & 0x81C0, s2).to(dtype)
        d = _number((w << 1) & 0x8000 | (w >> 3) & 0x0180 | (w >> 7) & 0x0040, s3).to(dtype)
    return a, b, c, d


def is_nvfp4(w: Float4Linear) -> bool:
    return w.group_size == 16


def instructions(w: Float4Linear) -> str:
    return NVFP4_INSTRUCTIONS if is_nvfp4(w) else INSTRUCTIONS


def expands_in_place(x: Tensor) -> bool:
    """Whether `expand` has instructions for these inputs."""
    return x.dtype == torch.bfloat16 and platform_of(x.device).arch.wgmma


@triton.jit
def inputs(at, live, js, left, GROUP: tl.constexpr, EVEN: tl.constexpr):
    """Loads the inputs of four groups, a tensor [GROUP, BLOCK_M] for each. Only the first `left`
    inputs exist."""
    if EVEN:
        x0 = tl.load(at, mask=live[None, :], other=0.0)
        x1 = tl.load(at + GROUP, mask=live[None, :], other=0.0)
        x2 = tl.load(at + 2 * GROUP, mask=live[None, :], other=0.0)
        x3 = tl.load(at + 3 * GROUP, mask=live[None, :], other=0.0)
    else:
        x0 = tl.load(at, mask=live[None, :] & (js < left)[:, None], other=0.0)
        x1 = tl.load(at + GROUP, mask=live[None, :] & (js < left - GROUP)[:, None], other=0.0)
        x2 = tl.load(
            at + 2 * GROUP, mask=live[None, :] & (js < left - 2 * GROUP)[:, None], other=0.0
        )
        x3 = tl.load(
            at + 3 * GROUP, mask=live[None, :] & (js < left - 3 * GROUP)[:, None], other=0.0
        )
    return x0, x1, x2, x3


# --- Dense products --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M"])
def _float4_linear_kernel(
    x_ptr, w_ptr, exponents_ptr, rows_ptr, bias_ptr, y_ptr, partial_ptr, counter_ptr, M, N, K, factor,
    NVFP4: tl.constexpr, DIVIDES: tl.constexpr, HAS_BIAS: tl.constexpr, IN_PLACE: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """yᵀ = W · xᵀ for BLOCK_N rows of the weight and BLOCK_M tokens, 128 inputs at a time. K is split
    over SPLITS thread blocks if there are too few rows to fill the chip."""
    GROUP: tl.constexpr = 16 if NVFP4 else 32
    PARTS: tl.constexpr = 2 if NVFP4 else 1
    pid_n, pid_k, pid_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    js = tl.arange(0, GROUP)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < M
    all_chunks = tl.cdiv(K, 128)
    chunks = tl.cdiv(all_chunks, SPLITS)
    at = tl.minimum(n // 8, N // 8 - 1).to(tl.int64) * (all_chunks * 8) + n % 8
    w_at = w_ptr + at[:, None] * 32 + js[None, :]
    e_at = exponents_ptr + at * PARTS
    x_at = x_ptr + m[None, :].to(tl.int64) * K + js[:, None]
    if PDL:
        pdl_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    begin = pid_k * chunks
    for chunk in range(begin, tl.minimum(begin + chunks, all_chunks)):
        for part in tl.static_range(PARTS):
            words = tl.load(w_at + chunk * 256 + part * GROUP)
            exponents = tl.load(e_at + chunk * (8 * PARTS) + part)
            first = chunk * 128 + part * 4 * GROUP
            x0, x1, x2, x3 = inputs(x_at + first, live, js, K - first, GROUP, EVEN)
            a, b, c, d = expand(words, exponents, x_ptr.dtype.element_ty, IN_PLACE, NVFP4, ASM)
            acc = tl.dot(a, x0, acc, input_precision=PRECISION)
            acc = tl.dot(b, x1, acc, input_precision=PRECISION)
            acc = tl.dot(c, x2, acc, input_precision=PRECISION)
            acc = tl.dot(d, x3, acc, input_precision=PRECISION)
    is_last = True
    if SPLITS > 1:
        place = n[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        size = tl.num_programs(0) * BLOCK_N * BLOCK_M
        acc, is_last = reduce_splits(
            acc, partial_ptr, counter_ptr, place, pid_n, pid_k, size, SPLITS, BLOCK_N, BLOCK_M
        )
    if is_last:
        y = acc * factor
        if NVFP4:
            rows = tl.load(rows_ptr + n, mask=n < N, other=1.0)[:, None]
            y = y / rows if DIVIDES else y * rows
        if HAS_BIAS:
            y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(
            y_ptr + m[None, :].to(tl.int64) * N + n[:, None],
            y.to(y_ptr.dtype.element_ty),
            mask=live[None, :] & (n < N)[:, None],
        )


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Sizes of a thread block's tile: weight rows, tokens (a power of two from 16 on), parts of K."""

    rows: int
    tokens: int
    splits: int
    warps: int
    stages: int


def default_tile(num_tokens: int, outer: int, inner: int) -> LinearTile:
    """The tile for a number of tokens, near the best of those tried for Llama-3-8B's products on an H200. Of few, splits
    make enough thread blocks to keep memory busy."""
    tokens = min(128, max(16, triton.next_power_of_2(num_tokens)))
    if tokens > 64:
        return LinearTile(128, 128, 1, 8, 3)
    wanted, least = (448, 512) if tokens < 64 else (256, 1024)  # thread blocks; inputs of a split
    splits = max(1, min(8, wanted // triton.cdiv(outer, 128), inner // least))
    return LinearTile(
        128, tokens, 1 << (splits.bit_length() - 1), *((4, 3) if tokens < 64 else (8, 4))
    )


def float4_linear(
    x: Tensor, w: Float4Linear, scratch: ArrivalCounters, *, tile: LinearTile | None = None
) -> Tensor:
    """Product x [T, K] → [T, N] whose codes are expanded again for each tile of tokens."""
    (num_tokens, inner), outer = x.shape, w.out_features
    t = tile or default_tile(num_tokens, outer, inner)
    y = torch.empty(num_tokens, outer, dtype=x.dtype, device=x.device)
    columns, partial = triton.cdiv(outer, t.rows), x
    if t.splits > 1:
        assert num_tokens <= t.tokens
        partial = torch.empty(
            t.splits * columns * t.rows * t.tokens, dtype=torch.float32, device=x.device
        )
    _float4_linear_kernel[(columns, t.splits, triton.cdiv(num_tokens, t.tokens))](
        x.contiguous(), w.weight, w.exponents, x if w.row_scales is None else w.row_scales, x if w.bias is None else w.bias,
        y, partial, scratch.counters, num_tokens, outer, inner, w.factor,
        NVFP4=is_nvfp4(w), DIVIDES=w.divides, HAS_BIAS=w.bias is not None, IN_PLACE=expands_in_place(x),
        EVEN=inner % CHUNK == 0, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", BLOCK_M=t.tokens, BLOCK_N=t.rows,
        SPLITS=t.splits, ASM=instructions(w), num_warps=t.warps, num_stages=t.stages, **pdl_options(y),
    )  # fmt: skip
    return y


@triton.jit
def _expand_kernel(
    w_ptr, exponents_ptr, rows_ptr, out_ptr, N, K, factor,
    NVFP4: tl.constexpr, DIVIDES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Convert a chunk of BLOCK_N rows from codes to numbers."""
    GROUP: tl.constexpr = 16 if NVFP4 else 32
    PARTS: tl.constexpr = 2 if NVFP4 else 1
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk, js = tl.program_id(1), tl.arange(0, GROUP)
    at = tl.minimum(n // 8, N // 8 - 1).to(tl.int64) * (tl.cdiv(K, 128) * 8) + n % 8
    live = (n < N)[:, None]
    for part in tl.static_range(PARTS):
        words = tl.load(w_ptr + at[:, None] * 32 + chunk * 256 + part * GROUP + js[None, :])
        w = words.to(tl.int32)
        exponents = tl.load(exponents_ptr + at * PARTS + chunk * (8 * PARTS) + part)
        first = chunk * 128 + part * 4 * GROUP
        out = out_ptr + n[:, None].to(tl.int64) * K + first + js[None, :]
        for i in tl.static_range(4):
            if i < 3:
                bits = (w << (3 * i)) & 0x81C0
            else:
                bits = (w << 1) & 0x8000 | (w >> 3) & 0x0180 | (w >> 7) & 0x0040
            # The code's own value, so that it is multiplied by the scale that the checkpoint's library makes.
            code = (bits << 16).to(
                tl.float32, bitcast=True
            ) * 85070591730234615865843651857942052864.0
            scale = (scale_bits(exponents, i, NVFP4) << 16).to(tl.float32, bitcast=True)
            if NVFP4:
                rows = tl.load(rows_ptr + n, mask=n < N, other=1.0)
                scale = scale * 3.009265538105056e-36  # 2^-118
                scale = tl.div_rn(scale, rows) if DIVIDES else scale * rows
            else:
                scale = scale * (factor * 1.1754943508222875e-38)  # 2^-126
            inside = live & (js < K - first - i * GROUP)[None, :]
            tl.store(
                out + i * GROUP, (code * scale[:, None]).to(out_ptr.dtype.element_ty), mask=inside
            )


def expanded(w: Float4Linear, dtype: torch.dtype) -> Tensor:
    """Dense weight [out, in] for a linear layer of many tokens: the values that the library of the
    checkpoint's tool computes."""
    outer, inner = w.out_features, w.inner
    out = torch.empty(outer, inner, dtype=dtype, device=w.weight.device)
    _expand_kernel[(triton.cdiv(outer, 32), triton.cdiv(inner, CHUNK))](
        w.weight, w.exponents, w.exponents if w.row_scales is None else w.row_scales, out, outer, inner, w.factor,
        NVFP4=is_nvfp4(w), DIVIDES=w.divides, BLOCK_N=32, num_warps=4,
    )  # fmt: skip
    return out
