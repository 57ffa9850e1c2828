"""This machine's hardware, from the operating system alone.

No torch, so that `info`, `doctor` and reports are quick. A value that the system does not report is
None, never a guess.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

CPU_FEATURES = {  # flag of /proc/cpuinfo: display name
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "avx_vnni": "AVX-VNNI",
    "amx_tile": "AMX",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX INT8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """The host machine. `num_cores` counts the cores that this process may use; `num_cpus` counts
    the machine's."""

    system: str
    cpu: str
    cpu_features: tuple[str, ...]
    num_cores: int
    num_cpus: int
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    name: str
    memory_bytes: int
    free_bytes: int
    driver: str


def host_info() -> HostInfo:
    total, free = host_memory()
    return HostInfo(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_name(),
        cpu_features=cpu_features(),
        num_cores=available_cores(),
        num_cpus=os.cpu_count() or 1,
        memory_bytes=total,
        free_bytes=free,
    )


def available_cores() -> int:
    """Number of cores that this process may use, by its affinity and its control group's quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no control group, or one that sets no quota
    return cores


def host_memory() -> tuple[int, int]:
    """Returns (total, available) bytes of host memory, within the control group's limit.

    The system's file cache counts as available, because it is dropped when a program needs the
    memory.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = total
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
                name, _, number = line.partition(" ")
                used -= int(number) if name in ("active_file", "inactive_file") else 0
            total, available = min(total, int(limit)), min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # not Linux, or no control group: the physical size is used
    return total, available


def busy_cores() -> float:
    """Number of cores kept busy by all other programs while this process waits; 0 if the system
    does not report it."""
    import time

    def ticks() -> tuple[int, int]:
        with open("/proc/stat", encoding="ascii") as file:
            fields = [int(field) for field in file.readline().split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # of these idle, or waiting for a disk

    try:
        all_before, idle_before = ticks()
        time.sleep(0.25)
        total, idle = ticks()
    except (OSError, ValueError):
        return 0.0
    share = 1 - (idle - idle_before) / max(1, total - all_before)
    return share * (os.cpu_count() or 1)


def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_features() -> tuple[str, ...]:
    """Returns the `CPU_FEATURES` that this CPU has; empty where the system does not list them."""
    flags = set(_cpuinfo("flags").split())
    return tuple(name for flag, name in CPU_FEATURES.items() if flag in flags)


def gpus() -> tuple[GpuInfo, ...]:
    """Returns the NVIDIA GPUs that nvidia-smi lists; empty if there is no driver or it does not
    answer."""
    import shutil
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = "--query-gpu=name,memory.total,memory.free,driver_version"
    try:
        answer = subprocess.run(
            [tool, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    found = []
    for line in answer.stdout.splitlines():
        name, total, free, driver = (part.strip() for part in line.rsplit(",", 3))
        if total.isdigit() and free.isdigit():
            found.append(
                GpuInfo(
                    name=name,
                    memory_bytes=int(total) * 2**20,
                    free_bytes=int(free) * 2**20,
                    driver=driver,
                )
            )
    return tuple(found)


def driver_sees_gpu() -> bool:
    """Whether NVIDIA's driver is present and lists a GPU. If not, torch need not be asked."""
    try:
        driver = _gpu_driver()
        count = ctypes.c_int(0)
        return (
            driver.cuInit(0) == 0
            and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
            and count.value > 0
        )
    except (OSError, AttributeError):
        return False


def wake_gpu(device: str) -> threading.Thread | None:
    """Starts the driver and a context of the GPU named by `device` (as in `EngineArgs`) in a
    thread.

    It overlaps with Python's imports and saves 0.4 s on an H200. The first user of the driver waits
    for the rest and gets any error. Returns None if `device` names no GPU.
    """
    kind, _, ordinal = device.partition(":")
    if not (kind in ("auto", "cuda") and not ordinal) and not (
        kind == "cuda" and ordinal.isdigit()
    ):
        return None

    def make_context() -> None:
        if driver_sees_gpu() and _torch_has_cuda():
            # torch's runtime takes this context, the device's primary one, which holds until the
            # process ends.
            _gpu_driver().cuDevicePrimaryCtxRetain(
                ctypes.byref(ctypes.c_void_p()), ctypes.c_int(int(ordinal or 0))
            )

    thread = threading.Thread(target=make_context, daemon=True)
    thread.start()
    return thread


def _torch_has_cuda() -> bool:
    """Tells whether the installed torch has CUDA, from its version string. torch itself is not
    loaded yet."""
    from importlib import metadata

    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _gpu_driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1")


def bound_spinning() -> None:
    """Lets OpenMP's idle threads sleep after about 50 µs, unless the user set otherwise. Call it
    before torch loads.

    By default idle threads spin for milliseconds. On shared cores they hold the core of the thread
    that they wait for: next to a busy process SmolLM2 decoded 5 tokens/s instead of 35. A spin
    shorter than an operator halves the speed of an idle machine. This one has no measurable cost.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def import_numpy() -> None:
    """Imports NumPy with one thread for its matrix products, unless the user set otherwise.

    By default it starts a thread for each core, which takes 30 to 80 ms, and nothing here needs
    them. The setting is permanent, so call it only in a process of our own.
    """
    if "OPENBLAS_NUM_THREADS" in os.environ or "numpy" in sys.modules:
        return
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ["OPENBLAS_NUM_THREADS"]  # neither torch nor a child process gets it


def seconds_since_process_start() -> float | None:
    """Returns the age of this process to a hundredth of a second; None where there is no /proc."""
    try:
        # The name, in parentheses, may itself contain spaces. The start time is the 20th field
        # after it.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int) -> bool:
    """Tells whether a signal such as SIGSTOP has stopped the process. A debugger's stop does not
    count. False where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""  # not Linux
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == key), ""
    )
