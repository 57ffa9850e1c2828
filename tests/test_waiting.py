"""What tests wait for: httpx gives an answer 5 seconds by default, which a loaded machine does not keep."""

from __future__ import annotations

import ast
from pathlib import Path

ASKS = {"get", "post", "put", "delete", "request", "stream", "Client", "AsyncClient"}


def impatient(source):
    """The lines of calls of httpx that say no timeout."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="httpx"), attr=name), keywords=given
            ) if name in ASKS:
                if "timeout" not in {keyword.arg for keyword in given}:
                    yield node.lineno


def test_every_call_of_httpx_says_how_long_it_waits():
    assert list(impatient("import httpx\nhttpx.get('x', timeout=1)\nhttpx.Client()\n")) == [3]
    found = {
        path.name: lines
        for path in Path(__file__).parent.rglob("*.py")
        if (lines := list(impatient(path.read_text())))
    }
    assert not found
