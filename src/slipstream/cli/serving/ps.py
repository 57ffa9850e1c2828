"""`slipstream ps`: the servers of this user that run on this machine, with their models, device, memory
and address."""

from __future__ import annotations

import argparse

from slipstream.cli.console import print_json
from slipstream.cli.models import ago, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print exactly one JSON object on standard output"
    )


def run(args: argparse.Namespace) -> int:
    from slipstream.cli.serving.running import running_servers
    from slipstream.hub.store import megabytes

    servers = running_servers()
    if args.json:
        print_json({"servers": servers})
    elif not servers:
        print("no server runs; `slipstream serve MODEL` starts one")
    else:
        rows = [["MODEL", "MEMORY", "DEVICE", "URL", "PROCESS", "STARTED"]]
        for s in servers:
            memory = megabytes(s.memory_bytes)
            started = ago(s.started_at)
            if not s.states:
                rows.append([", ".join(s.models), memory, s.device, s.url, str(s.pid), started])
            for model in s.states:
                held = megabytes(model["memory_bytes"])
                told = f"{model['name']} ({model['state']})"
                rows.append([told, held, s.device, s.url, str(s.pid), started])
        print_table(rows)
    return 0
