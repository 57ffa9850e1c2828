"""The script that makes every run of a kind of machine (`benchmarks/nodes.py`)."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

BENCHMARKS = Path("benchmarks").resolve()


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import nodes

    return nodes


def node_of(nodes, tmp_path, *, engine, forms=None):
    clock = iter(range(10_000))
    made = nodes.Node(2, "cuda", tmp_path, 1000.0, clock=lambda: float(next(clock)), forms=forms)
    made.engine = engine
    return made


def without_context(what, settings, gpu, requests, lengths):
    """Results of engines of which those that share the keys out give other answers."""
    if what == "tokens":
        return [2] if settings.get("context_parallel_size") else [1]
    return {"tokens_a_second": 10.0, "seconds": 1.0}


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_each_machine_checks_its_forms_before_it_times_them(nodes, gpus):
    runs = nodes.runs_of(gpus)
    assert [run.name for run in runs[:4]] == ["tests", "greedy", "deaths", "sums"]
    assert nodes.seconds_of([run for run in runs if not run.extra]) <= nodes.SECONDS
    assert len({run.name for run in runs}) == len(runs)
    forms = nodes.forms_of(gpus)
    assert {form for run in runs for form in run.forms} <= set(forms)
    checked = {form for ways in nodes.CHECKED.values() for form in ways}
    assert set(forms) <= checked


def test_a_form_with_other_answers_is_not_timed(nodes, tmp_path):
    """Runs that do not fit into the time left are left out as well; one that fails leaves the others."""

    def broken(node):
        raise ValueError("broken")

    timed = []
    runs = [
        nodes.GREEDY,
        nodes.Run("other check", "", 1, lambda node: {"y": 1}, is_check=True),
        nodes.Run("a", "", 1, lambda node: timed.append("a") or {"x": 3.0}, ("tensor",)),
        nodes.Run("b", "", 1, lambda node: timed.append("b") or {}, ("context",)),
        nodes.Run("c", "", 1, broken),
        nodes.Run("d", "", 5000, lambda node: timed.append("d") or {}),
    ]
    saved = []
    found = nodes.run_all(node_of(nodes, tmp_path, engine=without_context), runs, saved.append)
    assert timed == ["a"]
    assert found["greedy"]["llama, tensor"] == "equal"
    assert found["greedy"]["llama, context"] == "[1] / [2]"
    assert "context" in found["b"]["left out"]
    assert found["c"]["failed"] == "ValueError: broken"
    assert "5000 needed" in found["d"]["left out"]
    assert len(saved) == len(runs) - 1  # once for both checks
    rows = nodes.table(runs, found).splitlines()
    assert len(rows) == 2 + len(runs)
    assert "| x: 3 |" in rows[4]


def test_only_checks_the_forms_of_the_runs_that_it_names(nodes, tmp_path, monkeypatch, capsys):
    """A call for some runs alone must not time a form without its check."""
    asked = []

    def engine(what, settings, gpu, requests, lengths):
        asked.append(what)
        return without_context(what, settings, gpu, requests, lengths)

    monkeypatch.setattr(nodes, "Node", partial(nodes.Node, engine=engine))
    output = tmp_path / "found.json"

    def call(only):
        asked.clear()
        words = ["nodes.py", "--device", "cpu", "--gpus", "2", "--output", str(output)]
        monkeypatch.setattr(sys, "argv", [*words, "--only", only])
        nodes.main()
        return json.loads(output.read_text())["runs"]

    found = call("context,70b")
    assert list(found) == ["greedy", "70b", "context"]
    assert {name.split(", ")[1] for name in found["greedy"] if ", " in name} == {
        "context",
        "tensor",
    }
    assert "not shown to be one device's" in found["context"]["left out"]
    assert found["70b"]["tokens_a_second"] == 10.0
    assert "long" not in asked
    assert "70B FP8" in output.with_suffix(".md").read_text()
    assert "stages" in str(call("greedy"))
    assert list(call("update")) == ["update"]


def test_no_form_is_timed_after_a_check_that_failed_itself(nodes, tmp_path):
    def engine(*task):
        raise OSError("no memory")

    runs, forms = nodes.chosen(nodes.runs_of(2), ["70b"])
    found = nodes.run_all(node_of(nodes, tmp_path, engine=engine, forms=forms), runs, print)
    assert found["greedy"]["failed"] == "OSError: no memory"
    assert "left out" in found["70b"]


def test_a_program_that_is_cut_or_fails_says_so(nodes):
    assert nodes.command(["-c", "print('a'); print('b')"], 60.0) == (0, ["a", "b"])
    assert nodes.command(["-c", "raise ValueError('why')"], 60.0)[1][-1] == "ValueError: why"
    assert nodes.command(["-c", "import time; time.sleep(60)"], 0.0)[0] == 124


@pytest.mark.slow
@pytest.mark.timeout(1200)  # some hundred seconds of a core
def test_every_form_runs_dry_on_cpu_processes(tmp_path):
    output = tmp_path / "nodes_2.json"
    command = [sys.executable, str(BENCHMARKS / "nodes.py"), "--device", "cpu", "--gpus", "2"]
    subprocess.run([*command, "--output", str(output)], check=True, capture_output=True)
    found = json.loads(output.read_text())["runs"]
    assert not [name for name, run in found.items() if "failed" in run]
    assert {way for way in found["greedy"].values() if isinstance(way, str)} == {"equal"}
    for name, run in found.items():
        assert (
            "left out" in run
            or name == "greedy"
            or any(isinstance(value, int | float) for key, value in run.items() if key != "took_s")
        )
