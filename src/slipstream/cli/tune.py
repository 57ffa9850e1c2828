"""`slipstream tune MODEL`: measures tile sizes of the GPU's kernels for a model's shapes, and stores the
fastest for later starts.

Settings such as --quantization and --kv-cache-dtype decide what is measured. With --tensor-parallel-size one
rank's part of the model is measured, on one GPU. No weights are loaded: random ones of the same shapes are
used. The table is stored in the user's cache folder, one file per GPU model, where the next engine finds it
(--tile-table auto). Its tiles for other shapes stay."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.console import print_info, print_json, progress_bar
from slipstream.cli.options import MODEL_HELP, add_engine_options, add_output_options, engine_args
from slipstream.config import DeviceInfo, EngineArgs
from slipstream.errors import ConfigError
from slipstream.hub import DEFAULT_MODEL
from slipstream.spec.scheme import FORMAT_MAX, SCHEMES

if TYPE_CHECKING:
    from slipstream.kernels.triton.tuning import Tuning
    from slipstream.spec.devices.autotune_table import TileTable

UNUSED = (
    "tokenizer",
    "chat_template",
    "tile_table",
    "skip_tokenizer_init",
    "load_format",
    "seed",
    "kv_cache_bytes",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        metavar="X",
        help="begin no measurement later (default: 120)",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write the table here, instead of the user's cache folder"
    )
    add_output_options(parser)
    add_engine_options(parser, without=UNUSED)


def run(args: argparse.Namespace) -> int:
    from slipstream.hub import machine_folder, tiles_folder
    from slipstream.spec.devices.autotune_table import file_name
    from slipstream.worker.device import detect

    settings = engine_args(args)
    info = detect(settings.device, machine_folder())
    if not info.is_cuda:
        raise ConfigError(
            "only a GPU's kernels have tiles, and this device is a CPU; see `slipstream doctor`",
            field="device",
        )
    if args.seconds <= 0:
        raise ConfigError("seconds must be above 0", field="seconds")
    path = Path(args.out) if args.out else tiles_folder() / file_name(info.name)
    with progress_bar("measuring tiles") as progress:
        tuning, table, base = tune_tiles(settings, info, path, args.seconds, progress)
    if args.json:
        print_json(
            {
                "device": info.name,
                "path": path,
                "identity": table.over(base).identity,
                "num_measured": len(tuning.measured),
                "num_left": tuning.num_left,
                "found": [
                    {
                        "op": op,
                        "kind": kind,
                        "shape": shape,
                        "tile": m.tile,
                        "us": m.us,
                        "before_us": m.before_us,
                    }
                    for (op, kind, shape), m in tuning.found.items()
                ],
            }
        )
        return 0
    rows = [
        (
            f"{op} {kind} {' × '.join(map(str, shape))}",
            f"{m.before_us:.1f} → {m.us:.1f} µs with {m.tile}",
        )
        for (op, kind, shape), m in tuning.found.items()
    ]
    rows.append(
        (
            "measured",
            f"{len(tuning.measured)} shapes, {len(tuning.found)} of them with a faster tile",
        )
    )
    if tuning.num_left:
        rows.append(("no time or memory for", f"{tuning.num_left} shapes; give more --seconds"))
    rows.append(("table", f"{path}, {table.over(base).describe()} with those shipped"))
    print_info(info.name, rows)
    return 0


def tune_tiles(
    settings: EngineArgs,
    info: DeviceInfo,
    path: Path,
    seconds: float,
    progress: Callable[[int, int], None],
) -> tuple[Tuning, TileTable, TileTable]:
    """Measure tiles for a model's shapes and merge them into the table at `path`. Returns the
    measurements, the written table, and the table included in the package."""
    from slipstream.config import resolve
    from slipstream.hub import resolve_model, tiles_folder
    from slipstream.kernels.triton.tuning import tune_model
    from slipstream.spec.description import read_spec
    from slipstream.spec.devices.autotune_table import load_tiles, read_tiles, write_tiles
    from slipstream.spec.parallel import split_spec

    description = read_spec(resolve_model(settings.model, download_dir=settings.download_dir))
    config = resolve(settings, description, info)
    shard = config.parallel.shard(0)
    spec = dataclasses.replace(
        split_spec(description.spec, shard),
        vocab_size=shard.vocabulary(description.spec.vocab_size),
    )
    base = load_tiles("shipped", info.name, tiles_folder())
    if path.is_file():
        read_tiles(path, info.name)  # raises an error before the work if the file can't be extended
    tuning, made_by = tune_model(
        spec,
        SCHEMES[config.model.quantization] if config.model.quantization else None,
        base,
        device=info.device,
        dtype=config.model.dtype,
        cache=next((kind for kind in FORMAT_MAX if kind == config.cache.dtype), None),
        block_size=config.cache.block_size,
        max_model_len=config.model.max_model_len,
        max_num_seqs=config.scheduling.max_num_seqs,
        seconds=seconds,
        progress=progress,
    )
    own = (
        read_tiles(path, info.name)
        if path.is_file()
        else load_tiles("none", info.name, tiles_folder())
    )
    table = own.tuned(tuning.measured, tuning.found, made_by)
    write_tiles(table, path)
    return tuning, table, base
