"""A client of the Hugging Face hub's HTTP API: which files a repository has, and their contents.

1. `GET /api/models/REPO/revision/main?blobs=true` names a commit and the size and hash of each file:
   SHA-256 of large files, git's hash of the others.
2. `GET /REPO/resolve/COMMIT/FILE` gives a file, large ones by a redirect to another host. The user's
   token goes to the hub itself only.

A broken transfer is resumed by a range request. A file with a wrong hash is fetched once more, and
is then an error. After 429 and 503 it waits as long as the hub asks, up to `MAX_WAIT_S`.
"""

from __future__ import annotations

import email.utils
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpx

from slipstream import __version__
from slipstream.errors import DownloadError

CHUNK = 1 << 20
MAX_FAILURES = 5
"""Number of consecutive failures without any received byte after which a fetch gives up."""
MAX_WAIT_S = 300.0
MAX_REDIRECTS = 5
MAX_LISTING_BYTES = 1 << 26
MAX_FILE_BYTES = 1 << 50
UNREACHED = (
    "{name} can't be fetched from the hub: check the network, give the path of a folder that you have, "
    "or use smollm2 ({error})"
)
TIMEOUT = httpx.Timeout(30.0, connect=10.0)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `digest` is its SHA-256, or git's SHA-1 if it is small."""

    name: str
    size: int
    digest: str

    @property
    def is_large(self) -> bool:
        return len(self.digest) == 64

    def matches(self, path: Path) -> bool:
        """Whether the content has the size and the hash."""
        if path.stat().st_size != self.size:
            return False
        sha = hashlib.sha256() if self.is_large else hashlib.sha1(usedforsecurity=False)
        if not self.is_large:
            sha.update(b"blob %d\0" % self.size)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                sha.update(chunk)
        return sha.hexdigest() == self.digest


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository's commit and files. `license` is its card's."""

    name: str
    commit: str
    files: dict[str, HubFile]
    license: str | None = None


class _TryAgainError(Exception):
    """A temporary failure. `after_s`: seconds to wait, as the hub asks."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class HubClient:
    """A hub at an address, such as https://huggingface.co. `say` is called with a message about
    each wait."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        say: Callable[[str], None] = lambda _: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not _is_address(url):
            raise DownloadError(f"the hub {url!r} is no http or https address", field="hub")
        if token is not None and not (token.isascii() and token.isprintable()):
            raise DownloadError(
                "the hub's token (HF_TOKEN, or the one that `hf auth login` keeps) has characters that no token has: copy "
                "it again",
                field="HF_TOKEN",
            )
        self.url, self._token, self._say, self._sleep = url.rstrip("/"), token, say, sleep
        self._http = httpx.Client(timeout=TIMEOUT, follow_redirects=False)

    def close(self) -> None:
        self._http.close()

    def repository(self, name: str) -> Repository:
        """The newest commit of a repository, with its files."""
        listed = self._retried(name, lambda: self._listing(name))
        commit, files = listed.get("sha"), {}
        if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
            raise DownloadError(f"the hub at {self.url} names no commit of {name}", field="model")
        siblings = listed.get("siblings", [])
        if not isinstance(siblings, list):
            raise self._no_hub()
        for entry in siblings:
            large = (entry.get("lfs") or {}) if isinstance(entry, dict) else None
            if not isinstance(large, dict):
                raise self._no_hub()
            path, size = entry.get("rfilename"), large.get("size", entry.get("size"))
            digest = large.get("sha256") or entry.get("blobId")
            if not _is_safe(path):
                continue
            if (
                type(size) is not int
                or not 0 <= size <= MAX_FILE_BYTES
                or not re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{40}", str(digest))
            ):
                raise DownloadError(
                    f"the hub at {self.url} states no size or hash of {path} of {name}",
                    field="model",
                )
            files[path] = HubFile(path, size, digest)
        card = listed.get("cardData")
        said = card.get("license") if isinstance(card, dict) else None
        return Repository(name, commit, files, said if isinstance(said, str) else None)

    def fetch(
        self, of: Repository, file: HubFile, to: Path, progress: Callable[[int], None]
    ) -> None:
        """Write the file's checked content to `to`. `progress` is called with the bytes written so far.

        What was fetched stays in `to`.incomplete if it fails."""
        partial = to.with_name(to.name + ".incomplete")
        url = f"{self.url}/{of.name}/resolve/{of.commit}/{quote(file.name)}"
        for is_last in (False, True):
            if not (partial.exists() and partial.stat().st_size == file.size):
                self._retried(of.name, lambda: self._continue(url, of, file, partial, progress))
            if file.matches(partial):
                os.replace(partial, to)
                return
            partial.unlink()
            if is_last:
                break
            self._say(f"{file.name} arrived damaged; fetching it again")
        raise DownloadError(
            f"{file.name} of {of.name} has another hash than {file.digest}: it was changed or damaged on its way, "
            "and is not used",
            field="model",
        )

    def _continue(
        self,
        url: str,
        of: Repository,
        file: HubFile,
        partial: Path,
        progress: Callable[[int], None],
    ) -> None:
        """Fetch the rest of a partial file."""
        descriptor = os.open(
            partial, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
        with open(descriptor, "ab") as out:
            if out.tell() > file.size:
                out.truncate(0)
            begin = have = os.fstat(out.fileno()).st_size
            if have == file.size:
                return
            headers = {"Range": f"bytes={have}-"} if have else {}
            try:
                with self._get(url, headers) as response:
                    if response.status_code == 416 or (have and response.status_code == 200):
                        out.truncate(0)  # the range is refused or ignored: from the start
                        begin = have = 0
                        if response.status_code == 416:
                            raise _TryAgainError("the hub refused a range")
                    elif response.status_code not in (200, 206):
                        self._refuse(response, of.name, file.name)
                    for chunk in response.iter_raw():
                        have += len(chunk)
                        if have > file.size:
                            out.truncate(0)
                            raise _TryAgainError(f"{file.name} is longer than the hub said")
                        out.write(chunk)
                        progress(have)
            except httpx.TransportError as error:
                out.flush()
                raise _BrokenError(have - begin, str(error) or type(error).__name__) from error
            if have < file.size:
                raise _BrokenError(
                    have - begin, f"{file.name} ended after {have:,} of {file.size:,} bytes"
                )

    def _listing(self, name: str) -> dict[str, Any]:
        address = f"{self.url}/api/models/{name}/revision/main?blobs=true"
        try:
            with self._get(address, {}) as response:
                if response.status_code != 200:
                    self._refuse(response, name)
                body = bytearray()
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > MAX_LISTING_BYTES:
                        raise DownloadError(f"the hub's list of {name} is too long", field="model")
        except httpx.ConnectError as error:  # no network: said at once
            raise DownloadError(
                UNREACHED.format(name=repr(name), error=error), field="model"
            ) from error
        except httpx.TransportError as error:
            raise _TryAgainError(str(error) or type(error).__name__) from error
        except httpx.DecodingError:
            raise self._no_hub() from None

        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._no_hub()
        return found

    def _no_hub(self) -> DownloadError:
        return DownloadError(f"{self.url} does not speak the hub's API", field="hub")

    @contextmanager
    def _get(self, url: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """Context manager that streams a response, after redirects. The token is sent to the hub's
        own address only."""
        for _ in range(MAX_REDIRECTS + 1):
            sent = {"User-Agent": f"slipstream/{__version__}", "Accept-Encoding": "identity"}
            if self._token and _origin(url) == _origin(self.url):
                sent["Authorization"] = f"Bearer {self._token}"
            with self._http.stream("GET", url, headers={**sent, **headers}) as response:
                if response.status_code not in (301, 302, 303, 307, 308):
                    yield response
                    return
                where = response.headers.get("location", "")
            try:
                target = urljoin(url, where)
            except ValueError:
                target = where
            if not _is_address(target):
                raise DownloadError(
                    f"the hub at {self.url} leads to {where!r}, which is no address", field="hub"
                )
            if urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https":
                raise DownloadError(
                    f"the hub at {self.url} leads to an address without encryption", field="hub"
                )
            url = target
        raise DownloadError(f"the hub at {self.url} redirects without an end", field="hub")

    def _retried(self, name: str, work: Callable[[], Any]) -> Any:
        """Run `work`, and repeat it while its failures are temporary."""
        failures, waited_s = 0, 0.0
        while True:
            try:
                return work()
            except _TryAgainError as error:
                failures = (
                    1 if isinstance(error, _BrokenError) and error.num_bytes else failures + 1
                )
                wait_s = (
                    error.after_s if error.after_s is not None else min(8.0, 0.25 * 2**failures)
                )
                if failures > MAX_FAILURES or waited_s + wait_s > MAX_WAIT_S:
                    asks = (
                        "" if error.after_s is None else f"; it asks to wait {error.after_s:.0f} s"
                    )
                    raise DownloadError(
                        UNREACHED.format(name=repr(name), error=f"{error}{asks}")
                        + ". The next try goes on where this one stopped",
                        field="model",
                    ) from error
                waited_s += wait_s
                if wait_s >= 1:
                    self._say(f"{error}; trying again in {wait_s:.0f} s")
                self._sleep(wait_s)

    def _refuse(self, response: httpx.Response, name: str, file: str | None = None) -> None:
        """Raise the error for a status code."""
        status, code = response.status_code, response.headers.get("x-error-code", "")
        login = "log in with `hf auth login`"
        if code == "GatedRepo" or (status == 403 and code != "RepoNotFound"):
            told = (
                f"{name!r} is gated: accept its terms on its page at {self.url}/{name}, and {login}"
            )
        elif code == "EntryNotFound" or (status == 404 and file is not None):
            told = f"{name!r} has no file {file}"
        elif status in (401, 404):
            told = f"{name!r} is not on the hub at {self.url} (or is private: {login})"
        elif status in (408, 425, 429) or status >= 500:
            raise _TryAgainError(f"the hub answered {status}", _retry_after(response))
        else:
            told = f"the hub at {self.url} answered {status} for {name!r}"
        raise DownloadError(told, field="model")


class _BrokenError(_TryAgainError):
    """A transfer that ended early, after `num_bytes`."""

    def __init__(self, num_bytes: int, message: str) -> None:
        super().__init__(message)
        self.num_bytes = num_bytes


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds of the header Retry-After, which is a number or a date."""
    text = response.headers.get("retry-after", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def _is_address(url: str) -> bool:
    """Whether this is an http or https address that httpx accepts."""
    try:
        made = httpx.URL(url)
        return made.scheme in ("http", "https") and bool(urlsplit(url).netloc and made.host)
    except (ValueError, httpx.InvalidURL):
        return False


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _is_safe(path: object) -> bool:
    """Whether a file's name stays below its folder, and is printable."""
    return (
        isinstance(path, str)
        and path.isprintable()  # no surrogates, and nothing that moves a terminal's cursor
        and "\\" not in path
        and not {"", ".", ".."} & set(path.split("/"))
    )
