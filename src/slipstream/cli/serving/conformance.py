"""`slipstream conformance URL`: checks whether a server conforms to the API protocols that it offers.

    slipstream conformance http://127.0.0.1:8000
    slipstream conformance http://127.0.0.1:8080 --protocol messages --only tools --only errors.model

Works with any server that has OpenAI's, Anthropic's or Ollama's API. A check passes, fails, or is
unsupported: the server rejects the feature with an error of its own, or the check can't decide. The exit code
is 1 if one fails. docs/conformance.md lists the checks, and results of other servers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from slipstream.cli.console import print_json
from slipstream.cli.options import add_key_options, add_output_options, given_key

if TYPE_CHECKING:
    from slipstream.conformance.registry import CheckResult

NAMES = ("chat", "completions", "responses", "messages", "ollama")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="the server, with or without /v1")
    parser.add_argument("--model", help="a model that it serves (default: the first it lists)")
    add_key_options(parser)
    parser.add_argument(
        "--protocol",
        action="append",
        choices=NAMES,
        metavar="P",
        help=f"only this one; may be repeated: {', '.join(NAMES)} (default: all)",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="CHECK",
        help="an area or a check, also with *; may be repeated (default: all)",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=32,
        metavar="N",
        help="requests at once in the checks of load; overload sends four times as many (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="longest time of a request, in seconds (default: %(default)g)",
    )
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    import asyncio
    import dataclasses

    from slipstream.conformance.registry import CHECKS, FAIL, PASS, UNSUPPORTED
    from slipstream.conformance.runner import run as run_checks
    from slipstream.conformance.session import CheckedServer

    def show(result: CheckResult) -> None:
        if not args.json:
            row = f"{result.outcome:<13}{result.check:<24}{result.protocol:<13}{result.why}"
            print(row.rstrip(), flush=True)

    async def main() -> list[CheckResult]:
        key, timeout_s = given_key(args), args.timeout
        async with CheckedServer(args.url, api_key=key, timeout_s=timeout_s) as endpoint:
            return await run_checks(
                endpoint,
                model=args.model,
                protocols=args.protocol or (),
                only=args.only or (),
                concurrency=args.concurrency,
                on_result=show,
            )

    results = asyncio.run(main())
    counts = {word: sum(r.outcome == word for r in results) for word in (PASS, FAIL, UNSUPPORTED)}
    if args.json:
        rows = [{**dataclasses.asdict(r), "about": CHECKS[r.check].about} for r in results]
        print_json({"url": args.url, **counts, "results": rows})
    else:
        print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return 1 if counts[FAIL] else 0
