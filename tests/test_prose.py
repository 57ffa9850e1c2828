"""Lints of prose: first words of docstrings, and classes that share a name (DESIGN §11)."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "slipstream"
FILES = sorted(SRC.rglob("*.py"))
ALL_FILES = [
    *FILES,
    *sorted(f for name in ("tests", "benchmarks", "examples") for f in (ROOT / name).rglob("*.py")),
]
BARE = re.compile(
    r"\s*(after|also|among|and|as|at|before|behind|beside|but|by|for|from|if|in|it|its|like|not|of|on|once|only|or|so|than|"
    r"that|their|they|those|to|under|until|up|what|when|where|which|while|who|whose|why|with|without)\b",
    re.IGNORECASE,
)
"""Prepositions, pronouns and conjunctions: a docstring that begins with one has no subject."""

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Docstrings of modules, classes and functions, and the strings after an assignment."""
    nodes = [tree]
    for node in nodes:
        body = getattr(node, "body", None)
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, None)
            nodes += inner if isinstance(inner, list) else []
        for i, statement in enumerate(body if isinstance(body, list) else []):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                kinds = (ast.Assign, ast.AnnAssign) if i else DOCUMENTED
                is_text = isinstance(statement.value.value, str)
                if is_text and isinstance(body[i - 1] if i else node, kinds):
                    yield statement.value


def test_docstrings_begin_with_what_they_are_about():
    places = [
        f"{file.relative_to(ROOT)}:{text.lineno}: {text.value.strip()[:60]}"
        for file in ALL_FILES
        for text in docstrings(ast.parse(file.read_text(encoding="utf-8")))
        if BARE.match(text.value)
    ]
    assert not places, "\n".join(places)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""Of blocks."""', 1),
        ('"""Blocks."""\nX = 1\n"""What is left."""\nY: int\n"""Width."""', 1),
        ('class A:\n    """So it is."""\n    x: int\n    """With a unit."""', 2),
        ('async def f():\n    """\n    as said."""\n    "And a string."', 1),
        ('def f():\n    """`of`: a name. Of what."""', 0),
        ('if True:\n    "Of no docstring."', 0),
    ],
)
def test_bare_beginnings_are_found(source, count):
    found = [text for text in docstrings(ast.parse(source)) if BARE.match(text.value)]
    assert len(found) == count


def test_comments_begin_with_one_sign():
    """A script that rewrites comments can write its own sign before theirs."""
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()[:60]}"
        for file in ALL_FILES
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"#\s+# ", line)
    ]
    assert not found, "\n".join(found)


def test_names_of_tests_have_three_words_or_more():
    short = re.compile(r"^ *(?:async )?def (test_[a-z0-9]+(?:_[a-z0-9]+)?)\(", re.MULTILINE)
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in short.findall(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_no_two_classes_share_a_name():
    names: Counter[str] = Counter()
    for file in FILES:
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        names.update(n.name for n in nodes if isinstance(n, ast.ClassDef))
    assert [name for name, number in names.items() if number > 1] == []


TABLES = {
    "costs/step_cost.py": 6,
    "model/device_stream.py": 1,
    "model/layer_stream.py": 1,
    "model/stored/mxfp4.py": 2,
    "model/stored/rounded.py": 8,
    "server/http/errors.py": 8,
    "simulate/routing.py": 4,
    "simulate/traffic.py": 5,
}
"""Modules whose docstrings have a table or a drawing, and its rows."""


def test_tables_of_docstrings_have_a_line_for_each_row():
    """A script that fills paragraphs can run rows together."""
    found = {
        name: len(
            re.findall(
                r"^  \S", ast.get_docstring(ast.parse((SRC / name).read_text())), re.MULTILINE
            )
        )
        for name in TABLES
    }
    assert found == TABLES
