"""Weights that do not fit are refused before anything is loaded, with what would fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from slipstream import LLM
from slipstream.config import DeviceInfo, EngineArgs, resolve
from slipstream.costs.estimate import estimate
from slipstream.costs.fit import check_weights_fit
from slipstream.errors import OutOfMemoryError
from slipstream.spec.description import read_spec

GIB = 2**30
CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


def host(free):
    return DeviceInfo(
        device="cpu",
        name="a CPU",
        memory_bytes=64 * GIB,
        free_bytes=free,
        best_dtype="bfloat16",
        num_threads=8,
    )


def gpu(memory):
    sizes = dict(memory_bytes=memory, free_bytes=memory)
    return DeviceInfo(
        device="cuda:0", name="a GPU", best_dtype="bfloat16", compute_capability=(9, 0), **sizes
    )


def refused(info, **settings):
    description = read_spec(CONFIGS / "llama-3-8b")
    args = EngineArgs(
        model="llama-3-8b",
        load_format="dummy",
        device="cuda" if info.is_cuda else "cpu",
        **settings,
    )
    config = resolve(args, description, info)
    try:
        check_weights_fit(config, description)
    except OutOfMemoryError as error:
        return str(error)
    return ""


def test_a_host_says_which_scheme_fits():
    said = refused(host(10 * GIB))
    assert "take 15.0 GiB" in said
    assert "10.0 GiB of a CPU" in said
    assert "quantization='int8'" in said
    assert "quantization='int4'" in said
    assert not refused(host(20 * GIB))
    assert "'int8'" not in refused(host(6 * GIB))


def test_a_gpu_says_how_many_hold_it():
    said = refused(gpu(14 * GIB))
    assert "quantization='fp8'" in said
    assert "tensor_parallel_size=2" in said
    assert not refused(gpu(14 * GIB), tensor_parallel_size=2)
    assert "each of 2 ranks" in refused(gpu(4 * GIB), tensor_parallel_size=2)


def test_beside_a_cache_of_a_given_size_all_that_is_free_is_theirs():
    """Others use most of the GPU: of 90 % of it nothing is left, but 20 GiB are free."""
    shared = dataclasses.replace(gpu(140 * GIB), free_bytes=20 * GIB)
    assert "12.0 GiB of a GPU" in refused(shared, gpu_memory_utilization=0.9429)
    assert not refused(shared, kv_cache_bytes=GIB)


def test_it_is_refused_before_it_is_loaded(tiny_model, monkeypatch):
    from slipstream.model.load import loader
    from slipstream.worker import device, host_loading

    monkeypatch.setattr(device, "host_memory", lambda: (GIB, 1000))
    for module, name in ((loader, "load_model"), (host_loading, "load_host_model")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(OutOfMemoryError, match="are free for them; what helps") as error:
        LLM(str(tiny_model), device="cpu")
    assert error.value.field == "model"


def test_ranks_on_a_cpu_share_its_memory():
    description = read_spec(CONFIGS / "llama-3-8b")
    args = EngineArgs(model="llama-3-8b", device="cpu", tensor_parallel_size=2)
    ledger = estimate(args, description, host(40 * GIB))[1]
    assert ledger.total_bytes == ledger.allowed_bytes == 32 * GIB
    assert "shared by 2 ranks" in ledger.device


def offloaded(memory, monkeypatch, **settings):
    """The verdict on an 8B model on a GPU of 24 GiB, which may hold 6 GiB of its weights, next to
    a host with the given memory."""
    monkeypatch.setattr("slipstream.costs.fit.host_memory", lambda: (64 * GIB, memory))
    return refused(gpu(24 * GIB), **{"weights_bytes": 6 * GIB, **settings})


def test_a_gpu_says_how_much_of_the_weights_it_can_have():
    assert (
        f"weights_bytes={int(0.45 * 10 * GIB)} (layers are copied to the GPU in each step"
        in refused(gpu(10 * GIB))
    )
    assert "weights_bytes" not in refused(gpu(4 * GIB), tensor_parallel_size=2)


def test_layers_that_the_host_can_not_hold(monkeypatch):
    said = offloaded(8 * GIB, monkeypatch)
    assert (
        "weights_bytes=6442450944 leaves 10.2 GiB of weights for the host, and 7.6 GiB of the host's memory"
        in said
    )
    assert "quantization='fp8'" in said
    bound = int(said.split("weights_bytes=")[2].split(",")[0])
    assert not offloaded(8 * GIB, monkeypatch, weights_bytes=bound)
    assert not offloaded(8 * GIB, monkeypatch, quantization="fp8")
    assert not offloaded(12 * GIB, monkeypatch)
    assert "8.4 GiB of the host's memory" in offloaded(12 * GIB, monkeypatch, kv_host_bytes=3 * GIB)
    assert not offloaded(GIB, monkeypatch, weights_bytes=20 * GIB)  # all are on the GPU
