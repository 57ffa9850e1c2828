"""Every Python example of docs/server.md and docs/server/, run as it stands against a tiny server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = [
    pytest.param(code, id=f"{path.stem}-{number}")
    for path in (DOCS / "server.md", *sorted((DOCS / "server").glob("*.md")))
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.DOTALL)
    )
]


def test_there_are_examples():
    assert len(EXAMPLES) >= 14


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_of_the_servers_pages_run(code, request):
    """Examples with `minilm` run against an encoder."""
    server = request.getfixturevalue("tiny_encoder_server" if "minilm" in code else "tiny_server")
    code = code.replace("127.0.0.1:8000", server.url.removeprefix("http://"))
    exec(compile(code, "example", "exec", dont_inherit=True), {})
