"""Small settings for a scheduler."""

from __future__ import annotations

from typing import Any

from slipstream.config import CacheConfig, SchedulingConfig
from slipstream.config.forms import NO_DRAFTS, SpeculationConfig
from slipstream.spec.model import CacheGroup

BLOCK = 4
FULL = CacheGroup(kind="full")
CROSS = CacheGroup(kind="cross")


def window(tokens: int) -> CacheGroup:
    return CacheGroup(kind="window", window=tokens)


def config(
    *,
    max_model_len: int = 64,
    num_blocks: int = 20,
    enable_prefix_caching: bool = True,
    groups: tuple[CacheGroup, ...] = (FULL,),
    speculation: SpeculationConfig = NO_DRAFTS,
    state_slots: int = 0,
    state_interval: int = 2 * BLOCK,
    eviction: str = "value",
    **scheduling: Any,
) -> dict[str, Any]:
    """Arguments of `Scheduler` and `TextScheduler`."""
    scheduling = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "enable_chunked_prefill": True,
        "policy": "inflight",
        "batch_window_s": 0.05,
        "max_queue": None,
        **scheduling,
    }
    scheduling.setdefault("max_num_mixed_tokens", scheduling["max_num_batched_tokens"])
    cache = CacheConfig(
        dtype="float32",
        block_size=BLOCK,
        gpu_memory_utilization=0.9,
        kv_cache_bytes=None,
        enable_prefix_caching=enable_prefix_caching,
        groups=groups,
        eviction=eviction,
        slots=(state_slots,),
        state_interval=state_interval if state_slots else 0,
    )
    return {
        "scheduling": SchedulingConfig(**scheduling),
        "cache": cache,
        "max_model_len": max_model_len,
        "num_blocks": num_blocks,
        **({"speculation": speculation} if speculation.limit else {}),
    }
