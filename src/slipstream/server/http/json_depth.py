"""Depth of JSON, known before a decoder or what comes after it recurses: some do so without a limit of their own."""

from __future__ import annotations

import numpy as np

MAX_DEPTH = 200
"""Lists and objects within each other in a body. What reads it later recurses with a few calls a level."""

_QUOTE = ord('"')
_STEP = np.zeros(256, np.int8)
_STEP[[ord("["), ord("{")]], _STEP[[ord("]"), ord("}")]] = 1, -1
_OTHERS = bytes(set(range(256)) - set(b'[]{}"'))


def is_too_deep(text: bytes) -> bool:
    """Whether lists and objects of JSON lie deeper than `MAX_DEPTH`. Takes some 10 ms a MiB, next to nothing for a text with
    few brackets."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    text = text.replace(rb"\\", b"").replace(
        rb"\"", b""
    )  # a quote that is left begins or ends a string
    marks = np.frombuffer(text.translate(None, _OTHERS), np.uint8)
    is_outside = np.cumsum(marks == _QUOTE, dtype=np.uint8) % 2 == 0
    depths = np.cumsum(_STEP[marks] * is_outside, dtype=np.int32)
    return bool(depths.max(initial=0) > MAX_DEPTH)
