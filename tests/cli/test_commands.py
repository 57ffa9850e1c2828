"""Commands that load no model: refusals and the last values that are taken (commands.txt), and what is printed, whole
(sessions.txt)."""

import io
import itertools
import os
import re
import shlex
from pathlib import Path

import pytest

from slipstream import __version__
from slipstream.cli.main import main
from slipstream.cli.serving.running import register
from slipstream.server.operations.audit import AuditLog

CLONE = Path(__file__).parents[2]
CONFIGS = CLONE / "benchmarks" / "configs"
ROWS = (Path(__file__).parent / "commands.txt").read_text().splitlines()
SESSIONS = (Path(__file__).parent / "sessions.txt").read_text().split("# ")[1:]
GRID = """
models = ["TINY"]
lengths = [[8, 4], [16, 4]]
batch_sizes = [2, 1]
[[engines]]
engine = "slipstream"
schemes = ["none", "int8"]
"""
NOW = 1_700_000_000


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Replacements of the words in the tables, on a machine of known memory, time and luck."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("time.time", lambda: NOW)
    monkeypatch.setattr("slipstream.cli.console.LINE_EVERY_S", float("inf"))
    monkeypatch.setattr("slipstream.costs.hardware.busy_cores", lambda: 0.0)
    for module in ("hardware", "estimate"):
        monkeypatch.setattr(f"slipstream.costs.{module}.cpu_name", lambda: "a CPU")
    for module in ("costs.hardware", "costs.estimate", "worker.device", "cli.library.info"):
        monkeypatch.setattr(f"slipstream.{module}.host_memory", lambda: (64 * 2**30, 32 * 2**30))
    names = {"TINY": "tiny", "LLAMA": "llama-3-8b", "DEEPSEEK": "deepseek-v2-lite"}
    names |= {"QWEN": "qwen3.5-35b-a3b", "MINILM": "minilm"}
    return {name: CONFIGS / folder for name, folder in names.items()} | {
        "DIR": tmp_path,
        "CLONE": CLONE,
    }


def words_of(line, places):
    for name, place in places.items():
        line = line.replace(name, str(place))
    return shlex.split(line)


@pytest.mark.parametrize("row", ROWS)
def test_a_command_is_refused_as_the_row_says_or_taken(row, places, tmp_path, capsys):
    """`command`, then `-> words` of its refusal."""
    command, _, words = row.partition(" -> ")
    more = {"N*201": "n" * 201, "KEYS": tmp_path / "keys", "N*200": "n" * 200}
    code = main(words_of(command, more | places))
    told = capsys.readouterr().err
    assert words in told if words else "Error" not in told, told
    assert (code != 0) == bool(words)


@pytest.mark.parametrize("session", SESSIONS, ids=lambda text: text.split("\n")[0])
def test_a_session_prints_what_the_table_has(
    session, places, request, tmp_path, capsys, monkeypatch
):
    """The table has, after `$ command`, the lines that it prints and no command before it did, columns two spaces
    apart, then its exit code where it is not 0."""
    numbers = itertools.count(1)
    monkeypatch.setattr("secrets.token_hex", lambda n: f"{next(numbers):0{2 * n}x}")
    monkeypatch.setattr("secrets.token_urlsafe", lambda _: f"secret{next(numbers)}")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    log = AuditLog(tmp_path / "log")
    for id_, fields in enumerate([{"answer": "a"}, {}, {}]):
        log.write("request", id=f"{id_:032x}", status=200, **fields)
    log.write("feedback", id="f", request=f"{1:032x}", rating="up")
    log.close()
    for name, kind, fields in (
        ("edited", "feedback", {"rating": "up"}),
        ("edited2", "request", {"id": 5}),
    ):
        log = AuditLog(tmp_path / name)
        log.write(kind, **fields)
        log.close()
    (tmp_path / "grid.toml").write_text(GRID)
    places["GRID"] = tmp_path / "grid.toml"
    if "MODEL" in session:
        places["MODEL"] = request.getfixturevalue("tiny_model")
    shown = {str(place): name for name, place in places.items()}
    shown |= {str(CONFIGS): "CONFIGS", str(os.getpid()): "PID", f":{__version__}": ":VERSION"}
    capsys.readouterr()
    said = [session.split("\n")[0]]
    for command in re.findall(r"^\$ (.*)", session, re.MULTILINE):
        code = 0
        match command.split():
            case ["have"]:  # a model and a server are here
                path = (
                    tmp_path / "cache" / "slipstream" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
                )
                path.parent.mkdir(parents=True)
                path.write_bytes(bytes(2_000_000))
                kept = {"device": "cpu", "memory_bytes": 3_000_000, "now": NOW - 7200.0}
                register(os.getpid(), url="http://h:1", models=("smollm2", "b"), **kept)
            case ["cat", *files]:
                print(*((tmp_path / file).read_text() for file in files), sep="")
            case _:
                code = main(words_of(command, places))
        told = "".join(capsys.readouterr()).rstrip()
        for place, name in shown.items():
            told = told.replace(place, name)
        told = re.sub("[0-9a-f]{64}", "HASH", re.sub(r"(\.\./)+\.\.(CLONE|DIR)", r"../\2", told))
        lines = [re.sub("(?<=[^ ]) {2,}", "  ", line) for line in told.splitlines() if line]
        lines = [line for line in lines if line not in said]
        said += [f"$ {command}", *lines, *[f"[{code}]"] * bool(code)]
    assert "\n".join(said) == session.strip()
