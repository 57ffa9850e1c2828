"""The body of POST /v1/responses, and how its items become the messages of a chat.

Items that follow one another and are the model's (reasoning, a message, calls) become one message of the assistant, which is
what chat templates know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from slipstream.engine.text.tools import arguments_object
from slipstream.server.answers.structured import JsonSchema, ResponseFormat
from slipstream.server.answers.tools import (
    CalledFunction,
    FunctionSpec,
    Name,
    NamedChoice,
    NamedFunction,
    ToolCall,
    ToolSpec,
    written_arguments,
)
from slipstream.server.http.errors import bad_request
from slipstream.server.openai.protocol import (
    OFF,
    ChatRequest,
    Int,
    Message,
    Stop,
    Text,
    TokenId,
    decode,
    decode_raw,
    picture_part,
    refuse_unless_off,
    register,
    text_part,
)

MAX_ITEMS = 8192


class ResponseTool(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    name: Name


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
    effort: str | None = None
    summary: Literal["auto"] | None = None  # reasoning is there in full, and never summarised
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    include_obfuscation: Literal[False] | None = None


class ResponseInput(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses/input_tokens"""

    OTHER_NAMES: ClassVar[dict[str, str]] = {  # what chats call it
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
    tools: Annotated[list[ResponseTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's

    def check(self) -> None:
        """Refuse what the schema cannot express."""
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

    def param(self, field: str | None, places: Sequence[str] = ()) -> str | None:
        """This body's own name for a field of a chat. `places`: where it has the chat's messages."""
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
        """The same as a chat."""
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
        choice = self.tool_choice
        return ChatRequest(
            model=self.model,
            messages=messages,
            response_format=named,
            verbosity=self.text.verbosity if self.text is not None else None,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            tools=[ToolSpec(type="function", function=_function(tool)) for tool in self.tools or ()]
            or None,
            tool_choice=NamedChoice(type="function", function=NamedFunction(name=choice.name))
            if isinstance(choice, ResponseToolChoice)
            else choice
            if self.tools
            else None,
            parallel_tool_calls=self.parallel_tool_calls if self.tools else None,
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
    """POST /v1/responses"""

    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None  # default: true, if this server keeps answers
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # Reasoning is never encrypted: its items hold it as text, so that a client can send it back
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
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
    # About the caller, or about tools that the provider runs, of which there are none here
    user: str | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    max_tool_calls: Int | None = None
    background: Raw = OFF
    conversation: Raw = OFF
    prompt: Raw = OFF
    context_management: Raw = OFF
    moderation: Raw = OFF

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {
        "background": (b"null", b"false"),
        "conversation": (b"null",),
        "prompt": (b"null",),
        "context_management": (b"null", b"[]"),
        "moderation": (b"null",),
    }

    def check(self) -> None:
        super().check()
        refuse_unless_off(self, self.off)
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise bad_request(f"top_logprobs needs include=[{_LOGPROBS!r}]", "top_logprobs")

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    def chat(self, messages: list[Message], **more: Any) -> ChatRequest:
        given = {name: getattr(self, name) for name in _SAME}
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
    *("min_tokens", "ignore_eos", "priority", "cache_salt"),
)


def _function(tool: ResponseTool) -> FunctionSpec:
    return FunctionSpec(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )


# --- Items ------------------------------------------------------------------------------------------------------------


class ItemText(Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a message. `annotations` and `logprobs` are fields of an answer that a client sends back."""

    type: Literal["input_text", "output_text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ItemImage(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["input_image"]
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None
    file_id: str | None = None


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


class FunctionOutputItem(Item, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Raw]]


class ReasoningItem(Item, forbid_unknown_fields=True, kw_only=True):
    type: Literal["reasoning"]
    summary: list[dict[str, Raw]] = []
    content: list[dict[str, Raw]] | None = None
    encrypted_content: str | None = None


_ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
}
register(
    ResponsesRequest,
    ResponseInput,
    *_ITEMS.values(),
    ItemText,
    ItemImage,
    parts=(
        ResponseTool,
        ResponseToolChoice,
        TextFormat,
        TextConfig,
        ReasoningConfig,
        ResponseStreamOptions,
    ),
)


def read_items(given: str | Sequence[Mapping[str, Any]], path: str) -> list[Item]:
    """The items, or a 400 that names the one at fault."""
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


def as_messages(
    items: Sequence[Item], path: str, *, kept: bool = False
) -> list[tuple[Message, str]]:
    """The messages of a chat, each with the place of its first item. A 400 names the item that can't be one. `kept`: the items
    are of answers that this server keeps, whose calls have what the model wrote, JSON or not."""
    found: list[tuple[Message, str]] = []
    own: Message | None = None  # of the assistant, which the next item may belong to
    for i, item in enumerate(items):
        where = f"{path}[{i}]"
        if isinstance(item, FunctionOutputItem):
            text = _text(item.output, f"{where}.output")
            found.append((Message(role="tool", content=text, tool_call_id=item.call_id), where))
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
        elif isinstance(item, FunctionCallItem):
            if kept:
                arguments = msgspec.json.encode(written_arguments(item.arguments)).decode()
            else:
                arguments_object(item.arguments, f"{where}.arguments")
                arguments = item.arguments
            call = ToolCall(
                id=item.call_id, function=CalledFunction(name=item.name, arguments=arguments)
            )
            own.tool_calls = [*(own.tool_calls or ()), call]
    return found


def _parts(content: str | list[dict[str, Raw]], path: str) -> str | list[dict[str, Raw]]:
    """A message's content as a chat has it: one text, or parts if there are pictures."""
    if isinstance(content, str) or not any(
        bytes(part.get("type", b"")) == b'"input_image"' for part in content
    ):
        return _text(content, path)
    found = []
    for i, part in enumerate(content):
        if bytes(part.get("type", b"")) == b'"input_image"':
            image = decode(ItemImage, msgspec.json.encode(part), f"{path}[{i}].")
            if image.image_url is None:
                if image.file_id is not None:
                    raise bad_request(
                        "files are not kept: send the picture as image_url", f"{path}[{i}].file_id"
                    )
                raise bad_request("send the picture, as a data: URI", f"{path}[{i}].image_url")
            found.append(picture_part(image.image_url, image.detail))
        else:
            found.append(text_part(_text([part], path)))
    return found


def _text(content: str | list[dict[str, Raw]], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if not re.fullmatch(
            rb'"(input|output|summary|reasoning)_text"', bytes(part.get("type", b""))
        ):
            raise bad_request(
                "only text is supported here: parts of type input_text and output_text",
                f"{path}[{i}].type",
            )
        texts.append(decode(ItemText, msgspec.json.encode(part), f"{path}[{i}].").text)
    return "".join(texts)
