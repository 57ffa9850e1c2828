"""Prepares the inputs of `ops.sample` from the rows' parameters.

Only parameters used by some row are gathered. A step of greedy rows needs none. A table without a
device yields NumPy arrays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.kernels.metadata import SamplingTensors
from slipstream.worker.inputs.input_batch import SampledRows
from slipstream.worker.inputs.rows import RowTable
from slipstream.worker.sampling.biases import Biases, biases_of, limits_of

if TYPE_CHECKING:
    from torch import Tensor


def sampling_tensors(table: RowTable, sampled: SampledRows) -> SamplingTensors:
    """Sampling parameters of the N tokens of `sampled`, in its order.

    They are already on the device, except biases and lists of allowed tokens, which are uploaded in each step.
    """
    names = sampled.names
    bias = biases_of(table, sampled, names) if table.wanting["bias"] else None
    limits = limits_of(table, sampled, names) if table.wanting["allowed"] else None
    penalised, draws = table.wanted("penalties", names), table.wanted("draw", names)
    if not draws and not penalised and bias is None and limits is None:
        empty = table.nothing
        return SamplingTensors(
            temperature=empty,
            top_k=empty,
            top_p=empty,
            min_p=empty,
            seeds=empty,
            history_lens=empty,
            all_greedy=True,
        )
    longest = 0
    if penalised:
        longest = max(s.num_computed_tokens + s.num_tokens for s in sampled.requests)
    made = tensors_of_rows(table, sampled.rows, sampled.positions, bias, longest)
    limited_rows, allowed_rows, allowed_tokens = limits or (None, None, None)
    return replace(
        made,
        limited_rows=limited_rows,
        allowed_rows=allowed_rows,
        allowed_tokens=allowed_tokens,
        all_greedy=not draws,
        any_top_k=table.wanted("top_k", names),
        any_top_p=table.wanted("top_p", names),
        any_min_p=table.wanted("min_p", names),
    )


def tensors_of_rows(
    table: RowTable, rows: Tensor, positions: Tensor, bias: Biases | None, longest: int
) -> SamplingTensors:
    """Parameters of tokens at `positions` of `rows`, each [N], of any requests.

    `longest`: maximum number of tokens that penalties count; 0: no penalties.
    """
    if table.ops.takes_rows:
        floats, ints = table.sampling_floats, table.sampling_ints
        own: Tensor | None = rows
        history: Tensor | None = table.tokens
        lens = positions
    else:
        floats, ints = (
            table.columns(t, rows) for t in (table.sampling_floats, table.sampling_ints)
        )
        history = table.of_rows(table.tokens[:, :longest], rows) if longest else None
        own = None
        lens = _int32(positions)  # a position is the number of tokens before it
    temperature, top_p, min_p, repetition, presence, frequency = floats
    top_k, prompt_lens, seeds = ints
    penalised = longest > 0
    return SamplingTensors(
        temperature=temperature,
        top_k=top_k if own is not None else _int32(top_k),
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        history_lens=lens,
        rows=own,
        prompt_lens=(prompt_lens if own is not None else _int32(prompt_lens))
        if penalised
        else None,
        history=history if penalised else None,
        repetition_penalty=repetition if penalised else None,
        presence_penalty=presence if penalised else None,
        frequency_penalty=frequency if penalised else None,
        bias_rows=None if bias is None else bias.rows,
        bias_tokens=None if bias is None else bias.tokens,
        bias_values=None if bias is None else bias.values,
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
    )


def _int32(x: Any) -> Any:
    return x.astype(np.int32) if isinstance(x, np.ndarray) else x.int()
