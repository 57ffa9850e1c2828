"""Writing to an int4 cache, whose format is `kernels.cache.int4`'s.

`rope_and_cache` rotates heads as for any cache, with keys and values side by side in buffers. A second kernel folds and
multiplies them by the Hadamard matrix, rounds them, and writes the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.cache import int4 as int4_cache
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import QKVLayout
from slipstream.kernels.triton import pointwise
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait

CANDIDATES = tl.constexpr(int4_cache.CANDIDATES)


@triton.jit
def hadamard(x, y, SIZE: tl.constexpr):
    """Multiplies rows, given as halves x, y [M, SIZE], by the Hadamard matrix of size 2 · SIZE."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    odd = i & j
    odd ^= odd >> 8
    odd ^= odd >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    signs = (1 - 2 * (odd & 1)).to(tl.float16)
    low = tl.dot((x + y).to(tl.float16), signs, input_precision="ieee")
    high = tl.dot((x - y).to(tl.float16), signs, input_precision="ieee")
    root = tl.rsqrt(2.0 * SIZE)
    return low * root, high * root


@triton.jit
def _codes(x, y, MOST: tl.constexpr, CANDIDATES: tl.constexpr):
    """Quantizes both halves x, y [M, N] of M rows. Returns their codes, int32, and the bytes of the
    scales that the halves share [M]. Of CANDIDATES scales the one with the least squared error is
    taken."""
    largest = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
    half = tl.minimum(largest * (1.0 / MOST), 60000.0).to(tl.float16)
    first = tl.minimum((half.to(tl.int16, bitcast=True).to(tl.int32) + 127) >> 7, 0xF7)
    byte, least = first, tl.full(largest.shape, float("inf"), tl.float32)
    for i in tl.static_range(CANDIDATES):
        tried = tl.maximum(first - i, 0)
        step = scale_of(tried)
        error = _error(x, step, MOST) + _error(y, step, MOST)
        byte, least = tl.where(error < least, tried, byte), tl.minimum(error, least)
    step = scale_of(byte)
    return _code(x, step, MOST), _code(y, step, MOST), byte.to(tl.uint8)


@triton.jit
def _code(x, step, MOST: tl.constexpr):
    code = tl.floor(x * (1.0 / tl.where(step > 0.0, step, 1.0))[:, None])
    return (tl.minimum(tl.maximum(code, -1.0 * MOST), MOST - 1.0) + MOST).to(tl.int32)


@triton.jit
def _error(x, step, MOST: tl.constexpr):
    found = (_code(x, step, MOST).to(tl.float32) + (0.5 - MOST)) * step[:, None]
    return tl.sum((found - x) * (found - x), 1)


@triton.jit
def scale_of(byte):
    return (byte.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_halves(at, mask, HALF: tl.constexpr):
    """Loads both halves of heads' numbers, float32."""
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return x, tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_halves(at, x, y, mask, HALF: tl.constexpr):
    tl.store(at, x.to(at.dtype.element_ty), mask=mask)
    tl.store(at + HALF, y.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _write_key(
    at, keys_ptr, fold, base, slot, inside, HALF: tl.constexpr, AWAY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_T keys of a head. `fold` points to the head's factors; its means follow AWAY numbers later."""
    FIFTH: tl.constexpr = HALF // 4
    ds, mask = tl.arange(0, HALF), inside[:, None]
    x, y = load_halves(at, mask, HALF)
    x = (x - tl.load(fold + AWAY + ds)[None, :]) * tl.load(fold + ds)[None, :]
    y = (y - tl.load(fold + AWAY + HALF + ds)[None, :]) * tl.load(fold + HALF + ds)[None, :]
    x, y = hadamard(x, y, HALF)
    low, _, first = _codes(x, x, 16, CANDIDATES)
    high, _, second = _codes(y, y, 16, CANDIDATES)
    base *= BLOCK_SIZE * (HALF + FIFTH + 2)
    to = keys_ptr + (base + slot * HALF)[:, None] + ds[None, :]
    tl.store(to, (low & 15 | (high & 15) << 4).to(tl.uint8), mask=mask)
    fifth = (low >> 4 | high & 16) << (ds // FIFTH)[None, :]
    fifth = tl.sum(tl.reshape(fifth, (BLOCK_T, 4, FIFTH)), 1).to(tl.uint8)
    bits = keys_ptr + (base + BLOCK_SIZE * HALF + slot * FIFTH)[:, None]
    tl.store(bits + tl.arange(0, FIFTH)[None, :], fifth, mask=mask)
    steps = keys_ptr + base + BLOCK_SIZE * (HALF + FIFTH) + slot * 2
    tl.store(steps, first, mask=inside)
    tl.store(steps + 1, second, mask=inside)


@triton.jit
def _write_value(at, values_ptr, base, slot, inside, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    ds, mask = tl.arange(0, HALF), inside[:, None]
    x, y = load_halves(at, mask, HALF)
    x, y = hadamard(x, y, HALF)
    low, high, step = _codes(x, y, 8, CANDIDATES)
    base *= BLOCK_SIZE * (HALF + 1)
    to = values_ptr + (base + slot)[:, None] + ds[None, :] * BLOCK_SIZE
    tl.store(to, (low | high << 4).to(tl.uint8), mask=mask)
    tl.store(values_ptr + base + BLOCK_SIZE * HALF + slot, step, mask=inside)


@triton.jit
def _write_kernel(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, fold_ptr, slots_ptr, num_tokens,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Processes BLOCK_T tokens of one head: folds queries in place, and writes keys and values to
    the cache."""
    if PDL:
        pdl_wait()
    HALF: tl.constexpr = D // 2
    head = tl.program_id(0)
    tokens, ds = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, HALF)
    inside = tokens < num_tokens
    if head < H:
        at = q_ptr + (tokens.to(tl.int64) * H + head)[:, None] * D + ds[None, :]
        fold = fold_ptr + head // (H // K) * D + ds
        x, y = load_halves(at, inside[:, None], HALF)
        x, y = hadamard(x / tl.load(fold)[None, :], y / tl.load(fold + HALF)[None, :], HALF)
        store_halves(at, x, y, inside[:, None], HALF)
    else:
        slots = tl.load(slots_ptr + tokens, mask=inside, other=0)
        own = (head - H) % K
        base, offset = slots // BLOCK_SIZE * K + own, (tokens.to(tl.int64) * K + own)[:, None] * D
        slot = slots % BLOCK_SIZE
        if head < H + K:
            _write_key(
                k_ptr + offset + ds[None, :], keys_ptr, fold_ptr + own * D, base, slot, inside, HALF, K * D, BLOCK_SIZE, BLOCK_T
            )  # fmt: skip
        else:
            _write_value(
                v_ptr + offset + ds[None, :], values_ptr, base, slot, inside, HALF, BLOCK_SIZE
            )


def rope_and_cache(qkv: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout) -> Tensor:
    """`OpSet.rope_and_cache` for an int4 cache."""
    num_tokens, dim, fold = len(qkv), heads.head_dim, kv.fold
    assert fold is not None
    k, v = torch.empty(
        2, num_tokens, heads.num_kv_heads, 1, dim, dtype=qkv.dtype, device=qkv.device
    )
    q = pointwise.rope_and_cache(qkv, LayerKV(k, v), meta, heads, staged=True)
    if num_tokens:
        rows = 16 if num_tokens <= 512 else 64
        grid = heads.num_heads + 2 * heads.num_kv_heads, triton.cdiv(num_tokens, rows)
        _write_kernel[grid](
            q, k, v, kv.k, kv.v, fold, meta.slot_mapping, num_tokens, H=heads.num_heads, K=fold.shape[1], D=dim,
            BLOCK_SIZE=kv.block_size, BLOCK_T=rows, num_warps=4, **pdl_options(q),
        )  # fmt: skip
    return q
