"""Checks that a request fits into the context and the KV cache."""

from __future__ import annotations

from slipstream.config import CacheConfig
from slipstream.errors import ContextLengthError
from slipstream.messages.requests import EngineRequest
from slipstream.spec.cache import longest_sequence


class Lengths:
    """The bounds of a request's length.

    Prompt and answer have at most `longest` tokens. They need at most `num_blocks` blocks when steps
    of `step_tokens` tokens compute them.
    """

    def __init__(self, longest: int, cache: CacheConfig, step_tokens: int, num_blocks: int) -> None:
        self._longest = longest
        self._cache = cache
        self._step_tokens = step_tokens
        self._num_blocks = num_blocks
        self._holds_all = self._num_needed(longest, longest) <= num_blocks

    def _num_needed(self, computed: int, encoded: int) -> int:
        size, step = self._cache.block_size, self._step_tokens
        return sum(
            group.max_blocks(encoded if group.kind == "cross" else computed, size, step)
            for group in self._cache.groups
        )

    def check(self, spec: EngineRequest) -> None:
        """Raise ContextLengthError if a request can never run."""
        total, encoded = spec.num_prompt_tokens + spec.max_tokens, len(spec.encoder_token_ids)
        if total > self._longest:
            raise ContextLengthError(
                f"prompt and answer are {total} tokens, more than max_model_len={self._longest}",
                field="prompt",
            )
        groups = self._cache.groups
        if encoded > self._longest and encoded > max(g.num_read or 0 for g in groups):
            raise ContextLengthError(
                f"the prompt has {encoded} tokens, more than max_model_len={self._longest}",
                field="prompt",
            )
        if self._holds_all:
            return
        computed = total if spec.pooled else total - 1  # the last sampled token is never computed
        if self._num_needed(computed, encoded) > self._num_blocks:
            size = self._cache.block_size
            holds = self._num_blocks * size
            if len([g for g in groups if g.kind != "cross"]) > 1 or any(
                g.kind == "window" for g in groups
            ):
                holds = longest_sequence(
                    groups, self._num_blocks, size, self._step_tokens, self._longest
                )
            raise ContextLengthError(
                f"prompt and answer are {total + encoded} tokens and the KV cache holds {holds}; "
                "ask for fewer, or give the cache more memory",
                field="prompt",
            )
