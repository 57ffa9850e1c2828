"""`slipstream serve` of several tiny models as a process: engines are killed, memory holds two of three, settings differ."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from slipstream.cli.main import main
from tests.support.waiting import PATIENCE_S

CACHE = 2**21
SHORT = {"prompt": "one two", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def served(tmp_path, *words):
    """(its banner, its URL, a function that gives its engines' processes)"""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "slipstream", "serve", *map(str, words), "--port=0", "--json"]
    command += ["--device=cpu", "--num-threads=1", "--dtype=float32", f"--kv-cache-bytes={CACHE}"]
    with (
        open(tmp_path / "log", "wb") as log,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        try:
            assert process.stdout is not None
            banner = json.loads(process.stdout.readline() or b"{}")
            assert "url" in banner, (tmp_path / "log").read_text()

            def engines():
                """The process that forks them, and they."""
                with contextlib.suppress(psutil.NoSuchProcess):
                    below = psutil.Process(process.pid).children(recursive=True)
                    there = [p for p in below if "core_process" in " ".join(p.cmdline())]
                    return sorted(there, key=lambda p: p.pid)
                return []

            yield banner, banner["url"].removesuffix("/v1"), engines, env
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()


@pytest.fixture(scope="module")
def folder(tiny_path, tiny_encoder, tmp_path_factory):
    """A folder of three models."""
    home = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        shutil.copytree(tiny_path, home / name)
    shutil.copytree(tiny_encoder, home / "vectors")
    return home


def test_three_models_in_memory_for_two_survive_kills(folder, tmp_path):
    settings = tmp_path / "settings.yaml"
    settings.write_text("two: {max_model_len: 128, keep_alive: 1h}\nvectors:\n")
    words = [folder, "--model-settings", settings, "--models-memory=190MiB", "--keep-alive=-1"]
    with (
        served(tmp_path, *words) as (banner, url, engines, env),
        httpx.Client(base_url=url, timeout=PATIENCE_S) as http,
    ):
        assert [m["name"] for m in banner["models"]] == ["one", "two", "vectors"]
        limits = {m["id"]: m["max_model_len"] for m in http.get("/v1/models").json()["data"]}
        assert limits["two"] == 128 < limits["one"]

        def ask(name):
            if name == "vectors":
                return http.post("/v1/embeddings", json={"model": name, "input": "one"})
            return http.post("/v1/completions", json=SHORT | {"model": name})

        first = {name: ask(name) for name in ("one", "two", "vectors")}
        assert all(a.status_code == 200 for a in first.values()), [a.text for a in first.values()]
        assert all("x-slipstream-model-load-ms" in a.headers for a in first.values())
        assert ask("one").json()["choices"] == first["one"].json()["choices"]

        def one(number):
            if number % 10 == 5:
                with contextlib.suppress(psutil.NoSuchProcess):
                    engines()[-1 if number == 5 else 0].kill()
            answer = ask(random.Random(number).choice(["one", "two", "vectors"]))
            return "" if answer.status_code == 200 else answer.text

        with ThreadPoolExecutor(6) as pool:
            lost = [text for text in pool.map(one, range(20)) if text]
        assert lost == []
        loads = [
            line for line in http.get("/metrics").text.splitlines() if "model_loads_total{" in line
        ]
        assert sum(float(line.split()[-1]) for line in loads) > 4, "they did not all fit"
        assert ask("one").json()["choices"] == first["one"].json()["choices"]
        listed = subprocess.run(
            [sys.executable, "-m", "slipstream", "ps"], env=env, capture_output=True, check=True
        )
        assert b"one (" in listed.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{one}", "{two}", "--detect"], "--detect"),
        (["{one}", "{two}", "--grpc-port=0"], "gRPC"),
        (["{one}", "{two}", "--api-servers=2"], "leave --api-servers out"),
        (["{one}", "{two}", "--served-model-name=x"], "NAME=MODEL"),
        (["{one}", "{two}", "--enable-lora"], "adapters"),
        (["{one}", "--keep-alive=soon"], "give seconds or a duration such as 5m"),
        (["{one}", "--models-wait=0"], "above 0"),
        (["{one}", "--models-memory=1KiB"], "more than the 0 MiB of --models-memory"),
        (["x={one}", "x={two}"], "two models are called 'x'"),
        (["{one}", "{one}"], "two models are called 'one'"),
        (["{one}", "--model-settings={bad}"], "no model is called 'onee'; did you mean 'one'?"),
        (["{one}", "--model-settings={wrong}"], "of the model one"),
        (["{one}", "--model-settings={events}"], "one: kv_events_config does not go with several"),
        (["{one}", "--model-settings=/nowhere"], "cannot read --model-settings"),
        (["{one}", "{one}/nope"], "nope"),
    ],
)
def test_a_wrong_option_is_told_before_anything_starts(
    words, told, folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        "slipstream.frontend.many.serve_many", lambda *_, **__: pytest.fail("it serves")
    )
    (tmp_path / "bad").write_text("onee: {}")
    (tmp_path / "wrong").write_text("one: {max_model_len: 1000000}")
    (tmp_path / "events").write_text("one: {kv_events_config: {enable_kv_cache_events: true}}")
    places = {name: str(folder / name) for name in ("one", "two")}
    places |= {name: str(tmp_path / name) for name in ("bad", "wrong", "events")}
    words = [word.format(**places) for word in words]
    assert main(["serve", *words, "--device=cpu", "--port=0"]) in (2, 3)
    assert told in capsys.readouterr().err
