"""The parser of the command line: argparse with additions. It imports nothing heavy."""

from __future__ import annotations

import argparse
import importlib
from typing import Any, NoReturn

from slipstream.errors import SlipstreamError

MANY_OPTIONS = 12
"""Number of options above which the usage line lists none, because the help lists them under headings."""

SHORT = {
    "-m": "--model",
    "-c": "--ctx-size",
    "-t": "--threads",
    "-np": "--parallel",
    "-ngl": "--n-gpu-layers",
}
SHORT |= {"-tp": "--tp", "-pp": "--pp", "-dp": "--dp", "-ep": "--ep"}
"""Options of llama.cpp and SGLang that have a letter or two."""


OTHER_VERBS = {
    "create": "slipstream compress MODEL --recipe R --out DIR writes a model of your own; a system message is --system",
    "cp": "a folder or a .gguf file is a model by its path: cp -r it; serve --served-model-name gives it another name",
    "push": "nothing is published from here; hf upload ORG/NAME DIR does it",
    "stop": "slipstream ps shows the server's process: end it with Ctrl-C, or with kill PROCESS",
    "signin": "hf auth login keeps the hub's token, which gated models need",
    "signout": "hf auth logout",
    "login": "hf auth login keeps the hub's token, which gated models need",
    "generate": "slipstream run MODEL PROMPT",
    "ls": "slipstream list",
    "remove": "slipstream rm MODEL",
    "delete": "slipstream rm MODEL",
    "quantize": "slipstream compress MODEL --recipe R --out DIR",
    "download": "slipstream pull MODEL",
    "complete": "slipstream run --raw [MODEL] TEXT",
    "embeddings": "slipstream embed MODEL TEXT",
}
"""Verbs of Ollama, vLLM and llama.cpp that Slipstream lacks, with the command to use instead."""


class Rare(str):
    """Help text of a rarely used option: `--help-all` shows it, `--help` doesn't."""

    __slots__ = ()


class _HelpAll(argparse.Action):
    """Option `--help` that also shows the rare options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, ArgumentParser)
        parser.shows_all = True
        parser.print_help()
        parser.exit()


class UsageError(SlipstreamError):
    """An error in the command line itself. `usage` is that of the verb."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message, field="command line")
        self.usage = usage


class _Paragraphs(argparse.HelpFormatter):
    """Help format that separates a description's paragraphs, and keeps the lines of indented commands."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        parts = text.strip().split("\n\n")
        return "\n\n".join(p if p.startswith("    ") else fill(p, width, indent) for p in parts)


class ArgumentParser(argparse.ArgumentParser):
    """argparse with these differences:

    1. An error is raised as an exception like every other, so that --json and the exit codes apply to it.
    2. Options can't be abbreviated.
    3. A verb's file is imported, and its arguments are added, when they are needed.
    4. Options may be between words.
    5. `--help` leaves out options whose help is `Rare`; `--help-all` shows them, too."""

    def __init__(self, *, module: str | None = None, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Paragraphs, **settings})
        self._module = module
        self.shows_all = False

    def _complete(self) -> None:
        if self._module is not None:
            verb, self._module = importlib.import_module(f"slipstream.cli.{self._module}"), None
            self.description = verb.__doc__
            if hasattr(verb, "run"):  # otherwise each kind of the verb sets its own handler
                self.set_defaults(handler=verb.run)
            verb.add_arguments(self)
        if "--help-all" not in self._option_string_actions and (rare := self._rare()):
            text = f"the same with {len(rare)} more options, rarely needed"
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help=text)
            self._optionals._group_actions.insert(1, self._optionals._group_actions.pop())
        if (
            self.usage is None
            and sum(bool(action.option_strings) for action in self._actions) > MANY_OPTIONS
        ):
            words = self._get_formatter()
            needed = [a for a in self._actions if a.required and a.option_strings]
            words.add_usage(None, [*self._get_positional_actions(), *needed], [])
            self.usage = words.format_help().removeprefix("usage: ").strip() + " [options]"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Raise an error with the verb's usage for an argument that the verb does not know;
        argparse would report it with the main parser's usage."""
        self._complete()
        found, unknown = super().parse_known_args(args, namespace)
        several = next(
            (action for action in self._get_positional_actions() if action.nargs in ("+", "*")),
            None,
        )
        if several is not None and unknown[:1] == ["--"]:
            getattr(found, several.dest).extend(unknown[1:])  # words after it are not options
            unknown = []
        if several is not None and all(word == "-" or not word.startswith("-") for word in unknown):
            # argparse accepts words only up to the first option between them
            getattr(found, several.dest).extend(unknown)
            unknown = []
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def _rare(self) -> list[argparse.Action]:
        """Options shown only by --help-all."""
        return [action for action in self._actions if isinstance(action.help, Rare)]

    def format_help(self) -> str:
        self._complete()
        hidden = [] if self.shows_all else [(action, action.help) for action in self._rare()]
        try:
            for action, _ in hidden:
                action.help = argparse.SUPPRESS
            return super().format_help()
        finally:
            for action, text in hidden:
                action.help = text

    def error(self, message: str) -> NoReturn:
        verb = message.removeprefix("argument VERB: invalid choice: '").partition("'")[0]
        if verb in OTHER_VERBS and message.startswith("argument VERB:"):
            told = f"there is no verb {verb!r}; instead: {OTHER_VERBS[verb]}"
            raise UsageError(told, self.format_usage().strip())
        raise UsageError(message + self._hint(message), self.format_usage().strip())

    def _hint(self, message: str) -> str:
        """Suggested spelling of an unknown option, verb or choice in argparse's message."""
        import difflib
        import re

        if message.startswith("unrecognized arguments"):
            from slipstream.base.other_engines import NEEDLESS, ONLY_PYTHON, SETTINGS

            words = [SHORT.get(w, w) for w in re.findall(r"(?<!\S)--?[a-zA-Z][\w-]*", message)]
            known = self._all_options()
            if not words and any(a.dest == "model" for a in self._get_positional_actions()):
                return f"; {self.prog} takes one model (slipstream serve takes several)"
            if "--model" in words:  # verbs with this option accept several words
                return f"; the model stands without it: {self.prog} MODEL"
            others = {
                f"--{name}".replace("_", "-"): f"--{ours}".replace("_", "-")
                for name, ours in SETTINGS.items()
            }
            without = {**NEEDLESS, **ONLY_PYTHON}
            reasons = {f"--{name}".replace("_", "-"): reason for name, reason in without.items()}
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
        # all of these begin with dashes
        bare = {option.removeprefix("--"): option for option in sorted(known)}
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
