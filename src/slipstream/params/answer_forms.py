"""The form of an answer: a schema, an expression, a grammar; and the markers of its reasoning. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from slipstream.base.suggesting import suggesting_init
from slipstream.errors import RequestError
from slipstream.params.checks import is_flag


@suggesting_init
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an answer. Exactly one of these is given:

    `json`: a JSON schema, as text, a dict or a bool.
    `regex`: a regular expression for the whole answer.
    `choice`: texts, one of which is the answer.
    `grammar`: EBNF as in llama.cpp, or Lark.
    `json_object`: any JSON object.

    The others modify it:

    `whitespace_pattern`: a regular expression for the text between two tokens of JSON.
    `disable_any_whitespace`: no text between them.
    `around`: a Lark grammar that contains the answer as @answer, for example after reasoning.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    around: str | None = None

    def __post_init__(self) -> None:
        def refuse(message: str, name: str) -> RequestError:
            return RequestError(message, field=f"structured_outputs.{name}")

        if isinstance(self.json, (dict, bool)):
            try:
                object.__setattr__(self, "json", json.dumps(self.json, ensure_ascii=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise refuse(f"json is not a JSON schema: {error}", "json") from None
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        texts = ("json", "regex", "grammar", "whitespace_pattern", "around")
        for name in texts:
            if not isinstance(value := getattr(self, name), (str, type(None))):
                raise refuse(f"{name} must be a text, got {value!r}", name)
        choice = self.choice
        if choice is not None and not (
            isinstance(choice, tuple) and choice and all(isinstance(c, str) and c for c in choice)
        ):
            raise refuse(f"choice must be a list of non-empty texts, got {choice!r}", "choice")
        given = [n for n in ("json", "regex", "choice", "grammar") if getattr(self, n) is not None]
        given += ["json_object"] * bool(self.json_object)
        if len(given) != 1:
            found = " and ".join(given) or "none"
            message = (
                f"give exactly one of json, regex, choice, grammar and json_object, got {found}"
            )
            raise RequestError(message, field="structured_outputs")
        for name in ("json_object", "disable_any_whitespace"):
            if not is_flag(getattr(self, name)):
                raise refuse(f"{name} must be True or False, got {getattr(self, name)!r}", name)
        if given[0] not in ("json", "json_object"):
            for name in ("disable_any_whitespace", "whitespace_pattern"):
                if getattr(self, name):
                    raise refuse(f"{name} is for json and json_object", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningMarkers:
    """The texts around a model's reasoning, by which its tokens are counted.

    `opened`: the prompt has begun the reasoning. A text of `interrupts` ends it, as `end` does. With
    `channels` the reasoning is harmony's channel "analysis", and these are the others.
    `shows_special`: special tokens are part of the text.
    """

    begin: str = ""
    end: str = ""
    opened: bool = False
    interrupts: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    shows_special: bool = True
