"""Tools and reasoning of a chat request: what the body says of them, how its answers are read, and the grammar that they keep
to.

    tool_choice        the grammar of the answer
    required, named    what may come before (reasoning), then calls
    auto               none; if a tool is `strict`, or parallel_tool_calls is false: free text, or calls
    none               the model is told of no tools

An answer that must look like something (`response_format`) may have reasoning before it, and with tools may be calls instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta, Struct

from slipstream.engine.grammar import check_in_thread
from slipstream.errors import RequestError
from slipstream.server.errors import bad_request
from slipstream.server.state import ServerState, Tokenizer
from slipstream.server.tool_formats import reasoning_markers, tool_format
from slipstream.server.tool_formats.base import Parser, Script, Tool, ToolFormat, Writer
from slipstream.types import StructuredOutputsParams

Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionSpec(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    name: Name


class NamedChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: str = ""


class ToolCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A call in an assistant's message that a client sends back."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


ToolSpecs = Annotated[list[ToolSpec], Meta(max_length=128)]


class WithTools(Protocol):
    """The fields that a chat request has for it."""

    tools: ToolSpecs | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None


def check_tools(body: WithTools) -> None:
    """Refuse what the schema cannot express."""
    names = [tool.function.name for tool in body.tools or ()]
    if len(set(names)) < len(names):
        raise bad_request("two tools have the same name", "tools")
    choice = body.tool_choice
    if not names and choice not in (None, "none"):
        raise bad_request("tool_choice needs tools", "tool_choice")
    if not names and body.parallel_tool_calls is not None:
        raise bad_request("parallel_tool_calls needs tools", "parallel_tool_calls")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        raise bad_request(f"there is no tool named {choice.function.name!r}", "tool_choice.function.name")


def call_dict(call: ToolCall, path: str) -> dict[str, Any]:
    """As chat templates take it: with the arguments as an object."""
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_request("arguments of a call are a JSON object, as text", f"{path}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the answers of a request are read. `offered` are the tools that the model may call."""

    form: ToolFormat | None
    think: tuple[str, str] | None
    offered: tuple[Tool, ...] = ()
    must_call: bool = False
    enforced: bool = False
    parallel: bool = True
    opened: bool = False  # the prompt has begun the reasoning
    closed: bool = False  # the prompt has ended it

    def parser(self) -> Parser:
        form, tools = self.form, self.offered

        def script(parser: Parser) -> Script:
            assert form is not None
            return form.script(parser, tools)

        return Parser(script if form is not None and (tools or form.reasons) else None, self.think, thinking=self.opened)

    def shows(self, tokenizer: Tokenizer) -> bool:
        """Whether the parser looks for special tokens."""
        markers = (*(self.form.markers if self.form else ()), *(self.think or ()))
        return any(_special(tokenizer, marker) is not None for marker in markers)

    async def structured(self, asked: StructuredOutputsParams | None, tokenizer: Tokenizer) -> StructuredOutputsParams | None:
        """The grammar of the answers. RequestError names a tool's part that can't be enforced."""
        writer = Writer(lambda text: _special(tokenizer, text))
        before = self._before(writer)
        if not self.enforced:
            if asked is None or not (before or self.offered):
                return asked
        else:
            for i, tool in enumerate(self.offered):
                try:
                    await check_in_thread(StructuredOutputsParams(json=dict(tool.parameters)))
                except RequestError as error:
                    raise RequestError(error.message, field=f"tools[{i}].function.parameters") from None
        form, trigger, calls = self.form, "", ""
        if self.offered:
            assert form is not None
            calls = form.calls(self.offered, writer, parallel=self.parallel)
            trigger = writer.text(form.trigger) if form.trigger else ""
        if self.must_call:
            return StructuredOutputsParams(grammar=writer.lark(f"{before} {trigger} {calls}"))
        final = form.final(writer) if form is not None else ""
        if asked is not None:
            called = f" | {trigger} {calls}" if calls else ""
            return dataclasses.replace(asked, around=writer.lark(f"{before} ({final} @answer{called})"))
        assert form is not None
        if trigger:
            writer.rules["ANYTHING"] = "/(?s:.*)/"
            return StructuredOutputsParams(grammar=writer.lark(f"{before} ({writer.up_to(form.trigger)} {calls} | ANYTHING)"))
        return StructuredOutputsParams(grammar=writer.lark(f"{before} ({calls} | {form.free(writer)})"))

    def _before(self, writer: Writer) -> str:
        if self.form is not None and (own := self.form.before(writer)):
            return own
        if self.think is None or self.closed:
            return ""
        begin, end = self.think
        if self.opened:
            return f"{writer.up_to(end)} {writer.spaces()}"
        return f"({writer.text(begin)} {writer.up_to(end)} {writer.spaces()})?"


def _special(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of a special token by its text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.special_ids else None


def reasons(state: ServerState, template: str | None) -> bool:
    """Whether answers of the model may begin with reasoning, as its chat template or the server's settings say."""
    form = tool_format(state.settings.tool_call_parser, template)
    return reasoning_markers(state.settings.reasoning_parser, template) is not None or (form is not None and form.reasons)


def reading_of(state: ServerState, body: WithTools, prompt: Sequence[int], template: str | None) -> Reading | None:
    """None: the answer is its text. A 400 if the model can't call tools."""
    tokenizer, settings = state.engine.tokenizer, state.settings
    if tokenizer is None:
        return None
    form = tool_format(settings.tool_call_parser, template)
    think = reasoning_markers(settings.reasoning_parser, template)
    if form is not None and form.reasons:
        think = None
    tail = tokenizer.decode(list(prompt[-16:]), skip_special_tokens=False).rstrip()
    opened, closed = (think is not None and tail.endswith(marker) for marker in think or ("", ""))
    choice, specs = body.tool_choice or "auto", body.tools or []
    if choice == "none" or not specs:
        if think is None and not (form is not None and form.reasons):
            return None
        form = form if form is not None and form.reasons else None
        return Reading(form=form, think=think, opened=opened, closed=closed)
    if "tools" not in (template or ""):
        raise bad_request("this model's chat template knows no tools; leave them out, or serve another model", "tools")
    if form is None:
        raise bad_request(
            "this model's chat template asks for no known format of tool calls; name one with `serve --tool-call-parser`",
            "tools",
        )
    if isinstance(choice, NamedChoice):
        specs = [spec for spec in specs if spec.function.name == choice.function.name]
    must_call = choice == "required" or isinstance(choice, NamedChoice)
    parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedChoice)
    return Reading(
        form=form,
        think=think,
        offered=tuple(Tool(s.function.name, s.function.parameters or {"type": "object", "properties": {}}) for s in specs),
        must_call=must_call,
        enforced=must_call or not parallel or any(s.function.strict for s in specs),
        parallel=parallel,
        opened=opened,
        closed=closed,
    )

