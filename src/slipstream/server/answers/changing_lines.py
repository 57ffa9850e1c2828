"""Lines of system prompts that change between requests, which are left out or moved to the end: prompts would otherwise share
no prefix in the KV cache.

`ServerSettings.changing_lines` selects which lines. The model still reads every moved line.
"""

from __future__ import annotations

import re
from typing import Any

BILLING = "x-anthropic-billing-header:"
"""Beginning of a block that Claude Code puts before the system prompt. It is meant for the
provider, and differs between sessions, so it is left out unless `changing_lines` is "keep"."""

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATE = re.compile(
    r"^(?=[^\n]{0,160}$)(?=[^\n]*\b(?:date|time|today|now)\b)"
    rf"(?=[^\n]*(?:\b\d{{4}}-\d\d-\d\d|\b\d{{1,2}}:\d\d\b|\b{_MONTH} \d{{1,2}}\b|\b\d{{1,2}} {_MONTH}))[^\n]+\n?",
    re.IGNORECASE | re.MULTILINE,
)
"""A short line that mentions and contains a date or time."""


def dates_last(text: str) -> str:
    """The text with lines that contain dates and times moved to the end."""
    lines = _DATE.findall(text)
    if not lines:
        return text
    rest = _DATE.sub("", text)
    return "\n".join(
        [*([rest.removesuffix("\n")] if rest else []), *(line.rstrip("\n") for line in lines)]
    )


def in_order(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with changing lines of system prompts moved to the prompts' ends."""
    return [
        {**m, "content": dates_last(m["content"])}
        if m.get("role") in ("system", "developer") and isinstance(m.get("content"), str)
        else m
        for m in messages
    ]
