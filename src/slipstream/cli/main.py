"""The command line. Each verb's file has `register(sub)`, which sets `handler(args) -> exit code`.

Exit codes: 0 done, 1 failed while running, 2 wrong argument or setting, 3 the model or its download, 130 interrupted.
With --json exactly one JSON object goes to standard output, in case of an error `{"error": {...}}`. Nothing heavy is
imported before a handler runs: `slipstream --help` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from slipstream import __version__
from slipstream.cli import (
    bench,
    chat,
    check_model,
    compress,
    compress_prompt,
    doctor,
    embed,
    evaluate,
    info,
    pull,
    run,
    serve,
    tune,
)
from slipstream.errors import ConfigError, DownloadError, ModelError, RequestError, SlipstreamError
from slipstream.plan.hardware import bound_spinning

VERBS = (run, chat, embed, serve, pull, info, doctor, check_model, compress, compress_prompt, evaluate, bench, tune)

OK, FAILED, USAGE, MODEL, INTERRUPTED = 0, 1, 2, 3, 130
EPILOG = "exit codes: 0 done, 1 failed while running, 2 wrong argument or setting, 3 model or download, 130 interrupted"


class UsageError(SlipstreamError):
    """The command line itself is wrong; `usage` is the verb's."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message, field="command line")
        self.usage = usage


class Parser(argparse.ArgumentParser):
    """argparse, but an error is raised like every other, so that --json and the exit codes hold for it too, and an option is
    never guessed from its beginning."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """What a verb does not know is refused here, with the verb's usage; argparse would leave it to the parser above."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        words = re.findall(r"--[\w-]+", message) if message.startswith("unrecognized arguments") else []
        near = [m for word in words for m in difflib.get_close_matches(word, self._all_options(), n=1)]
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise UsageError(message + hint, self.format_usage().strip())

    def _all_options(self) -> set[str]:
        found = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    found |= parser._all_options()
        return found


def build_parser() -> Parser:
    parser = Parser(prog="slipstream", description="Run, serve and measure large language models.", epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    parser.add_argument("--debug", action="store_true", help="on an error, show the traceback")
    sub = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        verb.register(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # --debug may stand anywhere before a lone "--", and must work where the command line itself is wrong.
    options = words[: words.index("--")] if "--" in words else words
    debug, json = "--debug" in options, "--json" in options
    words = [*(w for w in options if w != "--debug"), *words[len(options) :]]
    bound_spinning()
    try:
        args = build_parser().parse_args(words)
        code: int = args.handler(args)
        sys.stdout.flush()  # here, where a closed pipe can still be told from success
        return code
    except KeyboardInterrupt:
        if json:
            from slipstream.cli.console import print_json

            print_json({"error": {"type": "Interrupted", "message": "interrupted", "field": None}})
        return INTERRUPTED
    except BrokenPipeError:
        # Who read our output has gone. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        return report(error, json=json, debug=debug)


def report(error: Exception, *, json: bool, debug: bool) -> int:
    """One clear line on standard error (with --json also an object on standard output); the exit code."""
    known = isinstance(error, SlipstreamError)
    message = str(error) if known else f"internal error: {type(error).__name__}: {error} (--debug shows where)"
    if debug:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, UsageError):
        first, *more = error.usage.splitlines()
        print(f"{first} … (--help shows all)" if more else first, file=sys.stderr)
    print("slipstream: " + "; ".join([message, *getattr(error, "__notes__", ())]), file=sys.stderr)
    if json:
        from slipstream.cli.console import print_json

        field = getattr(error, "field", None)
        print_json({"error": {"type": type(error).__name__, "message": message, "field": field}})
    return exit_code(error)


def exit_code(error: Exception) -> int:
    if isinstance(error, (UsageError, ConfigError, RequestError)):
        return USAGE
    if isinstance(error, (ModelError, DownloadError)):
        return MODEL
    return FAILED
