"""Every setting of an engine, in one place, resolved once.

`EngineArgs` is what a user wrote (None: not set). `resolve(args, model, device)` is a pure function that checks it against
the model and the device and returns a frozen `EngineConfig`, which records for each setting who chose it and why. Nothing
is changed afterwards, save by `with_memory_limits`, which returns a new config and says what it lowered. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, get_type_hints

from slipstream.errors import ConfigError, OutOfMemoryError
from slipstream.spec.model import LatentAttentionSpec, ModelSpec, MoESpec
from slipstream.spec.scheme import SCHEMES

if TYPE_CHECKING:
    from slipstream.spec.description import ModelDescription

DType: TypeAlias = Literal["float32", "bfloat16", "float16"]
KVDType: TypeAlias = Literal["float32", "bfloat16", "float16", "fp8", "int8"]
CPU_PRODUCTS = frozenset(("int8", "int4"))
"""What the C++ kernels multiply as it is rounded."""
CPU_SCHEMES = frozenset(name for name, scheme in SCHEMES.items() if scheme.name in CPU_PRODUCTS)

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What a device is and has, as the worker found it (`worker.device.detect`)."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """What `LLM(...)` and the command line take. The names are those that vLLM's users know."""

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_mixed_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    enforce_eager: bool = False
    deterministic: bool = False
    dense_copies: bool | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    speculative_model: str | None = None
    num_speculative_tokens: int | None = None
    download_dir: str | None = None
    seed: int = 0
    load_format: str = "auto"
    weights_cache: str = "auto"
    skip_tokenizer_init: bool = False
    scheduling_policy: str = "inflight"
    batch_window_s: float | None = None
    max_queue: int | None = None
    canary: str = "warn"
    kernels: str = "auto"
    tile_table: str = "auto"
    num_threads: int | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Who set a value (user, model, device, default) and why."""

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
    load_format: Literal["auto", "safetensors", "gguf", "dummy"]
    weights_cache: Literal["auto", "off"]
    seed: int
    skip_tokenizer_init: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    dtype: KVDType
    block_size: int
    gpu_memory_utilization: float
    kv_cache_bytes: int | None
    enable_prefix_caching: bool
    tables_per_seq: int = 1  # 2 beside an encoder, whose text has blocks of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    policy: Literal["inflight", "dynamic", "static"]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int  # where some sequences decode
    enable_chunked_prefill: bool
    batch_window_s: float
    max_queue: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    info: DeviceInfo
    kernels: Literal["auto", "reference", "cpu", "torch", "triton"]
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
    origins: dict[str, Origin] = field(default_factory=dict)

    @property
    def max_blocks_per_seq(self) -> int:
        """Of one table: a prompt with its answer, or one of the two where an encoder reads the prompt."""
        return -(-self.model.max_model_len // self.cache.block_size)

    @property
    def longest_seq_blocks(self) -> int:
        """What a sequence takes that is as long as can be, all of its tables together."""
        return self.cache.tables_per_seq * self.max_blocks_per_seq

    def with_memory_limits(self, num_blocks: int, block_bytes: int) -> EngineConfig:
        """Fit `max_model_len` to a cache of `num_blocks` usable blocks: lowered if it was left on auto, else an error."""
        capacity = num_blocks // self.cache.tables_per_seq * self.cache.block_size
        wanted = self.model.max_model_len
        if capacity >= wanted:
            return self
        need = self.longest_seq_blocks * block_bytes
        more = "gpu_memory_utilization or kv_cache_bytes" if self.device.info.is_cuda else "kv_cache_bytes"
        have = num_blocks * block_bytes
        each = " of prompt and of answer" if self.cache.tables_per_seq > 1 else ""
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


def resolve(args: EngineArgs, model: ModelDescription, device: DeviceInfo) -> EngineConfig:
    """Check `args` against the model and the device and fill in what was left open. Pure."""
    origins: dict[str, Origin] = {}

    def choose(name: str, auto: Any, source: Literal["model", "device", "default"], reason: str) -> Any:
        given = getattr(args, name)
        if given is None or given == "auto":
            origins[name] = Origin(auto, source, reason)
            return auto
        origins[name] = Origin(given, "user")
        return given

    _check_types(args)
    held, held_why = model.scheme, "what the checkpoint holds"
    stored = model.quantization
    if stored is not None and stored.formats is not None:
        if args.quantization not in (None, held):
            raise ConfigError(
                f"quantization={args.quantization!r}, but the checkpoint's weights are rounded already; leave it out",
                field="quantization",
            )
        on_cpu = not device.is_cuda and args.kernels != "reference"
        if on_cpu and (held not in CPU_SCHEMES or args.kernels == "torch"):
            held, held_why = None, "the checkpoint's rounded weights are expanded: a CPU's kernels have no product with them"
    _reject_unsupported(args, device, args.quantization or held, held, model.kv_cache)
    _check_products(model, device, args.kernels)
    spec = model.spec

    dtype_auto, dtype_why = _auto_dtype(model.dtype, device)
    dtype = choose("dtype", dtype_auto, "device", dtype_why)
    _one_of("dtype", dtype, ("auto", "float32", "bfloat16", "float16"))
    if dtype == "float16" and not device.is_cuda:
        raise ConfigError("dtype='float16' is slow and imprecise on a CPU; use 'bfloat16' or 'float32'", field="dtype")

    quantization = choose("quantization", held, "model", held_why)
    if held is not None and quantization != held:
        raise ConfigError(
            f"quantization={quantization!r}, but the checkpoint's weights are {held}; leave it out",
            field="quantization",
        )
    rounded = quantization or ("compressed-tensors" if stored is not None and stored.formats is not None else None)
    if rounded is not None and dtype == "float32" and device.is_cuda and args.kernels != "reference":
        raise ConfigError(
            f"quantization={rounded!r} computes in 16 bits on a GPU; use dtype='bfloat16' or 'float16'", field="dtype"
        )
    kv_why = "the model's type" if model.kv_cache is None else "the checkpoint has scales for it (kv_cache_scheme)"
    kv_dtype = choose("kv_cache_dtype", model.kv_cache or dtype, "model", kv_why)
    if kv_dtype != dtype and any(isinstance(layer.attention, LatentAttentionSpec) for layer in spec.layers):
        raise ConfigError(
            f"kv_cache_dtype={kv_dtype!r} does not cover latent attention, whose cache is small already; leave it out",
            field="kv_cache_dtype",
        )
    if model.kv_cache is not None and kv_dtype not in (dtype, model.kv_cache):
        raise ConfigError(
            f"kv_cache_dtype={kv_dtype!r}, but the checkpoint's scales are for {model.kv_cache} (kv_cache_scheme); leave it "
            f"out, or take the model's type, {dtype!r}",
            field="kv_cache_dtype",
        )

    _one_of("kv_cache_dtype", kv_dtype, (dtype,) if spec.needs_full_prompt else (dtype, "fp8", "int8"))
    longest = spec.max_position
    if spec.is_encoder and model.pooling.max_length is not None:
        longest = min(longest, model.pooling.max_length)
    max_model_len = choose("max_model_len", longest, "model", "the context the model was made for")
    _positive("max_model_len", max_model_len)
    if max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len={max_model_len} is beyond the {spec.max_position} tokens that the model was made for; lower it",
            field="max_model_len",
        )
    block_size = choose("block_size", 16, "default", "16 tokens: little waste, long enough reads")
    _positive("block_size", block_size)
    if device.is_cuda and block_size not in (16, 32, 64, 128):
        raise ConfigError(f"block_size={block_size}: the GPU kernels take 16, 32, 64 or 128", field="block_size")

    chunked, prefixes = args.enable_chunked_prefill, args.enable_prefix_caching
    if spec.needs_full_prompt:  # its tokens see each other: no part can be computed or kept by itself
        chunked, prefixes = not spec.is_encoder, False
        for name, value in (("enable_chunked_prefill", chunked), ("enable_prefix_caching", prefixes)):
            origins[name] = Origin(value, "model", "its encoder reads texts whole")
    many = 1024 if device.is_cuda else 256 if spec.is_encoder else 64
    seqs = choose("max_num_seqs", many, "device", "default for this kind of device")
    _positive("max_num_seqs", seqs)
    # An encoder's whole step is one round of the host, which on a GPU takes longer than 8,192 tokens of a small model.
    tokens_auto = max(16384 if spec.is_encoder else 8192, seqs) if device.is_cuda else max(512, seqs)
    if not chunked:
        tokens_auto = max(tokens_auto, max_model_len, 2048 if spec.is_encoder else 0)
    whole = max_model_len + seqs if spec.encoder is not None else 0  # a whole prompt beside the others' tokens
    tokens_auto = max(tokens_auto, whole)
    tokens = choose("max_num_batched_tokens", tokens_auto, "device", "keeps GEMMs above the compute knee")
    _positive("max_num_batched_tokens", tokens)
    if tokens < seqs:
        raise ConfigError(
            f"max_num_batched_tokens={tokens} is below max_num_seqs={seqs}: one decode step would not fit; raise it or "
            "lower max_num_seqs",
            field="max_num_batched_tokens",
        )
    if not chunked and tokens < max_model_len:
        raise ConfigError(
            f"without chunked prefill{' (an encoder has none)' * spec.is_encoder} max_num_batched_tokens={tokens} must hold a "
            f"whole prompt (max_model_len="
            f"{max_model_len}); raise it, lower max_model_len, or enable chunked prefill",
            field="max_num_batched_tokens",
        )
    mixed = choose("max_num_mixed_tokens", tokens, "default", "max_num_batched_tokens: throughput before even gaps")
    _positive("max_num_mixed_tokens", mixed)
    if not seqs <= mixed <= tokens:
        raise ConfigError(
            f"max_num_mixed_tokens={mixed} must lie between max_num_seqs={seqs}, which one decode step takes, and "
            f"max_num_batched_tokens={tokens}, which no step exceeds",
            field="max_num_mixed_tokens",
        )
    if mixed < whole:
        raise ConfigError(
            f"max_num_mixed_tokens={mixed} (at most max_num_batched_tokens={tokens}): a step must hold a whole prompt for the "
            f"encoder beside a token of each other sequence, {whole} in all; raise it, or lower max_model_len or max_num_seqs",
            field="max_num_mixed_tokens" if mixed < tokens else "max_num_batched_tokens",
        )
    if mixed < tokens and not chunked:
        raise ConfigError(
            f"without chunked prefill a step holds whole prompts, and max_num_mixed_tokens={mixed} can't bound it; leave it "
            "out or enable chunked prefill",
            field="max_num_mixed_tokens",
        )
    share = choose("gpu_memory_utilization", 0.9, "default", "leaves room for what the engine does not count")
    if not 0 < share <= 1:
        raise ConfigError("gpu_memory_utilization must be above 0 and at most 1", field="gpu_memory_utilization")
    window = choose("batch_window_s", 0.05, "default", "long enough to gather a batch, too short to be noticed")
    if window < 0:
        raise ConfigError("batch_window_s must not be negative", field="batch_window_s")
    for name in ("kv_cache_bytes", "max_queue", "num_threads"):
        if getattr(args, name) is not None:
            _positive(name, getattr(args, name))
    if args.kv_cache_bytes is not None and args.kv_cache_bytes > device.memory_bytes:
        raise ConfigError(
            f"kv_cache_bytes={args.kv_cache_bytes} is more than the {device.memory_bytes} bytes of {device.name}; lower it",
            field="kv_cache_bytes",
        )
    _one_of("scheduling_policy", args.scheduling_policy, ("inflight", "dynamic", "static"))
    _one_of("load_format", args.load_format, ("auto", "safetensors", "gguf", "dummy"))
    _one_of("weights_cache", args.weights_cache, ("auto", "off"))
    _one_of("canary", args.canary, ("off", "warn", "refuse"))
    if args.canary == "refuse" and args.load_format == "dummy":
        raise ConfigError("canary='refuse' can't hold for random weights (load_format='dummy'); leave it out", field="canary")
    _one_of("kernels", args.kernels, ("auto", "reference", "cpu", "torch", "triton"))
    if args.deterministic and any(
        isinstance(layer.mlp, MoESpec) or isinstance(layer.attention, LatentAttentionSpec) for layer in spec.all_layers
    ):
        raise ConfigError(
            "deterministic=True does not cover mixtures of experts and latent attention; leave it out", field="deterministic"
        )
    dense_copies = _choose_dense_copies(args, model, device, quantization, choose)
    threads = choose("num_threads", device.num_threads, "device", "the cores this process may use")

    for f in dataclasses.fields(args):
        origins.setdefault(
            f.name, Origin(getattr(args, f.name), "default" if getattr(args, f.name) == f.default else "user")
        )
    return EngineConfig(
        model=ModelConfig(
            model=args.model,
            path=model.path,
            tokenizer=args.tokenizer,
            dtype=dtype,
            quantization=quantization,
            max_model_len=max_model_len,
            load_format=args.load_format,  # type: ignore[arg-type]
            weights_cache=args.weights_cache,  # type: ignore[arg-type]
            seed=args.seed,
            skip_tokenizer_init=args.skip_tokenizer_init,
        ),
        cache=CacheConfig(
            dtype=kv_dtype,
            block_size=block_size,
            gpu_memory_utilization=share,
            kv_cache_bytes=args.kv_cache_bytes,
            enable_prefix_caching=prefixes,
            tables_per_seq=1 if spec.encoder is None else 2,
        ),
        scheduling=SchedulingConfig(
            policy=args.scheduling_policy,  # type: ignore[arg-type]
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_num_mixed_tokens=mixed,
            enable_chunked_prefill=chunked,
            batch_window_s=window,
            max_queue=args.max_queue,
        ),
        device=DeviceConfig(
            info=device,
            kernels=args.kernels,  # type: ignore[arg-type]
            tile_table=args.tile_table if _has_tiles(args, device) and not args.deterministic else "none",
            enforce_eager=args.enforce_eager or not device.is_cuda or not _has_graphs(spec, args),
            deterministic=args.deterministic,
            dense_copies=dense_copies,
            num_threads=threads,
        ),
        origins=origins,
    )


def _has_graphs(spec: ModelSpec, args: EngineArgs) -> bool:
    """Decoders that write, and encoders unless a text's sums are to be the same in any step: then the number of tokens does not
    say how kernels are launched. The reference's attention reads lengths on the host, which no graph can."""
    return args.kernels != "reference" and (spec.generates or (spec.is_encoder and not args.deterministic))


def _auto_dtype(trained: str, device: DeviceInfo) -> tuple[DType, str]:
    if device.is_cuda:
        if trained == "float16":
            return "float16", "the checkpoint's own"
        if device.compute_capability is not None and device.compute_capability < (8, 0):
            return "float16", "this GPU has no bfloat16"
        return "bfloat16", "the GPU's fast type, with float32's range"
    return device.best_dtype, device.dtype_reason or "the faster one on this CPU"


def _reject_unsupported(
    args: EngineArgs,
    device: DeviceInfo,
    quantization: str | None,
    checkpoint_scheme: str | None,
    checkpoint_kv: str | None,
) -> None:
    """Settings whose names are public but whose work is not done yet raise; they are never accepted and ignored."""
    for name, only, what in (
        ("speculative_model", None, "speculative decoding is"),
        ("num_speculative_tokens", None, "speculative decoding is"),
        ("tensor_parallel_size", 1, "tensor parallelism is"),
        ("pipeline_parallel_size", 1, "pipeline parallelism is"),
    ):
        if getattr(args, name) != only:
            raise ConfigError(
                f"{name}={getattr(args, name)!r}: {what} not supported yet; leave it at {only!r}", field=name
            )
    for name, applies, where in (
        ("gpu_memory_utilization", device.is_cuda, "a GPU; on a CPU kv_cache_bytes sizes the cache"),
        ("num_threads", not device.is_cuda, "a CPU"),
        ("batch_window_s", args.scheduling_policy == "dynamic", "scheduling_policy='dynamic'"),
        ("tile_table", _has_tiles(args, device) and not args.deterministic, "the GPU's kernels, and without deterministic"),
        ("deterministic", _has_tiles(args, device), "the GPU's kernels"),
    ):
        if getattr(args, name) not in (None, "auto", False) and not applies:
            raise ConfigError(f"{name} has an effect only with {where}; leave it out", field=name)
    if quantization is not None:
        _one_of("quantization", quantization, tuple(SCHEMES))
    kv_dtype = args.kv_cache_dtype if args.kv_cache_dtype != "auto" else checkpoint_kv
    kv_off = "leave it at 'auto'" if checkpoint_kv is None else "set it to the model's type, such as 'bfloat16'"
    on_cpu = not device.is_cuda and args.kernels != "reference"
    named = ", ".join(repr(name) for name in SCHEMES if name in CPU_SCHEMES)
    weights = f"{named}, for experts 'mxfp4', and GGUF's blocks as they are: take one"
    for name, given, here, off in (
        ("quantization", quantization, weights, "leave it at None"),
        ("kv_cache_dtype", kv_dtype, "'int8': take that", kv_off),
    ):
        if on_cpu and given not in (None, *CPU_SCHEMES, "mxfp4", "float32", "bfloat16", "float16"):
            raise ConfigError(
                f"{name}={given!r} needs a GPU; a CPU's kernels have {here}, or {off} (or take kernels='reference', which is "
                "exact and slow)",
                field=name,
            )
    capability = device.compute_capability
    if quantization is not None and SCHEMES[quantization].inputs in ("fp8", "fp8-block") and capability and capability < (8, 9):
        raise ConfigError(
            f"quantization={quantization!r} needs a GPU of compute capability 8.9 or more; {device.name} has "
            f"{capability[0]}.{capability[1]}: use 'int8' or 'int4'",
            field="quantization",
        )


def held_products(kernels: str, device: DeviceInfo) -> tuple[frozenset[str], frozenset[str]]:
    """What the ops on a device compute with as a checkpoint has it (`OpSet.rounded` and, of experts, `rounded_experts`)."""
    if device.is_cuda or kernels == "reference":
        every = frozenset(("fp8", "fp8-block", "int8", "int4"))
        return every | {"int8-split"}, every
    held = frozenset[str]() if kernels == "torch" else CPU_PRODUCTS
    return held, held


def _check_products(model: ModelDescription, device: DeviceInfo, kernels: str) -> None:
    """Where a checkpoint says product by product how it is rounded, the device has each of these products."""
    capability, held = device.compute_capability, model.held_formats(*held_products(kernels, device))
    eight = [name for name, fmt in held.items() if fmt.kind == "float"]
    if eight and capability and capability < (8, 9):
        raise ConfigError(
            f"{len(eight)} of the checkpoint's weights ({eight[0]} first) are FP8, whose products need a GPU of compute "
            f"capability 8.9 or more; {device.name} has {capability[0]}.{capability[1]}: take a checkpoint in int8, int4 or "
            "16 bits",
            field="model",
        )


DENSE_SHARE = 0.25
"""The largest share of a GPU's memory that dense copies of 4-bit weights take unasked."""


def _choose_dense_copies(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, quantization: str | None, choose: Callable[..., Any]
) -> bool:
    """Whether 4-bit weights are kept a second time, dense: beyond some tokens the dense product is the faster one."""
    spec = model.spec
    scheme = None if quantization is None else SCHEMES[quantization]
    held = model.held_formats(*held_products(args.kernels, device))
    parameters = 0  # of 4-bit weights that are not experts'
    if held:
        sizes = {name: math.prod(shape) for name, shape in model.shapes.items()}
        parameters = sum(sizes[n] for n, fmt in held.items() if fmt.product == "int4" and ".experts." not in n)
    elif scheme is not None and scheme.inputs is None and not scheme.experts_only:
        products = [p for layer in spec.all_layers for p in layer.weight_shapes(spec.hidden_size) if p.copies == 1]
        parameters = sum(p.rows * p.inner for p in products)
    if not parameters or not _has_tiles(args, device):
        if args.dense_copies:
            raise ConfigError("dense_copies has an effect only with 4-bit weights on a GPU; leave it out", field="dense_copies")
        return False
    fits = 2 * parameters <= DENSE_SHARE * device.memory_bytes
    share = f"{2 * parameters / 2**30:.1f} GiB are {'at most' if fits else 'more than'} a quarter of the GPU's memory"
    chosen: bool = choose("dense_copies", fits, "device", share)
    return chosen


def _has_tiles(args: EngineArgs, device: DeviceInfo) -> bool:
    return device.is_cuda and args.kernels in ("auto", "triton")


def _check_types(args: EngineArgs) -> None:
    """Each setting is of the type it is declared with; a whole number does for a float."""
    for name, hint in get_type_hints(EngineArgs).items():
        value, kinds = getattr(args, name), get_args(hint) or (hint,)
        fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
        if not fits or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ConfigError(f"{name} must be {wanted}, got {value!r}", field=name)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(allowed)}", field=name)


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number above 0, got {value!r}", field=name)
