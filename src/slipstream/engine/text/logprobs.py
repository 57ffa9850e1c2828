"""Log-probabilities together with the tokens' texts."""

from __future__ import annotations

from functools import partial

from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.messages.logprobs import TokenLogprobs
from slipstream.outputs import Logprob, PositionLogprobs


def late_logprobs(tokenizer: Tokenizer | None, position: TokenLogprobs) -> PositionLogprobs:
    """Log-probabilities whose texts are decoded when they are first read. Texts are empty without a tokenizer."""
    return PositionLogprobs.late(partial(_entries, tokenizer), position)


def _entries(
    tokenizer: Tokenizer | None, position: TokenLogprobs
) -> tuple[Logprob, tuple[Logprob, ...]]:
    """The fields of `PositionLogprobs`: (sampled token, most likely tokens)."""
    chosen = _logprob(tokenizer, position.token_id, position.logprob, position.rank)
    top = tuple(
        _logprob(tokenizer, t, value, rank) for rank, (t, value) in enumerate(position.top, 1)
    )
    return chosen, top


def _logprob(tokenizer: Tokenizer | None, token_id: int, value: float, rank: int) -> Logprob:
    if tokenizer is None:
        return Logprob(token_id, "", value, rank)
    data = tokenizer.token_bytes(token_id)
    return Logprob(token_id, data.decode("utf-8", "replace"), value, rank, data)
