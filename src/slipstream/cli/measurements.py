"""What the kinds of `bench` share: settings of the engine, checks of numbers, and the result's way out."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from slipstream.cli.console import print_json
from slipstream.cli.options import engine_args
from slipstream.config import EngineArgs
from slipstream.errors import ConfigError
from slipstream.plan.environment import plain


def bench_args(args: argparse.Namespace, *, needs_text: bool, sharing: bool) -> EngineArgs:
    """The engine's settings. It has a tokenizer only for text, and prefix caching only where prefixes are shared."""
    model = getattr(args, "model", None) or ""
    settings = engine_args(args, enable_prefix_caching=sharing, skip_tokenizer_init=not needs_text)
    return settings if settings.model else engine_args(args, **{**plain(settings), "model": model})


def parse_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise ConfigError(f"batch_sizes={text!r} is not a list of whole numbers such as 1,2,4", field="batch_sizes")
    return sizes


def positive(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} must be above 0, got {getattr(args, name)}", field=name)


def check_output(args: argparse.Namespace) -> None:
    """Refuse, before the measuring, an --output that can't be written."""
    if args.output is not None:
        folder = Path(args.output).resolve().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(args.output).is_dir():
            raise ConfigError(f"cannot write {args.output}: {folder} is no folder that can be written to", field="output")


def deliver(args: argparse.Namespace, result: dict[str, Any]) -> None:
    if args.json:
        print_json(result)
    if args.output is not None:
        text = json.dumps(result, default=plain, indent=2, ensure_ascii=False) + "\n"
        try:
            Path(args.output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {args.output}: {error.strerror}", field="output") from None
