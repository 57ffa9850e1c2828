"""Shortening a conversation before it is answered (`compress_prompt` of a chat request).

System messages, and the last paragraph of the last message (the question), are unchanged. Elsewhere
text that a small model (`--context-model`) could have predicted is removed.
"""

from __future__ import annotations

import re
from typing import Any

from slipstream.server.http.errors import bad_request
from slipstream.server.openai.protocol import PromptCompression
from slipstream.server.state import ServerState


async def shorten(
    state: ServerState, messages: list[dict[str, Any]], wanted: PromptCompression
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Shortens the messages. Returns (the messages, an entry about it for `usage`)."""
    if state.shortener is None:
        raise bad_request(
            "compress_prompt needs a small model: start the server with --context-model MODEL",
            "compress_prompt",
        )
    parts: list[tuple[str, bool]] = []
    owners = []
    for i, message in enumerate(messages):
        text, is_last = message["content"], i == len(messages) - 1
        begin = _question(text) if is_last else len(text)
        for part in (
            (text[:begin], message["role"] == "system" and not is_last),
            (text[begin:], True),
        ):
            parts.append(part)
            owners.append(i)
    found = await state.shortener(
        parts,
        keep=wanted.keep,
        method=wanted.method,
        unit=wanted.unit,
        protect=tuple(map(re.escape, wanted.protect)),
    )
    contents = ["" for _ in messages]
    for owner, text in zip(owners, found.parts, strict=True):
        contents[owner] += text
    told = {
        "tokens_before": found.num_tokens_before,
        "tokens_after": found.num_tokens_after,
        "kept_share": round(found.kept_share, 4),
    }
    return [{**m, "content": text} for m, text in zip(messages, contents, strict=True)], told


def _question(text: str) -> int:
    """Index of the character at which the last paragraph begins."""
    found = [m.end() for m in re.finditer(r"\n\s*\n", text.rstrip())]
    return found[-1] if found else 0
