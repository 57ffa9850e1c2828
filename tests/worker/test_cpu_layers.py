"""Layers on the host's CPU beside a GPU (`cpu_layers`). Here the GPU's stage runs on the CPU, too, but through the same
messages, with the GPU's settings. `tests/gpu/worker/test_cpu_layers_gpu.py` has a GPU."""

from __future__ import annotations

import dataclasses

import pytest

from slipstream import LLM
from slipstream.config import EngineArgs, resolve, stage_args
from slipstream.config.forms import HostAndGpu
from slipstream.config.settings import DeviceInfo
from slipstream.errors import OutOfMemoryError
from slipstream.spec.description import read_spec
from slipstream.worker.ranks import process_executor
from tests.support import tiny_models
from tests.worker.ranks.test_ranks import SETTINGS, agree, answers

ON_GPU = {**SETTINGS, "device": "cuda", "max_num_seqs": 16}
GPU = DeviceInfo(
    device="cuda:0",
    name="a GPU",
    memory_bytes=2**34,
    free_bytes=2**34,
    best_dtype="bfloat16",
    compute_capability=(9, 0),
)


@pytest.fixture
def gpu(monkeypatch):
    """The parent sees a GPU; the rank that would have it takes the CPU."""
    stages, settle = process_executor.stage_args, process_executor.resolve

    def on_cpu(args, config, num_threads):
        first, second = stages(args, config, num_threads)
        assert second.device == "cuda"
        return first, dataclasses.replace(second, device="cpu", gpu_memory_utilization=None)

    monkeypatch.setattr(process_executor, "this_device", lambda device: GPU)
    monkeypatch.setattr(process_executor, "stage_args", on_cpu)
    seen = lambda args, model, info: settle(args, model, info if args.cpu_layers is None else GPU)
    monkeypatch.setattr(process_executor, "resolve", seen)


@pytest.mark.usefixtures("forked_ranks")
def test_the_cpu_and_the_gpu_answer_as_one_device(tmp_path, gpu):
    tiny_models.write_with_tokenizer(tmp_path, num_hidden_layers=3, max_position_embeddings=1024)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        wanted, block_bytes = answers(llm), llm.core.ledger.block_bytes
    with LLM(str(tmp_path), cpu_layers=1, speculative_model="ngram", **ON_GPU) as llm:
        executor = llm.core.executor
        assert executor.config.parallel.stages == (1, 2)
        assert [ledger.block_bytes * 3 for ledger in executor.ledgers] == [
            block_bytes,
            2 * block_bytes,
        ]
        assert executor.ledger is executor.ledgers[1]
        assert executor.ledgers[0].num_blocks == executor.ledgers[1].num_blocks
        assert agree(answers(llm), wanted)
        assert agree(answers(llm), wanted)  # with all prompts in the cache
        assert llm.core.stats().prefix_hits > 0
        executor.warm_up()  # both stages run its steps
        assert agree(answers(llm), wanted)


def describe(folder, **config):
    tiny_models.write(folder, "llama", **config)
    return read_spec(folder)


@pytest.mark.parametrize(("room", "layers"), [(100.0, 0), (0.99, 1), (0.55, 2), (0.1, 3)])
def test_auto_leaves_as_few_to_the_cpu_as_fit(tmp_path, room, layers):
    """`room`: the share of the weights that the GPU has room for, beside the cache's."""
    model = describe(tmp_path, num_hidden_layers=4, hidden_size=256)
    of_layers = sum(
        2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        for n, shape in model.shapes.items()
        if "layers" in n
    )
    rest = sum(
        2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        for n, shape in model.shapes.items()
        if "layers" not in n
    )
    memory = int((rest + room * of_layers) / 0.7)
    small = dataclasses.replace(GPU, memory_bytes=memory, free_bytes=memory)
    config = resolve(
        EngineArgs(model=str(tmp_path), cpu_layers="auto", gpu_memory_utilization=0.9), model, small
    )
    assert config.parallel.stages == ((layers, 4 - layers) if layers else ())
    assert isinstance(config.parallel, HostAndGpu) == bool(layers)
    assert config.scheduling.pipeline_steps == config.parallel.num_stages


def test_stages_have_what_the_gpu_chose(tmp_path):
    """A CPU would take fewer sequences and tokens by itself, and another type."""
    model = describe(tmp_path, num_hidden_layers=4)
    args = EngineArgs(model=str(tmp_path), cpu_layers=3, gpu_memory_utilization=0.5)
    config = resolve(args, model, GPU)
    cpu_info = dataclasses.replace(
        GPU, device="cpu", best_dtype="float32", num_threads=8, compute_capability=None
    )
    on_cpu, on_gpu = (
        resolve(own, model, info)
        for own, info in zip(stage_args(args, config, 7), (cpu_info, GPU), strict=True)
    )
    assert on_cpu.model.dtype == on_gpu.model.dtype == "bfloat16"
    assert on_cpu.cache.dtype == on_gpu.cache.dtype
    assert (
        on_cpu.scheduling
        == dataclasses.replace(on_gpu.scheduling, pipeline_steps=2)
        == config.scheduling
    )
    assert on_gpu.device.enforce_eager  # graphs of this stage were not tried on a GPU
    assert on_cpu.parallel.stages == on_gpu.parallel.stages == (3, 1)
    assert on_cpu.device.num_threads == 7
    assert on_gpu.cache.gpu_memory_utilization == 0.5


def test_a_host_without_room_is_refused_before_a_process_starts(tiny_model, monkeypatch, gpu):
    found = process_executor.detect
    monkeypatch.setattr(
        process_executor, "spawn", lambda number: pytest.fail("a process was started")
    )
    monkeypatch.setattr(
        process_executor,
        "detect",
        lambda *a, **k: dataclasses.replace(found(*a, **k), free_bytes=1000),
    )
    with pytest.raises(OutOfMemoryError, match="of the host's memory are free") as error:
        LLM(str(tiny_model), cpu_layers=1, **ON_GPU)
    assert error.value.field == "cpu_layers"
