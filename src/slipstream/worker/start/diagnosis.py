"""Diagnosis of this machine, for `slipstream doctor`: hardware, packages, what an engine would use, and what is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.costs.hardware import GpuInfo, HostInfo, gpus, host_info
from slipstream.errors import ConfigError, install_command

if TYPE_CHECKING:
    from slipstream.worker.start.cpu_choice import CpuChoice

EXTRAS = {
    "optuna": ("optimize", "optimize"),
    "pyarrow": ("sweep", "the files of sweep"),
    "pillow": ("vision", "pictures in prompts"),
    "soundfile": ("audio", "transcriptions of FLAC, MP3 and Ogg (WAV needs none)"),
    "river": ("detect", "serve --detect"),
    "grpcio": ("kserve", "serve --grpc-port"),
    "opentelemetry-sdk": ("otel", "serve --otlp-endpoint"),
    "ray": ("fleet", "fleets on Ray"),
    "lm-eval": ("eval", "lm-eval's tasks in eval"),
    "jsonschema": ("conformance", "judging structured answers in conformance"),
    "gguf": ("gguf", "IQ1, IQ2 and IQ3 of GGUF files"),
    "transformers": ("dev", "check-model and bench --engine transformers"),
}
"""Optional packages, each with (extra of this package that installs it, what needs it)."""

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", *EXTRAS)
GPU_ONLY = ("triton",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A missing dependency. `needed`: nothing runs without it. `command` installs it; empty if
    there is none."""

    what: str
    command: str
    needed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchInfo:
    """The installed torch. `cuda_build`: the CUDA version that it was built for; None for a CPU
    build."""

    version: str
    cuda_build: str | None
    sees_gpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Result of `diagnose`. `will_use` and `cpu_measured` are None if no engine could run."""

    host: HostInfo
    gpus: tuple[GpuInfo, ...]
    tile_tables: dict[str, str]
    torch: TorchInfo | None
    packages: dict[str, str | None]
    default_model: Path | None
    will_use: dict[str, Any] | None
    cpu_measured: CpuChoice | None
    missing: list[Missing]


def can_run(missing: Sequence[Missing]) -> bool:
    return not any(m.needed for m in missing)


def diagnose(*, measure: bool) -> Diagnosis:
    """Examine this machine. `measure`: measure the CPU's choices even if earlier results are stored."""
    from slipstream.hub import DEFAULT_MODEL, list_cached

    host, cards, torch = host_info(), gpus(), torch_info()
    packages = {name: package_version(name) for name in PACKAGES}
    model, built = list_cached().get(DEFAULT_MODEL), cpu_kernels_built()
    runs = built if torch is None else True  # a CPU needs torch or the C++ kernels
    choice = cpu_choice(measure=measure) if runs else None
    used = will_use() if runs and (torch is not None or not cards) else None
    missing = find_missing(
        host, cards, torch, packages, has_model=model is not None, has_cpu_kernels=built
    )
    tables, broken = tile_tables(sorted({card.name for card in cards}))
    return Diagnosis(
        host=host,
        gpus=cards,
        tile_tables=tables,
        torch=torch,
        packages=packages,
        default_model=model,
        will_use=used,
        cpu_measured=choice,
        missing=missing + broken,
    )


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def tile_tables(names: list[str]) -> tuple[dict[str, str], list[Missing]]:
    """(tile table that an engine uses for each kind of GPU, invalid tables). An engine doesn't
    start until the latter are removed."""
    from slipstream.hub import tiles_folder
    from slipstream.spec.devices.autotune_table import load_tiles

    found: dict[str, str] = {}
    broken: list[Missing] = []
    for name in names:
        try:
            found[name] = load_tiles("auto", name, tiles_folder()).describe()
        except ConfigError as error:
            found[name] = "can't be used"
            broken.append(
                Missing(
                    what=str(error), command="delete it, then slipstream tune MODEL", needed=True
                )
            )
    return found, broken


def torch_info() -> TorchInfo | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    from slipstream.platform import has_gpu

    return TorchInfo(
        version=str(torch.__version__), cuda_build=torch.version.cuda, sees_gpu=has_gpu()
    )


def will_use() -> dict[str, Any]:
    """The values to which device="auto", dtype="auto" and kernels="auto" are resolved."""
    from slipstream.hub import machine_folder
    from slipstream.worker.device import detect

    info = detect("auto", machine_folder())
    if not info.is_cuda and cpu_kernels_built():
        from slipstream.kernels.cpu.host_ops import HostOps

        kernels = HostOps(info.num_threads, info.isa).describe()
    else:
        import torch

        from slipstream.kernels.select import select_ops

        kernels = select_ops(
            torch.device(info.device), num_threads=info.num_threads, isa=info.isa
        ).describe()
    return {
        "device": f"{info.device} ({info.name})",
        "dtype": info.best_dtype,
        "dtype_reason": info.dtype_reason or "the GPU's fast type",
        "kernels": kernels,
        "threads": info.num_threads,
    }


def cpu_choice(*, measure: bool) -> CpuChoice:
    from slipstream.hub import machine_folder
    from slipstream.worker.start.cpu_choice import choose_cpu

    return choose_cpu(machine_folder(), measure=measure)


def cpu_kernels_built() -> bool:
    from slipstream.kernels.cpu.native import has_cpu_kernels

    return has_cpu_kernels()


def find_missing(
    host: HostInfo,
    cards: tuple[GpuInfo, ...],
    torch: TorchInfo | None,
    packages: dict[str, str | None],
    *,
    has_model: bool,
    has_cpu_kernels: bool = True,
) -> list[Missing]:
    """Missing dependencies, the most important first: all absent packages, except those only for
    GPUs if there is none. Pure."""
    found = _missing_torch(cards, torch, has_cpu_kernels=has_cpu_kernels)
    if cards and packages.get("triton") is None:
        found.append(Missing(what="triton, for the GPU kernels", command=install_command("gpu")))
    if not has_cpu_kernels:
        from slipstream.kernels.build import remedy

        lost = "no quantization, no 8-bit cache, GGUF's weights expanded, and torch's kernels are several times slower"
        found.append(
            Missing(what=f"the C++ kernels for the CPU (without them: {lost})", command=remedy())
        )
    for name in ("numpy", "safetensors", "tokenizers"):
        if name in packages and packages[name] is None:
            found.append(Missing(what=name, command=f"pip install {name}", needed=True))
    for name, (extra, what) in EXTRAS.items():
        if name in packages and packages[name] is None:
            found.append(Missing(what=f"{name}, for {what}", command=install_command(extra)))
    if not has_model:
        found.append(Missing(what="the default model", command="slipstream pull smollm2"))
    if host.free_bytes < 2**30:
        found.append(Missing(what="1 GiB of free memory", command="end other programs"))
    return found


def _missing_torch(
    cards: tuple[GpuInfo, ...], torch: TorchInfo | None, *, has_cpu_kernels: bool
) -> list[Missing]:
    found: list[Missing] = []
    if torch is None:
        lost = (
            "a GPU"
            if cards
            else "compression, evals, adapters, pictures, and what else `slipstream info` names"
        )
        what, extra = f"torch, for {lost}", "gpu" if cards else "torch"
        needed = bool(cards) or not has_cpu_kernels
        found.append(Missing(what=what, command=install_command(extra), needed=needed))
    elif cards and torch.cuda_build is None:
        found.append(
            Missing(
                what="a CUDA build of torch for the GPU",
                command="pip install --force-reinstall 'torch>=2.11'",
            )
        )
    elif cards and not torch.sees_gpu:
        found.append(
            Missing(
                what="a GPU that torch can use",
                command=f"install a driver for CUDA {torch.cuda_build} or newer (now: {cards[0].driver}), or check "
                "CUDA_VISIBLE_DEVICES",
            )
        )
    return found
