"""Biases and penalties: changes to the logits of a few tokens of each row, in place on float32 [S, V].

One thread block goes over the tokens of a sequence. A bit for each token of the vocabulary tells
whether it was met before, so a penalty that applies once is applied by whoever sets the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import SamplingTensors
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait


@triton.jit(do_not_specialize=["count"])
def _bias_kernel(
    logits_ptr, rows_ptr, tokens_ptr, values_ptr, count, row_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Compute logits[rows, tokens] += values. Values of 0 are skipped."""
    if PDL:
        pdl_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values_ptr + at, mask=at < count, other=0.0)
    there = value != 0.0
    row = tl.load(rows_ptr + at, mask=there, other=0).to(tl.int64)
    token = tl.load(tokens_ptr + at, mask=there, other=0)
    tl.atomic_add(logits_ptr + row * row_stride + token, value, mask=there, sem="relaxed")


@triton.jit
def _is_first(bits_ptr, token, there):
    """Sets the bits of tokens. Returns True for each token whose bit was not set before."""
    bit = (tl.full((), 1, tl.int32) << (token & 31)).to(tl.int32)
    before = tl.atomic_or(bits_ptr + token // 32, bit, mask=there, sem="relaxed")
    return there & ((before & bit) == 0)


@triton.jit
def _penalties_kernel(
    logits_ptr, history_ptr, rows_ptr, lens_ptr, prompt_lens_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    bits_ptr, vocab, row_stride, history_stride, words, BLOCK: tl.constexpr, INDEXED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Changes one row. A barrier stands between changes of one token by different threads."""
    if PDL:
        pdl_wait()
    i = tl.program_id(0)
    row = i
    if INDEXED:
        row = tl.load(rows_ptr + i).to(tl.int32)
    repetition = tl.load(repetition_ptr + row)
    presence, frequency = tl.load(presence_ptr + row), tl.load(frequency_ptr + row)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        row_ptr = logits_ptr + i.to(tl.int64) * row_stride
        history = history_ptr + row.to(tl.int64) * history_stride
        bits = bits_ptr + i.to(tl.int64) * 2 * words
        start, end = tl.load(prompt_lens_ptr + row).to(tl.int32), tl.load(lens_ptr + i).to(tl.int32)
        for first in range(0, 2 * words, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(bits + at, tl.zeros((BLOCK,), tl.int32), mask=at < 2 * words)
        tl.debug_barrier()
        if repetition != 1.0:
            for first in range(0, end, BLOCK):
                at = first + tl.arange(0, BLOCK)
                token = tl.load(history + at, mask=at < end, other=-1)
                there = _is_first(bits, token, (token >= 0) & (token < vocab))
                x = tl.load(row_ptr + token, mask=there, other=0.0)
                tl.store(
                    row_ptr + token, tl.where(x > 0, x / repetition, x * repetition), mask=there
                )
            tl.debug_barrier()
        # additions in memory: what a thread block has in its own cache is older
        if frequency != 0.0:
            for first in range(start, end, BLOCK):
                at = first + tl.arange(0, BLOCK)
                token = tl.load(history + at, mask=at < end, other=-1)
                added = tl.zeros((BLOCK,), tl.float32) - frequency
                there = (token >= 0) & (token < vocab)
                tl.atomic_add(row_ptr + token, added, mask=there, sem="relaxed")
        tl.debug_barrier()
        if presence != 0.0:
            for first in range(start, end, BLOCK):
                at = first + tl.arange(0, BLOCK)
                token = tl.load(history + at, mask=at < end, other=-1)
                there = _is_first(bits + words, token, (token >= 0) & (token < vocab))
                added = tl.zeros((BLOCK,), tl.float32) - presence
                tl.atomic_add(row_ptr + token, added, mask=there, sem="relaxed")


def change_logits(logits: Tensor, params: SamplingTensors, *, block: int = 1024) -> None:
    """Applies allowed tokens, biases and penalties to float32 [S, V], as
    `reference.apply_bias_and_penalties`."""
    num_rows, vocab = logits.shape
    if not num_rows:
        return
    if params.limited_rows is not None:
        at = params.allowed_rows, params.allowed_tokens
        kept = logits[at]
        logits.index_fill_(0, params.limited_rows, float("-inf")).index_put_(at, kept)
    options = pdl_options(logits)
    if params.bias_rows is not None:
        count = len(params.bias_rows)
        _bias_kernel[(triton.cdiv(count, 256),)](
            logits, params.bias_rows, params.bias_tokens, params.bias_values, count, logits.stride(0),
            BLOCK=256, num_warps=4, **options,
        )  # fmt: skip
    if params.history is not None:
        words = -(-vocab // 32)
        bits = torch.empty(num_rows, 2 * words, dtype=torch.int32, device=logits.device)
        indexed, history = params.rows is not None, params.history
        _penalties_kernel[(num_rows,)](
            logits, history, params.rows if indexed else bits, params.history_lens, params.prompt_lens,
            params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
            bits, vocab, logits.stride(0), history.stride(0), words,
            BLOCK=block, INDEXED=indexed, num_warps=8, **options,
        )  # fmt: skip
