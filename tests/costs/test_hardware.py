"""The machine as the operating system describes it, from samples of its files and tools."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from slipstream.costs import hardware


def test_host_facts_are_plausible():
    info = hardware.host_info()
    assert 1 <= info.num_cores <= info.num_cpus
    assert 0 < info.free_bytes <= info.memory_bytes
    assert info.cpu
    assert info.system


def nvidia_driver(error, contexts):
    """NVIDIA's, with two GPUs. `contexts` takes the ordinals of those that get a context."""

    def count(number):
        number._obj.value = 2
        return 0

    retain = lambda context, ordinal: contexts.append(ordinal.value)
    return SimpleNamespace(
        cuInit=lambda flags: error, cuDeviceGetCount=count, cuDevicePrimaryCtxRetain=retain
    )


@pytest.mark.parametrize(
    ("device", "error", "contexts"),
    [
        *(("auto", 0, [0]), ("cuda", 0, [0]), ("cuda:1", 0, [1])),
        *(("cpu", 0, []), ("cuda:x", 0, []), ("auto:1", 0, []), ("auto", 100, [])),
    ],
)
def test_a_gpu_is_woken_beside_imports(monkeypatch, device, error, contexts):
    """A wrong device, or none, is told by who needs it."""
    made = []
    monkeypatch.setattr(hardware, "_gpu_driver", lambda: nvidia_driver(error, made))
    monkeypatch.setattr(hardware, "_torch_has_cuda", lambda: True)
    thread = hardware.wake_gpu(device)
    assert (thread is None) == (device in ("cpu", "cuda:x", "auto:1"))
    if thread is not None:
        thread.join()
    assert made == contexts


def test_cores_follow_the_affinity():
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from slipstream.costs.hardware import available_cores; print(available_cores())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    assert (
        subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, check=True
        ).stdout
        == b"1\n"
    )


def test_cpu_features_are_whole_flags(monkeypatch):
    monkeypatch.setattr(
        hardware, "_cpuinfo", lambda key: "fpu avx512f avx512_vnni xavx2" if key == "flags" else ""
    )
    assert hardware.cpu_features() == ("AVX-512", "AVX-512 VNNI")


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """An `nvidia-smi` that prints what it is given, or fails."""

    def make(text, code=0):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


def test_gpus_are_read_from_nvidia_smi(nvidia_smi):
    nvidia_smi(
        "NVIDIA H200, 143771, 143000, 580.65.06\nOdd, Name, 1024, 512, 1.2\nBroken, [N/A], [N/A], 1.2"
    )
    first, second = hardware.gpus()
    assert (first.name, first.memory_bytes, first.driver) == (
        "NVIDIA H200",
        143771 * 2**20,
        "580.65.06",
    )
    assert (second.name, second.free_bytes) == ("Odd, Name", 512 * 2**20)


def test_a_driver_that_fails_means_no_gpus(nvidia_smi):
    nvidia_smi(
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", code=9
    )
    assert hardware.gpus() == ()


def test_seconds_since_process_start_grows_from_near_zero():
    program = "from slipstream.costs.hardware import seconds_since_process_start as s; print(s())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, check=True
    ).stdout
    assert 0 <= float(answer) < 60
    assert hardware.seconds_since_process_start() > 0


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None)],
)
def test_spinning_is_bounded_unless_the_user_said_otherwise(monkeypatch, given, spins):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    hardware.bound_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
