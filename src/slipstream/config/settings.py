"""The user's settings (`EngineArgs`). `resolve` computes a running engine's settings from them (`sections.py`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from slipstream.base.arguments import likely_value, types_of, wrong_type
from slipstream.base.suggesting import suggesting_init
from slipstream.errors import ConfigError
from slipstream.spec.layers import INT4_BYTES
from slipstream.spec.scheme import SCHEMES

DType: TypeAlias = Literal["float32", "bfloat16", "float16"]
KVDType: TypeAlias = Literal["float32", "bfloat16", "float16", "fp8", "int8", "int4"]
LoadFormat: TypeAlias = Literal["auto", "safetensors", "gguf", "dummy"]
WeightsCache: TypeAlias = Literal["auto", "off"]
Policy: TypeAlias = Literal["inflight", "dynamic", "static"]
Kernels: TypeAlias = Literal["auto", "reference", "cpu", "torch", "triton"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
KV_BYTES: dict[str, float] = {**DTYPE_BYTES, "int4": INT4_BYTES}
"""Bytes per element of each cache dtype, for the memory ledger (`AttentionSpec.cached_bytes`)."""

GPU_MEMORY_SHARE = 0.9
BATCH_WINDOW_S = 0.05
MIXED_CHUNK = 512
"""Prompt tokens in a step with decodes. On GPUs their linear layers take about three times as long
as reading the weights, which a decode step does anyway. On CPUs no step has more by default."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """Kind, memory and capabilities of a device, as found by `worker.device.detect`."""

    device: str  # "cpu", "cuda:0", or "meta": a described GPU (`platform/meta.py`)
    name: str
    memory_bytes: int  # in total
    free_bytes: int
    best_dtype: DType  # the fastest 16- or 32-bit dtype, measured on a CPU
    num_threads: int = 1
    compute_capability: tuple[int, int] | None = None
    dtype_reason: str = ""
    isa: str | None = None  # of the C++ kernels, on a CPU with built kernels

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith(("cuda", "meta"))


def setting(
    default: Any, text: str, *, choices: tuple[str, ...] = (), unset: str = "", rare: bool = False
) -> Any:
    """Declare a field of `EngineArgs`. `text` is its help. With `choices`, other values are errors.
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
    """Settings of an engine, given by the user. None or "auto" leaves the choice to `resolve`.

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
    kv_cache_dtype: str = setting("auto", "auto (the checkpoint's), fp8 (GPU), int8 or int4")
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
    kv_handover_address: str | None = setting(
        None,
        "where other engines get the blocks of prompts that this one computes for them: unix:NAME on one host, "
        "tcp://HOST:PORT on a private network; docs/prefill-and-decode.md",
        unset="none",
        rare=True,
    )
    kv_handover_bytes: int | None = setting(
        None, "memory for blocks that are handed over", unset="1GiB with an address", rare=True
    )
    kv_events_config: dict[str, Any] | None = setting(
        None,
        'publish what the prefix cache holds, as vLLM does: {"enable_kv_cache_events": true}; docs/install-and-deploy.md',
        unset="off",
        rare=True,
    )
    enable_prefix_caching: bool | None = setting(
        None, "reuse what prompts begin with alike", unset="on, if the model can"
    )
    cache_eviction: str = setting(
        "value",
        "order in which cached blocks are evicted: by the chance that they are used again and what they cost, or the least "
        "recently used first",
        choices=("value", "lru"),
        rare=True,
    )
    enable_chunked_prefill: bool | None = setting(
        None, "split long prompts over several steps", unset="on, if the model can", rare=True
    )
    enforce_eager: bool = setting(False, "no CUDA graphs", rare=True)
    deterministic: bool = setting(
        False,
        "an answer's bits depend on nothing but its request, whatever else is computed",
        rare=True,
    )
    enable_return_routed_experts: bool = setting(
        False,
        "answers come with the experts of their tokens (`routed_experts`); a CPU is slower then",
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
    context_parallel_size: int = setting(
        1,
        "devices over which each request's keys and values are shared out by tokens, and long steps' tokens, too; with "
        "tensor_parallel_size those that would hold copies of a kv head",
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
        'draft tokens and verify them, such as {"method": "suffix"}; docs/speculation.md',
        unset="off",
    )
    speculative_model: str | None = setting(
        None, "short for speculative_config: ngram, suffix, or a draft model"
    )
    num_speculative_tokens: int | None = setting(
        None, "with speculative_model: tokens to draft", unset="chosen at each step"
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
        "most pictures or sounds of a prompt; 0: only text, and their encoder is not loaded",
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
        """Convert paths to text, and check types and choices, because some settings are read before
        `resolve`. An int is accepted for a float."""
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


PARALLEL_SIZES = (
    "tensor_parallel_size",
    "expert_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
)


def num_ranks(args: EngineArgs) -> int:
    """Number of processes that compute the model. ConfigError if the settings contradict each
    other."""
    for name in PARALLEL_SIZES:
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
    if (context := args.context_parallel_size) > 1:
        for name in PARALLEL_SIZES[1:-1] if tensor == 1 else ("pipeline_parallel_size",):
            if (size := getattr(args, name)) > 1:
                raise ConfigError(
                    f"context_parallel_size={context} does not go with {name}={size}; leave one of them at 1",
                    field="context_parallel_size",
                )
        if tensor > 1 and tensor % context:
            raise ConfigError(
                f"context_parallel_size={context} with tensor_parallel_size={tensor}: the same ranks have both, so it must "
                "divide that",
                field="context_parallel_size",
            )
        return max(context, tensor)
    # A host's CPU and a GPU are two stages.
    return max(tensor, experts) * (args.pipeline_parallel_size if args.cpu_layers is None else 2)


def split_setting(args: EngineArgs) -> str:
    """Name of the setting that requires several ranks, for messages."""
    return (
        "cpu_layers"
        if args.cpu_layers is not None
        else next((n for n in PARALLEL_SIZES if getattr(args, n) > 1), PARALLEL_SIZES[0])
    )


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError, suggesting the likely value, if `value` is not allowed."""
    if value not in allowed:
        what = f"{name}={value!r} is not one of {', '.join(allowed)}{likely_value(value, allowed)}"
        raise ConfigError(what, field=name)
