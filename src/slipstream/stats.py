"""Figures that the engine tells of itself: of its adapters, tiers, scheduler and steps, and what a canary said. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

ExpertTokens: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""Index of each layer with experts, and the tokens for which each expert was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBalance:
    """Balance of experts that are dealt out to ranks. `rank_imbalance`: in the recent load the choices of the rank
    with the most over the mean, each layer having a rank with the most; 1: even, or not known yet."""

    moved_total: int = 0  # experts that changed ranks since the start
    rank_imbalance: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStats:
    """How many adapters are where, and totals since the start: read from files, and copied to the device."""

    num_on_device: int = 0
    num_on_host: int = 0
    reads_total: int = 0
    placements_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Blocks of KV cache below the device: what the tiers hold and hold at most, and totals since the start. Rates are the last
    ones measured; 0: none yet."""

    host_bytes: int = 0
    host_limit_bytes: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    disk_is_written: bool = (
        False  # False: another server writes to the folder, and this one only reads
    )
    stored_blocks: int = 0
    stored_bytes: int = 0
    dropped_blocks: int = 0  # that could not be stored: no room, or the disk refused
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    failed_blocks: int = 0  # that were gone or damaged when they were wanted
    queried_tokens: int = 0  # of prompts, that the device's cache did not have
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    declined_tokens: int = 0  # found, and computed, since loading would have taken longer
    late_loads: int = 0  # that a request did not wait for any longer
    host_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """The scheduler's state at a moment, and totals since it started. Counts of tokens and blocks."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0  # that sequences can hold
    num_free_blocks: int = 0
    kv_cache_usage: float = 0.0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # of them found
    num_preemptions: int = 0
    kv_allocated_tokens: int = (
        0  # that the blocks in use have room for, each in the layers of its group
    )
    kv_wasted_tokens: int = 0  # of them allocated and not written
    spec_num_drafts: int = 0  # runs of guessed tokens that steps verified
    spec_draft_tokens: int = 0  # the tokens in them
    spec_accepted_tokens: int = 0  # those that were right
    spec_accepted_by_position: tuple[
        int, ...
    ] = ()  # how often the first of a run was, the second, …
    forced_tokens: int = 0  # that grammars forced, and for which nothing was sampled
    tiers: TierStats | None = None  # None: the device's cache has none below it


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(SchedulerStats):
    """The scheduler's figures and the engine's own. `_s` are seconds. `expert_load` is there if it was asked for."""

    num_steps: int = 0
    step_seconds_total: float = (
        0.0  # of the steps: from the launch, or the end of the step before, to the result
    )
    last_step_age_s: float = 0.0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    uptime_s: float = 0.0
    expert_load: ExpertTokens = ()
    is_sleeping: bool = False
    adapters: AdapterStats | None = None  # None: adapters are not enabled
    expert_balance: ExpertBalance | None = None  # None: no experts are dealt out to ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """The result of a checkpoint's canary at the start: how far this model, with these kernels and this form of the
    cache, is from what was stored when the checkpoint was made (KL in nats, over `num_tokens`)."""

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
