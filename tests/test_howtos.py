"""The how-tos from top to bottom, with a tiny model in the place of each that they name.

Commands and servers are forks of a process that has imported torch (tests/support/preloaded.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S
from tests.test_docs import place  # noqa: F401
from tests.test_tutorials import SERVES, carried_out, free_port, served

PAGES = sorted((Path(__file__).parents[1] / "docs" / "howto").glob("*.md"))
SLOW = ("shrink-a-model", "debug-a-slow-server", "pin-memory", "feedback-to-data")
TEMPLATE = (
    "{% for tool in tools or [] %}<tools>{{ tool.function.name }}</tools>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def with_tools(tiny_model, tmp_path_factory):
    """The tiny model with a chat template that knows tools."""
    folder = tmp_path_factory.mktemp("howtos") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return str(folder)


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem in SLOW)) for p in PAGES]
)
def test_a_howto_works_from_top_to_bottom(page, place, preloaded, with_tools):  # noqa: F811
    environment = {**os.environ, "PATH": f"{preloaded.tools}:{os.environ['PATH']}"}
    port, servers = free_port(), []
    blocks = re.findall(
        r"^ *```(sh|python)\n(.*?)^ *```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert blocks
    try:
        for number, (language, code) in enumerate(blocks):
            code = code.replace("8000", str(port))
            code = code.replace('LLM("smollm2"', f'LLM("{with_tools}"')
            if language == "sh":
                named = re.sub(r"(?<![\w/.-])(smollm2|qwen3:0\.6b)(?![\w.-])", with_tools, code)
                serves = code.startswith(SERVES) and "=" not in code
                code = f"{named.strip()} --port {port}" if code.startswith(SERVES) else named
                if serves:
                    code += " --served-model-name smollm2 --served-model-name qwen3:0.6b" * (
                        "keep-alive" not in code
                    )
                    code += " --max-model-len 1024"
            if code.startswith(SERVES):
                servers.append(served(f"exec {code}", place, environment, port))
            else:
                carried_out(language, code, place, environment, number)
    finally:
        for server in servers:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
        for server in servers:
            server.wait(PATIENCE_S)
