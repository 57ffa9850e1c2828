"""Prefill attention for Hopper: persistent, warp-specialised thread blocks (FlashAttention-3, Shah et al. 2024).

Computes softmax(scale · q kᵀ) v over the paged cache, causal, for sequences with many queries. Bound by the tensor
cores.

1. One thread block runs on each multiprocessor: a producer and two consumers of four warps each.
2. The producer fills a ring of key and value tiles in shared memory. A 16-bit cache is copied by TMA; an 8-bit one goes
   through registers and becomes float16. For 8-bit products keys are copied by TMA, and
   values go through registers to change their order.
3. Each consumer holds 64 rows (tokens × G query heads of a kv head, G rounded up to a power of two). Both walk along the
   same tiles from last to first. While the tensor cores multiply queries with the next tile and weights with the
   previous one, a consumer takes the exponents of the current tile. Scores are in units of log 2.
4. Work is a query tile (128 rows of one sequence) and a kv head. The producer takes work from a counter and sends it to
   its consumers. In a sequence the tiles with the most keys come first, so thread blocks end together. Which thread
   block computes a tile changes nothing in its result.
5. A short chunk of a long prompt has too few query tiles for the chip, and each takes long. Then the keys of a tile are
   split into parts, which are work of their own (`split_keys.py`). A tile with few keys stays whole.

Limits: compute capability 9.0; bfloat16 or float16; head dims of 64, 128 and 256 (`covers`); causal; no ALiBi, no bias
by distance. Gluon has no interpreter: a test here reads the machine code, and tests/gpu compares the numbers."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.triton.attention.hopper_consumer import consumer
from slipstream.kernels.triton.attention.hopper_memory import CONSUMER_ROWS, MAX_PARTS, barriers
from slipstream.kernels.triton.attention.hopper_producer import producer
from slipstream.kernels.triton.attention.split_keys import combine, scratch
from slipstream.platform import platform_of


@gluon.jit(do_not_specialize=["window", "table_stride", "first_seq", "last_seq", "splits"])
def _prefill_kernel(
    q_desc, k, v, out_ptr, partial_ptr, lse_ptr, parts_ptr, next_ptr, table_ptr, starts_ptr, lens_ptr, limits_ptr, sinks_ptr,
    k_scale_ptr, v_scale_ptr, scale, softcap, window, table_stride, first_seq, last_seq, splits,
    K: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, SCALED: gl.constexpr, SPLIT: gl.constexpr,
    LIMITS: gl.constexpr, FP8: gl.constexpr, PRODUCER_WARPS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    BLOCK_G: gl.constexpr = q_desc.block_type.shape[1]
    TOKENS: gl.constexpr = 2 * q_desc.block_type.shape[0]
    # float16 holds every 8-bit number
    dtype: gl.constexpr = gl.float8e4nv if FP8 else gl.float16 if SCALED else q_desc.dtype
    TILE: gl.constexpr = k.layout if FP8 else gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, TOKENS // 2, BLOCK_G, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], TILE)
    v_smem = gl.allocate_shared_memory(
        dtype,
        [STAGES, D, BLOCK_N] if SCALED else [STAGES, BLOCK_N, D],
        gl.NVMMASharedLayout(128, 8, 2) if FP8 else TILE,
    )
    q_full, q_empty = barriers(2, 1), barriers(2, 1)
    k_full, v_full = barriers(STAGES, 1), barriers(STAGES, 1)
    k_empty, v_empty = barriers(STAGES, 2), barriers(STAGES, 2)  # both consumers release a tile
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    mailbox = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer, (
                out_ptr, partial_ptr, lse_ptr, parts_ptr, q_smem, k_smem, v_smem, mailbox, bars, limits_ptr, sinks_ptr,
                k_scale_ptr, v_scale_ptr, scale, softcap, window, first_seq, splits,
                0, K, G, BLOCK_G, D, TOKENS, BLOCK_N, STAGES, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, SCALED, SPLIT, LIMITS, FP8,
            )),
            (consumer, (
                out_ptr, partial_ptr, lse_ptr, parts_ptr, q_smem, k_smem, v_smem, mailbox, bars, limits_ptr, sinks_ptr,
                k_scale_ptr, v_scale_ptr, scale, softcap, window, first_seq, splits,
                1, K, G, BLOCK_G, D, TOKENS, BLOCK_N, STAGES, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, SCALED, SPLIT, LIMITS, FP8,
            )),
            (producer, (
                q_desc, k, v, q_smem, k_smem, v_smem, mailbox, bars, next_ptr, table_ptr, starts_ptr, lens_ptr, limits_ptr,
                window, table_stride, first_seq, last_seq, splits,
                K, G, D, BLOCK_SIZE, TOKENS, BLOCK_N, STAGES, HAS_WINDOW, SCALED, SPLIT, LIMITS, FP8,
            )),
        ],
        [4, PRODUCER_WARPS],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


QUERIES, KEYS = gl.NVMMASharedLayout(128, 16, 3), gl.NVMMASharedLayout(128, 16, 2)
FP8_KEYS = {dim: gl.NVMMASharedLayout(dim, 8, 2) for dim in (64, 128)}
TILES = {64: (128, 4, 104), 128: (128, 2, 104), 256: (64, 2, 88)}
"""Head dim → (keys in a tile, tiles in the ring, registers per thread of a converting producer).
The ring and the queries fill 227 KB of shared memory. The consumers' threads get the rest of 504
registers."""
FP8_TILES = {64: (128, 6, 64), 128: (128, 4, 56)}
"""Tiles for FP8 matrix products."""


def covers(q: Tensor, kv: LayerKV) -> bool:
    """Whether `prefill` supports these dtypes and shapes."""
    (num_kv_heads, block_size, dim), small = kv.k.shape[1:], kv.k_scale is not None
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and kv.k.dtype in ((torch.float8_e4m3fn, torch.int8) if small else (q.dtype,))
        and kv.v.stride(2 if small else 3) == 1
        and dim in TILES
        and block_size in (16, 32, 64)
        and q.shape[1] // num_kv_heads <= CONSUMER_ROWS.value
    )


def prefill(
    q: Tensor,
    kv: LayerKV,
    meta: AttentionMetadata,
    s: AttentionParams,
    out: Tensor,
    *,
    first_seq: int,
    fp8: bool = False,
) -> None:
    """Causal attention of sequences `first_seq` … into their rows of `out` [T, H, D]. No ALiBi, no
    bias by distance. With `meta.limits` rows are those of `ContextOps.attention_part`. With `fp8` an
    e4m3 cache of head dims 64 and 128 is multiplied in 8 bits."""
    num_tokens, num_heads, dim = q.shape
    num_kv_heads, block_size = kv.k.shape[1:3]
    group = num_heads // num_kv_heads
    block_g = 1 << (group - 1).bit_length()
    rows = CONSUMER_ROWS.value // block_g
    scaled = kv.k_scale is not None
    fp8 = fp8 and kv.k.dtype == torch.float8_e4m3fn and dim in FP8_TILES
    block_n, stages, converter = (FP8_TILES if fp8 else TILES)[dim]
    regs = converter if scaled else 24
    q_desc = TensorDescriptor(q, list(q.shape), list(q.stride()), [rows, block_g, dim], QUERIES)
    k, v = kv.k, kv.v
    shape, copy_shape = [kv.k.numel() // dim, dim], [min(block_size, block_n), dim]
    if not scaled:
        k, v = (TensorDescriptor(t, shape, [dim, 1], copy_shape, KEYS) for t in (k, v))
    elif fp8:
        k = TensorDescriptor(k, shape, [dim, 1], copy_shape, FP8_KEYS[dim])
    k_scale, v_scale = (
        (q, q) if kv.k_scale is None or kv.v_scale is None else (kv.k_scale, kv.v_scale)
    )
    num_prompt, processors = num_tokens - first_seq, platform_of(q.device).multiprocessors
    max_tiles = num_prompt // (2 * rows) + meta.seq_lens.shape[0] - first_seq  # upper bound
    splits = num_parts(triton.cdiv(num_prompt, 2 * rows) * num_kv_heads, processors)
    limits, split = meta.limits, splits > 1 or meta.limits is not None
    partial, lse = scratch(num_prompt, q, dim, splits) if split else (out, out)
    # One counter per launch, because launches may overlap; after it the number of parts of each
    # token and kv head.
    counts = torch.zeros(
        1 + (num_prompt * num_kv_heads if split else 0), dtype=torch.int32, device=q.device
    )
    parts = counts[1:]
    _prefill_kernel[(min(max_tiles * num_kv_heads * splits, processors),)](
        q_desc, k, v, out, partial, lse, parts if split else counts, counts, meta.block_table, meta.query_start_loc,
        meta.seq_lens, counts if limits is None else limits, q if s.sinks is None else s.sinks, k_scale, v_scale,
        s.scale, s.softcap or 1.0, s.window or 0, meta.block_table.stride(0), first_seq, meta.seq_lens.shape[0], splits,
        K=num_kv_heads, G=group, D=dim, BLOCK_SIZE=block_size, BLOCK_N=block_n, STAGES=stages,
        HAS_WINDOW=s.window is not None, HAS_SOFTCAP=s.softcap is not None, HAS_SINKS=s.sinks is not None, SCALED=scaled,
        SPLIT=split, LIMITS=limits is not None, FP8=fp8, PRODUCER_WARPS=4 if scaled else 1,
        PRODUCER_REGS=regs, CONSUMER_REGS=(504 - regs) // 2,
        num_warps=4,
    )  # fmt: skip
    if split:
        sums = out.shape[2] - dim
        combine(
            partial, lse, out[first_seq:], splits, parts.view(num_prompt, num_kv_heads), sums=sums
        )


def num_parts(num_programs: int, num_processors: int) -> int:
    """Number of parts into which a query tile's keys are split, so that each thread block of the
    chip has one work item."""
    return max(1, min(int(MAX_PARTS.value), num_processors // num_programs))
