"""Tokens to text as they come, and stop strings across their borders.

Text is built from the bytes of each token, once; a character whose bytes are not all there is held back. So is text
that may be the beginning of a stop string. What was given out is never taken back, and all of it together is what
decoding prompt and answer at once gives, less the prompt: SentencePiece's answer to "France is" begins with a space,
which decoding the answer by itself would take off. Work per character is constant (amortised), whatever the length of a
stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from slipstream.engine.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text that continues `prompt_token_ids`. `stop` strings end it: before the one that is complete first (of two at
    once, the longer), or after it with `include_stop`. They are not looked for in the text of the first `min_tokens`
    tokens."""

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
        self._between = not (
            stop or self._strip
        )  # two characters: a token's text is what it was the last time
        self._held = ""  # decoded, not yet given out: the longest beginning of a stop string that the text ends with
        self.num_tokens = 0
        # of all tokens, how many the answer keeps; they differ after a stop string
        self.num_tokens_used = 0
        self.stop_reason: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that is final with them. After a stop string it is
        empty."""
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
        """Text that was held back. The end of an unfinished character becomes a replacement
        character."""
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
        """Add new text, and return the text that can't belong to a stop string any more."""
        if not self._stops or self.num_tokens <= self._min_tokens:
            return text  # nothing is held before the first min_tokens are over, so a stop string begins after them
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
    """Knuth, Morris and Pratt: `length` is how much of `stop` the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        # [i]: the longest proper beginning of stop that stop[:i + 1] ends with
        self._shorter = [0] * len(stop)
        for i in range(1, len(stop)):
            self._shorter[i] = self._extend(self._shorter[i - 1], stop[i])

    def step(self, character: str) -> bool:
        """Take in one character. Returns whether `stop` is complete; after that it must not be called."""
        self.length = self._extend(self.length, character)
        return self.length == len(self.stop)

    def _extend(self, length: int, character: str) -> int:
        while length and self.stop[length] != character:
            length = self._shorter[length - 1]
        return length + (self.stop[length] == character)
