"""`slipstream monitoring DIR`: writes alerts for Prometheus and a dashboard for Grafana, for
servers of `slipstream serve`."""

from __future__ import annotations

import argparse
from pathlib import Path

from slipstream.cli.console import print_json, write_files

RULES, BOARD = "slipstream-rules.yml", "slipstream-dashboard.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", help=f"where to write {RULES} and {BOARD}")
    parser.add_argument(
        "--ttft-ms",
        type=float,
        default=1000.0,
        metavar="X",
        help="objective of the TTFT (default: 1000)",
    )
    parser.add_argument(
        "--itl-ms",
        type=float,
        default=100.0,
        metavar="X",
        help="objective of the ITL (default: 100)",
    )
    text = "percent of requests that are to keep each, and to have no error (default: 99)"
    parser.add_argument("--objective", type=float, default=99.0, metavar="X", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    import json

    import yaml

    from slipstream.server.operations.monitoring import ServiceObjectives, board, rules

    ttft_s, itl_s = round(args.ttft_ms / 1e3, 9), round(args.itl_ms / 1e3, 9)
    objectives = ServiceObjectives(ttft_s=ttft_s, itl_s=itl_s, share=round(args.objective / 100, 9))
    folder = Path(args.dir)
    texts = {
        RULES: yaml.safe_dump(rules(objectives), sort_keys=False, width=1000),
        BOARD: json.dumps(board(), indent=1) + "\n",
    }
    write_files(folder, texts)
    written = {"rules": str(folder / RULES), "board": str(folder / BOARD)}
    if args.json:
        print_json(written)
    else:
        print(
            f"{written['rules']}: for rule_files of Prometheus\n{written['board']}: for Grafana to import"
        )
    return 0
