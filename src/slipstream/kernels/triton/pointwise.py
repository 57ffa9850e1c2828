"""Norms with residual, rotary embedding with cache write, activations, block copies. All are bound
by bandwidth.

Each kernel reads its inputs once and writes its outputs once; arithmetic is float32. Norms and
activations can write the 8-bit rows that the next product reads, so quantisation needs no pass of
its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.errors import UnsupportedModelError
from slipstream.kernels.cache.blocks import BlockTensors
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import NormParams, QKVLayout
from slipstream.kernels.thresholds import Thresholds
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.kernels.weights.forms import Activations, Quantized
from slipstream.kernels.weights.quantize import DTYPES
from slipstream.spec.model import (
    Activation,
    ClampedSilu,
    ClampedSwiglu,
    NamedActivation,
    OwnActivation,
    Xielu,
)
from slipstream.spec.scheme import FP8_TILE, InputFormat

FORMATS: dict[InputFormat | None, int] = {None: 0, "fp8": 1, "int8": 2, "fp8-block": 3}
"""Output row format → number passed to kernels."""


@triton.jit
def _store_row(y, out_ptr, scales_ptr, row, at, mask, size, FORMAT: tl.constexpr):
    """Store a row of float32 y: unchanged; in 8 bits with one scale
    (`kernels.weights.quantize.quantize_rows`); or in 8 bits with a scale per 128."""
    if FORMAT == 0:
        tl.store(out_ptr + row * size + at, y.to(out_ptr.dtype.element_ty), mask=mask)
    elif FORMAT == 3:
        groups: tl.constexpr = y.shape[0] // 128
        y = tl.reshape(tl.where(mask, y, 0.0), (groups, 128))
        scales = tl.maximum(tl.max(tl.abs(y), 1), 1e-12) / 448.0
        codes = tl.reshape(_round(y / scales[:, None], out_ptr, 448.0), (groups * 128,))
        group = tl.min(tl.reshape(at, (groups, 128)), 1) // 128
        tl.store(scales_ptr + row * (size // 128) + group, scales, mask=group < size // 128)
        tl.store(out_ptr + row * size + at, codes, mask=mask)
    else:
        top: tl.constexpr = 448.0 if FORMAT == 1 else 127.0
        scale = tl.maximum(tl.max(tl.abs(tl.where(mask, y, 0.0)), 0), 1e-12) / top
        tl.store(scales_ptr + row, scale)
        tl.store(out_ptr + row * size + at, _round(y * (1.0 / scale), out_ptr, top), mask=mask)


@triton.jit
def _round(x, like_ptr, top):
    """Rounds float32 to the 8-bit type of `like_ptr`, after clamping to ±top."""
    x = tl.minimum(tl.maximum(x, -top), top)
    if like_ptr.dtype.element_ty == tl.int8:
        x = (x + 12582912.0) - 12582912.0  # 1.5 · 2^23: rounds to the nearest integer, ties to even
    return x.to(like_ptr.dtype.element_ty)


def empty_rows(
    num_rows: int, size: int, like: Tensor, inputs: InputFormat | None
) -> tuple[Tensor, Tensor]:
    """Empty rows in the format `inputs`, and their scales (any tensor for a format without scales)."""
    dtype = like.dtype if inputs is None else DTYPES[inputs]
    out = torch.empty(num_rows, size, dtype=dtype, device=like.device)
    num_scales = size // FP8_TILE if inputs == "fp8-block" else 1
    return out, like if inputs is None else torch.empty(
        num_rows, num_scales, dtype=torch.float32, device=like.device
    )


MANY_ROWS, SHORT_ROW = 4096, 2048
"""Number of rows, of at most SHORT_ROW numbers each, from which a thread block takes several. An
H200 starts about 0.8 thread blocks per nanosecond, which otherwise bounds a small model's step
(16,384 rows of 384 numbers take 20 µs, 8 of them for the bytes)."""
THRESHOLDS = Thresholds(tokens=(MANY_ROWS - 1, MANY_ROWS, 255))


def rows_per_program(num_rows: int, size: int) -> int:
    """Rows per thread block; divides the number of rows."""
    return 4 if num_rows >= MANY_ROWS and num_rows % 4 == 0 and size <= SHORT_ROW else 1


def as_activations(out: Tensor, scales: Tensor, inputs: InputFormat | None) -> Activations:
    return out if inputs is None else Quantized(out, scales)


@triton.jit
def _norm_kernel(
    x_ptr, more_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, scales_ptr, size, eps, offset, x_stride, more_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_LAYER: tl.constexpr, HAS_MORE: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm ROWS rows, one after another. The sum of x and `more` is rounded. Its sum with the
    residual is rounded, stored as the residual, and normed."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    at = tl.arange(0, BLOCK)
    mask = at < size
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32) + offset
    if PDL:
        pdl_wait()
    for i in tl.static_range(ROWS):
        row = first + i
        x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_MORE:
            x += tl.load(more_ptr + row * more_stride + at, mask=mask, other=0.0).to(tl.float32)
            x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + row * size + at, mask=mask, other=0.0).to(tl.float32)
            rounded = x.to(residual_ptr.dtype.element_ty)
            tl.store(residual_ptr + row * size + at, rounded, mask=mask)
            x = rounded.to(tl.float32)
        if IS_LAYER:
            x = tl.where(mask, x - tl.sum(x, 0) / size, 0.0)
        y = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * weight
        if HAS_BIAS:
            y += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
        _store_row(y, out_ptr, scales_ptr, row, at, mask, size, FORMAT)


def norm(
    x: Tensor,
    norm: NormParams,
    residual: Tensor | None,
    inputs: InputFormat | None = None,
    more: Tensor | None = None,
) -> tuple[Activations, Tensor]:
    """`OpSet.norm`, and with `more` (which needs a residual) `norm_pair`. Norms that are functions
    of the user are excluded."""
    out, scales = empty_rows(len(x), x.shape[1], x, inputs)
    norm_into(out, scales, x, norm, residual, inputs, more)
    return as_activations(out, scales, inputs), x if residual is None else residual


def norm_into(
    out: Tensor,
    scales: Tensor,
    x: Tensor,
    norm: NormParams,
    residual: Tensor | None,
    inputs: InputFormat | None,
    more: Tensor | None = None,
) -> None:
    """`norm` into rows from `empty_rows`."""
    (num_rows, size), weight, bias = x.shape, norm.weight, norm.bias
    if num_rows:
        rows, block = rows_per_program(num_rows, size), triton.next_power_of_2(size)
        _norm_kernel[(num_rows // rows,)](
            x, x if more is None else more, x if residual is None else residual, weight, weight if bias is None else bias, out,
            scales, size, norm.eps, norm.offset, x.stride(0), (x if more is None else more).stride(0),
            ROWS=rows, BLOCK=block, IS_LAYER=norm.kind == "layer", HAS_MORE=more is not None, HAS_RESIDUAL=residual is not None,
            HAS_BIAS=bias is not None, FORMAT=FORMATS[inputs], num_warps=min(16, max(1, block // 512)), **pdl_options(x),
        )  # fmt: skip


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scales_ptr, size, BLOCK: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        pdl_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + row * size + at, mask=mask, other=0.0).to(tl.float32)
    _store_row(x, out_ptr, scales_ptr, row, at, mask, size, FORMAT)


def quantize(x: Tensor, inputs: InputFormat) -> Quantized:
    num_rows, size = x.shape
    out, scales = empty_rows(num_rows, size, x, inputs)
    block = triton.next_power_of_2(size)
    if num_rows:
        _quantize_kernel[(num_rows,)](
            x.contiguous(), out, scales, size,
            BLOCK=block, FORMAT=FORMATS[inputs], num_warps=min(16, max(1, block // 512)), **pdl_options(x),
        )  # fmt: skip
    return Quantized(out, scales)


@triton.jit(do_not_specialize=["T"])
def _rope_kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, positions_ptr, slots_ptr, table_ptr, q_norm_ptr, k_norm_ptr,
    eps, offset, value_eps, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, STEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, SCALED: tl.constexpr, BY_DIM: tl.constexpr,
    OWN_VALUES: tl.constexpr, NORM_VALUES: tl.constexpr, NORM_AFTER: tl.constexpr, STAGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys, and cache keys and values. There are three kinds of thread blocks.
    Those of queries and those of keys process HEADS · STEPS heads of TOKENS tokens: they rotate the
    first R elements of a head and copy the others. The last ⌈T / BLOCK_T⌉ · V thread blocks cache
    one head's values of BLOCK_T tokens each (V = K, or 0: none). Without OWN_VALUES the values are
    the row's keys."""
    if PDL:
        pdl_wait()
    pid = tl.program_id(0)
    q_tiles: tl.constexpr = (H + HEADS * STEPS - 1) // (HEADS * STEPS)
    tiles: tl.constexpr = q_tiles + (K + HEADS * STEPS - 1) // (HEADS * STEPS)
    turning = (T + TOKENS - 1) // TOKENS * tiles
    heads: tl.constexpr = H + K + (V if OWN_VALUES else 0)  # of a row
    each: tl.constexpr = K if K > 0 else 1
    if pid >= turning:
        pid -= turning
        _store_values(
            qkv_ptr, v_ptr, v_scale_ptr, slots_ptr, value_eps, pid // each, pid % each, T, heads, H + K if OWN_VALUES else H, K,
            D, BLOCK_SIZE, BLOCK_T, BLOCK_D, SCALED, BY_DIM, NORM_VALUES, STAGED,
        )  # fmt: skip
    elif pid % tiles < q_tiles:
        _turn_heads(
            qkv_ptr, q_ptr, k_scale_ptr, positions_ptr, slots_ptr, table_ptr, q_norm_ptr, eps, offset, pid // tiles,
            pid % tiles, T, heads, 0, H, D, R, BLOCK_SIZE, TOKENS, HEADS, STEPS, BLOCK_D, BLOCK_R, INTERLEAVED, HAS_NORM,
            SCALED, False, NORM_AFTER, STAGED,
        )  # fmt: skip
    else:
        _turn_heads(
            qkv_ptr, k_ptr, k_scale_ptr, positions_ptr, slots_ptr, table_ptr, k_norm_ptr, eps, offset, pid // tiles,
            pid % tiles - q_tiles, T, heads, H, K, D, R, BLOCK_SIZE, TOKENS, HEADS, STEPS, BLOCK_D, BLOCK_R, INTERLEAVED,
            HAS_NORM, SCALED, True, NORM_AFTER, STAGED,
        )  # fmt: skip


@triton.jit
def _turn_heads(
    qkv_ptr, out_ptr, scale_ptr, positions_ptr, slots_ptr, table_ptr, norm_ptr, eps, offset, token_tile, head_tile, T,
    ALL: tl.constexpr, BEFORE: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, STEPS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, SCALED: tl.constexpr, CACHED: tl.constexpr, NORM_AFTER: tl.constexpr,
    STAGED: tl.constexpr,
):  # fmt: skip
    """Norm and rotate heads of TOKENS tokens, HEADS at a time. A token's row has ALL heads; these
    are the N heads after the first BEFORE. CACHED: they are keys."""
    row = tl.arange(0, TOKENS * HEADS)[:, None]
    token = (token_tile * TOKENS + row // HEADS).to(tl.int64)
    inside = token < T
    head = head_tile * (HEADS * STEPS) + row % HEADS
    source = qkv_ptr + (token * ALL + BEFORE + head) * D
    target, pace = out_ptr + (token * N + head) * D, D
    if CACHED:
        slot = token if STAGED else tl.load(slots_ptr + token, mask=inside, other=0)
        target, pace = (
            out_ptr + ((slot // BLOCK_SIZE * N + head) * BLOCK_SIZE + slot % BLOCK_SIZE) * D,
            BLOCK_SIZE * D,
        )
    ds = tl.arange(0, BLOCK_D)[None, :]
    kept = (ds < D) if INTERLEAVED else (ds >= R) & (ds < D)  # numbers that are copied whole
    if R > 0:
        i = tl.arange(0, BLOCK_R)[None, :]
        angles = table_ptr + tl.load(positions_ptr + token, mask=inside, other=0) * R + i
        cos = tl.load(angles, mask=inside & (i < R // 2), other=1.0)
        sin = tl.load(angles + R // 2, mask=inside & (i < R // 2), other=0.0)
    if HAS_NORM:
        weight = tl.load(norm_ptr + ds, mask=kept, other=0.0).to(tl.float32) + offset
        if R > 0 and not INTERLEAVED:
            first_weight = tl.load(norm_ptr + i, mask=i < R // 2, other=0.0).to(tl.float32) + offset
            second_weight = (
                tl.load(norm_ptr + R // 2 + i, mask=i < R // 2, other=0.0).to(tl.float32) + offset
            )
    for step in tl.static_range(STEPS):
        live = inside & (head + step * HEADS < N)
        x_ptr, y_ptr = source + step * HEADS * D, target + step * HEADS * pace
        scale = 1.0
        if CACHED and SCALED:
            scale = tl.load(scale_ptr + head + step * HEADS, mask=live, other=1.0)
        squares = 0.0
        if INTERLEAVED or R < D:
            x = tl.load(x_ptr + ds, mask=live & kept, other=0.0).to(tl.float32)
            squares += tl.sum(x * x, 1) if HAS_NORM else 0.0
        if R > 0 and not INTERLEAVED:
            first = tl.load(x_ptr + i, mask=live & (i < R // 2), other=0.0).to(tl.float32)
            second = tl.load(x_ptr + R // 2 + i, mask=live & (i < R // 2), other=0.0).to(tl.float32)
            squares += tl.sum(first * first + second * second, 1) if HAS_NORM else 0.0
        if HAS_NORM:  # a rotation leaves the length as it is, so the weights alone differ if they come after it
            norm = tl.rsqrt(squares / D + eps)[:, None]
            if INTERLEAVED or R < D:
                x *= norm if NORM_AFTER and INTERLEAVED else norm * weight
            if R > 0 and not INTERLEAVED:
                first *= norm if NORM_AFTER else norm * first_weight
                second *= norm if NORM_AFTER else norm * second_weight
        if R > 0 and INTERLEAVED:
            first, second = tl.split(tl.reshape(x, (TOKENS * HEADS, BLOCK_R, 2)))
            turned = tl.join(first * cos - second * sin, second * cos + first * sin)
            x = tl.reshape(turned, (TOKENS * HEADS, BLOCK_D))
        elif R > 0:
            turned = first * cos - second * sin
            second = second * cos + first * sin
            first = turned
            if HAS_NORM and NORM_AFTER:
                first *= first_weight
                second *= second_weight
            halves = live & (i < R // 2)
            _store_head(first, y_ptr + i, halves, scale, out_ptr, SCALED, CACHED)
            _store_head(second, y_ptr + R // 2 + i, halves, scale, out_ptr, SCALED, CACHED)
        if HAS_NORM and NORM_AFTER and INTERLEAVED:
            x *= weight
        if INTERLEAVED or R < D:
            _store_head(x, y_ptr + ds, live & kept, scale, out_ptr, SCALED, CACHED)


@triton.jit
def _store_head(x, at, mask, scale, out_ptr, SCALED: tl.constexpr, CACHED: tl.constexpr):
    tl.store(
        at,
        _to_cache(x, scale, out_ptr, SCALED) if CACHED else x.to(out_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _to_cache(x, scale, cache_ptr, SCALED: tl.constexpr):
    """Converts x to the cache's dtype. The result is always finite: attention reads whole tiles and
    gives other sequences' keys weight 0, and 0 · inf is NaN."""
    kind: tl.constexpr = cache_ptr.dtype.element_ty
    if SCALED:
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        stored = _round(x / scale, cache_ptr, 127.0 if kind == tl.int8 else 448.0)
    else:
        stored = x.to(kind)
        stored = tl.where(tl.abs(stored.to(tl.float32)) < float("inf"), stored, 0.0)
    return stored


@triton.jit
def _store_values(
    qkv_ptr, v_ptr, v_scale_ptr, slots_ptr, eps, token_tile, head, T,
    ALL: tl.constexpr, BEFORE: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr, SCALED: tl.constexpr, BY_DIM: tl.constexpr, NORMED: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Cache the values of one head of BLOCK_T tokens, which come after BEFORE of a row's ALL heads.
    BY_DIM: the tile is transposed, so that tokens of a KV block are neighbours."""
    tokens, ds = token_tile * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    live = (tokens < T)[:, None] & (ds < D)[None, :]
    source = qkv_ptr + (tokens.to(tl.int64) * ALL + BEFORE + head)[:, None] * D + ds[None, :]
    scale = 1.0
    if SCALED:
        scale = tl.load(v_scale_ptr + head)
    x = tl.load(source, mask=live, other=0.0).to(tl.float32)
    if NORMED:
        x *= tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    x = _to_cache(x, scale, v_ptr, SCALED)
    if BY_DIM:
        # Tokens of decodes are in different blocks, so a warp should write many dimensions of one
        # token; two of them share 32 bytes. Tokens of a prompt are neighbours: then the tile is
        # flat, and a warp writes two times 16 bytes. A last tile that is not full never counts as
        # flat: its −15 is no multiple of a block's size.
        tl.static_assert(BLOCK_SIZE % 2 == 0)
        start = token_tile * BLOCK_T
        first = tl.load(slots_ptr + start, mask=start + BLOCK_T <= T, other=0)
        last = tl.load(slots_ptr + start + BLOCK_T - 1, mask=start + BLOCK_T <= T, other=0)
        if (last - first - BLOCK_T + 1) % BLOCK_SIZE == 0:
            i = tl.arange(0, BLOCK_D * BLOCK_T)
            slot = tl.load(slots_ptr + start + i % BLOCK_T)
            place = (
                (slot // BLOCK_SIZE * K + head) * D + i // BLOCK_T
            ) * BLOCK_SIZE + slot % BLOCK_SIZE
            tl.store(
                v_ptr + place, tl.reshape(tl.trans(x), (BLOCK_D * BLOCK_T,)), mask=i // BLOCK_T < D
            )
        else:
            slots = tl.load(slots_ptr + tokens, mask=tokens < T, other=0)
            at = (slots // BLOCK_SIZE * K + head) * BLOCK_SIZE * D + slots % BLOCK_SIZE
            tl.store(
                v_ptr + at[None, :] + (ds * BLOCK_SIZE)[:, None], tl.trans(x), mask=tl.trans(live)
            )
    else:
        slots = tokens.to(tl.int64)
        if not STAGED:
            slots = tl.load(slots_ptr + tokens, mask=tokens < T, other=0)
        rows = (slots // BLOCK_SIZE * K + head) * BLOCK_SIZE + slots % BLOCK_SIZE
        tl.store(v_ptr + (rows * D)[:, None] + ds[None, :], x, mask=live)


TOKENS_PER_PROGRAM = 16
"""Number of tokens of which one thread block writes a head's values to the cache. Others write keys."""
MANY_TOKENS, EIGHT_HEADS = 256, 4096
"""Numbers of tokens from which a thread block rotates 16 tokens: four heads one after another, then
eight. Below MANY_TOKENS it rotates 16 heads of one token. It also does so at any number of tokens
if part of a head is rotated as two halves, because the heads of a token are then read in one
stretch."""


def rope_and_cache(
    qkv: Tensor,
    kv: LayerKV,
    meta: AttentionMetadata,
    heads: QKVLayout,
    *,
    staged: bool = False,
    invariant: bool = False,
) -> Tensor:
    """`OpSet.rope_and_cache`. `staged`: `kv` has a block of one token for each of the step, in their
    order. `invariant`: with norms of heads, all numbers of tokens have one tile, and so one order of
    a norm's sum."""
    h, num_tokens = heads, len(qkv)
    num_heads, num_kv_heads, head_dim = h.num_heads, h.num_kv_heads, h.head_dim
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        width, num_values = triton.next_power_of_2(head_dim), 0 if kv.latent else num_kv_heads
        most = triton.next_power_of_2(max(num_heads, num_kv_heads))
        tokens, at_once, steps, warps = 1, min(16, 8192 // width, most), 1, 4
        many = num_tokens >= MANY_TOKENS and not (invariant and h.q_norm is not None)
        if many and (h.interleaved or h.rotary_dim in (0, head_dim)):
            tokens, at_once, steps, warps = (
                16,
                1,
                min(8 if num_tokens >= EIGHT_HEADS else 4, most),
                8,
            )
        tiles = triton.cdiv(num_heads, at_once * steps) + triton.cdiv(num_kv_heads, at_once * steps)
        grid = (
            triton.cdiv(num_tokens, tokens) * tiles
            + triton.cdiv(num_tokens, TOKENS_PER_PROGRAM) * num_values
        )
        _rope_kernel[(grid,)](
            qkv.contiguous(), q, kv.k, kv.v, qkv if kv.k_scale is None else kv.k_scale,
            qkv if kv.v_scale is None else kv.v_scale, meta.positions, meta.slot_mapping,
            qkv if h.cos_sin is None else h.cos_sin, qkv if h.q_norm is None else h.q_norm,
            qkv if h.k_norm is None else h.k_norm, h.norm_eps, h.norm_offset, h.value_eps or 0.0, num_tokens,
            H=num_heads, K=num_kv_heads, V=num_values, D=head_dim, R=h.rotary_dim, BLOCK_SIZE=kv.block_size,
            TOKENS=tokens, HEADS=at_once, STEPS=steps, BLOCK_T=TOKENS_PER_PROGRAM, BLOCK_D=width,
            BLOCK_R=width // 2 if h.interleaved else triton.next_power_of_2(max(1, h.rotary_dim // 2)),
            INTERLEAVED=h.interleaved, HAS_NORM=h.q_norm is not None, SCALED=kv.k_scale is not None, BY_DIM=kv.v.stride(2) == 1,
            OWN_VALUES=h.has_values, NORM_VALUES=h.value_eps is not None, NORM_AFTER=h.norm_after, STAGED=staged,
            num_warps=warps if tokens * at_once * head_dim >= 1024 else 1, **pdl_options(qkv),
        )  # fmt: skip
    return q


ACTIVATIONS: dict[NamedActivation, int] = {
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "relu": 3,
    "relu2": 4,
}
CLAMPED_SWIGLU, CUSTOM, XIELU, CLAMPED_SILU = 5, 6, 7, 8


@triton.jit
def _logistic(x):
    """1 / (1 + e^−x), without special cases for denormals. That is about half the cost of
    `tl.sigmoid`, which matters in an activation kernel. A reciprocal square root has such an
    instruction; a division has not."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == 0:
        return x * _logistic(x)
    if KIND == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * _logistic(2.0 * inner)  # ½(1 + tanh y) is the logistic function of 2 y
    x = tl.maximum(x, 0.0)
    return x if KIND == 3 else x * x


@triton.jit
def activate(y, up, alpha, limit, KIND: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr):
    """Activation of float32 y. GATED: y is the gate, and `up` is gated. Other arguments:
    `activation_arguments`."""
    if GATED:
        if KIND == 5:  # CLAMPED_SWIGLU
            y = tl.minimum(y, limit)
            y = y * _logistic(alpha * y) * (tl.minimum(tl.maximum(up, -limit), limit) + 1.0)
        elif KIND == 6:  # OWN
            y = FUNCTION(y, up)
        elif KIND == 8:  # CLAMPED_SILU
            y = tl.minimum(_activate(y, 0), alpha) * tl.minimum(tl.maximum(up, -limit), limit)
        else:
            y = _activate(y, KIND) * up
    elif KIND == 6:
        y = FUNCTION(y)
    elif KIND == 7:  # XIELU
        low, high = tl.minimum(y, 0.0), tl.maximum(y, 0.0)
        y = 0.5 * y + alpha * high * high + limit * (tl.exp(low) - 1.0 - low)
    else:
        y = _activate(y, KIND)
    return y


@triton.jit
def _activation_kernel(
    x_ptr, out_ptr, scales_ptr, size, row_size, alpha, limit,
    ROWS: tl.constexpr, KIND: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Activate BLOCK columns of ROWS rows. Quantised rows are taken whole, because a row has one
    scale."""
    if PDL:
        pdl_wait()
    first = tl.program_id(0).to(tl.int64) * ROWS
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    for i in tl.static_range(ROWS):
        row = first + i
        y = tl.load(x_ptr + row * row_size + at, mask=mask, other=0.0).to(tl.float32)
        up = y
        if GATED:
            up = tl.load(x_ptr + row * row_size + size + at, mask=mask, other=0.0).to(tl.float32)
        y = activate(y, up, alpha, limit, KIND, FUNCTION, GATED)
        _store_row(y, out_ptr, scales_ptr, row, at, mask, size, FORMAT)


def activation_arguments(kind: Activation) -> dict[str, object]:
    """Arguments for a kernel that calls `activate`."""
    alpha, limit = (kind.alpha, kind.limit) if isinstance(kind, ClampedSwiglu) else (0.0, 0.0)
    function, number = None, CLAMPED_SWIGLU
    if isinstance(kind, Xielu):
        return {"alpha": kind.positive, "limit": kind.negative, "KIND": XIELU, "FUNCTION": None}
    if isinstance(kind, ClampedSilu):
        limits = {"alpha": kind.highest, "limit": kind.limit}
        return {**limits, "KIND": CLAMPED_SILU, "FUNCTION": None}
    if isinstance(kind, OwnActivation):
        if kind.triton is None:
            raise UnsupportedModelError(
                f"the activation {kind.name!r} has no Triton function, which a GPU needs: give OwnActivation one, or run "
                "on a CPU",
                field="activation",
            )
        function, number = kind.triton, CUSTOM
    elif not isinstance(kind, ClampedSwiglu):
        number = ACTIVATIONS[kind]
    return {"alpha": alpha, "limit": limit, "KIND": number, "FUNCTION": function}


def activation(
    x: Tensor, activation: Activation, *, gated: bool = False, inputs: InputFormat | None = None
) -> Activations:
    num_rows, row_size = x.shape
    size = row_size // 2 if gated else row_size
    out, scales = empty_rows(num_rows, size, x, inputs)
    if num_rows:
        block = triton.next_power_of_2(size) if inputs else min(1024, triton.next_power_of_2(size))
        rows = rows_per_program(num_rows, size)
        grid = (num_rows // rows, triton.cdiv(size, block))
        _activation_kernel[grid](
            x.contiguous(), out, scales, size, row_size,
            ROWS=rows, **activation_arguments(activation), GATED=gated, FORMAT=FORMATS[inputs], BLOCK=block,
            num_warps=min(16, max(4, block // 1024)), **pdl_options(x),
        )  # fmt: skip
    return as_activations(out, scales, inputs)


@triton.jit
def _row_at(places_ptr, indices_ptr, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Start of row `indices[program_id(0)]` in part program_id(1)."""
    place = places_ptr + tl.program_id(1) * 3
    begin, stride = tl.load(place), tl.load(place + 1)
    row = (begin + tl.load(indices_ptr + tl.program_id(0)) * stride).to(tl.pointer_type(KIND))
    return tl.multiple_of(row, 16) if ALIGNED else row


@triton.jit
def _copy_kernel(
    source_ptr, target_ptr, sources_ptr, targets_ptr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    KIND: tl.constexpr = tl.int32 if ALIGNED else tl.uint8
    source = _row_at(source_ptr, sources_ptr, KIND, ALIGNED)
    target = _row_at(target_ptr, targets_ptr, KIND, ALIGNED)
    size = tl.load(source_ptr + tl.program_id(1) * 3 + 2)
    if ALIGNED:
        size = tl.multiple_of(size // 4, 4)
    for begin in range(tl.program_id(2) * BLOCK, size, tl.num_programs(2) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)


def copy_blocks(
    source: BlockTensors, target: BlockTensors, sources: Tensor, targets: Tensor
) -> None:
    """Copy blocks of all parts in one launch. There are none without attention."""
    if not source.rows:
        return
    aligned = source.is_aligned and target.is_aligned
    pieces = min(8, triton.cdiv(max(source.row_bytes), 4096))
    _copy_kernel[(len(sources), len(source.rows), pieces)](
        source.places,
        target.places,
        sources.contiguous(),
        targets.contiguous(),
        BLOCK=1024,
        ALIGNED=aligned,
    )
