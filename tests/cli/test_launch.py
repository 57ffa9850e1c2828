"""`slipstream launch`: what it sets for each agent, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys

import httpx
import pytest

from slipstream.cli import main as cli
from slipstream.cli.serving import launch
from slipstream.errors import ConfigError
from tests.server.conftest import serving
from tests.support import tiny_models

AGENT = """
import os, pathlib, signal, time, urllib.request
signal.signal(signal.SIGINT, lambda *_: None)
os.killpg(0, signal.SIGINT)  # Ctrl-C
time.sleep(0.3)
models = urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models").read().decode()
pathlib.Path("said").write_text(models)
os.kill(os.getppid(), int(os.environ["ENDS"]))
time.sleep(60)
"""
"""An agent that takes Ctrl-C itself, asks the server after it, and ends with whoever started it."""

SERVER = r"""
import os
os.write(2, b"caf\xe9\n")
for _ in range(2000):
    os.write(2, b"x" * 100 + b"\n")
os.write(2, b"the end\n")
"""
"""A server whose log is no UTF-8, and longer than a pipe."""


@pytest.fixture(scope="module")
def url():
    with serving() as server:
        yield server.url


def launched(capsys, *words):
    code = cli.main(["launch", *words])
    return code, capsys.readouterr()


@pytest.mark.parametrize(
    ("client", "set_"),
    [
        ("claude", "ANTHROPIC_BASE_URL"),
        ("codex", "SLIPSTREAM_API_KEY"),
        ("opencode", "OPENCODE_CONFIG_CONTENT"),
        ("any", "OPENAI_BASE_URL"),
    ],
)
def test_agents_get_the_server_and_its_model(url, capsys, client, set_):
    code, told = launched(capsys, client, "--url", url, "--print", "--json")
    found = json.loads(told.out)
    assert code == 0
    assert "has no tools" in told.err or client == "any"  # the served model's template
    assert set_ in found["environment"]
    everything = json.dumps(found)
    assert url in everything
    assert "fake" in everything


def test_agent_is_started_with_its_arguments(url, capsys, tmp_path, monkeypatch):
    program = tmp_path / "claude"
    program.write_text(
        '#!/bin/sh\necho "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL $ANTHROPIC_API_KEY'
        '$CLAUDE_CODE_MAX_CONTEXT_TOKENS $@" > "$OUT"\nexit 3\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the user's own")
    code, told = launched(capsys, "claude", "--url", url + "/v1", "--", "-p", "hello there")
    assert code == 3
    assert (tmp_path / "out").read_text() == f"{url} fake 512 -p hello there\n"
    assert f"ANTHROPIC_BASE_URL={url}" in told.err


def test_any_program_gets_the_variables_of_the_sdks(url, capsys, tmp_path):
    out = tmp_path / "out"
    script = (
        "import os; names = ('OPENAI_BASE_URL', 'OPENAI_MODEL', 'ANTHROPIC_BASE_URL', 'OLLAMA_HOST'); "
        f"open({str(out)!r}, 'w').write(' '.join(os.environ[name] for name in names))"
    )
    code, _ = launched(capsys, "any", "--url", url, "--", sys.executable, "-c", script)
    assert code == 0
    assert out.read_text() == f"{url}/v1 fake {url} {url}"
    code, told = launched(capsys, "any", "--url", url)
    assert code == 2
    assert "give the program after --" in told.err


def test_key_comes_from_a_file_or_a_word_and_is_not_shown(url, capsys, tmp_path):
    file = tmp_path / "key"
    file.write_text("# of the server\nsecret-key\n")
    code, told = launched(capsys, "codex", "--url", url, "--print", "--api-key-file", str(file))
    assert code == 0
    assert "SLIPSTREAM_API_KEY=" in told.err
    assert "secret-key" not in told.err
    code, told = launched(capsys, "opencode", "--url", url, "--print", "--api-key", "secret-key")
    assert "OPENCODE_CONFIG_CONTENT=" in told.err
    assert "secret-key" not in told.err
    both = ("--api-key-file", str(file), "--api-key", "x")
    assert "not both" in launched(capsys, "codex", "--url", url, "--print", *both)[1].err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers"),
        (["--model", "other"], "serves fake"),
        (["--serve", "smollm2"], "leave --serve out"),
    ],
)
def test_what_is_missing_is_named(url, capsys, words, said):
    words = words if "--url" in words else ["--url", url, *words]
    code, told = launched(capsys, "codex", "--print", *words)
    assert code == 2
    assert said in told.err


def test_program_that_is_not_installed_is_named_with_its_remedy(url, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    code, told = launched(capsys, "opencode", "--url", url)
    assert code == 2
    assert "npm install -g opencode-ai" in told.err


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGQUIT])
def test_server_of_launch_outlives_ctrl_c_is_silent_and_ends_with_the_agent(tmp_path, ends):
    tiny_models.write_with_tokenizer(tmp_path / "tiny")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "slipstream", "launch", "any", "--url", url]
    command += ["--serve", "tiny", "--", sys.executable, "-c", AGENT]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "ENDS": str(int(ends))},
        capture_output=True,
        text=True,
        timeout=100,
        start_new_session=True,
    )
    assert ended.returncode == 128 + ends, ended.stderr
    assert json.loads((tmp_path / "said").read_text())["data"][0]["id"]
    shown = ended.stderr.split("OPENAI_BASE_URL=")[1]
    assert "status=200" not in shown  # the agent's screen is its own
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


class Gone:
    """A screen that nobody reads any more."""

    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("screen", [None, Gone()])
def test_log_of_the_server_is_read_to_its_end(tmp_path, monkeypatch, capsys, screen):
    if screen is not None:
        monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(launch, "_is_ready", lambda url: False)
    start, servers = subprocess.Popen, []

    def popen(command, **settings):
        servers.append(start([sys.executable, "-c", SERVER], **settings))
        return servers[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(launch, "START_S", 30)
    with (
        pytest.raises(ConfigError, match="did not start"),
        launch.served("x", "http://127.0.0.1:9"),
    ):
        pass
    assert servers[0].returncode == 0  # it came to its end
    if screen is None:
        shown = capsys.readouterr().err
        assert "caf\ufffd" in shown
        assert shown.endswith("the end\n")


def test_options_of_the_server_follow_the_model(monkeypatch):
    commands = []

    def popen(command, **settings):
        commands.append(command)
        raise OSError

    monkeypatch.setattr(launch, "_is_ready", lambda url: False)
    monkeypatch.setattr(subprocess, "Popen", popen)
    with (
        pytest.raises(OSError),
        launch.served("m/x --max-model-len 65536 --served-model-name 'a b'", "http://127.0.0.1:9"),
    ):
        pass
    words = commands[0][commands[0].index("serve") + 1 :]
    assert words == [
        *("m/x", "--max-model-len", "65536", "--served-model-name", "a b"),
        *("--host", "127.0.0.1", "--port", "9"),
    ]
    with (
        pytest.raises(ConfigError, match="--port out"),
        launch.served("x --port=1", "http://127.0.0.1:9"),
    ):
        pass
