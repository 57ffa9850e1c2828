"""Perplexity: exp of the mean of −ln p(token | the tokens before it in its window) over all scored tokens.

It depends on the text, on how it is cut (context, stride) and on the tokenizer, so these are part of the
result. With a stride below the context every scored token has context before it (Radford et al. 2019; Hugging
Face's procedure for fixed-length models).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.evals.scorer import Scorer
from slipstream.evals.text import Window

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityResult:
    perplexity: float
    num_tokens: int  # scored
    num_windows: int


@torch.inference_mode()
def perplexity(
    scorer: Scorer, windows: Sequence[Window], *, progress: Progress = lambda done, total: None
) -> PerplexityResult:
    """Perplexity of the model on `windows`. ConfigError if they have no scored token, or one that is not in the
    vocabulary."""
    check_windows(scorer, windows)
    total = 0.0
    for i, window in enumerate(windows):
        hidden, targets = scored(scorer, window)
        for rows in scorer.rows(len(hidden)):
            total += float(token_nll(scorer.logits(hidden[rows]), targets[rows]).double().sum())
        progress(i + 1, len(windows))
    num_tokens = sum(w.num_scored for w in windows)
    return PerplexityResult(
        perplexity=math.exp(min(total / num_tokens, 700.0)),
        num_tokens=num_tokens,
        num_windows=len(windows),
    )


def check_windows(scorer: Scorer, windows: Sequence[Window]) -> None:
    if not any(w.num_scored > 0 for w in windows):
        raise ConfigError("there is no text to score: no window has two tokens", field="text")
    largest = max(max(w.token_ids) for w in windows)
    if largest >= scorer.spec.vocab_size:
        raise ConfigError(
            f"the text has the token {largest}, but {scorer.name} has a vocabulary of {scorer.spec.vocab_size}: use the "
            "model's own tokenizer",
            field="tokenizer",
        )


def scored(scorer: Scorer, window: Window) -> tuple[Tensor, Tensor]:
    """(hidden states [N, E] that predict the scored tokens, these tokens, int64 [N])."""
    hidden = scorer.hidden(window.token_ids)
    targets = scorer.tensor(window.token_ids[window.num_context :]).long()
    return hidden[window.num_context - 1 : -1], targets


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """−ln p of the targets int64 [N], from logits float32 [N, V]."""
    return logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0]
