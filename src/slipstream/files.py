"""Files that appear whole or not at all, and digests of what results follow from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the file atomically: whoever reads it meanwhile has the old one or the new one. Text is UTF-8."""
    # Of this process alone: two that write the same file do not mix.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def digest(value: Any, *, default: Callable[[Any], Any] | None = None) -> str:
    """SHA-256 of `value` as JSON, in hexadecimal; `default` as of `json.dumps`. The order of keys counts for nothing."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=default).encode()).hexdigest()
