"""`slipstream pull MODEL`: downloads a model, checks it, and stores it in the cache.

A model that was downloaded before is compared with the hub's newest commit, and changed files are
downloaded. Without a network the stored one is used."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from slipstream.cli.console import print_json, say, size
from slipstream.cli.models import fetch_model
from slipstream.errors import DownloadError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="a short name (slipstream list --all), ORG/NAME or ORG/NAME:QUANT on a hub, or a path (which is only checked)",
    )
    parser.add_argument(
        "--hub", metavar="URL", help="another hub with the same API, such as a mirror"
    )
    parser.add_argument(
        "--download-dir", metavar="DIR", help="keep it here instead of the user's cache folder"
    )
    parser.add_argument(
        "--json", action="store_true", help="print exactly one JSON object on standard output"
    )


def run(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    path = fetched(args.model, args.download_dir, args.hub)
    from slipstream.spec.description import read_spec

    seconds = time.perf_counter() - begin
    # raises an error with the reason if the download is not a supported model
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


def fetched(name: str, download_dir: str | None, hub: str | None) -> Path:
    """Path of the model's folder or file, at the hub's newest commit if the hub is reachable."""
    from slipstream.hub import find_cached

    here = find_cached(name, download_dir=download_dir)
    try:
        return fetch_model(name, download_dir, hub, refresh=True)
    except DownloadError as error:
        if here is None or not here.exists():
            raise
        say(f"slipstream: the one that is here stays: {error}")
        return here


def files_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    return sum(
        f.stat().st_size for f in ([path] if path.is_file() else path.rglob("*")) if f.is_file()
    )
