"""Progress that the command shows, on a terminal and without one."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.cli import console
from slipstream.cli.console import Progress
from tests.support.waiting import PATIENCE_S, wait_for

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
    assert (
        progress.seconds_left() is None
    )  # it takes longer than the steps before, no one knows how long


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


def test_as_many_steps_that_begin_again_are_estimated_by_themselves(clock):
    progress = Progress("layers")
    clock[0] += 50
    progress.set_done(5, 10)
    clock[0] += 3
    progress.set_done(1, 10)
    assert progress.seconds_left() == 27


def test_without_a_terminal_there_is_a_line_every_few_seconds(monkeypatch, capsys):
    monkeypatch.setattr(console, "LINE_EVERY_S", 0.02)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: 100.0))
    told = ""

    def has_lines(line, count=2):
        nonlocal told
        told += capsys.readouterr().err
        return told.count(line) >= count

    begun, weights = "slipstream: starting tiny, 0 s\n", "slipstream: starting tiny: weights, 0 s\n"
    with console.phases("starting tiny") as phase:
        phase("weights")
        wait_for(lambda: has_lines(weights), "no lines")
    told += capsys.readouterr().err
    assert told.removeprefix(begun * told.count(begun)) == weights * told.count(
        weights
    )  # the first may be from before
    told = ""
    with console.progress_bar("layers") as bar:
        bar(1, 2)
        wait_for(lambda: has_lines("slipstream: layers, 1 of 2, 0 s\n"), "no lines")
    time.sleep(0.1)
    assert capsys.readouterr().err == ""  # nothing after the end


def test_what_is_quick_says_nothing_without_a_terminal(capsys):
    with console.phases("starting tiny") as phase:
        phase("weights")
    assert capsys.readouterr().err == ""


def test_quickstart_says_every_few_seconds_that_it_is_at_work(tmp_path):
    """A second is over at once, twice, and the third is not over before the work is."""
    text = QUICKSTART.read_text()
    functions = text[text.index("say()") : text.index("only_install=")]
    seconds = 'calls=0\nsleep() { [ "$1" = 1 ]; calls=$((calls + 1)); [ $calls -lt 3 ] || command sleep 60 3>&-; }'
    work = "until [ $(grep -c at.work said) = 2 ]; do sleep 0.05; done; cat said >&3; exit 3"
    program = f"set -eu\n{functions}\nevery=1\n{seconds}\nwatched Installing sh -c '{work}' 3>&2 2>said || echo code $?\n"
    ran = subprocess.run(
        ["sh", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert ran.stdout == "code 3\n"
    assert ran.stderr == "Installing ...\n  still at work after 1 s\n  still at work after 2 s\n"
    assert text.count("watched ") >= 5
