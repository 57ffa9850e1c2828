"""KV cache blocks, and recurrent states, in files. No torch.

    PATH/lock                              held by the one process that writes
    PATH/IDENTITY/ab/abcdef….kv            a block: header, payload; IDENTITY and name say what it holds

1. IDENTITY is a digest of everything a block's bytes depend on except its tokens: the checkpoint,
   the dtypes, the kernels. The file name is the block's key, which covers its own and all earlier
   tokens, adapter, salt and group. So any engine that finds a file by its name can use it.
2. A file is written under another name and then renamed. It is used only if its length, header and
   checksum are right. A torn, truncated, damaged or foreign file is a miss. A damaged file of this
   model is removed.
3. All files together take at most `limit_bytes`. The least recently used files are removed first,
   including those of other models.
4. Several engines may share a folder. One writes and removes files. The others read, check for new
   files every few seconds, and one takes over when the writer ends.
5. A disk error costs only the blocks: a warning is logged, and writing pauses for some seconds.

Methods may be called by several threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from slipstream.base import locks
from slipstream.base.files import open_new, open_private
from slipstream.errors import ConfigError

_logger = logging.getLogger("slipstream.engine")

MAGIC = b"SLIPKV\x00\x01"
"""File signature. The last byte is the format version."""

HEADER = struct.Struct("<8s16s24sQ16s")
"""Magic, identity, key, payload bytes, checksum of the payload."""

IDENTITY_BYTES = 16
PAUSE_S = 10.0
"""Seconds for which nothing is written after a disk error."""

LOOK_EVERY_S = 5.0
"""Seconds between a reader's checks for new files, and for whether it may become the writer."""

MAX_PIECES = 1000
"""Maximum pieces of memory per read or write system call (IOV_MAX is 1,024)."""

_NAME = re.compile(r"[0-9a-f]{32,48}\.kv")
_FOLDER = re.compile(r"[0-9a-f]{32}")


class DiskTier:
    """Block files in `path`.

    `identity` has IDENTITY_BYTES bytes, the largest payload `max_bytes`. ConfigError if the folder
    can't be made or used.
    """

    def __init__(self, path: Path, limit_bytes: int, identity: bytes, max_bytes: int) -> None:
        self.path, self.limit_bytes = path, limit_bytes
        self._identity, most = identity, HEADER.size + max_bytes
        self._own = identity.hex()
        self._lock = threading.Lock()
        # (identity, key) → bytes, the least recently used first
        self._files: OrderedDict[tuple[str, str], int] = OrderedDict()
        self.num_bytes = self._era = 0
        self._paused_until = self._looked = float("-inf")
        self.is_writer = False
        if limit_bytes < most:
            raise ConfigError(
                f"kv_disk_bytes={limit_bytes} is too small for one block or state, which takes {most} bytes; raise it",
                field="kv_disk_bytes",
            )
        try:
            # the mode applies to the last folder
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            (path / self._own).mkdir(mode=0o700, exist_ok=True)
            self._lock_file = open_private(path / "lock")
        except OSError as error:
            raise ConfigError(
                f"kv_disk_path: {path} can't be written ({error.strerror}); name a folder that can",
                field="kv_disk_path",
            ) from error
        if limit_bytes > (size := shutil.disk_usage(path).total):
            os.close(self._lock_file)
            raise ConfigError(
                f"kv_disk_bytes={limit_bytes} is more than the disk of {path} has, {size} bytes; lower it",
                field="kv_disk_bytes",
            )
        self._look()
        if not self.is_writer:
            _logger.warning(
                "another engine writes blocks to %s; this one reads them, and takes over when it ends",
                path,
            )

    def close(self) -> None:
        os.close(self._lock_file)

    def __contains__(self, key: bytes) -> bool:
        return (self._own, key.hex()) in self._files

    def keys(self) -> list[bytes]:
        """Keys of this model's blocks and states."""
        with self._lock:
            return [bytes.fromhex(name) for identity, name in self._files if identity == self._own]

    def read(self, key: bytes, pieces: Sequence[memoryview]) -> bool:
        """Read a block's payload into `pieces`.

        False if there is no valid block; the contents of `pieces` are then undefined.
        """
        path = self._path(self._own, key.hex())
        try:
            # Without O_NONBLOCK, opening a FIFO of that name would hang. O_NOFOLLOW, since a link
            # could lead anywhere.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            self._drop(key, remove=False)
            return False
        try:
            found = os.fstat(file)
            header = bytearray(HEADER.size)
            whole = stat.S_ISREG(found.st_mode) and found.st_size == HEADER.size + sum(
                len(p) for p in pieces
            )
            whole = whole and _read_all(file, [memoryview(header), *pieces])
            good = whole and bytes(header) == self._header(key, pieces)
            if good:
                with contextlib.suppress(OSError):
                    os.utime(file)  # so that a later start knows what was used last
        except OSError as error:
            _logger.warning("a block of KV cache can't be read from %s: %s", path, error)
            good = False
        finally:
            os.close(file)
        if not good:
            self._drop(key, remove=True)
            return False
        with self._lock, contextlib.suppress(KeyError):
            self._files.move_to_end((self._own, key.hex()))
        return True

    def write(self, key: bytes, pieces: Sequence[memoryview], era: int) -> bool:
        """Store a block that was ordered in `era`. False if it is not stored."""
        if key in self:
            return True
        if not self.is_writer:
            self.look()
        if not self.is_writer or era != self._era or time.monotonic() < self._paused_until:
            return False
        path = self._path(self._own, key.hex())
        new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        num_bytes = HEADER.size + sum(map(len, pieces))
        try:
            self._make_room(num_bytes)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = open_new(new, 0o600)
            try:
                _write_all(file, [memoryview(self._header(key, pieces)), *pieces])
            finally:
                os.close(file)
            with self._lock:
                if era != self._era:
                    os.unlink(new)
                    return False
                os.rename(new, path)
                self._files[self._own, key.hex()] = num_bytes
                self.num_bytes += num_bytes
            return True
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(new)
            self._paused_until = time.monotonic() + PAUSE_S
            _logger.warning(
                "blocks of KV cache are not kept for %.0f s: %s: %s",
                PAUSE_S,
                self.path,
                error.strerror or str(error),
            )
            return False

    @property
    def era(self) -> int:
        """Number of `clear` calls. Blocks ordered before a `clear` are not written after it."""
        return self._era

    def clear(self) -> None:
        """Forget this model's blocks, and remove their files if this engine is the writer."""
        with self._lock:
            self._era += 1
            gone = [file for file in self._files if file[0] == self._own]
            for file in gone:
                self._forget(file)
                if self.is_writer:
                    self._unlink(file)

    def look(self) -> None:
        """Find new files as a reader, and become the writer if there is none."""
        if time.monotonic() - self._looked >= LOOK_EVERY_S:
            with contextlib.suppress(OSError):
                self._look()

    # --- Helpers ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        with self._lock:
            self._looked = time.monotonic()
            if not self.is_writer:
                with contextlib.suppress(OSError):
                    self.is_writer = locks.take(self._lock_file)
            found = sorted(self._scan())
            self._files = OrderedDict(((identity, name), size) for _, identity, name, size in found)
            self.num_bytes = sum(self._files.values())
        if self.is_writer:
            self._make_room(0)

    def _scan(self) -> Iterator[tuple[float, str, str, int]]:
        """Yield (time of last use, identity, key, bytes) of each file.

        The writer also removes unfinished files of an earlier writer.
        """
        for identity in os.scandir(self.path):
            if not _FOLDER.fullmatch(identity.name) or not identity.is_dir(follow_symlinks=False):
                continue
            for part in os.scandir(identity.path):
                if len(part.name) != 2 or not part.is_dir(follow_symlinks=False):
                    continue
                for file in os.scandir(part.path):
                    with contextlib.suppress(OSError):
                        if _NAME.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                            about = file.stat(follow_symlinks=False)
                            yield (
                                about.st_mtime,
                                identity.name,
                                file.name.removesuffix(".kv"),
                                about.st_size,
                            )
                        elif self.is_writer and file.name.startswith(".") and ".kv." in file.name:
                            os.unlink(file.path)

    def _make_room(self, num_bytes: int) -> None:
        with self._lock:
            while self._files and self.num_bytes + num_bytes > self.limit_bytes:
                file = next(iter(self._files))
                self._forget(file)
                self._unlink(file)

    def _drop(self, key: bytes, *, remove: bool) -> None:
        with self._lock:
            file = self._own, key.hex()
            if file in self._files:
                self._forget(file)
            if remove and self.is_writer:
                self._unlink(file)

    def _forget(self, file: tuple[str, str]) -> None:
        self.num_bytes -= self._files.pop(file)

    def _unlink(self, file: tuple[str, str]) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path(*file))

    def _path(self, identity: str, name: str) -> Path:
        return self.path / identity / name[:2] / f"{name}.kv"

    def _header(self, key: bytes, pieces: Sequence[memoryview]) -> bytes:
        digest = hashlib.sha256()  # as fast as CRC-32 on processors with SHA instructions
        for piece in pieces:
            digest.update(piece)
        return HEADER.pack(
            MAGIC, self._identity, key, sum(len(p) for p in pieces), digest.digest()[:16]
        )


def _read_all(file: int, pieces: list[memoryview]) -> bool:
    """Fill `pieces` from a file. False if it is too short."""
    offset = 0
    while pieces:
        some, pieces = pieces[:MAX_PIECES], pieces[MAX_PIECES:]
        while some:
            count = os.preadv(file, some, offset)
            if not count:
                return False
            offset += count
            some = _behind(some, count)
    return True


def _write_all(file: int, pieces: list[memoryview]) -> None:
    while pieces:
        some, pieces = pieces[:MAX_PIECES], pieces[MAX_PIECES:]
        while some:
            some = _behind(some, os.writev(file, some))


def _behind(pieces: list[memoryview], count: int) -> list[memoryview]:
    """The pieces of memory without their first `count` bytes."""
    for i, piece in enumerate(pieces):
        if count < len(piece):
            return [piece[count:], *pieces[i + 1 :]]
        count -= len(piece)
    return []
