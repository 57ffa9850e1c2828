"""Locks on files, which the kernel frees when their holder ends, even by SIGKILL."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def take(descriptor: int) -> bool:
    """Lock the open file exclusively, without waiting. False: another process holds it. OSError:
    the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_file_of(descriptor: int, path: str | Path) -> bool:
    """Whether the path leads to the open file, not to another one or to none."""
    try:
        named, own = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)
