"""The end of a step on any device: sampling tokens and log-probabilities from logits.

Values are tensors or arrays. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from slipstream.kernels.cpu.sampling.row_draw import Floats
from slipstream.kernels.metadata import SamplingTensors
from slipstream.messages.steps import Extra, TokenMask
from slipstream.worker.inputs.input_batch import SampledRows
from slipstream.worker.inputs.rows import RowTable
from slipstream.worker.sampling.sampler import sampling_tensors
from slipstream.worker.sampling.sampler_chain import draw_chained, places

BestLogprobs: TypeAlias = tuple[list[int], Any, list[int]]
"""(indices of tokens with log-probabilities; on the host the `OpSet.packed_logprobs` of these
tokens, or of all; number of alternatives that each needs)."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Functions with which a runner samples from its kind of values, tensors or arrays."""

    sample: Callable[[Any, SamplingTensors], Any]
    """`OpSet.sample`."""
    mask: Callable[[Any, TokenMask], None]
    """Function that writes −∞ to the logits of forbidden tokens."""
    best_logprobs: Callable[[Any, Any, int], tuple[Any, ...]]
    packed_logprobs: Callable[[Any, Any, int], Any]
    to_host: Callable[[Any], Any]
    """Function that starts a copy to the host and may return before the copy is complete."""
    as_array: Callable[[Any], Floats]
    """Function that converts logits to a float32 array on the host, after waiting for them."""
    on_host: Callable[[Any], Any]
    """Function that copies to the host and waits for the copy."""


@dataclass(slots=True)
class DrawnTokens:
    tokens: Any  # int64 [N], on the runner's device
    logprobs: BestLogprobs | None = None
    extras: list[Extra] = field(default_factory=list)


def draw(
    by: Sampler,
    rows: RowTable,
    sampled: SampledRows,
    logits: Any,
    mask: TokenMask | None,
    params: SamplingTensors | None = None,
) -> DrawnTokens:
    """Sample one token per row of `logits` [N, V], which may be overwritten.

    Log-probabilities are those of the model's own distribution, before the mask and the sampler.
    `params` are the `sampling_tensors`, if already computed.
    """
    params = params or sampling_tensors(rows, sampled)
    which, counts = sampled.wanted_logprobs(rows)
    kept: Any = None
    index: Any = slice(None)
    if which:
        overwrites = mask is not None or params.changes_logits or not params.all_greedy
        if overwrites or len(which) < len(sampled.request_ids):
            index = rows.upload(np.array(which, np.int64))
        kept = logits[index]  # a copy, unless all rows are needed and stay unchanged
    if mask is not None and mask.positions:
        by.mask(logits, mask)
    chained = places(rows, sampled) if rows.wanting["chain"] else []
    at = rows.upload(np.array(chained, np.int64)) if chained else None
    own = None if at is None else logits[at]  # a copy
    drawn = DrawnTokens(by.sample(logits, params))
    if at is not None:
        tokens, drawn.extras = draw_chained(rows, sampled, chained, by.as_array(own))
        drawn.tokens[at] = rows.upload(tokens)
    if kept is not None:
        best = by.packed_logprobs(kept, drawn.tokens[index], max(counts))
        drawn.logprobs = which, by.to_host(best), counts
    return drawn
