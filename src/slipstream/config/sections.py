"""The settings of a running engine (`EngineConfig`), section by section, as frozen dataclasses.

`resolve` computes them from the user's settings (`settings.py`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slipstream.config.forms import (
    MAX_DRAFTS,
    MAX_STEP_DRAFTS,
    DraftSettings,
    HeadDrafts,
    ModelDrafts,
    MTPDrafts,
    NoDrafts,
    Offload,
    ParallelConfig,
    SpeculationConfig,
)
from slipstream.config.settings import (
    DeviceInfo,
    DType,
    Kernels,
    KVDType,
    LoadFormat,
    Policy,
    WeightsCache,
)
from slipstream.errors import OutOfMemoryError
from slipstream.params.lora_request import LoRARequest
from slipstream.spec.cache import SLOT_KINDS, CacheGroup, blocks_of_sequence, longest_sequence
from slipstream.spec.drafts.heads import CONTINUES


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a value: who chose it and why."""

    value: Any
    source: Literal["user", "model", "device", "default", "memory"]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model: str
    path: Path
    tokenizer: str | None
    dtype: DType
    quantization: str | None  # a name in spec.scheme.SCHEMES
    max_model_len: int
    load_format: LoadFormat
    weights_cache: WeightsCache
    seed: int
    skip_tokenizer_init: bool
    offload: Offload
    routed_experts: bool = False  # return the experts of each token


SLOTS_TO_FIT = 1
"""Number of slots before the cache is sized: placeholder for as many as memory allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEventSettings:
    """Address and topic for published events of the prefix cache (`engine/kv_events.py`)."""

    endpoint: str = "tcp://127.0.0.1:5557"  # anyone who can connect can read all prompts
    topic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Address at which other engines get blocks from this one, and bytes of memory reserved for them."""

    address: str
    limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    dtype: KVDType
    block_size: int  # tokens per block of the pool, divided among `context_ranks`
    gpu_memory_utilization: float
    kv_cache_bytes: int | None
    enable_prefix_caching: bool
    groups: tuple[CacheGroup, ...]  # of layers, each with a block table
    host_bytes: int | None = None  # of the KV tiers below the device's cache
    disk_bytes: int | None = None
    disk_path: str | None = None
    slots: tuple[int, ...] = (0,) * len(SLOT_KINDS)  # of each kind, the null slot included; 0: none
    state_interval: int = 0  # interval in tokens between stored states of a prompt
    eviction: str = "value"  # or "lru"
    attention_tokens: float = math.inf  # `spec.cache.attention_depth`
    events: CacheEventSettings | None = None  # None: no events are published
    handover: Handover | None = None  # None: blocks go to no other engine
    context_ranks: int = 1  # ranks that divide a request's keys and values by tokens

    @property
    def has_tiers(self) -> bool:
        """Whether blocks are copied to host memory, a disk or other engines."""
        return (
            self.host_bytes is not None or self.disk_bytes is not None or self.handover is not None
        )

    @property
    def rank_block_size(self) -> int:
        """Number of tokens of a block that one rank stores."""
        return self.block_size // self.context_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    policy: Policy
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int  # in steps with decodes
    enable_chunked_prefill: bool
    batch_window_s: float
    max_queue: int | None
    target_itl_ms: float | None = None
    # Maximum prompt tokens of a step with decodes while few requests wait; None: unlimited.
    mixed_chunk: int | None = None
    # Number of pipeline stages, which compute this many steps of different requests at once; 1: no
    # pipeline.
    pipeline_steps: int = 1
    # Each rank has its own requests and KV cache; the other numbers are totals of all ranks.
    num_ranks: int = 1
    # Maximum per rank and step: sequences, tokens, and tokens if sequences decode.
    seqs_of_rank: int = field(init=False)
    tokens_of_rank: int = field(init=False)
    mixed_tokens_of_rank: int = field(init=False)

    def __post_init__(self) -> None:
        for name, whole in (
            ("seqs_of_rank", self.max_num_seqs),
            ("tokens_of_rank", self.max_num_batched_tokens),
            ("mixed_tokens_of_rank", self.max_num_mixed_tokens),
        ):
            object.__setattr__(self, name, -(-whole // self.num_ranks))


def drafts_with_slots(num_slots: int, num_seqs: int) -> int:
    """Maximum drafts of a sequence in a step of a model with slots: a sequence has two slots, and one more for each
    draft. A quarter of the slots is left for prompts to continue from, unless that allows no draft."""
    return max(1, num_slots * 3 // 4 // num_seqs - 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRASettings:
    """Limits on adapters: number in a step, rank, and number in host memory."""

    max_loras: int = 8
    max_lora_rank: int = 16
    max_cpu_loras: int = 32
    modules: tuple[tuple[str, str], ...] = ()  # (name, folder) of adapters loaded at the start

    @property
    def requests(self) -> list[LoRARequest]:
        """Requests for the adapters that are loaded at the start."""
        return [LoRARequest(name, i, path) for i, (name, path) in enumerate(self.modules, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings:
    """Limits on a prompt's images or audio, and on their cached embeddings."""

    max_inputs: int = 16
    cache_bytes: int = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    info: DeviceInfo
    kernels: Kernels
    tile_table: str  # auto, shipped, none, or a path; "none" for devices without tiles
    enforce_eager: bool
    deterministic: bool
    dense_copies: bool  # of 4-bit weights (GPU) and of sparse ones (CPU), for steps of many tokens
    num_threads: int
    fixed_threads: bool  # set by the user, so not changed while running

    @property
    def has_graphs(self) -> bool:
        """Whether steps run in graphs of certain sizes (`costs/graph_sizes.py`)."""
        return self.info.is_cuda and not self.enforce_eager


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: ModelConfig
    cache: CacheConfig
    scheduling: SchedulingConfig
    device: DeviceConfig
    speculation: SpeculationConfig
    lora: LoRASettings | None = None  # None: no adapters
    media: MediaSettings | None = None  # None: the model accepts no images and no audio
    parallel: ParallelConfig
    origins: dict[str, Origin] = field(default_factory=dict)

    @property
    def slot_columns(self) -> list[int]:
        """Number of slots of each kind in a row of the worker: one to read, and one to write for
        each token that a step samples."""
        return [2 + self.speculation.limit if slots else 0 for slots in self.cache.slots]

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of a block table: a prompt with its answer, or the longer of the two if an encoder
        reads the prompt."""
        longest = max(self.model.max_model_len, *(g.num_read or 0 for g in self.cache.groups))
        return -(-longest // self.cache.block_size)

    @property
    def drafts_ahead(self) -> bool:
        """Whether the drafter continues before the host knows which drafts are accepted: a chain of
        drafts in a graph, on a GPU."""
        match self.speculation:
            case ModelDrafts() | MTPDrafts():
                return self.device.has_graphs
            case HeadDrafts(method=method):
                return CONTINUES[method] and self.device.has_graphs
        return False

    def with_most_drafts(self, most: int | None) -> EngineConfig:
        """Config with at most `most` drafts of a request in a step, if the engine chooses the
        number."""
        if most is None or isinstance(self.speculation, NoDrafts):
            return self
        fewer = dataclasses.replace(self.speculation, most_drafts=min(most, MAX_DRAFTS))
        return dataclasses.replace(self, speculation=fewer)

    @property
    def of_rank(self) -> EngineConfig:
        """Config of one rank: with data parallelism, its part of a step."""
        whole = self.scheduling
        if whole.num_ranks == 1:
            return self
        share = dataclasses.replace(
            whole,
            max_num_seqs=whole.seqs_of_rank,
            max_num_batched_tokens=whole.tokens_of_rank,
            max_num_mixed_tokens=whole.mixed_tokens_of_rank,
            num_ranks=1,
        )
        return dataclasses.replace(self, scheduling=share)

    @property
    def max_num_sampled(self) -> int:
        """Maximum number of tokens that a step samples: one for each sequence, and one for each
        draft."""
        num_seqs = self.scheduling.max_num_seqs
        return min(
            num_seqs + min(num_seqs * self.speculation.limit, MAX_STEP_DRAFTS),
            self.scheduling.max_num_mixed_tokens,
        )

    @property
    def longest_seq_blocks(self) -> int:
        """Maximum number of blocks of a sequence, in all groups together."""
        step = self.scheduling.tokens_of_rank
        return blocks_of_sequence(
            self.cache.groups, self.model.max_model_len, self.cache.block_size, step
        )

    def with_memory_limits(
        self, num_blocks: int, block_bytes: int, slots: Sequence[int] = ()
    ) -> EngineConfig:
        """Fit `max_model_len` to a cache of `num_blocks` usable blocks: lower it if it was left
        open, otherwise raise OutOfMemoryError. There are `slots` of each kind, which bound the
        drafts of a step if their number is chosen."""
        if slots and tuple(slots) != self.cache.slots:
            cache = dataclasses.replace(self.cache, slots=tuple(slots))
            return dataclasses.replace(self, cache=cache).with_memory_limits(
                num_blocks, block_bytes, slots
            )
        if any(slots) and isinstance(drafts := self.speculation, DraftSettings):
            fewest = min(filter(None, slots))
            most = drafts_with_slots(fewest, self.scheduling.seqs_of_rank)
            if drafts.num_speculative_tokens is None and most < drafts.most_drafts:
                return self.with_most_drafts(most).with_memory_limits(
                    num_blocks, block_bytes, slots
                )
        wanted, groups = self.model.max_model_len, self.cache.groups
        step = self.scheduling.tokens_of_rank
        capacity = longest_sequence(groups, num_blocks, self.cache.block_size, step, wanted)
        if capacity >= wanted:
            return self
        need = self.longest_seq_blocks * block_bytes
        more = (
            "gpu_memory_utilization or kv_cache_bytes"
            if self.device.info.is_cuda
            else "kv_cache_bytes"
        )
        have = num_blocks * block_bytes
        each = " of prompt and of answer" if any(group.kind == "cross" for group in groups) else ""
        unit, size = ("GiB", 2**30) if need >= 2**30 else ("MiB", 2**20)
        if self.origins["max_model_len"].source == "user":
            raise OutOfMemoryError(
                f"max_model_len={wanted} needs {need / size:.2f} {unit} of KV cache for one sequence and there is room for "
                f"{have / size:.2f} {unit} ({capacity} tokens{each}); lower max_model_len or give it more memory ({more})",
                field="max_model_len",
            )
        if capacity < self.cache.block_size:
            raise OutOfMemoryError(
                f"no memory is left for the KV cache; use a smaller model or dtype, or raise {more}",
                field="kv_cache_bytes",
            )
        origin = Origin(
            capacity, "memory", f"lowered from {wanted}: the KV cache holds {capacity} tokens{each}"
        )
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, max_model_len=capacity),
            origins={**self.origins, "max_model_len": origin},
        )
