"""`list`, `show`, `rm`, `ps` and `pull` as a stranger uses them: commands in processes, and a stand-in hub."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.cli.main import main
from slipstream.cli.models import ago
from slipstream.cli.serving.running import began, register, running_servers
from tests.hub.hub_stand_in import StandIn
from tests.support.waiting import PATIENCE_S

HEAVY = ("torch", "numpy", "slipstream.spec.description", "slipstream.config", "httpx", "rich")


@pytest.fixture
def place(tmp_path):
    """(a function that runs a command with caches of its own, the caches' folder)"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(*words: str, code: int = 0, text: str = "") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "slipstream", *words],
            env=env,
            input=text,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    run.env = env
    return run


@pytest.fixture
def hub(tiny_model):
    files = {f.name: f.read_bytes() for f in tiny_model.iterdir()}
    card = b"---\nlicense: mit\n---\nA model."
    with StandIn(repos={"org/tiny": {**files, "README.md": card}}, large=20_000) as made:
        yield made


def test_pulled_model_is_listed_shown_used_and_removed(place, hub):
    pulled = json.loads(place("pull", "org/tiny", "--hub", hub.url, "--json").stdout)
    assert pulled["family"] == "llama"
    (listed,) = json.loads(place("list", "--json").stdout)["models"]
    assert (listed["name"], listed["path"]) == ("org/tiny", pulled["path"])
    shown = json.loads(place("show", "org/tiny", "--json").stdout)
    assert (shown["architecture"], shown["license"], shown["context_length"]) == (
        "llama",
        "mit",
        1024,
    )
    assert "messages" in place("show", "org/tiny", "--template").stdout
    words = ("--max-tokens=3", "--temperature=0", "--device=cpu", "--dtype=float32")
    assert place("run", "hf.co/org/tiny", "hello", *words).stdout.strip()
    assert "just now" in place("list").stdout
    refused = place("rm", "org/tiny", code=2)
    assert "add --yes" in refused.stderr
    assert place("rm", "org/tiny", "--yes").stdout.startswith("removed org/tiny: ")
    assert json.loads(place("list", "--json").stdout)["models"] == []
    assert not Path(pulled["path"]).exists()


def test_pull_without_the_network_keeps_the_one_that_is_here(place, hub):
    place("pull", "org/tiny", "--hub", hub.url)
    again = place("pull", "org/tiny", "--hub", "http://127.0.0.1:9")
    assert "the one that is here stays" in again.stderr
    failed = place("pull", "org/other", "--hub", "http://127.0.0.1:9", code=3)
    assert "check the network" in failed.stderr


def test_broken_download_is_listed_as_unfinished_and_can_be_removed(place, hub):
    hub.cuts = [100] + [0] * 20
    place("pull", "org/tiny", "--hub", hub.url, code=3)
    assert "unfinished" in place("list").stdout
    failed = place("show", "org/tiny", code=3)
    assert "slipstream pull org/tiny fetches it" in failed.stderr
    place("rm", "org/tiny", "-y")
    assert "no models yet" in place("list").stdout


def test_rm_asks_in_a_terminal_and_takes_no_for_an_answer(place, hub):
    place("pull", "org/tiny", "--hub", hub.url)
    for answer, code in ((b"\n", 1), (b"y\n", 0)):
        ours, theirs = pty.openpty()
        os.write(ours, answer)
        words = [sys.executable, "-m", "slipstream", "rm", "org/tiny"]
        done = subprocess.run(words, env=place.env, stdin=theirs, capture_output=True, check=False)
        assert done.returncode == code, done.stderr
        assert b"remove org/tiny (" in done.stderr
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("by", ["name", "path", "other"])
def test_rm_tells_which_server_has_the_model_by_its_name_or_its_path(
    tmp_path, monkeypatch, capsys, by
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = SimpleNamespace(name="org/tiny", path=tmp_path / "tiny", num_bytes=10**6)
    monkeypatch.setattr("slipstream.hub.listing.find_models", lambda *_: [model])
    served = {"name": "org/tiny", "path": str(model.path), "other": "org/other"}[by]
    register(os.getpid(), url="u", models=(served,), device="d", memory_bytes=1, now=1.0)
    assert main(["rm", "org/tiny"]) == 2  # nobody is asked without a terminal
    said = capsys.readouterr().err
    assert (f"(process {os.getpid()}) serves org/tiny" in said) == (by != "other")
    assert "add --yes" in said


def test_a_path_is_never_removed(place, tiny_model):
    assert "remove it yourself" in place("rm", str(tiny_model), "--yes", code=2).stderr
    assert (tiny_model / "config.json").is_file()


def test_names_are_listed_with_size_use_and_licence(place):
    names = json.loads(place("list", "--all", "--json").stdout)["names"]
    assert {"qwen3:0.6b", "smollm2", "bge-small"} <= {row["name"] for row in names}
    text = place("list", "--all").stdout
    assert "639 MB" in text
    assert "Apache-2.0" in text


@pytest.mark.parametrize(
    "words", [("list",), ("ps",), ("run", "nosuch", "hi"), ("serve", "qwen3:99b"), ("rm", "nosuch")]
)
def test_quick_answers_import_nothing_heavy(place, words):
    code = (
        "import sys; from slipstream.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=place.env,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = done.stdout.split()
    assert [name for name in HEAVY if name in loaded] == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", "qwen3:99b", "hi"), "'qwen3' has no tag '99b' here, but 0.6b"),
        (("chat", "smolm2"), "did you mean smollm2?"),
        (("serve", "./nothing"), "neither a path that exists"),
        (("bench", "latency", "nothing"), "neither a path that exists"),
        (("show", "minilm"), "slipstream pull minilm fetches it"),
    ],
)
def test_wrong_names_are_answered(place, words, told):
    assert told in place(*words, code=3).stderr


@pytest.mark.parametrize(
    ("verb", "told"),
    [
        ("create", "slipstream compress"),
        ("cp", "--served-model-name"),
        ("push", "hf upload"),
        ("stop", "slipstream ps"),
        ("signin", "hf auth login"),
        ("ls", "slipstream list"),
    ],
)
def test_words_of_ollama_are_answered_with_what_to_do_instead(place, verb, told):
    error = place(verb, "x", code=2).stderr
    assert f"there is no verb '{verb}'; instead: " in error
    assert told in error


def test_run_with_only_a_model_reads_the_prompt_from_a_pipe(place, tiny_model):
    words = ("--max-tokens=3", "--temperature=0", "--device=cpu", "--dtype=float32")
    piped = place("run", str(tiny_model), *words, text="hello\n").stdout
    assert piped == place("run", str(tiny_model), "hello\n", *words).stdout
    assert "there is no prompt" in place("run", str(tiny_model), code=2).stderr


def test_running_server_is_shown_until_it_ends(place, tiny_model):
    words = ["serve", str(tiny_model), "--port=0", "--device=cpu", "--dtype=float32", "--json"]
    server = subprocess.Popen(
        [sys.executable, "-m", "slipstream", *words, "--served-model-name", "tiny"],
        env=place.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        url = json.loads(server.stdout.readline())["url"]
        (shown,) = json.loads(place("ps", "--json").stdout)["servers"]
        assert (shown["pid"], shown["models"]) == (server.pid, ["tiny"])
        assert shown["url"] + "/v1" == url
        assert "tiny" in place("ps").stdout
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(PATIENCE_S)
    assert "no server runs" in place("ps").stdout
    assert not list((Path(place.env["XDG_CACHE_HOME"]) / "slipstream" / "running").iterdir())


def test_a_server_that_was_killed_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sleeper = subprocess.Popen(["sleep", "100"])
    of = {"url": "u", "models": ("m",), "device": "d", "memory_bytes": 1, "now": time.time()}
    register(sleeper.pid, **of)
    register(os.getpid(), **of)
    assert len(running_servers()) == 2
    sleeper.kill()
    sleeper.wait()
    assert [server.pid for server in running_servers()] == [os.getpid()]
    path = tmp_path / "slipstream" / "running" / f"{os.getpid()}.json"
    other = json.loads(path.read_text()) | {"began": "1"}  # another process has the number now
    path.write_text(json.dumps(other))
    assert running_servers() == []
    assert began(os.getpid()) is not None


def test_times_are_told_in_the_largest_unit():
    now = time.time()
    assert [ago(now - s) for s in (1, 61, 7300, 90_000)] == [
        "just now",
        "1 minute ago",
        "2 hours ago",
        "1 day ago",
    ]
    assert ago(None) == "-"
