"""Tools and reasoning of a chat request, as its body names them; `engine/text/tools.py` interprets
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta, Raw, Struct

from slipstream.engine.text.tool_formats.base import Tool
from slipstream.engine.text.tools import NO_PARAMETERS, OfferedTools, Reading, reading
from slipstream.errors import RequestError
from slipstream.server.answers.hints import ABSENT, AnyHint
from slipstream.server.http.errors import bad_request
from slipstream.server.http.json_depth import is_too_deep
from slipstream.server.state import ServerState

Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionSpec(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: FunctionSpec
    cache_control: Raw = ABSENT  # see `cache_hints`


class NamedFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    name: Name


class AllowedTool(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Struct, forbid_unknown_fields=True, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1)]


class NamedChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that must be called, or the tools that may be called."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class CalledFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: str = ""
    # added to an answer by clients, as are the next two fields of a call
    parsed_arguments: AnyHint = ABSENT
    provider_specific_fields: AnyHint = ABSENT


class SentToolCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool call in an assistant message that a client sends back."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None
    extra_content: AnyHint = ABSENT
    provider_specific_fields: AnyHint = ABSENT


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


MAX_TOOLS = 1024
"""Maximum number of tools. OpenAI allows 128; agents with several MCP servers have more."""

ToolSpecs = Annotated[list[ToolSpec], Meta(max_length=MAX_TOOLS)]


class WithTools(Protocol):
    """The tool fields of a chat request."""

    tools: ToolSpecs | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None


def offer_of(body: WithTools) -> OfferedTools:
    """The tools that a request offers. RequestError names what the schema cannot express."""
    choice, specs, named = body.tool_choice, body.tools or (), None
    if isinstance(choice, NamedChoice):
        wanted = getattr(choice, choice.type)
        if wanted is None:
            raise RequestError(
                f"tool_choice has the type {choice.type!r} and no field {choice.type!r}, which names the tool",
                field=f"tool_choice.{choice.type}",
            )
        # the model is told about all tools, but may only call these
        if isinstance(wanted, AllowedTools):
            names = {one.function.name for one in wanted.tools}
            if missing := names - {s.function.name for s in specs}:
                raise RequestError(
                    f"there is no tool named {min(missing)!r}", field="tool_choice.allowed_tools"
                )
            specs = [s for s in specs if s.function.name in names]
            choice = wanted.mode
        else:
            choice, named = None, wanted.name
    return OfferedTools(
        tools=tuple(Tool(s.function.name, s.function.parameters or NO_PARAMETERS) for s in specs),
        choice=choice,
        only=named,
        parallel=body.parallel_tool_calls,
        strict=any(s.function.strict for s in specs),
    )


def call_dict(call: SentToolCall) -> dict[str, Any]:
    """A call in the form for chat templates, with its arguments as an object. Invalid JSON from a
    model is passed on verbatim."""
    arguments = written_arguments(call.function.arguments)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def tool_dicts(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Converts tools to the dicts that chat templates take."""
    return [{"type": "function", "function": msgspec.to_builtins(one.function)} for one in tools]


def written_arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object. Text that is no JSON object, such as half of one, becomes
    `invalid_json`."""
    try:
        found = None if is_too_deep(text.encode()) else msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        found = None
    return found if isinstance(found, dict) else {"invalid_json": text}


def chat_template(state: ServerState) -> str:
    """The model's chat template; empty if it has none."""
    tokenizer = state.engine.tokenizer
    return (tokenizer.chat_template if tokenizer is not None else None) or ""


EFFORT_BUDGETS = {"none": 0, "minimal": 512, "low": 2048, "medium": 8192, "high": 32768}
"""Reasoning budget in tokens for each effort, if the chat template doesn't support efforts."""


def thinking_fields(state: ServerState, field: str, *, asked: bool) -> dict[str, Any]:
    """The chat request's fields that switch thinking on or off, for the template. Without a switch in the
    template, off means a budget of 0. A 400 names `field` if thinking is requested of a model that can't."""
    template = chat_template(state)
    can = reasons(state, template)
    if asked and not can:
        raise bad_request(f"this model does not think; leave {field} out", field)
    if "enable_thinking" in template:
        return {"chat_template_kwargs": {"enable_thinking": asked}}
    return {} if asked or not can else {"thinking_token_budget": 0}


def reasons(state: ServerState, template: str | None) -> bool:
    """Whether the model's answers may begin with reasoning, by its chat template or the server's
    settings."""
    form, think = state.settings.formats.of(template)
    return think is not None or (form is not None and form.reasons)


def calls_tools(state: ServerState) -> bool:
    """Whether the model can call tools: its template and the server know their format."""
    tokenizer = state.engine.tokenizer
    template = None if tokenizer is None else tokenizer.tool_template
    form, _ = state.settings.formats.of(template)
    return form is not None and "tools" in (template or "")


def reading_of(
    state: ServerState,
    body: WithTools,
    prompt: Sequence[int],
    template: str | None,
    begun: str = "",
) -> Reading | None:
    """The settings for parsing answers; None if an answer is plain text. `begun`: the part of the
    prompt that answers continue. A 400 if the model can't call the offered tools."""
    tokenizer = state.engine.tokenizer
    if tokenizer is None:
        return None

    def end() -> str:
        return tokenizer.decode(list(prompt[-16:]), skip_special_tokens=False)

    return reading(
        state.settings.formats,
        offer_of(body),
        template,
        end,
        to_name="`serve --tool-call-parser`",
        begun=begun,
    )
