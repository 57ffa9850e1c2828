"""Every Python example of docs/server.md, run as it stands against a tiny server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOC = Path(__file__).parents[2] / "docs" / "server.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)


def test_there_are_examples():
    assert len(EXAMPLES) >= 7


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number, request):
    """Those with `minilm` against an encoder."""
    server = request.getfixturevalue(
        "tiny_encoder_server" if "minilm" in EXAMPLES[number] else "tiny_server"
    )
    source = EXAMPLES[number].replace("127.0.0.1:8000", server.url.removeprefix("http://"))
    exec(compile(source, f"example {number}", "exec", dont_inherit=True), {})
