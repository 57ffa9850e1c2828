"""Prefill and decode apart on one GPU that two engines share: answers, prefix hits, and a death of either side in a hand-over.

Run: pytest -m gpu tests/gpu/worker/test_handover_gpu.py. Models are tiny, and in float32.
"""

from __future__ import annotations

import multiprocessing
import threading
import time

import pytest
import torch

from slipstream.platform import gpu_platform
from tests.engine.cache import test_handover as on_cpus
from tests.engine.cache.test_handover import answers, engine, nothing_is_held, prefill
from tests.support import tiny_models
from tests.worker.test_disk_tier import check_handover_of_a_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ON_GPU = dict(device="cuda", num_threads=None, enforce_eager=True, deterministic=True)
HITS = 32 + 96 + 128
TIMES = 10


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    for name, value in ON_GPU.items():
        monkeypatch.setitem(on_cpus.SIZES, name, value)


def test_blocks_pass_pinned_memory():
    from slipstream.kernels.triton import TritonOps

    check_handover_of_a_device(gpu_platform(0), TritonOps())


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", {}),
        ("llama", {"enforce_eager": False}),
        ("llama", {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}),
        ("llama", {"kv_host_bytes": 2**26}),
        ("gemma3_text", {}),
        ("deepseek_v3", {"deterministic": False}),
        ("granitemoehybrid", {"deterministic": False}),
    ],
)
def test_another_engine_on_the_gpu_goes_on_from_the_prompt(tmp_path, family, how):
    tiny_models.write(tmp_path, family, **({"hidden_size": 256} if family == "llama" else {}))
    with engine(tmp_path, **how) as first, engine(tmp_path, **how) as second:
        found = answers(second, handover_from=prefill(first))
        stats = second.stats()
        assert stats.tiers.peer_hit_tokens == stats.prefix_hits == HITS
        assert stats.tiers.failed_blocks == stats.tiers.late_loads == 0
        nothing_is_held(first, second)
        assert found == answers(first)
        assert second.stats().tiers.peer_bytes_per_s > 0


def test_blocks_come_over_tcp(tmp_path):
    tiny_models.write(tmp_path, "llama", hidden_size=256)
    address = f"tcp://127.0.0.1:{on_cpus.free_port()}"
    with engine(tmp_path, address) as first, engine(tmp_path) as second:
        prefill(first)
        assert answers(second, handover_from=address) == answers(first)
        assert second.stats().tiers.peer_hit_tokens == HITS
        nothing_is_held(first, second)


def test_a_cpus_blocks_are_refused_by_name(tmp_path, caplog):
    tiny_models.write(tmp_path, "llama", hidden_size=256)
    on_cpu = dict(
        device="cpu", enforce_eager=False, num_threads=1, kernels="torch", deterministic=False
    )
    with engine(tmp_path, **on_cpu) as first, engine(tmp_path) as second:
        answers(second, handover_from=prefill(first))
        assert "kind of device is cpu there" in caplog.text
        assert second.stats().tiers.peer_hit_tokens == 0


# --- Deaths -----------------------------------------------------------------------------------------------------------


def other(path, settings, link, source):
    """A process with an engine: it gives its prompts' blocks, or takes those of `source`, until it is killed."""
    on_cpus.SIZES.update(settings)
    with engine(path) as llm:
        if source is None:
            link.send(prefill(llm))
            time.sleep(600)
        link.send("ready")
        while True:
            answers(llm, handover_from=source)
            llm.reset_prefix_cache()
            link.send("again")


def begun(path, source=None):
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    args = (path, dict(on_cpus.SIZES), theirs, source)
    process = spawn.Process(target=other, args=args, daemon=True)
    process.start()
    return process, ours


def test_a_giver_that_dies_in_a_hand_over_loses_nothing(tmp_path):
    tiny_models.write(tmp_path, "llama", hidden_size=256)
    with engine(tmp_path) as taker:
        expected, waiting = answers(taker), begun(tmp_path)
        for turn in range(TIMES):
            giver, link = waiting
            address, waiting = link.recv(), begun(tmp_path)  # the next one starts meanwhile
            taker.reset_prefix_cache()
            killer = threading.Timer(0.004 * turn, giver.kill)
            killer.start()
            assert answers(taker, handover_from=address) == expected
            killer.join()
            giver.join()
            nothing_is_held(taker)
        waiting[0].kill()


def test_a_taker_that_dies_in_a_hand_over_leaves_the_giver_whole(tmp_path):
    tiny_models.write(tmp_path, "llama", hidden_size=256)
    with engine(tmp_path) as giver:
        address = prefill(giver)
        waiting = begun(tmp_path, address)
        for turn in range(TIMES):
            taker, link = waiting
            assert link.recv() == "ready"
            waiting = begun(tmp_path, address)
            time.sleep(0.01 + 0.004 * turn)
            taker.kill()
            taker.join()
            nothing_is_held(giver)
            prefill(giver)  # what nobody asked for in a minute is computed again
        waiting[0].kill()
        with engine(tmp_path) as last:
            assert answers(last, handover_from=address) == answers(giver)
            assert last.stats().tiers.peer_hit_tokens == HITS
