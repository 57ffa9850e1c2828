"""Names of GGUF files with one model in parts: NAME-00001-of-00003.gguf and so on, as in llama.cpp.
No torch."""

from __future__ import annotations

import re
from pathlib import Path

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 4096


def parts_of(path: Path) -> list[Path]:
    """All files, existing or not, of the model that `path` is a part of, in order. A file without a
    part number is a whole model."""
    named = _PART.fullmatch(path.name)
    count = int(named[3]) if named else 0
    if named is None or not 1 <= int(named[2]) <= count <= _MAX_PARTS:
        return [path]
    return [path.with_name(f"{named[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def model_files(folder: Path) -> list[Path]:
    """The GGUF models in a folder; for a model in parts, its first file."""
    return list(dict.fromkeys(parts_of(file)[0] for file in sorted(folder.glob("*.gguf"))))
