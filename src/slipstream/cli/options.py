"""Options shared by several verbs, generated from the fields that they set: `max_model_len` is
`--max-model-len`.

An option that is not given sets no attribute, so the dataclass's default is the only default."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from types import UnionType
from typing import Any, Literal, cast, get_args, get_origin

from slipstream.base.arguments import say_without_effect, types_of
from slipstream.base.files import parse_json
from slipstream.base.other_engines import ONLY_PYTHON
from slipstream.cli.parser import Rare
from slipstream.config import EngineArgs, setting_help
from slipstream.errors import ConfigError
from slipstream.params.sampling import SamplingParams

ADAPTERS = ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_modules")
"""Engine options only for `serve`, whose requests can name an adapter (its --lora sets the last
one), and for verbs that show the memory of adapters."""

TEXT_ONLY = ("seed", "skip_tokenizer_init")
"""Engine options that `run` and `chat` lack: their --seed is that of the request, and text needs a
tokenizer."""

SAMPLING_TITLE = "sampling (left out, it is the model's generation_config.json's, else as said here; `serve` does the same)"

ENGINE_HELP = {
    declared.name: Rare(text) if declared.metadata.get("rare") else text
    for declared in dataclasses.fields(EngineArgs)
    for text in (setting_help(declared),)
    if declared.name not in ONLY_PYTHON
}
MODEL_HELP = ENGINE_HELP["model"]

SAMPLING_HELP = {
    "temperature": "0 takes the likeliest token each time (0.8)",
    "top_k": "draw among the k likeliest tokens; 0: all (40)",
    "top_p": "draw among the likeliest tokens that hold this probability (0.95)",
    "min_p": "draw among tokens at least this likely, relative to the likeliest (0.05)",
    "repetition_penalty": "above 1: tokens that were there are less likely",
    "presence_penalty": "taken off tokens that the answer holds already",
    "frequency_penalty": "the same, for each time",
    "seed": "the same seed gives the same answer",
    "max_tokens": "longest answer, in tokens",
}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)


ENGINE_GROUPS: dict[str, str] = {
    "model and memory": "device dtype quantization max_model_len max_num_seqs gpu_memory_utilization "
    "kv_cache_bytes kv_cache_dtype num_threads tokenizer chat_template download_dir seed load_format",
    "a model or cache larger than the device's memory": "weights_bytes cpu_layers host_experts "
    "hot_expert_bytes kv_host_bytes kv_disk_bytes kv_disk_path",
    "several engines": "kv_handover_address kv_handover_bytes",
    "several devices": "tensor_parallel_size pipeline_parallel_size expert_parallel_size "
    "context_parallel_size sequence_parallel pipeline_layers rank_address local_ranks",
    "drafted tokens (speculation)": "speculative_model num_speculative_tokens speculative_config",
    "adapters": " ".join(ADAPTERS),
    "pictures": "max_images image_cache_bytes",
    "scheduling": "enable_prefix_caching max_num_batched_tokens max_num_mixed_tokens target_itl_ms "
    "max_queue enable_chunked_prefill block_size",
}
"""Engine options by group in a verb's help, the most common first. Options in no group form another
group."""


def add_engine_options(
    parser: argparse._ActionsContainer,
    *,
    without: tuple[str, ...] = (),
    note: str = "as in LLM(...)",
    adapters: bool = False,
) -> None:
    """Add an option for each field of EngineArgs except `model` and those in `without`; those of
    adapters only with `adapters`.

    The first of the groups has the `note`."""
    without = (*without, "lora_modules") if adapters else (*without, *ADAPTERS)
    names = [name for name in ENGINE_HELP if name not in ("model", *without)]
    groups = [
        (title, [name for name in some.split() if name in names])
        for title, some in ENGINE_GROUPS.items()
    ]
    grouped = {name for _, some in groups for name in some}
    groups.append(("rarely needed", [name for name in names if name not in grouped]))
    for number, (title, some) in enumerate(groups):
        if some:
            shown = f"engine: {title}" if number else f"engine: {title} ({note})"
            own = (
                parser.add_argument_group(shown)
                if isinstance(parser, argparse.ArgumentParser)
                else parser
            )
            for name in some:
                _add(own, name, ENGINE_HELP[name], EngineArgs)


def engine_args(args: argparse.Namespace, **more: Any) -> EngineArgs:
    """Engine settings from `args`; `more` are defaults for what the user did not give."""
    return EngineArgs(
        **{**more, **{name: value for name, value in vars(args).items() if name in ENGINE_HELP}}
    )


def engine_words(args: argparse.Namespace) -> list[str]:
    """Command-line words for the engine options in `args`."""
    words: list[str] = []
    for name in ENGINE_HELP:
        value, option = getattr(args, name, None), "--" + name.replace("_", "-")
        if name == "model" or value is None:
            continue
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words += [option, option_word(name, value)]
    return words


def option_word(name: str, value: Any) -> str:
    """Value of an option, formatted as on a command line."""
    if isinstance(value, dict):
        return json.dumps(value)
    if name.endswith("_bytes") and value and value % 2**20 == 0:
        return f"{value // 2**20}MiB"
    return str(value)


def say_taken(args: argparse.Namespace) -> None:
    """Log which options of other engines were given and have no effect."""
    for option, name in getattr(args, "taken", {}).items():
        say_without_effect(option, name)


def add_sampling_options(parser: argparse._ActionsContainer, **defaults: Any) -> None:
    """Add options for sampling. `defaults` are the verb's own, and must also be passed to
    `sampling_params`."""
    for name, text in SAMPLING_HELP.items():
        shown = f" (default: {defaults[name]})" if defaults.get(name) is not None else ""
        _add(parser, name, text + shown, SamplingParams)
    parser.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="end the answer here; may be repeated",
    )


def sampling_params(
    args: argparse.Namespace, model: SamplingParams | None = None, /, **defaults: Any
) -> SamplingParams:
    """Sampling parameters: the user's; else the verb's `defaults`; else the `model`'s."""
    given = {name: getattr(args, name) for name in (*SAMPLING_HELP, "stop") if hasattr(args, name)}
    return dataclasses.replace(model or SamplingParams(), **{**defaults, **given})


def add_key_options(parser: argparse._ActionsContainer) -> None:
    """Add the options for a client's API key; `given_key` reads it."""
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="whose first line is the server's key"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="the same, where other users of the machine can see it"
    )


def given_key(args: argparse.Namespace) -> str | None:
    if args.api_key_file is None:
        return cast("str | None", args.api_key)
    if args.api_key is not None:
        raise ConfigError("give --api-key or --api-key-file, not both", field="api_key_file")
    return read_keys(args.api_key_file)[0]


def read_keys(path: str) -> tuple[str, ...]:
    """Read keys from a file, one per line; empty lines and lines that begin with # are ignored."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        message = f"cannot read the API keys in {path} ({why}); name a file with one key a line"
        raise ConfigError(message, field="api_key_file") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path} holds no API key; write one a line", field="api_key_file")
    return keys


def add_output_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print exactly one JSON object on standard output"
    )


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: 1073741824, 1GiB, 1.5g, 512MB (powers of 1024 throughout)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write bytes, or such as 512MiB, 2GiB"
        )
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. ArgumentTypeError for any other text."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            f'{text[:200]!r} is not a JSON object, such as {{"method": "suffix"}}'
        )
    return found


def _add(parser: argparse._ActionsContainer, name: str, text: str, owner: type) -> None:
    hint = types_of(owner)[name]
    kind = (
        next(t for t in get_args(hint) if t is not type(None))
        if isinstance(hint, UnionType)
        else hint
    )
    kind = str if get_origin(kind) is Literal else kind
    how: dict[str, Any] = (
        {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
    )
    if kind is not bool:
        how["metavar"] = {int: "N", float: "X"}.get(kind, "VALUE")
    if name.endswith("_bytes"):
        how |= {"type": parse_bytes, "metavar": "SIZE"}
    if get_origin(kind) is dict:
        how |= {"type": parse_object, "metavar": "JSON"}
    parser.add_argument(
        "--" + name.replace("_", "-"),
        default=argparse.SUPPRESS,
        help=type(text)(text.replace("%", "%%")),
        **how,
    )
