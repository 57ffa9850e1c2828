"""A server whose model is split over two processes: it answers as from one, and comes back when one is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import openai
import pytest

from slipstream.config import EngineArgs
from tests.server.conftest import serving
from tests.support import forked_ranks
from tests.support.waiting import PATIENCE_S

ASK = dict(
    model="tiny",
    prompt="in the hour",
    temperature=0,
    max_tokens=12,
    logprobs=1,
    extra_body={"ignore_eos": True},
)


def ranks_of(server):
    """The process ids of the engine's ranks."""
    pid = server.parent.pid
    return sorted(
        int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    )


@pytest.fixture(scope="module")
def split(tiny_path, tiny_server):
    """All its ranks, also those that it starts again, are forks of one process (`forked_ranks`). `tiny_server` is there
    before, so its engine has nothing to do with them."""
    from slipstream.engine.async_llm import AsyncLLM

    args = EngineArgs(
        model=str(tiny_path),
        dtype="float32",
        device="cpu",
        max_model_len=1024,
        max_num_batched_tokens=64,
        kv_cache_bytes=64 * 2**20,
        tensor_parallel_size=2,
    )
    with (
        forked_ranks.used() as forks,
        serving(start=lambda: AsyncLLM.start(args), served_model_names=("tiny",)) as server,
    ):
        server.parent = forks._process
        yield server


def test_it_answers_as_one_process(split, tiny_server):
    with split.client() as ours, tiny_server.client() as theirs:
        found = ours.completions.create(**ASK).choices[0]
        wanted = theirs.completions.create(**{**ASK, "model": "smollm2"}).choices[0]
        streamed = "".join(
            c.choices[0].text for c in ours.completions.create(**ASK, stream=True) if c.choices
        )
    assert found.text == wanted.text == streamed
    assert found.logprobs.token_logprobs == pytest.approx(wanted.logprobs.token_logprobs, abs=1e-3)


def test_health_tells_of_a_rank_that_is_stopped(split):
    pid = split.engine._processes[2]
    assert pid in ranks_of(split)
    with split.http() as http:
        assert http.get("/health").status_code == 200
        os.kill(pid, signal.SIGSTOP)
        try:
            split.wait_for(lambda: http.get("/health").status_code == 503, "nobody saw it")
            assert (
                f"the engine's rank 1 is stopped, and goes on with SIGCONT (process {pid})"
                in http.get("/ready").text
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        split.wait_for(lambda: http.get("/health").status_code == 200, "it does not go on")


def test_a_killed_rank_fails_requests_with_its_reason_and_the_engine_starts_again(split):
    before = ranks_of(split)
    assert len(before) == 2
    with split.client(max_retries=0) as client:
        wanted = client.completions.create(**ASK).choices[0].text
        long = {**ASK, "max_tokens": 900, "n": 64}  # it is killed in its midst
        stream = client.completions.create(**long, stream=True)
        next(stream)
        os.kill(before[1], signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(openai.APIError, match="was killed by signal 9"):
            for _ in stream:
                pass
        assert time.monotonic() - begin < PATIENCE_S / 2
        split.wait_for(lambda: split.engine.is_alive, "the engine did not start again")
        assert client.completions.create(**ASK).choices[0].text == wanted
    assert not set(before) & set(ranks_of(split))
    split.wait_for(
        lambda: not [pid for pid in before if Path(f"/proc/{pid}").exists()],
        "a rank outlives its engine",
    )


def test_a_rank_that_dies_while_nothing_is_asked_is_seen(split):
    before = ranks_of(split)
    starts = split.engine._core.num_restarts
    os.kill(before[0], signal.SIGKILL)
    split.wait_for(lambda: split.engine._core.num_restarts > starts, "nobody saw it")
    split.wait_for(lambda: split.engine.is_alive, "the engine did not start again")
    with split.client() as client:
        assert client.completions.create(**ASK).choices[0].text
