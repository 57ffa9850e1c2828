"""Common code of tool-call formats: the streaming parser, and the grammar writer.

A format is a class that describes how a family of models writes calls. `call` is the grammar of one
call, `between` and `whole` those of several, and `script` parses them. A script is a generator. It
reads text by `yield from parser.until(…)`, `parser.char()` and others, which wait for more text if
necessary. It reports results by `parser.content(…)`, `parser.begin_call(…)` and
`parser.arguments(…)`. So results depend only on the text, not on how it was split into pieces.

Whitespace around calls and reasoning is dropped. A call truncated by the end of the answer is
dropped, too, or reported with a part of its arguments.
"""

from __future__ import annotations

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from slipstream.engine.grammars.schema_promises import promise
from slipstream.errors import RequestError
from slipstream.params.answer_forms import ReasoningMarkers

MAX_NAME = 256
"""Maximum characters of a function's name."""

MAX_GRAMMAR = 256 * 1024
"""Maximum characters of the schemas in one grammar. The grammar compiler refuses longer ones anyway, but only after they
were written on the event loop."""


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
    """The next piece of a call's arguments, as JSON text."""

    index: int
    text: str


Event: TypeAlias = Content | Reasoning | BeginCall | Arguments
Script: TypeAlias = Generator[None, None, None]


class _TrailingSpace:
    """Output text whose trailing whitespace is held back until more text or the end of the answer
    arrives."""

    def __init__(self, make: Callable[[str], Event], events: list[Event]) -> None:
        self._make, self._events = make, events
        self._held = list[str]()  # a list, since a model may write whitespace endlessly
        self.strips_begin = False

    def add(self, text: str) -> None:
        if self.strips_begin:
            text = text.lstrip()
        if body := text.rstrip():
            self._events.append(self._make("".join((*self._held, body))))
            self._held, self.strips_begin = [], False
        self._held.append(text[len(body) :])

    def cut(self) -> None:
        """Mark a boundary: whitespace before and after it is dropped."""
        self._held, self.strips_begin = [], True

    def end(self) -> None:
        if held := "".join(self._held):
            self._events.append(self._make(held))
        self._held = []


class Parser:
    """Parses one answer incrementally. Text between the markers of `think` is reasoning; with `thinking` the
    prompt has already opened it. A text of `interrupts` also ends reasoning, and is parsed again as what
    follows. The rest is parsed by `script`. Texts of `wraps` around an answer are dropped."""

    def __init__(
        self,
        script: Callable[[Parser], Script] | None,
        think: tuple[str, str] | None = None,
        *,
        thinking: bool = False,
        interrupts: Sequence[str] = (),
        wraps: Sequence[str] = (),
    ) -> None:
        self._buffer, self._ended, self._cut = "", False, False
        self._interrupts, self._wraps = tuple(interrupts), tuple(wraps)
        self._events: list[Event] = []
        self._content, self._reasoning = (
            _TrailingSpace(Content, self._events),
            _TrailingSpace(Reasoning, self._events),
        )
        self.num_calls = 0
        self._run = self._script(script, think, thinking)
        self._go_on()

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        return self._go_on()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Ends the answer. `cut`: it reached its maximum length, so an incomplete marker at its end
        is dropped."""
        self._ended, self._cut = True, cut
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
        opened = yield from self.opens_with(begin)  # some models repeat the opening marker
        if not thinking and not opened:
            # an end marker of reasoning that the prompt has already ended
            yield from self.opens_with(end)
            return
        self._reasoning.cut()
        if marker := (yield from self.until((end, *self._interrupts), self.reasoning)):
            self._content.cut()
            if marker != end:
                self.put_back(marker)

    # --- What scripts read ------------------------------------------------------------------------------------------

    def until(
        self, markers: Sequence[str], out: Callable[[str], None]
    ) -> Generator[None, None, str]:
        """Pass text to `out` up to the first of the markers. The marker is consumed and returned;
        "" if the text ends before one."""
        wraps = self._wraps if out == self.content else ()
        search = _search((*markers, *wraps))
        while True:
            found = search.first(self._buffer)
            held = 0 if self._ended else search.num_begun(self._buffer)
            if found is not None and found.start() <= len(self._buffer) - held:
                text, self._buffer = self._buffer[: found.start()], self._buffer[found.end() :]
                if text:
                    out(text)
                if found[0] in wraps:
                    self._content.cut()
                    continue
                return found[0]
            given = len(self._buffer) - held
            text, self._buffer = self._buffer[:given], self._buffer[given:]
            if self._cut and (begun := search.num_begun(text)) > 1:
                text = text[:-begun]  # a single character is too short to be called a beginning
            if text:
                out(text)
            if self._ended:
                return ""
            yield

    def put_back(self, text: str) -> None:
        """Put consumed text back to be read again."""
        self._buffer = text + self._buffer

    @property
    def at_end(self) -> bool:
        """Whether the answer has ended and only whitespace is unread."""
        return self._ended and not self._buffer.strip()

    @property
    def is_cut(self) -> bool:
        """Whether the answer was truncated at its maximum length."""
        return self._cut

    def refuse(self, opening: str, more: str = "") -> None:
        """Report as content a text that began like a call but is none. If the answer ends within the call,
        the text is dropped; an opening marker alone is dropped only if the answer was truncated."""
        if not self.at_end or not (more.strip() or self.is_cut):
            self.content(opening + more)

    def peek(self) -> Generator[None, None, str]:
        """The next character, without consuming it; "" at the end."""
        while not self._buffer and not self._ended:
            yield
        return self._buffer[:1]

    def char(self) -> Generator[None, None, str]:
        """The next character, which is consumed; "" at the end."""
        c = yield from self.peek()
        self._buffer = self._buffer[1:]
        return c

    def opens_with(self, marker: str, *, take: bool = True) -> Generator[None, None, bool]:
        """Whether whitespace and then `marker` come next. Both are consumed if so, unless `take` is false."""
        spaces = list[str]()
        while True:
            text = self._buffer.lstrip()
            if not text and not self._ended:
                spaces.append(self._buffer)
                self._buffer = ""
                yield
                continue
            is_begun = marker.startswith(text)
            if is_begun and text and self._ended and self._cut and text != marker:
                self._buffer = ""
                return False
            if text.startswith(marker) and take:
                self._buffer = text[len(marker) :]
                return True
            if self._ended or not is_begun or text == marker:
                self._buffer = "".join((*spaces, self._buffer))
                return text.startswith(marker)
            yield

    def spaces(self, out: Callable[[str], None]) -> Script:
        """Pass whitespace to `out`."""
        while (c := (yield from self.peek())) and c.isspace():
            out((yield from self.char()))

    def value(self, out: Callable[[str], None]) -> Script:
        """Pass one JSON value to `out`, verbatim. Invalid JSON is tolerated: a string ends at its
        quote, a list or object at its bracket, anything else before a comma, a bracket, whitespace
        or a marker."""
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
                yield from self.rest_of_string(out)
            else:
                depth += (c in "{[") - (c in "}]")

    def value_after(self, begin: str, out: Callable[[str], None]) -> Script:
        """Passes a JSON value to `out` like `value`, if its first character `begin` was already consumed."""
        self.put_back(begin)
        yield from self.value(out)

    def rest_of_string(self, out: Callable[[str], None]) -> Script:
        """Pass the rest of a JSON string to `out`, from after its opening quote to and with its closing
        quote."""
        while c := (yield from self.char()):
            out(c)
            if c == '"':
                return
            if c == "\\":
                out((yield from self.char()))

    def name(self) -> Generator[None, None, str]:
        """Consume and return the characters of a function's name."""
        found = list[str]()
        while (
            (c := (yield from self.peek()))
            and (c.isalnum() or c in "_.-")
            and len(found) < MAX_NAME
        ):
            found.append((yield from self.char()))
        return "".join(found)

    def call_object(self, begin: str) -> Generator[None, None, bool]:
        """Parse a call as one JSON object with one key of `NAMES` and one of `ARGUMENTS`. Arguments are reported as they
        arrive, once the name is known. False if it is no call or truncated; the text after `begin` is then content."""
        raw, name, kept = list[str](), "", list[str]()
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
                if what in ARGUMENTS and not given:
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
                    if what in NAMES and not name:
                        found = _loads("".join(value))
                        is_one = isinstance(found, str) and len(found) <= MAX_NAME
                        name = found if is_one and found.isprintable() else ""
            closed = (yield from self.peek()) == "}"
            if closed:
                out((yield from self.char()))
        if begun:
            return True
        if not (name and closed):
            read = "".join(raw)
            opened = read.strip().removeprefix("{").lstrip()
            if not closed and (begin or opened.startswith(_KEYS)):
                self.refuse(begin, read)
            elif closed or not (self.is_cut and any(k.startswith(opened) for k in _KEYS)):
                self.content(begin + read)
            return False
        self.begin_call(name)
        text = "".join(kept)
        spelled = _loads(text) if text.startswith('"') else None
        if isinstance(spelled, str) and _is_text(spelled):
            text = spelled
        self.arguments("{}" if text in ("", "null") else text)
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
        """Report a complete call."""
        self.begin_call(name)
        self.arguments(dumps(arguments))


NAMES, ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters", "args")
"""Keys of calls that are JSON objects. Models use them interchangeably."""

_KEYS = tuple(f'"{key}"' for key in (*NAMES, *ARGUMENTS, "tool_call_id"))


def drop(text: str) -> None:
    """Output function that discards text."""


def dumps(value: Any) -> str:
    """JSON of a value. Unpaired surrogates, which no text can contain, stay escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_text(text) else json.dumps(value)


def _is_text(text: str) -> bool:
    """Whether the text has no unpaired surrogates, which JSON can escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_name(text: str) -> bool:
    return re.fullmatch(r"[\w.-]{1,256}", text) is not None


class _Search:
    """Search for several texts at once."""

    def __init__(self, texts: Sequence[str]) -> None:
        words = "|".join(map(re.escape, sorted(texts)))
        self.first = re.compile(words if texts else "(?!)").search
        self._begins = frozenset(text[:n] for text in texts for n in range(1, len(text)))
        self._firsts = frozenset(text[:1] for text in texts)
        self._longest = max(map(len, texts), default=0)

    def num_begun(self, text: str) -> int:
        """Number of characters at the end of `text` that may begin one of the texts."""
        for i in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[i] in self._firsts and text[i:] in self._begins:
                return len(text) - i
        return 0


_search = functools.lru_cache(maxsize=256)(_Search)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# --- Formats --------------------------------------------------------------------------------------------------------


class Writer:
    """Writes grammars in Lark's syntax. `special` maps a text to the id of a special token: the grammar then names the
    token, because the text alone would not match it. Special tokens among `markers` are also recognized within longer
    texts."""

    def __init__(self, special: Callable[[str], int | None], markers: Sequence[str] = ()) -> None:
        self._special = special
        tokens = sorted((m for m in markers if special(m) is not None), key=len, reverse=True)
        self._tokens = re.compile(f"({'|'.join(map(re.escape, tokens))})") if tokens else None
        self.rules: dict[str, str] = {}
        self._num_characters = 0  # characters of all schemas so far

    def text(self, text: str) -> str:
        written = [
            json.dumps(part, ensure_ascii=False) if token is None else f"<[{token}]>"
            for part, token in self._parts(text)
        ]
        return written[0] if len(written) == 1 else f"({' '.join(written)})"

    def _parts(self, text: str) -> list[tuple[str, int | None]]:
        """The text split at special tokens, as (text, token id or None)."""
        if (token := self._special(text)) is not None or self._tokens is None:
            return [(text, token)]
        return [(part, self._special(part)) for part in self._tokens.split(text) if part] or [
            (text, None)
        ]

    def texts(self, *parts: str) -> str:
        """A grammar of the texts in sequence. A text that is a special token is written as that
        token."""
        return " ".join(self.text(part) for part in parts if part)

    def up_to(self, marker: str) -> str:
        """A grammar of any text without the marker, followed by the marker."""
        name, parts = f"to_{len(self.rules)}", self._parts(marker)
        first = next((i for i, (_, token) in enumerate(parts) if token is not None), None)
        before = "".join(part for part, _ in parts[:first])
        escaped = re.escape(before).replace("/", r"\/").replace("\\\n", r"\n")
        if first is None:
            self.rules[f"{name}[lazy]"] = f"/(?s:.*){escaped}/"
        else:  # text can't contain the token
            text = "ANY" if not before else f"ANY_{name.upper()}"
            self.rules[text] = f"/(?s:.*){escaped}/"
            rest = "".join(part for part, _ in parts[first:])
            self.rules[name] = f"{text} {self.text(rest)}"
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
        """Add to the number of schema characters. RequestError if it exceeds `MAX_GRAMMAR`."""
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
    """How a family of models writes tool calls."""

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]
    """Texts that the parser looks for. If they are special tokens, the detokenizer must not skip them."""
    trigger: ClassVar[str] = ""
    """Text with which calls begin; the text before it is unconstrained."""
    other: ClassVar[str] = ""
    """Regular expression of answers without calls, for formats without a trigger, in which calls
    are the whole answer."""

    call_marks: ClassVar[tuple[str, ...]] = ()
    """Texts of which every call contains one, for formats without a trigger."""

    reasons: ClassVar[bool] = False
    """Whether reasoning is part of the format."""

    wraps: ClassVar[tuple[str, ...]] = ()
    """Texts around an answer that are not content. The first one opens it."""

    think: ClassVar[tuple[str, str] | None] = None
    """Reasoning markers of the format, for templates whose text contains no known ones."""

    @classmethod
    def of(cls, template: str) -> ToolFormat:
        """The format with the tags found in the template, which may differ by model."""
        return cls()

    @classmethod
    @abstractmethod
    def matches(cls, template: str) -> bool:
        """Whether a chat template uses this format."""

    def calls(self, tools: Sequence[Tool], writer: Writer, *, parallel: bool) -> str:
        """The grammar of one call or, with `parallel`, several, following the first one's trigger:
        a Lark expression, whose rules are added to `writer`."""
        for i, tool in enumerate(tools):
            writer.rules[f"call_{i}"] = self.call(tool, writer)
        writer.rules["call"] = " | ".join(f"call_{i}" for i in range(len(tools)))
        between = self.between(writer) if parallel else None
        return self.whole("call" if between is None else f"call ({between} call)*", writer)

    @abstractmethod
    def call(self, tool: Tool, writer: Writer) -> str:
        """The grammar of one call of `tool`."""

    def between(self, writer: Writer) -> str | None:
        """Grammar of the text before each call except the first. None if there can be only one call."""
        return f'"\\n" {writer.text(self.trigger)}'

    def whole(self, calls: str, writer: Writer) -> str:
        """Grammar of all calls and the text around them."""
        return calls

    def before(self, writer: Writer) -> str:
        """Grammar of the text that may come before calls or an answer; empty if the format has
        none."""
        return ""

    def final(self, writer: Writer) -> str:
        """Grammar of the optional text that opens an answer without calls."""
        return f"({writer.text(self.wraps[0])} {writer.spaces()})?" if self.wraps else ""

    def interrupts(self, tools: Sequence[Tool]) -> Sequence[str]:
        """Texts within reasoning that begin a call, for models that forget to end reasoning."""
        return ()

    def reasoning(self, tools: Sequence[Tool]) -> ReasoningMarkers | None:
        """The format's own reasoning markers. None: the model's are used."""
        return None

    def free(self, writer: Writer) -> str:
        """The grammar of an answer without calls, for formats in which calls are the whole answer."""
        return f"/{self.other}/"

    def carries(self, name: str, depth: int = 0) -> bool:
        """Whether an argument of this name (or, at a greater depth, an object's member) survives
        writing and parsing."""
        return True

    @abstractmethod
    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script: ...


class CallSection(ToolFormat):
    """Base of formats whose calls are in a section, between `trigger` and `end`."""

    end: ClassVar[str]
    gap: ClassVar[str] = '"\\n"?'
    """Grammar of the text between two calls."""

    def between(self, writer: Writer) -> str | None:
        return self.gap

    def whole(self, calls: str, writer: Writer) -> str:
        return f"{calls} {writer.text(self.end)}"

    def interrupts(self, tools: Sequence[Tool]) -> Sequence[str]:
        return (self.trigger,)
