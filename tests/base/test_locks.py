"""Files in folders that others may write, and commands that make the same folder at the same time."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from slipstream.base.files import open_new, open_private, sole_writer, waited_for, write_whole
from slipstream.cli.main import main
from slipstream.errors import ConfigError

HOLD = """
import sys, time
from pathlib import Path
from slipstream.base.files import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def linked(tmp_path):
    """(a file of this user, a link to it that somebody has made)"""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(victim)
    yield victim, link
    assert victim.read_text() == "precious"


def test_a_file_that_is_kept_follows_no_link_and_says_what_to_do(linked):
    with pytest.raises(OSError, match="symbolic link") as refused:
        open_private(linked[1])
    assert str(linked[1]) in str(refused.value)


def test_a_file_that_is_kept_is_private_and_keeps_what_it_holds(tmp_path):
    path = tmp_path / "kept"
    os.close(open_private(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("more")
    os.close(open_private(path, append=True))
    assert path.read_text() == "more"


def test_a_new_file_replaces_a_link_and_not_what_it_leads_to(linked):
    _, link = linked
    with open(open_new(link), "w") as file:
        file.write("new")
    assert not link.is_symlink()
    assert link.read_text() == "new"


def test_a_whole_file_does_not_follow_the_link_of_its_unfinished_one(linked, tmp_path):
    victim, _ = linked
    (tmp_path / f".out.{os.getpid()}.partial").symlink_to(victim)
    write_whole(tmp_path / "out", "new")
    assert (tmp_path / "out").read_text() == "new"


def test_a_lock_does_not_follow_a_link(linked):
    with pytest.raises(OSError, match="symbolic link"), waited_for(linked[1]):
        pass


def test_a_lock_that_is_removed_by_each_holder_is_held_by_one_at_a_time(tmp_path):
    path, inside, most = tmp_path / "made" / "lock", [], []

    def hold(_):
        with waited_for(path):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.0005)
            inside.pop()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hold, range(200)))
    assert max(most) == 1
    assert not path.exists()


# --- One writer ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def holder(tmp_path):
    """A process that writes tmp_path/"out"."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_writer_is_told_which_process_writes(holder, tmp_path):
    with (
        pytest.raises(ConfigError, match=rf"process {holder.pid} writes .*out; .*--out"),
        sole_writer(tmp_path / "out"),
    ):
        pass
    with sole_writer(tmp_path / "other"):
        pass


def test_the_lock_of_a_killed_writer_is_no_obstacle(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / ".out.lock").exists()
    with sole_writer(tmp_path / "out"):
        pass
    assert not (tmp_path / ".out.lock").exists()


def test_a_writer_of_the_same_process_is_refused_until_the_first_ends(tmp_path):
    with sole_writer(tmp_path / "a" / "out"):
        with pytest.raises(ConfigError, match=str(os.getpid())), sole_writer(tmp_path / "a/out"):
            pass
    with sole_writer(tmp_path / "a" / "out"):
        pass


@pytest.mark.parametrize(
    "command",
    [
        ["compress", "MODEL", "--recipe", "fp8", "--no-report", "--device", "cpu"],
        ["compress", "MODEL", "--recipe", "draft:eagle3", "--device", "cpu"],
        ["compress", "MODEL", "--recipe", "LORA", "--device", "cpu"],
        ["build", "MODEL", "--device", "cpu"],
        ["sweep", "GRID", "--no-ceilings"],
    ],
    ids=lambda words: " ".join(words[:1] + words[3:4]),
)
def test_a_command_is_refused_while_another_makes_its_folder(
    command, tiny_model, tmp_path, holder, capsys
):
    (tmp_path / "lora.yaml").write_text('[{"lora": {}}]')
    (tmp_path / "grid.toml").write_text(
        f'models = ["{tiny_model}"]\nlengths = [[8, 4]]\nbatch_sizes = [1]\n[[engines]]\nengine = "slipstream"\n'
    )
    places = {"MODEL": tiny_model, "LORA": tmp_path / "lora.yaml", "GRID": tmp_path / "grid.toml"}
    words = [str(places.get(word, word)) for word in command]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert f"process {holder.pid} writes" in capsys.readouterr().err
    assert not (tmp_path / ".out.partial").exists()


def test_a_link_in_the_place_of_the_lock_is_refused(linked, tmp_path):
    victim, _ = linked
    (tmp_path / ".out.lock").symlink_to(victim)
    with pytest.raises(ConfigError, match="symbolic link"), sole_writer(tmp_path / "out"):
        pass
