"""Perplexity: exp of the mean of −ln p(token | what stands before it in its window), over every scored token.

It depends on the text, on how it is cut (context, stride) and on the tokenizer: numbers compare only where all of these are
the same, which is why they are reported together. With a stride below the context, tokens at a window's beginning are not
judged without context (Radford et al. 2019; the procedure that Hugging Face documents for fixed-length models).
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
def perplexity(scorer: Scorer, windows: Sequence[Window], *, progress: Progress = lambda done, total: None) -> PerplexityResult:
    """Of the model on `windows`, which hold at least one scored token. ConfigError if there is none, or if a token is not in
    the vocabulary."""
    check_windows(scorer, windows)
    total = 0.0
    for i, window in enumerate(windows):
        hidden, targets = scored(scorer, window)
        for piece in scorer.rows(len(hidden)):
            total += float(token_nll(scorer.logits(hidden[piece]), targets[piece]).double().sum())
        progress(i + 1, len(windows))
    num_tokens = sum(w.num_scored for w in windows)
    return PerplexityResult(
        perplexity=math.exp(min(total / num_tokens, 700.0)), num_tokens=num_tokens, num_windows=len(windows)
    )


def check_windows(scorer: Scorer, windows: Sequence[Window]) -> None:
    if not any(w.num_scored > 0 for w in windows):
        raise ConfigError("there is no text to score: no window has two tokens", field="text")
    largest = max(max(w.token_ids) for w in windows)
    if largest >= scorer.spec.vocab_size:
        raise ConfigError(
            f"the text has the token {largest}, and {scorer.name} has a vocabulary of {scorer.spec.vocab_size}: the tokenizer "
            "is another model's",
            field="tokenizer",
        )


def scored(scorer: Scorer, window: Window) -> tuple[Tensor, Tensor]:
    """(hidden states [N, E] that predict the scored tokens, those tokens int64 [N])."""
    hidden = scorer.hidden(window.token_ids)
    targets = scorer.tensor(window.token_ids[window.num_context :]).long()
    return hidden[window.num_context - 1 : -1], targets


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """logits float32 [N, V], targets int64 [N] → −ln p [N]."""
    return logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0]
