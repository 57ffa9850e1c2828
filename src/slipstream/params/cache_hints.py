"""Clients' hints about what the prefix cache should keep. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheHints:
    """A client's hints about the return of its session.

    They change the order in which cached blocks are evicted, and nothing else.
    """

    session: str = ""  # requests of one name and `cache_salt` share learned pauses
    ttl_s: float | None = None  # seconds for which it is evicted after others
    weight: float = 1.0  # weight of its blocks relative to others'
    # (fraction of the prompt up to which it is evicted after others, seconds for which that holds)
    breakpoints: tuple[tuple[float, float], ...] = ()
    ends: bool = False  # no request will continue this one
    calls: bool = False  # its answer may be a tool call, whose result the next request brings
    call_tokens: tuple[int, ...] = ()  # one of these is in every such answer; empty: unknown


NO_HINTS = CacheHints()
