"""The audit log (`--audit-log FILE`): every request with its key and time, in a hash chain that
reveals changes.

1. A line is a JSON object. Its `hash` is the SHA-256 of the rest of the line, where `previous` is
   the hash of the line before. So a line that is changed, left out, added or moved breaks the
   chain.
2. Lines are only appended. All front ends write one chain: each takes a lock on the file for a
   line. A line torn by a crash stays, and the next one records it (`kind` is `torn`).
3. A request's line has its id, key, route, model, status, token counts and times, and no text of a
   prompt or answer. With `--audit-prompts` it has the body, too.
4. At `audit_max_bytes` the file becomes FILE.1, FILE.2 and so on, and the chain continues in a new
   FILE.
5. If a line cannot be written, for example because the disk is full, `audit_failure` decides. With
   "refuse" the server refuses new requests with 503 `audit_unavailable` until the waiting lines are
   written. With "serve" it serves on, logs the failure, and later counts the lost lines in the
   file.
6. Lines that are cut off while the server runs are noticed at the next line, or at the server's
   end: the last written line is gone. Then a line of the kind `cut` records it, and the chain
   continues from the last written line, so that it stays broken there. All front ends know the last
   line that any of them wrote. A starting server can't notice earlier cuts: only a hash that was
   noted elsewhere shows them (`slipstream audit verify FILE --expect HASH`).

A line is handed to the operating system before the request's connection is done, but not forced to
the disk: a machine that loses power may lose the last seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from slipstream.base.files import open_private
from slipstream.errors import ConfigError

_logger = logging.getLogger("slipstream.server")

START = "0" * 64
MAX_WAITING = 10_000
_LOG_EVERY_S = 60.0
_LAST = struct.Struct("<32s4Q")
_HEAD = b'{"hash":"'
_HASH_BYTES = len(_HEAD) + 64 + 2  # including the comma after the hash


def _line(fields: dict[str, Any], previous: str) -> tuple[bytes, str]:
    rest = msgspec.json.encode({"previous": previous, **fields})[1:]
    digest = hashlib.sha256(rest).hexdigest()
    return _HEAD + digest.encode() + b'",' + rest + b"\n", digest


def _read(line: bytes) -> tuple[str, dict[str, Any]] | None:
    """(hash, fields) of a whole line; None if the line is damaged."""
    digest, rest = line[len(_HEAD) : len(_HEAD) + 64], line[_HASH_BYTES:].removesuffix(b"\n")
    if not line.startswith(_HEAD) or hashlib.sha256(rest).hexdigest().encode() != digest:
        return None
    try:
        fields = msgspec.json.decode(b"{" + rest)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return (digest.decode(), fields) if isinstance(fields, dict) else None


class _Written(NamedTuple):
    """The last written line: its hash and number, its first byte and end in the file, and the
    file's inode."""

    hash: str
    seq: int
    begin: int
    end: int
    inode: int


class _Last:
    """The last line written by any front end, in memory that all of them share. Hold the log's lock
    when using it."""

    def __init__(self, path: Path | None) -> None:
        fd = -1 if path is None else open_private(path)
        try:
            if fd >= 0:
                os.ftruncate(fd, _LAST.size)
            self._map = mmap.mmap(fd, _LAST.size)
        finally:
            if fd >= 0:
                os.close(fd)

    def read(self) -> _Written | None:
        digest, *numbers = _LAST.unpack(self._map[:])
        found = _Written(digest.hex(), *numbers)
        return found if found.seq else None

    def write(self, written: _Written) -> None:
        self._map[:] = _LAST.pack(bytes.fromhex(written.hash), *written[1:])


class AuditLog:
    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 64 * 2**20,
        on_failure: Literal["refuse", "serve"] = "refuse",
        shared_dir: Path | None = None,
    ) -> None:
        """Open the log. `shared_dir`: the folder of the front ends that write the same log."""
        self.path, self.max_bytes, self.on_failure = path, max_bytes, on_failure
        self._fd = -1
        self._written = _Last(None if shared_dir is None else shared_dir / "audit-last")
        self._last, self._seq = START, 0
        self._waiting: deque[dict[str, Any]] = deque()
        self.num_lost = 0
        self._told = 0.0
        self.failure: str | None = None
        self._append({"kind": "start", "pid": os.getpid()})
        if self.failure is not None:
            raise ConfigError(
                f"cannot write the audit log {path}: {self.failure}", field="audit_log"
            )

    def write(self, kind: str, **fields: Any) -> None:
        """Append a line. If it cannot be written it is kept for the next attempt."""
        record = {
            "kind": kind,
            **{name: value for name, value in fields.items() if value is not None},
        }
        if len(self._waiting) >= MAX_WAITING:
            self.num_lost += 1
        else:
            self._waiting.append({"time": _now(), **record})
        self._flush()

    @property
    def refuses(self) -> bool:
        """Whether requests must be refused because the log can't be written. Tries to write
        first."""
        if self.failure is not None:
            self._flush()
        return self.failure is not None and self.on_failure == "refuse"

    def _flush(self) -> None:
        while self._waiting:
            self._append(self._waiting[0])
            if self.failure is not None:
                return
            self._waiting.popleft()
        self.failure = None
        if self.num_lost:
            lost, self.num_lost = self.num_lost, 0
            self._append({"time": _now(), "kind": "lost", "count": lost})

    def _append(self, fields: dict[str, Any]) -> None:
        try:
            self._open()
            try:
                self._write(fields)
            finally:
                if self._fd >= 0:  # otherwise it was closed, and its successor could not be opened
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError as error:
            self.failure = error.strerror or str(error)
            if time.monotonic() - self._told > _LOG_EVERY_S:
                self._told = time.monotonic()
                does = (
                    "requests are refused"
                    if self.on_failure == "refuse"
                    else "requests go on without it"
                )
                _logger.error(
                    "the audit log %s cannot be written (%s): %s", self.path, self.failure, does
                )
        else:
            self.failure = None

    def _open(self) -> None:
        """Open and lock the file that is at the path now."""
        while True:
            if self._fd < 0:
                self._fd = open_private(self.path, append=True)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                same = os.stat(self.path).st_ino == os.fstat(self._fd).st_ino
            except FileNotFoundError:
                same = False
            if same:
                return
            self._close()  # another process has rotated it

    def _write(self, fields: dict[str, Any]) -> None:
        while True:
            size = self._up_to_date()
            data, digest = _line({"seq": self._seq + 1, **fields}, self._last)
            if not size or size + len(data) <= self.max_bytes:
                break
            self._rotate()
        self._put(data, size)
        self._note(digest, len(data))

    def _put(self, data: bytes, size: int) -> None:
        """Append all of the data, or nothing. OSError if the disk is full."""
        written = os.write(self._fd, data)
        if written != len(data):
            os.ftruncate(self._fd, size)
            raise OSError(28, "No space left on device")

    def _note(self, digest: str, num_bytes: int) -> None:
        """Remember a line of `num_bytes` bytes as the last one."""
        about = os.fstat(self._fd)
        self._last, self._seq = digest, self._seq + 1
        begin = about.st_size - num_bytes
        self._written.write(_Written(digest, self._seq, begin, about.st_size, about.st_ino))

    def _up_to_date(self) -> int:
        """Bring the last hash and number up to date with the file's end, and return its size."""
        about, written = os.fstat(self._fd), self._written.read()
        if written is not None and (written.inode, written.end) == (about.st_ino, about.st_size):
            self._last, self._seq = written.hash, written.seq
            return about.st_size
        return self._catch_up(about.st_size, written)

    def _catch_up(self, size: int, written: _Written | None) -> int:
        """Read the end of a file that is not as this server left it, and return its size after
        repairs.

        It may be the first line, or another program has written, or lines are gone. A torn line is
        closed.
        """
        if size:
            self._last, self._seq = _end(self.path)
        else:
            parts = rotated(self.path)
            self._last, self._seq = _end(parts[-1]) if parts else (START, 0)
        ends = not size or os.pread(self._fd, 1, size - 1) == b"\n"
        if written is not None and (self._seq < written.seq or not self._has(written)):
            _logger.error(
                "the audit log %s was cut: line number %d, which was its last, is gone",
                self.path,
                written.seq,
            )
            cut = {"kind": "cut", "expected": written.hash, "found": self._last}
            self._last, self._seq = written.hash, written.seq
            return self._add(cut, size, ends=ends)
        if ends:
            return size
        torn = _last_line(self.path)
        if _read(torn) is not None:  # only the line break is missing
            self._put(b"\n", size)
            return size + 1
        told: dict[str, Any] = {
            "kind": "torn",
            "bytes": len(torn),
            "sha256": hashlib.sha256(torn).hexdigest(),
        }
        return self._add(told, size, ends=False)

    def _add(self, told: dict[str, Any], size: int, *, ends: bool) -> int:
        """Append a line about the file itself, and return the size after it. `ends` False: the
        previous line has no line break."""
        data, digest = _line({"seq": self._seq + 1, "time": _now(), **told}, self._last)
        self._put(data if ends else b"\n" + data, size)
        self._note(digest, len(data))
        return size + len(data) + (not ends)

    def _has(self, written: _Written) -> bool:
        """Whether a line is still where it was written, in the file or a rotated one."""
        for part in (self.path, *reversed(rotated(self.path))):
            with contextlib.suppress(FileNotFoundError), part.open("rb") as file:
                file.seek(written.begin)
                found = _read(file.read(written.end - written.begin))
                if found is not None and found[0] == written.hash:
                    return True
        return False

    def _rotate(self) -> None:
        numbers = [int(part.name.rpartition(".")[2]) for part in rotated(self.path)]
        self.path.rename(self.path.with_name(f"{self.path.name}.{max(numbers, default=0) + 1}"))
        self._close()
        self._open()

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def close(self) -> None:
        if self._fd < 0:
            return
        if self.failure is None:
            with contextlib.suppress(OSError):  # records lines that were cut off, if there are any
                self._open()
                self._up_to_date()
        if self._fd >= 0:
            self._close()


def _now() -> str:
    now = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z"


def rotated(path: Path) -> list[Path]:
    """Lists the rotated files of `path`, oldest first."""
    found = [
        part
        for part in path.parent.glob(f"{path.name}.*")
        if part.name[len(path.name) + 1 :].isdecimal()
    ]
    return sorted(found, key=lambda part: int(part.name.rpartition(".")[2]))


def _last_line(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        step, data = 2**14, b""
        while True:
            begin = max(0, size - step)
            file.seek(begin)
            data = file.read(size - begin)
            found = data.removesuffix(b"\n").rfind(b"\n")
            if found >= 0 or begin == 0:
                return data[found + 1 :]
            step *= 4


def _end(path: Path) -> tuple[str, int]:
    """(hash, number) of the last whole line."""
    found = _read(_last_line(path))
    if found is not None:
        return found[0], int(found[1].get("seq", 0))
    last = (START, 0)
    with path.open("rb") as file:
        for line in file:
            read = _read(line)
            if read is not None:
                last = (read[0], int(read[1].get("seq", 0)))
    return last


class ChainError(ConfigError):
    """The chain is broken. The message says where."""


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of the whole chain with their hashes. ChainError at the first that does not
    fit."""
    previous, seq, torn = START, 0, None
    parts = [*rotated(path), path]
    for part in parts:
        try:
            file = part.open("rb")
        except OSError as error:
            raise ChainError(f"cannot read {part}: {error.strerror}", field="audit_log") from None
        with file:
            for number, line in enumerate(file, 1):
                where = f"{part.name}, line {number}"
                found = _read(line)
                if found is None:
                    if torn is not None:
                        raise ChainError(f"{where}: the line before is damaged", field="audit_log")
                    torn = (where, hashlib.sha256(line.removesuffix(b"\n")).hexdigest())
                    continue
                digest, fields = found
                if fields.get("kind") == "cut":
                    message = f"{where}: cut at {fields.get('time')}: the server found that its last line, number "
                    message += f"{int(fields.get('seq', 0)) - 1} with the hash {fields.get('expected')}, was gone"
                    raise ChainError(message, field="audit_log")
                if torn is not None and (
                    fields.get("kind") != "torn" or fields.get("sha256") != torn[1]
                ):
                    raise ChainError(
                        f"{torn[0]}: its hash does not match its content", field="audit_log"
                    )
                if torn is None and fields.get("kind") == "torn":
                    raise ChainError(
                        f"{where}: the torn line that it records is gone", field="audit_log"
                    )
                torn = None
                if fields.get("previous") != previous or fields.get("seq") != seq + 1:
                    message = f"{where}: it does not follow the line before; lines were taken out, added or moved"
                    raise ChainError(message, field="audit_log")
                previous, seq = digest, seq + 1
                yield {"hash": digest, **fields}
    if torn is not None:
        raise ChainError(f"{torn[0]}: the last line is damaged", field="audit_log")
