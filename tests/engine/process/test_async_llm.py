"""`AsyncLLM`: the engine in its own process, its deltas, cancellations, and what happens when it dies."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time

import pytest
import pytest_asyncio

from slipstream import LLM, AsyncLLM, RequestOptions, SamplingParams
from slipstream.config import EngineArgs
from slipstream.engine.process.streams import collect
from slipstream.errors import (
    ConfigError,
    EngineDownError,
    EngineKilledError,
    EngineOverloadedError,
    RequestError,
)
from slipstream.params.options import DEFAULT_OPTIONS
from tests.support import tiny_models
from tests.support.waiting import PATIENCE_S, wait_for

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPT = {"prompt_token_ids": [5, 9, 200, 31, 7]}
LONG = SamplingParams(
    temperature=0, max_tokens=16_000, ignore_eos=True
)  # longer than until it is cancelled, or killed
SETTINGS = dict(
    dtype="float32", device="cpu", max_num_seqs=4, max_model_len=16_384, num_threads=1, max_queue=8
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.write_with_tokenizer(folder, max_position_embeddings=16_384)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(path):
    engine = await AsyncLLM.start(EngineArgs(model=str(path), **SETTINGS))
    yield engine
    await engine.shutdown()


async def settled(engine):
    """Stats once nothing runs (an abort is on its way)."""
    end = time.monotonic() + PATIENCE_S
    while True:
        stats = await engine.stats()
        if stats.num_running == stats.num_waiting == 0:
            return stats
        assert time.monotonic() < end, f"requests are left: {stats}"
        await asyncio.sleep(0.01)


async def test_the_stream_collected_is_the_offline_answer(engine, path):
    whole = await collect(engine.generate("Hello there", GREEDY))
    with LLM(str(path), **SETTINGS) as llm:
        (expected,) = llm.generate("Hello there", GREEDY)
    assert whole.outputs[0].token_ids == expected.outputs[0].token_ids
    assert whole.outputs[0].text == expected.outputs[0].text
    assert whole.times.arrival <= whole.times.first_token <= whole.times.last_token


async def test_many_at_once_and_a_slow_reader(engine):
    async def slow():
        tokens = []
        async for delta in engine.generate(PROMPT, GREEDY):
            await asyncio.sleep(0.01)
            tokens += delta.outputs[0].token_ids
        return tokens

    answers = await asyncio.gather(
        slow(), *(collect(engine.generate(PROMPT, GREEDY)) for _ in range(6))
    )
    assert all(a.outputs[0].token_ids == answers[0] for a in answers[1:])
    stats = await settled(engine)
    assert stats.num_free_blocks == stats.num_blocks


async def test_leaving_the_stream_frees_the_request(engine):
    stream = engine.generate(PROMPT, LONG)
    await anext(stream)
    await stream.aclose()
    stats = await settled(engine)
    assert stats.num_free_blocks == stats.num_blocks
    assert engine.num_requests == 0


async def test_cancelling_the_task_frees_the_request(engine):
    task = asyncio.create_task(collect(engine.generate(PROMPT, LONG)))
    while engine.num_requests == 0:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await settled(engine)).num_running == 0


async def test_a_request_aborted_by_its_id_ends_its_stream(engine):
    stream = engine.generate(PROMPT, dataclasses.replace(LONG, n=2), request_id="mine")
    first = await anext(stream)
    await engine.abort("mine")
    await engine.abort("unknown")
    rest = await collect(stream)
    assert [choice.finish_reason for choice in rest.outputs] == ["abort", "abort"]
    assert first.request_id == "mine"
    assert (await settled(engine)).num_running == engine.num_requests == 0


@pytest.mark.parametrize("n", [1, 2])
async def test_cancelling_at_any_turn_of_the_loop_leaves_nothing(engine, n):
    sampling = dataclasses.replace(LONG, n=n)
    for turns in (*range(12), 50, 200):
        task = asyncio.create_task(collect(engine.generate(PROMPT, sampling)))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert (engine.num_requests, len(engine._output)) == (0, 0)
    stats = await settled(engine)
    assert stats.num_free_blocks == stats.num_blocks


async def test_an_idle_engine_sends_heartbeats(engine):
    await settled(engine)
    heard = engine._last_heard
    end = time.monotonic() + PATIENCE_S
    while engine._last_heard <= heard and time.monotonic() < end:
        await asyncio.sleep(0.01)
    assert engine._last_heard > heard


async def test_a_deadline_ends_a_request(engine):
    answer = await collect(engine.generate(PROMPT, LONG, deadline_s=0.1))
    assert answer.outputs[0].finish_reason == "deadline"
    assert (await settled(engine)).num_running == 0


async def test_a_full_queue_refuses(engine):
    streams = [engine.generate(PROMPT, LONG) for _ in range(24)]
    tasks = [asyncio.create_task(anext(s)) for s in streams]
    done, pending = await asyncio.wait(
        tasks, return_when=asyncio.FIRST_EXCEPTION, timeout=PATIENCE_S
    )
    assert any(isinstance(t.exception(), EngineOverloadedError) for t in done)
    for task in pending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for stream in streams:
        await stream.aclose()
    await settled(engine)


async def test_a_bad_request_is_refused(engine):
    with pytest.raises(RequestError) as caught:
        await collect(engine.generate({"prompt_token_ids": [-1]}, GREEDY))
    assert caught.value.field == "prompt_token_ids"


async def test_health_tells_of_a_process_that_is_stopped(engine):
    pid = engine._core.link.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: not engine.health().ok, "nobody saw it")
        assert (
            engine.health().reason
            == f"the engine process is stopped, and goes on with SIGCONT (process {pid})"
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: engine.health().ok, "it does not go on")


async def test_death_is_told_at_once_and_the_engine_comes_back(engine):
    before = await collect(engine.generate(PROMPT, GREEDY))
    stream = engine.generate(PROMPT, LONG)
    await anext(stream)
    os.kill(engine._core.link.process.pid, signal.SIGKILL)
    with pytest.raises(EngineKilledError, match="signal 9"):
        async for _ in stream:
            pass
    end = time.monotonic() + PATIENCE_S
    while not engine.is_alive:
        assert not engine.health().ok
        with pytest.raises(EngineDownError):
            await collect(engine.generate(PROMPT, GREEDY))
        assert time.monotonic() < end, "it does not come back"
        await asyncio.sleep(0.05)
    after = await collect(engine.generate(PROMPT, GREEDY))
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert engine.num_restarts == 1


async def test_the_childs_config_error_is_raised_here(path):
    with pytest.raises(ConfigError) as caught:
        await AsyncLLM.start(EngineArgs(model=str(path), **{**SETTINGS, "block_size": 0}))
    assert caught.value.field == "block_size"


async def test_options_are_one_object_or_its_fields_by_name(engine):
    options = RequestOptions(request_id="mine", deadline_s=60.0)
    for given, named in ((options, {}), (DEFAULT_OPTIONS, {"request_id": "mine"})):
        answer = await collect(engine.generate(PROMPT, GREEDY, given, **named))
        assert answer.request_id == "mine"
    with pytest.raises(TypeError, match="no argument 'prioritty'; did you mean 'priority'"):
        await collect(engine.generate(PROMPT, GREEDY, prioritty=1))
    with pytest.raises(RequestError, match="deadline_s must be above 0"):
        await collect(engine.generate(PROMPT, GREEDY, options, deadline_s=0))
    assert engine.num_requests == 0
