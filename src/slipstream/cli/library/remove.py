"""`slipstream rm MODEL...`: removes models from the caches, after asking.

Files shared with another model stay. Folders and files given as paths are never removed."""

from __future__ import annotations

import argparse
import sys

from slipstream.cli.console import print_json, say
from slipstream.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="a name as `slipstream list` shows it"
    )
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.add_argument(
        "--download-dir", metavar="DIR", help="look here instead of in the user's caches"
    )
    parser.add_argument(
        "--json", action="store_true", help="print exactly one JSON object on standard output"
    )


def run(args: argparse.Namespace) -> int:
    from slipstream.cli.serving.running import running_servers
    from slipstream.hub import local_path
    from slipstream.hub.listing import find_models, remove_model
    from slipstream.hub.names import named
    from slipstream.hub.store import megabytes

    for name in args.models:
        if named(name) is None and local_path(name) is not None:
            raise ConfigError(f"{name} is a path; remove it yourself", field="models")
    found = {m.path: m for name in args.models for m in find_models(name, args.download_dir)}
    for model in found.values():
        for server in running_servers():
            if model.name in server.models or str(model.path) in server.models:
                say(
                    f"slipstream: {server.url} (process {server.pid}) serves {model.name} until it ends"
                )
    if not args.yes:
        what = ", ".join(f"{m.name} ({megabytes(m.num_bytes)})" for m in found.values())
        if not sys.stdin.isatty():
            raise ConfigError(
                f"not asked without a terminal: to remove {what} add --yes", field="yes"
            )
        print(f"remove {what}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            say("nothing was removed")
            return 1
    freed = sum(remove_model(model, args.download_dir) for model in found.values())
    names = [model.name for model in found.values()]
    if args.json:
        print_json({"removed": names, "freed_bytes": freed})
    else:
        print(f"removed {', '.join(names)}: {megabytes(freed)} are free again")
    return 0
