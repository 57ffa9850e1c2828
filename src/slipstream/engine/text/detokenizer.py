"""Incremental detokenization, and detection of stop strings that span tokens.

Each token's bytes are decoded once. Held back are incomplete characters, and text that may begin a
stop string. Emitted text is never changed. All of it equals the decoding of prompt and answer
together, minus the prompt: with SentencePiece, the answer to "France is" begins with a space, which
decoding the answer alone would drop. Work per character is constant (amortised), whatever the
length of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from slipstream.engine.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text that continues `prompt_token_ids`. It ends before the first complete stop string of
    `stop` (of two that end together, the longer), or after it with `include_stop`. Text of the
    first `min_tokens` tokens is not searched."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._stops = [_Matcher(s) for s in sorted(stop, key=len, reverse=True)]
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_space_after(prompt_token_ids, skip_special_tokens)
        self._texts = tokenizer.texts(skip_special_tokens)
        # two characters: only there is a token's text always the same
        self._between = not (stop or self._strip)
        # decoded but not emitted: the longest suffix of the text that begins a stop string
        self._held = ""
        self.num_tokens = 0
        # number of tokens that the answer keeps; fewer than all after a stop string
        self.num_tokens_used = 0
        self.stop_reason: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that became final. Empty after a stop string."""
        alone = token_ids[0] if self._between and len(token_ids) == 1 else None
        if alone is not None and (known := self._texts.get(alone)) is not None:
            self.num_tokens += 1
            self.num_tokens_used = self.num_tokens
            return known
        out = []
        for token in token_ids:
            self.num_tokens += 1
            if self.stop_reason is not None:
                continue
            self.num_tokens_used = self.num_tokens
            if token not in self._skip:
                out.append(self._add(self._decoder.decode(self._bytes(token))))
        text = "".join(out)
        self._between = not (self._stops or self._strip or self._decoder.getstate()[0])
        if alone is not None and self._between:
            self._texts[alone] = text
        return text

    def finish(self) -> str:
        """End the answer and return the text held back. An incomplete character becomes a
        replacement character."""
        if self.stop_reason is not None:
            return ""
        text = self._add(self._decoder.decode(b"", True))
        rest, self._held = self._held, ""
        return text + rest

    def _bytes(self, token: int) -> bytes:
        data = self._tokenizer.token_bytes(token)
        if self._strip and data:
            self._strip = False
            return data.removeprefix(b" ")
        return data

    def _add(self, text: str) -> str:
        """Add new text, and return the text that can no longer be part of a stop string."""
        if not self._stops or self.num_tokens <= self._min_tokens:
            return text  # nothing is held back before the first min_tokens are over, so stop strings begin after them
        seen = self._held + text
        for at, character in enumerate(text, len(self._held) + 1):
            complete = [m.stop for m in self._stops if m.step(character)]  # longest first
            if complete:
                self.stop_reason, self._held = complete[0], ""
                return seen[: at if self._include_stop else at - len(complete[0])]
        given = len(seen) - max(m.length for m in self._stops)
        self._held = seen[given:]
        return seen[:given]


class _Matcher:
    """Knuth-Morris-Pratt matcher: `length` is the number of characters of `stop` with which the text so far ends."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        # [i]: length of the longest proper prefix of stop with which stop[:i + 1] ends
        self._shorter = [0] * len(stop)
        for i in range(1, len(stop)):
            self._shorter[i] = self._extend(self._shorter[i - 1], stop[i])

    def step(self, character: str) -> bool:
        """Consume one character. Returns whether `stop` is complete; it must not be called after that."""
        self.length = self._extend(self.length, character)
        return self.length == len(self.stop)

    def _extend(self, length: int, character: str) -> int:
        while length and self.stop[length] != character:
            length = self._shorter[length - 1]
        return length + (self.stop[length] == character)
