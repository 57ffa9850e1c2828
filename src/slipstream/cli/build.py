"""`slipstream build MODEL --out DIR`: makes a folder from which an engine starts fast, here or on another
machine.

DIR has the checkpoint, the settings given here (serve.yaml), weights packed for this machine, and on a GPU
its tile table and its compiled kernels. `--gpu-kernels` compiles them for GPUs of other machines. `slipstream
serve DIR`, `run DIR` and `LLM("DIR")` need nothing else. It also runs on another machine: what depends on the
machine is then chosen and packed again, and a message says so."""

from __future__ import annotations

import argparse
from pathlib import Path

from slipstream.base.files import sole_writer
from slipstream.cli.console import phases, print_info, print_json, size
from slipstream.cli.options import MODEL_HELP, add_engine_options, add_output_options, engine_args
from slipstream.config import EngineArgs, num_ranks
from slipstream.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make")
    parser.add_argument(
        "--tune-seconds",
        type=float,
        default=120.0,
        metavar="X",
        help="for the tiles of a GPU's kernels; 0: none (default: 120)",
    )
    parser.add_argument(
        "--gpu-kernels",
        metavar="ARCH,...",
        help="compile GPU kernels for these: sm_80, sm_89, sm_90, sm_100; no GPU is needed (default: this machine's GPU)",
    )
    add_output_options(parser)
    add_engine_options(
        parser.add_argument_group("engine (as in LLM(...)), kept in the folder"),
        without=("skip_tokenizer_init", "load_format", "chat_template"),
    )


def run(args: argparse.Namespace) -> int:
    from slipstream.hub import machine_folder
    from slipstream.optimize.folder import build_folder, kinds_of_gpus
    from slipstream.worker.device import detect

    if args.tune_seconds < 0:
        raise ConfigError("tune_seconds must not be negative", field="tune_seconds")
    settings = engine_args(args)
    info = detect(settings.device, machine_folder())
    out = Path(args.out).expanduser()
    with sole_writer(out), phases(f"build {args.model}") as on_phase:

        def tune(placed: EngineArgs, folder: Path) -> None:
            from slipstream.cli.tune import tune_tiles
            from slipstream.config.engine_folder import TILES_NAME

            def on_tile(done: int, total: int) -> None:
                on_phase(f"tiles, {done} of {total}")

            tune_tiles(placed, info, folder / TILES_NAME, args.tune_seconds, on_tile)

        tunes = info.is_cuda and args.tune_seconds > 0 and not settings.deterministic
        kernels = [] if args.gpu_kernels is None else args.gpu_kernels.split(",")
        if args.gpu_kernels is None and info.compute_capability is not None:
            kernels = kinds_of_gpus([info.compute_capability])
        built = build_folder(
            settings, out, tune=tune if tunes else None, kernels=kernels, progress=on_phase
        )
    folder = built.folder
    if args.json:
        print_json(
            {
                "out": out,
                "bytes": built.num_bytes,
                "packed_bytes": built.packed_bytes,
                "start_s": built.start_s,
                "settings": folder.settings,
                "chosen": folder.chosen,
                "graph_sizes": folder.graph_sizes,
                "tiles": folder.tiles,
                "kernels": built.kernels,
                "machine": folder.machine,
            }
        )
        return 0
    unpacked = "the weights are used as they are stored"
    if num_ranks(settings) > 1:
        unpacked = "several ranks round and pack theirs at each start"
    rows = [
        ("size", size(built.num_bytes)),
        ("packed weights", size(built.packed_bytes) if built.packed_bytes else f"none: {unpacked}"),
        (
            "settings",
            ", ".join(f"{k}={v}" for k, v in folder.settings.items()) or "none of your own",
        ),
        ("chosen for this machine", ", ".join(f"{k}={v}" for k, v in folder.chosen.items())),
        ("an engine starts in", f"{built.start_s:.2f} s"),
        ("serve it", f"slipstream serve {out}"),
    ]
    if built.kernels:
        rows.insert(2, ("compiled kernels", ", ".join(built.kernels)))
    if folder.graph_sizes:
        rows.insert(
            4, ("graphs", f"{len(folder.graph_sizes)} sizes up to {max(folder.graph_sizes)}")
        )
    print_info(str(out), rows)
    return 0
