"""`AsyncLLM` over children that fail in every way: a scripted child stands for the engine process, without a model."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from slipstream import AsyncLLM, SamplingParams
from slipstream.config import EngineArgs
from slipstream.costs.memory import MemoryLedger
from slipstream.engine import async_llm
from slipstream.engine.process import core_operations, core_start
from slipstream.engine.process.child_link import ChildLink
from slipstream.engine.process.core_messages import (
    Abort,
    Add,
    AddTexts,
    GetStats,
    Outputs,
    Ready,
    Rejected,
    Stats,
)
from slipstream.engine.process.core_start import MAX_FAST_DEATHS
from slipstream.engine.process.streams import collect
from slipstream.errors import ConfigError, EngineDeadError, EngineError, EngineOverloadedError
from slipstream.hub import machine_folder
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.outputs import TokenOutput
from slipstream.messages.start import Failed
from slipstream.messages.stats import EngineStats
from slipstream.messages.texts import VectorOutput
from slipstream.worker.device import detect
from tests.support import tiny_models
from tests.support.waiting import PATIENCE_S

PROMPT = {"prompt_token_ids": [5, 9, 31]}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SETTINGS = dict(dtype="float32", device="cpu", max_num_seqs=4, max_model_len=64, num_threads=1)
SIZES = dict(
    total_bytes=1,
    allowed_bytes=1,
    weights_bytes=1,
    activation_bytes=1,
    graph_bytes=0,
    kv_bytes=1,
    other_bytes=0,
)
LEDGER = MemoryLedger(
    device="cpu", **SIZES, block_bytes=1, num_blocks=64, block_size=16, max_model_len=64
)
DEAD = EngineDeadError("the engine process was killed by signal 9")
OUT_OF_MEMORY = Failed("OutOfMemoryError", "no memory is left", None)
real_sleep = asyncio.sleep


class ScriptedChild:
    """Says what it is told to; an exception in its script is raised by `receive`. After its script it is silent."""

    def __init__(self, script):
        self.script: asyncio.Queue = asyncio.Queue()
        self.say(*script)
        self.sent: list = []
        self.ended = False

    def say(self, *messages):
        for message in messages:
            self.script.put_nowait(message)

    def death(self):
        return DEAD if self.ended else None

    def send(self, message):
        self.sent.append(message)
        return True

    async def receive(self):
        message = await self.script.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def end(self, *, at_once=False):
        self.ended, self.at_once = True, at_once


class World:
    """An engine whose children follow `scripts`, one each; beyond them no process can be started."""

    def __init__(self, path, monkeypatch):
        self.args = EngineArgs(model=str(path), skip_tokenizer_init=True, **SETTINGS)
        self.ready = Ready(detect("cpu", machine_folder(), num_threads=1), LEDGER, {})
        self.children: list[ScriptedChild] = []
        self.scripts: list[list] = []
        self.num_spawns = 0
        self.now = 1000.0
        self.pauses: list[float] = []
        monkeypatch.setattr(ChildLink, "start", self._start_child)
        for module in (async_llm, core_operations):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(async_llm.asyncio, "sleep", self._sleep)

    async def _start_child(self, args, *forks, **how):
        self.num_spawns += 1
        if not self.scripts:
            raise OSError("no more processes")
        self.children.append(ScriptedChild(self.scripts.pop(0)))
        return self.children[-1]

    async def _sleep(self, seconds):
        if (
            threading.current_thread() is not threading.main_thread()
        ):  # a server that other tests left running
            await real_sleep(seconds)
            return
        self.pauses.append(seconds)
        await real_sleep(0)

    async def start(self, *scripts):
        self.scripts = list(scripts)
        self.engine = await AsyncLLM.start(self.args)
        return self.engine

    async def until(self, condition):
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, "it never happened"
            await real_sleep(0)

    async def begin(self, **more):
        """A request that the child has been told of, and the task that collects its answer."""
        child, before = self.children[-1], len(self.children[-1].sent)
        task = asyncio.create_task(collect(self.engine.generate(PROMPT, GREEDY, **more)))
        await self.until(lambda: len(child.sent) > before)
        return task, child.sent[-1].requests[0].request_id

    async def stats(self, **numbers):
        """A heartbeat, taken."""
        child = self.children[-1]
        child.say(Stats(EngineStats(**numbers), asked=False))
        await self.taken()

    async def taken(self):
        await self.until(self.children[-1].script.empty)
        await real_sleep(0)


def output(key, *tokens, finish=None):
    return Outputs.of([TokenOutput(request_id=key, token_ids=tokens, finish_reason=finish)])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.write_with_tokenizer(folder, max_position_embeddings=64)
    return folder


@pytest.fixture
async def world(path, monkeypatch):
    world = World(path, monkeypatch)
    yield world
    await world.engine.shutdown()
    assert all(child.ended for child in world.children)
    assert (len(world.engine._sinks), len(world.engine._output), world.engine._stats_waiters) == (
        0,
        0,
        [],
    )


# --- Starting again -------------------------------------------------------------------------------------------------


async def test_failed_starts_are_tried_again_after_growing_pauses(world):
    engine = await world.start([world.ready, DEAD], [OUT_OF_MEMORY], [DEAD], [world.ready])
    await world.until(lambda: len(world.children) == 4 and engine.is_alive)
    assert (engine.num_restarts, world.pauses, engine.health().ok) == (3, [4.0, 8.0], True)
    task, key = await world.begin()
    world.children[-1].say(output(key, 7, finish=FinishReason.LENGTH))
    assert (await task).outputs[0].token_ids == [7]


async def test_after_too_many_failed_starts_it_stays_down(world, monkeypatch):
    monkeypatch.setattr(core_start, "MAX_RESTART_PAUSE_S", 5.0)
    engine = await world.start([world.ready, DEAD], *[[OUT_OF_MEMORY]] * 20)
    await world.until(engine._core.reader.done)
    assert (world.num_spawns, world.pauses) == (1 + MAX_FAST_DEATHS, [4.0, 5.0])
    assert engine.health().reason == "no memory is left (it stays down)"
    with pytest.raises(EngineDeadError, match="no memory is left"):
        await collect(engine.generate(PROMPT, GREEDY))
    with pytest.raises(EngineDeadError, match="no memory is left"):
        await engine.stats()


@pytest.mark.parametrize("kind", ["ConfigError", "UnsupportedModelError"])
async def test_a_wrong_setting_or_model_is_final_at_once(world, kind):
    engine = await world.start(
        [world.ready, DEAD], [Failed(kind, "it cannot work", "model")], [world.ready]
    )
    await world.until(engine._core.reader.done)
    assert (world.num_spawns, engine.health().reason) == (2, "it cannot work (it stays down)")


async def test_deaths_that_are_not_in_a_row_never_add_up(world):
    beat = Stats(EngineStats(), asked=False)
    await world.start(*[[world.ready, beat, DEAD]] * (2 * MAX_FAST_DEATHS), [world.ready])
    await world.until(lambda: world.num_spawns == 2 * MAX_FAST_DEATHS + 1 and world.engine.is_alive)
    assert world.pauses == []


# --- Shutting down --------------------------------------------------------------------------------------------------


async def test_shutdown_during_a_restart_ends_the_new_child(world):
    engine = await world.start([world.ready, DEAD], [])  # the second never becomes ready
    await world.until(lambda: len(world.children) == 2)
    await engine.shutdown()
    assert [child.at_once for child in world.children] == [
        False,
        True,
    ]  # who starts reads no messages: it isn't waited for
    assert engine._core.reader.done()


async def test_shutdown_during_a_pause_starts_nothing(world):
    engine = await world.start([world.ready, DEAD], [DEAD], [world.ready])
    await world.until(lambda: world.pauses)
    await engine.shutdown()
    assert world.num_spawns == 2
    assert engine._core.reader.done()


async def test_shutdown_at_once_and_shutdown_cancelled_end_the_child(world):
    engine = await world.start([world.ready])
    await engine.shutdown()  # the reader never ran
    assert world.children[0].ended
    engine = await world.start([world.ready])
    request, _ = await world.begin()
    task = asyncio.create_task(engine.shutdown(drain_s=1000.0))
    await world.until(lambda: world.pauses)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.children[1].ended
    with pytest.raises(EngineDeadError, match="shutting down"):
        await request


async def test_no_process_outlives_a_shutdown_during_its_start(path, monkeypatch):
    children, init = [], ChildLink.__init__
    monkeypatch.setattr(
        ChildLink, "__init__", lambda child, *forks: children.append(child) or init(child, *forks)
    )
    engine = await AsyncLLM.start(EngineArgs(model=str(path), skip_tokenizer_init=True, **SETTINGS))
    os.kill(children[0].process.pid, signal.SIGKILL)
    while len(children) < 2:
        await asyncio.sleep(0.01)
    await engine.shutdown()
    assert all(
        child.process.poll() is not None and not os.path.exists(child._folder.path)
        for child in children
    )


async def test_cancelling_the_end_of_a_hung_child_kills_it():
    folder = core_start.socket_folder()
    child = ChildLink(await core_start.start_process(f"{folder.path}/engine"), folder)
    os.kill(child.process.pid, signal.SIGSTOP)
    assert not child.send(Abort(["x"]))  # it has not connected: told at once, not waited for
    task = asyncio.create_task(child.end())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not os.path.exists(child._folder.path)
    assert await asyncio.to_thread(child.process.wait, 60) == -signal.SIGKILL


# --- What nobody foresaw --------------------------------------------------------------------------------------------


async def test_an_unforeseen_error_fails_the_requests_and_is_logged(world, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("slipstream"), "propagate", True)
    engine = await world.start([world.ready], [world.ready])
    request, _ = await world.begin()
    stats = asyncio.create_task(engine.stats())
    await real_sleep(0)
    world.children[0].say(msgspec.DecodeError("truncated"))
    for task in (request, stats):
        with pytest.raises(EngineDeadError, match="DecodeError: truncated"):
            await task
    assert world.children[0].ended
    assert engine.num_requests == 0
    (record,) = [r for r in caplog.records if r.name == "slipstream.engine"]
    assert record.exc_info[0] is msgspec.DecodeError
    await world.until(lambda: engine.is_alive)


async def test_a_fault_of_the_detokeniser_fails_the_requests(world, monkeypatch):
    engine = await world.start([world.ready], [world.ready])
    monkeypatch.setattr(engine._output, "process", lambda outputs: {}["no such token"])
    task, key = await world.begin()
    world.children[0].say(output(key, 7))
    with pytest.raises(EngineDeadError, match="KeyError"):
        await task


async def test_when_no_process_can_be_started_it_stays_down(world):
    engine = await world.start([world.ready, DEAD])
    await world.until(engine._core.reader.done)
    assert engine._core.reader.exception() is None
    assert engine.health().reason == "unexpected OSError: no more processes (it stays down)"


# --- Health ---------------------------------------------------------------------------------------------------------


async def test_only_steps_are_progress(world):
    engine = await world.start([world.ready])
    task, _ = await world.begin()
    for i in range(100):  # a long prompt: steps without tokens
        world.now += 1
        await world.stats(num_running=1, num_steps=i + 1)
        assert engine.health().ok
    for _ in range(100):  # a scheduler that is stuck: it still answers, and frees what is cancelled
        world.now += 1
        await world.stats(num_running=1, num_steps=100)
        world.children[0].say(Stats(EngineStats(num_running=1, num_steps=100), asked=True))
        world.children[0].say(output("another", finish=FinishReason.ABORT))
        await world.taken()
    assert engine.health().reason == "requests wait and the engine made no step for 100 s"
    await world.stats(num_running=1, num_steps=101)
    assert engine.health().ok
    task.cancel()


async def test_an_idle_engine_is_healthy_while_its_heart_beats(world):
    engine = await world.start([world.ready])
    for _ in range(100):
        world.now += 1
        await world.stats(num_steps=5, last_step_age_s=9000.0)
        assert engine.health().ok
    world.now += core_operations.STALL_S + 1
    assert engine.health().reason == "the engine process has said nothing for 61 s"
    await world.stats(num_steps=5)
    assert engine.health().ok


async def test_a_request_that_the_child_does_not_know_is_no_health(world):
    engine = await world.start([world.ready])
    task, _ = await world.begin()
    for _ in range(100):
        world.now += 1
        await world.stats()
    assert not engine.health().ok
    task.cancel()


async def test_heartbeats_do_not_answer_a_question(world):
    engine = await world.start([world.ready])
    task = asyncio.create_task(engine.stats())
    await world.until(lambda: world.children[0].sent[-1:] == [GetStats()])
    await world.stats(num_steps=1)
    world.children[0].say(Stats(EngineStats(num_steps=2), asked=True))
    assert (await task).num_steps == 2


# --- Consumers that leave -------------------------------------------------------------------------------------------


async def test_a_cancelled_request_is_aborted_though_cancelled_again(world):
    await world.start([world.ready])
    task, key = await world.begin()
    task.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.children[0].sent[-1] == Abort([key])


async def test_a_request_that_cannot_be_sent_leaves_nothing(world):
    engine = await world.start([world.ready])

    def refuse(message):
        if isinstance(message, Add):
            raise OverflowError("Integer value out of range")

    world.children[0].send = refuse
    with pytest.raises(OverflowError):
        await collect(engine.generate(PROMPT, GREEDY))
    assert engine.num_requests == len(engine._output) == 0


async def test_callers_that_give_up_on_a_hung_engine_do_not_pile_up(world):
    engine = await world.start([world.ready])
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.stats(), 0)
        task = asyncio.create_task(engine.stats())
        await real_sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert engine._stats_waiters == []


async def test_a_finished_stream_closed_late_does_not_cancel_its_namesake(world):
    engine = await world.start([world.ready], [world.ready])
    old = engine.generate(PROMPT, GREEDY, request_id="mine")
    asking = asyncio.create_task(anext(old))
    await real_sleep(0)
    world.children[0].say(
        output(world.children[0].sent[-1].requests[0].request_id, 7, finish=FinishReason.LENGTH)
    )
    assert (await asking).finished
    task, key = await world.begin(request_id="mine")
    await old.aclose()
    assert engine.num_requests == 1
    world.children[0].say(output(key, 8, finish=FinishReason.LENGTH))
    assert (await task).outputs[0].token_ids == [8]


async def test_late_news_of_a_cancelled_request_do_not_reach_its_namesake(world):
    await world.start([world.ready])
    task, key = await world.begin(request_id="mine")
    task.cancel()
    await asyncio.wait([task])
    again, new_key = await world.begin(request_id="mine")
    world.children[0].say(output(key, 1, 2, 3), output(key, finish=FinishReason.ABORT))
    world.children[0].say(Rejected([key], "EngineOverloadedError", "the queue is full", None))
    world.children[0].say(output(new_key, 8, finish=FinishReason.LENGTH))
    assert (await again).outputs[0].token_ids == [8]


async def test_a_rejection_reaches_its_request(world):
    await world.start([world.ready])
    task, key = await world.begin(request_id="mine")
    world.children[0].say(Rejected([key], "EngineOverloadedError", "the queue is full", None))
    with pytest.raises(EngineOverloadedError):
        await task


# --- Texts --------------------------------------------------------------------------------------------------------------


async def embedding(world, count=3):
    """A call for embeddings that the child has been told of, and its request."""
    child, before = world.children[-1], len(world.children[-1].sent)
    task = asyncio.create_task(world.engine.embed([PROMPT] * count))
    await world.until(lambda: len(child.sent) > before or task.done())
    message = child.sent[-1]
    assert isinstance(message, AddTexts)
    return task, message.request.request_id


def some(key, first, count, finish=None, **more):
    vectors = b"".join(bytes([i]) * 8 for i in range(first, first + count))
    return VectorOutput(key, vectors, first, count, finish, **more)


async def test_vectors_of_several_steps_are_one_answer(world):
    engine = await world.start([world.ready])
    task, key = await embedding(world)
    other, _ = await embedding(world)
    assert engine.num_requests == 2
    first, last = [some("nobody's", 0, 1), some(key, 2, 1)], [some(key, 0, 2, FinishReason.STOP)]
    world.children[0].say(Outputs.of(first), Outputs.of(last))
    found = await task
    assert (found.data, found.prompt_token_ids) == (
        bytes([0] * 8 + [1] * 8 + [2] * 8),
        [[5, 9, 31]] * 3,
    )
    assert engine.num_requests == 1
    assert not any(isinstance(m, Abort) for m in world.children[0].sent)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    assert world.children[0].sent[-1] == Abort([str(int(key) + 1)])
    assert engine.num_requests == 0
    assert (await engine.embed([])).prompts == []


async def test_texts_are_told_of_rejections_ends_and_deaths(world):
    await world.start([world.ready], [world.ready])
    child = world.children[0]
    task, key = await embedding(world)
    child.say(Rejected([key], "EngineOverloadedError", "the queue is full", None))
    with pytest.raises(EngineOverloadedError, match="full"):
        await task
    for reason, match in ((FinishReason.ERROR, "so it is"), (FinishReason.ABORT, "abort")):
        task, key = await embedding(world)
        child.say(
            Outputs.of(
                [
                    VectorOutput(
                        key, finish_reason=reason, error="so it is" if reason == "error" else None
                    )
                ]
            )
        )
        with pytest.raises(EngineError, match=match):
            await task
    task, key = await embedding(world)
    child.say(DEAD)
    with pytest.raises(EngineDeadError):
        await task
    assert world.engine.num_requests == 0


async def test_a_temporary_folder_with_a_long_path_is_refused_before_a_process_starts(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(core_start.tempfile, "gettempdir", lambda: str(tmp_path / ("x" * 90)))
    monkeypatch.setattr(
        core_start.subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started")
    )
    with pytest.raises(ConfigError, match="TMPDIR"):
        await ChildLink.start(EngineArgs(model="m"))
