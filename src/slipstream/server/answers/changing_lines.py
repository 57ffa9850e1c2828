"""Lines of system prompts that change between requests: the prompts would otherwise share no prefix in the KV cache.

`ServerSettings.changing_lines` chooses. The model still reads every line that is moved.
"""

from __future__ import annotations

import re
from typing import Any

BILLING = "x-anthropic-billing-header:"
"""First characters of a block that Claude Code puts before the system prompt. It is meant for the provider, and differs by
session."""

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATE = re.compile(
    r"^(?=[^\n]{0,160}$)(?=[^\n]*\b(?:date|time|today|now)\b)"
    rf"(?=[^\n]*(?:\b\d{{4}}-\d\d-\d\d|\b\d{{1,2}}:\d\d\b|\b{_MONTH} \d{{1,2}}\b|\b\d{{1,2}} {_MONTH}))[^\n]+\n?",
    re.IGNORECASE | re.MULTILINE,
)
"""A short line that speaks of a date or time and has one."""


def dates_last(text: str) -> str:
    """The text with its lines of dates and times at the end."""
    lines = _DATE.findall(text)
    if not lines:
        return text
    rest = _DATE.sub("", text)
    return "\n".join(
        [*([rest.removesuffix("\n")] if rest else []), *(line.rstrip("\n") for line in lines)]
    )


def in_order(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with the changing lines of system prompts at the prompts' ends."""
    return [
        {**m, "content": dates_last(m["content"])}
        if m.get("role") in ("system", "developer") and isinstance(m.get("content"), str)
        else m
        for m in messages
    ]
