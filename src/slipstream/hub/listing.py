"""The models on this machine: packages in the user's cache folder, and repositories in the hub's cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.base.files import waited_for
from slipstream.errors import DownloadError
from slipstream.hub import MODELS, cache_folder, hub_folder, use_mark
from slipstream.hub.names import TABLE, HubModel, named, parse_name, quant_of
from slipstream.hub.packages import Packaged
from slipstream.hub.store import HubStore, files_below, is_complete, quants


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model on this machine. `used_at`: seconds since the epoch; None if it was never used here.

    `files`: of a repository with several GGUF models, those of this one."""

    name: str
    path: Path
    num_bytes: int
    quant: str | None
    used_at: float | None
    source: Packaged | HubModel
    files: tuple[str, ...] | None = None
    is_complete: bool = True


def list_models(download_dir: str | None = None) -> list[CachedModel]:
    """All models in the caches, those used last first."""
    found = [*_packages(download_dir), *_repositories(download_dir)]
    return sorted(found, key=lambda m: (-(m.used_at or 0), m.name))


def find_models(name: str, download_dir: str | None = None) -> list[CachedModel]:
    """Finds the models with a name in the caches: each quant of ORG/NAME. DownloadError if there is
    none."""
    there = list_models(download_dir)
    try:
        source = parse_name(name)
    except DownloadError:
        source = None
    if isinstance(source, HubModel) and source.quant is None and source.file is None:
        found = [
            m for m in there if isinstance(m.source, HubModel) and m.source.repo == source.repo
        ]
    elif isinstance(source, HubModel):
        found = [
            m
            for m in there
            if isinstance(m.source, HubModel)
            and m.source.repo == source.repo
            and (
                (m.quant or "").lower() == (source.quant or "").lower()
                or (source.file is not None and source.file in (m.files or ()))
            )
        ]
    else:
        found = [m for m in there if source is not None and m.source == source]
    if not found:
        names = ", ".join(m.name for m in there) or "none"
        raise DownloadError(f"{name!r} is not on this machine; there is {names}", field="model")
    return found


def _packages(download_dir: str | None) -> list[CachedModel]:
    folder, found = cache_folder(download_dir) / "models", []
    for name, item in MODELS.items():
        path = folder / item.cached_name
        if path.exists():
            num_bytes = sum(files_below(path).values()) if path.is_dir() else path.stat().st_size
            quant = quant_of(item.cached_name)
            found.append(_model(name, path, num_bytes, quant, item))
    return found


def _repositories(download_dir: str | None) -> list[CachedModel]:
    store, found = HubStore(hub_folder(download_dir)), list[CachedModel]()
    short = {
        entry.source: name for name, entry in TABLE.items() if isinstance(entry.source, HubModel)
    }
    for repo, snapshot in store.repositories():
        sizes = files_below(snapshot)
        if is_complete(snapshot):
            source = HubModel(repo)
            size = sum(n for file, n in sizes.items() if not file.endswith(".gguf"))
            found.append(_model(short.get(source, repo), snapshot, size, None, source))
        for quant in quants(sizes):
            source = HubModel(repo, quant.name)
            name = short.get(source, f"{repo}:{quant.name}")
            path = snapshot / quant.files[0]
            found.append(_model(name, path, quant.num_bytes, quant.name, source, quant.files))
    for repo, num_bytes in store.unfinished():
        source = HubModel(repo)
        found.append(
            CachedModel(
                name=repo,
                path=store.folder(repo),
                num_bytes=num_bytes,
                quant=None,
                used_at=None,
                source=source,
                is_complete=False,
            )
        )
    return found


def _model(
    name: str,
    path: Path,
    num_bytes: int,
    quant: str | None,
    source: Packaged | HubModel,
    files: tuple[str, ...] | None = None,
) -> CachedModel:
    try:
        used_at: float | None = use_mark(path).stat().st_mtime
    except OSError:
        used_at = None
    return CachedModel(
        name=name,
        path=path,
        num_bytes=num_bytes,
        quant=quant,
        used_at=used_at,
        source=source,
        files=files,
    )


def remove_model(model: CachedModel, download_dir: str | None = None) -> int:
    """Remove a model's files, and return the bytes that became free. Content that another model
    shares stays. DownloadError if it can't be removed, or is being fetched."""
    try:
        num_bytes = _removed(model, download_dir)
        use_mark(model.path).unlink(missing_ok=True)
    except OSError as error:
        raise DownloadError(
            f"{model.name} can't be removed: {error.filename or model.path}: {error.strerror or error}",
            field="models",
        ) from error
    return num_bytes


def _removed(model: CachedModel, download_dir: str | None) -> int:
    if isinstance(model.source, HubModel):
        store = HubStore(hub_folder(download_dir))
        with waited_for(store.lock(model.source.repo), wait=False) as is_free:
            if not is_free:
                raise DownloadError(
                    f"{model.source.repo} is being fetched: wait until that has ended, or end it",
                    field="models",
                )
            return store.remove(model.source.repo, model.files)
    if model.path.is_dir() and not model.path.is_symlink():
        import shutil

        shutil.rmtree(model.path)
    else:
        model.path.unlink()
    return model.num_bytes


def license_of(name: str, path: Path) -> str | None:
    """Finds the licence in the table of short names, or in the card that a hub's snapshot has."""
    if (entry := named(name)) is not None:
        return entry.license
    for folder in (path, *path.parents[:2]) if path.is_dir() else path.parents[:2]:
        card = folder / "README.md"
        if card.is_file():
            text = card.read_text("utf-8", errors="replace")[:20_000]
            front = text.split("\n---", 1)[0] if text.startswith("---") else ""
            for line in front.splitlines():
                if line.startswith("license:"):
                    return line.removeprefix("license:").strip().strip("'\"") or None
    return None
