"""`slipstream chat [MODEL]`: a conversation in the terminal. The end of the input, or /quit, ends
it.

Earlier turns stay in the KV cache, so each turn computes only its new tokens. Ctrl-C stops an
answer; between answers it ends the conversation. From a pipe, each line of standard input is a
turn."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.console import print_json, say
from slipstream.cli.models import fetch_model
from slipstream.cli.options import (
    MODEL_HELP,
    SAMPLING_TITLE,
    TEXT_ONLY,
    add_engine_options,
    add_output_options,
    add_sampling_options,
    engine_args,
    sampling_params,
)
from slipstream.errors import ConfigError, ContextLengthError, RequestError
from slipstream.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from slipstream import LLM, SamplingParams
    from slipstream.cli.answer import Message, Speed

DEFAULTS: dict[str, Any] = {"max_tokens": None}  # the rest of the context
HELP = """/reset        forget the conversation (the system message stays)
/system TEXT  set the system message; without TEXT, remove it
/save FILE    write the conversation as JSON
/help         these lines
/quit         end"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = (
        "commands in the chat:\n" + HELP,
        argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})"
    )
    # hidden: a user who gives a prompt is told to use `run`
    parser.add_argument("prompt", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "--system", metavar="TEXT", help="what the model is told before the conversation"
    )
    add_output_options(parser)
    add_sampling_options(parser.add_argument_group(SAMPLING_TITLE), **DEFAULTS)
    add_engine_options(parser, without=TEXT_ONLY)


def run(args: argparse.Namespace) -> int:
    from slipstream.cli.answer import open_llm

    if args.prompt:
        hint = f"slipstream run {args.model} {shlex.quote(' '.join(args.prompt))}"
        raise ConfigError(
            f"chat takes no prompt: type it in the conversation, or write {hint}", field="prompt"
        )
    sampling_params(args, **DEFAULTS)  # refuse a wrong value before the start
    fetch_model(args.model, getattr(args, "download_dir", None))
    with open_llm(engine_args(args, max_num_seqs=1)) as (llm, _):
        sampling = sampling_params(args, llm.get_default_sampling_params(), **DEFAULTS)
        conversation = Conversation(llm, sampling, args.system, quiet=args.json)
        # refuse a model without a chat template before the first turn
        conversation.template("")
        if sys.stdin.isatty():
            say(f"{args.model} on {llm.config.device.info.name}. /help lists the commands.")
        conversation.loop()
        if args.json:
            print_json(
                {
                    "model": args.model,
                    "messages": conversation.messages,
                    "turns": conversation.speeds,
                }
            )
    return 0


@dataclass
class Conversation:
    """The history, and what each typed line does to it."""

    llm: LLM
    sampling: SamplingParams
    system: str | None
    quiet: bool = False
    history: list[Message] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return [
            *([{"role": "system", "content": self.system}] if self.system else []),
            *self.history,
        ]

    def template(self, text: str) -> str:
        from slipstream.cli.answer import apply_template

        return apply_template(self.llm, [*self.messages, {"role": "user", "content": text}])

    def loop(self) -> None:
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401  (gives input() line editing and history)
        while True:
            try:
                line = input("> ") if interactive else sys.stdin.readline()
            except EOFError:
                say("")
                return
            if not interactive and not line:
                return
            if not self.take(line.strip()):
                return

    def take(self, line: str) -> bool:
        """Carry out a line. False ends the conversation."""
        if not line.startswith("/"):
            if line:
                self.turn(line)
            return True
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        if command == "/quit":
            return False
        if command == "/reset":
            self.history.clear()
        elif command == "/system":
            self.system = rest or None
        elif command == "/save":
            self.save(rest)
        else:
            say(HELP if command == "/help" else f"{command} is no command\n{HELP}")
        return True

    def turn(self, text: str) -> None:
        from slipstream.cli.answer import stream_answer

        parts: list[str] = []

        def write(piece: str) -> None:
            parts.append(piece)
            if not self.quiet:
                print(piece, end="", flush=True)

        self.history.append({"role": "user", "content": text})
        try:
            _, speed = stream_answer(self.llm, self.messages, self.sampling, write)
        except ContextLengthError as error:
            self.history.pop()
            say(f"{error}\n/reset makes room")
            return
        except RequestError as error:
            self.history.pop()
            say(str(error))
            return
        except KeyboardInterrupt:
            # The request was cancelled. The text so far stays.
            self.history.append({"role": "assistant", "content": "".join(parts)})
            say("\n(stopped)")
            return
        self.history.append({"role": "assistant", "content": "".join(parts)})
        self.speeds.append(speed)
        if not self.quiet:
            print(flush=True)
            if sys.stderr.isatty():
                say(speed.line())

    def save(self, name: str) -> None:
        if not name:
            say("/save needs a file name")
            return
        try:
            Path(name).expanduser().write_text(
                json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n", "utf-8"
            )
            say(f"saved {len(self.messages)} messages to {name}")
        except OSError as error:
            say(f"cannot save to {name}: {error.strerror}")
