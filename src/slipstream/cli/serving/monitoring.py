"""`slipstream monitoring DIR`: writes alerts for Prometheus and a dashboard for Grafana, for
servers of `slipstream serve`; and the files that run both in containers."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from slipstream.cli.console import print_json, write_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", help="where to write the files")
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
    text = "also write compose.monitoring.yaml: Prometheus and Grafana with these files, for Docker Compose"
    parser.add_argument("--compose", action="store_true", help=text)
    text = "with --compose: the server's address as Prometheus sees it (default: slipstream:8000, of `slipstream manifests`)"
    parser.add_argument("--target", metavar="HOST:PORT", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    import json

    import yaml

    from slipstream.errors import ConfigError
    from slipstream.server.operations.monitoring import (
        BOARD,
        COMPOSE,
        RULES,
        ServiceObjectives,
        board,
        compose,
        rules,
    )

    ttft_s, itl_s = round(args.ttft_ms / 1e3, 9), round(args.itl_ms / 1e3, 9)
    objectives = ServiceObjectives(ttft_s=ttft_s, itl_s=itl_s, share=round(args.objective / 100, 9))
    folder, target = Path(args.dir), args.target or "slipstream:8000"
    if args.target and not args.compose:
        raise ConfigError("--target is for --compose; add it", field="target")
    if not re.fullmatch(r"[\w.-]+:\d{1,5}", target):
        message = f"--target must be HOST:PORT, such as slipstream:8000, got {target!r}"
        raise ConfigError(message, field="target")
    texts = {
        RULES: yaml.safe_dump(rules(objectives), sort_keys=False, width=1000),
        BOARD: json.dumps(board(), indent=1) + "\n",
    }
    for name, made in (compose(target) if args.compose else {}).items():
        texts[name] = yaml.safe_dump(made, sort_keys=False, width=1000)
    write_files(folder, texts)
    written = {"rules": str(folder / RULES), "board": str(folder / BOARD)}
    if args.compose:
        written["compose"] = str(folder / COMPOSE)
    if args.json:
        print_json(written)
    else:
        print(
            f"{written['rules']}: for rule_files of Prometheus\n{written['board']}: for Grafana to import"
        )
        if args.compose:
            print(
                f"{written['compose']}: docker compose -f {folder / 'compose.yaml'} -f {written['compose']} up"
            )
    return 0
