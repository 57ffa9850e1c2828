"""Rules for the tokens of a speech model's answer. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRules:
    """Constraints on the tokens of a speech model's answer (Whisper's, as in transformers' logits processors).

    `forced`: for each of the first positions, the tokens allowed there (a language, a task). After these, `suppressed`
    tokens are never sampled, and `suppressed_first` not as the first one. `first_timestamp`: the token of time 0;
    timestamps are generated, in pairs that do not decrease. None: no timestamps. The first timestamp is at most
    `max_first` steps. Tokens from `end` on are not text.
    """

    end: int
    no_timestamps: int
    first_timestamp: int | None = None
    max_first: int | None = None
    forced: tuple[tuple[int, ...], ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    def forbidden(self, num_answered: int) -> tuple[int, ...]:
        """Tokens that can't be sampled at this position of the answer, whatever precedes it."""
        if num_answered < len(self.forced):
            return ()
        first = self.suppressed_first if num_answered == len(self.forced) else ()
        return (*self.suppressed, *first)
