"""Rules for the tokens of a speech model's answer. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRules:
    """Rules for the tokens of a speech model's answer (Whisper's, as transformers' logits processors have them).

    `forced`: the tokens, one of which may be drawn at each of the first positions (a language, a task).
    After these, `suppressed` are never drawn, and `suppressed_first` not at once.
    `first_timestamp`: times are written, in pairs that do not decrease; this is the token of the time 0. The first time is at
    most `max_first` steps. Tokens from `end` on are not text.
    """

    end: int
    no_timestamps: int
    first_timestamp: int | None = None
    max_first: int | None = None
    forced: tuple[tuple[int, ...], ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    def forbidden(self, num_answered: int) -> tuple[int, ...]:
        """The tokens that are not drawn at a position whatever precedes it."""
        if num_answered < len(self.forced):
            return ()
        first = self.suppressed_first if num_answered == len(self.forced) else ()
        return (*self.suppressed, *first)
