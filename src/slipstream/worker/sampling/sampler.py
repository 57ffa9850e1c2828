"""Prepares the inputs of `ops.sample` from the rows' parameters, and checks drafts by its output.

Only parameters that some row uses are gathered. A step of greedy rows needs none. A table without a
device yields NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.kernels.metadata import SamplingTensors
from slipstream.types import FROM_MODEL, ScheduledRequest
from slipstream.worker.input_batch import SampledRows
from slipstream.worker.rows import Row, RowTable, Want

if TYPE_CHECKING:
    from torch import Tensor

FORBIDDEN = -1e30
"""Added to the logit of a forbidden token.

It is finite, so a token can be drawn even if all are forbidden.
"""

PROMPT_LOGPROB_ROWS = 256
"""Positions whose logits are computed at once for prompt log-probabilities."""


def sampling_tensors(table: RowTable, sampled: SampledRows) -> SamplingTensors:
    """Sampling parameters of the N tokens of `sampled`, in its order.

    They are already on the device, except biases and lists of allowed tokens, which are uploaded in
    each step.
    """
    names = sampled.names
    bias, limits = biases_of(table, sampled, names), limits_of(table, sampled, names)
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
    temperature, top_p, min_p, repetition, presence, frequency = table.columns(
        table.sampling_floats, sampled.rows
    )
    top_k, prompt_lens, seeds = table.columns(table.sampling_ints, sampled.rows)
    bias_rows, bias_tokens, bias_values = bias or (None, None, None)
    limited_rows, allowed_rows, allowed_tokens = limits or (None, None, None)
    history = None
    if penalised:
        longest = max(s.num_computed_tokens + s.num_tokens for s in sampled.requests)
        history = table.history(sampled.rows, longest)
    return SamplingTensors(
        temperature=temperature,
        top_k=_int32(top_k),
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        history_lens=_int32(sampled.positions),  # a position is the number of tokens before it
        prompt_lens=_int32(prompt_lens) if penalised else None,
        history=history,
        repetition_penalty=repetition if penalised else None,
        presence_penalty=presence if penalised else None,
        frequency_penalty=frequency if penalised else None,
        bias_rows=bias_rows,
        bias_tokens=bias_tokens,
        bias_values=bias_values,
        limited_rows=limited_rows,
        allowed_rows=allowed_rows,
        allowed_tokens=allowed_tokens,
        all_greedy=not draws,
        any_top_k=table.wanted("top_k", names),
        any_top_p=table.wanted("top_p", names),
        any_min_p=table.wanted("min_p", names),
    )


def _int32(x: Any) -> Any:
    return x.astype(np.int32) if isinstance(x, np.ndarray) else x.int()


def positions_of(
    table: RowTable, sampled: SampledRows, want: Want, names: Sequence[str]
) -> Iterator[tuple[int, Row, int]]:
    """Yield (index of N, row, number of preceding tokens) of the tokens of requests with `want`."""
    if not table.wanted(want, names):
        return
    wanting, i = table.wanting[want], 0
    for s in sampled.requests:
        if s.request_id in wanting:
            end = s.num_computed_tokens + s.num_tokens
            for j in range(s.num_sampled):
                yield i + j, table.rows[s.request_id], end - s.num_sampled + 1 + j
        i += s.num_sampled


def limits_of(
    table: RowTable, sampled: SampledRows, names: Sequence[str]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Lists of allowed tokens; None if there are none.

    Returns the indices of limited tokens of `sampled`, and for each allowed token the index it
    belongs to and its id.
    """
    limited = [
        (i, row.allowed)
        for i, row, _ in positions_of(table, sampled, "allowed", names)
        if row.allowed is not None
    ]
    if not limited:
        return None
    which, allowed = np.array([i for i, _ in limited], np.int64), [tokens for _, tokens in limited]
    of_each = which.repeat([len(tokens) for tokens in allowed])
    return table.upload(which), table.upload(of_each), table.upload(np.concatenate(allowed))


def biases_of(
    table: RowTable, sampled: SampledRows, names: Sequence[str]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Changes to logits as (row, token, value) arrays; None if there are none.

    1. Logit biases.
    2. FORBIDDEN on end tokens before `min_tokens`.
    3. FORBIDDEN on tokens that a speech model does not write there.
    4. FORBIDDEN on the last tokens of bad words. Only the device knows whether a bad word's earlier
       tokens precede; where they do not, the value is 0.
    """
    entries: list[tuple[int, int, float]] = []
    # bad words of several tokens that the answer may have begun
    begun: list[tuple[int, int, tuple[int, ...]]] = []
    for i, row, end in positions_of(table, sampled, "bias", names):
        sampling, num_answered = row.sampling, end - row.num_prompt_tokens
        entries.extend((i, token, value) for token, value in sampling.logit_bias.items())
        if row.forbidden_early and num_answered < sampling.min_tokens:
            entries.extend((i, token, FORBIDDEN) for token in row.forbidden_early)
        if sampling.speech is not None:
            forbidden = sampling.speech.forbidden(num_answered)
            entries.extend((i, token, FORBIDDEN) for token in forbidden)
        for word in sampling.bad_words_token_ids:
            if len(word) == 1:
                entries.append((i, word[0], FORBIDDEN))
            elif num_answered >= len(word) - 1:
                begun.append((i, row.index * table.tokens.shape[1] + end, word))
    entries.extend((i, word[-1], 0.0) for i, _, word in begun)
    if not entries:
        return None
    where, tokens, values = zip(*entries, strict=True)
    biases = table.upload(np.array(values, np.float32))
    if begun:
        longest = max(len(word) for *_, word in begun) - 1
        # tokens (−1: any), and their places in the table
        wanted = np.full((2, len(begun), longest), -1, np.int32)
        wanted[1] = 0
        for n, (_, end, word) in enumerate(begun):
            size = len(word) - 1
            wanted[0, n, :size], wanted[1, n, :size] = word[:-1], np.arange(end - size, end)
        earlier, places = table.upload(wanted)
        found = table.tokens.reshape(-1)[places] == earlier
        biases[-len(begun) :] = (found | (earlier < 0)).all(1) * FORBIDDEN
    return table.upload(np.array(where, np.int64)), table.upload(np.array(tokens, np.int64)), biases


def verified(
    requests: Sequence[ScheduledRequest], tokens: Sequence[int], from_model: Sequence[int] = ()
) -> tuple[list[int], tuple[int, ...]]:
    """Compare sampled tokens with drafts. Returns (tokens that count, number of them per request).

    `tokens` are sampled at all positions of `requests`. Each request gets its drafts up to the
    first that was not sampled, and the token sampled there. `from_model` are the drafts that the
    plan left to the draft model.

    This is rejection sampling (Leviathan et al. 2023) of drafts proposed with probability 1. That
    accepts a draft d with probability p(d), and otherwise draws a token from p without d. Drawing
    one token from p and comparing it with d is the same. So a seed gives the same answer with and
    without drafts.
    """
    kept: list[int] = []
    counts = []
    begin = 0
    proposed = iter(from_model)
    for s in requests:
        # the other drafts are forced tokens
        guessed = s.drafts[max(0, len(s.drafts) + 1 - s.num_sampled) :]
        drafts = [next(proposed) if draft == FROM_MODEL else draft for draft in guessed]
        end = begin + s.num_sampled
        last = end - 1 - len(drafts)  # the position before the first draft
        pairs = zip(drafts, tokens[last:end], strict=False)
        last += next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
        kept += tokens[begin : last + 1]
        counts.append(last + 1 - begin)
        begin = end
    return kept, tuple(counts)


def prompt_positions(row: Row, s: ScheduledRequest) -> int:
    """Number of this step's positions that precede a *prompt* token."""
    return max(
        0,
        min(s.num_computed_tokens + s.num_tokens, row.num_prompt_tokens - 1)
        - s.num_computed_tokens,
    )
