"""Every example of README.md and docs/, run as it stands, with tiny models in the place of `smollm2` and `minilm`.

Shell examples run in a shell whose `slipstream` is this checkout's; Python examples in a fresh interpreter. Those of README
run once more with the real model (marker `model`). docs/server.md is tested in tests/server, against a running server.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.hub import DEFAULT_MODEL, MODELS

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "server.md")]
NOT_RUN = ("./quickstart",)  # .ci/run does, from a fresh clone
EXAMPLES = [
    pytest.param(language, code, id=f"{path.stem}-{number}")
    for path in DOCS
    for number, (language, code) in enumerate(re.findall(r"```(\w+)\n(.*?)```", path.read_text("utf-8"), re.DOTALL))
    if language != "text" and not code.startswith(NOT_RUN)
]


@pytest.fixture
def place(tmp_path):
    """A working directory that sees `benchmarks/`, and the environment to run an example in."""
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    tools = tmp_path / "bin"
    tools.mkdir()
    command = tools / "slipstream"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m slipstream "$@"\n')
    command.chmod(0o755)
    source = os.pathsep.join([str(ROOT / "src"), *(p for p in sys.path if p)])
    return tmp_path, {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": source}


def run(place, language, code):
    """The example's standard output. It fails if a command in it does."""
    folder, env = place
    words = {"sh": ["sh", "-euc", code], "python": [sys.executable, "-c", code]}[language]
    if "@triton.jit" in code:  # which reads its source from a file
        (folder / "example.py").write_text(code)
        words = [sys.executable, "example.py"]
    result = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, f"{code}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_there_are_examples():
    assert len(EXAMPLES) >= 12


@pytest.mark.parametrize(("language", "code"), EXAMPLES)
def test_example(place, tiny_model, tiny_encoder, language, code):
    code = code.replace('slipstream run "', 'slipstream run smollm2 "')  # the default model, by name
    run(place, language, code.replace("smollm2", str(tiny_model)).replace("minilm", str(tiny_encoder)))


@pytest.mark.model
@pytest.mark.parametrize(("language", "code"), [example for example in EXAMPLES if example.id.startswith("README")])
def test_readme_with_the_real_model(place, language, code):
    assert "Paris" in run(place, language, code)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), target
    for script in re.findall(r"`(benchmarks/\w+\.py)`", path.read_text("utf-8")):
        assert (ROOT / script).exists(), script


def test_quoted_messages_are_the_codes():
    """The first column of the troubleshooting table quotes messages, with … for what varies: the code has each."""
    texts = []
    for path in (ROOT / "src").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                texts.append(node.value)
    table = re.findall(r"^\| ([^|]*) \|", (ROOT / "docs" / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)
    quotes = [quote for cell in table for quote in re.findall("`([^`]+)`", cell) if quote != "quickstart"]
    assert len(quotes) >= 7
    for quote in quotes:
        pattern = ".*".join(map(re.escape, quote.split("…")))
        assert any(re.search(pattern, text) for text in texts), quote


def test_the_default_models_size_is_the_same_everywhere():
    texts = [(ROOT / name).read_text("utf-8") for name in ("README.md", "docs/models.md")]
    sizes = [
        re.findall(r"SmolLM2-135M-Instruct\b.*?(\d+ Mi?B)", text) for text in [MODELS[DEFAULT_MODEL].about, *texts]
    ]
    assert sizes == [["98 MB"]] * 3  # 98,362,432 bytes


def test_definitions_are_the_codes():
    from slipstream.bench.metrics import DEFINITIONS

    text = (ROOT / "docs" / "benchmarking.md").read_text("utf-8")
    for name, definition in DEFINITIONS.items():
        assert f"| {name} | {definition}" in text


def test_families_are_all_listed():
    from slipstream.spec.families import FAMILIES

    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    for name in FAMILIES:
        assert f"`{name}`" in text
