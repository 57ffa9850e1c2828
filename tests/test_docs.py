"""Every example of README.md and docs/, run as it stands, with tiny models in the place of `smollm2` and `minilm`.

Shell examples run in a shell whose `slipstream` is this checkout's. Each command and each Python example is a fork of one
process that has imported torch (tests/support/preloaded.py). The README's run once more with the real model in fresh processes
(marker `model`). docs/server.md and docs/server/ are tested in tests/server, against a running server.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.cli.main import build_parser
from slipstream.hub import DEFAULT_MODEL, MODELS, machine_folder
from tests.support.waiting import PATIENCE_S
from tests.test_imports import FILES, parsed

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SERVED = {ROOT / "docs" / "server.md", *(ROOT / "docs" / "server").glob("*.md")}
TUTORIALS = {  # tests/test_tutorials.py and test_howtos.py
    page for folder in ("tutorials", "howto") for page in (ROOT / "docs" / folder).glob("*.md")
}
DOCS = [path for path in PAGES if path not in SERVED | TUTORIALS and path.name != "CONTRIBUTING.md"]
NOT_RUN = ("./quickstart",)  # .ci/run does, from a fresh clone
EXAMPLES = [
    pytest.param(language, code, id=f"{path.stem}-{number}")
    for path in DOCS
    for number, (language, code) in enumerate(
        re.findall(r"```(\w+)\n(.*?)```", path.read_text("utf-8"), re.DOTALL)
    )
    if language != "text" and not code.startswith(NOT_RUN)
]


SERVER_COMMANDS = [
    line
    for path in sorted(SERVED)
    for code in re.findall(r"```sh\n(.*?)```", path.read_text("utf-8"), re.DOTALL)
    for line in code.splitlines()
    if line.startswith("slipstream ")
]


@pytest.fixture
def place(tmp_path):
    """A working directory that has these of a clone."""
    for name in ("benchmarks", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.fixture
def fresh(tmp_path):
    """A folder with a `slipstream` and a `python` that are processes of their own."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, words in (("slipstream", "-m slipstream "), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        (tools / name).chmod(0o755)
    return tools


def run(folder, tools, language, code):
    """The example's standard output. It fails if a command in it does."""
    source = os.pathsep.join([str(ROOT / "src"), *(p for p in sys.path if p)])
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": source}
    if "--measure" in code:  # what a machine that tests keep busy measures is not kept for its user
        env["XDG_CACHE_HOME"] = str(folder / "cache")
        if (known := machine_folder()).is_dir():
            shutil.copytree(known, folder / "cache" / "slipstream" / known.name)
    if language == "python":  # a file, since @triton.jit reads its source from one
        (folder / "example.py").write_text(code)
        code = "python example.py"
    result = subprocess.run(
        ["sh", "-euc", code],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, f"{code}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_there_are_examples():
    assert len(EXAMPLES) >= 12


@pytest.mark.parametrize(("language", "code"), EXAMPLES)
def test_examples_of_the_docs_run(place, preloaded, tiny_model, tiny_encoder, language, code):
    code = code.replace(
        'slipstream run "', 'slipstream run smollm2 "'
    )  # the default model, by name
    code = code.replace("smollm2", str(tiny_model)).replace("minilm", str(tiny_encoder))
    run(place, preloaded.tools, language, code)


@pytest.mark.parametrize("line", SERVER_COMMANDS)
def test_command_of_the_servers_pages(place, preloaded, line):
    """A command that ends by itself runs. A server's options are parsed; tests/server has running ones."""
    words = shlex.split(line)[1:]
    if words[0] in ("keys", "monitoring"):
        run(place, preloaded.tools, "sh", line)
    else:
        assert build_parser().parse_args(words)


@pytest.mark.parametrize(
    ("language", "code"),
    [("sh", "slipstream info no-such-model"), ("sh", "false"), ("python", "raise ValueError")],
)
def test_an_example_that_fails_is_noticed(place, preloaded, language, code):
    with pytest.raises(AssertionError):
        run(place, preloaded.tools, language, code)


@pytest.mark.model
@pytest.mark.parametrize(
    ("language", "code"), [example for example in EXAMPLES if example.id.startswith("README")]
)
def test_readme_with_the_real_model(place, fresh, language, code):
    assert "Paris" in run(place, fresh, language, code)


def anchors_of(path):
    """The anchors of a page's headings, made as forges and the site make them."""
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#{1,6} (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", path.read_text("utf-8")):
        file = path.parent / target if target else path
        assert file.exists(), target
        if anchor and file.suffix == ".md":  # a picture's says for which colours it is
            assert anchor in anchors_of(file), f"{target}#{anchor}"


MAX_LINE = 300  # characters that a reader takes in at once; of a table, in a cell


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_line_of_a_page_is_too_long_to_read(path):
    lines = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL).splitlines()
    parts = [cell for line in lines for cell in (line.split(" | ") if line[:1] == "|" else [line])]
    assert [part for part in parts if len(part) > MAX_LINE] == []


NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")
ROOMS = {path.name for path in (ROOT / "src" / "slipstream").iterdir() if path.is_dir()}


def missing_files(text):
    """The files and folders of the sources, tests and benchmarks that a page names in backticks and that do not exist."""
    for name in NAMED.findall(text):
        first = name.partition("/")[0]
        if first in ("src", "csrc", "tests", "benchmarks", "examples", "docs"):
            found = ROOT / name
        elif first in ROOMS and (name.endswith((".py", ".cu", "/"))):
            found = ROOT / "src" / "slipstream" / name
        else:
            continue
        if not found.exists():
            yield name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_names_exist(path):
    assert not list(missing_files(path.read_text("utf-8")))


@pytest.mark.parametrize("name", ["architecture.md", "extending.md"])
def test_files_that_a_map_names_without_a_folder_exist(name):
    known = {path.name for part in ("src", "csrc", "tests") for path in (ROOT / part).rglob("*.*")}
    named = re.findall(r"`(\w+\.(?:py|cu|h|cpp))`", (ROOT / "docs" / name).read_text("utf-8"))
    assert [file for file in named if file not in known] == []


def test_a_file_that_is_gone_is_noticed():
    text = (
        "`worker/no_such.py`, `core/scheduler.py`, `benchmarks/no_such.py`, `/v1/models`, `core/`"
    )
    assert list(missing_files(text)) == ["worker/no_such.py", "benchmarks/no_such.py"]


@functools.cache
def texts_in(path):
    """A source's texts, with … for what varies, without its docstrings."""
    nodes = list(ast.walk(parsed(path)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            found.append(
                "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                )
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            found.append(node.value)
    return found


def test_quoted_messages_are_the_codes():
    """The first column of the troubleshooting table quotes messages, with … for what varies: the code has each."""
    sources = {path: path.read_text("utf-8") for path in FILES.values()}
    table = re.findall(
        r"^\| ([^|]*) \|", (ROOT / "docs" / "troubleshooting.md").read_text("utf-8"), re.MULTILINE
    )
    quotes = [
        quote for cell in table for quote in re.findall("`([^`]+)`", cell) if quote != "quickstart"
    ]
    assert len(quotes) >= 7
    for quote in quotes:
        parts = quote.split("…")
        pattern = ".*".join(map(re.escape, parts))
        beginning = max(parts, key=len)[:20]
        likely_first = sorted(sources, key=lambda path: beginning not in sources[path])
        assert any(re.search(pattern, text) for path in likely_first for text in texts_in(path)), (
            quote
        )


def test_the_default_models_size_is_the_same_everywhere():
    texts = [(ROOT / name).read_text("utf-8") for name in ("README.md", "docs/models.md")]
    sizes = [
        re.findall(r"SmolLM2-135M-Instruct\b.*?(\d+ Mi?B)", text)
        for text in [MODELS[DEFAULT_MODEL].about, *texts]
    ]
    assert sizes == [["98 MB"]] * 3  # 98,362,432 bytes


def test_definitions_are_the_codes():
    from slipstream.costs.metrics import DEFINITIONS

    text = (ROOT / "docs" / "benchmarking.md").read_text("utf-8")
    for name, definition in DEFINITIONS.items():
        assert f"| {name} | {definition}" in text


def test_families_are_all_listed():
    from slipstream.spec.families import FAMILIES

    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    for name in FAMILIES:
        assert f"`{name}`" in text
