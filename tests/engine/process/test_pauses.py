"""Pauses and updates of the weights while streams run, in the engine's own process."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import pytest_asyncio
from safetensors.torch import load_file

from slipstream import LLM, AsyncLLM, SamplingParams
from slipstream.config import EngineArgs
from slipstream.engine.process.streams import collect
from slipstream.errors import CheckpointError, EngineError, RequestError
from tests.support import tiny_models

SETTINGS = dict(dtype="float32", device="cpu", max_num_seqs=4, max_model_len=2048, num_threads=1)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = {"prompt_token_ids": [(7 * i) % 250 + 5 for i in range(70)]}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("two")
    for seed, name in enumerate(("old", "new")):
        tiny_models.write_with_tokenizer(parent / name, seed=seed, max_position_embeddings=2048)
    return parent / "old", parent / "new"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folders):
    engine = await AsyncLLM.start(EngineArgs(model=str(folders[0]), **SETTINGS))
    yield engine
    await engine.shutdown()


class Stream:
    """A long request whose tokens are counted as they come."""

    def __init__(self, engine, prompt=PROMPT, sampling=LONG):
        self.tokens, self.runs, self.reason = [], [], None
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(engine.generate(prompt, sampling)))

    async def _read(self, deltas):
        async for delta in deltas:
            (own,) = delta.outputs
            self.tokens += own.token_ids
            self.runs += own.token_weight_versions
            self.reason = own.finish_reason
            if len(self.tokens) > 3:
                self.begun.set()
        self.begun.set()


async def set_weights(engine, folder, *, finish=True):
    tensors = load_file(folder / "model.safetensors")
    names = list(tensors)
    await engine.start_weight_update()
    for some in (names[::2], names[1::2]):
        await engine.update_weights({"update_info": {"tensors": {n: tensors[n] for n in some}}})
    return await engine.finish_weight_update() if finish else None


def answer_of(folder, prompt, sampling):
    with LLM(str(folder), **SETTINGS) as llm:
        return llm.generate(prompt, sampling, progress=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("mode", ["keep", "retract"])
async def test_streams_wait_for_new_weights_and_go_on(engine, folders, mode):
    """Each token says which weights made it, and no cached prefix of the old ones is found."""
    old, new = folders
    before = (await engine.weights()).weight_version
    stream = Stream(engine)
    await stream.begun.wait()
    assert (await engine.pause_generation(mode=mode)).is_paused
    await asyncio.sleep(0.05)
    done = len(stream.tokens)
    queued = asyncio.create_task(collect(engine.generate(PROMPT, SHORT)))
    info = await set_weights(engine, new)
    assert info.is_paused
    assert len(stream.tokens) == done  # no step was made
    assert not queued.done()
    assert not (await engine.resume_generation()).is_paused
    other = await queued
    assert other.outputs[0].token_ids == answer_of(new, PROMPT, SHORT)
    if mode == "keep":  # else the stream's prompt was computed again before
        assert other.num_cached_tokens == 0
    assert other.outputs[0].weight_versions == [(info.weight_version, 6)]
    await stream.task
    assert (len(stream.tokens), stream.reason) == (1500, "length")
    assert stream.runs == [before] * done + [info.weight_version] * (1500 - done)
    if mode == "retract":  # what follows is what the new weights say after those tokens
        begun = {"prompt_token_ids": PROMPT["prompt_token_ids"] + stream.tokens[:done]}
        assert answer_of(new, begun, SHORT) == stream.tokens[done : done + 6]
    again = await collect(engine.generate(PROMPT, SHORT))
    assert again.outputs[0].token_ids == other.outputs[0].token_ids
    assert again.num_cached_tokens > 0  # of the new weights
    await set_weights(engine, old)


async def test_weights_change_between_two_steps_without_a_pause(engine, folders):
    old, new = folders
    streams = [Stream(engine) for _ in range(3)]
    for stream in streams:
        await stream.begun.wait()
    versions = [(await engine.weights()).weight_version]
    for folder in (new, old, new):
        versions.append((await set_weights(engine, folder)).weight_version)
    for stream in streams:
        await stream.task
        assert len(stream.tokens) == len(stream.runs) == 1500
        assert set(stream.runs) <= set(versions)
        assert stream.runs == sorted(stream.runs, key=versions.index)  # never back
    await set_weights(engine, old)


async def test_wait_lets_requests_end_and_queues_new_ones(engine, folders):
    old, new = folders
    stream = Stream(engine)
    await stream.begun.wait()
    pausing = asyncio.create_task(engine.pause_generation(mode="wait"))
    await asyncio.sleep(0)
    queued = [asyncio.create_task(collect(engine.generate(PROMPT, SHORT))) for _ in range(2)]
    assert (await pausing).is_paused
    await stream.task
    assert (len(stream.tokens), len(set(stream.runs))) == (1500, 1)
    assert not any(task.done() for task in queued)
    queued[1].cancel()  # a client that goes leaves nothing behind
    info = await set_weights(engine, new)
    await engine.resume_generation()
    assert (await queued[0]).outputs[0].weight_versions == [(info.weight_version, 6)]
    assert (await engine.stats()).num_waiting == 0
    await set_weights(engine, old)


async def test_abort_ends_requests_and_says_so(engine):
    stream = Stream(engine)
    await stream.begun.wait()
    assert (await engine.pause_generation(mode="abort", clear_cache=True)).is_paused
    await stream.task
    assert stream.reason == "abort"
    assert 3 < len(stream.tokens) < 1500
    assert await engine.is_paused()
    await engine.resume_generation()
    assert (await collect(engine.generate(PROMPT, SHORT))).num_cached_tokens == 0


async def test_errors_leave_the_engine_as_it_was(engine, folders):
    before = await engine.weights(checksums=True)
    with pytest.raises(RequestError, match="no update has begun"):
        await engine.finish_weight_update()
    await engine.start_weight_update()
    with pytest.raises(CheckpointError, match="is no file"):
        await engine.update_weights({"path": "nowhere.safetensors"})
    with pytest.raises(RequestError, match="GPU"):
        await engine.update_weights(
            {
                "names": ["x"],
                "dtypes": ["float32"],
                "shapes": [[1]],
                "ipc_handles": [{"GPU-1": b""}],
            }
        )
    with pytest.raises(CheckpointError, match="lacks"):
        await engine.finish_weight_update()
    assert (await engine.weights()).is_updating
    await engine.abort_weight_update()
    assert await engine.weights(checksums=True) == before
    stream = Stream(engine)
    await stream.begun.wait()
    with pytest.raises(RequestError, match="requests run"):
        await engine.reset_prefix_cache()
    stream.task.cancel()


async def test_a_pause_and_a_sleep_do_not_lock_each_other(engine):
    stream = Stream(engine)
    await stream.begun.wait()
    await engine.pause_generation(mode="keep")
    with pytest.raises(RequestError, match="resume it first"):
        await engine.sleep(1)
    assert (await engine.stats()).is_paused
    await engine.resume_generation()
    await engine.pause_generation(mode="abort")
    await stream.task
    await engine.sleep(1)
    await engine.wake_up()
    assert await engine.is_paused()  # it stays so
    await engine.resume_generation()
    await collect(engine.generate(PROMPT, SHORT))


async def test_abort_ends_the_requests_that_a_wait_has_queued(engine):
    stream = Stream(engine)
    await stream.begun.wait()
    waits = asyncio.create_task(engine.pause_generation(mode="wait"))
    await asyncio.sleep(0)
    queued = asyncio.create_task(collect(engine.generate(PROMPT, SHORT)))
    async with asyncio.timeout(10):
        while not (await engine.stats()).num_waiting:
            await asyncio.sleep(0.01)
    with pytest.raises(RequestError, match="resume it first"):
        await engine.sleep(1)
    await engine.pause_generation(mode="abort")
    assert (await asyncio.wait_for(queued, 10)).outputs[0].finish_reason == "abort"
    assert (await waits).is_paused
    await stream.task
    await engine.resume_generation()


async def test_a_pause_of_any_length_is_healthy(engine, monkeypatch):
    monkeypatch.setattr("slipstream.engine.process.core_operations.STALL_S", 0.2)
    stream = Stream(engine)
    await stream.begun.wait()
    await engine.pause_generation(mode="keep")
    await engine.stats()
    await asyncio.sleep(0.3)
    await engine.stats()
    assert engine.health().ok
    await engine.pause_generation(mode="abort")
    await engine.resume_generation()
    await stream.task


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
async def test_blocks_by_two_sets_of_weights_reach_no_tier(tmp_path, family):
    """A stream that was paused with `keep` goes on by other weights. After a restart nobody finds what it computed."""
    for seed, name in enumerate(("old", "new")):
        tiny_models.write_with_tokenizer(
            tmp_path / name, family, seed=seed, max_position_embeddings=2048
        )
    disk = dict(kv_disk_path=str(tmp_path / "disk"), kv_disk_bytes=2**28)
    old, new = tmp_path / "old", tmp_path / "new"
    engine = await AsyncLLM.start(EngineArgs(model=str(old), **SETTINGS, **disk))
    stream = Stream(engine, sampling=SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    await stream.begun.wait()
    await engine.pause_generation(mode="keep")
    await asyncio.sleep(0.05)
    done = len(stream.tokens)
    await set_weights(engine, new)
    await engine.resume_generation()
    await stream.task
    await engine.shutdown()
    prompt = {"prompt_token_ids": PROMPT["prompt_token_ids"] + stream.tokens}
    with LLM(str(old), **SETTINGS, **disk) as llm:
        found = llm.generate(prompt, SHORT, progress=False)[0]
    assert found.num_cached_tokens <= 70 + done
    assert found.outputs[0].token_ids == answer_of(old, prompt, SHORT)


async def test_a_core_that_starts_again_after_an_update_takes_no_request_until_another(folders):
    old, new = folders
    engine = await AsyncLLM.start(EngineArgs(model=str(old), **SETTINGS))
    await set_weights(engine, new)
    os.kill(engine.processes[0], signal.SIGKILL)
    while engine.num_restarts == 0 or not engine.is_alive:
        await asyncio.sleep(0.05)
    assert "lost" in (await engine.weights()).broken
    with pytest.raises(EngineError, match="lost"):
        await collect(engine.generate(PROMPT, SHORT))
    assert (await set_weights(engine, new)).weight_version == "2"  # "1" was used
    again = await collect(engine.generate(PROMPT, SHORT))
    assert again.outputs[0].weight_versions == [("2", 6)]
    await engine.shutdown()


async def test_a_model_without_such_weights_is_not_paused(tiny_encoder):
    engine = await AsyncLLM.start(
        EngineArgs(model=str(tiny_encoder), dtype="float32", device="cpu", num_threads=1)
    )
    try:
        for mode in ("keep", "wait", "retract", "abort"):
            with pytest.raises(RequestError, match="text alone"):
                await engine.pause_generation(mode=mode)
        async with asyncio.timeout(30):
            await engine.embed(["hello"])
    finally:
        await engine.shutdown()
