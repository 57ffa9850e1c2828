"""`slipstream chat [MODEL]`: a conversation in the terminal. The end of the input, or /quit, ends
it.

Earlier turns stay in the KV cache, so each turn computes only its new tokens. Ctrl-C stops an
answer; between answers the first asks for confirmation, and the second ends the conversation. From
a pipe, each line of standard input is a turn. Text of several lines is enclosed in \"\"\". If the
model accepts images, the path of an image in a message adds that image."""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import difflib
import json
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.base.files import parse_json
from slipstream.cli.console import print_json, say
from slipstream.cli.models import fetch_model
from slipstream.cli.options import (
    MODEL_HELP,
    SAMPLING_HELP,
    SAMPLING_TITLE,
    TEXT_ONLY,
    add_engine_options,
    add_output_options,
    add_sampling_options,
    engine_args,
    sampling_params,
)
from slipstream.errors import ConfigError, ContextLengthError, RequestError, SlipstreamError
from slipstream.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from slipstream import LLM, SamplingParams
    from slipstream.cli.answers.answer import Message, Speed

DEFAULTS: dict[str, Any] = {"max_tokens": None}  # None: up to the end of the context
HELP = """/help            these lines
/clear           forget the conversation (the system message stays); also /reset
/regenerate      answer the last message again
/system TEXT     set the system message; without TEXT, remove it
/set NAME VALUE  a sampling setting, such as temperature 0.2; without words, show them
/model NAME      go on with another model; without NAME, show it
/save FILE       write the conversation as JSON
/load FILE       go on with one that was saved
/quit            end; also /exit, /bye and Ctrl-D
\"\"\"              begins and ends text of several lines
a picture's path  in a message, shows the picture to a model that sees"""
COMMANDS = {
    **{
        name: name
        for name in (
            "help",
            "clear",
            "regenerate",
            "system",
            "set",
            "model",
            "save",
            "load",
            "quit",
        )
    },
    "reset": "clear",
    "exit": "quit",
    "bye": "quit",
    "retry": "regenerate",
    "?": "help",
}
"""Words that may follow the slash, and the command of each."""

PICTURES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "commands in the chat:\n" + HELP
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
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
    if args.prompt:
        hint = f"slipstream run {args.model} {shlex.quote(' '.join(args.prompt))}"
        raise ConfigError(
            f"chat takes no prompt: type it in the conversation, or write {hint}", field="prompt"
        )
    sampling_params(args, **DEFAULTS)  # raises an error for a wrong value before the start
    fetch_model(args.model, getattr(args, "download_dir", None))
    with contextlib.closing(Engines(args)) as engines:
        llm, sampling = engines.open(args.model)
        conversation = Conversation(
            llm, sampling, args.system, quiet=args.json, model=args.model, engines=engines
        )
        # raises an error for a model without a chat template before the first turn
        conversation.template("")
        if sys.stdin.isatty():
            say(f"{args.model} on {llm.config.device.info.name}. /help lists the commands.")
        conversation.loop()
        if args.json:
            print_json(
                {
                    "model": conversation.model,
                    "messages": conversation.messages,
                    "turns": conversation.speeds,
                }
            )
    return 0


class Engines:
    """Starts the engine of a chat, and replaces it by that of another model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._opened = args, contextlib.ExitStack()

    def fetch(self, name: str) -> None:
        fetch_model(name, getattr(self._args, "download_dir", None))

    def open(self, name: str) -> tuple[LLM, SamplingParams]:
        """Start a model's engine after the running one has ended, whose memory it needs."""
        from slipstream.cli.answers.answer import open_llm

        self._opened.close()
        self._args.model = name
        llm, _ = self._opened.enter_context(open_llm(engine_args(self._args, max_num_seqs=1)))
        return llm, sampling_params(self._args, llm.get_default_sampling_params(), **DEFAULTS)

    def close(self) -> None:
        self._opened.close()


@dataclass
class Conversation:
    """The history of a chat. `take` processes a typed line."""

    llm: LLM
    sampling: SamplingParams
    system: str | None
    quiet: bool = False
    model: str = ""
    engines: Engines | None = None
    history: list[Message] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return [
            *([{"role": "system", "content": self.system}] if self.system else []),
            *self.history,
        ]

    def template(self, text: str) -> str:
        from slipstream.cli.answers.answer import apply_template

        return apply_template(self.llm, [*self.messages, {"role": "user", "content": text}])

    def loop(self) -> None:
        from slipstream.cli.answers.terminal import Lines

        lines, asked = Lines(self.complete), False
        try:
            while True:
                try:
                    line = lines.read()
                except KeyboardInterrupt:
                    if asked or not lines.interactive:
                        raise
                    asked = True
                    say("\n(Ctrl-C again, Ctrl-D or /quit ends)")
                    continue
                asked = False
                if line is None or not self.take(line.strip()):
                    return
        finally:
            lines.close()

    def complete(self, before: str, word: str) -> list[str]:
        """Completions of a word that follows `before`: commands, names, and files."""
        from glob import escape, glob

        first = before.split()[:1]
        if not before.strip() and word.startswith("/") and "/" not in word[1:]:
            return [f"/{name}" for name in sorted({*COMMANDS.values()})]
        if first == ["/set"]:
            return [*SAMPLING_HELP, "system"]
        if first == ["/model"]:
            from slipstream.hub.listing import list_models

            return [model.name for model in list_models()]
        found = glob(escape(os.path.expanduser(word)) + "*")
        return [f"{name}/" if Path(name).is_dir() else name for name in sorted(found)]

    def take(self, line: str) -> bool:
        """Process a line. False ends the conversation. A line that begins with the path of a file
        is a message."""
        if not line.startswith("/") or os.path.isfile(line.split()[0]):
            if line:
                self.turn(line)
            return True
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        command = COMMANDS.get(word[1:].lower())
        if command == "quit":
            return False
        if command is None:
            near = difflib.get_close_matches(word[1:].lower(), COMMANDS, n=1)
            say(f"{word} is no command" + (f"; did you mean /{near[0]}?" if near else f"\n{HELP}"))
        elif command == "help":
            say(HELP)
        elif command == "clear":
            self.history.clear()
        elif command == "system":
            self.system = rest or None
        else:
            actions = {
                "set": self.set,
                "regenerate": self.regenerate,
                "load": self.load,
                "save": self.save,
                "model": self.change_model,
            }
            actions[command](rest)
        return True

    def set(self, text: str) -> None:
        """Set a sampling parameter, `NAME VALUE`; also in Ollama's form, with `parameter` before."""
        name, _, value = text.removeprefix("parameter ").strip().partition(" ")
        name, value = name.replace("-", "_"), value.strip()
        if not name:
            for known in SAMPLING_HELP:
                say(f"{known:<20}{getattr(self.sampling, known)}")
        elif name == "system":
            self.system = value.strip("\"'") or None
        elif name not in SAMPLING_HELP:
            near = difflib.get_close_matches(name, SAMPLING_HELP, n=1)
            hint = (
                f"; did you mean {near[0]}?" if near else f"; there are {', '.join(SAMPLING_HELP)}"
            )
            say(f"/set has no {name}{hint}")
        else:
            try:
                changed: dict[str, Any] = {name: None if value == "none" else json.loads(value)}
                self.sampling = dataclasses.replace(self.sampling, **changed)
            except (RequestError, ConfigError) as error:
                say(f"/set {name}: {error}")
            except (ValueError, RecursionError):
                say(f"/set {name}: {value[:80]!r} is no number")

    def regenerate(self, _: str) -> None:
        """Generate another answer to the last message."""
        while self.history and self.history[-1]["role"] != "user":
            self.history.pop()
        if not self.history:
            say("there is no message to answer again")
            return
        self.turn(self.history.pop()["content"])

    def load(self, name: str) -> None:
        """Continue a conversation that /save wrote."""
        if not name:
            say("/load needs a file name")
            return
        try:
            found = parse_json(Path(os.path.expanduser(name)).read_bytes())
        except OSError as error:
            say(f"cannot load {name}: {error.strerror}")
            return
        except ValueError as error:
            say(f"cannot load {name}: it is not JSON: {error}")
            return
        is_ours = isinstance(found, list) and all(
            isinstance(m, dict)
            and m.get("role") in ("system", "user", "assistant")
            and isinstance(m.get("content"), (str, list))
            for m in found
        )
        if not is_ours:
            say(f"cannot load {name}: it is no list of messages with role and content")
            return
        system = [m["content"] for m in found if m["role"] == "system"]
        self.system = system[0] if system else None
        self.history = [m for m in found if m["role"] != "system"]
        say(f"loaded {len(found)} messages from {name}")

    def change_model(self, name: str) -> None:
        """Continue with another model. If it can't be loaded, the previous one is started again."""
        if not name or self.engines is None:
            say(self.model)
            return
        before = self.model
        try:
            self.engines.fetch(name)
        except SlipstreamError as error:
            say(f"{error}; going on with {before}")
            return
        try:
            self.llm, self.sampling = self.engines.open(name)
            self.template("")
        except SlipstreamError as error:
            say(f"{error}; going on with {before}")
            self.llm, self.sampling = self.engines.open(before)
            return
        self.model = name
        say(f"now {name}")

    def content(self, text: str) -> str | list[dict[str, Any]]:
        """Content of a message: the text, or if the model accepts images, the text and the images
        whose paths it contains."""
        words, pictures = [], []
        for word in text.split(" "):
            path = Path(os.path.expanduser(word.strip("'\"")))
            kind = PICTURES.get(path.suffix.lower())
            if kind is not None and os.path.isfile(path):
                data = base64.b64encode(path.read_bytes()).decode()
                url = f"data:image/{kind};base64,{data}"
                pictures.append({"type": "image_url", "image_url": {"url": url}})
            else:
                words.append(word)
        sees = self.llm.config.media is not None and self.llm.core.description.spec.sees
        if pictures and not sees:
            say(f"({self.model} sees no pictures: it gets the path)")
            return text
        if not pictures:
            return text
        say(f"({len(pictures)} picture{'s' if len(pictures) > 1 else ''})")
        return [*pictures, {"type": "text", "text": " ".join(words)}]

    def turn(self, text: str | list[dict[str, Any]]) -> None:
        from slipstream.cli.answers.answer import stream_answer
        from slipstream.cli.answers.terminal import answer_writer

        parts: list[str] = []
        writer = None if self.quiet else answer_writer()

        def write(piece: str) -> None:
            parts.append(piece)
            if writer is not None:
                writer.write(piece)
            elif not self.quiet:
                print(piece, end="", flush=True)

        content = self.content(text) if isinstance(text, str) else text
        self.history.append({"role": "user", "content": content})
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
            if writer is not None:
                writer.end()
            # The request was cancelled. The text received so far stays in the history.
            self.history.append({"role": "assistant", "content": "".join(parts)})
            say("\n(stopped)")
            return
        self.history.append({"role": "assistant", "content": "".join(parts)})
        self.speeds.append(speed)
        if writer is not None:
            writer.end()
        if not self.quiet:
            if writer is None:
                print(flush=True)
            if sys.stderr.isatty():
                say(speed.line())

    def save(self, name: str) -> None:
        if not name:
            say("/save needs a file name")
            return
        try:
            text = json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n"
            Path(os.path.expanduser(name)).write_text(text, "utf-8", errors="replace")
            say(f"saved {len(self.messages)} messages to {name}")
        except (OSError, ValueError) as error:
            say(f"cannot save to {name}: {getattr(error, 'strerror', None) or error}")
