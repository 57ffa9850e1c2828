"""The script that makes every run of a kind of machine (`benchmarks/nodes.py`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path("benchmarks").resolve()


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import nodes

    return nodes


def node_of(nodes, tmp_path, *, gpus=2, left=1000.0, engine=None):
    clock = iter(range(10_000))
    made = nodes.Node(gpus, "cuda", tmp_path, left, clock=lambda: float(next(clock)))
    if engine is not None:
        made.engine = engine
    return made


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_each_machine_checks_before_it_times_in_ten_minutes(nodes, gpus):
    runs = nodes.runs_of(gpus)
    assert [run.name for run in runs[:3]] == ["tests", "greedy", "sums"]
    assert len({run.name for run in runs}) == len(runs)
    forms = nodes.forms_of(gpus)
    assert {form for run in runs for form in run.forms} <= set(forms)
    checked = {form for ways in nodes.CHECKED.values() for form in ways}
    assert set(forms) <= checked
    assert nodes.SECONDS < 600


def test_a_form_with_other_answers_is_not_timed(nodes, tmp_path):
    """Nor is what does not fit into the time left; a run that fails leaves the others."""

    def engine(what, settings, gpu, requests, lengths):
        return [2] if settings.get("context_parallel_size") else [1]

    def broken(node):
        raise ValueError("broken")

    timed = []
    runs = [
        nodes.Run("greedy", "", "", 1, nodes.greedy),
        nodes.Run(
            "a", "", "", 1, lambda node: timed.append("a") or {"x": 3.0}, ("tensor",), "x", 2
        ),
        nodes.Run("b", "", "", 1, lambda node: timed.append("b") or {}, ("context",)),
        nodes.Run("c", "", "", 1, broken),
        nodes.Run("d", "", "", 5000, lambda node: timed.append("d") or {}),
    ]
    saved = []
    found = nodes.run_all(node_of(nodes, tmp_path, engine=engine), runs, saved.append)
    assert timed == ["a"]
    assert found["greedy"]["llama, tensor"] == "equal"
    assert found["greedy"]["llama, context"] == "[1] / [2]"
    assert "context" in found["b"]["left out"]
    assert found["c"]["failed"] == "ValueError: broken"
    assert "5000 needed" in found["d"]["left out"]
    assert len(saved) == len(runs)
    rows = nodes.table(runs, found).splitlines()
    assert len(rows) == 2 + len(runs)
    assert "| yes |" in rows[3]


def test_goals_are_met_by_numbers_alone(nodes):
    run = nodes.Run("a", "", "", 1, dict, (), "x", 1.5, None)
    assert run.met({"x": 1.6}) is True
    assert run.met({"x": 1.4}) is False
    assert run.met({"failed": "no"}) is None


def dry(tmp_path, *words):
    command = [sys.executable, str(BENCHMARKS / "nodes.py"), "--device", "cpu", "--gpus", "2"]
    output = tmp_path / "nodes_N.json"
    subprocess.run([*command, "--output", str(output), *words], check=True, capture_output=True)
    return json.loads((tmp_path / "nodes_2.json").read_text())["runs"]


def test_a_dry_run_on_cpu_processes_writes_its_table(tmp_path):
    found = dry(tmp_path, "--only", "70b")
    assert found["70b"]["tokens_a_second"] > 0
    assert "70B FP8" in (tmp_path / "nodes_2.md").read_text()


@pytest.mark.slow
def test_every_form_runs_dry_on_cpu_processes(tmp_path):
    found = dry(tmp_path)
    assert not [name for name, run in found.items() if "failed" in run]
    assert {way for way in found["greedy"].values() if isinstance(way, str)} == {"equal"}
    for name, run in found.items():
        assert (
            "left out" in run
            or name == "greedy"
            or any(isinstance(value, int | float) for key, value in run.items() if key != "took_s")
        )
