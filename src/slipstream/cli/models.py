"""Names of models on the command line: a wrong name is reported before heavy imports, and a hub's
model is downloaded, with progress shown, before an engine starts."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

FIRST_WORD = (
    *("build", "chat", "check-model", "compress", "embed", "eval", "info", "optimize", "plan"),
    *("pull", "rerank", "serve", "show", "transcribe", "tune"),
)
"""Verbs whose first argument is a model."""


def refuse_wrong_name(words: Sequence[str]) -> None:
    """Raise DownloadError if the command line's model has an impossible name. Command lines with
    options are left to the verb, so that a wrong option is reported first."""
    verb, *given = [word for word in words if word != "--json"]
    if verb == "bench" and given[:1] in (["latency"], ["throughput"], ["roofline"]):
        given = given[1:]
    elif verb not in FIRST_WORD and not (verb == "run" and len(given) == 2):
        return
    if given and given[0] and not any(word.startswith("-") and word != "-" for word in given):
        from slipstream.hub import check_name
        from slipstream.hub.several import named_models

        for name in named_models(given).values() if verb == "serve" else given[:1]:
            check_name(name)


def fetch_model(
    name: str, download_dir: str | None, hub: str | None = None, *, refresh: bool = False
) -> Path:
    """Path of the model's folder or file, downloaded if necessary, with progress on standard error."""
    import dataclasses

    from slipstream.hub import FetchOptions, check_name, find_cached, resolve_model
    from slipstream.hub.names import HubModel

    source = check_name(name)
    if isinstance(source, Path):
        return source
    if not refresh and find_cached(name, download_dir=download_dir) is not None:
        return resolve_model(name, download_dir=download_dir)
    from slipstream.cli.console import Progress, say, shown
    from slipstream.hub.names import named

    entry = named(name)
    about = f" ({entry.describe()})" if entry is not None else ""
    with shown(Progress(f"fetching {name}{about}", unit=_megabytes)) as progress:
        options = FetchOptions(
            progress=progress.set_done,
            say=lambda text: say(f"slipstream: {text}"),
            refresh=refresh and isinstance(source, HubModel),
        )
        if isinstance(source, HubModel):
            options = dataclasses.replace(options, memory_bytes=_memory_bytes())
        if hub is not None:
            options = dataclasses.replace(options, hub=hub)
        return resolve_model(name, download_dir=download_dir, options=options)


def _memory_bytes() -> int:
    """Bytes of memory for a model: the largest GPU's, or the host's free memory."""
    from slipstream.costs.hardware import gpus, host_memory

    cards = gpus()
    return max(card.memory_bytes for card in cards) if cards else host_memory()[1]


def _megabytes(num_bytes: int) -> str:
    from slipstream.hub.store import megabytes

    return megabytes(num_bytes)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns to standard output; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())
    sys.stdout.flush()


def ago(at: float | None) -> str:
    """Time since `at`, in the largest suitable unit."""
    if at is None:
        return "-"
    seconds = max(0.0, time.time() - at)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (count := int(seconds // length)) > 0:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
