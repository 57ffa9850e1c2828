"""Mamba-1's recurrence (`OpSet.selective_scan`): parallel over channels, an associative scan over a few tokens at a time."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.states import LayerState, MambaParams
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.kernels.triton.recurrent.conv import states_of
from slipstream.kernels.triton.recurrent.tokens import softplus


@triton.jit
def _then(kept, added, kept_next, added_next):
    return kept * kept_next, added * kept_next + added_next


@triton.jit
def _scan_kernel(
    x_ptr, dt_ptr, b_ptr, c_ptr, z_ptr, states_ptr, decay_ptr, time_ptr, skip_ptr, out_ptr, starts_ptr, read_ptr, write_ptr,
    x_stride, dt_stride, b_stride, c_stride, z_stride,
    C: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scan BLOCK channels of a sequence, TOKENS tokens at a time, in each thread block."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ks, tokens = tl.arange(0, BLOCK_K), tl.arange(0, TOKENS)
    mask = channel < C
    both = mask[:, None] & (ks < K)[None, :]
    place = channel[:, None] * K + ks[None, :]
    rate = -tl.exp(tl.load(decay_ptr + place, mask=both, other=0.0))
    time = tl.load(time_ptr + channel, mask=mask, other=0.0)
    skip = tl.load(skip_ptr + channel, mask=mask, other=0.0)
    if PDL:
        pdl_wait()
    seq = tl.program_id(1)
    begin, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    slot = tl.load(read_ptr + seq).to(tl.int64)
    now = tl.load(states_ptr + slot * (C * K) + place, mask=both & (slot > 0), other=0.0)
    for first in range(begin, end, TOKENS):
        row = (first + tokens).to(tl.int64)[:, None]
        live = row < end
        cells, keys = live & mask[None, :], live & (ks < K)[None, :]
        x = tl.load(x_ptr + row * x_stride + channel[None, :], mask=cells, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + row * dt_stride + channel[None, :], mask=cells, other=0.0)
        dt = tl.where(cells, softplus(dt.to(tl.float32) + time[None, :]), 0.0)
        b = tl.load(b_ptr + row * b_stride + ks[None, :], mask=keys, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + row * c_stride + ks[None, :], mask=keys, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + row * z_stride + channel[None, :], mask=cells, other=0.0).to(tl.float32)
        kept = tl.exp(rate[None, :, :] * dt[:, :, None])
        added = (dt * x)[:, :, None] * b[:, None, :]
        kept, added = tl.associative_scan((kept, added), 0, _then)
        states = kept * now[None, :, :] + added
        y = tl.sum(states * c[:, None, :], 2) + skip[None, :] * x
        tl.store(out_ptr + row * C + channel[None, :], y * z * tl.sigmoid(z), mask=cells)
        now = tl.sum(tl.where((tokens == TOKENS - 1)[:, None, None], states, 0.0), 0)
        for i in range(tl.minimum(TOKENS, end - first)):
            to = tl.load(write_ptr + first + i).to(tl.int64)
            if to > 0:
                kept_state = tl.sum(tl.where((tokens == i)[:, None, None], states, 0.0), 0)
                tl.store(states_ptr + to * (C * K) + place, kept_state, mask=both)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    xz: Tensor,
    state: LayerState,
    meta: AttentionMetadata,
    params: MambaParams,
    *,
    invariant: bool = False,
) -> Tensor:
    """`OpSet.selective_scan`. `invariant` (`deterministic`): prompts, too, are scanned token by token."""
    s, states = params.spec, states_of(meta)
    assert state.recurrent is not None
    z, out = xz[:, s.width :], x.new_empty(x.shape)
    tokens, block = (1, 64) if invariant or meta.max_query_len == 1 else (16, 16)
    _scan_kernel[(triton.cdiv(s.width, block), len(states.read))](
        x, dt, b, c, z, state.recurrent, params.decay, params.time, params.skip, out, meta.query_start_loc, states.read,
        states.write, x.stride(0), dt.stride(0), b.stride(0), c.stride(0), z.stride(0),
        C=s.width, K=s.key_dim, BLOCK=block, BLOCK_K=triton.next_power_of_2(s.key_dim), TOKENS=tokens, num_warps=4,
        **pdl_options(x),
    )  # fmt: skip
    return out
