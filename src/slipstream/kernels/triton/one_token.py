"""All layers of a decode step of one sequence in one kernel.

Such a step is bound by reading every weight once, and as some 225 kernels it waits a third of its time: for launches, and for
the memory to be busy again after each. Here one program stays on each multiprocessor and walks through the layers; where a
part needs what all programs made, they meet at a counter in memory, and while they wait the weights that come next are
already on their way into the L2 cache. A layer is:

    norm → q, k, v  |  rope, cache, attention  |  output, into the residual  |  norm → up, activation  |  down, into the residual

with a meeting at each bar (a parallel block has two fewer). Every program norms the whole row for itself, which is cheaper
than waiting for one to do it. Rows of weights are dealt out in units of ROWS that stand one after another, so that what a
program reads is one stretch of memory.

Attention splits the keys over the programs of a kv head; the last to finish adds the parts up (as `parts.sum_parts`).

All programs must run at once: there are as many as multiprocessors, and nothing else may hold one for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.ops import AttentionMetadata, GroupedLinear, LayerKV, Linear, ScaledLinear, TokenShape
from slipstream.kernels.triton.overlap import follow, overlapped
from slipstream.kernels.triton.pointwise import ACTIVATIONS, _activate, _cached

DENSE, FP8, INT4 = 0, 1, 2
NO_NORM, RMS, LAYER = 0, 1, 2

POINTERS = (
    *("norm", "norm_bias", "mlp_norm", "mlp_norm_bias", "q_norm", "k_norm", "k", "v", "k_scale", "v_scale"),
    *(f"{product}{part}" for product in ("qkv", "out", "up", "down") for part in ("", "_scales", "_bias")),
)
"""What a layer's row of the table points at, in this order; 0 where there is nothing."""

KEYS_TIMES_WIDTH = 8192
"""Products of a tile of keys with the query heads of a kv head: what fits into the registers of a program."""


@triton.jit
def _address(scratch_ptr, table_ptr, i, KIND: tl.constexpr):
    """Entry i of a layer's row, as a pointer: entries are distances from the scratch in units of 16 bytes, which tells the
    compiler that the widest loads are aligned."""
    return scratch_ptr.to(tl.pointer_type(KIND)) + tl.load(table_ptr + i) * (128 // KIND.primitive_bitwidth)


@triton.jit
def _seen_counter(counter_ptr):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [counter_ptr], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _meet(counter_ptr, target, PROGRAMS: tl.constexpr):
    """Wait until all programs have come here; then what they wrote before can be read. `target`: arrivals so far."""
    if PROGRAMS > 1:
        tl.debug_barrier()
        tl.atomic_add(counter_ptr, 1, sem="release")
        while _seen_counter(counter_ptr) < target:
            pass
    tl.debug_barrier()


@triton.jit
def _fetch(w_ptr, first, last, ROW_BYTES: tl.constexpr, BYTES: tl.constexpr, PROGRAMS: tl.constexpr):
    """Bring the beginning of rows first … last − 1 into the L2 cache, at most BYTES, without waiting for it."""
    if PROGRAMS > 1 and last > first:
        piece: tl.constexpr = BYTES // 256
        start = w_ptr.to(tl.int64) + first.to(tl.int64) * ROW_BYTES
        end = (last - first).to(tl.int64) * ROW_BYTES - piece
        at = start + tl.maximum(tl.minimum(tl.arange(0, 256).to(tl.int64) * piece, end), 0)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [at, tl.full((256,), piece, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _prepare(
    source_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    offset,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """The row that a product reads, for this program alone: normed, rounded to 8 bits if the weights are, in float16 if they
    are codes. Its scale."""
    at = tl.arange(0, BLOCK)
    mask = at < SIZE
    x = tl.load(source_ptr + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    if NORM != 0:
        if NORM == 2:
            x = tl.where(mask, x - tl.sum(x, 0) / SIZE, 0.0)
        weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32) + offset
        x = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
        if HAS_BIAS:
            x += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0
    if FORMAT != 0:
        top: tl.constexpr = 448.0 if FORMAT == 1 else 1024.0  # with codes: four sums of them stay in float16's range
        scale = tl.maximum(tl.max(tl.abs(tl.where(mask, x, 0.0)), 0), 1e-12) / top
        x = tl.minimum(tl.maximum(x / scale, -top), top)
    if FORMAT == 1:
        x = x.to(tl.float8e4nv)
    if FORMAT == 2:
        tl.store(out_ptr.to(tl.pointer_type(tl.float16)) + at, x.to(tl.float16), mask=mask)
    else:
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=mask)
    tl.debug_barrier()
    return scale


@triton.jit
def _rows(unit, WARPS: tl.constexpr, EACH: tl.constexpr):
    """The rows of a unit, [1, WARPS, EACH]: each warp has EACH of them."""
    warp, row = tl.arange(0, WARPS)[None, :, None], tl.arange(0, EACH)[None, None, :]
    return (unit * WARPS + warp) * EACH + row


@triton.jit
def _dot(
    w_ptr,
    scales_ptr,
    x_ptr,
    x_scale,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    PTX: tl.constexpr,
):
    """`_rows` of the weight times the row at `x_ptr`: float32 [32, WARPS, EACH], the same for all 32 lanes.

    The tiles' dimensions are (lane, warp, row of the warp, number): a lane reads 16 bytes of a row, a warp 512 that follow one
    another, and all rows of a warp use the inputs that it has read. The compiler deals out dimensions in just this order, so
    nothing moves between lanes before the sum at the end, and between warps nothing at all."""
    n = tl.minimum(rows, N - 1)
    if FORMAT == 2:
        y = _dot_codes(w_ptr, scales_ptr, x_ptr, n, N, K, SIZE, CHUNK, WARPS, EACH, DEEP, PTX)
        return y * x_scale
    PART: tl.constexpr = 8 if WIDE > 8 else WIDE
    lanes, part = tl.arange(0, 32)[:, None, None, None], tl.arange(0, PART)[None, None, None, :]
    warps = tl.arange(0, WARPS)[None, :, None, None]
    w_at = w_ptr + n[:, :, :, None].to(tl.int64) * K + lanes * WIDE + tl.arange(0, WIDE)[None, None, None, :]
    x_at = x_ptr + lanes * WIDE + warps * 0 + part
    acc = tl.zeros((32, WARPS, EACH, PART), tl.float32)
    for k in range(0, K, DEEP * 32 * WIDE):
        pieces = ()
        for i in tl.static_range(DEEP):  # all are on their way before the first is used
            at = k + i * 32 * WIDE
            if K % (DEEP * 32 * WIDE) == 0:
                piece = tl.load(w_at + at, eviction_policy="evict_first")
            else:
                piece = tl.load(w_at + at, mask=at + lanes * WIDE < K, other=0.0, eviction_policy="evict_first")
            pieces = pieces + (piece,)  # noqa: RUF005  (Triton knows no other)
        for i in tl.static_range(DEEP):
            at = k + i * 32 * WIDE
            live = at + lanes * WIDE < K
            if WIDE == 16:  # a lane reads 16 numbers of the weight at once, of the inputs twice 8
                halves = tl.permute(tl.reshape(pieces[i], (32, WARPS, EACH, 2, 8)), (0, 1, 2, 4, 3))
                low, high = tl.split(halves)
                acc += low.to(tl.float32) * tl.load(x_at + at, mask=live, other=0.0).to(tl.float32)
                acc += high.to(tl.float32) * tl.load(x_at + at + 8, mask=live, other=0.0).to(tl.float32)
            else:
                acc += pieces[i].to(tl.float32) * tl.load(x_at + at, mask=live, other=0.0).to(tl.float32)
    y = tl.sum(tl.sum(acc, 3), 0)[None, :, :] + tl.zeros((32, WARPS, EACH), tl.float32)
    if FORMAT == 1:
        y *= tl.load(scales_ptr + n + tl.zeros((32, 1, 1), tl.int32)) * x_scale
    return y


def _codes_asm() -> str:
    """PTX of one lane's step of `_dot_codes`: of 4 words of 8 codes ($4 …) and 16 pairs of inputs ($8 …, quarter by quarter) the
    four quarters' sums ($0 …). A code c in the low bits of 0x6400 is the float16 number 1024 + c, four bits higher 1024 + 16 c."""
    lines = ["{ .reg .b32 t, s, c, d, e, a0, a1, a2, a3; .reg .b16 l, h; .reg .f32 f, g;"]
    lines.append("mov.b32 c, 0x64086408; mov.b32 d, 0x2C002C00; mov.b32 e, 0xD480D480;")  # 1024 + 8, 1 / 16, -(1024 / 16 + 8)
    for word in range(4):
        for quarter in range(4):
            if quarter % 2 == 0:
                source = f"${4 + word}"
                if quarter == 2:
                    lines.append(f"shr.u32 s, {source}, 8;")
                if quarter:
                    source = "s"
                lines.append(f"lop3.b32 t, {source}, 0x000F000F, 0x64006400, 0xEA; sub.rn.f16x2 t, t, c;")
            else:
                source = "s" if quarter == 3 else f"${4 + word}"
                lines.append(f"lop3.b32 t, {source}, 0x00F000F0, 0x64006400, 0xEA; fma.rn.f16x2 t, t, d, e;")
            x = f"${8 + 4 * quarter + word}"
            lines.append(f"fma.rn.f16x2 a{quarter}, t, {x}, a{quarter};" if word else f"mul.rn.f16x2 a{quarter}, t, {x};")
    for quarter in range(4):
        lines.append(f"mov.b32 {{l, h}}, a{quarter}; cvt.f32.f16 f, l; cvt.f32.f16 g, h; add.f32 ${quarter}, f, g;")
    return " ".join([*lines, "}"])


CODES_ASM = tl.constexpr(_codes_asm())
CODES_ARGUMENTS = tl.constexpr(",".join(["=f"] * 4 + ["r"] * 20))


@triton.jit
def _dot_codes(
    w_ptr,
    scales_ptr,
    x_ptr,
    n,
    N: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    DEEP: tl.constexpr,
    PTX: tl.constexpr,
):
    """The same of 4-bit codes (`GroupedLinear`) and float16 inputs: a lane multiplies 8 words' codes, two at once, and adds them
    up in float16, four by four: one group for each quarter of a chunk. Their scales follow in float32."""
    QUARTER: tl.constexpr = CHUNK // 4
    SHARE: tl.constexpr = QUARTER // 8  # lanes that share a chunk
    W: tl.constexpr = K // 4
    lanes, four = tl.arange(0, 32)[:, None, None, None], tl.arange(0, 4)[None, None, None, :]
    warps = tl.arange(0, WARPS)[None, :, None, None]
    w_at = w_ptr.to(tl.pointer_type(tl.int32)) + n[:, :, :, None].to(tl.int64) * (W // 2) + lanes * 4 + four
    pairs_at = x_ptr.to(tl.pointer_type(tl.int32)) + lanes // SHARE * (CHUNK // 2) + lanes % SHARE * 4 + warps * 0 + four
    acc = tl.zeros((32, WARPS, EACH, 4), tl.float32)
    for k in range(0, W, DEEP * 256):
        pieces = ()
        for i in tl.static_range(DEEP):
            at = k + i * 256
            if W % (DEEP * 256) == 0:
                piece = tl.load(w_at + at // 2, eviction_policy="evict_first")
            else:
                piece = tl.load(w_at + at // 2, mask=at + lanes * 8 < W, other=0, eviction_policy="evict_first")
            pieces = pieces + (piece,)  # noqa: RUF005
        for i in tl.static_range(DEEP):
            at = k + i * 256
            live = at + lanes * 8 < W
            group = (at // QUARTER + lanes // SHARE) * (CHUNK // SIZE) + (four * QUARTER + lanes % SHARE * 8) // SIZE
            scale = tl.load(scales_ptr + group * N + n[:, :, :, None], mask=live, other=0.0).to(tl.float32)
            x_at = pairs_at + at * 2
            x0 = tl.load(x_at, mask=live, other=0)
            x1 = tl.load(x_at + QUARTER // 2, mask=live, other=0)
            x2 = tl.load(x_at + QUARTER, mask=live, other=0)
            x3 = tl.load(x_at + 3 * QUARTER // 2, mask=live, other=0)
            if PTX:
                sums = tl.inline_asm_elementwise(
                    CODES_ASM, CODES_ARGUMENTS, [pieces[i], x0, x1, x2, x3], dtype=tl.float32, is_pure=True, pack=4
                )
            else:
                sums = tl.where(four == 0, _quarter(pieces[i], x0, 0), _quarter(pieces[i], x1, 4))
                sums = tl.where(four == 2, _quarter(pieces[i], x2, 8), sums)
                sums = tl.where(four == 3, _quarter(pieces[i], x3, 12), sums)
            acc += sums * scale
    return tl.sum(tl.sum(acc, 3), 0)[None, :, :] + tl.zeros((32, WARPS, EACH), tl.float32)


@triton.jit
def _quarter(words, pairs, SHIFT: tl.constexpr):
    """What the PTX makes of a quarter, in the plain words of the language (for its interpreter)."""
    total = (((words >> SHIFT) & 0xF) - 8).to(tl.float32) * (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    total += (((words >> (SHIFT + 16)) & 0xF) - 8).to(tl.float32) * high
    return tl.sum(total, 3)[:, :, :, None]


@triton.jit
def _project(
    w_ptr,
    scales_ptr,
    bias_ptr,
    x_ptr,
    x_scale,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    ADD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FORMAT: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    PTX: tl.constexpr,
):
    """This program's share of a product, written to `out_ptr` or added to it."""
    units: tl.constexpr = (N + WARPS * EACH - 1) // (WARPS * EACH)
    pid = tl.program_id(0)
    lanes = tl.arange(0, 32)[:, None, None]
    for unit in range(pid * units // PROGRAMS, (pid + 1) * units // PROGRAMS):
        n = _rows(unit, WARPS, EACH)
        y = _dot(w_ptr, scales_ptr, x_ptr, x_scale, n, N, K, FORMAT, SIZE, CHUNK, WARPS, EACH, WIDE, DEEP, PTX)
        n += 0 * lanes
        if HAS_BIAS:
            y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        if ADD:  # rounded as a product is before it is added
            kind: tl.constexpr = out_ptr.dtype.element_ty
            y = y.to(kind).to(tl.float32) + tl.load(out_ptr + n, mask=n < N, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=(lanes == 0) & (n < N))


@triton.jit
def _project_up(
    w_ptr,
    scales_ptr,
    bias_ptr,
    x_ptr,
    x_scale,
    out_ptr,
    F: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FORMAT: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    PTX: tl.constexpr,
):
    """The same for the product that the activation follows; of gated ones rows F … 2F − 1 are what the gate multiplies."""
    N: tl.constexpr = 2 * F if GATED else F
    kind: tl.constexpr = out_ptr.dtype.element_ty
    units: tl.constexpr = (F + WARPS * EACH - 1) // (WARPS * EACH)
    pid = tl.program_id(0)
    lanes = tl.arange(0, 32)[:, None, None]
    for unit in range(pid * units // PROGRAMS, (pid + 1) * units // PROGRAMS):
        n = _rows(unit, WARPS, EACH)
        y = _dot(w_ptr, scales_ptr, x_ptr, x_scale, n, N, K, FORMAT, SIZE, CHUNK, WARPS, EACH, WIDE, DEEP, PTX)
        n += 0 * lanes
        if HAS_BIAS:
            y += tl.load(bias_ptr + n, mask=n < F, other=0.0).to(tl.float32)
        y = _activate(y.to(kind).to(tl.float32), KIND)
        if GATED:
            up = _dot(w_ptr, scales_ptr, x_ptr, x_scale, F + n, N, K, FORMAT, SIZE, CHUNK, WARPS, EACH, WIDE, DEEP, PTX)
            if HAS_BIAS:
                up += tl.load(bias_ptr + F + n, mask=n < F, other=0.0).to(tl.float32)
            y *= up.to(kind).to(tl.float32)
        tl.store(out_ptr + n, y.to(kind), mask=(lanes == 0) & (n < F))


@triton.jit
def _into_residual(
    w_ptr,
    scales_ptr,
    bias_ptr,
    source_ptr,
    own_ptr,
    x_ptr,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FORMAT: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    PTX: tl.constexpr,
):
    """A product that ends a branch."""
    scale = 1.0
    if FORMAT != 0:
        scale = _prepare(source_ptr, source_ptr, source_ptr, own_ptr, 0.0, 0.0, K, BLOCK_K, 0, False, FORMAT)
        source_ptr = own_ptr
    _project(
        w_ptr, scales_ptr, bias_ptr, source_ptr, scale, x_ptr, E, K, True, HAS_BIAS, PROGRAMS, FORMAT, SIZE, CHUNK,
        WARPS, EACH, WIDE, DEEP, PTX,
    )  # fmt: skip


@triton.jit
def _turned(
    source_ptr,
    ds,
    live,
    norm_ptr,
    table_ptr,
    eps,
    offset,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Heads of q or k [heads, D]: normed, and their first R dimensions turned (`pointwise._rope_kernel`)."""
    x = tl.load(source_ptr + ds, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
    norm = 1.0
    if HAS_NORM:
        norm = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x *= norm * (tl.load(norm_ptr + ds, mask=ds < D, other=0.0).to(tl.float32) + offset)
    if R > 0:
        if INTERLEAVED:
            other, angle, sign = ds ^ 1, ds // 2, tl.where(ds % 2 == 0, -1.0, 1.0)
        else:
            other, angle = (ds + R // 2) % R, ds % (R // 2)
            sign = tl.where(ds < R // 2, -1.0, 1.0)
        turns = ds < R
        y = tl.load(source_ptr + other, mask=live & turns, other=0.0, cache_modifier=".cg").to(tl.float32)
        if HAS_NORM:
            y *= norm * (tl.load(norm_ptr + other, mask=turns, other=0.0).to(tl.float32) + offset)
        cos = tl.load(table_ptr + angle, mask=turns, other=0.0)
        sin = tl.load(table_ptr + R // 2 + angle, mask=turns, other=0.0)
        x = tl.where(turns, x * cos + sign * y * sin, x)
    return x


@triton.jit
def _attend(
    qkv_ptr,
    seen_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_norm_ptr,
    k_norm_ptr,
    angles_ptr,
    block_table_ptr,
    length,
    part_ptr,
    counter_ptr,
    qk_eps,
    qk_offset,
    scale,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QK_NORM: tl.constexpr,
    SCALED: tl.constexpr,
    BY_DIM: tl.constexpr,
):
    """Some of the keys of one kv head. Who has the last of them first brings the new key and value there."""
    G: tl.constexpr = H // HK
    tiles = tl.cdiv(length, KEYS)
    each = tl.maximum(tl.cdiv(tiles, SPLITS), 1)
    used = tl.cdiv(tiles, each)
    for item in range(tl.program_id(0), used * HK, PROGRAMS):
        head, split = item % HK, item // HK
        gs, ds = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)[None, :]
        live = (gs < G)[:, None] & (ds < D)
        kind: tl.constexpr = qkv_ptr.dtype.element_ty
        q = _turned(
            qkv_ptr + (head * G + gs)[:, None] * D, ds, live, q_norm_ptr, angles_ptr, qk_eps, qk_offset, D, R, INTERLEAVED, QK_NORM
        )
        q = q.to(kind).to(tl.float32) * (scale * 1.4426950408889634)
        k_scale, v_scale = 1.0, 1.0
        if SCALED:
            k_scale, v_scale = tl.load(k_scale_ptr + head), tl.load(v_scale_ptr + head)
            q *= k_scale
        if split == used - 1:
            new = length - 1
            block = tl.load(block_table_ptr + new // BLOCK_SIZE).to(tl.int64) * HK + head
            one = tl.arange(0, 1)[:, None]
            fresh = _turned(
                qkv_ptr + (H + head + one) * D, ds, ds < D, k_norm_ptr, angles_ptr, qk_eps, qk_offset, D, R, INTERLEAVED, QK_NORM
            )
            tl.store(k_ptr + (block * BLOCK_SIZE + new % BLOCK_SIZE) * D + ds, _cached(fresh, k_scale, k_ptr, SCALED), mask=ds < D)
            fresh = tl.load(qkv_ptr + (H + HK + head + one) * D + ds, mask=ds < D, other=0.0, cache_modifier=".cg")
            fresh = _cached(fresh.to(tl.float32), v_scale, v_ptr, SCALED)
            if BY_DIM:
                tl.store(v_ptr + (block * D + ds) * BLOCK_SIZE + new % BLOCK_SIZE, fresh, mask=ds < D)
            else:
                tl.store(v_ptr + (block * BLOCK_SIZE + new % BLOCK_SIZE) * D + ds, fresh, mask=ds < D)
            tl.debug_barrier()
        top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        for tile in range(split * each, tl.minimum(split * each + each, tiles)):
            keys = tile * KEYS + tl.arange(0, KEYS)
            here = keys < length
            block = tl.load(block_table_ptr + keys // BLOCK_SIZE, mask=here, other=0).to(tl.int64) * HK + head
            inside, place = ds < D, keys % BLOCK_SIZE
            k = tl.load(k_ptr + (block * BLOCK_SIZE + place)[:, None] * D + ds, mask=inside, other=0.0).to(tl.float32)
            if BY_DIM:
                v_at = v_ptr + (block[:, None] * D + ds) * BLOCK_SIZE + place[:, None]
            else:
                v_at = v_ptr + (block * BLOCK_SIZE + place)[:, None] * D + ds
            v = tl.load(v_at, mask=inside, other=0.0).to(tl.float32)
            s = tl.sum(k[:, None, :] * q[None, :, :], 2)
            s = tl.where(here[:, None], s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 0))
            p = tl.exp2(s - higher[None, :])
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(p, 0)
            acc = acc * fade[:, None] + tl.sum(p[:, :, None] * v[:, None, :], 0)
            top = higher
        acc *= v_scale
        seen_at = seen_ptr + (head * G + gs)[:, None] * D + ds
        if used == 1:
            tl.store(seen_at, (acc / total[:, None]).to(kind), mask=live)
        else:
            size: tl.constexpr = HK * BLOCK_G * (BLOCK_D + 2)
            rows = (head * BLOCK_G + gs) * (BLOCK_D + 2)
            mine = part_ptr + split * size + rows
            tl.store(mine[:, None] + ds, acc)
            tl.store(mine + BLOCK_D, top)
            tl.store(mine + BLOCK_D + 1, total)
            tl.debug_barrier()
            if tl.atomic_add(counter_ptr + 2 + head, 1, sem="acq_rel") == used - 1:
                top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
                total = tl.zeros((BLOCK_G,), tl.float32)
                acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
                for i in range(used):
                    part = part_ptr + i * size + rows
                    other_top = tl.load(part + BLOCK_D, cache_modifier=".cg")
                    higher = tl.maximum(top, other_top)
                    fade, factor = tl.exp2(top - higher), tl.exp2(other_top - higher)
                    total = total * fade + factor * tl.load(part + BLOCK_D + 1, cache_modifier=".cg")
                    acc = acc * fade[:, None] + factor[:, None] * tl.load(part[:, None] + ds, cache_modifier=".cg")
                    top = higher
                tl.store(seen_at, (acc / total[:, None]).to(kind), mask=live)
                tl.store(counter_ptr + 2 + head, 0)


@triton.jit
def _one_token_kernel(
    x_ptr,
    table_ptr,
    scratch_ptr,
    part_ptr,
    counter_ptr,
    cos_sin_ptr,
    positions_ptr,
    block_table_ptr,
    seq_lens_ptr,
    num_layers,
    eps,
    mlp_eps,
    offset,
    qk_eps,
    qk_offset,
    scale,
    E: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    PARALLEL: tl.constexpr,
    NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr,
    MLP_NORM: tl.constexpr,
    QKV_BIAS: tl.constexpr,
    OUT_BIAS: tl.constexpr,
    UP_BIAS: tl.constexpr,
    DOWN_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QK_NORM: tl.constexpr,
    SCALED: tl.constexpr,
    BY_DIM: tl.constexpr,
    WEIGHT: tl.constexpr,
    CACHE: tl.constexpr,
    FORMAT: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    POINTERS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    PTX: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    kind: tl.constexpr = x_ptr.dtype.element_ty
    factor: tl.constexpr = tl.float32 if FORMAT == 1 else kind
    Q: tl.constexpr = H * D
    QKV: tl.constexpr = (H + 2 * HK) * D
    UP: tl.constexpr = 2 * F if GATED else F
    ROWS: tl.constexpr = WARPS * EACH
    OWN: tl.constexpr = BLOCK_E + BLOCK_F + BLOCK_Q
    # Row bytes: of K inputs in this format.
    E_BYTES: tl.constexpr = E * 2 if FORMAT == 0 else E // FORMAT
    Q_BYTES: tl.constexpr = Q * 2 if FORMAT == 0 else Q // FORMAT
    F_BYTES: tl.constexpr = F * 2 if FORMAT == 0 else F // FORMAT
    UNITS_QKV: tl.constexpr = (QKV + ROWS - 1) // ROWS
    UNITS_E: tl.constexpr = (E + ROWS - 1) // ROWS
    UNITS_F: tl.constexpr = (F + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    qkv_ptr = scratch_ptr
    seen_ptr = scratch_ptr + QKV
    mid_ptr = seen_ptr + Q
    own_ptr = scratch_ptr + (QKV + Q + F + 63) // 64 * 64 + pid * OWN
    own_mid_ptr, own_seen_ptr = own_ptr + BLOCK_E, own_ptr + BLOCK_E + BLOCK_F
    first_qkv, last_qkv = pid * UNITS_QKV // PROGRAMS * ROWS, (pid + 1) * UNITS_QKV // PROGRAMS * ROWS
    first_e, last_e = pid * UNITS_E // PROGRAMS * ROWS, (pid + 1) * UNITS_E // PROGRAMS * ROWS
    first_f, last_f = pid * UNITS_F // PROGRAMS * ROWS, (pid + 1) * UNITS_F // PROGRAMS * ROWS
    _fetch(_address(scratch_ptr, table_ptr, 10, WEIGHT), first_qkv, last_qkv, E_BYTES, AHEAD, PROGRAMS)
    if PDL:
        follow()
    length = tl.load(seq_lens_ptr)
    angles_ptr = cos_sin_ptr + tl.load(positions_ptr) * R
    met = 0
    for layer in range(num_layers):
        row = table_ptr + layer * POINTERS
        qkv_w, qkv_s, qkv_b = _address(scratch_ptr, row, 10, WEIGHT), _address(scratch_ptr, row, 11, factor), _address(scratch_ptr, row, 12, kind)
        out_w, out_s, out_b = _address(scratch_ptr, row, 13, WEIGHT), _address(scratch_ptr, row, 14, factor), _address(scratch_ptr, row, 15, kind)
        up_w, up_s, up_b = _address(scratch_ptr, row, 16, WEIGHT), _address(scratch_ptr, row, 17, factor), _address(scratch_ptr, row, 18, kind)
        down_w, down_s, down_b = _address(scratch_ptr, row, 19, WEIGHT), _address(scratch_ptr, row, 20, factor), _address(scratch_ptr, row, 21, kind)
        # --- q, k, v
        x_scale = _prepare(
            x_ptr, _address(scratch_ptr, row, 0, kind), _address(scratch_ptr, row, 1, kind), own_ptr, eps, offset, E, BLOCK_E, NORM, NORM_BIAS, FORMAT
        )
        _project(
            qkv_w, qkv_s, qkv_b, own_ptr, x_scale, qkv_ptr, QKV, E, False, QKV_BIAS, PROGRAMS, FORMAT, SIZE, CHUNK,
            WARPS, EACH, WIDE, DEEP, PTX,
        )  # fmt: skip
        if PARALLEL:
            _fetch(up_w, first_f, last_f, E_BYTES, AHEAD, PROGRAMS)
        else:
            _fetch(out_w, first_e, last_e, Q_BYTES, AHEAD, PROGRAMS)
        met += PROGRAMS
        _meet(counter_ptr, met, PROGRAMS)
        # --- attention
        _attend(
            qkv_ptr, seen_ptr, _address(scratch_ptr, row, 6, CACHE), _address(scratch_ptr, row, 7, CACHE), _address(scratch_ptr, row, 8, tl.float32),
            _address(scratch_ptr, row, 9, tl.float32), _address(scratch_ptr, row, 4, kind), _address(scratch_ptr, row, 5, kind), angles_ptr, block_table_ptr, length,
            part_ptr, counter_ptr, qk_eps, qk_offset, scale, H, HK, D, R, BLOCK_SIZE, BLOCK_G, BLOCK_D, KEYS, SPLITS,
            PROGRAMS, INTERLEAVED, QK_NORM, SCALED, BY_DIM,
        )  # fmt: skip
        if not PARALLEL:
            if GATED:
                _fetch(up_w, first_f, last_f, E_BYTES, AHEAD // 2, PROGRAMS)
                _fetch(up_w, F + first_f, F + last_f, E_BYTES, AHEAD // 2, PROGRAMS)
            else:
                _fetch(up_w, first_f, last_f, E_BYTES, AHEAD, PROGRAMS)
            met += PROGRAMS
            _meet(counter_ptr, met, PROGRAMS)
            # --- output
            _into_residual(
                out_w, out_s, out_b, seen_ptr, own_seen_ptr, x_ptr, E, Q, BLOCK_Q, OUT_BIAS, PROGRAMS, FORMAT, SIZE, CHUNK,
                WARPS, EACH, WIDE, DEEP, PTX,
            )  # fmt: skip
            met += PROGRAMS
            _meet(counter_ptr, met, PROGRAMS)
        # --- up
        if MLP_NORM != 0:
            x_scale = _prepare(
                x_ptr, _address(scratch_ptr, row, 2, kind), _address(scratch_ptr, row, 3, kind), own_ptr, mlp_eps, offset, E, BLOCK_E, MLP_NORM, NORM_BIAS,
                FORMAT,
            )  # fmt: skip
        _project_up(
            up_w, up_s, up_b, own_ptr, x_scale, mid_ptr, F, E, GATED, KIND, UP_BIAS, PROGRAMS, FORMAT, SIZE, CHUNK,
            WARPS, EACH, WIDE, DEEP, PTX,
        )  # fmt: skip
        _fetch(down_w, first_e, last_e, F_BYTES, AHEAD, PROGRAMS)
        met += PROGRAMS
        _meet(counter_ptr, met, PROGRAMS)
        # --- down
        if PARALLEL:
            _into_residual(
                out_w, out_s, out_b, seen_ptr, own_seen_ptr, x_ptr, E, Q, BLOCK_Q, OUT_BIAS, PROGRAMS, FORMAT, SIZE, CHUNK,
                WARPS, EACH, WIDE, DEEP, PTX,
            )  # fmt: skip
            tl.debug_barrier()
        _into_residual(
            down_w, down_s, down_b, mid_ptr, own_mid_ptr, x_ptr, E, F, BLOCK_F, DOWN_BIAS, PROGRAMS, FORMAT, SIZE, CHUNK,
            WARPS, EACH, WIDE, DEEP, PTX,
        )  # fmt: skip
        if layer + 1 < num_layers:
            _fetch(_address(scratch_ptr, row + POINTERS, 10, WEIGHT), first_qkv, last_qkv, E_BYTES, AHEAD, PROGRAMS)
            met += PROGRAMS
            _meet(counter_ptr, met, PROGRAMS)
    if PROGRAMS > 1:  # the last to leave makes the counters ready for the next step
        if tl.atomic_add(counter_ptr + 1, 1, sem="acq_rel") == PROGRAMS - 1:
            tl.store(counter_ptr, 0)
            tl.store(counter_ptr + 1, 0)


class OneTokenStep:
    """`layers` give their tensors by the names of POINTERS (but for the cache), None or no entry for what is not there; they
    are read at each call, so they must stay. One stream only."""

    def __init__(self, shape: TokenShape, layers: Sequence[Mapping[str, Tensor | None]], linear: Linear, cos_sin: Tensor | None) -> None:
        self.shape = shape
        self.cos_sin = cos_sin
        self.linear = linear  # one of the products: all have its format
        self._layers = layers
        self._kv: Sequence[LayerKV] | None = None
        self._tables: list[Tensor] = []  # a captured graph reads the one of its time
        self._held: list[Tensor] = []
        self.device = device = linear.weight.device
        self.programs = 1
        if device.type == "cuda":
            self.programs = torch.cuda.get_device_properties(device).multi_processor_count
        self.splits = max(1, self.programs // shape.num_kv_heads) if self.programs > 1 else 3
        s = shape
        self._block_g = triton.next_power_of_2(s.num_heads // s.num_kv_heads)
        self._block_d = triton.next_power_of_2(s.head_dim)
        self._own = [triton.next_power_of_2(n) for n in (s.hidden_size, s.intermediate_size, s.num_heads * s.head_dim)]
        shared = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim + s.num_heads * s.head_dim + s.intermediate_size
        size = -(-shared // 64) * 64 + self.programs * sum(self._own)
        self._scratch = torch.zeros(size, dtype=self._dtype, device=device)
        parts = self.splits * s.num_kv_heads * self._block_g * (self._block_d + 2)
        self._parts = torch.zeros(parts, dtype=torch.float32, device=device)
        self._counters = torch.zeros(2 + s.num_kv_heads, dtype=torch.int32, device=device)

    @property
    def _dtype(self) -> torch.dtype:
        w = self.linear
        return w.out_dtype if isinstance(w, ScaledLinear) else w.scales.dtype if isinstance(w, GroupedLinear) else w.weight.dtype

    def __call__(self, x: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata, *, each: int = 2, deep: int = 0, ahead: int = 98304, num_warps: int = 8) -> Tensor:
        """x [1, E], what the first layer reads → the residual after the last [1, E], in place."""
        if self._kv is not kv:
            self._kv = kv
            self._tables.append(self._table(kv))
        s, w, first = self.shape, self.linear, self._layers[0]
        form = FP8 if isinstance(w, ScaledLinear) else INT4 if isinstance(w, GroupedLinear) else DENSE
        keys = min(128, max(16, KEYS_TIMES_WIDTH // (self._block_g * self._block_d)))
        _one_token_kernel[(self.programs,)](
            x,
            self._tables[-1],
            self._scratch,
            self._parts,
            self._counters,
            self._parts if self.cos_sin is None else self.cos_sin,
            meta.positions,
            meta.block_table,
            meta.seq_lens,
            len(self._layers),
            s.norm_eps,
            s.mlp_norm_eps,
            s.norm_offset,
            s.qk_eps,
            s.qk_offset,
            s.scale,
            E=s.hidden_size,
            F=s.intermediate_size,
            H=s.num_heads,
            HK=s.num_kv_heads,
            D=s.head_dim,
            R=0 if self.cos_sin is None else self.cos_sin.shape[1],
            BLOCK_SIZE=kv[0].block_size,
            BLOCK_E=self._own[0],
            BLOCK_F=self._own[1],
            BLOCK_Q=self._own[2],
            BLOCK_G=self._block_g,
            BLOCK_D=self._block_d,
            KEYS=keys,
            SPLITS=self.splits,
            PARALLEL=s.parallel,
            NORM=NORMS[s.norm],
            NORM_BIAS=first.get("norm_bias") is not None,
            MLP_NORM=NORMS[s.norm] if s.mlp_norm else 0,
            QKV_BIAS=first.get("qkv_bias") is not None,
            OUT_BIAS=first.get("out_bias") is not None,
            UP_BIAS=first.get("up_bias") is not None,
            DOWN_BIAS=first.get("down_bias") is not None,
            GATED=s.gated,
            KIND=ACTIVATIONS[s.activation],
            INTERLEAVED=s.interleaved,
            QK_NORM=first.get("q_norm") is not None,
            SCALED=kv[0].k_scale is not None,
            BY_DIM=kv[0].v.stride(2) == 1,
            WEIGHT=_triton_type(w.weight.dtype),
            CACHE=_triton_type(kv[0].k.dtype),
            FORMAT=form,
            SIZE=w.group_size if isinstance(w, GroupedLinear) else 0,
            CHUNK=w.chunk if isinstance(w, GroupedLinear) else 0,
            POINTERS=len(POINTERS),
            PROGRAMS=self.programs,
            WARPS=num_warps,
            EACH=each,
            WIDE=16 // w.weight.dtype.itemsize,
            DEEP=deep or (2 if form == INT4 else 4),
            AHEAD=ahead,
            num_warps=num_warps,
            PTX=self.device.type == "cuda",
            **overlapped(x),
        )
        return x

    def _table(self, kv: Sequence[LayerKV]) -> Tensor:
        table = []
        for layer, cache in zip(self._layers, kv, strict=True):
            tensors = {**layer, "k": cache.k, "v": cache.v, "k_scale": cache.k_scale, "v_scale": cache.v_scale}
            table.append([self._distance(tensors.get(name)) for name in POINTERS])
        return torch.tensor(table, dtype=torch.int64).to(self.device)

    def _distance(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        if tensor.data_ptr() % 16:  # a view of something: a small one, since products are as they should be
            tensor = tensor.clone()
            self._held.append(tensor)
        return (tensor.data_ptr() - self._scratch.data_ptr()) // 16


NORMS = {"rms": 1, "layer": 2}


def _triton_type(dtype: torch.dtype) -> tl.dtype:
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.int16: tl.int16, torch.int8: tl.int8, torch.float8_e4m3fn: tl.float8e4nv}[dtype]
