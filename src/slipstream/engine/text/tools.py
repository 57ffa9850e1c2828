"""Tools and reasoning of a chat: the grammar that constrains an answer, and how the answer is parsed.

    tool_choice        the grammar of the answer
    required, named    what may come before (reasoning), then calls
    auto               none; if a tool is `strict`, or parallel_tool_calls is false: free text, or calls
    none               the model is told of no tools

A structured answer (`response_format`) may be preceded by reasoning; with tools, it may be replaced by calls.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from slipstream.base.arguments import likely_value
from slipstream.engine.grammars.check import check
from slipstream.engine.text.tool_formats import REASONING, reasoning_markers, tool_format
from slipstream.engine.text.tool_formats.base import (
    Arguments,
    BeginCall,
    Content,
    Event,
    Parser,
    Reasoning,
    Tool,
    ToolFormat,
    Writer,
)
from slipstream.errors import RequestError
from slipstream.messages.finish_reason import FinishReason
from slipstream.outputs import ChatMessage, ToolCall
from slipstream.params.answer_forms import ReasoningMarkers, StructuredOutputsParams
from slipstream.params.sampling import SamplingParams

Choice = Literal["auto", "none", "required"]


class GrammarTokenizer(Protocol):
    """The part of a tokenizer's interface that grammars need."""

    @property
    def special_ids(self) -> Collection[int]: ...

    def encode(self, text: str, /, *, add_special_tokens: bool = ...) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """The tools of a request. `only`: the name of the one that must be called."""

    tools: tuple[Tool, ...] = ()
    choice: Choice | None = None
    only: str | None = None
    parallel: bool | None = None
    strict: bool = False  # some tool is `strict`

    def __post_init__(self) -> None:
        """Raise RequestError for fields that contradict each other."""
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise RequestError("two tools have the same name", field="tools")
        if not names and (self.only is not None or self.choice not in (None, "none")):
            raise RequestError("tool_choice needs tools", field="tool_choice")
        if self.only is not None and self.only not in names:
            raise RequestError(
                f"there is no tool named {self.only!r}", field="tool_choice.function.name"
            )

    @property
    def is_made(self) -> bool:
        """Whether the prompt lists the tools."""
        return bool(self.tools) and self.choice != "none"


def offer(
    tools: Sequence[Any] | None, choice: Any = None, parallel: bool | None = None
) -> OfferedTools:
    """Tools of a request, from OpenAI's fields as Python objects. RequestError names an invalid
    field."""
    made, strict = [], False
    for i, spec in enumerate(tools or ()):
        function = (
            spec.get("function")
            if isinstance(spec, dict) and spec.get("type", "function") == "function"
            else None
        )
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            message = 'a tool is {"type": "function", "function": {"name": …, "description": …, "parameters": …}}'
            raise RequestError(message, field=f"tools[{i}]")
        parameters = function.get("parameters")
        if not isinstance(parameters, dict | None):
            raise RequestError(
                "parameters of a tool are a JSON schema", field=f"tools[{i}].function.parameters"
            )
        made.append(Tool(function["name"], parameters or NO_PARAMETERS))
        strict |= bool(function.get("strict"))
    only = None
    if isinstance(choice, dict):
        named = choice.get("function")
        only = named.get("name") if isinstance(named, dict) else None
    if (
        (choice not in (None, "auto", "none", "required"))
        if not isinstance(choice, dict)
        else not isinstance(only, str)
    ):
        message = 'tool_choice is "auto", "none", "required" or {"type": "function", "function": {"name": …}}'
        raise RequestError(message, field="tool_choice")
    return OfferedTools(
        tools=tuple(made),
        choice=None if only else choice,
        only=only,
        parallel=parallel,
        strict=strict,
    )


NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Settings for parsing the answers of a request. `offered`: the tools that the model may
    call."""

    form: ToolFormat | None
    think: tuple[str, str] | None
    offered: tuple[Tool, ...] = ()
    must_call: bool = False
    enforced: bool = False
    parallel: bool = True
    opened: bool = False  # the prompt has already begun reasoning
    closed: bool = False  # the prompt has already ended reasoning

    def parser(self) -> Parser:
        form, tools = self.form, self.offered
        if form is None:
            return Parser(None, self.think, thinking=self.opened)
        return Parser(
            functools.partial(form.script, tools=tools) if tools or form.reasons else None,
            self.think,
            thinking=self.opened,
            interrupts=form.interrupts(tools) if tools else (),
            wraps=form.wraps,
        )

    def message(self, text: str, reason: str | None = None) -> ChatMessage:
        """The message parsed from a complete answer. `reason`: why it ended."""
        parser = self.parser()
        return message_of(parser.feed(text) + parser.finish(cut=is_cut(reason)))

    def shows(self, tokenizer: GrammarTokenizer) -> bool:
        """Whether the parser needs special tokens in the text."""
        markers = (*(self.form.markers if self.form else ()), *(self.think or ()))
        return any(_special(tokenizer, marker) is not None for marker in markers)

    def reasoning(
        self, tokenizer: GrammarTokenizer, *, is_structured: bool = False
    ) -> ReasoningMarkers | None:
        """The markers of reasoning; None if the model has none. With `is_structured` the answer has
        a grammar, which treats a call within reasoning as part of the reasoning."""
        form = self.form
        if form is not None and (own := form.reasoning(self.offered)) is not None:
            return dataclasses.replace(own, shows_special=self.shows(tokenizer))
        if self.think is None:
            return None
        calls = form is not None and self.offered and not is_structured
        return ReasoningMarkers(
            begin=self.think[0],
            end=self.think[1],
            opened=self.opened,
            interrupts=tuple(form.interrupts(self.offered)) if form is not None and calls else (),
            shows_special=self.shows(tokenizer),
        )

    def call_tokens(self, tokenizer: GrammarTokenizer) -> tuple[int, ...]:
        """Tokens of which each answer with a call contains at least one. Empty if there are no such
        tokens, or no tools."""
        form, found = self.form, set[int]()
        if form is None or not self.offered:
            return ()
        for mark in (form.trigger,) if form.trigger else form.call_marks:
            ids = tokenizer.encode(mark, add_special_tokens=False)
            special = [i for i in ids if i in tokenizer.special_ids]
            found.update(ids if len(ids) == 1 else special[-1:])
        return tuple(sorted(found))

    def applied(self, sampling: SamplingParams, tokenizer: GrammarTokenizer) -> SamplingParams:
        """The sampling parameters with the grammar and the reasoning markers of such an answer.
        RequestError for a reasoning budget if the model has no reasoning."""
        structured = self.structured(sampling.structured_outputs, tokenizer)
        reasoning = None
        if sampling.thinking_token_budget is not None:
            reasoning = self.reasoning(tokenizer, is_structured=structured is not None)
            if reasoning is None:
                raise no_reasoning()
        return dataclasses.replace(
            sampling,
            structured_outputs=structured,
            skip_special_tokens=sampling.skip_special_tokens and not self.shows(tokenizer),
            reasoning=reasoning,
        )

    @property
    def enforced_schemas(self) -> Iterable[tuple[str, StructuredOutputsParams]]:
        """(request field, schema) of each tool whose schema answers are constrained to and that must be checked."""
        tools = self.offered if self.enforced else ()
        return (
            (f"tools[{i}].function.parameters", StructuredOutputsParams(json=dict(tool.parameters)))
            for i, tool in enumerate(tools)
        )

    @property
    def carries_names(self) -> bool:
        """Whether the format can represent the names of all arguments of the offered tools."""
        form, tools = self.form, self.offered
        names = (name for tool in tools for name in tool.parameters.get("properties") or ())
        return form is None or all(map(form.carries, names))

    def check(self) -> None:
        """Raise RequestError, naming the tool, if its schema can't be enforced."""
        for field, schema in self.enforced_schemas:
            try:
                check(schema)
            except RequestError as error:
                raise RequestError(error.message, field=field) from None

    def structured(
        self, asked: StructuredOutputsParams | None, tokenizer: GrammarTokenizer
    ) -> StructuredOutputsParams | None:
        """The grammar of the answers; `asked` is the one of the request."""
        markers = (*(self.form.markers if self.form else ()), *(self.think or ()))
        writer = Writer(lambda text: _special(tokenizer, text), markers)
        before = self._before(writer)
        if not self.enforced and (asked is None or not (before or self.offered)):
            return asked
        form, trigger, calls = self.form, "", ""
        if self.offered and form is not None:
            calls = form.calls(self.offered, writer, parallel=self.parallel)
            trigger = writer.text(form.trigger) if form.trigger else ""
        if self.must_call:
            return StructuredOutputsParams(grammar=writer.lark(f"{before} {trigger} {calls}"))
        final = form.final(writer) if form is not None else ""
        if asked is not None:
            called = f" | {trigger} {calls}" if calls else ""
            return dataclasses.replace(
                asked, around=writer.lark(f"{before} ({final} @answer{called})")
            )
        if form is None:
            return None
        if trigger:
            writer.rules["ANYTHING"] = "/(?s:.*)/"
            return StructuredOutputsParams(
                grammar=writer.lark(f"{before} ({writer.up_to(form.trigger)} {calls} | ANYTHING)")
            )
        return StructuredOutputsParams(
            grammar=writer.lark(f"{before} ({calls} | {form.free(writer)})")
        )

    def _before(self, writer: Writer) -> str:
        if self.form is not None and (own := self.form.before(writer)):
            return own
        if self.think is None or self.closed:
            return ""
        begin, end = self.think
        if self.opened:
            return f"{writer.up_to(end)} {writer.spaces()}"
        return f"({writer.text(begin)} {writer.up_to(end)} {writer.spaces()})?"


def no_reasoning() -> RequestError:
    return RequestError(
        "this model's chat template has no reasoning that could be limited; leave thinking_token_budget out",
        field="thinking_token_budget",
    )


def _special(tokenizer: GrammarTokenizer, text: str) -> int | None:
    """Id of the special token with this text; None if there is none."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.special_ids else None


@dataclass(frozen=True, slots=True)
class Formats:
    """Names of the tool and reasoning formats. None: detected in the chat template; "none": disabled. ConfigError for an
    unknown name."""

    tool_calls: str | None = None  # a name in `tool_formats.FORMATS`
    reasoning: str | None = None  # a name in `tool_formats.REASONING`

    def __post_init__(self) -> None:
        tool_format(self.tool_calls, None)
        reasoning_markers(self.reasoning, None)

    def of(self, template: str | None) -> tuple[ToolFormat | None, tuple[str, str] | None]:
        """(tool format, reasoning markers) for a chat template. Markers are None if they are part
        of the tool format."""
        form = tool_format(self.tool_calls, template)
        think = reasoning_markers(self.reasoning, template)
        if form is not None and think is None and self.reasoning != "none":
            think = form.think
        return form, None if form is not None and form.reasons else think


def reading(
    formats: Formats,
    offered: OfferedTools,
    template: str | None,
    end: Callable[[], str],
    *,
    to_name: str,
    begun: str = "",
) -> Reading | None:
    """Settings for parsing the answers to a prompt that ends with the text `end()`. `begun`: the
    end of the prompt that the answer continues. None if answers need no parsing. RequestError if
    the model can't call tools; it tells the user to name a format with `to_name`."""
    form, think = formats.of(template)
    tail = end().rstrip() if think is not None else ""
    if formats.reasoning is None:  # some templates use several kinds, and the prompt opens one
        think = next((m for m in REASONING.values() if tail.endswith(m[0].rstrip())), think)
    opened, closed = (tail.endswith(marker.rstrip()) for marker in think or ("\0", "\0"))
    if think is not None and begun.rfind(think[0].rstrip()) > begun.rfind(think[1].rstrip()):
        opened = True
    if not offered.is_made:
        form = form if form is not None and (form.reasons or form.wraps) else None
        if think is None and form is None:
            return None
        return Reading(form=form, think=think, opened=opened, closed=closed)
    if "tools" not in (template or ""):
        message = "this model's chat template knows no tools; leave them out, or take another model"
        raise RequestError(message, field="tools")
    if form is None:
        message = f"this model's chat template asks for no known format of tool calls; name one with {to_name}"
        raise RequestError(message, field="tools")
    must_call = offered.choice == "required" or offered.only is not None
    parallel = offered.parallel is not False and offered.only is None
    return Reading(
        form=form,
        think=think,
        offered=tuple(tool for tool in offered.tools if offered.only in (None, tool.name)),
        must_call=must_call,
        enforced=must_call or not parallel or offered.strict,
        parallel=parallel,
        opened=opened,
        closed=closed,
    )


# --- Answers --------------------------------------------------------------------------------------------------------


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def message_of(events: Iterable[Event]) -> ChatMessage:
    """The message made from the events of a complete answer."""
    content, reasoning, calls = list[str](), list[str](), list[tuple[str, list[str]]]()
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case BeginCall(_, name):
                calls.append((name, []))
            case Arguments(index, text):
                calls[index][1].append(text)
    return ChatMessage(
        content="".join(content) or (None if calls else ""),
        reasoning_content="".join(reasoning) or None,
        tool_calls=tuple(ToolCall(call_id(), name, "".join(parts)) for name, parts in calls),
    )


def is_cut(reason: str | None) -> bool:
    """Whether an answer with this finish reason was truncated and may be continued."""
    return reason not in (None, FinishReason.STOP)


def finish_reason(reason: str, num_calls: int) -> str:
    """OpenAI's finish reason of an answer with `num_calls` calls."""
    return "tool_calls" if reason == FinishReason.STOP and num_calls else reason


def arguments_object(text: str, field: str) -> dict[str, Any]:
    """A call's arguments as an object, for chat templates. RequestError if the text is no JSON object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestError("arguments of a call are a JSON object, as text", field=field)
    return found


def begun_text(messages: Sequence[dict[str, Any]]) -> str:
    """Text of the last message, which the answer continues."""
    content = messages[-1].get("content") if messages else None
    return content if isinstance(content, str) else ""


ROLES = ("system", "developer", "user", "assistant", "tool")


def for_template(messages: Sequence[dict[str, Any]], template: str | None) -> list[dict[str, Any]]:
    """Messages with call arguments as objects. RequestError names a message whose role is neither in `ROLES`
    nor in the chat template's text: a template would write it, but the model was not trained on it."""
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            what = f"messages[{i}] must be a dict with a role and a content, got {type(message).__name__}"
            raise RequestError(what, field="messages")
        role = message.get("role")
        if role not in ROLES and not any(
            f"{quote}{role}{quote}" in (template or "") for quote in "'\""
        ):
            near = likely_value(role, ROLES) if isinstance(role, str) else ""
            what = f"messages[{i}]: role {role!r} is not supported; use one of {', '.join(ROLES)}{near}"
            raise RequestError(what, field="messages")
    return [_with_objects(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _with_objects(message: dict[str, Any], field: str) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    made = []
    for k, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(text := function.get("arguments"), str):
            given = arguments_object(text, f"{field}.tool_calls[{k}].function.arguments")
            call = {**call, "function": {**function, "arguments": given}}
        made.append(call)
    return {**message, "tool_calls": made}
