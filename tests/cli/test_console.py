"""What the command shows of its progress, on a terminal and without one."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from slipstream.cli import console
from slipstream.cli.console import Progress

QUICKSTART = Path(__file__).parents[2] / "quickstart"


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_is_an_estimate_from_the_first_step_on(clock):
    progress = Progress("layers")
    assert progress.line() == "layers, 0 s"
    clock[0] += 4
    progress.set_done(0, 10)
    assert progress.seconds_left() is None
    clock[0] += 6
    progress.set_done(1, 10)
    assert progress.line() == "layers, 1 of 10, 10 s, about 54 s left"
    clock[0] += 4
    assert progress.seconds_left() == 50  # it counts down within a step
    clock[0] += 2
    progress.set_done(2, 10)
    assert progress.seconds_left() == 48
    clock[0] += 100
    assert progress.seconds_left() is None  # it takes longer than the steps before, no one knows how long


def test_a_first_step_without_a_beginning_counts_from_the_start(clock):
    progress = Progress("layers")
    clock[0] += 10
    progress.set_done(1, 3)
    assert progress.seconds_left() == 20


def test_what_an_interrupted_run_had_done_says_nothing_of_the_speed(clock):
    progress = Progress("layers")
    clock[0] += 1
    progress.set_done(6, 10)
    assert progress.seconds_left() is None
    clock[0] += 5
    progress.set_done(7, 10)
    assert progress.seconds_left() == 15


def test_other_steps_are_estimated_by_themselves(clock):
    progress = Progress("report")
    progress.update("loading", 1, 2)
    clock[0] += 100
    progress.update("comparing", 1, 5)
    clock[0] += 2
    progress.update("speed", 0, 2)
    assert progress.seconds_left() is None
    clock[0] += 3
    progress.update("speed", 1, 2)
    assert progress.line() == "report: speed, 1 of 2, 105 s, about 3 s left"


def test_without_a_terminal_there_is_a_line_every_few_seconds(monkeypatch, capsys):
    monkeypatch.setattr(console, "LINE_EVERY_S", 0.02)
    with console.phases("starting tiny") as phase:
        phase("weights")
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("slipstream: starting tiny: weights, 0 s") for line in lines)
    with console.progress_bar("layers") as bar:
        bar(1, 2)
        time.sleep(0.1)
    told = capsys.readouterr().err
    assert "slipstream: layers, 1 of 2, 0 s\n" in told
    time.sleep(0.1)
    assert capsys.readouterr().err == ""  # nothing after the end


def test_what_is_quick_says_nothing_without_a_terminal(capsys):
    with console.phases("starting tiny") as phase:
        phase("weights")
    assert capsys.readouterr().err == ""


def test_the_line_is_told_while_an_error_passes(monkeypatch, capsys):
    with pytest.raises(ValueError, match="x"), console.progress_bar("layers"):
        raise ValueError("x")


def test_quickstart_says_every_few_seconds_that_it_is_at_work():
    text = QUICKSTART.read_text()
    functions = text[text.index("say()") : text.index("only_install=")]
    program = f"set -eu\n{functions}\nevery=1\nwatched Installing sh -c 'sleep 2.5; exit 3' || echo code $?\n"
    ran = subprocess.run(["sh", "-c", program], capture_output=True, text=True, check=True, timeout=20)
    assert ran.stdout == "code 3\n"
    assert ran.stderr == "Installing ...\n  still at work after 1 s\n  still at work after 2 s\n"
    assert text.count("watched ") >= 5
