"""Lines of batches under which a process dies: the guilty one gets an error, the others their answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys

import openai
import pytest

from slipstream.errors import EngineDeadError
from slipstream.server.batches import runner as batch_runner
from slipstream.server.batches.runner import Journal
from tests.server.batches.test_server_batches import CHAT, answers, begin, ended
from tests.server.fake_engine import FakeEngine
from tests.support.poison import WORD, python_path
from tests.support.waiting import PATIENCE_S, wait_for

COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(batch_runner, "LOOK_S", 0.05)
    monkeypatch.setattr(batch_runner, "POLL_S", 0.01)


def lines(count, bad, url=COMPLETIONS, **body):
    def line(i):
        text = f"{WORD} {i}" if i in bad else f"hello {i}"
        asked = (
            {"prompt": text}
            if url == COMPLETIONS
            else {"messages": [{"role": "user", "content": text}]}
        )
        return {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": url,
            "body": {"max_tokens": 3, **asked, **body},
        }

    return "".join(json.dumps(line(i)) + "\n" for i in range(count)).encode()


def check_ended(client, found, count, bad):
    assert found.status == "completed"
    assert (found.request_counts.completed, found.request_counts.failed) == (
        count - len(bad),
        len(bad),
    )
    told = {a["custom_id"] for a in answers(client, found.output_file_id)}
    assert told == {f"line-{i}" for i in range(count) if i not in bad}
    failed = answers(client, found.error_file_id)
    assert {a["custom_id"] for a in failed} == {f"line-{i}" for i in bad}
    for answer in failed:
        assert answer["response"] is None
        assert answer["error"]["code"] == "engine_error"
        assert "died 2 times" in answer["error"]["message"]


# --- The process that runs the batch ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "guilty"), [(1, (7,)), (2, (1, 7))])
def test_lines_that_kill_their_process_get_errors_and_the_others_answers(
    tiny_path, tmp_path, number, guilty
):
    """Some of ten, which kill it twice each at most, whatever runs beside them."""
    command = [sys.executable, "-m", "slipstream", "serve", str(tiny_path), "--port=0", "--json"]
    command += ["--device=cpu", "--dtype=float32", "--served-model-name=tiny"]
    command += ["--num-threads=1", "--max-model-len=256", "--kv-cache-bytes=64MiB"]
    command += [f"--files-dir={tmp_path / 'files'}", "--batch-max-concurrent=4"]
    environment = {**os.environ, "PYTHONPATH": python_path(tmp_path / "site")}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--api-servers={number}"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
    try:
        url = json.loads(process.stdout.readline())["url"]
        with openai.OpenAI(base_url=url, api_key="none", timeout=PATIENCE_S) as client:
            batch = begin(client, lines(10, guilty, model="tiny"), COMPLETIONS)
            found = wait_for(lambda: ended_again(client, batch), "the batch does not end")
            check_ended(client, found, 10, guilty)
        deaths = re.findall(r"signal 11", (tmp_path / "log").read_text())
        assert len(deaths) == 2 * len(guilty)
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        process.stdout.close()


def ended_again(client, batch):
    with contextlib.suppress(openai.APIError):
        found = client.batches.retrieve(batch.id)
        return found if found.status == "completed" else None
    return None


# --- The engine ---------------------------------------------------------------------------------------------------------


def test_lines_that_kill_the_engine_get_errors_and_the_others_answers(serve, tmp_path):
    engine = FakeEngine(delay_s=0.02)
    died = []
    submit = engine.submit

    async def mortal(prompt, sampling, sink, options):
        if WORD.encode() in bytes(prompt["prompt_token_ids"]):
            died.append(prompt)
            raise EngineDeadError("the engine process was killed by signal 11 (SIGSEGV)")
        return await submit(prompt, sampling, sink, options)

    engine.submit = mortal
    server = serve(engine, files_dir=str(tmp_path), batch_max_concurrent=4)
    client = server.client()
    found = ended(client, begin(client, lines(10, (1, 7), url=CHAT, model="fake")))
    check_ended(client, found, 10, (1, 7))
    assert len(died) == 4
    assert not [*(tmp_path / "content").glob("*.begun*")]


# --- The journal --------------------------------------------------------------------------------------------------------


def test_lines_under_way_at_the_end_of_a_process_are_suspects(tmp_path):
    path = tmp_path / "batch_1.begun"
    first = Journal(path, set())
    for name in ("answered", "put back", "under way", "ünder\nway"):
        first.begin(name)
    first.put_back("put back")
    second = Journal(path, {"answered"})
    assert second.deaths == {"under way": 1, "ünder\nway": 1}
    second.begin("under way")
    third = Journal(path, {"answered", "ünder\nway"})
    assert third.deaths == {"under way": 2}
    assert Journal(path, {"answered", "ünder\nway"}).deaths == third.deaths, "no death in between"


def test_journal_outlives_damage_and_stays_small(tmp_path, monkeypatch):
    path = tmp_path / "batch_1.begun"
    journal = Journal(path, set())
    journal.begin("a")
    path.write_bytes(path.read_bytes() + b'\xff\n+"b')
    assert Journal(path, set()).deaths == {"a": 1}
    monkeypatch.setattr(batch_runner, "MAX_JOURNAL_BYTES", 1000)
    journal = Journal(path, set())
    journal.begin("stays")
    for _ in range(1000):
        journal.begin("c")
        journal.put_back("c")
    assert path.stat().st_size < 2000
    assert Journal(path, set()).deaths == {"a": 1, "stays": 1}
