"""What a user can set (`EngineArgs`) and what an engine runs with (`EngineConfig`), as frozen dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from slipstream.errors import OutOfMemoryError
from slipstream.spec.cache import CacheGroup, blocks_of_sequence, longest_sequence
from slipstream.spec.scheme import SCHEMES

DType: TypeAlias = Literal["float32", "bfloat16", "float16"]
KVDType: TypeAlias = Literal["float32", "bfloat16", "float16", "fp8", "int8"]
LoadFormat: TypeAlias = Literal["auto", "safetensors", "gguf", "dummy"]
WeightsCache: TypeAlias = Literal["auto", "off"]
Policy: TypeAlias = Literal["inflight", "dynamic", "static"]
Kernels: TypeAlias = Literal["auto", "reference", "cpu", "torch", "triton"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}

GPU_MEMORY_SHARE = 0.9
BATCH_WINDOW_S = 0.05

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What a device is and has, as `worker.device.detect` found it."""

    device: str  # "cpu" or "cuda:0"
    name: str
    memory_bytes: int  # in all
    free_bytes: int
    best_dtype: DType  # the fastest 16- or 32-bit type, measured on a CPU
    num_threads: int = 1
    compute_capability: tuple[int, int] | None = None
    dtype_reason: str = ""
    isa: str | None = None  # of the C++ kernels, on a CPU where they are built

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")


def setting(default: Any, text: str, *, choices: tuple[str, ...] = (), unset: str = "") -> Any:
    """A field of `EngineArgs`. `text` is its help. If there are `choices`, other values are refused. `unset` says what None
    stands for."""
    return field(default=default, metadata={"help": text, "choices": choices, "unset": unset})


def setting_help(declared: dataclasses.Field[Any]) -> str:
    """A setting's help, with its choices and its default."""
    about, default = declared.metadata, declared.default
    *others, last = about.get("choices") or ("",)
    text = about["help"] + (f": {', '.join(others)} or {last}" if others else "")
    shown = about.get("unset", "") if default in (None, dataclasses.MISSING) else default
    return f"{text} (default: {shown})" if shown != "" else text


def names_the_likely(cls: type[T]) -> type[T]:
    """Let the class's `__init__` answer an unknown name with a TypeError that names the most similar known one."""
    init, known = cls.__init__, [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **values: Any) -> None:
        for name in values.keys() - set(known):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"there is no setting {name!r}{hint}")
        init(self, *args, **values)

    cls.__init__ = checked  # type: ignore[method-assign,assignment]
    return cls


AUTO = "chosen for the model and machine"


@names_the_likely
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """The settings of an engine, as a user gives them. None or "auto" leaves the choice to `resolve`.

    This is the only place where a setting is declared: `LLM(...)` and the command line's options are made from these fields.
    The names are those that vLLM's users know.
    """

    model: str = field(kw_only=False, metadata={"help": "a folder, a GGUF file, or a name that `slipstream pull` knows"})
    tokenizer: str | None = setting(None, "another model's tokenizer, by name or path")
    dtype: str = setting("auto", "type of the computation", choices=("auto", "float32", "bfloat16", "float16"))
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    quantization: str | None = setting(None, f"round weights at load: {', '.join(SCHEMES)}; CPUs have int8 and int4 of these")
    kv_cache_dtype: str = setting("auto", "auto (the checkpoint's), fp8 (GPU) or int8")
    block_size: int | None = setting(None, "tokens in a block of KV cache", unset=AUTO)
    max_model_len: int | None = setting(None, "longest prompt with answer, in tokens", unset=AUTO)
    max_num_seqs: int | None = setting(None, "most sequences in one step", unset=AUTO)
    max_num_batched_tokens: int | None = setting(None, "most tokens in one step", unset=AUTO)
    max_num_mixed_tokens: int | None = setting(
        None,
        "most tokens in a step in which running sequences get their next; bounds the time between tokens",
        unset="max_num_batched_tokens",
    )
    target_itl_ms: float | None = setting(
        None, "milliseconds between tokens that prompts are to leave running sequences; needs chunked prefill", unset="none"
    )
    gpu_memory_utilization: float | None = setting(None, "share of the GPU's memory to use", unset=str(GPU_MEMORY_SHARE))
    kv_cache_bytes: int | None = setting(None, "size of the KV cache, such as 2GiB", unset=AUTO)
    enable_prefix_caching: bool = setting(True, "reuse what prompts begin with alike")
    enable_chunked_prefill: bool = setting(True, "split long prompts over several steps")
    enforce_eager: bool = setting(False, "no CUDA graphs")
    deterministic: bool = setting(
        False, "an answer depends on nothing but its request, whatever else is computed (GPU; slower)"
    )
    dense_copies: bool | None = setting(
        None, "keep 4-bit weights dense as well, for steps of many tokens (GPU)", unset="if a quarter of its memory holds them"
    )
    tensor_parallel_size: int = setting(1, "only 1 so far")
    pipeline_parallel_size: int = setting(1, "only 1 so far")
    speculative_config: dict[str, Any] | None = setting(
        None, 'guess tokens and verify them, such as {"method": "suffix"}; docs/speculation.md', unset="off"
    )
    speculative_model: str | None = setting(None, "short for speculative_config: ngram, suffix, or a draft model")
    num_speculative_tokens: int | None = setting(None, "with speculative_model: tokens to guess", unset="chosen at each step")
    download_dir: str | None = setting(None, "where models are kept, instead of the user's cache")
    seed: int = setting(0, "seed of requests without their own, and of dummy weights")
    load_format: LoadFormat = setting("auto", "dummy makes random weights from a config.json", choices=get_args(LoadFormat))
    weights_cache: WeightsCache = setting(
        "auto", "keep what a start rounds for the next one, where that is faster (CPU)", choices=get_args(WeightsCache)
    )
    skip_tokenizer_init: bool = setting(False, "token ids only, no text")
    scheduling_policy: Policy = setting(
        "inflight", "dynamic and static are baselines to compare with", choices=get_args(Policy)
    )
    batch_window_s: float | None = setting(None, "dynamic: seconds to wait for a batch to fill", unset=str(BATCH_WINDOW_S))
    max_queue: int | None = setting(None, "most requests that wait; beyond it they are refused")
    canary: str = setting(
        "warn", "what to do if the checkpoint's canary finds that it changed here", choices=("off", "warn", "refuse")
    )
    kernels: Kernels = setting("auto", "implementation of the ops", choices=get_args(Kernels))
    tile_table: str = setting("auto", "tiles of the GPU's kernels: auto (yours over those shipped), shipped, none, or a file")
    num_threads: int | None = setting(None, "CPU threads", unset="the cores that this process may use")


@dataclass(frozen=True, slots=True)
class Origin:
    """Who chose a value and why."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    dtype: KVDType
    block_size: int
    gpu_memory_utilization: float
    kv_cache_bytes: int | None
    enable_prefix_caching: bool
    groups: tuple[CacheGroup, ...]  # of the model's layers, each with a block table


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    policy: Policy
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int  # where some sequences decode
    enable_chunked_prefill: bool
    batch_window_s: float
    max_queue: int | None
    target_itl_ms: float | None = None


MOST_STEP_DRAFTS = 512
"""The most guessed tokens of a step. Each has logits: 512 of a vocabulary of 128k take 400 MB, and no step wants more."""

MOST_DRAFTS = 16
"""Drafts of a request in a step, where the number is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How tokens are guessed. None of `num_speculative_tokens`: as many as pay, chosen at each step."""

    method: Literal["ngram", "suffix", "draft", "eagle3", "medusa", "mtp"]
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int = 2  # ngram: lengths of the runs that are looked up
    prompt_lookup_max: int = 32
    model: str | None = None  # draft: the smaller model; eagle3, medusa: the head
    quantization: str | None = None  # the scheme that its weights are rounded by at load
    most_drafts: int = MOST_DRAFTS  # of a request in a step; a head may have fewer

    @property
    def by_model(self) -> bool:
        """The worker proposes, with weights."""
        return self.method not in ("ngram", "suffix")

    @property
    def limit(self) -> int:
        """The most drafts of a request in a step."""
        return self.num_speculative_tokens or self.most_drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    info: DeviceInfo
    kernels: Kernels
    tile_table: str  # auto, shipped, none, or a path; "none" where there are no tiles
    enforce_eager: bool
    deterministic: bool
    dense_copies: bool  # of 4-bit weights, for steps of many tokens
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: ModelConfig
    cache: CacheConfig
    scheduling: SchedulingConfig
    device: DeviceConfig
    speculation: SpeculationConfig | None = None
    origins: dict[str, Origin] = field(default_factory=dict)

    @property
    def max_blocks_per_seq(self) -> int:
        """The width of a block table: a prompt with its answer, or one of the two where an encoder reads the prompt."""
        return -(-self.model.max_model_len // self.cache.block_size)

    @property
    def max_num_sampled(self) -> int:
        """The most tokens that a step samples: one of each sequence, and one behind each draft."""
        drafts = 0 if self.speculation is None else self.speculation.limit
        num_seqs = self.scheduling.max_num_seqs
        return min(num_seqs + min(num_seqs * drafts, MOST_STEP_DRAFTS), self.scheduling.max_num_mixed_tokens)

    @property
    def longest_seq_blocks(self) -> int:
        """The most blocks that a sequence holds, in all groups together."""
        step = self.scheduling.max_num_batched_tokens
        return blocks_of_sequence(self.cache.groups, self.model.max_model_len, self.cache.block_size, step)

    def with_memory_limits(self, num_blocks: int, block_bytes: int) -> EngineConfig:
        """Fit `max_model_len` to a cache of `num_blocks` usable blocks: lower it if it was left open, else OutOfMemoryError."""
        wanted, groups = self.model.max_model_len, self.cache.groups
        step = self.scheduling.max_num_batched_tokens
        capacity = longest_sequence(groups, num_blocks, self.cache.block_size, step, wanted)
        if capacity >= wanted:
            return self
        need = self.longest_seq_blocks * block_bytes
        more = "gpu_memory_utilization or kv_cache_bytes" if self.device.info.is_cuda else "kv_cache_bytes"
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
        origin = Origin(capacity, "memory", f"lowered from {wanted}: the KV cache holds {capacity} tokens{each}")
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, max_model_len=capacity),
            origins={**self.origins, "max_model_len": origin},
        )
