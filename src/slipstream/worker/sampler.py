"""Makes the tensors that `ops.sample` reads from the rows' sampling parameters, and log-probabilities from its tokens.

Only what some row asks for is built and uploaded. A step of greedy rows uploads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.metadata import SamplingTensors
from slipstream.types import FROM_MODEL, ScheduledRequest, TokenLogprobs
from slipstream.worker.input_batch import Row, RowTable, SampledRows, upload

FORBIDDEN = -1e30
"""Added to the logit of a token that must not be drawn. It is finite: where all tokens are forbidden, one is drawn still."""

PROMPT_LOGPROB_ROWS = 256
"""Positions whose full-vocabulary logits are held at once for prompt log-probabilities."""


def sampling_tensors(table: RowTable, sampled: SampledRows) -> SamplingTensors:
    """The parameters of the N tokens that are sampled, in `sampled`'s order."""
    rows: list[Row] = []
    ends: list[int] = []
    for s in sampled.requests:
        end = s.num_computed_tokens + s.num_tokens
        rows += [table.rows[s.request_id]] * s.num_sampled
        ends += range(end - s.num_sampled + 1, end + 1)  # tokens up to each sampled position
    device = table.device
    bias = _bias(table, rows, ends)
    limited = [(i, row.allowed) for i, row in enumerate(rows) if row.allowed is not None]
    params = [r.sampling for r in rows]
    penalised = any(p.has_penalties for p in params)
    all_greedy = all(p.temperature == 0.0 for p in params)
    if all_greedy and not penalised and bias is None and not limited:
        empty = torch.empty(0, device=device)
        return SamplingTensors(
            temperature=empty, top_k=empty, top_p=empty, min_p=empty, seeds=empty, history_lens=empty, all_greedy=True
        )
    floats = np.array(
        [
            (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            for p in params
        ],
        dtype=np.float32,
    ).T.copy()
    ints = np.array(
        [(r.sampling.top_k, r.num_prompt_tokens, n, r.index) for r, n in zip(rows, ends, strict=True)],
        dtype=np.int32,
    ).T.copy()
    temperature, top_p, min_p, repetition, presence, frequency = upload(floats, device).unbind(0)
    top_k, prompt_lens, history_lens, indices = upload(ints, device).unbind(0)
    bias_rows, bias_tokens, bias_values = bias if bias is not None else (None, None, None)
    limited_rows = allowed_rows = allowed_tokens = None
    if limited:
        which, allowed = np.array([i for i, _ in limited], np.int64), [tokens for _, tokens in limited]
        limited_rows = upload(which, device)
        allowed_rows = upload(which.repeat([len(tokens) for tokens in allowed]), device)
        allowed_tokens = upload(np.concatenate(allowed), device)
    return SamplingTensors(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=upload(np.fromiter((r.seed for r in rows), np.int64, len(rows)), device),
        history_lens=history_lens,
        prompt_lens=prompt_lens if penalised else None,
        history=table.tokens[:, : max(ends)].index_select(0, indices) if penalised else None,
        repetition_penalty=repetition if penalised else None,
        presence_penalty=presence if penalised else None,
        frequency_penalty=frequency if penalised else None,
        bias_rows=bias_rows,
        bias_tokens=bias_tokens,
        bias_values=bias_values,
        limited_rows=limited_rows,
        allowed_rows=allowed_rows,
        allowed_tokens=allowed_tokens,
        all_greedy=all_greedy,
        any_top_k=any(p.top_k for p in params),
        any_top_p=any(p.top_p < 1.0 for p in params),
        any_min_p=any(p.min_p > 0.0 for p in params),
    )


def _bias(table: RowTable, rows: Sequence[Row], ends: Sequence[int]) -> tuple[Tensor, Tensor, Tensor] | None:
    """(row, token, value) of every logit bias, and FORBIDDEN on the end tokens of rows that are below min_tokens, and on the
    last tokens of bad words. Row i has ends[i] tokens. Whether the earlier tokens of a bad word stand there only the device
    knows: the value is 0 where they don't."""
    entries: list[tuple[int, int, float]] = []
    begun: list[tuple[int, tuple[int, ...]]] = []  # bad words of several tokens for which the answer is long enough
    for i, row in enumerate(rows):
        sampling, num_answered = row.sampling, ends[i] - row.num_prompt_tokens
        entries.extend((i, token, value) for token, value in sampling.logit_bias.items())
        if row.forbidden_early and num_answered < sampling.min_tokens:
            entries.extend((i, token, FORBIDDEN) for token in row.forbidden_early)
        for word in sampling.bad_words_token_ids:
            if len(word) == 1:
                entries.append((i, word[0], FORBIDDEN))
            elif num_answered >= len(word) - 1:
                begun.append((i, word))
    entries.extend((i, word[-1], 0.0) for i, word in begun)
    if not entries:
        return None
    where, tokens, values = zip(*entries, strict=True)
    biases = upload(np.array(values, np.float32), table.device)
    if begun:
        longest = max(len(word) for _, word in begun) - 1
        wanted = np.full((2, len(begun), longest), -1, np.int32)  # tokens, and their places in the table; −1: any
        for n, (i, word) in enumerate(begun):
            size, end = len(word) - 1, rows[i].index * table.tokens.shape[1] + ends[i]
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
