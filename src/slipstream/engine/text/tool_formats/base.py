"""The common part of the formats of tool calls: the parser of streams, and the writing of grammars.

A format is one class for the way in which a family of models writes its calls. `call` is the grammar of one call, `between` and
`whole` are those of several, and `script` parses them. A script is a generator. It reads text by `yield from parser.until(…)`,
`parser.char()` and others, which wait for more text if necessary. It reports its findings by `parser.content(…)`,
`parser.begin_call(…)` and `parser.arguments(…)`. So the findings depend on the text alone, and not on how the text was cut into
pieces.

Whitespace around calls and reasoning is no content.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from slipstream.engine.grammars.schema_promises import promise
from slipstream.errors import RequestError

MAX_NAME = 256
"""Characters of a function's name."""

MAX_GRAMMAR = 256 * 1024
"""Characters of the schemas in one grammar. A longer grammar is refused anyhow, after it was written on the event loop."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class BeginCall:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, which are JSON."""

    index: int
    text: str


Event: TypeAlias = Content | Reasoning | BeginCall | Arguments
Script: TypeAlias = Generator[None, None, None]


class _Text:
    """Text whose whitespace at the end is held back, until more text or the end of the answer comes."""

    def __init__(self, make: Callable[[str], Event], events: list[Event]) -> None:
        self._make, self._events = make, events
        self._held = ""
        self.strips_begin = False

    def add(self, text: str) -> None:
        text = self._held + text
        if self.strips_begin:
            text = text.lstrip()
        body = text.rstrip()
        self._held = text[len(body) :]
        if body:
            self.strips_begin = False
            self._events.append(self._make(body))

    def cut(self) -> None:
        """Something else follows: whitespace on both of its sides is dropped."""
        self._held, self.strips_begin = "", True

    def end(self) -> None:
        if self._held:
            self._events.append(self._make(self._held))
        self._held = ""


class Parser:
    """Reads one answer piece by piece. What stands between `think`'s markers is reasoning; with `thinking` the prompt has
    opened it. The rest is `script`'s."""

    def __init__(
        self,
        script: Callable[[Parser], Script] | None,
        think: tuple[str, str] | None = None,
        *,
        thinking: bool = False,
    ) -> None:
        self._buffer, self._ended = "", False
        self._events: list[Event] = []
        self._content, self._reasoning = (
            _Text(Content, self._events),
            _Text(Reasoning, self._events),
        )
        self.num_calls = 0
        self._run = self._script(script, think, thinking)
        self._go_on()

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        return self._go_on()

    def finish(self) -> list[Event]:
        """The answer has ended."""
        self._ended = True
        events = self._go_on()
        self._content.end()
        return events + self._take()

    def _go_on(self) -> list[Event]:
        next(self._run, None)
        return self._take()

    def _take(self) -> list[Event]:
        events = self._events.copy()
        self._events.clear()
        return events

    def _script(
        self,
        script: Callable[[Parser], Script] | None,
        think: tuple[str, str] | None,
        thinking: bool,
    ) -> Script:
        if think is not None:
            yield from self._think(*think, thinking)
        if script is not None:
            yield from script(self)
        yield from self.until((), self.content)

    def _think(self, begin: str, end: str, thinking: bool) -> Script:
        if not thinking and not (yield from self.opens_with(begin)):
            return
        self._reasoning.cut()
        if (yield from self.until((end,), self.reasoning)):
            self._content.cut()

    # --- What scripts read ------------------------------------------------------------------------------------------

    def until(
        self, markers: Sequence[str], out: Callable[[str], None]
    ) -> Generator[None, None, str]:
        """Give `out` the text up to the first of the markers, which is taken and returned; "" if the text ends before."""
        while True:
            found = min(
                ((at, m) for m in markers if (at := self._buffer.find(m)) >= 0), default=None
            )
            held = (
                0 if self._ended else max((_overlap(self._buffer, m) for m in markers), default=0)
            )
            if found is not None and found[0] <= len(self._buffer) - held:
                at, marker = found
                text, self._buffer = self._buffer[:at], self._buffer[at + len(marker) :]
                if text:
                    out(text)
                return marker
            given = len(self._buffer) - held
            text, self._buffer = self._buffer[:given], self._buffer[given:]
            if text:
                out(text)
            if self._ended:
                return ""
            yield

    def peek(self) -> Generator[None, None, str]:
        """The next character; "" at the end."""
        while not self._buffer and not self._ended:
            yield
        return self._buffer[:1]

    def char(self) -> Generator[None, None, str]:
        """Take it."""
        c = yield from self.peek()
        self._buffer = self._buffer[1:]
        return c

    def opens_with(self, marker: str) -> Generator[None, None, bool]:
        """Whether the text begins with whitespace and `marker`, which are taken then."""
        while True:
            text = self._buffer.lstrip()
            if text.startswith(marker):
                self._buffer = text[len(marker) :]
                return True
            if self._ended or not marker.startswith(text):
                return False
            yield

    def spaces(self, out: Callable[[str], None]) -> Script:
        """Whitespace goes to `out`."""
        while (c := (yield from self.peek())) and c.isspace():
            out((yield from self.char()))

    def value(self, out: Callable[[str], None]) -> Script:
        """One JSON value goes to `out` as it is written. It may be broken: a string ends at its quote, a list or object at its
        bracket, anything else before a comma, a bracket, whitespace or a marker."""
        depth, first = 0, True
        while c := (yield from self.peek()):
            if not depth and not first:
                return
            if not depth and c not in '"{[':
                while (c := (yield from self.peek())) and c not in ",]}<" and not c.isspace():
                    out((yield from self.char()))
                return
            first = False
            out((yield from self.char()))
            if c == '"':
                yield from self._rest_of_string(out)
            else:
                depth += (c in "{[") - (c in "}]")

    def value_after(self, begin: str, out: Callable[[str], None]) -> Script:
        """`value`, of which `begin` was taken already."""
        self._buffer = begin + self._buffer
        yield from self.value(out)

    def _rest_of_string(self, out: Callable[[str], None]) -> Script:
        while c := (yield from self.char()):
            out(c)
            if c == '"':
                return
            if c == "\\":
                out((yield from self.char()))

    def call_object(
        self, begin: str, arguments: tuple[str, ...] = ("arguments",)
    ) -> Generator[None, None, bool]:
        """A call as one JSON object with "name" and one of `arguments`. Its arguments go out as they come, once the name is
        known. False: it is none, and what was read, behind `begin`, is content."""
        raw, name, kept = [begin], "", list[str]()
        out, begun, given, closed = raw.append, False, False, False
        yield from self.spaces(out)
        if (yield from self.peek()) == "{":
            out((yield from self.char()))
            while True:
                yield from self.spaces(out)
                c = yield from self.peek()
                if c == ",":
                    out((yield from self.char()))
                    continue
                if c != '"':
                    break
                key, value = list[str](), list[str]()
                yield from self.value(key.append)
                out("".join(key))
                yield from self.spaces(out)
                if (yield from self.peek()) != ":":
                    break
                out((yield from self.char()))
                yield from self.spaces(out)
                what = _loads("".join(key))
                if what in arguments and not given:
                    given = True
                    c = yield from self.peek()
                    if name and c == "{":
                        begun = True
                        self.begin_call(name)
                        yield from self.value(self.arguments)
                        continue
                    yield from self.value(kept.append)
                    out("".join(kept))
                else:
                    yield from self.value(value.append)
                    out("".join(value))
                    if what == "name" and not name:
                        found = _loads("".join(value))
                        name = found if isinstance(found, str) and len(found) <= MAX_NAME else ""
            closed = (yield from self.peek()) == "}"
            if closed:
                out((yield from self.char()))
        if begun:
            return True
        if not (name and closed):
            self.content("".join(raw))
            return False
        self.begin_call(name)
        text = "".join(kept)
        spelled = _loads(text) if text.startswith('"') else None
        self.arguments(spelled if isinstance(spelled, str) else text or "{}")
        return True

    # --- What scripts find ------------------------------------------------------------------------------------------

    def content(self, text: str) -> None:
        self._content.add(text)

    def reasoning(self, text: str) -> None:
        self._reasoning.add(text)

    def begin_call(self, name: str) -> None:
        self._content.cut()
        self._events.append(BeginCall(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(Arguments(self.num_calls - 1, text))

    def call(self, name: str, arguments: Mapping[str, Any]) -> None:
        """A whole call."""
        self.begin_call(name)
        self.arguments(json.dumps(arguments, ensure_ascii=False))


def drop(text: str) -> None:
    """Receiver of text that is dropped."""


def is_name(text: str) -> bool:
    return re.fullmatch(r"[\w.-]{1,256}", text) is not None


def _overlap(text: str, marker: str) -> int:
    """Length of the end of `text` that may be the beginning of `marker`."""
    return next(
        (n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0
    )


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# --- Formats --------------------------------------------------------------------------------------------------------


class Writer:
    """Grammars in Lark's form. `special` gives the id of a special token by its text: the grammar then names the token, since
    its text alone would not be it."""

    def __init__(self, special: Callable[[str], int | None]) -> None:
        self._special = special
        self.rules: dict[str, str] = {}
        self._num_characters = 0  # of schemas

    def text(self, text: str) -> str:
        token = self._special(text)
        return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"

    def texts(self, *parts: str) -> str:
        """One behind the other; each that is a special token is one."""
        return " ".join(self.text(part) for part in parts if part)

    def up_to(self, marker: str) -> str:
        """Any text, and then the marker, which is not in it."""
        name = f"to_{len(self.rules)}"
        if self._special(marker) is not None:
            self.rules["ANY"] = "/(?s:.*)/"
            self.rules[name] = f"ANY {self.text(marker)}"
        else:
            escaped = re.escape(marker).replace("/", r"\/").replace("\\\n", r"\n")
            self.rules[f"{name}[lazy]"] = f"/(?s:.*){escaped}/"
        return name

    def spaces(self) -> str:
        self.rules["SPACES"] = r"/[ \n]{1,8}/"
        return "SPACES?"

    def schema(self, schema: Mapping[str, Any]) -> str:
        text = json.dumps(schema)
        self.count(len(text))  # $defs are written again for each argument
        own = json.loads(text)
        options = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}", **promise(own)}
        return "%json " + json.dumps({"x-guidance": options, **own}, ensure_ascii=False)

    def count(self, num_characters: int) -> None:
        """Add characters of schemas. Raise a RequestError if all of them are more than `MAX_GRAMMAR`."""
        self._num_characters += num_characters
        if self._num_characters > MAX_GRAMMAR:
            raise RequestError(
                f"the schemas of the functions' arguments, each with its $defs, have more than {MAX_GRAMMAR} characters; offer "
                "fewer tools, or write smaller $defs",
                field="tools",
            )

    def lark(self, start: str) -> str:
        return "\n".join(
            [f"start: {start}", *(f"{name}: {rule}" for name, rule in self.rules.items())]
        )


class ToolFormat(ABC):
    """How one family of models writes tool calls."""

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]
    """Texts that the parser looks for. Where they are special tokens, they must not be left out of the text."""
    trigger: ClassVar[str] = ""
    """Text that calls begin with. Text before it is free."""
    other: ClassVar[str] = ""
    """Regular expression of all answers without calls, for formats without a trigger, where calls
    are the whole answer."""

    reasons: ClassVar[bool] = False
    """Reasoning is part of the format."""

    @classmethod
    @abstractmethod
    def matches(cls, template: str) -> bool:
        """Whether a chat template asks for this format."""

    def calls(self, tools: Sequence[Tool], writer: Writer, *, parallel: bool) -> str:
        """The grammar of one call or, if `parallel`, several, behind the first one's trigger: a Lark expression, whose rules go
        into `writer`."""
        for i, tool in enumerate(tools):
            writer.rules[f"call_{i}"] = self.call(tool, writer)
        writer.rules["call"] = " | ".join(f"call_{i}" for i in range(len(tools)))
        between = self.between(writer) if parallel else ""
        return self.whole(f"call ({between} call)*" if between else "call", writer)

    @abstractmethod
    def call(self, tool: Tool, writer: Writer) -> str:
        """The grammar of a call."""

    def between(self, writer: Writer) -> str:
        """Grammar of the text before each call but the first. Empty if there can be only one
        call."""
        return f'"\\n" {writer.text(self.trigger)}'

    def whole(self, calls: str, writer: Writer) -> str:
        """Calls with what stands around all of them."""
        return calls

    def before(self, writer: Writer) -> str:
        """The grammar of what may stand before calls or an answer, if the format says."""
        return ""

    def final(self, writer: Writer) -> str:
        """Grammar of the text that an answer without calls begins with."""
        return ""

    def free(self, writer: Writer) -> str:
        """The grammar of an answer without calls, where calls are the whole answer."""
        return f"/{self.other}/"

    @abstractmethod
    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script: ...
