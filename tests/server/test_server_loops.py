"""Loops of tools by other programs' clients, unmodified: two calls, then an answer, whole and streamed.

    python -m venv clients && clients/bin/pip install ".[clients]"
    mkdir nodes && cp tests/server/clients/package.json nodes && npm install --prefix nodes
    pytest tests/server/test_server_loops.py --clients-python clients/bin/python --clients-node nodes

A client that is not installed there is skipped. The model says what the test gives it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.server.operations.clients import AGENTS, ClientEndpoint
from slipstream.spec.description import read_spec
from tests.server.answers.test_server_round_trips import ScriptedEngine
from tests.server.conftest import TEMPLATE, serving
from tests.support import tiny_models

LOOPS = Path(__file__).parent / "clients" / "loops"
ROUND_TRIPS = TEMPLATE.replace("arguments.city", "arguments | tojson") + "{# <tool_call> #}"
WEATHER = [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]
PYTHON = {
    "langchain": ("langchain", "langchain-openai", "langchain-anthropic", "langchain-ollama"),
    "llama_index": ("llama-index-llms-openai-like", "llama-index-llms-ollama"),
    "litellm": ("litellm",),
    "ollama": ("ollama",),
    "openai": ("openai",),
    "anthropic": ("anthropic",),
    "openai_agents": ("openai-agents",),
    "pydantic_ai": ("pydantic-ai-slim",),
}
NODE = {
    "openai_js": ("openai",),
    "anthropic_js": ("@anthropic-ai/sdk",),
    "ollama_js": ("ollama",),
    "ai_sdk": ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic"),
}
PROGRAMS = {  # agent: (its package, arguments of one turn, the call that it is given)
    "claude": (
        "@anthropic-ai/claude-code",
        ["-p", "Make a file.", "--allowedTools", "Bash"],
        ("Bash", {"command": "echo made > made.txt", "description": "x"}),
    ),
    "codex": (
        "@openai/codex",
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Make a file."],
        ("exec_command", {"cmd": "echo made > made.txt"}),
    ),
    "opencode": (
        "opencode-ai",
        ["run", "Make a file."],
        ("bash", {"command": "echo made > made.txt", "description": "x"}),
    ),
}  # fmt: skip


class LoopEngine(ScriptedEngine):
    """A model that makes the next of its calls for each result of a tool, and then answers. A request without
    tools gets a title."""

    calls, final = (), ""

    async def answer(self, ids, sampling):
        prompt = self.tokenizer.decode(ids, skip_special_tokens=False)
        done = prompt.count("<|im_start|>tool\n")
        self.script = "A title"
        if self.calls and self.calls[0][0] + "\n" in prompt:
            self.script = self.final
        if self.script == self.final and done < len(self.calls):
            name, arguments = self.calls[done]
            call = {"name": name, "arguments": arguments}
            self.script = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        async for delta in super().answer(ids, sampling):
            yield delta


@pytest.fixture(scope="module")
def looping(tmp_path_factory):
    folder = tmp_path_factory.mktemp("looping")
    tiny_models.write_with_tokenizer(folder)
    tokenizer = Tokenizer.for_model(read_spec(folder))
    tokenizer._templates = {"default": ROUND_TRIPS}
    with serving(LoopEngine(tokenizer), tool_call_parser="hermes") as server:
        yield server


def versions_of(python, packages):
    """Versions of Python packages. Skips the test if one is missing."""
    ask = f"import importlib.metadata as m; print(*(m.version(p) for p in {packages!r}))"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip(f"{', '.join(packages)}: not installed for {python} (--clients-python)")
    return dict(zip(packages, found.stdout.split(), strict=True))


def node_versions_of(request, packages):
    """The folder and the versions of npm's packages. Skips the test if one is missing."""
    folder = request.config.getoption("--clients-node")
    files = [Path(folder or "", "node_modules", package, "package.json") for package in packages]
    if folder is None or not all(file.is_file() for file in files):
        pytest.skip(f"{', '.join(packages)}: not installed (--clients-node)")
    named = zip(packages, files, strict=True)
    return Path(folder).absolute(), {p: json.loads(f.read_text())["version"] for p, f in named}


def finish(command, versions, **settings):
    """Returns a client's output. Fails with the client's versions if the client does."""
    settings = {
        "capture_output": True,
        "text": True,
        "timeout": 280,
        "stdin": subprocess.DEVNULL,
    } | settings
    if "input" in settings:
        del settings["stdin"]
    ended = subprocess.run(command, **settings)
    sys.stdout.write(f"{versions}\n")
    assert ended.returncode == 0, f"{versions}\n{ended.stdout[-3000:]}{ended.stderr[-6000:]}"
    return ended.stdout


def environment(home):
    """This process's, with a home of its own and no address of a provider."""
    kept = {
        n: v
        for n, v in os.environ.items()
        if n not in ("PYTHONPATH", "HOME") and "_API_KEY" not in n
    }
    return kept | {"HOME": str(home), "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}


@pytest.mark.parametrize("client", PYTHON)
def test_python_client_finishes_a_loop_of_tools(client, request, looping, tmp_path):
    python = request.config.getoption("--clients-python")
    versions = versions_of(python, PYTHON[client])
    looping.engine.calls, looping.engine.final = WEATHER, "Both are sunny."
    command = [python, "-P", LOOPS / f"{client}.py", looping.url, "fake"]
    finish(command, versions, env=environment(tmp_path))


@pytest.mark.parametrize("client", NODE)
def test_javascript_client_finishes_a_loop_of_tools(client, request, looping, tmp_path):
    folder, versions = node_versions_of(request, NODE[client])
    looping.engine.calls, looping.engine.final = WEATHER, "Both are sunny."
    command = ["node", "--input-type=module", "-", looping.url, "fake"]
    script = (LOOPS / f"{client}.mjs").read_text()
    finish(command, versions, env=environment(tmp_path), cwd=folder, input=script)


@pytest.mark.parametrize("agent", PROGRAMS)
def test_coding_agent_does_what_the_model_says_and_ends(agent, request, looping, tmp_path):
    package, words, call = PROGRAMS[agent]
    folder, versions = node_versions_of(request, (package,))
    program = shutil.which(AGENTS[agent].program, path=folder / "node_modules" / ".bin")
    assert program, f"{package} has no program {AGENTS[agent].program}"
    looping.engine.calls, looping.engine.final = [call], "The file is made."
    place, home = tmp_path / "work", tmp_path / "home"
    place.mkdir()
    home.mkdir()
    variables, before = AGENTS[agent].setup(ClientEndpoint(looping.url, "fake", "none", 100_000))
    command = [program, *words[:1], *before, *words[1:]]
    said = finish(
        command, versions, cwd=place, env=environment(home) | variables | {"PWD": str(place)}
    )
    assert (place / "made.txt").is_file(), said
    assert (place / "made.txt").read_text() == "made\n"
    assert "The file is made." in said
