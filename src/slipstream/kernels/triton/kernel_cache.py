"""Triton's cache with read-only folders beneath it, such as an engine folder's kernels.

A folder has the shape of Triton's own cache: a folder for each kernel, named by the hash of everything
it was compiled from. So a kernel of another version is never taken.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import DependenciesFinder


class LayeredCache(FileCacheManager):  # type: ignore[misc]
    """Triton's cache manager, with more folders (`layers`) that are searched after its own."""

    layers: tuple[Path, ...] = ()

    def get_file(self, filename: str) -> str | None:
        found: str | None = super().get_file(filename)
        if found is None:
            kept = (layer / self.key / filename for layer in self.layers)
            found = next((str(path) for path in kept if path.is_file()), None)
        return found

    def get_group(self, filename: str) -> dict[str, str] | None:
        found: dict[str, str] | None = super().get_group(filename)
        if found is not None:
            return found
        for layer in self.layers:
            folder = layer / self.key
            try:
                group = json.loads((folder / f"__grp__{filename}").read_bytes())
                paths = {name: folder / name for name in group["child_paths"]}
            except (OSError, ValueError, KeyError):
                continue
            if all(path.is_file() for path in paths.values()):  # wherever the folder is now
                return {name: str(path) for name, path in paths.items()}
        return None


def use_layers(layers: Sequence[Path]) -> None:
    """Make Triton search these folders for kernels, in this process. Call it before a kernel is
    hashed."""
    made = type("LayeredCache", (LayeredCache,), {"layers": tuple(layers)})
    knobs.cache.manager_class = made
    if DependenciesFinder._update_hash.__module__ != __name__:
        DependenciesFinder._update_hash = _callee_first(DependenciesFinder._update_hash)


def _callee_first(update: Any) -> Any:
    """Replacement for Triton's hashing of a function that a kernel calls: it hashes the function
    first.

    Triton up to 3.6 takes the constants that the function uses before it hashes the function, which
    finds them. So a kernel's hash depended on whether another kernel had called the function before,
    and a process compiled again what others had compiled in another order.
    """

    def update_hash(finder: Any, function: Any) -> None:
        function.cache_key  # noqa: B018 (found once, and kept)
        update(finder, function)

    return update_hash


def holds(name: str, layers: Sequence[Path]) -> bool:
    """Whether Triton's cache or a layer has the kernel with this folder name. Looking for one leaves an empty folder."""
    folders = (layer / name for layer in (Path(knobs.cache.dir), *layers))
    return any(folder.is_dir() and any(folder.iterdir()) for folder in folders)
