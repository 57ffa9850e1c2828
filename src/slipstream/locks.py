"""Locks of files, which the kernel frees when their holder ends, also by SIGKILL."""

from __future__ import annotations

import fcntl


def take(descriptor: int) -> bool:
    """Lock the open file for us alone, and do not wait. False: another holds it. OSError: the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
