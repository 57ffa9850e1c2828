"""The package as a user gets it: what is said where the C++ library is missing, and (slow) the wheel itself, built and used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.errors import ConfigError
from slipstream.hub import list_cached
from slipstream.kernels import build
from slipstream.kernels.cpu import native

ROOT = Path(__file__).parents[1]
TINY = ROOT / "benchmarks" / "configs" / "tiny"


class Installed:
    """A distribution that pip took from `url`."""

    def __init__(self, url: str | None) -> None:
        self.url = url

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.url is None else json.dumps({"url": self.url, "archive_info": {}})


@pytest.mark.parametrize(("compiler", "source", "url", "said"), [
    (True, True, None, "python -m slipstream.kernels.build"),
    (True, False, None,
        "pip install --force-reinstall --no-deps --no-cache-dir . in a clone of Slipstream"),
    (True, False, "file:///x/s.tar.gz",
        "pip install --force-reinstall --no-deps --no-cache-dir file:///x/s.tar.gz"),
    (False, True, None,
        "install a C++ compiler (Debian: apt install g++), then python -m slipstream.kernels.build"),
])  # fmt: skip
def test_how_to_get_the_library(monkeypatch, tmp_path, compiler, source, url, said):
    monkeypatch.setattr(build, "SOURCE", ROOT / "csrc" / "cpu" if source else tmp_path)
    monkeypatch.setattr(build, "distribution", lambda name: Installed(url))
    monkeypatch.setattr(
        build.shutil, "which", lambda name: f"/usr/bin/{name}" if compiler else None
    )
    assert build.remedy() == said


def test_a_folder_that_is_not_there(capsys, tmp_path):
    assert build.main(["--into", str(tmp_path / "none")]) == 1
    assert "--into" in capsys.readouterr().err


def test_a_package_that_nobody_installed(monkeypatch, tmp_path):
    def missing(name: str) -> Installed:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(build, "SOURCE", tmp_path)
    monkeypatch.setattr(build, "distribution", missing)
    assert build.remedy().endswith(" . in a clone of Slipstream")


def test_building_without_a_compiler_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(
        build.shutil, "which", lambda name: None if name in build.COMPILERS else f"/usr/bin/{name}"
    )
    monkeypatch.delenv("CXX", raising=False)
    assert build.main([]) == 1
    assert "no C++ compiler" in capsys.readouterr().err


def test_building_puts_the_library_that_cmake_made_into_the_folder(monkeypatch, tmp_path, capsys):
    asked = []

    def run(command, *, check):
        assert check
        folder = Path(command[command.index("-B" if "-B" in command else "--build") + 1])
        asked.append(["DIR" if word == str(folder) else str(word) for word in command])
        (folder / native.LIBRARY).write_text("made")

    monkeypatch.setattr(build.subprocess, "run", run)
    monkeypatch.setattr(build.shutil, "which", lambda name: name)
    monkeypatch.setattr(build.os, "cpu_count", lambda: 3)
    assert build.main(["--into", str(tmp_path), "--sanitize"]) == 0
    configure = ["-S", str(build.SOURCE), "-B", "DIR", "-DCMAKE_BUILD_TYPE=Release"]
    assert asked == [
        ["cmake", *configure, "-DSLIPSTREAM_SANITIZE=ON"],
        ["cmake", "--build", "DIR", "--parallel", "3"],
    ]
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [(native.LIBRARY, "made")]
    assert capsys.readouterr().out == f"{tmp_path / native.LIBRARY}\n"


def test_without_the_library_an_engine_says_so_and_runs(monkeypatch, caplog):
    monkeypatch.setattr(native, "library_path", lambda: None)
    native.load.cache_clear()
    try:
        with pytest.raises(
            ConfigError, match=r"not built.*kernels='torch'.*slipstream\.kernels\.build"
        ):
            native.load()
        assert not native.has_cpu_kernels()
        settings = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "device": "cpu",
            "max_model_len": 64,
        }
        with LLM(str(TINY), **settings) as llm:
            (answer,) = llm.generate(
                {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=2, ignore_eos=True)
            )
        assert len(answer.outputs[0].token_ids) == 2
        assert "the C++ kernels are not installed: torch's run instead" in caplog.text
    finally:
        native.load.cache_clear()


# --- The wheel (slow: it asks the package index for the build's tools, and compiles) ---------------------------------------


def slim_path(folder: Path) -> str:
    """A PATH with a shell's tools and without a compiler, CMake or ninja."""
    folder.mkdir()
    for tool in (
        "sh",
        "env",
        "cat",
        "uname",
        "ldd",
        "rm",
        "cp",
        "mv",
        "ln",
        "mkdir",
        "sed",
        "grep",
    ):
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    return str(folder)


def make_wheel(folder: Path, **environment: str) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-cache-dir",
        "-w",
        str(folder),
        str(ROOT),
    ]
    plain = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CXX", "CC")}
    subprocess.run(
        command, check=True, cwd=folder.parent, env={**plain, **environment}, timeout=1500
    )
    (made,) = folder.glob("*.whl")
    return made


def installed(wheel: Path, folder: Path) -> Path:
    """The Python of a fresh environment that has the wheel, and of ours what it depends on (but no editable install)."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-deps",
        str(wheel),
    ]
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(pip, check=True, env=plain)
    (site,) = folder.glob("lib/python*/site-packages")
    ours = [
        p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")
    ]  # an environment may have two
    (site / "dependencies.pth").write_text("\n".join(ours) + "\n")
    return python


def installed_alone(wheel: Path, folder: Path) -> Path:
    """The Python of a fresh environment that has the wheel, and from the package index what it depends on."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", str(wheel)],
        check=True,
        env=plain,
    )
    return python


def answer_of(
    python: Path, path: str, cache: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path, "HOME": str(cache), "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(
        [str(python), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=cache,
        timeout=300,
    )


EMULATOR = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
EVERY_SET = """
from slipstream.kernels.cpu import native
from slipstream.worker.start.cpu_choice import _steps
for isa in native.instruction_sets():
    for step in _steps(isa, "int8", 2):
        step()
    print(isa, flush=True)
"""
RUN = f"""
from slipstream import LLM, SamplingParams
with LLM({str(TINY)!r}, load_format="dummy", skip_tokenizer_init=True, device="cpu", max_model_len=64) as llm:
    print(llm.core.executor.runner.ops.name, llm.generate(
        {{"prompt_token_ids": [1, 2, 3]}}, SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_brings_the_kernels_to_a_machine_without_a_compiler_and_without_torch(
    tmp_path, tiny_model, tiny_encoder
):
    wheel = make_wheel(tmp_path / "dist")
    assert wheel.name.startswith("slipstream-0")
    assert "-py3-none-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert f"slipstream/kernels/{native.LIBRARY}" in names
    assert not [
        n
        for n in names
        if n.split("/")[0] not in ("slipstream", wheel.name.split("-py3")[0] + ".dist-info")
    ]
    path, python = slim_path(tmp_path / "bin"), installed_alone(wheel, tmp_path / "venv")
    assert answer_of(python, path, tmp_path, "-c", "import torch").returncode == 1

    def told(*arguments: str) -> dict[str, Any]:
        ran = answer_of(python, path, tmp_path, "-m", "slipstream", *arguments, "--json")
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    found = told("doctor")
    assert found["will_use"]["kernels"].startswith("cpu (C++, ")
    (lacking,) = (m for m in found["missing"] if m["what"].startswith("torch"))
    assert not lacking["needed"]
    assert "[torch]" in lacking["command"]
    assert not [m for m in found["missing"] if "C++" in m["what"]]
    models = {"decoder": tiny_model, "encoder": tiny_encoder} | {
        k: v for k, v in list_cached().items() if k == "smollm2"
    }
    for name, model in models.items():
        assert told("info", str(model))["needs_torch"] is None, name
        if name == "encoder":
            assert len(told("embed", str(model), "hello", "--device", "cpu")["embeddings"]) == 1
        else:
            assert told("run", str(model), "Hello", "--max-tokens", "4", "--device", "cpu")["text"]
    ran = answer_of(python, path, tmp_path, "-c", RUN)
    assert ran.stdout.startswith("cpu "), ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not native.has_cpu_kernels() or EMULATOR is None,
    reason="needs the C++ kernels and QEMU's user emulation",
)
@pytest.mark.parametrize(
    ("cpu", "sets"), [("Haswell", ["portable", "avx2"]), ("Nehalem", ["portable"])]
)
def test_one_library_serves_older_processors(cpu, sets):
    """The library loads without AVX-512 and AVX2, and runs the kernels that it names."""
    assert EMULATOR is not None
    environment = {k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONPATH")}
    command = [EMULATOR, "-cpu", cpu, sys.executable, "-c", EVERY_SET]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=1500
    )
    assert ran.stdout.split() == sets, ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_a_compiler_the_package_installs_and_says_what_it_lacks(tmp_path):
    path = slim_path(tmp_path / "bin")
    wheel = make_wheel(tmp_path / "dist", PATH=path)
    assert not [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(native.LIBRARY)]
    python = installed(wheel, tmp_path / "venv")
    found = json.loads(
        answer_of(python, path, tmp_path, "-m", "slipstream", "doctor", "--json").stdout
    )
    (lacking,) = (m for m in found["missing"] if "C++" in m["what"])
    assert not lacking["needed"]
    assert lacking["command"].startswith(
        "install a C++ compiler (Debian: apt install g++), then pip install"
    )
    assert wheel.name in lacking["command"]
    ran = answer_of(python, path, tmp_path, "-c", RUN)
    assert ran.stdout.startswith("torch "), ran.stderr
    assert "the C++ kernels are not installed" in ran.stderr
