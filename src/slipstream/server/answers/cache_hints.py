"""Hints in a body about when its session will return (docs/agents.md): names, times to live, ends, priority."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw

from slipstream.params.cache_hints import CacheHints

MARKS = {"cache_control": "5m", "prompt_cache_breakpoint": "30m"}
"""Fields by which a client marks a block, message or tool as the end of a cacheable prefix
(Anthropic's and OpenAI's), and the time to live of a mark that gives none."""

URGENT, LATER = 2.0, 0.5
"""Scheduling weights of requests with a priority below 0, and above 0."""

Breakpoints: TypeAlias = tuple[tuple[float, float], ...]

MAX_BREAKPOINTS = 4
"""Maximum number of breakpoints used, counted from the end; Anthropic's limit."""

MAX_NAME = 512
"""Maximum characters of a `prompt_cache_key` that are used."""


def cache_hints(
    body: Any, priority: int, call_tokens: tuple[int, ...] = (), breakpoints: Breakpoints = ()
) -> CacheHints:
    """The cache hints of an OpenAI body, or of a body translated to one. The other arguments: see `CacheHints`."""
    offers = bool(getattr(body, "tools", None)) and getattr(body, "tool_choice", None) != "none"
    options = _object(body.prompt_cache_options)
    # "explicit": the client wants only what its breakpoints mark.
    whole = None if options.get("mode") == "explicit" else seconds_of(options.get("ttl"))
    return CacheHints(
        session=(_text(body.prompt_cache_key) or "")[:MAX_NAME],
        ttl_s=seconds_of(_text(body.prompt_cache_retention)) or whole,
        weight=URGENT if priority < 0 else LATER if priority > 0 else 1.0,
        breakpoints=breakpoints or chat_breakpoints(body, options.get("ttl")),
        ends=bool(body.end_of_branch),
        calls=offers,
        call_tokens=call_tokens if offers else (),
    )


def breakpoints(parts: Sequence[Mapping[str, Raw]], ttl: Any = None) -> Breakpoints:
    """The breakpoints of unparsed blocks and tools, in prompt order. A breakpoint's position, as a fraction of the
    prompt, is estimated by characters. `ttl`: the request's own, for a `prompt_cache_breakpoint` without one."""
    sizes = [sum(len(bytes(v)) for k, v in part.items() if k not in MARKS) for part in parts]
    found, total, so_far = list[tuple[float, float]](), max(1, sum(sizes)), 0
    for part, size in zip(parts, sizes, strict=True):
        so_far += size
        for name, usual in MARKS.items():
            given = part.get(name, Raw())
            if bytes(given) in (b"", b"null"):
                continue
            default = ttl or usual if name == "prompt_cache_breakpoint" else usual
            if (seconds := seconds_of(_object(given).get("ttl") or default)) is not None:
                found.append((so_far / total, seconds))
                break
    return tuple(found[-MAX_BREAKPOINTS:])


def chat_breakpoints(body: Any, ttl: Any = None) -> Breakpoints:
    """Cache breakpoints in a chat's tools and messages; most chats have none."""
    messages, tools = getattr(body, "messages", ()), getattr(body, "tools", None) or ()
    marked = any(bytes(given.cache_control) for given in (*tools, *messages))
    listed = (part for m in messages if isinstance(m.content, list) for part in m.content)
    if not marked and not any(name in part for part in listed for name in MARKS):
        return ()
    parts = [
        {"tool": Raw(msgspec.json.encode(t.function)), "cache_control": t.cache_control}
        for t in tools
    ]
    for message in messages:
        given = message.content
        parts += given if isinstance(given, list) else [{"text": Raw((given or "").encode())}]
        parts.append({"cache_control": message.cache_control})
    return breakpoints(parts, ttl)


def seconds_of(ttl: Any) -> float | None:
    """Seconds of a time to live: "in_memory", or minutes or hours such as "5m" and "24h", at most a day. None for other
    values."""
    if ttl == "in_memory":
        return 300.0
    found = re.fullmatch(r"(\d{1,4})([mh])", ttl) if isinstance(ttl, str) else None
    return (
        None if found is None else min(86400.0, int(found[1]) * {"m": 60.0, "h": 3600.0}[found[2]])
    )


def _object(given: Raw) -> dict[str, Any]:
    """The fields of an object that is not parsed yet. Empty for any other JSON."""
    value = msgspec.json.decode(given) if bytes(given) else None
    return value if isinstance(value, dict) else {}


def _text(given: Raw | str | None) -> str | None:
    """The string of a field that takes any JSON."""
    if isinstance(given, Raw):
        given = msgspec.json.decode(given) if bytes(given) else None
    return given if isinstance(given, str) else None
