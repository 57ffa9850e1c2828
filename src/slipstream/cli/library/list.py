"""`slipstream list`: the models on this machine, most recently used first; with --all also those
with a short name that can be downloaded."""

from __future__ import annotations

import argparse

from slipstream.cli.console import print_json, say
from slipstream.cli.models import ago, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all", action="store_true", help="also the short names whose model is not here"
    )
    parser.add_argument(
        "--download-dir", metavar="DIR", help="look here instead of in the user's caches"
    )
    parser.add_argument(
        "--json", action="store_true", help="print exactly one JSON object on standard output"
    )


def run(args: argparse.Namespace) -> int:
    from slipstream.hub import cache_folder, hub_folder
    from slipstream.hub.listing import list_models
    from slipstream.hub.names import TABLE
    from slipstream.hub.packages import Packaged
    from slipstream.hub.store import megabytes

    models = list_models(args.download_dir)
    here = {model.name for model in models}
    others = [entry for name, entry in TABLE.items() if name not in here] if args.all else []
    if args.json:
        print_json(
            {
                "models": [
                    {
                        "name": m.name,
                        "path": m.path,
                        "bytes": m.num_bytes,
                        "quant": m.quant,
                        "used_at": m.used_at,
                        "complete": m.is_complete,
                        "source": "package"
                        if isinstance(m.source, Packaged)
                        else f"hub:{m.source.repo}",
                    }
                    for m in models
                ],
                "names": [
                    {
                        "name": e.name,
                        "also": e.also,
                        "about": e.about,
                        "mb": e.mb,
                        "license": e.license,
                        "for": e.uses,
                    }
                    for e in others
                ],
                "folders": [cache_folder(args.download_dir), hub_folder(args.download_dir)],
            }
        )
        return 0
    if models:
        rows = [["NAME", "SIZE", "QUANT", "USED"]]
        for m in models:
            quant = m.quant or ("-" if m.is_complete else "unfinished")
            rows.append([m.name, megabytes(m.num_bytes), quant, ago(m.used_at)])
        print_table(rows)
        say(f"(in {cache_folder(args.download_dir)} and {hub_folder(args.download_dir)})")
    else:
        print("no models yet; `slipstream list --all` shows what a short name fetches")
    if others:
        print("\nto be fetched by `slipstream pull NAME` (sizes are rounded):")
        rows = [["NAME", "SIZE", "FOR", "WHAT", "LICENCE"]]
        for e in others:
            rows.append([e.name, megabytes(e.mb * 10**6), ",".join(e.uses), e.about, e.license])
        print_table(rows)
    return 0
