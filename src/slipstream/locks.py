"""Locks of files, which the kernel frees when their holder ends, also by SIGKILL."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.files import open_private, writing

_PID_BYTES = 20


def take(descriptor: int) -> bool:
    """Lock the open file for us alone, and do not wait. False: another holds it. OSError: the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def waited_for(path: Path) -> Iterator[None]:
    """Lock the file `path`, which is made if it is not there, once nobody else holds it. OSError."""
    lock = open_private(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def sole_writer(out: Path) -> Iterator[None]:
    """Hold the lock of a folder that a command makes, so that two commands don't mix what they write. ConfigError names the
    process that holds it. The lock is a file next to the folder, `.OUT.lock`, which is removed at the end. One that a dead
    process left is taken over. On a file system without locks there is none."""
    out = Path(os.path.abspath(out.expanduser()))
    path = out.with_name(f".{out.name}.lock")
    with writing(path, "out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock_of(path, out)
    try:
        yield
    finally:
        if lock is not None:
            path.unlink(missing_ok=True)  # before another can lock it
            os.close(lock)


def _lock_of(path: Path, out: Path) -> int | None:
    while True:
        lock = open_private(path)
        try:
            free = take(lock)
        except OSError:  # no locks here
            os.close(lock)
            return None
        if not free:
            holder = os.pread(lock, _PID_BYTES, 0).decode("ascii", "replace").strip()
            os.close(lock)
            who = f"process {holder}" if holder.isdecimal() else "another process"
            raise ConfigError(
                f"{who} writes {out}; wait until it has ended, or give another --out", field="out"
            )
        if is_file_of(lock, path):
            if os.fstat(lock).st_nlink == 1:  # else it is a file of ours that somebody linked here
                os.pwrite(lock, str(os.getpid()).ljust(_PID_BYTES).encode(), 0)
            return lock
        os.close(lock)  # its holder has removed it since it was opened


def is_file_of(descriptor: int, path: str | Path) -> bool:
    """Whether the path leads to the open file, and not to another or to none."""
    try:
        named, own = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)
