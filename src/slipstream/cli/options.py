"""Options that several verbs share, made from the fields they set: `max_model_len` is `--max-model-len`.

An option that is not given leaves no attribute behind, so that the dataclass's default is the only default.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from types import UnionType
from typing import Any, get_args, get_type_hints

from slipstream.config import EngineArgs
from slipstream.types import SamplingParams

TEXT_ONLY = ("seed", "skip_tokenizer_init")
"""Engine options that `run` and `chat` leave out: their --seed is the request's, and text needs a tokenizer."""

MODEL_HELP = "a folder, a GGUF file, or a name that `slipstream pull` knows"

ENGINE_HELP = {
    "tokenizer": "another model's tokenizer, by name or path",
    "dtype": "auto, float32, bfloat16 or float16",
    "device": "auto, cpu, cuda or cuda:N",
    "quantization": "round weights at load: fp8, fp8-head, fp8-block (GPU), int8, int8-head, int4, int4-g32, mxfp4 (experts)",
    "kv_cache_dtype": "auto (the checkpoint's), fp8 (GPU) or int8",
    "block_size": "tokens in a block of KV cache",
    "max_model_len": "longest prompt with answer, in tokens",
    "max_num_seqs": "most sequences in one step",
    "max_num_batched_tokens": "most tokens in one step",
    "max_num_mixed_tokens": "most tokens in a step in which running sequences get their next; bounds the time between tokens",
    "gpu_memory_utilization": "share of the GPU's memory to use",
    "kv_cache_bytes": "size of the KV cache, such as 2GiB",
    "enable_prefix_caching": "reuse what prompts begin with alike",
    "enable_chunked_prefill": "split long prompts over several steps",
    "enforce_eager": "no CUDA graphs",
    "dense_copies": "keep 4-bit weights dense as well, for steps of many tokens (GPU; default: if a quarter of it holds them)",
    "deterministic": "an answer depends on nothing but its request, whatever else is computed (GPU; slower)",
    "tensor_parallel_size": "only 1 so far",
    "pipeline_parallel_size": "only 1 so far",
    "speculative_model": "not supported yet",
    "num_speculative_tokens": "not supported yet",
    "download_dir": "where models are kept, instead of the user's cache",
    "seed": "seed of requests without their own, and of dummy weights",
    "load_format": "auto, safetensors, gguf, or dummy (random weights from a config.json)",
    "weights_cache": "auto or off: keep what a start rounds for the next one, where that is faster (CPU)",
    "skip_tokenizer_init": "token ids only, no text",
    "scheduling_policy": "inflight, or the baselines dynamic and static",
    "batch_window_s": "dynamic: seconds to wait for a batch to fill",
    "max_queue": "most requests that wait; beyond it they are refused",
    "canary": "off, warn or refuse: what to do when the checkpoint's canary finds it changed here (if it has one)",
    "kernels": "auto, reference, cpu, torch or triton",
    "tile_table": "tiles of the GPU's kernels: auto (yours over those shipped), shipped, none, or a file",
    "num_threads": "CPU threads",
}
SAMPLING_HELP = {
    "temperature": "0 takes the likeliest token each time",
    "top_k": "draw among the k likeliest tokens; 0: all",
    "top_p": "draw among the likeliest tokens that hold this probability",
    "min_p": "draw among tokens at least this likely, relative to the likeliest",
    "repetition_penalty": "above 1: tokens that were there are less likely",
    "presence_penalty": "taken off tokens that the answer holds already",
    "frequency_penalty": "the same, for each time",
    "seed": "the same seed gives the same answer",
    "max_tokens": "longest answer, in tokens",
}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)


def add_engine_options(parser: argparse._ActionsContainer, *, without: tuple[str, ...] = ()) -> None:
    """An option for each field of EngineArgs but `model` and those in `without`."""
    defaults = EngineArgs(model="")
    for field in dataclasses.fields(EngineArgs):
        if field.name not in ("model", *without):
            _add(parser, field.name, ENGINE_HELP[field.name], getattr(defaults, field.name), EngineArgs)


def engine_args(args: argparse.Namespace, **more: Any) -> EngineArgs:
    """The engine settings among `args`; `more` are used where the user said nothing."""
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    return EngineArgs(**{**more, **{name: value for name, value in vars(args).items() if name in names}})


def add_sampling_options(parser: argparse._ActionsContainer, **defaults: Any) -> None:
    """How the answer is drawn. `defaults` are the verb's, used by `sampling_params`, which must be given the same."""
    built_in = SamplingParams(**defaults)
    for name, text in SAMPLING_HELP.items():
        _add(parser, name, text, getattr(built_in, name), SamplingParams)
    parser.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="end the answer here; may be repeated",
    )


def sampling_params(args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    given = {name: getattr(args, name) for name in (*SAMPLING_HELP, "stop") if hasattr(args, name)}
    return SamplingParams(**{**defaults, **given})


def add_output_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print exactly one JSON object on standard output")


def parse_bytes(text: str) -> int:
    """A number of bytes: 1073741824, 1GiB, 1.5g, 512MB (powers of 1024 throughout)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or such as 512MiB, 2GiB")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def _add(parser: argparse._ActionsContainer, name: str, text: str, default: Any, owner: type) -> None:
    hint = get_type_hints(owner)[name]
    kind = next(t for t in get_args(hint) if t is not type(None)) if isinstance(hint, UnionType) else hint
    how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind, "metavar": "X"}
    if name.endswith("_bytes"):
        how["type"] = parse_bytes
    shown = "chosen for the model and machine" if default is None else default
    if owner is SamplingParams and default is None:
        shown = "none" if name != "max_tokens" else "the rest of the context"
    if text.startswith(("not supported", "only ")) or name in ("tokenizer", "quantization", "download_dir", "max_queue"):
        shown = ""
    text = text + (f" (default: {shown})" if shown != "" else "")
    parser.add_argument("--" + name.replace("_", "-"), default=argparse.SUPPRESS, help=text.replace("%", "%%"), **how)
