"""Shortening a conversation before it is answered (`compress_prompt` of a chat request).

System messages stay as they are, and so does the last paragraph of the last message, which is the question; the rest is free to
go. A small model says what could have been guessed: that of `--context-model`.
"""

from __future__ import annotations

import re
from typing import Any

from slipstream.compress.context import ContextSettings, Part, compress_async, information
from slipstream.server.errors import bad_request
from slipstream.server.protocol import PromptCompression
from slipstream.server.state import ServerState
from slipstream.types import SamplingParams

_SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)


async def shorten(
    state: ServerState, messages: list[dict[str, Any]], wanted: PromptCompression
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(the messages, what to tell of it beside the usage)."""
    small = state.context_engine
    if small is None or small.tokenizer is None:
        raise bad_request(
            "compress_prompt needs a small model: start the server with --context-model MODEL", "compress_prompt"
        )
    context = min(2048, small.config.model.max_model_len - 1)
    settings = ContextSettings(
        keep=wanted.keep,
        method=wanted.method,
        unit=wanted.unit,
        protect=tuple(map(re.escape, wanted.protect)),
        segment=min(200, context // 2),
        context=context,
    )
    parts, owners = [], []
    for i, message in enumerate(messages):
        begin = 0 if i < len(messages) - 1 else _question(message["content"])
        cuts = [(message["content"][:begin], False), (message["content"][begin:], True)]
        if i < len(messages) - 1:
            cuts = [(message["content"], message["role"] == "system")]
        for text, protected in cuts:
            parts.append(Part(text, protected))
            owners.append(i)

    async def score(token_ids: list[int]) -> list[float]:
        async for output in small.generate({"prompt_token_ids": token_ids}, _SCORED):
            if output.prompt_logprobs is not None:
                return information(output.prompt_logprobs)
        raise bad_request("the small model gave no log-probabilities", "compress_prompt")

    found = await compress_async(parts, small.tokenizer, score, settings)
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
    """Where the last paragraph begins."""
    found = [m.end() for m in re.finditer(r"\n\s*\n", text.rstrip())]
    return found[-1] if found else 0
