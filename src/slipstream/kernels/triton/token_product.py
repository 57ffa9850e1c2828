"""Products with 4-bit weights inside a kernel whose programs all run at once and wait for one another (`one_token.py`).

Rows of a weight are dealt out in units that stand one after another, so that what a program reads is one stretch of memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.triton.pointwise import _activate


@triton.jit
def arrive(counter_ptr, PROGRAMS: tl.constexpr):
    """This program has written what others wait for."""
    if PROGRAMS > 1:
        tl.debug_barrier()
        tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def wait(counter_ptr, arrivals, PROGRAMS: tl.constexpr):
    """Until so many have arrived; then what they wrote before can be read. One thread asks: if all did, their questions would
    keep the arrivals from the counter."""
    if PROGRAMS > 1:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 t; mov.u32 $0, %tid.x; setp.ne.u32 p, $0, 0; @p bra DONE; "
            "AGAIN: ld.acquire.gpu.global.u32 t, [$1]; setp.lt.u32 p, t, $2; @p bra AGAIN; DONE: }",
            "=&r,l,r",
            [counter_ptr, arrivals],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()


@triton.jit
def fetch(w_ptr, first, last, ROW_BYTES: tl.constexpr, BYTES: tl.constexpr, PROGRAMS: tl.constexpr):
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
def _prepare(source_ptr, weight, bias, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """The row that a product reads, for this program alone: normed, and in float16, scaled so that sums of four codes' products
    stay in its range. The scale."""
    at = tl.arange(0, BLOCK)
    mask = at < SIZE
    x = tl.load(source_ptr + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    if NORM != 0:
        if NORM == 2:
            x = tl.where(mask, x - tl.sum(x, 0) / SIZE, 0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight + bias
    scale = tl.maximum(tl.max(tl.abs(tl.where(mask, x, 0.0)), 0), 1e-12) / 1024.0
    tl.store(out_ptr + at, (x / scale).to(tl.float16), mask=mask)
    tl.debug_barrier()
    return scale


@triton.jit
def _rows(unit, WARPS: tl.constexpr, EACH: tl.constexpr):
    """The rows of a unit, [1, WARPS, EACH]: each warp has EACH of them."""
    warp, row = tl.arange(0, WARPS)[None, :, None], tl.arange(0, EACH)[None, None, :]
    return (unit * WARPS + warp) * EACH + row


@triton.jit
def _load(w_ptr, rows, k, more, N: tl.constexpr, ROW: tl.constexpr, DEEP: tl.constexpr):
    """The next DEEP pieces of some rows, from number k of ROW on: of codes, eight to an int32. A lane's piece is 16 bytes, a
    warp's 512 that follow one another. Zeros unless there is `more`.

    The tiles' dimensions are (lane, warp, row of the warp, number). The compiler deals them out in just this order, so all rows
    of a warp use the inputs that it has read, nothing moves between lanes before the sum at the end, and between warps nothing
    at all."""
    lanes, four = tl.arange(0, 32)[:, None, None, None], tl.arange(0, 4)[None, None, None, :]
    n = tl.minimum(rows, N - 1)
    w_at = w_ptr + n[:, :, :, None].to(tl.int64) * ROW + lanes * 4 + four + k
    pieces = ()
    for i in tl.static_range(DEEP):
        there = tl.full((32, 1, 1, 1), 1, tl.int1) & more
        if ROW % (DEEP * 128) != 0:
            there = there & (k + i * 128 + lanes * 4 < ROW)
        piece = tl.load(w_at + i * 128, mask=there, other=0, eviction_policy="evict_first")
        pieces = pieces + (piece,)  # type: ignore[assignment]  # noqa: RUF005  (Triton knows no other)
    return pieces


@triton.jit
def _load_scales(
    scales_ptr,
    rows,
    k,
    N: tl.constexpr,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    DEEP: tl.constexpr,
):
    """The scales of `_load`'s codes, four to a piece: of the four quarters of its chunk."""
    QUARTER: tl.constexpr = CHUNK // 4
    SHARE: tl.constexpr = QUARTER // 8  # lanes that share a chunk
    lanes, four = tl.arange(0, 32)[:, None, None, None], tl.arange(0, 4)[None, None, None, :]
    n = tl.minimum(rows, N - 1)[:, :, :, None]
    scales = ()
    for i in tl.static_range(DEEP):
        at = k + i * 128
        group = (at * 2 // QUARTER + lanes // SHARE) * (CHUNK // SIZE) + (four * QUARTER + lanes % SHARE * 8) // SIZE
        scale = tl.load(scales_ptr + group * N + n, mask=at + lanes * 4 < ROW, other=0.0)
        scales = scales + (scale,)  # type: ignore[assignment]  # noqa: RUF005
    return scales


def _codes_asm() -> str:
    """PTX of a lane's step of `_multiply`: of 4 words of 8 codes ($4 …) and 16 pairs of inputs ($8 …, quarter by quarter) the
    sums of four quarters ($0 …). A code c in the low bits of 0x6400 is float16's 1024 + c, four bits up 1024 + 16 c."""
    lines = ["{ .reg .b32 t, s, c, d, e, a0, a1, a2, a3; .reg .b16 l, h; .reg .f32 f, g;"]
    lines.append(
        "mov.b32 c, 0x64086408; mov.b32 d, 0x2C002C00; mov.b32 e, 0xD480D480;"
    )  # 1024 + 8, 1 / 16, -(1024 / 16 + 8)
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
            lines.append(
                f"fma.rn.f16x2 a{quarter}, t, {x}, a{quarter};" if word else f"mul.rn.f16x2 a{quarter}, t, {x};"
            )
    for quarter in range(4):
        lines.append(f"mov.b32 {{l, h}}, a{quarter}; cvt.f32.f16 f, l; cvt.f32.f16 g, h; add.f32 ${quarter}, f, g;")
    return " ".join([*lines, "}"])


CODES_ASM = tl.constexpr(_codes_asm())
CODES_ARGUMENTS = tl.constexpr(",".join(["=f"] * 4 + ["r"] * 20))


@triton.jit
def _multiply(
    pieces,
    scales,
    x_ptr,
    k,
    ROW: tl.constexpr,
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    DEEP: tl.constexpr,
    PTX: tl.constexpr,
):
    """Pieces times the inputs of their columns, of each lane: float32 [32, WARPS, EACH]. A lane multiplies a piece's 32 codes
    two at once and adds them up in float16, four by four, for each of the four quarters of a chunk (`GroupedLinear`), which
    belong to four groups: their scales follow in float32."""
    QUARTER: tl.constexpr = CHUNK // 4
    SHARE: tl.constexpr = QUARTER // 8
    lanes, four = tl.arange(0, 32)[:, None, None, None], tl.arange(0, 4)[None, None, None, :]
    warps = tl.arange(0, WARPS)[None, :, None, None]
    pairs_at = (
        x_ptr.to(tl.pointer_type(tl.int32)) + lanes // SHARE * (CHUNK // 2) + lanes % SHARE * 4 + warps * 0 + four
    )
    acc = tl.zeros((32, WARPS, EACH, 4), tl.float32)
    for i in tl.static_range(DEEP):
        at = k + i * 128
        live = at + lanes * 4 < ROW
        x_at = pairs_at + at * 4
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
        acc += sums * scales[i].to(tl.float32)
    return tl.sum(acc, 3)


@triton.jit
def _quarter(words, pairs, SHIFT: tl.constexpr):
    """What the PTX makes of a quarter, in the plain words of the language (for its interpreter)."""
    total = (((words >> SHIFT) & 0xF) - 8).to(tl.float32) * (pairs & 0xFFFF).to(tl.int16).to(
        tl.float16, bitcast=True
    ).to(tl.float32)
    high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    total += (((words >> (SHIFT + 16)) & 0xF) - 8).to(tl.float32) * high
    return tl.sum(total, 3)[:, :, :, None]


@triton.jit
def product(
    w_ptr,
    scales_ptr,
    bias_ptr,
    source_ptr,
    norm_ptr,
    norm_bias_ptr,
    own_ptr,
    out_ptr,
    counter_ptr,
    arrivals,
    eps,
    offset,
    x_scale,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    PREPARE: tl.constexpr,
    NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    DEEP: tl.constexpr,
    PTX: tl.constexpr,
):
    """This program's share of a product of N rows, written to `out_ptr` or added to it, once `arrivals` say that its inputs are
    there. With GATED rows N … 2N − 1 are what the activation of the first N multiplies. Without PREPARE the inputs are those
    of the product before, of scale `x_scale`. The scale of the inputs.

    The first pieces are on their way before it waits, and the next ones before those that are there are multiplied."""
    ROW: tl.constexpr = K // 8
    STEP: tl.constexpr = DEEP * 128
    STEPS: tl.constexpr = (ROW + STEP - 1) // STEP
    ROWS: tl.constexpr = 2 * N if GATED else N
    kind: tl.constexpr = out_ptr.dtype.element_ty
    units: tl.constexpr = (N + WARPS * EACH - 1) // (WARPS * EACH)
    lanes = tl.arange(0, 32)[:, None, None]
    first = tl.program_id(0) * units // PROGRAMS * STEPS
    last = (tl.program_id(0) + 1) * units // PROGRAMS * STEPS
    rows = _rows(first // STEPS, WARPS, EACH)
    pieces = _load(w_ptr, rows, 0, first < last, ROWS, ROW, DEEP)
    pieces_up = pieces
    if GATED:
        pieces_up = _load(w_ptr, N + rows, 0, first < last, ROWS, ROW, DEEP)
    weight, bias = 0.0, 0.0
    at = tl.arange(0, BLOCK_K)
    if NORM != 0:
        weight = tl.load(norm_ptr + at, mask=at < K, other=0.0).to(tl.float32) + offset
        if NORM_BIAS:
            bias = tl.load(norm_bias_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    wait(counter_ptr, arrivals, PROGRAMS)
    if PREPARE:
        x_scale = _prepare(source_ptr, weight, bias, own_ptr, eps, K, BLOCK_K, NORM)
    zeros = tl.zeros((32, WARPS, EACH), tl.float32)
    acc, acc_up = zeros, zeros
    for it in range(first, last):
        rows, k = _rows(it // STEPS, WARPS, EACH), it % STEPS * STEP
        n = rows + 0 * lanes
        before, before_up, residual = zeros, zeros, zeros
        if HAS_BIAS:
            before = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
            if GATED:
                before_up = tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
        if ADD:
            residual = tl.load(out_ptr + n, mask=n < N, other=0.0, cache_modifier=".cg").to(tl.float32)
        next_rows, next_k = _rows((it + 1) // STEPS, WARPS, EACH), (it + 1) % STEPS * STEP
        next_pieces = _load(w_ptr, next_rows, next_k, it + 1 < last, ROWS, ROW, DEEP)
        next_up = next_pieces
        if GATED:
            next_up = _load(w_ptr, N + next_rows, next_k, it + 1 < last, ROWS, ROW, DEEP)
        scales = _load_scales(scales_ptr, rows, k, ROWS, ROW, SIZE, CHUNK, DEEP)
        if GATED:
            scales_up = _load_scales(scales_ptr, N + rows, k, ROWS, ROW, SIZE, CHUNK, DEEP)
            acc_up += _multiply(pieces_up, scales_up, own_ptr, k, ROW, CHUNK, WARPS, EACH, DEEP, PTX)
        acc += _multiply(pieces, scales, own_ptr, k, ROW, CHUNK, WARPS, EACH, DEEP, PTX)
        if k + STEP >= ROW:
            y = tl.sum(acc, 0)[None, :, :] * x_scale + before
            if ACTIVATION >= 0:
                y = _activate(y.to(kind).to(tl.float32), ACTIVATION)
            if GATED:
                y *= (tl.sum(acc_up, 0)[None, :, :] * x_scale + before_up).to(kind).to(tl.float32)
                acc_up = zeros
            if ADD:  # rounded as a product is before it is added
                y = y.to(kind).to(tl.float32) + residual
            tl.store(out_ptr + n, y.to(kind), mask=(lanes == 0) & (n < N))
            acc = zeros
        pieces, pieces_up = next_pieces, next_up
    return x_scale
