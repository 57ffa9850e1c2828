"""The settings of a user (`EngineArgs`) and of a running engine (`EngineConfig`), as frozen dataclasses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from slipstream.arguments import likely_value, suggesting_init, types_of, wrong_type
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
from slipstream.errors import ConfigError, OutOfMemoryError
from slipstream.spec.cache import CacheGroup, blocks_of_sequence, longest_sequence
from slipstream.spec.scheme import SCHEMES
from slipstream.types import LoRARequest

DType: TypeAlias = Literal["float32", "bfloat16", "float16"]
KVDType: TypeAlias = Literal["float32", "bfloat16", "float16", "fp8", "int8"]
LoadFormat: TypeAlias = Literal["auto", "safetensors", "gguf", "dummy"]
WeightsCache: TypeAlias = Literal["auto", "off"]
Policy: TypeAlias = Literal["inflight", "dynamic", "static"]
Kernels: TypeAlias = Literal["auto", "reference", "cpu", "torch", "triton"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}

GPU_MEMORY_SHARE = 0.9
BATCH_WINDOW_S = 0.05
MIXED_CHUNK = 512
"""Prompt tokens in a step with decodes. On GPUs their products take about three times as long as
reading the weights, which a decode step does anyway. On CPUs no step has more by default."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """The kind, memory and abilities of a device, as found by `worker.device.detect`."""

    device: str  # "cpu" or "cuda:0"
    name: str
    memory_bytes: int  # in total
    free_bytes: int
    best_dtype: DType  # the fastest 16- or 32-bit type, measured on a CPU
    num_threads: int = 1
    compute_capability: tuple[int, int] | None = None
    dtype_reason: str = ""
    isa: str | None = None  # of the C++ kernels, on a CPU with built kernels

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")


def setting(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    unset: str = "",
    rare: bool = False,
) -> Any:
    """A field of `EngineArgs`. `text` is its help. With `choices`, other values are refused.
    `unset` explains None. The command line shows a `rare` setting only in --help-all."""
    about = {"help": text, "choices": choices, "unset": unset, "rare": rare}
    return field(default=default, metadata=about)


def setting_help(declared: dataclasses.Field[Any]) -> str:
    """A setting's help, with its choices and its default."""
    about, default = declared.metadata, declared.default
    *others, last = about.get("choices") or ("",)
    text = about["help"] + (f": {', '.join(others)} or {last}" if others else "")
    shown = about.get("unset", "") if default in (None, dataclasses.MISSING) else default
    return f"{text} (default: {shown})" if shown != "" else text


AUTO = "chosen for the model and machine"


@partial(suggesting_init, what="setting")
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """The settings of an engine, as a user gives them. None or "auto" leaves the choice to
    `resolve`.

    This is the only declaration of a setting: `LLM(...)` and the command line's options are made
    from these fields. Names are those that vLLM's users know.
    """

    model: str = field(
        kw_only=False,
        metadata={"help": "a folder, a GGUF file, or a name that `slipstream pull` knows"},
    )
    tokenizer: str | None = setting(None, "another model's tokenizer, by name or path", rare=True)
    chat_template: str | None = setting(
        None, "a file with a chat template (Jinja), instead of the model's"
    )
    dtype: str = setting(
        "auto", "type of the computation", choices=("auto", "float32", "bfloat16", "float16")
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    quantization: str | None = setting(
        None, f"round weights at load: {', '.join(SCHEMES)}; CPUs have int8 and int4 of these"
    )
    kv_cache_dtype: str = setting("auto", "auto (the checkpoint's), fp8 (GPU) or int8")
    block_size: int | None = setting(None, "tokens in a block of KV cache", unset=AUTO, rare=True)
    max_model_len: int | None = setting(None, "longest prompt with answer, in tokens", unset=AUTO)
    max_num_seqs: int | None = setting(None, "most sequences in one step", unset=AUTO)
    max_num_batched_tokens: int | None = setting(None, "most tokens in one step", unset=AUTO)
    max_num_mixed_tokens: int | None = setting(
        None,
        "most tokens in a step in which running sequences get their next; bounds the time between tokens",
        unset="max_num_batched_tokens",
        rare=True,
    )
    target_itl_ms: float | None = setting(
        None,
        "milliseconds between tokens that prompts are to leave running sequences; needs chunked prefill",
        unset="none",
    )
    gpu_memory_utilization: float | None = setting(
        None, "share of the GPU's memory to use", unset=str(GPU_MEMORY_SHARE)
    )
    kv_cache_bytes: int | None = setting(None, "size of the KV cache, such as 2GiB", unset=AUTO)
    state_slots: int | None = setting(
        None,
        "states of recurrent layers in memory: of running sequences, and those that later prompts continue from",
        unset=AUTO,
        rare=True,
    )
    weights_bytes: int | None = setting(
        None,
        "most bytes of weights in the device's memory; other layers are read in each step (docs/offload.md)",
        unset="all",
    )
    host_experts: str | int | None = setting(
        None,
        "mixtures whose experts stay in the host's memory and are computed there, next to a GPU: a number of layers, all, or "
        "auto (as many as don't fit); docs/offload.md",
        unset="none",
    )
    cpu_layers: str | int | None = setting(
        None,
        "layers, the first ones, that the host's CPU holds and computes, next to a GPU: a number, or auto (as few as leave "
        "room on the GPU); docs/offload.md",
        unset="none",
    )
    hot_expert_bytes: int | None = setting(
        None,
        "with host_experts: the GPU's memory for single experts, those that tokens choose most",
        unset="none",
        rare=True,
    )
    kv_host_bytes: int | None = setting(
        None, "the host's memory for blocks that leave the GPU's cache", unset="none"
    )
    kv_disk_bytes: int | None = setting(
        None, "room on a disk for blocks that leave the cache, such as 50GiB", unset="none"
    )
    kv_disk_path: str | None = setting(
        None, "the folder for kv_disk_bytes; conversations resume from it after a restart"
    )
    enable_prefix_caching: bool = setting(True, "reuse what prompts begin with alike")
    cache_eviction: str = setting(
        "value",
        "order in which cached blocks are evicted: by the chance that they are used again and what they cost, or the least "
        "recently used first",
        choices=("value", "lru"),
        rare=True,
    )
    enable_chunked_prefill: bool = setting(True, "split long prompts over several steps", rare=True)
    enforce_eager: bool = setting(False, "no CUDA graphs", rare=True)
    deterministic: bool = setting(
        False,
        "an answer depends on nothing but its request, whatever else is computed (GPU; slower)",
        rare=True,
    )
    dense_copies: bool | None = setting(
        None,
        "for steps of many tokens keep dense as well: a GPU 4-bit weights, a CPU sparse int8 ones",
        unset="if a quarter of its memory holds them; on a CPU if more than 8 sequences may run",
        rare=True,
    )
    tensor_parallel_size: int = setting(1, "devices that share each layer out; docs/parallelism.md")
    pipeline_parallel_size: int = setting(
        1, "devices, or groups of them, that have some of the layers each"
    )
    pipeline_layers: str | None = setting(
        None, "layers of each pipeline stage, such as 10,20", unset="about even", rare=True
    )
    expert_parallel_size: int = setting(
        1,
        "devices over which a mixture's experts are dealt out, each one whole; without tensor_parallel_size requests are dealt "
        "out, too, with their keys and values",
    )
    sequence_parallel: bool = setting(
        False,
        "with tensor_parallel_size: long steps share norms and residuals out by tokens, too",
        rare=True,
    )
    rank_address: str | None = setting(
        None,
        "HOST:PORT of this host, where ranks of other hosts come to; docs/parallelism.md",
        unset="all ranks are here",
        rare=True,
    )
    local_ranks: int | None = setting(
        None, "with rank_address: how many ranks this host has", unset="all", rare=True
    )
    speculative_config: dict[str, Any] | None = setting(
        None,
        'guess tokens and verify them, such as {"method": "suffix"}; docs/speculation.md',
        unset="off",
    )
    speculative_model: str | None = setting(
        None, "short for speculative_config: ngram, suffix, or a draft model"
    )
    num_speculative_tokens: int | None = setting(
        None, "with speculative_model: tokens to guess", unset="chosen at each step"
    )
    enable_lora: bool = setting(False, "take adapters (LoRA) with requests; docs/adapters.md")
    max_loras: int | None = setting(
        None, "most adapters that a step computes with", unset="8", rare=True
    )
    max_lora_rank: int | None = setting(None, "highest rank of an adapter", unset="16", rare=True)
    max_cpu_loras: int | None = setting(
        None, "most adapters kept in the host's memory", unset="4 times max_loras", rare=True
    )
    lora_modules: dict[str, str] | None = setting(
        None, "adapters that are there from the start: folders by name", unset="none"
    )
    max_images: int | None = setting(
        None,
        "most pictures of a prompt, of models that see; 0: only text, and no image encoder is loaded",
        unset="16",
    )
    image_cache_bytes: int | None = setting(
        None,
        "embeddings of pictures that are kept, such as 64MiB",
        unset="256MiB on a GPU, else 64MiB",
        rare=True,
    )
    download_dir: str | None = setting(None, "where models are kept, instead of the user's cache")
    seed: int = setting(0, "seed of requests without their own, and of dummy weights", rare=True)
    load_format: LoadFormat = setting(
        "auto",
        "dummy makes random weights from a config.json",
        choices=get_args(LoadFormat),
        rare=True,
    )
    weights_cache: WeightsCache = setting(
        "auto",
        "keep what a start rounds for the next one, where that is faster (CPU)",
        choices=get_args(WeightsCache),
        rare=True,
    )
    skip_tokenizer_init: bool = setting(False, "token ids only, no text", rare=True)
    scheduling_policy: Policy = setting(
        "inflight",
        "dynamic and static are baselines to compare with",
        choices=get_args(Policy),
        rare=True,
    )
    batch_window_s: float | None = setting(
        None, "dynamic: seconds to wait for a batch to fill", unset=str(BATCH_WINDOW_S), rare=True
    )
    max_queue: int | None = setting(None, "most requests that wait; beyond it they are refused")
    canary: str = setting(
        "warn",
        "what to do if the checkpoint's canary finds that it changed here",
        choices=("off", "warn", "refuse"),
        rare=True,
    )
    kernels: Kernels = setting(
        "auto", "implementation of the ops", choices=get_args(Kernels), rare=True
    )
    tile_table: str = setting(
        "auto",
        "tiles of the GPU's kernels: auto (yours over those shipped), shipped, none, or a file",
        rare=True,
    )
    num_threads: int | None = setting(
        None,
        "CPU threads, always so many",
        unset="the fastest number, fewer while other programs take cores",
    )

    def __post_init__(self) -> None:
        """Turn paths into texts, and check types and choices: some settings are read before
        `resolve` looks at them. An int is accepted for a float."""
        hints = types_of(EngineArgs)
        for declared in dataclasses.fields(self):
            name, value, hint = declared.name, getattr(self, declared.name), hints[declared.name]
            if isinstance(value, Path) and not wrong_type("", hint):
                value = str(value)
                object.__setattr__(self, name, value)
            if wanted := wrong_type(value, hint):
                raise ConfigError(f"{name} must be {wanted}, got {value!r}", field=name)
            if choices := declared.metadata.get("choices"):
                one_of(name, value, choices)


def num_ranks(args: EngineArgs) -> int:
    """The number of processes that compute the model. ConfigError if the settings contradict each
    other."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        size = getattr(args, name)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{name} must be a whole number above 0, got {size!r}", field=name)
    tensor, experts = args.tensor_parallel_size, args.expert_parallel_size
    if tensor > 1 and experts > 1 and tensor != experts:
        raise ConfigError(
            f"expert_parallel_size={experts} with tensor_parallel_size={tensor}: the same ranks have both, so the two must be "
            "equal, or one of them 1",
            field="expert_parallel_size",
        )
    # A host's CPU and a GPU are two stages.
    return max(tensor, experts) * (args.pipeline_parallel_size if args.cpu_layers is None else 2)


def split_setting(args: EngineArgs) -> str:
    """The setting that asks for several ranks, for messages."""
    names = ("tensor_parallel_size", "expert_parallel_size", "pipeline_parallel_size")
    return (
        "cpu_layers"
        if args.cpu_layers is not None
        else next((n for n in names if getattr(args, n) > 1), names[0])
    )


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


STATES_TO_FIT = 1
"""Number of state slots that stands for as many as memory allows, until the cache is sized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    dtype: KVDType
    block_size: int
    gpu_memory_utilization: float
    kv_cache_bytes: int | None
    enable_prefix_caching: bool
    groups: tuple[CacheGroup, ...]  # of the model's layers, each with a block table
    host_bytes: int | None = None  # of the tiers below the device's cache
    disk_bytes: int | None = None
    disk_path: str | None = None
    state_slots: int = (
        0  # for states of recurrent layers, the null slot included; 0 without such layers
    )
    state_interval: int = 0  # tokens of a prompt between kept states
    eviction: str = "value"  # or "lru"
    attention_tokens: float = (
        32768.0  # depth at which attention costs as much as the rest of a token
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    policy: Policy
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int  # in steps in which sequences decode
    enable_chunked_prefill: bool
    batch_window_s: float
    max_queue: int | None
    target_itl_ms: float | None = None
    # Prompt tokens of a step in which sequences decode, while few requests wait; None: unlimited.
    mixed_chunk: int | None = None
    # Stages of a pipeline, which work on this many steps at once, of different requests; 1: no
    # pipeline.
    pipeline_steps: int = 1
    # Each has its own requests and KV cache; the other numbers are totals of all ranks.
    num_ranks: int = 1

    @property
    def seqs_of_rank(self) -> int:
        """Most sequences in one step of a rank."""
        return -(-self.max_num_seqs // self.num_ranks)

    @property
    def tokens_of_rank(self) -> int:
        """Most tokens in one step of a rank."""
        return -(-self.max_num_batched_tokens // self.num_ranks)

    @property
    def mixed_tokens_of_rank(self) -> int:
        """Most tokens of a rank in a step in which sequences decode, on any rank."""
        return -(-self.max_num_mixed_tokens // self.num_ranks)


def drafts_with_states(num_states: int, num_seqs: int) -> int:
    """Most drafts of a sequence in a step of a model with recurrent layers: a sequence has two states and one for each draft.
    A quarter of the states stays for prompts to continue from, unless that leaves no draft."""
    return max(1, num_states * 3 // 4 // num_seqs - 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRASettings:
    """Bounds of adapters: in a step, of their ranks, and on the host."""

    max_loras: int = 8
    max_lora_rank: int = 16
    max_cpu_loras: int = 32
    modules: tuple[tuple[str, str], ...] = ()  # (name, folder) from the start

    @property
    def requests(self) -> list[LoRARequest]:
        """The adapters that are loaded at the start."""
        return [LoRARequest(name, i, path) for i, (name, path) in enumerate(self.modules, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """Bounds of pictures: of a prompt, and of their cached embeddings."""

    max_images: int = 16
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
    fixed_threads: bool  # the user chose the number, so it does not change while running

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
    images: ImageSettings | None = None  # None: the model takes no pictures
    parallel: ParallelConfig
    origins: dict[str, Origin] = field(default_factory=dict)

    @property
    def state_columns(self) -> int:
        """Slots that a row names: the one to read, and one to write for each token that a step samples; 0 without states."""
        return 2 + self.speculation.limit if self.cache.state_slots else 0

    @property
    def max_blocks_per_seq(self) -> int:
        """The width of a block table: a prompt with its answer, or the longer of the two if an
        encoder reads the prompt."""
        longest = max(self.model.max_model_len, *(g.num_read or 0 for g in self.cache.groups))
        return -(-longest // self.cache.block_size)

    @property
    def drafts_ahead(self) -> bool:
        """Whether the drafter continues before the host knows which drafts were right: a chain in a
        graph, on a GPU."""
        match self.speculation:
            case ModelDrafts() | MTPDrafts() | HeadDrafts(method="eagle" | "eagle3"):
                return self.device.has_graphs
        return False

    def with_most_drafts(self, most: int | None) -> EngineConfig:
        """The settings with at most `most` drafts of a request in a step, if the number is
        chosen."""
        if most is None or isinstance(self.speculation, NoDrafts):
            return self
        fewer = dataclasses.replace(self.speculation, most_drafts=min(most, MAX_DRAFTS))
        return dataclasses.replace(self, speculation=fewer)

    @property
    def of_rank(self) -> EngineConfig:
        """The settings of one rank: if requests are distributed, its share of a step."""
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
        """Most tokens that a step samples: one for each sequence, and one for each draft."""
        num_seqs = self.scheduling.max_num_seqs
        return min(
            num_seqs + min(num_seqs * self.speculation.limit, MAX_STEP_DRAFTS),
            self.scheduling.max_num_mixed_tokens,
        )

    @property
    def longest_seq_blocks(self) -> int:
        """Most blocks that a sequence holds, in all groups together."""
        step = self.scheduling.tokens_of_rank
        return blocks_of_sequence(
            self.cache.groups, self.model.max_model_len, self.cache.block_size, step
        )

    def with_memory_limits(
        self, num_blocks: int, block_bytes: int, num_states: int = 0
    ) -> EngineConfig:
        """Fit `max_model_len` to a cache of `num_blocks` usable blocks: lower it if it was left
        open, otherwise raise OutOfMemoryError. Recurrent layers have `num_states` slots, which
        bound the drafts of a step if their number is chosen."""
        if num_states != self.cache.state_slots:
            cache = dataclasses.replace(self.cache, state_slots=num_states)
            return dataclasses.replace(self, cache=cache).with_memory_limits(
                num_blocks, block_bytes, num_states
            )
        if num_states and isinstance(drafts := self.speculation, DraftSettings):
            most = drafts_with_states(num_states, self.scheduling.seqs_of_rank)
            if drafts.num_speculative_tokens is None and most < drafts.most_drafts:
                return self.with_most_drafts(most).with_memory_limits(
                    num_blocks, block_bytes, num_states
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
        if self.origins["max_model_len"].source == "user":
            raise OutOfMemoryError(
                f"max_model_len={wanted} needs {need / 2**30:.2f} GiB of KV cache for one sequence and there is room for "
                f"{have / 2**30:.2f} GiB ({capacity} tokens{each}); lower max_model_len or give the cache more memory ({more})",
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


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError with the likely value if `value` is not allowed."""
    if value not in allowed:
        what = f"{name}={value!r} is not one of {', '.join(allowed)}{likely_value(value, allowed)}"
        raise ConfigError(what, field=name)
