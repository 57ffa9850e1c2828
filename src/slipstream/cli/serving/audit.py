"""`slipstream audit verify|show|export FILE`: checks that an audit log (`serve --audit-log`) is
complete, shows its entries about a request, and exports its rated answers as data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from slipstream.cli.console import print_json

FILE_HELP = "the server's --audit-log; rotated files next to it are read, too"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what to do", metavar="KIND", required=True)
    verify = kinds.add_parser("verify", help="check the chain, through all rotated files")
    verify.add_argument("file", metavar="FILE", help=FILE_HELP)
    verify.add_argument(
        "--expect", metavar="HASH", help="a hash noted earlier, which must still be there"
    )
    verify.set_defaults(handler=run_verify)
    show = kinds.add_parser("show", help="the lines of a request, with the feedback on it")
    show.add_argument("file", metavar="FILE", help=FILE_HELP)
    show.add_argument("request", metavar="ID", help="an answer's id, or its x-request-id")
    show.set_defaults(handler=run_show)
    export = kinds.add_parser("export", help="rated answers with their conversations, as JSONL")
    export.add_argument("file", metavar="FILE", help=FILE_HELP)
    export.add_argument("out", metavar="OUT", help="the file that is written")
    export.add_argument(
        "--rating",
        choices=("up", "down", "all"),
        default="up",
        help="which are exported (default: up, to train on)",
    )
    export.add_argument(
        "--raters",
        action="append",
        default=[],
        metavar="KEY",
        help="a key whose ratings count for each answer, by its id (keys list) or 8 letters of it, or 'any'; "
        "may be repeated; those of other keys count for their own requests alone",
    )
    export.set_defaults(handler=run_export)
    for kind in (verify, show, export):
        kind.add_argument("--json", action="store_true", help="print one JSON object")


def run_verify(args: argparse.Namespace) -> int:
    from slipstream.server.operations.audit import START, ChainError, records

    count, last, kinds, seen = 0, START, dict[str, int](), args.expect is None
    for record in records(Path(args.file)):
        count, last = count + 1, record["hash"]
        kind = str(record.get("kind"))
        kinds[kind] = kinds.get(kind, 0) + 1
        seen = seen or record["hash"] == args.expect
    if not seen:
        message = (
            f"the hash {args.expect[:64]!r} is not there: lines were cut off, or it is another log"
        )
        raise ChainError(message, field="expect")
    if args.json:
        print_json({"lines": count, "head": last, "kinds": kinds})
    else:
        told = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
        print(f"the chain is whole: {count} lines ({told})\nits last hash: {last}")
    return 0


def run_show(args: argparse.Namespace) -> int:
    from slipstream.errors import ConfigError
    from slipstream.server.operations.audit import records

    id_ = args.request[-32:]
    found: list[dict[str, Any]] = [
        r for r in records(Path(args.file)) if id_ in (r.get("id"), r.get("request"))
    ]
    if not found:
        raise ConfigError(f"{args.file} has no entry about {args.request[:100]!r}", field="request")
    if args.json:
        print_json({"records": found})
    else:
        for record in found:
            print(
                "  ".join(
                    f"{name}={value}"
                    for name, value in record.items()
                    if name not in ("hash", "previous")
                )
            )
    return 0


def run_export(args: argparse.Namespace) -> int:
    import msgspec

    from slipstream.base.files import write_whole, writing
    from slipstream.errors import ConfigError
    from slipstream.server.operations import rated
    from slipstream.server.operations.audit import records, rotated

    log, out = Path(args.file), Path(args.out).expanduser()
    if out.resolve() in {part.resolve() for part in (log, *rotated(log))}:
        raise ConfigError(f"{args.out} is the log itself; name another file", field="out")
    skipped = rated.Skipped()
    wanted = None if args.rating == "all" else args.rating
    found = list(rated.rows(records(log), skipped, rating=wanted, raters=args.raters))
    with writing(args.out, "out"):  # readable only by its owner, like the log
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in found)
        write_whole(out, lines, mode=0o600)
    if args.json:
        print_json({"rows": len(found), "skipped": dict(skipped)})
    else:
        print(f"{len(found)} rated answers: {args.out}")
        for why, count in skipped.most_common():
            print(f"left out: {count} ({why})")
    return 0
