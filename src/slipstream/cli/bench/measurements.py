"""Common part of the kinds of `bench`: options, engine settings, the workload, and output of the
result."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.base.files import writing
from slipstream.cli.agent_options import AGENTS_TITLE, add_agent_options, given_agent_options
from slipstream.cli.console import phases, print_json, say
from slipstream.cli.options import add_engine_options, add_output_options, engine_args, engine_words
from slipstream.cli.parser import Rare
from slipstream.config import EngineArgs
from slipstream.costs.environment import plain
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.bench.workload import BenchWorkload
    from slipstream.costs.metrics import Summary

WORKLOADS = ("fixed", "random", "sharegpt", "lengths", "shared-prefix")
OF_SESSIONS = ("agents", "trace")
LENGTHS = ("fixed", "random", "shared-prefix")

PEERS = {
    "transformers": ("dtype", "device", "num_threads", "load_format", "download_dir", "seed"),
    "llamacpp": ("num_threads", "max_model_len", "download_dir", "seed"),
    "openvino": ("num_threads", "max_model_len", "download_dir", "seed"),
    "onnxruntime": ("num_threads", "download_dir", "seed"),
}
"""Other engines and the settings that they support."""

CONDITIONAL: dict[str, tuple[str, Any, Callable[[argparse.Namespace], bool]]] = {
    "num_requests": ("workloads other than agents", None, lambda args: args.workload != "agents"),
    "trace_file": ("--workload trace", None, lambda args: args.workload == "trace"),
    "time_scale": ("--workload trace", 1.0, lambda args: args.workload == "trace"),
    "num_gpus": ("the workloads agents and trace", None, lambda args: args.workload in OF_SESSIONS),
    "api": (
        "the workloads agents and trace with --url",
        "auto",
        lambda args: args.workload in OF_SESSIONS and args.url is not None,
    ),
    "input_len": (
        f"the workloads {', '.join(LENGTHS)}",
        128,
        lambda args: args.workload in LENGTHS,
    ),
    "output_len": (
        f"the workloads {', '.join(LENGTHS)}",
        128,
        lambda args: args.workload in LENGTHS,
    ),
    "range_ratio": ("--workload random", 0.5, lambda args: args.workload == "random"),
    "prefix_len": ("--workload shared-prefix", 400, lambda args: args.workload == "shared-prefix"),
    "lengths_file": ("--workload lengths", None, lambda args: args.workload == "lengths"),
    "vocab_size": ("workloads of random token ids", None, lambda args: args.workload != "sharegpt"),
    "batch_size": (
        "--engine transformers, llamacpp, openvino and onnxruntime",
        8,
        lambda args: args.engine != "slipstream",
    ),
    "served_model_name": ("--url", None, lambda args: args.url is not None),
    "api_key": ("--url", None, lambda args: args.url is not None),
    "ignore_eos": ("--url", True, lambda args: args.url is not None),
    "clients": (
        "--url with workloads other than agents and trace",
        "auto",
        lambda args: args.url is not None and args.workload not in OF_SESSIONS,
    ),
    "compare": ("--url", None, lambda args: args.url is not None),
    "compare_model": ("--compare", None, lambda args: args.compare is not None),
    "compare_api_key": ("--compare", None, lambda args: args.compare is not None),
    "rounds": ("runs without --find-rate", 1, lambda args: args.find_rate is None),
    "find_rate_runs": ("--find-rate", 10, lambda args: args.find_rate is not None),
}
"""Options that only some choices use: (the choices, the option's default, whether such a choice was
made). An option that is not given sets no attribute; `settle` adds the default."""


NUM_REQUESTS = 32


def add_workload(parser: argparse.ArgumentParser, *, sessions: bool = False) -> None:
    """Add the options of workloads; with `sessions` also those of sessions."""
    group = parser.add_argument_group("workload")
    choices = (*WORKLOADS, *OF_SESSIONS) if sessions else WORKLOADS
    group.add_argument("--workload", choices=choices, default="fixed", help="(default: fixed)")
    for name, kind, text in (
        ("--num-requests", int, f"(default: {NUM_REQUESTS}; of a trace all)"),
        ("--input-len", int, "prompt tokens (default: 128)"),
        ("--output-len", int, "answer tokens (default: 128)"),
        ("--range-ratio", float, "random: from ratio·len to len (0.5)"),
        ("--prefix-len", int, "shared-prefix: common tokens (default: 400)"),
    ):
        group.add_argument(name, type=kind, default=argparse.SUPPRESS, metavar="X", help=text)
    group.add_argument(
        "--lengths-file",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help='lengths: {"lengths": [[input, output], …]}',
    )
    group.add_argument(
        "--warmup",
        type=int,
        default=4,
        metavar="X",
        help="short requests before, not counted (default: 4)",
    )
    if sessions:
        own = parser.add_argument_group("sessions of --workload agents and trace")
        of_type: Callable[[str], Any]
        for name, of_type, metavar, text in (
            ("--trace-file", str, "FILE", "trace: Mooncake's JSON lines or Azure's CSV"),
            (
                "--time-scale",
                float,
                "X",
                Rare("trace: its times and pauses times this (default: 1)"),
            ),
            (
                "--num-gpus",
                int,
                "N",
                Rare("devices of the server, for figures of each (default: 1)"),
            ),
        ):
            own.add_argument(
                name, type=of_type, default=argparse.SUPPRESS, metavar=metavar, help=text
            )
        own.add_argument(
            "--api",
            choices=("auto", "completions", "chat"),
            default=argparse.SUPPRESS,
            help="token ids of exact lengths, or messages (default: auto, token ids if the server returns such)",
        )
        add_agent_options(parser.add_argument_group(AGENTS_TITLE))
    parser.add_argument(
        "--energy", action="store_true", help="the run's joules, too, where NVML or RAPL tells them"
    )


def finish(parser: argparse.ArgumentParser, handler: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument(
        "--output", metavar="FILE", help="write the result, with all settings, as JSON"
    )
    add_output_options(parser)
    add_engine_options(parser, note="as in LLM(...); prefix caching is off unless asked for")

    def checked(args: argparse.Namespace) -> int:
        check_output(args)
        warn_if_busy()
        code = handler(args)
        if not args.json and getattr(args, "model", None) and not getattr(args, "url", None):
            print(f"\nto serve it like this: {serve_command(args)}")
        return code

    parser.set_defaults(handler=checked)


def warn_if_busy() -> None:
    """Warn if other programs use the CPU, which makes measurements too slow."""
    from slipstream.costs.hardware import available_cores, busy_cores

    busy, cores = busy_cores(), available_cores()
    if busy > max(0.25, 0.1 * cores):
        say(
            f"slipstream: other programs keep {busy:.1f} of {cores} cores busy; an idle machine measures better"
        )


def serve_command(args: argparse.Namespace) -> str:
    """Command that serves the model with the given engine options."""
    return shlex.join(["slipstream", "serve", args.model, *engine_words(args)])


def bench_args(args: argparse.Namespace, *, needs_text: bool, sharing: bool) -> EngineArgs:
    """Engine settings for a benchmark: a tokenizer only if text is needed, and prefix caching only
    if prefixes are shared."""
    given = argparse.Namespace(**{**vars(args), "model": getattr(args, "model", None) or ""})
    return engine_args(given, enable_prefix_caching=sharing, skip_tokenizer_init=not needs_text)


def parse_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise ConfigError(
            f"batch_sizes={text!r} is not a list of whole numbers such as 1,2,4",
            field="batch_sizes",
        )
    return sizes


def positive(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} must be above 0, got {getattr(args, name)}", field=name)


def check_output(args: argparse.Namespace) -> None:
    """Raise an error before measuring if --output can't be written."""
    if args.output is not None:
        path = Path(args.output)
        is_there = path.exists()
        if is_there and not path.is_file() and not path.is_dir():
            return  # a pipe, whose reader would see an end of file, or a device
        with writing(path, "output"):
            # a test by opening, because permissions don't show root a place where nothing can be written
            path.open("a", encoding="utf-8").close()
            if not is_there:
                path.unlink()


def deliver(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write the result to --output. The tables were printed before, because the disk may be
    full."""
    if args.output is not None:
        text = json.dumps(result, default=plain, indent=2, ensure_ascii=False) + "\n"
        with writing(args.output, "output"):
            Path(args.output).write_text(text, encoding="utf-8")
    if args.json:  # last, because a failure to write is itself reported as a JSON object
        print_json(result)


def settle(args: argparse.Namespace) -> None:
    """Raise an error for options that have no effect; set the others to their defaults."""
    for name, (owner, default, is_used) in CONDITIONAL.items():
        if hasattr(args, name) and not is_used(args):
            raise _unused(name, owner)
        vars(args).setdefault(name, default)
    for name in given_agent_options(args):
        if args.workload != "agents" and (args.workload, name) != ("trace", "max_context"):
            raise _unused(name, "--workload agents")
    if args.num_requests is None and args.workload != "trace":
        args.num_requests = NUM_REQUESTS
    text = args.workload == "sharegpt"
    if getattr(args, "url", None) is not None:
        if args.model is not None and args.vocab_size is not None:
            raise ConfigError(
                "with --url, --vocab-size takes the place of a model; leave one out",
                field="vocab_size",
            )
        fetches = ("download_dir",) if text or args.model is not None else ()
        refuse_engine_options(
            args, text=text, only=("seed", *fetches), owner="an engine started here, without --url"
        )
    elif (engine := getattr(args, "engine", None)) in PEERS:
        refuse_engine_options(args, text=text, only=PEERS[engine], owner="--engine slipstream")
    else:
        refuse_engine_options(args, text=text)


def refuse_engine_options(
    args: argparse.Namespace, *, text: bool, only: tuple[str, ...] | None = None, owner: str = ""
) -> None:
    """Raise an error for engine options not in `only`, and for --tokenizer if no text is tokenized."""
    for name in (field.name for field in dataclasses.fields(EngineArgs)):
        if name == "model" or not hasattr(args, name):
            continue
        if name == "tokenizer":
            if not text and getattr(args, "skip_tokenizer_init", True):
                raise _unused(name, "--workload sharegpt")
        elif only is not None and name not in only:
            raise _unused(name, owner)


def _unused(name: str, owner: str) -> ConfigError:
    option = "--" + name.replace("_", "-")
    return ConfigError(
        f"{option} belongs to {owner}, and has no effect here; leave it out", field=name
    )


def vocab_size(settings: EngineArgs) -> int:
    from slipstream.hub import resolve_model
    from slipstream.spec.description import read_spec

    return read_spec(
        resolve_model(settings.model, download_dir=settings.download_dir)
    ).spec.vocab_size


def needs_vocab_size(args: argparse.Namespace, settings: EngineArgs) -> bool:
    """Whether random token ids are needed and the vocabulary's size is still unknown."""
    return args.workload != "sharegpt" and args.vocab_size is None and not settings.model


def make_workload(args: argparse.Namespace, settings: EngineArgs) -> BenchWorkload:
    from slipstream.bench import workload as make

    positive(args, "num_requests", "input_len", "output_len", "prefix_len")
    if args.warmup < 0:
        raise ConfigError("warmup must not be negative", field="warmup")
    count, seed = args.num_requests, settings.seed
    if args.workload == "sharegpt":
        from slipstream.engine.text.tokenizer import Tokenizer
        from slipstream.hub import read_sharegpt, resolve_dataset, resolve_model

        if not settings.model:
            raise ConfigError(
                "the sharegpt workload needs a model, for its tokenizer", field="model"
            )
        tokenizer = Tokenizer.from_pretrained(
            resolve_model(settings.tokenizer or settings.model, download_dir=settings.download_dir)
        )
        path = resolve_dataset("sharegpt", download_dir=settings.download_dir)
        with phases("reading the conversations"):
            return make.sharegpt(read_sharegpt(path), tokenizer.encode, count, seed=seed)
    vocab = vocab_size(settings) if args.vocab_size is None else args.vocab_size
    if args.workload == "lengths":
        if args.lengths_file is None:
            raise ConfigError("the workload lengths needs --lengths-file", field="lengths_file")
        return make.recorded(Path(args.lengths_file), count, vocab_size=vocab, seed=seed)
    if args.workload == "shared-prefix":
        return make.shared_prefix(
            count, args.prefix_len, args.input_len, args.output_len, vocab_size=vocab, seed=seed
        )
    if args.workload == "random":
        if not 0 < args.range_ratio <= 1:
            raise ConfigError("range_ratio must be above 0 and at most 1", field="range_ratio")
        ranges = [
            (max(1, int(length * args.range_ratio)), length)
            for length in (args.input_len, args.output_len)
        ]
        return make.uniform(count, ranges[0], ranges[1], vocab_size=vocab, seed=seed)
    return make.fixed(count, args.input_len, args.output_len, vocab_size=vocab, seed=seed)


def verdict(summary: Summary) -> int:
    """Exit code: 1 if a request failed, because then the run is not a valid measurement."""
    return 1 if summary.num_failed else 0
