"""Norms with residual, rotary embedding with cache writes, activations, block copies: kernels bound by bandwidth.

Each reads its inputs once and writes its outputs once; arithmetic is in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.ops import AttentionMetadata, LayerKV
from slipstream.model.spec import Activation


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    size,
    eps,
    offset,
    x_stride,
    BLOCK: tl.constexpr,
    IS_LAYER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One row a program. The sum goes back into the residual, rounded, and that is what is normed."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * size + at, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * size + at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if IS_LAYER:
        x = tl.where(mask, x - tl.sum(x, 0) / size, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    y *= tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32) + offset
    if HAS_BIAS:
        y += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + at, y.to(out_ptr.dtype.element_ty), mask=mask)


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None, offset: float, is_layer: bool
) -> tuple[Tensor, Tensor]:
    num_rows, size = x.shape
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    if num_rows:
        _norm_kernel[(num_rows,)](
            x,
            x if residual is None else residual,
            weight,
            weight if bias is None else bias,
            out,
            size,
            eps,
            offset,
            x.stride(0),
            BLOCK=block,
            IS_LAYER=is_layer,
            HAS_RESIDUAL=residual is not None,
            HAS_BIAS=bias is not None,
            num_warps=min(16, max(1, block // 512)),
        )
    return out, x if residual is None else residual


@triton.jit
def _rope_kernel(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    offset,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One program a (token, head of q, k or v). The first R dimensions turn; R = 0 turns nothing."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = qkv_ptr + (token * (H + 2 * K) + head) * D
    ds = tl.arange(0, BLOCK_D)
    x = tl.load(source + ds, mask=ds < D, other=0.0)
    slot = tl.load(slots_ptr + token)
    place = slot // BLOCK_SIZE * K * BLOCK_SIZE + slot % BLOCK_SIZE  # of kv head 0, in rows of D
    if head >= H + K:
        target = v_ptr + (place + (head - H - K) * BLOCK_SIZE) * D
        tl.store(target + ds, x.to(v_ptr.dtype.element_ty), mask=ds < D)
    else:
        is_query = head < H
        scale = 1.0
        if HAS_NORM:
            wide = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
        key = k_ptr + (place + (head - H) * BLOCK_SIZE) * D
        query = q_ptr + (token * H + head) * D
        if R < D or R == 0:
            y = x.to(tl.float32)
            if HAS_NORM:
                weight = tl.load((q_norm_ptr if is_query else k_norm_ptr) + ds, mask=ds < D, other=0.0).to(tl.float32)
                y = y * scale * (weight + offset)
            rest = (ds >= R) & (ds < D)
            if is_query:
                tl.store(query + ds, y.to(q_ptr.dtype.element_ty), mask=rest)
            else:
                tl.store(key + ds, y.to(k_ptr.dtype.element_ty), mask=rest)
        if R > 0:
            i = tl.arange(0, BLOCK_R)
            half = i < R // 2
            first = 2 * i if INTERLEAVED else i
            second = first + 1 if INTERLEAVED else i + R // 2
            a = tl.load(source + first, mask=half, other=0.0).to(tl.float32)
            b = tl.load(source + second, mask=half, other=0.0).to(tl.float32)
            if HAS_NORM:
                weight_ptr = q_norm_ptr if is_query else k_norm_ptr
                a = a * scale * (tl.load(weight_ptr + first, mask=half, other=0.0).to(tl.float32) + offset)
                b = b * scale * (tl.load(weight_ptr + second, mask=half, other=0.0).to(tl.float32) + offset)
            row = table_ptr + tl.load(positions_ptr + token) * R
            cos, sin = tl.load(row + i, mask=half, other=0.0), tl.load(row + R // 2 + i, mask=half, other=0.0)
            c, d = a * cos - b * sin, b * cos + a * sin
            if is_query:
                tl.store(query + first, c.to(q_ptr.dtype.element_ty), mask=half)
                tl.store(query + second, d.to(q_ptr.dtype.element_ty), mask=half)
            else:
                tl.store(key + first, c.to(k_ptr.dtype.element_ty), mask=half)
                tl.store(key + second, d.to(k_ptr.dtype.element_ty), mask=half)


def rope_and_cache(
    qkv: Tensor,
    kv: LayerKV,
    meta: AttentionMetadata,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cos_sin: Tensor | None,
    interleaved: bool,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    norm_offset: float,
) -> Tensor:
    num_tokens = qkv.shape[0]
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    if num_tokens:
        _rope_kernel[(num_tokens, num_heads + 2 * num_kv_heads)](
            qkv.contiguous(),
            q,
            kv.k,
            kv.v,
            meta.positions,
            meta.slot_mapping,
            qkv if cos_sin is None else cos_sin,
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            norm_eps,
            norm_offset,
            H=num_heads,
            K=num_kv_heads,
            D=head_dim,
            R=rotary,
            BLOCK_SIZE=kv.block_size,
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK_R=triton.next_power_of_2(max(1, rotary // 2)),
            INTERLEAVED=interleaved,
            HAS_NORM=q_norm is not None,
            num_warps=1,
        )
    return q


ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == 0:
        return x * tl.sigmoid(x)
    if KIND == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * tl.sigmoid(2.0 * inner)  # ½(1 + tanh y) is the logistic function of 2y
    x = tl.maximum(x, 0.0)
    return x if KIND == 3 else x * x


@triton.jit
def _activation_kernel(x_ptr, out_ptr, size, row_size, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    y = _activate(tl.load(x_ptr + row * row_size + at, mask=mask, other=0.0).to(tl.float32), KIND)
    if GATED:
        y *= tl.load(x_ptr + row * row_size + size + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + at, y.to(out_ptr.dtype.element_ty), mask=mask)


def activation(x: Tensor, kind: Activation, gated: bool) -> Tensor:
    num_rows, row_size = x.shape
    size = row_size // 2 if gated else row_size
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    if num_rows:
        block = min(1024, triton.next_power_of_2(size))
        grid = (num_rows, triton.cdiv(size, block))
        _activation_kernel[grid](
            x.contiguous(), out, size, row_size, KIND=ACTIVATIONS[kind], GATED=gated, BLOCK=block, num_warps=4
        )
    return out


@triton.jit
def _copy_kernel(k_ptr, v_ptr, source_ptr, target_ptr, size, BLOCK: tl.constexpr):
    source = tl.load(source_ptr + tl.program_id(0)) * size
    target = tl.load(target_ptr + tl.program_id(0)) * size
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    tl.store(k_ptr + target + at, tl.load(k_ptr + source + at, mask=mask), mask=mask)
    tl.store(v_ptr + target + at, tl.load(v_ptr + source + at, mask=mask), mask=mask)


def copy_blocks(kv: LayerKV, source: Tensor, target: Tensor) -> None:
    size = kv.k[0].numel()
    _copy_kernel[(len(source), triton.cdiv(size, 1024))](
        kv.k, kv.v, source.contiguous(), target.contiguous(), size, BLOCK=1024
    )
