"""The body of POST /v1/responses, and the translation of its items into a chat's messages.

Consecutive items of the model (reasoning, a message, calls) become one assistant message, which is
what chat templates know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from slipstream.server.answers.hints import ABSENT, AnyHint, Hint, given_hints
from slipstream.server.answers.structured import JsonSchema, ResponseFormat
from slipstream.server.answers.tools import (
    MAX_TOOLS,
    AllowedTool,
    AllowedTools,
    CalledFunction,
    FunctionSpec,
    Name,
    NamedChoice,
    NamedFunction,
    SentToolCall,
    ToolSpec,
    written_arguments,
)
from slipstream.server.http.decoding import OFF, decode, decode_raw, refuse_unless_off, register
from slipstream.server.http.errors import bad_request
from slipstream.server.openai.messages import Message, RefusalPart, picture_part, text_part
from slipstream.server.openai.protocol import ChatRequest, Int, Stop, Text, TokenId

MAX_ITEMS = 8192

Included = Literal[
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
"""OpenAI's values of `include`. All but the first concern hosted tools, or content that answers
always have."""


_CALLED: dict[str, tuple[bytes, ...]] = {
    "allowed_callers": (b"null", b'["direct"]'),
    "is_async": (b"null", b"false"),
}


class ResponseTool(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: AnyHint = ABSENT  # hint: the model is told about all tools at once
    output_schema: AnyHint = ABSENT  # the model is not told about it
    allowed_callers: Raw = OFF
    is_async: Raw = msgspec.field(default_factory=Raw, name="async")

    off: ClassVar[dict[str, tuple[bytes, ...]]] = _CALLED


class CustomTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that takes text. The model calls it as a function with one argument, `input`."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: dict[str, Any] | None = None  # a grammar of the text, which the model is told about
    defer_loading: AnyHint = ABSENT
    allowed_callers: Raw = OFF
    is_async: Raw = msgspec.field(default_factory=Raw, name="async")

    off: ClassVar[dict[str, tuple[bytes, ...]]] = _CALLED


class NamespaceTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """Tools with a common prefix. The model knows each tool by the prefix and its name."""

    type: Literal["namespace"]
    name: Name
    tools: list[dict[str, Raw]]
    description: str | None = None


HOSTED = re.compile(
    r"web_search(_preview)?(_[\d_]+)?|file_search|code_interpreter|image_generation|mcp|tool_search"
)
"""Types of tools that the provider runs. The model is not told about them, so it can't call them."""


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool as the model knows it (`function`) and as the protocol names it."""

    function: FunctionSpec
    name: str
    namespace: str | None = None
    is_custom: bool = False


def full_name(name: str, namespace: str | None) -> str:
    """The model's name for a tool of a namespace."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


class ResponseToolChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that must be called; or with "allowed_tools", the tools that may be called."""

    type: Literal["function", "custom", "allowed_tools"]
    name: Name | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class TextFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """Settings of reasoning. It is always returned in full, never summarised."""

    effort: str | None = None
    summary: Hint[str | None] = None
    generate_summary: Hint[str | None] = None
    context: AnyHint = ABSENT
    mode: AnyHint = ABSENT


class ResponseStreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    include_obfuscation: Hint[bool | None] = None


class ResponseInput(Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """POST /v1/responses/input_tokens: the number of tokens of such a request"""

    OTHER_NAMES: ClassVar[dict[str, str]] = {  # chats' names for our fields
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    input: str | Annotated[list[dict[str, Raw]], Meta(max_length=MAX_ITEMS)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[dict[str, Raw]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Hint: too long an input is an error, not cut.
    truncation: Literal["disabled", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's

    def check(self) -> None:
        """Raise a 400 for invalid bodies that the schema can't express."""
        if not self.input:
            raise bad_request("input is empty; give text or items", "input")
        form = self.text.format if self.text is not None else None
        if (
            form is not None
            and form.type == "json_schema"
            and (form.schema is None or not form.name)
        ):
            missing = "schema" if form.name else "name"
            raise bad_request("json_schema needs a name and a schema", f"text.format.{missing}")
        choice = self.tool_choice
        if isinstance(choice, ResponseToolChoice):
            wanted = "tools" if choice.type == "allowed_tools" else "name"
            if getattr(choice, wanted) is None:
                raise bad_request(f"{choice.type} needs {wanted}", f"tool_choice.{wanted}")

    @cached_property
    def functions(self) -> tuple[dict[str, CallableTool], list[str]]:
        """(tools that the model can call, by the model's name for each; hints among the tools)."""
        found, hints = dict[str, CallableTool](), list[str]()
        for i, tool in enumerate(self.tools or ()):
            _add_tool(tool, f"tools[{i}]", None, found, hints)
        if len(found) > MAX_TOOLS:
            raise bad_request(f"there are more than {MAX_TOOLS} tools; offer fewer", "tools")
        return found, list(dict.fromkeys(hints))

    def more_hints(self) -> list[str]:
        return [*self.functions[1], *(["truncation"] if self.truncation == "auto" else ())]

    def _choice(
        self, tools: dict[str, CallableTool]
    ) -> Literal["none", "auto", "required"] | NamedChoice | None:
        """A chat's `tool_choice`."""
        choice = self.tool_choice
        if not tools or not isinstance(choice, ResponseToolChoice):
            return None if isinstance(choice, ResponseToolChoice) or not tools else choice
        if choice.type != "allowed_tools":
            return NamedChoice(type="function", function=NamedFunction(name=choice.name or ""))
        names = {tool.get("name") for tool in choice.tools or ()}
        allowed = [
            AllowedTool(type="function", function=NamedFunction(name=known))
            for known, tool in tools.items()
            if tool.name in names
        ]
        if not allowed:
            raise bad_request(
                "none of the allowed tools is among tools; name one", "tool_choice.tools"
            )
        only = AllowedTools(mode=choice.mode or "auto", tools=allowed)
        return NamedChoice(type="allowed_tools", allowed_tools=only)

    def param(self, field: str | None, places: Sequence[str] = ()) -> str | None:
        """This body's own name of a field of the translated chat. `places`: path in this body of
        each of the chat's messages."""
        if field is None:
            return None
        if places and (
            match := re.fullmatch(r"messages\[(\d+)](\.content\[\d+])(\.image_url(\.\w+)?)?", field)
        ):
            place = places[int(match[1])]
            own = ".detail" if match[4] == ".detail" else match[3] and ".image_url"
            return f"{place}{match[2]}{own or ''}" if place.startswith("input[") else place
        if field.startswith("messages"):
            return "input"
        if field.startswith("tools["):
            return field.replace(".function", "")
        if field.startswith("structured_outputs"):
            return "text.format.schema" if field.endswith(".json") else "text.format"
        return _NAMES.get(field, field)

    def chat(self, messages: list[Message], **more: Any) -> ChatRequest:
        """This body as a chat request."""
        form = self.text.format if self.text is not None else None
        named: ResponseFormat | None = None
        if form is not None:
            asked = None
            if form.type == "json_schema":
                asked = JsonSchema(
                    name=form.name or "",
                    description=form.description,
                    schema=form.schema,
                    strict=form.strict,
                )
            named = ResponseFormat(type=form.type, json_schema=asked)
        tools = self.functions[0]
        return ChatRequest(
            model=self.model,
            messages=messages,
            response_format=named,
            verbosity=self.text.verbosity if self.text is not None else None,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            tools=[ToolSpec(type="function", function=tool.function) for tool in tools.values()]
            or None,
            tool_choice=self._choice(tools),
            parallel_tool_calls=self.parallel_tool_calls if tools else None,
            chat_template_kwargs=self.chat_template_kwargs,
            **more,
        )


_NAMES = {
    **dict.fromkeys(("prompt", "prompt_token_ids", "image"), "input"),
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function.name": "tool_choice.name",
}
_LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(ResponseInput, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses: an answer that may be stored, in OpenAI's format"""

    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None  # default: true, if this server keeps answers
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # Log-probabilities work. The other values concern hosted tools or encrypt reasoning, which is
    # plain text here.
    include: list[Included] | None = None
    # vLLM's extensions
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Stop = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    priority: Int | None = None
    cache_salt: Text | None = None
    # Fields about the caller, or about hosted tools, of which there are none here.
    user: Hint[str | None] = None
    metadata: Hint[Annotated[dict[str, str], Meta(max_length=16)] | None] = None
    safety_identifier: Hint[str | None] = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    end_of_branch: bool | None = None
    prompt_cache_options: Raw = ABSENT
    service_tier: Hint[str | None] = None
    client_metadata: AnyHint = ABSENT
    max_tool_calls: Hint[Int | None] = None
    background: Raw = OFF
    conversation: Raw = OFF
    prompt: Raw = OFF
    context_management: AnyHint = ABSENT  # nothing is edited
    image: AnyHint = ABSENT  # how pictures may be compressed; none is
    background_options: AnyHint = ABSENT
    access_programs: AnyHint = ABSENT
    moderation: Raw = OFF

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {
        "background": (b"null", b"false"),
        "conversation": (b"null",),
        "prompt": (b"null",),
        "moderation": (b"null",),
    }

    def check(self) -> None:
        super().check()
        refuse_unless_off(self, self.off)
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        cache = decode_raw(self.prompt_cache_options or b"null", "prompt_cache_options")
        if isinstance(cache, dict) and cache.get("prewarm"):
            raise bad_request(
                "every answer has a token or more; ask for one with max_output_tokens to fill the cache",
                "prompt_cache_options.prewarm",
            )
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise bad_request(f"top_logprobs needs include=[{_LOGPROBS!r}]", "top_logprobs")

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    def chat(self, messages: list[Message], **more: Any) -> ChatRequest:
        given = {name: getattr(self, name) for name in _SAME}
        for name in ("prompt_cache_key", "prompt_cache_retention"):
            given[name] = Raw(msgspec.json.encode(getattr(self, name)))
        given["prompt_cache_options"] = self.prompt_cache_options
        found = super().chat(
            messages, max_completion_tokens=self.max_output_tokens, **given, **more
        )
        if self.wants_logprobs:
            found.logprobs, found.top_logprobs = True, self.top_logprobs or 0
        return found


_SAME = (
    *(
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "seed",
        "stop",
        "stop_token_ids",
    ),
    *("min_tokens", "ignore_eos", "priority", "cache_salt", "end_of_branch"),
)


def _add_tool(
    tool: dict[str, Raw],
    path: str,
    namespace: str | None,
    found: dict[str, CallableTool],
    hints: list[str],
) -> None:
    kind = decode_raw(tool.get("type", Raw(b"null")), f"{path}.type")
    if isinstance(kind, str) and HOSTED.fullmatch(kind):
        hints.append("tools.web_search" if kind.startswith("web_search") else f"tools.{kind}")
        return
    raw = msgspec.json.encode(tool)
    if kind == "namespace" and namespace is None:
        group = decode(NamespaceTool, raw, f"{path}.")
        for i, part in enumerate(group.tools):
            _add_tool(part, f"{path}.tools[{i}]", group.name, found, hints)
        return
    if kind == "custom":
        custom = decode(CustomTool, raw, f"{path}.")
        refuse_unless_off(custom, custom.off, f"{path}.")
        known = full_name(custom.name, namespace)
        function = FunctionSpec(
            name=known, description=_described(custom), parameters=TEXT_PARAMETERS
        )
        made = CallableTool(function, custom.name, namespace, is_custom=True)
        hints += given_hints(custom, "tools.")
        if (custom.format or {}).get("type") == "grammar":
            # the model is told about the grammar, but it is not enforced
            hints.append("tools.format")
    elif kind == "function":
        own = decode(ResponseTool, raw, f"{path}.")
        refuse_unless_off(own, own.off, f"{path}.")
        known = full_name(own.name, namespace)
        function = FunctionSpec(
            name=known, description=own.description, parameters=own.parameters, strict=own.strict
        )
        made = CallableTool(function, own.name, namespace)
        hints += given_hints(own, "tools.")
    else:
        raise bad_request(
            f"a tool of type {str(kind)[:60]!r} is not supported; give it as a function, with its parameters",
            f"{path}.type",
        )
    if known in found:
        raise bad_request("two tools have the same name", f"{path}.name")
    found[known] = made


TEXT_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of a custom tool's function."""


def _described(tool: CustomTool) -> str:
    """A custom tool's description with the grammar of its input, which is not enforced."""
    text, form = tool.description or "", tool.format or {}
    if form.get("type") == "grammar":
        text += f"\n\nThe input has this grammar ({form.get('syntax')}):\n{form.get('definition')}"
    return text.strip()


def custom_input(arguments: str) -> str:
    """The text for a custom tool, from the arguments that the model wrote."""
    text = written_arguments(arguments).get("input")
    return text if isinstance(text, str) else arguments


# --- Items ---------------------------------------------------------------------------


class ItemText(Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a message. `annotations`, `logprobs` and `parsed` are fields of an answer that a
    client sends back."""

    type: Literal["input_text", "output_text", "summary_text", "reasoning_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class ItemImage(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["input_image"]
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None
    file_id: str | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class Item(Struct, forbid_unknown_fields=True, kw_only=True):
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item, forbid_unknown_fields=True, kw_only=True):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Raw]]
    phase: str | None = None


class FunctionCallItem(Item, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    caller: dict[str, Any] | None = None  # labels, as the next
    is_async: bool | None = msgspec.field(default=None, name="async")
    parsed_arguments: Any = None


class CustomCallItem(Item, forbid_unknown_fields=True, kw_only=True):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None
    caller: dict[str, Any] | None = None
    is_async: bool | None = msgspec.field(default=None, name="async")


class ItemReference(Item, forbid_unknown_fields=True, kw_only=True):
    """Reference to an item of a stored answer. That item replaces it before items are converted to messages."""

    type: Literal["item_reference"]


class FunctionOutputItem(Item, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[dict[str, Raw]]
    name: str | None = None  # labels, as the next
    namespace: str | None = None
    caller: dict[str, Any] | None = None


class ReasoningItem(Item, forbid_unknown_fields=True, kw_only=True):
    type: Literal["reasoning"]
    summary: list[dict[str, Raw]] = []
    content: list[dict[str, Raw]] | None = None
    encrypted_content: str | None = None


_ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
}
register(
    ResponsesRequest,
    ResponseInput,
    *dict.fromkeys(_ITEMS.values()),
    ItemText,
    ItemImage,
    ItemReference,
    ResponseTool,
    CustomTool,
    NamespaceTool,
    parts=(ResponseToolChoice, TextFormat, TextConfig, ReasoningConfig, ResponseStreamOptions),
)


def read_items(given: str | Sequence[Mapping[str, Any]], path: str) -> list[Item]:
    """Decodes the items. A 400 names the first wrong one."""
    if isinstance(given, str):
        return [MessageItem(role="user", content=given)]
    found = []
    for i, item in enumerate(given):
        kind = item.get("type", "message")
        if isinstance(kind, Raw):
            kind = decode_raw(kind, f"{path}[{i}].type")
        known = _ITEMS.get(kind) if isinstance(kind, str) else None
        if known is None:
            raise bad_request(f"an item here is one of {', '.join(_ITEMS)}", f"{path}[{i}].type")
        found.append(decode(known, msgspec.json.encode(item), f"{path}[{i}]."))
    return found


def as_messages(items: Sequence[Item], path: str) -> list[tuple[Message, str]]:
    """A chat's messages, each with the path of its first item. A 400 names an item that can't
    become one.

    A call's arguments may be any text of the model. Images of a tool's output are moved to a user
    message after it, because chat templates only support images there.
    """
    found: list[tuple[Message, str]] = []
    own: Message | None = None  # the assistant message that the next item may extend
    seen: list[tuple[Message, str]] = []  # images of the preceding outputs
    for i, item in enumerate(items):
        where = f"{path}[{i}]"
        if not isinstance(item, FunctionOutputItem):
            found += seen
            seen = []
        if isinstance(item, FunctionOutputItem):
            parts = _parts(item.output, f"{where}.output")
            listed = [] if isinstance(parts, str) else parts
            pictures = [part for part in listed if "image_url" in part]
            text = parts if isinstance(parts, str) else [p for p in listed if "image_url" not in p]
            found.append((Message(role="tool", content=text, tool_call_id=item.call_id), where))
            if pictures:
                seen.append((Message(role="user", content=pictures), where))
            own = None
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            found.append(
                (Message(role=item.role, content=_parts(item.content, f"{where}.content")), where)
            )
            own = None
            continue
        starts = isinstance(item, ReasoningItem) or (
            isinstance(item, MessageItem) and own is not None and bool(own.content)
        )
        if own is None or (starts and (own.content or own.tool_calls)):
            own = Message(role="assistant", content="")
            found.append((own, where))
        if isinstance(item, ReasoningItem):
            summary = _text(item.summary, f"{where}.summary")
            thought = _text(item.content, f"{where}.content") if item.content else summary
            own.reasoning_content = (own.reasoning_content or "") + thought
        elif isinstance(item, MessageItem):
            own.content = _text(item.content, f"{where}.content")
        elif isinstance(item, FunctionCallItem | CustomCallItem):
            arguments = (
                item.arguments
                if isinstance(item, FunctionCallItem)
                else msgspec.json.encode({"input": item.input}).decode()
            )
            name = full_name(item.name, item.namespace)
            call = SentToolCall(
                id=item.call_id, function=CalledFunction(name=name, arguments=arguments)
            )
            own.tool_calls = [*(own.tool_calls or ()), call]
    return found + seen


def _parts(content: str | list[dict[str, Raw]], path: str) -> str | list[dict[str, Raw]]:
    """Converts a message's content to that of a chat: one text, or parts if there are pictures or
    breakpoints of the cache."""
    if isinstance(content, str) or not any(
        _kind(part) == b'"input_image"' or _MARK in part for part in content
    ):
        return _text(content, path)
    found = []
    for i, part in enumerate(content):
        where = f"{path}[{i}]"
        if _kind(part) == b'"input_image"':
            image = decode(ItemImage, msgspec.json.encode(part), f"{where}.")
            if image.image_url is None:
                if image.file_id is not None:
                    raise bad_request(
                        "files can't be referenced; send the picture as image_url",
                        f"{where}.file_id",
                    )
                raise bad_request("send the picture, as a data: URI", f"{where}.image_url")
            made = picture_part(image.image_url, image.detail)
        else:
            made = text_part(_text_of(part, where))
        found.append(made | ({_MARK: part[_MARK]} if _MARK in part else {}))
    return found


_MARK = "prompt_cache_breakpoint"


def _kind(part: dict[str, Raw]) -> bytes:
    return bytes(part.get("type", b""))


def _text(content: str | list[dict[str, Raw]], path: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text_of(part, f"{path}[{i}]") for i, part in enumerate(content))


def _text_of(part: dict[str, Raw], path: str) -> str:
    if _kind(part) == b'"refusal"':  # another model's
        return decode(RefusalPart, msgspec.json.encode(part), f"{path}.").refusal
    if not re.fullmatch(rb'"((input|output|summary|reasoning)_)?text"', _kind(part)):
        raise bad_request(
            "only text is supported here: parts of type input_text and output_text", f"{path}.type"
        )
    return decode(ItemText, msgspec.json.encode(part), f"{path}.").text
