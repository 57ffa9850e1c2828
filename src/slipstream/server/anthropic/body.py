"""Bodies of Anthropic's /v1/messages, and their translation into a chat.

1. Tool results are blocks of a user's message. Each becomes a message of the role `tool`.
2. If the last message is the assistant's, the answer continues it.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from slipstream.server.answers.cache_hints import Breakpoints, breakpoints
from slipstream.server.answers.changing_lines import BILLING
from slipstream.server.answers.generation import encode
from slipstream.server.answers.hints import ABSENT, AnyHint, Hint, given_hints
from slipstream.server.answers.structured import JsonSchema, ResponseFormat
from slipstream.server.answers.tools import (
    MAX_TOOLS,
    CalledFunction,
    FunctionSpec,
    Name,
    NamedChoice,
    NamedFunction,
    SentToolCall,
    ToolSpec,
    chat_template,
    reasons,
    thinking_fields,
)
from slipstream.server.http.decoding import OFF, decode, decode_raw, refuse_unless_off, register
from slipstream.server.http.errors import bad_request
from slipstream.server.openai.messages import Message, picture_part, text_part
from slipstream.server.openai.protocol import ChatRequest, Int, Text
from slipstream.server.state import ServerState


class CacheControl(Struct, forbid_unknown_fields=True, kw_only=True):
    """Marks the end of a prefix to cache. All prefixes are cached; a marked one is valued higher for the time of its
    `ttl`."""

    type: Literal["ephemeral"]
    ttl: str | None = None
    scope: AnyHint = ABSENT


class AnthropicPart(Struct, forbid_unknown_fields=True, kw_only=True):
    cache_control: CacheControl | None = None


class TextBlock(AnthropicPart, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text"]
    text: str
    citations: Raw = OFF

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {"citations": (b"null", b"[]")}


class Base64Source(Struct, forbid_unknown_fields=True, tag_field="type", tag="base64"):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Struct, forbid_unknown_fields=True, tag_field="type", tag="url"):
    url: str


class ImageBlock(AnthropicPart, forbid_unknown_fields=True, kw_only=True):
    type: Literal["image"]
    source: Base64Source | UrlSource
    # about images that are too large; ours are resized by the model's own rules
    transformations: AnyHint = ABSENT


class ThinkingPart(AnthropicPart, forbid_unknown_fields=True, kw_only=True):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""  # always empty in our answers


class RedactedThinkingPart(AnthropicPart, forbid_unknown_fields=True, kw_only=True):
    """Thoughts that another provider encrypted. The model can't read them, so they are dropped."""

    type: Literal["redacted_thinking"]
    data: str = ""


class DocumentPart(AnthropicPart, forbid_unknown_fields=True, kw_only=True):
    """A document of text or parts. The model reads its title, context and text."""

    type: Literal["document"]
    source: dict[str, Raw]
    title: str | None = None
    context: str | None = None
    citations: Raw = OFF

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {"citations": (b"null", b'{"enabled":false}')}

    def text(self, path: str) -> str:
        kind = decode_raw(self.source.get("type", Raw(b"null")), f"{path}.source.type")
        if kind == "text":
            said = decode_raw(self.source.get("data", Raw(b"null")), f"{path}.source.data")
        elif kind == "content":
            content = decode_raw(self.source.get("content", Raw(b"null")), f"{path}.source.content")
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            given = [{k: Raw(encode(v)) for k, v in part.items()} for part in parts]
            said, _ = _texts_and_pictures(given, "a document", f"{path}.source.content")
        else:
            raise bad_request(
                "a document must be of type text or content; send its text, or its pages as pictures",
                f"{path}.source.type",
            )
        if not isinstance(said, str):
            raise bad_request("a document's data must be a text", f"{path}.source.data")
        return "\n".join(part for part in (self.title, self.context, said) if part)


class SearchResultPart(AnthropicPart, forbid_unknown_fields=True, kw_only=True):
    """A passage that the client found. The model reads its title, source and text."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[dict[str, Raw]]
    citations: Raw = OFF

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {"citations": (b"null", b'{"enabled":false}')}

    def text(self, path: str) -> str:
        said, _ = _texts_and_pictures(self.content, "a search result", f"{path}.content")
        return "\n".join((self.title, self.source, said))


class ToolReferencePart(AnthropicPart, forbid_unknown_fields=True, kw_only=True):
    type: Literal["tool_reference"]
    tool_name: str


class ToolUsePart(AnthropicPart, forbid_unknown_fields=True, kw_only=True):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Raw = OFF
    toolset_name: AnyHint = ABSENT  # a label

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {"caller": (b"null", b'{"type":"direct"}')}


class ToolResultPart(AnthropicPart, forbid_unknown_fields=True, kw_only=True):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[dict[str, Raw]] = ""
    is_error: bool = False
    toolset_name: AnyHint = ABSENT


_PARTS: dict[str, dict[str, type[AnthropicPart]]] = {
    "user": {
        "text": TextBlock,
        "image": ImageBlock,
        "tool_result": ToolResultPart,
        "document": DocumentPart,
        "search_result": SearchResultPart,
    },
    "assistant": {
        "text": TextBlock,
        "thinking": ThinkingPart,
        "redacted_thinking": RedactedThinkingPart,
        "tool_use": ToolUsePart,
    },
    "system": {"text": TextBlock},
    "a tool's result": {
        "text": TextBlock,
        "image": ImageBlock,
        "document": DocumentPart,
        "search_result": SearchResultPart,
        "tool_reference": ToolReferencePart,
    },
    "a search result": {"text": TextBlock},
    "a document": {"text": TextBlock},
}


class AnthropicMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Raw]]


class AnthropicTool(Struct, forbid_unknown_fields=True, kw_only=True):
    name: Name
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: AnyHint = ABSENT  # arguments are always streamed
    defer_loading: AnyHint = ABSENT  # the model is told of all tools at once
    input_examples: AnyHint = ABSENT
    allowed_callers: Raw = OFF

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {"allowed_callers": (b"null", b'["direct"]')}


HOSTED = re.compile(
    r"(web_search|web_fetch|code_execution|tool_search_tool|advisor)(_.*)?|mcp_toolset"
)
"""Types of tools that the provider runs. The model is not told about them, so it can't call them."""


class AnthropicChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, forbid_unknown_fields=True, kw_only=True):
    """Settings of thinking. `budget_tokens` is an upper limit that holds exactly."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = None
    display: Hint[str | None] = None  # reasoning is always sent in full
    block_binding: AnyHint = ABSENT  # thoughts that come back are not checked


class OutputFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    format: OutputFormat | None = None
    effort: str | None = None
    task_budget: AnyHint = ABSENT


class CountTokensRequest(Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """POST /v1/messages/count_tokens: the number of tokens of such a request"""

    model: str | None
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    system: str | list[dict[str, Raw]] | None = None
    tools: Annotated[list[dict[str, Raw]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # former name of output_config.format
    cache_control: CacheControl | None = None
    betas: AnyHint = ABSENT
    anthropic_beta: AnyHint = ABSENT  # from Amazon Bedrock's clients, like the next
    anthropic_version: AnyHint = ABSENT
    context_management: AnyHint = ABSENT  # nothing is edited; the answer says so
    speed: AnyHint = ABSENT
    inference_geo: AnyHint = ABSENT
    user_profile_id: AnyHint = ABSENT
    workspace_id: AnyHint = ABSENT
    diagnostics: AnyHint = ABSENT
    billing_policy: AnyHint = ABSENT
    fallbacks: AnyHint = ABSENT  # models to try if this one refuses for its provider's policies
    fallback_credit_token: AnyHint = ABSENT
    compaction: Raw = OFF
    container: Raw = OFF
    mcp_servers: Raw = OFF
    thread: Raw = OFF  # see `error_body`

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {
        "compaction": (b"null",),
        "container": (b"null",),
        "mcp_servers": (b"null", b"[]"),
        "thread": (b"null",),
    }

    def check(self) -> None:
        """Raise a 400 for what the schema cannot express."""
        refuse_unless_off(self, self.off)
        choice = self.tool_choice
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise bad_request(
                "tool_choice needs a name if its type is 'tool', and takes none otherwise",
                "tool_choice.name",
            )
        thinking = self.thinking
        if thinking is not None and (thinking.type == "enabled") != (
            thinking.budget_tokens is not None
        ):
            raise bad_request(
                "thinking needs budget_tokens if its type is 'enabled', and takes none otherwise",
                "thinking.budget_tokens",
            )

    def param(self, field: str | None) -> str | None:
        """This body's own name of a field of the translated chat."""
        if field is None:
            return None
        if field.startswith("structured_outputs"):
            return (
                "output_config.format.schema" if field.endswith(".json") else "output_config.format"
            )
        if field.startswith("tools["):
            return field.replace(".function.parameters", ".input_schema")
        if match := re.fullmatch(r"messages\[(\d+)]\.content\[(\d+)](\.image_url.*)?", field):
            return self._place(int(match[1]), int(match[2])) + (".source" if match[3] else "")
        return _NAMES.get(field, field)

    def _place(self, index: int, part: int) -> str:
        """Path in this body of the image that is `part` in the chat's message `index`."""
        index -= bool(self.prompt)
        for i, message in enumerate(self.messages):
            made, places = _messages(message, f"messages[{i}]")
            if index < len(made):
                return places[part]
            index -= len(made)
        return "messages"

    @cached_property
    def prompt(self) -> str:
        """The system prompt. Set by `chat`, which knows the server's settings."""
        return _system(self.system, billing=False)

    @cached_property
    def functions(self) -> tuple[list[AnthropicTool], list[str]]:
        """(tools that the model can call; hints: fields of tools and types of hosted ones)."""
        found, hints = list[AnthropicTool](), list[str]()
        for i, tool in enumerate(self.tools or ()):
            kind = decode_raw(tool.get("type", Raw(b"null")), f"tools[{i}].type")
            if isinstance(kind, str) and (hosted := HOSTED.fullmatch(kind)):
                hints.append(f"tools.{hosted[1] or kind}")
                continue
            if kind not in (None, "custom"):
                raise bad_request(
                    f"a tool of type {str(kind)[:60]!r} has no schema here; give it as a custom one, with its input_schema",
                    f"tools[{i}].type",
                )
            made = decode(AnthropicTool, msgspec.json.encode(tool), f"tools[{i}].")
            refuse_unless_off(made, made.off, f"tools[{i}].")
            hints += given_hints(made, "tools.")
            found.append(made)
        return found, list(dict.fromkeys(hints))

    def ignores_thinking(self, state: ServerState) -> bool:
        """Whether thinking is requested of a model that can't think. Then it is a hint: the answer
        has no thoughts."""
        return (
            self.thinking is not None
            and self.thinking.type != "disabled"
            and not reasons(state, chat_template(state))
        )

    def more_hints(self) -> list[str]:
        return self.functions[1]

    def chat(self, state: ServerState, **more: Any) -> ChatRequest:
        """Translates this body to a chat request."""
        self.prompt = _system(self.system, billing=state.settings.changing_lines == "keep")
        messages = [Message(role="system", content=self.prompt)] if self.prompt else []
        for i, message in enumerate(self.messages):
            messages += _messages(message, f"messages[{i}]")[0]
        choice, output = self.tool_choice, self.output_config
        asked = (output.format if output is not None else None) or self.output_format
        continued = self.messages[-1].role == "assistant"
        chosen: Literal["none", "auto", "required"] | NamedChoice | None = None
        if choice is not None:
            chosen = _CHOICES.get(choice.type) or NamedChoice(
                type="function", function=NamedFunction(name=choice.name or "")
            )
        tools = [ToolSpec(type="function", function=_function(tool)) for tool in self.functions[0]]
        one_call = choice is not None and choice.disable_parallel_tool_use and bool(tools)
        return ChatRequest(
            model=self.model,
            messages=messages,
            response_format=None
            if asked is None
            else ResponseFormat(
                type="json_schema", json_schema=JsonSchema(name="output", schema=asked.schema)
            ),
            reasoning_effort=output.effort if output is not None else None,
            tools=tools or None,
            tool_choice=chosen,
            parallel_tool_calls=False if one_call else None,
            continue_final_message=continued or None,
            **self._thinking(state),
            **more,
        )

    def _thinking(self, state: ServerState) -> dict[str, Any]:
        """Translates `thinking` to fields of a chat request."""
        thinking = self.thinking
        if thinking is None or thinking.type == "adaptive" or self.ignores_thinking(state):
            return {}
        fields = thinking_fields(state, "thinking", asked=thinking.type == "enabled")
        if thinking.budget_tokens is not None:
            fields["thinking_token_budget"] = thinking.budget_tokens
        return fields


class MessagesRequest(CountTokensRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages: an answer to messages, in Anthropic's format"""

    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    stream: bool | None = None
    stop_sequences: Annotated[list[Text], Meta(max_length=64)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: Int | None = None
    metadata: AnyHint = ABSENT
    service_tier: AnyHint = ABSENT
    # Our extensions, and vLLM's.
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    priority: Int | None = None
    cache_salt: Text | None = None
    prompt_cache_key: Raw = ABSENT
    end_of_branch: bool | None = None

    def check(self) -> None:
        super().check()
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget < 1024:  # above max_tokens it has no effect
            raise bad_request("budget_tokens must be 1024 or more", "thinking.budget_tokens")

    @cached_property
    def breakpoints(self) -> Breakpoints:
        """The breakpoints of tools, system prompt and messages, the order that Anthropic documents."""
        own = (
            {}
            if self.cache_control is None
            else {"cache_control": Raw(encode({"ttl": self.cache_control.ttl}))}
        )
        parts = [*(self.tools or ())]
        for content in (self.system, *(message.content for message in self.messages)):
            parts += (
                content if isinstance(content, list) else [{"text": Raw(encode(content or ""))}]
            )
        return breakpoints([*parts, own])

    def chat(self, state: ServerState, **more: Any) -> ChatRequest:
        given = {name: getattr(self, name) for name in _SAME}
        return super().chat(
            state, max_tokens=self.max_tokens, stop=self.stop_sequences, **given, **more
        )


_SAME = (
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_p",
    "repetition_penalty",
    "priority",
    "cache_salt",
    "prompt_cache_key",
    "end_of_branch",
)
_NAMES = {
    **dict.fromkeys(("prompt", "prompt_token_ids", "image"), "messages"),
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking",
    "tool_choice.function.name": "tool_choice.name",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
}
_CHOICES: dict[str, Literal["none", "auto", "required"]] = {
    "auto": "auto",
    "any": "required",
    "none": "none",
}
register(
    MessagesRequest,
    CountTokensRequest,
    *{kind for kinds in _PARTS.values() for kind in kinds.values()},
    AnthropicTool,
    parts=(
        *(Base64Source, UrlSource),
        *(CacheControl, AnthropicMessage, AnthropicChoice, Thinking, OutputConfig, OutputFormat),
    ),
)


def _function(tool: AnthropicTool) -> FunctionSpec:
    return FunctionSpec(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )


def _parts(
    content: list[dict[str, Raw]], role: str, path: str, what: str = ""
) -> list[AnthropicPart]:
    known, found = _PARTS[role], []
    for i, part in enumerate(content):
        tag = bytes(part.get("type", b"")).decode(errors="replace").strip('"')
        kind = known.get(tag)
        if kind is None:  # Anthropic's wording; clients look for the tag and then omit it
            tags = ", ".join(f"'{one}'" for one in known)
            message = f"Input tag '{tag[:60]}' found using 'type' does not match any of the expected tags: {tags}"
            raise bad_request(f"{message} (in a block of {what or role})", f"{path}[{i}].type")
        made = decode(kind, msgspec.json.encode(part), f"{path}[{i}].")
        if isinstance(made, TextBlock | ToolUsePart | DocumentPart | SearchResultPart):
            refuse_unless_off(made, made.off, f"{path}[{i}].")
        found.append(made)
    return found


def _system(content: str | list[dict[str, Raw]] | None, *, billing: bool) -> str:
    """The system prompt's text, with or without the billing blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = _parts(content, "system", "system")
    texts = [part.text for part in parts if isinstance(part, TextBlock)]
    return "".join(text for text in texts if billing or not text.startswith(BILLING))


def _texts_and_pictures(
    content: str | list[dict[str, Raw]], what: str, path: str
) -> tuple[str, list[tuple[dict[str, Raw], str]]]:
    """(text of a tool result, document or search result; its images with their paths in the
    body)."""
    if isinstance(content, str):
        return content, []
    texts, pictures = list[str](), list[tuple[dict[str, Raw], str]]()
    for i, part in enumerate(_parts(content, what, path)):
        match part:
            case TextBlock():
                texts.append(part.text)
            case ImageBlock():
                pictures.append((picture_part(part.source.url, None), f"{path}[{i}]"))
            case DocumentPart() | SearchResultPart():
                texts.append(part.text(f"{path}[{i}]"))
            case ToolReferencePart():
                texts.append(f"The tool {part.tool_name} is there.")
    return "".join(texts), pictures


def _messages(message: AnthropicMessage, path: str) -> tuple[list[Message], list[str]]:
    """(chat messages for one Anthropic message, path in the body of each part of the last one).

    Images of a tool result are moved to a user message after it, because chat templates only
    support images there.
    """
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)], [f"{path}.content"]
    found: list[Message] = []
    places = list[str]()
    texts, thoughts, calls = list[str](), list[str](), list[SentToolCall]()
    parts = list[dict[str, Raw]]()  # texts and pictures in order
    for i, part in enumerate(_parts(message.content, message.role, f"{path}.content")):
        match part:
            case TextBlock():
                texts.append(part.text)
                parts.append(text_part(part.text))
                places.append(f"{path}.content[{i}]")
            case DocumentPart() | SearchResultPart():
                text = part.text(f"{path}.content[{i}]")
                texts.append(text)
                parts.append(text_part(text))
                places.append(f"{path}.content[{i}]")
            case ImageBlock():
                parts.append(picture_part(part.source.url, None))
                places.append(f"{path}.content[{i}]")
            case ThinkingPart():
                thoughts.append(part.thinking)
            case ToolUsePart():
                called = CalledFunction(name=part.name, arguments=encode(part.input).decode())
                calls.append(SentToolCall(id=part.id, function=called))
            case ToolResultPart():
                if texts:
                    raise bad_request(
                        "tool results must come before a message's text", f"{path}.content[{i}]"
                    )
                result, pictures = _texts_and_pictures(
                    part.content, "a tool's result", f"{path}.content[{i}].content"
                )
                text = f"Error: {result}" if part.is_error else result
                found.append(Message(role="tool", content=text, tool_call_id=part.tool_use_id))
                parts += [picture for picture, _ in pictures]
                places += [place for _, place in pictures]
    if parts or calls or not found:
        said = Message(
            role=message.role, content="".join(texts) if len(parts) == len(texts) else parts
        )
        said.reasoning_content = "".join(thoughts) or None
        said.tool_calls = calls or None
        found.append(said)
    return found, places
