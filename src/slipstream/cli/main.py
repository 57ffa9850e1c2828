"""The command line. A verb's file has `add_arguments(parser)` and `run(args) -> exit code`, and is
imported when the verb is named.

Exit codes: 0 done, 1 failed while running, 2 wrong argument or setting, 3 the model or its
download, 130 interrupted. With --json exactly one JSON object goes to standard output; for an error
it is `{"error": {...}}`. `slipstream --help` answers at once: it imports no verb, and a verb
imports heavy modules only in `run`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from slipstream import __version__
from slipstream.cli.parser import ArgumentParser, UsageError
from slipstream.errors import (
    ConfigError,
    DownloadError,
    ModelError,
    RequestError,
    SlipstreamError,
    missing_torch,
)

VERBS = {  # verb → (its file, its line in the help)
    "run": ("answers.run", "answer a prompt"),
    "chat": ("answers.chat", "talk with a model"),
    "embed": ("answers.embed", "texts as vectors"),
    "transcribe": ("answers.transcribe", "what is said in sounds, or subtitles of it"),
    "rerank": ("answers.rerank", "documents in the order of how well they answer a query"),
    "serve": ("serving.serve", "serve a model over OpenAI's HTTP API"),
    "launch": ("serving.launch", "start a coding agent on a server of yours"),
    "keys": ("serving.keys", "who may ask a server, and how much"),
    "monitoring": ("serving.monitoring", "alerts for Prometheus and a board for Grafana"),
    "manifests": ("serving.manifests", "files that run a server in Docker or Kubernetes"),
    "audit": ("serving.audit", "check a server's audit log, and export its rated answers"),
    "fleet": ("serving.fleet", "serve a model from many replicas as one"),
    "pull": ("library.pull", "fetch a model"),
    "list": ("library.list", "the models on this machine, and the short names"),
    "show": ("library.show", "what a model is: size, context, template, licence"),
    "rm": ("library.remove", "remove models"),
    "ps": ("serving.ps", "the servers that run"),
    "info": ("library.info", "what a model is and needs"),
    "doctor": ("doctor", "what this machine has and lacks"),
    "check-model": ("library.check_model", "compare a checkpoint with transformers"),
    "compress": ("compress", "write a smaller checkpoint, with a report"),
    "compress-prompt": ("compress_prompt", "shorten a prompt"),
    "eval": ("evaluate", "perplexity of a model, or how far one is from another"),
    "conformance": (
        "serving.conformance",
        "check whether a server keeps to OpenAI's, Anthropic's and Ollama's protocols",
    ),
    "verify": ("serving.verify", "check whether a server answers as the model itself would"),
    "bench": ("bench", "measure latency, throughput, a server"),
    "plan": ("plan", "what a model needs and carries, before buying or starting"),
    "sweep": ("bench.sweep", "measure engines, models and loads from one file, with a page"),
    "optimize": ("optimize", "search for the best compression and settings, by measuring"),
    "build": ("build", "a folder that starts fast: packed weights, tiles, settings"),
    "tune": ("tune", "measure the GPU kernels' tiles for a model"),
}

OK, FAILED, USAGE, MODEL, INTERRUPTED = 0, 1, 2, 3, 130
ABOUT = "Compress, run, serve, measure and plan large language models."

EPILOG = "exit codes: 0 done, 1 failed while running, 2 wrong argument or setting, 3 model or download, 130 interrupted"


def build_parser(verbs: Iterable[str] = VERBS) -> ArgumentParser:
    """Build the parser of these verbs. Fewer verbs are faster, because argparse searches
    translations of each one's help on disk."""
    parser = ArgumentParser(prog="slipstream", description=ABOUT, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    parser.add_argument("--debug", action="store_true", help="on an error, show the traceback")
    sub = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in verbs:
        module, text = VERBS[verb]
        sub.add_parser(verb, module=module, help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code. Without `argv` it runs the process's own command
    line; only then may a verb fork the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    # --debug may be anywhere before a lone "--", and must work even if the command line itself is
    # wrong.
    options = words[: words.index("--")] if "--" in words else words
    debug, json = "--debug" in options, "--json" in options
    words = [*(w for w in options if w != "--debug"), *words[len(options) :]]
    args = argparse.Namespace()
    try:
        if words and words[0] in VERBS:  # before the verb and its dependencies are imported
            from slipstream.cli.models import refuse_wrong_name

            refuse_wrong_name(words)
        args = build_parser(words[:1] if words and words[0] in VERBS else VERBS).parse_args(words)
        args.owns_process = argv is None
        from slipstream.costs.hardware import bound_spinning

        bound_spinning()  # before torch is loaded
        code: int = args.handler(args)
        sys.stdout.flush()  # here, where a closed pipe can still be distinguished from success
        return code
    except KeyboardInterrupt:
        if json:
            from slipstream.cli.console import print_json

            print_json({"error": {"type": "Interrupted", "message": "interrupted", "field": None}})
        return INTERRUPTED
    except BrokenPipeError:
        from slipstream.cli.console import drop_output

        drop_output()  # the reader has closed the pipe
        return FAILED
    except Exception as error:
        if isinstance(error, SlipstreamError):
            note_file(error, args)
        return report(error, json=json, debug=debug)


def note_file(error: SlipstreamError, args: argparse.Namespace) -> None:
    """Add the engine folder's file to the error, if the wrong setting is in it and not on the
    command line."""
    field, model = error.field, getattr(args, "model", None)
    if not field or hasattr(args, field) or not isinstance(model, str):
        return
    from slipstream.config.engine_folder import file_of

    if (file := file_of(Path(model), field)) is not None and str(file) not in error.message:
        error.add_note(f"it is set in {file}")


def report(error: Exception, *, json: bool, debug: bool) -> int:
    """Print one clear error line to standard error (with --json also an object to standard output).
    Returns the exit code."""
    if (without := missing_torch(error)) is not None:
        error = without
    elif not isinstance(error, SlipstreamError):
        from slipstream.base.files import disk_refusal

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
        with contextlib.suppress(ConfigError):  # a full disk was already reported on standard error
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
