"""Folders for sockets: those of owners that were killed go with the next start, all others stay."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

from slipstream.engine.temporary import OwnedFolder, sweep

OWNER = """
import sys
from slipstream.engine.temporary import OwnedFolder
folder = OwnedFolder(sys.argv[1])
folder.make()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A folder for temporary files of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("kind", ["", "replica-"])
def test_an_owner_that_was_killed(kind):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, kind], stdin=-1, stdout=-1, text=True
    ) as owner:
        path = owner.stdout.readline().strip()
        with open(f"{path}/engine", "w"):
            pass
        sweep()
        assert os.path.exists(f"{path}/engine"), "its owner lives"
        owner.kill()
        owner.wait()
        own = OwnedFolder()
        own.make()
    assert not os.path.exists(path)
    own.make()  # once
    assert os.listdir(own.path) == ["lock"]
    own.remove()
    own.remove()
    assert not os.path.exists(own.path)


def test_what_is_not_ours_stays(temporary):
    folder = "slipstream-0123456789abcdef"
    (temporary / folder).mkdir()  # an owner that has no lock yet, or an older version's
    (temporary / "slipstream-mine").mkdir()
    (temporary / "slipstream-mine" / "lock").touch()
    (temporary / "else").mkdir()
    (temporary / "else" / "lock").touch()
    (temporary / "slipstream-fedcba9876543210").symlink_to("else")
    (temporary / "slipstream-1111111111111111").touch()
    before = sorted(temporary.rglob("*"))
    sweep()
    assert sorted(temporary.rglob("*")) == before


def test_a_sweep_between_the_making_and_the_lock(monkeypatch):
    made, opened = OwnedFolder(), os.open

    def swept(path, *args):
        monkeypatch.setattr(os, "open", opened)
        found = opened(path, *args)
        sweep()  # its lock is free
        assert not os.path.exists(made.path)
        return found

    monkeypatch.setattr(os, "open", swept)
    made.make()
    sweep()
    assert os.listdir(made.path) == ["lock"]
    made.remove()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_sweep_that_has_the_lock_and_has_not_removed_the_folder_yet(monkeypatch, is_killed):
    made, opened, mkdir, tries = OwnedFolder(), os.open, os.mkdir, []

    def locked(path, *args):
        monkeypatch.setattr(os, "open", opened)
        found, tries[:] = opened(path, *args), [opened(path, os.O_RDWR)]
        fcntl.flock(tries[0], fcntl.LOCK_EX)
        return found

    def made_again(path, *args):
        try:
            mkdir(path, *args)
        except FileExistsError:
            if not is_killed:
                shutil.rmtree(path)
            os.close(tries.pop())
            raise

    monkeypatch.setattr(os, "open", locked)
    monkeypatch.setattr(os, "mkdir", made_again)
    made.make()
    assert not tries
    sweep()
    assert os.listdir(made.path) == ["lock"]
    made.remove()
