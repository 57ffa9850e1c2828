"""Checks that a request fits into the context and the KV cache."""

from __future__ import annotations

from slipstream.config import CacheConfig
from slipstream.errors import ContextLengthError
from slipstream.spec.model import longest_sequence
from slipstream.types import EngineRequest


def check_length(
    spec: EngineRequest, longest: int, cache: CacheConfig, step_tokens: int, num_blocks: int
) -> None:
    """Raise ContextLengthError if a request can never run.

    That is: prompt and answer have more than `longest` tokens, or need more than `num_blocks`
    blocks when steps of `step_tokens` tokens compute them.
    """
    total, encoded = spec.num_prompt_tokens + spec.max_tokens, len(spec.encoder_token_ids)
    if total > longest:
        raise ContextLengthError(
            f"prompt and answer are {total} tokens, more than max_model_len={longest}",
            field="prompt",
        )
    if encoded > max(longest, *(g.num_read or 0 for g in cache.groups)):
        raise ContextLengthError(
            f"the prompt has {encoded} tokens, more than max_model_len={longest}", field="prompt"
        )
    computed = total if spec.pooled else total - 1  # the last sampled token is never computed
    size, groups = cache.block_size, cache.groups
    need = sum(
        g.max_blocks(encoded if g.kind == "cross" else computed, size, step_tokens) for g in groups
    )
    if need > num_blocks:
        holds = num_blocks * size
        if len([g for g in groups if g.kind != "cross"]) > 1 or any(
            g.kind == "window" for g in groups
        ):
            holds = longest_sequence(groups, num_blocks, size, step_tokens, longest)
        raise ContextLengthError(
            f"prompt and answer are {total + encoded} tokens and the KV cache holds {holds}; "
            "ask for fewer, or give the cache more memory",
            field="prompt",
        )
