"""`slipstream doctor`: shows this machine's hardware and software, what Slipstream will use, what
is missing and the command that installs it.

The exit code is 1 if something is missing without which no model can run."""

from __future__ import annotations

import argparse
import platform
import sys
from typing import TYPE_CHECKING

from slipstream.cli.console import counted, print_info, print_json, size
from slipstream.cli.options import add_output_options
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.costs.hardware import GpuInfo
    from slipstream.worker.start.diagnosis import Diagnosis, TorchInfo


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
    from slipstream.worker.start.diagnosis import can_run, diagnose

    found = diagnose(measure=args.measure)
    print_json(_document(found)) if args.json else _show(found)
    return 0 if can_run(found.missing) else 1


def _document(found: Diagnosis) -> dict[str, object]:
    from slipstream import __version__
    from slipstream.hub import DEFAULT_MODEL, cache_folder

    return {
        "slipstream": __version__,
        "python": platform.python_version(),
        "host": found.host,
        "gpus": found.gpus,
        "tile_tables": found.tile_tables,
        "torch": found.torch,
        "packages": found.packages,
        "cache_folder": cache_folder(),
        "default_model": {"name": DEFAULT_MODEL, "path": found.default_model},
        "will_use": found.will_use,
        "cpu_measured": found.cpu_measured,
        "missing": found.missing,
    }


def _show(found: Diagnosis) -> None:
    print_info("this machine", _machine_rows(found))
    if found.will_use is not None:
        print()
        used = [(name.replace("_", " "), str(value)) for name, value in found.will_use.items()]
        print_info("will be used", used)
    if found.cpu_measured is not None:
        print()
        rows = [
            (
                f"{t.kernels}, {t.weights}, {counted(t.num_threads, 'thread')}",
                f"{t.decode_ms:.2f} ms a token, {t.prompt_ms:.1f} ms for 64 tokens",
            )
            for t in found.cpu_measured.timings
        ]
        rule = "an older instruction set or fewer threads are taken if 20% faster, twice"
        print_info(f"CPU as measured, on a small decoder ({rule})", rows)
    print()
    if found.missing:
        print_info("missing", [(m.what, m.command) for m in found.missing])
    else:
        print("nothing is missing")


def _machine_rows(found: Diagnosis) -> list[tuple[str, str]]:
    from slipstream import __version__
    from slipstream.hub import DEFAULT_MODEL, cache_folder

    host, cards, build = found.host, found.gpus, found.torch
    cores = f"{host.num_cores} of {host.num_cpus} for this process (affinity and control group)"
    packages = {name: there for name, there in found.packages.items() if name != "torch"}
    return [
        ("slipstream", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("system", host.system),
        ("CPU", f"{host.cpu}; {', '.join(host.cpu_features) or 'no known features'}"),
        ("cores", cores),
        ("memory", f"{size(host.memory_bytes)}, of which {size(host.free_bytes)} is free"),
        *(("GPU", f"{g.name}, {size(g.memory_bytes)}, driver {g.driver}") for g in cards),
        *((f"tiles of {name}", table) for name, table in found.tile_tables.items()),
        *([] if cards else [("GPU", "none that nvidia-smi shows")]),
        ("torch", "not there" if build is None else f"{build.version}, {cuda_text(build)}"),
        *((name, there or absent(name, cards)) for name, there in packages.items()),
        ("cache folder", str(cache_folder())),
        (f"model {DEFAULT_MODEL}", str(found.default_model or "not fetched yet")),
    ]


def run_fleet(args: argparse.Namespace) -> int:
    """Check running servers. Returns 0 if nothing is wrong."""
    from slipstream.cli.options import read_keys
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


def cuda_text(torch: TorchInfo) -> str:
    if torch.cuda_build is None:
        return "CPU build"
    return f"built for CUDA {torch.cuda_build}, " + (
        "sees a GPU" if torch.sees_gpu else "sees no GPU"
    )


def absent(name: str, cards: tuple[GpuInfo, ...]) -> str:
    from slipstream.worker.start.diagnosis import GPU_ONLY

    return (
        "not there; only a GPU's kernels use it" if name in GPU_ONLY and not cards else "not there"
    )
