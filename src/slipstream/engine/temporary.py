"""Temporary folders that are cleaned up even after a process was killed: `slipstream-…` in the system's temporary folder.

1. The process that creates a folder holds a lock on the file `lock` in it. The kernel releases the lock, also after SIGKILL.
2. Creating a folder removes those of this user whose lock is free. A folder without the file is never removed.
3. If another process removes a folder before it is locked, a new one is created.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import time

from slipstream.base import locks
from slipstream.base.files import open_private

_OURS = re.compile(r"slipstream-(?:replica-)?[0-9a-f]{16}")
_LOCK = "lock"
_PAUSE_S = 0.01


class OwnedFolder:
    """A folder path for this user alone, created by `make`."""

    def __init__(self, kind: str = "") -> None:
        self.path = f"{tempfile.gettempdir()}/slipstream-{kind}{secrets.token_hex(8)}"
        self._lock = -1

    def make(self) -> None:
        """Create the folder if it doesn't exist, and remove those whose owners are gone. OSError if that fails."""
        if self._lock >= 0:
            return
        sweep()
        while True:
            try:
                os.mkdir(self.path, 0o700)
            except (
                FileExistsError
            ):  # another process has the lock to remove the folder, or was killed meanwhile
                time.sleep(_PAUSE_S)
                sweep()
                continue
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                lock = open_private(f"{self.path}/{_LOCK}")
                if locks.take(lock) and locks.is_file_of(lock, f"{self.path}/{_LOCK}"):
                    self._lock = lock
                    return
                os.close(lock)

    def remove(self) -> None:
        """Remove the folder. Does nothing if it was not made or is gone."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep() -> None:
    """Remove folders whose owners are gone."""
    with os.scandir(tempfile.gettempdir()) as found:
        paths = [entry.path for entry in found if _OURS.fullmatch(entry.name)]
    for path in paths:
        with contextlib.suppress(OSError):  # removed meanwhile, or another user's
            about = os.lstat(path)
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
                continue
            lock = os.open(f"{path}/{_LOCK}", os.O_RDWR | os.O_NOFOLLOW)
            try:
                if locks.take(lock):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
