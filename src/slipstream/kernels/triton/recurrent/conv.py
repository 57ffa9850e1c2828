"""Causal convolutions over each channel, and their states. `OpSet.short_conv` and `OpSet.causal_conv`.

A program may write the state that another one of the same sequence reads. So a step's states are written after all of
them are read: by the same program, by the last program of a group to arrive, or by another kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.states import CHUNK, SHORT, ConvParams, LayerState, StateMetadata
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait

L2_EPS = tl.constexpr(1e-6)


@triton.jit
def input_at(
    x_ptr, conv_ptr, row, begin, slot, channel, mask, stride, C: tl.constexpr, W: tl.constexpr, GATED: tl.constexpr,
    HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Loads a token's inputs of the convolution: those of row `row`, or from the state in `slot` if the row is before
    the sequence's first token of the step, `begin`. GATED: they are products of x's first and third C columns."""
    at = x_ptr + row.to(tl.int64) * stride + channel
    given = mask & (row >= begin) if HAS_STATE else mask
    x = tl.load(at, mask=given, other=0.0)
    if GATED:
        third = tl.load(at + 2 * C, mask=given, other=0.0)
        x = (x.to(tl.float32) * third.to(tl.float32)).to(x_ptr.dtype.element_ty)
    if not HAS_STATE:
        return x
    before = (slot * (W - 1) + (row - begin + W - 1)) * C + channel
    old = tl.load(conv_ptr + before, mask=mask & (row < begin) & (slot > 0), other=0.0)
    return tl.where(row >= begin, x, old.to(x.dtype))


@triton.jit
def convolve(
    x_ptr, conv_ptr, weight_ptr, bias_ptr, row, begin, slot, channel, mask, stride,
    C: tl.constexpr, W: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr, BY_TAP: tl.constexpr,
):  # fmt: skip
    """Convolves for token `row`, or for a column of tokens; float32. HAS_STATE: some of the inputs
    may lie in the state. BY_TAP: the weights are [W, C]."""
    given = channel < C
    y = tl.load(bias_ptr + channel, mask=given, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    for i in tl.static_range(W):
        x = input_at(
            x_ptr, conv_ptr, row - (W - 1) + i, begin, slot, channel, mask, stride, C, W, GATED, HAS_STATE
        )  # fmt: skip
        at = i * C + channel if BY_TAP else channel * W + i
        weight = tl.load(weight_ptr + at, mask=given, other=0.0)
        y += x.to(tl.float32) * weight.to(tl.float32)
    return y * tl.sigmoid(y) if SILU else y


@triton.jit
def keep(
    x_ptr, conv_ptr, row, begin, slot, to, channel, mask, stride, C: tl.constexpr, W: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Writes the state after token `row` to the slot `to`. It may be `slot`: a row is read before it is overwritten."""
    for i in tl.static_range(W - 1):
        x = input_at(
            x_ptr, conv_ptr, row - (W - 2) + i, begin, slot, channel, mask, stride, C, W, GATED, True
        )  # fmt: skip
        tl.store(conv_ptr + (to * (W - 1) + i) * C + channel, x, mask=mask)


@triton.jit
def keep_all(
    x_ptr, conv_ptr, write_ptr, begin, end, slot, to, channel, mask, stride,
    C: tl.constexpr, W: tl.constexpr, GATED: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Writes the states after a sequence's tokens, the one that overwrites the state read last of all. ONE: there is one
    token, after which the state is kept in the slot `to`."""
    if ONE:
        keep(x_ptr, conv_ptr, begin, begin, slot, to, channel, mask & (to > 0), stride, C, W, GATED)
    else:
        for own in tl.static_range(2):
            for i in range(end - begin):
                to = tl.load(write_ptr + begin + i).to(tl.int64)
                if (to > 0) & ((to == slot) == (own == 1)):
                    keep(
                        x_ptr, conv_ptr, begin + i, begin, slot, to, channel, mask, stride, C, W, GATED
                    )  # fmt: skip


@triton.jit
def find_tokens(starts_ptr, read_ptr, write_ptr, seq, ONE: tl.constexpr):
    """Finds a sequence: (first token, end, slot that it reads, slot that keeps the state after its first token). ONE:
    each sequence has one token; then no load waits for another."""
    if ONE:
        begin, end = seq, seq + 1
    else:
        begin, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    slot = tl.load(read_ptr + seq).to(tl.int64)
    to = tl.load(write_ptr + begin, mask=end > begin, other=0).to(tl.int64)
    return begin, end, slot, to


@triton.jit
def _conv_tokens_kernel(
    x_ptr, conv_ptr, weight_ptr, bias_ptr, out_ptr, starts_ptr, read_ptr, write_ptr, stride,
    C: tl.constexpr, W: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, SHORT: tl.constexpr,
    BLOCK: tl.constexpr, ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK channels of a short sequence in each thread block."""
    if PDL:
        pdl_wait()
    begin, end, slot, to = find_tokens(starts_ptr, read_ptr, write_ptr, tl.program_id(1), ONE)
    if end - begin > SHORT:
        return
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < C
    for i in range(1 if ONE else end - begin):
        row = begin + i
        y = convolve(
            x_ptr, conv_ptr, weight_ptr, bias_ptr, row, begin, slot, channel, mask, stride, C, W, GATED, SILU, HAS_BIAS, True,
            False,
        )  # fmt: skip
        if GATED:
            y *= tl.load(x_ptr + row.to(tl.int64) * stride + C + channel, mask=mask, other=0.0).to(
                tl.float32
            )
        tl.store(out_ptr + row.to(tl.int64) * C + channel, y, mask=mask)
    tl.debug_barrier()
    keep_all(
        x_ptr, conv_ptr, write_ptr, begin, end, slot, to, channel, mask, stride, C, W, GATED, ONE
    )  # fmt: skip


@triton.jit
def find_chunk(chunks_ptr, starts_ptr, chunk, SHORT: tl.constexpr):
    """Finds a chunk: (sequence, first token and end of the chunk, first token of the sequence). The chunk is empty if
    the sequence is short."""
    seq = tl.load(chunks_ptr + 3 * chunk)
    first, end = tl.load(chunks_ptr + 3 * chunk + 1), tl.load(chunks_ptr + 3 * chunk + 2)
    begin = tl.load(starts_ptr + seq)
    end = tl.where(tl.load(starts_ptr + seq + 1) - begin > SHORT, end, first)
    return seq, first, end, begin


@triton.jit
def _conv_chunks_kernel(
    x_ptr, conv_ptr, weight_ptr, bias_ptr, out_ptr, starts_ptr, read_ptr, write_ptr, chunks_ptr, stride, scale,
    C: tl.constexpr, W: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, SHORT: tl.constexpr,
    CHUNK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, Q: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convolve SIZE channels of a chunk in each thread block. The first Q of these parts are queries and the next Q
    are keys. Both are L2-normed; queries are also multiplied by `scale`. States that no other program reads, and that
    `_keep_chunks_kernel` cannot write, are written."""
    if PDL:
        pdl_wait()
    part = tl.program_id(0)
    seq, first, end, begin = find_chunk(chunks_ptr, starts_ptr, tl.program_id(1), SHORT)
    if end <= first:
        return
    slot = tl.load(read_ptr + seq).to(tl.int64)
    at = tl.arange(0, BLOCK)
    channel = part * SIZE + at
    given = (at < SIZE) & (channel < C)
    row = (first + tl.arange(0, CHUNK))[:, None]
    mask = (row < end) & given[None, :]
    if first - begin >= W - 1:
        y = convolve(
            x_ptr, conv_ptr, weight_ptr, bias_ptr, row, begin, slot, channel[None, :], mask, stride, C, W, GATED, SILU,
            HAS_BIAS, False, True,
        )  # fmt: skip
    else:
        y = convolve(
            x_ptr, conv_ptr, weight_ptr, bias_ptr, row, begin, slot, channel[None, :], mask, stride, C, W, GATED, SILU,
            HAS_BIAS, True, True,
        )  # fmt: skip
    if GATED:
        gate = x_ptr + row.to(tl.int64) * stride + C + channel[None, :]
        y *= tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    if part < 2 * Q:
        y = tl.where(mask, y, 0.0)
        norm = tl.rsqrt(tl.sum(y * y, 1) + L2_EPS) * tl.where(part < Q, scale, 1.0)
        y *= norm[:, None]
    tl.store(out_ptr + row.to(tl.int64) * C + channel[None, :], y, mask=mask)
    to = tl.load(write_ptr + end - 1).to(tl.int64)
    if (to > 0) & (to != slot) & (end - begin < W - 1):
        keep(x_ptr, conv_ptr, end - 1, begin, slot, to, channel, given, stride, C, W, GATED)


@triton.jit
def _keep_chunks_kernel(
    x_ptr, conv_ptr, starts_ptr, read_ptr, write_ptr, chunks_ptr, stride,
    C: tl.constexpr, W: tl.constexpr, GATED: tl.constexpr, SHORT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes the states after chunks. One that overwrites the state read is made of it by this program alone; the others are
    made of x alone."""
    if PDL:
        pdl_wait()
    seq, first, end, begin = find_chunk(chunks_ptr, starts_ptr, tl.program_id(1), SHORT)
    if end <= first:
        return
    slot, to = tl.load(read_ptr + seq).to(tl.int64), tl.load(write_ptr + end - 1).to(tl.int64)
    if (to > 0) & ((to == slot) | (end - begin >= W - 1)):
        channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        keep(x_ptr, conv_ptr, end - 1, begin, slot, to, channel, channel < C, stride, C, W, GATED)


def states_of(meta: AttentionMetadata) -> StateMetadata:
    assert meta.states is not None
    return meta.states


def has_long(meta: AttentionMetadata) -> bool:
    """Tells whether the step may have sequences that are computed in chunks."""
    return meta.max_query_len > SHORT and len(states_of(meta).chunks) > 0


def has_one_each(meta: AttentionMetadata, num_tokens: int) -> bool:
    """Tells whether each sequence of the step has one token."""
    return meta.max_query_len == 1 and len(states_of(meta).read) == num_tokens


def conv_chunks(
    x: Tensor,
    state: LayerState,
    meta: AttentionMetadata,
    params: ConvParams,
    out: Tensor,
    *,
    gated: bool = False,
    size: int = 128,
    num_queries: int = 0,
    scale: float = 1.0,
) -> None:
    """Convolves the long sequences and keeps their states. `size`: channels of a program."""
    (channels, width), states = params.weight.shape, states_of(meta)
    tables = (meta.query_start_loc, states.read, states.write, states.chunks)
    sizes = dict(C=channels, W=width, GATED=gated, SHORT=SHORT, **pdl_options(x))
    bias = params.weight if params.bias is None else params.bias
    _conv_chunks_kernel[(triton.cdiv(channels, size), len(states.chunks))](
        x, state.conv, params.weight.t().contiguous(), bias, out, *tables, x.stride(0), scale,
        SILU=params.silu, HAS_BIAS=params.bias is not None, CHUNK=CHUNK, SIZE=size, BLOCK=triton.next_power_of_2(size),
        Q=num_queries, num_warps=8, **sizes,
    )  # fmt: skip
    _keep_chunks_kernel[(triton.cdiv(channels, 1024), len(states.chunks))](
        x, state.conv, *tables, x.stride(0), BLOCK=1024, num_warps=4, **sizes
    )


def _conv(
    x: Tensor, state: LayerState, meta: AttentionMetadata, params: ConvParams, *, gated: bool
) -> Tensor:
    (channels, width), states = params.weight.shape, states_of(meta)
    out = x.new_empty(len(x), channels)
    block = min(1024, triton.next_power_of_2(channels))
    _conv_tokens_kernel[(triton.cdiv(channels, block), len(states.read))](
        x, state.conv, params.weight, params.weight if params.bias is None else params.bias, out, meta.query_start_loc,
        states.read, states.write, x.stride(0), C=channels, W=width, GATED=gated, SILU=params.silu,
        HAS_BIAS=params.bias is not None, SHORT=SHORT, BLOCK=block, ONE=has_one_each(meta, len(x)),
        num_warps=4, **pdl_options(x),
    )  # fmt: skip
    if has_long(meta):
        conv_chunks(x, state, meta, params, out, gated=gated)
    return out


def short_conv(x: Tensor, state: LayerState, meta: AttentionMetadata, params: ConvParams) -> Tensor:
    """`OpSet.short_conv`."""
    return _conv(x, state, meta, params, gated=True)


def causal_conv(
    x: Tensor, state: LayerState, meta: AttentionMetadata, params: ConvParams
) -> Tensor:
    """`OpSet.causal_conv`."""
    return _conv(x, state, meta, params, gated=False)
