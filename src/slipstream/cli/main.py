"""The command line. A verb's file has `add_arguments(parser)` and `run(args) -> exit code`, and is imported when it is named.

Exit codes: 0 done, 1 failed while running, 2 wrong argument or setting, 3 the model or its download, 130 interrupted.
With --json exactly one JSON object goes to standard output; for an error it is `{"error": {...}}`. `slipstream --help` answers
at once: it imports no verb, and a verb imports what is heavy only in `run`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slipstream import __version__
from slipstream.errors import (
    ConfigError,
    DownloadError,
    ModelError,
    RequestError,
    SlipstreamError,
    missing_torch,
)

VERBS = {  # the verb: its file, and its line of the help
    "run": ("run", "answer a prompt"),
    "chat": ("chat", "talk with a model"),
    "embed": ("embed", "texts as vectors"),
    "rerank": ("rerank", "documents in the order of how well they answer a query"),
    "serve": ("serve", "serve a model over OpenAI's HTTP API"),
    "launch": ("launch", "start a coding agent on a server of yours"),
    "keys": ("keys", "who may ask a server, and how much"),
    "monitoring": ("monitoring", "alerts for Prometheus and a board for Grafana"),
    "manifests": ("manifests", "files that run a server in Docker or Kubernetes"),
    "audit": ("audit", "check a server's audit log"),
    "fleet": ("fleet", "serve a model from many replicas as one"),
    "pull": ("pull", "fetch a model"),
    "info": ("info", "what a model is and needs"),
    "doctor": ("doctor", "what this machine has and lacks"),
    "check-model": ("check_model", "compare a checkpoint with transformers"),
    "compress": ("compress", "write a smaller checkpoint, with a report"),
    "compress-prompt": ("compress_prompt", "shorten a prompt"),
    "eval": ("evaluate", "perplexity of a model, or how far one is from another"),
    "bench": ("bench", "measure latency, throughput, a server"),
    "plan": ("plan", "what a model needs and carries, before buying or starting"),
    "sweep": ("sweep", "measure engines, models and loads from one file, with a page"),
    "optimize": ("optimize", "search for the best compression and settings, by measuring"),
    "build": ("build", "a folder that starts fast: packed weights, tiles, settings"),
    "tune": ("tune", "measure the GPU kernels' tiles for a model"),
}

MANY_OPTIONS = 12
"""With more of them the usage names none: the help has them under headings."""

SHORT = {
    "-m": "--model",
    "-c": "--ctx-size",
    "-t": "--threads",
    "-np": "--parallel",
    "-ngl": "--n-gpu-layers",
}
SHORT |= {"-tp": "--tp", "-pp": "--pp", "-dp": "--dp", "-ep": "--ep"}
"""Options of llama.cpp and SGLang that have a letter or two."""

OK, FAILED, USAGE, MODEL, INTERRUPTED = 0, 1, 2, 3, 130
ABOUT = "Compress, run, serve, measure and plan large language models."

EPILOG = "exit codes: 0 done, 1 failed while running, 2 wrong argument or setting, 3 model or download, 130 interrupted"


class UsageError(SlipstreamError):
    """The command line itself is wrong; `usage` is the verb's."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message, field="command line")
        self.usage = usage


class ArgumentParser(argparse.ArgumentParser):
    """argparse with four differences. An error is raised like every other, so that --json and the exit codes hold for it. An
    option is never guessed from its beginning. A verb's file is imported, and its arguments added, when they are needed.
    Options may stand between words."""

    def __init__(self, *, module: str | None = None, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})
        self._module = module

    def _complete(self) -> None:
        if self._module is not None:
            verb, self._module = importlib.import_module(f"slipstream.cli.{self._module}"), None
            self.description = verb.__doc__
            if hasattr(verb, "run"):  # else each kind of the verb sets its own handler
                self.set_defaults(handler=verb.run)
            verb.add_arguments(self)
        if (
            self.usage is None
            and sum(bool(action.option_strings) for action in self._actions) > MANY_OPTIONS
        ):
            words = self._get_formatter()
            words.add_usage(None, self._get_positional_actions(), [])
            self.usage = words.format_help().removeprefix("usage: ").strip() + " [options]"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what a verb does not know with that verb's usage; argparse would leave it to the parser above."""
        self._complete()
        found, unknown = super().parse_known_args(args, namespace)
        several = next(
            (action for action in self._get_positional_actions() if action.nargs in ("+", "*")),
            None,
        )
        if several is not None and unknown[:1] == ["--"]:
            getattr(found, several.dest).extend(unknown[1:])  # words after it are no options
            unknown = []
        if several is not None and all(word == "-" or not word.startswith("-") for word in unknown):
            getattr(found, several.dest).extend(
                unknown
            )  # argparse takes words only up to the first option between them
            unknown = []
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(message + self._hint(message), self.format_usage().strip())

    def _hint(self, message: str) -> str:
        """What was likely meant by an unknown option, verb or choice that is named in argparse's message."""
        import difflib
        import re

        if message.startswith("unrecognized arguments"):
            from slipstream.arguments import NEEDLESS, SETTINGS

            words, known = (
                [SHORT.get(w, w) for w in re.findall(r"(?<!\S)--?[a-zA-Z][\w-]*", message)],
                self._all_options(),
            )
            if "--model" in words:  # the verbs that know this option take several words
                return f"; the model stands without it: {self.prog} MODEL"
            others = {
                f"--{name}".replace("_", "-"): f"--{ours}".replace("_", "-")
                for name, ours in SETTINGS.items()
            }
            reasons = {f"--{name}".replace("_", "-"): reason for name, reason in NEEDLESS.items()}
            if "--max-model-len" in known and (
                needless := [reasons[word] for word in words if word in reasons]
            ):
                return f"; {needless[0]}"
            words = [others[word] if others.get(word) in known else word for word in words]
        elif "ignored explicit argument" in message:
            return "; it takes no value"
        else:
            words = re.findall(r"invalid choice: '(.*)' \(choose from", message)
            known = set(re.findall(r"[\w.:-]+", message.partition("(choose from")[2]))
        bare = {
            option.removeprefix("--"): option for option in sorted(known)
        }  # the dashes are alike in all
        near = [
            bare[found]
            for word in words
            for found in difflib.get_close_matches(word.removeprefix("--"), bare, n=1)
        ]
        return f"; did you mean {', '.join(near)}?" if near else ""

    def _all_options(self) -> set[str]:
        self._complete()
        found = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    found |= parser._all_options()
        return found


def build_parser(verbs: Iterable[str] = VERBS) -> ArgumentParser:
    """Builds the parser of these verbs. argparse looks for translations of each one's help on the disk."""
    parser = ArgumentParser(prog="slipstream", description=ABOUT, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    parser.add_argument("--debug", action="store_true", help="on an error, show the traceback")
    sub = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in verbs:
        module, text = VERBS[verb]
        sub.add_parser(verb, module=module, help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Without `argv` it is what the process is for, so a verb may fork it."""
    words = list(sys.argv[1:] if argv is None else argv)
    # --debug may stand anywhere before a lone "--", and must work where the command line itself is wrong.
    options = words[: words.index("--")] if "--" in words else words
    debug, json = "--debug" in options, "--json" in options
    words = [*(w for w in options if w != "--debug"), *words[len(options) :]]
    args = argparse.Namespace()
    try:
        args = build_parser(words[:1] if words and words[0] in VERBS else VERBS).parse_args(words)
        args.owns_process = argv is None
        from slipstream.costs.hardware import bound_spinning

        bound_spinning()  # before torch loads
        code: int = args.handler(args)
        sys.stdout.flush()  # here, where a closed pipe can still be told from success
        return code
    except KeyboardInterrupt:
        if json:
            from slipstream.cli.console import print_json

            print_json({"error": {"type": "Interrupted", "message": "interrupted", "field": None}})
        return INTERRUPTED
    except BrokenPipeError:
        from slipstream.cli.console import drop_output

        drop_output()  # who read it has gone
        return FAILED
    except Exception as error:
        if isinstance(error, SlipstreamError):
            note_file(error, args)
        return report(error, json=json, debug=debug)


def note_file(error: SlipstreamError, args: argparse.Namespace) -> None:
    """Of a setting that an engine folder's file holds, and the command line does not, a note says which file."""
    field, model = error.field, getattr(args, "model", None)
    if not field or hasattr(args, field) or not isinstance(model, str):
        return
    from slipstream.config.engine_folder import file_of

    if (file := file_of(Path(model), field)) is not None and str(file) not in error.message:
        error.add_note(f"it is set in {file}")


def report(error: Exception, *, json: bool, debug: bool) -> int:
    """One clear line on standard error (with --json also an object on standard output); the exit code."""
    if (without := missing_torch(error)) is not None:
        error = without
    elif not isinstance(error, SlipstreamError):
        from slipstream.files import disk_refusal

        if (refused := disk_refusal(error)) is not None:
            error = ConfigError(refused)
    known = isinstance(error, SlipstreamError)
    message = (
        str(error)
        if known
        else f"internal error: {type(error).__name__}: {error} (--debug shows where)"
    )
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
        with contextlib.suppress(ConfigError):  # a full disk: it has been told on standard error
            print_json(
                {"error": {"type": type(error).__name__, "message": message, "field": field}}
            )
    return exit_code(error)


def exit_code(error: Exception) -> int:
    if isinstance(error, (UsageError, ConfigError, RequestError)):
        return USAGE
    if isinstance(error, (ModelError, DownloadError)):
        return MODEL
    return FAILED
