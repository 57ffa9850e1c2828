"""Word times, from the audio states to which a window's text tokens attend, as in transformers' and OpenAI's Whisper.

1. `Executor.attention_of` computes the attention matrix. `token_times` aligns tokens with states (dynamic time warping).
2. `words_of` joins tokens into words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from slipstream.engine.audio.segments import TranscriptionWord
from slipstream.messages.media import Matrix
from slipstream.spec.media.audio import STATE_S

WITHOUT_SPACES = frozenset(("chinese", "japanese", "thai", "lao", "myanmar", "cantonese"))
BEFORE_WORDS = "\"'“¡¿([{-"
AFTER_WORDS = "\"'.。,，!！?？:：”)]}、"
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
REPLACEMENT = "\ufffd"


def token_times(matrix: Matrix) -> list[float]:
    """Seconds at which each of N tokens ends, with the last value repeated for an end token: the cheapest
    monotonic path through the matrix [N, S]. Costs along an anti-diagonal are computed at once."""
    num_tokens, num_states = matrix.shape
    costs = -matrix.astype(np.float64)
    total = np.full((num_tokens + 1, num_states + 1), np.inf, np.float32)
    trace = np.full(total.shape, -1, np.int8)
    total[0, 0] = 0
    for diagonal in range(2, num_tokens + num_states + 1):
        i = np.arange(max(1, diagonal - num_states), min(num_tokens, diagonal - 1) + 1)
        j = diagonal - i
        both, up, left = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        is_both, is_up = (both < up) & (both < left), (up < both) & (up < left)
        trace[i, j] = np.where(is_both, 0, np.where(is_up, 1, 2))
        total[i, j] = costs[i - 1, j - 1] + np.where(is_both, both, np.where(is_up, up, left))
    trace[0, :], trace[:, 0] = 2, 1
    at, state = num_tokens, num_states
    ends = [0.0] * num_tokens
    while at or state:
        if at:
            ends[at - 1] = (state - 1) * STATE_S  # overwritten until the first state of the token
        step = int(trace[at, state])
        at, state = at - (step != 2), state - (step != 1)
    return [*ends, ends[-1]]


def words_of(
    tokens: Sequence[int],
    times: Sequence[tuple[float, float]],
    decode: Callable[[list[int]], str],
    language: str | None,
) -> list[TranscriptionWord]:
    """Returns the words of a text. `times` has each token's start and end in seconds."""
    parts = _characters(tokens, decode)
    if language not in WITHOUT_SPACES:
        parts = _joined(parts)
    _punctuated(parts)
    return [
        TranscriptionWord(start=times[own[0]][0], end=times[own[-1]][1], text=text)
        for text, own in parts
        if own
    ]


Part = tuple[str, list[int]]
"""(text, indices of its tokens)."""


def _characters(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[Part]:
    """Joins tokens into parts that end with a complete character."""
    whole, parts, own, offset = decode(list(tokens)), list[Part](), list[int](), 0
    for index in range(len(tokens)):
        own.append(index)
        text = decode([tokens[i] for i in own])
        at = offset + text.find(REPLACEMENT)
        if REPLACEMENT not in text or at >= len(whole) or whole[at] == REPLACEMENT:
            parts.append((text, own))
            own, offset = [], offset + len(text)
    return parts


def _joined(parts: list[Part]) -> list[Part]:
    """Joins parts into words. A space or a punctuation mark begins a new word."""
    words = list[Part]()
    for text, own in parts:
        if not words or text.startswith(" ") or text.strip() in PUNCTUATION:
            words.append((text, own))
        else:
            words[-1] = words[-1][0] + text, words[-1][1] + own
    return words


def _punctuated(words: list[Part]) -> None:
    """Attaches punctuation marks to neighbouring words, and leaves empty parts in their places."""
    j = len(words) - 1
    for i in range(len(words) - 2, -1, -1):
        (text, own), (after, later) = words[i], words[j]
        if text.startswith(" ") and text.strip() in BEFORE_WORDS:
            words[j], words[i] = (text + after, own + later), ("", [])
        else:
            j = i
    i = 0
    for j in range(1, len(words)):
        (text, own), (after, later) = words[i], words[j]
        if not text.endswith(" ") and after in AFTER_WORDS:
            words[i], words[j] = (text + after, own + later), ("", [])
        else:
            i = j
