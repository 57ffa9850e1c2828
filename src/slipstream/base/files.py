"""Files: atomic writes, files in folders that others may write to, JSON and YAML from strangers,
digests."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slipstream.base import locks
from slipstream.errors import ConfigError

MAX_YAML_VALUES = 100_000
_PID_BYTES = 20
MAX_YAML_BYTES = 2**20
MAX_YAML_DIGITS = 100
"""Maximum number of digits of a YAML number. Numbers with colons are read in base 60, in quadratic time."""

REFUSALS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
)
"""Errors of a disk that is full or read-only, or of missing permission."""


@contextmanager
def writing(path: str | Path, field: str) -> Iterator[None]:
    """Context manager that turns OSError into a ConfigError about the setting that named `path`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}", field=field) from None


def disk_refusal(error: Exception) -> str | None:
    """Reason why the disk rejected a write, with the file if known. None for any other error.
    safetensors raises its own error for writes, which quotes the system's error number."""
    if isinstance(error, OSError):
        number, named = error.errno, error.filename2 or error.filename
    else:
        quoted = (
            re.search(r"\(os error (\d+)\)", str(error))
            if type(error).__name__ == "SafetensorError"
            else None
        )
        number, named = int(quoted[1]) if quoted else None, None
    if number not in REFUSALS:
        return None
    return f"{named or 'a file could not be written'}: {os.strerror(number)}"


def open_private(path: str | Path, *, append: bool = False) -> int:
    """Open a lasting file, such as a lock, for reading and writing. OSError if that fails.

    A missing file is created for this user alone; existing content stays. Others may be able to
    write in its folder, so a symbolic link is not followed: it could lead to any file of this user.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | (os.O_APPEND if append else 0), 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "it is a symbolic link, which is not followed; remove it"
        raise


def open_new(path: str | Path, mode: int = 0o666) -> int:
    """Create a file for writing. OSError if that fails.

    An existing file of this name, which a dead process may have left, is removed first. So is a
    link, which is never followed (see `open_private`).
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


@contextmanager
def waited_for(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Context manager that locks the file `path`, and waits until it is free. Yields False if
    `wait` is false and another process holds it. OSError if that fails.

    The file is made, with its folders, and removed at the end. So are the folders that this made,
    if nothing else came into them.
    """
    made = [folder for folder in path.parents if not folder.exists()]
    lock = _awaited(path, wait)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)  # before another can lock it
            os.close(lock)
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _awaited(path: Path, wait: bool) -> int | None:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = open_private(path)
        except FileNotFoundError:  # its last holder removed the folder since
            continue
        except FileExistsError:  # the same, while the folder was made, or a file is there
            if path.parent.is_dir() or not os.path.lexists(path.parent):
                continue
            raise
        if wait:
            fcntl.flock(lock, fcntl.LOCK_EX)
        elif not locks.take(lock):
            os.close(lock)
            return None
        if locks.is_file_of(lock, path):
            return lock
        os.close(lock)  # its holder removed it after we opened it


@contextmanager
def sole_writer(out: Path) -> Iterator[None]:
    """Hold the lock of a folder that a command makes, so that two commands don't mix their output.

    ConfigError names the process that holds it. The lock is the file `.OUT.lock` next to the
    folder, which is removed at the end. One that a dead process left is taken over. On a file
    system without locks there is none.
    """
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
            free = locks.take(lock)
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
        if locks.is_file_of(lock, path):
            if os.fstat(lock).st_nlink == 1:  # otherwise a file of ours that somebody linked here
                os.pwrite(lock, str(os.getpid()).ljust(_PID_BYTES).encode(), 0)
            return lock
        os.close(lock)  # its holder removed it after we opened it


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Replace the file atomically: a reader gets the old content or the new. Text is written as
    UTF-8. `mode` is that of the new file, before the umask."""
    # Named by process, so that two writers of the same file do not mix.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(open_new(partial, mode), "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. ValueError for invalid text, or for nesting deeper than Python can read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_yaml(path: Path) -> Any:
    """The single document of a YAML file. OSError if there is no file.

    ValueError, with the place, for invalid text, a bad date, a document that contains itself, more
    than `MAX_YAML_BYTES`, or more than `MAX_YAML_VALUES` values after aliases are expanded.
    """
    import yaml

    if path.stat().st_size > MAX_YAML_BYTES:
        raise ValueError(f"it is longer than {MAX_YAML_BYTES:,} bytes")
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if _num_values(node, {}) > MAX_YAML_VALUES:
                raise ValueError(
                    f"it holds more than {MAX_YAML_VALUES:,} values, counted as often as aliases name them"
                )
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except OverflowError:
        raise ValueError("a number is too large") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"{where}not YAML: {getattr(error, 'problem', None) or error}") from None


def _num_values(node: Any, known: dict[int, int | None]) -> int:
    """Number of values after aliases are expanded. `known`: counts by `id`; None for a node that is
    being counted."""
    if (found := known.get(id(node), 0)) is None:
        raise ValueError(f"line {node.start_mark.line + 1}: it refers to itself")
    if not found:
        if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_YAML_DIGITS:
            raise ValueError(
                f"line {node.start_mark.line + 1}: a number has more than {MAX_YAML_DIGITS} digits"
            )
        known[id(node)] = None
        below = node.value if isinstance(node.value, list) else []
        parts = [
            part for entry in below for part in (entry if isinstance(entry, tuple) else (entry,))
        ]
        known[id(node)] = found = 1 + sum(_num_values(part, known) for part in parts)
    return found


def digest(value: Any, *, default: Callable[[Any], Any] | None = None) -> str:
    """SHA-256 of `value` as JSON, in hexadecimal, independent of the order of keys. `default` is
    `json.dumps`'s."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=default).encode()).hexdigest()
