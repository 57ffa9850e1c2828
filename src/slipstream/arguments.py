"""Helpful errors for a public call's unknown arguments: the likely one for a misspelling, ours for
another library's."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

OTHERS = {
    "guided_decoding": "structured_outputs",
    "penalty_alpha": "no_repeat_ngram_size or dry_multiplier (there is no contrastive search)",
    "max_new_tokens": "max_tokens",
    "do_sample": "temperature (0: the likeliest token)",
    "use_beam_search": "LLM.beam_search",
    "num_beams": "LLM.beam_search, with BeamSearchParams(beam_width=…)",
    "output_kind": "AsyncLLM, whose answers are streamed",
    "stop_strings": "stop",
    "num_return_sequences": "n",
}
"""Arguments of vLLM and transformers, and our nearest equivalent."""

SETTINGS = {
    "swap_space": "kv_host_bytes",
    "cpu_offload_gb": "weights_bytes",
    "enable_expert_parallel": "expert_parallel_size",
    "device_map": "device",
    "torch_dtype": "dtype",
    "n_ctx": "max_model_len",
    "ctx_size": "max_model_len",
    "context_length": "max_model_len",
    "max_total_tokens": "max_model_len",
    "max_seq_len": "max_model_len",
    "n_threads": "num_threads",
    "threads": "num_threads",
    "parallel": "max_num_seqs",
    "quantize": "quantization",
    "num_shard": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "tp": "tensor_parallel_size",
    "mem_fraction_static": "gpu_memory_utilization",
    "draft_model": "speculative_model",
    "model_draft": "speculative_model",
    "limit_mm_per_prompt": "max_images",
    "mm_processor_cache_gb": "image_cache_bytes",
    "pp_size": "pipeline_parallel_size",
    "pp": "pipeline_parallel_size",
    "ep_size": "expert_parallel_size",
    "ep": "expert_parallel_size",
    "master_addr": "rank_address",
    "dist_init_addr": "rank_address",
    "nnodes": "local_ranks",
}
"""Settings of these and of llama.cpp, SGLang and text-generation-inference, and our nearest. On the
command line they are options."""

VALUES = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "full": "float32",
}
"""Values of settings in other engines, and ours."""

_READ = "leave it out: the model's task is read from its files, and every model gives vectors"
_CONFIG = "leave it out: the model's config.json has it"
_REPLICAS = "use `slipstream fleet` for several replicas (docs/fleet.md); expert_parallel_size alone distributes requests"
_METRICS = "leave it out: /metrics is always on"
_GENERATION = (
    "leave it out: the model's generation_config.json has it, and a request's own fields go first"
)

NEEDLESS = {
    "trust_remote_code": "leave it out: a checkpoint's own code is never run",
    "distributed_executor_backend": "leave it out: ranks are processes (docs/parallelism.md)",
    "disable_log_requests": "leave it out: the log has a line a request, without its texts",
    "enable_auto_tool_choice": "leave it out: calls are read wherever the chat template knows tools",
    "task": _READ,
    "runner": _READ,
    "embedding": _READ,
    "embeddings": _READ,
    "reranking": _READ,
    "rope_scaling": _CONFIG,
    "hf_overrides": _CONFIG,
    "tokenizer_mode": "leave it out: the tokenizer is the checkpoint's",
    "generation_config": _GENERATION,
    "override_generation_config": _GENERATION,
    "compilation_config": "leave it out: enforce_eager turns CUDA graphs off",
    "guided_decoding_backend": "leave it out: grammars are llguidance's",
    "max_logprobs": "leave it out: a request may ask for up to 20",
    **dict.fromkeys(("data_parallel_size", "dp_size", "dp"), _REPLICAS),
    **dict.fromkeys(("disable_log_stats", "enable_metrics", "metrics"), _METRICS),
    "node_rank": "leave it out: ranks are numbered in the order in which they join (docs/parallelism.md)",
    "mm_processor_kwargs": "leave it out: preprocessor_config.json has it, and a request's `detail` reads a picture smaller",
    "language_model_only": "max_images=0 leaves the image encoder out",
    "enable_multimodal": "leave it out: a model with an image encoder takes pictures unless max_images is 0",
    "allowed_local_media_path": "leave it out: no files of the server are read; send pictures as data: URIs",
    "n_gpu_layers": "leave it out: a GPU holds all layers, but those of cpu_layers",
    "gpu_layers": "leave it out: a GPU holds all layers, but those of cpu_layers",
    "flash_attn": "leave it out: attention never holds its whole matrix",
    "mmproj": "leave it out: image encoders are read from safetensors",
}
"""Settings of other engines that are not needed here, with the reason."""


def suggesting(function: Callable[P, R], what: str = "argument") -> Callable[P, R]:
    """Wrap `function`: its TypeError for an unknown keyword argument (a `what`) names the likely
    one."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            known = [name for name in inspect.signature(function).parameters if name != "self"]
            for name in kwargs:
                if name not in known:
                    raise TypeError(_message(name, known, what)) from None
            raise

    return called


def suggesting_init(cls: C, what: str = "argument") -> C:
    """Apply `suggesting` to the constructor of a class."""
    initialise: Any = cls.__init__  # type: ignore[misc]
    cls.__init__ = suggesting(initialise, what)  # type: ignore[misc]
    return cls


def likely_value(value: str, allowed: Sequence[str]) -> str:
    """ "; did you mean …?" to end a message that refuses `value`; empty if nothing is similar."""
    own = VALUES.get(value.lower(), value.lower())
    near = [own] if own in allowed else difflib.get_close_matches(own, allowed, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _message(name: str, known: list[str], what: str) -> str:
    if what == "setting" and name in NEEDLESS:
        return f"there is no setting {name!r}; {NEEDLESS[name]}"
    if other := (SETTINGS if what == "setting" else OTHERS).get(name):
        return f"there is no {what} {name!r}; the nearest is {other}"
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f"there is no {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


@functools.cache
def types_of(owner: type) -> dict[str, Any]:
    """The types of a dataclass's fields, by name. They are cached: Python evaluates each from its
    text, which takes 2 ms for an engine's."""
    return get_type_hints(owner)


def wrong_type(value: Any, hint: Any) -> str:
    """The type that a value declared as `hint` must have, such as "int or None"; "" if the value
    fits.

    An int is accepted for a float, and a list for a tuple. The contents of a dict are not checked.
    """
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [str if get_origin(kind) is Literal else get_origin(kind) or kind for kind in options]
    takes = {float: (float, int), tuple: (tuple, list)}
    fits = any(isinstance(value, takes.get(kind, kind)) for kind in kinds)
    if isinstance(value, bool) and bool not in kinds:
        fits = False
    if fits and tuple in kinds and isinstance(value, (tuple, list)):
        fits = all(isinstance(one, str) for one in value)
    names = {type(None): "None", tuple: "a list of texts"}
    return "" if fits else " or ".join(names.get(kind, kind.__name__) for kind in kinds)
