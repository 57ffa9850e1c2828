"""The hub's cache on this machine, in the layout of Hugging Face's own library, which shares it.

    models--ORG--NAME/refs/main                 the commit that was fetched last
    models--ORG--NAME/blobs/HASH                each content once
    models--ORG--NAME/snapshots/COMMIT/FILE     a link to the content
    .locks/models--ORG--NAME/slipstream.lock    held during a download or a removal, then removed

A file is linked only after its content was checked, so an interrupted download never looks
finished. A later download continues with `blobs/HASH.incomplete`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import CheckpointError, DownloadError
from slipstream.hub.names import HubModel, quant_of
from slipstream.spec.stored.gguf_parts import parts_of
from slipstream.spec.stored.gguf_types import BY_NAME
from slipstream.spec.stored.safetensors import weight_files

MEMORY_SHARE = 0.8
"""Maximum fraction of the memory for the weights of an automatically chosen GGUF file."""

_WIDE = ("F32", "BF16", "F16")
"""Types that are chosen only if there is none smaller."""
_LATTICES = ("IQ1", "IQ2", "IQ3")
"""Types that need another package, and are chosen only if there are no others."""


@dataclass(frozen=True, slots=True)
class Quant:
    """A GGUF model in a repository: its files in order, and their total bytes."""

    name: str
    files: tuple[str, ...]
    num_bytes: int

    @property
    def is_readable(self) -> bool:
        """Whether this program reads the type."""
        plain = self.name.removeprefix("UD-")
        return plain[:4] in {t[:4] for t in BY_NAME}  # as Q4_K_M, MXFP4_MOE


def quants(sizes: Mapping[str, int]) -> list[Quant]:
    """GGUF models among a repository's files, smallest first. Projectors, importance matrices, and
    models with a missing part are left out."""
    found = []
    for file in sorted(sizes):
        name = file.rsplit("/", 1)[-1].lower()
        if not name.endswith(".gguf") or "mmproj" in name or "imatrix" in name:
            continue
        parts = [path.as_posix() for path in parts_of(Path(file))]
        if parts[0] == file and all(part in sizes for part in parts):
            label = quant_of(file) or name.removesuffix(".gguf")
            found.append(Quant(label, tuple(parts), sum(sizes[part] for part in parts)))
    return sorted(found, key=lambda q: q.num_bytes)


def choose_quant(repo: str, there: list[Quant], wanted: str | None, memory_bytes: int) -> Quant:
    """The GGUF model that is `wanted`; if None, the largest that fits in the memory, with at most 8
    bits if there is one. DownloadError lists the available ones."""
    listed = ", ".join(f"{q.name} ({megabytes(q.num_bytes)})" for q in there)
    if wanted is not None:
        same = [q for q in there if q.name.lower() == wanted.lower()]
        if not same:
            raise DownloadError(
                f"{repo} has no GGUF file of {wanted!r}, but {listed or 'none at all'}",
                field="model",
            )
        return same[-1]
    readable = [q for q in there if q.is_readable]
    if not readable:
        raise DownloadError(
            f"{repo} has only GGUF types that are not read here: {listed}", field="model"
        )
    narrow = [q for q in readable if q.name not in _WIDE] or readable
    narrow = [q for q in narrow if not q.name.startswith(_LATTICES)] or narrow
    # a repository's own quants before its dynamic ones, which mix in types that are not read here
    plain = [q for q in narrow if not q.name.startswith("UD-")] or narrow
    fitting = [q for q in plain if q.num_bytes <= MEMORY_SHARE * memory_bytes]
    if not fitting:
        raise DownloadError(
            f"{repo}: none of {listed} fits in {megabytes(memory_bytes)} of memory; name one to fetch it all the same, "
            f"as in {repo}:{plain[0].name}",
            field="model",
        )
    return fitting[-1]


def megabytes(num_bytes: int) -> str:
    return (
        f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{max(1, round(num_bytes / 1e6))} MB"
    )


def is_complete(folder: Path) -> bool:
    """Whether a folder has its config and all its weight files, including those that its index
    names."""
    if not (folder / "config.json").is_file():
        return False
    try:
        files = weight_files(folder)
    except CheckpointError:
        return True  # the files are present, and their reader reports faults
    return bool(files) and all(file.is_file() for file in files)


def files_below(folder: Path) -> dict[str, int]:
    """Sizes of the files below a folder, by name. Broken links are left out."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@dataclass(frozen=True, slots=True)
class HubStore:
    """The hub's cache below `root`."""

    root: Path

    def folder(self, repo: str) -> Path:
        return self.root / ("models--" + repo.replace("/", "--"))

    def lock(self, repo: str) -> Path:
        """Path of the lock for fetching or removing a repository. It is outside the folder, so that
        removing the folder does not allow a second lock."""
        return self.root / ".locks" / self.folder(repo).name / "slipstream.lock"

    def snapshot(self, repo: str) -> Path | None:
        """The folder of the commit that was fetched last."""
        folder = self.folder(repo)
        try:
            commit = (folder / "refs" / "main").read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        found = folder / "snapshots" / commit
        return found if re.fullmatch("[0-9a-f]{40,64}", commit) and found.is_dir() else None

    def cached(self, model: HubModel) -> Path | None:
        """The model's folder or first GGUF file, if all of it is here."""
        snapshot = self.snapshot(model.repo)
        if snapshot is None:
            return None
        if model.file is not None:
            parts = [snapshot / path for path in parts_of(Path(model.file))]
            return snapshot / model.file if all(part.is_file() for part in parts) else None
        if model.quant is None and is_complete(snapshot):
            return snapshot
        there = quants(files_below(snapshot))
        if model.quant is not None:
            there = [q for q in there if q.name.lower() == model.quant.lower()]
        return snapshot / there[-1].files[0] if there else None

    def repositories(self) -> Iterator[tuple[str, Path]]:
        """(repository, snapshot) of each that is in the cache."""
        try:
            folders = sorted(self.root.iterdir())
        except OSError:
            return
        for folder in folders:
            kind, _, name = folder.name.partition("--")
            repo = name.replace("--", "/", 1)
            if kind == "models" and (snapshot := self.snapshot(repo)) is not None:
                yield repo, snapshot

    def unfinished(self) -> Iterator[tuple[str, int]]:
        """(repository, bytes) of each download that was started and not completed."""
        for folder in sorted(self.root.glob("models--*--*")):
            repo = folder.name.removeprefix("models--").replace("--", "/", 1)
            if self.snapshot(repo) is None and (num_bytes := _disk_bytes(folder)):
                yield repo, num_bytes

    def link(self, repo: str, commit: str, file: str, digest: str) -> None:
        """Link a verified blob as a file of the commit."""
        folder = self.folder(repo)
        path = folder / "snapshots" / commit / file
        path.parent.mkdir(parents=True, exist_ok=True)
        target = os.path.relpath(folder / "blobs" / digest, path.parent)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.unlink(missing_ok=True)
        partial.symlink_to(target)
        os.replace(partial, path)

    def remove(self, repo: str, files: tuple[str, ...] | None) -> int:
        """Remove a repository's `files`, or all of it, and return the bytes that became free. A blob
        that another commit links to stays."""
        named = self.folder(repo)
        folder = named.resolve()  # which users put on another disk
        if not folder.exists():
            return 0
        before = _disk_bytes(folder)
        snapshot = self.snapshot(repo)
        if snapshot is not None:
            snapshot = snapshot.resolve()
        if files is not None and snapshot is not None:
            for file in files:
                (snapshot / file).unlink(missing_ok=True)
            left = files_below(snapshot)
            if quants(left) or any(name.endswith(".safetensors") for name in left):
                self._remove_unused(folder)
                return before - _disk_bytes(folder)
        elif snapshot is not None:
            shutil.rmtree(snapshot)
            (folder / "refs" / "main").unlink(missing_ok=True)
        others = [s for s in (folder / "snapshots").glob("*") if s != snapshot and files_below(s)]
        if snapshot is None or not others:
            shutil.rmtree(folder)
            if named.is_symlink():
                named.unlink()
            return before
        if snapshot is not None and snapshot.exists():
            shutil.rmtree(snapshot)
        self._remove_unused(folder)
        return before - _disk_bytes(folder)

    @staticmethod
    def _remove_unused(folder: Path) -> None:
        used = {path.resolve() for path in (folder / "snapshots").rglob("*") if path.is_symlink()}
        for blob in (folder / "blobs").glob("*"):
            if blob.resolve() not in used:
                blob.unlink()


def _disk_bytes(folder: Path) -> int:
    return sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
