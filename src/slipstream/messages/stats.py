"""Statistics of the engine: adapters, tiers, scheduler, steps, and the result of a canary. No
torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

ExpertTokens: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""(index of a layer with experts, the number of tokens that chose each expert), for each such
layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBalance:
    """Load balance of experts that are distributed over ranks.

    `rank_imbalance`: in the recent load, choices of each layer's busiest rank divided by the mean
    of all ranks; 1: even, or unknown yet.
    """

    moved_total: int = 0  # experts moved to another rank since the start
    rank_imbalance: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStats:
    """Number of adapters on the device and on the host, and totals since the start: reads from
    files, and copies to the device."""

    num_on_device: int = 0
    num_on_host: int = 0
    reads_total: int = 0
    placements_total: int = 0
    max_on_device: int = 0
    names_on_device: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """KV cache blocks in tiers below the device: bytes in use, and totals since the start. Rates
    are the last measured ones; 0: none yet."""

    host_bytes: int = 0
    disk_bytes: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0
    dropped_blocks: int = 0  # not stored: no space, or a disk error
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    failed_blocks: int = 0  # missing or damaged when they were needed
    queried_tokens: int = 0  # prompt tokens missing in the device's cache
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    declined_tokens: int = 0  # found, but recomputed because loading takes longer
    late_loads: int = 0  # for which a request stopped waiting
    prefetched_tokens: int = 0  # of pausing sessions, loaded back to the device
    prefetch_hit_tokens: int = 0  # of these, used by the session's next request
    handed_blocks: int = 0  # put into the exchange for other engines
    handed_bytes: int = 0
    peer_hit_tokens: int = 0  # prompt tokens computed by other engines
    exchange_bytes: int = 0
    exchange_limit_bytes: int = 0
    expired_blocks: int = 0  # not requested in time, or evicted
    host_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0
    peer_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """The scheduler's current state, and totals since its start, in tokens and blocks."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0  # usable by sequences
    num_free_blocks: int = 0
    kv_cache_usage: float = 0.0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # tokens of these that were found
    num_preemptions: int = 0
    # Capacity in tokens of the blocks in use, each in its group's layers.
    kv_allocated_tokens: int = 0
    kv_wasted_tokens: int = 0  # allocated capacity that is not written
    spec_num_drafts: int = 0  # runs of proposed tokens that steps verified
    spec_draft_tokens: int = 0  # tokens in these runs
    spec_accepted_tokens: int = 0  # accepted ones
    # Accepted tokens by their position in the run.
    spec_accepted_by_position: tuple[int, ...] = ()
    forced_tokens: int = 0  # determined by grammars without sampling
    tiers: TierStats | None = None  # None: there are no tiers below the device


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(SchedulerStats):
    """Statistics of the scheduler and the engine. `_s` are seconds. `expert_load` is collected on
    request. `waiting_adapters`: names of adapters that only waiting requests use."""

    num_steps: int = 0
    # From a step's launch, or the end of the previous step, to its result.
    step_seconds_total: float = 0.0
    last_step_age_s: float = 0.0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    uptime_s: float = 0.0
    expert_load: ExpertTokens = ()
    is_sleeping: bool = False
    is_paused: bool = False  # no steps run until it is resumed
    weight_version: str = ""  # empty: these weights don't change in place
    adapters: AdapterStats | None = None  # None: adapters are not enabled
    waiting_adapters: tuple[str, ...] = ()
    block_size: int = 0  # tokens of a KV block
    expert_balance: ExpertBalance | None = None  # None: experts are not distributed over ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """The result of a checkpoint's canary at the start.

    It compares this model's logits, with these kernels and this cache format, to those stored when
    the checkpoint was made (KL in nats, over `num_tokens`).
    """

    ok: bool
    kl_mean: float
    kl_max: float
    top1_agreement: float
    limit: float  # for kl_mean
    num_tokens: int

    def describe(self) -> str:
        verdict = (
            "sings as it should"
            if self.ok
            else "is dead: the model gives something else here than where it was made"
        )
        return (
            f"the checkpoint's canary {verdict} (mean KL {self.kl_mean:.4g} nats, {self.limit:g} at most; the same likeliest "
            f"token at {self.top1_agreement:.0%} of {self.num_tokens})"
        )
