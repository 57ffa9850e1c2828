"""Tokens to text as they come, and stop strings across their borders.

Text is built from the bytes of each token, once; a character whose bytes are not all there is held back. So is text that
may be the beginning of a stop string. What was given out is never taken back, and all of it together is what decoding all
tokens at once gives.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from slipstream.engine.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """`stop` strings end the text: before the first that occurs, or after it with `include_stop`. They are not looked for
    in the text of the first `min_tokens` tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._stop = stop
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_leading_space
        self._longest = max((len(s) for s in stop), default=0)
        self._held = ""  # decoded, not yet given out
        self.num_tokens = 0
        self.num_tokens_used = 0  # of all tokens, how many the answer keeps; they differ after a stop string
        self.stop_reason: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens let out. Nothing after a stop string."""
        out = []
        for token in token_ids:
            self.num_tokens += 1
            if self.stop_reason is not None:
                continue
            self.num_tokens_used = self.num_tokens
            if token not in self._skip:
                out.append(self._add(self._decoder.decode(self._bytes(token))))
        return "".join(out)

    def finish(self) -> str:
        """What was held back; the end of an unfinished character is a replacement character."""
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
        """Take in new text; give out what no stop string can still claim."""
        if not self._stop:
            return text
        held = self._held + text
        if self.num_tokens <= self._min_tokens:
            # Text of the first tokens goes out as it is; a stop string begins after it.
            self._held = ""
            return held
        found = [(held.find(s), -len(s), s) for s in self._stop if s in held]
        if found:
            at, _, self.stop_reason = min(found)
            self._held = ""
            return held[: at + (len(self.stop_reason) if self._include_stop else 0)]
        keep = next(
            n
            for n in range(min(self._longest - 1, len(held)), -1, -1)
            if n == 0 or any(s.startswith(held[-n:]) for s in self._stop)
        )
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]
