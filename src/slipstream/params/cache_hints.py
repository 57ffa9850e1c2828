"""Hints of clients about what the prefix cache should keep. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheHints:
    """A client's hints about the return of its session.

    They change the order in which cached blocks are evicted, and nothing else.
    """

    session: str = ""  # requests of one name and `cache_salt` share what is learned of their pauses
    ttl_s: float | None = None  # kept rather than others for so long
    weight: float = 1.0  # of its blocks among others'
    # (share of the prompt up to which it is kept rather than others, seconds for which it is)
    breakpoints: tuple[tuple[float, float], ...] = ()
    ends: bool = False  # no request will continue this one
    calls: bool = False  # its answer may be a tool call, which the next request answers
    call_tokens: tuple[int, ...] = ()  # one of which every such answer has; none: that is unknown


NO_HINTS = CacheHints()
