"""`OpSet.gated_delta` and `OpSet.mamba2`: which kernels a step takes."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.states import (
    CHUNK,
    SHORT,
    ConvParams,
    GatedDeltaParams,
    LayerState,
    Mamba2Params,
)
from slipstream.kernels.triton.pdl import pdl_options
from slipstream.kernels.triton.recurrent import conv
from slipstream.kernels.triton.recurrent.chunks import (
    finish_kernel,
    pass_kernel,
    prepare_channels_kernel,
    prepare_kernel,
)
from slipstream.kernels.triton.recurrent.conv import has_one_each
from slipstream.kernels.triton.recurrent.tokens import tokens_kernel
from slipstream.platform import platform_of

ANY_LENGTH = 1 << 30
VALUES = 32
"""Columns of a state that one thread block carries from chunk to chunk."""
PER_WARP = 4096
"""Elements of a head's state per warp, where a thread block holds the whole state."""
SPARE_BYTES = 4096
"""Shared memory of `pass_kernel` for other things than rows and states."""
FINISHED = 4096
"""Number of elements that a thread block norms."""


def gated_delta(
    x: Tensor,
    gates: Tensor,
    state: LayerState,
    meta: AttentionMetadata,
    params: GatedDeltaParams,
    decay: Tensor | None = None,
    z: Tensor | None = None,
    *,
    invariant: bool = False,
) -> Tensor:
    """`OpSet.gated_delta`. `invariant` (`deterministic`): prompts, too, are computed token by token, by
    one variant of a kernel."""
    s = params.spec
    sizes = dict(
        H=s.num_heads, R=s.num_heads // s.num_key_heads, K=s.key_dim, V=s.value_dim, Q_AT=0, K_AT=s.q_size,
        V_AT=2 * s.q_size, DELTA=True,
    )  # fmt: skip
    raw = gates[:, s.num_heads :] if decay is None else decay
    z = x[:, s.conv_channels :] if z is None else z
    stages = 0 if invariant else _stages(meta, x, s.key_dim, s.value_dim, True)
    out = _tokens(
        x, gates, raw, z, state, meta, params, params.conv, params.norm, sizes, finish=not stages, invariant=invariant,
        low=0.0, high=float("inf"), eps=s.eps, scale=s.key_dim**-0.5, CHANNEL=s.decay == "channel",
        TWICE=s.negative_eigenvalues, BOUND=s.bound or 0.0, SIGMOID=s.gate == "sigmoid",
        SHORT=SHORT if stages else ANY_LENGTH,
    )  # fmt: skip
    if stages:
        mixed = x.new_empty(len(x), s.conv_channels)
        conv.conv_chunks(
            x, state, meta, params.conv, mixed, size=s.key_dim, num_queries=s.num_key_heads, scale=s.key_dim**-0.5
        )  # fmt: skip
        _chunks(
            mixed, gates, raw, state, meta, params, sizes, out,
            low=0.0, high=float("inf"), stages=stages, TWICE=s.negative_eigenvalues, BOUND=s.bound or 0.0,
        )  # fmt: skip
        _finish(
            out, z, params.norm, s.eps, s.num_heads, FINISHED, SHARED=True, FIRST=False, SIGMOID=s.gate == "sigmoid"
        )  # fmt: skip
    return out


def mamba2(
    x: Tensor,
    state: LayerState,
    meta: AttentionMetadata,
    params: Mamba2Params,
    *,
    invariant: bool = False,
) -> Tensor:
    """`OpSet.mamba2`. `invariant`: see `gated_delta`; a norm's tile has one row."""
    s = params.spec
    z, rows, raw = x, x[:, s.v_size :], x[:, s.time_at :]
    size = s.num_groups * s.key_dim
    sizes = dict(
        H=s.num_heads, R=s.num_heads // s.num_groups, K=s.key_dim, V=s.value_dim, Q_AT=s.v_size + size, K_AT=s.v_size,
        V_AT=0, DELTA=False,
    )  # fmt: skip
    low, high = s.time_limit
    stages = 0 if invariant else _stages(meta, x, s.key_dim, s.value_dim, False)
    in_one = not stages and s.norm is None and params.gated
    out = _tokens(
        rows, raw, raw, z, state, meta, params, params.conv, params.skip, sizes, finish=in_one, invariant=invariant,
        low=low, high=high, eps=s.eps, scale=1.0, CHANNEL=False, TWICE=False, BOUND=0.0, SIGMOID=s.gate == "sigmoid",
        SHORT=SHORT if stages else ANY_LENGTH,
    )  # fmt: skip
    if stages:
        mixed = x.new_empty(len(x), s.conv_channels)
        conv.conv_chunks(rows, state, meta, params.conv, mixed)
        _chunks(
            mixed, raw, raw, state, meta, params, sizes, out, low=low, high=high, stages=stages, TWICE=False,
            BOUND=0.0,
        )  # fmt: skip
    if not in_one and params.gated:
        groups = s.num_heads if s.norm is None else s.norm_groups
        _finish(
            out, z, params.norm, s.eps, groups, 1 if invariant else FINISHED, SHARED=False,
            FIRST=s.norm == "gate_first", SIGMOID=s.gate == "sigmoid",
        )  # fmt: skip
    return out


def _tokens(
    x: Tensor,
    beta: Tensor,
    raw: Tensor,
    z: Tensor,
    state: LayerState,
    meta: AttentionMetadata,
    params: GatedDeltaParams | Mamba2Params,
    conv: ConvParams,
    norm: Tensor,
    sizes: dict[str, Any],
    *,
    finish: bool,
    invariant: bool = False,
    low: float,
    high: float,
    eps: float,
    scale: float,
    **options: Any,
) -> Tensor:
    """Computes the short sequences → [T, H · V], with room for the others. `invariant`: steps of one
    token each have no variant of their own."""
    assert meta.states is not None
    assert state.recurrent is not None
    heads, ratio, key_dim, value_dim = (sizes[name] for name in "HRKV")
    num_seqs, (channels, width) = len(meta.states.read), conv.weight.shape
    out = x.new_empty(len(x), heads * value_dim)
    arrived = meta.once(
        ("arrived", num_seqs * (heads // ratio)),
        lambda: torch.zeros(num_seqs * (heads // ratio), dtype=torch.int32, device=x.device),
    )
    skip = params.skip if isinstance(params, Mamba2Params) else params.decay
    block_k, block_v = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    tokens_kernel[(heads, num_seqs)](
        x, state.conv, conv.weight, conv.weight if conv.bias is None else conv.bias, state.recurrent, beta, raw, z,
        params.decay, params.time, skip, norm, out, meta.query_start_loc, meta.states.read, meta.states.write, arrived,
        x.stride(0), beta.stride(0), raw.stride(0), z.stride(0), low, high, eps, scale,
        C=channels, W=width, HAS_BIAS=conv.bias is not None, FINISH=finish, BLOCK_K=block_k, BLOCK_V=block_v,
        ONE=not invariant and has_one_each(meta, len(x)), num_warps=min(16, max(4, block_k * block_v // PER_WARP)), **sizes,
        **options, **pdl_options(x),
    )  # fmt: skip
    return out


def _chunks(
    mixed: Tensor,
    beta: Tensor,
    raw: Tensor,
    state: LayerState,
    meta: AttentionMetadata,
    params: GatedDeltaParams | Mamba2Params,
    sizes: dict[str, Any],
    out: Tensor,
    *,
    low: float,
    high: float,
    stages: int,
    **options: Any,
) -> None:
    """Computes the long sequences, from their convolved rows, into `out`."""
    assert meta.states is not None
    assert state.recurrent is not None
    (num_tokens, channels), states = mixed.shape, meta.states
    heads, ratio, key_dim, value_dim = (sizes[name] for name in "HRKV")
    is_delta, by_channel = sizes["DELTA"], params.time.numel() > heads
    skip = params.skip if isinstance(params, Mamba2Params) else params.decay
    q, k, v = (mixed[:, sizes[f"{name}_AT"] :] for name in "QKV")
    logs = torch.empty(num_tokens, params.time.numel(), dtype=torch.float32, device=mixed.device)
    p = mixed.new_empty(num_tokens, heads, CHUNK)
    u, w = (
        (mixed.new_empty(num_tokens, heads, n) for n in (value_dim, key_dim))
        if is_delta
        else (p, p)
    )
    given = (mixed, beta, raw, params.decay, params.time, logs, p, u, w)
    block_v, exact = max(16, triton.next_power_of_2(value_dim)), mixed.dtype == torch.float32
    shared = dict(
        H=heads, K=key_dim, V=value_dim, SHORT=SHORT, LEVELS=CHUNK.bit_length() - 1,
        BLOCK_K=max(16, triton.next_power_of_2(key_dim)), EXACT=exact, **pdl_options(mixed),
    )  # fmt: skip
    places = {name: sizes[name] for name in ("R", "Q_AT", "K_AT", "V_AT")}
    prepared = dict(C=channels, BLOCK_V=block_v, num_stages=1, **places, **options)
    tables = (meta.query_start_loc, states.chunks)
    if by_channel:
        q, k = (mixed.new_empty(num_tokens, heads * key_dim) for _ in range(2))
        prepare_channels_kernel[(heads, len(states.chunks))](
            *given, q, k, *tables, beta.stride(0), raw.stride(0), num_warps=8, **prepared, **shared
        )
    else:
        prepare_kernel[(heads, len(states.chunks))](
            *given, *tables, beta.stride(0), raw.stride(0), low, high, DELTA=is_delta, num_warps=4, **prepared, **shared
        )  # fmt: skip
    block_v = min(block_v, VALUES)
    pass_kernel[(triton.cdiv(value_dim, block_v), heads, len(states.read))](
        q, k, v, raw, params.decay, params.time, skip, logs, p, u, w, state.recurrent, out, meta.query_start_loc, states.read,
        states.write, states.chunks, len(states.chunks), q.stride(0), v.stride(0), raw.stride(0), low, high,
        R=1 if by_channel else ratio, DELTA=is_delta, CHANNEL=by_channel, BLOCK_V=block_v,
        STAGES=stages, num_warps=4, **shared,
    )  # fmt: skip


def _stages(
    meta: AttentionMetadata, like: Tensor, key_dim: int, value_dim: int, is_delta: bool
) -> int:
    """How many chunks' rows `pass_kernel` has in shared memory. 0: all sequences are computed token by token, since they are
    short, or too few chunks fit.

    Triton 3.6 makes code for Hopper in 16 bits, with one stage or with heads of fewer than 16 numbers, that reads outside of
    memory (compute-sanitizer).
    """
    if not conv.has_long(meta) or like.dtype == torch.float32:
        return int(conv.has_long(meta))
    platform, size = platform_of(like.device), like.element_size()
    if min(key_dim, value_dim) < 16 and platform.arch.wgmma:
        return 0
    each = CHUNK * (key_dim * (3 if is_delta else 2) + CHUNK + VALUES) * size
    room = platform.shared_bytes - (key_dim + CHUNK) * VALUES * size - SPARE_BYTES
    stages = max(1, min(3 if is_delta else 2, room // each))
    return 0 if stages == 1 and platform.arch.wgmma else stages


def _finish(
    out: Tensor, z: Tensor, norm: Tensor | None, eps: float, groups: int, most: int, **options: bool
) -> None:
    """Norms the `groups` of each row and multiplies them by their gate, in place. `most`: numbers of a
    thread block of several rows."""
    num_tokens, size = len(out), out.shape[1] // groups
    block = triton.next_power_of_2(size)
    rows = max(1, min(most // block, triton.next_power_of_2(num_tokens)))
    if num_tokens:
        finish_kernel[(triton.cdiv(num_tokens, rows), groups)](
            out, z, out if norm is None else norm, z.stride(0), num_tokens, eps, N=size, HAS_NORM=norm is not None,
            ROWS=rows, BLOCK=block, num_warps=min(16, max(4, block // 1024)), **options, **pdl_options(out),
        )  # fmt: skip
