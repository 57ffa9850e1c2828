"""The scripts in `benchmarks/` and their records: named by the documents, free of a machine's paths, importable."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RECORDS = sorted((BENCHMARKS / "results").glob("*.json"))
HELPERS = ("collectives.py", "common.py", "hammer.py", "processes.py")
SCRIPTS = sorted(path for path in BENCHMARKS.glob("*.py") if path.name not in HELPERS)
CASES = sorted((BENCHMARKS / "cases").glob("*/*.py"))
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(BENCHMARKS.glob("*.md")),
]
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+[\w.+-]*")


def load(name: str):
    """A module of `benchmarks/` that imports nothing of its neighbours."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_record_has_the_command_that_made_it():
    assert [path.name for path in RECORDS if '"command":' not in path.read_text("utf-8")] == []


def test_no_record_holds_an_absolute_path():
    found = {path.name: ABSOLUTE_PATH.findall(path.read_text("utf-8")) for path in RECORDS}
    assert {name: paths for name, paths in found.items() if paths} == {}


def test_each_record_is_named_by_a_document():
    text = "\n".join(path.read_text("utf-8") for path in DOCUMENTS)
    named = {*re.findall(r"`(\w+)(?:\.json)?`", text), *re.findall(r"results/(\w+)\.json", text)}
    assert RECORDS
    assert [path.name for path in RECORDS if path.stem not in named] == []


def test_links_of_the_notes_lead_somewhere():
    for path in BENCHMARKS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)", path.read_text("utf-8")):
            assert target.startswith("http") or (path.parent / target).exists(), target


def test_each_script_and_case_is_named_with_its_command():
    text = (ROOT / "docs" / "benchmarking.md").read_text("utf-8")
    assert [path.name for path in SCRIPTS if f"`python benchmarks/{path.name}" not in text] == []
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    assert CASES
    for case in CASES:
        script, choice = case.parent.name, case.stem
        wanted, option = f"python benchmarks/{script}.py", f"--study {choice.replace('_', '-')}"
        if script == "kernels":
            device, _, choice = choice.partition("_")
            wanted, option = f"{wanted} --device {device}", f"--op {choice.replace('_', '-')}"
        script_of_row, found = "", []  # "…" stands for the row above's
        for row in rows:
            script_of_row = row if "`python " in row else script_of_row
            found += [row] if wanted in script_of_row else []
        assert any(re.search(rf"{option}[`, ]", row) for row in found), case


@pytest.mark.parametrize(
    "path",
    [*SCRIPTS, *CASES, BENCHMARKS / "common.py"],
    ids=lambda path: f"{path.parent.name}_{path.stem}",
)
def test_what_a_script_imports_of_slipstream_is_there(path):
    if "cuda" in path.stem:
        pytest.importorskip("triton")
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "slipstream"
        ):
            module = importlib.import_module(node.module)
            for alias in node.names:
                found = hasattr(module, alias.name) or importlib.util.find_spec(
                    f"{node.module}.{alias.name}"
                )
                assert found, f"{node.module}.{alias.name}"


def test_the_chart_is_drawn_from_the_record():
    chart = load("chart")
    assert chart.CHART.read_text("utf-8") == chart.draw(json.loads(chart.RECORD.read_text("utf-8")))


def test_a_saved_record_keeps_of_a_path_its_last_part(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.costs.hardware.bound_spinning", lambda: None)
    common = load("common")
    monkeypatch.setattr(
        sys, "argv", ["/somewhere/else/kernels.py", "--model=/a/b/c.gguf", "128/128x1024"]
    )
    common.save(
        tmp_path / "made.json",
        "made",
        results={"where": Path("/x/y"), "rate": "12 MB/s", "url": "http://h/v1/x"},
    )
    made = json.loads((tmp_path / "made.json").read_text())
    assert made["command"] == ["kernels.py", "--model=c.gguf", "128/128x1024"]
    assert made["results"] == {"where": "y", "rate": "12 MB/s", "url": "http://h/v1/x"}
