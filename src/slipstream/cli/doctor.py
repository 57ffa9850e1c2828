"""`slipstream doctor`: shows what this machine has, what Slipstream will use, what is missing and
the command that installs it.

The exit code is 1 if something is missing without which no model can run."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from slipstream.cli.console import counted, print_info, print_json, size
from slipstream.cli.options import add_output_options
from slipstream.costs.hardware import GpuInfo, HostInfo, gpus, host_info
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.worker.start.cpu_choice import CpuChoice

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "huggingface-hub",
    "transformers",
)
GPU_ONLY = ("triton",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Something that is missing. `needed`: nothing runs without it. `command` installs it; empty if
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure anew what the CPU runs fastest, instead of what was found before",
    )
    text = "read servers that run instead, and say what is wrong with them"
    parser.add_argument("--fleet", help=text, nargs="+", metavar="URL")
    parser.add_argument(
        "--for",
        help="seconds between two looks at them (default: 10)",
        type=float,
        default=10.0,
        metavar="S",
        dest="seconds",
    )
    parser.add_argument(
        "--api-key-file", help="whose first line is the key that they ask for", metavar="FILE"
    )
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.fleet:
        return run_fleet(args)
    if args.api_key_file is not None:
        raise ConfigError("--api-key-file has an effect only with --fleet", field="api_key_file")
    from slipstream import __version__
    from slipstream.hub import DEFAULT_MODEL, cache_folder, list_cached

    host, cards, torch = host_info(), gpus(), torch_info()
    packages = {name: package_version(name) for name in PACKAGES}
    model = list_cached().get(DEFAULT_MODEL)
    built = cpu_kernels_built()
    runs = built if torch is None else True  # a CPU needs torch or the C++ kernels
    choice = cpu_choice(measure=args.measure) if runs else None
    used = will_use() if runs and (torch is not None or not cards) else None
    missing = find_missing(
        host, cards, torch, packages, has_model=model is not None, has_cpu_kernels=built
    )
    tables, broken = tile_tables(sorted({card.name for card in cards}))
    missing += broken
    if args.json:
        print_json(
            {
                "slipstream": __version__,
                "python": platform.python_version(),
                "host": host,
                "gpus": cards,
                "tile_tables": tables,
                "torch": torch,
                "packages": packages,
                "cache_folder": cache_folder(),
                "default_model": {"name": DEFAULT_MODEL, "path": model},
                "will_use": used,
                "cpu_measured": choice,
                "missing": missing,
            }
        )
        return exit_code(missing)
    rows = [
        ("slipstream", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("system", host.system),
        ("CPU", f"{host.cpu}; {', '.join(host.cpu_features) or 'no known features'}"),
        (
            "cores",
            f"{host.num_cores} of {host.num_cpus} for this process (affinity and control group)",
        ),
        ("memory", f"{size(host.memory_bytes)}, of which {size(host.free_bytes)} is free"),
        *(("GPU", f"{g.name}, {size(g.memory_bytes)}, driver {g.driver}") for g in cards),
        *((f"tiles of {name}", found) for name, found in tables.items()),
        *([] if cards else [("GPU", "none that nvidia-smi shows")]),
        ("torch", "not there" if torch is None else f"{torch.version}, {cuda_text(torch)}"),
        *(
            (name, found or absent(name, cards))
            for name, found in packages.items()
            if name != "torch"
        ),
        ("cache folder", str(cache_folder())),
        (f"model {DEFAULT_MODEL}", str(model or "not fetched yet")),
    ]
    print_info("this machine", rows)
    if used is not None:
        print()
        print_info(
            "will be used", [(name.replace("_", " "), str(value)) for name, value in used.items()]
        )
    if choice is not None:
        print()
        rows = [
            (
                f"{t.kernels}, {t.weights}, {counted(t.num_threads, 'thread')}",
                f"{t.decode_ms:.2f} ms a token, {t.prompt_ms:.1f} ms for 64 tokens",
            )
            for t in choice.timings
        ]
        rule = "an older instruction set or fewer threads are taken if 20% faster, twice"
        print_info(f"CPU as measured, on a small decoder ({rule})", rows)
    print()
    if missing:
        print_info("missing", [(m.what, m.command) for m in missing])
    else:
        print("nothing is missing")
    return exit_code(missing)


def run_fleet(args: argparse.Namespace) -> int:
    """Check running servers. Returns 0 if nothing is wrong."""
    from slipstream.cli.serve import read_keys
    from slipstream.fleet.detection.alerts import checked
    from slipstream.fleet.detection.doctor import examine

    if not 0 < args.seconds <= 3600:
        raise ConfigError(
            f"--for must be above 0 and at most 3600 seconds, got {args.seconds:g}", field="for"
        )
    urls = [checked(url, field="fleet").rstrip("/") for url in args.fleet]
    key = None if args.api_key_file is None else read_keys(args.api_key_file)[0]
    visits, complaints = examine(urls, args.seconds, key)
    if args.json:
        print_json({"servers": visits, "wrong": complaints})
        return 1 if complaints else 0
    rows = []
    for found in visits:
        detector = "no detector (serve --detect)" if found.findings is None else "a detector"
        rows.append((found.url, found.error or f"{', '.join(found.models)}; {detector}"))
    print_info("servers", rows)
    print()
    if complaints:
        print_info("wrong", [(f"{c.url} {c.cause}", f"{c.text}. {c.remedy}") for c in complaints])
    else:
        print("nothing is wrong")
    return 1 if complaints else 0


def exit_code(missing: list[Missing]) -> int:
    return 1 if any(m.needed for m in missing) else 0


def cuda_text(torch: TorchInfo) -> str:
    if torch.cuda_build is None:
        return "CPU build"
    return f"built for CUDA {torch.cuda_build}, " + (
        "sees a GPU" if torch.sees_gpu else "sees no GPU"
    )


def absent(name: str, cards: tuple[GpuInfo, ...]) -> str:
    return (
        "not there; only a GPU's kernels use it" if name in GPU_ONLY and not cards else "not there"
    )


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def tile_tables(names: list[str]) -> tuple[dict[str, str], list[Missing]]:
    """(tile table that an engine takes for each kind of GPU, tables that can't be used). An engine
    does not start until the latter are removed."""
    from slipstream.errors import ConfigError
    from slipstream.hub import tiles_folder
    from slipstream.spec.autotune_table import load_tiles

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
    """The values that device="auto", dtype="auto" and kernels="auto" are resolved to."""
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
    """Missing things, the most important first: every absent package, except those that only a GPU
    needs if there is none. Pure."""
    found = []
    if torch is None:
        lost = (
            "a GPU"
            if cards
            else "compression, evals, adapters, pictures, and what else `slipstream info` names"
        )
        what, extra = f"torch, for {lost}", "gpu" if cards else "torch"
        needed = bool(cards) or not has_cpu_kernels
        found.append(
            Missing(what=what, command=f"pip install 'slipstream[{extra}]'", needed=needed)
        )
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
    if cards and packages.get("triton") is None:
        found.append(
            Missing(what="triton, for the GPU kernels", command="pip install 'slipstream[gpu]'")
        )
    if not has_cpu_kernels:
        from slipstream.kernels.build import remedy

        lost = "no quantization, no 8-bit cache, GGUF's weights expanded, and torch's kernels are several times slower"
        found.append(
            Missing(what=f"the C++ kernels for the CPU (without them: {lost})", command=remedy())
        )
    for name in ("numpy", "safetensors", "tokenizers"):
        if name in packages and packages[name] is None:
            found.append(Missing(what=name, command=f"pip install {name}", needed=True))
    if packages.get("huggingface-hub") is None:
        found.append(
            Missing(what="ORG/NAME models from a hub", command="pip install 'slipstream[hub]'")
        )
    if "transformers" in packages and packages["transformers"] is None:
        uses = "transformers, for check-model and for bench --engine transformers"
        found.append(Missing(what=uses, command="pip install 'slipstream[dev]'"))
    if not has_model:
        found.append(Missing(what="the default model", command="slipstream pull smollm2"))
    if host.free_bytes < 2**30:
        found.append(Missing(what="1 GiB of free memory", command="end other programs"))
    return found
