"""Folders for temporary files that no killed process leaves for good: `slipstream-…` in the system's temporary folder.

1. Who makes a folder holds a lock on its file `lock` as long as it lives. The kernel frees it, also after SIGKILL.
2. Who makes the next folder removes those of this user whose lock is free. A folder without the file is nobody's to remove.
3. A sweep may come between the making of a folder and its lock. Then that folder is gone, and another is made.
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
    """The path of a folder, which `make` makes, for this user alone."""

    def __init__(self, kind: str = "") -> None:
        self.path = f"{tempfile.gettempdir()}/slipstream-{kind}{secrets.token_hex(8)}"
        self._lock = -1

    def make(self) -> None:
        """Make the folder unless it is there, and remove those whose owners are gone. OSError."""
        if self._lock >= 0:
            return
        sweep()
        while True:
            try:
                os.mkdir(self.path, 0o700)
            except (
                FileExistsError
            ):  # a sweep has taken the lock and not removed all yet, or was killed in between
                time.sleep(_PAUSE_S)
                sweep()
                continue
            with contextlib.suppress(FileNotFoundError):  # a sweep took it
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
        with contextlib.suppress(OSError):  # it goes as we look, or is another user's
            about = os.lstat(path)
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
                continue
            lock = os.open(f"{path}/{_LOCK}", os.O_RDWR | os.O_NOFOLLOW)
            try:
                if locks.take(lock):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
