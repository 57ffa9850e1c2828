"""Makes the tensors that `ops.sample` reads from the rows' sampling parameters, and log-probabilities from its tokens.

Only what some row asks for is gathered. A step of greedy rows needs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.metadata import SamplingTensors
from slipstream.types import FROM_MODEL, ScheduledRequest, TokenLogprobs
from slipstream.worker.input_batch import Row, RowTable, SampledRows, Want, upload

FORBIDDEN = -1e30
"""Added to the logit of a token that must not be drawn. It is finite: where all tokens are forbidden, one is drawn still."""

PROMPT_LOGPROB_ROWS = 256
"""Positions whose full-vocabulary logits are held at once for prompt log-probabilities."""


def sampling_tensors(table: RowTable, sampled: SampledRows) -> SamplingTensors:
    """The parameters of the N tokens that are sampled, in `sampled`'s order. They are on the device since the rows were made.
    Biases and lists of allowed tokens alone are uploaded each step."""
    names, device = sampled.names, table.device
    bias, limits = _bias(table, sampled, names), _limits(table, sampled, names)
    penalised, draws = table.wanted("penalties", names), table.wanted("draw", names)
    if not draws and not penalised and bias is None and limits is None:
        empty = torch.empty(0, device=device)
        return SamplingTensors(
            temperature=empty, top_k=empty, top_p=empty, min_p=empty, seeds=empty, history_lens=empty, all_greedy=True
        )
    floats, ints = (t.index_select(1, sampled.rows) for t in (table.sampling_floats, table.sampling_ints))
    temperature, top_p, min_p, repetition, presence, frequency = floats.unbind(0)
    top_k, prompt_lens, seeds = ints.unbind(0)
    bias_rows, bias_tokens, bias_values = bias or (None, None, None)
    limited_rows, allowed_rows, allowed_tokens = limits or (None, None, None)
    history = None
    if penalised:
        longest = max(s.num_computed_tokens + s.num_tokens for s in sampled.requests)
        history = table.tokens[:, :longest].index_select(0, sampled.rows)
    return SamplingTensors(
        temperature=temperature,
        top_k=top_k.int(),
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        history_lens=sampled.positions.int(),  # where a token goes, so many stand before it
        prompt_lens=prompt_lens.int() if penalised else None,
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


def _positions(table: RowTable, sampled: SampledRows, want: Want, names: Sequence[str]) -> Iterator[tuple[int, Row, int]]:
    """Of the requests that ask for it: (which of the N tokens, the row, how many tokens stand before it)."""
    if not table.wanted(want, names):
        return
    wanting, i = table.wanting[want], 0
    for s in sampled.requests:
        if s.request_id in wanting:
            end = s.num_computed_tokens + s.num_tokens
            for j in range(s.num_sampled):
                yield i + j, table.rows[s.request_id], end - s.num_sampled + 1 + j
        i += s.num_sampled


def _limits(table: RowTable, sampled: SampledRows, names: Sequence[str]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The rows with allowed tokens, and these: of each row, token."""
    limited = [(i, row.allowed) for i, row, _ in _positions(table, sampled, "allowed", names) if row.allowed is not None]
    if not limited:
        return None
    which, allowed = np.array([i for i, _ in limited], np.int64), [tokens for _, tokens in limited]
    of_each = which.repeat([len(tokens) for tokens in allowed])
    return upload(which, table.device), upload(of_each, table.device), upload(np.concatenate(allowed), table.device)


def _bias(table: RowTable, sampled: SampledRows, names: Sequence[str]) -> tuple[Tensor, Tensor, Tensor] | None:
    """(row, token, value) of every logit bias, and FORBIDDEN on the end tokens of rows that are below min_tokens, and on the
    last tokens of bad words. Whether the earlier tokens of a bad word stand there only the device knows: the value is 0 where
    they don't."""
    entries: list[tuple[int, int, float]] = []
    begun: list[tuple[int, int, tuple[int, ...]]] = []  # bad words of several tokens, behind answers that are long enough
    for i, row, end in _positions(table, sampled, "bias", names):
        sampling, num_answered = row.sampling, end - row.num_prompt_tokens
        entries.extend((i, token, value) for token, value in sampling.logit_bias.items())
        if row.forbidden_early and num_answered < sampling.min_tokens:
            entries.extend((i, token, FORBIDDEN) for token in row.forbidden_early)
        for word in sampling.bad_words_token_ids:
            if len(word) == 1:
                entries.append((i, word[0], FORBIDDEN))
            elif num_answered >= len(word) - 1:
                begun.append((i, row.index * table.tokens.shape[1] + end, word))
    entries.extend((i, word[-1], 0.0) for i, _, word in begun)
    if not entries:
        return None
    where, tokens, values = zip(*entries, strict=True)
    biases = upload(np.array(values, np.float32), table.device)
    if begun:
        longest = max(len(word) for *_, word in begun) - 1
        wanted = np.full((2, len(begun), longest), -1, np.int32)  # tokens, and their places in the table; −1: any
        for n, (_, end, word) in enumerate(begun):
            size = len(word) - 1
            wanted[0, n, :size], wanted[1, n, :size] = word[:-1], np.arange(end - size, end)
        earlier, places = upload(wanted, table.device).unbind(0)
        found = table.tokens.view(-1)[places.clamp(min=0).long()] == earlier
        biases[-len(begun) :] = torch.where((found | (earlier < 0)).all(1), FORBIDDEN, 0.0)
    return upload(np.array(where, np.int64), table.device), upload(np.array(tokens, np.int64), table.device), biases


def verified(
    requests: Sequence[ScheduledRequest], tokens: Sequence[int], from_model: Sequence[int] = ()
) -> tuple[list[int], tuple[int, ...]]:
    """Of the `tokens` that were sampled at all positions of `requests` those that count, and how many each request got: its
    drafts up to the first that was not sampled, and the token that was sampled there. `from_model`: the drafts that the plan
    left to the draft model.

    This is rejection sampling (Leviathan et al. 2023) of drafts proposed with probability 1. There a draft d is accepted with
    probability p(d), and otherwise a token is drawn from p without d: as if one token was drawn from p and compared with d. So
    nothing is drawn that would not be drawn without drafts, and a seed gives the same answer with and without.
    """
    kept: list[int] = []
    counts = []
    begin = 0
    proposed = iter(from_model)
    for s in requests:
        guessed = s.drafts[max(0, len(s.drafts) + 1 - s.num_sampled) :]  # the others are forced
        drafts = [next(proposed) if draft == FROM_MODEL else draft for draft in guessed]
        end = begin + s.num_sampled
        last = end - 1 - len(drafts)  # of the positions before which nothing is guessed
        pairs = zip(drafts, tokens[last:end], strict=False)
        last += next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
        kept += tokens[begin : last + 1]
        counts.append(last + 1 - begin)
        begin = end
    return kept, tuple(counts)


def best_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of raw logits [N, V] and a token for each row: (its log-probability, its rank, the best ids, their
    log-probabilities), the last two [N, num_top]. float32."""
    scores = logits.float()
    log_z = scores.logsumexp(dim=-1, keepdim=True)
    chosen = scores.gather(1, tokens.long()[:, None])
    rank = (scores > chosen).sum(dim=-1) + 1
    top_values, top_ids = scores.topk(num_top, dim=-1) if num_top else (scores[:, :0], tokens[:, None][:, :0])
    return (chosen - log_z)[:, 0], rank, top_ids, top_values - log_z


def as_logprobs(
    tokens: Sequence[int], best: tuple[Tensor, Tensor, Tensor, Tensor], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Host values of `best_logprobs`, each row cut to the number of alternatives it asked for."""
    chosen, rank, ids, values = (t.tolist() for t in best)
    return [
        TokenLogprobs(token, chosen[i], rank[i], tuple(zip(ids[i][:k], values[i][:k], strict=True)))
        for i, (token, k) in enumerate(zip(tokens, counts, strict=True))
    ]


def prompt_positions(row: Row, s: ScheduledRequest) -> int:
    """How many of this step's positions precede another *prompt* token."""
    return max(0, min(s.num_computed_tokens + s.num_tokens, row.num_prompt_tokens - 1) - s.num_computed_tokens)
