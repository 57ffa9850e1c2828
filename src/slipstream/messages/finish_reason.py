"""Reason why a sequence ended. No torch."""

from __future__ import annotations

from enum import StrEnum


class FinishReason(StrEnum):
    """The reason why a sequence ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # cancelled by the caller
    DEADLINE = "deadline"  # its deadline passed before it was done
    ERROR = "error"  # the engine failed
    INVALID = "invalid"  # its request turned out to be impossible
    OVERLOADED = "overloaded"  # other requests were served first; it may be sent again
