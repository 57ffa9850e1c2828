"""Additions to logits, and lists of allowed tokens, for requests that have some.

Bad words, and end tokens that are not allowed yet, are such additions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from slipstream.worker.inputs.input_batch import SampledRows
from slipstream.worker.inputs.rows import Row, RowTable, Want

if TYPE_CHECKING:
    from torch import Tensor


FORBIDDEN = -1e30
"""Added to the logit of a forbidden token.

It is finite, so that a token can be sampled even if all are forbidden.
"""


class Biases(NamedTuple):
    """Additions to logits: logits[rows, tokens] += values."""

    rows: Tensor  # int64 [N]
    tokens: Tensor  # int64 [N]
    values: Tensor  # float32 [N]


def positions_of(
    table: RowTable, sampled: SampledRows, want: Want, names: Sequence[str]
) -> Iterator[tuple[int, Row, int]]:
    """Yield (index of N, row, number of preceding tokens) for the tokens of requests with the option `want`."""
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

    Returns (indices in `sampled` that are limited; for each allowed token, its index in `sampled`; its id).
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


def biases_of(table: RowTable, sampled: SampledRows, names: Sequence[str]) -> Biases | None:
    """Changes to logits; None if there are none.

    1. Logit biases.
    2. FORBIDDEN on end tokens before `min_tokens`.
    3. FORBIDDEN on tokens that a speech model does not write there.
    4. FORBIDDEN on the last tokens of bad words. Only the device knows whether a bad word's earlier
       tokens precede; where they do not, the value is 0.
    """
    entries: list[tuple[int, int, float]] = []
    # bad words of several tokens whose beginning the answer may have
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
        # tokens (−1: any), and their positions in the table
        wanted = np.full((2, len(begun), longest), -1, np.int32)
        wanted[1] = 0
        for n, (_, end, word) in enumerate(begun):
            size = len(word) - 1
            wanted[0, n, :size], wanted[1, n, :size] = word[:-1], np.arange(end - size, end)
        earlier, places = table.upload(wanted)
        found = table.tokens.reshape(-1)[places] == earlier
        biases[-len(begun) :] = (found | (earlier < 0)).all(1) * FORBIDDEN
    rows, ids = (table.upload(np.array(x, np.int64)) for x in (where, tokens))
    return Biases(rows, ids, biases)
