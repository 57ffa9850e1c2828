"""Products of few tokens on Hopper: a ring of weight tiles in shared memory, filled before the
preceding kernel has ended.

yᵀ = W · xᵀ for fp8 values with scales and for 16-bit values, bound by reading the weight.

1. A thread block computes 64 or 128 outputs, or 32 in half a tensor core's tile. A producer warp
   copies tiles of W and x by TMA, and a consumer of four warps for each 64 outputs multiplies them
   on the tensor cores. K may be split over thread blocks.
2. No kernel writes weights. The producer therefore fills the ring with them before it waits for the
   preceding kernel (`pdl.py`), and copies x after the wait. The memory idles less during small
   kernels between two products.
3. A thread block takes most of a multiprocessor's shared memory. Somewhat fewer thread blocks than
   multiprocessors cost nothing: those of the next product fill their rings on the idle ones.

Gluon has no interpreter: a test here reads the machine code, and tests/gpu compares the numbers."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from slipstream.kernels.thresholds import Thresholds
from slipstream.kernels.triton.attention.hopper_memory import barriers, load_tile
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait_first
from slipstream.kernels.triton.products.split_k import ArrivalCounters
from slipstream.kernels.weights.forms import Activations, Linear, Quantized, ScaledLinear

ROWS = gl.constexpr(64)
"""Number of outputs that one consumer computes."""
TILES = {1: gl.NVMMASharedLayout(128, 8, 2), 2: gl.NVMMASharedLayout(128, 16, 2)}
"""Shared-memory layout of a tile, by bytes of a value."""
SHARED_BYTES, MAX_STAGES = 225_000, 8
MAX_TOKENS = 64
MIN_ROWS = 2048
"""Fewest rows of a weight: below it there are too few thread blocks (not measured)."""
MIDDLE_ROWS, MIDDLE_TOKENS = range(4097, 12_288), 32
"""Range of rows in which fp8 weights use this kernel up to MIDDLE_TOKENS tokens. With 48 tokens a
whole step of 3.0 ms took 0.18 ms longer than with `linear.skinny_gemm`; with 64 it took as long."""
THRESHOLDS = Thresholds(tokens=(MAX_TOKENS, MIDDLE_TOKENS))
LONG_ROW = 8192
"""Bytes of a row from which 64 outputs per thread block are better. The down product of Llama-3-70B
over two GPUs (8,192 rows of 14,336 bytes) is 10 % faster in 128 thread blocks of 64 rows, which
nearly fill 132 multiprocessors, than in 64 (`step_products_70b`)."""
HALVED_ROWS = 4224
"""Most rows of a weight that an unsplit product shares out to thread blocks by 32: by 64 they would
occupy half of the multiprocessors."""
WIDE = 65_536
"""Number of rows of a weight from which a product without split K has the form of a split one."""
PREFETCHED_BYTES = 65_536
"""Bytes after the ring that a thread block prefetches to L2 before it waits."""
HALF_ROOM = 112_000
"""Bytes of a ring of which a multiprocessor holds two."""
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # Triton 3.6, 3.9


@gluon.jit
def _prefetch_rows(w_ptr, row, column, N, K, ahead, LOADED: gl.constexpr):
    """Prefetch `ahead` bytes of each row of a tile to L2, from `column` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    rows = gl.minimum(row + gl.arange(0, LOADED, LAYOUT), N - 1).to(gl.int64)
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [w_ptr + rows * K + column, ahead], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _producer(
    w_desc, x_desc, w_ptr, w_smem, x_smem, full, empty, row, first, steps, N, K, ahead, PDL: gl.constexpr
):  # fmt: skip
    STAGES: gl.constexpr = w_smem.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    LOADED: gl.constexpr = w_desc.block_type.shape[0]
    BYTES: gl.constexpr = (
        (LOADED + x_smem.shape[1]) * BLOCK_K * w_desc.dtype.primitive_bitwidth // 8
    )
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), BYTES, pred=i < steps)
        load_tile(
            w_desc, [row, (first + i) * BLOCK_K], full.index(i), w_smem.index(i).slice(0, LOADED, 0), pred=i < steps,
        )  # fmt: skip
    if ahead > 0:
        _prefetch_rows(w_ptr, row, (first + STAGES) * BLOCK_K, N, K, ahead, LOADED)
    if PDL:
        pdl_wait_first()
    for i in gl.static_range(STAGES):
        load_tile(
            x_desc, [0, (first + i) * BLOCK_K], full.index(i), x_smem.index(i), pred=i < steps
        )
    for i in range(STAGES, steps):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), (i // STAGES - 1) & 1)
        mbarrier.expect(full.index(slot), BYTES)
        load_tile(
            w_desc, [row, (first + i) * BLOCK_K], full.index(slot), w_smem.index(slot).slice(0, LOADED, 0)
        )  # fmt: skip
        load_tile(x_desc, [0, (first + i) * BLOCK_K], full.index(slot), x_smem.index(slot))


@gluon.jit
def _consumer(
    y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, partial_ptr, counter_ptr, w_smem, x_smem, full, empty, row, part, steps, M, N,
    size, C: gl.constexpr, LOADED: gl.constexpr, SPLITS: gl.constexpr, SCALED: gl.constexpr, HAS_BIAS: gl.constexpr,
    ADDS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute outputs `row` + 64 · C …, of which LOADED exist. `size`: elements of one split's
    partial sums. ADDS: add to the contents of `y`."""
    STAGES: gl.constexpr = w_smem.shape[0]
    BLOCK_M: gl.constexpr = x_smem.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_M, 256 // w_smem.dtype.primitive_bitwidth]
    )
    acc = gl.zeros([ROWS, BLOCK_M], gl.float32, LAYOUT)
    for i in range(steps):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        w = w_smem.index(slot).slice(C * ROWS, ROWS, 0)
        acc = warpgroup_mma(w, x_smem.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    if PDL:
        pdl_wait_first()
    n = row + C * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
    is_last = True
    if SPLITS > 1:  # like `split_k.reduce_splits`
        at = n[:, None] * BLOCK_M + m[None, :]
        gl.store(partial_ptr + part * size + at, acc)
        barrier()
        counter = counter_ptr + row // ROWS + C
        is_last = gl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            acc = gl.zeros([ROWS, BLOCK_M], gl.float32, LAYOUT)
            for split in gl.static_range(SPLITS):
                acc += gl.load(partial_ptr + split * size + at, cache_modifier=".cg")
            gl.store(counter, 0)
    if is_last:
        if SCALED:
            acc *= gl.load(w_scale_ptr + n, mask=n < N, other=0.0)[:, None]
            acc *= gl.load(x_scale_ptr + m, mask=m < M, other=0.0)[None, :]
        if HAS_BIAS:
            acc += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        inside = (m < M)[None, :] & (n < N)[:, None]
        if LOADED < ROWS:
            inside = inside & (n < row + LOADED)[:, None]
        out = y_ptr + m[None, :] * N + n[:, None]
        if ADDS:
            acc += gl.load(out, mask=inside, other=0.0).to(gl.float32)
        gl.store(out, acc.to(y_ptr.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["M", "ahead"])
def _skinny_gemm_kernel(
    w_desc, x_desc, w_ptr, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, partial_ptr, counter_ptr, M, N, K, num_steps, size, ahead,
    SPLITS: gl.constexpr, SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, ADDS: gl.constexpr, STAGES: gl.constexpr,
    SHARES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """SHARES: it leaves registers to small kernels, and the next kernel may start at once."""
    if SHARES and PDL:
        gdc_launch_dependents()
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    HEIGHT: gl.constexpr = BLOCK_N if BLOCK_N > ROWS else ROWS
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES, HEIGHT, BLOCK_K], w_desc.layout)
    x_smem = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES, x_desc.block_type.shape[0], BLOCK_K], x_desc.layout
    )
    full, empty = barriers(STAGES, 1), barriers(STAGES, HEIGHT // ROWS)
    fence_async_shared()
    row, part = gl.program_id(0) * BLOCK_N, gl.program_id(1)
    each = (num_steps + SPLITS - 1) // SPLITS
    first = part * each
    steps = gl.minimum(each, num_steps - first)
    if HEIGHT == ROWS:
        gl.warp_specialize(
            [
                (_consumer, (
                    y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, partial_ptr, counter_ptr, w_smem, x_smem, full, empty, row, part,
                    steps, M, N, size, 0, BLOCK_N, SPLITS, SCALED, HAS_BIAS, ADDS, PDL,
                )),
                (_producer, (
                    w_desc, x_desc, w_ptr, w_smem, x_smem, full, empty, row, first, steps, N, K, ahead, PDL,
                )),
            ],
            [1],
            [40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (
                    y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, partial_ptr, counter_ptr, w_smem, x_smem, full, empty, row, part,
                    steps, M, N, size, 0, BLOCK_N, SPLITS, SCALED, HAS_BIAS, ADDS, PDL,
                )),
                (_consumer, (
                    y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, partial_ptr, counter_ptr, w_smem, x_smem, full, empty, row, part,
                    steps, M, N, size, 1, BLOCK_N, SPLITS, SCALED, HAS_BIAS, ADDS, PDL,
                )),
                (_producer, (
                    w_desc, x_desc, w_ptr, w_smem, x_smem, full, empty, row, first, steps, N, K, ahead, PDL,
                )),
            ],
            [4, 1],
            [80 if SHARES else 168, 40],
        )  # fmt: skip


def is_faster(num_tokens: int, outer: int, *, scaled: bool) -> bool:
    """Whether this kernel is faster than the others. `scaled`: fp8."""
    most = MIDDLE_TOKENS if scaled and outer in MIDDLE_ROWS else MAX_TOKENS
    return 0 < num_tokens <= most and outer >= MIN_ROWS


def covers(values: Tensor, w: Linear) -> bool:
    """Whether `skinny_gemm` supports these dtypes and strides and is the fastest. `values`: the
    inputs, [T, K]."""
    scaled = isinstance(w, ScaledLinear)
    return is_faster(len(values), w.weight.shape[0], scaled=scaled) and supports(values, w)


def supports(values: Tensor, w: Linear) -> bool:
    """Whether `skinny_gemm` supports these numbers of rows, dtypes and strides."""
    weight, row_bytes = w.weight, values.shape[1] * values.element_size()
    scaled = isinstance(w, ScaledLinear)
    kinds = (torch.float8_e4m3fn,) if scaled else (torch.bfloat16, torch.float16)
    return (
        0 < len(values) <= MAX_TOKENS
        and values.dtype in kinds
        and weight.dtype == values.dtype
        and weight.is_contiguous()
        and values.is_contiguous()
        and row_bytes % 16 == 0
        and weight.data_ptr() % 16 == values.data_ptr() % 16 == 0
    )


def skinny_gemm(
    x: Activations,
    w: Linear,
    scratch: ArrivalCounters,
    added: Tensor | None = None,
    *,
    invariant: bool = False,
) -> Tensor:
    """x [T, K] · Wᵀ + b → [T, N], if `covers` allows it. With `added` [T, N] the sum is written in
    its place. `invariant`: K is not split, so T changes no bit of a row."""
    values, scales = (x.values, x.scales) if isinstance(x, Quantized) else (x, x)
    (num_tokens, inner), outer, size = values.shape, w.weight.shape[0], values.element_size()
    block_m, step = max(16, triton.next_power_of_2(num_tokens)), 256
    block_n, splits = _tile(outer, inner * size, block_m)
    room, ahead, shares = SHARED_BYTES, 0, False
    if invariant:
        splits = 1
        if block_m == 16:
            block_n, step, room, ahead, shares = _unsplit_tile(outer, inner * size, size, block_n)
    block_k = step // size
    tiles, num_steps = triton.cdiv(outer, block_n), triton.cdiv(inner, block_k)
    splits = min(splits, num_steps)
    stages = min(MAX_STAGES, room // ((max(block_n, ROWS.value) + block_m) * step))
    ahead = max(0, min(ahead // block_n, inner * size - stages * step)) // 16 * 16
    w_desc = TensorDescriptor(w.weight, [outer, inner], [inner, 1], [block_n, block_k], TILES[size])
    x_desc = TensorDescriptor(
        values, [num_tokens, inner], [inner, 1], [block_m, block_k], TILES[size]
    )
    y = added
    if y is None:
        dtype = w.out_dtype if isinstance(w, ScaledLinear) else values.dtype
        y = torch.empty(num_tokens, outer, dtype=dtype, device=values.device)
    numbers = tiles * block_n * block_m
    partial = (
        torch.empty(splits * numbers, dtype=torch.float32, device=values.device)
        if splits > 1
        else y
    )
    _skinny_gemm_kernel[(tiles, splits)](
        w_desc, x_desc, w.weight, y, scales, w.scales if isinstance(w, ScaledLinear) else scales,
        y if w.bias is None else w.bias, partial, scratch.counters, num_tokens, outer, inner, num_steps, numbers, ahead,
        SPLITS=splits, SCALED=isinstance(w, ScaledLinear), HAS_BIAS=w.bias is not None, ADDS=added is not None, STAGES=stages,
        SHARES=shares, num_warps=4, maxnreg=(80 if block_n > ROWS.value else 128) if shares else None, **pdl_options(y),
    )  # fmt: skip
    return y


def _unsplit_tile(
    outer: int, row_bytes: int, size: int, block_n: int
) -> tuple[int, int, int, int, bool]:
    """(BLOCK_N, bytes of a row that are copied at once, room for the ring, bytes that a thread block
    prefetches to L2, SHARES) for an unsplit product of few tokens, timed in chains of Llama-3-8B's
    layers (`engine_deterministic_one`). None changes a bit."""
    if outer >= WIDE:
        return block_n, 256, SHARED_BYTES, 0, False
    if outer >= 12_288:
        return 128, 256, *((SHARED_BYTES, PREFETCHED_BYTES) if size == 2 else (HALF_ROOM, 0)), True
    if outer <= HALVED_ROWS and row_bytes > LONG_ROW:
        return ROWS.value // 2, 256, SHARED_BYTES, 0, True
    if size == 2:
        return (
            ROWS.value,
            512 if outer <= HALVED_ROWS else 256,
            SHARED_BYTES,
            PREFETCHED_BYTES,
            True,
        )
    return ROWS.value, 512, SHARED_BYTES, 0, False


def _tile(outer: int, row_bytes: int, block_m: int) -> tuple[int, int]:
    """(BLOCK_N, SPLITS) for a weight of `outer` rows, measured in whole steps of Llama-3-8B, and of
    70B over two GPUs (GPU_NOTES.md)."""
    is_small, processors = block_m == 16, 132
    if is_small and row_bytes > LONG_ROW and 0.9 * processors <= outer / ROWS.value <= processors:
        return 64, 1
    if outer >= 12_288 or (is_small and outer > 4096):
        return 128, 1
    return 64, 2 if is_small and row_bytes > LONG_ROW else 1
