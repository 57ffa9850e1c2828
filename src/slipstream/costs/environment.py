"""Describes the environment of a measurement: versions, machine, commit. Imports none of the
packages it names."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slipstream import __version__
from slipstream.costs.hardware import gpus, host_info

PACKAGES = ("torch", "triton", "numpy", "tokenizers", "transformers")


def environment() -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "versions": versions(),
        "git_commit": git_commit(),
        "machine": {"host": host_info(), "gpus": gpus()},
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"slipstream": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def git_commit() -> str | None:
    """Returns the commit of this checkout, with "+" if tracked files have changed. None outside a
    checkout."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def plain(value: Any) -> Any:
    """Convert a value that `json` can't write to one that it can."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
